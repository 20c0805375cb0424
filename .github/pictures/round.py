"""Draws round.png: what guidance does to two clients' features, and how many numbers a client sends in a round.

The two panels on the left are a sketch with points drawn at random. The numbers on the right are those of ten classes:
512 features (FedLSA 128), one prototype a class (FedPLCC three), and the papers' models on 32-pixel images.

Two other pictures of this folder are `features.png` of these runs, with scikit-learn installed:
    python fedproto.py --lam 0 --name off --partition domain --clients 8 --images-per-class 20 --subset 1
    python fedsa.py --partition domain --clients 8 --images-per-class 20 --subset 1
"""

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


figure = Figure(figsize=(12, 3.8), layout="constrained")
panels = figure.subplots(1, 3, width_ratios=[1, 1, 1.5])
one = np.array([[-1.2, 0.9], [-0.4, -0.9], [1.1, 0.6]])
two = np.array([[-1.0, -0.9], [1.2, -0.7], [-0.1, 1.3]])
mean = (one + two) / 2

panels[0].set_title("a sketch: without guidance\neach client has its own space")
points(panels[0], one, "o")
points(panels[0], two, "^")

panels[1].set_title("a sketch: guidance (FedProto)\npulls to the mean of both")
points(panels[1], 0.3 * one + 0.7 * mean, "o")
points(panels[1], 0.3 * two + 0.7 * mean, "^")
stars(panels[1], mean)

for axis in panels[:2]:
    axis.set(xlim=(-2.1, 2.1), ylim=(-2.1, 2.1), xticks=[], yticks=[])
for kind, colour in enumerate(COLOURS):
    panels[0].plot([], [], "s", color=colour, label=f"class {kind}")
panels[0].plot([], [], "o", color="grey", label="client A")
panels[0].plot([], [], "^", color="grey", label="client B")
panels[1].plot([], [], "*", color="white", markeredgecolor="black", markersize=12, label="prototype at the server")
figure.legend(loc="outside lower left", ncols=6, frameon=False)

C, D = 10, 512
LSA_CNN, RESNET10, RESNET18 = 940_362, 4_910_922, 11_181_642  # weights of the models
sent = {  # method, and the model that travels: numbers up; as many go down, within one percent
    "FedProto, no model": C * (D + 1),
    "FedTGP, no model": C * D,
    "FedSA, no model": C * (D + 1),
    "FedLSA, a CNN": LSA_CNN,
    "FedPLCC, a ResNet10": RESNET10 + 3 * C * (D + 1),
    "FedFM, a ResNet18": RESNET18 + C * (D + 1),
}
axis = panels[2]
places = np.arange(len(sent))
bars = axis.barh(places, sent.values(), 0.6, color="grey")
axis.bar_label(bars, [f"{numbers:,}" for numbers in sent.values()], padding=4)
axis.set_yticks(places, sent)
axis.invert_yaxis()
axis.set(xlim=(0, 1.35 * RESNET18), xticks=[],
         title="numbers that a client sends in a round, ten classes\n(it gets as many, within one percent)")
for side in ("top", "right", "bottom"):
    axis.spines[side].set_visible(False)
figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)
