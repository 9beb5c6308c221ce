"""Settings of a run: each one has its effect, or gets an error of one sentence."""

import json
import math
from dataclasses import fields
from pathlib import Path

import official_files as official
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tritoncaps import EMRouting, TemperedEMRouting, VBRouting
from tritoncaps.data import DATASETS, ImageSet, load
from tritoncaps.data.pipeline import JITTERS, Pipeline
from tritoncaps.models import CapsNet
from tritoncaps.training import NETWORKS, Config, ConfigError, build, evaluate, load_checkpoint, own, read_config, train
from tritoncaps.training.distributed import World
from tritoncaps.training.loop import Trainer, _Average
from tritoncaps.training.metrics import read_metrics
from tritoncaps.training.networks import Task
from tritoncaps.training.objective import Objective, correct
from tritoncaps.training.saved import load_network, task_by_name
from tritoncaps.training.task import build_network, load_splits, loss_of, pipeline_of

RECIPES = Path(__file__).parent.parent / "docs" / "recipes"
TINY = {"model": "linear", "data": "smallnorb", "batch_size": 8, "log_every": 1, "steps": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("data")
    official.write_smallnorb(place, count=54)
    official.write_mnist(place)
    return str(place)


@pytest.fixture
def run(tmp_path, folder):
    def start(**settings):
        out = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        return train(Config(**{**TINY, "data_dir": folder, "out": str(out), **settings}), quiet=True)

    return start


def weights(result, name="last.pt"):
    return load_checkpoint(result.folder / name)["network"]


def same(a, b, **tolerance):
    return all(torch.allclose(a[key], b[key], **tolerance) for key in a)


def test_same_seed_same_network(run):
    first, second, other = run(seed=3), run(seed=3), run(seed=4)
    assert same(weights(first), weights(second), rtol=0, atol=0)
    assert not same(weights(first), weights(other))


def test_ema_averages_the_statistics_of_batch_normalisation():
    """The statistics of the current network do not belong to the averaged weights."""
    norm = nn.BatchNorm1d(1)
    average = _Average(norm, decay=0.75)
    for mean, expected in ((1.0, 1.0), (5.0, 2.0), (2.0, 2.0)):  # the first one is copied
        norm.running_mean.fill_(mean)
        norm.num_batches_tracked.add_(1)
        average.update_parameters(norm)
        assert average.module.running_mean.item() == expected
    assert average.module.num_batches_tracked.item() == 3


def test_accumulation_changes_nothing_but_rounding(run):
    assert same(weights(run()), weights(run(accumulate=4)), rtol=1e-4, atol=1e-6)


def test_ema_is_what_is_kept(run):
    result = run(ema=0.5)
    saved = load_checkpoint(result.folder / "last.pt")
    average = saved["average"]["module.1.weight"]
    assert not torch.equal(average, saved["network"]["1.weight"])
    network, _ = load_network(result.folder / "last.pt")
    assert torch.equal(network[1].weight, average)
    network, _ = load_network(result.folder / "last.pt", averaged=False)
    assert torch.equal(network[1].weight, saved["network"]["1.weight"])


def test_schedules(run):
    def rates_of(schedule):
        result = run(lr_schedule=schedule, lr_decay_steps=2, lr_tail=0.5)
        return [row["lr"] for row in read_metrics(result.folder) if "lr" in row]

    rates = {schedule: rates_of(schedule) for schedule in ("exponential", "cosine", "tail")}
    assert rates["exponential"] == pytest.approx([3e-3 * 0.96 ** (step / 2) for step in (1, 2, 3, 4)])
    assert rates["cosine"][-1] == pytest.approx(0)
    assert sorted(rates["cosine"], reverse=True) == rates["cosine"]
    assert rates["tail"] == pytest.approx([3e-3, 3e-3, 1.5e-3, 0])  # constant, then a cosine


def test_early_stop(run):
    result = run(steps=100, patience=2, evaluate_every=1, lr=0.0, weight_decay=0.0)
    assert result.reason == "early stop"
    assert result.step == 3  # nothing gets better after the first


def test_the_best_network_is_chosen_on_held_out_images(run, folder):
    result = run(validation=10, evaluate_every=2)
    kinds = [row["kind"] for row in read_metrics(result.folder) if row["kind"] != "train"]
    assert kinds == ["validation", "validation", "test"]  # the last is that of the best network
    config = Config(**TINY, data_dir=folder, validation=10)
    splits = load_splits(config)
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (44, 10, 54)
    assert load_checkpoint(result.folder / "best.pt")["accuracy"] == result.best_accuracy
    assert (result.evaluated_on, result.test_accuracy) == ("validation", read_metrics(result.folder)[-1]["accuracy"])
    best, _ = load_network(result.folder / "best.pt")
    tested = evaluate(best, splits.test, pipeline_of(config), World(0, 1, torch.device("cpu")))
    assert result.test_accuracy == tested.accuracy


def test_toys_are_held_out_with_all_their_images():
    """One instance of each class; the others stay for training, and no toy is on both sides."""
    labels, instances = torch.cartesian_prod(torch.arange(5), torch.tensor([4, 6, 7, 8, 9]).repeat(3)).T
    toys = ImageSet(torch.zeros(75, 2, 48, 48, dtype=torch.uint8), labels, tuple("abcde"), {"instance": instances})
    held_out, others = toys.split_instances(1, seed=0)
    assert (len(held_out), len(others)) == (15, 60)
    of = [set(zip(part.labels.tolist(), part.factors["instance"].tolist(), strict=True)) for part in (held_out, others)]
    assert not of[0] & of[1]
    assert sorted(label for label, _ in of[0]) == [0, 1, 2, 3, 4]
    chosen = [toys.split_instances(1, seed=seed)[0].factors["instance"].tolist() for seed in range(4)]
    assert chosen[0] == toys.split_instances(1, seed=0)[0].factors["instance"].tolist()
    assert any(other != chosen[0] for other in chosen[1:])
    with pytest.raises(ValueError, match="count must be below the 5 instances of a, but it is 5"):
        toys.split_instances(5, seed=0)


def test_the_best_network_is_chosen_on_held_out_toys(run, folder):
    splits = load_splits(Config(**TINY, data_dir=folder, validation_instances=1))
    assert len(splits.train) + len(splits.validation) == 54
    assert len(splits.validation) > 0
    rows = read_metrics(run(validation_instances=1, evaluate_every=2).folder)
    assert [row["kind"] for row in rows if row["kind"] != "train"] == ["validation", "validation", "test"]
    result = run(validation_instances=1, final_test=False)
    assert {row["kind"] for row in read_metrics(result.folder)} == {"train", "validation"}
    assert math.isnan(result.test_accuracy)


def test_jitter_is_what_the_settings_say():
    def jitter(**settings):
        return pipeline_of(Config(**settings)).jitter

    assert jitter(data="smallnorb") == JITTERS["last"]
    assert jitter(data="smallnorb", jitter="first") == JITTERS["first"]
    assert jitter(data="smallnorb", jitter="none") is None
    assert jitter(data="mnist") is None
    assert jitter(data="mnist", jitter="last") == JITTERS["last"]
    assert jitter(data="smallnorb", standardise="none") == JITTERS["first"]  # pixels of 0 to 1
    pipeline = pipeline_of(Config(rotation=5, scaling=0.1, affine=0.2, edge_padding=3, standardise_channels=True))
    assert (pipeline.rotation, pipeline.scaling, pipeline.affine, pipeline.per_channel) == (5.0, 0.1, 0.2, True)
    assert (pipeline.pad, pipeline.edges) == (3, "repeat")


def test_images_are_shifted_as_far_as_the_settings_say():
    assert [pipeline_of(Config(data="mnist", shift=shift)).pad for shift in (None, 0, 5)] == [2, 0, 5]
    with pytest.raises(ConfigError, match="--shift and --edge-padding cannot both be given"):
        Config(data="mnist", shift=1, edge_padding=1)


def test_crops_have_the_size_of_the_settings():
    assert pipeline_of(Config(data="smallnorb")).crop == 32
    assert pipeline_of(Config(data="smallnorb", crop=40)).size(48, 48) == (40, 40)
    assert pipeline_of(Config(data="smallnorb", crop=56, edge_padding=4)).crop == 56
    with pytest.raises(ConfigError, match="--crop must be at most 48, the size of the padded images, but it is 49"):
        pipeline_of(Config(data="smallnorb", crop=49))


def test_the_pipeline_of_a_data_set_remains_where_the_settings_are_silent(monkeypatch):
    own = Pipeline(crop=32, rotation=7.0, scaling=0.2, affine=0.3, standardise="crop", per_channel=True)
    monkeypatch.setitem(DATASETS, "toynorb", DATASETS["toynorb"]._replace(pipeline=own))
    pipeline = pipeline_of(Config(data="toynorb"))
    assert (pipeline.rotation, pipeline.scaling, pipeline.affine, pipeline.per_channel) == (7.0, 0.2, 0.3, True)
    assert pipeline_of(Config(data="toynorb", rotation=3.0)).rotation == 3.0


def test_mixup_changes_training_alone(run):
    mixed, again, plain = run(mixup=0.2), run(mixup=0.2), run()
    assert same(weights(mixed), weights(again), rtol=0, atol=0)
    assert not same(weights(mixed), weights(plain))


def test_routing_competition_and_lambda_reach_the_layers():
    config = Config(competition="local", final_lambda=0.5, iterations=2)
    network = build_network(config, task_by_name(config))
    assert network.conv_caps1.routing == EMRouting(2, 0.5, competition="local")
    config = Config(routing="vb", competition="local", iterations=2, model="tiny-capsnet")
    assert build_network(config, task_by_name(config)).class_caps.routing == VBRouting(2, competition="local")
    config = Config(routing="tempered", competition="local", final_lambda=0.5, iterations=2)
    routing = build_network(config, task_by_name(config)).conv_caps2.routing
    assert routing == TemperedEMRouting(2, 0.5, competition="local")
    config = Config(competition="positions", iterations=2)
    network = build_network(config, task_by_name(config))
    assert network.conv_caps2.routing == EMRouting(2, competition="positions")
    assert network.class_caps.routing == EMRouting(2, competition="local")  # classes always compete


def test_novel_views(run, folder):
    config = Config(**TINY, data_dir=folder, novel="azimuth")
    splits = load_splits(config)
    assert set(splits.train.factors["azimuth"].tolist()) == {30, 32, 34, 0, 2, 4}
    assert len(splits.test) == 54
    last = read_metrics(run(novel="azimuth").folder)[-1]
    assert last["accuracy"] == pytest.approx((last["familiar"] + 2 * last["novel"]) / 3)


def test_mono_and_limits(folder):
    splits = load_splits(Config(**TINY, data_dir=folder, mono=True, limit=20, test_limit=5))
    assert (len(splits.train), len(splits.test), splits.train.shape[0]) == (20, 5, 1)


def test_amp_and_compile(run, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: calls.append(type(self).__name__))
    result = run(amp="bfloat16", compile=True)
    assert calls == ["Sequential"]
    assert not same(weights(result), weights(run()), rtol=0, atol=0)


def test_loading_processes_change_nothing(run):
    assert same(weights(run(workers=1)), weights(run()), rtol=0, atol=0)


@pytest.mark.parametrize("crops", [1, 13])
def test_crops(run, crops):
    assert 0 <= run(crops=crops, steps=1).accuracy <= 1


def test_a_network_learns(run):
    """The metrics and the result show it."""
    result = run(steps=60, jitter="none")
    rows = read_metrics(result.folder)
    assert rows[-2]["kind"] == "train"
    assert rows[-2]["loss"] < 0.5 * rows[0]["loss"]
    assert result.accuracy == rows[-1]["accuracy"] > 0.9


def test_every_network_takes_a_step_on_the_data_it_is_for():
    tasks = {"cnn-mnist": "mnist", "cnn-multimnist": "multimnist", "capsnet": "svhn"}
    for name, entry in NETWORKS.items():
        if name in ("cnn-mnist", "cnn-multimnist") or ":" in name:
            continue  # millions of parameters, tests of the models build them; or another test's own network
        data = tasks.get(name, "smallnorb")
        config = Config(model=name, data=data)
        channels, height, width = DATASETS[data].shape
        size = pipeline_of(config).size(height, width)
        network = build(name, Task(data, channels, *size, len(DATASETS[data].classes)), iterations=2)
        objective = Objective(network, loss_of(config), "linear", 10, 0.0005)
        loss, scores = objective(torch.rand(2, channels, *size), torch.tensor([0, 1]))
        loss.backward()
        assert loss.isfinite(), name
        assert scores.shape == (2, len(DATASETS[data].classes))
        assert entry.loss == loss_of(config)


def test_capsnet_draws_each_digit_of_multimnist(folder):
    pairs = load("multimnist", "train", folder)
    images, labels, digits = pairs.__getitems__([0, 5, 9])
    network = CapsNet(1, 10, 36, 2, channels=4, primary_caps=1)
    objective = Objective(network, "margin", "linear", 10, 0.0005)
    loss, scores = objective(images.float() / 255, labels, digits.float() / 255)
    capsules = network(images.float() / 255)
    drawn = network.reconstruct(capsules, labels.nonzero()[:, 1].view(3, 2))
    expected = objective.loss(capsules, labels) + 0.0005 * (drawn - digits.float() / 255).square().sum() / 3
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert scores.shape == (3, 10)


def test_two_classes_are_right_only_together():
    scores = torch.tensor([[0.9, 0.8, 0.1], [0.9, 0.1, 0.8]])
    assert correct(scores, torch.tensor([[1, 1, 0], [1, 1, 0]])).tolist() == [True, False]
    assert correct(scores, torch.tensor([0, 2])).tolist() == [True, False]


def test_configuration_files(tmp_path, run):
    result = run(lr=1e-4, mono=True)
    saved = read_config(result.folder / "config.toml")
    assert Config(**saved) == load_checkpoint(result.folder / "last.pt")["config"]
    (tmp_path / "own.toml").write_text('batch-size = 16\nmodel = "capsnet"\n')
    assert read_config(tmp_path / "own.toml") == {"batch_size": 16, "model": "capsnet"}
    pytest.importorskip("yaml")
    (tmp_path / "own.yaml").write_text("batch_size: 16\n")
    assert read_config(tmp_path / "own.yaml") == {"batch_size": 16}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"data": "imagenet"}, "--data must be one of toynorb, .*, but it is 'imagenet'"),
        ({"batch_size": 0}, "--batch-size must be at least 1, but it is 0"),
        ({"lr": "fast"}, "--lr must be of type float, but it is 'fast'"),
        ({"epochs": 1.5}, "--epochs must be of type int, but it is 1.5"),
        ({"lr": -1}, "--lr must be at least 0, but it is -1"),
        ({"ema": 1.0}, "--ema must be at least 0 and below 1"),
        ({"batch_size": 100}, "--batch-size must be at most 54, the training images, not 100"),
        ({"accumulate": 3}, "--batch-size must be a multiple of 3"),
        ({"device": "abacus"}, "--device must be auto, cpu, cuda"),
        ({"device": "cuda:99"}, "--device cuda:99 does not exist"),
        ({"validation": 54}, "--validation must be below 54"),
        ({"validation": 5, "validation_instances": 1}, "--validation and --validation-instances cannot both be given"),
        ({"final_test": False}, "--no-final-test needs held-out images"),
        ({"validation_instances": 99}, "--validation-instances: count must be below the .* instances of animal"),
        ({"validation_instances": 1, "data": "mnist"}, "--validation-instances needs data with instances"),
        ({"jitter": "last", "standardise": "none"}, "--jitter last is for standardised images"),
        ({"scaling": 1.0}, "--scaling must be at least 0 and below 1, but it is 1.0"),
        ({"affine": 0.5}, "--affine must be at least 0 and below 0.5, but it is 0.5"),
        ({"lr_tail": 0.0}, "--lr-tail must be above 0 and at most 1, but it is 0.0"),
        ({"competition": "local"}, "--competition is for networks of matrix capsules, which linear is not"),
        (
            {"final_lambda": 1.0, "routing": "vb", "model": "tiny-capsnet"},
            "--final-lambda is for --routing em and tempered",
        ),
        ({"capsule_dropout": 1.0}, "--capsule-dropout must be at least 0 and below 1, but it is 1.0"),
        ({"final_lambda": 0.0}, "--final-lambda must be above 0, but it is 0.0"),
        ({"novel": "azimuth", "data": "mnist"}, "--novel azimuth needs data with views"),
        ({"loss": "spread"}, "--loss spread is for capsules"),
        ({"data": "multimnist", "model": "matrix-capsnet"}, "--loss spread needs one class in each image"),
        ({"model": "capsnet", "standardise": "crop"}, "--model capsnet reconstructs pixels in"),
        ({"amp": "float16", "device": "cpu"}, "--amp float16 needs a GPU"),
    ],
)
def test_bad_settings_get_a_sentence(run, settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        run(**settings)


def test_bad_configuration_files_get_a_sentence(tmp_path):
    for content, sentence in (("lr = ", "is not TOML"), ("speed = 3", "no setting called 'speed'")):
        (tmp_path / "bad.toml").write_text(content)
        with pytest.raises(ConfigError, match=sentence):
            read_config(tmp_path / "bad.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "none.toml")


def test_every_setting_explains_itself():
    for item in fields(Config):
        assert item.metadata["help"], item.name


def test_metrics_are_json_lines(run):
    lines = (run().folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["kind"] for row in rows] == ["train"] * 4 + ["test"]
    assert {"step", "loss", "accuracy", "epoch", "lr", "images_per_second", "seconds"} <= rows[0].keys()


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_recipes_can_be_used(recipe):
    config = Config(**read_config(recipe))
    assert loss_of(config)
    assert pipeline_of(config)


def test_a_checkpoint_describes_data_of_ones_own(monkeypatch):
    """With the jitter of their pipeline, which is nested."""
    pipeline = Pipeline(crop=8, jitter=JITTERS["last"], standardise="image")
    monkeypatch.setitem(DATASETS, "mine:load", DATASETS["mnist"]._replace(pipeline=pipeline))
    description = own.describe("mine:load")
    monkeypatch.delitem(DATASETS, "mine:load")
    own.add_described("mine:load", description)
    assert DATASETS["mine:load"].pipeline == pipeline


def test_graphs(run, elsewhere, monkeypatch):
    """The mode of torch.compile that replays CUDA graphs; without a GPU, a sentence."""
    modes = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, mode=None: modes.append(mode))
    with pytest.raises(ConfigError, match=r"^--graphs needs a GPU"):
        run(graphs=True)
    begun = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(True))
    trainer = elsewhere(graphs=True)
    trainer._step(next(trainer._batches()))
    assert modes == ["reduce-overhead"]
    assert begun == [True]


