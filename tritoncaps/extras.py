"""Packages that only some parts of the library need."""

from __future__ import annotations

from importlib import import_module


class MissingPackageError(ImportError):
    """A package that is not installed; the sentence says how to install it."""


def require(package: str, purpose: str, extra: str) -> None:
    """Import ``package``, which is part of the extra ``extra`` of tritoncaps."""
    try:
        import_module(package)
    except ImportError:
        names = {"PIL": "pillow"}
        raise MissingPackageError(
            f"{purpose} needs the package {names.get(package, package)}: pip install 'tritoncaps[{extra}]'"
        ) from None
