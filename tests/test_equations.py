"""Every numbered equation of the six papers a second time: slow loops in float64, written from the papers and
not from the scripts, compared with the scripts' functions on random and on corner inputs."""

import copy, itertools, math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common, fedfm, fedlsa, fedplcc, fedproto, fedsa, fedtgp

mean = lambda values: sum(values) / len(values) if len(values) else 0.0     # over nothing: 0
dot = lambda a, b: sum(u * v for u, v in zip(a, b, strict=True))
norm = lambda a: math.sqrt(dot(a, a))
unit = lambda a: [v / norm(a) for v in a] if norm(a) else list(a)           # a zero vector stays 0
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

# ---- losses; z (B, D) samples, y (B,) their classes, p or a (C, D) one vector a class

# FedTGP Eq. 4 (FedProto's) and Eq. 11, FedSA Eq. 5, per sample
distance_term = lambda z, y, p, known, phi: mean([phi(v, p[c]) for v, c in zip(z, y) if known[c]])
# FedTGP Eq. 10 (Eq. 6 where the margin is 0), FedSA Eq. 7
margin_term = lambda z, y, p, margin: mean([
    cross_entropy([-euclidean(v, q) - margin * (k == c) for k, q in enumerate(p)], c) for v, c in zip(z, y)])
# FedLSA Eqs. 7, 8
compactness = lambda z, y, a, t: mean([cross_entropy([dot(r, v) / t for r in a], c) for v, c in zip(z, y)])
# FedLSA Eq. 3, FedSA Eq. 8: classify the c-th vector as c
calibration = lambda vectors, w, b: mean([cross_entropy(linear(w, b, a), c) for c, a in enumerate(vectors)])
# FedLSA Eq. 4, τ inside the exponential
separation = lambda a, tau: mean([
    math.log(mean([math.exp(dot(u, a[j]) / tau) for j in range(len(a)) if j != i]) or 1)
    for i, u in enumerate(a)])
# FedFM Eq. 3, of normalised vectors
directions = lambda v, a: squares(unit(v), unit(a))
# FedPLCC Eq. 7 of all pairs, clamped below at 1e-6
similarities = lambda z, g, alpha: [[max(cosine(v, u), 1e-6) ** alpha for u in g] for v in z]

def guiding(z, y, a, known, temperature):       # FedFM Section IV-C, one softmax over classes with an anchor
    s = [{n: math.exp(cosine(a[n], v) / temperature) for n in range(len(a)) if known[n]} for v in z]
    return mean([-math.log(e[c] / sum(e.values())) for e, c in zip(s, y) if known[c]])

def contrast(s, y, classes, w, tau):            # FedPLCC Eq. 6
    e = [[math.exp(v / tau) * weight for v, weight in zip(row, w)] for row in s]
    own = [sum(v for v, k in zip(row, classes) if k == c) for row, c in zip(e, y)]
    return mean([-math.log(part / sum(row)) for part, row in zip(own, e) if part])

def correlation(s, y, classes, w, phi):         # FedPLCC Eq. 8; φ is a decimal: ⌈0.07 · 100⌉ is 7
    own = [sorted(-v * m for v, m, k in zip(row, w, classes) if k == c) for row, c in zip(s, y)]
    return mean([sum(v[:math.ceil(Fraction(str(phi)) * len(v))]) for v in own if v])

