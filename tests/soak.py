"""Long versions of two tests, to be run by hand.

    python tests/soak.py kill [--kills 60]    kill -9 at random moments, --resume, until the run ends; compare with the undisturbed run
    python tests/soak.py fuzz [--cases 1000]  random flags with values in and out of range, over all six scripts
"""

import argparse
import contextlib
import io
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import common  # noqa: E402

SCRIPTS = ["fedproto", "fedtgp", "fedsa", "fedlsa", "fedplcc", "fedfm"]


# --- kill -----------------------------------------------------------------------------------------------------------

def kill(kills, seed=0):
    """-> kills, rounds that had to be trained again, runs whose log or final weights differ from the undisturbed run's."""
    from test_resume import RUNS, numbers, same, weights
    rng, done, lost, different = random.Random(seed), 0, 0, 0
    while done < kills:
        script, words = RUNS[rng.randrange(len(RUNS))]
        words = [*words.split(), "--seed", str(rng.randrange(1000)), "--checkpoint-every", str(rng.choice([1, 1, 2]))]
        with tempfile.TemporaryDirectory() as folder:
            def command(*words):
                return [sys.executable, ROOT / f"{script}.py", *words, "--no-plots"]
            if subprocess.run(command(*words, "--out", f"{folder}/whole"), stdout=subprocess.DEVNULL).returncode:
                continue  # with this seed it diverges
            start, mine, checkpoints = command(*words, "--out", f"{folder}/killed"), 0, 0
            while True:
                process = subprocess.Popen(start, stdout=subprocess.PIPE, text=True)
                waiting = rng.choice([0, 1, 1, 1, 2])  # lines of rounds to wait for; 0 is somewhere in the start
                while waiting and (line := process.stdout.readline()):
                    waiting -= line.startswith("round ") and " loss " in line
                time.sleep(rng.uniform(0, 0.6))
                process.kill()
                mine += process.wait() == -9
                run = next(Path(folder, "killed").glob("*"), None)
                if process.returncode == 0:
                    break
                assert process.returncode == -9, (process.returncode, start)
                if run and (run / "checkpoint.pt").exists():
                    held = len((run / "log.csv").read_text().splitlines()) - 1
                    lost += max(0, held - common.torch.load(run / "checkpoint.pt", weights_only=True)["round"])
                    checkpoints += 1
                    start = command("--resume", run, "--checkpoint-every", rng.choice("12"))
                elif run:  # killed before the first checkpoint
                    for file in run.iterdir():
                        file.unlink()
                    run.rmdir()
            whole, = Path(folder, "whole").iterdir()
            wrong = str(numbers(whole)) != str(numbers(run)) or not same(weights(whole), weights(run))
            done, different = done + mine, different + wrong
            print(f"{script} {' '.join(words)}: {mine} kills, {checkpoints} of them with a checkpoint, {'DIFFERENT' if wrong else 'the same'}; so far {done}", flush=True)
    print(f"{done} kills, {lost} logged rounds trained again, {different} results that differ")
    return different


# --- fuzz -----------------------------------------------------------------------------------------------------------

BAD = ["", " ", "x", "-1", "0", "1.5", "nan", "inf", "-inf", "1e400", "1e-400", "9" * 30, "٣", "0x10", "--", "1,2", "None", "-0.0", "\x00", "é" * 300]
GOOD = {"dataset": ["glyphs"], "subset": ["0.01", "0.02", "1e-9"], "image-size": ["16", "20"], "clients": ["1", "2", "5", "40"], "participation": ["1e-9", "0.5", "1"],
        "beta": ["1e-3", "0.1", "1e3", "1e-300", "1e300"], "classes-per-client": ["1", "2", "10"], "missing": ["0", "9"], "dominant-share": ["1e-9", "1"],
        "domain-clients": ["plain:1", "plain:2,clutter:1", "mnist:1", "plain", "plain:0", "plain:1,plain:2", ":1", "plain:-1"],
        "domain-fraction": ["0.01", "1", "2", "2.5", "1000"], "feature-dim": ["1", "7", "512"], "rounds": ["1", "2"], "local-epochs": ["1", "2"],
        "batch-size": ["1", "2", "10", "100000"], "lr": ["1e-9", "0.01", "1e30"], "momentum": ["0", "0.99"], "weight-decay": ["0", "1", "1e30"],
        "seed": ["0", "4294967295"], "trials": ["1", "2"], "device": ["cpu", "cuda:77", "mps", "meta", "auto"], "workers": ["0", "1", "7"],
        "eval-every": ["1", "7"], "drop-rate": ["0", "0.5", "1"], "checkpoint-every": ["0", "1"], "model": ["cnn4", "htcnn8", "resnet4", "lsa_cnn"],
        "server-epochs": ["1", "3"], "server-steps": ["0", "5"], "anchor-steps": ["0", "5"], "model-every": ["1", "2"], "warmup": ["0", "1"]}
