"""Prints every table of the results page and of the README from the CSV files beside it, and draws their two figures.

    python .github/results/tables.py

Each table follows its marker, <!-- table: NAME -->, and tests/test_results.py looks for it on its page."""

import csv
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

HERE = Path(__file__).parent
PICTURES = HERE.parent / "pictures"
DOMAINS = ["caltech", "amazon", "webcam", "dslr"]
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantile with n - 1 degrees of freedom, by the number of seeds n

# the papers' numbers
FEDTGP_LEAD = 6.1  # FedTGP, Table 1: CIFAR-10, practical, 88.15 - 82.07
FEDSA_LEAD = 19.4  # FedSA, Table 2: CIFAR-100, cross-device, 35.68 - 16.31
FEDSA = {"fedproto": 87.49, "fedtgp": 87.98, "fedsa": 88.78}  # Table 1, CIFAR-10, cross-device
FASHION_MNIST = {  # FedTGP, Table 10
    "fedproto": 97.46,
    "fedtgp": 97.58,
    "fedproto-pathological": 99.48,
    "fedtgp-pathological": 99.56,
}
FEDFM = {"fedavg": 66.69, "fedfm": 72.89}  # Table III, CIFAR-10, NIID-1: all images, best of 100 rounds
FEDLSA = {  # Tables 2 and 5, by domain
    "fedavg": [56.70, 66.32, 43.10, 46.67],
    "fedlsa-no-sep": [54.91, 61.58, 56.90, 63.33],
    "fedlsa-l2": [55.80, 64.21, 53.45, 60.00],
    "fedlsa": [55.80, 64.74, 60.34, 60.00],
}
FEDLSA_MEAN = {"fedavg": 53.20, "fedlsa-no-sep": 59.18, "fedlsa-l2": 58.37, "fedlsa": 60.22}  # as printed
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
    return {t: np.mean([row[name] for name in columns]) for t, row in rounds.items()}


def at(rounds, column, t):
    return curve(rounds, column)[t]


def last(rounds, column):
    return at(rounds, column, max(rounds))


def best(rounds, column):
    return max(curve(rounds, column).values())


def late(rounds, column, first):
    """The mean over the rounds from the first one on."""
    return np.mean([value for t, value in curve(rounds, column).items() if t >= first])


def better(row):
    """The better of a round's two predictions."""
    return max(row["classifier"], row["prototype"])


def best_of_both(rounds):
    return max(better(row) for row in rounds.values())


def last_of_both(rounds):
    return better(rounds[max(rounds)])


def values_of(run, function, *more):
    """{seed: a number} of a run."""
    return {seed: function(rounds, *more) for seed, rounds in run.items()}


def lead(one, other):
    """{seed: difference} on the seeds that both have."""
    return {seed: one[seed] - other[seed] for seed in one if seed in other}


# writing

def number(x, digits=1):
    text = f"{x:.{digits}f}".replace("-", "−")
    return text.replace("−0.0", "0.0") if float(f"{x:.{digits}f}") == 0 else text


def mean_std(values):
    numbers = list(values.values())
    if len(numbers) == 1:
        return number(numbers[0])
    return f"{number(np.mean(numbers))} ± {number(np.std(numbers, ddof=1))}"


def interval(values):
    """The mean over seeds with its 95 % t-interval; of one seed the number alone."""
    numbers = list(values.values())
    if len(numbers) == 1:
        return number(numbers[0])
    if len(numbers) not in STUDENT_T:
        raise ValueError(f"{len(numbers)} seeds: add the quantile to STUDENT_T")
    half = STUDENT_T[len(numbers)] * np.std(numbers, ddof=1) / np.sqrt(len(numbers))
    return f"{number(np.mean(numbers))} ({number(np.mean(numbers) - half)} to {number(np.mean(numbers) + half)})"


def lead_interval(one, other, function, *more):
    """The lead of one run over another by function(rounds, *more), as an interval."""
    return interval(lead(values_of(one, function, *more), values_of(other, function, *more)))


def both(row):
    """A round's two accuracies in one cell."""
    return f"{number(row['classifier'])} / {number(row['prototype'])}"


def show(name, head, rows):
    print(f"<!-- table: {name} -->")
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


# the tables

ARCHITECTURES = {
    "fedproto-off": "`fedproto.py --lam 0`: no guidance",
    "fedproto": "`fedproto.py`",
    "fedtgp": "`fedtgp.py`",
    "fedsa": "`fedsa.py`",
    "fedproto-mse": "`fedproto.py --distance mse --lam 10`",
    "fedtgp-mse": "`fedtgp.py --distance mse --lam 10 --margin-rule nearest`",
}


