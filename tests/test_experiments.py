"""The experiments of the papers, at their smallest size, and the class `Lab` that they use."""

import csv
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import official_files as official
import pytest
import torch
from PIL import Image

from tritoncaps import Capsules, ClassCaps, EMRouting, VectorCaps, experiments
from tritoncaps import inspect as inspect_capsules
from tritoncaps.cli import main
from tritoncaps.data import familiar_views, toynorb
from tritoncaps.data.affnist import affine, affnist_like
from tritoncaps.data.idx import DIGITS
from tritoncaps.data.images import ImageSet
from tritoncaps.experiments import EXPERIMENTS, Lab, Options
from tritoncaps.experiments.ablation import VARIANTS, _variants
from tritoncaps.experiments.convergence import changes_of
from tritoncaps.experiments.dimensions import OFFSETS, draw_moved
from tritoncaps.experiments.gallery import collect
from tritoncaps.experiments.novel_viewpoints import FULL_CAPSULES, FULL_CNN, FULL_STEPS
from tritoncaps.experiments.routing_matters import with_routing
from tritoncaps.experiments.segmentation import pixel_accuracy
from tritoncaps.experiments.variants import FullMatrices, MixingProportions
from tritoncaps.experiments.vote_histograms import vote_distances
from tritoncaps.models import CapsNet
from tritoncaps.training import Config, ConfigError, Evaluation, train
from tritoncaps.training.config import read_config
from tritoncaps.training.evaluation import views
from tritoncaps.training.metrics import read_metrics

PIXELS = 28
RECIPES = Path(__file__).parent.parent / "docs" / "recipes"


def strokes(count):
    """Ten kinds of "digits": a bar at one of ten heights, a little different in each image."""
    random = np.random.default_rng(0)
    images = np.zeros((count, PIXELS, PIXELS), np.uint8)
    labels = np.arange(count, dtype=np.uint8) % 10
    for image, label in zip(images, labels, strict=True):
        row, left = 4 + 2 * int(label), int(random.integers(4, 8))
        image[row : row + 2, left : left + 14] = 255
    return images, labels


@pytest.fixture
def digits(tmp_path):
    """A folder with files of MNIST's format."""
    for prefix, count in (("train", 400), ("t10k", 60)):
        images, labels = strokes(count)
        official.write(tmp_path / "data" / "mnist" / f"{prefix}-images-idx3-ubyte.gz", official.idx(images))
        official.write(tmp_path / "data" / "mnist" / f"{prefix}-labels-idx1-ubyte.gz", official.idx(labels))
    return tmp_path / "data"


@pytest.fixture
def toys(tmp_path, monkeypatch):
    """ToyNORB with one light, and with a bright patch in place of each toy."""
    monkeypatch.setattr(toynorb, "LIGHTS", 1)
    count = 5 * 5 * 9 * 18
    images = np.random.default_rng(0).integers(0, 60, (count, 2, 48, 48), dtype=np.uint8)
    for kind, of_kind in enumerate(np.split(images, 5)):
        of_kind[:, :, 12 + 4 * kind : 16 + 4 * kind, 16:32] += 150
    monkeypatch.setattr(toynorb, "_cached", lambda path: images)
    return tmp_path / "data"


def run(name, tmp_path, data_dir, **options):
    small = {"steps": 2, "images": 40, "quick": True, **options}
    return experiments.run(name, tmp_path / "out" / name, quiet=True, data_dir=str(data_dir), **small)


# the lab


def lab(tmp_path, source="code", **options):
    return Lab("name", "A title", tmp_path / "out", Options(**options), source, quiet=True)


def test_a_step_is_done_once(tmp_path):
    done = []

    def work():
        done.append(1)
        return {"numbers": [1, 2.5], "tensor": torch.arange(3)}

    first, second = lab(tmp_path).step("a", work), lab(tmp_path).step("a", work)
    assert len(done) == 1
    assert first["numbers"] == second["numbers"]
    assert torch.equal(first["tensor"], second["tensor"])
    lab(tmp_path, seed=1).step("a", work)
    lab(tmp_path, source="other code").step("a", work)
    assert len(done) == 3
    (tmp_path / "out" / "steps" / "a.pt").write_bytes(b"half a file")
    lab(tmp_path, source="other code").step("a", work)
    assert len(done) == 4


