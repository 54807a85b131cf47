"""JAX's own primitives whose types forget mesh axes; plain JAX gets these programs wrong, silently."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import raising
from core import versions
from jax import lax
from jax.experimental import sparse
from jax.sharding import PartitionSpec as P

import shardrules as sr

X = np.random.default_rng(0).normal(size=(16,)).astype(np.float32)
W = np.arange(1, 5, dtype=np.float32)


def by_rank(x, w):
    """Multiply x by the weights, the least element by the first (a router's permutation)."""
    return x * w[jnp.argsort(jnp.argsort(x))]


def sparse_diagonal(x, w):
    """Multiply x by a sparse diagonal matrix of w."""
    n = jnp.arange(w.shape[0])
    return sparse.BCOO((w, jnp.stack([n, n], 1)), shape=(4, 4)) @ x


def dropout(x, w):
    """Keep what random bits from x's own bits keep."""
    state = lax.bitcast_convert_type(x, jnp.uint32)
    bits = lax.rng_bit_generator(state, x.shape)[1]
    return jnp.where(bits % 2 == 0, x, 0) + x * w * (bits % 3).astype(x.dtype)


def gradients(op, mesh):
    f = jax.shard_map(op, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    return jax.jit(jax.grad(lambda x, w: (f(x, w) ** 2).sum(), argnums=(0, 1)))(X, W)


def reference(op):
    def f(x, w):
        return jnp.concatenate([op(block, w) for block in x.reshape(4, 4)])

    return jax.jit(jax.grad(lambda x, w: (f(x, w) ** 2).sum(), argnums=(0, 1)))(X, W)


def close(got, want):
    return [bool(np.allclose(a, b, rtol=1e-5)) for a, b in zip(got, want)]


PROGRAMS = [by_rank, sparse_diagonal, dropout]


@pytest.mark.parametrize("op", PROGRAMS)
def test_gradients_equal_those_of_one_device(cpu_mesh, hooks, op):
    assert close(gradients(op, cpu_mesh), reference(op)) == [True, True]


def test_plain_jax_gets_the_weights_gradient_wrong(cpu_mesh):
    assert close(gradients(by_rank, cpu_mesh), reference(by_rank)) == [True, False]


def alike(x):
    from jax.experimental.shard_alike import shard_alike  # gone in JAX 0.12

    return shard_alike(jnp.ones(x.shape), x)[0]


CALLS = [
    jnp.argsort,
    lambda x: jax.random.permutation(jax.random.key(x[0].astype(int)), 5),
    lambda x: lax.rng_bit_generator(lax.bitcast_convert_type(x, jnp.uint32), (3,))[1],
    pytest.param(
        alike, marks=versions.where(versions.has("jax.experimental.shard_alike", "shard_alike"))
    ),
    lambda x: lax.scaled_dot(x[:, None] * x, x[:, None] * x),
    lambda x: sparse.BCOO.fromdense(x[:, None] * x, nse=16).T.todense(),
    lambda x: sparse.BCSR.fromdense(x[:, None] * x, nse=16) @ jnp.ones(4),
    lambda x: sparse.CSR.fromdense(x[:, None] * x, nse=16) @ jnp.ones(4),
    lambda x: sparse.COO.fromdense(x[:, None] * x, nse=16) @ jnp.ones(4),
]


@pytest.mark.parametrize("op", CALLS)
def test_what_depends_on_varying_data_is_not_accepted_as_replicated(cpu_mesh, op):
    f = jax.shard_map(op, mesh=cpu_mesh, in_specs=P("data"), out_specs=P())
    jax.eval_shape(f, X)  # plain JAX takes it
    with sr.install(), raising.not_inferred():
        jax.eval_shape(f, X)


def test_types_stay_outside_the_check(cpu_mesh, hooks):
    f = functools.partial(jax.shard_map, mesh=cpu_mesh, in_specs=P("data"), out_specs=P("data"))
    assert "pvary" not in str(jax.make_jaxpr(f(jnp.argsort, check_vma=False))(X))
    np.testing.assert_array_equal(jnp.argsort(X), np.argsort(X, kind="stable"))
    got = jax.vmap(f(jnp.argsort))(np.stack([X, -X]))
    want = np.stack([X, -X]).reshape(2, 4, 4).argsort(kind="stable").reshape(2, 16)
    np.testing.assert_array_equal(got, want)


LATE = """
import os
os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=2")
import sys, jax, jax.numpy as jnp, numpy as np, shardrules
from jax.sharding import Mesh, PartitionSpec as P
handle = shardrules.install()
assert "jax.experimental.sparse" not in sys.modules
from jax.experimental import sparse
f = jax.shard_map(lambda x: sparse.BCOO.fromdense(x, nse=2).todense(),
                  mesh=Mesh(np.array(jax.devices()), "data"), in_specs=P("data"), out_specs=P())
try:
    jax.eval_shape(f, jnp.ones(4))
except ValueError as error:
    print("can't be statically inferred" in str(error))
handle.uninstall()
print(jax.eval_shape(f, jnp.ones(4)).shape)
"""


@pytest.mark.slow
def test_modules_that_are_imported_later():
    """Sparse primitives are made when their module is imported; uninstalling gives them back."""
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True)
    assert done.stdout == "True\n(2,)\n", done.stderr


def one_inside_of_another(mesh, *, outer: bool = True, inner: bool = False):
    """Return a product over (data, model), from a shard_map over model inside of one over data."""

    def product(x, w):
        return lax.psum(jnp.tanh(x * w).sum(0), "model")

    def body(x, w):
        inside = jax.shard_map(
            product,
            in_specs=(P("model"), P()),
            out_specs=P(),
            axis_names={"model"},
            check_vma=inner,
        )
        return inside(x, w)[None] ** 2

    return lambda out_specs: jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=out_specs,
        axis_names={"data"},
        check_vma=outer,
    )


