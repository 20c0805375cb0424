"""Pictures, quality of features, and the comparison of runs."""

import json
import math
import sys
import types

import numpy as np
import pytest
import torch

import common

SMALL = {"fedproto": "--model cnn4 --local-epochs 1 --subset 0.05 --clients 4", "fedtgp": "--subset 0.05 --clients 8 --server-epochs 2", "fedsa": "--subset 0.05 --clients 4",
         "fedlsa": "--domain-fraction 3", "fedplcc": "--domain-fraction 3 --model resnet4 --local-epochs 1",
         "fedfm": "--domain-fraction 3 --model resnet4 --local-epochs 1"}


@pytest.mark.parametrize("script", SMALL)
def test_every_script_draws_features_and_margins(script, run, monkeypatch):
    drawn, plot = {}, common.Run.plot
    monkeypatch.setattr(common.Run, "plot", lambda self, draw, name, *data: drawn.update({name: data}) or plot(self, draw, name, *data))
    along = 1 if script in ("fedproto", "fedplcc") else 0
    _, text, folder = run(__import__(script), *SMALL[script].split(), "--rounds", 2, "--plot-every", along, "--seed", 3)
    pictures = {"partition.png", "curves.png", "features.png", "margins.png", *(["features-0001.png", "margins-0001.png"] if along else [])}
    assert {path.name for path in folder.glob("*.png")} == pictures
    groups, prototypes, classes, t, args = drawn["features.png"]
    assert t == 2 and len(prototypes) == len(classes) and len(classes.unique()) >= 8
    assert len(groups) == (min(6, args.clients) if script in ("fedproto", "fedtgp", "fedsa") else 4)
    assert ("NMI" in text) == (script == "fedfm")


def test_margins():
    C, rng = 6, np.random.default_rng(0)
    y = torch.tensor([0, 0, 1, 3, 3, 4])  # several prototypes of a class, and classes without
    G = torch.from_numpy(rng.normal(size=(6, 5)))
    for c, margin in enumerate(common.margins(G, y, C)):
        want = [math.dist(G[i].tolist(), G[j].tolist()) for i in range(6) for j in range(6) if y[i] == c != y[j]]
        assert margin == pytest.approx(min(want)) if want else math.isnan(margin)
    assert np.isnan(common.margins(G[:1], y[:1], C)).all() and np.isnan(common.margins(G[:0], y[:0], C)).all()


def test_features_embed_with_and_without_scikit_learn(monkeypatch):
    z = torch.cat([torch.randn(20, 30), torch.randn(20, 30) + 40])
    for how in ("t-SNE", "PCA"):
        if how == "PCA":
            monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
        else:
            pytest.importorskip("sklearn")
        flat, name = common.embed(z, 0)
        assert name == how and flat.shape == (40, 2)
        a, b = flat[:20].mean(0), flat[20:].mean(0)
        assert np.linalg.norm(a - b) > 2 * max(flat[:20].std(), flat[20:].std())  # the two heaps stay two


