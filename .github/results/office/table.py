"""Prints the tables of the office rows from the logs: accuracy in the last round by domain, and leads over FedAvg on
the same seed, beside the published ones."""

import csv
import statistics
from pathlib import Path

HERE = Path(__file__).parent
DOMAINS = ["caltech", "amazon", "webcam", "dslr"]
FEDLSA = {  # a row's folder without its seed: its name, the published accuracies (FedLSA, Tables 2 and 5)
    "fedlsa-lam0": ("FedAvg on the sphere, `--lam 0`", [56.70, 66.32, 43.10, 46.67]),
    "fedlsa-alpha0": ("without L_SEP, `--alpha 0`", [54.91, 61.58, 56.90, 63.33]),
    "fedlsa-l2": ("without L_COM, `--compactness l2`", [55.80, 64.21, 53.45, 60.00]),
    "fedlsa": ("FedLSA", [55.80, 64.74, 60.34, 60.00]),
}


def last_round(folder):
    """A complete run's last accuracies in %, by domain and their mean -> [5 numbers], else None."""
    log = HERE / folder / "log.csv"
    if not log.exists():
        return None
    with open(log) as file:
        row = list(csv.DictReader(file))[-1]
    accuracies = [float(row[f"acc_{domain}"]) for domain in DOMAINS]
    return accuracies + [statistics.mean(accuracies)]


def seeds_of(name):
    """{seed: last accuracies} of a row."""
    found = {seed: last_round(f"{name}-s{seed}") for seed in (0, 1, 2)}
    return {seed: accuracies for seed, accuracies in found.items() if accuracies}


def cell(values):
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def main():
    print("| | seeds | Caltech | Amazon | Webcam | DSLR | mean |")
    print("|---|---|---|---|---|---|---|")
    base = seeds_of("fedlsa-lam0")
    for name, (title, published) in FEDLSA.items():
        runs = seeds_of(name)
        cells = [cell(column) for column in zip(*runs.values())]
        print(f"| {title} | {', '.join(map(str, runs))} | {' | '.join(cells)} |")
        cells = [f"{value:.2f}" for value in published + [statistics.mean(published)]]
        print(f"| the paper's | | {' | '.join(cells)} |")

    print("\nLeads over FedAvg, on the same seed\n")
    print("| | seeds | Caltech | Amazon | Webcam | DSLR | mean |")
    print("|---|---|---|---|---|---|---|")
    for name, (title, published) in list(FEDLSA.items())[1:]:
        runs = seeds_of(name)
        leads = [[a - b for a, b in zip(runs[seed], base[seed])] for seed in runs if seed in base]
        cells = [cell(column) for column in zip(*leads)]
        print(f"| {title} | {', '.join(map(str, runs))} | {' | '.join(cells)} |")
        first = FEDLSA["fedlsa-lam0"][1]
        published_leads = [a - b for a, b in zip(published, first)]
        cells = [f"{value:.2f}" for value in published_leads + [statistics.mean(published_leads)]]
        print(f"| the paper's | | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
