"""The equations of the six papers a second time: slow loops over numbers, written from the papers and not from the
scripts. The scripts' functions must give the same on random inputs and in corners: one class, one client, one image,
nothing uploaded, equal vectors, zeros. A few cases are worked by hand, too.

Shapes: z (B, D) features, y (B,) their classes, p (C, D) prototypes or anchors, known (C,) which of them exist."""

import itertools, math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common, fedfm, fedlsa, fedplcc, fedproto, fedsa, fedtgp
from reference import (average_margin, cosine, cross_entropy, dot, euclidean, finch, groups_of, linear, mean, mse,
                       nearest_margins, squares, unit, weighted_mean)


# --- numbers and vectors --------------------------------------------------------------------------

def tensor(x):
    return torch.tensor(np.asarray(x, float), dtype=torch.float64)


def agree(got, want, rtol=1e-9, atol=1e-11):
    got, want = got.detach().numpy(), np.asarray(want)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol, atol)


# --- losses of features: reference(z, y, p, known) ------------------------------------------------

def distance_term(z, y, p, known, phi):
    """FedTGP Eq. 4 (FedProto's) and Eq. 11, FedSA Eq. 5, each sample's."""
    return mean([phi(v, p[c]) for v, c in zip(z, y) if known[c]])


def margin_term(z, y, p, margin):
    """FedTGP Eq. 10 (Eq. 6 where the margin is 0), FedSA Eq. 7."""
    losses = []
    for v, c in zip(z, y):
        logits = [-(euclidean(v, q) + (margin if k == c else 0)) for k, q in enumerate(p)]
        losses.append(cross_entropy(logits, c))
    return mean(losses)


def compactness(z, y, a, tau):
    """FedLSA Eqs. 7, 8."""
    return mean([cross_entropy([dot(r, v) / tau for r in a], c) for v, c in zip(z, y)])


def guiding(z, y, a, known, temperature):
    """FedFM Section IV-C, with one softmax, over the classes that have an anchor."""
    losses = []
    for v, c in zip(z, y):
        if known[c]:
            s = [math.exp(cosine(a[n], v) / temperature) if known[n] else 0 for n in range(len(a))]
            losses.append(-math.log(s[c] / sum(s)))
    return mean(losses)


def of_directions(v, a):
    """FedFM Eq. 3 of normalised vectors."""
    return squares(unit(v), unit(a))


def calibration(vectors, w, b):
    """FedLSA Eq. 3, FedSA Eq. 8: classify the c-th vector as c."""
    return mean([cross_entropy(linear(w, b, a), c) for c, a in enumerate(vectors)])


def separation(a, tau):
    """FedLSA Eq. 4, with τ inside the exponential."""
    terms = []
    for i, u in enumerate(a):
        others = [math.exp(dot(u, a[j]) / tau) for j in range(len(a)) if j != i]
        terms.append(math.log(mean(others)) if others else 0.0)
    return mean(terms)


