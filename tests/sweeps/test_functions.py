"""Every function of JAX, on the JAX of these tests: no output is typed too invariant.

``tests/core`` has the part of it that runs on every JAX; ``--full`` adds every gradient.
"""

from __future__ import annotations

import jax
import pytest

import shardrules as sr
from shardrules.hooks.cotangents.forward import ForwardHooks
from shardrules.hooks.retyping.replay import ReplayHooks
from shardrules.hooks.types.funnel import Law
from shardrules.hooks.types.join_law import JoinLawHooks
from sweeps import arguments, collectives, functions, pinned

pytestmark = pytest.mark.one_lane

MODULES = [name for name in arguments.modules() if arguments.functions(arguments.modules()[name])]
# How many functions of a module are called at least; of the others, one.
LEAST = {
    "jax.numpy": 306,
    "jax.numpy.linalg": 31,
    "jax.numpy.fft": 16,
    "jax.lax": 167,
    "jax.lax.linalg": 17,
    "jax.nn": 33,
    "jax.nn.initializers": 19,
    "jax.random": 45,
    "jax.scipy.linalg": 33,
    "jax.scipy.special": 52,
    "jax.scipy.signal": 10,
    "jax.scipy.stats.norm": 8,
}
# Those whose derivatives are looked at whenever tests run.
QUICK = ["jax.nn", "jax.numpy.linalg", "jax.lax"]


def sweep(cases, mode, sizes=None):
    with sr.install():
        return functions.sweep(cases, mode, sizes)


def named(name, *functions):
    """The cases of some functions of a module."""
    return [case for case in arguments.cases(name)[0] if case.name.split("#")[0] in functions]


@pytest.mark.sampled
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.slow
def test_what_is_typed_invariant_is_the_same_on_all_devices(module):
    cases, not_called = arguments.cases(module)
    called = {pinned.function(case.name) for case in cases}
    print(f"{module}: {len(called)} functions in {len(cases)} ways, not {not_called}")
    assert set(not_called) - set(pinned.NOT_CALLED) == set()
    if cases or not not_called:
        assert len(called) >= LEAST.get(module, 1)
    found = sweep(cases, "value")
    assert found.wrong == {}
    assert found.unexecuted == {}
    assert set(map(pinned.function, found.refused)) - set(pinned.REFUSED) == set()
    assert set(map(pinned.way, found.invariant)) - set(pinned.INVARIANT) == set()


@pytest.mark.full
def test_every_function_is_named_that_is_there():
    """No entry of the lists is left of a function that is called by now; others are elsewhere."""
    there = set()
    for name in MODULES:
        there |= set(arguments.cases(name)[1])
    assert set(pinned.NOT_CALLED) - there <= pinned.OF_OTHER_VERSIONS


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["jvp", "tangent"])
@pytest.mark.parametrize(
    "module",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in MODULES],
)
def test_derivatives_where_primals_vary_and_where_tangents_do(module, mode):
    found = sweep(arguments.cases(module)[0], mode)
    assert found.wrong == {}
    print(f"{module}: {found.count} derivatives, {len(found.refused)} refused")


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [pytest.param(name, marks=[] if name in QUICK[:2] else pytest.mark.full) for name in MODULES],
)
def test_gradients_are_those_of_one_device(module):
    cases, _ = arguments.cases(module)
    found = sweep(cases, "gradient")
    assert found.wrong == {}
    print(f"{module}: {found.count} gradients, {len(found.refused)} refused")


# Each mechanism taken away: the sweep has to see it.


@pytest.fixture
def fresh():
    """Nothing is left of what was traced with a mechanism, or without it."""
    sr.install().uninstall(ops=True)
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_it_sees_a_primitive_that_forgets(monkeypatch, fresh):
    monkeypatch.setattr(JoinLawHooks, "law", lambda *args: Law())
    cases = named("jax.lax", "lax.reduce", "lax.rng_uniform", "lax.sort_key_val")
    assert set(map(pinned.function, sweep(cases, "value").wrong)) == {
        "lax.sort_key_val",
        "lax.reduce",
        "lax.rng_uniform",
    }
    groups = [case for case in collectives.cases() if case.name == "lax.pmax#4 of a"]
    assert list(sweep(groups, "value", collectives.SIZES).wrong) == ["lax.pmax#4 of a"]
    ragged = [case for case in collectives.cases() if case.name.startswith("lax.ragged")]
    assert sweep(ragged, "value", collectives.SIZES).wrong


def test_it_sees_a_predicate_that_is_forgotten(monkeypatch, fresh):
    monkeypatch.setattr(ReplayHooks, "_decides", lambda *args: (None, frozenset()))
    found = sweep(named("jax.lax", "lax.cond", "lax.switch"), "value")
    assert set(map(pinned.function, found.wrong)) == {"lax.cond", "lax.switch"}


def test_it_sees_a_primal_that_is_not_cast_to_its_tangent(monkeypatch, fresh):
    cases = named("jax.nn", "nn.relu")
    found = sweep(cases, "tangent")
    assert cases and not found.wrong and not found.refused
    jax.clear_caches()
    monkeypatch.setattr(
        ForwardHooks, "_joined", lambda self, trace, primal, tangents: (primal, list(tangents))
    )
    found = sweep(cases, "tangent")
    assert found.wrong or found.refused
