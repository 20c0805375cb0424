"""What the six method scripts share: data, partitions, models, local training, evaluation, run folder, command line.

No method lives here. The sections follow the order in which data flows:

    randomness, processes -> datasets -> partitions -> models -> local training, CUDA graphs, clients side by side -> evaluation
    -> run folder, pictures, comparing runs -> command line

Shapes in docstrings: N images, K clients, C classes, D features, B images in a batch.
"""

import argparse
import collections
import contextlib
import copy
import csv
import functools
import hashlib
import io
import itertools
import json
import math
import os
import re
import shlex
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


# ---------------------------------------------------------------------------------------------------- randomness
# Every random choice is a function of (seed, purpose, round, client), never of a shared generator's state, so neither
# the number of workers nor the order in which clients finish can change a result.

def generator(seed, purpose, *where):
    """A numpy generator of its own for one purpose, e.g. `generator(args.seed, "batches", round, client)`."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), *where])


def seeded(make, seed, purpose, *where):
    """`make()` with torch's generator seeded for one purpose; the global generator's state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(generator(seed, purpose, *where).integers(2**62)))
        return make()


# --------------------------------------------------------------------------------------------- several processes
# Under torchrun every rank runs the same script: client i trains on rank i mod n, what clients send is gathered by all ranks,
# and each computes the same server step. Rank 0 prints and writes.

RANKS = int(os.environ.get("WORLD_SIZE", 1))
RANK = int(os.environ.get("RANK", 0)) if RANKS > 1 else 0


def join_ranks(args):
    """Join torchrun's group of processes: NCCL on GPUs (each rank takes its own), Gloo on CPU."""
    if RANKS > 1 and not torch.distributed.is_initialized():
        if args.device.startswith("cuda"):
            args.device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(args.device)
        torch.distributed.init_process_group("nccl" if args.device.startswith("cuda") else "gloo")
        if RANK > 0:
            sys.stdout = open(os.devnull, "w")


def deal_out(items):
    """This rank's share of a list: every n-th item."""
    return items[RANK::RANKS]


def gather(mine, device):
    """The lists of all ranks, each dealt out by `deal_out`, put together again in order."""
    if RANKS == 1:
        return mine
    packed, everyone = io.BytesIO(), [None] * RANKS
    torch.save(mine, packed)
    torch.distributed.all_gather_object(everyone, packed.getvalue())
    shares = [torch.load(io.BytesIO(share), map_location=device, weights_only=True) for share in everyone]
    return [share[k] for k in range(max(map(len, shares))) for share in shares if k < len(share)]


# ------------------------------------------------------------------------------------------------------ datasets

class Dataset(NamedTuple):
    x: torch.Tensor       # (N, channels, height, width) uint8
    y: torch.Tensor       # (N,) int64, the class
    domain: torch.Tensor  # (N,) int64
    test: torch.Tensor    # (N,) bool: belongs to the published test split
    classes: list         # C names
    domains: list         # names; one entry where the set has no domains


class Samples(NamedTuple):
    x: torch.Tensor       # (n, channels, height, width) uint8, on the device
    y: torch.Tensor       # (n,) int64, on the device


# name -> torchvision class, images (train + test), classes, side in pixels
TORCHVISION = {"cifar10": ("CIFAR10", 60000, 10, 32), "cifar100": ("CIFAR100", 60000, 100, 32),
               "mnist": ("MNIST", 70000, 10, 28), "fmnist": ("FashionMNIST", 70000, 10, 28),
               "flowers102": ("Flowers102", 8189, 102, 64), "usps": ("USPS", 9298, 10, 16), "svhn": ("SVHN", 99289, 10, 32)}
FOLDER_SIZES = {"tinyimagenet": 64, "cinic10": 32, "digits": 32, "digit5": 64, "office": 64, "pacs": 64, "domainnet": 64}
IMAGE_ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
LAYOUT = "{0}/train/<class>/*.png and {0}/test/<class>/*.png, or with domains {0}/<domain>/{{train,test}}/<class>/*.png"


def load_dataset(args):
    """The whole dataset as one uint8 tensor on the CPU: embedded, from an image folder, or downloaded by torchvision.

    Raises SystemExit 1 (with the folder looked at, the layout wanted and what to try) where there is no data."""
    folder = Path(args.data, args.dataset)
    if args.dataset == "glyphs":
        data = glyphs(args.image_size or 32)
    elif folder.is_dir():
        size = args.image_size or FOLDER_SIZES.get(args.dataset) or (TORCHVISION.get(args.dataset) or [32])[-1]
        data = image_folder(folder, size)
    elif args.dataset in TORCHVISION:
        data = torchvision_dataset(args.dataset, Path(args.data, "torchvision"), folder, args.image_size)
    elif args.dataset == "digits":
        data = downloaded_digits(Path(args.data, "torchvision"), folder, args.image_size or 32)
    else:
        sys.exit(f"no data: looked for the folder {folder}\n  wanted: {LAYOUT.format(folder)}\n"
                 "  try: --data FOLDER if it lies elsewhere, or --dataset glyphs, which needs no files")
    if args.subset < 1:
        keep = generator(args.seed, "subset").permutation(len(data.y))[:max(2, round(args.subset * len(data.y)))]
        keep = torch.from_numpy(np.sort(keep))
        data = data._replace(x=data.x[keep], y=data.y[keep], domain=data.domain[keep], test=data.test[keep])
    return data


def torchvision_dataset(name, root, folder, size=None):
    """Download (once) and read one of torchvision's datasets. Raises SystemExit 1 without data and network."""
    import torchvision
    kind = getattr(torchvision.datasets, TORCHVISION[name][0])
    size = size or TORCHVISION[name][3]
    splits = {"flowers102": [{"split": "train"}, {"split": "val"}, {"split": "test"}],
              "svhn": [{"split": "train"}, {"split": "test"}]}.get(name, [{"train": True}, {"train": False}])
    try:
        parts = [kind(root, download=True, **split) for split in splits]
    except Exception as error:  # torchvision raises URLError, RuntimeError, ConnectionError ... by dataset and version
        sys.exit(f"no data: {name} is neither in {folder} nor in {root}, and the download failed ({error})\n"
                 f"  wanted: {LAYOUT.format(folder)}\n  try: --dataset glyphs, which needs no download")
    label = next(key for key in ("targets", "labels", "_labels") if hasattr(parts[0], key))
    y = torch.cat([torch.as_tensor(getattr(part, label)) for part in parts]).long()
    test = torch.cat([torch.full((len(part),), part is parts[-1]) for part in parts])
    if hasattr(parts[0], "data"):
        x = torch.cat([torch.as_tensor(np.asarray(part.data)) for part in parts])
        x = x.unsqueeze(1) if x.ndim == 3 else x if name == "svhn" else x.permute(0, 3, 1, 2)  # grey images have one channel
        if x.shape[-1] != size:
            x = torch.cat([F.interpolate(part.float(), size=(size, size), mode="bilinear", antialias=True).round().byte()
                           for part in x.split(1000)])
    else:  # files, decoded on access
        def read():
            print(f"decoding the images of {name} (once) ...", flush=True)
            images = [np.asarray(image.convert("RGB").resize((size, size))) for part in parts for image, _ in part]
            return [torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)]
        x, = cached(root / f"{name}-{size}px.pt", f"{name} {size}", read)
    classes = getattr(parts[0], "classes", None) or [str(c) for c in range(int(y.max()) + 1)]
    return Dataset(x, y, torch.zeros_like(y), test, list(classes), [name])


def downloaded_digits(root, folder, size):
    """MNIST, USPS, SVHN (downloaded) and SYN, 25,000 coloured digits that we render, as four domains in colour."""
    parts = [torchvision_dataset(name, root, folder, size) for name in ("mnist", "usps", "svhn")]
    x, = cached(root / f"syn-{size}px.pt", "syn", lambda: [torch.cat([render("clutter", 2500, size, 100 + k) for k in range(10)])])
    index = torch.arange(len(x))
    parts.append(Dataset(x, index % 10, None, index // 10 % 5 == 4, None, None))
    return Dataset(torch.cat([part.x.expand(-1, 3, -1, -1) for part in parts]), torch.cat([part.y for part in parts]),
                   torch.arange(4).repeat_interleave(torch.tensor([len(part.y) for part in parts])),
                   torch.cat([part.test for part in parts]), [str(d) for d in range(10)], ["mnist", "usps", "svhn", "syn"])


def image_folder(folder, size):
    """Read an image folder: RGB, resized to size x size. Layouts: {train,test}/<class>/, <domain>/{train,test}/<class>/,
    <domain>/<class>/ or <class>/; where there is no train/test we split 80/20 ourselves, by a fixed shuffle.

    Decoded once; later starts read the tensors from `<folder>-<size>px.pt` beside the folder, which is rebuilt when any
    file's name, size or time has changed. Raises SystemExit 1 naming the file that cannot be decoded."""
    files = []  # (path, domain, split, class); a split of None means that we split
    def subfolders(path):
        return sorted((p for p in path.iterdir() if p.is_dir() and not p.name.startswith(".")), key=natural)
    def add(path, domain, split):
        for kind in subfolders(path):
            files.extend((entry, domain, split, kind.name) for entry in sorted(os.scandir(kind), key=lambda e: e.name)
                         if os.path.splitext(entry.name)[1].lower() in IMAGE_ENDINGS and entry.is_file() and not entry.name.startswith("."))
    def add_domain(path, domain):
        if (path / "train").is_dir() or (path / "test").is_dir():
            for split in ("train", "test"):
                if (path / split).is_dir():
                    add(path / split, domain, split)
            for other in {entry.name for entry in subfolders(path)} - {"train", "test"}:
                print(f"note: {path / other} is not read, only train and test are")
        else:
            add(path, domain, None)
    add_domain(folder, folder.name)
    if not files:
        for path in subfolders(folder):
            add_domain(path, path.name)
    if not files:
        sys.exit(f"no images in {folder}\n  wanted: {LAYOUT.format(folder)}\n  try: --dataset glyphs, which needs no files")
    domains = list(dict.fromkeys(f[1] for f in files))
    classes = sorted({f[3] for f in files}, key=natural)
    digest = hashlib.sha256(repr((size, folder.name)).encode())
    for entry, *rest in files:
        stat = entry.stat()
        digest.update(repr((entry.name, rest, stat.st_size, stat.st_mtime_ns)).encode())
    cache = folder.with_name(f"{folder.name}-{size}px.pt")
    from PIL import Image

    def decode(entry):
        try:
            with Image.open(entry.path) as image:
                return np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))
        except Exception as error:
            raise ValueError(f"cannot decode {entry.path}: {error}") from None

    def read():
        print(f"decoding {len(files)} images of {folder} (once; kept in {cache}) ...", flush=True)
        with threads(cores()) as pool:
            pixels = np.stack(list(pool.map(decode, (f[0] for f in files))))
        ours = generator(0, "split").random(len(files)) < 0.2
        return (torch.from_numpy(pixels).permute(0, 3, 1, 2), torch.tensor([classes.index(f[3]) for f in files]),
                torch.tensor([domains.index(f[1]) for f in files]),
                torch.tensor([f[2] == "test" or (f[2] is None and bool(o)) for f, o in zip(files, ours)]))

    try:
        return Dataset(*cached(cache, digest.hexdigest(), read), classes, domains)
    except ValueError as error:
        sys.exit(f"{error}\n  remove or replace that file, then start again; nothing was cached")


