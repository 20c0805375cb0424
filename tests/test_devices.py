"""A GPU without a GPU. Tensors on torch's device "meta" hold no numbers, and most operations refuse to mix them with
tensors of the CPU, as on a real GPU (not all: @, cdist and indexing mix them). The inputs below are on "meta"; what a
step makes without saying where is on the CPU. Steps that need a number from a tensor are left out."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common, fedfm, fedlsa, fedplcc, fedproto, fedsa, fedtgp

B, K, C, D = 5, 4, 3, 8
ARGS = SimpleNamespace(lr=0.1, momentum=0.9, weight_decay=0.01, server_steps=2, alpha=0.5, tau=0.5)
with torch.device("meta"):
    x = torch.zeros(B, 3, 2, 2, dtype=torch.uint8)
    z = torch.rand(B, D)
    y = torch.zeros(B, dtype=torch.long)
    p = torch.rand(C, D)                                   # prototypes or anchors
    known = torch.ones(C, dtype=torch.bool)
    means = torch.rand(K, C, D)                            # of clients
    counts = torch.ones(K, C, dtype=torch.long)
    anchors = fedfm.Anchors(p, known)
    s = torch.rand(B, C)                                   # FedPLCC's similarities
    own = torch.ones(B, C, dtype=torch.bool)               # which prototypes are of a sample's class
    weights = torch.ones(C)
    extractor = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, D))
    net = common.Net(extractor, torch.nn.Linear(D, C), D, C)
    anchor_net = fedlsa.AnchorNet(C, 5, D)

STEPS = {
    "model": lambda: net(x),
    "average": lambda: common.average([net.state_dict()] * K, [1, 2, 3, 4])["classifier.bias"],
    "nearest prototype": lambda: common.nearest_prototype(z, p, known),
    "fedproto_eq3": lambda: fedproto.weighted_mean(means, counts)[0],
    "fedproto_eq4": lambda: fedproto.prototype_distance(z, y, p, known, "euclidean"),
    "fedtgp_eq9": lambda: fedtgp.adaptive_margin(p, 100.0),
    "fedtgp_eq10": lambda: fedtgp.margin_contrastive(z, y, p, 1.0),
    "fedtgp_eq11": lambda: fedtgp.prototype_distance(z, y, p, "euclidean"),
    "fedsa_eq3": lambda: fedsa.weighted_mean(means, counts)[0],
    "fedsa_eq5": lambda: fedsa.regularization(z, y, p, "euclidean"),
    "fedsa_eq6": lambda: fedsa.average_margin(p),
    "fedsa_eq7": lambda: fedsa.margin_contrastive(z, y, p, 1.0),
    "fedsa_eq8": lambda: fedsa.classifier_calibration(net.classifier, p),
    "fedsa_eq10": lambda: fedsa.ema(p, p, known, 0.9),
    "fedlsa_eq3": lambda: fedlsa.anchor_classification(p, net.classifier),
    "fedlsa_eq4": lambda: fedlsa.anchor_separation(p, 0.1),
    "fedlsa_eq8": lambda: fedlsa.compactness(z, y, p, 0.1),
    "fedlsa_l2": lambda: fedlsa.l2_distance(z, y, p),
    "fedlsa_server": lambda: fedlsa.server_update(anchor_net, net.classifier, ARGS)[0],
    "fedplcc_eq6": lambda: fedplcc.contrast(s, own, weights, 0.07),
    "fedplcc_eq7": lambda: fedplcc.similarity(z, p, 0.5),
    "fedplcc_eq8": lambda: fedplcc.attraction(s, own, weights, 0.5),
    "fedfm_cg": lambda: fedfm.contrastive_guiding(z, y, anchors, 0.1),
    "fedfm_eq3": lambda: fedfm.squared_distance(z, y, anchors),
    "fedfm_eq9": lambda: fedfm.new_anchors(means, counts, anchors, "weighted").vectors,
    "fedfm_eq9_uniform": lambda: fedfm.new_anchors(means, counts, anchors, "uniform").vectors,
    "fedfm_prox": lambda: fedfm.proximal(net, [weight.detach() for weight in net.parameters()]),
    "fedfm_augment": lambda: fedfm.augment(x, np.random.default_rng(0)),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_stays_on_its_device(name):
    """A step makes its masks, ranges and zeros where its inputs are."""
    assert STEPS[name]().device.type == "meta"


def test_two_devices_are_refused():
    """Otherwise this file would prove nothing."""
    with pytest.raises(RuntimeError, match="device"):
        p + torch.zeros(C, D)
