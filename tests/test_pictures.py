"""Pictures and the comparison of runs."""

import io
import json
import math
import re
import runpy
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import common


class Identity(torch.nn.Module):
    """A model whose images are their own features."""

    num_classes = 3

    def features(self, x):
        return x


class Doubled(Identity):
    def features(self, x):
        return 2 * x


def a_client(i, y, domain=""):
    """A client with images 0, 1, 2 ... of classes y; the only feature of an image is its number."""
    x = torch.arange(float(len(y)))[:, None]
    images = common.Images(x, torch.tensor(y))
    return common.Client(i, images, test=images, net=Identity(), domain=domain)


# --- the pictures of a run ------------------------------------------------------------------------

def test_partition_png():
    """Clients run along x, classes along y; a dot's area counts images."""
    clients = [a_client(0, [0, 2, 2, 2]), a_client(1, [1, 1], domain="sketch")]
    for client in clients:
        client.test = None  # training images are counted
    figure = common.plot_partition(clients, ["a", "b", "c"])
    axis, = figure.axes
    dots, = axis.collections
    assert dots.get_offsets().tolist() == [[0, 0], [0, 2], [1, 1]]
    areas = dots.get_sizes()
    assert areas / areas[0] == pytest.approx([1, 3, 2])
    assert axis.get_xticklabels()[1].get_text() == "1 sketch"


def test_curves_png():
    """Accuracies are left, losses right; rounds without evaluation stay out."""
    log = {
        "round": np.array([1, 2]),
        "acc_test": np.array([math.nan, 50]),
        "loss": np.array([3, 2]),
        "server_loss": np.array([0.3, 0.2]),
        "up": np.array([7, 7]),
    }
    left, right = common.plot_curves(log).axes
    assert [line.get_label() for line in left.lines] == ["test"]
    assert left.lines[0].get_xydata().tolist() == [[2, 50]]
    assert [line.get_label() for line in right.lines] == ["loss", "server_loss"]
    assert right.lines[1].get_xydata().tolist() == [[1, 0.3], [2, 0.2]]


@pytest.mark.parametrize("has_sklearn", [False, True])
def test_points_in_the_plane_show_classes(has_sklearn, monkeypatch):
    """Classes stay apart, even without scikit-learn."""
    if not has_sklearn:
        monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    y = torch.arange(60) % 3
    z = 9 * torch.eye(30)[y] + torch.randn(60, 30)
    points, method = common.in_two_dimensions(z, seed=0)
    assert ("t-SNE" in method) == has_sklearn
    points = torch.tensor(points)
    centres = torch.stack([points[y == c].mean(0) for c in range(3)])
    assert torch.equal(common.distances(points, centres).argmin(1), y)


@pytest.mark.parametrize("z", [torch.zeros(60, 8), 3 + torch.zeros(60, 8), 1e-30 * torch.eye(60), torch.randn(1, 8),
                               1e30 * torch.randn(9, 8), torch.full((60, 8), math.nan), torch.tensor([[math.inf, 0]])])
def test_points_in_the_plane_for_any_features(z):
    """Equal, huge, non-finite or few features are drawn; t-SNE alone would crash."""
    points, _ = common.in_two_dimensions(z, seed=0)
    assert points.shape == (len(z), 2) and np.isfinite(points).all()


