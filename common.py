"""What the six scripts share, in the order in which data flows; no method lives here.
Shapes: N images, K clients, C classes, D features, B images in a batch."""

import argparse
import csv
import functools
import itertools
import json
import math
import os
import sys
import time
import zlib
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from PIL import Image, ImageDraw, ImageFont

CORES = torch.get_num_threads()

# --- randomness ---
def generator(seed, purpose, *where):
    """A numpy generator for one purpose, round, client: no random choice depends on a shared state."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), *where])

def seeded(make, seed, purpose):
    """`make()` with torch's generator seeded for one purpose."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(generator(seed, purpose).integers(2**62)))
        return make()

# --- datasets ---
# images x (N, 3, height, width) uint8, classes y, domain, test (N,), names of classes and of domains
Dataset = namedtuple("Dataset", "x y domain test classes domains")

TORCHVISION = {"cifar10": "CIFAR10", "cifar100": "CIFAR100", "mnist": "MNIST", "fmnist": "FashionMNIST",
               "flowers102": "Flowers102", "usps": "USPS", "svhn": "SVHN"}
SIZES = {"mnist": 28, "fmnist": 28, "usps": 16, **dict.fromkeys(
    ["flowers102", "tinyimagenet", "digit5", "office", "pacs", "domainnet"], 64)}  # pixels; 32 elsewhere

def load_dataset(args):
    """The whole dataset on the CPU: embedded, from a folder, or downloaded."""
    folder, size = Path(args.data, args.dataset), args.image_size or SIZES.get(args.dataset, 32)
    if args.dataset == "glyphs":
        data = glyphs(size)
    elif args.dataset in TORCHVISION and not folder.is_dir():
        data = download(args.dataset, folder, size)
    else:
        data = image_folder(folder, size)
    size = max(2, round(args.subset * len(data.y)))
    keep = np.sort(generator(args.seed, "subset").permutation(len(data.y))[:size])
    return Dataset(*(value[keep] for value in data[:4]), *data[4:])

def no_data(folder, why):
    sys.exit(f"no data in {folder}: {why}\n  wanted: {folder}/[<domain>/]{{train,test}}/<class>/*.png or "
             f"{folder}/<domain>/<class>/*.png\n  try: --data FOLDER, or --dataset glyphs")

def domain_folders(folder):
    """The folders of its domains, or itself where it has none."""
    return [folder] if (folder / "train").is_dir() else sorted(folder.glob("[!.]*"))

def image_folder(folder, size):
    """A folder of images. Without train/ and test/, two of ten in a row are for testing, as in FPL's code."""
    files = []  # (path, class, domain, part)
    for path in domain_folders(folder):
        for part in ("train", "test") if (path / "train").is_dir() else ("",):
            if any((path / part).glob("*/*")):
                images = torchvision.datasets.ImageFolder(path / part, allow_empty=True)
                files += [(file, images.classes[label], path.name, part or ("train", "test")[n % 10 > 7])
                          for n, (file, label) in enumerate(images.samples)]
    if not files:
        no_data(folder, "no folders of images there")
    paths, *names, parts = zip(*files)
    key = zlib.crc32(repr([(path, os.stat(path).st_mtime_ns) for path in paths]).encode())
    x, = cached(folder.with_name(f"{folder.name}-{size}px.pt"), key, lambda: [decode(paths, size, folder)])
    (classes, y), (domains, domain) = (np.unique(column, return_inverse=True) for column in names)
    y, domain, test = map(torch.from_numpy, (y, domain, np.array(parts) == "test"))
    return Dataset(x, y, domain, test, classes.tolist(), domains.tolist())

def decode(images, size, name):
    """Files, or PIL images, as RGB (n, 3, size, size) uint8."""
    print(f"decoding {len(images)} images of {name} (once) ...", flush=True)

    def pixels(image):
        try:
            opened = Image.open(image) if isinstance(image, str) else image
            return np.asarray(opened.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))
        except OSError as error:
            sys.exit(f"cannot decode {image}: {error}")
    return torch.from_numpy(np.stack(side_by_side(pixels, images, CORES))).permute(0, 3, 1, 2)

def cached(path, key, make):
    """The tensors that `make()` returns, kept in a file as long as `key` is the same."""
    if path.exists() and (held := torch.load(path, weights_only=True)).get("key") == key:
        return held["tensors"]
    tensors = make()
    if os.access(path.parent, os.W_OK):  # a course's may be read-only
        torch.save({"key": key, "tensors": tensors}, scratch := path.with_suffix(f".{os.getpid()}"))
        os.replace(scratch, path)
    return tensors

def download(name, folder, size):
    """One of torchvision's datasets, kept in `torchvision/` there."""
    root, kind = folder.parent / "torchvision", getattr(torchvision.datasets, TORCHVISION[name])
    splits = {"flowers102": ["train", "val", "test"], "svhn": ["train", "test"]}.get(name, [])
    options = [{"split": split} for split in splits] or [{"train": True}, {"train": False}]
    try:
        parts = [kind(root, download=True, **option) for option in options]
    except Exception as error:
        no_data(folder, f"not there, and the download to {root} failed ({error})")

    def make():
        images, labels = zip(*itertools.chain(*parts))
        return decode(images, size, name), torch.tensor(labels)
    x, y = cached(root / f"{name}-{size}px.pt", name, make)
    classes, test = getattr(parts[0], "classes", range(int(y.max()) + 1)), len(y) - len(parts[-1])
    return Dataset(x, y, torch.zeros_like(y), torch.arange(len(y)) >= test, list(classes), [name])

FONTS = """DejaVuSans DejaVuSans-Bold DejaVuSans-Oblique DejaVuSansMono DejaVuSansMono-Bold DejaVuSerif
    DejaVuSerif-Bold DejaVuSerif-Italic STIXGeneral STIXGeneralBol STIXGeneralItalic cmr10 cmb10 cmss10 cmtt10
    cmti10""".split()
GLYPH_DOMAINS = ["plain", "thin", "texture", "clutter"]

@functools.cache
def glyphs(size=32):
    """Digits in matplotlib's fonts, 200 per class and domain, every fourth a test image."""
    x = torch.cat([render(kind, 2000, size) for kind in GLYPH_DOMAINS])
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

