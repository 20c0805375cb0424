"""What the README and the other pages promise: links, commands and functions exist, the class's scripts run."""

import importlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

import common
from conftest import PERSONAL, ROOT, SMALL, arguments

GITHUB = ROOT / ".github"
PAGES = {}   # {path: text}
for page in [ROOT / "README.md", *sorted(GITHUB.rglob("*.md"))]:
    PAGES[page.relative_to(ROOT).as_posix()] = page.read_text(encoding="utf-8")
EQUATIONS = {"fedproto": 4, "fedtgp": 11, "fedsa": 10, "fedlsa": 10, "fedplcc": 11, "fedfm": 11}
PAPERS = {script: PAGES[f".github/papers/{script}.md"] for script in EQUATIONS}
every_paper = pytest.mark.parametrize("script", EQUATIONS)


@pytest.mark.parametrize("page", PAGES)
def test_links(page):
    """Every linked file and heading exists."""
    for file, heading in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", PAGES[page]):
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), file
        if heading:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8").lower(), re.M)
            assert heading in [re.sub(r"[^\w\- ]", "", line).replace(" ", "-") for line in headings], heading


def commands():
    """-> [(place, command)] for each command with a script, on the pages and in the scripts' headers."""
    found = []
    for page, text in PAGES.items():
        blocks = re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S)
        lines = "\n".join(blocks).splitlines() + re.findall(r"`(.*?)`", text)
        for line in lines:
            line = re.sub(r"\$\w+", "1", line)  # variables of the shell
            for command in line.split("#")[0].split("&&"):
                if re.match(r"python \S+\.py", command.strip()):
                    found.append((page, command.strip()))
    for script in SMALL:
        header = importlib.import_module(script).__doc__
        for command in re.findall(r"^    (python .*?)(?:  |$)", header, re.M):
            found.append((f"{script}.py", command))
    return found


@pytest.mark.parametrize("place, command", commands())
def test_every_command_parses(place, command):
    """Every script and flag exists; every value is allowed."""
    command = re.sub(r"\.github/class/(teachers|exam|stars|cosine)\.py ", "", command)  # they pass the words on
    _, file, *words = shlex.split(command)
    script = file.removesuffix(".py")
    assert (ROOT / file).exists() or script in ("fedcon", "mine")  # the reader makes these two
    if script in SMALL and not {"--help", "--resume"} & set(words):
        arguments(script, *words)


def test_the_round_in_code_is_that_of_fedproto():
    """fedproto.py has the README's lines, in the same order."""
    block = re.search(r"```python\n(.*?)```", PAGES["README.md"], re.S)[1]
    rest = (ROOT / "fedproto.py").read_text(encoding="utf-8")
    for line in filter(None, block.splitlines()):
        _, found, rest = rest.partition(line.strip())
        assert found, line


def test_a_network_of_your_own():
    """The page's example maps images to (B, n)."""
    block = re.search(r"```python\n(if name .*?)```", PAGES[".github/extend.md"], re.S)[1]
    names = {"nn": torch.nn}
    exec("def build_extractor(name):\n" + textwrap.indent(block, "    "), names)
    assert names["build_extractor"]("mynet")(torch.zeros(2, 3, 24, 24)).shape == (2, 32 * 4 * 4)


def test_the_workflow_runs_the_readmes_test_command():
    _, command = re.findall(r"```bash\n(.*?)```", PAGES["README.md"], re.S)[:2]
    assert command in (GITHUB / "workflows" / "tests.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize("words, column", [
    ("teachers.py fedproto.py", "others"),
    ("exam.py fedproto.py", "everyone"),
    ("cosine.py fedproto.py", "prototype"),
    ("fedavg.py", "test"),
])
def test_scripts_of_the_class(words, column, tmp_path, run, monkeypatch):
    """Each script runs and logs its column."""
    plain = run("fedproto", SMALL["fedproto"]).rows
    for name in "evaluate_personal", "nearest_prototype":
        monkeypatch.setattr(common, name, getattr(common, name))  # so that pytest puts them back
    monkeypatch.chdir(ROOT)
    small = SMALL["fedproto"] if "fedproto" in words else "--images-per-class 4 --rounds 2 --no-plots"
    monkeypatch.setattr(sys, "argv", f".github/class/{words} {small} --out {tmp_path}/class".split())
    runpy.run_path(sys.argv[0], run_name="__main__")
    folder, = (tmp_path / "class").iterdir()
    scores = common.read_log(folder / "log.csv")[f"acc_{column}"].tolist()
    assert len(scores) == 2 and 0 <= min(scores) and max(scores) <= 100
    if column == "prototype":  # fedproto.py has this column as well
        assert scores != [row["acc_prototype"] for row in plain]


