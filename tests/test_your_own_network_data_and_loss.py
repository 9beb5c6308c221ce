"""The user's own network, data and loss: as functions in Python, or by name on the command line."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import official_files as official
import pytest
import torch
from PIL import Image
from torch import nn

from tritoncaps import Capsules, SpreadLoss
from tritoncaps.cli import main
from tritoncaps.data import DATASETS, ImageSet
from tritoncaps.training import NETWORKS, Config, ConfigError, Task, load_checkpoint, load_network, pipeline_of, train
from tritoncaps.training.metrics import read_metrics

QUICK = {"model": "linear", "data": "smallnorb", "batch_size": 8, "steps": 2}
CLASSES = ("dark", "bright")

MODULE = """
import torch
from torch import nn
from tritoncaps.data import ImageSet, Pipeline

def build(task, iterations, backend):
    return nn.Sequential(nn.Flatten(), nn.Linear(task.channels * task.height * task.width, task.classes))

def load(split, folder):
    images = torch.arange(24 * 3 * 8 * 6).view(24, 3, 8, 6).remainder(256).byte()
    return ImageSet(images, torch.arange(24) % 2, ("dark", "bright")), Pipeline(crop=5)

def loss(outputs, labels):
    return nn.functional.cross_entropy(outputs, labels) * 2
"""


def build(task, iterations, backend):
    return nn.Sequential(nn.Flatten(), nn.Linear(task.channels * task.height * task.width, task.classes))


class Capsulate(nn.Module):
    """Scores as the activations of capsules."""

    def __init__(self, task, iterations, backend):
        super().__init__()
        self.scores = build(task, iterations, backend)

    def forward(self, images):
        activations = self.scores(images).sigmoid()
        return Capsules(activations[..., None, None].expand(-1, -1, 4, 4), activations)


def two_kinds(split, folder):
    """24 images, half of them bright."""
    labels = torch.arange(24) % 2
    images = (labels.view(-1, 1, 1, 1) * 200).expand(-1, 3, 8, 6).byte().clone()
    images[:, :, 0] = 50
    return ImageSet(images, labels, CLASSES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("data")
    official.write_smallnorb(place, count=40)
    return str(place)


@pytest.fixture
def config(tmp_path, folder):
    return Config(**QUICK, data_dir=folder, out=str(tmp_path / "run"))


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a module, as the current folder; its imports are removed at the end."""
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    forget()


def forget():
    """Remove the imported module, as in a new process."""
    sys.modules.pop("mine", None)
    for table in (NETWORKS, DATASETS):
        for name in [name for name in table if ":" in name]:
            del table[name]


def test_a_network_of_your_own(config):
    seen = []

    def recorded(task, iterations, backend):
        seen.append((task, iterations, backend))
        return build(task, iterations, backend)

    result = train(replace(config, iterations=2, backend="cpu"), network=recorded, quiet=True)
    assert seen == [(Task("smallnorb", 2, 32, 32, 5), 2, "cpu")]
    saved = load_checkpoint(result.folder / "last.pt")
    assert saved["config"].model.endswith("test_a_network_of_your_own.<locals>.recorded")
    built_in = train(replace(config, out=config.out + "2", iterations=2), quiet=True)
    expected = load_checkpoint(built_in.folder / "last.pt")["network"]  # the same network, by another name
    assert all(torch.equal(value, expected[key]) for key, value in saved["network"].items())
    assert train(replace(config, iterations=2, steps=3), network=recorded, resume=True, quiet=True).step == 3


def test_capsules_of_your_own_are_trained_by_the_spread_loss(config, monkeypatch):
    steps = []
    own = SpreadLoss.set_step
    monkeypatch.setattr(SpreadLoss, "set_step", lambda self, step: (steps.append(step), own(self, step)))
    train(config, network=Capsulate, quiet=True)
    assert steps == [0, 1]


def test_data_of_your_own(config):
    result = train(replace(config, steps=60), data=two_kinds, quiet=True)
    assert result.accuracy == 1
    network, trained = load_network(result.folder)
    images = pipeline_of(trained).test(two_kinds("test", None).images)[0]
    assert images.mean().abs() < 1e-5  # standardised
    assert network(images).argmax(dim=1).tolist() == [0, 1] * 12


def test_a_loss_of_your_own(config):
    calls = []

    class Twice(nn.Module):
        def forward(self, outputs, labels):
            return 2 * nn.functional.cross_entropy(outputs, labels)

        def set_step(self, step):
            calls.append(step)

    config = replace(config, steps=1)
    result = train(config, loss=Twice(), quiet=True)
    assert calls == [0]
    assert load_checkpoint(result.folder / "last.pt")["config"].loss.endswith("Twice")
    plain = train(replace(config, out=config.out + "2"), quiet=True)
    assert read_metrics(result.folder)[0]["loss"] == pytest.approx(2 * read_metrics(plain.folder)[0]["loss"])
    with pytest.raises(ConfigError, match=r"the run needs the loss .*Twice.* in Python with loss="):
        train(replace(load_checkpoint(result.folder / "last.pt")["config"], steps=2), resume=True, quiet=True)


def test_entries_may_be_added_to_the_tables(config, monkeypatch):
    monkeypatch.setitem(NETWORKS, "mine", NETWORKS["linear"])
    assert train(replace(config, model="mine"), quiet=True).step == 2


