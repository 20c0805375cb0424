"""What is drawn at random in a round, and that the seed decides it. Partitions are in test_partitions.py."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torchvision.transforms import functional as transforms

import common, fedfm, fedlsa, fedtgp
from conftest import arguments


def test_each_purpose_has_numbers_of_its_own():
    """Seed, purpose, round and client each change the numbers."""
    drawn = []
    for place in (0, "a", 1, 1), (0, "a", 1, 1), (1, "a", 1, 1), (0, "b", 1, 1), (0, "a", 2, 1), (0, "a", 1, 2):
        drawn.append(common.generator(*place).random())
    assert drawn[0] == drawn[1] and len(set(drawn)) == 5
    drawn = []
    for place in (0, "server"), (0, "server"), (0, "anchors"), (1, "server"):
        with common.seeded(*place):
            drawn.append(torch.rand(1).item())
    assert drawn[0] == drawn[1] and len(set(drawn)) == 3


def test_participants():
    """Every seed and round draws anew; no client comes twice or stays out."""
    chosen = set()
    for seed in range(2):
        for t in range(1, 51):
            args = SimpleNamespace(seed=seed, participation=0.25)
            chosen.add(tuple(common.participants(range(20), t, args)))
    assert len(chosen) > 95
    assert {len(set(clients)) for clients in chosen} == {5}
    assert np.bincount(np.concatenate(list(chosen))).min() > 10  # about 25 each


@pytest.mark.parametrize("K, share, size", [(4, 0.7, 3), (10, 0.33, 3), (20, 0.02, 1)])
def test_number_of_participants(K, share, size):
    """ρK clients, rounded to the nearest number; at least one."""
    chosen = common.participants(range(K), 1, SimpleNamespace(seed=0, participation=share))
    assert len(set(chosen)) == size


def numbered_images(n):
    return common.Images(torch.arange(n).view(n, 1, 1, 1), torch.arange(n))


def test_each_epoch_shuffles_all_images():
    """The order depends on seed, round and client. A last batch of one joins the one before."""
    args = SimpleNamespace(seed=0, local_epochs=2, batch_size=8, batches="all")
    orders = [tuple(range(25))]
    for seed, t, i in ((0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1)):
        args.seed = seed
        batches = list(common.minibatches(common.Client(i, numbered_images(25)), t, args))
        assert [len(y) for _, y in batches] == [8, 8, 9, 8, 8, 9]
        assert all(x.flatten().equal(y) for x, y in batches)
        order = torch.cat([y for _, y in batches]).tolist()
        assert sorted(order[:25]) == sorted(order[25:]) == list(range(25))
        orders += [tuple(order[:25]), tuple(order[25:])]
    assert len(set(orders)) == 9


def test_a_short_last_batch_is_a_batch_of_its_own():
    args = SimpleNamespace(seed=0, local_epochs=1, batch_size=8, batches="all")
    batches = common.minibatches(common.Client(0, numbered_images(18)), 1, args)
    assert [len(y) for _, y in batches] == [8, 8, 2]


@pytest.mark.parametrize("n, sizes", [(25, [8, 8, 8]), (23, [8, 8]), (16, [8, 8]), (5, [5])])
def test_full_drops_an_incomplete_batch_unless_it_is_alone(n, sizes):
    args = SimpleNamespace(seed=0, local_epochs=2, batch_size=8, batches="full")
    batches = common.minibatches(common.Client(0, numbered_images(n)), 1, args)
    assert [len(y) for _, y in batches] == sizes * 2


def test_training_and_test_images(monkeypatch):
    """Each seed and client draws its own quarter of held-out images."""
    monkeypatch.setattr(common, "partition", lambda *_: [np.arange(41), np.arange(41)])  # the same 41 images twice
    zeros = torch.zeros(41, dtype=torch.long)
    x = torch.arange(41).byte().view(41, 1, 1, 1).expand(41, 3, 4, 4)
    data = common.Dataset(x, zeros, zeros, zeros > 0, ["a"], ["set"])
    draws = {tuple(range(10)), tuple(range(31, 41))}  # the first and the last ten would be no draw
    for seed in (0, 1):
        args = SimpleNamespace(seed=seed, partition="iid", clients=2, dataset="set", device="cpu")
        for _, train, held in common.divide(data, torch.arange(41), 0.25, args):
            assert len(train.y) == 31  # 30.75
            draws.add(tuple(sorted(held.x[:, 0, 0, 0].tolist())))
    assert len(draws) == 6


def test_a_client_without_test_images_takes_part(monkeypatch):
    """A share of two images is for training."""
    monkeypatch.setattr(common, "partition", lambda *_: [np.arange(40), np.arange(40, 42)])
    zeros = torch.zeros(42, dtype=torch.long)
    data = common.Dataset(torch.zeros(42, 3, 16, 16).byte(), zeros, zeros, zeros > 0, ["a", "b"], ["set"])
    clients = common.make_clients(data, arguments("fedproto", "--clients 2 --model cnn4"))
    assert [(len(client.train.y), len(client.test.y)) for client in clients] == [(30, 10), (2, 0)]


@pytest.mark.parametrize("n, share, want", [(100, 0.29, 29), (10, 0.7, 7)])
def test_held_back_images(n, share, want):
    """In floats 0.29 · 100 is below 29, and (1 - 0.7) · 10 above 3."""
    zeros = torch.zeros(n, dtype=torch.long)
    data = common.Dataset(numbered_images(n).x, zeros, zeros, zeros > 0, ["a"], ["set"])
    args = SimpleNamespace(seed=0, partition="iid", clients=1, dataset="set", device="cpu")
    (_, _, held), = common.divide(data, torch.arange(n), share, args)
    assert len(held.y) == want


def test_the_servers_initial_vectors_are_normally_distributed():
    for v in fedtgp.PrototypeNet(300, 64, no_mlp=False).vectors, fedlsa.AnchorNet(40, 512, 8).R:
        assert v.mean().item() == pytest.approx(0, abs=0.03)
        assert v.std().item() == pytest.approx(1, abs=0.03)
        assert v.max() > 3


@pytest.mark.parametrize("pixels", [32, 48])
def test_augment(pixels):
    """Each image gets its own draws; pixels never mix, and the border is black."""
    x = torch.zeros(50, 3, pixels, pixels, dtype=torch.uint8)
    x[:, :, 10:22, 10:22] = torch.randint(1, 256, (50, 3, 12, 12))
    got = common.augment(x, np.random.default_rng(0))
    rng = np.random.default_rng(0)
    angle = rng.uniform(-15, 15, 50)
    flip = rng.choice([-1, 1], 50)
    left, top = rng.integers(0, 9, (2, 50)).tolist()
    for i in range(50):
        padded = F.pad(x[i], (4, 4, 4, 4))
        want = transforms.rotate(transforms.crop(padded, top[i], left[i], pixels, pixels), angle[i].item())
        if flip[i] < 0:
            want = transforms.hflip(want)
        assert (got[i] == want).float().mean() > 0.99  # rounding may choose another pixel
    white = common.augment(torch.full_like(x, 255), np.random.default_rng(0))
    assert white.unique().tolist() == [0, 255]


def test_augment_is_drawn_by_seed_round_and_client(monkeypatch):
    """Every batch draws anew, and the client trains on the augmented images."""
    seen = []
    monkeypatch.setattr(fedfm, "augment", lambda x, rng: torch.full(x.shape, rng.random()))

    def local_loss(net, x, *rest):
        seen.append(x[0, 0, 0, 0].item())
        return net(x).sum()
    monkeypatch.setattr(fedfm, "local_loss", local_loss)
    images = common.Images(torch.zeros(4, 1, 2, 2).byte(), torch.zeros(4).long())
    args = SimpleNamespace(local_epochs=2, batch_size=4, batches="all", lr=0.1, momentum=0.0, weight_decay=0.0,
                           augment=True, prox=0.0)
    for seed, t, i in ((0, 1, 0), (0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1)):
        args.seed = seed
        net = common.Net(torch.nn.Flatten(), torch.nn.Linear(4, 2), 4, 2)
        fedfm.client_update(common.Client(i, images, net=net), None, t, args)
    assert seen[:2] == seen[2:4] and len(set(seen)) == 8
    assert seen[0] == pytest.approx(common.generator(0, "augment", 1, 0).random())


def test_cluster_quality_is_of_the_classes(monkeypatch, capsys):
    """K-means makes one cluster per class, over all domains; the silhouette is of the classes. What cannot be computed
    is a warning, and the run's results stay."""
    pytest.importorskip("sklearn")
    monkeypatch.setattr(common, "extract", lambda net, x: x[:, :, 0, 0])
    heaps, mixed = torch.arange(90) // 30, torch.arange(90) % 3
    x = torch.randn(90, 2, 1, 1)
    x[:, 0, 0, 0] += 30 * heaps
    for y, nmi, silhouette in ((heaps, 1, 0.94), (mixed, 0, -0.03)):
        tests = {"one": common.Images(x[:30], y[:30]), "other": common.Images(x[30:], y[30:])}
        common.print_cluster_quality(SimpleNamespace(num_classes=3), tests, 0)
        numbers = [float(number) for number in re.findall(r"-?\d\.\d+", capsys.readouterr().out)]
        assert numbers == pytest.approx([nmi, silhouette], abs=0.05)
    late = (torch.arange(2100) >= 2000).long()  # not among the first 2,000
    many = {"one": common.Images(torch.randn(2100, 2, 1, 1), late)}
    common.print_cluster_quality(SimpleNamespace(num_classes=3), many, 0)
    assert "of 2000 test images" in capsys.readouterr().out
    common.print_cluster_quality(SimpleNamespace(num_classes=3), {"one": common.Images(x, 0 * mixed)}, 0)  # one class
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("no NMI and silhouette") and printed.err.count("\n") == 1