@pytest.fixture
def evaluation(tmp_path, monkeypatch):
    """evaluation(script) -> what a script of the class puts in evaluate_personal's place. Features are the images."""
    def go(script):
        monkeypatch.setattr(common, "extract", lambda net, x: x)
        monkeypatch.setattr(common, "evaluate_personal", lambda *_, **__: {"classifier": 50.0})
        (tmp_path / "empty.py").touch()
        monkeypatch.setattr(sys, "argv", [script, str(tmp_path / "empty.py")])
        monkeypatch.chdir(ROOT)
        runpy.run_path(f".github/class/{script}", run_name="__main__")
        return common.evaluate_personal
    return go


def client_with(y):
    """Images at 0 and 3, of the classes y."""
    images = common.Images(torch.tensor([[0.0], [3.0]]), torch.tensor(y))
    return common.Client(0, images, test=images, net=SimpleNamespace(num_classes=2))


def test_teachers_of_the_class(evaluation):
    """The two clients have their classes the other way round, so only their own means are right."""
    scores = evaluation("teachers.py")([client_with([0, 1]), client_with([1, 0])], None, 1, None)
    assert scores == {"classifier": 50, "own": 100, "others": 0}


def test_stars_of_the_class(evaluation, capsys):
    """Distances in the last round only: of the stars to each other, of features to the star of their class."""
    stars, args = torch.tensor([[1.0], [8.0]]), SimpleNamespace(rounds=2)
    evaluate = evaluation("stars.py")
    for t in 1, 2:
        assert evaluate([client_with([0, 1])], stars, t, args) == {"classifier": 50}
    assert capsys.readouterr().out == "star_margin 7.00  own_star 3.00\n"  # (1 + 5) / 2


def test_the_seventh_method(tmp_path, run, monkeypatch):
    """The patch applies to fedproto.py, and its method learns."""
    shutil.copy(ROOT / "fedproto.py", tmp_path / "fedcon.py")
    subprocess.run(["git", "apply", GITHUB / "class" / "fedcon.diff"], cwd=tmp_path, check=True)
    monkeypatch.syspath_prepend(tmp_path)
    words = "--model cnn4 --clients 5 --subset 0.1 --rounds 3 --no-plots"
    contrast = run("fedcon", words).rows
    plain = run("fedproto", words, "--lam 0").rows
    sys.modules.pop("fedcon")
    assert contrast[-1]["acc_prototype"] > 30  # chance is 10
    assert contrast[0]["loss"] == plain[0]["loss"]  # the contrast counts from round 2 on
    assert contrast[-1]["loss"] > plain[-1]["loss"] + 0.1


@every_paper
def test_equations_of_a_paper_page(script):
    """Every equation has a function that cites it, or a reason why not."""
    found = []
    for equations, rest in re.findall(r"^\*\*Eqs?\. ([\d, and]+)\*\*(.*)$", PAPERS[script], re.M):
        numbers = re.findall(r"\d+", equations)
        found += map(int, numbers)
        functions = re.findall(r"`(\w+)\.(\w+)`", rest)
        assert functions or len(rest.split()) >= 3, f"Eq. {equations} has neither a function nor a reason"
        for module, name in functions:
            docstring = getattr(importlib.import_module(module), name).__doc__
            cited = " ".join(re.findall(r"Eqs?\. ([\d, and]+)", docstring))
            assert set(numbers) <= set(re.findall(r"\d+", cited)), f"{module}.{name} does not cite Eq. {equations}"
    assert sorted(found) == list(range(1, EQUATIONS[script] + 1))


@every_paper
def test_formulas_of_a_paper_page(script):
    """Display formulas are rendered: their $$ stand on lines of their own."""
    lines = [line for line in PAPERS[script].splitlines() if "$$" in line]
    assert lines == ["$$"] * len(lines) and len(lines) % 2 == 0 and len(lines) >= 6


@every_paper
def test_names_on_a_paper_page(script):
    """Every function and flag on the page exists."""
    for module, name in re.findall(r"`(fed\w+|common)\.(?!py)(\w+)`", PAPERS[script]):
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
    source = (ROOT / "common.py").read_text(encoding="utf-8") + (ROOT / f"{script}.py").read_text(encoding="utf-8")
    for line in PAPERS[script].splitlines():
        if not line.startswith("|") and "HtFLlib's command" not in line:
            for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line):
                assert f'"{flag}"' in source, f"{flag}: {line}"


@every_paper
def test_published_rows(script):
    """Every row has a result, and as many clients and classes as its paper."""
    rows = re.findall(rf"^\| `python {script}\.py (.*?)` \| .*?\d\.\d", PAPERS[script], re.M)
    assert rows and len(rows) == PAPERS[script].count("\n| `python ")
    for words in rows:
        args = arguments(script, *shlex.split(words))
        if script in PERSONAL:
            assert (args.clients, args.participation) in [(20, 1), (100, 0.1), (50, 0.5), (100, 0.5)]
        if script == "fedfm":
            assert args.clients in (10, 20, 30, 50, 100)  # Table VI
        if args.partition == "pathological":
            classes = {"cifar100": 10, "flowers102": 10, "tinyimagenet": 20}
            assert args.classes_per_client == classes.get(args.dataset, 2)
