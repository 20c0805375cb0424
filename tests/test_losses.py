"""Every equation on small cases worked by hand."""

from math import exp, log, log1p, sqrt
from types import SimpleNamespace

import pytest
import torch

import common, fedfm, fedlsa, fedplcc, fedproto, fedsa, fedtgp

double = lambda rows: torch.tensor(rows, dtype=torch.float64)
near = lambda value: pytest.approx(value, rel=1e-12, abs=1e-12)

def test_losses_of_samples():
    """Two samples and the vectors of two classes: own distances 4 and 1, own cosines 0.6 and 1."""
    z, y, P = double([[3, 4], [0, 2]]), torch.tensor([0, 1]), double([[3, 0], [0, 1]])
    both, second, none = torch.tensor([[True, True], [False, True], [False, False]])
    P2 = double([[1e6, 1e6], [0, 1]])  # what stands in an absent row must not matter
    for module in (fedproto, fedtgp):
        for how, values in dict(euclidean=[2.5, 1, 0], mse=[4.25, 0.5, 0]).items():
            cases = (P, both), (P2, second), (P2, none)
            assert [module.prototype_distance(z, y, *case, how) for case in cases] == values
    assert [fedsa.regularization(z, y, P, how) for how in ("euclidean", "mse")] == [2.5, 4.25]
    for loss in (fedtgp.margin_contrastive, fedsa.margin_contrastive):  # the other distances: √18 and √13
        for margin in (0, 2):
            want = (log1p(exp(4 + margin - sqrt(18))) + log1p(exp(1 + margin - sqrt(13)))) / 2
            assert loss(z, y, P, double(margin)) == near(want)
    want = (log1p(exp((0.8 - 0.6) / 0.5)) + log1p(exp((0 - 1) / 0.5))) / 2
    assert fedfm.contrastive_guiding(z, y, P, both, 0.5) == near(want)
    assert fedfm.squared_distance(z, y, P, both) == near((2 - 2 * 0.6) / 2)
    for case in ((P2, second), (P, none)):  # the second sample is where it should be
        assert fedfm.contrastive_guiding(z, y, *case, 0.5) == fedfm.squared_distance(z, y, *case) == 0
    h, A = double([[0.6, 0.8], [0, 1]]), double([[1, 0], [0, 1]])
    assert fedlsa.compactness(h, y, A, 0.5) == near(want)
    assert fedlsa.compactness(h, y, A, 0.5, "l2") == near(sqrt(0.4 ** 2 + 0.8 ** 2) / 2)

def test_means_over_clients():
    """Two clients, one feature. Class 0: 2 (one image), 4 (three); class 1: the second's 6; class 2: none."""
    u, n = double([[[2], [1e9], [1e9]], [[4], [6], [1e9]]]), double([[1, 0, 0], [3, 5, 0]])
    for module in (fedproto, fedsa):
        mean, seen = module.weighted_mean(u, n)
        assert mean[:2].tolist() == [[3.5], [6]] and seen.tolist() == [True, True, False]
    old, known = double([[9], [8], [7]]), torch.tensor([True, True, True])
    assert fedfm.aggregate_anchors(u, n, old, known)[0].tolist() == [[3.5], [6], [7]]
    assert fedfm.aggregate_anchors(u, n, old, known, "uniform")[0].tolist() == [[3], [(6 + 8) / 2], [7]]
    new, now = fedfm.aggregate_anchors(u, n, old, ~known, "uniform")
    assert new.tolist() == [[3], [6], [7]] and now.tolist() == [True, True, False]
    assert fedsa.ema(old, old * 0, torch.tensor([True, False, True]), 0.5).tolist() == [[4.5], [8], [3.5]]

def test_margins():
    """Class centres at 0, 3 and 4 on a line: the largest distance is 4, the largest to a nearest one 3."""
    u = torch.tensor([[[1.0], [3.0], [1e9], [1e9]], [[-1.0], [1e9], [4.0], [1e9]]])
    owns = u < 1e6
    for rule, tau, want in (("pairwise", 9.0, 4), ("nearest", 9.0, 3), ("pairwise", 2.0, 2),
                            ("nearest", 2.0, 2), ("fixed", 9.0, 9), ("none", 9.0, 0)):
        args = SimpleNamespace(margin=rule, tau=tau)
        assert fedtgp.adaptive_margin(u, owns[..., 0], args) == want
        assert rule == "fixed" or fedtgp.adaptive_margin(u[:, :1], owns[:, :1, 0], args) == 0  # of one class
    for owned, want in (([1, 1, 1], 16 / 4), ([1, 0, 1], 8), ([0, 1, 0], 0), ([0, 0, 0], 0)):
        assert fedsa.average_margin(double([[0], [3], [4]])[torch.tensor(owned) > 0]) == want