ALL = [1] * 99
use = lambda f, *more: lambda z, y, p, known: f(z, y, p, *more)
among = lambda f, *more: lambda z, y, p, known: f(z, y, p, known, *more)
LOSSES = {                                      # name: the script's and the reference's (z, y, p, known)
    "FedTGP Eq. 4": (fedproto.prototype_distance, among(distance_term, euclidean)),
    "FedTGP Eq. 4, mse": (among(fedproto.prototype_distance, "mse"), among(distance_term, mse)),
    "FedTGP Eq. 11": (fedtgp.prototype_distance, among(distance_term, euclidean)),
    "FedTGP Eq. 6": (use(fedtgp.margin_contrastive, 0.0), use(margin_term, 0)),
    "FedTGP Eq. 10": (use(fedtgp.margin_contrastive, tensor(1.7)), use(margin_term, 1.7)),
    "FedSA Eq. 5": (use(fedsa.regularization), use(distance_term, ALL, euclidean)),
    "FedSA Eq. 5, mse": (use(fedsa.regularization, "mse"), use(distance_term, ALL, mse)),
    "FedSA Eq. 7": (use(fedsa.margin_contrastive, tensor(2.3)), use(margin_term, 2.3)),
    "FedLSA Eq. 8": (use(fedlsa.compactness, 0.2), use(compactness, 0.2)),
    "FedLSA l2": (use(fedlsa.compactness, 9, "l2"), use(distance_term, ALL, euclidean)),
    "FedFM IV-C": (among(fedfm.contrastive_guiding, 0.1), among(guiding, 0.1)),
    "FedFM Eq. 3": (fedfm.squared_distance, among(distance_term, directions)),
}
every_loss = pytest.mark.parametrize("name", LOSSES)

@every_loss
@pytest.mark.parametrize("B, C, D", [(7, 4, 5), (1, 4, 3), (6, 1, 3), (5, 3, 1), (20, 9, 9)])
def test_losses(name, B, C, D):
    (ours, reference), rng = LOSSES[name], np.random.default_rng(B)
    z, y, p = rng.normal(size=(B, D)), rng.integers(C, size=B), rng.normal(size=(C, D))
    for known in (np.ones(C, bool), np.arange(C) % 2 == 1, np.zeros(C, bool)):
        loss = lambda z: ours(z, torch.tensor(y), tensor(p), torch.tensor(known))
        agree(loss(tensor(z)), reference(z, y, p, known))
        assert B == 20 or torch.autograd.gradcheck(loss, tensor(z).requires_grad_())

@every_loss
def test_losses_where_vectors_are_equal_or_zero(name):
    """A distance of 0 and the direction of 0 (a ReLU gives such features) have no derivative: no nan."""
    (ours, reference), rng, y = LOSSES[name], np.random.default_rng(7), np.arange(6) % 3
    z, p = rng.normal(size=(6, 4)), rng.normal(size=(3, 4))
    same, holed = p[[0, 0, 0]], p * [[1], [0], [1]]
    for z, p in ((z, same), (p[y], p), (same[y], same), (z * 0, p), (z, holed), (z * 0, p * 0)):
        leaf, known = tensor(z).requires_grad_(), torch.ones(3, dtype=torch.bool)
        loss = ours(leaf, torch.tensor(y), tensor(p), known)
        loss.backward()
        agree(loss, reference(z, y, p, known))
        assert leaf.grad.isfinite().all()

@pytest.mark.parametrize("C, D", [(4, 5), (1, 3), (10, 2), (2, 1)])
def test_losses_of_anchors(C, D):
    torch.manual_seed(C)
    a, phi = np.random.default_rng(C).normal(size=(C, D)), torch.nn.Linear(D, C).double()
    for x in (a, a[[0] * C], a * 0):
        want = calibration(x, phi.weight.tolist(), phi.bias.tolist())
        agree(fedsa.classifier_calibration(phi, tensor(x)), want)                               # FedSA Eq. 8
        agree(fedlsa.anchor_classification(tensor(x), phi.weight, phi.bias), want)              # FedLSA Eq. 3
        for tau in (0.1, 1.0):
            agree(fedlsa.anchor_separation(tensor(x), tau), separation(x, tau))                 # FedLSA Eq. 4

