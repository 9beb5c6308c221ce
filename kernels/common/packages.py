"""The error for a package that is not installed."""


class MissingPackageError(ImportError):
    """A package is not installed; the message says how to install it."""
