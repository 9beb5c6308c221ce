"""Triton kernels read and write only inside of their arrays, for all sizes.

Every array of a launch gets a border of guard values on both sides. A load or a store outside of the arrays fails
immediately. A changed border, a guard value in a result, or an output that was not written fails after the launch.
"""

from functools import partial

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, InterpreterError, interpreter_builder

from tritoncaps import DynamicRouting, EMRouting, Gaussians, RoutingMap, functional, reference
from tritoncaps.testing import Problem, VectorProblem, assert_close, gradients, vector_gradients

BORDER = 64  # numbers on each side
GUARDS = {torch.float64: float("nan"), torch.float32: float("nan"), torch.int32: -(2**30)}


class Guard:
    """Runs launches on bordered copies of their arrays and checks every address."""

    def __init__(self, monkeypatch):
        self.launched = set()
        self.ranges = np.zeros((2, 0), np.uint64)  # first and last address of every array of the launch
        self.run = InterpretedFunction.run
        monkeypatch.setattr(
            InterpretedFunction, "run", lambda kernel, *args, **kwargs: self.launch(kernel, args, kwargs)
        )
        for name in ("create_masked_load", "create_masked_store"):
            access = getattr(interpreter_builder, name)
            mask = 1 if name == "create_masked_load" else 2
            monkeypatch.setattr(interpreter_builder, name, partial(self.access, access, mask), raising=False)

    def launch(self, kernel, args, kwargs):
        arguments = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
        arrays = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
        buffers = {name: self.bordered(x) for name, x in arrays.items()}
        inside = {name: buffer[BORDER:-BORDER].view(arrays[name].shape) for name, buffer in buffers.items()}
        bounds = [(x.data_ptr(), x.data_ptr() + (x.numel() - 1) * x.element_size()) for x in inside.values()]
        self.ranges = np.array(bounds, np.uint64).T
        self.run(kernel, **{**arguments, **inside})
        for name, x in arrays.items():
            x.data.copy_(inside[name])
            inside[name].fill_(0)
            untouched = self.bordered(torch.zeros_like(x))
            assert torch.equal(buffers[name].view(torch.uint8), untouched.view(torch.uint8)), (
                f"{kernel.fn.__name__}: {name}"
            )
        self.launched.add(kernel.fn.__name__)

    @staticmethod
    def bordered(x):
        assert x.is_contiguous()
        border = x.new_full((BORDER,), GUARDS[x.dtype])
        return torch.cat([border, x.reshape(-1), border])

    def access(self, function, mask, *operands):
        pointers, active = operands[0].data, operands[mask].data.astype(bool)
        lanes = pointers[np.broadcast_to(active, pointers.shape)][:, None]
        first, last = self.ranges
        inside = ((lanes >= first) & (lanes <= last)).any(axis=1)
        if not inside.all():
            raise IndexError(f"{(~inside).sum()} lanes out of bounds")
        return function(*operands)


@pytest.fixture
def guard(monkeypatch):
    return Guard(monkeypatch)


