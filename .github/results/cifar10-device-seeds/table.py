"""Prints what the pages quote of the three seeds, from the logs: accuracies as mean ± std, leads on the same seed as mean
(95 % t-interval) [of each seed]."""

import csv
import statistics
from pathlib import Path

HERE = Path(__file__).parent
ROUNDS = 1000
ROWS = [  # name in the table, folder of a seed
    ("`fedproto.py --lam 0`: no guidance", "fedproto-off-s{}"),
    ("`fedproto.py`", "fedproto-s{}"),
    ("`fedtgp.py`", "fedtgp-today-s{}"),
    ("`fedtgp.py`, an earlier version", "fedtgp-s{}"),
    ("`fedsa.py`", "fedsa-letter-s{}"),
    ("`fedsa.py --distance mse --lam-r 10 --projection mlp`", "fedsa-s{}")]


def read(folder):
    """{"classifier": {round: accuracy}, "prototype": ...} of the tested rounds; None if the run is not complete."""
    found = [path for path in (HERE / folder, HERE.parent / "cifar10-device" / folder) if path.exists()]
    if not found:
        return None
    with open(found[0] / "log.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["acc_classifier"] not in ("", "nan")]
    vectors = "acc_prototype" if "acc_prototype" in rows[0] else "acc_anchor"  # FedSA's older logs have "prototype"
    log = {kind: {int(row["round"]): float(row[column]) for row in rows if row["round"] != "0"}
           for kind, column in (("classifier", "acc_classifier"), ("prototype", vectors))}
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


def lead_cell(values):
    each = ", ".join(f"{value:.1f}" for value in values)
    if len(values) < 3:
        return f"[{each}]"
    mean, half = statistics.mean(values), 4.303 * statistics.stdev(values) / 3 ** 0.5  # Student's t, three seeds
    return f"{mean:.1f} ({mean - half:.1f} to {mean + half:.1f}) [{each}]"


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

    print("\nLead of one row over another on the same seed\n")
    print("| | | best round | last round | mean of the last 200 rounds |\n|---|---|---|---|---|")
    names = list(logs)
    for i, one in enumerate(names):
        for other in names[:i]:
            seeds = [seed for seed in logs[one] if seed in logs[other]]
            for kind, of_other in (("classifier", "classifier"), ("prototype", "prototype"), ("prototype", "classifier")):
                cells = [lead_cell([function(logs[one][seed][kind]) - function(logs[other][seed][of_other])
                                    for seed in seeds]) for function in (best, final, late)]
                words = f"by {kind}" if kind == of_other else f"by {kind}, over the other's {of_other}"
                print(f"| {one} over {other} | {words} | {' | '.join(cells)} |")
            cells = [lead_cell([max(map(function, logs[one][seed].values())) - max(map(function, logs[other][seed].values()))
                                for seed in seeds]) for function in (best, final, late)]
            print(f"| {one} over {other} | each by its better prediction | {' | '.join(cells)} |")

    print("\nFedTGP's lead over FedProto by prototype on each seed, mean of a hundred rounds\n")
    for name in ("`fedtgp.py`", "`fedtgp.py`, an earlier version"):
        for seed, log in logs[name].items():
            leads = {t: log["prototype"][t] - logs["`fedproto.py`"][seed]["prototype"][t] for t in log["prototype"]}
            hundreds = [statistics.mean(leads[t] for t in leads if start < t <= start + 100)
                        for start in range(0, ROUNDS, 100)]
            print(f"{name}, seed {seed}: {', '.join(f'{lead:.1f}' for lead in hundreds)}; "
                  f"single rounds {min(leads.values()):.1f} to {max(leads.values()):.1f}")


if __name__ == "__main__":
    main()
