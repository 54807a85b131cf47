"""Callbacks under jit, which one device runs for all; a shard_map lets each take its own rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from costs.test_waste import D, follow, hints, random_like, structs
from shardrules import testing

pytestmark = pytest.mark.one_lane

ROWS = ((64, 32), D)
WEIGHTS = ((32, 16), P())
GATHERED, SUMMED = 3 * 16 * 32 * 4, 2 * 7 * 64 * 32 * 4 // 8


def sine(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def sums(x, y):
    outs = [jax.ShapeDtypeStruct(shape, x.dtype) for shape in (x.shape, x.shape[:1])]
    return jax.pure_callback(lambda x, y: (x + y, (x * y).sum(1)), outs, x, y)


def local(call, spec=D, ins=1, outs=None):
    return lambda *args: jax.shard_map(call, in_specs=(spec,) * ins, out_specs=outs or spec)(*args)


def at(x, spec):
    return lax.with_sharding_constraint(x, spec)


def test_a_result_that_stays_sharded(cpu_mesh):
    """Of the sum each device keeps its own rows."""
    with jax.set_mesh(cpu_mesh):
        f, g = (
            jax.jit(lambda x, c=call: at(c(jnp.tanh(x)) * 2, D)) for call in (sine, local(sine))
        )
        sent = GATHERED + SUMMED, 0
        found = follow(("cpu", cpu_mesh), f, g, structs(cpu_mesh, [ROWS]), "called whole", sent)
    gather, total = sorted(found, key=lambda h: h.entry.kind)
    assert "in_specs=(P('data'),), out_specs=P('data')): each device calls it" in gather.advice
    assert "test_callbacks.py" in gather.advice and "jax.shard_map" not in total.advice


def test_a_result_that_is_needed_whole(cpu_mesh):
    """Its rows are gathered then, which sends less than the sum."""
    with jax.set_mesh(cpu_mesh):
        f, g = (
            jax.jit(lambda x, w, c=call: at(c(jnp.tanh(x)), P()) @ w)
            for call in (sine, local(sine))
        )
        given = structs(cpu_mesh, [ROWS, WEIGHTS])
        sent = GATHERED + SUMMED, GATHERED
        follow(("cpu", cpu_mesh), f, g, given, "called whole", sent)


@pytest.mark.parametrize("spec", [D, P(("data", "model"))], ids=["data", "both"])
def test_two_batches_and_two_results(cpu_mesh, spec):
    given = structs(cpu_mesh, [((64, 32), spec)] * 2)
    with jax.set_mesh(cpu_mesh):
        f = jax.jit(lambda x, y: [2 * a for a in sums(jnp.tanh(x), y)])
        g = jax.jit(lambda x, y: [2 * a for a in local(sums, spec, 2, [spec] * 2)(jnp.tanh(x), y)])
        found = [h for h in hints(f, given) if h.kind == "called whole"]
        totals = [testing.account(p, *given).total.wire_bytes for p in (f, g)]
        for one, other in zip(f(*random_like(given)), g(*random_like(given)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
        assert hints(g, given) == []
    assert [h.entry.kind for h in found].count("all-gather") == 2
    # What is only returned may be whole, as XLA chooses here, or stay as it is.
    assert totals[0] - totals[1] >= sum(h.sent_before - h.sent_after for h in found) > 0


@pytest.mark.parametrize(
    "f",
    [
        lambda x: (lambda y: (sine(y), y * 2))(at(jnp.tanh(x), P())),  # read whole, too
        lambda x: jax.pure_callback(lambda x: x.sum(0), jax.ShapeDtypeStruct((32,), "f4"), x),
        lambda x: sums(x, jnp.ones_like(x)),  # of rows that every device has
        lambda x: sine(at(x, P(None, "data"))),
        lambda x: local(sine)(x),
        lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, at(x, P())),
    ],
    ids="read_whole_too no_batch whole_too columns wrapped branch".split(),
)
def test_callbacks_that_gain_nothing_or_may_not_be_wrapped(cpu_mesh, f):
    with jax.set_mesh(cpu_mesh):
        found = [h.kind for h in hints(jax.jit(f), structs(cpu_mesh, [ROWS]))]
    assert "called whole" not in found


def test_another_sum_of_what_one_device_has(cpu_mesh):
    """A broadcast that the program writes is none of a callback's result."""

    def body(x):
        return lax.psum(jnp.where(lax.axis_index("data") == 3, jnp.sin(x), 0), "data")

    f = jax.jit(jax.shard_map(body, mesh=cpu_mesh, in_specs=D, out_specs=P()))
    out = jax.jit(lambda x: f(x) * 2, out_shardings=NamedSharding(cpu_mesh, P()))
    assert "called whole" not in [h.kind for h in hints(out, structs(cpu_mesh, [ROWS]))]