def read_architectures():
    """-> {run: its rounds}, the last round that all of them have."""
    runs = {name: seeds[0] for name, seeds in read("cifar10-architectures").items() if name in ARCHITECTURES}
    common = set.intersection(*[set(rounds) for rounds in runs.values()])
    return runs, max(common)


def architectures():
    runs, t = read_architectures()
    off = runs["fedproto-off"][t]
    bases = {"fedtgp": "fedproto", "fedsa": "fedproto", "fedtgp-mse": "fedproto-mse"}
    most_frequent = number(off["most_frequent"])
    rows = [["always the most frequent class", most_frequent] + [""] * 4]
    for name, command in ARCHITECTURES.items():
        row = runs[name][t]
        cells = [command, number(row["classifier"]), number(row["prototype"])]
        if name in bases:
            base = runs[bases[name]][t]
            cells.append(number(better(row) - better(base)))
            cells.append(number(row["prototype"] - base["prototype"]))
        else:
            cells += ["", ""]
        cells.append("" if name == "fedproto-off" else number(better(row) - better(off)))
        rows.append(cells)
    show("architectures", [f"round {t} of 1000, seed 0, four architectures (the papers: eight)", "by classifier", "by prototype or anchor",
                           "lead over FedProto of the same setting, better prediction", "lead by prototype or anchor",
                           "lead over no guidance, better prediction"], rows)

    tested = sorted(set.union(*[set(rounds) for rounds in runs.values()]))
    rows = []
    for name, command in ARCHITECTURES.items():
        cells = [command]
        for one in tested:
            cells.append(number(runs[name][one]["prototype"]) if one in runs[name] else "")
        for column in ("margin", "server_loss"):
            value = runs[name][t].get(column)
            cells.append("" if value is None else number(value))
        rows.append(cells)
    show("architectures-rounds", ["by prototype or anchor"] + [f"round {one}" for one in tested]
         + [f"margin δ, round {t}", f"server's loss, round {t}"], rows)

    models = ["cnn4", "googlenet", "mobilenet_v2", "resnet18"]
    rows = []
    for name, command in ARCHITECTURES.items():
        rows.append([command] + [number(runs[name][t][model]) for model in models])
    show("architectures-models", [f"by prototype or anchor, round {t}"] + models, rows)


def prototypes_of_fedproto():
    """FedProto with other class means and another mean at the server, and HtFLlib on the same clients."""
    runs = {name: seeds[0] for name, seeds in read("cifar10-architectures").items()}
    shown = (2, 4, 8, 12)
    rows = [["always the most frequent class", "", ""] + [number(runs["fedproto-mse"][t]["most_frequent"]) for t in shown]]
    for name, title, means, server in [
            ("fedproto-mse", "FedProto, ours", "after training", "by class counts, Eq. 3"),
            ("fedproto-mse-training", "", "while training", "by class counts"),
            ("fedproto-mse-uniform", "", "after training", "plain"),
            ("fedproto-mse-uniform-training", "", "while training", "plain"),
            ("fedproto-mse-dropout", "ours, with HtFLlib's dropout", "after training", "by class counts"),
            ("htfllib-fedproto", "FedProto in HtFLlib", "while training", "plain"),
            ("htfllib-fedproto-weighted", "the same, changed", "while training", "by class counts"),
            ("htfllib-fedproto-after", "", "after training", "plain"),
            ("htfllib-fedproto-weighted-after", "", "after training", "by class counts"),
            ("fedtgp-mse", "FedTGP, ours", "after training", "none, it trains"),
            ("htfllib-fedtgp", "FedTGP in HtFLlib", "before training", "none, it trains")]:
        rows.append([title, means, server] + [number(runs[name][t]["prototype"]) if t in runs[name] else "" for t in shown])
    show("architectures-means", ["by prototype", "class means are taken", "the server's mean"] + [f"round {t}" for t in shown], rows)


