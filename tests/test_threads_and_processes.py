"""The CPU kernels in several threads and processes: same bits, no deadlock, no crash."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import typeof
from torch.utils.data import DataLoader, Dataset

from tritoncaps import Capsules, ClassCaps, ConvCaps2d, EMRouting, RoutingMap, VBRouting, functional, use_backend
from tritoncaps.kernels.common import backends
from tritoncaps.kernels.common.cpu import compiling
from tritoncaps.kernels.common.cpu import threads as pool
from tritoncaps.kernels.mixture.cpu import layout
from tritoncaps.testing import Problem, gradients, route_on

ROOT = Path(__file__).parent.parent
PROBLEM = Problem(RoutingMap.conv((9, 9), 3, stride=2), images=5, in_caps=9, out_caps=17)


def all_bits(dtype=torch.float32):
    return gradients(PROBLEM, functional.em_routing, dtype)


@pytest.fixture(autouse=True)
def threads():
    """The number of threads: several, unless a test sets another number."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("routing", [EMRouting(3), EMRouting(4), VBRouting(3)])
@pytest.mark.parametrize("images", [0, 2])
def test_weights_of_gradients_are_the_same_bits_if_they_are_computed_again(monkeypatch, images, routing):
    """The backward pass keeps r and dl of as many images as its memory holds, here of ``images`` of 5."""
    problem = PROBLEM.but(routing=routing)
    expected = gradients(problem, route_on("cpu"), torch.float32)
    slots, parents = PROBLEM.routing_map.num_slots, PROBLEM.routing_map.num_parents
    together = layout.types_together(PROBLEM.in_caps, PROBLEM.routing_map.num_weights, slots)
    sizes = (PROBLEM.in_caps, PROBLEM.out_caps, together, parents * slots, torch.float32)
    of_image = layout.weights_count(1, *sizes)
    monkeypatch.setattr(layout, "WEIGHTS_BYTES", images * of_image * 4)
    assert layout.weights_count(5, *sizes) == images * of_image
    found = gradients(problem, route_on("cpu"), torch.float32)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_fits_run_in_one_thread():
    """Threads of OpenMP and of MKL, which computes exp and log, would take the cores from the kernels that follow."""
    number = re.compile(r"(?:omp|mkl)_get_max_threads\(\) : (\d+)")
    before = number.findall(torch.__config__.parallel_info())
    seen = []

    @dataclass(frozen=True)
    class Watched(VBRouting):
        def fit(self, moments, parameters, iteration):
            seen.append(number.findall(torch.__config__.parallel_info()))
            return super().fit(moments, parameters, iteration)

    poses, activations = ClassCaps(2, 2, routing=Watched())(Capsules(torch.randn(1, 2, 2, 4, 4), torch.rand(1, 2, 2)))
    (poses.sum() + activations.sum()).backward()
    assert set(before) == {"3"}
    assert seen == [["1"] * len(before)] * 6
    assert number.findall(torch.__config__.parallel_info()) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bits_do_not_depend_on_the_number_of_threads(threads, dtype):
    threads(1)
    expected = all_bits(dtype)
    for count in (2, 3, 8):
        threads(count)
        for name, value in all_bits(dtype).items():
            assert torch.equal(value, expected[name]), f"{name} differs with {count} threads"


def test_many_python_threads_at_once():
    expected = all_bits()
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: all_bits(), range(32)))
    for result in results:
        for name, value in result.items():
            assert torch.equal(value, expected[name]), f"{name} differs among threads"


def test_nobody_waits_for_a_thread_that_never_comes(threads):
    """If all threads of the pool are busy, the calling thread does all the work."""
    threads(1)
    expected = all_bits()
    threads(3)
    free = threading.Event()
    with pool._lock:
        busy = [pool._executor().submit(free.wait, 120) for _ in range(2)]
    try:
        for name, value in all_bits().items():
            assert torch.equal(value, expected[name]), f"{name} differs"
        assert not any(x.done() for x in busy)
    finally:
        free.set()


class Routed(Dataset):
    """A data set whose items a capsule layer computes, in the worker."""

    layer = ConvCaps2d(3, 4, 3)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        torch.manual_seed(index)
        with torch.no_grad():
            return self.layer(Capsules(torch.randn(1, 3, 7, 7, 4, 4), torch.rand(1, 3, 7, 7))).poses[0]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_in_the_workers_of_a_data_loader(start):
    dataset = Routed()
    expected = [dataset[i] for i in range(len(dataset))]  # the pool of threads exists before the fork
    loader = DataLoader(dataset, num_workers=2, multiprocessing_context=start, timeout=120)
    if start == "spawn":
        return check_spawned(loader)
    for item, wanted in zip(loader, expected, strict=True):
        assert torch.equal(item[0], wanted)


def check_spawned(loader):
    """A spawned worker creates its own layer, with other weights."""
    assert all(item.isfinite().all() for item in loader)


def infer_and_learn(model, given):
    """In another process: outputs, and a change of the weights that the first process sees."""
    torch.set_num_threads(1)
    with torch.no_grad():
        outputs = model(given)
        model.weight.mul_(2)
    return [x.numpy() for x in outputs]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_processes_share_a_model(start):
    model = ClassCaps(3, 4).share_memory()
    given = Capsules(torch.randn(2, 3, 5, 4, 4), torch.rand(2, 3, 5))
    expected, weight = model(given), model.weight.detach().clone()
    with torch.multiprocessing.get_context(start).Pool(1) as pool:
        outputs = pool.apply_async(infer_and_learn, (model, given)).get(timeout=120)
    for mine, theirs in zip(outputs, expected, strict=True):
        assert torch.equal(torch.from_numpy(mine), theirs)
    assert torch.equal(model.weight, 2 * weight)
    assert not torch.equal(model(given).poses, expected.poses)  # no cache of the old weights


