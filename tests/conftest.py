import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)


@pytest.fixture
def run(tmp_path, capsys):
    """Run a method's module in this process with a command line -> (results, what it printed, its run folder)."""
    import common

    def go(module, *words):
        results = common.launch(module.main, module.__doc__, module.PRESETS, module.PAPER, module.method_flags, module.settle,
                                [*map(str, words), "--out", str(tmp_path / "runs")])
        text = capsys.readouterr().out
        folder = [line for line in text.splitlines() if line.startswith("everything is in ")][-1]
        return results, text, Path(folder.removeprefix("everything is in "))
    return go
