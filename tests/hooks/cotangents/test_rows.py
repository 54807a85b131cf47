"""Every row of the linearity's tables, executed: what it claims is held against numbers.

A case is a function of one array. Its jaxpr is asked whether it is linear, and the answer compared
with f(ax + by) = a f(x) + b f(y) and f(0) = 0 on random numbers. A row that no case makes fails by
its name; so does a parameter of a row's primitive to which no two cases give different values, so
that one that a new JAX adds is noticed.
"""

from __future__ import annotations

import collections
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core import versions
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

from shardrules.door.jaxprs import CASTS, NEW_REFS, SUMS, is_inexact, name_of, opened
from shardrules.hooks.cotangents import linearity
from shardrules.jaxprs.fold import NESTED
from shardrules.jaxprs.walk import equations as outside_of_kernels

from .rows import CASES, FIXED, Mapped, mesh

pytestmark = versions.where(versions.types_values)

equations = functools.partial(outside_of_kernels, kernels=True)

# What is linear, and isn't called so: the proof doesn't look there, or numbers decide.
CAUTIOUS = {
    ("psum", 3): "over groups of an axis",
    ("gather", 1): "it fills with nan, which is not zero",
    ("real", 1): "the sum with 1j isn't, though its real part is",
}

# The names that one primitive has had.
NAMES = {
    "psum": SUMS,
    "pvary": tuple(CASTS),
    "checkpoint": ("checkpoint", "remat2"),
    "jit": ("jit", "pjit"),
    "new_ref": tuple(NEW_REFS),
}


def read(case):
    """Return a case as a function of one array, the array's size, and the jaxpr that is asked."""
    if not isinstance(case, Mapped):
        return case, 8, jax.make_jaxpr(case)(FIXED).jaxpr
    f = case.on(mesh())
    size = 8 * (4 if case.specs == P("data") else 1)
    traced = jax.make_jaxpr(f)(jnp.zeros(size)).jaxpr
    (eqn,) = (e for e in traced.eqns if name_of(e) == "shard_map")
    return f, size, opened(eqn.params["jaxpr"])


def off_by(f, size):
    """Return how far a function is from linear, relative to its results."""
    compiled = jax.jit(f)

    def run(x):
        made = np.asarray(compiled(x.astype(np.float32)))
        return made.astype(np.complex128 if np.iscomplexobj(made) else np.float64)

    random = np.random.default_rng(0)
    worst = float(np.nan_to_num(np.abs(run(np.zeros(size)))).max())  # a gather fills with nan
    for _ in range(3):
        x, y = (np.float32(random.normal(size=size) * s) for s in (1, 30))
        a, b = np.float32(random.normal(size=2))
        together, apart = run(a * x + b * y), a * run(x) + b * run(y)
        assert np.array_equal(np.isnan(together), np.isnan(apart))  # nan hides what differs
        apart, together = map(np.nan_to_num, (apart, together))
        worst = max(worst, float(np.abs(together - apart).max() / (np.abs(apart).max() + 1e-6)))
    return worst


def wrong(name, number, case):
    """Say what is wrong with the answer for a case; empty if nothing is."""
    f, size, jaxpr = read(case)
    made = {name_of(eqn) for eqn in equations(jaxpr)}
    assert made.intersection(NAMES.get(name, (name,))), f"the case makes {sorted(made)}"
    proof = linearity.linearity(jaxpr, jaxpr.invars, kernels=True)
    claim, coarse = proof.summed is not None, proof.rounds
    off = off_by(f, size)
    near = 100 * float(jnp.finfo(jax.eval_shape(f, jnp.zeros(size)).dtype).eps)
    if claim and off > (1.0 if coarse else near):
        return f"called linear, off by {off:.2g}"
    if not claim and off < near and (name, number) not in CAUTIOUS:
        return "linear, and not called so"
    return ""


@pytest.mark.one_lane
@pytest.mark.parametrize(
    ("name", "number"), [(name, n) for name, cases in CASES.items() for n in range(len(cases))]
)
def test_the_answer_is_that_of_the_numbers(name, number):
    assert not wrong(name, number, CASES[name][number])


# What is zero, whatever it is given.
ZERO = {("mul", 3)}