LOSSES = {  # name: the script's function, the reference
    "FedTGP Eq. 4": (
        lambda z, y, p, known: fedproto.prototype_distance(z, y, p, known),
        lambda z, y, p, known: distance_term(z, y, p, known, euclidean)),
    "FedTGP Eq. 4, mse": (
        lambda z, y, p, known: fedproto.prototype_distance(z, y, p, known, "mse"),
        lambda z, y, p, known: distance_term(z, y, p, known, mse)),
    "FedTGP Eq. 11": (
        lambda z, y, p, known: fedtgp.prototype_distance(z, y, p),
        lambda z, y, p, known: distance_term(z, y, p, known | True, euclidean)),
    "FedTGP Eq. 11, mse": (
        lambda z, y, p, known: fedtgp.prototype_distance(z, y, p, "mse"),
        lambda z, y, p, known: distance_term(z, y, p, known | True, mse)),
    "FedTGP Eq. 6": (
        lambda z, y, p, known: fedtgp.margin_contrastive(z, y, p, 0.0),
        lambda z, y, p, known: margin_term(z, y, p, 0.0)),
    "FedTGP Eq. 10": (
        lambda z, y, p, known: fedtgp.margin_contrastive(z, y, p, tensor(1.7)),
        lambda z, y, p, known: margin_term(z, y, p, 1.7)),
    "FedSA Eq. 5": (
        lambda z, y, p, known: fedsa.regularization(z, y, p),
        lambda z, y, p, known: distance_term(z, y, p, known | True, euclidean)),
    "FedSA Eq. 5, mse": (
        lambda z, y, p, known: fedsa.regularization(z, y, p, "mse"),
        lambda z, y, p, known: distance_term(z, y, p, known | True, mse)),
    "FedSA Eq. 7": (
        lambda z, y, p, known: fedsa.margin_contrastive(z, y, p, tensor(2.3)),
        lambda z, y, p, known: margin_term(z, y, p, 2.3)),
    "FedLSA Eq. 8": (
        lambda z, y, p, known: fedlsa.compactness(z, y, p, 0.2),
        lambda z, y, p, known: compactness(z, y, p, 0.2)),
    "FedLSA, L2 norm": (
        lambda z, y, p, known: fedlsa.compactness(z, y, p, 0.2, "l2"),
        lambda z, y, p, known: distance_term(z, y, p, known | True, euclidean)),
    "FedFM IV-C": (
        lambda z, y, p, known: fedfm.contrastive_guiding(z, y, p, known, 0.1),
        lambda z, y, p, known: guiding(z, y, p, known, 0.1)),
    "FedFM Eq. 3": (
        lambda z, y, p, known: fedfm.squared_distance(z, y, p, known),
        lambda z, y, p, known: distance_term(z, y, p, known, of_directions)),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


@every_loss
@pytest.mark.parametrize("B, C, D", [(7, 4, 5), (1, 4, 3), (6, 1, 3), (5, 3, 1), (20, 9, 9)])
def test_losses(name, B, C, D):
    """Catches: another formula, a sum for a mean, a margin on the wrong classes or with the wrong sign, a class without
    a prototype that takes part; gradients that are cut off."""
    ours, reference = LOSSES[name]
    rng = np.random.default_rng(B)
    z, y, p = rng.normal(size=(B, D)), rng.integers(C, size=B), rng.normal(size=(C, D))
    for known in (np.ones(C, bool), np.arange(C) % 2 == 1, np.zeros(C, bool)):
        def loss(z):
            return ours(z, torch.tensor(y), tensor(p), torch.tensor(known))
        agree(loss(tensor(z)), reference(z, y, p, known))
        if B < 20:
            assert torch.autograd.gradcheck(loss, tensor(z).requires_grad_())


@every_loss
def test_losses_where_vectors_are_equal_or_zero(name):
    """Catches: nan in a gradient. A distance of 0 and the direction of 0 (a ReLU gives such features) have no
    derivative."""
    ours, reference = LOSSES[name]
    rng, y = np.random.default_rng(7), np.arange(6) % 3
    z, p = rng.normal(size=(6, 4)), rng.normal(size=(3, 4))
    all_equal, one_zero = p[[0, 0, 0]], p * [[1], [0], [1]]
    cases = [(z, all_equal), (p[y], p), (all_equal[y], all_equal), (z * 0, p), (z, one_zero), (z * 0, p * 0)]
    for z, p in cases:
        features = tensor(z).requires_grad_()
        loss = ours(features, torch.tensor(y), tensor(p), torch.ones(3, dtype=torch.bool))
        loss.backward()
        agree(loss, reference(z, y, p, np.ones(3, bool)))
        assert features.grad.isfinite().all()


@pytest.mark.parametrize("name", ["FedTGP Eq. 4", "FedFM IV-C", "FedFM Eq. 3"])
def test_the_row_of_an_absent_class_does_not_matter(name):
    """Catches: what stands in the row of an absent class in a mean or a softmax."""
    ours, _ = LOSSES[name]
    z, y, known = torch.randn(6, 4), torch.arange(6) % 3, torch.tensor([True, False, True])
    p = torch.randn(3, 4)
    losses = []
    for value in (0, 1e6):
        p[1] = value
        losses.append(ours(z, y, p, known).item())
    assert losses[0] == losses[1]


@pytest.mark.parametrize("C, D", [(4, 5), (1, 3), (10, 2), (2, 1)])
def test_losses_of_anchors(C, D):
    """Catches: the classifier's bias left out, the sum over j with i in it, τ outside the exponential."""
    torch.manual_seed(C)
    a, classifier = np.random.default_rng(C).normal(size=(C, D)), torch.nn.Linear(D, C).double()
    for x in (a, a[[0] * C], a * 0):
        want = calibration(x, classifier.weight.tolist(), classifier.bias.tolist())
        agree(fedsa.classifier_calibration(classifier, tensor(x)), want)                               # FedSA Eq. 8
        agree(fedlsa.anchor_classification(tensor(x), classifier.weight, classifier.bias), want)       # FedLSA Eq. 3
        for tau in (0.1, 1.0):
            agree(fedlsa.anchor_separation(tensor(x), tau), separation(x, tau))                        # FedLSA Eq. 4


def test_anchors_are_kept_apart_at_a_tiny_temperature():
    """Catches: inf, where exp(1 / 0.001) is more than a float holds."""
    anchors = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert fedlsa.anchor_separation(anchors[:2], 0.001).item() == pytest.approx(1000)
    assert fedlsa.anchor_separation(anchors, 0.001).isfinite()


# --- FedPLCC's losses over G prototypes, several of a class ---------------------------------------

def similarities(z, vectors, alpha):
    """FedPLCC Eq. 7 of all pairs (B, G), clamped below at 1e-6."""
    return [[max(cosine(v, u), 1e-6) ** alpha for u in vectors] for v in z]


def contrast(s, y, classes, weights, tau):
    """FedPLCC Eq. 6."""
    losses = []
    for row, c in zip(s, y):
        terms = [math.exp(v / tau) * w for v, w in zip(row, weights)]
        own = sum(term for term, k in zip(terms, classes) if k == c)
        if own:
            losses.append(-math.log(own / sum(terms)))
    return mean(losses)


def attraction(s, y, classes, weights, phi):
    """FedPLCC Eq. 8. φ is a decimal: ⌈0.07 · 100⌉ is 7."""
    losses = []
    for row, c in zip(s, y):
        own = sorted([v * w for v, w, k in zip(row, weights, classes) if k == c], reverse=True)
        if own:
            losses.append(-sum(own[:math.ceil(Fraction(str(phi)) * len(own))]))
    return mean(losses)


@pytest.mark.parametrize("B, C, G, D", [(7, 5, 9, 4), (1, 3, 1, 3), (4, 4, 30, 6), (2, 1, 100, 2)])
@pytest.mark.parametrize("alpha, tau, phi", [(0.5, 0.07, 0.5), (0.25, 1.0, 1.0), (1.0, 0.3, 0.07)])
def test_fedplcc_losses(B, C, G, D, alpha, tau, phi):
    """Catches: weights left out of one of the sums, other classes' prototypes in it, one too many or too few ranked,
    samples of a class without a prototype in the mean, an infinite slope at a cosine of 0."""
    rng = np.random.default_rng(G)
    z, vectors = rng.normal(size=(B, D)), rng.normal(size=(G, D))
    z[0] *= rng.integers(2)  # cosines are below 0 and, for a zero vector, 0
    y, classes = rng.integers(C, size=B), rng.integers(C, size=G)
    s = similarities(z, vectors, alpha)
    agree(fedplcc.similarity(tensor(z), tensor(vectors), alpha), s)                                    # Eq. 7
    for weights in (rng.random(G) + 0.1, np.ones(G)):
        for labels in (y, np.full(B, C)):  # nobody has sent a prototype of class C
            own = torch.tensor(classes == labels[:, None])
            given, seen = (tensor(s).requires_grad_(), own, tensor(weights)), own.any(1)
            l_contra = (fedplcc.contrast(*given, tau) * seen).sum() / max(seen.sum(), 1)               # Eq. 6
            l_corr = (fedplcc.attraction(*given, phi) * seen).sum() / max(seen.sum(), 1)               # Eq. 8
            agree(l_contra, contrast(s, labels, classes, weights, tau))
            agree(l_corr, attraction(s, labels, classes, weights, phi))
            (l_contra + l_corr).backward()
            assert given[0].grad.isfinite().all()
    zero = tensor(z * 0).requires_grad_()
    fedplcc.similarity(zero, tensor(vectors), alpha).sum().backward()
    assert zero.grad.isfinite().all()


# --- class means, distances, means over clients, margins ------------------------------------------

def test_class_means():
    """Catches: a sum for a mean, a class left out, the model in train mode (FedTGP Eq. 2, FedFM Eq. 8)."""
    net = common.Net(torch.nn.Flatten(), torch.nn.Identity(), 1, 5, mean=(0.0,), std=(1 / 255,))
    net.train()
    images = common.Images(torch.tensor([1, 2, 6, 50]).byte().view(4, 1, 1, 1), torch.tensor([0, 2, 2, 3]))
    means, counts = common.class_means(net, images)
    agree(means, [[1.0], [0.0], [4.0], [50.0], [0.0]], 1e-6)
    assert counts.tolist() == [1, 0, 2, 1, 0] and counts.dtype == torch.long
    assert not net.training


def test_the_nearest_prototype():
    """Catches: the zeros of an unknown class predicted, though nobody has it."""
    prototypes, known = torch.tensor([[1.0], [0.0], [4.0], [50.0]]), torch.tensor([True, False, True, True])
    z = torch.tensor([[0.0], [2.0], [3.0], [26.0], [28.0]])
    assert common.nearest_prototype(z, prototypes, known).tolist() == [0, 0, 2, 2, 3]
    assert common.nearest_prototype(z, prototypes).tolist() == [1, 0, 2, 2, 3]


def test_distances_far_from_the_origin():
    """Catches: |a|² + |b|² - 2ab in float32, which rounds the distances of long vectors that are close together to
    nothing."""
    far = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)) * 0.1 + 1000
    assert common.nearest_prototype(far + 0.001, far).tolist() == list(range(40))
    away = common.distances(tensor([[3, 4]]), tensor([[0, 0], [3, 4 + 1e-9]]))
    assert away[0].tolist() == pytest.approx([5, 1e-9])


