"""FedFM: Anchor-based Feature Matching for Data Heterogeneity in Federated Learning.
Ye, Ni, Xu, Wang, Chen, Eldar. IEEE Transactions on Signal Processing, 2023.

With heterogeneous data each client learns a feature space of its own. FedFM gives all clients the same anchors, the
mean feature vector of each class, and matches every feature to the anchor of its class. This should make the local
feature spaces more consistent before the models are averaged.

Rounds 1 to T_s are FedAvg's: nothing is matched, and no anchors travel. A later round (C classes, C_k of them at client
k; D numbers in a feature vector, the paper's d; |w| in the model):
  1. The server sends the model.                                                       down: |w| numbers
     Each participant sends its class means, computed with this model (Eq. 8), and its class
     counts.                                                                           up: C_k · (D + 1)
  2. The server averages them, weighted by the counts, into the anchors (Eq. 9)
     and sends these.                                                                  down: D per class with an anchor
  3. Each participant trains: cross-entropy + λ · matching of features to anchors (Eqs. 2 and 10). By default the
     matching is contrastive guiding, −log( exp(cos(z, a_y) / α) / Σ_c exp(cos(z, a_c) / α) ) for the features z of an
     image of class y (Section IV-C; it has products instead of cosines, see below).
  4. Each sends its model. The server averages the models by their numbers of images (Eq. 11).    up: |w|
  5. The global model is tested on the server's test images. The reported accuracy is that of the round with the best
     mean accuracy on validation images, 20 % of each client's.
The paper has 10 clients that all take part (Table VI: up to 100), T = 100 rounds, E = 10 epochs, batches of 64,
learning rate 0.01, momentum 0.9, weight decay 1e-5, α = 0.1. It tunes λ and T_s.

FedFM-Lite (--lite) has one exchange in a round instead of two. Clients upload class means after training, with the
model. Their average (Eq. 9) is the *next* round's anchors, so round 1 never matches, even with T_s = 0. With
`--model-every a` models travel in every a-th round only.

What we changed:
  * Features and anchors are both normalised, as in the authors' code. The paper normalises features only.
  * A client sends means of its own classes only; in the paper it sends all C. A class without an anchor is left out
    of the softmax, and its images out of the mean. (If all clients take part, each class has an anchor.)
Left open in the paper:
  * Which λ and T_s each table has. Ours: λ = 50 and T_s = 20, which the paper calls better in general; with domains
    T_s = 0.
  * How classes are dealt to clients, the inputs' normalisation, CIFAR-100's augmentation. Ours mostly follow the
    authors' code.
Outcome: no row of the paper has been run; one would take some 18 hours on two cores. In settings of ours, three seeds:
on digits and glyphs in domains FedFM leads FedAvg by 7 and 28 points; on a fifth of CIFAR-10 its lead with λ = 1 is
undecided, and with λ = 50, without FedAvg's first rounds, the loss was not finite (one seed). More:
.github/papers/fedfm.md.

    python fedfm.py                                                    built-in glyphs in four domains, about a minute
    python fedfm.py --dataset cifar10                                  Table III, NIID-1 (--partition dominant: NIID-2)
    python fedfm.py --dataset cifar10 --partition missing --missing 5  Table IV, five classes missing
    python fedfm.py --lite --model-every 2                             FedFM-Lite, models travel every second round
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


class Upload(NamedTuple):
    model: dict         # the trained weights, a state_dict
    loss: torch.Tensor  # the client's mean loss; only for the log


def main(args):
    if args.model_every > 1 and not args.lite:
        fail(f"--model-every {args.model_every}: must be 1 without --lite")
    data = load_dataset(args)
    mean, std = NORMALISATION.get(args.dataset, NORMALISATION["other"])      # of the inputs, see the settings
    net = build_net(data, args, mean=mean, std=std)                   # the global model
    clients, tests = make_federation(data, net, args, validation=args.validation)
    C, D = len(data.class_names), args.feature_dim

    modules = [net]
    if args.lite:                                                     # clients keep their models between exchanges
        modules += [client.net for client in clients]
    run = Run(args, modules=modules)                                  # modules: the models that a checkpoint keeps
    anchors = torch.zeros(C, D, device=args.device)
    known = torch.zeros(C, dtype=torch.bool, device=args.device)      # (C,) has this class an anchor?
    anchors, known = run.resume((anchors, known))                     # with --resume: those of the checkpoint

    for t in run.rounds():
        chosen = participants(clients, t, args)
        if args.lite:
            anchors, known, uploads, up, down = lite_round(net, clients, chosen, anchors, known, t, args)
        else:
            anchors, known, uploads, up, down = fedfm_round(net, chosen, anchors, known, t, args)

        scores = evaluate_global(net, tests, t, args)                 # {} in a round that --eval-every leaves out
        if scores:
            accuracies = [accuracy(net, client.val) for client in clients if len(client.val.y) > 0]
            if accuracies:                                            # none with --validation 0
                scores["validation"] = sum(accuracies) / len(accuracies)
        run.report(t, scores, [upload.loss for upload in uploads], up, down)
        run.checkpoint(t, (anchors, known))

    print(cluster_quality(net, tests, args.seed))                     # of the final model, as in Table V
    labels = known.nonzero().flatten()
    draw_pictures(run, data, clients, prototypes=anchors[known], labels=labels, net=net, tests=tests)
    return summarize(run)


def fedfm_round(net, chosen, anchors, known, t, args):
    """A round of FedFM (Algorithm 1) -> anchors (C, D), known (C,), uploads, numbers up, numbers down. `net` becomes
    the new global model.

    Up to and including round T_s no class is `known`, so clients do not match: the round is FedAvg's. With λ = 0
    every round is."""
    for client in chosen:
        client.net.load_state_dict(net.state_dict())
    with_anchors = args.lam > 0 and t > args.warmup
    if with_anchors:
        local_means, counts = local_anchors(chosen, args)                                  # Eq. 8
        anchors, known = new_anchors(local_means, counts, anchors, known, args)            # Eq. 9

    # the same as [client_update(client, anchors, known, t, args) for client in chosen], several at a time
    uploads = for_each_client(client_update, chosen, anchors, known, t, args, workers=args.workers)
    net.load_state_dict(average_of(uploads, chosen))                                       # Eq. 11

    up = len(chosen) * model_size(net)
    down = len(chosen) * model_size(net)
    if with_anchors:
        up += numbers_sent(counts, args)
        down += len(chosen) * known.sum() * args.feature_dim
    return anchors, known, uploads, up, down


# --- client -----------------------------------------------------------------------------------------

def local_anchors(chosen, args):
    """Eq. 8: each participant computes the class means of its training images under client.net, in eval mode and
    without augmentation -> local_means (K, C, D), counts (K, C)."""
    replies = for_each_client(local_class_means, chosen, workers=args.workers)
    means, counts = zip(*replies)
    return torch.stack(means), torch.stack(counts)


def local_class_means(client):
    return class_means(client.net, client.train)


def client_update(client, anchors, known, t, args):
    """Train client.net for E epochs (Eq. 10) -> Upload. It starts from the global model; in FedFM-Lite, between two
    exchanges of models, from the client's own."""
    if args.prox > 0:
        start = [weights.detach().clone() for weights in client.net.parameters()]
    if args.augment:
        rng = generator(args.seed, "augment", t, client.id)

    client.net.train()
    optimizer = torch.optim.SGD(client.net.parameters(), lr=args.lr, momentum=args.momentum,
                                weight_decay=args.weight_decay)
    losses = []
    for x, y in minibatches(client, t, args):
        if args.augment:
            x = augment(x, rng)
        loss = local_loss(client.net, x, y, anchors, known, args)
        if args.prox > 0:
            loss = loss + args.prox * proximal(client.net, start)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return Upload(client.net.state_dict(), torch.stack(losses).mean())


