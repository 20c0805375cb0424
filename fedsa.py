"""FedSA: A Unified Representation Learning via Semantic Anchors for Prototype-based Federated Learning.
Zhou, Qu, You, Zhou, Tang, Zheng, Cai, Wu. AAAI 2025.

Every client keeps its own model; clients share class means instead of weights. The paper argues that skewed data and
different architectures bias these means, and that their averages then lie close together. So FedSA's clients pull their
features toward semantic anchors: one random vector per class, put through an embedding layer. The averages only nudge
the anchors. Clients train their classifiers on the anchors as well.

One round (C classes, C_i of them at client i; D features):
  1. The server sends its anchors.                                                     C · D floats to each
  2. Each participant computes a margin d*: the mean distance between the anchors or, if larger, between its class
     means (Eq. 6). Then it trains on cross-entropy
     + λ1 · the distance from an image's features to its class's anchor, mean over the batch (L_R, Eq. 5)
     + λ2 · a contrastive loss: that anchor should be the nearest, by at least d* (L_MCL, Eq. 7)
     + λ3 · the classifier's cross-entropy on the anchors (L_CC, Eq. 8).
  3. It sends its new class means (Eq. 2) and class counts.                            C_i · (D + 1) floats
  4. The server averages the means, weighted by the counts (Eq. 3), and moves its anchors slightly toward them (Eq. 10).
In tested rounds (--eval-every) every client classifies its held-out 25 % by nearest anchor and by its classifier.

On glyphs (digits that the program draws): 20 clients with eight small architectures (so λ2 = 1), 30 % of the images,
10 rounds, 3 epochs, momentum 0.9. In ten rounds the anchors hardly move: the first ones keep a weight of α^10 = 0.999.
Our main changes
  Embedding  Ours is applied once, untrained; the paper calls it trainable but does not say how it is trained.
  Eqs. 5, 7  We compare the anchors with each image's features, not with class means. Eq. 5 is a sum over classes in
             the paper and a mean over images here, so with the same λ1 our pull is weaker. --distance class-means sums
             over a batch's class means: far better on MNIST, MNIST-M and USPS, no better on CIFAR-10.
  Eq. 3      We average over the participants that have the class, not over all clients that have it, and leave out the
             factor 1/|𝒩_c|, because the weights already sum to 1.
Main gaps in the paper
  Initial weights  Not given; clients with the same extractor start with the same weights.
  Prediction       By nearest anchor or by classifier? We report both.
All deviations, equations, published results: .github/papers/fedsa.md, fedproto.md. Ours: .github/results/README.md.

    python fedsa.py                                                                      built-in glyphs, about a minute
    python fedsa.py --dataset cifar10 --clients 100 --participation 0.1                  Table 1, cross-device
    python fedsa.py --dataset cifar100 --clients 100 --participation 0.1 --model htfe8   Table 2, eight architectures
    python fedsa.py --lam-mcl 0 --lam-cc 0 --projection none                             Table 4's first row, on glyphs
"""

from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from common import (GROUPS, Run, class_means, distances, draw_pictures, evaluate_personal, for_each_client,
                    load_dataset, make_clients, minibatches, not_negative, participants, run_script, seeded,
                    share_or_zero, summarize)

# --- settings ---------------------------------------------------------------------------------------

BASE = dict(                # the paper's "Implementation details", unless a comment says otherwise
    clients=20,             # K (the paper writes m), cross-silo; 100 in the cross-device setting, the paper's main one
    participation=1.0,      # ρ, cross-silo; cross-device: 0.1
    partition="dirichlet",  # paragraph "Statistical heterogeneity"
    beta=0.1,               # β, same paragraph
    model="cnn4",           # same paragraph
    feature_dim=512,        # D; the paper gives 512 for several architectures only
    rounds=1000,            # T
    local_epochs=1,         # E
    batch_size=10,          # B
    batches="full",         # from the authors' code (github.com/lokinko/FedSA): drop the last incomplete batch
    lr=0.01,                # η; the paper writes λ
    momentum=0.0,           # the paper names no optimiser: plain SGD
    weight_decay=0.0,       # not in the paper
    lam_r=0.1,              # λ1, Eq. 9
    lam_mcl=None,           # λ2, Eq. 9; main sets it: 0.01 for one architecture, 1 for several
    lam_cc=1.0,             # λ3, Eq. 9
    alpha=0.9999,           # α, Eq. 10
    distance="euclidean",   # d in Eq. 5, text below it; --distance does not change Eqs. 6 and 7
    projection="mlp",       # layers of the embedding; not in the paper: from the authors' code
)
SETTINGS = {  # by --dataset
    "default": BASE,                                                  # every data set not named below
    # our choice; a short run needs no checkpoint
    "glyphs": dict(BASE, model="htcnn8", image_size=24, subset=0.3, rounds=10, local_epochs=3, batches="all",
                   momentum=0.9, checkpoint_every=0),
}


