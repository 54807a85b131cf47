"""The two machines that run a random program: in shard_map, and under vmap on one device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import shardrules as sr
from shardrules import hooks

from .generator import Block
from .operations import AXES, CUSTOM, LOCAL, WITH_INTEGER, N, reducing

lax = jax.lax


def largest(n):
    """The largest of the devices' integers; axis by axis, since n may vary over some of them only."""
    return functools.reduce(lax.pmax, AXES, n)


class Machine:
    """Runs blocks; what differs is left to the two that follow.

    Args:
      n: the device's integer.
      everywhere: a value that varies over all axes.
    """

    def __init__(self, n, everywhere):
        self.n = n
        self.zero = 0 * everywhere

    def run(self, block, args, trace=None):
        """Return a block's result.

        Args:
          trace: a list that each value is appended to.
        """
        values = list(args)
        for step in block.steps:
            inputs = [values[place] for place in step.inputs]
            values.append(getattr(self, step.kind)(*step.options, *step.blocks, *inputs))
            if trace is not None:
                trace.append(values[-1])
        return values[-1]

    def plain(self, name, *inputs):
        return LOCAL[name](*inputs)

    def integer(self, name, x):
        return WITH_INTEGER[name](self.n, x)

    def jvp(self, block, x, t, *others):
        y, dy = jax.jvp(lambda x: self.run(block, [x, *others]), (x,), (t,))
        return y + 0.5 * dy

    def axis_index(self, axis, x):
        return x * (1 + 0.1 * lax.axis_index(axis).astype(np.float32))

    def cond(self, place, same, yes, no, x, *others):
        n = self.n if same is None else largest(self.n)
        predicate = n > 1 if place is None else x[place] > 0.1
        args = (x, *others)
        return lax.cond(predicate, lambda *a: self.run(yes, a), lambda *a: self.run(no, a), *args)

    def closed_cond(self, yes, no, *args):
        return lax.cond(self.n > 1, lambda: self.run(yes, args), lambda: self.run(no, args))

    def switch(self, same, *rest):
        blocks = [one for one in rest if isinstance(one, Block)]
        args = rest[len(blocks) :]
        n = largest(self.n) if same else self.n
        return lax.switch(
            n % len(blocks), [functools.partial(self._of, one) for one in blocks], *args
        )

    def _of(self, block, *args):
        return self.run(block, args)

    def scan(self, block, x, y, *others):
        rows = jnp.stack([y, 0.5 * y, -y])

        def body(c, row):
            c = self.run(block, [c, row, *others])
            return c, 0.3 * c

        c, out = lax.scan(body, x, rows)
        return c + out.sum(0)

    def scan_from_zeros(self, block, y, *others):
        rows = jnp.stack([y, 0.5 * y, -y])

        def body(c, row):
            return self.run(block, [c, row, *others]), None

        return lax.scan(body, jnp.zeros(N), rows)[0]

    def fori(self, block, x, *others):
        return lax.fori_loop(0, 3, lambda _, x: self.run(block, [x, *others]), x)

    def while_loop(self, same, block, x, *others):
        n = largest(self.n) if same else self.n
        others = [lax.stop_gradient(y) for y in others]

        def body(carried):
            k, c = carried
            return k + 1, self.run(block, [c, *others])

        return lax.while_loop(lambda c: c[0] < n, body, (0, lax.stop_gradient(x)))[1]

    def remat(self, block, *args):
        return jax.checkpoint(lambda *args: self.run(block, args))(*args)

    def jit(self, block, *args):
        return jax.jit(lambda *args: self.run(block, args))(*args)

    def vmap(self, block, x, *others):
        return jax.vmap(lambda x: self.run(block, [x, *others]))(jnp.stack([x, 0.5 - x])).mean(0)

    def linearize(self, block, x, t, *others):
        # A tangent that comes later can't change its primal's type: JAX wants the same.
        x, t = x + self.zero, t + self.zero
        return jax.linearize(lambda x: self.run(block, [x, *others]), x)[1](t)

    def vjp(self, block, x, t, *others):
        def f(x):
            return self.run(block, [x, *others]) + self.zero

        return jax.vjp(f, x + self.zero)[1](t + self.zero)[0]


