"""Prints every table of the results page and of the README from the CSV files beside it, and draws the README's figure.

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
T_QUANTILE = 4.303  # 97.5 % quantile of Student's t for three seeds

# the papers' numbers
FEDSA = {"fedproto": 87.49, "fedtgp": 87.98, "fedsa": 88.78}  # Table 1, CIFAR-10, cross-device
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


# {(file, run): " †" if today's scripts cannot repeat the run, else ""}
with open(HERE / "runs.csv", encoding="utf-8") as file:
    MARKS = {(row["file"], row["run"]): " †" if row["code"] else "" for row in csv.DictReader(file)}


# One run's rounds, {round: {column: number}} -> a number

def in_round(column, t):
    return lambda rounds: rounds[t][column]


def best(column):
    return lambda rounds: max(row[column] for row in rounds.values())


def mean_of(column, first, end):
    """The mean over the tested rounds first, ..., end."""
    return lambda rounds: np.mean([row[column] for t, row in rounds.items() if first <= t <= end])


def best_of_both(rounds):
    """The best round of the better of the two predictors."""
    return max(max(row["classifier"], row["prototype"]) for row in rounds.values())


def mean_of_domains(t):
    return lambda rounds: np.mean([rounds[t][domain] for domain in DOMAINS])


def number(x, digits=1):
    rounded = round(float(x), digits) + 0.0  # + 0.0: no −0.0
    return f"{rounded:.{digits}f}".replace("-", "−")


def accuracy(run, function):
    """The mean over the seeds, with ± their standard deviation if there are several."""
    numbers = [function(rounds) for rounds in run.values()]
    if len(numbers) == 1:
        return number(numbers[0])
    seeds = "" if len(numbers) == 3 else f" ({len(numbers)} seeds)"
    return f"{number(np.mean(numbers))} ± {number(np.std(numbers, ddof=1))}{seeds}"


def verdict(run, base, function):
    """The differences seed by seed: with three seeds their mean, its 95 % t-interval and what follows from it."""
    differences = [function(run[seed]) - function(base[seed]) for seed in sorted(set(run) & set(base))]
    if len(differences) < 3:
        return " and ".join(map(number, differences)) + (" (one seed)" if len(differences) == 1 else " (2 seeds)")
    mean = np.mean(differences)
    half = T_QUANTILE * np.std(differences, ddof=1) / np.sqrt(3)
    low, high = mean - half, mean + half
    word = "ahead" if low > 0 else "behind" if high < 0 else "inconclusive"
    digits = 2 if 0 in (round(low, 1), round(high, 1)) else 1  # show on which side of 0 a bound is
    return f"{number(mean, digits)} ({number(low, digits)} to {number(high, digits)}) {word}"


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
    "fedsa-authors-settings": "`fedsa.py --distance mse --lam-r 10`: distance and λ1 of its authors' code",
}


def summary():
    """Each method's lead beside its paper's."""
    table_1, lsa, plcc = read("cifar10-cross-device"), read("office-fedlsa"), read("office-fedplcc")
    mean = mean_of_domains(100)
    lead_lsa = number(FEDLSA["fedlsa"][4] - FEDLSA["fedavg"][4])
    lead_plcc = number(FEDPLCC["fedplcc"][4] - FEDPLCC["fedavg"][4])
    rows = []
    for what, ours, base, paper in [
            ("FedProto over local training", "fedproto", "fedproto-off", ""),
            ("FedTGP over FedProto", "fedtgp", "fedproto", number(FEDSA["fedtgp"] - FEDSA["fedproto"])),
            ("FedSA over FedProto", "fedsa", "fedproto", number(FEDSA["fedsa"] - FEDSA["fedproto"]))]:
        lead = verdict(table_1[ours], table_1[base], best_of_both)
        rows.append([what, "FedSA's Table 1: CIFAR-10, one small CNN", lead, paper])
    for what, setting, runs, ours, base, paper in [
            ("FedLSA over FedAvg", "ten clients", lsa, "fedlsa", "fedavg", lead_lsa),
            ("FedLSA over FedAvg on the sphere", "ten clients", lsa, "fedlsa", "fedavg-length-1", ""),
            ("FedPLCC over FedAvg", "four clients, one local epoch", plcc, "fedplcc-letter-1-epoch",
             "fedavg-1-epoch-again", lead_plcc),
            ("FedPLCC over FedAvg", "four clients, ten local epochs", plcc, "fedplcc-letter", "fedavg", lead_plcc)]:
        rows.append([what, f"Office-Caltech, {setting}", verdict(runs[ours], runs[base], mean), paper])
    rows.append(["FedFM over FedAvg", "CIFAR-10, ten clients", "no finished run", number(72.89 - 66.69)])  # Table III
    show("summary", ["", "setting", "our lead", "paper's lead"], rows)


def cross_device():
    """FedSA's Table 1. The README has its first rows."""
    file = "cifar10-cross-device"
    runs = read(file)
    rows = [["majority class", accuracy(runs["fedtgp"], in_round("most_frequent", 1000)), "", "", "", ""]]
    for name, command in PERSONAL.items():
        rows.append([command, accuracy(runs[name], best("classifier")), accuracy(runs[name], best("prototype")),
                     number(FEDSA[name], 2) if name in FEDSA else "",
                     verdict(runs[name], runs["fedproto"], best_of_both) if name != "fedproto" else "",
                     number(FEDSA[name] - FEDSA["fedproto"]) if name in ("fedtgp", "fedsa") else ""])
    for name, title in [("fedsa-authors-settings", "`fedsa.py --distance mse --lam-r 10`, seed 0"),
                        ("authors-code-fedsa", "FedSA's own code, seed 0")]:
        seed_0 = [number(best(column)(runs[name][0])) for column in ("classifier", "prototype")]
        rows.append([title + MARKS[file, name], *seed_0, "", "", ""])
    head = ["command", "classifier, best round", "prototype, best round", "paper", "lead over FedProto, better of the two",
            "paper's lead"]
    show("cross-device", head, rows)
    show("readme-personal", head, rows[:6])