def test_the_baseline():
    """Catches: the most frequent class of the test images in the place of the training images', a mean over clients
    for one over images."""
    clients = []
    for train, test in (([0, 1, 1, 2], [0, 0, 0, 1, 2, 1]), ([2, 2, 0], [2, 1])):
        images = [common.Images(torch.zeros(len(y), 3, 1, 1).byte(), torch.tensor(y)) for y in (train, test)]
        net = common.Net(torch.nn.Flatten(), torch.nn.Linear(3, 3), 3, 3)
        clients.append(common.Client(len(clients), *images, net=net))
    args = SimpleNamespace(eval_every=1, rounds=1, workers=1)
    assert common.evaluate_personal(clients, torch.zeros(3, 3), 1, args)["most_frequent"] == 100 * (2 + 1) / 8


FEDERATIONS = [(5, 6, 4), (1, 5, 3), (8, 2, 2), (3, 1, 3), (20, 10, 8)]  # K clients, C classes, D features


def uploads_of(K, C, D):
    """Uploads (K, C, D), counts (K, C), each class's owners. Nobody has class C // 2. What stands in the row of a
    class that a client lacks must not matter."""
    rng = np.random.default_rng(K)
    counts = rng.integers(1, 40, size=(K, C)) * (rng.random((K, C)) < 0.6) * (np.arange(C) != C // 2)
    uploads = rng.normal(size=(K, C, D))
    uploads[counts == 0] = 1e6
    return uploads, counts, [[i for i in range(K) if counts[i, c]] for c in range(C)]


@pytest.mark.parametrize("K, C, D", FEDERATIONS)
def test_means_over_clients(K, C, D):
    """Catches: counts left out or those of another class, lacking clients counted, a class of nobody moved or
    forgotten."""
    uploads, counts, owners = uploads_of(K, C, D)
    rng = np.random.default_rng(K + 70)
    old, had, seen = rng.normal(size=(C, D)), rng.random(C) < 0.5, counts.sum(0) > 0
    weighted, plain, filled = np.zeros((3, C, D))
    for c in range(C):
        if owners[c]:
            weighted[c] = weighted_mean(uploads[owners[c], c], counts[owners[c], c])
            plain[c] = mean([uploads[i, c] for i in owners[c]])
        # who lacks the class counts with its previous anchor, if there is one
        filled[c] = mean([uploads[i, c] if i in owners[c] else old[c] for i in range(K) if i in owners[c] or had[c]])

    sent = tensor(uploads), torch.tensor(counts)
    for result, want in ((fedproto.weighted_mean(*sent), weighted),                                # FedTGP Eq. 3
                         (fedproto.weighted_mean(*sent, "uniform"), plain),
                         (fedsa.weighted_mean(*sent), weighted)):                                  # FedSA Eq. 3
        agree(result[0], want)
        assert result[1].tolist() == seen.tolist()
    for alpha in (0.9999, 0.5, 0.0, 1.0):                                                          # FedSA Eq. 10
        want = [alpha * a + (1 - alpha) * m if s else a for a, m, s in zip(old, weighted, seen)]
        agree(fedsa.ema(tensor(old), tensor(weighted), torch.tensor(seen), alpha), want)
    for rule, want in (("weighted", weighted), ("uniform", filled)):                                # FedFM Eq. 9, VII-D
        anchors, known = fedfm.new_anchors(*sent, tensor(old), torch.tensor(had), SimpleNamespace(aggregate=rule))
        agree(anchors, [want[c] if owners[c] else old[c] for c in range(C)])
        assert known.tolist() == (had | seen).tolist()


@pytest.mark.parametrize("K, C, D", FEDERATIONS)
@pytest.mark.parametrize("tau", [0.5, 100.0])
def test_margins(K, C, D, tau):
    """Catches: a distance within a class, an absent class with a margin."""
    uploads, counts, owners = uploads_of(K, C, D)
    centres = [mean([uploads[i, c] for i in owners[c]]) for c in range(C) if owners[c]]
    pairwise = nearest = 0.0
    if len(centres) > 1:
        pairwise = max(euclidean(a, b) for a, b in itertools.combinations(centres, 2))
        nearest = max(nearest_margins(centres))
    rules = dict(pairwise=min(pairwise, tau), nearest=min(nearest, tau), fixed=tau, none=0.0)      # FedTGP Eq. 9
    for rule, want in rules.items():
        agree(fedtgp.adaptive_margin(tensor(uploads), torch.tensor(counts > 0), rule, tau), want)

    for rows, count in zip(uploads, counts):                                                       # FedSA Eq. 6
        points = rows[count > 0]
        agree(fedsa.average_margin(tensor(points)), average_margin(points))
        want = mean(nearest_margins(points)) if len(points) > 1 else 0.0
        agree(fedsa.average_margin(tensor(points), "nearest"), want)


# --- FINCH ----------------------------------------------------------------------------------------

def in_order(*columns):
    """Parallel columns as sorted rows: clusters may come in any order."""
    rows = [np.concatenate([np.ravel(value) for value in row]).tolist() for row in zip(*columns, strict=True)]
    return tensor(sorted(rows))


@pytest.mark.parametrize("n", [1, 2, 3, 6, 30])
@pytest.mark.parametrize("seed, D", [(0, 2), (2, 16)])
def test_finch(seed, D, n):
    """Catches: links followed one way only, unweighted centres, weights not summed, a pass too many or too few
    (FedPLCC Eqs. 9, 10)."""
    rng = np.random.default_rng(1000 * seed + n)
    drawn = rng.normal(size=(n, D))
    as_after_relu = np.maximum(drawn, 0) + rng.random((n, D)) * 0.1
    for x in (drawn, as_after_relu):
        if n > 1:
            label = fedplcc.first_neighbour_clusters(tensor(x)).tolist()
            clusters = [[i for i in range(n) if label[i] == m] for m in range(max(label) + 1)]
            assert sorted(clusters) == sorted(groups_of(x))
        for w in (np.ones(n), rng.integers(1, 50, size=n)):
            for level in ("last", "first"):
                agree(in_order(*fedplcc.finch(tensor(x), tensor(w), level)), in_order(*finch(x, w, level)))


def test_finch_by_hand():
    """Catches: FINCH that differs from a case worked by hand. Directions of 0, 1, 20, 22, 90, 93 degrees: each has the
    other of its pair as neighbour. The centres of the first two pairs have each other as neighbours, the third's is
    the second: the next pass merges all."""
    degrees, w = tensor([0, 1, 20, 22, 90, 93]), tensor([1, 1, 3, 1, 1, 1])
    x = torch.stack([degrees.deg2rad().cos(), degrees.deg2rad().sin()], 1)
    assert fedplcc.first_neighbour_clusters(x).tolist() == [0, 0, 1, 1, 2, 2]
    for level in ("last", "first"):
        centres, sizes = fedplcc.finch(x, w, level)
        assert sizes.tolist() == [2, 4, 2]
        assert torch.allclose(centres[1], (3 * x[2] + x[3]) / 4)

    # if the first pass already merges all, that is the result, with the centre of all
    centres, sizes = fedplcc.finch(x[:3], w[:3])
    assert sizes.tolist() == [5] and torch.allclose(centres[0], (x[0] + x[1] + 3 * x[2]) / 5)
    assert [len(fedplcc.finch(x[:n], w[:n])[0]) for n in (1, 2, 3, 4)] == [1, 1, 1, 2]

    both_sides = torch.cat([x, -7 * x])
    for level, clusters in (("first", 6), ("last", 2)):
        assert len(fedplcc.finch(both_sides, torch.cat([w, w]), level)[0]) == clusters
    for ties in (x * 0, x[[0] * 6]):  # whatever the clusters are, they add up
        centres, sizes = fedplcc.finch(ties, w)
        assert torch.allclose(sizes @ centres, w @ ties)


@pytest.mark.parametrize("K, C", [(1, 3), (2, 1), (3, 4), (8, 5)])
@pytest.mark.parametrize("level", ["last", "first"])
def test_fedplcc_global_prototypes(K, C, level):
    """Catches: classes clustered together, weights that sum to 1 over all classes, sizes left out (FedPLCC Eqs. 10,
    11)."""
    rng = np.random.default_rng(K)
    n = 9 * K
    x, y, w = rng.normal(size=(n, 3)), rng.integers(C, size=n), rng.integers(1, 20, size=n)
    columns = torch.tensor(x).float().chunk(K), torch.tensor(y).chunk(K), torch.tensor(w).float().chunk(K)
    sent = [fedplcc.Clusters(*rows) for rows in zip(*columns)]
    for uniform in (False, True):
        want = []
        for c in set(y.tolist()):
            for centre, size in zip(*finch(x[y == c], w[y == c], level)):
                want.append((centre, c, 1.0 if uniform else size / w[y == c].sum()))
        args = SimpleNamespace(finch_level=level, uniform_weights=uniform)
        got = fedplcc.global_prototypes(sent, args)
        agree(in_order(*got), in_order(*zip(*want)), 1e-5, 1e-6)  # float32


def test_nearly_equal_features_are_told_apart():
    """Catches: cosines in float32. Those of features that differ by a ten-thousandth all round to 1, and all would
    merge."""
    x = (1 + 1e-4 * torch.randn(30, 8, generator=torch.Generator().manual_seed(0))).float()
    sizes = torch.ones(30)
    got = fedplcc.cluster_by_class(x, torch.zeros(30).long(), sizes, "first")
    assert sorted(got.sizes.tolist()) == sorted(len(g) for g in groups_of(x.double().numpy()))


# --- averaged models, and training: steps along numerical derivatives -----------------------------

def weights_of(module):
    return [np.array(p.tolist(), float) for p in module.parameters()]


@pytest.mark.parametrize("K", [1, 2, 7])
def test_averages_of_models(K):
    """Catches: equal weights in FedFM Eq. 11, Σ p_k w_k with p_k = N_k / N, BatchNorm's statistics left out; another
    factor of FedProx's term."""
    nets = [torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).double() for _ in range(K)]
    n = [5 * k + 1 for k in range(K)]
    for k, net in enumerate(nets):
        for _ in range(K - k):  # BatchNorm's counters and statistics differ
            net(torch.randn(6, 3, dtype=torch.float64))
    for name, value in common.average([net.state_dict() for net in nets], n).items():
        states = [net.state_dict()[name].numpy() for net in nets]
        agree(value, sum(m * s for m, s in zip(n, states)) / sum(n))
    gap = sum(((a - b) ** 2).sum() for a, b in zip(weights_of(nets[0]), weights_of(nets[-1])))
    agree(fedfm.proximal(nets[0], list(nets[-1].parameters())), gap / 2)


