"""A GPU without a GPU. Under torch's FakeTensorMode tensors say that they are on cuda and hold no numbers, and an
operation on tensors of two devices is refused, as on a real GPU."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

import common
import fedfm
import fedlsa
import fedplcc
import fedproto
import fedsa
import fedtgp
from test_equations import LOSSES

B, K, C, D = 5, 4, 3, 8
ARGS = SimpleNamespace(seed=0, batch_size=4, lr=0.1, momentum=0.9, weight_decay=0.01, server_epochs=1, server_steps=2,
                       alpha=0.5, tau=0.5, finch_level="last", uniform_weights=False)


@pytest.fixture
def on_cuda(monkeypatch):
    """on_cuda(function, ...) -> where the tensor lies that function(...) returns. What it makes lies on cuda, too."""
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: None)  # needs a driver

    def go(function, *arguments):
        shapes = ShapeEnv(allow_dynamic_output_shape_ops=True, allow_scalar_outputs=True)
        with FakeTensorMode(shape_env=shapes), torch.device("cuda"):
            return function(*arguments).device.type
    return go


def features():
    """z (B, D), y (B,), prototypes or anchors (C, D), known (C,)."""
    return torch.rand(B, D), torch.zeros(B, dtype=torch.long), torch.rand(C, D), torch.ones(C, dtype=torch.bool)


def uploads():
    """Means (K, C, D) of clients, their counts (K, C)."""
    return torch.rand(K, C, D), torch.ones(K, C, dtype=torch.long)


def net():
    extractor = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, D))
    return common.Net(extractor, torch.nn.Linear(D, C), D, C)


def images():
    return common.Images(torch.zeros(B, 3, 2, 2, dtype=torch.uint8), torch.zeros(B, dtype=torch.long))


def waits(reason):
    """What asks for a number in the tensors: on a GPU the host waits there, and here there is none."""
    return pytest.mark.xfail(reason=reason, raises=GuardOnDataDependentSymNode, strict=False)


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, on_cuda):
    """Catches: a mask, a range or a zero that is made on the CPU."""
    ours, _ = LOSSES[name]
    assert on_cuda(lambda: ours(*features())) == "cuda"


def fedplcc_losses():
    z, y, vectors, _ = features()
    classes, weights = torch.arange(C), torch.rand(C)
    own = classes == y[:, None]
    s = fedplcc.similarity(z, vectors, 0.5)
    losses = fedplcc.contrast(s, own, weights, 0.07) + fedplcc.attraction(s, own, weights, 0.5)
    return (losses * own.any(1)).sum()


def fedfm_anchors(how):
    args = SimpleNamespace(aggregate=how)
    return fedfm.new_anchors(*uploads(), torch.rand(C, D), torch.ones(C, dtype=torch.bool), args)[0]


def fedplcc_prototypes():
    sent = fedplcc.Clusters(torch.rand(B, D), torch.zeros(B, dtype=torch.long), torch.ones(B))
    return fedplcc.global_prototypes([sent, sent], ARGS).vectors


def fedtgp_server():
    local, counts = uploads()
    return fedtgp.server_update(fedtgp.GlobalPrototypes(C, D), local, counts > 0, torch.ones(()), 1, ARGS)[0]


def fedlsa_server():
    anchors, _ = fedlsa.server_update(fedlsa.AnchorNet(C, 5, D), net().classifier, ARGS)
    return anchors


NUMBER = waits("how many vectors there are depends on the uploads")
STEPS = [
    pytest.param(fedplcc_losses, id="fedplcc's losses"),
    pytest.param(lambda: net()(images().x), id="a model"),
    pytest.param(lambda: common.class_means(net(), images())[0], marks=NUMBER, id="class means"),
    pytest.param(lambda: common.average([net().state_dict()] * K, [1, 2, 3, 4])["classifier.bias"], id="average"),
    pytest.param(lambda: common.nearest_prototype(features()[0], *features()[2:]), id="the nearest prototype"),
    pytest.param(lambda: fedproto.weighted_mean(*uploads())[0], id="fedproto's mean"),
    pytest.param(lambda: fedproto.weighted_mean(*uploads(), "uniform")[0], id="fedproto's plain mean"),
    pytest.param(lambda: fedtgp.adaptive_margin(uploads()[0], uploads()[1] > 0), marks=NUMBER, id="fedtgp's margin"),
    pytest.param(fedtgp_server, marks=NUMBER, id="fedtgp's server"),
    pytest.param(lambda: fedsa.average_margin(torch.rand(C, D)), id="fedsa's margin"),
    pytest.param(lambda: fedsa.classifier_calibration(net().classifier, torch.rand(C, D)), id="fedsa's calibration"),
    pytest.param(lambda: fedsa.ema(torch.rand(C, D), *fedsa.weighted_mean(*uploads()), 0.9), id="fedsa's anchors"),
    pytest.param(fedlsa_server, id="fedlsa's server"),
    pytest.param(fedplcc_prototypes, marks=NUMBER, id="fedplcc's prototypes"),
    pytest.param(lambda: fedfm_anchors("weighted"), id="fedfm's anchors"),
    pytest.param(lambda: fedfm_anchors("uniform"), id="fedfm's plain anchors"),
    pytest.param(lambda: fedfm.proximal(net(), [p.detach() for p in net().parameters()]), id="fedprox"),
]


@pytest.mark.parametrize("step", STEPS)
def test_steps(step, on_cuda):
    """Catches: a step of a client or the server that makes a tensor on the CPU and mixes it with those on the GPU."""
    assert on_cuda(step) == "cuda"


def test_augment(on_cuda):
    """Catches: a grid that stays on the CPU, where the angles are drawn."""
    assert on_cuda(lambda: fedfm.augment(images().x, np.random.default_rng(0))) == "cuda"


@pytest.mark.parametrize("name", LOSSES)
def test_two_devices_are_refused(name, on_cuda):
    """Catches: a mode that lets everything pass, which would make this file worth nothing."""
    ours, _ = LOSSES[name]
    with pytest.raises(RuntimeError, match="device"):
        on_cuda(lambda: ours(torch.rand(B, D, device="cpu"), torch.zeros(B, dtype=torch.long), *features()[2:]))
