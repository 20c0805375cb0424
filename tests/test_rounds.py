"""The rounds of the six scripts. `main` runs as it is, on a small federation; only the clients' training is replaced by
a stand-in. What clients are given, what the server makes of their uploads, what travels and which accuracies are logged
is computed a second time. Below: the clients' training itself, and which images clients and server have."""

import copy
import math
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision

import common, fedfm, fedlsa, fedplcc, fedsa, fedtgp
from conftest import GLOBAL, PERSONAL, arguments, every_script, log
from reference import sgd_step, weighted_mean


# --- a small federation -----------------------------------------------------------------------------
# Its K clients are its domains, of unequal sizes and classes. Nobody has class 5; of WHO take part nobody has class 4
# in round 1, class 3 in round 2, class 4 in rounds 3 and 5.

K, C, D = 4, 6, 8
TRAIN = np.array([[8, 4, 0, 4, 0, 0], [0, 30, 17, 0, 0, 0], [10, 0, 14, 9, 0, 0], [5, 4, 9, 0, 12, 0]])
TEST = np.array([[4, 9, 0, 8, 0, 1], [5, 2, 8, 1, 0, 0], [9, 1, 1, 4, 6, 2], [3, 0, 4, 4, 7, 1]])
WHO = {1: [0, 2, 1], 2: [3, 1], 3: [0, 2], 4: [0, 1, 2, 3], 5: [2, 0]}
WORDS = ("--partition domain --clients 4 --domain-fraction 1 --model resnet4 --image-size 16 --feature-dim 8 "
         "--seed 3 --workers 1 --checkpoint-every 0 --no-plots --rounds")


def small_dataset(train, test):
    """Images by tables of how many a domain (row) has of a class (column). No two are equal."""
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 128, (train.shape[1], 3, 16, 16))
    x, y, domain, is_test = [], [], [], []
    for d, c in np.ndindex(train.shape):
        for i in range(train[d, c] + test[d, c]):
            x.append(patterns[c] + rng.integers(0, 128, (3, 16, 16)))
            y.append(c)
            domain.append(d)
            is_test.append(i >= train[d, c])
    class_names, domains = [f"class {c}" for c in range(train.shape[1])], [f"domain {d}" for d in range(len(train))]
    return common.Dataset(torch.tensor(np.array(x)).byte(), torch.tensor(y), torch.tensor(domain),
                          torch.tensor(is_test), class_names, domains)


class TinyResNet(torch.nn.Module):
    """In torchvision's place, to save time: 16 channels and one BatchNorm."""

    def __init__(self, *_):
        super().__init__()
        self.conv1, self.bn1 = torch.nn.Conv2d(3, 16, 5, stride=3), torch.nn.BatchNorm2d(16)

    def forward(self, x):
        return self.bn1(self.conv1(x)).relu().mean((2, 3))


def copied(net):
    return copy.deepcopy(dict(net.state_dict()))


def train_at_random(script, client, t, scale):
    """In place of a client's training: its model changes at random, and so are its prototypes."""
    rng = torch.Generator().manual_seed(1000 * t + client.id)
    for value in client.net.state_dict().values():
        if value.is_floating_point():
            value.mul_(1 + 0.3 * torch.rand(value.shape, generator=rng))
            value.add_(0.02 * torch.rand(value.shape, generator=rng))
    client.net.train()
    loss = torch.tensor(t + 0.25 * client.id ** 2)
    upload, counts = __import__(script).Upload, torch.tensor(TRAIN[client.id])
    if script == "fedplcc":
        labels = counts.nonzero().flatten().repeat_interleave(3)
        sizes = torch.randint(1, 9, labels.shape, generator=rng).float()
        clusters = fedplcc.Clusters(torch.randn(len(labels), D, generator=rng), labels, sizes)
        return upload(client.net.state_dict(), clusters, loss)
    if script in GLOBAL:
        return upload(client.net.state_dict(), loss)
    prototypes = scale * torch.randn(C, D, generator=rng) * (counts > 0)[:, None]
    return upload(prototypes, counts > 0 if script == "fedtgp" else counts, loss)


