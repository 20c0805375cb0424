"""Kill and resume; checkpoints that must not be trusted; losses that are not finite."""

import json, os, pickle, subprocess, sys

import pytest
import torch

import common
from conftest import ROOT, SMALL, arguments, checkpoint, every_script, log, numbers
from test_data import picture

MORE = {"fedproto": "--participation 0.6", "fedtgp": "--participation 0.6", "fedsa": "--momentum 0.5",
        "fedlsa": "--participation 0.6", "fedplcc": "--participation 0.6",
        "fedfm": "--lite --model-every 4 --participation 0.6"}


def check_same_ends(one, other):
    ends = [checkpoint(folder) for folder in (one, other)]
    for part in ("modules", "state"):
        torch.testing.assert_close(ends[0][part], ends[1][part], rtol=0, atol=0)
    assert numbers(one) == numbers(other)


@every_script
def test_a_resumed_run_ends_as_if_never_killed(script, run, monkeypatch, tmp_path):
    """Catches: a state that the checkpoint lacks, or numbers drawn otherwise after it."""
    words, report = f"{SMALL[script]} {MORE[script]} --rounds 5 --checkpoint-every 1", common.Run.report

    def dies(self, t, *rest, **more):  # in round 4, with the checkpoint of round 3
        if t == 4:
            sys.exit("killed")
        report(self, t, *rest, **more)
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="killed"):
        patch.setattr(common.Run, "report", dies)
        run(script, words, "--out", tmp_path / "killed")
    whole, (folder,) = run(script, words), (tmp_path / "killed").iterdir()
    for t in (3, 5):  # a finished run resumes, too
        resumed = run(script, "--no-plots --checkpoint-every 1 --resume", folder)
        assert f"resuming after round {t} of 5" in resumed.text
        check_same_ends(whole.folder, folder)


def test_a_resumed_run_forgets_the_rounds_after_the_checkpoint(run, monkeypatch, tmp_path):
    """Catches: a round that is in the log twice."""
    def dies(self, t, state):
        if t == 3:
            sys.exit("killed")
        checkpoint_of_round(self, t, state)
    checkpoint_of_round = common.Run.checkpoint
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="killed"):
        patch.setattr(common.Run, "checkpoint", dies)
        run("fedproto", SMALL["fedproto"], "--rounds 4 --checkpoint-every 2 --out", tmp_path / "killed")
    folder, = (tmp_path / "killed").iterdir()
    assert [row["round"] for row in log(folder)] == [1, 2, 3]
    run("fedproto", "--no-plots --rounds 2 --resume", folder)
    assert [row["round"] for row in log(folder)] == [1, 2]


@pytest.mark.parametrize("script", ["fedsa", "fedplcc"])
def test_a_resumed_run_can_have_more_rounds(script, run):
    """Catches: a resumed run that ends where it ended."""
    words = f"{SMALL[script]} --checkpoint-every 2"
    long, short = run(script, words, "--rounds 4"), run(script, words, "--rounds 2 --name short")
    run(script, "--no-plots --rounds 4 --resume", short.folder)
    check_same_ends(long.folder, short.folder)
    assert '"rounds": 4' in (short.folder / "args.json").read_text()


def test_a_resumed_run_knows_where_its_images_are(run, tmp_path):
    """--data, --workers and --checkpoint-every as in a new run: no data, another speed, no further checkpoint."""
    for n in range(40):
        part = "train" if n % 5 else "test"
        picture(tmp_path / "images" / "set" / part / str(n % 2) / f"{n}.png", (n, 99 * (n % 2), 0))
    words = "--dataset set --model cnn4 --clients 2 --image-size 16 --no-plots --workers 1 --checkpoint-every 2"
    folder = run("fedproto", words, "--rounds 2 --data", tmp_path / "images").folder
    args = arguments("fedproto", "--resume", folder)
    assert (args.data, args.workers, args.checkpoint_every) == (str(tmp_path / "images"), 1, 2)
    run("fedproto", "--rounds 4 --no-plots --resume", folder)
    assert len(checkpoint(folder)["rows"]) == 4


def test_ctrl_c_says_how_to_go_on(run, monkeypatch):
    """Catches: a traceback."""
    def stopped(*_, **more):
        raise KeyboardInterrupt
    monkeypatch.setattr(common.Run, "report", stopped)
    with pytest.raises(SystemExit, match="--resume FOLDER"):
        run("fedproto", SMALL["fedproto"])


