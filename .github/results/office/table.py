"""Prints the tables of the office rows from the logs: accuracy by domain, and leads over FedAvg on the same seed, beside
the published ones."""

import csv
import statistics
from pathlib import Path

HERE = Path(__file__).parent
DOMAINS = ["caltech", "amazon", "webcam", "dslr"]
FEDLSA = {  # a row's folder without its seed: its name, the published accuracies (FedLSA, Tables 2 and 5)
    "fedlsa-avg": ("FedAvg, `--lam 0 --no-sphere`", [56.70, 66.32, 43.10, 46.67]),
    "fedlsa-lam0": ("FedAvg on the sphere, `--lam 0`", None),
    "fedlsa-alpha0": ("without L_SEP, `--alpha 0`", [54.91, 61.58, 56.90, 63.33]),
    "fedlsa-l2": ("without L_COM, `--compactness l2`", [55.80, 64.21, 53.45, 60.00]),
    "fedlsa": ("FedLSA", [55.80, 64.74, 60.34, 60.00]),
}
FEDPLCC = {  # FedPLCC, Table III
    "fedplcc-avg": ("FedAvg, `--lam-contra 0 --lam-corr 0`", [62.50, 83.16, 72.41, 53.33]),
    "fedplcc": ("FedPLCC", [72.77, 84.74, 75.86, 80.00]),
}
FEDPLCC_ONE_EPOCH = {  # the same with --local-epochs 1
    "trial-fedplcc-avg-e1": ("FedAvg, one epoch", [62.50, 83.16, 72.41, 53.33]),
    "trial-fedplcc-e1": ("FedPLCC, one epoch", [72.77, 84.74, 75.86, 80.00]),
    "trial-fedplcc-e1-phi1": ("FedPLCC, one epoch, `--phi 1`", None),
}
TRIALS = {  # seed 0: the defaults, then one setting changed
    "fedlsa-avg": "FedAvg, `--lam 0 --no-sphere`",
    "fedlsa-lam0": "FedAvg on the sphere, `--lam 0`",
    "fedlsa": "FedLSA",
    "trial-avg-dealing": "FedAvg, `--domain-clients caltech:3,amazon:2,webcam:1,dslr:4`",
    "trial-avg-dealing-augment": "the same, random crop and flip, ImageNet's mean and standard deviation",
    "trial-avg-augment": "FedAvg, random crop and flip",
    "trial-avg-augment-share10": "FedAvg, random crop and flip, `--domain-fraction 0.1`",
    "trial-avg-share10": "FedAvg, `--domain-fraction 0.1`",
    "trial-fedlsa-lam0-share10": "FedAvg on the sphere, `--lam 0 --domain-fraction 0.1`",
    "trial-fedlsa-share10": "FedLSA, `--domain-fraction 0.1`",
    "trial-avg-share30": "FedAvg, `--domain-fraction 0.3`",
    "trial-fedlsa-dealing": "FedLSA, `--domain-clients caltech:3,amazon:2,webcam:1,dslr:4`",
    "trial-fedlsa-first": "FedLSA, `--alpha 0.02 --lam 0.1 --tau 0.1`",
    "trial-fedlsa-server-sgd": "FedLSA, the server without momentum and weight decay",
    "trial-fedlsa-tau-outside": "FedLSA, τ of Eq. 4 outside the exponential, as printed",
    "trial-avg-equal": "FedAvg, all clients of equal weight",
    "trial-fedlsa-equal": "FedLSA, all clients of equal weight",
}
FEDPLCC_TRIALS = {  # seed 0; all but the first and the last have --local-epochs 1
    "fedplcc-avg": "FedAvg, ten epochs",
    "trial-fedplcc-avg-e1": "FedAvg, one epoch",
    "trial-fedplcc-avg-e1-all": "FedAvg, all images, `--domain-fraction 1`",
    "trial-fedplcc-avg-e1-augment": "FedAvg, random crop and flip, ImageNet's normalisation",
    "trial-fedplcc-avg-e1-augment-all": "FedAvg, both",
    "trial-fedplcc-e1": "FedPLCC, one epoch",
    "trial-fedplcc-e1-augment": "FedPLCC, random crop and flip, ImageNet's normalisation",
    "trial-fedplcc-e1-first": "FedPLCC, `--finch-level first`",
    "trial-fedplcc-e1-fpl": "FPL's side, `--local-prototypes mean --uniform-weights --phi 1 --alpha 1`",
    "trial-fedplcc-e1-phi1": "FedPLCC, `--phi 1`",
    "trial-fedplcc-e1-tau055": "FedPLCC, `--tau 0.055`",
    "trial-fedplcc-e1-tau55": "FedPLCC, `--tau 0.55`",
    "trial-fedplcc-avg-e1-32px": "FedAvg, `--image-size 32`",
    "trial-fedplcc-e1-32px": "FedPLCC, `--image-size 32`",
    "trial-fedplcc-e1-lam32": "FedPLCC, λ1 and λ2 divided by 32, `--lam-contra 0.625 --lam-corr 6.25`",
    "trial-fedplcc-avg-e1-sum": "FedAvg, Eq. 5 a sum: `--batches full --lr 0.32 --weight-decay 3.125e-7`",
    "trial-fedplcc-e1-sum": "FedPLCC, the same with `--lam-contra 0.625 --lam-corr 6.25`",
    "fedplcc": "FedPLCC, ten epochs",
}