@pytest.fixture
def play(run, monkeypatch):
    """play(script, words) -> its clients, args, rows of the log, and by round what participants were given and did."""
    monkeypatch.setattr(torchvision.models, "ResNet", TinyResNet)
    monkeypatch.setattr(fedfm, "cluster_quality", lambda *_: "")  # it takes longer than a run here

    def go(script, words="", rounds=5, scale=1.0):
        module, data, seen = __import__(script), small_dataset(TRAIN, TEST), {}
        story = SimpleNamespace(data=data, rounds=seen)

        def participants(clients, t, args):
            story.clients, story.args = clients, args
            models = {client.id: copied(client.net) for client in clients}
            seen[t] = SimpleNamespace(models=models, given={}, before={}, after={}, sent={})
            return [clients[i] for i in WHO[t]]

        def client_update(client, *call):
            *given, t, _ = call
            seen[t].given[client.id] = copy.deepcopy(given)
            seen[t].before[client.id] = copied(client.net)
            seen[t].sent[client.id] = train_at_random(script, client, t, scale)
            seen[t].after[client.id] = copied(client.net)
            return seen[t].sent[client.id]

        with monkeypatch.context() as patch:
            patch.setattr(module, "load_dataset", lambda args: data)
            patch.setattr(module, "participants", participants)
            patch.setattr(module, "client_update", client_update)
            story.rows = [None, *log(run(script, WORDS, rounds, words).folder)]  # rows[t] is round t's
        story.net = copy.deepcopy(story.clients[0].net)
        assert list(seen) == list(range(1, rounds + 1))
        for t in seen:
            assert sorted(seen[t].given) == sorted(WHO[t])
            losses = [t + 0.25 * i ** 2 for i in WHO[t]]
            assert story.rows[t]["loss"] == pytest.approx(np.mean(losses))
        return story
    return go


def near(got, want, tolerance=1e-4):
    got, want = np.asarray(got, float), np.asarray(want, float)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def same(one, other, tolerance=1e-5):
    """Two models' weights and BatchNorm's statistics (not its integer counters)."""
    assert one.keys() == other.keys()
    for name in one:
        if one[name].is_floating_point():
            near(one[name], other[name], tolerance)


def check_traffic(story, t, up, down):
    assert (story.rows[t]["up"], story.rows[t]["down"]) == (up, down)


def check_scores(story, t, want):
    assert want
    for name, value in want.items():
        assert story.rows[t][f"acc_{name}"] == pytest.approx(value)


def check_personal(story, t, prototypes, known=None, name="prototype"):
    """The logged accuracies are those of all clients' models after round t. Clients that rest keep their model."""
    seen = story.rounds[t]
    models = {**seen.models, **seen.after}
    for client in story.clients:
        if client.id in seen.before:
            same(seen.before[client.id], seen.models[client.id], 0)
        if t + 1 in story.rounds:
            same(story.rounds[t + 1].models[client.id], models[client.id], 0)
        client.net.load_state_dict(models[client.id])
    prototypes = torch.tensor(prototypes).float()
    check_scores(story, t, common.evaluate_personal(story.clients, prototypes, t, story.args, known, name))


def check_global(story, t, model):
    """The logged accuracies are those of this model on the server's images of each domain."""
    tests = {}
    for d, name in enumerate(story.data.domains):
        index = story.data.test & (story.data.domain == d)
        tests[name] = common.Images(story.data.x[index], story.data.y[index])
    story.net.load_state_dict(model)
    check_scores(story, t, common.evaluate_global(story.net, tests, t, story.args))


def class_averages(story, t):
    """Eq. 3 -> {class: mean of the participants' prototypes of it, by their counts}."""
    averages, sent = {}, story.rounds[t].sent
    for c in range(C):
        owners = [i for i in WHO[t] if TRAIN[i, c] > 0]
        if owners:
            averages[c] = weighted_mean([sent[i].prototypes[c].tolist() for i in owners], TRAIN[owners, c])
    return averages


def average_model(story, t):
    """Σ_k N_k w_k / Σ_k N_k over the participants, N_k the number of training images."""
    models = story.rounds[t].after
    sizes = {i: len(story.clients[i].train.y) for i in WHO[t]}
    mean = {}
    for name in story.net.state_dict():
        mean[name] = sum(sizes[i] * models[i][name].double() for i in WHO[t]) / sum(sizes.values())
    return mean


def number_of_classes(t):
    """Σ_i C_i: how many class means the participants of round t send."""
    return np.count_nonzero(TRAIN[WHO[t]])


