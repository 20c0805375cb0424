"""Draws round.png, a sketch of what guidance does to two clients' features, with points drawn at random."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

rng = np.random.default_rng(0)
COLOURS = ["C0", "C1", "C2"]


def points(axis, centres, marker):
    for centre, colour in zip(centres, COLOURS):
        x, y = (np.array(centre) + 0.22 * rng.normal(size=(25, 2))).T
        axis.plot(x, y, marker, color=colour, markersize=4, alpha=0.6, markeredgecolor="none")


def stars(axis, centres):
    for (x, y), colour in zip(centres, COLOURS):
        axis.plot(x, y, "*", color=colour, markersize=18, markeredgecolor="black")


figure = Figure(figsize=(7.5, 3.9), layout="constrained")
panels = figure.subplots(1, 2)
one = np.array([[-1.2, 0.9], [-0.4, -0.9], [1.1, 0.6]])
two = np.array([[-1.0, -0.9], [1.2, -0.7], [-0.1, 1.3]])
mean = (one + two) / 2

panels[0].set_title("without guidance\neach client has a space of its own")
points(panels[0], one, "o")
points(panels[0], two, "^")

panels[1].set_title("guidance (FedProto)\npulls to the mean of both")
points(panels[1], 0.3 * one + 0.7 * mean, "o")
points(panels[1], 0.3 * two + 0.7 * mean, "^")
stars(panels[1], mean)

for axis in panels:
    axis.set(xlim=(-2.1, 2.1), ylim=(-2.1, 2.1), xticks=[], yticks=[])
for kind, colour in enumerate(COLOURS):
    panels[0].plot([], [], "s", color=colour, label=f"class {kind}")
panels[0].plot([], [], "o", color="grey", label="client A")
panels[0].plot([], [], "^", color="grey", label="client B")
panels[1].plot([], [], "*", color="white", markeredgecolor="black", markersize=12, label="prototype at the server")
figure.legend(loc="outside lower left", ncols=3, frameon=False)

figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)
