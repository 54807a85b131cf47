"""Every function of JAX, on the JAX of these tests: no output is typed too invariant.

``tests/core`` has the part of it that runs on every JAX.
"""

from __future__ import annotations

import pytest

import shardrules as sr
from sweeps import arguments, collectives, functions, pinned

MODULES = [name for name in arguments.modules() if arguments.functions(arguments.modules()[name])]
# How many functions of a module are called at least; of the others, one.
LEAST = {
    "jax.numpy": 305,
    "jax.numpy.linalg": 31,
    "jax.numpy.fft": 16,
    "jax.lax": 165,
    "jax.lax.linalg": 17,
    "jax.nn": 33,
    "jax.nn.initializers": 19,
    "jax.random": 45,
    "jax.scipy.linalg": 33,
    "jax.scipy.special": 52,
    "jax.scipy.signal": 10,
    "jax.scipy.stats.norm": 8,
}
# What the hooks do not follow yet.
PENDING = {
    *("lax.reduce", "lax.reduce#1", "lax.reduce_window", "lax.rng_uniform", "lax.rng_uniform#1"),
    "scipy.linalg.expm_frechet",
    *(
        f"lax.{one}#{place} of {axes}"
        for one in ("pmax", "pmin")
        for place in (4, 5)
        for axes in ("a", "a+b")
    ),
}


def plain(name):
    """A function's name, of a case of it."""
    return name.split("#")[0].split(" [")[0]


def without_keyword(name):
    return plain(name).split("(")[0]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.slow
def test_what_is_typed_invariant_is_the_same_on_all_devices(module):
    cases, not_called = arguments.cases(module)
    called = {without_keyword(case.name) for case in cases}
    print(f"{module}: {len(called)} functions in {len(cases)} ways, not {not_called}")
    assert set(not_called) - set(pinned.NOT_CALLED) == set()
    if cases or not not_called:
        assert len(called) >= LEAST.get(module, 1)
    with sr.install():
        found = functions.sweep(cases, "value")
    assert {name: why for name, why in found.wrong.items() if name not in PENDING} == {}
    assert found.unexecuted == {}
    assert {without_keyword(name) for name in found.refused} - set(pinned.REFUSED) == set()
    known = set(pinned.INVARIANT) | set(map(plain, PENDING))
    assert {plain(name) for name in found.invariant} - known == set()


def test_collectives_are_typed_by_what_they_leave_on_devices():
    with sr.install():
        found = functions.sweep(collectives.cases(), "value", collectives.SIZES)
    wrong = {
        name: why
        for name, why in found.wrong.items()
        if name not in PENDING and "ragged" not in name
    }
    assert wrong == {}


@pytest.mark.slow
def test_every_function_is_named_that_is_there():
    """No entry of the lists is left of a function that is gone or called by now."""
    there = set()
    for name in MODULES:
        there |= set(arguments.cases(name)[1])
    gone = {"lax.pvary", "lax.pdot", "lax.all_gather_invariant", "lax.pgather"}
    assert set(pinned.NOT_CALLED) - there == gone