# --- the rounds -------------------------------------------------------------------------------------

class Upload(NamedTuple):
    prototypes: torch.Tensor  # (C, D), zero where the client lacks the class
    counts: torch.Tensor      # (C,) its number of images of each class
    loss: torch.Tensor        # mean over the client's batches; not sent, only logged


def main(args):
    data = load_dataset(args)
    clients = make_clients(data, args)
    C, D = len(data.class_names), args.feature_dim
    if args.lam_mcl is None:
        args.lam_mcl = 1.0 if args.model in GROUPS else 0.01          # λ2; GROUPS: names for several architectures

    with seeded(args.seed, "anchors"):
        anchors = make_anchors(C, D, args.projection).to(args.device)

    run = Run(args, modules=[client.net for client in clients])       # modules: the models to checkpoint
    anchors = run.resume(anchors)                                     # with --resume: from the checkpoint

    for t in run.rounds():
        chosen = participants(clients, t, args)                       # m participants
        # like [client_update(client, anchors, t, args) for client in chosen], in parallel on a CPU
        uploads = for_each_client(client_update, chosen, anchors, t, args)

        client_prototypes = torch.stack([upload.prototypes for upload in uploads])         # (m, C, D)
        counts = torch.stack([upload.counts for upload in uploads])                        # (m, C)
        averages, uploaded = weighted_mean(client_prototypes, counts)                      # Eq. 3
        anchors = ema(anchors, averages, uploaded, args.alpha)                             # Eq. 10

        scores = evaluate_personal(clients, anchors, t, args, name="anchor")
        up = (counts > 0).sum() * (D + 1)                             # Σ_i C_i · (D + 1)
        down = len(chosen) * C * D
        run.report(t, scores, [upload.loss for upload in uploads], up, down)
        run.checkpoint(t, anchors)

    results = summarize(run)
    draw_pictures(run, data, clients, prototypes=anchors)
    return results


# --- the client -------------------------------------------------------------------------------------

def client_update(client, anchors, t, args):
    """Compute d*, train the client's own model for E epochs (Eq. 9), then compute its class means (Eq. 2) over all its
    training images, in eval mode -> Upload.

    d* is the larger of the anchors' margin and that of the client's class means before training. The paper gives no
    formula for the anchors' margin; we use Eq. 6 for both."""
    means_before, counts = class_means(client.net, client.train)                           # Eq. 2, before training
    local_margin = average_margin(means_before[counts > 0])                                # Eq. 6
    global_margin = average_margin(anchors)
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

    client_prototypes, _ = class_means(client.net, client.train)                           # Eq. 2, after training
    return Upload(client_prototypes, counts, torch.stack(losses).mean())


def local_loss(net, x, y, anchors, margin, args):
    """Eq. 9 on a batch. L_R and L_MCL train the feature extractor alone, L_CC the classifier alone.

    x (B, 3, height, width) uint8, y (B,), anchors (C, D), margin d* a scalar -> scalar."""
    z = net.features(x)
    cross_entropy = F.cross_entropy(net.classifier(z), y)
    l_r = regularization(z, y, anchors, args.distance)
    l_mcl = margin_contrastive(z, y, anchors, margin)
    l_cc = classifier_calibration(net.classifier, anchors)
    return cross_entropy + args.lam_r * l_r + args.lam_mcl * l_mcl + args.lam_cc * l_cc


def regularization(z, y, anchors, kind):
    """L_R, Eq. 5: how far the features are from the anchors of their classes. The paper sums the Euclidean distances
    of the client's class means; a gradient step sees only a batch.

    kind "euclidean"    the distance of each image's features, averaged over the batch
         "mse"          the squared distance divided by D, averaged over the batch
         "class-means"  the distance of the batch's mean of a class, summed over the classes in the batch

    z (B, D), y (B,), anchors (C, D) -> scalar."""
    if kind == "class-means":
        is_class = F.one_hot(y, len(anchors)).to(z.dtype)             # (B, C)
        counts = is_class.sum(0)                                      # (C,)
        means = is_class.T @ z / counts.clamp(min=1)[:, None]         # (C, D)
        return ((means - anchors).norm(dim=1) * (counts > 0)).sum()
    difference = z - anchors[y]
    if kind == "euclidean":
        return difference.norm(dim=1).mean()
    return difference.square().mean()


