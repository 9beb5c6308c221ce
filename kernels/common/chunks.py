"""Division of a batch into chunks of images: the memory of a pass grows with the chunk and not with the batch.

Images are independent, so their outputs and gradients do not depend on the chunks, to the last bit. The gradient of a
weight is a sum over images, and the chunks determine its order. So the chunks depend only on sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ALL = slice(None)  # images
WORKSPACE = 512 << 20  # bytes for the images of a chunk, without inputs, outputs and tensors for the backward pass


def chunks_of(images: int, bytes_of_image: int) -> list[slice]:
    """Slices of the batch, of nearly the same length: at least one image, and no more than the workspace holds."""
    most = max(1, WORKSPACE // max(1, bytes_of_image))
    if images <= most:
        return [slice(0, images)]
    count = -(-images // most)
    return [slice(images * i // count, images * (i + 1) // count) for i in range(count)]


def in_chunks(route: Callable[..., Sequence[Tensor]], chunks: Sequence[slice], *tensors: Tensor) -> Sequence[Tensor]:
    """``route(*tensors)``, chunk by chunk. The first axis of all tensors and results is that of the images."""
    if len(chunks) == 1:
        return route(*tensors)
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    found = [route(*parts) for parts in zip(*(x.split(sizes) for x in tensors), strict=True)]
    return [torch.cat(parts) for parts in zip(*found, strict=True)]
