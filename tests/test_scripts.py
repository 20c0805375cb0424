"""Every script end to end: what a run leaves and prints, that it learns, flags good and bad."""

import re
import runpy
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import common
import fedfm
import fedproto
from conftest import GLOBAL, OFF, PERSONAL, ROOT, SMALL, arguments, every_script, numbers

# --- what a run leaves and prints -----------------------------------------------------------------

@every_script
def test_a_run_leaves_its_folder(script, run, monkeypatch):
    """Its name, its files; three workers change no number, another seed does."""
    monkeypatch.setattr(common, "in_two_dimensions", lambda z, seed: (z[:, :2].numpy(), "plane"))  # t-SNE is slow
    plain = run(script, SMALL[script], "--workers 3")
    drawn = run(script, SMALL[script].replace("--no-plots", "--checkpoint-every 2"))
    assert (plain.folder.name, drawn.folder.name) == (f"{script}-glyphs-s0", f"{script}-glyphs-s0-2")
    files = {path.name for path in plain.folder.iterdir()}
    assert files == {"args.json", "log.csv"}  # --no-plots, and glyphs have no checkpoint
    pictures = {"partition.png", "curves.png", "features.png", "margins.png"}
    assert {path.name for path in drawn.folder.iterdir()} == files | pictures | {"checkpoint.pt"}
    kinds = ["test"] if script in GLOBAL else ["classifier", "anchor" if script == "fedsa" else "prototype"]
    assert [*plain.results[0]] == [f"{which} {kind} accuracy" for kind in kinds for which in ("best", "final")]
    assert numbers(plain.folder) == numbers(drawn.folder) != numbers(run(script, SMALL[script], "--seed 1").folder)


def test_a_round_prints_its_row(run):
    one = run("fedsa", SMALL["fedsa"], "--name mine")
    assert one.folder.name == "fedsa-glyphs-mine-s0"
    assert all(0 < row["seconds"] < 60 for row in one.rows)
    for t, row in enumerate(one.rows, 1):
        assert (f"round {t}/2  classifier {row['acc_classifier']:5.2f}  anchor {row['acc_anchor']:5.2f}  majority class "
                f"{row['acc_most_frequent']:5.2f}  loss {row['loss']:.4f}  up {row['up']:,.0f}  down {row['down']:,.0f}  "
                f"{row['seconds']:.2f} s  left ") in one.text


def test_the_time_left_is_that_of_recent_rounds(capsys):
    """40 rounds were slow, on another machine; 20 have taken no time since."""
    run = SimpleNamespace(args=SimpleNamespace(rounds=100), began=time.time(), write_log=lambda: None,
                          rows=[{"seconds": 100.0}] * 40 + [{"seconds": 0.0}] * 19)
    common.Run.report(run, 60, {}, [torch.tensor(1.0)], 0, 0)
    assert "left 0.0 min" in capsys.readouterr().out


def test_a_run_says_how_many_images_its_clients_train_on(run):
    assert re.search(r"clients train on [1-9]\d* ", run("fedlsa", SMALL["fedlsa"]).text)


def test_a_run_says_which_classes_and_domains_no_client_has(run):
    """The global model is tested on them all the same."""
    dealt = run("fedlsa", SMALL["fedlsa"], "--partition domain --domain-clients plain:1,thin:2").text
    assert "careful: no client has images of the domains texture, clutter\n" in dealt
    pathological = run("fedproto", SMALL["fedproto"], "--partition pathological --classes-per-client 2").text
    assert re.search(r"careful: no client has images of the classes \d, \d\n", pathological)  # four clients
    assert "no client has" not in run("fedproto", SMALL["fedproto"]).text


def test_rounds_without_evaluation_have_empty_cells(run):
    """Also a round that follows a tested one."""
    rows = run("fedproto", SMALL["fedproto"], "--eval-every 2 --rounds 4").rows
    assert [row["round"] for row in rows if "acc_prototype" in row] == [2, 4]


def test_the_last_lines(tmp_path, capsys):
    """Validation images, if any, pick the best round, the first of equals."""
    log = "round,acc_test,acc_validation,up,down,seconds\n2,50,70,1000,2,3\n3,,,0,0,0\n4,80,70,1000,2,3\n6,60,65,1000,2,3\n"
    (tmp_path / "log.csv").write_text(log)
    run = SimpleNamespace(folder=tmp_path, log=tmp_path / "log.csv")
    assert common.summarize(run) == {"best test accuracy": 50, "final test accuracy": 60}
    assert capsys.readouterr().out == (
        "test accuracy: final 60.00 %, best 50.00 % in round 2 (selected on validation images)\n"
        "traffic: 3,000 floats up, 6 down; 9 s in all\n"
        f"everything is in {tmp_path}\n")