SKIP = {"help", "data", "out", "resume", "plot-every"}
LIMITS = {"--rounds": "1", "--subset": "0.02", "--checkpoint-every": "0", "--domain-fraction": "2"}
SLOW = {"fedtgp": {"--server-epochs": "2"}, "fedlsa": {"--server-steps": "5"}, "fedplcc": {"--model": "resnet4", "--local-epochs": "1"},
        "fedfm": {"--model": "resnet4", "--local-epochs": "1", "--warmup": "0"}}


def case(rng):
    """A script and a command line with one to three flags drawn at random."""
    script = rng.choice(SCRIPTS)
    module = __import__(script)
    actions = [a for a in common.make_parser(script, "", {}, module.method_flags)._actions if a.option_strings[-1][2:] not in SKIP]
    words = {**LIMITS, **SLOW.get(script, {}), **({"--clients": "4"} if script in SCRIPTS[:3] else {})}
    if rng.random() < 0.5:
        words["--partition"] = rng.choice(["iid", "dirichlet", "pathological", "dominant", "missing", "domain"])
    for action in rng.sample(actions, rng.choice([1, 1, 2, 3])):
        flag = action.option_strings[-1]
        good = list(action.choices or []) if action.choices and flag != "--model" else GOOD.get(flag[2:], ["0", "0.5", "1", "1e-9", "1e9"])
        words[flag] = None if action.nargs == 0 else rng.choice(good if rng.random() < 0.5 else BAD)
    return script, [word for flag, value in words.items() for word in ([flag] if value is None else [f"{flag}={value}"])]


def fuzz(cases, seed=0, verbose=True):
    """-> how many cases did neither run nor end in one line that names a typed flag (status 2), or a divergence (status 1)."""
    rng, wrong, ran, refused = random.Random(seed), 0, 0, 0
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError("a minute is over")))
    for number in range(cases):
        script, words = case(rng)
        module, out, err = __import__(script), io.StringIO(), io.StringIO()
        with tempfile.TemporaryDirectory() as folder:
            fault = ""
            signal.alarm(60)  # a case that takes longer counts as wrong
            try:
                with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                    common.launch(module.main, "", module.PRESETS, module.PAPER, module.method_flags, module.settle,
                                  [*words, "--no-plots", "--out", f"{folder}/runs"])
                ran += 1
            except SystemExit as stop:
                refused += 1
                message, left = err.getvalue(), Path(folder, "runs").exists()
                if stop.code == 2:
                    typed = [flag for flag in re.findall(r"--[a-z-]+", message) if any(word.startswith(flag) for word in words)]
                    if message.count("\n") != 1 or len(message) > 600 or not typed or not re.search("must|choose|ignored|no such|leaves|domain", message):
                        fault = f"refused with {message!r}"
                    elif left:
                        fault = "left a run folder"
                elif not (isinstance(stop.code, str) and ("lower --lr" in stop.code or "no data" in stop.code or "no test images" in stop.code)):
                    fault = f"stopped with {stop.code!r}"
            except BaseException:
                fault = traceback.format_exc()
            signal.alarm(0)
        if fault:
            wrong += 1
            print(f"WRONG: {script}.py {' '.join(map(repr, words))}\n{fault}", flush=True)
        elif verbose and number % 100 == 99:
            print(f"{number + 1} cases: {ran} ran, {refused} refused, {wrong} wrong", flush=True)
    print(f"{cases} cases: {ran} ran, {refused} were refused or diverged with a message, {wrong} behaved wrongly")
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kill", "fuzz"])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    common.end_process(lambda: sys.exit(kill(args.kills, args.seed) if args.what == "kill" else fuzz(args.cases, args.seed)))
