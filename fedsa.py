"""FedSA: A Unified Representation Learning via Semantic Anchors for Prototype-based Federated Learning.
Zhou, Qu, You, Zhou, Tang, Zheng, Cai, Wu. AAAI 2025.

The paper argues that prototypes which are averaged from biased clients are biased themselves, and bias the next round
further. So each class has a *semantic anchor*: a random vector that has passed through an embedding layer, and that
hardly follows the clients' means. Clients pull each feature vector to the anchor of its class and push it from the
others, with a margin. They train their classifier on the anchors, too.

One round (K participants, C classes, C_i of them at client i, feature vectors of D numbers):
  1. The server sends the anchors to each participant.                                 down: C · D numbers
  2. Each participant computes a margin d*: the average distance (Eq. 6) among its class means before training, or that
     among the anchors, whichever is larger. Then it trains on the sum (Eq. 9) of cross-entropy,
       λ1 (--lam-r)    · distance of features to the anchor of their class (Eq. 5),
       λ2 (--lam-mcl)  · contrastive loss with margin d* over the distances to all anchors (Eq. 7),
       λ3 (--lam-cc)   · cross-entropy of its classifier on the anchors (Eq. 8).
  3. Each sends the class means of its feature vectors (Eq. 2) and its class counts.   up: C_i · (D + 1)
  4. The server averages them, weighted by the counts (Eq. 3), and moves the anchors towards these averages (Eq. 10).
  5. Every client, participant or not, tests its model on a quarter of its images, on which it never trains: by its
     classifier, and by the nearest new anchor.
The paper has λ1 = 0.1, λ2 = 0.01 for one architecture and 1 for several, λ3 = 1, α = 0.9999, E = 1 epoch in a round,
batches of B = 10, learning rate 0.01, T = 1000 rounds, and 20 clients, of which all take part, or 100, of which 10 do.

What we changed:
  * Eqs. 5 and 7 have class means. We take each sample, so the scatter inside a class is penalised, too, and frequent
    classes weigh more. Eq. 5 is a sum over the client's C_i classes, ours a mean: the same λ1 pulls C_i times weaker.
  * Eq. 3 has a further factor 1/|N_c| and averages over all clients that have a class. We leave out the factor, and
    average over the participants. With α = 0.9999 an anchor keeps 90 % of itself in 1000 rounds either way.
  * The classifier has a bias; in Eq. 8 it has none.
Left open in the paper:
  * How the embedding layer looks, and how it is trained: it is called trainable, but the paper does not say by which
    loss. Ours is linear and stays random.
  * Whether clients send class means from before or after training (ours: after). Whether the tables report the
    classifier or the nearest anchor, and the last round or the best.
Outcome in Table 1, CIFAR-10 cross-device, best of 50 tested rounds: FedSA is behind FedProto by 0.6 points by
classifier (95 % interval of three seeds: 0.0 to 1.2); the paper is 1.3 ahead. With three settings of the authors' code,
--distance mse --lam-r 10 --projection mlp, the lead is 0.1 (−0.3 to 0.4) if each method uses its better prediction.
More: .github/papers/fedsa.md.

    python fedsa.py                                                          built-in glyphs, under a minute
    python fedsa.py --dataset cifar10 --clients 100 --participation 0.1      Table 1, cross-device, a small CNN
    python fedsa.py --dataset cifar100 --clients 100 --participation 0.1 --model htfe8       Table 2, eight models
    python fedsa.py --projection none --lam-mcl 0 --lam-cc 0                 an ablation of Table 4, on glyphs
"""

from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from common import (GROUPS, Run, class_means, distances, draw_pictures, evaluate_personal, for_each_client,
                    load_dataset, make_clients, minibatches, not_negative, participants, run_script, seeded,
                    share_or_zero, summarize)


class Upload(NamedTuple):
    prototypes: torch.Tensor  # (C, D), zero for a class that the client lacks
    counts: torch.Tensor      # (C,) how many images of each class it has
    loss: torch.Tensor        # mean over its batches; only for the log


