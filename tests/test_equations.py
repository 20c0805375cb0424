"""The equations of the six papers a second time: slow loops or small cases by hand, written from the papers. Those that
lab sheets ask for are in test_mistakes.py as well.

Names say which function is tested: `pytest tests/test_equations.py -k "fedsa and eq5"`.
Shapes: z (B, D) features, y (B,) their classes, p (C, D) prototypes or anchors,
has_prototype (C,) which of them exist."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import common, fedfm, fedlsa, fedplcc, fedproto, fedsa, fedtgp
from reference import cosine, cross_entropy, euclidean, finch, first_neighbours, means_of, unit, weighted_mean

pytestmark = pytest.mark.timeout(30)  # wrong FINCH may never end


def tensor(x):
    return torch.tensor(np.asarray(x, float))


def agree(got, want, rtol=1e-5, atol=1e-6):
    got, want = torch.as_tensor(got).detach().numpy(), np.asarray(want)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol, atol)


def tiny_net(C=3):
    """A model with D = 3 features, for images of 2x2 pixels."""
    torch.manual_seed(1)
    extractor = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    return common.Net(extractor, torch.nn.Linear(3, C), 3, C)


def tiny_images(y):
    return common.Images(torch.randint(256, (len(y), 1, 2, 2)).byte(), torch.tensor(y))


# --- losses of features, losses of anchors ----------------------------------------------------------

def margin_contrastive(v, c, p, margin):
    """FedTGP Eqs. 7 and 10, FedSA Eq. 7."""
    logits = [-euclidean(v, q) for q in p]
    logits[c] -= margin
    return cross_entropy(logits, c)


LOSSES = {  # name: the script's function for a batch z, y; the reference for a sample v of class c
    "fedproto_eq4_prototype_distance": (
        lambda z, y, p, has_prototype: fedproto.prototype_distance(z, y, p, has_prototype, "euclidean"),
        lambda v, c, p: euclidean(v, p[c])),
    "fedtgp_eq11_prototype_distance": (
        lambda z, y, p, has_prototype: fedtgp.prototype_distance(z, y, p, "euclidean"),
        lambda v, c, p: euclidean(v, p[c])),
    "fedtgp_eq10_margin_contrastive": (
        lambda z, y, p, has_prototype: fedtgp.margin_contrastive(z, y, p, 1.5),
        lambda v, c, p: margin_contrastive(v, c, p, 1.5)),
    "fedsa_eq5_regularization": (
        lambda z, y, p, has_prototype: fedsa.regularization(z, y, p, "euclidean"),
        lambda v, c, p: euclidean(v, p[c])),
    "fedsa_eq7_margin_contrastive": (
        lambda z, y, p, has_prototype: fedsa.margin_contrastive(z, y, p, 2.5),
        lambda v, c, p: margin_contrastive(v, c, p, 2.5)),
    "fedlsa_eq8_compactness": (
        lambda z, y, p, has_prototype: fedlsa.compactness(z, y, p, 0.2),
        lambda v, c, p: cross_entropy(p @ v / 0.2, c)),
    "fedlsa_l2_distance": (
        lambda z, y, p, has_prototype: fedlsa.l2_distance(z, y, p),
        lambda v, c, p: euclidean(v, p[c])),
    "fedfm_contrastive_guiding": (
        lambda z, y, p, has_prototype: fedfm.contrastive_guiding(z, y, fedfm.Anchors(p, has_prototype), 0.1),
        lambda v, c, p: cross_entropy([cosine(v, q) / 0.1 for q in p], c)),
    "fedfm_eq3_squared_distance": (
        lambda z, y, p, has_prototype: fedfm.squared_distance(z, y, fedfm.Anchors(p, has_prototype)),
        lambda v, c, p: np.sum((unit(v) - unit(p[c])) ** 2)),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


def check_loss(name, z, y, p, n):
    """Compare the loss where only the first n classes have a prototype -> its gradient in z."""
    ours, reference = LOSSES[name]
    features = tensor(z).requires_grad_()
    loss = ours(features, torch.tensor(y), tensor(p), torch.arange(len(p)) < n)
    of_samples = [reference(v, c, p[:n]) for v, c in zip(z, y) if c < n]
    agree(loss, np.mean(of_samples or [0.0]), atol=1e-5)
    (loss + 0 * features.sum()).backward()  # a constant 0 has no gradient of its own
    return features.grad


def random_batch(B, C, D=5):
    rng = np.random.default_rng(0)
    return rng.normal(size=(B, D)), rng.integers(C, size=B), rng.normal(size=(C, D))


@pytest.mark.parametrize("B, C", [(7, 4), (1, 1)])
@every_loss
def test_loss(name, B, C):
    """The loss is a mean over samples. No part of its gradient is cut off."""
    z, y, p = random_batch(B, C)
    check_loss(name, z, y, p, C)

    def loss_of(z):
        return LOSSES[name][0](z, torch.tensor(y), tensor(p), torch.ones(C) > 0)
    assert torch.autograd.gradcheck(loss_of, tensor(z).requires_grad_())


@pytest.mark.parametrize("n", [0, 2])
@pytest.mark.parametrize("name", ["fedproto_eq4_prototype_distance", "fedfm_contrastive_guiding",
                                  "fedfm_eq3_squared_distance"])
def test_loss_where_only_n_classes_are_known(name, n):
    """Unknown classes count neither in the mean nor in the softmax."""
    gradient = check_loss(name, *random_batch(7, 4), n)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("script", [fedtgp, fedsa], ids=["fedtgp_eq10", "fedsa_eq7"])
def test_margin_contrastive_by_hand(script):
    """Long distances stay exact: exp(-250) is 0, and its logarithm infinite."""
    z, prototypes = torch.zeros(1, 2), torch.tensor([[200.0, 0.0], [100.0, 0.0]])
    loss = script.margin_contrastive(z, torch.tensor([0]), prototypes, 50.0)
    assert loss.item() == pytest.approx((200 + 50) - 100)


@every_loss
def test_loss_of_equal_and_zero_vectors(name):
    """The gradient is finite at distance 0 and for zero vectors, which a ReLU gives."""
    _, y, p = random_batch(7, 4)
    p[y[0]] = 0
    assert check_loss(name, p[y], y, p, 4).isfinite().all()


@pytest.mark.parametrize("loss_of", [lambda a, classifier: fedsa.classifier_calibration(classifier, a),
                                     lambda a, classifier: fedlsa.anchor_classification(a, classifier)],
                         ids=["fedsa_eq8_classifier_calibration", "fedlsa_eq3_anchor_classification"])
def test_cross_entropy_of_anchors(loss_of):
    """The loss is a mean over classes, and the classifier's bias counts. Classifier and anchors get its gradient."""
    anchors, classifier = tensor(torch.randn(4, 5)).requires_grad_(), torch.nn.Linear(5, 4).double()
    logits = anchors @ classifier.weight.T + classifier.bias
    want = torch.stack([logits[c].logsumexp(0) - logits[c, c] for c in range(4)]).mean()
    loss, inputs = loss_of(anchors, classifier), [anchors, *classifier.parameters()]
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(torch.autograd.grad(loss, inputs), torch.autograd.grad(want, inputs))


