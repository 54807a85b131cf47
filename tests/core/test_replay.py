"""Jaxprs that were traced with invariant values, or outside of shard_map, and run on varying ones.

Each function of one pair of operands is traced with a replicated one twice, and its equations are
run on a replicated and a sharded one: value and gradients are those of one device. To JAX 0.5.3
shard_map rewrites what is run, whatever it was traced with.
"""

from __future__ import annotations

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
import raising
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from core import versions
from shardrules import errors
from shardrules.door import internals

lax = jax.lax
W = np.linspace(0.5, 1.5, 4, dtype=np.float32)
X = np.linspace(-1, 2, 16, dtype=np.float32).reshape(4, 4)
WEIGHTS = np.arange(1.0, 5.0, dtype=np.float32)
TYPED = versions.types_values()


@jax.custom_jvp
def with_jvp(a, b):
    return jnp.sin(a) * b


@with_jvp.defjvp
def _(primals, tangents):
    (a, b), (da, db) = primals, tangents
    return with_jvp(a, b), jnp.cos(a) * b * da + jnp.sin(a) * db


@jax.custom_vjp
def with_vjp(a, b):
    return jnp.sin(a) * b


with_vjp.defvjp(
    lambda a, b: (with_vjp(a, b), (a, b)),
    lambda kept, g: (g * jnp.cos(kept[0]) * kept[1], g * jnp.sin(kept[0])),
)


def operation(a, b):
    return a * b + jnp.sin(b)


def one_operand(a, b):
    return a + jax.jit(jnp.sin)(b)


def jit(a, b):
    return jax.jit(lambda a, b: a * jnp.sin(b))(a, b)


def remat(a, b):
    return jax.checkpoint(lambda a, b: jnp.sin(a * b))(a, b)


def scan(a, b):
    def body(c, y):
        return c * b + y, c

    c, ys = lax.scan(body, a, jnp.ones((3, 4), a.dtype) * a)
    return c + ys[1]


def scan_of_zeros(a, b):
    return lax.scan(lambda c, y: (c + y, None), jnp.zeros(4, a.dtype), jnp.stack([a, b]))[0]


def cond(a, b):
    return lax.cond(b[0] > 0, lambda a, b: a * b, lambda a, b: a, a, b)


def while_loop(a, b):
    a, b = map(lax.stop_gradient, (a, b))
    return lax.while_loop(lambda c: c[0] < 3, lambda c: c + b * b + 1, a)


def custom_jvp(a, b):
    return with_jvp(a, b)


def custom_vjp(a, b):
    return with_vjp(a, b)


def custom_vjp_in_scan(a, b):
    return lax.scan(lambda c, _: (with_vjp(c, b), None), a, None, length=2)[0]


def custom_vjp_in_jit(a, b):
    return jax.jit(with_vjp)(a, b)


def vmapped(a, b):
    return jax.vmap(jit)(a[:, None], b[:, None])[:, 0]


GROUPS = {
    "calls": [operation, one_operand, jit, remat, vmapped],
    "scans": [scan, scan_of_zeros],
    "custom": [custom_jvp, custom_vjp, custom_vjp_in_scan, custom_vjp_in_jit],
    "chosen": [cond, while_loop],
}
if not TYPED:  # JAX to 0.5.3 has no rule for some, and no way back from a custom_vjp's equation
    GROUPS["custom"] = [custom_jvp]
    del GROUPS["chosen"]


@pytest.fixture(params=GROUPS)
def group(request):
    """Return a function of a pair: the sum of several, differently weighted."""
    return lambda a, b: sum((i + 1) * f(a, b) for i, f in enumerate(GROUPS[request.param]))


def mesh():
    return Mesh(np.array(jax.devices()[:4]), ("data",))


def run(jaxpr, *args):
    return jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *args)[0]


def replayed(f):
    """Return f, traced anew each time with its first operand twice."""
    return lambda a, b, like: run(jax.make_jaxpr(f)(like, like), a, b)


def gradients(body, *, one_device):
    """Return value and gradients of the weighted sum of ``body(w, x)`` over the shards of x."""
    if one_device:

        def loss(w, x):
            return sum((body(w, row) * WEIGHTS).sum() for row in x)

    else:

        def loss(w, x):
            local = versions.shard_map(
                lambda w, x: lax.psum((body(w, x[0]) * WEIGHTS).sum(), "data"),
                mesh=mesh(),
                in_specs=(P(), P("data")),
                out_specs=P(),
            )
            return local(w, x)

    return jax.tree_util.tree_leaves(jax.jit(jax.value_and_grad(loss, (0, 1)))(W, X))


