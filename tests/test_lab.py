"""The lab sheets of .github/class: functions without bodies, and tests that say what is missing and what is wrong."""

import ast
import csv
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import common, fedplcc, fedproto, fedsa
import test_mistakes
from conftest import ROOT

CLASS = ROOT / ".github" / "class"
SHEETS = {}  # {title: ([[script, function, ...] of each blank.py line], the words of the pytest line)}
sheet = (CLASS / "labs.md").read_text(encoding="utf-8")
for title, block in re.findall(r"^## (\w+): .*?```bash\n(.*?)```", sheet, re.M | re.S):
    blanks = re.findall(r"^python \.github/class/blank\.py (.*)$", block, re.M)
    tests = re.search(r"^python (-m pytest .*)$", block, re.M)[1]
    SHEETS[title] = ([line.split() for line in blanks], shlex.split(tests))
assert list(SHEETS) == ["Easy", "Medium", "Hard"]
every_sheet = pytest.mark.parametrize("title", SHEETS)


def git(folder, *words):
    subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x", *words], cwd=folder, check=True)


def blank(folder, *words):
    return subprocess.run([sys.executable, CLASS / "blank.py", *words], cwd=folder, capture_output=True, text=True)


@every_sheet
def test_only_the_body_goes(title, tmp_path):
    """Signature and docstring stay; blank.py prints the way back."""
    lines = SHEETS[title][0]
    git(tmp_path, "init", "-q")
    for script, *_ in lines:
        shutil.copy(ROOT / script, tmp_path)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "as it was")
    for script, *functions in lines:
        assert f"git restore {script}\n" in blank(tmp_path, script, *functions).stdout
        expected = ast.parse((ROOT / script).read_text(encoding="utf-8"))
        for node in expected.body:
            if isinstance(node, ast.FunctionDef) and node.name in functions:
                del node.body[1:]  # the docstring stays
        line = r'^    raise NotImplementedError\("(Eqs?\. \d.*|\w+)"\)\n'
        blanked, removed = re.subn(line, "", (tmp_path / script).read_text(encoding="utf-8"), flags=re.M)
        assert removed == len(functions)
        assert ast.dump(ast.parse(blanked)) == ast.dump(expected)


def test_blanking_tells_what_is_wrong(tmp_path):
    """One line names the problem; the file stays as it was."""
    shutil.copy(ROOT / "fedsa.py", tmp_path)
    for words, problem in ("fedsa.py ema emma", "emma"), ("fedsaa.py ema", "fedsaa.py"), ("--force", "usage"):
        done = blank(tmp_path, *words.split())
        assert done.returncode == 2
        assert problem in done.stderr and done.stderr.count("\n") == 1
    assert (tmp_path / "fedsa.py").read_text(encoding="utf-8") == (ROOT / "fedsa.py").read_text(encoding="utf-8")


def test_blanking_spares_a_solution(tmp_path):
    """A file that git cannot bring back is blanked only with --force."""
    script = tmp_path / "fedsa.py"
    shutil.copy(ROOT / "fedsa.py", script)
    assert "in no git repository" in blank(tmp_path, "fedsa.py", "ema").stderr
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "as it was")
    solution = script.read_text() + "# mine\n"
    script.write_text(solution)
    assert "not committed" in blank(tmp_path, "fedsa.py", "ema").stderr
    assert script.read_text() == solution
    assert "git restore" not in blank(tmp_path, "fedsa.py", "ema", "--force").stdout
    assert "raise NotImplementedError" in script.read_text()