def cross_device():
    runs = read("cifar10-cross-device")
    base = runs["fedproto"]
    rows = [["always the most frequent class", mean_std(values_of(runs["fedtgp"], last, "most_frequent"))] + [""] * 5]
    for name, method, command in [
            ("fedproto-off", "", "`fedproto.py --lam 0`: no guidance"),
            ("fedproto", "fedproto", "`fedproto.py`"),
            ("fedtgp", "fedtgp", "`fedtgp.py`"),
            ("fedsa-linear", "fedsa", "`fedsa.py --projection linear`"),
            ("fedsa-authors-settings", "fedsa", "`fedsa.py --distance mse --lam-r 10`")]:
        run = runs[name]
        published = f"{FEDSA[method]:.2f}" if method else ""
        cells = [command, mean_std(values_of(run, best, "classifier")), mean_std(values_of(run, best, "prototype")), published]
        if name == "fedproto":
            cells += [""] * 3
        else:
            cells.append(lead_interval(run, base, best_of_both))
            for column in ("classifier", "prototype"):
                cells.append(lead_interval(run, base, late, column, 801))
        rows.append(cells)
    show("cross-device", ["command", "best by classifier", "best by prototype or anchor", "published", "lead over FedProto, best round",
                          "last 200 rounds, by classifier", "by prototype or anchor"], rows)


def published_code():
    runs = read("cifar10-cross-device")
    rows = []
    for name, title in [("authors-code-fedsa", "FedSA, its authors' code"),
                        ("fedsa-authors-settings", "FedSA, ours with their distance and λ1"),
                        ("fedsa", "FedSA, ours with the paper's distance and λ1"),
                        ("htfllib-fedproto", "FedProto in HtFLlib"),
                        ("fedproto-htfllib-settings", "FedProto, ours with HtFLlib's settings"),
                        ("htfllib-fedtgp", "FedTGP in HtFLlib"),
                        ("fedtgp-htfllib-settings", "FedTGP, ours with HtFLlib's settings"),
                        ("fedtgp-htfllib-settings-old-uploads", "the same, uploads from before training")]:
        rounds = runs[name][0] if name in runs else {}
        if 100 in rounds:
            rows.append([title] + [both(rounds[t]) if t in rounds else "" for t in (100, 200, 300)])
    show("published-code", ["by classifier / by prototype or anchor, seed 0", "round 100", "round 200", "round 300"], rows)


def cross_device_trials():
    runs = {name: seeds[0] for name, seeds in read("cifar10-cross-device").items()}
    rows = []
    for name, title, when, function, *more in [
            ("authors-partition-fedsa", "FedSA, partition and batches of its authors' code", "best round", best),
            ("authors-partition-fedproto", "FedProto, the same", "best round", best),
            ("fedsa-authors-settings-lambda2-1", "FedSA, authors' settings, λ2 = 1", "last 200 rounds", late, 801),
            ("fedsa-authors-settings", "the same, λ2 = 0.01", "last 200 rounds", late, 801),
            ("fedproto-own-weights", "FedProto, each client with initial weights of its own", "round 100", at, 100),
            ("fedproto", "FedProto, all with the same", "round 100", at, 100)]:
        rounds = runs[name]
        values = [function(rounds, column, *more) for column in ("classifier", "prototype")]
        rows.append([title, when] + [number(value) for value in values])
    show("cross-device-trials", ["seed 0", "when", "by classifier", "by prototype or anchor"], rows)


def office_fedlsa():
    runs = read("office-fedlsa")
    rows = []
    for name, command in [
            ("fedavg", "`fedlsa.py --lam 0 --no-sphere`: FedAvg"),
            ("fedavg-length-1", "`fedlsa.py --lam 0`: FedAvg, features of length 1"),
            ("fedlsa-no-sep", "`fedlsa.py --alpha 0`: without L_SEP"),
            ("fedlsa-l2", "`fedlsa.py --compactness l2`: distance instead of L_COM"),
            ("fedlsa", "`fedlsa.py`")]:
        cells = [command, mean_std(values_of(runs[name], last, DOMAINS))]
        cells.append(number(FEDLSA_MEAN[name], 2) if name in FEDLSA_MEAN else "not given")
        if name == "fedavg":
            cells += ["", ""]
        else:
            cells.append(lead_interval(runs[name], runs["fedavg"], last, DOMAINS))
            cells.append(number(FEDLSA_MEAN[name] - FEDLSA_MEAN["fedavg"]) if name in FEDLSA_MEAN else "")
        rows.append(cells)
    show("office-fedlsa", ["command", "last of 100 rounds", "published", "lead over FedAvg", "published lead"], rows)

    rounds = (10, 20, 30, 50, 70, 100)
    rows = []
    for one, other, title in [("fedlsa", "fedavg", "FedLSA over FedAvg"),
                              ("fedlsa", "fedavg-length-1", "FedLSA over FedAvg with features of length 1"),
                              ("fedlsa", "fedlsa-no-sep", "FedLSA over FedLSA without L_SEP")]:
        cells = [title]
        for t in rounds:
            cells.append(lead_interval(runs[one], runs[other], at, DOMAINS, t))
        rows.append(cells)
    show("office-fedlsa-rounds", ["lead"] + [f"round {t}" for t in rounds], rows)


