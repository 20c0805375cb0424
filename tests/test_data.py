"""Where data comes from: the embedded glyphs, image folders with their cache, torchvision's downloads through a stand-in."""

import gzip
import hashlib
import http.server
import io
import pickle
import tarfile
import threading
import types

import numpy as np
import pytest
import torch
from PIL import Image

import common


def args(tmp_path, dataset, **other):
    return types.SimpleNamespace(**{**dict(dataset=dataset, data=str(tmp_path), image_size=None, subset=1.0, seed=0), **other})


def picture(path, colour=(200, 10, 10), size=(32, 32), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).convert(mode).save(path)


def test_glyphs_are_always_the_same_and_balanced():
    data = common.glyphs()
    assert data.x.shape == (8000, 3, 32, 32) and data.x.dtype == torch.uint8
    for d in range(4):
        for split, n in ((data.test, 50), (~data.test, 150)):
            assert torch.bincount(data.y[(data.domain == d) & split]).tolist() == [n] * 10
    assert torch.equal(data.x, common.glyphs.__wrapped__().x) and len(data.x.unique(dim=0)) == 8000
    brightness = [data.x[data.domain == d].float().mean().item() for d in range(4)]
    assert brightness[2] < 100 < 150 < brightness[1] < brightness[0]


def test_folder_is_read_resized_and_converted(tmp_path):
    root = tmp_path / "mine"
    picture(root / "train" / "10" / "a b ü.png", size=(50, 20))
    picture(root / "train" / "2" / "grey.png", mode="L")
    picture(root / "train" / "2" / "palette.gif", mode="P")
    picture(root / "test" / "2" / "alpha.png", mode="RGBA")
    (root / "train" / "2" / "notes.txt").write_text("no image")
    (root / "train" / "empty").mkdir()
    (root / "train" / "2" / "._grey.png").write_bytes(b"what macOS leaves behind")
    data = common.load_dataset(args(tmp_path, "mine"))
    assert data.x.shape == (4, 3, 32, 32) and data.classes == ["2", "10"] and data.domains == ["mine"]
    assert data.y.tolist() == [0, 0, 1, 0] and data.test.tolist() == [False, False, False, True]
    assert data.x[2, :, 0, 0].tolist() == [200, 10, 10]
    assert common.load_dataset(args(tmp_path, "mine", image_size=16)).x.shape[2:] == (16, 16)


def test_domains_with_and_without_split(tmp_path):
    for n in range(40):
        picture(tmp_path / "set" / "photo" / "cat" / f"{n}.png")
        picture(tmp_path / "set" / "sketch" / ("train" if n < 30 else "test") / "dog" / f"{n}.png")
    data = common.load_dataset(args(tmp_path, "set"))
    assert data.domains == ["photo", "sketch"] and data.classes == ["cat", "dog"]
    assert data.test[data.domain == 1].sum() == 10 and 2 <= data.test[data.domain == 0].sum() <= 16
    again = common.load_dataset(args(tmp_path, "set", seed=5))
    assert torch.equal(data.test, again.test)  # our split of a folder does not depend on the seed


def test_cache_is_used_and_rebuilt_when_the_folder_changes(tmp_path, capsys):
    picture(tmp_path / "s" / "train" / "a" / "1.png")
    picture(tmp_path / "s" / "test" / "b" / "1.png")
    def load():
        data = common.load_dataset(args(tmp_path, "s"))
        return data, "decoding" in capsys.readouterr().out
    assert load()[1] and not load()[1]
    picture(tmp_path / "s" / "train" / "a" / "2.png")
    data, decoded = load()
    assert decoded and len(data.y) == 3
    (tmp_path / "s" / "train" / "a" / "2.png").unlink()
    data, decoded = load()
    assert decoded and len(data.y) == 2
    cache, = tmp_path.glob("*.pt")
    cache.write_bytes(cache.read_bytes()[:100])  # truncated
    assert load()[1] and not load()[1]


