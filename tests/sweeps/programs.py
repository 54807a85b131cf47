"""Random programs with gradients: shard_map under the hooks against arrays of devices.

A program is data: instructions on values of eight floats, some with programs inside. It is run
twice: by ``OnDevices`` in ``shard_map`` on eight devices as 4x2, and by ``AsArrays`` on one, where
the devices are the first axis of every array, collectives are ordinary indexing and sums along it,
branches are selects and loops are unrolled. JAX differentiates the latter without knowing of any
mesh, so its values and gradients are exact whatever a custom_vjp, a kernel or a type says.

A value that is typed invariant must be equal there on all devices, each value and gradient equal.

    python -m tests.sweeps.programs 2000 [first_seed [processes]]
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import os
import random
import subprocess
import sys
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "")
        + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    ).strip()

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules import hooks
from shardrules.errors import ShardrulesError

lax = jax.lax
AXES = {"a": 4, "b": 2}
DEVICES, N = 8, 8
SPECS = [(), ("a",), ("b",), ("a", "b")]
GROUPS = {"a": [None, [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3, 0], [1, 2]]], "b": [None]}


@dataclasses.dataclass(frozen=True)
class Step:
    """One instruction.

    Args:
      kind: the name of a method of ``Machine``.
      inputs: places of values.
      options: what else the kind needs.
      blocks: the programs inside.
    """

    kind: str
    inputs: tuple[int, ...]
    options: tuple[Any, ...] = ()
    blocks: tuple[Block, ...] = ()


@dataclasses.dataclass(frozen=True)
class Block:
    """Instructions on the values of ``count`` arguments; the last value is the result."""

    count: int
    steps: tuple[Step, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """A block on floats and one integer for each device.

    Args:
      specs: the mesh axes of each float argument.
      integer: those of the integer.
      mode: where the gradient is taken: outside of the shard_map, inside, or forward.
    """

    seed: int
    specs: tuple[tuple[str, ...], ...]
    integer: tuple[str, ...]
    block: Block
    mode: str


# ---- local functions of a few values of eight floats


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
    "solve": lambda x, y: jnp.linalg.solve(
        jnp.diag(3 + jnp.sin(x)) + 0.1 * jnp.outer(x, x) / (1 + (x**2).sum()), y
    ),
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


def _reducing(name, axis):
    """A custom_vjp with a collective in it, as plain collectives: (custom, machine -> value)."""
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
    elif name == "identity":  # wrong where x is invariant: bwd sums what was never apart
        f = jax.custom_vjp(lambda x: jnp.sin(x))
        f.defvjp(lambda x: (f(x), x), lambda x, g: (lax.psum(g * jnp.cos(x), axis),))
    return f


# ---- the two machines


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
        return 0.5 * _reducing(name, axis)(x + self.zero if everywhere else x)

    def axis_index(self, axis, x):
        return x * (1 + 0.1 * lax.axis_index(axis).astype(np.float32))

    def collective(self, name, axes, groups, x):
        size = _size(axes, groups)
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
            return jnp.tensordot(_weights(size), lax.all_gather(x, axis, **more), 1)
        if name == "all_gather_tiled":
            gathered = lax.all_gather(x, axis, tiled=True, **more)
            return jnp.tensordot(_weights(size), gathered.reshape(size, N), 1)
        if name == "psum_scatter":
            return lax.psum_scatter(_weights(size)[:, None] * x, axis, **more)
        if name == "psum_scatter_tiled":
            spread = (_weights(size)[:, None] * x).reshape(size * N)
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
        members, _ = _members((axis,), None)
        if name == "pmean":
            x = jnp.sin(x)
        return 0.5 * (x[members].sum(1) if name == "psum" else x[members].mean(1))

    def axis_index(self, axis, x):
        _, position = _members((axis,), None)
        return x * (1 + 0.1 * position[:, None].astype(np.float32))

    def collective(self, name, axes, groups, x):
        members, position = _members(axes, groups)
        size = members.shape[1]
        if name in ("psum", "pmean"):
            return x[members].mean(1)
        if name in ("pmax", "pmin"):
            return getattr(lax.stop_gradient(x)[members], name[1:])(1)
        if name.startswith("all_gather"):
            return jnp.einsum("k,dki->di", _weights(size), x[members])
        if name.startswith("psum_scatter"):
            return x[members].sum(1) * _weights(size)[position][:, None]
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


def _weights(size):
    return np.cos(1 + np.arange(size)).astype(np.float32)


def _size(axes, groups):
    return len(groups[0]) if groups else int(np.prod([AXES[axis] for axis in axes]))


def _members(axes, groups):
    """Return (the devices of each device's group in order, its place among them)."""
    names = list(AXES)
    ids = np.arange(DEVICES).reshape(tuple(AXES.values()))
    order = [names.index(axis) for axis in axes]
    rest = [place for place in range(len(names)) if place not in order]
    lines = ids.transpose(*rest, *order).reshape(-1, _size(axes, None))
    if groups:
        lines = np.concatenate([lines[:, group] for group in groups])
    members = np.zeros((DEVICES, lines.shape[1]), int)
    position = np.zeros(DEVICES, int)
    for line in lines:
        for place, device in enumerate(line):
            members[device], position[device] = line, place
    return members, position


# ---- the generator


class Generator:
    """Makes one program; every choice comes from one seed."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.seed = seed
        self.mapped = False  # JAX can't map an all_to_all in groups

    def program(self):
        specs = tuple(self.random.choice(SPECS) for _ in range(3))
        integer = self.random.choice(SPECS)
        mode = self.random.choice(["outside", "outside", "inside", "forward", "hessian"])
        block = self.block(len(specs), self.random.randint(4, 7), True, 2, mode == "outside")
        return Program(self.seed, specs, integer, block, mode)

    def block(self, count, length, communicates, depth, reverse):
        """Return a block.

        Args:
          communicates: whether all devices run it alike.
          depth: how many blocks may stand inside each other.
          reverse: whether custom_vjps may stand in it: no forward derivative is taken.
        """
        steps = []
        for _ in range(length):
            steps.append(self.step(count + len(steps), communicates, depth, reverse))
        return Block(count, tuple(steps))

    def inside(self, count, communicates, depth, reverse):
        return self.block(count, self.random.randint(1, 3), communicates, depth - 1, reverse)

    def step(self, values, communicates, depth, reverse):
        choose = self.random.choice

        def pick(count):
            # Late values more often: else most are not used.
            return tuple(
                max(self.random.randrange(values), self.random.randrange(values))
                for _ in range(count)
            )

        kinds = ["plain"] * 3 + ["integer"] * 2 + ["custom jvp", "axis_index"]
        if reverse:
            kinds += ["custom"] * 3
        if communicates:
            kinds += ["collective"] * 4
            if reverse:
                kinds += ["reducing"]
        if depth:
            kinds += ["cond", "closed_cond", "switch", "scan", "scan_from_zeros", "while_loop"]
            kinds += ["remat", "jit", "vmap", "jvp", "linearize"]
            if communicates and reverse:
                kinds += ["grad"]
        if hasattr(jax, "new_ref") and depth == 2:
            kinds += ["ref"]
        kind = choose(kinds)
        if kind == "plain":
            name = choose(list(LOCAL))
            count = LOCAL[name].__code__.co_argcount
            return Step("plain", pick(count), (name,))
        if kind == "integer":
            return Step("integer", pick(1), (choose(list(WITH_INTEGER)),))
        if kind == "custom jvp":
            return Step("custom", pick(2), (choose(["jvp rule", "jvp rule of a kernel"]),))
        if kind == "custom":
            return Step("custom", pick(2), (choose(list(CUSTOM)),))
        if kind == "axis_index":
            return Step(kind, pick(1), (choose(list(AXES)),))
        if kind == "collective":
            return self.collective(pick)
        if kind == "reducing":
            name = choose(["psum", "pmean", "gather", "gather", "identity"])
            everywhere = name != "identity" or self.random.random() < 0.2
            return Step(kind, pick(1), (name, choose(list(AXES)), everywhere))
        if kind == "ref":
            return Step(kind, pick(2))
        if kind == "cond":
            same = choose([None, True]) if communicates else None
            place = choose([None, 0, 3]) if same is None else None
            both = tuple(self.inside(2, communicates and bool(same), depth, reverse) for _ in "12")
            return Step(kind, pick(2), (place, same), both)
        if kind in ("closed_cond", "switch"):
            count = 2 if kind == "closed_cond" else 3
            blocks = tuple(self.inside(2, False, depth, reverse) for _ in range(count))
            return Step(kind, pick(2), (), blocks)
        if kind == "while_loop":
            same = communicates and choose([True, False])
            block = self.inside(2, same, depth, reverse)
            return Step(kind, pick(2), (same,), (block,))
        forward = kind in ("jvp", "linearize")
        mapped, self.mapped = self.mapped, self.mapped or kind == "vmap"
        count = {"scan": 3, "jvp": 2, "linearize": 2}.get(kind, 2)
        block = self.inside(count, communicates, depth, reverse and not forward)
        self.mapped = mapped
        return Step(kind, pick(count + forward), (), (block,))

    def collective(self, pick):
        choose = self.random.choice
        name = choose(
            ["psum", "pmean", "pmax", "pmin", "all_gather", "all_gather_tiled", "psum_scatter"]
            + ["psum_scatter_tiled", "all_to_all", "ppermute"]
        )
        axes = choose([("a",), ("a",), ("b",), ("a", "b")])
        groups = None
        if len(axes) == 1 and name not in ("psum", "pmean", "ppermute") and not self.mapped:
            groups = choose(GROUPS[axes[0]])
        return Step("collective", pick(1), (name, axes, groups))


# ---- running one


def inputs(program):
    """Return the global arguments: the floats, the integers, a value for each device."""
    rng = np.random.default_rng(program.seed)
    floats = [
        jnp.asarray(rng.uniform(-1, 1, N * _size(spec, None)), np.float32) for spec in program.specs
    ]
    integers = jnp.asarray(rng.integers(0, 4, _size(program.integer, None)), np.int32)
    return floats, integers, jnp.asarray(rng.uniform(-1, 1, N * DEVICES), np.float32)


def _spec(axes):
    return P(axes) if axes else P()


def on_devices(program, types):
    """Return the function of the global arguments to the outputs of all devices."""
    mesh = Mesh(np.array(jax.devices()[:DEVICES]).reshape(tuple(AXES.values())), tuple(AXES))

    def body(floats, integers, everywhere):
        machine = OnDevices(integers[0], everywhere)
        trace = []
        out = machine.run(program.block, floats, trace)
        types[:] = [_varying(x) for x in trace]
        return out, trace

    def gradients(floats, integers, everywhere):
        """Gradients taken inside of the shard_map."""

        def loss(*floats):
            out, trace = body(floats, integers, everywhere)
            mine = (out * _mine(out, everywhere)).sum() + 0 * everywhere.sum()
            return lax.psum(mine, tuple(AXES)), trace

        grads, trace = jax.grad(loss, argnums=tuple(range(len(floats))), has_aux=True)(*floats)
        return list(grads), trace

    inner = gradients if program.mode == "inside" else body
    everything = P(tuple(AXES))
    floats_specs = [_spec(axes) for axes in program.specs]
    return hooks.shard_map(
        inner,
        mesh,
        (floats_specs, _spec(program.integer), everything),
        (floats_specs if program.mode == "inside" else everything, everything),
        check=True,
    )


def _mine(out, everywhere):
    """Weights that differ by device, and are no constants of the program."""
    return jnp.cos(3 * everywhere)


def _varying(x):
    rep = getattr(x, "rep", None)
    return frozenset(AXES) - rep if rep is not None else hooks.varying(x)


def as_arrays(program):
    """Return the same function, on one device."""

    def run(floats, integers, everywhere):
        def spread(x, spec, size):
            members = np.zeros(DEVICES, int)
            if spec:
                _, members = _members(spec, None)
            return x.reshape(_size(spec, None), *size)[members]

        machine = AsArrays(spread(integers, program.integer, ()))
        trace = []
        args = [spread(x, spec, (N,)) for x, spec in zip(floats, program.specs)]
        out = machine.run(program.block, args, trace)
        return out.reshape(DEVICES * N), [x.reshape(DEVICES * N) for x in trace]

    return run


@dataclasses.dataclass
class Outcome:
    """What became of a program: ``right``, ``refused``, ``died`` or ``wrong``, and why."""

    seed: int
    what: str
    why: str = ""


def judge(seed: int) -> Outcome:
    """Run one program both ways and compare; the hooks are installed."""
    return judge_program(Generator(seed).program())


def judge_program(program: Program) -> Outcome:
    floats, integers, everywhere = inputs(program)
    types: list[frozenset] = []
    sharded, alone = on_devices(program, types), as_arrays(program)
    rng = np.random.default_rng(program.seed + 1)
    tangents = [jnp.asarray(rng.uniform(-1, 1, x.shape), np.float32) for x in floats]

    def derivatives(f):
        def loss(floats):
            out, trace = f(floats, integers, everywhere)
            return (out * jnp.cos(3 * everywhere)).sum(), trace

        def forward(floats):
            return jax.jvp(lambda floats: loss(floats)[0], (floats,), (tangents,))[1]

        if program.mode == "forward":
            return lambda floats: ([forward(floats)], loss(floats)[1])
        if program.mode == "hessian":
            return lambda floats: (jax.grad(forward)(floats), loss(floats)[1])
        return jax.grad(loss, has_aux=True)

    want, reference = jax.jit(derivatives(alone))(floats)
    try:
        run = derivatives(sharded)
        if program.mode == "inside":
            run = lambda floats: sharded(floats, integers, everywhere)  # noqa: E731
        got, trace = jax.jit(run)(floats)
        jax.block_until_ready(got)
    except ShardrulesError as error:
        return Outcome(program.seed, "refused", f"{type(error).__name__}: {error}"[:300])
    except Exception as error:
        return Outcome(program.seed, "died", f"{type(error).__name__}: {error}"[:300])
    for place, (one, other) in enumerate(zip(trace, reference)):
        cube = np.asarray(other).reshape(*AXES.values(), N)
        name = _name(program.block.steps[place])
        for number, axis in enumerate(AXES):
            if axis not in types[place] and not _close(
                cube, np.broadcast_to(cube.take([0], number), cube.shape)
            ):
                return Outcome(
                    program.seed, "wrong", f"{name} is typed invariant over {axis} and differs"
                )
        copies = one
        if not _close(copies, other):
            return Outcome(program.seed, "wrong", f"the value of {name}")
    for place, (one, other) in enumerate(zip(got, want)):
        if not _close(one, other):
            return Outcome(
                program.seed,
                "wrong",
                f"derivative {place} ({program.mode}) is {np.ravel(one)[:3]} for "
                f"{np.ravel(other)[:3]}",
            )
    return Outcome(program.seed, "right")


def _name(step):
    return " ".join(map(str, (step.kind, *step.options)))


def _close(got, want):
    got, want = np.asarray(got), np.asarray(want)
    finite = np.abs(want[np.isfinite(want)])
    return np.allclose(
        got, want, rtol=5e-3, atol=5e-3 * max(finite.max(initial=0), 1e-2), equal_nan=True
    )


def show(block, indent=0):
    """Print a block, for a person who looks for what is wrong."""
    for place, step in enumerate(block.steps):
        print(" " * indent + f"{block.count + place}: {_name(step)} {step.inputs}")
        for one in step.blocks:
            print(" " * indent + f"  of {one.count}:")
            show(one, indent + 4)


def main(arguments):
    count, first, jobs = (list(map(int, arguments)) + [20, 0, 1][len(arguments) :])[:3]
    if jobs > 1:
        share = -(-count // jobs)
        running = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    __spec__.name,
                    str(min(share, count - start)),
                    str(first + start),
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            for start in range(0, count, share)
        ]
        totals: collections.Counter = collections.Counter()
        for one in running:
            out, _ = one.communicate()
            lines = out.splitlines()
            print("\n".join(lines[:-1]))
            totals.update(json.loads(lines[-1]) if lines and not one.returncode else {"lost": 1})
    else:
        totals = collections.Counter()
        with sr.install():
            for seed in range(first, first + count):
                outcome = judge(seed)
                totals[outcome.what] += 1
                if outcome.what != "right":
                    print(f"seed {seed}: {outcome.what}: {outcome.why}", flush=True)
                if seed % 50 == 49:
                    jax.clear_caches()
    print(json.dumps(totals))
    if jobs > 1 or len(arguments) < 3:
        return totals["wrong"] + totals["died"] + totals["lost"]


if __name__ == "__main__":
    main(sys.argv[1:])
