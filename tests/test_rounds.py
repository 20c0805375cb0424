"""The rounds of the six scripts: what clients are given, what the server makes of their uploads, what
travels, which models change, on which images. `main` runs as it is; the clients' training is replaced by a
stand-in, or watched. The server's step is computed a second time, in float64, from the papers."""

import copy, itertools, math, os, re

import numpy as np
import pytest
import torch
import torchvision

import common, fedfm
from conftest import GLOBAL, PERSONAL, every_script, log
from reference import average_margin, euclidean, finch, mean, nearest_margins, weighted_mean

# ---- interface: all that these tests know of the inside, beside what clients are and hold (id, train, test, net
# with features and classifier), common.participants, common.minibatches and args

GIVEN = {"fedproto": ["prototypes", "known"], "fedtgp": ["prototypes"], "fedsa": ["anchors"],
         "fedlsa": ["anchors"], "fedplcc": ["prototypes"], "fedfm": ["anchors", "known"]}

def given(script, call):
    """What a call of client_update(client, ..., t, args) hands to the client -> {name: array}."""
    return as_arrays(script, call[1:-2])

def final_state(script, checkpoint):
    """What a run's checkpoint keeps for the next round, under the names of `given`."""
    state = checkpoint["state"]
    if script == "fedtgp":  # the server's network gives its prototypes
        state = (fedtgp_prototypes(server_weights(script, checkpoint)),)
    if script == "fedlsa":  # so do the anchors, on the sphere
        A = fedtgp_prototypes(server_weights(script, checkpoint))
        state = (A / A.norm(dim=1, keepdim=True),)
    if isinstance(state, torch.Tensor) or script == "fedplcc":
        state = (state,)
    return as_arrays(script, state)

def saved_model(script, checkpoint, name):
    """The state_dict of client number `name`'s model, of the global model "net" or of the server's module "server"."""
    modules = checkpoint["modules"]
    if name == "server":
        return modules[-1]
    if name == "net":
        return modules[0]
    return modules[int(name) + (script in GLOBAL)]

def as_arrays(script, values):
    if script == "fedplcc":
        vectors, classes, weights = values[0]
        return dict(vectors=array(vectors), classes=array(classes), weights=array(weights))
    found = dict(zip(GIVEN[script], map(array, values), strict=True))
    if "known" in found and "prototypes" in found:  # what stands in the row of an unknown class must not matter
        found["prototypes"] = found["prototypes"] * found["known"][:, None]
    return found

def make_upload(script, client, vectors, classes, sizes, C, loss):
    """What client_update returns: vectors (J, D) of classes (J,) that stand for sizes (J,) images."""
    module = __import__(script)
    if script in PERSONAL:
        prototypes, counts = torch.zeros(C, vectors.shape[1]), torch.zeros(C)
        prototypes[classes], counts[classes] = vectors, sizes.float()
        return module.Upload(prototypes, counts > 0 if script == "fedtgp" else counts, loss)
    if script == "fedplcc":
        prototypes = module.Clusters(vectors, classes, sizes.float())
        return module.Upload(client.net.state_dict(), prototypes, loss)
    return module.Upload(client.net.state_dict(), loss)

def read_upload(script, result):
    """The same backwards: what the real client_update returned -> {name: array}."""
    found = dict(loss=float(result[-1]))
    if script in PERSONAL:
        found |= dict(vectors=array(result[0]), counts=array(result[1]))
    elif script == "fedplcc":
        found |= dict(zip(("vectors", "classes", "sizes"), map(array, result[1])))
    if script in GLOBAL:
        found |= dict(state=copy.deepcopy(dict(result[0])))
    return found

class TinyResNet(torch.nn.Module):
    """In torchvision's place: 16 channels and one BatchNorm. With a whole ResNet tests only take longer."""

    def __init__(self, *_):
        super().__init__()
        self.conv1, self.bn1 = torch.nn.Conv2d(3, 16, 5, stride=3), torch.nn.BatchNorm2d(16)

    def forward(self, x):
        return self.bn1(self.conv1(x)).relu().mean((2, 3))

def replace(patch, script, data, update, who):
    """The data become `data`, client_update `update`, participants (if wanted) who(clients, t, args)."""
    patch.setattr(__import__(script), "load_dataset", lambda args: data)
    patch.setattr(torchvision.models, "ResNet", TinyResNet)
    patch.setattr("fedfm.cluster_quality", lambda *_: "", raising=False)        # takes longer than a run here
    patch.setattr(__import__(script), "client_update", update)
    if who:
        patch.setattr(__import__(script), "participants", who)

def picked(ended):
    """A global method's best accuracy, as main returns it, and the round that it prints -> (%, round)."""
    round_, = re.findall(r"best [\d.]+ % in round (\d+) \(picked on validation images\)", ended.text)
    return ended.results[0]["best by test"], int(round_)

def server_weights(script, checkpoint):
    """The server's trainable vectors, then weight and bias of each layer behind them, in float64."""
    return [value.double() for value in saved_model(script, checkpoint, "server").values()]

# ---- a small federation: its K clients are its domains, of unequal sizes and classes. Nobody has class 5; of
# WHO take part nobody has class 4 in round 1, class 3 in round 2, class 4 in rounds 3 and 5

TRAIN = [[8, 4, 0, 4, 0, 0], [0, 30, 17, 0, 0, 0], [10, 0, 14, 9, 0, 0], [5, 4, 9, 0, 12, 0]]
TEST = [[4, 9, 0, 8, 0, 1], [5, 2, 8, 1, 0, 0], [9, 1, 1, 4, 6, 2], [3, 0, 4, 4, 7, 1]]
K, C, D = 4, 6, 8
WHO = {1: [0, 2, 1], 2: [3, 1], 3: [0, 2], 4: [0, 1, 2, 3], 5: [2, 0]}
BY_DOMAIN = "--partition domain --clients 4 --domain-fraction 1"  # where a test names no other partition
WORDS = (f"--checkpoint-every 10 --model resnet4 --image-size 16 --feature-dim {D} "
         "--local-epochs 1 --batch-size 64 --workers 1 --no-plots --device cpu --rounds ")
METHOD = {"fedtgp": "--server-epochs 3", "fedlsa": "--server-steps 3", "fedfm": "--validation 0 --warmup 0"}

def array(value):
    kind = bool if value.dtype == torch.bool else float
    return np.array(value.detach().tolist(), kind).reshape(value.shape)