class OnDevices(Machine):
    """In shard_map: JAX's own operations, and what types decide."""

    def custom(self, name, x, w):
        return CUSTOM[name][0](x, w)

    def reducing(self, name, axis, everywhere, x):
        return 0.5 * reducing(name, axis)(x + self.zero if everywhere else x)

    def collective(self, name, axes, groups, x):
        size = size_of(axes, groups)
        axis = axes if len(axes) > 1 else axes[0]
        more = {} if groups is None else {"axis_index_groups": groups}
        if len(axes) > 1:  # JAX takes no value that varies over some of them only
            x = x + self.zero
        if name in ("psum", "pmean"):
            y = getattr(lax, name)(x, axis, **more)
            return y / size if name == "psum" else y
        if name in ("pmax", "pmin"):
            return getattr(lax, name)(lax.stop_gradient(x), axis, **more)
        if name == "all_gather":
            return jnp.tensordot(weights(size), lax.all_gather(x, axis, **more), 1)
        if name == "all_gather_invariant":
            gathered = lax.all_gather(x + self.zero, axis, to="invarying")
            return jnp.tensordot(weights(size), gathered, 1)
        if name == "all_gather_tiled":
            gathered = lax.all_gather(x, axis, tiled=True, **more)
            return jnp.tensordot(weights(size), gathered.reshape(size, N), 1)
        if name == "psum_scatter":
            return lax.psum_scatter(weights(size)[:, None] * x, axis, **more)
        if name == "psum_scatter_tiled":
            spread = (weights(size)[:, None] * x).reshape(size * N)
            return lax.psum_scatter(spread, axis, tiled=True, **more)
        if name == "all_to_all":
            return lax.all_to_all(x, axis, 0, 0, tiled=True, **more)
        assert name == "ppermute"
        return lax.ppermute(x, axis, [(i, (i + 1) % size) for i in range(size)])

    def ref(self, x, y):
        ref = jax.new_ref(x + self.zero)
        ref[...] = ref[...] * 0.5 + y
        return ref[...]

    def accumulate(self, x, y):
        ref = jax.new_ref(x + self.zero)

        def add(row):
            ref[...] += row

        lax.fori_loop(0, 3, lambda k, _: add(y / 2**k), None)
        return ref[...]

    def vary(self, axes, x):
        return sr.vary(x, *axes)

    def custom_block(self, how, block, x, y):
        """A custom_vjp whose bwd is JAX's own, saved by the forward or taken once more."""

        def f(x, y, n, zero):  # what is closed over would outlive its trace
            return type(self)(n.astype(np.int32), zero).run(block, [x, y])

        op = jax.custom_vjp(f)
        if how == "pullback":
            op.defvjp(lambda *args: jax.vjp(f, *args), lambda pull, g: pull(g))
        else:
            op.defvjp(lambda *args: (f(*args), args), lambda args, g: jax.vjp(f, *args)[1](g))
        return op(x, y, lax.stop_gradient(self.n.astype(np.float32)), self.zero)

    def shares(self, how, w, x):
        """A product whose bwd returns this device's shares, or sums where its primals are equal."""

        types = hooks.varying(w), hooks.varying(x)  # in a branch, before they are cast for it

        def cotangent(value, primal, one):
            missing = hooks.varying(value) - hooks.varying(primal)
            if how == "summed as called":
                over = tuple((types[0] | types[1]) - one)
                return lax.psum(value, over) if over else value
            if how == "returned" or not missing:
                return value
            value = lax.psum(value, tuple(missing))
            if how == "summed":
                return value
            return sr.already_summed(sr.vary(value, *missing), *missing)

        def bwd(saved, g):
            w, x = saved
            return (
                cotangent(g * jnp.cos(w) * x, w, types[0]),
                cotangent(g * jnp.sin(w), x, types[1]),
            )

        op = jax.custom_vjp(lambda w, x: jnp.sin(w) * x)
        op.defvjp(lambda w, x: (op(w, x), (w, x)), bwd)
        return op(w, x)

    def straight(self, value, surrogate):
        """The value of one, the gradient of the other."""
        op = jax.custom_vjp(lambda value, surrogate: value)
        op.defvjp(lambda value, surrogate: (value, None), lambda _, g: (jnp.zeros_like(g), g))
        return op(value, surrogate)

    def grad(self, axes, block, x, *others):
        def loss(x):
            return lax.psum((self.run(block, [x, *others]) + self.zero).sum() * 0.2, tuple(AXES))

        if axes:
            x = lax.pmean(sr.vary(x, *axes), axes)
        rest = [axis for axis in AXES if axis not in axes]
        return jax.grad(loss)(sr.vary(x, *rest) if rest else x)