def compare(body):
    for ours, theirs in zip(gradients(body, one_device=False), gradients(body, one_device=True)):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def test_equations_run_on_varying_values(group, hooks):
    compare(lambda w, x: replayed(group)(w, x, w) + replayed(group)(x, w, w))


def test_equations_from_outside_run_in_shard_map(group, hooks):
    outside = jax.make_jaxpr(group)(W, W)
    compare(lambda w, x: run(outside, w, x) + run(outside, x, w))


@versions.where(versions.types_values)
def test_equations_from_outside_run_under_each_mesh(hooks):
    """JAX found the first mesh in the types of what was kept for the second."""
    traced = jax.make_jaxpr(lambda a, b: jit(a, b) + scan(a, b))(W, W)
    for count in (4, 2):
        f = versions.shard_map(
            lambda w, x: sum(run(traced, w, row) for row in x)[None],
            mesh=Mesh(np.array(jax.devices()[:count]), ("data",)),
            in_specs=(P(), P("data")),
            out_specs=P("data"),
        )
        got = jax.jit(jax.grad(lambda w: f(w, X).sum()))(W)
        want = jax.grad(lambda w: sum(run(traced, w, row).sum() for row in X))(W)
        np.testing.assert_allclose(got, want, rtol=2e-5)


@pytest.mark.parametrize("f", [operation, jit, custom_jvp, *([scan, custom_vjp] if TYPED else [])])
def test_equations_traced_with_varying_values_run_on_invariant_ones(f, hooks):
    compare(lambda w, x: replayed(f)(w, w, x) * x)


def callback(a, b):
    return jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct(a.shape, a.dtype), a)


def argsort(a, b):
    return jnp.argsort(a)


@pytest.mark.parametrize(
    "f",
    [jit, remat, scan, argsort, callback, *([while_loop, custom_vjp] if TYPED else [])],
    ids=lambda f: f.__name__,
)
def test_what_was_traced_outside_is_no_less_varying(f, hooks):
    """JAX 0.10.2 accepts these under P(): four devices hold four values that are called one."""
    outside = jax.make_jaxpr(f)(W, W)

    def body(w, x):
        return run(outside, x[0], w)

    def apply(out_specs, body):
        specs = {"mesh": mesh(), "in_specs": (P(), P("data")), "out_specs": out_specs}
        return jax.jit(versions.shard_map(body, **specs))(W, X)

    with raising.refused():
        apply(P(), body)
    if f is not callback:
        assert apply(P("data"), body).shape == (16,)
        assert apply(P(), lambda w, x: run(outside, w, w)).shape == (4,)


def closure_convert(w, x):
    converted, consts = jax.closure_convert(lambda y: y * w + jnp.sin(w), w)
    return converted(x, *consts)


def jaxpr_as_fun(w, x):
    jaxpr = jax.make_jaxpr(lambda a, b: jnp.dot(a, b) * a)(w, w)
    return jax.extend.core.jaxpr_as_fun(jaxpr)(x, w)[0]


MATRIX = np.eye(4, dtype=np.float32) * 3 + np.float32(0.3)


def linear_solve(w, x):
    matrix = MATRIX * w
    return lax.custom_linear_solve(
        lambda v: matrix @ v,
        x,
        lambda _, b: jnp.linalg.solve(matrix, b),
        lambda _, b: jnp.linalg.solve(matrix.T, b),
    )


def conjugate_gradients(w, x):
    matrix = MATRIX + jnp.outer(w, w)
    return jax.scipy.sparse.linalg.cg(lambda v: matrix @ v, x, maxiter=20)[0]


def conjugate_gradients_of_a_replicated_vector(w, x):
    matrix = MATRIX + jnp.outer(x, x)
    return jax.scipy.sparse.linalg.cg(lambda v: matrix @ v, w, maxiter=20)[0]


def linear_call(w, x):
    from jax.custom_derivatives import linear_call

    def scaled(by, v):
        return v * by

    stopped = map(lax.stop_gradient, (w, x))
    return sum(linear_call(scaled, scaled, by, v) for by, v in zip(stopped, (x, w)))


SOLVES = [
    linear_solve,
    conjugate_gradients,
    conjugate_gradients_of_a_replicated_vector,
    linear_call,
]


@pytest.mark.parametrize(
    "f", [closure_convert, jaxpr_as_fun, *(SOLVES if TYPED else [])], ids=lambda f: f.__name__
)
def test_functions_of_jax_that_close_over_replicated_values(f, hooks):
    compare(f)


def test_what_jax_refuses_for_another_reason_is_refused_with_its_words(hooks):
    def body(w, x):
        return run(jax.make_jaxpr(lambda a, b: a @ b)(w, w), x[:, :3], w)

    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        jax.eval_shape(
            versions.shard_map(body, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P("data")),
            W,
            X,
        )


