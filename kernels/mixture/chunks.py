"""Division of a batch into chunks of images: the memory of a pass grows with the chunk and not with the batch.

Images are independent, so their outputs and gradients do not depend on the chunks, to the last bit. The gradient of a
weight is a sum over images, and the chunks determine its order. So the chunks depend only on sizes.
"""

from __future__ import annotations

from tritoncaps.kernels.common.numerics import POSE

ALL = slice(None)  # images
WORKSPACE = 512 << 20  # bytes for the images of a chunk, without inputs, outputs and tensors for the backward pass
# numbers for each parent: slopes of an iteration, moments; for each child: copies of pose, activation and gradients
SLOPES, MOMENTS, CHILD = 4 * POSE + 3, 2 * POSE + 1, 2 * (POSE + 1)


def chunks_of(images: int, parents: int, children: int, groups: int, iterations: int, itemsize: int) -> list[slice]:
    """Slices of the batch, of nearly the same length: at least one image, and no more than the workspace holds.

    ``parents``, ``children`` and ``groups`` (a number for each child that competes) are those of one image.
    """
    numbers = (iterations * SLOPES + MOMENTS) * parents + CHILD * children + 2 * (iterations - 1) * groups
    most = max(1, WORKSPACE // max(1, numbers * itemsize))
    count = max(1, -(-images // most))
    return [slice(images * i // count, images * (i + 1) // count) for i in range(count)]
