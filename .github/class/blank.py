"""Make a lab sheet: take the bodies of some functions out of a script. Signatures and docstrings stay.

    python .github/class/blank.py fedsa.py average_margin margin_contrastive ema

It refuses a file that git could not bring back: a solution may stand there. --force blanks it all the same.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path


def stop(message):
    print(message, file=sys.stderr)
    sys.exit(2)


def why_not(script):
    """Why git could not bring this file back as it is; "" if it could."""
    status = ["git", "status", "--porcelain", "--", script.name]
    try:
        done = subprocess.run(status, cwd=script.parent, capture_output=True, text=True)
    except FileNotFoundError:
        return "git is not installed"
    if done.returncode != 0:
        return "it is in no git repository"
    return "it has changes that are not committed" if done.stdout else ""


force = "--force" in sys.argv
words = [word for word in sys.argv[1:] if word != "--force"]
if len(words) < 2:
    stop("usage: python .github/class/blank.py SCRIPT FUNCTION [FUNCTION ...] [--force]")
script, blanked = Path(words[0]), words[1:]
if not script.is_file():
    stop(f"{script}: no such file")
source = script.read_text(encoding="utf-8")
lines = source.splitlines(keepends=True)
functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
for name in blanked:
    if name not in functions:
        stop(f"{script}: no such function: {name}; there are {', '.join(functions)}")
reason = why_not(script)
if reason and not force:
    stop(f"{script}: {reason}, so what you wrote there would be lost; --force blanks it all the same")

# from the last function to the first: then the line numbers of the others stay right
for name in reversed(functions):
    if name not in blanked:
        continue
    body = functions[name].body
    docstring = ast.get_docstring(functions[name]) or ""
    equation = re.search(r"Eqs?\. \d+((, | and )\d+)*", docstring)
    missing = equation.group() if equation else name
    start = body[0].end_lineno if docstring else body[0].lineno - 1   # lines[start] follows the docstring
    lines[start:body[-1].end_lineno] = [f'    raise NotImplementedError("{missing}")\n']

script.write_text("".join(lines), encoding="utf-8")
tests = " or ".join(blanked) if script.stem == "common" else script.stem  # all scripts use common.py
print(f'to test: python -m pytest -q tests/test_mistakes.py tests/test_equations.py -k "{tests}" -x --tb=short')
if not reason:
    print(f"to undo: git restore {script}")
