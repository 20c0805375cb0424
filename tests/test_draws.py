"""What is drawn at random: by the seed, and from the distribution that a paper or a header names."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common, fedfm, fedlsa, fedtgp


# --- the seed decides -------------------------------------------------------------------------------

def test_each_purpose_has_numbers_of_its_own():
    """Catches: a seed, purpose, round or client that does not matter; numbers that differ at the same place."""
    drawn = []
    for seed, purpose in ((0, "server"), (0, "anchors"), (1, "server"), (0, "server")):
        with common.seeded(seed, purpose):
            drawn.append(torch.randn(4).tolist())
    assert drawn[0] == drawn[3] and drawn[1] != drawn[0] != drawn[2] != drawn[1]
    places = [(0, "a", 1, 1), (1, "a", 1, 1), (0, "b", 1, 1), (0, "a", 2, 1), (0, "a", 1, 2)]
    assert len({common.generator(*place).random() for place in places}) == 5
    assert common.generator(*places[0]).random() == common.generator(*places[0]).random()


def test_participants():
    """Catches: the same participants for every seed, or in every round; more of the first clients than of the last."""
    def chosen(seed):
        args = SimpleNamespace(seed=seed, participation=0.25)
        return [common.participants(range(20), t, args) for t in range(1, 401)]
    one, again, other = chosen(3), chosen(3), chosen(4)
    assert one == again
    assert sum(a == b for a, b in zip(one, other)) < 5
    assert len(set(map(tuple, one))) > 300
    times = np.bincount(np.concatenate(one), minlength=20)  # 100 each, give or take 9
    assert times.min() > 60 and times.max() < 140


def test_minibatches():
    """Catches: an image left out, another's label, the same order twice, a flag ignored, a last batch of one image."""
    images = common.Images(torch.arange(25).view(25, 1, 1, 1), torch.arange(25))
    args = SimpleNamespace(seed=0, local_epochs=2, batch_size=8, batches="all")
    orders = []
    for seed, t, i in ((0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1)):
        args.seed = seed
        batches = list(common.minibatches(common.Client(i, images), t, args))
        assert [len(y) for _, y in batches] == [8, 8, 9, 8, 8, 9]
        assert all(x.flatten().equal(y) for x, y in batches)
        order = torch.cat([y for _, y in batches]).tolist()
        assert sorted(order[:25]) == sorted(order[25:]) == list(range(25))
        orders += [order[:25], order[25:]]
    assert len(set(map(tuple, orders))) == 8 and list(range(25)) not in orders
    args.batches = "full"
    assert [len(y) for _, y in common.minibatches(common.Client(0, images), 1, args)] == [8, 8, 8, 8, 8, 8]
    few = common.Images(images.x[:5], images.y[:5])
    assert [len(y) for _, y in common.minibatches(common.Client(0, few), 1, args)] == [5, 5]


def test_training_and_test_images(monkeypatch):
    """Catches: the same places held back for every seed or client, the first or last ones, another number."""
    monkeypatch.setattr(common, "partition", lambda *_: np.arange(80).reshape(2, 40))
    x = torch.arange(80).byte().view(80, 1, 1, 1).expand(80, 3, 4, 4)
    nothing = torch.zeros(80, dtype=torch.long)
    data = common.Dataset(x, nothing, nothing, nothing > 0, ["a"], ["set"])

    def held_back(seed):
        args = SimpleNamespace(seed=seed, partition="iid", clients=2, dataset="set", device="cpu")
        parts = common.divide(data, torch.arange(80), 0.25, args)
        return [sorted(held.x[:, 0, 0, 0].numpy() % 40) for _, _, held in parts]
    one, again, other = held_back(0), held_back(0), held_back(1)
    assert one == again
    places = [*one, *other, list(range(10)), list(range(30, 40))]
    assert len(set(map(tuple, places))) == 6 and all(len(held) == 10 for held in places)


# --- partitions -------------------------------------------------------------------------------------

def class_table(y, **flags):
    """Divide samples -> how many of each class every client has, (K, C)."""
    args = SimpleNamespace(**{"seed": 0, "partition": "dirichlet", "batch_size": 10, **flags})
    parts = common.partition(y, np.array(["one domain"] * len(y)), args)
    return np.array([np.bincount(y[part], minlength=y.max() + 1) for part in parts])


