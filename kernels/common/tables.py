"""The tables of a routing map, as kernels read them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Tables(NamedTuple):
    """Which child feeds which parent, on one device. A pair is an edge, numbered p * S + s.

    P parent locations have S slots each; L are the child locations, E the edges.
    """

    children: Tensor  # int32 [P, S]: child location that feeds parent location p at slot s, or -1
    weight_of: Tensor  # int32 [S]: the weight block that slot s uses
    offset: Tensor  # float64 [S, 4]: what slot s adds to the right-hand column of its votes
    parents_start: Tensor  # int32 [L + 1]: the pairs of child location c are parents_pair[start[c]:start[c + 1]]
    parents_pair: Tensor  # int32 [E]: pairs p * S + s, ascending for each child
