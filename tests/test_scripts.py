"""Every script end to end: what a run leaves and prints, that it learns, flags good and bad."""

import json, math, re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import common, fedfm
from conftest import GLOBAL, OFF, PERSONAL, SMALL, arguments, checkpoint, every_script, log, numbers
from test_data import picture

FILES = "args.json checkpoint.pt curves.png features.png log.csv margins.png partition.png".split()


@every_script
def test_a_run_leaves_its_folder_and_its_lines(script, run, monkeypatch):
    """Catches: a file left out, another result with more workers, a seed without effect, a line or a best round that
    does not agree with the log."""
    monkeypatch.setattr(common, "in_two_dimensions", lambda z, seed: (z[:, :2].numpy(), "plane"))  # t-SNE is slow
    two, one = run(script, SMALL[script], "--workers 3"), run(script, SMALL[script].replace("--no-plots", ""))
    assert [two.folder.name, one.folder.name] == [f"{script}-glyphs-s0", f"{script}-glyphs-s0-2"]
    assert sorted(path.name for path in one.folder.iterdir()) == [name for name in FILES if name != "checkpoint.pt"]
    assert numbers(two.folder) == numbers(one.folder) != numbers(run(script, SMALL[script], "--seed 1").folder)
    about = json.loads((one.folder / "args.json").read_text())
    assert about["script"] == script and about["rounds"] == 2 and "device" not in about
    assert re.search(r"round 1/2 .* loss -?[\d.]+ .* up .* down .* s .* left [\d.]+ min", one.text)
    assert one.text.splitlines()[-1] == f"everything is in {one.folder}"
    assert ("most frequent class" in one.text) == (script in PERSONAL)
    assert all(weights.grad is None for weights in one.modules[0].parameters())  # gradients would double the memory
    rows = log(one.folder)
    assert ("acc_anchor" in rows[0]) == (script == "fedsa")
    for name, value in one.results[0].items():
        kind = name.split()[-1]
        judge = "acc_validation" if script == "fedfm" else f"acc_{kind}"
        best = max(rows, key=lambda row: row[judge])
        assert value == (best if name.startswith("best") else rows[-1])[f"acc_{kind}"]


@every_script
def test_rare_evaluation_changes_nothing_else(script, run):
    """Catches: an evaluation that changes what follows."""
    rare = log(run(script, SMALL[script], "--eval-every 2 --rounds 3").folder)
    often = log(run(script, SMALL[script], "--rounds 3 --name often").folder)
    assert not any(name.startswith("acc_") for name in rare[0])
    for a, b in zip(rare[1:], often[1:]):
        assert a | {"seconds": 0} == b | {"seconds": 0}


@pytest.mark.parametrize("words", [
    "fedproto --distance mse --clients 1", "fedproto --aggregate uniform --model htcnn8 --batch-size 1",
    "fedproto --clients 60 --beta 9", "fedproto --batch-size 100000 --feature-dim 7",
    "fedproto --model htfe4 --momentum 0 --subset 0.02",
    "fedproto --partition domain --domain-clients plain:1,clutter:3 --domain-fraction 0.2",
    "fedproto --partition domain --clients 8",
    "fedtgp --margin-rule nearest --clients 1", "fedtgp --margin-rule fixed --model htcnn8",
    "fedtgp --margin-rule none --no-mlp", "fedtgp --partition pathological --classes-per-client 1",
    "fedsa --projection none --participation 0.25",
    "fedsa --distance mse --lam-r 10 --projection mlp --margin-rule nearest",
    "fedsa --alpha 0 --partition dominant", "fedsa --partition missing --missing 9",
    "fedlsa --compactness l2 --alpha 0", "fedlsa --model cnn4 --feature-dim 64 --partition iid --clients 3",
    "fedplcc --uniform-weights --phi 1 --alpha 0.25", "fedplcc --local-prototypes mean --finch-level first",
    "fedplcc --partition pathological --clients 3 --classes-per-client 1", "fedfm --augment --validation 0",
    "fedfm --aggregate uniform --match l2 --prox 0.1 --warmup 0", "fedfm --lite --model-every 2",
    "fedfm --partition missing --clients 3 --missing 8 --warmup 0",
    "fedfm --partition dirichlet --clients 5 --participation 0.2 --lite"])