def office_fedplcc():
    runs = read("office-fedplcc")
    published = {name: np.mean(domains) for name, domains in FEDPLCC.items()}
    rows = []
    for name, method, base, command in [
            ("fedavg", "fedavg", None, "`fedplcc.py --lam-contra 0 --lam-corr 0`: FedAvg"),
            ("fedplcc", "fedplcc", "fedavg", "`fedplcc.py`"),
            ("fedavg-1-epoch", "fedavg", None, "FedAvg, `--local-epochs 1`"),
            ("fedplcc-1-epoch", "fedplcc", "fedavg-1-epoch", "FedPLCC, `--local-epochs 1`")]:
        run = runs[name]
        cells = [command, mean_std(values_of(run, last, DOMAINS)), mean_std(values_of(run, late, DOMAINS, 81)),
                 mean_std(values_of(run, best, DOMAINS)), number(published[method], 2)]
        if base is None:
            cells += [""] * 3
        else:
            cells.append(lead_interval(run, runs[base], last, DOMAINS))
            cells.append(lead_interval(run, runs[base], late, DOMAINS, 81))
            cells.append(number(published["fedplcc"] - published["fedavg"]))
        rows.append(cells)
    show("office-fedplcc", ["command", "last of 100 rounds", "mean of the last 20", "best round", "published", "lead, last round",
                            "lead, last 20", "published lead"], rows)


def office_domains():
    groups = [[name] for name in DOMAINS] + [DOMAINS, DOMAINS[:3]]
    rows = []
    for title, method, paper in [("FedLSA over FedAvg", "fedlsa", FEDLSA), ("FedPLCC over FedAvg", "fedplcc", FEDPLCC)]:
        runs = read(f"office-{method}")
        ours = [title]
        published = ["*its paper*"]
        differences = dict(zip(DOMAINS, np.subtract(paper[method], paper["fedavg"])))
        for columns in groups:
            ours.append(lead_interval(runs[method], runs["fedavg"], last, columns))
            published.append(number(np.mean([differences[name] for name in columns])))
        rows += [ours, published]
    show("office-domains", ["lead, last round", "Caltech", "Amazon", "Webcam", "DSLR", "mean", "mean without DSLR"], rows)


def fedfm():
    """FedFM's Table III on a fifth of the images. Rounds 1 to 20 are FedAvg in all runs."""
    runs = {name: seeds[0] for name, seeds in read("cifar10-fedfm").items()}
    end = max(runs["fedavg"])
    shown = [10, 20, 21, 22, 23, 24, *range(26, end + 1, 2)]
    rows = []
    for name, command in [("fedavg", "`--lam 0`: FedAvg"), ("fedfm", "FedFM, λ = 50"), ("fedfm-lam-5", "`--lam 5`")]:
        cells = [command] + [number(at(runs[name], "test", t)) if t in runs[name] else "" for t in shown]
        rows.append(cells + [f"{FEDFM[name]:.2f}" if name in FEDFM else ""])
    show("fedfm", ["test accuracy, seed 0"] + [f"round {t}" for t in shown] + ["published, all images, 100 rounds"], rows)


def fashion_mnist():
    runs = read("fmnist")
    rows = []
    for name, command in [
            ("fedproto-off", "`fedproto.py --lam 0`: no guidance"),
            ("fedproto", "`fedproto.py`"),
            ("fedtgp", "`fedtgp.py`"),
            ("fedsa-linear", "`fedsa.py --model htcnn8 --projection linear`"),
            ("fedproto-off-pathological", "`--partition pathological`: no guidance"),
            ("fedproto-pathological", "FedProto"),
            ("fedtgp-pathological", "FedTGP"),
            ("fedsa-linear-pathological", "FedSA")]:
        row = runs[name][0][50]
        published = number(FASHION_MNIST[name]) if name in FASHION_MNIST else ""
        rows.append([command, number(row["classifier"]), number(row["prototype"]), published])
    show("fmnist", ["round 50 of 1000, seed 0", "by classifier", "by prototype or anchor", "published, best of 1000"], rows)


