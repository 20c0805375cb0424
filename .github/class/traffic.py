"""Exercise 7: accuracy over the floats sent so far. Draws traffic.png beside the first folder, a line for each run, and
prints the sums after half of the rounds and at the end.

    python .github/class/traffic.py runs/fedfm-*
"""

import csv
import sys
from pathlib import Path

from matplotlib.figure import Figure

figure = Figure(figsize=(7, 4.5), layout="constrained")
axis = figure.subplots()
folders = [Path(name) for name in sys.argv[1:] if Path(name, "log.csv").exists()]
if not folders:
    sys.exit("no folder with a log.csv: run the commands of exercise 7 first")
colours = {}  # {folder without the seed: colour}
for folder in folders:
    sent, total, accuracy = [], 0, []
    for row in csv.DictReader(open(folder / "log.csv")):
        total += int(row["up"]) + int(row["down"])
        sent.append(total / 1e6)
        accuracy.append(float(row["acc_test"]))
    name, _, seed = folder.name.rpartition("-s")
    label = None if name in colours else name
    colours.setdefault(name, f"C{len(colours)}")
    axis.plot(sent, accuracy, color=colours[name], marker=".", label=label)
    half = len(sent) // 2 - 1
    print(f"{name}, seed {seed}: {sent[half]:.1f} million floats, {accuracy[half]:.1f} %; at the end "
          f"{sent[-1]:.1f} million, {accuracy[-1]:.1f} %")
axis.set(xlabel="floats sent so far, up and down (millions)", ylabel="accuracy (%)")
axis.legend()
figure.savefig(folders[0].parent / "traffic.png", dpi=120)
print(f"drawn in {folders[0].parent / 'traffic.png'}")