def test_many_classes_few_images_and_no_prototypes(tmp_path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    net = types.SimpleNamespace(eval=lambda: None, features=lambda x: x.float().flatten(1), feature_dim=12)
    args = types.SimpleNamespace(classes=100, class_names=[f"class {c}" for c in range(100)], script="fedsa", dataset="x", partition="iid", seed=0, guides="anchors", beta=1,
                                 classes_per_client=1, dominant_share=1, missing=1)
    for n in (1, 3, 300):
        x, y = torch.randint(0, 255, (n, 3, 2, 2)).float(), torch.arange(n) % 100
        x[0] = math.nan  # a client whose features exploded
        for G, c in ((torch.randn(100, 12), torch.arange(100)), (torch.randn(0, 12), torch.arange(0))):
            common.plot_features(plt, {"all": (net, common.Samples(x, y))}, G, c, 1, args).savefig(tmp_path / "f.png")
            common.plot_margins(plt, [(net, common.Samples(x, y))], G, c, 1, args).savefig(tmp_path / "m.png")
            plt.close("all")


def test_cluster_quality(monkeypatch):
    pytest.importorskip("sklearn")
    net = types.SimpleNamespace(eval=lambda: None, features=lambda x: x.float().flatten(1), feature_dim=2)
    y = torch.arange(90) % 3
    apart, mixed = (torch.randn(90, 2) + far * torch.stack([y == 1, y == 2], 1) for far in (50, 0))
    args = types.SimpleNamespace(classes=3, seed=0)
    assert common.cluster_quality(net, {"a": common.Samples(apart[:40], y[:40]), "b": common.Samples(apart[40:], y[40:])}, args).startswith(
        "features of 90 test images: NMI 1.000, silhouette 0.9")
    assert float(common.cluster_quality(net, {"a": common.Samples(mixed, y)}, args).split("NMI ")[1].split(",")[0]) < 0.2
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    assert "scikit-learn" in common.cluster_quality(net, {"a": common.Samples(mixed, y)}, args)


def test_comparing_runs(run, tmp_path, capsys):
    import fedproto
    import fedsa
    words = "--model cnn4 --local-epochs 1 --subset 0.05 --clients 4 --rounds 3 --no-plots --checkpoint-every 0".split()
    run(fedproto, *words, "--trials", 2)
    run(fedproto, *words, "--lam", 0, "--eval-every", 2)
    *_, folder = run(fedsa, *words)
    (tmp_path / "runs" / "other").mkdir()
    common.compare(sorted((tmp_path / "runs").iterdir()))
    out, err = capsys.readouterr()
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in out.splitlines() if line.startswith("| fed")]
    assert [row[0] for row in rows] == ["fedproto", "fedproto", "fedsa"] and [row[4] for row in rows] == ["2", "1", "1"]
    assert [row[3] for row in rows] == ["--lam 0.1", "--lam 0.0", ""] and "±" in rows[0][5] and "±" not in rows[2][5]
    from test_scripts import log
    best = max(log(folder), key=lambda row: row["accuracy"])
    assert rows[2][5] == f"{best['accuracy']:.2f}" and (tmp_path / "runs" / "compare.png").exists() and "other is no run folder" in err
    assert rows[2][8] == common.short(sum(row["up"] + row["down"] for row in log(folder)[:int(best["round"])]))
    assert json.loads((folder / "args.json").read_text())["script"] == "fedsa"
    with pytest.raises(SystemExit):
        common.compare([tmp_path])


@pytest.mark.parametrize("low,high,wanted", [(2, 30, {"10", "3"}), (0.04, 700, {"0.1", "1", "100"}), (1e-9, 1e3, {"0.001", "10"})])
def test_labels_of_a_logarithmic_axis_are_plain(low, high, wanted):
    figure, axis = common.pyplot().subplots()
    axis.plot([low, high])
    common.log_scale(common.pyplot(), axis)
    figure.canvas.draw()
    labels = {label.get_text() for label in axis.get_yticklabels(which="both")}
    assert wanted <= labels and not any("$" in label for label in labels)


@pytest.mark.parametrize("words", ["--feature-dim 1", "--lr 0.1 --weight-decay 5 --rounds 5", "--drop-rate 0.6 --rounds 6 --clients 2 --server-epochs 2"])
def test_odd_features_and_rounds_without_reports_are_drawn(words, run):
    """One feature; all features equal (dead ReLUs), which t-SNE does not survive; rounds without a server loss."""
    import fedtgp
    _, text, folder = run(fedtgp, *"--subset 0.05 --clients 4 --rounds 2 --server-epochs 2".split(), *words.split())
    assert (folder / "features.png").exists() and (folder / "curves.png").exists() and "could not be drawn" not in text


def test_a_picture_that_cannot_be_drawn_is_a_note(run, monkeypatch):
    import fedsa
    monkeypatch.setattr(common, "embed", lambda *_: 1 / 0)
    results, text, folder = run(fedsa, *"--subset 0.05 --clients 2 --rounds 1".split())
    assert "features.png could not be drawn (ZeroDivisionError" in text and (folder / "margins.png").exists() and "best" in results[0]


def test_comparing_what_is_no_run(tmp_path, capsys, run):
    import fedsa
    *_, good = run(fedsa, *"--model cnn4 --subset 0.05 --clients 200 --rounds 1 --no-plots --checkpoint-every 0".split())  # nobody has test images
    header, row = (good / "log.csv").read_text().splitlines()
    about = (good / "args.json").read_text()
    bad = {"half": (about, f"{header}\n{row[:9]}"), "list": ("[1]", f"{header}\n{row}"), "twice": (about, f"{header}\n{row}\n{row}"),
           "empty": (about, ""), "more": (about, f"{header}\n{row},1,2"), "bare": ("{}", f"{header}\n{row}"), "comma": (about, f"{header}\n{row.replace('.', ',')}")}
    for name, (settings, rows) in bad.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "args.json").write_text(settings)
        (tmp_path / name / "log.csv").write_text(rows)
    common.compare([tmp_path / "nowhere", *(tmp_path / name for name in bad), good, good.parent / "compare.png"])
    out, err = capsys.readouterr()
    assert out.count("| fedsa") == 1 and err.count("is no run folder") == len(bad) + 1 == err.count("\n") and (good.parent / "compare.png").exists()
