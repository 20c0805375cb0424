"""FedLSA: Beyond Federated Prototype Learning: Learnable Semantic Anchors with Hyperspherical Contrast for
Domain-Skewed Data. Fu, Huang, Lai, Liao, Zhang, Chen. AAAI 2025.

Each client has images from one domain: photos, sketches, ... Earlier prototype methods average each class's features
into a prototype; prototypes keep traces of the domains and may lie close together. So FedLSA's server learns one anchor
per class: a small network Θ makes it from a trainable vector. The server uses no client features and keeps the anchors
far apart. Clients scale features to length 1, so that all lie on one sphere, and pull each toward the anchor of its
class and away from the others.

One round (C classes, D features, |w| floats in the model):
  1. The server trains Θ and its vectors for E_s steps on L_ACE + α · L_SEP (Eq. 5). L_ACE (Eq. 3): the frozen global
     classifier should classify each anchor correctly; in round 1 it is untrained. L_SEP (Eq. 4): anchors should not be
     similar.
  2. It sends the global model and the anchors.                                        |w| + C · D floats to each
  3. Each participant trains the model for E_c epochs on cross-entropy (Eq. 9) + λ · a contrastive loss (Eq. 10):
     features should be most similar to their class's anchor (L_COM, Eq. 8).
  4. Each sends its model, and the server averages them.                               |w| floats
The global model is then tested on each domain's test images; the score is the mean over domains.

On glyphs (digits that the program draws): 4 clients, one per domain, each with 20 images of each class; 12 rounds,
batches of 32.
Our main changes
  Eq. 4    We divide by the temperature τ inside the exponential, as Eq. 8 does. As printed, τ only adds a constant.
  Anchors  We scale them to length 1, like the mean directions in Eq. 6; otherwise Eq. 4 has no lower bound.
Main gaps in the paper
  Shares   Which fraction of its domain's images a client has. Ours is from other papers' code; accuracy depends on it.
  Average  How models are weighted. We use image counts; on digits SVHN's clients count ten times as much as USPS's.
  FedAvg   Whether the paper's FedAvg scales features to length 1 (--lam 0) or not (--lam 0 --no-sphere). We compare
           with the second, which on office is closer to the paper; the first ends level with FedLSA there.
  Values   Which α, λ and τ belong to which data set; the paper names two values of each.
All deviations, equations, published results: .github/papers/fedlsa.md. Ours: .github/results/README.md.

    python fedlsa.py                                          built-in glyphs in four domains, about a minute
    python fedlsa.py --dataset office                         Table 2 on Office-Caltech (pacs: Table 3)
    python fedlsa.py --dataset office --alpha 0               Table 5, without L_SEP
    python fedlsa.py --dataset office --lam 0 --no-sphere     FedAvg
"""

import copy
import math
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from common import (Net, Run, at_least, architecture, average, build_extractor, draw_pictures, evaluate_global, fail,
                    for_each_client, load_dataset, make_federation, minibatches, model_size, not_negative, participants,
                    positive, run_script, seeded, summarize)

# --- settings ---------------------------------------------------------------------------------------

BASE = dict(                # the paper's "Implementation Details", unless a comment says otherwise
    clients=None,           # one for each domain; the paper's ten are in SETTINGS below
    participation=1.0,      # Algorithm 1: all clients
    partition="domain",     # section "Datasets"
    model="cnn4",           # ψ, the encoder; kinds of layers as in the paper, sizes ours
    feature_dim=128,        # D; the paper gives no value, and writes L, in Eq. 6 D
    rounds=100,             # T
    local_epochs=5,         # E_c
    batch_size=64,          # B
    lr=0.01,                # η, which has no value in the paper: from FPL's code (github.com/WenkeHuang/RethinkFL)
    momentum=0.9,           # not in the paper: FPL's
    weight_decay=1e-5,      # not in the paper: FPL's
    server_steps=500,       # E_s
    compactness="vmf",      # Eq. 8
)
# For its comparisons the paper tunes α (Eq. 5), λ (Eq. 10) and τ (Eqs. 4 and 8) over two values each, but does not say
# which data set uses which. Our choice: the first of each on digits, the second on office and PACS.
FIRST_VALUES = dict(BASE, alpha=0.02, lam=0.1, tau=0.1)
SECOND_VALUES = dict(BASE, alpha=0.4, lam=0.7, tau=0.2)
SETTINGS = {  # by --dataset; image sizes: Table 1
    # domain_fraction, the share of its domain that a client gets, is not in the paper: digits and office from FPL's
    # code, PACS from github.com/WenkeHuang/MarsFL
    "digits": dict(FIRST_VALUES, domain_fraction=0.01, image_size=32,
                   domain_clients={"mnist": 1, "usps": 4, "svhn": 2, "syn": 3}),           # section "Datasets"
    # our choice, also on PACS: the ten clients take the domains in turn; office: amazon 3, caltech 3, dslr 2, webcam 2
    "office": dict(SECOND_VALUES, clients=10, domain_fraction=0.2, image_size=32),
    "pacs": dict(SECOND_VALUES, clients=10, domain_fraction=0.3, image_size=225),
    "domains": SECOND_VALUES,                                           # other folders with domains: our choice
    "default": dict(FIRST_VALUES, clients=10, partition="dirichlet", beta=0.5),  # any other data set: our choice
    "glyphs": dict(SECOND_VALUES, images_per_class=20, rounds=12, batch_size=32, checkpoint_every=0),  # a short demo
}


