"""Every script end to end, in this process and as a user starts it; what a run leaves; bad input."""

import csv
import json
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import common
import fedproto
import fedsa
import fedtgp
from conftest import ROOT

SCRIPTS = [fedproto, fedtgp, fedsa]
SMALL = "--model cnn4 --local-epochs 1 --subset 0.05 --clients 4 --rounds 2 --no-plots".split()


def log(folder):
    with open(folder / "log.csv") as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


def numbers(folder):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in log(folder)]


def named(module):
    return module.__name__


def test_a_run_from_the_shell_leaves_its_folder(tmp_path):
    module = fedproto  # the torchrun tests start the others
    words = [sys.executable, str(ROOT / f"{module.__name__}.py"), *SMALL[:-1], "--out", str(tmp_path)]
    for _ in range(2):
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    first, second = (tmp_path / f"{module.__name__}-glyphs-s0{end}" for end in ("", "-2"))  # never overwritten
    assert {p.name for p in first.iterdir()} == {"args.json", "log.csv", "partition.png", "curves.png", "checkpoint.pt", "features.png", "margins.png"}
    assert numbers(first) == numbers(second) and len(log(first)) == 2
    assert json.loads((first / "args.json").read_text())["clients"] == 4
    lines = done.stdout.splitlines()
    assert sum(line.startswith("round ") for line in lines) == 2
    assert re.search(r"round 1/2  \w+ +[\d.]+  \w+ +[\d.]+  loss [\d.]+ .* up .* down .* s  left 0:\d\d", done.stdout)
    assert lines[-2].startswith("best ") and lines[-1] == f"everything is in {second}"
    assert not done.stderr


def torchrun(script, words, folder):
    return subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(ROOT / f"{script}.py"),
                           *map(str, words), "--no-plots", "--out", str(folder)], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("script,words", [
    ("fedproto", "--participation 0.5"), ("fedtgp", ""), ("fedsa", ""), ("fedlsa", "--domain-fraction 3"),
    ("fedplcc", "--domain-fraction 3 --model resnet4"), ("fedfm", "--domain-fraction 3 --model resnet4 --lite --model-every 2 --rounds 3")])
def test_two_ranks_reproduce_one_process(script, words, run, tmp_path):
    small = ["--rounds", 2, "--no-plots", *(SMALL[:8] if "domain" not in words else []), *words.split()]
    *_, alone = run(__import__(script), *small)
    done = torchrun(script, small, tmp_path / "two")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("everything is in") == 1  # rank 0 alone prints and writes
    folder, = (tmp_path / "two").iterdir()
    for a, b in zip(numbers(alone), numbers(folder)):
        assert a == pytest.approx(b, rel=1e-4, nan_ok=True)


def test_a_rank_that_dies_ends_the_job(tmp_path):
    killer = tmp_path / "dies.py"
    killer.write_text(f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r}); sys.argv[0] = "fedproto.py"
import common, fedproto
train = fedproto.client_update
def update(client, prototypes, present, t, args):
    if t == 2 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return train(client, prototypes, present, t, args)
