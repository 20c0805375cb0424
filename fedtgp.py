"""FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for Data and Model
Heterogeneity in Federated Learning. Zhang, Liu, Hua, Cao. AAAI 2024.

Every client keeps its own model, of any architecture with D features, and sends its prototypes: the mean feature vector
of each of its classes. FedProto averages these, weighted by class counts. The paper observes that the averages lie
closer together than the prototypes of the best-separated clients. FedTGP's server trains global prototypes instead:
each client prototype should be nearer to the global prototype of its class than to any other, by at least a margin δ.

One round (C classes, C_i of them at client i; D features):
  1. The server sends the global prototypes; in round 1 they are untrained.            C · D floats to each
  2. Each participant trains on cross-entropy + λ · the mean distance from an image's features to the global prototype
     of its class (Eq. 11).
  3. It sends its client prototypes: its class means (Eq. 2), but no class counts.     C_i · D floats
  4. The server averages each class's client prototypes, unweighted, into a class centre. It sets δ to the largest
     distance between two centres, capped at τ (Eq. 9). Then it trains, for S epochs, one vector per class and a network
     F that maps these vectors to the global prototypes. The loss (Eq. 10) is each client prototype's cross-entropy. Its
     logits are the negative distances to the global prototypes; the distance to its own class is increased by δ first.
     Vectors and F carry over to the next round.
In tested rounds (--eval-every) every client then classifies its held-out 25 % by nearest global prototype, as in the
paper, and by its classifier.

On glyphs (digits that the program draws): 20 clients with eight small architectures, 30 % of the images, 10 rounds,
3 epochs, momentum 0.9 at the clients.
Our main changes
  Eq. 11     Distances are per image, not per class mean. This also penalises scatter within a class, and classes
             with more images count more.
  Eq. 10     The paper sums the server's loss over client prototypes. We take the mean over a batch of them.
             Both changes are also in the authors' code.
  Models     Except on glyphs and Fashion-MNIST all clients have the same small CNN, as in FedSA's paper (2025).
             FedTGP's main tables have eight architectures: --model htfe8.
Main gaps in the paper
  Margin           We use Eq. 9, the largest distance between two class centres. Fig. 1 measures to the nearest other
                   class; so does the authors' code, and takes the largest of these (--margin-rule nearest).
  Initial weights  Not given; clients with the same extractor start with the same weights.
  Server           Optimiser, batch size and F's hidden width are not given; ours are those of the authors' code.
All deviations, equations, published results: .github/papers/fedtgp.md, fedproto.md. Ours: .github/results/README.md.

    python fedtgp.py                                                       built-in glyphs, about a minute
    python fedtgp.py --dataset cifar10 --model htfe8                       Table 1, eight architectures
    python fedtgp.py --dataset cifar100 --model htfe8 --no-mlp             Table 6, without F
    python fedtgp.py --dataset cifar10 --clients 100 --participation 0.1   FedSA's Table 1, one small CNN
"""

from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F                                       # not the paper's F, which is PrototypeNet.mlp

from common import (Run, at_least, class_means, distances, draw_pictures, evaluate_personal, for_each_client,
                    generator, load_dataset, make_clients, minibatches, not_negative, participants, run_script, seeded,
                    summarize)

# --- settings ---------------------------------------------------------------------------------------

BASE = dict(                # the paper's "Implementation Details", unless a comment says otherwise
    clients=20,             # K; the paper writes M
    participation=1.0,      # ρ
    partition="dirichlet",  # paragraph "Statistical heterogeneity", the practical setting
    beta=0.1,               # β, same paragraph
    model="cnn4",           # FedSA's Table 1; this paper's main tables: htfe8, eight architectures
    feature_dim=512,        # D; the paper writes K, under "Model heterogeneity" (its D is an image's size)
    rounds=1000,            # T
    local_epochs=1,         # E
    batch_size=10,          # B, also the server's
    batches="full",         # drop an epoch's last incomplete batch, as in HtFLlib (by the first author)
    lr=0.01,                # η, also the server's
    momentum=0.0,           # the paper names no optimiser: plain SGD, created anew in each round
    weight_decay=0.0,       # not in the paper
    lam=0.1,                # λ, Eq. 11
    distance="euclidean",   # φ in Eq. 11, text below Eq. 4; --distance does not change Eqs. 9 and 10
    margin_rule="pairwise",  # δ, Eq. 9
    tau=100.0,              # τ, Eq. 9
    server_epochs=100,      # S
)
SETTINGS = {  # by --dataset
    "default": BASE,                                                  # every data set not named below
    "fmnist": dict(BASE, model="htcnn8"),                             # Appendix B
    # our choice; a short run needs no checkpoint
    "glyphs": dict(BASE, model="htcnn8", image_size=24, subset=0.3, rounds=10, local_epochs=3, batches="all",
                   momentum=0.9, checkpoint_every=0),
}