def test_fedlsa_eq4_anchor_separation():
    """The mean skips j = i; τ divides inside exp, which must not overflow. Both a_i and a_j get a gradient."""
    _, _, a = random_batch(1, 4)
    terms = []
    for i in range(4):
        others = [math.exp(a[i] @ a[j] / 0.5) for j in range(4) if j != i]
        terms.append(math.log(np.mean(others)))
    agree(fedlsa.anchor_separation(tensor(a), 0.5), np.mean(terms))
    assert torch.autograd.gradcheck(lambda a: fedlsa.anchor_separation(a, 0.5), tensor(a).requires_grad_())
    equal = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert fedlsa.anchor_separation(equal, 0.001).item() == pytest.approx(1000)  # exp(1000) is inf


# --- FedPLCC's losses over G prototypes, several of a class -----------------------------------------

def similarities():
    """s (8, 20) in (0, 1], classes y (8,) and labels (20,), weights (20,). The last sample's class has no prototype."""
    rng = np.random.default_rng(0)
    s = rng.uniform(0.01, 1, size=(8, 20))
    y = np.array([0, 1, 2, 3, 0, 1, 2, 4])
    return s, y, rng.integers(4, size=20), rng.uniform(0.1, 1, size=20)


def check_per_sample(function, setting, want):
    """The losses of all samples but the last are those wanted, and so is their gradient."""
    s, y, labels, weights = similarities()
    s = tensor(s).requires_grad_()
    same_class = torch.tensor(labels == y[:, None])

    def losses(s):
        return function(s, same_class, tensor(weights), setting)[:7]
    agree(losses(s), want)
    assert torch.autograd.gradcheck(losses, s)