fedproto.client_update = update
common.launch(fedproto.main, "", fedproto.PRESETS, fedproto.PAPER, fedproto.method_flags, fedproto.settle)
""")
    start = time.time()
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(killer), *SMALL, "--rounds", "50",
                           "--out", str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and time.time() - start < 60


@pytest.mark.parametrize("module", SCRIPTS, ids=named)
@pytest.mark.parametrize("words", ["--workers 1", "--eval-every 2"])
def test_what_must_not_change_a_result(module, words, run):
    *_, a = run(module, *SMALL, "--workers", 2)
    *_, b = run(module, *SMALL, *words.split())
    if "eval" in words:
        assert np.isnan(log(b)[0]["accuracy"]) and numbers(a)[1] == numbers(b)[1]
    else:
        assert numbers(a) == numbers(b)
    *_, c = run(module, *SMALL, "--seed", 1)
    assert numbers(a) != numbers(c)


@pytest.mark.parametrize("module,words", [
    (fedproto, "--distance mse"), (fedproto, "--aggregate uniform"), (fedproto, "--lam 0 --momentum 0.9 --weight-decay 1e-4"),
    (fedproto, "--participation 0.3 --local-epochs 2"), (fedproto, "--clients 1"), (fedproto, "--batch-size 1"),
    (fedproto, "--batch-size 100000 --feature-dim 7"), (fedproto, "--partition domain --domain-clients plain:1,clutter:3 --domain-fraction 0.2"),
    (fedtgp, "--margin nearest"), (fedtgp, "--margin fixed"), (fedtgp, "--margin none"), (fedtgp, "--no-mlp --server-epochs 1"),
    (fedtgp, "--clients 1"), (fedtgp, "--participation 0.1"), (fedtgp, "--partition pathological --classes-per-client 1"),
    (fedsa, "--no-projection"), (fedsa, "--anchor-steps 0"), (fedsa, "--lam-r 0 --lam-mcl 0 --lam-cc 0"),
    (fedsa, "--distance mse --alpha 0"), (fedsa, "--clients 1"), (fedsa, "--participation 0.25"),
    (fedsa, "--partition pathological --classes-per-client 1"), 
    (fedsa, "--partition missing --missing 9"), (fedproto, "--partition dominant"), (fedproto, "--partition iid")])
def test_switches_and_corners(module, words, run):
    results, text, folder = run(module, *SMALL, *words.split())
    rows = log(folder)
    assert len(rows) == 2 and all(np.isfinite(row["loss"]) for row in rows)
    assert 0 <= results[0]["final"] <= results[0]["best"] <= 100


@pytest.mark.parametrize("module,model", [(fedproto, "htfe8"), (fedtgp, "htcnn8")])
def test_heterogeneous_models(module, model, run):
    results, *_ = run(module, "--subset", 0.01, "--clients", 8, "--rounds", 1, "--model", model, "--no-plots", "--batch-size", 4)
    assert np.isfinite(results[0]["final"])


def arguments(module, *words):
    return common.parse(module.__name__, "", module.PRESETS, module.PAPER, module.method_flags, module.settle, [*map(str, words)])


def test_clients_without_test_images_count_nowhere(run):
    results, text, folder = run(fedsa, *SMALL, "--clients", 200)  # two images each, both for training
    assert results == [{}] and "no client has test images" in text and len(log(folder)) == 2


def test_traffic_is_counted_in_numbers(run):
    D, words = 32, ["--feature-dim", 32, *SMALL]
    held = sum(len(set(client.train.y.tolist())) for client in common.make_clients(arguments(fedsa, *words)))
    up = {m: [row["up"] for row in log(run(m, *words)[2])] for m in SCRIPTS}
    down = {m: [row["down"] for row in log(run(m, *words)[2])] for m in SCRIPTS}
    assert up[fedproto] == [held * (D + 1)] * 2 and up[fedsa] == [held * (D + 1)] * 2  # with counts
    assert up[fedtgp] == [held * D] * 2                                             # without
    assert down[fedsa] == [4 * D * 10] * 2
    assert down[fedtgp] == [0, 4 * D * 10]                                          # nothing to send in round 1
    assert [row["up"] for row in log(run(fedproto, *words, "--aggregate", "uniform")[2])] == [held * D] * 2


@pytest.mark.parametrize("module,off", [(fedproto, "--lam 0"), (fedtgp, "--lam 0"), (fedsa, "--lam-r 0 --lam-mcl 0 --lam-cc 0")], ids=["fedproto", "fedtgp", "fedsa"])
def test_the_method_brings_features_to_the_prototypes(module, off, run):
    """After a few rounds the nearest prototype predicts better than in the method's own run without its terms."""
    words = "--partition domain --domain-clients plain:4 --domain-fraction 0.15 --model cnn4 --subset 1 --image-size 32 --rounds 3 --local-epochs 1 --lr 0.05 --momentum 0 --no-plots".split()
    on, without = (log(run(module, *words, *extra.split())[2])[-1]["acc_prototype"] for extra in ("", off))
    assert on > without + 6


def test_without_its_terms_every_method_is_local_training(run):
    """With all weights at 0 the three scripts train the same models, to the bit."""
    runs = [numbers(run(m, *SMALL, *off.split())[2]) for m, off in
            ((fedproto, "--lam 0"), (fedtgp, "--lam 0"), (fedsa, "--lam-r 0 --lam-mcl 0 --lam-cc 0"))]
    for row in zip(*runs):
        assert len({r["acc_classifier"] for r in row}) == 1 and len({r["loss"] for r in row}) == 1


def test_trials_print_mean_and_std(run):
    results, text, _ = run(fedproto, *SMALL, "--trials", 2)
    best = [r["best"] for r in results]
    assert len(best) == 2 and f"best of 2 trials: {np.mean(best):.2f} ± {np.std(best, ddof=1):.2f} %" in text


def test_published_row_is_recognised():
    def published(*words):
        return arguments(fedsa, *words).published
    assert published("--dataset", "cifar10") == [("Table 1, cross-silo", "90.88 ± 0.04")]
    assert published("--dataset", "cifar10", "--seed", "3", "--trials", "3", "--workers", "1") == published("--dataset", "cifar10")
    assert published(*"--dataset cifar10 --clients 100 --participation 0.1".split()) == [("Table 1, cross-device", "88.78 ± 0.08")]
    assert published("--dataset", "cifar10", "--lr", "0.02") == [] == published("--dataset", "cifar10", "--subset", "0.5")
    assert published(*"--dataset cifar100 --clients 100 --participation 0.1 --model htfe8 --lam-mcl 1".split())[0][1] == "35.68 ± 0.17"


@pytest.mark.parametrize("module", SCRIPTS, ids=named)
def test_no_two_rows_of_a_paper_are_the_same_settings(module):
    rows = [common.settings(arguments(module, *row.split())) for row, _, _ in module.PAPER]
    assert all(a != b for i, a in enumerate(rows) for b in rows[:i])