@pytest.mark.parametrize("B, C, G, D", [(7, 5, 9, 4), (1, 3, 1, 3), (4, 4, 30, 6), (2, 1, 100, 2)])
@pytest.mark.parametrize("alpha, tau, phi", [(0.5, 0.07, 0.5), (0.25, 1.0, 1.0), (1.0, 0.3, 0.07)])
def test_fedplcc_losses(B, C, G, D, alpha, tau, phi):
    rng = np.random.default_rng(G)
    z, g = rng.normal(size=(B, D)), rng.normal(size=(G, D))
    y, k = rng.integers(C, size=B), rng.integers(C, size=G)
    z[0] *= rng.integers(2)                     # cosines below 0 and, for a zero vector, of 0 are clamped
    s = similarities(z, g, alpha)
    agree(fedplcc.similarity(tensor(z), tensor(g), alpha), s)                                   # Eq. 7
    for w in (rng.random(G) + 0.1, np.ones(G)):
        for labels in (y, y * 0 + C):           # nobody has sent a prototype of class C
            known = torch.tensor(labels), torch.tensor(k), tensor(w)
            agree(fedplcc.contrast(tensor(s), *known, tau), contrast(s, labels, k, w, tau))     # Eq. 6
            agree(fedplcc.correlation(tensor(s), *known, phi), correlation(s, labels, k, w, phi))    # Eq. 8
    fedplcc.similarity(zero := tensor(z * 0).requires_grad_(), tensor(g), alpha).sum().backward()
    assert zero.grad.isfinite().all()

# ---- means and margins
federations = pytest.mark.parametrize("K, C, D", [(5, 6, 4), (1, 5, 3), (8, 2, 2), (3, 1, 3), (20, 10, 8)])

