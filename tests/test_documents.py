"""The README and the pages of docs/: their examples run, and their links, commands and files exist."""

import re
import shlex
from pathlib import Path

import pytest

from tritoncaps.cli import parser

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PLACES = [ROOT, ROOT / "tritoncaps", ROOT / "docs"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_examples_run(document, tmp_path, monkeypatch):
    """All blocks of a document in order, in one namespace; files that they make go elsewhere."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", document.read_text(), flags=re.DOTALL)
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(document), "exec"), namespace)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
        assert (document.parent / link).exists(), f"{document.name} links to {link}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_exist(document):
    """Every line `tritoncaps COMMAND ..` of a block has a command and options that exist, and so has `make TARGET`."""
    text = document.read_text()
    for line in re.findall(r"^    (?:torchrun .*-m )?tritoncaps (.+)$", text, flags=re.MULTILINE):
        arguments = shlex.split(re.split(r"  |#", line)[0])
        assert parser().parse_known_args(arguments)[1] == [], line
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert set(re.findall(r"(?:^    |`)make ([\w-]+)", text, flags=re.MULTILINE)) <= set(targets)


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_files_and_tests_exist(document):
    """Files in backticks with an extension, from the root or a folder of it, and names of tests."""
    text = document.read_text()
    files = re.findall(r"`([\w-]+/[\w./-]+\.(?:py|md|toml|ipynb|yml))[`:#]", text)
    assert [file for file in files if not any((place / file).exists() for place in PLACES)] == []
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    assert [name for name in re.findall(r"`(test_\w+)`", text) if f"def {name}(" not in tests] == []
