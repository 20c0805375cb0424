"""Make a lab sheet: take the bodies of some functions out of a script. Signatures and docstrings stay.

    python .github/class/blank.py fedsa.py average_margin margin_contrastive ema
"""

import ast
import re
import sys
from pathlib import Path


def stop(message):
    print(message, file=sys.stderr)
    sys.exit(2)


if len(sys.argv) < 3:
    stop("usage: python .github/class/blank.py SCRIPT FUNCTION [FUNCTION ...]")
script = Path(sys.argv[1])
if not script.is_file():
    stop(f"{script}: no such file")
source = script.read_text(encoding="utf-8")
lines = source.splitlines(keepends=True)
functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
for name in sys.argv[2:]:
    if name not in functions:
        stop(f"{script}: no such function: {name}; there are {', '.join(functions)}")

# from the last function to the first: then the line numbers of the others stay right
for name in reversed(functions):
    if name not in sys.argv[2:]:
        continue
    body = functions[name].body
    docstring = ast.get_docstring(functions[name]) or ""
    equation = re.search(r"Eqs?\. \d+((, | and )\d+)*", docstring)
    missing = equation.group() if equation else name
    start = body[0].end_lineno if docstring else body[0].lineno - 1   # lines[start] follows the docstring
    lines[start:body[-1].end_lineno] = [f'    raise NotImplementedError("{missing}")\n']

script.write_text("".join(lines), encoding="utf-8")
if script.stem == "common":
    tests = " or ".join(sys.argv[2:])  # all scripts use common.py: its tests have the functions' names
else:
    tests = script.stem
print(f'to test:      python -m pytest -q tests/test_equations.py -k "{tests}"')
if Path(".git").exists():
    print(f"to undo:      git restore {script}")
