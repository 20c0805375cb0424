"""Draws ../../office.png: leads over FedAvg by domain, ours beside the published ones."""

import statistics

import matplotlib.pyplot as plt

from table import FEDLSA, FEDPLCC, HERE, seeds_of

PANELS = [  # paper, its rows, its FedAvg, what is drawn: row, label, colour
    ("FedLSA, Tables 2 and 5", FEDLSA, "fedlsa-avg",
     [("fedlsa-lam0", "FedAvg on the sphere, no anchors", "C7"), ("fedlsa", "FedLSA", "C0")]),
    ("FedPLCC, Table III", FEDPLCC, "fedplcc-avg",
     [("fedplcc", "FedPLCC", "C1")]),
]
NAMES = ["Caltech", "Amazon", "Webcam", "DSLR", "mean"]  # as in table.DOMAINS


def leads_of(name, baseline):
    """[5 leads] for each seed: by domain and their mean."""
    ours, base = seeds_of(name), seeds_of(baseline)
    return [[a - b for a, b in zip(ours[seed], base[seed])] for seed in ours if seed in base]


figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
for axis, (paper, rows, baseline, drawn) in zip(axes, PANELS):
    width = 0.8 / len(drawn)
    for i, (name, label, colour) in enumerate(drawn):
        leads = leads_of(name, baseline)
        places = [place + (i - (len(drawn) - 1) / 2) * width for place in range(len(NAMES))]
        seeds = f"{len(leads)} seed{'s' * (len(leads) > 1)}"
        axis.bar(places, [statistics.mean(column) for column in zip(*leads)], width, color=colour, alpha=0.6,
                 label=f"{label} ({seeds})")
        if len(leads) > 1:
            for lead in leads:
                axis.plot(places, lead, ".", color="black", markersize=5, zorder=3)  # above the stars
        published = rows[name][1]
        if published:
            printed = [a - b for a, b in zip(published, rows[baseline][1])]
            axis.plot(places, printed + [statistics.mean(printed)], "*", color="black", markerfacecolor="gold",
                      markersize=14, label="the paper's")
    axis.axhline(0, color="grey", lw=1)
    axis.set(title=paper, xticks=range(len(NAMES)), xticklabels=NAMES)
    axis.grid(axis="y", alpha=0.25)
    axis.legend(frameon=False, loc="upper left")
axes[0].set_ylabel("lead over FedAvg, last round (points)")
figure.savefig(HERE.parents[1] / "office.png", dpi=110)
