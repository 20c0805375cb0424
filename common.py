"""What the six method scripts share, in the order in which data flows; no method lives here.

Shapes in docstrings: N images, K clients, C classes, D features, B images in a batch.
"""

import argparse
import contextlib
import copy
import csv
import datetime
import functools
import io
import itertools
import json
import math
import os
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from PIL import Image, ImageDraw, ImageFont


# --- randomness -------------------------------------------------
# Every random choice is a function of (seed, purpose, round, client), never of a shared generator's state:
# resumed runs, other --workers and several processes see the same numbers.

def generator(seed, purpose, *where):
    """A numpy generator for one purpose, e.g. `generator(args.seed, "batches", round, client)`."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), *where])

def seeded(make, seed, purpose):
    """`make()` with torch's generator seeded for one purpose."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(generator(seed, purpose).integers(2**62)))
        return make()


# --- several processes ------------------------------------------
# Under torchrun every rank runs the same script. Client i trains on rank i mod n, all ranks gather what
# clients return and compute the same server step. Rank 0 prints and writes.

RANKS, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))

def join_ranks(args):
    """Join torchrun's processes: NCCL on GPUs, one for each rank, else Gloo."""
    if RANKS > 1:
        if args.device.startswith("cuda"):
            args.device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(args.device)
        torch.distributed.init_process_group("nccl" if args.device.startswith("cuda") else "gloo")
        sys.stdout = open(os.devnull, "w") if RANK > 0 else sys.stdout

def gather(mine, device):
    """The dicts of all ranks as one, tensors on this rank's device."""
    if RANKS == 1:
        return mine
    packed, shares = io.BytesIO(), [None] * RANKS
    torch.save(mine, packed)
    torch.distributed.all_gather_object(shares, packed.getvalue())
    parts = [torch.load(io.BytesIO(share), map_location=device) for share in shares]
    return {key: value for part in parts for key, value in part.items()}


# --- datasets ---------------------------------------------------

class Dataset(NamedTuple):
    x: torch.Tensor       # (N, 3, height, width) uint8
    y: torch.Tensor       # (N,) the class
    domain: torch.Tensor  # (N,) index of the domain
    test: torch.Tensor    # (N,) bool: of the published test split
    classes: list         # names
    domains: list         # names, one where the set has none

TORCHVISION = {"cifar10": "CIFAR10", "cifar100": "CIFAR100", "mnist": "MNIST", "fmnist": "FashionMNIST",
               "flowers102": "Flowers102", "usps": "USPS", "svhn": "SVHN"}
SIZES = {"mnist": 28, "fmnist": 28, "usps": 16, **dict.fromkeys(
    ["flowers102", "tinyimagenet", "digit5", "office", "pacs", "domainnet"], 64)}  # pixels; 32 elsewhere

def load_dataset(args):
    """The whole dataset on the CPU: embedded, from a folder, or downloaded."""
    folder, size = Path(args.data, args.dataset), args.image_size or SIZES.get(args.dataset, 32)
    if args.dataset == "glyphs":
        data = glyphs(size)
    elif folder.is_dir() or args.dataset not in [*TORCHVISION, "digits"]:
        data = image_folder(folder, size)
    elif args.dataset == "digits":
        data = downloaded_digits(folder, size)
    else:
        data = download(args.dataset, folder, size)
    size = max(2, round(args.subset * len(data.y)))
    keep = np.sort(generator(args.seed, "subset").permutation(len(data.y))[:size])
    return Dataset(*(value[keep] for value in data[:4]), *data[4:]) if args.subset < 1 else data

def no_data(folder, why):
    sys.exit(f"no data in {folder}: {why}\n  wanted: {folder}/[<domain>/]{{train,test}}/<class>/*.png, or "
             f"{folder}/<domain>/<class>/*.png\n  try: --data FOLDER, or --dataset glyphs, without files")

def domain_folders(folder):
    """{domain: its folder}; the folder itself where it has no domains."""
    images = torchvision.datasets.folder.IMG_EXTENSIONS
    if (folder / "train").is_dir() or any(path.suffix.lower() in images for path in folder.glob("*/*")):
        return {folder.name: folder}
    return {path.name: path for path in sorted(folder.glob("[!.]*")) if path.is_dir()}

def image_folder(folder, size):
    """An image folder, split 80/20 by us where there is no train/ and test/."""
    files = []  # (path, class, domain, part)
    for domain, path in domain_folders(folder).items():
        for part in ("train", "test") if (path / "train").is_dir() else ("",):
            with contextlib.suppress(FileNotFoundError):  # no such folder, or no classes in it
                images = torchvision.datasets.ImageFolder(path / part, allow_empty=True)
                files += [(file, images.classes[label], domain, part) for file, label in images.samples]
    if not files:
        no_data(folder, "no folders of images there")
    paths, *names, parts = zip(*files)
    key = f"{zlib.crc32(repr(paths).encode())}, newest {max(os.stat(path).st_mtime_ns for path in paths)}"
    cache = folder.with_name(f"{folder.name}-{size}px.pt")
    x = cached(cache, key, lambda: [decode(paths, size, folder)])[0]
    (classes, y), (domains, domain) = (np.unique(column, return_inverse=True) for column in names)
    ours, parts = generator(0, "split").random(len(files)) < 0.2, np.array(parts)
    test = np.where(parts == "", ours, parts == "test")
    return Dataset(x, *map(torch.from_numpy, (y, domain, test)), classes.tolist(), domains.tolist())

def decode(images, size, name):
    """Files, or PIL images, as RGB (n, 3, size, size) uint8."""
    print(f"decoding {len(images)} images of {name} (once) ...", flush=True)

    def pixels(image):
        try:
            opened = Image.open(image) if isinstance(image, str) else image
            return np.asarray(opened.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))
        except OSError as error:
            sys.exit(f"cannot decode {image}: {error}\n  remove or replace that file; nothing was cached")
    with ThreadPoolExecutor(cores()) as pool:
        return torch.from_numpy(np.stack(list(pool.map(pixels, images)))).permute(0, 3, 1, 2)

def cached(path, key, make):
    """The tensors that `make()` returns, kept in a file as long as `key` is the same."""
    if path.exists() and (held := torch.load(path, weights_only=True)).get("key") == key:
        return held["tensors"]
    tensors = make()
    if os.access(path.parent, os.W_OK):  # a course's data folder may be read-only
        torch.save({"key": key, "tensors": tensors}, scratch := path.with_suffix(f".{os.getpid()}"))
        os.replace(scratch, path)
    return tensors

def download(name, folder, size):
    """One of torchvision's datasets, downloaded into `torchvision/` beside the folder looked for."""
    root, kind = folder.parent / "torchvision", getattr(torchvision.datasets, TORCHVISION[name])
    splits = {"flowers102": ["train", "val", "test"], "svhn": ["train", "test"]}.get(name)
    options = [{"split": split} for split in splits] if splits else [{"train": True}, {"train": False}]
    try:
        parts = [kind(root, download=True, **option) for option in options]
    except Exception as error:  # URLError, RuntimeError, ConnectionError ... by dataset and version
        no_data(folder, f"it is not there, and the download to {root} failed ({error})")

    def make():
        images, labels = zip(*itertools.chain(*parts))
        return decode(images, size, name), torch.tensor(labels)
    x, y = cached(root / f"{name}-{size}px.pt", name, make)
    classes, test = getattr(parts[0], "classes", range(int(y.max()) + 1)), len(y) - len(parts[-1])
    return Dataset(x, y, torch.zeros_like(y), torch.arange(len(y)) >= test, list(classes), [name])

