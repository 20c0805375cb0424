"""Partitions: what all of them promise, and what each one promises of its own."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

import common

TEN = np.arange(3000) % 10                                             # 300 images of each of ten classes
DOMAINS = np.array(["c", "a", "b"])[np.arange(3000) // 10 % 3]         # 1,000 images a domain, 100 of them a class


def split(y, domain=None, **flags):
    """Divide images of classes y, of one domain or several -> an index array for each client."""
    usual = dict(seed=0, clients=5, beta=0.1, batch_size=10, classes_per_client=2, missing=1, dominant_share=0.46,
                 domain_clients=None, domain_fraction=None, images_per_class=None)
    if domain is None:
        domain = np.full(len(y), "a")
    return common.partition(y, domain, SimpleNamespace(**usual | flags))


def split_counts(y, **flags):
    """How many images of each class every client has, (K, C)."""
    counts = [np.bincount(y[part], minlength=y.max() + 1) for part in split(y, **flags)]
    return np.array(counts)


@pytest.mark.parametrize("kind", common.PARTITIONS)
@pytest.mark.parametrize("K", [1, 6, 15])
@pytest.mark.parametrize("images_of_classes", [[60], [1, 2, 7, 40, 50], [2] * 29])
def test_no_image_is_at_two_clients(kind, K, images_of_classes):
    """Where all images are divided, none is left over."""
    C = len(images_of_classes)
    y = np.repeat(np.arange(C), images_of_classes)
    each = min(C, 3)
    for beta in 1e-6, 0.1, 1000:
        parts = split(y, partition=kind, clients=K, beta=beta, classes_per_client=each, missing=C // 2)
        everything = np.concatenate(parts)
        assert len(parts) == K
        assert len(set(everything)) == len(everything)
        assert set(everything) <= set(range(len(y)))
        if kind in ("iid", "dirichlet", "domain") or kind == "pathological" and K * each >= C:
            assert len(everything) == len(y)


@pytest.mark.parametrize("kind", common.PARTITIONS)
def test_the_seed_draws_the_partition(kind):
    one = np.concatenate(split(TEN, DOMAINS, partition=kind))
    again = np.concatenate(split(TEN, DOMAINS, partition=kind))
    other = np.concatenate(split(TEN, DOMAINS, partition=kind, seed=1))
    assert np.array_equal(one, again) and not np.array_equal(one, other)


@pytest.mark.parametrize("flags", [dict(domain_fraction=0.2), dict(images_per_class=5)])
def test_the_seed_draws_a_clients_share_of_its_domain(flags):
    """The first files of a folder are those of its first classes."""
    one, other = [split(TEN, DOMAINS, partition="domain", clients=3, seed=seed, **flags) for seed in (0, 1)]
    assert set(np.concatenate(one)) != set(np.concatenate(other))


@pytest.mark.parametrize("beta", [1.0, 3.0])
def test_dirichlet_draws_its_shares_with_beta(beta):
    """The mean square of a share of Dir(β) is (β + 1) / (K (Kβ + 1))."""
    y, squares = np.zeros(2000, int), []
    for seed in range(250):
        counts = split_counts(y, partition="dirichlet", beta=beta, batch_size=1, seed=seed)
        squares.append(np.square(counts / 2000).mean())
    assert np.mean(squares) == pytest.approx((beta + 1) / (5 * (5 * beta + 1)), rel=0.06)


def test_dirichlet_gives_a_full_client_nothing_of_the_classes_that_follow():
    """A client that has N/K images gets nothing of later classes."""
    full_clients = images_of_nearly_full = 0
    for seed in range(3):
        counts = split_counts(TEN, partition="dirichlet", clients=20, seed=seed)
        for c in range(1, 10):
            held = counts[:, :c].sum(1)
            full = held >= 3000 / 20
            nearly_full = ~full & (held > 0.5 * 3000 / 20)
            assert not counts[full, c].any()
            full_clients += full.sum()
            images_of_nearly_full += counts[nearly_full, c].sum()
    assert full_clients > 10 and images_of_nearly_full > 10


def test_dirichlet_with_exactly_full_clients():
    """With N/K = 3 many clients hold exactly that. A tiny β gives whole classes to them; others get these then."""
    y, full_clients = np.arange(60) % 10, 0
    for beta in 0.1, 1e-4:
        for seed in range(10):
            counts = split_counts(y, partition="dirichlet", clients=20, beta=beta, seed=seed)
            for c in range(1, 10):
                full = counts[:, :c].sum(1) >= 3
                assert not counts[full, c].any()
                full_clients += full.sum()
    assert full_clients > 10


@pytest.mark.parametrize("seed", range(4))
def test_dirichlet_keeps_the_best_of_a_hundred_draws(seed):
    """No draw gives everyone the 12 images that are enough."""
    smallest = split_counts(TEN, partition="dirichlet", clients=60, seed=seed).sum(1).min()
    assert 2 < smallest < 12


def test_of_equally_good_draws_dirichlet_keeps_the_first(monkeypatch):
    draws = itertools.chain([np.array([0, 1, 1, 1])], itertools.repeat(np.array([0, 0, 0, 1])))
    monkeypatch.setattr(common, "dirichlet_owners", lambda *_: next(draws))
    assert [part.tolist() for part in split(np.zeros(4, int), partition="dirichlet", clients=2)] == [[0], [1, 2, 3]]


@pytest.mark.parametrize("kind", sorted(set(common.PARTITIONS) - {"domain"}))
def test_a_class_is_shuffled_before_it_is_divided(kind):
    """Glyphs lie there by domain: without it a client would have few domains."""
    for part in split(np.zeros(1000, int), partition=kind, clients=2, beta=1000, classes_per_client=1, missing=0):
        assert (part < 500).mean() == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("flags", [dict(clients=1501), dict(clients=None, domain_clients={"a": 1501})])
def test_more_clients_than_images_are_refused_at_once(flags, monkeypatch):
    """Each client needs two."""
    monkeypatch.setattr(common, "PARTITIONS", {})
    with pytest.raises(SystemExit) as stop:
        split(TEN, DOMAINS, partition="domain", **flags)
    assert stop.value.code == 2


@pytest.mark.parametrize("n, clients, fewest", [(800, 20, 10), (3000, 10, 20), (100, 40, 2)])
def test_the_fewest_images_of_a_client(n, clients, fewest):
    """Two batches or a quarter of an equal share, whichever is smaller."""
    args = SimpleNamespace(clients=clients, batch_size=10)
    assert common.fewest_images(np.zeros(n), args) == fewest


def test_pathological_deals_classes_evenly():
    """Three classes for each client, three owners for each class, a minimum for each owner; the seed draws them."""
    first_clients = set()
    for seed in range(20):
        counts = split_counts(TEN, partition="pathological", clients=10, classes_per_client=3, seed=seed)
        assert ((counts > 0).sum(1) == 3).all()  # three classes each,
        assert ((counts > 0).sum(0) == 3).all()  # three owners each,
        assert counts[counts > 0].min() >= 7     # two batches in all
        first_clients.add(tuple(counts[0].nonzero()[0]))
    assert len(first_clients) > 10


def test_pathological_cuts_a_class_anywhere():
    """No client always gets the largest piece."""
    sizes = []
    for seed in range(300):
        counts = split_counts(np.zeros(10000, int), partition="pathological", classes_per_client=1, seed=seed)
        sizes.append(counts.sum(1) / 10000)
    assert np.max(sizes, axis=1).mean() == pytest.approx(0.457, abs=0.03)  # of five pieces
    assert np.mean(sizes, axis=0) == pytest.approx(0.2, abs=0.04)


def test_dominant_classes():
    """Ten of 100 classes dominate each of 10 clients; 29.999999 images are 30."""
    counts = split_counts(np.arange(50000) % 100, partition="dominant", clients=10)
    is_dominant = np.arange(100) // 10 == np.arange(10)[:, None]
    np.testing.assert_array_equal(counts, np.where(is_dominant, 230, 30))  # ten classes with 46 % of 5,000
    counts = split_counts(TEN, partition="dominant", clients=10, dominant_share=0.1)
    np.testing.assert_array_equal(counts, 30)


def test_missing_classes():
    """Client i has classes i to i + 69 (mod 100), equally many images of each."""
    counts = split_counts(np.arange(50000) % 100, partition="missing", clients=50, missing=30)
    for i, row in enumerate(counts):
        assert set(row.nonzero()[0]) == {(i + j) % 100 for j in range(70)}
    assert len(set(counts[counts > 0])) == 1


def test_the_scarcest_class_decides():
    counts = split_counts(np.repeat([0, 1, 2], [30, 90, 60]), partition="missing", clients=3, missing=1)
    np.testing.assert_array_equal(counts, [[15, 15, 0], [0, 15, 15], [15, 0, 15]])


@pytest.mark.parametrize("flags, want", [
    (dict(clients=None), [(1000, "c"), (1000, "a"), (1000, "b")]),
    (dict(clients=4), [(500, "c"), (1000, "a"), (1000, "b"), (500, "c")]),
    (dict(clients=4, domain_fraction=0.2346), [(235, "c"), (235, "a"), (235, "b"), (235, "c")]),
    (dict(clients=4, images_per_class=7), [(70, "c"), (70, "a"), (70, "b"), (70, "c")]),
    (dict(domain_clients={"b": 3, "a": 1}), [(334, "b"), (333, "b"), (333, "b"), (1000, "a")]),
    (dict(domain_clients={"b": 2, "a": 1}, domain_fraction=0.25), [(250, "b"), (250, "b"), (250, "a")]),
    (dict(domain_clients={"b": 400}, domain_fraction=0.0025), [(2, "b")] * 400),
])
def test_domains(flags, want):
    """Each client has one domain and shares no image; 234.6 images are 235, but 2.5 are 2 if the domain has no more."""
    parts = split(TEN, DOMAINS, partition="domain", **flags)
    assert [(len(part), *set(DOMAINS[part])) for part in parts] == want
    assert len(set(np.concatenate(parts))) == sum(len(part) for part in parts)