def test_an_interrupted_experiment_goes_on(tmp_path, monkeypatch):
    """The second step is interrupted once; the first step does not run again."""
    done, interrupted = [], []

    def second():
        if not interrupted:
            interrupted.append(1)
            raise KeyboardInterrupt
        return done.append("second")

    def function(given):
        given.step("first", lambda: done.append("first"))
        given.step("second", second)
        given.row(value=1)

    monkeypatch.setitem(EXPERIMENTS, "mine", experiments.Experiment("Mine", "nobody"))
    monkeypatch.setattr(experiments.Experiment, "function", lambda self, name: (function, "code"))
    with pytest.raises(KeyboardInterrupt):
        experiments.run("mine", tmp_path / "mine", quiet=True)
    assert not (tmp_path / "mine" / "report.json").exists()
    report = experiments.run("mine", tmp_path / "mine", quiet=True)
    assert done == ["first", "second"]
    assert json.loads((tmp_path / "mine" / "report.json").read_text())["rows"] == [{"value": 1}] == report.rows


def test_trainings_are_shared_and_go_on(tmp_path, toys):
    """A second experiment finds the training; after the first stage, the second goes on from it."""
    config = Config(data="toynorb", model="linear", steps=4, batch_size=8, limit=40, test_limit=20, evaluate_every=4)
    one = lab(tmp_path / "one")
    one.folder = tmp_path / "one"
    staged = one.train_in_stages("linear", config, [2, 4])
    assert [stage.result["step"] for stage in staged] == [2, 4]
    two = lab(tmp_path / "two")
    two.folder = tmp_path / "two"
    again = two.train("linear", config)
    assert again.result == staged[1].result
    assert torch.equal(again.network[1].weight, staged[1].network[1].weight)
    assert not torch.equal(staged[0].network[1].weight, staged[1].network[1].weight)
    other = two.train("linear", Config(**{**vars(config), "seed": 1}))
    assert not torch.equal(again.network[1].weight, other.network[1].weight)
    assert len(list((tmp_path / "trainings").iterdir())) == 2


def test_steps_after_another_training_are_done_again(tmp_path, toys):
    config = Config(data="toynorb", model="linear", steps=1, batch_size=8, limit=40, test_limit=20)
    done = []
    for seed in (0, 1, 1):
        given = lab(tmp_path)
        given.train("linear", Config(**{**vars(config), "seed": seed}))
        given.step("a", lambda seed=seed: done.append(seed))
    assert done == [0, 1]


def test_the_report_shows_numbers_figures_and_rows(tmp_path):
    from matplotlib import pyplot

    given = lab(tmp_path, quick=True)
    given.numbers |= {"accuracy": 0.875, "images": 8, "list": [1, 2]}
    given.row(name="<a>", error=0.125)
    given.row(name="b", steps=3)
    given.figure("curve", pyplot.figure(figsize=(1, 1)), "What it shows")
    given.note("Mind the gap.")
    report = given.report()
    page = (tmp_path / "out" / "report.html").read_text()
    assert '<img src="curve.png" alt="What it shows">' in page
    assert "87.5%" in page
    assert "&lt;a&gt;" in page
    assert "12.5%" in page
    assert "Mind the gap." in page
    assert "<code>tritoncaps experiment name --quick</code>" in page
    with open(tmp_path / "out" / "table.csv") as file:
        assert list(csv.DictReader(file)) == [
            {"name": "<a>", "error": "0.125", "steps": ""},
            {"name": "b", "error": "", "steps": "3"},
        ]
    saved = json.loads((tmp_path / "out" / "report.json").read_text())
    assert saved["numbers"] == {"accuracy": 0.875, "images": 8, "list": [1, 2]} == report.numbers
    assert (tmp_path / "out" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_gallery_has_small_pictures(tmp_path):
    from matplotlib import pyplot

    given = lab(tmp_path / "runs")
    figure, axis = pyplot.subplots(figsize=(4, 3))
    axis.imshow(np.random.default_rng(0).random((60, 60, 3)))
    given.figure("curve", figure, "What it shows")
    given.report()
    (written,) = collect(tmp_path / "runs", tmp_path / "docs")
    assert written == tmp_path / "docs" / "name-curve.png"
    original = tmp_path / "runs" / "out" / "curve.png"
    assert written.stat().st_size < original.stat().st_size
    with Image.open(written) as small, Image.open(original) as large:
        assert small.size == large.size == (400, 300)


def test_wrong_options_get_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match="there is no experiment 'alchemy': it must be one of ablation, "):
        experiments.run("alchemy", tmp_path)
    with pytest.raises(ConfigError, match="--run and --pretrained cannot both be given"):
        Options(run="a", pretrained="mnist")
    with pytest.raises(ConfigError, match="--steps must be at least 1, but it is 0"):
        Options(steps=0)
    with pytest.raises(ConfigError, match="dimensions needs a network with a decoder"):
        experiments.run("dimensions", tmp_path, pretrained="mnist", quiet=True)