def test_presets_give_way_to_flags():
    args = arguments(fedsa, "--dataset", "cifar10", "--rounds", 7)
    assert (args.rounds, args.clients, args.batch_size, args.lr, args.lam_mcl) == (7, 20, 10, 0.01, 0.01)
    args = arguments(fedsa, "--model", "htfe8", "--distance", "mse")
    assert (args.lam_mcl, args.lam_r) == (1, 10)


BAD = [("--participation 0", "(0, 1]"), ("--participation 1.5", "(0, 1]"), ("--participation x", "(0, 1]"), ("--beta 0", "(0, inf)"),
       ("--beta -1", "(0, inf)"), ("--clients 0", "[1, 1e9]"), ("--clients 5000", "[1, 1200]"), ("--model vgg", "invalid choice"),
       ("--feature-dim 0", "[1, 65536]"), ("--rounds -3", "[1, 1e9]"), ("--rounds 1.5", "whole number"), ("--lr 0", "(0, inf)"),
       ("--lr nan", "(0, inf)"), ("--batch-size 0", "[1, 1e9]"), ("--momentum 1", "[0, 1)"), ("--weight-decay -1", "[0, inf)"),
       ("--subset 0", "(0, 1]"), ("--image-size 8", "[16, 1024]"), ("--partition sorted", "invalid choice"),
       ("--partition pathological --classes-per-client 11", "[1, 10]"), ("--partition missing --missing 10", "[0, 9]"),
       ("--dominant-share 0", "(0, 1]"), ("--domain-clients plain", "NAME:CLIENTS"), ("--domain-fraction 0", "(0, inf)"),
       ("--seed -1", "[0, 4294967295]"), ("--trials 0", "[1, 1e9]"), ("--device tpu", "must be auto, cpu"), ("--eval-every 0", "[1, 1e9]"),
       ("--local-epochs 0", "[1, 1e9]"), ("--workers -1", "[0, 1024]"), ("--nonsense 1", "--nonsense"), ("--lam -1", "[0, inf)"),
       ("--domain-clients plain:1,plain:2", "each domain once"), ("--partition domain --domain-clients plain:99999999999", "must be at most"),
       ("--drop-rate 1.5", "[0, 1]"), ("--checkpoint-every -1", "[0, 1e9]"), ("--batch-size 9999999999", "[1, 1e9]"), ("--lr=--", "must be a value"),
       ("--subset 1e-9", "at least 2"), ("--resume nowhere", "there is no nowhere/checkpoint.pt"), ("--device meta", "must be auto, cpu"),
       ("--subset 0.02 --partition domain --clients 4 --domain-fraction 0.01", "without images"),
       ("--partition domain --domain-clients nowhere:1", "choose from plain, thin, texture, clutter")]


@pytest.mark.parametrize("words,range_", BAD, ids=[b[0] for b in BAD])
def test_bad_input_is_one_line_and_status_2(words, range_, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        common.launch(fedproto.main, "", fedproto.PRESETS, fedproto.PAPER, fedproto.method_flags, fedproto.settle,
                      [*words.split(), "--out", str(tmp_path / "runs")])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and range_ in error and re.match(r"[\w.-]+: (unrecognized arguments: )?--\w", error)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("out", ["README.md", "dangling", "/proc/nowhere"])
def test_an_out_folder_that_cannot_be_made_is_one_line(out, tmp_path, capsys):
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "else")
    (tmp_path / "README.md").write_text("a file")
    with pytest.raises(SystemExit) as stop:
        common.launch(fedproto.main, "", fedproto.PRESETS, [], fedproto.method_flags, fedproto.settle, [*SMALL, "--out", str(tmp_path / out)])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and "--out" in error


def test_the_partition_by_domain_needs_no_number_of_clients(run):
    *_, text, _ = run(fedsa, "--subset", 0.05, "--rounds", 1, "--partition", "domain")
    assert "4 clients" in text


def test_a_diverging_client_is_named(run):
    with pytest.raises(SystemExit) as stop:
        run(fedproto, *SMALL, "--lr", 1e6)
    assert re.match(r"client \d's loss is (nan|inf) in round \d: lower --lr", stop.value.code)


def test_minibatches_use_every_sample_once_and_never_a_single_one():
    for n in range(1, 40):
        for size in (2, 3, 10):
            batches = list(common.minibatches(torch.zeros(n), size, 1, np.random.default_rng(0)))
            assert sorted(torch.cat(batches).tolist()) == (list(range(n)) if n > 1 else [0, 0])
            assert all(len(b) > 1 for b in batches) and max(map(len, batches)) <= size + 1
    assert [len(b) for b in common.minibatches(torch.zeros(3), 1, 2, np.random.default_rng(0))] == [1] * 6


def test_random_command_lines_run_or_say_what_is_wrong(capsys):
    """A sample of what tests/soak.py does at length."""
    from soak import fuzz
    with capsys.disabled():
        assert fuzz(40, seed=7, verbose=False) == 0
