"""Every equation of the personalised methods against a slow, obvious reference: loops over samples, classes and clients, in
float64, with Python's own arithmetic."""

import math
import types

import numpy as np
import pytest
import torch
import torch.nn as nn

import common
import fedproto
import fedsa
import fedtgp

torch.manual_seed(0)


def vectors(n, d, seed):
    return torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def euclid(a, b):
    return math.sqrt(sum((float(x) - float(y)) ** 2 for x, y in zip(a, b)))


def cross_entropy(logits, c):
    top = max(logits)
    return -(logits[c] - top) + math.log(sum(math.exp(v - top) for v in logits))


CASES = [(1, 1, 1), (1, 3, 2), (7, 4, 5), (10, 12, 30)]  # batch, classes, features


@pytest.mark.parametrize("module", [fedproto, fedtgp])
@pytest.mark.parametrize("distance", ["euclidean", "mse"])
@pytest.mark.parametrize("B,C,D", CASES)
@pytest.mark.parametrize("missing", [0, 1, 99])
def test_prototype_distance(module, distance, B, C, D, missing):
    z, P = vectors(B, D, 1), vectors(C, D, 2)
    y = torch.arange(B) % C
    present = torch.arange(C) >= missing
    P[~present] = 1e6  # what stands in an absent row must not matter
    terms = []
    for b in range(B):
        if present[y[b]]:
            squares = [(float(z[b, d]) - float(P[y[b], d])) ** 2 for d in range(D)]
            terms.append(math.sqrt(sum(squares)) if distance == "euclidean" else sum(squares) / D)
    expected = sum(terms) / len(terms) if terms else 0.0
    assert module.prototype_distance(z, y, P, present, distance).item() == pytest.approx(expected, rel=1e-12)


def test_prototype_distance_has_a_finite_gradient_on_the_prototype_itself():
    P = vectors(3, 4, 0)
    z = P.clone().requires_grad_()
    fedproto.prototype_distance(z, torch.arange(3), P, torch.ones(3, dtype=torch.bool)).backward()
    assert torch.isfinite(z.grad).all()


@pytest.mark.parametrize("loss", [fedtgp.margin_contrastive, fedsa.margin_contrastive])
@pytest.mark.parametrize("B,C,D", CASES)
@pytest.mark.parametrize("margin", [0.0, 2.5])
def test_margin_contrastive(loss, B, C, D, margin):
    z, P, y = vectors(B, D, 3), vectors(C, D, 4), torch.arange(B) % C
    total = 0
    for b in range(B):
        own = math.exp(-(euclid(z[b], P[y[b]]) + margin))
        others = sum(math.exp(-euclid(z[b], P[c])) for c in range(C) if c != y[b])
        total -= math.log(own / (own + others))
    assert loss(z, y, P, margin).item() == pytest.approx(total / B, rel=1e-10, abs=1e-12)


def test_margin_contrastive_gradients():
    z, P, y = vectors(4, 6, 5).requires_grad_(), vectors(3, 6, 6).requires_grad_(), torch.tensor([0, 1, 2, 0])
    for loss in (fedtgp.margin_contrastive, fedsa.margin_contrastive):
        assert torch.autograd.gradcheck(lambda z, P: loss(z, y, P, 1.5), (z, P))


def test_margin_contrastive_with_equal_prototypes_counts_classes():
    z, P = vectors(5, 4, 7), vectors(1, 4, 8).expand(6, 4)
    assert fedsa.margin_contrastive(z, torch.zeros(5, dtype=torch.long), P, 0.0).item() == pytest.approx(math.log(6), rel=1e-6)


@pytest.mark.parametrize("module", [fedproto, fedsa])
def test_weighted_mean(module):
    K, C, D = 5, 4, 3
    P, n = torch.randn(K, C, D), torch.randint(1, 9, (K, C)).float()
    n[0], n[:, 2], n[1:, 3] = 0, 0, 0  # a client without data, a class that nobody has, one that nobody has either
    n[4, 3] = 2                       # ... but one
    mean, seen = module.weighted_mean(P, n)
    for c in range(C):
        total = sum(float(n[i, c]) for i in range(K))
        assert bool(seen[c]) == (total > 0)
        for d in range(D):
            expected = sum(float(n[i, c]) * float(P[i, c, d]) for i in range(K)) / total if total else 0.0
            assert mean[c, d].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("kind", ["pairwise", "nearest", "fixed", "none"])
@pytest.mark.parametrize("tau", [100.0, 0.5])
def test_adaptive_margin(kind, tau):
    K, C, D = 4, 5, 3
    P, held = vectors(K, C * D, 9).view(K, C, D), torch.ones(K, C, dtype=torch.float64)
    held[:, 1], held[:3, 0] = 0, 0  # nobody has class 1, one client has class 0
    P[held == 0] = 1e9
    centres = {}
    for c in range(C):
        owners = [i for i in range(K) if held[i, c]]
        if owners:
            centres[c] = [sum(float(P[i, c, d]) for i in owners) / len(owners) for d in range(D)]
    away = {(a, b): euclid(centres[a], centres[b]) for a in centres for b in centres if a != b}
    expected = {"pairwise": max(away.values()), "fixed": tau, "none": 0.0,
                "nearest": max(min(away[a, b] for b in centres if b != a) for a in centres)}[kind]
    args = types.SimpleNamespace(margin=kind, tau=tau)
    assert float(fedtgp.adaptive_margin(P * held.unsqueeze(2), held, args)) == pytest.approx(min(expected, tau), rel=1e-10)