# --- the rounds -------------------------------------------------------------------------------------

class Upload(NamedTuple):
    model: dict         # the trained model's state_dict
    loss: torch.Tensor  # mean over the client's batches; not sent, only logged


def main(args):
    if args.no_sphere and args.lam > 0:
        fail("--no-sphere: only with --lam 0, because the anchors need features of length 1 (Eq. 6)")
    data = load_dataset(args)
    net, I = build_sphere_net(data, args)                             # the global model, and its encoder's output size
    # client_nets: one copy of net for each participant
    clients, client_nets, tests = make_federation(data, net, args)
    C, D, net_size = len(data.class_names), args.feature_dim, model_size(net)
    use_anchors = args.lam > 0                                        # --lam 0: FedAvg
    with seeded(args.seed, "server"):
        anchor_net = AnchorNet(C, I, D).to(args.device)

    run = Run(args, modules=[net, anchor_net])                        # modules: the models to checkpoint
    run.resume()                                                      # with --resume: loads the checkpoint's models
    # (C, D), for the pictures if --resume leaves no round to run; None with FedAvg
    anchors = anchor_net().detach() if use_anchors else None

    for t in run.rounds():
        chosen = participants(clients, t, args)
        server_log = {}
        if use_anchors:
            anchors, server_loss = server_update(anchor_net, net.classifier, args)         # Eqs. 3-5
            server_log["server_loss"] = server_loss

        for client, client_net in zip(chosen, client_nets, strict=True):
            client.net = client_net
            client.net.load_state_dict(net.state_dict())
        # like [client_update(client, anchors, t, args) for client in chosen], in parallel on a CPU
        uploads = for_each_client(client_update, chosen, anchors, t, args)
        models = [upload.model for upload in uploads]
        num_images = [len(client.train.y) for client in chosen]
        net.load_state_dict(average(models, num_images))

        scores = evaluate_global(net, tests, t, args)
        up = len(chosen) * net_size
        down = len(chosen) * net_size
        if use_anchors:
            down += len(chosen) * C * D
        run.report(t, scores, [upload.loss for upload in uploads], up, down, **server_log)
        run.checkpoint(t)

    results = summarize(run)
    draw_pictures(run, data, clients, prototypes=anchors, net=net, tests=tests)
    return results


# --- the client -------------------------------------------------------------------------------------

def client_update(client, anchors, t, args):
    """Train the client's copy of the global model for E_c epochs (Eq. 10) -> Upload."""
    client.net.train()
    optimizer = torch.optim.SGD(client.net.parameters(), lr=args.lr, momentum=args.momentum,
                                weight_decay=args.weight_decay)
    losses = []
    for x, y in minibatches(client, t, args):
        loss = local_loss(client.net, x, y, anchors, args)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return Upload(client.net.state_dict(), torch.stack(losses).mean())


def local_loss(net, x, y, anchors, args):
    """Eqs. 9 and 10 on a batch. x (B, 3, height, width) uint8, y (B,), anchors (C, D) or None -> scalar."""
    h = net.features(x)
    cross_entropy = F.cross_entropy(net.classifier(h), y)                                  # Eq. 9
    if anchors is None:                                               # FedAvg
        return cross_entropy
    if args.compactness == "l2":
        return cross_entropy + args.lam * l2_distance(h, y, anchors)
    return cross_entropy + args.lam * compactness(h, y, anchors, args.tau)


def compactness(h, y, anchors, tau):
    """L_COM, Eq. 8: cross-entropy over the logits h_b · a_c / τ, mean over the batch. The softmax is p(y | h) for
    equally likely von Mises-Fisher distributions around the anchors, with κ = 1/τ (Eqs. 6 and 7).

    h (B, D) and anchors (C, D) on the sphere, y (B,) -> scalar."""
    return F.cross_entropy(h @ anchors.T / tau, y)


def l2_distance(h, y, anchors):
    """In place of L_COM, for the row with L_SEP alone in Tables 4 and 5: the distance between a feature and the anchor
    of its class, mean over the batch. The paper has no formula for it. Shapes as in compactness -> scalar."""
    return (h - anchors[y]).norm(dim=1).mean()


# --- the server -------------------------------------------------------------------------------------