def choices():
    """What the papers leave open: the change on each seed that both runs have."""
    lsa, plcc, fifth = read("office-fedlsa"), read("office-fedplcc"), read("cifar10-fifth")

    def change(one, other, function, *more):
        leads = lead(values_of(one, function, *more), values_of(other, function, *more))
        return ", ".join(number(x) for x in leads.values())

    fedplcc = plcc["fedplcc-1-epoch"]
    fedavg = lsa["fedavg"]
    show("choices", ["ours", "instead", "change in points", "which fits the paper?"], [
        ["FedPLCC, τ = 0.07", "`--tau 0.55`, \"optimal\" in the paper's ablation",
         change(plcc["fedplcc-1-epoch-tau-0.55"], fedplcc, late, DOMAINS, 81), "ours: 0.55 is below FedAvg"],
        ["", "`--tau 0.055`, perhaps meant there",
         change(plcc["fedplcc-1-epoch-tau-0.055"], fedplcc, late, DOMAINS, 81), "undecided"],
        ["FedLSA's FedAvg, 20 % of a domain for a client", "`--domain-fraction 0.1`",
         change(lsa["fedavg-10-percent"], fedavg, last, DOMAINS), "undecided"],
        ["", "`--domain-fraction 0.3`", change(lsa["fedavg-30-percent"], fedavg, last, DOMAINS), "ours, not 30 %"],
        ["FedTGP, Eq. 10 a mean over a batch", "a sum, as printed (seeds 0, 2; by prototype)",
         change(fifth["fedtgp-sum"], fifth["fedtgp"], last, "prototype"), "ours: the sum ends at chance"],
    ])


def other_settings():
    """Leads over FedProto in the last round, by the better prediction."""
    rows = []
    for title, file, prefix, authors_layer in [
            ("glyphs, label skew", "class", "", "fedsa"),
            ("glyphs, domain skew", "glyphs", "domain-", None),
            ("a fifth of CIFAR-10", "cifar10-fifth", "", "fedsa-authors-settings"),
            ("digits", "digits", "", "fedsa-authors-settings")]:
        runs = read(file)
        base = runs[prefix + "fedproto"]
        cells = [title]
        for name in ("fedproto-off", "fedtgp", "fedsa-linear", authors_layer):
            if name is not None and prefix + name in runs:
                cells.append(lead_interval(runs[prefix + name], base, last_of_both))
            else:
                cells.append("")
        rows.append(cells)
    show("other-settings", ["lead over FedProto", "no guidance", "FedTGP", "FedSA, `--projection linear`", "FedSA, authors' layer"], rows)


def readme():
    runs, t = read_architectures()
    device, lsa, plcc = read("cifar10-cross-device"), read("office-fedlsa"), read("office-fedplcc")

    def architectures_row(gain, published, one, other):
        lead_of_better = number(better(runs[one][t]) - better(runs[other][t]))
        lead_by_prototype = number(runs[one][t]["prototype"] - runs[other][t]["prototype"])
        return [gain, published, lead_of_better, lead_by_prototype, f"too early: round {t} of 1000"]

    def device_row(gain, published, one, verdict):
        lead_of_better = lead_interval(device[one], device["fedproto"], best_of_both)
        lead_by_prototype = lead_interval(device[one], device["fedproto"], best, "prototype")
        return [gain, number(published), lead_of_better, lead_by_prototype, verdict]

    def office_row(gain, paper, runs, method, verdict):
        published = np.mean(paper[method]) - np.mean(paper["fedavg"])
        return [gain, number(published), lead_interval(runs[method], runs["fedavg"], last, DOMAINS), "", verdict]

    fm = {name: seeds[0] for name, seeds in read("cifar10-fedfm").items()}
    t_fm = max(fm["fedfm"])
    fedfm_lead = at(fm["fedfm"], "test", t_fm) - at(fm["fedavg"], "test", t_fm)
    show("readme", ["gain, in points of accuracy", "published", "ours, by the better predictor (95 % CI)", "ours, by prototype or anchor",
                    "verdict"], [
        architectures_row("FedTGP over FedProto, four architectures", f"{FEDTGP_LEAD} (eight)", "fedtgp", "fedproto"),
        architectures_row("the same with its authors' distance, λ and margin", f"{FEDTGP_LEAD} (eight)", "fedtgp-mse", "fedproto-mse"),
        architectures_row("FedSA over FedProto, four architectures", f"{FEDSA_LEAD} (eight, CIFAR-100)", "fedsa", "fedproto"),
        device_row("FedTGP over FedProto, one small CNN", FEDSA["fedtgp"] - FEDSA["fedproto"], "fedtgp",
                   "not reproduced: behind FedProto"),
        device_row("FedSA over FedProto, one small CNN, its authors' distance and λ1", FEDSA["fedsa"] - FEDSA["fedproto"],
                   "fedsa-authors-settings", "not reproduced: about level"),
        office_row("FedLSA over FedAvg", FEDLSA, lsa, "fedlsa", "mean reproduced; two of four domains differ"),
        office_row("FedPLCC over FedAvg", FEDPLCC, plcc, "fedplcc", "mean reproduced, at lower accuracies; one of four domains differs"),
        ["FedFM over FedAvg, a fifth of the images", number(FEDFM["fedfm"] - FEDFM["fedavg"]), number(fedfm_lead), "",
         f"broke down: round {t_fm} of 100"],
    ])


