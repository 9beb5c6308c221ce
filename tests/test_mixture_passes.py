"""The passes of a mixture routing over the votes equal autograd through stored votes, for any fit."""

import math

import pytest
import torch
import torch.nn.functional as F
from einops import einsum

from tritoncaps import RoutingMap
from tritoncaps.kernels.common.numerics import least_support
from tritoncaps.kernels.mixture.function import MixtureFunction, vjp

BACKEND = "triton"
B, C, H = 3, 5, 16
MAP = RoutingMap.conv((2,), (2,), (1,), (1,))  # its first and its last parent have a missing slot


def em(support, mean, variance, parameters, t):
    beta_u, beta_a = parameters
    variance = variance.clamp(min=1e-4)
    cost = H * beta_u * support + 0.5 * variance.log().sum(2) * support
    logit = (1 - 0.95 ** (t + 1)) * (beta_a - cost)
    return mean.clone(), 1 / variance, F.logsigmoid(logit) - 0.5 * (2 * math.pi * variance).log().sum(2), logit


def vb(support, mean, variance, parameters, t):
    """Variational Bayes: its mean is drawn to zero, its types depend on each other."""
    alpha, kappa, nu = 1 + support, 1 + support, 17 + support
    inv_psi = 1 + support[:, :, None] * variance + (support / kappa)[:, :, None] * mean**2
    orders = torch.arange(H)[:, None]
    log_det = torch.digamma((nu[:, :, None] - orders) / 2).sum(2) + H * math.log(2) - inv_psi.log().sum(2)
    log_pi = torch.digamma(alpha) - torch.digamma(alpha.sum(2, keepdim=True))
    log_weight = log_pi + 0.5 * log_det - 0.5 * H / kappa
    logit = parameters[1] - log_pi.exp() * (0.5 * H * math.log(2 * math.pi * math.e) - 0.5 * log_det)
    return (support / kappa)[:, :, None] * mean, nu[:, :, None] / inv_psi, log_weight, logit


def far(support, mean, variance, parameters, t):
    """Components whose means are far from those of the votes, in both directions."""
    away = torch.linspace(-30, 30, C) * (1 + t)
    components = mean + away + 0.1 * variance
    return components, 0.01 / (1 + variance), parameters[0] * support, parameters[1] + (components * mean).mean(2)


for _fit in (em, vb, far):
    _fit.scatter_floor = 0.0  # no tolerance for errors of the variance
    _fit.vjp = lambda s, m, v, p, t, fit=_fit: vjp(lambda s, m, v, *p: fit(s, m, v, p, t), s, m, v, *p)


def with_stored_votes(fit, poses, activations, weight, parameters, iterations, competition, gradient):
    """Mean, logit and the moments of every iteration; votes are [N, P, S, B, C, 16]."""
    tables = MAP.tables()
    present = (tables.children >= 0).to(poses.dtype)
    child, N = tables.children.clamp(min=0).long(), len(poses)
    of_slots = weight[tables.weight_of.long()]
    votes = einsum(poses[:, :, child], of_slots, "n b p s x y, s b c y z -> n p s b c x z").clone()
    votes[..., 3] += tables.offset.to(poses.dtype)[:, None, None]
    votes = votes.flatten(5)
    a = activations[:, :, child].permute(0, 2, 3, 1) * present[:, :, None]
    joined = F.one_hot(child, poses.shape[2]).to(poses.dtype) * present[..., None]  # [P, S, L]
    positions = einsum(joined, "p s l -> l")[child]
    rivals = {"global": positions * C, "local": torch.full_like(present, C), "positions": positions}[competition]
    R = (present / rivals.clamp(min=1))[None, :, :, None, None].expand(N, -1, -1, B, C)
    found = []
    for t in range(iterations):
        r = R * a[..., None]
        if gradient == "last" and t == iterations - 1:
            r = R.detach() * a[..., None]
        support = r.sum((2, 3))
        scale = torch.where(support > least_support(support.dtype), support, 1)[..., None]
        mean = einsum(r, votes, "n p s b c, n p s b c h -> n p c h") / scale
        variance = einsum(r, (votes - mean[:, :, None, None]) ** 2, "n p s b c, n p s b c h -> n p c h") / scale
        if gradient == "last" and t < iterations - 1:
            support, mean, variance = support.detach(), mean.detach(), variance.detach()
        moments = support, mean.mT, variance.mT
        found += moments
        *components, logit = fit(*moments, parameters, t)
        m, p, w = (x.detach() for x in components) if gradient == "last" and t < iterations - 1 else components
        d = votes - m.mT[:, :, None, None]
        likelihood = w[:, :, None, None] - 0.5 * (p.mT[:, :, None, None] * d**2).sum(5)
        likelihood = likelihood.masked_fill(present[:, :, None, None] == 0, -math.inf)
        if competition == "local":
            R = likelihood.softmax(4).nan_to_num(0)
        else:
            absent = (joined == 0)[None, :, :, None, None]  # [1, P, S, 1, 1, L]
            of_children = likelihood[..., None].masked_fill(absent, -math.inf)  # [N, P, S, B, C, L]
            rival_axes = (1, 2, 4) if competition == "global" else (1, 2)
            log_sum = of_children.logsumexp(rival_axes, keepdim=True)[:, 0, 0].movedim(-1, 1)[:, child]
            R = (likelihood - log_sum).exp()
    return components[0], logit, found


def inputs(dtype):
    poses = torch.randn(2, B, 2, 4, 4, dtype=torch.float64)
    activations = torch.rand(2, B, 2, dtype=torch.float64)
    activations[0, 1, 1] = 0
    weight = 0.5 * torch.randn(2, B, C, 4, 4, dtype=torch.float64)
    given = [poses, activations, weight, 0.1 * torch.randn(C), torch.randn(C)]
    return [x.to(dtype).requires_grad_() for x in given]