def dataset(train, test):
    """Images with patterns of their classes and domains, each with its own noise: no two are equal."""
    rng, classes, domains = np.random.default_rng(0), len(train[0]), len(train)
    patterns, tints = rng.normal(0, 40, (classes, 3, 16, 16)), rng.normal(0, 15, (domains, 3, 1, 1))
    rows = [(patterns[c] + tints[d] + rng.normal(0, 25, (3, 16, 16)), c, d, part)
            for part, table in enumerate((train, test)) for d, counts in enumerate(table)
            for c, n in enumerate(counts) for _ in range(n)]
    x, y, domain, part = zip(*(rows[i] for i in rng.permutation(len(rows))))
    x = torch.tensor(np.clip(np.array(x) + 128, 0, 255).astype(np.uint8))
    kinds, places = [f"class {c}" for c in range(classes)], [f"domain {d}" for d in range(domains)]
    return common.Dataset(x, torch.tensor(y), torch.tensor(domain), torch.tensor(part) > 0, kinds, places)

def names(x):
    """An image's identity: its pixels."""
    return [image.numpy().tobytes() for image in x.cpu().contiguous()]

def near(got, want, tolerance=1e-4):
    got, want = np.asarray(got, float), np.asarray(want, float)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)

def same(one, other, tolerance=1e-5):
    """Two models' weights and BatchNorm's statistics (not its integer counters)."""
    assert one.keys() == other.keys()
    for name in one:
        if one[name].is_floating_point():
            near(one[name], other[name], tolerance)

def copied(net):
    return copy.deepcopy(dict(net.state_dict()))

class Clients:
    """Stands in for a script's client_update. Records what each client is given and how its model is before
    and after. Without `real`, training adds noise to the model, and uploads are class means with noise
    (`shift`: and far away; `answer`: the model of round t answers class t - 1). With it, the real training is
    watched: which images its model sees. prepare(client, t) is called before."""

    def __init__(self, script, real=None, prepare=None, shift=0.0, answer=False):
        self.script, self.real, self.prepare, self.calls = script, real, prepare, []
        self.shift, self.answer = shift, answer

    def __call__(self, *call):
        client, t, args = call[0], call[-2], call[-1]
        if self.prepare:
            self.prepare(client, t)
        record = dict(t=t, id=client.id, client=client, args=args, given=given(self.script, call), seen=[],
                      before=copied(client.net))
        result = (self.watch if self.real else self.pretend)(record, call)
        record.update(after=copied(client.net), upload=read_upload(self.script, result))
        self.calls.append(record)
        client.net.train()  # so that whoever computes with it next has to call eval()
        return result

    def pretend(self, record, call):
        client, t, args = call[0], call[-2], call[-1]
        for _ in common.minibatches(client, t, args):  # as every training does
            pass
        rng = torch.Generator().manual_seed(1000 * t + client.id)
        for value in client.net.state_dict().values():
            if value.is_floating_point():
                value.mul_(1 + 0.3 * torch.rand(value.shape, generator=rng))
                value.add_(0.02 * torch.rand(value.shape, generator=rng))
        if self.answer:
            client.net.classifier.weight.data.zero_()
            client.net.classifier.bias.data = torch.eye(client.net.num_classes)[t - 1]
        z, y = features(client.net, client.net.state_dict(), client.train.x), client.train.y
        classes = y.unique()
        if self.script == "fedplcc":  # several clusters of a class
            classes = classes.repeat_interleave(2 + (classes + client.id) % 3)
        vectors = torch.stack([torch.tensor(z[(y == c).numpy()].mean(0)) for c in classes]).float()
        vectors += torch.randn(vectors.shape, generator=rng) + self.shift
        sizes = y.bincount(minlength=client.net.num_classes)[classes]
        if self.script == "fedplcc":
            sizes = torch.randint(1, 9, sizes.shape, generator=rng)
            if args.lam_contra == args.lam_corr == 0:  # FedAvg: nothing to send
                vectors, classes, sizes = vectors[:0], classes[:0], sizes[:0]
        record.update(vectors=array(vectors), classes=classes.tolist(), sizes=sizes.tolist())
        return make_upload(self.script, client, vectors, classes, sizes, client.net.num_classes,
                           torch.tensor(t + 0.25 * client.id ** 2))

    def watch(self, record, call):
        net = call[0].net
        features = type(net).features
        net.features = lambda x: record["seen"].append((net.training, names(x))) or features(net, x)
        try:
            return self.real(*call)
        finally:
            del net.features

def features(net, state, x):
    """Features by a copy of the model with this state, in eval mode -> (n, D) float64."""
    net = copy.deepcopy(net)
    net.load_state_dict(state)
    with torch.no_grad():
        return array(net.eval().features(x))

def guesses(net, state, z):
    net = copy.deepcopy(net)
    net.load_state_dict(state)
    with torch.no_grad():
        return net.classifier(torch.tensor(z).float()).argmax(1).tolist()

class Story:
    """A run: rounds[t], its clients' records by id; rows, its log; end, its checkpoint."""

    def __init__(self, script, ended, clients):
        self.script, self.rows = script, log(ended.folder)
        self.end = torch.load(ended.folder / "checkpoint.pt", weights_only=True)
        each = {t: [r for r in clients.calls if r["t"] == t] for t in range(1, len(self.rows) + 1)}
        self.rounds = {t: {r["id"]: r for r in records} for t, records in each.items()}
        self.order = {t: [r["id"] for r in records] for t, records in each.items()}
        self.clients = {r["id"]: r["client"] for r in clients.calls}
        self.start, self.args = clients.calls[0]["before"], clients.calls[0]["args"]
        self.net = copy.deepcopy(clients.calls[0]["client"].net)

    def after(self, t):
        """What the server has after round t, as the next round's clients are given it."""
        if t + 1 in self.rounds:
            return next(iter(self.rounds[t + 1].values()))["given"]
        return final_state(self.script, self.end)

@pytest.fixture
def play(run, monkeypatch):
    """Run a script on a small federation -> Story. who: {round: ids}, or None: whoever the script takes."""
    def go(script, words="", rounds=5, who=WHO, data=None, **options):
        module = __import__(script)
        real = options.pop("real", False)
        clients = Clients(script, module.client_update if real else None, **options)
        choose = who and (lambda everyone, t, args: [everyone[i] for i in who[t]])
        mine = np.array(TRAIN) > 0  # a personal method's clients get the test images, too
        data = data or dataset(TRAIN, (np.array(TEST) * (mine if script in PERSONAL else 1)).tolist())
        with monkeypatch.context() as patch:
            replace(patch, script, data, clients, choose)
            division = "" if "--partition" in words else BY_DOMAIN
            ended = run(script, WORDS, rounds, METHOD.get(script, ""), division, words)
        story = Story(script, ended, clients)
        story.ended, story.data = ended, data
        return story
    return go

# ---- the servers, from the papers

def class_means(net, state, data):
    """Class means by a model in eval mode -> {class: (mean, number of images)}."""
    z, y = features(net, state, data.x), data.y.tolist()
    owned = {c: [v for v, k in zip(z, y) if k == c] for c in sorted(set(y))}
    return {c: (weighted_mean(vs, [1] * len(vs)), len(vs)) for c, vs in owned.items()}