def trials(main, words):
    words = ["--device", "cpu", *words.split()]
    return common.run_script("fedproto", fedproto.__doc__, main, fedproto.SETTINGS, fedproto.add_flags, words)


def test_trials_print_mean_and_std_with_their_seeds(capsys):
    """The standard deviation divides by n - 1."""
    assert trials(lambda args: {"final": args.seed * 10}, "--trials 2 --seed 5") == [{"final": 50}, {"final": 60}]
    printed = capsys.readouterr().out
    assert printed.startswith("final: 55.00 ± 7.07 %, seeds 5, 6\n") and "all runs in one table" in printed


def test_a_trial_that_fails_costs_no_other_seed(capsys):
    """Its line, then the others; status 1. Ctrl-C ends all, and so does a flag that is bad for every seed."""
    def main(args):
        if args.seed in fails:
            raise fails[args.seed]
        return {"final": args.seed * 10}
    fails = {0: SystemExit("round 2: diverged"), 2: RuntimeError("out of memory")}
    with pytest.raises(SystemExit, match="failed: seeds 0, 2"):  # a text: status 1
        trials(main, "--trials 4")
    printed = capsys.readouterr()
    assert "final: 20.00 ± 14.14 %, seeds 1, 3" in printed.out
    assert "seed 0 failed: round 2: diverged\n" in printed.err and "seed 2 failed: RuntimeError(" in printed.err
    with pytest.raises(SystemExit, match="failed: seeds 0\n*$"):
        trials(main, "--trials 2")
    fails = {1: KeyboardInterrupt()}
    with pytest.raises(SystemExit, match="stopped"):
        trials(main, "--trials 2")
    fails = {0: SystemExit(2), 1: SystemExit("a second line")}
    with pytest.raises(SystemExit) as stop:
        trials(main, "--trials 2")
    assert stop.value.code == 2


@pytest.mark.parametrize("closed", [True, False])
def test_a_log_that_a_spreadsheet_holds_open(closed, run, monkeypatch):
    """Windows refuses to replace it: the row is kept, and written with the next one. The last lines have all rows."""
    attempts = []

    def replace(self, target):
        attempts.append(target)
        if len(attempts) == (1 if closed else 2):
            raise PermissionError(13, "Access is denied")
        return rename(self, target)
    rename = Path.replace
    monkeypatch.setattr(Path, "replace", replace)
    one = run("fedproto", SMALL["fedproto"])
    assert "log.csv is open in another program" in one.text
    assert len(one.rows) == (2 if closed else 1)
    assert len(attempts) == 2 and (one.folder / "log.tmp").exists() != closed
    last = common.read_log(one.folder / ("log.csv" if closed else "log.tmp"))["acc_classifier"][1]
    assert one.results[0]["final classifier accuracy"] == last


@every_script
def test_a_script_as_a_program(script, monkeypatch):
    """`python fedsa.py` runs FedSA, with its own name, settings and flags."""
    called = []
    monkeypatch.setattr(common, "run_script", lambda *given: called.append(given))
    its = runpy.run_path(f"{ROOT}/{script}.py", run_name="__main__")
    assert called == [(script, its["__doc__"], its["main"], its["SETTINGS"], its["add_flags"])]


# --- the methods ----------------------------------------------------------------------------------

@pytest.mark.parametrize("words", [
    "fedproto --distance mse --model htcnn8 --batch-size 2",
    "fedproto --model htfe4 --subset 0.02",
    "fedproto --partition domain --domain-clients plain:1,clutter:3 --domain-fraction 0.2",
    "fedtgp --margin-rule nearest --clients 1",
    "fedtgp --margin-rule none --no-mlp --distance mse --batch-size 100000",
    "fedtgp --margin-rule fixed --partition pathological --clients 4 --classes-per-client 1",
    "fedsa --projection linear --distance mse --participation 0.25",
    "fedsa --projection none --alpha 0 --partition missing --clients 4 --missing 9",
    "fedlsa --compactness l2 --alpha 0 --batches full --partition iid --clients 3",
    "fedplcc --uniform-weights --phi 1 --alpha 0.25 --partition pathological --clients 3 --classes-per-client 1",
    "fedfm --match l2 --aggregate uniform --prox 0.1 --warmup 0 --augment --partition missing --clients 3 --missing 8",
    "fedfm --lite --model-every 2 --validation 0 --partition dirichlet --clients 5 --participation 0.2",
])
def test_switches_and_corners(words, run):
    """Every command runs through; a loss that is not finite would stop it."""
    script, words = words.split(maxsplit=1)
    small = SMALL[script]
    if "--partition" in words:
        small = small.replace("--clients 4", "").replace("--images-per-class 4", "")
    run(script, small, words)