def early_and_late():
    """The same runs in round 100 and over the last 200 rounds."""
    runs = read("cifar10-cross-device")
    rows = []
    for name in "fedproto-off", "fedproto", "fedtgp", "fedsa", "fedsa-authors-settings":
        cells = [PERSONAL[name], accuracy(runs[name], in_round("prototype", 100))]
        for function in in_round("prototype", 100), in_round("classifier", 1000), mean_of("prototype", 801, 1000):
            cells.append(verdict(runs[name], runs["fedproto"], function) if name != "fedproto" else "")
        rows.append(cells)
    show("early-and-late", ["command", "prototype, round 100", "lead over FedProto: prototype, round 100",
                            "classifier, round 1000", "prototype, rounds 801 to 1000"], rows)


def initial_weights():
    """What degrades FedProto's averages?"""
    file = "cifar10-cross-device"
    runs = read(file)
    rows = []
    for name, title in [
            ("fedproto", "one network, the same initial weights at every client"),
            ("fedproto-own-weights", "one network, each client draws its own initial weights"),
            ("fedproto-four", "four networks, `--model htfe4`")]:
        rounds = runs[name][0]
        prototype = [number(rounds[t]["prototype"]) for t in (20, 60, 100)]
        rows.append([title + MARKS[file, name], number(rounds[100]["classifier"]), *prototype])
    show("initial-weights", ["`fedproto.py`, seed 0, first 100 of 1000 rounds", "classifier, round 100",
                             "prototype, round 20", "round 60", "round 100"], rows)


def plain_mean():
    """FedProto with another mean at the server, in two codes on the same clients."""
    file = "cifar10-architectures"
    runs = read(file)
    rows = []
    for title, ours, theirs in [
            ("FedProto, mean weighted by numbers of images (ours)", "fedproto-mse", "htfllib-fedproto-weighted-after"),
            ("FedProto, plain mean over clients (HtFLlib's)", "fedproto-mse-uniform", "htfllib-fedproto-after"),
            ("FedTGP", "fedtgp-mse", "htfllib-fedtgp")]:
        cells = [number(runs[name][0][4]["prototype"]) + MARKS[file, name] for name in (ours, theirs)]
        rows.append([title] + cells)
    show("plain-mean", ["prototype accuracy, round 4 of 1000, seed 0", "our code", "HtFLlib"], rows)


