"""Prints every table of the results page and of the README from the CSV files beside it, and draws its figures.

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
FEDSA_EIGHT = {"fedproto": 16.31, "fedtgp": 32.04, "fedsa": 35.68}  # Table 2, CIFAR-100, cross-device, HtFE8
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


def in_round(column, t):
    """-> function of a run: its value in round t."""
    return lambda rounds: at(rounds, column, t)


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
    ["fedproto-off-eight", "fedproto-eight", "fedtgp-eight"],
    ["fedproto-mse-eight", "fedtgp-mse-eight"],
]


def common_round(runs, names):
    """The last round that all seeds of these runs have."""
    return max(set.intersection(*[set(rounds) for name in names for rounds in runs[name].values()]))


def read_architectures():
    """-> {run: {seed: {round: row}}}, and {run: the round in which it is compared}."""
    runs = read("cifar10-architectures")
    round_of = {}
    for group in COMPARED:
        for name in group:
            round_of[name] = common_round(runs, group)
    return runs, round_of


def architectures():
    """Accuracies of seed 0; leads from all seeds that both runs have."""
    runs, round_of = read_architectures()
    rows = [["", "always the most frequent class", "", number(runs["fedproto"][0][2]["most_frequent"])] + [""] * 4]
    for name, (architectures, command) in ARCHITECTURES.items():
        t = round_of[name]
        cells = [architectures, command, str(t)]
        cells += [number(runs[name][0][t]["classifier"]), number(runs[name][0][2]["prototype"]), number(runs[name][0][t]["prototype"])]
        if name in FEDPROTO_OF:
            base = runs[FEDPROTO_OF[name]]
            cells += [lead(runs[name], base, in_round("classifier", t)), lead(runs[name], base, in_round("prototype", t))]
        else:
            cells += ["", ""]
        rows.append(cells)
    show("architectures", ["networks", "command", "last round", "by classifier", "by prototype in round 2", "by prototype",
                           "lead over FedProto by classifier", "lead by prototype"], rows)


def cross_device_four():
    """FedSA's Table 2 on CIFAR-10's images: with four networks and with one, on the same clients. Some runs stop
    before round 60, and the leads of those that go on are in the text."""
    runs = read("cifar10-cross-device")
    rows = [["", "always the most frequent class", *[mean_std(runs["fedproto-four"], in_round("most_frequent", 60))] * 2] + [""] * 4]
    for networks, name, base, command in [
            ("four", "fedproto-off-four", "fedproto-four", "`fedproto.py --lam 0`: no guidance"),
            ("four", "fedproto-four", None, "`fedproto.py`"),
            ("four", "fedtgp-four", "fedproto-four", "`fedtgp.py`"),
            ("four", "fedsa-four", "fedproto-four", "`fedsa.py`"),
            ("four", "fedproto-mse-four", None, "`fedproto.py --distance mse --lam 10`"),
            ("four", "fedtgp-mse-four", "fedproto-mse-four", "`fedtgp.py --distance mse --lam 10 --margin-rule nearest`"),
            ("one", "fedproto-off", "fedproto", "`fedproto.py --lam 0`: no guidance"),
            ("one", "fedproto", None, "`fedproto.py`"),
            ("one", "fedtgp", "fedproto", "`fedtgp.py`"),
            ("one", "fedsa", "fedproto", "`fedsa.py`")]:
        cells = [networks, command]
        for column in "classifier", "prototype":
            cells += [mean_std(runs[name], in_round(column, t)) if t in runs[name][0] else "" for t in (40, 60)]
        if base:
            t = min(60, common_round(runs, [name, base]))
            cells += [lead(runs[name], runs[base], in_round("classifier", t)), lead(runs[name], runs[base], in_round("prototype", t))]
        else:
            cells += ["", ""]
        rows.append(cells)
    show("cross-device-four", ["networks", "command", "by classifier, round 40", "60", "by prototype, round 40", "60",
                               "lead over FedProto by classifier", "lead by prototype"], rows)


def late(column):
    """-> function of a run on Fashion-MNIST: its mean over rounds 6 to 10."""
    return lambda rounds: mean(rounds, column, 6, 10)


def fmnist():
    """FedTGP's Table 10, three seeds."""
    runs = read("fmnist")
    base = runs["fedproto"]
    rows = [["always the most frequent class", mean_std(base, late("most_frequent"))] + [""] * 3]
    for name, command in [
            ("fedproto-off", "`fedproto.py --lam 0`: no guidance"),
            ("fedproto", "`fedproto.py`"),
            ("fedtgp", "`fedtgp.py`"),
            ("fedsa", "`fedsa.py --model htcnn8`")]:
        cells = [command, mean_std(runs[name], late("classifier")), mean_std(runs[name], late("prototype"))]
        if name == "fedproto":
            cells += ["", ""]
        else:
            cells += [lead(runs[name], base, late("classifier")), lead(runs[name], base, late("prototype"))]
        rows.append(cells)
    show("fmnist", ["command", "by classifier", "by prototype", "lead over FedProto by classifier", "lead by prototype"], rows)


