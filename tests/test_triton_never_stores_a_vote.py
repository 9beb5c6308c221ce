"""The launches of the Triton backend for the paper's first ConvCaps layer, with batch size 64. No kernel runs."""

from types import SimpleNamespace

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from tritoncaps import RoutingMap, functional
from tritoncaps.kernels.mixture.triton.costs import em_routing_costs, launch_metadata, parent_metadata, sum_metadata
from tritoncaps.testing import Problem

PROBLEM = Problem(RoutingMap.conv((14, 14), 3, stride=2), images=64, in_caps=32, out_caps=32)


@pytest.fixture(scope="module")
def launches():
    """Kernel names and arguments of a training step."""
    recorded = []
    with pytest.MonkeyPatch.context() as patch:
        record = lambda kernel, *args, grid, warmup, **kwargs: recorded.append((kernel, grid, args, kwargs))  # noqa: E731
        patch.setattr(InterpretedFunction, "run", record)
        inputs = PROBLEM.inputs(torch.float32, requires_grad=True)
        capsules = functional.em_routing(*inputs, PROBLEM.routing_map, PROBLEM.routing, backend="triton")
        torch.autograd.grad([x.sum() for x in capsules], inputs)
    return recorded


def test_a_step_has_few_launches(launches):
    """Three M-steps of two launches, two E-steps, the outputs; their gradients; and the sweeps for dM and dW."""
    assert len(launches) == 9 + 10


def test_no_array_has_the_size_of_the_assignments(launches):
    m = PROBLEM.routing_map
    assignments = PROBLEM.images * m.num_edges * PROBLEM.in_caps * PROBLEM.out_caps
    arrays = [x for _, _, args, kwargs in launches for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    assert max(x.numel() for x in arrays) < assignments


@pytest.fixture(scope="module")
def costs():
    """The costs of this step that costs.py counts."""
    m = PROBLEM.routing_map
    sizes = (PROBLEM.images, m.num_children, m.num_parents, m.num_slots, PROBLEM.in_caps, PROBLEM.out_caps)
    forward, backward = em_routing_costs(*sizes, m.num_weights, m.num_edges)
    return [*forward, *backward]


def test_costs_are_those_of_the_launches(launches, costs):
    """The programs that costs.py counts are the programs that run."""
    counted = sorted((x.kernel, x.programs) for x in costs for _ in range(x.launches))
    assert counted == sorted((kernel.fn.__name__, grid[0]) for kernel, grid, _, _ in launches)


def test_profilers_see_the_costs(launches, costs):
    """The numbers that profilers get for each launch add up to the costs that costs.py counts."""
    hooks = {"fit_kernel": parent_metadata, "slopes_kernel": parent_metadata, "outputs_kernel": parent_metadata}
    hooks["add_splits_kernel"] = sum_metadata
    told: dict[str, int] = {}
    for kernel, grid, args, kwargs in launches:
        name = kernel.fn.__name__
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        found = hooks.get(name, launch_metadata)(grid, SimpleNamespace(name=name), arguments)
        assert found["name"] == name
        assert found["bytes"] == sum(x.nbytes for x in arguments.values() if isinstance(x, torch.Tensor))
        told[name] = told.get(name, 0) + found["flops"]
    for name in told:
        assert told[name] == sum(x.flops for x in costs if x.kernel == name), name
