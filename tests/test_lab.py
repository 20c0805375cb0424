"""The lab sheets of .github/class: functions without bodies, and tests that name the equation that is missing."""

import ast
import re
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT

BLANK = ROOT / ".github/class/blank.py"
PAGE = (ROOT / ".github/class/README.md").read_text()
SHEETS = {}  # {script: its functions on the sheets}
for script, functions in re.findall(r"^python \.github/class/blank\.py (\w+)\.py (.*)$", PAGE, re.M):
    SHEETS[script] = functions.split()
every_sheet = pytest.mark.parametrize("script", SHEETS)


def blank(folder, *words):
    return subprocess.run([sys.executable, BLANK, *words], cwd=folder, capture_output=True, text=True)


def functions_of(file):
    return {node.name: node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


@every_sheet
def test_only_the_body_goes(script, tmp_path):
    """Catches: a signature or a docstring that goes with the body, another function that changes."""
    shutil.copy(ROOT / f"{script}.py", tmp_path)
    done = blank(tmp_path, f"{script}.py", *SHEETS[script])
    assert done.returncode == 0
    assert f"tests/test_equations.py -k {script}" in done.stdout and f"git restore {script}.py" in done.stdout

    before, after = functions_of(ROOT / f"{script}.py"), functions_of(tmp_path / f"{script}.py")
    assert list(before) == list(after)
    for name in before:
        if name not in SHEETS[script]:
            assert ast.dump(before[name]) == ast.dump(after[name])
            continue
        assert ast.dump(before[name].args) == ast.dump(after[name].args)
        docstring = ast.get_docstring(before[name])
        assert docstring and ast.get_docstring(after[name]) == docstring
        _, missing = after[name].body
        text = re.fullmatch(r"raise NotImplementedError\('(.*)'\)", ast.unparse(missing)).group(1)
        assert text in docstring or text == name


def test_blanking_tells_what_is_wrong(tmp_path):
    """Catches: a traceback, or a file that is changed although a function's name is wrong."""
    file = tmp_path / "fedsa.py"
    shutil.copy(ROOT / "fedsa.py", file)
    for words, problem in ((["fedsa.py", "ema", "emma"], "emma"), (["fedsaa.py", "ema"], "fedsaa.py"), ([], "usage")):
        done = blank(tmp_path, *words)
        assert done.returncode == 2 and problem in done.stderr and done.stderr.count("\n") == 1
    assert file.read_text() == (ROOT / "fedsa.py").read_text()


@pytest.mark.skipif("def test_fedsa_eq10_ema" not in (ROOT / "tests/test_equations.py").read_text(),
                    reason="the tests of the equations do not have the names of functions yet")
@every_sheet
def test_the_tests_name_what_is_missing(script, tmp_path):
    """Catches: a function on a sheet without a test of its own, a test that fails though its function is there."""
    for file in ROOT.glob("*.py"):
        shutil.copy(file, tmp_path)
    shutil.copytree(ROOT / "tests", tmp_path / "tests")
    blank(tmp_path, f"{script}.py", *SHEETS[script])
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", "tests/test_equations.py",
               "-k", script]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    failed = set(re.findall(r"^FAILED .*::test_(\w+)", printed, re.M))

    for function in SHEETS[script]:
        assert any(function in test for test in failed), f"no test names {script}.{function}"
    for test in failed:
        assert any(function in test for function in SHEETS[script]), f"test_{test} fails, and its function is there"