def slopes_of(loss, weights):
    """Central differences of loss(weights) in every weight."""
    slopes = [np.zeros_like(w) for w in weights]
    for w, slope in zip(weights, slopes):
        for i in np.ndindex(w.shape):
            value = w[i]
            w[i] = value + 1e-5
            above = loss(weights)
            w[i] = value - 1e-5
            below = loss(weights)
            w[i] = value
            slope[i] = (above - below) / 2e-5
    return slopes


def sgd(loss, weights, steps, lr, momentum, decay):
    """Steps of SGD on loss(weights) -> the weights, the losses before each step."""
    weights = [w.copy() for w in weights]
    losses, speed = [], [0.0] * len(weights)
    for _ in range(steps):
        losses.append(loss(weights))
        slopes = slopes_of(loss, weights)
        speed = [momentum * v + s + decay * w for v, s, w in zip(speed, slopes, weights)]
        weights = [w - lr * v for w, v in zip(weights, speed)]
    return weights, losses


def mlp(weights):
    """F of FedTGP, Θ of FedLSA: the vectors weights[0] through Linear, ReLU, Linear."""
    vectors, w1, b1, w2, b2 = weights
    return [linear(w2, b2, [max(v, 0.0) for v in linear(w1, b1, row)]) for row in vectors]


