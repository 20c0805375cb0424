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


# reading

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


# writing

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
        seeds = "one seed" if len(differences) == 1 else "two seeds"
        return " and ".join(number(x) for x in differences) + f" ({seeds})"
    mean = np.mean(differences)
    half = T_QUANTILE * np.std(differences, ddof=1) / np.sqrt(3)
    low, high = mean - half, mean + half
    word = "ahead" if low > 0 else "behind" if high < 0 else "inconclusive"
    digits = 2 if "0.0" in (number(low), number(high)) else 1  # show on which side of 0 a bound is
    return f"{number(mean, digits)} ({number(low, digits)} to {number(high, digits)}) {word}"


def show(name, head, rows):
    print(f"<!-- table: {name} -->")
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


# the personal methods: FedProto, FedTGP and FedSA

def cross_device():
    """FedSA's Table 1: 100 clients, 1000 rounds. The README has the first rows and columns."""
    runs = read("cifar10-cross-device")
    rows = [["majority class", accuracy(runs["fedtgp"], in_round("most_frequent", 1000))] + [""] * 6]
    for name, command in [
            ("fedproto-off", "`fedproto.py --lam 0`: local training only"),
            ("fedproto", "`fedproto.py`"),
            ("fedtgp", "`fedtgp.py`"),
            ("fedsa", "`fedsa.py`"),
            ("fedsa-linear", "`fedsa.py --projection linear`"),
            ("fedsa-authors-settings", "`fedsa.py --distance mse --lam-r 10`: its authors' released settings")]:
        run = runs[name]
        cells = [command, accuracy(run, best("classifier")), accuracy(run, best("prototype"))]
        cells.append(number(FEDSA[name], 2) if name in FEDSA else "")
        for function in best_of_both, in_round("prototype", 100), mean_of("prototype", 801, 1000):
            cells.append("" if name == "fedproto" else verdict(run, runs["fedproto"], function))
        cells.insert(5, number(FEDSA[name] - FEDSA["fedproto"]) if name in ("fedtgp", "fedsa") else "")
        rows.append(cells)
    for name, title in [
            ("fedsa-authors-settings", "the same, seed 0"),
            ("authors-code-fedsa", "FedSA's own code, seed 0")]:
        rounds = runs[name][0]
        rows.append([title + MARKS["cifar10-cross-device", name], number(best("classifier")(rounds)),
                     number(best("prototype")(rounds))] + [""] * 5)
    head = ["command", "classifier, best round", "prototype, best round", "paper", "against FedProto, better of both",
            "paper's lead", "prototype, round 100", "prototype, rounds 801 to 1000"]
    show("cross-device", head, rows)
    show("readme-personal", head[:6], [row[:6] for row in rows[:5]])


def initial_weights():
    """What spoils FedProto's averages?"""
    runs = read("cifar10-cross-device")
    rows = []
    for name, title in [
            ("fedproto", "one network, the same initial weights at every client"),
            ("fedproto-own-weights", "one network, each client draws its own initial weights"),
            ("fedproto-four", "four networks, `--model htfe4`")]:
        row = runs[name][0][100]
        rows.append([title + MARKS["cifar10-cross-device", name], number(row["classifier"]), number(row["prototype"])])
    show("initial-weights", ["`fedproto.py`, seed 0, round 100 of 1000", "classifier", "prototype"], rows)


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
    for mean, ours, theirs in [
            ("weighted", "fedproto-mse", "htfllib-fedproto-weighted-after"),
            ("plain", "fedproto-mse-uniform", "htfllib-fedproto-after")]:
        leads = [verdict(runs[fedtgp], runs[base], in_round("prototype", 4))
                 for fedtgp, base in (("fedtgp-mse", ours), ("htfllib-fedtgp", theirs))]
        rows.append([f"FedTGP against FedProto with the {mean} mean"] + leads)
    show("plain-mean", ["prototype accuracy, round 4, seed 0", "our code", "HtFLlib"], rows)


