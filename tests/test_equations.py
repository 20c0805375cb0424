"""The equations of the six papers a second time: slow loops over numbers, written from the papers and not from the
scripts. The scripts' functions must give the same on random inputs and in corners: one class, one client, one image,
nothing uploaded, equal vectors, zeros.

Names say which function is tested: `pytest tests/test_equations.py -k "fedsa and eq10"`. Where a function calls others
that have tests of their own, its test replaces them. So a wrong function fails its own tests only.

Shapes: z (B, D) features, y (B,) their classes, p (C, D) prototypes or anchors, known (C,) which of them exist."""

import copy
import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common, fedfm, fedlsa, fedplcc, fedproto, fedsa, fedtgp
from reference import (average_margin, cosine, cross_entropy, dot, euclidean, finch, groups_of, linear, mean, merged,
                       mse, sgd_step, squares, unit, weighted_mean)


def tensor(x):
    return torch.tensor(np.asarray(x, float), dtype=torch.float64)


def agree(got, want, rtol=1e-9, atol=1e-11):
    got, want = got.detach().numpy(), np.asarray(want)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol, atol)


def tiny_net(C=3):
    """D = 3 features of 2x2 pixels, which Net brings from [0, 255] to [-1, 1]."""
    torch.manual_seed(1)
    extractor = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    return common.Net(extractor, torch.nn.Linear(3, C), 3, C)


def tiny_images(y):
    x = torch.randint(256, (len(y), 1, 2, 2), generator=torch.Generator().manual_seed(2))
    return common.Images(x.byte(), torch.tensor(y))


# --- losses of features: reference(z, y, p, known) --------------------------------------------------

def distance_loss(z, y, p, known, phi):
    """FedTGP Eqs. 4 and 11, FedSA Eq. 5."""
    return mean([phi(v, p[c]) for v, c in zip(z, y) if known[c]])


def margin_loss(z, y, p, margin):
    """FedTGP Eq. 10 (Eq. 6 where the margin is 0), FedSA Eq. 7."""
    losses = []
    for v, c in zip(z, y):
        logits = [-euclidean(v, q) for q in p]
        logits[c] -= margin
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
            s = [math.exp(cosine(a[n], v) / temperature) for n in range(len(a)) if known[n]]
            losses.append(-math.log(math.exp(cosine(a[c], v) / temperature) / sum(s)))
    return mean(losses)


def squared_between_directions(v, a):
    return squares(unit(v), unit(a))


