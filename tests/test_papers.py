"""The value of every flag for each script and data set. Where a value stands in its paper is said beside SETTINGS."""

import pytest
import torch

import common
import fedfm
import fedsa
from conftest import PERSONAL, arguments, every_script

SHARED = dict(  # unless a script below says otherwise
    participation=1.0, beta=0.1, classes_per_client=2, missing=1, dominant_share=0.46, domain_clients=None,
    domain_fraction=None, images_per_class=None, subset=1.0, image_size=None, small_stem=False, batches="all",
    seed=0, trials=1, eval_every=1, checkpoint_every=10)

# --- one model for each client ----------------------------------------------------------------------

OWN_MODELS = dict(
    SHARED, clients=20, partition="dirichlet", model="cnn4", feature_dim=512, rounds=1000, local_epochs=1,
    batch_size=10, batches="full", lr=0.01, momentum=0.0, weight_decay=0.0)
FEDPROTO = dict(OWN_MODELS, lam=0.1, distance="euclidean")
FEDTGP = dict(OWN_MODELS, lam=0.1, distance="euclidean", margin_rule="pairwise", tau=100, server_epochs=100,
              no_mlp=False)
FEDSA = dict(OWN_MODELS, lam_r=0.1, lam_mcl=None, lam_cc=1, alpha=0.9999, distance="euclidean", projection="mlp")

# --- one model for all ------------------------------------------------------------------------------

ONE_MODEL = dict(SHARED, clients=None, partition="domain", lr=0.01, momentum=0.9, weight_decay=1e-5)
FEDLSA = dict(
    ONE_MODEL, model="cnn4", feature_dim=128, rounds=100, local_epochs=5, batch_size=64, server_steps=500,
    compactness="vmf", no_sphere=False)
LSA_DIGITS = dict(FEDLSA, alpha=0.02, lam=0.1, tau=0.1)
LSA_OFFICE = dict(FEDLSA, alpha=0.4, lam=0.7, tau=0.2)
FEDPLCC = dict(
    ONE_MODEL, image_size=64, model="resnet10", feature_dim=512, rounds=50, local_epochs=10, batch_size=32,
    images_per_class=30, lam_contra=1, lam_corr=None, phi=0.5, tau=0.07, alpha=0.5, uniform_weights=False)
PLCC_FOLDER = dict(FEDPLCC, images_per_class=None, image_size=None)
FEDFM = dict(
    ONE_MODEL, clients=10, partition="dirichlet", beta=0.5, model="resnet18", feature_dim=512, rounds=100,
    local_epochs=10, batch_size=64, validation=0.2, lam=50, warmup=20, match="cg", temperature=0.1,
    aggregate="weighted", lite=False, model_every=1, prox=0, augment=False)
FM_DOMAINS = dict(FEDFM, clients=None, partition="domain", beta=0.5, model="resnet10", rounds=50, batch_size=32,
                  warmup=0)

# --- data sets --------------------------------------------------------------------------------------

OWN_GLYPHS = dict(model="htcnn8", image_size=24, subset=0.3, rounds=10, local_epochs=3, momentum=0.9, batches="all",
                  checkpoint_every=0)
