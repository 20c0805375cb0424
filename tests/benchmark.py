"""Seconds per round, as ratios measured in one run.

    python tests/benchmark.py                                   ours against a bare loop of the same SGD steps, on glyphs
    python tests/benchmark.py --dataset cifar10 --subset 0.2    on other data
    python tests/benchmark.py --htfllib PATH                    also against a checkout of TsingZ0/HtFLlib (which imports h5py, click,
                                                                requests, higher and calmsize; minutes per repetition on two cores)
    python tests/benchmark.py --growth                          seconds per round for 10 to 200 clients

Contestants take turns, --repetitions times; the table gives the median and the spread of each one's seconds per round (the
first round of every run, which warms up, is left out), its ratio to the bare loop of one thread divided by the cores, and
the peak memory of its process. The bare loop is the floor: forward, cross-entropy, backward, update on the same models and
batches, data normalised beforehand, and nothing else. On CUDA also: without graphs, and how busy the GPU was.
"""

import argparse
import csv
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import common  # noqa: E402
import fedproto  # noqa: E402

# HtFLlib as it is, but that today's torch.load refuses pickled models unless told to trust them
LAUNCH = "import torch, runpy, sys; load = torch.load; torch.load = lambda *a, **k: load(*a, **{**k, 'weights_only': False}); " \
         "sys.argv[0] = 'main.py'; runpy.run_path('main.py', run_name='__main__')"


def peak_memory():
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


def ours(script, words, rounds, busy=None):
    """Seconds of each round but the first, as the run's own log has them; on CUDA, the share of time in which a kernel ran,
    sampled from the end of the first round on, is added to the list `busy`."""
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.Popen([sys.executable, ROOT / f"{script}.py", *words, "--rounds", str(rounds + 1), "--no-plots", "--out", folder],
                               stdout=subprocess.PIPE, text=True)
        next((line for line in run.stdout if line.startswith("round ")), None)
        smi = busy is not None and subprocess.Popen(["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100"],
                                                    stdout=subprocess.PIPE, text=True)
        for line in run.stdout:
            if smi and line.startswith("best "):
                smi.terminate()
        if run.wait():
            sys.exit(f"{script}.py {' '.join(words)} failed")
        if smi:
            busy.extend(float(line) for line in smi.communicate()[0].split())
        with open(next(Path(folder).glob("*/log.csv"))) as file:
            return [float(row["seconds"]) for row in csv.DictReader(file)][1:]


def bare_loop(words, threads):
    """Seconds of one epoch of plain SGD steps over every client's data, with `threads` clients at a time."""
    args = common.parse("fedproto", "", fedproto.PRESETS, [], fedproto.method_flags, fedproto.settle, words)
    clients = common.make_clients(args)
    for client in clients:
        client.train = common.Samples(client.train.x.float().div(127.5).sub(1).contiguous(), client.train.y)
        client.net.to(memory_format=torch.contiguous_format)

    def epoch(client):
        torch.set_num_threads(1)
        extractor, classifier = client.net.extractor, client.net.classifier
        optimizer = torch.optim.SGD(client.net.parameters(), args.lr)
        for batch in common.minibatches(client.train.y, args.batch_size, args.local_epochs, common.generator(0, "batches", client.id)):
            optimizer.zero_grad()
            F.cross_entropy(classifier(extractor(client.train.x[batch])), client.train.y[batch]).backward()
            optimizer.step()
        if client.train.x.is_cuda:
            torch.cuda.synchronize()
    epoch(clients[0])  # warm up
    start = time.time()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(epoch, sorted(clients, key=lambda c: -len(c.train.y))))
    return time.time() - start


def write_for_htfllib(path, words):
    """Our clients' images and labels as HtFLlib reads them -> (number of clients, number of classes)."""
    import numpy as np
    args = common.parse("fedproto", "", fedproto.PRESETS, [], fedproto.method_flags, fedproto.settle, words)
    clients = common.make_clients(args)
    for split in ("train", "test"):
        folder = path / "dataset" / "Ours" / split
        folder.mkdir(parents=True, exist_ok=True)
        for client in clients:
            x, y = getattr(client, split)
            data = {"x": x.float().div(127.5).sub(1).cpu().contiguous().numpy(), "y": y.cpu().numpy()}
            np.savez_compressed(folder / f"{client.id}.npz", data=data)
    return len(clients), args.classes