def test_a_place_that_cannot_be_written_is_an_error_before_the_first_round(run, monkeypatch):
    """Catches: a round that is lost because its folder cannot be made."""
    monkeypatch.setattr(common.Run, "rounds", lambda self: pytest.fail("a round began"))
    with pytest.raises(OSError):
        run("fedproto", SMALL["fedproto"], "--out /dev/null/runs")


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A small set of images in two domains, for processes that need not render glyphs first."""
    root = tmp_path_factory.mktemp("data")
    for n in range(200):
        path = root / "set" / "ab"[n % 2] / ("train" if n % 5 else "test") / str(n // 2 % 4) / f"{n}.png"
        picture(path, (60 * (n // 2 % 4), n, 255 * (n % 2)), (24, 24))
    return f"--device cpu --no-plots --data {root}"


def started(script, *words):
    command = f"{sys.executable} {ROOT / script}.py {' '.join(map(str, words))}".split()
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_kill_9(data, run, tmp_path):
    """Catches: a checkpoint that a kill leaves half written, or a resumed run that draws other numbers."""
    words = f"--dataset set --image-size 24 --model cnn4 --clients 4 --momentum 0.9 {data}"
    process = started("fedproto", words, "--rounds 1000 --checkpoint-every 1 --out", tmp_path / "killed")
    next(line for line in process.stdout if line.startswith("round    3/"))
    process.kill()
    process.communicate()
    folder, = (tmp_path / "killed").iterdir()
    done = len(checkpoint(folder)["rows"])
    assert 2 <= done < 1000
    rounds = f"--rounds {done + 2}"
    resumed = run("fedproto", data, rounds, "--resume", folder)
    assert f"resuming after round {done} of {done + 2}" in resumed.text
    check_same_ends(run("fedproto", words, rounds).folder, folder)


class Evil:
    def __reduce__(self):
        return os.system, ("touch EVIL",)


def test_checkpoints_that_are_refused(run, capsys, tmp_path, monkeypatch):
    """Catches: code in a checkpoint that is run; a run that goes on with other settings; a traceback."""
    monkeypatch.chdir(tmp_path)
    folder = run("fedproto", SMALL["fedproto"], "--checkpoint-every 1").folder
    path, about = folder / "checkpoint.pt", (folder / "args.json").read_text()
    good = path.read_bytes()

    def says(text, words="", script="fedproto"):
        with pytest.raises(SystemExit) as stop:
            run(script, "--resume", folder, words)
        error = capsys.readouterr().err
        assert stop.value.code == 2 and text in error and error.count("\n") == 1, error
        assert (folder / "args.json").read_text() == about
    for words in ("--lam 0.7", "--dataset=cifar10", "--clients 4", "--batch-size 7"):
        says(words.replace("=", " ").split()[0] + ": may not be typed beside --resume", words)
    says("not allowed with", "--trials 2")
    says("has run 2 rounds already", "--rounds 1")
    says("not one of fedsa.py", script="fedsa")
    for content in (good[:len(good) // 2], good[:-10], b"", b"hello", pickle.dumps(Evil(), 2)):
        path.write_bytes(content)
        says("a damaged one", "--workers 1")
    for other in (Evil(), {"weights": torch.zeros(3)}, [1, 2]):
        torch.save(other, path)
        says("checkpoint.pt")
    assert not (tmp_path / "EVIL").exists()  # nothing from the file was run


@pytest.mark.parametrize("script", ["fedproto", "fedplcc"])
def test_a_loss_that_is_not_finite_is_named_and_the_checkpoint_stays(script, run, monkeypatch, tmp_path):
    """Catches: a run that goes on with nan, or that writes it over a good checkpoint."""
    module = __import__(script)
    update = module.client_update

    def spoiled(client, *rest):
        upload = update(client, *rest)
        if client.id == 2 and rest[-2] == 3:
            return upload._replace(loss=upload.loss * torch.nan)
        return upload
    monkeypatch.setattr(module, "client_update", spoiled)
    with pytest.raises(SystemExit, match=r"round 3: .* not finite.*--lr 0.007"):
        run(script, SMALL[script], "--rounds 5 --checkpoint-every 1 --lr 0.007")
    folder, = (tmp_path / "runs").iterdir()
    assert len(checkpoint(folder)["rows"]) == 2 and len(log(folder)) == 2


def test_what_a_checkpoint_and_args_json_hold(run, tmp_path):
    """Catches: a run that cannot go on with other workers or under another name; two machines that cannot be compared."""
    folder = run("fedproto", SMALL["fedproto"], "--checkpoint-every 1 --workers 1 --name one").folder
    args = arguments("fedproto", "--workers 2 --checkpoint-every 5 --data", tmp_path, "--resume", folder)
    assert (args.workers, args.checkpoint_every, args.data) == (2, 5, str(tmp_path))
    assert (args.device, args.no_plots, args.trials) == ("cpu", False, 1)  # of the first call only
    about = json.loads((folder / "args.json").read_text())
    assert not set(common.SIDE_FLAGS) & set(about) and about["script"] == "fedproto"
