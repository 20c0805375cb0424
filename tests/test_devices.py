"""A GPU without a GPU. Tensors on torch's device "meta" hold no numbers, and most operations refuse to mix them with
tensors of the CPU, as on a real GPU (not all: @, cdist and indexing mix them). The inputs below are on "meta"; what a
step makes without saying where is on the CPU. Steps that need a number from a tensor are left out."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common, fedlsa, fedplcc, fedsa

B, C, D = 5, 3, 8
ARGS = SimpleNamespace(lr=0.1, momentum=0.9, weight_decay=0.01, server_steps=2, alpha=0.5, tau=0.5)
with torch.device("meta"):
    x = torch.zeros(B, 3, 2, 2, dtype=torch.uint8)
    p = torch.rand(C, D)                                   # prototypes or anchors
    s = torch.rand(B, C)                                   # FedPLCC's similarities
    own = torch.ones(B, C, dtype=torch.bool)               # which prototypes are of a sample's class
    weights = torch.ones(C)
extractor = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, D))
net = common.Net(extractor, torch.nn.Linear(D, C), D, C).to("meta")  # as build_net moves it
anchor_net = fedlsa.AnchorNet(C, 5, D).to("meta")

STEPS = {  # those that make a tensor; add yours
    "model": lambda: net(x),
    "fedsa_eq8": lambda: fedsa.classifier_calibration(net.classifier, p),
    "fedlsa_server": lambda: fedlsa.server_update(anchor_net, net.classifier, ARGS)[0],
    "fedplcc_eq8": lambda: fedplcc.attraction(s, own, weights, 0.5),
    "fedfm_augment": lambda: common.augment(x, np.random.default_rng(0)),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_stays_on_its_device(name):
    """A step makes its masks, ranges and zeros where its inputs are."""
    assert STEPS[name]().device.type == "meta"


def test_two_devices_are_refused():
    """Otherwise this file would prove nothing."""
    with pytest.raises(RuntimeError, match="device"):
        p + torch.zeros(C, D)
