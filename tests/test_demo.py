"""`make demo` from start to end, on images of noise, for a few seconds."""

from pathlib import Path

import numpy as np
from PIL import Image

from tritoncaps import demo
from tritoncaps.data import toynorb
from tritoncaps.training import Config, pictures, read_config
from tritoncaps.training.metrics import read_metrics


def measured(run):
    return [row for row in read_metrics(run) if row["kind"] == "test"]


def test_demo(tmp_path, monkeypatch, capsys):
    noise = np.random.default_rng(0).integers(0, 256, (2700, 2, 48, 48), dtype=np.uint8)
    monkeypatch.setattr(toynorb, "ELEVATIONS", 1)
    monkeypatch.setattr(toynorb, "_cached", lambda path: noise)
    monkeypatch.setattr(demo, "LEAST_IMAGES", 40)
    monkeypatch.setattr(demo, "CONFIG", demo.replace(demo.CONFIG, test_limit=60, batch_size=8))
    monkeypatch.setattr(demo, "linear_accuracy", lambda toys, tests: 0.5)
    drawn = []

    def report(out, title, samples, predictions, curve, *others):
        drawn.append({"curve": curve})
        pictures.report(out, title, samples, predictions, curve, *others)

    monkeypatch.setattr(demo, "report", report)
    accuracy = demo.main(0, tmp_path)
    out = capsys.readouterr().out
    assert f"accuracy {accuracy:.1%} on 60 images of new toys" in out
    assert "the reference, which stores votes" in out
    assert "accuracy of a linear classifier of the pixels: 50.0%; chance: 20%" in out
    assert drawn[0]["curve"] == [(row["step"] * 8, row["accuracy"]) for row in measured(tmp_path / "run")]
    with Image.open(tmp_path / "report.png") as picture:
        assert picture.size == (1300, 720)


def test_the_recipe_has_the_settings_of_the_demo():
    recipe = Config(**read_config(Path(__file__).parent.parent / "docs" / "recipes" / "toynorb-demo.toml"))
    assert demo.replace(demo.CONFIG, steps=1877, test_limit=None) == recipe
