"""CUDA graphs: what a captured step must not change. Without a GPU the capture itself is replaced by its slow equivalent."""

import inspect

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import common
from test_scripts import log, numbers

SCRIPTS = [(name, "--model cnn4 --local-epochs 1 --subset 0.05 --clients 5 --rounds 3 --no-plots " + words) for name, words in (
    ("fedproto", "--participation 0.5 --momentum 0.9"), ("fedtgp", "--server-epochs 5"), ("fedsa", "--local-epochs 2"))]
SCRIPTS += [(name, "--rounds 3 --no-plots --domain-fraction 5 --local-epochs 1 --batch-size 16 --model resnet4 " + words) for name, words in (
    ("fedlsa", "--server-steps 20"), ("fedplcc", "--weight-decay 1e-3"), ("fedfm", "--lite --model-every 2 --prox 0.1"))]


def fake_capture(run):
    """Runs where a real capture only records; a replay runs the first round's closure again, as a graph would."""
    value = run()
    return lambda: value.copy_(run()), value


@pytest.mark.parametrize("script,words", SCRIPTS, ids=[s for s, _ in SCRIPTS])
def test_captured_steps_give_the_eager_result(script, words, run, monkeypatch):
    module = __import__(script)
    *_, eager = run(module, *words.split())
    records, record = [], common.record
    monkeypatch.setattr(common, "record", lambda *args: records.append(args) or record(*args))
    monkeypatch.setattr(common, "capturable", lambda module: True)
    monkeypatch.setattr(common, "capture", fake_capture)
    *_, captured = run(module, *words.split())
    assert numbers(eager) == numbers(captured)
    modules = {id(args[0]) for args in records}
    if script in ("fedproto", "fedtgp", "fedsa"):  # once per model and shape of batch, not once per round
        assert len(modules) <= 7 and len(records) == len({(id(args[0]), str(common.shapes(args[3]))) for args in records})


@pytest.mark.parametrize("script,words", SCRIPTS, ids=[s for s, _ in SCRIPTS])
def test_a_loss_can_be_captured(script, words, run, monkeypatch):
    """A tensor in the closure would be the first round's for ever, or memory that is gone; an operation whose result has a
    size that depends on values needs the host, which a capture refuses."""
    closures, operations, sgd_step = [], set(), common.sgd_step

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            masks = function is torch.ops.aten.index.Tensor and [i for i in args[1] if i is not None and i.dtype == torch.bool]
            operations.add("index by mask" if masks else function.name())
            return function(*args, **(kwargs or {}))

    def spied(loss):
        def run(*tensors):
            with Spy():
                return loss(*tensors)
        return run

    def checked(module, loss, *rest, **more):
        closures.append([name for name, value in inspect.getclosurevars(loss).nonlocals.items() if isinstance(value, torch.Tensor)])
        return sgd_step(module, spied(loss), *rest, **more)
    monkeypatch.setattr(__import__(script), "sgd_step", checked)
    run(__import__(script), *words.split())
    assert closures and not any(closures)
    assert "aten::addmm" in operations and not operations & {"index by mask", "aten::nonzero", "aten::masked_select", "aten::_unique2"}


def test_an_impossible_capture_falls_back_to_eager(run, monkeypatch, capsys):
    import fedsa
    words = SCRIPTS[2][1].split()
    *_, eager = run(fedsa, *words)
    monkeypatch.setattr(common, "capturable", lambda module: common.GRAPHS)

    def refuse(run):
        run()
        raise RuntimeError("operation not permitted when stream is capturing")
    monkeypatch.setattr(common, "capture", refuse)
    *_, fallback = run(fedsa, *words)
    assert numbers(eager) == numbers(fallback)


def test_a_capture_in_the_middle_of_a_round_keeps_weights_and_momentum(monkeypatch):
    """Another shape of batch is met when momentum is already under way."""
    x, ends = [torch.randn(n, 3) for n in (8, 8, 5, 8, 5)], []
    for captured in (False, True):
        monkeypatch.setattr(common, "GRAPHS", True)
        monkeypatch.setattr(common, "capturable", lambda module: captured)
        monkeypatch.setattr(common, "capture", fake_capture)
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        for _ in range(2):
            step = common.sgd_step(net, lambda x: net(x).square().mean() + net[0].weight.sum(), 0.1, 0.9, 1e-3)
            losses = [step(batch) for batch in x]
        ends.append([*net.state_dict().values(), *losses])
    assert all(torch.equal(a, b) for a, b in zip(*ends))


def test_no_graph_captures_nothing(run, monkeypatch):
    import fedproto
    monkeypatch.setattr(common, "capturable", lambda module: common.GRAPHS)
    monkeypatch.setattr(common, "record", None)
    run(fedproto, *SCRIPTS[0][1].split(), "--no-graph")


def test_captured_steps_are_given_back_with_their_model(monkeypatch):
    """The graph of a global method's copy of the model goes with the copy."""
    monkeypatch.setattr(common, "capturable", lambda module: True)
    monkeypatch.setattr(common, "capture", lambda run: (lambda: None, run()))
    before = len(common.CAPTURED)
    net = torch.nn.Linear(3, 2)
    step = common.sgd_step(net, lambda x: net(x).square().sum(), 0.1)
    step(torch.ones(4, 3))
    assert len(common.CAPTURED) == before + 1
    del net, step
    assert len(common.CAPTURED) == before


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@cuda
@pytest.mark.parametrize("script,words", SCRIPTS, ids=[s for s, _ in SCRIPTS])
def test_graph_and_eager_agree_on_cuda(script, words, run):
    module = __import__(script)
    *_, eager = run(module, *words.split(), "--device", "cuda", "--no-graph")
    *_, graph = run(module, *words.split(), "--device", "cuda")
    assert common.GRAPHS, "the capture failed"
    for a, b in zip(log(eager), log(graph)):
        assert {k: v for k, v in a.items() if "loss" in k} == pytest.approx({k: v for k, v in b.items() if "loss" in k}, rel=1e-2)


@cuda
def test_more_clients_than_streams_on_cuda(run):
    import fedproto
    words = "--clients 80 --partition iid --rounds 3 --no-plots --subset 0.5 --workers 8 --device cuda".split()
    (eager,), *_ = run(fedproto, *words, "--no-graph")
    (graph,), *_ = run(fedproto, *words)
    assert common.GRAPHS and graph["final"] == pytest.approx(eager["final"], abs=3)


@cuda
def test_warm_up_restores_weights_buffers_and_momentum():
    with torch.cuda.stream(torch.cuda.Stream()):
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).cuda()
        twin = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).cuda()
        twin.load_state_dict(net.state_dict())
        x = [torch.randn(n, 3, device="cuda") for n in (8, 8, 5, 8)]
        for _ in range(2):  # two rounds: momentum starts at zero in each, and is kept when another shape is captured
            step = common.sgd_step(net, lambda x: net(x).square().mean(), 0.1, 0.9, 1e-3)
            common.GRAPHS = False
            plain = common.sgd_step(twin, lambda x: twin(x).square().mean(), 0.1, 0.9, 1e-3)
            for batch in x:
                plain(batch)
            common.GRAPHS = True
            for batch in x:
                step(batch)
        for a, b in zip(net.state_dict().values(), twin.state_dict().values()):
            assert torch.allclose(a, b, atol=1e-6)