@every_script
def test_a_method_learns(script, run, monkeypatch):
    """Every model learns; FedProto's and FedSA's learn more with their terms."""
    monkeypatch.setattr(fedfm, "print_cluster_quality", lambda *_: None)  # takes longer than the run
    words = ("--partition domain --domain-clients plain:3 --domain-fraction 0.1 --subset 1 --image-size 24 "
             "--model cnn4 --batch-size 10 --momentum 0.9 --local-epochs 3 --rounds 3 --eval-every 9 --no-plots")
    if script == "fedfm":
        words += " --lam 5"  # with 50 so small batches diverge
    kind = "plain"  # the domain
    if script in PERSONAL:
        kind = "classifier" if script == "fedsa" else "prototype"
    first, *_, last = run(script, words).rows
    assert not any(name.startswith("acc_") for name in first)  # --eval-every 9 tests only the last round
    accuracy = last[f"acc_{kind}"]
    assert accuracy > 60  # chance is 10
    if script in ("fedproto", "fedsa"):  # FedTGP's lead is within the noise of 150 test images
        assert accuracy > run(script, words, OFF[script]).rows[-1][f"acc_{kind}"] + 3


@pytest.mark.parametrize("scripts", [PERSONAL, [script for script in GLOBAL if script in OFF]])
def test_without_their_terms_methods_are_the_same_to_the_bit(scripts, run):
    """So all scripts share one baseline."""
    words = SMALL["fedsa"] if scripts is PERSONAL else SMALL["fedplcc"]
    rows = [numbers(run(script, words, OFF[script]).folder)[-1] for script in scripts]
    for name in "loss", "acc_classifier", "acc_most_frequent", "acc_test":
        assert len({row.get(name) for row in rows}) == 1


# --- the command line -----------------------------------------------------------------------------

def test_typed_flags_override_presets():
    """A typed flag also clears the preset's flag that excludes it."""
    assert arguments("fedsa", "--dataset cifar10 --rounds 7").rounds == 7
    args = arguments("fedlsa", "--domain-fraction 0.5")
    assert (args.domain_fraction, args.images_per_class) == (0.5, None)
    args = arguments("fedlsa", "--dataset digits --clients 6")
    assert (args.domain_clients, args.clients) == (None, 6)
    args = arguments("fedlsa", "--dataset office --domain-clients amazon:4,dslr:1")
    assert (args.domain_clients, args.clients) == ({"amazon": 4, "dslr": 1}, None)


def test_a_stem_that_no_model_has_is_refused(refused):
    assert "--small-stem: only for ResNets" in refused("fedproto", "--model cnn4 --small-stem")
    assert arguments("fedfm", "--dataset cifar100 --model cnn4").small_stem  # the preset's is ignored
    assert arguments("fedproto", "--model htfe8 --small-stem").small_stem


def test_defaults_that_no_script_sets():
    args = common.make_parser("").parse_args([])
    assert (args.data, args.subset, args.batches, args.checkpoint_every, args.out) == ("./data", 1, "all", 10, "runs")
    assert (args.missing, args.dominant_share, args.beta, args.device) == (1, 0.46, 0.1, "auto")


@every_script
def test_help_shows_what_a_run_would_use(script, capsys):
    """Defaults are the chosen data set's, never None."""
    with pytest.raises(SystemExit):
        arguments(script, "--dataset cifar10 --help")
    text = " ".join(capsys.readouterr().out.split())
    rounds = arguments(script, "--dataset cifar10").rounds
    assert f"number of rounds (default: {rounds})" in text
    assert "(default: None)" not in text and "(default: False)" not in text
    assert "glyphs are fixed (default: 0)" in text


