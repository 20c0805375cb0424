"""What the six scripts share. Each script has its method's equations; those that several methods share are in Part I.

    Part I    what a round needs: clients and models, participants, minibatches, class means, averages, evaluation,
              randomness
    Part II   data and models: the clients' images, architectures, partitions, data sets
    Part III  the frame: run folder, pictures, comparing runs, command line

Part I is enough to understand a method's rounds. What `main` needs to know of Run, which is in Part III:

    run = Run(args, modules=[...])   modules: every network kept from round to round, the clients' and the server's
    state = run.resume(state)        state: every tensor kept from round to round; --resume loads both
    for t in run.rounds():           t = 1, 2, ..., --rounds
        ...                          client_update runs in several threads: it may change client.net, nothing else
        run.report(t, ...)           writes a row of log.csv and prints a line
        run.checkpoint(t, state)     comes after report, because it saves the log as well

If you add a trainable parameter, put it into each client.net before Run or, with one global model, into that model
before make_federation. Then checkpoints contain it.

In Part II `load_dataset` gives `main` the images and `make_clients` the clients. With one global model,
`make_federation` gives it the clients, one copy of the model per participant, and the server's test images.

Shapes: n or N images, K clients, m participants in a round, C classes, D features, B images in a batch, G prototypes.
"""

import argparse
import collections
import contextlib
import copy
import csv
import functools
import glob
import itertools
import json
import math
import os
import re
import shlex
import sys
import textwrap
import time
import traceback
import warnings
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
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torchvision.datasets.folder import is_image_file


# ======================================================================================================
# Part I. What a round needs
# ======================================================================================================

# --- clients and their models ---------------------------------------------------------------------

class Images(NamedTuple):
    x: torch.Tensor  # (n, 3, height, width) uint8, on the device
    y: torch.Tensor  # (n,) labels


@dataclass
class Client:
    id: int
    train: Images
    test: Images = None     # its own test images, where clients have models of their own
    val: Images = None      # images held back from training, where there is one global model; may be empty
    net: nn.Module = None   # its own model; with one global model, a participant's copy of it
    domain: str = ""        # the domain of its images, with --partition domain


class Net(nn.Module):
    """A feature extractor and a classifier.

    features(x)    images (B, 3, height, width) in [0, 255], normalised here -> features (B, D)
    classifier(z)  features (B, D) -> logits (B, C)
    net(x)         both"""

    def __init__(self, extractor, classifier, feature_dim, num_classes, mean=(0.5,), std=(0.5,)):
        super().__init__()
        self.extractor = extractor
        self.classifier = classifier
        self.feature_dim = feature_dim
        self.num_classes = num_classes
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def features(self, x):
        z = self.extractor((x / 255 - self.mean) / self.std)  # (B, any number)
        # average pooling to D values, as in FedTGP and FedSA; fewer than D values are spread over D
        return F.adaptive_avg_pool1d(z, self.feature_dim)

    def forward(self, x):
        return self.classifier(self.features(x))


# --- participants ---------------------------------------------------------------------------------

def participants(clients, t, args):
    """The clients of round t: a share ρ (--participation) of all, at least one, drawn without replacement."""
    size = max(1, round(args.participation * len(clients)))
    chosen = generator(args.seed, "participants", t).choice(len(clients), size, replace=False)
    return [clients[i] for i in sorted(chosen)]


def for_each_client(function, clients, *arguments):
    """`[function(client, *arguments) for client in clients]`, on a CPU several clients at a time (see `side_by_side`).
    The last of the arguments is args."""
    args = arguments[-1]

    def call(client):
        result = function(client, *arguments)
        client.net.zero_grad()  # frees the gradients, which take as much memory as the net
        return result

    # if the client with the most images came last, the other cores would wait for it
    largest_first = sorted(clients, key=lambda client: -len(client.train.y))
    results = {}
    for client, result in zip(largest_first, side_by_side(call, largest_first, args)):
        results[client.id] = result
        show_progress(f"client {len(results)}/{len(clients)}")
    return [results[client.id] for client in clients]


def side_by_side(function, items, args):
    """Yield function(item) of each item, in order. On a CPU --workers run at once (0: one per core), each on one core,
    because batches are too small for more. On a GPU they run one after another."""
    threads = 1
    if args.device == "cpu":
        threads = args.workers or cores()
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from pool.map(function, items)


def cores():
    """How many CPU cores this process may use. A job on a cluster has fewer than the machine."""
    if hasattr(os, "sched_getaffinity"):  # macOS and Windows lack it
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


# --- minibatches ----------------------------------------------------------------------------------

def minibatches(client, t, args):
    """Yield (x, y), batch by batch, for --local-epochs epochs over the client's training images. Reshuffled every
    epoch.

    --batches all    every image is used; a last batch of one joins the batch before, as BatchNorm needs two
              full   the last incomplete batch is dropped, unless it is the only one"""
    rng = generator(args.seed, "batches", t, client.id)
    x, y = client.train
    for _ in range(args.local_epochs):
        order = torch.from_numpy(rng.permutation(len(y))).to(y.device)
        parts = list(order.split(args.batch_size))
        if len(parts) > 1 and len(parts[-1]) < args.batch_size:
            if args.batches == "full":
                parts.pop()
            elif len(parts[-1]) == 1:
                single = parts.pop()
                parts[-1] = torch.cat([parts[-1], single])
        for index in parts:
            yield x[index], y[index]


# --- features, class means, distances, averages ---------------------------------------------------

@torch.no_grad()
def extract(net, x):
    """Features of images x (n, 3, height, width) -> (n, D). Leaves the net in eval mode."""
    net.eval()
    return torch.cat([net.features(batch) for batch in x.split(250)])


def class_means(net, images):
    """Each class's mean feature: a client's prototypes (Eq. 2 of FedTGP, which restates FedProto, and of FedSA; Eq. 8
    of FedFM).
    -> means (C, D), zero for an absent class, and image counts (C,). Leaves the net in eval mode."""
    features = extract(net, images.x)                    # (n, D)
    one_hot = F.one_hot(images.y, net.num_classes)       # (n, C)
    counts = one_hot.sum(0)
    sums = one_hot.T.to(features.dtype) @ features       # (C, D)
    return sums / counts.clamp(min=1)[:, None], counts


def distances(a, b):
    """Euclidean distances of a (n, D) and b (k, D) -> (n, k). With more than 25 rows torch.cdist's default
    computes a² + b² − 2ab, which rounds small distances away; this mode subtracts first."""
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")


def mean_where(values, mask):
    """Mean of those values (B,) that mask (B,) bool selects -> scalar, 0 if it selects none. The others must be finite
    as well, because inf · 0 is nan. values[mask] would not need that, but then the CPU would wait for the GPU."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def average(models, image_counts):
    """Weighted mean of models (FedFM Eq. 11): Σ_k n_k w_k / Σ_k n_k, BatchNorm's statistics included.
    models: [state_dict]; image_counts: [n_k] -> state_dict."""
    mean = {}
    for name in models[0]:
        total = sum(n * model[name] for n, model in zip(image_counts, models))
        mean[name] = total / sum(image_counts)  # load_state_dict rounds BatchNorm's batch counter down
    return mean


def model_size(net):
    """How many trainable parameters a model has. BatchNorm's statistics travel as well but are not counted."""
    return sum(parameter.numel() for parameter in net.parameters())


# --- evaluation -----------------------------------------------------------------------------------

def is_due(t, every, args):
    """True every `every` rounds and in the last round; never if `every` is 0."""
    return every > 0 and (t % every == 0 or t == args.rounds)


def evaluate_personal(clients, prototypes, t, args, has_prototype=None, name="prototype"):
    """Accuracy in % of all clients, each by its own model on its own test images: Σ right / Σ images.
    name: "prototype" or "anchor", what the log and the tables call the server's vectors
    -> {"classifier": %, name: %, "most_frequent": %}, or {} in a round without evaluation."""
    if not is_due(t, args.eval_every, args):
        return {}
    right = for_each_client(right_answers, clients, prototypes, has_prototype, args)
    images = sum(len(client.test.y) for client in clients)
    kinds = ["classifier", name, "most_frequent"]
    return {kind: 100 * sum(of_clients) / images for kind, of_clients in zip(kinds, zip(*right))}


@torch.no_grad()
def right_answers(client, prototypes, has_prototype, args):
    """How many of its own test images a client gets right with its model's classifier, with the nearest prototype, and
    by always guessing the majority class of its training images, the baseline that the other two must beat -> three
    numbers."""
    z = extract(client.net, client.test.x)
    y = client.test.y
    most_frequent_class = torch.bincount(client.train.y).argmax()
    by_classifier = client.net.classifier(z).argmax(1) == y
    by_prototype = nearest_prototype(z, prototypes, has_prototype) == y
    by_frequency = y == most_frequent_class
    return by_classifier.sum().item(), by_prototype.sum().item(), by_frequency.sum().item()


def nearest_prototype(z, prototypes, has_prototype=None):
    """The class of the nearest prototype. z (n, D), prototypes (C, D), has_prototype (C,) bool (None: every class has
    one) -> (n,)."""
    d = distances(z, prototypes)
    if has_prototype is not None:
        d = d.masked_fill(~has_prototype, math.inf)
    return d.argmin(1)


def evaluate_global(net, tests, t, args):
    """Accuracy in % of the global model's classifier on the server's test images. tests {domain: Images}
    -> {"test": mean over domains}, and each domain's where there are several; {} in a round without evaluation."""
    if not is_due(t, args.eval_every, args):
        return {}
    scores = {}
    for name, images in tests.items():
        show_progress(f"testing {name}")
        scores[name] = accuracy(net, images, args)
    mean = {"test": sum(scores.values()) / len(scores)}
    if len(scores) == 1:
        return mean
    return mean | scores


def evaluate_validation(net, clients, t, args):
    """Accuracy in % of the global model on the images that clients hold out -> {"validation": mean over the clients
    that have any}; {} without such images and in a round without evaluation."""
    if not is_due(t, args.eval_every, args):
        return {}
    scores = [accuracy(net, client.val, args) for client in clients if len(client.val.y) > 0]
    if not scores:
        return {}
    return {"validation": sum(scores) / len(scores)}


def accuracy(net, images, args):
    """Accuracy in % of a model's classifier."""
    @torch.no_grad()
    def guess(x):
        return net.classifier(extract(net, x)).argmax(1)

    guesses = side_by_side(guess, images.x.split(250), args)
    return 100 * (torch.cat(list(guesses)) == images.y).sum().item() / len(images.y)


# --- randomness -----------------------------------------------------------------------------------

def generator(seed, purpose, *where):
    """A numpy generator for one purpose (a word) in one round and client. Each random choice has its own
    generator, so resuming or changing --workers does not change the draws."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), *where])


@contextlib.contextmanager
def seeded(seed, purpose):
    """`with seeded(0, "anchors"):` what torch draws inside, on the CPU, depends only on seed and purpose."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(generator(seed, purpose).integers(2**62)))
        yield


