"""Seconds per round, as ratios measured in one run.

    python tests/benchmark.py                                 ours against a bare loop of the same SGD steps
    python tests/benchmark.py --dataset cifar10 --subset 0.2  on other data
    python tests/benchmark.py --htfllib PATH                  also against a checkout of TsingZ0/HtFLlib
                                                              (needs h5py, click, requests, higher, calmsize)

Contestants take turns. The table gives the median and the range of each one's seconds per round, without a run's first
round, which warms up, and the ratio to the floor. The bare loop does forward, cross-entropy, backward and update on the
same models and batches, on one core; the floor is its time divided by the number of cores.
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import conftest  # finds the scripts
import common

LAUNCH = """
import runpy, sys, torch
load = torch.load
torch.load = lambda *words, **more: load(*words, **{**more, 'weights_only': False})  # HtFLlib saves whole models
sys.argv[0] = 'main.py'
runpy.run_path('MAIN', run_name='__main__')"""


def ours(script, words, rounds):
    """Seconds of each round but the first, as the run's own log has them."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, conftest.ROOT / f"{script}.py", *words, "--rounds", str(rounds + 1)]
        subprocess.run([*command, "--no-plots", "--out", folder], check=True, stdout=subprocess.DEVNULL)
        run, = Path(folder).iterdir()
        return [row["seconds"] for row in conftest.log(run)][1:]


def bare_loop(args):
    """Seconds of one epoch of plain SGD steps over every client's data, one client after another."""
    clients = common.make_clients(common.load_dataset(args), args)
    for t in 1, 2:  # the first time warms up
        start = time.time()
        for client in clients:
            net = client.net
            optimizer = torch.optim.SGD(net.parameters(), args.lr)
            for x, y in common.minibatches(client, t, args):
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
        if args.device != "cpu":
            torch.cuda.synchronize()
    return time.time() - start


def write_for_htfllib(path, args):
    """Write our clients' images and labels as HtFLlib reads them -> its flags for their numbers."""
    data = common.load_dataset(args)
    clients = common.make_clients(data, args)
    for client in clients:
        for split, images in ("train", client.train), ("test", client.test):
            folder = path / "dataset" / "Ours" / split
            folder.mkdir(parents=True, exist_ok=True)
            x = (images.x / 127.5 - 1).cpu().contiguous().numpy()
            np.savez_compressed(folder / f"{client.id}.npz", data={"x": x, "y": images.y.cpu().numpy()})
    return f"-nc {len(clients)} -ncl {len(data.class_names)}"


def htfllib(path, algorithm, numbers, args, rounds):
    """Seconds of each round but the first, as HtFLlib prints them."""
    family = {"cnn4": "HtFE-img-2", "htfe8": "HtFE-img-8"}[args.model]
    main = path / "system" / "main.py"
    if args.model == "cnn4":  # HtFLlib has no family of one: keep the first, which is this CNN
        source = main.read_text()
        first = r"(FedAvgCNN\(in_features=3, num_classes=args.num_classes, dim=1600\)', # for 32x32 img\n)"
        second = r"\s*'torchvision.models.resnet18\(pretrained=False, num_classes=args.num_classes\)',"
        main = main.with_name("one_model.py")
        main.write_text(re.sub(first + second, r"\1", source, count=1))
    words = (f"-data Ours -m {family} -algo {algorithm} {numbers} -lbs {args.batch_size} -lr {args.lr} "
             f"-ls {args.local_epochs} -gr {rounds} -lam 10 -dev {args.device.split(':')[0]}")
    command = [sys.executable, "-W", "ignore", "-c", LAUNCH.replace("MAIN", main.name), *words.split()]
    done = subprocess.run(command, text=True, capture_output=True, cwd=main.parent)
    if done.returncode:
        sys.exit(f"HtFLlib failed:\n{done.stderr[-1500:]}")
    return [float(seconds) for seconds in re.findall(r"^-{50} ([\d.]+)$", done.stdout, re.M)][1:]


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--htfllib", type=Path, help="a checkout of TsingZ0/HtFLlib, which is written to")
    parser.add_argument("--rounds", type=int, default=2, help="measured rounds in each run")
    parser.add_argument("--repetitions", type=int, default=3)
    bench, words = parser.parse_known_args()
    if "--dataset" not in words:  # the papers' setting, not that of glyphs
        words = "--subset 1 --image-size 32 --model cnn4 --local-epochs 1 --momentum 0".split() + words
    args = conftest.arguments("fedproto", *words)
    cuda = args.device != "cpu"
    cores = 1 if cuda else common.cores()
    print(torch.cuda.get_device_name() if cuda else f"{cores} cores", f"torch {torch.__version__}", *words)
    if bench.htfllib:
        numbers = write_for_htfllib(bench.htfllib, args)

    rows = {}
    for _ in range(bench.repetitions):
        rows.setdefault("bare loop", []).append(bare_loop(args))
        for script, algorithm in ("fedproto", "FedProto"), ("fedtgp", "FedTGP"):
            rows.setdefault(f"{script}.py", []).extend(ours(script, words, bench.rounds))
            if bench.htfllib:
                seconds = htfllib(bench.htfllib, algorithm, numbers, args, bench.rounds)
                rows.setdefault(f"HtFLlib's {algorithm}", []).extend(seconds)

    floor = statistics.median(rows["bare loop"]) / cores
    print(f"\n| | s per round, median | range | ÷ floor ({floor:.2f} s) |\n|---|---|---|---|")
    for name, seconds in rows.items():
        middle = statistics.median(seconds)
        print(f"| {name} | {middle:.2f} | {min(seconds):.2f}-{max(seconds):.2f} | {middle / floor:.2f} |")


if __name__ == "__main__":
    main()
