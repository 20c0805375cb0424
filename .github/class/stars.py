"""Exercise 4: the server's vectors against plain averages of the same clients' class means. Training is unchanged; the
last round prints four more numbers.

    python .github/class/stars.py fedtgp.py
"""

import runpy
import statistics
import sys

import torch

sys.path.insert(0, ".")  # the folder of common.py, where the command is typed
import common
from common import class_means, distances, extract, margins, nearest_prototype
from fedproto import weighted_mean

as_before = common.evaluate_personal


def evaluate_personal(clients, prototypes, t, args, **more):
    """As before. A star is a vector of the server. In the last round also:
    plain        accuracy in % by the weighted averages of the clients' class means, instead of the stars
    star_margin  median distance from a star to its nearest other star
    mean_margin  the same for the averages
    own_star     mean distance from a test image's feature to the star of its class"""
    scores = as_before(clients, prototypes, t, args, **more)
    if t < args.rounds:
        return scores
    pairs = [class_means(client.net, client.train) for client in clients]
    means, seen = weighted_mean(torch.stack([m for m, _ in pairs]), torch.stack([n for _, n in pairs]))
    right, own = 0, []
    for client in clients:
        z = extract(client.net, client.test.x)
        right += (nearest_prototype(z, means, seen) == client.test.y).sum().item()
        own.append((z - prototypes[client.test.y]).norm(dim=1))
    classes = torch.arange(len(means), device=means.device)
    own = torch.cat(own)
    scores["plain"] = 100 * right / len(own)
    scores["star_margin"] = statistics.median(margins(prototypes, classes, len(means)))
    scores["mean_margin"] = statistics.median(margins(means, classes, len(means)))
    scores["own_star"] = own.mean().item()
    return scores


common.evaluate_personal = evaluate_personal
runpy.run_path(sys.argv.pop(1), run_name="__main__")
