"""The papers' settings at a glance: for each script and data set the value of every flag, and where it stands.

A row is a flag, its value and the place in the paper. A value in braces differs from one data set to the next. A place
that begins with "ours" means that the paper has no value: then it says where ours comes from. HtFLlib is the library of
FedTGP's authors, FPL's code is WenkeHuang/RethinkFL, FedFM's code is rui-ye/FedFM.

The tables come first, the tests that compare them with the scripts stand below."""
import numpy as np
import pytest
import torch
from PIL import Image

import common
import fedfm
import fedsa
from conftest import SMALL, arguments, every_script

# --- one model for each client: FedProto, FedTGP, FedSA ---------------------------------------------

OWN_MODELS = {  # FedTGP, "Setup". FedSA's "Setup" has the same numbers, of its cross-silo setting
    "clients": (20, "Implementation Details; FedSA's cross-device setting: 100"),
    "participation": (1.0, "Implementation Details: ρ; FedSA's cross-device setting: 0.1"),
    "partition": ("dirichlet", "Statistical heterogeneity: the practical setting"),
    "beta": (0.1, "Statistical heterogeneity"),
    "classes_per_client": (2, "Statistical heterogeneity: the pathological setting of cifar10; 10, 10, 20 elsewhere"),
    "rounds": (1000, "Implementation Details"),
    "local_epochs": (1, "Implementation Details"),
    "batch_size": (10, "Implementation Details"),
    "lr": (0.01, "Implementation Details: η"),
    "momentum": (0.0, "ours: HtFLlib has none"),
    "weight_decay": (0.0, "ours: HtFLlib has none"),
    "batches": ("full", "ours: HtFLlib leaves out a last, smaller batch"),
    "feature_dim": (512, "Model heterogeneity: K"),
}
FEDPROTO = {  # as FedTGP restates it: places are FedTGP's
    **OWN_MODELS,
    "model": ({"cifar10": "cnn4", "cifar100": "cnn4", "flowers102": "cnn4", "tinyimagenet": "cnn4",
               "fmnist": "htcnn8"}, "ours: the paper takes HtFE8; fmnist: Appendix B"),
    "lam": (0.1, "Implementation Details: λ, the same as FedProto"),
    "distance": ("euclidean", "below Eq. 4"),
    "aggregate": ("weighted", "Eq. 3"),
}
FEDTGP = {
    **OWN_MODELS,
    "model": FEDPROTO["model"],
    "lam": (0.1, "Implementation Details: λ"),
    "tau": (100, "Implementation Details: τ"),
    "server_epochs": (100, "Implementation Details: S"),
    "distance": ("euclidean", "below Eq. 4"),
    "margin_rule": ("pairwise", "Eq. 9"),
    "uploads": ("after", "Algorithm 1, lines 7 and 8"),
    "no_mlp": (False, "Trainable Global Prototypes: F"),
}
FEDSA = {
    **OWN_MODELS,
    "model": ("cnn4", "Statistical heterogeneity: the homogeneous model setting"),
    "lam_r": (0.1, "Implementation details: λ1"),
    "lam_mcl": (None, "Implementation details: λ2 by model, see FEDSA_LAM_MCL"),
    "lam_cc": (1, "Implementation details: λ3"),
    "alpha": (0.9999, "Implementation details: α"),
    "distance": ("euclidean", "below Eq. 5"),
    "margin_rule": ("average", "Eq. 6"),
    "projection": ("mlp", "the authors' code: the paper has an embedding layer and does not say of what"),
}
FEDSA_LAM_MCL = {  # λ2 by model, "Implementation details": 0.01 for one architecture, 1 for model heterogeneity
    "cnn4": 0.01, "resnet10": 0.01, "resnet18": 0.01, "googlenet": 0.01,
    "htfe2": 1, "htfe3": 1, "htfe4": 1, "htfe5": 1, "htfe8": 1, "htfe9": 1,
    "htcnn8": 1, "res34-htc4": 1, "htfe8-htc4": 1,
}

