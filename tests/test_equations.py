"""Every numbered equation of the six papers a second time: slow loops in float64, written from the papers and not from the
scripts, compared with the scripts' functions on random and on corner inputs."""

import copy
import itertools
import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common, fedfm, fedlsa, fedplcc, fedproto, fedsa, fedtgp

mean = lambda values: sum(values) / len(values) if len(values) else 0.0     # over nothing: 0 (round 1; no class of the batch is known)
dot = lambda a, b: sum(u * v for u, v in zip(a, b, strict=True))
norm = lambda a: math.sqrt(dot(a, a))
unit = lambda a: [v / norm(a) for v in a] if norm(a) else list(a)           # a zero vector has no direction: it stays 0
cosine = lambda a, b: dot(unit(a), unit(b))
squares = lambda a, b: sum((u - v) ** 2 for u, v in zip(a, b, strict=True))
euclidean = lambda a, b: math.sqrt(squares(a, b))
mse = lambda a, b: squares(a, b) / len(a)
linear = lambda w, b, z: [dot(row, z) + v for row, v in zip(w, b, strict=True)]
cross_entropy = lambda logits, c: -math.log(math.exp(logits[c]) / sum(math.exp(v) for v in logits))
tensor = lambda x: torch.tensor(np.asarray(x, float), dtype=torch.float64)


def agree(got, want, rtol=1e-9, atol=1e-11):
    got, want = got.detach().numpy(), np.asarray(want)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol, atol)


# ---- losses --------------------------------------------------------------------------------------------------------------------

# FedTGP Eq. 4 (FedProto's) and Eq. 11, FedSA Eq. 5, per sample
distance_term = lambda z, y, p, present, phi: mean([phi(v, p[c]) for v, c in zip(z, y) if present[c]])
# FedLSA Eqs. 7, 8
compactness = lambda h, y, a, tau: mean([cross_entropy([dot(r, v) / tau for r in a], c) for v, c in zip(h, y)])
# FedLSA Eq. 3, FedSA Eq. 8: classify the c-th vector as c
calibration = lambda vectors, w, b: mean([cross_entropy(linear(w, b, a), c) for c, a in enumerate(vectors)])
# FedFM Eq. 3, of normalised vectors
directions = lambda v, a: squares(unit(v), unit(a))
# FedPLCC Eq. 7 of all pairs, clamped below at 1e-6
similarities = lambda z, g, alpha: [[max(cosine(v, u), 1e-6) ** alpha for u in g] for v in z]


def margin_term(z, y, p, margin):                       # FedTGP Eq. 10 (Eq. 6 where the margin is 0), FedSA Eq. 7
    own = [math.exp(-(euclidean(v, p[c]) + margin)) for v, c in zip(z, y)]
    others = [sum(math.exp(-euclidean(v, p[k])) for k in range(len(p)) if k != c) for v, c in zip(z, y)]
    return mean([-math.log(a / (a + b)) for a, b in zip(own, others)])


def separation(a, tau):                                 # FedLSA Eq. 4, τ inside the exponential; one anchor has no others
    sums = [sum(math.exp(dot(a[i], a[j]) / tau) for j in range(len(a)) if j != i) for i in range(len(a))]
    return mean([math.log(s / (len(a) - 1)) for s in sums if len(a) > 1])


def guiding(z, y, a, present, temperature):             # FedFM Section IV-C, one softmax, over the classes that have an anchor
    s = [{n: math.exp(cosine(a[n], v) / temperature) for n in range(len(a)) if present[n]} for v in z]
    return mean([-math.log(e[c] / sum(e.values())) for e, c in zip(s, y) if present[c]])


def contrast(s, y, classes, w, tau):                    # FedPLCC Eq. 6
    e = [[math.exp(v / tau) * weight for v, weight in zip(row, w, strict=True)] for row in s]
    return mean([-math.log(sum(v for v, k in zip(row, classes) if k == c) / sum(row)) for row, c in zip(e, y) if c in classes])


