"""Seconds per round, as ratios measured in one run.

    python tests/benchmark.py                                 ours against a bare loop of the same SGD steps
    python tests/benchmark.py --dataset cifar10 --subset 0.2  on other data
    python tests/benchmark.py --htfllib PATH                  also against a checkout of TsingZ0/HtFLlib
                                                              (needs h5py, click, requests, higher, calmsize)

Contestants take turns; the table gives the median and the range of each one's seconds per round (without the
first of every run, which warms up) and its ratio to the floor, the bare loop of one thread divided by the
cores: forward, cross-entropy, backward and update on the same models and batches, images already floats.
"""

import argparse, csv, os, re, statistics, subprocess, sys, tempfile, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import conftest  # finds the scripts
import common

# HtFLlib as it is, but that today's torch.load refuses pickled models unless told to trust them
LAUNCH = """import torch, runpy, sys; load = torch.load
torch.load = lambda *a, **k: load(*a, **{**k, 'weights_only': False})
sys.argv[0] = 'main.py'; runpy.run_path('MAIN', run_name='__main__')"""

def ours(script, words, rounds):
    """Seconds of each round but the first, as the run's own log has them."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, conftest.ROOT / f"{script}.py", *words, "--rounds", str(rounds + 1)]
        subprocess.run([*command, "--no-plots", "--out", folder], check=True, stdout=subprocess.DEVNULL)
        with open(next(Path(folder).glob("*/log.csv"))) as file:
            return [float(row["seconds"]) for row in csv.DictReader(file)][1:]

def bare_loop(args, threads):
    """Seconds of one epoch of plain SGD steps over every client's data, with `threads` clients at a time."""
    clients = common.make_clients(common.load_dataset(args), args)
    for client in clients:
        client.train = common.Images(client.train.x.float().div(127.5).sub(1), client.train.y)

    def epoch(client):
        torch.set_num_threads(1)
        extractor, classifier = client.net.extractor, client.net.classifier
        optimizer = torch.optim.SGD(client.net.parameters(), args.lr)
        for x, y in common.minibatches(client, 1, args):
            optimizer.zero_grad()
            F.cross_entropy(classifier(extractor(x)), y).backward()
            optimizer.step()
        if client.train.x.is_cuda:
            torch.cuda.synchronize()
    epoch(clients[0])  # warm up
    start = time.time()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(epoch, sorted(clients, key=lambda client: -len(client.train.y))))
    return time.time() - start

def write_for_htfllib(path, args):
    """Our clients' images and labels as HtFLlib reads them -> (number of clients, number of classes)."""
    data = common.load_dataset(args)
    clients = common.make_clients(data, args)
    for split in ("train", "test"):
        folder = path / "dataset" / "Ours" / split
        folder.mkdir(parents=True, exist_ok=True)
        for client in clients:
            x, y = getattr(client, split)
            arrays = {"x": x.float().div(127.5).sub(1).cpu().contiguous().numpy(), "y": y.cpu().numpy()}
            np.savez_compressed(folder / f"{client.id}.npz", data=arrays)
    return len(clients), len(data.class_names)

def htfllib(path, algorithm, clients, classes, args, rounds):
    """Seconds of each round but the first, as HtFLlib prints them."""
    family, main = {"cnn4": "HtFE-img-2", "htfe8": "HtFE-img-8"}[args.model], "main.py"
    if args.model == "cnn4":  # HtFLlib has no family of one: keep the first, which is this CNN
        main, source = "one_model.py", (path / "system" / "main.py").read_text()
        first = r"(FedAvgCNN\(in_features=3, num_classes=args.num_classes, dim=1600\)', # for 32x32 img\n)"
        second = r"\s*'torchvision.models.resnet18\(pretrained=False, num_classes=args.num_classes\)',"
        (path / "system" / main).write_text(re.sub(first + second, r"\1", source, count=1))
    words = (f"-data Ours -m {family} -algo {algorithm} -nc {clients} -ncl {classes} -lbs {args.batch_size} "
             f"-lr {args.lr} -ls {args.local_epochs} -gr {rounds} -lam 10 -dev {args.device.split(':')[0]}")
    command = [sys.executable, "-W", "ignore", "-c", LAUNCH.replace("MAIN", main), *words.split()]
    done = subprocess.run(command, text=True, capture_output=True, cwd=path / "system")
    if done.returncode:
        sys.exit(f"HtFLlib failed:\n{done.stderr[-1500:]}")
    return [float(seconds) for seconds in re.findall(r"^-{50} ([\d.]+)$", done.stdout, re.M)][1:]

def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--htfllib", type=Path, help="a checkout of TsingZ0/HtFLlib, which is written to")
    parser.add_argument("--rounds", type=int, default=2, help="measured rounds in each run")
    parser.add_argument("--repetitions", type=int, default=3)
    bench, words = parser.parse_known_args()
    if "--dataset" not in words:  # the papers' setting, not this dataset's defaults
        words = "--subset 1 --image-size 32 --model cnn4 --local-epochs 1 --momentum 0".split() + words
    args, cores, cuda = conftest.arguments("fedproto", *words), os.cpu_count(), torch.cuda.is_available()
    print(torch.cuda.get_device_name() if cuda else f"{cores} cores", f"torch {torch.__version__}", *words)
    rows, sizes = {}, write_for_htfllib(bench.htfllib, args) if bench.htfllib else ()
    for _ in range(bench.repetitions):
        for threads in {1} if cuda else {1, cores}:
            rows.setdefault(f"bare loop, {threads} at a time", []).append(bare_loop(args, threads))
        for script, algorithm in (("fedproto", "FedProto"), ("fedtgp", "FedTGP")):
            for extra in ("",) if cuda else ("--workers 1", ""):
                seconds = ours(script, [*words, *extra.split()], bench.rounds)
                rows.setdefault(f"{script}.py {extra}", []).extend(seconds)
            if bench.htfllib:
                seconds = htfllib(bench.htfllib, algorithm, *sizes, args, bench.rounds)
                rows.setdefault(f"HtFLlib's {algorithm}", []).extend(seconds)
    floor = statistics.median(rows["bare loop, 1 at a time"]) / (1 if cuda else cores)
    print(f"\n| | s per round, median | range | ÷ floor ({floor:.2f} s) |\n|---|---|---|---|")
    for name, values in rows.items():
        middle = statistics.median(values)
        print(f"| {name} | {middle:.2f} | {min(values):.2f}-{max(values):.2f} | {middle / floor:.2f} |")

if __name__ == "__main__":
    main()
