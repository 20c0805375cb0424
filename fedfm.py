"""FedFM: Anchor-based Feature Matching for Data Heterogeneity in Federated Learning.
Ye, Ni, Xu, Wang, Chen, Eldar. IEEE Transactions on Signal Processing, 2023.

With heterogeneous data each client learns its own feature space. These spaces do not match, classes overlap in them,
and the average of the clients' models suffers. FedFM gives all clients the same anchors, the mean feature vector of
each class. Each client pulls its features toward the anchor of their class and away from the others.

One round (C classes, C_k of them at client k, D features, |w| floats in the model):
  1. The server sends the global model.                                                |w| floats to each
  2. Each participant sends its class means under this model (Eq. 8) and class counts. C_k · (D + 1) floats
  3. The server averages them, weighted by the counts, and sends the anchors (Eq. 9).  D floats per anchor to each
  4. Each participant trains the model on cross-entropy + λ · contrastive guiding (Eqs. 2 and 10, Section IV-C).
  5. It sends the model, and the server averages the models (Eq. 11).                  |w| floats
The global model is then tested on the server's test images. Rounds 1 to T_s are plain FedAvg.

Settings: 100 rounds with all 10 clients; ResNet18 or ResNet50; E = 10 epochs in batches of 64; learning rate 0.01;
λ = 50 and T_s = 20, which the paper calls generally better; temperature α = 0.1. Each client holds out 20 % of its
images to pick the best round.
With this λ, accuracy on a fifth of CIFAR-10 fell to chance when matching began (see the results).
What we changed
  Matching  scales anchors to length 1 as well, like the authors' code; the paper scales only features.
  Traffic   counts only the means of a client's own classes; in the paper a client sends all C.
What the paper leaves open
  Inputs     CIFAR images are normalised, and CIFAR-100's augmented, as in the authors' code.
  Partition  NIID-2 and NIID-3 have the class shares of the authors' code.
Equations, deviations, published results: .github/papers/fedfm.md. Our results: .github/results/README.md.

    python fedfm.py                                                    built-in glyphs in four domains, about a minute
    python fedfm.py --dataset cifar10                                  Table III, NIID-1 (--partition dominant: NIID-2)
    python fedfm.py --lite --model-every 2                             FedFM-Lite (Section VI): fewer model exchanges
    python fedfm.py --lam 0                                            FedAvg
"""

import argparse
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from common import (Run, accuracy, at_least, average, build_net, class_means, draw_pictures, evaluate_global, extract,
                    fail, for_each_client, generator, load_dataset, make_federation, minibatches, model_size,
                    not_negative, participants, positive, run_script, share_or_zero, summarize)


class Anchors(NamedTuple):
    vectors: torch.Tensor  # (C, D)
    known: torch.Tensor    # (C,) bool: which classes have an anchor


class Upload(NamedTuple):
    model: dict         # the trained model's state_dict
    loss: torch.Tensor  # mean over the client's batches, for the log


def main(args):
    check(args)
    data = load_dataset(args)
    mean, std = NORMALISATION.get(args.dataset, NORMALISATION["other"])
    net = build_net(data, args, mean=mean, std=std)                   # the global model
    clients, tests = make_federation(data, net, args, validation=args.validation)
    C, D = len(data.class_names), args.feature_dim

    modules = [net]
    if args.lite:                                                     # clients keep their models between exchanges
        modules += [client.net for client in clients]
    run = Run(args, modules=modules)                                  # modules: the models to checkpoint
    no_anchors = torch.zeros(C, D, device=args.device), torch.zeros(C, dtype=torch.bool, device=args.device)
    state = run.resume(no_anchors)                                    # with --resume: from the checkpoint
    anchors = Anchors(*state)

    for t in run.rounds():
        chosen = participants(clients, t, args)
        if args.lite:
            anchors, uploads, up, down = lite_round(net, clients, chosen, anchors, t, args)
        else:
            anchors, uploads, up, down = fedfm_round(net, chosen, anchors, t, args)

        scores = evaluate_global(net, tests, t, args)                 # {} in a round that --eval-every skips
        if scores:
            scores.update(validate(net, clients, args))
        run.report(t, scores, [upload.loss for upload in uploads], up, down)
        run.checkpoint(t, tuple(anchors))

    print(cluster_quality(net, tests, args.seed))                     # of the final model, as in Table V
    labels = anchors.known.nonzero().flatten()
    draw_pictures(run, data, clients, prototypes=anchors.vectors[labels], labels=labels, net=net, tests=tests)
    return summarize(run)                                             # picks the best round by validation accuracy