def test_command_lists_experiments(capsys):
    assert main(["experiment", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(EXPERIMENTS)
    assert main(["experiment", "list", "--json"]) == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)} == set(EXPERIMENTS)


def test_every_experiment_has_a_function():
    for name, entry in EXPERIMENTS.items():
        function, source = entry.function(name)
        assert callable(function)
        assert source.startswith('"""')


# the experiments


def test_adversarial(tmp_path, toys):
    report = run("adversarial", tmp_path, toys, pretrained="toynorb", images=5)
    rows = {(row["attack"], row["box"], row["network"], row["epsilon"]): row for row in report.rows}
    epsilons = report.numbers["epsilons"]
    assert len(rows) == len(report.rows) == 2 * 4 * len(epsilons)
    for network in ("pretrained toynorb", "CNN"):
        plain = {rows[method, "white", network, 0.0]["accuracy"] for method in ("FGSM", "BIM")}
        assert len(plain) == 1  # nothing is changed
        strongest = rows["BIM", "white", network, epsilons[-1]]
        assert strongest["accuracy"] <= plain.pop()
        assert strongest["targeted_success"] >= rows["BIM", "white", network, 0.0]["targeted_success"]
    same = ("FGSM", "black", "pretrained toynorb", 0.0)
    assert rows[same]["accuracy"] == rows["FGSM", "white", "pretrained toynorb", 0.0]["accuracy"]
    assert {figure["file"] for figure in report.figures} == {"accuracy.png", "examples.png"}
    assert 0 <= report.numbers["share of zero gradients, CNN"] <= 1


def test_only_seen_pixels_are_attacked(tmp_path):
    from tritoncaps.experiments.adversarial import _attack
    from tritoncaps.experiments.lab import Trained
    from tritoncaps.training.saved import load_pretrained_network

    network, config, _ = load_pretrained_network("toynorb")
    trained = Trained("capsules", network, config, {})
    torch.manual_seed(0)
    pixels = 0.2 + 0.6 * torch.rand(2, 2, 48, 48)
    changed = _attack("BIM", trained, pixels, torch.tensor([0, 1]), 0.1, 3)
    difference = (changed - pixels).abs()
    assert 0.05 < difference.max() <= 0.1 + 1e-6
    torch.testing.assert_close(trained.seen(difference).sum(), difference.sum())
    torch.testing.assert_close(trained.pasted(trained.seen(changed), pixels), changed)


def test_dimensions(tmp_path, digits):
    report = run("dimensions", tmp_path, digits)
    assert [row["dimension"] for row in report.rows] == list(range(16))
    assert all(row["pixel_change"] > 0 for row in report.rows)


def test_moved_by_nothing_is_the_reconstruction():
    torch.manual_seed(0)
    network = CapsNet(image_size=20, channels=4, primary_caps=2).eval()
    capsules = network(torch.rand(3, 1, 20, 20))
    labels = torch.tensor([3, 0, 9])
    trained = experiments.Trained("CapsNet", network, Config(), {})
    with torch.no_grad():
        drawn = draw_moved(trained, capsules.poses[torch.arange(3), labels], labels, OFFSETS)
        plain = network.reconstruct(capsules, labels)
        assert drawn.shape == (3, 16, 11, 1, 20, 20)
        torch.testing.assert_close(drawn[:, :, OFFSETS.index(0.0)], plain[:, None].expand(3, 16, 1, 20, 20))
        moved = capsules.poses.clone()
        moved[1, 0, 7] += 0.25
        torch.testing.assert_close(
            drawn[1, 7, -1], network.reconstruct(Capsules(moved, capsules.activations), labels)[1]
        )


