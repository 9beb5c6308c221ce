"""RoutingMap: its tables are correct and inverse to each other; wrong maps get an error of one sentence."""

import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from tritoncaps import RoutingMap
from tritoncaps.kernels.common.tables import offset_of, orders_of
from tritoncaps.kernels.common.triton.pairs import groups_of, pairs_of
from tritoncaps.testing import routing_maps


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(routing_maps())
def test_tables_are_each_others_inverse(routing_map):
    routing_map.check()
    assert routing_map.num_edges == int((routing_map.children >= 0).sum())


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_conv_sees_what_a_convolution_sees(dims):
    size, kernel, stride, padding, dilation = (
        (7, 6, 5)[:dims],
        (3, 2, 2)[:dims],
        (2, 1, 2)[:dims],
        (1, 0, 1)[:dims],
        (2, 3, 1)[:dims],
    )
    routing_map = RoutingMap.conv(size, kernel, stride, padding, dilation)
    image = torch.randn(1, 1, *size).double()
    filters = torch.randn(1, 1, *kernel).double()
    convolution = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    expected = convolution(image, filters, stride=stride, padding=padding, dilation=dilation)
    assert routing_map.out_size == expected.shape[2:]
    children = routing_map.children.long()
    seen = image.flatten()[children.clamp(min=0)] * (children >= 0)
    torch.testing.assert_close((seen * filters.flatten()).sum(dim=1), expected.flatten())
    assert routing_map.weight_of.tolist() == list(range(filters.numel()))


def test_full_shares_one_weight():
    routing_map = RoutingMap.full((2, 3))
    assert routing_map.children.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert routing_map.num_weights == 1
    assert routing_map.out_size == ()
    assert routing_map.offset[4].tolist() == [0.75, 0.5, 0.0, 0.0]
    assert not RoutingMap.full((2, 3), coordinates=False).offset.any()


def test_edges_are_numbered_in_their_order_at_each_parent():
    routing_map = RoutingMap.from_edges([2, 0, 2, 1], [1, 0, 0, 1], num_children=4, num_parents=3)
    assert routing_map.children.tolist() == [[0, 2], [2, 1], [-1, -1]]
    assert routing_map.parents(2) == [(0, 1), (1, 0)]
    assert routing_map.parents(3) == []


def test_maps_are_built_once_and_survive_pickling():
    routing_map = RoutingMap.conv((5, 5), 3)
    same = RoutingMap.conv([5, 5], (3, 3))
    assert same == routing_map
    assert same.children is routing_map.children
    copy = pickle.loads(pickle.dumps(routing_map))
    assert torch.equal(copy.children, routing_map.children)
    assert repr(copy) == repr(routing_map)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: RoutingMap.conv((4, 4), 5), "kernel is larger than the input along axis 0: 5"),
        (
            lambda: RoutingMap.conv((9, 4), (3, 3), dilation=(1, 2)),
            "kernel is larger than the input along axis 1",
        ),
        (
            lambda: RoutingMap.conv((4,), 3, padding=-1),
            "padding must be at least 0 along every axis, but it is -1",
        ),
        (lambda: RoutingMap.conv((4,), 3, stride=0), "stride must be at least 1"),
        (
            lambda: RoutingMap.conv((4, 4), (3, 3, 3)),
            "kernel must be one number or 2, one for each axis",
        ),
        (lambda: RoutingMap.conv((0, 4), 1), "size must be at least 1"),
        (lambda: RoutingMap.conv((), 1), "size must have at least one axis"),
        (
            lambda: RoutingMap.conv((4,), 1.5),
            "kernel must be a whole number or one for each axis, but it is 1.5",
        ),
        (
            lambda: RoutingMap.from_edges([0, 7], [0, 0], 5, 1),
            r"children names location \[7\], but there are 5",
        ),
        (lambda: RoutingMap.from_edges([0], [-1], 5, 1), r"parents names location \[-1\]"),
        (lambda: RoutingMap.from_edges([0, 1], [0], 5, 1), "they have 2 and 1"),
        (lambda: RoutingMap.from_edges([], [], 5, 1), "at least one edge"),
        (lambda: RoutingMap.from_edges([0, 1], [0, 0], 5, 1, slots=[0, 0]), "the same slot"),
        (lambda: RoutingMap.from_edges([0.5], [0], 5, 1), "children must hold integers"),
        (
            lambda: RoutingMap.from_edges([0], [0], 5, 1, weight_of=[0, 1]),
            "weight_of must have an entry for each of the 1",
        ),
        (lambda: RoutingMap.from_edges([0], [0], 5, 1, offset=[[1.0] * 5]), "offset must be"),
        (lambda: RoutingMap.full((2, 0)), "size must be at least 1"),
    ],
)
def test_wrong_maps_are_refused(build, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        build()


@pytest.mark.parametrize(
    "routing_map",
    [
        RoutingMap.conv((4, 5), 3, stride=2, padding=1),
        RoutingMap.full((2, 3)),
        RoutingMap.from_edges([0, 1, 1, 3], [0, 0, 1, 1], 4, 2, weight_of=[1, 0]),
    ],
    ids=["conv", "full", "graph"],
)
def test_pairs_stand_in_the_orders_that_kernels_read(routing_map):
    tables = routing_map.tables()
    orders = orders_of(tables)
    slots = routing_map.num_slots
    assert (orders.parent * slots + orders.slot).equal(tables.parents_pair)
    assert (orders.edge_parent * slots + orders.edge_slot).tolist() == list(range(tables.children.numel()))
    expected = {(int(c), p, s) for p, row in enumerate(tables.children) for s, c in enumerate(row) if c >= 0}
    by_weight = list(
        zip(*(x.tolist() for x in (orders.weight_child, orders.weight_parent, orders.weight_slot)), strict=True)
    )
    assert (set(by_weight), len(by_weight)) == (expected, len(expected))
    for block, (start, end) in enumerate(itertools.pairwise(orders.weight_start.tolist())):
        assert {int(tables.weight_of[slot]) for _, _, slot in by_weight[start:end]} <= {block}
    assert len(orders.weight_start) == routing_map.num_weights + 1
    assert orders.weight_start[-1] == len(expected)
    assert all(x.data_ptr() % 16 == tables.orders.data_ptr() % 16 for x in orders)


@pytest.mark.parametrize("competition", ["global", "local", "positions"])
def test_kernels_make_no_tables_of_their_own(competition):
    """Otherwise CUDA graphs would compute them at every replay, and two streams at the same time."""
    routing_map = RoutingMap.conv((3, 3), 2)
    tables = routing_map.tables()

    class Nothing(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            assert function.is_view, f"{function} makes a tensor"
            return function(*args, **(kwargs or {}))

    with Nothing():
        groups_of(tables, competition)
        pairs_of(tables)
        offset_of(tables, torch.float32), offset_of(tables, torch.float64)
