"""Weights in the package: they are small, intact, documented with their accuracy, and usable without other files."""

import hashlib
import io
import json

import numpy as np
import official_files as official
import pytest
import torch
from PIL import Image

from tritoncaps import EMRouting
from tritoncaps.cli import main
from tritoncaps.data import DATASETS, toynorb
from tritoncaps.models import EfficientCapsNet, MatrixCapsNet, pretrained
from tritoncaps.training import Config, load_checkpoint, train
from tritoncaps.training.saved import load_pretrained_network
from tritoncaps.training.ship import ship
from tritoncaps.training.task import pipeline_of

SHIPPED = dict(pretrained.CHECKSUMS)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Weights of an untrained network, as the pretrained network "mine"."""
    torch.manual_seed(0)
    routing = EMRouting(2, 0.5, competition="local")
    network = MatrixCapsNet.small(1, 10, routing=routing)
    config = Config(data="mnist", iterations=2, competition="local", final_lambda=0.5)
    settings = {item: getattr(config, item) for item in config.__dataclass_fields__}
    content = pretrained.encode(pretrained.Pretrained(settings, {"test_accuracy": 0.1}, network.state_dict()))
    (tmp_path / "mine.pt").write_bytes(content)
    monkeypatch.setattr(pretrained, "FOLDER", tmp_path)
    monkeypatch.setitem(pretrained.CHECKSUMS, "mine", hashlib.sha256(content).hexdigest())
    return network


def test_a_model_with_its_weights(own):
    network = MatrixCapsNet.small(1, 10, pretrained="mine")
    assert network.conv_caps1.routing == EMRouting(2, 0.5, competition="local")
    images = torch.randn(2, 1, 28, 28)
    assert torch.equal(network(images).activations, own(images).activations)
    assert MatrixCapsNet.small(1, 10, 3, pretrained="mine").class_caps.routing.iterations == 3
    assert MatrixCapsNet.small(1, 10).class_caps.routing.iterations == 3


def test_what_does_not_fit_gets_a_sentence(own):
    with pytest.raises(
        ValueError, match="in_channels and num_classes must be 1 and 10 for pretrained 'mine', but they"
    ):
        MatrixCapsNet.small(2, 5, pretrained="mine")
    with pytest.raises(ValueError, match=r"pretrained must be one of .*mine, but it is 'yours'"):
        MatrixCapsNet.small(2, 5, pretrained="yours")


def test_efficient_capsnet_with_its_weights():
    network = EfficientCapsNet(2, 5, 40, pretrained="smallnorb-efficient").eval()
    trained, config, _ = load_pretrained_network("smallnorb-efficient")
    (images,) = pipeline_of(config).test(torch.randint(0, 256, (2, 2, 48, 48), dtype=torch.uint8))
    assert torch.equal(network(images).activations, trained(images).activations)
    with pytest.raises(
        ValueError, match=r"must be \(2, 5, 40\) for pretrained 'smallnorb-efficient', but they are \(1"
    ):
        EfficientCapsNet(1, 5, 40, pretrained="smallnorb-efficient")
    with pytest.raises(ValueError, match="must be weights of efficient-capsnet, but 'mnist' are weights of matrix"):
        EfficientCapsNet(1, 10, 28, pretrained="mnist")
    with pytest.raises(ValueError, match="must be weights of matrix-capsnet-small, but 'smallnorb-efficient' are"):
        MatrixCapsNet.small(2, 5, pretrained="smallnorb-efficient")


def test_damaged_weights_are_not_read(own):
    path = pretrained.FOLDER / "mine.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(RuntimeError, match=r"mine\.pt is damaged"):
        pretrained.load_pretrained("mine")
    path.unlink()
    with pytest.raises(RuntimeError, match=r"mine\.pt cannot be read"):
        pretrained.load_pretrained("mine")


def test_predict_and_evaluate(own, tmp_path, capsys):
    digit = tmp_path / "digit.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (28, 28), dtype=np.uint8)).save(digit)
    assert main(["predict", "--pretrained", "mine", str(digit), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    with torch.no_grad():
        (seen,) = DATASETS["mnist"].pipeline.test(torch.from_numpy(np.array(Image.open(digit)))[None, None])
        expected = own(seen).activations[0]
    assert list(found["scores"].values()) == pytest.approx(expected.tolist(), abs=1e-4)
    assert main(["evaluate", "--pretrained", "mine", "--data-dir", str(tmp_path / "none")]) == 1
    assert "mnist" in capsys.readouterr().err  # the network exists, the data do not
    for arguments in (["predict", str(digit)], ["evaluate"], ["evaluate", "run", "--pretrained", "mine"]):
        with pytest.raises(SystemExit):
            main(arguments)
        capsys.readouterr()


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_weights_are_small_and_say_what_they_are(name):
    assert (pretrained.FOLDER / f"{name}.pt").stat().st_size < 1_000_000
    network, config, card = load_pretrained_network(name)
    assert card["parameters"] == sum(p.numel() for p in network.parameters())
    assert 0.5 < card["test_accuracy"] < 1
    assert card["images_seen"] > 0
    assert card["about"]
    assert (config.data_dir, config.out) == (None, None)  # no paths of the machine that trained it


@pytest.mark.skipif("toynorb" not in SHIPPED, reason="no weights for ToyNORB")
def test_toynorb_weights_know_new_toys():
    network, config, card = load_pretrained_network("toynorb")
    toys = [toynorb.render_toy(0, category, 1)[::9] for category in range(5)]
    labels = torch.arange(5).repeat_interleave(len(toys[0]))
    with torch.no_grad():
        (seen,) = pipeline_of(config).test(torch.from_numpy(np.concatenate(toys)))
        right = (network(seen).activations.argmax(dim=1) == labels).float().mean().item()
    assert right > card["test_accuracy"] - 0.2  # five toys of twenty-five


def test_weights_are_made_of_a_run(tmp_path, monkeypatch):
    official.write_smallnorb(tmp_path / "data", count=10)
    monkeypatch.setenv("TRITONCAPS_DATA", str(tmp_path / "data"))
    settings = {"data": "smallnorb", "model": "tiny-capsnet", "batch_size": 4, "steps": 2, "ema": 0.5, "test_limit": 3}
    run = train(Config(**settings, out=str(tmp_path / "run"), data_dir=str(tmp_path / "data")), quiet=True).folder
    made = ship(run, "noise")
    assert made.card["about"] == "noise"
    assert made.card["images_seen"] == 8
    assert made.card["test_accuracy"] * 10 == pytest.approx(round(made.card["test_accuracy"] * 10))  # of all ten images
    assert (made.settings["out"], made.settings["data_dir"], made.settings["ema"]) == (None, None, 0.5)
    average = load_checkpoint(run / "last.pt")["average"]
    assert torch.equal(made.weights["conv.weight"], average["module.conv.weight"])
    content = torch.load(io.BytesIO(pretrained.encode(made)), weights_only=True)
    assert torch.equal(content["weights"]["conv.weight"], made.weights["conv.weight"])