def correlation(s, y, classes, w, phi):                 # FedPLCC Eq. 8; φ is a decimal number: ⌈0.07 · 100⌉ is 7
    own = [sorted((v * m for v, m, k in zip(row, w, classes) if k == c), reverse=True) for row, c in zip(s, y) if c in classes]
    return mean([-sum(v[:math.ceil(Fraction(str(phi)) * len(v))]) for v in own])


LOSSES = {                                              # name: the script's and the reference's (z, y, p, present)
    "FedTGP Eq. 4": (lambda *a: fedproto.prototype_distance(*a), lambda *a: distance_term(*a, euclidean)),
    "FedTGP Eq. 4, mse": (lambda *a: fedproto.prototype_distance(*a, "mse"), lambda *a: distance_term(*a, mse)),
    "FedTGP Eq. 11": (lambda *a: fedtgp.prototype_distance(*a), lambda *a: distance_term(*a, euclidean)),
    "FedTGP Eq. 11, mse": (lambda *a: fedtgp.prototype_distance(*a, "mse"), lambda *a: distance_term(*a, mse)),
    "FedTGP Eq. 6": (lambda *a: fedtgp.margin_contrastive(*a[:3], 0.0), lambda *a: margin_term(*a[:3], 0)),
    "FedTGP Eq. 10": (lambda *a: fedtgp.margin_contrastive(*a[:3], tensor(1.7)), lambda *a: margin_term(*a[:3], 1.7)),
    "FedTGP Eq. 10, τ": (lambda *a: fedtgp.margin_contrastive(*a[:3], 100.0), lambda *a: margin_term(*a[:3], 100)),
    "FedSA Eq. 5": (lambda *a: fedsa.regularization(*a[:3]), lambda *a: distance_term(*a[:3], [1] * 99, euclidean)),
    "FedSA Eq. 5, mse": (lambda *a: fedsa.regularization(*a[:3], "mse"), lambda *a: distance_term(*a[:3], [1] * 99, mse)),
    "FedSA Eq. 7": (lambda *a: fedsa.margin_contrastive(*a[:3], tensor(2.3)), lambda *a: margin_term(*a[:3], 2.3)),
    "FedLSA Eq. 8": (lambda *a: fedlsa.compactness(*a[:3], 0.2), lambda *a: compactness(*a[:3], 0.2)),
    "FedLSA l2": (lambda *a: fedlsa.compactness(*a[:3], 0.2, "l2"), lambda *a: distance_term(*a[:3], [1] * 99, squares)),
    "FedFM IV-C": (lambda *a: fedfm.contrastive_guiding(*a, 0.1), lambda *a: guiding(*a, 0.1)),
    "FedFM Eq. 3": (lambda *a: fedfm.squared_distance(*a), lambda *a: distance_term(*a, directions)),
}


def batch(name, seed, B, C, D):
    rng = np.random.default_rng(seed)
    z, y, p = rng.normal(size=(B, D)), rng.integers(C, size=B), rng.normal(size=(C, D))
    return [np.array([unit(v) for v in x]) if "LSA" in name and x is not y else x for x in (z, y, p)]    # FedLSA: on the sphere


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed, B, C, D", [(0, 7, 4, 5), (1, 12, 6, 8), (2, 1, 4, 3), (3, 6, 1, 3), (4, 5, 3, 1), (5, 1, 1, 1), (6, 30, 10, 16)])
def test_losses(name, seed, B, C, D):
    (ours, reference), (z, y, p) = LOSSES[name], batch(name, seed, B, C, D)
    for present in (np.ones(C, bool), np.random.default_rng(seed + 50).random(C) < 0.5, np.zeros(C, bool)):
        agree(ours(tensor(z), torch.tensor(y), tensor(p), torch.tensor(present)), reference(z, y, p, present))
    if z.size < 50:
        assert torch.autograd.gradcheck(lambda z: ours(z, torch.tensor(y), tensor(p), torch.arange(C) != 2), tensor(z).requires_grad_())