@pytest.mark.parametrize("K, C", [(3, 4), (1, 2), (2, 1)])
def test_fedtgp_server(K, C):
    """Catches: zeros of absent classes trained on, momentum or weight decay of the clients, a gradient that does not
    reach F or the vectors. Two epochs of one batch (FedTGP Eqs. 5, 10)."""
    rng = np.random.default_rng(K)
    torch.manual_seed(K)
    server = fedtgp.GlobalPrototypes(C, 3).double()
    assert len(weights_of(fedtgp.GlobalPrototypes(C, 3, no_mlp=True))) == 1
    uploads, owned = rng.normal(size=(K, C, 3)), rng.random((K, C)) < 0.7
    owned[0, 0] = True

    def loss(weights):
        return margin_term(uploads[owned], np.nonzero(owned)[1], mlp(weights), 0.8)
    want, want_losses = sgd(loss, weights_of(server), 2, 0.1, momentum=0.0, decay=0.0)
    args = SimpleNamespace(seed=0, server_epochs=2, batch_size=K * C, lr=0.1, momentum=0.9, weight_decay=0.01)
    got, losses = fedtgp.server_update(server, tensor(uploads), torch.tensor(owned), tensor(0.8), 1, args)
    agree(got, mlp(want), 1e-6, 1e-8)
    agree(losses, want_losses[-1:], 1e-6, 1e-8)


