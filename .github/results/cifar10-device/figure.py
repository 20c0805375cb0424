"""Draws ../../cifar10-device.png from the logs beside this file."""

import csv
import re
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
ROUNDS = 1000
OURS = [  # log, label, colour, line
    ("fedproto-off-s0", "fedproto.py --lam 0: no guidance", "grey", "-"),
    ("fedproto-s0", "fedproto.py", "C0", "-"),
    ("fedtgp-s0", "fedtgp.py", "C2", "-"),
    ("fedsa-s0", "fedsa.py F", "C1", "-"),
    ("fedsa-mcl1-s0", "fedsa.py F --lam-mcl 1", "C1", "--"),
    ("../cifar10-device-seeds/fedsa-letter-s0", "fedsa.py", "C3", "-")]
AUTHORS = [
    ("fedproto-partition-s0", "fedproto.py, the partition only", "C0", "--"),
    ("fedproto-theirs-s0", "fedproto.py, settings of its code", "C0", "-"),
    ("fedtgp-theirs-s0", "fedtgp.py, settings of its code", "C2", "-"),
    ("fedsa-theirs-s0", "fedsa.py F --batches fixed", "C1", "-")]
THEIRS = [
    ("htfllib-fedproto-s0.log", "FedProto in HtFLlib", "C0", "-"),
    ("fedproto-htfllib-s0", "fedproto.py, its settings", "C0", "--"),
    ("htfllib-fedtgp-s0.log", "FedTGP in HtFLlib", "C2", "-"),
    ("fedtgp-htfllib-before-s0", "fedtgp.py, its settings, --uploads before", "C2", "--"),
    ("fedsa-official-s0.log", "FedSA, its authors' code", "C1", "-"),
    ("fedsa-fixed-s0", "fedsa.py F --batches fixed", "C1", "--")]
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


figure = plt.figure(figsize=(11, 13), layout="constrained")
PARTS = [  # heading, lines, lowest accuracy left and right, stars
    ("These scripts", OURS, (76, 60), PAPER),
    ("These scripts, partition and settings of the authors' code", AUTHORS, (76, 60), PAPER),
    ("Published code, beside these scripts with its settings", THEIRS, (76, 35), {"FedSA": PAPER["FedSA"]})]
for part, (heading, lines, lowest, stars) in zip(figure.subfigures(len(PARTS), 1), PARTS):
    part.suptitle(heading)
    axes = part.subplots(1, 2)
    for log, label, colour, line in lines:
        points = read(log)
        for axis, kind in zip(axes, ("classifier", "anchor" if "anchor" in points else "prototype")):
            axis.plot(*zip(*points[kind]), line, color=colour, label=label)
    titles = "by classifier", "by nearest prototype; FedSA by nearest anchor"
    for axis, title, bottom in zip(axes, titles, lowest):
        for name, (accuracy, colour) in stars.items():
            label = f"the paper's {name}"
            axis.plot(ROUNDS, accuracy, "*", color=colour, markersize=12, clip_on=False, label=label)
        axis.set(title=title, xlabel="round", xlim=(0, ROUNDS), ylim=(bottom, 90))
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("accuracy on own test images (%)")
    part.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False,
                fontsize="small")
figure.savefig(HERE.parents[1] / "cifar10-device.png", dpi=110)
