"""RoutingMap: which child feeds which parent.

A map is block-sparse. A block is a pair of a child location and a parent location; it is dense over child types and
parent types. Convolutions, class capsules and arbitrary graphs differ only in the tables.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from tritoncaps.kernels.common.tables import Tables, make_tables
from tritoncaps.kernels.common.tracing import constant, plain

Size = tuple[int, ...]


_graphs = itertools.count()  # a number for each arbitrary graph


class RoutingMap:
    """Which child feeds which parent: L child locations, P parent locations with S slots each.

    Build one with ``RoutingMap.conv``, ``RoutingMap.full`` or ``RoutingMap.from_edges``. A map is small and immutable.
    Its tables are computed at their first use, once for all equal maps, and copied to each device once.

    Args:
        key: kind and options of the map; equal maps have equal keys.
        in_size: child locations along each axis.
        out_size: parent locations along each axis.
        num_slots: slots of each parent.
        num_weights: weight blocks.
        graph: the tables of an arbitrary graph.

    Example:
        >>> from tritoncaps import RoutingMap
        >>> RoutingMap.conv((5, 5), kernel=3).num_parents
        9
    """

    def __init__(
        self,
        key: tuple[Any, ...],
        in_size: Size,
        out_size: Size,
        num_slots: int,
        num_weights: int,
        graph: Tables | None = None,
    ) -> None:
        self.key = key  # for a convolution and a full map, it contains all options
        self.in_size = in_size
        self.out_size = out_size
        self.num_children = math.prod(in_size)
        self.num_parents = math.prod(out_size)
        self.num_slots = num_slots
        self.num_weights = num_weights
        self._graph = {} if graph is None else {"cpu": graph}  # the tables of an arbitrary graph, by device

    @staticmethod
    def conv(
        size: Sequence[int],
        kernel: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | Literal["same"] = 0,
        dilation: int | Sequence[int] = 1,
    ) -> RoutingMap:
        """The map of a convolution over ``size``, with one weight block for each kernel offset.

        Args:
            size: positions of the children along each axis.
            kernel: one number, or one for each axis; the same holds for stride, padding and dilation.
            stride: step between parents.
            padding: empty positions around the children. "same" gives as many parents as children and needs stride 1;
                if the total padding is odd, the end of the axis gets one more position than its start.
            dilation: step between the children of a parent.

        Returns:
            The map.

        Raises:
            ValueError: if a number is wrong, or the kernel is larger than the input.

        Example:
            >>> from tritoncaps import RoutingMap
            >>> routing_map = RoutingMap.conv((14, 14), kernel=3, stride=2)
            >>> routing_map.out_size, routing_map.num_slots
            ((6, 6), 9)
        """
        size = tuple(plain(n) for n in size)
        dims = len(size)
        _require(dims >= 1, "size must have at least one axis, but it is empty")
        _require(min(size) >= 1, f"size must be at least 1 along every axis, but it is {size}")
        kernel = per_axis("kernel", kernel, dims, 1)
        stride = per_axis("stride", stride, dims, 1)
        dilation = per_axis("dilation", dilation, dims, 1)
        padded_by = padding_per_axis(padding, stride)
        out_size = []
        for axis, (n, k, s, d) in enumerate(zip(size, kernel, stride, dilation, strict=True)):
            before, after = _paddings(padded_by, axis, k, d)
            span, padded = d * (k - 1) + 1, before + n + after
            _require(
                span <= padded,
                f"kernel is larger than the input along axis {axis}: "
                f"{span} (kernel {k}, dilation {d}) against {padded} (size {n}, padding {before})",
            )
            out_size.append((padded - span) // s + 1)
        slots = math.prod(kernel)
        return RoutingMap(("conv", size, kernel, stride, padded_by, dilation), size, tuple(out_size), slots, slots)

    @staticmethod
    def full(size: Sequence[int], coordinates: bool = True) -> RoutingMap:
        """The map of class capsules: every child feeds the only parent location, and all share one weight block.

        Args:
            size: positions of the children along each axis.
            coordinates: slot s adds its scaled position, (index + 1/2) / size along each axis, to the first entries of
                the right-hand column of its votes. So votes depend on positions although the weights are shared.

        Returns:
            The map.

        Raises:
            ValueError: if a size is below 1, or there are more than four axes with coordinates.

        Example:
            >>> from tritoncaps import RoutingMap
            >>> RoutingMap.full((2, 2)).offset[:, :2].tolist()
            [[0.25, 0.25], [0.25, 0.75], [0.75, 0.25], [0.75, 0.75]]
        """
        size = tuple(plain(n) for n in size)
        _require(all(n >= 1 for n in size), f"size must be at least 1 along every axis, but it is {size}")
        _require(len(size) <= 4 or not coordinates, f"coordinates reach at most 4 axes, but size is {size}")
        return RoutingMap(("full", size, bool(coordinates)), size, (), math.prod(size), 1)

    @staticmethod
    def from_edges(
        children: Sequence[int] | Tensor,
        parents: Sequence[int] | Tensor,
        num_children: int,
        num_parents: int,
        slots: Sequence[int] | Tensor | None = None,
        weight_of: Sequence[int] | Tensor | None = None,
        offset: Sequence[Sequence[float]] | Tensor | None = None,
        relations: Sequence[int] | Tensor | None = None,
    ) -> RoutingMap:
        """The map of any graph: edge e joins child location ``children[e]`` and parent location ``parents[e]``.

        Args:
            children: the child location of each edge.
            parents: the parent location of each edge.
            num_children: number of child locations.
            num_parents: number of parent locations.
            slots: the slot of each edge at its parent; default: the edges of a parent are numbered in their order.
            weight_of: the weight block of each slot; default: a block for every slot. If all are 0, slots share one.
            offset: up to four numbers for each slot, which are added to the right-hand column of its votes.
            relations: the relation of each edge, instead of ``slots`` and ``weight_of``. Edges of one relation share
                one weight block.

        Shape:
            - children, parents, slots and relations: [edges]
            - weight_of: [S], offset: [S, up to 4]

        Returns:
            The map.

        Raises:
            ValueError: if a list has another length, or an index is out of range.

        Example:
            >>> from tritoncaps import RoutingMap
            >>> graph = RoutingMap.from_edges([0, 1, 2, 2], [0, 0, 0, 1], num_children=3, num_parents=2)
            >>> graph.parents(2)  # (parent, slot)
            [(0, 2), (1, 0)]
        """
        child, parent = _index("children", children), _index("parents", parents)
        _require(
            len(child) == len(parent),
            f"children and parents must name as many edges, but they have {len(child)} and {len(parent)}",
        )
        _require(len(child) > 0, "children must name at least one edge, but it is empty")
        _in_range("children", child, num_children, "child locations")
        _in_range("parents", parent, num_parents, "parent locations")
        if relations is not None:
            _require(slots is None and weight_of is None, "relations must not be given with slots or weight_of")
            slots, weight_of = _slots_of_relations(parent, _index("relations", relations))
        slot = _order_of_appearance(parent) if slots is None else _index("slots", slots)
        _require(len(slot) == len(child), f"slots must name {len(child)} edges, but it has {len(slot)}")
        _require(int(slot.min()) >= 0, f"slots must not be negative, but one is {int(slot.min())}")
        num_slots = int(slot.max()) + 1
        table = torch.full((num_parents, num_slots), -1)
        table[parent, slot] = child
        _require(int((table >= 0).sum()) == len(child), "slots gives two edges of one parent the same slot")
        weights = torch.arange(num_slots) if weight_of is None else _index("weight_of", weight_of)
        _require(
            len(weights) == num_slots,
            f"weight_of must have an entry for each of the {num_slots} slots, but it has {len(weights)}",
        )
        _require(int(weights.min()) >= 0, f"weight_of must not be negative, but one is {int(weights.min())}")
        size = (int(num_children),)
        return RoutingMap.from_tables(table, weights, _column(offset, num_slots), size, (int(num_parents),))

    @staticmethod
    @torch.inference_mode(False)
    def from_tables(children: Tensor, weight_of: Tensor, offset: Tensor, in_size: Size, out_size: Size) -> RoutingMap:
        """The map with given tables, which ``tritoncaps.kernels.common.tables.Tables`` describes.

        Args:
            children: the child location of each slot of each parent, or -1.
            weight_of: the weight block of each slot.
            offset: numbers that each slot adds to the right-hand column of its votes.
            in_size: child locations along each axis.
            out_size: parent locations along each axis.

        Shape:
            - children: [P, S], weight_of: [S], offset: [S, 4]

        Returns:
            The map.
        """
        # copies: kernels cache results for each table, so two maps must not share one
        children, weight_of, offset = (x.detach().cpu().clone() for x in (children, weight_of, offset))
        tables = _with_inverse(children, weight_of, offset, math.prod(in_size))
        num_weights = int(weight_of.max()) + 1
        return RoutingMap(("graph", next(_graphs)), in_size, out_size, children.shape[1], num_weights, tables)

    @property
    def children(self) -> Tensor:
        """int32 [P, S]: the child location that feeds parent location p at slot s, or -1."""
        return self.tables().children

    @property
    def weight_of(self) -> Tensor:
        """int32 [S]: the weight block that slot s uses."""
        return self.tables().weight_of

    @property
    def offset(self) -> Tensor:
        """float64 [S, 4]: the numbers that slot s adds to the right-hand column of its votes."""
        return self.tables().offset

    @property
    def num_edges(self) -> int:
        """Number of edges: pairs of a child location and a parent location."""
        return len(self.tables().parents_pair)

    @property
    def max_degree(self) -> int:
        """The largest number of edges of a child location."""
        return _max_degree(self.key) if not self._graph else int(self.tables().parents_start.diff().max())

    def parents(self, child: int) -> list[tuple[int, int]]:
        """The parents of one child location.

        Args:
            child: a child location.

        Returns:
            Pairs (parent location, slot) that ``child`` feeds.

        Raises:
            ValueError: if there is no such child location.
        """
        _require(0 <= child < self.num_children, f"child must be below {self.num_children}, but it is {child}")
        host = self.tables()
        start, end = host.parents_start[child : child + 2].tolist()
        return [divmod(pair, self.num_slots) for pair in host.parents_pair[start:end].tolist()]

    def tables(self, device: torch.device | str = "cpu") -> Tables:
        """The tables on a device. The first call copies them there.

        Args:
            device: the device.

        Returns:
            The tables that kernels read.
        """
        place = str(device)
        if not self._graph:
            return getattr(_kept, _keep_tables(self.key, place))
        if place not in self._graph:
            with torch.inference_mode(False):  # later calls may be outside of that mode
                self._graph[place] = Tables(*[table.to(place) for table in self._graph["cpu"]])
        return self._graph[place]

    def check(self) -> None:
        """Check that the table of children and the table of parents describe the same edges.

        Raises:
            ValueError: if they contradict each other.
        """
        edges = {
            (int(child), p, s)
            for p, row in enumerate(self.children.tolist())
            for s, child in enumerate(row)
            if child >= 0
        }
        inverse = {(c, p, s) for c in range(self.num_children) for p, s in self.parents(c)}
        _require(edges == inverse, f"the tables of {self} contradict each other at {sorted(edges ^ inverse)[:3]}")

    def __reduce__(self) -> tuple[Any, ...]:
        if not self._graph:
            return RoutingMap, (self.key, self.in_size, self.out_size, self.num_slots, self.num_weights)
        host = self.tables()
        return RoutingMap.from_tables, (host.children, host.weight_of, host.offset, self.in_size, self.out_size)

    def __deepcopy__(self, memo: dict[int, Any]) -> RoutingMap:
        return self  # maps are immutable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RoutingMap) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        kind, *given = self.key
        if kind == "graph":
            return f"RoutingMap.from_edges({self.num_edges} edges, {self.num_children} to {self.num_parents} locations)"
        names = {"conv": ("kernel", "stride", "padding", "dilation"), "full": ("coordinates",)}[kind]
        options = [f"{name}={value}" for name, value in zip(names, given[1:], strict=True)]
        return f"RoutingMap.{kind}({', '.join([str(self.in_size), *options])})"


class _Kept:
    """The tables of all maps except graphs. They are attributes, so that torch.compile guards only those it uses."""


_kept = _Kept()


@constant
def _keep_tables(key: tuple[Any, ...], device: str) -> str:
    """Store the tables in ``_kept``, and return the name of the attribute."""
    name = f"{key} on {device}"
    setattr(_kept, name, Tables(*(table.to(device) for table in _host_tables(key))))
    return name


@constant
def _max_degree(key: tuple[Any, ...]) -> int:
    return int(_host_tables(key).parents_start.diff().max())


@constant
def _host_tables(key: tuple[Any, ...]) -> Tables:
    kind, size, *options = key
    children, weight_of, offset = _conv_tables(size, *options) if kind == "conv" else _full_tables(size, *options)
    return _with_inverse(children, weight_of, offset, math.prod(size))


def _with_inverse(children: Tensor, weight_of: Tensor, offset: Tensor, num_children: int) -> Tables:
    start, pair = _invert(children, num_children)
    return make_tables(children, weight_of.long(), offset, start, pair)


def _paddings(padding: Size | Literal["same"], axis: int, kernel: int, dilation: int) -> tuple[int, int]:
    """The padding before the first and after the last position of an axis."""
    if padding == "same":
        total = dilation * (kernel - 1)
        return total // 2, total - total // 2
    return padding[axis], padding[axis]


def _conv_tables(
    size: Size, kernel: Size, stride: Size, padding: Size | Literal["same"], dilation: Size
) -> tuple[Tensor, ...]:
    """children, weight_of and offset: a weight block for each kernel offset."""
    children = torch.zeros(1, 1, dtype=torch.int64)
    valid = torch.ones(1, 1, dtype=torch.bool)
    for axis, (n, k, s, d) in enumerate(zip(size, kernel, stride, dilation, strict=True)):
        before, after = _paddings(padding, axis, k, d)
        out = (before + n + after - d * (k - 1) - 1) // s + 1
        index = torch.arange(out)[:, None] * s - before + torch.arange(k)[None, :] * d  # [out, k]
        inside = (index >= 0) & (index < n)
        children = _join_axes(children[:, None, :, None] * n + index[None, :, None, :])
        valid = _join_axes(valid[:, None, :, None] & inside[None, :, None, :])
    slots = math.prod(kernel)
    return children.masked_fill(~valid, -1), torch.arange(slots), torch.zeros(slots, 4)


def _join_axes(table: Tensor) -> Tensor:
    """[P, out, S, k] to [P * out, S * k]."""
    return table.flatten(2).flatten(0, 1)


def _full_tables(size: Size, coordinates: bool) -> tuple[Tensor, ...]:
    """children, weight_of and offset: one parent location, one weight block."""
    slots = math.prod(size)
    offset = torch.zeros(slots, 4, dtype=torch.float64)
    if coordinates:
        for slot, index in enumerate(itertools.product(*map(range, size))):
            for axis, (i, n) in enumerate(zip(index, size, strict=True)):
                offset[slot, axis] = (i + 0.5) / n
    return torch.arange(slots)[None, :], torch.zeros(slots), offset


def _invert(children: Tensor, num_children: int) -> tuple[Tensor, Tensor]:
    flat = children.reshape(-1).long()
    pair = torch.argsort(flat, stable=True)[int((flat < 0).sum()) :]  # missing slots sort first
    count = torch.bincount(flat[pair], minlength=num_children)
    return torch.cat([count.new_zeros(1), count.cumsum(0)]), pair


def _order_of_appearance(parent: Tensor) -> Tensor:
    seen: dict[int, int] = {}
    slots = []
    for p in parent.tolist():
        slots.append(seen.get(p, 0))
        seen[p] = slots[-1] + 1
    return torch.tensor(slots)


def _slots_of_relations(parent: Tensor, relation: Tensor) -> tuple[Tensor, Tensor]:
    """The slot of each edge, and the relation of each slot. A relation gets as many slots as a parent has edges of it,
    at most."""
    _require(len(relation) == len(parent), f"relations must name {len(parent)} edges, but it has {len(relation)}")
    _require(int(relation.min()) >= 0, f"relations must not be negative, but one is {int(relation.min())}")
    order = _order_of_appearance(parent * (int(relation.max()) + 1) + relation)
    needed = torch.zeros(int(relation.max()) + 1, dtype=torch.int64).scatter_reduce(0, relation, order + 1, "amax")
    first = needed.cumsum(0) - needed
    return first[relation] + order, torch.repeat_interleave(torch.arange(len(needed)), needed)


def _column(offset: Sequence[Sequence[float]] | Tensor | None, num_slots: int) -> Tensor:
    column = torch.zeros(num_slots, 4, dtype=torch.float64)
    if offset is not None:
        given = torch.as_tensor(offset, dtype=torch.float64)
        _require(
            given.ndim == 2 and len(given) == num_slots and given.shape[1] <= 4,
            f"offset must be [{num_slots}, up to 4], but it is {list(given.shape)}",
        )
        column[:, : given.shape[1]] = given
    return column


def _index(name: str, values: Sequence[int] | Tensor) -> Tensor:
    index = torch.as_tensor(values)
    integral = not (index.is_floating_point() or index.is_complex() or index.dtype == torch.bool)
    _require(integral or index.numel() == 0, f"{name} must hold integers, but it holds {index.dtype}")
    _require(index.ndim == 1, f"{name} must be a list of integers, but its shape is {list(index.shape)}")
    return index.long().cpu()


def _in_range(name: str, index: Tensor, count: int, what: str) -> None:
    outside = index[(index < 0) | (index >= count)]
    _require(len(outside) == 0, f"{name} names location {outside[:1].tolist()}, but there are {count} {what}")


def per_axis(name: str, value: int | Sequence[int], dims: int, least: int) -> Size:
    """Check ``value`` and return it for each of ``dims`` axes."""
    values: Any = tuple(value) if isinstance(value, (tuple, list)) else (value,) * dims
    _require(
        all(isinstance(v, int) and not isinstance(v, bool) for v in values),
        f"{name} must be a whole number or one for each axis, but it is {value!r}",
    )
    _require(len(values) == dims, f"{name} must be one number or {dims}, one for each axis, but it is {value}")
    _require(min(values) >= least, f"{name} must be at least {least} along every axis, but it is {value}")
    return values


def padding_per_axis(padding: int | Sequence[int] | Literal["same"], stride: Size) -> Size | Literal["same"]:
    """Check ``padding`` and return it for each axis of ``stride``, or "same"."""
    if padding == "same":
        _require(max(stride) == 1, f"padding='same' needs stride 1, but stride is {stride}")
        return "same"
    return per_axis("padding", padding, len(stride), 0)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