@pytest.mark.parametrize("name", LOSSES)
def test_losses_where_vectors_are_equal_or_zero(name):
    """A distance of 0 and the direction of a zero vector have no derivative (features can be 0 after a ReLU): no nan may follow."""
    (ours, reference), (z, y, p) = LOSSES[name], batch(name, 7, 6, 3, 4)
    same, holed = np.stack([p[0]] * 3), p * [[1], [0], [1]]
    for z, p in ((z, same), (p[y], p), (same[y], same), (z * 0, p), (z, holed), (z * 0, p * 0)):
        leaf, present = tensor(z).requires_grad_(), torch.ones(3, dtype=torch.bool)
        loss = ours(leaf, torch.tensor(y), tensor(p), present)
        loss.backward()
        agree(loss, reference(z, y, p, present))
        assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("seed, C, D", [(0, 4, 5), (1, 1, 3), (2, 10, 2), (3, 2, 1)])
def test_losses_of_anchors(seed, C, D):
    torch.manual_seed(seed)
    a, classifier = np.random.default_rng(seed).normal(size=(C, D)), torch.nn.Linear(D, C).double()
    w, b = classifier.weight.tolist(), classifier.bias.tolist()
    for x in (a, np.stack([a[0]] * C), np.zeros((C, D))):
        agree(fedsa.classifier_calibration(classifier, tensor(x)), calibration(x, w, b))                     # FedSA Eq. 8
        agree(fedlsa.anchor_classification(tensor(x), classifier), calibration(x, w, b))                     # FedLSA Eq. 3
        for tau in (0.1, 0.2, 1.0):
            agree(fedlsa.anchor_separation(tensor(x), tau), separation(x, tau))                              # FedLSA Eq. 4
    leaf = tensor(a).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: fedsa.classifier_calibration(classifier, a), leaf)
    assert torch.autograd.gradcheck(lambda a: fedlsa.anchor_classification(a, classifier), leaf)
    assert C == 1 or torch.autograd.gradcheck(lambda a: fedlsa.anchor_separation(a, 0.5), leaf)


@pytest.mark.parametrize("seed, B, C, G, D", [(0, 7, 5, 9, 4), (1, 1, 3, 1, 3), (2, 5, 1, 6, 2), (3, 4, 4, 30, 6), (4, 6, 3, 2, 3), (5, 1, 1, 1, 1),
                                              (6, 2, 1, 100, 2)])
@pytest.mark.parametrize("alpha, tau, phi", [(0.5, 0.07, 0.5), (0.25, 1.0, 1.0), (1.0, 0.3, 0.07), (0.5, 0.5, 0.1)])
def test_fedplcc_losses(seed, B, C, G, D, alpha, tau, phi):
    rng = np.random.default_rng(seed)
    z, g, y, k = rng.normal(size=(B, D)), rng.normal(size=(G, D)), rng.integers(C, size=B), rng.integers(C, size=G)
    z[0] *= rng.integers(2)                             # cosines below 0 and, for a zero vector, of 0 are clamped
    s = similarities(z, g, alpha)
    agree(fedplcc.similarity(tensor(z), tensor(g), alpha), s)                                                # Eq. 7
    for w in (rng.random(G) + 0.1, np.ones(G)):
        for labels in (y, y * 0 + C):                   # nobody has sent a prototype of class C
            known = torch.tensor(labels), torch.tensor(k), tensor(w)
            agree(fedplcc.contrast(tensor(s), *known, tau), contrast(s, labels, k, w, tau))                  # Eq. 6
            agree(fedplcc.correlation(tensor(s), *known, phi), correlation(s, labels, k, w, phi))            # Eq. 8
    known, leaf = (torch.tensor(y), *known[1:]), (tensor(z).abs() + 0.1).requires_grad_()
    fedplcc.similarity(zero := (leaf.detach() * 0).requires_grad_(), tensor(g), alpha).sum().backward()
    assert zero.grad.isfinite().all()
    sim = lambda z: fedplcc.similarity(z, tensor(g).abs(), alpha)
    assert torch.autograd.gradcheck(lambda z: fedplcc.contrast(sim(z), *known, tau), leaf)
    assert torch.autograd.gradcheck(lambda z: fedplcc.correlation(sim(z), *known, phi), leaf)


# ---- means, margins, prediction ------------------------------------------------------------------------------------------------