def test_an_unchecked_shard_map_inside_of_a_checked_one_varies_as_what_it_takes(cpu_mesh, hooks):
    """Copies that differ were accepted under P()."""
    f, x = one_inside_of_another(cpu_mesh), X.reshape(16, 1)
    want = [(np.tanh(rows * W).sum(0)) ** 2 for rows in x.reshape(4, 4, 1)]
    np.testing.assert_allclose(jax.jit(f(P("data")))(x, W), want, rtol=1e-5)
    with raising.wrong_out_specs() as refused:
        jax.eval_shape(f(P()), x, W)
    assert "shard_map, whose own check is off, at " in str(refused.value)


def test_no_gradient_goes_through_an_unchecked_shard_map_inside_of_a_checked_one(cpu_mesh, hooks):
    """Of a replicated weight it was one device's share, silently; the check off in both, it works."""
    x = X.reshape(16, 1)

    def gradient(outer):
        f = one_inside_of_another(cpu_mesh, outer=outer)(P("data"))
        return jax.jit(jax.grad(lambda w: f(x, w).sum()))(W)

    with raising.raises(sr.errors.AxisError, axes={"data"}):
        gradient(True)
    blocks = x.reshape(4, 4, 1)
    want = jax.grad(lambda w: (jnp.tanh(blocks * w).sum(1) ** 2).sum())(W)
    np.testing.assert_allclose(gradient(False), want, rtol=1e-5)


def test_residuals_of_an_unchecked_shard_map_in_a_branch_vary_as_what_it_takes(hooks):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))

    def inner(x):
        return jax.shard_map(
            lambda y: jnp.sin(y) * 2,
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=P("b"),
            out_specs=P("b"),
            axis_names={"b"},
            check_vma=False,
        )(x)

    def body(x):
        return jax.lax.cond(x.sum() > 0, inner, lambda x: x, x)

    f = jax.shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
    x = jnp.arange(4.0) + 1
    tangent = jax.linearize(jax.jit(f), x)[1](x)
    np.testing.assert_allclose(tangent, 2 * np.cos(x) * x, rtol=1e-5)


def test_types_of_an_unchecked_shard_map_inside_of_an_unchecked_one_stay(cpu_mesh, hooks):
    f = one_inside_of_another(cpu_mesh, outer=False)(P("data"))
    text = str(jax.make_jaxpr(f)(X.reshape(16, 1), W))
    assert "unchecked_shard_map" not in text and "unchecked_shard_map" in str(
        jax.make_jaxpr(one_inside_of_another(cpu_mesh)(P("data")))(X.reshape(16, 1), W)
    )


def traced_before(f):
    """The function from a jaxpr that was traced on invariant values."""

    def run(x):
        closed = jax.make_jaxpr(f)(jnp.zeros(x.shape))
        return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, x)

    return run


def in_a_branch(f):
    return lambda x: lax.cond(x[0] > 0, lambda: f(jnp.ones(x.shape)), lambda: f(0 * x))


def by_exponents(x):
    return jnp.ldexp(jnp.ones(x.shape), x.astype(int))


@pytest.mark.parametrize("how", [lambda f: f, traced_before, in_a_branch], ids=["", "replay", "if"])
@pytest.mark.parametrize(
    "f",
    [
        jnp.frexp,
        by_exponents,
        lambda x: jnp.searchsorted(jnp.arange(8.0), x),
        lambda x: jnp.nonzero(x > 1, size=2),
        lambda x: jnp.einsum("i,j->ij", x, jnp.ones(3)),
        jax.nn.relu,
    ],
)
def test_functions_that_are_hijax_primitives_in_jax_0_12_vary(cpu_mesh, hooks, f, how):
    """Types stand in such a primitive as it was made: for other operands, and by hand."""
    op = how(f)
    g = jax.jit(jax.shard_map(op, mesh=cpu_mesh, in_specs=P("data"), out_specs=P("data")))
    blocks = X.reshape(4, -1)
    for got, *want in zip(jax.tree.leaves(g(X)), *(jax.tree.leaves(op(b)) for b in blocks)):
        np.testing.assert_array_equal(got, np.concatenate(want))
    with raising.not_inferred():
        jax.eval_shape(jax.shard_map(op, mesh=cpu_mesh, in_specs=P("data"), out_specs=P()), X)


def test_the_gradient_of_an_invariant_mantissa_is_summed(cpu_mesh, hooks):
    """JAX 0.12 types the product as its first operand."""
    f = jax.shard_map(
        lambda w, x: jnp.ldexp(w, x.astype(int)),
        mesh=cpu_mesh,
        in_specs=(P(), P("data")),
        out_specs=P("data"),
    )
    w = np.arange(1.0, 5.0, dtype=np.float32)
    x = np.arange(16, dtype=np.float32) % 5
    got = jax.jit(jax.grad(lambda w: (f(w, x) ** 2).sum()))(w)
    want = (2 * w * 4.0 ** x.reshape(4, 4)).sum(0)
    np.testing.assert_allclose(got, want)
