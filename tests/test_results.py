"""The results as data: pages say what tables.py prints, and runs.csv names every run."""

import csv
import os
import re
import runpy
import subprocess

import pytest
from matplotlib.figure import Figure

from conftest import ROOT

RESULTS = ROOT / ".github" / "results"


def rows_of(name):
    with open(RESULTS / name) as file:
        return list(csv.DictReader(file))


def test_pages_have_the_printed_tables(monkeypatch, capsys):
    """Nobody edits a table by hand."""
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)
    runpy.run_path(str(RESULTS / "tables.py"), run_name="__main__")
    printed = re.findall(r"(<!-- table: ([\w-]+) -->\n(?:\|.*\n)+)", capsys.readouterr().out)
    assert len(printed) > 10
    page = (RESULTS / "README.md").read_text()
    for table, name in printed:
        text = (ROOT / "README.md").read_text() if name == "readme" else page
        assert f"{table}\n" in text, name
    assert page.count("<!-- table: ") == page.count("|---|\n") == len(printed) - 1


def test_runs_csv_names_exactly_the_runs_of_the_data():
    """Every run has one row with command and commit; remarks with commas are quoted."""
    in_data = set()
    for file in RESULTS.glob("*.csv"):
        if file.name == "runs.csv":
            continue
        rounds = [(row["run"], row["seed"], row["round"], row.get("architecture")) for row in rows_of(file.name)]
        assert len(rounds) == len(set(rounds)), f"{file.name} has a round twice"
        in_data |= {(file.stem, run, seed) for run, seed, _, _ in rounds}
    named = [(row["file"], row["run"], row["seed"]) for row in rows_of("runs.csv")]
    assert len(named) == len(set(named))
    assert set(named) == in_data
    for row in rows_of("runs.csv"):
        assert None not in row, f"a comma too many: {row}"
        ours = row["command"].startswith("python ") and re.fullmatch("[0-9a-f]{7,}", row["commit"])
        assert ours or "github.com" in row["command"], row


def test_patches_apply_to_the_commits_that_their_runs_name(tmp_path):
    """No patch is missing or unused."""
    patched = [row for row in rows_of("runs.csv") if row["patch"]]
    assert {row["patch"] for row in patched} == {file.name for file in (RESULTS / "patches").iterdir()}
    for row in patched:
        index = {**os.environ, "GIT_INDEX_FILE": str(tmp_path / "index")}  # the commit's files, without a work tree
        if subprocess.run(["git", "read-tree", row["commit"]], cwd=ROOT, env=index).returncode:
            pytest.skip("the commits are not here")
        patch = RESULTS / "patches" / row["patch"]
        subprocess.run(["git", "apply", "--cached", "--check", patch], cwd=ROOT, env=index, check=True)
