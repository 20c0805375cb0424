"""Prints every table of the results page and of the README from the CSV files beside it, and draws its figure.

    python .github/results/tables.py

Each table follows its marker, <!-- table: NAME -->, and tests/test_results.py looks for it on its page."""

import csv
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

HERE = Path(__file__).parent
PICTURES = HERE.parent / "pictures"
DOMAINS = ["caltech", "amazon", "webcam", "dslr"]
T_QUANTILE = 4.303  # 97.5 % quantile of Student's t for three seeds

# the papers' numbers
FEDTGP_LEAD = 88.15 - 82.07  # FedTGP, Table 1: CIFAR-10, practical
FMNIST = {"fedproto": 97.46, "fedtgp": 97.58}  # FedTGP, Table 10, practical
FEDSA = {"fedproto": 87.49, "fedtgp": 87.98, "fedsa": 88.78}  # Table 1, CIFAR-10, cross-device
FEDFM = {"fedavg": 66.69, "fedfm": 72.89}  # Table III, CIFAR-10, NIID-1: all images, best of 100 rounds
FEDLSA = {  # Table 2, by domain
    "fedavg": [56.70, 66.32, 43.10, 46.67],
    "fedlsa": [55.80, 64.74, 60.34, 60.00],
}
FEDLSA_MEAN = {"fedavg": 53.20, "fedlsa-no-sep": 59.18, "fedlsa-l2": 58.37, "fedlsa": 60.22}  # Tables 2 and 5
FEDPLCC = {  # Table III, by domain
    "fedavg": [62.50, 83.16, 72.41, 53.33],
    "fedplcc": [72.77, 84.74, 75.86, 80.00],
}


# reading

def read(name):
    """A CSV file -> {run: {seed: {round: {column: number}}}}."""
    runs = {}
    with open(HERE / f"{name}.csv") as file:
        for row in csv.DictReader(file):
            rounds = runs.setdefault(row["run"], {}).setdefault(int(row["seed"]), {})
            values = {}
            for column, text in row.items():
                if column not in ("run", "seed", "round") and text:
                    values[column] = float(text)
            rounds[int(row["round"])] = values
    return runs


def curve(rounds, column):
    """One run -> {round: its value}; column may be a list of domains, of which this is the mean."""
    columns = column if isinstance(column, list) else [column]
    return {t: np.mean([row[name] for name in columns]) for t, row in rounds.items() if columns[0] in row}


def at(rounds, column, t):
    return curve(rounds, column)[t]


def last(rounds, column):
    return at(rounds, column, max(rounds))


def best(rounds, column):
    return max(curve(rounds, column).values())


def mean(rounds, column, first, end):
    """The mean over the tested rounds first, ..., end."""
    return np.mean([value for t, value in curve(rounds, column).items() if first <= t <= end])


def better(row):
    """The better of a round's two predictions."""
    return max(row["classifier"], row["prototype"])


def mean_of_better(rounds, first, end):
    return np.mean([better(row) for t, row in rounds.items() if first <= t <= end])


def best_of_both(rounds):
    return max(better(row) for row in rounds.values())


def last_of_both(rounds):
    return better(rounds[max(rounds)])


def values_of(run, function):
    """function of a run's rounds -> {seed: a number}."""
    return {seed: function(rounds) for seed, rounds in run.items()}


# writing

def number(x, digits=1):
    text = f"{x:.{digits}f}".replace("-", "−")
    return text.replace("−0.0", "0.0") if float(f"{x:.{digits}f}") == 0 else text


def mean_std(run, function):
    """± over the seeds, if there are several."""
    numbers = list(values_of(run, function).values())
    if len(numbers) == 1:
        return number(numbers[0])
    return f"{number(np.mean(numbers))} ± {number(np.std(numbers, ddof=1))}"


def lead(run, base, function):
    """The mean lead of a run over another on three seeds, with its 95 % t-interval. With one seed: the lead."""
    ours, theirs = values_of(run, function), values_of(base, function)
    if len(ours) < 3:
        return number(ours[0] - theirs[0])
    leads = [ours[seed] - theirs[seed] for seed in (0, 1, 2)]
    half = T_QUANTILE * np.std(leads, ddof=1) / np.sqrt(3)
    return f"{number(np.mean(leads))} ({number(np.mean(leads) - half)} to {number(np.mean(leads) + half)})"


def show(name, head, rows):
    print(f"<!-- table: {name} -->")
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


# the tables

