"""Models: the papers' architectures and their sizes, who gets which, and equal initial weights."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import torchvision

import common
import fedlsa

RESNETS = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
GROUPS = {
    "htfe2": ["cnn4", "resnet18"],
    "htfe3": ["resnet10", "resnet18", "resnet34"],
    "htfe4": ["cnn4", "googlenet", "mobilenet_v2", "resnet18"],
    "htfe5": ["cnn4", "resnet10", "resnet18", "resnet34", "resnet50"],
    "htfe8": ["cnn4", "googlenet", "mobilenet_v2", *RESNETS],
    "htfe9": ["resnet4", "resnet6", "resnet8", "resnet10", *RESNETS],
    "htcnn8": [f"htcnn8-{n}" for n in range(1, 9)],
    "res34-htc4": ["resnet34"],
    "htfe8-htc4": ["cnn4", "googlenet", "mobilenet_v2", *RESNETS],
}
HTC4 = [[], [512], [256], [128]]  # hidden layers of the classifiers
CONVNETS = {  # channels of the 5x5 convolutions, widths of the linear layers
    "cnn4": ([32, 64], [512]),
    "htcnn8-1": ([32], [512]),
    "htcnn8-2": ([32, 64], [512]),
    "htcnn8-3": ([32], [512, 512]),
    "htcnn8-4": ([32, 64], [512, 512]),
    "htcnn8-5": ([32], [1024, 512]),
    "htcnn8-6": ([32, 64], [1024, 512]),
    "htcnn8-7": ([32], [1024, 512, 512]),
    "htcnn8-8": ([32, 64], [1024, 512, 512]),
}


def a_dataset(pixels=32, classes=10):
    """No images, but what a model needs to know of them."""
    x = torch.zeros(1, 3, pixels, pixels, dtype=torch.uint8)
    nothing = torch.zeros(0)
    return common.Dataset(x, nothing, nothing, nothing, [""] * classes, [""])


def flags(model, **other):
    usual = dict(feature_dim=512, small_stem=False, seed=0, device="cpu", no_sphere=False)
    return SimpleNamespace(model=model, **usual | other)


def net(model, client=0, **other):
    """A client's model for images of 32 pixels and ten classes."""
    return common.build_net(a_dataset(), flags(model, **other), client)


def sphere_net(model="cnn4", **other):
    """FedLSA's model, with 128 features."""
    return fedlsa.build_sphere_net(a_dataset(), flags(model, feature_dim=128, **other))


def images(n=2, pixels=32):
    return torch.randint(256, (n, 3, pixels, pixels), dtype=torch.uint8)


def size(module):
    return sum(parameter.numel() for parameter in module.parameters())