class Mapped(Machine):
    """On one device, under ``jax.vmap`` with the mesh axes' names: the same body without types.

    What depends on types is its plain function here: a custom_vjp, whose bwd follows them; a
    gradient that is taken inside; a cast. Each collective is array arithmetic on what all hold.
    """

    def custom(self, name, x, w):
        return CUSTOM[name][1](x, w)

    def custom_block(self, how, block, *args):
        return self.run(block, args)

    def shares(self, how, w, x):
        return jnp.sin(w) * x

    def straight(self, value, surrogate):
        return surrogate + lax.stop_gradient(value - surrogate)

    def vary(self, axes, x):
        return x

    def reducing(self, name, axis, everywhere, x):
        if name == "identity":
            return 0.5 * jnp.sin(x)
        mean = functools.partial(self.collective, "pmean", (axis,), None)
        if name == "gathered loss":
            return 0.5 * mean(jnp.sin(x)) * mean(x)
        if name == "pmean":
            return 0.5 * mean(jnp.sin(x))
        return 0.5 * mean(x) * (AXES[axis] if name == "psum" else 1)

    def collective(self, name, axes, groups, x):
        everyone, index = x, 0
        for axis in axes[::-1]:
            everyone = lax.all_gather(everyone, axis)
        for axis in axes:
            index = index * AXES[axis] + lax.axis_index(axis)
        count = size_of(axes, None)
        groups = groups or [list(range(count))]
        mine = [next(group for group in groups if one in group) for one in range(count)]
        position = jnp.array([group.index(one) for one, group in enumerate(mine)])[index]
        x = everyone.reshape(count, N)[jnp.array(mine)[index]]
        size = len(x)
        if name in ("psum", "pmean"):
            return x.mean(0)
        if name in ("pmax", "pmin"):
            return getattr(lax.stop_gradient(x), name[1:])(0)
        if name.startswith("all_gather"):
            return weights(size) @ x
        if name.startswith("psum_scatter"):
            return x.sum(0) * jnp.asarray(weights(size))[position]
        if name == "all_to_all":
            return x.reshape(size, size, N // size)[:, position].reshape(N)
        return x[(position - 1) % size]

    def grad(self, axes, block, x, *others):
        x = lax.pmean(x, axes) if axes else x
        found = jax.grad(lambda x: self.run(block, [x, *others]).sum() * 0.2)(x)
        return lax.psum(found, axes) if axes else found

    def ref(self, x, y):
        return x * 0.5 + y

    def accumulate(self, x, y):
        return x + 1.75 * y


def weights(size):
    return np.cos(1 + np.arange(size)).astype(np.float32)


def size_of(axes, groups):
    return len(groups[0]) if groups else int(np.prod([AXES[axis] for axis in axes]))
