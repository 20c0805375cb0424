"""FedPLCC (Federated Prototype Learning with Convergent Clusters), from
"An Enhanced Federated Prototype Learning Method under Domain Shift". Kuang, Guo, Liang, Zhang. arXiv 2024.

Clients with images from different domains train one model. A prototype is a mean feature vector, and each class has
several, because its features differ between domains. As in the earlier FedPLVM, clients cluster their features of each
class, and the server clusters the resulting means. Clients and server use FINCH: it links each vector to its nearest
neighbour by cosine, and connected vectors form a cluster; each further pass clusters the clusters' means. FedPLCC
weights a prototype by the share of its class's images that it stands for, so outliers count little. And L_corr (Eq. 8)
pulls a feature toward only a fraction φ of its class's prototypes, those with the largest similarity · weight: the
paper expects the others to be outliers or to come from other domains.

One round (D features, G prototypes, J clusters of a client, |w| floats in the model):
  1. The server sends the model and, from round 2 on, prototypes with their weights.   |w| + G · (D + 1) floats to each
  2. Each participant trains for E epochs on cross-entropy (Eq. 5) and, from round 2 on,
     + λ1 · L_contra (Eq. 6): features should be more similar (cos^α, Eq. 7) to their class's prototypes than to others;
       each prototype counts with its weight, and τ is the temperature
     + λ2 · L_corr (Eq. 8): minus the sum of similarity · weight over the selected prototypes.
  3. The participant clusters its features of each class (Eq. 9) and sends model, clusters' means and sizes.
                                                                                       |w| + J · (D + 1) floats
  4. The server averages the models, weighted by the clients' numbers of images. It clusters each class's means into
     prototypes (Eq. 10) and weights these by their shares of the class's images (Eq. 11).
The global model is then tested on each domain's test images; the score is the mean over domains.

On glyphs: 4 clients, one per domain, 20 images per class, 8 rounds, 5 epochs, λ1 = 1, λ2 = 10.
Our main changes
  Eq. 5  is a sum over a client's images in the paper; Eqs. 6 and 8 are for one image. Ours are means over a batch. If
         only Eq. 5 were a sum, λ1 and λ2 would count less.
Main gaps in the paper
  FINCH  The paper does not say which pass to use. We take the last with at least two clusters, or the first if none
         has. Nor is it clear whether larger clusters count more when the server averages them. In ours all count the
         same (--weighted-means: by numbers of images).
  E, τ   Contradictory: Algorithm 1 counts E epochs; in Section IV an epoch "consists of E = 10 iterations". τ is 0.07
         or 0.55. We use ten epochs (glyphs: five) and 0.07.
All deviations, equations, published results: .github/papers/fedplcc.md. Ours: .github/results/README.md.

    python fedplcc.py                                            built-in glyphs in four domains, about a minute
    python fedplcc.py --dataset office                           Table III (digit5: Table II, domainnet: Table IV)
    python fedplcc.py --dataset office --lam-contra 0            FedAvg (λ2 = 10 λ1 is then 0 as well)
    python fedplcc.py --dataset digit5 --uniform-weights         Table V, all weights 1 (--phi 1: no selection in Eq. 8)
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from common import (Run, average, build_net, draw_pictures, evaluate_global, extract, for_each_client, load_dataset,
                    make_federation, mean_where, minibatches, model_size, not_negative, participants, positive,
                    run_script, share, summarize)

# --- settings ---------------------------------------------------------------------------------------

BASE = dict(                # the paper's Section IV, unless a comment says otherwise
    clients=None,           # K: one for each domain
    participation=1.0,      # Algorithm 1: all clients
    partition="domain",
    images_per_class=30,    # our reading of about 300 images per client and ten classes
    image_size=64,          # not in the paper
    model="resnet10",
    small_stem=False,       # not in the paper: False is torchvision's 7x7 convolution and max-pooling
    feature_dim=512,
    rounds=50,              # T
    local_epochs=10,        # E: epochs in Table I and Algorithm 1, an epoch's iterations in Section IV
    batch_size=32,          # not in the paper: from FedPLVM's code
    lr=0.01,
    momentum=0.9,
    weight_decay=1e-5,
    lam_contra=1.0,         # λ1, Eq. 4: the paper's for DomainNet
    lam_corr=None,          # λ2: main makes it 10 λ1
    phi=0.5,                # φ, Eq. 8
    tau=0.07,               # τ, Eq. 6; Section IV-B2 calls 0.55 optimal
    alpha=0.5,              # α, Eq. 7
)
SETTINGS = {
    "digit5": dict(BASE, lam_contra=100.0),
    "office": dict(BASE, rounds=100, lam_contra=20.0),
    "domainnet": dict(BASE, images_per_class=40),
    # our choices for data that the paper does not use
    "digits": dict(BASE, image_size=32, lam_contra=100.0),                          # FedLSA's data set
    "domains": dict(BASE, images_per_class=None, image_size=None),                  # other folders with domains
    "default": dict(BASE, images_per_class=None, image_size=None, clients=10, partition="dirichlet", beta=0.5),
    "glyphs": dict(BASE, images_per_class=20, image_size=32, rounds=8, local_epochs=5, checkpoint_every=0),
}


# --- the rounds -------------------------------------------------------------------------------------

class Clusters(NamedTuple):  # a client's local prototypes, or the server's before Eq. 11
    vectors: torch.Tensor  # (J, D) means of clusters, of all classes
    labels: torch.Tensor   # (J,) the class of each
    sizes: torch.Tensor    # (J,) how many images are in each; the paper calls them weights, W_local and W_global


class Prototypes(NamedTuple):
    vectors: torch.Tensor  # (G, D) means of the server's clusters
    labels: torch.Tensor   # (G,) the class of each
    weights: torch.Tensor  # (G,) W_g of Eq. 11; all 1 with --uniform-weights


class Upload(NamedTuple):
    model: dict            # the trained model's state_dict
    clusters: Clusters     # of the client's features; None with FedAvg
    loss: torch.Tensor     # mean over the client's batches; not sent, only logged


def main(args):
    data = load_dataset(args)
    net = build_net(data, args)                                       # the global model
    # client_nets: one copy of net for each participant
    clients, client_nets, tests = make_federation(data, net, args)
    D, net_size = args.feature_dim, model_size(net)
    if args.lam_corr is None:
        args.lam_corr = 10 * args.lam_contra                          # λ2 = 10 λ1
    fedavg = args.lam_contra == 0 and args.lam_corr == 0              # then there are no prototypes

    run = Run(args, modules=[net])                                    # modules: the models to checkpoint
    prototypes = Prototypes(*run.resume(no_prototypes(D, args.device)))  # none yet; with --resume the saved ones

    for t in run.rounds():
        chosen = participants(clients, t, args)
        down = len(chosen) * (net_size + len(prototypes.vectors) * (D + 1))
        for client, client_net in zip(chosen, client_nets, strict=True):
            client.net = client_net
            client.net.load_state_dict(net.state_dict())
        prototypes_sent = None if fedavg else prototypes              # None: FedAvg; empty: round 1
        # like [client_update(client, prototypes_sent, t, args) for client in chosen], in parallel on a CPU
        uploads = for_each_client(client_update, chosen, prototypes_sent, t, args)

        models = [upload.model for upload in uploads]
        num_images = [len(client.train.y) for client in chosen]
        net.load_state_dict(average(models, num_images))
        up = len(chosen) * net_size
        if not fedavg:
            prototypes = global_prototypes(uploads, args)                                  # Eqs. 10, 11
            up += sum(len(upload.clusters.vectors) for upload in uploads) * (D + 1)

        scores = evaluate_global(net, tests, t, args)
        run.report(t, scores, [upload.loss for upload in uploads], up, down, prototypes=len(prototypes.vectors))
        run.checkpoint(t, tuple(prototypes))

    results = summarize(run)
    draw_pictures(run, data, clients, prototypes=prototypes.vectors, labels=prototypes.labels, net=net, tests=tests)
    return results


def no_prototypes(D, device):
    """G = 0 prototypes: vectors (0, D), labels (0,), weights (0,)."""
    labels = torch.zeros(0, dtype=torch.long, device=device)
    return Prototypes(torch.zeros(0, D, device=device), labels, torch.zeros(0, device=device))


# --- the client -------------------------------------------------------------------------------------

def client_update(client, prototypes, t, args):
    """Train the client's copy of the global model for E epochs (Eq. 4), then cluster its features (Eq. 9) -> Upload.
    prototypes: as in local_loss."""
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

    clusters = None
    if prototypes is not None:
        clusters = local_clusters(client.net, client.train)                                # Eq. 9
    return Upload(client.net.state_dict(), clusters, torch.stack(losses).mean())


def local_loss(net, x, y, prototypes, args):
    """Eq. 4 on a batch: Eq. 5 is a mean over the batch, Eqs. 6 and 8 over the images whose class has a prototype.

    x (B, 3, height, width) uint8, y (B,), prototypes: Prototypes; None with FedAvg, empty in round 1
    -> scalar."""
    z = net.features(x)
    cross_entropy = F.cross_entropy(net.classifier(z), y)                                  # Eq. 5
    if prototypes is None or len(prototypes.vectors) == 0:
        return cross_entropy

    same_class = prototypes.labels == y[:, None]                      # (B, G): is prototype g of sample b's class?
    has_prototype = same_class.any(1)                                 # (B,)
    s = similarity(z, prototypes.vectors, args.alpha)                                      # Eq. 7
    l_contra = contrast(s, same_class, prototypes.weights, args.tau)                       # Eq. 6
    l_corr = attraction(s, same_class, prototypes.weights, args.phi)                       # Eq. 8
    terms = args.lam_contra * l_contra + args.lam_corr * l_corr                            # (B,)
    return cross_entropy + mean_where(terms, has_prototype)


def similarity(z, vectors, alpha):
    """s_α, Eq. 7: cos(z_b, g)^α. A ResNet's features come after a ReLU, so cosines are ≥ 0. For α < 1 the gradient of
    cos^α is infinite at 0, so cosines below 1e-6 are set to 1e-6 and get no gradient.

    z (B, D), vectors (G, D) -> (B, G)."""
    cosine = F.normalize(z, dim=1) @ F.normalize(vectors, dim=1).T
    return cosine.clamp(min=1e-6) ** alpha


def contrast(s, same_class, weights, tau):
    """L_contra, Eq. 6, of each sample: −log( Σ_{g of its class} exp(s_α/τ) W_g / Σ_g exp(s_α/τ) W_g ).

    s (B, G), same_class (B, G) bool, weights (G,) -> (B,); meaningless for a sample whose class has no prototype; the
    caller leaves it out."""
    logits = s / tau + weights.log()                                  # exp(logits) = exp(s_α/τ) W_g
    # -1e9, not -inf: without a prototype the loss would be infinite, and inf · 0 is nan in mean_where
    own_logits = logits.masked_fill(~same_class, -1e9)
    return logits.logsumexp(1) - own_logits.logsumexp(1)


def attraction(s, same_class, weights, phi):
    """L_corr, Eq. 8, of each sample: −Σ of the ⌈φ n⌉ largest s_α W_g among the n prototypes of its class.

    s (B, G), same_class (B, G) bool, weights (G,) -> (B,)."""
    ranked = (s * weights * same_class).sort(1, descending=True).values  # s > 0, so other classes come last, with 0
    position = torch.arange(len(weights), device=s.device)
    n = same_class.sum(1)                                                    # (B,)
    # ⌈φ n⌉. 1 − 1e-6: in float32 0.3 · 50 is just above 15, and would give 16
    num_kept = (phi * n * (1 - 1e-6)).ceil()
    kept = position < num_kept[:, None]
    return -(ranked * kept).sum(1)


def local_clusters(net, images):
    """Eq. 9: the features of a client's training images, in eval mode, clustered class by class -> Clusters."""
    features = extract(net, images.x)
    one_image_each = torch.ones(len(features), device=features.device)
    return cluster_by_class(features, images.y, one_image_each)


