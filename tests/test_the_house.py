"""The structure of the project: kernels do not import the library, and CONTRIBUTING.md lists all files and folders."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KERNELS = sorted((ROOT / "kernels").rglob("*.py"))


def imported(path):
    """The names of all modules that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports a relative name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", KERNELS, ids=[str(path.relative_to(ROOT)) for path in KERNELS])
def test_kernels_import_nothing_of_the_library_above_them(path):
    ours = [name for name in imported(path) if name.partition(".")[0] == "tritoncaps"]
    assert [name for name in ours if not f"{name}.".startswith("tritoncaps.kernels.")] == []


def test_imports_are_found(tmp_path):
    """The test above can fail."""
    (tmp_path / "x.py").write_text("import tritoncaps.layers as y\ndef f():\n    from tritoncaps import reference\n")
    assert list(imported(tmp_path / "x.py")) == ["tritoncaps.layers", "tritoncaps.reference"]


def test_only_the_table_of_backends_knows_their_names():
    """Other files use the object of a backend, not its name."""
    files = [
        p for folder in ("kernels", "tritoncaps/routing", "tritoncaps/_internal") for p in (ROOT / folder).rglob("*.py")
    ]
    files += [ROOT / "tritoncaps" / name for name in ("functional.py", "layers.py", "vector_layers.py", "reference.py")]
    branches = re.compile(r"""\bif .*backend (==|!=|in|is) .*["'(]""")
    found = [p for p in files if p.name != "backends.py" and branches.search(p.read_text())]
    assert found == []
    assert branches.search('if backend == "cpu":')


def test_contributing_draws_the_library():
    """The tree has every file and folder of tritoncaps/, and no others."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    lines = text.partition("    tritoncaps/")[2].partition("\n    kernels/")[0].splitlines()[1:]
    left = [re.match(r"( *)((?:[\w/.]+(?:, | |$))+)", line).group(2) for line in lines]
    drawn = {name.rstrip("/") for part in left for name in re.findall(r"\b\w+(?:\.py|/)|_internal/", part)}
    hidden = ("__", "py.typed", "kernels", "models", ".")
    found = {path.name for path in (ROOT / "tritoncaps").iterdir() if not path.name.startswith(hidden)}
    assert drawn == found


KERNEL = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, {tests!r})
if {patched}:
    import conftest
import hashlib, torch
from tritoncaps import Capsules, ClassCaps, DynamicRouting, VectorCaps
torch.manual_seed(0)
found = []
for layer, shape in ((ClassCaps(2, 3, backend="triton"), (2, 2, 3, 4, 4)),
                     (VectorCaps(6, 3, 4, 5, routing=DynamicRouting(2), backend="triton"), (2, 6, 3))):
    poses = torch.randn(shape, requires_grad=True)
    given = Capsules(poses, torch.rand(shape[:3])) if len(shape) == 5 else poses
    parents = layer(given)
    (parents.poses.square().sum() + parents.activations.sum()).backward()
    found += [*parents, poses.grad, *(p.grad for p in layer.parameters())]
assert all(x.isfinite().all() and x.any() for x in found)
from triton.runtime.interpreter import InterpretedFunction
assert InterpretedFunction.__call__.__module__.startswith("interpreter") == {patched}
print(hashlib.sha256(b"".join(x.detach().numpy().tobytes() for x in found)).hexdigest())
"""


def test_the_patched_interpreter_gives_the_same_bits():
    """interpreter.py shortens Triton's interpreter for the tests; values and gradients keep their bits."""
    codes = [KERNEL.format(tests=str(ROOT / "tests"), patched=patched) for patched in (True, False)]
    runs = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for code in codes
    ]
    outputs = [run.communicate(timeout=300) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] != ""