def equal(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- architectures --------------------------------------------------------------------------------

@pytest.mark.parametrize("name", common.MODELS)
def test_every_model_gives_features_of_size_D(name):
    """Catches: an architecture that cannot take images of 28 pixels or keeps its own last layer."""
    with torch.device("meta"):  # shapes without numbers: the largest would take seconds
        model = common.build_net(a_dataset(pixels=28), flags(name, device="meta"))
        z = model.features(images(pixels=28))
        assert z.shape == (2, 512)
        assert model.classifier(z).shape == (2, 10)
    assert (model.feature_dim, model.num_classes) == (512, 10)


@pytest.mark.parametrize("name", CONVNETS)
def test_convnets(name):
    """Catches: another width, a layer too many, mean-pooling, another padding or stride, a layer without ReLU."""
    channels, widths = CONVNETS[name]
    extractor = common.build_extractor(name, 28, small_stem=False)
    x = torch.randn(2, 3, 28, 28)
    z = x
    sizes = []
    parameters = list(extractor.parameters())
    for weight, bias in zip(parameters[::2], parameters[1::2]):
        sizes.append(tuple(weight.shape[2:]) + (len(weight),))
        if weight.dim() == 4:
            z = F.max_pool2d(F.conv2d(z, weight, bias), 2).relu()
        else:
            z = F.linear(z.flatten(1), weight, bias).relu()
    assert sizes == [(5, 5, n) for n in channels] + [(n,) for n in widths]
    torch.testing.assert_close(extractor(x), z)


def test_parameter_counts():
    """Catches: another kernel, width or depth than the papers', or torchvision's own last layer."""
    cnn4 = 2432 + 51264 + 1600 * 512 + 512
    assert size(net("cnn4")) == cnn4 + 5130
    assert size(sphere_net()) == cnn4 + 512 * 128 + 128 + 1290
    with torch.device("meta"):
        small = common.build_net(a_dataset(), flags("resnet18", device="meta"))
        large = flags("resnet50", device="meta", small_stem=True, feature_dim=2048)
        large = common.build_net(a_dataset(classes=100), large)
        extractors = [common.build_extractor(name, 32, False) for name in ("resnet34", "googlenet", "mobilenet_v2")]
    assert (common.model_size(small), size(large)) == (11_181_642, 23_705_252)  # FedFM, Table III
    # torchvision's whole networks without their last layers
    assert [size(each) for each in extractors] == [21_797_672 - 513_000, 6_624_904 - 1_025_000, 3_504_872 - 1_281_000]


def test_small_resnets_and_stems():
    """Catches: a stage too many or too few; a small stem that still reduces the image."""
    x = torch.randn(2, 3, 32, 32)
    for name, width in dict(resnet4=64, resnet6=128, resnet8=256, resnet10=512).items():
        assert common.build_extractor(name, 32, False)(x).shape[1] == width
    for small_stem, pixels in (False, 8), (True, 32):
        stem = common.build_extractor("resnet18", 32, small_stem)
        assert stem.maxpool(stem.relu(stem.bn1(stem.conv1(x)))).shape[-1] == pixels


@pytest.mark.parametrize("name", ["googlenet", "mobilenet_v2"])
def test_nothing_is_dropped(name):
    """Catches: torchvision's dropout before its last layer, which is not ours."""
    for layer in net(name).extractor.modules():
        assert not isinstance(layer, torch.nn.Dropout) or layer.p == 0


@pytest.mark.parametrize("group", GROUPS)
def test_groups_deal_architectures_by_number(group):
    """Catches: a model left out, another order, a ResNet of another depth, classifiers of other widths."""
    names = GROUPS[group]
    for client in range(20):
        hidden = HTC4[client % 4] if group.endswith("htc4") else []
        assert common.architecture(group, client) == (names[client % len(names)], hidden)


def test_classifiers_with_a_hidden_layer():
    """Catches: another width, or no ReLU in between."""
    first, relu, last = net("res34-htc4", client=2).classifier
    assert (first.weight.shape, last.weight.shape) == ((256, 512), (10, 256))
    assert isinstance(relu, torch.nn.ReLU)


def test_each_client_has_its_own_architecture():
    """Catches: one architecture for all clients of a group."""
    y = torch.arange(90) % 10
    data = common.Dataset(images(90, 24), y, torch.zeros_like(y), y > 10, list("0123456789"), ["mine"])
    args = flags("htcnn8", clients=9, partition="iid", dataset="mine", subset=1.0)
    clients = common.make_clients(data, args)
    for i in range(9):
        assert equal(clients[i].net, common.build_net(data, args, i))
    assert len({size(client.net) for client in clients}) == 8


# --- initial weights ------------------------------------------------------------------------------

@pytest.mark.parametrize("build", [net, sphere_net])
def test_initial_weights_depend_on_the_seed_alone(build):
    """Catches: clients that begin at different points; every seed the same; torch's own generator moved on."""
    state = torch.get_rng_state()
    one, again, other = build("cnn4"), build("cnn4"), build("cnn4", seed=1)
    assert equal(one, again) and one.classifier.weight is not again.classifier.weight
    for a, b in zip(one.parameters(), other.parameters()):
        assert not torch.equal(a, b)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("group, clients", [("cnn4", [0, 5]), ("res34-htc4", [0, 3])])
def test_equal_extractors_start_with_equal_weights(group, clients):
    """Catches: extractors that depend on the client or its classifier. FedTGP's HtC4 compares classifiers alone."""
    first, *others = [net(group, client).extractor for client in clients]
    assert all(equal(first, other) for other in others)


def test_weights_can_be_taken_as_one_vector():
    """Catches: weights in channels_last order: SCAFFOLD, FedDyn and others, which take them as a vector, crash."""
    model = net("resnet4")
    x = images().contiguous(memory_format=torch.channels_last)  # as clients have them
    model(x).sum().backward()
    vector = torch.nn.utils.parameters_to_vector(model.parameters())
    gradient = torch.nn.utils.parameters_to_vector([parameter.grad for parameter in model.parameters()])
    assert len(vector) == len(gradient) == size(model)


# --- features -------------------------------------------------------------------------------------

def test_images_are_normalised():
    """Catches: images in [0, 255] that reach the extractor; the mean after the division; channels exchanged."""
    def flat(mean, std, D):
        return common.Net(torch.nn.Flatten(), torch.nn.Identity(), D, 10, mean, std)
    x = torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2)
    assert flat((0.5,), (0.25,), 2).features(x).tolist() == [[-2, 2]]
    white = torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)
    assert flat((0.0, 0.5, 1.0), (1.0, 0.5, 2.0), 3).features(white).tolist() == [[1, 1, 0]]
    usual = net("cnn4")
    assert usual.mean.flatten().tolist() == usual.std.flatten().tolist() == [0.5]


@pytest.mark.parametrize("D, want", [(2, [1.5, 3.5]), (4, [1, 2, 3, 4]), (8, [1, 1, 2, 2, 3, 3, 4, 4])])
def test_features_are_pooled_to_size_D(D, want):
    """Catches: features cut off, or their maximum instead of their mean."""
    pooled = common.Net(torch.nn.Flatten(), torch.nn.Identity(), D, 10, mean=(0.0,), std=(1 / 255,))
    x = torch.tensor([1, 2, 3, 4], dtype=torch.uint8).view(1, 1, 2, 2)
    assert pooled.features(x).tolist() == [pytest.approx(want)]


@pytest.mark.parametrize("model", ["cnn4", "resnet10"])  # a deep ResNet leaves one pixel, too few for BatchNorm
def test_fedlsa_features_are_on_the_sphere(model):
    """Catches: features that keep their length, --no-sphere that changes nothing, or weights that depend on it."""
    x = images(5)
    on_sphere = sphere_net(model).eval().features(x)
    free = sphere_net(model, no_sphere=True).eval().features(x)
    torch.testing.assert_close(on_sphere.norm(dim=1), torch.ones(5))
    assert abs(free.norm(dim=1) - 1).max() > 0.1
    torch.testing.assert_close(free / free.norm(dim=1, keepdim=True), on_sphere)


def test_fedlsa_normalises_images():
    """Catches: pixels from 0 to 255, or a projector that is left out."""
    projector = torch.nn.Linear(4, 2, bias=False)
    projector.weight.data = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 1.0]])
    model = fedlsa.SphereNet(torch.nn.Flatten(), projector, torch.nn.Linear(2, 10), on_sphere=False)
    x = torch.tensor([0, 10, 20, 255], dtype=torch.uint8).view(1, 1, 2, 2)
    assert model.features(x).tolist() == [[-1, 1]]
