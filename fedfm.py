"""FedFM: Anchor-based Feature Matching for Data Heterogeneity in Federated Learning.
Ye, Ni, Xu, Wang, Chen, Eldar. IEEE Transactions on Signal Processing, 2023.

With heterogeneous data each client learns a feature space of its own. FedFM gives all clients the same anchors, the
mean features of each class, and matches every feature to the anchor of its class, so that the averaged models share
one space.

One round (K participants, C classes, C_k of them at client k, D features, |w| numbers in the model):
  1. The server sends the model.                                                       down: |w| numbers
     Each participant sends its class means, computed with this model (Eq. 8), and its class
     counts. (The paper counts C · D here: all C means, and no class counts.)          up: C_k · (D + 1)
  2. The server averages them into the anchors (Eq. 9) and sends these.               down: D numbers per known class
  3. Each participant trains: cross-entropy + λ · matching of features to anchors (Eqs. 2 and 10). By default the
     matching is contrastive guiding: another cross-entropy, over the cosines of a feature with all anchors.
  4. Each sends its model. The server averages the models by their numbers of images (Eq. 11).    up: |w|
  5. The global model is tested on the server's test images.
In the first T_s rounds nothing is matched and no anchors travel. So they are FedAvg; with --lite and --model-every a,
models are averaged in every a-th round only. FedFM has two exchanges in a round, steps 1 and 2, then 3 and 4.
FedFM-Lite (--lite, the function lite_round) has one. Its clients send class means of their trained models at the end of
a round, from round T_s on, or from round 1 where T_s = 0. The server averages them into the next anchors.

What to know before comparing numbers:
  * Each client holds out 20 % of its images for validation. We report the test accuracy of the round whose mean
    validation accuracy is best.
  * The paper tunes its hyper-parameters. It says that λ = 50 and T_s = 20 are generally good. We take
    these, but T_s = 0 for data sets with domains.
  * Features and anchors are normalised before matching, the latter as in the authors' code. That anchors
    are computed in eval mode and from images without augmentation is our choice.
  * NIID-1 is Dirichlet with a cap, as in the authors' code: a client that already has an equal share of all images gets
    nothing of the classes that follow.
  * Input normalisation (except CINIC-10's), CIFAR-100's augmentation and NIID-2's dominant share are from the authors'
    code (github.com/rui-ye/FedFM).
Everything else that differs from the paper, and its published rows: .github/papers/fedfm.md.

    python fedfm.py                                           built-in glyphs in four domains, under a minute
    python fedfm.py --dataset cifar10                         Table III, NIID-1
    python fedfm.py --dataset cifar10 --partition dominant    Table III, NIID-2
    python fedfm.py --lite --model-every 2                    FedFM-Lite, models travel every second round
    python fedfm.py --lam 0                                   FedAvg
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
    model: dict         # state_dict, shares memory with the client's net
    loss: torch.Tensor  # mean over its batches; only for the log


def main(args):
    if args.model_every > 1 and not args.lite:
        fail(f"--model-every {args.model_every}: must be 1 without --lite")
    data = load_dataset(args)
    mean, std = NORMALISATION.get(args.dataset, NORMALISATION["other"])      # of the inputs, see the settings
    net = build_net(data, args, mean=mean, std=std)                   # the global model
    clients, tests = make_federation(data, net, args, validation=args.validation)
    C, D = len(data.classes), args.feature_dim

    modules = [net]
    if args.lite:                                                     # clients keep their models between exchanges
        modules += [client.net for client in clients]
    # headline: the accuracy that is named first; modules: the models that a checkpoint keeps
    run = Run(args, headline="test", modules=modules)
    anchors = torch.zeros(C, D, device=args.device)
    known = torch.zeros(C, dtype=torch.bool, device=args.device)      # which classes have an anchor
    anchors, known = run.resume((anchors, known))                     # with --resume: those of the checkpoint

    one_round = lite_round if args.lite else fedfm_round
    for t in run.rounds():
        chosen = participants(clients, t, args)
        anchors, known, uploads, up, down = one_round(net, clients, chosen, anchors, known, t, args)

        scores = evaluate_global(net, tests, t, args)                 # {} in a round that --eval-every leaves out
        if scores:
            accuracies = [accuracy(net, client.val) for client in clients if len(client.val.y) > 0]
            if accuracies:                                            # none with --validation 0
                scores["validation"] = sum(accuracies) / len(accuracies)
        run.report(t, scores, [upload.loss for upload in uploads], up, down)
        run.checkpoint(t, (anchors, known))

    print(cluster_quality(net, tests, args.seed))                     # of the final model, as in Table V
    classes = known.nonzero().flatten()
    draw_pictures(run, data, clients, prototypes=anchors[known], classes=classes, net=net, tests=tests)
    return summarize(run)


def fedfm_round(net, clients, chosen, anchors, known, t, args):
    """A round of FedFM (Algorithm 1) -> anchors (C, D), known (C,), uploads, numbers up, numbers down.

    Up to and including round T_s no class has an anchor. So the matching is 0, and the round is one of FedAvg.
    clients: all of them; only lite_round needs them."""
    net_size = model_size(net)
    up, down = len(chosen) * net_size, len(chosen) * net_size
    for client in chosen:
        client.net.load_state_dict(net.state_dict())
    if args.lam > 0 and t > args.warmup:
        anchors, known, numbers_up = new_anchors(chosen, anchors, known, args)             # Eqs. 8, 9
        up += numbers_up
        down += len(chosen) * known.sum() * args.feature_dim

    # as [client_update(client, anchors, known, t, args) for client in chosen], several at a time
    uploads = for_each_client(client_update, chosen, anchors, known, t, args, workers=args.workers)
    models = [upload.model for upload in uploads]
    sizes = [len(client.train.y) for client in chosen]
    net.load_state_dict(average(models, sizes))                                            # Eq. 11
    return anchors, known, uploads, up, down


# --- client -----------------------------------------------------------------------------------------

def client_update(client, anchors, known, t, args):
    """Train the client's copy of the global model for E epochs (Eq. 10) -> Upload. In FedFM-Lite it is the client's own
    model in all rounds that do not begin with the server's."""
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
    """Eqs. 2 and 10 on a batch. x (B, 3, height, width), y (B,), anchors (C, D), known (C,) bool -> scalar."""
    z = net.features(x)
    loss = F.cross_entropy(net.classifier(z), y)
    if args.match == "cg":
        return loss + args.lam * contrastive_guiding(z, y, anchors, known, args.temperature)
    return loss + args.lam * squared_distance(z, y, anchors, known)