# --- one model for all: FedLSA, FedPLCC, FedFM ------------------------------------------------------

FEDLSA = {
    "clients": (10, "Datasets"),
    "participation": (1.0, "Algorithm 1: m = 1 ... M"),
    "partition": ("domain", "Datasets: the data of a domain go to certain clients"),
    "domain_clients": ({"digits": {"mnist": 1, "usps": 4, "svhn": 2, "syn": 3}, "office": None, "pacs": None},
                       "Datasets; ours for office and pacs: domains in turn"),
    "domain_fraction": ({"digits": 0.01, "office": 0.2, "pacs": 0.3}, "ours: FPL's code, which has no pacs"),
    "rounds": (100, "Implementation Details: T"),
    "local_epochs": (5, "Implementation Details: E_c"),
    "server_steps": (500, "Implementation Details: E_s"),
    "batch_size": (64, "Implementation Details"),
    "lr": (0.01, "ours: FPL's code"),
    "momentum": (0.9, "ours: FPL's code"),
    "weight_decay": (1e-5, "ours: FPL's code"),
    "model": ("cnn4", "Implementation Details: two convolutions and three linear layers, the last two in SphereNet"),
    "feature_dim": (128, "ours: the paper has no number for L"),
    "alpha": ({"digits": 0.02, "office": 0.4, "pacs": 0.4}, "Implementation Details: 0.02 or 0.4; ours: where which"),
    "lam": ({"digits": 0.1, "office": 0.7, "pacs": 0.7}, "Implementation Details: 0.1 or 0.7; ours: where which"),
    "tau": ({"digits": 0.1, "office": 0.2, "pacs": 0.2}, "Implementation Details: 0.1 or 0.2; ours: where which"),
    "compactness": ("vmf", "Eq. 8"),
    "no_sphere": (False, "Hyperspherical Contrast: h = nor(φ(z))"),
}
FEDPLCC = {
    "clients": (None, "Section IV: one for each domain, that is 5, 4 and 6"),
    "participation": (1.0, "Algorithm 1: k = 1 ... K"),
    "partition": ("domain", "Section IV"),
    "images_per_class": ({"digit5": 30, "office": 30, "domainnet": 40}, "Section IV: about 300, 300, 400; 10 classes"),
    "rounds": ({"digit5": 50, "office": 100, "domainnet": 50}, "Section IV: T"),
    "local_epochs": (10, "Section IV: E; epochs, as Table I says"),
    "batch_size": (32, "ours: FedPLVM's code"),
    "lr": (0.01, "Section IV"),
    "momentum": (0.9, "Section IV"),
    "weight_decay": (1e-5, "Section IV"),
    "model": ("resnet10", "Section IV"),
    "feature_dim": (512, "Section IV"),
    "lam_contra": ({"digit5": 100, "office": 20, "domainnet": 1}, "Section IV: λ1"),
    "lam_corr": ({"digit5": 1000, "office": 200, "domainnet": 10}, "Section IV: λ2 = 10 λ1"),
    "phi": (0.5, "Section IV: φ"),
    "tau": (0.07, "Section IV: τ"),
    "alpha": (0.5, "Section IV: α"),
    "finch_level": ("last", "ours: FPL's code"),
    "uniform_weights": (False, "Eqs. 6 and 8: W_g"),
    "local_prototypes": ("finch", "Eq. 9"),
}
FEDFM = {
    "clients": (10, "Section VII-A: K"),
    "participation": (1.0, "Section VII-A: every client in each round"),
    "partition": ("dirichlet", "Section VII-A: NIID-1"),
    "beta": (0.5, "Section VII-A: NIID-1"),
    "dominant_share": ({"cifar10": 0.46, "cifar100": 0.46, "cinic10": 0.5},
                       "ours: FedFM's code for NIID-2, 23 of 50 and 45 of 90 parts of a class"),
    "missing": (1, "Table IV: NIID-3, the first of 1, 2, 3, 5, 7"),
    "rounds": (100, "Section VII-A: T"),
    "local_epochs": (10, "Section VII-A"),
    "batch_size": (64, "Section VII-A"),
    "lr": (0.01, "Section VII-A"),
    "momentum": (0.9, "Section VII-A"),
    "weight_decay": (1e-5, "Section VII-A"),
    "validation": (0.2, "Section VII-A"),
    "model": ({"cifar10": "resnet18", "cifar100": "resnet50", "cinic10": "resnet18"}, "Section VII-A"),
    "small_stem": ({"cifar10": False, "cifar100": True, "cinic10": False},
                   "Table III: FedAvg's 11,182 and 23,705 thousand numbers are those of these models"),
    "feature_dim": ({"cifar10": 512, "cifar100": 2048, "cinic10": 512},
                    "Table III: FedFM has 5 and 204 thousand numbers more, C times D"),
    "lam": (50, "Section VII-A: λ"),
    "warmup": (20, "Section VII-A: T_s"),
    "temperature": (0.1, "Section VII-D: α"),
    "match": ("cg", "Section VII-A: with CG unless explicitly specified"),
    "aggregate": ("weighted", "Eq. 9"),
    "lite": (False, "Section VI: a variant"),
    "model_every": (1, "Section VII-C: a, of the variant"),
    "prox": (0, "Section VII-D: a term of FedProx"),
    "augment": ({"cifar10": False, "cifar100": True, "cinic10": False}, "ours: FedFM's code; cinic10 as cifar10"),
}

