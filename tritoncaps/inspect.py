"""Inspect routed layers: every iteration, the votes for chosen parents, and the pixels that support a class.

The functions compute everything again for the given images, with the definition in :mod:`tritoncaps.reference`. They
work image by image, so that they store only the votes of one image. Results do not depend on the backend of a layer.
The last iteration gives the capsules that the layer returns. Results have no gradient.

Letters: N images, B child types, C parent types, P parent locations with S slots each; M chosen parents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import torch
from einops import einsum, rearrange
from torch import Tensor, nn
from torch.nn.functional import conv2d
from torch.nn.grad import conv2d_input

from tritoncaps import reference
from tritoncaps.capsules import Capsules
from tritoncaps.kernels.common.numerics import least_support, widen
from tritoncaps.layers import GraphCaps, _MatrixRoutedCaps
from tritoncaps.routing_map import RoutingMap
from tritoncaps.vector_layers import _VectorRoutedCaps

__all__ = ["Attribution", "DynamicIteration", "MixtureIteration", "Votes", "attribution", "iterations", "votes"]

Parent = int | Sequence[int]
_Layer = _MatrixRoutedCaps | _VectorRoutedCaps


class MixtureIteration(NamedTuple):
    """One iteration of a mixture routing (EM, variational Bayes, your own fit).

    Attributes:
        assignments: the assignments R that the fit uses, zero in missing slots.
        support: the sum of R a over the children of a parent.
        mean: means of the parents' Gaussians.
        precision: one over the variances.
        logits: logits of the parents' activations.
        next_assignments: the assignments of the next E-step. The layer does not use those of the last iteration.

    Shape:
        - assignments and next_assignments: [N, P, S, B, C]
        - support and logits: [N, C, *out_size]
        - mean and precision: [N, C, *out_size, 4, 4]
    """

    assignments: Tensor
    support: Tensor
    mean: Tensor
    precision: Tensor
    logits: Tensor
    next_assignments: Tensor

    @property
    def variance(self) -> Tensor:
        """Variances of the parents' Gaussians [N, C, *out_size, 4, 4]: one over the precision."""
        return 1 / self.precision

    @property
    def activations(self) -> Tensor:
        """Activations of the parents [N, C, *out_size]: the sigmoid of the logits."""
        return torch.sigmoid(self.logits)


class DynamicIteration(NamedTuple):
    """One iteration of dynamic routing.

    Attributes:
        assignments: the coupling coefficients, zero in missing slots.
        logits: the logits b; the coupling coefficients are their softmax.
        parents: the squashed sums of votes.
        agreement: scalar products of votes and parents, which are added to the logits.
        next_assignments: the coupling coefficients of the next logits. The layer does not use those of the last
            iteration.

    Shape:
        - assignments, logits, agreement and next_assignments: [N, P, S, B, C]
        - parents: [N, C, *out_size, E]
    """

    assignments: Tensor
    logits: Tensor
    parents: Tensor
    agreement: Tensor
    next_assignments: Tensor

    @property
    def activations(self) -> Tensor:
        """Activations of the parents [N, C, *out_size]: their lengths."""
        return torch.linalg.vector_norm(self.parents, dim=-1)


class Votes(NamedTuple):
    """The votes for M chosen parents.

    Attributes:
        votes: the votes after coordinate addition, zero in missing slots.
        activations: activations of the children, zero in missing slots.
        children: locations of the children, -1 in missing slots.
        locations: index of each parent on the axis P.
        types: index of each parent on the axis C.

    Shape:
        - votes: [N, M, S, B, *pose], activations: [N, M, S, B]
        - children: [M, S], locations and types: [M]
    """

    votes: Tensor
    activations: Tensor
    children: Tensor
    locations: Tensor
    types: Tensor

    def select(self, edges: Tensor) -> Tensor:
        """Select the assignments (or logits) of these votes.

        Args:
            edges: assignments or logits of all votes.

        Shape:
            - edges: [N, P, S, B, C]
            - result: [N, M, S, B]

        Returns:
            The values that belong to these votes.
        """
        return edges.movedim(-1, 2)[:, self.locations, self.types]


class Attribution(NamedTuple):
    """The parts of the support of a class that come from each pixel and from each capsule.

    Attributes:
        pixels: the part of each pixel; all pixels sum to ``support``.
        capsules: the part of each capsule, by the name of its layer; each layer sums to ``support``.
        support: the support of the class.

    Shape:
        - pixels: [N, H, W], capsules: [N, C, *space], support: [N]
    """

    pixels: Tensor
    capsules: dict[str, Tensor]
    support: Tensor