def contrastive_guiding(z, y, anchors, known, temperature):
    """Contrastive guiding, Section IV-C: cross-entropy over the logits cos(z_b, a_c) / α, the mean over the samples
    whose class has an anchor. Features are normalised as in Section VII-A, anchors as in the authors' code. The paper's
    s is a softmax already, so L_CE(s, c) = −log s_c. F.cross_entropy applies that softmax itself to the logits.

    z (B, D), y (B,), anchors (C, D), known (C,) bool -> scalar, 0 where no class of the batch is known."""
    has_anchor = known[y]                                             # up to T_s none; later all, in Lite perhaps some
    if not has_anchor.any():
        return z.new_zeros(())
    cosine = F.normalize(z, dim=1) @ F.normalize(anchors, dim=1).T
    logits = (cosine / temperature).masked_fill(~known, -torch.inf)
    return F.cross_entropy(logits[has_anchor], y[has_anchor])


def squared_distance(z, y, anchors, known):
    """Eq. 3 with both vectors normalised: ‖z_b/‖z_b‖ − a_c/‖a_c‖‖² for c = y_b, the mean over the samples whose class
    has an anchor.

    The paper's Eq. 3 does not normalise. Section VII-A normalises features; the authors' code normalises anchors, too.
    Shapes as above -> scalar."""
    has_anchor = known[y]
    if not has_anchor.any():
        return z.new_zeros(())
    difference = F.normalize(z, dim=1) - F.normalize(anchors, dim=1)[y]
    return difference.square().sum(1)[has_anchor].mean()


def proximal(net, start):
    """FedProx's term (FedFM with FedProx is in Section VII-D.2): ½ ‖w − w_start‖². start: [weights] -> scalar."""
    return 0.5 * sum((w - s).square().sum() for w, s in zip(net.parameters(), start))


def local_anchors(client):
    """Eq. 8: the class means (C, D) of the client's training images under its present model, in eval mode, and its
    class counts (C,)."""
    return class_means(client.net, client.train)


# --- server -----------------------------------------------------------------------------------------

def new_anchors(chosen, anchors, known, args):
    """Eqs. 8 and 9 with the models that the participants hold now -> anchors (C, D), known (C,), numbers sent up."""
    replies = for_each_client(local_anchors, chosen, workers=args.workers)
    local = torch.stack([means for means, _ in replies])              # (K, C, D)
    counts = torch.stack([n for _, n in replies])                     # (K, C)
    if args.aggregate == "uniform":
        numbers_up = local.numel()       # all C rows; for an absent class the old anchor, or zeros
    else:
        numbers_up = (counts > 0).sum() * (args.feature_dim + 1)
    anchors, known = aggregate_anchors(local, counts, anchors, known, args.aggregate)
    return anchors, known, numbers_up


