"""The lab sheets of .github/class: functions without bodies, and tests that name the equation that is missing."""

import ast
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT

CLASS = ROOT / ".github" / "class"
SHEETS = {}  # {title: ([[script, function, ...] of each blank.py line], the words of the pytest line)}
for title, block in re.findall(r"^\*\*(\w+): .*?```bash\n(.*?)```", (CLASS / "README.md").read_text(), re.M | re.S):
    blanks = re.findall(r"^python \.github/class/blank\.py (.*)$", block, re.M)
    tests = re.search(r"^python (-m pytest .*)$", block, re.M)[1]
    SHEETS[title] = ([line.split() for line in blanks], shlex.split(tests))
assert list(SHEETS) == ["Easy", "Middle", "Hard"]
every_sheet = pytest.mark.parametrize("title", SHEETS)


def blank(folder, *words):
    return subprocess.run([sys.executable, CLASS / "blank.py", *words], cwd=folder, capture_output=True, text=True)


@every_sheet
def test_only_the_body_goes(title, tmp_path):
    """Signature and docstring stay; blank.py prints the way back."""
    (tmp_path / ".git").mkdir()
    for script, *functions in SHEETS[title][0]:
        shutil.copy(ROOT / script, tmp_path)
        assert f"git restore {script}\n" in blank(tmp_path, script, *functions).stdout
        expected = ast.parse((ROOT / script).read_text())
        for node in expected.body:
            if isinstance(node, ast.FunctionDef) and node.name in functions:
                del node.body[1:]  # the docstring stays
        line = r'^    raise NotImplementedError\("(Eqs?\. \d.*|\w+)"\)\n'
        blanked, lines = re.subn(line, "", (tmp_path / script).read_text(), flags=re.M)
        assert lines == len(functions)
        assert ast.dump(ast.parse(blanked)) == ast.dump(expected)


def test_blanking_tells_what_is_wrong(tmp_path):
    """One line names the problem; the file stays as it was."""
    shutil.copy(ROOT / "fedsa.py", tmp_path)
    for words, problem in ("fedsa.py ema emma", "emma"), ("fedsaa.py ema", "fedsaa.py"), ("", "usage"):
        done = blank(tmp_path, *words.split())
        assert done.returncode == 2
        assert problem in done.stderr and done.stderr.count("\n") == 1
    assert (tmp_path / "fedsa.py").read_text() == (ROOT / "fedsa.py").read_text()


OWN_TEST = {  # a part of the name of a blanked function's own test
    "class_means": "eq2_class_means", "weighted_mean": "eq3_weighted_mean",
    "prototype_distance": "eq4_prototype_distance", "average_margin": "eq6_average_margin",
    "margin_contrastive": "eq7_margin_contrastive", "ema": "eq10_ema",
    "first_neighbour_clusters": "first_neighbour_clusters", "cluster_means": "finch_cluster_means",
    "finch": "finch[", "prototype_weights": "eq11_prototype_weights",
}


@every_sheet
def test_the_tests_name_what_is_missing(title, tmp_path):
    """A sheet runs its scripts' tests; without a function its own test fails."""
    shutil.copytree(ROOT / "tests", tmp_path / "tests")
    for file in ROOT.glob("*.py"):
        shutil.copy(file, tmp_path)
    lines, words = SHEETS[title]
    selected, missing = set(), []
    for script, *functions in lines:
        printed = blank(tmp_path, script, *functions).stdout
        selected |= set(re.search(r'tests/test_equations.py -k "(.*)"', printed)[1].split(" or "))
        missing += functions
    assert selected == set(words[-1].split(" or "))

    command = [sys.executable, *words, "--tb=no", "-p", "no:cacheprovider"]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    failed = re.findall(r"^FAILED .*?::test_(\S+)", printed, re.M)  # with [...], which names the function in test_loss
    for function in missing:
        assert any(OWN_TEST[function] in test for test in failed), f"no test names {function}"
