"""What a random program computes on one device: as it runs in shard_map, and as plain operations."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

import shardrules as sr

lax = jax.lax
AXES = {"a": 4, "b": 2}
DEVICES, N = 8, 8


def _kernel(f, *args):
    """Call a Pallas kernel that does what ``f`` does."""

    def body(*refs):
        refs[-1][...] = f(*(ref[...] for ref in refs[:-1]))

    body.__name__ = f"sweep_{f.__name__}"
    return pl.pallas_call(
        body, out_shape=jax.ShapeDtypeStruct(args[0].shape, args[0].dtype), interpret=True
    )(*args)


def times(x, w):
    return x * w


def bent(x, w):
    return jnp.tanh(x) * w


def slope(x, w):
    return w * (1 - jnp.tanh(x) ** 2)


def _matrix(x):
    """A well-conditioned symmetric matrix."""
    return jnp.diag(3 + jnp.sin(x)) + 0.1 * jnp.outer(x, x) / (1 + (x**2).sum())


LOCAL = {
    "sin": lambda x: jnp.sin(x),
    "scale": lambda x: 0.7 * x + 0.1,
    "tanh": lambda x: jnp.tanh(x),
    "cumsum": lambda x: 0.3 * jnp.cumsum(x),
    "softmax": lambda x: jax.nn.softmax(x) * 3,
    "silu": lambda x: jax.nn.silu(x),
    "clip": lambda x: jnp.clip(x, -0.4, 0.9),
    "norm": lambda x: x / jnp.sqrt(1 + (x**2).sum()),
    "constant": lambda x: jnp.cos(jnp.arange(N, dtype=np.float32)),
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "sin_of_product": lambda x, y: jnp.sin(x * y),
    "where": lambda x, y: jnp.where(x > y, x, 0.5 * y),
    "maximum": lambda x, y: jnp.maximum(x, y),
    "argsort": lambda x, y: x[jnp.argsort(y)],
    "top_k": lambda x, y: x[lax.top_k(y, N)[1]] * lax.top_k(y, N)[0],
    "sort": lambda x, y: lax.sort((x, y), num_keys=1)[1],
    "matmul": lambda x, y: jnp.tile((x.reshape(2, 4) @ y.reshape(4, 2)).reshape(4), 2) * 0.3,
    "outer": lambda x, y: jnp.outer(x, y).sum(0) * 0.2,
    "solve": lambda x, y: jnp.linalg.solve(_matrix(x), y),
    "inverse": lambda x, y: jnp.linalg.inv(_matrix(x)) @ y,
    "cg": lambda x, y: jax.scipy.sparse.linalg.cg(lambda v: _matrix(x) @ v, y, maxiter=12)[0],
    "cholesky": lambda x, y: jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(_matrix(x)), y),
    "root": lambda x, y: lax.custom_root(
        lambda z: z + 0.3 * jnp.sin(z * jnp.tanh(x)) - y,  # what z - f(z) contracts
        y,
        lambda f, z: lax.fori_loop(0, 25, lambda _, z: z - f(z), z),
        lambda g, z: z / g(jnp.ones_like(z)),
    ),
    "associative_scan": lambda x, y: lax.associative_scan(
        lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (jnp.tanh(x), y)
    )[1],
    "expm": lambda x: jax.scipy.linalg.expm(0.2 * x.reshape(4, 2) @ x.reshape(2, 4)).sum(0)[
        jnp.arange(N) % 4
    ],
    "map": lambda x, y: lax.map(lambda row: jnp.sin(row[0]) * row[1], (x, y)),
    "concatenate": lambda x, y: jnp.concatenate([x[:3], y[3:]]),
    "logsumexp": lambda x, y: jax.nn.logsumexp(x, b=y**2 + 0.1) + 0.1 * y,
    "einsum": lambda x, y: jnp.einsum("i,j,i->j", x, y, x) * 0.1,
}
WITH_INTEGER = {
    "gather": lambda n, x: x[(jnp.arange(N) + n) % N],
    "scatter": lambda n, x: x.at[n % N].add(0.5),
    "dynamic_slice": lambda n, x: jnp.tile(lax.dynamic_slice(x, (n,), (4,)), 2),
    "normal": lambda n, x: (
        x * jax.random.normal(jax.random.fold_in(jax.random.PRNGKey(3), n), (N,))
    ),
    "uniform": lambda n, x: (
        x + jax.random.uniform(jax.random.PRNGKey(n), (N,), minval=-1, maxval=x[0] + 2) * 0.3
    ),
    "gamma": lambda n, x: x * jax.random.gamma(jax.random.PRNGKey(n), 0.7, (N,)),
    "permutation": lambda n, x: jax.random.permutation(jax.random.PRNGKey(n), x),
    "one_hot": lambda n, x: x * jax.nn.one_hot(n, N),
}


def _custom(forward, backward):
    """A custom_vjp of (x, w) that saves both."""
    f = jax.custom_vjp(forward)
    f.defvjp(lambda x, w: (f(x, w), (x, w)), backward)
    return f


def _rule(forward):
    @jax.custom_jvp
    def f(x, w):
        return forward(x, w)

    @f.defjvp
    def _(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        return f(x, w), slope(x, w) * dx + jnp.tanh(x) * dw

    return f


@jax.custom_vjp
def _first(x, w):
    return jnp.sin(x)


_first.defvjp(lambda x, w: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x), jnp.zeros_like(g)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _power(n, x, w):
    return jnp.sin(x) ** n * w


_power.defvjp(
    lambda n, x, w: (_power(n, x, w), (x, w)),
    lambda n, res, g: (
        g * n * jnp.sin(res[0]) ** (n - 1) * jnp.cos(res[0]) * res[1],
        g * jnp.sin(res[0]) ** n,
    ),
)


def _total(x, w):
    return jnp.broadcast_to((x * w).sum() * 0.2, x.shape)


# From a name to (what runs in shard_map, the same as plain operations).
CUSTOM = {
    "plain": (_custom(bent, lambda r, g: (g * slope(*r), g * jnp.tanh(r[0]))), bent),
    "sum": (_custom(_total, lambda r, g: (g.sum() * 0.2 * r[1], g.sum() * 0.2 * r[0])), _total),
    "kernel": (
        _custom(
            lambda x, w: _kernel(times, x, w),
            lambda r, g: (_kernel(times, g, r[1]), _kernel(times, g, r[0])),
        ),
        times,
    ),
    "kernel in forward": (
        _custom(lambda x, w: _kernel(bent, x, w), lambda r, g: (g * slope(*r), g * jnp.tanh(r[0]))),
        bent,
    ),
    "kernel in backward": (_custom(times, lambda r, g: (_kernel(times, g, r[1]), g * r[0])), times),
    "declared": (
        sr.no_communication(
            _custom(
                lambda x, w: _kernel(bent, x, w),
                lambda r, g: (_kernel(times, g, slope(*r)), _kernel(times, g, jnp.tanh(r[0]))),
            )
        ),
        bent,
    ),
    "bare kernel": (
        lambda x, w: (
            lax.stop_gradient(_kernel(bent, lax.stop_gradient(x), lax.stop_gradient(w))) * x
        ),
        lambda x, w: lax.stop_gradient(bent(x, w)) * x,
    ),
    "zeros": (_first, lambda x, w: jnp.sin(x)),
    "nondiff": (functools.partial(_power, 3), lambda x, w: jnp.sin(x) ** 3 * w),
    "jvp rule": (_rule(bent), bent),
    "jvp rule of a kernel": (_rule(lambda x, w: _kernel(bent, x, w)), bent),
}


def reducing(name, axis):
    """Return a custom_vjp of one value with a collective in it, over one mesh axis."""
    size = AXES[axis]
    if name == "psum":
        f = jax.custom_vjp(lambda x: lax.psum(x, axis))
        f.defvjp(lambda x: (f(x), None), lambda _, g: (g,))
    elif name == "pmean":
        f = jax.custom_vjp(lambda x: lax.pmean(jnp.sin(x), axis))
        f.defvjp(lambda x: (f(x), x), lambda x, g: (g * jnp.cos(x) / size,))
    elif name == "gather":
        f = jax.custom_vjp(lambda x: lax.all_gather(x, axis).mean(0))
        f.defvjp(lambda x: (f(x), None), lambda _, g: (lax.psum(g, axis) / size,))
    elif name == "gathered loss":  # bwd has the full sum already, of a weight that all share

        def forward(w, every):
            return lax.pmean(w * every.mean(0), axis)

        def backward(residuals, g):
            w, every = residuals
            share = jnp.broadcast_to(g * w / size**2, every.shape)
            return g * every.mean(0), share

        loss = jax.custom_vjp(forward)
        loss.defvjp(lambda w, every: (loss(w, every), (w, every)), backward)

        def f(x):
            return loss(lax.pmean(jnp.sin(x), axis), lax.all_gather(x, axis))
    elif name == "identity":  # wrong where x is invariant: bwd sums what was never apart
        f = jax.custom_vjp(lambda x: jnp.sin(x))
        f.defvjp(lambda x: (f(x), x), lambda x, g: (lax.psum(g * jnp.cos(x), axis),))
    return f