def features():
    """Where the clients' class means lie, by architecture: cross-device with four networks."""
    with open(HERE / "features.csv") as file:
        all_rows = list(csv.DictReader(file))
    rows = []
    for name, title in [("fedproto-four", "FedProto"), ("fedsa-four", "FedSA")]:
        of_run = [row for row in all_rows if row["run"] == name]
        rows.append([f"{title}: accuracy by prototype"] + [number(float(row["prototype"])) for row in of_run])
        rows.append([f"{title}: accuracy by the client's own class means"] + [number(float(row["own"])) for row in of_run])
        distances = [number(float(row["distance"]) / float(row["server_margin"]), 2) for row in of_run]
        rows.append([f"{title}: relative distance"] + distances)
    show("features", ["four networks, cross-device, round 160"] + [row["architecture"] for row in of_run], rows)


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
        rows.append([title] + [number(runs[name][0][4]["prototype"]) for name in (ours, theirs)])
    show("architectures-means", ["by prototype, round 4, seed 0", "our code", "HtFLlib"], rows)


def cross_device():
    runs = read("cifar10-cross-device")
    base = runs["fedproto"]
    rows = [["always the most frequent class", mean_std(runs["fedtgp"], lambda rounds: last(rounds, "most_frequent"))] + [""] * 3]
    for name, command in [
            ("fedproto-off", "`fedproto.py --lam 0`: no guidance"),
            ("fedproto", "`fedproto.py`"),
            ("fedtgp", "`fedtgp.py`"),
            ("fedsa", "`fedsa.py`"),
            ("fedsa-authors-settings", "`fedsa.py --distance mse --lam-r 10`")]:
        run = runs[name]
        cells = [command]
        cells.append(mean_std(run, lambda rounds: best(rounds, "classifier")))
        cells.append(mean_std(run, lambda rounds: best(rounds, "prototype")))
        if name == "fedproto":
            cells += ["", ""]
        else:
            cells.append(lead(run, base, best_of_both))
            cells.append(lead(run, base, lambda rounds: mean(rounds, "prototype", 801, 1000)))
        rows.append(cells)
    show("cross-device", ["command", "best by classifier", "best by prototype",
                          "lead over FedProto, best round, better prediction",
                          "lead, mean of rounds 801-1000, by prototype"], rows)


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


def office_fedplcc():
    runs = read("office-fedplcc")
    published = {name: np.mean(domains) for name, domains in FEDPLCC.items()}
    rows = []
    for name, base, paper, command in [
            ("fedavg", None, "fedavg", "`fedplcc.py --lam-contra 0`: FedAvg"),
            ("fedplcc", "fedavg", "fedplcc", "`fedplcc.py`"),
            ("fedavg-1-epoch", None, "fedavg", "`fedplcc.py --local-epochs 1 --lam-contra 0`: FedAvg"),
            ("fedplcc-1-epoch", "fedavg-1-epoch", "fedplcc", "`fedplcc.py --local-epochs 1`"),
            ("fedplcc-1-epoch-phi-1", "fedavg-1-epoch", None, "`fedplcc.py --local-epochs 1 --phi 1`: toward all prototypes of the class")]:
        cells = [command, mean_std(runs[name], last_of_domains), number(published[paper], 2) if paper else "not given"]
        if base:
            cells.append(lead(runs[name], runs[base], last_of_domains))
            cells.append(number(published[paper] - published["fedavg"]) if paper else "")
        else:
            cells += ["", ""]
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
    shown = [20, 21, 24, 30]
    rows = []
    for name, command in [("fedavg", "`--lam 0`: FedAvg"), ("fedfm", "FedFM, λ = 50"), ("fedfm-lam-5", "`--lam 5`")]:
        cells = [command] + [number(at(runs[name], "test", t)) if t in runs[name] else "" for t in shown]
        t = max(runs[name])
        cells.append(f"{number(at(runs[name], 'test_recomputed', t))} (round {t})")
        rows.append(cells + [f"{FEDFM[name]:.2f}" if name in FEDFM else ""])
    show("fedfm", ["test accuracy, seed 0"] + [f"round {t}" for t in shown] +
         ["with recomputed statistics", "published: all images, best of 100 rounds"], rows)


