"""What every partition promises, over random settings; and what each one promises of its own."""

import types

import numpy as np
import pytest

import common


def labels(n, classes, seed=0, skewed=False):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.ones(classes)) if skewed else None
    return np.concatenate([np.arange(classes), rng.choice(classes, n - classes, p=p)])


def request(**other):
    base = dict(seed=0, clients=5, partition="dirichlet", beta=0.1, batch_size=10, classes_per_client=2, dominant_share=0.46,
                missing=1, domain_clients=None, domain_fraction=1.0)
    return types.SimpleNamespace(**{**base, **other})


def split(y, **other):
    domain = np.arange(len(y)) % 3
    return common.partition(request(**other), y, domain, ["a", "b", "c"])


def random_requests(n):
    rng = np.random.default_rng(7)
    for _ in range(n):
        classes = int(rng.integers(1, 30))
        size = int(rng.integers(max(20, 2 * classes), 2000))
        kind = str(rng.choice(["iid", "dirichlet", "pathological", "dominant", "missing", "domain"]))
        yield dict(n=size, classes=classes, kind=kind, clients=int(rng.integers(1, size // 2 + 1)), seed=int(rng.integers(1000)),
                   beta=float(10 ** rng.uniform(-3, 3)), classes_per_client=int(rng.integers(1, classes + 1)),
                   missing=int(rng.integers(0, classes)), share=float(rng.uniform(0.05, 1)), skewed=bool(rng.integers(2)))


@pytest.mark.parametrize("case", list(random_requests(120)), ids=lambda c: f"{c['kind']}-n{c['n']}-C{c['classes']}-K{c['clients']}")
def test_every_partition_is_disjoint_and_repeatable(case):
    y = labels(case["n"], case["classes"], case["seed"], case["skewed"])
    setting = dict(partition=case["kind"], clients=case["clients"], seed=case["seed"], beta=case["beta"],
                   classes_per_client=case["classes_per_client"], missing=case["missing"], dominant_share=case["share"],
                   domain_fraction=1 / case["clients"])
    parts, again = split(y, **setting), split(y, **setting)
    everything = np.concatenate(parts)
    assert len(parts) == case["clients"]
    assert len(np.unique(everything)) == len(everything) and set(everything) <= set(range(len(y)))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again))
    if case["kind"] in ("iid", "dirichlet"):
        assert len(everything) == len(y) and min(map(len, parts)) >= 2
    if case["kind"] == "pathological":
        assert min(map(len, parts)) >= 2
        if case["clients"] * case["classes_per_client"] >= case["classes"]:
            assert len(everything) == len(y)


def test_other_seeds_give_other_partitions():
    y = labels(500, 10)
    for kind in ("iid", "dirichlet", "pathological", "dominant", "missing", "domain"):
        a, b = (split(y, partition=kind, seed=s, domain_fraction=0.4) for s in (0, 1))
        assert not all(np.array_equal(np.sort(p), np.sort(q)) for p, q in zip(a, b)), kind


def test_dirichlet_skews_with_small_beta_and_evens_out_with_large():
    y = labels(6000, 10)
    def classes_held(beta):
        return np.mean([(np.bincount(y[p], minlength=10) > 0.02 * len(p)).sum() for p in split(y, clients=20, beta=beta)])
    assert classes_held(0.1) < 5 < 9.5 < classes_held(100)


