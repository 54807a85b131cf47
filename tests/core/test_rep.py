"""What is particular to replication sets, the form of the check to JAX 0.5.3."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from raising import refused

from core import test_shares, versions
from core.test_check import DATA, trace, varies_as
from shardrules import errors
from shardrules.hooks.sets import rep
from shardrules.registry import axistypes


@pytest.mark.parametrize(
    "known, effects, both",
    [
        (None, "local;join(model)", "local;join(model)"),
        ("local", "local", "local"),
        ("typed(data)", "typed(model)", "typed(data,model)"),
        ("typed(data,model)", "typed(data)", "typed(data,model)"),
        ("typed()", "local", "unknown"),
        ("join(model)", "typed(data)", "unknown"),
    ],
)
def test_call_that_is_rewritten_twice_keeps_only_what_holds_for_both(known, effects, both):
    known = None if known is None else axistypes.parse_effects(known)
    merged = rep._weaker(known, axistypes.parse_effects(effects))
    assert axistypes.format_effects(merged) == both


def saved(x, w):
    """A block that is done again in its backward pass, but for what has a name."""
    names = jax.checkpoint_policies.save_only_these_names("named")
    block = jax.checkpoint(lambda x, w: jnp.sin(checkpoint_name(x * w, "named")), policy=names)
    return block(x, w)


@pytest.mark.parametrize("op", [lambda x, w: checkpoint_name(x * w, "named"), saved])
def test_what_is_given_a_name_varies_as_before(op, hooks, cpu_mesh):
    """Plain JAX to 0.5.3 says that it has no rule for it, also where it is a kernel's name."""
    x, w = np.linspace(1, 2, 32, dtype=np.float32).reshape(8, 4), np.ones(4, np.float32)
    assert varies_as(op, cpu_mesh, (DATA, P()), x, w) == {"data"}
    assert varies_as(op, cpu_mesh, (P(), P()), x, w) == set()
    f = versions.shard_map(op, mesh=cpu_mesh, in_specs=(DATA, P()), out_specs=DATA)
    found, wanted = (
        jax.jit(jax.grad(lambda x, w: (run(x, w) ** 2).sum(), (0, 1)))(x, w) for run in (f, op)
    )
    for one, other in zip(found, wanted):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_a_choice_by_platform_is_the_same_on_all_devices(hooks, cpu_mesh):
    def op(x):
        return jax.lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)

    if not versions.has_rule_for_cond():  # which is how JAX chooses
        with refused():
            trace(op, cpu_mesh, DATA, DATA, np.ones((8, 4)))
        return
    assert varies_as(op, cpu_mesh, (DATA,), np.ones((8, 4))) == {"data"}
    assert varies_as(op, cpu_mesh, (P(),), np.ones((8, 4))) == set()


@jax.custom_vjp
def product_with_bwd(w, a):
    return w * a


product_with_bwd.defvjp(
    lambda w, a: (w * a, (w, a)), lambda residuals, g: ((g * residuals[1]).sum(), g * residuals[0])
)


@pytest.mark.parametrize("product", [lambda w, a: w * a, product_with_bwd])
def test_a_bwd_is_known_by_its_own_arguments(product, hooks, cpu_mesh):
    """Not by those of the bwd of what it differentiates, which runs inside of it."""

    def fwd(w, a):
        a = test_shares.gather(a)
        return lax.psum((product(w, a) ** 2).sum(), "data") / 4, (w, a)

    def whole(residuals, g):
        w, a = residuals
        y, transpose = jax.vjp(lambda w: product(w, a), w)
        return transpose(2 * y * g)[0], jnp.zeros(2)

    with pytest.raises(errors.CotangentError) as caught:
        test_shares.gradient(test_shares.op_of(fwd, whole), cpu_mesh)
    # Before JAX 0.6 it isn't known what the cotangent that arrives is.
    assert caught.value.problem == ("summed" if versions.types_values() else "undecided")
