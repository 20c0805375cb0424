"""The results as data: pages say what tables.py prints, and runs.csv names every run."""

import csv
import re
import runpy
import subprocess

import pytest

from conftest import ROOT

RESULTS = ROOT / ".github" / "results"


def rows_of(name):
    with open(RESULTS / name) as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """{name: the lines of the table} that tables.py prints. Its figures go to a scratch folder."""
    import contextlib
    import io
    module = runpy.run_path(str(RESULTS / "tables.py"))
    module["main"].__globals__["PICTURES"] = tmp_path_factory.mktemp("pictures")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        module["main"]()
    return dict(re.findall(r"<!-- table: ([\w-]+) -->\n((?:\|.*\n)+)", printed.getvalue()))


def test_every_printed_table_stands_on_its_page(tables):
    """Catches: a table of a page that was edited by hand, or that is older than the data."""
    assert len(tables) > 10
    for name, table in tables.items():
        page = ROOT / "README.md" if name == "readme" else RESULTS / "README.md"
        assert f"<!-- table: {name} -->\n{table}\n" in page.read_text(), f"{page}: {name}"


def test_every_table_of_the_results_page_is_printed(tables):
    """Catches: numbers on the page that no data are behind."""
    text = (RESULTS / "README.md").read_text()
    assert set(re.findall(r"<!-- table: ([\w-]+) -->", text)) == set(tables) - {"readme"}
    assert text.count("|---|\n") == len(tables) - 1


def test_runs_csv_names_exactly_the_runs_of_the_data():
    """Catches: a run without its command, a command without its run, a run that is stored twice."""
    in_data = set()
    for file in sorted(RESULTS.glob("*.csv")):
        if file.name == "runs.csv":
            continue
        rounds = [(row["run"], row["seed"], row["round"]) for row in rows_of(file.name)]
        assert len(rounds) == len(set(rounds)), f"{file.name} has a round twice"
        in_data |= {(file.stem, run, seed) for run, seed, _ in rounds}
    named = [(row["file"], row["run"], row["seed"]) for row in rows_of("runs.csv")]
    assert len(named) == len(set(named))
    assert set(named) == in_data


def test_each_run_has_its_command_and_commit():
    """Catches: a row of runs.csv that nobody can repeat."""
    for row in rows_of("runs.csv"):
        if row["command"].startswith("python "):
            assert re.fullmatch(r"[0-9a-f]{7,}", row["commit"]), row
        else:
            assert "github.com" in row["command"], row


def test_patches_that_runs_name_exist():
    """Catches: a run whose patch is missing, a patch that no run needs."""
    named = {row["patch"] for row in rows_of("runs.csv") if row["patch"]}
    assert named == {file.name for file in (RESULTS / "patches").iterdir()}


def test_patches_apply_to_the_commits_that_their_runs_name(tmp_path):
    """Catches: a patch of another version of the script. Needs the history; without it there is nothing to test."""
    for i, row in enumerate(row for row in rows_of("runs.csv") if row["patch"]):
        archive = subprocess.run(["git", "archive", row["commit"]], cwd=ROOT, capture_output=True)
        if archive.returncode != 0:
            pytest.skip("no history")
        folder = tmp_path / str(i)
        folder.mkdir()
        subprocess.run(["tar", "x"], cwd=folder, input=archive.stdout, check=True)
        subprocess.run(["git", "apply", "--check", RESULTS / "patches" / row["patch"]], cwd=folder, check=True)
