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
STUDENT_T = {2: 12.706, 3: 4.303}  # 97.5 % quantile with n - 1 degrees of freedom, by the number of seeds n

# the papers' numbers, by domain
FEDLSA = {  # Tables 2 and 5
    "fedavg": [56.70, 66.32, 43.10, 46.67],
    "fedlsa-no-sep": [54.91, 61.58, 56.90, 63.33],
    "fedlsa-l2": [55.80, 64.21, 53.45, 60.00],
    "fedlsa": [55.80, 64.74, 60.34, 60.00],
}
FEDPLCC = {  # Table III
    "fedavg": [62.50, 83.16, 72.41, 53.33],
    "fedplcc": [72.77, 84.74, 75.86, 80.00],
}
FEDSA = {"fedproto": 87.49, "fedtgp": 87.98, "fedsa": 88.78}  # Table 1, cross-device


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


def hours(file, run, unit=3600):
    """How long a run took, mean over its seeds."""
    with open(HERE / "runs.csv") as opened:
        rows = list(csv.DictReader(opened))
    seconds = [float(row["seconds"]) for row in rows if row["file"] == file and row["run"] == run]
    return f"{np.mean(seconds) / unit:.1f}"


def curve(rounds, column):
    """One run -> {round: its value}; column may be a list of domains, of which this is the mean."""
    columns = column if isinstance(column, list) else [column]
    return {t: np.mean([row[name] for name in columns]) for t, row in rounds.items()}


def last(rounds, column):
    return curve(rounds, column)[max(rounds)]


def best(rounds, column):
    return max(curve(rounds, column).values())


def late(rounds, column, first):
    """The mean over the rounds from the first one on."""
    return np.mean([value for t, value in curve(rounds, column).items() if t >= first])


def at_100(rounds, column):
    return rounds[100][column]


def best_of_both(rounds):
    return max(best(rounds, "classifier"), best(rounds, "prototype"))


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
    half = STUDENT_T[len(numbers)] * np.std(numbers, ddof=1) / np.sqrt(len(numbers))
    return f"{number(np.mean(numbers))} ({number(np.mean(numbers) - half)} to {number(np.mean(numbers) + half)})"


def show(name, head, rows):
    print(f"<!-- table: {name} -->")
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


# the tables

def architectures():
    """-> the round, and the two printed leads by prototype for the README."""
    runs = read("cifar10-architectures")
    common = set.intersection(*(set(run[0]) for run in runs.values()))
    t = max(common)
    at = {name: run[0][t] for name, run in runs.items()}
    rows = []
    for name, command, base in [
            ("fedproto-off", "`fedproto.py --lam 0`: no guidance", None),
            ("fedproto", "`fedproto.py`", None),
            ("fedtgp", "`fedtgp.py`", "fedproto"),
            ("fedsa", "`fedsa.py`", "fedproto"),
            ("fedproto-mse", "`fedproto.py --distance mse --lam 10`", None),
            ("fedtgp-mse", "`fedtgp.py --distance mse --lam 10 --margin-rule nearest`", "fedproto-mse")]:
        if name not in at:
            rows.append([command, "under way"] + [""] * 6)
            continue
        row = at[name]
        cells = [command]
        for column in ("classifier", "prototype"):
            cells.append(number(row[column]))
        for column in ("classifier", "prototype"):
            known = base in at
            cells.append(number(row[column] - at[base][column]) if known else "")
        for column in ("classifier", "prototype"):
            cells.append(number(row[column] - at["fedproto-off"][column]) if name != "fedproto-off" else "")
        cells.append(hours("cifar10-architectures", name))
        rows.append(cells)
    show("architectures", [f"round {t}, seed 0", "by classifier", "by prototype or anchor", "lead over FedProto, by classifier",
                           "by prototype", "lead over no guidance, by classifier", "by prototype", "hours so far, one core"], rows)
    rows = []
    for name in ("fedtgp", "fedtgp-mse"):
        for tested, row in runs.get(name, {0: {}})[0].items():
            if tested <= t:
                rows.append([name, str(tested)] + [number(row[column], 2) for column in ("margin", "server_loss", "last_batch_loss", "loss")])
    show("architectures-server", ["run", "round", "margin δ", "server's mean loss", "its last batch's loss", "clients' loss"], rows)
    return t, at


