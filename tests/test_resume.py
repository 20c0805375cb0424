"""Kill and resume; checkpoints that must not be trusted; losses that are not finite."""

import csv
import json
import os
import shutil
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import common, fedproto, fedtgp
from conftest import SMALL, arguments, checkpoint, every_script, log, numbers


@every_script
def test_a_resumed_run_ends_as_if_never_killed(script, run, monkeypatch, tmp_path):
    """Log, models and state agree to the bit; no round is logged twice."""
    words = f"{SMALL[script]} --participation 0.3 --momentum 0.5 --checkpoint-every 2"
    if script == "fedfm":
        words += " --lite --model-every 4"  # then clients' models last over rounds
    whole = run(script, words, "--rounds 4").folder

    def killed(self, t, *state):
        if t == 3:
            sys.exit("killed")
        write(self, t, *state)
    write = common.Run.checkpoint
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="killed"):
        patch.setattr(common.Run, "checkpoint", killed)
        run(script, words, "--rounds 4 --out", tmp_path / "killed")
    folder, = (tmp_path / "killed").iterdir()
    # nothing left to run, two more rounds, and a finished run
    steps = [("--rounds 2", 2, 2), ("--rounds 4", 2, 4), ("", 4, 4)]
    if script == "fedfm":
        steps = steps[1:]  # it does not stop between two exchanges of models
    for words, done, rounds in steps:
        resumed = run(script, "--no-plots --resume", folder, words)
        assert f"resuming after round {done} of {rounds}" in resumed.text
        assert [row["round"] for row in log(folder)] == list(range(1, rounds + 1))
    assert numbers(whole) == numbers(folder)
    for part in "modules", "state":
        torch.testing.assert_close(checkpoint(whole)[part], checkpoint(folder)[part], rtol=0, atol=0)


def test_more_rounds_leave_no_test_that_is_not_due(run):
    """Round 3 was tested because it was the last, and with five rounds it is not."""
    words = f"{SMALL['fedproto']} --checkpoint-every 1 --eval-every 2 --rounds"
    whole = run("fedproto", words, 5).folder
    folder = run("fedproto", words, 3).folder
    assert "acc_classifier" in log(folder)[2]
    run("fedproto", "--no-plots --rounds 5 --resume", folder)
    assert numbers(folder) == numbers(whole)


def test_a_run_does_not_end_with_an_untested_round(run, refused):
    """A run killed after a round without a test cannot be made to end there."""
    folder = run("fedproto", SMALL["fedproto"], "--checkpoint-every 1").folder
    saved = checkpoint(folder)
    saved["rows"][-1] = {"round": 2, "loss": 1.0}
    torch.save(saved, folder / "checkpoint.pt")
    assert "has run 2 rounds already; at least 3" in refused("fedproto", "--rounds 2 --resume", folder)