def test_fedplcc_eq7_similarity():
    """s is the cosine to the power α; its slope stays finite at 0."""
    z, _, vectors = random_batch(5, 9)  # some cosines are below 0
    z[0] = 0
    want = [[max(cosine(v, u), 1e-6) ** 0.5 for u in vectors] for v in z]
    features = tensor(z).requires_grad_()
    s = fedplcc.similarity(features, tensor(vectors), 0.5)
    agree(s, want)
    s.sum().backward()
    assert features.grad.isfinite().all() and features.grad[1:].any(1).all()


def test_fedplcc_eq6_contrast():
    """Both sums carry the weights; only the lower one includes other classes."""
    s, y, labels, weights = similarities()
    want = []
    for row, c in zip(s[:7], y):
        terms = np.exp(row / 0.07) * weights
        own = terms[labels == c]
        want.append(-np.log(own.sum() / terms.sum()))
    check_per_sample(fedplcc.contrast, 0.07, want)


def test_fedplcc_eq8_attraction():
    """The ⌈φ n⌉ prototypes of the class with the largest similarity × weight attract."""
    s, y, labels, weights = similarities()
    want = []
    for row, c in zip(s[:7], y):
        own = (row * weights)[labels == c]
        largest_first = sorted(own, reverse=True)
        kept = math.ceil(0.5 * len(own))
        want.append(-sum(largest_first[:kept]))
    check_per_sample(fedplcc.attraction, 0.5, want)


def test_fedplcc_eq8_attracts_a_share_of_prototypes():
    """⌈0.3 · 50⌉ is 15, although floats make it 16."""
    same_class = torch.ones(100, 100).tril() > 0  # sample b has b + 1 prototypes of its class
    got = -fedplcc.attraction(torch.ones(100, 100), same_class, torch.ones(100), 0.3)
    assert got.tolist() == [(3 * n + 9) // 10 for n in range(1, 101)]


# --- the clients' losses: sums of the terms above -----------------------------------------------------

def batch():
    """A model, images and labels of a batch; its features and cross-entropy."""
    net = tiny_net()
    x, y = tiny_images([0, 1, 2, 0, 1, 2, 0, 1])
    z = net.features(x)
    return net, x, y, z, F.cross_entropy(net.classifier(z), y)


def agree_with_gradient(net, loss, want):
    """The losses are equal, and so are their gradients in the model's parameters."""
    torch.testing.assert_close(loss, want)
    weights = list(net.parameters())
    gradient = torch.autograd.grad(want, weights, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, weights), gradient)


def test_fedproto_eq4_local_loss():
    """λ weighs the distance, and --distance picks its kind."""
    net, x, y, z, entropy = batch()
    p, has_prototype = torch.rand(3, 3), torch.tensor([True, False, True])
    guided = (z - p[y])[has_prototype[y]]
    loss = fedproto.local_loss(net, x, y, p, has_prototype, SimpleNamespace(lam=0.7, distance="mse"))
    agree_with_gradient(net, loss, entropy + 0.7 * guided.square().mean())
    loss = fedproto.local_loss(net, x, y, p, has_prototype, SimpleNamespace(lam=0.7, distance="euclidean"))
    agree_with_gradient(net, loss, entropy + 0.7 * guided.norm(dim=1).mean())


def test_fedtgp_eq11_local_loss():
    """λ weighs the distance, and --distance picks its kind."""
    net, x, y, z, entropy = batch()
    p = torch.rand(3, 3)
    loss = fedtgp.local_loss(net, x, y, p, SimpleNamespace(lam=0.7, distance="mse"))
    agree_with_gradient(net, loss, entropy + 0.7 * (z - p[y]).square().mean())
    loss = fedtgp.local_loss(net, x, y, p, SimpleNamespace(lam=0.7, distance="euclidean"))
    agree_with_gradient(net, loss, entropy + 0.7 * (z - p[y]).norm(dim=1).mean())