def average_model(records):
    """Σ_k N_k w_k / Σ_k N_k, N_k the number of training images."""
    records = list(records)
    sizes = [len(r["client"].train.y) for r in records]
    assert len(records) == 1 or len(set(sizes)) > 1
    return {name: sum(r["after"][name].double() * n for r, n in zip(records, sizes)) / sum(sizes)
            for name in records[0]["after"]}

def by_class(records):
    """The pretended uploads of a round -> {class: [(vector, size), ...]}."""
    found = {}
    for r in records:
        for vector, c, size in zip(r["vectors"], r["classes"], r["sizes"]):
            found.setdefault(c, []).append((vector, size))
    return found

def weights_of_model(story):
    """Numbers of a model that travel: its trainable weights."""
    return sum(np.prod(p.shape, dtype=int) for p in story.net.parameters())

def personal_scores(story, t, prototypes, known):
    """Accuracy in % after round t of all clients' models, pooled over their test images of unequal
    numbers."""
    right, total, means = np.zeros(2), 0, []
    for i, client in story.clients.items():
        past = [story.rounds[s][i]["after"] for s in range(1, t + 1) if i in story.rounds[s]]
        state = past[-1] if past else story.start
        z, y = features(story.net, state, client.test.x), client.test.y.tolist()
        nearest = [min((c for c in range(len(known)) if known[c]), key=lambda c: euclidean(v, prototypes[c]))
                   for v in z]
        hits = [sum(a == b for a, b in zip(guess, y)) for guess in (guesses(story.net, state, z), nearest)]
        right, total, means = right + hits, total + len(y), [*means, np.array(hits) / len(y)]
    assert len({len(client.test.y) for client in story.clients.values()}) > 1
    return 100 * right / total, 100 * np.mean(means, 0)

def check_personal(story, t, prototypes, known):
    """The log's accuracies of round t; models of others rest."""
    (classifier, prototype), _ = personal_scores(story, t, prototypes, known)
    row = story.rows[t - 1]
    by_vector = row["acc_anchor"] if "acc_anchor" in row else row["acc_prototype"]
    near([row["acc_classifier"], by_vector], [classifier, prototype])
    for i, record in story.rounds[t].items():
        past = [story.rounds[s][i]["after"] for s in range(1, t) if i in story.rounds[s]]
        same(record["before"], past[-1] if past else story.start, 0)
    if t == len(story.rounds):
        for i in story.clients:
            last = [story.rounds[s][i]["after"] for s in range(1, t + 1) if i in story.rounds[s]][-1]
            same(saved_model(story.script, story.end, i), last, 0)

def check_global(story, t, state):
    """The log's accuracies of round t are those of this model, a mean over domains, on the server's images;
    a model in training at its start is this one."""
    shares = []
    for d, domain in enumerate(story.data.domains):
        held = story.data.test & (story.data.domain == d)
        guess = guesses(story.net, state, features(story.net, state, story.data.x[held]))
        shares.append(100 * np.mean([a == b for a, b in zip(guess, story.data.y[held].tolist())]))
        near(story.rows[t - 1][f"acc_{domain}"], shares[-1])
    near(story.rows[t - 1]["acc_test"], np.mean(shares))
    if t == len(story.rounds):
        same(saved_model(story.script, story.end, "net"), state)

def check_log(story, t, up, down, who=WHO):
    """Who took part, the mean of their losses, the traffic."""
    row, chosen = story.rows[t - 1], who[t]
    assert sorted(story.order[t]) == sorted(chosen)
    assert row["loss"] == pytest.approx(np.mean([r["upload"]["loss"] for r in story.rounds[t].values()]))
    assert (row["up"], row["down"]) == (up, down)

def check_given(story, t, **want):
    """All clients of round t are given this."""
    for record in story.rounds[t].values():
        for name, value in want.items():
            near(record["given"][name], value)

def check_after(story, **want):
    for name, value in want.items():
        near(story.after(len(story.rounds))[name], value)

# ---- (a) the rounds

@pytest.mark.parametrize("aggregate", ["weighted", "uniform"])
def test_fedproto(aggregate, play):
    """Catches: Eq. 3 with a missing weight, over the wrong clients or classes; prototypes of a round ago sent, tested
    or kept; known not updated; a class lost for a round; traffic of another round or with counts too many."""
    story = play("fedproto", f"--aggregate {aggregate}")
    prototypes, known = np.zeros((C, D)), np.zeros(C)
    for t, records in story.rounds.items():
        check_given(story, t, known=known, prototypes=prototypes)
        down, found = len(records) * known.sum() * D, by_class(records.values())
        for c, owners in found.items():
            vectors, sizes = zip(*owners)
            prototypes[c] = weighted_mean(vectors, sizes if aggregate == "weighted" else [1] * len(sizes))
            known[c] = 1
        owned = sum(map(len, found.values()))
        check_log(story, t, owned * (D + 1 if aggregate == "weighted" else D), down)
        check_personal(story, t, prototypes, known)
    assert known.tolist() == [1, 1, 1, 1, 1, 0]
    check_after(story, prototypes=prototypes, known=known)

def test_the_story_has_its_corners(play):
    """Catches: a story without unequal sizes, lacking clients and a class lost for a round. The tests here would be
    blind."""
    story = play("fedproto")
    own = {i: set(client.train.y.tolist()) for i, client in story.clients.items()}
    in_round = [set().union(*(own[i] for i in story.rounds[t])) for t in story.rounds]
    assert [4 in s for s in in_round] == [False, True, False, True, False] and 3 not in in_round[1]
    assert all(len(classes) < 5 for classes in own.values()) and not any(5 in s for s in in_round)
    sizes = {len(client.train.y) for client in story.clients.values()}
    pooled, means = personal_scores(story, 4, **{k: story.after(4)[k] for k in ("prototypes", "known")})
    assert len(sizes) == K and abs(pooled - means).min() > 0.1
    stale, _ = personal_scores(story, 4, **{k: story.after(3)[k] for k in ("prototypes", "known")})
    assert stale[1] != pooled[1]

@pytest.mark.parametrize("projection, shift", [("mlp", 0), ("none", 20)])
def test_fedsa(projection, shift, play):
    """Catches: Eq. 3 without counts, Eq. 10 the wrong way round or for classes not seen; anchors of a round ago;
    anchors of absent classes left out of traffic or prediction."""
    story = play("fedsa", f"--alpha 0.7 --projection {projection}", shift=shift)  # 20: absent ones are nearer
    anchors = next(iter(story.rounds[1].values()))["given"]["anchors"].copy()
    for t, records in story.rounds.items():
        check_given(story, t, anchors=anchors)
        found = by_class(records.values())
        for c, owners in found.items():
            uploaded = weighted_mean(*zip(*owners))
            anchors[c] = [0.7 * a + 0.3 * p for a, p in zip(anchors[c], uploaded)]
        check_log(story, t, sum(map(len, found.values())) * (D + 1), len(records) * C * D)
        check_personal(story, t, anchors, np.ones(C))
    check_after(story, anchors=anchors)