def fedfm_round(net, chosen, anchors, t, args):
    """A round of FedFM (Algorithm 1) -> anchors, uploads, floats up, floats down. `net` becomes the new global model.

    Up to round T_s, and with λ = 0, it is a round of FedAvg."""
    matching = args.lam > 0 and t > args.warmup
    for client in chosen:
        client.net.load_state_dict(net.state_dict())
    up = len(chosen) * model_size(net)
    down = len(chosen) * model_size(net)
    if matching:
        local_means, counts = local_class_means(chosen, args)                              # Eq. 8
        anchors = new_anchors(local_means, counts, anchors, args.aggregate)                # Eq. 9
        up += floats_sent(counts, args)
        down += len(chosen) * anchors.known.sum() * args.feature_dim

    given = anchors if matching else None
    # [client_update(client, given, t, args) for client in chosen], but in parallel
    uploads = for_each_client(client_update, chosen, given, t, args, workers=args.workers)
    net.load_state_dict(average_of(uploads, chosen))                                       # Eq. 11
    return anchors, uploads, up, down


# --- the client -------------------------------------------------------------------------------------

def local_class_means(chosen, args):
    """Eq. 8: each participant computes the class means of its training images under client.net, in eval mode and
    without augmentation -> local_means (m, C, D), counts (m, C)."""
    replies = for_each_client(lambda client: class_means(client.net, client.train), chosen, workers=args.workers)
    means, counts = zip(*replies)
    return torch.stack(means), torch.stack(counts)


def client_update(client, anchors, t, args):
    """Train client.net for E epochs (Eq. 10) -> Upload. It starts from the global model or, between FedFM-Lite's
    model exchanges, from the client's own. anchors: Anchors, or None without matching."""
    if args.prox > 0:
        start = [parameter.detach().clone() for parameter in client.net.parameters()]
    rng = generator(args.seed, "augment", t, client.id)

    client.net.train()
    optimizer = torch.optim.SGD(client.net.parameters(), lr=args.lr, momentum=args.momentum,
                                weight_decay=args.weight_decay, fused=True)
    losses = []
    for x, y in minibatches(client, t, args):
        if args.augment:
            x = augment(x, rng)
        loss = local_loss(client.net, x, y, anchors, args)
        if args.prox > 0:
            loss = loss + args.prox * proximal(client.net, start)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return Upload(client.net.state_dict(), torch.stack(losses).mean())


def local_loss(net, x, y, anchors, args):
    """F_k + λ Q_k of Eqs. 2 and 10 on a batch. x (B, 3, height, width) in [0, 255], y (B,), anchors: Anchors or None
    -> scalar."""
    z = net.features(x)
    cross_entropy = F.cross_entropy(net.classifier(z), y)
    if anchors is None:                                               # a round of FedAvg
        return cross_entropy
    if args.match == "cg":
        matching = contrastive_guiding(z, y, anchors, args.temperature)
    else:
        matching = squared_distance(z, y, anchors)
    return cross_entropy + args.lam * matching


def contrastive_guiding(z, y, anchors, temperature):
    """Contrastive guiding, Section IV-C: −log( exp(cos(z_b, a_{y_b}) / α) / Σ_c exp(cos(z_b, a_c) / α) ), mean over the
    samples whose class has an anchor. Features are scaled to length 1 as in Section VII-A, anchors as in the authors'
    code; a class without an anchor is left out of the sum.

    z (B, D), y (B,), temperature α -> scalar, 0 if no class in the batch has an anchor."""
    cosine = F.normalize(z, dim=1) @ F.normalize(anchors.vectors, dim=1).T                 # (B, C)
    # not -inf: a class without an anchor would have loss inf, and inf · 0 is nan
    logits = (cosine / temperature).masked_fill(~anchors.known, -1e9)
    losses = F.cross_entropy(logits, y, reduction="none")             # (B,)
    has_anchor = anchors.known[y]
    return (losses * has_anchor).sum() / has_anchor.sum().clamp(min=1)


def squared_distance(z, y, anchors):
    """Eq. 3: ‖z_b − a_{y_b}‖², both scaled to length 1, mean over the samples whose class has an anchor.

    z (B, D), y (B,) -> scalar."""
    difference = F.normalize(z, dim=1) - F.normalize(anchors.vectors, dim=1)[y]
    losses = difference.square().sum(1)                               # (B,)
    has_anchor = anchors.known[y]
    return (losses * has_anchor).sum() / has_anchor.sum().clamp(min=1)


