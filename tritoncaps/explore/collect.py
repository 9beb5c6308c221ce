"""Computes the data of the page: numbers of every layer, iteration and epsilon, for a few images."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tritoncaps import attacks, functional, inspect
from tritoncaps.capsules import Capsules
from tritoncaps.models import CapsNet
from tritoncaps.routing import MixtureRouting
from tritoncaps.waiting import Waiting

EPSILONS = (0.0, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3)
LARGE = 200_000  # a weight with more numbers is stored with one byte for each

# arrays with an axis of images: their kind in packing.py, and this axis
OF_IMAGES = {
    "pictures": ("uint8", 1),
    "scores": ("float16", 1),
    "activations": ("uint8", 1),
    "active": ("uint8", 1),
    "support": ("float16", 1),
    "mean": ("float16", 1),
    "deviation": ("float16", 1),
    "assignments": ("root8", 1),
    "poses": ("float16", 0),
    "held": ("root8", 0),
    "pixels": ("root8", 0),
    "pixel_sums": ("float16", 0),
}

Arrays = dict[str, tuple[str, Tensor]]  # by name, a kind of packing.py and the numbers


class Collected(NamedTuple):
    """The data of the page. ``header``: names and sizes, for JSON. ``arrays``: see
    :mod:`tritoncaps.explore.packing`; their axes are

    E epsilons, N images, T iterations, K classes; B child types, C parent types, P parent locations, S slots.

    | name | axes |
    | --- | --- |
    | pictures | [E, N, channels, H, W], pixels in [0, 1] |
    | scores | [E, N, K], activations of the classes |
    | pixels, pixel_sums | [N, K, H, W], the part of each pixel in the support of a class, scaled to a maximum of 1;
      [N, K], the support |
    | LAYER.activations | [E, N, C, *space] |
    | LAYER.poses | [N, C, *space, entries] |
    | LAYER.held | [N, K, C, *space], the same for capsules; for all layers except the last |
    | LAYER.children, .weight_of, .offset | [P, S], [S], [S, 4]: the routing map |
    | LAYER.weight | [blocks, B, C, ...] |
    | LAYER.start | [P, S, B, C], the initial assignments |
    | LAYER.assignments | [T, N, P, S, B, C], after each iteration |
    | LAYER.active, .support | [T, N, C, P], after each iteration |
    | LAYER.mean, .deviation | [T, N, C, P, entries]; dynamic routing has no deviation |
    | decoder.W0, .b0, .W2, ... | layers of the decoder of CapsNet |
    """

    header: dict[str, Any]
    arrays: Arrays


@torch.no_grad()
def collect(
    network: nn.Module,
    pixels: Tensor,
    labels: Sequence[Sequence[int]],
    classes: Sequence[str],
    prepare: Callable[[Tensor], Tensor],
    show: Callable[[Tensor], Tensor],
    epsilons: Sequence[float] = EPSILONS,
) -> Collected:
    """Compute all data of the page.

    Args:
        network: MatrixCapsNet, TinyCapsNet, CapsNet, or a network with the same names of layers, in evaluation mode.
        pixels: images [N, channels, H, W] with pixels in [0, 1].
        labels: the true classes of each image: one, or two for MultiMNIST.
        classes: names of the classes.
        prepare: a function from such pixels to the input of the network.
        show: a function from such pixels to the pixels to show: like ``prepare``, but without standardisation.
        epsilons: changes of pixels by the fast gradient sign method; the first one is 0.
    """
    check_network(network)
    found: list[dict[str, Tensor]] = []
    with Waiting(f"computing the page of {len(pixels)} images", len(pixels)) as shown:
        for n in range(len(pixels)):
            found.append(_image(network, pixels[n : n + 1], labels[n][0], len(classes), prepare, show, epsilons))
            shown.reach(n + 1)
    arrays: Arrays = {}
    for name in found[0]:
        kind, axis = OF_IMAGES[_what(name)]
        arrays[name] = (kind, torch.cat([of_image[name] for of_image in found], dim=axis))
    layers: dict[str, Capsules] = network(prepare(pixels[:1]), return_intermediate=True)
    for below, name in pairwise(layers):
        arrays |= _constants(network, name, layers[below])
    if isinstance(network, CapsNet) and network.decoder is not None:
        arrays |= _decoder(network)
    header = {
        "classes": list(classes),
        "labels": [list(of_image) for of_image in labels],
        "epsilons": list(epsilons),
        "channels": show(pixels[:1]).shape[1],
        "size": list(show(pixels[:1]).shape[2:]),
        "layers": _described(network, layers),
        "field": _receptive_field(network),
        "parameters": sum(p.numel() for p in network.parameters()),
    }
    return Collected(header, arrays)


def first_images(collected: Collected, count: int) -> Collected:
    """The data of the first ``count`` images only."""
    header = {**collected.header, "labels": collected.header["labels"][:count]}
    arrays = dict(collected.arrays)
    for name, (kind, values) in arrays.items():
        _, axis = OF_IMAGES.get(_what(name), ("", -1))
        if axis >= 0:
            arrays[name] = (kind, values.narrow(axis, 0, count))
    return Collected(header, arrays)


def check_network(network: nn.Module) -> None:
    names = ("conv", "primary", "class_caps")
    if not all(isinstance(getattr(network, name, None), nn.Module) for name in names):
        raise TypeError(
            "network must be a MatrixCapsNet, a TinyCapsNet, a CapsNet or one with the same names of layers, "
            f"but it is a {type(network).__name__}"
        )


def _image(
    network: nn.Module,
    pixels: Tensor,
    label: int,
    classes: int,
    prepare: Callable[[Tensor], Tensor],
    show: Callable[[Tensor], Tensor],
    epsilons: Sequence[float],
) -> dict[str, Tensor]:
    """All numbers of one image."""
    result = _adversarial(network, pixels, label, prepare, show, epsilons)
    inputs = prepare(pixels)
    layers: dict[str, Capsules] = network(inputs, return_intermediate=True)
    for name, (poses, activations) in layers.items():
        result[f"{name}.poses"] = poses.flatten(activations.ndim)
    for below, name in pairwise(layers):
        result |= _iterations(network, name, layers[below])
    every = torch.arange(classes, device=inputs.device)
    traced = inspect.attribution(network, inputs.expand(classes, *inputs.shape[1:]), every)
    result["pixels"], result["pixel_sums"] = _of_largest(traced.pixels)[None], traced.support[None]
    for name in list(layers)[:-1]:
        result[f"{name}.held"] = _of_largest(traced.capsules[name])[None]
    return result


def _adversarial(
    network: nn.Module,
    pixels: Tensor,
    label: int,
    prepare: Callable[[Tensor], Tensor],
    show: Callable[[Tensor], Tensor],
    epsilons: Sequence[float],
) -> dict[str, Tensor]:
    """Pictures and activations at every epsilon."""
    labels = torch.tensor([label], device=pixels.device)

    def classifier(x: Tensor) -> Capsules:
        return network(prepare(x))

    changed = [attacks.fgsm(classifier, pixels, labels, epsilon, loss=spread) for epsilon in epsilons]
    layers: dict[str, Capsules] = network(prepare(torch.cat(changed)), return_intermediate=True)
    result = {f"{name}.activations": found.activations[:, None] for name, found in layers.items()}
    return {
        "pictures": show(torch.cat(changed))[:, None],
        "scores": list(layers.values())[-1].activations[:, None],
        **result,
    }


def spread(outputs: Any, labels: Tensor) -> Tensor:
    """The loss of the adversarial attack. If the sigmoid of the true class is saturated, it still has a gradient from
    the other classes."""
    return functional.spread_loss(outputs[1], labels, margin=1.0)


def _iterations(network: nn.Module, name: str, children: Capsules) -> dict[str, Tensor]:
    layer: Any = network.get_submodule(name)
    steps: Any = inspect.iterations(layer, children)
    entries = math.prod(layer._sizes.out_pose)
    result = {"assignments": [step.next_assignments for step in steps]}
    result["active"] = [_at_locations(step.activations) for step in steps]
    if isinstance(layer.routing, MixtureRouting):
        result["support"] = [_at_locations(step.support) for step in steps]
        result["mean"] = [_at_locations(step.mean, entries) for step in steps]
        result["deviation"] = [_at_locations(step.variance.sqrt(), entries) for step in steps]
    else:
        result["support"] = [step.assignments.sum((2, 3)).transpose(1, 2) for step in steps]
        result["mean"] = [_at_locations(step.parents, entries) for step in steps]
    return {f"{name}.{what}": torch.stack(values) for what, values in result.items()}


def _at_locations(x: Tensor, *entries: int) -> Tensor:
    """[N, C, *out_size, ...] -> [N, C, P, *entries]."""
    return x.reshape(*x.shape[:2], -1, *entries)


def _of_largest(held: Tensor) -> Tensor:
    """The numbers of each image, divided by the largest. Negative parts, which dynamic routing may have, become 0."""
    positive = held.clamp(min=0)
    largest = positive.flatten(1).amax(1).clamp(min=1e-12)
    return positive / largest.reshape(-1, *[1] * (held.ndim - 1))


def _constants(network: nn.Module, name: str, children: Capsules) -> Arrays:
    """The routing map, the transformation matrices and the initial assignments, which are the same for all images."""
    layer: Any = network.get_submodule(name)
    _, routing_map = layer._children(children)
    weight, _, _ = layer._inputs(routing_map)
    large = weight.numel() > LARGE
    return {
        f"{name}.children": ("int16", routing_map.children),
        f"{name}.weight_of": ("int16", routing_map.weight_of),
        f"{name}.offset": ("float16", routing_map.offset),
        f"{name}.weight": ("rows8", weight.flatten(0, 1)) if large else ("float16", weight),
        f"{name}.start": ("root8", inspect.iterations(layer, children)[0].assignments[0]),
    }


def _described(network: nn.Module, layers: dict[str, Capsules]) -> list[dict[str, Any]]:
    """Names, sizes and routings, from the primary capsules to the classes."""
    described: list[dict[str, Any]] = []
    for name, (poses, activations) in layers.items():
        pose = list(poses.shape[activations.ndim :])
        entry = {"name": name, "types": activations.shape[1], "size": list(activations.shape[2:]), "pose": pose}
        if described:
            layer: Any = network.get_submodule(name)
            entry["iterations"] = layer.routing.iterations
        described.append(entry)
    return described


def _decoder(network: CapsNet) -> Arrays:
    assert network.decoder is not None
    arrays: Arrays = {}
    for i, layer in enumerate(network.decoder.layers):
        if isinstance(layer, nn.Linear):
            arrays[f"decoder.W{i}"] = ("rows8", layer.weight)
            arrays[f"decoder.b{i}"] = ("float16", layer.bias)
    return arrays


def _receptive_field(network: nn.Module) -> dict[str, int]:
    """Size of the receptive field of a primary capsule in pixels, and the distance between those of two neighbours."""
    size, step = 1, 1
    for convolution in (network.get_submodule("conv"), network.get_submodule("primary.pose")):
        assert isinstance(convolution, nn.Conv2d)
        size += (convolution.kernel_size[0] - 1) * step
        step *= convolution.stride[0]
    return {"size": size, "step": step}


def _what(name: str) -> str:
    """The name of an array without the name of its layer."""
    return name.rpartition(".")[2]
