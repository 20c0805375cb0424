"""Seconds per round of fedproto.py and fedtgp.py, beside a bare loop of the same SGD steps.

    python tests/benchmark.py                                 on glyphs
    python tests/benchmark.py --dataset cifar10 --subset 0.2  on other data

The floor is the bare loop in one thread, divided by the number of cores: forward, cross-entropy, backward and update on
the same models and batches, on images that are floats already. All take turns. The first round of each run is left out,
as it warms up.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F

import conftest  # finds the scripts
import common


def seconds_of_script(script, words, rounds):
    """Seconds of each round but the first, as the run's own log has them."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, conftest.ROOT / f"{script}.py", *words, "--rounds", str(rounds + 1)]
        subprocess.run([*command, "--no-plots", "--out", folder], check=True, stdout=subprocess.DEVNULL)
        run, = Path(folder).iterdir()
        return [row["seconds"] for row in conftest.log(run)[1:]]


def bare_epoch(client, args):
    torch.set_num_threads(1)
    extractor, classifier = client.net.extractor, client.net.classifier
    optimizer = torch.optim.SGD(client.net.parameters(), args.lr)
    for x, y in common.minibatches(client, 1, args):
        optimizer.zero_grad()
        F.cross_entropy(classifier(extractor(x)), y).backward()
        optimizer.step()
    if client.train.x.is_cuda:
        torch.cuda.synchronize()


def seconds_of_bare_loop(args, threads):
    """Seconds of one epoch over every client's images, `threads` clients at a time."""
    clients = common.make_clients(common.load_dataset(args), args)
    for client in clients:
        client.train = common.Images(client.train.x.float() / 127.5 - 1, client.train.y)
    clients.sort(key=lambda client: -len(client.train.y))
    bare_epoch(clients[0], args)  # warm up
    start = time.time()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(bare_epoch, clients, [args] * len(clients)))
    return time.time() - start


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="measured rounds in each run")
    parser.add_argument("--repetitions", type=int, default=3)
    bench, words = parser.parse_known_args()
    if "--dataset" not in words:  # the papers' setting, not that of glyphs
        words = "--subset 1 --image-size 32 --model cnn4 --local-epochs 1 --momentum 0".split() + words
    args = conftest.arguments("fedproto", *words)
    cores = 1 if torch.cuda.is_available() else os.cpu_count()

    seconds = {}
    for _ in range(bench.repetitions):
        for threads in {1, cores}:
            seconds.setdefault(f"bare loop, {threads} at a time", []).append(seconds_of_bare_loop(args, threads))
        for script in "fedproto", "fedtgp":
            for workers in {1, cores}:
                name = f"{script}.py --workers {workers}"
                measured = seconds_of_script(script, [*words, "--workers", str(workers)], bench.rounds)
                seconds.setdefault(name, []).extend(measured)

    floor = statistics.median(seconds["bare loop, 1 at a time"]) / cores
    print(f"\n| {cores} cores | s per round, median | range | ÷ floor ({floor:.2f} s) |\n|---|---|---|---|")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"| {name} | {median:.2f} | {min(values):.2f}-{max(values):.2f} | {median / floor:.2f} |")


if __name__ == "__main__":
    main()
