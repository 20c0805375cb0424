"""Pictures and the comparison of runs."""

import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common
from conftest import SMALL


class Flat(torch.nn.Module):
    """A model whose features are the pixels."""

    num_classes = 12

    def features(self, x):
        return x.float().flatten(1)


def a_client(i, y, **other):
    """A client with images of classes y, all pixels of an image at its number."""
    y = torch.tensor(y)
    x = torch.arange(len(y)).view(-1, 1, 1, 1).expand(-1, 3, 2, 2)
    return common.Client(i, common.Images(x, y), test=common.Images(x, y), net=Flat(), **other)


def label_texts(legend):
    return [text.get_text() for text in legend.get_texts()]


# --- the pictures of a run ------------------------------------------------------------------------

def test_partition_png():
    """Catches: clients and classes exchanged, dots of one size, a domain that is not named."""
    figure = common.plot_partition([a_client(0, [0, 2, 2, 2]), a_client(1, [1, 1], domain="sketch")], ["a", "b", "c"])
    dots, = figure.axes[0].collections
    assert dots.get_offsets().tolist() == [[0, 0], [0, 2], [1, 1]]
    assert (dots.get_sizes() / dots.get_sizes().min()).tolist() == pytest.approx([1, 3, 2])
    figure.canvas.draw()
    assert "1 sketch" in [label.get_text() for label in figure.axes[0].get_xticklabels()]


def test_curves_png():
    """Catches: accuracies on the losses' axis, a loss of the server's left out, rounds without evaluation drawn."""
    log = {"round": np.array([1.0, 2]), "acc_test": np.array([math.nan, 50]), "loss": np.array([3.0, 2]),
           "server_loss": np.array([0.3, 0.2]), "up": np.array([7.0, 7])}
    left, right = common.plot_curves(log).axes
    assert [line.get_label() for line in left.lines] == ["test"]
    assert left.lines[0].get_xydata().tolist() == [[2, 50]]
    assert [line.get_label() for line in right.lines] == ["loss", "server_loss"]
    assert right.lines[1].get_xydata().tolist() == [[1, 0.3], [2, 0.2]]


@pytest.mark.parametrize("has_sklearn", [False, True])
def test_points_in_the_plane_show_classes(has_sklearn, monkeypatch):
    """Catches: a picture that needs scikit-learn, or that does not keep classes apart."""
    if has_sklearn:
        pytest.importorskip("sklearn")
    else:
        monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    y = torch.arange(60) % 3
    z = torch.randn(60, 30, generator=torch.Generator().manual_seed(0)) + 9 * torch.eye(30)[y]
    points, method = common.in_two_dimensions(z, 0)
    assert ("t-SNE" in method) == has_sklearn and points.shape == (60, 2)
    centres = np.stack([points[y == c].mean(0) for c in range(3)])
    nearest = np.linalg.norm(points[:, None] - centres, axis=2).argmin(1)
    assert nearest.tolist() == y.tolist()


def test_features_png(monkeypatch):
    """Catches: a group or class without its own marker or colour, prototypes that are not stars, rare classes drawn."""
    monkeypatch.setattr(common, "in_two_dimensions", lambda z, seed: (z[:, :2].numpy(), "pixels"))
    y = torch.arange(12).repeat_interleave(torch.arange(1, 13))  # of class c there are c + 1 images
    x = y.view(-1, 1, 1, 1).expand(-1, 3, 2, 2)
    groups = {f"domain {n}": (Flat(), common.Images(x, y)) for n in range(15)}
    names = list("abcdefghijkl")
    prototypes = torch.full((2, 12), 0.5)
    figure = common.plot_features(groups, prototypes, torch.tensor([3, 11]), names, 0)
    assert label_texts(figure.legends[0]) == [*names[2:], *groups, "server"]  # the ten most frequent classes
    drawn = [dots for dots in figure.axes[0].collections if len(dots.get_offsets())]
    stars = [dots for dots in drawn if dots.get_sizes() > 100]
    assert [dots.get_offsets().tolist() for dots in stars] == [[[0.5, 0.5]]] * 2
    assert [text.get_text() for text in figure.axes[0].texts] == ["d", "l"]
    colours = {}
    for dots in drawn:
        if dots not in stars:
            c, = set(dots.get_offsets()[:, 0].tolist())  # one class
            colours.setdefault(tuple(dots.get_facecolor()[0]), set()).add(c)
    assert sorted(map(list, colours.values())) == [[c] for c in range(2, 12)]  # each its own


