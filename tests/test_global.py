"""The methods with one global model: equations against slow references, FINCH*, averaging, domains, and FedAvg as the common floor."""

import math
import types

import numpy as np
import pytest
import torch
import torch.nn as nn

import common
import fedfm
import fedlsa
import fedplcc
from test_losses import CASES, cross_entropy, vectors
from test_scripts import log, numbers

SCRIPTS = [fedfm, fedlsa, fedplcc]
SMALL = "--domain-fraction 3 --rounds 2 --local-epochs 1 --no-plots --subset 0.5".split()


def cosine(a, b):
    dot, na, nb = (sum(float(x) * float(y) for x, y in zip(*pair)) for pair in ((a, b), (a, a), (b, b)))
    return dot / math.sqrt(na * nb)


# --- FedFM ---

@pytest.mark.parametrize("B,C,D", CASES)
@pytest.mark.parametrize("missing", [0, 1, 99])
def test_contrastive_guiding_and_squared_distance(B, C, D, missing):
    z, A, y = vectors(B, D, 1), vectors(C, D, 2), torch.arange(B) % C
    present = torch.arange(C) >= missing
    held = [c for c in range(C) if present[c]]
    guide, square = [], []
    for b in range(B):
        if present[y[b]]:
            guide.append(cross_entropy([cosine(z[b], A[c]) / 0.1 for c in held], held.index(int(y[b]))))
            square.append(2 - 2 * cosine(z[b], A[y[b]]))  # of two unit vectors
    expected = (np.mean(guide), np.mean(square)) if guide else (0, 0)
    assert fedfm.contrastive_guiding(z, y, A, present, 0.1).item() == pytest.approx(expected[0], rel=1e-9, abs=1e-12)
    assert fedfm.squared_distance(z, y, A, present).item() == pytest.approx(expected[1], rel=1e-9, abs=1e-12)
    z.requires_grad_()
    fedfm.contrastive_guiding(z, y, A, present, 0.1).backward()
    assert torch.isfinite(z.grad).all()


@pytest.mark.parametrize("how", ["weighted", "uniform"])
def test_aggregate_anchors(how):
    K, C, D = 4, 5, 3
    P, n = torch.randn(K, C, D), torch.randint(1, 9, (K, C)).float()
    n[0, 0], n[:, 1], n[:3, 2], n[1, 3] = 0, 0, 0, 0
    previous, present = torch.randn(C, D), torch.tensor([True, True, False, True, False])
    new, known = fedfm.aggregate_anchors(P, n, previous, present, how)
    for c in range(C):
        owners = [k for k in range(K) if n[k, c] > 0]
        if not owners:
            expected = previous[c]
        elif how == "weighted":
            expected = sum(n[k, c] * P[k, c] for k in owners) / sum(n[k, c] for k in owners)
        elif present[c]:  # who lacks the class counts with the previous anchor
            expected = (sum(P[k, c] for k in owners) + (K - len(owners)) * previous[c]) / K
        else:
            expected = sum(P[k, c] for k in owners) / len(owners)
        assert torch.allclose(new[c], expected, rtol=1e-5, atol=1e-6), c
    assert known.tolist() == [True, True, True, True, True]


def test_proximal():
    net = nn.Linear(2, 1)
    reference = [w.detach() - 2 for w in net.parameters()]
    assert fedfm.proximal(net, reference).item() == pytest.approx(0.5 * 3 * 4)


# --- FedLSA ---

@pytest.mark.parametrize("B,C,D", CASES)
def test_compactness(B, C, D):
    h, A, y = (nn.functional.normalize(vectors(n, D, s), dim=1) for n, s in ((B, 3), (C, 4))), None, torch.arange(B) % C
    h, A = h
    dots = [[sum(float(p) * float(q) for p, q in zip(h[b], A[c])) for c in range(C)] for b in range(B)]
    expected = np.mean([cross_entropy([v / 0.2 for v in dots[b]], int(y[b])) for b in range(B)])
    assert fedlsa.compactness(h, y, A, 0.2).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert fedlsa.compactness(h, y, A, 0.2, "l2").item() == pytest.approx(np.mean([2 - 2 * dots[b][y[b]] for b in range(B)]), abs=1e-12)


