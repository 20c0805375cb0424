"""Usual mistakes in the functions that the lab sheets ask for: each fails under a sentence that names it.

Small cases by hand. test_equations.py checks the equations on larger ones."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import common, fedplcc, fedproto, fedsa
from reference import cross_entropy
from test_equations import TRIANGLE, pixel_net, pixels, tensor

pytestmark = pytest.mark.timeout(30)


def name_the_mistake(got, right, mistakes):
    """Fail with the sentence whose wrong result `got` is. mistakes: {sentence: wrong result}."""
    __tracebackhide__ = True
    got = np.asarray(torch.as_tensor(got).detach())
    if got.shape != np.shape(right):
        raise AssertionError(f"the result has shape {got.shape} instead of {np.shape(right)}")
    if not np.isfinite(got).all():
        raise AssertionError("nan or inf: something is divided by 0. The docstring says what to return there")
    for sentence, wrong in mistakes.items():
        if np.allclose(got, wrong):
            raise AssertionError(sentence)
    np.testing.assert_allclose(got, right, rtol=1e-5, err_msg="none of the usual mistakes, but another result:")


# --- FedProto ---------------------------------------------------------------------------------------

def test_eq2_class_means():
    """One feature: the value of a pixel. Class 2 has two images, classes 1 and 4 have none."""
    x = np.array([1, 2, 6, 50])
    means, counts = common.class_means(pixel_net(5).train(), pixels(x.tolist(), [0, 2, 2, 3]))
    of_batch = (x - x.mean()) / x.std()
    name_the_mistake(means.flatten(), [1, 0, 4, 50, 0], {
        "the sums of a class's features are not divided by its number of images": [1, 0, 8, 50, 0],
        "the sums are divided by the number of all images, not by that of the class": [1 / 4, 0, 8 / 4, 50 / 4, 0],
        "the model is in train mode; `extract` puts it in eval mode":
            [of_batch[0], 0, of_batch[1:3].mean(), of_batch[3], 0],
    })
    assert counts.tolist() == [1, 0, 2, 1, 0], "counts are a client's numbers of images of each class"
    assert not means.requires_grad, "the means carry a gradient; `extract` computes features without one"


def test_fedproto_eq3_weighted_mean():
    """Class 0: both clients, with one image and three. Class 1: only the first. Class 2: nobody."""
    client_prototypes, counts = tensor([[2, 20, 0], [6, 0, 0]])[:, :, None], torch.tensor([[1, 4, 0], [3, 0, 0]])
    averages, uploaded = fedproto.weighted_mean(client_prototypes, counts)
    assert uploaded.tolist() == [True, True, False], "which classes were uploaded? Those that some client has"
    name_the_mistake(averages[:, 0], [5, 20, 0], {
        "all clients weigh the same: the class counts are missing": [4, 20, 0],
        "a client that lacks the class counts in its mean": [4, 10, 0],
        "the weighted sum is not divided": [20, 80, 0],
        "the weighted sum is divided by the number of clients, not by the sum of the counts": [10, 40, 0],
        "the weighted sum is divided by the number of clients that have the class": [10, 80, 0],
        "the factor 1/|N_c| is still there; the docstring leaves it out": [2.5, 20, 0],
        "each client is weighted by all its images, not by those of the class": [(5 * 2 + 3 * 6) / 8, 20, 0],
    })


def test_fedproto_eq4_prototype_distance():
    """Samples at the origin. The prototypes of classes 0 and 1 are 5 and 2 away; class 2 has none."""
    z, y, known = torch.zeros(3, 2), torch.tensor([0, 1, 2]), torch.tensor([True, True, False])
    prototypes = torch.tensor([[3.0, 4.0], [0.0, 2.0], [100.0, 0.0]])
    name_the_mistake(fedproto.prototype_distance(z, y, prototypes, known, "euclidean"), (5 + 2) / 2, {
        "a sum over the samples, not a mean": 5 + 2,
        "the mean divides by all samples; only those whose class has a prototype count": (5 + 2) / 3,
        "samples whose class has no prototype are not left out": (5 + 2 + 100) / 3,
        "euclidean: this is the squared distance": (25 + 4) / 2,
    })
    name_the_mistake(fedproto.prototype_distance(z, y, prototypes, known, "mse"), (25 / 2 + 4 / 2) / 2, {
        "mse: the squared distance is not divided by D": (25 + 4) / 2,
        "mse: the mean divides by all samples; only those whose class has a prototype count": (25 / 2 + 4 / 2) / 3,
        "mse: this is the distance, not its square divided by D": (5 + 2) / 2,
    })
    name_the_mistake(fedproto.prototype_distance(z, y, prototypes, known & False, "euclidean"), 0, {
        "samples whose class has no prototype are not left out": (5 + 2 + 100) / 3})


# --- FedSA ------------------------------------------------------------------------------------------

def test_fedsa_eq6_average_margin():
    """A triangle with sides 3, 4 and 5: over a ≠ b each side counts twice, so the sum is 24."""
    name_the_mistake(fedsa.average_margin(TRIANGLE), 24 / (3 - 1) ** 2, {
        "this is the mean distance; Eq. 6 divides by (N − 1)², not by N (N − 1)": 24 / 6,
        "this divides by N²; Eq. 6 divides by (N − 1)²": 24 / 9,
        "each pair counts once; the sum over a ≠ b counts (a, b) and (b, a)": 12 / 4,
        "the sum of the distances is not divided": 24,
        "the distances are squared": 2 * (9 + 16 + 25) / 4,
    })
    name_the_mistake(fedsa.average_margin(TRIANGLE[:1]), 0, {})


def test_fedsa_eq7_margin_contrastive():
    """Two samples at the origin, of classes 1 and 2. The anchors are 3, 4 and 5 away, the margin is 2."""
    anchors = torch.tensor([[3.0, 0.0], [0.0, 4.0], [3.0, 4.0]])
    got = fedsa.margin_contrastive(torch.zeros(2, 2), torch.tensor([1, 2]), anchors, torch.tensor(2.0))

    def loss(first, second):
        """The loss if the three anchors were at these distances from the two samples."""
        return (cross_entropy(-np.array(first), 1) + cross_entropy(-np.array(second), 2)) / 2
    right = loss([3, 6, 5], [3, 4, 7])
    wrong_class = "the margin is added for a class that is not the sample's"
    name_the_mistake(got, right, {
        "the margin is subtracted for the true class, or added for all the others: it must make the true class's "
        "anchor look farther away": loss([3, 2, 5], [3, 4, 3]),
        "the margin is missing, or it is added for all classes, where it cancels": loss([3, 4, 5], [3, 4, 5]),
        "near anchors need large logits: the sign is wrong": loss([-3, -6, -5], [-3, -4, -7]),
        "near anchors need large logits: the sign of the distance is wrong": loss([-3, -2, -5], [-3, -4, -3]),
        "the distances are squared": loss([9, 18, 25], [9, 16, 27]),
        "a sum over the samples, not a mean": 2 * right,
        f"{wrong_class}: for all classes of the batch": loss([3, 6, 7], [3, 6, 7]),
        f"{wrong_class}: class y + 1": loss([3, 4, 7], [5, 4, 5]),
        f"{wrong_class}: class y - 1, or the sample's number in the batch": loss([5, 4, 5], [3, 6, 5]),
        f"{wrong_class}: always class 0": loss([5, 4, 5], [5, 4, 5]),
        f"{wrong_class}: always that of the first sample": loss([3, 6, 5], [3, 6, 5]),
        f"{wrong_class}: always that of the last sample": loss([3, 4, 7], [3, 4, 7]),
    })


def test_fedsa_eq10_ema():
    """Two classes, of which only the first was uploaded."""
    old, averages, uploaded = tensor([[1], [3]]), tensor([[11], [13]]), torch.tensor([True, False])
    name_the_mistake(fedsa.ema(old, averages, uploaded, 0.7), [[4], [3]], {
        "α weighs the average; it must weigh the old anchor, which then moves slowly": [[8], [3]],
        "the anchor of a class that no participant uploaded has moved": [[4], [6]],
        "α weighs the average, and the anchor of a class that no participant uploaded has moved": [[8], [10]],
        "the anchors do not move": [[1], [3]],
    })


# --- FedPLCC ----------------------------------------------------------------------------------------

def numbered(cluster):
    """Clusters numbered in the order in which they appear; FINCH may number them in any order."""
    seen = list(dict.fromkeys(cluster.tolist()))
    return [seen.index(j) for j in cluster.tolist()]


def linked_to(nearest):
    return numbered(fedplcc.connected_components(nearest))


def test_fedplcc_finch_first_neighbour_clusters():
    """Three pairs of near directions, of very different lengths."""
    degrees, lengths = tensor([0, 1, 20, 22, 90, 93]).deg2rad(), tensor([1, 2, 30, 4, 5, 6])
    x = torch.stack([lengths * degrees.cos(), lengths * degrees.sin()], dim=1)
    no_diagonal = torch.diag(torch.full((6,), torch.inf))
    cosine = F.normalize(x, dim=1) @ F.normalize(x, dim=1).T
    name_the_mistake(numbered(fedplcc.first_neighbour_clusters(x)), [0, 0, 1, 1, 2, 2], {
        "each vector is its own nearest: leave out the diagonal": [0, 1, 2, 3, 4, 5],
        "nearest by distance; FINCH takes the largest cosine": linked_to((torch.cdist(x, x) + no_diagonal).argmin(1)),
        "nearest by dot product; a cosine does not depend on lengths": linked_to((x @ x.T - no_diagonal).argmax(1)),
        "the smallest cosine; the nearest has the largest": linked_to(cosine.argmin(1)),
    })
    name_the_mistake(numbered(fedplcc.first_neighbour_clusters(x[:1])), [0], {})
    opposite = tensor([[1, 0], [-1, 0], [-2, 0]])
    name_the_mistake(numbered(fedplcc.first_neighbour_clusters(opposite)), [0, 0, 0], {
        "a vector opposite to all others is its own nearest: the diagonal must be lower than −1": [0, 1, 1]})


def test_fedplcc_finch_cluster_means():
    """Clusters {0, 4}, which count once and three times, and {10}, which counts five times."""
    got = fedplcc.cluster_means(tensor([[0], [4], [10]]), torch.tensor([0, 0, 1]), tensor([1, 3, 5]))
    name_the_mistake(got, [[3], [10]], {
        "times are not used: each vector counts once": [[2], [10]],
        "the sums are not divided": [[12], [50]],
        "the sums are divided by the number of vectors, not by the sum of times": [[6], [50]],
    })


def test_fedplcc_finch(monkeypatch):
    """Directions in four pairs, which form two groups. A third pass would leave one cluster."""
    degrees = tensor([0, 1, 10, 12, 90, 91, 103, 105]).deg2rad()
    x, ones = torch.stack([degrees.cos(), degrees.sin()], dim=1), torch.ones(8).double()
    one_pass, passes = fedplcc.first_neighbour_clusters, []

    def counted(x):
        passes.append(len(x))
        assert len(passes) < 20, f"finch never ends: pass after pass on {len(x)} vectors. When does the docstring stop?"
        return one_pass(x)
    monkeypatch.setattr(fedplcc, "first_neighbour_clusters", counted)
    cluster = fedplcc.finch(x, ones)
    assert len(cluster) == 8, f"{len(cluster)} numbers for 8 vectors: finch numbers the vectors' clusters"
    name_the_mistake(numbered(cluster), [0, 0, 0, 0, 1, 1, 1, 1], {
        "finch ends after its first pass": [0, 0, 1, 1, 2, 2, 3, 3],
        "finch keeps a pass that leaves one cluster; only the first pass may": [0, 0, 0, 0, 0, 0, 0, 0],
    })
    passes.clear()
    name_the_mistake(numbered(fedplcc.finch(x[:2], ones[:2])), [0, 0], {
        "the first pass is kept even if it leaves one cluster": [0, 1]})
    passes.clear()
    name_the_mistake(numbered(fedplcc.finch(x[:1], ones[:1])), [0], {})


def test_fedplcc_eq11_prototype_weights():
    """Two prototypes of class 2, two of class 0, none of class 1."""
    weights = fedplcc.prototype_weights(torch.tensor([3.0, 1.0, 4.0, 5.0]), torch.tensor([2, 0, 2, 0]))
    name_the_mistake(weights, [3 / 7, 1 / 6, 4 / 7, 5 / 6], {
        "the weights of all classes sum to 1 together; those of each class must": [3 / 13, 1 / 13, 4 / 13, 5 / 13],
        "the sizes are not divided by the number of the class's images": [3, 1, 4, 5],
        "the sizes are not used: each prototype of a class weighs the same": [1 / 2] * 4,
        "the sizes are divided by the largest of the class, not by their sum": [3 / 4, 1 / 5, 1, 1],
    })
