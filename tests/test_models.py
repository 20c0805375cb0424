"""Feature sizes, parameter counts, who gets which architecture, and the same weights for the same one."""

from types import SimpleNamespace

import pytest
import torch
import torchvision

import common, fedlsa

def net(model, client=0, kind=common.Net, **other):
    args = SimpleNamespace(**{**dict(model=model, feature_dim=512, small_stem=False, seed=0, device="cpu",
                                     classes=10, pixels=32), **other})
    return common.build_net(args, client, kind)

def numbers(module):
    return sum(p.numel() for p in module.parameters())

@pytest.mark.parametrize("name", common.MODELS)
@pytest.mark.parametrize("kind,size,D", [(common.Net, 28, 512), (fedlsa.SphereNet, 32, 128)])
def test_every_model_gives_features_of_size_D(name, kind, size, D):
    model, x = net(name, 0, kind, feature_dim=D, pixels=size), torch.randint(255, (2, 3, size, size)).byte()
    z = model.features(x)
    assert z.shape == (2, D) and model.classifier(z).shape == model(x).shape == (2, 10)
    assert kind is common.Net or torch.allclose(z.norm(dim=1), torch.ones(2), atol=1e-5)

def test_parameter_counts():
    cnn, heads = 2432 + 51264 + 1600 * 512 + 512, dict(resnet34=513_000, googlenet=1_025_000)
    assert numbers(net("cnn4")) == cnn + 5130
    assert numbers(net("lsa_cnn", feature_dim=128)) == cnn + 512 * 128 + 128 + 1290
    assert numbers(net("resnet18")) == 11_181_642  # FedFM's table: 11,182 k
    for name, head in {**heads, "mobilenet_v2": 1_281_000}.items():
        options = dict(aux_logits=False, init_weights=False) if name == "googlenet" else {}
        with torch.device("meta"):
            whole = numbers(getattr(torchvision.models, name)(weights=None, **options))
        assert numbers(net(name).extractor) == whole - head

def test_small_resnets_and_stems():
    x = torch.randn(2, 3, 32, 32)
    assert [net(f"resnet{n}").extractor(x).shape[1] for n in (4, 6, 8, 10)] == [64, 128, 256, 512]
    stems = [net("resnet18", small_stem=small).extractor for small in (False, True)]
    assert [stem.maxpool(stem.relu(stem.bn1(stem.conv1(x)))).shape[-1] for stem in stems] == [8, 32]

def test_groups_deal_architectures_by_number():
    sizes = dict(htfe2=2, htfe3=3, htfe4=4, htfe5=5, htfe8=8, htfe9=9, htcnn8=8)
    assert {group: len(set(common.GROUPS[group])) for group in sizes} == sizes
    names = [common.architecture("htfe3", i)[0] for i in range(4)]
    assert names == ["resnet10", "resnet18", "resnet34", "resnet10"]
    names, heads = zip(*(common.architecture("res34-htc4", i) for i in range(5)))
    assert set(names) == {"resnet34"} and [*map(list, heads)] == [[], [512], [256], [128], []]
    assert common.architecture("htfe8-htc4", 9)[0] == "googlenet"
    assert len({tuple(tuple(p.shape) for p in net("htcnn8", i).parameters()) for i in range(8)}) == 8
    head = net("res34-htc4", 2).classifier
    assert [tuple(m.weight.shape) for m in head if hasattr(m, "weight")] == [(256, 512), (10, 256)]

def test_same_architecture_same_weights_and_images_normalised_inside():
    state = torch.get_rng_state()
    a, b, c = (net("cnn4", i, seed=s).state_dict() for s, i in ((0, 0), (0, 5), (1, 0)))
    assert all(torch.equal(a[k], b[k]) and not torch.equal(a[k], c[k]) for k in a)
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is not touched
    model = common.Net(torch.nn.Flatten(), torch.nn.Identity(), 2, mean=(0.5,), std=(0.25,))
    assert model.features(torch.tensor([0, 255]).byte().view(1, 1, 1, 2)).tolist() == [pytest.approx([-2, 2])]