# --- the server -------------------------------------------------------------------------------------

def global_prototypes(uploads, args):
    """Eqs. 10 and 11: cluster the means of this round's uploaded clusters, class by class, into weighted prototypes.

    uploads: [Upload] -> Prototypes; all weights are 1 with --uniform-weights."""
    vectors = torch.cat([upload.clusters.vectors for upload in uploads])
    labels = torch.cat([upload.clusters.labels for upload in uploads])
    sizes = torch.cat([upload.clusters.sizes for upload in uploads])
    merged = cluster_by_class(vectors, labels, sizes, weighted_means=args.weighted_means)  # Eq. 10
    weights = prototype_weights(merged.sizes, merged.labels)                               # Eq. 11
    if args.uniform_weights:
        weights = torch.ones_like(weights)
    return Prototypes(merged.vectors, merged.labels, weights)


def prototype_weights(sizes, labels):
    """Eq. 11: W_g, the share of its class's images that a prototype stands for. sizes (G,), labels (G,) -> (G,)."""
    images_of_class = torch.bincount(labels, weights=sizes)           # (C,)
    return sizes / images_of_class[labels]


# --- FINCH (Sarfraz, Sharma, Stiefelhagen, CVPR 2019) -----------------------------------------------

def cluster_by_class(vectors, labels, sizes, weighted_means=False):
    """FINCH*: cluster the vectors of each class with FINCH, and sum up the sizes in each cluster.

    vectors (N, D), labels (N,), sizes (N,): how many images each vector stands for -> Clusters. In a cluster's mean
    each vector counts once or, with weighted_means, once for each of its images."""
    # in float64, because in float32 the cosines of nearly equal features round to 1, and nearest neighbours would tie;
    # on the CPU, because connected_components is a Python loop, slow with a GPU's tensors
    device = vectors.device
    vectors, labels, sizes = vectors.cpu().double(), labels.cpu(), sizes.cpu().double()
    mean_weights = sizes if weighted_means else torch.ones_like(sizes)  # how often each vector counts in a mean

    all_means, all_labels, all_sizes = [], [], []
    for c in labels.unique():
        of_class = labels == c
        cluster = finch(vectors[of_class], mean_weights[of_class])
        means = cluster_means(vectors[of_class], cluster, mean_weights[of_class])
        all_means.append(means)
        all_labels.append(c.repeat(len(means)))                       # class c, once per cluster
        all_sizes.append(torch.bincount(cluster, weights=sizes[of_class]))
    return Clusters(torch.cat(all_means).float().to(device), torch.cat(all_labels).to(device),
                    torch.cat(all_sizes).float().to(device))