def main(args):
    if args.lam_mcl is None:                                          # not given: the paper's λ2, by architectures
        args.lam_mcl = 1.0 if args.model in GROUPS else 0.01          # GROUPS: names of several architectures, as htfe8
    data = load_dataset(args)
    clients = make_clients(data, args)
    C, D = len(data.class_names), args.feature_dim

    run = Run(args, modules=[client.net for client in clients])       # modules: the models that a checkpoint keeps
    with seeded(args.seed, "anchors"):
        anchors = make_anchors(C, D, args.projection).to(args.device)
    anchors = run.resume(anchors)                                     # with --resume: those of the checkpoint

    for t in run.rounds():
        chosen = participants(clients, t, args)
        # the same as [client_update(client, anchors, t, args) for client in chosen], several at a time
        uploads = for_each_client(client_update, chosen, anchors, t, args, workers=args.workers)

        local_prototypes = torch.stack([upload.prototypes for upload in uploads])          # (K, C, D)
        counts = torch.stack([upload.counts for upload in uploads])                        # (K, C)
        global_prototypes, uploaded = weighted_mean(local_prototypes, counts)              # Eq. 3
        anchors = ema(anchors, global_prototypes, uploaded, args.alpha)                    # Eq. 10

        scores = evaluate_personal(clients, anchors, t, args, name="anchor")
        up = (counts > 0).sum() * (D + 1)                             # Σ_i C_i · (D + 1)
        down = len(chosen) * C * D
        run.report(t, scores, [upload.loss for upload in uploads], up, down)
        run.checkpoint(t, anchors)

    draw_pictures(run, data, clients, prototypes=anchors)
    return summarize(run)


# --- anchors ---------------------------------------------------------------------------------------

def make_anchors(C, D, projection="linear"):
    """Semantic anchors Ā (C, D): A ~ N(0, I), projected by an embedding layer.

    The paper says that A is "randomly initialized" and the layer "trainable", but gives no distribution, no form of the
    layer and no loss. Ours: N(0, I), and one linear layer with PyTorch's default first weights, used once and never
    trained. Eq. 10 then moves Ā itself.
    projection "linear"  one linear layer
               "mlp"     linear, BatchNorm, ReLU, twice, as in the authors' code
               "none"    A itself (an ablation of Table 4)"""
    anchors = torch.randn(C, D)
    if projection == "linear":
        anchors = nn.Linear(D, D)(anchors)
    elif projection == "mlp":
        mlp = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.ReLU(),
                            nn.Linear(D, D), nn.BatchNorm1d(D), nn.ReLU())
        anchors = mlp(anchors)
    return anchors.detach()


# --- client -----------------------------------------------------------------------------------------

def client_update(client, anchors, t, args):
    """Train the client's own model for E epochs (Eq. 9) -> Upload.

    d* is the larger of two margins: that of the anchors and that of the client's class means. The paper has no formula
    for the anchors'; we take Eq. 6."""
    old_prototypes, counts = class_means(client.net, client.train)                         # Eq. 2, only for the margin
    local_margin = average_margin(old_prototypes[counts > 0], args.margin_rule)            # Eq. 6
    global_margin = average_margin(anchors, args.margin_rule)
    margin = torch.maximum(global_margin, local_margin)                                    # d*

    client.net.train()
    optimizer = torch.optim.SGD(client.net.parameters(), lr=args.lr, momentum=args.momentum,
                                weight_decay=args.weight_decay)
    losses = []
    for x, y in minibatches(client, t, args):
        loss = local_loss(client.net, x, y, anchors, margin, args)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    prototypes, counts = class_means(client.net, client.train)                             # Eq. 2, after training
    return Upload(prototypes, counts, torch.stack(losses).mean())


def local_loss(net, x, y, anchors, margin, args):
    """Eq. 9 on a batch. x (B, 3, height, width) uint8, y (B,), anchors (C, D), margin a scalar -> scalar."""
    z = net.features(x)
    l_s = F.cross_entropy(net.classifier(z), y)
    l_r = regularization(z, y, anchors, args.distance)
    l_mcl = margin_contrastive(z, y, anchors, margin)
    l_cc = classifier_calibration(net.classifier, anchors)
    return l_s + args.lam_r * l_r + args.lam_mcl * l_mcl + args.lam_cc * l_cc


def regularization(z, y, anchors, distance="euclidean"):
    """L_R, Eq. 5: the mean of d(z_b, Ā^{y_b}) over the samples of a batch; with "mse" of the squared differences, over
    their D numbers, too. In the paper it is a sum over the C_i class means of a client.
    z (B, D), y (B,), anchors (C, D) -> scalar."""
    difference = z - anchors[y]
    if distance == "euclidean":
        return difference.norm(dim=1).mean()
    return difference.square().mean()


def average_margin(points, margin_rule="average"):
    """Eq. 6: d_i = Σ_a Σ_{b≠a} d(P^a, P^b) / (N − 1)² over N points: a client's C_i class means, or the C anchors.

    It is N/(N − 1) times the mean distance, so for two points twice their distance. For one point it is 0/0; we return
    0. margin_rule "nearest": the mean distance to the nearest other point, as in the authors' code.
    points (N, D) -> scalar."""
    N = len(points)
    if N < 2:
        return points.new_zeros(())
    d = distances(points, points)                                     # (N, N), 0 on the diagonal
    if margin_rule == "nearest":
        d.fill_diagonal_(torch.inf)                                   # no class is its own neighbour
        nearest = d.amin(1)
        return nearest.mean()
    return d.sum() / (N - 1) ** 2                                     # the diagonal adds 0


