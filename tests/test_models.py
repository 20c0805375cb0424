"""Feature sizes, parameter counts, who gets which architecture, and the same weights for the same architecture."""

import types

import pytest
import torch
import torchvision

import common


def args(model, **other):
    return types.SimpleNamespace(**{**dict(model=model, feature_dim=512, small_stem=False, seed=0, device="cpu"), **other})


def numbers(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", [*common.SINGLE, *common.HTCNN8])
@pytest.mark.parametrize("channels,size,dim", [(3, 32, 512), (1, 28, 64)])
def test_every_model_gives_features_of_size_D_and_trains(name, channels, size, dim):
    if name in ("resnet101", "resnet152", "resnet50") and channels == 1:
        pytest.skip("as resnet34, only larger")
    common.GROUPS.setdefault(name, [name])  # htcnn8-3 etc. have no name of their own on the command line
    net = common.build_net(args(name, feature_dim=dim), channels, size, 10)
    x = torch.randint(0, 255, (2, channels, size, size), dtype=torch.uint8)
    z = net.features(x)
    assert z.shape == (2, dim) and net(x).shape == (2, 10)
    assert torch.equal(net.classifier(z), net.classifier(z))
    net(x).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in net.parameters())
    if name == "lsa_cnn":
        assert torch.allclose(z.norm(dim=1), torch.ones(2))


@pytest.mark.parametrize("name,removed", [("resnet18", 512 * 1000 + 1000), ("resnet34", 513000), ("resnet50", 2049000),
                                          ("resnet101", 2049000), ("resnet152", 2049000), ("googlenet", 1025000),
                                          ("mobilenet_v2", 1281000)])
def test_torchvision_extractors_are_whole_but_for_the_head(name, removed):
    options = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
    with torch.device("meta"):
        whole = numbers(getattr(torchvision.models, name)(weights=None, **options))
    assert numbers(common.feature_extractor(name, 3, 32, 512)) == whole - removed


def test_parameter_counts_of_the_papers():
    assert numbers(common.build_net(args("cnn4"), 3, 32, 10)) == 2432 + 51264 + 1600 * 512 + 512 + 5130
    assert numbers(common.build_net(args("resnet18"), 3, 32, 10)) == 11_181_642  # FedFM's table: 11,182 k
    lsa = common.build_net(args("lsa_cnn", feature_dim=128), 3, 32, 10)
    assert numbers(lsa) == 2432 + 51264 + 1600 * 512 + 512 + 512 * 128 + 128 + 1290


def test_small_resnets_have_one_block_in_the_first_stages():
    sizes = [common.feature_extractor(f"resnet{n}", 3, 32, 512)(torch.randn(2, 3, 32, 32)).shape[1] for n in (4, 6, 8, 10)]
    assert sizes == [64, 128, 256, 512]


def test_small_stem():
    x = torch.randn(2, 3, 32, 32)
    def first_map(small):
        net = common.feature_extractor("resnet18", 3, 32, 512, small)
        return net.maxpool(net.relu(net.bn1(net.conv1(x)))).shape[-1]
    assert (first_map(False), first_map(True)) == (8, 32)


def test_groups_deal_architectures_by_number():
    assert [common.architecture("htfe3", i)[0] for i in range(4)] == ["resnet10", "resnet18", "resnet34", "resnet10"]
    assert [common.architecture("res34-htc4", i) for i in range(5)] == [
        ("resnet34", ()), ("resnet34", (512,)), ("resnet34", (256,)), ("resnet34", (128,)), ("resnet34", ())]
    assert common.architecture("htfe8-htc4", 9) == ("googlenet", (512,))
    assert common.architecture("htcnn8", 9) == ("htcnn8-2", ())
    assert [len(common.GROUPS[g]) for g in ("htfe2", "htfe3", "htfe4", "htfe5", "htfe8", "htfe9", "htcnn8")] == [2, 3, 4, 5, 8, 9, 8]


def test_heads():
    net = common.build_net(args("res34-htc4"), 3, 32, 10, client=2)
    assert [tuple(m.weight.shape) for m in net.classifier if hasattr(m, "weight")] == [(256, 512), (10, 256)]


def test_same_architecture_same_weights_other_seed_other_weights():
    state = torch.get_rng_state()
    a, b, c = (common.build_net(args("cnn4", seed=s), 3, 32, 10, i).state_dict() for s, i in ((0, 0), (0, 5), (1, 0)))
    assert all(torch.equal(a[k], b[k]) for k in a) and not torch.equal(a["classifier.weight"], c["classifier.weight"])
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is not touched


def test_images_are_normalised_inside():
    net = common.Net(torch.nn.Flatten(), torch.nn.Identity(), 2, mean=(0.5,), std=(0.25,))
    x = torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2)
    assert net.features(x).tolist() == [pytest.approx([-2.0, 2.0])]


def test_pooling_before_the_relu_is_the_same_function():
    x = torch.randn(4, 8, 10, 10)
    pool, relu = torch.nn.MaxPool2d(2), torch.nn.ReLU()
    assert torch.equal(relu(pool(x)), pool(relu(x)))