def uploads_of(K, C, D):                      # with a class of nobody; rows of absent classes must not count
    rng = np.random.default_rng(K)
    n = rng.integers(1, 40, size=(K, C)) * (rng.random((K, C)) < 0.6) * (np.arange(C) != C // 2)
    return rng.normal(size=(K, C, D)), n, [[i for i in range(K) if n[i, c]] for c in range(C)]

@federations
def test_means(K, C, D):
    u, n, owners = uploads_of(K, C, D)
    rng, seen, nothing = np.random.default_rng(K + 70), n.sum(0) > 0, np.zeros(D)
    old, had = rng.normal(size=(C, D)), rng.random(C) < 0.5
    weighted = [sum(n[i, c] * u[i, c] for i in o) / sum(n[i, c] for i in o) if o else nothing
                for c, o in enumerate(owners)]
    for module in (fedproto, fedsa):                                               # FedTGP Eq. 3, FedSA Eq. 3
        p, has = module.weighted_mean(tensor(u), tensor(n))
        agree(p, weighted)
        assert has.tolist() == seen.tolist()
    for alpha in (0.9999, 0.5, 0.0, 1.0):                                           # FedSA Eq. 10
        agree(fedsa.ema(tensor(old), tensor(u[0]), torch.tensor(had), alpha),
              [alpha * a + (1 - alpha) * m if h else a for a, m, h in zip(old, u[0], had)])
    # FedFM Eq. 9; uniform (Section VII-D): who lacks a class counts with its previous anchor, if there is one
    filled = [mean([u[i, c] if i in o else old[c] for i in range(K) if i in o or had[c]])
              for c, o in enumerate(owners)]
    for how, want in dict(weighted=weighted, uniform=filled).items():
        a, known = fedfm.aggregate_anchors(tensor(u), tensor(n), tensor(old), torch.tensor(had), how)
        agree(a, [want[c] if o else old[c] for c, o in enumerate(owners)])
        assert known.tolist() == (had | seen).tolist()

@federations
@pytest.mark.parametrize("tau", [0.5, 100.0])
def test_margins(K, C, D, tau):
    u, n, owners = uploads_of(K, C, D)
    q = [mean([u[i, c] for i in o]) for c, o in enumerate(owners) if o]
    gaps = [[euclidean(a, b) for j, b in enumerate(q) if j != i] or [0] for i, a in enumerate(q)] or [[0]]
    largest = dict(pairwise=max(map(max, gaps)), nearest=max(map(min, gaps)), fixed=tau, none=0)
    for rule, want in largest.items():          # FedTGP Eq. 9; nearest: its published code; in float32
        args = SimpleNamespace(margin=rule, tau=tau)
        margin = fedtgp.adaptive_margin(tensor(u).float(), torch.tensor(n > 0), args)
        agree(margin, min(want, tau), 1e-5, 1e-6)
    for p, owns in zip(u, n > 0):               # FedSA Eq. 6, each client's
        pairs = [euclidean(a, b) for a, b in itertools.permutations(p[owns], 2)]
        want = sum(pairs) / (owns.sum() - 1) ** 2 if pairs else 0.0
        agree(fedsa.average_margin(tensor(p)[torch.tensor(owns)]), want)

# ---- FINCH
def groups_of(x):                               # one pass: i and its first neighbour κ(i) belong together
    root = list(range(len(x)))
    find = lambda i: i if root[i] == i else find(root[i])
    for i in range(len(x)):
        root[find(i)] = find(max((j for j in range(len(x)) if j != i), key=lambda j: cosine(x[i], x[j])))
    return [[i for i in range(len(x)) if find(i) == r] for r in range(len(x)) if find(r) == r]

def finch(x, w, level="last"):                  # FINCH*: weighted means, until one cluster would remain
    x, w, first = [list(v) for v in x], list(w), True
    while len(x) > 1 and (first or level == "last"):
        groups = groups_of(x)
        if len(groups) == 1 and not first:      # the partition before is the last; the very first counts
            break
        x = [[sum(w[i] * v for i, v in zip(g, of)) / sum(w[i] for i in g) for of in zip(*(x[i] for i in g))]
             for g in groups]
        w, first = [sum(w[i] for i in g) for g in groups], False
    return x, w

def table(*columns):                            # parallel columns as sorted rows: clusters come in any order
    return tensor(sorted(np.concatenate([*map(np.ravel, row)]).tolist() for row in zip(*columns)))

@pytest.mark.parametrize("n", [1, 2, 3, 6, 30])
@pytest.mark.parametrize("seed, D", [(0, 2), (2, 16)])
def test_finch(seed, D, n):                     # FedPLCC Eqs. 9, 10
    rng = np.random.default_rng(1000 * seed + n)
    drawn = rng.normal(size=(n, D))
    for x in (drawn, np.maximum(drawn, 0) + rng.random((n, D)) * 0.1):          # the second as after a ReLU
        if n > 1:
            label = fedplcc.first_neighbour_clusters(tensor(x)).tolist()
            assert sorted(groups_of(x)) == sorted([i for i in range(n) if label[i] == m] for m in set(label))
        for w, level in itertools.product((np.ones(n), rng.integers(1, 50, size=n)), ("last", "first")):
            agree(table(*fedplcc.finch(tensor(x), tensor(w), level)), table(*finch(x, w, level)))

@pytest.mark.parametrize("K, C", [(1, 3), (2, 1), (3, 4), (8, 5)])
@pytest.mark.parametrize("level", ["last", "first"])
def test_fedplcc_global_prototypes(K, C, level):                # FedPLCC Eqs. 10, 11; in float32
    rng = np.random.default_rng(K)
    x, y, w = rng.normal(size=(9 * K, 3)), rng.integers(C, size=9 * K), rng.integers(1, 20, size=9 * K)
    sent = [*zip(*(torch.tensor(v).chunk(K) for v in (x.astype("f"), y, w.astype("f"))))]
    want = [(v, c, m / w[y == c].sum()) for c in set(y) for v, m in zip(*finch(x[y == c], w[y == c], level))]
    for uniform in (False, True):
        args = SimpleNamespace(classes=C, finch_level=level, uniform_weights=uniform)
        rows = [(v, c, 1.0 if uniform else m) for v, c, m in want]
        agree(table(*fedplcc.global_prototypes(sent, args)), table(*zip(*rows)), 1e-5, 1e-6)

# ---- models: class means, averages, and training steps by numerical derivatives
weights_of = lambda module: [np.array(p.tolist(), float) for p in module.parameters()]
# common.Net brings uint8 to [-1, 1]
features_of = lambda w, x: [linear(w[0], w[1], row / 127.5 - 1) for row in x.flatten(1).double().numpy()]

@pytest.mark.parametrize("K", [1, 2, 7])
def test_average(K):                            # FedFM Eq. 11: Σ p_k w_k with p_k = N_k / N
    nets = [torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).double() for _ in range(K)]
    n = [5 * k + 1 for k in range(K)]
    for k, net in enumerate(nets):
        for _ in range(K - k):                  # BatchNorm's counters and statistics differ
            net(torch.randn(6, 3, dtype=torch.float64))
    for name, value in common.average([net.state_dict() for net in nets], n).items():
        states = [net.state_dict()[name].numpy() for net in nets]
        agree(value, sum(m * s for m, s in zip(n, states)) / sum(n))
    gap = sum(((a - b) ** 2).sum() for a, b in zip(weights_of(nets[0]), weights_of(nets[-1])))
    agree(fedfm.proximal(nets[0], fedfm.flat(nets[-1])), gap / 2)                   # FedProx's term

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
settings = lambda **other: SimpleNamespace(**dict(classes=3, feature_dim=3, seed=0, no_mlp=False, lr=0.1,
                                                  momentum=0.9, weight_decay=0.01) | other)

