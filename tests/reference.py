"""What several equations need, computed a second time: slow loops over numbers, written from the papers."""

import itertools
import math

import numpy as np
import torch


# --- numbers and vectors --------------------------------------------------------------------------

def mean(values):
    """0 over nothing."""
    return sum(values) / len(values) if len(values) else 0.0


def weighted_mean(vectors, weights):
    """Σ w v / Σ w."""
    total = np.zeros(len(vectors[0]))
    for vector, weight in zip(vectors, weights, strict=True):
        total += weight * np.asarray(vector)
    return total / sum(weights)


def dot(a, b):
    return sum(u * v for u, v in zip(a, b, strict=True))


def unit(a):
    """a / |a|; a zero vector stays 0."""
    norm = math.sqrt(dot(a, a))
    return [v / norm for v in a] if norm else list(a)


def cosine(a, b):
    return dot(unit(a), unit(b))


def squares(a, b):
    return sum((u - v) ** 2 for u, v in zip(a, b, strict=True))


def euclidean(a, b):
    return math.sqrt(squares(a, b))


def mse(a, b):
    return squares(a, b) / len(a)


def linear(weight, bias, z):
    return [dot(row, z) + b for row, b in zip(weight, bias, strict=True)]


def cross_entropy(logits, c):
    return -math.log(math.exp(logits[c]) / sum(math.exp(v) for v in logits))


# --- margins --------------------------------------------------------------------------------------

def average_margin(points):
    """FedSA Eq. 6."""
    N = len(points)
    if N == 1:
        return 0.0  # where Eq. 6 is 0/0
    return sum(euclidean(a, b) for a, b in itertools.permutations(points, 2)) / (N - 1) ** 2


# --- FINCH ----------------------------------------------------------------------------------------

def groups_of(x):
    """One pass: i and its first neighbour belong together -> [[i, ...], ...]."""
    group = list(range(len(x)))
    for i in range(len(x)):
        others = [j for j in range(len(x)) if j != i]
        if others:
            nearest = max(others, key=lambda j: cosine(x[i], x[j]))
            pair = group[i], group[nearest]
            group = [min(pair) if g in pair else g for g in group]
    return [[i for i in range(len(x)) if group[i] == g] for g in sorted(set(group))]


def merged(x, sizes):
    """Weighted means of the groups, and their sizes."""
    groups = groups_of(x)
    means = [weighted_mean([x[i] for i in g], [sizes[i] for i in g]) for g in groups]
    return means, [sum(sizes[i] for i in g) for g in groups]


def finch(x, sizes):
    """Merge again and again, until one cluster would remain. The very first pass counts."""
    means, sizes = merged(x, sizes)
    while len(means) > 1:
        coarser, coarser_sizes = merged(means, sizes)
        if len(coarser) == 1:
            break
        means, sizes = coarser, coarser_sizes
    return means, sizes


# --- training -------------------------------------------------------------------------------------

def sgd_step(net, loss, speeds, lr, momentum=0.0, decay=0.0):
    """One step by hand. speeds {name: tensor}: empty before the first step."""
    parameters = dict(net.named_parameters())
    slopes = torch.autograd.grad(loss, list(parameters.values()))
    for (name, weight), slope in zip(parameters.items(), slopes):
        slope = slope + decay * weight.detach()
        speeds[name] = momentum * speeds.get(name, 0.0) + slope
        weight.data -= lr * speeds[name]
