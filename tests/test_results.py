"""The results as data: pages say what tables.py prints, and runs.csv names every run."""

import csv
import re
import runpy
import shlex
import sys

import pytest
from matplotlib.figure import Figure

from conftest import ROOT, SMALL, arguments

RESULTS = ROOT / ".github" / "results"
TABLES = str(RESULTS / "tables.py")


def rows_of(name):
    with open(RESULTS / name, encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def tables(monkeypatch, capsys):
    """What tables.py prints: {name: a table with its marker}."""
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)
    runpy.run_path(TABLES, run_name="__main__")
    printed = re.findall(r"(<!-- table: ([\w-]+) -->\n(?:\|.*\n)+)", capsys.readouterr().out)
    return {name: table for table, name in printed}


def results_text():
    """The results page, and what the README says about results."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    parts = [re.search(rf"^{start}.*?(?=^## )", readme, re.M | re.S)[0]
             for start in (r"\*\*Do the published gains hold", "## Results")]
    return (RESULTS / "README.md").read_text(encoding="utf-8"), "".join(parts)


def test_pages_have_the_printed_tables(tables):
    """Nobody edits a table by hand."""
    page, readme = (RESULTS / "README.md").read_text(encoding="utf-8"), (ROOT / "README.md").read_text(encoding="utf-8")
    for name, table in tables.items():
        text = readme if name.startswith("readme") else page
        assert f"{table}\n" in text, name
    assert (page + readme).count("<!-- table: ") == len(tables) > 8
    assert (page + readme).count("|---|\n") == len(tables) + 2  # typed: methods, verdicts in words


def test_text_has_only_numbers_of_the_tables(tables):
    """A measured number between the tables is one of theirs. Settings, in backticks, are free."""
    in_tables = set(re.findall(r"\d+\.\d+", "".join(tables.values())))
    text = re.sub(r"^\|.*|`.*?`", "", "".join(results_text()), flags=re.M)
    assert set(re.findall(r"\d+\.\d+", text)) <= in_tables


def test_verdicts():
    """The 95 % t-interval decides, not its rounded bounds, and no bound reads 0.0."""
    verdict = runpy.run_path(TABLES)["verdict"]
    base = {seed: 10 for seed in (0, 1, 2)}

    def of(*values):
        return verdict({seed: 10 + x for seed, x in enumerate(values)}, base, float)

    assert of(1, 2, 3) == "2.0 (−0.5 to 4.5) inconclusive"  # 2 ± 4.303 / √3
    assert of(-1, -2, -3) == "−2.0 (−4.5 to 0.5) inconclusive"
    assert of(1.5, 2.5, 3.5) == "2.5 (0.02 to 4.98) ahead"
    assert of(-1.5, -2.5, -3.5) == "−2.5 (−4.98 to −0.02) behind"
    six = {seed: 10 + x for seed, x in enumerate((10, 20, 30, 10, 20, 30))}
    assert verdict(six, {seed: 10 for seed in range(6)}, float) == "20.0 (10.6 to 29.4) ahead"  # 20 ± 2.571 · 8.94 / √6


@pytest.mark.parametrize("published, ours, want", [
    (2, (1.5, 2.5, 3.5), "yes"),       # 2.5 (0.02 to 4.98)
    (6, (1.5, 2.5, 3.5), "yes, but smaller"),
    (6, (1, 2, 3), "no"),              # 2.0 (−0.5 to 4.5)
    (2, (1, 2, 3), "undecided"),
    (6, (-1.5, -2.5, -3.5), "no"),
    (0.01, (1.5, 2.5, 3.5), "yes, and larger"),
])
def test_reproduced(published, ours, want):
    """Is the published difference in our interval, and is that above 0?"""
    base = {seed: 10 for seed in (0, 1, 2)}
    run = {seed: 10 + x for seed, x in enumerate(ours)}
    assert runpy.run_path(TABLES)["reproduced"](run, base, float, published) == want


def test_means_and_marks():
    """A mean says when it is not of three seeds; only conclusive comparisons get a triangle."""
    module = runpy.run_path(TABLES)

    def marked(*values):
        return module["marked"]({seed: 10 + x for seed, x in enumerate(values)}, {seed: 10 for seed in (0, 1, 2)}, float)

    assert module["accuracy"]({0: 1, 1: 2, 2: 3}, float) == "2.0 ± 1.0"
    assert module["accuracy"]({0: 1, 1: 2}, float) == "1.5 ± 0.7 (2 seeds)"
    assert module["accuracy"]({0: 1}, float) == "1.0"
    assert marked(1.5, 2.5, 3.5) == "12.5 ▲"
    assert marked(-1.5, -2.5, -3.5) == "7.5 ▼"
    assert marked(1, 2, 3) == "12.0"
    assert marked(0, 0, 0) == "10.0"


def settings(script, words):
    """What a command runs, whichever seed and however far."""
    args = vars(arguments(script, words))
    if script == "fedplcc" and args["lam_corr"] is None:
        args["lam_corr"] = 10 * args["lam_contra"]
    return script, {name: args[name] for name in args if name not in ("seed", "trials", "rounds", "eval_every", "workers")}


def test_commands_of_the_tables_are_runs(tables):
    """A command in a table is whole: with the flags above the table it is one of runs.csv's."""
    cross_device = "--dataset cifar10 --clients 100 --participation 0.1"
    above = {"cross-device": cross_device, "leads": cross_device, "cross-silo": "--dataset cifar10",
             "office-fedlsa": "--dataset office", "ablations": "--dataset office", "office-fedplcc": "--dataset office",
             "digits-fedfm": "--dataset digits", "readme-demo": ""}
    ran = []
    for row in rows_of("runs.csv"):
        if row["code"] == "":
            _, script, words = f"{row['command']} ".split(" ", 2)
            if script != "fedcon.py":
                ran.append(settings(script.removesuffix(".py"), words))
    found = 0
    for name, flags in above.items():
        for script, words in re.findall(r"^\| `(\w+)\.py(.*?)`", tables[name], re.M):
            assert settings(script, f"{flags} {words}") in ran, f"{name}: {script}.py{words}"
            found += 1
    assert found >= 25