LOSSES = {  # name: the script's function, the reference
    "fedproto_eq4_prototype_distance": (
        lambda z, y, p, known: fedproto.prototype_distance(z, y, p, known, "euclidean"),
        lambda z, y, p, known: distance_loss(z, y, p, known, euclidean)),
    "fedproto_eq4_prototype_distance_mse": (
        lambda z, y, p, known: fedproto.prototype_distance(z, y, p, known, "mse"),
        lambda z, y, p, known: distance_loss(z, y, p, known, mse)),
    "fedtgp_eq11_prototype_distance": (
        lambda z, y, p, known: fedtgp.prototype_distance(z, y, p, "euclidean"),
        lambda z, y, p, known: distance_loss(z, y, p, known | True, euclidean)),
    "fedtgp_eq11_prototype_distance_mse": (
        lambda z, y, p, known: fedtgp.prototype_distance(z, y, p, "mse"),
        lambda z, y, p, known: distance_loss(z, y, p, known | True, mse)),
    "fedtgp_eq6_without_margin": (
        lambda z, y, p, known: fedtgp.margin_contrastive(z, y, p, 0.0),
        lambda z, y, p, known: margin_loss(z, y, p, 0.0)),
    "fedtgp_eq10_margin_contrastive": (
        lambda z, y, p, known: fedtgp.margin_contrastive(z, y, p, tensor(1.7)),
        lambda z, y, p, known: margin_loss(z, y, p, 1.7)),
    "fedsa_eq5_regularization": (
        lambda z, y, p, known: fedsa.regularization(z, y, p, "euclidean"),
        lambda z, y, p, known: distance_loss(z, y, p, known | True, euclidean)),
    "fedsa_eq5_regularization_mse": (
        lambda z, y, p, known: fedsa.regularization(z, y, p, "mse"),
        lambda z, y, p, known: distance_loss(z, y, p, known | True, mse)),
    "fedsa_eq7_margin_contrastive": (
        lambda z, y, p, known: fedsa.margin_contrastive(z, y, p, tensor(2.3)),
        lambda z, y, p, known: margin_loss(z, y, p, 2.3)),
    "fedlsa_eq8_compactness": (
        lambda z, y, p, known: fedlsa.compactness(z, y, p, 0.2),
        lambda z, y, p, known: compactness(z, y, p, 0.2)),
    "fedlsa_l2_distance": (
        lambda z, y, p, known: fedlsa.l2_distance(z, y, p),
        lambda z, y, p, known: distance_loss(z, y, p, known | True, euclidean)),
    "fedfm_contrastive_guiding": (
        lambda z, y, p, known: fedfm.contrastive_guiding(z, y, fedfm.Anchors(p, known), 0.1),
        lambda z, y, p, known: guiding(z, y, p, known, 0.1)),
    "fedfm_eq3_squared_distance": (
        lambda z, y, p, known: fedfm.squared_distance(z, y, fedfm.Anchors(p, known)),
        lambda z, y, p, known: distance_loss(z, y, p, known, squared_between_directions)),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


@pytest.mark.parametrize("B, C, D", [(7, 4, 5), (1, 4, 3), (6, 1, 3), (5, 3, 1), (20, 9, 9)])
@every_loss
def test_loss(name, B, C, D):
    """Catches: another formula, a sum for a mean, a margin on other classes, an absent class, a cut-off gradient."""
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
def test_loss_of_equal_and_zero_vectors(name):
    """Catches: nan in a gradient. A distance of 0 and the direction of 0 (a ReLU gives such features) have none."""
    ours, reference = LOSSES[name]
    rng = np.random.default_rng(7)
    y, z, p = np.arange(6) % 3, rng.normal(size=(6, 4)), rng.normal(size=(3, 4))
    all_equal, one_zero = p[[0, 0, 0]], p * [[1], [0], [1]]
    cases = [(z, all_equal), (p[y], p), (all_equal[y], all_equal), (z * 0, p), (z, one_zero), (z * 0, p * 0)]
    for z, p in cases:
        features = tensor(z).requires_grad_()
        loss = ours(features, torch.tensor(y), tensor(p), torch.ones(3, dtype=torch.bool))
        loss.backward()
        agree(loss, reference(z, y, p, np.ones(3, bool)))
        assert features.grad.isfinite().all()


# --- losses of anchors ------------------------------------------------------------------------------

def calibration(vectors, weight, bias):
    """FedLSA Eq. 3, FedSA Eq. 8: classify the c-th vector as c."""
    return mean([cross_entropy(linear(weight, bias, a), c) for c, a in enumerate(vectors)])


def separation(a, tau):
    """FedLSA Eq. 4, with τ inside the exponential."""
    terms = []
    for i, u in enumerate(a):
        others = [math.exp(dot(u, a[j]) / tau) for j in range(len(a)) if j != i]
        terms.append(math.log(mean(others)) if others else 0.0)
    return mean(terms)


def anchors_of(C, D):
    """Random ones, equal ones, zeros."""
    a = np.random.default_rng(C).normal(size=(C, D))
    return [a, a[[0] * C], a * 0]


several_sizes = pytest.mark.parametrize("C, D", [(4, 5), (1, 3), (10, 2), (2, 1)])


@several_sizes
def test_fedsa_eq8_classifier_calibration(C, D):
    """Catches: a sum for a mean, the classifier's bias left out."""
    classifier = torch.nn.Linear(D, C).double()
    for a in anchors_of(C, D):
        want = calibration(a, classifier.weight.tolist(), classifier.bias.tolist())
        agree(fedsa.classifier_calibration(classifier, tensor(a)), want)


@several_sizes
def test_fedlsa_eq3_anchor_classification(C, D):
    """Catches: a sum for a mean, the classifier's bias left out."""
    rng = np.random.default_rng(C + D)
    weight, bias = rng.normal(size=(C, D)), rng.normal(size=C)
    for a in anchors_of(C, D):
        agree(fedlsa.anchor_classification(tensor(a), tensor(weight), tensor(bias)), calibration(a, weight, bias))


@several_sizes
def test_fedlsa_eq4_anchor_separation(C, D):
    """Catches: the sum over j with i in it, a mean over C, τ outside the exponential, inf where τ is tiny."""
    for a in anchors_of(C, D):
        for tau in (0.1, 1.0):
            agree(fedlsa.anchor_separation(tensor(a), tau), separation(a, tau))
    equal = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert fedlsa.anchor_separation(equal, 0.001).item() == pytest.approx(1000)  # exp(1000) is inf


# --- FedPLCC's losses over G prototypes, several of a class -----------------------------------------

several_prototypes = pytest.mark.parametrize("B, C, G", [(7, 5, 9), (1, 3, 1), (4, 4, 30), (2, 1, 100)])


def similarities_of(B, C, G):
    """s (B, G) in (0, 1], the classes y (B,) and labels (G,), weights (G,). Class C has no prototype."""
    rng = np.random.default_rng(G)
    s, weights = rng.uniform(0.01, 1, size=(B, G)), rng.uniform(0.1, 1, size=G)
    return s, rng.integers(C + 1, size=B), rng.integers(C, size=G), weights


def check_per_sample(function, s, y, labels, weights, setting, want):
    """function's losses of the samples whose class has a prototype, and finite gradients for all."""
    similarity, own = tensor(s).requires_grad_(), torch.tensor(labels == y[:, None])
    has_prototype = own.any(1)
    losses = function(similarity, own, tensor(weights), setting)
    agree(losses[has_prototype], [value for value, counts in zip(want, has_prototype) if counts])
    (losses * has_prototype).sum().backward()
    assert similarity.grad.isfinite().all()


@pytest.mark.parametrize("alpha", [0.25, 0.5, 1.0])
def test_fedplcc_eq7_similarity(alpha):
    """Catches: a cosine multiplied by α, vectors of another length, an infinite slope at a cosine of 0."""
    rng = np.random.default_rng(0)
    z, vectors = rng.normal(size=(5, 4)), rng.normal(size=(9, 4))  # some cosines are below 0
    z[0] = 0
    want = [[max(cosine(v, u), 1e-6) ** alpha for u in vectors] for v in z]
    features = tensor(z).requires_grad_()
    s = fedplcc.similarity(features, tensor(vectors), alpha)
    agree(s, want)
    s.sum().backward()
    assert features.grad.isfinite().all() and features.grad[1:].any(1).all()


@several_prototypes
@pytest.mark.parametrize("tau", [0.07, 1.0])
def test_fedplcc_eq6_contrast(B, C, G, tau):
    """Catches: weights left out of one of the sums, other classes' prototypes in the upper one."""
    s, y, labels, weights = similarities_of(B, C, G)
    losses = []
    for row, c in zip(s, y):
        terms = [math.exp(v / tau) * w for v, w in zip(row, weights)]
        own = sum(term for term, label in zip(terms, labels) if label == c)
        losses.append(-math.log(own / sum(terms)) if own else None)
    check_per_sample(fedplcc.contrast, s, y, labels, weights, tau, losses)


@several_prototypes
@pytest.mark.parametrize("phi", [0.5, 1.0, 0.07])
def test_fedplcc_eq8_attraction(B, C, G, phi):
    """Catches: one prototype too many or too few, the least similar ones, no weights, another class's prototypes."""
    s, y, labels, weights = similarities_of(B, C, G)
    losses = []
    for row, c in zip(s, y):
        own = sorted([v * w for v, w, label in zip(row, weights, labels) if label == c], reverse=True)
        kept = math.ceil(Fraction(str(phi)) * len(own))
        losses.append(-sum(own[:kept]))
    check_per_sample(fedplcc.attraction, s, y, labels, weights, phi, losses)


@pytest.mark.parametrize("percent", [15, 30, 50, 60, 100])
def test_fedplcc_eq8_ceil_of_share(percent):
    """Catches: ⌈0.3 · 50⌉ = 16, as floats have it."""
    n = torch.arange(1, 101)
    want = [math.ceil(Fraction(percent, 100) * int(value)) for value in n]
    assert fedplcc.ceil_of_share(percent / 100, n).tolist() == want


# --- the clients' losses: sums of the terms above, which are replaced ---------------------------------

@pytest.fixture
def term(monkeypatch):
    """term(module, name, value): replace a term by a number -> the list of arguments that it is called with."""
    def replace(module, name, value):
        calls = []

        def stand_in(*arguments):
            calls.append(arguments)
            return torch.as_tensor(value)
        monkeypatch.setattr(module, name, stand_in)
        return calls
    return replace


def check_call(calls, *want):
    """There was one call, with these arguments. Features must carry their gradient."""
    assert len(calls) == 1
    for got, value in zip(calls[0], want, strict=True):
        if isinstance(value, torch.Tensor):
            assert torch.equal(got, value) and got.requires_grad == value.requires_grad
        else:
            assert got == value


def batch():
    """A model, images and labels of a batch; its features and cross-entropy."""
    net = tiny_net()
    x, y = tiny_images([0, 1, 2, 0, 1, 2, 0, 1])
    z = net.features(x)
    entropy = mean([cross_entropy(logits, c) for logits, c in zip(net.classifier(z).tolist(), y.tolist())])
    return net, x, y, z, entropy


def test_fedproto_eq4_local_loss(term):
    """Catches: λ ignored or on the wrong term, a term of other features or prototypes, --distance ignored."""
    net, x, y, z, entropy = batch()
    p, known = torch.rand(3, 3), torch.tensor([True, False, True])
    calls = term(fedproto, "prototype_distance", 2.0)
    loss = fedproto.local_loss(net, x, y, p, known, SimpleNamespace(lam=0.7, distance="mse"))
    agree(loss, entropy + 0.7 * 2, 1e-5)
    check_call(calls, z, y, p, known, "mse")


def test_fedtgp_eq11_local_loss(term):
    """Catches: λ ignored or on the wrong term, a term of other features or prototypes, --distance ignored."""
    net, x, y, z, entropy = batch()
    p = torch.rand(3, 3)
    calls = term(fedtgp, "prototype_distance", 2.0)
    loss = fedtgp.local_loss(net, x, y, p, SimpleNamespace(lam=0.7, distance="mse"))
    agree(loss, entropy + 0.7 * 2, 1e-5)
    check_call(calls, z, y, p, "mse")


def test_fedsa_eq9_local_loss(term):
    """Catches: a term left out or with another's factor, a term of other features or anchors, --distance ignored."""
    net, x, y, z, entropy = batch()
    anchors, margin = torch.rand(3, 3), torch.tensor(1.5)
    l_r = term(fedsa, "regularization", 2.0)
    l_mcl = term(fedsa, "margin_contrastive", 3.0)
    l_cc = term(fedsa, "classifier_calibration", 5.0)
    args = SimpleNamespace(lam_r=0.3, lam_mcl=0.2, lam_cc=0.6, distance="mse", model="cnn4")
    agree(fedsa.local_loss(net, x, y, anchors, margin, args), entropy + 0.3 * 2 + 0.2 * 3 + 0.6 * 5, 1e-5)
    check_call(l_r, z, y, anchors, "mse")
    check_call(l_mcl, z, y, anchors, margin)
    check_call(l_cc, net.classifier, anchors)


@pytest.mark.parametrize("kind, value", [("vmf", 2.0), ("l2", 3.0)])
def test_fedlsa_eq10_local_loss(kind, value, term):
    """Catches: λ ignored, --compactness ignored, a term of other features or anchors, a term with λ = 0."""
    net, x, y, z, entropy = batch()
    anchors = torch.rand(3, 3)
    calls = {"vmf": term(fedlsa, "compactness", 2.0), "l2": term(fedlsa, "l2_distance", 3.0)}
    arguments = {"vmf": [z, y, anchors, 0.4], "l2": [z, y, anchors]}
    args = SimpleNamespace(lam=0.7, tau=0.4, compactness=kind)
    agree(fedlsa.local_loss(net, x, y, anchors, args), entropy + 0.7 * value, 1e-5)
    check_call(calls[kind], *arguments[kind])
    args.lam = 0
    agree(fedlsa.local_loss(net, x, y, anchors, args), entropy, 1e-5)


def test_fedplcc_eq4_local_loss(term):
    """Catches: λ1 and λ2 exchanged, samples of a class without a prototype in the means, other prototypes' arguments."""
    net, x, y, z, entropy = batch()
    vectors, labels, weights = torch.rand(4, 3), torch.tensor([0, 1, 1, 0]), torch.rand(4)  # class 2 has none
    own = labels == y[:, None]
    s, first, second = torch.rand(8, 4), torch.rand(8), torch.rand(8)
    similarity = term(fedplcc, "similarity", s)
    l_contra = term(fedplcc, "contrast", first)
    l_corr = term(fedplcc, "attraction", second)
    args = SimpleNamespace(lam_contra=0.4, lam_corr=0.9, alpha=0.6, tau=0.3, phi=0.5)
    loss = fedplcc.local_loss(net, x, y, fedplcc.Prototypes(vectors, labels, weights), args)
    counted = [b for b in range(8) if y[b] != 2]
    agree(loss, entropy + 0.4 * mean(first[counted].tolist()) + 0.9 * mean(second[counted].tolist()), 1e-5)
    check_call(similarity, z, vectors, 0.6)
    check_call(l_contra, s, own, weights, 0.3)
    check_call(l_corr, s, own, weights, 0.5)

    of_class_5 = fedplcc.Prototypes(vectors, labels * 0 + 5, weights)  # no sample of the batch is of it
    none = fedplcc.Prototypes(vectors[:0], labels[:0], weights[:0])
    for prototypes in (of_class_5, none):
        agree(fedplcc.local_loss(net, x, y, prototypes, args), entropy, 1e-5)


def test_fedplcc_eq4_lambda_2():
    """Catches: λ2 that does not follow 10 λ1, or that does so although it is typed."""
    assert fedplcc.lambda_2(SimpleNamespace(lam_contra=20.0, lam_corr=None)) == 200
    assert fedplcc.lambda_2(SimpleNamespace(lam_contra=20.0, lam_corr=0.0)) == 0


@pytest.mark.parametrize("match, value", [("cg", 2.0), ("l2", 3.0)])
def test_fedfm_eq10_local_loss(match, value, term):
    """Catches: λ ignored, --match ignored, a term of other features or anchors, a term in a round without matching."""
    net, x, y, z, entropy = batch()
    anchors = fedfm.Anchors(torch.rand(3, 3), torch.tensor([True, False, True]))
    calls = {"cg": term(fedfm, "contrastive_guiding", 2.0), "l2": term(fedfm, "squared_distance", 3.0)}
    arguments = {"cg": [z, y, anchors, 0.3], "l2": [z, y, anchors]}
    args = SimpleNamespace(lam=0.7, match=match, temperature=0.3)
    agree(fedfm.local_loss(net, x, y, anchors, args), entropy + 0.7 * value, 1e-5)
    check_call(calls[match], *arguments[match])
    agree(fedfm.local_loss(net, x, y, None, args), entropy, 1e-5)


def test_fedfm_prox():
    """Catches: FedProx's term without its half, over some parameters only, or as a mean."""
    net, other = tiny_net(), tiny_net()
    want = 0.0
    for weight in other.parameters():
        change = torch.randn(weight.shape)
        weight.data += change
        want += change.double().square().sum().item() / 2
    assert fedfm.proximal(net, list(other.parameters())).item() == pytest.approx(want, rel=1e-5)


# --- class means, distances, accuracies, averages ---------------------------------------------------

def pixel_net(C):
    """Its one feature is the value of the one pixel."""
    return common.Net(torch.nn.Flatten(), torch.nn.Linear(1, C), 1, C, mean=(0.0,), std=(1 / 255,))


def pixels(values, y):
    return common.Images(torch.tensor(values).byte().view(-1, 1, 1, 1), torch.tensor(y))


def test_eq2_class_means():
    """Catches: a sum for a mean, a class left out, other counts, the model in train mode (FedFM: Eq. 8)."""
    net = pixel_net(5).train()
    means, counts = common.class_means(net, pixels([1, 2, 6, 50], [0, 2, 2, 3]))
    agree(means, [[1.0], [0.0], [4.0], [50.0], [0.0]], 1e-6)
    assert counts.tolist() == [1, 0, 2, 1, 0] and counts.dtype == torch.long
    assert not net.training


def test_nearest_prototype():
    """Catches: the zeros of an unknown class predicted, the farthest prototype."""
    prototypes, known = torch.tensor([[1.0], [0.0], [4.0], [50.0]]), torch.tensor([True, False, True, True])
    z = torch.tensor([[0.0], [2.0], [3.0], [26.0], [28.0]])
    assert common.nearest_prototype(z, prototypes, known).tolist() == [0, 0, 2, 2, 3]
    assert common.nearest_prototype(z, prototypes).tolist() == [1, 0, 2, 2, 3]


def test_distances_far_from_the_origin():
    """Catches: |a|² + |b|² - 2ab, which rounds small distances of long vectors to nothing, in float32 at once."""
    near, far = torch.tensor([[3.0, 4.0]]), torch.rand(40, 64, generator=torch.Generator().manual_seed(0)) + 1000
    assert common.distances(near, torch.zeros(1, 2)).item() == pytest.approx(5)
    assert common.distances(far + 0.01, far).argmin(1).tolist() == list(range(40))
    assert common.distances(far + 0.01, far).diagonal().numpy() == pytest.approx(0.08, rel=0.02)


def test_accuracy_of_personal_models():
    """Catches: a mean over clients, not images; training images tested; other columns; an unknown class predicted."""
    torch.manual_seed(3)
    prototypes, known = torch.tensor([[0.0], [20.0], [40.0]]), torch.tensor([True, False, True])
    clients, right, total = [], [0, 0, 0], 0
    for values, y, train_y, most_frequent in (([1, 22, 31, 45, 3, 9], [0, 2, 0, 1, 2, 1], [0, 1, 1, 2], 1),
                                              ([70, 8], [2, 0], [1, 1, 0], 1)):
        net = pixel_net(3)
        train, test = pixels([5] * len(train_y), train_y), pixels(values, y)
        clients.append(common.Client(len(clients), train, test=test, net=net))
        for value, label in zip(values, y):
            by_classifier = net.classifier(torch.tensor([float(value)])).argmax()
            by_prototype = 0 if value < 20 else 2
            right[0] += int(by_classifier == label)
            right[1] += by_prototype == label
            right[2] += most_frequent == label
            total += 1
    args = SimpleNamespace(eval_every=2, rounds=3, workers=1)
    want = {name: 100 * n / total for name, n in zip(["classifier", "anchor", "most_frequent"], right)}
    assert len(set(right)) == 3
    assert common.evaluate_personal(clients, prototypes, 2, args, known=known, name="anchor") == pytest.approx(want)
    assert common.evaluate_personal(clients, prototypes, 1, args, known=known) == {}


def net_that_answers_1_above_10():
    net = pixel_net(2)
    net.classifier.weight.data, net.classifier.bias.data = torch.tensor([[0.0], [1.0]]), torch.tensor([10.0, 0.0])
    return net


def test_accuracy_of_the_global_model():
    """Catches: a mean over images for one over domains, another domain's images, an evaluation in a round without."""
    net = net_that_answers_1_above_10()
    tests = {"a": pixels([5, 15, 25, 35], [0, 0, 1, 1]), "b": pixels([5, 15], [1, 0])}
    args = SimpleNamespace(eval_every=2, rounds=3)
    assert common.evaluate_global(net.train(), tests, 3, args) == {"test": 37.5, "a": 75, "b": 0}
    assert common.evaluate_global(net, {"a": tests["a"]}, 2, args) == {"test": 75}
    assert common.evaluate_global(net, tests, 1, args) == {}


def test_fedfm_validation():
    """Catches: a mean over images for one over clients, a client without validation images that counts."""
    net, clients = net_that_answers_1_above_10(), []
    for values, y in (([5, 15, 25, 35], [0, 0, 1, 1]), ([5], [1]), ([], [])):
        clients.append(common.Client(len(clients), pixels([1], [0]), val=pixels(values, y), net=net))
    assert fedfm.validate(net, clients) == {"validation": 37.5}
    assert fedfm.validate(net, clients[2:]) == {}


def test_model_size():
    """Catches: BatchNorm's statistics counted as trainable."""
    assert common.model_size(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))) == 16 + 8


