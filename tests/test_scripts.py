"""Every script end to end: what a run leaves and prints, that it learns, flags good and bad."""

import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import common
import fedfm
from conftest import GLOBAL, OFF, PERSONAL, SMALL, arguments, checkpoint, every_script, log, numbers
from test_data import picture

# --- what a run leaves and prints -----------------------------------------------------------------

@every_script
def test_a_run_leaves_its_folder(script, run, monkeypatch):
    """Catches: a file too many or too few, another result with more workers, a seed without effect."""
    monkeypatch.setattr(common, "in_two_dimensions", lambda z, seed: (z[:, :2].numpy(), "plane"))  # t-SNE is slow
    plain = run(script, SMALL[script], "--workers 3")
    drawn = run(script, SMALL[script].replace("--no-plots", "--checkpoint-every 2"))
    assert (plain.folder.name, drawn.folder.name) == (f"{script}-glyphs-s0", f"{script}-glyphs-s0-2")
    files = {path.name for path in plain.folder.iterdir()}
    assert files == {"args.json", "log.csv"}  # --no-plots, and glyphs have no checkpoint
    pictures = {"partition.png", "curves.png", "features.png", "margins.png"}
    assert {path.name for path in drawn.folder.iterdir()} == files | pictures | {"checkpoint.pt"}
    assert len(log(plain.folder)) == 2
    assert numbers(plain.folder) == numbers(drawn.folder) != numbers(run(script, SMALL[script], "--seed 1").folder)
    for weights in plain.modules[0].parameters():
        assert weights.grad is None  # gradients would double the memory


def test_rounds_without_evaluation_have_empty_cells(run):
    """Catches: a log that cannot be written, or an accuracy that is carried on, after a round without evaluation."""
    rows = log(run("fedproto", SMALL["fedproto"], "--rounds 5 --eval-every 2 --lam 0").folder)
    assert ["acc_classifier" in row for row in rows] == [False, True, False, True, True]


@every_script
def test_a_run_prints_its_log(script, run):
    """Catches: a line, a best round or a last line that does not agree with log.csv."""
    one = run(script, SMALL[script], "--name mine")
    assert one.folder.name == f"{script}-glyphs-mine-s0"
    rows = log(one.folder)
    kinds = {"fedsa": ["classifier", "anchor"], "fedproto": ["classifier", "prototype"],
             "fedtgp": ["classifier", "prototype"]}.get(script, ["test"])
    lines = one.text.splitlines()
    for row in rows:
        line, = [line for line in lines if line.startswith(f"round {row['round']:.0f}/2")]
        for kind in kinds:
            assert f"{kind} {row[f'acc_{kind}']:5.2f}" in line
        assert f"loss {row['loss']:.4f}" in line
        assert f"up {row['up']:,.0f}  down {row['down']:,.0f}  {row['seconds']:.2f} s  left " in line
    for kind in kinds:
        judge = "acc_validation" if script == "fedfm" else f"acc_{kind}"
        best = max(rows, key=lambda row: row[judge])[f"acc_{kind}"]
        final = rows[-1][f"acc_{kind}"]
        assert one.results[0][f"best by {kind}"] == best and one.results[0][f"final by {kind}"] == final
        assert f"by {kind}: final {final:.2f} %, best {best:.2f} %" in one.text
        if script in PERSONAL:
            assert f"{final - rows[-1]['acc_most_frequent']:+.2f} by {kind}" in one.text
    up, down = [sum(row[way] for row in rows) for way in ("up", "down")]
    assert f"traffic: {up:,.0f} floats up, {down:,.0f} down" in one.text
    assert lines[-1] == f"everything is in {one.folder}"


def test_progress_is_for_terminals(capsys):
    """Catches: progress lines in files and pipes."""
    common.show_progress("client 1/2")
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


@every_script
def test_rare_evaluation_changes_nothing_else(script, run):
    """Catches: an evaluation that changes what follows, a last round without one."""
    rare = numbers(run(script, SMALL[script], "--eval-every 2 --rounds 3").folder)
    often = numbers(run(script, SMALL[script], "--rounds 3").folder)
    assert not any(name.startswith("acc_") for name in rare[0])
    assert rare[1:] == often[1:]


def test_trials_print_mean_and_std_with_their_seeds(run):
    """Catches: another standard deviation, or seeds that were not run."""
    one = run("fedproto", SMALL["fedproto"], "--trials 2 --seed 5")
    final = [results["final by prototype"] for results in one.results]
    assert len(set(final)) == 2
    words = f"final by prototype: {np.mean(final):.2f} ± {np.std(final, ddof=1):.2f} %, seeds 5, 6"
    assert words in one.text