def test_fedtgp_server_draws_its_batches_anew():
    """Catches: the uploads in the same order in each round; not every batch's loss of the last epoch."""
    uploads, owned = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(0)).double(), torch.ones(3, 4) > 0

    def trained(t, lr, seed=0):
        torch.manual_seed(7)
        args = SimpleNamespace(seed=seed, server_epochs=1, batch_size=4, lr=lr)
        server = fedtgp.GlobalPrototypes(4, 3).double()
        return fedtgp.server_update(server, uploads, owned, tensor(0.8), t, args)
    one, again, later, other = trained(1, 0.1)[0], trained(1, 0.1)[0], trained(2, 0.1)[0], trained(1, 0.1, seed=1)[0]
    assert one.equal(again) and abs(one - later).max() > 1e-6 and abs(one - other).max() > 1e-6
    prototypes, losses = trained(1, 1e-30)
    assert len(losses) == 3
    agree(losses.mean(), margin_term(uploads.flatten(0, 1).numpy(), [0, 1, 2, 3] * 3, prototypes.numpy(), 0.8))


@pytest.mark.parametrize("C", [1, 2, 4])
def test_fedlsa_server(C):
    """Catches: anchors that are not normalised, a term left out, another optimizer, a classifier that is trained as
    well. Three steps (FedLSA Eqs. 3-5, A = nor(Θ(R)))."""
    torch.manual_seed(C)
    server, classifier = fedlsa.AnchorNet(C, 3, 4), torch.nn.Linear(4, C).double()
    server, frozen = server.double(), weights_of(classifier)

    def anchors(weights):
        return [unit(row) for row in mlp(weights)]

    def loss(weights):
        return calibration(anchors(weights), *frozen) + 0.4 * separation(anchors(weights), 0.2)
    want, losses = sgd(loss, weights_of(server), 3, 0.1, momentum=0.9, decay=0.01)
    args = SimpleNamespace(server_steps=3, alpha=0.4, tau=0.2, lr=0.1, momentum=0.9, weight_decay=0.01)
    got, value = fedlsa.server_update(server, classifier, args)
    agree(got, anchors(want), 1e-6, 1e-8)
    agree(value, losses[-1], 1e-6, 1e-8)
    for before, after in zip(frozen, weights_of(classifier)):
        assert (before == after).all()


