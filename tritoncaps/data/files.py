"""Finding and reading data files. Whatever is wrong with one becomes a DataError: one sentence that names the file."""

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
    """A data file is missing, or is not what it should be."""


def data_folder(given: str | os.PathLike | None = None) -> Path:
    """``given``, or the environment's TRITONCAPS_DATA, or tritoncaps in the user's cache directory."""
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
        f"get it with `tritoncaps data get {dataset}`, or name its folder with --data-dir or TRITONCAPS_DATA"
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
    """``path`` is written as a whole or not at all, whatever happens meanwhile."""
    with _temporary(path) as temporary:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of writers that were killed."""
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