def test_fedsa_eq9_local_loss(monkeypatch):
    """Each λ weighs its own term, and --distance picks L_R's kind."""
    net, x, y, z, entropy = batch()
    anchors, margin = torch.rand(3, 3), torch.tensor(1.5)

    def l_mcl(z, y, anchors, margin):
        return margin * (z - anchors[y]).square().sum()
    monkeypatch.setattr(fedsa, "margin_contrastive", l_mcl)  # a lab sheet blanks this function
    others = 0.2 * l_mcl(z, y, anchors, margin) + 0.6 * fedsa.classifier_calibration(net.classifier, anchors)
    args = SimpleNamespace(lam_r=0.3, lam_mcl=0.2, lam_cc=0.6, distance="mse")
    want = entropy + 0.3 * (z - anchors[y]).square().mean() + others
    agree_with_gradient(net, fedsa.local_loss(net, x, y, anchors, margin, args), want)
    args.distance = "euclidean"
    want = entropy + 0.3 * (z - anchors[y]).norm(dim=1).mean() + others
    agree_with_gradient(net, fedsa.local_loss(net, x, y, anchors, margin, args), want)


def test_eq5_by_the_letter():
    """FedSA's --distance class-means: the batch's class means, a sum over its classes; an absent class adds nothing."""
    z, _, anchors = random_batch(5, 4)
    want = euclidean((z[0] + z[2]) / 2, anchors[3]) + euclidean((z[1] + z[3] + z[4]) / 3, anchors[1])
    y = torch.tensor([3, 1, 3, 1, 1])
    agree(fedsa.regularization(tensor(z), y, tensor(anchors), "class-means"), want)
    assert torch.autograd.gradcheck(lambda z: fedsa.regularization(z, y, tensor(anchors), "class-means"),
                                    tensor(z).requires_grad_())


def test_fedlsa_eq10_local_loss():
    """λ weighs what --compactness picks; without anchors only cross-entropy remains."""
    net, x, y, z, entropy = batch()
    anchors = torch.rand(3, 3)
    args = SimpleNamespace(lam=0.7, tau=0.4, compactness="vmf")
    want = entropy + 0.7 * fedlsa.compactness(z, y, anchors, 0.4)
    agree_with_gradient(net, fedlsa.local_loss(net, x, y, anchors, args), want)
    args.compactness = "l2"
    want = entropy + 0.7 * fedlsa.l2_distance(z, y, anchors)
    agree_with_gradient(net, fedlsa.local_loss(net, x, y, anchors, args), want)
    agree_with_gradient(net, fedlsa.local_loss(net, x, y, None, args), entropy)


def test_fedplcc_eq4_local_loss():
    """λ1 weighs contrast, λ2 attraction, over the samples whose class has a prototype."""
    net, x, y, z, entropy = batch()
    labels = torch.tensor([0, 1, 1, 0])  # class 2 has none
    prototypes = fedplcc.Prototypes(torch.rand(4, 3), labels, torch.rand(4))
    args = SimpleNamespace(lam_contra=0.4, lam_corr=0.9, alpha=0.6, tau=0.3, phi=0.5)
    same_class = labels == y[:, None]
    s = fedplcc.similarity(z, prototypes.vectors, 0.6)
    l_contra = fedplcc.contrast(s, same_class, prototypes.weights, 0.3)
    l_corr = fedplcc.attraction(s, same_class, prototypes.weights, 0.5)
    want = entropy + (0.4 * l_contra + 0.9 * l_corr)[y < 2].mean()
    agree_with_gradient(net, fedplcc.local_loss(net, x, y, prototypes, args), want)

    other_class = prototypes._replace(labels=labels * 0 + 5)  # no sample of the batch is of it
    for without in (other_class, fedplcc.no_prototypes(3, "cpu"), None):
        agree_with_gradient(net, fedplcc.local_loss(net, x, y, without, args), entropy)


