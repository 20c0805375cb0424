"""What every partition promises, over random settings; and what each one promises of its own."""

from types import SimpleNamespace

import numpy as np
import pytest

import common

KINDS = ["iid", "dirichlet", "pathological", "dominant", "missing", "domain"]

def split(y, domain=None, **other):
    usual = dict(seed=0, clients=5, partition="dirichlet", beta=0.1, batch_size=10, classes_per_client=2,
                 missing=1, dominant_share=0.46, domain_clients=None, domain_fraction=1.0)
    domain = np.arange(len(y)) % 3 if domain is None else domain
    return common.partition(SimpleNamespace(**{**usual, **other}), y, domain, ["a", "b", "c"])

@pytest.mark.parametrize("case", range(120))
def test_laws(case):
    rng, kind = np.random.default_rng(case), KINDS[case % 6]
    C = int(rng.integers(1, 30))
    N = int(rng.integers(max(20, 2 * C), 800))
    K = N // 2 if case // 6 % 4 == 0 else int(rng.integers(1, N // 2 + 1))  # up to N/2 clients
    own, absent = int(rng.integers(1, C + 1)), int(rng.integers(C))
    skew = rng.dirichlet(np.ones(C)) if case // 12 % 2 else None
    y = np.concatenate([np.arange(C), rng.choice(C, N - C, p=skew)])
    setting = dict(partition=kind, clients=K, beta=float(10 ** rng.uniform(-6, 3)), classes_per_client=own,
                   missing=absent, dominant_share=float(rng.uniform(0.05, 1)), domain_fraction=1 / K)
    parts, again, other = (split(y, **setting, seed=seed) for seed in (1, 1, 2))
    everything, sizes = np.concatenate(parts), np.array([len(part) for part in parts])
    table = np.array([np.bincount(y[part], minlength=C) for part in parts])
    assert len(parts) == K and all(map(np.array_equal, parts, again))
    assert len(everything) < 30 or not np.array_equal(everything, np.concatenate(other))
    assert len(np.unique(everything)) == len(everything) and set(everything) <= set(range(N))
    if kind in ("iid", "dirichlet") or kind == "pathological" and K * own >= C:
        assert len(everything) == N  # complete
    if kind in ("iid", "dominant"):
        assert sizes.max() - sizes.min() <= (1 if kind == "iid" else C)  # equal, but for rounding
    if kind == "dirichlet" and (setting["beta"] > 1 or K < C / 2):
        assert sizes.min() >= min(20, N // (4 * K))
    if kind == "pathological" and N // C > 20 * K:
        assert skew is not None or ((table > 0).sum(1) == own).all()
    if kind == "missing":
        assert not any(table[i, (i - 1 - j) % C] for i in range(K) for j in range(absent))
        assert all(len(set(column[column > 0])) <= 1 for column in table.T)  # equally shared

def test_dirichlet_skews_with_small_beta_and_evens_out_with_large():
    y, held = np.arange(6000) % 10, []
    for beta in (0.1, 100):
        table = np.array([np.bincount(y[part], minlength=10) for part in split(y, clients=20, beta=beta)])
        held.append((table > 0.02 * table.sum(1, keepdims=True)).sum(1).mean())
    assert held[0] < 5 < 9.5 < held[1]  # classes with more than 2 % of a client's images

def test_classes_are_dealt_as_the_papers_say():
    y = np.arange(50000) % 100
    own, dominant, lacking = (
        np.array([np.bincount(y[part], minlength=100) for part in split(y, **setting)]) for setting in (
            dict(partition="pathological", clients=20, classes_per_client=10),
            dict(partition="dominant", clients=10), dict(partition="missing", clients=50, missing=30)))
    assert ((own > 0).sum(1) == 10).all() and own.sum(1).max() > 1.3 * own.sum(1).min()  # unbalanced
    shares = np.where(np.arange(100) // 10 == np.arange(10)[:, None], 230, 30)  # ten large classes: 46 %
    assert np.array_equal(dominant, shares)
    for i, row in enumerate(lacking):
        assert set(row.nonzero()[0]) == {(i + j) % 100 for j in range(70)}

def test_domains_are_dealt_by_share_by_number_and_by_name():
    y, domain = np.arange(3000) % 10, np.arange(3000) // 10 % 3
    parts = split(y, domain, partition="domain", domain_clients={"b": 2, "a": 1}, domain_fraction=0.25)
    assert [(len(p), *set(domain[p])) for p in parts] == [(250, 1), (250, 1), (250, 0)]
    parts = split(y, domain, partition="domain", clients=4, domain_fraction=7)
    assert all((np.bincount(y[p]) == 7).all() for p in parts)
    assert [set(domain[p]) for p in parts] == [{0}, {1}, {2}, {0}]
    few = np.array([0] * 40 + [1] * 8)  # a client takes what there is
    part, = split(few, few * 0, partition="domain", clients=1, domain_fraction=30)
    assert np.bincount(few[part]).tolist() == [30, 8]