def render(kind, n, size=32):
    """n images of a domain, (n, 3, size, size) uint8, of the classes 0, 1, ..., 9, 0, 1, ..."""
    side, rng = 64, torch.Generator().manual_seed(GLYPH_DOMAINS.index(kind))
    digit, ramp = torch.arange(n) % 10, torch.linspace(-1, 1, side)

    def uniform(low, high, *shape):
        return torch.rand(n, *shape, generator=rng) * (high - low) + low

    def tone(low, high, channels=1):
        return uniform(low, high, channels, 1, 1)

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
        apart = (ground - colour).mean(1, keepdim=True)  # at least 0.3
        colour = (colour - apart.sign() * (0.3 - apart.abs()).clamp(min=0)).clamp(0, 1)
        image = ground + 0.35 * noise(5, 3)
        for _ in range(2):
            angle, other = uniform(0, 2 * math.pi), torch.randint(10, (n,), generator=rng)
            image.lerp_(tone(0, 1, 3), 0.8 * draw(other, 1.0, 1.1 * angle.cos(), 1.1 * angle.sin()))
        image.lerp_(colour, draw(digit, 0.5, *shift, 0.65, 1.0))
        for _ in range(2):
            image = F.avg_pool2d(image, 5, 1, 2, count_include_pad=False)
    image = F.interpolate(image, size=(size, size), mode="bilinear", antialias=True)
    image += 0.04 * torch.randn(n, 1, size, size, generator=rng)
    return image.clamp_(0, 1).mul_(255).round_().byte().expand(-1, 3, -1, -1)

# --- partitions ---
# Each turns labels y (N,) into K index arrays.

def deal(stock, counts):
    """stock: C index arrays; counts (K, C) -> K index arrays."""
    pieces = [np.split(index, np.cumsum(column))[:-1] for index, column in zip(stock, counts.T)]
    return [np.concatenate(part) for part in zip(*pieces)]

def by_class(y, rng):
    return [rng.permutation(np.flatnonzero(y == c)) for c in np.unique(y)]