# ======================================================================================================
# Part II. Data and models
# ======================================================================================================

# --- clients and their images ---------------------------------------------------------------------

def make_clients(data, args):
    """K clients with models of their own -> [Client]. They divide all images of the data set, training and test. Each
    keeps 25 % of its share as its test images, as in FedTGP and FedSA."""
    all_images = torch.arange(len(data.y))
    clients = []
    for i, (domain, train, test) in enumerate(divide(data, all_images, 0.25, args)):
        clients.append(Client(i, train, test=test, net=build_net(data, args, i), domain=domain))
    if not any(len(client.test.y) for client in clients):
        fail("no client has enough images to keep some for testing; try fewer --clients or more images")
    return clients


def make_federation(data, net, args, validation=0.0):
    """K clients that share one global model -> [Client], copies of `net` for a round's participants [Net], and the
    server's test images {domain: Images}. The training images are divided; a client holds back a share `validation`
    of its own.
    The next round overwrites the copies, and with them an upload's state_dict: clone what must last."""
    if args.model in GROUPS:
        fail(f"--model {args.model}: one global model cannot be a group of architectures")
    training = torch.nonzero(~data.test).flatten()
    clients = []
    for i, (domain, train, val) in enumerate(divide(data, training, validation, args)):
        clients.append(Client(i, train, val=val, domain=domain))
    # not one for each client: with hundreds of clients, large models would fill the memory
    client_nets = [copy.deepcopy(net) for _ in participants(clients, 1, args)]

    tests = {}
    for d, name in enumerate(data.domains):
        index = torch.nonzero(data.test & (data.domain == d)).flatten()
        if len(index) == 0 and args.subset < 1 and args.contents["test images"] > 0:
            fail(f"--subset {args.subset}: leaves the server no test images of {name}")
        if len(index) == 0:
            exit_without_data(Path(args.data, args.dataset),
                              f"the server needs test images of {name} (without test/ it holds some images out)")
        tests[name] = take(data, index, args.device)
    return clients, client_nets, tests


def divide(data, index, held_back, args):
    """Divide the images `index` by --partition, then hold back a share `held_back` of each client's part
    -> [(domain or "", training Images, held back Images)], one for each client."""
    shares = []
    domain_names = np.array(data.domains)[data.domain[index]]
    parts = partition(data.y[index].numpy(), domain_names, args)
    for i, part in enumerate(parts):
        part = generator(args.seed, "train/test", i).permutation(part)
        own = index[torch.from_numpy(part)]
        cut = len(own) - math.floor(held_back * len(own) + 1e-9)  # 1e-9: 2.9999999 is 3
        if cut < 2:
            fail(f"--partition {args.partition}: client {i} would train on {cut} of {len(index)} images; "
                 f"try fewer clients (now {len(parts)}), less skew or larger shares")
        train = take(data, own[:cut], args.device)
        held = take(data, own[cut:], args.device)
        domain = ""
        if args.partition == "domain":
            domain = data.domains[data.domain[own[0]]]  # all its images are of one domain
        shares.append((domain, train, held))

    sizes = [len(train.y) for _, train, _ in shares]
    smallest, largest = f"{min(sizes):,}", f"{max(sizes):,}"
    each = largest if smallest == largest else f"{smallest} to {largest}"
    print(f"{args.dataset}: {len(data.y):,} images of {len(data.class_names)} classes, {data.x.shape[-1]} pixels; "
          f"{len(shares)} clients train on {each} images each ({args.partition})")

    dealt = index[torch.from_numpy(np.concatenate(parts))]
    for what, names, of_image in ("classes", data.class_names, data.y), ("domains", data.domains, data.domain):
        left_out = set(of_image[index].tolist()) - set(of_image[dealt].tolist())
        if left_out:
            print(f"careful: no client has images of the {what} {few([names[n] for n in sorted(left_out)])}")
    return shares


def take(data, index, device):
    """The images `index` of a data set, on the device, with channels last in memory: convolutions are faster."""
    x = data.x[index].to(device, memory_format=torch.channels_last)
    return Images(x, data.y[index].to(device))


def augment(x, rng):
    """Random crop with 4 pixels of padding, horizontal flip, and rotation by up to 15 degrees, drawn for each image.

    x (B, channels, height, width) uint8 -> floats in [0, 255]; nearest-neighbour, black outside."""
    B = len(x)
    angle = rng.uniform(-np.pi / 12, np.pi / 12, B)
    flip = rng.choice([-1.0, 1.0], B)
    dx, dy = rng.integers(-4, 5, (2, B)) * 2 / x.shape[-1]            # affine_grid's coordinates run from −1 to 1
    # theta maps an output pixel to its place in the input: flipped, rotated, then shifted
    row1 = [flip * np.cos(angle), -np.sin(angle), dx]
    row2 = [flip * np.sin(angle), np.cos(angle), dy]
    theta = np.stack([*row1, *row2], axis=1).reshape(B, 2, 3)
    grid = F.affine_grid(torch.from_numpy(theta).float().to(x.device), x.shape, align_corners=False)
    return F.grid_sample(x.float(), grid, mode="nearest", align_corners=False)


# --- models ---------------------------------------------------------------------------------------

CONVNETS = {  # name: (number of 5x5 convolutions, widths of the fully connected layers)
    "cnn4": (2, [512]),
    "htcnn8-1": (1, [512]),
    "htcnn8-2": (2, [512]),
    "htcnn8-3": (1, [512, 512]),
    "htcnn8-4": (2, [512, 512]),
    "htcnn8-5": (1, [1024, 512]),
    "htcnn8-6": (2, [1024, 512]),
    "htcnn8-7": (1, [1024, 512, 512]),
    "htcnn8-8": (2, [1024, 512, 512]),
}
SMALL_RESNETS = {"resnet4": 1, "resnet6": 2, "resnet8": 3, "resnet10": 4}  # stages of one basic block each
RESNETS = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
HTFE8 = ["cnn4", "googlenet", "mobilenet_v2", *RESNETS]
# FedTGP's names: HtFE are different feature extractors, HtCNN different CNNs, HtC different classifiers.
GROUPS = {  # client i gets architecture i mod n of the n in its group
    "htfe2": ["cnn4", "resnet18"],
    "htfe3": ["resnet10", "resnet18", "resnet34"],
    "htfe4": ["cnn4", "googlenet", "mobilenet_v2", "resnet18"],
    "htfe5": ["cnn4", "resnet10", "resnet18", "resnet34", "resnet50"],  # from FedSA's code
    "htfe8": HTFE8,
    "htfe9": [*SMALL_RESNETS, *RESNETS],
    "htcnn8": [name for name in CONVNETS if name.startswith("htcnn8-")],
    "res34-htc4": ["resnet34"],  # one extractor, the four classifiers of HTC4
    "htfe8-htc4": HTFE8,         # eight extractors, the same four classifiers
}
HTC4 = [[], [512], [256], [128]]  # the classifiers' hidden layers
MODELS = ["cnn4", *SMALL_RESNETS, *RESNETS, "googlenet", "mobilenet_v2", *GROUPS]


def fully_connected(widths):
    """Linear and ReLU, from each width to the next."""
    layers = []
    for inputs, outputs in zip(widths, widths[1:]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers


def build_extractor(name, pixels, small_stem):
    """An architecture without its last layer, with random weights: images -> (B, any number)."""
    if name in CONVNETS:  # convolutions with 32 and 64 channels, each with max-pooling, then fully connected layers
        convolutions, widths = CONVNETS[name]
        layers = []
        channels = 3
        size = pixels
        for outputs in (32, 64)[:convolutions]:
            layers += [nn.Conv2d(channels, outputs, 5), nn.MaxPool2d(2), nn.ReLU()]
            channels = outputs
            size = (size - 4) // 2
        layers.append(nn.Flatten())
        layers += fully_connected([channels * size * size, *widths])
        return nn.Sequential(*layers)
    if name in SMALL_RESNETS:  # a ResNet cut to fewer stages
        net = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1])
        for stage in range(SMALL_RESNETS[name] + 1, 5):
            setattr(net, f"layer{stage}", nn.Identity())
    elif name == "googlenet":
        net = torchvision.models.googlenet(weights=None, aux_logits=False, init_weights=True, dropout=0)
    else:
        net = torchvision.models.get_model(name, weights=None)

    last_layer = "classifier" if name == "mobilenet_v2" else "fc"
    setattr(net, last_layer, nn.Identity())
    if small_stem and name.startswith("resnet"):
        net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        net.maxpool = nn.Identity()
    return net


def architecture(model, i):
    """Client i's architecture -> name of its feature extractor, widths of its classifier's hidden layers."""
    hidden = HTC4[i % 4] if model.endswith("htc4") else []
    group = GROUPS.get(model, [model])  # one architecture is a group of one
    return group[i % len(group)], hidden