ARCHITECTURES = {  # run: number of architectures, command
    "fedproto-off": ("four", "`fedproto.py --lam 0`: no guidance"),
    "fedproto": ("four", "`fedproto.py`"),
    "fedtgp": ("four", "`fedtgp.py`"),
    "fedsa": ("four", "`fedsa.py`"),
    "fedproto-mse": ("four", "`fedproto.py --distance mse --lam 10`"),
    "fedtgp-mse": ("four", "`fedtgp.py --distance mse --lam 10 --margin-rule nearest`"),
    "fedproto-off-eight": ("eight", "`fedproto.py --lam 0`: no guidance"),
    "fedproto-eight": ("eight", "`fedproto.py`"),
    "fedtgp-eight": ("eight", "`fedtgp.py`"),
    "fedproto-mse-eight": ("eight", "`fedproto.py --distance mse --lam 10`"),
    "fedtgp-mse-eight": ("eight", "`fedtgp.py --distance mse --lam 10 --margin-rule nearest`"),
}
FEDPROTO_OF = {
    "fedtgp": "fedproto", "fedsa": "fedproto", "fedtgp-mse": "fedproto-mse",
    "fedtgp-eight": "fedproto-eight", "fedtgp-mse-eight": "fedproto-mse-eight",
}
COMPARED = [  # runs that are compared in the last round that all of them have
    ["fedproto-off", "fedproto", "fedtgp", "fedsa"],
    ["fedproto-mse", "fedtgp-mse"],
    ["fedproto-off-eight"],
    ["fedproto-eight", "fedtgp-eight"],
    ["fedproto-mse-eight", "fedtgp-mse-eight"],
]


def read_architectures():
    """-> {run: {round: row}} of seed 0, and {run: the round in which it is compared}."""
    runs = {name: seeds[0] for name, seeds in read("cifar10-architectures").items()}
    round_of = {}
    for group in COMPARED:
        common = set.intersection(*[set(runs[name]) for name in group])
        for name in group:
            round_of[name] = max(common)
    return runs, round_of


def architectures():
    runs, round_of = read_architectures()
    rows = [["", "always the most frequent class", "", number(runs["fedproto-off"][2]["most_frequent"])] + [""] * 6]
    for name, (architectures, command) in ARCHITECTURES.items():
        t = round_of[name]
        row = runs[name][t]
        cells = [architectures, command, str(t), number(row["classifier"]), number(row["prototype"])]
        if name in FEDPROTO_OF:
            base = runs[FEDPROTO_OF[name]][t]
            cells.append(number(better(row) - better(base)))
            cells.append(number(row["prototype"] - base["prototype"]))
        else:
            cells += ["", ""]
        off = runs["fedproto-off-eight" if architectures == "eight" else "fedproto-off"]
        cells.append(number(better(row) - better(off[t])) if t in off and "off" not in name else "")
        if "server_loss" in row:
            cells += [number(row["margin"]), f"{number(row['server_loss'])} / {number(row['last_batch_loss'])}"]
        else:
            cells += ["", ""]
        rows.append(cells)
    show("architectures", ["networks", "command", "round", "by classifier", "by prototype or anchor",
                           "lead over FedProto, better prediction", "lead by prototype or anchor",
                           "lead over no guidance, better prediction", "margin δ", "server's loss: mean / last batch"], rows)

    tested = [2, 4, 6, 8, 10, 12]
    rows = []
    for name, (architectures, command) in ARCHITECTURES.items():
        if architectures == "four":
            rows.append([command] + [number(runs[name][t]["prototype"]) if t in runs[name] else "" for t in tested])
    show("architectures-rounds", ["four networks, by prototype or anchor"] + [f"round {t}" for t in tested], rows)


FMNIST_RUNS = [  # run, its FedProto, command
    ("fedproto-off", "fedproto", "`fedproto.py --lam 0`: no guidance"),
    ("fedproto", None, "`fedproto.py`"),
    ("fedtgp", "fedproto", "`fedtgp.py`"),
    ("fedsa", "fedproto", "`fedsa.py --model htcnn8`"),
    ("fedproto-mse", None, "`fedproto.py --distance mse --lam 10`"),
    ("fedtgp-mse", "fedproto-mse", "`fedtgp.py --distance mse --lam 10 --margin-rule nearest`"),
]


def late(column):
    """-> function of a run on Fashion-MNIST: its mean over rounds 6 to 10."""
    return lambda rounds: mean(rounds, column, 6, 10)


