"""A constraint that isn't kept: the number of devices doesn't divide the dimension."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from costs.test_waste import hints, program, structs
from shardrules import testing

WHOLE = [((30, 64), P())]


def constrained(x, spec=P("data")):
    return lax.with_sharding_constraint(x, spec)


@pytest.mark.parametrize("columns", [False, True])
def test_an_array_that_is_padded_and_returned_whole(platform, columns):
    name, mesh = platform
    spec = P(None, "data") if columns else P("data")
    pads = ((0, 0), (0, 2)) if columns else ((0, 2), (0, 0))
    shape = (64, 30) if columns else (30, 64)
    f = jax.jit(lambda x: constrained(jnp.tanh(x), spec) * 2)
    g = jax.jit(lambda x: constrained(jnp.pad(jnp.tanh(x), pads), spec) * 2)
    with jax.set_mesh(mesh):
        given = structs(mesh, [(shape, P())])
        (found,) = hints(f, given)
        assert (found.kind, found.sent_before, found.sent_after) == ("uneven", 6144, 0)
        before, after = (testing.account(p, *given).total.wire_bytes for p in (f, g))
        assert (before, after) == (6144, 0) and hints(g, given) == []
        what = f"4 devices don't divide the 30 of dimension {int(columns)}: XLA pads them to 32"
        assert found.advice.startswith(what) and "whole, 7680 B on each device" in found.advice
        assert "a device then holds 2048 B of it" in found.advice
        if name == "cpu":
            x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
            whole, padded = f(x), g(x)
            assert whole.sharding.is_fully_replicated and padded.sharding.spec == spec
            cut = np.asarray(padded)[: shape[0], : shape[1]]
            np.testing.assert_allclose(np.asarray(whole), cut, rtol=1e-6)


@pytest.mark.parametrize(
    "f, shape",
    [
        (lambda x: constrained(jnp.tanh(x)) * 2, (32, 64)),  # it is kept
        (lambda x: constrained(constrained(jnp.tanh(x)), P())[:30], (32, 64)),  # cut by the program
        (lambda x: (constrained(jnp.tanh(x)) * 2).sum(), (30, 64)),  # not returned
        (lambda x: jnp.tanh(x) * 2, (30, 64)),
    ],
    ids="divided cut summed unconstrained".split(),
)
def test_what_no_padding_keeps_sharded(cpu_mesh, f, shape):
    with jax.set_mesh(cpu_mesh):
        found = hints(jax.jit(f), structs(cpu_mesh, [(shape, P())]))
    assert not [h for h in found if h.kind == "uneven"]


def test_an_output_that_xla_converts_after_it_is_gathered(cpu_mesh):
    """XLA for CPU gathers bf16 as f32; an output may stay sharded behind a conversion as well."""
    args = [((64, 128), P("data"), jnp.bfloat16)]
    given = structs(cpu_mesh, args)
    whole, sharded = (NamedSharding(cpu_mesh, spec) for spec in (P(), P("data")))
    pairs = [[jax.jit(jnp.tanh, out_shardings=out) for out in (whole, sharded)]]
    gather = lambda x: lax.all_gather(jnp.tanh(x), "data", tiled=True)  # noqa: E731
    pairs.append([program(cpu_mesh, gather, args, P()), program(cpu_mesh, jnp.tanh, args)])
    for before, after in pairs:
        (found,) = hints(before, given)
        assert (found.kind, found.sent_before, found.sent_after) == ("only returned", 24576, 0)
        totals = [testing.account(p, *given).total.wire_bytes for p in (before, after)]
        assert totals == [24576, 0] and hints(after, given) == []
        x = jax.random.normal(jax.random.key(0), (64, 128), jnp.bfloat16)
        x = jax.device_put(x, sharded)
        np.testing.assert_array_equal(*(np.asarray(p(x), np.float32) for p in (before, after)))