def ragged_map(parents, slots, children):
    """Parents with different numbers of slots, a child that has no parent, weights shared by slots."""
    pairs = [(p, s) for p in range(parents) for s in range(slots) if (p + s) % 3 < 2 or s in (0, slots - 1)]
    return RoutingMap.from_edges(
        [(p + s) % max(children - 1, 1) for p, s in pairs],
        [p for p, _ in pairs],
        children,
        parents,
        [s for _, s in pairs],
        weight_of=[s // 2 for s in range(slots)],
        offset=[[0.5 * s, 1.0] for s in range(slots)],
    )


# every dimension has every size from 1 to 9: images, child types, parent types, parents, slots, children; few are large
# at once, because the interpreter is slow; in the last one the types fill their tiles, so that loads have no mask, but
# the images do not
SIZES = [
    (1, 9, 1, 1, 2, 2),
    (2, 1, 17, 2, 3, 9),
    (3, 2, 9, 1, 2, 4),
    (4, 1, 2, 1, 2, 1),
    (5, 1, 8, 1, 2, 3),
    (6, 1, 4, 1, 1, 5),
    (7, 1, 5, 1, 1, 6),
    (8, 1, 3, 1, 2, 7),
    (9, 1, 7, 1, 1, 8),
    (1, 3, 6, 5, 1, 4),
    (1, 2, 33, 6, 1, 2),
    (1, 4, 2, 1, 7, 3),
    (2, 5, 4, 1, 4, 2),
    (1, 6, 1, 1, 5, 2),
    (1, 7, 1, 3, 1, 3),
    (2, 8, 1, 1, 1, 2),
    (1, 1, 1, 7, 1, 2),
    (2, 1, 2, 8, 1, 3),
    (1, 1, 1, 9, 1, 2),
    (1, 1, 3, 4, 6, 5),
    (1, 1, 2, 1, 9, 2),
    (2, 1, 1, 1, 8, 3),
    (3, 8, 16, 1, 2, 3),
]


COMPETITIONS = ("global", "local", "positions")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_em_routing(guard, sizes):
    images, in_caps, out_caps, parents, slots, children = sizes
    options = EMRouting(iterations=2, competition=COMPETITIONS[images % 3])
    problem = Problem(ragged_map(parents, slots, children), options, images, in_caps, out_caps)
    result = gradients(problem, partial(functional.em_routing, backend="triton"))
    for name, expected in gradients(problem, reference.em_routing).items():
        assert_close(name, result[name], expected)
    assert len(guard.launched) == 9


# every one of these, too, from 1 to 9; more than sixteen take a second block
ENTRIES = (2, 9, 8, 33, 6, 5, 4, 1, 2, 7, 3, 17, 16, 15, 2, 3, 16, 1, 4, 2, 5, 3, 16)


@pytest.mark.parametrize(("sizes", "entries"), list(zip(SIZES, ENTRIES, strict=True)), ids=str)
def test_stored_votes(guard, sizes, entries):
    images, in_caps, out_caps, parents, slots, children = sizes
    routing_map = ragged_map(parents, slots, children)
    votes = torch.randn(images, parents, slots, in_caps, out_caps, entries, requires_grad=True)
    assignments, activations = torch.rand(votes.shape[:5]), torch.rand(images, in_caps, children)
    betas = torch.randn(2, out_caps)
    with torch.no_grad():
        votes.masked_fill_((routing_map.children < 0)[None, :, :, None, None, None], float("nan"))
    found = functional.m_step(
        votes, assignments, activations, *betas, routing_map, inverse_temperature=1.0, backend="triton"
    )
    gaussians = Gaussians(*(x.detach() for x in found))
    competition = COMPETITIONS[images % 3]
    shares = functional.e_step(votes, gaussians, routing_map, competition=competition, backend="triton")
    (grad,) = torch.autograd.grad([x.sum() for x in (*found, shares**2)], votes)
    assert all(x.isfinite().all() for x in (*found, shares, grad))
    assert len(guard.launched) == 8


def test_every_dimension_has_every_size():
    assert all(set(range(1, 10)) <= set(column) for column in zip(*SIZES, strict=True))


def test_maps_have_missing_slots():
    """So the sizes above reach entries of -1."""
    assert sum((ragged_map(*sizes[3:]).children < 0).any().item() for sizes in SIZES) >= 4


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_pose_votes(guard, sizes):
    images, in_caps, out_caps, parents, slots, children = sizes
    problem = Problem(ragged_map(parents, slots, children), images=images, in_caps=in_caps, out_caps=out_caps)
    poses, _, weight, *_ = problem.inputs(torch.float32, requires_grad=True)
    votes = functional.pose_votes(poses, weight, problem.routing_map, backend="triton")
    votes = functional.coordinate_addition(votes, problem.routing_map, backend="triton")
    assert all(x.isfinite().all() for x in (votes, *torch.autograd.grad(votes.sum(), [poses, weight])))
    assert len(guard.launched) == 5


@pytest.mark.parametrize(("sizes", "entries"), list(zip(SIZES, ENTRIES, strict=True)), ids=str)
def test_dynamic_routing(guard, sizes, entries):
    images, in_caps, out_caps, parents, slots, children = sizes
    options = DynamicRouting(2, "local" if images % 2 else "global", none_of_the_above=in_caps % 2 == 0)
    problem = VectorProblem(ragged_map(parents, slots, children), options, images, in_caps, out_caps, children, entries)
    result = vector_gradients(problem, partial(functional.dynamic_routing, backend="triton"))
    for name, expected in vector_gradients(problem, reference.dynamic_routing).items():
        assert_close(name, result[name], expected)
    assert len(guard.launched) == 6


@triton.jit
def careless_kernel(p_in, p_out, OFFSET: tl.constexpr):
    tl.store(p_out, tl.load(p_in + OFFSET))


def test_the_guard_sees_a_step_outside(guard):
    careless_kernel[(1,)](torch.ones(3), out := torch.zeros(1), OFFSET=2)
    assert out.item() == 1
    for offset in (3, -1):
        with pytest.raises(InterpreterError, match="out of bounds"):
            careless_kernel[(1,)](torch.ones(3), torch.zeros(1), OFFSET=offset)
