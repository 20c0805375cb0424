"""What the README promises: its commands parse, its links and equations exist, its seventh method runs."""

import importlib
import inspect
import re
import shlex
import sys

import pytest

from conftest import ROOT, arguments, log
from readme import commands, seventh_method

README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / ".github" / "results" / "README.md").read_text()

def test_size_and_links():
    assert README.count("\n") <= 240 and len(README.encode()) <= 17_000
    for folder, text in ((ROOT, README), (ROOT / ".github" / "results", RESULTS)):
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            assert link.startswith("http") or (folder / link).exists(), link

@pytest.mark.parametrize("command", commands(README))
def test_every_command_is_one_that_runs(command):
    """That it parses, that is; `python tests/readme.py` runs them all."""
    words = shlex.split(command)
    script = next(word for word in words if word.endswith(".py"))
    assert (ROOT / script).exists() or script == "fedcon.py"
    if script.startswith("fed") and script != "fedcon.py" and not {"--help", "--resume"} & set(words):
        arguments(script[:-3], *words[words.index(script) + 1:])

def test_the_seventh_method(tmp_path, run, monkeypatch):
    """.github/fedcon.diff, applied to fedproto.py: under 60 changed lines, and it learns."""
    changed = seventh_method(tmp_path)
    assert changed < 60
    monkeypatch.syspath_prepend(tmp_path)
    words = "--clients 5 --subset 0.2 --rounds 3 --no-plots"
    one = log(run("fedcon", words, "--lam 1").folder)
    plain = log(run("fedproto", words, "--lam 0").folder)
    sys.modules.pop("fedcon")
    assert one[-1]["accuracy"] > 30  # chance is 10; the contrast counts from round 2 on
    assert one[0]["loss"] == plain[0]["loss"] and one[-1]["loss"] > plain[-1]["loss"] + 0.1

# the numbered equations of the method sections
EQUATIONS = {"FedProto": 4, "FedTGP": 11, "FedSA": 10, "FedLSA": 10, "FedPLCC": 11, "FedFM": 11}

@pytest.mark.parametrize("paper", EQUATIONS)
def test_equation_index(paper):
    """Each equation stands in the index, with a function that exists and cites it, or with a reason."""
    table, rows, name = README[README.index("| paper | equations"):], [], None
    for line in table.split("\n\n")[0].split("\n")[2:]:
        first, text = [cell.strip() for cell in line.strip("|").split("|")]
        name = first or name
        rows += [text] * (name == paper)
    code, _, no = " ".join(rows).partition("no: ")
    index = [(int(n), f) for n, f in re.findall(r"(\d+) `([\w.]+)`", code)]
    reasons = [int(n) for n in re.findall(r"\d+", re.sub(r"(of|to|by|from|why) [\d, andto]+", "", no))]
    assert {n for n, _ in index} | set(reasons) == set(range(1, EQUATIONS[paper] + 1))
    for n, function in index:
        module, attribute = function.split(".")
        text = inspect.getdoc(getattr(importlib.import_module(module), attribute))
        cited = re.findall(r"\d+", " ".join(re.findall(r"Eqs?\. ([\d, and]+)", text)))
        assert str(n) in cited, f"{function} does not cite Eq. {n}"
