"""Data sets: glyphs, folders of images, torchvision's sets, and what happens where there are none."""

import inspect
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

import common

PIXELS = dict(mnist=28, fmnist=28, usps=16, svhn=32, cifar10=32, cifar100=32, flowers102=64, tinyimagenet=64,
              digit5=64, office=64, pacs=64, domainnet=64, cinic10=32, digits=32)


def load(folder, dataset, **flags):
    usual = dict(data=str(folder), dataset=dataset, image_size=None, subset=1.0, seed=0)
    return common.load_dataset(SimpleNamespace(**usual | flags))


def picture(path, colour=(200, 10, 10), size=(32, 32), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).convert(mode).save(path)


def noise():
    pixels = np.random.default_rng(0).integers(256, size=(200, 200, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


# --- glyphs and subsets ---------------------------------------------------------------------------

def test_glyphs_are_balanced_and_always_the_same():
    """Catches: a class or domain with fewer images, a test image among the training images, images drawn twice."""
    data = common.glyphs()
    assert data.x.shape == (8000, 3, 32, 32) and data.x.dtype == torch.uint8
    assert data.class_names == list("0123456789") and len(data.domains) == 4
    for d in range(4):
        assert torch.bincount(data.y[(data.domain == d) & data.test]).tolist() == [50] * 10
        assert torch.bincount(data.y[(data.domain == d) & ~data.test]).tolist() == [150] * 10
    assert data.test[30:40].all()  # of ten images of each class and then ten more, every fourth ten
    assert torch.equal(data.x[2000:4000], common.draw_domain("thin", 2000))
    assert len({image.numpy().tobytes() for image in data.x}) == 8000
    assert load("", "glyphs", image_size=24).x.shape == (8000, 3, 24, 24)


def test_glyphs_look_as_they_did():
    """Catches: thicker strokes, another contrast, more noise, all of which move every accuracy on glyphs."""
    brightness = dict(plain=215, thin=182, texture=87, clutter=127.5)
    contrast = dict(plain=39, thin=24.5, texture=44, clutter=57)
    for name, x in zip(common.GLYPH_DOMAINS, common.glyphs().x.float().split(2000)):
        assert x.mean() == pytest.approx(brightness[name], abs=1.5)
        assert x.flatten(1).std(1).mean() == pytest.approx(contrast[name], abs=1)
        if name == "thin":  # in a corner of the flat ground noise stands alone
            corners = x[:, 0, :6, :6].flatten(1)
            assert corners.std(1).median() == pytest.approx(0.04 * 255, rel=0.05)


def test_a_subset_is_drawn_by_the_seed():
    """Catches: the first images instead of random ones, labels or test marks of other images."""
    whole, one, again = load("", "glyphs"), load("", "glyphs", subset=0.1), load("", "glyphs", subset=0.1)
    assert torch.equal(one.x, again.x)
    assert not torch.equal(one.x, load("", "glyphs", subset=0.1, seed=1).x)
    place = {image.numpy().tobytes(): i for i, image in enumerate(whole.x)}
    index = torch.tensor([place[image.numpy().tobytes()] for image in one.x])
    assert len(index.unique()) == 800
    for column in "y", "domain", "test":
        assert torch.equal(getattr(one, column), getattr(whole, column)[index])
        assert len(getattr(one, column).unique()) == len(getattr(whole, column).unique())


# --- image folders --------------------------------------------------------------------------------

def test_a_folder_is_read_resized_and_converted(tmp_path):
    """Catches: a strange name, a grey, palette or transparent image, a text file or an empty folder that stops it."""
    root = tmp_path / "mine"
    picture(root / "train" / "b" / "ü $x$.png", size=(50, 20))
    picture(root / "train" / "a" / "grey.PNG", mode="L")
    picture(root / "train" / "a" / "palette.png", mode="P")
    picture(root / "test" / "a" / "alpha.png", mode="RGBA")
    (root / "train" / "a" / "notes.txt").write_text("no image")
    (root / "train" / "empty").mkdir()
    data = load(tmp_path, "mine")
    assert data.x.shape == (4, 3, 32, 32)
    assert data.class_names == ["a", "b"] and data.domains == ["mine"]
    assert data.y.tolist() == [0, 0, 1, 0] and data.test.tolist() == [False, False, False, True]
    assert data.x[2, :, 0, 0].tolist() == data.x[3, :, 5, 5].tolist() == [200, 10, 10]
    assert len(data.x[0].unique()) == 1  # grey
    assert load(tmp_path, "mine", image_size=16).x.shape[2:] == (16, 16)


@pytest.mark.parametrize("name", PIXELS)
def test_images_are_reduced_to_the_size_of_their_data_set(name, tmp_path):
    """Catches: another size or filter; rows and columns or colours exchanged."""
    folder = tmp_path / name / "train" / "a"
    folder.mkdir(parents=True)
    noise().save(folder / "1.png")
    x = load(tmp_path, name).x[0].permute(1, 2, 0).numpy()
    size = PIXELS[name], PIXELS[name]
    np.testing.assert_array_equal(x, np.asarray(noise().resize(size, Image.Resampling.BILINEAR)))


def test_domains_with_and_without_train_and_test(tmp_path):
    """Catches: test images that change with the seed, a domain numbered as another, hidden folders read as domains."""
    for n in range(40):
        picture(tmp_path / "set" / "photo" / "cat" / f"{n}.png")
        picture(tmp_path / "set" / "sketch" / ("train" if n < 30 else "test") / "dog" / f"{n}.png")
    (tmp_path / "set" / "photo" / ".DS_Store").touch()  # every Mac leaves one
    picture(tmp_path / "set" / ".thumbnails" / "cat" / "1.png")
    data = load(tmp_path, "set")
    assert data.domains == ["photo", "sketch"] and data.class_names == ["cat", "dog"]
    assert torch.equal(data.y, data.domain)
    assert data.test[data.y == 1].sum() == 10
    assert torch.equal(data.test[:40], torch.arange(40) % 10 > 7)  # two of ten
    assert torch.equal(data.test, load(tmp_path, "set", seed=5).test)


@pytest.mark.parametrize("folders, error", [
    (["training", "test"], "test/ is there, but no train/"),
    (["training", "validation"], "validation/ is there, but no train/")])
def test_a_division_of_images_is_not_taken_for_domains(folders, error, tmp_path):
    """Catches: test/ or validation/ read as a domain, and trained on."""
    for name in folders:
        picture(tmp_path / "mine" / name / "a" / "x.png")
    with pytest.raises(SystemExit, match=error):
        load(tmp_path, "mine")


@pytest.mark.parametrize("name", ["test", "validation"])
def test_a_data_set_may_be_called_test(name, tmp_path):
    """Catches: a data set that is taken for a folder of test images."""
    picture(tmp_path / name / "train" / "a" / "1.png")
    picture(tmp_path / name / "test" / "a" / "2.png")
    assert load(tmp_path, name).test.tolist() == [False, True]


def test_the_test_images_of_pacs(tmp_path):
    """Catches: another share than FedLSA's Table 3 fits, the same or regular places in each domain, other data sets."""
    for domain, n, held in ("art_painting", 2048, 615), ("cartoon", 2344, 704), ("sketch", 3929, 1179):
        chosen = torch.tensor(common.test_images("pacs", domain, n))
        assert len(chosen) == n and chosen.sum() == held
        for tenth in chosen.chunk(10):
            assert 0.2 < tenth.float().mean() < 0.4
        assert len(chosen.nonzero().flatten().diff().unique()) > 5
    assert common.test_images("pacs", "photo", 99) != common.test_images("pacs", "sketch", 99)
    for dataset in "office", "domainnet":
        assert sum(common.test_images(dataset, "photo", 100)) == 20
    for n in range(21):
        picture(tmp_path / "pacs" / "photo" / ("cat" if n < 10 else "dog") / f"{n}.png")
    assert load(tmp_path, "pacs", seed=5).test.tolist() == common.test_images("pacs", "photo", 21)


# --- the cache ------------------------------------------------------------------------------------

def test_the_cache_is_used_and_redone_when_the_folder_changes(tmp_path, capsys):
    """Catches: images of before, decoding in every run, a cache kept for each change."""
    one, two = tmp_path / "s" / "train" / "a" / "1.png", tmp_path / "s" / "test" / "b" / "2.png"

    def decodes(n):
        data = load(tmp_path, "s")
        assert len(data.y) == n and "decoding" in capsys.readouterr().out
        assert torch.equal(load(tmp_path, "s").x, data.x) and "decoding" not in capsys.readouterr().out
        return data
    picture(one)
    decodes(1)
    picture(two)
    decodes(2)
    picture(one, colour=(0, 0, 0))
    decodes(2)
    two.unlink()
    decodes(1)
    one.rename(two)
    data = decodes(1)
    assert data.test.all() and data.x.max() == 0
    assert len(list(tmp_path.glob("*.pt"))) == 1


def test_a_folder_that_cannot_be_written_to_has_no_cache(tmp_path, monkeypatch, capsys):
    """Catches: a traceback where a course's folder is read-only for its students."""
    picture(tmp_path / "s" / "train" / "a" / "1.png")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    for _ in range(2):
        assert len(load(tmp_path, "s").y) == 1 and "decoding" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.pt"))


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "chunk"])
def test_an_undecodable_file_is_named_and_nothing_cached(damage, tmp_path):
    """Catches: a traceback without the file's name, a grey image in its place, half a cache that is used next time."""
    path = tmp_path / "s" / "train" / "a" / "2.png"
    picture(path.with_name("1.png"))
    noise().save(path)
    image = path.read_bytes()
    place = image.rindex(b"IDAT")
    damaged = {"empty": b"", "text": b"no picture", "cut": image[:-2000],
               "chunk": image[:place] + b"ID\0T" + image[place + 4:]}  # Pillow raises SyntaxError
    path.write_bytes(damaged[damage])
    with pytest.raises(SystemExit) as stop:
        load(tmp_path, "s")
    assert str(path) in stop.value.code
    assert not list(tmp_path.glob("*.pt"))


