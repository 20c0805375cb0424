"""Prints the tables of the seeds: mean ± std, and leads over no guidance on the same seed, from the logs."""

import csv
import statistics
from pathlib import Path

HERE = Path(__file__).parent
ROUNDS = 1000
ROWS = [  # name in the table, folder of a seed
    ("`fedproto.py --lam 0`: no guidance", "fedproto-off-s{}"),
    ("`fedproto.py`", "fedproto-s{}"),
    ("`fedtgp.py`", "fedtgp-s{}"),
    ("`fedsa.py`: the paper's equations", "fedsa-letter-s{}"),
    ("`fedsa.py --distance mse --lam-r 10 --projection mlp`", "fedsa-s{}")]


def read(folder):
    """{"classifier": {round: accuracy}, "prototype": ...} of a run that is complete, else None."""
    found = [path for path in (HERE / folder, HERE.parent / "cifar10-device" / folder) if path.exists()]
    if not found:
        return None
    with open(found[0] / "log.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["accuracy"] not in ("", "nan")]
    log = {kind: {int(row["round"]): float(row[f"acc_{kind}"]) for row in rows if row["round"] != "0"}
           for kind in ("classifier", "prototype")}  # of FedSA: "prototype" is by the nearest anchor
    return log if ROUNDS in log["classifier"] else None


def best(log):
    return max(log.values())


def final(log):
    return log[ROUNDS]


def late(log):
    return statistics.mean(accuracy for t, accuracy in log.items() if t > ROUNDS - 200)


def cell(values):
    if len(values) < 2:
        return f"{values[0]:.1f}"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


logs = {}
for name, folder in ROWS:
    runs = {seed: read(folder.format(seed)) for seed in (0, 1, 2)}
    logs[name] = {seed: log for seed, log in runs.items() if log}
alone = logs[ROWS[0][0]]


def main():
    print("| | seeds | final, classifier | final, prototype | best, classifier | best, prototype |")
    print("|---|---|---|---|---|---|")
    for name, runs in logs.items():
        cells = [cell([function(log[kind]) for log in runs.values()])
                 for function in (final, best) for kind in ("classifier", "prototype")]
        print(f"| {name} | {', '.join(map(str, runs))} | {' | '.join(cells)} |")

    print("\nLead over no guidance on the same seed, mean ± std over seeds, and of each seed\n")
    print("| | by | final | best | mean of the last 200 rounds |\n|---|---|---|---|---|")
    for name, runs in list(logs.items())[1:]:
        for kind, base in (("classifier", "classifier"), ("prototype", "prototype"), ("prototype", "classifier")):
            cells = []
            for function in (final, best, late):
                leads = [function(log[kind]) - function(alone[seed][base])
                         for seed, log in runs.items() if seed in alone]
                cells.append(f"{cell(leads)} ({', '.join(f'{lead:.1f}' for lead in leads)})")
            print(f"| {name} | {kind}, over the {base} | {' | '.join(cells)} |")

    print("\nLead of one row over another on the same seed: final, best, mean of the last 200 rounds\n")
    names = list(logs)[1:]
    for i, one in enumerate(names):
        for other in names[:i]:
            seeds = [seed for seed in logs[one] if seed in logs[other]]
            for kind in ("classifier", "prototype"):
                cells = []
                for function in (final, best, late):
                    leads = [function(logs[one][seed][kind]) - function(logs[other][seed][kind]) for seed in seeds]
                    cells.append(f"{cell(leads)} ({', '.join(f'{lead:.1f}' for lead in leads)})")
                print(f"{one} over {other}, {kind}: {'; '.join(cells)}")


if __name__ == "__main__":
    main()