# --- what the tables above leave out ----------------------------------------------------------------

SHARED = {  # no paper says otherwise
    "subset": (1.0, "all images"),
    "participation": (1.0, "all clients in each round"),
    "beta": (0.1, "FedTGP, FedSA"),
    "classes_per_client": (2, "FedTGP; with --partition pathological"),
    "missing": (1, "FedFM; with --partition missing"),
    "dominant_share": (0.46, "FedFM's code; with --partition dominant"),
    "domain_clients": (None, "domains in turn"),
    "domain_fraction": (None, "equal shares"),
    "images_per_class": (None, "as many as there are"),
    "small_stem": (False, "torchvision's ResNets"),
    "batches": ("all", "every image in each epoch"),
    "seed": (0, "ours"),
    "trials": (1, "ours; the papers of FedTGP, FedSA and FedFM: 3"),
    "eval_every": (1, "after each round"),
    "checkpoint_every": (10, "ours"),
}
NOT_SETTINGS = {"script", "dataset", "data", "device", "workers", "resume", "out", "name", "no_plots", "image_size"}

PAPERS = {
    "fedproto": (FEDPROTO, ["cifar10", "cifar100", "flowers102", "tinyimagenet", "fmnist"]),
    "fedtgp": (FEDTGP, ["cifar10", "cifar100", "flowers102", "tinyimagenet", "fmnist"]),
    "fedsa": (FEDSA, ["cifar10", "cifar100", "flowers102", "tinyimagenet", "fmnist"]),
    "fedlsa": (FEDLSA, ["digits", "office", "pacs"]),
    "fedplcc": (FEDPLCC, ["digit5", "office", "domainnet"]),
    "fedfm": (FEDFM, ["cifar10", "cifar100", "cinic10"]),
}

# Data sets that are in no paper: the settings of the one named first, but for these. All of it is ours.
LABEL_SKEW = dict(partition="dirichlet", beta=0.5, clients=10, domain_clients=None, domain_fraction=None,
                  images_per_class=None)
OWN_GLYPHS = dict(subset=0.3, model="htcnn8", rounds=10, local_epochs=3, momentum=0.9, batches="all",
                  checkpoint_every=0)
ONE_GLYPHS = dict(clients=None, domain_fraction=None, images_per_class=20, local_epochs=5, batch_size=32,
                  checkpoint_every=0)