def test_other_splits_are_not_read_and_names_may_hold_dollars(tmp_path, capsys):
    for n in range(4):
        picture(tmp_path / "s" / ("train", "test", "val")[n % 3] / "$^$ x" / f"{n}.png")
    data = common.load_dataset(args(tmp_path, "s"))
    assert len(data.y) == 3 and "val is not read" in capsys.readouterr().out
    import matplotlib.pyplot as plt
    with plt.rc_context({"text.parse_math": False}):
        settings = types.SimpleNamespace(counts=np.ones((2, 1), int), class_names=data.classes, dataset="s", partition="iid", beta=1.0,
                                         classes_per_client=1, dominant_share=0.5, missing=1)
        common.plot_partition(plt, settings).savefig(tmp_path / "p.png")


def test_undecodable_file_is_named_and_nothing_cached(tmp_path):
    picture(tmp_path / "s" / "train" / "a" / "1.png")
    (tmp_path / "s" / "train" / "a" / "broken.png").write_bytes(b"not a picture")
    with pytest.raises(SystemExit) as stop:
        common.load_dataset(args(tmp_path, "s"))
    assert "broken.png" in str(stop.value.code) and not list(tmp_path.glob("*.pt"))


def test_a_hostile_folder_runs(tmp_path, run):
    """Odd sizes, modes and names, links that loop, classes that other domains or the test split lack."""
    import fedplcc
    root = tmp_path / "odd set é"
    for n in range(6):
        picture(root / "photo of" / "train" / "a class $x$" / f"{n}.png", size=[(1, 1), (3000, 2), (32, 32)][n % 3], mode=["RGB", "L", "P"][n % 3])
        picture(root / "photo of" / "train" / "only here" / f"{n}.tif", mode=["RGBA", "CMYK", "1"][n % 3] if n % 3 != 0 else "RGB")
        picture(root / "photo of" / "test" / "a class $x$" / f"{n}.PNG", mode="LA" if n else "RGB")
        picture(root / "süß" / "train" / "a class $x$" / f"{n} ü.png")
        picture(root / "süß" / "train" / "ünïcode" / f"{n}.bmp", colour=(0, 40 * n, 9))
    (root / "süß" / "train" / "empty").mkdir()
    (root / "süß" / "train" / "loop").symlink_to(root, target_is_directory=True)
    (root / "loop").symlink_to(root / "loop", target_is_directory=True)
    (root / "photo of" / "train" / "only here" / "dangling.png").symlink_to(root / "nowhere.png")
    (root / "photo of" / "train" / "only here" / "folder.png").mkdir()
    (root / "photo of" / "train" / "only here" / "virus.exe").write_bytes(b"MZ")
    results, text, folder = run(fedplcc, "--data", tmp_path, "--dataset", "odd set é", "--partition", "domain", "--domain-fraction", 1, "--rounds", 1, "--model", "resnet4",
                                "--local-epochs", 1)
    assert "30 images (3, 32, 32), 3 classes; 2 clients" in text and folder.name == "fedplcc-odd set é-s0"
    assert (folder / "partition.png").exists() and np.isfinite(results[0]["final"])


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n" + bytes(30), b"GIF89a"])
def test_a_broken_file_stops_a_script_in_one_message(content, tmp_path, run):
    import fedsa
    picture(tmp_path / "s" / "train" / "a" / "1.png")
    (tmp_path / "s" / "train" / "a" / "2.png").write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        run(fedsa, "--data", tmp_path, "--dataset", "s")
    assert "2.png" in stop.value.code and not (tmp_path / "runs").exists() and not list(tmp_path.glob("*.pt"))


def test_missing_folder_says_where_and_what(tmp_path):
    with pytest.raises(SystemExit) as stop:
        common.load_dataset(args(tmp_path, "pacs"))
    assert all(word in stop.value.code for word in (str(tmp_path / "pacs"), "<class>", "--dataset glyphs"))


def test_subset_is_a_seeded_share():
    a, b, c = (common.load_dataset(types.SimpleNamespace(dataset="glyphs", data="", image_size=None, subset=0.1, seed=s)) for s in (0, 0, 1))
    assert len(a.y) == 800 and torch.equal(a.x, b.x) and not torch.equal(a.x, c.x)


@pytest.fixture
def server(tmp_path):
    """A web server on this machine, in the place of the datasets' own."""
    site = tmp_path / "site"
    site.mkdir()
    handler = type("Handler", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *a: None})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *a: handler(*a, directory=site)) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield site, f"http://127.0.0.1:{httpd.server_port}/"
        httpd.shutdown()