def test_fedfm_eq10_local_loss():
    """λ weighs what --match picks; without anchors only cross-entropy remains."""
    net, x, y, z, entropy = batch()
    anchors = fedfm.Anchors(torch.rand(3, 3), torch.tensor([True, False, True]))
    args = SimpleNamespace(lam=0.7, match="cg", temperature=0.3)
    want = entropy + 0.7 * fedfm.contrastive_guiding(z, y, anchors, 0.3)
    agree_with_gradient(net, fedfm.local_loss(net, x, y, anchors, args), want)
    args.match = "l2"
    want = entropy + 0.7 * fedfm.squared_distance(z, y, anchors)
    agree_with_gradient(net, fedfm.local_loss(net, x, y, anchors, args), want)
    agree_with_gradient(net, fedfm.local_loss(net, x, y, None, args), entropy)


# --- class means, distances, accuracies, averages ---------------------------------------------------

def pixel_net(C):
    """Its only feature is the value of the one pixel. It answers class 1 above 10, else 0."""
    extractor = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(1, eps=1e-9))  # differs in train mode
    net = common.Net(extractor, torch.nn.Linear(1, C), 1, C, mean=(0.0,), std=(1 / 255,))
    net.classifier.weight.data = torch.eye(C)[:, 1:2]
    net.classifier.bias.data = 10 * torch.eye(C)[0]
    return net


def pixels(values, y):
    return common.Images(torch.tensor(values).byte().view(-1, 1, 1, 1), torch.tensor(y))


def test_distances_far_from_the_origin():
    """Small distances survive; |a|² + |b|² - 2ab would round them away."""
    far = torch.rand(40, 64) + 1000
    assert common.distances(far + 0.01, far).diagonal().numpy() == pytest.approx(0.08, rel=0.02)
    assert common.distances(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2)).item() == pytest.approx(5)


def test_accuracy_of_personal_models():
    """Every test image counts equally; a class without a prototype is never predicted."""
    train, test = pixels([5, 5, 5, 5], [0, 1, 1, 2]), pixels([5, 15, 31, 45], [0, 1, 0, 2])
    one = common.Client(0, train, test=test, net=pixel_net(3))    # it answers 0, 1, 1, 1; nearest: 0, 0, 2, 2
    train, test = pixels([5, 5, 5], [1, 1, 0]), pixels([70, 8], [2, 0])
    other = common.Client(1, train, test=test, net=pixel_net(3))  # it answers 1, 0; nearest: 2, 0
    prototypes, has_prototype = torch.tensor([[0.0], [20.0], [40.0]]), torch.tensor([True, False, True])
    args = SimpleNamespace(eval_every=2, rounds=3, device="cpu", workers=1)
    scores = common.evaluate_personal([one, other], prototypes, 2, args, has_prototype, name="anchor")
    assert scores == pytest.approx({"classifier": 300 / 6, "anchor": 400 / 6, "most_frequent": 100 / 6})
    scores = common.evaluate_personal([one, other], prototypes, 3, args)  # all have one: 15 is nearest to 20
    assert scores["prototype"] == pytest.approx(500 / 6)
    assert common.evaluate_personal([one, other], prototypes, 1, args) == {}


def test_accuracy_of_the_global_model():
    """The score is a mean over domains, not images."""
    net = pixel_net(2).train()
    tests = {"a": pixels([5, 15, 25, 35], [0, 0, 1, 1]), "b": pixels([5, 15], [1, 0])}
    args = SimpleNamespace(eval_every=2, rounds=3, device="cpu", workers=2)
    assert common.evaluate_global(net, tests, 3, args) == {"test": 37.5, "a": 75, "b": 0}
    assert common.evaluate_global(net, {"a": tests["a"]}, 2, args) == {"test": 75}
    assert common.evaluate_global(net, tests, 1, args) == {}


def test_fedfm_validation():
    """The score is a mean over clients, not images, and only over those with held-out images."""
    one = common.Client(0, None, val=pixels([5, 15, 25, 35], [0, 0, 1, 1]))
    other = common.Client(1, None, val=pixels([5], [1]))
    none = common.Client(2, None, val=pixels([], []))
    args = SimpleNamespace(eval_every=2, rounds=3, device="cpu", workers=1)
    assert common.evaluate_validation(pixel_net(2), [one, other, none], 2, args) == {"validation": 37.5}
    assert common.evaluate_validation(pixel_net(2), [none], 2, args) == {}
    assert common.evaluate_validation(pixel_net(2), [one], 1, args) == {}


