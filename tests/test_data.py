"""Where data comes from: the embedded glyphs, image folders with their cache, torchvision's downloads."""

import inspect, os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image

import common


def load(folder, dataset, **other):
    usual = dict(data=str(folder), image_size=None, subset=1.0, seed=0)
    return common.load_dataset(SimpleNamespace(dataset=dataset, **{**usual, **other}))


def picture(path, colour=(200, 10, 10), size=(32, 32), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).convert(mode).save(path)


# --- glyphs and subsets ---------------------------------------------------------------------------

def test_glyphs_are_balanced_and_always_the_same():
    """Catches: a class or domain with fewer images, a test image among the training images, images drawn twice."""
    data = common.glyphs()
    assert data.x.shape == (8000, 3, 32, 32) and data.x.dtype == torch.uint8
    assert data.class_names == list("0123456789") and len(data.domains) == 4
    for d in range(4):
        for images, n in ((data.test, 50), (~data.test, 150)):
            assert torch.bincount(data.y[(data.domain == d) & images]).tolist() == [n] * 10
    assert torch.equal(data.x[2000:4000], common.draw_domain("thin", 2000))
    assert len(data.x.unique(dim=0)) == 8000
    assert load("", "glyphs", image_size=24).x.shape == (8000, 3, 24, 24)


def test_a_subset_is_drawn_by_the_seed_and_keeps_an_image_with_its_class():
    """Catches: the first images instead of random ones, one of the columns left as it was."""
    whole, one, again, other = [load("", "glyphs", subset=share, seed=seed)
                                for share, seed in ((1.0, 0), (0.1, 0), (0.1, 0), (0.1, 1))]
    assert torch.equal(one.x, again.x) and not torch.equal(one.x, other.x)
    place = {image.numpy().tobytes(): i for i, image in enumerate(whole.x)}
    index = torch.tensor([place[image.numpy().tobytes()] for image in one.x])
    assert len(index.unique()) == 800
    for column in ("y", "domain", "test"):
        assert torch.equal(getattr(one, column), getattr(whole, column)[index])
    assert one.test.any() and len(one.domain.unique()) == 4 and len(one.y.unique()) == 10


# --- image folders --------------------------------------------------------------------------------

def test_a_folder_is_read_resized_and_converted(tmp_path):
    """Catches: names with spaces or signs, grey, palette and transparent images, a text file or a folder without
    images that stop the reading."""
    root = tmp_path / "mine"
    picture(root / "train" / "b" / "ü $x$.png", size=(50, 20))
    picture(root / "train" / "a" / "grey.png", mode="L")
    picture(root / "train" / "a" / "palette.png", mode="P")
    picture(root / "test" / "a" / "alpha.png", mode="RGBA")
    (root / "train" / "a" / "notes.txt").write_text("no image")
    (root / "train" / "empty").mkdir()
    data = load(tmp_path, "mine")
    assert data.x.shape == (4, 3, 32, 32) and data.class_names == ["a", "b"] and data.domains == ["mine"]
    assert data.y.tolist() == [0, 0, 1, 0] and data.test.tolist() == [False, False, False, True]
    assert data.x[2, :, 0, 0].tolist() == data.x[3, :, 5, 5].tolist() == [200, 10, 10]
    assert len(data.x[0].unique()) == 1  # grey
    assert load(tmp_path, "mine", image_size=16).x.shape[2:] == (16, 16)


PIXELS = dict(mnist=28, fmnist=28, usps=16, svhn=32, cifar10=32, cifar100=32, flowers102=64, tinyimagenet=64,
              digit5=64, office=64, pacs=64, domainnet=64, cinic10=32, digits=32)


@pytest.mark.parametrize("name", PIXELS)
def test_images_are_reduced_to_the_size_of_their_data_set(name, tmp_path):
    """Catches: another size, nearest pixels, which give the edges of a small image steps, another filter."""
    noise = np.random.default_rng(0).integers(256, size=(80, 80, 3), dtype=np.uint8)
    image, size = Image.fromarray(noise), (PIXELS[name], PIXELS[name])
    (tmp_path / name / "train" / "a").mkdir(parents=True)
    image.save(tmp_path / name / "train" / "a" / "1.png")
    x = load(tmp_path, name).x[0].permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(x, np.asarray(image.resize(size, Image.Resampling.BILINEAR)))


@pytest.mark.parametrize("names,stops", [("training test", True), ("training validation", True), ("one two", False)])
def test_a_division_of_images_is_not_taken_for_domains(tmp_path, names, stops):
    """Catches: test/ or validation/ read as a domain."""
    for name in names.split():
        picture(tmp_path / "mine" / name / "a" / "x.png")
    if not stops:
        assert load(tmp_path, "mine").domains == names.split()
        return
    with pytest.raises(SystemExit) as stop:
        load(tmp_path, "mine")
    assert f"{names.split()[1]}/ is there, but no train/" in str(stop.value) and "wanted: " in str(stop.value)


