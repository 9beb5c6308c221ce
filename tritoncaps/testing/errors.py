"""Comparisons of tensors. Their messages contain the largest error and its position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Values that should be zero are sums of terms that cancel: their rounding errors are relative to terms of this size.
LEAST_SCALE = 1e-5


def assert_close(name: str, actual: Tensor, expected: Tensor, tolerance: float = 1e-7) -> None:
    """Assert that the largest error is at most ``tolerance`` times the largest expected value, or times 1e-5 if all
    expected values are smaller than that.

    Args:
        name: name of the value in the message.
        actual: the computed tensor.
        expected: the correct tensor.
        tolerance: allowed relative error.

    Shape:
        - actual and expected: the same shape

    Example:
        >>> import torch
        >>> from tritoncaps import testing
        >>> testing.assert_close("poses", torch.tensor([1.0 + 1e-8]), torch.tensor([1.0]))
    """
    error, report = _error(name, actual, expected)
    allowed = tolerance * max(LEAST_SCALE, _largest(expected))
    assert error <= allowed, f"{report}; allowed {allowed:.3g}"


def assert_as_good_as(name: str, actual: Tensor, plain: Tensor, exact: Tensor, floor: float | None = None) -> None:
    """Assert that the largest error of ``actual`` is at most twice that of ``plain``, up to rounding.

    Args:
        name: name of the value in the message.
        actual: the computed tensor.
        plain: the result of plain torch in the same dtype.
        exact: the result in float64.
        floor: error that rounding may cause in addition, relative to the largest value or to one; default: 32 units in
            the last place.

    Shape:
        - actual, plain and exact: the same shape
    """
    floor = 32 * torch.finfo(plain.dtype).eps if floor is None else floor
    error, report = _error(name, actual, exact)
    plain_error, _ = _error(name, plain, exact)
    allowed = 2 * plain_error + floor * max(1.0, _largest(exact))
    assert error <= allowed, f"{report}; plain torch at {plain.dtype}: {plain_error:.3g}; allowed {allowed:.3g}"


def assert_broken_alike(
    names: Sequence[str], found: Sequence[Tensor], expected: Sequence[Tensor], before: Sequence[Tensor], image: int
) -> None:
    """Compare the non-finite values of a route (``found``) and of the reference (``expected``) for inputs with a nan in
    ``image``. ``before`` is the result of the route for the same inputs without the nan."""
    for name, mine, theirs, sound in zip(names, found, expected, before, strict=True):
        hidden = mine.isfinite() & ~theirs.isfinite()
        assert not hidden.any(), f"{name} is finite where the reference's is not, at {hidden.nonzero()[0].tolist()}"
        if not name.startswith("gradient"):
            extra = ~mine.isfinite() & theirs.isfinite()
            assert not extra.any(), f"{name} is not finite at {extra.nonzero()[0].tolist()}, but the reference's is"
        if name.endswith(("poses", "activations", "parents")):
            others = torch.arange(len(mine)) != image
            assert_close(f"{name} of the other images", mine[others], sound[others], 1e-6)


def _error(name: str, actual: Tensor, expected: Tensor) -> tuple[float, str]:
    assert actual.shape == expected.shape, f"{name} has shape {list(actual.shape)}, not {list(expected.shape)}"
    if actual.numel() == 0:
        return 0.0, f"{name} is empty"
    difference = (actual.detach().double() - expected.detach().double()).abs()
    difference = difference.nan_to_num(nan=float("inf"))
    worst = int(difference.argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(worst), difference.shape)]
    error, rms = difference.flatten()[worst].item(), difference.square().mean().sqrt().item()
    given, wanted = actual.flatten()[worst].item(), expected.flatten()[worst].item()
    return (
        error,
        f"{name} is off by {error:.3g} (RMS {rms:.3g}), worst at {place}: {given:.9g}, not {wanted:.9g}",
    )


def _largest(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0