FM_DOMAINS = dict(partition="domain", clients=None, model="resnet10", rounds=50, batch_size=32, warmup=0)
OURS = {  # "folder": any folder of images; "domains": one that has domains
    ("fedproto", "glyphs"): ("cifar10", OWN_GLYPHS),
    ("fedproto", "folder"): ("cifar10", {}),
    ("fedproto", "domains"): ("cifar10", {}),
    ("fedtgp", "glyphs"): ("cifar10", OWN_GLYPHS),
    ("fedtgp", "folder"): ("cifar10", {}),
    ("fedtgp", "domains"): ("cifar10", {}),
    ("fedsa", "glyphs"): ("cifar10", OWN_GLYPHS),
    ("fedsa", "folder"): ("cifar10", {}),
    ("fedsa", "domains"): ("cifar10", {}),
    ("fedlsa", "glyphs"): ("office", {**ONE_GLYPHS, "rounds": 12}),
    ("fedlsa", "folder"): ("digits", LABEL_SKEW),
    ("fedlsa", "domains"): ("office", dict(clients=None, domain_fraction=None)),
    ("fedplcc", "glyphs"): ("domainnet", {**ONE_GLYPHS, "rounds": 8}),
    ("fedplcc", "folder"): ("domainnet", LABEL_SKEW),
    ("fedplcc", "domains"): ("domainnet", dict(images_per_class=None)),
    ("fedplcc", "digits"): ("digit5", {}),
    ("fedfm", "glyphs"): ("cifar10", {**FM_DOMAINS, **ONE_GLYPHS, "rounds": 10}),
    ("fedfm", "folder"): ("cifar10", {}),
    ("fedfm", "domains"): ("cifar10", FM_DOMAINS),
    ("fedfm", "digits"): ("cifar10", {**FM_DOMAINS, "images_per_class": 30}),
}

# --- images -----------------------------------------------------------------------------------------

PIXELS = {  # height and width
    "cifar10": (32, "the data set's own"), "cifar100": (32, "the data set's own"),
    "svhn": (32, "the data set's own"), "cinic10": (32, "the data set's own"),
    "mnist": (28, "the data set's own"), "fmnist": (28, "the data set's own"), "usps": (16, "the data set's own"),
    "tinyimagenet": (64, "the data set's own"),
    "flowers102": (64, "ours: as HtFLlib"),
    "digits": (32, "FedLSA, Table 1"),
    "office": ({"fedlsa": 32, "others": 64}, "FedLSA, Table 1; others: ours"),
    "pacs": ({"fedlsa": 225, "others": 64}, "FedLSA, Table 1; others: ours"),
    "digit5": (64, "ours"), "domainnet": (64, "ours"),
    "folder": (32, "ours"),
    "glyphs": ({"fedproto": 24, "fedtgp": 24, "fedsa": 24, "others": 32}, "ours"),
}
TEST_SHARES = {  # of a folder of domains that has no test images of its own
    "office": (0.2, "ours: FPL's code, which the percentages of FedLSA's Table 2 fit"),
    "pacs": (0.3, "ours: the percentages of FedLSA's Table 3 fit"),
    "domainnet": (0.2, "ours: as office"),
}
OWN_TEST_SHARE = (0.25, "FedTGP, Implementation Details; FedSA, Implementation details")
NORMALISATION = {  # mean and standard deviation of the channels, FedFM's code; elsewhere 0.5, as HtFLlib
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "cinic10": ((0.5,), (0.5,)),
}
AUGMENTATION = {  # of cifar100
    "shift": (4, "FedFM's code: pixels of padding of the random crop"),
    "rotation": (15, "FedFM's code: degrees"),
    "flip": (0.5, "FedFM's code: share of the images"),
}

# --- groups of models: client i has the i-th, and after the last one begins again ---------------------

