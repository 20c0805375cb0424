"""Draws ../../cifar10-device.png from the logs beside this file."""

import csv
import re
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
LINES = [  # log, label, colour, line
    ("fedproto-off-s0", "fedproto.py --lam 0: no guidance", "grey", "-"),
    ("fedproto-s0", "fedproto.py", "C0", "-"),
    ("fedproto-mse-uniform-s0", "fedproto.py --distance mse --aggregate uniform", "C0", "--"),
    ("htfllib-fedproto-s0.log", "FedProto in HtFLlib, other participants", "C0", ":"),
    ("fedtgp-s0", "fedtgp.py", "C2", "-"),
    ("fedtgp-mse-s0", "fedtgp.py --distance mse", "C2", "--"),
    ("fedsa-s0", "fedsa.py", "C1", "-"),
    ("fedsa-mcl1-s0", "fedsa.py --lam-mcl 1", "C1", "--"),
    ("fedsa-official-s0.log", "FedSA, its authors' code", "C1", ":")]
PAPER = {"FedProto": (87.49, "C0"), "FedTGP": (87.98, "C2"), "FedSA": (88.78, "C1")}  # FedSA Table 1


def read(log):
    """{"classifier": [(round, accuracy)], "prototype": ..., "anchor": ...} of a run folder or a text log."""
    if log.endswith(".log"):
        rows = [dict(reversed(re.findall(r"(\w+) ([\d.]+)", line))) for line in open(HERE / log)]
    else:
        file = open(HERE / log / "log.csv")
        rows = [{k.removeprefix("acc_"): v for k, v in row.items()} for row in csv.DictReader(file)]
    kinds = [kind for kind in ("classifier", "prototype", "anchor") if kind in rows[0]]
    rows = [row for row in rows if row[kinds[0]] != "nan" and row["round"] != "0"]
    return {kind: [(int(row["round"]), float(row[kind])) for row in rows] for kind in kinds}


figure, axes = plt.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
for log, label, colour, line in LINES:
    if not (HERE / log).exists():
        continue
    points = read(log)
    for axis, kind in zip(axes, ("classifier", "anchor" if "anchor" in points else "prototype")):
        axis.plot(*zip(*points[kind]), line, color=colour, label=label)
for axis, title in zip(axes, ("by classifier", "by nearest prototype; FedSA by nearest anchor")):
    for name, (accuracy, colour) in PAPER.items():
        axis.plot(1000, accuracy, "*", color=colour, markersize=12, clip_on=False, label=f"the paper's {name}")
    axis.set(title=title, xlabel="round", xlim=(0, 1000), ylim=(60 if "prototype" in title else 76, 90))
    axis.grid(alpha=0.25)
axes[0].set_ylabel("accuracy on own test images (%)")
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False,
              fontsize="small")
figure.savefig(HERE.parents[1] / "cifar10-device.png", dpi=110)