def test_fedsa_projections(play):
    """Catches: a layer where --projection none has N(0, I) itself, none where there is one, anchors of mlp below 0, a
    step of more than a ten-thousandth at α = 0.9999."""
    first = {}
    for projection in ("none", "linear", "mlp"):
        story = play("fedsa", f"--projection {projection} --feature-dim 400", rounds=2)
        first[projection] = story.rounds[1][0]["given"]["anchors"]
        step = story.rounds[2][3]["given"]["anchors"] - first[projection]
        assert 0 < abs(step).max() < 2e-3 and not step[4:].any()
    A = first["none"]
    assert abs(A.mean()) < 0.08 and abs(A.var() - 1) < 0.1 and A.shape == (C, 400)
    assert abs(first["linear"] - A).max() > 0.5 and first["mlp"].min() == 0 < first["mlp"].max()

def adaptive_margin(found, rule, tau):
    """FedTGP Eq. 9, and the other rules."""
    if rule in ("fixed", "none"):
        return tau if rule == "fixed" else 0.0
    Q = {c: weighted_mean([v for v, _ in owners], [1] * len(owners)) for c, owners in found.items()}
    Q = list(Q.values())
    if rule == "nearest":
        return min(max(nearest_margins(Q)), tau)
    return min(max(euclidean(a, b) for a, b in itertools.combinations(Q, 2)), tau)

def fedtgp_prototypes(weights):
    """F(v) of all classes (C, D)."""
    v, *layers = weights
    return v if not layers else (v @ layers[0].T + layers[1]).clamp(min=0) @ layers[2].T + layers[3]

def fedtgp_training(weights, uploads, margin, epochs, lr):
    """Eq. 10 by plain SGD; epochs: lists of batches of uploads -> weights, prototypes, mean loss of the
    last."""
    weights = [w.clone().requires_grad_() for w in weights]
    for batches in epochs:
        losses = []
        for batch in batches:
            P, loss = fedtgp_prototypes(weights), 0
            for p, c in [uploads[i] for i in batch]:
                phi = [((torch.tensor(p) - P[k]) ** 2).sum().sqrt() for k in range(len(P))]
                logits = torch.stack([-(phi[k] + (margin if k == c else 0)) for k in range(len(P))])
                loss = loss - (logits[c] - logits.logsumexp(0)) / len(batch)
            for w, slope in zip(weights, torch.autograd.grad(loss, weights)):
                w.data -= lr * slope
            losses.append(float(loss.detach()))
    return [w.detach() for w in weights], fedtgp_prototypes(weights).detach().numpy(), np.mean(losses)

def fedtgp_start(play, words):
    """The server's first weights: a round at no learning rate leaves them as they are."""
    return server_weights("fedtgp", play("fedtgp", f"{words} --lr 1e-30", rounds=1).end)

@pytest.mark.parametrize("words", ["--margin-rule pairwise", "--margin-rule pairwise --tau 1.5",
                                   "--margin-rule nearest", "--margin-rule fixed --tau 1.5", "--margin-rule none",
                                   "--no-mlp"])
def test_fedtgp(words, play):
    """Catches: Eq. 9 by counts or from old uploads, another margin, not clipped; Eq. 10 on zeros of absent classes; the
    server begun anew in each round or with momentum; not all C prototypes sent, from round 1 on, or used to predict;
    counts in the traffic."""
    weights = fedtgp_start(play, words)
    story = play("fedtgp", words + " --lr 0.05 --momentum 0.9 --weight-decay 0.1")
    tau = float((re.findall("tau (.*)", words) or [100])[0])
    rule = (re.findall(r"margin-rule (\w+)", words) or ["pairwise"])[0]
    prototypes = fedtgp_prototypes(weights).numpy()
    for t, records in story.rounds.items():
        check_given(story, t, prototypes=prototypes)
        down, found = len(records) * C * D, by_class(records.values())
        margin = adaptive_margin(found, rule, tau)
        uploads = [(v, c) for c, owners in found.items() for v, _ in owners]
        epochs = [[range(len(uploads))]] * 3
        weights, prototypes, loss = fedtgp_training(weights, uploads, margin, epochs, 0.05)
        row = story.rows[t - 1]  # all uploads are one batch
        near([row["margin"], row["server_loss"], row["last_batch_loss"]], [margin, loss, loss])
        check_log(story, t, len(uploads) * D, down)
        check_personal(story, t, prototypes, np.ones(C))
    check_after(story, prototypes=prototypes)
    for got, want in zip(server_weights("fedtgp", story.end), weights, strict=True):
        near(got, want)

@pytest.mark.parametrize("size", [2, 3, 4])
def test_fedtgp_server_takes_every_upload_in_shuffled_batches(size, play):
    """Catches: all uploads at once, a smaller batch dropped, an upload twice. There are six, in batches of 2, 2 and 2,
    of 3 and 3, of 4 and 2: just one shuffle of them must lead to the server's prototypes."""
    weights = fedtgp_start(play, "--margin-rule none")
    words = f"--margin-rule none --lr 0.05 --server-epochs 1 --batches full --batch-size {size}"
    story = play("fedtgp", words, 1, who={1: [3, 1]})
    uploads = [(v, c) for r in story.rounds[1].values() for v, c in zip(r["vectors"], r["classes"])]
    n = len(uploads)
    assert n == 6
    orders = {tuple(tuple(sorted(order[i:i + size])) for i in range(0, n, size))
              for order in itertools.permutations(range(n))}
    got, away = story.after(1), []
    for order in orders:
        want = fedtgp_training(weights, uploads, 0.0, [order], 0.05)[1]
        away.append(abs(want - got["prototypes"]).max())
    assert min(away) < 1e-5 < sorted(away)[1]

def fedlsa_training(weights, classifier, alpha, tau, steps, lr, momentum):
    """Eqs. 3-5 against a frozen classifier -> weights, anchors, the last step's loss."""
    weights, speed = [w.clone().requires_grad_() for w in weights], [0] * len(weights)

    def anchors():
        R, *layers = weights
        A = (R @ layers[0].T + layers[1]).clamp(min=0) @ layers[2].T + layers[3]
        return torch.stack([row / (row ** 2).sum().sqrt() for row in A])
    for _ in range(steps):
        A, n, loss = anchors(), len(weights[0]), 0
        for i in range(n):
            logits = classifier[0] @ A[i] + classifier[1]
            loss = loss - (logits[i] - logits.logsumexp(0)) / n                            # Eq. 3
            others = sum(((A[i] * A[j]).sum() / tau).exp() for j in range(n) if j != i)
            loss = loss + alpha * (others / (n - 1)).log() / n                                   # Eq. 4
        for k, (w, slope) in enumerate(zip(weights, torch.autograd.grad(loss, weights))):
            speed[k] = momentum * speed[k] + slope
            w.data -= lr * speed[k]
    return [w.detach() for w in weights], anchors().detach().numpy(), float(loss.detach())