# --- the rounds -------------------------------------------------------------------------------------

def test_fedproto_round(play):
    """Catches: Eq. 3 over other clients, prototypes a round old, a class lost, an unknown class predicted."""
    story = play("fedproto")
    prototypes, known = np.zeros((C, D)), np.zeros(C, bool)
    for t, seen in story.rounds.items():
        for given in seen.given.values():
            near(given[0][known], prototypes[known])
            assert given[1].tolist() == known.tolist()
        down = len(WHO[t]) * known.sum() * D
        for c, average in class_averages(story, t).items():
            prototypes[c], known[c] = average, True
        check_traffic(story, t, number_of_classes(t) * (D + 1), down)
        check_personal(story, t, prototypes, torch.tensor(known))
    assert known.tolist() == [True, True, True, True, True, False]


@pytest.mark.parametrize("projection, scale", [("mlp", 1), ("linear", 1), ("none", 20)])
def test_fedsa_round(projection, scale, play):
    """Catches: Eqs. 3, 10 over other clients or classes, anchors a round old or not by --seed, absent ones lost."""
    story = play("fedsa", f"--alpha 0.7 --projection {projection}", scale=scale)  # 20: absent classes are nearer
    with common.seeded(3, "anchors"):
        anchors = fedsa.make_anchors(C, D, projection).numpy().astype(float)
    for t, seen in story.rounds.items():
        for given in seen.given.values():
            near(given[0], anchors)
        for c, average in class_averages(story, t).items():
            anchors[c] = 0.7 * anchors[c] + 0.3 * average
        check_traffic(story, t, number_of_classes(t) * (D + 1), len(WHO[t]) * C * D)
        check_personal(story, t, anchors, name="anchor")


@pytest.mark.parametrize("words", ["", "--margin-rule nearest --tau 1.5", "--no-mlp"])
def test_fedtgp_round(words, play):
    """Catches: other uploads, a server begun anew or not by --seed, not all prototypes sent, --no-mlp."""
    story = play("fedtgp", words + " --lr 0.05 --server-epochs 3 --batch-size 4")
    with common.seeded(3, "server"):
        net = fedtgp.GlobalPrototypes(C, D, "no-mlp" in words)
    prototypes = net().detach()
    for t, seen in story.rounds.items():
        for given in seen.given.values():
            near(given[0], prototypes)
        local = torch.stack([seen.sent[i].prototypes for i in WHO[t]])
        owned = torch.stack([seen.sent[i].owned for i in WHO[t]])
        margin = fedtgp.server_margin(local, owned, story.args)
        prototypes, losses = fedtgp.server_update(net, local, owned, margin, t, story.args)
        row = story.rows[t]
        near([row["margin"], row["server_loss"], row["last_batch_loss"]], [margin, losses.mean(), losses[-1]])
        check_traffic(story, t, number_of_classes(t) * D, len(WHO[t]) * C * D)
        check_personal(story, t, prototypes.tolist())


def test_fedlsa_round(play):
    """Catches: anchors by an old classifier, begun anew or not by --seed; unweighted averages; old weights."""
    story = play("fedlsa", "--alpha 0.3 --tau 0.4 --lr 0.3 --momentum 0.8 --server-steps 3 --lam 0.5")
    model, size = story.rounds[1].models[0], common.model_size(story.net)
    with common.seeded(3, "server"):
        anchor_net = fedlsa.AnchorNet(C, story.net.projector.in_features, D)
    for t, seen in story.rounds.items():
        story.net.load_state_dict(model)
        anchors, loss = fedlsa.server_update(anchor_net, story.net.classifier, story.args)
        near([story.rows[t]["server_loss"], story.rows[t]["nearest_cosine"]], [loss, fedlsa.nearest_cosine(anchors)])
        for i in WHO[t]:
            near(seen.given[i][0], anchors)
            same(seen.before[i], model)
        model = average_model(story, t)
        check_traffic(story, t, len(WHO[t]) * size, len(WHO[t]) * (size + C * D))
        check_global(story, t, model)