def test_torchvision_colour_download(tmp_path, server, monkeypatch):
    from torchvision.datasets import CIFAR10
    site, url = server
    rng, batches = np.random.default_rng(0), {}
    for name in ("data_batch_1", "test_batch"):
        batches[name] = pickle.dumps({"data": rng.integers(0, 255, (6, 3072), dtype=np.uint8), "labels": [0, 1, 2, 3, 4, 5]})
    batches["batches.meta"] = pickle.dumps({"label_names": [f"class {c}" for c in range(10)]})
    with tarfile.open(site / "c.tar.gz", "w:gz") as tar:
        for name, content in batches.items():
            info = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    def md5(content):
        return hashlib.md5(content).hexdigest()
    monkeypatch.setattr(CIFAR10, "url", url + "c.tar.gz")
    monkeypatch.setattr(CIFAR10, "tgz_md5", md5((site / "c.tar.gz").read_bytes()))
    monkeypatch.setattr(CIFAR10, "train_list", [["data_batch_1", md5(batches["data_batch_1"])]])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", md5(batches["test_batch"])]])
    monkeypatch.setattr(CIFAR10, "meta", {"filename": "batches.meta", "key": "label_names", "md5": md5(batches["batches.meta"])})
    data = common.load_dataset(args(tmp_path, "cifar10"))
    assert data.x.shape == (12, 3, 32, 32) and data.y.tolist() == [0, 1, 2, 3, 4, 5] * 2
    assert data.test.tolist() == [False] * 6 + [True] * 6 and data.classes[3] == "class 3"
    first = np.frombuffer(pickle.loads(batches["data_batch_1"])["data"][0], np.uint8).reshape(3, 32, 32)
    assert np.array_equal(data.x[0].numpy(), first)
    assert common.load_dataset(args(tmp_path, "cifar10", image_size=16)).x.shape[2:] == (16, 16)
    picture(tmp_path / "cifar10" / "train" / "cat" / "1.png")  # a folder of that name goes before the download
    assert len(common.load_dataset(args(tmp_path, "cifar10")).y) == 1


def test_torchvision_grey_download(tmp_path, server, monkeypatch):
    from torchvision.datasets import MNIST
    site, url = server
    resources = []
    for part in ("train", "t10k"):
        images = np.random.default_rng(1).integers(0, 255, (5, 28, 28), dtype=np.uint8)
        for name, magic, array in ((f"{part}-images-idx3-ubyte.gz", 2051, images), (f"{part}-labels-idx1-ubyte.gz", 2049, np.arange(5, dtype=np.uint8))):
            content = gzip.compress(magic.to_bytes(4, "big") + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes())
            (site / name).write_bytes(content)
            resources.append((name, hashlib.md5(content).hexdigest()))
    monkeypatch.setattr(MNIST, "mirrors", [url])
    monkeypatch.setattr(MNIST, "resources", resources)
    data = common.load_dataset(args(tmp_path, "mnist"))
    assert data.x.shape == (10, 1, 28, 28) and data.y.tolist() == [0, 1, 2, 3, 4] * 2 and len(data.classes) == 10


def test_torchvision_set_of_files(tmp_path, monkeypatch):
    import torchvision
    class Flowers:
        def __init__(self, root, split, download):
            root.mkdir(exist_ok=True)
            self._labels = list(range({"train": 3, "val": 2, "test": 4}[split]))
            self.items = [(Image.new("RGB", (40 + k, 30)), k) for k in self._labels]
        def __getitem__(self, i):
            return self.items[i]
        def __len__(self):
            return len(self.items)
    monkeypatch.setattr(torchvision.datasets, "Flowers102", Flowers)
    data = common.load_dataset(args(tmp_path, "flowers102"))
    assert data.x.shape == (9, 3, 64, 64) and data.test.sum() == 4 and data.y.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    monkeypatch.delattr(Flowers, "__getitem__")
    assert torch.equal(common.load_dataset(args(tmp_path, "flowers102")).x, data.x)  # decoded once


def test_no_network_is_explained(tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR10
    monkeypatch.setattr(CIFAR10, "url", "http://127.0.0.1:9/nothing.tar.gz")
    with pytest.raises(SystemExit) as stop:
        common.load_dataset(args(tmp_path, "cifar10"))
    assert all(word in stop.value.code for word in ("download failed", str(tmp_path / "cifar10"), "--dataset glyphs"))