def test_fedlsa(play):
    """Catches: anchors trained on another round's classifier, from new R and Θ, after the clients, or with momentum of
    before; unweighted averages; a participant that begins with old weights; the anchors left out of the traffic."""
    words = "--alpha 0.3 --tau 0.4 --lr 0.3 --momentum 0.8 --weight-decay 0 --lam 0.5"
    weights = server_weights("fedlsa", play("fedlsa", words + " --lr 1e-30", rounds=1).end)
    story = play("fedlsa", words)
    state, d = story.start, weights_of_model(story)
    for t, records in story.rounds.items():
        classifier = [state[f"classifier.{name}"].double() for name in ("weight", "bias")]
        weights, anchors, loss = fedlsa_training(weights, classifier, 0.3, 0.4, 3, 0.3, 0.8)
        check_given(story, t, anchors=anchors)
        nearest = max(anchors[i] @ anchors[j] for i in range(C) for j in range(i))
        near([story.rows[t - 1]["server_loss"], story.rows[t - 1]["nearest_cosine"]], [loss, nearest])
        for record in records.values():
            same(record["before"], state)
        state = average_model(records.values())
        check_log(story, t, len(records) * d, len(records) * (d + C * D))
        check_global(story, t, state)
    check_after(story, anchors=anchors)
    for got, want in zip(server_weights("fedlsa", story.end), weights, strict=True):
        near(got, want)

FEDAVG = [("fedlsa", "--lam 0"), ("fedlsa", "--lam 0 --no-sphere"), ("fedplcc", "--lam-contra 0 --lam-corr 0"),
          ("fedfm", "--lam 0"), ("fedfm", "--warmup 9")]

@pytest.mark.parametrize("script, words", FEDAVG)
def test_fedavg(script, words, play):
    """Catches: anything but models by their numbers of images that travels where a global method is without its
    terms."""
    story = play(script, words)
    state, d = story.start, weights_of_model(story)
    for t, records in story.rounds.items():
        for record in records.values():
            same(record["before"], state)
            if script == "fedfm":
                assert not record["given"]["known"].any()
            if script == "fedplcc":
                assert not len(record["given"]["vectors"])
        state = average_model(records.values())
        check_log(story, t, len(records) * d, len(records) * d)
        check_global(story, t, state)
    assert not {"server_loss", "nearest_cosine"} & story.rows[0].keys()

def test_fedplcc_without_its_losses_sends_no_clusters(play):
    """Catches: clusters that are made and counted, though no loss uses them."""
    story = play("fedplcc", "--lam-contra 0 --lam-corr 0", 2, None, real=True)
    for row in story.rows:
        assert row["up"] == row["down"] == K * weights_of_model(story) and row["prototypes"] == 0

def table(vectors, classes, weights):
    """Clusters as rows in one order."""
    return np.array(sorted([c, *v, w] for v, c, w in zip(vectors, classes, weights))).reshape(-1, D + 2)

@pytest.mark.parametrize("words", ["", "--finch-level first --uniform-weights", "--lam-contra 0 --lam-corr 1",
                                   "--lam-corr 0"])
def test_fedplcc(words, play):
    """Catches: Eqs. 10 and 11 of other uploads than this round's, sizes left out, weights normalised over all classes;
    unweighted averages; clusters or their weights left out of the traffic, G of another round."""
    story = play("fedplcc", words)
    state, d, rows = story.start, weights_of_model(story), np.zeros((0, D + 2))
    for t, records in story.rounds.items():
        for record in records.values():
            same(record["before"], state)
            near(table(*(record["given"][name] for name in ("vectors", "classes", "weights"))), rows)
        down, sent = len(records) * (d + len(rows) * (D + 1)), sum(len(r["sizes"]) for r in records.values())
        rows = []
        for c, owners in by_class(records.values()).items():
            vectors, sizes = finch(*zip(*owners), "first" if "first" in words else "last")
            rows += [(v, c, 1 if "uniform" in words else w / sum(sizes)) for v, w in zip(vectors, sizes)]
        rows = table(*zip(*rows))
        state = average_model(records.values())
        check_log(story, t, len(records) * d + sent * (D + 1), down)
        assert story.rows[t - 1]["prototypes"] == len(rows)
        check_global(story, t, state)
    near(table(*(story.after(5)[name] for name in ("vectors", "classes", "weights"))), rows)

def new_anchors(story, states, anchors, known, uniform):
    """FedFM Eqs. 8 and 9 with the models `states` {id: state} -> anchors, known, numbers sent."""
    means = {i: class_means(story.net, state, story.clients[i].train) for i, state in states.items()}
    anchors, new, owned = anchors.copy(), known.copy(), sum(map(len, means.values()))
    for c in range(C):
        owners = [m[c] for m in means.values() if c in m]
        if uniform and known[c]:  # who lacks the class stands for the old anchor
            owners += [(anchors[c], 1)] * (len(means) - len(owners))
        if owners:
            vectors, sizes = zip(*owners)
            anchors[c], new[c] = weighted_mean(vectors, [1] * len(sizes) if uniform else sizes), 1
    return anchors, new, len(means) * C * D if uniform else owned * (D + 1)

@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.parametrize("aggregate", ["weighted", "uniform"])
def test_fedfm(aggregate, warmup, play):
    """Catches: anchors by local instead of global weights (load_state_dict too late), of the round before, unweighted,
    of all clients; a class lost for a round; a warm-up one round too long or short; unweighted averages; traffic."""
    story = play("fedfm", f"--aggregate {aggregate} --warmup {warmup}")
    state, d, anchors, known = story.start, weights_of_model(story), np.zeros((C, D)), np.zeros(C)
    for t, records in story.rounds.items():
        sent = 0
        if t > warmup:
            anchors, known, sent = new_anchors(story, dict.fromkeys(records, state), anchors, known,
                                               aggregate == "uniform")
        check_given(story, t, known=known, anchors=anchors)
        for record in records.values():
            same(record["before"], state)
        state = average_model(records.values())
        check_log(story, t, len(records) * d + sent, len(records) * (d + known.sum() * D))
        check_global(story, t, state)
    assert known.tolist() == [1, 1, 1, 1, 1, 0]
    check_after(story, anchors=anchors, known=known)

LITE = [(1, 2, "weighted"), (2, 0, "weighted"), (2, 2, "uniform"), (3, 0, "uniform")]

