"""Exercise 4: how far apart the server's vectors are, and how far features are from them. Training is unchanged; the
last round prints two more numbers.

    python .github/class/stars.py fedtgp.py
"""

import runpy
import statistics
import sys
from pathlib import Path

import torch

if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
    sys.exit("usage: python .github/class/stars.py SCRIPT [FLAGS], in the folder of common.py")
sys.path.insert(0, ".")  # the folder of common.py, where the command is typed
import common
from common import extract, margins

as_before = common.evaluate_personal


def evaluate_personal(clients, prototypes, t, args, **more):
    """As before. A star is a vector of the server. In the last round it prints:
    star_margin  median distance from a star to its nearest other star
    own_star     mean distance from a test image's feature to the star of its class"""
    scores = as_before(clients, prototypes, t, args, **more)
    if t < args.rounds:
        return scores
    own = []
    for client in clients:
        z = extract(client.net, client.test.x)
        own.append((z - prototypes[client.test.y]).norm(dim=1))
    classes = torch.arange(len(prototypes), device=prototypes.device)
    star_margin = statistics.median(margins(prototypes, classes, len(prototypes)))
    print(f"star_margin {star_margin:.2f}  own_star {torch.cat(own).mean():.2f}")
    return scores


common.evaluate_personal = evaluate_personal  # the script, run by the next line, imports ours instead
runpy.run_path(sys.argv.pop(1), run_name="__main__")