def test_rows_columns_and_channels_stay_what_they_are(tmp_path):
    """Catches: images that lie on their side, or blue for red."""
    image = Image.new("RGB", (32, 32))
    image.putpixel((31, 0), (250, 100, 0))  # at the right of the first row
    (tmp_path / "s" / "train" / "a").mkdir(parents=True)
    image.save(tmp_path / "s" / "train" / "a" / "1.png")
    x = load(tmp_path, "s").x[0]
    assert x[:, 0, 31].tolist() == [250, 100, 0] and x.sum() == 350


def test_domains_with_and_without_train_and_test(tmp_path):
    """Catches: test images that change with the seed, a domain numbered as another, classes read as domains."""
    for n in range(40):
        picture(tmp_path / "set" / "photo" / "cat" / f"{n}.png")
        picture(tmp_path / "set" / "sketch" / ("train" if n < 30 else "test") / "dog" / f"{n}.png")
        picture(tmp_path / "flat" / ("cat", "dog")[n % 2] / f"{n}.png")
    (tmp_path / "set" / "photo" / ".DS_Store").touch()  # every Mac leaves one
    picture(tmp_path / "set" / ".thumbnails" / "cat" / "1.png")
    data = load(tmp_path, "set")
    assert data.domains == ["photo", "sketch"] and data.class_names == ["cat", "dog"]
    assert torch.equal(data.y, data.domain) and data.test[data.y == 1].sum() == 10
    assert torch.equal(data.test[:40], torch.arange(40) % 10 > 7)  # two of ten
    assert torch.equal(data.test, load(tmp_path, "set", seed=5).test)
    with pytest.raises(SystemExit, match="wanted: .*flat/<domain>"):
        load(tmp_path, "flat")


def test_the_test_images_of_pacs(tmp_path):
    """Catches: another share than FedLSA's Table 3 fits, the same places in each domain, a draw by --seed, the last
    images of each class, or other data sets split so, too."""
    sizes = dict(art_painting=(2048, 615), cartoon=(2344, 704), photo=(1670, 501), sketch=(3929, 1179))
    for domain, (n, held) in sizes.items():
        chosen = torch.tensor(common.test_images("pacs", domain, n))
        assert len(chosen) == n and chosen.sum() == held
        for tenth in chosen.chunk(10):  # everywhere, and not at regular places
            assert 0.2 < tenth.float().mean() < 0.4
        assert len(set(chosen.nonzero().flatten().diff().tolist())) > 5
    assert common.test_images("pacs", "photo", 99) != common.test_images("pacs", "sketch", 99)
    assert sum(common.test_images("office", "photo", 100)) == 20

    for domain in ("photo", "sketch"):
        for n in range(21):
            picture(tmp_path / "pacs" / domain / ("cat" if n < 10 else "dog") / f"{n}.png")
    data = load(tmp_path, "pacs")
    assert torch.equal(data.test, load(tmp_path, "pacs", seed=5).test)
    assert data.test.tolist() == common.test_images("pacs", "photo", 21) + common.test_images("pacs", "sketch", 21)
    assert data.test[data.domain == 0].sum() == data.test[data.domain == 1].sum() == 7


def test_the_cache_is_used_and_redone_when_the_folder_changes(tmp_path, capsys):
    """Catches: images of before, or a decoding in every run; a cache kept for each change."""
    one, two = tmp_path / "s" / "train" / "a" / "1.png", tmp_path / "s" / "test" / "b" / "2.png"
    changes = [lambda: picture(one), lambda: picture(two), lambda: picture(one, (0, 0, 0)), two.unlink,
               lambda: one.rename(two)]  # new, more, written over, fewer, moved
    for change, size in zip(changes, (1, 2, 2, 1, 1)):
        change()
        data = load(tmp_path, "s")
        assert len(data.y) == size and "decoding" in capsys.readouterr().out
        assert torch.equal(load(tmp_path, "s").x, data.x) and "decoding" not in capsys.readouterr().out
    assert data.test.all() and data.x.max() == 0 and len(list(tmp_path.glob("*.pt"))) == 1


def test_a_folder_that_cannot_be_written_to_has_no_cache(tmp_path, monkeypatch, capsys):
    """Catches: the folder of a course, read-only for its students: a traceback instead of a run."""
    picture(tmp_path / "s" / "train" / "a" / "1.png")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    for _ in range(2):
        assert len(load(tmp_path, "s").y) == 1 and "decoding" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.pt"))