def test_fedfm_eq11_average_of_models():
    """n_k weighs each model, BatchNorm's statistics included."""
    one = {"weight": tensor([1, 2]), "running_mean": tensor([3])}
    other = {"weight": tensor([5, -2]), "running_mean": tensor([7])}
    mean = common.average([one, other], [1, 3])
    agree(mean["weight"], [4, -1])
    agree(mean["running_mean"], [6])


# --- means over clients, margins --------------------------------------------------------------------

def means_of_clients():
    """Class means (5, 6, 4) and counts (5, 6) of five clients. Nobody has classes 3 and 4. Absent rows are 1e6."""
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 40, size=(5, 6)) * (rng.random((5, 6)) < 0.6)
    counts[:, 3:5] = 0
    means = rng.normal(size=(5, 6, 4))
    means[counts == 0] = 1e6
    return means, counts


@pytest.mark.parametrize("script", [fedproto, fedsa], ids=["fedproto", "fedsa"])
def test_eq3_weighted_mean(script):
    """The mean is over the clients that have the class, weighted by their images of it."""
    means, counts = means_of_clients()
    averages, uploaded = script.weighted_mean(tensor(means).float(), torch.tensor(counts))
    assert uploaded.tolist() == [True, True, True, False, False, True]
    for c in (0, 1, 2, 5):
        agree(averages[c], weighted_mean(means[:, c], counts[:, c]))


@pytest.mark.parametrize("aggregate, want", [("weighted", [(1 * 2 + 3 * 6) / 4, 20, 30, 7, 0]),
                                             ("uniform", [(2 + 6) / 2, (20 + 8) / 2, 30, 7, 0])])
def test_fedfm_eq9_new_anchors(aggregate, want):
    """With uniform, a client that lacks a class sends the old anchor."""
    # class 0: both clients have it; 1: only the first; 2: only the first, without an old anchor; 3 and 4: nobody
    means = torch.tensor([[2, 20, 30, 1e6, 1e6], [6, 1e6, 1e6, 1e6, 1e6]])[:, :, None]
    counts = torch.tensor([[1, 5, 5, 0, 0], [3, 0, 0, 0, 0]])
    old = torch.tensor([9.0, 8.0, 0.0, 7.0, 0.0])[:, None]
    had = torch.tensor([True, True, False, True, False])
    vectors, known = fedfm.new_anchors(means, counts, fedfm.Anchors(old, had), aggregate)
    assert vectors.flatten().tolist() == want and known.tolist() == [True, True, True, True, False]


def test_fedtgp_eq9_class_centres():
    """A centre is the plain mean over the clients that have the class."""
    means, counts = means_of_clients()
    means[counts == 0] = 0  # as clients send them
    want = [means[counts[:, c] > 0, c].mean(0) for c in (0, 1, 2, 5)]
    agree(fedtgp.class_centres(tensor(means), torch.tensor(counts > 0)), want)


TRIANGLE = tensor([[0, 0], [3, 0], [3, 4]])  # with sides 3, 4 and 5


@pytest.mark.parametrize("rule, want, of_one_class", [("pairwise", 5, 0), ("nearest", 4, 7), ("fixed", 7, 7),
                                                      ("none", 0, 0)])
def test_fedtgp_eq9_margin(rule, want, of_one_class):
    """τ caps every margin, and no centre is its own neighbour."""
    for owned, margin in ([[1, 1, 1]], want), ([[1, 0, 0]], of_one_class):
        for tau in (7.0, 2.0):
            args = SimpleNamespace(margin_rule=rule, tau=tau)
            assert float(fedtgp.server_margin(TRIANGLE[None], torch.tensor(owned) > 0, args)) == min(margin, tau)