def fmnist():
    """FedTGP's Table 10. Runs have three seeds or one."""
    runs = read("fmnist")
    rows = [["always the most frequent class", "", mean_std(runs["fedproto"], late("most_frequent"))] + [""] * 4]
    for name, base, command in FMNIST_RUNS:
        run = runs[name]
        cells = [command, str(len(run)), mean_std(run, late("classifier")), mean_std(run, late("prototype"))]
        cells.append(f"{FMNIST[name]:.2f}" if name in FMNIST else "")
        if base:
            cells.append(lead(run, runs[base], lambda rounds: mean_of_better(rounds, 6, 10)))
            cells.append(lead(run, runs[base], late("prototype")))
        else:
            cells += ["", ""]
        rows.append(cells)
    show("fmnist", ["command", "seeds", "by classifier", "by prototype or anchor", "published, by prototype",
                    "lead over FedProto, better prediction", "lead by prototype or anchor"], rows)


def features():
    """Where the clients' class means lie, by architecture."""
    with open(HERE / "features.csv") as file:
        all_rows = list(csv.DictReader(file))
    names = [row["architecture"] for row in all_rows if row["run"] == "fedproto-eight"]
    rows = []
    for name, title in [("fedproto-eight", "FedProto"), ("fedtgp-eight", "FedTGP")]:
        of_run = [row for row in all_rows if row["run"] == name]
        apart = number(float(of_run[0]["server_margin"]))
        for column, text in [("prototype", "accuracy by prototype"), ("length", "length of the class means"),
                             ("distance", f"their distance to the server's prototypes, which lie {apart} apart")]:
            rows.append([f"{title}: {text}"] + [number(float(row[column])) for row in of_run])
    show("features", ["eight networks, round 2, seed 0"] + names, rows)


def prototypes_of_fedproto():
    """FedProto with other class means and another mean at the server, in two codes on the same clients."""
    runs, _ = read_architectures()
    rows = []
    for title, ours, theirs in [
            ("FedProto: weighted by class counts, means from after training (ours)", "fedproto-mse", "htfllib-fedproto-weighted-after"),
            ("weighted, means from while training", "fedproto-mse-training", "htfllib-fedproto-weighted"),
            ("plain mean, from after training", "fedproto-mse-uniform", "htfllib-fedproto-after"),
            ("plain mean, from while training (HtFLlib's)", "fedproto-mse-uniform-training", "htfllib-fedproto"),
            ("FedTGP", "fedtgp-mse", "htfllib-fedtgp")]:
        rows.append([title] + [number(runs[name][4]["prototype"]) for name in (ours, theirs)])
    show("architectures-means", ["by prototype, round 4, seed 0", "our code", "HtFLlib"], rows)


def cross_device():
    runs = read("cifar10-cross-device")
    base = runs["fedproto"]
    rows = [["always the most frequent class", mean_std(runs["fedtgp"], lambda rounds: last(rounds, "most_frequent"))] + [""] * 4]
    for name, method, command in [
            ("fedproto-off", "", "`fedproto.py --lam 0`: no guidance"),
            ("fedproto", "fedproto", "`fedproto.py`"),
            ("fedtgp", "fedtgp", "`fedtgp.py`"),
            ("fedsa", "fedsa", "`fedsa.py`"),
            ("fedsa-linear", "fedsa", "`fedsa.py --projection linear`"),
            ("fedsa-authors-settings", "fedsa", "`fedsa.py --distance mse --lam-r 10`")]:
        run = runs[name]
        cells = [command]
        cells.append(mean_std(run, lambda rounds: best(rounds, "classifier")))
        cells.append(mean_std(run, lambda rounds: best(rounds, "prototype")))
        cells.append(f"{FEDSA[method]:.2f}" if method else "")
        if name == "fedproto":
            cells += ["", ""]
        else:
            cells.append(lead(run, base, best_of_both))
            cells.append(lead(run, base, lambda rounds: mean(rounds, "prototype", 801, 1000)))
        rows.append(cells)
    show("cross-device", ["command", "best by classifier", "best by prototype or anchor", "published",
                          "lead over FedProto, best round, better prediction",
                          "lead, mean of rounds 801-1000, by prototype or anchor"], rows)


