"""Kill and resume, faults on the way, checkpoints that must not be trusted."""

import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import common
from conftest import ROOT
from test_scripts import log, numbers

PERSONAL = "--model cnn4 --local-epochs 1 --subset 0.05 --clients 5 --no-plots --rounds 5 "
GLOBAL = "--no-plots --domain-fraction 4 --local-epochs 1 --batch-size 16 --rounds 5 "
RUNS = [("fedproto", PERSONAL + "--participation 0.6 --momentum 0.9"),
        ("fedproto", PERSONAL + "--drop-rate 0.6 --model htfe3 --subset 0.01 --rounds 3 --clients 3"),
        ("fedtgp", PERSONAL + "--server-epochs 5 --drop-rate 0.3"), ("fedsa", PERSONAL + "--participation 0.6 --alpha 0.5"),
        ("fedlsa", GLOBAL + "--server-steps 20 --drop-rate 0.3"), ("fedplcc", GLOBAL + "--model resnet4 --participation 0.6"),
        ("fedfm", GLOBAL + "--model resnet4 --lite --model-every 3 --participation 0.6"), ("fedfm", GLOBAL + "--model resnet4 --warmup 2 --drop-rate 0.3")]


class Killed(BaseException):
    pass


def weights(folder):
    held = torch.load(folder / "checkpoint.pt", weights_only=True)
    return held["nets"], held["modules"], held["state"]


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("script,words", RUNS, ids=[f"{s}-{i}" for i, (s, _) in enumerate(RUNS)])
def test_a_resumed_run_ends_as_if_never_killed(script, words, run, monkeypatch, tmp_path):
    module, words = __import__(script), words.split()
    *_, whole = run(module, *words)
    report = common.Run.report

    def dies(self, t, *rest, **more):  # after the log's row and before the checkpoint of round 3 (2 where there are 3)
        if t == self.args.rounds - 2 + (self.args.rounds == 3):
            monkeypatch.setattr(common.Run, "save", lambda *_: (_ for _ in ()).throw(Killed()))
        report(self, t, *rest, **more)
    monkeypatch.setattr(common.Run, "report", dies)
    with pytest.raises(Killed):
        run(module, *words, "--checkpoint-every", 1, "--out", tmp_path / "killed")
    monkeypatch.undo()
    folder, = (tmp_path / "runs").glob("*-2")  # `run` has its own --out, which comes last
    _, text, _ = run(module, "--resume", folder, "--no-plots")
    assert "resuming after round" in text
    assert str(numbers(whole)) == str(numbers(folder))
    assert same(weights(whole), weights(folder))


