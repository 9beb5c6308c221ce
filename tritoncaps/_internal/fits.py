"""Calls the `fit` of a routing: converts between the layout of parents in the operators and that of capsules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from tritoncaps.kernels.common.tracing import constant
from tritoncaps.kernels.mixture.backend import backend_of
from tritoncaps.kernels.mixture.function import PullBack, vjp, with_zeros
from tritoncaps.kernels.mixture.vb import vb_fit, vb_fit_gradients
from tritoncaps.routing import Components, MixtureRouting, Moments, VBRouting


@dataclass(frozen=True, eq=False)  # torch.compile in torch 2.8 hashes the object before its fields exist
class Fit:
    """The fit of a routing as `kernels.mixture.function` calls it, with tensors [N, P, 16, C] and [N, P, C]."""

    routing: MixtureRouting
    names: tuple[str, ...]  # names of its parameters
    out_size: tuple[int, ...]
    data_per_parent: float

    @property
    def scatter_floor(self) -> float:
        return self.routing.scatter_floor

    def __call__(
        self, support: Tensor, mean: Tensor, variance: Tensor, parameters: Sequence[Tensor], iteration: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        number = (support.shape[0], support.shape[2], *self.out_size)
        moments = Moments(
            support.transpose(1, 2).reshape(number),
            mean.permute(0, 3, 1, 2).reshape(*number, 4, 4),
            variance.permute(0, 3, 1, 2).reshape(*number, 4, 4),
            self.data_per_parent,
        )
        given = dict(zip(self.names, parameters, strict=True))
        components = self.routing.fit(moments, given, iteration)
        check_components(self.routing, components, moments)
        flat = (support.shape[0], support.shape[2], support.shape[1])
        of_mean, precision = (
            x.reshape(*flat, 16).permute(0, 2, 3, 1) for x in (components.mean, components.precision)
        )
        log_weight, logit = (x.reshape(flat).transpose(1, 2) for x in (components.log_weight, components.logit))
        return of_mean, precision, log_weight, logit

    def vjp(
        self, support: Tensor, mean: Tensor, variance: Tensor, parameters: Sequence[Tensor], iteration: int
    ) -> tuple[Sequence[Tensor], PullBack]:
        return vjp(lambda s, m, v, *p: self(s, m, v, p, iteration), support, mean, variance, *parameters)


@dataclass(frozen=True, eq=False)
class VBFit(Fit):
    """The fit of variational Bayes routing with the kernels of a backend."""

    backend: str

    @property
    def priors(self) -> list[float]:
        routing = cast(VBRouting, self.routing)
        return [routing.alpha0, routing.mean0, routing.kappa0, routing.nu0, routing.psi0]

    def __call__(
        self, support: Tensor, mean: Tensor, variance: Tensor, parameters: Sequence[Tensor], iteration: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return vb_fit(support, mean, variance, parameters[0], self.priors, self.backend)

    def vjp(
        self, support: Tensor, mean: Tensor, variance: Tensor, parameters: Sequence[Tensor], iteration: int
    ) -> tuple[Sequence[Tensor], PullBack]:
        moments = support, mean, variance

        values = self(*moments, parameters, iteration)

        def pull_back(grads: Sequence[Tensor | None]) -> Sequence[Tensor]:
            all_grads = with_zeros(grads, values)
            return *vb_fit_gradients(*moments, *all_grads, self.priors, self.backend), all_grads[3].sum((0, 1))

        return values, pull_back


def fit_of(
    routing: MixtureRouting, backend: str, names: tuple[str, ...], out_size: tuple[int, ...], data_per_parent: float
) -> Fit:
    """The fit of a routing, with kernels if the backend has them."""
    if type(routing).fit is VBRouting.fit and _has_vb_kernels(backend):
        return VBFit(routing, names, out_size, data_per_parent, backend)
    return Fit(routing, names, out_size, data_per_parent)


@constant
def _has_vb_kernels(backend: str) -> bool:
    return backend_of(backend).vb is not None


def check_components(routing: MixtureRouting, components: Components, moments: Moments) -> None:
    """Raise an error of one sentence if the result of a fit has a wrong type, shape or dtype."""
    name = f"{type(routing).__name__}.fit"
    if not isinstance(components, tuple) or len(components) != 4:
        raise TypeError(
            f"{name} must return Components(mean, precision, log_weight, logit), but it returned a "
            f"{type(components).__name__}"
        )
    matrix, number = moments.mean, moments.support
    expected = {"mean": matrix, "precision": matrix, "log_weight": number, "logit": number}
    for (field, like), value in zip(expected.items(), components, strict=True):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must return {field} as a tensor, but it is a {type(value).__name__}")
        if value.shape != like.shape:
            raise ValueError(
                f"{name} must return {field} of shape {list(like.shape)}, but it has shape {list(value.shape)}"
            )
        if value.dtype != like.dtype:
            raise TypeError(f"{name} must return {field} of dtype {like.dtype}, but it has {value.dtype}")