def test_runs_csv_names_exactly_the_runs_of_the_data():
    """Every run has one row with command and commit; remarks with commas are quoted."""
    in_data = set()
    for file in RESULTS.glob("*.csv"):
        if file.name == "runs.csv":
            continue
        rounds = [(row["run"], row["seed"], row["round"]) for row in rows_of(file.name)]
        assert len(rounds) == len(set(rounds)), f"{file.name} has a round twice"
        in_data |= {(file.stem, run, seed) for run, seed, _ in rounds}
    named = [(row["file"], row["run"], row["seed"]) for row in rows_of("runs.csv")]
    assert len(named) == len(set(named))
    assert set(named) == in_data
    for row in rows_of("runs.csv"):
        assert None not in row, f"a comma too many: {row}"
        assert row["code"] in ("", "changed", "commit", "other") and (row["remark"] or row["code"] in ("", "other"))
        if row["code"] == "other":
            assert "github.com" in row["command"], row
        else:
            assert re.fullmatch("[0-9a-f]{7,}", row["commit"]), row


def test_todays_scripts_repeat_the_runs():
    """Every command parses, except where runs.csv sends the reader back to the commit."""
    for row in rows_of("runs.csv"):
        if row["code"] == "other":
            continue
        python, script, *words = shlex.split(row["command"])
        script = script.removesuffix(".py").replace("fedcon", "fedproto")  # the reader makes fedcon.py from it
        assert python == "python"
        try:
            arguments(script, *words)
        except SystemExit:
            assert row["code"] == "commit", row["command"]
        else:
            assert row["code"] != "commit", row["command"]


def test_batchnorm_of_a_checkpoint(run, monkeypatch, capsys):
    """With averaged statistics batchnorm.py repeats the log's last accuracy; statistics of its own move the features."""
    trained = run("fedfm", SMALL["fedfm"], "--checkpoint-every 1")
    monkeypatch.setattr(sys, "argv", ["batchnorm.py", str(trained.folder)])
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(RESULTS / "batchnorm.py"))
    averaged, own = re.findall(r"test ([\d.]+)  length ([\d.]+)", capsys.readouterr().out)
    assert float(averaged[0]) == pytest.approx(trained.rows[-1]["acc_test"], abs=0.005)
    assert own[1] != averaged[1]
