"""The lab sheets of .github/class: functions without bodies, and tests that name the equation that is missing."""

import ast
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT

BLANK = ROOT / ".github/class/blank.py"
PAGE = (ROOT / ".github/class/README.md").read_text()
SHEETS = {}  # {title: [[script, function, ...], ...]}
WORDS = {}   # {title: the words of its pytest line}
for title, block in re.findall(r"^\*\*(\w+): .*?```bash\n(.*?)```", PAGE.split("## Lab sheets")[1], re.M | re.S):
    SHEETS[title] = [line.split() for line in re.findall(r"^python \.github/class/blank\.py (.*)$", block, re.M)]
    WORDS[title] = shlex.split(re.search(r"^python (-m pytest .*)$", block, re.M).group(1))
every_sheet = pytest.mark.parametrize("title", SHEETS)
every_line = pytest.mark.parametrize("script, functions", [(words[0], words[1:]) for lines in SHEETS.values()
                                                           for words in lines])


def blank(folder, *words):
    return subprocess.run([sys.executable, BLANK, *words], cwd=folder, capture_output=True, text=True)


def functions_of(file):
    return {node.name: node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


@every_line
def test_only_the_body_goes(script, functions, tmp_path):
    """Catches: a signature or a docstring that goes with the body, another function that changes."""
    shutil.copy(ROOT / script, tmp_path)
    assert blank(tmp_path, script, *functions).returncode == 0
    before, after = functions_of(ROOT / script), functions_of(tmp_path / script)
    assert list(before) == list(after)
    for name in before:
        if name not in functions:
            assert ast.dump(before[name]) == ast.dump(after[name])
            continue
        assert ast.dump(before[name].args) == ast.dump(after[name].args)
        docstring = ast.get_docstring(before[name])
        assert docstring and ast.get_docstring(after[name]) == docstring
        _, missing = after[name].body
        text = re.fullmatch(r"raise NotImplementedError\('(.*)'\)", ast.unparse(missing)).group(1)
        assert text in docstring or text == name


@pytest.mark.parametrize("git", [True, False])
@every_line
def test_blanking_tells_how_to_test_and_undo(script, functions, git, tmp_path):
    """Catches: tests of another script, no tests for common.py, git named in a folder without its history."""
    shutil.copy(ROOT / script, tmp_path)
    if git:
        (tmp_path / ".git").mkdir()
    printed = blank(tmp_path, script, *functions).stdout
    tests = " or ".join(functions) if script == "common.py" else script.removesuffix(".py")
    assert f'tests/test_equations.py -k "{tests}"\n' in printed
    assert (f"git restore {script}\n" in printed) == git


def test_blanking_tells_what_is_wrong(tmp_path):
    """Catches: a traceback, or a file that is changed although a function's name is wrong."""
    file = tmp_path / "fedsa.py"
    shutil.copy(ROOT / "fedsa.py", file)
    for words, problem in ((["fedsa.py", "ema", "emma"], "emma"), (["fedsaa.py", "ema"], "fedsaa.py"), ([], "usage")):
        done = blank(tmp_path, *words)
        assert done.returncode == 2 and problem in done.stderr and done.stderr.count("\n") == 1
    assert file.read_text() == (ROOT / "fedsa.py").read_text()


def test_there_are_three_sheets():
    """Catches: a sheet that these tests no longer find on the page."""
    assert list(SHEETS) == ["Easy", "Middle", "Hard"] and all(SHEETS.values())


@every_sheet
def test_a_sheet_selects_the_tests_of_its_scripts(title):
    """Catches: a pytest line that leaves out a script's tests, or selects those of a script that is not blanked."""
    want = set()
    for script, *functions in SHEETS[title]:
        want |= set(functions) if script == "common.py" else {script.removesuffix(".py")}
    *others, flag, selected = WORDS[title]
    assert flag == "-k" and "tests/test_equations.py" in others
    assert set(selected.split(" or ")) == want


def names_of(script, function):
    """How a test may name a function: by itself, or by its equation, as in eq4, or else as a part of FINCH."""
    text = ast.get_docstring(functions_of(ROOT / script)[function])
    equations = re.search(r"Eqs?\. (\d+(?:(?:, | and )\d+)*)", text)
    if equations is None:
        return [function, "finch"]
    return [function] + [f"eq{number}_" for number in re.findall(r"\d+", equations.group(1))]


@every_sheet
def test_the_tests_name_what_is_missing(title, tmp_path):
    """Catches: a function on a sheet without a test of its own, a test that fails though its function is there."""
    for file in ROOT.glob("*.py"):
        shutil.copy(file, tmp_path)
    shutil.copytree(ROOT / "tests", tmp_path / "tests")
    for words in SHEETS[title]:
        blank(tmp_path, *words)
    command = [sys.executable, *WORDS[title], "--tb=no", "-p", "no:cacheprovider"]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    failed = re.findall(r"^FAILED .*?::test_(\S+)", printed, re.M)  # with [...], which names the function in test_loss

    names = [names_of(script, function) for script, *functions in SHEETS[title] for function in functions]
    for of_function in names:
        assert any(name in test for name in of_function for test in failed), f"no test names {of_function[0]}"
    for test in failed:
        assert any(name in test for of_function in names for name in of_function), f"test_{test} fails without a cause"