def cross_device():
    runs = read("cifar10-cross-device")
    base = runs["fedproto"]
    rows = [["always the most frequent class", mean_std(values_of(runs["fedtgp"], last, "most_frequent"))] + [""] * 6]
    for name, command, published in [
            ("fedproto-off", "`fedproto.py --lam 0`: no guidance", ""),
            ("fedproto", "`fedproto.py`", "87.49"),
            ("fedtgp", "`fedtgp.py`", "87.98"),
            ("fedsa-linear", "`fedsa.py --projection linear`", "88.78"),
            ("fedsa-authors-settings", "`fedsa.py --distance mse --lam-r 10`", "88.78")]:
        run = runs[name]
        cells = [command, mean_std(values_of(run, best, "classifier")), mean_std(values_of(run, best, "prototype")), published]
        if name == "fedproto":
            cells += [""] * 3
        else:
            cells.append(interval(lead(values_of(run, best_of_both), values_of(base, best_of_both))))
            for column in ("classifier", "prototype"):
                cells.append(interval(lead(values_of(run, late, column, 801), values_of(base, late, column, 801))))
        cells.append(hours("cifar10-cross-device", name))
        rows.append(cells)
    show("cross-device", ["command", "best by classifier", "best by prototype or anchor", "published", "lead over FedProto, best round",
                          "last 200 rounds, by classifier", "by prototype or anchor", "hours a run"], rows)

    names = [("fedproto-off", "no guidance"), ("fedproto", "FedProto"), ("fedtgp", "FedTGP"), ("fedsa-linear", "FedSA, `--projection linear`"),
             ("fedsa", "FedSA, the default")]
    rounds = {20, 100, 200, 400, 600, 800, 1000}
    if "fedsa" in runs:
        rounds.add(max(runs["fedsa"][0]))
    rows = []
    for name, title in names:
        run = runs[name][0] if name in runs else {}
        cells = [f"{number(run[t]['classifier'])} / {number(run[t]['prototype'])}" if t in run else "" for t in sorted(rounds)]
        rows.append([title] + cells)
    show("cross-device-seed-0", ["by classifier / by prototype or anchor"] + [f"round {t}" for t in sorted(rounds)], rows)

    rows = []
    for name, title in [("authors-code-fedsa", "FedSA, its authors' code"), ("fedsa-authors-settings", "`fedsa.py --distance mse --lam-r 10`"),
                        ("htfllib-fedproto", "FedProto in HtFLlib"), ("fedproto", "`fedproto.py`"),
                        ("htfllib-fedtgp", "FedTGP in HtFLlib"), ("fedtgp", "`fedtgp.py`")]:
        run = runs[name][0]
        cells = [f"{number(run[t]['classifier'])} / {number(run[t]['prototype'])}" if t in run else "not run" for t in (100, 200, 300, 1000)]
        rows.append([title] + cells)
    show("published-code", ["by classifier / by prototype or anchor, seed 0"] + [f"round {t}" for t in (100, 200, 300, 1000)], rows)

    rows = []
    for title, one, other, when, function, more in [
            ("partition and batches of FedSA's authors' code: FedSA over FedProto, both with their settings", "authors-partition-fedsa",
             "authors-partition-fedproto", "best round", best, []),
            ("FedSA, authors' settings: λ2 = 1 over 0.01", "fedsa-authors-settings-lambda2-1", "fedsa-authors-settings", "last 200 rounds", late, [801]),
            ("FedProto: initial weights of its own for each client, over the same for all", "fedproto-own-weights", "fedproto", "round 100", at_100, [])]:
        cells = [title, when]
        for column in ("classifier", "prototype"):
            cells.append(number(function(runs[one][0], column, *more) - function(runs[other][0], column, *more)))
        rows.append(cells)
    show("cross-device-trials", ["seed 0", "when", "change by classifier", "by prototype or anchor"], rows)