def test_features_png(monkeypatch):
    """Each frequent class has a colour; the server's prototypes are stars."""
    monkeypatch.setattr(common, "in_two_dimensions", lambda z, seed: (z.numpy(), "plane"))
    y = torch.arange(12).repeat_interleave(torch.arange(1, 13))  # c + 1 images of class c
    images = common.Images(torch.stack([y, y], 1).float(), y)    # drawn at (c, c)
    groups = {f"domain {n}": (Identity(), images) for n in range(13)}
    names = list("abcdefghijkl")
    prototypes = torch.tensor([[0.3, 0], [1.1, 0]])
    figure = common.plot_features(groups, prototypes, torch.tensor([3, 11]), names, seed=0)
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == [*names[2:], *groups, "server"]  # the ten most frequent classes
    assert sorted(text.get_text() for text in figure.axes[0].texts) == ["d", "l"]
    in_legend = [handle.get_facecolor()[0][:3].tolist() for handle in figure.legends[0].legend_handles[:10]]

    colours_at = {}  # {place: the colours of its dots}
    for dots in figure.axes[0].collections:
        for place in dots.get_offsets()[:, 0].tolist():
            colours_at.setdefault(round(place, 1), set()).add(tuple(dots.get_facecolor()[0]))
    assert sorted(colours_at) == [0.3, 1.1, *range(2, 12)]
    assert all(len(colours) == 1 for colours in colours_at.values()) and len(set.union(*colours_at.values())) == 10
    assert in_legend == [list(*colours_at[c])[:3] for c in range(2, 12)]
    of_class = [dots for dots in figure.axes[0].collections if 11 in dots.get_offsets()]
    assert len({dots.get_paths()[0].vertices.tobytes() for dots in of_class}) == 13  # a marker for each group
    assert sum(len(dots.get_offsets()) for dots in of_class) <= 13 * 12  # each with its own images
    assert colours_at[0.3] == colours_at[3] and colours_at[1.1] == colours_at[11]  # the prototypes


def test_features_png_has_each_clients_own_features(monkeypatch):
    drawn = Mock(return_value=(np.zeros((4, 2)), "plane"))
    monkeypatch.setattr(common, "in_two_dimensions", drawn)
    images = common.Images(torch.tensor([[1.0], [3]]), torch.tensor([0, 1]))
    groups = {"a": (Identity(), images), "b": (Doubled(), images)}
    common.plot_features(groups, torch.zeros(0, 1), torch.zeros(0).long(), ["x", "y"], seed=0)
    assert sorted(drawn.call_args.args[0].flatten().tolist()) == [1, 2, 3, 6]


def test_many_ticks_have_their_own_names():
    axis = common.Figure().subplots().xaxis
    common.label_ticks(axis, [str(n) for n in range(61)])
    assert axis.get_ticklocs().tolist() == [*range(0, 61, 3)]
    assert [int(text.get_text()) for text in axis.get_ticklabels()] == [*range(0, 61, 3)]


def test_margins():
    """Only distances to other classes count."""
    vectors = torch.tensor([[0.0], [1], [4], [9], [9.5]])
    labels = torch.tensor([0, 0, 1, 3, 3])
    assert common.margins(vectors, labels, 5).tolist() == [3, 3, math.inf, 5, math.inf]


def test_margins_png():
    """It draws the clients' largest and mean margins and the server's, divided by distances of training images; the
    axis begins at 0."""
    clients = [a_client(0, [0, 1]), a_client(1, [0, 2, 2, 1])]  # class means 0 and 1; 0, 3 and 1.5
    clients[1].test = None
    prototypes = torch.tensor([[2.0], [5], [4.5], [99]])  # distances of features: 2 and 4; 2, 2 and 3
    labels = torch.tensor([0, 1, 2, 2])
    axis, = common.plot_margins(clients, None, prototypes, labels, ["a", "b", "c"]).axes
    largest, mean, server = [line.get_ydata().tolist() for line in axis.lines[:3]]
    assert largest == [1.5 / 2, 1.5 / 2, 1.5 / 3]
    assert mean == [(1 / 2 + 1.5 / 2) / 2, (1 / 4 + 1.5 / 2) / 2, 1.5 / 3]
    assert server == pytest.approx([2.5 / 2, 0.5 / 3, 0.5 / 3])
    assert axis.get_ylim()[0] == 0
    axis, = common.plot_margins(clients, Doubled(), prototypes, labels, ["a", "b", "c"]).axes
    assert axis.lines[0].get_ydata().tolist() == [3 / 2, 3 / 1, 3 / 1.5]  # the global model, not the clients'
    axis, = common.plot_margins(clients, None, prototypes[:2], labels[:2], ["a", "b", "c"]).axes
    assert axis.lines[2].get_ydata().tolist()[2] is None  # no prototype of class c