def proximal(net, start):
    """FedProx's term (Section VII-D.2): ½ ‖w − w_start‖². start: the parameters before training, [tensor] -> scalar."""
    return 0.5 * sum((w - s).square().sum() for w, s in zip(net.parameters(), start))


# --- the server -------------------------------------------------------------------------------------

def new_anchors(local_means, counts, anchors, aggregate):
    """Eq. 9 over the participants. A class that none of them has keeps its anchor.

    aggregate "uniform": the plain mean of Section VII-D.1. There a participant that lacks a class sends that
    class's old anchor, if there is one.
    local_means (m, C, D), counts (m, C) -> Anchors."""
    if aggregate == "uniform":
        owned = counts > 0                                            # (m, C)
        local_means = torch.where(owned[:, :, None], local_means, anchors.vectors)
        counts = (owned | anchors.known).long()
    averages, uploaded = weighted_mean(local_means, counts)
    vectors = torch.where(uploaded[:, None], averages, anchors.vectors)
    return Anchors(vectors, anchors.known | uploaded)


def weighted_mean(local_means, counts):
    """Eq. 9: a_c = Σ_k n_kc a_kc / Σ_k n_kc over the round's participants.

    local_means a_kc (m, C, D), counts n_kc (m, C) -> (C, D), and which classes were uploaded (C,) bool."""
    total = counts.sum(0)
    mean = (local_means * counts[:, :, None]).sum(0) / total.clamp(min=1)[:, None]
    return mean, total > 0


def average_of(uploads, chosen):
    """Eq. 11: the mean of the participants' models, weighted by their numbers of images."""
    models = [upload.model for upload in uploads]
    num_images = [len(client.train.y) for client in chosen]
    return average(models, num_images)


def floats_sent(counts, args):
    """How many floats the participants send for the anchors. counts (m, C)."""
    if args.aggregate == "uniform":
        return counts.numel() * args.feature_dim                      # C means from each, and no counts
    return (counts > 0).sum() * (args.feature_dim + 1)                # means of its own classes, and their counts


# --- FedFM-Lite -------------------------------------------------------------------------------------

def lite_round(net, clients, chosen, anchors, t, args):
    """A round of FedFM-Lite, one handshake instead of two (Section VI) -> what fedfm_round returns.

    With a = --model-every all clients download the model in rounds 1, a + 1, ... In rounds a, 2a, ... and in the last
    one, the participants upload theirs. In other rounds each client keeps training its own model. Class means are
    computed after training, with that model."""
    models_down = (t - 1) % args.model_every == 0
    models_up = t % args.model_every == 0 or t == args.rounds
    matching = args.lam > 0 and t > args.warmup and t > 1             # round 1 has no anchors
    means_up = args.lam > 0 and t >= args.warmup                      # for the next round's anchors

    up = 0
    down = len(chosen) * anchors.known.sum() * args.feature_dim
    if models_down:
        down += len(clients) * model_size(net)
        for client in clients:
            client.net.load_state_dict(net.state_dict())
    given = anchors if matching else None
    uploads = for_each_client(client_update, chosen, given, t, args, workers=args.workers)
    if models_up:
        up += len(chosen) * model_size(net)
        net.load_state_dict(average_of(uploads, chosen))                                   # Eq. 11
    if means_up:
        local_means, counts = local_class_means(chosen, args)                              # Eq. 8
        up += floats_sent(counts, args)
        anchors = new_anchors(local_means, counts, anchors, args.aggregate)                # Eq. 9
    return anchors, uploads, up, down


# --- not part of the method: checks, validation, augmentation, cluster quality ----------------------------

def check(args):
    """Reject or report incompatible flags."""
    if args.model_every > 1 and not args.lite:
        fail(f"--model-every {args.model_every}: must be 1 without --lite")
    first_match = 1 + max(args.warmup, 1 if args.lite else 0)
    if args.lam > 0 and args.rounds < first_match:
        print(f"matching begins in round {first_match}, so all {args.rounds} rounds are FedAvg; try a smaller --warmup")


def validate(net, clients, args):
    """{"validation": mean of the clients' accuracies in %, each on its held-out images}, or {} with --validation 0."""
    scores = [accuracy(net, client.val, args) for client in clients if len(client.val.y) > 0]
    if not scores:
        return {}
    return {"validation": sum(scores) / len(scores)}


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