FEDERATIONS = [(0, 5, 6, 4), (1, 1, 5, 3), (2, 8, 2, 2), (3, 3, 1, 3), (4, 20, 10, 8), (5, 2, 4, 1)]     # seed, K, C, D


def uploads_of(seed, K, C, D):
    rng = np.random.default_rng(seed)
    n = rng.integers(1, 40, size=(K, C)) * (rng.random((K, C)) < 0.6)
    n[:, C // 2] = 0                                    # a class that no one holds; the rows of absent classes are no zeros:
    return rng.normal(size=(K, C, D)), n, [[i for i in range(K) if n[i, c]] for c in range(C)]           # they must not count


@pytest.mark.parametrize("seed, K, C, D", FEDERATIONS)
def test_means(seed, K, C, D):
    u, n, owners = uploads_of(seed, K, C, D)
    rng = np.random.default_rng(seed + 70)
    old, had, total = rng.normal(size=(C, D)), rng.random(C) < 0.5, n.sum(0)
    weighted = [sum(float(n[i, c]) * u[i, c] for i in o) / float(total[c]) if o else np.zeros(D) for c, o in enumerate(owners)]
    plain = [mean([u[i, c] for i in o]) if o else np.zeros(D) for c, o in enumerate(owners)]
    for module, (weights, want) in itertools.product((fedproto, fedsa), ((n, weighted), (n > 0, plain))):
        p, seen = module.weighted_mean(tensor(u), tensor(weights))                                           # FedTGP Eq. 3, FedSA Eq. 3
        agree(p, want)
        assert seen.tolist() == (total > 0).tolist()
    for alpha in (0.9999, 0.5, 0.0, 1.0):                                                                    # FedSA Eq. 10
        agree(fedsa.ema(tensor(old), tensor(u[0]), torch.tensor(had), alpha),
              [alpha * a + (1 - alpha) * m if h else a for a, m, h in zip(old, u[0], had)])
    # FedFM Eq. 9; uniform (Section VII-D): who lacks a class counts with its previous anchor, if there is one
    filled = [mean([u[i, c] if i in o else old[c] for i in range(K) if i in o or had[c]]) for c, o in enumerate(owners)]
    for how, want in dict(weighted=weighted, uniform=filled).items():
        a, present = fedfm.aggregate_anchors(tensor(u), tensor(n), tensor(old), torch.tensor(had), how)
        agree(a, [want[c] if o else old[c] for c, o in enumerate(owners)])
        assert present.tolist() == (had | (total > 0)).tolist()


@pytest.mark.parametrize("seed, K, C, D", FEDERATIONS)
@pytest.mark.parametrize("equal", [False, True])
def test_margins(seed, K, C, D, equal):
    u, n, owners = uploads_of(seed, K, C, D)
    u = np.ones_like(u) if equal else u
    q = [mean([u[i, c] for i in o]) for c, o in enumerate(owners) if o]
    gaps = [[euclidean(a, b) for j, b in enumerate(q) if j != i] for i, a in enumerate(q)] if len(q) > 1 else [[0.0]]
    for tau in (0.5, 100.0):                            # FedTGP Eq. 9; nearest: its published code
        modes = dict(pairwise=min(max(max(row) for row in gaps), tau), nearest=min(max(min(row) for row in gaps), tau), fixed=tau, none=0.0)
        for mode, want in modes.items():
            agree(fedtgp.adaptive_margin(tensor(u), tensor(n > 0), SimpleNamespace(margin=mode, tau=tau)), want)
    for p, held in zip(u, n > 0):                       # FedSA Eq. 6, each client's
        pairs = [euclidean(p[a], p[b]) for a in range(C) for b in range(C) if a != b and held[a] and held[b]]
        agree(fedsa.average_margin(tensor(p), tensor(held)), sum(pairs) / (held.sum() - 1) ** 2 if pairs else 0.0)


@pytest.mark.parametrize("seed", range(6))
def test_distances_and_prediction(seed):                # φ, and FedTGP's rule: the class of the nearest prototype
    rng = np.random.default_rng(seed)
    n, C, D = rng.integers(1, 30), seed + 1, rng.integers(1, 9)
    z, p, present = rng.normal(size=(n, D)), rng.normal(size=(C, D)), rng.random(C) < 0.6
    present[rng.integers(C)] = True
    far = rng.normal(size=(4, 3)) * 1e-3 + 1e3          # far from 0 and close together: a² − 2ab + b² would lose the digits
    for a, b in ((z, p), (far, far)):
        agree(common.distances(tensor(a), tensor(b)), [[euclidean(v, u) for u in b] for v in a])
    nearest = [min((euclidean(v, p[c]), c) for c in range(C) if present[c])[1] for v in z]
    assert common.nearest_prototype(tensor(z), tensor(p), torch.tensor(present)).tolist() == nearest


# ---- FINCH ---------------------------------------------------------------------------------------------------------------------

def groups_of(x):                                       # one pass: i and its first neighbour κ(i) belong together; union-find
    root = list(range(len(x)))
    find = lambda i: i if root[i] == i else find(root[i])
    for i in range(len(x)):
        root[find(i)] = find(max((j for j in range(len(x)) if j != i), key=lambda j: cosine(x[i], x[j])))
    return [[i for i in range(len(x)) if find(i) == r] for r in range(len(x)) if find(r) == r]


def finch(x, w, level="last"):                          # FedPLCC's FINCH*: weighted means, until one cluster would remain
    x, w, first = [list(v) for v in x], list(w), True
    while len(x) > 1 and (first or level == "last"):
        groups = groups_of(x)
        if len(groups) == 1 and not first:              # the partition before is the last; the very first pass always counts
            break
        x = [[sum(w[i] * x[i][d] for i in g) / sum(w[i] for i in g) for d in range(len(x[0]))] for g in groups]
        w, first = [sum(w[i] for i in g) for g in groups], False
    return x, w


# parallel columns as sorted rows: clusters come in any order
table = lambda *columns: tensor(sorted([float(v) for cell in row for v in np.ravel(cell)] for row in zip(*columns, strict=True)))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 9, 20, 45])
@pytest.mark.parametrize("seed, D", [(0, 2), (1, 3), (2, 16)])
def test_finch(seed, D, n):                             # FedPLCC Eqs. 9, 10
    rng = np.random.default_rng(1000 * seed + n)
    for x in (rng.normal(size=(n, D)), np.maximum(rng.normal(size=(n, D)), 0) + rng.random((n, D)) * 0.1):   # as drawn, as after a ReLU
        if n > 1:
            number = fedplcc.first_neighbour_clusters(tensor(x)).tolist()
            assert {frozenset(g) for g in groups_of(x)} == {frozenset(i for i in range(n) if number[i] == m) for m in range(max(number) + 1)}
        for w, level in itertools.product((np.ones(n), rng.integers(1, 50, size=n)), ("last", "first")):
            agree(table(*fedplcc.finch(tensor(x), tensor(w), level)), table(*finch(x, w, level)))


