"""Small files in the official formats of the data sets, for tests of the loaders."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np

NORB_MAGIC = {"uint8": 0x1E3D4C55, "int32": 0x1E3D4C54}
STEMS = {
    "train": "smallnorb-5x46789x9x18x6x2x96x96-training",
    "test": "smallnorb-5x01235x9x18x6x2x96x96-testing",
}


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def norb(array: np.ndarray) -> bytes:
    sizes = [*array.shape, *[1] * (3 - array.ndim)]
    header = struct.pack(f"<II{len(sizes)}I", NORB_MAGIC[array.dtype.name], array.ndim, *sizes)
    return header + array.astype(array.dtype.newbyteorder("<")).tobytes()


def element(kind: int, body: bytes) -> bytes:
    if 0 < len(body) <= 4:  # MATLAB's small elements
        return struct.pack("<I", len(body) << 16 | kind) + body.ljust(4, b"\0")
    return struct.pack("<II", kind, len(body)) + body + b"\0" * (-len(body) % 8)


def matrix(name: str, value: np.ndarray | dict) -> bytes:
    """A MATLAB array of bytes or doubles, or a struct."""
    if isinstance(value, dict):
        names = b"".join(field.encode().ljust(32, b"\0") for field in value)
        parts = [element(5, struct.pack("<I", 32)), element(1, names), *(matrix("", v) for v in value.values())]
        kind, shape = 2, (1, 1)
    else:
        number, kind = {"uint8": (2, 9), "float64": (9, 6)}[value.dtype.name]
        parts, shape = [element(number, value.tobytes(order="F"))], value.shape
    head = [element(6, struct.pack("<II", kind, 0)), element(5, struct.pack(f"<{len(shape)}i", *shape))]
    return element(14, b"".join([*head, element(1, name.encode()), *parts]))


def mat(variables: dict, compress: bool) -> bytes:
    header = b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM"
    body = b""
    for name, value in variables.items():
        array = matrix(name, value)
        packed = zlib.compress(array)
        body += struct.pack("<II", 15, len(packed)) + packed if compress else array
    return header + body


def write(path: Path, content: bytes) -> Path:
    """Write a file, compressed if the name ends with .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_mnist(folder: Path, count: int = 40, gz: bool = True, name: str = "mnist") -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (count, 28, 28)).astype(np.uint8)
    labels = np.arange(count, dtype=np.uint8) % 10
    for prefix in ("train", "t10k"):
        write(folder / name / f"{prefix}-images-idx3-ubyte{'.gz' * gz}", idx(images))
        write(folder / name / f"{prefix}-labels-idx1-ubyte{'.gz' * gz}", idx(labels))
    return images, labels


def write_smallnorb(folder: Path, count: int = 20, gz: bool = True) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Write images of noise; the position of a brighter region depends on the category."""
    pairs = np.random.default_rng(0).integers(0, 128, (count, 2, 96, 96)).astype(np.uint8)
    categories = np.arange(count, dtype=np.int32) % 5
    n = np.arange(count)
    places = (np.s_[:, :40], np.s_[:, 56:], np.s_[..., :40], np.s_[..., 56:], np.s_[:, 30:66, 30:66])
    for pair, category in zip(pairs, categories, strict=True):
        pair[places[category]] += 100
    info = np.stack([n % 10, n % 9, 2 * (n % 18), n % 6], axis=1).astype(np.int32)
    for stem in STEMS.values():
        for kind, array in (("dat", pairs), ("cat", categories), ("info", info)):
            write(folder / "smallnorb" / f"{stem}-{kind}.mat{'.gz' * gz}", norb(array))
    return pairs, categories, info


def cifar_batch(count: int, seed: int) -> tuple[bytes, np.ndarray, list[int]]:
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, (count, 3072)).astype(np.uint8)
    labels = [int(k) for k in random.integers(0, 10, count)]
    batch = {b"batch_label": b"a batch", b"labels": labels, b"data": pixels, b"filenames": [b"x.png"] * count}
    return pickle.dumps(batch, protocol=2), pixels, labels


def write_cifar10(folder: Path, archive: bool) -> tuple[np.ndarray, list[int]]:
    """Write the files of the training split."""
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    batches = {name: cifar_batch(4, seed) for seed, name in enumerate(names)}
    place = folder / "cifar10"
    place.mkdir(parents=True, exist_ok=True)
    if archive:
        with tarfile.open(place / "cifar-10-python.tar.gz", "w:gz") as tar:
            for name, (content, _, _) in batches.items():
                member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    else:
        for name, (content, _, _) in batches.items():
            write(place / "cifar-10-batches-py" / name, content)
    train = [batches[name] for name in names[:5]]
    return np.concatenate([pixels for _, pixels, _ in train]), [k for _, _, labels in train for k in labels]
