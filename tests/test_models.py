"""Models: feature sizes, parameter counts, who gets which architecture, and equal weights at the start."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import torchvision

import common, fedlsa
from conftest import arguments


def net(model, client=0, net_class=common.Net, pixels=32, classes=10, **other):
    """A client's model for images of this size."""
    defaults = dict(model=model, feature_dim=512, small_stem=False, seed=0, device="cpu", no_sphere=False)
    args = SimpleNamespace(**{**defaults, **other})
    nothing = torch.zeros(0)
    data = common.Dataset(torch.zeros(1, 3, pixels, pixels).byte(), nothing, nothing, nothing, [""] * classes, [""])
    if net_class is fedlsa.SphereNet:
        return fedlsa.build_sphere_net(data, args)
    return common.build_net(data, args, client)


def size(module):
    return sum(p.numel() for p in module.parameters())


def equal(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", common.MODELS)
@pytest.mark.parametrize("net_class, pixels, D", [(common.Net, 28, 512), (fedlsa.SphereNet, 32, 128)])
def test_every_model_gives_features_of_size_D(name, net_class, pixels, D):
    """Catches: an architecture that cannot take small images, keeps its own last layer, or leaves the sphere."""
    model = net(name, net_class=net_class, pixels=pixels, feature_dim=D)
    x = torch.randint(255, (2, 3, pixels, pixels)).byte()
    z = model.features(x)
    assert z.shape == (2, D) and (model.feature_dim, model.num_classes) == (D, 10)
    assert model.classifier(z).shape == model(x).shape == (2, 10)
    if net_class is fedlsa.SphereNet:
        assert torch.allclose(z.norm(dim=1), torch.ones(2), atol=1e-5)


@pytest.mark.parametrize("model, clients", [("cnn4", 1), ("htcnn8", 8)])
def test_convnets_are_what_the_papers_say(model, clients):
    """Catches: mean-pooling for max-pooling, another padding or stride, a layer without ReLU."""
    x = torch.randn(2, 3, 28, 28)
    for i in range(clients):
        extractor, z = net(model, i, pixels=28).extractor, x
        weights = list(extractor.parameters())
        for weight, bias in zip(weights[::2], weights[1::2]):
            if weight.dim() == 4:
                z = F.max_pool2d(F.conv2d(z, weight, bias), 2).relu()
            else:
                z = F.linear(z.flatten(1), weight, bias).relu()
        torch.testing.assert_close(extractor(x), z)


@pytest.mark.parametrize("name", ["googlenet", "mobilenet_v2"])
def test_nothing_is_dropped(name):
    """Catches: the dropout that torchvision has before its last layer, which is not ours."""
    extractor = net(name).extractor
    assert not [layer for layer in extractor.modules() if isinstance(layer, torch.nn.Dropout) and layer.p > 0]


def test_parameter_counts():
    """Catches: another kernel, width or depth than the papers', or a last layer that stayed."""
    cnn4 = 2432 + 51264 + 1600 * 512 + 512
    assert size(net("cnn4")) == cnn4 + 5130
    assert size(net("cnn4", net_class=fedlsa.SphereNet, feature_dim=128)) == cnn4 + 512 * 128 + 128 + 1290
    assert size(net("resnet18")) == 11_181_642  # FedFM's table: 11,182 k
    assert size(net("resnet50", small_stem=True, feature_dim=2048, classes=100)) == 23_705_252  # and 23,705 k
    heads = dict(resnet34=513_000, googlenet=1_025_000, mobilenet_v2=1_281_000)
    for name, head in heads.items():
        options = dict(aux_logits=False, init_weights=False) if name == "googlenet" else {}
        with torch.device("meta"):
            whole = size(getattr(torchvision.models, name)(weights=None, **options))
        assert size(net(name).extractor) == whole - head


def test_small_resnets_and_stems():
    """Catches: a stage too many or too few; a small stem that still reduces the image."""
    x = torch.randn(2, 3, 32, 32)
    for name, width in dict(resnet4=64, resnet6=128, resnet8=256, resnet10=512).items():
        assert net(name).extractor(x).shape[1] == width
    for small_stem, pixels in ((False, 8), (True, 32)):
        stem = net("resnet18", small_stem=small_stem).extractor
        assert stem.maxpool(stem.relu(stem.bn1(stem.conv1(x)))).shape[-1] == pixels


def test_weights_can_be_taken_as_one_vector():
    """Weights that lie in memory as channels_last: SCAFFOLD, FedDyn and others, which take them as a vector, crash."""
    model = net("resnet4")
    x = torch.randint(255, (4, 3, 32, 32)).byte().contiguous(memory_format=torch.channels_last)  # as clients have them
    model(x).sum().backward()
    vector = torch.nn.utils.parameters_to_vector(model.parameters())
    gradient = torch.nn.utils.parameters_to_vector([weights.grad for weights in model.parameters()])
    assert len(vector) == len(gradient) == size(model)
    torch.nn.utils.vector_to_parameters(vector, model.parameters())


def test_groups_deal_architectures_by_number():
    """Catches: a group with an architecture twice, in another order, or with classifiers of other widths."""
    sizes = dict(htfe2=2, htfe3=3, htfe4=4, htfe5=5, htfe8=8, htfe9=9, htcnn8=8)
    assert {group: len(set(common.GROUPS[group])) for group in sizes} == sizes
    names = [common.architecture("htfe3", i)[0] for i in range(4)]
    assert names == ["resnet10", "resnet18", "resnet34", "resnet10"]
    assert len({tuple(p.shape for p in net("htcnn8", i).parameters()) for i in range(8)}) == 8

    names, hidden = zip(*[common.architecture("res34-htc4", i) for i in range(5)])
    assert set(names) == {"resnet34"} and hidden == ([], [512], [256], [128], [])
    assert common.architecture("htfe8-htc4", 9) == ("googlenet", [512])
    assert net("htfe8-htc4", 8).classifier.weight.shape == (10, 512)  # cnn4 without a hidden layer
    first, relu, last = net("res34-htc4", 2).classifier
    assert (first.weight.shape, last.weight.shape) == ((256, 512), (10, 256)) and isinstance(relu, torch.nn.ReLU)


def test_equal_architectures_start_with_equal_weights():
    """Catches: clients that begin at different points; one model for all of them; every seed the same; torch's own
    generator moved on by a model."""
    state = torch.get_rng_state()
    one, other, seed1 = net("cnn4", 0), net("cnn4", 5), net("cnn4", 0, seed=1)
    assert equal(one, other) and one.classifier.weight is not other.classifier.weight
    for a, b in zip(one.parameters(), seed1.parameters()):
        assert not torch.equal(a, b)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("group, clients", [("res34-htc4", [0, 1, 2, 3]), ("htfe8-htc4", [1, 9, 17])])
def test_equal_extractors_start_with_equal_weights_whatever_the_classifier(group, clients):
    """Catches: other first weights of the extractor. FedTGP's HtC4 compares classifiers and would compare these,
    too."""
    nets = [net(group, i) for i in clients]
    assert all(equal(nets[0].extractor, other.extractor) for other in nets[1:])
    if group == "res34-htc4":
        assert len({size(each.classifier) for each in nets}) == 4


def test_features_are_of_normalised_images_and_pooled_to_size_D():
    """Catches: images in [0, 255] that reach the extractor; the mean after the division; a channel's mean for
    another's; features cut off instead of averaged."""
    grey = common.Net(torch.nn.Flatten(), torch.nn.Identity(), 2, 10, mean=(0.5,), std=(0.25,))
    assert grey.features(torch.tensor([0, 255]).byte().view(1, 1, 1, 2)).tolist() == [pytest.approx([-2, 2])]
    colour = common.Net(torch.nn.Flatten(), torch.nn.Identity(), 3, 10, mean=(0.0, 0.5, 1.0), std=(1.0, 0.5, 2.0))
    white = torch.full((1, 3, 1, 1), 255).byte()
    assert colour.features(white).tolist() == [pytest.approx([1, 1, 0])]
    for D, want in ((2, [1.5, 3.5]), (4, [1, 2, 3, 4]), (8, [1, 1, 2, 2, 3, 3, 4, 4])):
        pooled = common.Net(torch.nn.Flatten(), torch.nn.Identity(), D, 10, mean=(0.0,), std=(1 / 255,))
        assert pooled.features(torch.tensor([1, 2, 3, 4]).byte().view(1, 1, 2, 2)).tolist() == [pytest.approx(want)]


def test_without_the_sphere_features_keep_their_length():
    """Catches: --no-sphere that changes nothing, or first weights that depend on it."""
    x = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    on_sphere = net("cnn4", net_class=fedlsa.SphereNet, feature_dim=128).features(x)
    free = net("cnn4", net_class=fedlsa.SphereNet, feature_dim=128, no_sphere=True).features(x)
    torch.testing.assert_close(on_sphere.norm(dim=1), torch.ones(5))
    assert free.norm(dim=1).max() < 0.9 or free.norm(dim=1).min() > 1.1
    torch.testing.assert_close(free / free.norm(dim=1, keepdim=True), on_sphere)


def test_fedlsas_features_are_of_normalised_images():
    """Catches: pixels from 0 to 255, or other than the embedding in the projector."""
    projector = torch.nn.Linear(4, 2, bias=False)
    projector.weight.data = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 1.0]])
    sphere_net = fedlsa.SphereNet(torch.nn.Flatten(), projector, torch.nn.Linear(2, 10), on_sphere=False)
    x = torch.tensor([0, 10, 20, 255]).byte().view(1, 1, 2, 2)
    assert sphere_net.features(x).tolist() == [pytest.approx([-1, 1])]


def test_the_weights_of_fedlsa_are_drawn_by_the_seed():
    """Catches: the same first weights for every seed; torch's own generator moved on by a model."""
    state = torch.get_rng_state()
    one, again, other = [net("cnn4", net_class=fedlsa.SphereNet, feature_dim=16, seed=seed) for seed in (0, 0, 1)]
    assert equal(one, again) and torch.equal(torch.get_rng_state(), state)
    for a, b in zip(one.parameters(), other.parameters()):
        assert not torch.equal(a, b)


def test_each_client_has_its_own_architecture():
    """Catches: one architecture for all clients of a group."""
    args = arguments("fedproto", "--model htcnn8 --clients 9 --partition iid --image-size 24 --subset 0.05 --device cpu")
    data = common.load_dataset(args)
    clients = common.make_clients(data, args)
    for i, client in enumerate(clients):
        assert equal(client.net, common.build_net(data, args, i))
    assert len({tuple(p.shape for p in client.net.parameters()) for client in clients}) == 8