def test_margins():
    """Catches: a distance within a class, an absent class with a margin."""
    labels = torch.tensor([0, 0, 1, 3, 3, 4])  # several vectors of a class, and classes without
    vectors = torch.randn(6, 5, dtype=torch.float64)
    vectors[4] = vectors[3] + 0.01  # close, but of one class
    for c, margin in enumerate(common.margins(vectors, labels, 6)):
        want = math.inf
        for a, label_a in zip(vectors, labels):
            for b, label_b in zip(vectors, labels):
                if label_a == c and label_b != c:
                    want = min(want, math.dist(a, b))
        assert margin == pytest.approx(want)
    assert np.isinf(common.margins(vectors[:1], labels[:1], 6)).all()


def test_margins_png():
    """Catches: the smallest client's margin for the largest, a star cut by the end of the axis, a star at 0."""
    clients = [a_client(0, [0, 1]), a_client(1, [0, 2, 2, 1])]
    prototypes = torch.eye(12)[:3] * 50
    axis, = common.plot_margins(clients, prototypes, torch.arange(3), list("abcdefghijkl")).axes
    largest, mean, server = [line.get_ydata()[:3].tolist() for line in axis.lines[:3]]
    step = math.sqrt(12)  # from one image to the next
    assert largest == pytest.approx([1.5 * step, 1.5 * step, 1.5 * step])
    assert mean == pytest.approx([1.25 * step, 1.25 * step, 1.5 * step])
    assert server == pytest.approx([50 * math.sqrt(2)] * 3)
    assert axis.get_ylim()[0] <= 0 and axis.get_ylim()[1] >= 1.04 * max(server)


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """drawn(**arguments of draw_pictures): what it hands to the functions that plot."""
    (tmp_path / "log.csv").write_text("round,loss\n1,0.5\n")
    handed = {}

    def go(clients, **other):
        for name in "partition", "curves", "features", "margins":
            def plot(*arguments, name=name):
                handed[name] = arguments
                return common.Figure()
            monkeypatch.setattr(common, f"plot_{name}", plot)
        args = SimpleNamespace(no_plots=False, feature_dim=12, partition="iid", seed=0)
        run = SimpleNamespace(args=args, folder=tmp_path, rows=[{"round": 1}])
        common.draw_pictures(run, SimpleNamespace(class_names=["a", "b"]), clients, **other)
        assert {path.stem for path in tmp_path.glob("*.png")} == set(handed)
        return handed
    return go


def test_the_largest_clients_are_drawn(drawn):
    """Catches: the clients with the fewest test images, a margin without prototypes."""
    clients = [a_client(i, [0] * (i + 1)) for i in range(8)]
    handed = drawn(clients)
    assert list(handed["features"][0]) == [f"client {i}" for i in range(7, 1, -1)]
    assert "margins" not in handed


def test_prototypes_are_drawn_with_their_classes(drawn):
    """Catches: stars and margins of other classes, clients' models instead of the global one."""
    client, prototypes, labels = a_client(0, [0, 1]), torch.eye(12)[:2], torch.tensor([1, 0])
    handed = drawn([client], prototypes=prototypes, labels=labels, net="net", tests={"sketch": client.test})
    assert handed["features"][0] == {"sketch": ("net", client.test)}
    for name in "features", "margins":
        assert handed[name][1] is prototypes and handed[name][2] is labels
    assert drawn([client], prototypes=prototypes)["margins"][2].tolist() == [0, 1]


# --- comparing runs -------------------------------------------------------------------------------

def a_run(folder, log, **settings):
    """A run folder with some lines of log.csv."""
    folder.mkdir(parents=True)
    settings = dict(dataset="glyphs", partition="iid", lam=1) | settings
    (folder / "args.json").write_text(json.dumps(settings))
    (folder / "log.csv").write_text(log)
    return folder


def table(out):
    """The cells of the table that common.compare printed; of a run only the folder's name."""
    lines = [line for line in out.splitlines() if line.startswith("| ") and not line.startswith("| run")]
    return [line.split("/")[-1].strip("| ").split(" | ") for line in lines]


