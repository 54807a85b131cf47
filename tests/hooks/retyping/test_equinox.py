"""equinox's loops in shard_map: which run under the check, and which plain JAX can't run either.

equinox compares the types of what a closure was converted for with those of what it is called
with, their shardings included, and in any shard_map these differ where a loop is checkpointed:
diffrax's Tsit5 and optimistix's Newton and BFGS end in the same comparison.
"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr

pytestmark = pytest.mark.libraries
X = np.arange(1, 5, dtype=np.float32)


def cubes(kind, mesh, check):
    """Return the sum of w x^4 over the devices along data, by a loop of three steps."""
    internal = importlib.import_module("equinox.internal")

    def body(w, x):
        step = lambda c: (c[0] + 1, c[1] * x[0])  # noqa: E731
        start = (jnp.int32(0), w * x[0])
        out = internal.while_loop(lambda c: c[0] < 3, step, start, max_steps=4, kind=kind)
        return out[1][None]

    f = jax.shard_map(
        body, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=check
    )
    return lambda w: f(w, X).sum()


@pytest.mark.parametrize("check", [True, False])
def test_bounded_loops_have_gradients(cpu_mesh, check):
    with sr.install():
        assert jax.jit(jax.grad(cubes("bounded", cpu_mesh, check)))(2.0) == (X**4).sum()


@pytest.mark.parametrize("kind", ["checkpointed", "lax"])
def test_all_loops_have_values(cpu_mesh, kind):
    with sr.install():
        assert jax.jit(cubes(kind, cpu_mesh, True))(2.0) == 2 * (X**4).sum()


def test_checkpointed_loops_have_none_in_plain_jax_either(cpu_mesh):
    """When this fails, they may run under the check too."""
    message = "Closure-converted function called with different"
    with pytest.raises(ValueError, match=message):
        jax.jit(jax.grad(cubes("checkpointed", cpu_mesh, False)))(2.0)
    with sr.install(), pytest.raises(ValueError, match=message):
        jax.jit(jax.grad(cubes("checkpointed", cpu_mesh, True)))(2.0)