def start(script, words, folder):
    return subprocess.Popen([sys.executable, ROOT / f"{script}.py", *words, "--out", folder], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("script,words", [RUNS[6]], ids=["fedfm"])  # tests/soak.py does more
def test_kill_9_at_any_moment(script, words, run, tmp_path):
    *_, whole = run(__import__(script), *words.split())
    process = start(script, [*words.split(), "--checkpoint-every", "1"], tmp_path / "killed")
    next(line for line in process.stdout if line.startswith("round 2/"))
    time.sleep(float(common.generator(0, script).random()))
    process.kill()
    process.wait()
    folder, = (tmp_path / "killed").iterdir()
    run(__import__(script), "--resume", folder, "--no-plots")
    assert str(numbers(whole)) == str(numbers(folder)) and same(weights(whole), weights(folder))


def test_resume_over_two_ranks(run, tmp_path):
    import fedproto
    *_, whole = run(fedproto, *RUNS[0][1].split(), "--checkpoint-every", 2)
    held = torch.load(whole / "checkpoint.pt", weights_only=True)
    rows = (whole / "log.csv").read_text()
    # one process's checkpoint of round 2, made by ending there
    *_, half = run(fedproto, *RUNS[0][1].split(), "--rounds", 2)
    early = torch.load(half / "checkpoint.pt", weights_only=True)
    early["settings"]["rounds"] = 5
    torch.save(early, half / "checkpoint.pt")
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", ROOT / "fedproto.py", "--resume", half,
                           "--no-plots"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    ended = torch.load(half / "checkpoint.pt", weights_only=True)
    assert len(ended["nets"]) == len(held["nets"]) == 5
    for a, b in zip(held["nets"], ended["nets"]):
        assert all(torch.allclose(a[k], b[k], atol=1e-5) for k in a)
    assert len(log(half)) == 5 and rows.count("\n") == 6


@pytest.fixture
def finished(run):
    import fedproto
    *_, folder = run(fedproto, *"--model cnn4 --local-epochs 1 --subset 0.05 --clients 2 --rounds 1 --no-plots".split())
    return folder


def refused(run, module, *words):
    with pytest.raises(SystemExit) as stop:
        run(module, *words)
    assert stop.value.code == 2


class Evil:
    def __reduce__(self):
        return os.system, ("touch EVIL",)


def test_checkpoints_that_are_refused(run, finished, capsys, tmp_path, monkeypatch):
    import fedproto
    import fedsa
    monkeypatch.chdir(tmp_path)
    path = finished / "checkpoint.pt"
    good = path.read_bytes()

    def says(text, module=fedproto, words=()):
        refused(run, module, "--resume", finished, *words)
        error = capsys.readouterr().err
        assert text in error and error.count("\n") == 1, error

    says("--lam 0.7: must be 0.1, as in the run", words=["--lam", 0.7])
    says("--rounds 9: must be 1, as in the run", words=["--rounds", 9])
    says("--dataset cifar10: must be glyphs", words=["--dataset", "cifar10"])
    says("--trials 2: must be 1 with --resume", words=["--trials", 2])
    says("is from fedproto.py, not from fedsa.py", module=fedsa)
    for name, content in {"cut": good[:len(good) // 2], "short": good[:-10], "empty": b"", "text": b"hello", "pickle": pickle.dumps(Evil())}.items():
        path.write_bytes(content)
        says("is not a complete checkpoint")
    torch.save(Evil(), path)
    says("is not a complete checkpoint")
    assert not (tmp_path / "EVIL").exists()  # nothing from the file was run
    torch.save({"weights": torch.zeros(3)}, path)
    says("is not a checkpoint of this program")
    torch.save([1, 2], path)
    says("is not a")
    for damage in (lambda held: held["nets"].pop(), lambda held: held["nets"][0].popitem(), lambda held: held.update(state=[]),
                   lambda held: held["state"].__setitem__(0, torch.zeros(3, 3)), lambda held: held.update(images=0)):
        path.write_bytes(good)
        held = torch.load(path, weights_only=True)
        damage(held)
        torch.save(held, path)
        says("does not fit")
    path.unlink()
    says("there is no")
    refused(run, fedproto, "--resume", "")


def test_a_finished_run_resumes_to_its_last_lines(run, finished):
    import fedproto
    before = numbers(finished)
    _, text, folder = run(fedproto, "--resume", finished)
    assert folder == finished and "best prototype accuracy" in text and numbers(folder) == before


def test_a_run_goes_on_only_with_its_own_images(run, tmp_path, capsys):
    import fedplcc
    from test_data import picture
    for n in range(24):
        for d in ("one", "two"):
            picture(tmp_path / "data" / "set" / d / "train" / "ab"[n % 2] / f"{n}.png", colour=(n, n, 9))
            picture(tmp_path / "data" / "set" / d / "test" / "ab"[n % 2] / f"{n}.png")
    words = "--dataset set --partition domain --domain-fraction 3 --model resnet4 --local-epochs 1 --rounds 1 --no-plots".split()
    *_, folder = run(fedplcc, *words, "--data", tmp_path / "data")
    (tmp_path / "data" / "set" / "one" / "train" / "a" / "0.png").unlink()
    refused(run, fedplcc, "--resume", folder)
    assert "the images are others than the run's" in capsys.readouterr().err


def test_a_log_that_vanishes_is_written_again(run, monkeypatch):
    import fedproto
    report = common.Run.report
    monkeypatch.setattr(common.Run, "report", lambda self, t, *rest, **more: (t == 3 and (self.folder / "log.csv").unlink(), report(self, t, *rest, **more)))
    *_, folder = run(fedproto, *"--model cnn4 --local-epochs 1 --subset 0.05 --clients 2 --rounds 4 --no-plots".split())
    assert [row["round"] for row in log(folder)] == [1, 2, 3, 4]


def test_pictures_that_a_resumed_run_missed_are_drawn(run, finished):
    import fedproto
    run(fedproto, "--resume", finished / "checkpoint.pt")
    assert {path.name for path in finished.glob("*.png")} == {"partition.png", "curves.png", "features.png", "margins.png"}


@pytest.mark.parametrize("redirect", ["| head -2", "> /dev/full", ">&-", "2>&-"])
def test_output_that_nobody_reads(redirect, tmp_path):
    done = subprocess.run(f"{sys.executable} {ROOT / 'fedproto.py'} --model cnn4 --local-epochs 1 --subset 0.05 --clients 2 --rounds 4 --no-plots --out {tmp_path} {redirect}", shell=True,
                          capture_output=True, text=True, executable="/bin/bash")
    assert "Traceback" not in done.stderr and done.stderr.count("\n") <= 1
    if redirect.endswith("-"):
        assert done.returncode == 0 and len(log(next(tmp_path.iterdir()))) == 4


def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path):
    """A limit on the size of files stands in for the disk: log rows fit, checkpoints no longer do."""
    words = [sys.executable, ROOT / "fedproto.py", *"--model cnn4 --local-epochs 1 --subset 0.05 --clients 2 --rounds 4 --no-plots --checkpoint-every 1".split(), "--out", tmp_path]
    code = "import sys, common; save = common.Run.save\n" \
           "def limited(self, t, state):\n" \
           "    import resource\n" \
           "    t == 3 and resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))\n" \
           "    save(self, t, state)\n" \
           "common.Run.save = limited; sys.argv = sys.argv[1:]; import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code, *words[1:]], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert len(re.findall("note: the checkpoint of round [34] could not be written .* the one of round 2 is kept", done.stdout)) == 2
    folder, = tmp_path.iterdir()
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["round"] == 2 and len(log(folder)) == 4
    assert {p.name for p in folder.iterdir()} == {"args.json", "log.csv", "checkpoint.pt"}


def test_a_log_that_cannot_be_written_stops_in_one_line(run, monkeypatch):
    import fedproto
    monkeypatch.setattr(common.csv, "DictWriter", lambda *a, **k: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(SystemExit) as stop:
        run(fedproto, *"--model cnn4 --local-epochs 1 --subset 0.05 --clients 2 --rounds 1 --no-plots".split())
    assert "cannot write" in stop.value.code and "No space left" in stop.value.code


@pytest.mark.parametrize("moment", ["preparation", "round", "plot"])
def test_ctrl_c(moment, tmp_path):
    words = "--subset 0.2 --clients 5 --rounds 60 --checkpoint-every 1".split() if moment == "round" else "--model cnn4 --local-epochs 1 --subset 0.05 --clients 2 --rounds 1".split()
    process = start("fedproto", words, tmp_path)
    if moment == "preparation":
        time.sleep(2.5)  # torch is loaded, glyphs are being drawn
    for line in process.stdout:
        if line.startswith("round  2/" if moment == "round" else "round 1/"):
            break
    began = time.time()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    if process.returncode:  # a plot may have been through already
        assert process.returncode == 130 and err.strip().startswith("interrupted") and time.time() - began < 10
    if moment == "round":
        assert re.search(r"interrupted; go on after round \d+ with: python fedproto.py --resume ", err)
        folder, = tmp_path.iterdir()
        assert torch.load(folder / "checkpoint.pt", weights_only=True)["round"] >= 2


# --- faults ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("script,words", RUNS, ids=[f"{s}-{i}" for i, (s, _) in enumerate(RUNS)])
def test_nobody_reports(script, words, run):
    """All clients fail in every round: nothing changes, and the run ends as usual."""
    results, text, folder = run(__import__(script), *words.split(), "--drop-rate", 1)
    rows = log(folder)
    assert text.count("nobody reported") >= len(rows) and all(row["up"] == 0 for row in rows)
    assert len({row["accuracy"] for row in rows}) == 1 and all(np.isnan(row["loss"]) for row in rows)


def spoil(client, result, kind):
    prototypes, counts, *rest = result
    if kind == "nan":
        prototypes = torch.full_like(prototypes, float("nan"))
    if kind == "inf":
        prototypes = prototypes.clone().index_fill_(0, torch.tensor([0]), float("inf"))
    if kind == "shape":
        prototypes = prototypes[:, :-1]
    if kind == "classes":
        prototypes, counts = prototypes[:-1], counts[:-1]
    if kind == "negative":
        counts = -counts
    if kind == "nan count":
        counts = counts * float("nan")
    return prototypes, counts, *rest


@pytest.mark.parametrize("script,kind,reason", [
    ("fedproto", "nan", "NaN or Inf in its prototypes"), ("fedproto", "inf", "NaN or Inf in its prototypes"), ("fedproto", "shape", "its shapes are"),
    ("fedproto", "classes", "its shapes are"), ("fedproto", "negative", "a negative count"), ("fedproto", "nan count", "NaN or Inf"),
    ("fedtgp", "nan", "NaN or Inf"), ("fedsa", "nan", "NaN or Inf"), ("fedsa", "negative", "a negative count")])
def test_a_useless_upload_is_refused_as_if_the_client_had_failed(script, kind, reason, run, monkeypatch):
    module, words = __import__(script), "--model cnn4 --local-epochs 1 --subset 0.05 --clients 4 --rounds 2 --no-plots --checkpoint-every 1".split()
    update = module.client_update
    monkeypatch.setattr(module, "client_update", lambda client, *rest: spoil(client, update(client, *rest), kind if client.id == 2 else ""))
    _, text, folder = run(module, *words)
    assert len(re.findall(f"round [12]: client 2's upload is refused: {reason}", text)) == 2
    everyone = common.for_each_client
    monkeypatch.setattr(module, "client_update", update)

    def without(update, clients, args, t, *rest):  # client 2 trains, but nobody hears of it
        reported, uploads = everyone(update, clients, args, t, *rest)
        keep = [k for k, client in enumerate(reported) if client.id != 2]
        return [reported[k] for k in keep], [uploads[k] for k in keep]
    monkeypatch.setattr(module, "for_each_client", without)
    *_, other = run(module, *words)
    assert numbers(folder) == numbers(other) and same(weights(folder), weights(other))


@pytest.mark.parametrize("script,reason", [("fedlsa", "NaN or Inf in its model"), ("fedplcc", "NaN or Inf in its model"), ("fedfm", "its model has other shapes")])
def test_a_useless_model_is_refused(script, reason, run, monkeypatch):
    module, update = __import__(script), __import__(script).client_update

    def spoiled(client, *rest):
        net, *others = update(client, *rest)
        if client.id == 1 and "NaN" in reason:
            next(net.parameters()).data[0] = float("inf")
        elif client.id == 1:
            net.classifier = torch.nn.Linear(512, 11)
        return net, *others
    monkeypatch.setattr(module, "client_update", spoiled)
    _, text, folder = run(module, *GLOBAL.split(), *(["--model", "resnet4"] if script != "fedlsa" else []), "--rounds", 2)
    assert text.count(f"client 1's upload is refused: {reason}") == 2
    assert all(np.isfinite(list(row.values())).all() for row in log(folder))


def test_useless_clusters_are_refused(run, monkeypatch):
    import fedplcc
    local = fedplcc.local_prototypes
    monkeypatch.setattr(fedplcc, "local_prototypes", lambda net, data, args: (local(net, data, args)[0] * torch.nan, *local(net, data, args)[1:]))
    _, text, folder = run(fedplcc, *GLOBAL.split(), "--model", "resnet4", "--rounds", 1)
    assert text.count("upload is refused: NaN or Inf in its prototypes") == 4 and "nobody reported" in text and log(folder)[0]["up"] == 0


def test_a_class_that_disappears_for_some_rounds(run):
    """One participant with one class per round: the server keeps the other classes' prototypes."""
    for script in ("fedproto", "fedtgp", "fedsa"):
        _, text, folder = run(__import__(script), *"--subset 0.1 --clients 10 --partition pathological --classes-per-client 1 --participation 0.1 --rounds 6 "
                              "--no-plots".split())
        rows = log(folder)
        present = [row["down"] for row in rows]
        assert all(np.isfinite(row["loss"]) for row in rows) and present == sorted(present)


def test_divergence_names_client_round_and_remedy_and_keeps_the_checkpoint(run, tmp_path):
    import fedproto
    with pytest.raises(SystemExit) as stop:
        run(fedproto, *"--model cnn4 --local-epochs 1 --subset 0.05 --clients 3 --rounds 50 --no-plots --checkpoint-every 1 --lr 30".split())
    assert re.match(r"client \d's loss is (nan|inf) in round \d+: lower --lr 30", stop.value.code)
    folder, = (tmp_path / "runs").iterdir()
    assert set(p.name for p in folder.iterdir()) >= {"args.json"} and not (folder / "checkpoint.tmp").exists()