def check(update, loss, weights, shown, steps, **options):
    """A server's update ends where numerical derivatives of the loss lead."""
    want, losses = sgd(loss, weights, steps, 0.1, **options)
    got, value = update()
    agree(got, shown(want), 1e-6, 1e-8)
    agree(value, losses[-1], 1e-6, 1e-8)

@pytest.mark.parametrize("K, C", [(3, 4), (1, 2), (2, 1)])
def test_fedtgp_server(K, C):                   # FedTGP Eqs. 5, 10: two epochs of one batch, no momentum
    rng, args = np.random.default_rng(K), settings(classes=C, server_epochs=2, batch_size=K * C)
    server = common.seeded(lambda: fedtgp.GlobalPrototypes(args), K, "server").double()
    u, owns = rng.normal(size=(K, C, 3)), rng.random((K, C)) < 0.7
    owns[0, 0] = True                           # who lacks a class adds nothing
    loss = lambda w: margin_term(u[owns], np.nonzero(owns)[1], mlp(w), 0.8)
    sent = tensor(u), torch.tensor(owns), tensor(0.8)
    check(lambda: fedtgp.server_update(server, *sent, 1, args), loss, weights_of(server), mlp, 2)

@pytest.mark.parametrize("C", [1, 2, 4])
def test_fedlsa_server(C):                      # FedLSA Eqs. 3-5, A = nor(Θ(R)): three steps with momentum
    args = settings(classes=C, feature_dim=4, server_steps=3, alpha=0.4, tau=0.2)
    torch.manual_seed(C)
    server, classifier = fedlsa.Anchors(args), torch.nn.Linear(4, C).double()
    server.R = torch.nn.Parameter(torch.randn(C, 3))            # the same in small
    server.theta = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 4))
    frozen, anchors = weights_of(classifier), lambda w: [unit(row) for row in mlp(w)]
    loss = lambda w: calibration(anchors(w), *frozen) + 0.4 * separation(anchors(w), 0.2)
    start = weights_of(server.double())
    update = lambda: fedlsa.server_update(server, classifier, args)
    check(update, loss, start, anchors, 3, momentum=0.9, decay=0.01)
    assert all((a == b).all() for a, b in zip(frozen, weights_of(classifier)))

def test_fedsa_anchors():                 # Ā = A W + b of A ~ N(0, I), or two layers with BatchNorm, ReLU
    args = [settings(classes=400, projection=name) for name in ("none", "linear", "mlp")]
    A, *anchors = (common.seeded(lambda: fedsa.make_anchors(a), 0, "anchors").double().numpy() for a in args)
    assert abs(A.mean()) < 0.1 and abs(A.var() - 1) < 0.1 and abs(anchors[0] - A).max() > 0.1
    assert (np.linalg.lstsq(np.hstack([A, np.ones((400, 1))]), anchors[0], rcond=None)[1] < 1e-9).all()
    assert anchors[1].min() == 0 and abs((anchors[1] ** 2).mean(0) - 0.5).max() < 0.2    # half of a N(0, 1)