def fedtgp_server():
    """Seed 0, last round."""
    rows = []
    for file, name, command in [
            ("cifar10-architectures", "fedtgp", "`--dataset cifar10 --model htfe4`"),
            ("cifar10-architectures", "fedtgp-mse", "the same, `--distance mse --lam 10 --margin-rule nearest`"),
            ("cifar10-architectures", "fedtgp-eight", "`--dataset cifar10 --model htfe8`"),
            ("fmnist", "fedtgp", "`--dataset fmnist`"),
            ("cifar10-fifth", "fedtgp", "`--dataset cifar10 --subset 0.2`"),
            ("cifar10-fifth", "fedtgp-sum", "the same, the server's loss summed over a batch")]:
        rounds = read(file)[name][0]
        t = max(rounds)
        server = [number(rounds[t][column]) if column in rounds[t] else "" for column in ("margin", "last_batch_loss")]
        rows.append([command + MARKS[file, name], str(t), *server, number(rounds[t]["prototype"])])
    show("fedtgp-server", ["`fedtgp.py`, seed 0", "round", "margin δ", "server's loss, last batch", "prototype"], rows)


# the global methods: FedLSA, FedPLCC and FedFM

def compared(run, fedavg, paper, published):
    """Four cells: the mean over the domains in round 100, the paper's, against FedAvg (None: it is FedAvg), the paper's
    lead over FedAvg (published: the paper's row or None)."""
    return [accuracy(run, mean_of_domains(100)),
            number(paper[published][4], 2) if published else "",
            verdict(run, fedavg, mean_of_domains(100)) if fedavg else "",
            number(paper[published][4] - paper["fedavg"][4]) if published and fedavg else ""]


def office(name, runs, rows_wanted, paper):
    """Accuracies in round 100. rows_wanted: (run, the FedAvg it is compared with or None, the paper's row or None,
    command)."""
    rows = []
    for one, base, published, command in rows_wanted:
        cells = [command]
        for i, domain in enumerate(DOMAINS):
            ours = number(np.mean([rounds[100][domain] for rounds in runs[one].values()]))
            cells.append(f"{ours} ({number(paper[published][i])})" if published else ours)
        rows.append(cells + compared(runs[one], runs[base] if base else None, paper, published))
    show(name, ["command", "Caltech (paper)", "Amazon (paper)", "Webcam (paper)", "DSLR (paper)", "mean", "paper",
                "against FedAvg", "paper's lead"], rows)


def office_fedlsa():
    office("office-fedlsa", read("office-fedlsa"), [
        ("fedavg", None, "fedavg", "`fedlsa.py --lam 0 --no-sphere`: FedAvg"),
        ("fedavg-length-1", "fedavg", None, "`fedlsa.py --lam 0`: FedAvg on the sphere"),
        ("fedlsa-no-sep", "fedavg", "no L_SEP", "`fedlsa.py --alpha 0`: without L_SEP"),
        ("fedlsa-l2", "fedavg", "no L_COM", "`fedlsa.py --compactness l2`: distance instead of L_COM"),
        ("fedlsa", "fedavg", "fedlsa", "`fedlsa.py`"),
        ("fedavg-10-percent", "fedavg", None, "FedAvg, `--domain-fraction 0.1`"),
        ("fedavg-30-percent", "fedavg", None, "FedAvg, `--domain-fraction 0.3`"),
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
                    "FedLSA against FedAvg on the sphere"], rows)


def office_fedplcc():
    """To add plain means, `fedplcc.py --local-epochs 1`: put the run fedplcc-letter-1-epoch into office-fedplcc.csv and
    runs.csv, and take the # from its line."""
    office("office-fedplcc", read("office-fedplcc"), [
        ("fedavg", None, "fedavg", "`fedplcc.py --lam-contra 0`: FedAvg, ten local epochs"),
        ("fedplcc", "fedavg", "fedplcc", "`fedplcc.py --weighted-means`"),
        ("fedavg-1-epoch", None, "fedavg", "`fedplcc.py --local-epochs 1 --lam-contra 0`: FedAvg, one local epoch"),
        # ("fedplcc-letter-1-epoch", "fedavg-1-epoch", "fedplcc", "`fedplcc.py --local-epochs 1`"),
        ("fedplcc-1-epoch", "fedavg-1-epoch", "fedplcc", "`fedplcc.py --weighted-means --local-epochs 1`"),
        ("fedplcc-1-epoch-phi-1", "fedavg-1-epoch", None, "the same, `--phi 1`: toward all prototypes of the class"),
        ("fedplcc-1-epoch-tau-0.055", "fedavg-1-epoch", None, "the same, `--tau 0.055`"),
        ("fedplcc-1-epoch-tau-0.55", "fedavg-1-epoch", None, "the same, `--tau 0.55`"),
        ("fedavg-1-epoch-sum", None, None, "FedAvg, one local epoch, Eq. 5 as a sum over 32 images"),
        ("fedplcc-1-epoch-sum", "fedavg-1-epoch-sum", None, "FedPLCC with that sum, `--weighted-means`"),
    ], FEDPLCC)