def test_a_resumed_run_knows_its_settings(run, monkeypatch):
    """It needs no flags again, and args.json has no flags that depend on the machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # --device auto would take it
    folder = run("fedproto", SMALL["fedproto"], "--checkpoint-every 2 --workers 1 --dataset glyphs --data here").folder
    args = arguments("fedproto", "--resume", folder)
    assert (args.rounds, args.data, args.workers, args.checkpoint_every, args.device) == (2, "here", 1, 2, "cpu")
    assert (args.no_plots, args.trials) == (False, 1)  # of the first call only
    args = arguments("fedproto", "--rounds 4 --data there --workers 2 --checkpoint-every 5 --resume", folder)
    assert (args.rounds, args.data, args.workers, args.checkpoint_every) == (4, "there", 2, 5)
    run("fedproto", "--no-plots --rounds 3 --resume", folder)
    about = json.loads((folder / "args.json").read_text())
    assert about["rounds"] == 3 and about["script"] == "fedproto"
    # or runs of two machines could not be compared
    assert not set(about) & {"data", "device", "workers", "checkpoint_every", "out", "name", "no_plots", "trials", "resume"}


def test_a_numpy_accuracy_can_be_resumed(run, monkeypatch):
    """weights_only=True loads the checkpoint."""
    monkeypatch.setattr(fedproto, "evaluate_personal", lambda *_, **__: {"classifier": np.float64(50)})
    folder = run("fedproto", SMALL["fedproto"], "--checkpoint-every 1").folder
    assert checkpoint(folder)["rows"][-1]["acc_classifier"] == 50


def test_state_that_cannot_be_resumed_is_refused_in_the_first_round(run, monkeypatch):
    """A numpy array could be saved, but not loaded again."""
    write = common.Run.checkpoint
    monkeypatch.setattr(common.Run, "checkpoint", lambda self, t, state: write(self, t, (*state, np.zeros(3))))
    with pytest.raises(TypeError, match="state must be a tensor"):
        run("fedproto", SMALL["fedproto"])


def test_a_kill_while_the_checkpoint_is_written_leaves_the_old_one(run, monkeypatch):
    folder = run("fedproto", SMALL["fedproto"], "--checkpoint-every 1").folder

    def half(saved, path):
        path.write_text("half")
        sys.exit("killed")
    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(SystemExit, match="killed"):
        run("fedproto", "--no-plots --rounds 3 --resume", folder)
    assert len(checkpoint(folder)["rows"]) == 2


def test_a_kill_while_the_log_is_written_leaves_the_old_one(run, monkeypatch):
    folder = run("fedproto", SMALL["fedproto"], "--checkpoint-every 1").folder
    monkeypatch.setattr(csv.DictWriter, "writerows", lambda self, rows: sys.exit("killed"))  # after the first line
    with pytest.raises(SystemExit, match="killed"):
        run("fedproto", "--no-plots --resume", folder)
    assert len(log(folder)) == 2


def test_ctrl_c_says_how_to_go_on(run, monkeypatch):
    def pressed(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(fedproto, "client_update", pressed)
    with pytest.raises(SystemExit, match="--resume FOLDER"):
        run("fedproto", SMALL["fedproto"])


# --- what --resume refuses --------------------------------------------------------------------------

class Evil:
    def __reduce__(self):
        return os.system, ("touch EVIL",)


def test_a_resumed_run_keeps_its_settings(run, refused):
    """--resume refuses other settings, fewer rounds and another script."""
    folder = run("fedproto", SMALL["fedproto"], "--checkpoint-every 1").folder
    about = (folder / "args.json").read_text()
    assert "--lam: not allowed with --resume" in refused("fedproto", "--lam 0.7 --resume", folder)
    assert "--dataset: not allowed" in refused("fedproto", "--dataset=glyphs --resume", folder)
    for words in "--name new", "--seed 1", "--out other", "--eval-every 2", "--subset 0.5":
        assert f"{words.split()[0]}: not allowed" in refused("fedproto", words, "--resume", folder)
    assert "has run 2 rounds already; at least 2" in refused("fedproto", "--rounds 1 --resume", folder)
    assert "was written by fedproto.py" in refused("fedsa", "--resume", folder)
    assert (folder / "args.json").read_text() == about


def test_other_data_are_refused(run, refused, tmp_path):
    """An image more, a class or domain with another name, an image that moved to test/."""
    data = tmp_path / "s"
    for n in range(40):
        path = data / "x" / "train" / "ab"[n % 2] / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16)).save(path)
    folder = run("fedproto", "--dataset s --image-size 16 --model cnn4 --partition iid --clients 2 --rounds 1",
                 "--checkpoint-every 1 --no-plots --data", tmp_path).folder
    kept = log(folder)
    for old, new in (data / "x/train/a/0.png", tmp_path / "0.png"), (data / "x/train/a", data / "x/train/c"), \
            (data / "x", data / "y"), (data / "x/train/b/1.png", data / "x/test/b/1.png"):
        new.parent.mkdir(exist_ok=True, parents=True)
        old.rename(new)
        refused("fedproto", "--no-plots --rounds 2 --resume", folder)
        new.rename(old)
    assert log(folder) == kept
    run("fedproto", "--no-plots --rounds 2 --resume", folder)  # nothing has changed


def test_other_labels_are_refused(run, refused, tmp_path):
    """As many images of each class, in another order: clients would be tested on images that they trained on."""
    def write(order):
        for n, (domain, name) in enumerate(order):
            path = tmp_path / "s" / domain / "train" / name / f"{n}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (16, 16)).save(path)
    x, y = [("x", "a"), ("x", "b"), ("x", "b")] * 10, [("y", "a"), ("y", "a"), ("y", "b")] * 10
    write(x + y)
    folder = run("fedproto", "--dataset s --image-size 16 --model cnn4 --partition iid --clients 2 --rounds 1",
                 "--checkpoint-every 1 --no-plots --data", tmp_path).folder
    shutil.rmtree(tmp_path / "s")
    write([("x", name) for _, name in y] + [("y", name) for _, name in x])
    assert "other labels" in refused("fedproto", "--no-plots --rounds 2 --resume", folder)


def test_a_full_disk_costs_the_checkpoint_but_not_the_run(run, monkeypatch):
    def full(saved, path):
        path.write_bytes(b"half")
        raise OSError("disk full")
    monkeypatch.setattr(torch, "save", full)
    one = run("fedproto", SMALL["fedproto"], "--checkpoint-every 1")
    assert len(one.rows) == 2 and "no checkpoint.pt in round 1: OSError: disk full" in one.warnings
    assert sorted(path.name for path in one.folder.iterdir()) == ["args.json", "log.csv"]  # no half of one


def test_checkpoints_that_are_refused(run, refused, monkeypatch, tmp_path):
    """Code in a checkpoint never runs."""
    monkeypatch.chdir(tmp_path)
    file = run("fedproto", SMALL["fedproto"], "--checkpoint-every 1").folder / "checkpoint.pt"
    good = file.read_bytes()
    for content in good[:-10], good[:len(good) // 2], b"":
        file.write_bytes(content)
        assert "a damaged one" in refused("fedproto", "--resume", file.parent)
    for other in Evil(), [1, 2]:
        torch.save(other, file)
        assert "a damaged one" in refused("fedproto", "--resume", file.parent)
    assert not (tmp_path / "EVIL").exists()  # nothing from the file was run


def test_a_server_loss_that_is_not_finite_is_named(run, monkeypatch):
    """Clients notice one round too late: by then the checkpoint would be spoiled."""
    monkeypatch.setattr(fedtgp, "server_update", lambda net, *_: (net().detach(), torch.tensor(torch.nan)))
    with pytest.raises(SystemExit, match="round 1: server_loss is not finite"):
        run("fedtgp", SMALL["fedtgp"])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_loss_that_is_not_finite_is_named_and_the_checkpoint_stays(value, run, monkeypatch, tmp_path):
    def spoiled(client, prototypes, has_prototype, t, args):
        upload = update(client, prototypes, has_prototype, t, args)
        if t == 2 and client.id == 2:
            return upload._replace(loss=torch.tensor(value))
        return upload
    update = fedproto.client_update
    monkeypatch.setattr(fedproto, "client_update", spoiled)
    with pytest.raises(SystemExit, match=r"round 2: .* not finite.*--lr .now 0.007"):  # a text: status 1
        run("fedproto", SMALL["fedproto"], "--checkpoint-every 1 --lr 0.007")
    folder, = (tmp_path / "runs").iterdir()
    assert len(checkpoint(folder)["rows"]) == len(log(folder)) == 1
