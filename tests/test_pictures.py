"""Pictures, how well features separate, and the comparison of runs."""

import json, math, sys

import numpy as np
import pytest
import torch

import common
from conftest import ROOT, SMALL, log

def test_margins():
    y = torch.tensor([0, 0, 1, 3, 3, 4])  # several vectors of a class, and classes without
    G = torch.randn(6, 5, dtype=torch.float64)
    for c, margin in enumerate(common.margins(G, y, 6)):
        want = [math.dist(a, b) for a, k in zip(G.tolist(), y) for b, l in zip(G.tolist(), y) if k == c != l]
        assert margin == pytest.approx(min(want, default=math.inf))
    assert np.isinf(common.margins(G[:1], y[:1], 6)).all() and np.isinf(common.margins(G[:0], y[:0], 6)).all()

@pytest.mark.parametrize("without", [False, True])
def test_features_show_classes_with_and_without_scikit_learn(without, monkeypatch, run):
    if without:
        monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
        monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    else:
        pytest.importorskip("sklearn")
    y = torch.arange(60) % 3
    z = torch.randn(60, 30, generator=torch.Generator().manual_seed(0)) + 9 * torch.eye(30)[y]
    points, how = common.embed(torch.cat([z, 9 * torch.eye(30)[:3]]), torch.cat([y, torch.arange(3)]), 0)
    assert ("t-SNE" in how) != without and points.shape == (63, 2)
    spots = np.stack([points[:60][y == c].mean(0) for c in range(3)])
    nearest = np.linalg.norm(points[:, None] - spots, axis=2).argmin(1)
    assert nearest.tolist() == [*y.tolist(), 0, 1, 2]  # the three heaps stay three, their stars among them
    one = run("fedfm", SMALL["fedfm"].replace("--no-plots", ""), "--plot-every 1" if without else "")
    names = {path.name for path in one.folder.glob("*.png")}
    assert {"features.png", "margins.png"} <= names and ("features-0001.png" in names) == without
    assert ("silhouette 0." in one.text or "silhouette -0." in one.text) != without

def test_comparing_runs(run, tmp_path, capsys):
    words = SMALL["fedproto"] + " --rounds 3 --checkpoint-every 0"
    run("fedproto", words, "--trials 2")
    run("fedproto", words, "--lam 0 --eval-every 2")
    one = run("fedfm", SMALL["fedfm"])
    (tmp_path / "runs" / "other").mkdir()
    common.compare(sorted((tmp_path / "runs").iterdir()))
    out = capsys.readouterr().out
    rows = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("| fed")]
    assert [row[:4] for row in rows] == [  # both predictions
        ["fedfm glyphs", "", "0", "test"], ["fedproto glyphs", "--lam 0.1", "0,1", "classifier"],
        ["fedproto glyphs", "--lam 0.1", "0,1", "prototype"], ["fedproto glyphs", "--lam 0.0", "0", "classifier"],
        ["fedproto glyphs", "--lam 0.0", "0", "prototype"]]
    best = max(log(one.folder), key=lambda row: row["acc_validation"])["acc_test"]
    assert rows[0][4:6] == [f"{best:.2f}", f"{one.rows[-1]['acc_test']:.2f}"]
    assert "±" in rows[1][4] and "±" not in rows[3][4]
    assert (tmp_path / "runs" / "compare.png").exists()
    with pytest.raises(SystemExit) as stop:
        common.compare([tmp_path])
    assert stop.value.code == 2

def test_published_logs_are_read(tmp_path, capsys):
    folders = sorted((ROOT / ".github" / "results").glob("*/*/"))
    assert len(folders) > 100
    (tmp_path / "here").symlink_to(folders[0])  # compare.png goes beside the first
    common.compare([tmp_path / "here", *folders[1:]])
    out = capsys.readouterr().out
    for script in {json.loads((folder / "args.json").read_text())["script"] for folder in folders}:
        assert out.count(f"| {script} ") >= 2
    assert "±" in out and (tmp_path / "compare.png").exists()