def test_what_is_drawn(tmp_path, monkeypatch):
    """It shows six clients that share classes, or the global model."""
    features = Mock(return_value=common.Figure())
    margins = Mock(return_value=common.Figure())
    monkeypatch.setattr(common, "plot_features", features)
    monkeypatch.setattr(common, "plot_margins", margins)
    (tmp_path / "log.csv").write_text("round,acc_test,loss\n1,50,0.5\n")
    args = SimpleNamespace(no_plots=False, feature_dim=1, partition="iid", seed=0)
    run = SimpleNamespace(args=args, folder=tmp_path, log=tmp_path / "log.csv", rows=[{"round": 1}])
    data = SimpleNamespace(class_names=["a", "b", "c"])
    of_client = ["aaaa", "b", "aaab", "c", "aabb", "aa", "aab", "cc", "bbb"]
    clients = [a_client(i, ["abc".index(c) for c in text]) for i, text in enumerate(of_client)]
    for client in clients:
        client.train = None  # test images are drawn

    common.draw_pictures(run, data, clients)
    groups = features.call_args.args[0]
    chosen = [clients[i] for i in (0, 2, 4, 5, 6, 8)]
    assert list(groups.items()) == [(f"client {client.id}", (client.net, client.test)) for client in chosen]
    margins.assert_not_called()

    prototypes = torch.eye(2)
    labels = torch.tensor([1, 0])
    common.draw_pictures(run, data, clients, prototypes, labels, net="net", tests={"sketch": "images"})
    assert features.call_args.args[0] == {"sketch": ("net", "images")}
    assert features.call_args.args[1:3] == (prototypes, labels)
    assert margins.call_args.args[1:4] == ("net", prototypes, labels)


def test_a_picture_that_fails_costs_only_itself(tmp_path, monkeypatch, capsys):
    """Text is never a formula, and what is drawn before and after stays."""
    monkeypatch.setattr(common, "plot_curves", Mock(side_effect=ValueError("two\nlines")))
    folder = tmp_path / "a$b_$c"
    folder.mkdir()
    (folder / "log.csv").write_text("round,loss\n1,0.5\n")
    args = SimpleNamespace(no_plots=False, feature_dim=1, partition="iid", seed=0)
    data = SimpleNamespace(class_names=["$\\frac{$", "_b", "c" * 99])
    run = SimpleNamespace(args=args, folder=folder, log=folder / "log.csv", rows=[{"round": 1}])
    common.draw_pictures(run, data, [a_client(0, [0, 1, 2])], prototypes=torch.eye(3)[:, :1])
    assert sorted(path.stem for path in folder.glob("*.png")) == ["features", "margins", "partition"]
    assert capsys.readouterr().err == "no curves.png: ValueError: two lines\n"


def test_what_to_type_next(monkeypatch, capsys):
    """The control has every weight at 0; it is not suggested after itself. A script of the class stays in the command."""
    monkeypatch.setattr(sys, "argv", ["fedsa.py", "--subset", "0.1"])  # what a script of the class leaves of it
    monkeypatch.setattr(sys, "orig_argv", ["python", "exam.py", "fedsa.py", "--subset", "0.1"])
    args = SimpleNamespace(lam_r=0, lam_cc=0.1, lr=0.1, out="runs", resume=None, name=None)
    common.print_what_next(args)
    assert "python exam.py fedsa.py --subset 0.1 --lam-r 0 --lam-cc 0 --name off\n" in capsys.readouterr().out
    args.name = "mine"
    common.print_what_next(args)
    assert "--lam-cc 0 --name mine-off\n" in capsys.readouterr().out
    args.lam_cc = 0
    common.print_what_next(args)
    assert capsys.readouterr().out == "all runs in one table: python common.py runs/*\n"


