"""What the README promises: its commands parse, its pictures exist, its seventh method runs."""

import importlib
import re
import shlex
import sys

import pytest

import common
from conftest import ROOT
from readme import commands
from test_scripts import log

README = (ROOT / "README.md").read_text()


def test_length_and_links():
    assert README.count("\n") < 400
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("http") or (ROOT / link).exists(), link


@pytest.mark.parametrize("command", commands(README))
def test_every_command_is_one_that_runs(command):
    """That it parses, that is; `python tests/readme.py` runs them all."""
    words = shlex.split(command)
    script = next(word for word in words if word.endswith(".py"))
    assert (ROOT / script).exists() or script == "fedcon.py"
    if script.startswith("fed") and script != "fedcon.py" and "--help" not in words and "--resume" not in words:
        module = importlib.import_module(script[:-3])
        common.parse(script[:-3], "", module.PRESETS, module.PAPER, module.method_flags, module.settle, words[words.index(script) + 1:])


def test_the_seventh_method(tmp_path, run, monkeypatch):
    """The README's diff, applied to fedproto.py: under 40 changed lines, and it learns."""
    source = (ROOT / "fedproto.py").read_text()
    diff = re.search(r"```diff\n(.*?)```", README, re.S).group(1)
    changed = [line for line in diff.splitlines() if line[:1] in "+-"]
    for hunk in re.split(r"^@@.*\n", diff, flags=re.M)[1:]:
        old, new = ("\n".join(line[1:] for line in hunk.splitlines() if line[:1] in sign) for sign in (" -", " +"))
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    assert len(changed) < 40
    (tmp_path / "fedcon.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    import fedcon
    import fedproto
    words = "--clients 5 --subset 0.2 --rounds 3 --no-plots".split()
    (result,), _, folder = run(fedcon, *words, "--lam", 1)
    *_, plain = run(fedproto, *words, "--lam", 0)
    assert result["best"] > 30  # chance is 10
    assert log(folder)[0]["loss"] == log(plain)[0]["loss"] and log(folder)[-1]["loss"] > log(plain)[-1]["loss"] + 0.1  # the contrast, from round 2 on
    sys.modules.pop("fedcon")