def fedtgp_server():
    """Seed 0, last round."""
    rows = []
    for file, name, planned, command in [
            ("cifar10-architectures", "fedtgp", 1000, "`--dataset cifar10 --model htfe4`"),
            ("cifar10-architectures", "fedtgp-mse", 1000,
             "`--dataset cifar10 --model htfe4 --distance mse --lam 10 --margin-rule nearest`"),
            ("cifar10-architectures", "fedtgp-eight", 1000, "`--dataset cifar10 --model htfe8`"),
            ("cifar10-fifth", "fedtgp", 12, "`--dataset cifar10 --subset 0.2 --rounds 12`"),
            ("cifar10-fifth", "fedtgp-sum", 12,
             "`--dataset cifar10 --subset 0.2 --rounds 12`, the server's loss summed over a batch")]:
        rounds = read(file)[name][0]
        t = max(rounds)
        server = [number(rounds[t][column]) if column in rounds[t] else "" for column in ("margin", "last_batch_loss")]
        rows.append([command + MARKS[file, name], f"{t} of {planned}", *server, number(rounds[t]["prototype"])])
    show("fedtgp-server", ["`fedtgp.py`, seed 0", "round", "margin δ", "server's loss, last batch", "prototype"], rows)


def office(name, runs, rows_wanted, paper):
    """Accuracies in round 100. rows_wanted: (run, the FedAvg it is compared with or None, the paper's row or None,
    command). Returns the printed rows."""
    mean = mean_of_domains(100)
    rows = []
    for one, base, published, command in rows_wanted:
        cells = [command]
        for i, domain in enumerate(DOMAINS):
            ours = number(np.mean([rounds[100][domain] for rounds in runs[one].values()]))
            cells.append(f"{ours} ({number(paper[published][i])})" if published else ours)
        rows.append([*cells, accuracy(runs[one], mean),
                     number(paper[published][4], 2) if published else "",
                     verdict(runs[one], runs[base], mean) if base else "",
                     number(paper[published][4] - paper["fedavg"][4]) if published and base else ""])
    show(name, ["command", "Caltech (paper)", "Amazon (paper)", "Webcam (paper)", "DSLR (paper)", "mean", "paper",
                "lead over FedAvg", "paper's lead"], rows)
    return rows


def office_fedlsa():
    alone = "`fedlsa.py --lam 0 --no-sphere"
    return office("office-fedlsa", read("office-fedlsa"), [
        ("fedavg", None, "fedavg", f"{alone}`: FedAvg"),
        ("fedavg-length-1", "fedavg", None, "`fedlsa.py --lam 0`: FedAvg on the sphere"),
        ("fedlsa", "fedavg", "fedlsa", "`fedlsa.py`"),
        ("fedlsa-no-sep", "fedavg", "no L_SEP", "`fedlsa.py --alpha 0`: without L_SEP"),
        ("fedlsa-l2", "fedavg", "no L_COM", "`fedlsa.py --compactness l2`: distance instead of L_COM"),
        ("fedavg-10-percent", "fedavg", None, f"{alone} --domain-fraction 0.1`: FedAvg, 10 % of a domain"),
        ("fedavg-30-percent", "fedavg", None, f"{alone} --domain-fraction 0.3`: FedAvg, 30 % of a domain"),
    ], FEDLSA)


def sphere():
    """The control for FedLSA: FedAvg with features of length 1."""
    runs = read("office-fedlsa")
    names = ["fedavg", "fedavg-length-1", "fedlsa-no-sep", "fedlsa"]
    rows = []
    for t in 10, 30, 100:
        cells = [str(t)] + [accuracy(runs[name], mean_of_domains(t)) for name in names]
        rows.append(cells + [verdict(runs["fedlsa"], runs["fedavg-length-1"], mean_of_domains(t))])
    show("sphere", ["round", "FedAvg", "FedAvg on the sphere", "FedLSA without L_SEP", "FedLSA",
                    "FedLSA's lead over FedAvg on the sphere"], rows)


def office_fedplcc():
    alone = "`fedplcc.py --local-epochs 1 --lam-contra 0`"
    return office("office-fedplcc", read("office-fedplcc"), [
        ("fedavg", None, "fedavg", "`fedplcc.py --lam-contra 0`: FedAvg, ten local epochs"),
        ("fedplcc-letter", "fedavg", "fedplcc", "`fedplcc.py`"),
        ("fedplcc", "fedavg", "fedplcc", "`fedplcc.py --weighted-means`"),
        ("fedavg-1-epoch-again", None, "fedavg", f"{alone}: FedAvg, one local epoch"),
        ("fedplcc-letter-1-epoch", "fedavg-1-epoch-again", "fedplcc", "`fedplcc.py --local-epochs 1`"),
        ("fedplcc-1-epoch-again", "fedavg-1-epoch-again", "fedplcc", "`fedplcc.py --weighted-means --local-epochs 1`"),
    ], FEDPLCC)