@pytest.mark.parametrize("C", [1, 2, 7])
def test_anchor_losses(C):
    assert torch.isfinite(fedlsa.anchor_separation(torch.ones(3, 1), 0.001))  # exp(1000) is not a float32
    A, h = nn.functional.normalize(vectors(C, 4, 5), dim=1), nn.Linear(4, C).double().requires_grad_(False)
    separation = [math.log(sum(math.exp(sum(float(p) * float(q) for p, q in zip(A[i], A[j])) / 0.1) for j in range(C) if j != i) / (C - 1))
                  for i in range(C)] if C > 1 else [0]
    assert fedlsa.anchor_separation(A, 0.1).item() == pytest.approx(np.mean(separation), rel=1e-9)
    logits = h(A)
    assert fedlsa.anchor_classification(A, h).item() == pytest.approx(np.mean([cross_entropy(logits[c].tolist(), c) for c in range(C)]), rel=1e-9, abs=1e-12)


def test_more_separation_means_larger_angles():
    def smallest_angle(alpha):
        args = types.SimpleNamespace(classes=10, feature_dim=128, alpha=alpha, tau=0.1, lr=0.01, momentum=0.9, weight_decay=1e-5,
                                     server_steps=500, device="cpu")
        server, classifier = common.seeded(lambda: (fedlsa.make_server(args), nn.Linear(128, 10)), 0, "x")
        before = {k: v.clone() for k, v in classifier.state_dict().items()}
        anchors, _ = fedlsa.server_update(server, classifier, args)
        assert all(torch.equal(before[k], v) for k, v in classifier.state_dict().items())  # frozen
        assert torch.allclose(anchors.norm(dim=1), torch.ones(10), atol=1e-5)
        return float((anchors @ anchors.T).fill_diagonal_(-1).max().acos())
    angles = [smallest_angle(a) for a in (0, 0.02, 0.4)]
    assert angles[0] < angles[1] < angles[2]


# --- FedPLCC ---

def naive_finch(x, w, level):
    """Lists and loops: nearest other vector (the first of equals), components by repeated merging, weighted means."""
    x, w, merged = [list(map(float, v)) for v in x], list(map(float, w)), False
    while len(x) > 1:
        n = len(x)
        near = []
        for i in range(n):
            best = max((cosine_or_zero(x[i], x[j]), -j) for j in range(n) if j != i)
            near.append(-best[1])
        group = list(range(n))
        for i in range(n):
            for j in range(n):
                if near[i] == j or near[j] == i or near[i] == near[j]:
                    a, b = group[i], group[j]
                    group = [min(a, b) if g in (a, b) else g for g in group]
        names = sorted(set(group))
        if len(names) == 1 and merged:
            break
        members = [[i for i in range(n) if group[i] == g] for g in names]
        total = [sum(w[i] for i in m) for m in members]
        x = [[sum(w[i] * x[i][d] for i in m) / t for d in range(len(x[0]))] for m, t in zip(members, total)]
        w, merged = total, True
        if len(names) == 1 or level == "first":
            break
    return x, w


def cosine_or_zero(a, b):
    na, nb = math.sqrt(sum(v * v for v in a)), math.sqrt(sum(v * v for v in b))
    return sum(p * q for p, q in zip(a, b)) / (na * nb) if na and nb else 0.0


def clusters(x, w):
    return sorted((round(float(t), 6), *(round(float(v), 6) for v in row)) for row, t in zip(x, w))


@pytest.mark.parametrize("level", ["last", "first"])
@pytest.mark.parametrize("n,d", [(1, 3), (2, 3), (3, 2), (5, 4), (12, 2), (30, 8), (60, 3)])
def test_finch_is_the_naive_algorithm(n, d, level):
    for seed in range(5):
        x, w = vectors(n, d, seed), torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.5
        got, expected = fedplcc.finch(x, w, level), naive_finch(x, w, level)
        assert clusters(*got) == clusters(*expected)
        assert float(got[1].sum()) == pytest.approx(float(w.sum()))


