"""Partitions: what all of them promise, over random settings, and what each one promises of its own."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

import common

KINDS = ["iid", "dirichlet", "pathological", "dominant", "missing", "domain"]


def split(y, domain=None, **other):
    """Divide samples of three domains, or of the `domain` given -> an index array for each client."""
    usual = dict(seed=0, clients=5, partition="dirichlet", beta=0.1, batch_size=10, classes_per_client=2, missing=1,
                 dominant_share=0.46, domain_clients=None, domain_fraction=None, images_per_class=None)
    if domain is None:
        domain = np.arange(len(y)) % 3
    return common.partition(y, np.array(["a", "b", "c"])[domain], SimpleNamespace(**{**usual, **other}))


def class_table(y, parts, C):
    """How many images of each class every client has, (K, C)."""
    return np.array([np.bincount(y[part], minlength=C) for part in parts])


def random_setting(case):
    """Labels, number of classes, flags: up to N/2 clients, even and skewed classes."""
    rng, kind = np.random.default_rng(case), KINDS[case % 6]
    C = int(rng.integers(1, 30))
    N = int(rng.integers(max(20, 2 * C), 800))
    K = N // 2 if case // 6 % 4 == 0 else int(rng.integers(1, N // 2 + 1))
    own, absent = int(rng.integers(1, C + 1)), int(rng.integers(C))
    skew = rng.dirichlet(np.ones(C)) if case // 12 % 2 else None
    y = np.concatenate([np.arange(C), rng.choice(C, N - C, p=skew)])
    flags = dict(partition=kind, clients=K, beta=float(10 ** rng.uniform(-6, 3)), classes_per_client=own,
                 missing=absent, dominant_share=float(rng.uniform(0.05, 1)))
    if kind == "domain":  # every third client has images of the same domain
        flags["clients"] = max(1, min(K, N // 24))
        flags["domain_fraction"] = float(rng.uniform(0.5, 0.8)) / math.ceil(flags["clients"] / 3)
    return y, C, flags, skew is None


@pytest.mark.parametrize("case", range(120))
def test_laws(case):
    """Catches: an image at two clients or (where all are divided) at none; another partition at the same seed, the same
    one at another; a client without images; classes that the setting does not allow."""
    y, C, flags, even = random_setting(case)
    N, K, kind = len(y), flags["clients"], flags["partition"]
    parts, again, other = [split(y, **flags, seed=seed) for seed in (1, 1, 2)]
    everything, sizes, table = np.concatenate(parts), np.array([len(part) for part in parts]), class_table(y, parts, C)
    assert len(parts) == K
    assert all(map(np.array_equal, parts, again))
    assert len(everything) < 30 or not np.array_equal(everything, np.concatenate(other))
    assert len(np.unique(everything)) == len(everything) and set(everything) <= set(range(N))

    own, absent = flags["classes_per_client"], flags["missing"]
    if kind in ("iid", "dirichlet") or kind == "pathological" and K * own >= C:
        assert len(everything) == N
    if kind == "domain":
        assert all(set(part % 3) == {i % 3} for i, part in enumerate(parts))
    if kind == "iid":
        assert sizes.max() - sizes.min() <= 1
    if kind == "dominant":
        assert sizes.max() - sizes.min() <= C  # equal, but for rounding
    if kind == "dirichlet" and (flags["beta"] > 1 or K < C / 2):
        assert sizes.min() >= min(20, N // (4 * K))
    if kind == "pathological" and N // C > 20 * K and even:
        assert ((table > 0).sum(1) == own).all()
    if kind == "missing":
        for i in range(K):
            assert not any(table[i, (i - 1 - j) % C] for j in range(absent))
        for column in table.T:
            assert len(set(column[column > 0])) <= 1  # equally shared


SUMS = {  # of each client's image numbers, seed 0
    "iid": [44995, 43821, 46284, 44600],
    "dirichlet": [44531, 49481, 53630, 32058],
    "pathological": [36000, 35760, 36120, 36240],
    "dominant": [35847, 38995, 42253, 43571],
    "missing": [37770, 37975, 44600, 41445],
    "domain": [29292, 59900, 60100, 30408]}


@pytest.mark.parametrize("kind", SUMS)
def test_a_seed_draws_what_it_drew_for_the_published_runs(kind):
    """Catches: another draw that is as good: the numbers on the pages would be of images that no command gives."""
    parts = split(np.arange(600) % 10, partition=kind, clients=4)
    assert [part.sum() for part in parts] == SUMS[kind]
    if kind == "pathological":  # with several owners of a class, which is cut among them
        parts = split(np.arange(600) % 10, partition=kind, clients=4, classes_per_client=5)
        assert [part.sum() for part in parts] == [55663, 53943, 40317, 29777]


def test_dirichlet_skews_with_small_beta_and_evens_out_with_large():
    """Catches: β on the wrong side, or shares of a client drawn over classes."""
    y, held = np.arange(6000) % 10, []
    for beta in (0.1, 100):
        table = class_table(y, split(y, clients=20, beta=beta), 10)
        held.append((table > 0.02 * table.sum(1, keepdims=True)).sum(1).mean())
    assert held[0] < 5 < 9.5 < held[1]  # classes with more than 2 % of a client's images


def test_dirichlet_leaves_nobody_with_less_than_two_batches():
    """Catches: no redraw, as in FedFM's and HtFLlib's code. Without it someone is left with a handful of images."""
    y = np.arange(4000) % 10
    for seed in range(5):
        parts = split(y, clients=20, beta=0.1, batch_size=15, seed=seed)
        assert min(len(part) for part in parts) >= 30
        assert max(len(part) for part in parts) < 200 + 400  # who holds N/K gets no further class


def test_classes_are_dealt_as_the_papers_say():
    """Catches: pathological with equal clients, or with a class that many own and another that nobody owns; NIID-2
    with one dominant class of 100 for 10 clients; NIID-3 with another class missing."""
    y = np.arange(50000) % 100
    table = class_table(y, split(y, partition="pathological", clients=20, classes_per_client=10), 100)
    assert ((table > 0).sum(1) == 10).all() and ((table > 0).sum(0) == 2).all()  # ten classes, two owners each
    assert table.sum(1).max() > 1.3 * table.sum(1).min()  # unbalanced

    table = class_table(y, split(y, partition="dominant", clients=10), 100)
    ten_large = np.arange(100) // 10 == np.arange(10)[:, None]  # together 46 %
    assert np.array_equal(table, np.where(ten_large, 230, 30))

    table = class_table(y, split(y, partition="missing", clients=50, missing=30), 100)
    for i, row in enumerate(table):
        assert set(row.nonzero()[0]) == {(i + j) % 100 for j in range(70)}


def test_pathological_leaves_every_owner_two_batches():
    """Catches: an owner of a class with a few of its images or none, where the random cuts are close together."""
    y = np.arange(3000) % 10
    for seed in range(20):
        table = class_table(y, split(y, partition="pathological", clients=10, batch_size=10, seed=seed), 10)
        assert ((table > 0).sum(1) == 2).all() and table[table > 0].min() >= 10  # two classes, together 20 images


Y, DOMAIN = np.arange(3000) % 10, np.arange(3000) // 10 % 3  # 1,000 images a domain, 100 of them a class


def described(parts):
    """(images, domain) of each client, which has one domain only."""
    assert all(len(set(DOMAIN[part])) == 1 for part in parts)
    assert len(set(np.concatenate(parts))) == sum(len(part) for part in parts)
    return [(len(part), DOMAIN[part[0]]) for part in parts]


def test_domains_are_dealt_in_turn_or_by_name():
    """Catches: clients of other domains than asked for; two clients with the same images."""
    parts = split(Y, DOMAIN, partition="domain", clients=4, domain_fraction=0.3)
    assert described(parts) == [(300, 0), (300, 1), (300, 2), (300, 0)]
    parts = split(Y, DOMAIN, partition="domain", clients=None, domain_fraction=1.0)
    assert described(parts) == [(1000, 0), (1000, 1), (1000, 2)]
    parts = split(Y, DOMAIN, partition="domain", domain_clients={"b": 2, "a": 1}, domain_fraction=0.25)
    assert described(parts) == [(250, 1), (250, 1), (250, 0)]


def test_without_a_share_the_clients_of_a_domain_divide_it_equally():
    """Catches: all of it to the first, or a part to nobody."""
    parts = split(Y, DOMAIN, partition="domain", clients=None)
    assert described(parts) == [(1000, 0), (1000, 1), (1000, 2)]
    parts = split(Y, DOMAIN, partition="domain", clients=4)
    assert described(parts) == [(500, 0), (1000, 1), (1000, 2), (500, 0)]
    parts = split(Y, DOMAIN, partition="domain", domain_clients={"c": 4, "a": 1})
    assert described(parts) == [(250, 2)] * 4 + [(1000, 0)]


def test_images_per_class():
    """Catches: so many in all instead of each class; more than there are; two clients with the same images."""
    parts = split(Y, DOMAIN, partition="domain", clients=4, images_per_class=7)
    assert described(parts) == [(70, 0), (70, 1), (70, 2), (70, 0)]
    assert (class_table(Y, parts, 10) == 7).all()
    few = np.array([0] * 40 + [1] * 8)  # a client takes what there is
    part, = split(few, few * 0, partition="domain", clients=1, images_per_class=30)
    assert np.bincount(few[part]).tolist() == [30, 8]


def test_a_domain_that_is_unknown_is_named(capsys):
    """Catches: a traceback."""
    with pytest.raises(SystemExit) as stop:
        split(Y, DOMAIN, partition="domain", domain_clients={"a": 1, "moon": 1})
    assert stop.value.code == 2 and "no domain moon: give --domain-clients with some of a, b, c" in capsys.readouterr().err


def test_a_share_that_the_clients_of_a_domain_do_not_all_get_is_named(capsys):
    """Catches: 600 images for one client and 400 for the next."""
    with pytest.raises(SystemExit) as stop:
        split(Y, DOMAIN, partition="domain", clients=4, domain_fraction=0.6)
    assert stop.value.code == 2 and "--domain-fraction 0.6: must be at most 1/2" in capsys.readouterr().err


@pytest.mark.parametrize("n, clients", [(35, 10), (1060, 100), (1005, 10)])
def test_a_domain_that_does_not_divide_evenly(n, clients):
    """Catches: a last client without images, or images that nobody gets."""
    y = np.zeros(n, int)
    sizes = [len(part) for part in split(y, y, partition="domain", domain_clients={"a": clients})]
    assert sum(sizes) == n and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("n, clients, batch_size, least", [(800, 20, 10, 10), (3000, 10, 10, 20), (3000, 10, 64, 75),
                                                           (100, 40, 10, 2)])
def test_the_least_that_a_client_gets(n, clients, batch_size, least):
    """Catches: half of an equal share, or one batch: Dirichlet's divisions would be drawn again more or less often."""
    args = SimpleNamespace(clients=clients, batch_size=batch_size)
    assert common.fewest_images(np.zeros(n), args) == least


def test_the_least_that_an_owner_of_a_class_gets():
    """Catches: rounded down: 20 images of three classes are at least 7 of each."""
    y = np.arange(3000) % 10
    for seed in range(20):
        parts = split(y, partition="pathological", clients=10, classes_per_client=3, batch_size=10, seed=seed)
        counts = class_table(y, parts, 10)
        assert counts[counts > 0].min() >= 7 and counts.sum(1).min() >= 20


def test_a_share_of_a_domain_is_rounded():
    """Catches: 14 of 14.7 images."""
    part, = split(np.zeros(35, int), np.zeros(35, int), partition="domain", domain_clients={"a": 1}, domain_fraction=0.42)
    assert len(part) == 15