def office_fedlsa():
    runs = read("office-fedlsa")
    published = {"fedavg": 53.20, "fedlsa-no-sep": 59.18, "fedlsa-l2": 58.37, "fedlsa": 60.22}
    means = {name: values_of(run, last, DOMAINS) for name, run in runs.items()}
    rows = []
    for name, command in [
            ("fedavg", "`fedlsa.py --lam 0 --no-sphere`: FedAvg"),
            ("fedavg-length-1", "`fedlsa.py --lam 0`: FedAvg, features of length 1"),
            ("fedlsa-no-sep", "`fedlsa.py --alpha 0`: without L_SEP"),
            ("fedlsa-l2", "`fedlsa.py --compactness l2`: distance instead of L_COM"),
            ("fedlsa", "`fedlsa.py`")]:
        printed = f"{published[name]:.2f}" if name in published else "not given"
        cells = [command, mean_std(means[name]), printed]
        if name == "fedavg":
            cells += ["", ""]
        else:
            cells.append(interval(lead(means[name], means["fedavg"])))
            cells.append(number(published[name] - published["fedavg"]) if name in published else "")
        rows.append(cells + [hours("office-fedlsa", name, 60)])
    show("office-fedlsa", ["command", "last of 100 rounds", "published", "lead over FedAvg", "published lead", "minutes a run"], rows)

    rounds = (10, 20, 30, 50, 70, 100)
    rows = []
    for one, other, title in [("fedlsa", "fedavg", "FedLSA over FedAvg"),
                              ("fedlsa", "fedavg-length-1", "FedLSA over FedAvg with features of length 1"),
                              ("fedlsa", "fedlsa-no-sep", "FedLSA over FedLSA without L_SEP")]:
        cells = [title]
        for t in rounds:
            ours = {seed: curve(run, DOMAINS)[t] for seed, run in runs[one].items()}
            theirs = {seed: curve(run, DOMAINS)[t] for seed, run in runs[other].items()}
            cells.append(interval(lead(ours, theirs)))
        rows.append(cells)
    show("office-fedlsa-rounds", ["lead"] + [f"round {t}" for t in rounds], rows)


def office_fedplcc():
    runs = read("office-fedplcc")
    rows = []
    for name, base, command in [
            ("fedavg", None, "`fedplcc.py --lam-contra 0 --lam-corr 0`: FedAvg"),
            ("fedplcc", "fedavg", "`fedplcc.py`"),
            ("fedavg-1-epoch", None, "FedAvg, `--local-epochs 1`"),
            ("fedplcc-1-epoch", "fedavg-1-epoch", "FedPLCC, `--local-epochs 1`")]:
        run = runs[name]
        cells = [command, mean_std(values_of(run, last, DOMAINS)), mean_std(values_of(run, late, DOMAINS, 81)),
                 mean_std(values_of(run, best, DOMAINS)), "67.85" if base is None else "78.34"]
        if base is None:
            cells += [""] * 3
        else:
            cells.append(interval(lead(values_of(run, last, DOMAINS), values_of(runs[base], last, DOMAINS))))
            cells.append(interval(lead(values_of(run, late, DOMAINS, 81), values_of(runs[base], late, DOMAINS, 81))))
            cells.append("10.5")
        rows.append(cells + [hours("office-fedplcc", name)])
    show("office-fedplcc", ["command", "last of 100 rounds", "mean of the last 20", "best round", "published", "lead, last round",
                            "lead, last 20", "published lead", "hours a run"], rows)


def office_domains():
    rows = []
    fedlsa, fedplcc = read("office-fedlsa"), read("office-fedplcc")
    for title, one, other in [
            ("FedLSA over FedAvg", fedlsa["fedlsa"], fedlsa["fedavg"]),
            ("*its paper*", FEDLSA["fedlsa"], FEDLSA["fedavg"]),
            ("FedPLCC over FedAvg", fedplcc["fedplcc"], fedplcc["fedavg"]),
            ("*its paper*", FEDPLCC["fedplcc"], FEDPLCC["fedavg"])]:
        cells = [title]
        for columns in (["caltech"], ["amazon"], ["webcam"], ["dslr"], DOMAINS, DOMAINS[:3]):
            if isinstance(one, dict):
                cells.append(interval(lead(values_of(one, last, columns), values_of(other, last, columns))))
            else:
                places = [DOMAINS.index(name) for name in columns]
                cells.append(number(np.mean([one[i] - other[i] for i in places])))
        rows.append(cells)
    show("office-domains", ["lead, last round", "Caltech", "Amazon", "Webcam", "DSLR", "mean", "mean without DSLR"], rows)


def fashion_mnist():
    runs = read("fmnist")
    rows = []
    for name, command, published in [
            ("fedproto-off", "`fedproto.py --lam 0`: no guidance", ""), ("fedproto", "`fedproto.py`", "97.46"),
            ("fedtgp", "`fedtgp.py`", "97.58"), ("fedsa-linear", "`fedsa.py --model htcnn8 --projection linear`", ""),
            ("fedproto-off-pathological", "`--partition pathological`: no guidance", ""), ("fedproto-pathological", "FedProto", "99.48"),
            ("fedtgp-pathological", "FedTGP", "99.56"), ("fedsa-linear-pathological", "FedSA", "")]:
        row = runs[name][0][50]
        rows.append([command, number(row["classifier"], 2), number(row["prototype"], 2), published, hours("fmnist", name)])
    show("fmnist", ["round 50 of 1000, seed 0", "by classifier", "by prototype or anchor", "published, best of 1000", "hours a run"], rows)