# --- without data ---------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["absent", "empty", "flat"])
def test_missing_data_says_where_and_what(name, tmp_path):
    """Catches: a traceback for a student who has no data yet, or classes without train/ and test/."""
    (tmp_path / "empty" / "train" / "a").mkdir(parents=True)
    picture(tmp_path / "flat" / "cat" / "1.png")
    with pytest.raises(SystemExit) as stop:
        load(tmp_path, name)
    for word in f"no data in {tmp_path / name}", "wanted:", "<class>", "--dataset glyphs", "cifar10":
        assert word in stop.value.code


def test_one_global_model_needs_test_images(tmp_path, run):
    """Catches: a run that ends without any accuracy."""
    for n in range(8):
        picture(tmp_path / "s" / "train" / str(n % 2) / f"{n}.png")
    with pytest.raises(SystemExit, match="test images"):
        run("fedlsa", "--dataset s --partition iid --clients 2 --rounds 1 --data", tmp_path)
    assert not (tmp_path / "runs").exists()


def test_a_download_that_fails_is_explained(tmp_path, monkeypatch):
    """Catches: a traceback of torchvision's where there is no internet."""
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "url", "http://127.0.0.1:9/nothing.tar.gz")
    root = tmp_path / "data"  # a fresh clone has none
    with pytest.raises(SystemExit) as stop:
        load(root, "cifar10")
    assert "download" in stop.value.code and str(root / "cifar10") in stop.value.code