@pytest.mark.parametrize("words", ["", "--uniform-weights", "--lam-contra 0 --lam-corr 1", "--lam-corr 0"])
def test_fedplcc_round(words, play):
    """Catches: clusters of another round, sizes left out, unweighted averages, old weights, G of another round."""
    story = play("fedplcc", words)
    model, size = story.rounds[1].models[0], common.model_size(story.net)
    prototypes = fedplcc.Prototypes(*fedplcc.no_prototypes(D, "cpu"))
    for t, seen in story.rounds.items():
        for i in WHO[t]:
            same(seen.before[i], model)
            for got, want in zip(seen.given[i][0], prototypes, strict=True):
                near(got, want)
        down = len(WHO[t]) * (size + len(prototypes.vectors) * (D + 1))
        up = len(WHO[t]) * size + 3 * number_of_classes(t) * (D + 1)
        prototypes = fedplcc.global_prototypes([seen.sent[i].clusters for i in WHO[t]], "uniform" in words)
        model = average_model(story, t)
        assert story.rows[t]["prototypes"] == len(prototypes.vectors)
        check_traffic(story, t, up, down)
        check_global(story, t, model)


def anchors_of_round(story, t, models, anchors, uniform):
    """FedFM Eqs. 8 and 9 under these models {id: model} -> anchors, and how many floats the participants send."""
    means, counts = [], []
    for i in WHO[t]:
        story.net.load_state_dict(models[i])
        of_client = common.class_means(story.net, story.clients[i].train)
        means.append(of_client[0])
        counts.append(of_client[1])
    classes = sum(len(story.clients[i].train.y.unique()) for i in WHO[t])
    sent = len(WHO[t]) * C * D if uniform else classes * (D + 1)
    aggregate = "uniform" if uniform else "weighted"
    return fedfm.new_anchors(torch.stack(means), torch.stack(counts), anchors, aggregate), sent


def no_anchors():
    return fedfm.Anchors(torch.zeros(C, D), torch.zeros(C, dtype=torch.bool))


def check_anchors(seen, want):
    """All participants were given these, or None."""
    for given in seen.given.values():
        if want is None:
            assert given[0] is None
        else:
            near(given[0].vectors, want.vectors)
            assert given[0].known.tolist() == want.known.tolist()


@pytest.mark.parametrize("aggregate, warmup", [("weighted", 0), ("uniform", 0), ("weighted", 2)])
def test_fedfm_round(aggregate, warmup, play):
    """Catches: anchors by local models, a round old, of all clients; another warm-up; validation on participants."""
    story = play("fedfm", f"--aggregate {aggregate} --warmup {warmup} --validation 0.25")
    model, size, anchors = story.rounds[1].models[0], common.model_size(story.net), no_anchors()
    for t, seen in story.rounds.items():
        up = down = len(WHO[t]) * size
        if t > warmup:
            anchors, sent = anchors_of_round(story, t, {i: model for i in WHO[t]}, anchors, aggregate == "uniform")
            up += sent
            down += len(WHO[t]) * anchors.known.sum() * D
        check_anchors(seen, anchors if t > warmup else None)
        for i in WHO[t]:
            same(seen.before[i], model)
        model = average_model(story, t)
        check_traffic(story, t, up, down)
        check_global(story, t, model)
        validation = [common.accuracy(story.net, client.val) for client in story.clients]  # check_global loaded it
        assert story.rows[t]["acc_validation"] == pytest.approx(np.mean(validation))


@pytest.mark.parametrize("words", ["--model-every 1 --warmup 2", "--model-every 2 --warmup 0",
                                   "--model-every 2 --warmup 2 --aggregate uniform", "--model-every 3 --warmup 0",
                                   "--model-every 2 --warmup 0 --lam 0"])
def test_fedfm_lite_round(words, play):
    """Catches: anchors of the global model or of another round; models that travel in other rounds, or do not rest."""
    story = play("fedfm", f"--lite --validation 0 {words}")
    every, warmup, uniform = story.args.model_every, story.args.warmup, "uniform" in words
    model, size, anchors = story.rounds[1].models[0], common.model_size(story.net), no_anchors()
    for t, seen in story.rounds.items():
        up, down = 0, len(WHO[t]) * anchors.known.sum() * D
        check_anchors(seen, anchors if anchors.known.any() else None)
        if every == 1 or t % every == 1:
            own = {client.id: model for client in story.clients}  # all of them download
            down += K * size
        for i in WHO[t]:
            same(seen.before[i], own[i])
            own[i] = seen.after[i]
        if t % every == 0 or t == 5:
            model = average_model(story, t)
            up += len(WHO[t]) * size
        if story.args.lam > 0 and warmup <= t < 5:  # after the last round nobody would use them
            anchors, sent = anchors_of_round(story, t, own, anchors, uniform)
            up += sent
        check_traffic(story, t, up, down)
        check_global(story, t, model)
        assert "acc_validation" not in story.rows[t]


