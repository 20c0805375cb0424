"""Models: the papers' architectures and their sizes, who gets which, and equal initial weights."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import common
import fedlsa


def dataset(pixels=32, classes=10):
    """A data set, as far as a model needs to know it."""
    x = torch.zeros(40, 3, pixels, pixels, dtype=torch.uint8)
    y = torch.arange(40) % classes
    return common.Dataset(x, y, torch.zeros_like(y), y < 0, [""] * classes, [""])


def flags(model, **other):
    usual = dict(feature_dim=512, small_stem=False, seed=0, device="cpu", no_sphere=False)
    return SimpleNamespace(model=model, **usual | other)


def net(model, client=0, **other):
    return common.build_net(dataset(), flags(model, **other), client)


def sphere_net(model="cnn4", **other):
    return fedlsa.build_sphere_net(dataset(), flags(model, feature_dim=128, **other))[0]


def size(module):
    return sum(parameter.numel() for parameter in module.parameters())


def equal(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("n, widths", [(1, [512]), (3, [512, 512]), (5, [1024, 512]), (7, [1024, 512, 512])])
@pytest.mark.parametrize("channels", [[32], [32, 64]])
def test_convnets(n, channels, widths):
    """Convolutions are 5x5 with max-pooling; ReLU follows every layer."""
    name = f"htcnn8-{n + len(channels) - 1}"
    extractor = common.build_extractor(name, 28, small_stem=False)
    z = x = torch.randn(2, 3, 28, 28)
    outputs = []
    parameters = list(extractor.parameters())
    for weight, bias in zip(parameters[::2], parameters[1::2]):
        outputs.append(len(weight))
        if weight.dim() == 4:
            assert weight.shape[2:] == (5, 5)
            z = F.max_pool2d(F.conv2d(z, weight, bias), 2).relu()
        else:
            z = F.linear(z.flatten(1), weight, bias).relu()
    assert outputs == channels + widths
    torch.testing.assert_close(extractor(x), z)


@pytest.mark.parametrize("name, parameters", [("resnet34", 21_797_672 - 513_000), ("googlenet", 6_624_904 - 1_025_000),
                                              ("mobilenet_v2", 3_504_872 - 1_281_000)])
def test_networks_of_torchvision(name, parameters):
    """The last layer and dropout go; 28 pixels are enough."""
    with torch.device("meta"):  # shapes without numbers
        model = common.build_net(dataset(pixels=28), flags(name, device="meta"))
        z = model.features(torch.zeros(2, 3, 28, 28))
        assert z.shape == (2, 512)
        assert model.classifier(z).shape == (2, 10)
    assert size(model.extractor) == parameters
    for layer in model.extractor.modules():
        assert not isinstance(layer, torch.nn.Dropout) or layer.p == 0


def test_googlenet_begins_with_small_weights():
    """As torchvision's GoogLeNet does with init_weights; torch's own weights are five times as large."""
    googlenet = common.build_extractor("googlenet", 28, small_stem=False)
    assert googlenet.conv1.conv.weight.std().item() == pytest.approx(0.01, rel=0.1)


def test_small_resnets_and_stems():
    """Each stage doubles the width; a small stem keeps the image's size."""
    with torch.device("meta"):
        x = torch.randn(2, 3, 32, 32)
        for name, width in dict(resnet4=64, resnet6=128, resnet8=256, resnet10=512).items():
            assert common.build_extractor(name, 32, small_stem=False)(x).shape == (2, width)
        for small_stem, pixels in (False, 8), (True, 32):
            for name in "resnet10", "resnet18":
                stem = common.build_extractor(name, 32, small_stem)
                assert stem.maxpool(stem.conv1(x)).shape == (2, 64, pixels, pixels)


def test_parameter_counts():
    """Sizes agree with FedFM's Table III; FedLSA adds two layers to cnn4."""
    assert common.model_size(net("resnet18")) == 11_181_642
    large = flags("resnet50", small_stem=True, feature_dim=2048)
    assert common.model_size(common.build_net(dataset(classes=100), large)) == 23_705_252
    cnn4 = 2432 + 51264 + 1600 * 512 + 512
    assert common.model_size(sphere_net()) == cnn4 + 512 * 128 + 128 + 1290