# --- torchvision ----------------------------------------------------------------------------------

def stand_in(kind):
    """Instead of a torchvision set: ten images a split, tones 0, 20, ... in training, 10, 30, ... in test."""
    allowed = inspect.signature(getattr(torchvision.datasets, kind))

    def make(root, **asked):
        allowed.bind(root, **asked)
        assert asked["download"]
        assert asked.get("split", "train") in ("train", "val", "test")
        first = 10 if asked.get("split") == "test" or asked.get("train") is False else 0
        mode = "L" if "MNIST" in kind or kind == "USPS" else "RGB"
        return [(Image.new("RGB", (40, 30), (first + 20 * n,) * 3).convert(mode), n) for n in range(10)]
    return make


@pytest.mark.parametrize("name", common.TORCHVISION)
def test_torchvision_sets(name, tmp_path, monkeypatch):
    """Catches: a word that torchvision does not know, a split left out, training images among the test images."""
    kind = common.TORCHVISION[name]
    monkeypatch.setattr(torchvision.datasets, kind, stand_in(kind))
    (tmp_path / "torchvision").mkdir()
    data = load(tmp_path, name)
    parts = 3 if name == "flowers102" else 2
    assert data.y.tolist() == [*range(10)] * parts
    assert data.test.tolist() == [False] * 10 * (parts - 1) + [True] * 10
    assert data.x.shape[1:] == (3, PIXELS[name], PIXELS[name])
    assert data.x[7].unique().tolist() == [140] and data.x[-3].unique().tolist() == [150]
    assert data.domains == [name] and len(data.class_names) == 10
    picture(tmp_path / name / "train" / "cat" / "1.png")  # a folder of that name goes before the download
    assert len(load(tmp_path, name).y) == 1