def test_reconstructions(tmp_path, digits):
    report = run("reconstructions", tmp_path, digits, steps=30)
    assert report.numbers["images"] == 40
    wrong = [row for row in report.rows if row["kind"] == "wrong"]
    assert all(row["label"] != row["prediction"] for row in wrong)
    assert all(row["label"] == row["prediction"] for row in report.rows if row["kind"] == "right")
    assert len(wrong) == min(8, round(40 * (1 - report.numbers["accuracy"])))
    assert report.numbers["squared_error_of_mean_image"] == pytest.approx(_error_of_mean_image(report), rel=1e-3)


def _error_of_mean_image(report):
    images = torch.from_numpy(strokes(60)[0]).float()[:, None] / 255
    chosen = ImageSet((images * 255).byte(), torch.arange(60) % 10, DIGITS).split(40, 0)[0].images.float() / 255
    return (chosen - chosen.mean(0)).square().mean().item()


def test_segmentation(tmp_path, digits):
    report = run("segmentation", tmp_path, digits, images=30)
    numbers = report.numbers
    assert numbers["images"] == 30
    assert numbers["both_digits_accuracy"] <= numbers["digit_accuracy"] <= 1
    assert 0 <= numbers["overlap"] <= 1
    assert (tmp_path / "out" / "segmentation" / "segmentation.png").exists()


def test_pixels_of_rectangles_that_overlap():
    """Pixels that belong to both do not count; the second is drawn a column too short, where the first is brighter."""
    digits = torch.zeros(1, 2, 1, 6, 8)
    digits[0, 0, 0, 0:4, 0:5] = 1.0
    digits[0, 1, 0, 2:6, 3:8] = 1.0  # 4 pixels of both, 16 of each alone
    assert pixel_accuracy(0.9 * digits, digits) == 1.0
    drawn = 0.9 * digits
    drawn[0, 1, 0, :, 7] = 0.0
    drawn[0, 0, 0, :, 7] = 0.1
    assert pixel_accuracy(drawn, digits) == pytest.approx(28 / 32)


def test_affine(tmp_path, digits):
    report = run("affine", tmp_path, digits)
    assert report.numbers["test set"] == "an affNIST-like test set"
    assert "official files of affNIST are missing" in report.notes[0]
    capsnet, cnn = report.rows
    assert (capsnet["network"], cnn["network"]) == ("CapsNet", "CNN")
    assert (capsnet["paper_affnist_accuracy"], cnn["paper_affnist_accuracy"]) == (0.79, 0.66)
    assert cnn["held_out_accuracy"] >= capsnet["held_out_accuracy"] or cnn["steps"] == 8


def one(value, count=1):
    return torch.full((count,), float(value))


def test_affine_transformations_by_hand():
    picture = torch.zeros(1, 1, 4, 4)
    picture[0, 0, 0, 1] = 1.0
    padded = torch.nn.functional.pad(picture, (2,) * 4)
    same = affine(picture, one(0), one(0), one(1), one(1), 8)
    torch.testing.assert_close(same, padded)
    turned = affine(picture, one(torch.pi / 2), one(0), one(1), one(1), 8)  # clockwise
    torch.testing.assert_close(turned, padded.rot90(-1, (2, 3)), atol=1e-5, rtol=0)
    high = affine(torch.ones(1, 1, 4, 4), one(0), one(0), one(2), one(1), 8)
    assert (high[0, 0] > 0.5).sum(dim=0).tolist() == [0, 0, 8, 8, 8, 8, 0, 0]
    sheared = affine(torch.ones(1, 1, 4, 4), one(0), one(1), one(1), one(1), 8)  # the upper rows go to the right
    assert (sheared[0, 0, 2] > 0.5).nonzero().float().mean() > (sheared[0, 0, 5] > 0.5).nonzero().float().mean()