@pytest.mark.one_lane
@pytest.mark.parametrize(
    ("name", "number"), [(name, n) for name, cases in CASES.items() for n in range(len(cases))]
)
def test_what_is_not_linear_stays_so(name, number):
    """Each case of a sine, or of a shifted array."""
    case = CASES[name][number]
    for before in (jnp.sin, lambda g: g + 1):
        if isinstance(case, Mapped):
            traced = Mapped(lambda *g: case.body(*map(before, g)), case.check, case.specs, case.out)
        else:
            traced = functools.partial(lambda before, g: case(before(g)), before)
        jaxpr = read(traced)[2]
        proof = linearity.linearity(jaxpr, jaxpr.invars, kernels=True)
        assert proof.summed is None or (name, number) in ZERO


ROWS = {*linearity.ROWS, *NESTED, *linearity._STORES, *linearity._COPIES}
UNMADE = {
    "preduced pbroadcast reduced_vary_cast reduced_vary_cast_p vary_unreduced_cast "
    "vary_unreduced_cast_p": "a cast gives each device what it has; types alone differ",
    "load": "of kernels for GPUs, which no interpreter runs",
    "closed_call core_call eval_jaxpr": "JAX makes these for its own transformations",
}
# Parameters that no two cases vary: they change nothing of what an equation computes.
SAME = {
    "sharding out_sharding out_shardings out_layouts layout memory_space context_mesh ctx_mesh "
    "unconstrained_dims": "where a result lies",
    "prevent_cse differentiated policy keep_unused inline compiler_options_kvs unroll priority "
    "cache_modifier eviction_policy is_volatile device_id_type insert_dummy_device is_wait_send "
    "collective_axes pin": "how it runs",
    "tree args_tree ref_transforms num_consts": "how operands are nested",
    "fwd_jaxpr_thunk jvp_jaxpr_fun bwd symbolic_zeros": "the derivative's rule",
    "reshape.dimensions new_ref.kind mul.out_dtype": "JAX gives None",
    "scatter.update_consts scatter-add.update_consts scatter-add.update_jaxpr": "always the same",
    "triangular_solve.conjugate_a": "of the matrix, which is fixed; that of floats is itself",
    "roll.stride roll.stride_axis": "how far each row is moved",
    "dma_start.add": "what the target held counts in any case",
}


@pytest.fixture(scope="module")
def seen():
    """From each primitive that a case makes to its parameters, with the values of each."""
    found = collections.defaultdict(lambda: collections.defaultdict(set))
    for case in (case for cases in CASES.values() for case in cases):
        for eqn in equations(read(case)[2]):
            parameters = found[name_of(eqn)]  # also of a primitive that has none
            for key, value in eqn.params.items():
                parameters[key].add(str(value))
    return found


def words(reasons):
    return {word for names in reasons for word in names.split()}


def test_every_row_is_executed(seen):
    """Also fails for a row that stands in the list of exceptions, and is made."""
    # by type(), for an object of another test may raise where its __class__ is asked for
    exist = {p.name for p in gc.get_objects() if issubclass(type(p), Primitive)}
    assert sorted((ROWS & exist) - set(seen) - words(UNMADE)) == []
    assert sorted(words(UNMADE) & set(seen)) == []


def test_every_parameter_is_varied(seen):
    once = {
        f"{name}.{key}"
        for name in (ROWS & set(seen)) - {"pallas_call"}  # whose kernel is read
        for key, values in seen[name].items()
        if len(values) == 1 and key not in words(SAME)
    }
    assert sorted(once - words(SAME)) == []


def test_every_operand_is_fixed_in_some_case(monkeypatch):
    """And not zero: what is linear in two operands together is affine in either."""
    kinds = collections.defaultdict(list)

    def noted(name, row):
        def run(fold, eqn, given):
            floats = [k for k, v in zip(given, eqn.invars) if is_inexact(v.aval)]
            kinds[name].append(floats)
            return row(fold, eqn, given)

        return run

    for name, row in linearity.ROWS.items():
        monkeypatch.setitem(linearity.ROWS, name, noted(name, row))
    for case in (case for cases in CASES.values() for case in cases):
        jaxpr = read(case)[2]
        linearity.linearity(jaxpr, jaxpr.invars, kernels=True)
    missing = [
        f"{name}: operand {place}"
        for name, calls in kinds.items()
        for place in range(max(map(len, calls)))
        if max(map(len, calls)) > 1
        and not any(
            call[place] == linearity.FIXED and len({*call}) > 1
            for call in calls
            if place < len(call)
        )
    ]
    assert not missing, "; ".join(missing)