@pytest.mark.parametrize("clients, beta", [(20, 0.1), (100, 0.1), (10, 0.5)])
def test_dirichlet_gives_a_full_client_nothing_of_the_classes_that_follow(clients, beta):
    """Catches: another cap than N/K images, or none; a cap on what comes after the next class only."""
    y = np.arange(4000) % 10
    full_clients = images_of_nearly_full = 0
    for seed in range(3):
        table = class_table(y, clients=clients, beta=beta, seed=seed)
        for c in range(1, 10):
            held = table[:, :c].sum(1)
            full = held >= len(y) / clients
            assert not table[full, c].any()
            full_clients += full.sum()
            nearly_full = ~full & (held > 0.5 * len(y) / clients)
            images_of_nearly_full += table[nearly_full, c].sum()
    assert full_clients > 10 and images_of_nearly_full > 10


@pytest.mark.parametrize("beta", [1.0, 3.0])
def test_dirichlet_draws_its_shares_with_beta(beta):
    """Catches: β doubled or halved: the mean square of a share of Dir(β) is (β + 1) / (K (Kβ + 1))."""
    y = np.zeros(2000, int)
    tables = [class_table(y, clients=5, beta=beta, batch_size=1, seed=seed) for seed in range(250)]
    squares = (np.array(tables) / 2000) ** 2
    assert squares.sum((1, 2)).mean() == pytest.approx((beta + 1) / (5 * beta + 1), rel=0.06)


@pytest.mark.parametrize("seed", range(4))
def test_dirichlet_keeps_the_best_of_a_hundred_draws(seed):
    """Catches: the last draw kept where none gives everyone the 12 images that are enough."""
    smallest = class_table(np.arange(3000) % 10, clients=60, beta=0.1, seed=seed).sum(1).min()
    assert 2 < smallest < 12


def test_pathological_cuts_a_class_anywhere():
    """Catches: equal parts or cuts in one half: of five pieces the largest is 0.457 in the mean."""
    y, flags = np.zeros(10000, int), dict(partition="pathological", clients=5, classes_per_client=1, batch_size=1)
    sizes = np.array([class_table(y, **flags, seed=seed).sum(1) for seed in range(300)]) / 10000
    assert sizes.sum(1) == pytest.approx(1)
    assert sizes.max(1).mean() == pytest.approx(0.457, abs=0.03)
    assert sizes.min(1).mean() == pytest.approx(0.04, abs=0.01)
    assert sizes.mean(0) == pytest.approx(0.2, abs=0.04)  # nobody has the largest piece always


def test_pathological_deals_classes_by_the_seed():
    """Catches: the first client always with the first classes. Of 45 pairs of classes 40 draws give about 26."""
    y, flags = np.arange(2000) % 10, dict(partition="pathological", clients=1, classes_per_client=2)
    pairs = {tuple(np.flatnonzero(class_table(y, **flags, seed=seed)[0])) for seed in range(40)}
    assert len(pairs) > 15


# --- the servers' first vectors ---------------------------------------------------------------------

def test_servers_vectors_are_normally_distributed():
    """Catches: a uniform distribution, another variance. The fourth moment of N(0, 1) is 3, of a uniform one 1.8."""
    torch.manual_seed(0)
    fedtgp_v = fedtgp.GlobalPrototypes(300, 64, no_mlp=False).v
    fedtgp_without_f = fedtgp.GlobalPrototypes(300, 64, no_mlp=True).v
    fedlsa_R = fedlsa.AnchorNet(40, 512, 8).R
    for vectors in (fedtgp_v, fedtgp_without_f, fedlsa_R):
        vectors = vectors.detach().double()
        assert vectors.mean().item() == pytest.approx(0, abs=0.03)
        assert vectors.var().item() == pytest.approx(1, abs=0.05)
        assert (vectors ** 4).mean().item() == pytest.approx(3, abs=0.3)


# --- FedFM's augmentation ---------------------------------------------------------------------------

def where_is_the_bar(images):
    """By the moments of the ink -> its angle in degrees, its distance from the centre in pixels, for each image."""
    angles, away = [], []
    for image in images[:, 0].numpy():
        rows, columns = np.nonzero(image)
        rows, columns = rows - (len(image) - 1) / 2, columns - (len(image) - 1) / 2
        away.append(math.hypot(rows.mean(), columns.mean()))
        covariance = np.cov(columns, rows)
        angles.append(math.degrees(0.5 * math.atan2(2 * covariance[0, 1], covariance[0, 0] - covariance[1, 1])))
    return np.array(angles), np.array(away)