def test_switches_and_corners(words, run):
    """Catches: a switch that stops with an error, a loss that is not finite."""
    script, words = words.split(maxsplit=1)
    small = SMALL[script]
    if "--domain-clients" in words:
        small = small.replace("--clients 4", "")
    if "--partition" in words:
        small = small.replace("--images-per-class 4", "")
    one = run(script, small, words)
    assert len(one.rows) == 2 and all(math.isfinite(row["loss"]) for row in one.rows)


@every_script
def test_a_method_beats_itself_without_its_terms(script, run, monkeypatch):
    """Catches: terms that do not help: in accuracy, and for one global model in how much of its features' variance
    lies between classes, in %."""
    monkeypatch.setattr(fedfm, "cluster_quality", lambda *_: "")  # takes longer than the run
    words = "--partition domain --subset 1 --model cnn4 --momentum 0.9 --rounds 3 --eval-every 9 --no-plots "
    if script in PERSONAL:
        words += "--image-size 24 --local-epochs 3 --domain-clients "
        words += "plain:4 --domain-fraction 0.15" if script == "fedtgp" else "plain:3 --domain-fraction 0.1"
    else:
        words += "--image-size 20 --domain-clients plain:2 --images-per-class 20 --local-epochs 4 --batch-size 16"
    words += {"fedlsa": " --server-steps 100", "fedfm": " --validation 0 --lam 5"}.get(script, "")
    scores = []
    for one in run(script, words), run(script, words, OFF[script]):
        headline = dict(fedproto="prototype", fedtgp="prototype", fedsa="classifier").get(script, "test")
        scores.append(one.rows[-1][f"acc_{headline}"])
        if script in GLOBAL:
            data = common.glyphs(20)
            plain = data.test & (data.domain == 0)
            x, y = data.x[plain], data.y[plain]
            z = F.normalize(common.extract(one.modules[0], x), dim=1)
            within = sum((z[y == c] - z[y == c].mean(0)).square().sum() for c in range(10))
            scores[-1] = 100 * float(1 - within / (z - z.mean(0)).square().sum())
            assert one.rows[-1]["acc_plain"] > 70  # chance is 10
    assert scores[0] > scores[1] + (4 if script in PERSONAL else 6) and scores[0] > 60


@pytest.mark.parametrize("scripts", [PERSONAL, GLOBAL[1:]])  # FedLSA's features are on the sphere
def test_without_their_terms_methods_are_the_same_to_the_bit(scripts, run):
    """Catches: a baseline that differs from script to script."""
    words = SMALL["fedsa"] if scripts is PERSONAL else SMALL["fedplcc"] + " --lr 0.01 --momentum 0.9"
    rows = [log(run(script, words, OFF[script]).folder)[-1] for script in scripts]
    kinds = ["loss"] + [k for k in rows[0] if k.startswith("acc_") and k not in ("acc_prototype", "acc_anchor")]
    assert all(row[k] == rows[0][k] for row in rows for k in kinds)


def test_traffic_agrees_with_fedfms_table(run):
    """Catches: numbers that travel and are not counted, or the other way round."""
    one = run("fedfm", "--image-size 24 --model resnet18 --partition iid --clients 2 --local-epochs 1",
              "--subset 0.01 --aggregate uniform --rounds 2 --warmup 1 --no-plots")  # FedFM's table, in k
    assert [[round(row[way] / 2000) for row in one.rows] for way in ("up", "down")] == [[11182, 11187]] * 2


def test_trials_print_mean_and_std_with_their_seeds(run):
    """Catches: another standard deviation, or seeds that were not run."""
    one = run("fedproto", SMALL["fedproto"], "--trials 2 --seed 5")
    final = [results["final by prototype"] for results in one.results]
    words = f"final by prototype: {np.mean(final):.2f} ± {np.std(final, ddof=1):.2f} %, seeds 5, 6"
    assert len(final) == 2 and words in one.text


