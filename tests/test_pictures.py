"""Pictures and the comparison of runs."""

import json, math, sys

import numpy as np
import pytest
import torch

import common
from conftest import ROOT, SMALL, log


def test_margins():
    """Catches: a distance within a class, an absent class with a margin."""
    y = torch.tensor([0, 0, 1, 3, 3, 4])  # several vectors of a class, and classes without
    G = torch.randn(6, 5, dtype=torch.float64)
    for c, margin in enumerate(common.margins(G, y, 6)):
        want = [math.dist(a, b) for a, k in zip(G.tolist(), y) for b, l in zip(G.tolist(), y) if k == c != l]
        assert margin == pytest.approx(min(want, default=math.inf))
    assert np.isinf(common.margins(G[:1], y[:1], 6)).all()


@pytest.mark.parametrize("without", [False, True])
def test_features_show_classes_with_and_without_scikit_learn(without, monkeypatch, run):
    """Catches: a picture that needs scikit-learn, or that does not keep classes apart."""
    if without:
        monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
        monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    else:
        pytest.importorskip("sklearn")
    y = torch.arange(60) % 3
    z = torch.randn(60, 30, generator=torch.Generator().manual_seed(0)) + 9 * torch.eye(30)[y]
    both = torch.cat([z, 9 * torch.eye(30)[:3]])
    points, method = common.in_two_dimensions(both, 0)
    assert ("t-SNE" in method) != without and points.shape == (63, 2)
    spots = np.stack([points[:60][y == c].mean(0) for c in range(3)])
    nearest = np.linalg.norm(points[:, None] - spots, axis=2).argmin(1)
    assert nearest.tolist() == [*y.tolist(), 0, 1, 2]  # the three heaps stay three, their stars among them
    one = run("fedfm", SMALL["fedfm"].replace("--no-plots", ""))
    names = {path.name for path in one.folder.glob("*.png")}
    assert names == {"partition.png", "curves.png", "features.png", "margins.png"}
    assert ("silhouette 0." in one.text or "silhouette -0." in one.text) != without