def office_fedplcc_more():
    """One local epoch, on other machines than office_fedplcc's."""
    alone = "`fedplcc.py --local-epochs 1 --lam-contra 0`"
    one = "`fedplcc.py --weighted-means --local-epochs 1"
    office("office-fedplcc-more", read("office-fedplcc"), [
        ("fedavg-1-epoch", None, "fedavg", f"{alone}: FedAvg"),
        ("fedplcc-1-epoch", "fedavg-1-epoch", "fedplcc", f"{one}`"),
        ("fedplcc-1-epoch-phi-1", "fedavg-1-epoch", None, f"{one} --phi 1`: toward all prototypes of the class"),
        ("fedplcc-1-epoch-tau-0.055", "fedavg-1-epoch", None, f"{one} --tau 0.055`"),
        ("fedplcc-1-epoch-tau-0.55", "fedavg-1-epoch", None, f"{one} --tau 0.55`"),
    ], FEDPLCC)


def fedfm():
    """Seed 0, a fifth of the images."""
    runs = read("cifar10-fedfm")
    shown = (10, 20, 21, 22, 23, 24, 30)
    rows = []
    for lam, name in (0, "fedavg"), (5, "fedfm-lam-5"), (50, "fedfm"):
        rounds = runs[name][0]
        rows.append([f"`--lam {lam}`"] + [number(rounds[t]["test"]) if t in rounds else "" for t in shown])
    head = ["`fedfm.py --dataset cifar10 --subset 0.2 --batches all`, stopped early"] + [f"round {t}" for t in shown]
    show("fedfm", head, rows)


def batchnorm():
    """FedFM's global model with averaged BatchNorm statistics / with statistics of its own; seed 0."""
    runs = read("cifar10-batchnorm")
    rows = []
    for images, flags in ("fifth", "--subset 0.2 --warmup 5"), ("all", "--warmup 1"):
        columns = [runs.get(f"{images}-lam-{lam}", {0: {}})[0] for lam in (0, 5, 50)]
        for t in sorted(set().union(*columns)):
            cells = [f"`{flags}`", str(t)]
            for rounds in columns:
                cells.append(f"{number(rounds[t]['test'])} / {number(rounds[t]['own'])}" if t in rounds else "")
            rows.append(cells)
    head = ["`fedfm.py --dataset cifar10`, stopped early", "round", "`--lam 0`", "`--lam 5`", "`--lam 50`"]
    show("batchnorm", head, rows)


FOUR = "--dataset cifar10 --model htfe4 --clients 100 --participation 0.1"
RELEASED = "--distance mse --lam 10`, FedTGP also `--margin-rule nearest`"
DIGITS = ("`--dataset digits --domain-clients mnist:1,mnistm:1,usps:1 --partition domain --domain-fraction 0.1 "
          "--rounds 12`")
LINEAR = "FedSA also `--projection linear`"
# setting, flags, file, first round of a mean (None: only the last round), runs of the last four columns
STOPPED = [
    ("four networks, 100 clients", f"`{FOUR}`", "cifar10-cross-device", None,
     ["fedproto-off-four", "fedproto-four", "fedtgp-four", "fedsa-four"]),
    ("four networks, 100 clients, settings of FedTGP's code; mean of rounds 80, 100 and 120", f"`{FOUR} {RELEASED}",
     "cifar10-cross-device", 80, [None, "fedproto-mse-four", "fedtgp-mse-four", None]),
    ("Fashion-MNIST, eight small CNNs; mean of rounds 6 to 10",
     "`--dataset fmnist`, FedSA also `--model htcnn8`, the others' preset",
     "fmnist", 6, ["fedproto-off", "fedproto", "fedtgp", "fedsa"]),
]
FINISHED = [
    ("a fifth of CIFAR-10", f"`--dataset cifar10 --subset 0.2 --rounds 12`, {LINEAR}", "cifar10-fifth", None,
     ["fedproto-off", "fedproto", "fedtgp", "fedsa-linear"]),
    ("digits: a client each for MNIST, MNIST-M and USPS", f"{DIGITS}, {LINEAR}", "digits", None,
     ["fedproto-off", "fedproto", "fedtgp", "fedsa-linear"]),
    ("digits, FedSA with distance and λ1 of its code and the default projection",
     f"{DIGITS}, FedSA also `--distance mse --lam-r 10`", "digits", None,
     [None, "fedproto", None, "fedsa-authors-settings"]),
    ("glyphs", "none", "class", None, ["fedproto-off", "fedproto", "fedtgp", "fedsa"]),
    ("glyphs, a style each", f"`--partition domain --clients 8 --images-per-class 20 --subset 1`, {LINEAR}",
     "glyphs-domains", None, ["domain-fedproto-off", "domain-fedproto", "domain-fedtgp", "domain-fedsa-linear"]),
]