def test_groups_deal_architectures_by_number():
    """Client i gets model i mod n of its group, and with HtC4 classifier i mod 4."""
    for i, name in (0, "cnn4"), (1, "googlenet"), (2, "mobilenet_v2"), (7, "resnet152"), (8, "cnn4"):
        assert common.architecture("htfe8", i) == (name, [])
    for group, want in {  # FedTGP's "Implementation Details"; htfe5 is from FedSA's code
        "htfe2": "cnn4 resnet18",
        "htfe3": "resnet10 resnet18 resnet34",
        "htfe4": "cnn4 googlenet mobilenet_v2 resnet18",
        "htfe5": "cnn4 resnet10 resnet18 resnet34 resnet50",
        "htfe9": "resnet4 resnet6 resnet8 resnet10 resnet18 resnet34 resnet50 resnet101 resnet152",
    }.items():
        names = want.split()
        assert [common.architecture(group, i)[0] for i in range(len(names) + 1)] == names + names[:1]
    for i, hidden in (0, []), (1, [512]), (2, [256]), (3, [128]), (4, []):
        assert common.architecture("res34-htc4", i) == ("resnet34", hidden)


def test_each_client_has_its_own_architecture():
    args = flags("htcnn8", clients=3, partition="iid", dataset="mine", subset=1.0)
    clients = common.make_clients(dataset(), args)
    assert [size(client.net) for client in clients] == [size(net(f"htcnn8-{n}")) for n in (1, 2, 3)]


@pytest.mark.parametrize("build", [net, sphere_net])
def test_initial_weights_depend_on_the_seed_alone(build):
    """Clients start with equal weights; torch's own generator is left as it was."""
    state = torch.get_rng_state()
    one, again, other = build("cnn4"), build("cnn4"), build("cnn4", seed=1)
    assert equal(one, again)
    for a, b in zip(one.parameters(), other.parameters()):
        assert not torch.equal(a, b)
    assert torch.equal(torch.get_rng_state(), state)


def test_htc4_changes_classifiers_alone():
    one, other = net("res34-htc4", client=0), net("res34-htc4", client=3)
    assert equal(one.extractor, other.extractor)
    first, relu, last = other.classifier
    assert (first.weight.shape, last.weight.shape) == ((128, 512), (10, 128))
    assert isinstance(relu, torch.nn.ReLU)


def test_images_are_normalised():
    """The extractor gets (x / 255 - mean) / std, per channel."""
    model = common.Net(torch.nn.Flatten(), None, 3, 10, mean=(0.0, 0.5, 1.0), std=(1.0, 0.5, 2.0))
    white = torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)
    assert model.features(white).tolist() == [[1, 1, 0]]
    assert model.features(0 * white).tolist() == [[0, -1, -0.5]]
    usual = net("cnn4")
    assert usual.mean.flatten().tolist() == usual.std.flatten().tolist() == [0.5]


@pytest.mark.parametrize("D, want", [(2, [-0.5, 0.5]), (4, [-1, 0, 1, 0]), (8, [-1, -1, 0, 0, 1, 1, 0, 0])])
def test_features_are_pooled_to_size_D(D, want):
    """More than D values are averaged, fewer are repeated."""
    x = torch.tensor([0, 127.5, 255, 127.5]).view(1, 1, 2, 2)
    pooled = common.Net(torch.nn.Flatten(), None, D, 10)
    assert pooled.features(x).tolist() == [want]


def test_fedlsa_features_are_on_the_sphere():
    """The extractor gets pixels from -1 to 1; only --no-sphere allows other lengths."""
    x = torch.randint(256, (5, 3, 32, 32), dtype=torch.uint8)
    on_sphere = sphere_net("resnet10").eval().features(x)  # leaves one pixel of an image, too few for BatchNorm
    model = sphere_net("resnet10", no_sphere=True).eval()
    free = model.features(x)
    torch.testing.assert_close(on_sphere.norm(dim=1), torch.ones(5))
    assert abs(free.norm(dim=1) - 1).max() > 0.1
    torch.testing.assert_close(F.normalize(free, dim=1), on_sphere)
    encoder, projector = model.extractor
    assert projector.out_features == 128
    torch.testing.assert_close(projector(encoder(x / 127.5 - 1)), free)
