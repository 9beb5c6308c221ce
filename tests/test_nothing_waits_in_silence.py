"""Operations of more than two seconds report their progress; missing packages are reported before the work starts."""

import io
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from tritoncaps import Capsules, ClassCaps, data, waiting
from tritoncaps.cli import main
from tritoncaps.data import toynorb
from tritoncaps.kernels.common import backends
from tritoncaps.kernels.common.cpu import compiling
from tritoncaps.kernels.common.triton import announcing
from tritoncaps.kernels.common.triton.surroundings import surroundings
from tritoncaps.training import Config, train


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def impatient(monkeypatch):
    """Log messages appear without a delay."""
    monkeypatch.setattr(waiting, "PATIENCE", 0.0)
    monkeypatch.setattr(waiting, "PAUSE", 60.0)


@pytest.fixture
def without(monkeypatch):
    """Make the import of packages fail."""

    def hide(*packages):
        for package in packages:
            monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.setattr(backends, "_missing", backends._missing.__wrapped__)

    return hide


def slow_items(count=3):
    for i in range(count):
        time.sleep(0.05)
        yield i


def test_a_log_gets_a_line(impatient, caplog):
    assert list(waiting.waiting("counting", slow_items(), 3)) == [0, 1, 2]
    assert [record.getMessage() for record in caplog.records] == ["counting: 0% done"]


def test_quick_work_says_nothing(caplog):
    assert list(waiting.waiting("counting", range(3), 3)) == [0, 1, 2]
    assert not caplog.records


def test_lines_end_with_the_work(monkeypatch, caplog):
    monkeypatch.setattr(waiting, "PATIENCE", 0.02)
    with pytest.raises(ZeroDivisionError), waiting.Waiting("dividing"):
        1 / 0  # noqa: B018
    time.sleep(0.1)
    assert not caplog.records