@pytest.mark.parametrize("every, warmup, aggregate", LITE)
def test_fedfm_lite(every, warmup, aggregate, play):
    """Catches: anchors of the global model, or that serve in this round or in the one after the next; models that
    travel down in another than every a-th round, up in another than a - 1 rounds later and the last, or that do not
    rest in between."""
    story = play("fedfm", f"--lite --model-every {every} --warmup {warmup} --aggregate {aggregate}")
    state, d, anchors, known = story.start, weights_of_model(story), np.zeros((C, D)), np.zeros(C)
    own = dict.fromkeys(range(K), state)
    for t, records in story.rounds.items():
        up, down = 0, len(records) * known.sum() * D
        check_given(story, t, known=known, anchors=anchors)
        if t % every == 1 or every == 1:
            own, down = dict.fromkeys(range(K), state), down + K * d
        for i, record in records.items():
            same(record["before"], own[i])
            own[i] = record["after"]
        if t % every == 0 or t == 5:
            state, up = average_model(records.values()), len(records) * d
        if warmup <= t < 5:  # after the last round nobody would use them
            anchors, known, sent = new_anchors(story, {i: own[i] for i in records}, anchors, known,
                                               aggregate == "uniform")
            up += sent
        check_log(story, t, up, down)
        check_global(story, t, state)
    check_after(story, anchors=anchors, known=known)
    for i in range(K):
        same(saved_model("fedfm", story.end, i), own[i])

@every_script
def test_the_order_of_participants_does_not_matter(script, play):
    """Catches: a weight or an upload paired with another client's."""
    words = "--lr 0.05"
    one, other = play(script, words), play(script, words, who={t: ids[::-1] for t, ids in WHO.items()})
    for a, b in zip(one.rows, other.rows):
        assert all(a[k] == pytest.approx(b[k], rel=1e-4) for k in a if k != "seconds")
    for a, b in zip(one.end["modules"], other.end["modules"], strict=True):
        same(a, b, 1e-4)
    ends = [final_state(script, story.end) for story in (one, other)]
    if script == "fedplcc":
        ends = [dict(rows=table(**end)) for end in ends]
    for name in ends[0]:
        near(ends[0][name], ends[1][name])

