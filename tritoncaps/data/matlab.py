"""A small reader of MATLAB's .mat files, version 5. It reads numeric arrays and structs, as in SVHN and affNIST.

It avoids a dependency on SciPy. The format is a header of 128 bytes, then elements of a tag (type, bytes) and data,
padded to 8 bytes. An element may be compressed by zlib. Arrays are column-major.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tritoncaps.data.files import DataError

NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
MATRIX, COMPRESSED = 14, 15
STRUCT = 2
CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}


def read_mat(content: bytes, path: Path) -> dict[str, Any]:
    """The variables of a file's ``content``: arrays, and structs as dictionaries. ``path`` is for messages."""
    if len(content) < 128 or content[124:128] not in (b"\x00\x01IM", b"\x01\x00MI"):
        raise DataError(f"{path} is not a MATLAB file of version 5")
    order = "<" if content[126:128] == b"IM" else ">"
    try:
        return dict(_variables(memoryview(content)[128:], order))
    except (struct.error, zlib.error, ValueError, IndexError, KeyError, StopIteration) as error:
        raise DataError(f"{path} is truncated or corrupt as a MATLAB file ({error}); get it again") from None


def _variables(data: memoryview, order: str) -> Iterator[tuple[str, Any]]:
    for kind, body in _elements(data, order):
        if kind == COMPRESSED:
            yield from _variables(memoryview(zlib.decompress(body)), order)
        elif kind == MATRIX:
            name, value = _matrix(body, order)
            if value is not None:
                yield name, value


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """The type and the body of each element."""
    place = 0
    while place < len(data):
        kind, size = struct.unpack_from(order + "II", data, place)
        if kind >> 16:  # small: type and size share four bytes, the data are the other four
            kind, size = kind & 0xFFFF, kind >> 16
            body, step = data[place + 4 : place + 4 + size], 8
        else:
            body = data[place + 8 : place + 8 + size]
            step = 8 + (size if kind == COMPRESSED else (size + 7) // 8 * 8)
        if len(body) != size:
            raise ValueError(f"an element of {size} bytes has {len(body)}")
        yield kind, body
        place += step


def _matrix(body: memoryview, order: str) -> tuple[str, Any]:
    """Name and value of an array. The value is None for classes that this reader does not support, such as text."""
    elements = _elements(body, order)
    flags, shape, name = (next(elements) for _ in range(3))
    kind = struct.unpack_from(order + "I", flags[1])[0] & 0xFF
    sizes = tuple(int(n) for n in _numbers(*shape, order))
    text = bytes(name[1]).decode("latin-1")
    if kind == STRUCT:
        return text, _struct(elements, order)
    if kind not in CLASSES:
        return text, None
    values = _numbers(*next(elements), order)
    if len(values) != prod(sizes):
        raise ValueError(f"array {text!r} of shape {sizes} has {len(values)} values")
    return text, values.astype(CLASSES[kind], copy=False).reshape(sizes, order="F")


def _struct(elements: Iterator[tuple[int, memoryview]], order: str) -> dict[str, Any]:
    """The fields of a struct's first element."""
    width = int(_numbers(*next(elements), order)[0])
    names = bytes(next(elements)[1])
    fields = [names[i : i + width].split(b"\0")[0].decode("latin-1") for i in range(0, len(names), width)]
    return {field: _matrix(body, order)[1] for field, (_, body) in zip(fields, elements, strict=False) if len(body)}


def _numbers(kind: int, body: memoryview, order: str) -> np.ndarray:
    return np.frombuffer(body, np.dtype(order + NUMBERS[kind]))