def average_margin(points):
    """Eq. 6, the margin d_i of N points, which are a client's class means or the anchors: the sum of all Euclidean
    distances, divided by (N − 1)² as in the paper, not by N (N − 1).

    points (N, D) -> scalar; 0 for one point, where Eq. 6 is 0/0."""
    N = len(points)
    if N == 1:
        return points.new_zeros(())
    return distances(points, points).sum() / (N - 1) ** 2             # the diagonal adds 0


def margin_contrastive(z, y, anchors, margin):
    """L_MCL, Eq. 7, on each image's features instead of class means, averaged over the batch. d is the Euclidean
    distance.

    z (B, D), y (B,), anchors (C, D), margin d* a scalar -> scalar."""
    d = distances(z, anchors)                                         # (B, C)
    is_own_class = F.one_hot(y, len(anchors))
    logits = -(d + margin * is_own_class)
    return F.cross_entropy(logits, y)


def classifier_calibration(classifier, anchors):
    """L_CC, Eq. 8: cross-entropy of the classifier on the anchors, mean over classes. Our classifier has a bias, as in
    the authors' code; the paper's has none. anchors (C, D) -> scalar."""
    labels = torch.arange(len(anchors), device=anchors.device)
    return F.cross_entropy(classifier(anchors), labels)


# --- the server -------------------------------------------------------------------------------------

def make_anchors(C, D, projection):
    """Semantic anchors Ā (C, D): an embedding of A ~ N(0, I). A and the embedding's weights are drawn once and never
    trained. The paper specifies neither distribution nor layer.

    projection "mlp"     two blocks of Linear, BatchNorm (over the C anchors) and ReLU, as in the authors' code
               "linear"  one Linear layer, our choice
               "none"    A itself (Table 4's first row, with λ2 = λ3 = 0)"""
    anchors = torch.randn(C, D)
    if projection == "linear":
        anchors = nn.Linear(D, D)(anchors)
    elif projection == "mlp":
        mlp = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.ReLU(),
                            nn.Linear(D, D), nn.BatchNorm1d(D), nn.ReLU())
        anchors = mlp(anchors)
    return anchors.detach()


def weighted_mean(client_prototypes, counts):
    """Eq. 3 over the participants, without 1/|𝒩_c| (𝒩_c: the clients with class c), as the weights already sum to 1.

    client_prototypes P_i^c (m, C, D), counts |𝒟_i,c| (m, C) -> P̄ (C, D), and which classes were uploaded (C,) bool."""
    total = counts.sum(0)
    mean = (client_prototypes * counts[:, :, None]).sum(0) / total.clamp(min=1)[:, None]
    return mean, total > 0


def ema(anchors, averages, uploaded, alpha):
    """Eq. 10: exponential moving average of the anchors Ā and the averages P̄. A class that nobody uploaded keeps its
    anchor.

    anchors, averages (C, D), uploaded (C,) bool, alpha α -> anchors (C, D)."""
    moved = alpha * anchors + (1 - alpha) * averages
    return torch.where(uploaded[:, None], moved, anchors)


# --- flags ------------------------------------------------------------------------------------------

def add_flags(group):
    group.add_argument("--lam-r", type=not_negative,
                       help="λ1 in Eq. 9, weight of the distance to the anchor")
    group.add_argument("--lam-mcl", type=not_negative,
                       help="λ2 in Eq. 9, weight of the contrastive loss; default: 0.01 (1 for several architectures)")
    group.add_argument("--lam-cc", type=not_negative,
                       help="λ3 in Eq. 9, weight of the classifier's loss on the anchors")
    group.add_argument("--alpha", type=share_or_zero, help="α in Eq. 10, the weight of the old anchor")
    group.add_argument("--distance", choices=["euclidean", "mse", "class-means"],
                       help="L_R, Eq. 5. euclidean: the paper's distance, averaged over images; mse: mean squared "
                            "error, as in the authors' code; class-means: the paper's distance of a batch's class "
                            "means, summed over classes as in the paper")
    group.add_argument("--projection", choices=["mlp", "linear", "none"],
                       help="embedding layer of the anchors. mlp: the authors' code; linear: one layer; "
                            "none: Table 4's first row")


if __name__ == "__main__":
    run_script("fedsa", __doc__, main, SETTINGS, add_flags)