RESNETS = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
GROUPS = {
    "htfe2": (["cnn4", "resnet18"], "FedTGP, Impact of Model Heterogeneity"),
    "htfe3": (["resnet10", "resnet18", "resnet34"], "FedTGP, Impact of Model Heterogeneity"),
    "htfe4": (["cnn4", "googlenet", "mobilenet_v2", "resnet18"], "FedTGP, Impact of Model Heterogeneity"),
    "htfe5": (["cnn4", "resnet10", "resnet18", "resnet34", "resnet50"], "ours: FedSA's code"),
    "htfe8": (["cnn4", "googlenet", "mobilenet_v2", *RESNETS], "FedTGP, Model heterogeneity; FedSA, the same"),
    "htfe9": (["resnet4", "resnet6", "resnet8", "resnet10", *RESNETS], "FedTGP, Impact of Model Heterogeneity"),
    "res34-htc4": (["resnet34"], "FedTGP, Impact of Model Heterogeneity"),
    "htfe8-htc4": (["cnn4", "googlenet", "mobilenet_v2", *RESNETS], "FedTGP, Impact of Model Heterogeneity"),
}
HTC4 = [[], [512], [256], [128]]  # hidden layers of the classifiers, FedTGP, Appendix A
CONVNETS = {  # channels of the 5x5 convolutions, widths of the linear layers: D is the last but one, C the last
    "cnn4": ([32, 64], [512, 10], "McMahan et al. 2017: the 4-layer CNN of FedTGP and FedSA"),
    "htcnn8-1": ([32], [512, 10], "FedTGP, Table 9: CNN1"),
    "htcnn8-2": ([32, 64], [512, 10], "FedTGP, Table 9: CNN2"),
    "htcnn8-3": ([32], [512, 512, 10], "FedTGP, Table 9: CNN3"),
    "htcnn8-4": ([32, 64], [512, 512, 10], "FedTGP, Table 9: CNN4"),
    "htcnn8-5": ([32], [1024, 512, 10], "FedTGP, Table 9: CNN5"),
    "htcnn8-6": ([32, 64], [1024, 512, 10], "FedTGP, Table 9: CNN6"),
    "htcnn8-7": ([32], [1024, 512, 512, 10], "FedTGP, Table 9: CNN7"),
    "htcnn8-8": ([32, 64], [1024, 512, 512, 10], "FedTGP, Table 9: CNN8"),
}

# --- the tests --------------------------------------------------------------------------------------


def expected(script, dataset):
    """What the tables say of a data set -> {flag: (value, place)}."""
    table, _ = PAPERS[script]
    found = {}
    for flag, (value, place) in {**SHARED, **table}.items():
        if isinstance(value, dict):
            value = value[dataset]
        found[flag] = (value, place)
    return found


def parsed(script, *words):
    """What a command line gives -> {flag: value}."""
    args = arguments(script, *words)
    found = {}
    for flag, value in vars(args).items():
        if flag not in NOT_SETTINGS:
            found[flag] = value
    if args.domain_clients:
        found["clients"] = sum(args.domain_clients.values())
    return found


def disagreements(found, table):
    """Each flag whose value is another one than the table's, and each that is in one of the two alone, in words."""
    lines = []
    for flag in sorted({*found, *table}):
        if flag not in table:
            lines.append(f"--{flag} {found[flag]} is not in the table")
        elif flag not in found:
            lines.append(f"{flag} is in the table, and the script has no such flag")
        elif found[flag] != table[flag][0]:
            value, place = table[flag]
            lines.append(f"--{flag} {found[flag]} instead of {value} ({place})")
    return lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folders of images: "folder" and each data set of PIXELS with one small picture, "domains" with two domains."""
    folder = tmp_path_factory.mktemp("data")
    places = [folder / name / "train" / "cat" for name in PIXELS]
    places += [folder / "domains" / "photo" / "cat", folder / "domains" / "sketch" / "cat"]
    for place in places:
        place.mkdir(parents=True)
        Image.new("RGB", (10, 10)).save(place / "1.png")
    return folder


@pytest.mark.parametrize("script, dataset", [(script, name) for script in PAPERS for name in PAPERS[script][1]])
def test_a_script_has_its_papers_settings(script, dataset):
    """Catches: τ or S of FedTGP divided by ten, the settings of FedLSA's digits taken for PACS, clients of two domains
    exchanged, another λ of FedPLCC's office, a flag that nobody looked up in the paper."""
    found = parsed(script, "--dataset", dataset)
    table = expected(script, dataset)
    assert disagreements(found, table) == []