def test_defaults_give_way_to_flags_and_follow_the_data(tmp_path):
    """Catches: a preset that goes before what is typed, or two ways to say one thing at once."""
    args = arguments("fedsa", "--dataset cifar10 --rounds 7")
    assert (args.rounds, args.clients, args.batch_size, args.lam_r) == (7, 20, 10, 0.1)
    assert (args.distance, args.projection, args.margin_rule) == ("euclidean", "mlp", "average")  # the paper's
    args = arguments("fedlsa", "--domain-fraction 0.5")
    assert (args.domain_fraction, args.images_per_class) == (0.5, None)
    args = arguments("fedlsa", "--dataset pacs --images-per-class 5")
    assert (args.domain_fraction, args.images_per_class) == (None, 5)
    for words in ("--clients 6", "--partition iid --clients 6"):
        args = arguments("fedlsa", "--dataset digits", words)
        assert (args.domain_clients, args.clients) == (None, 6)
    args = arguments("fedlsa", "--dataset office --domain-clients amazon:4,dslr:1")
    assert (args.domain_clients, args.clients) == ({"amazon": 4, "dslr": 1}, None)
    for name in ("photo", "sketch"):
        picture(tmp_path / "mine" / name / "train" / "cat" / "1.png")
        picture(tmp_path / "one" / "train" / "cat" / f"{name}.png")
    for script in GLOBAL:
        args = arguments(script, "--dataset mine --data", tmp_path)
        assert (args.partition, args.clients) == ("domain", None)
        assert script != "fedplcc" or (args.lam_contra, args.lam_corr) == (1, 10)
        assert arguments(script, "--dataset one --data", tmp_path).partition == "dirichlet"


@every_script
def test_every_setting_is_a_flag(script):
    """Catches: a misspelt key of SETTINGS, which the parser would take without a word."""
    module = __import__(script)
    parser = common.make_parser("")
    module.add_flags(parser)
    flags = {action.dest for action in parser._actions}
    for dataset, setting in module.SETTINGS.items():
        assert set(setting) <= flags, dataset


@every_script
@pytest.mark.parametrize("dataset", ["glyphs", "cifar10"])
def test_help_shows_what_a_run_would_use(script, dataset, capsys):
    """Catches: defaults in --help that are another data set's."""
    with pytest.raises(SystemExit) as stop:
        arguments(script, "--dataset", dataset, "--help")
    text = " ".join(capsys.readouterr().out.split())
    rounds = arguments(script, "--dataset", dataset).rounds
    assert stop.value.code == 0 and f"number of rounds (default: {rounds})" in text
    assert __import__(script).__doc__.split(":")[0] in text


BAD = {  # what the line says: command lines
    "(0, 1]": ["--participation 0", "--participation 1.5", "fedplcc --phi 0", "--domain-fraction 0",
               "--domain-fraction 1.5"],
    "invalid": ["--participation x", "--rounds 1.5"],
    "is there twice": ["--domain-clients plain:1,plain:3"],
    "domain_clients value": ["--domain-clients plain", "--domain-clients plain:x"],
    "finite": ["--lr nan", "--lam inf", "fedfm --prox inf"],
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
    "at least 0": ["--weight-decay -1", "--lam -1", "fedsa --lam-cc -1"],
    "pathological": ["--partition sorted"],
    "cannot be used": ["--device cuda:99", "--device tpu"],
    "checkpoint.pt": ["--resume nowhere", "--resume="],
    "expected": ["--lr"],
    "unrecognized": ["--none 1", "--lam-mcl 1"],
    "plain, thin, texture, clutter": ["--partition domain --domain-clients nowhere:1"],
    "no meaning": ["--domain-clients plain:1", "--missing 3", "--partition iid --beta 1", "fedlsa --dominant-share 0.5",
                   "fedfm --partition iid --clients 4 --images-per-class 3", "--partition iid --beta=1"],
    "not allowed with": ["--partition domain --domain-clients plain:1,thin:2 --clients 3", "--resume here --trials 2",
                         "fedplcc --domain-fraction 0.5 --images-per-class 3"],
    "without --lite": ["fedfm --model-every 2"],
    "needs --clients": ["fedlsa --partition iid"],
    "a word of letters": ["--name a/b", "--name ..", "--dataset ../elsewhere", "--dataset a/b", "--dataset=", "--name="],
    "would train on 1 of": ["fedfm --subset 0.1 --validation 0.999"],
    "must be at most 1/3": ["fedplcc --partition domain --domain-clients thin:3 --domain-fraction 0.5"],
    "client 8 would train on 0 of": ["fedplcc --partition domain --domain-clients thin:20 --images-per-class 20"],
}


