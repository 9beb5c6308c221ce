"""exp and log of vectors in CPU kernels, compared with NumPy."""

import numba
import numpy as np
import pytest

from tritoncaps.kernels.common.cpu.processor import VECTOR_BYTES
from tritoncaps.kernels.common.cpu.simd import exp, log, microkernel

ZERO_UNTIL = -60.0


def _exp_row(out, x):
    out[0] = exp([x[0]])[0]


def _exp_row_or_zero(out, x):
    out[0] = exp([x[0]], zero_until=ZERO_UNTIL)[0]


def _log_row(out, x):
    out[0] = log(x[0])


def of_all(function):
    """A function of arrays that applies a function of rows to each vector."""
    apply = microkernel(function)

    @numba.njit
    def run(out, x, lanes):
        for i in range(0, len(x), lanes):
            apply(out, i, x, i)

    def call(x):
        lanes = VECTOR_BYTES // x.itemsize
        out, padded = np.empty((2, -(-len(x) // lanes) * lanes), x.dtype)
        padded[: len(x)] = x
        run(out, padded, lanes)
        return out[: len(x)]

    return call


exps, exps_or_zero, logs = map(of_all, (_exp_row, _exp_row_or_zero, _log_row))
DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@DTYPES
def test_exp(dtype):
    x = np.append(-np.linspace(0, 80, 10_001), [-1e4, -np.inf]).astype(dtype)
    np.testing.assert_allclose(exps(x), np.exp(x.astype(np.longdouble)).astype(dtype), rtol=2 * np.finfo(dtype).eps)
    assert exps(x)[-2:].tolist() == [0, 0]


@DTYPES
def test_exp_underflows_gradually(dtype):
    x = np.log(np.array(np.finfo(dtype).tiny, dtype)) - np.arange(1, 8, dtype=dtype)
    expected = np.exp(x.astype(np.longdouble)).astype(dtype)
    np.testing.assert_allclose(exps(x), expected, rtol=0, atol=np.finfo(dtype).smallest_subnormal)
    assert (exps(x) > 0).all()


@DTYPES
def test_exp_is_zero_until_a_number(dtype):
    above = np.array([0, -1, -59.9, np.nextafter(dtype(ZERO_UNTIL), dtype(0))], dtype)
    assert (exps_or_zero(above) == exps(above)).all()
    assert exps_or_zero(np.array([ZERO_UNTIL, -61, -1e30, -np.inf], dtype)).tolist() == [0] * 4


@DTYPES
@pytest.mark.parametrize("function", [exps, exps_or_zero, logs])
def test_nan_stays_nan(function, dtype):
    all_ones = np.full(1, -1, f"i{np.dtype(dtype).itemsize}").view(dtype)
    assert np.isnan(function(np.append(all_ones, dtype(np.nan)))).all()


@DTYPES
def test_log(dtype):
    smallest, largest = np.finfo(dtype).tiny, np.finfo(dtype).max
    x = (
        np.append(np.geomspace(smallest, largest / 2, 10_001), np.linspace(0.5, 2, 1000))
        .clip(smallest, largest)
        .astype(dtype)
    )
    expected = np.log(x.astype(np.longdouble)).astype(dtype)
    np.testing.assert_allclose(logs(x), expected, rtol=3 * np.finfo(dtype).eps, atol=0)
    assert logs(np.array([0, np.inf], dtype)).tolist() == [-np.inf, np.inf]
