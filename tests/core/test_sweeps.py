"""What JAX's functions and collectives return under the check, on this JAX: see tests/sweeps."""

from __future__ import annotations

import pytest
from sweeps import arguments, collectives, functions, pinned

import shardrules as sr

# How many functions are called at least: the oldest JAX has fewest.
LEAST = {"jax.lax": 140, "jax.random": 35, "jax.lax.linalg": 9}


@pytest.mark.slow
@pytest.mark.parametrize("module", LEAST)
def test_what_is_typed_invariant_is_the_same_on_all_devices(module):
    cases, not_called = arguments.cases(module)
    called = set(map(pinned.function, (case.name for case in cases)))
    print(f"{module}: {len(called)} functions in {len(cases)} ways, not {not_called}")
    assert len(called) >= LEAST[module]
    assert set(not_called) - set(pinned.NOT_CALLED) == set()
    with sr.install():
        found = functions.sweep(cases, "value")
    assert found.wrong == {}


def test_collectives_are_typed_by_what_they_leave_on_devices():
    with sr.install():
        found = functions.sweep(collectives.cases(), "value", collectives.SIZES)
    assert found.wrong == {}
