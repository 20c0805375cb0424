"""Every script end to end: what a run leaves and prints, that it learns, flags good and bad."""

import json, math, re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import common, fedfm
from conftest import GLOBAL, OFF, PERSONAL, SMALL, arguments, every_script, log, numbers
from test_data import picture

FILES = "args.json checkpoint.pt curves.png features.png log.csv margins.png partition.png".split()

@every_script
def test_a_run_leaves_its_folder_and_the_right_numbers(script, run):
    two, one = run(script, SMALL[script], "--workers 3"), run(script, SMALL[script].replace("--no-plots", ""))
    assert [two.folder.name, one.folder.name] == [f"{script}-glyphs-s0", f"{script}-glyphs-s0-2"]
    assert sorted(path.name for path in one.folder.iterdir()) == FILES
    assert numbers(two) == numbers(one) != numbers(run(script, SMALL[script], "--seed 1"))
    rare, rows = log(run(script, SMALL[script], "--eval-every 2").folder), log(one.folder)
    assert math.isnan(rare[0]["accuracy"]) and rare[1]["accuracy"] == rows[1]["accuracy"]
    assert json.loads((one.folder / "args.json").read_text())["script"] == script and len(rows) == 2
    assert re.search(r"round 1/2 .* loss -?[\d.]+ .* up .* down .* s .* left 0.0 min", one.text)
    assert one.text.splitlines()[-1] == f"everything is in {one.folder}"
    if script in PERSONAL:  # right answers over all test images of all clients
        known, right = one.state[1] if script != "fedsa" else torch.ones(10) > 0, np.zeros(2)
        for client in one.clients:
            z = client.net.eval().features(client.test.x)
            away = torch.cdist(z, one.state[0]).masked_fill(~known, math.inf)
            guesses = client.net.classifier(z).argmax(1), away.argmin(1)
            right += [float((guess == client.test.y).sum()) for guess in guesses]
            each = [100 * float((guess == client.test.y).float().mean()) for guess in guesses]
            lowest = each if client is one.clients[0] else np.fmin(lowest, each)
        assert "highest by classifier {:.1f} ".format(lowest[0]) in one.text
        assert ", prototype {:.1f} ".format(lowest[1]) in one.text
        want = dict(zip(("classifier", "prototype"), 100 * right / sum(len(c.test.y) for c in one.clients)))
    else:  # the mean over domains
        net = one.modules["net"].eval()
        want = {d: 100 * float((net(x).argmax(1) == y).float().mean()) for d, (x, y) in one.tests.items()}
        want["test"] = np.mean([want[domain] for domain in common.GLYPH_DOMAINS])
    assert {kind: rows[-1][f"acc_{kind}"] for kind in want} == pytest.approx(want, abs=1e-3)
    headline = dict(fedproto="prototype", fedtgp="prototype", fedsa="classifier").get(script, "test")
    assert all(row["accuracy"] == row[f"acc_{headline}"] for row in rows)

@pytest.mark.parametrize("words", [
    "fedproto --distance mse --clients 1", "fedproto --aggregate uniform --batch-size 1",
    "fedproto --clients 60 --beta 9", "fedproto --batch-size 100000 --feature-dim 7",
    "fedproto --model htfe4 --momentum 0",
    "fedproto --partition domain --domain-clients plain:1,clutter:3 --domain-fraction 0.2",
    "fedtgp --margin nearest --clients 1", "fedtgp --margin fixed --model htcnn8",
    "fedtgp --margin none --no-mlp", "fedtgp --partition pathological --classes-per-client 1",
    "fedsa --projection none --participation 0.25",
    "fedsa --distance mse --alpha 0 --partition dominant", "fedsa --partition missing --missing 9",
    "fedlsa --compactness l2 --alpha 0", "fedlsa --model cnn4 --feature-dim 64 --partition iid --clients 3",
    "fedplcc --uniform-weights --phi 1 --alpha 0.25", "fedplcc --local-prototypes mean --finch-level first",
    "fedplcc --partition pathological --clients 3 --classes-per-client 1", "fedfm --augment --validation 0",
    "fedfm --aggregate uniform --match l2 --prox 0.1 --warmup 0", "fedfm --lite --model-every 2",
    "fedfm --partition missing --clients 3 --missing 8 --warmup 0",
    "fedfm --partition dirichlet --clients 5 --participation 0.2 --lite"])
