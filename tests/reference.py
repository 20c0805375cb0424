"""What several equations need, computed a second time: numpy and slow loops, written from the papers."""

import numpy as np


def weighted_mean(vectors, weights):
    """Σ w v / Σ w."""
    return np.average(vectors, axis=0, weights=weights)


def euclidean(a, b):
    return np.sqrt(np.sum((a - b) ** 2))


def unit(a):
    """a / |a|; a zero vector stays 0."""
    norm = np.sqrt(a @ a)
    if norm == 0:
        return a
    return a / norm


def cosine(a, b):
    return unit(a) @ unit(b)


def cross_entropy(logits, c):
    return np.log(np.sum(np.exp(logits))) - logits[c]


def first_neighbours(x):
    """One pass of FINCH: each vector joins the one with the largest cosine -> cluster numbers (N,)."""
    n = len(x)
    cluster = np.arange(n)
    for i in range(n):
        others = [j for j in range(n) if j != i]
        if others:
            nearest = max(others, key=lambda j: cosine(x[i], x[j]))
            cluster[cluster == cluster[nearest]] = cluster[i]
    return np.unique(cluster, return_inverse=True)[1]


def means_of(x, cluster, weights):
    """The weighted mean of each cluster's vectors."""
    return np.array([weighted_mean(x[cluster == j], weights[cluster == j]) for j in range(cluster.max() + 1)])


def finch(x, weights):
    """Merge clusters by their means again and again, until one would remain. The first pass is kept even if it leaves
    one cluster."""
    cluster = first_neighbours(x)
    while cluster.max() > 0:
        coarser = first_neighbours(means_of(x, cluster, weights))[cluster]
        if coarser.max() == 0:
            break
        cluster = coarser
    return cluster