# --- the methods ----------------------------------------------------------------------------------

@pytest.mark.parametrize("words", [
    "fedproto --distance mse --clients 1",
    "fedproto --model htcnn8 --batch-size 1",
    "fedproto --clients 60 --beta 9",
    "fedproto --batch-size 100000 --feature-dim 7",
    "fedproto --model htfe4 --momentum 0 --subset 0.02",
    "fedproto --partition domain --clients 8",
    "fedtgp --margin-rule nearest --clients 1",
    "fedtgp --margin-rule fixed --model htcnn8 --distance mse",
    "fedtgp --margin-rule none --no-mlp",
    "fedtgp --partition pathological --classes-per-client 1",
    "fedsa --projection none --participation 0.25",
    "fedsa --projection linear --distance mse --lam-r 10",
    "fedsa --alpha 0 --partition dominant",
    "fedsa --partition missing --missing 9",
    "fedlsa --compactness l2 --alpha 0",
    "fedlsa --no-sphere --feature-dim 64 --batches full",
    "fedplcc --uniform-weights --phi 1 --alpha 0.25",
    "fedfm --augment --validation 0",
    "fedfm --aggregate uniform --match l2 --prox 0.1 --warmup 0",
    "fedfm --lite --model-every 2",
])
def test_switches_and_corners(words, run):
    """Catches: a switch that stops with an error, a loss that is not finite."""
    script, words = words.split(maxsplit=1)
    rows = run(script, SMALL[script], words).rows
    assert len(rows) == 2
    assert all(math.isfinite(row["loss"]) for row in rows)


@pytest.mark.parametrize("words", [
    "fedproto --partition domain --domain-clients plain:1,clutter:3 --domain-fraction 0.2",
    "fedlsa --partition iid --clients 3",
    "fedplcc --partition pathological --clients 3 --classes-per-client 1",
    "fedfm --partition missing --clients 3 --missing 8 --warmup 0",
    "fedfm --partition dirichlet --clients 5 --participation 0.2 --lite",
])
def test_partitions_of_another_kind(words, run):
    """Catches: a script that cannot do without domains, or with them."""
    script, words = words.split(maxsplit=1)
    small = SMALL[script].replace("--clients 4", "").replace("--images-per-class 4", "")
    assert all(math.isfinite(row["loss"]) for row in run(script, small, words).rows)


BETTER = {  # a larger run of each script, and the accuracy that its terms improve
    "fedproto": ("--domain-clients plain:3 --domain-fraction 0.1", "prototype"),
    "fedtgp": ("--domain-clients plain:4 --domain-fraction 0.15", "prototype"),
    "fedsa": ("--domain-clients plain:3 --domain-fraction 0.1", "classifier"),
    "fedlsa": ("--server-steps 100", "plain"),
    "fedplcc": ("", "plain"),
    "fedfm": ("--validation 0 --lam 5", "plain"),
}


def separation(net):
    """How much of the variance of a model's features of plain glyphs lies between classes, in %."""
    data = common.glyphs(20)
    plain = data.test & (data.domain == 0)
    y = data.y[plain]
    z = F.normalize(common.extract(net, data.x[plain]), dim=1)
    within = sum((z[y == c] - z[y == c].mean(0)).square().sum() for c in range(10))
    return 100 * float(1 - within / (z - z.mean(0)).square().sum())


@every_script
def test_a_method_beats_itself_without_its_terms(script, run, monkeypatch):
    """Catches: terms that do not help: in accuracy, and for one global model in how well its features separate."""
    monkeypatch.setattr(fedfm, "cluster_quality", lambda *_: "")  # takes longer than the run
    words, kind = BETTER[script]
    words += " --partition domain --subset 1 --model cnn4 --momentum 0.9 --rounds 3 --eval-every 9 --no-plots"
    if script in PERSONAL:
        words += " --image-size 24 --local-epochs 3"
    else:
        words += " --image-size 20 --domain-clients plain:2 --images-per-class 20 --local-epochs 4 --batch-size 16"
    with_terms, without = run(script, words), run(script, words, OFF[script])
    score = with_terms.rows[-1][f"acc_{kind}"]
    assert score > 60  # chance is 10
    if script in PERSONAL:
        assert score > without.rows[-1][f"acc_{kind}"] + 4
    else:
        assert separation(with_terms.modules[0]) > separation(without.modules[0]) + 6