def test_switches_and_corners(words, run):
    script, words = words.split(maxsplit=1)
    one = run(script, SMALL[script], words)
    assert len(one.rows) == 2 and all(math.isfinite(row["loss"]) for row in one.rows)

@every_script
def test_a_method_beats_itself_without_its_terms(script, run, monkeypatch):
    """In accuracy, and one global model in how much of its features' variance lies between classes, in %."""
    monkeypatch.setattr(fedfm, "cluster_quality", lambda *_: "")  # takes longer than the run
    words = "--partition domain --subset 1 --model cnn4 --momentum 0.9 --rounds 3 --eval-every 9 --no-plots "
    words += ("--image-size 24 --domain-clients plain:4 --domain-fraction 0.15 --local-epochs 3"
              if script in PERSONAL else "--image-size 20 --domain-clients plain:2 --domain-fraction 20 "
              "--local-epochs 4 --batch-size 16")
    words += {"fedlsa": " --server-steps 100", "fedfm": " --validation 0 --lam 5"}.get(script, "")
    scores = []
    for one in run(script, words), run(script, words, OFF[script]):
        scores.append(one.rows[-1]["accuracy"])
        if script in GLOBAL:
            x, y = one.tests["plain"]
            z = F.normalize(common.extract(one.modules["net"], x), dim=1)
            within = sum((z[y == c] - z[y == c].mean(0)).square().sum() for c in range(10))
            scores[-1] = 100 * float(1 - within / (z - z.mean(0)).square().sum())
            assert one.rows[-1]["acc_plain"] > 70  # chance is 10
    assert scores[0] > scores[1] + (4 if script in PERSONAL else 6) and scores[0] > 60