@overload
def iterations(
    layer: _MatrixRoutedCaps, capsules: Capsules, routing_map: RoutingMap | None = None
) -> list[MixtureIteration]: ...


@overload
def iterations(layer: _VectorRoutedCaps, capsules: Capsules | Tensor) -> list[DynamicIteration]: ...


@torch.no_grad()
def iterations(
    layer: _Layer, capsules: Capsules | Tensor, routing_map: RoutingMap | None = None
) -> list[MixtureIteration] | list[DynamicIteration]:
    """Every iteration of a layer's routing.

    Args:
        layer: any layer of matrix capsules with a :class:`~tritoncaps.MixtureRouting`, or of vector capsules with
            :class:`~tritoncaps.DynamicRouting`.
        capsules: the input of the layer. The assignments of all images are stored, so pass only a few images.
        routing_map: the graph of a :class:`~tritoncaps.GraphCaps`.

    Shape:
        - capsules: the shape that the layer takes

    Returns:
        One :class:`MixtureIteration` or :class:`DynamicIteration` for each iteration, in order. The last one has the
            poses (``mean`` or ``parents``) and ``activations`` that the layer returns.

    Raises:
        TypeError: if the layer has no such routing.
        ValueError: if a shape is wrong, or a layer that is not GraphCaps gets a ``routing_map``.

    Example:
        >>> import torch
        >>> from tritoncaps import Capsules, ClassCaps, inspect
        >>> layer = ClassCaps(4, 10)
        >>> capsules = Capsules(torch.randn(2, 4, 3, 3, 4, 4), torch.rand(2, 4, 3, 3))
        >>> first, second, third = inspect.iterations(layer, capsules)
        >>> first.assignments.shape, third.mean.shape
        (torch.Size([2, 1, 9, 4, 10]), torch.Size([2, 10, 4, 4]))
    """
    given, routing_map = _children(layer, capsules, routing_map)
    steps: Callable[..., Any] = _mixture_iterations if isinstance(layer, _MatrixRoutedCaps) else _dynamic_iterations
    of_images = [
        steps(layer, Capsules(*image), routing_map) for image in zip(*(x.split(1) for x in given), strict=True)
    ]
    return [_joined(same) for same in zip(*of_images, strict=True)]


@torch.no_grad()
def votes(
    layer: _Layer,
    capsules: Capsules | Tensor,
    parents: Sequence[Parent],
    routing_map: RoutingMap | None = None,
) -> Votes:
    """The votes for chosen parents.

    Args:
        layer: a layer with a routing.
        capsules: the input of the layer.
        parents: type and position of each parent: ``(c, y, x)`` in ConvCaps2d; ``c`` or ``(c,)`` in layers without
            positions, such as ClassCaps.
        routing_map: the graph of a :class:`~tritoncaps.GraphCaps`.

    Shape:
        - capsules: the shape that the layer takes
        - result: votes [N, M, S, B, *pose] for M parents; see :class:`Votes`

    Returns:
        The votes for these parents only.

    Raises:
        TypeError: if the layer has no routing.
        ValueError: if the layer has no such parent, or a shape is wrong.

    Example:
        >>> import torch
        >>> from tritoncaps import Capsules, ConvCaps2d, inspect
        >>> layer = ConvCaps2d(4, 8, 3)
        >>> capsules = Capsules(torch.randn(2, 4, 5, 5, 4, 4), torch.rand(2, 4, 5, 5))
        >>> found = inspect.votes(layer, capsules, parents=[(0, 1, 2), (7, 1, 2)])
        >>> found.votes.shape  # of 9 positions of 4 types
        torch.Size([2, 2, 9, 4, 4, 4])
        >>> weights = found.select(inspect.iterations(layer, capsules)[-1].assignments) * found.activations
    """
    given, routing_map = _children(layer, capsules, routing_map)
    device = given.poses.device
    locations, types = _chosen(parents, layer.out_caps, routing_map).to(device)
    weight, _, _ = layer._inputs(routing_map)
    tables = routing_map.tables(device)
    children = tables.children.long()[locations]  # [M, S]
    given = _without_silent(given) if isinstance(layer, _MatrixRoutedCaps) else given
    poses, activations = (_of_children(x, children, routing_map) for x in given)  # [N, M, S, B, ...]
    chosen_weight = weight[tables.weight_of.long()][:, :, types]  # [S, B, M, ...]
    if isinstance(layer, _MatrixRoutedCaps):
        found = einsum(poses, chosen_weight, "n m s b i k, s b m k j -> n m s b i j")
        found[..., -1] += rearrange(tables.offset.to(found.dtype), "s i -> s 1 i")
    else:
        found = einsum(poses, chosen_weight, "n m s b d, s b m d e -> n m s b e")
    return Votes(_silent(found, children), _silent(activations, children), children, locations, types)