def downloaded_digits(folder, size):
    """Four domains: MNIST, USPS, SVHN (downloaded) and SYN, 25,000 coloured digits that we render."""
    parts = [download(name, folder.with_name(name), size) for name in ("mnist", "usps", "svhn")]
    x, index = torch.cat([render("clutter", 2500, size, 100 + k) for k in range(10)]), torch.arange(25000)
    parts.append(Dataset(x, index % 10, None, index // 10 % 5 == 4, None, None))
    columns = zip(*((p.x, p.y, torch.full_like(p.y, d), p.test) for d, p in enumerate(parts)))
    return Dataset(*map(torch.cat, columns), list("0123456789"), ["mnist", "usps", "svhn", "syn"])

FONTS = """DejaVuSans DejaVuSans-Bold DejaVuSans-Oblique DejaVuSansMono DejaVuSansMono-Bold DejaVuSerif
    DejaVuSerif-Bold DejaVuSerif-Italic STIXGeneral STIXGeneralBol STIXGeneralItalic cmr10 cmb10 cmss10 cmtt10
    cmti10""".split()
GLYPH_DOMAINS = ["plain", "thin", "texture", "clutter"]

@functools.cache
def glyphs(size=32):
    """Digits rendered from matplotlib's fonts in four domains of growing difficulty, 200 per class and
    domain, every fourth a test image; always the same."""
    ink()
    with ThreadPoolExecutor(cores(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        x = torch.cat(list(pool.map(lambda kind: render(kind, 2000, size), GLYPH_DOMAINS)))
    index = torch.arange(len(x))
    return Dataset(x, index % 10, index // 2000, index // 10 % 4 == 3, list("0123456789"), GLYPH_DOMAINS)

@functools.cache
def ink(side=64):
    """The ten digits in every font, in [0, 1], (fonts, 10, side, side)."""
    images = []
    for name, digit in itertools.product(FONTS, "0123456789"):
        path = Path(matplotlib.get_data_path(), "fonts", "ttf", f"{name}.ttf")
        font, image = ImageFont.truetype(str(path), round(0.85 * side)), Image.new("L", (side, side))
        left, top, right, bottom = font.getbbox(digit)
        corner = (side - right - left) / 2, (side - bottom - top) / 2
        ImageDraw.Draw(image).text(corner, digit, fill=255, font=font)
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

    def noise(cells, channels=1):  # smooth, around 0
        return F.interpolate(uniform(-0.5, 0.5, channels, cells, cells), size=(side, side), mode="bilinear")

    def draw(digit, rotation, dx, dy, low=0.75, high=1.1):  # in random fonts and poses, (n, 1, side, side)
        font = torch.randint(len(FONTS), (n,), generator=rng)
        angle, shear = uniform(-rotation, rotation), uniform(-0.25, 0.25)
        zoom = 1 / uniform(low, high, 2)
        theta = torch.stack([zoom[:, 0] * angle.cos(), zoom[:, 0] * (shear - angle.sin()), dx,
                             zoom[:, 1] * angle.sin(), zoom[:, 1] * angle.cos(), dy], 1).view(n, 2, 3)
        grid = F.affine_grid(theta, (n, 1, side, side), align_corners=False)
        return F.grid_sample(ink()[font, digit].unsqueeze(1), grid, align_corners=False)

    shift = uniform(-0.15, 0.15), uniform(-0.15, 0.15)
    if kind == "plain":  # dark on paper
        image = tone(0.8, 1.0) - tone(0.5, 0.8) * draw(digit, 0.2, *shift)
    elif kind == "thin":  # thin strokes, a third of the resolution
        eroded = F.adaptive_avg_pool2d(-F.max_pool2d(-draw(digit, 0.35, *shift), 2, stride=1), (11, 11))
        image = tone(0.6, 0.9) - tone(0.5, 0.8) * F.interpolate(eroded, size=(side, side))
    elif kind == "texture":  # light on gratings and noise
        angle, wave, phase = tone(0, 2 * math.pi), tone(6, 20), tone(0, 2 * math.pi)
        grating = torch.sin(wave * (ramp * angle.cos() + ramp[:, None] * angle.sin()) + phase)
        ground = 0.3 + 0.15 * grating + 0.4 * noise(6)
        image = torch.lerp(ground, tone(0.65, 0.95), draw(digit, 0.35, *shift))
    else:  # clutter: coloured, blurred, between pieces of other digits
        ground, colour = tone(0, 1, 3), tone(0, 1, 3)
        apart = (ground - colour)[..., :1, :1].mean(1, keepdim=True)  # at least 0.3
        colour = (colour[..., :1, :1] - apart.sign() * (0.3 - apart.abs()).clamp(min=0)).clamp(0, 1)
        image = noise(5, 3).mul_(0.35).add_(ground)
        for _ in range(2):
            angle, other = uniform(0, 2 * math.pi), torch.randint(10, (n,), generator=rng)
            image.lerp_(tone(0, 1, 3), 0.8 * draw(other, 1.0, 1.1 * angle.cos(), 1.1 * angle.sin()))
        image.lerp_(colour, draw(digit, 0.5, *shift, 0.65, 1.0))
        for _ in range(2):
            image = F.avg_pool2d(image, 5, 1, 2, count_include_pad=False)
    image = F.interpolate(image, size=(size, size), mode="bilinear", antialias=True)
    image += 0.04 * torch.randn(n, 1, size, size, generator=rng)
    return image.clamp_(0, 1).mul_(255).round_().byte().expand(-1, 3, -1, -1)


# --- partitions -------------------------------------------------
# A partition is a table (K, C) of how many samples of a class a client gets; `deal` hands them out. Each
# function takes labels y (N,) as numpy and a numpy generator and returns K disjoint index arrays.

def by_class(y, rng):
    return [rng.permutation(np.flatnonzero(y == c)) for c in np.unique(y)]

def deal(stock, counts):
    """stock: C index arrays; counts (K, C) -> K index arrays."""
    pieces = [np.split(index, np.cumsum(column))[:-1] for index, column in zip(stock, counts.T)]
    return [np.concatenate(part) for part in zip(*pieces)]

def dirichlet(y, clients, beta, minimum, rng, tries=100):
    """Per class, proportions ~ Dir(beta), zero for clients that already hold N/K samples (the papers'
    "practical" setting). Redrawn until everyone has `minimum` samples, at last topped up."""
    least = -1
    for _ in range(tries):
        stock, counts = [], np.zeros((clients, 0), int)
        for c in np.unique(y):
            stock.append(index := rng.permutation(np.flatnonzero(y == c)))
            room = counts.sum(1) < len(y) / clients
            share = rng.dirichlet(np.full(clients, beta)) * room
            share = share if share.sum() > 0 else room  # a tiny beta can draw only clients that are full
            cuts = np.round(np.cumsum(share / share.sum())[:-1] * len(index)).astype(int)
            counts = np.column_stack([counts, np.diff([0, *cuts, len(index)])])
        if counts.sum(1).min() > least:
            least, best = counts.sum(1).min(), (stock, counts)
        if least >= minimum:
            break
    return [np.sort(part) for part in deal(best[0], top_up(best[1], minimum))]

def top_up(counts, minimum):
    """Move samples from the largest client to the smallest until all have `minimum`; says so."""
    if counts.sum(1).min() < minimum:
        print(f"note: clients with fewer than {minimum} samples get some of the largest clients'")
    while (sizes := counts.sum(1)).min() < minimum:
        counts[[sizes.argmax(), sizes.argmin()], counts[sizes.argmax()].argmax()] += [-1, 1]
    return counts

def pathological(y, clients, classes_per_client, minimum, rng):
    """`classes_per_client` classes each, every class split at random, unbalanced points among its owners."""
    stock = by_class(y, rng)
    owns, counts = np.zeros((2, clients, len(stock)), int)
    for row in owns:  # the least owned classes first, ties at random
        row[np.lexsort((rng.random(len(stock)), owns.sum(0)))[:classes_per_client]] = 1
    for c, index in enumerate(stock):
        owners = rng.permutation(np.flatnonzero(owns[:, c]))
        if len(owners):
            least = min(-(-minimum // classes_per_client), len(index) // len(owners))
            cuts = np.sort(rng.integers(0, len(index) - least * len(owners) + 1, len(owners) - 1))
            counts[owners, c] = np.diff([0, *(cuts + least * np.arange(1, len(owners))), len(index)])
    return deal(stock, top_up(counts, 2))

def dominant(y, clients, share, rng):
    """FedFM's NIID-2: equal sizes, a share of client i's samples of class i mod C, the rest of all others.
    [choice] With m = C // K > 1 classes per client, its m classes from i·m on are dominant together."""
    stock = by_class(y, rng)
    C, m, have = len(stock), max(1, len(stock) // clients), np.array(list(map(len, stock)))
    own = (np.arange(C) - m * np.arange(clients)[:, None]) % C < m
    want = np.where(own, share / m, (1 - share) / max(1, C - m)) if C > m else np.full((clients, C), 1 / C)
    size = min(len(y) / clients, (have / np.maximum(want.sum(0), 1e-12)).min())  # the scarcest class decides
    return deal(stock, np.floor(want * size + 1e-9).astype(int))

def missing(y, clients, absent, rng):
    """FedFM's NIID-3: client i holds the classes i, ..., i+C-absent-1 (mod C, [choice]), equally shared."""
    stock = by_class(y, rng)
    C, have = len(stock), np.array(list(map(len, stock)))
    holds = (np.arange(C) - np.arange(clients)[:, None]) % C < C - absent
    return deal(stock, holds * (have // np.maximum(holds.sum(0), 1)))

def by_domain(y, domain, domain_of_client, amount, rng, names):
    """Client i gets a share `amount` <= 1 of domain `domain_of_client[i]`, or `amount` > 1 images per class;
    a domain's only client takes all there is of a class that has fewer."""
    stock = {d: rng.permutation(np.flatnonzero(domain == d)) for d in sorted(set(domain_of_client))}
    parts = []
    for i, d in enumerate(domain_of_client):
        nth, clients, index = domain_of_client[:i].count(d), domain_of_client.count(d), stock[d]
        piles, size, slack = [index], round(amount * len(index)), clients
        if amount > 1:
            piles, size, slack = [index[y[index] == c] for c in np.unique(y[index])], int(amount), 0
        least = min(map(len, piles))
        if clients > 1 and size * clients > least + slack:
            bad(f"--domain-fraction {amount:g}: too much, {clients} clients share {least} images of "
                f"{names[d]}{' and a class' * (amount > 1)}")
        parts.append(np.concatenate([pile[nth * size:(nth + 1) * size] for pile in piles]))
    return parts

def partition(args, y, domain, domains):
    """Split samples with labels y (N,) and domains (N,) by args.partition -> K index arrays."""
    rng, K, N, C = generator(args.seed, "partition"), args.clients, len(y), len(np.unique(y))
    if args.partition == "domain":
        asked = args.domain_clients or {}
        for name in asked.keys() - set(domains):
            bad(f"--domain-clients {name}: no such domain, choose from {', '.join(domains)}")
        assigned = [domains.index(name) for name, n in asked.items() for _ in range(n)]
        assigned = assigned or [i % len(domains) for i in range(K or len(domains))]
        return by_domain(y, domain, assigned, args.domain_fraction, rng, domains)
    limits = {"any": ("clients", K, 1, N // 2), "missing": ("missing", args.missing, 0, C - 1),
              "pathological": ("classes-per-client", args.classes_per_client, 1, C)}
    for flag, value, low, high in (limits["any"], limits.get(args.partition, limits["any"])):
        if value > high:
            bad(f"--{flag} {value}: must be in [{low}, {high}] with {N} samples of {C} classes")
    minimum = max(2, min(2 * args.batch_size, N // (4 * K)))  # two batches' worth that leave room for skew
    return {"iid": lambda: np.array_split(rng.permutation(N), K),
            "dirichlet": lambda: dirichlet(y, K, args.beta, minimum, rng),
            "pathological": lambda: pathological(y, K, args.classes_per_client, minimum, rng),
            "dominant": lambda: dominant(y, K, args.dominant_share, rng),
            "missing": lambda: missing(y, K, args.missing, rng)}[args.partition]()

def partition_name(about):
    words = {"dirichlet": "Dirichlet β = {beta:g}", "missing": "{missing} classes missing",
             "dominant": "{dominant_share:.0%} one class", "domain": "by domain",
             "pathological": "{classes_per_client} classes each"}
    return words.get(about["partition"], about["partition"]).format(**about)


# --- models -----------------------------------------------------

RESNETS = [f"resnet{n}" for n in (4, 6, 8, 10, 18, 34, 50, 101, 152)]
CONVNETS = {"cnn4": (2, [512]), "lsa_cnn": (2, [512]),  # name: convolutions, fully connected layers
            **{f"htcnn8-{2 * i + n}": (n, widths) for i, widths in enumerate(
                ([512], [512, 512], [1024, 512], [1024, 512, 512])) for n in (1, 2)}}
HTFE8 = ["cnn4", "googlenet", "mobilenet_v2", *RESNETS[4:]]
GROUPS = {"htfe2": ["cnn4", "resnet18"], "htfe3": ["resnet10", "resnet18", "resnet34"],
          "htfe4": HTFE8[:4], "htfe5": HTFE8[1:6], "htfe8": HTFE8, "htfe9": RESNETS,
          "htcnn8": list(CONVNETS)[2:], "res34-htc4": ["resnet34"], "htfe8-htc4": HTFE8}
MODELS = ["cnn4", "lsa_cnn", *RESNETS, "googlenet", "mobilenet_v2", *GROUPS]

def architecture(model, client):
    """(feature extractor, hidden layers of the classifier) of client i, the (i mod X)-th of a group."""
    group, heads = GROUPS.get(model, [model]), [[], [512], [256], [128]] if "-htc4" in model else [[]]
    return group[client % len(group)], heads[client % len(heads)]

class Net(nn.Module):
    """`features(x)`: uint8 images (B, 3, height, width) -> (B, D), normalised here, brought to D numbers by
    average pooling; `classifier(z)` -> (B, C); `net(x)` composes them."""

    def __init__(self, extractor, classifier, feature_dim, mean=(0.5,), std=(0.5,)):
        super().__init__()
        self.extractor, self.classifier, self.feature_dim = extractor, classifier, feature_dim
        mean, std = torch.tensor(mean).view(1, -1, 1, 1), torch.tensor(std).view(1, -1, 1, 1)
        self.register_buffer("scale", 1 / (255 * std), persistent=False)
        self.register_buffer("shift", -mean / std, persistent=False)

    def features(self, x):
        z = self.extractor(torch.addcmul(self.shift, self.scale, x.to(self.scale.dtype)))
        return z if z.shape[1] == self.feature_dim else F.adaptive_avg_pool1d(z, self.feature_dim)

    def forward(self, x):
        return self.classifier(self.features(x))

def mlp(widths):
    return [layer for a, b in zip(widths, widths[1:]) for layer in (nn.Linear(a, b), nn.ReLU())]

def feature_extractor(name, size, feature_dim, small_stem=False):
    """An extractor by name: images (B, 3, size, size) -> (B, whatever it has)."""
    if name in CONVNETS:  # convolutions 5x5 with 32 and 64 channels, pooling, ReLU; then linear layers
        layers, channels, (convolutions, widths) = [], 3, CONVNETS[name]
        for width in (32, 64)[:convolutions]:
            layers += [nn.Conv2d(channels, width, 5), nn.MaxPool2d(2), nn.ReLU()]
            channels, size = width, (size - 4) // 2
        net = nn.Sequential(*layers, nn.Flatten(), *mlp([channels * size * size, *widths]))
        return nn.Sequential(net, nn.Linear(512, feature_dim)) if name == "lsa_cnn" else net
    if name in RESNETS[:4]:  # one basic block in each of the first 1, 2, 3 or 4 stages
        net = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1])
        for stage in range(RESNETS.index(name) + 2, 5):
            setattr(net, f"layer{stage}", nn.Identity())
    else:
        options = dict(aux_logits=False, init_weights=True) if name == "googlenet" else {}
        net = getattr(torchvision.models, name)(weights=None, **options)
    setattr(net, "classifier" if name == "mobilenet_v2" else "fc", nn.Identity())
    if name == "googlenet":
        net.dropout = nn.Identity()
    if small_stem and name in RESNETS:
        net.conv1, net.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return net

def build_net(args, client=0, kind=Net, **normalisation):
    """Client i's model. The same architecture starts from the same weights at every client ([choice])."""
    name, hidden = architecture(args.model, client)

    def make():
        extractor = feature_extractor(name, args.pixels, args.feature_dim, args.small_stem)
        widths = [args.feature_dim, *hidden]
        head = [*mlp(widths), nn.Linear(widths[-1], args.classes)]
        return kind(extractor, nn.Sequential(*head) if hidden else head[0], args.feature_dim, **normalisation)
    net = seeded(make, args.seed, f"weights {name} {tuple(hidden)}")
    return net.to(args.device, memory_format=torch.channels_last)  # convolutions are fastest there

def model_size(net):
    """How many numbers travel with a model: trainable weights, as the papers count."""
    return sum(p.numel() for p in net.parameters())


# --- clients ----------------------------------------------------

class Samples(NamedTuple):
    x: torch.Tensor  # (n, 3, height, width) uint8, on the device
    y: torch.Tensor  # (n,) the class

@dataclass
class Client:
    id: int
    train: Samples
    test: Samples                       # held back for its own evaluation
    net: Net = None                     # its model; a global method loads the global weights into it
    test_features: torch.Tensor = None  # kept from an evaluation until the model is trained again
    right: torch.Tensor = None          # (2,) right answers then, by classifier and by prototype

def make_clients(args):
    """For personal models: all images, published train and test alike, divided over clients, each with
    its model. A client keeps 25 % for testing, as in the papers."""
    data = load_dataset(args)
    clients = divide(args, data, torch.arange(len(data.y)), 0.25)
    usual = torch.cat([c.test.y == int(args.counts[c.id].argmax()) for c in clients])
    args.majority = 100 * usual.float().mean().item()
    print(f"answering each client's most frequent class: {args.majority:.1f} % right")
    for client in clients:
        client.net = build_net(args, client.id)
    return clients

def make_federation(args, validation=0.0, kind=Net, **normalisation):
    """For one global model: the training images divided over clients, each holding back a share `validation`
    -> clients, global model (a `kind`, inputs normalised by mean, std), test images {domain: Samples}."""
    data = load_dataset(args)
    clients = divide(args, data, torch.nonzero(~data.test).flatten(), validation)
    tests = {}
    for d in data.domain[data.test].unique():
        index = torch.nonzero(data.test & (data.domain == d)).flatten()
        tests[data.domains[d]] = samples(data, index, args.device)
    if not tests:
        no_data(Path(args.data, args.dataset), "the server needs test images")
    net = build_net(args, kind=kind, **normalisation)
    for client in clients:
        client.net = copy.deepcopy(net)
    return clients, net, tests

def divide(args, data, pool, share):
    """Clients with the images `pool` (indices), each keeping a share for testing. Notes in args classes (C),
    class_names, pixels, counts (K, C) of training images, and each client's domain."""
    clients, args.domains = [], []
    for i, part in enumerate(partition(args, data.y[pool].numpy(), data.domain[pool].numpy(), data.domains)):
        if len(part) < 2:
            bad(f"--partition {args.partition}: leaves client {i} {len(part)} images; take fewer --clients")
        part = pool[torch.from_numpy(generator(args.seed, "train/test", i).permutation(part))]
        cut = math.ceil((1 - share) * len(part))
        clients.append(Client(i, *(samples(data, p, args.device) for p in (part[:cut], part[cut:]))))
        args.domains.append(data.domains[int(data.domain[part[0]])])
    args.classes, args.class_names, args.pixels = len(data.classes), data.classes, data.x.shape[-1]
    args.counts = np.stack([np.bincount(c.train.y.cpu().numpy(), minlength=args.classes) for c in clients])
    sizes, kinds = args.counts.sum(1), (args.counts > 0).sum(1)
    print(f"{args.dataset}: {len(data.y)} images of {args.pixels} pixels; {len(clients)} clients with "
          f"{sizes.min()}-{sizes.max()} training images of {kinds.min()}-{kinds.max()} of {args.classes} "
          f"classes ({partition_name(vars(args))}), model {args.model}")
    return clients

def samples(data, index, device):
    return Samples(data.x[index].to(device, memory_format=torch.channels_last), data.y[index].to(device))

def participants(clients, t, args):
    """A share ρ (args.participation) of the clients, less those that fail (args.drop_rate). Largest first."""
    size = max(1, round(args.participation * len(clients)))
    chosen = generator(args.seed, "participants", t).choice(len(clients), size, replace=False)
    report = [i for i in chosen if generator(args.seed, "drop", t, i).random() >= args.drop_rate]
    return [clients[i] for i in sorted(report or chosen[:1], key=lambda i: (-len(clients[i].train.y), i))]

def for_each_client(function, clients, *rest):
    """`[function(client, *rest) for client in clients]`, side by side and over the ranks; `rest` ends with
    t, args. What a client returns ends with its loss; where that is not finite, SystemExit 1."""
    *_, t, args = rest
    mine = [client for client in clients if client.id % RANKS == RANK]
    results = side_by_side(lambda client: function(client, *rest), mine, args.workers)
    results = gather({client.id: result for client, result in zip(mine, results)}, args.device)
    for i, result in results.items():
        if not result[-1].isfinite().all():
            sys.exit(f"client {i}'s loss is not finite in round {t}: lower --lr {args.lr:g} or its weights")
    return [results[client.id] for client in clients]

def side_by_side(function, items, workers):
    """`[function(item) for item in items]`, `workers` at a time, each on one torch thread."""
    if workers == 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return list(pool.map(function, items))


# --- local training ---------------------------------------------

def sgd_step(module, loss, args, graph=True, **other):
    """`step(*tensors)`: one SGD step on `loss(module, *tensors, args)` -> the loss. `other`: options besides
    args'. Momentum starts at zero here."""
    options = dict(lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay) | other
    optimizer = optimizer_of(module, **options)
    module.train()

    def step(*tensors):
        optimizer.zero_grad()
        value = loss(module, *tensors, args)
        value.backward()
        optimizer.step()
        return value.detach()
    graph = graph and next(module.parameters()).is_cuda and not args.no_graph
    return graphed(step, module) if graph else step

def minibatches(client, t, args):
    """(x, y) for E = args.local_epochs over the client's training images, shuffled anew in each."""
    client.test_features = None  # its model is about to change
    rng = generator(args.seed, "batches", t, client.id)
    return shuffled(client.train, args.local_epochs, args.batch_size, rng)

def shuffled(tensors, epochs, batch_size, rng):
    """Batches, tuples of tensors (B, ...). [choice] The last, smaller one is used (HtFLlib drops it); a
    single sample joins the batch before, because BatchNorm cannot train on one."""
    orders = np.stack([rng.permutation(len(tensors[0])) for _ in range(epochs)])
    for order in torch.from_numpy(orders).to(tensors[0].device):
        batches = list(order.split(batch_size))
        if len(batches) > 1 and len(batches[-1]) == 1 < batch_size:
            batches[-2:] = [torch.cat(batches[-2:])]
        for index in batches:
            yield tuple(value[index] for value in tensors)

def average(states, weights):
    """Weighted mean of state_dicts (FedPLCC Eq. 1, FedFM Eq. 11), in float64; counters: the largest."""
    return {name: sum(state[name].double() * w for state, w in zip(states, weights)) / sum(weights)
            if value.is_floating_point() else torch.stack([state[name] for state in states]).amax(0)
            for name, value in states[0].items()}

def optimizer_of(module, **options):
    """The module's SGD, momentum at zero. Made once: a CUDA graph knows it by its memory."""
    if not hasattr(module, "optimizer"):
        module.optimizer = torch.optim.SGD(module.parameters(), **options, fused=True)
        module.graphs, module.momentum = {}, []
        for p in module.parameters() if options["momentum"] else ():
            module.momentum.append(torch.zeros_like(p))
            module.optimizer.state[p]["momentum_buffer"] = module.momentum[-1]
    for buffer in module.momentum:
        buffer.zero_()
    return module.optimizer

# A CUDA graph launches a step's hundreds of small kernels at once. It repeats what it recorded on the same
# memory: inputs are copied there, then it is replayed. The graphs never run together and share one pool.

graph_pool = functools.cache(torch.cuda.graph_pool_handle)

def graphed(step, module):
    """`step` as a CUDA graph, captured once per shapes of its tensors and kept with the module."""
    def replay(*tensors):
        shapes = tuple((value.shape, value.dtype) for value in tensors)
        if shapes not in module.graphs:
            module.graphs[shapes] = capture(step, module, tensors)
        inputs, graph, loss = module.graphs[shapes]
        for held, value in zip(inputs, tensors):
            held.copy_(value)
        graph.replay()
        return loss.clone()
    return replay

def capture(step, module, tensors):
    """One step recorded -> its inputs, graph, loss (all in fixed memory). The module stays as it was."""
    inputs, kept = [value.clone() for value in tensors], [*module.state_dict().values(), *module.momentum]
    before = [value.clone() for value in kept]
    for _ in range(3):  # warm up: libraries choose kernels and take their memory
        step(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=graph_pool(), stream=torch.cuda.current_stream()):
        loss = step(*inputs)
    for value, old in zip(kept, before):
        value.copy_(old)
    return inputs, graph, loss


# --- evaluation -------------------------------------------------

def distances(a, b):
    """Euclidean distances between rows of a (n, D), b (m, D) -> (n, m), exact also where small."""
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")

@torch.no_grad()
def extract(net, x):
    """Features (n, D) of images x (n, ...), in eval mode, in batches that suit a CPU's cache."""
    net.eval()
    return torch.cat([net.features(batch) for batch in x.split(1000 if x.is_cuda else 100)])

def class_means(net, data, args):
    """Local prototypes (FedTGP and FedSA Eq. 2, FedFM Eq. 8): P_i^c, the mean of f(x) over class c
    -> prototypes (C, D), zero where the client lacks the class, and counts n_ic (C,)."""
    member = F.one_hot(data.y, args.classes).float()
    counts = member.sum(0)
    return member.T @ extract(net, data.x) / counts.clamp(min=1).unsqueeze(1), counts

def nearest_prototype(z, prototypes, known):
    """The class of the nearest prototype: z (n, D), prototypes (C, D), known (C,) bool -> (n,)."""
    weight = known.unsqueeze(1).to(z.dtype)
    centre = (prototypes * weight).sum(0) / weight.sum().clamp(min=1)  # around 0 cdist keeps its digits
    return torch.cdist(z - centre, prototypes - centre).masked_fill(~known, math.inf).argmin(1)

@torch.no_grad()
def own_test(client, prototypes, known, t, args):
    """Right answers on the client's own test images, by classifier and by nearest prototype -> (2,)."""
    if client.test_features is None:
        client.test_features = extract(client.net, client.test.x)
    z, y = client.test_features, client.test.y
    guesses = client.net.classifier(z).argmax(1), nearest_prototype(z, prototypes, known)
    return torch.stack([(guess == y).sum() for guess in guesses])

def evaluate_personal(clients, prototypes, known, t, args):
    """Accuracy in % of all clients' models on their own test images, Σ right / Σ images, by classifier and
    nearest prototype (C, D), known (C,) bool. nan in rounds that --eval-every leaves out."""
    if t % args.eval_every and t != args.rounds:
        return {"classifier": math.nan, "prototype": math.nan}
    for client, right in zip(clients, for_each_client(own_test, clients, prototypes, known, t, args)):
        client.right = right.cpu()
    shares = 100 * sum(client.right for client in clients) / sum(len(client.test.y) for client in clients)
    return {"classifier": float(shares[0]), "prototype": float(shares[1])}

def evaluate_global(net, tests, t, args, validation=()):
    """Accuracy in % of the global model on each domain's test images {domain: Samples}; "test" is the mean
    over domains, "validation" that over the clients' images (Samples). nan as above."""
    if t % args.eval_every and t != args.rounds:
        return dict.fromkeys(["test", *tests, "validation"], math.nan)
    net.eval()
    right, each = torch.no_grad()(lambda batch: (net(batch[0]).argmax(1) == batch[1]).sum()), []
    for x, y in (*tests.values(), *validation):
        size = 1000 if x.is_cuda else 100
        hits = side_by_side(right, list(zip(x.split(size), y.split(size))), args.workers)
        each.append(100 * float(sum(hits)) / len(y))
    scores = {"test": float(np.mean(each[:len(tests)]))}
    scores |= dict(zip(tests, each)) if len(tests) > 1 else {}
    return scores | ({"validation": float(np.mean(each[len(tests):]))} if validation else {})


# --- run folder -------------------------------------------------

class Run:
    """One run's folder, log, printed lines, pictures and checkpoints.

    headline: the prediction that the paper reports; beside: our round beside a published number, "best" or
    "final"; select: the column that picks the best round, if not the prediction; personal: checkpoints hold
    clients' models; modules: others to hold, a global model as `net` (with its `tests`). The state begins
    with the pictures' stars, `guides`: vectors (C, D), or (vectors (G, D), classes (G,), ...)."""

    def __init__(self, args, headline, clients, *, beside="best", select="", guides="prototypes", tests=None,
                 personal=True, **modules):
        self.args, self.headline, self.clients, self.modules = args, headline, clients, modules
        self.beside, self.select, self.personal, self.tests, self.rows = beside, select, personal, tests, []
        args.guides = guides
        if RANK == 0:
            self.folder = Path(args.resume or new_folder(args))
            about = {"script": args.script, "headline": headline, "select": select, **args.settings}
            (self.folder / "args.json").write_text(json.dumps(about, indent=1) + "\n")
            self.picture("partition", plot_partition)

    def start(self, *state):
        """What lasts over rounds, tensors or tuples of them: `state`, or with --resume the checkpoint's."""
        if held := self.args.checkpoint:
            for name, module in self.modules.items():
                module.load_state_dict(held["modules"][name])
            for client in self.clients if self.personal else ():
                client.net.load_state_dict(held["nets"][client.id])
            state, self.rows = on_device(held["state"], self.args.device), held["rows"]
            print(f"resuming after round {len(self.rows)} of {self.args.rounds}")
        self.state = state
        return state[0] if len(state) == 1 else state

    def rounds(self):
        for t in range(len(self.rows) + 1, self.args.rounds + 1):
            self.began = time.time()
            yield t

    def report(self, t, scores, losses, up, down, state, **extra):
        """End round t: log, print, and when it is time save and draw. scores: {prediction: accuracy in %};
        losses: the clients'; up, down: how many numbers all clients together sent and got; state: a tuple;
        extra: more to log, SystemExit 1 if not finite."""
        args, extra = self.args, {name: float(value) for name, value in extra.items()}
        if not all(map(math.isfinite, extra.values())):
            sys.exit(f"round {t}: not finite: {extra}; lower --lr {args.lr:g}")
        scores = {self.headline: scores[self.headline], **scores}
        row = {"round": t, "accuracy": scores[self.headline], **{f"acc_{k}": v for k, v in scores.items()},
               "loss": float(sum(losses) / len(losses)), "up": int(up), "down": int(down),
               "seconds": round(time.time() - self.began, 3), **extra}
        self.rows, self.state = [*self.rows, row], state
        if args.checkpoint_every and (t % args.checkpoint_every == 0 or t == args.rounds):
            self.save()
        if RANK == 0:
            with open(self.folder / "log.csv", "w", newline="") as file:
                writer = csv.DictWriter(file, list(row), extrasaction="ignore")
                writer.writeheader()
                writer.writerows(self.rows)
        if args.plot_every and t % args.plot_every == 0 and t < args.rounds:
            self.draw_features(t, f"-{t:04}")
        shown = [f"{k} {v:5.2f}" for k, v in scores.items() if v == v] or ["not evaluated"]
        shown += [f"loss {row['loss']:.4f}", *(f"{k} {v:.4g}" for k, v in extra.items())]
        left = datetime.timedelta(seconds=round(sum(r["seconds"] for r in self.rows) / t * (args.rounds - t)))
        print(f"round {t:{len(str(args.rounds))}}/{args.rounds}", *shown, f"up {short(up)}",
              f"down {short(down)}", f"{row['seconds']:.2f} s", f"left {left}", sep="  ", flush=True)

    def save(self):
        """Write checkpoint.pt: to another file first, so that there is always a complete one."""
        nets = {c.id: c.net.state_dict() for c in self.clients if self.personal and c.id % RANKS == RANK}
        held = {"script": self.args.script, "settings": self.args.settings, "rows": self.rows,
                "state": self.state, "nets": gather(nets, "cpu"),
                "modules": {name: module.state_dict() for name, module in self.modules.items()}}
        if RANK == 0:
            torch.save(held, self.folder / "checkpoint.tmp")
            os.replace(self.folder / "checkpoint.tmp", self.folder / "checkpoint.pt")

    def picture(self, name, draw, *data):
        if RANK == 0 and not self.args.no_plots:
            draw(*data, self.args).savefig(self.folder / f"{name}.png")

    def draw_features(self, t, suffix=""):
        """features.png and margins.png after round t."""
        stars, net = self.state[0], self.modules.get("net")
        if not len(stars):  # FedPLCC without prototypes
            stars = torch.zeros(self.args.classes, self.args.feature_dim, device=self.args.device)
        if isinstance(stars, torch.Tensor):
            known = stars.abs().sum(1).nonzero().flatten()
            stars = stars[known], known
        most = sorted(self.clients, key=lambda client: -len(client.test.y))[:6]
        groups = {f"client {client.id}": (client.net, client.test) for client in most}
        if net:
            groups = {name: (net, data) for name, data in self.tests.items()}
        trained = [(net or client.net, client.train) for client in self.clients]
        self.picture(f"features{suffix}", plot_features, groups, *stars[:2], t)
        self.picture(f"margins{suffix}", plot_margins, trained, *stars[:2], t)

    def finish(self):
        """Pictures and last lines -> {"best by ...": %, "final by ...": %} of each prediction."""
        curves = [(key[4:], key, [self.rows]) for key in self.rows[0] if key.startswith("acc_")]
        self.picture("curves", plot_curves, curves)
        self.draw_features(self.args.rounds)
        results = {}
        for kind in predictions(self.rows):
            (best, at), final = best_round(self.rows, kind, self.select), self.rows[-1][f"acc_{kind}"]
            results |= {f"best by {kind}": best, f"final by {kind}": final}
            print(f"by {kind}: final {final:.2f} %, best {best:.2f} % in round {at} "
                  f"(picked by {self.select[4:] or 'test images'})")
        if self.clients[0].right is not None:
            k = ("classifier", "prototype").index(self.headline)
            each = [100 * float(c.right[k]) / len(c.test.y) for c in self.clients if len(c.test.y)]
            if each:
                print(f"clients, by {self.headline}: {min(each):.1f} to {max(each):.1f} %, "
                      f"median {np.median(each):.1f}")
        for where, accuracy, unsure in self.args.published:
            print(f"published{unsure and f', with {unsure}'}: {accuracy} % ({where}); "
                  f"this run's {self.beside} round: {results[f'{self.beside} by {self.headline}']:.2f} %")
        up, down, seconds = (sum(row[k] for row in self.rows) for k in ("up", "down", "seconds"))
        print(f"traffic: {short(up)} numbers up, {short(down)} down; {seconds:.0f} s in all")
        print(f"everything is in {self.folder}" if RANK == 0 else "")
        return results

def on_device(value, device):
    return tuple(on_device(v, device) for v in value) if isinstance(value, tuple) else value.to(device)

def new_folder(args):
    """Make <out>/<script>-<dataset>-s<seed>, with a number added where that is taken."""
    for number in itertools.count(1):
        folder = Path(args.out, f"{args.script}-{args.dataset}-s{args.seed}" + f"-{number}" * (number > 1))
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder

def predictions(rows):
    return [kind for kind in ("classifier", "prototype", "test") if f"acc_{kind}" in rows[0]]

def best_round(rows, kind, select=""):
    """(accuracy, round) of a prediction's best round, best by itself or by the column `select`."""
    best = max(rows, key=lambda row: np.nan_to_num(row[select or f"acc_{kind}"], nan=-1))
    return best[f"acc_{kind}"], int(best["round"])

def short(number):  # 1234567 -> 1.23 M
    return EngFormatter(places=2 if number >= 1000 else 0)(float(number)).strip()

def mean_std(values):
    return f"{np.mean(values):.2f}" + (f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else "")


# --- pictures ---------------------------------------------------

matplotlib.rcParams.update({"figure.constrained_layout.use": True, "axes.grid": True, "grid.alpha": 0.25,
                            "legend.frameon": False, "legend.fontsize": "small", "savefig.dpi": 150})
BESIDE = dict(loc="center left", bbox_to_anchor=(1, 0.5))  # a legend right of the axes

def canvas(args, what, width, height, columns=1):
    """(figure, axes), the title over the first of them."""
    figure = Figure(figsize=(width, height))
    axes = figure.subplots(1, columns, squeeze=False)[0]
    about = f"{args.script} on {args.dataset}, {partition_name(vars(args))}, seed {args.seed}" if args else ""
    axes[0].set_title(f"{about}\n{what}")
    return figure, axes if columns > 1 else axes[0]

def class_ticks(args):
    every = -(-args.classes // 40)  # at most 40 names
    return range(0, args.classes, every), [str(name)[:14] for name in args.class_names[::every]]

def plot_partition(args):
    """The papers' bubble plot: a dot's area is a client's number of training images of a class."""
    (K, C), (client, kind) = args.counts.shape, np.nonzero(args.counts)
    figure, axis = canvas(args, f"{args.counts.sum()} training images", 3 + min(12, K / 3), 2 + min(9, C / 3))
    area = 400 * min(1, 10 / C) ** 2 / args.counts.max()
    dots = axis.scatter(client, kind, s=area * args.counts[client, kind], alpha=0.7)
    scale = dots.legend_elements("sizes", num=3, func=lambda size: size / area)
    axis.legend(*scale, title="images", **BESIDE)
    axis.set(xlabel="client", ylabel="class", xlim=(-0.7, K - 0.3), ylim=(-0.7, C - 0.3))
    axis.set_yticks(*class_ticks(args))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    if args.partition == "domain" and K <= 20:
        axis.set_xticks(range(K), [f"{i}\n{name[:10]}" for i, name in enumerate(args.domains)])
    return figure

def plot_curves(curves, args):
    """Accuracy over rounds and traffic, and losses: means over seeds, bands from smallest to largest.
    curves: [(label, column, logs of one or more seeds)]; args: None for several runs."""
    figure, axes = canvas(args, "", 15, 4.2 + 0.1 * len(curves), 3)
    for n, (label, key, logs) in enumerate(curves):
        T, line = min(map(len, logs)), ["-", "--", ":", "-."][n % 4]
        table = {k: np.array([[row[k] for row in rows[:T]] for rows in logs], float) for k in logs[0][0]}
        scored, rounds = ~np.isnan(table[key]).any(0), np.arange(1, T + 1)
        y, sent = table[key][:, scored], np.cumsum(table["up"] + table["down"], 1).mean(0)
        for axis, x in zip(axes, (rounds, sent)):
            axis.plot(x[scored], y.mean(0), line, label=label, color=f"C{n}")
            axis.fill_between(x[scored], y.min(0), y.max(0), color=f"C{n}", alpha=0.15)
        for k in ("loss", "server_loss") if args is None or n == 0 else ():
            if k in table:
                axes[2].plot(rounds, table[k].mean(0), ":" if k == "server_loss" else "-", color=f"C{n}")
    if hasattr(args, "majority"):
        axes[0].axhline(args.majority, color="grey", linestyle=":", label="most frequent class")
    axes[0].set(xlabel="round", ylabel="test accuracy (%)")
    axes[1].set(xlabel="numbers sent up and down, all clients", xscale="log" if args is None else "linear")
    axes[1].xaxis.set_major_formatter(EngFormatter())
    axes[2].set(xlabel="round", ylabel="the clients' mean loss (dotted: the server's)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure

def embed(z, y, stars, seed):
    """Features (n, D) of classes y (n,) and stars (G, D) in two dimensions, and how: t-SNE with scikit-learn;
    else, of unit-length features, the directions in which the class means differ most."""
    try:
        from sklearn.manifold import TSNE
        points = torch.cat([z, stars]).numpy()
        tsne = TSNE(perplexity=min(30, len(points) / 4), init="pca", random_state=seed)
        return tsne.fit_transform(points), "t-SNE"
    except ImportError:
        points = F.normalize(torch.cat([z, stars]))
        means = torch.stack([points[:len(y)][y == c].mean(0) for c in y.unique()])
        plane = torch.linalg.svd(means - means.mean(0), full_matrices=False)[2][:2]
        return (points @ plane.T).numpy(), "linear picture of unit-length features"

def plot_features(groups, stars, classes, t, args, most=900):
    """Test features of at most ten classes: colour is the class, marker the client or domain, stars are the
    server's, (G, D) of classes (G,). groups {name: (net, Samples)}."""
    parts = []
    for g, (net, data) in enumerate(groups.values()):
        index = generator(args.seed, "picture").permutation(len(data.y))[:-(-most // len(groups))]
        parts.append((extract(net, data.x[index]), data.y[index], torch.full_like(data.y[index], g)))
    z, y, group = (torch.cat(part).cpu() for part in zip(*parts))
    stars, classes = stars.cpu(), classes.cpu()
    points, how = embed(z, y, stars, args.seed)
    shown = y.bincount(minlength=args.classes).argsort(descending=True, stable=True)[:10].sort().values
    figure, axis = canvas(args, f"features after round {t}", 7.5, 5.6)
    axis.set(xticks=[], yticks=[], xlabel=f"{how}: {len(shown)} of {args.classes} classes")
    markers = dict(zip(groups, itertools.cycle("o^sDvPX<>ph8Hd")))
    for n, k in enumerate(shown):
        axis.plot([], [], "s", color=f"C{n}", label=str(args.class_names[k])[:18])
        for g, marker in enumerate(markers.values()):
            own = points[:len(z)][(y == k) & (group == g)]
            axis.plot(*own.T, marker, color=f"C{n}", markersize=4, markeredgewidth=0, alpha=0.65)
        own = points[len(z):][classes == k]
        axis.plot(*own.T, "*", color=f"C{n}", markersize=13, markeredgecolor="black", zorder=3)
    for name, marker in {**markers, f"server's {args.guides}": "*"}.items():
        axis.plot([], [], marker, color="grey", label=name[:20])
    axis.legend(**BESIDE)
    return figure

def margins(vectors, classes, C):
    """Per class the smallest distance of its vectors to another class's, C numbers; inf without."""
    apart = distances(vectors, vectors).masked_fill(classes == classes.unsqueeze(1), math.inf)
    return [min(apart[classes == c].flatten().tolist(), default=math.inf) for c in range(C)]

def plot_margins(clients, stars, classes, t, args):
    """Margins per class (FedTGP Fig. 1): the best client's, the mean over clients that have one, the
    server's. clients: [(net, Samples)], stars (G, D) of classes (G,)."""
    table = []
    for net, data in clients:
        means, counts = class_means(net, data, args)
        table.append(margins(means[counts > 0], counts.nonzero().flatten(), args.classes))
    table, server = np.ma.masked_invalid(table), np.ma.masked_invalid(margins(stars, classes, args.classes))
    figure, axis = canvas(args, f"margins after round {t}: higher is better separated", 8, 4)
    axis.plot(table.max(0), "^", label=f"best of {len(clients)} clients")
    axis.plot(table.mean(0), "o", label="mean over the clients that have the class")
    axis.plot(server, "*", markersize=12, label=f"server's {args.guides}")
    axis.set_xticks(*class_ticks(args), rotation=90 if args.classes > 10 else 0)
    axis.set(ylabel="distance to the nearest other class", ylim=(0, None))
    figure.legend(loc="outside lower center", ncols=3)
    return figure


# --- comparing runs ---------------------------------------------

def table_row(settings):
    """What runs of one row of a table have in common."""
    return {k: v for k, v in sorted(settings.items()) if k not in ("seed", "eval_every")}

def compare(folders):
    """Print a Markdown table of runs, mean ± std over seeds; draw their headlines into `compare.png`."""
    groups, curves = {}, []
    for log in (path for folder in folders for path in Path(folder).glob("log.csv")):
        about = json.loads((log.parent / "args.json").read_text())
        with open(log, newline="") as file:
            rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
        groups.setdefault(json.dumps(table_row(about)), (about, {}))[1][about["seed"]] = rows
    if not groups:
        bad("no run folders; try: python common.py runs/*")
    heads = "method dataset setting flags seeds by best_% final_% rounds numbers_sent s_per_round"
    print("|", heads.replace(" ", " | ").replace("_", " "), "|\n" + "|---" * 11 + "|")
    for about, runs in groups.values():
        others = [other for other, _ in groups.values()
                  if (other["script"], other["dataset"]) == (about["script"], about["dataset"])]
        changed = {k: v for k, v in table_row(about).items() if any(other.get(k) != v for other in others)}
        flags = " ".join(f"--{k.replace('_', '-')}" + f" {v}" * (v is not True)
                         for k, v in changed.items() if v is not False)
        logs = list(runs.values())
        sent = np.mean([sum(row["up"] + row["down"] for row in rows) for rows in logs])
        seconds = np.median([row["seconds"] for rows in logs for row in rows])
        for kind in predictions(logs[0]):
            best = [best_round(rows, kind, about["select"].replace("accuracy", ""))[0] for rows in logs]
            final = [rows[-1][f"acc_{kind}"] for rows in logs]
            setting = f"{partition_name(about)}, {about['model']}"
            print(f"| {about['script']}", about["dataset"], setting, flags,
                  ",".join(map(str, sorted(runs))), kind, mean_std(best), mean_std(final), len(logs[0]),
                  short(sent), f"{seconds:.2f} |", sep=" | ")
        curves.append((f"{about['script']} {flags}, by {about['headline']}", "accuracy", logs))
    plot_curves(curves, None).savefig(path := Path(folders[0]).parent / "compare.png")
    print(f"\ncurves: {path}")


# --- command line -----------------------------------------------

def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

def bad(message):
    """One line on stderr, exit status 2."""
    print(f"{Path(sys.argv[0]).name}: {message.removeprefix('argument ')}", file=sys.stderr)
    raise SystemExit(2)

def number(kind, interval):
    """An argparse type: an int or float in an interval as in mathematics: "(0, 1]", "[1, inf)"."""
    low, high = (float(v) for v in interval.strip("[]()").split(","))

    def parse(text):
        with contextlib.suppress(ValueError):
            value = kind(text)
            closed = [low] * (interval[0] == "[") + [high] * (interval[-1] == "]")
            if low < value < high or value in closed:
                return value
        raise argparse.ArgumentTypeError(f"{text}: must be a{' whole' * (kind is int)} number in {interval}")
    return parse

def domain_clients(text):
    """An argparse type: "mnist:1,usps:4" -> {"mnist": 1, "usps": 4}."""
    try:
        return {name: COUNT(n) for name, n in (pair.split(":") for pair in text.split(","))}
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"{text}: must be NAME:N,NAME:N ..., at least 1 client each")

def device(text):
    """An argparse type: auto, cpu, cuda or cuda:N -> a device that torch has here."""
    text = ("cuda" if torch.cuda.is_available() else "cpu") if text == "auto" else text
    try:
        torch.zeros(1, device=text)
    except (RuntimeError, AssertionError):
        raise argparse.ArgumentTypeError(f"{text}: must be auto, cpu or a device that torch sees here")
    return text

COUNT, FROM_ZERO = number(int, "[1, 1e9]"), number(int, "[0, 1e9]")
POSITIVE, SHARE = number(float, "(0, inf)"), number(float, "(0, 1]")
PARTITIONS = ["iid", "dirichlet", "pathological", "dominant", "missing", "domain"]
FLAGS = {  # group: [(flag, type, default, help)]; a list: choices, bool: a switch
    "data": [
        ("dataset", str, "glyphs", f"glyphs (embedded), digits, {', '.join(TORCHVISION)}, or a folder"),
        ("data", str, "./data", "where image folders and downloads lie"),
        ("subset", SHARE, 1.0, "a random share of the data"),
        ("image-size", number(int, "[16, 1024]"), None, "pixels per side (None: the dataset's own)")],
    "federation": [
        ("clients", COUNT, None, "K (None: one per domain in the partition 'domain')"),
        ("participation", SHARE, 1.0, "ρ, the share of clients in a round"),
        ("partition", PARTITIONS, "dirichlet", "of data"),
        ("beta", POSITIVE, 0.1, "β of 'dirichlet'"),
        ("classes-per-client", COUNT, 2, "of 'pathological'"),
        ("missing", FROM_ZERO, 1, "classes that a client lacks in 'missing'"),
        ("dominant-share", SHARE, 0.46, "of a client's one large class in 'dominant'"),
        ("domain-clients", domain_clients, None, "NAME:N,NAME:N ... (None: client i has domain i mod n)"),
        ("domain-fraction", POSITIVE, 1.0, "a client's share of its domain; above 1: images per class"),
        ("drop-rate", number(float, "[0, 1]"), 0.0, "share of participants that fail")],
    "model": [
        ("model", MODELS, "cnn4", "one for all, or a group of which client i has the (i mod X)-th"),
        ("feature-dim", number(int, "[2, 65536]"), 512, "D, the size of a prototype"),
        ("small-stem", bool, False, "ResNets: 3x3 stride 1 without max-pool, not the 7x7 stem")],
    "training": [
        ("rounds", COUNT, 1000, "T"), ("local-epochs", COUNT, 1, "E"), ("batch-size", COUNT, 10, "B"),
        ("lr", POSITIVE, 0.01, "learning rate η"),
        ("momentum", number(float, "[0, 1)"), 0.0, "of SGD; starts at zero in every round"),
        ("weight-decay", number(float, "[0, inf)"), 0.0, "of SGD")],
    "method": [],
    "run": [
        ("seed", number(int, "[0, 4294967295]"), 0, "of everything random"),
        ("trials", COUNT, 1, "repeat with the seeds SEED, SEED+1, ... and print mean ± std"),
        ("device", device, "auto", "auto, cpu, cuda, cuda:1 ..."),
        ("workers", FROM_ZERO, 0, "clients side by side on a CPU (0: one per core)"),
        ("no-graph", bool, False, "no CUDA graphs, to compare"),
        ("eval-every", COUNT, 1, "rounds between evaluations; also at the end"),
        ("checkpoint-every", FROM_ZERO, 10, "rounds between checkpoints; also at the end (0: none)"),
        ("resume", str, None, "the folder of a run to go on with"),
        ("out", str, "runs", "where run folders are made"),
        ("plot-every", FROM_ZERO, 0, "rounds between features and margins (0: at the end)"),
        ("no-plots", bool, False, "no pictures")]}
NOT_SETTINGS = "data device workers no_graph trials out resume checkpoint_every plot_every no_plots".split()

def make_parser(script, flags):
    """The flags that all scripts share, and the method's own."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(prog=script + ".py", allow_abbrev=False, formatter_class=formatter)
    parser.error = bad
    for name, rows in FLAGS.items():
        group = parser.add_argument_group(name)
        for flag, kind, default, text in rows:
            how = {"choices": kind} if isinstance(kind, list) else {"type": kind}
            how = {"action": "store_true"} if kind is bool else how
            group.add_argument(f"--{flag}", default=default, help=text, **how)
        if name == "method":
            flags(group)
    return parser

def read_checkpoint(folder, script):
    """A run folder's checkpoint. Exit status 2 where there is none that this script can go on from."""
    path = Path(folder, "checkpoint.pt")
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)  # runs no code from the file
        found = held["script"]
    except Exception as error:  # absent, truncated, foreign: torch raises many kinds
        bad(f"--resume {folder}: no complete checkpoint.pt there ({type(error).__name__})")
    if found != script:
        bad(f"--resume {folder}: it is a run of {found}.py, not of {script}.py")
    return held

def parse(script, defaults, published, flags, settle, words):
    """Command line -> args: what the user typed, over the dataset's defaults, over the shared ones. settings:
    the flags that decide a run's numbers; published: the rows that have the same."""
    def read(words, saved=None):
        parser = make_parser(script, flags)
        typed = parser.parse_args(words)
        several = "domains" in defaults and len(domain_folders(Path(typed.data, typed.dataset))) > 1
        preset = saved or defaults.get(typed.dataset) or defaults["domains" if several else "cifar10"]
        parser.set_defaults(**preset)
        args = parser.parse_args(words)
        if args.partition == "domain" != preset["partition"]:
            args.clients = typed.clients  # the default number is meant for the default partition
        elif args.clients is None and args.partition != "domain":
            args.clients = 20
        settle(args)
        args.settings = {k: v for k, v in vars(args).items() if k not in NOT_SETTINGS}
        return args

    args, held = read(words), None
    if args.resume is not None:
        held = read_checkpoint(args.resume, script)
        args = read(words, held["settings"])
        for name, value in held["settings"].items():
            if args.settings.get(name) != value:
                flag = name.replace("_", "-")
                bad(f"--{flag} {args.settings.get(name)}: must be {value}, as in {args.resume}")
        if args.trials > 1:
            bad(f"--trials {args.trials}: must be 1 with --resume")
    if args.batch_size == 1 and args.model.split("-")[0] not in ("cnn4", "lsa_cnn", "htcnn8"):
        bad(f"--batch-size 1: must be at least 2, BatchNorm in {args.model} cannot train on one image")
    args.checkpoint, args.script = held, script
    args.workers = (args.workers or max(1, cores() // RANKS)) if args.device == "cpu" else 1
    args.published = [(where, accuracy, "".join(unsure)) for command, where, accuracy, *unsure in published
                      if table_row(read(command.split()).settings) == table_row(args.settings)]
    return args

def launch(main, defaults, published, flags, settle=lambda args: None, words=None):
    """Run a method script: read the command line, call main(args) once per trial.

    defaults: {dataset: {setting: value}}, "cifar10" for datasets not named, "domains" for such with several;
    published: [(command line, table, accuracy[, what is open])]; flags(group) adds the method's own;
    settle(args) fills defaults that depend on other flags."""
    script = Path(sys.argv[0]).stem if main.__module__ == "__main__" else main.__module__
    args = parse(script, defaults, published, flags, settle, sys.argv[1:] if words is None else words)
    join_ranks(args)
    torch.set_num_threads(1)  # clients are what runs side by side
    results, seeds = [], range(args.seed, args.seed + args.trials)
    stream = torch.cuda.Stream() if args.device.startswith("cuda") else None  # the default one has no graphs
    with torch.cuda.stream(stream):
        for seed in seeds:
            trial = {**vars(args), "seed": seed, "settings": {**args.settings, "seed": seed}}
            try:
                results.append(main(argparse.Namespace(**trial)))
            except KeyboardInterrupt:
                sys.exit(f"\ninterrupted: {script}.py --resume RUNFOLDER goes on from the last checkpoint")
    for key in results[0] if args.trials > 1 else ():
        print(f"{key}: {mean_std([result[key] for result in results])} %, seeds {', '.join(map(str, seeds))}")
    if RANKS > 1:
        torch.distributed.destroy_process_group()
    return results

if __name__ == "__main__":
    compare(sys.argv[1:])