def test_fedsa_anchors():
    """Catches: A uniform and not normal, a layer left out, in Ā = A W + b and in the two layers with BatchNorm and
    ReLU."""
    anchors = {}
    for projection in ("none", "linear", "mlp"):
        with common.seeded(0, "anchors"):
            anchors[projection] = fedsa.make_anchors(400, 3, projection).double().numpy()
    A = anchors["none"]
    assert abs(A.mean()) < 0.1 and abs(A.var() - 1) < 0.1
    assert abs((A ** 4).mean() - 3) < 0.7  # of a uniform distribution: 1.8

    with_one = np.hstack([A, np.ones((400, 1))])
    residuals = np.linalg.lstsq(with_one, anchors["linear"], rcond=None)[1]
    assert (residuals < 1e-9).all() and abs(anchors["linear"] - A).max() > 0.1
    assert anchors["mlp"].min() == 0
    assert abs((anchors["mlp"] ** 2).mean(0) - 0.5).max() < 0.2  # half of a N(0, 1)


KINDS, SHARES = [0, 1, 1], [1.0, 0.7, 0.3]  # FedPLCC: the classes of three prototypes, their weights
EXISTS, TWO_EXIST = [True] * 3, [True, True, False]


def beside_cross_entropy(script, z, y, p, weights, start, margin):
    """A client's further terms, with the factors of `args` below. z features; weights and, at the start, `start` of
    its model (extractor's weight and bias, classifier's)."""
    if script == "fedproto":                                                                       # FedTGP Eq. 4
        return 0.7 * distance_term(z, y, p, TWO_EXIST, mse)
    if script == "fedtgp":                                                                         # FedTGP Eq. 11
        return 0.7 * distance_term(z, y, p, EXISTS, mse)
    if script == "fedsa":                                                                          # FedSA Eq. 9
        return (0.3 * distance_term(z, y, p, EXISTS, mse) + 0.2 * margin_term(z, y, p, margin)
                + 0.6 * calibration(p, *weights[2:]))
    if script == "fedlsa":                                                                         # FedLSA Eq. 10
        return 0.7 * compactness(z, y, p, 0.4)
    if script == "fedplcc":                                                                        # FedPLCC Eq. 4
        s = similarities(z, p, 0.6)
        return 0.4 * contrast(s, y, KINDS, SHARES, 0.4) + 0.9 * attraction(s, y, KINDS, SHARES, 0.5)
    moved = sum(((a - b) ** 2).sum() for a, b in zip(weights, start))
    return 0.7 * guiding(z, y, p, TWO_EXIST, 0.3) + 0.8 * moved / 2                                # FedFM Eqs. 2, 10


