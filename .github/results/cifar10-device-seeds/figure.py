"""Draws ../../cifar10-device-seeds.png: mean and range over the seeds that are complete."""

import matplotlib.pyplot as plt

from table import HERE, ROUNDS, ROWS, alone, logs

COLOURS = dict(zip((name for name, _ in ROWS), ("grey", "C0", "C2", "C2", "C3", "C1")))
PAPER = {"FedProto": (87.49, "C0"), "FedTGP": (87.98, "C2"), "FedSA": (88.78, "C1")}  # FedSA Table 1


def draw(axis, curves, name, band):
    """The mean of curves {round: value}; with band, from the lowest to the highest, too."""
    rounds = sorted(curves[0])
    columns = [[curve[t] for curve in curves] for t in rounds]
    label = f"{name.replace('`', '')} ({len(curves)} seed{'s' * (len(curves) > 1)})"
    axis.plot(rounds, [sum(column) / len(column) for column in columns], color=COLOURS[name], label=label)
    if band:
        lowest = [min(column) for column in columns]
        highest = [max(column) for column in columns]
        axis.fill_between(rounds, lowest, highest, color=COLOURS[name], alpha=0.15, lw=0)


figure, axes = plt.subplots(2, 2, figsize=(11, 9), layout="constrained", sharex=True)
kinds = {"classifier": "by classifier", "prototype": "by nearest prototype; FedSA by nearest anchor"}
for (kind, title), (above, below) in zip(kinds.items(), axes.T):
    for name, runs in logs.items():
        if "earlier version" in name:
            continue
        # The spread of the divisions would hide these lines. The leads are free of it, so they have bands.
        draw(above, [log[kind] for log in runs.values()], name, band=False)
        # Both leads are over the classifier: without guidance the server's means are no prediction to be measured by.
        leads = [{t: log[kind][t] - alone[seed]["classifier"][t] for t in log[kind]}
                 for seed, log in runs.items() if seed in alone]
        if leads:
            draw(below, leads, name, band=True)
    for name, (accuracy, colour) in PAPER.items():
        above.plot(ROUNDS, accuracy, "*", color=colour, markersize=12, clip_on=False, label=f"the paper's {name}")
    below.axhline(0, color="grey", lw=1)
    above.set(title=title, xlim=(0, ROUNDS))
    below.set(xlabel="round", xlim=(0, ROUNDS))
    for axis in (above, below):
        axis.grid(alpha=0.25)
axes[0, 0].set(ylim=(76, 90), ylabel="accuracy on own test images (%)")
axes[0, 1].set(ylim=(60, 90))
axes[1, 0].set(ylim=(-0.5, 2.5), ylabel="lead over a classifier without guidance,\nsame seed (points)")
axes[1, 1].set(ylim=(-12, 3))
handles = axes[0, 0].get_legend_handles_labels()
figure.legend(*handles, loc="outside lower center", ncols=2, frameon=False, fontsize="small")
figure.savefig(HERE.parents[1] / "cifar10-device-seeds.png", dpi=110)