def choices():
    """What the papers leave open and a trial decides; differences on the same seeds."""
    lsa, plcc, fifth = read("office-fedlsa"), read("office-fedplcc"), read("cifar10-fifth")

    def change(runs, one, other, *how):
        numbers = lead(values_of(runs[one], *how), values_of(runs[other], *how))
        return ", ".join(number(x) for x in numbers.values())

    late20 = (late, DOMAINS, 81)
    end = (last, DOMAINS)
    both = lead(values_of(plcc["fedplcc-1-epoch"], *late20), values_of(plcc["fedavg-1-epoch"], *late20))
    ours_lead = f"{number(both[0])}, {number(both[1])}"
    rows = [
        ["FedPLCC, τ = 0.07", "`--tau 0.55`, \"optimal\" in the paper's ablation", change(plcc, "fedplcc-1-epoch-tau-0.55", "fedplcc-1-epoch", *late20),
         "ours: 0.55 is far below FedAvg"],
        ["FedPLCC, τ = 0.07", "`--tau 0.055`, perhaps meant there", change(plcc, "fedplcc-1-epoch-tau-0.055", "fedplcc-1-epoch", *late20), "ours, weakly"],
        ["FedPLCC, φ = 0.5", "`--phi 1`", interval(lead(values_of(plcc["fedplcc-1-epoch-phi-1"], *late20), values_of(plcc["fedplcc-1-epoch"], *late20))),
         "undecided; −1.8 in its Table V"],
        ["FedPLCC, losses are means over a batch", "Eq. 5 a sum: λ1, λ2 / 32, learning rate · 32", change(plcc, "fedplcc-1-epoch-sum", "fedplcc-1-epoch", *late20),
         "seeds 0 and 1; see the next row"],
        ["the same: lead over its FedAvg", "ours has " + ours_lead,
         "the sum's lead " + change(plcc, "fedplcc-1-epoch-sum", "fedavg-1-epoch-sum", *late20), "ours, weakly: the paper has 10.5"],
        ["FedLSA's FedAvg, 20 % of a domain for a client", "`--domain-fraction 0.1`", change(lsa, "fedavg-10-percent", "fedavg", *end), "ours or 10 %"],
        ["FedLSA's FedAvg, 20 % of a domain for a client", "`--domain-fraction 0.3`", change(lsa, "fedavg-30-percent", "fedavg", *end), "ours, not 30 %"],
        ["FedLSA's FedAvg, weighted by images", "equal weights", change(lsa, "fedavg-equal-weights", "fedavg", *end), "ours, weakly"],
        ["FedTGP, Eq. 10 a mean over a batch", "a sum, as printed (seeds 0, 2; by prototype)", change(fifth, "fedtgp-sum", "fedtgp", last, "prototype"),
         "ours: the sum ends at chance"],
    ]
    show("choices", ["ours", "instead", "change in points", "which fits the paper?"], rows)


def other_settings():
    files = {name: read(name) for name in ("class", "glyphs", "cifar10-fifth", "digits")}
    cells = ["always the most frequent class"]
    for file, name in (("class", "fedproto"), ("glyphs", "domain-fedproto"), ("cifar10-fifth", "fedproto"), ("digits", "fedproto")):
        cells.append(mean_std(values_of(files[file][name], last, "most_frequent")))
    rows = [cells]
    for title, names in [
            ("`fedproto.py --lam 0`: no guidance", ["fedproto-off", "domain-fedproto-off", "fedproto-off", "fedproto-off"]),
            ("`fedproto.py`", ["fedproto", "domain-fedproto", "fedproto", "fedproto"]),
            ("`fedtgp.py`", ["fedtgp", "domain-fedtgp", "fedtgp", "fedtgp"]),
            ("`fedsa.py --projection linear`", ["fedsa-linear", "domain-fedsa-linear", "fedsa-linear", "fedsa-linear"]),
            ("`fedsa.py --distance mse --lam-r 10`", [None, None, "fedsa-authors-settings", "fedsa-authors-settings"]),
            ("`fedsa.py`", ["fedsa", None, None, None])]:
        cells = [title]
        for file, name in zip(files, names):
            run = files[file].get(name)
            cells.append(f"{mean_std(values_of(run, last, 'classifier'))} / {mean_std(values_of(run, last, 'prototype'))}" if run else "")
        if any(cells[1:]):
            rows.append(cells)
    show("other-personal", ["by classifier / by prototype or anchor", "glyphs, label skew", "glyphs, domain skew", "a fifth of CIFAR-10", "digits"], rows)

    digits = ["mnist", "mnistm", "usps"]
    rows = []
    for title, names in [("FedPLCC", [("fedplcc", "fedplcc-off"), ("fedplcc", "fedplcc-off"), ("fedplcc", "fedavg")]),
                         ("FedFM", [("fedfm", "fedfm-off"), ("fedfm", "fedfm-off"), ("fedfm", "fedavg")]),
                         ("FedLSA (its FedAvg has features of length 1)", [("fedlsa", "fedlsa-off"), ("fedlsa", "fedlsa-off"), ("fedlsa", "fedavg-length-1")])]:
        cells = [title]
        for file, column, (one, other) in zip(("glyphs", "cifar10-fifth", "digits"), ("test", "test", digits), names):
            ours, theirs = values_of(files[file][one], last, column), values_of(files[file][other], last, column)
            cells += [mean_std(ours), interval(lead(ours, theirs))]
        rows.append(cells)
    show("other-global", ["one global network", "glyphs", "lead over its FedAvg", "a fifth of CIFAR-10", "lead", "digits", "lead"], rows)


