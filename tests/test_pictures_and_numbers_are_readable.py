"""Pictures match their titles, labels do not overlap, and objects print in one line."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tritoncaps.data import DIGITS, ImageSet, MultiMNIST
from tritoncaps.data.images import degrees
from tritoncaps.training import pictures
from tritoncaps.training.board import Board
from tritoncaps.training.evaluation import Evaluation
from tritoncaps.training.networks import NETWORKS, Task, build
from tritoncaps.training.summary import summarise

BENCH = Path(__file__).parent.parent / "bench"
TOYS = ("animal", "human", "airplane", "truck", "car")


def images(count=40, classes=TOYS, channels=2, **factors):
    pixels = torch.randint(256, (count, channels, 16, 16), dtype=torch.uint8)
    return ImageSet(pixels, torch.arange(count) % len(classes), classes, factors)


@pytest.fixture
def drawn(monkeypatch):
    """Collects figures instead of writing files."""
    figures = []
    monkeypatch.setattr(pictures, "save", lambda figure, out: figures.append(figure))
    yield figures
    for figure in figures:
        pictures.pyplot().close(figure)


def texts(figure):
    return [text.get_text() for text in figure.texts]


def boxes(figure, found):
    """The bounding boxes of texts, in pixels."""
    figure.canvas.draw()
    return [text.get_window_extent() for text in found if text.get_text()]


def overlap(boxes):
    return [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]


def test_data_sets_print_in_a_line():
    assert repr(images(azimuth=torch.zeros(40))) == "ImageSet(40 images of 2x16x16; 5 classes; azimuth)"
    pairs = MultiMNIST(images(20, DIGITS, 1), pairs=100)
    assert repr(pairs) == "MultiMNIST(2,000 images of 1x24x24; two of 10 classes in each)"


def test_angles_are_in_degrees():
    assert [degrees("azimuth", 34), degrees("elevation", 8), degrees("lighting", 3)] == ["340°", "70°", "3"]


def test_a_contact_sheet_names_its_classes(drawn):
    pictures.contact_sheet(images(), None, "toys, train")
    figure = drawn[0]
    assert texts(figure) == [*TOYS, "toys, train"]
    found = boxes(figure, figure.texts)
    assert not overlap(found)
    left = min(axis.get_window_extent().x0 for axis in figure.axes)
    assert all(box.x0 >= 0 and box.x1 <= left for box in found[:-1])


def test_a_contact_sheet_of_pairs_names_both_digits(drawn):
    pairs = MultiMNIST(images(40, DIGITS, 1), pairs=10)
    pictures.contact_sheet(pairs, None, "pairs")
    titles = [axis.title for axis in drawn[0].axes]
    expected = pairs.__getitems__([0])[1][0].nonzero().flatten().tolist()
    assert titles[0].get_text() == f"{expected[0]} and {expected[1]}"
    assert not overlap(boxes(drawn[0], [*titles, *drawn[0].texts]))


def test_titles_of_the_report_do_not_collide(drawn):
    """Even if every sample is classified as the class with the longest name."""
    data = images(48)
    wrong = np.where(data.labels == 2, 1, 2)
    curve = [(100.0, 0.3)]
    pictures.report(None, "title", data, wrong, curve, {"chance": 0.2}, np.eye(5))
    titles = [axis.title for axis in drawn[0].axes]
    assert titles[0].get_text() == "airplane\n(animal)"
    assert not overlap(boxes(drawn[0], titles))


def test_a_curve_of_one_point_is_visible(drawn, tmp_path):
    row = {"step": 20, "epoch": 0.1, "accuracy": 0.3}
    lines = [json.dumps({"kind": kind, **row}) for kind in ("train", "test")]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    pictures.learning_curve(tmp_path, None)
    found = drawn[0].axes[0].lines
    assert [line.get_marker() for line in found] == ["o", "o"]
    drawn[0].canvas.draw()
    legend = drawn[0].legends[0].get_window_extent()
    assert not legend.overlaps(drawn[0].axes[0].get_window_extent())


def test_numbers_stand_beside_the_lines_of_the_scaling_figure(monkeypatch):
    import matplotlib
    from matplotlib.path import Path as Line

    matplotlib.use("Agg")
    monkeypatch.syspath_prepend(BENCH)
    import report

    groups = {"falls": (500, 97, 66), "rises": (50, 90, 100), "peak": (1, 3, 1), "valley": (3, 1, 3), "flat": (2, 2, 2)}
    rows = [
        {"group": group, "x": x, "ns_per_vote": y, "p20_ms": y, "p50_ms": y, "p80_ms": y}
        for group, values in groups.items()
        for x, y in enumerate(values)
    ]
    figure = report._draw_scaling(rows)
    figure.canvas.draw()
    for axis in figure.axes[: len(groups)]:
        line = Line(axis.transData.transform(axis.lines[0].get_xydata()))
        assert len(axis.texts) == 3
        for text in axis.texts:
            assert not line.intersects_bbox(text.get_window_extent(), filled=False), axis.get_xlabel()
    matplotlib.pyplot.close(figure)


@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in ("cnn-mnist", "cnn-multimnist")])
def test_rows_of_a_summary_add_up(name):
    task = Task("smallnorb", 2, 32, 32, 5)
    summary = summarise(build(name, task, iterations=1, backend="reference"), task)
    assert sum(layer.parameters for layer in summary.layers) == summary.parameters


def test_tensorboard_shows_weights_errors_and_confusion(monkeypatch, tmp_path):
    """With a writer that records its calls, and has the methods of torch's writer."""
    calls = []

    class Writer:
        def __init__(self, folder):
            assert folder == str(tmp_path)

        def __getattr__(self, name):
            return lambda *arguments: calls.append((name, *arguments))

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    data, network = images(10), torch.nn.Linear(3, 5)
    right = torch.arange(10) % 2 == 0
    board = Board(tmp_path)
    board.add_scalars("test", 7, {"accuracy": 0.5, "name": "x"})
    board.add_evaluation("test", 7, network, data, Evaluation(0.5, right, torch.eye(5).long()))
    board.close()
    found = {(name, arguments[0]): arguments for name, *arguments in calls if arguments}
    assert found["add_scalar", "test/accuracy"] == ["test/accuracy", 0.5, 7]
    assert torch.equal(found["add_histogram", "weights/weight"][1], network.weight)
    assert torch.equal(found["add_images", "test/wrong"][1], data.images[1::2, :1])
    assert found["add_figure", "test/confusion"][1].axes[0].get_xlabel() == "predicted"
    assert calls[-1] == ("close",)
    pictures.pyplot().close("all")


def test_without_tensorboard_there_is_no_board(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    board = Board(tmp_path)
    board.add_scalars("test", 7, {"accuracy": 0.5})
    board.add_evaluation("test", 7, torch.nn.Linear(3, 5), images(10), Evaluation(0.5, torch.zeros(10).bool(), None))
    board.close()
    assert not list(tmp_path.iterdir())
