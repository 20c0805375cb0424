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


def merged(x, sizes):
    """One pass: each vector joins the one with the largest cosine -> the clusters' weighted means, and their sizes."""
    n = len(x)
    cluster = np.arange(n)
    for i in range(n):
        cosines = [cosine(x[i], x[j]) for j in range(n)]
        cosines[i] = -2  # not itself
        nearest = np.argmax(cosines)
        cluster[cluster == cluster[nearest]] = cluster[i]
    means, totals = [], []
    for number in np.unique(cluster):
        members = cluster == number
        means.append(weighted_mean(x[members], sizes[members]))
        totals.append(sum(sizes[members]))
    return np.array(means), np.array(totals)


def finch(x, sizes):
    """Merge again and again, until one cluster would remain. The first pass is kept even if it leaves one cluster."""
    means, sizes = merged(x, sizes)
    while len(means) > 1:
        coarser, coarser_sizes = merged(means, sizes)
        if len(coarser) == 1:
            break
        means, sizes = coarser, coarser_sizes
    return means, sizes