def cached(path, digest, make):
    """The tensors that `make()` returns, kept in a file and read from there as long as the digest is the same."""
    try:
        stored = torch.load(path, weights_only=True)
        if stored["digest"] == digest:
            return stored["tensors"]
    except Exception:  # absent, truncated or foreign: make them again
        pass
    tensors = make()
    scratch = path.with_suffix(f".{os.getpid()}")
    try:
        with uninterrupted():
            torch.save({"digest": digest, "tensors": tensors}, scratch)
            os.replace(scratch, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        scratch.unlink(missing_ok=True)
        print(f"note: the decoded images could not be kept ({error}); the next start decodes again")
    return tensors


def natural(path):
    """Sort key that puts 2 before 10."""
    return [(0, int(s), "") if s.isdigit() else (1, 0, s) for s in re.split(r"(\d+)", str(getattr(path, "name", path))) if s]


GLYPH_FONTS = ("DejaVuSans DejaVuSans-Bold DejaVuSans-Oblique DejaVuSansMono DejaVuSansMono-Bold DejaVuSerif DejaVuSerif-Bold "
               "DejaVuSerif-Italic STIXGeneral STIXGeneralBol STIXGeneralItalic cmr10 cmb10 cmss10 cmtt10 cmti10").split()
GLYPH_DOMAINS = ["plain", "thin", "texture", "clutter"]


@functools.cache  # --trials draws them once
def glyphs(size=32):
    """Digits rendered from the fonts that matplotlib ships, in four domains of growing difficulty: `plain` (dark ink on
    paper), `thin` (thin strokes at a third of the resolution), `texture` (light ink on gratings and noise) and `clutter`
    (coloured, blurred, between pieces of other digits). 200 images per class and domain, every fourth one a test image;
    the same images on every call (no seed)."""
    ink()
    with threads(cores(), lambda: torch.set_num_threads(1)) as pool:  # the slowest first
        x = torch.cat(list(pool.map(lambda kind: render(kind, 2000, size), GLYPH_DOMAINS[::-1]))[::-1])
    index = torch.arange(len(x))
    return Dataset(x, index % 10, index // 2000, index // 10 % 4 == 3, [str(d) for d in range(10)], GLYPH_DOMAINS)


@functools.cache
def ink(side=64):
    """The ten digits in every font, as ink in [0, 1], (fonts, 10, side, side)."""
    from matplotlib import get_data_path
    from PIL import Image, ImageDraw, ImageFont
    images = []
    for name in GLYPH_FONTS:
        font = ImageFont.truetype(str(Path(get_data_path(), "fonts", "ttf", name + ".ttf")), round(0.85 * side))
        for digit in "0123456789":
            left, top, right, bottom = font.getbbox(digit)
            image = Image.new("L", (side, side))
            ImageDraw.Draw(image).text(((side - right - left) / 2, (side - bottom - top) / 2), digit, fill=255, font=font)
            images.append(np.asarray(image, np.float32) / 255)
    return torch.from_numpy(np.stack(images)).view(-1, 10, side, side)


def render(kind, n, size=32, seed=0):
    """n images of one glyph domain, (n, 3, size, size) uint8, of the classes 0, 1, ..., 9, 0, 1, ..."""
    side, rng = 64, torch.Generator().manual_seed(seed + GLYPH_DOMAINS.index(kind))
    digit, ramp = torch.arange(n) % 10, torch.linspace(-1, 1, side)

    def uniform(low, high, *shape):
        return torch.rand(n, *shape, generator=rng) * (high - low) + low

    def tone(low, high, channels=1):
        return uniform(low, high, channels, 1, 1).expand(-1, -1, side, side)

    def draw(digit, rotation, dx, dy, low=0.75, high=1.1):
        """Digits (n,) in random fonts and poses, (n, 1, side, side)."""
        font = torch.randint(len(GLYPH_FONTS), (n,), generator=rng)
        angle, shear, zoom = uniform(-rotation, rotation), uniform(-0.25, 0.25), 1 / uniform(low, high, 2)
        theta = torch.stack([zoom[:, 0] * angle.cos(), zoom[:, 0] * (shear - angle.sin()), dx,
                             zoom[:, 1] * angle.sin(), zoom[:, 1] * angle.cos(), dy], 1).view(n, 2, 3)
        grid = F.affine_grid(theta, (n, 1, side, side), align_corners=False)
        return F.grid_sample(ink()[font, digit].unsqueeze(1), grid, align_corners=False)

    def noise(cells, channels=1):
        """Smooth noise around 0 with the given number of cells per side."""
        return F.interpolate(uniform(-0.5, 0.5, channels, cells, cells), size=(side, side), mode="bilinear", align_corners=False)

    shift = uniform(-0.15, 0.15), uniform(-0.15, 0.15)
    if kind == "plain":
        image = tone(0.8, 1.0) - tone(0.5, 0.8) * draw(digit, 0.2, *shift)
    elif kind == "thin":
        eroded = -F.max_pool2d(-draw(digit, 0.35, *shift), 2, stride=1)
        image = tone(0.6, 0.9) - tone(0.5, 0.8) * F.interpolate(F.adaptive_avg_pool2d(eroded, (11, 11)), size=(side, side))
    elif kind == "texture":
        angle, wave, phase = tone(0, 2 * math.pi), tone(6, 20), tone(0, 2 * math.pi)
        grating = torch.sin(wave * (ramp * angle.cos() + ramp[:, None] * angle.sin()) + phase)
        image = torch.lerp(0.3 + 0.15 * grating + 0.4 * noise(6), tone(0.65, 0.95), draw(digit, 0.35, *shift))
    else:
        ground, colour = tone(0, 1, 3), tone(0, 1, 3)
        contrast = (ground[..., :1, :1] - colour[..., :1, :1]).mean(1, keepdim=True)  # at least 0.3 in brightness, by moving the ink away
        colour = (colour[..., :1, :1] - contrast.sign() * (0.3 - contrast.abs()).clamp(min=0)).clamp(0, 1)
        image = noise(5, 3).mul_(0.35).add_(ground)  # in place: the tensors are large
        for _ in range(2):
            angle, other = uniform(0, 2 * math.pi), torch.randint(10, (n,), generator=rng)
            image.lerp_(tone(0, 1, 3), 0.8 * draw(other, 1.0, 1.1 * angle.cos(), 1.1 * angle.sin()))
        image.lerp_(colour, draw(digit, 0.5, *shift, 0.65, 1.0))
        for _ in range(2):
            image = F.avg_pool2d(image, 5, 1, 2, count_include_pad=False)
    image = F.interpolate(image, size=(size, size), mode="bilinear", antialias=True)
    image += 0.04 * torch.randn(n, 1, size, size, generator=rng)
    return image.clamp_(0, 1).mul_(255).round_().byte().expand(-1, 3, -1, -1)


# ---------------------------------------------------------------------------------------------------- partitions
# Each takes the labels (N,) as numpy and returns a list of K index arrays, disjoint; `rng` is a numpy generator.

def iid(y, clients, rng):
    """Shuffled, equal shares."""
    return np.array_split(rng.permutation(len(y)), clients)


def dirichlet(y, clients, beta, minimum, rng, tries=100):
    """Per class, proportions over clients ~ Dir(beta), zero for clients that already hold >= N/K samples (FedTGP's and
    FedSA's "practical" setting). Redrawn up to `tries` times until everyone has `minimum` samples, then topped up."""
    owner = sizes = None
    for _ in range(tries):
        drawn, held = np.empty(len(y), int), np.zeros(clients, int)
        for c in np.unique(y):
            index = rng.permutation(np.flatnonzero(y == c))
            share = rng.dirichlet(np.full(clients, beta)) * (held < len(y) / clients)
            if not share.sum() > 0:  # with a tiny beta the draw can sit on clients that are full
                share = held < len(y) / clients
            cuts = np.round(np.cumsum(share / share.sum())[:-1] * len(index)).astype(int)
            counts = np.diff([0, *cuts, len(index)])
            drawn[index] = np.repeat(np.arange(clients), counts)
            held += counts
        if owner is None or held.min() > sizes.min():
            owner, sizes = drawn, held
        if sizes.min() >= minimum:
            break
    return top_up(np.split(np.argsort(owner, kind="stable"), np.cumsum(sizes)[:-1]), minimum, rng)


def pathological(y, clients, classes_per_client, minimum, rng):
    """`classes_per_client` classes each; a class's samples are split at random, unbalanced points among its owners. Every
    class is owned by someone when K * classes_per_client >= C."""
    classes = np.unique(y)
    owners = {c: [] for c in classes}
    for client in range(clients):  # the least owned classes first, ties at random: balanced, distinct, covering
        order = np.lexsort((rng.random(len(classes)), [len(owners[c]) for c in classes]))
        for c in classes[order[:classes_per_client]]:
            owners[c].append(client)
    parts = [[np.empty(0, int)] for _ in range(clients)]
    for c, holders in owners.items():
        index = rng.permutation(np.flatnonzero(y == c))
        if holders:
            floor = min(-(-minimum // classes_per_client), len(index) // len(holders))
            cuts = np.sort(rng.integers(0, len(index) - floor * len(holders) + 1, len(holders) - 1))
            for client, piece in zip(rng.permutation(holders), np.split(index, cuts + floor * np.arange(1, len(holders)))):
                parts[client].append(piece)
    return top_up([np.concatenate(part) for part in parts], min(2, minimum), rng)


def dominant(y, clients, share, rng):
    """FedFM's NIID-2: equal sizes; a share of client i's samples is of its dominant class i mod C, the rest equally of the
    others; where there are m = C // K > 1 classes per client, of the m classes from i·m on, so that no data is left over. As
    many samples per client as the scarcest class allows."""
    classes = np.unique(y)
    C, m = len(classes), max(1, len(classes) // clients)
    own = np.zeros((clients, C), bool)
    own[np.arange(clients)[:, None], (np.arange(clients)[:, None] * m + np.arange(m)) % C] = True
    want = np.where(own, share / m, (1 - share) / max(1, C - m)) if C > m else np.full((clients, C), 1 / C)
    have = np.array([(y == c).sum() for c in classes])
    size = min(len(y) / clients, (have / np.maximum(want.sum(0), 1e-12)).min())
    return deal(y, classes, np.floor(want * size + 1e-9).astype(int), rng)


def missing(y, clients, absent, rng):
    """FedFM's NIID-3: client i holds the classes i, i+1, ..., i+C-absent-1 (mod C), each class shared equally by its holders."""
    classes = np.unique(y)
    held = (np.arange(len(classes)) - np.arange(clients)[:, None]) % len(classes) < len(classes) - absent
    have = np.array([(y == c).sum() for c in classes])
    return deal(y, classes, held * (have // np.maximum(held.sum(0), 1)), rng)


def by_domain(y, domain, domain_of_client, amount, rng, names=None):
    """Domain skew: client i holds images of domain `domain_of_client[i]` only: a share `amount` <= 1 of that domain, or
    `amount` > 1 images of each class; disjoint within a domain. Raises ValueError where a domain has too few images; only a
    domain's single client takes, with a printed note, all there is of a class that is too scarce (Office has such)."""
    parts, taken = [], collections.Counter()
    stock = {d: rng.permutation(np.flatnonzero(domain == d)) for d in sorted(set(domain_of_client))}
    for d in domain_of_client:
        piles = [stock[d]] if amount <= 1 else [stock[d][y[stock[d]] == c] for c in np.unique(y[stock[d]])]
        size, nth, clients = round(amount * len(stock[d])) if amount <= 1 else int(amount), taken[d], domain_of_client.count(d)
        scarce = sum(size * clients > len(pile) for pile in piles)
        if amount * clients > 1 + 1e-9 if amount <= 1 else size > len(stock[d]) or scarce and clients > 1:
            have = f"{len(stock[d])} images" + (f", {min(map(len, piles))} of its scarcest class" if amount > 1 else "")
            raise ValueError(f"domain {names[d] if names else d} has {have}, too few for {clients} client{'s' * (clients > 1)} with "
                             f"{f'a share of {amount:g}' if amount <= 1 else f'{amount:g} per class'} each")
        if scarce and amount > 1:
            print(f"note: domain {names[d] if names else d} has fewer than {size} images of {scarce} classes; its client takes them all")
        parts.append(np.concatenate([pile[nth * size:(nth + 1) * size] for pile in piles]))
        taken[d] += 1
    return parts


def deal(y, classes, counts, rng):
    """Give client i `counts[i, c]` samples of the c-th class; counts (K, C)."""
    parts = [[] for _ in counts]
    for c, column in zip(classes, counts.T):
        index = rng.permutation(np.flatnonzero(y == c))
        for part, piece in zip(parts, np.split(index, np.cumsum(column))):
            part.append(piece)
    return [np.concatenate(part) for part in parts]


def top_up(parts, minimum, rng):
    """Move samples from the largest clients to those below `minimum`, and say so."""
    poor = [i for i, part in enumerate(parts) if len(part) < minimum]
    for i in poor:
        while len(parts[i]) < minimum:
            donor = max(range(len(parts)), key=lambda j: len(parts[j]))
            give = min(minimum - len(parts[i]), max(1, len(parts[donor]) - minimum))
            moved = rng.permutation(parts[donor])
            parts[i], parts[donor] = np.concatenate([parts[i], moved[:give]]), moved[give:]
    if poor:
        print(f"note: {len(poor)} of {len(parts)} clients drew fewer than {minimum} samples and were topped up from the largest")
    return parts


def check_partition(args, images, classes):
    """What flags must not ask of so many images and classes (inf where they are not known yet); exits with status 2."""
    if args.partition != "domain" and args.clients > images // 2:
        usage(f"--clients {args.clients}: must be in [1, {images // 2:.0f}], half the number of samples")
    if args.partition == "pathological" and args.classes_per_client > classes:
        usage(f"--classes-per-client {args.classes_per_client}: must be in [1, {classes}], the number of classes")
    if args.partition == "missing" and args.missing >= classes:
        usage(f"--missing {args.missing}: must be in [0, {classes - 1}], fewer than the classes")


def partition(args, y, domain, domains):
    """Split samples with labels y (N,) and domains (N,) over args.clients by args.partition -> list of K index arrays.

    Exits with status 2, naming flag, value and range, where the request cannot be met."""
    rng = generator(args.seed, "partition")
    K, classes = args.clients, len(np.unique(y))
    if args.partition == "domain":
        index = {name: d for d, name in enumerate(domains)}
        if sum((args.domain_clients or {}).values()) > len(y) // 2:
            usage(f"--domain-clients: {sum(args.domain_clients.values())} clients, must be at most {len(y) // 2}, half the number of samples")
        if args.domain_clients is None:  # client i holds domain i mod n
            assigned = [i % len(domains) for i in range(K or len(domains))]
        else:
            unknown = [name for name in args.domain_clients if name not in index]
            if unknown:
                usage(f"--domain-clients {unknown[0]}: no such domain, choose from {', '.join(domains)}, e.g. "
                      f"--domain-clients {','.join(f'{name}:1' for name in domains)}")
            assigned = [index[name] for name, n in args.domain_clients.items() for _ in range(n)]
        args.clients = len(assigned)
        if args.domain_fraction > 1 and args.domain_fraction % 1:
            usage(f"--domain-fraction {args.domain_fraction:g}: must be a share in (0, 1] or a whole number of images per class")
        try:
            return by_domain(y, domain, assigned, args.domain_fraction, rng, domains)
        except ValueError as error:
            usage(f"--domain-fraction {args.domain_fraction:g}: {error}")
    check_partition(args, len(y), classes)
    minimum = max(2, min(2 * args.batch_size, len(y) // (4 * K)))  # two batches' worth, where that leaves room for skew
    if args.partition == "iid":
        return iid(y, K, rng)
    if args.partition == "dirichlet":
        return dirichlet(y, K, args.beta, minimum, rng)
    if args.partition == "pathological":
        return pathological(y, K, args.classes_per_client, minimum, rng)
    if args.partition == "dominant":
        return dominant(y, K, args.dominant_share, rng)
    return missing(y, K, args.missing, rng)


# -------------------------------------------------------------------------------------------------------- models

RESNETS = ["resnet4", "resnet6", "resnet8", "resnet10", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
HTCNN8 = [f"htcnn8-{i}" for i in range(1, 9)]
GROUPS = {"htfe2": ["cnn4", "resnet18"],
          "htfe3": ["resnet10", "resnet18", "resnet34"],
          "htfe4": ["cnn4", "googlenet", "mobilenet_v2", "resnet18"],
          "htfe5": ["googlenet", "mobilenet_v2", "resnet18", "resnet34", "resnet50"],
          "htfe8": ["cnn4", "googlenet", "mobilenet_v2", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152"],
          "htfe9": RESNETS, "htcnn8": HTCNN8}
HTC4 = [(), (512,), (256,), (128,)]  # hidden layers of the four heterogeneous classifiers
SINGLE = ["cnn4", "lsa_cnn", *RESNETS, "googlenet", "mobilenet_v2"]
MODELS = [*SINGLE, *GROUPS, "res34-htc4", "htfe8-htc4"]


def architecture(model, client):
    """(feature extractor, hidden layers of the classifier) of client i: the (i mod X)-th of a group of X."""
    name, heads = (model[:-5], HTC4) if model.endswith("-htc4") else (model, [()])
    group = GROUPS.get(name, [name.replace("res34", "resnet34")])
    return group[client % len(group)], heads[client % len(heads)]


class Net(nn.Module):
    """A feature extractor and a classifier. Takes uint8 images (B, channels, height, width) and normalises them itself.

    `features(x)` -> (B, D), `classifier(z)` -> (B, C), `net(x)` composes them. Whatever the extractor returns is brought to
    D numbers by adaptive average pooling; with `sphere` the features are L2-normalised."""

    def __init__(self, extractor, classifier, feature_dim, mean=(0.5,), std=(0.5,), sphere=False):
        super().__init__()
        self.extractor, self.classifier, self.feature_dim, self.sphere = extractor, classifier, feature_dim, sphere
        mean, std = torch.tensor(mean).view(1, -1, 1, 1), torch.tensor(std).view(1, -1, 1, 1)
        self.register_buffer("scale", 1 / (255 * std), persistent=False)
        self.register_buffer("shift", -mean / std, persistent=False)

    def features(self, x):
        z = self.extractor(torch.addcmul(self.shift, self.scale, x.to(self.scale.dtype)))
        if z.shape[1] != self.feature_dim:
            z = F.adaptive_avg_pool1d(z, self.feature_dim)
        return F.normalize(z, dim=1) if self.sphere else z

    def forward(self, x):
        return self.classifier(self.features(x))


def convnet(channels, size, convolutions=2, hidden=(512,)):
    """[conv 5x5, ReLU, pool 2] x (1 or 2), then fully connected layers with ReLU; cnn4 is the default (McMahan et al. 2017).
    Pooling comes before the ReLU: the same function, on a quarter of the numbers."""
    layers = []
    for width in (32, 64)[:convolutions]:
        layers += [nn.Conv2d(channels, width, 5), nn.MaxPool2d(2), nn.ReLU()]
        channels, size = width, (size - 4) // 2
    layers.append(nn.Flatten())
    return nn.Sequential(*layers, *mlp([channels * size * size, *hidden]))


def mlp(widths):
    """Linear layers, each followed by a ReLU."""
    return [layer for a, b in zip(widths, widths[1:]) for layer in (nn.Linear(a, b), nn.ReLU())]


class Grey(nn.Module):
    """One-channel images to three equal channels, for the extractors that torchvision builds for colour."""

    def forward(self, x):
        return x.expand(-1, 3, -1, -1)


def feature_extractor(name, channels, size, feature_dim, small_stem=False):
    """An extractor by name, for images (B, channels, size, size) -> (B, whatever it has)."""
    if name == "cnn4":
        return convnet(channels, size)
    if name == "lsa_cnn":  # encoder to 512, projector to D
        return nn.Sequential(convnet(channels, size), nn.Linear(512, feature_dim))
    if name in HTCNN8:
        number = HTCNN8.index(name)
        return convnet(channels, size, 1 + number % 2, [(512,), (512, 512), (1024, 512), (1024, 512, 512)][number // 2])
    from torchvision import models
    if name == "googlenet":
        net = models.googlenet(weights=None, aux_logits=False, init_weights=True)
        net.dropout = net.fc = nn.Identity()
    elif name == "mobilenet_v2":
        net = models.mobilenet_v2(weights=None)
        net.classifier = nn.Identity()
    elif name in RESNETS[:4]:  # one basic block in each of the first 1, 2, 3 or 4 stages
        net = models.resnet.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1])
        for stage in range(RESNETS.index(name) + 2, 5):
            setattr(net, f"layer{stage}", nn.Identity())
        net.fc = nn.Identity()
    else:
        net = getattr(models, name)(weights=None)
        net.fc = nn.Identity()
    if small_stem and name in RESNETS:
        net.conv1, net.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return net if channels == 3 else nn.Sequential(Grey(), net)


def build_net(args, channels, size, classes, client=0, mean=(0.5,), std=(0.5,)):
    """Client i's model on args.device. The same architecture starts from the same weights, whichever client holds it."""
    name, hidden = architecture(args.model, client)

    def make():
        extractor = feature_extractor(name, channels, size, args.feature_dim, args.small_stem)
        head = nn.Sequential(*mlp([args.feature_dim, *hidden]), nn.Linear((args.feature_dim, *hidden)[-1], classes))
        return Net(extractor, head if hidden else head[0], args.feature_dim, mean, std, name == "lsa_cnn")
    net = seeded(make, args.seed, f"weights {name} {hidden}")
    return net.to(args.device, memory_format=torch.channels_last)  # convolutions are fastest there, on CPU and GPU


@dataclass
class Client:
    """One client: its data, and in a personalised method its own model."""
    id: int
    net: Net
    train: Samples
    test: Samples         # held back for its own evaluation
    test_features: torch.Tensor = None  # kept from the last evaluation until the model is trained again


def make_clients(args):
    """Load the data, divide it over args.clients, split each client's share 75/25 into train and test (as the papers of
    personalised methods do: train and test images are pooled first), and give each client its model."""
    data = load_dataset(args)
    clients, nets = hand_out(args, data, torch.arange(len(data.y)), 0.25), {}
    for client in clients:
        if client.id % RANKS != RANK:
            continue
        kind = architecture(args.model, client.id)
        if kind not in nets:
            nets[kind] = build_net(args, *data.x.shape[1:3], args.classes, client.id)
        client.net = copy.deepcopy(nets[kind])
    return clients


def make_federation(args, validation=0.0, mean=(0.5,), std=(0.5,)):
    """For methods with one global model: divide the training images over clients, keep the test images at the server.

    Returns the clients (each holding back a share `validation` of its images), the global model, whose inputs are normalised
    with mean and std per channel, and the test images, {domain: Samples}. Raises SystemExit 1 without test images."""
    data = load_dataset(args)
    clients = hand_out(args, data, torch.nonzero(~data.test).flatten(), validation)
    tests = {name: samples(data, torch.nonzero(data.test & (data.domain == d)).flatten(), args.device)
             for d, name in enumerate(data.domains) if (data.test & (data.domain == d)).any()}
    if not tests:
        sys.exit(f"{args.dataset} has no test images, which the server needs\n  wanted: {LAYOUT.format(Path(args.data, args.dataset))}")
    return clients, build_net(args, *data.x.shape[1:3], args.classes, mean=mean, std=std), tests


def hand_out(args, data, pool, share):
    """Divide the images `pool` (indices) over clients; each keeps a share of its own for testing or validation.

    Sets args.classes (C), args.class_names, args.counts (K, C), the training images per client and class, and, for the plot
    of the partition "domain", args.client_domains."""
    clients, domains_of = [], []
    for i, part in enumerate(partition(args, data.y[pool].numpy(), data.domain[pool].numpy(), data.domains)):
        if len(part) == 0:
            usage(f"--partition {args.partition}: leaves client {i} of {args.clients} without images; ask for fewer clients or more data")
        part = pool[torch.from_numpy(generator(args.seed, "train/test", i).permutation(part))]
        cut = math.ceil((1 - share) * len(part))
        domains_of.append(data.domains[int(data.domain[part[0]])])
        clients.append(Client(i, None, *(samples(data, p, args.device) for p in (part[:cut], part[cut:]))))
    args.classes, args.class_names = len(data.classes), data.classes
    args.client_domains = domains_of
    args.fingerprint = zlib.crc32(np.ascontiguousarray(data.x.numpy()), zlib.crc32(data.y.numpy()))  # so that a resumed run has the same images
    args.counts = np.stack([np.bincount(c.train.y.cpu().numpy(), minlength=args.classes) for c in clients])
    sizes, held = args.counts.sum(1), (args.counts > 0).sum(1)
    print(f"{args.dataset}: {len(data.y)} images {tuple(data.x.shape[1:])}, {args.classes} classes; {len(clients)} clients with "
          f"{sizes.min()}-{sizes.max()} training images of {held.min()}-{held.max()} classes ({partition_name(args)}), model {args.model}")
    return clients


def samples(data, index, device):
    """The images and labels at `index`, moved to the device for good."""
    return Samples(data.x[index].to(device, memory_format=torch.channels_last), data.y[index].to(device))


# ------------------------------------------------------------------------------------------------ local training

def distances(a, b):
    """Euclidean distances φ between the rows of a (n, D) and b (m, D) -> (n, m), exact also where they are small."""
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")


def participants(t, clients, args):
    """The clients of round t: a share ρ (args.participation) of all, at least one; largest first, which keeps workers busy."""
    size = max(1, round(args.participation * len(clients)))
    chosen = generator(args.seed, "participants", t).choice(len(clients), size, replace=False)
    return [clients[i] for i in sorted(chosen, key=lambda i: (-len(clients[i].train.y), i))]


def minibatches(y, batch_size, epochs, rng):
    """Index tensors over the samples with labels y (n,), on y's device, shuffled anew in each epoch.

    The last, smaller batch is used too (much published code drops it). BatchNorm cannot train on a single image, so one
    left over joins the batch before it, and a client's only image is taken twice."""
    n = len(y)
    orders = np.stack([rng.permutation(n) for _ in range(epochs)]) if n > 1 else np.zeros((epochs, 2), int)
    for order in torch.from_numpy(orders).to(y.device):
        batches = list(order.split(batch_size))
        if len(batches) > 1 and len(batches[-1]) == 1 < batch_size:
            batches[-2:] = [torch.cat(batches[-2:])]
        yield from batches


def sgd_step(module, loss, lr, momentum=0.0, weight_decay=0.0, sent=()):
    """A function step(*batch) -> loss(*batch, *sent), a detached scalar, that takes one SGD step on the module's weights.
    Momentum, where there is any, starts at zero here and so never outlives a client's round.

    `sent` are the tensors that come from the server. On CUDA the step is captured as a graph, once for every shape of batch, and
    replayed, also in later rounds. A replay repeats the very first call on the tensors' new values, so a loss must take
    every tensor that changes or is given up between rounds from its arguments or the module."""
    module.train()
    graphed = capturable(module)
    graphs = CAPTURED.get(module) if graphed else None
    if graphs and shapes(graphs.sent) == shapes(sent):
        forget_momentum(graphs.optimizer)
        overwrite(graphs.sent, sent)
    else:
        optimizer = torch.optim.SGD(module.parameters(), lr, momentum, weight_decay=weight_decay, fused=True)
        graphs = Graphs(optimizer, [value.clone() for value in sent], {})
        if graphed:
            CAPTURED[module] = graphs

    def eager(*batch):
        graphs.optimizer.zero_grad()
        value = loss(*batch, *graphs.sent)
        value.backward()
        graphs.optimizer.step()
        return value.detach()

    def step(*batch):
        shape = tuple(shapes(batch))
        if graphed and GRAPHS and shape not in graphs.steps:
            graphs.steps[shape] = record(module, graphs.optimizer, eager, batch)  # turns GRAPHS off where it fails
        if not (graphed and GRAPHS):
            return eager(*batch)
        held, replay, value = graphs.steps[shape]
        overwrite(held, batch)
        replay()
        return value.clone()
    return step


def augment(x, rng):
    """Random crop (4 pixels of padding), horizontal flip and rotation by up to 15 degrees, the whole batch at once; what lies
    outside is black, the nearest pixel is taken. x (B, channels, height, width) uint8 -> float, the same range of 0-255."""
    angle, flip = rng.uniform(-np.pi / 12, np.pi / 12, len(x)), rng.choice([-1.0, 1.0], len(x))
    dx, dy = rng.integers(-4, 5, (2, len(x))) * 2 / x.shape[-1]
    theta = np.stack([flip * np.cos(angle), -np.sin(angle), dx, flip * np.sin(angle), np.cos(angle), dy], 1).reshape(-1, 2, 3)
    grid = F.affine_grid(torch.from_numpy(theta).float().to(x.device), x.shape, align_corners=False)
    return F.grid_sample(x.float(), grid, mode="nearest", align_corners=False)


class ModelMean:
    """The weighted mean of models, added one at a time, so that only one is held beside the sum: weights and BatchNorm
    statistics are averaged in float64, integer buffers (BatchNorm's counters) stay integers: the largest is taken."""

    def __init__(self, net):
        self.net, self.weight = net, torch.zeros((), device=next(net.parameters()).device)
        self.weight = self.weight if self.weight.device.type == "mps" else self.weight.double()  # mps has no float64
        self.sum = {name: torch.zeros_like(value, dtype=self.weight.dtype if value.is_floating_point() else value.dtype)
                    for name, value in net.state_dict().items()}

    def add(self, state, weight):
        """state: a model's state_dict; weight: its share, e.g. the client's number of images."""
        self.weight += weight
        for name, value in state.items():
            if value.is_floating_point():
                self.sum[name] += value.to(self.weight.dtype) * weight
            else:
                self.sum[name] = torch.maximum(self.sum[name], value)

    def value(self):
        """The mean as a state_dict, over the models of all ranks; the net's own where none was added."""
        for value in (self.weight, *self.sum.values()) if RANKS > 1 else ():
            combine = torch.distributed.ReduceOp
            torch.distributed.all_reduce(value, combine.SUM if value.is_floating_point() else combine.MAX)
        if not self.weight > 0:
            return self.net.state_dict()
        return {name: value / self.weight if value.is_floating_point() else value for name, value in self.sum.items()}


def model_size(net):
    """How many numbers travel with a model: its trainable weights (as the papers count)."""
    return sum(p.numel() for p in net.parameters())


# --------------------------------------------------------------------------------------------------- CUDA graphs
# Launching a small model's some hundred kernels one by one takes longer than running them.

class Graphs(NamedTuple):
    optimizer: torch.optim.Optimizer
    sent: list   # the memory that replays read; overwritten in each round
    steps: dict  # shapes of a batch -> the batch's memory, the replaying function, the loss's memory


GRAPHS = True                           # --no-graph
CAPTURED = weakref.WeakKeyDictionary()  # module -> its Graphs, as long as the module lives
CAPTURING = threading.Lock()            # torch allows one capture at a time


def capturable(module):
    """Whether a module's steps become CUDA graphs; before torch 2.7 a replay could not run beside a capture."""
    return GRAPHS and next(module.parameters()).is_cuda and torch.__version__ >= (2, 7)


def record(module, optimizer, eager, batch):
    """Capture eager(*batch) on a copy of the batch -> (the copy, the replaying function, the loss's memory); the module's
    weights and buffers and the optimizer's momentum stay as they are."""
    global GRAPHS
    batch = [value.clone() for value in batch]
    momentum = [state.get("momentum_buffer") for state in optimizer.state.values()]
    kept = [value for value in (*module.state_dict().values(), *momentum) if value is not None]
    before = [value.clone() for value in kept]
    fresh = not optimizer.state
    replay = value = None
    with CAPTURING:
        for _ in range(2):  # warm up: kernels are loaded, libraries and momentum get their memory
            eager(*batch)
        if kept[0].is_cuda and torch.cuda.mem_get_info()[0] < torch.cuda.mem_get_info()[1] / 4:
            torch.cuda.empty_cache()  # what earlier graphs held is given back only on request
        try:
            replay, value = capture(lambda: eager(*batch))
        except RuntimeError as error:
            if GRAPHS:
                print(f"note: a step cannot be captured as a CUDA graph, going on without graphs ({first_line(error.__context__ or error)})")
            GRAPHS = False
    overwrite(kept, before)
    if fresh:
        forget_momentum(optimizer)
    return batch, replay, value


def capture(run):
    """Record what run() launches, without running it -> (a function that launches it all, what run() returned)."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")  # the other clients' threads may go on meanwhile
    try:
        value = run()
    finally:
        graph.capture_end()
    return graph.replay, value


def forget_momentum(optimizer):
    for state in optimizer.state.values():
        if state.get("momentum_buffer") is not None:
            state["momentum_buffer"].zero_()


def shapes(tensors):
    return [(value.shape, value.dtype) for value in tensors]


def overwrite(held, new):
    for old, value in zip(held, new):
        old.copy_(value)


# ------------------------------------------------------------------------------------------ clients side by side

STREAMS = [threading.Lock() for _ in range(31)]  # torch has 32 streams: one for each of these, one for the main thread


@functools.cache
def cuda_stream(device, number):
    """CUDA stream `number`, -1 for the main thread's; None on other devices. A client's graph is captured and replayed on
    one and the same stream: graphs captured on a stream share a workspace, which two of them must not use at once."""
    return torch.cuda.Stream(device) if device.startswith("cuda") else None


@contextlib.contextmanager
def threads(number, start=None):
    """A pool of threads that is given up at once when the block is left by Ctrl-C or an error."""
    pool = ThreadPoolExecutor(number, initializer=start)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def workers(args):
    """A pool of args.workers threads, each with one torch thread and on the CUDA stream of the caller."""
    stream = torch.cuda.current_stream(args.device) if args.device.startswith("cuda") else None

    def start():
        torch.set_num_threads(1)
        if stream:
            torch.cuda.set_stream(stream)
    return threads(args.workers, start)


def for_each_client(update, clients, args, t, mean=None):
    """`update(client)` for the participants of round t, args.workers of them side by side, each on one thread, and over the
    ranks -> the clients that reported, and what `update` returned for each.

    `update` returns a tuple; if a scalar at its end, the client's mean loss, is not finite, the run stops (SystemExit 1). With
    `mean`, a ModelMean, it begins with the client's trained model, which is added there, weighted by the client's number of
    training images, and left out of the result: few models are held at a time.
    A share args.drop_rate of the participants fails: whatever they did is lost, their model too. What the server cannot use
    (see `refusal`) is left out with a printed reason."""
    start, tty, results, waiting = time.time(), sys.stdout.isatty(), {}, collections.deque()
    failed = {client.id for client in clients if generator(args.seed, "drop", t, client.id).random() < args.drop_rate}
    mine = [client for client in clients if client.id % RANKS == RANK and client.id not in failed]

    def train(client):
        own = cuda_stream(args.device, client.id % len(STREAMS))
        if own is None:
            return update(client)
        with STREAMS[client.id % len(STREAMS)]:
            own.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(own):
                result = update(client)
            own.synchronize()
        return result

    def finish():
        client, result = waiting.popleft()
        result = result.result()
        client.test_features = None
        if result[-1].ndim == 0 and not math.isfinite(result[-1]):
            sys.exit(f"client {client.id}'s loss is {float(result[-1])} in round {t}: lower --lr {args.lr:g} or the weights of "
                     "the method's own losses")
        reason = refusal([part for part in result if getattr(part, "ndim", 1)], args, mean)
        if mean is not None:
            if not reason:
                mean.add(result[0].state_dict(), len(client.train.y))
                if args.device.startswith("cuda"):
                    torch.cuda.current_stream().synchronize()  # the sum needs the client's model, which is given up now
            with STREAMS[client.id % len(STREAMS)]:  # the model's graph goes, and with it what its stream holds for graphs
                result = result[1:]
        results[client.id] = reason or result
        if tty and time.time() - start > 2:
            print(f"round {t}: {len(results)}/{len(mine)} clients", end="\r", flush=True)

    with workers(args) as pool:
        for client in mine:
            if len(waiting) == 2 * args.workers:
                finish()
            waiting.append((client, pool.submit(train, client)))
        while waiting:
            finish()
    if RANKS > 1:
        results = dict(sum(gather([list(results.items())], args.device), []))
    for client in clients:
        if isinstance(results.get(client.id), str):
            print(f"round {t}: client {client.id}'s upload is refused: {results.pop(client.id)}")
    if not results:
        print(f"round {t}: nobody reported, the server keeps what it has")
    return [client for client in clients if client.id in results], [results[client.id] for client in clients if client.id in results]


def refusal(upload, args, mean=None):
    """Why the server cannot use what a client sent, or "". Models must have the shapes of `mean`, models and prototypes be
    finite, prototypes (C, D), and what goes with each of them (counts) not negative; in a tuple (clusters) there may be any
    number of prototypes."""
    if mean is not None:
        state = upload[0].state_dict()
        if {name: v.shape for name, v in state.items()} != {name: v.shape for name, v in mean.sum.items()}:
            return "its model has other shapes"
        if not torch.stack([v.isfinite().all() for v in state.values()]).all():
            return "NaN or Inf in its model"
    clusters = [part for part in upload if isinstance(part, tuple)]
    vectors = clusters[0] if clusters else [part for part in upload if isinstance(part, torch.Tensor)]
    if vectors:
        rows = len(vectors[0]) if clusters else args.classes
        shapes, wanted = [tuple(v.shape) for v in vectors], [(rows, args.feature_dim), *[(rows,)] * (len(vectors) - 1)]
        if shapes != wanted:
            return f"its shapes are {shapes}, not {wanted}"
        if not all(v.isfinite().all() for v in vectors):
            return "NaN or Inf in its prototypes"
        if any((v < 0).any() for v in vectors[1:]):
            return "a negative count"
    return ""


def side_by_side(function, items, args):
    """`[function(item) for item in items]` on args.workers single-threaded workers, without gradients; item k on rank k mod n."""
    with workers(args) as pool:
        return gather(list(pool.map(torch.no_grad()(function), deal_out(items))), args.device)


# ---------------------------------------------------------------------------------------------------- evaluation

@torch.no_grad()
def extract(net, x):
    """Features (n, D) of images x (n, ...), in eval mode, in batches."""
    net.eval()
    z = [net.features(batch) for batch in x.split(1000 if x.is_cuda else 100)]  # small batches stay in a core's cache
    return torch.cat(z) if z else torch.empty(0, net.feature_dim, device=x.device)


def class_means(net, data, classes):
    """P_i^c = mean of f(x) over the client's samples of class c: the local prototypes (FedTGP Eq. 2, FedSA Eq. 2).

    Returns prototypes (C, D), zero where the client lacks the class, and counts n_ic (C,)."""
    member = F.one_hot(data.y, classes).to(torch.float32)
    counts = member.sum(0)
    return member.T @ extract(net, data.x) / counts.clamp(min=1).unsqueeze(1), counts


def nearest_prototype(z, prototypes, present):
    """Predict the class of the nearest prototype (Euclidean): z (n, D), prototypes (C, D), present (C,) bool -> (n,)."""
    known = present.unsqueeze(1).to(z.dtype)
    centre = (prototypes * known).sum(0) / known.sum().clamp(min=1)  # cdist multiplies matrices: near the origin their difference keeps its digits
    return torch.cdist(z - centre, prototypes - centre).masked_fill(~present, math.inf).argmin(1)


def evaluate_personal(clients, prototypes, present, args, t):
    """Accuracy in % of every client's own model on its own test share, Σ correct / Σ test samples over all clients, predicted
    by the classifier and by the nearest prototype in one pass. All clients are scored with the round's new prototypes, also
    those that did not take part (nobody's traffic is counted for that). nan in rounds that --eval-every leaves out."""
    if t % args.eval_every and t != args.rounds:
        return {"classifier": math.nan, "prototype": math.nan}

    def correct(client):
        if client.test_features is None:
            client.test_features = extract(client.net, client.test.x)
        z, y = client.test_features, client.test.y
        return torch.stack([(client.net.classifier(z).argmax(1) == y).sum(),
                            (nearest_prototype(z, prototypes, present) == y).sum()])

    totals = torch.stack(side_by_side(correct, clients, args)).sum(0).tolist()
    n = sum(len(client.test.y) for client in clients)
    classifier, prototype = (100 * c / n if n else math.nan for c in totals)
    return {"classifier": classifier, "prototype": prototype}


def accuracies(net, sets, args):
    """Accuracy in % of one model on each set of Samples; nan for an empty one."""
    net.eval()
    size = 1000 if args.device != "cpu" else 100
    pieces = [(k, *xy) for k, data in enumerate(sets) for xy in zip(data.x.split(size), data.y.split(size)) if len(data.y)]
    hits = side_by_side(lambda piece: (net(piece[1]).argmax(1) == piece[2]).sum(), pieces, args)
    correct = np.bincount([k for k, *_ in pieces], torch.stack(hits).cpu().numpy() if hits else None, len(sets))
    return [100 * c / len(data.y) if len(data.y) else math.nan for c, data in zip(correct, sets)]


def evaluate_global(net, tests, args, t, own=()):
    """Accuracy in % of the global model on each domain's test images {domain: Samples}, and under "test" the mean over the
    domains; with the clients' `own` images (a list of Samples) also "validation", the mean over the clients.
    nan in rounds that --eval-every leaves out."""
    skip = t % args.eval_every and t != args.rounds
    each = accuracies(net, [*tests.values(), *own], args) if not skip else [math.nan] * (len(tests) + len(own))
    each, validation = each[:len(tests)], each[len(tests):]
    return {"test": sum(each) / len(each), **(dict(zip(tests, each)) if len(tests) > 1 else {}),
            **({"validation": sum(validation) / len(validation)} if own else {})}


# ---------------------------------------------------------------------------------------------------- run folder

# Okabe & Ito's, safe for colour-blind readers, and two more for ten classes; what belongs to the server or the headline
# prediction is always the first, its companion or the clients the second
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442", "#999999", "#882255"]


def new_folder(args):
    """Make <out>/<script>-<dataset>-s<seed>, with a number added where that is taken."""
    Path(args.out).mkdir(parents=True, exist_ok=True)
    name = f"{args.script}-{args.dataset.replace('/', '_')}-s{args.seed}"
    for number in itertools.count(1):
        folder = Path(args.out, name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder


class Run:
    """One run's folder, its log, its printed lines, its pictures and its checkpoints.

    `run.start(state)` gives the state to begin with, `for t in run.rounds():` the rounds to go, `run.report(t, ...)` ends each one.
    The best round is the one with the largest `select`, a column of the log. Besides the state, a checkpoint holds the
    clients' own models and the modules named here. For the pictures, the state begins with the server's prototypes or
    anchors (`guides` is their name there), and a global method names its model `net` and gives its `tests`, {domain: Samples}."""

    current = None  # for the words after Ctrl-C

    def __init__(self, args, headline, clients, select="accuracy", tests=None, guides="prototypes", **modules):
        args.guides = guides
        self.args, self.headline, self.select, self.clients, self.tests, self.modules = args, headline, select, clients, tests, modules
        self.rows = []
        self.folder, self.saved = None, 0  # rank 0 alone writes; the last round in a checkpoint
        Run.current = self
        if RANK > 0:
            return
        try:
            self.folder = Path(args.resume) if args.resume else new_folder(args)
            if not (self.folder / "args.json").exists():
                about = {"script": args.script, "headline": headline, "select": select, **settings(args)}
                (self.folder / "args.json").write_text(json.dumps(about, indent=1) + "\n")
        except OSError as error:
            usage(f"--resume {args.resume}: cannot write there ({error.strerror})" if args.resume else
                  f"--out {args.out}: cannot make a run folder there ({error.strerror})")
        if not args.no_plots and not (self.folder / "partition.png").exists():
            self.plot(plot_partition, "partition.png", args)

    def start(self, *state):
        """What lasts over rounds: `state` itself, tensors and lists and tuples of them or None, or with --resume what it was at
        the checkpoint, along with all models. One value comes back as it is, several as a tuple."""
        held, path = self.args.checkpoint, Path(self.args.resume or "", "checkpoint.pt")
        if held:
            try:
                if held["images"] != self.args.fingerprint:
                    raise ValueError("the images are others than the run's: is --data the same?")
                owners = [client for client in self.clients if client.net is not None]
                for client, weights in zip(owners, deal_out(held["nets"]), strict=True):
                    client.net.load_state_dict(weights)
                for name, module in self.modules.items():
                    module.load_state_dict(held["modules"][name])
                for old, new in zip(state, held["state"], strict=True):
                    if isinstance(old, torch.Tensor) and old.shape != new.shape:
                        raise ValueError(f"a tensor is {tuple(new.shape)}, not {tuple(old.shape)}")
                state = on_device(held["state"], self.args.device)
                self.rows, self.saved = held["rows"], held["round"]
            except Exception as error:
                usage(f"--resume {self.args.resume}: {path} does not fit: {first_line(error)}")
            self.args.checkpoint = None
            self.write_log()
            print(f"resuming after round {self.saved} of {self.args.rounds}")
        self.state = state
        return state[0] if len(state) == 1 else state

    def save(self, t, state):
        """Write checkpoint.pt: to another file first, so that there is always a complete one."""
        nets = gather([client.net.state_dict() for client in self.clients if client.net is not None], "cpu")
        if not self.folder:
            return
        scratch = self.folder / "checkpoint.tmp"
        try:
            torch.save({"script": self.args.script, "settings": settings(self.args), "data": str(Path(self.args.data).resolve()), "round": t,
                        "rows": self.rows, "images": self.args.fingerprint, "published": self.args.published, "nets": nets, "state": list(state),
                        "modules": {name: module.state_dict() for name, module in self.modules.items()}}, scratch)
            os.replace(scratch, self.folder / "checkpoint.pt")
            self.saved, self.kept = t, time.time()
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            scratch.unlink(missing_ok=True)
            kept = f"the one of round {self.saved} is kept" if self.saved else "there is none yet"
            print(f"note: the checkpoint of round {t} could not be written ({first_line(error)}); {kept}")

    def hint(self):
        """How to go on after an interruption, where one can."""
        if self.folder and not self.saved:
            return "; there is no checkpoint yet to go on from (see --checkpoint-every)"
        if self.folder:
            return f"; go on after round {self.saved} with: python {self.args.script}.py --resume {shlex.quote(str(self.folder))}"
        return ""

    def plot(self, draw, name, *data):
        """Draw a picture into the run folder; one that cannot be drawn is a note and no more."""
        try:
            with uninterrupted(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                plt = pyplot()
                figure = draw(plt, *data)
                figure.savefig(self.folder / name, dpi=150, bbox_inches="tight")
                plt.close(figure)
        except Exception as error:
            print(f"note: {self.folder / name} could not be drawn ({type(error).__name__}: {first_line(error)})")

    def draw_features(self, t, name=""):
        """features.png and margins.png of this process's clients after round t."""
        prototypes, net = self.state[0] if self.state else None, self.modules.get("net")
        clients = [client for client in self.clients if client.net is not None or net is not None]
        groups = ({name: (net, data) for name, data in self.tests.items()} if self.tests else
                  {f"client {c.id}": (c.net, c.test) for c in sorted(clients, key=lambda c: -len(c.test.y))[:6] if len(c.test.y)})
        if prototypes is None:
            G, classes = torch.empty(0, self.args.feature_dim), torch.empty(0, dtype=torch.long)
        elif isinstance(prototypes, tuple):
            G, classes = prototypes[:2]
        else:
            classes = prototypes.abs().sum(1).nonzero().flatten()
            G = prototypes[classes]
        if groups:
            self.plot(plot_features, f"features{name}.png", groups, G, classes, t, self.args)
        self.plot(plot_margins, f"margins{name}.png", [(net or client.net, client.train) for client in clients], G, classes, t, self.args)

    def rounds(self):
        """Yield the rounds to go, up to args.rounds; afterwards draw the pictures."""
        self.kept = time.time()
        for t in range(self.saved + 1, self.args.rounds + 1):
            self.began = time.time()
            yield t
        if not self.args.no_plots and self.folder:
            self.plot(plot_curves, "curves.png", self.rows, self.headline, self.select, self.args)
            self.draw_features(self.args.rounds)

    def report(self, t, scores, losses, up, down, *state, **extra):
        """End round t: write a row to log.csv, a checkpoint when it is time, and print a line. Stops (SystemExit 1) where a
        number of `extra` is not finite.

        scores {prediction: accuracy in %} (nan in rounds without evaluation), the clients' losses, how many numbers
        all clients together sent up and got down (a number, or {what: number}), the state as in `start`, and whatever else
        the method wants logged."""
        scores, extra = ({name: float(value) for name, value in values.items()} for values in (scores, extra))
        up, down = ({k: int(v) for k, v in (way if isinstance(way, dict) else {"": way}).items()} for way in (up, down))
        for name, value in extra.items():
            if not math.isfinite(value):
                sys.exit(f"{name} is {value} in round {t}: lower --lr {self.args.lr:g}")
        loss = float(torch.stack(list(losses)).mean()) if len(losses) else math.nan
        row = {"round": t, "accuracy": scores[self.headline], **{f"acc_{k}": v for k, v in scores.items()}, "loss": loss,
               "up": sum(up.values()), "down": sum(down.values()), **{f"up_{k}": v for k, v in up.items() if len(up) > 1},
               **{f"down_{k}": v for k, v in down.items() if len(down) > 1}, "seconds": round(time.time() - self.began, 3), **extra}
        self.state = state
        with uninterrupted():
            self.rows.append(row)
            self.write_log()
            every, plots, last = self.args.checkpoint_every, self.args.plot_every, t == self.args.rounds
            late = RANKS == 1 and time.time() - self.kept > 30  # ranks save together, and their clocks may disagree
            if every and (t % every == 0 or last or late):
                self.save(t, state)
            if self.folder and not self.args.no_plots and plots and t % plots == 0 and not last:
                self.draw_features(t, f"-{t:04}")
        left = sum(r["seconds"] for r in self.rows) / t * (self.args.rounds - t)
        ordered = sorted(scores.items(), key=lambda item: item[0] != self.headline)
        accuracy = "not evaluated" if math.isnan(row["accuracy"]) else "  ".join(f"{k} {v:5.2f}" for k, v in ordered)
        more = "".join(f"  {k} {v:.4g}" for k, v in extra.items())
        print(f"round {t:{len(str(self.args.rounds))}}/{self.args.rounds}  {accuracy}  loss {row['loss']:.4f}{more}  "
              f"up {short(row['up'])}  down {short(row['down'])}  {row['seconds']:.2f} s  left {clock(left)}", flush=True)

    def write_log(self):
        """log.csv, written to another file first, so that there is always a complete one."""
        if not self.folder:
            return
        path, columns = self.folder / "log.csv", list(dict.fromkeys(name for row in self.rows for name in row))
        try:
            with open(path.with_suffix(".tmp"), "w", newline="") as file:
                writer = csv.DictWriter(file, columns, restval=math.nan)
                writer.writeheader()
                writer.writerows(self.rows)
            os.replace(path.with_suffix(".tmp"), path)
        except OSError as error:
            sys.exit(f"cannot write {path} ({error.strerror}){self.hint()}")

    def finish(self):
        """Print the run's last lines; returns {"best": %, "final": %}."""
        scored = [r for r in self.rows if not math.isnan(r["accuracy"])]
        best = max(scored, key=lambda r: r[self.select], default=None)
        if best:
            up, down = (sum(r[k] for r in self.rows) for k in ("up", "down"))
            how = "" if self.select == "accuracy" else f", where {self.select[4:]} is best"
            print(f"best {self.headline} accuracy {best['accuracy']:.2f} % in round {best['round']}{how}, final {scored[-1]['accuracy']:.2f} %; "
                  f"traffic {short(up)} numbers up, {short(down)} down; {clock(sum(r['seconds'] for r in self.rows))} in all")
            for where, accuracy in self.args.published:
                print(f"published for these settings: {accuracy} % ({where}); this run's best round: {best['accuracy']:.2f} %")
        else:
            print("no accuracy: no client has test images")
        print(f"everything is in {self.folder}")
        return {"best": best["accuracy"], "final": scored[-1]["accuracy"]} if best else {}


def on_device(values, device):
    """Lists and tuples of tensors, moved."""
    if isinstance(values, (list, tuple)):
        return type(values)(on_device(value, device) for value in values)
    return values.to(device) if isinstance(values, torch.Tensor) else values


@contextlib.contextmanager
def uninterrupted():
    """Ctrl-C waits until the block is through."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def read_checkpoint(folder, script):
    """The checkpoint of a run folder, on the CPU. Exits with status 2 where there is none that this script can go on from."""
    path = Path(folder) if Path(folder).name == "checkpoint.pt" else Path(folder, "checkpoint.pt")
    if not folder:
        usage("--resume '': must be a run folder")
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)  # runs no code from the file
        missing = {"script", "settings", "data", "round", "rows", "images", "published", "nets", "state", "modules"} - set(held)
    except FileNotFoundError:
        usage(f"--resume {folder}: there is no {path}")
    except Exception as error:
        usage(f"--resume {folder}: {path} is not a complete checkpoint ({type(error).__name__}: {first_line(error)[:100]})")
    if missing:
        usage(f"--resume {folder}: {path} is not a checkpoint of this program")
    if held["script"] != script:
        usage(f"--resume {folder}: {path} is from {held['script']}.py, not from {script}.py")
    return held


def short(number):
    """1234567 -> 1.23 M"""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}" if number < 999.5 * scale else f"{number / scale:.0f} {unit}"
    return f"{int(number)}"


def clock(seconds):
    """75 -> 1:15, 3675 -> 1:01:15"""
    hours, rest = divmod(round(seconds), 3600)
    return (f"{hours}:" if hours else "") + f"{rest // 60:0{2 if hours else 1}}:{rest % 60:02}"


def plot_partition(plt, args):
    """The papers' bubble plot: clients across, classes up, the area of a dot the number of training samples."""
    K, C = args.counts.shape
    figure, axis = plt.subplots(figsize=(max(4, min(14, 1.6 + 0.32 * K)), max(2.8, min(10, 1.4 + 0.3 * C))))
    client, kind = np.nonzero(args.counts)
    count = args.counts[client, kind]
    cell = min(72 * (figure.get_figwidth() - 1.2) / K, 72 * (figure.get_figheight() - 1) / C)
    axis.scatter(client, kind, s=np.maximum(1, (0.95 * cell) ** 2 * count / count.max()), color=COLOURS[0], alpha=0.7, linewidths=0)
    every = -(-C // 40)
    axis.set_yticks(range(0, C, every), [str(n)[:14] for n in args.class_names[::every]])
    axis.set(xlim=(-0.7, K - 0.3), ylim=(-0.7, C - 0.3), xlabel=f"client ({K})", ylabel=f"class ({C})",
             title=f"{args.dataset}, {partition_name(args)}: {args.counts.sum()} training images,\nlargest dot {count.max()}")
    axis.xaxis.get_major_locator().set_params(integer=True)
    if args.partition == "domain" and K <= 20:
        axis.set_xticks(range(K), [f"{i}\n{name[:10]}" for i, name in enumerate(args.client_domains)], fontsize="small")
    axis.grid(alpha=0.25, linewidth=0.5)
    axis.set_axisbelow(True)
    return figure


def partition_name(args):
    detail = {"dirichlet": f"Dirichlet β = {args.beta:g}", "pathological": f"{args.classes_per_client} classes per client",
              "dominant": f"{args.dominant_share:.0%} one class", "missing": f"{args.missing} classes missing", "domain": "by domain"}
    return detail.get(args.partition, args.partition)


def plot_curves(plt, rows, headline, select, args):
    """Accuracy over rounds, accuracy over traffic, and the losses."""
    scored = [r for r in rows if not math.isnan(r["accuracy"])]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    traffic = np.cumsum([r["up"] + r["down"] for r in rows])
    names = [headline, *(k[4:] for k in rows[0] if k.startswith("acc_") and k[4:] != headline)]
    for name, colour, style in zip(names, itertools.cycle(COLOURS), itertools.cycle(["-", "--", ":", "-."])):
        values, width = [r[f"acc_{name}"] for r in scored], 2.5 if name == headline else 1.2
        left.plot([r["round"] for r in scored], values, style, color=colour, linewidth=width, label=name)
        middle.plot([traffic[r["round"] - 1] for r in scored], values, style, color=colour, linewidth=width, label=name)
    best = max(scored, key=lambda r: r[select], default=None)
    if best:
        left.margins(y=0.12)
        left.plot(best["round"], best["accuracy"], "o", color=COLOURS[0])
        left.annotate(f"{best['accuracy']:.1f}", (best["round"], best["accuracy"]), textcoords="offset points", xytext=(0, 5), ha="center",
                      bbox=dict(facecolor="white", edgecolor="none", alpha=0.8, pad=0.5))
        left.legend(fontsize="small")
    middle.xaxis.set_major_formatter(plt.matplotlib.ticker.EngFormatter())
    left.set(xlabel="round", ylabel="test accuracy (%)", title=f"{args.script} on {args.dataset}, {partition_name(args)}, seed {args.seed}")
    middle.set(xlabel="numbers sent up and down, all clients", ylabel="test accuracy (%)", title="accuracy over traffic")
    losses = {label: [r.get(key, math.nan) for r in rows] for key, label in (("loss", "clients' mean"), ("server_loss", "server"))
              if any(key in r for r in rows)}
    values = [v for v in sum(losses.values(), []) if not math.isnan(v)] or [1]
    for (label, curve), colour, style in zip(losses.items(), COLOURS[2:], ["-", "--"]):
        right.plot([r["round"] for r in rows], curve, style, color=colour, label=label)
    right.set(xlabel="round", ylabel="loss", title="training loss")
    if 0 < 10 * min(values) < max(values):
        log_scale(plt, right)
    right.legend()
    for axis in (left, middle, right):
        axis.grid(alpha=0.25)
        if axis is not middle:
            axis.xaxis.get_major_locator().set_params(integer=True)
    return figure


def pyplot():
    """matplotlib's pyplot, for files; a class or data set may be called $x$, or have a name that the font lacks."""
    import matplotlib
    matplotlib.use("Agg")
    matplotlib.rcParams["text.parse_math"] = False
    import matplotlib.pyplot as plt
    return plt


def log_scale(plt, axis):
    """A logarithmic vertical axis without mathematics in its labels, which `pyplot` turns off."""
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(plt.matplotlib.ticker.LogFormatter(labelOnlyBase=False))


def embed(z, seed):
    """Vectors (n, D) in two dimensions, and how: t-SNE with scikit-learn, the two main components without."""
    if len(z) < 5 or (z == z[0]).all():
        return np.zeros((len(z), 2)), "no embedding"
    z = z - z.mean(0)
    z = F.pad(z / z.abs().max(), (0, max(0, 2 - z.shape[1])))
    try:
        from sklearn.manifold import TSNE
    except Exception:  # absent, or built for another numpy
        return (z @ torch.linalg.svd(z, full_matrices=False)[2][:2].T).numpy(), "PCA"
    return TSNE(perplexity=min(30, len(z) / 4), init="pca", random_state=seed % 2**32).fit_transform(z.numpy()), "t-SNE"


def plot_features(plt, groups, prototypes, classes, t, args, most=900):
    """Test features in two dimensions: colour is the class, the marker the client or domain, stars are prototypes.

    groups {name: (net, Samples)}, prototypes (G, D) of classes (G,)."""
    chosen = {name: generator(args.seed, "picture").permutation(len(data.y))[:-(-most // len(groups))] for name, (_, data) in groups.items()}
    z = torch.cat([extract(net, data.x[torch.from_numpy(chosen[name]).to(data.x.device)]) for name, (net, data) in groups.items()]).cpu()
    y = torch.cat([data.y.cpu()[chosen[name]] for name, (_, data) in groups.items()]).numpy()
    group = np.repeat(np.arange(len(groups)), [len(index) for index in chosen.values()])
    shown = np.sort(np.bincount(y, minlength=args.classes).argsort(kind="stable")[::-1][:len(COLOURS)])  # of many classes the largest
    stars = np.isin(classes.cpu(), shown)
    keep = np.isin(y, shown) & z.isfinite().all(1).numpy()
    z, y, group, G, c = z[keep], y[keep], group[keep], prototypes.detach().cpu()[stars], classes.cpu()[stars].numpy()
    figure, axis = plt.subplots(figsize=(7.5, 5.6), layout="constrained")
    flat, how = embed(torch.cat([z, G]), args.seed)
    markers = "o^sDvPX<>ph8Hd"
    colour = {k: COLOURS[i] for i, k in enumerate(shown)}
    for g, marker in zip(range(len(groups)), itertools.cycle(markers)):
        axis.scatter(*flat[:len(z)][group == g].T, s=16, marker=marker, c=[colour[k] for k in y[group == g]], alpha=0.65, linewidths=0)
    axis.scatter(*flat[len(z):].T, s=170, marker="*", c=[colour[k] for k in c], edgecolors="black", linewidths=0.9, zorder=3)
    handles = [plt.Line2D([], [], linestyle="", marker="s", color=colour[k], label=str(args.class_names[k])[:16]) for k in shown]
    handles += [plt.Line2D([], [], linestyle="", marker=m, color="grey", label=name[:16]) for name, m in zip(groups, itertools.cycle(markers))]
    if len(G):
        handles.append(plt.Line2D([], [], linestyle="", marker="*", color="white", markeredgecolor="black", markersize=12,
                                  label=f"server's {args.guides}"))
    axis.legend(handles=handles, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize="small")
    of = f"{len(shown)} of {args.classes} classes" if len(shown) < args.classes else f"{args.classes} classes"
    axis.set(xticks=[], yticks=[], xlabel=f"{how} of {len(z)} test features and {len(G)} {args.guides}, {of}",
             title=f"{args.script} on {args.dataset}, {partition_name(args)}: features after round {t}")
    return figure


def margins(prototypes, classes, C):
    """The smallest distance between a prototype of a class and one of another class, (C,); nan where there is none.

    prototypes (G, D) of classes (G,)."""
    nearest = distances(prototypes, prototypes).masked_fill(classes == classes.unsqueeze(1), math.inf).amin(1) if len(classes) else prototypes.sum(1)
    margin = prototypes.new_full((C,), math.inf).scatter_reduce(0, classes, nearest, "amin")
    return torch.where(margin.isinf(), math.nan, margin).cpu().numpy()


def plot_margins(plt, clients, prototypes, classes, t, args):
    """Per class the margin of the best client's class means, the mean over clients, and that of the server's prototypes
    (FedTGP Fig. 1, FedLSA Fig. 1). clients: [(net, Samples)], prototypes (G, D) of classes (G,)."""
    C, rows = args.classes, []
    for net, data in clients:
        means, counts = class_means(net, data, C)
        held = counts.nonzero().flatten()
        rows.append(margins(means[held], held, C))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a class that nobody has, or nobody beside another one
        best, mean = np.nanmax(rows, axis=0), np.nanmean(rows, axis=0)
    figure, axis = plt.subplots(figsize=(max(6, min(14, 2.5 + 0.35 * C)), 4), layout="constrained")
    x = np.arange(C)
    axis.vlines(x, np.fmin(mean, best), best, color="lightgrey", linewidth=1.5, zorder=1)
    axis.plot(x, best, "^", color=COLOURS[1], label=f"best of {len(clients)} clients")
    axis.plot(x, mean, "o", color=COLOURS[2], label="mean over clients")
    values = [best, mean]
    if len(classes):
        values.append(margins(prototypes, classes, C))
        axis.plot(x, values[-1], "*", color=COLOURS[0], markersize=12, label=f"server's {args.guides}")
    values = np.concatenate(values)
    values = values[np.isfinite(values) & (values > 0)]
    log = len(values) and values.max() > 20 * values.min()
    every = -(-C // 40)
    axis.set_xticks(x[::every], [str(n)[:14] for n in args.class_names[::every]], rotation=90 if C > 10 else 0)
    axis.set(xlabel=f"class ({C})", ylabel="distance to the nearest other class",
             title=f"{args.script} on {args.dataset}, {partition_name(args)}: margins after round {t}")
    if log:
        log_scale(plt, axis)
    else:
        axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    return figure


def cluster_quality(net, tests, args, most=2000):
    """How well the classes separate in the features of the test images, as a line of text (FedFM Table V): NMI between the
    classes and K-means clusters, and the silhouette of the classes."""
    try:
        from sklearn.cluster import KMeans
        from sklearn.metrics import normalized_mutual_info_score, silhouette_score
    except Exception:
        return "NMI and silhouette of the features: need scikit-learn (pip install scikit-learn)"
    x, y = (torch.cat(parts) for parts in zip(*tests.values()))
    index = torch.from_numpy(generator(args.seed, "clusters").permutation(len(y))[:most]).to(y.device)
    z, y = extract(net, x[index]).cpu().numpy(), y[index].cpu().numpy()
    if not np.isfinite(z).all():
        return "NMI and silhouette of the features: none, the features are not finite"
    found = KMeans(args.classes, n_init=10, random_state=args.seed % 2**32).fit_predict(z) if len(z) >= args.classes else y
    silhouette = silhouette_score(z, y) if 1 < len(np.unique(y)) < len(y) else math.nan
    return f"features of {len(y)} test images: NMI {normalized_mutual_info_score(y, found):.3f}, silhouette {silhouette:.3f}"


# ------------------------------------------------------------------------------------------------ comparing runs

def read_run(folder):
    """(settings, {column: array}) of a run folder."""
    about = json.loads(Path(folder, "args.json").read_text())
    with open(Path(folder, "log.csv"), newline="") as file:
        rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
    if [row["round"] for row in rows] != list(range(1, len(rows) + 1)) or not rows:
        raise ValueError("log.csv does not hold the rounds 1, 2, ...")
    partition_name(argparse.Namespace(**about))
    return about, {k: np.array([row[k] for row in rows]) for k in {*rows[0], about["select"], "up", "down", "seconds"}}


def compare(folders):
    """Print a Markdown table of runs, mean ± std over seeds, and draw their curves into `compare.png` beside the first."""
    groups, parents = {}, []
    for folder in folders:
        if Path(folder).name == "compare.png":
            continue
        try:
            about, columns = read_run(folder)
            key = json.dumps({k: v for k, v in about.items() if k not in ("seed", "eval_every")}, sort_keys=True)
            groups.setdefault(key, {})[about["seed"]] = (about, columns)  # of two runs with the same seed the last
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            print(f"note: {folder} is no run folder with rounds ({type(error).__name__}: {first_line(error)})", file=sys.stderr)
            continue
        parents.append(Path(folder).parent)
    if not groups:
        usage("no run folders; try: python common.py runs/*")
    abouts = [next(iter(runs.values()))[0] for runs in groups.values()]
    lines, labels = [], []
    for about, runs in zip(abouts, groups.values()):
        siblings = [other for other in abouts if (other["script"], other["dataset"]) == (about["script"], about["dataset"])]
        differing = [k for k in about if k not in ("seed", "eval_every") and any(other.get(k) != about[k] for other in siblings)]
        changed = " ".join(f"--{k.replace('_', '-')}" + (f" {about[k]}" if about[k] is not True else "") for k in differing if about[k] is not False)
        best, final, rounds, traffic, seconds = [], [], [], [], []
        for other, log in runs.values():
            scored = np.flatnonzero(~np.isnan(log["accuracy"]))
            if len(scored):
                at = scored[np.nanargmax(log[about["select"]][scored])]
                best.append(log["accuracy"][at])
                final.append(log["accuracy"][scored[-1]])
                traffic.append((log["up"] + log["down"])[:at + 1].sum())
            rounds.append(len(log["round"]))
            seconds.append(np.median(log["seconds"]))
        spread = [f"{np.mean(v):.2f}" + (f" ± {np.std(v, ddof=1):.2f}" if len(v) > 1 else "") if v else "" for v in (best, final)]
        setting = f"{partition_name(argparse.Namespace(**about))}, {about['model']}"
        lines.append([about["script"], about["dataset"], setting, changed, len(runs), *spread,
                      "-".join(map(str, sorted({min(rounds), max(rounds)}))), short(np.mean(traffic)) if traffic else "", f"{np.mean(seconds):.2f}"])
        label = f"{about['script']} {changed}".strip()
        labels.append(label if len({a["dataset"] for a in abouts}) == 1 else f"{about['dataset']}: {label}")
    head = ["method", "dataset", "setting", "flags", "seeds", "best %", "final %", "rounds", "numbers sent until the best", "s per round"]
    for line in (head, ["---"] * len(head), *lines):
        print("| " + " | ".join(map(str, line)) + " |")

    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    names = [*dict.fromkeys([*"fedproto fedtgp fedsa fedlsa fedplcc fedfm".split(), *(about["script"] for about in abouts)])]
    before = collections.Counter()  # a method's colour is always the same, its further settings are dashed
    for label, about, runs in zip(labels, abouts, groups.values()):
        colour, style = COLOURS[names.index(about["script"]) % len(COLOURS)], ["-", "--", ":", "-."][before[about["script"]] % 4]
        before[about["script"]] += 1
        length = min(len(log["round"]) for _, log in runs.values())
        accuracy = np.stack([log["accuracy"][:length] for _, log in runs.values()])
        sent = np.mean([np.cumsum(log["up"] + log["down"])[:length] for _, log in runs.values()], axis=0)
        scored = ~np.isnan(accuracy).any(0)
        for axis, x in zip(axes, (np.arange(1, length + 1), sent)):
            axis.plot(x[scored], accuracy.mean(0)[scored], style, color=colour, label=f"{label} ({len(runs)} seed{'s' * (len(runs) > 1)})")
            axis.fill_between(x[scored], accuracy.min(0)[scored], accuracy.max(0)[scored], color=colour, alpha=0.15, linewidth=0)
    axes[0].set(xlabel="round", ylabel="test accuracy (%)", title="mean over seeds, smallest to largest")
    axes[1].set(xlabel="numbers sent up and down, all clients", ylabel="test accuracy (%)", title="accuracy over traffic")
    if any((line.get_xdata() > 0).any() for line in axes[1].lines):
        axes[1].set_xscale("log")
        axes[1].xaxis.set_major_formatter(plt.matplotlib.ticker.EngFormatter())
        axes[1].xaxis.set_minor_formatter(plt.matplotlib.ticker.NullFormatter())
    for axis in axes:
        axis.grid(alpha=0.25)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    path = parents[0] / "compare.png"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            figure.savefig(path, dpi=150)
        print(f"\ncurves: {path}")
    except OSError as error:
        print(f"\nnote: {path} could not be written ({error.strerror})")


# -------------------------------------------------------------------------------------------------- command line

def cores():
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def first_line(error):
    return str(error).split("\n")[0]


def usage(message):
    """Bad input: one line on stderr, exit status 2."""
    if RANK == 0:
        print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        usage(message.replace("argument ", "", 1))


def number(kind, interval):
    """An argparse type: an int or a float in an interval written as in mathematics, e.g. "(0, 1]" or "[1, inf)"."""
    low, high = (float(v) for v in interval.strip("[]()").split(","))

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not ((low <= value if interval[0] == "[" else low < value) and (value <= high if interval[-1] == "]" else value < high)):
            raise argparse.ArgumentTypeError(f"{text}: must be {'a whole number' if kind is int else 'a number'} in {interval}")
        return value
    return parse


def domain_clients(text):
    """argparse type: "mnist:1,usps:4" -> {"mnist": 1, "usps": 4}"""
    pairs = [part.rsplit(":", 1) for part in text.split(",")]
    if any(len(pair) != 2 or not pair[1].isdigit() or int(pair[1]) < 1 for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text}: must be NAME:CLIENTS[,NAME:CLIENTS ...] with at least 1 client each")
    if len({name for name, _ in pairs}) < len(pairs):
        raise argparse.ArgumentTypeError(f"{text}: must name each domain once")
    return {name: int(n) for name, n in pairs}


def device(text):
    """argparse type: auto, cpu, cuda, cuda:N or mps -> a name that torch can use here"""
    if text == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=text).item()
    except Exception as error:
        raise argparse.ArgumentTypeError(f"{text}: must be auto, cpu or a device that torch sees here ({first_line(error)[:80]})")
    return "cpu" if text.startswith("cpu") else text


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def make_parser(script, doc, defaults, method_flags):
    """The flags that all scripts share, the method's own, and the preset's values as defaults."""
    parser = Parser(prog=script, description=doc, formatter_class=HelpFormatter, allow_abbrev=False, argument_default=None)
    data, federation, model, training, method, run = (parser.add_argument_group(g) for g in
                                                      ("data", "federation", "model", "training", "method", "run"))
    data.add_argument("--dataset", default="glyphs", metavar="NAME",
                      help=f"glyphs (embedded), {', '.join(TORCHVISION)}, or the name of an image folder under --data")
    data.add_argument("--data", default="./data", metavar="FOLDER", help="where image folders and downloads lie")
    data.add_argument("--subset", type=number(float, "(0, 1]"), default=1.0, metavar="SHARE",
                      help="a random share of the data, for slow machines")
    data.add_argument("--image-size", type=number(int, "[16, 1024]"), metavar="PIXELS", help="resize images (None: the dataset's own size)")
    add = federation.add_argument
    add("--clients", type=number(int, "[1, 1e9]"), help="K (None: one per domain in the partition 'domain', else 20)")
    add("--participation", type=number(float, "(0, 1]"), default=1.0, help="ρ, the share of clients in a round")
    add("--partition", choices=["iid", "dirichlet", "pathological", "dominant", "missing", "domain"], default="dirichlet",
        help="how data is divided over clients")
    add("--beta", type=number(float, "(0, inf)"), default=0.1, help="β of the Dirichlet partition")
    add("--classes-per-client", type=number(int, "[1, 1e9]"), default=2, help="of the pathological partition")
    add("--missing", type=number(int, "[0, 1e9]"), default=1, help="classes that each client lacks in the partition 'missing'")
    add("--dominant-share", type=number(float, "(0, 1]"), default=0.46, help="of a client's one large class in the partition 'dominant'")
    add("--domain-clients", type=domain_clients, metavar="NAME:N,...", help="clients per domain (None: client i holds domain i mod n)")
    add("--domain-fraction", type=number(float, "(0, inf)"), default=1.0,
        help="share of its domain that a client holds in the partition 'domain'; above 1: images per class")
    add = model.add_argument
    add("--model", choices=MODELS, default="cnn4", metavar="NAME",
        help=f"one for all ({', '.join(SINGLE)}) or a group in which client i has the (i mod X)-th ({', '.join(MODELS[len(SINGLE):])})")
    add("--feature-dim", type=number(int, "[1, 65536]"), default=512, help="D, the size of a prototype")
    add("--small-stem", action="store_true", help="ResNets: 3x3 stride 1, no max-pool, instead of the 7x7 stem")
    add = training.add_argument
    add("--rounds", type=number(int, "[1, 1e9]"), default=1000, help="T")
    add("--local-epochs", type=number(int, "[1, 1e9]"), default=1, help="E")
    add("--batch-size", type=number(int, "[1, 1e9]"), default=10, help="B")
    add("--lr", type=number(float, "(0, inf)"), default=0.01, help="learning rate η")
    add("--momentum", type=number(float, "[0, 1)"), default=0.0, help="of SGD; starts at zero in every round")
    add("--weight-decay", type=number(float, "[0, inf)"), default=0.0, help="of SGD")
    add = run.add_argument
    add("--seed", type=number(int, "[0, 4294967295]"), default=0, help="of everything random")
    add("--trials", type=number(int, "[1, 1e9]"), default=1, help="repeat with the seeds SEED, SEED+1, ... and print mean ± std")
    add("--device", type=device, default="auto", help="auto, cpu, cuda, cuda:1, mps ...")
    add("--workers", type=number(int, "[0, 1024]"), default=0,
        help="clients trained side by side (0: one per core; results do not depend on it)")
    add("--no-graph", action="store_true", help="no CUDA graphs, to compare")
    add("--eval-every", type=number(int, "[1, 1e9]"), default=1, metavar="ROUNDS", help="evaluate every so many rounds, and in the last")
    add("--drop-rate", type=number(float, "[0, 1]"), default=0.0, metavar="SHARE",
        help="share of a round's participants that fail: their work is lost, the server goes on without them")
    add("--checkpoint-every", type=number(int, "[0, 1e9]"), default=10, metavar="ROUNDS",
        help="write a checkpoint every so many rounds, after half a minute at the latest, and at the end (0: none)")
    add("--resume", metavar="RUNFOLDER", help="go on with a run from its last checkpoint, with its settings")
    add("--out", default="runs", metavar="FOLDER", help="where run folders are made")
    add("--plot-every", type=number(int, "[0, 1e9]"), default=0, metavar="ROUNDS",
        help="draw features and margins every so many rounds, too (0: at the end only)")
    add("--no-plots", action="store_true", help="no pictures")
    method_flags(method)
    parser.set_defaults(**defaults)
    return parser


NOT_SETTINGS = set("data device workers no_graph trials out resume checkpoint_every plot_every no_plots script checkpoint published "
                   "classes class_names counts client_domains fingerprint guides".split())


def settings(args, skip=()):
    """The settings that decide a run's numbers, JSON-ready."""
    return {k: v for k, v in vars(args).items() if k not in NOT_SETTINGS and k not in skip}


def parse(script, doc, presets, paper, method_flags, settle, argv):
    """Command line -> args: flags typed by the user over the dataset's preset over the shared defaults."""
    def read(words):
        first = Parser(prog=script, add_help=False, allow_abbrev=False)
        first.add_argument("--dataset", default="glyphs")
        first.add_argument("--resume")
        asked = first.parse_known_args(words)[0]
        held = read_checkpoint(asked.resume, script) if asked.resume is not None else None
        preset = {**held["settings"], "data": held["data"]} if held else presets.get(asked.dataset.rstrip("/"), presets["cifar10"])
        args = make_parser(script + ".py", doc, preset, method_flags).parse_args(words)
        typed = any(word.split("=")[0] == "--clients" for word in words)
        if args.partition == "domain" and preset["partition"] != "domain" and not typed:
            args.clients = None  # the preset's number is meant for its own partition
        if args.clients is None and args.partition != "domain":
            args.clients = 20
        args.dataset = args.dataset.rstrip("/")
        settle(args)
        args.checkpoint = held
        if held and Path(args.resume).name == "checkpoint.pt":
            args.resume = str(Path(args.resume).parent)
        for name, value in settings(args).items():
            if held and value is not None and value != held["settings"].get(name):
                usage(f"--{name.replace('_', '-')} {value}: must be {held['settings'].get(name)}, as in the run {args.resume}; start a new one")
        if held and args.trials > 1:
            usage(f"--trials {args.trials}: must be 1 with --resume")
        return args
    for word in argv:
        if word.endswith("=--"):  # argparse would take it for an empty list
            usage(f"{word}: must be a value")
    args = read(argv)
    if not args.dataset.strip("./ ") or args.dataset.startswith("-") or len(args.dataset) > 200:
        usage(f"--dataset {args.dataset[:40]!r}: must be a name")
    if not args.out:
        usage("--out '': must be a folder")
    if args.dataset not in presets and not args.resume:
        print(f"note: no preset for {args.dataset}: cifar10's settings, where you type no others")
    args.device = device(args.device)
    args.workers = args.workers or max(1, min(cores() // RANKS, 8 if args.device.startswith("cuda") else 1 if args.device == "mps" else cores()))
    args.script = script
    if args.batch_size == 1 and not all(architecture(args.model, i)[0] in ("cnn4", "lsa_cnn", *HTCNN8) for i in range(9)):
        usage(f"--batch-size 1: must be at least 2, BatchNorm in --model {args.model} cannot train on one image")
    images, classes = {"glyphs": (8000, 10), **{n: v[1:3] for n, v in TORCHVISION.items()}}.get(args.dataset, (math.inf, math.inf))
    if images * args.subset < 2:
        usage(f"--subset {args.subset:g}: must leave at least 2 of the {images} images")
    check_partition(args, images * args.subset, classes)  # before any download
    ours = settings(args, ("seed", "eval_every"))
    args.published = args.checkpoint["published"] if args.checkpoint else [
        (where, accuracy) for command, where, accuracy in paper if settings(read(command.split()), ("seed", "eval_every")) == ours]
    return args


def launch(main, doc, presets, paper, method_flags, settle=lambda args: None, argv=None):
    """Run a method script: read the command line, call main(args) once per trial, print mean ± std of the trials.

    presets: {dataset: {setting: value}}, cifar10's for datasets not named; paper: [(command line, table, accuracy)], the
    published rows; method_flags(group) adds the method's own flags; settle(args) fills defaults that depend on other flags.
    With argv (a list of words) it returns the trials' results; without, it takes the process's own and ends the process."""
    if argv is None:
        end_process(lambda: launch(main, doc, presets, paper, method_flags, settle, sys.argv[1:]))
    script = Path(sys.argv[0]).stem if main.__module__ == "__main__" else main.__module__
    args = parse(script, doc, presets, paper, method_flags, settle, argv)
    join_ranks(args)
    if args.device == "cpu":
        torch.set_num_threads(1)  # parallelism is over clients; one thread each keeps results independent of --workers
    global GRAPHS
    GRAPHS = not args.no_graph
    for number in range(-1, len(STREAMS) if args.device.startswith("cuda") else -1):
        cuda_stream(args.device, number)
    stream = cuda_stream(args.device, -1)  # graphs cannot be captured on the default stream
    with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
        results = [main(argparse.Namespace(**{**vars(args), "seed": seed})) for seed in range(args.seed, args.seed + args.trials)]
    if RANKS > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    if args.trials > 1 and not all(results):
        print("no mean over the trials: not every one had test images")
    elif args.trials > 1:
        for key in ("best", "final"):
            values = np.array([r[key] for r in results])
            print(f"{key} of {args.trials} trials: {values.mean():.2f} ± {values.std(ddof=1):.2f} %")
    return results


def end_process(run):
    """Run and leave with its exit status, without the interpreter's own clean-up: a worker thread that torch is still
    unwinding then can abort the process ("terminate called without an active exception")."""
    status = 0
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell
            setattr(sys, name, open(os.devnull, "w"))
        getattr(sys, name).reconfigure(errors="replace")  # a terminal without Greek letters
    try:
        run()
    except SystemExit as stop:  # a text is a message for stderr and status 1
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print(f"\ninterrupted{Run.current.hint() if Run.current else ''}", file=sys.stderr)
        status = 130
    except OSError as error:  # the output's reader is gone, as with `| head`, or a disk is full
        sys.stdout = open(os.devnull, "w")
        print(f"{error}{Run.current.hint() if Run.current else ''}", file=sys.stderr)
        status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print("compare runs: python common.py runs/*\ntrain:        python fedsa.py --help")
    else:
        end_process(lambda: compare(sys.argv[1:]))