@pytest.mark.parametrize("name", ["sin", "max", "sort", "cumprod", "exp"])
def test_a_row_that_is_too_generous_is_found(name, monkeypatch):
    case = {"max": lambda g: jnp.maximum(g, 0)}.get(name) or getattr(lax, name)
    assert not wrong(name, 0, case)
    monkeypatch.setitem(linearity.ROWS, name, linearity.ROWS["neg"])
    assert wrong(name, 0, case).startswith("called linear, off by ")


@pytest.mark.slow
def test_a_parameter_that_is_not_asked_is_found(monkeypatch):
    """Both were holes once: the function that updates, and what fills."""
    ignored = {"update_jaxpr": None, "fill_value": None}
    for name in ("scatter", "gather"):
        row = linearity.ROWS[name]

        def answer(fold, eqn, given, row=row):
            return row(fold, eqn.replace(params={**eqn.params, **ignored}), given)

        monkeypatch.setitem(linearity.ROWS, name, answer)
    found = {
        name: [n for n, case in enumerate(CASES[name]) if wrong(name, n, case)]
        for name in ("scatter", "gather")
    }
    assert found == {"scatter": [5, 6, 9], "gather": [3]}


def curved(name):
    """Return a function of one array that calls a primitive which is not linear."""
    f = getattr(lax, name.removeprefix("reduce_"), None)
    if name in ("reduce_max", "reduce_min", "reduce_prod"):
        return getattr(jnp, name.removeprefix("reduce_"))
    if name in ("argmax", "argmin"):
        return lambda g: f(g, 0, jnp.int32).astype(jnp.float32)
    if name == "clamp":
        return lambda g: f(-0.5, g, 0.5)
    if name == "integer_pow":
        return lambda g: f(g, 3)
    if name == "pow":
        return lambda g: f(g, 1.5)
    if name in "atan2 max min rem eq ge gt le lt ne".split():
        return lambda g: f(g, jnp.full_like(g, 0.3)).astype(jnp.float32)
    if name == "is_finite":
        return lambda g: f(g).astype(jnp.float32)
    return f


@pytest.mark.parametrize("name", sorted(linearity.CURVED))
def test_steps_that_are_called_not_linear_are_not(name):
    f = curved(name)
    jaxpr = jax.make_jaxpr(f)(FIXED).jaxpr
    assert name in {name_of(eqn) for eqn in equations(jaxpr)}
    x = np.array([0.3, 0.6, 1.3, 0.2, 1.2, -0.5, 0.25, 0.4], np.float32)
    y = np.array([1.45, 0.7, 0.45, 0.3, 1.4, 0.3, 0.2, 0.1], np.float32)
    assert float(jnp.nanmax(jnp.abs(f(x + y) - f(x) - f(y)))) > 1e-3
    proof = linearity.linearity(jaxpr, jaxpr.invars, kernels=True)
    assert proof.summed is None and proof.steps == (name,)


def test_steps_after_an_unknown_one_are_not_named():
    """Nor products with what is fixed, nor the steps of values that don't depend on the inputs."""
    after = jax.make_jaxpr(lambda g: jnp.exp(lax.sin(g)))(FIXED).jaxpr
    assert linearity.linearity(after, after.invars).steps == ("sin",)
    beside = jax.make_jaxpr(lambda g, r: g * jnp.exp(r) + 0.0 * r)(FIXED, FIXED).jaxpr
    assert linearity.linearity(beside, beside.invars[:1]).steps == ()
    unread = jax.make_jaxpr(lambda g: lax.erf_inv(lax.population_count(g.astype(jnp.int32)) * 1.0))
    jaxpr = unread(FIXED).jaxpr
    assert linearity.linearity(jaxpr, jaxpr.invars).steps == ()


def test_a_ref_that_is_read_as_another_type_is_not_linear():
    """What it holds is bits then; some are no numbers, so that none is executed here."""

    def halves(g, o):
        o[...] = g.bitcast(jnp.bfloat16)[:1].astype(jnp.float32)

    f = pl.pallas_call(halves, jax.ShapeDtypeStruct((1, 8), jnp.float32), interpret=True)
    jaxpr = jax.make_jaxpr(f)(FIXED[None]).jaxpr
    assert linearity.linearity(jaxpr, jaxpr.invars, kernels=True).summed is None
