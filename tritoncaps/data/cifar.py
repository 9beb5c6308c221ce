"""CIFAR-10: the Python batches, from the folder cifar-10-batches-py or directly from cifar-10-python.tar.gz.

The batches are pickles. The unpickler here accepts only NumPy arrays, so that an unknown file cannot run code.
"""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tritoncaps.data.files import DataError, find, read
from tritoncaps.data.images import ImageSet

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FOLDER = "cifar-10-batches-py"
BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}


def load_cifar10(split: str, folder: Path) -> ImageSet:
    """32x32 colour images, 50,000 for training and 10,000 for testing."""
    first = find(folder, "cifar10", [f"{FOLDER}/{BATCHES[split][0]}", "cifar-10-python.tar.gz"])
    if first.name.endswith(".tar.gz"):
        batches = _from_archive(first, BATCHES[split])
    else:
        batches = {name: read(find(folder, "cifar10", [f"{FOLDER}/{name}"])) for name in BATCHES[split]}
    images, labels = zip(*(_batch(content, first.parent / name) for name, content in batches.items()), strict=True)
    return ImageSet(torch.from_numpy(np.concatenate(images)), torch.from_numpy(np.concatenate(labels)), CLASSES)


def _from_archive(path: Path, names: list[str]) -> dict[str, bytes]:
    try:
        with tarfile.open(path, "r:gz") as archive:
            files = {name: archive.extractfile(f"{FOLDER}/{name}") for name in names}
            return {name: file.read() for name, file in files.items() if file is not None}
    except KeyError as error:
        raise DataError(f"{path} is not the CIFAR-10 archive: {error.args[0]}") from None
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DataError(f"{path} is truncated or not a tar.gz archive ({error}); get it again") from None


def _batch(content: bytes, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [N, 3, 32, 32] and labels of one batch."""
    try:
        batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
        pixels, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"], dtype=np.int64)
    except pickle.UnpicklingError as error:
        raise DataError(f"{path} is not a CIFAR-10 batch: {error}") from None
    except Exception as error:  # a corrupt pickle may fail in any way
        raise DataError(f"{path} is truncated or corrupt ({type(error).__name__}); get it again") from None
    if pixels.dtype != np.uint8 or pixels.shape != (len(labels), 3 * 32 * 32):
        raise DataError(f"{path} must hold bytes [{len(labels)}, 3072], but it holds {pixels.dtype} {pixels.shape}")
    if len(labels) and not 0 <= labels.min() <= labels.max() <= 9:
        raise DataError(f"{path} must hold labels 0 to 9, but they range from {labels.min()} to {labels.max()}")
    return pixels.reshape(-1, 3, 32, 32), labels


class _ArraysOnly(pickle.Unpickler):
    """Allows only the classes and functions of a pickled NumPy array of bytes."""

    _reconstruct: Any = np.zeros(0).__reduce__()[0]  # its module depends on the version of NumPy

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return type(self)._reconstruct
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):  # how Python 3 pickles bytes in protocol 2
            return _encode
        raise pickle.UnpicklingError(f"it uses {module}.{name}, which is not part of an array")


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it uses the encoding {encoding!r}")
    return text.encode("latin1")