def test_finch_of_equal_and_zero_vectors():
    """Ties leave the clusters open, but not what they add up to. Of exact doubles each has its twin as first neighbour."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(6, 4)), rng.integers(1, 9, size=12)
    number = fedplcc.first_neighbour_clusters(tensor(np.repeat(x, 2, 0))).tolist()
    assert len(set(number)) == 6 and number[::2] == number[1::2]
    for x in (np.ones((12, 4)), np.zeros((12, 4)), np.vstack([np.zeros((3, 4)), np.repeat(x[:3], 3, 0)])):
        means, weights = fedplcc.finch(tensor(x), tensor(w))
        agree(weights @ means, w @ x)


@pytest.mark.parametrize("seed, K, C", [(0, 1, 3), (1, 2, 1), (2, 3, 4), (3, 5, 6), (4, 4, 2), (5, 8, 5)])
@pytest.mark.parametrize("level", ["last", "first"])
def test_fedplcc_global_prototypes(seed, K, C, level):  # FedPLCC Eqs. 10, 11
    rng, want = np.random.default_rng(seed), []
    ups = [(rng.normal(size=(J, 3)), rng.integers(C, size=J), rng.integers(1, 20, size=J)) for J in rng.integers(1, 12, size=K)]
    for c in range(C):
        x, w = finch(*zip(*members), level) if (members := [(v, m) for u in ups for v, j, m in zip(*u) if j == c]) else ([], [])
        want += [(v, c, m / sum(w)) for v, m in zip(x, w)]                      # a class that no one holds has no prototypes
    sent, args = [(tensor(x), torch.tensor(k), tensor(w)) for x, k, w in ups], SimpleNamespace(classes=C, finch_level=level)
    for args.uniform_weights in (False, True):
        got = fedplcc.global_prototypes(sent, args)
        agree(table(*got[:2]), table(*zip(*[row[:2] for row in want])))
        assert set(got[2].tolist()) == {1.0} if args.uniform_weights else agree(table(*got), table(*zip(*want))) is None


# ---- models: class means, averages, and training steps by numerical derivatives --------------------------------------------------

# dropout shows who forgets eval mode; common.Net brings uint8 to [-1, 1]
tiny = lambda C, D, p: common.Net(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(p), torch.nn.Linear(4, D)), torch.nn.Linear(D, C), D)
weights_of = lambda module: [np.array(p.tolist(), float) for p in module.parameters()]
features_of = lambda w, x: [linear(w[0], w[1], row / 127.5 - 1) for row in x.flatten(1).double().numpy()]
images = lambda rng, n: torch.tensor(rng.integers(256, size=(n, 1, 2, 2)), dtype=torch.uint8)


@pytest.mark.parametrize("seed, n, C", [(0, 9, 4), (1, 1, 3), (2, 5, 1), (3, 300, 5)])
def test_class_means(seed, n, C):                       # FedTGP Eq. 2, FedSA Eq. 2, FedFM Eq. 8; FedPLCC Eq. 9 (all in float32)
    torch.manual_seed(seed)
    rng, net = np.random.default_rng(seed), tiny(C, 3, 0.5).train()
    data = common.Samples(images(rng, n), torch.tensor(rng.integers(C, size=n)))
    of = [[v for v, k in zip(features_of(weights_of(net), data.x), data.y) if k == c] for c in range(C)]
    p, count = common.class_means(net, data, C)
    agree(count, [len(rows) for rows in of])
    agree(p, [[mean([v[d] for v in rows]) for d in range(3)] for rows in of], 1e-5, 1e-6)
    for kind, level in itertools.product(("finch", "mean") if n < 50 else ("mean",), ("last", "first")):    # 300 have ties in float32
        clusters = lambda rows: finch(rows, [1] * len(rows), level) if kind == "finch" else ([[mean(v) for v in zip(*rows)]], [len(rows)])
        want = [(v, c, m) for c, rows in enumerate(of) if rows for v, m in zip(*clusters(rows))]
        args = SimpleNamespace(classes=C, local_prototypes=kind, finch_level=level, uniform_weights=False)
        agree(table(*fedplcc.local_prototypes(net, data, args)), table(*zip(*want)), 1e-5, 1e-6)


@pytest.mark.parametrize("K", [1, 2, 7])
def test_model_mean(K):                                 # FedFM Eq. 11, FedPLCC Eq. 1: Σ p_k w_k with p_k = N_k / N
    nets, n = [torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).double() for _ in range(K)], [5 * k + 1 for k in range(K)]
    total = common.ModelMean(nets[0])
    for k, net in enumerate(nets):
        for _ in range(K - k):                          # BatchNorm's counters and statistics differ
            net(torch.randn(6, 3, dtype=torch.float64))
        total.add(net.state_dict(), n[k])
    for name, value in total.value().items():
        states = [net.state_dict()[name].numpy() for net in nets]
        agree(value, max(states) if "num_batches" in name else sum(m * s for m, s in zip(n, states)) / sum(n))
    difference = sum(((a - b) ** 2).sum() for a, b in zip(weights_of(nets[0]), weights_of(nets[-1])))
    agree(fedfm.proximal(nets[0], [p.detach() for p in nets[-1].parameters()]), difference / 2)              # FedProx's term


def sgd(loss, weights, steps, lr, momentum=0.0, decay=0.0):
    """Steps along central differences of loss(weights) -> the weights, the losses before each step."""
    losses, speed, weights = [], [0.0] * len(weights), [w.copy() for w in weights]
    for _ in range(steps):
        slopes = [np.zeros_like(w) for w in weights]
        for w, slope in zip(weights, slopes):
            for i in np.ndindex(w.shape):
                for h, sign in ((1e-5, 1), (-2e-5, -1), (1e-5, 0)):
                    w[i] += h
                    slope[i] += sign * loss(weights) / 2e-5 if sign else 0
        losses.append(loss(weights))
        speed = [momentum * v + s + decay * w for v, s, w in zip(speed, slopes, weights)]
        weights = [w - lr * v for w, v in zip(weights, speed)]
    return weights, losses


# F of FedTGP, Θ of FedLSA: vectors through Linear, ReLU, Linear
mlp = lambda w: [linear(w[3], w[4], [max(v, 0.0) for v in linear(w[1], w[2], row)]) for row in w[0]]
settings = lambda **other: SimpleNamespace(
    **dict(classes=3, feature_dim=3, seed=0, device="cpu", no_graph=True, no_mlp=False, no_projection=False) | other)


def small(make, C, I, D):                               # the script's server in small and in float64
    torch.manual_seed(C)
    server = torch.nn.Sequential(torch.nn.Embedding(C, I), torch.nn.Linear(I, I), torch.nn.ReLU(), torch.nn.Linear(I, D)).double()
    assert [type(m) for m in server] == [type(m) for m in make(settings(classes=C, feature_dim=D))]
    return server


@pytest.mark.parametrize("seed, K, C", [(0, 3, 4), (1, 1, 2), (2, 2, 1)])
def test_fedtgp_server(seed, K, C):                     # FedTGP Eqs. 5, 10: two epochs of one batch; who lacks a class adds nothing
    rng, server = np.random.default_rng(seed), small(fedtgp.make_server, C, 3, 3)
    u, held = rng.normal(size=(K, C, 3)), rng.random((K, C)) < 0.7
    held[0, 0] = True
    want, losses = sgd(lambda w: margin_term(u[held], np.nonzero(held)[1], mlp(w), 0.8), weights_of(server), 2, 0.1)
    args = settings(classes=C, lr=0.1, server_epochs=2, batch_size=K * C, momentum=0.0, weight_decay=0.0)
    got, loss = fedtgp.server_update(server, tensor(u), torch.tensor(held), tensor(0.8), 1, args)
    agree(got, mlp(want), 1e-6, 1e-8)
    agree(loss, losses[-1], 1e-6, 1e-8)


@pytest.mark.parametrize("C", [1, 2, 4])
def test_fedlsa_server(C):                              # FedLSA Eqs. 3-5 and A = nor(Θ(R)): three steps with momentum
    server, classifier = small(fedlsa.make_server, C, 3, 4), torch.nn.Linear(4, C).double()
    frozen, anchors = weights_of(classifier), lambda w: [unit(row) for row in mlp(w)]
    loss = lambda w: calibration(anchors(w), *frozen) + 0.4 * separation(anchors(w), 0.2)
    want, losses = sgd(loss, weights_of(server), 3, 0.1, 0.9, 0.01)
    args = settings(classes=C, feature_dim=4, server_steps=3, lr=0.1, momentum=0.9, weight_decay=0.01, alpha=0.4, tau=0.2)
    got, value = fedlsa.server_update(server, classifier, args)
    agree(got, anchors(want), 1e-6, 1e-8)
    agree(value, losses[-1], 1e-6, 1e-8)
    assert all((a == b).all() for a, b in zip(frozen, weights_of(classifier)))


def test_fedsa_anchors():                               # Ā = A W + b, and three steps (lr 0.1) that separate the anchors, in float32
    def anchors(**other):
        torch.manual_seed(0)
        return fedsa.make_anchors(settings(classes=9, **other))
    a = np.hstack([anchors(no_projection=True, anchor_steps=0).double().numpy(), np.ones((9, 1))])
    projection, gap, *_ = np.linalg.lstsq(a, anchors(anchor_steps=0).double().numpy(), rcond=None)
    assert (gap < 1e-10).all()
    loss = lambda w: separation([unit(row) for row in a @ w[0]], 0.1)    # log of the mean, not of the sum: the same slope
    (trained,), _ = sgd(loss, [projection], 3, 0.1)
    agree(anchors(anchor_steps=3), a @ trained, 1e-4, 1e-5)


KINDS, SHARES = [0, 1, 1], [1.0, 0.7, 0.3]               # FedPLCC: three prototypes of two classes and their weights
TERMS = {                                               # beside the cross-entropy; z features, p prototypes, w weights, o: at the start
    "fedproto": lambda z, y, p, w, o: 0.7 * distance_term(z, y, p, [1, 1, 0], mse),                          # FedTGP Eq. 4
    "fedtgp": lambda z, y, p, w, o: 0.7 * distance_term(z, y, p, [1, 1, 0], mse),                            # FedTGP Eq. 11
    "fedsa": lambda z, y, p, w, o: 0.3 * distance_term(z, y, p, [1, 1, 1], mse) + 0.2 * margin_term(z, y, p, 1.5)
                                   + 0.6 * calibration(p, *w[2:]),                                           # FedSA Eq. 9
    "fedlsa": lambda z, y, p, w, o: 0.7 * compactness(z, y, p, 0.5),                                         # FedLSA Eq. 10
    "fedplcc": lambda z, y, p, w, o: 0.4 * contrast(similarities(z, p, 0.5), y, KINDS, SHARES, 0.5)
                                     + 0.9 * correlation(similarities(z, p, 0.5), y, KINDS, SHARES, 0.5),              # FedPLCC Eq. 4
    "fedfm": lambda z, y, p, w, o: 0.7 * guiding(z, y, p, [1, 1, 0], 0.3) + 0.4 * sum(((a - b) ** 2).sum() for a, b in zip(w, o)),  # Eqs. 2, 10
}


@pytest.mark.parametrize("name", TERMS)
def test_clients(name):
    """A client's whole loss: two epochs of one batch with momentum and weight decay end where numerical derivatives lead."""
    torch.manual_seed(0)
    rng, net, module = np.random.default_rng(0), tiny(3, 3, 0.0), globals()[name]
    data, p, start = common.Samples(images(rng, 8), torch.arange(8) % 3), rng.random((3, 3)).astype(np.float32).astype(float), weights_of(net)

    def loss(w):
        z, y = features_of(w, data.x), data.y.tolist()
        return mean([cross_entropy(linear(*w[2:], v), c) for v, c in zip(z, y)]) + TERMS[name](z, y, p, w, start)
    want, losses = sgd(loss, start, 2, 0.05, 0.9, 0.01)
    args = settings(local_epochs=2, batch_size=8, lr=0.05, momentum=0.9, weight_decay=0.01, lam=0.7, distance="mse", lam_r=0.3, lam_mcl=0.2,
                    lam_cc=0.6, tau=0.5, compactness="vmf", alpha=0.5, lam_contra=0.4, lam_corr=0.9, phi=0.5, finch_level="last",
                    local_prototypes="mean", uniform_weights=False, match="cg", temperature=0.3, prox=0.8, augment=False)
    client, sent, present = common.Client(0, copy.deepcopy(net), data, data), tensor(p).float(), torch.tensor([True, True, False])
    if name in ("fedproto", "fedtgp", "fedsa"):         # personal: the client's own model, and class means of it
        means, _, value = module.client_update(client, sent, torch.tensor(1.5) if name == "fedsa" else present, 1, args)
        agree(means, common.class_means(client.net, data, 3)[0])
    else:                                               # a copy of the model that was sent
        what = dict(fedlsa=(sent,), fedplcc=((sent, torch.tensor(KINDS), torch.tensor(SHARES)),), fedfm=(sent, present, 0.7))[name]
        client.net, *_, value = module.client_update(client, net, *what, 1, args)
    agree(value, mean(losses), 1e-5)                    # float32
    for a, b, c in zip(client.net.parameters(), want, weights_of(net)):
        agree(a, b, 1e-4, 1e-5)
        assert (a.detach().numpy() != c).any()          # the one that was sent is not touched