@pytest.mark.parametrize("scale", [0.01, 100])
def test_fedsa_eq6_margin_of_a_client(scale, monkeypatch):
    """d* is the larger of the client's and the anchors' margins, both before training."""
    net, images = tiny_net(4), tiny_images([0, 1, 3, 0, 1])
    anchors = scale * torch.rand(4, 3)
    means, _ = common.class_means(net, images)
    want = max(fedsa.average_margin(means[[0, 1, 3]]), fedsa.average_margin(anchors))
    given = []

    def local_loss(net, x, y, anchors, margin, args):
        given.append(margin.item())
        return net(x).square().sum()
    monkeypatch.setattr(fedsa, "local_loss", local_loss)
    args = SimpleNamespace(seed=0, local_epochs=2, batch_size=6, batches="all", lr=0.1, momentum=0, weight_decay=0)
    fedsa.client_update(common.Client(0, images, net=net), anchors, 1, args)
    assert given == pytest.approx([want.item(), want.item()])


# --- FINCH ------------------------------------------------------------------------------------------

def in_order(means, *columns):
    """Clusters as sorted rows: FINCH may return them in any order."""
    rows = np.column_stack([means, *columns])
    return tensor(rows[np.argsort(rows[:, 0])])


def same_clusters(cluster, reference):
    """Equal up to the order of the clusters' numbers, which run from 0."""
    assert sorted(set(cluster.tolist())) == list(range(max(reference) + 1))
    assert len(set(zip(cluster.tolist(), reference))) == max(reference) + 1


def test_fedplcc_finch_connected_components():
    """Links join both ways."""
    assert fedplcc.connected_components(torch.tensor([1, 2, 3, 2, 5, 4])).tolist() == [0, 0, 0, 0, 1, 1]


def vectors_of(n):
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, 16)), rng.integers(1, 50, size=n).astype(float)


@pytest.mark.parametrize("n", [1, 2, 3, 30, 80])
def test_fedplcc_finch(n):
    """Later passes compare the means of all vectors in a cluster; FINCH stops before one cluster remains."""
    x, weights = vectors_of(n)
    for w in np.ones(n), weights:
        same_clusters(fedplcc.finch(tensor(x), tensor(w)), finch(x, w))


@pytest.mark.parametrize("weighted", [False, True])
def test_fedplcc_finch_of_each_class(weighted):
    """Each class is clustered alone; sizes add up, and weigh the means only with weighted_means; float32 could not
    tell near vectors apart."""
    x, sizes = vectors_of(240)
    x, y = (1 + 1e-4 * x).astype(np.float32), np.arange(240) % 3
    weights = sizes if weighted else np.ones(240)
    rows = []
    for c in range(3):
        own = y == c
        cluster = finch(x[own].astype(float), weights[own])
        means = means_of(x[own].astype(float), cluster, weights[own])
        totals = [sum(sizes[own][cluster == j]) for j in range(len(means))]
        rows.append(np.column_stack([means, np.full(len(means), c), totals]))
    got = fedplcc.cluster_by_class(torch.tensor(x), torch.tensor(y), torch.tensor(sizes).float(), weighted)
    agree(in_order(*got), in_order(np.concatenate(rows)), 1e-6)


def test_fedplcc_eq9_local_clusters():
    """Each image counts as one, and the model is in eval mode."""
    net, images = tiny_net().train(), tiny_images([0, 1, 2, 0, 1])
    want = fedplcc.cluster_by_class(net.features(images.x).detach(), images.y, torch.ones(5))
    torch.testing.assert_close(fedplcc.local_clusters(net, images), want)
    assert not net.training


@pytest.mark.parametrize("uniform, weighted", [(False, False), (True, False), (False, True)])
def test_fedplcc_eq10_global_prototypes(uniform, weighted):
    """The server clusters all clients' clusters; --uniform-weights sets weights to 1; --weighted-means counts sizes in
    the means as well."""
    vectors, labels, sizes = torch.rand(9, 3), torch.arange(9) % 2, torch.arange(1.0, 10.0)
    uploads = []
    for part in slice(4), slice(4, 9):
        uploads.append(SimpleNamespace(clusters=fedplcc.Clusters(vectors[part], labels[part], sizes[part])))
    args = SimpleNamespace(uniform_weights=uniform, weighted_means=weighted)
    got = fedplcc.global_prototypes(uploads, args)
    union = fedplcc.cluster_by_class(vectors, labels, sizes, weighted)
    weights = fedplcc.prototype_weights(union.sizes, union.labels)
    if uniform:
        weights = torch.ones(len(weights))
    torch.testing.assert_close(got, fedplcc.Prototypes(union.vectors, union.labels, weights))