def local_loss(net, x, y, anchors, known, args):
    """F_k + λ Q_k of Eqs. 2 and 10 on a batch. x (B, 3, height, width) in [0, 255], y (B,), anchors (C, D), known (C,)
    bool -> scalar."""
    z = net.features(x)
    cross_entropy = F.cross_entropy(net.classifier(z), y)
    if not known.any():                                               # before the first anchors, and with FedAvg
        return cross_entropy
    if args.match == "cg":
        matching = contrastive_guiding(z, y, anchors, known, args.temperature)
    else:
        matching = squared_distance(z, y, anchors, known)
    return cross_entropy + args.lam * matching


def contrastive_guiding(z, y, anchors, known, temperature):
    """Contrastive guiding, Section IV-C: the cosines of a feature with all anchors, divided by α, go through a softmax;
    the loss is −log of its value at the feature's own class. The mean is over samples whose class has an anchor.

    Features are normalised as in Section VII-A, anchors as in the authors' code.
    z (B, D), y (B,), anchors (C, D), known (C,) bool -> scalar, 0 where no class of the batch is known."""
    cosine = F.normalize(z, dim=1) @ F.normalize(anchors, dim=1).T
    logits = (cosine / temperature).masked_fill(~known, -1e9)         # not -inf: inf · 0 would be nan below
    losses = F.cross_entropy(logits, y, reduction="none")             # (B,)
    counted = known[y]
    return (losses * counted).sum() / counted.sum().clamp(min=1)