@pytest.mark.parametrize("words,says", [(words, says) for says in BAD for words in BAD[says]])
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
    """Catches: a traceback, or hours on a CPU that nobody asked for; cpu that touches the GPU."""
    ones = torch.ones

    def broken(*args, device):
        if device == "cpu":
            return ones(*args)
        raise RuntimeError("no kernel image is available\nmore lines")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", broken)
    assert common.choose_device("cpu") == "cpu"
    for name in ("auto", "cuda"):
        with pytest.raises(SystemExit) as stop:
            common.choose_device(name)
        error = capsys.readouterr().err
        assert stop.value.code == 2 and error.count("\n") == 1
        assert "no kernel image" in error and "--device cpu" in error


def test_lambda_2_of_fedsa_follows_the_model(run):
    """One architecture's λ2 for a group, or a typed one replaced."""
    wants = {"": 0.01, "--model htcnn8": 1, "--model htcnn8 --lam-mcl 0": 0}
    for words, want in wants.items():
        one = run("fedsa", SMALL["fedsa"], "--rounds 1", words)
        assert json.loads((one.folder / "args.json").read_text())["lam_mcl"] == want


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@every_script
def test_on_a_gpu(script, run):
    """Catches: a step that computes something else on a GPU, or a tensor that travels or is kept in another shape."""
    words = SMALL[script] + " --rounds 1 --checkpoint-every 1"
    cpu, gpu = run(script, words), run(script, words, "--device cuda")
    (one,), (other,) = log(cpu.folder), log(gpu.folder)
    assert one.keys() == other.keys()
    assert other["loss"] == pytest.approx(one["loss"], rel=0.05)
    for name in one:
        if name.startswith("acc"):
            assert other[name] == pytest.approx(one[name], abs=10)  # a few test images at the border
    # how many clusters FedPLCC's clients find may depend on the last bits
    tolerance = 0.1 if script == "fedplcc" else 0
    assert [other[way] for way in ("up", "down")] == pytest.approx([one[way] for way in ("up", "down")], rel=tolerance)

    ends = [checkpoint(run.folder) for run in (cpu, gpu)]
    models = [[{name: w.shape for name, w in module.items()} for module in end["modules"]] for end in ends]
    assert models[0] == models[1]
    if script != "fedplcc":
        states = [end["state"] if isinstance(end["state"], tuple) else (end["state"],) for end in ends]
        shapes = [[tensor.shape for tensor in state] for state in states]
        assert shapes[0] == shapes[1]


def test_batches_use_every_sample_once_and_never_a_single_one_or_drop_the_last():
    """Catches: a sample left out or taken twice, a batch of one."""
    for n in range(2, 40):
        for size in (2, 3, 10):
            rng = np.random.default_rng(0)
            parts = common.batches(n, size, rng)
            assert sorted(torch.cat(parts).tolist()) == list(range(n))
            assert all(1 < len(part) <= size + 1 for part in parts)
            full = common.batches(n, size, rng, "full")
            assert [len(part) for part in full] == ([size] * (n // size) or [n])
            assert len(torch.cat(full).unique()) == sum(map(len, full))
    assert [len(part) for part in common.batches(3, 1, np.random.default_rng(0))] == [1] * 3


def test_augment_moves_and_flips_and_nothing_else():
    """Catches: images that lose their ink or their tones, or that stay as they are."""
    x = torch.zeros(64, 3, 32, 32, dtype=torch.uint8)
    x[:, :, 12:20, 8:16] = 200
    out = fedfm.augment(x, np.random.default_rng(0))
    assert out.shape == x.shape and set(out.unique().tolist()) == {0.0, 200.0}
    ink = out[:, 0] > 0
    assert 40 < ink.sum((1, 2)).min() and ink.sum((1, 2)).max() < 90  # as much ink, in other places
    assert 16 < (ink[..., 16:].sum((1, 2)) > 32).sum() < 48 and len(out.unique(dim=0)) > 50
