"""The long description: README.md with absolute links, because an index shows it without the repository's files.

Everything else is in pyproject.toml, whose [project.urls] has the address.
"""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def long_description() -> str:
    source = re.search(r'^Source = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE).group(1)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\((?!https?:|#)", f"]({source}/", text)


setup(long_description=long_description(), long_description_content_type="text/markdown")