def images(**changes):
    data = two_kinds("train", None)
    return lambda split, folder: replace(data, **changes)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"network": lambda task: build(task, 3, None)},
            r"must be a function of a Task, .*, but its signature is \(task\)",
        ),
        ({"network": 3}, "must be a function of a Task, the routing iterations, a backend, but it is a int"),
        ({"network": lambda *_: 3}, "must return an nn.Module, but it returned a int"),
        ({"network": lambda *_: nn.Flatten()}, r"must return scores of shape \[2, 5\] .* but it returns \[2, 2048\]"),
        (
            {"data": lambda split: 1},
            r"must be a function of 'train' or 'test', a folder, but its signature is \(split\)",
        ),
        (
            {"data": lambda *_: [1]},
            "must return an ImageSet, or an ImageSet and a Pipeline, but for 'test' it returned a l",
        ),
        (
            {"data": images(images=torch.zeros(24, 3, 8, 6))},
            r"images must be uint8 of shape .* are torch.float32 \[24, ",
        ),
        ({"data": images(labels=torch.zeros(24))}, r"labels must be int64 of shape \[24\], .* torch.float32 \[24\]"),
        (
            {"data": images(labels=torch.full((24,), 2))},
            "from 0 to 1, the classes dark, bright, but they are from 2 to 2",
        ),
        (
            {"data": lambda split, _: replace(two_kinds(split, _), classes=("a", "b") if split == "test" else CLASSES)},
            "training images of 3x8x6 in the classes dark, bright do not match test images of 3x8x6 in .* a, b",
        ),
        ({"loss": lambda outputs: 0}, r"must be a function of the network's outputs, labels, but its signature"),
        ({"loss": lambda outputs, labels: outputs}, r"--loss must return a tensor with one number, .* shape \[2, 5\]"),
        ({"loss": lambda outputs, labels: 0.0}, "--loss must return a tensor with one number, .* returns a float"),
        ({"loss": nn.Linear(5, 1)}, "--loss must have no parameters"),
    ],
)
def test_functions_that_do_not_fit_get_a_sentence(config, tmp_path, arguments, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        train(config, quiet=True, **arguments)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_names_on_the_command_line(place, folder, capsys):
    """The run records the names, but a command that uses the run must get them again: a folder causes no imports."""
    own = ["--model", "mine:build", "--data", "mine:load", "--loss", "mine:loss"]
    assert main(["train", *own, "--batch-size", "4", "--steps", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["folder"] == "runs/load-build"
    saved = (place / "runs" / "load-build" / "config.toml").read_text()
    assert all(f'{name} = "mine:{function}"' in saved for name, function in (("model", "build"), ("data", "load")))
    Image.new("RGB", (6, 8)).save(place / "picture.png")

    resume = ["train", "--resume", "runs/load-build", "--steps", "3", "--json"]
    copy = ["train", "--config", "runs/load-build/config.toml", "--steps", "1", "--json"]
    evaluation = ["evaluate", "runs/load-build", "--json"]
    prediction = ["predict", "--run", "runs/load-build", "picture.png"]
    for command, flags, missing in (
        (resume, own, "--loss mine:loss"),
        (resume, [*own[:2], *own[4:]], "--data mine:load"),
        (resume, own[2:], "--model mine:build"),
        (copy, own[2:], "--model mine:build"),
        (evaluation, [], "--model mine:build"),
        (evaluation, own[:2], "--data mine:load"),
        (prediction, [], "--model mine:build"),
    ):
        given = flags[:4] if missing.startswith("--loss") else flags
        forget()
        assert main([*command, *given]) == 1
        error = capsys.readouterr().err
        assert f"pass it with {missing}" in error
        assert error.count("\n") == 1
        assert given or "mine" not in sys.modules
    forget()
    assert main([*resume, *own]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 3
    forget()
    assert main([*evaluation, *own[:4]]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 24
    forget()
    assert main([*prediction, *own[:2]]) == 0  # the run has saved the description of the images, so it needs no data
    assert "dark" in capsys.readouterr().out
    forget()
    assert main(["info", "--run", "runs/load-build", *own[:2], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 3 * 5 * 5 * 2 + 2


def test_the_installed_command_imports_from_the_current_folder(place, folder):
    """Unlike `python -m`, it does not have this folder in its path."""
    code = "import sys; sys.path = [p for p in sys.path if p]; from tritoncaps.cli import main; sys.exit(main())"
    command = [sys.executable, "-P"] if sys.version_info >= (3, 11) else [sys.executable]
    arguments = ["info", "--model", "mine:build", "--data", "mnist", "--json"]
    done = subprocess.run([*command, "-c", code, *arguments], cwd=place, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["parameters"] == 7850


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nowhere:build", "there is no module nowhere, neither in .* nor on Python's path"),
        ("mine:nothing", "mine has no nothing"),
        ("mine:", "must be a known name or package.module:function, but it is 'mine:'"),
        ("mine.py:build", "there is no module mine.py, neither"),
        ("broken:build", "broken fails with ZeroDivisionError: division by zero"),
        ("needy:build", "needy needs the module absent_package, not found"),
        ("mine:CLASSES", "mine has no CLASSES"),
    ],
)
def test_names_that_lead_nowhere_get_a_sentence(place, capsys, name, sentence):
    (place / "broken.py").write_text("1 / 0")
    (place / "needy.py").write_text("import absent_package")
    assert main(["train", "--model", name]) == 1
    error = capsys.readouterr().err
    assert re.search(f"tritoncaps train: --model .*{sentence}", error), error
    assert error.count("\n") == 1
    assert not (place / "runs").exists()


def test_public_names():
    from tritoncaps import training

    assert {"load_network", "pipeline_of", "Network", "Task", "NETWORKS"} <= set(training.__all__)
    assert pipeline_of(Config()) == DATASETS["toynorb"].pipeline