def test_adaptive_margin_of_one_class_is_zero():
    for kind in ("pairwise", "nearest"):
        args = types.SimpleNamespace(margin=kind, tau=100.0)
        assert float(fedtgp.adaptive_margin(torch.randn(2, 1, 3), torch.ones(2, 1), args)) == 0


@pytest.mark.parametrize("distance", ["euclidean", "mse"])
@pytest.mark.parametrize("B,C,D", CASES)
def test_regularization(distance, B, C, D):
    z, A, y = vectors(B, D, 10), vectors(C, D, 11), torch.arange(B) % C
    expected = np.mean([euclid(z[b], A[y[b]]) if distance == "euclidean" else euclid(z[b], A[y[b]]) ** 2 / D for b in range(B)])
    assert fedsa.regularization(z, y, A, distance).item() == pytest.approx(expected, rel=1e-12)


def test_classifier_calibration():
    A, h = vectors(4, 3, 12), nn.Linear(3, 4).double().requires_grad_(False)
    total = 0
    for c in range(4):
        logits = [sum(float(h.weight[k, d]) * float(A[c, d]) for d in range(3)) + float(h.bias[k]) for k in range(4)]
        total += cross_entropy(logits, c)
    assert fedsa.classifier_calibration(h, A).item() == pytest.approx(total / 4, rel=1e-10)


@pytest.mark.parametrize("held", [[1, 1, 1, 1], [1, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]])
def test_average_margin(held):
    P = vectors(4, 3, 13)
    owned = [c for c in range(4) if held[c]]
    total = sum(euclid(P[a], P[b]) for a in owned for b in owned if a != b)
    expected = total / (len(owned) - 1) ** 2 if len(owned) > 1 else 0.0
    assert float(fedsa.average_margin(P, torch.tensor(held))) == pytest.approx(expected, rel=1e-12)


def test_ema_moves_only_what_was_seen():
    A, P = torch.ones(3, 2), torch.zeros(3, 2)
    moved = fedsa.ema(A, P, torch.tensor([True, False, True]), 0.75)
    assert moved.tolist() == [[0.75, 0.75], [1, 1], [0.75, 0.75]]


def anchor_args(**other):
    return types.SimpleNamespace(**{**dict(classes=6, feature_dim=64, anchor_steps=100, no_projection=False), **other})


def test_training_the_projection_separates_the_anchors():
    def largest_cosine(**other):
        a = nn.functional.normalize(common.seeded(lambda: fedsa.make_anchors(anchor_args(**other)), 0, "anchors"), dim=1)
        return float((a @ a.T - 2 * torch.eye(6)).max())
    assert largest_cosine() < -0.18 < 0 < largest_cosine(anchor_steps=0)  # -1/(C-1) is the best there is
    assert largest_cosine(no_projection=True) != largest_cosine(anchor_steps=0)


def test_one_class_has_anchors_too():
    assert torch.isfinite(fedsa.make_anchors(anchor_args(classes=1))).all()


def test_trained_global_prototypes_approach_the_uploads_and_keep_apart():
    args = types.SimpleNamespace(classes=3, feature_dim=8, no_mlp=False, server_epochs=200, batch_size=4, lr=0.05, seed=0)
    server = common.seeded(lambda: fedtgp.make_server(args), 0, "server")
    centres = torch.randn(3, 8) * 2
    uploads, held = centres + 0.1 * torch.randn(4, 3, 8), torch.ones(4, 3, dtype=torch.bool)
    held[0, 1] = False
    before = fedtgp.margin_contrastive(centres, torch.arange(3), server(torch.arange(3)), 1.0).item()
    P, last = fedtgp.server_update(server, uploads, held, torch.tensor(1.0), 1, args)
    after = fedtgp.margin_contrastive(centres, torch.arange(3), P, 1.0).item()
    assert after < 0.2 * before and last < 0.2 * before
    assert torch.cdist(centres, P).argmin(1).tolist() == [0, 1, 2]


def test_class_means_and_nearest_prototype():
    class Identity(nn.Module):
        feature_dim = 3

        def features(self, x):
            return x.float()
    x, y = torch.randint(0, 9, (40, 3), dtype=torch.uint8), torch.arange(40) % 4
    means, counts = common.class_means(Identity(), common.Samples(x, y), 5)
    for c in range(5):
        rows = [x[i].tolist() for i in range(40) if y[i] == c]
        assert counts[c] == len(rows)
        assert means[c].tolist() == pytest.approx(np.mean(rows, 0).tolist() if rows else [0, 0, 0], rel=1e-5)
    present = torch.tensor([True, False, True, True, False])
    guess = common.nearest_prototype(x.float(), means, present)
    for b in range(40):
        best = min((c for c in range(5) if present[c]), key=lambda c: euclid(x[b], means[c]))
        assert euclid(x[b], means[guess[b]]) == pytest.approx(euclid(x[b], means[best]), rel=1e-5) and present[guess[b]]


def test_nearest_prototype_far_from_the_origin():
    P = vectors(40, 64, 20).float() * 0.1 + 1000
    z = P.repeat(3, 1) + 0.001
    assert common.nearest_prototype(z, P, torch.ones(40, dtype=torch.bool)).tolist() == list(range(40)) * 3