def squared_distance(z, y, anchors, known):
    """Eq. 3: ‖u − v‖², u a feature and v the anchor of its class, both scaled to length 1. The mean is over samples
    whose class has an anchor. Shapes as above -> scalar."""
    difference = F.normalize(z, dim=1) - F.normalize(anchors, dim=1)[y]
    losses = difference.square().sum(1)                               # (B,)
    counted = known[y]
    return (losses * counted).sum() / counted.sum().clamp(min=1)


def proximal(net, start):
    """FedProx's term (FedFM with FedProx is in Section VII-D.2): ½ ‖w − w_start‖². start: [weights] -> scalar."""
    return 0.5 * sum((w - s).square().sum() for w, s in zip(net.parameters(), start))


# --- server -----------------------------------------------------------------------------------------

def new_anchors(local_means, counts, anchors, known, args):
    """Eq. 9: a_c = Σ_k n_kc a_kc / Σ_k n_kc over the K participants. A class that none of them has keeps its anchor.

    With --aggregate uniform it is the plain mean of Section VII-D.1. A participant that lacks the class counts with the
    old anchor, which the server puts in here; in a real system the client would send it. Before a class has an anchor
    only its owners count.
    local_means (K, C, D), counts (K, C), anchors (C, D), known (C,) bool -> new anchors, known."""
    if args.aggregate == "weighted":
        weights = counts
    else:
        owned = counts > 0                                            # (K, C)
        local_means = torch.where(owned[:, :, None], local_means, anchors)
        weights = (owned | known).long()                              # everybody, once the class has an anchor
    total = weights.sum(0)                                            # (C,)
    averages = (local_means * weights[:, :, None]).sum(0) / total.clamp(min=1)[:, None]
    uploaded = total > 0
    return torch.where(uploaded[:, None], averages, anchors), known | uploaded


def average_of(uploads, chosen):
    """Eq. 11: the mean of the participants' models, by their numbers of images."""
    models = [upload.model for upload in uploads]
    sizes = [len(client.train.y) for client in chosen]
    return average(models, sizes)


def numbers_sent(counts, args):
    """How many numbers the participants send for the anchors. counts (K, C)."""
    if args.aggregate == "uniform":
        return counts.numel() * args.feature_dim                      # C means from each, and no counts
    return (counts > 0).sum() * (args.feature_dim + 1)                # those of a client's classes, and their counts


# --- FedFM-Lite -------------------------------------------------------------------------------------

def lite_round(net, clients, chosen, anchors, known, t, args):
    """A round of FedFM-Lite, with one handshake (Section VI) -> what fedfm_round returns.

    All clients download the model in rounds 1, a + 1, ...; participants upload theirs in rounds a, 2a, ... and the
    last. In between the global model does not change. A download overwrites what a client has trained since its last
    upload; with all clients taking part nothing is lost. Everybody keeps a model, but only participants need anchors.

    Resumed with a larger --rounds, a run differs from an uninterrupted one: its old last round sent no class means."""
    models_down = (t - 1) % args.model_every == 0
    models_up = t % args.model_every == 0 or t == args.rounds
    next_round_matches = args.lam > 0 and args.warmup < t + 1 <= args.rounds

    down = len(chosen) * known.sum() * args.feature_dim
    up = 0
    if models_down:
        down += len(clients) * model_size(net)
        for client in clients:
            client.net.load_state_dict(net.state_dict())
    uploads = for_each_client(client_update, chosen, anchors, known, t, args, workers=args.workers)
    if models_up:
        up += len(chosen) * model_size(net)
        net.load_state_dict(average_of(uploads, chosen))                                   # Eq. 11
    if next_round_matches:
        local_means, counts = local_anchors(chosen, args)                                  # Eq. 8
        up += numbers_sent(counts, args)
        anchors, known = new_anchors(local_means, counts, anchors, known, args)            # Eq. 9
    return anchors, known, uploads, up, down


