"""``install(unchecked="check")``: shard_maps that say check_vma=False, switched on where equal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules.hooks.install import touched
from shardrules.hooks.sharded import shard_map
from tests.core import versions

pytestmark = versions.where(versions.types_values)

X = np.random.RandomState(0).rand(8, 16).astype(np.float32)
W = np.random.RandomState(1).rand(2, 16).astype(np.float32)
AXES = ("data", "model")


def double_kernel(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]


@jax.custom_vjp
def double(x):
    return pl.pallas_call(double_kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


double.defvjp(lambda x: (double(x), None), lambda _, g: (double(g),))


def reader(x):
    """Call a kernel that asks where it runs: it has no rule, and none can be proven."""

    def reader_kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + jax.lax.axis_index("model").astype(jnp.float32)

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(reader_kernel, shape, interpret=True)(x)


def off(f, mesh, in_specs, out_specs):
    """Return a function that asks for the shard_map when it is called, as libraries do."""
    return lambda *args: shard_map(f, mesh, in_specs, out_specs, check=False)(*args)


def jitted(f):
    """Return a function that is traced anew, with its value and its gradients."""

    def run(*args):
        def scalar(*args):
            out = f(*args)
            return sum(jnp.sum(jnp.sin(one)) for one in jax.tree_util.tree_leaves(out))

        return f(*args), jax.grad(scalar, tuple(range(len(args))))(*args)

    return jax.jit(run)


def both(f, *args):
    """Return what became of the shard_maps of f; values and gradients are equal."""
    plain = jitted(f)(*args)
    with shardrules.install(unchecked="check") as handle:
        switched = jitted(f)(*args)
    jax.tree_util.tree_map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), plain, switched
    )
    return handle.unchecked()


def sum_count(f, *args):
    return jitted(f).lower(*args).compile().as_text().count(" all-reduce(")


def test_a_kernels_defensive_psum_goes(cpu_mesh):
    f = off(double, cpu_mesh, P("data"), P("data"))
    (site,) = both(f, X)
    assert (site.switched, site.reason, site.function) == (True, "", "double")
    assert site.file.endswith("sharded.py") and (site.before_bytes, site.after_bytes) == (128, 0)
    assert sum_count(f, X) == 1
    with shardrules.install(unchecked="check"):
        assert sum_count(f, X) == 0
    assert touched() == ()


def test_leave_is_the_default_and_nothing_stays(cpu_mesh):
    def traced():
        return str(jax.make_jaxpr(off(double, cpu_mesh, P("data"), P("data")))(X))

    before = traced()
    with shardrules.install(unchecked="check"):
        made = shard_map(double, cpu_mesh, P("data"), P("data"), check=False)
        assert "check_vma=False" in before and "check_vma=True" in traced()
    assert str(jax.make_jaxpr(made)(X)) == before and touched() == ()
    with shardrules.install() as handle:
        assert traced() == before
    assert handle.unchecked() == ()


def summed(x):
    return jax.lax.psum(jnp.sin(x), AXES)


@jax.custom_vjp
def copied(x):  # Megatron's f: the identity, whose bwd sums
    return x


copied.defvjp(lambda x: (x, None), lambda _, g: (jax.lax.psum(g, "model"),))


@jax.custom_vjp
def reduced(x):  # Megatron's g: a sum, whose bwd is the identity
    return jax.lax.psum(x, "model")


reduced.defvjp(lambda x: (reduced(x), None), lambda _, g: (g,))


@jax.custom_vjp
def weighted(x, w):
    return x * w


def weighted_bwd(saved, g):
    x, w = saved
    return g * w, jax.lax.psum(g * x, "data")


weighted.defvjp(lambda x, w: (x * w, (x, w)), lambda r, g: weighted_bwd(r, g))


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


@jax.custom_vjp
def decayed(x):
    return x


decayed.defvjp(lambda x: (x, x), lambda x, g: (g + 0.1 * x,))


def column(x, w):
    return x @ w


SWITCHED = {
    "a kernel": (double, P("data"), P("data"), (X,)),
    "sums": (summed, P("data", "model"), P(), (X,)),
    "a weight": (lambda x, w: x * w[0], (P("data"), P()), P("data"), (X, W)),
    "a mean": (lambda x: jax.lax.pmean(x, "data"), P("data"), P(), (X,)),
    "scan": (
        lambda x, w: jax.lax.scan(lambda c, _: (double(c) * w[0], None), x, None, length=3)[0],
        (P("data"), P()),
        P("data"),
        (X, W),
    ),
    "remat": (jax.checkpoint(lambda x: jnp.sin(double(x))), P("data"), P("data"), (X,)),
    "jit": (jax.jit(lambda x: jnp.sin(double(x))), P("data"), P("data"), (X,)),
    "cond": (
        lambda x: jax.lax.cond(x.sum() > 0, double, lambda x: x, x),
        P("data"),
        P("data"),
        (X,),
    ),
    "gathered": (
        lambda x: jax.lax.all_gather(x, "model", tiled=True),
        P("model"),
        P("model"),
        (X,),
    ),
    "a ring": (
        lambda x: x + jax.lax.ppermute(x, "model", [(0, 1), (1, 0)]),
        P("model"),
        P("model"),
        (X,),
    ),
    "all devices clip their own": (clipped, P(("data", "model")), P(("data", "model")), (X,)),
}

LEFT = {
    "no rule": (
        lambda x: double(x) + reader(jax.lax.stop_gradient(x)),
        P("data", "model"),
        P("data", "model"),
        (X,),
        "no rule for reader_kernel",
    ),
    "out_specs": (
        lambda x: x,
        P("data"),
        P(),
        (X,),
        f"out_specs is {P()}, and it varies over data",
    ),
    "gradients": (
        lambda w, x: jax.grad(lambda w: jnp.sum(w[0] * x))(w),
        (P(), P()),
        P(),
        (W, X),
        "its body takes gradients, which would change",
    ),
    "bwd sums": (
        lambda x: copied(x),
        P(),
        P(),
        (X,),
        "in the derivative: the bwd '<lambda>' returns",
    ),
    "bwd sums what varies": (
        lambda x, w: copied(x) * w,
        (P(), P(None, "model")),
        P(None, "model"),
        (X[:, :8], X),
        "in the derivative: the bwd '<lambda>' returns",
    ),
    "bwd sums a weight's": (
        weighted,
        (P("data"), P()),
        P("data"),
        (X, W),
        "the bwd '<lambda>' returns a gradient that is summed over 'data'",
    ),
    "fwd sums": (
        lambda x: reduced(x),
        P("data", "model"),
        P("data"),
        (X,),
        "the forward of the bwd '<lambda>' makes results equal over 'model'",
    ),
    "clips": (clipped, P("data"), P("data"), (X,), "the bwd '<lambda>' is not known to be linear"),
    "decays": (decayed, P("data"), P("data"), (X,), "the bwd '<lambda>' is not known to be linear"),
}


@pytest.mark.parametrize("name", SWITCHED)
def test_a_program_that_is_switched(cpu_mesh, name):
    f, in_specs, out_specs, args = SWITCHED[name]
    (site,) = both(off(f, cpu_mesh, in_specs, out_specs), *args)
    assert site.switched and site.after_bytes <= site.before_bytes, site


@pytest.mark.parametrize("name", LEFT)
def test_a_program_that_is_left(cpu_mesh, name):
    f, in_specs, out_specs, args, reason = LEFT[name]
    (site,) = both(off(f, cpu_mesh, in_specs, out_specs), *args)
    assert not site.switched and site.reason.startswith(reason), site