def test_an_affnist_like_set_keeps_all_ink():
    images, labels = strokes(20)
    data = ImageSet(torch.from_numpy(images)[:, None], torch.from_numpy(labels).long(), DIGITS)
    made = affnist_like(data, seed=3)
    assert made.images.shape == (20, 1, 40, 40)
    assert torch.equal(made.labels, data.labels)
    share = made.images.double().sum((1, 2, 3)) / data.images.double().sum((1, 2, 3))
    assert 0.6 < share.min() < share.max() < 1.5  # areas are scaled by 0.64 to 1.44
    assert torch.equal(made.images, affnist_like(data, seed=3).images)
    assert not torch.equal(made.images, affnist_like(data, seed=4).images)
    tops = {int((image[0].amax(1) > 25).nonzero()[0]) for image in made.images}
    assert len(tops) > 8  # at any position


def test_novel_viewpoints(tmp_path, toys):
    report = run("novel-viewpoints", tmp_path, toys, images=200, steps=3)
    assert [(row["views"], row["network"]) for row in report.rows] == [
        ("azimuth", "capsules"),
        ("azimuth", "CNN"),
        ("elevation", "capsules"),
        ("elevation", "CNN"),
    ]
    for capsules, cnn in (report.rows[:2], report.rows[2:]):
        stopped, other = (cnn, capsules) if cnn["steps"] < 12 else (capsules, cnn)
        assert stopped["held_out_error"] <= other["held_out_error"] + 1e-6 or stopped["steps"] in (3, 12)
    assert report.rows[0]["paper_novel_error"] == 0.135