def published_code():
    """How far other people's code is from ours with its settings, over rounds 20, 40, ..., 300."""
    runs = {name: seeds[0] for name, seeds in read("cifar10-cross-device").items()}
    rows = []
    for title, theirs, ours in [
            ("FedSA, its authors' distance and λ1", "authors-code-fedsa", "fedsa-authors-settings"),
            ("FedProto, HtFLlib's settings", "htfllib-fedproto", "fedproto-htfllib-settings"),
            ("FedTGP, HtFLlib's settings", "htfllib-fedtgp", "fedtgp-htfllib-settings")]:
        cells = [title]
        for column in ("classifier", "prototype"):
            differences = [runs[theirs][t][column] - runs[ours][t][column] for t in range(20, 301, 20)]
            cells.append(number(np.max(np.abs(differences))))
        rows.append(cells)
    show("published-code", ["largest difference between published code and ours, rounds 20 to 300, seed 0", "by classifier",
                            "by prototype or anchor"], rows)


def last_of_domains(rounds):
    return last(rounds, DOMAINS)


def office_fedlsa():
    runs = read("office-fedlsa")
    rows = []
    for name, command in [
            ("fedavg", "`fedlsa.py --lam 0 --no-sphere`: FedAvg"),
            ("fedavg-length-1", "`fedlsa.py --lam 0`: FedAvg, features of length 1"),
            ("fedlsa-no-sep", "`fedlsa.py --alpha 0`: without L_SEP"),
            ("fedlsa-l2", "`fedlsa.py --compactness l2`: distance instead of L_COM"),
            ("fedlsa", "`fedlsa.py`")]:
        cells = [command, mean_std(runs[name], last_of_domains)]
        cells.append(number(FEDLSA_MEAN[name], 2) if name in FEDLSA_MEAN else "not given")
        if name == "fedavg":
            cells += ["", ""]
        else:
            cells.append(lead(runs[name], runs["fedavg"], last_of_domains))
            cells.append(number(FEDLSA_MEAN[name] - FEDLSA_MEAN["fedavg"]) if name in FEDLSA_MEAN else "")
        rows.append(cells)
    show("office-fedlsa", ["command", "last of 100 rounds", "published", "lead over FedAvg", "published lead"], rows)

    shown = (10, 100)
    rows = []
    for base, title in [("fedavg", "FedLSA over FedAvg"),
                        ("fedavg-length-1", "FedLSA over FedAvg with features of length 1")]:
        rows.append([title] + [lead(runs["fedlsa"], runs[base], lambda rounds: at(rounds, DOMAINS, t)) for t in shown])
    show("office-fedlsa-rounds", ["lead"] + [f"round {t}" for t in shown], rows)


def office_fedplcc():
    runs = read("office-fedplcc")
    published = {name: np.mean(domains) for name, domains in FEDPLCC.items()}
    rows = []
    for name, method, base, command in [
            ("fedavg", "fedavg", None, "`fedplcc.py --lam-contra 0`: FedAvg"),
            ("fedplcc", "fedplcc", "fedavg", "`fedplcc.py`"),
            ("fedavg-1-epoch", "fedavg", None, "`fedplcc.py --local-epochs 1 --lam-contra 0`: FedAvg"),
            ("fedplcc-1-epoch", "fedplcc", "fedavg-1-epoch", "`fedplcc.py --local-epochs 1`")]:
        run = runs[name]
        cells = [command, mean_std(run, last_of_domains), number(published[method], 2)]
        if base is None:
            cells += ["", ""]
        else:
            cells.append(lead(run, runs[base], last_of_domains))
            cells.append(number(published["fedplcc"] - published["fedavg"]))
        rows.append(cells)
    show("office-fedplcc", ["command", "last of 100 rounds", "published", "lead over FedAvg", "published lead"], rows)


def office_domains():
    groups = [[name] for name in DOMAINS] + [DOMAINS[:3]]
    rows = []
    for title, method, paper in [("FedLSA over FedAvg", "fedlsa", FEDLSA), ("FedPLCC over FedAvg", "fedplcc", FEDPLCC)]:
        runs = read(f"office-{method}")
        ours = [title]
        published = ["*its paper*"]
        differences = dict(zip(DOMAINS, np.subtract(paper[method], paper["fedavg"])))
        for columns in groups:
            ours.append(lead(runs[method], runs["fedavg"], lambda rounds: last(rounds, columns)))
            published.append(number(np.mean([differences[name] for name in columns])))
        rows += [ours, published]
    show("office-domains", ["lead, last round", "Caltech", "Amazon", "Webcam", "DSLR", "mean without DSLR"], rows)