@pytest.mark.parametrize("script, dataset", OURS)
def test_data_sets_of_no_paper_have_our_settings(script, dataset, folder):
    """Catches: glyphs with other rounds, images or models than the README was measured with; a folder with domains that
    is divided by labels."""
    model, changes = OURS[script, dataset]
    table = expected(script, model)
    for flag, value in changes.items():
        assert flag in table, flag
        table[flag] = (value, "ours")
    found = parsed(script, "--dataset", dataset, "--data", folder)
    assert disagreements(found, table) == []


def test_glyphs_are_the_default_data_set():
    """Catches: a script that wants a download when it is started without flags."""
    for script in SMALL:
        assert arguments(script).dataset == "glyphs"
        assert parsed(script) == parsed(script, "--dataset glyphs")


@pytest.mark.parametrize("model", FEDSA_LAM_MCL)
def test_fedsa_has_another_weight_of_the_contrast_for_groups_of_models(model, monkeypatch):
    """Catches: λ2 = 1 for one architecture, 0.01 for a group, a typed λ2 that is overwritten."""
    class Enough(Exception):
        pass

    def load(args):
        raise Enough

    monkeypatch.setattr(fedsa, "load_dataset", load)
    for words, want in {"": FEDSA_LAM_MCL[model], "--lam-mcl 0.3": 0.3}.items():
        args = arguments("fedsa", "--dataset cifar100 --model", model, words)
        with pytest.raises(Enough):  # main sets λ2 before anything else
            fedsa.main(args)
        assert args.lam_mcl == want


@every_script
def test_images_have_the_papers_sizes(script, folder):
    """Catches: MNIST at 32 pixels, PACS at 64 in FedLSA, a data set without a size of its own."""
    for dataset, (size, place) in PIXELS.items():
        if isinstance(size, dict):
            size = size.get(script, size["others"])
        args = arguments(script, "--dataset", dataset, "--data", folder)
        if dataset == "glyphs":
            found = args.image_size or 32  # drawing them takes seconds
        else:
            found = common.load_dataset(args).x.shape[-1]
        assert found == size, (dataset, place)


@pytest.mark.parametrize("dataset", TEST_SHARES)
def test_the_share_of_test_images_of_folders_with_domains(dataset):
    """Catches: PACS with a fifth of the images for testing, office with three of ten."""
    share, place = TEST_SHARES[dataset]
    assert sum(common.test_images(dataset, "photo", 1000)) == 1000 * share, place


@pytest.mark.parametrize("script", ["fedproto", "fedtgp", "fedsa"])
def test_clients_with_models_of_their_own_keep_a_quarter_for_testing(script):
    """Catches: another share than a quarter, test images of the data set that are not divided."""
    y = torch.arange(400) % 10
    data = common.Dataset(torch.zeros(400, 3, 16, 16, dtype=torch.uint8), y, torch.zeros_like(y), y > 7,
                          list("0123456789"), ["mine"])
    args = arguments(script, "--device cpu --dataset folder --clients 2 --model cnn4")
    clients = common.make_clients(data, args)
    share, place = OWN_TEST_SHARE
    for client in clients:
        whole = len(client.train.y) + len(client.test.y)
        assert abs(len(client.test.y) - share * whole) < 1, place
    assert sum(len(client.train.y) + len(client.test.y) for client in clients) == 400