# the figures

def draw_cifar10():
    runs = read("cifar10-cross-device")
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for axis, column, title in zip(axes, ("classifier", "prototype"), ("by classifier", "by nearest prototype or anchor")):
        for name, label, colour in [("fedproto-off", "no guidance", "grey"), ("fedproto", "FedProto", "C0"), ("fedtgp", "FedTGP", "C2"),
                                    ("fedsa-linear", "FedSA, linear projection", "C3"),
                                    ("fedsa-authors-settings", "FedSA, authors' settings", "C1")]:
            curves = [curve(rounds, column) for rounds in runs[name].values()]
            rounds = sorted(t for t in curves[0] if all(t in other for other in curves))
            means = [np.mean([other[t] for other in curves]) for t in rounds]
            axis.plot(rounds, means, color=colour, label=label)
        for name, accuracy in FEDSA.items():
            colour = {"fedproto": "C0", "fedtgp": "C2", "fedsa": "C1"}[name]
            axis.plot(1000, accuracy, "*", color=colour, markeredgecolor="black", markersize=12, clip_on=False, zorder=3)
        axis.set(title=title, xlabel="round", xlim=(0, 1000), ylim=(60, 90))
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("accuracy, mean of three seeds (%)")
    axes[0].legend(frameon=False, loc="lower right")
    figure.savefig(PICTURES / "cifar10.png", dpi=100)
    plt.close(figure)


def draw_office():
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    groups = [[name] for name in DOMAINS] + [DOMAINS]
    for axis, title, runs, published, bars in [
            (axes[0], "FedLSA", read("office-fedlsa"), FEDLSA,
             [("fedavg-length-1", "FedAvg, features of length 1", "C7"), ("fedlsa", "FedLSA", "C0")]),
            (axes[1], "FedPLCC", read("office-fedplcc"), FEDPLCC, [("fedplcc", "FedPLCC", "C1")])]:
        width = 0.8 / len(bars)
        for i, (name, label, colour) in enumerate(bars):
            places = np.arange(5) + (i - (len(bars) - 1) / 2) * width
            leads = []  # (groups, seeds)
            for columns in groups:
                difference = lead(values_of(runs[name], last, columns), values_of(runs["fedavg"], last, columns))
                leads.append(list(difference.values()))
            axis.bar(places, np.mean(leads, axis=1), width, color=colour, alpha=0.6, label=label)
            axis.plot(places, leads, ".", color="black", zorder=3)  # above the stars
            if name in published:
                printed = np.array(published[name]) - published["fedavg"]
                axis.plot(places, [*printed, printed.mean()], "*", color="gold", markeredgecolor="black", markersize=13, label="its paper")
        axis.axhline(0, color="grey", linewidth=1)
        axis.set(title=title, xticks=range(5), xticklabels=["Caltech", "Amazon", "Webcam", "DSLR", "mean"])
        axis.legend(frameon=False, loc="upper left")
    axes[0].set_ylabel("lead over FedAvg, last round (points)")
    figure.savefig(PICTURES / "office.png", dpi=100)
    plt.close(figure)


def main():
    architectures()
    prototypes_of_fedproto()
    cross_device()
    published_code()
    cross_device_trials()
    office_fedlsa()
    office_fedplcc()
    office_domains()
    fedfm()
    fashion_mnist()
    choices()
    other_settings()
    readme()
    draw_cifar10()
    draw_office()


if __name__ == "__main__":
    main()