def fedfm():
    """A fifth of the images, seed 0."""
    runs = read("cifar10-fedfm")
    shown = [10, 20, 21, 22, 23, 24, 30]
    rows = []
    for name, command in [("fedavg", "`--lam 0`: FedAvg"), ("fedfm-lam-5", "`--lam 5`"), ("fedfm", "`--lam 50`")]:
        rounds = runs[name][0]
        rows.append([command] + [number(rounds[t]["test"]) if t in rounds else "" for t in shown])
    show("fedfm", ["`fedfm.py --dataset cifar10 --subset 0.2 --batches all`"] + [f"round {t}" for t in shown], rows)


# what stopped early, and what else was tried

FOUR = "four deep networks, 100 clients"
MSE = "`--distance mse --lam 10`, FedTGP with `--margin-rule nearest`"
LINEAR = "FedSA with `--projection linear`"
OTHER = [  # setting, file, planned rounds, seeds, first round (None: only the last), runs of the last four columns
    (f"{FOUR}: `--dataset cifar10 --model htfe4 --clients 100 --participation 0.1`", "cifar10-cross-device", 1000,
     (0, 1, 2), None, ["fedproto-off-four", "fedproto-four", "fedtgp-four", "fedsa-four"]),
    ("this row, seed 0 alone", "cifar10-cross-device", 1000,
     (0,), None, [None, "fedproto-four", None, "fedsa-four"]),
    (f"{FOUR}, {MSE}", "cifar10-cross-device", 1000,
     (0, 1, 2), None, [None, "fedproto-mse-four", "fedtgp-mse-four", None]),
    ("this row, mean of rounds 80 to 120", "cifar10-cross-device", 1000,
     (0, 1, 2), 80, [None, "fedproto-mse-four", "fedtgp-mse-four", None]),
    ("four deep networks, 20 clients: `--dataset cifar10 --model htfe4`", "cifar10-architectures", 1000,
     (0, 1, 2), None, [None, "fedproto", None, "fedsa"]),
    (f"eight deep networks, 20 clients, seed 0: `--dataset cifar10 --model htfe8`, {MSE}", "cifar10-architectures",
     1000, (0,), None, [None, "fedproto-mse-eight", "fedtgp-mse-eight", None]),
    ("eight small CNNs: `--dataset fmnist`, FedSA with `--model htcnn8`; mean of rounds 6 to 10", "fmnist", 1000,
     (0, 1, 2), 6, ["fedproto-off", "fedproto", "fedtgp", "fedsa"]),
    (f"a fifth of CIFAR-10: `--dataset cifar10 --subset 0.2 --rounds 12`, {LINEAR}", "cifar10-fifth", 12,
     (0, 1, 2), None, ["fedproto-off", "fedproto", "fedtgp", "fedsa-linear"]),
    (f"digits: a client each for MNIST, MNIST-M and USPS, {LINEAR}", "digits", 12,
     (0, 1, 2), None, ["fedproto-off", "fedproto", "fedtgp", "fedsa-linear"]),
    ("this row, FedSA with `--distance mse --lam-r 10`", "digits", 12,
     (0, 1, 2), None, [None, "fedproto", None, "fedsa-authors-settings"]),
    ("glyphs: no flags", "class", 10,
     (0, 1, 2), None, ["fedproto-off", "fedproto", "fedtgp", "fedsa"]),
    (f"glyphs, a style each: `--partition domain --clients 8 --images-per-class 20 --subset 1`, {LINEAR}", "glyphs",
     10, (0, 1, 2), None, ["domain-fedproto-off", "domain-fedproto", "domain-fedtgp", "domain-fedsa-linear"]),
]


def common_round(runs):
    """The last round that all seeds of these runs have."""
    return max(set.intersection(*[set(rounds) for run in runs for rounds in run.values()]))


