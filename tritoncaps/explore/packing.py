"""Compresses arrays for data.js, which unpacks them: a table, and all bytes in one gzip stream in base64.

| kind | bytes of each number | the number |
| --- | --- | --- |
| float16 | 2 | the number, rounded to one part in 256: the last bits are zero, so that gzip works better |
| int16 | 2 | the number |
| uint8 | 1 | q / 255, for numbers in [0, 1] |
| root8 | 1 | (q / 255)^2, for numbers in [0, 1] with important small values |
| rows8 | 1, and 4 for each row | q times the scale of the row; a row is an entry of the first axis |
"""

from __future__ import annotations

import base64
import gzip
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

KINDS = ("float16", "int16", "uint8", "root8", "rows8")


class Packed(NamedTuple):
    """Compressed arrays. ``table``: start, kind and shape of each array, by name. ``content``: gzip in base64."""

    table: dict[str, dict[str, Any]]
    content: str


def pack(arrays: dict[str, tuple[str, Tensor]]) -> Packed:
    """Compress arrays. ``arrays`` has a kind of the table above and the numbers, by name."""
    table: dict[str, dict[str, Any]] = {}
    parts: list[bytes] = []
    begin = 0
    for name, (kind, values) in arrays.items():
        part = encode(kind, values)
        part += bytes(-len(part) % 8)  # typed arrays of JavaScript start at multiples of their item size
        table[name] = {"begin": begin, "kind": kind, "shape": list(values.shape)}
        parts.append(part)
        begin += len(part)
    stream = gzip.compress(b"".join(parts), 9, mtime=0)
    return Packed(table, base64.b64encode(stream).decode("ascii"))


def encode(kind: str, values: Tensor) -> bytes:
    array = values.detach().cpu().double().numpy()
    if kind == "float16":
        bits = array.clip(-65000, 65000).astype("<f2").view("<u2")
        return ((bits + np.uint16(4)) & np.uint16(0xFFF8)).tobytes()
    if kind == "int16":
        return array.astype("<i2").tobytes()
    if kind == "uint8":
        return _rounded(array.clip(0, 1) * 255, np.uint8)
    if kind == "root8":
        return _rounded(np.sqrt(array.clip(0, 1)) * 255, np.uint8)
    if kind == "rows8":
        rows = array.reshape(len(array), -1)
        scale = np.abs(rows).max(axis=1).clip(1e-30) / 127
        return scale.astype("<f4").tobytes() + _rounded(rows / scale[:, None], np.int8)
    raise ValueError(f"kind must be one of {', '.join(KINDS)}, but it is {kind!r}")


def _rounded(array: np.ndarray, dtype: type) -> bytes:
    return np.rint(array).astype(dtype).tobytes()
