"""Find and read data files. Any problem with a file raises a DataError, whose message names the file."""

from __future__ import annotations

import gzip
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO


class DataError(RuntimeError):
    """A data file is missing, damaged, or has an unexpected content."""


def data_folder(given: str | os.PathLike | None = None) -> Path:
    """The folder of the data files.

    Args:
        given: a folder; default: the environment variable TRITONCAPS_DATA, or else the folder tritoncaps in the user's
            cache directory.

    Returns:
        The folder, which may not exist yet.

    Example:
        >>> from tritoncaps import data
        >>> data.data_folder("images").name
        'images'
    """
    if given:
        return Path(given).expanduser()
    if os.environ.get("TRITONCAPS_DATA"):
        return Path(os.environ["TRITONCAPS_DATA"]).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "tritoncaps"


def find(folder: Path, dataset: str, names: Sequence[str]) -> Path:
    """The first of ``names`` that exists in ``folder``/``dataset`` or in ``folder`` itself."""
    for place in (folder / dataset, folder):
        for name in names:
            if (place / name).is_file():
                return place / name
    raise DataError(
        f"{dataset}: {' or '.join(names)} is neither in {folder / dataset} nor in {folder}; "
        f"get it with `tritoncaps data get {dataset}`, or set its folder with --data-dir or TRITONCAPS_DATA"
    )


def with_gz(name: str) -> list[str]:
    return [name, name + ".gz"]


def read(path: Path) -> bytes:
    """The whole file, unpacked if its name ends with .gz."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                return file.read()
        return path.read_bytes()
    except EOFError:
        raise DataError(f"{path} is truncated: its gzip stream ends early; get it again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is not a readable gzip file ({error}); get it again") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write ``path`` completely or not at all: ``write`` fills a temporary file, which then replaces ``path``."""
    with _temporary(path) as temporary:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of processes that were killed."""
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink(missing_ok=True)


@contextmanager
def _temporary(path: Path) -> Iterator[str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    os.chmod(name, 0o666 & ~_umask())
    try:
        yield name
    finally:
        Path(name).unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
