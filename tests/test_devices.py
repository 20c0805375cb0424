"""A GPU without a GPU. Under torch's FakeTensorMode tensors say that they are on cuda and hold no numbers, and an
operation on tensors of two devices is refused, as on a real GPU. The inputs below are made on cuda; what a step makes
without saying where is on the CPU. Steps that need a number from a tensor are left out."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import common
import fedfm
import fedlsa
import fedplcc
import fedproto
import fedsa
import fedtgp

B, K, C, D = 5, 4, 3, 8
ARGS = SimpleNamespace(lr=0.1, momentum=0.9, weight_decay=0.01, server_steps=2, alpha=0.5, tau=0.5)


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: None)  # needs a driver
    with FakeTensorMode():
        yield


def vectors(n=C):
    return torch.rand(n, D, device="cuda")


def features():
    """z (B, D), y (B,), prototypes or anchors (C, D)."""
    return vectors(B), torch.zeros(B, dtype=torch.long, device="cuda"), vectors()


def known():
    return torch.ones(C, dtype=torch.bool, device="cuda")


def anchors():
    return fedfm.Anchors(vectors(), known())


def uploads():
    """Means (K, C, D) of clients, their counts (K, C)."""
    return torch.rand(K, C, D, device="cuda"), torch.ones(K, C, dtype=torch.long, device="cuda")


def net():
    with torch.device("cuda"):
        extractor = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, D))
        return common.Net(extractor, torch.nn.Linear(D, C), D, C)


def anchor_net():
    with torch.device("cuda"):
        return fedlsa.AnchorNet(C, 5, D)


def images():
    return torch.zeros(B, 3, 2, 2, dtype=torch.uint8, device="cuda")


def fedplcc_losses():
    z, y, prototypes = features()
    own = torch.arange(C, device="cuda") == y[:, None]
    weights = torch.ones(C, device="cuda")
    s = fedplcc.similarity(z, prototypes, 0.5)
    return fedplcc.contrast(s, own, weights, 0.07) + fedplcc.attraction(s, own, weights, 0.5)


STEPS = {
    "model": lambda: net()(images()),
    "average": lambda: common.average([net().state_dict()] * K, [1, 2, 3, 4])["classifier.bias"],
    "nearest prototype": lambda: common.nearest_prototype(features()[0], features()[2], known()),
    "fedproto distance": lambda: fedproto.prototype_distance(*features(), known(), "euclidean"),
    "fedproto mean": lambda: fedproto.weighted_mean(*uploads())[0],
    "fedtgp distance": lambda: fedtgp.prototype_distance(*features(), "euclidean"),
    "fedtgp margin": lambda: fedtgp.adaptive_margin(vectors(), 100.0),
    "fedtgp server's loss": lambda: fedtgp.margin_contrastive(*features(), 1.0),
    "fedsa distance": lambda: fedsa.regularization(*features(), "euclidean"),
    "fedsa margin": lambda: fedsa.average_margin(vectors()),
    "fedsa contrast": lambda: fedsa.margin_contrastive(*features(), 1.0),
    "fedsa calibration": lambda: fedsa.classifier_calibration(net().classifier, vectors()),
    "fedsa anchors": lambda: fedsa.ema(vectors(), *fedsa.weighted_mean(*uploads()), 0.9),
    "fedlsa compactness": lambda: fedlsa.compactness(*features(), 0.1),
    "fedlsa distance": lambda: fedlsa.l2_distance(*features()),
    "fedlsa server": lambda: fedlsa.server_update(anchor_net(), net().classifier, ARGS)[0],
    "fedplcc losses": fedplcc_losses,
    "fedfm guiding": lambda: fedfm.contrastive_guiding(*features()[:2], anchors(), 0.1),
    "fedfm distance": lambda: fedfm.squared_distance(*features()[:2], anchors()),
    "fedfm anchors": lambda: fedfm.new_anchors(*uploads(), anchors(), "weighted").vectors,
    "fedfm uniform anchors": lambda: fedfm.new_anchors(*uploads(), anchors(), "uniform").vectors,
    "fedfm prox": lambda: fedfm.proximal(net(), [p.detach() for p in net().parameters()]),
    "fedfm augmentation": lambda: fedfm.augment(images(), np.random.default_rng(0)),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_stays_on_the_gpu(name):
    """Catches: a mask, a range or a zero that is made on the CPU and mixed with tensors on the GPU."""
    assert STEPS[name]().device.type == "cuda"


def test_two_devices_are_refused():
    """Catches: a mode that lets everything pass, which would make this file worthless."""
    with pytest.raises(RuntimeError, match="device"):
        vectors() + torch.zeros(C, D)