@every_script
def test_participation(script, play):
    """Catches: other than half of the clients with --participation 0.5, the same in each round, others than
    common.participants gives; without it, not all."""
    everyone = play(script, rounds=1, who=None)
    assert sorted(everyone.order[1]) == [0, 1, 2, 3]
    story = play(script, "--participation 0.5", rounds=4, who=None)
    clients = [everyone.clients[i] for i in range(K)]
    for t, ids in story.order.items():
        assert len(set(ids)) == len(ids) == 2
        assert sorted(ids) == sorted(c.id for c in common.participants(clients, t, story.args))
        models = weights_of_model(story) if script in GLOBAL else 0
        assert story.rows[t - 1]["loss"] == np.mean([t + 0.25 * i ** 2 for i in ids])
        assert not models or [story.rows[t - 1][way] // models for way in ("up", "down")] == [2, 2]
    assert len({frozenset(ids) for ids in story.order.values()}) > 1

def test_workers_give_results_in_the_clients_order():
    """Catches: results in the order in which clients are begun or end. Models would be averaged with the sizes of
    others."""
    clients = [common.Client(i, common.Images(None, torch.zeros(n)), net=torch.nn.Identity())
               for i, n in enumerate((3, 9, 5, 7))]
    for workers in (1, 2, 3):
        numbers = common.for_each_client(lambda client, add: client.id + add, clients, 10, workers=workers)
        assert numbers == [10, 11, 12, 13]

def test_workers_are_the_cores_that_the_process_may_use(monkeypatch):
    """Catches: 64 threads for a job that has two cores of a large machine; an error where a system does not tell."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5}, raising=False)
    assert common.cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    assert common.cores() == 64

@pytest.mark.parametrize("K, share, size", [(4, 0.7, 3), (10, 0.33, 3), (20, 0.33, 7), (20, 0.02, 1), (7, 1.0, 7)])
def test_the_number_of_participants(K, share, size):
    """Catches: rounded down, rounded up, or nobody."""
    args = common.argparse.Namespace(seed=0, participation=share)
    assert len(common.participants(range(K), 1, args)) == size

def test_the_server_begins_with_another_seed_elsewhere(play):
    """Catches: server or anchors the same for every --seed: only the clients' models would differ."""
    for script, words in (("fedtgp", "--lr 1e-30"), ("fedlsa", "--lr 1e-30")):
        one, other = [server_weights(script, play(script, f"{words} --seed {seed}", rounds=1).end) for seed in (0, 1)]
        assert abs(one[0] - other[0]).max() > 0.1
    one, other = [play("fedsa", f"--seed {seed}", rounds=1).rounds[1][0]["given"]["anchors"] for seed in (0, 1)]
    assert abs(one - other).max() > 0.1

NORMALISATION = {  # mean and standard deviation of the channels, from the code of FedFM's authors
    "cifar10": [(0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)],
    "cifar100": [(0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)],
    "mnist": [(0.5,), (0.5,)],
}

@pytest.mark.parametrize("name", NORMALISATION)
def test_fedfm_normalises_as_the_data_set_wants(name, play):
    """Catches: CIFAR's channels brought to [-1, 1], as those of other data sets; other means or deviations."""
    mean, std = NORMALISATION[name]
    net = play("fedfm", f"--dataset {name} --no-small-stem", rounds=1).net
    assert net.mean.flatten().tolist() == pytest.approx(mean)
    assert net.std.flatten().tolist() == pytest.approx(std)

def test_fedfm_validates_the_global_model_on_all_clients_images(play):
    """Catches: the participants' images only, or each client's own model."""
    story = play("fedfm", "--validation 0.5")
    for t, records in story.rounds.items():
        state, shares = average_model(records.values()), []
        for client in story.clients.values():
            guess = guesses(story.net, state, features(story.net, state, client.val.x))
            shares.append(100 * np.mean([a == b for a, b in zip(guess, client.val.y.tolist())]))
        near(story.rows[t - 1]["acc_validation"], np.mean(shares))

def test_fedfm_augments_otherwise_in_each_round_and_for_each_client(monkeypatch):
    """Catches: the same draws in each round or for each client. Eight equal images would come out the same."""
    seen, loss = [], fedfm.local_loss
    monkeypatch.setattr(fedfm, "local_loss", lambda net, x, *rest: seen.append(sorted(names(x))) or loss(net, x, *rest))
    x = torch.zeros(8, 3, 32, 32, dtype=torch.uint8)
    x[:, :, 12:20, 8:16] = 200
    args = common.argparse.Namespace(seed=0, local_epochs=1, batch_size=8, batches="all", lr=0.1, momentum=0.0,
                                     weight_decay=0.0, augment=True, prox=0.0, match="cg", lam=0.0, temperature=1.0)
    net = common.Net(torch.nn.Flatten(), torch.nn.Linear(4, 2), 4, 2)
    for i, t in ((0, 1), (0, 1), (1, 1), (0, 2)):
        client = common.Client(i, common.Images(x, torch.zeros(8).long()), net=copy.deepcopy(net))
        fedfm.client_update(client, torch.zeros(2, 4), torch.zeros(2) > 0, t, args)
    assert seen[0] == seen[1] and len({tuple(images) for images in seen}) == 3

def test_each_client_holds_other_places_of_its_part_back(monkeypatch):
    """Catches: one shuffle for all clients. In a sorted part all would test on the same places."""
    monkeypatch.setattr(common, "partition", lambda *_: np.arange(60).reshape(3, 20))
    data = dataset([[60]], [[0]])
    args = common.argparse.Namespace(seed=0, partition="iid", clients=3, dataset="set", device="cpu")
    place, held = {name: i for i, name in enumerate(names(data.x))}, []
    for _, kept, rest in common.divide(data, torch.arange(60), 0.25, args):
        held.append(sorted(place[name] % 20 for name in names(rest.x)))
    assert held[0] != held[1] != held[2] != held[0]

# ---- (b) no leaks

PARTITIONS = ["iid", "dirichlet --beta 5", "missing --missing 1", "pathological --classes-per-client 3",
              "dominant --dominant-share 0.5", "domain --domain-clients plain:2,thin:1 --domain-fraction 0.4",
              "domain --domain-clients plain:2,thin:1 --images-per-class 9"]

@pytest.mark.parametrize("how", PARTITIONS)
@every_script
def test_no_image_is_where_it_must_not_be(script, how, play):
    """Catches: an image in two clients' training sets, in a training and a test set, or the server's test images (or
    the validation images) in training; two clients with one model."""
    data = dataset([[20] * C, [14] * C], [[7] * C, [9] * C])._replace(domains=["plain", "thin"])
    words = f"--partition {how}"
    if "domain-clients" not in how:
        words += " --clients 3"
    if script == "fedfm":
        words += " --validation 0.25"
    story = play(script, words, 1, None, data)
    clients = [story.clients[i] for i in range(3)]
    training = [names(c.train.x) for c in clients]
    held = [names((c.test or c.val).x) for c in clients]
    assert len(set(names(data.x))) == len(data.x)                           # images can be told apart
    everything = sum(training, []) + sum(held, [])
    assert len(everything) == len(set(everything)) and set(everything) <= set(names(data.x))
    servers = set(names(data.x[data.test]))
    if script in GLOBAL:
        assert not servers & set(everything)
    else:
        assert servers & set(sum(training, []))                             # the papers divide all images
    for c in clients:
        n, share = len(c.train.y) + len((c.test or c.val).y), 0.25 if script in (*PERSONAL, "fedfm") else 0
        assert len((c.test or c.val).y) == math.floor(share * n + 1e-9)
        labels = dict(zip(names(data.x), data.y.tolist()))
        assert [labels[name] for name in names(c.train.x)] == c.train.y.tolist()
        assert [labels[name] for name in names((c.test or c.val).x)] == (c.test or c.val).y.tolist()
    if how == "iid":
        pool = len(data.y) if script in PERSONAL else int((~data.test).sum())
        assert len(everything) == pool
    assert len({id(c.net) for c in clients}) == 3
    weights = [p.data_ptr() for c in clients for p in c.net.parameters()]
    assert len(set(weights)) == len(weights)

# ---- (c) modes and state

BUSY = " --local-epochs 2 --batch-size 7 --momentum 0.9 --lr 0.02"
WATCHED = [("fedproto", "", "TM"), ("fedtgp", "", "TM"), ("fedtgp", "--uploads before", "MT"),
           ("fedsa", "--alpha 0.5", "MTM"), ("fedlsa", "", "T"), ("fedplcc", "", "TM"),
           ("fedplcc", "--local-prototypes mean", "TM"), ("fedplcc", "--finch-level first", "TM"),
           ("fedplcc", "--lam-contra 0", "TM"), ("fedplcc", "--lam-corr 0", "TM"), ("fedfm", "", "T"), ("fedfm", "--lite", "T")]

@pytest.mark.parametrize("script, words, order", WATCHED)
def test_what_a_client_does_with_its_model(script, words, order, play):
    """Catches: a missing train() or eval(), test images, another client's or last round's batches, class means too
    early or too late, uploads of another model, BatchNorm's counters or statistics that do not agree. A client trains
    (T) on the batches of common.minibatches and takes class means (M) over all its training images, in the right
    order."""
    story = play(script, BUSY + " " + words, 3, {1: [1, 0, 2], 2: [3, 1], 3: [1, 0, 2, 3]}, real=True)
    for t, records in story.rounds.items():
        for i, record in records.items():
            client, events = story.clients[i], record["seen"]
            batches = [names(x) for x, y in common.minibatches(client, t, story.args)]
            trained = [seen for training, seen in events if training]
            assert [sorted(seen) for seen in trained] == [sorted(batch) for batch in batches]
            assert len(trained) >= 4 and sorted(sum(trained, [])) == sorted(names(client.train.x) * 2)
            means = [seen for training, seen in events if not training]
            for seen in means:
                assert sorted(seen) == sorted(names(client.train.x))
            kinds = "".join(kind for kind, _ in itertools.groupby("MT"[training] for training, _ in events))
            assert kinds == order and len(means) == order.count("M")
            count = [name for name in record["before"] if name.endswith("num_batches_tracked")]
            assert count and all(record["after"][n] - record["before"][n] == len(batches) for n in count)
            upload, state = record["upload"], record["before" if order == "MT" else "after"]
            own = class_means(story.net, state, client.train)
            if script in PERSONAL:
                near(upload["vectors"], [own[c][0] if c in own else np.zeros(D) for c in range(C)])
                counts = [own[c][1] if c in own else 0 for c in range(C)]
                near(upload["counts"], np.array(counts) > 0 if script == "fedtgp" else counts)
            else:
                same(upload["state"], record["after"], 0)
            if script == "fedplcc":
                z, y = features(story.net, state, client.train.x), client.train.y.tolist()
                rows = [(mean, c, n) for c, (mean, n) in own.items()]
                if "mean" not in words:
                    rows = [(v, c, n) for c in own for v, n in zip(*finch(
                        [v for v, k in zip(z, y) if k == c], [1] * y.count(c), "first" if "first" in words else "last"))]
                near(table(*(upload[name] for name in ("vectors", "classes", "sizes"))), table(*zip(*rows)))
        if script in PERSONAL:
            now = story.after(t)
            check_personal(story, t, now["anchors" if script == "fedsa" else "prototypes"],
                           now.get("known", np.ones(C)))
        elif "lite" not in words:
            state = average_model(records.values())
            check_global(story, t, state)
            for record in story.rounds.get(t + 1, {}).values():
                same(record["before"], state)

@every_script
def test_training_switches_the_model_to_train_mode(script, play):
    """Catches: a model that is still in eval mode, from class means or a test, and keeps BatchNorm's statistics."""
    story = play(script, BUSY, 2, None, real=True, prepare=lambda client, t: client.net.eval())
    for records in story.rounds.values():
        for record in records.values():
            batches = list(common.minibatches(record["client"], record["t"], story.args))
            assert sum(training for training, _ in record["seen"]) == len(batches)

@every_script
def test_momentum_starts_at_zero_in_each_round(script, play):
    """Catches: momentum kept from the round before, which one step a round would show; no momentum, which two steps
    would show."""
    words = "--lr 0.05 --batch-size 500" + {"fedlsa": " --server-steps 1"}.get(script, "")
    runs = [play(script, f"{words} --local-epochs {epochs} --momentum {momentum}", 3, None, real=True)
            for epochs, momentum in ((1, 0), (1, 0.9), (2, 0), (2, 0.9))]
    for t in (1, 2, 3):
        for i, record in runs[0].rounds[t].items():
            same(record["after"], runs[1].rounds[t][i]["after"], 0)
    assert runs[2].rows[-1]["loss"] != runs[3].rows[-1]["loss"]

@every_script
def test_batches(script, play):
    """Catches: an image that an epoch takes twice or not at all, or with another's class; an order that is the same in
    another epoch, round, client or seed, or not the same for the same seed."""
    def orders(words):
        story, found = play(script, BUSY + " " + words, 2, None, real=True), {}
        for t, i in itertools.product((1, 2), story.clients):
            place = {name: k for k, name in enumerate(names(story.clients[i].train.x))}
            seen = sum((seen for training, seen in story.rounds[t][i]["seen"] if training), [])
            n, found[i, t] = len(place), [place[name] for name in seen]
            assert sorted(found[i, t][:n]) == sorted(found[i, t][n:]) == [*range(n)]
        return found, story
    one, story = orders("")
    assert one == orders("")[0]
    other = orders("--seed 1")[0]
    for i, client in story.clients.items():
        n = len(client.train.y)
        epochs = [order[i, t][k:k + n] for order in (one, other) for t in (1, 2) for k in (0, n)]
        assert len(set(map(tuple, epochs))) == 8
        twin = copy.copy(client)
        twin.id += 1
        x, y = map(torch.cat, zip(*common.minibatches(twin, 1, story.args)))
        assert names(x) != [names(client.train.x)[k] for k in one[i, 1]]
        labels = dict(zip(names(story.data.x), story.data.y.tolist()))
        assert [labels[name] for name in names(x)] == y.tolist()

@pytest.mark.parametrize("rule", ["average", "nearest"])
def test_fedsa_margin_is_of_the_model_before_training(rule, play):
    """Catches: a margin of the model after a step, of the anchors alone, the smaller of both, of the round before, or
    by the other rule. Two steps in float64 (FedSA Eqs. 5-9)."""
    def margin_of(points):
        if rule == "nearest":
            return mean(nearest_margins(points))
        return average_margin(points)
    def larger(client, t):  # features, so that the clients' own margins exceed the anchors'
        for p in client.net.parameters():
            p.data *= 30 if t == 1 and p.dim() == 1 and client.id < 2 else 1
    words = f"--lam-r 0.1 --lam-mcl 2 --lam-cc 0.5 --distance euclidean --projection linear --margin-rule {rule}"
    story = play("fedsa", f"{words} --momentum 0 --lr 0.002 --local-epochs 2 --batch-size 500", 2,
                 {1: [0, 1, 2], 2: [1, 3]}, real=True, prepare=larger)
    larger_own = []
    for record in itertools.chain(*(records.values() for records in story.rounds.values())):
        anchors, (x, y) = record["given"]["anchors"], record["client"].train
        means = class_means(story.net, record["before"], record["client"].train)
        own = [mean for mean, _ in means.values()]
        margins = [margin_of(points) for points in (list(anchors), own)]                         # Eq. 6
        larger_own.append(margins[1] > margins[0] + 0.1)
        net, A, n, losses = copy.deepcopy(story.net), torch.tensor(anchors), len(y), []
        net.load_state_dict(record["before"])
        net.double().train()
        for _ in range(2):
            z = net.features(x)
            own_class = torch.eye(C)[y].double()
            entropy = lambda logits, c: (logits.logsumexp(1) - logits[range(len(c)), c]).mean()
            away = ((z[:, None] - A[None]) ** 2).sum(2).sqrt()
            loss = (entropy(net.classifier(z), y) + 0.1 * away[range(n), y].mean()
                    + 2 * entropy(-(away + max(margins) * own_class), y)
                    + 0.5 * entropy(net.classifier(A), range(C)))
            for p, slope in zip(net.parameters(), torch.autograd.grad(loss, [*net.parameters()])):
                p.data -= 0.002 * slope
            losses.append(float(loss.detach()))
        near(record["upload"]["loss"], np.mean(losses))
        for name, p in net.named_parameters():
            near(p.detach(), record["after"][name], 2e-4)
    assert len(set(larger_own)) == 2                                        # both kinds of clients

# ---- (d) prediction

def test_a_class_never_seen_is_never_predicted(play):
    """Catches: zeros, which stand for the unseen classes, predicted where all prototypes are farther away."""
    story = play("fedproto", "", 3, {1: [0, 2], 2: [2, 0, 1], 3: [3]}, shift=20.0)
    for t in (1, 2):
        prototypes, known = story.after(t)["prototypes"], story.after(t)["known"]
        assert known.tolist() == [1, 1, 1, 1, 0, 0]
        wrong = personal_scores(story, t, prototypes, np.ones(C))[0][1]
        assert abs(wrong - story.rows[t - 1]["acc_prototype"]) > 5
        check_personal(story, t, prototypes, known)

def test_the_best_round_of_fedfm_is_picked_on_validation_images(play):
    """Catches: the round that is best on test images (1), on all validation images together (3), or the last (4). The
    best in the mean over clients' validation images is 2. In round t the model answers class t - 1 only."""
    data = dataset([[4, 8, 90, 4], [4, 18, 0, 2], [4, 16, 0, 2], [3, 15, 1, 4]], [[9, 1, 1, 1]] * 4)
    story = play("fedfm", "--validation 0.5", 4, None, data, answer=True)
    tests = [100 * share for share in (9 / 12, 1 / 12, 1 / 12, 1 / 12)]
    judged = [np.mean([100 * np.mean(c.val.y.numpy() == k) for c in story.clients.values()])
              for k in range(4)]
    pooled = torch.cat([c.val.y for c in story.clients.values()]).bincount()
    assert np.argmax(judged) == 1 and int(pooled.argmax()) == 2
    near([row["acc_validation"] for row in story.rows], judged)
    near([row["acc_test"] for row in story.rows], tests)
    near(picked(story.ended), (tests[1], 2))


def test_lite_without_matching_sends_no_means(play):
    """Catches: FedAvg with anchors in its traffic."""
    story = play("fedfm", "--lite --model-every 2 --lam 0")
    size, chosen = weights_of_model(story), [len(records) for records in story.rounds.values()]
    assert [row["up"] for row in story.rows] == [0, chosen[1] * size, 0, chosen[3] * size, chosen[4] * size]
    assert [row["down"] for row in story.rows] == [4 * size, 0, 4 * size, 0, 4 * size]