class AnchorNet(nn.Module):
    """Calling it gives all anchors, A = nor(Θ(R)), (C, D). R (C, I) is one trainable vector per class; I is the size of
    the encoder's output. Θ has two layers and is trained as well. nor scales each anchor to length 1.

    The paper's A = Θ(R) is not normalised. Our choices: R starts from N(0, 1), Θ has a ReLU and hidden width I."""

    def __init__(self, C, I, D):
        super().__init__()
        self.R = nn.Parameter(torch.randn(C, I))
        self.theta = nn.Sequential(nn.Linear(I, I), nn.ReLU(), nn.Linear(I, D))

    def forward(self):
        return F.normalize(self.theta(self.R), dim=1)


def server_update(anchor_net, classifier, args):
    """Train the anchors with the frozen global classifier (Eq. 5) -> the trained anchors A (C, D), and the loss of the
    last step. Each round starts with a new optimiser.

    One of the paper's E_s epochs is one step on all C anchors, as in Algorithm 1. Learning rate, momentum and weight
    decay are the clients'."""
    classifier = copy.deepcopy(classifier).requires_grad_(False)      # a frozen copy: only Θ and R are trained
    optimizer = torch.optim.SGD(anchor_net.parameters(), lr=args.lr, momentum=args.momentum,
                                weight_decay=args.weight_decay)
    for _ in range(args.server_steps):
        anchors = anchor_net()
        loss = anchor_classification(anchors, classifier) + args.alpha * anchor_separation(anchors, args.tau)  # Eq. 5
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return anchor_net().detach(), loss.detach()


def anchor_classification(anchors, classifier):
    """L_ACE, Eq. 3: cross-entropy of the global classifier on the anchors, mean over classes. anchors (C, D)
    -> scalar."""
    labels = torch.arange(len(anchors), device=anchors.device)
    return F.cross_entropy(classifier(anchors), labels)


def anchor_separation(anchors, tau):
    """L_SEP, Eq. 4: the mean over i of log( 1/(C − 1) Σ_{j≠i} exp(a_i · a_j / τ) ).

    In the paper τ divides the exponential, which only adds the constant −log τ. anchors (C, D) -> scalar."""
    C = len(anchors)
    similarity = anchors @ anchors.T / tau                            # (C, C)
    similarity.fill_diagonal_(-math.inf)                              # exp gives 0, which leaves out j = i
    return (similarity.logsumexp(dim=1) - math.log(C - 1)).mean()


# --- the model --------------------------------------------------------------------------------------

class SphereNet(Net):
    """A Net whose features lie on the unit sphere: h = nor(projector(encoder(x))), where nor scales to
    length 1."""

    def features(self, x):
        return F.normalize(super().features(x), dim=1)                # (B, D), from projector(encoder(x))


def build_sphere_net(data, args):
    """SphereNet (with --no-sphere: Net) with random initial weights, on the device, and the encoder's output size I.
    Its extractor is the paper's encoder ψ followed by its projector.

    The paper has two convolutions and three linear layers, but gives no sizes. We use the encoder of --model (cnn4: 5x5
    convolutions with 32 and 64 channels, a linear layer to I = 512). Projector and classifier are linear layers."""
    C, D = len(data.class_names), args.feature_dim
    with seeded(args.seed, "weights lsa_cnn ()"):                     # this text seeds the weights
        encoder, I = build_encoder(data, args)
        projector = nn.Linear(I, D)
        classifier = nn.Linear(D, C)
    net_class = Net if args.no_sphere else SphereNet
    net = net_class(nn.Sequential(encoder, projector), classifier, D, C)
    return net.to(args.device), I


def build_encoder(data, args):
    """The feature extractor of --model, alone, and how many values it gives for an image."""
    name, _ = architecture(args.model, 0)                             # client 0's; all have the same
    pixels = data.x.shape[-1]
    encoder = build_extractor(name, pixels, args.small_stem)
    encoder.eval()                                                    # in train mode BatchNorm fails on one image
    with torch.no_grad():
        outputs = encoder(torch.zeros(1, 3, pixels, pixels)).shape[1]
    return encoder, outputs


# --- flags ------------------------------------------------------------------------------------------

def add_flags(group):
    group.add_argument("--lam", type=not_negative,
                       help="λ in Eq. 10, weight of L_COM; 0: FedAvg (with features of length 1 unless --no-sphere)")
    group.add_argument("--alpha", type=not_negative, help="α in Eq. 5, weight of the anchors' separation")
    group.add_argument("--tau", type=positive, help="τ in Eqs. 4 and 8, the temperature")
    group.add_argument("--server-steps", type=at_least(1), help="E_s, the server's steps on the anchors in a round")
    group.add_argument("--compactness", choices=["vmf", "l2"],
                       help="the client's second term. vmf: L_COM, Eq. 8; l2: the distance to the anchor (Tables 4, 5)")
    group.add_argument("--no-sphere", action="store_true",
                       help="do not scale features to length 1; only with --lam 0, which then is plain FedAvg")


if __name__ == "__main__":
    run_script("fedlsa", __doc__, main, SETTINGS, add_flags)