@pytest.mark.parametrize("script", ["fedproto", "fedtgp"])
def test_classes_that_nobody_uploads_keep_their_prototypes(script, run):
    words = "--clients 10 --participation 0.1 --partition pathological --classes-per-client 1 --rounds 6"
    one = run(script, SMALL[script], "--subset 0.1", words)  # one client with one class a round
    prototypes, known = one.state
    down = [row["down"] // 512 for row in one.rows]
    assert down == sorted(down) and 3 <= down[-1] <= known.sum() and prototypes[known].any(1).all()

@pytest.mark.parametrize("scripts", [PERSONAL, GLOBAL[1:]])  # FedLSA's features are on the sphere
def test_without_their_terms_methods_are_the_same_to_the_bit(scripts, run):
    words = SMALL["fedsa"] if scripts is PERSONAL else SMALL["fedplcc"] + " --lr 0.01 --momentum 0.9"
    rows = [log(run(script, words, OFF[script]).folder)[-1] for script in scripts]
    kinds = ["loss"] + [k for k in rows[0] if k.startswith("acc_") and k != "acc_prototype"]
    assert all(row[k] == rows[0][k] for row in rows for k in kinds)

def test_traffic_is_counted_in_numbers(run):
    runs = {script: run(script, SMALL["fedsa"], "--feature-dim 32") for script in PERSONAL}
    owned = int((runs["fedsa"].args.counts > 0).sum())  # of four clients and ten classes
    up, down = ({s: [row[way] for row in one.rows] for s, one in runs.items()} for way in ("up", "down"))
    assert up == dict(fedproto=[owned * 33] * 2, fedtgp=[owned * 32] * 2, fedsa=[owned * 33] * 2)
    assert down == dict(fedproto=[0, 4 * 320], fedtgp=[0, 4 * 320], fedsa=[4 * 320] * 2)
    one = run("fedfm", "--image-size 24 --model resnet18 --partition iid --clients 2 --local-epochs 1",
              "--subset 0.01 --aggregate uniform --rounds 2 --warmup 1 --no-plots")  # FedFM's table, in k
    assert [[round(row[way] / 2000) for row in one.rows] for way in ("up", "down")] == [[11182, 11187]] * 2
    one = run("fedfm", SMALL["fedfm"], "--lite --model-every 2 --rounds 5 --warmup 0")
    models, anchors = 4 * common.model_size(one.modules["net"]), int((one.args.counts > 0).sum()) * 513
    assert [row["up"] - anchors for row in one.rows] == [0, models, 0, models, models]
    assert [row["down"] % models for row in one.rows] == [0, 4 * 5120, 4 * 5120, 4 * 5120, 4 * 5120]
    assert [row["down"] // models for row in one.rows] == [1, 0, 1, 0, 1]

def test_trials_print_mean_and_std_with_their_seeds(run):
    one = run("fedproto", SMALL["fedproto"], "--trials 2 --seed 5")
    final = [results["final by prototype"] for results in one.results]
    words = f"final by prototype: {np.mean(final):.2f} ± {np.std(final, ddof=1):.2f} %, seeds 5, 6"
    assert len(final) == 2 and words in one.text

@every_script
def test_a_published_number_stands_beside_the_right_round(script, run, monkeypatch):
    module, rounds = __import__(script), iter(zip((30.0, 50.0, 40.0), (3.0, 2.0, 1.0)))

    def evaluate(*_):
        score, validation = next(rounds)
        kinds = ["classifier", "prototype"] if script in PERSONAL else ["test"]
        return dict.fromkeys(kinds, score) | ({"validation": validation} if script == "fedfm" else {})
    monkeypatch.setattr(module, "evaluate_personal" if script in PERSONAL else "evaluate_global", evaluate)
    words = f"{SMALL[script]} --rounds 3"
    monkeypatch.setattr(module, "PUBLISHED", [(words, "Table 0", "77.7", "λ open"), ("--lr 9", "None", "1")])
    line, = [line for line in run(script, words).text.splitlines() if line.startswith("published")]
    want = {"fedlsa": "final round: 40.00", "fedplcc": "final round: 40.00", "fedfm": "best round: 30.00"}
    assert all(part in line for part in ("λ open", "77.7", "Table 0", want.get(script, "best round: 50.00")))

def test_published_rows_are_recognised():
    row = [("Table 1, cross-silo", "90.88 ± 0.04", "")]
    for words, want in (("", row), ("--seed 3 --trials 3 --workers 1", row), ("--lr 0.02", [])):
        assert arguments("fedsa", "--dataset cifar10", words).published == want
    assert "share" in arguments("fedlsa", "--dataset office").published[0][2]  # what is open

def test_defaults_give_way_to_flags_and_follow_the_data(tmp_path):
    args = arguments("fedsa", "--dataset cifar10 --rounds 7")
    other = arguments("fedsa", "--partition domain --model htfe8 --distance euclidean")
    assert (args.rounds, args.clients, args.batch_size, args.lam_mcl, args.lam_r) == (7, 20, 10, 0.01, 10)
    assert (other.clients, other.lam_mcl, other.lam_r) == (None, 1, 0.1)
    for name in ("photo", "sketch"):
        picture(tmp_path / "mine" / name / "train" / "cat" / "1.png")
        picture(tmp_path / "one" / "train" / "cat" / f"{name}.png")
    for script in GLOBAL:
        args = arguments(script, "--dataset mine --data", tmp_path)
        assert (args.partition, args.clients) == ("domain", None)
        assert script != "fedplcc" or args.lam_contra == 1
        assert arguments(script, "--dataset one --data", tmp_path).partition == "dirichlet"

BAD = {"(0, 1]": ["--participation 0", "--participation 1.5", "--participation x", "fedplcc --phi 0"],
       "(0, inf)": ["--beta 0", "--lr nan", "--domain-fraction 0", "fedlsa --tau -0.1"],
       "[0, 1]": ["--drop-rate 1.5"], "[0, 1)": ["--momentum 1", "fedfm --validation 1"],
       "[1, 1e9]": ["--clients 0", "--rounds -3", "--batch-size 0", "--eval-every 0"],
       "at least 2": ["--clients 5000", "--partition missing --missing 10"],
       "0 of 2 images": ["--subset 1e-9 --clients 20"], "whole": ["--rounds 1.5"],
       "65536]": ["--feature-dim 0"], "[16, 1024]": ["--image-size 8"], "cnn4": ["--model vgg"],
       "[0, inf)": ["--weight-decay -1", "--lam -1"], "pathological": ["--partition sorted"],
       "device": ["--device tpu"], "[0, 1e9]": ["--seed -1"], "checkpoint.pt": ["--resume nowhere"],
       "domain_clients": ["--domain-clients plain", "--domain-clients plain:0"], "": ["--none 1", "--lr"],
       "plain, thin, texture, clutter": ["--partition domain --domain-clients nowhere:1"],
       "without --lite": ["fedfm --model-every 2"],
       "client 2": ["fedplcc --domain-fraction 0.5 --domain-clients thin:3"]}

@pytest.mark.parametrize("words,allowed", [(words, allowed) for allowed in BAD for words in BAD[allowed]])
def test_bad_input_is_one_line_and_status_2(words, allowed, run, tmp_path, capsys):
    script = words.split()[0] if words.startswith("fed") else "fedproto"
    with pytest.raises(SystemExit) as stop:
        run(script, "--image-size 24", words.removeprefix(script))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and allowed in error
    flag = words.split("--")[-1].split()[0]
    assert re.search(f"--({flag}|clients)", error) and not (tmp_path / "runs").exists()

def test_participants():
    sizes = np.random.default_rng(0).permutation(20) + 2
    clients = [SimpleNamespace(train=SimpleNamespace(y=range(n))) for n in sizes]
    for share, drop, least, most in ((0.5, 0, 10, 10), (0.5, 1, 1, 1), (0.01, 0, 1, 1), (0.5, 0.5, 1, 10)):
        args = SimpleNamespace(participation=share, drop_rate=drop, seed=0)
        rounds = [[len(c.train.y) for c in common.participants(clients, t, args)] for t in range(1, 301)]
        assert min(map(len, rounds)) == least and max(map(len, rounds)) <= most
        assert len(set(sum(rounds, []))) == 20  # everyone at some time
        assert all(some == sorted(set(some), reverse=True) for some in rounds)  # largest first
        assert drop != 0.5 or 4 < np.mean(list(map(len, rounds))) < 6

def test_batches_use_every_sample_once_and_never_a_single_one_or_drop_the_last():
    for n in range(2, 40):
        for size in (2, 3, 10):
            batches = [y for y, in common.shuffled((torch.arange(n),), 2, size, np.random.default_rng(0))]
            assert sorted(torch.cat(batches).tolist()) == sorted([*range(n)] * 2)
            assert all(1 < len(batch) <= size + 1 for batch in batches)
            how = ["full", "fixed"][n % 2]
            full = [y for y, in common.shuffled((torch.arange(n),), 1, size, np.random.default_rng(0), how)]
            assert [len(batch) for batch in full] == ([size] * (n // size) or [n])
            assert len(torch.cat(full).unique()) == sum(map(len, full))
            assert how == "full" or torch.cat(full).equal(torch.arange(sum(map(len, full))))
    assert [len(y) for y, in common.shuffled((torch.arange(3),), 1, 1, np.random.default_rng(0))] == [1] * 3

def test_augment_moves_and_flips_and_nothing_else():
    x = torch.zeros(64, 3, 32, 32, dtype=torch.uint8)
    x[:, :, 12:20, 8:16] = 200
    out = fedfm.augment(x, np.random.default_rng(0))
    assert out.shape == x.shape and set(out.unique().tolist()) == {0.0, 200.0}
    ink = out[:, 0] > 0
    assert 40 < ink.sum((1, 2)).min() and ink.sum((1, 2)).max() < 90  # as much ink, in other places
    assert 16 < (ink[..., 16:].sum((1, 2)) > 32).sum() < 48 and len(out.unique(dim=0)) > 50