def margin_contrastive(z, y, anchors, margin):
    """L_MCL, Eq. 7: a cross-entropy. The logit of a class c is −d(z_b, Ā^c); that of the sample's own class is lower by
    the margin d*. The mean is over the batch; the paper has class means instead of samples.
    z (B, D), y (B,), anchors (C, D), margin d* a scalar -> scalar."""
    d = distances(z, anchors)                                         # (B, C)
    own_class = F.one_hot(y, len(anchors))
    logits = -(d + margin * own_class)
    return F.cross_entropy(logits, y)


def classifier_calibration(classifier, anchors):
    """L_CC, Eq. 8: cross-entropy of the classifier on the anchors (C, D), mean over classes -> scalar. The paper's
    classifier has no bias, ours has one."""
    classes = torch.arange(len(anchors), device=anchors.device)
    return F.cross_entropy(classifier(anchors), classes)


# --- server -----------------------------------------------------------------------------------------

def weighted_mean(local_prototypes, counts):
    """Eq. 3 without its factor 1/|N_c|: P̄^c = Σ_i n_ic P_i^c / Σ_i n_ic over the round's K participants.

    local_prototypes (K, C, D), counts (K, C) -> P̄ (C, D), and which classes were uploaded (C,) bool."""
    total = counts.sum(0)
    mean = (local_prototypes * counts[:, :, None]).sum(0) / total.clamp(min=1)[:, None]
    return mean, total > 0


def ema(anchors, global_prototypes, uploaded, alpha):
    """Eq. 10: Ā ← α Ā + (1 − α) P̄. A class that no participant uploaded keeps its anchor.

    anchors, global_prototypes (C, D), uploaded (C,) bool -> anchors (C, D)."""
    moved = alpha * anchors + (1 - alpha) * global_prototypes
    return torch.where(uploaded[:, None], moved, anchors)


# --- settings ---------------------------------------------------------------------------------------

BASE = dict(                # the paper's setting, where no comment says otherwise
    clients=20,
    participation=1.0,
    partition="dirichlet",  # as in PFLlib: a client that has 1/clients of all images gets no images of later classes
    beta=0.1,
    model="cnn4",
    feature_dim=512,
    rounds=1000,
    local_epochs=1,
    batch_size=10,
    batches="full",         # not in the paper: drops a last, smaller batch, as the authors' code does
    lr=0.01,
    momentum=0.0,           # the paper names no optimiser: plain SGD without weight decay
    weight_decay=0.0,
    lam_r=0.1,              # λ1
    lam_mcl=None,           # λ2: 0.01 for one architecture, 1 for a group of them; main sets it
    lam_cc=1.0,             # λ3
    alpha=0.9999,
    distance="euclidean",
    margin_rule="average",
    projection="mlp",       # the paper does not describe the layer; this is its authors'
)
GLYPHS = dict(              # drawn digits, not from the paper: under a minute on two cores
    BASE,
    model="htcnn8",
    image_size=24,
    subset=0.3,
    rounds=10,
    local_epochs=3,
    batches="all",
    momentum=0.9,
    checkpoint_every=0,
)
SETTINGS = {
    "glyphs": GLYPHS,
    "default": BASE,
}


def add_flags(group):
    group.add_argument("--lam-r", type=not_negative,
                       help="λ1 in Eq. 9, weight of the distance to the anchor (Eq. 5); the authors' code: 10")
    group.add_argument("--lam-mcl", type=not_negative,
                       help="λ2 in Eq. 9, weight of the contrast (Eq. 7); None: 0.01, for a group of models 1")
    group.add_argument("--lam-cc", type=not_negative,
                       help="λ3 in Eq. 9, weight of the classifier's loss on the anchors (Eq. 8)")
    group.add_argument("--alpha", type=share_or_zero, help="α in Eq. 10, the share of an anchor that stays in a round")
    group.add_argument("--distance", choices=["euclidean", "mse"],
                       help="d in Eq. 5; the authors' code: mse, the mean squared error")
    group.add_argument("--margin-rule", choices=["average", "nearest"],
                       help="both margins of d*: Eq. 6, or the mean distance to the nearest other class, as in the "
                            "authors' code")
    group.add_argument("--projection", choices=["linear", "mlp", "none"],
                       help="embedding layer of the anchors; the authors' code: mlp; none: without it (an ablation)")


if __name__ == "__main__":
    run_script("fedsa", __doc__, main, SETTINGS, add_flags)