def test_losses_of_anchors():
    A, zero = double([[1, 0, 0], [0, 1, 0], [0, 0, 1]]), double([0, 0, 0])
    for scale, want in ((0, log(3)), (2, log(1 + 2 * exp(-2)))):  # the logits' entry for a vector's own class
        assert fedlsa.anchor_classification(A, scale * A, zero) == near(want)
        assert fedsa.classifier_calibration(lambda a: scale * a, A) == near(want)
    assert [fedlsa.anchor_separation(a, 0.1) for a in (A, A[[0, 0]])] == near([0, 10])
    assert fedlsa.anchor_separation(A[:1], 0.1) == 0  # nothing to keep away from
    assert fedlsa.anchor_separation(A[[0, 0]].float(), 0.001).isfinite()  # exp(1000) is not

def test_clusters():
    """Directions of 0, 1, 20, 22, 90, 93 degrees: each has the other of its pair as neighbour. Means of the
    first two pairs have each other as neighbours, the third's is the second: the next pass merges all."""
    degrees, w = double([0, 1, 20, 22, 90, 93]), double([1, 1, 3, 1, 1, 1])
    x = torch.stack([degrees.deg2rad().cos(), degrees.deg2rad().sin()], 1)
    assert fedplcc.first_neighbour_clusters(x).tolist() == [0, 0, 1, 1, 2, 2]
    for level in ("last", "first"):
        means, sums = fedplcc.finch(x, w, level)
        assert sums.tolist() == [2, 4, 2] and torch.allclose(means[1], (3 * x[2] + x[3]) / 4)
    assert [len(fedplcc.finch(x[:n], w[:n])[0]) for n in (1, 2, 3, 4)] == [1, 1, 1, 2]  # a first merge counts
    both = torch.cat([x, -7 * x])  # the same on the other side
    assert [len(fedplcc.finch(both, torch.cat([w, w]), level)[0]) for level in ("first", "last")] == [6, 2]
    for same in (x * 0, x[[0] * 6]):  # ties: whatever the clusters, they add up
        means, sums = fedplcc.finch(same, w)
        assert torch.allclose(sums @ means, w @ same)
    args = SimpleNamespace(classes=4, finch_level="last", uniform_weights=False)
    upload = x.float(), torch.tensor([0, 0, 0, 0, 3, 3]), w.float()
    vectors, classes, weights = fedplcc.global_prototypes([upload], args)
    assert classes.tolist() == [0, 0, 3] and torch.allclose(weights, torch.tensor([1 / 3, 2 / 3, 1]))

def test_losses_over_clusters():
    P, W = double([[2, 0], [0, 3], [1, sqrt(3)], [-1, 0]]), double([0.2, 0.5, 0.8, 0.5])
    s = fedplcc.similarity(double([[5, 0], [0.1, 0]]), P, 0.5)  # cosines 1, 0, 1/2 and -1
    of = [1, 1e-3, sqrt(0.5), 1e-3]
    assert s.tolist() == [near(of)] * 2
    classes, y = torch.tensor([0, 1, 0, 1]), torch.tensor([0, 7])  # nobody has class 7
    e = [exp(v / 0.3) * w for v, w in zip(of, W.tolist())]
    assert fedplcc.contrast(s, y, classes, W, 0.3) == near(-log((e[0] + e[2]) / sum(e)))
    assert fedplcc.correlation(s, y, classes, W, 0.5) == near(-0.8 * sqrt(0.5))  # 0.2 · 1 is less
    assert fedplcc.correlation(s, y, classes, W, 0.51) == near(-0.8 * sqrt(0.5) - 0.2)

def test_class_means_and_nearest_prototype():
    modes = []
    net = SimpleNamespace(eval=lambda: modes.append("eval"), features=lambda x: x.float(), feature_dim=1)
    data = common.Samples(torch.tensor([[1], [2], [6], [50]]).byte(), torch.tensor([0, 2, 2, 3]))
    means, counts = common.class_means(net, data, SimpleNamespace(classes=5))
    assert means.tolist() == [[1], [0], [4], [50], [0]] and counts.tolist() == [1, 0, 2, 1, 0] and modes
    z = double([[0], [2], [3], [26], [28]]).float()
    assert common.nearest_prototype(z, means, counts > 0).tolist() == [0, 0, 2, 2, 3]
    far = torch.randn(40, 64) * 0.1 + 1000  # far from the origin and close together
    assert common.nearest_prototype(far + 0.001, far, torch.ones(40) > 0).tolist() == list(range(40))
    away = common.distances(double([[3, 4]]), double([[0, 0], [3, 4 + 1e-9]]))
    assert away[0].tolist() == pytest.approx([5, 1e-9])