def finch(vectors, mean_weights):
    """Cluster the vectors, then the clusters' means, and so on. Returns the last pass with at least two clusters, or
    the first if none has.

    vectors (N, D), mean_weights (N,) as in cluster_means, all 1 in plain FINCH -> cluster numbers (N,) from 0."""
    cluster = first_neighbour_clusters(vectors)
    while True:
        means = cluster_means(vectors, cluster, mean_weights)
        cluster_of_mean = first_neighbour_clusters(means)             # each pass at least halves them, so this ends
        coarser = cluster_of_mean[cluster]                            # from the means back to the vectors
        if coarser.max() == 0:                                        # all vectors in one cluster
            return cluster
        cluster = coarser


def cluster_means(vectors, cluster, mean_weights):
    """Mean vector of each cluster. vectors (N, D), cluster (N,): each vector's cluster, mean_weights (N,): how often
    each vector counts -> (J, D)."""
    member = F.one_hot(cluster).to(vectors.dtype)                     # (N, J)
    total = member.T @ mean_weights                                   # (J,)
    return member.T @ (vectors * mean_weights[:, None]) / total[:, None]


def first_neighbour_clusters(vectors):
    """Link each vector to its nearest neighbour by cosine. Connected vectors form a cluster.
    A single vector is a cluster as well.

    vectors (N, D) -> cluster numbers (N,) from 0."""
    unit = F.normalize(vectors, dim=1)
    nearest = (unit @ unit.T).fill_diagonal_(-2).argmax(1)            # -2: below any cosine, so not itself
    return connected_components(nearest)