def test_augment_turns_by_up_to_15_degrees_and_moves_by_up_to_4_pixels():
    """Catches: another angle or shift, mixed pixels, a border that is not black, the same draws for all images."""
    bar = torch.zeros(400, 3, 96, 96, dtype=torch.uint8)
    bar[:, :, 46:50, 24:72] = 255
    angles, away = where_is_the_bar(fedfm.augment(bar, np.random.default_rng(0)))
    assert 14.5 < abs(angles).max() < 15.5
    assert angles.mean() == pytest.approx(0, abs=1.5)
    assert angles.std() == pytest.approx(15 / math.sqrt(3), abs=0.5)
    assert (away ** 2).mean() == pytest.approx(2 * 60 / 9, abs=1.0)  # whole numbers from -4 to 4: mean square 60 / 9
    assert away.max() == pytest.approx(math.sqrt(32), abs=0.3)
    white = fedfm.augment(torch.full((50, 3, 32, 32), 255, dtype=torch.uint8), np.random.default_rng(1))
    assert white.unique().tolist() == [0, 255] and (white == 0).flatten(1).any(1).float().mean() > 0.9


def test_augment_flips_half_of_the_images():
    """Catches: no flip, or of all images; a flip from top to bottom."""
    x = torch.zeros(400, 3, 64, 64, dtype=torch.uint8)
    x[:, :, 10:22, 6:18] = 255  # at the top, left
    ink = fedfm.augment(x, np.random.default_rng(0))[:, 0] > 0
    at_the_top = ink[:, :32].sum((1, 2)) > ink[:, 32:].sum((1, 2))
    at_the_right = ink[:, :, 32:].sum((1, 2)) > ink[:, :, :32].sum((1, 2))
    assert at_the_top.all()
    assert 160 < at_the_right.sum() < 240


def test_augment_is_drawn_by_seed_round_and_client(monkeypatch):
    """Catches: the same angles for every seed, round, client or batch; images that are trained on as they were."""
    seen = []
    monkeypatch.setattr(fedfm, "augment", lambda x, rng: torch.full(x.shape, rng.random()))

    def local_loss(net, x, *rest):
        seen.append(x[0, 0, 0, 0].item())
        return net(x).sum()
    monkeypatch.setattr(fedfm, "local_loss", local_loss)
    images = common.Images(torch.zeros(4, 1, 2, 2).byte(), torch.zeros(4).long())
    for seed, t, i in ((0, 1, 0), (0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1)):
        args = SimpleNamespace(seed=seed, local_epochs=2, batch_size=4, batches="all", lr=0.1, momentum=0.0,
                               weight_decay=0.0, augment=True, prox=0.0)
        net = common.Net(torch.nn.Flatten(), torch.nn.Linear(4, 2), 4, 2)
        fedfm.client_update(common.Client(i, images, net=net), None, t, args)
    assert seen[:2] == seen[2:4] and len(set(seen)) == 8


# --- FedFM: how well features separate --------------------------------------------------------------

def test_cluster_quality_is_of_the_classes(monkeypatch):
    """Catches: another number of clusters, the silhouette of clusters, images of one domain only."""
    pytest.importorskip("sklearn")
    monkeypatch.setattr(fedfm, "extract", lambda net, x: x[:, :2, 0, 0])
    heaps, mixed = torch.arange(90) % 3, torch.arange(90) // 3 % 3
    x = torch.randn(90, 2, 1, 1, generator=torch.Generator().manual_seed(0))
    x[:, 0, 0, 0] += 30 * heaps
    for y, nmi, silhouette in ((heaps, 1, 0.94), (mixed, 0, -0.03)):
        one = heaps == 0
        tests = {"one": common.Images(x[one], y[one]), "other": common.Images(x[~one], y[~one])}
        line = fedfm.cluster_quality(SimpleNamespace(num_classes=3), tests, 0)
        numbers = re.findall(r"-?\d\.\d+", line)
        assert [float(number) for number in numbers] == pytest.approx([nmi, silhouette], abs=0.03)


def test_cluster_quality_draws_its_images_by_the_seed(monkeypatch):
    """Catches: the same 2,000 test images for every seed."""
    pytest.importorskip("sklearn")
    drawn = []
    monkeypatch.setattr(fedfm, "extract", lambda net, x: drawn.append(x.flatten().tolist()) or x[:, :, 0, 0])
    images = common.Images(torch.arange(2100.0).view(-1, 1, 1, 1), torch.arange(2100) % 2)
    for seed in (0, 0, 1):
        fedfm.cluster_quality(SimpleNamespace(num_classes=2), {"set": images}, seed)
    assert len(set(drawn[0])) == 2000 and drawn[0] == drawn[1] and set(drawn[0]) != set(drawn[2])