@pytest.mark.parametrize("content", [b"", b"no picture", b"\x89PNG\r\n\x1a\n" + bytes(30), b"GIF89a", "cut", "chunk"])
def test_an_undecodable_file_is_named_and_nothing_cached(content, tmp_path, run):
    """Catches: a traceback that does not say which file, a grey image in its place, half a cache that is
    used next time."""
    one, two = tmp_path / "s" / "train" / "a" / "1.png", tmp_path / "s" / "train" / "a" / "2.png"
    picture(one, size=(99, 99))
    if content == "chunk":  # noise fills several chunks; Pillow raises SyntaxError where the second has no name
        noise = np.random.default_rng(0).integers(256, size=(200, 200, 3), dtype=np.uint8)
        Image.fromarray(noise).save(two)
        place = two.read_bytes().rindex(b"IDAT")
        two.write_bytes(two.read_bytes()[:place] + b"ID\0T" + two.read_bytes()[place + 4:])
    else:
        two.write_bytes(one.read_bytes()[:-40] if content == "cut" else content)
    with pytest.raises(SystemExit) as stop:
        run("fedsa", "--dataset s --data", tmp_path)
    assert str(two) in stop.value.code
    assert not (tmp_path / "runs").exists() and not list(tmp_path.glob("*.pt"))


def test_missing_data_says_where_and_what(tmp_path, run):
    """Catches: a traceback for a student who has no data yet, or none to test on."""
    (tmp_path / "empty" / "train" / "a").mkdir(parents=True)
    for name in ("pacs", "empty"):
        with pytest.raises(SystemExit) as stop:
            load(tmp_path, name)
        assert all(word in stop.value.code for word in (str(tmp_path / name), "<class>", "--dataset glyphs", "cifar10"))
    for n in range(8):
        picture(tmp_path / "s" / "train" / str(n % 2) / f"{n}.png")
    with pytest.raises(SystemExit, match="test images"):
        run("fedlsa", "--dataset s --partition iid --clients 2 --rounds 1 --data", tmp_path)


# --- torchvision ----------------------------------------------------------------------------------

@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """In the place of each of torchvision's sets one with ten images a split, asked in the same words: tones
    0, 20, ... in training, 10, 30, ... in test images."""
    (tmp_path / "torchvision").mkdir()
    for kind in common.TORCHVISION.values():
        def make(root, words=inspect.signature(getattr(torchvision.datasets, kind)), kind=kind, **asked):
            words.bind(root, **asked)
            assert asked["download"] and asked.get("split", "train") in ("train", "val", "test")
            held_out = asked.get("split") == "test" or asked.get("train") is False
            mode = "L" if "MNIST" in kind or kind == "USPS" else "RGB"
            tones = [20 * n + (10 if held_out else 0) for n in range(10)]
            return [(Image.new("RGB", (40, 30), (tone,) * 3).convert(mode), n) for n, tone in enumerate(tones)]
        monkeypatch.setattr(torchvision.datasets, kind, make)


@pytest.mark.parametrize("name", common.TORCHVISION)
def test_torchvision_sets(name, stand_in, tmp_path):
    """Catches: words that torchvision does not know, a split left out, training images among the test images, a folder
    of one's own that is not read."""
    data, splits = load(tmp_path, name), 3 if name == "flowers102" else 2
    assert data.y.tolist() == [*range(10)] * splits
    assert data.test.nonzero().flatten().tolist() == [*range(10 * splits - 10, 10 * splits)]
    assert data.x.shape[1:] == (3, PIXELS[name], PIXELS[name])
    assert data.x[7].unique().tolist() == [140] and data.x[-3].unique().tolist() == [150]
    assert data.domains == [name] and len(data.class_names) == 10
    picture(tmp_path / name / "train" / "cat" / "1.png")  # a folder of that name goes before the download
    assert len(load(tmp_path, name).y) == 1


def test_a_download_that_fails_is_explained(tmp_path, monkeypatch):
    """Catches: a traceback of torchvision's where there is no internet."""
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "url", "http://127.0.0.1:9/nothing.tar.gz")
    root = tmp_path / "data"  # a fresh clone has none
    with pytest.raises(SystemExit) as stop:
        load(root, "cifar10")
    assert "download" in stop.value.code and str(root / "cifar10") in stop.value.code


def test_the_noise_of_glyphs():
    """Catches: more or less noise, which moves all accuracies on glyphs. In a corner of a flat ground it stands
    alone, 0.04 of the tones from 0 to 255."""
    corners = common.draw_domain("thin", 300)[:, 0, :6, :6].float().flatten(1)
    assert corners.std(1).median().item() == pytest.approx(0.04 * 255, rel=0.05)


def test_glyphs_are_those_of_the_published_runs():
    """Catches: other digits that are as good: a shear of the other sign, swapped zooms, noise of one channel."""
    by_domain = common.glyphs().x.view(4, 2000, 3, 32, 32)
    tones = [F.avg_pool2d(x[7, :1].float(), 16).flatten().tolist() for x in by_domain]  # four corners of a 7
    want = [[192, 186, 191, 209], [205, 208, 212, 210], [74, 83, 85, 87], [34, 51, 52, 51]]
    np.testing.assert_allclose(tones, want, atol=1)


@pytest.mark.parametrize("name", ["test", "validation"])
def test_a_data_set_may_be_called_test(name, tmp_path):
    """Catches: a data set that is taken for a folder of test images."""
    picture(tmp_path / name / "train" / "a" / "1.png")
    picture(tmp_path / name / "test" / "a" / "2.png")
    assert load(tmp_path, name).test.tolist() == [False, True]