def fedfm():
    """FedFM's Table III on a fifth of the images. Rounds 1 to 20 are FedAvg in all runs."""
    runs = {name: seeds[0] for name, seeds in read("cifar10-fedfm").items()}
    shown = [20, 21, max(runs["fedfm"]), max(runs["fedavg"])]
    rows = []
    for name, command in [("fedavg", "`--lam 0`: FedAvg"), ("fedfm", "FedFM, λ = 50"), ("fedfm-lam-5", "`--lam 5`")]:
        cells = [command] + [number(at(runs[name], "test", t)) if t in runs[name] else "" for t in shown]
        rows.append(cells + [f"{FEDFM[name]:.2f}" if name in FEDFM else ""])
    show("fedfm", ["test accuracy, seed 0"] + [f"round {t}" for t in shown] + ["published: all images, best of 100 rounds"], rows)

    rows = []
    for title, column in ("averaged over clients", "test"), ("recomputed for the averaged model", "test_recomputed"):
        rows.append([title] + [number(at(runs[name], column, t))
                               for name, t in (("fedavg", 30), ("fedfm-from-30", 31), ("fedfm", 24), ("fedfm-lam-5", 30))])
    show("fedfm-statistics", ["BatchNorm's statistics", "FedAvg, round 30", "one round of λ = 50 after it", "FedFM, λ = 50, round 24",
                              "`--lam 5`, round 30"], rows)


def choices():
    """What the papers leave open: accuracies on seed 0."""
    lsa, plcc, fifth = read("office-fedlsa"), read("office-fedplcc"), read("cifar10-fifth")

    def late(name):
        return number(mean(plcc[name][0], DOMAINS, 81, 100))
    show("choices", ["choice: ours → instead", "ours", "instead", "the paper"], [
        ["FedPLCC: τ = 0.07 → 0.55", late("fedplcc-1-epoch"), late("fedplcc-1-epoch-tau-0.55"),
         number(np.mean(FEDPLCC["fedplcc"]))],
        ["the same: 0.07 → 0.055", late("fedplcc-1-epoch"), late("fedplcc-1-epoch-tau-0.055"),
         number(np.mean(FEDPLCC["fedplcc"]))],
        ["FedLSA's FedAvg: 20 % of a domain → 10 %", number(last_of_domains(lsa["fedavg"][0])),
         number(last_of_domains(lsa["fedavg-10-percent"][0])), number(FEDLSA_MEAN["fedavg"])],
        ["the same: 20 % → 30 %", number(last_of_domains(lsa["fedavg"][0])),
         number(last_of_domains(lsa["fedavg-30-percent"][0])), number(FEDLSA_MEAN["fedavg"])],
        ["FedTGP by prototype, a fifth of CIFAR-10: mean in Eq. 10 → sum", number(last(fifth["fedtgp"][0], "prototype")),
         number(last(fifth["fedtgp-sum"][0], "prototype")), ""],
    ])


def other_settings():
    """Leads over FedProto in the last round, by the better prediction."""
    rows = []
    for title, file, prefix, names in [
            ("glyphs, label skew", "class", "", ["fedproto-off", "fedtgp", None, "fedsa", None]),
            ("glyphs, domain skew", "glyphs", "domain-", ["fedproto-off", "fedtgp", "fedsa-linear", None, None]),
            ("a fifth of CIFAR-10", "cifar10-fifth", "", ["fedproto-off", "fedtgp", "fedsa-linear", None, "fedsa-authors-settings"]),
            ("digits", "digits", "", ["fedproto-off", "fedtgp", "fedsa-linear", None, "fedsa-authors-settings"])]:
        runs = read(file)
        base = runs[prefix + "fedproto"]
        rows.append([title] + [lead(runs[prefix + name], base, last_of_both) if name else "" for name in names])
    show("other-settings", ["lead over FedProto", "no guidance", "FedTGP", "FedSA, `--projection linear`", "FedSA",
                            "FedSA, `--distance mse --lam-r 10`"], rows)