# --- the rounds -------------------------------------------------------------------------------------

class Upload(NamedTuple):
    prototypes: torch.Tensor  # (C, D) client prototypes, zero where the client lacks the class
    owned: torch.Tensor       # (C,) bool: the classes it has
    loss: torch.Tensor        # mean over the client's batches; not sent, only logged


def main(args):
    data = load_dataset(args)
    clients = make_clients(data, args)
    C, D = len(data.class_names), args.feature_dim
    with seeded(args.seed, "server"):
        prototype_net = PrototypeNet(C, D, args.no_mlp).to(args.device)

    # modules: the models to checkpoint
    run = Run(args, modules=[client.net for client in clients] + [prototype_net])
    run.resume()                                                      # with --resume: loads the checkpoint's models
    prototypes = prototype_net().detach()                             # (C, D) global prototypes

    for t in run.rounds():
        chosen = participants(clients, t, args)                       # m participants
        # like [client_update(client, prototypes, t, args) for client in chosen], in parallel on a CPU
        uploads = for_each_client(client_update, chosen, prototypes, t, args)

        client_prototypes = torch.stack([upload.prototypes for upload in uploads])         # (m, C, D)
        owned = torch.stack([upload.owned for upload in uploads])                          # (m, C)
        margin = server_margin(client_prototypes, owned, args)                             # δ, by default Eq. 9
        prototypes, server_loss = server_update(prototype_net, client_prototypes, owned, margin, t, args)  # Eq. 10

        scores = evaluate_personal(clients, prototypes, t, args)      # all clients, with the new prototypes
        up = owned.sum() * D                                          # Σ_i C_i · D
        down = len(chosen) * C * D
        run.report(t, scores, [upload.loss for upload in uploads], up, down, server_loss=server_loss, margin=margin)
        run.checkpoint(t)

    results = summarize(run)
    draw_pictures(run, data, clients, prototypes=prototypes)
    return results


# --- the client -------------------------------------------------------------------------------------

def client_update(client, prototypes, t, args):
    """Train the client's own model for E epochs (Eq. 11). Then compute its class means (Eq. 2) over all its training
    images, in eval mode -> Upload."""
    client.net.train()
    optimizer = torch.optim.SGD(client.net.parameters(), lr=args.lr, momentum=args.momentum,
                                weight_decay=args.weight_decay)
    losses = []
    for x, y in minibatches(client, t, args):
        loss = local_loss(client.net, x, y, prototypes, args)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    client_prototypes, counts = class_means(client.net, client.train)                      # Eq. 2
    return Upload(client_prototypes, counts > 0, torch.stack(losses).mean())


def local_loss(net, x, y, prototypes, args):
    """Eq. 11 on a batch, with each image's features in place of the client's class mean P_i^c.

    x (B, 3, height, width) uint8, y (B,), prototypes (C, D) -> scalar."""
    z = net.features(x)
    cross_entropy = F.cross_entropy(net.classifier(z), y)
    return cross_entropy + args.lam * prototype_distance(z, y, prototypes, args.distance)


def prototype_distance(z, y, prototypes, kind):
    """Second term of Eq. 11, without λ: the distance φ between an image's features and the global prototype of
    its class, averaged over the batch.

    kind "euclidean"  the length of the difference, as in the paper
         "mse"        its square divided by D

    z (B, D), y (B,), prototypes (C, D) -> scalar."""
    difference = z - prototypes[y]
    if kind == "euclidean":
        return difference.norm(dim=1).mean()
    return difference.square().mean()


# --- the server -------------------------------------------------------------------------------------

class PrototypeNet(nn.Module):
    """Calling it gives all trainable global prototypes P̂^c, (C, D). Each class has a trainable vector, Ṕ^c in the
    paper. One shared network, self.mlp (the paper's F), maps the vectors to prototypes: Linear, ReLU, Linear.

    As in the authors' code, the hidden width is D and the vectors start from N(0, I)."""

    def __init__(self, C, D, no_mlp):
        super().__init__()
        if no_mlp:
            self.mlp = nn.Identity()                                  # ablation "w/o F": the vectors themselves
        else:
            self.mlp = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))
        self.vectors = nn.Parameter(torch.randn(C, D))

    def forward(self):
        return self.mlp(self.vectors)


