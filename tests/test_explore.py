"""The page of `tritoncaps explore`: its numbers equal those of the network, and it works in a browser."""

import base64
import gzip
import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import official_files as official
import pytest
import torch
from browser import Browser, needs_chromium

from tritoncaps import EMRouting, attacks, inspect
from tritoncaps.cli import main
from tritoncaps.cli.explore import chosen
from tritoncaps.data import ImageSet, MultiMNIST, Pipeline
from tritoncaps.explore import page, write_page
from tritoncaps.explore.collect import collect, first_images, spread
from tritoncaps.explore.packing import pack
from tritoncaps.models import CapsNet, MatrixCapsNet, TinyCapsNet

ROOT = Path(__file__).parent.parent
CLASSES = ("cat", "dog", "</script>")
PIPELINE = Pipeline(crop=20, standardise="image")
IMAGES = 3
DASH = "\N{EN DASH}"  # shown instead of a missing number


def prepare(x):
    return PIPELINE.test(255 * x)[0]


def show(x):
    return replace(PIPELINE, standardise=None).test(255 * x)[0]


def network_of(kind):
    torch.manual_seed(1)
    if kind == "vector":
        sizes = {"channels": 4, "primary_caps": 2, "primary_dim": 4, "class_dim": 5}
        return CapsNet(2, 3, 20, **sizes).eval()
    if kind == "tiny":
        return TinyCapsNet(2, 3, 20, (4, 2)).eval()
    return MatrixCapsNet(2, 3, (4, 2, 4, 3), routing=EMRouting(2, final_lambda=0.1)).eval()


def pixels_of():
    return torch.randint(256, (IMAGES, 2, 24, 24), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)


LABELS = [[0], [2], [1]]


@pytest.fixture(scope="module", params=["matrix", "tiny", "vector"])
def collected(request):
    network = network_of(request.param)
    return network, collect(network, pixels_of() / 255, LABELS, CLASSES, prepare, show, (0.0, 0.1))


# packing


def unpacked(packed, name):
    """Unpack numbers in the same way as data.js."""
    content = gzip.decompress(base64.b64decode(packed.content))
    entry = packed.table[name]
    count, begin, kind = int(np.prod(entry["shape"])), entry["begin"], entry["kind"]
    if kind == "rows8":
        rows = entry["shape"][0]
        scale = np.frombuffer(content, "<f4", rows, begin)
        quanta = np.frombuffer(content, "i1", count, begin + 4 * rows).reshape(rows, -1)
        return (quanta * scale[:, None]).reshape(entry["shape"])
    dtype = {"float16": "<f2", "int16": "<i2"}.get(kind, "u1")
    numbers = np.frombuffer(content, dtype, count, begin).astype(np.float64).reshape(entry["shape"])
    return {"uint8": numbers / 255, "root8": (numbers / 255) ** 2}.get(kind, numbers)


def test_packed_numbers_come_back():
    few, shares = torch.randn(3, 5, 7), torch.rand(3, 5, 7) ** 4
    table = torch.tensor([[-1, 300], [7, 0]])
    packed = pack(
        {
            "halves": ("float16", few),
            "table": ("int16", table),
            "bytes": ("uint8", shares),
            "roots": ("root8", shares),
            "rows": ("rows8", few * torch.tensor([1.0, 100.0, 0.01])[:, None, None]),
        }
    )
    assert np.abs(unpacked(packed, "halves") / few.numpy() - 1).max() < 1 / 256
    assert np.array_equal(unpacked(packed, "table"), table.numpy())
    assert np.abs(unpacked(packed, "bytes") - shares.numpy()).max() <= 0.5001 / 255
    assert np.abs(np.sqrt(unpacked(packed, "roots")) - shares.sqrt().numpy()).max() <= 0.5001 / 255
    rows = unpacked(packed, "rows") / np.array([1.0, 100.0, 0.01])[:, None, None]
    assert np.abs(rows - few.numpy()).max() <= 0.51 * few.abs().max().item() / 127
    assert all(entry["begin"] % 8 == 0 for entry in packed.table.values())


