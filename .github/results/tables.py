"""Prints every table of the results page and the README from the CSV files beside it, and draws the README's figures.

    python .github/results/tables.py

Each table follows its marker, <!-- table: NAME -->. tests/test_results.py looks for it on the results page, or in the
README if its name begins with "readme". So nobody edits a table by hand: paste what this script prints."""

import csv
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

HERE = Path(__file__).parent
PICTURES = HERE.parent / "pictures"
DOMAINS = ["caltech", "amazon", "webcam", "dslr"]
# 97.5 % quantiles of Student's t, by number of seeds
T_QUANTILE = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}

# the papers' numbers
FEDSA = {"fedproto": 87.49, "fedtgp": 87.98, "fedsa": 88.78}  # Table 1, CIFAR-10, cross-device
CROSS_SILO = {"fedproto": 90.76, "fedtgp": 90.23, "fedsa": 90.88}  # Table 1, CIFAR-10, cross-silo
FEDLSA = {  # Tables 2 and 5, Office-Caltech: the four domains, then the mean
    "fedavg": [56.70, 66.32, 43.10, 46.67, 53.20],
    "no L_SEP": [54.91, 61.58, 56.90, 63.33, 59.18],
    "no L_COM": [55.80, 64.21, 53.45, 60.00, 58.37],
    "fedlsa": [55.80, 64.74, 60.34, 60.00, 60.22],
}
FEDPLCC = {  # Table III, Office-Caltech
    "fedavg": [62.50, 83.16, 72.41, 53.33, 67.85],
    "fedplcc": [72.77, 84.74, 75.86, 80.00, 78.34],
}