def normalisation(dataset):
    """Mean and standard deviation of the channels, as FedFM's authors have them; 0.5 for other data sets."""
    if dataset == "cifar10":
        return (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
    if dataset == "cifar100":
        return (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    return (0.5,), (0.5,)


def build_net(data, args, i=0, mean=(0.5,), std=(0.5,)):
    """The global model, or client i's. Clients with the same extractor start from the same weights, so their feature
    spaces agree at first. The papers leave this open."""
    name, hidden = architecture(args.model, i)
    C, D = len(data.class_names), args.feature_dim
    with seeded(args.seed, f"weights {name} ()"):  # this text seeds the weights; do not change it
        extractor = build_extractor(name, data.x.shape[-1], args.small_stem)
        widths = [D, *hidden]
        classifier = nn.Linear(widths[-1], C)  # drawn before the hidden layers
        if hidden:
            classifier = nn.Sequential(*fully_connected(widths), classifier)
    return Net(extractor, classifier, D, C, mean, std).to(args.device)


# --- partitions -----------------------------------------------------------------------------------

def partition(y, domain, args):
    """Divide N images by --partition -> K index arrays. y (N,): their classes; domain (N,): their domains' names."""
    clients = args.clients or sum((args.domain_clients or {}).values())
    if 2 * clients > len(y):
        fail(f"{clients:,} clients cannot have two of {len(y):,} images each; try fewer --clients")
    return PARTITIONS[args.partition](y, domain, args, generator(args.seed, "partition"))


def indices_by_class(y, rng):
    """The images of each class that occurs, shuffled -> [indices]."""
    return [rng.permutation(np.flatnonzero(y == c)) for c in np.unique(y)]


def deal(stock, counts):
    """Give client i the next counts[i, c] images of class c. stock: each class's images, [indices]; counts (K, C)
    -> K index arrays."""
    pieces = []  # of each class: a piece for each client
    for index, sizes in zip(stock, counts.T):
        pieces.append(np.split(index, sizes.cumsum())[:-1])  # the last piece is what nobody gets
    return [np.concatenate(part) for part in zip(*pieces)]


def fewest_images(y, args):
    """The fewest images that a client should get: two batches or a quarter of an equal share, whichever is smaller,
    and at least 2. So the partitions dirichlet and pathological depend on --batch-size."""
    return max(2, min(2 * args.batch_size, len(y) // (4 * args.clients)))


def iid(y, domain, args, rng):
    return np.array_split(rng.permutation(len(y)), args.clients)


def dirichlet(y, domain, args, rng):
    """FedTGP's "practical" setting, also FedSA's, and FedFM's NIID-1. If the smallest client has too few images
    (`fewest_images`), we draw again. After 100 draws we take the one whose smallest client is largest."""
    best_minimum = -1
    for _ in range(100):
        owner = dirichlet_owners(y, args.clients, args.beta, rng)
        minimum = np.bincount(owner, minlength=args.clients).min()
        if minimum > best_minimum:
            best_minimum = minimum
            best_owner = owner
        if best_minimum >= fewest_images(y, args):
            break
    return [np.flatnonzero(best_owner == i) for i in range(args.clients)]


def dirichlet_owners(y, K, beta, rng):
    """Divide each class by shares from Dir(β) -> the client of each image (N,). A client that already holds N/K images
    gets nothing of the remaining classes, as in MOON's, PFLlib's and FedFM's code."""
    owner = np.empty(len(y), int)
    held = np.zeros(K, int)
    for c in np.unique(y):
        index = rng.permutation(np.flatnonzero(y == c))
        has_room = held < len(y) / K
        shares = rng.dirichlet(np.full(K, beta)) * has_room
        if shares.sum() == 0:  # a tiny β may give everything to clients that are full
            shares = has_room
        ends = np.round(np.cumsum(shares / shares.sum()) * len(index)).astype(int)
        counts = np.diff(ends, prepend=0)
        owner[index] = np.repeat(np.arange(K), counts)
        held += counts
    return owner


def pathological(y, domain, args, rng):
    """Each client gets --classes-per-client classes, those with the fewest owners so far. A class's owners get a
    minimum each; the rest of the class is cut at random points."""
    stock = indices_by_class(y, rng)
    classes = len(stock)
    each = args.classes_per_client
    if each > classes:
        fail(f"--classes-per-client {each}: must be at most the number of classes, {classes}")
    owns = np.zeros((args.clients, classes), int)
    for i in range(args.clients):
        order = np.lexsort((rng.random(classes), owns.sum(0)))  # by number of owners, ties in random order
        owns[i, order[:each]] = 1

    counts = np.zeros((args.clients, classes), int)
    for c, index in enumerate(stock):
        owners = rng.permutation(np.flatnonzero(owns[:, c]))
        if len(owners) == 0:
            continue
        minimum = min(math.ceil(fewest_images(y, args) / each), len(index) // len(owners))
        rest = len(index) - minimum * len(owners)
        cuts = np.sort(rng.integers(0, rest + 1, len(owners) - 1))
        pieces = np.diff([0, *cuts, rest])
        counts[owners, c] = minimum + pieces
    return deal(stock, counts)


def in_proportion(y, shares, rng):
    """Deal images in the proportions of shares (K, C), as many as the scarcest class allows. The rest stays unused."""
    stock = indices_by_class(y, rng)
    # how many images a share of 1 is
    scale = min(len(index) / wanted for index, wanted in zip(stock, shares.sum(0)) if wanted > 0)
    return deal(stock, np.floor(shares * scale + 1e-9).astype(int))  # 1e-9: 2.9999999 is 3


def dominant(y, domain, args, rng):
    """FedFM's NIID-2: --dominant-share of client i's images are of class i mod C, the others in equal parts of the
    remaining classes. With more classes than clients, C // K classes divide --dominant-share equally."""
    C, K = len(np.unique(y)), args.clients
    n = max(1, C // K)  # dominant classes of a client
    shares = np.full((K, C), (1 - args.dominant_share) / max(1, C - n))
    for i in range(K):
        shares[i, (i * n + np.arange(n)) % C] = args.dominant_share / n
    return in_proportion(y, shares, rng)


def missing(y, domain, args, rng):
    """FedFM's NIID-3: client i holds the classes i, ..., i + C - missing - 1 (mod C), equally many images of each."""
    C, K = len(np.unique(y)), args.clients
    if args.missing >= C:
        fail(f"--missing {args.missing}: must be below the number of classes, {C}")
    shares = np.zeros((K, C))
    for i in range(K):
        shares[i, (i + np.arange(C - args.missing)) % C] = 1
    return in_proportion(y, shares, rng)


def by_domain(y, domain, args, rng):
    """Every client has images of one domain, and no two clients have the same image.
    --domain-clients says how many clients a domain has. Without it the domains are dealt to --clients clients in turn;
    without both each domain has one client. A client gets --images-per-class of each class (or what there is), or the
    share --domain-fraction of its domain; without these, the clients of a domain share it equally."""
    domains = list(dict.fromkeys(domain))  # each once, in the data set's order
    if args.domain_clients:
        assigned = []
        for name, n in args.domain_clients.items():
            if name not in domains:
                fail(f"--domain-clients: no domain {name}; there are {', '.join(domains)}")
            assigned += [name] * n
    else:
        K = args.clients or len(domains)
        assigned = [domains[i % len(domains)] for i in range(K)]

    stock = {name: rng.permutation(np.flatnonzero(domain == name)) for name in domains if name in assigned}
    parts = []
    for i, name in enumerate(assigned):
        index = stock[name]
        served = assigned[:i].count(name)   # clients of this domain that have their part
        sharing = assigned.count(name)      # all clients of this domain
        if args.images_per_class:
            size = args.images_per_class
            piles = [index[y[index] == c] for c in np.unique(y)]
            part = np.concatenate([pile[served * size:(served + 1) * size] for pile in piles])
        elif args.domain_fraction:
            if args.domain_fraction * sharing > 1 + 1e-9:
                fail(f"--domain-fraction {args.domain_fraction}: must be at most 1/{sharing}, "
                     f"as {name} has {sharing} clients")
            size = min(round(args.domain_fraction * len(index)), len(index) // sharing)
            part = index[served * size:(served + 1) * size]
        else:
            part = np.array_split(index, sharing)[served]
        parts.append(part)
    return parts


PARTITIONS = {"iid": iid, "dirichlet": dirichlet, "pathological": pathological, "dominant": dominant,
              "missing": missing, "domain": by_domain}
PARTITION_OF = {  # each flag, and the one partition that uses it
    "--beta": "dirichlet", "--classes-per-client": "pathological", "--dominant-share": "dominant",
    "--missing": "missing", "--domain-clients": "domain", "--domain-fraction": "domain", "--images-per-class": "domain"}


# --- data sets ------------------------------------------------------------------------------------

class Dataset(NamedTuple):
    x: torch.Tensor       # (N, 3, height, width) uint8
    y: torch.Tensor       # (N,) label of each image, an index into `class_names`
    domain: torch.Tensor  # (N,) domain of each image, an index into `domains`
    test: torch.Tensor    # (N,) bool: is it a test image?
    class_names: list
    domains: list         # names


TORCHVISION = {"cifar10": "CIFAR10", "cifar100": "CIFAR100", "mnist": "MNIST", "fmnist": "FashionMNIST",
               "flowers102": "Flowers102", "usps": "USPS", "svhn": "SVHN"}
PIXELS = {"mnist": 28, "fmnist": 28, "usps": 16, "flowers102": 64, "tinyimagenet": 64, "digit5": 64,
          "office": 64, "pacs": 64, "domainnet": 64}  # 32 elsewhere


def load_dataset(args):
    """The images of --dataset, on the CPU: built in, from a folder, or downloaded by torchvision."""
    folder = Path(args.data, args.dataset)
    size = args.image_size or PIXELS.get(args.dataset, 32)
    show_progress(f"loading {args.dataset} ...")
    beside = [place.name for place in folder.parent.glob("*")]  # by name: Windows would take MNIST for mnist
    if args.dataset == "glyphs":
        data = glyphs(size)
        if folder.is_dir():
            print(f"glyphs are drawn by the program; {folder} is not read")
    elif args.dataset in TORCHVISION and args.dataset not in beside:
        data = download(args.dataset, folder, size)
    else:
        data = image_folder(folder, size)

    contents = {"images": len(data.y), "test images": int(data.test.sum()), "classes": data.class_names,
                "domains": data.domains, "labels": zlib.crc32(data.y.numpy())}
    before = getattr(args, "contents", contents)  # from the checkpoint, with --resume
    for what in contents:
        if contents[what] != before.get(what, contents[what]):  # an older checkpoint lacks labels
            fail(f"--resume {args.resume}: {folder} has other {what} than when the run began")
    args.contents = contents

    if args.subset == 1:
        return data
    n = max(2, round(args.subset * len(data.y)))
    index = np.sort(generator(args.seed, "subset").permutation(len(data.y))[:n])
    return data._replace(x=data.x[index], y=data.y[index], domain=data.domain[index], test=data.test[index])


def exit_without_data(folder, why):
    """Exit with status 1 and say which folder was looked at, which layout is wanted and what to try."""
    sys.exit(f"no usable data in {folder}: {why}\n"
             f"  wanted: {folder}/[<domain>/]{{train,test}}/<class>/*.png or {folder}/<domain>/<class>/*.png\n"
             f"  try: --data FOLDER, --dataset glyphs, or one that is downloaded: {', '.join(TORCHVISION)}")


def few(names):
    """The first five names, and how many there are if there are more."""
    more = f", ... ({len(names)})" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def has_domains(folder):
    """Does a folder of images have several domains? By the rule of `sort_images`."""
    if not folder.is_dir():
        return False
    images, _ = images_below(folder)
    roles = [role(names) for names in images]
    divided = any(part and not domain for domain, part, _ in roles)
    return not divided and len({domain for domain, _, _ in roles if domain}) > 1


def image_folder(folder, size):
    """A folder of images. `sort_images` says which layouts are read; a printed line says what was found."""
    if not folder.is_dir():
        exit_without_data(folder, "there is no such folder")
    images, others = images_below(folder)
    kinds = collections.Counter(path.suffix.lower() or "without extension" for path in others if path.is_file())
    skipped = [f"{n:,} {kind}" for kind, n in kinds.most_common()]
    rows = sort_images(folder, images)
    if not rows:
        loose = sum(map(len, images.values()))
        exit_without_data(folder, f"no folders of images there; {loose:,} images outside of folders; "
                                  f"other files: {few(skipped) or 'none'}")

    paths, class_of_image, domain_of_image, is_test = zip(*rows)
    class_names, y = np.unique(class_of_image, return_inverse=True)
    domains, domain = np.unique(domain_of_image, return_inverse=True)
    paths_and_times = []
    for path in paths:
        about = path.stat() if path.exists() else path.lstat()  # `decoded` names broken links
        paths_and_times.append((path.relative_to(folder).as_posix(), about.st_mtime_ns, about.st_size))
    how = "upright, 8 bits, on white"  # change this text if pixels are read differently: old caches become invalid
    key = zlib.crc32(repr((how, paths_and_times)).encode())
    cache = folder.with_name(f"{folder.name}-{size}px.pt")

    def read(i):
        image = Image.open(paths[i])
        if folder.name not in PIXELS:  # the papers' sets stay as published; one image of office has a wrong tag
            image = ImageOps.exif_transpose(image)
        return image, y[i]

    x, _ = decoded(read, paths, size, cache, key)
    if x.max() < 32:
        print(f"careful: the brightest pixel of {folder} is {x.max()} of 255; 12-bit values need to be rescaled")
    unused = {path for found in images.values() for path in found} - set(paths)
    unused = collections.Counter(str(path.parent.relative_to(folder)) for path in unused)
    tested = {name for name, of_test in zip(class_of_image, is_test) if of_test}
    told = {"domains": domains, "classes": class_names,
            "no test images of": [name for name in class_names if tested and name not in tested], "skipped": skipped,
            "images not used": [f"{n:,} in {place}" for place, n in sorted(unused.items())],
            "no images in": [str(path.relative_to(folder)) for path in others if path.is_dir()]}
    print(f"{folder}: " + "; ".join(f"{what} {few(names)}" for what, names in told.items() if len(names)))
    return Dataset(x, torch.as_tensor(y), torch.as_tensor(domain), torch.as_tensor(is_test), class_names.tolist(),
                   domains.tolist())


def images_below(folder):
    """What is not hidden in a folder -> images, {names of the folders that lead to them: [path]}, and other files and
    empty folders, [path]."""
    images, others = {}, []
    for place, folders, files in os.walk(folder, onerror=sys.exit, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))  # os.walk enters these
        paths = [Path(place, name) for name in sorted(files) if not name.startswith(".")]
        found = [path for path in paths if is_image_file(path.name)]
        others += [path for path in paths if not is_image_file(path.name)]
        names = Path(place).relative_to(folder).parts
        if names[-1:] == ("images",):  # Tiny-ImageNet has train/<class>/images/*.JPEG
            names = names[:-1]
        if found:
            images[names] = images.get(names, []) + found
        elif not folders:
            others.append(Path(place))
    broken = [str(path) for path in others if not path.exists()]
    if broken:
        sys.exit(f"broken links: {few(broken)}")
    return images, others


# train, test or val in any spelling, such as Training, seg_test, valid, BrainTest or imagesTr
PART = re.compile("(?<![A-Za-z])(?i:train|test|(val|valid|validation|dev|development|eval|evaluation)(?![a-z]))"
                  "|Train|Test|(Tr|Ts)$")


def role(names):
    """The names of the folders that lead to images -> (domain,) or (), part or "", (class,)"""
    def begins_with_part(path):
        # test may hold its images without classes; train may be the name of a class
        return path[:1] == ("test",) or (len(path) > 1 and PART.search(path[0]))

    domain, rest = names[:1], names[1:]
    if begins_with_part(names):                    # train/<class>
        return (), names[0], rest
    if begins_with_part(rest):                     # <domain>/train/<class>
        return domain, rest[0], rest[1:]
    return domain, "", rest                        # <domain>/<class>


def sort_images(folder, images):
    """The rule for folders: train/<class> and test/<class>; or <domain>/train/<class> and <domain>/test/<class>; or
    <domain>/<class>, where `test_images` picks the test images. What does not fit is refused.
    images: see `images_below` -> [(path, class, domain, is it a test image?)]"""
    layout = {}  # {domain: {part: {class: [path]}}}
    for names, paths in images.items():
        domain, part, class_name = role(names)
        layout.setdefault(domain, {}).setdefault(part, {})[class_name] = paths
    whole = layout.pop((), {})
    if set(whole) - {""}:  # other folders beside train/ are no domains
        layout = {(): whole}

    rows = []
    for domain, parts in sorted(layout.items()):
        rows += sort_domain(folder, Path(folder, *domain), parts)

    classes = {name for _, name, _, _ in rows}
    untrained = sorted(classes - {name for _, name, _, is_test in rows if not is_test})
    if untrained:
        exit_without_data(folder, f"only test images of {few(untrained)}; rename or move what is no class (without a "
                                  f"folder train a class needs three images)")
    if classes and all(PART.search(name) for name in classes):
        exit_without_data(folder, f"{few(sorted(classes))} are no classes; move them above the classes")
    if len(classes) == 1:
        exit_without_data(folder, f"{few(list(classes))} is the only class")
    return rows


def sort_domain(folder, place, parts):
    """One domain, or all of a data set without domains. parts {"train", "test" or "": {class: [path]}} -> as
    `sort_images`."""
    divided = sorted(set(parts) - {""})
    if not divided:
        samples = samples_of_part(folder, place, "", parts)
        chosen = test_images(folder.name, place.name, len(samples))
        return [(path, name, place.name, is_test) for (path, name), is_test in zip(samples, chosen)]
    if divided != ["train"] and not {"train", "test"} <= set(divided):
        exit_without_data(folder, f"{place} is divided into {', '.join(divided)}; rename these folders to train and "
                                  f"test, or move them away")
    rows = []
    for part in "train", "test":
        rows += [(path, name, place.name, part == "test") for path, name in samples_of_part(folder, place, part, parts)]
    return rows


def samples_of_part(folder, place, part, parts):
    """-> [(path, class)]"""
    samples = []
    for class_name, paths in parts.get(part, {}).items():
        if len(class_name) > 1:
            exit_without_data(folder, f"{Path(place, part, class_name[0])} holds folders, such as {class_name[1]}; if "
                                      f"they are the classes, move them one level up")
        if class_name:
            samples += [(path, class_name[0]) for path in paths]
        elif len(parts[part]) == 1:
            exit_without_data(folder, f"{place / part} holds images, not folders of classes; move it away or, if it is "
                                      f"a class, into {folder / 'all'} or {folder / 'train'}")
    return samples


def test_images(dataset, domain, n):
    """Which of a domain's n images are test images -> [bool], the same for every seed.
    PACS: ⌈0.3 n⌉ at random, which fits FedLSA's Table 3. Elsewhere: the last two of every ten files, as in FPL's code
    (github.com/WenkeHuang/RethinkFL), which fits FedLSA's Table 2 for office."""
    if dataset == "pacs":
        chosen = generator(0, f"test images of {domain}").permutation(n)[:math.ceil(3 * n / 10)]
        return np.isin(np.arange(n), chosen).tolist()
    return [i % 10 > 7 for i in range(n)]


def as_rgb(image):
    """A PIL image as RGB with 8 bits, white where it is transparent. Deeper integers may run to 65,535, floats to 1."""
    if image.mode.startswith(("I", "F")):
        highest = 1 if image.mode == "F" else 65535
        values = np.asarray(image, float)
        if not 0 <= values.min() <= values.max() <= highest:
            raise ValueError(f"values from {values.min():g} to {values.max():g}, not within 0 to {highest}")
        image = Image.fromarray(np.round(255 / highest * values).astype(np.uint8))
    if image.mode.endswith("A") or "transparency" in image.info:  # often black below the transparent parts
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def decoded(read, names, size, cache, key):
    """Images as RGB (n, 3, size, size) uint8, resized, and their labels (n,). read(i) gives a PIL image and its label;
    names[i] is for the error message. The file `cache` keeps both tensors and is used again while `key` is the same."""
    if cache.exists():
        with contextlib.suppress(Exception):  # a damaged cache can raise anything; then decode again
            kept = torch.load(cache, weights_only=True)
            if kept["key"] == key:
                return kept["tensors"]
    print(f"decoding {len(names):,} images ...", flush=True)
    pixels = np.empty((len(names), size, size, 3), np.uint8)
    labels = torch.zeros(len(names), dtype=torch.long)
    failed = []

    def decode_one(i):
        try:
            image, label = read(i)
            labels[i] = int(label)
            pixels[i] = as_rgb(image).resize((size, size), Image.Resampling.BILINEAR)
        except Exception as error:  # a damaged file can raise anything
            failed.append(f"{names[i]}: {error}")

    with ThreadPoolExecutor(cores()) as pool:
        for n, _ in enumerate(pool.map(decode_one, range(len(names))), start=1):
            show_progress(f"decoding {n:,}/{len(names):,}")
    if failed:
        more = [f"and {len(failed) - 10:,} more"] if len(failed) > 10 else []
        sys.exit("\n  ".join(["cannot decode:", *sorted(failed)[:10], *more]))
    tensors = (torch.from_numpy(pixels).permute(0, 3, 1, 2), labels)
    scratch = cache.with_suffix(f".{os.getpid()}")  # renamed when it is complete
    try:
        torch.save({"key": key, "tensors": tensors}, scratch)
        scratch.replace(cache)
        print(f"kept in {cache} ({cache.stat().st_size / 1e6:.0f} MB)")
    except (OSError, RuntimeError) as error:  # the disk is full, or a course's folder read-only for its students
        print(f"not kept in {cache}: {error}")
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
    return tensors


def download(name, folder, size):
    """One of torchvision's data sets, downloaded to <data>/torchvision."""
    root = folder.parent / "torchvision"
    dataset_class = getattr(torchvision.datasets, TORCHVISION[name])
    options = [{"train": True}, {"train": False}]
    if name == "flowers102":
        options = [{"split": "train"}, {"split": "val"}, {"split": "test"}]
    elif name == "svhn":
        options = [{"split": "train"}, {"split": "test"}]
    try:
        parts = [dataset_class(root, download=True, **option) for option in options]
    except ImportError as error:  # SVHN and Flowers102 need scipy
        fail(f"--dataset {name}: {error}; install it with pip")
    except Exception as error:
        reason = " ".join(str(error).split())
        exit_without_data(folder, f"not there, and the download to {root} failed; no internet? ({reason})")

    images = torch.utils.data.ConcatDataset(parts)
    names = [f"image {i} of {name}" for i in range(len(images))]
    x, y = decoded(lambda i: images[i], names, size, root / f"{name}-{size}px.pt", name)
    classes = getattr(parts[0], "classes", range(int(y.max()) + 1))  # names, if torchvision has them
    is_test = torch.arange(len(y)) >= len(y) - len(parts[-1])  # the last part
    return Dataset(x, y, torch.zeros_like(y), is_test, [str(label) for label in classes], [name])


# --- glyphs: the built-in data set ----------------------------------------------------------------

FONTS = ["DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSansMono-Bold",
         "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "STIXGeneral", "STIXGeneralBol",
         "STIXGeneralItalic", "cmr10", "cmb10", "cmss10", "cmtt10", "cmti10"]  # they come with matplotlib
GLYPH_DOMAINS = ["plain", "thin", "texture", "clutter"]
CANVAS = 64  # pixels of the drawing, before it is reduced


@functools.cache
def glyphs(size=32):
    """Digits in matplotlib's fonts and in four domains, 200 of each class in each domain; every fourth is a test
    image."""
    with torch.random.fork_rng(devices=[]):  # restores torch's generator afterwards, as `seeded` does
        x = torch.cat([draw_domain(name, 2000, size) for name in GLYPH_DOMAINS])
    index = torch.arange(len(x))
    test = index // 10 % 4 == 3
    return Dataset(x, index % 10, index // 2000, test, list("0123456789"), GLYPH_DOMAINS)


@functools.cache
def digits_in_all_fonts():
    """How much ink each pixel has, in [0, 1] -> (fonts, 10, CANVAS, CANVAS)."""
    images = []
    for name in FONTS:
        path = Path(matplotlib.get_data_path(), "fonts", "ttf", f"{name}.ttf")
        font = ImageFont.truetype(str(path), round(0.85 * CANVAS))
        for digit in "0123456789":
            image = Image.new("L", (CANVAS, CANVAS))
            left, top, right, bottom = font.getbbox(digit)
            corner = (CANVAS - right - left) / 2, (CANVAS - bottom - top) / 2
            ImageDraw.Draw(image).text(corner, digit, fill=255, font=font)
            images.append(np.asarray(image, np.float32) / 255)
    return torch.from_numpy(np.stack(images)).view(-1, 10, CANVAS, CANVAS)


def uniform(n, low, high, channels=1):
    """Random numbers (n, channels, 1, 1): an angle, a grey or a colour for each of n images."""
    return torch.rand(n, channels, 1, 1) * (high - low) + low


def noise(n, cells, channels=1):
    """Smooth noise around 0, (n, channels, CANVAS, CANVAS)."""
    coarse = torch.rand(n, channels, cells, cells) - 0.5
    return F.interpolate(coarse, size=(CANVAS, CANVAS), mode="bilinear")


def draw(digit, rotation, dx, dy, min_zoom=0.75, max_zoom=1.1):
    """Digits (n,) in random fonts, turned, sheared, zoomed and moved -> (n, 1, CANVAS, CANVAS)."""
    n = len(digit)
    font = torch.randint(len(FONTS), (n,))
    angle = uniform(n, -rotation, rotation)
    shear = uniform(n, -0.25, 0.25)
    shrink = 1 / uniform(n, min_zoom, max_zoom, channels=2)
    shrink_x, shrink_y = shrink.split(1, dim=1)
    row_x = [shrink_x * angle.cos(), shrink_x * (shear - angle.sin()), dx]
    row_y = [shrink_y * angle.sin(), shrink_y * angle.cos(), dy]
    theta = torch.cat([*row_x, *row_y], 1).view(n, 2, 3)  # from output to input pixels
    grid = F.affine_grid(theta, (n, 1, CANVAS, CANVAS), align_corners=False)
    return F.grid_sample(digits_in_all_fonts()[font, digit].unsqueeze(1), grid, align_corners=False)


def draw_domain(name, n, size=32):
    """n images of a domain, (n, 3, size, size) uint8, of the classes 0, 1, ..., 9, 0, 1, ..."""
    torch.manual_seed(GLYPH_DOMAINS.index(name))
    digit = torch.arange(n) % 10
    dx, dy = uniform(n, -0.15, 0.15), uniform(n, -0.15, 0.15)

    if name == "plain":  # dark on paper
        image = uniform(n, 0.8, 1.0) - uniform(n, 0.5, 0.8) * draw(digit, 0.2, dx, dy)
    elif name == "thin":  # thin strokes, drawn with 11 x 11 pixels
        ink = draw(digit, 0.35, dx, dy)
        thinner = -F.max_pool2d(-ink, 2, stride=1)  # the minimum of neighbours
        coarse = F.adaptive_avg_pool2d(thinner, (11, 11))
        image = uniform(n, 0.6, 0.9) - uniform(n, 0.5, 0.8) * F.interpolate(coarse, size=(CANVAS, CANVAS))
    elif name == "texture":  # light on gratings and noise
        angle = uniform(n, 0, 2 * math.pi)
        wave = uniform(n, 6, 20)
        phase = uniform(n, 0, 2 * math.pi)
        ramp = torch.linspace(-1, 1, CANVAS)
        grating = torch.sin(wave * (ramp * angle.cos() + ramp[:, None] * angle.sin()) + phase)
        ground = 0.3 + 0.15 * grating + 0.4 * noise(n, 6)
        image = torch.lerp(ground, uniform(n, 0.65, 0.95), draw(digit, 0.35, dx, dy))
    else:  # clutter: coloured, blurred, between pieces of other digits
        ground, colour = uniform(n, 0, 1, 3), uniform(n, 0, 1, 3)
        contrast = (ground - colour).mean(1, keepdim=True)
        missing_contrast = (0.3 - contrast.abs()).clamp(min=0)  # moves the colour away, if [0, 1] allows it
        colour = (colour - contrast.sign() * missing_contrast).clamp(0, 1)
        image = ground + 0.35 * noise(n, 5, 3)
        for _ in range(2):
            angle = uniform(n, 0, 2 * math.pi)
            other = torch.randint(10, (n,))
            other_colour = uniform(n, 0, 1, 3)
            ink = draw(other, 1.0, 1.1 * angle.cos(), 1.1 * angle.sin())
            image.lerp_(other_colour, 0.8 * ink)
        image.lerp_(colour, draw(digit, 0.5, dx, dy, min_zoom=0.65, max_zoom=1.0))
        for _ in range(2):
            image = F.avg_pool2d(image, 5, 1, 2, count_include_pad=False)

    image = F.interpolate(image, size=(size, size), mode="bilinear", antialias=True)
    image += 0.04 * torch.randn(n, 1, size, size)
    return image.clamp_(0, 1).mul_(255).round_().byte().expand(-1, 3, -1, -1)


# ======================================================================================================
# Part III. The frame: run folder, pictures, comparing runs, command line
# ======================================================================================================

# --- run folder -----------------------------------------------------------------------------------

# About the machine, not the experiment: allowed with --resume, and not in args.json
MACHINE_FLAGS = ["data", "device", "workers", "checkpoint_every", "no_plots", "resume"]


class Run:
    """A run's folder with args.json, log.csv and checkpoint.pt. The top of this file says when main calls what."""

    def __init__(self, args, modules):
        self.args = args
        self.modules = modules
        self.rows = []  # of log.csv
        self.folder = new_folder(args) if args.resume is None else Path(args.resume)
        left_out = [*MACHINE_FLAGS, "out", "name", "trials", "contents"]
        about = {name: value for name, value in vars(args).items() if name not in left_out}
        (self.folder / "args.json").write_text(json.dumps(about, indent=1) + "\n")

    def resume(self, state=()):
        """With --resume, load the models' weights and return the saved state. Otherwise return `state` unchanged.
        state: a tensor or a tuple of tensors; () if only the models are kept."""
        if self.args.resume is None:
            return state
        saved = torch.load(self.folder / "checkpoint.pt", map_location="cpu", weights_only=True)
        for module, weights in zip(self.modules, saved["modules"], strict=True):
            module.load_state_dict(weights)
        for row in saved["rows"]:
            # with a larger --rounds the old last round is no longer the last, and may not be due for a test
            tested = is_due(row["round"], self.args.eval_every, self.args)
            self.rows.append({name: value for name, value in row.items() if tested or not name.startswith("acc_")})
        self.write_log()  # without the rounds after the checkpoint, which run again
        print(f"resuming after round {len(self.rows)} of {self.args.rounds}")
        if isinstance(state, torch.Tensor):
            return saved["state"].to(self.args.device)
        return tuple(tensor.to(self.args.device) for tensor in saved["state"])

    def rounds(self):
        """The rounds that are still to run, beginning with 1."""
        for t in range(len(self.rows) + 1, self.args.rounds + 1):
            self.began = time.time()
            yield t

    def report(self, t, scores, losses, up, down, **extra):
        """End round t: log it and print a line. Exits with status 1 if a loss or an extra number is not finite.

        scores: {name: accuracy in %}, or {} in a round without evaluation; they become columns acc_<name>. The
        last lines and the table of common.py show only "classifier", "prototype", "anchor" and "test".
        losses: the clients', [tensor]; up, down: how many floats all clients sent and received; extra: further
        columns, numbers or detached tensors, which curves.png shows if their names end in "loss"."""
        losses = torch.stack(losses)
        for what, values in {"a client's loss": losses, **extra}.items():
            if not torch.as_tensor(values).isfinite().all():
                sys.exit(f"round {t}: {what} is not finite; try a smaller --lr (now {self.args.lr:g}) or λ")

        row = {"round": t}
        for name, value in scores.items():
            row[f"acc_{name}"] = float(value)  # a checkpoint with a numpy number could not be loaded
        row["loss"] = losses.mean().item()
        row["up"] = int(up)
        row["down"] = int(down)
        row["seconds"] = round(time.time() - self.began, 3)
        for name, value in extra.items():
            row[name] = float(value)
        self.rows.append(row)
        self.write_log()

        T = self.args.rounds
        recent = self.rows[-20:]  # a resumed run may be on another machine now, and FedFM's rounds get longer
        minutes_left = (T - t) * np.mean([earlier["seconds"] for earlier in recent]) / 60
        shown = [f"round {t:{len(str(T))}}/{T}"]
        shown += [f"{in_words(name)} {value:5.2f}" for name, value in scores.items()]
        shown.append(f"loss {row['loss']:.4f}")
        shown += [f"{name} {row[name]:.4g}" for name in extra]
        shown.append(f"up {row['up']:,}  down {row['down']:,}  {row['seconds']:.2f} s  left {minutes_left:.1f} min")
        show_progress("")  # wipe the progress line
        print(*shown, sep="  ", flush=True)

    def write_log(self):
        """Write log.csv. A round without evaluation has empty cells."""
        scratch = self.folder / "log.tmp"  # renamed when it is complete: a kill loses nothing
        with open(scratch, "w", encoding="utf-8", newline="") as file:
            columns = dict.fromkeys(name for row in self.rows for name in row)
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(self.rows)
        self.log = self.folder / "log.csv"
        try:
            scratch.replace(self.log)
        except PermissionError:  # on Windows, while a spreadsheet shows it
            self.log = scratch
            print(f"{self.folder / 'log.csv'} is open in another program; until it can be written, see {scratch}")

    def checkpoint(self, t, state=()):
        """Write checkpoint.pt every --checkpoint-every rounds and after the last (0: never). state: as in `resume`."""
        tensors = [state] if isinstance(state, torch.Tensor) else state
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise TypeError("run.checkpoint: state must be a tensor or a tuple of tensors; --resume reads nothing else")
        if not is_due(t, self.args.checkpoint_every, self.args):
            return
        saved = {"settings": vars(self.args), "rows": self.rows, "state": state,
                 "modules": [module.state_dict() for module in self.modules]}
        scratch = self.folder / "checkpoint.tmp"  # renamed, so that there is always a complete one
        with only_a_warning(f"checkpoint.pt in round {t}"):  # the disk may be full
            try:
                torch.save(saved, scratch)
                scratch.replace(self.folder / "checkpoint.pt")
            finally:
                scratch.unlink(missing_ok=True)  # half a checkpoint would keep the disk full


def new_folder(args):
    """Make <out>/<script>-<dataset>[-<name>]-s<seed>, with a number added if that exists."""
    pieces = [args.script, args.dataset, args.name, f"s{args.seed}"]
    name = "-".join(piece for piece in pieces if piece)
    try:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        for n in itertools.count(1):
            folder = Path(args.out, name if n == 1 else f"{name}-{n}")
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                continue
    except OSError as error:  # --out may be a file, or a link to nowhere
        fail(f"--out {args.out}: {error}")


def show_progress(text):
    """One line on the terminal, which the next overwrites; nothing if standard error is a file."""
    if sys.stderr.isatty():
        print(f"\r{text[:40]:40}\r", end="", file=sys.stderr, flush=True)


# --- the log and its last lines -------------------------------------------------------------------

def in_words(column):
    """The name that a column of log.csv has in lines and pictures."""
    return column.removeprefix("acc_").replace("most_frequent", "majority class")


def read_log(path):
    """A run's log.csv -> {column: an array with a number for each round}, nan in rounds without evaluation."""
    with open(path, encoding="utf-8-sig", newline="") as file:  # -sig: a spreadsheet may have put a mark in front
        rows = list(csv.DictReader(file))
    return {name: np.array([float(row[name] or "nan") for row in rows]) for name in rows[0]}


def predictions(*logs):
    """The kinds of accuracy in logs: by "classifier", "prototype" or "anchor", or "test" for a global model."""
    kinds = ["classifier", "prototype", "anchor", "test"]
    return [kind for kind in kinds if any(f"acc_{kind}" in log for log in logs)]


def curve(log, column):
    """The rounds in which a column has a number, and these numbers."""
    has_number = np.isfinite(log[column])
    return log["round"][has_number].astype(int), log[column][has_number]


def best_and_final(log, kind):
    """-> best accuracy in %, its round, final accuracy in %. Validation images, if any, pick the best round."""
    rounds, scores = curve(log, f"acc_{kind}")
    picked_on = "acc_validation" if "acc_validation" in log else f"acc_{kind}"
    _, judged = curve(log, picked_on)
    best = judged.argmax()
    return scores[best], rounds[best], scores[-1]


def mean_std(values):
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}"


def summarize(run):
    """Print a run's last lines -> {"best ... accuracy": %, "final ... accuracy": %} of each prediction."""
    log = read_log(run.log)
    results = {}
    images = "validation" if "acc_validation" in log else "test"
    for kind in predictions(log):
        best, t, final = best_and_final(log, kind)
        results[f"best {kind} accuracy"] = best
        results[f"final {kind} accuracy"] = final
        print(f"{kind} accuracy: final {final:.2f} %, best {best:.2f} % in round {t} (selected on {images} images)")
    up, down, seconds = log["up"].sum(), log["down"].sum(), log["seconds"].sum()
    print(f"traffic: {up:,.0f} floats up, {down:,.0f} down; {seconds:.0f} s in all")
    print(f"everything is in {run.folder}")
    return results


def print_what_next(args):
    """Commands to type after a run. The flags that begin with --lam are the weights of a method's terms."""
    weights = [name for name in vars(args) if name.startswith("lam")]
    if any(getattr(args, name) for name in weights) and args.resume is None:
        off = " ".join(f"--{name.replace('_', '-')} 0" for name in weights)
        name = f"{args.name}-off" if args.name else "off"
        print(f"the same without guidance: python {shlex.join(sys.orig_argv[1:])} {off} --name {name}")
    out = args.out if args.resume is None else str(Path(args.resume).parent)
    print(f"all runs in one table: python common.py {shlex.quote(out)}/*")


@contextlib.contextmanager
def only_a_warning(what):
    """For what a run can do without: if it fails, one line says so, and the program goes on."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:  # drawing can raise anything
        print(f"no {what}: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)


# --- pictures and cluster quality -----------------------------------------------------------------

matplotlib.rcParams.update({"figure.constrained_layout.use": True, "axes.grid": True, "grid.alpha": 0.25,
                            "legend.frameon": False, "legend.fontsize": "small", "savefig.dpi": 150,
                            "text.parse_math": False})  # a class may be called "$5"
MARKERS = "o^DvPX<>ph8Hd"  # so that lines and groups can be told apart without colours


def draw_pictures(run, data, clients, prototypes=None, labels=None, net=None, tests=None):
    """partition.png, curves.png and features.png; also margins.png if the server holds prototypes (G, D). If one fails,
    that is a warning. labels (G,): the prototypes' classes; without it there is one for each class. net, tests: the
    global model and the server's test images by domain; without them every client has its own."""
    if run.args.no_plots:
        return
    show_progress("drawing pictures ...")
    if prototypes is None:
        prototypes = torch.zeros(0, run.args.feature_dim)
    if labels is None:
        labels = torch.arange(len(prototypes), device=prototypes.device)
    names = [name[:24] for name in data.class_names]  # leaves room for the picture
    if net is None:
        chosen = with_a_shared_class(clients, len(names))
        groups = {f"client {client.id} {client.domain}".strip(): (client.net, client.test) for client in chosen}
    else:
        groups = {name: (net, images) for name, images in list(tests.items())[:len(MARKERS)]}

    plots = {"partition": lambda: plot_partition(clients, names), "curves": lambda: plot_curves(read_log(run.log)),
             "features": lambda: plot_features(groups, prototypes, labels, names, run.args.seed)}
    if len(prototypes):
        plots["margins"] = lambda: plot_margins(clients, net, prototypes, labels, names)
    for name, plot in plots.items():
        with only_a_warning(f"{name}.png"):
            figure = plot()
            title = f"{run.folder.name}, {run.args.partition}, round {run.rows[-1]['round']}"
            figure.suptitle(textwrap.fill(title, 70), fontsize="medium")
            figure.savefig(run.folder / f"{name}.png")


def with_a_shared_class(clients, C):
    """Six clients with many test images of one class: the class of which the sixth client has the most."""
    n = np.stack([np.bincount(client.test.y.cpu(), minlength=C) for client in clients])  # (K, C)
    sixth_largest = np.sort(n, axis=0)[-min(6, len(clients))]         # (C,); with fewer clients the smallest
    shared = sixth_largest.argmax()
    chosen = n[:, shared].argsort(kind="stable")[-6:]
    return [clients[i] for i in sorted(chosen)]


def label_ticks(axis, names):
    """Names as the ticks of an axis, 30 at most."""
    step = math.ceil(len(names) / 30)
    axis.set_ticks(range(0, len(names), step), names[::step])
    if axis.axis_name == "x" and max(map(len, names)) > 3:
        axis.set_tick_params(rotation=90)


def plot_partition(clients, names):
    """A dot's area is how many training images of a class a client has."""
    counts = np.stack([np.bincount(client.train.y.cpu(), minlength=len(names)) for client in clients])
    k, c = counts.nonzero()
    figure = Figure(figsize=(9, 6))
    axis = figure.subplots()
    area = 4000 / max(10, len(names), len(clients) / 2) / counts.max()
    axis.scatter(k, c, s=area * counts[k, c], alpha=0.7)
    axis.set(xlabel=f"client (the largest dot: {counts.max()} training images)", ylabel="class")
    label_ticks(axis.xaxis, [f"{client.id} {client.domain}"[:24] for client in clients])
    label_ticks(axis.yaxis, names)
    return figure


def plot_curves(log):
    """Accuracies and losses over rounds."""
    figure = Figure(figsize=(11, 4.5))
    left, right = figure.subplots(1, 2)
    accuracies = [column for column in log if column.startswith("acc_")]
    losses = [column for column in log if column.endswith("loss") and column not in accuracies]
    for axis, label, columns in (left, "accuracy (%)", accuracies), (right, "loss", losses):
        for column, marker in zip(columns, itertools.cycle(MARKERS)):
            axis.plot(*curve(log, column), marker=marker, label=in_words(column)[:24])
        axis.set(xlabel="round", ylabel=label)
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        axis.legend(handles=axis.lines[:len(MARKERS)])  # no legend of a hundred domains
    return figure


def in_two_dimensions(z, seed):
    """Points (n, D) in the plane -> (n, 2), and the name of the method: t-SNE if scikit-learn is installed, else
    the first two principal components of the vectors at unit length."""
    z = z.nan_to_num(0, 0, 0)
    z = z / z.abs().max().clamp(min=1e-30)  # distances of very large or small numbers would not be finite or all 0
    try:
        from sklearn.manifold import TSNE
        from threadpoolctl import threadpool_limits  # scikit-learn needs it
    except ImportError:
        TSNE = None
    if TSNE and len(z.unique(dim=0)) > 3:  # t-SNE crashes if all points are equal
        tsne = TSNE(perplexity=min(30, len(z) / 4), init="pca", random_state=seed)
        with threadpool_limits(1):  # beside other runs, more threads take ten times as long
            return tsne.fit_transform(z.numpy()), "t-SNE of features; how far apart groups are means little"
    unit = F.normalize(z)
    _, _, directions = torch.linalg.svd(unit - unit.mean(0), full_matrices=False)
    points = unit @ directions[:2].T
    return F.pad(points, (0, 2 - points.shape[1])).numpy(), "principal components of features at unit length"


def plot_features(groups, prototypes, labels, names, seed):
    """Features of test images in the plane: a colour for each class, a marker for each group, and stars for the
    server's prototypes (G, D) of classes labels (G,). groups {client or domain: (net, Images)}."""
    z, y, group = [], [], []
    for name, (net, images) in groups.items():
        index = generator(seed, "picture").permutation(len(images.y))[:math.ceil(900 / len(groups))]
        z.append(extract(net, images.x[index]).cpu())
        y.append(images.y[index].cpu())
        group += [name] * len(index)
    points, method = in_two_dimensions(torch.cat([*z, prototypes.cpu()]), seed)
    y = torch.cat([*y, labels.cpu()]).numpy()
    group = np.array(group + [""] * len(labels))  # "": the server's

    frequent = [c for c, _ in collections.Counter(y.tolist()).most_common(10)]
    figure = Figure(figsize=(7.5, 5.6))
    axis = figure.subplots()
    stars = []
    for n, c in enumerate(sorted(frequent)):
        axis.scatter([], [], marker="s", color=f"C{n}", label=names[c])  # a point for the legend only
        for name, marker in zip(groups, MARKERS):
            x1, x2 = points[(y == c) & (group == name)].T
            axis.scatter(x1, x2, 16, f"C{n}", marker=marker, edgecolor="none", alpha=0.7)
        x1, x2 = points[(y == c) & (group == "")].T
        axis.scatter(x1, x2, 180, f"C{n}", marker="*", edgecolor="black", alpha=0.7)
        stars += [(*place, names[c]) for place in zip(x1, x2)]
    if len(labels) <= len(names):
        name_stars(axis, stars)
    for name, marker in zip(groups, MARKERS):
        axis.scatter([], [], marker=marker, color="black", label=name[:24])  # a point for the legend only
    if len(labels):
        axis.scatter([], [], marker="*", color="black", label="server")
    axis.set(xticks=[], yticks=[], xlabel=f"test images\n{method}")
    figure.legend(loc="outside right upper")
    return figure


def name_stars(axis, stars):
    """Names beside stars [(x, y, name)], for those who see no colours; moved up until they stand apart."""
    left, right = axis.get_xlim()
    bottom, top = axis.get_ylim()
    height = -math.inf
    for x, y, name in sorted(stars, key=lambda star: star[1]):
        height = max(y, height + (top - bottom) / 25)
        is_left = x < (left + right) / 2
        beside = x + (right - left) * (0.03 if is_left else -0.03)
        axis.annotate(name, (x, y), (beside, height), ha="left" if is_left else "right", va="center",
                      arrowprops=dict(arrowstyle="-", color="grey"))


def margins(vectors, labels, C):
    """The distance from each class to the nearest other class. vectors (G, D) of classes labels (G,); a class may have
    several -> (C,), inf for a class that is absent or alone."""
    d = distances(vectors, vectors).masked_fill(labels == labels[:, None], math.inf)
    nearest = np.full(C, math.inf)
    for c in labels.unique().tolist():
        nearest[c] = d[labels == c].min().item()
    return nearest


def plot_margins(clients, net, prototypes, labels, names):
    """Margins (FedTGP Fig. 1) of the clients' class means and of the server's prototypes (G, D), divided by the mean
    distance of training images' features to the nearest prototype of their class, so that runs can be compared.
    net: the global model, or None if every client has its own."""
    C = len(names)
    margins_of_clients = []
    to_prototype = np.ma.masked_all((len(clients), C))  # the distances by which margins are divided
    for k, client in enumerate(clients):
        z, y = extract(client.net if net is None else net, client.train.x), client.train.y
        means = torch.stack([z[y == c].mean(0) for c in y.unique()])
        margins_of_clients.append(margins(means, y.unique(), C))
        for c in set(y.tolist()) & set(labels.tolist()):
            to_prototype[k, c] = distances(z[y == c], prototypes[labels == c]).amin(1).mean().item()
    table = np.ma.masked_invalid(margins_of_clients) / to_prototype

    figure = Figure(figsize=(8, 4.5))
    axis = figure.subplots()
    axis.plot(table.max(0), "^", label=f"class means, the largest of {len(clients)} clients")
    axis.plot(table.mean(0), "o", label="class means, the mean over clients")
    server = np.ma.masked_invalid(margins(prototypes, labels, C)) / to_prototype.mean(0)
    axis.plot(server, "*", markersize=12, label="server's vectors")
    axis.axhline(1, color="grey")
    axis.set_ylim(bottom=0)
    label_ticks(axis.xaxis, names)
    axis.set_xlabel("class")
    ratio = "distance to the nearest other class /\ndistance of features to the server's vector"
    axis.set_ylabel(ratio, fontsize="small")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def print_cluster_quality(net, tests, seed):
    """FedFM's Table V: the NMI of K-means clusters with the classes, and the classes' silhouette. Taken on 2,000 test
    images; the paper does not say which or how many. Without scikit-learn, a warning."""
    with only_a_warning("NMI and silhouette of the features"):
        from sklearn.cluster import KMeans
        from sklearn.metrics import normalized_mutual_info_score, silhouette_score
        x = torch.cat([images.x for images in tests.values()])
        y = torch.cat([images.y for images in tests.values()])
        if len(y) <= net.num_classes:
            raise ValueError(f"{len(y)} test images are too few for {net.num_classes} classes")
        index = torch.from_numpy(generator(seed, "clusters").permutation(len(y))[:2000]).to(y.device)
        z, y = extract(net, x[index]).cpu().numpy(), y[index].cpu().numpy()
        clusters = KMeans(net.num_classes, n_init=10, random_state=seed).fit_predict(z)
        nmi = normalized_mutual_info_score(y, clusters)
        print(f"features of {len(y)} test images: NMI {nmi:.3f}, silhouette {silhouette_score(z, y):.3f}")


# --- comparing runs -------------------------------------------------------------------------------

# runs that differ in these have other models, images or clients
TASK_FLAGS = ["--model", "--small-stem", "--feature-dim", "--image-size", "--subset", "--clients", "--participation",
              "--batch-size", "--validation", *PARTITION_OF]


def compare(folders):
    """For each data set and partition print a table of runs and draw compare-<dataset>-<partition>.png. Runs that
    differ only in the seed share a row, mean ± std."""
    paths = []
    for pattern in folders:  # such as runs/*, if the shell has not expanded it
        paths += sorted(glob.glob(str(pattern))) or [pattern]
    tables = read_runs(dict.fromkeys(map(Path, paths)))
    if not tables:
        fail("no folder of a run with a tested round; try: python common.py runs/*")

    print("best %: the best round's, selected on validation images if there are any, else on test images\n"
          "lead: final % minus the majority class's, which always answers a client's most frequent training class\n"
          "clients' classifiers and prototypes are tested on the clients' own images, a global model on the server's")
    for title, rows in tables.items():
        print_table(title, rows)
        path = Path(paths[0]).parent / f"compare-{title}.png"
        with only_a_warning(path):
            plot_comparison(title, rows).savefig(path)
            print(f"drawn in {path}")


@dataclass
class Row:
    """Runs of the same settings: a row of the table."""
    name: str    # that of its folders without the seed or, if another row has that name, of its first folder
    stem: str    # that of its folders without the seed
    flags: dict  # {"--lr": "0.1", ...}
    logs: dict   # {seed: log}


def read_runs(folders):
    """The logs of run folders -> {data set and partition: [Row]}."""
    tables = {}
    for folder in folders:
        if not folder.exists():
            fail(f"{folder}: no such folder")
        if not folder.is_dir():  # runs/* matches pictures as well
            continue
        try:
            log = read_log(folder / "log.csv")
            rounds = f" ({len(log['round'])} rounds)"
            scores = [best_and_final(log, kind) for kind in predictions(log)]
            settings = json.loads((folder / "args.json").read_text())
            title = f"{settings['dataset']}-{settings['partition']}"
            seed, flags = int(settings["seed"]), as_flags(settings)
        except Exception as error:  # files can be missing, or changed by hand or by a spreadsheet
            print(f"{folder}: left out, no log.csv with args.json, or another program changed them ({error!r})")
            continue
        if not scores:
            print(f"{folder}: left out, no tested round")
            continue
        stem = re.sub(rf"-s{seed}(-\d+)?$", "", str(folder)) + rounds
        rows = tables.setdefault(title, [])
        lack_this_seed = [row for row in rows if row.stem == stem and row.flags == flags and seed not in row.logs]
        if lack_this_seed:
            lack_this_seed[0].logs[seed] = log
        else:
            taken = any(row.name == stem for row in rows)
            rows.append(Row(str(folder) + rounds if taken else stem, stem, flags, {seed: log}))
    return tables


def print_table(title, rows):
    """A table, and below it the flags in which its rows differ."""
    all_flags = dict.fromkeys(itertools.chain(*[row.flags for row in rows]))
    different = [flag for flag in all_flags if len({row.flags.get(flag) for row in rows}) > 1]
    print(f"\n{title}")
    other_task = [flag for flag in different if flag in TASK_FLAGS]
    if other_task:
        print(f"careful: not all rows have the same {', '.join(other_task)}; see below the table")
    print("| run | seeds | accuracy of | best % | final % | lead |\n|---|---|---|---|---|---|")
    for row in rows:
        print_row(row)
    for row in rows:
        if different:
            print(f"{row.name}:", *[f"{flag} {row.flags[flag]}".rstrip() for flag in different if flag in row.flags])


def as_flags(settings):
    """A run's settings -> {"--lr": "0.1", ...} without those that are off or that its partition does not use."""
    ignored = ["--script", "--seed", "--rounds"]  # the folder, the table and the log say them
    ignored += [flag for flag in PARTITION_OF if PARTITION_OF[flag] != settings["partition"]]
    flags = {}
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if flag in ignored or value is None or value is False:
            continue
        if isinstance(value, dict):  # --domain-clients
            value = ",".join(f"{domain}:{n}" for domain, n in value.items())
        flags[flag] = "" if value is True else str(value)
    return flags


def print_row(row):
    """The lines of a row, one for each kind of prediction."""
    seeds = ",".join(str(seed) for seed in sorted(row.logs))
    logs = list(row.logs.values())
    for kind in predictions(*logs):
        best, _, final = zip(*[best_and_final(log, kind) for log in logs])
        lead = ""
        if all("acc_most_frequent" in log for log in logs):
            # the same in every tested round
            lead = mean_std([score - np.nanmax(log["acc_most_frequent"]) for score, log in zip(final, logs)])
        of = "global model" if kind == "test" else kind
        print(f"| {row.name} | {seeds} | {of} | {mean_std(best)} | {mean_std(final)} | {lead} |")


def plot_comparison(title, rows):
    """Test accuracy over rounds, a panel for each kind of prediction. A line is the mean over a row's seeds, its band
    their range."""
    kinds = predictions(*[log for row in rows for log in row.logs.values()])
    figure = Figure(figsize=(6 * len(kinds), 4.5 + 0.12 * len(rows)))
    panels = figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
    lines = {}
    for kind, axis in zip(kinds, panels):
        title_of_panel = "accuracy of the global model" if kind == "test" else f"{kind} accuracy of clients' own models"
        axis.set(title=title_of_panel, xlabel="round (bands: from the worst to the best seed)",
                 ylabel="% of test images")
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        for n, row in enumerate(rows):
            logs = list(row.logs.values())
            if kind not in predictions(*logs):
                continue
            scores = np.stack([log[f"acc_{kind}"] for log in logs])  # (seeds, rounds)
            tested = np.isfinite(scores).all(0)
            rounds = np.flatnonzero(tested) + 1
            scores = scores[:, tested]
            line, = axis.plot(rounds, scores.mean(0), color=f"C{n}", marker=MARKERS[n % len(MARKERS)], markersize=4)
            lines[row.name] = line
            axis.fill_between(rounds, scores.min(0), scores.max(0), color=f"C{n}", alpha=0.15)
    figure.suptitle(title)
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=2, handlelength=4)
    return figure


# --- command line ---------------------------------------------------------------------------------

if hasattr(sys.stdout, "reconfigure"):  # a notebook's lacks it
    sys.stdout.reconfigure(errors="replace")  # print ? for a letter that a terminal lacks, such as λ


def fail(message):
    """Exit with one line on standard error and status 2."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    raise SystemExit(2)


def checked(kind, allows, rule):
    """A type for argparse: convert the text with `kind`. If `allows` refuses the value, the error says
    "<text> is not <rule>"."""
    def read(text):
        value = kind(text)
        if not allows(value):
            raise argparse.ArgumentTypeError(f"{text} is not {rule}")
        return value
    read.__name__ = kind.__name__  # argparse shows it in "invalid float value: 'x'"
    return read


share = checked(float, lambda value: 0 < value <= 1, "in (0, 1]")
share_or_zero = checked(float, lambda value: 0 <= value <= 1, "in [0, 1]")
share_below_one = checked(float, lambda value: 0 <= value < 1, "in [0, 1)")
positive = checked(float, lambda value: 0 < value < 1e38, "finite in float32 and above 0")
not_negative = checked(float, lambda value: 0 <= value < 1e38, "finite in float32 and at least 0")
word = checked(str, lambda text: re.fullmatch(r"\w[\w.-]{,99}", text),
               "a word of letters, digits, '.', '_' and '-', at most 100")


def at_least(low, high=10**9):
    return checked(int, lambda value: low <= value <= high, f"a whole number from {low} to {high}")


def domain_clients(text):
    """A type for argparse: "mnist:1,usps:4" -> {"mnist": 1, "usps": 4}."""
    pairs = [pair.split(":") for pair in text.split(",")]
    numbers = {name: at_least(1)(n) for name, n in pairs}
    if len(numbers) < len(pairs):
        raise argparse.ArgumentTypeError(f"{text} has a domain twice")
    return numbers


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """--help with defaults, if there are any."""

    def _get_help_string(self, action):
        if action.default is None or action.default is False:
            return action.help.replace(" (default: %(default)s)", "")  # Python 3.10 adds it to --augment
        return super()._get_help_string(action)


def make_parser(description):
    """The flags that all scripts share."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False, formatter_class=HelpFormatter)
    parser.error = fail

    add = parser.add_argument_group("data").add_argument
    add("--dataset", type=word, default="glyphs",
        help=f"glyphs (built in), {', '.join(TORCHVISION)}, or a folder of images under --data")
    add("--data", type=os.path.expanduser, default="./data", help="folder of image folders and downloads")
    add("--subset", type=share, default=1.0, help="share of all images to use, drawn at random")
    add("--image-size", type=at_least(16, 1024), help="height and width in pixels; else the data set's own or 32")

    group = parser.add_argument_group("federation")
    add = group.add_mutually_exclusive_group().add_argument
    add("--clients", type=at_least(1), help="K, number of clients; without a default, one for each domain")
    add("--domain-clients", type=domain_clients, metavar="NAME:N,NAME:N", help="clients of each domain")
    add = group.add_argument
    add("--participation", type=share, default=1.0, help="ρ, share of the clients in a round")
    add("--partition", choices=list(PARTITIONS), default="dirichlet", help="how clients divide the images")
    add("--beta", type=positive, default=0.1, help="β of --partition dirichlet; the smaller, the more skewed")
    add("--classes-per-client", type=at_least(1), default=2, help="a client's classes with --partition pathological")
    add("--missing", type=at_least(0), default=1, help="how many classes a client lacks with --partition missing")
    add("--dominant-share", type=share, default=0.46, help="share of dominant classes with --partition dominant")
    add = group.add_mutually_exclusive_group().add_argument
    add("--domain-fraction", type=share, help="a client's share of its domain; if not set, equal shares")
    add("--images-per-class", type=at_least(1), help="a client's images of each class with --partition domain")

    add = parser.add_argument_group("model").add_argument
    add("--model", choices=MODELS, default="cnn4", metavar="MODEL",
        help=f"an architecture or a group of them, dealt in turn: {', '.join(MODELS)}")
    add("--feature-dim", type=at_least(2, 65536), default=512, help="D, number of features, the size of a prototype")
    add("--small-stem", action=argparse.BooleanOptionalAction, default=False, help="ResNets: 3x3 stem, no max-pooling")

    add = parser.add_argument_group("training").add_argument
    add("--rounds", type=at_least(1), default=1000, help="T, number of rounds")
    add("--local-epochs", type=at_least(1), default=1, help="E, a client's epochs in a round")
    add("--batch-size", type=at_least(2), default=10, help="B, images in a minibatch; a partition may depend on it")
    add("--batches", choices=["all", "full"], default="all", help="full: drop the last incomplete batch")
    add("--lr", type=positive, default=0.01, help="η, learning rate of SGD")
    add("--momentum", type=share_below_one, default=0.0, help="momentum of SGD; its buffer starts empty in each round")
    add("--weight-decay", type=not_negative, default=0.0, help="weight decay of SGD")

    group = parser.add_argument_group("run")
    add = group.add_argument
    add("--seed", type=at_least(0, 2**32 - 1), default=0, help="random seed; glyphs are fixed")
    add("--device", default="auto", help="auto (cuda if there is one, else cpu), cpu, cuda, or cuda:1")
    add("--workers", type=at_least(0), default=0, help="clients that train side by side on a CPU; 0: one per core")
    add("--eval-every", type=at_least(1), default=1, help="evaluate every so many rounds")
    add("--checkpoint-every", type=at_least(0), default=10, help="save a checkpoint every so many rounds; 0: never")
    add("--out", type=os.path.expanduser, default="runs", help="folder for the runs")
    add("--name", type=word, help="a word for the run folder's name")
    add("--no-plots", action="store_true", help="draw no pictures")
    add = group.add_mutually_exclusive_group().add_argument
    add("--trials", type=at_least(1), default=1, help="run this many seeds, from --seed on; print mean ± std")
    add("--resume", type=os.path.expanduser, metavar="FOLDER", help="continue this run; --rounds may be larger")
    return parser


def choose_device(name):
    """auto, cpu, cuda or cuda:N -> a device that works. A GPU can be present but too old, full or in use."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.ones(2, device=name).sum().item()
    except Exception as error:  # each kind of device raises its own
        reason = str(error).strip().split("\n")[0]
        fail(f"--device {name}: cannot be used ({reason}); try --device cpu")
    return name


def preset(args, settings):
    """The data set's defaults; what the user types overrides them."""
    if args.dataset in settings:
        return settings[args.dataset]
    if "domains" in settings and has_domains(Path(args.data, args.dataset)):
        return settings["domains"]
    return settings["default"]


def preset_defaults(first, settings):
    """The preset of the data set, minus what a typed flag excludes -> {flag: value}."""
    defaults = dict(preset(first, settings))
    for name in defaults:
        if not hasattr(first, name):
            fail(f"{name} in SETTINGS: no such flag")
    # only one flag of these pairs may be set: if one is typed, the preset of the other goes
    for pair in ("clients", "domain_clients"), ("images_per_class", "domain_fraction"):
        if any(getattr(first, name) for name in pair):
            defaults |= dict.fromkeys(pair)
    return defaults


def resumed_settings(first, script, typed):
    """The settings of the run to resume -> {flag: value}."""
    folder = first.resume
    try:  # weights_only: no code in the file runs
        saved = torch.load(Path(folder, "checkpoint.pt"), map_location="cpu", weights_only=True)
        settings, done, last = saved["settings"], len(saved["rows"]), saved["rows"][-1]
    except Exception:  # a damaged file can raise anything
        fail(f"--resume {folder}: no checkpoint.pt there (--checkpoint-every 0 writes none), or a damaged one")
    if settings["script"] != script:
        fail(f"--resume {folder}: its checkpoint.pt was written by {settings['script']}.py")
    for flag in typed:
        if flag[2:].replace("-", "_") not in [*MACHINE_FLAGS, "rounds", "help"]:
            fail(f"{flag}: not allowed with --resume, which keeps the run's settings")
    was_tested = any(column.startswith("acc_") for column in last)
    least = done if was_tested else done + 1  # a run's last round is tested
    if "--rounds" in typed and first.rounds < least:
        fail(f"--rounds {first.rounds}: {folder} has run {done} rounds already; at least {least}")
    return settings | dict(no_plots=False, trials=1)


def parse(script, description, settings, add_flags, words=None):
    """Command line -> args. What the user types overrides the preset, and the preset overrides the defaults."""
    words = sys.argv[1:] if words is None else words
    parser = make_parser(description.split("\n\n")[0])
    add_flags(parser.add_argument_group("method"))
    typed = [text.split("=")[0] for text in words if text.startswith("--")]

    # Parse twice: the first pass finds which defaults apply, the second uses them and shows --help.
    first = parser.parse_args([text for text in words if text not in ("-h", "--help")])
    if first.resume is not None:
        defaults = resumed_settings(first, script, typed)
    else:
        defaults = preset_defaults(first, settings) | {"script": script}
    parser.set_defaults(**defaults)
    args = parser.parse_args(words)

    for flag, partition in PARTITION_OF.items():
        if flag in typed and args.partition != partition:
            fail(f"{flag}: only for --partition {partition}")
    if args.clients is None and args.partition != "domain":
        fail(f"--partition {args.partition}: also needs --clients")
    architectures = GROUPS.get(args.model, [args.model])
    if "--small-stem" in typed and not any(name.startswith("resnet") for name in architectures):
        fail(f"--small-stem: only for ResNets, not for --model {args.model}")
    if args.resume is None:
        lower = args.dataset.lower()
        if args.dataset != lower and lower in {*TORCHVISION, *PIXELS, *settings}:
            fail(f"--dataset {args.dataset}: write {lower}, also as the folder's name; its settings go by that")
        if "--data" in typed and "--dataset" not in typed:
            fail("--data: glyphs, the default, are drawn, not read; --dataset NAME reads the folder NAME in it")
    args.device = choose_device(args.device)
    return args


def run_script(script, description, main, settings, add_flags, words=None):
    """Call main(args) once for each seed of --trials. Tests pass their command line as `words`.
    settings: {dataset: {flag: value}}, with "default" for data sets that are not named, and "domains" for image
    folders with several domains; add_flags(group): adds the method's own flags."""
    args = parse(script, description, settings, add_flags, words)
    torch.set_num_threads(1)  # one core for the server; clients run side by side instead, see for_each_client
    seeds = range(args.seed, args.seed + args.trials)
    results = {}
    for seed in seeds:
        args.seed = seed
        try:
            results[seed] = main(args)
        except KeyboardInterrupt:
            sys.exit("\nstopped; if the run's folder holds a checkpoint.pt, --resume FOLDER continues from it")
        except (Exception, SystemExit) as error:
            bad_flag = isinstance(error, SystemExit) and error.code == 2  # `fail` has printed a line
            if args.trials == 1 or (bad_flag and not results):
                raise
            if not isinstance(error, SystemExit):
                traceback.print_exc()
            reason = error if isinstance(error, SystemExit) else repr(error)
            print(f"seed {seed} failed: {'see above' if bad_flag else reason}", file=sys.stderr)
    if args.trials > 1 and results:
        finished = ", ".join(map(str, results))
        for name in next(iter(results.values())):
            print(f"{name}: {mean_std([result[name] for result in results.values()])} %, seeds {finished}")
    failed = [str(seed) for seed in seeds if seed not in results]
    if failed:
        sys.exit(f"failed: seeds {', '.join(failed)}")
    print_what_next(args)
    return list(results.values())


if __name__ == "__main__":
    compare(sys.argv[1:])
