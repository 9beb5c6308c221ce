"""Calls the `fit` of a routing: converts between the layout of parents in the operators and that of capsules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
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
        found = self._fit(iteration, *map(self._of_layer, (support, mean, variance)), *parameters)
        of_mean, precision, log_weight, logit = map(self._of_operator, found)
        return of_mean, precision, log_weight, logit

    def vjp(
        self, support: Tensor, mean: Tensor, variance: Tensor, parameters: Sequence[Tensor], iteration: int
    ) -> tuple[Sequence[Tensor], PullBack]:
        """Converts outside of the function that torch differentiates, because each view costs time there."""
        moments = map(self._of_layer, (support, mean, variance))
        values, pull_back_fit = vjp(partial(self._fit, iteration), *moments, *parameters)

        def pull_back(grads: Sequence[Tensor | None]) -> Sequence[Tensor]:
            found = pull_back_fit([None if x is None else self._of_layer(x) for x in grads])
            return *map(self._of_operator, found[:3]), *found[3:]

        return [self._of_operator(x) for x in values], pull_back

    def _fit(
        self, iteration: int, support: Tensor, mean: Tensor, variance: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        moments = Moments(support, mean, variance, self.data_per_parent)
        components = self.routing.fit(moments, dict(zip(self.names, parameters, strict=True)), iteration)
        check_components(self.routing, components, moments)
        return tuple(components)  # dynamo cannot trace the vjp of a function that returns a named tuple

    def _of_layer(self, x: Tensor) -> Tensor:
        """[N, P, C] as [N, C, *out_size], and [N, P, 16, C] as [N, C, *out_size, 4, 4]."""
        entries = (4, 4) if x.dim() == 4 else ()
        return x.reshape(len(x), *self.out_size, *entries, x.shape[-1]).movedim(-1, 1)

    def _of_operator(self, x: Tensor) -> Tensor:
        """The reverse of `_of_layer`."""
        entries = (16,) if x.dim() > 2 + len(self.out_size) else ()
        return x.movedim(1, -1).reshape(len(x), math.prod(self.out_size), *entries, x.shape[1])


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