def common_round(runs):
    """The last round that all seeds of these runs have."""
    return max(set.intersection(*[set(rounds) for run in runs for rounds in run.values()]))


def settings(name, title, wanted):
    """One line for each setting, in the last round that its runs have; local training only may have stopped earlier."""
    rows = []
    for setting, flags, file, first, names in wanted:
        data = read(file)
        runs = [data[one] if one else None for one in names]
        t = common_round([run for run in runs[1:] if run])
        cells = [setting, str(t), number(np.mean([rounds[t]["most_frequent"] for rounds in runs[1].values()]))]
        for run in runs:
            end = min(t, common_round([run])) if run else t
            columns = [mean_of(column, first or end, end) for column in ("classifier", "prototype")]
            cell = " / ".join(marked(run, runs[1], column) for column in columns) if run else ""
            cells.append(cell if end == t else f"{cell} in round {end}")
        rows.append([*cells, flags])
    head = ["setting", title, "majority class", "local training only", "FedProto", "FedTGP", "FedSA", "flags"]
    show(name, head, rows)


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


def readme_global(fedlsa, fedplcc):
    """The first rows of FedLSA's table and of FedPLCC's."""
    rows = [[row[0], "10", *row[5:]] for row in fedlsa[:3]]
    rows += [[row[0], "4", *row[5:]] for row in fedplcc[:2]]
    show("readme-global", ["Office-Caltech", "clients", "mean of four domains", "paper", "lead over FedAvg",
                           "paper's lead"], rows)


def draw():
    """The mean over three seeds, CIFAR-10, 100 clients. Stars: FedSA's Table 1, which names no predictor."""
    runs = read("cifar10-cross-device")
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for axis, column in zip(axes, ("classifier", "prototype")):
        for name, label, colour in [
                ("fedproto-off", "local training only", "grey"),
                ("fedproto", "FedProto", "C0"),
                ("fedtgp", "FedTGP", "C2"),
                ("fedsa", "FedSA", "C3"),
                ("fedsa-authors-settings", "FedSA, its code's distance and λ1", "C1")]:
            tested = sorted(runs[name][0])
            means = [np.mean([rounds[t][column] for rounds in runs[name].values()]) for t in tested]
            axis.plot(tested, means, color=colour, label=label)
            if name in FEDSA:
                axis.plot(1000, FEDSA[name], "*", color=colour, markeredgecolor="black", markersize=12, clip_on=False)
        majority = np.mean([rounds[1000]["most_frequent"] for rounds in runs["fedtgp"].values()])
        axis.axhline(majority, color="black", linestyle="--", linewidth=1, label="majority class")
        axis.plot([], [], "*", color="white", markeredgecolor="black", markersize=12, label="FedSA's Table 1")
        axis.set(title=f"{column} accuracy", xlabel="round", xlim=(0, 1000), ylim=(60, 90))
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("accuracy (%)")
    axes[0].legend(frameon=False, loc="lower right", fontsize="small")
    figure.savefig(PICTURES / "cifar10.png", dpi=100)
    plt.close(figure)


def main():
    for table in [summary, cross_device, early_and_late, initial_weights, plain_mean, fedtgp_server, sphere, fedfm,
                  batchnorm]:
        table()
    settings("stopped", "last common of 1000 rounds", STOPPED)
    settings("own", "rounds, all finished", FINISHED)
    readme_demo()
    readme_global(office_fedlsa(), office_fedplcc())
    office_fedplcc_more()
    draw()


if __name__ == "__main__":
    main()
