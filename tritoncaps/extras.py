"""Optional packages, which only some parts of the library need."""

from __future__ import annotations

from importlib import import_module

from tritoncaps.kernels.common.packages import MissingPackageError

__all__ = ["MissingPackageError", "require"]


def require(package: str, purpose: str, extra: str) -> None:
    """Check that ``package``, which the extra ``extra`` of tritoncaps installs, can be imported."""
    try:
        import_module(package)
    except ImportError:
        names = {"PIL": "pillow"}
        raise MissingPackageError(
            f"{purpose} needs the package {names.get(package, package)}: pip install 'tritoncaps[{extra}]'"
        ) from None