def other():
    """One line for each setting, in the last round that its runs have; no guidance may have stopped earlier."""
    rows = []
    for setting, file, planned, seeds, first, names in OTHER:
        data = read(file)
        runs = [{seed: data[name][seed] for seed in seeds} if name else None for name in names]
        fedproto = runs[1]
        t = common_round([run for run in runs[1:] if run])
        majority = np.mean([rounds[t]["most_frequent"] for rounds in fedproto.values()])
        cells = [setting, f"{t} of {planned}", number(majority)]
        for run in runs:
            if run is None:
                cells.append("")
                continue
            end = min(t, common_round([run]))
            columns = [mean_of(column, first or end, end) for column in ("classifier", "prototype")]
            cell = " / ".join(short(run, fedproto, column) for column in columns)
            cells.append(cell if end == t else f"{cell} in round {end}")
        rows.append(cells)
    show("other", ["setting", "round", "majority class", "local training only", "FedProto", "FedTGP", "FedSA"], rows)


def short(run, base, function):
    """The mean over the seeds and, with three seeds, the verdict without its interval."""
    accuracy = number(np.mean([function(rounds) for rounds in run.values()]))
    if run is base or len(run) < 3:
        return accuracy
    word = verdict(run, base, function).split(") ")[1]
    return f"{accuracy} ({word})"


# the README

def readme_demo():
    """The quick start: glyphs, seed 0, round 10."""
    runs = read("class")
    rows = [["majority class", number(runs["fedproto"][0][10]["most_frequent"]), ""]]
    for name, command in [("fedproto-off", "`fedproto.py --lam 0`: local training only"), ("fedproto", "`fedproto.py`")]:
        rows.append([command, *[number(runs[name][0][10][column]) for column in ("classifier", "prototype")]])
    show("readme-demo", ["test accuracy in %", "classifier", "prototype"], rows)


def readme_global():
    """To show FedPLCC with plain means, change the runs and commands of its two rows to one local epoch."""
    rows = []
    for clients, file, name, paper, published, command in [
            (10, "office-fedlsa", "fedavg", FEDLSA, "fedavg", "`fedlsa.py --lam 0 --no-sphere`: FedAvg"),
            (10, "office-fedlsa", "fedavg-length-1", FEDLSA, None, "`fedlsa.py --lam 0`: FedAvg on the sphere"),
            (10, "office-fedlsa", "fedlsa", FEDLSA, "fedlsa", "`fedlsa.py`"),
            (4, "office-fedplcc", "fedavg", FEDPLCC, "fedavg", "`fedplcc.py --lam-contra 0`: FedAvg"),
            (4, "office-fedplcc", "fedplcc", FEDPLCC, "fedplcc", "`fedplcc.py --weighted-means`")]:
        runs = read(file)
        base = runs["fedavg"] if name != "fedavg" else None
        rows.append([command, str(clients), *compared(runs[name], base, paper, published)])
    show("readme-global", ["Office-Caltech, four domains", "clients", "accuracy", "paper", "against FedAvg",
                           "paper's lead"], rows)


def draw():
    """The mean over three seeds, CIFAR-10, 100 clients. Stars: FedSA's Table 1."""
    runs = read("cifar10-cross-device")
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for axis, column in zip(axes, ("classifier", "prototype")):
        for name, label, colour in [
                ("fedproto-off", "local training only", "grey"),
                ("fedproto", "FedProto", "C0"),
                ("fedtgp", "FedTGP", "C2"),
                ("fedsa", "FedSA", "C3"),
                ("fedsa-authors-settings", "FedSA, its authors' settings", "C1")]:
            tested = sorted(runs[name][0])
            means = [np.mean([rounds[t][column] for rounds in runs[name].values()]) for t in tested]
            axis.plot(tested, means, color=colour, label=label)
            if name in FEDSA:
                axis.plot(1000, FEDSA[name], "*", color=colour, markeredgecolor="black", markersize=12, clip_on=False)
        axis.set(title=f"{column} accuracy", xlabel="round", xlim=(0, 1000), ylim=(60, 90))
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("accuracy (%)")
    axes[0].legend(frameon=False, loc="lower right")
    figure.savefig(PICTURES / "cifar10.png", dpi=100)
    plt.close(figure)


def main():
    cross_device()
    initial_weights()
    plain_mean()
    fedtgp_server()
    office_fedlsa()
    sphere()
    office_fedplcc()
    fedfm()
    other()
    readme_demo()
    readme_global()
    draw()


if __name__ == "__main__":
    main()