ONE_GLYPHS = dict(images_per_class=20, local_epochs=5, batch_size=32, checkpoint_every=0)
LABEL_SKEW = dict(partition="dirichlet", beta=0.5, clients=10)
EXPECTED = {  # "folder": any folder of images; "domains": one with several domains
    ("fedlsa", "digits"): dict(LSA_DIGITS, domain_fraction=0.01, clients=10,
                               domain_clients={"mnist": 1, "usps": 4, "svhn": 2, "syn": 3}),
    ("fedlsa", "office"): dict(LSA_OFFICE, domain_fraction=0.2, clients=10, image_size=32),
    ("fedlsa", "pacs"): dict(LSA_OFFICE, domain_fraction=0.3, clients=10, image_size=225),
    ("fedlsa", "glyphs"): dict(LSA_OFFICE, **ONE_GLYPHS | dict(rounds=12)),
    ("fedlsa", "folder"): dict(LSA_DIGITS, **LABEL_SKEW),
    ("fedlsa", "domains"): LSA_OFFICE,
    ("fedplcc", "digit5"): dict(FEDPLCC, lam_contra=100),
    ("fedplcc", "office"): dict(FEDPLCC, lam_contra=20, rounds=100),
    ("fedplcc", "domainnet"): dict(FEDPLCC, images_per_class=40),
    ("fedplcc", "digits"): dict(FEDPLCC, lam_contra=100, image_size=32),
    ("fedplcc", "glyphs"): dict(FEDPLCC, **ONE_GLYPHS | dict(rounds=8, image_size=32)),
    ("fedplcc", "folder"): dict(PLCC_FOLDER, **LABEL_SKEW),
    ("fedplcc", "domains"): PLCC_FOLDER,
    ("fedfm", "cifar10"): FEDFM,
    ("fedfm", "cifar100"): dict(FEDFM, model="resnet50", feature_dim=2048, small_stem=True, augment=True),
    ("fedfm", "cinic10"): dict(FEDFM, dominant_share=0.5),
    ("fedfm", "digits"): dict(FM_DOMAINS, images_per_class=30),
    ("fedfm", "glyphs"): dict(FM_DOMAINS, **ONE_GLYPHS | dict(rounds=10)),
    ("fedfm", "folder"): FEDFM,
    ("fedfm", "domains"): FM_DOMAINS,
}
for script, table in ("fedproto", FEDPROTO), ("fedtgp", FEDTGP), ("fedsa", FEDSA):
    for dataset in "cifar10", "cifar100", "flowers102", "tinyimagenet", "fmnist", "folder", "domains":
        EXPECTED[script, dataset] = table
    EXPECTED[script, "glyphs"] = dict(table, **OWN_GLYPHS)
for script in "fedproto", "fedtgp":
    EXPECTED[script, "fmnist"] = dict(EXPECTED[script, "cifar10"], model="htcnn8")


@pytest.mark.parametrize("script, dataset", EXPECTED)
def test_settings(script, dataset, tmp_path):
    """Catches: τ or S of FedTGP divided by ten, FedLSA's digits taken for PACS, a flag that no table has."""
    for domain in "photo", "sketch":
        (tmp_path / "domains" / domain).mkdir(parents=True)
    found = vars(arguments(script, "--dataset", dataset, "--data", tmp_path))
    if found["domain_clients"]:
        found["clients"] = sum(found["domain_clients"].values())
    for name in "script", "dataset", "data", "device", "workers", "resume", "out", "name", "no_plots":
        del found[name]
    assert found == EXPECTED[script, dataset]


@every_script
def test_glyphs_are_the_default(script):
    """Catches: a script that needs a download when it is started without flags."""
    assert arguments(script) == arguments(script, "--dataset glyphs")


@pytest.mark.parametrize("model", common.MODELS)
def test_fedsa_lambda_2(model):
    """Catches: λ2 = 1 for one architecture, 0.01 for a group, a typed λ2 that is overwritten."""
    want = 1 if model in common.GROUPS else 0.01
    assert fedsa.lambda_2(arguments("fedsa", "--model", model)) == want
    assert fedsa.lambda_2(arguments("fedsa", "--lam-mcl 0 --model", model)) == 0


@pytest.mark.parametrize("script", PERSONAL)
def test_a_quarter_of_a_clients_images_is_for_testing(script):
    """Catches: another share, or test images of the data set that are not divided."""
    y = torch.arange(404) % 10
    data = common.Dataset(torch.zeros(404, 3, 16, 16, dtype=torch.uint8), y, torch.zeros_like(y), y > 7,
                          list("0123456789"), ["mine"])
    args = arguments(script, "--device cpu --dataset folder --partition iid --clients 2 --model cnn4")
    sizes = [(len(client.train.y), len(client.test.y)) for client in common.make_clients(data, args)]
    assert sizes == [(152, 50), (152, 50)]  # 151.5 training images are 152


@pytest.mark.parametrize("dataset, mean, std", [
    ("cifar10", (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    ("cifar100", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    ("cinic10", (0.5,), (0.5,))])
def test_fedfm_normalises_images_as_its_authors_do(dataset, mean, std):
    """Catches: CIFAR-10's numbers for CIFAR-100, or those of a channel for another."""
    found = fedfm.NORMALISATION.get(dataset, fedfm.NORMALISATION["other"])
    assert found == (mean, std)