def run(code):
    imports = "import torch, tritoncaps\nfrom tritoncaps import Capsules, ClassCaps\ntorch.set_num_threads(3)\n"
    code = imports + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


ROUTE = "ClassCaps(3, 4)(Capsules(torch.randn(9, 3, 5, 4, 4), torch.rand(9, 3, 5))).poses.sum().backward()"


def test_exit_is_clean():
    run(ROUTE)
    quiet = "import logging; logging.disable()"  # on a busy machine, loading kernels may log a message
    result = run(f"{quiet}\n{ROUTE}\nprint('done')")
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


def test_exit_while_another_thread_routes():
    result = run(
        f"""
        import threading, time
        {ROUTE}
        def loop():  # goes on when the main thread has ended and the pool takes no more work
            for _ in range(50):
                {ROUTE}
            print("done")
        threading.Thread(target=loop).start()
        """
    )
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr


def test_route_at_exit():
    result = run(f"import atexit\natexit.register(lambda: ({ROUTE}, print('routed')))\n{ROUTE}")
    assert (result.returncode, result.stdout) == (0, "routed\n"), result.stderr


def test_after_fork_in_the_middle_of_training():
    result = run(
        f"""
        import os
        {ROUTE}
        child = os.fork()
        {ROUTE}
        if child == 0:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        print('done')
        """
    )
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr


def test_layers_of_one_model_share_the_compiled_kernels():
    """A second process loads the kernels from disk and compiles nothing."""
    code = f"""
    {ROUTE}
    from tritoncaps.kernels.mixture.cpu import parent_view
    print(sum(sum(f.stats.cache_misses.values()) for f in vars(parent_view).values() if hasattr(f, 'stats')))
    """
    assert run(code).returncode == 0
    result = run(code)
    assert result.stdout == "0\n", result.stderr


def test_kernels_are_cached_elsewhere_if_the_package_is_not_writable(tmp_path):
    """Nobody can write into the folder of a package whose __pycache__ is a file; the user's cache directory serves."""
    package = tmp_path / "site" / "tritoncaps"
    leave = shutil.ignore_patterns("__pycache__")
    for folder in (ROOT / "tritoncaps", ROOT / "kernels", ROOT / "models"):
        shutil.copytree(folder, package if folder.name == "tritoncaps" else package / folder.name, ignore=leave)
    (package / "kernels" / "dynamic" / "cpu" / "__pycache__").touch()
    code = "import torch, tritoncaps; print(tritoncaps.__file__); tritoncaps.functional.squash(torch.randn(3, 8))"
    env = {**os.environ, "PYTHONPATH": str(package.parent), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, check=True)
    assert result.stdout.startswith(str(package))
    assert list((tmp_path / "cache").rglob("squash*.nbc"))


def test_two_processes_can_compile_one_kernel_for_two_dtypes_at_the_same_time(tmp_path, monkeypatch):
    """The second writes its files while the first is writing; then each dtype finds its own code."""
    (tmp_path / "half.py").write_text("def half(x):\n    x[0] /= 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    from half import half

    one, other = compiling.kernel(half), compiling.kernel(half)
    replace = os.replace

    def replace_of_one(source, target):
        def replace_of_other(*names):
            monkeypatch.setattr(os, "replace", replace)
            replace(source, target)
            replace(*names)

        monkeypatch.setattr(os, "replace", replace_of_other)
        other.compile((typeof(np.ones(1)),))

    monkeypatch.setattr(os, "replace", replace_of_one)
    one.compile((typeof(np.ones(1, np.float32)),))
    assert os.replace is replace
    later = compiling.kernel(half)
    for dtype in (np.float32, np.float64):
        x = np.ones(1, dtype)
        later(x)
        assert x[0] == 0.5
    assert not later.stats.cache_misses


def test_layers_agree_with_each_other():
    """Class capsules without coordinates are a convolution whose kernel is the whole input and shares its weight."""
    capsules = Capsules(torch.randn(2, 3, 3, 2, 4, 4), torch.rand(2, 3, 3, 2))
    whole = ClassCaps(3, 5, coordinates=False)
    conv = ConvCaps2d(3, 5, (3, 2))
    with torch.no_grad():
        conv.weight.copy_(whole.weight.expand_as(conv.weight))
        conv.beta_u.copy_(whole.beta_u)
    for one, other in zip(whole(capsules), conv(capsules), strict=True):
        torch.testing.assert_close(one, other.squeeze((2, 3)))


def test_a_requested_backend_is_for_all_threads(monkeypatch):
    """DataParallel and autograd have their own threads."""
    chosen = []
    choose = backends.choose
    monkeypatch.setattr(backends, "choose", lambda *given: chosen.append(choose(*given)) or chosen[-1])
    layer, given = ClassCaps(2, 3), Capsules(torch.randn(1, 2, 2, 4, 4), torch.rand(1, 2, 2))
    with use_backend("reference"), ThreadPoolExecutor(1) as pool:
        pool.submit(layer, given).result()
    layer(given)
    assert chosen == ["reference", "cpu"]


def test_compiled_code_follows_the_requested_backend():
    layer, given = ClassCaps(2, 3), Capsules(torch.randn(1, 2, 2, 4, 4), torch.rand(1, 2, 2))
    graphs = []

    def backend(graph, inputs):
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    with torch.no_grad():
        compiled(given)
        with use_backend("reference"):
            compiled(given)
        compiled(given)
    ours = [any("em_routing_forward" in target for target in graph) for graph in graphs]
    assert ours == [True, False]
