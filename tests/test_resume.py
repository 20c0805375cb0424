"""Kill and resume; checkpoints that must not be trusted; losses that are not finite."""

import json
import os
import pickle
import subprocess
import sys

import pytest
import torch

import common
from conftest import ROOT, SMALL, arguments, checkpoint, every_script, log, numbers
from test_data import picture

MORE = {  # states that last over rounds
    "fedproto": "--participation 0.6",
    "fedtgp": "--participation 0.6",
    "fedsa": "--momentum 0.5",
    "fedlsa": "--participation 0.6",
    "fedplcc": "--participation 0.6",
    "fedfm": "--participation 0.6 --lite --model-every 4",
}


def stop_in_round(t, method, patch):
    """From now on a run ends where it would call Run.report or Run.checkpoint for round t."""
    original = getattr(common.Run, method)

    def stops(self, now, *rest, **more):
        if now == t:
            sys.exit("killed")
        original(self, now, *rest, **more)
    patch.setattr(common.Run, method, stops)


def check_same_ends(one, other):
    for part in "modules", "state":
        torch.testing.assert_close(checkpoint(one)[part], checkpoint(other)[part], rtol=0, atol=0)
    assert numbers(one) == numbers(other)


@every_script
def test_a_resumed_run_ends_as_if_never_killed(script, run, monkeypatch, tmp_path):
    """Catches: a state that the checkpoint lacks, other draws after it, a finished run that does not resume."""
    words = f"{SMALL[script]} {MORE[script]} --rounds 4 --checkpoint-every 1"
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="killed"):
        stop_in_round(3, "report", patch)
        run(script, words, "--out", tmp_path / "killed")
    folder, = (tmp_path / "killed").iterdir()
    whole = run(script, words).folder
    for t in 2, 4:
        resumed = run(script, "--no-plots --resume", folder)
        assert f"resuming after round {t} of 4" in resumed.text
        check_same_ends(whole, folder)


def test_a_resumed_run_forgets_the_rounds_after_the_checkpoint(run, monkeypatch, tmp_path):
    """Catches: a round that is in the log twice."""
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="killed"):
        stop_in_round(3, "checkpoint", patch)
        run("fedproto", SMALL["fedproto"], "--rounds 4 --checkpoint-every 2")
    folder, = (tmp_path / "runs").iterdir()
    assert [row["round"] for row in log(folder)] == [1, 2, 3]
    run("fedproto", "--no-plots --rounds 2 --resume", folder)
    assert [row["round"] for row in log(folder)] == [1, 2]


def test_a_resumed_run_can_have_more_rounds_and_knows_its_settings(run, tmp_path):
    """Catches: a resumed run that ends where it ended, needs its flags again, or cannot have other --workers."""
    for n in range(40):
        part = "train" if n % 5 else "test"
        picture(tmp_path / "images" / "set" / part / str(n % 2) / f"{n}.png", (n, 99 * (n % 2), 0))
    words = "--dataset set --model cnn4 --clients 2 --image-size 16 --no-plots --workers 1 --checkpoint-every 2"
    words += f" --data {tmp_path / 'images'}"
    short, long = run("fedproto", words, "--rounds 2").folder, run("fedproto", words, "--rounds 4").folder
    args = arguments("fedproto", "--resume", short)
    assert (args.data, args.workers, args.checkpoint_every) == (str(tmp_path / "images"), 1, 2)
    assert (args.no_plots, args.trials) == (False, 1)  # of the first call only
    args = arguments("fedproto", "--workers 2 --checkpoint-every 5 --data elsewhere --resume", short)
    assert (args.data, args.workers, args.checkpoint_every) == ("elsewhere", 2, 5)
    run("fedproto", "--rounds 4 --no-plots --resume", short)
    check_same_ends(long, short)
    about = json.loads((short / "args.json").read_text())
    assert about["rounds"] == 4 and about["script"] == "fedproto"
    assert not set(about) & set(common.SIDE_FLAGS)  # or runs of two machines could not be compared