@pytest.mark.parametrize("K", [1, 2, 7])
def test_fedfm_eq11_average_of_models(K):
    """Catches: equal weights, another divisor than Σ n_k, BatchNorm's statistics left out."""
    nets, n = [], [5 * k + 1 for k in range(K)]
    for k in range(K):
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).double()
        for _ in range(k + 1):  # BatchNorm's counters and statistics differ
            net(torch.randn(6, 3, dtype=torch.float64))
        nets.append(net.state_dict())
    averages = common.average(nets, n)
    assert averages.keys() == nets[0].keys()
    for name, value in averages.items():
        agree(value, sum(m * net[name].numpy() for m, net in zip(n, nets)) / sum(n), 1e-6)


# --- means over clients, margins --------------------------------------------------------------------

several_federations = pytest.mark.parametrize("K, C, D", [(5, 6, 4), (1, 5, 3), (8, 2, 2), (3, 1, 3), (20, 10, 8)])


def uploads_of(K, C, D):
    """Uploads (K, C, D), counts (K, C), each class's owners. Nobody has class C // 2. Absent rows are 1e6."""
    rng = np.random.default_rng(K)
    counts = rng.integers(1, 40, size=(K, C)) * (rng.random((K, C)) < 0.6) * (np.arange(C) != C // 2)
    uploads = rng.normal(size=(K, C, D))
    uploads[counts == 0] = 1e6
    owners = [[i for i in range(K) if counts[i, c]] for c in range(C)]
    return uploads, counts, owners


@several_federations
@pytest.mark.parametrize("script", [fedproto, fedsa], ids=["fedproto", "fedsa"])
def test_eq3_weighted_mean(script, K, C, D):
    """Catches: counts left out or those of another class, clients that lack the class counted."""
    uploads, counts, owners = uploads_of(K, C, D)
    want = np.zeros((C, D))
    for c in range(C):
        if owners[c]:
            want[c] = weighted_mean(uploads[owners[c], c], counts[owners[c], c])
    averages, uploaded = script.weighted_mean(tensor(uploads), torch.tensor(counts))
    uploaded = uploaded.numpy()
    assert uploaded.tolist() == [len(of_class) > 0 for of_class in owners]
    agree(averages[uploaded], want[uploaded])


@several_federations
@pytest.mark.parametrize("alpha", [0.9999, 0.5, 0.0, 1.0])
def test_fedsa_eq10_ema(alpha, K, C, D):
    """Catches: α on the wrong side, a class that nobody uploaded moved."""
    rng = np.random.default_rng(K)
    old, averages, uploaded = rng.normal(size=(C, D)), rng.normal(size=(C, D)), rng.random(C) < 0.6
    want = old.copy()
    for c in range(C):
        if uploaded[c]:
            want[c] = alpha * old[c] + (1 - alpha) * averages[c]
    agree(fedsa.ema(tensor(old), tensor(averages), torch.tensor(uploaded), alpha), want)


@several_federations
@pytest.mark.parametrize("aggregate", ["weighted", "uniform"])
def test_fedfm_eq9_new_anchors(aggregate, K, C, D):
    """Catches: counts left out, a class that nobody has moved; uniform: lacking clients without the old anchor."""
    uploads, counts, owners = uploads_of(K, C, D)
    rng = np.random.default_rng(K + 70)
    old, had = rng.normal(size=(C, D)), rng.random(C) < 0.5
    want = old.copy()
    for c in range(C):
        vectors, sizes = [uploads[i, c] for i in owners[c]], [counts[i, c] for i in owners[c]]
        if aggregate == "uniform":
            if had[c]:
                vectors += [old[c]] * (K - len(owners[c]))
            sizes = [1] * len(vectors)
        if owners[c]:
            want[c] = weighted_mean(vectors, sizes)
    anchors = fedfm.Anchors(tensor(old), torch.tensor(had))
    vectors, known = fedfm.new_anchors(tensor(uploads), torch.tensor(counts), anchors, aggregate)
    agree(vectors, want)
    assert known.tolist() == [bool(had[c] or owners[c]) for c in range(C)]


@several_federations
def test_fedtgp_eq9_class_centres(K, C, D):
    """Catches: a mean by counts or over all participants, a centre for an absent class."""
    uploads, counts, owners = uploads_of(K, C, D)
    want = [mean(uploads[owners[c], c]) for c in range(C) if owners[c]]
    agree(fedtgp.class_centres(tensor(uploads), torch.tensor(counts > 0)), np.reshape(want, (-1, D)))


@pytest.mark.parametrize("tau", [0.5, 100.0])
@pytest.mark.parametrize("C", [1, 2, 7])
def test_fedtgp_eq9_adaptive_margin(C, tau):
    """Catches: a mean for the maximum, τ ignored, nan for a single class."""
    centres = np.random.default_rng(C).normal(size=(C, 4))
    largest = max(euclidean(a, b) for a in centres for b in centres)
    agree(fedtgp.adaptive_margin(tensor(centres), tau), min(largest, tau))


@pytest.mark.parametrize("tau", [0.5, 100.0])
@pytest.mark.parametrize("C", [1, 2, 7])
def test_fedtgp_largest_nearest_distance(C, tau):
    """Catches: the smallest distance or a mean, a centre as its own neighbour, τ ignored, inf for a single class."""
    centres = np.random.default_rng(C).normal(size=(C, 4))
    nearest = []
    for i in range(C):
        others = [euclidean(centres[i], centres[j]) for j in range(C) if j != i]
        nearest.append(min(others, default=0.0))
    agree(fedtgp.largest_nearest_distance(tensor(centres), tau), min(max(nearest), tau))


@pytest.mark.parametrize("rule, want", [("pairwise", 2.0), ("nearest", 3.0), ("fixed", 7.0), ("none", 0.0)])
def test_fedtgp_eq9_margin_rules(rule, want, term):
    """Catches: --margin-rule ignored, a margin of other centres, without τ."""
    local, owned, centres = torch.rand(2, 3, 4), torch.ones(2, 3) > 0, torch.rand(3, 4)
    averaged = term(fedtgp, "class_centres", centres)
    calls = {"pairwise": term(fedtgp, "adaptive_margin", 2.0), "nearest": term(fedtgp, "largest_nearest_distance", 3.0)}
    margin = fedtgp.server_margin(local, owned, SimpleNamespace(margin_rule=rule, tau=7.0))
    assert margin.item() == want
    check_call(averaged, local, owned)
    if rule in calls:
        check_call(calls[rule], centres, 7.0)


@pytest.mark.parametrize("N", [1, 2, 5])
def test_fedsa_eq6_average_margin(N):
    """Catches: the mean distance, which is N / (N - 1) times smaller; nan for a single class."""
    points = np.random.default_rng(N).normal(size=(N, 4))
    agree(fedsa.average_margin(tensor(points)), average_margin(points))


@pytest.mark.parametrize("scale", [0.01, 100])
def test_fedsa_eq6_margin_of_a_client(scale, monkeypatch):
    """Catches: the smaller of client's and anchors' margin, one after training, zeros of absent classes in it."""
    net, given = tiny_net(4), []
    monkeypatch.setattr(fedsa, "average_margin", lambda points: tensor(average_margin(points.tolist())))

    def local_loss(net, x, y, anchors, margin, args):
        given.append(margin.item())
        return net(x).square().sum()
    monkeypatch.setattr(fedsa, "local_loss", local_loss)
    images, anchors = tiny_images([0, 1, 3, 0, 1, 3]), scale * torch.rand(4, 3)
    z = net.features(images.x).tolist()
    means = [mean([np.array(z[i]), np.array(z[i + 3])]) for i in range(3)]
    args = SimpleNamespace(seed=0, local_epochs=2, batch_size=6, batches="all", lr=0.1, momentum=0.0, weight_decay=0.0)
    fedsa.client_update(common.Client(0, images, net=net), anchors, 1, args)
    want = max(average_margin(means), average_margin(anchors.tolist()))
    assert given == pytest.approx([want, want], rel=1e-5)


# --- FINCH ------------------------------------------------------------------------------------------

def in_order(*columns):
    """Parallel columns as sorted rows: clusters may come in any order."""
    rows = [np.concatenate([np.ravel(value) for value in row]).tolist() for row in zip(*columns, strict=True)]
    return tensor(sorted(rows))


several_vectors = pytest.mark.parametrize("n, D", [(1, 2), (2, 16), (3, 2), (6, 2), (30, 2), (30, 16)])


def vectors_of(n, D):
    """Random vectors, and such as a ReLU gives; their sizes."""
    rng = np.random.default_rng(n + D)
    x = rng.normal(size=(n, D))
    return [x, np.maximum(x, 0) + 0.1 * rng.random((n, D))], rng.integers(1, 50, size=n)


@several_vectors
def test_fedplcc_finch_first_neighbour_clusters(n, D):
    """Catches: links followed one way only, dot products for cosines, a vector as its own neighbour."""
    for x in vectors_of(n, D)[0]:
        numbers = fedplcc.first_neighbour_clusters(tensor(x)).tolist()
        clusters = [[i for i in range(n) if numbers[i] == m] for m in range(max(numbers) + 1)]
        assert sorted(clusters) == sorted(groups_of(x))


@several_vectors
def test_fedplcc_finch_merge_neighbours(n, D, monkeypatch):
    """Catches: means without sizes, sizes not summed."""
    both, sizes = vectors_of(n, D)
    for x in both:
        numbers = torch.zeros(n, dtype=torch.long)
        for number, group in enumerate(groups_of(x)):
            numbers[group] = number
        monkeypatch.setattr(fedplcc, "first_neighbour_clusters", lambda x: numbers)
        agree(in_order(*fedplcc.merge_neighbours(tensor(x), tensor(sizes))), in_order(*merged(x, sizes)))


@several_vectors
def test_fedplcc_finch_passes(n, D, monkeypatch):
    """Catches: a pass too many or too few."""
    def merge_neighbours(x, sizes):
        means, totals = merged(x.numpy(), sizes.numpy())
        return tensor(means), tensor(totals)
    monkeypatch.setattr(fedplcc, "merge_neighbours", merge_neighbours)
    both, sizes = vectors_of(n, D)
    for x in both:
        agree(in_order(*fedplcc.finch(tensor(x), tensor(sizes))), in_order(*finch(x, sizes)))


@pytest.mark.timeout(20)  # a pass that merges nothing never ends
def test_fedplcc_finch_by_hand():
    """Catches: FINCH that differs from a case worked by hand: pairs of directions, 0, 1, 20, 22, 90, 93 degrees."""
    degrees, sizes = tensor([0, 1, 20, 22, 90, 93]), tensor([1, 1, 3, 1, 1, 1])
    x = torch.stack([degrees.deg2rad().cos(), degrees.deg2rad().sin()], 1)
    assert fedplcc.connected_components(torch.tensor([1, 0, 1, 4, 3])).tolist() == [0, 0, 0, 1, 1]
    assert fedplcc.first_neighbour_clusters(x).tolist() == [0, 0, 1, 1, 2, 2]
    means, totals = fedplcc.finch(x, sizes)
    assert totals.tolist() == [2, 4, 2]
    agree(means[1], (3 * x[2] + x[3]) / 4)
    means, totals = fedplcc.finch(x[:3], sizes[:3])  # the first pass merges all: that is the result
    assert totals.tolist() == [5]
    agree(means[0], (x[0] + x[1] + 3 * x[2]) / 5)
    for ties in (x * 0, x[[0] * 6]):  # whatever the clusters are, they add up
        means, totals = fedplcc.finch(ties, sizes)
        agree(totals @ means, sizes @ ties)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("C", [1, 4])
def test_fedplcc_finch_of_each_class(C):
    """Catches: classes clustered together, others' sizes or labels; float32, which cannot tell near vectors apart."""
    rng = np.random.default_rng(C)
    x, y, sizes = 1 + 1e-4 * rng.normal(size=(40, 8)).astype(np.float32), rng.integers(C, size=40), rng.integers(1, 9, 40)
    rows = []
    for c in range(C):
        for vector, size in zip(*finch(x[y == c].astype(float), sizes[y == c])):
            rows.append((vector, c, size))
    got = fedplcc.cluster_by_class(torch.tensor(x), torch.tensor(y), torch.tensor(sizes).float())
    agree(in_order(*got), in_order(*zip(*rows)), 1e-6)


def test_fedplcc_eq9_local_clusters(term):
    """Catches: images that do not count as one each, features of a model in train mode."""
    net, images, clusters = tiny_net(), tiny_images([0, 1, 2, 0, 1]), torch.rand(1)
    net.train()
    calls = term(fedplcc, "cluster_by_class", clusters)
    assert fedplcc.local_clusters(net, images) is clusters
    with torch.no_grad():
        check_call(calls, net.features(images.x), images.y, torch.ones(5))
    assert not net.training


@pytest.mark.parametrize("uniform", [False, True])
def test_fedplcc_eq10_global_prototypes(uniform, term, monkeypatch):
    """Catches: a client's clusters left out, sizes left out, weights of other clusters, --uniform-weights ignored."""
    columns = torch.rand(5, 3), torch.tensor([0, 1, 1, 0, 2]), torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0])
    union = fedplcc.Clusters(torch.rand(3, 3), torch.tensor([0, 1, 2]), torch.tensor([4.0, 5.0, 5.0]))
    calls = []
    monkeypatch.setattr(fedplcc, "cluster_by_class", lambda *given: calls.append(given) or union)
    weights = term(fedplcc, "prototype_weights", [0.2, 0.3, 0.5])
    sent = [fedplcc.Clusters(*(column[:2] for column in columns)), fedplcc.Clusters(*(column[2:] for column in columns))]
    got = fedplcc.global_prototypes(sent, uniform)
    check_call(calls, *columns)
    check_call(weights, union.sizes, union.labels)
    assert got.vectors is union.vectors and got.labels is union.labels
    assert got.weights.tolist() == pytest.approx([1, 1, 1] if uniform else [0.2, 0.3, 0.5])


