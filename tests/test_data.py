"""Where data comes from: the embedded glyphs, image folders with their cache, torchvision's downloads."""

import inspect
from types import SimpleNamespace

import pytest
import torch
import torchvision
from PIL import Image

import common

def load(folder, dataset, **other):
    usual = dict(data=str(folder), image_size=None, subset=1.0, seed=0)
    return common.load_dataset(SimpleNamespace(dataset=dataset, **{**usual, **other}))

def picture(path, colour=(200, 10, 10), size=(32, 32), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).convert(mode).save(path)

def test_glyphs_are_always_the_same_and_balanced():
    data = common.glyphs()
    assert data.x.shape == (8000, 3, 32, 32) and data.x.dtype == torch.uint8
    for d in range(4):
        for split, n in ((data.test, 50), (~data.test, 150)):
            assert torch.bincount(data.y[(data.domain == d) & split]).tolist() == [n] * 10
    assert torch.equal(data.x[2000:4000], common.render("thin", 2000)) and len(data.x.unique(dim=0)) == 8000
    a, b, c = (load("", "glyphs", subset=0.1, seed=s) for s in (0, 0, 1))
    assert len(a.y) == len(a.x) == len(a.test) == 800 and torch.equal(a.x, b.x) and not torch.equal(a.x, c.x)

def test_a_folder_is_read_resized_and_converted(tmp_path):
    root = tmp_path / "mine"
    picture(root / "train" / "b" / "ü $x$.png", size=(50, 20))
    picture(root / "train" / "a" / "grey.png", mode="L")
    picture(root / "train" / "a" / "palette.png", mode="P")
    picture(root / "test" / "a" / "alpha.png", mode="RGBA")
    (root / "train" / "a" / "notes.txt").write_text("no image")
    (root / "train" / "empty").mkdir()
    data = load(tmp_path, "mine")
    assert data.x.shape == (4, 3, 32, 32) and data.classes == ["a", "b"] and data.domains == ["mine"]
    assert data.y.tolist() == [0, 0, 1, 0] and data.test.tolist() == [False, False, False, True]
    assert data.x[2, :, 0, 0].tolist() == data.x[3, :, 5, 5].tolist() == [200, 10, 10]
    assert len(data.x[0].unique()) == 1  # grey
    assert load(tmp_path, "mine", image_size=16).x.shape[2:] == (16, 16)

def test_domains_with_and_without_split(tmp_path):
    for n in range(40):
        picture(tmp_path / "set" / "photo" / "cat" / f"{n}.png")
        picture(tmp_path / "set" / "sketch" / ("train" if n < 30 else "test") / "dog" / f"{n}.png")
        picture(tmp_path / "flat" / ("cat", "dog")[n % 2] / f"{n}.png")
    (tmp_path / "set" / "photo" / ".DS_Store").touch()  # every Mac leaves one
    data = load(tmp_path, "set")
    assert data.domains == ["photo", "sketch"] and data.classes == ["cat", "dog"]
    assert torch.equal(data.y, data.domain) and data.test[data.y == 1].sum() == 10
    assert torch.equal(data.test[:40], torch.arange(40) % 10 > 7)
    assert torch.equal(data.test, load(tmp_path, "set", seed=5).test)
    with pytest.raises(SystemExit, match="wanted: .*flat/<domain>"):
        load(tmp_path, "flat")

def test_the_cache_is_used_and_redone_when_the_folder_changes(tmp_path, capsys):
    one, two = tmp_path / "s" / "train" / "a" / "1.png", tmp_path / "s" / "test" / "b" / "2.png"
    changes = [lambda: picture(one), lambda: picture(two), lambda: picture(one, (0, 0, 0)), two.unlink,
               lambda: one.rename(two)]  # new, more, written over, fewer, moved
    for change, size in zip(changes, (1, 2, 2, 1, 1)):
        change()
        data = load(tmp_path, "s")
        assert len(data.y) == size and "decoding" in capsys.readouterr().out
        assert torch.equal(load(tmp_path, "s").x, data.x) and "decoding" not in capsys.readouterr().out
    assert data.test.all() and data.x.max() == 0 and len(list(tmp_path.glob("*.pt"))) == 1

@pytest.mark.parametrize("content", [b"", b"no picture", b"\x89PNG\r\n\x1a\n" + bytes(30), b"GIF89a", "cut"])
def test_an_undecodable_file_is_named_and_nothing_cached(content, tmp_path, run):
    one, two = tmp_path / "s" / "train" / "a" / "1.png", tmp_path / "s" / "train" / "a" / "2.png"
    picture(one, size=(99, 99))
    two.write_bytes(one.read_bytes()[:-40] if content == "cut" else content)
    with pytest.raises(SystemExit) as stop:
        run("fedsa", "--dataset s --data", tmp_path)
    assert str(two) in stop.value.code and not (tmp_path / "runs").exists() and not [*tmp_path.glob("*.pt")]

def test_missing_data_says_where_and_what(tmp_path, run):
    (tmp_path / "empty" / "train" / "a").mkdir(parents=True)
    for name in ("pacs", "empty"):
        with pytest.raises(SystemExit) as stop:
            load(tmp_path, name)
        assert all(word in stop.value.code for word in (str(tmp_path / name), "<class>", "--dataset glyphs"))
    for n in range(8):
        picture(tmp_path / "s" / "train" / str(n % 2) / f"{n}.png")
    with pytest.raises(SystemExit, match="test images"):
        run("fedlsa", "--dataset s --partition iid --clients 2 --rounds 1 --data", tmp_path)

@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """In the place of each of torchvision's sets one with ten images a split, asked in the same words."""
    (tmp_path / "torchvision").mkdir()
    for kind in common.TORCHVISION.values():
        def make(root, words=inspect.signature(getattr(torchvision.datasets, kind)), kind=kind, **asked):
            words.bind(root, **asked)
            assert asked["download"] and asked.get("split", "train") in ("train", "val", "test")
            mode = "L" if "MNIST" in kind else "RGB"
            return [(Image.new("RGB", (40, 30), (20 * n,) * 3).convert(mode), n) for n in range(10)]
        monkeypatch.setattr(torchvision.datasets, kind, make)

@pytest.mark.parametrize("name", common.TORCHVISION)
def test_torchvision_sets(name, stand_in, tmp_path):
    data, splits = load(tmp_path, name), 3 if name == "flowers102" else 2
    assert data.y.tolist() == [*range(10)] * splits and data.test.nonzero()[0] == 10 * splits - 10
    assert data.x.shape[1:] == (3, *[common.SIZES.get(name, 32)] * 2) and data.x[7].unique().tolist() == [140]
    picture(tmp_path / name / "train" / "cat" / "1.png")  # a folder of that name goes before the download
    assert len(load(tmp_path, name).y) == 1

def test_a_download_that_fails_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "url", "http://127.0.0.1:9/nothing.tar.gz")
    with pytest.raises(SystemExit) as stop:
        load(tmp_path, "cifar10")
    assert "download" in stop.value.code and str(tmp_path / "cifar10") in stop.value.code
