"""Every backend's EM routing equals the reference and has all properties of `tritoncaps.testing`."""

from functools import partial

import pytest

from tritoncaps import functional, testing

BACKENDS = {"reference": 20, "cpu": 20}  # problems for each check; the interpreter is slow


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("check", testing.EM_ROUTING_CHECKS, ids=lambda check: check.__name__)
def test_em_routing(check, backend):
    testing.verify(check, partial(functional.em_routing, backend=backend), examples=BACKENDS[backend])
