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


def similarities():
    """FedPLCC's s (B, C), which prototypes are of a sample's class (B, C), and the prototypes' weights (C,)."""
    _, y, prototypes = features()
    return vectors(B) @ prototypes.T, torch.arange(C, device="cuda") == y[:, None], torch.ones(C, device="cuda")


STEPS = {
    "model": lambda: net()(images()),
    "average": lambda: common.average([net().state_dict()] * K, [1, 2, 3, 4])["classifier.bias"],
    "nearest prototype": lambda: common.nearest_prototype(vectors(B), vectors(), known()),
    "fedproto_eq3": lambda: fedproto.weighted_mean(*uploads())[0],
    "fedproto_eq4": lambda: fedproto.prototype_distance(*features(), known(), "euclidean"),
    "fedtgp_eq9": lambda: fedtgp.adaptive_margin(vectors(), 100.0),
    "fedtgp_eq10": lambda: fedtgp.margin_contrastive(*features(), 1.0),
    "fedtgp_eq11": lambda: fedtgp.prototype_distance(*features(), "euclidean"),
    "fedsa_eq3": lambda: fedsa.weighted_mean(*uploads())[0],
    "fedsa_eq5": lambda: fedsa.regularization(*features(), "euclidean"),
    "fedsa_eq6": lambda: fedsa.average_margin(vectors()),
    "fedsa_eq7": lambda: fedsa.margin_contrastive(*features(), 1.0),
    "fedsa_eq8": lambda: fedsa.classifier_calibration(net().classifier, vectors()),
    "fedsa_eq10": lambda: fedsa.ema(vectors(), vectors(), known(), 0.9),
    "fedlsa_eq3": lambda: fedlsa.anchor_classification(vectors(), vectors(), torch.zeros(C, device="cuda")),
    "fedlsa_eq4": lambda: fedlsa.anchor_separation(vectors(), 0.1),
    "fedlsa_eq8": lambda: fedlsa.compactness(*features(), 0.1),
    "fedlsa_l2": lambda: fedlsa.l2_distance(*features()),
    "fedlsa_server": lambda: fedlsa.server_update(anchor_net(), net().classifier, ARGS)[0],
    "fedplcc_eq6": lambda: fedplcc.contrast(*similarities(), 0.07),
    "fedplcc_eq7": lambda: fedplcc.similarity(vectors(B), vectors(), 0.5),
    "fedplcc_eq8": lambda: fedplcc.attraction(*similarities(), 0.5),
    "fedfm_cg": lambda: fedfm.contrastive_guiding(*features()[:2], anchors(), 0.1),
    "fedfm_eq3": lambda: fedfm.squared_distance(*features()[:2], anchors()),
    "fedfm_eq9": lambda: fedfm.new_anchors(*uploads(), anchors(), "weighted").vectors,
    "fedfm_eq9_uniform": lambda: fedfm.new_anchors(*uploads(), anchors(), "uniform").vectors,
    "fedfm_prox": lambda: fedfm.proximal(net(), [p.detach() for p in net().parameters()]),
    "fedfm_augment": lambda: fedfm.augment(images(), np.random.default_rng(0)),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_stays_on_the_gpu(name):
    """Catches: a mask, a range or a zero that is made on the CPU and mixed with tensors on the GPU."""
    assert STEPS[name]().device.type == "cuda"


def test_two_devices_are_refused():
    """Catches: a mode that lets everything pass, which would make this file worthless."""
    with pytest.raises(RuntimeError, match="device"):
        vectors() + torch.zeros(C, D)