def speed():
    rows = []
    for name, run in read("speed").items():
        row = run[0][1]
        rows.append([name, f"{row['seconds']:.1f}", f"{row['lowest']:.1f} to {row['highest']:.1f}"])
    show("speed", ["a fifth of CIFAR-10, two cores", "seconds a round, median", "range"], rows)


def readme(t, at):
    device, lsa, plcc = read("cifar10-cross-device"), read("office-fedlsa"), read("office-fedplcc")

    def architectures_lead(one, other):
        if one not in at or other not in at:
            return "under way"
        return f"{number(max(at[one]['classifier'], at[one]['prototype']) - max(at[other]['classifier'], at[other]['prototype']))} (round {t} of 1000, one seed)"

    def device_lead(one, other):
        return interval(lead(values_of(device[one], best_of_both), values_of(device[other], best_of_both)))

    def office_lead(runs, one, other):
        return interval(lead(values_of(runs[one], last, DOMAINS), values_of(runs[other], last, DOMAINS)))

    show("readme", ["gain, in points of accuracy", "published lead", "ours (95 % CI)", "verdict"], [
        ["FedTGP over FedProto: CIFAR-10, four architectures", "6.1 (with eight)", architectures_lead("fedtgp", "fedproto"), "too early to judge"],
        ["the same, distance and λ of its authors' code", "6.1 (with eight)", architectures_lead("fedtgp-mse", "fedproto-mse"), "too early to judge"],
        ["FedSA over FedProto: the same clients", "19.4 (CIFAR-100, eight)", architectures_lead("fedsa", "fedproto"), "too early to judge"],
        ["FedTGP over FedProto: CIFAR-10, one small architecture", "0.5", device_lead("fedtgp", "fedproto"), "not reproduced"],
        ["FedSA over FedProto: the same; distance and λ1 of its authors' code", "1.3", device_lead("fedsa-authors-settings", "fedproto"), "not reproduced"],
        ["FedLSA over FedAvg: Office-Caltech", "7.0", office_lead(lsa, "fedlsa", "fedavg"), "reproduced; the cause may be the features' length"],
        ["FedLSA over FedAvg with features of length 1", "not given", office_lead(lsa, "fedlsa", "fedavg-length-1"), "undecided"],
        ["FedPLCC over FedAvg: Office-Caltech", "10.5", office_lead(plcc, "fedplcc", "fedavg"), "reproduced, at lower accuracies"],
    ])


# the figures

def draw_cifar10():
    runs = read("cifar10-cross-device")
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for axis, column, title in zip(axes, ("classifier", "prototype"), ("by classifier", "by nearest prototype or anchor")):
        for name, label, colour in [("fedproto-off", "no guidance", "grey"), ("fedproto", "FedProto", "C0"), ("fedtgp", "FedTGP", "C2"),
                                    ("fedsa-linear", "FedSA, linear projection", "C3"), ("fedsa-authors-settings", "FedSA, authors' settings", "C1")]:
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
    t, at = architectures()
    cross_device()
    office_fedlsa()
    office_fedplcc()
    office_domains()
    fashion_mnist()
    choices()
    other_settings()
    speed()
    readme(t, at)
    draw_cifar10()
    draw_office()


if __name__ == "__main__":
    main()