@versions.where(versions.casts_to_unreduced)
def test_an_invariant_value_is_no_partial_sum(hooks):
    """A collective's operand is cast to varying; what casts to unreduced is no collective."""

    def body(x, y):
        jaxpr = jax.make_jaxpr(lambda y: lax.pcast(y, "model", to="unreduced"))(y)
        return lax.psum(run(jaxpr, x), "model")

    with pytest.raises((ValueError, NotImplementedError)):
        specs = {"in_specs": (P("data"), P(("data", "model"))), "out_specs": P("data")}
        both = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
        jax.eval_shape(versions.shard_map(body, mesh=both, **specs), X[:, :2], X)


def gradient(w, x):
    return jax.grad(lambda w: jnp.sin(w * x).sum())(w)


def closed(f):
    """Close a function over the types of invariant values, and call it with one that varies."""

    def call(w, x):
        converted, constants = jax.closure_convert(lambda v: f(v, x), w)
        return converted(w * x, *constants)

    return call


def root(f):
    """Start from what is invariant: the solution varies, of which the solve takes the Jacobian."""

    def call(w, x):
        def solve(g, y):
            return jnp.linalg.solve(jax.jacrev(g)(y), y)

        def iterate(g, y):
            return lax.fori_loop(0, 40, lambda _, y: y - g(y) / 2, y)

        guess = jnp.zeros_like(w) if f is None else f(jnp.zeros_like(w))
        return lax.custom_root(lambda y: y - jnp.tanh(w * y / 2 + x), guess, iterate, solve)

    return call


TAKING_GRADIENTS = {
    "closure": closed(gradient),
    "in a jit": closed(jax.jit(gradient)),
    "in a loop": closed(lambda w, x: lax.map(lambda x: gradient(w, x), x[None])[0]),
    "of a custom_vjp": closed(lambda w, x: jax.grad(lambda w: with_vjp(w, x).sum())(w)),
    "jaxpr": lambda w, x: run(jax.make_jaxpr(gradient)(w, x), w * x, x),
}


# On others nothing is summed in a body, or JAX refuses it.
@versions.where(versions.types_values, versions.differentiates_what_varies)
@pytest.mark.parametrize("name", TAKING_GRADIENTS)
def test_a_gradient_that_is_summed_is_none_of_a_value_that_varies(name, hooks):
    """Each device got the sum of all devices' gradients for its own, silently."""
    body = TAKING_GRADIENTS[name]
    f = versions.shard_map(
        lambda w, x: body(w, x[0])[None],
        mesh=mesh(),
        in_specs=(P(), P("data")),
        out_specs=P("data"),
    )
    with raising.raises(errors.AxisError, axes={"data"}):
        jax.jit(jax.grad(lambda w: f(w, X).sum()))(W)


@versions.where(versions.differentiates_solutions)
@pytest.mark.parametrize("early", [True, False])
def test_a_solution_varies_more_than_its_guess(early, hooks):
    """From JAX 0.12 nothing is traced with the guess: then the gradient is right without a cast."""
    solve = root(lambda guess: sr.vary(guess, "data")) if early else root(None)

    def total(w, x, f):
        return (f(w, x[0]) * WEIGHTS).sum()

    f = versions.shard_map(
        lambda w, x: lax.psum(total(w, x, solve), "data"),
        mesh=mesh(),
        in_specs=(P(), P("data")),
        out_specs=P(),
    )
    try:
        got = jax.jit(jax.grad(lambda w: f(w, X)))(W)
    except errors.AxisError as error:
        assert not early and error.axes == {"data"}
        return
    want = jax.grad(lambda w: sum(total(w, x[None], root(None)) for x in X))(W)
    np.testing.assert_allclose(got, want, rtol=1e-4)


if getattr(internals.load(), "trace_run_state", None) is not None:  # types on avals, refs with them

    def test_a_run_state_is_traced_again(hooks, cpu_mesh):
        from jax.experimental import pallas as pl

        def copied(refs):
            refs[1][...] = jnp.sin(refs[0][...])

        def replayed(x):
            closed = jax.make_jaxpr(lambda x: pl.run_state(copied)((x, jnp.zeros(4)))[1])(
                jnp.zeros(4)
            )
            return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, x)[0]

        def sharded(out_specs):
            return versions.shard_map(
                replayed, mesh=cpu_mesh, in_specs=P("data"), out_specs=out_specs
            )

        x = X.reshape(16)
        np.testing.assert_allclose(jax.jit(sharded(P("data")))(x), np.sin(x), rtol=1e-6)
        with raising.wrong_out_specs():
            jax.eval_shape(sharded(P()), x)