FEDAVG = [("fedlsa", "--lam 0"), ("fedlsa", "--lam 0 --no-sphere"), ("fedplcc", "--lam-contra 0 --lam-corr 0"),
          ("fedplcc", "--lam-contra 0"), ("fedfm", "--lam 0 --validation 0"), ("fedfm", "--warmup 9 --validation 0")]


@pytest.mark.parametrize("script, words", FEDAVG)
def test_fedavg_round(script, words, play):
    """Catches: more than models that travels where the terms are off, unweighted averages, a server that trains."""
    story = play(script, words, rounds=2)
    model, size = story.rounds[1].models[0], common.model_size(story.net)
    for t, seen in story.rounds.items():
        for i in WHO[t]:
            same(seen.before[i], model)
            if script == "fedfm":
                assert seen.given[i] == [None]
            if script == "fedplcc":
                assert len(seen.given[i][0].vectors) == 0
        model = average_model(story, t)
        check_traffic(story, t, len(WHO[t]) * size, len(WHO[t]) * size)
        check_global(story, t, model)
    assert not {"server_loss", "nearest_cosine"} & story.rows[1].keys()


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist"])
def test_fedfm_normalises_as_the_data_set_wants(name, play):
    """Catches: CIFAR's channels brought to [-1, 1], or those of other data sets by CIFAR's means."""
    net = play("fedfm", f"--dataset {name} --no-small-stem --validation 0", rounds=1).net
    mean, std = fedfm.NORMALISATION["other" if name == "mnist" else name]
    assert net.mean.flatten().tolist() == pytest.approx(mean)
    assert net.std.flatten().tolist() == pytest.approx(std)


def test_the_best_round_is_picked_on_validation_images():
    """Catches: the round that is best on test images, or the last."""
    log = {"round": np.array([1, 2, 3]), "acc_test": np.array([70.0, 50.0, 60.0])}
    assert common.best_and_final(log, "test") == (70, 1, 60)
    log["acc_validation"] = np.array([40.0, 90.0, 80.0])
    assert common.best_and_final(log, "test") == (50, 2, 60)


# --- participants, workers --------------------------------------------------------------------------

@pytest.mark.parametrize("K, share, size", [(4, 0.7, 3), (10, 0.33, 3), (20, 0.33, 7), (20, 0.02, 1), (7, 1.0, 7)])
def test_number_of_participants(K, share, size):
    """Catches: rounded down, rounded up, nobody, one twice."""
    chosen = common.participants(range(K), 1, SimpleNamespace(seed=0, participation=share))
    assert len(chosen) == len(set(chosen)) == size


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_give_results_in_the_clients_order(workers):
    """Catches: results in the order in which clients end (models weighted by others' sizes), gradients that stay."""
    clients, meeting = [], threading.Barrier(workers)
    for i, n in enumerate((3, 9, 5, 7)):
        clients.append(common.Client(i, common.Images(None, torch.zeros(n)), net=torch.nn.Linear(1, 1)))

    def update(client, number):
        meeting.wait(timeout=60)  # for so many clients at the same time
        client.net(torch.ones(1)).backward()
        return client.id + number
    assert common.for_each_client(update, clients, 10, workers=workers) == [10, 11, 12, 13]
    assert all(client.net.weight.grad is None for client in clients)