def test_finch_with_ties_duplicates_and_zeros():
    axes = torch.tensor([[1, 0], [1, 0], [0, 1], [0, 1], [1, 0], [0, 1]], dtype=torch.float64)
    centres, weights = fedplcc.finch(axes, torch.ones(6, dtype=torch.float64))
    assert clusters(centres, weights) == [(3, 0, 1), (3, 1, 0)]
    for x in (torch.ones(7, 3), torch.zeros(4, 2), torch.eye(5)):  # all equal, all zero, all equally far
        centres, weights = fedplcc.finch(x.double(), torch.ones(len(x), dtype=torch.float64))
        assert float(weights.sum()) == len(x) and torch.isfinite(centres).all()
        assert clusters(centres, weights) == clusters(*naive_finch(x, torch.ones(len(x)), "last"))


def test_a_prototype_is_the_mean_of_the_samples_behind_it():
    x = vectors(80, 6, 3)
    centres, weights = fedplcc.finch(x, torch.ones(80, dtype=torch.float64))
    assert torch.allclose((centres * weights.unsqueeze(1)).sum(0), x.sum(0))


@pytest.mark.parametrize("G", [1, 4, 9])
def test_contrast_and_similarity(G):
    B, D, alpha, tau = 6, 5, 0.5, 0.07
    z, P, W = vectors(B, D, 1).abs(), vectors(G, D, 2), torch.rand(G, dtype=torch.float64) + 0.1
    classes, y = torch.arange(G) % 3, torch.tensor([0, 1, 2, 0, 1, 3])  # nobody has class 3
    s = fedplcc.similarity(z, P, alpha)
    total, known = 0, 0
    for b in range(B):
        e = [math.exp(max(cosine(z[b], P[g]), 1e-6) ** alpha / tau) * float(W[g]) for g in range(G)]
        own = sum(e[g] for g in range(G) if classes[g] == y[b])
        if own:
            total, known = total - math.log(own / sum(e)), known + 1
    assert fedplcc.contrast(s, y, classes, W, tau).item() == pytest.approx(total / known, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("phi", [0.01, 0.1, 0.15, 0.3, 0.5, 0.999, 1.0])
def test_correlation_takes_the_top_share_for_every_number_of_prototypes(phi):
    for n in (*range(1, 31), 50, 100, 200):
        s, W = torch.rand(3, n + 2, dtype=torch.float64), torch.rand(n + 2, dtype=torch.float64)
        classes, y = torch.tensor([0] * n + [1, 2]), torch.tensor([0, 1, 0])
        total = 0
        for b in range(3):
            own = sorted((float(s[b, g] * W[g]) for g in range(n + 2) if classes[g] == y[b]), reverse=True)
            exact = round(phi * 1000) * len(own)
            total -= sum(own[:-(-exact // 1000)])
        assert fedplcc.correlation(s, y, classes, W, phi).item() == pytest.approx(total / 3, rel=1e-9)


def test_gradients_of_the_clustered_losses():
    z, P, W = vectors(4, 5, 1).abs().requires_grad_(), vectors(6, 5, 2).abs(), torch.rand(6, dtype=torch.float64) + 0.1
    y, classes = torch.tensor([0, 1, 2, 1]), torch.arange(6) % 3
    assert torch.autograd.gradcheck(lambda z: fedplcc.contrast(fedplcc.similarity(z, P, 0.5), y, classes, W, 0.07), (z,))
    assert torch.autograd.gradcheck(lambda z: fedplcc.correlation(fedplcc.similarity(z, P, 0.5), y, classes, W, 0.5), (z,))


def test_global_prototypes_weigh_one_per_class():
    args = types.SimpleNamespace(finch_level="last", uniform_weights=False)
    uploads = [(vectors(n, 4, n), torch.arange(n) % 3, torch.rand(n, dtype=torch.float64) + 1) for n in (5, 9)]
    G, classes, weights = fedplcc.global_prototypes(uploads, args)
    assert all(float(weights[classes == c].sum()) == pytest.approx(1) for c in range(3)) and len(G) == len(classes)
    args.uniform_weights = True
    assert set(fedplcc.global_prototypes(uploads, args)[2].tolist()) == {1.0}


# --- what they share ---

def test_model_mean_averages_floats_and_keeps_counters_whole():
    nets = [nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)) for _ in range(3)]
    for k, net in enumerate(nets):
        for _ in range(k + 1):
            net(torch.randn(5, 3))
    mean, weights = common.ModelMean(nets[0]), [1, 2, 5]
    for net, weight in zip(nets, weights):
        mean.add(net.state_dict(), weight)
    value = mean.value()
    for name in value:
        entries = [net.state_dict()[name] for net in nets]
        if entries[0].is_floating_point():
            assert torch.allclose(value[name].float(), sum(w * e for w, e in zip(weights, entries)) / 8, atol=1e-6)
        else:
            assert value[name].dtype == torch.int64 and int(value[name]) == 3
    nets[0].load_state_dict(value)


@pytest.mark.parametrize("module", SCRIPTS, ids=lambda m: m.__name__)
def test_runs_log_every_domain(module, run):
    results, text, folder = run(module, *SMALL)
    rows = log(folder)
    assert len(rows) == 2
    for row in rows:
        domains = [row[f"acc_{d}"] for d in common.GLYPH_DOMAINS]
        assert row["accuracy"] == row["acc_test"] == pytest.approx(np.mean(domains)) and np.isfinite(row["loss"])
        assert row["up"] >= row["up_models"] > 0 and row["down"] >= row["down_models"] > 0
    assert "plain" in text and "clutter" in text


@pytest.mark.parametrize("module,words", [
    (fedfm, "--lite"), (fedfm, "--lite --model-every 2 --rounds 3"), (fedfm, "--aggregate uniform --match l2 --prox 0.1"),
    (fedfm, "--augment --validation 0 --warmup 1"), (fedfm, "--partition dirichlet --clients 5 --participation 0.5"),
    (fedfm, "--partition missing --clients 3 --missing 8 --aggregate uniform"), (fedfm, "--lite --warmup 1 --partition pathological --clients 4"),
    (fedlsa, "--compactness l2"), (fedlsa, "--alpha 0 --server-steps 3"), (fedlsa, "--model cnn4 --feature-dim 64 --partition iid --clients 3"),
    (fedplcc, "--uniform-weights --phi 1 --alpha 0.25"), (fedplcc, "--local-prototypes mean --finch-level first"),
    (fedplcc, "--partition pathological --clients 3 --classes-per-client 1"), (fedplcc, "--partition dirichlet --clients 5 --participation 0.2")])
def test_switches_and_corners(module, words, run):
    small = [*SMALL, *(["--model", "resnet4"] if module is not fedlsa else [])]
    results, *_ = run(module, *small, *words.split())
    assert 0 <= results[0]["final"] <= 100


def test_without_their_terms_all_three_are_fedavg_to_the_bit(run):
    words = [*SMALL, *"--model lsa_cnn --feature-dim 128 --batch-size 16 --lr 0.01 --momentum 0.9 --weight-decay 1e-5".split()]
    runs = [numbers(run(m, *words, *off.split())[2]) for m, off in
            ((fedfm, "--lam 0 --validation 0"), (fedlsa, "--lam 0"), (fedplcc, "--lam-contra 0 --lam-corr 0"))]
    runs = [[{k: v for k, v in row.items() if not k.endswith(("anchors", "prototypes"))} for row in rows] for rows in runs]
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][1]["loss"] != numbers(run(fedlsa, *words)[2])[1]["loss"]


def test_what_must_not_change_a_result(run):
    for module in SCRIPTS:
        one, two = (numbers(run(module, *SMALL, "--workers", n)[2]) for n in (1, 3))
        assert one == two


def test_fedfm_traffic_is_the_papers(run):
    """ResNet18 and ten classes: 11,182 k numbers a client and round without anchors, 11,187 k with them."""
    words = "--model resnet18 --partition iid --clients 2 --rounds 2 --local-epochs 1 --subset 0.02 --no-plots --aggregate uniform".split()
    rows = log(run(fedfm, *words, "--warmup", 1)[2])
    assert [round(row["down"] / 2000) for row in rows] == [11182, 11187] == [round(row["up"] / 2000) for row in rows]
    rows = log(run(fedfm, *words, "--lite", "--model-every", 2, "--rounds", 5, "--warmup", 0)[2])
    assert [row["up_models"] > 0 for row in rows] == [False, True, False, True, True]
    assert [row["down_models"] > 0 for row in rows] == [True, False, True, False, True]
    assert all(row["up_anchors"] > 0 for row in rows)


def test_fedfm_reports_the_round_of_the_best_validation(run):
    results, text, folder = run(fedfm, *SMALL, "--rounds", 3)
    best = max(log(folder), key=lambda row: row["acc_validation"])
    assert results[0]["best"] == best["accuracy"] and "where validation is best" in text


def test_augment_moves_pixels_and_nothing_else():
    x = torch.zeros(64, 3, 32, 32, dtype=torch.uint8)
    x[:, :, 12:20, 12:20] = 200
    out = common.augment(x, np.random.default_rng(0))
    assert out.shape == x.shape and set(out.unique().tolist()) == {0.0, 200.0}
    assert torch.equal(out, common.augment(x, np.random.default_rng(0)))
    ink = out[:, 0].flatten(1).gt(0).sum(1)
    assert ink.min() > 40 and ink.max() < 90 and len(out.unique(dim=0)) > 50  # as much ink, in other places
    wide = torch.zeros(200, 1, 33, 33, dtype=torch.uint8)
    wide[:, :, 16, 16] = 1
    rows = common.augment(wide, np.random.default_rng(1))[:, 0].nonzero()
    assert set((rows[:, 1] - 16).tolist()) <= set(range(-5, 6)) and (rows[:, 1] - 16).float().std() > 2


@pytest.mark.parametrize("module,words,range_", [
    (fedplcc, "--phi 0", "(0, 1]"), (fedplcc, "--phi 1.1", "(0, 1]"), (fedplcc, "--tau 0", "(0, inf)"), (fedplcc, "--alpha -1", "(0, inf)"),
    (fedlsa, "--tau -0.1", "(0, inf)"), (fedlsa, "--server-steps -1", "[0, 1e9]"), (fedfm, "--temperature 0", "(0, inf)"),
    (fedfm, "--model-every 2", "1 without --lite"), (fedfm, "--validation 1", "[0, 1)"), (fedfm, "--prox -1", "[0, inf)"),
    (fedlsa, "--domain-clients plain:1,nowhere:2", "plain, thin, texture, clutter"), (fedplcc, "--domain-fraction 1501", "has 1500 images, 150 of its scarcest class"),
    (fedplcc, "--domain-clients thin:3 --domain-fraction 0.5", "too few for 3 clients"), (fedplcc, "--domain-clients thin:3 --domain-fraction 51", "too few for 3"),
    (fedplcc, "--domain-fraction 1.5", "whole number of images per class"), (fedplcc, "--batch-size 1", "at least 2")])
def test_bad_input(module, words, range_, run, capsys):
    with pytest.raises(SystemExit) as stop:
        run(module, *words.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and range_ in error


def test_digits_are_four_domains_in_colour(tmp_path, monkeypatch):
    def fake(name, root, folder, size):
        n, channels = {"mnist": (6, 1), "usps": (4, 1), "svhn": (5, 3)}[name]
        return common.Dataset(torch.zeros(n, channels, size, size, dtype=torch.uint8), torch.arange(n), None, torch.arange(n) > 2, None, None)
    monkeypatch.setattr(common, "torchvision_dataset", fake)
    monkeypatch.setattr(common, "render", lambda kind, n, size, seed: torch.full((n, 3, size, size), seed % 256, dtype=torch.uint8))
    (tmp_path / "torchvision").mkdir()
    args = types.SimpleNamespace(dataset="digits", data=str(tmp_path), image_size=None, subset=1.0, seed=0)
    data = common.load_dataset(args)
    assert data.domains == ["mnist", "usps", "svhn", "syn"] and torch.bincount(data.domain).tolist() == [6, 4, 5, 25000]
    assert data.x.shape[1:] == (3, 32, 32) and int(data.test[data.domain == 3].sum()) == 5000


def test_a_folder_without_test_images_is_refused(tmp_path, run):
    from test_data import picture
    for n in range(8):
        picture(tmp_path / "s" / "train" / str(n % 2) / f"{n}.png")
    with pytest.raises(SystemExit) as stop:
        run(fedlsa, "--dataset", "s", "--data", tmp_path, "--partition", "iid", "--clients", 2, "--rounds", 1)
    assert "has no test images" in stop.value.code