def left_open():
    """What the papers leave open: our choice beside other readings, on seed 0 unless the row says otherwise."""
    plcc, lsa, fifth = read("office-fedplcc"), read("office-fedlsa"), read("cifar10-fifth")

    def late_mean(name):
        return number(mean(plcc[name][0], DOMAINS, 81, 100))

    def of_domains(name):
        return number(last_of_domains(lsa[name][0]))

    def leads(name, base):
        return " and ".join(number(last_of_domains(plcc[name][seed]) - last_of_domains(plcc[base][seed])) for seed in (0, 1))

    show("left-open", ["what is open", "accuracy", "ours", "other readings"], [
        ["FedPLCC's τ", f"Office, one epoch, mean of rounds 81 to 100; FedAvg has {late_mean('fedavg-1-epoch')}",
         f"0.07: {late_mean('fedplcc-1-epoch')}", f"0.55: {late_mean('fedplcc-1-epoch-tau-0.55')}; 0.055: {late_mean('fedplcc-1-epoch-tau-0.055')}"],
        ["FedPLCC's Eq. 5", "lead over FedAvg, Office, one epoch, round 100, seeds 0 and 1",
         f"mean: {leads('fedplcc-1-epoch', 'fedavg-1-epoch')}", f"sum over 32 images: {leads('fedplcc-1-epoch-sum', 'fedavg-1-epoch-sum')}"],
        ["size of FedLSA's clients", f"Office, FedAvg, round 100; the paper has {number(FEDLSA_MEAN['fedavg'], 2)}",
         f"20 % of a domain: {of_domains('fedavg')}", f"10 %: {of_domains('fedavg-10-percent')}; 30 %: {of_domains('fedavg-30-percent')}"],
        ["FedTGP's Eq. 10", "by prototype, a fifth of CIFAR-10, round 12",
         f"mean: {number(last(fifth['fedtgp'][0], 'prototype'))}", f"[sum](patches/fedtgp-sum.patch): {number(last(fifth['fedtgp-sum'][0], 'prototype'))}"],
    ])


def other_settings():
    """Leads over FedProto in the last round, by the better prediction."""
    rows = []
    for title, file, prefix, names in [
            ("glyphs, label skew", "class", "", ["fedproto-off", "fedtgp", "fedsa", None]),
            ("glyphs, domain skew", "glyphs", "domain-", ["fedproto-off", "fedtgp", "fedsa-linear", None]),
            ("a fifth of CIFAR-10", "cifar10-fifth", "", ["fedproto-off", "fedtgp", "fedsa-linear", "fedsa-authors-settings"]),
            ("digits", "digits", "", ["fedproto-off", "fedtgp", "fedsa-linear", "fedsa-authors-settings"])]:
        runs = read(file)
        base = runs[prefix + "fedproto"]
        cells = [title]
        for name in names:
            cell = lead(runs[prefix + name], base, last_of_both) if name else ""
            cells.append(cell + " *linear*" if name == "fedsa-linear" else cell)
        rows.append(cells)
    show("other-settings", ["lead over FedProto", "no guidance", "FedTGP", "FedSA", "FedSA, `--distance mse --lam-r 10`"], rows)


