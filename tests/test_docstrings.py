"""What docstrings of public names promise: their examples run, and they describe each argument by its name."""

import doctest
import importlib
import inspect
import re

import pytest

import tritoncaps
from tritoncaps import functional, models
from tritoncaps.kernels.common import backends

MODULES = (
    "capsules",
    "convert",
    "functional",
    "kernels.common.backends",
    "layers",
    "losses",
    "models.capsnet",
    "models.matrix_capsnet",
    "models.pretrained",
    "models.tiny_capsnet",
    "regularization",
    "routing.dynamic",
    "routing.em",
    "routing.mixture",
    "routing.vb",
    "routing_map",
    "vector_layers",
)

MAPS = [getattr(tritoncaps.RoutingMap, name) for name in ("conv", "full", "from_edges")]
FUNCTIONS = [*(getattr(functional, name) for name in functional.__all__), backends.use_backend, *MAPS]
NETWORKS = [models.CapsNet, models.Decoder, models.MatrixCapsNet, models.TinyCapsNet]
BASES = ("Capsules", "Components", "MatrixRouting", "Moments", "Routing", "RoutingMap", "VectorRouting")
NAMES = [name for name in tritoncaps.__all__ if name not in (*BASES, "Gaussians")]
CLASSES = [x for x in map(tritoncaps.__dict__.get, NAMES) if inspect.isclass(x)]


@pytest.mark.parametrize("module", MODULES)
def test_examples_run(module):
    loaded = importlib.import_module(f"tritoncaps.{module}")
    result = doctest.testmod(loaded, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0
    assert result.attempted > 0


@pytest.mark.parametrize("thing", [*FUNCTIONS, *CLASSES, *NETWORKS], ids=lambda x: x.__qualname__)
def test_arguments_are_described(thing):
    """The section Args names those of the signature, in its order."""
    parameters = inspect.signature(thing).parameters.values()
    expected = [f"**{p.name}" if p.kind == p.VAR_KEYWORD else p.name for p in parameters if p.name != "self"]
    docstring = inspect.cleandoc(thing.__doc__)
    section = re.search(r"^Args:\n((?:    .*\n|\n)+)", docstring + "\n", re.MULTILINE)
    found = re.findall(r"^    (\*{0,2}\w+): ", section.group(1), re.MULTILINE) if section else []
    assert sorted(found) == sorted(expected)


def test_routed_layers_describe_shapes_errors_and_an_example():
    for thing in (tritoncaps.ConvCaps2d, tritoncaps.ClassCaps, tritoncaps.GraphCaps, tritoncaps.VectorCaps):
        assert all(f"\n    {title}:\n" in thing.__doc__ for title in ("Args", "Shape", "Raises", "Example")), thing