KINDS, SHARES = [0, 1, 1], [1.0, 0.7, 0.3]      # FedPLCC: three prototypes of two classes and their weights
personal = lambda z, y, p, *_: 0.7 * distance_term(z, y, p, [1, 1, 0], mse)         # FedTGP Eqs. 4, 11
TERMS = {  # beside cross-entropy; z features, p prototypes, w weights, o weights and d margin at the start
    "fedproto": personal, "fedtgp": personal,
    "fedsa": lambda z, y, p, w, o, d: (                                             # FedSA Eq. 9
        0.3 * distance_term(z, y, p, ALL, mse) + 0.2 * margin_term(z, y, p, d)
        + 0.6 * calibration(p, *w[2:])),
    "fedlsa": lambda z, y, p, w, o, d: 0.7 * compactness(z, y, p, 0.5),             # FedLSA Eq. 10
    "fedplcc": lambda z, y, p, w, o, d: (                                           # FedPLCC Eq. 4
        0.4 * contrast(s := similarities(z, p, 0.5), y, KINDS, SHARES, 0.5)
        + 0.9 * correlation(s, y, KINDS, SHARES, 0.5)),
    "fedfm": lambda z, y, p, w, o, d: (                                             # FedFM Eqs. 2, 10
        0.7 * guiding(z, y, p, [1, 1, 0], 0.3) + 0.4 * sum(((a - b) ** 2).sum() for a, b in zip(w, o))),
}

@pytest.mark.parametrize("name, when", [*((name, "after") for name in TERMS), ("fedtgp", "before")])
def test_clients(name, when):
    """A client's whole loss: two epochs of one batch with momentum and weight decay end where numerical
    derivatives lead. FedSA's margin is that of the client's prototypes before training."""
    torch.manual_seed(1)
    extractor = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    net, module = common.Net(extractor, torch.nn.Linear(3, 3), 3), globals()[name]
    x, y, start = torch.randint(256, (8, 1, 2, 2)).byte(), [0, 1, 2, 0, 1, 2, 0, 1], weights_of(net)
    p = (0.2 * torch.rand(3, 3)).double().numpy()
    means = lambda w: [np.mean([v for v, k in zip(features_of(w, x), y) if k == c], 0) for c in range(3)]
    margins = [sum(euclidean(a, b) for a in q for b in q) / 4 for q in (p, means(start))]   # FedSA Eq. 6
    assert margins[1] > margins[0] + 0.1

    def loss(w):
        z = features_of(w, x)
        entropy = mean([cross_entropy(linear(*w[2:], v), c) for v, c in zip(z, y)])
        return entropy + TERMS[name](z, y, p, w, start, margins[1])
    want, losses = sgd(loss, start, 2, 0.1, 0.9, 0.01)
    args = settings(local_epochs=2, batch_size=8, batches="all", lam=0.7, distance="mse", lam_r=0.3,
                    lam_mcl=0.2, lam_cc=0.6, tau=0.5, compactness="vmf", alpha=0.5, lam_contra=0.4,
                    lam_corr=0.9, phi=0.5, local_prototypes="mean", match="cg", temperature=0.3, prox=0.8,
                    augment=False, uploads=when)
    data = common.Samples(x, torch.tensor(y))
    client, sent = common.Client(0, data, data, copy.deepcopy(net)), tensor(p).float()
    what = dict(fedsa=(sent,), fedlsa=(sent,), fedplcc=((sent, torch.tensor(KINDS), torch.tensor(SHARES)),))
    *uploads, value = module.client_update(client, *what.get(name, (sent, torch.arange(3) < 2)), 1, args)
    agree(value, mean(losses), 1e-5)            # float32
    for a, b in zip(client.net.parameters(), want):
        agree(a, b, 1e-4, 1e-5)
    if name in ("fedlsa", "fedplcc", "fedfm"):  # uploads are the trained model's
        assert all(torch.equal(v, client.net.state_dict()[k]) for k, v in uploads.pop(0).items())
    if name == "fedfm":
        uploads = fedfm.own_means(client, 1, args)
    if name in ("fedproto", "fedtgp", "fedsa", "fedfm"):        # FedTGP and FedSA Eq. 2, FedFM Eq. 8
        agree(uploads[0], means(want if when == "after" else start), 1e-4, 1e-5)
        assert uploads[1].tolist() == ([True] * 3 if name == "fedtgp" else [3, 3, 2])
    if name == "fedplcc":                       # one mean a class, its class and number of images
        agree(uploads[0][0], means(want), 1e-4, 1e-5)
        assert [column.tolist() for column in uploads[0][1:]] == [[0, 1, 2], [3, 3, 2]]
