"""What the README and the other pages promise: commands parse, links and functions exist, the seventh method runs."""

import importlib
import inspect
import re
import shlex
import sys

import pytest

from conftest import ROOT, SMALL, arguments, log
from readme import commands, seventh_method

GITHUB = ROOT / ".github"
PAGES = {str(page.relative_to(ROOT)): page.read_text() for page in [
    ROOT / "README.md", *sorted(GITHUB.glob("*.md")), *sorted(GITHUB.glob("papers/*.md")),
    *sorted(GITHUB.glob("class/*.md")),
    *sorted(GITHUB.glob("results/*.md"))]}
PAPERS = {script: PAGES.get(f".github/papers/{script}.md", "") for script in SMALL}
EQUATIONS = {"fedproto": 4, "fedtgp": 11, "fedsa": 10, "fedlsa": 10, "fedplcc": 11, "fedfm": 11}


@pytest.mark.parametrize("page", PAGES)
def test_links(page):
    """Catches: a link to a file or to a heading that is not there."""
    for link in re.findall(r"\]\(([^)#]+)\)", PAGES[page]):
        assert link.startswith("http") or (ROOT / page).parent.joinpath(link).exists(), link
    for file, anchor in re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", PAGES[page]):
        text = (ROOT / page).parent.joinpath(file).read_text() if file else PAGES[page]
        headings = [re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", text, re.M)]
        assert anchor in headings, f"{file}#{anchor}"


def all_commands():
    for page, text in PAGES.items():
        for command in commands(text):
            yield page, command
    for script in SMALL:
        for line in __import__(script).__doc__.splitlines():
            if line.startswith("    python "):
                yield f"{script}.py", re.split(r"\s{2,}", line.strip())[0]


@pytest.mark.parametrize("page, command", list(all_commands()))
def test_every_command_is_one_that_runs(page, command):
    """Catches: a command on a page that does not parse; `python tests/readme.py` runs those of the README and of the
    class page."""
    words = shlex.split(command)
    script = words[1].removesuffix(".py")
    assert (ROOT / f"{script}.py").exists() or script == "fedcon"  # the reader makes fedcon.py
    if script in SMALL and not {"--help", "--resume"} & set(words):
        arguments(script, *words[2:])


def test_quick_start_runs_then_tests():
    """Catches: a fenced block of output among the quick start's two, which whoever runs the second one would execute."""
    quick_start = PAGES["README.md"].split("## Quick start")[1].split("\n## ")[0]
    blocks = re.findall(r"^```.*?\n(.*?)^```", quick_start, re.M | re.S)
    assert len(blocks) == 2, "an example of output is indented, not fenced"
    assert "fedproto.py" in blocks[0] and "pytest" in blocks[1]


def test_the_round_in_code_is_that_of_fedproto():
    """Catches: a line of the README's round that fedproto.py does not have, or has elsewhere."""
    block = re.search(r"```python\n(.*?)```", PAGES["README.md"], re.S).group(1)
    rest = (ROOT / "fedproto.py").read_text()
    for line in filter(None, block.splitlines()):
        assert line.strip() in rest, line
        rest = rest.split(line.strip(), 1)[1]


def test_the_seventh_method(tmp_path, run, monkeypatch):
    """Catches: a patch that no longer applies to fedproto.py, in which there is nothing but code, that is longer than
    the README says, or that does not learn."""
    changed = seventh_method(tmp_path)
    assert changed < 35
    monkeypatch.syspath_prepend(tmp_path)
    words = "--model cnn4 --clients 5 --subset 0.1 --rounds 3 --no-plots"
    one = log(run("fedcon", words, "--mu 1").folder)
    plain = log(run("fedproto", words, "--lam 0").folder)
    sys.modules.pop("fedcon")
    assert one[-1]["acc_prototype"] > 30  # chance is 10; the contrast counts from round 2 on
    assert one[0]["loss"] == plain[0]["loss"] and one[-1]["loss"] > plain[-1]["loss"] + 0.1


@pytest.mark.parametrize("script", EQUATIONS)
def test_equations_of_a_companion_page(script):
    """Catches: an equation without its line, a function that does not exist or does not cite it, no reason why it is
    no code."""
    lines = re.findall(r"^\*\*Eqs?\. ([\d, and]+)\*\*(.*)$", PAPERS[script], re.M)
    numbers = [int(n) for cited, _ in lines for n in re.findall(r"\d+", cited)]
    assert sorted(numbers) == list(range(1, EQUATIONS[script] + 1))
    for cited, rest in lines:
        functions = re.findall(r"`(\w+)\.(\w+)`", rest)
        assert functions or len(rest.split()) >= 3, f"Eq. {cited} has neither a function nor a reason"
        for module, name in functions:
            text = inspect.getdoc(getattr(importlib.import_module(module), name))
            in_docstring = re.findall(r"\d+", " ".join(re.findall(r"Eqs?\. ([\d, and]+)", text)))
            for n in re.findall(r"\d+", cited):
                assert n in in_docstring, f"{module}.{name} does not cite Eq. {n}"


@pytest.mark.parametrize("script", SMALL)
def test_functions_and_flags_that_a_companion_page_names(script):
    """Catches: a function or a flag that does not exist."""
    for module, name in re.findall(r"`(fed\w+|common)\.(\w+)`", PAPERS[script]):
        if name != "py":
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
    known = set(re.findall(r'"(--[a-z-]+)"', (ROOT / "common.py").read_text() + (ROOT / f"{script}.py").read_text()))
    for line in PAPERS[script].splitlines():
        if line.startswith("|") or "HtFLlib's command" in line:
            continue
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line):
            assert flag in known, f"{flag}: {line}"


def published(script):
    """The rows of the page's table: (command's words, published number)."""
    for line in PAPERS[script].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) > 2 and cells[0].startswith("`python "):
            yield shlex.split(cells[0].strip("`")), cells[1]


@pytest.mark.parametrize("script", SMALL)
def test_published_rows_have_the_settings_that_the_papers_name(script):
    """Catches: a published row with settings that are not the paper's."""
    rows = list(published(script))
    assert len(rows) >= 4
    for words, number in rows:
        assert words[1] == f"{script}.py" and re.search(r"\d\d?\.\d", number)
        args = arguments(script, *words[2:])
        if script in ("fedproto", "fedtgp", "fedsa"):
            assert (args.batch_size, args.lr, args.momentum, args.beta) == (10, 0.01, 0, 0.1)
            assert (args.clients, args.participation) in [(20, 1), (100, 0.1), (50, 0.5), (100, 0.5)]
            epochs_and_rounds = [(1, 1000), (5, 500), (10, 200), (5, 1000), (10, 1000), (20, 1000)]
            assert (args.local_epochs, args.rounds) in epochs_and_rounds
            if args.partition == "pathological":
                classes = {"cifar10": 2, "fmnist": 2, "cifar100": 10, "flowers102": 10, "tinyimagenet": 20}
                assert args.classes_per_client == classes[args.dataset]
        if script == "fedlsa":
            assert (args.rounds, args.local_epochs, args.server_steps, args.batch_size) == (100, 5, 500, 64)
        if script == "fedplcc":
            assert args.local_epochs == 10 and args.rounds == {"office": 100}.get(args.dataset, 50)
            assert args.images_per_class == {"domainnet": 40}.get(args.dataset, 30)
        if script == "fedfm":
            assert args.clients == 10 or args.dataset == "cifar100" and args.clients in (20, 30, 50, 100)  # Table VI
            assert (args.rounds, args.local_epochs, args.batch_size) == (100, 10, 64)