@torch.no_grad()
def attribution(network: nn.Module, images: Tensor, classes: int | Sequence[int] | Tensor) -> Attribution:
    """Which pixels the support of a class capsule comes from.

    The support of a class is the sum of R a over its children in mixture routings, and the length of the sum of votes
    before squashing in dynamic routing. The function distributes it from the last layer down to the pixels. Each parent
    distributes its part among its children in proportion to their contributions: R a in mixture routings; in dynamic
    routing the component of the weighted vote in the direction of the parent, which may be negative. Each primary
    capsule distributes its part among the pixels of its receptive field; a pixel in many fields gets less from each.

    Args:
        network: MatrixCapsNet, TinyCapsNet, CapsNet, or a network with the option ``return_intermediate``, a
            convolution ``conv`` and primary capsules ``primary``.
        images: images, preprocessed as in training. Call ``network.eval()`` first: batch normalisation uses the mode
            of the network.
        classes: one class for all images, or one for each image.

    Shape:
        - images: [N, channels, H, W], classes: [] or [N]

    Returns:
        The part of each pixel and of each capsule.

    Raises:
        TypeError: if the network has no such layers.
        ValueError: if a class is out of range.

    Example:
        >>> import torch
        >>> from tritoncaps import inspect
        >>> from tritoncaps.models import MatrixCapsNet
        >>> network = MatrixCapsNet(1, 3, channels=(8, 2, 3, 4)).eval()
        >>> found = inspect.attribution(network, torch.randn(2, 1, 20, 20), classes=0)
        >>> torch.allclose(found.pixels.sum((1, 2)), found.support)
        True
    """
    convolutions = _convolutions(network)
    found: dict[str, Capsules] = network(images, return_intermediate=True)
    names = list(found)
    wanted = _classes(classes, len(images), _routed(network, names[-1]).out_caps).to(images.device)
    parts = [
        _of_image(network, {name: found[name].map(lambda x, n=n: x[n : n + 1]) for name in names}, wanted[n : n + 1])  # type: ignore[misc]
        for n in range(len(images))
    ]
    capsules = {name: torch.cat([of_layers[name] for of_layers, _ in parts]) for name in names}
    pixels = capsules[names[0]].sum(1, keepdim=True)  # [N, 1, H', W']
    sizes = [images.shape[2:], network.get_submodule("conv")(images[:1]).shape[2:]]
    for convolution, size in zip(reversed(convolutions), reversed(sizes), strict=True):
        pixels = _spread(pixels, convolution, size)
    return Attribution(pixels[:, 0], capsules, torch.cat([support for _, support in parts]))