def test_fedplcc_eq11_prototype_weights():
    """Catches: weights that sum to 1 over all classes, another class's total."""
    weights = fedplcc.prototype_weights(tensor([3, 1, 4, 5]), torch.tensor([2, 0, 2, 0]))
    agree(weights, [3 / 7, 1 / 6, 4 / 7, 5 / 6])


# --- the servers that train -------------------------------------------------------------------------

def two_layers(vectors, w1, b1, w2, b2):
    """Linear, ReLU, Linear: F of FedTGP, Θ of FedLSA."""
    return [linear(w2, b2, [max(v, 0.0) for v in linear(w1, b1, row)]) for row in vectors]


def test_fedtgp_global_prototypes():
    """Catches: another width of F or activation, F with --no-mlp, vectors that are not trained."""
    net = fedtgp.GlobalPrototypes(7, 5, no_mlp=False).double()
    w1, b1, w2, b2 = [p.tolist() for p in net.mlp.parameters()]
    agree(net(), two_layers(net.v.tolist(), w1, b1, w2, b2))
    assert sum(p.numel() for p in net.parameters()) == 7 * 5 + 2 * (5 * 5 + 5)
    plain = fedtgp.GlobalPrototypes(7, 5, no_mlp=True)
    assert plain().equal(plain.v) and [p is plain.v for p in plain.parameters()] == [True]