@pytest.mark.parametrize("beta", [1e-3, 0.1, 1e3])
@pytest.mark.parametrize("clients", [1, 2, 100])
def test_dirichlet_ends_and_feeds_everyone(beta, clients, capsys):
    y = labels(200, 10)
    parts = split(y, clients=clients, beta=beta)
    assert min(map(len, parts)) >= min(20, 200 // clients) and sum(map(len, parts)) == 200


def test_top_up_says_so(capsys):
    split(labels(200, 2), clients=100, beta=1e-3)
    assert "topped up" in capsys.readouterr().out


def test_pathological_gives_each_client_its_number_of_classes_and_owns_every_class():
    y = labels(5000, 10)
    parts = split(y, partition="pathological", clients=20, classes_per_client=3)
    assert all(len(np.unique(y[p])) == 3 for p in parts)
    assert len(np.concatenate(parts)) == 5000
    sizes = np.array([len(p) for p in parts])
    assert sizes.max() > 2 * sizes.min()  # unbalanced


def test_dominant_matches_the_paper():
    y = np.repeat(np.arange(10), 500)
    for i, part in enumerate(split(y, partition="dominant", clients=10)):
        counts = np.bincount(y[part], minlength=10)
        assert counts[i] == 230 and all(counts[c] == 30 for c in range(10) if c != i)


def test_dominant_with_many_classes_uses_all_data():
    y = np.repeat(np.arange(100), 500)
    for i, part in enumerate(split(y, partition="dominant", clients=10)):
        counts = np.bincount(y[part], minlength=100)
        assert len(part) == 5000 and counts[10 * i:10 * i + 10].tolist() == [230] * 10 and counts.min() == 30


def test_a_single_client_of_a_domain_takes_what_there_is(capsys):
    y = np.array([0] * 40 + [1] * 8)
    part, = common.by_domain(y, np.zeros(48, int), [0], 30, np.random.default_rng(0))
    assert np.bincount(y[part]).tolist() == [30, 8] and "takes them all" in capsys.readouterr().out


def test_missing_holds_the_classes_in_a_row():
    y = np.repeat(np.arange(10), 420)
    for i, part in enumerate(split(y, partition="missing", clients=10, missing=3)):
        counts = np.bincount(y[part], minlength=10)
        assert {c for c in range(10) if counts[c]} == {(i + j) % 10 for j in range(7)}
        assert len({int(c) for c in counts if c}) == 1


def test_domain_counts_fractions_and_names():
    y = labels(3000, 10)
    parts = split(y, partition="domain", domain_clients={"b": 2, "a": 1}, domain_fraction=0.25)
    assert [len(p) for p in parts] == [250, 250, 250]
    assert [set(p % 3) for p in parts] == [{1}, {1}, {0}]
    parts = split(y, partition="domain", clients=3, domain_fraction=7)
    assert all((np.bincount(y[p], minlength=10) == 7).all() for p in parts)
    assert [set(p % 3) for p in parts] == [{0}, {1}, {2}]


@pytest.mark.parametrize("setting,words", [
    (dict(clients=101), "--clients 101: must be in [1, 100]"),
    (dict(partition="pathological", classes_per_client=11), "--classes-per-client 11: must be in [1, 10]"),
    (dict(partition="missing", missing=10), "--missing 10: must be in [0, 9]"),
    (dict(partition="domain", domain_clients={"x": 1}), "--domain-clients x: no such domain, choose from a, b, c"),
    (dict(partition="domain", clients=3, domain_fraction=500), "--domain-fraction 500:"),
    (dict(partition="domain", domain_clients={"a": 2}, domain_fraction=0.6), "--domain-fraction 0.6:")])
def test_what_cannot_be_had_is_one_line_and_status_2(setting, words, capsys):
    with pytest.raises(SystemExit) as stop:
        split(labels(200, 10), **setting)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "pathological", "dominant", "missing"])
@pytest.mark.parametrize("classes", [1, 2])
def test_half_as_many_clients_as_samples(kind, classes, capsys):
    """K = N/2, with all samples in one class, too: everyone gets something, or one line says why not."""
    import types
    y = np.arange(40) % classes
    for beta in (1e-3, 1e3):
        args = types.SimpleNamespace(seed=0, clients=20, batch_size=10, partition=kind, beta=beta, classes_per_client=1, missing=classes - 1, dominant_share=0.5)
        try:
            parts = common.partition(args, y, np.zeros(40, int), ["one"])
        except SystemExit as stop:
            assert stop.code == 2 and capsys.readouterr().err.count("\n") == 1
        else:
            taken = np.concatenate(parts)
            assert len(parts) == 20 and len(np.unique(taken)) == len(taken) and min(map(len, parts)) >= 1