def readme():
    """One row for each published lead that we tried."""
    runs, round_of = read_architectures()
    fm, small = read("cifar10-fedfm"), read("fmnist")
    t = max(fm["fedfm"][0])
    device, lsa, plcc = read("cifar10-cross-device"), read("office-fedlsa"), read("office-fedplcc")

    def architectures_row(title, published, one):
        ours, base, t = runs[one], runs[FEDPROTO_OF[one]], round_of[one]
        by_classifier = number(ours[t]["classifier"] - base[t]["classifier"])
        by_prototype = number(ours[t]["prototype"] - base[t]["prototype"])
        ours = f"{by_classifier} by classifier, {by_prototype} by prototype"
        return [title, published and number(published), ours, f"too early: one seed, round {t} of 1000"]

    def fmnist_row(title, published, one, verdict):
        by_classifier = lead(small[one], small["fedproto"], late("classifier"))
        by_prototype = lead(small[one], small["fedproto"], late("prototype"))
        return [title, published and number(published), f"{by_classifier} by classifier, {by_prototype} by prototype", verdict]

    def device_row(title, published, one, other, verdict):
        return [title, published and number(published), lead(device[one], device[other], best_of_both), verdict]

    def office_row(title, published, one, other, verdict):
        return [title, published and number(published), lead(one, other, last_of_domains), verdict]

    show("readme", ["lead in points of accuracy", "published", "ours (95 % CI)", "verdict"], [
        architectures_row("FedTGP over FedProto, eight deep networks, CIFAR-10", FEDTGP_LEAD, "fedtgp-eight"),
        architectures_row("the same with distance, λ and margin of FedTGP's code", FEDTGP_LEAD, "fedtgp-mse-eight"),
        fmnist_row("FedTGP over FedProto, eight small CNNs, Fashion-MNIST", FMNIST["fedtgp"] - FMNIST["fedproto"], "fedtgp",
                   "too early: round 10 of 1000"),
        fmnist_row("FedSA over FedProto, eight small CNNs, Fashion-MNIST", "", "fedsa", "ahead so far: round 10 of 1000"),
        device_row("FedProto over training alone, one small CNN", "", "fedproto", "fedproto-off", "ahead"),
        device_row("FedTGP over FedProto, one small CNN", FEDSA["fedtgp"] - FEDSA["fedproto"], "fedtgp", "fedproto", "behind FedProto"),
        device_row("FedSA over FedProto, one small CNN", FEDSA["fedsa"] - FEDSA["fedproto"], "fedsa", "fedproto", "no winner"),
        office_row("FedLSA over FedAvg", FEDLSA_MEAN["fedlsa"] - FEDLSA_MEAN["fedavg"], lsa["fedlsa"], lsa["fedavg"],
                   "the mean agrees; two of four domains have the opposite sign"),
        office_row("FedPLCC over FedAvg", np.mean(FEDPLCC["fedplcc"]) - np.mean(FEDPLCC["fedavg"]), plcc["fedplcc"], plcc["fedavg"],
                   "agrees, at lower accuracies; with Eq. 5 as a sum about half"),
        ["FedFM over FedAvg, a fifth of the images", number(FEDFM["fedfm"] - FEDFM["fedavg"]),
         number(at(fm["fedfm"][0], "test", t) - at(fm["fedavg"][0], "test", t)), f"too early: one seed, round {t} of 100"],
    ])


# the figure

def draw_cifar10():
    runs = read("cifar10-cross-device")
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for axis, column, title in zip(axes, ("classifier", "prototype"), ("by classifier", "by nearest prototype or anchor")):
        for name, label, colour in [("fedproto-off", "no guidance", "grey"), ("fedproto", "FedProto", "C0"), ("fedtgp", "FedTGP", "C2"),
                                    ("fedsa", "FedSA", "C3"),
                                    ("fedsa-authors-settings", "FedSA, distance and λ1 of its code", "C1")]:
            curves = [curve(rounds, column) for rounds in runs[name].values()]
            rounds = sorted(t for t in curves[0] if all(t in other for other in curves))
            means = [np.mean([other[t] for other in curves]) for t in rounds]
            axis.plot(rounds, means, color=colour, label=label)
        for name, accuracy in FEDSA.items():
            colour = {"fedproto": "C0", "fedtgp": "C2", "fedsa": "C3"}[name]
            axis.plot(1000, accuracy, "*", color=colour, markeredgecolor="black", markersize=12, clip_on=False, zorder=3)
        axis.set(title=title, xlabel="round", xlim=(0, 1000), ylim=(60, 90))
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("accuracy, mean of three seeds (%)")
    axes[0].legend(frameon=False, loc="lower right")
    figure.savefig(PICTURES / "cifar10.png", dpi=100)
    plt.close(figure)


def main():
    fmnist()
    architectures()
    features()
    prototypes_of_fedproto()
    cross_device()
    published_code()
    office_fedlsa()
    office_fedplcc()
    office_domains()
    fedfm()
    choices()
    other_settings()
    readme()
    draw_cifar10()


if __name__ == "__main__":
    main()
