"""FedProto: Federated Prototype Learning across Heterogeneous Clients.
Tan, Long, Liu, Zhou, Lu, Jiang, Zhang. AAAI 2022.
Equations, settings and tables below are those of FedTGP (AAAI 2024), which restates FedProto, unless marked.

Every client keeps its own model, of any architecture with D features. For each of its classes it sends one vector, the
prototype: the mean feature of its images of that class. The server averages these into one global prototype per class,
and clients pull their features toward it.

One round (C classes, C_i of them at client i; D features):
  1. The server sends the global prototypes; in round 1 it has none.                   D floats for each prototype
  2. Each participant trains on cross-entropy + λ · the mean distance from an image's features to the global prototype
     of its class (Eq. 4).
  3. After training it sends its class means (Eq. 2) and class counts.                 C_i · (D + 1) floats
  4. The server averages the means, weighted by the counts (Eq. 3), into the next global prototypes. A class that no
     participant has keeps its old one.
In tested rounds (--eval-every) every client classifies its held-out 25 % twice: by the nearest new global prototype, as
in FedTGP, and by its own classifier.

On glyphs (digits that the program draws): 20 clients with eight small architectures, 30 % of the images, 10 rounds,
3 epochs, momentum 0.9.
Our main changes
  Eq. 4      Distances are per image, not per class mean. This also penalises scatter within a class, and classes
             with more images count more.
  Eq. 3      We average over the participants that have the class, not over all clients that have it, and leave out the
             factor 1/|𝒩_c|, because the weights already sum to 1.
  Models     Except on glyphs and Fashion-MNIST all clients have the same small CNN, as in FedSA (2025). FedTGP's main
             tables have eight architectures: --model htfe8.
Main gaps in the paper
  Initial weights  Not given by FedTGP; clients with the same extractor start with the same weights.
  Accuracy         A mean over clients or over images? We pool all clients' test images.
All deviations, equations, published results: .github/papers/fedproto.md. Ours: .github/results/README.md.

    python fedproto.py                                                       built-in glyphs, about a minute
    python fedproto.py --dataset cifar10 --model htfe8                       FedTGP's Table 1, eight architectures
    python fedproto.py --dataset cifar10 --clients 100 --participation 0.1   Table 1 of FedSA (2025), one small CNN
    python fedproto.py --lam 0                                               local training; prototypes only for testing
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from common import (Run, class_means, draw_pictures, evaluate_personal, for_each_client, load_dataset, make_clients,
                    mean_where, minibatches, not_negative, participants, run_script, summarize)

# --- settings ---------------------------------------------------------------------------------------

BASE = dict(                # FedTGP's "Implementation Details", unless a comment says otherwise
    clients=20,             # K; FedTGP writes M
    participation=1.0,      # ρ
    partition="dirichlet",  # paragraph "Statistical heterogeneity", the practical setting
    beta=0.1,               # β, same paragraph
    model="cnn4",           # FedSA's Table 1; FedTGP's main tables: htfe8, eight architectures
    feature_dim=512,        # D; FedTGP writes K, under "Model heterogeneity"
    rounds=1000,            # T
    local_epochs=1,         # E
    batch_size=10,          # B
    batches="full",         # drop an epoch's last incomplete batch, as in HtFLlib (by FedTGP's first author)
    lr=0.01,                # η
    momentum=0.0,           # FedTGP names no optimiser: plain SGD
    weight_decay=0.0,       # not in FedTGP
    lam=0.1,                # λ, Eq. 4; FedTGP's appendix, "Hyperparameter settings"
    distance="euclidean",   # φ, text below Eq. 4
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
    counts: torch.Tensor      # (C,) its number of images of each class
    loss: torch.Tensor        # mean over the client's batches; not sent, only logged


def main(args):
    data = load_dataset(args)
    clients = make_clients(data, args)
    C, D = len(data.class_names), args.feature_dim

    run = Run(args, modules=[client.net for client in clients])       # modules: the models to checkpoint
    prototypes = torch.zeros(C, D, device=args.device)                # global prototypes
    has_prototype = torch.zeros(C, dtype=torch.bool, device=args.device)  # at first no class has one
    prototypes, has_prototype = run.resume((prototypes, has_prototype))  # with --resume: from the checkpoint

    for t in run.rounds():
        chosen = participants(clients, t, args)                       # m participants
        down = len(chosen) * has_prototype.sum() * D                  # floats sent in step 1
        # like [client_update(client, prototypes, has_prototype, t, args) for client in chosen], in parallel on a CPU
        uploads = for_each_client(client_update, chosen, prototypes, has_prototype, t, args)

        client_prototypes = torch.stack([upload.prototypes for upload in uploads])         # (m, C, D)
        counts = torch.stack([upload.counts for upload in uploads])                        # (m, C)
        averages, uploaded = weighted_mean(client_prototypes, counts)                      # Eq. 3
        prototypes = torch.where(uploaded[:, None], averages, prototypes)  # an absent class keeps its prototype
        has_prototype = has_prototype | uploaded

        scores = evaluate_personal(clients, prototypes, t, args, has_prototype=has_prototype)
        up = (counts > 0).sum() * (D + 1)                             # floats sent in step 3: Σ_i C_i · (D + 1)
        run.report(t, scores, [upload.loss for upload in uploads], up, down)
        run.checkpoint(t, (prototypes, has_prototype))

    results = summarize(run)
    labels = has_prototype.nonzero().flatten()                        # the classes that have a prototype
    draw_pictures(run, data, clients, prototypes=prototypes[labels], labels=labels)
    return results


# --- the client -------------------------------------------------------------------------------------

def client_update(client, prototypes, has_prototype, t, args):
    """Train the client's own model for E epochs (Eq. 4). Then compute its class means (Eq. 2) over all its training
    images, in eval mode -> Upload."""
    client.net.train()
    optimizer = torch.optim.SGD(client.net.parameters(), lr=args.lr, momentum=args.momentum,
                                weight_decay=args.weight_decay)
    losses = []
    for x, y in minibatches(client, t, args):
        loss = local_loss(client.net, x, y, prototypes, has_prototype, args)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    client_prototypes, counts = class_means(client.net, client.train)                      # Eq. 2
    return Upload(client_prototypes, counts, torch.stack(losses).mean())


def local_loss(net, x, y, prototypes, has_prototype, args):
    """Eq. 4 on a batch, with each image's features in the place of the client's class mean P_i^c.

    x (B, 3, height, width) uint8, y (B,), prototypes (C, D), has_prototype (C,) bool -> scalar."""
    z = net.features(x)
    cross_entropy = F.cross_entropy(net.classifier(z), y)
    return cross_entropy + args.lam * prototype_distance(z, y, prototypes, has_prototype, args.distance)


def prototype_distance(z, y, prototypes, has_prototype, kind):
    """Second term of Eq. 4, without λ: the distance φ between an image's features and its class's global prototype,
    averaged over the images whose class has one.

    kind "euclidean"  the length of the difference, as in FedTGP
         "mse"        its square divided by D

    z (B, D), y (B,), prototypes (C, D), has_prototype (C,) bool -> scalar; 0 if no image's class has a prototype."""
    difference = z - prototypes[y]
    if kind == "euclidean":
        phi = difference.norm(dim=1)
    else:
        phi = difference.square().mean(dim=1)
    return mean_where(phi, has_prototype[y])


# --- the server -------------------------------------------------------------------------------------

def weighted_mean(client_prototypes, counts):
    """Eq. 3 over the participants. Its factor 1/|𝒩_c| is left out: the weights already sum to 1.

    client_prototypes P_i^c (m, C, D), counts |𝒟_i,c| (m, C) -> P̄ (C, D), and which classes were uploaded (C,) bool."""
    total = counts.sum(0)
    mean = (client_prototypes * counts[:, :, None]).sum(0) / total.clamp(min=1)[:, None]
    return mean, total > 0


# --- flags ------------------------------------------------------------------------------------------

def add_flags(group):
    group.add_argument("--lam", type=not_negative, help="λ in Eq. 4, weight of the distance; 0: clients train alone")
    group.add_argument("--distance", choices=["euclidean", "mse"],
                       help="φ in Eq. 4. euclidean: FedTGP's; mse: mean squared error, as in its authors' code")


if __name__ == "__main__":
    run_script("fedproto", __doc__, main, SETTINGS, add_flags)
