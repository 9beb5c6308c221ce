"""The sdist and the wheel install in a clean environment, and contain all necessary files."""

import email
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest

import tritoncaps

pytest.importorskip("build.env")  # of the package; a folder build/ is importable, too

ROOT = Path(__file__).parent.parent
NOT_SOURCES = (
    ".git",
    ".venv*",
    ".*_cache",
    ".hypothesis",
    "__pycache__",
    "*.egg-info",
    "build",
    "dist",
    "runs",
    "demo",
)

# Every module can be imported, weights and tables are there, a layer has gradients, the version is that of the sources.
SMOKE = """
import importlib, pkgutil, sys
from importlib.metadata import version
import torch, tritoncaps
from tritoncaps import ClassCaps, PrimaryCaps, SpreadLoss
from tritoncaps.models import MatrixCapsNet
assert tritoncaps.__file__.startswith(sys.prefix), tritoncaps.__file__
assert version("tritoncaps") == tritoncaps.__version__
for module in pkgutil.walk_packages(tritoncaps.__path__, "tritoncaps."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
with tritoncaps.use_backend("reference"):
    model = torch.nn.Sequential(PrimaryCaps(3, 2), ClassCaps(2, 5))
    SpreadLoss()(model(torch.randn(2, 3, 4, 4)), torch.tensor([0, 4])).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    network = MatrixCapsNet.small(1, 10, pretrained="mnist").eval()
    assert network(torch.randn(1, 1, 28, 28)).activations.shape == (1, 10)
print(tritoncaps.__version__)
"""


def run(*command, **options):
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder with both distributions; the wheel is built from the sdist.

    A build writes into the folder of its sources, and another worker may build at the same time. So it gets a copy.
    """
    folder, sources = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("sources") / "copy"
    shutil.copytree(ROOT, sources, ignore=shutil.ignore_patterns(*NOT_SOURCES))
    (sources / "kernels" / "__pycache__").mkdir()
    for name in ("kernel.nbc", "kernel.nbi", "kernel.pyc"):
        (sources / "kernels" / "__pycache__" / name).touch()
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, sources)
    return folder


def clean_environment(folder):
    """An environment without tritoncaps that sees the packages of this one, torch included; its Python.

    A path in a .pth file is added as it is: .pth files in that folder, such as the one of an editable install, are not
    read.
    """
    venv.create(folder, with_pip=False)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "seen.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return python


@pytest.mark.parametrize("kind", ["tar.gz", "whl"])
def test_a_clean_environment_runs_it(dist, kind, tmp_path):
    python = clean_environment(tmp_path / "env")
    (file,) = dist.glob(f"*.{kind}")
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--force-reinstall")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, file)
    assert run(python, "-c", SMOKE, cwd=tmp_path).strip() == tritoncaps.__version__
    command = python.with_name("tritoncaps")
    assert run(command, "--version", cwd=tmp_path) == f"tritoncaps {tritoncaps.__version__}\n"


def test_an_index_can_show_it(dist):
    """`twine check`, and no link of the long description is relative."""
    run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir())
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        content = archive.extractfile(f"tritoncaps-{tritoncaps.__version__}/PKG-INFO").read()
    metadata = email.message_from_bytes(content)
    assert metadata["Description-Content-Type"] == "text/markdown"
    description = metadata.get_payload(decode=True).decode()
    assert "](docs/" not in description
    assert "/docs/capsules.md)" in description


def test_the_sdist_has_every_file_of_the_repository_and_no_caches(dist):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert {name for name in packed if "__pycache__" in name} == set()
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a clone")
    tracked = set(run("git", "-C", ROOT, "ls-files").split("\n")) - {""}
    assert {name for name in tracked - packed if (ROOT / name).exists()} == set()


def test_every_package_is_installed():
    """pyproject.toml names the packages one by one, because two of them are in other folders of the repository."""
    tomllib = importlib.import_module("tomllib" if importlib.util.find_spec("tomllib") else "tomli")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    places = {"tritoncaps": ROOT / "tritoncaps"} | {f"tritoncaps.{name}": ROOT / name for name in ("kernels", "models")}
    found = {
        ".".join([package, *init.parent.relative_to(folder).parts])
        for package, folder in places.items()
        for init in folder.rglob("__init__.py")
    }
    assert set(project["tool"]["setuptools"]["packages"]) == found
