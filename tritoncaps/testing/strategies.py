"""Hypothesis strategies for maps, options and problems. Sizes of 1 to 9 are below and above the kernels' tile sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tritoncaps.routing import EMRouting, VBRouting
from tritoncaps.routing.mixture import COMPETITIONS
from tritoncaps.routing_map import RoutingMap
from tritoncaps.testing.problems import LAYOUTS, Problem


def routing_maps(small: bool = False) -> st.SearchStrategy[RoutingMap]:
    """A strategy for maps: convolutions in 1, 2 and 3 dimensions, class capsules with and without coordinates, graphs.

    Args:
        small: generate maps with few edges, for kernels that run in an interpreter.

    Returns:
        The strategy.
    """
    sides = st.lists(st.integers(1, 2 if small else 4), max_size=2 if small else 3)
    full = st.builds(RoutingMap.full, sides, st.booleans())
    return st.one_of(conv_maps(small), full, graph_maps(small))


@st.composite
def conv_maps(draw: Callable, small: bool = False) -> RoutingMap:
    dims = draw(st.integers(1, 3))
    kernel, stride, padding, dilation = (
        [draw(st.integers(low, high)) for _ in range(dims)]
        for low, high in ((1, 2 if small else 3), (1, 2), (0, 1), (1, 2))
    )
    least = [max(d * (k - 1) + 1 - 2 * p, 1) for k, p, d in zip(kernel, padding, dilation, strict=True)]
    most = 0 if small else 1
    size = [n + draw(st.integers(0, most if dims == 3 else 2 * most + 1 if dims == 2 else 5)) for n in least]
    return RoutingMap.conv(size, kernel, stride, padding, dilation)


@st.composite
def graph_maps(draw: Callable, small: bool = False) -> RoutingMap:
    """Graphs with children without parents, parents without children, shared weights and offsets."""
    num_children, num_parents = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    edge = st.tuples(st.integers(0, num_children - 1), st.integers(0, num_parents - 1))
    edges = draw(st.lists(edge, min_size=1, max_size=6 if small else 12))
    children, parents = zip(*edges, strict=True)
    slots = max(parents.count(p) for p in parents)
    weight_of = draw(st.none() | st.just([0] * slots) | st.just([s % 2 for s in range(slots)]))
    offset = draw(st.none() | st.just([[0.25 * s, -0.5, 1.0, 0.0] for s in range(slots)]))
    return RoutingMap.from_edges(children, parents, num_children, num_parents, weight_of=weight_of, offset=offset)


def em_routings() -> st.SearchStrategy[EMRouting]:
    """A strategy for EMRouting with all its options."""
    return st.builds(
        EMRouting,
        iterations=st.integers(1, 4),
        final_lambda=st.sampled_from([None, 0.1, 2.0]),
        variance_floor=st.sampled_from([1e-4, 1e-2, 0.5]),
        mean_data=st.booleans(),
        **mixture_options(),
    )


def vb_routings() -> st.SearchStrategy[VBRouting]:
    """A strategy for VBRouting with all its options."""
    return st.builds(
        VBRouting,
        iterations=st.integers(1, 4),
        alpha0=st.sampled_from([1.0, 0.5]),
        mean0=st.sampled_from([0.0, 3.0]),
        kappa0=st.sampled_from([1.0, 0.1, 10.0]),
        nu0=st.sampled_from([17.0, 20.0]),
        psi0=st.sampled_from([1.0, 0.1]),
        **mixture_options(),
    )


def mixture_options() -> dict[str, st.SearchStrategy]:
    """Strategies for the options of all mixture routings, except the iterations, by name."""
    return {
        "competition": st.sampled_from(COMPETITIONS),
        "gradient": st.sampled_from(["all", "last"]),
    }


def problems(
    max_types: int = 9, small: bool = False, routings: st.SearchStrategy[Any] | None = None
) -> st.SearchStrategy[Problem]:
    """A strategy for problems of one to three images.

    Args:
        max_types: largest number of capsule types.
        small: generate problems with few edges, for kernels that run in an interpreter.
        routings: a strategy for the routing; default: :func:`em_routings`.

    Returns:
        The strategy.
    """
    return st.builds(
        Problem,
        routing_map=routing_maps(small),
        routing=em_routings() if routings is None else routings,
        images=st.integers(1, 3),
        in_caps=st.integers(1, max_types),
        out_caps=st.integers(1, max_types),
        seed=st.integers(0, 2**31),
        layout=st.sampled_from(LAYOUTS),
    )