def aggregate_anchors(local, counts, anchors, known, aggregate="weighted"):
    """Eq. 9: a_c = Σ_k n_kc a_kc / Σ_k n_kc. A class that nobody has keeps its anchor.

    "uniform" (Section VII-D): the plain mean over all participants. A client that lacks the class contributes the old
    anchor. Here the server puts it in; in a real system the client would send it. Before a class has an anchor only its
    owners count.
    local (K, C, D), counts (K, C), anchors (C, D), known (C,) bool -> new anchors, known."""
    weights = counts.float()
    if aggregate == "uniform":
        owned = counts > 0                                            # (K, C)
        local = torch.where(owned[:, :, None], local, anchors.expand_as(local))
        weights = (owned | known).float()                             # 1 for owners; for all, once there is an anchor
    total = weights.sum(0)
    mean = (local * weights[:, :, None]).sum(0) / total.clamp(min=1)[:, None]
    has_mean = total > 0
    return torch.where(has_mean[:, None], mean, anchors), known | has_mean


# --- FedFM-Lite -------------------------------------------------------------------------------------

def lite_round(net, clients, chosen, anchors, known, t, args):
    """A round with one handshake (Section VI). Returns what fedfm_round returns. From round T_s on the clients send the
    class means of their local models after training. These become the anchors of the next round.

    The paper says that models travel every a rounds. Here the server sends the model to all clients at the beginning of
    rounds 1, a + 1, ... It averages the participants' models at the end of rounds a, 2a, ... and of the last round. In
    between clients keep their models, and the global one does not change. As the last round is special, a run that is
    resumed to more --rounds differs from one that had them from the start."""
    net_size = model_size(net)
    up, down = 0, len(chosen) * known.sum() * args.feature_dim
    if (t - 1) % args.model_every == 0:
        down += len(clients) * net_size
        for client in clients:
            client.net.load_state_dict(net.state_dict())

    uploads = for_each_client(client_update, chosen, anchors, known, t, args, workers=args.workers)

    if t % args.model_every == 0 or t == args.rounds:
        up += len(chosen) * net_size
        models = [upload.model for upload in uploads]
        sizes = [len(client.train.y) for client in chosen]
        net.load_state_dict(average(models, sizes))                                        # Eq. 11
    next_is_matched = t + 1 > args.warmup and t < args.rounds
    if args.lam > 0 and next_is_matched:
        anchors, known, numbers_up = new_anchors(chosen, anchors, known, args)             # Eqs. 8, 9
        up += numbers_up
    return anchors, known, uploads, up, down


# --- CIFAR-100's augmentation; how well features separate -------------------------------------------

def augment(x, rng):
    """Random crop with 4 pixels of padding, horizontal flip, and rotation by up to 15 degrees, drawn for each image.

    x (B, channels, height, width) uint8 -> floats in [0, 255]; nearest pixels, black outside."""
    B = len(x)
    angle = rng.uniform(-np.pi / 12, np.pi / 12, B)
    flip = rng.choice([-1.0, 1.0], B)
    dx, dy = rng.integers(-4, 5, (2, B)) * 2 / x.shape[-1]            # in affine_grid's units the width is 2
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
    clusters = KMeans(net.classes, n_init=10, random_state=seed).fit_predict(z)
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
    "default": BASE,
    "cinic10": dict(BASE, dominant_share=0.5),
    # the 23,705 k weights of Table III are those of a ResNet50 that begins with 3x3, as in the authors' code
    "cifar100": dict(BASE, model="resnet50", small_stem=True, feature_dim=2048, augment=True),
    # not from the paper: the folder digits, other folders with domains, glyphs
    "digits": dict(DOMAINS, images_per_class=30),
    "domains": DOMAINS,
    "glyphs": dict(DOMAINS, images_per_class=20, rounds=10, local_epochs=5, checkpoint_every=0),
}
NORMALISATION = {           # mean and standard deviation of the channels
    "other": ((0.5,), (0.5,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


def add_flags(group):
    group.add_argument("--lam", type=not_negative, help="λ in Eq. 10, weight of the matching; 0: FedAvg")
    group.add_argument("--match", choices=["cg", "l2"],
                       help="cg: contrastive guiding; l2: squared distance, Eq. 3 (the paper gives no λ for it)")
    group.add_argument("--temperature", type=positive, help="α of contrastive guiding")
    group.add_argument("--warmup", type=at_least(0), help="T_s, rounds of FedAvg before matching begins")
    group.add_argument("--aggregate", choices=["weighted", "uniform"], help="mean of Eq. 9: by class counts, or plain")
    group.add_argument("--lite", action="store_true",
                       help="FedFM-Lite: anchors of the local models, sent after training, serve in the next round")
    group.add_argument("--model-every", type=at_least(1), help="a of FedFM-Lite: models travel every a rounds")
    group.add_argument("--prox", type=not_negative, help="μ, weight of FedProx's term")
    group.add_argument("--validation", type=share_or_zero,
                       help="share of a client's images held out to pick the best round")
    group.add_argument("--augment", action=argparse.BooleanOptionalAction, default=False,
                       help="random crop, flip and rotation of training images")


if __name__ == "__main__":
    run_script("fedfm", __doc__, main, SETTINGS, add_flags)