def cluster_quality(net, tests, seed):
    """A line on how well the features separate the classes (Table V): the NMI of K-means clusters with the classes, and
    the classes' silhouette. We use 2,000 test images; the paper does not say which or how many. Needs scikit-learn."""
    try:
        from sklearn.cluster import KMeans
        from sklearn.metrics import normalized_mutual_info_score, silhouette_score
    except ImportError:
        return "NMI and silhouette of the features: pip install scikit-learn"
    x = torch.cat([images.x for images in tests.values()])
    y = torch.cat([images.y for images in tests.values()])
    index = torch.from_numpy(generator(seed, "clusters").permutation(len(y))[:2000]).to(y.device)
    z, y = extract(net, x[index]).cpu().numpy(), y[index].cpu().numpy()
    if len(set(y)) < 2:
        return "NMI and silhouette of the features: not defined for a single class"
    clusters = KMeans(net.num_classes, n_init=10, random_state=seed).fit_predict(z)
    nmi = normalized_mutual_info_score(y, clusters)
    return f"features of {len(y)} test images: NMI {nmi:.3f}, silhouette {silhouette_score(z, y):.3f}"


# --- settings ---------------------------------------------------------------------------------------

BASE = dict(                # the paper's Section VII-A, unless a comment says otherwise
    clients=10,
    participation=1.0,
    partition="dirichlet",  # NIID-1
    beta=0.5,               # NIID-1
    dominant_share=0.46,    # NIID-2; not in the paper: from the authors' code
    model="resnet18",
    feature_dim=512,        # Section IV-D.1
    rounds=100,             # T
    local_epochs=10,        # E
    batch_size=64,
    batches="full",         # not in the paper: from the authors' code
    lr=0.01,
    momentum=0.9,
    weight_decay=1e-5,
    validation=0.2,
    lam=50.0,               # λ
    warmup=20,              # T_s
    match="cg",
    temperature=0.1,        # α, Section VII-D
    aggregate="weighted",   # Eq. 9
    model_every=1,          # a; Section VII-C tries 1, 2, 5 and 10
    prox=0.0,               # μ of FedProx, which Section VII-D.2 does not give
)
DOMAINS = dict(             # not from a paper
    BASE,
    clients=None,           # one for each domain
    partition="domain",
    model="resnet10",
    rounds=50,
    batch_size=32,
    warmup=0,
)
SETTINGS = {
    "default": BASE,        # cifar10 among others
    "cinic10": dict(BASE, dominant_share=0.5),                        # from the authors' partition code
    # Table III's 23,705 thousand weights are those of a ResNet50 that begins with a 3x3 convolution (7x7: 23,713), as
    # in the authors' code; the augmentation is from there as well
    "cifar100": dict(BASE, model="resnet50", small_stem=True, feature_dim=2048, augment=True),
    # not from the paper: the folder digits, other folders with domains, glyphs
    "digits": dict(DOMAINS, images_per_class=30),
    "domains": DOMAINS,
    "glyphs": dict(DOMAINS, images_per_class=20, rounds=10, local_epochs=5, checkpoint_every=0),
}
NORMALISATION = {           # mean and standard deviation of the channels; not in the paper
    "other": ((0.5,), (0.5,)),                                        # ours
    # from the authors' code
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


def add_flags(group):
    group.add_argument("--lam", type=not_negative, help="λ in Eq. 10, weight of the matching; 0: FedAvg")
    group.add_argument("--match", choices=["cg", "l2"],
                       help="cg: contrastive guiding; l2: squared distance, Eq. 3")
    group.add_argument("--temperature", type=positive, help="α of contrastive guiding")
    group.add_argument("--warmup", type=at_least(0), help="T_s, rounds of FedAvg before matching begins")
    group.add_argument("--aggregate", choices=["weighted", "uniform"],
                       help="weighted: Eq. 9, by class counts; uniform: the plain mean (Section VII-D.1)")
    group.add_argument("--lite", action="store_true",
                       help="FedFM-Lite: class means travel with the trained model and become the next round's anchors")
    group.add_argument("--model-every", type=at_least(1), help="a of FedFM-Lite: rounds between exchanges of models")
    group.add_argument("--prox", type=not_negative, help="μ, weight of FedProx's term (Section VII-D.2)")
    group.add_argument("--validation", type=share_or_zero,
                       help="share of a client's images held out to pick the best round")
    group.add_argument("--augment", action=argparse.BooleanOptionalAction, default=False,
                       help="random crop, flip and rotation of training images")


if __name__ == "__main__":
    run_script("fedfm", __doc__, main, SETTINGS, add_flags)