@pytest.mark.parametrize("scripts", [PERSONAL, GLOBAL[1:]])  # FedLSA's features are on the sphere
def test_without_their_terms_methods_are_the_same_to_the_bit(scripts, run):
    """Catches: a baseline that differs from script to script."""
    words = SMALL["fedsa"] if scripts is PERSONAL else SMALL["fedplcc"]
    rows = [numbers(run(script, words, OFF[script]).folder)[-1] for script in scripts]
    for name in "loss", "acc_classifier", "acc_most_frequent", "acc_test":
        assert len({row.get(name) for row in rows}) == 1


def test_batches_use_every_sample_once_and_never_a_single_one_or_drop_the_last():
    """Catches: a sample left out or taken twice, a batch of one."""
    rng = np.random.default_rng(0)
    for n in range(2, 40):
        for size in 2, 3, 10:
            parts = common.batches(n, size, rng)
            assert sorted(torch.cat(parts).tolist()) == list(range(n))
            assert all(1 < len(part) <= size + 1 for part in parts)
            full = common.batches(n, size, rng, "full")
            assert [len(part) for part in full] == ([size] * (n // size) or [n])
            assert len(torch.cat(full).unique()) == sum(map(len, full))
    assert [len(part) for part in common.batches(3, 1, rng)] == [1, 1, 1]


# --- the command line -----------------------------------------------------------------------------

@pytest.mark.parametrize("words, want", [
    ("fedsa --dataset cifar10 --rounds 7", dict(rounds=7, clients=20)),
    ("fedlsa --domain-fraction 0.5", dict(domain_fraction=0.5, images_per_class=None)),
    ("fedlsa --dataset pacs --images-per-class 5", dict(domain_fraction=None, images_per_class=5)),
    ("fedlsa --dataset digits --clients 6", dict(domain_clients=None, clients=6)),
    ("fedlsa --dataset digits --partition iid --clients 6", dict(domain_clients=None, clients=6)),
    ("fedlsa --dataset office --domain-clients amazon:4,dslr:1", dict(domain_clients={"amazon": 4, "dslr": 1},
                                                                      clients=None)),
])
def test_what_is_typed_goes_before_the_data_sets_settings(words, want):
    """Catches: a preset that goes before what is typed, or two ways to say one thing at once."""
    args = vars(arguments(*words.split(maxsplit=1)))
    assert {name: args[name] for name in want} == want


def test_folders_with_and_without_domains(tmp_path):
    """Catches: a folder with one domain that gets the settings for several, or the other way round."""
    for name in "photo", "sketch":
        picture(tmp_path / "several" / name / "train" / "cat" / "1.png")
        picture(tmp_path / "one" / "train" / "cat" / f"{name}.png")
    for script in GLOBAL:
        assert arguments(script, "--dataset several --data", tmp_path).partition == "domain"
        assert arguments(script, "--dataset one --data", tmp_path).partition == "dirichlet"


@every_script
def test_every_setting_is_a_flag(script):
    """Catches: a misspelt key of SETTINGS, which the parser would take without a word."""
    module = __import__(script)
    parser = common.make_parser("")
    module.add_flags(parser)
    flags = {action.dest for action in parser._actions}
    for dataset, settings in module.SETTINGS.items():
        assert set(settings) <= flags, dataset


@every_script
@pytest.mark.parametrize("dataset", ["glyphs", "cifar10"])
def test_help_shows_what_a_run_would_use(script, dataset, capsys):
    """Catches: defaults in --help that are another data set's, or None."""
    with pytest.raises(SystemExit) as stop:
        arguments(script, "--dataset", dataset, "--help")
    text = " ".join(capsys.readouterr().out.split())
    args = arguments(script, "--dataset", dataset)
    assert stop.value.code == 0
    assert f"number of rounds (default: {args.rounds})" in text
    assert f"momentum of SGD; its buffer starts empty in each round (default: {args.momentum})" in text
    assert "(default: None)" not in text and "(default: False)" not in text
    assert __import__(script).__doc__.split(":")[0] in text


BAD = {  # what the line says: command lines
    "(0, 1]": ["--participation 0", "--participation 1.5", "fedplcc --phi 0", "--domain-fraction 0",
               "--domain-fraction 1.5"],
    "invalid": ["--participation x", "--rounds 1.5"],
    "is there twice": ["--domain-clients plain:1,plain:3"],
    "domain_clients value": ["--domain-clients plain", "--domain-clients plain:x"],
    "finite": ["--lr nan", "--lr inf", "--lam nan", "--lam inf", "fedfm --prox inf"],
    "above 0": ["--beta 0", "fedlsa --tau -0.1", "fedfm --temperature 0"],
    "[0, 1]": ["--momentum 1.5", "fedfm --validation -0.1", "fedsa --alpha 2"],
    "at least 1": ["--clients 0", "--rounds -3", "--batch-size 0", "--eval-every 0",
                   "fedtgp --server-epochs 0", "--domain-clients plain:0", "fedlsa --images-per-class 0"],
    "too few": ["--clients 5000", "--clients 1000000", "--subset 1e-9 --clients 20",
                "--clients 9 --subset 0.003 --partition iid"],
    "number of classes": ["--partition missing --missing 10", "--partition pathological --classes-per-client 11"],
    "at most 65536": ["--feature-dim 0"],
    "at most 4294967295": ["--seed -1", "--seed 4294967296"],
    "at least 16 and at most 1024": ["--image-size 8"],
    "cnn4": ["--model vgg"],
    "cannot be a group": ["fedfm --model htfe4"],
    "at least 0": ["--weight-decay -1", "--lam -1", "fedsa --lam-cc -1"],
    "pathological": ["--partition sorted"],
    "cannot be used": ["--device cuda:99", "--device tpu"],
    "checkpoint.pt": ["--resume nowhere", "--resume="],
    "expected": ["--lr"],
    "unrecognized": ["--none 1", "--lam-mcl 1", "--part iid"],
    "plain, thin, texture, clutter": ["--partition domain --domain-clients nowhere:1"],
    "no meaning": ["--domain-clients plain:1", "--missing 3", "--partition iid --beta 1", "fedlsa --dominant-share 0.5",
                   "fedfm --partition iid --clients 4 --images-per-class 3", "--partition iid --beta=1"],
    "not allowed with": ["--partition domain --domain-clients plain:1,thin:2 --clients 3", "--resume here --trials 2",
                         "fedplcc --domain-fraction 0.5 --images-per-class 3"],
    "without --lite": ["fedfm --model-every 2"],
    "also needs --clients": ["fedlsa --partition iid"],
    "a word of letters": ["--name a/b", "--name ..", "--name=", "--dataset ../elsewhere", "--dataset a/b",
                          "--dataset="],
    "would train on 1 of": ["fedfm --subset 0.1 --validation 0.999"],
    "must be at most 1/3": ["fedplcc --partition domain --domain-clients thin:3 --domain-fraction 0.5"],
    "client 8 would train on 0 of": ["fedplcc --partition domain --domain-clients thin:20 --images-per-class 20"],
}


@pytest.mark.parametrize("words, says", [(words, says) for says in BAD for words in BAD[says]])
def test_bad_input_is_one_line_and_status_2(words, says, run, tmp_path, capsys):
    """Catches: a traceback, or a value that cannot work and is taken."""
    script = words.split()[0] if words.startswith("fed") else "fedproto"
    flag = re.findall(r"--[a-z-]+", words)[-1]
    with pytest.raises(SystemExit) as stop:
        run(script, "--image-size 24", words.removeprefix(script))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and says in error
    assert flag in error or "--clients" in error or "--resume" in error
    assert not (tmp_path / "runs").exists()


def test_a_gpu_that_cannot_be_used(monkeypatch, capsys):
    """Catches: a traceback, hours on a CPU that nobody asked for, --device cpu that touches the GPU."""
    ones = torch.ones

    def broken(*shape, device):
        if device == "cpu":
            return ones(*shape)
        raise RuntimeError("no kernel image is available\nmore lines")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", broken)
    assert common.choose_device("cpu") == "cpu"
    for name in "auto", "cuda":
        with pytest.raises(SystemExit) as stop:
            common.choose_device(name)
        error = capsys.readouterr().err
        assert stop.value.code == 2 and error.count("\n") == 1
        assert "no kernel image" in error and "--device cpu" in error


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@every_script
def test_on_a_gpu(script, run):
    """Catches: a step that computes something else on a GPU, or keeps a tensor of another shape."""
    words = SMALL[script] + " --rounds 1 --checkpoint-every 1"
    cpu, gpu = run(script, words).folder, run(script, words, "--device cuda").folder
    (one,), (other,) = log(cpu), log(gpu)
    assert one.keys() == other.keys()
    assert other["loss"] == pytest.approx(one["loss"], rel=0.05)
    tolerance = 0.1 if script == "fedplcc" else 0  # how many clusters there are may depend on the last bits
    assert other["up"] == pytest.approx(one["up"], rel=tolerance)
    for here, there in zip(checkpoint(cpu)["modules"], checkpoint(gpu)["modules"], strict=True):
        for name in here:
            assert here[name].shape == there[name].shape
