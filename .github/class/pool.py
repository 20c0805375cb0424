"""The runs of a whole class in one table. logs/ada, logs/ben ... are copies of everybody's folder `runs`. A row is a
name, a seed and an accuracy of the last round: how many laptops ran it, and the lowest, the median and the highest.

    python .github/class/pool.py logs/*/*
"""

import csv
import json
import re
import statistics
import sys
from pathlib import Path

found = {}  # {(script and name, seed, accuracy): [value on each laptop]}
for folder in map(Path, sys.argv[1:]):
    if not (folder / "log.csv").exists():
        continue
    about = json.loads((folder / "args.json").read_text())
    last = list(csv.DictReader(open(folder / "log.csv")))[-1]
    if int(last["round"]) < about["rounds"]:
        print(f"left out, it has not ended: {folder}")
        continue
    run = re.sub(rf"-s{about['seed']}(-\d+)?$", "", folder.name)
    for column, value in last.items():
        if column.startswith("acc_"):
            found.setdefault((run, about["seed"], column.removeprefix("acc_")), []).append(float(value))

print("| run | seed | accuracy by | laptops | lowest | median | highest |\n|---|---|---|---|---|---|---|")
for (run, seed, kind), values in sorted(found.items()):
    middle = statistics.median(values)
    print(f"| {run} | {seed} | {kind} | {len(values)} | {min(values):.1f} | {middle:.1f} | {max(values):.1f} |")
