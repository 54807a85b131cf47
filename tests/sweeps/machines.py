"""The two machines that run a random program: devices in shard_map, and arrays on one device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from .generator import Block
from .operations import AXES, CUSTOM, DEVICES, LOCAL, WITH_INTEGER, N, reducing

lax = jax.lax


class Machine:
    """Runs blocks; what differs is left to the two that follow."""

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
        return self.local(LOCAL[name], *inputs)

    def integer(self, name, x):
        return self.local(WITH_INTEGER[name], self.n, x)

    def jvp(self, block, x, t, *others):
        y, dy = jax.jvp(lambda x: self.run(block, [x, *others]), (x,), (t,))
        return y + 0.5 * dy

    def stopped(self, x):
        return lax.stop_gradient(x)


class OnDevices(Machine):
    """In shard_map: JAX's own operations.

    Args:
      n: the device's integer.
      everywhere: a value that varies over all axes.
    """

    def __init__(self, n, everywhere):
        self.n = n
        self.zero = 0 * everywhere

    def local(self, f, *inputs):
        return f(*inputs)

    def custom(self, name, x, w):
        return CUSTOM[name][0](x, w)

    def reducing(self, name, axis, everywhere, x):
        return 0.5 * reducing(name, axis)(x + self.zero if everywhere else x)

    def axis_index(self, axis, x):
        return x * (1 + 0.1 * lax.axis_index(axis).astype(np.float32))

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

    def cond(self, place, same, yes, no, x, *others):
        n = self.n if same is None else lax.pmax(self.n, tuple(AXES))
        predicate = n > 1 if place is None else x[place] > 0.1
        args = (x, *others)
        return lax.cond(predicate, lambda *a: self.run(yes, a), lambda *a: self.run(no, a), *args)

    def closed_cond(self, yes, no, *args):
        return lax.cond(self.n > 1, lambda: self.run(yes, args), lambda: self.run(no, args))

    def switch(self, *rest):
        blocks = [one for one in rest if isinstance(one, Block)]
        args = rest[len(blocks) :]
        return lax.switch(
            self.n % len(blocks), [functools.partial(self._of, one) for one in blocks], *args
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

    def while_loop(self, same, block, x, *others):
        n = lax.pmax(self.n, tuple(AXES)) if same else self.n
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

    def grad(self, block, x, *others):
        def loss(x):
            return lax.psum((self.run(block, [x, *others]) + self.zero).sum() * 0.2, tuple(AXES))

        return jax.grad(loss)(x + self.zero)

    def ref(self, x, y):
        ref = jax.new_ref(x + self.zero)
        ref[...] = ref[...] * 0.5 + y
        return ref[...]


class AsArrays(Machine):
    """On one device: arrays whose first axis is the devices.

    Args:
      n: the integers of all.
    """

    def __init__(self, n):
        self.n = n

    def local(self, f, *inputs):
        return jax.vmap(f)(*inputs)

    def custom(self, name, x, w):
        return self.local(CUSTOM[name][1], x, w)

    def reducing(self, name, axis, everywhere, x):
        if name == "identity":
            return 0.5 * jnp.sin(x)
        members, _ = members_of((axis,), None)
        if name == "gathered loss":
            return 0.5 * jnp.sin(x)[members].mean(1) * x[members].mean(1)
        if name == "pmean":
            x = jnp.sin(x)
        return 0.5 * (x[members].sum(1) if name == "psum" else x[members].mean(1))

    def axis_index(self, axis, x):
        _, position = members_of((axis,), None)
        return x * (1 + 0.1 * position[:, None].astype(np.float32))

    def collective(self, name, axes, groups, x):
        members, position = members_of(axes, groups)
        size = members.shape[1]
        if name in ("psum", "pmean"):
            return x[members].mean(1)
        if name in ("pmax", "pmin"):
            return getattr(lax.stop_gradient(x)[members], name[1:])(1)
        if name.startswith("all_gather"):
            return jnp.einsum("k,dki->di", weights(size), x[members])
        if name.startswith("psum_scatter"):
            return x[members].sum(1) * weights(size)[position][:, None]
        if name == "all_to_all":
            parts = x.reshape(DEVICES, size, N // size)
            return parts[members, position[:, None]].reshape(DEVICES, N)
        return x[members[np.arange(DEVICES), (position - 1) % size]]

    def cond(self, place, same, yes, no, x, *others):
        n = self.n if same is None else jnp.broadcast_to(self.n.max(), (DEVICES,))
        predicate = n > 1 if place is None else x[:, place] > 0.1
        args = (x, *others)
        return jnp.where(predicate[:, None], self.run(yes, args), self.run(no, args))

    def closed_cond(self, yes, no, *args):
        return jnp.where((self.n > 1)[:, None], self.run(yes, args), self.run(no, args))

    def switch(self, *rest):
        blocks = [one for one in rest if isinstance(one, Block)]
        args = rest[len(blocks) :]
        results = jnp.stack([self.run(block, args) for block in blocks])
        return results[self.n % len(blocks), np.arange(DEVICES)]

    def scan(self, block, x, y, *others):
        total = 0
        for row in (y, 0.5 * y, -y):
            x = self.run(block, [x, row, *others])
            total = total + 0.3 * x
        return x + total

    def scan_from_zeros(self, block, y, *others):
        x = jnp.zeros((DEVICES, N))
        for row in (y, 0.5 * y, -y):
            x = self.run(block, [x, row, *others])
        return x

    def while_loop(self, same, block, x, *others):
        n = jnp.broadcast_to(self.n.max(), (DEVICES,)) if same else self.n
        x, *others = [lax.stop_gradient(y) for y in (x, *others)]
        for k in range(4):
            x = jnp.where((k < n)[:, None], self.run(block, [x, *others]), x)
        return x

    def remat(self, block, *args):
        return self.run(block, args)

    jit = remat

    def vmap(self, block, x, *others):
        both = [self.run(block, [one, *others]) for one in (x, 0.5 - x)]
        return (both[0] + both[1]) / 2

    def linearize(self, block, x, t, *others):
        return jax.jvp(lambda x: self.run(block, [x, *others]), (x,), (t,))[1]

    def grad(self, block, x, *others):
        return jax.grad(lambda x: self.run(block, [x, *others]).sum() * 0.2)(x)

    def ref(self, x, y):
        return x * 0.5 + y


def weights(size):
    return np.cos(1 + np.arange(size)).astype(np.float32)


def size_of(axes, groups):
    return len(groups[0]) if groups else int(np.prod([AXES[axis] for axis in axes]))


def members_of(axes, groups):
    """Return (the devices of each device's group in order, its place among them)."""
    names = list(AXES)
    ids = np.arange(DEVICES).reshape(tuple(AXES.values()))
    order = [names.index(axis) for axis in axes]
    rest = [place for place in range(len(names)) if place not in order]
    lines = ids.transpose(*rest, *order).reshape(-1, size_of(axes, None))
    if groups:
        lines = np.concatenate([lines[:, group] for group in groups])
    members = np.zeros((DEVICES, lines.shape[1]), int)
    position = np.zeros(DEVICES, int)
    for line in lines:
        for place, device in enumerate(line):
            members[device], position[device] = line, place
    return members, position
