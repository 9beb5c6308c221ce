"""Generates the pages of the API reference from the public names of each module. A public name without a docstring is
an error. MkDocs loads this file as a hook, griffe loads it as an extension."""

import ast
import re
import textwrap
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

PACKAGE = "tritoncaps"
ASKED_OF_A_SERVER, WORKER = "https://unpkg.com/iframe-worker/shim", "site/worker.js"

# page: its title, and the modules whose public names it shows
PAGES = {
    "capsules": ("Capsules and maps", ["capsules", "routing_map"]),
    "layers": ("Layers", ["layers"]),
    "vector_layers": ("Vector layers", ["vector_layers"]),
    "routing": ("Routings", ["routing"]),
    "losses": ("Losses", ["losses"]),
    "regularization": ("Regularization", ["regularization"]),
    "functional": ("Functions", ["functional"]),
    "reference": ("Definitions", ["reference"]),
    "models": ("Models", ["models", "models.baselines", "models.pretrained"]),
    "data": ("Data", ["data"]),
    "training": ("Training", ["training"]),
    "inspect": ("Inspection", ["inspect", "drawings"]),
    "attacks": ("Attacks", ["attacks"]),
    "testing": ("Testing", ["testing"]),
    "convert": ("Weights of other libraries", ["convert"]),
    "backends": ("Backends", ["kernels.common.backends"]),
}

# methods of subclasses that torch.nn.Module, Routing, or the docstring of the layer document
INHERITED = {"extra_repr", "forward", "new_parameters", "reset_parameters", "route"}

ROLE = re.compile(r":(?:class|func|meth|data|mod):`(~?)([\w.]+)`")  # as in :class:`~package.Name`
SHAPE = re.compile(r"^Shape:\n((?:    .*\n?)+)", re.MULTILINE)


class Sections(griffe.Extension):
    """Converts docstrings for griffe: cross-references to links, and the section titles that it does not have."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            text = SHAPE.sub(shape, ROLE.sub(link, obj.docstring.value))
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
        if obj.is_class and obj.docstring:
            describe_settings(obj)


def describe_settings(cls: Any) -> None:
    """For fields like ``name: str = _setting(default, "help", ...)``: show the default and the help text."""
    calls = {name: member.value for name, member in cls.members.items() if member.is_attribute}
    calls = {name: call for name, call in calls.items() if str(call).startswith("_setting(")}
    for name, call in calls.items():
        cls.members[name].value = call.arguments[0]
        for parameter in cls.parameters:
            if parameter.name == name:
                parameter.default = call.arguments[0]
    lines = [f"    {name}: {ast.literal_eval(str(call.arguments[1]))}" for name, call in calls.items()]
    if lines:
        cls.docstring.value = cls.docstring.value.replace(
            "\nRaises:", "\nAttributes:\n" + "\n".join(lines) + "\n\nRaises:"
        )


def shape(section: re.Match[str]) -> str:
    """A bold title and a list, like the other sections; griffe would make a box of it."""
    return "**Shape:**\n\n" + textwrap.dedent(section.group(1)).replace("*", r"\*")


def link(role: re.Match[str]) -> str:
    short, path = role.groups()
    return f"[`{path.rpartition('.')[2] if short else path}`][{path}]"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    package = load(config)
    for page, (title, modules) in PAGES.items():
        names = {f"{PACKAGE}.{module}": public(package, module) for module in modules}
        files.append(File.generated(config, f"reference/{page}.md", content=text(package, title, names)))
    files.append(File.generated(config, "reference/index.md", content=overview(package)))
    missing = sorted(set(without_docstring(package)))
    if missing:
        raise PluginError("these public names have no docstring: " + ", ".join(missing))
    return files


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Replace the address of the script of the theme's offline search by a file of the site."""
    return output.replace(ASKED_OF_A_SERVER, get_relative_url(WORKER, page.url))


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    return output_content.replace(ASKED_OF_A_SERVER, WORKER)


def load(config: MkDocsConfig) -> Any:
    """Read the package, without importing it, from the folder that `make joined` makes."""
    handlers = config.plugins["mkdocstrings"].config.handlers
    paths = handlers["python"]["paths"]
    return griffe.load(PACKAGE, search_paths=paths, try_relative_path=False)


def public(package: Any, module: str) -> list[str]:
    """The public names of a module: its __all__, or else its names in tritoncaps.__all__, or else all its names."""
    found = package[module]
    if found.exports:
        return [str(name) for name in found.exports if not found[str(name)].is_module]
    exported = {target(package[str(name)]).path for name in package.exports if not str(name).startswith("__")}
    own = [name for name, member in found.members.items() if not name.startswith("_") and not member.is_alias]
    return [name for name in own if found[name].path in exported] or [
        name for name in own if found[name].is_class or found[name].is_function
    ]


def target(member: Any) -> Any:
    return member.final_target if member.is_alias else member


def text(package: Any, title: str, names: dict[str, list[str]]) -> str:
    """A page: for each module, its docstring and its names."""
    parts = [f"# {title}"]
    for module, members in names.items():
        docstring = target(package[module.partition(".")[2]]).docstring
        if docstring:
            parts.append(as_markdown(docstring.value))
        parts += [f"::: {module}.{name}" for name in members]
    return "\n\n".join(parts) + "\n"


def as_markdown(docstring: str) -> str:
    """The first paragraph of a module's docstring. The rest is for readers of the code."""
    return ROLE.sub(r"`\2`", docstring.split("\n\n")[0])


def overview(package: Any) -> str:
    """The overview page: a table for each page, with its names and the first paragraph of their docstrings."""
    parts = [
        "# API reference",
        "All public names, generated from their docstrings.",
    ]
    for page, (title, modules) in PAGES.items():
        parts.append(f"## [{title}]({page}.md)")
        rows = [
            f"| [`{name}`][{PACKAGE}.{module}.{name}] | {first_line(package[module][name])} |"
            for module in modules
            for name in public(package, module)
        ]
        parts.append("\n".join(["| name | |", "| --- | --- |", *rows]))
    return "\n\n".join(parts) + "\n"


def first_line(member: Any) -> str:
    docstring = target(member).docstring
    line = " ".join(docstring.value.split("\n\n")[0].split()) if docstring else ""
    return ROLE.sub(r"`\2`", line).replace("|", "\\|").replace("``", "`")


def without_docstring(package: Any) -> Any:
    """Paths of the public names, and of public methods of their classes, that have no docstring."""
    exported = [target(package[str(name)]) for name in package.exports if not str(name).startswith("__")]
    shown = [target(package[m][name]) for _, modules in PAGES.values() for m in modules for name in public(package, m)]
    for member in [*exported, *shown]:
        if not member.docstring:
            yield member.path
        if member.is_class:
            for name, method in member.members.items():
                hidden = name.startswith("_") or name in INHERITED or method.is_alias
                if not hidden and (method.is_function or "property" in method.labels) and not method.docstring:
                    yield method.path