# --- comparing runs -------------------------------------------------------------------------------

def a_run(folder, log, **settings):
    """A run's folder with a log."""
    folder.mkdir()
    settings = dict(dataset="glyphs", partition="iid", rounds=2, lam=1, seed=0) | settings
    (folder / "args.json").write_text(json.dumps(settings))
    (folder / "log.csv").write_text(log)
    return folder


def table(printed):
    """The cells of the printed table; of a run only the folder's name."""
    lines = re.findall(r"^\| (?:.*/)?(.*) \|$", printed, re.M)
    return [line.split(" | ") for line in lines if not line.startswith("run |")]


def test_seeds_share_a_row_if_their_settings_agree(tmp_path, capsys):
    """Runs that differ in a flag or in length get separate rows."""
    log = "round,acc_test\n1,50\n2,60\n"
    common.compare([
        a_run(tmp_path / "x-s2", "round,acc_test\n1,50\n", seed=2),  # stopped
        a_run(tmp_path / "x-s3", log, seed=3, rounds=9),  # killed after two
        a_run(tmp_path / "x-s0", log.replace("60", "62")),
        a_run(tmp_path / "x-s0-2", log, lam=2),  # a second run of seed 0
        a_run(tmp_path / "x-s1", log, seed=1, lam=2),
        a_run(tmp_path / "x-s1-2", log, seed=1, lam=2),  # nothing has changed
        a_run(tmp_path / "y-s0", log, partition="domain"),
        tmp_path / "y-s0",
    ])
    rows = [(row[0], row[1], row[4]) for row in table(capsys.readouterr().out)]
    assert rows == [
        ("x (1 rounds)", "2", "50.00"),
        ("x (2 rounds)", "0,3", "61.00 ± 1.41"),
        ("x-s0-2 (2 rounds)", "0,1", "60.00 ± 0.00"),
        ("x-s1-2 (2 rounds)", "1", "60.00"),
        ("y (2 rounds)", "0", "60.00"),
    ]
    assert (tmp_path / "compare-glyphs-iid.png").exists()
    assert (tmp_path / "compare-glyphs-domain.png").exists()


def test_rows_print_the_flags_in_which_they_differ(tmp_path, capsys):
    """Another model is said above the table; flags that are off or of another partition are not said."""
    log = "round,acc_test\n1,50\n"
    both = dict(partition="domain", lr=0.1)
    common.compare([
        a_run(tmp_path / "x", log, **both, model="cnn4", subset=0.1, beta=0.1, lam=0, lite=False),
        a_run(tmp_path / "y", log, **both, model="resnet10", small_stem=True, domain_clients={"a": 1, "b": 2}),
    ])
    printed = capsys.readouterr().out
    assert "the same --model, --subset, --small-stem, --domain-clients; see" in printed.split("| run |")[0]
    assert re.findall(r"/. \(1 rounds\): (.*)", printed) == [
        "--lam 0 --model cnn4 --subset 0.1", "--lam 1 --model resnet10 --small-stem --domain-clients a:1,b:2"]


