"""A batch in chunks of images, so that the memory of a pass grows with a chunk and not with the batch.

Images are independent, so chunks change no bit of their outputs and gradients. The gradient of a weight is a sum over
images, whose order the chunks decide: so they depend on sizes only.
"""

from __future__ import annotations

from tritoncaps.kernels.common.numerics import POSE

ALL = slice(None)  # images
WORKSPACE = 512 << 20  # bytes that the images of a chunk may take, beyond inputs, outputs and what is kept
# numbers of each parent: slopes of an iteration, moments; of each child: copies of its pose, activation and gradients
SLOPES, MOMENTS, CHILD = 4 * POSE + 3, 2 * POSE + 1, 2 * (POSE + 1)


def chunks_of(images: int, parents: int, children: int, groups: int, iterations: int, itemsize: int) -> list[slice]:
    """Slices of the batch, of nearly the same length: at least one image, and no more than the workspace holds.

    ``parents``, ``children`` and ``groups`` (a number for each child that competes) are those of one image.
    """
    numbers = (iterations * SLOPES + MOMENTS) * parents + CHILD * children + 2 * (iterations - 1) * groups
    most = max(1, WORKSPACE // max(1, numbers * itemsize))
    count = max(1, -(-images // most))
    return [slice(images * i // count, images * (i + 1) // count) for i in range(count)]