@pytest.fixture
def elsewhere(tmp_path, folder):
    """A run on a device without numbers: what waits for one raises."""

    def start(**settings):
        settings = {**TINY, "data_dir": folder, "out": str(tmp_path / "meta"), **settings}
        (tmp_path / "meta").mkdir()
        return Trainer(Config(**settings), World(0, 1, torch.device("meta")), None, quiet=True)

    return start


@pytest.mark.parametrize("settings", [{}, {"model": "matrix-capsnet-small", "backend": "reference", "iterations": 1}])
def test_a_step_waits_for_no_copy(elsewhere, monkeypatch, settings):
    """Numbers of the host reach the device by copies without waiting, and by none that torch hides."""
    trainer = elsewhere(**settings)
    parts = next(trainer._batches())
    trainer._step(parts)  # tables of maps are made and copied at the first step

    def refuse(*args, **kwargs):
        raise AssertionError("a step copies numbers of the host to the device, and waits")

    monkeypatch.setattr(torch, "tensor", refuse)
    monkeypatch.setattr(torch.Tensor, "new_tensor", refuse)
    with Transfers() as transfers:
        trainer._step(parts)
    assert transfers.waits == [False] * 3  # random numbers, images, labels


class Transfers(TorchDispatchMode):
    """Copies from the host to another device, and whether the host waits for them."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = function.overloadpacket
        if name == torch.ops.aten._to_copy and args[0].device.type == "cpu" and result.device.type != "cpu":
            self.waits.append(not kwargs.get("non_blocking"))
        if name == torch.ops.aten.copy_ and args[1].device.type == "cpu" and args[0].device.type != "cpu":
            self.waits.append(len(args) < 3 or not args[2])
        return result
