"""Docstrings of public names: their examples run, and they have the sections that PyTorch users know."""

import ast
import dataclasses
import doctest
import importlib
import inspect
import re
import textwrap
from pathlib import Path

import pytest

import tritoncaps

ROOT = Path(__file__).parent.parent

DOCTESTS = (
    "attacks",
    "capsules",
    "convert",
    "data.files",
    "data.images",
    "data.multimnist",
    "data.pipeline",
    "drawings",
    "functional",
    "inspect",
    "kernels.common.backends",
    "layers",
    "losses",
    "models.baselines",
    "models.capsnet",
    "models.matrix_capsnet",
    "models.pretrained",
    "models.tiny_capsnet",
    "regularization",
    "routing.base",
    "routing.dynamic",
    "routing.em",
    "routing.mixture",
    "routing.tempered",
    "routing.vb",
    "routing_map",
    "testing.checks",
    "testing.errors",
    "testing.problems",
    "training.config",
    "training.evaluation",
    "training.networks",
    "training.task",
    "vector_layers",
)
# pages of the reference whose functions and classes must have an example
WITH_EXAMPLES = (
    *("attacks", "capsules", "convert", "data", "drawings", "functional", "layers", "losses", "models"),
    *("regularization", "routing", "routing_map", "vector_layers"),
)

WITHOUT_SECTIONS = {"reset_parameters"}  # torch.nn.Linear and others have it, without arguments
ELSEWHERE = {"Config", "Inputs"}  # the help texts of the settings, and the string below the name, describe them


def modules_of_the_reference():
    """The modules that docs/site/reference.py shows."""
    for node in ast.parse((ROOT / "docs" / "site" / "reference.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PAGES":
            return [module for _, modules in ast.literal_eval(node.value).values() for module in modules]
    raise AssertionError("docs/site/reference.py must define PAGES")


def public_names(module):
    """Classes and functions: those in __all__, or else those that tritoncaps exports, or else all of the module."""
    loaded = importlib.import_module(f"tritoncaps.{module}")
    if hasattr(loaded, "__all__"):
        names = loaded.__all__
    else:
        own = [name for name, x in vars(loaded).items() if getattr(x, "__module__", None) == loaded.__name__]
        own = [name for name in own if not name.startswith("_")]
        names = [name for name in own if name in tritoncaps.__all__] or own
    found = [getattr(loaded, name) for name in names]
    return [x for x in found if inspect.isfunction(x) or (inspect.isclass(x) and not issubclass(x, Exception))]


def methods(cls):
    """The public methods that a class defines itself; a base class documents those that it defines, too."""
    for name, member in vars(cls).items():
        function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        inherited = any(name in vars(base) for base in cls.__mro__[1:])
        if inspect.isfunction(function) and not (name.startswith("_") or inherited or name in WITHOUT_SECTIONS):
            yield function


THINGS = list(dict.fromkeys(x for module in modules_of_the_reference() for x in public_names(module)))
CALLABLES = [*THINGS, *dict.fromkeys(f for x in THINGS if inspect.isclass(x) for f in methods(x))]


def section(thing, title):
    """The lines of a section of the docstring, or an empty string."""
    found = re.search(rf"^{title}:\n((?:    .*\n|\n)+)", inspect.cleandoc(thing.__doc__ or "") + "\n", re.MULTILINE)
    return found.group(1) if found else ""


def parameters_of(thing):
    """Names, with stars, and annotations."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    given = [p for p in inspect.signature(thing).parameters.values() if p.name not in ("self", "cls")]
    return {stars.get(p.kind, "") + p.name: str(p.annotation) for p in given}


def raised_by(thing):
    """Names of the errors in the raise statements of a function, or of a class when it is made and called."""
    if inspect.isclass(thing):
        made = () if dataclasses.is_dataclass(thing) else ("__init__",)  # that of a dataclass is generated
        own = [vars(thing).get(name) for name in (*made, "__post_init__", "forward")]
        return set().union(*(raised_by(function) for function in own if inspect.isfunction(function)))
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(thing))))
    errors = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    return {ast.unparse(error.func) for error in errors}


def full_name(thing):
    return f"{thing.__module__}.{thing.__qualname__}"


@pytest.mark.parametrize("module", DOCTESTS)
def test_examples_run(module):
    loaded = importlib.import_module(f"tritoncaps.{module}")
    result = doctest.testmod(loaded, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0
    assert result.attempted > 0


@pytest.mark.parametrize("thing", CALLABLES, ids=full_name)
def test_arguments_are_described(thing):
    """The section Args, or Attributes of a named tuple, has the parameters of the signature."""
    title = "Attributes" if inspect.isclass(thing) and issubclass(thing, tuple) else "Args"
    described = re.findall(r"^    (\*{0,2}\w+): ", section(thing, title), re.MULTILINE)
    assert sorted(described) == ([] if thing.__name__ in ELSEWHERE else sorted(parameters_of(thing)))


@pytest.mark.parametrize("thing", [x for x in CALLABLES if inspect.isfunction(x) and parameters_of(x)], ids=full_name)
def test_functions_describe_results_and_shapes(thing):
    """Returns if there is a result, Shape if a parameter is a tensor."""
    kinds = [kind for kind in parameters_of(thing).values() if not kind.startswith("Callable")]
    assert section(thing, "Shape") or not any(re.search(r"\bTensor\b", kind) for kind in kinds)
    assert section(thing, "Returns") or str(inspect.signature(thing).return_annotation) == "None"


@pytest.mark.parametrize("thing", CALLABLES, ids=full_name)
def test_errors_are_described(thing):
    """Raises has the errors that the function itself raises."""
    described = re.findall(r"^    (\w+): ", section(thing, "Raises"), re.MULTILINE)
    assert raised_by(thing) - set(described) == set()


@pytest.mark.parametrize("module", [m for m in modules_of_the_reference() if m.split(".")[0] in WITH_EXAMPLES])
def test_functions_and_classes_have_examples(module):
    """Not named tuples, which functions return."""
    things = [x for x in public_names(module) if inspect.isfunction(x) or not issubclass(x, tuple)]
    assert [x.__qualname__ for x in things if not section(x, "Example")] == []


def test_layers_describe_shapes_errors_and_an_example():
    layers = [x for module in ("layers", "vector_layers") for x in public_names(module)]
    assert len(layers) >= 10
    for layer in layers:
        assert all(section(layer, title) for title in ("Args", "Shape", "Raises", "Example")), layer