def test_every_group_has_a_marker_of_its_own_name():
    """Catches: a group that is drawn as the server's prototypes, where there are more groups than markers."""
    class Flat(torch.nn.Module):
        def features(self, x):
            return x.float().flatten(1)
    y = torch.arange(4) % 2
    x = torch.randn(15, 4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    groups = {f"domain {n}": (Flat(), common.Images(x[n], y)) for n in range(15)}
    figure = common.plot_features(groups, torch.eye(12)[:2], torch.arange(2), ["a", "b"], 0)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", *groups, "server"]
    drawn = [dots for dots in figure.axes[0].collections if len(dots.get_offsets())]
    stars = [dots for dots in drawn if dots.get_sizes() > 100]
    assert [len(dots.get_offsets()) for dots in stars] == [1, 1]  # one for each class


def test_legends_and_stars_stay_inside():
    """Catches: a legend or the largest marker outside of the figure, for many runs and long names."""
    a_log = {"round": np.arange(1, 4), "acc_classifier": np.full(3, 50.0), "acc_prototype": np.arange(41, 44)}
    usual = {seed: a_log | {"acc_most_frequent": np.full(3, 30.0 + 2 * seed)} for seed in (0, 1)}
    table = {f"fedproto-cifar10-a-rather-long-name-{n}": usual for n in range(14)}
    figure = common.plot_comparison("cifar10", table)
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["clients' own models, by classifier", "clients' own models, by prototype"]
    assert all(len(axis.lines) == 28 for axis in figure.axes)
    assert figure.axes[0].lines[1].get_ydata()[0] == 31  # the most frequent class


def test_no_star_of_margins_is_cut(run, monkeypatch):
    """Catches: stars cut by the end of the axis, where all margins are nearly the same, as on FedLSA's sphere."""
    figures, draw = [], common.plot_margins
    monkeypatch.setattr(common, "plot_margins", lambda *args: figures.append(draw(*args)) or figures[-1])
    run("fedlsa", SMALL["fedlsa"].replace("--no-plots", ""))
    axis, = figures[0].axes
    largest = max(np.max(line.get_ydata()) for line in axis.lines)
    assert axis.get_ylim()[0] <= 0 and axis.get_ylim()[1] >= 1.04 * largest


def table(out):
    """The cells of the table that common.compare printed; of a run only the folder's name."""
    lines = [line for line in out.splitlines() if line.startswith("| ") and not line.startswith("| run")]
    return [line.split("/")[-1].strip("| ").split(" | ") for line in lines]


def test_comparing_runs(run, tmp_path, capsys):
    """Catches: runs averaged that differ in more than the seed, a best round picked on test images where there are
    others, rows out of order."""
    words = SMALL["fedproto"] + " --rounds 3"
    run("fedproto", words, "--trials 2")
    run("fedproto", words, "--lam 0 --eval-every 2 --name off")
    run("fedproto", words, "--lam 0 --name off")
    one = run("fedfm", SMALL["fedfm"])
    (tmp_path / "runs" / "other").mkdir()
    common.compare(sorted((tmp_path / "runs").iterdir()))
    out = capsys.readouterr().out
    rows = table(out)
    assert [row[:3] for row in rows] == [  # runs of one name and seed do not overwrite each other
        ["fedfm-glyphs", "0", "the global model"],
        ["fedproto-glyphs-off", "0", "classifier"], ["fedproto-glyphs-off", "0", "prototype"],
        ["fedproto-glyphs-off-s0-2", "0", "classifier"], ["fedproto-glyphs-off-s0-2", "0", "prototype"],
        ["fedproto-glyphs", "0,1", "classifier"], ["fedproto-glyphs", "0,1", "prototype"]]
    best = max(log(one.folder), key=lambda row: row["acc_validation"])["acc_test"]
    assert rows[0][3:5] == [f"{best:.2f}", f"{one.rows[-1]['acc_test']:.2f}"] and rows[0][5] == ""
    assert "±" in rows[5][3] and "±" not in rows[3][3]
    off = tmp_path / "runs" / "fedproto-glyphs-off-s0"
    last = log(off)[-1]
    assert rows[1][5] == f"{last['acc_classifier'] - last['acc_most_frequent']:.2f}"
    assert (tmp_path / "runs" / "compare-glyphs-dirichlet.png").exists()
    with pytest.raises(SystemExit) as stop:
        common.compare([tmp_path])
    assert stop.value.code == 2


def test_runs_of_one_name_that_differ_are_not_averaged_or_hidden(run, tmp_path, capsys):
    """Catches: the same seed in another folder, or a seed with other settings, in one row."""
    one = run("fedfm", SMALL["fedfm"])
    about, text = json.loads((one.folder / "args.json").read_text()), (one.folder / "log.csv").read_text()
    for place, seed, lam in (("elsewhere", 0, about["lam"]), ("elsewhere", 1, 0.5), ("elsewhere", 3, about["lam"])):
        folder = tmp_path / place / f"fedfm-glyphs-s{seed}"
        folder.mkdir(parents=True)
        (folder / "args.json").write_text(json.dumps(about | {"seed": seed, "lam": lam}))
        (folder / "log.csv").write_text(text)
    (tmp_path / "elsewhere" / "fedfm-glyphs-s2").mkdir()
    (tmp_path / "elsewhere" / "fedfm-glyphs-s2" / "args.json").touch()  # stopped in round 1
    common.compare([one.folder, *sorted((tmp_path / "elsewhere").iterdir())])
    out = capsys.readouterr().out
    seeds = [["fedfm-glyphs", "0"], ["fedfm-glyphs", "0,3"], ["fedfm-glyphs-s1", "1"]]
    assert [row[:2] for row in table(out)] == seeds


def test_a_run_that_goes_on_can_be_compared(run, tmp_path, capsys):
    """Catches: a run in the middle of two evaluations, or before its first one, that stops the table or has no lead."""
    folder = run("fedproto", SMALL["fedproto"], "--rounds 3 --eval-every 2").folder
    lines = (folder / "log.csv").read_text().splitlines()
    blank = ",".join("" if name.startswith("acc_") else "3" for name in lines[0].split(","))
    (folder / "log.csv").write_text("\n".join([*lines[:3], blank]))
    common.compare([folder])
    rows = table(capsys.readouterr().out)
    tested = dict(zip(lines[0].split(","), lines[2].split(",")))
    assert rows[0][5] == f"{float(tested['acc_classifier']) - float(tested['acc_most_frequent']):.2f}"
    (folder / "log.csv").write_text("round,loss,up,down,seconds\n1,2.3,4,5,6\n")
    with pytest.raises(SystemExit) as stop:
        common.compare([folder])
    assert stop.value.code == 2


def test_a_log_with_any_name_of_a_domain_is_read(tmp_path):
    """Catches: a run that ends with a traceback instead of its pictures, as a domain's folder has a comma or a #."""
    (tmp_path / "log.csv").write_text('round,"acc_old, grey","acc_#2"\n1,,0.5\n2,50.0,1\n')
    log = common.read_log(tmp_path)
    assert list(log) == ["round", "acc_old, grey", "acc_#2"]
    assert np.isnan(log["acc_old, grey"][0]) and log["acc_old, grey"][1] == 50 and log["acc_#2"].tolist() == [0.5, 1]


def test_the_lead_is_that_of_the_final_accuracy(capsys):
    """Catches: the lead of the best round."""
    a_log = {"round": np.arange(1, 4), "acc_classifier": np.array([50.0, 80.0, 60.0]),
             "acc_most_frequent": np.array([35.0, np.nan, 35.0])}
    common.print_row("mine", {0: a_log})
    assert table(capsys.readouterr().out) == [["mine", "0", "classifier", "80.00", "60.00", "25.00", "3"]]


def test_rows_of_a_comparison(tmp_path, capsys):
    """Catches: seeds out of order, a flag that only the later run has, a run that has not ended in a mean."""
    folders = []
    for seed, rounds, more in ((3, 2, {}), (0, 2, {}), (1, 2, {"flag_of_later": 1}), (2, 1, {})):
        folder = tmp_path / f"x-s{seed}"
        folder.mkdir()
        (folder / "args.json").write_text(json.dumps({"dataset": "glyphs", "partition": "iid", "seed": seed} | more))
        lines = [f"{t},{t}\n" for t in range(1, rounds + 1)]
        (folder / "log.csv").write_text("round,acc_test\n" + "".join(lines))
        folders.append(folder)
    common.compare(folders)
    out = capsys.readouterr().out
    assert [row[:2] for row in table(out)] == [["x", "0,3"], ["x-s1", "1"], ["x-s2", "2"]]