def _of_image(network: nn.Module, found: dict[str, Capsules], wanted: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The part of each capsule in the support of class ``wanted`` [1], by layer, and that support [1]."""
    names = list(found)
    held: dict[str, Tensor] = {}
    support = wanted.new_zeros(0)
    for child, parent in zip(reversed(names[:-1]), reversed(names[1:]), strict=True):
        layer, children = _routed(network, parent), found[child]
        given, routing_map = _children(layer, children, None)
        contributions = _contributions(layer, given, routing_map)  # [1, P, S, B, C]
        total = contributions.sum((2, 3))  # [1, P, C]
        if not held:
            support = total[:, 0].gather(1, wanted[:, None])[:, 0]
            held[parent] = torch.zeros_like(total[:, 0]).scatter(1, wanted[:, None], support[:, None])
        of_parents = held[parent].reshape(1, layer.out_caps, -1)  # [1, C, P]
        edges = einsum(_shares(contributions, total, routing_map), of_parents, "n p s b c, n c p -> n p s b")
        held[child] = _to_children(edges, routing_map).reshape(children.activations.shape)
    return {name: held[name] for name in names}, support


def _contributions(layer: _Layer, capsules: Capsules, routing_map: RoutingMap) -> Tensor:
    """The contribution of each child to each of its parents in the last iteration: [N, P, S, B, C]."""
    if isinstance(layer, _MatrixRoutedCaps):
        last = _mixture_iterations(layer, capsules, routing_map)[-1]
        activations = reference._not_negative(capsules.activations)
        return last.assignments * reference._at_edges(activations, routing_map)[..., None]
    end = _dynamic_iterations(layer, capsules, routing_map)[-1]
    return end.assignments * end.agreement / _at_parents(end.activations.clamp(min=1e-12), routing_map)


def _at_parents(x: Tensor, routing_map: RoutingMap) -> Tensor:
    """[N, C, *out_size] -> [N, P, 1, 1, C]."""
    return rearrange(reference._from_capsules(x, routing_map), "n p c -> n p 1 1 c")


def _shares(contributions: Tensor, total: Tensor, routing_map: RoutingMap) -> Tensor:
    """The contributions to each parent, divided by their sum; equal parts if their sum is zero."""
    alone = (total.abs() <= least_support(total.dtype))[:, :, None, None]
    present = (routing_map.tables(contributions.device).children >= 0).to(contributions.dtype)[:, :, None, None]
    even = (present / (present.sum(1, keepdim=True) * contributions.shape[3])).expand_as(contributions)
    return torch.where(alone, even, contributions / total[:, :, None, None].masked_fill(alone, 1))


def _to_children(edges: Tensor, routing_map: RoutingMap) -> Tensor:
    """[N, P, S, B] -> the sum over the edges of each child, [N, B, L]."""
    children = routing_map.tables(edges.device).children.long().flatten()
    flat = rearrange(edges, "n p s b -> n b (p s)")[..., children >= 0]
    found = edges.new_zeros(*flat.shape[:2], routing_map.num_children)
    return found.index_add(2, children[children >= 0], flat)


def _spread(held: Tensor, convolution: nn.Conv2d, size: Sequence[int]) -> Tensor:
    """Distribute the values of a convolution's output [N, 1, H', W'] among the inputs in its window, [N, 1, *size].

    Each input gets a part in proportion to 1 / (number of windows that contain it).
    """
    window = held.new_ones(1, 1, *convolution.kernel_size)
    options: Any = (convolution.stride, convolution.padding, convolution.dilation)
    seen_by = conv2d_input((1, 1, *size), window, torch.ones_like(held[:1]), *options)
    part = 1 / seen_by.clamp(min=1)
    total = conv2d(part, window, None, *options)
    return part * conv2d_input((len(held), 1, *size), window, held / total, *options)


def _convolutions(network: nn.Module) -> list[nn.Conv2d]:
    """The convolutions from pixels to primary capsules."""
    found = [getattr(network, "conv", None), getattr(getattr(network, "primary", None), "pose", None)]
    if not all(isinstance(convolution, nn.Conv2d) for convolution in found):
        raise TypeError(
            "network must have a convolution `conv` and primary capsules `primary`, as MatrixCapsNet has, "
            f"but it is a {type(network).__name__}"
        )
    return [convolution for convolution in found if isinstance(convolution, nn.Conv2d)]


def _classes(classes: int | Sequence[int] | Tensor, images: int, count: int) -> Tensor:
    """Check the classes and return them as [N]."""
    wanted = torch.as_tensor(classes)
    if wanted.is_floating_point() or wanted.dtype == torch.bool or wanted.shape not in ((), (images,)):
        raise ValueError(
            f"classes must be a whole number or {images}, one for each image, but they have shape "
            f"{list(wanted.shape)} and dtype {wanted.dtype}"
        )
    outside = wanted[(wanted < 0) | (wanted >= count)]
    if len(outside):
        raise ValueError(f"classes must be at least 0 and below {count}, but one is {outside[0].item()}")
    return wanted.long().expand(images)


def _routed(network: nn.Module, name: str) -> _Layer:
    layer: Any = network.get_submodule(name)
    _check_layer(layer)
    return layer


def _check_layer(layer: object) -> None:
    if not isinstance(layer, (_MatrixRoutedCaps, _VectorRoutedCaps)):
        raise TypeError(f"layer must be a layer with a routing, such as ConvCaps2d, but it is a {type(layer).__name__}")


def _children(layer: Any, capsules: Capsules | Tensor, routing_map: RoutingMap | None) -> tuple[Capsules, RoutingMap]:
    """Check the capsules; return them as the layer's routing takes them, with the map."""
    _check_layer(layer)
    if isinstance(layer, GraphCaps):
        return layer._children(capsules, routing_map)  # type: ignore[arg-type]
    if routing_map is not None:
        raise ValueError(f"routing_map must not be given for {type(layer).__name__}, which has one of its own")
    return layer._children(capsules)


def _chosen(parents: Sequence[Parent], out_caps: int, routing_map: RoutingMap) -> Tensor:
    """Locations and types [2, M]."""
    size = (out_caps, *routing_map.out_size)
    found = []
    for parent in parents:
        index = (parent,) if isinstance(parent, int) else tuple(parent)
        if len(index) != len(size) or not all(0 <= i < n for i, n in zip(index, size, strict=True)):
            listed = ", ".join(map(str, size))
            raise ValueError(f"parents must name capsules by indices below ({listed}), but one is {parent!r}")
        location = 0
        for i, n in zip(index[1:], size[1:], strict=True):
            location = location * n + i
        found.append((location, index[0]))
    return torch.tensor(found, dtype=torch.int64).reshape(-1, 2).T


def _without_silent(capsules: Capsules) -> Capsules:
    """Replace negative activations by zero, and inf and nan in the poses of children with activation zero."""
    activations = reference._not_negative(capsules.activations)
    return Capsules(reference._silence(capsules.poses, activations), activations)


def _of_children(x: Tensor, children: Tensor, routing_map: RoutingMap) -> Tensor:
    """[N, B, *in_size, ...] at the locations ``children`` [M, S]: [N, M, S, B, ...], undefined in missing slots."""
    flat = x.flatten(2, 1 + len(routing_map.in_size)) if routing_map.in_size else x.unsqueeze(2)
    return rearrange(flat[:, :, children.clamp(min=0)], "n b m s ... -> n m s b ...")


def _silent(x: Tensor, children: Tensor) -> Tensor:
    """Write zero into the missing slots of [N, M, S, ...]."""
    return x.masked_fill((children < 0).reshape(children.shape + (1,) * (x.ndim - 3)), 0)


def _mixture_iterations(
    layer: _MatrixRoutedCaps, capsules: Capsules, routing_map: RoutingMap
) -> list[MixtureIteration]:
    routing = layer._mixture("inspect")
    weight, parameters, _ = layer._inputs(routing_map)
    steps = list(reference.mixture_steps(*capsules, weight, parameters, routing_map, routing))
    shares = [assignments for _, assignments in steps]
    poses = _without_silent(capsules.map(widen)).poses
    stored = reference.coordinate_addition(reference.pose_votes(poses, widen(weight), routing_map), routing_map)
    likelihood = reference.log_likelihood(stored, steps[-1][0], routing_map)
    shares.append(reference.assignments_from_logits(likelihood, routing_map, competition=routing.competition))
    activations = reference._at_edges(reference._not_negative(capsules.activations), routing_map)[..., None]
    found = []
    for (components, assignments), following in zip(steps, shares[1:], strict=True):
        support = reference._to_capsules((assignments * activations).sum((2, 3)), routing_map)
        fitted = (components.mean, components.precision, components.logit)
        found.append(MixtureIteration(assignments, support, *fitted, following))
    return [MixtureIteration(*(x.to(capsules.poses.dtype) for x in iteration)) for iteration in found]


def _dynamic_iterations(
    layer: _VectorRoutedCaps, capsules: Capsules, routing_map: RoutingMap
) -> list[DynamicIteration]:
    routing = layer._dynamic("inspect")
    weight, parameters, _ = layer._inputs(routing_map)
    priors = parameters["priors"].reshape(weight.shape[:3]) if routing.priors else None
    steps = list(reference.dynamic_steps(capsules.poses, weight, routing_map, routing, priors))
    stored = reference.vector_votes(widen(capsules.poses), widen(weight), routing_map)
    first = torch.zeros_like(weight[..., 0, 0]) if priors is None else priors
    logits = widen(first)[routing_map.tables(weight.device).weight_of.long()].expand(stored.shape[:-1])
    rival = 0.0 if routing.none_of_the_above else -math.inf
    found = []
    for parents, assignments in steps:
        agreement = einsum(stored, parents, "n p s b c e, n p c e -> n p s b c")
        following = reference.assignments_from_logits(
            logits + agreement, routing_map, competition=routing.competition, rival=rival
        )
        poses = reference._to_capsules(parents, routing_map, parents.shape[3:])
        found.append(DynamicIteration(assignments, logits, poses, agreement, following))
        logits = logits + agreement
    return [DynamicIteration(*(x.to(capsules.poses.dtype) for x in iteration)) for iteration in found]


Iteration = TypeVar("Iteration", MixtureIteration, DynamicIteration)


def _joined(of_images: Sequence[Iteration]) -> Iteration:
    return type(of_images[0])(*(torch.cat(parts) for parts in zip(*of_images, strict=True)))
