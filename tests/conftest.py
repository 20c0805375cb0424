import csv, sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import common  # noqa: E402

torch.set_num_threads(1)

OWN = "--image-size 24 --model cnn4 --local-epochs 1 --subset 0.05 --clients 4 --rounds 2 --no-plots "
ONE = "--image-size 24 --local-epochs 1 --subset 0.1 --domain-fraction 4 --batch-size 9 --rounds 2 --no-plots"
SMALL = {"fedproto": OWN + "--momentum 0.9", "fedtgp": OWN + "--server-epochs 5", "fedsa": OWN,
         "fedlsa": ONE + " --server-steps 20", "fedplcc": ONE + " --model resnet4 --weight-decay 1e-3",
         "fedfm": ONE + " --model resnet4"}  # a small run of each
OFF = {"fedproto": "--lam 0", "fedtgp": "--lam 0", "fedsa": "--lam-r 0 --lam-mcl 0 --lam-cc 0",
       "fedlsa": "--lam 0", "fedplcc": "--lam-contra 0", "fedfm": "--lam 0 --validation 0"}  # its terms
PERSONAL, GLOBAL = list(SMALL)[:3], list(SMALL)[3:]
every_script = pytest.mark.parametrize("script", SMALL)

def log(folder):
    with open(folder / "log.csv", newline="") as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]

def numbers(run):
    """A run's log without the times, as text: nan equals nan."""
    return str([{k: v for k, v in row.items() if k != "seconds"} for row in log(run.folder)])

def method(script):
    """What a script hands to common.launch and common.parse, after its main."""
    module = __import__(script)
    return module.DEFAULTS, module.PUBLISHED, module.flags, getattr(module, "settle", lambda args: None)

def arguments(script, *words):
    return common.parse(script, *method(script), " ".join(map(str, words)).split())

@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Run a script in this process with a command line -> its common.Run, with `results` and its `text`."""
    def go(script, *words):
        ended, finish = [], common.Run.finish
        words = f"--out {tmp_path / 'runs'} {' '.join(map(str, words))}".split()
        with monkeypatch.context() as patch:
            patch.setattr(common.Run, "finish", lambda self: ended.append(self) or finish(self))
            results = common.launch(__import__(script).main, *method(script), words)
        ended[-1].results, ended[-1].text = results, capsys.readouterr().out
        return ended[-1]
    return go