def test_a_terminal_gets_a_bar(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert list(waiting.waiting("counting", slow_items(), 3)) == [0, 1, 2]
    assert "counting" in sys.stderr.getvalue()
    assert "0/3" in sys.stderr.getvalue()
    assert not caplog.records


def test_rendering(impatient, monkeypatch, caplog):
    def toy(*_):
        time.sleep(0.01)
        return np.zeros((1, 2, 48, 48), np.uint8)

    monkeypatch.setattr(toynorb, "render_toy", toy)
    assert len(toynorb.render_split("train")) == 25
    assert caplog.records[0].getMessage().startswith("rendering ToyNORB's train toys, once: ")


def test_reading_and_testing(impatient, monkeypatch, caplog):
    def slowly(split, folder):
        time.sleep(0.05)
        return data.ImageSet(torch.zeros(4, 1, 28, 28, dtype=torch.uint8), torch.zeros(4).long(), data.DIGITS)

    monkeypatch.setitem(data.DATASETS, "mnist", data.DATASETS["mnist"]._replace(load=slowly))
    images = data.load("mnist", "test")
    assert caplog.records[0].getMessage() == "reading the files of mnist, test .."
    from tritoncaps.training import evaluate
    from tritoncaps.training.distributed import World

    class Slow(torch.nn.Module):
        def forward(self, x):
            time.sleep(0.05)
            return torch.zeros(len(x), 10)

    evaluate(Slow(), images, data.DATASETS["mnist"].pipeline, World(0, 1, torch.device("cpu")))
    assert caplog.records[-1].getMessage().startswith("testing: ")


def test_compiling_says_which_kernel_and_how_far(monkeypatch, caplog):
    def scale_kernel(counter, tasks, edges):
        edges[0][0] += tasks

    monkeypatch.setattr(compiling, "_PATIENCE", 0.0)
    monkeypatch.setattr(compiling, "_SHORT", 0.0)
    dispatcher = compiling.kernel(scale_kernel)
    compiling.ready(dispatcher, np.dtype("float32"), (np.zeros(2, np.int64), 1, (np.zeros(1, np.float32),)))
    message = caplog.records[0].getMessage()
    assert message.startswith("preparing the CPU kernels, compiled once and then loaded from disk: ")
    assert message.endswith("test_nothing_waits_in_silence.scale, float32 (1 of 1)")


@pytest.mark.parametrize("arguments", [["train"], ["data", "get", "mnist"], ["data", "get", "toynorb"]])
def test_commands_without_tqdm_get_a_sentence(without, monkeypatch, capsys, tmp_path, arguments):
    without("tqdm")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITONCAPS_DATA", str(tmp_path / "data"))
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "needs the package tqdm: pip install 'tritoncaps[train]'" in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_pictures_without_their_packages_get_a_sentence(without, monkeypatch, capsys, tmp_path):
    without("matplotlib", "PIL")
    monkeypatch.setattr(toynorb, "render_split", lambda *_: pytest.fail("work was done before"))
    arguments = ["--data-dir", str(tmp_path / "data"), "--out", str(tmp_path / "sheet.png")]
    assert main(["data", "show", "toynorb", *arguments]) == 1
    assert "needs the package matplotlib: pip install 'tritoncaps[train]'" in capsys.readouterr().err
    assert main(["predict", "--run", "nowhere", "a.png"]) == 1
    assert "needs the package pillow: pip install 'tritoncaps[train]'" in capsys.readouterr().err


@pytest.mark.parametrize(("backend", "package"), [("cpu", "numba"), ("triton", "triton")])
def test_backends_without_their_packages_get_a_sentence(without, tmp_path, backend, package):
    without(package)
    layer = ClassCaps(3, 4, backend=backend)
    capsules = Capsules(torch.randn(1, 3, 2, 4, 4), torch.rand(1, 3, 2))
    sentence = f"backend '{backend}' cannot be used: the package {package} is not installed: pip install {package}"
    with pytest.raises(ImportError, match=sentence):
        layer(capsules)
    with pytest.raises(ImportError, match=sentence):
        train(Config(backend=backend, data_dir=str(tmp_path / "data"), out=str(tmp_path / "run")))
    assert not list(tmp_path.iterdir())


def test_testing_without_hypothesis_gets_a_sentence():
    code = "import sys; sys.modules['hypothesis'] = None; import tritoncaps.testing"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    sentence = "tritoncaps.testing needs the package hypothesis: pip install 'tritoncaps[testing]'"
    assert result.stderr.splitlines()[-1].endswith(sentence)


class JITFunctionOfOurs:
    module, name = "tritoncaps.kernels.mixture.triton.parents", "fit_kernel"


@pytest.fixture
def hooks(monkeypatch):
    """Triton's hooks: ours, before other hooks that record their calls."""
    from triton import knobs

    seen = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **given: seen.append(given["fn"].name))
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    monkeypatch.setattr(announcing, "_PATIENCE", 0.0)
    monkeypatch.setattr(announcing, "_compiled", [])
    announcing.install.__wrapped__()
    yield knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook, seen
    announcing.finish()


def test_compiling_for_a_gpu_says_which_kernel_and_how_many(hooks, caplog):
    before, after, seen = hooks
    for _ in range(2):
        before(fn=JITFunctionOfOurs)
        time.sleep(0.2)
        after(fn=JITFunctionOfOurs)
    assert [r.getMessage().partition("disk: ")[2] for r in caplog.records] == [
        "fit (0 done; a network needs about 14)",
        "fit (1 done; a network needs about 14)",
    ]
    assert seen == ["fit_kernel", "fit_kernel"]


def test_compiling_of_others_is_their_business(hooks, caplog):
    class OfOthers:
        module, name = "inductor", "pointwise"

    hooks[0](fn=OfOthers)
    time.sleep(0.2)
    assert (caplog.records, hooks[2]) == ([], ["pointwise"])


def test_processes_of_torchrun_compile_one_after_the_other(hooks, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    before, after, _ = hooks
    before(fn=JITFunctionOfOurs)
    other = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'wb'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    command = [sys.executable, "-c", other, announcing._now.lock.name]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0
    after(fn=JITFunctionOfOurs)
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_missing_c_compiler_gets_a_sentence():
    with pytest.raises(RuntimeError, match="backend 'triton' needs a C compiler"), surroundings(torch.zeros(1)):
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")
    with pytest.raises(RuntimeError, match="something else"), surroundings(torch.zeros(1)):
        raise RuntimeError("something else")