def test_workers_are_the_cores_that_the_process_may_use(monkeypatch):
    """Catches: 64 threads for a job that has two cores of a large machine; an error where a system does not tell."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5}, raising=False)
    assert common.cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    assert common.cores() == 64


# --- a client's training ----------------------------------------------------------------------------

def client_with(net, y, id=0):
    x = torch.randint(256, (len(y), 3, 2, 2), generator=torch.Generator().manual_seed(0)).byte()
    return common.Client(id, common.Images(x, torch.tensor(y)), net=net)


@every_script
def test_client_update(script, monkeypatch):
    """Catches: a flag ignored, momentum kept, eval mode, other batches, other class means or models sent."""
    module = __import__(script)
    torch.manual_seed(0)
    extractor = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 4), torch.nn.BatchNorm1d(4))
    net = common.Net(extractor, torch.nn.Linear(4, 3), 4, 3)
    again, client = copy.deepcopy(net), client_with(net, [0, 1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 0, 0], id=2)
    p, known, passed = torch.rand(3, 4), torch.ones(3) > 0, []
    given = (p, known) if script == "fedproto" else (p,)

    def loss_of(net, x, y, *rest):
        passed.append(rest)
        return F.cross_entropy(net(x), y)
    monkeypatch.setattr(module, "local_loss", loss_of)
    args = SimpleNamespace(seed=0, local_epochs=2, batch_size=5, batches="full", lr=0.1, momentum=0.9,
                           weight_decay=0.01, augment=False, prox=0.8, model="cnn4")
    for t in (1, 2):
        net.eval()
        upload = module.client_update(client, *given, t, args)

        again.train()
        start, speeds, losses = copied(again), {}, []
        for x, y in common.minibatches(client, t, args):
            loss = F.cross_entropy(again(x), y)
            if script == "fedfm":
                for name, weight in again.named_parameters():
                    loss = loss + 0.8 / 2 * (weight - start[name]).square().sum()
            sgd_step(again, loss, speeds, lr=0.1, momentum=0.9, decay=0.01)
            losses.append(loss.item())
        assert len(losses) == 4
        same(copied(net), copied(again))
        assert upload.loss.item() == pytest.approx(np.mean(losses), rel=1e-5)
        if script in GLOBAL:
            same(upload.model, copied(again))
        if script == "fedplcc":
            for got, want in zip(upload.clusters, fedplcc.local_clusters(again, client.train), strict=True):
                near(got, want)
        if script in PERSONAL:
            means, counts = common.class_means(again, client.train)
            near(upload.prototypes, means)
            near(upload[1], counts > 0 if script == "fedtgp" else counts)
    for rest in passed:
        assert [value is want for value, want in zip(rest, given)] == [True] * len(given) and rest[-1] is args


# --- who has which images ---------------------------------------------------------------------------

PARTITIONS = ["iid", "dirichlet --beta 5", "missing --missing 1", "pathological --classes-per-client 3",
              "dominant --dominant-share 0.5", "domain --domain-clients a:2,b:1 --domain-fraction 0.4",
              "domain --domain-clients a:2,b:1 --images-per-class 9"]


def names(x):
    """An image's identity: its pixels."""
    return [image.numpy().tobytes() for image in x]


@pytest.mark.parametrize("words", PARTITIONS)
@pytest.mark.parametrize("script, share", [("fedproto", 0.25), ("fedlsa", 0.0), ("fedfm", 0.25)])
def test_no_image_is_where_it_must_not_be(script, share, words):
    """Catches: an image held twice, training on held-out images, another label or share, two clients with one model."""
    data = small_dataset(np.array([[20] * C, [14] * C]), np.array([[7] * C, [9] * C]))._replace(domains=["a", "b"])
    if "domain" not in words:
        words += " --clients 3"
    args = arguments(script, "--device cpu --model cnn4 --partition", words)
    if script in PERSONAL:
        clients, tests = common.make_clients(data, args), {}
    else:
        clients, tests = common.make_federation(data, common.build_net(data, args), args, share)

    label_of = dict(zip(names(data.x), data.y.tolist()))
    assert len(label_of) == len(data.y)  # images can be told apart
    everything = list(tests.values())
    for client in clients:
        held = client.test or client.val
        assert len(held.y) == math.floor(share * (len(client.train.y) + len(held.y)) + 1e-9)
        everything += [client.train, held]
    seen = []
    for images in everything:
        assert [label_of[name] for name in names(images.x)] == images.y.tolist()
        seen += names(images.x)
    assert len(seen) == len(set(seen))
    if words.startswith("iid"):
        assert len(seen) == len(data.y)  # with personal models also the data set's test images: the papers divide all
    if tests:
        of_server = torch.cat([images.x for images in tests.values()])
        assert set(names(of_server)) == set(names(data.x[data.test]))

    weights = [p.data_ptr() for client in clients for p in client.net.parameters()]
    assert len(clients) == 3 and len(set(weights)) == len(weights)
    assert [client.domain for client in clients] == (["a", "a", "b"] if "domain" in words else ["", "", ""])
