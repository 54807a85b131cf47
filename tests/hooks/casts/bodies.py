"""Random bodies of shard_maps whose gradients hold casts, and what a single device makes of them.

A body is made of operations over a pool of values, some the same on every device and some not:
elementwise and matrix products, repeats, slices, conversions, scans, branches, jit, remat,
custom_vjp whose bwd returns shares or sums by itself, and psums in the middle. The reference is the
same function under ``jax.vmap`` over the mesh axes, where a collective is array arithmetic.
"""

from __future__ import annotations

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import shardrules as sr

SIZE = 8


def custom_product(sums):
    """A product by a custom_vjp; its bwd returns a share of w's cotangent, or the sum over axes."""

    @jax.custom_vjp
    def product(w, x):
        return x @ w

    def bwd(kept, g):
        w, x = kept
        gw = x.T @ g
        return (lax.psum(gw, sums) if sums else gw), g @ w.T

    product.defvjp(lambda w, x: (product(w, x), (w, x)), bwd)
    return product


class Body:
    """One random body; called with the parameters and this device's block of the data.

    Args:
      seed: of the random choices.
      mesh: the mesh.
      axes: those of its axes over which the data is split; every one of them if not given.
      steps_count: operations.
    """

    more_kinds = ()

    def __init__(self, seed, mesh, axes=None, steps_count=7):
        self.seed, self.mesh, self.steps_count = seed, mesh, steps_count
        self.axes = mesh.axis_names if axes is None else axes

    def arguments(self):
        """Return the parameters, and the data: a square block for each device."""
        rng = np.random.RandomState(self.seed)

        def one(*shape):
            return (rng.randn(*shape) * 0.2).astype(np.float32)

        over = [self.mesh.shape[axis] if axis in self.axes else 1 for axis in self.mesh.axis_names]
        return (one(SIZE, SIZE), one(SIZE, SIZE)), one(*over, SIZE, SIZE)

    def __call__(self, params, x):
        """Return what this device makes, and something that is the same on all."""
        choose = random.Random(self.seed)
        w, v = params
        same, differs = [w, v, jnp.sin(w)], [x]
        if len(self.axes) > 1:  # what varies over some of them
            differs.append(jnp.tanh(lax.psum(x, choose.choice(self.axes))))
            self.alone = [  # what varies over one of them
                jnp.tanh(lax.psum(x, tuple(other for other in self.axes if other != axis)))
                for axis in self.axes
            ]
        for _ in range(self.steps_count):
            a = choose.choice(choose.choice((same, same, differs)))
            b = choose.choice(choose.choice((same, differs)))
            made, read = self.operation(choose, a, b, same, differs)
            is_same = all(any(one is other for other in same) for one in read)
            (same if is_same else differs).append(made)
        each = sum(jnp.sum(one * one) for one in differs)
        each = each + sum(jnp.sum(one * other) for one, other in zip(same, differs[::-1]))
        return each, sum(jnp.sum(jnp.cos(one)) for one in same[2:4])

    def operation(self, choose, a, b, same, differs):
        """Return a new value, and the values that it depends on."""
        kind = choose.choice(
            self.more_kinds
            + (
                "sin",
                "product",
                "repeat",
                "scan",
                "carry",
                "cond",
                "jit",
                "remat",
                "custom",
                "add",
                "scanxs",
                "psum",
                "slice",
                "half",
                "customscan",
                "nested",
                "switch",
            )
            + ("atomic", "readtwice") * 4 * (len(self.axes) > 1)
        )
        if kind == "sin":
            return jnp.sin(a), (a,)
        if kind == "add":
            return a + 0.5 * b, (a, b)
        if kind == "product":
            return jnp.tanh(a @ b), (a, b)
        if kind == "repeat":
            wide = jnp.repeat(a, 3, axis=0)
            return (wide * jnp.arange(wide.shape[0], dtype=a.dtype)[:, None]).reshape(
                3, SIZE, SIZE
            ).sum(0) * 0.1, (a,)
        if kind == "slice":
            return jnp.concatenate([a[: SIZE // 2], b[SIZE // 2 :]]), (a, b)
        if kind == "half":
            return (a.astype(jnp.bfloat16).astype(jnp.float32)) * 0.7, (a,)
        if kind == "scan":
            length = choose.choice((2, 3))
            out, _ = lax.scan(lambda h, _: (jnp.tanh(h @ a), None), b, None, length=length)
            return out, (a, b)
        if kind == "carry":

            def step(carry, _):
                h, k = carry
                return (jnp.tanh(h + k), jnp.sin(k)), h.sum()

            (out, _), sums = lax.scan(step, (b, a), None, length=3)
            return out * 0.5 + sums.mean(), (a, b)
        if kind == "scanxs":
            rows = jnp.stack([a, 0.5 * a])
            out, ys = lax.scan(lambda h, r: (jnp.tanh(h @ r), h * r), b, rows)
            return out + ys.sum(0), (a, b)
        if kind == "cond":
            flag = choose.choice((same, differs))[0]
            return lax.cond(
                flag[0, 0] > 0, lambda p, q: jnp.sin(p) @ q, lambda p, q: p * 0.5 + q * p, a, b
            ), (a, b, flag)
        if kind == "switch":  # each branch reads something else of what it is given
            flag = choose.choice((same, differs))[0]
            index = (flag[0, 0] > 0).astype(jnp.int32) + (flag[1, 1] > 0)
            branches = (lambda p, q: jnp.sin(p), lambda p, q: q * 0.5, lambda p, q: p @ q)
            return lax.switch(index, branches, a, b), (a, b, flag)
        if kind == "jit":
            g = jax.jit(lambda p, q: jnp.tanh(p @ q) + p)
            return g(a, g(b, a)), (a, b)
        if kind == "remat":
            return jax.checkpoint(lambda p, q: jnp.sin(p @ q) * jnp.cos(q))(a, b), (a, b)
        if kind == "nested":

            @jax.checkpoint
            def inner(h, _):
                return jax.jit(lambda h: jnp.tanh(h @ a))(h), None

            return lax.scan(inner, b, None, length=2)[0], (a, b)
        if kind == "psum":
            return a + 0.1 * lax.psum(sr.vary(jnp.tanh(b), *self.axes), self.axes), (a,)
        if kind in self.more_kinds:
            return self.harder(kind, choose, a, b, differs)
        product = custom_product(None)
        if kind in ("atomic", "readtwice"):  # each operand varies over an axis of its own
            first, second = choose.sample(self.alone, 2)
            left, right = jnp.sin(a * first), b * second
            if choose.random() < 0.5:
                left = jnp.repeat(left, choose.choice((2, 3)), axis=0)
            if choose.random() < 0.3:
                left = jnp.concatenate([left, jnp.cos(left)])
            out = product(right, left)
            if kind == "readtwice":
                out = out * product(jnp.cos(right), left)
            return jnp.tanh(out[:SIZE]), (a, b, first)
        if kind == "custom":
            return product(a, b), (a, b)
        return lax.scan(lambda h, _: (jnp.tanh(product(a, h)), None), b, None, length=2)[0], (a, b)

    def one_of(self, choose, differs):
        """Return a value that varies over one axis, or over some."""
        return choose.choice(self.alone if len(self.axes) > 1 else differs)

    def split(self, check=True):
        """Return the loss of parameters and data, by shard_map."""
        axes = self.mesh.axis_names
        spec = P(*(axis if axis in self.axes else None for axis in axes))

        def local(params, x):
            each, one = self(params, x[(0,) * len(axes)])
            if check:
                each = sr.vary(each, *axes)
            return each[(None,) * len(axes)], one

        f = jax.shard_map(
            local, mesh=self.mesh, in_specs=(P(), spec), out_specs=(P(*axes), P()), check_vma=check
        )

        def loss(params, x):
            each, one = f(params, x)
            return each.sum() + one

        return loss

    def whole(self):
        """Return the same on one device: the leading axes of its arrays are the mesh's."""
        axes = self.mesh.axis_names

        def loss(params, x):
            x = jnp.broadcast_to(x, (*(self.mesh.shape[axis] for axis in axes), *x.shape[-2:]))
            f = functools.partial(self, params)
            for axis in reversed(axes):
                f = jax.vmap(f, axis_name=axis)
            each, one = f(x)
            return each.sum() + one[(0,) * len(axes)]

        return loss


@jax.custom_vjp
def three_products(u, v, w):
    """Three products by one custom_vjp; its bwd returns a share of each cotangent."""
    return (u @ v) @ w


three_products.defvjp(
    lambda u, v, w: (three_products(u, v, w), (u, v, w)),
    lambda kept, g: jax.vjp(lambda u, v, w: (u @ v) @ w, *kept)[1](g),
)


def _multiply(a, b):
    """A product by a kernel."""

    def kernel(a_ref, b_ref, out_ref):
        out_ref[...] = a_ref[...] @ b_ref[...]

    shape = jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype)
    return pl.pallas_call(kernel, out_shape=shape, interpret=True)(a, b)


kernel_product = jax.custom_vjp(_multiply)
kernel_product.defvjp(
    lambda a, b: (_multiply(a, b), (a, b)),
    lambda kept, g: (_multiply(g, kept[1].T), _multiply(kept[0].T, g)),
)


class HarderBody(Body):
    """A random body that also holds kernels, solves, sorts, and custom_vjps of three operands."""

    more_kinds = (
        ("solve", "inv", "expm", "sorted", "kernel", "three") * 2
        + ("cg", "while", "joined", "scattered")
    )  # fmt: skip

    def harder(self, kind, choose, a, b, differs):
        """Return what an operation of ``more_kinds`` makes, and the values that it depends on."""
        square = 3 * jnp.eye(SIZE) + 0.1 * jnp.tanh(a)
        if kind == "solve":
            return 0.3 * jnp.linalg.solve(square, b), (a, b)
        if kind == "inv":
            return jnp.linalg.inv(square) @ b, (a, b)
        if kind == "expm":
            return jax.scipy.linalg.expm(0.1 * jnp.tanh(a)) * 0.3, (a,)
        if kind == "cg":
            spd = 3 * jnp.eye(SIZE) + 0.01 * jnp.tanh(a) @ jnp.tanh(a).T
            return jax.scipy.sparse.linalg.cg(lambda v: spd @ v, b, maxiter=8)[0], (a, b)
        if kind == "sorted":
            by = jax.jit(lambda p, q, r: lax.sort((p, q, r), num_keys=1))
            first, second, third = by(jnp.sin(a), a, b)
            return first + second * third, (a, b)
        if kind == "while":
            count = 2 + (lax.stop_gradient(b)[0, 0] > 0).astype(jnp.int32) * 0
            return lax.fori_loop(0, 2, lambda i, h: jnp.tanh(h @ a) + 0 * count, b), (a, b)
        first = self.one_of(choose, differs)
        if kind == "kernel":
            left = jnp.repeat(jnp.sin(a * first), 2, axis=0)
            return jnp.tanh(kernel_product(left, b * self.one_of(choose, differs)))[:SIZE], (
                a,
                b,
                first,
            )
        if kind == "three":
            others = [self.one_of(choose, differs) for _ in range(2)]
            out = three_products(
                jnp.concatenate([a, a * first]), b * others[0], jnp.sin(a) * others[1]
            )
            return jnp.tanh(out)[:SIZE], (a, b, first)
        wide = jnp.broadcast_to(a * first, (2, SIZE, SIZE)).reshape(2 * SIZE, SIZE)
        made = custom_product(None)(b * self.one_of(choose, differs), wide)
        axis = choose.choice(self.axes)
        if kind == "joined":
            return jnp.tanh(lax.psum(sr.vary(made, axis), axis))[:SIZE] * 0.3 + first, (a, b, first)
        made = sr.vary(jnp.tile(made, (self.mesh.shape[axis] // 2 or 1, 1)), axis)
        part = lax.psum_scatter(jnp.tanh(made), axis, tiled=True)
        return jnp.resize(part, (SIZE, SIZE)) + 0.1 * first, (a, b, first)