@pytest.mark.parametrize("dataset", NORMALISATION)
def test_fedfm_normalises_images_as_the_authors_do(dataset):
    """Catches: another mean or standard deviation, those of CIFAR-10 for CIFAR-100."""
    found = fedfm.NORMALISATION.get(dataset, fedfm.NORMALISATION["other"])
    assert found == NORMALISATION[dataset]


def test_inputs_are_normalised_by_one_half_elsewhere(folder):
    """Catches: inputs in [0, 1], or in [0, 255]."""
    args = arguments("fedproto", "--device cpu --dataset folder --data", folder)
    net = common.build_net(common.load_dataset(args), args)
    assert net.mean.flatten().tolist() == [0.5] and net.std.flatten().tolist() == [0.5]


def test_the_augmentation_has_the_authors_sizes():
    """Catches: half the shift, twice the padding, a shift or a rotation that goes one way only, rotation by up to 45
    degrees, an image that is always flipped."""
    size, middle = 65, 32
    x = torch.zeros(1000, 3, size, size, dtype=torch.uint8)
    x[:, 0, middle - 1:middle + 2, middle - 1:middle + 2] = 255  # red: a dot in the middle
    x[:, 1, middle, middle - 20:middle + 21] = 255               # green: a line through it
    x[:, 2, middle, middle:middle + 21] = 255                    # blue: the line's right half
    out = fedfm.augment(x, np.random.default_rng(0))

    shifts, angles, flips = [], [], []
    for red, green, blue in (out > 0).numpy():
        rows, columns = np.nonzero(red)
        dot = np.array([rows.mean(), columns.mean()])
        shifts.append(dot - middle)
        rows, columns = np.nonzero(green)
        slope = np.polyfit(columns, rows, 1)[0]
        angles.append(np.degrees(np.arctan(slope)))
        flips.append(np.nonzero(blue)[1].mean() < dot[1])

    shifts, angles, flips = np.array(shifts), np.array(angles), np.array(flips)
    padding = AUGMENTATION["shift"][0]
    straight = abs(angles) < 3  # a rotation turns the shift, too
    for direction in (0, 1):
        moved = shifts[straight, direction]
        assert abs(moved.max() - padding) < 0.6 and abs(moved.min() + padding) < 0.6
    rotation = AUGMENTATION["rotation"][0]
    unflipped = angles[~flips]  # a flip mirrors the angle
    assert abs(unflipped.max() - rotation) < 1 and abs(unflipped.min() + rotation) < 1
    assert abs(np.mean(flips) - AUGMENTATION["flip"][0]) < 0.05


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_has_the_papers_models_in_their_order(group):
    """Catches: a model left out, another order, a ResNet of another depth, classifiers of other widths."""
    names, place = GROUPS[group]
    for client in range(20):
        hidden = HTC4[client % 4] if group.endswith("htc4") else []
        assert common.architecture(group, client) == (names[client % len(names)], hidden), place


@pytest.mark.parametrize("name", CONVNETS)
def test_convolutional_networks_have_the_papers_widths(name, folder):
    """Catches: another width, a layer too many, a convolution of another size, HtCNN8's networks in another order."""
    channels, widths, place = CONVNETS[name]
    group, _, number = name.partition("-")
    args = arguments("fedproto", "--device cpu --dataset folder --data", folder, "--model", group,
                     "--feature-dim", widths[-2])
    data = common.load_dataset(args)._replace(class_names=list("0123456789"))
    net = common.build_net(data, args, i=int(number or 1) - 1)
    convolutions = [layer for layer in net.modules() if isinstance(layer, torch.nn.Conv2d)]
    assert [layer.out_channels for layer in convolutions] == channels, place
    assert {layer.kernel_size for layer in convolutions} == {(5, 5)}
    pools = [layer for layer in net.modules() if isinstance(layer, torch.nn.MaxPool2d)]
    assert [layer.kernel_size for layer in pools] == [2] * len(channels)
    linear = [layer for layer in net.modules() if isinstance(layer, torch.nn.Linear)]
    assert [layer.out_features for layer in linear] == widths, place
