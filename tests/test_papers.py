"""What each script presets for each data set. Where a value stands in its paper is said beside SETTINGS."""

import json
from types import SimpleNamespace

import pytest

import common
from conftest import SMALL, arguments

# one model for each client
FEDPROTO = dict(
    clients=20, participation=1.0, partition="dirichlet", beta=0.1, model="cnn4", feature_dim=512, rounds=1000,
    local_epochs=1, batch_size=10, batches="full", lr=0.01, momentum=0.0, weight_decay=0.0, lam=0.1,
    distance="euclidean")
FEDTGP = dict(FEDPROTO, margin_rule="pairwise", tau=100, server_epochs=100, no_mlp=False)
FEDSA = dict(FEDPROTO, lam_r=0.1, lam_mcl=None, lam_cc=1, alpha=0.9999, projection="mlp")
del FEDSA["lam"]
OWN_GLYPHS = dict(
    model="htcnn8", image_size=24, subset=0.3, rounds=10, local_epochs=3, momentum=0.9, batches="all",
    checkpoint_every=0)

# one model for all
ONE_MODEL = dict(clients=None, participation=1.0, partition="domain", lr=0.01, momentum=0.9, weight_decay=1e-5)
FEDLSA = dict(
    ONE_MODEL, model="cnn4", feature_dim=128, rounds=100, local_epochs=5, batch_size=64, server_steps=500,
    compactness="vmf", no_sphere=False)
LSA_DIGITS = dict(FEDLSA, alpha=0.02, lam=0.1, tau=0.1)
LSA_OFFICE = dict(FEDLSA, alpha=0.4, lam=0.7, tau=0.2)
FEDPLCC = dict(
    ONE_MODEL, image_size=64, model="resnet10", feature_dim=512, rounds=50, local_epochs=10, batch_size=32,
    images_per_class=30, lam_contra=1, lam_corr=None, phi=0.5, tau=0.07, alpha=0.5, uniform_weights=False,
    weighted_means=False, small_stem=False)
PLCC_FOLDER = dict(FEDPLCC, images_per_class=None, image_size=None)
FEDFM = dict(
    ONE_MODEL, clients=10, partition="dirichlet", beta=0.5, dominant_share=0.46, model="resnet18", feature_dim=512,
    rounds=100, local_epochs=10, batch_size=64, batches="full", validation=0.2, lam=50, warmup=20, match="cg", temperature=0.1,
    aggregate="weighted", lite=False, model_every=1, prox=0, augment=False)
FM_DOMAINS = dict(FEDFM, clients=None, partition="domain", model="resnet10", rounds=50, batch_size=32, warmup=0)
ONE_GLYPHS = dict(images_per_class=20, local_epochs=5, batch_size=32, checkpoint_every=0)
LABEL_SKEW = dict(partition="dirichlet", beta=0.5, clients=10)

EXPECTED = {  # "one": any folder of images; "several": a folder with several domains
    ("fedlsa", "digits"): dict(LSA_DIGITS, domain_fraction=0.01, clients=None, image_size=32,
                               domain_clients={"mnist": 1, "usps": 4, "svhn": 2, "syn": 3}),
    ("fedlsa", "office"): dict(LSA_OFFICE, domain_fraction=0.2, clients=10, image_size=32),
    ("fedlsa", "pacs"): dict(LSA_OFFICE, domain_fraction=0.3, clients=10, image_size=225),
    ("fedlsa", "glyphs"): dict(LSA_OFFICE, **ONE_GLYPHS, rounds=12),
    ("fedlsa", "one"): dict(LSA_DIGITS, **LABEL_SKEW),
    ("fedlsa", "several"): LSA_OFFICE,
    ("fedplcc", "digit5"): dict(FEDPLCC, lam_contra=100),
    ("fedplcc", "office"): dict(FEDPLCC, lam_contra=20, rounds=100),
    ("fedplcc", "domainnet"): dict(FEDPLCC, images_per_class=40),
    ("fedplcc", "digits"): dict(FEDPLCC, lam_contra=100, image_size=32),
    ("fedplcc", "glyphs"): dict(FEDPLCC, **ONE_GLYPHS, rounds=8, image_size=32),
    ("fedplcc", "one"): dict(PLCC_FOLDER, **LABEL_SKEW),
    ("fedplcc", "several"): PLCC_FOLDER,
    ("fedfm", "cifar100"): dict(FEDFM, model="resnet50", feature_dim=2048, small_stem=True, augment=True),
    ("fedfm", "cinic10"): dict(FEDFM, dominant_share=0.5),
    ("fedfm", "digits"): dict(FM_DOMAINS, images_per_class=30),
    ("fedfm", "glyphs"): dict(FM_DOMAINS, **ONE_GLYPHS, rounds=10),
    ("fedfm", "one"): FEDFM,
    ("fedfm", "several"): FM_DOMAINS,
}
for script, table in ("fedproto", FEDPROTO), ("fedtgp", FEDTGP), ("fedsa", FEDSA):
    EXPECTED[script, "cifar10"] = EXPECTED[script, "several"] = table
    EXPECTED[script, "fmnist"] = dict(table, model="cnn4" if script == "fedsa" else "htcnn8")
    EXPECTED[script, "glyphs"] = dict(table, **OWN_GLYPHS)


@pytest.mark.parametrize("script, dataset", EXPECTED)
def test_settings(script, dataset, tmp_path):
    """Every preset holds the values above and sets no other flag."""
    for folder in "one/train", "one/test", "several/photo", "several/sketch":
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "image.png").touch()
    found = vars(arguments(script, "--dataset", dataset, "--data", tmp_path))
    want = EXPECTED[script, dataset]
    assert {name: found[name] for name in want} == want
    assert set(common.preset(SimpleNamespace(**found), __import__(script).SETTINGS)) <= set(want)


@pytest.mark.parametrize("words, want", [("--model cnn4", 0.01), ("--model htcnn8", 1),
                                         ("--lam-mcl 0 --model htcnn8", 0)])
def test_fedsa_eq9_lambda_2(words, want, run):
    """λ2 is 0.01, or 1 for a group, unless it is typed. args.json says which."""
    folder = run("fedsa", SMALL["fedsa"], "--rounds 1", words).folder
    assert json.loads((folder / "args.json").read_text())["lam_mcl"] == want