def server_margin(client_prototypes, owned, args):
    """The margin δ of this round. client_prototypes (m, C, D), owned (m, C) bool -> scalar.

    --margin-rule pairwise  Eq. 9
                  nearest   the largest distance from a centre to its nearest other centre, as in the authors' code
                  fixed     Eq. 7 with δ = τ (ablation FM in Table 6; the paper does not give FM's δ)
                  none      always 0, Eq. 6 (ablation SCL in Table 6)"""
    centres = class_centres(client_prototypes, owned)
    if args.margin_rule == "pairwise":
        return adaptive_margin(centres, args.tau)
    if args.margin_rule == "nearest":
        return largest_nearest_distance(centres, args.tau)
    if args.margin_rule == "fixed":
        return args.tau
    return 0.0                                                        # "none"


def class_centres(client_prototypes, owned):
    """Q^c of Eq. 9: the unweighted mean of the clients' prototypes of class c, for the U classes that were uploaded.

    client_prototypes (m, C, D), zero where the client lacks the class, owned (m, C) bool -> (U, D)."""
    owners = owned.sum(0)                                             # (C,) how many clients have each class
    total = client_prototypes.sum(0)                                  # (C, D)
    uploaded = owners > 0
    return total[uploaded] / owners[uploaded][:, None]


def adaptive_margin(centres, tau):
    """Eq. 9: δ, the largest distance between two class centres, capped at τ. centres Q (U, D) of U uploaded classes
    -> scalar, 0 for a single class."""
    return distances(centres, centres).max().clamp(max=tau)           # the diagonal's zeros do not matter


def largest_nearest_distance(centres, tau):
    """The margin of the authors' code: the largest distance from a centre to its nearest other centre, capped at τ.

    centres (U, D) -> scalar, τ for a single class."""
    phi = distances(centres, centres)
    phi.fill_diagonal_(torch.inf)                                     # no centre is its own neighbour
    nearest = phi.amin(1)                                             # (U,)
    return nearest.max().clamp(max=tau)                               # a single class has inf, so τ


def server_update(prototype_net, client_prototypes, owned, margin, t, args):
    """Train the global prototypes on the client prototypes (Eqs. 5 and 10) for S epochs, in shuffled batches, with
    the clients' learning rate and batch size and plain SGD, as in the authors' code.

    client_prototypes (m, C, D), owned (m, C) bool, margin δ a scalar -> P̂ (C, D), and the mean loss over the last
    epoch's batches."""
    samples = client_prototypes[owned]                                # (n, D) the client prototypes as one list
    _, labels = owned.nonzero(as_tuple=True)                          # (n,) their classes, in the same order
    rng = generator(args.seed, "server", t)
    optimizer = torch.optim.SGD(prototype_net.parameters(), lr=args.lr)
    for _ in range(args.server_epochs):
        losses = []                                                   # only the last epoch's are returned
        order = torch.from_numpy(rng.permutation(len(samples))).to(samples.device)
        for index in order.split(args.batch_size):
            prototypes = prototype_net()                              # (C, D), with gradient
            loss = margin_contrastive(samples[index], labels[index], prototypes, margin)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return prototype_net().detach(), torch.stack(losses).mean()


def margin_contrastive(samples, labels, prototypes, margin):
    """Eqs. 7 and 10 (Eq. 6 with δ = 0), mean over a batch of client prototypes; the paper sums over all of them. φ is
    the Euclidean distance.

    samples (B, D) client prototypes, labels (B,), prototypes (C, D), margin δ a scalar -> scalar."""
    phi = distances(samples, prototypes)                              # (B, C)
    is_own_class = F.one_hot(labels, len(prototypes))
    logits = -(phi + margin * is_own_class)                           # its own class must be nearer by δ
    return F.cross_entropy(logits, labels)                            # −log softmax: −log of Eq. 10's fraction


# --- flags ------------------------------------------------------------------------------------------

def add_flags(group):
    group.add_argument("--lam", type=not_negative, help="λ in Eq. 11, weight of the distance")
    group.add_argument("--distance", choices=["euclidean", "mse"],
                       help="φ in Eq. 11. euclidean: the paper's; mse: mean squared error, as in its authors' code")
    group.add_argument("--margin-rule", choices=["pairwise", "nearest", "fixed", "none"],
                       help="δ. pairwise: Eq. 9; nearest: the largest nearest-neighbour distance, as in its authors' "
                            "code; fixed: τ; none: 0")
    group.add_argument("--tau", type=not_negative, help="τ in Eq. 9, the cap on δ; with --margin-rule fixed, δ itself")
    group.add_argument("--server-epochs", type=at_least(1), help="S, the server's epochs per round")
    group.add_argument("--no-mlp", action="store_true", help="no F: the trainable vectors are the global prototypes")


if __name__ == "__main__":
    run_script("fedtgp", __doc__, main, SETTINGS, add_flags)