BAD = {  # what the line says: command lines, in which the last flag is the bad one
    "(0, 1]": ["--participation 0", "--participation 1.5", "fedplcc --phi 0"],
    "[0, 1)": ["--momentum 1", "fedfm --validation 1"],
    "[0, 1]": ["fedsa --alpha 2"],
    "finite": ["--lr 1e39", "--lr nan", "--lr inf", "--lam nan", "--lam inf", "--weight-decay -1"],
    "above 0": ["--beta 0", "fedlsa --tau -0.1", "fedfm --temperature 0"],
    "a whole number from": ["--clients 0", "--eval-every 0", "--feature-dim 0", "--image-size 8", "--seed 4294967296",
                            "--batch-size 1", "--domain-clients plain:0", "fedlsa --images-per-class 0",
                            "fedtgp --server-epochs 0"],
    "a word of letters": ["--name a/b", "--name " + 101 * "a", "--name ..", "--dataset ../elsewhere", "--dataset="],
    "domain_clients value": ["--domain-clients plain"],
    "a domain twice": ["--partition domain --domain-clients thin:1,thin:2"],
    "there are plain, thin, texture, clutter": ["--partition domain --domain-clients nowhere:1"],
    "must be at most 1/3": ["fedplcc --partition domain --domain-clients thin:3 --domain-fraction 0.5"],
    "number of classes": ["--partition missing --missing 10", "--partition pathological --classes-per-client 11"],
    "try fewer --clients": ["--clients 5000", "--subset 1e-9 --clients 20"],
    "for testing": ["--partition dominant --subset 0.01 --clients 4"],
    "--out README.md": ["--out README.md/runs"],
    "would train on 1 of": ["fedfm --subset 0.1 --validation 0.999 --partition domain"],
    "write cifar10": ["--dataset CIFAR10"],
    "write pacs": ["--dataset PACS"],
    "are drawn": ["--data elsewhere"],
    "cannot be a group": ["fedfm --model htfe4"],
    "cannot be used": ["--device cuda:99", "--device tpu"],
    "checkpoint.pt": ["--resume nowhere", "--resume="],
    "unrecognized": ["--part iid"],
    "only for --partition": ["--missing 3", "--partition iid --beta=1",
                             "fedfm --partition iid --clients 4 --images-per-class 3"],
    "not allowed with": ["--partition domain --domain-clients plain:1,thin:2 --clients 3",
                         "fedplcc --domain-fraction 0.5 --images-per-class 3"],
    "also needs --clients": ["fedlsa --partition iid"],
    "without --lite": ["fedfm --model-every 2"],
    "needs --model-every 1": ["fedfm --lite --model-every 2 --rounds 2 --prox 0.1"],
    "must be a multiple": ["fedfm --lite --model-every 3"],
    "only with --lam 0": ["fedlsa --no-sphere"],
}


@pytest.mark.parametrize("words, says", [(words, says) for says in BAD for words in BAD[says]])
def test_bad_input_is_one_line_and_status_2(words, says, refused, tmp_path):
    """The line names the flag, and no run folder is made."""
    script = words.split()[0] if words.startswith("fed") else "fedproto"
    error = refused(script, "--image-size 24 --rounds 1", words.removeprefix(script))
    assert says in error and re.findall(r"--[a-z-]+", words)[-1] in error
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights")
def test_a_link_to_nowhere_as_out(refused, tmp_path):
    """It must not be tried forever."""
    (tmp_path / "runs").symlink_to(tmp_path / "nowhere")
    assert "--out" in refused("fedproto", SMALL["fedproto"])


def test_a_setting_without_a_flag_is_named(capsys):
    """Otherwise round=10 would run 1000 rounds."""
    with pytest.raises(SystemExit):
        common.parse("mine", "mine", {"default": dict(clients=4, round=10)}, lambda group: None, [])
    assert "round in SETTINGS: no such flag" in capsys.readouterr().err


def test_a_gpu_that_cannot_be_used(monkeypatch, capsys):
    """One line says so. The run must not fall back to the CPU, which would take hours."""
    def broken(*_, **__):
        raise RuntimeError("no kernel image is available\nmore lines")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", broken)
    with pytest.raises(SystemExit):
        common.choose_device("auto")
    says = "--device cuda: cannot be used (no kernel image is available); try --device cpu\n"
    assert capsys.readouterr().err.endswith(says)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@every_script
def test_on_a_gpu(script, run):
    """The loss is that of the CPU, within 5 %, and pictures are drawn."""
    cpu = run(script, SMALL[script]).rows[0]
    gpu = run(script, SMALL[script].replace("--no-plots", ""), "--device cuda").rows[0]
    assert torch.cuda.max_memory_allocated() > 0
    assert cpu.keys() == gpu.keys()
    assert gpu["loss"] == pytest.approx(cpu["loss"], rel=0.05)
    assert gpu["up"] == pytest.approx(cpu["up"], rel=0.1)  # the last bits may decide how many clusters FedPLCC has
