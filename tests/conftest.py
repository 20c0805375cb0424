import csv
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import common  # noqa: E402

torch.set_num_threads(1)

OWN = "--image-size 24 --model cnn4 --local-epochs 1 --subset 0.05 --clients 4 --rounds 2 --no-plots "
ONE = "--image-size 24 --local-epochs 1 --subset 0.1 --images-per-class 4 --batch-size 9 --rounds 2 --no-plots"
# To add a script, list it here and in PERSONAL or GLOBAL. If it equals the common baseline once its own terms are off,
# list it in OFF too. If its client_update needs other arguments or flags, extend test_client_update.
SMALL = {  # a small run of each script
    "fedproto": OWN + "--momentum 0.9",
    "fedtgp": OWN + "--server-epochs 5",
    "fedsa": OWN,
    "fedlsa": ONE + " --server-steps 20",
    "fedplcc": ONE + " --model resnet4 --weight-decay 1e-3",
    "fedfm": ONE + " --model resnet4",
}
OFF = {  # without the terms that make the method
    "fedproto": "--lam 0",
    "fedtgp": "--lam 0",
    "fedsa": "--lam-r 0 --lam-mcl 0 --lam-cc 0",
    "fedplcc": "--lam-contra 0 --lam-corr 0",
    "fedfm": "--lam 0 --validation 0 --batches all",
}
PERSONAL = ["fedproto", "fedtgp", "fedsa"]  # every client keeps its own model
GLOBAL = ["fedlsa", "fedplcc", "fedfm"]  # one averaged model
every_script = pytest.mark.parametrize("script", SMALL)


@pytest.fixture(autouse=True)
def same_numbers_each_time():
    """For tests that draw with torch's own generator."""
    torch.manual_seed(0)


def log(folder):
    """The rows of log.csv; a round without evaluation has no accuracies."""
    with open(folder / "log.csv", newline="") as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def numbers(folder):
    """The log without the times."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in log(folder)]


def checkpoint(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def arguments(script, *words):
    """The args that a command line gives."""
    module = __import__(script)
    words = " ".join(map(str, words)).split()
    return common.parse(script, module.__doc__, module.SETTINGS, module.add_flags, words)


@pytest.fixture
def run(tmp_path, capsys):
    """Run a script here, on the CPU -> its last folder, the rows of the log, main's results, the printed text
    and warnings."""
    def go(script, *words):
        module = __import__(script)
        words = " ".join(map(str, words)).split()
        if "--resume" not in words:
            words = ["--device", "cpu", "--out", f"{tmp_path}/runs", *words]
        results = common.run_script(script, module.__doc__, module.main, module.SETTINGS, module.add_flags, words)
        text, warnings = capsys.readouterr()
        folder = Path(re.findall(r"^everything is in (.*)$", text, re.M)[-1])
        return SimpleNamespace(folder=folder, rows=log(folder), results=results, text=text, warnings=warnings)
    return go


@pytest.fixture
def refused(run, capsys):
    """refused(script, words) -> the one line that a command prints before it ends with status 2."""
    def go(script, *words):
        with pytest.raises(SystemExit) as stop:
            run(script, *words)
        error = capsys.readouterr().err
        assert stop.value.code == 2 and error.count("\n") == 1, error
        return error
    return go