def readme():
    """The main leads: different architectures first."""
    runs, round_of = read_architectures()
    fm = read("cifar10-fedfm")
    t = max(fm["fedfm"][0])
    device, lsa, plcc = read("cifar10-cross-device"), read("office-fedlsa"), read("office-fedplcc")

    def two_leads(run, base, by_classifier, by_prototype):
        return f"{lead(run, base, by_classifier)} by classifier, {lead(run, base, by_prototype)} by prototype"

    def architectures_row(title, published, one):
        run, base, t = runs[one], runs[FEDPROTO_OF[one]], round_of[one]
        ours = two_leads(run, base, in_round("classifier", t), in_round("prototype", t))
        seeds = "one seed, " if len(run) == 1 else ""
        return [title, number(published), ours, f"too early: {seeds}round {t} of 1000"]

    def four_row(title, method, one, other, verdict):
        t = common_round(device, [one, other])
        published = number(FEDSA_EIGHT[method] - FEDSA_EIGHT["fedproto"])
        ours = two_leads(device[one], device[other], in_round("classifier", t), in_round("prototype", t))
        return [title, f"{published} (CIFAR-100, eight networks)", ours, f"{verdict}: three seeds, round {t} of 1000"]

    def device_row(title, published, one, other, verdict):
        return [title, number(published), lead(device[one], device[other], best_of_both), verdict]

    def office_row(title, published, one, other, verdict):
        return [title, number(published), lead(one, other, last_of_domains), verdict]

    show("readme", ["lead in points of accuracy", "published", "ours (95 % CI)", "verdict"], [
        four_row("FedSA over FedProto, four deep networks, 100 clients", "fedsa", "fedsa-four", "fedproto-four",
                 "far ahead by prototype, no winner by classifier"),
        four_row("FedTGP over FedProto, the same clients", "fedtgp", "fedtgp-four", "fedproto-four", "no winner"),
        four_row("the same, its code's settings", "fedtgp", "fedtgp-mse-four", "fedproto-mse-four",
                 "ahead by prototype, no winner by classifier"),
        architectures_row("FedTGP over FedProto, eight deep networks, 20 clients, its code's settings", FEDTGP_LEAD, "fedtgp-mse-eight"),
        device_row("FedTGP over FedProto, one small CNN, CIFAR-10", FEDSA["fedtgp"] - FEDSA["fedproto"], "fedtgp", "fedproto", "behind"),
        device_row("FedSA over FedProto, one small CNN, CIFAR-10", FEDSA["fedsa"] - FEDSA["fedproto"], "fedsa", "fedproto", "no winner"),
        office_row("FedLSA over FedAvg, Office-Caltech", FEDLSA_MEAN["fedlsa"] - FEDLSA_MEAN["fedavg"], lsa["fedlsa"], lsa["fedavg"],
                   "similar mean; no winner if FedAvg gets the same scaling (below)"),
        office_row("FedPLCC over FedAvg, Office-Caltech", np.mean(FEDPLCC["fedplcc"]) - np.mean(FEDPLCC["fedavg"]), plcc["fedplcc"],
                   plcc["fedavg"], "similar, at lower accuracies"),
        ["FedFM over FedAvg, a fifth of CIFAR-10", number(FEDFM["fedfm"] - FEDFM["fedavg"]),
         number(at(fm["fedfm"][0], "test", t) - at(fm["fedavg"][0], "test", t)), f"too early: one seed, round {t} of 100"],
    ])


# the figures

def draw(picture, lines, rounds, accuracies, published=()):
    """Two panels, by classifier and by prototype. lines: (run, seeds, label, colour, style), the mean over the seeds;
    published: (accuracy, colour), drawn as stars in the last round."""
    runs = read("cifar10-cross-device")
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for axis, column in zip(axes, ("classifier", "prototype")):
        for name, seeds, label, colour, style in lines:
            curves = [curve(runs[name][seed], column) for seed in seeds]
            common = sorted(set.intersection(*[set(one) for one in curves]))
            axis.plot(common, [np.mean([one[t] for one in curves]) for t in common], style, color=colour, label=label)
        for accuracy, colour in published:
            axis.plot(rounds, accuracy, "*", color=colour, markeredgecolor="black", markersize=12, clip_on=False, zorder=3)
        axis.set(title=f"by {column}", xlabel="round", xlim=(0, rounds), ylim=accuracies)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("accuracy (%)")
    axes[0].legend(frameon=False, loc="lower right")
    figure.savefig(PICTURES / picture, dpi=100)
    plt.close(figure)


def draw_one_network():
    """The mean over three seeds."""
    lines = [
        ("fedproto-off", "no guidance", "grey"),
        ("fedproto", "FedProto", "C0"),
        ("fedtgp", "FedTGP", "C2"),
        ("fedsa", "FedSA", "C3"),
        ("fedsa-authors-settings", "FedSA, distance and λ1 of its code", "C1"),
    ]
    draw("cifar10.png", [(name, (0, 1, 2), label, colour, "-") for name, label, colour in lines], rounds=1000, accuracies=(60, 90),
         published=[(FEDSA["fedproto"], "C0"), (FEDSA["fedtgp"], "C2"), (FEDSA["fedsa"], "C3")])


def draw_four_networks():
    """A line is one seed; seed 0 has the label."""
    runs = read("cifar10-cross-device")
    lines = []
    for name, label, colour, style in [
            ("fedproto-off-four", "no guidance", "grey", ".-"),
            ("fedproto-four", "FedProto", "C0", ".-"),
            ("fedtgp-four", "FedTGP", "C2", ".-"),
            ("fedsa-four", "FedSA", "C3", ".-"),
            ("fedproto", "FedProto, one network", "C0", ".--"),
            ("fedproto-own-weights", "FedProto, one network, own initial weights", "C0", ".:")]:
        for seed in runs[name] if name.endswith("-four") else [0]:
            lines.append((name, [seed], label if seed == 0 else None, colour, style))
    draw("cifar10-four.png", lines, rounds=160, accuracies=(0, 90))


def main():
    cross_device_four()
    fmnist()
    architectures()
    features()
    prototypes_of_fedproto()
    cross_device()
    office_fedlsa()
    office_fedplcc()
    office_domains()
    fedfm()
    left_open()
    other_settings()
    readme()
    draw_one_network()
    draw_four_networks()


if __name__ == "__main__":
    main()
