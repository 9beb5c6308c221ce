"""Base class of networks that can return the capsules of all their layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor, nn

from tritoncaps.capsules import Capsules


class CapsuleNetwork(nn.Module):
    """A network from images to class capsules. With ``return_intermediate`` it returns the capsules of all layers by
    name. This class declares the types of both calls."""

    if TYPE_CHECKING:

        @overload
        def __call__(self, images: Tensor, return_intermediate: Literal[False] = False) -> Capsules: ...

        @overload
        def __call__(self, images: Tensor, return_intermediate: Literal[True]) -> dict[str, Capsules]: ...

        def __call__(self, images: Tensor, return_intermediate: bool = False) -> Capsules | dict[str, Capsules]: ...


def through(
    name: str, capsules: Capsules, layers: Mapping[str, nn.Module], return_intermediate: bool
) -> Capsules | dict[str, Capsules]:
    """Apply ``layers`` in order. Return the last capsules, or with ``return_intermediate`` all of them by name."""
    kept = {name: capsules} if return_intermediate else {}
    for layer in layers:
        capsules = layers[layer](capsules)
        if return_intermediate:
            kept[layer] = capsules
    return kept if return_intermediate else capsules
