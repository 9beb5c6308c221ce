"""The documentation site: its reference has every public name, and a name without a docstring stops the build.
`make docs`, which is a part of `make test`, builds all of it."""

import importlib.util
from pathlib import Path

import pytest

import tritoncaps

griffe = pytest.importorskip("griffe")
pytest.importorskip("mkdocs")

ROOT = Path(__file__).parent.parent


@pytest.fixture
def reference():
    spec = importlib.util.spec_from_file_location("site_reference", ROOT / "docs" / "site" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def package(folder, monkeypatch, reference, source):
    (folder / "small").mkdir()
    (folder / "small" / "__init__.py").write_text("from small.layers import Layer\n__all__ = ['Layer']\n")
    (folder / "small" / "layers.py").write_text(source)
    monkeypatch.setattr(reference, "PACKAGE", "small")
    monkeypatch.setattr(reference, "PAGES", {"layers": ("Layers", ["layers"])})
    return griffe.load("small", search_paths=[folder], try_relative_path=False)


def test_names_without_docstrings_are_found(tmp_path, monkeypatch, reference):
    source = (
        "class Layer:\n    'A layer.'\n    def forward(self): ...\n    def _own(self): ...\n    def weigh(self): ...\n"
    )
    found = package(tmp_path, monkeypatch, reference, source)
    assert set(reference.without_docstring(found)) == {"small.layers.Layer.weigh"}


def test_pages_are_made_of_the_public_names(tmp_path, monkeypatch, reference):
    found = package(tmp_path, monkeypatch, reference, "class Layer:\n    'A :class:`~x.Y` layer.'\nclass Hidden: ...\n")
    assert reference.public(found, "layers") == ["Layer"]
    assert "| [`Layer`][small.layers.Layer] | A `x.Y` layer. |" in reference.overview(found)


def test_docstrings_are_converted_for_the_site(tmp_path, reference):
    """Shape becomes a list with a title, cross-references become links, and settings show default and help."""
    (tmp_path / "small.py").write_text(
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Config:\n"
        "    'Settings.\\n\\n    Raises:\\n        ValueError: if it is wrong.\\n    '\n"
        "    steps: int = _setting(10, 'number of steps', least=1)\n"
        "def f(x):\n    'A :func:`~small.f`.\\n\\n    Shape:\\n        - x: [N, *space]\\n    '\n"
    )
    extensions = griffe.load_extensions(reference.Sections)
    found = griffe.load("small", search_paths=[tmp_path], extensions=extensions, try_relative_path=False)
    assert found["f"].docstring.value == "A [`f`][small.f].\n\n**Shape:**\n\n- x: [N, \\*space]"
    config = found["Config"]
    assert "Attributes:\n    steps: number of steps\n\nRaises:" in config.docstring.value
    assert str(config.parameters["steps"].default) == "10"


def test_every_name_of_the_package_has_a_page(reference):
    """The module that defines it has one."""
    defined = {getattr(tritoncaps, name).__module__ for name in tritoncaps.__all__ if name[0].isupper()}
    pages = {f"tritoncaps.{module}" for _, modules in reference.PAGES.values() for module in modules}
    assert {name for name in defined if not any(f"{name}.".startswith(f"{page}.") for page in pages)} == set()


def test_the_navigation_names_files_and_generated_pages(reference):
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = {line.rsplit(" ", 1)[-1] for line in text.splitlines() if line.endswith(".md")}
    generated = {f"reference/{page}.md" for page in (*reference.PAGES, "index")}
    assert {name for name in named - generated if not (ROOT / "docs" / name).is_file()} == set()
    assert generated <= named


def test_pages_ask_no_server_for_scripts(reference):
    """The script of the offline search is that of the site, wherever a page is."""

    class Page:
        url = "reference/layers.html"

    output = f'<script src="{reference.ASKED_OF_A_SERVER}"></script>'
    assert reference.on_post_page(output, Page, None) == '<script src="../site/worker.js"></script>'
    assert (ROOT / "docs" / reference.WORKER).is_file()