# --- CIFAR-100's augmentation; how well features separate -------------------------------------------

def augment(x, rng):
    """Random crop with 4 pixels of padding, horizontal flip, and rotation by up to 15 degrees, drawn for each image.

    x (B, channels, height, width) uint8 -> floats in [0, 255]; nearest pixels, black outside."""
    B = len(x)
    angle = rng.uniform(-np.pi / 12, np.pi / 12, B)
    flip = rng.choice([-1.0, 1.0], B)
    dx, dy = rng.integers(-4, 5, (2, B)) * 2 / x.shape[-1]            # affine_grid's coordinates run from −1 to 1
    # theta maps an output pixel to its place in the input: flipped, turned, then moved
    row1 = [flip * np.cos(angle), -np.sin(angle), dx]
    row2 = [flip * np.sin(angle), np.cos(angle), dy]
    theta = np.stack([*row1, *row2], axis=1).reshape(B, 2, 3)
    grid = F.affine_grid(torch.from_numpy(theta).float().to(x.device), x.shape, align_corners=False)
    return F.grid_sample(x.float(), grid, mode="nearest", align_corners=False)


def cluster_quality(net, tests, seed):
    """A line to print: how well classes separate in the features (Table V), by the NMI of K-means clusters with the
    classes and the silhouette of the classes. We take 2,000 test images; the paper gives no number. Needs
    scikit-learn."""
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

BASE = dict(                # from the paper, where no comment says otherwise
    clients=10,
    participation=1.0,
    partition="dirichlet",  # NIID-1
    beta=0.5,
    dominant_share=0.46,    # NIID-2; from the authors' code
    model="resnet18",
    feature_dim=512,
    rounds=100,
    local_epochs=10,
    batch_size=64,
    lr=0.01,
    momentum=0.9,
    weight_decay=1e-5,
    validation=0.2,
    lam=50.0,
    warmup=20,
    match="cg",
    temperature=0.1,
    aggregate="weighted",
    model_every=1,
    prox=0.0,
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
    "cinic10": dict(BASE, dominant_share=0.5),                        # 0.5: as in the authors' code
    # Table III's 23,705 thousand weights are those of a ResNet50 that begins with 3x3, as in the authors' code; the
    # augmentation is from there, too
    "cifar100": dict(BASE, model="resnet50", small_stem=True, feature_dim=2048, augment=True),
    # not from the paper: the folder digits, other folders with domains, glyphs
    "digits": dict(DOMAINS, images_per_class=30),
    "domains": DOMAINS,
    "glyphs": dict(DOMAINS, images_per_class=20, rounds=10, local_epochs=5, checkpoint_every=0),
}
NORMALISATION = {           # mean and standard deviation of the channels; the paper has none
    "other": ((0.5,), (0.5,)),                                        # ours, for CINIC-10, too
    # from the authors' code
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


def add_flags(group):
    group.add_argument("--lam", type=not_negative, help="λ in Eq. 10, weight of the matching; 0: FedAvg")
    group.add_argument("--match", choices=["cg", "l2"],
                       help="cg: contrastive guiding; l2: squared distance, Eq. 3 (the authors' code: --lam 0.0977)")
    group.add_argument("--temperature", type=positive, help="α of contrastive guiding")
    group.add_argument("--warmup", type=at_least(0), help="T_s, rounds of FedAvg before matching begins")
    group.add_argument("--aggregate", choices=["weighted", "uniform"],
                       help="weighted: Eq. 9, by class counts; uniform: the plain mean")
    group.add_argument("--lite", action="store_true",
                       help="FedFM-Lite: class means travel with the trained model and become the next round's anchors")
    group.add_argument("--model-every", type=at_least(1), help="a of FedFM-Lite: models travel every a rounds")
    group.add_argument("--prox", type=not_negative, help="μ, weight of FedProx's term")
    group.add_argument("--validation", type=share_or_zero,
                       help="share of a client's images held out to pick the best round")
    group.add_argument("--augment", action=argparse.BooleanOptionalAction, default=False,
                       help="random crop, flip and rotation of training images")


if __name__ == "__main__":
    run_script("fedfm", __doc__, main, SETTINGS, add_flags)