@every_sheet
def test_the_tests_name_what_is_missing(title, tmp_path):
    """The tests fail in the sheet's order, so that -x shows the first function that is missing."""
    shutil.copytree(ROOT / "tests", tmp_path / "tests")
    for file in ROOT.glob("*.py"):
        shutil.copy(file, tmp_path)
    lines, words = SHEETS[title]
    assert words[-2:] == ["-x", "--tb=short"]
    missing, selected = [], []
    for script, *functions in lines:
        printed = blank(tmp_path, script, *functions, "--force").stdout
        command = shlex.split(re.search(r"^to test: python (.*)$", printed, re.M)[1])
        selected += command.pop(-3).split(" or ")
        assert command == words[:-3] + words[-2:]
        source = (tmp_path / script).read_text()
        missing += [re.search(rf'def {name}\(.*?NotImplementedError\("(.*?)"\)', source, re.S)[1] for name in functions]
    assert sorted(selected) == sorted(words[-3].split(" or "))

    words = [*words[:-2], "--tb=line", "-p", "no:cacheprovider"]
    printed = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True).stdout
    named = re.findall(r":\d+: NotImplementedError: (.*)", printed)
    assert list(dict.fromkeys(named)) == missing
    assert len(missing) == len(re.findall(r"^FAILED tests/test_mistakes.py", printed, re.M))


# --- wrong bodies -----------------------------------------------------------------------------------

right_class_means = common.class_means


def sums(net, images):
    means, counts = right_class_means(net, images)
    return means * counts[:, None], counts


def plain_mean(client_prototypes, counts):
    return client_prototypes.sum(0) / (counts > 0).sum(0).clamp(min=1)[:, None], counts.sum(0) > 0


def no_clamp(client_prototypes, counts):
    total = counts.sum(0)
    return (client_prototypes * counts[:, :, None]).sum(0) / total[:, None], total > 0


def mean_over_batch(z, y, prototypes, has_prototype, distance):
    return ((z - prototypes[y]).norm(dim=1) * has_prototype[y]).mean()


def margin_subtracted(z, y, anchors, margin):
    return F.cross_entropy(-(common.distances(z, anchors) - margin * F.one_hot(y, len(anchors))), y)


def margin_on_the_others(z, y, anchors, margin):
    return F.cross_entropy(-(common.distances(z, anchors) + margin * (1 - F.one_hot(y, len(anchors)))), y)


def margin_on_the_batch(z, y, anchors, margin):
    d = common.distances(z, anchors)
    d[:, y] += margin
    return F.cross_entropy(-d, y)


def margin_everywhere(z, y, anchors, margin):
    return F.cross_entropy(-(common.distances(z, anchors) + margin), y)


def alpha_on_the_average(anchors, averages, uploaded, alpha):
    return torch.where(uploaded[:, None], alpha * averages + (1 - alpha) * anchors, anchors)


def all_anchors_move(anchors, averages, uploaded, alpha):
    return alpha * anchors + (1 - alpha) * averages


def diagonal(value):
    """One pass of FINCH with this number on the diagonal."""
    def first_neighbour_clusters(x):
        unit = F.normalize(x, dim=1)
        return fedplcc.connected_components((unit @ unit.T).fill_diagonal_(value).argmax(1))
    return first_neighbour_clusters


def nearest_by_distance(x):
    return fedplcc.connected_components(torch.cdist(x, x).fill_diagonal_(torch.inf).argmin(1))


def means_without_times(x, cluster, times):
    return torch.stack([x[cluster == j].mean(0) for j in cluster.unique()])


def endless(x, times):
    cluster = fedplcc.first_neighbour_clusters(x)
    while True:
        means = fedplcc.cluster_means(x, cluster, times)
        cluster = fedplcc.first_neighbour_clusters(means)[cluster]


def to_one_cluster(x, times):
    cluster = fedplcc.first_neighbour_clusters(x)
    while cluster.max() > 0:
        cluster = fedplcc.first_neighbour_clusters(fedplcc.cluster_means(x, cluster, times))[cluster]
    return cluster