def last_rounds(folder, rounds=1):
    """A run's accuracies in %, averaged over its last rounds, by domain and their mean -> [5 numbers]; None without a
    log."""
    log = HERE / folder / "log.csv"
    if not log.exists():
        return None
    with open(log) as file:
        rows = list(csv.DictReader(file))[-rounds:]
    accuracies = [statistics.mean(float(row[f"acc_{domain}"]) for row in rows) for domain in DOMAINS]
    return accuracies + [statistics.mean(accuracies)]


def best_round(folder):
    """The highest mean over domains of any round, in %."""
    with open(HERE / folder / "log.csv") as file:
        return max(statistics.mean(float(row[f"acc_{domain}"]) for domain in DOMAINS) for row in csv.DictReader(file))


def seeds_of(name, rounds=1):
    """{seed: accuracies, averaged over the last rounds} of a row."""
    found = {seed: last_rounds(f"{name}-s{seed}", rounds) for seed in (0, 1, 2)}
    return {seed: accuracies for seed, accuracies in found.items() if accuracies}


def cell(values):
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def lead_cell(values):
    """Of three seeds with the mean's 95 % t-interval."""
    if len(values) < 3:
        return ", ".join(f"{value:.1f}" for value in values)
    half = 4.303 * statistics.stdev(values) / 3 ** 0.5
    return f"{cell(values)} ({statistics.mean(values) - half:.1f} to {statistics.mean(values) + half:.1f})"


def print_row(title, seeds, columns):
    print(f"| {title} | {seeds} | {' | '.join(columns)} |")


HEAD = "| | seeds | Caltech | Amazon | Webcam | DSLR | mean |\n|---|---|---|---|---|---|---|"


def print_accuracies(paper, rows, rounds=1):
    """A paper's rows, averaged over the last rounds."""
    print(f"\n{paper}, accuracy, rounds averaged: the last {rounds}\n\n{HEAD}")
    for name, (title, published) in rows.items():
        runs = seeds_of(name, rounds)
        if runs:
            best = cell([best_round(f"{name}-s{seed}") for seed in runs])
            columns = [cell(column) for column in zip(*runs.values())]
            print_row(f"{title} (best round {best})", ", ".join(map(str, runs)), columns)
        if published:
            print_row("the paper's", "", [f"{value:.2f}" for value in published + [statistics.mean(published)]])


def print_leads(paper, rows, baseline, rounds=1):
    """The leads of a paper's rows over one of them, averaged over the last rounds; without DSLR in the last column."""
    base = seeds_of(baseline, rounds)
    title, first = rows[baseline]
    print(f"\n{paper}, leads over {title} on the same seed, rounds averaged: the last {rounds}\n")
    print("| | seeds | Caltech | Amazon | Webcam | DSLR | mean | mean without DSLR |\n|---|---|---|---|---|---|---|---|")
    for name, (title, published) in rows.items():
        if name == baseline:
            continue
        leads = {}
        for seed, accuracies in seeds_of(name, rounds).items():
            if seed in base:
                lead = [a - b for a, b in zip(accuracies, base[seed])]
                leads[seed] = lead + [statistics.mean(lead[:3])]
        if leads:
            best = [best_round(f"{name}-s{seed}") - best_round(f"{baseline}-s{seed}") for seed in leads]
            columns = [lead_cell(column) for column in zip(*leads.values())]
            print_row(f"{title} (best rounds {lead_cell(best)})", ", ".join(map(str, leads)), columns)
        if published and first:
            printed = [a - b for a, b in zip(published, first)]
            printed += [statistics.mean(printed), statistics.mean(printed[:3])]
            print_row("the paper's", "", [f"{value:.2f}" for value in printed])


def main():
    print_accuracies("FedLSA", FEDLSA)
    print_leads("FedLSA", FEDLSA, "fedlsa-avg")
    print_leads("FedLSA", FEDLSA, "fedlsa-lam0")
    for rounds in (1, 20):
        print_accuracies("FedPLCC", FEDPLCC, rounds)
        print_leads("FedPLCC", FEDPLCC, "fedplcc-avg", rounds)
        print_accuracies("FedPLCC with one epoch", FEDPLCC_ONE_EPOCH, rounds)
        print_leads("FedPLCC with one epoch", FEDPLCC_ONE_EPOCH, "trial-fedplcc-avg-e1", rounds)

    print(f"\nFedLSA's trials, seed 0, last round\n\n{HEAD}")
    for name, title in TRIALS.items():
        accuracies = last_rounds(f"{name}-s0")
        if accuracies:
            print_row(title, "0", [f"{value:.1f}" for value in accuracies])

    print(f"\nFedPLCC's trials, seed 0, mean of the last 20 rounds\n\n{HEAD}")
    for name, title in FEDPLCC_TRIALS.items():
        accuracies = last_rounds(f"{name}-s0", 20)
        if accuracies:
            print_row(title, "0", [f"{value:.1f}" for value in accuracies])


if __name__ == "__main__":
    main()
