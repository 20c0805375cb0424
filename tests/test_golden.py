"""The random draws behind the published results, as numbers. They run with CI=true alone: a later torch or numpy may
draw other numbers, and that is no fault of whoever runs the tests."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common, fedlsa, fedsa, fedtgp
from test_draws import numbered_images
from test_models import net, sphere_net
from test_partitions import DOMAINS, TEN, split

pytestmark = pytest.mark.skipif(os.environ.get("CI") != "true", reason="only with CI=true")
ARGS = SimpleNamespace(seed=0, participation=0.2, local_epochs=1, batch_size=10, batches="all", partition="iid",
                       clients=1, dataset="set", device="cpu")


def division(kind):
    """How many images each client has, and the first three of client 0."""
    parts = split(TEN, DOMAINS, partition=kind, classes_per_client=4)
    return [len(part) for part in parts] + parts[0][:3].tolist()


def held_out():
    """The test images of one client with 12 images."""
    y = torch.zeros(12, dtype=torch.long)
    data = common.Dataset(numbered_images(12).x, y, y, y > 0, ["a"], ["set"])
    (_, _, test), = common.divide(data, torch.arange(12), 0.25, ARGS)
    return test.x.flatten().tolist()


def subset(monkeypatch):
    i = torch.arange(20)
    monkeypatch.setattr(common, "glyphs", lambda size: common.Dataset(i, i, i, i, [], []))
    args = SimpleNamespace(data="", dataset="glyphs", image_size=None, subset=0.3, seed=0)
    return common.load_dataset(args).x.tolist()


def test_orders(monkeypatch):
    """Who takes part, and which images are used, held out and come first."""
    x, _ = next(common.minibatches(common.Client(1, numbered_images(10)), 2, ARGS))
    assert common.generator(3, "purpose", 1, 2).permutation(8).tolist() == [1, 4, 7, 5, 3, 2, 6, 0]
    assert common.participants(range(20), 3, ARGS) == [2, 12, 15, 17]
    assert x.flatten().tolist() == [2, 5, 1, 6, 4, 3, 8, 9, 0, 7]
    assert held_out() == [9, 0, 3]
    assert subset(monkeypatch) == [0, 4, 6, 13, 16, 19]


@pytest.mark.parametrize("domain, want", {
    "photo": [0, 1, 2, 8, 13, 16, 20],
    "sketch": [2, 8, 9, 12, 13, 14, 19],
}.items())
def test_the_test_images_of_pacs(domain, want):
    assert np.flatnonzero(common.test_images("pacs", domain, 21)).tolist() == want


@pytest.mark.parametrize("kind, want", {
    "iid": [600, 600, 600, 600, 600, 2804, 2457, 2423],
    "dirichlet": [706, 602, 258, 711, 723, 7, 9, 11],
    "pathological": [294, 476, 708, 735, 787, 2910, 2680, 60],
    "dominant": [596, 596, 596, 596, 596, 2910, 2680, 60],
    "missing": [540, 540, 540, 540, 540, 2910, 2680, 60],
    "domain": [500, 500, 1000, 500, 500, 2973, 1928, 2136],
}.items())
def test_partitions(kind, want):
    assert division(kind) == want


def test_initial_weights():
    """Another text that seeds them would change every accuracy."""
    with common.seeded(0, "anchors"):
        anchors = fedsa.make_anchors(10, 512, "mlp")
    with common.seeded(0, "server"):
        prototype_net = fedtgp.PrototypeNet(10, 512, no_mlp=False)
    with common.seeded(0, "server"):
        anchor_net = fedlsa.AnchorNet(10, 512, 128)
    for number, want in [
        (net("cnn4").classifier.weight[0, 0], 0.0040),
        (net("resnet10").classifier.weight[0, 0], -0.0384),
        (net("htfe8-htc4", client=2).classifier[-1].weight[0, 0], -0.0120),  # mobilenet_v2 with a hidden layer
        (sphere_net().classifier.weight[0, 0], 0.0479),
        (anchors[0, 1], 0.3842),
        (prototype_net()[0, 0], 0.1361),
        (anchor_net()[0, 0], 0.0557),
    ]:
        assert number.item() == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("domain, want", {
    "plain": [244, 240, 144, 119, 90, 102, 103, 86],
    "thin": [187, 150, 125, 94, 69, 113, 113, 156],
    "texture": [130, 124, 145, 120, 79, 82, 181, 175],
    "clutter": [34, 31, 54, 37, 78, 63, 70, 77],
}.items())
def test_glyphs(domain, want):
    """Every domain has a seed of its own. Another FreeType may round an edge differently."""
    row = common.draw_domain(domain, 10, 24)[3, 0, 12, 8:16]
    assert row.tolist() == pytest.approx(want, abs=8)