def close(found, wanted, tolerance, name):
    error = (found.double() - wanted.double()).abs().max() / wanted.abs().max().clamp(min=1e-3)
    assert error < tolerance, f"{name}: {error:.1e}"


CASES = [
    (em, "global", 2, "all"),
    (vb, "local", 2, "all"),
    (vb, "global", 1, "all"),
    (far, "global", 3, "all"),
    (far, "local", 2, "last"),
    (em, "positions", 3, "all"),
    (vb, "positions", 2, "last"),
]


@pytest.mark.parametrize(("fit", "competition", "iterations", "gradient"), CASES)
def test_any_fit_has_the_gradients_of_autograd(fit, competition, iterations, gradient):
    given = inputs(torch.float64)
    torch.set_default_dtype(torch.float64)
    try:
        mean, logit, *found = run(fit, given, iterations, competition, gradient)
        *wanted, moments = with_stored_votes(
            fit, *given[:3], [x.double() for x in given[3:]], iterations, competition, gradient
        )
        for i, (x, y) in enumerate(zip((mean, logit, *found[: 3 * iterations]), (*wanted, *moments), strict=True)):
            close(x, y, 1e-10, f"output {i}")
        grads = [torch.randn_like(x) for x in wanted]
        names = "poses", "activations", "weight", "first", "second"
        right = torch.autograd.grad(wanted, given, grads, allow_unused=True)
        for name, x, y in zip(names, torch.autograd.grad((mean, logit), given, grads), right, strict=True):
            close(x, torch.zeros_like(x) if y is None else y, 1e-7, name)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("fit", "dtype", "tolerance"), [(far, torch.float32, 1e-4), (vb, torch.float16, 1e-2)])
def test_any_fit_in_every_dtype(fit, dtype, tolerance):
    given = inputs(dtype)
    double = [x.detach().double().requires_grad_() for x in given]
    outputs = run(fit, given, 2, "global", "all")[:2]
    wanted = with_stored_votes(fit, *double[:3], double[3:], 2, "global", "all")[:2]
    grads = [torch.randn_like(x) for x in wanted]
    for x, y in zip(outputs, wanted, strict=True):
        close(x, y, tolerance, "output")
    found = torch.autograd.grad(outputs, given, [g.to(dtype) for g in grads])
    right = torch.autograd.grad(wanted, double, grads, allow_unused=True)
    for name, x, y in zip(("poses", "activations", "weight", "first", "second"), found, right, strict=True):
        assert x.dtype == dtype
        close(x, torch.zeros_like(x) if y is None else y, 10 * tolerance, name)


def run(fit, given, iterations, competition, gradient):
    poses, activations, weight, *parameters = given
    options = (list(MAP.tables()), iterations, competition, gradient, BACKEND)
    return MixtureFunction.apply(fit, poses, activations, weight, *options, *parameters)


@pytest.mark.parametrize("competition", ["global", "local", "positions"])
def test_fake_passes_tell_shapes_and_strides(competition):
    inputs_of_votes = [x.detach() for x in inputs(torch.float32)[:3]]
    options, ops = (list(MAP.tables()), competition), torch.ops.tritoncaps
    votes = (*inputs_of_votes, list(checked(ops.mixture_packed, *inputs_of_votes, *options, BACKEND)))
    support, mean, variance, _ = checked(ops.mixture_moments, *votes, [], *options, 0.0, BACKEND)
    components, moments = [mean, 1 / (1 + variance), support], 2 * [support, mean, variance]
    log_sum = checked(ops.mixture_moments, *votes, components, *options, 0.0, BACKEND)[3]
    da = checked(ops.mixture_component_gradients, *votes, components, log_sum, moments, *options, BACKEND)[3]
    history = (components, [log_sum], 2 * moments, [da])
    checked(ops.mixture_gradients, *votes, *history, *options, True, True, BACKEND)


def checked(operator, *arguments):
    torch.library.opcheck(operator, arguments, test_utils="test_faketensor")
    return operator(*arguments)


def test_cpu_assignments_are_zero_before_they_are_subnormal():
    """Instructions are many times slower with subnormal numbers."""
    types, tables, ops = 64, RoutingMap.conv((1,), (1,), (1,), (0,)).tables(), torch.ops.tritoncaps
    poses, activations, weight = torch.randn(2, B, 1, 4, 4), torch.ones(2, B, 1), torch.randn(1, B, types, 4, 4)
    packed = ops.mixture_packed(poses, activations, weight, list(tables), "global", "cpu")
    votes, options = (poses, activations, weight, list(packed)), (list(tables), "global")
    log_weight = torch.linspace(0, -120, types).expand(2, 1, types).contiguous()
    numbers, entries = torch.ones_like(log_weight), torch.zeros(2, 1, H, types)
    components = [entries, entries + 1e-6, log_weight]
    log_sum = ops.mixture_moments(*votes, [*components, entries], *options, 0.0, "cpu")[3]
    of_support = torch.linspace(-100, 100, types) * numbers
    moments = [numbers, entries, entries + 1, of_support, entries, entries]
    weights = ops.mixture_component_gradients(*votes, components, log_sum, moments, *options, "cpu")[3][
        2 * B :
    ]  # r and dl
    tiny = torch.finfo(torch.float32).tiny
    assert ((weights != 0) & (weights.abs() < 1e6 * tiny)).any()
    assert not ((weights != 0) & (weights.abs() < tiny)).any()
