"""What several papers compute, a second time: slow loops over numbers, written from the papers and not from the
scripts. Both test_equations.py and test_rounds.py compare with these."""

import itertools
import math

import numpy as np


# --- numbers and vectors --------------------------------------------------------------------------

def mean(values):
    return sum(values) / len(values) if len(values) else 0.0  # over nothing: 0


def dot(a, b):
    return sum(u * v for u, v in zip(a, b, strict=True))


def unit(a):
    norm = math.sqrt(dot(a, a))
    return [v / norm for v in a] if norm else list(a)  # a zero vector stays 0


def cosine(a, b):
    return dot(unit(a), unit(b))


def squares(a, b):
    return sum((u - v) ** 2 for u, v in zip(a, b, strict=True))


def euclidean(a, b):
    return math.sqrt(squares(a, b))


def mse(a, b):
    return squares(a, b) / len(a)


def linear(w, b, z):
    return [dot(row, z) + v for row, v in zip(w, b, strict=True)]


def cross_entropy(logits, c):
    return -math.log(math.exp(logits[c]) / sum(math.exp(v) for v in logits))


def weighted_mean(vectors, weights):
    """Σ w v / Σ w."""
    total = np.zeros(len(vectors[0]))
    for v, w in zip(vectors, weights):
        for i, value in enumerate(v):
            total[i] += w * value
    return total / sum(weights)


# --- margins --------------------------------------------------------------------------------------

def average_margin(points):
    """FedSA Eq. 6."""
    N = len(points)
    return sum(euclidean(a, b) for a, b in itertools.permutations(points, 2)) / (N - 1) ** 2 if N > 1 else 0.0


def nearest_margins(points):
    return [min(euclidean(a, b) for j, b in enumerate(points) if j != i) for i, a in enumerate(points)]


# --- FINCH ----------------------------------------------------------------------------------------

def groups_of(x):
    """One pass: i and its first neighbour κ(i) belong together."""
    group = list(range(len(x)))
    for i in range(len(x)):
        others = [j for j in range(len(x)) if j != i]
        if others:
            nearest = max(others, key=lambda j: cosine(x[i], x[j]))
            pair = group[i], group[nearest]
            group = [min(pair) if g in pair else g for g in group]
    return [[i for i in range(len(x)) if group[i] == g] for g in sorted(set(group))]


def finch(x, w, level="last"):
    """FINCH*: weighted means of groups, and again, until one cluster would remain. The very first pass counts."""
    x, w, first = list(x), list(w), True
    while len(x) > 1 and (first or level == "last"):
        groups = groups_of(x)
        if len(groups) == 1 and not first:
            break
        x = [weighted_mean([x[i] for i in g], [w[i] for i in g]) for g in groups]
        w = [sum(w[i] for i in g) for g in groups]
        first = False
    return x, w