def htfllib(path, algorithm, clients, classes, words, rounds):
    """Seconds of each round but the first, as HtFLlib prints them."""
    values = common.parse("fedproto", "", fedproto.PRESETS, [], fedproto.method_flags, fedproto.settle, words)
    family = {"cnn4": "HtFE-img-2", "htfe8": "HtFE-img-8"}[values.model]
    launch = LAUNCH
    if values.model == "cnn4":  # HtFLlib has no family of one: keep the first, which is this CNN
        source = (path / "system" / "main.py").read_text()
        source = re.sub(r"(FedAvgCNN\(in_features=3, num_classes=args.num_classes, dim=1600\)', # for 32x32 img\n)\s*'torchvision.models.resnet18\(pretrained=False, "
                        r"num_classes=args.num_classes\)',", r"\1", source, count=1)
        (path / "system" / "one_model.py").write_text(source)
        launch = LAUNCH.replace("run_path('main.py'", "run_path('one_model.py'")
    output = subprocess.run([sys.executable, "-c", launch, "-data", "Ours", "-m", family, "-algo", algorithm, "-nc", str(clients), "-ncl", str(classes),
                             "-lbs", str(values.batch_size), "-lr", str(values.lr), "-ls", str(values.local_epochs), "-gr", str(rounds), "-lam", "10",
                             "-dev", values.device.split(":")[0]], cwd=path / "system", capture_output=True, text=True,
                            env={**os.environ, "PYTHONWARNINGS": "ignore"})
    if output.returncode:
        sys.exit(f"HtFLlib failed:\n{output.stderr[-1500:]}")
    return [float(seconds) for seconds in re.findall(r"^-{50} ([\d.]+)$", output.stdout, re.M)][1:]


def table(rows, floor):
    print(f"\n| | s per round, median | smallest-largest | ÷ floor ({floor:.2f} s) |\n|---|---|---|---|")
    for name, values in rows.items():
        middle = statistics.median(values)
        print(f"| {name} | {middle:.2f} | {min(values):.2f}-{max(values):.2f} | {middle / floor:.2f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--htfllib", type=Path, help="a checkout of TsingZ0/HtFLlib, which is written to")
    parser.add_argument("--rounds", type=int, default=2, help="measured rounds in each run")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--growth", action="store_true", help="how seconds per round grow with the number of clients")
    bench, words = parser.parse_known_args()
    cores, cuda = common.cores(), torch.cuda.is_available()
    if "--dataset" not in words:  # the papers' setting, not the preset's
        words = ["--dataset", "glyphs", "--subset", "1", "--image-size", "32", "--model", "cnn4", "--local-epochs", "1", "--momentum", "0", *words]
    machine = torch.cuda.get_device_name() if cuda else f"{cores} cores"
    print(f"{machine}, torch {torch.__version__}; settings: {' '.join(words)}")

    if bench.growth:
        print("\n| clients | s per round, fixed total data | s per round, fixed data per client |\n|---|---|---|")
        for clients in (10, 20, 50, 100, 200):
            row = []
            for share in (1.0, clients / 200):
                seconds = ours("fedproto", [*words, "--partition", "iid", "--clients", str(clients), "--subset", str(share)], bench.rounds)
                row.append(f"{statistics.median(seconds):.2f}")
            print(f"| {clients} | {row[0]} | {row[1]} |", flush=True)
        return

    rows, memory, busy = {}, {}, {}
    if bench.htfllib:
        clients, classes = write_for_htfllib(bench.htfllib, words)
    for _ in range(bench.repetitions):
        floor = rows.setdefault("bare loop, 1 thread", [])
        floor.append(bare_loop(words, 1))
        if not cuda and cores > 1:
            rows.setdefault(f"bare loop, {cores} single-threaded workers", []).append(bare_loop(words, cores))
        for script, algorithm in (("fedproto", "FedProto"), ("fedtgp", "FedTGP")):
            for name, extra in {"workers 1": ["--workers", "1"], "workers auto": [], **({"no graph": ["--no-graph"]} if cuda else {})}.items():
                rows.setdefault(f"{script}.py, {name}", []).extend(
                    ours(script, [*words, *extra], bench.rounds, busy.setdefault(f"{script}.py, {name}", []) if cuda else None))
            memory[script] = peak_memory()
            if bench.htfllib:
                rows.setdefault(f"HtFLlib {algorithm}", []).extend(htfllib(bench.htfllib, algorithm, clients, classes, words, bench.rounds))
    table(rows, statistics.median(rows["bare loop, 1 thread"]) / (1 if cuda else cores))
    for script, algorithm in (("fedproto", "FedProto"), ("fedtgp", "FedTGP")):
        if bench.htfllib:
            ratios = [h / o for h, o in zip(rows[f"HtFLlib {algorithm}"], rows[f"{script}.py, workers auto"])]
            print(f"{script}.py is {statistics.median(ratios):.2f} times as fast as HtFLlib's {algorithm} ({min(ratios):.2f}-{max(ratios):.2f})")
    for name, values in busy.items():
        print(f"{name}: the GPU was busy {statistics.mean(values):.0f} % of the time" if values else f"{name}: too short to sample the GPU")
    print("largest process so far, MB:", json.dumps({k: round(v) for k, v in memory.items()}))


if __name__ == "__main__":
    main()
