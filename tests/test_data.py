"""Data sets: glyphs, folders of images, torchvision's sets, and what happens where there are none."""

import inspect
import os
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

import common
from conftest import ROOT, arguments

PIXELS = dict(mnist=28, fmnist=28, usps=16, svhn=32, cifar10=32, cifar100=32, flowers102=64, tinyimagenet=64,
              digit5=64, office=64, pacs=64, domainnet=64, cinic10=32, digits=32)


def load(folder, dataset, **flags):
    usual = dict(data=str(folder), dataset=dataset, image_size=None, subset=1.0, seed=0)
    return common.load_dataset(SimpleNamespace(**usual | flags))


def picture(path, colour=(200, 10, 10), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (50, 20), colour).convert(mode).save(path)


def pictures(root, folders):
    """One image in each of some folders below root; {a,b} in a name stands for two folders."""
    for folder in folders.split():
        before, *choice = re.split("[{}]", folder)
        for name in choice[0].split(",") if choice else [""]:
            picture(Path(root, before + name + "".join(choice[1:]), "1.png"))


def test_glyphs_are_as_they_were():
    """A change of strokes, contrast, noise or test images would move every accuracy."""
    data = load("", "glyphs")
    i = torch.arange(8000)
    assert torch.equal(data.y, i % 10)
    assert torch.equal(data.domain, i // 2000)
    assert torch.equal(data.test, i % 40 >= 30)  # the last of every four images of a class
    plain, thin, texture, clutter = data.x.float().split(2000)
    for x, brightness, contrast in (plain, 215, 39), (thin, 182, 24.5), (texture, 87, 44), (clutter, 127.5, 57):
        assert x.mean() == pytest.approx(brightness, abs=1.5)
        assert x.flatten(1).std(1).mean() == pytest.approx(contrast, abs=1)
    corners = thin[:, 0, :6, :6].flatten(1)  # nothing but noise on a flat ground
    assert corners.std(1).median() == pytest.approx(0.04 * 255, rel=0.05)


def test_glyphs_lean_as_they_did():
    """Every digit keeps its slant, whatever torch's own seed is."""
    torch.manual_seed(1)
    lean = []
    for one in common.draw_domain("plain", 100)[1:81:10, 0]:
        rows, columns = (one < one.float().mean() - 40).nonzero(as_tuple=True)
        upper = rows < rows.float().mean()
        top, bottom = columns[upper].float().mean(), columns[~upper].float().mean()
        lean.append(top - bottom)  # above 0: to the right
    assert lean == pytest.approx([-1.3, -2.5, 4.8, 0.0, -0.4, 2.5, 0.5, -2.4], abs=0.7)


def test_a_subset_is_drawn_by_the_seed(monkeypatch):
    """Labels, domains and test marks go with the drawn images."""
    i = torch.arange(200)
    monkeypatch.setattr(common, "glyphs", lambda size: common.Dataset(i, i + 1, i + 2, i + 3, [], []))
    data = load("", "glyphs", subset=0.1)
    assert len(data.x.unique()) == 20
    assert torch.equal(data.y, data.x + 1)
    assert torch.equal(data.domain, data.x + 2)
    assert torch.equal(data.test, data.x + 3)
    assert torch.equal(data.x, load("", "glyphs", subset=0.1).x)
    assert not torch.equal(data.x, load("", "glyphs", subset=0.1, seed=1).x)


def test_glyphs_have_the_size_that_is_typed(monkeypatch):
    monkeypatch.setattr(common, "glyphs", lambda size: common.Dataset(*[torch.zeros(1, 1, size, size)] * 4, [], []))
    assert load("", "glyphs").x.shape[-1] == 32 and load("", "glyphs", image_size=20).x.shape[-1] == 20


def test_data_in_the_home_folder():
    """A shell does not expand --data=~/fl."""
    home = arguments("fedproto", "--dataset s --data=~/fl").data
    assert home == os.path.expanduser("~/fl") and "~" not in home


def test_a_folder_is_read_resized_and_converted(tmp_path):
    """Grey and transparent images load, other files are skipped, and a data set may be named "test"."""
    root = tmp_path / "test"
    picture(root / "train" / "b" / "1.png")
    picture(root / "train" / "a" / "grey.PNG", mode="L")
    picture(root / "test" / "a" / "transparent.png", mode="RGBA")
    (root / "train" / "a" / "notes.txt").write_text("no image")
    (root / "train" / "empty").mkdir()
    data = load(tmp_path, "test")
    assert data.x.shape == (3, 3, 32, 32)
    assert data.class_names == ["a", "b"] and data.domains == ["test"]
    assert data.y.tolist() == [0, 1, 0]
    assert data.test.tolist() == [False, False, True]
    assert data.x[1:, :, 5, 5].tolist() == [[200, 10, 10], [200, 10, 10]]
    assert len(data.x[0].unique()) == 1
    assert load(tmp_path, "test", image_size=16).x.shape[2:] == (16, 16)


@pytest.mark.parametrize("name", sorted(set(PIXELS) - set(common.TORCHVISION)))
def test_images_are_reduced_to_the_size_of_their_data_set(name, tmp_path):
    """The filter is bilinear; rows, columns and colours keep their order."""
    folder = tmp_path / name / "train" / "a"
    folder.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(256, size=(200, 200, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    image.save(folder / "1.png")
    picture(tmp_path / name / "train" / "b" / "1.png")
    want = np.array(image.resize((PIXELS[name], PIXELS[name]), Image.Resampling.BILINEAR))
    assert torch.equal(load(tmp_path, name).x[0], torch.from_numpy(want).permute(2, 0, 1))
    assert load(tmp_path, name, image_size=20).x.shape[2:] == (20, 20)


def test_check_of_a_folder(tmp_path, monkeypatch, capsys):
    """check.py finds the class that a domain lacks."""
    picture(tmp_path / "set" / "photo" / "cat" / "1.png")
    picture(tmp_path / "set" / "sketch" / "dog" / "1.png")
    monkeypatch.setattr(sys, "argv", ["check.py", "set", "16", str(tmp_path)])
    runpy.run_path(str(ROOT / ".github" / "class" / "check.py"))
    assert "wrong? no image of dog" in capsys.readouterr().out


def test_domains_with_and_without_train_and_test(tmp_path):
    """Two of ten files are test images, for every seed. Hidden folders are neither domains nor classes."""
    for n in range(40):
        picture(tmp_path / "set" / "photo" / "cat" / f"{n}.png")
        picture(tmp_path / "set" / "sketch" / ("train" if n < 30 else "test") / "dog" / f"{n}.png")
    (tmp_path / "set" / "photo" / ".DS_Store").touch()  # every Mac leaves one
    picture(tmp_path / "set" / ".thumbnails" / "cat" / "1.png")
    picture(tmp_path / "set" / "sketch" / "train" / ".ipynb_checkpoints" / "1.png")
    data = load(tmp_path, "set")
    assert data.domains == ["photo", "sketch"] and data.class_names == ["cat", "dog"]
    assert torch.equal(data.y, data.domain)
    assert torch.equal(data.test[:40], torch.arange(40) % 10 > 7)  # two of ten
    assert data.test[40:].sum() == 10
    assert torch.equal(data.test, load(tmp_path, "set", seed=5).test)


@pytest.mark.parametrize("folders, domains, classes, n", [
    ("train/{a,b} test/{a,b}", ["s"], ["a", "b"], 4),
    ("{x,y}/a y/b", ["x", "y"], ["a", "b"], 3),                    # a class that one domain lacks
    ("train/{a,b}/images test/{a,b}", ["s"], ["a", "b"], 4),       # Tiny-ImageNet
    ("x/train/{a,b} x/test/a y/{a,b}", ["x", "y"], ["a", "b"], 5),
    ("x/{a,train} valley/a", ["valley", "x"], ["a", "train"], 3),  # neither a part nor a spelling of one
    ("train/{a,b} test/a val/a extra/c train .", ["s"], ["a", "b"], 3),  # the others are not used
    ("x/{a,b} x/.a .x/a x/a/.ipynb_checkpoints __MACOSX/.x", ["x"], ["a", "b"], 2),
])
def test_layouts_that_are_read(folders, domains, classes, n, tmp_path):
    """Domains, classes and nothing else."""
    pictures(tmp_path / "s", folders)
    data = load(tmp_path, "s")
    assert (data.domains, data.class_names, len(data.y)) == (domains, classes, n)


@pytest.mark.parametrize("folders, wrong", [
    ("train/a test/a", "a"),                                        # a single class
    ("{a,b}", "s/a"),                                               # classes without train/ or a domain
    ("x/images/{a,b} y/images/{a,b}", "x/images"),                  # Office-31 as it is packed
    ("kfold/x/{a,b} kfold/y/{a,b}", "kfold/x"),
    ("x/{a,b} y/images", "s/y"),
    ("train/{a,b} train/a/old", "train/a"),
    ("train/{a,b} test/{a,c}", "c"),                                # a class that only test/ has
    ("train/{a,b} test/images", "s/test"),
    ("Training/{a,b} Testing/{a,b}", "Testing, Training"),
    ("train/{a,b} Test/{a,b}", "Test"),
    ("seg_train/{a,b} seg_test/{a,b}", "seg_train"),
    ("train/{a,b} val/{a,b}", "val"),
    ("x/train/{a,b} x/validation/{a,b} y/{a,b}", "s/x"),
    ("test/{a,b}", "test"),
    ("x/{train,test} y/{train,test}", "s/x"),                       # parts without classes
    ("images/{train,val}", "train, val"),
    ("development/{a,b} evaluation/{a,b}", "development, evaluation"),
    ("BrainTrain/{a,b} BrainTest/{a,b}", "BrainTest, BrainTrain"),
    ("imagesTr/{a,b} imagesTs/{a,b}", "imagesTr, imagesTs"),
])
def test_layouts_that_are_refused(folders, wrong, tmp_path):
    """Status 1, the folder is named, and nothing is kept."""
    pictures(tmp_path / "s", folders)
    with pytest.raises(SystemExit) as stop:
        load(tmp_path, "s")
    assert str(Path(wrong)) in stop.value.code.split("\n")[0]
    assert not list(tmp_path.glob("*.pt"))


def test_what_is_skipped_is_told(tmp_path, capsys):
    pictures(tmp_path / "s", "train/{c1,c2,c3,c4,c5,c6} test/c1 val/c1")
    for name in "c1/1.gif", "c1/2.GIF", "c1/Thumbs.db", "c2/LICENSE", "c2/.DS_Store", "onlygif/3.gif":
        (tmp_path / "s" / "train" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "s" / "train" / name).touch()
    load(tmp_path, "s")
    line = capsys.readouterr().out.splitlines()[-1]
    told = line.removeprefix(f"{tmp_path / 's'}: ").split("; ")
    assert told == ["domains s", "classes c1, c2, c3, c4, c5, ... (6)", "no test images of c2, c3, c4, c5, c6",
                    "skipped 3 .gif, 1 .db, 1 without extension", f"images not used 1 in {Path('val', 'c1')}",
                    f"no images in {Path('train', 'onlygif')}"]


def test_pictures_of_more_than_8_bits_are_scaled(tmp_path):
    """Black stays black, and a quarter of the range is a quarter."""
    folder = tmp_path / "s" / "train" / "deep"
    pictures(tmp_path / "s", "train/{deep,other}")
    pixels = np.zeros((32, 32))
    pixels[:, 16:] = 0.25
    Image.fromarray((pixels * 65535).astype(np.uint16)).save(folder / "2.png")
    Image.fromarray((pixels * 65535).astype(np.int32)).save(folder / "3.tiff")
    Image.fromarray(pixels.astype(np.float32)).save(folder / "4.tif")
    for image in load(tmp_path, "s").x[1:4]:
        assert image[:, :, :15].unique().tolist() == [0] and image[:, :, 17:].unique().tolist() == [64]


def test_transparent_pictures_lie_on_white(tmp_path):
    """Otherwise a black icon on nothing would be all black."""
    pictures(tmp_path / "s", "train/{icon,other}")
    icon = Image.new("LA", (32, 32))  # black, transparent
    icon.paste((0, 255), (0, 0, 32, 16))
    icon.save(tmp_path / "s" / "train" / "icon" / "2.png")
    icon.convert("RGBA").save(tmp_path / "s" / "train" / "icon" / "3.png")
    palette = Image.new("P", (32, 32))
    palette.putpalette([0, 0, 0, 0, 0, 0])
    palette.paste(1, (0, 0, 32, 16))
    palette.save(tmp_path / "s" / "train" / "icon" / "4.png", transparency=0)
    for image in load(tmp_path, "s").x[1:4]:
        assert image[:, :15].unique().tolist() == [0] and image[:, 17:].unique().tolist() == [255]


def test_a_folder_of_dark_pictures_is_told(tmp_path, capsys):
    """12-bit values in files of 16 bits are nearly black."""
    pictures(tmp_path / "s", "train/{a,b}")
    for path in (tmp_path / "s").rglob("*.png"):
        Image.fromarray(np.full((8, 8), 4095, np.uint16)).save(path)
    load(tmp_path, "s")
    assert "the brightest pixel" in capsys.readouterr().out


def test_exif_turns_a_picture_but_not_in_the_sets_of_the_papers(tmp_path):
    """Office has a picture whose orientation is wrong."""
    exif = Image.Exif()
    exif[274] = 6  # a camera that was held upright: the left side is up
    image = Image.new("RGB", (64, 64))
    image.paste((255, 255, 255), (0, 0, 32, 64))
    for name in "photos", "office":
        pictures(tmp_path / name, "train/{a,b}")
        image.save(tmp_path / name / "train" / "a" / "0.png", exif=exif)
    top, left = (slice(None), slice(5)), (slice(None), slice(None), slice(5))
    turned, kept = load(tmp_path, "photos").x[0], load(tmp_path, "office").x[0]
    assert turned[top].min() == 255 and kept[left].min() == 255


def test_the_test_images_of_pacs(tmp_path):
    """30 % of each PACS domain (this fits FedLSA's Table 3), drawn at random, the same for every seed."""
    assert sum(common.test_images("pacs", "art_painting", 2048)) == 615
    photo = common.test_images("pacs", "photo", 21)
    assert photo != common.test_images("pacs", "sketch", 21)
    for n in range(21):
        picture(tmp_path / "pacs" / "photo" / "ab"[n % 2] / f"{n}.png")
    assert load(tmp_path, "pacs", seed=5).test.tolist() == photo


def test_the_cache_is_used_and_redone_when_the_folder_changes(tmp_path, capsys):
    """A damaged cache is redone as well; caches do not pile up."""
    one = tmp_path / "s" / "train" / "a" / "1.png"
    pictures(tmp_path / "s", "train/{a,b}")
    load(tmp_path, "s")
    assert "decoding" in capsys.readouterr().out
    assert load(tmp_path, "s").x.max() == 200
    assert "decoding" not in capsys.readouterr().out
    before = one.stat()
    picture(one, colour=(0, 0, 0))
    os.utime(one, ns=(before.st_atime_ns, before.st_mtime_ns))  # an archive's files may all have one time
    assert one.stat().st_size != before.st_size
    assert load(tmp_path, "s").x[0].max() == 0
    pictures(tmp_path / "s", "train/c test/b")
    one.unlink()
    assert load(tmp_path, "s").test.tolist() == [False, False, True]
    cache, = tmp_path.glob("*.pt")
    cache.write_bytes(cache.read_bytes()[:500])
    assert len(load(tmp_path, "s").y) == 3


def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch, capsys):
    """A course's folder may be read-only for its students, or the disk full. Nothing is left behind."""
    def full(what, path):
        Path(path).write_bytes(b"half")
        raise OSError("disk full")
    pictures(tmp_path / "s", "train/{a,b}")
    monkeypatch.setattr(torch, "save", full)
    assert len(load(tmp_path, "s").y) == 2
    assert f"not kept in {tmp_path / 's-32px.pt'}: disk full" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_undecodable_files_are_all_named_and_nothing_cached(tmp_path):
    """Ten at most, and how many more there are."""
    pictures(tmp_path / "s", "train/{a,b}")
    noise, empty, link, dark, deep, bright = [tmp_path / "s" / "train" / "a" / f"0{n}.png" for n in range(6)]
    Image.effect_noise((500, 500), 100).save(noise)
    before, end = noise.read_bytes().rsplit(b"IDAT", 1)
    noise.write_bytes(before + b"ID\0T" + end)  # Pillow raises SyntaxError
    empty.touch()
    link.symlink_to(tmp_path / "moved.png")
    Image.fromarray(np.full((4, 4), -1, np.int32)).save(dark, "TIFF")  # neither 8 nor 16 bits
    Image.fromarray(np.full((4, 4), 70000, np.int32)).save(deep, "TIFF")
    Image.fromarray(np.full((4, 4), 2, np.float32)).save(bright, "TIFF")
    with pytest.raises(SystemExit) as stop:
        load(tmp_path, "s")
    _, *lines = stop.value.code.splitlines()
    bad = [str(path) for path in (noise, empty, link, dark, deep, bright)]
    assert [line.split(": ")[0].strip() for line in lines] == bad
    for n in range(10, 18):
        empty.with_name(f"{n}.jpg").touch()
    with pytest.raises(SystemExit) as stop:
        load(tmp_path, "s")
    _, *lines, more = stop.value.code.splitlines()
    assert len(lines) == 10 and more.split() == ["and", "4", "more"]
    assert not list(tmp_path.glob("*.pt"))


def test_a_class_that_is_a_broken_link_is_named(tmp_path):
    pictures(tmp_path / "s", "train/{a,b}")
    (tmp_path / "s" / "train" / "c").symlink_to(tmp_path / "moved")
    with pytest.raises(SystemExit) as stop:
        load(tmp_path, "s")
    assert str(tmp_path / "s" / "train" / "c") in stop.value.code


@pytest.mark.parametrize("folders, several", [
    ("s/x/{a,b} s/y/{a,b}", True),
    ("s/x/train/{a,b} s/y/train/{a,b}", True),
    ("s/x/{a,b} s/.y/{a,b}", False),              # hidden
    ("s/train/{a,b} s/x/{a,b} s/y/{a,b}", False),  # train/ holds the classes
])
def test_has_domains(folders, several, tmp_path):
    pictures(tmp_path, folders)
    assert common.has_domains(tmp_path / "s") == several
    (tmp_path / "linked").mkdir()
    for folder in (tmp_path / "s").glob("[!.]*"):
        (tmp_path / "linked" / folder.name).symlink_to(folder)
    assert common.has_domains(tmp_path / "linked") == several


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_missing_data_says_where_and_what(name, tmp_path):
    (tmp_path / "empty" / "train" / "a").mkdir(parents=True)
    with pytest.raises(SystemExit) as stop:
        load(tmp_path, name)
    for word in f"{tmp_path / name}", "wanted:", "<class>", "--dataset glyphs", "cifar10":
        assert word in stop.value.code


@pytest.mark.parametrize("partition", ["iid --clients 2", "domain"])
def test_one_global_model_needs_test_images(partition, tmp_path, run):
    """If a domain has none, the run stops before it makes a folder: its mean over domains would leave that one out."""
    for n in range(16):
        picture(tmp_path / "s" / "ab"[n // 8] / "train" / str(n % 2) / f"{n}.png")
        picture(tmp_path / "s" / "a" / "test" / str(n % 2) / f"{n}.png")
    with pytest.raises(SystemExit, match="test images of b"):
        run("fedlsa", f"--dataset s --rounds 1 --partition {partition} --data", tmp_path)
    assert not (tmp_path / "runs").exists()


def test_a_download_that_fails_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "url", "http://127.0.0.1:9/nothing.tar.gz")
    with pytest.raises(SystemExit) as stop:
        load(tmp_path / "data", "cifar10")  # a fresh clone has no data/
    assert "download" in stop.value.code and str(tmp_path / "data" / "cifar10") in stop.value.code


@pytest.mark.parametrize("name, kind", [
    ("cifar10", "CIFAR10"), ("cifar100", "CIFAR100"), ("mnist", "MNIST"), ("fmnist", "FashionMNIST"),
    ("flowers102", "Flowers102"), ("usps", "USPS"), ("svhn", "SVHN")])
def test_torchvision_sets(name, kind, tmp_path, monkeypatch):
    """torchvision accepts our arguments; only the last split holds test images. Each size has its cache."""
    allowed = inspect.signature(getattr(torchvision.datasets, kind))

    class Named(list):
        pass

    def stand_in(root, download, **which):
        """Ten grey images for training, ten for validation, six for testing."""
        allowed.bind(root, download=download, **which)
        assert download
        part = which.get("split") or ("train" if which["train"] else "test")
        first, n = {"train": (0, 10), "val": (100, 10), "test": (200, 6)}[part]
        images = Named((Image.new("L", (40, 30), first + label), label) for label in range(n))
        if name != "usps":
            images.classes = list("abcdefghij")
        return images
    monkeypatch.setattr(torchvision.datasets, kind, stand_in)
    (tmp_path / "torchvision").mkdir()
    data = load(tmp_path, name)
    assert data.x.shape[1:] == (3, PIXELS[name], PIXELS[name])
    tones = data.x[:, 0, 0, 0].long()
    validation = 10 if name == "flowers102" else 0
    assert torch.bincount(tones // 100).tolist() == [10, validation, 6]
    assert torch.equal(data.y, tones % 100)
    assert torch.equal(data.test, tones >= 200)
    assert data.domains == [name]
    assert data.class_names == list("0123456789" if name == "usps" else "abcdefghij")
    assert load(tmp_path, name, image_size=20).x.shape[2:] == (20, 20)
    assert load(tmp_path, name).x.shape == data.x.shape
    pictures(tmp_path / name, "train/{a,b}")  # a folder of that name goes before the download
    assert len(load(tmp_path, name).y) == 2