@pytest.mark.parametrize(
    ("name", "settings"), [("capsules", FULL_CAPSULES), ("cnn", FULL_CNN)], ids=["capsules", "CNN"]
)
def test_full_training_for_novel_viewpoints_is_that_of_the_recipe(name, settings):
    recipe = Config(**read_config(RECIPES / f"smallnorb-novel-views-{name}.toml"))
    batches = (24_300 // 3 - recipe.validation) // recipe.batch_size
    assert recipe.epochs * batches == FULL_STEPS
    full = Config(**settings, data="smallnorb", novel="azimuth")
    assert replace(full, epochs=recipe.epochs, log_every=recipe.log_every) == recipe


def test_full_novel_viewpoints(tmp_path, toys):
    report = run("novel-viewpoints", tmp_path, toys, images=20, steps=1, quick=False)
    assert len(report.rows) == 4
    assert {row["steps"] for row in report.rows} == {1}


def test_routing_matters(tmp_path, toys):
    report = run("routing-matters", tmp_path, toys, images=30)
    assert [(row["trained_with"], row["tested_with"]) for row in report.rows] == [
        (trained, tested) for trained in (1, 2, 3) for tested in ("uniform", "1", "2", "3", "5")
    ]
    first = [row["accuracy"] for row in report.rows if row["trained_with"] == 1]
    assert first[0] == first[1]  # one iteration is uniform
    given = run("routing-matters", tmp_path, toys, images=30, pretrained="toynorb")
    assert {row["trained_with"] for row in given.rows} == {2}


def test_uniform_routing_has_the_last_temperature():
    layer = torch.nn.Sequential(ClassCaps(2, 3, routing=EMRouting(3, final_lambda=0.5)))
    before = layer[0].routing
    with with_routing(layer, "uniform"):
        assert layer[0].routing.iterations == 1
        assert layer[0].routing.lambdas[0] == pytest.approx(before.lambdas[2])
    with with_routing(layer, 5):
        assert layer[0].routing.iterations == 5
    assert layer[0].routing is before
    with pytest.raises(ConfigError, match="must have EM routing"), with_routing(torch.nn.Linear(2, 2), 1):
        pass


def capsules(images=2, types=3, side=2):
    torch.manual_seed(0)
    return Capsules(torch.randn(images, types, side, side, 4, 4), torch.rand(images, types, side, side))


def test_ablation(tmp_path, toys):
    report = run("ablation", tmp_path, toys, images=20, steps=1)
    by_name = {row["variant"]: row for row in report.rows}
    assert len(by_name) == 11
    assert by_name["3 iterations"]["paper_error"] == 0.018
    assert by_name["CNN"]["paper_error"] == 0.052
    small, full = by_name["3 iterations"]["parameters"], by_name["16-vectors, full matrices"]["parameters"]
    votes = 9 * 8 * 8 + 9 * 8 * 8 + 8 * 5  # matrices of the three routed layers
    assert full - small == votes * (256 - 16)
    assert by_name["mixing proportions as activations"]["parameters"] == small - 2 * (8 + 8 + 5)


def test_quick_ablation_leaves_out_what_is_slow(tmp_path):
    def names(**options):
        return set(_variants(lab(tmp_path, **options)))

    assert names() == names(quick=True, steps=5) == set(VARIANTS)
    assert set(VARIANTS) - names(quick=True) == {"vectors", "vectors-no-coordinates"}


def test_full_matrices_hold_those_of_4x4():
    """A 16x16 matrix that has W in its four diagonal blocks multiplies a pose as W does."""
    small, full = ClassCaps(3, 4, routing=EMRouting(3)), ClassCaps(3, 4, routing=FullMatrices(3))
    with torch.no_grad():
        full.weight.copy_(torch.einsum("ij,bckl->bcikjl", torch.eye(4), small.weight).reshape(3, 4, 16, 16))
    for expected, found in zip(small(capsules()), full(capsules()), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("iterations", [1, 3])
def test_mixing_proportions_are_shares(iterations):
    layer = ClassCaps(3, 4, routing=MixingProportions(iterations))
    activations = layer(capsules()).activations
    torch.testing.assert_close(activations.sum(1), torch.ones(2))
    last = inspect_capsules.iterations(layer, capsules())[-1]
    torch.testing.assert_close(activations, last.support / last.support.sum(1, keepdim=True), atol=1e-5, rtol=1e-4)
    if iterations == 1:
        torch.testing.assert_close(activations, torch.full((2, 4), 0.25))


def test_vote_histograms(tmp_path, toys):
    report = run("vote-histograms", tmp_path, toys, images=60)
    assert [(row["iteration"], row["class"]) for row in report.rows] == [
        (t, kind) for t in (1, 2) for kind in ("right class", "other classes")
    ]
    first = [row["support"] for row in report.rows if row["iteration"] == 1]
    assert first[0] == pytest.approx(first[1])  # uniform assignments
    assert {figure["file"].split("-")[0] for figure in report.figures} == {"votes"}


def test_weights_of_histograms_sum_to_the_support():
    layer = ClassCaps(3, 4, routing=EMRouting(2))
    steps = vote_distances(layer, capsules())
    for (distances, weights), iteration in zip(steps, inspect_capsules.iterations(layer, capsules()), strict=True):
        assert distances.shape == weights.shape == (2, 4, 2 * 2 * 3)
        torch.testing.assert_close(weights.sum(-1), iteration.support)
        # the mean square distance is the sum of the variances
        square = (weights * distances**2).sum(-1) / iteration.support
        torch.testing.assert_close(square, iteration.variance.sum((-1, -2)), atol=1e-3, rtol=1e-3)


def test_convergence(tmp_path, digits, toys):
    report = run("convergence", tmp_path, digits, images=4)
    assert {row["quantity"] for row in report.rows if row["network"].startswith("EM")} == {"assignments"}
    networks = [f"{kind} routing, {steps}" for kind in ("dynamic", "EM") for steps in ("1 step", "2 steps")]
    assert list(dict.fromkeys(row["network"] for row in report.rows)) == networks
    shares = [row["change"] for row in report.rows if row["quantity"] == "assignments"]
    assert 0 <= min(shares) <= max(shares) <= 1


@pytest.mark.parametrize("competition", ["global", "local"])
def test_changes_of_assignments(competition):
    """Against the assignments of layers with one iteration more."""
    given = capsules()
    layer = ClassCaps(3, 4, routing=EMRouting(2, competition=competition))
    changes = changes_of(layer, given, 3)["assignments"]
    assert (layer.routing.iterations, len(changes)) == (2, 3)
    assignments = []
    for iterations in (1, 2, 3):
        with with_routing(layer, iterations):
            assignments.append(layer.assignments(given))
    children = given.activations.numel()
    expected = [0.5 * (b - a).abs().sum().item() / children for a, b in pairwise(assignments)]
    assert changes[:2] == pytest.approx(expected, rel=1e-3)


def test_changes_of_logits():
    """The first parents are squashed means of the votes: the agreement with them is the first change."""
    torch.manual_seed(0)
    layer = VectorCaps(6, 3, 4, 5)
    poses = torch.randn(2, 6, 3)
    changes = changes_of(layer, Capsules(poses, poses.norm(dim=-1)), 2)
    votes = torch.einsum("nbd,bcde->nbce", poses, layer.weight.reshape(6, 4, 3, 5))
    total = votes.mean(1) * 6 / 4  # every child is assigned to each of 4 parents by a quarter
    length = total.norm(dim=-1, keepdim=True)
    parents = total * length / (1 + length**2)
    agreement = torch.einsum("nbce,nce->nbc", votes, parents)
    assert changes["logits"][0] == pytest.approx(agreement.abs().mean().item(), rel=1e-4)
    moved = 0.5 * (agreement.softmax(dim=-1) - 0.25).abs().sum(dim=-1).mean().item()
    assert changes["assignments"][0] == pytest.approx(moved, rel=1e-4)


def test_training_stops_at_an_accuracy(tmp_path, toys):
    """Training ends with the first evaluation that reaches it."""
    settings = {"data": "toynorb", "data_dir": str(toys), "model": "linear", "batch_size": 16, "jitter": "none"}
    settings |= {"steps": 40, "evaluate_every": 5, "limit": 200, "test_limit": 50}
    full = train(Config(**settings, out=str(tmp_path / "full")), quiet=True)
    curve = {row["step"]: row["accuracy"] for row in read_metrics(full.folder) if row["kind"] == "test"}
    target = max(curve.values())
    stopped = train(Config(**settings, stop_at=target, out=str(tmp_path / "stopped")), quiet=True)
    assert stopped.step == min(step for step, accuracy in curve.items() if accuracy >= target)
    assert (full.step, full.reason) == (40, "finished")
    assert stopped.reason == ("early stop" if stopped.step < 40 else "finished")
    with pytest.raises(ConfigError, match="--stop-at must be from 0 to 1, but it is 90"):
        Config(stop_at=90)


def test_command_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    def interrupted(self, name):
        def function(given):
            raise KeyboardInterrupt

        return function, "code"

    monkeypatch.setattr(experiments.Experiment, "function", interrupted)
    assert main(["experiment", "ablation", "--out", str(tmp_path)]) == 130
    assert "run the same command again to continue" in capsys.readouterr().err


def test_command_prints_json(tmp_path, toys, capsys):
    given = ["--quick", "--images", "20", "--data-dir", str(toys), "--out", str(tmp_path / "out"), "--json"]
    assert main(["experiment", "vote-histograms", *given]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "out" / "report.json").read_text())
    assert printed["options"]["images"] == 20
    assert printed["paper"] == "Hinton 2018, figure 2 and B.2"


def test_held_out_training_views_are_familiar(toys):
    """Without novel views, there is no accuracy on them."""
    data = toynorb.load_toynorb("test", toys)
    right = torch.ones(len(data), dtype=torch.bool)
    found = views(Evaluation(1.0, right, None), data, "azimuth")
    assert found == {"familiar": 1.0, "novel": 1.0}
    familiar = data.select(familiar_views(data, "azimuth"))
    assert views(Evaluation(1.0, right[: len(familiar)], None), familiar, "azimuth") == {"familiar": 1.0}


def test_toys_are_drawn_too(tmp_path, toys):
    """Without MNIST: one eye of ToyNORB, of which the network sees and draws the middle."""
    report = run("reconstructions", tmp_path, toys, data="toynorb", images=20)
    assert report.numbers["images"] == 20
    images = toynorb.load_toynorb("test", toys).split(20, 0)[0].images[:, :1, 8:40, 8:40].float() / 255
    expected = (images - images.mean(0)).square().mean().item()
    assert report.numbers["squared_error_of_mean_image"] == pytest.approx(expected, rel=1e-4)
