"""The memory layout of parents and weights: rows of 16 numbers, one number for each type of a block.

    statistics [N, P, blocks, 4 + 2 H, 16]           the Gaussian of a parent
    slopes     [N, P, blocks, 3 + 3 H, 16]           its gradients
    moments    [splits, N, P, blocks, 1 + 2 H, 16]   the moments of its votes
    weight     [K, B, blocks, 16, 16]                rows are the entries of a 4x4 matrix

H is the number of pose entries. The C types are divided into blocks of 16. The distance between rows is the same in
every layer, so all layers use the same compiled kernel, and every row is aligned for any batch size. The last block is
padded with types whose mean, precision, slopes and weight are zero and whose constant is -inf: their assignments are
zero, and loads need no mask.
"""

from __future__ import annotations

import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

TYPES = tl.constexpr(16)  # parent types of a block
ENTRIES = tl.constexpr(16)  # entries of a 4x4 pose; also the largest number of entries of a stored vote in a tuple

# rows of statistics
CONSTANT = tl.constexpr(0)  # log a - 1/2 sum_h log(2 pi variance_h), or the log_weight of any fit
LOGIT = tl.constexpr(1)
SUPPORT = tl.constexpr(2)
LOG_VARIANCE = tl.constexpr(3)  # summed over h
MEAN = tl.constexpr(4)  # H rows, followed by H rows of precision = 1 / (2 variance)

# rows of slopes
OFFSET = tl.constexpr(0)
TO_BETA_U = tl.constexpr(1)  # the terms of this parent in the gradients of beta_u and beta_a
TO_BETA_A = tl.constexpr(2)
LINEAR = tl.constexpr(3)  # H rows, followed by H rows of quadratic and H rows of origin: see `votes.about_centre`

# rows of moments
TOTAL = tl.constexpr(0)
FIRST = tl.constexpr(1)  # H rows, followed by H rows of second moments


def statistics_rows(entries: int) -> int:
    return MEAN.value + 2 * entries


def slopes_rows(entries: int) -> int:
    return LINEAR.value + 3 * entries


def moments_rows(entries: int) -> int:
    return FIRST.value + 2 * entries


def type_blocks(types: int) -> int:
    return -(-types // TYPES.value)


def groups_shape(images: int, groups: int, child_types: int, types: int, by_type: bool) -> tuple[int, ...]:
    """The shape of numbers of groups: one for each child type, or, if only positions compete, one for each parent type
    of each child type."""
    return images, groups, child_types, *([type_blocks(types), TYPES.value] if by_type else [])


def pack(x: Tensor, fill: float = 0.0) -> Tensor:
    """[..., rows, C] -> [..., blocks, rows, 16]."""
    missing = -x.shape[-1] % TYPES.value
    padded = F.pad(x, (0, missing), value=fill) if missing else x
    return padded.unflatten(-1, (-1, TYPES.value)).transpose(-2, -3).contiguous()


def pack_weight(weight: Tensor) -> Tensor:
    """[K, B, C, 4, 4] -> [K, B, blocks, 16, 16]."""
    K, B, C = weight.shape[:3]
    missing = -C % TYPES.value
    padded = F.pad(weight, (0, 0, 0, 0, 0, missing)) if missing else weight
    return padded.reshape(K, B, type_blocks(C), TYPES.value, ENTRIES.value).transpose(3, 4).contiguous()


def empty_weight(weight: Tensor) -> Tensor:
    """An empty tensor for the result of `pack_weight`."""
    K, B, C = weight.shape[:3]
    return weight.new_empty(K, B, type_blocks(C), ENTRIES.value, TYPES.value)


def unpack(rows: Tensor, types: int) -> Tensor:
    """[..., blocks, rows, 16] -> [..., rows, C]."""
    return rows.transpose(-2, -3).flatten(-2)[..., :types]