def least_samples(y, args):  # two batches, or less where that leaves no room for skew
    return max(2, min(2 * args.batch_size, len(y) // (4 * args.clients)))

def iid(y, args, rng):
    return np.array_split(rng.permutation(len(y)), args.clients)

def dirichlet(y, args, rng):
    """The papers' "practical" setting: per class, shares ~ Dir(β), zero for clients that have N/K samples.
    Drawn until everyone has enough; after 100 times the best draw."""
    least = -1
    for _ in range(100):
        stock, counts = [], np.zeros((args.clients, 0), int)
        for c in np.unique(y):
            stock.append(index := rng.permutation(np.flatnonzero(y == c)))
            room = counts.sum(1) < len(y) / args.clients
            share = rng.dirichlet(np.full(args.clients, args.beta)) * room
            share = share if share.sum() > 0 else room  # a tiny β may draw full clients only
            cuts = np.round(np.cumsum(share / share.sum())[:-1] * len(index)).astype(int)
            counts = np.column_stack([counts, np.diff([0, *cuts, len(index)])])
        if counts.sum(1).min() > least:
            least, best = counts.sum(1).min(), (stock, counts)
        if least >= least_samples(y, args):
            break
    return [np.sort(part) for part in deal(*best)]

def pathological(y, args, rng):
    """`classes_per_client` classes each, a class split at random points among its owners."""
    stock, each = by_class(y, rng), args.classes_per_client
    owns, counts = np.zeros((2, args.clients, len(stock)), int)
    for row in owns:  # the least owned classes first, ties at random
        row[np.lexsort((rng.random(len(stock)), owns.sum(0)))[:each]] = 1
    for c, index in enumerate(stock):
        owners = rng.permutation(np.flatnonzero(owns[:, c]))
        if len(owners):
            least = min(-(-least_samples(y, args) // each), len(index) // len(owners))
            cuts = np.sort(rng.integers(0, len(index) - least * len(owners) + 1, len(owners) - 1))
            counts[owners, c] = np.diff([0, *(cuts + least * np.arange(1, len(owners))), len(index)])
    return deal(stock, counts)

def in_proportion(y, want, rng):
    """In proportion to want (K, C), as many as the scarcest class allows."""
    stock = by_class(y, rng)
    size = (np.array(list(map(len, stock))) / np.maximum(want.sum(0), 1e-12)).min()
    return deal(stock, np.floor(want * size + 1e-9).astype(int))

def dominant(y, args, rng):
    """FedFM's NIID-2: a share of client i's samples is of class i mod C, the rest of the others. Where
    m = C // K > 1, its m classes from i·m on are dominant together."""
    C, K, share = len(np.unique(y)), args.clients, args.dominant_share
    m = max(1, C // K)
    own = (np.arange(C) - m * np.arange(K)[:, None]) % C < m
    return in_proportion(y, np.where(own, share / m, (1 - share) / max(1, C - m)), rng)

def missing(y, args, rng):
    """FedFM's NIID-3: client i holds the classes i, ..., i+C-missing-1 (mod C), as many of each."""
    C = len(np.unique(y))
    return in_proportion(y, (np.arange(C) - np.arange(args.clients)[:, None]) % C < C - args.missing, rng)

def by_domain(y, domain, domains, args, rng):
    """Clients get the share domain_fraction of a domain; above 1, so many images per class."""
    for name in set(args.domain_clients or []) - set(domains):
        bad(f"--domain-clients {name}: no such domain, choose from {', '.join(domains)}")
    assigned = [domains.index(name) for name, n in (args.domain_clients or {}).items() for _ in range(n)]
    assigned = assigned or [i % len(domains) for i in range(args.clients or len(domains))]
    stock, parts = {d: rng.permutation(np.flatnonzero(domain == d)) for d in sorted(set(assigned))}, []
    for i, d in enumerate(assigned):
        piles, size = [stock[d]], round(args.domain_fraction * len(stock[d]))
        if args.domain_fraction > 1:
            piles, size = [stock[d][y[stock[d]] == c] for c in np.unique(y)], int(args.domain_fraction)
        first = size * assigned[:i].count(d)
        parts.append(np.concatenate([pile[first:first + size] for pile in piles]))
    return parts

PARTITIONS = {"iid": (iid, ""), "dirichlet": (dirichlet, "beta"), "missing": (missing, "missing"),
              "pathological": (pathological, "classes_per_client"), "dominant": (dominant, "dominant_share"),
              "domain": (by_domain, "domain_fraction")}  # and each one's flag

def partition(args, y, domain, domains):
    """Split samples with labels y (N,) and domains (N,) by args.partition -> K index arrays."""
    where = (domain, domains) if args.partition == "domain" else ()
    return PARTITIONS[args.partition][0](y, *where, args, generator(args.seed, "partition"))

def partition_name(args):
    return f"{args.partition} {vars(args).get(PARTITIONS[args.partition][1], '')}".strip()

# --- models ---
RESNETS = [f"resnet{n}" for n in (4, 6, 8, 10, 18, 34, 50, 101, 152)]
CONVNETS = {"cnn4": (2, [512]), "lsa_cnn": (2, [512]),  # name: convolutions, fully connected layers
            **{f"htcnn8-{2 * i + n}": (n, widths) for i, widths in enumerate(
                ([512], [512, 512], [1024, 512], [1024, 512, 512])) for n in (1, 2)}}
HTFE8 = ["cnn4", "googlenet", "mobilenet_v2", *RESNETS[4:]]
GROUPS = {"htfe2": ["cnn4", "resnet18"], "htfe3": ["resnet10", "resnet18", "resnet34"],
          "htfe4": HTFE8[:4], "htfe5": ["cnn4", *RESNETS[3:7]], "htfe8": HTFE8, "htfe9": RESNETS,
          "htcnn8": list(CONVNETS)[2:], "res34-htc4": ["resnet34"], "htfe8-htc4": HTFE8}
MODELS = ["cnn4", "lsa_cnn", *RESNETS, "googlenet", "mobilenet_v2", *GROUPS]

class Net(nn.Module):
    """`features(x)`: uint8 images (B, 3, height, width), normalised here -> (B, D), by average pooling where
    the extractor has more; `classifier(z)` -> (B, C); `net(x)` composes them."""

    def __init__(self, extractor, classifier, feature_dim, mean=(0.5,), std=(0.5,)):
        super().__init__()
        self.extractor, self.classifier, self.feature_dim = extractor, classifier, feature_dim
        mean, std = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)

    def features(self, x):
        z = self.extractor((x / 255 - self.mean) / self.std)
        return F.adaptive_avg_pool1d(z, self.feature_dim)

    def forward(self, x):
        return self.classifier(self.features(x))

def mlp(widths):
    return [layer for a, b in zip(widths, widths[1:]) for layer in (nn.Linear(a, b), nn.ReLU())]

def feature_extractor(name, args):
    """An extractor by name: images (B, 3, size, size) -> (B, whatever it has)."""
    if name in CONVNETS:
        layers, channels, size, (convolutions, widths) = [], 3, args.pixels, CONVNETS[name]
        for width in (32, 64)[:convolutions]:
            layers += [nn.Conv2d(channels, width, 5), nn.MaxPool2d(2), nn.ReLU()]
            channels, size = width, (size - 4) // 2
        net = nn.Sequential(*layers, nn.Flatten(), *mlp([channels * size * size, *widths]))
        return nn.Sequential(net, nn.Linear(512, args.feature_dim)) if name == "lsa_cnn" else net
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
    if args.small_stem and name in RESNETS:
        net.conv1, net.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return net

def architecture(model, client):
    """(feature extractor, hidden layers of the classifier) of client i, the (i mod X)-th of a group."""
    group, heads = GROUPS.get(model, [model]), [[], [512], [256], [128]] if "-htc4" in model else [[]]
    return group[client % len(group)], heads[client % len(heads)]

def build_net(args, client=0, kind=Net, **normalisation):
    """Client i's model. Equal architectures start from equal weights ([choice])."""
    name, hidden = architecture(args.model, client)

    def make():
        extractor = feature_extractor(name, args)
        widths = [args.feature_dim, *hidden]
        classifier = nn.Sequential(*mlp(widths), nn.Linear(widths[-1], args.classes))
        return kind(extractor, classifier if hidden else classifier[0], args.feature_dim, **normalisation)
    net = seeded(make, args.seed, f"weights {name} {tuple(hidden)}")
    return net.to(args.device, memory_format=torch.channels_last)

def model_size(net):
    """Numbers that travel: trainable weights, as the papers count."""
    return sum(p.numel() for p in net.parameters())

# --- clients ---
Samples = namedtuple("Samples", "x y")  # (n, 3, height, width) uint8 and (n,), on the device

@dataclass
class Client:
    id: int
    train: Samples
    test: Samples
    net: Net = None  # its model; a global method loads the global weights into it
    test_features: torch.Tensor = None  # until the model is trained again

def make_clients(args):
    """Clients with models of their own. All images, of train and test, are divided; each client tests on 25 %
    of its share, as in the papers."""
    data = load_dataset(args)
    clients = divide(args, data, torch.arange(len(data.y)), 0.25)
    usual = torch.cat([c.test.y == int(args.counts[c.id].argmax()) for c in clients])
    args.majority = 100 * usual.float().mean().item()
    print(f"answering each client's most frequent class: {args.majority:.1f} % right")
    for client in clients:
        client.net = build_net(args, client.id)
    return clients

def make_federation(args, validation=0.0, kind=Net, **normalisation):
    """For one global model: training images divided, each client holding back a share `validation` ->
    clients, model (a `kind`), test images {domain: Samples}."""
    data = load_dataset(args)
    clients = divide(args, data, torch.nonzero(~data.test).flatten(), validation)
    tests = {data.domains[d]: samples(data, data.test & (data.domain == d), args.device)
             for d in data.domain[data.test].unique()}
    if not tests:
        no_data(Path(args.data, args.dataset), "the server needs test images")
    net = build_net(args, kind=kind, **normalisation)
    for client in clients:
        client.net = build_net(args, kind=kind, **normalisation)
    return clients, net, tests

def divide(args, data, pool, share):
    """Clients with the images `pool` (indices), each keeping a share for testing. Sets args.classes (C),
    class_names, pixels, counts (K, C) of training images."""
    clients, parts = [], partition(args, data.y[pool].numpy(), data.domain[pool].numpy(), data.domains)
    for i, part in enumerate(parts):
        if len(part) < 2:
            bad(f"--clients {len(parts)} --partition {partition_name(args)}: client {i} would get "
                f"{len(part)} of {len(pool)} images, at least 2 are needed")
        part = pool[torch.from_numpy(generator(args.seed, "train/test", i).permutation(part))]
        cut = math.ceil((1 - share) * len(part))
        clients.append(Client(i, *(samples(data, p, args.device) for p in (part[:cut], part[cut:]))))
    args.classes, args.class_names, args.pixels = len(data.classes), data.classes, data.x.shape[-1]
    args.counts = np.stack([np.bincount(c.train.y.cpu().numpy(), minlength=args.classes) for c in clients])
    sizes, kinds = args.counts.sum(1), (args.counts > 0).sum(1)
    print(f"{args.dataset}: {len(data.y)} images of {args.pixels} pixels; {len(clients)} clients with "
          f"{sizes.min()}-{sizes.max()} training images of {kinds.min()}-{kinds.max()} of {args.classes} "
          f"classes ({partition_name(args)}), model {args.model}")
    return clients

def samples(data, index, device):
    return Samples(data.x[index].to(device, memory_format=torch.channels_last), data.y[index].to(device))

def participants(clients, t, args):
    """A share ρ (args.participation) of the clients, less those that fail (args.drop_rate), at least one."""
    size = max(1, round(args.participation * len(clients)))
    chosen = generator(args.seed, "participants", t).choice(len(clients), size, replace=False)
    report = [i for i in chosen if generator(args.seed, "drop", t, i).random() >= args.drop_rate]
    return [clients[i] for i in sorted(report or chosen[:1])]

def for_each_client(function, clients, *rest):
    """`[function(client, *rest) for client in clients]`, side by side; `rest` ends with t, args. SystemExit 1
    where the last of what a client returns (its loss, if it trained) is not finite."""
    *_, t, args = rest
    results = side_by_side(lambda client: function(client, *rest), clients, args.workers)
    for client, result in zip(clients, results):
        if not result[-1].isfinite().all():
            sys.exit(f"round {t}: client {client.id}'s loss is not finite; lower --lr {args.lr:g} or a λ")
    return results

def side_by_side(function, items, workers):
    """`[function(item) for item in items]`, `workers` at a time, each on one torch thread."""
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return list((pool.map if workers > 1 else map)(function, items))

# --- local training ---
def sgd_step(module, loss, args, graph=True, **other):
    """`step(*tensors)`: one SGD step on `loss(module, *tensors, args)`, in train mode -> the loss. Momentum
    starts at zero; `other`: options instead of args'."""
    options = dict(lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay) | other
    optimizer = torch.optim.SGD(module.parameters(), **options)
    module.train()

    def passes(*tensors):
        optimizer.zero_grad()
        value = loss(module, *tensors, args)
        value.backward()
        return value.detach()
    graph = graph and next(module.parameters()).is_cuda and not args.no_graph

    def step(*tensors):
        value = replay(passes, module, tensors) if graph else passes(*tensors)
        optimizer.step()
        return value.clone()  # a graph overwrites its loss
    return step

def minibatches(client, t, args):
    """(x, y) for E = args.local_epochs epochs over the training images, shuffled anew in each."""
    client.test_features = None  # its model is about to change
    rng = generator(args.seed, "batches", t, client.id)
    return shuffled(client.train, args.local_epochs, args.batch_size, rng, args.batches)

def shuffled(tensors, epochs, batch_size, rng, how="all"):
    """Batches of tensors (B, ...). "all": a single last sample joins the batch before (BatchNorm needs two);
    "full": a last, smaller batch is dropped, unless alone; "fixed": as full, and never shuffled."""
    n = len(tensors[0])
    for _ in range(epochs):
        order = torch.from_numpy(np.arange(n) if how == "fixed" else rng.permutation(n))
        batches = list(order.to(tensors[0].device).split(batch_size))
        if how != "all" and n > batch_size and n % batch_size:
            batches.pop()
        elif n > batch_size and n % batch_size == 1:
            batches[-2:] = [torch.cat(batches[-2:])]
        for index in batches:
            yield tuple(value[index] for value in tensors)

def average(states, weights):
    """Weighted mean of state_dicts (FedFM Eq. 11), BatchNorm's statistics too, in float64."""
    return {name: sum(state[name].double() * w for state, w in zip(states, weights)) / sum(weights)
            for name in states[0]}

graph_pool, graph_stream = map(functools.cache, (torch.cuda.graph_pool_handle, torch.cuda.Stream))

def replay(passes, module, tensors):
    """`passes(*tensors)` by a CUDA graph, one per shapes, kept with the module, all in one pool of memory."""
    graphs, shapes = module.__dict__.setdefault("graphs", {}), tuple(value.shape for value in tensors)
    if shapes not in graphs:
        graphs[shapes] = record(passes, module, [value.clone() for value in tensors])
    graph, inputs, loss, gradients = graphs[shapes]
    for held, value in zip(inputs, tensors):
        held.copy_(value)
    graph.replay()
    for p, gradient in zip(module.parameters(), gradients):
        p.grad = gradient
    return loss

def record(passes, module, inputs):
    """-> a graph, its inputs, loss and gradients, in fixed memory; the module stays as it was."""
    before, graph, stream = [b.clone() for b in module.buffers()], torch.cuda.CUDAGraph(), graph_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # warm up: libraries choose their kernels
            passes(*inputs)
    module.zero_grad()
    with torch.cuda.graph(graph, pool=graph_pool(), stream=stream):
        loss = passes(*inputs)
    for value, old in zip(module.buffers(), before):  # BatchNorm's: warm-up changed them
        value.copy_(old)
    return graph, inputs, loss, [p.grad for p in module.parameters()]

# --- evaluation ---
def distances(a, b):
    """Euclidean distances of a (n, D), b (m, D) -> (n, m), exact also where small."""
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")

@torch.no_grad()
def extract(net, x):
    """Features (n, D) of images x (n, ...) in eval mode."""
    net.eval()
    return torch.cat([net.features(batch) for batch in x.split(250)])

def class_means(net, data, args):
    """Local prototypes (FedTGP and FedSA Eq. 2, FedFM Eq. 8): P_i^c, the mean of f(x) over class c, in eval
    mode -> prototypes (C, D), zero where the client lacks the class, and counts n_ic (C,)."""
    features = extract(net, data.x)
    counts = torch.bincount(data.y, minlength=args.classes)
    means = features.new_zeros(args.classes, features.shape[1])
    for c in data.y.unique():
        means[c] = features[data.y == c].mean(0)
    return means, counts.to(features.dtype)

def nearest_prototype(z, prototypes, known):
    """The nearest prototype's class: z (n, D), prototypes (C, D), known (C,) bool -> (n,)."""
    return distances(z, prototypes).masked_fill(~known, math.inf).argmin(1)

@torch.no_grad()
def own_test(client, prototypes, known, t, args):
    """Right answers on the client's own test images, by classifier and nearest prototype -> (2,)."""
    if client.test_features is None:
        client.test_features = extract(client.net, client.test.x)
    z, y = client.test_features, client.test.y
    guesses = client.net.classifier(z).argmax(1), nearest_prototype(z, prototypes, known)
    return torch.stack([(guess == y).sum() for guess in guesses])

def evaluate_personal(clients, prototypes, known, t, args):
    """Accuracy in % of all clients' models on their own test images, Σ right / Σ images, by classifier and
    nearest prototype. nan in rounds that --eval-every leaves out."""
    if t % args.eval_every and t != args.rounds:
        return {"classifier": math.nan, "prototype": math.nan}
    right = torch.stack(for_each_client(own_test, clients, prototypes, known, t, args)).cpu()  # (K, 2)
    sizes = torch.tensor([[len(client.test.y)] for client in clients])
    if t == args.rounds:
        spread = (100 * right / sizes).nanquantile(torch.tensor([0, 0.5, 1]), 0).T.flatten()
        print("clients, lowest, median, highest by classifier {:.1f} {:.1f} {:.1f}, prototype {:.1f} {:.1f} "
              "{:.1f} %".format(*spread))
    return dict(zip(["classifier", "prototype"], (100 * right.sum(0) / sizes.sum()).tolist()))

def evaluate_global(net, tests, t, args, validation=()):
    """Accuracy in % of the global model on test images {domain: Samples}; "test" is the mean over domains,
    "validation" that over the clients' [Samples]. nan in rounds that --eval-every leaves out."""
    def accuracy(data):
        if t % args.eval_every and t != args.rounds:
            return math.nan
        return 100 * (net.classifier(extract(net, data.x)).argmax(1) == data.y).sum().item() / len(data.y)
    each = side_by_side(accuracy, [*tests.values(), *validation], args.workers)
    scores = {"test": float(np.mean(each[:len(tests)])), **(dict(zip(tests, each)) if len(tests) > 1 else {})}
    return {**scores, "validation": float(np.mean(each[len(tests):]))} if validation else scores

# --- run folder ---
class Run:
    """A run's folder, log, printed lines, pictures, checkpoints. headline, beside: the prediction, the round
    ("best", "final") beside published numbers; tests: images for features.png, if not the clients'; personal:
    checkpoints hold the clients' models; modules: what else they hold, a global model as `net`."""

    def __init__(self, args, headline, clients, *, beside="best", tests=None, personal=True, **modules):
        self.args, self.headline, self.beside = args, headline, beside
        self.clients, self.tests, self.rows = clients, tests, []
        self.modules = modules | {str(client.id): client.net for client in clients if personal}
        self.folder = Path(args.resume or new_folder(args))
        about = {"script": args.script, "headline": headline, **args.settings}
        (self.folder / "args.json").write_text(json.dumps(about, indent=1) + "\n")
        self.picture("partition", plot_partition)

    def start(self, *state):
        """What lasts over rounds, tensors or tuples: `state`, or with --resume the checkpoint's."""
        if held := self.args.checkpoint:
            for name, module in self.modules.items():
                module.load_state_dict(held["modules"][name])
            state, self.rows = held["state"], held["rows"]
            held.clear()  # its memory
            print(f"resuming after round {len(self.rows)} of {self.args.rounds}")
        self.state = state
        return state[0] if len(state) == 1 else state

    def rounds(self):
        for t in range(len(self.rows) + 1, self.args.rounds + 1):
            self.began = time.time()
            yield t

    def report(self, t, scores, losses, up, down, state, **extra):
        """End round t: log, print, save, draw. scores: {prediction: accuracy in %}; losses: the clients'; up,
        down: numbers that all sent and got; state: as in `start`, first the prototypes (C, D), or
        (vectors (G, D), classes (G,), ...); extra: more to log."""
        args, extra = self.args, {name: float(value) for name, value in extra.items()}
        scores = {self.headline: scores[self.headline], **scores}
        row = {"round": t, "accuracy": scores[self.headline], **{f"acc_{k}": v for k, v in scores.items()},
               "loss": float(sum(losses) / len(losses)), "up": int(up), "down": int(down),
               "seconds": round(time.time() - self.began, 3), **extra}
        self.rows, self.state = [*self.rows, row], state
        if args.checkpoint_every and (t % args.checkpoint_every == 0 or t == args.rounds):
            self.save()
        with open(self.folder / "log.csv", "w", newline="") as file:
            csv.writer(file).writerows([row, *(old.values() for old in self.rows)])
        if args.plot_every and t % args.plot_every == 0 and t < args.rounds:
            self.draw_features(t, f"-{t:04}")
        shown = [f"{k} {v:5.2f}" for k, v in scores.items() if v == v] or ["not evaluated"]
        shown += [f"loss {row['loss']:.4f}", *(f"{k} {v:.4g}" for k, v in extra.items())]
        left = sum(r["seconds"] for r in self.rows) / t * (args.rounds - t) / 60
        print(f"round {t:{len(str(args.rounds))}}/{args.rounds}", *shown, f"up {short(up)}",
              f"down {short(down)}", f"{row['seconds']:.2f} s", f"left {left:.1f} min", sep="  ", flush=True)

    def save(self):
        """Write checkpoint.pt, to another file first: there is always a complete one."""
        held = {"script": self.args.script, "settings": self.args.settings, "rows": self.rows,
                "state": self.state, "modules": {k: m.state_dict() for k, m in self.modules.items()}}
        torch.save(held, scratch := self.folder / "checkpoint.tmp")
        scratch.replace(self.folder / "checkpoint.pt")

    def picture(self, name, draw, *data):
        if not self.args.no_plots:
            figure = draw(*data, self.args)
            figure.suptitle(f"{self.folder.name}, {partition_name(self.args)}", fontsize="medium")
            figure.savefig(self.folder / f"{name}.png")

    def draw_features(self, t, suffix=""):
        stars, net = self.state[0], self.modules.get("net")
        if isinstance(stars, torch.Tensor):
            known = stars.any(1).nonzero().flatten()
            stars = stars[known], known
        stars = stars[:2]
        most = sorted(self.clients, key=lambda c: -len(c.test.y))[:6]
        groups = ({name: (net, data) for name, data in self.tests.items()} if net else
                  {f"client {c.id}": (c.net, c.test) for c in most})
        self.picture(f"features{suffix}", plot_features, groups, *stars, t)
        self.picture(f"margins{suffix}", plot_margins, net, self.clients, *stars, t)

    def finish(self):
        """Pictures and last lines -> {"best by ...": %, "final by ...": %} of each prediction."""
        args, results = self.args, {}
        curves = [(key[4:], key, [self.rows]) for key in self.rows[0] if key[:4] == "acc_"]
        self.picture("curves", plot_curves, curves)
        self.draw_features(args.rounds)
        for kind in predictions(self.rows):
            (best, at, images), final = best_round(self.rows, kind), self.rows[-1][f"acc_{kind}"]
            results |= {f"best by {kind}": best, f"final by {kind}": final}
            print(f"by {kind}: final {final:.2f} %, best {best:.2f} % in round {at} "
                  f"(picked on {images} images)")
        for where, accuracy, unsure in args.published:
            print(f"published{unsure and f', with {unsure}'}: {accuracy} % ({where}); "
                  f"this run's {self.beside} round: {results[f'{self.beside} by {self.headline}']:.2f} %")
        up, down, seconds = (sum(row[k] for row in self.rows) for k in ("up", "down", "seconds"))
        print(f"traffic: {short(up)} numbers up, {short(down)} down; {seconds:.0f} s in all")
        print(f"everything is in {self.folder}")
        return results

def new_folder(args):
    """Make <out>/<script>-<dataset>-s<seed>, a number added where that is taken."""
    folder = first = Path(args.out, f"{args.script}-{args.dataset}-s{args.seed}")
    others = itertools.count(2)
    while folder.exists():
        folder = Path(f"{first}-{next(others)}")
    folder.mkdir(parents=True)
    return folder

def predictions(rows):
    return [kind for kind in ("classifier", "prototype", "test") if f"acc_{kind}" in rows[0]]

def best_round(rows, kind):
    """(accuracy, round) of the best round, and the images that it is picked on."""
    images = "validation" if "acc_validation" in rows[0] else "test"
    judge = f"acc_{kind if images == 'test' else images}"
    best = max(rows, key=lambda row: np.nan_to_num(row[judge], nan=-1))
    return best[f"acc_{kind}"], int(best["round"]), images

def short(number):  # 1234567 -> 1.23 M
    return EngFormatter(places=2 if number >= 1000 else 0)(float(number)).strip()

def mean_std(values):
    return f"{np.mean(values):.2f}" + (f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else "")

# --- pictures ---
matplotlib.rcParams.update({"figure.constrained_layout.use": True, "axes.grid": True, "grid.alpha": 0.25,
                            "legend.frameon": False, "legend.fontsize": "small", "savefig.dpi": 150})

def class_ticks(args):
    every = -(-args.classes // 40)
    return range(0, args.classes, every), [str(name)[:14] for name in args.class_names[::every]]

def plot_partition(args):
    """A dot's area: a client's training images of a class."""
    (K, C), (client, kind) = args.counts.shape, np.nonzero(args.counts)
    axis = Figure(figsize=(3 + min(12, K / 3), 2 + min(9, C / 3))).subplots()
    area = 400 * min(1, 10 / C) ** 2 / args.counts.max()
    axis.scatter(client, kind, s=area * args.counts[client, kind], alpha=0.7)
    axis.set(xlabel=f"client (the largest dot: {args.counts.max()} training images)", ylabel="class",
             xlim=(-0.7, K - 0.3), ylim=(-0.7, C - 0.3), xticks=range(0, K, -(-K // 25)))
    axis.set_yticks(*class_ticks(args))
    return axis.figure

def plot_curves(curves, args=None):
    """Accuracy and losses over rounds, means over seeds and their range. curves: [(label, column, logs)]."""
    figure = Figure(figsize=(11, 4.2 + 0.1 * len(curves)))
    left, right = figure.subplots(1, 2)
    for n, (label, key, logs) in enumerate(curves):
        losses = [(right, "loss", "-"), (right, "server_loss", ":")] * (key == curves[0][1])
        for axis, k, line in [(left, key, "-"), *losses]:
            y = np.array([[row.get(k, math.nan) for row in rows] for rows in zip(*logs)])  # (rounds, seeds)
            t = np.flatnonzero(~np.isnan(y).any(1))
            axis.plot(t + 1, y[t].mean(1), line, color=f"C{n}", label=label)
            axis.fill_between(t + 1, y[t].min(1), y[t].max(1), color=f"C{n}", alpha=0.15)
    if hasattr(args, "majority"):
        left.axhline(args.majority, color="grey", linestyle="--", label="most frequent class")
    left.set(xlabel="round", ylabel="test accuracy (%)")
    dotted = any("server_loss" in logs[0][0] for *_, logs in curves)
    right.set(xlabel="round", ylabel="clients' mean loss" + " (dotted: server's)" * dotted)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure

def embed(z, y, seed):
    """Points (n, D) in two dimensions, and how: t-SNE; without scikit-learn, at unit length, where the means
    of the classes y (n,) differ most."""
    try:
        from sklearn.manifold import TSNE
        tsne = TSNE(perplexity=min(30, len(z) / 4), init="pca", random_state=seed)
        return tsne.fit_transform(z.numpy()), "t-SNE"
    except ImportError:
        unit = F.normalize(z)
        means = torch.stack([unit[y == c].mean(0) for c in y.unique()])
        plane = torch.linalg.svd(means - means.mean(0), full_matrices=False)[2][:2]
        return (unit @ plane.T).numpy(), "linear picture of unit-length features"

def plot_features(groups, stars, classes, t, args):
    """Test features of groups {client or domain: (net, Samples)}, the server's stars (G, D), classes (G,)."""
    parts = [(stars, classes, torch.full_like(classes, len(groups)))]
    for g, (net, (x, y)) in enumerate(groups.values()):
        index = generator(args.seed, "picture").permutation(len(y))[:-(-900 // len(groups))]
        parts.append((extract(net, x[index]), y[index], torch.full_like(y[index], g)))
    z, y, group = (torch.cat([part.cpu() for part in column]) for column in zip(*parts))
    points, how = embed(z, y, args.seed)
    shown = y.bincount().argsort(descending=True, stable=True)[:10].sort().values
    axis = Figure(figsize=(7.5, 5.6)).subplots()
    label = f"{how}, round {t}; {len(shown)} classes, {len(groups)} largest test sets"
    axis.set(xticks=[], yticks=[], xlabel=label)
    for n, k in enumerate(shown):
        axis.plot([], [], "s", color=f"C{n}", label=str(args.class_names[k])[:18])
    for g, name in enumerate([*groups, "server's"]):
        marker, size, edge = ("o^DvPX<>ph8Hd"[g], 4, "none") if name in groups else ("*", 13, "black")
        axis.plot([], [], marker, color="black", label=name)
        for n, k in enumerate(shown):
            own = points[(y == k) & (group == g)].T
            axis.plot(*own, marker, color=f"C{n}", markersize=size, markeredgecolor=edge, alpha=0.7)
    axis.figure.legend(loc="outside right center")
    return axis.figure

def margins(vectors, classes, C):
    """Per class the smallest distance of its vectors to another class's, or inf -> C numbers."""
    apart = distances(vectors, vectors).masked_fill(classes == classes.unsqueeze(1), math.inf)
    return [min(apart[classes == c].flatten().tolist(), default=math.inf) for c in range(C)]

def plot_margins(net, clients, stars, classes, t, args):
    """Margins (FedTGP Fig. 1) of clients, by `net` or their own, and of stars (G, D) of classes (G,)."""
    table = []
    for client in clients:
        means, counts = class_means(net or client.net, client.train, args)
        table.append(margins(means[counts > 0], counts.nonzero().flatten(), args.classes))
    axis, table = Figure(figsize=(8, 4)).subplots(), np.ma.masked_invalid(table)
    axis.plot(table.max(0), "^", label=f"best of {len(clients)} clients")
    axis.plot(table.mean(0), "o", label="mean of the clients that have the class")
    axis.plot(margins(stars, classes, args.classes), "*", markersize=12, label="server's")
    axis.set_xticks(*class_ticks(args), rotation=90 if args.classes > 10 else 0)
    axis.set(ylabel=f"round {t}: distance to the next class\n(higher: better separated)", ylim=(0, None))
    axis.figure.legend(loc="outside lower center", ncols=3)
    return axis.figure

# --- comparing runs ---
def table_row(settings):
    """What runs of one row of a table have in common."""
    return {k: v for k, v in sorted(settings.items()) if k not in ("seed", "eval_every")}

def compare(folders):
    """Print a table of runs, mean ± std over seeds; draw compare.png."""
    groups, curves = {}, []
    for log in (path for folder in folders for path in Path(folder).glob("log.csv")):
        about = json.loads((log.parent / "args.json").read_text())
        with open(log, newline="") as file:
            rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
        groups.setdefault(json.dumps(table_row(about)), (about, {}))[1][about["seed"]] = rows
    if not groups:
        bad("no run folders; try: python common.py runs/*")
    print("| run | flags | seeds | by | best % | final % | rounds |\n" + "|---" * 7 + "|")
    for about, runs in groups.values():
        others = [other for other, _ in groups.values() if other["script"] == about["script"]]
        changed = [f"--{k.replace('_', '-')} {v}".removesuffix(" True") for k, v in table_row(about).items()
                   if str(v) not in ("None", "False", "") and any(other.get(k) != v for other in others)]
        name, flags, logs = f"{about['script']} {about['dataset']}", " ".join(changed), list(runs.values())
        for kind in predictions(logs[0]):
            best = [best_round(rows, kind)[0] for rows in logs]
            final = [rows[-1][f"acc_{kind}"] for rows in logs]
            print(f"| {name}", flags, ",".join(map(str, sorted(runs))), kind, mean_std(best), mean_std(final),
                  f"{len(logs[0])} |", sep=" | ")
        curves.append((f"{about['script']} {flags}, by {about['headline']}", "accuracy", logs))
    plot_curves(curves).savefig(Path(folders[0]).parent / "compare.png")

# --- command line ---
def bad(message):
    """One line on stderr, exit status 2."""
    print(f"{Path(sys.argv[0]).name}: {message.removeprefix('argument ')}", file=sys.stderr)
    raise SystemExit(2)

def number(kind, interval):
    """An argparse type: an int or float in an interval, "(0, 1]" or "[1, inf)"."""
    low, high = map(float, interval[1:-1].split(","))
    ends = [low] * (interval[0] == "[") + [high] * (interval[-1] == "]")

    def parse(text):
        if low < (value := kind(text)) < high or value in ends:
            return value
        raise ValueError
    parse.__name__ = f"{'whole ' * (kind is int)}number in {interval}"
    return parse

def domain_clients(text):
    """An argparse type: "mnist:1,usps:4" -> {"mnist": 1, "usps": 4}."""
    return {name: COUNT(n) for name, n in (pair.split(":") for pair in text.split(","))}

def device(text):
    """An argparse type: auto, cpu, cuda or cuda:N -> a device that is here."""
    text = ("cuda" if torch.cuda.is_available() else "cpu") if text == "auto" else text
    try:
        return str(torch.zeros(1, device=text).device)
    except (RuntimeError, AssertionError):
        raise ValueError

COUNT, FROM_ZERO = number(int, "[1, 1e9]"), number(int, "[0, 1e9]")
POSITIVE, SHARE = number(float, "(0, inf)"), number(float, "(0, 1]")
FLAGS = {  # group: [(flag, type, default, help)]; a list: choices, bool: a switch
    "data": [
        ("dataset", str, "glyphs", f"glyphs (embedded), {', '.join(TORCHVISION)}, or a folder"),
        ("data", str, "./data", "images and downloads"), ("subset", SHARE, 1.0, "of the data"),
        ("image-size", number(int, "[16, 1024]"), None, "pixels (None: the dataset's own)")],
    "federation": [
        ("clients", COUNT, None, "K (None: 20, by domain one each)"),
        ("participation", SHARE, 1.0, "ρ, the share of clients in a round"),
        ("partition", [*PARTITIONS], "dirichlet", "of data"),
        ("beta", POSITIVE, 0.1, "β of 'dirichlet'"), ("classes-per-client", COUNT, 2, "of 'pathological'"),
        ("missing", FROM_ZERO, 1, "classes a client lacks in 'missing'"),
        ("dominant-share", SHARE, 0.46, "of a client's large class in 'dominant'"),
        ("domain-clients", domain_clients, None, "NAME:N,NAME:N (None: the domains in turn)"),
        ("domain-fraction", POSITIVE, 1.0, "a client's share; above 1: images per class"),
        ("drop-rate", number(float, "[0, 1]"), 0.0, "share of participants that fail")],
    "model": [
        ("model", MODELS, "cnn4", "one, or a group, in turn"),
        ("feature-dim", number(int, "[2, 65536]"), 512, "D, the size of a prototype"),
        ("small-stem", bool, False, "ResNets: 3x3, not 7x7 and max-pool")],
    "training": [
        ("rounds", COUNT, 1000, "T"), ("local-epochs", COUNT, 1, "E"), ("batch-size", COUNT, 10, "B"),
        ("batches", ["all", "full", "fixed"], "all", "full: no smaller last, fixed: nor shuffled"),
        ("lr", POSITIVE, 0.01, "η, of SGD"), ("momentum", number(float, "[0, 1)"), 0.0, "new in each round"),
        ("weight-decay", number(float, "[0, inf)"), 0.0, "of SGD")],
    "run": [
        ("seed", FROM_ZERO, 0, "of everything random"),
        ("trials", COUNT, 1, "seeds SEED, SEED+1, ...; prints mean ± std"),
        ("device", device, "auto", "auto, cpu, cuda, cuda:1 ..."),
        ("workers", FROM_ZERO, 0, "clients side by side, on CPU (0: one per core)"),
        ("eval-every", COUNT, 1, "rounds between evaluations"),
        ("checkpoint-every", FROM_ZERO, 10, "rounds between checkpoints (0: none)"),
        ("resume", str, None, "the folder of a run to go on with"), ("out", str, "runs", "for run folders"),
        ("plot-every", FROM_ZERO, 0, "rounds between pictures (0: at the end)"),
        ("no-plots", bool, False, "no pictures"), ("no-graph", bool, False, "no CUDA graphs, to compare")]}
NOT_SETTINGS = "data device workers no_graph trials out resume checkpoint_every plot_every no_plots".split()

def make_parser(flags):
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter,
                                     description="Defaults where --dataset sets none:", allow_abbrev=False)
    parser.error = bad
    for name, rows in FLAGS.items():
        group = parser.add_argument_group(name)
        for flag, kind, default, text in rows:
            how = "choices" if isinstance(kind, list) else "type"
            how = {"action": "store_true"} if kind is bool else {how: kind}
            group.add_argument(f"--{flag}", default=default, help=text, **how)
    flags(parser.add_argument_group("method"))
    return parser

def parse(script, defaults, published, flags, settle, words):
    """Command line -> args: what is typed, over the dataset's defaults, over the shared ones; settings: what
    decides a run's numbers; published: the rows that have the same."""
    def read(words, saved=None):
        parser = make_parser(flags)
        typed = parser.parse_args(words)
        several = "domains" in defaults and len(domain_folders(Path(typed.data, typed.dataset))) > 1
        preset = saved or defaults.get(typed.dataset) or defaults["domains" if several else "cifar10"]
        parser.set_defaults(**preset)
        args = parser.parse_args(words)
        if args.partition == "domain" != preset["partition"]:
            args.clients = typed.clients  # the default number is for the default partition
        elif args.clients is None and args.partition != "domain":
            args.clients = 20
        settle(args)
        args.settings = {k: v for k, v in vars(args).items() if k not in NOT_SETTINGS}
        return args

    args, held = read(words), None
    if args.resume is not None:
        try:
            held = torch.load(Path(args.resume, "checkpoint.pt"), map_location=args.device, weights_only=True)
            assert held["script"] == script
        except Exception:  # absent, truncated, foreign
            bad(f"--resume {args.resume}: no complete checkpoint.pt of {script}.py there")
        args = read(words, held["settings"])
        for k, v in held["settings"].items():
            if args.settings.get(k) != v:
                bad(f"--{k.replace('_', '-')} {args.settings.get(k)}: must be {v}, as in {args.resume}")
        args.trials = 1
    args.checkpoint, args.script = held, script
    if args.device.startswith("cuda"):
        torch.cuda.set_device(args.device)
    args.workers = (args.workers or CORES) if args.device == "cpu" else 1
    args.published = [(where, accuracy, "".join(unsure)) for line, where, accuracy, *unsure in published
                      if table_row(read(line.split()).settings) == table_row(args.settings)]
    return args

def launch(main, defaults, published, flags, settle=lambda args: None, words=None):
    """Call main(args) once per trial. defaults: {dataset: {setting: value}}, "cifar10" for others, "domains"
    for those with several; published: [(command line, table, accuracy[, what is open])]; flags(group) adds
    the method's own; settle(args) fills defaults that depend on others."""
    args = parse(Path(main.__code__.co_filename).stem, defaults, published, flags, settle, words)
    torch.set_num_threads(1)  # clients are what runs side by side
    results, seeds = [], range(args.seed, args.seed + args.trials)
    for seed in seeds:
        args.seed = args.settings["seed"] = seed
        results.append(main(args))
    for key in results[0] if args.trials > 1 else ():
        print(f"{key}: {mean_std([result[key] for result in results])} %, seeds {', '.join(map(str, seeds))}")
    return results

if __name__ == "__main__":
    compare(sys.argv[1:])