def test_kill_9(run, tmp_path):
    """Catches: a checkpoint that a kill leaves half written."""
    for n in range(200):
        place = tmp_path / "set" / "ab"[n % 2] / ("train" if n % 5 else "test") / str(n // 2 % 4)
        picture(place / f"{n}.png", (60 * (n // 2 % 4), n, 255 * (n % 2)))
    words = f"--dataset set --image-size 16 --model cnn4 --clients 4 --device cpu --no-plots --data {tmp_path}"
    command = f"{sys.executable} {ROOT}/fedproto.py {words} --checkpoint-every 1 --out {tmp_path}/killed"
    process = subprocess.Popen(command.split(), stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("round    3/"):
            break
    process.kill()
    process.communicate()
    folder, = (tmp_path / "killed").iterdir()
    done = len(checkpoint(folder)["rows"])
    assert 2 <= done < 1000
    resumed = run("fedproto", "--no-plots --rounds", done + 1, "--resume", folder)
    assert f"resuming after round {done} of {done + 1}" in resumed.text
    check_same_ends(run("fedproto", words, "--rounds", done + 1).folder, folder)


@pytest.mark.parametrize("write", ["checkpoint", "write_log"])
def test_a_kill_while_a_file_is_written_leaves_the_old_one(write, run, monkeypatch, tmp_path):
    """Catches: checkpoint.pt or log.csv overwritten in place."""
    one = run("fedproto", SMALL["fedproto"], "--checkpoint-every 1")
    before = {path.name: path.read_bytes() for path in one.folder.iterdir()}
    monkeypatch.setattr(common.Path, "replace", lambda path, target: sys.exit("killed"))
    args = arguments("fedproto", "--resume", one.folder)
    with pytest.raises(SystemExit, match="killed"):
        again = common.Run(args, modules=[])
        again.rows = [{"round": 1}, {"round": 2}]
        if write == "checkpoint":
            again.checkpoint(2)
        else:
            again.write_log()
    for name in "checkpoint.pt", "log.csv":
        assert (one.folder / name).read_bytes() == before[name]


def test_ctrl_c_says_how_to_go_on(run, monkeypatch):
    """Catches: a traceback."""
    def stopped(*arguments, **more):
        raise KeyboardInterrupt
    monkeypatch.setattr(common.Run, "report", stopped)
    with pytest.raises(SystemExit, match="--resume FOLDER"):
        run("fedproto", SMALL["fedproto"])


def test_a_place_that_cannot_be_written_is_an_error_before_the_first_round(run, monkeypatch):
    """Catches: a round that is lost because its folder cannot be made."""
    monkeypatch.setattr(common.Run, "rounds", lambda self: pytest.fail("a round began"))
    with pytest.raises(OSError):
        run("fedproto", SMALL["fedproto"], "--out /dev/null/runs")


# --- checkpoints that are refused -----------------------------------------------------------------

class Evil:
    def __reduce__(self):
        return os.system, ("touch EVIL",)


@pytest.fixture
def refused(run, capsys, tmp_path, monkeypatch):
    """refused(words, content=None, script="fedproto"): the one line that --resume answers, with this checkpoint.pt."""
    monkeypatch.chdir(tmp_path)
    folder = run("fedproto", SMALL["fedproto"], "--checkpoint-every 1").folder
    about = (folder / "args.json").read_text()

    def go(words="", content=None, script="fedproto"):
        if content is not None:
            (folder / "checkpoint.pt").write_bytes(content)
        with pytest.raises(SystemExit) as stop:
            run(script, "--resume", folder, words)
        error = capsys.readouterr().err
        assert stop.value.code == 2 and error.count("\n") == 1, error
        assert (folder / "args.json").read_text() == about
        return error
    go.good = (folder / "checkpoint.pt").read_bytes()
    return go


def test_a_resumed_run_keeps_its_settings(refused):
    """Catches: a run that goes on with other settings, fewer rounds than it has, or by another script."""
    for words in "--lam 0.7", "--dataset=glyphs", "--clients 4", "--batch-size 7":
        flag = words.replace("=", " ").split()[0]
        assert f"{flag}: may not be typed beside --resume" in refused(words)
    assert "not allowed with" in refused("--trials 2")
    assert "has run 2 rounds already" in refused("--rounds 1")
    assert "was written by fedproto.py" in refused(script="fedsa")


def test_checkpoints_that_are_refused(refused, tmp_path):
    """Catches: code in a checkpoint that is run, a traceback."""
    half = refused.good[:len(refused.good) // 2]
    for content in half, refused.good[:-10], b"", b"hello", pickle.dumps(Evil(), 2):
        assert "a damaged one" in refused(content=content)
    for other in Evil(), {"weights": torch.zeros(3)}, [1, 2]:
        torch.save(other, tmp_path / "other.pt")
        assert "checkpoint.pt" in refused(content=(tmp_path / "other.pt").read_bytes())
    assert not (tmp_path / "EVIL").exists()  # nothing from the file was run


@pytest.mark.parametrize("script", ["fedproto", "fedplcc"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_loss_that_is_not_finite_is_named_and_the_checkpoint_stays(script, value, run, monkeypatch, tmp_path):
    """Catches: a run that goes on with nan, or that writes it over a good checkpoint."""
    module = __import__(script)
    update = module.client_update

    def spoiled(client, *rest):
        upload = update(client, *rest)
        t = rest[-2]
        if client.id == 2 and t == 2:
            return upload._replace(loss=upload.loss * value)
        return upload
    monkeypatch.setattr(module, "client_update", spoiled)
    with pytest.raises(SystemExit, match=r"round 2: .* not finite.*--lr 0.007"):  # a text: status 1
        run(script, SMALL[script], "--checkpoint-every 1 --lr 0.007")
    folder, = (tmp_path / "runs").iterdir()
    assert len(checkpoint(folder)["rows"]) == len(log(folder)) == 1
