"""From one sharding to another by gathering all: the way between that the hint names is followed."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from costs.test_waste import follow, hints, structs

MATRIX = (1024, 512)
CUBE = (128, 128, 128)
DATA, MODEL = "data", "model"
# From, to, by way of; sent before and after.
WAYS = {
    "columns": (P(DATA), P(None, MODEL), P(DATA, MODEL), (1572864, 786432)),
    "few": (P(MODEL), P(None, DATA), P(MODEL, DATA), (1048576, 262144)),
    "rows": (P(None, MODEL), P(DATA), P(DATA, MODEL), (1048576, 262144)),
    "both": (P((DATA, MODEL)), P(None, DATA), P(None, (DATA, MODEL)), (1835008, 491520)),
    "minor": (P(None, (DATA, MODEL)), P(MODEL), P(MODEL, DATA), (1835008, 917504)),
    "turned": (P((MODEL, DATA)), P(None, DATA), P(MODEL, DATA), (1835008, 458752)),
}


def constrained(x, *specs):
    for spec in specs:
        x = lax.with_sharding_constraint(x, spec)
    return x


def moved(mesh, start, *specs):
    """A step that makes an array by one sharding and reads it by another."""
    out = NamedSharding(mesh, specs[-1])
    return jax.jit(lambda x: constrained(jnp.tanh(x), start, *specs) * 2, out_shardings=out)


def written(spec):
    """Write a PartitionSpec as one types it; JAX's versions print it in several ways."""
    axes = [a[0] if isinstance(a, tuple) and len(a) == 1 else a for a in spec]
    return f"P({', '.join(map(repr, axes))})"


@pytest.mark.parametrize("name", WAYS)
def test_from_one_sharding_to_another_by_gathering_all(platform, name):
    start, end, between, sent = WAYS[name]
    mesh = platform[1]
    with jax.set_mesh(mesh):
        f, g = moved(mesh, start, end), moved(mesh, start, between, end)
        (found,) = follow(platform[:2], f, g, structs(mesh, [(MATRIX, start)]), "resharded", sent)
    assert f"from {written(start)} to {written(end)}, and each device keeps a" in found.advice
    assert "XLA gathers all of f32[1024,512] of " in found.advice
    assert "test_resharded.py:" in found.advice.partition(" to bring it")[0]
    # What it says to type, typed.
    typed = re.search(r"write x = (jax\.lax\.with_sharding_constraint\(.*\))$", found.advice)[1]
    whole = jnp.ones(MATRIX) if platform[0] == "cpu" else None
    if whole is not None:
        array = eval(typed, {"jax": jax, "mesh": mesh, "P": P, "x": whole})
        assert array.sharding.spec == between


def added(mesh, start, *specs):
    """As in jax#21562, where no constraint stands on what is gathered."""
    out = NamedSharding(mesh, specs[-1])
    return jax.jit(lambda a, b, c: c + constrained(a + b, *specs), out_shardings=out)


@pytest.mark.parametrize(
    "platform", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)], indirect=True
)
def test_an_array_that_is_gathered_along_two_dimensions(platform):
    """Each gather has a hint; the second one is of what is left of the first."""
    start, end, mesh = P(MODEL, None, DATA), P(None, (DATA, MODEL)), platform[1]
    given = structs(mesh, [(CUBE, start), (CUBE, start), (CUBE, end)])
    with jax.set_mesh(mesh):
        f, g = added(mesh, start, end), added(mesh, start, P(MODEL, DATA), end)
        found = follow(platform[:2], f, g, given, "resharded", (7340032, 1310720))
    assert [h.round_trips_after for h in found] == [1, 1]
    whole, rest = sorted((h.advice for h in found), key=len, reverse=True)
    assert f"from {written(start)} to {written(end)}" in whole and written(P(MODEL, DATA)) in whole
    assert rest.startswith("goes with the gather at ")


SQUARE = P(DATA, MODEL)


@pytest.mark.parametrize(
    "start, f",
    [
        (P(DATA), lambda x: constrained(jnp.tanh(x), P(DATA), P(None, DATA)) * 2),  # all-to-all
        (P(DATA), lambda x: constrained(jnp.tanh(x), P(DATA), P(DATA, MODEL)) * 2),  # a slice
        (SQUARE, lambda x: constrained(jnp.tanh(x), SQUARE, P(None, MODEL)) * 2),  # what it needs
        (P(DATA), lambda x: (lambda y: (y, constrained(y, P(None, MODEL))))(constrained(x, P()))),
        (P(DATA), lambda x: constrained(jnp.tanh(x) @ jnp.ones((512, 512)), P(None, MODEL))),
    ],
    ids="all_to_all slice gather whole product".split(),
)
def test_what_no_constraint_between_replaces(cpu_mesh, start, f):
    with jax.set_mesh(cpu_mesh):
        given = structs(cpu_mesh, [(MATRIX, start)])
        assert not [h for h in hints(jax.jit(f), given) if h.kind == "resharded"]


def test_a_small_array_is_not_worth_another_round_trip(cpu_mesh):
    start, end = P((DATA, MODEL)), P(None, DATA)
    with jax.set_mesh(cpu_mesh):
        given = structs(cpu_mesh, [((64, 64), start)])
        assert hints(moved(cpu_mesh, start, end), given) == []


def test_dimensions_that_the_way_between_does_not_divide(cpu_mesh):
    """A constraint to P(None, ('data', 'model')) is refused for 508 columns."""
    start, end = P((DATA, MODEL)), P(None, DATA)
    with jax.set_mesh(cpu_mesh):
        given = structs(cpu_mesh, [((1024, 508), start)])
        found = hints(moved(cpu_mesh, start, end), given)
    assert all(written(P(None, (DATA, MODEL))) not in h.advice for h in found)


def test_a_gradient_that_comes_back_another_way(cpu_mesh):
    """The constraint between would stand in the forward pass too, where it may cost more."""
    start, end = P(None, DATA), P((DATA, MODEL))
    out = NamedSharding(cpu_mesh, start)
    f = jax.grad(lambda x: (constrained(jnp.tanh(x), start, end) ** 2).sum())
    with jax.set_mesh(cpu_mesh):
        found = hints(jax.jit(f, out_shardings=out), structs(cpu_mesh, [(MATRIX, start)]))
    assert not [h for h in found if h.kind == "resharded"]