def test_a_loss_follows_its_flag():
    """Catches: --compactness, --match and --distance that never reach the loss. The terms alone are tested above."""
    torch.manual_seed(2)
    extractor = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    net = common.Net(extractor, torch.nn.Linear(3, 3), 3, 3)
    x, y, anchors = torch.randint(256, (8, 1, 2, 2)).byte(), torch.arange(8) % 3, torch.rand(3, 3)
    known = torch.ones(3, dtype=torch.bool)
    z = net.features(x)
    entropy = torch.nn.functional.cross_entropy(net.classifier(z), y)

    args = SimpleNamespace(lam=0.7, tau=0.4, alpha=0.6, compactness="l2", match="l2", temperature=0.3)
    agree(fedlsa.local_loss(net, x, y, anchors, args),
          (entropy + 0.7 * fedlsa.compactness(z, y, anchors, 0.4, "l2")).item(), 1e-5)
    agree(fedfm.local_loss(net, x, y, anchors, known, args),
          (entropy + 0.7 * fedfm.squared_distance(z, y, anchors, known)).item(), 1e-5)
    p, labels = anchors.double().numpy(), y.tolist()
    for distance, phi in (("euclidean", euclidean), ("mse", mse)):
        args = SimpleNamespace(lam=0.7, distance=distance, lam_r=0.7, lam_mcl=0.0, lam_cc=0.0)
        want = entropy.item() + 0.7 * distance_term(z.detach().double().numpy(), labels, p, EXISTS, phi)
        agree(fedproto.local_loss(net, x, y, anchors, known, args), want, 1e-5)
        agree(fedtgp.local_loss(net, x, y, anchors, args), want, 1e-5)
        agree(fedsa.local_loss(net, x, y, anchors, 0.0, args), want, 1e-5)


def test_minibatches_follow_the_rule():
    """Catches: a round's batches that ignore --batches."""
    client = common.Client(0, common.Images(torch.zeros(25, 3, 2, 2).byte(), torch.arange(25)), net=None)
    args = SimpleNamespace(seed=0, local_epochs=1, batch_size=10, batches="full")
    assert [len(y) for _, y in common.minibatches(client, 1, args)] == [10, 10]


@pytest.mark.parametrize("script", ["fedproto", "fedtgp", "fedsa", "fedlsa", "fedplcc", "fedfm"])
def test_clients(script):
    """Catches: a term of a client's loss left out, doubled or with another's factor, a term that does not reach the
    weights, a step left out, FedSA's margin after training. A whole training: two epochs of one batch with momentum
    and weight decay."""
    torch.manual_seed(1)
    extractor = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    net = common.Net(extractor, torch.nn.Linear(3, 3), 3, 3)
    x, y = torch.randint(256, (8, 1, 2, 2)).byte(), [0, 1, 2, 0, 1, 2, 0, 1]
    p, start = (0.2 * torch.rand(3, 3)).double().numpy(), weights_of(net)
    pixels = x.flatten(1).double().numpy() / 127.5 - 1  # common.Net brings uint8 to [-1, 1]

    def features(weights):
        return np.array([linear(weights[0], weights[1], row) for row in pixels])

    means = [mean([z for z, c in zip(features(start), y) if c == k]) for k in range(3)]
    margin = average_margin(means)
    assert margin > average_margin(p) + 0.1

    def loss(weights):
        z = features(weights)
        entropy = mean([cross_entropy(linear(*weights[2:], v), c) for v, c in zip(z, y)])
        return entropy + beside_cross_entropy(script, z, y, p, weights, start, margin)
    want, losses = sgd(loss, start, 2, 0.1, momentum=0.9, decay=0.01)

    args = SimpleNamespace(seed=0, local_epochs=2, batch_size=8, batches="all", lr=0.1, momentum=0.9,
                           weight_decay=0.01, lam=0.7, distance="mse", lam_r=0.3, lam_mcl=0.2, lam_cc=0.6,
                           margin_rule="average", tau=0.4, compactness="vmf", alpha=0.6, lam_contra=0.4, lam_corr=0.9,
                           phi=0.5, match="cg", temperature=0.3, prox=0.8, augment=False, uploads="after",
                           finch_level="last", local_prototypes="mean")
    client, given = common.Client(0, common.Images(x, torch.tensor(y)), net=net), tensor(p).float()
    if script in ("fedtgp", "fedsa", "fedlsa"):
        upload = globals()[script].client_update(client, given, 1, args)
    elif script == "fedplcc":
        prototypes = fedplcc.Prototypes(given, torch.tensor(KINDS), torch.tensor(SHARES))
        upload = fedplcc.client_update(client, prototypes, 1, args)
    else:
        upload = globals()[script].client_update(client, given, torch.tensor(TWO_EXIST), 1, args)
    agree(upload.loss, mean(losses), 1e-5)  # float32
    for got, weights in zip(net.parameters(), want, strict=True):
        agree(got, weights, 1e-4, 1e-5)
