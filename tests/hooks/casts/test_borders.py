"""Among equals, casts stand at the border, where XLA makes one reduce-scatter of psum and slice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules import testing
from shardrules.door.jaxprs import SUMS, named_axes
from shardrules.jaxprs.walk import equations

HEADS, WIDTH = 2, 8
RANKS = 4  # the devices along data, over which the sequence is split
SHARDED = P(None, "data")


def sequential(x):
    """Reorder a load-balanced sequence: device i holds the parts i and 2 * RANKS - 1 - i."""
    batch, length, heads, width = x.shape
    parts = x.reshape(batch, 2 * RANKS, length // (2 * RANKS), heads, width)
    first, last = parts[:, 0::2], parts[:, 1::2]
    return jnp.concatenate([first, last[:, ::-1]], 1).reshape(x.shape)


@jax.custom_vjp
def halved(x):
    return x / 2


halved.defvjp(lambda x: (x / 2, ()), lambda residuals, g: (g / 2,))


def attend(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def balanced(q, k, v):
    return attend(q, sequential(k), sequential(v))


def through_a_bwd(q, k, v):
    return attend(q, sequential(halved(k)), sequential(halved(v)))


def straight(q, k, v):
    return attend(q, k.reshape(k.shape), v * 2.0)


def gathered(q, k, v):
    """As ``balanced``, of k and v that the body gathers itself, as invariant arrays."""
    k, v = (lax.all_gather(x, "data", axis=1, tiled=True, to="invarying") for x in (k, v))
    return balanced(q, k, v)


def gradient(body, mesh, check=True, specs=(SHARDED, P(), P())):
    f = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=SHARDED, check_vma=check)
    return jax.grad(lambda *args: (f(*args) ** 2).sum(), argnums=(0, 1, 2))


def operands(length=64):
    shape = (2, length, HEADS, WIDTH)
    return [jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), 3)]


def behind(body, mesh, **keywords):
    """Return the primitives that work on the psums' results in the backward pass, in order."""
    closed = jax.make_jaxpr(gradient(body, mesh, **keywords))(*operands())
    psums, after = set(), []
    for eqn in equations(closed.jaxpr):
        if eqn.primitive.name in SUMS and "data" in named_axes(eqn.params):
            psums.update(eqn.outvars)
        elif psums.intersection(atom for atom in eqn.invars if not hasattr(atom, "val")):
            after.append(eqn.primitive.name)
            psums.update(eqn.outvars)
    assert psums
    return after


@pytest.mark.slow
def test_the_psum_stands_at_the_border_behind_no_reorder(cpu_mesh):
    with sr.install(casts="late"):
        late = behind(balanced, cpu_mesh)
    with sr.install():
        cheapest = behind(balanced, cpu_mesh)
        found = gradient(balanced, cpu_mesh)(*operands())
    assert {"concatenate", "rev"} & {*late}
    assert {"jit", "pjit", "shard_map"}.issuperset(cheapest), cheapest
    for one, other in zip(found, gradient(balanced, cpu_mesh, check=False)(*operands())):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_no_bwd_is_passed_and_nothing_is_rewritten_for_it(cpu_mesh):
    for body in (through_a_bwd, straight):
        with sr.install(casts="late"):
            late = behind(body, cpu_mesh)
        with sr.install():
            assert behind(body, cpu_mesh) == late


def test_a_psum_stands_where_a_gather_slices_its_result(cpu_mesh):
    def between(casts):
        with sr.install(casts=casts):
            after = behind(gathered, cpu_mesh, specs=(SHARDED,) * 3)
        return after[: after.index("dynamic_slice")]

    assert {"rev", "pad"}.issubset(between("late"))
    assert {"pvary"}.issuperset(between("cheapest"))


def test_explain_says_why_casts_stand_at_the_border(cpu_mesh):
    said = str(sr.explain(gradient(balanced, cpu_mesh), *operands()))
    assert "reduce-scatter" in said, said


@pytest.mark.tpu
def test_tpu_makes_reduce_scatters_of_it(tpu_mesh):
    sharding = NamedSharding(tpu_mesh, SHARDED)
    shapes = [
        jax.ShapeDtypeStruct((4, 1024, 4, 64), jnp.float32, sharding=sharding) for _ in range(3)
    ]

    def backward(casts):
        with sr.install(casts=casts):
            step = jax.jit(gradient(balanced, tpu_mesh), out_shardings=(sharding,) * 3)
            counted = str(testing.account(step.lower(*shapes).compile()))
        return [line.partition(":")[0] for line in counted.splitlines() if "backward" in line]

    assert backward("late") == ["backward all-reduce(data)"]
    assert backward("cheapest") == ["backward reduce-scatter(data)"]
