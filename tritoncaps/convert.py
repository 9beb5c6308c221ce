"""Load the transformation matrices of other libraries.

Our layout is ``weight`` [*kernel_size, B, C, 4, 4] with V = M W. Other libraries store a layer of B child types, C
parent types and a K x K kernel in one of these layouts:

    [K*K*B, C, 4, 4] or [1, K*K*B, C, 4, 4]     slots and child types in one axis, child types fastest
    [B, K, K, 4, C*4]                           parent types next to each other, for one matrix product

K is 1 for class capsules, whose positions share the matrices.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from tritoncaps._internal.checks import check_tensor
from tritoncaps.layers import ClassCaps, ConvCaps2d


def convert_weight(layer: ConvCaps2d | ClassCaps, weight: Tensor) -> Tensor:
    """Convert the weight of another library to the layout of ``layer.weight``.

    Args:
        layer: a layer with the same sizes.
        weight: the matrices of the other library.

    Shape:
        - weight: [K*K*B, C, 4, 4], [1, K*K*B, C, 4, 4] or [B, K, K, 4, C*4]
        - result: the shape of ``layer.weight``

    Returns:
        The matrices in the layout of ``layer.weight``.

    Raises:
        ValueError: if the weight has none of these shapes.

    Example:
        >>> import torch
        >>> from tritoncaps import ConvCaps2d
        >>> from tritoncaps.convert import convert_weight
        >>> convert_weight(ConvCaps2d(8, 16, kernel_size=3), torch.randn(8, 3, 3, 4, 16 * 4)).shape
        torch.Size([3, 3, 8, 16, 4, 4])
    """
    check_tensor("weight", weight)
    height, width = layer.kernel_size or (1, 1)
    types, classes = layer.in_caps, layer.out_caps
    sizes = {"h": height, "w": width, "b": types, "c": classes}
    layouts = {
        (height * width * types, classes, 4, 4): "(h w b) c k j -> h w b c k j",
        (1, height * width * types, classes, 4, 4): "1 (h w b) c k j -> h w b c k j",
        (types, height, width, 4, classes * 4): "b h w k (c j) -> h w b c k j",
    }
    pattern = layouts.get(tuple(weight.shape))
    if pattern is None:
        expected = " or ".join(str(list(shape)) for shape in layouts)
        raise ValueError(f"weight must have shape {expected} for this layer, but it has {list(weight.shape)}")
    known = {name: size for name, size in sizes.items() if name in pattern}
    return rearrange(weight, pattern, **known).reshape(layer.weight.shape)


@torch.no_grad()
def load_weight(layer: ConvCaps2d | ClassCaps, weight: Tensor) -> None:
    """Convert the weight of another library and copy it into ``layer``.

    Args:
        layer: a layer with the same sizes.
        weight: the matrices of the other library.

    Shape:
        - weight: [K*K*B, C, 4, 4], [1, K*K*B, C, 4, 4] or [B, K, K, 4, C*4]

    Raises:
        ValueError: if the weight has none of these shapes.

    Example:
        >>> import torch
        >>> from tritoncaps import ConvCaps2d
        >>> from tritoncaps.convert import load_weight
        >>> load_weight(ConvCaps2d(8, 16, kernel_size=3), torch.randn(1, 3 * 3 * 8, 16, 4, 4))
    """
    layer.weight.copy_(convert_weight(layer, weight))