def test_seeds_share_a_row_if_their_settings_agree(tmp_path, capsys):
    """Catches: seeds in rows of their own or out of order; runs averaged that differ in a flag, length or folder."""
    log = "round,acc_test\n1,50\n2,60\n"
    folders = [
        a_run(tmp_path / "x-s3", log, seed=3),
        a_run(tmp_path / "x-s0", log.replace("60", "62"), seed=0),
        a_run(tmp_path / "x-s1", log, seed=1, lam=2),
        a_run(tmp_path / "x-s2", "round,acc_test\n1,50\n", seed=2),
        a_run(tmp_path / "x-s4", log, seed=4, flag_of_later=1),
        a_run(tmp_path / "elsewhere" / "x-s0", log, seed=0),
        a_run(tmp_path / "y-s0", log, seed=0, partition="domain"),
        a_run(tmp_path / "z-s0", "round,loss\n1,2.3\n", seed=0),  # not tested yet
    ]
    (tmp_path / "began").mkdir()  # without a log
    common.compare([*folders, tmp_path / "began"])
    rows = [[row[0], row[1], row[4]] for row in table(capsys.readouterr().out)]
    assert rows == [["x", "0,3", "61.00 ± 1.41"], ["x-s1", "1", "60.00"], ["x-s2", "2", "50.00"],
                    ["x-s4", "4", "60.00"], ["x", "0", "60.00"], ["y", "0", "60.00"]]
    assert {path.name for path in tmp_path.glob("*.png")} == {"compare-glyphs-iid.png", "compare-glyphs-domain.png"}


def test_nothing_to_compare(tmp_path, capsys):
    """Catches: a traceback, or an empty table."""
    with pytest.raises(SystemExit) as stop:
        common.compare([tmp_path, a_run(tmp_path / "x", "round,loss\n1,2.3\n", seed=0)])
    assert stop.value.code == 2 and "no run folders" in capsys.readouterr().err


def test_real_runs_are_compared(run, tmp_path, capsys):
    """Catches: a folder whose name does not end with its seed, or a log that the comparison cannot read."""
    run("fedproto", SMALL["fedproto"], "--trials 2")
    run("fedproto", SMALL["fedproto"], "--name mine")
    capsys.readouterr()
    common.compare(sorted((tmp_path / "runs").iterdir()))
    rows = [row[:3] for row in table(capsys.readouterr().out)]
    assert rows == [["fedproto-glyphs-mine", "0", "classifier"], ["fedproto-glyphs-mine", "0", "prototype"],
                    ["fedproto-glyphs", "0,1", "classifier"], ["fedproto-glyphs", "0,1", "prototype"]]


@pytest.mark.parametrize("kind, log, cells", [
    # the lead is that of the final accuracy; round 4 has not been tested
    ("classifier", "round,acc_classifier,acc_most_frequent\n1,50,35\n2,80,35\n3,60,35\n4,,\n",
     ["classifier", "80.00", "60.00", "25.00", "4"]),
    # the best round is picked on validation images; a global model has no lead
    ("test", "round,acc_test,acc_validation\n1,50,70\n2,80,60\n3,60,65\n",
     ["the global model", "50.00", "60.00", "", "3"]),
])
def test_a_row_of_the_comparison(kind, log, cells, tmp_path, capsys):
    """Catches: the lead of the best round, a best round picked on test images, an untested round read as 0 %."""
    common.print_row("mine", {0: common.read_log(a_run(tmp_path / "mine", log))})
    assert table(capsys.readouterr().out) == [["mine", "0", *cells]]


def test_a_log_with_any_name_of_a_domain_is_read(tmp_path):
    """Catches: a run that ends with a traceback, as a domain's folder has a comma or a # in its name."""
    (tmp_path / "log.csv").write_text('round,"acc_old, grey","acc_#2"\n1,,0.5\n2,50.0,1\n')
    log = common.read_log(tmp_path)
    assert list(log) == ["round", "acc_old, grey", "acc_#2"]
    np.testing.assert_array_equal(log["acc_old, grey"], [math.nan, 50])
    assert log["acc_#2"].tolist() == [0.5, 1]


def test_compare_png():
    """Catches: the best seed instead of the mean, a round too early, a legend outside of the figure."""
    logs = {}
    for seed in 0, 1:
        logs[seed] = {"round": np.arange(1, 4), "acc_classifier": np.array([math.nan, 50, 60 + 2 * seed]),
                      "acc_prototype": np.arange(41, 44), "acc_most_frequent": np.full(3, 30.0 + 2 * seed)}
    rows = {f"fedproto-cifar10-a-rather-long-name-{n}": logs for n in range(14)}
    figure = common.plot_comparison("cifar10", rows)
    left, right = figure.axes
    assert left.get_title() == "clients' own models, by classifier"
    assert right.get_title() == "clients' own models, by prototype"
    assert left.lines[0].get_xydata().tolist() == [[2, 50], [3, 61]]
    assert left.lines[1].get_ydata()[0] == 31  # the most frequent class
    assert len(left.lines) == len(right.lines) == 28
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
