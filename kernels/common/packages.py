"""Packages that may be missing."""


class MissingPackageError(ImportError):
    """A package that is not installed; the sentence says how to install it."""