def connected_components(nearest):
    """Components of the graph with edges i – nearest[i]. nearest (N,) -> each vector's component (N,), from 0."""
    component = torch.arange(len(nearest))                            # at first each vector is alone
    for i, j in enumerate(nearest.tolist()):
        joined = (component == component[i]) | (component == component[j])  # all vectors in i's and j's components
        component[joined] = component[joined].min()
    _, number = torch.unique(component, return_inverse=True)          # renumber: 0, 1, 2, ...
    return number


# --- flags ------------------------------------------------------------------------------------------

def add_flags(group):
    group.add_argument("--lam-contra", type=not_negative,
                       help="λ1 in Eq. 4, weight of L_contra; FedAvg if it and λ2 are 0")
    group.add_argument("--lam-corr", type=not_negative, help="λ2 in Eq. 4, weight of L_corr; default: 10 λ1")
    group.add_argument("--phi", type=share, help="φ in Eq. 8, the share of a class's prototypes that attract")
    group.add_argument("--tau", type=positive, help="τ in Eq. 6, the temperature")
    group.add_argument("--alpha", type=positive, help="α in Eq. 7, the exponent of the cosine")
    group.add_argument("--uniform-weights", action="store_true", help="all prototypes weigh 1 in the losses")
    group.add_argument("--weighted-means", action="store_true",
                       help="weight the server's cluster means by numbers of images, which the paper does not mention")


if __name__ == "__main__":
    run_script("fedplcc", __doc__, main, SETTINGS, add_flags)
