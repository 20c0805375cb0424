"""CUDA graphs: what a captured step must not change. Without a GPU a stand-in runs what would be recorded."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import common
from conftest import SMALL, every_script, log, numbers
from test_resume import MORE

WORDS = {script: f"{SMALL[script]} {MORE[script]} --rounds 3" for script in SMALL}

@pytest.fixture
def captures(monkeypatch):
    """Modules say that they are on CUDA. What a capture would record is run; a replay copies into the first
    inputs and runs the closure of the first round, as a graph would, and loss and gradients are always the same
    memory. -> the captured (module, inputs)."""
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(common, "graph_pool", lambda: None)
    monkeypatch.setattr(common, "graph_stream", lambda: SimpleNamespace(wait_stream=lambda _: None))
    for name in ("graph", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: contextlib.nullcontext())
    captured, record = [], common.record

    def stand_in(passes, module, inputs):
        graph, inputs, loss, gradients = record(passes, module, inputs)
        captured.append((module, inputs))

        def replay():
            loss.copy_(passes(*inputs))
            for held, p in zip(gradients, module.parameters()):
                held.copy_(p.grad)
                p.grad = None
        graph.replay = replay
        return graph, inputs, loss, gradients
    monkeypatch.setattr(common, "record", stand_in)
    return captured

@every_script
def test_captured_steps_give_the_eager_result(script, run, captures):
    eager = run(script, WORDS[script], "--no-graph")
    assert not captures
    assert numbers(run(script, WORDS[script])) == numbers(eager)
    shapes = [(id(module), *((x.shape, x.dtype) for x in tensors)) for module, tensors in captures]
    assert len(shapes) == len(set(shapes))  # once per module and shapes, not once per round
    assert bool(shapes) == (script != "fedplcc")  # whose number of prototypes changes

@every_script
def test_a_loss_can_be_captured(script, run, monkeypatch):
    """An operation whose result's size depends on values needs the host, which a capture refuses."""
    operations, step = set(), common.sgd_step

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            index = args[1] if function is torch.ops.aten.index.Tensor else ()
            mask = any(i is not None and i.dtype == torch.bool for i in index)
            operations.add("index by mask" if mask else function.name())
            return function(*args, **(kwargs or {}))

    def spied(module, loss, *rest, graph=True, **more):
        def watched(*tensors):
            with Spy():
                return loss(*tensors)
        return step(module, watched if graph else loss, *rest, **more)
    monkeypatch.setattr(__import__(script), "sgd_step", spied)
    run(script, SMALL[script])
    assert ("aten::addmm" in operations) == (script != "fedplcc")
    assert not operations & {"index by mask", "aten::nonzero", "aten::masked_select", "aten::_unique2"}

def train(device, graph):
    """Two rounds of batches of two shapes: the second is captured when momentum is under way."""
    torch.manual_seed(0)
    x = [torch.randn(n, 3).to(device) for n in (8, 8, 5, 8, 5)]
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).to(device)
    args = SimpleNamespace(lr=0.1, momentum=0.9, weight_decay=1e-3, no_graph=not graph)
    losses = []
    for _ in range(2):
        step = common.sgd_step(net, lambda net, x, _: net(x).square().mean() + net[0].weight.sum(), args)
        losses += [step(batch) for batch in x]
    return [*net.state_dict().values(), *losses]

def test_a_capture_in_the_middle_of_a_round_keeps_weights_buffers_and_momentum(captures):
    eager, captured = train("cpu", False), train("cpu", True)
    assert len(captures) == 2 and all(torch.equal(a, b) for a, b in zip(eager, captured))

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

@cuda
@every_script
def test_graph_and_eager_agree_on_cuda(script, run):
    words = WORDS[script] + " --device cuda --trials 2"
    for a, b in zip(*(log(run(script, words, flag).folder) for flag in ("", "--no-graph")), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-2)

@cuda
def test_a_real_capture_keeps_weights_buffers_and_momentum():
    eager, graph = train("cuda", False), train("cuda", True)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(eager, graph))
