"""Calls of the public functions with random arguments: the result equals that of the reference, or there is an error.

    python tests/fuzz.py --examples 20000                     in processes of 1000 examples, to find crashes
    python tests/fuzz.py --examples 400 --backend triton      in Triton's interpreter, ten times slower

Some arguments of a valid call are replaced: by another type, shape, dtype, device, memory layout, content or
requires_grad. The call must then return the result of the reference, or raise an error that names an argument.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from tritoncaps import Capsules, ClassCaps, ConvCaps2d, DynamicRouting, EMRouting, Gaussians, RoutingMap, VectorCaps
from tritoncaps import functional as F

EXAMPLES_OF_A_PROCESS = 1000
SECONDS_OF_A_PROCESS = 1800
ERRORS = (ValueError, TypeError, RuntimeError, NotImplementedError)

MAPS = (
    RoutingMap.full((2,)),
    RoutingMap.conv((3, 2), 2, padding=1),
    RoutingMap.from_edges([0, 2, 2], [0, 0, 2], 3, 3),
)
OTHER_VALUES = (None, "word", 3, -1.5, [1.0, 2.0], (), object(), RoutingMap.full((3,)), EMRouting(), DynamicRouting())
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64)
CONTENTS = (float("nan"), float("inf"), -float("inf"), 0.0, -0.3, -1e-7, 1e30, -1e30, 1e-38)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def em_arguments(routing_map: RoutingMap, images: int, types: int, out_types: int) -> dict[str, Any]:
    children = (images, types, *routing_map.in_size)
    return {
        "poses": normal(*children, 4, 4),
        "activations": torch.rand(children, dtype=torch.float64),
        "weight": 0.5 * normal(routing_map.num_weights, types, out_types, 4, 4),
        "beta_u": normal(out_types),
        "beta_a": normal(out_types),
        "routing_map": routing_map,
        "routing": EMRouting(iterations=2),
    }


def dynamic_arguments(routing_map: RoutingMap, images: int, types: int, out_types: int) -> dict[str, Any]:
    return {
        "poses": normal(images, types, *routing_map.in_size, 3),
        "weight": normal(routing_map.num_weights, types, out_types, 3, 5),
        "routing_map": routing_map,
        "routing": DynamicRouting(iterations=2),
        "priors": normal(routing_map.num_weights, types, out_types),
    }


def vote_arguments(routing_map: RoutingMap, images: int, types: int, out_types: int) -> dict[str, Any]:
    edges = (images, routing_map.num_parents, routing_map.num_slots, types, out_types)
    return {"votes": normal(*edges, 4, 4), "routing_map": routing_map, "assignments": normal(*edges).softmax(-1)}


def m_step_arguments(routing_map: RoutingMap, *sizes: int) -> dict[str, Any]:
    em = em_arguments(routing_map, *sizes)
    kept = {name: em[name] for name in ("activations", "beta_u", "beta_a")}
    return {**vote_arguments(routing_map, *sizes), **kept, "inverse_temperature": 0.5}


def e_step_arguments(routing_map: RoutingMap, images: int, types: int, out_types: int) -> dict[str, Any]:
    votes = vote_arguments(routing_map, images, types, out_types)
    parents = (images, out_types, *routing_map.out_size)
    gaussians = Gaussians(normal(*parents, 4, 4), normal(*parents, 4, 4).exp(), normal(*parents))
    return {"votes": votes["votes"], "gaussians": gaussians, "routing_map": routing_map}


def losses_arguments(routing_map: RoutingMap, images: int, types: int, out_types: int) -> dict[str, Any]:
    labels = torch.arange(images) % out_types
    return {"activations": torch.rand(images, out_types, dtype=torch.float64), "labels": labels}


def layer(make: Callable[[str], Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """A call of a new layer, always with the same weights."""

    def call(backend: str, **arguments: Any) -> Any:
        torch.manual_seed(0)
        return make(backend)(Capsules(*(arguments[name] for name in names)))

    return call


def capsules_arguments(space: tuple[int, ...], pose: tuple[int, ...]) -> Callable[..., dict[str, Any]]:
    def arguments(routing_map: RoutingMap, images: int, types: int, out_types: int) -> dict[str, Any]:
        activations = torch.rand(images, 2, *space, dtype=torch.float64)
        return {"poses": normal(images, 2, *space, *pose), "activations": activations}

    return arguments


def only(names: str, arguments: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    return lambda *sizes: {name: value for name, value in arguments(*sizes).items() if name in names.split()}


CALLS: dict[str, tuple[Callable[..., Any], Callable[..., dict[str, Any]]]] = {
    "em_routing": (F.em_routing, em_arguments),
    "dynamic_routing": (F.dynamic_routing, dynamic_arguments),
    "pose_votes": (F.pose_votes, only("poses weight routing_map", em_arguments)),
    "coordinate_addition": (F.coordinate_addition, only("votes routing_map", vote_arguments)),
    "m_step": (F.m_step, m_step_arguments),
    "e_step": (F.e_step, e_step_arguments),
    "squash": (lambda backend, vectors: F.squash(vectors, backend=backend), lambda *_: {"vectors": normal(2, 3)}),
    "spread_loss": (lambda backend, **a: F.spread_loss(**a, margin=0.5), losses_arguments),
    "margin_loss": (lambda backend, **a: F.margin_loss(**a), losses_arguments),
    "ConvCaps2d": (
        layer(lambda b: ConvCaps2d(2, 3, 2, backend=b, dtype=torch.float64), ("poses", "activations")),
        capsules_arguments((3, 2), (4, 4)),
    ),
    "ClassCaps": (
        layer(lambda b: ClassCaps(2, 3, backend=b, dtype=torch.float64), ("poses", "activations")),
        capsules_arguments((2,), (4, 4)),
    ),
    "VectorCaps": (
        layer(lambda b: VectorCaps(2, 3, 2, 5, backend=b, dtype=torch.float64), ("poses", "activations")),
        capsules_arguments((), (3,)),
    ),
}


@st.composite
def changed(draw: Any, value: Any) -> Any:
    """A replacement for an argument."""
    if isinstance(value, Gaussians):
        parts = list(value)
        i = draw(st.integers(0, 2))
        parts[i] = draw(changed(parts[i]))
        return Gaussians(*parts)
    if not isinstance(value, Tensor) or draw(st.integers(0, 5)) == 0:
        return draw(st.sampled_from(OTHER_VALUES))
    kind = draw(st.sampled_from(("dtype", "shape", "layout", "content", "device", "requires_grad")))
    axis = draw(st.integers(0, value.ndim - 1))
    if kind == "dtype":
        return value.to(draw(st.sampled_from(DTYPES)))
    if kind == "shape":
        others = [value.unsqueeze(axis), value.narrow(axis, 0, 0), value.repeat_interleave(2, axis), value.flatten()]
        return draw(st.sampled_from(others))
    if kind == "layout":
        other = value.movedim(axis, 0).contiguous().movedim(0, axis)
        return draw(st.sampled_from((other, value.narrow(axis, 0, min(1, value.shape[axis])).expand(value.shape))))
    if kind == "content" and value.is_floating_point():
        mask = torch.rand(value.shape) < draw(st.sampled_from((0.1, 1.0)))
        return value.masked_fill(mask, draw(st.sampled_from(CONTENTS)))
    if kind == "device":
        return value.to("meta")
    return value.clone().requires_grad_() if value.is_floating_point() else value


@st.composite
def calls(draw: Any) -> tuple[str, dict[str, Any]]:
    name = draw(st.sampled_from(sorted(CALLS)))
    sizes = draw(st.integers(0, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 9))
    torch.manual_seed(draw(st.integers(0, 1000)))
    arguments = CALLS[name][1](draw(st.sampled_from(MAPS)), *sizes)
    for argument in draw(st.lists(st.sampled_from(sorted(arguments)), max_size=3, unique=True)):
        arguments[argument] = draw(changed(arguments[argument]))
    return name, arguments


def outcome(name: str, arguments: dict[str, Any], backend: str) -> list[Tensor] | Exception:
    """Outputs and gradients of a call, or its error."""
    inputs = {
        k: v.detach().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for k, v in arguments.items()
    }
    try:
        outputs = torch.utils._pytree.tree_leaves(CALLS[name][0](backend=backend, **inputs))
    except ERRORS as error:
        return error
    wanted = [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]
    outputs = [x for x in outputs if x is not None]
    if not wanted or not any(x.requires_grad for x in outputs) or outputs[0].device.type == "meta":
        return outputs
    grads = torch.autograd.grad([x.sum() for x in outputs if x.requires_grad], wanted, allow_unused=True)
    return [*outputs, *(torch.zeros(()) if x is None else x for x in grads)]


def check(name: str, arguments: dict[str, Any], backend: str) -> None:
    mine, theirs = (outcome(name, arguments, own) for own in (backend, "reference"))
    if isinstance(mine, Exception) or isinstance(theirs, Exception):
        assert type(mine) is type(theirs), f"{backend}: {mine!r}; reference: {theirs!r}"
        sentence = str(mine)
        named = {*arguments, *Gaussians._fields, "capsules", "dim", "kernel"}
        assert any(re.search(rf"\b{word}\b", sentence) for word in named), f"names no argument: {sentence!r}"
        assert "\n" not in sentence, f"more than a line: {sentence!r}"
        return
    assert [(x.shape, x.dtype, x.device) for x in mine] == [(x.shape, x.dtype, x.device) for x in theirs]
    if all(x.dtype == torch.float64 and x.device.type == "cpu" for x in mine) and moderate(arguments):
        for x, y in zip(mine, theirs, strict=True):
            known = y.isfinite()
            torch.testing.assert_close(x[known], y[known], rtol=1e-5, atol=1e-5)


def moderate(arguments: dict[str, Any]) -> bool:
    """True if all numbers have a size at which rounding errors are small."""
    leaves = torch.utils._pytree.tree_leaves(list(arguments.values()))
    tensors = [x.double() for x in leaves if isinstance(x, Tensor) and x.is_floating_point() and not x.is_meta]
    return all(not ((x.abs() > 1e6) & x.isfinite()).any() for x in tensors)


def fuzz(examples: int, first: int, backend: str) -> None:
    if backend == "triton":
        import conftest  # noqa: F401  how the interpreter runs in all tests

    @seed(first)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(calls())
    def run(call: tuple[str, dict[str, Any]]) -> None:
        check(*call, backend)

    run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=("cpu", "triton"), default="cpu")
    parser.add_argument("--here", action="store_true", help="in this process")
    args = parser.parse_args()
    if args.here:
        return fuzz(args.examples, args.seed, args.backend)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # before Triton is imported
    for first in range(0, args.examples, EXAMPLES_OF_A_PROCESS):
        count = min(EXAMPLES_OF_A_PROCESS, args.examples - first)
        command = [sys.executable, "-W", "ignore", __file__, "--here", "--backend", args.backend]
        command += ["--examples", str(count), "--seed", str(args.seed + first)]
        done = subprocess.run(command, timeout=SECONDS_OF_A_PROCESS, check=False, env=environment)
        if done.returncode:
            sys.exit(f"seed {args.seed + first} failed with exit code {done.returncode}")
        print(f"{first + count} of {args.examples} examples on {args.backend} passed", flush=True)


if __name__ == "__main__":
    main()