# --- the servers that train -------------------------------------------------------------------------

def test_fedtgp_global_prototypes():
    """F is Linear, ReLU, Linear; --no-mlp leaves only the vectors."""
    net = fedtgp.PrototypeNet(7, 5, no_mlp=False)
    v, w1, b1, w2, b2 = net.parameters()
    torch.testing.assert_close(net(), (v @ w1.T + b1).relu() @ w2.T + b2)
    assert v.shape == (7, 5) and w1.shape == w2.shape == (5, 5)
    plain = fedtgp.PrototypeNet(7, 5, no_mlp=True)
    assert plain().equal(plain.vectors) and len(list(plain.parameters())) == 1


def test_fedlsa_anchor_net():
    """Θ is Linear, ReLU, Linear; anchors have length 1."""
    net = fedlsa.AnchorNet(7, 6, 5)
    R, w1, b1, w2, b2 = net.parameters()
    A = (R @ w1.T + b1).relu() @ w2.T + b2
    torch.testing.assert_close(net(), A / A.norm(dim=1, keepdim=True))
    assert R.shape == (7, 6) and w1.shape == (6, 6) and w2.shape == (5, 6)


def test_fedtgp_eq10_server_update():
    """The server trains by plain SGD, on uploaded prototypes alone."""
    net = fedtgp.PrototypeNet(4, 3, no_mlp=False)
    again = copy.deepcopy(net)
    uploads = torch.randn(3, 4, 3)
    owned = torch.tensor([[1, 0, 1, 0], [0, 0, 1, 1], [1, 0, 0, 0]]) > 0
    args = SimpleNamespace(seed=5, server_epochs=3, batch_size=2, lr=0.1, momentum=0.9, weight_decay=0.01)
    prototypes, mean_loss = fedtgp.server_update(net, uploads, owned, 0.8, 7, args)

    p, labels = uploads[[0, 0, 1, 1, 2], [0, 2, 2, 3, 0]], torch.tensor([0, 2, 2, 3, 0])
    rng = common.generator(5, "server", 7)
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1)  # no momentum
    for _ in range(3):
        last_epoch = []
        for index in np.split(rng.permutation(5), [2, 4]):
            loss = fedtgp.margin_contrastive(p[index], labels[index], again(), 0.8)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            last_epoch.append(loss.item())
    torch.testing.assert_close(prototypes, again().detach())
    assert mean_loss.item() == pytest.approx(np.mean(last_epoch))


def test_fedlsa_eq5_server_update():
    """Both terms train the anchors; the classifier stays frozen and gets no gradients."""
    net, classifier = fedlsa.AnchorNet(4, 3, 3), torch.nn.Linear(3, 4)
    again = copy.deepcopy(net)
    args = SimpleNamespace(server_steps=3, alpha=0.4, tau=0.2, lr=0.1, momentum=0.9, weight_decay=0.01)
    frozen = copy.deepcopy(classifier.state_dict())
    anchors, last_loss = fedlsa.server_update(net, classifier, args)
    torch.testing.assert_close(dict(classifier.state_dict()), dict(frozen), rtol=0, atol=0)
    assert classifier.weight.grad is None

    optimizer = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(3):
        loss = fedlsa.anchor_classification(again(), classifier)
        loss = loss + 0.4 * fedlsa.anchor_separation(again(), 0.2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(anchors, again().detach())
    torch.testing.assert_close(last_loss, loss.detach())


def test_fedsa_make_anchors():
    """A is normal; "mlp" adds Linear, BatchNorm and ReLU, twice."""
    anchors = {}
    for projection in ("none", "linear", "mlp"):
        with common.seeded(0, "anchors"):
            anchors[projection] = fedsa.make_anchors(40, 3, projection)
    with common.seeded(0, "anchors"):
        A = torch.randn(40, 3)
        layers = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]
    torch.testing.assert_close(anchors["none"], A)
    torch.testing.assert_close(anchors["linear"], layers[0](A).detach())
    for layer in layers:
        A = layer(A)
        A = ((A - A.mean(0)) / (A.var(0, unbiased=False) + 1e-5).sqrt()).relu()
    torch.testing.assert_close(anchors["mlp"], A.detach())
