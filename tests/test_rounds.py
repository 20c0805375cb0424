"""The rounds of the six scripts: `main` runs as it is on a few small images, and the tests recompute what clients are
given, what the server makes of their uploads, what travels and what is tested. Below: workers, a client's training, and
which images clients and server have."""

import copy
import functools
import json
import math
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import common, fedfm, fedlsa, fedplcc, fedproto, fedsa, fedtgp
from conftest import GLOBAL, PERSONAL, arguments, checkpoint, every_script

K, C, D = 5, 6, 8
# With this seed some class is at two participants in each round, and from round 2 on a class of an earlier one at none.
FLAGS = ("--partition pathological --clients 5 --classes-per-client 2 --participation 0.6 --model cnn4 --image-size 16 "
         "--feature-dim 8 --local-epochs 1 --batch-size 50 --lr 0.1 --seed 4 --checkpoint-every 0 "
         "--no-plots")
near = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5, check_dtype=False)


def small_dataset():
    """16 images of each class in each of two domains, four of them test images. An image's first pixel is its number."""
    x = torch.randint(256, (32 * C, 3, 16, 16), generator=torch.Generator().manual_seed(0)).byte()
    n = torch.arange(32 * C)
    x[:, 0, 0, 0] = n
    return common.Dataset(x, n % C, n // C % 2, n // C // 2 % 4 == 3, list("012345"), ["b", "a"])


def weights(net):
    return copy.deepcopy(dict(net.state_dict()))


@pytest.fixture
def play(run, monkeypatch):
    """play(script, flags) -> its rounds. Each has the participants, what they were given and sent, what was tested, and
    the log's row."""
    clustered, drawn = [], {}
    # both take longer than a run here
    monkeypatch.setattr(fedfm, "print_cluster_quality", lambda net, *_: clustered.append(weights(net)))

    def go(script, flags="", rounds=4):
        module, story = __import__(script), []
        monkeypatch.setattr(module, "draw_pictures", lambda *_, **given: drawn.update(given))
        evaluate = "evaluate_personal" if script in PERSONAL else "evaluate_global"
        test = getattr(module, evaluate)

        def for_each_client(function, chosen, *given):
            before = {client.id: weights(client.net) for client in chosen}
            replies = common.for_each_client(function, chosen, *given)
            if function is module.client_update:  # not FedFM's class means
                *given, t, args = copy.deepcopy(given)
                drawn_in = t - (t - 1) % args.model_every if script == "fedfm" else t
                assert [client.id for client in chosen] == common.participants(range(K), drawn_in, args)
                story.append(SimpleNamespace(chosen=chosen, given=tuple(given), args=args, before=before,
                                             sent=copy.deepcopy(replies)))
            return replies

        def evaluated(models, vectors, t, args, **more):
            now = story[-1]
            now.tested, now.vectors, now.has_prototype = copy.deepcopy((models, vectors, more.get("has_prototype")))
            now.scores = test(models, vectors, t, args, **more)
            return now.scores

        with monkeypatch.context() as patch:
            patch.setattr(module, "load_dataset", lambda args: small_dataset())
            patch.setattr(module, "for_each_client", for_each_client)
            patch.setattr(module, evaluate, evaluated)
            rows = run(script, FLAGS, "--rounds", rounds, flags).rows
        if script == "fedfm":
            near(clustered.pop(), weights(story[-1].tested))
        if script in ("fedtgp", "fedsa"):
            near(drawn["prototypes"], story[-1].vectors)
        if script in ("fedlsa", "fedplcc"):
            assert not any(len(client.val.y) for client in story[0].chosen)  # nothing is held back
        for now, row in zip(story, rows, strict=True):
            now.row, now.traffic = row, (row["up"], row["down"])
            assert row["loss"] == pytest.approx(np.mean([upload.loss for upload in now.sent]))
            for name, score in now.scores.items():
                assert row[f"acc_{name}"] == pytest.approx(score)
        return story
    return go


def check_tested(now, vectors, has_prototype=None):
    """The round tests all clients' own models, with these vectors."""
    assert [client.id for client in now.tested] == list(range(K))
    near((now.vectors, now.has_prototype), (vectors, has_prototype))


def average_model(now):
    """Σ_k N_k w_k / Σ_k N_k over the participants, N_k the number of training images -> weights."""
    return common.average([upload.model for upload in now.sent], [len(client.train.y) for client in now.chosen])


def check_models(now, model):
    """Participants begin with this model, and the average of what they send is tested -> its weights."""
    for before in now.before.values():
        near(before, model)
    near(weights(now.tested), average_model(now))
    return average_model(now)


def classes_sent(now):
    """Σ_i C_i: how many class means the participants send."""
    return sum(len(client.train.y.unique()) for client in now.chosen)


def stacked(now, name):
    """What the participants sent under this name -> (m, ...)."""
    return torch.stack([getattr(upload, name) for upload in now.sent])


# --- the rounds -------------------------------------------------------------------------------------

def test_fedproto_round(play):
    """Eq. 3 averages the participants' prototypes; an absent class keeps its own."""
    prototypes, has_prototype = torch.zeros(C, D), torch.zeros(C, dtype=torch.bool)
    for now in play("fedproto"):
        near(now.given, (prototypes, has_prototype))
        down = len(now.chosen) * has_prototype.sum() * D
        averages, uploaded = fedproto.weighted_mean(stacked(now, "prototypes"), stacked(now, "counts"))
        prototypes[uploaded] = averages[uploaded]
        has_prototype |= uploaded
        assert now.traffic == (classes_sent(now) * (D + 1), down)
        check_tested(now, prototypes, has_prototype)


@pytest.mark.parametrize("script, flags", [("fedproto", ""), ("fedplcc", ""), ("fedfm", "--warmup 0 --lam 1")])
def test_stars_have_the_classes_of_their_prototypes(script, flags, run, monkeypatch):
    """The zeros of a class that nobody has had are no prototype."""
    module, drawn = __import__(script), {}
    monkeypatch.setattr(module, "load_dataset", lambda args: small_dataset())
    monkeypatch.setattr(module, "draw_pictures", lambda *_, **given: drawn.update(given))
    folder = run(script, FLAGS, "--rounds 1 --participation 0.25 --checkpoint-every 1", flags).folder
    if script == "fedplcc":
        vectors, labels, _ = checkpoint(folder)["state"]
    else:
        prototypes, has_prototype = checkpoint(folder)["state"]
        assert 0 < has_prototype.sum() < C
        vectors, labels = prototypes[has_prototype], has_prototype.nonzero().flatten()
    assert drawn["labels"].tolist() == labels.tolist()
    assert drawn["prototypes"].equal(vectors)


def test_fedsa_round(play):
    """The anchors move by Eq. 10 toward the participants' averages. The seed draws them."""
    with common.seeded(4, "anchors"):
        anchors = fedsa.make_anchors(C, D, "linear")
    for now in play("fedsa", "--alpha 0.7 --projection linear"):
        near(now.given, (anchors,))
        averages, uploaded = fedsa.weighted_mean(stacked(now, "prototypes"), stacked(now, "counts"))
        anchors[uploaded] = 0.7 * anchors[uploaded] + 0.3 * averages[uploaded]
        assert now.traffic == (classes_sent(now) * (D + 1), 3 * C * D)
        check_tested(now, anchors)


@pytest.mark.parametrize("flags", ["", "--no-mlp"])
def test_fedtgp_round(flags, play):
    """The seed draws the server's net, which trains on from round to round."""
    with common.seeded(4, "server"):
        net = fedtgp.PrototypeNet(C, D, flags == "--no-mlp")
    prototypes = net().detach()
    for t, now in enumerate(play("fedtgp", flags + " --server-epochs 3 --batch-size 4"), 1):
        near(now.given, (prototypes,))
        local = stacked(now, "prototypes")
        owned = stacked(now, "owned")
        margin = fedtgp.server_margin(local, owned, now.args)
        prototypes, loss = fedtgp.server_update(net, local, owned, margin, t, now.args)
        near([now.row["margin"], now.row["server_loss"]], [margin.item(), loss.item()])
        assert now.traffic == (classes_sent(now) * D, 3 * C * D)
        check_tested(now, prototypes)


def test_fedlsa_round(play):
    """The seed draws the anchors' net, which trains on, against the newest classifier."""
    story = play("fedlsa", "--alpha 0.3 --tau 0.4 --server-steps 3")
    model, *_ = story[0].before.values()
    net = story[0].chosen[0].net
    with common.seeded(4, "server"):
        anchor_net = fedlsa.AnchorNet(C, net.extractor[-1].in_features, D)
    size = common.model_size(net)
    for now in story:
        net.load_state_dict(model)
        anchors, loss = fedlsa.server_update(anchor_net, net.classifier, now.args)
        near(now.row["server_loss"], loss.item())
        near(now.given, (anchors,))
        model = check_models(now, model)
        assert now.traffic == (3 * size, 3 * (size + C * D))


@pytest.mark.parametrize("flags", ["--lam-contra 0 --lam-corr 1 --weighted-means", "--lam-corr 0 --uniform-weights"])
def test_fedplcc_round(flags, play):
    """Participants get the prototypes of the last round's clusters."""
    story = play("fedplcc", flags)
    model, *_ = story[0].before.values()
    size, prototypes = common.model_size(story[0].tested), fedplcc.no_prototypes(D, "cpu")
    for now in story:
        near(now.given, (prototypes,))
        model = check_models(now, model)
        down = 3 * (size + len(prototypes.vectors) * (D + 1))
        prototypes = fedplcc.global_prototypes(now.sent, now.args)
        assert now.row["prototypes"] == len(prototypes.vectors)
        assert now.traffic == (3 * size + sum(len(upload.clusters.vectors) for upload in now.sent) * (D + 1), down)


@pytest.mark.parametrize("words, want", [("--lam-contra 2", 20), ("--lam-contra 2 --lam-corr 0", 0)])
def test_fedplcc_eq4_lambda_2(words, want, run, monkeypatch):
    """λ2 is 10 λ1 unless it is typed, and args.json has the value that was used."""
    monkeypatch.setattr(fedplcc, "load_dataset", lambda args: small_dataset())
    folder = run("fedplcc", FLAGS, "--rounds 1", words).folder
    assert json.loads((folder / "args.json").read_text())["lam_corr"] == want


def anchors_by(models, now, anchors):
    """FedFM Eqs. 8 and 9 under these models {id: weights} -> anchors, and how many floats the participants send."""
    net, replies = now.chosen[0].net, []
    for client in now.chosen:
        net.load_state_dict(models[client.id])
        replies.append(common.class_means(net, client.train))
    means, counts = zip(*replies)
    floats = classes_sent(now) * (D + 1) if now.args.aggregate == "weighted" else 3 * C * D
    return fedfm.new_anchors(torch.stack(means), torch.stack(counts), anchors, now.args.aggregate), floats


NO_ANCHORS = fedfm.Anchors(torch.zeros(C, D), torch.zeros(C, dtype=torch.bool))


@pytest.mark.parametrize("flags", ["--warmup 0 --aggregate uniform", "--warmup 1"])
def test_fedfm_round(flags, play, monkeypatch):
    """Participants make the anchors with this round's global model. All clients validate it on a quarter of their
    images."""
    validated = []

    def evaluate_validation(net, clients, t, args):
        validated.append(weights(net))
        assert [client.id for client in clients] == list(range(K))
        for client in clients:
            assert len(client.val.y) == pytest.approx(len(client.train.y) / 3, abs=1)
        return {"validation": 7}
    monkeypatch.setattr(fedfm, "evaluate_validation", evaluate_validation)
    story = play("fedfm", flags + " --validation 0.25 --lam 1")
    model, *_ = story[0].before.values()
    size, anchors = common.model_size(story[0].tested), NO_ANCHORS
    for t, now in enumerate(story, 1):
        up = down = 3 * size
        if t > now.args.warmup:
            anchors, floats = anchors_by(dict.fromkeys(range(K), model), now, anchors)
            up += floats
            down += 3 * anchors.has_anchor.sum() * D
        near(now.given, (anchors if t > now.args.warmup else None,))
        model = check_models(now, model)
        assert now.traffic == (up, down)
        near(validated[t - 1], model)
        assert now.row["acc_validation"] == 7


@pytest.mark.parametrize("flags, downloads, uploads", [
    ("--model-every 1 --warmup 2", (1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 6)),
    ("--model-every 3 --warmup 0 --aggregate uniform", (1, 4), (3, 6)),
    ("--model-every 2 --warmup 0 --lam 0", (1, 3, 5), (2, 4, 6)),
])
def test_fedfm_lite_round(flags, downloads, uploads, play):
    """The clients' own models make the next anchors. Models travel in these rounds only."""
    story = play("fedfm", "--lite --validation 0 --lam 1 " + flags, rounds=6)
    model, *_ = story[0].before.values()
    size, anchors = common.model_size(story[0].tested), NO_ANCHORS
    for t, now in enumerate(story, 1):
        up, down = 0, 3 * anchors.has_anchor.sum() * D
        near(now.given, (anchors if anchors.has_anchor.any() else None,))
        if t in downloads:
            own = {client.id: model for client in now.chosen}  # they stay until the next download
            down += 3 * size
        for client, upload in zip(now.chosen, now.sent):
            near(now.before[client.id], own[client.id])
            own[client.id] = upload.model
        if t in uploads:
            model = average_model(now)
            up += 3 * size
        near(weights(now.tested), model)
        if now.args.lam > 0 and t >= now.args.warmup:
            anchors, floats = anchors_by(own, now, anchors)
            up += floats
        assert now.traffic == (up, down)


@pytest.mark.parametrize("words, no_matching", [
    ("--rounds 3 --warmup 3", True), ("--rounds 3 --warmup 2", False), ("--rounds 3 --warmup 3 --lam 0", False),
    ("--rounds 1 --warmup 0", False), ("--rounds 1 --warmup 0 --lite", True),
])
def test_fedfm_says_that_no_round_matches(words, no_matching, capsys):
    fedfm.check(arguments("fedfm", words))
    assert ("every round is FedAvg" in capsys.readouterr().out) == no_matching


@pytest.mark.parametrize("tested", [[0, 1, 6], [0, 1, 2, 9, 10, 11]])
def test_fedfm_with_few_test_images(tested, run, monkeypatch):
    """Fewer test images than classes, or one of each: the last lines, then a warning, and no line from scikit-learn."""
    pytest.importorskip("sklearn")
    data = small_dataset()
    data.test[:] = False
    data.test[tested] = True
    monkeypatch.setattr(fedfm, "load_dataset", lambda args: data)
    one = run("fedfm", FLAGS, "--rounds 1")
    assert "test accuracy: final" in one.text and "NMI" not in one.text
    assert one.warnings == (f"no NMI and silhouette of the features: ValueError: {len(tested)} test images are too few "
                            f"for {C} classes\n")


@pytest.mark.parametrize("script, flags", [("fedlsa", "--lam 0"), ("fedplcc", "--lam-contra 0 --lam-corr 0"),
                                           ("fedfm", "--lam 0"), ("fedfm", "--lam 1 --warmup 9")])
def test_fedavg_round(script, flags, play):
    """Only models travel, and the server does not train."""
    story = play(script, flags, rounds=2)
    model, *_ = story[0].before.values()
    for now in story:
        model = check_models(now, model)
        size = common.model_size(now.tested)
        assert now.traffic == (3 * size, 3 * size)
        assert "server_loss" not in now.row
        near(now.given, (None,))
        if script == "fedplcc":  # no time is spent on clustering
            assert all(upload.clusters is None for upload in now.sent)


@pytest.mark.parametrize("dataset, mean, std", [
    ("glyphs", [0.5], [0.5]),
    ("cifar10", [0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010]),
    ("cifar100", [0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]),
])
def test_fedfm_normalises_images_as_its_authors_do(dataset, mean, std, play):
    net = play("fedfm", f"--validation 0 --dataset {dataset}", rounds=1)[0].tested
    near((net.mean.flatten(), net.std.flatten()), (torch.tensor(mean), torch.tensor(std)))


# --- workers ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("workers, threads", [(1, 1), (4, 4), (0, 3)])
def test_workers_give_results_in_the_clients_order(workers, threads, monkeypatch):
    """Otherwise the average would weigh a model by another client's number of images. Gradients are freed."""
    monkeypatch.setattr(common, "cores", lambda: 3)
    clients, meeting = [], threading.Barrier(threads)
    for i, n in enumerate((3, 9, 5, 7, 2, 8, 6, 1, 4, 12, 11, 10)):
        clients.append(common.Client(i, common.Images(None, torch.zeros(n)), net=torch.nn.Linear(1, 1)))

    def update(client, number, args):
        meeting.wait(timeout=10)  # for so many clients at the same time
        client.net(torch.ones(1)).backward()
        return client.id + number
    args = SimpleNamespace(workers=workers, device="cpu")
    assert common.for_each_client(update, clients, 10, args) == list(range(10, 22))
    assert all(client.net.weight.grad is None for client in clients)


def test_workers_are_the_cores_that_the_process_may_use(monkeypatch):
    """A job with two of 64 cores gets two threads."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5}, raising=False)
    assert common.cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    assert common.cores() == 64


# --- a client's training ----------------------------------------------------------------------------

@every_script
def test_client_update(script, monkeypatch):
    """Training follows the flags: SGD in train mode, with its momentum empty at the start of a round."""
    module = __import__(script)
    extractor = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 4), torch.nn.BatchNorm1d(4))
    net = common.Net(extractor, torch.nn.Linear(4, 4), 4, 4)
    again = copy.deepcopy(net)
    y = torch.tensor([0, 1, 0, 1, 1, 0, 1, 1, 2, 0, 1, 0, 0])  # a single image of class 2 and none of class 3
    client = common.Client(2, common.Images(torch.randint(256, (13, 3, 2, 2)).byte(), y), net=net)
    args = SimpleNamespace(seed=0, local_epochs=2, batch_size=5, batches="full", lr=0.1, momentum=0.9,
                           weight_decay=0.01, augment=False, prox=0.8)
    given = [torch.rand(4, 4)]  # prototypes or anchors
    if script == "fedproto":
        given.append(torch.ones(4) > 0)  # has_prototype

    def local_loss(net, x, y, *rest):
        assert all(one is other for one, other in zip(rest, given)) and rest[-1] is args
        return F.cross_entropy(net(x), y)
    monkeypatch.setattr(module, "local_loss", local_loss)
    for t in (1, 2):
        net.eval()
        upload = module.client_update(client, *given, t, args)

        again.train()
        start, losses = weights(again), []
        optimizer = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        for x, y in common.minibatches(client, t, args):
            loss = F.cross_entropy(again(x), y)
            if script == "fedfm":
                loss += 0.8 / 2 * sum((w - start[name]).square().sum() for name, w in again.named_parameters())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        near(weights(net), weights(again))
        near(upload.loss.item(), np.mean(losses))
        if script in GLOBAL:
            near(upload.model, weights(again))
        if script == "fedplcc":
            near(upload.clusters, fedplcc.local_clusters(again, client.train))
        if script in PERSONAL:
            means, counts = common.class_means(again, client.train)
            near(upload[:2], (means, counts > 0 if script == "fedtgp" else counts))


# --- who has which images ---------------------------------------------------------------------------

@pytest.mark.parametrize("flags", ["iid", "dirichlet --beta 5", "domain --domain-fraction 0.4"])
@pytest.mark.parametrize("script, share", [("fedproto", 0.25), ("fedlsa", 0.0), ("fedfm", 0.25)])
def test_no_image_is_where_it_must_not_be(script, share, flags):
    """No image is held twice, nobody trains on held-out images, each client has its domain. There is one model for each
    client or, where they are copies, for each participant: hundreds would fill the memory."""
    data = small_dataset()
    args = arguments(script, "--device cpu --model cnn4 --clients 3 --participation 0.7 --partition", flags)
    if script in PERSONAL:
        clients, tests = common.make_clients(data, args), {}
        nets = [client.net for client in clients]
    else:
        clients, nets, tests = common.make_federation(data, common.build_net(data, args), args, share)

    parts, seen = list(tests.values()), []
    for client in clients:
        held = client.test if script in PERSONAL else client.val
        assert len(held.y) == math.floor(share * (len(client.train.y) + len(held.y)) + 1e-9)
        parts += [client.train, held]
    for part in parts:
        numbers = part.x[:, 0, 0, 0].long()
        assert data.y[numbers].equal(part.y)
        seen += numbers.tolist()
    assert len(seen) == len(set(seen))
    if flags.startswith("iid"):
        assert len(seen) == len(data.y)  # with personal models also the data set's test images: the papers divide all
    for name, part in tests.items():
        assert len(part.y) == 4 * C
        assert all(data.domains[data.domain[n]] == name for n in part.x[:, 0, 0, 0].long())
    parameters = [p.data_ptr() for net in nets for p in net.parameters()]
    assert len(clients) == 3 and len(set(parameters)) == len(parameters)
    assert len(nets) == (3 if script in PERSONAL else 2)
    assert [client.domain for client in clients] == (["b", "a", "b"] if "domain" in flags else ["", "", ""])
