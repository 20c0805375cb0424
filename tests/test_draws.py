"""What is drawn at random: by the seed, and from the distribution that a paper or a header names."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common
import fedfm
import fedlsa
import fedtgp
from test_partitions import class_table, split


# --- the seed decides -----------------------------------------------------------------------------

def test_participants_are_drawn_by_the_seed():
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


def test_training_and_test_images_are_divided_by_the_seed(monkeypatch):
    """Catches: the same images held back for every seed, where the partition is the same; the first or the last
    ones."""
    monkeypatch.setattr(common, "partition", lambda *_: np.arange(80).reshape(2, 40))
    x = torch.arange(80).byte().view(80, 1, 1, 1).expand(80, 3, 4, 4)
    nothing = torch.zeros(80, dtype=torch.long)
    data = common.Dataset(x, nothing, nothing, nothing > 0, ["a"], ["set"])

    def held_back(seed):
        args = SimpleNamespace(seed=seed, partition="iid", clients=2, dataset="set", device="cpu")
        return [sorted(rest.x[:, 0, 0, 0].tolist()) for _, _, rest in common.divide(data, torch.arange(80), 0.25, args)]
    one, again, other = held_back(0), held_back(0), held_back(1)
    assert one == again
    for i in (0, 1):
        assert len(one[i]) == 10 and one[i] != other[i]
        assert one[i] not in (list(range(40 * i, 40 * i + 10)), list(range(40 * i + 30, 40 * i + 40)))


# --- partitions -----------------------------------------------------------------------------------

@pytest.mark.parametrize("clients, beta", [(20, 0.1), (100, 0.1), (10, 0.5)])
def test_dirichlet_gives_a_full_client_nothing_of_the_classes_that_follow(clients, beta):
    """Catches: another cap than N/K images, or none; a cap on what comes after the next class only."""
    y = np.arange(4000) % 10
    times = others = 0
    for seed in range(3):
        table = class_table(y, split(y, clients=clients, beta=beta, seed=seed), 10)
        for c in range(1, 10):
            held = table[:, :c].sum(1)
            full = held >= len(y) / clients
            times += full.sum()
            assert not table[full, c].any()
            nearly_full = ~full & (held > 0.5 * len(y) / clients)
            others += table[nearly_full, c].sum()  # these go on
    assert times > 10 and others > 10


def test_dirichlet_draws_its_shares_with_beta():
    """Catches: β doubled or halved, another distribution. The mean square of a share of Dir(β) is
    (β + 1) / (K (Kβ + 1))."""
    y = np.zeros(2000, int)
    for beta in (1.0, 3.0):
        squares = []
        for seed in range(250):
            sizes = np.array([len(part) for part in split(y, clients=5, beta=beta, batch_size=1, seed=seed)])
            squares.append(((sizes / len(y)) ** 2).sum())
        assert np.mean(squares) == pytest.approx((beta + 1) / (5 * beta + 1), rel=0.06)


def test_pathological_cuts_a_class_anywhere():
    """Catches: cuts from the first half of a class, or equal parts. The largest of five pieces between random cuts is
    0.457 of the whole in the mean, the smallest 0.04."""
    y = np.zeros(10000, int)
    flags = dict(partition="pathological", clients=5, classes_per_client=1, batch_size=1)
    sizes = np.array([[len(part) for part in split(y, **flags, seed=seed)] for seed in range(300)])
    assert (sizes.sum(1) == 10000).all()
    assert sizes.max(1).mean() / 10000 == pytest.approx(0.457, abs=0.03)
    assert sizes.min(1).mean() / 10000 == pytest.approx(0.04, abs=0.01)
    assert sizes.mean(0) / 10000 == pytest.approx(0.2, abs=0.04)  # nobody has the largest piece always


def test_pathological_deals_classes_by_the_seed():
    """Catches: the first client always with the first classes. Of 45 pairs of classes 40 draws give some 26."""
    y = np.arange(2000) % 10
    flags = dict(partition="pathological", clients=1, classes_per_client=2)
    pairs = {tuple(np.unique(y[split(y, **flags, seed=seed)[0]])) for seed in range(40)}
    assert len(pairs) > 15


def test_dirichlet_keeps_the_best_of_a_hundred_draws():
    """Catches: the last draw, where none gives every client 12 images, which is enough. In most draws somebody has
    none."""
    y = np.arange(3000) % 10
    for seed in range(4):
        parts = split(y, clients=60, beta=0.1, seed=seed)
        assert 2 < min(len(part) for part in parts) < 12


# --- the servers' first vectors -------------------------------------------------------------------

@pytest.mark.parametrize("name", ["FedTGP's v", "FedTGP's v without F", "FedLSA's R"])
def test_the_servers_vectors_are_normally_distributed(name):
    """Catches: a uniform distribution, another variance. The fourth moment of N(0, 1) is 3, of a uniform one 1.8."""
    torch.manual_seed(0)
    vectors = {"FedTGP's v": lambda: fedtgp.GlobalPrototypes(300, 64).v,
               "FedTGP's v without F": lambda: fedtgp.GlobalPrototypes(300, 64, no_mlp=True).v,
               "FedLSA's R": lambda: fedlsa.AnchorNet(40, 512, 8).R}[name]().detach().double()
    assert vectors.requires_grad is False and len(vectors) in (300, 40)
    assert vectors.mean().item() == pytest.approx(0, abs=0.03)
    assert vectors.var().item() == pytest.approx(1, abs=0.05)
    assert (vectors ** 4).mean().item() == pytest.approx(3, abs=0.3)


def test_the_servers_layers():
    """Catches: another width than the header names, a layer more or less, one without a bias."""
    shapes = [tuple(p.shape) for p in fedtgp.GlobalPrototypes(7, 30).parameters()]
    assert shapes == [(7, 30), (30, 30), (30,), (30, 30), (30,)]
    shapes = [tuple(p.shape) for p in fedlsa.AnchorNet(7, 512, 30).parameters()]
    assert shapes == [(7, 512), (512, 512), (512,), (30, 512), (30,)]


# --- FedFM: augmentation, inputs, how well features separate ---------------------------------------

def bar(n, size=96):
    """n images with a white bar from left to right through the centre."""
    x = torch.zeros(n, 3, size, size, dtype=torch.uint8)
    x[:, :, size // 2 - 2:size // 2 + 2, size // 4:-size // 4] = 255
    return x


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
    """Catches: another angle, degrees for radians, half or twice the shift, a shift in one direction, pixels between
    two others, a border that is not black, the same draws for all images."""
    angles, away = where_is_the_bar(fedfm.augment(bar(400), np.random.default_rng(0)))
    assert 14.5 < abs(angles).max() < 15.5
    assert angles.mean() == pytest.approx(0, abs=1.5)
    assert angles.std() == pytest.approx(15 / math.sqrt(3), abs=0.5)
    # dx and dy are whole numbers from -4 to 4: their squares have the mean 60 / 9 each
    assert (away ** 2).mean() == pytest.approx(2 * 60 / 9, abs=1.0)
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


def test_augment_is_drawn_by_the_seed(monkeypatch):
    """Catches: the same angles for every seed."""
    drawn = []
    monkeypatch.setattr(fedfm, "augment", lambda x, rng: drawn.append(rng.random()) or x)
    client = common.Client(0, common.Images(bar(4, 16), torch.zeros(4).long()))
    for seed in (0, 0, 1):
        client.net = common.Net(torch.nn.Flatten(), torch.nn.Linear(4, 2), 4, 2)
        args = SimpleNamespace(seed=seed, local_epochs=1, batch_size=4, batches="all", lr=0.1, momentum=0.0, lam=1.0,
                               weight_decay=0.0, augment=True, prox=0.0, match="cg", temperature=1.0)
        fedfm.client_update(client, torch.zeros(2, 4), torch.zeros(2) > 0, 1, args)
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("seed", [0, 1])
def test_cluster_quality_is_of_the_classes(seed, monkeypatch):
    """Catches: the silhouette of K-means' clusters for that of the classes, NMI of other labels, images of the first
    domain only. Two heaps, and classes that do not follow them."""
    pytest.importorskip("sklearn")
    rng = np.random.default_rng(seed)
    heaps, y = np.arange(60) % 2, rng.integers(2, size=60)
    z = rng.normal(size=(60, 2)) + 20 * heaps[:, None]

    silhouettes = []
    for i in range(60):
        away = np.sqrt(((z - z[i]) ** 2).sum(1))
        own = away[y == y[i]].sum() / ((y == y[i]).sum() - 1)
        other = away[y != y[i]].mean()
        silhouettes.append((other - own) / max(own, other))
    shares = [[np.mean((heaps == h) & (y == c)) for c in (0, 1)] for h in (0, 1)]
    information = sum(shares[h][c] * math.log(shares[h][c] / np.mean(heaps == h) / np.mean(y == c))
                      for h in (0, 1) for c in (0, 1))
    entropies = [-sum(p * math.log(p) for p in (np.mean(labels), 1 - np.mean(labels))) for labels in (heaps, y)]

    monkeypatch.setattr(fedfm, "extract", lambda net, x: x[:, :2, 0, 0])
    x, y = torch.tensor(z).view(60, 2, 1, 1), torch.tensor(y)
    tests = {"one": common.Images(x[:25], y[:25]), "other": common.Images(x[25:], y[25:])}
    line = fedfm.cluster_quality(SimpleNamespace(num_classes=2), tests, seed)
    nmi, silhouette = map(float, re.findall(r"-?\d\.\d+", line))
    assert silhouette == pytest.approx(np.mean(silhouettes), abs=6e-4)
    assert nmi == pytest.approx(information / np.mean(entropies), abs=6e-4)


def test_each_purpose_has_numbers_of_its_own():
    """Catches: --seed alone deciding what torch draws: the server's first vectors would be those of a client's first
    layer."""
    drawn = []
    for seed, purpose in ((0, "server"), (0, "server"), (0, "anchors"), (1, "server")):
        with common.seeded(seed, purpose):
            drawn.append(torch.randn(4).tolist())
    assert drawn[0] == drawn[1] and drawn[2] != drawn[0] != drawn[3] != drawn[2]


def test_the_images_of_cluster_quality_are_drawn_by_the_seed(monkeypatch):
    """Catches: the same 2,000 test images for every seed."""
    pytest.importorskip("sklearn")
    drawn = []
    monkeypatch.setattr(fedfm, "extract", lambda net, x: drawn.append(x.flatten().tolist()) or x[:, :, 0, 0])
    images = common.Images(torch.arange(2100.0).view(-1, 1, 1, 1), torch.arange(2100) % 2)
    for seed in (0, 0, 1):
        fedfm.cluster_quality(SimpleNamespace(num_classes=2), {"set": images}, seed)
    assert len(set(drawn[0])) == 2000 and drawn[0] == drawn[1] and set(drawn[0]) != set(drawn[2])