def read(name):
    """A CSV file -> {run: {seed: {round: {column: number}}}}."""
    runs = {}
    with open(HERE / f"{name}.csv", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            seeds = runs.setdefault(row.pop("run"), {})
            rounds = seeds.setdefault(int(row.pop("seed")), {})
            rounds[int(row.pop("round"))] = {column: float(text) for column, text in row.items() if text}
    return runs


# One run's rounds, {round: {column: number}} -> a number

def in_round(column, t):
    return lambda rounds: rounds[t][column]


def mean_of(column, first, end):
    """The mean over the tested rounds first, ..., end."""
    return lambda rounds: np.mean([row[column] for t, row in rounds.items() if first <= t <= end])


def better_predictor(rounds):
    """In the last round, the better of the two predictors."""
    return max(rounds[1000]["classifier"], rounds[1000]["prototype"])


def best_round(column):
    """The best tested round, as FedTGP's paper and the code of FedTGP and FedSA report it. Picked on test images."""
    return lambda rounds: max(row[column] for row in rounds.values())


def mean_of_domains(*tested):
    """The mean over the four domains and over the rounds `tested`."""
    return lambda rounds: np.mean([[rounds[t][domain] for domain in DOMAINS] for t in tested])


def number(x, digits=1):
    return f"{x:.{digits}f}".replace("-", "−")


def accuracy(run, function):
    """The mean over the seeds, with ± their standard deviation if there are several."""
    numbers = [function(rounds) for rounds in run.values()]
    if len(numbers) == 1:
        return number(numbers[0])
    seeds = "" if len(numbers) == 3 else f" ({len(numbers)} seeds)"
    return f"{number(np.mean(numbers))} ± {number(np.std(numbers, ddof=1))}{seeds}"


def difference(run, base, function):
    """The mean of the seeds' differences, with its 95 % t-interval. A bound that would read 0.0 gets a second digit."""
    differences = by_seed(run, base, function)
    low, high = interval(differences)
    digits = 2 if min(abs(low), abs(high)) < 0.05 else 1
    return f"{number(np.mean(differences))} ({number(low, digits)} to {number(high, digits)})"


def verdict(run, base, function):
    """The difference and what follows from its interval."""
    low, high = interval(by_seed(run, base, function))
    word = "ahead" if low > 0 else "behind" if high < 0 else "inconclusive"
    return f"{difference(run, base, function)} {word}"


def by_seed(run, base, function):
    """The differences, seed by seed."""
    return [function(run[seed]) - function(base[seed]) for seed in sorted(set(run) & set(base))]


def interval(differences):
    """The 95 % t-interval of the seeds' differences."""
    n = len(differences)
    half = T_QUANTILE[n] * np.std(differences, ddof=1) / np.sqrt(n)
    return np.mean(differences) - half, np.mean(differences) + half


def reproduced(run, base, function, published):
    """Is the published lead in the interval of ours?"""
    low, high = interval(by_seed(run, base, function))
    if low <= published <= high:
        return "yes" if low > 0 else "undecided"
    if low <= 0:
        return "no"
    return "yes, and larger" if low > published else "yes, but smaller"


def show(name, head, rows):
    print(f"<!-- table: {name} -->")
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


PERSONAL = {
    "fedproto-off": "`fedproto.py --lam 0`: local training only",
    "fedproto": "`fedproto.py`",
    "fedtgp": "`fedtgp.py`",
    "fedsa": "`fedsa.py`",
    "fedsa-class-means": "`fedsa.py --distance class-means`: Eq. 5's sum, over a batch's class means",
    "fedsa-authors-settings": "`fedsa.py --distance mse --lam-r 10`: distance and λ1 of its authors' code",
}


def readme_personal():
    """The README's part of FedSA's Table 1."""
    titles = {"fedproto-off": "local training only", "fedproto": "**FedProto**", "fedtgp": "**FedTGP**",
              "fedsa": "**FedSA**",
              "fedsa-class-means": "FedSA, its paper's Eq. 5: a sum over class means (of a batch)",
              "fedsa-authors-settings": "FedSA, its code's loss: another distance and weight"}
    head, rows = table_1(titles)
    show("readme-personal", ["CIFAR-10", head[0], *head[2:-1]], [row[:2] + row[3:-1] for row in rows])


def table_1(titles):
    """FedSA's Table 1. titles: {run: the row's first cell} -> column titles without the first, rows."""
    runs = read("cifar10-cross-device")
    best = best_round("prototype")
    rows = [["majority class", accuracy(runs["fedtgp"], in_round("most_frequent", 1000)), "", "", "", "", "", ""]]
    for name, title in titles.items():
        cells = [title, accuracy(runs[name], in_round("classifier", 1000)),
                 accuracy(runs[name], in_round("prototype", 1000)), accuracy(runs[name], best),
                 number(FEDSA[name], 2) if name in FEDSA else ""]
        if name.startswith(("fedtgp", "fedsa")):
            cells += [difference(runs[name], runs["fedproto"], best), number(lead_in_table_1(name)),
                      reproduced(runs[name], runs["fedproto"], best, lead_in_table_1(name))]
        rows.append(cells + [""] * (8 - len(cells)))
    return ["classifier, last round", "prototype, last round", "prototype, best round", "FedSA's paper",
            "our lead over FedProto, best round", "paper's lead", "reproduced?"], rows


def lead_in_table_1(name):
    """FedTGP's or FedSA's published lead over FedProto."""
    return FEDSA[name.split("-")[0]] - FEDSA["fedproto"]


def readme_global():
    """The README's part of FedLSA's and FedPLCC's tables."""
    mean, rows = mean_of_domains(100), []
    for file, paper, one, base, published, title in [
            ("office-fedlsa", FEDLSA, "fedavg", None, "fedavg", "FedAvg, ten clients"),
            ("office-fedlsa", FEDLSA, "fedavg-length-1", "fedavg", None,
             "FedAvg, ten clients, features scaled to length 1"),
            ("office-fedlsa", FEDLSA, "fedlsa", "fedavg", "fedlsa", "**FedLSA**"),
            ("office-fedplcc", FEDPLCC, "fedavg", None, "fedavg", "FedAvg, four clients, ten local epochs"),
            ("office-fedplcc", FEDPLCC, "fedplcc", "fedavg", "fedplcc", "**FedPLCC**, ten local epochs"),
            ("office-fedplcc", FEDPLCC, "fedavg-1-epoch", None, "fedavg", "FedAvg, four clients, one local epoch"),
            ("office-fedplcc", FEDPLCC, "fedplcc-1-epoch", "fedavg-1-epoch", "fedplcc",
             "**FedPLCC**, one local epoch")]:
        runs = read(file)
        cells = [title, accuracy(runs[one], mean), number(paper[published][4], 2) if published else "",
                 difference(runs[one], runs[base], mean) if base else ""]
        if base and published:
            cells.append(number(lead(paper, published)))
        rows.append(cells + [""] * (5 - len(cells)))
    show("readme-global", ["Office-Caltech", "ours", "paper", "our lead over FedAvg", "paper's lead"], rows)


def lead(paper, method):
    """The paper's mean of the four domains, minus its FedAvg's."""
    return paper[method][4] - paper["fedavg"][4]


def cross_device():
    """FedSA's Table 1."""
    head, rows = table_1(PERSONAL)
    show("cross-device", ["command"] + head, rows)


def leads():
    """The same runs in other rounds and by the classifier, with the verdict that would follow."""
    runs = read("cifar10-cross-device")
    functions = {"prototype, round 1000": in_round("prototype", 1000),
                 "classifier, round 1000": in_round("classifier", 1000),
                 "better predictor, round 1000": better_predictor}
    rows = []
    for name in "fedproto-off", "fedtgp", "fedsa", "fedsa-class-means", "fedsa-authors-settings":
        cells = [PERSONAL[name]]
        for title, function in functions.items():
            cell = difference(runs[name], runs["fedproto"], function)
            if name != "fedproto-off":
                cell += ": " + reproduced(runs[name], runs["fedproto"], function, lead_in_table_1(name))
            cells.append(cell)
        rows.append(cells)
    show("leads", ["lead over FedProto"] + list(functions), rows)


def cross_silo():
    """The default on CIFAR-10, stopped early, one seed."""
    runs = read("cifar10-cross-silo")
    last = common_round(runs.values())
    shown = [100, last]
    rows = [["majority class"] + [number(runs["fedsa"][0][t]["most_frequent"]) for t in shown] + [""]]
    for name in "fedproto-off", "fedproto", "fedtgp", "fedsa":
        rounds = runs[name][0]
        rows.append([PERSONAL[name]]
                    + [f"{number(rounds[t]['classifier'])} / {number(rounds[t]['prototype'])}" for t in shown]
                    + [number(CROSS_SILO[name], 2) if name in CROSS_SILO else ""])
    head = ["classifier / prototype"] + [f"round {t}" for t in shown] + ["paper"]
    show("cross-silo", head, rows)


def office(name, runs, rows_wanted, paper):
    """The mean of the four domains in round 100. rows_wanted: (run, the FedAvg it is compared with or None, the paper's
    row or None, the command)."""
    mean = mean_of_domains(100)
    rows = []
    for one, base, published, command in rows_wanted:
        cells = [command, accuracy(runs[one], mean), number(paper[published][4], 2) if published else "",
                 difference(runs[one], runs[base], mean) if base else "", "", ""]
        if base and published:
            cells[-2] = number(lead(paper, published))
            cells[-1] = reproduced(runs[one], runs[base], mean, lead(paper, published))
        rows.append(cells)
    show(name, ["command", "mean of four domains", "paper", "lead over FedAvg", "paper's lead", "reproduced?"], rows)


def office_fedlsa():
    office("office-fedlsa", read("office-fedlsa"), [
        ("fedavg", None, "fedavg", "`fedlsa.py --lam 0 --no-sphere`: FedAvg"),
        ("fedavg-length-1", "fedavg", None, "`fedlsa.py --lam 0`: FedAvg, features scaled to length 1"),
        ("fedlsa", "fedavg", "fedlsa", "`fedlsa.py`"),
    ], FEDLSA)


def ablations():
    """What FedLSA loses without one of its two losses (Table 5)."""
    runs, mean = read("office-fedlsa"), mean_of_domains(100)
    rows = []
    for name, paper, command in [
            ("fedlsa-no-sep", "no L_SEP", "`fedlsa.py --alpha 0`: anchors are not pushed apart (no L_SEP)"),
            ("fedlsa-l2", "no L_COM",
             "`fedlsa.py --compactness l2`: distance to the anchor instead of the contrastive loss L_COM")]:
        published = FEDLSA["fedlsa"][4] - FEDLSA[paper][4]
        rows.append([command, accuracy(runs[name], mean), number(FEDLSA[paper][4], 2),
                     difference(runs["fedlsa"], runs[name], mean), number(published),
                     reproduced(runs["fedlsa"], runs[name], mean, published)])
    show("ablations", ["command", "mean of four domains", "paper", "FedLSA's lead over this variant", "paper's lead",
                       "reproduced?"], rows)


def sphere():
    """The control for FedLSA: FedAvg with features of length 1."""
    runs = read("office-fedlsa")
    names = ["fedavg-length-1", "fedlsa"]
    rows = []
    for t in 10, 30, 100:
        cells = [str(t)] + [accuracy(runs[name], mean_of_domains(t)) for name in names]
        rows.append(cells + [difference(runs["fedlsa"], runs["fedavg-length-1"], mean_of_domains(t))])
    show("sphere", ["round", "FedAvg, features of length 1", "FedLSA", "FedLSA's lead"], rows)


def read_fedplcc():
    """With one more run: FedAvg with one epoch, each seed on the machine of the weighted means."""
    runs = read("office-fedplcc")
    runs["fedavg-1-epoch-b"] = runs["fedavg-1-epoch"] | runs["fedavg-1-epoch-b"]
    return runs


def office_fedplcc():
    one = "`fedplcc.py --local-epochs 1"
    office("office-fedplcc", read_fedplcc(), [
        ("fedavg-1-epoch", None, "fedavg", f"{one} --lam-contra 0`: FedAvg, one local epoch"),
        ("fedplcc-1-epoch", "fedavg-1-epoch", "fedplcc", f"{one}`"),
        ("fedplcc-weighted-1-epoch", "fedavg-1-epoch-b", "fedplcc", f"{one} --weighted-means`"),
        ("fedavg", None, "fedavg", "`fedplcc.py --lam-contra 0`: FedAvg, ten local epochs"),
        ("fedplcc", "fedavg", "fedplcc", "`fedplcc.py`"),
        ("fedplcc-weighted", "fedavg", "fedplcc", "`fedplcc.py --weighted-means`"),
    ], FEDPLCC)


def digits_fedfm():
    """FedFM's complete runs, in a setting of our own: three data sets, a client for each."""
    runs = read("digits-fedfm")
    functions = {f"round {t}": in_round("test", t) for t in (10, 50)}
    functions["best validation"] = best_validation
    rows = [[command] + [accuracy(runs[name], function) for function in functions.values()]
            for name, command in [("fedavg", "`fedfm.py --lam 0`: FedAvg"), ("fedfm", "`fedfm.py`")]]
    rows.append(["lead"] + [difference(runs["fedfm"], runs["fedavg"], function) for function in functions.values()])
    show("digits-fedfm", ["command"] + list(functions), rows)


def best_validation(rounds):
    """The test accuracy in the round with the best validation accuracy, which the script reports."""
    return max(rounds.values(), key=lambda row: row["validation"])["test"]


def fedfm():
    """Seed 0, a fifth of the images."""
    runs = read("cifar10-fedfm")
    last = common_round([runs["fifth-lam-0"], runs["fifth-lam-50"]])
    shown = [20, 21, 30, 40, last]
    rows = []
    for lam in 0, 50:
        rounds = runs[f"fifth-lam-{lam}"][0]
        accuracies = [rounds[t]["test"] for t in shown] + [best_validation(rounds)]
        rows.append([f"`--lam {lam}`"] + [number(x) for x in accuracies])
    head = ["`fedfm.py --dataset cifar10 --subset 0.2`, stopped early"] + [f"round {t}" for t in shown]
    head.append("best validation")
    show("fedfm", head, rows)


def fedfm_all():
    """Seed 0, all images, matching from round 6."""
    runs = read("cifar10-fedfm")
    tested = range(5, 12)
    rows = []
    for command, name in [("`--lam 0`", "all-6-lam-0"), ("`--lam 50`", "all-6-lam-50")]:
        rounds = runs[name][0]
        rows.append([command] + [number(rounds[t]["test"]) if t in rounds else "" for t in tested])
    head = ["`fedfm.py --dataset cifar10 --warmup 5`, stopped early"] + [f"round {t}" for t in tested]
    show("fedfm-all", head, rows)


def batchnorm():
    """FedFM's global model with averaged BatchNorm statistics / with statistics of its own."""
    runs = read("batchnorm")
    rows = []
    for title, images, start, shown in [("all", "all-6", 6, (6, 7, 8, 11)), ("a fifth", "fifth", 6, (6, 7, 8)),
                                        ("a fifth", "late", 21, (80,))]:
        columns = [runs[f"{images}-lam-{lam}"][0] for lam in (0, 50)]
        for t in shown:
            cells = [title, f"round {start}", str(t)]
            for rounds in columns:
                cells.append(f"{number(rounds[t]['test'])} / {number(rounds[t]['own'])}" if t in rounds else "")
            rows.append(cells)
    head = ["images", "matching from", "round", "`--lam 0`, averaged / recomputed", "`--lam 50`, averaged / recomputed"]
    show("batchnorm", head, rows)


# setting, planned rounds, file, first round of a mean (None: only the last round), runs of the last four columns
COMPLETE = [
    ("digits: a tenth of the images, one client per data set", 12, "digits", None,
     ["fedproto-off", "fedproto", "fedtgp", "fedsa"]),
    ("the same, FedSA `--distance mse --lam-r 10`, as in its code", 12, "digits", None,
     [None, "fedproto", None, "fedsa-authors-settings"]),
    ("the same, FedSA `--distance class-means`: Eq. 5's sum, over a batch's class means", 12, "digits", None,
     [None, "fedproto", None, "fedsa-class-means"]),
    ("glyphs: the README's demo", 10, "class", None, ["fedproto-off", "fedproto", "fedtgp", "fedsa"]),
]
STOPPED = [
    ("CIFAR-10, four networks, 100 clients", 1000, "cifar10-cross-device", None,
     ["fedproto-off-four", "fedproto-four", "fedtgp-four", "fedsa-four"]),
    ("the same, settings of FedTGP's code", 1000, "cifar10-cross-device", 80,
     [None, "fedproto-mse-four", "fedtgp-mse-four", None]),
    ("CIFAR-10, four networks, 20 clients", 1000, "cifar10-architectures", None, [None, "fedproto", None, "fedsa"]),
    ("Fashion-MNIST, eight small CNNs, 20 clients", 1000, "fmnist", None,
     ["fedproto-off", "fedproto", "fedtgp", "fedsa"]),
]


def common_round(runs):
    """The last round that all seeds of these runs have."""
    return max(set.intersection(*[set(rounds) for run in runs for rounds in run.values()]))


def small():
    """The complete runs on small data."""
    settings("small", COMPLETE)


def stopped():
    """The runs that stopped early."""
    settings("stopped", STOPPED)


def settings(table, wanted):
    """One line for each setting, in the last round that its runs have; local training only may have stopped earlier."""
    rows = []
    for setting, planned, file, first, names in wanted:
        data = read(file)
        runs = [data[one] if one else None for one in names]
        t = common_round([run for run in runs[1:] if run])
        tested = f"{first} to {t} (mean)" if first else str(t)
        cells = [setting, f"{tested} of {planned}",
                 number(np.mean([rounds[t]["most_frequent"] for rounds in runs[1].values()]))]
        for run in runs:
            end = min(t, common_round([run])) if run else t
            columns = [mean_of(column, first or end, end) for column in ("classifier", "prototype")]
            cell = " / ".join(marked(run, runs[1], column) for column in columns) if run else ""
            cells.append(cell if end == t else f"{cell} (round {end})")
        rows.append(cells)
    show(table, ["setting", "round", "majority class", "local training only", "FedProto", "FedTGP", "FedSA"], rows)


def marked(run, base, function):
    """The mean over the seeds, with a triangle if it is conclusively ahead of or behind base."""
    mark = {"ahead": " ▲", "behind": " ▼"}.get(verdict(run, base, function).split()[-1], "")
    return number(np.mean([function(rounds) for rounds in run.values()])) + mark


def readme_demo():
    """The quick start: glyphs, seed 0, round 10."""
    runs = read("class")
    rows = [["majority class", number(runs["fedproto"][0][10]["most_frequent"]), ""]]
    for name in "fedproto-off", "fedproto":
        rows.append([PERSONAL[name], *[number(runs[name][0][10][column]) for column in ("classifier", "prototype")]])
    show("readme-demo", ["test accuracy in %, seed 0", "classifier", "prototype"], rows)


def draw_cifar10():
    """The mean over three seeds, CIFAR-10, 100 clients. Dotted: FedSA's Table 1."""
    runs = read("cifar10-cross-device")
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, column, lowest in zip(axes, ("classifier", "prototype"), (80, 60)):
        for name, label, colour in [
                ("fedproto-off", "local training only", "grey"),
                ("fedproto", "FedProto", "C0"),
                ("fedtgp", "FedTGP", "C2"),
                ("fedsa", "FedSA", "C3"),
                ("fedsa-authors-settings", "FedSA, its code's loss", "C1")]:
            tested = sorted(runs[name][0])
            means = [np.mean([rounds[t][column] for rounds in runs[name].values()]) for t in tested]
            axis.plot(tested, means, color=colour, label=label)
            if name in FEDSA and column == "prototype":  # as FedSA's code predicts
                axis.axhline(FEDSA[name], color=colour, linestyle=":", linewidth=1.5)
        axis.set(title=f"{column} accuracy", xlabel="round", xlim=(0, 1000), ylim=(lowest, 90))
        axis.grid(alpha=0.25)
    majority = np.mean([rounds[1000]["most_frequent"] for rounds in runs["fedtgp"].values()])
    axes[1].axhline(majority, color="black", linestyle="--", linewidth=1)
    axes[1].text(990, majority - 0.4, "majority class", ha="right", va="top", fontsize="small")
    axes[0].set_ylabel("accuracy (%)")
    axes[0].legend(frameon=False, loc="lower right", fontsize="small")
    dotted, = axes[1].plot([], [], ":", color="black", linewidth=1.5)
    axes[1].legend([dotted], ["FedSA's paper, in the method's colour"], frameon=False, loc="lower right",
                   fontsize="small")
    figure.savefig(PICTURES / "cifar10.png", dpi=100)
    plt.close(figure)


def draw_office():
    """Office-Caltech, mean of the four domains: the mean over the seeds, and ± their standard deviation as a band.
    Dotted: the papers' accuracies."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 4), sharey=True, layout="constrained")
    for axis, file, paper, title, runs_drawn in [
            (axes[0], "office-fedlsa", FEDLSA, "FedLSA", [
                ("fedavg", "fedavg", "FedAvg", "grey"),
                ("fedavg-length-1", None, "FedAvg, features scaled to length 1", "C1"),
                ("fedlsa", "fedlsa", "FedLSA", "C0")]),
            (axes[1], "office-fedplcc", FEDPLCC, "FedPLCC, ten local epochs", [
                ("fedavg", "fedavg", "FedAvg", "grey"),
                ("fedplcc-weighted", None, "FedPLCC, means weighted by images", "C4"),
                ("fedplcc", "fedplcc", "FedPLCC", "C2")]),
            (axes[2], "office-fedplcc", FEDPLCC, "FedPLCC, one local epoch", [
                ("fedavg-1-epoch", "fedavg", "FedAvg", "grey"),
                ("fedplcc-weighted-1-epoch", None, "FedPLCC, means weighted by images", "C4"),
                ("fedplcc-1-epoch", "fedplcc", "FedPLCC", "C2")])]:
        runs = read(file)
        for name, published, label, colour in runs_drawn:
            tested = sorted(runs[name][0])
            accuracies = np.array([[mean_of_domains(t)(rounds) for t in tested] for rounds in runs[name].values()])
            mean, std = accuracies.mean(0), accuracies.std(0, ddof=1)
            axis.plot(tested, mean, color=colour, label=label)
            axis.fill_between(tested, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
            if published:
                axis.axhline(paper[published][4], color=colour, linestyle=":", linewidth=1.5)
        axis.plot([], [], ":", color="black", linewidth=1.5, label="the paper, in the method's colour")
        axis.set(title=title, xlabel="round", xlim=(0, 100), ylim=(0, 85))
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, loc="lower right", fontsize="small")
    axes[0].set_ylabel("accuracy, mean of four domains (%)")
    figure.savefig(PICTURES / "office.png", dpi=100)
    plt.close(figure)


def main():
    for table in [readme_demo, readme_personal, readme_global, cross_device, leads, cross_silo,
                  office_fedlsa, sphere, ablations, office_fedplcc, digits_fedfm, fedfm_all, fedfm, batchnorm, small,
                  stopped]:
        table()
    draw_cifar10()
    draw_office()


if __name__ == "__main__":
    main()