def test_fedlsa_anchor_net():
    """Catches: another width of Θ or activation, anchors that do not have length 1, R that is not trained."""
    net = fedlsa.AnchorNet(7, 6, 5).double()
    R, w1, b1, w2, b2 = [p.tolist() for p in net.parameters()]
    agree(net(), [unit(row) for row in two_layers(R, w1, b1, w2, b2)])
    assert np.shape(R) == (7, 6) and np.shape(w1) == (6, 6) and np.shape(w2) == (5, 6)


class Table(torch.nn.Module):
    """In place of the servers' networks: C vectors of size D, all parameters."""

    def __init__(self, C, D):
        super().__init__()
        self.vectors, self.scale = torch.nn.Parameter(torch.randn(C, D)), torch.nn.Parameter(torch.rand(D))

    def forward(self):
        return self.vectors * self.scale


def test_fedtgp_eq10_server_update(monkeypatch):
    """Catches: zeros of absent classes, momentum, an epoch too few, losses of other epochs, prototypes a step old."""
    def loss_of(p, labels, prototypes, margin):
        return (margin * (p - prototypes[labels]).square()).sum()
    monkeypatch.setattr(fedtgp, "margin_contrastive", loss_of)
    net = Table(4, 3)
    again = copy.deepcopy(net)
    uploads, owned = torch.randn(3, 4, 3), torch.tensor([[1, 0, 1, 0], [0, 0, 1, 1], [1, 0, 0, 0]]) > 0
    args = SimpleNamespace(seed=0, server_epochs=3, batch_size=10, lr=0.01, momentum=0.9, weight_decay=0.01)
    prototypes, losses = fedtgp.server_update(net, uploads, owned, 0.8, 1, args)

    clients, labels = [0, 0, 1, 1, 2], torch.tensor([0, 2, 2, 3, 0])
    for _ in range(3):
        loss = loss_of(uploads[clients, labels], labels, again(), 0.8)
        sgd_step(again, loss, {}, lr=0.01)  # {}: no momentum
    agree(prototypes, again().detach(), 1e-4, 1e-6)
    agree(losses, [loss.item()], 1e-5)
    assert not prototypes.requires_grad


