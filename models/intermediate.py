"""Capsules through the layers of a network, with what each layer gives if it is asked for."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from tritoncaps.capsules import Capsules


def through(
    name: str, capsules: Capsules, layers: Mapping[str, nn.Module], return_intermediate: bool
) -> Capsules | dict[str, Capsules]:
    """The capsules of the last of ``layers``, or, by name, ``capsules`` and those of every layer."""
    kept = {name: capsules} if return_intermediate else {}
    for layer in layers:
        capsules = layers[layer](capsules)
        if return_intermediate:
            kept[layer] = capsules
    return kept if return_intermediate else capsules