@pytest.mark.parametrize("module, name, wrong, sentence", [
    (common, "class_means", sums, "not divided by its number of images"),
    (fedproto, "weighted_mean", plain_mean, "all clients weigh the same"),
    (fedproto, "weighted_mean", no_clamp, "divided by 0"),
    (fedproto, "prototype_distance", mean_over_batch, "the mean divides by all samples"),
    (fedsa, "average_margin", lambda points: torch.pdist(points).mean(), "this is the mean distance"),
    (fedsa, "margin_contrastive", margin_subtracted, "subtracted for the true class"),
    (fedsa, "margin_contrastive", margin_on_the_others, "or added for all the others"),
    (fedsa, "margin_contrastive", margin_on_the_batch, "for all classes of the batch"),
    (fedsa, "margin_contrastive", margin_everywhere, "added for all classes"),
    (fedsa, "ema", alpha_on_the_average, "must weigh the old anchor"),
    (fedsa, "ema", all_anchors_move, "no participant uploaded has moved"),
    (fedplcc, "first_neighbour_clusters", diagonal(1), "its own nearest: leave out the diagonal"),
    (fedplcc, "first_neighbour_clusters", diagonal(-1), "lower than −1"),
    (fedplcc, "first_neighbour_clusters", nearest_by_distance, "nearest by distance"),
    (fedplcc, "cluster_means", means_without_times, "times are not used"),
    (fedplcc, "finch", lambda x, times: fedplcc.first_neighbour_clusters(x), "after its first pass"),
    (fedplcc, "finch", endless, "finch never ends"),
    (fedplcc, "finch", to_one_cluster, "a pass that leaves one cluster"),
    (fedplcc, "prototype_weights", lambda sizes, labels: sizes / sizes.sum(), "those of each class must"),
])
def test_a_wrong_body_fails_with_its_cause(module, name, wrong, sentence, monkeypatch):
    """The function's own test fails under a sentence that names the mistake."""
    monkeypatch.setattr(module, name, wrong)
    test, = [test for test_name, test in vars(test_mistakes).items() if re.fullmatch(rf"test_\w*_{name}", test_name)]
    with pytest.raises(AssertionError, match=sentence):
        test(monkeypatch) if name == "finch" else test()


ANSWERS = [  # of exercise: round, runs, columns
    (2, 10, ["fedproto", "fedproto-off", "fedproto-off-cnn4"], ["classifier", "own", "others"]),
    (3, 10, ["fedproto-iid", "fedproto-pathological"], ["classifier", "most_frequent", "everyone"]),
    (4, 10, ["fedproto", "fedtgp", "fedtgp-no-margin"], ["star_margin", "own_star", "prototype", "classifier"]),
    (5, 10, ["fedsa", "fedsa-no-mcl", "fedsa-no-cc"], ["classifier", "prototype"]),
    (6, 12, ["fedlsa-off", "fedlsa-length-1", "fedlsa"], ["clutter"]),
    (6, 24, ["fedlsa-off", "fedlsa-length-1", "fedlsa"], ["clutter"]),
    (7, 10, ["fedcon", "fedproto", "fedproto-off"], ["prototype", "cosine"]),
]


@pytest.mark.parametrize("exercise, t, runs, columns", ANSWERS)
def test_answers_are_in_the_data(exercise, t, runs, columns):
    """Each run's three numbers are in the exercise's table, as class.csv has them."""
    with open(ROOT / ".github" / "results" / "class.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["round"] == str(t)]
    answer = re.search(rf"^## {exercise}\. .*?(?=^## )", (CLASS / "answers.md").read_text(), re.M | re.S)[0]
    cells = [[float(x) for x in cell.split(", ")] for cell in re.findall(r"\| ([\d., ]+) (?=\|)", answer)]
    for run in runs:
        for column in columns:
            of_seeds = [float(row[column]) for row in rows if row["run"] == run]
            assert any(cell == pytest.approx(of_seeds, abs=0.051) for cell in cells), (run, column)


@pytest.mark.parametrize("exercise", [2, 3])
def test_tables_to_fill_in(exercise):
    """The class page's empty table has the rows of the answers' table."""
    first_cells = []
    for page in "README.md", "answers.md":
        table = re.search(rf"^##+ {exercise}\. .*?(^\|.*?\n)\n", (CLASS / page).read_text(encoding="utf-8"), re.M | re.S)[1]
        first_cells.append([row.split("|")[1].split(":")[0].strip() for row in table.splitlines()[2:]])
    assert first_cells[0] == first_cells[1] and len(first_cells[0]) >= 3