# the numbers


def test_numbers_are_those_of_inspect(collected):
    network, (header, arrays) = collected
    layers = network(prepare(pixels_of() / 255), return_intermediate=True)
    names = list(layers)
    assert [layer["name"] for layer in header["layers"]] == names
    for below, name in pairwise(names):
        layer = network.get_submodule(name)
        steps = inspect.iterations(layer, layers[below])
        routing_map = layer._children(layers[below])[1]
        assert torch.equal(arrays[f"{name}.children"][1], routing_map.children)
        start = steps[0].assignments
        torch.testing.assert_close(arrays[f"{name}.start"][1].expand_as(start), start)
        for t, step in enumerate(steps):
            torch.testing.assert_close(arrays[f"{name}.assignments"][1][t], step.next_assignments, rtol=1e-3, atol=1e-4)
            active = arrays[f"{name}.active"][1][t]
            torch.testing.assert_close(active, step.activations.reshape(active.shape), rtol=1e-3, atol=1e-4)
            mean = arrays[f"{name}.mean"][1][t]
            expected = step.parents if hasattr(step, "parents") else step.mean
            torch.testing.assert_close(mean, expected.reshape(mean.shape), rtol=1e-3, atol=1e-4)
            if hasattr(step, "variance"):
                deviation = arrays[f"{name}.deviation"][1][t]
                torch.testing.assert_close(
                    deviation, step.variance.sqrt().reshape(deviation.shape), rtol=1e-3, atol=1e-4
                )
    for name, (poses, activations) in layers.items():
        torch.testing.assert_close(arrays[f"{name}.activations"][1][0], activations, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(arrays[f"{name}.poses"][1], poses.flatten(activations.ndim), rtol=1e-4, atol=1e-4)


def test_support_is_that_of_attribution(collected):
    network, (_, arrays) = collected
    inputs = prepare(pixels_of() / 255)
    for k in range(len(CLASSES)):
        traced = inspect.attribution(network, inputs, k)
        torch.testing.assert_close(arrays["pixel_sums"][1][:, k], traced.support)
        found, expected = arrays["pixels"][1][:, k], traced.pixels.clamp(min=0)
        assert found.flatten(1).amax(1).tolist() == pytest.approx([1] * IMAGES)
        largest = expected.flatten(1).amax(1)[:, None, None]
        torch.testing.assert_close(found * largest, expected, rtol=1e-4, atol=1e-5)


def test_adversarial_images_are_those_of_fgsm(collected):
    network, (header, arrays) = collected
    given = pixels_of() / 255
    labels = torch.tensor(LABELS).flatten()
    changed = attacks.fgsm(lambda x: network(prepare(x)), given, labels, 0.1, loss=spread)
    pictures = arrays["pictures"][1]
    assert pictures.shape == (2, IMAGES, 2, 20, 20)
    torch.testing.assert_close(pictures[0], given[:, :, 2:22, 2:22])
    torch.testing.assert_close(pictures[1], changed[:, :, 2:22, 2:22])
    torch.testing.assert_close(arrays["scores"][1][1], network(prepare(changed)).activations, rtol=1e-3, atol=1e-4)
    assert header["epsilons"] == [0.0, 0.1]


def test_a_sure_class_can_be_attacked():
    """Its activation is one, where the gradient of the sigmoid is zero."""
    activations = torch.tensor([[1.0, 0.5, 0.25]], requires_grad=True)
    spread((None, activations), torch.tensor([0])).backward()
    assert activations.grad.tolist() == [[-1.5, 1.0, 0.5]]  # 2 (1 - (a_0 - a_i)) for each of the others


def test_networks_without_capsules_are_refused():
    with pytest.raises(
        TypeError, match="network must be a MatrixCapsNet, a TinyCapsNet, a CapsNet or one with the same"
    ):
        collect(torch.nn.Linear(2, 2), pixels_of() / 255, LABELS, CLASSES, prepare, show)


def test_the_classes_take_turns():
    data = ImageSet(torch.arange(12, dtype=torch.uint8).reshape(12, 1, 1, 1), torch.arange(12) // 4, CLASSES)
    images, labels = chosen(data, 7)
    assert labels == [[0], [1], [2], [0], [1], [2], [0]]
    assert [int(image) // 4 for image in images] == [0, 1, 2, 0, 1, 2, 0]
    assert len(set(images.flatten().tolist())) == 7
    digits = ImageSet(torch.zeros(6, 1, 4, 4, dtype=torch.uint8), torch.arange(6) % 3, CLASSES)
    images, labels = chosen(MultiMNIST(digits, pairs=2), 5)
    assert images.shape == (5, 1, 12, 12)
    assert all(len(of_image) == 2 for of_image in labels)


# the page


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of each network."""
    folder = tmp_path_factory.mktemp("pages")
    for kind in ("matrix", "tiny", "vector"):
        out = folder / f"{kind}.html"
        assert (
            write_page(out, network_of(kind), pixels_of(), LABELS, CLASSES, PIPELINE, "<A & B>", "about it") == IMAGES
        )
    return folder


def header_of(text):
    return json.loads(re.search(r'id="header">(.*?)</script>', text, flags=re.DOTALL).group(1))


def test_the_page_needs_nothing_else(pages):
    for kind in ("matrix", "tiny", "vector"):
        text = (pages / f"{kind}.html").read_text()
        assert len(text) < page.LIMIT
        assert re.findall(r"https?:|src=|@import|url\(|<link|fetch\(|import\(", text) == []
        assert "<!-- " not in text
        assert text.count("<title>&lt;A &amp; B&gt;</title>") == 1
        header = header_of(text)
        assert header["classes"] == list(CLASSES)
        assert header["title"] == "<A & B>"


def test_the_template_is_installed():
    """pyproject.toml lists the files that are not Python."""
    listed = re.search(r'"tritoncaps.explore" = \[(.*?)\]', (ROOT / "pyproject.toml").read_text()).group(1)
    files = {path.name for path in page.FOLDER.iterdir() if path.is_file() and path.suffix != ".py"}
    assert set(re.findall(r'"(.*?)"', listed)) == files


def test_as_many_images_as_fit(pages, tmp_path, monkeypatch):
    whole = (pages / "matrix.html").stat().st_size
    given = (pixels_of(), LABELS, CLASSES, PIPELINE, "<A & B>", "about it")
    monkeypatch.setattr(page, "LIMIT", whole - 1)
    assert write_page(tmp_path / "a.html", network_of("matrix"), *given) == 2
    text = (tmp_path / "a.html").read_text()
    assert header_of(text)["labels"] == LABELS[:2]
    assert len(text) < whole
    monkeypatch.setattr(page, "LIMIT", 1000)
    with pytest.raises(ValueError, match="the network is too large for a page of"):
        write_page(tmp_path / "a.html", network_of("matrix"), *given)
    assert (tmp_path / "a.html").read_text() == text  # the old page stays


def test_first_images_are_the_same_images(collected):
    _, whole = collected
    fewer = first_images(whole, 1)
    assert fewer.header["labels"] == LABELS[:1]
    for name, (_, values) in whole.arrays.items():
        found = fewer.arrays[name][1]
        assert torch.equal(found, values[tuple(slice(n) for n in found.shape)]), name
    assert fewer.arrays["pictures"][1].shape[:2] == (2, 1)
    assert fewer.arrays["pixels"][1].shape[0] == 1


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    official.write_smallnorb(tmp_path / "data", count=10)
    data = ["--data-dir", str(tmp_path / "data")]
    assert main(["explore", "--pretrained", "smallnorb", "--images", "2", *data]) == 0
    out = capsys.readouterr().out
    assert re.fullmatch(r"smallnorb.html: 2 images, \d\.\d MB\n", out)
    header = header_of((tmp_path / "smallnorb.html").read_text())
    assert header["labels"] == [[0], [1]]
    assert header["about"] == "MatrixCapsNet, 2 iterations of EM routing, local competition, test images of smallnorb"
    assert main(["explore", "--pretrained", "smallnorb", "--images", "0", *data]) == 1
    assert "--images must be a whole number of at least 1, but it is 0" in capsys.readouterr().err
    assert main(["explore", "--pretrained", "smallnorb", "--out", "nowhere/x.html", *data]) == 1
    assert "--out nowhere/x.html cannot be written: there is no folder nowhere" in capsys.readouterr().err


# in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def canvas(browser, name):
    """The pixels of a canvas."""
    return browser.evaluate(f"document.getElementById('{name}').toDataURL()")


def slide(browser, name, value):
    """Move a slider, as a user does."""
    browser.evaluate(f"$('{name}').value = {value}; $('{name}').dispatchEvent(new Event('input')); 0")


@needs_chromium
@pytest.mark.parametrize("kind", ["matrix", "tiny", "vector"])
def test_the_page_opens_without_an_error(browser, pages, kind):
    browser.errors.clear()
    browser.open(pages / f"{kind}.html")
    assert browser.evaluate("$('title').textContent") == "<A & B>"
    assert browser.evaluate("document.querySelectorAll('#images button').length") == IMAGES
    assert browser.evaluate("document.querySelectorAll('#classes button .name')[2].textContent") == "</script>"
    for key in ("ArrowRight", "]", "[", ".", "1", "t", "Escape", "ArrowLeft"):
        browser.press(key)
    assert browser.errors == []


@needs_chromium
@pytest.mark.parametrize("kind", ["matrix", "vector"])
def test_votes_and_assignments_of_the_page(browser, pages, kind):
    network = network_of(kind)
    layers = network(prepare(pixels_of() / 255), return_intermediate=True)
    below, name = list(layers)[-2:]
    browser.open(pages / f"{kind}.html", f"#image=1&parent={len(layers) - 1},2,0&iteration=1")
    found = inspect.votes(network.get_submodule(name), layers[below], [2])
    steps = inspect.iterations(network.get_submodule(name), layers[below])
    votes = np.array(browser.evaluate("chosen.votes.map((vote) => Array.from(vote))"))
    expected = found.votes[1, 0].flatten(0, 1).flatten(1).detach().numpy()
    assert np.abs(votes - expected).max() < 0.02 * np.abs(expected).max()
    for t, step in enumerate([steps[0].assignments, *(step.next_assignments for step in steps)]):
        shares = np.array(browser.evaluate(f"Array.from(chosen.steps[{t}])"))
        assert np.abs(shares - found.select(step)[1, 0].flatten().numpy()).max() < 0.01


@needs_chromium
def test_a_click_on_a_parent_lights_its_children(browser, pages):
    browser.open(pages / "matrix.html")
    browser.press("Escape")
    before = canvas(browser, "layer-primary"), canvas(browser, "picture")
    assert browser.evaluate("$('note-primary').textContent") == "brightness: activation"
    x, y = browser.evaluate(
        """(() => { const box = $('layer-conv_caps1').getBoundingClientRect(), layer = layers[1];
        const [x, y] = corner(layer, 2 * layer.places + 1); return [box.x + x + 3, box.y + y + 3]; })()"""
    )
    browser.click(x, y)
    assert browser.evaluate("state.parent") == {"layer": 1, "type": 2, "place": 1}
    assert browser.evaluate("$('note-primary').textContent") == "light: assignment to type 3, row 1, column 2"
    assert browser.evaluate("$('parent-name').textContent") == "ConvCaps 1: type 3, row 1, column 2"
    assert canvas(browser, "layer-primary") != before[0]
    assert canvas(browser, "picture") != before[1]  # the frame of its receptive field
    routing_map = network_of("matrix").conv_caps1.routing_map((8, 8))
    places = sorted(routing_map.children[1].tolist())
    assert sorted(browser.evaluate("chosen.edges.filter((e) => e.b == 0).map((e) => e.child)")) == places
    assert browser.evaluate("fieldOf(1, 1)") == [
        0,
        4,
        9,
        13,
    ]  # rows 0 to 2 and columns 2 to 4, each 5 pixels, in steps of 2


@needs_chromium
def test_the_slider_steps_through_the_iterations(browser, pages):
    browser.open(pages / "matrix.html", "#parent=3,0,0")
    slide(browser, "iteration", 0)
    start, light = browser.evaluate("Array.from(chosen.steps[state.iteration])"), canvas(browser, "layer-conv_caps2")
    routing_map = network_of("matrix").class_caps.routing_map((1, 1))
    assert start == pytest.approx([1 / 3] * routing_map.num_slots * 3, abs=0.01)
    assert browser.evaluate("$('iteration-value').textContent") == "start"
    assert browser.evaluate("document.querySelector('#matrix span').textContent") == DASH
    slide(browser, "iteration", 2)
    assert browser.evaluate("$('iteration-value').textContent") == "2 of 2"
    end = browser.evaluate("Array.from(chosen.steps[state.iteration])")
    assert max(end) - min(end) > 0.05
    assert canvas(browser, "layer-conv_caps2") != light
    assert browser.evaluate("document.querySelector('#matrix span').textContent") != DASH


@needs_chromium
def test_a_class_shows_the_pixels_that_support_it(browser, pages):
    browser.open(pages / "matrix.html")
    browser.press("Escape")
    before = canvas(browser, "picture")
    browser.evaluate("$('class-1').click()")
    first = canvas(browser, "picture")
    assert browser.evaluate("$('class-1').getAttribute('aria-pressed')") == "true"
    assert "light: supports dog" in browser.evaluate("$('image-note').textContent")
    browser.press("1")
    assert browser.evaluate("$('class-0').getAttribute('aria-pressed')") == "true"
    assert len({before, first, canvas(browser, "picture")}) == 3


@needs_chromium
def test_epsilon_changes_picture_and_activations(browser, pages):
    browser.open(pages / "matrix.html")
    values = "Array.from(document.querySelectorAll('#classes .value'), (x) => x.textContent)"
    before = canvas(browser, "picture"), canvas(browser, "layer-primary"), browser.evaluate(values)
    slide(browser, "epsilon", 9)
    assert browser.evaluate("$('epsilon-value').textContent") == "0.30"
    after = canvas(browser, "picture"), canvas(browser, "layer-primary"), browser.evaluate(values)
    assert all(a != b for a, b in zip(before, after, strict=True))
    network, labels = network_of("matrix"), torch.tensor(LABELS[0])
    changed = attacks.fgsm(lambda x: network(prepare(x)), pixels_of()[:1] / 255, labels, 0.3, loss=spread)
    expected = network(prepare(changed)).activations[0].tolist()
    assert [float(value) for value in after[2]] == pytest.approx(expected, abs=0.011)


@needs_chromium
def test_the_decoder_runs_in_the_page(browser, pages):
    network = network_of("vector")
    browser.open(pages / "vector.html", "#image=2&parent=1,1,0")
    before = canvas(browser, "reconstruction")
    slide(browser, "dimension-3", 0.25)
    assert canvas(browser, "reconstruction") != before
    capsules = network(prepare(pixels_of()[2:] / 255))
    poses = capsules.poses.clone()
    poses[0, 1, 3] += 0.25
    expected = network.reconstruct(capsules._replace(poses=poses), torch.tensor([1])).flatten().tolist()
    assert browser.evaluate("Array.from(reconstruction())") == pytest.approx(expected, abs=0.01)
    browser.evaluate("$('reset').click()")
    assert canvas(browser, "reconstruction") == before


@needs_chromium
def test_light_and_dark(browser, pages):
    theme, colour = "document.documentElement.dataset.theme", "getComputedStyle(document.body).backgroundColor"
    found = []
    for scheme in ("light", "dark"):
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser.open(pages / "matrix.html")
        assert browser.evaluate(theme) == scheme
        found.append(browser.evaluate(colour))
    browser.press("t")
    assert browser.evaluate(theme) == "light"
    assert [browser.evaluate(colour), found[1]] == found
