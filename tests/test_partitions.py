"""Partitions: what all of them promise, and what each one promises of its own."""

from types import SimpleNamespace

import numpy as np
import pytest

import common

TEN = np.arange(3000) % 10                                         # 300 images of each of ten classes
DOMAINS = np.array(["a", "b", "c"])[np.arange(3000) // 10 % 3]     # 1,000 images a domain, 100 of them a class


def split(y, domain=None, **flags):
    """Divide images of classes y and one domain, or several -> an index array for each client."""
    usual = dict(seed=0, clients=5, beta=0.1, batch_size=10, classes_per_client=2, missing=1, dominant_share=0.46,
                 domain_clients=None, domain_fraction=None, images_per_class=None)
    if domain is None:
        domain = np.full(len(y), "a")
    return common.partition(y, domain, SimpleNamespace(**usual | flags))


def table(y, parts):
    """How many images of each class every client has, (K, C)."""
    return np.array([np.bincount(y[part], minlength=y.max() + 1) for part in parts])


# --- all partitions -------------------------------------------------------------------------------

LABELS = {
    "even": np.arange(240) % 10,
    "skewed": np.repeat(np.arange(6), [1, 2, 7, 40, 50, 100]),
    "one class": np.zeros(60, int),
    "many classes": np.arange(60) % 29,
}


@pytest.mark.parametrize("kind", common.PARTITIONS)
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("K", [1, 6, 15])
def test_no_image_is_at_two_clients(kind, labels, K):
    """Catches: an image at two clients or, where all are divided, at none; an image that does not exist."""
    y = LABELS[labels]
    C = len(set(y))
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
    """Catches: images in their order, or drawn by another generator than the seed's."""
    one, again, other = [np.concatenate(split(TEN, DOMAINS, partition=kind, seed=seed)) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)


def test_iid_clients_have_equally_many_images():
    """Catches: a last client with the rest."""
    sizes = [len(part) for part in split(TEN[:1005], partition="iid", clients=10)]
    assert sorted(sizes) == [100] * 5 + [101] * 5


# --- dirichlet ------------------------------------------------------------------------------------

def test_dirichlet_skews_with_small_beta_and_evens_out_with_large():
    """Catches: β on the wrong side, or a client's shares drawn over classes."""
    y = np.arange(6000) % 10
    held = []
    for beta in 0.1, 100:
        counts = table(y, split(y, partition="dirichlet", clients=20, beta=beta))
        large = counts > 0.02 * counts.sum(1, keepdims=True)  # classes with more than 2 % of a client's images
        held.append(large.sum(1).mean())
    assert held[0] < 5 and held[1] > 9.5


def test_dirichlet_leaves_nobody_with_less_than_two_batches():
    """Catches: no second draw, which leaves someone with a handful of images; a full client that gets more classes."""
    y = np.arange(4000) % 10
    for seed in range(5):
        sizes = [len(part) for part in split(y, partition="dirichlet", clients=20, batch_size=15, seed=seed)]
        assert min(sizes) >= 30
        assert max(sizes) < 200 + 400  # below an equal share, and one class more


@pytest.mark.parametrize("n, clients, batch_size, fewest", [(800, 20, 10, 10), (3000, 10, 10, 20), (3000, 10, 64, 75),
                                                            (100, 40, 10, 2)])
def test_the_fewest_images_of_a_client(n, clients, batch_size, fewest):
    """Catches: half of an equal share, or one batch: dirichlet would draw again more or less often."""
    assert common.fewest_images(np.zeros(n), SimpleNamespace(clients=clients, batch_size=batch_size)) == fewest


# --- pathological ---------------------------------------------------------------------------------

def test_pathological_deals_classes_evenly():
    """Catches: a class that many own beside one that nobody owns, or equally large clients."""
    y = np.arange(50000) % 100
    counts = table(y, split(y, partition="pathological", clients=20, classes_per_client=10))
    assert ((counts > 0).sum(1) == 10).all()  # ten classes each,
    assert ((counts > 0).sum(0) == 2).all()   # two owners each
    assert counts.sum(1).max() > 1.3 * counts.sum(1).min()


@pytest.mark.parametrize("each, fewest", [(2, 10), (3, 7)])
def test_pathological_leaves_every_owner_two_batches(each, fewest):
    """Catches: an owner with a few images of a class, where random cuts are close; 20 / 3 images rounded down to 6."""
    for seed in range(20):
        flags = dict(clients=10, classes_per_client=each, batch_size=10)
        counts = table(TEN, split(TEN, partition="pathological", seed=seed, **flags))
        assert ((counts > 0).sum(1) == each).all()
        assert counts[counts > 0].min() >= fewest


# --- FedFM's NIID-2 and NIID-3 --------------------------------------------------------------------

def test_dominant_classes():
    """Catches: one dominant class of 100 for 10 clients, another share for the rest, 29.999999 images made 29."""
    y = np.arange(50000) % 100
    counts = table(y, split(y, partition="dominant", clients=10))
    is_dominant = np.arange(100) // 10 == np.arange(10)[:, None]
    np.testing.assert_array_equal(counts, np.where(is_dominant, 230, 30))  # ten classes with 46 % of 5,000
    counts = table(TEN, split(TEN, partition="dominant", clients=10, dominant_share=0.1))
    np.testing.assert_array_equal(counts, 30)


def test_missing_classes():
    """Catches: another number of classes, another first class, clients that share a class unequally."""
    y = np.arange(50000) % 100
    counts = table(y, split(y, partition="missing", clients=50, missing=30))
    for i, row in enumerate(counts):
        assert set(row.nonzero()[0]) == {(i + j) % 100 for j in range(70)}
    assert len(set(counts[counts > 0])) == 1


def test_the_scarcest_class_decides():
    """Catches: more images than a class has, or fewer than it allows."""
    y = np.repeat([0, 1, 2], [30, 90, 60])
    counts = table(y, split(y, partition="missing", clients=3, missing=1))
    np.testing.assert_array_equal(counts, [[15, 15, 0], [0, 15, 15], [15, 0, 15]])


# --- domains --------------------------------------------------------------------------------------

def by_domain(**flags):
    """Divide three domains of 1,000 images -> (images, domain) of each client, which has one domain only."""
    parts = split(TEN, DOMAINS, partition="domain", **flags)
    assert len(set(np.concatenate(parts))) == sum(len(part) for part in parts)
    for part in parts:
        assert len(set(DOMAINS[part])) == 1
    return [(len(part), DOMAINS[part[0]]) for part in parts]


@pytest.mark.parametrize("flags, want", [
    (dict(clients=4, domain_fraction=0.3), [(300, "a"), (300, "b"), (300, "c"), (300, "a")]),
    (dict(clients=None, domain_fraction=1.0), [(1000, "a"), (1000, "b"), (1000, "c")]),
    (dict(domain_clients={"b": 2, "a": 1}, domain_fraction=0.25), [(250, "b"), (250, "b"), (250, "a")]),
    (dict(clients=None), [(1000, "a"), (1000, "b"), (1000, "c")]),
    (dict(clients=4), [(500, "a"), (1000, "b"), (1000, "c"), (500, "a")]),
    (dict(domain_clients={"c": 4, "a": 1}), [(250, "c")] * 4 + [(1000, "a")]),
    (dict(clients=4, images_per_class=7), [(70, "a"), (70, "b"), (70, "c"), (70, "a")]),
])
def test_domains(flags, want):
    """Catches: clients of other domains than asked for, or with the same images; a part that nobody gets."""
    assert by_domain(**flags) == want


def test_images_per_class():
    """Catches: so many in all instead of each class; more than there are."""
    counts = table(TEN, split(TEN, DOMAINS, partition="domain", clients=4, images_per_class=7))
    np.testing.assert_array_equal(counts, 7)
    few = np.repeat([0, 1], [40, 8])
    counts = table(few, split(few, partition="domain", clients=1, images_per_class=30))
    np.testing.assert_array_equal(counts, [[30, 8]])


def test_a_share_of_a_domain_is_rounded():
    """Catches: 14 of 14.7 images."""
    part, = split(TEN[:35], partition="domain", clients=1, domain_fraction=0.42)
    assert len(part) == 15


@pytest.mark.parametrize("n, clients", [(35, 10), (1060, 100), (1005, 10)])
def test_a_domain_that_does_not_divide_evenly(n, clients):
    """Catches: a last client without images, or images that nobody gets."""
    y = np.zeros(n, int)
    sizes = [len(part) for part in split(y, partition="domain", domain_clients={"a": clients})]
    assert sum(sizes) == n and max(sizes) - min(sizes) <= 1