def test_nothing_to_compare(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        common.compare([tmp_path, a_run(tmp_path / "x", "round,loss\n1,2.3\n")])  # no log; no accuracy yet
    printed = capsys.readouterr()
    assert stop.value.code == 2 and "no folder of a run" in printed.err
    assert f"{tmp_path}: left out" in printed.out and f"{tmp_path / 'x'}: left out" in printed.out


@pytest.mark.parametrize("log, settings", [
    ("", {}),
    ("round;acc_test\n1;50\n", {}),
    ("acc_test\n50\n", {}),
    ("round,acc_test\n1,\n", {}),
    ("round,acc_test\n1,50,7\n", {}),
    ("round,acc_test\n1,50\n", {"seed": "(0"}),
])
def test_a_run_that_cannot_be_read_is_left_out(log, settings, tmp_path, capsys):
    """The others are compared. A spreadsheet's mark before the first column does not matter."""
    common.compare([a_run(tmp_path / "x", log, **settings), a_run(tmp_path / "y", "\ufeffround,acc_test\n1,50\n")])
    printed = capsys.readouterr().out
    assert f"{tmp_path / 'x'}: left out" in printed
    assert [row[0] for row in table(printed)] == ["y (1 rounds)"]


def test_a_mistyped_folder_is_named(tmp_path, capsys):
    good = a_run(tmp_path / "x", "round,acc_test\n1,50\n")
    with pytest.raises(SystemExit):
        common.compare([good, tmp_path / "y"])
    assert f"{tmp_path / 'y'}: no such folder" in capsys.readouterr().err


def test_compare_as_a_program(tmp_path, monkeypatch):
    """Where the shell does not expand runs/*, and on a terminal that lacks ±."""
    for seed in 0, 1:
        a_run(tmp_path / f"x-s{seed}", f"round,acc_test\n1,5{seed}\n", seed=seed)
    terminal = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "argv", ["common.py", f"{tmp_path}/*"])
    runpy.run_path(common.__file__, run_name="__main__")
    terminal.flush()
    assert "50.50 ? 0.71" in terminal.buffer.getvalue().decode()


def test_a_row_of_personal_models(tmp_path, capsys):
    """The final round gives the lead; an untested round is not 0 %."""
    log = "round,acc_classifier,acc_most_frequent\n1,,\n2,80,35\n3,,\n4,60,35\n5,,\n"
    logs = {0: common.read_log(a_run(tmp_path / "mine", log) / "log.csv")}
    common.print_row(common.Row("mine", "mine", {}, logs))
    assert table(capsys.readouterr().out) == [["mine", "0", "classifier", "80.00", "60.00", "25.00"]]


def test_a_row_of_a_global_model(tmp_path, capsys):
    """Validation images pick the best round; a domain's name may have a comma."""
    log = 'round,acc_test,acc_validation,"acc_grey, old"\n1,50,70,5\n2,80,60,5\n3,60,65,5\n'
    logs = {0: common.read_log(a_run(tmp_path / "mine", log) / "log.csv")}
    common.print_row(common.Row("mine", "mine", {}, logs))
    assert table(capsys.readouterr().out) == [["mine", "0", "global model", "50.00", "60.00", ""]]


def test_compare_png():
    """Each prediction has a panel; a curve is the mean over seeds."""
    logs = {}
    for seed in 0, 2:
        logs[seed] = {
            "acc_classifier": np.array([math.nan, 50, 60 + seed]),
            "acc_prototype": np.array([41, 42, 43]),
        }
    other = {0: {"acc_classifier": np.array([1, 2, 3]), "acc_prototype": np.array([4, 5, 6])}}
    figure = common.plot_comparison("glyphs", [common.Row("mine", "", {}, logs), common.Row("other", "", {}, other)])
    left, right = figure.axes
    assert left.get_title() == "classifier accuracy of clients' own models"
    assert right.get_title() == "prototype accuracy of clients' own models"
    assert [line.get_ydata().tolist() for line in left.lines] == [[50, 61], [1, 2, 3]]
    assert left.lines[0].get_xdata().tolist() == [2, 3]
    assert [line.get_ydata().tolist() for line in right.lines] == [[41, 42, 43], [4, 5, 6]]
    legend = figure.legends[0]
    in_legend = {text.get_text(): line.get_color() for text, line in zip(legend.get_texts(), legend.legend_handles)}
    assert in_legend == {"mine": left.lines[0].get_color(), "other": left.lines[1].get_color()}
    band = left.collections[0].get_paths()[0].vertices
    assert {tuple(corner) for corner in band.tolist()} == {(2, 50), (3, 60), (3, 62)}