def test_fedtgp_eq10_server_batches(term):
    """Catches: an upload left out or twice, another's label, the same order in each epoch, round or seed."""
    owned = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 0, 0, 0]]) > 0
    uploads = torch.arange(36.0).view(3, 4, 3)
    orders = []
    for seed, t in ((0, 1), (0, 2), (1, 1)):
        calls = term(fedtgp, "margin_contrastive", torch.zeros((), requires_grad=True))
        args = SimpleNamespace(seed=seed, server_epochs=2, batch_size=3, lr=0.1)
        _, losses = fedtgp.server_update(Table(4, 3), uploads, owned, 0.0, t, args)
        assert [len(labels) for _, labels, _, _ in calls] == [3, 3, 1, 3, 3, 1] and len(losses) == 3
        for batches in (calls[:3], calls[3:]):
            rows = torch.cat([p for p, _, _, _ in batches])
            labels = torch.cat([labels for _, labels, _, _ in batches])
            assert sorted(rows.tolist()) == sorted(uploads[owned].tolist())
            assert labels.tolist() == (rows[:, 0] // 3 % 4).tolist()
            orders.append(tuple(rows[:, 0].tolist()))
    assert len(set(orders)) == 6


def test_fedlsa_eq5_server_update(monkeypatch):
    """Catches: a term or α left out, another optimiser, a step too few, anchors a step old, a trained classifier."""
    def first_term(anchors, weight, bias):
        return (anchors @ weight.T + bias).square().mean()

    def second_term(anchors, tau):
        return (anchors @ anchors.T).mean() / tau
    monkeypatch.setattr(fedlsa, "anchor_classification", first_term)
    monkeypatch.setattr(fedlsa, "anchor_separation", second_term)
    net, classifier = Table(4, 3), torch.nn.Linear(3, 4)
    again = copy.deepcopy(net)
    args = SimpleNamespace(server_steps=3, alpha=0.4, tau=0.2, lr=0.1, momentum=0.9, weight_decay=0.01)
    anchors, last_loss = fedlsa.server_update(net, classifier, args)

    speeds = {}
    for _ in range(3):
        A = again()
        loss = first_term(A, classifier.weight.detach(), classifier.bias.detach()) + 0.4 * second_term(A, 0.2)
        sgd_step(again, loss, speeds, lr=0.1, momentum=0.9, decay=0.01)
    agree(anchors, again().detach(), 1e-4, 1e-6)
    agree(last_loss, loss.item(), 1e-5)
    assert not anchors.requires_grad and classifier.weight.grad is None


def test_fedlsa_nearest_cosine():
    """Catches: an anchor as its own neighbour, the smallest cosine."""
    assert fedlsa.nearest_cosine(torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])).item() == pytest.approx(0.8)


def test_fedsa_make_anchors():
    """Catches: A uniform and not normal, a layer, BatchNorm or ReLU left out of the embedding."""
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

    with common.seeded(0, "anchors"):
        x, layers = torch.randn(400, 3), [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]
    for layer in layers:
        x = layer(x)
        x = ((x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()).relu()
    agree(tensor(anchors["mlp"]), x.detach().double(), 1e-4, 1e-5)
