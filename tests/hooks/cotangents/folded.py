"""Random small programs of refs, loops, branches, kernels and collectives, and what they compute.

A program is a function of three arrays of a shard_map over (4 data, 2 model): x differs along
data, u along model, w along neither. What the folds say of its result is compared with what eight
devices compute.
"""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from shardrules.door import internals
from shardrules.hooks.cotangents.linearity import linearity
from shardrules.hooks.cotangents.origins import Origin, Origins
from shardrules.hooks.install import state

from .rows import CASES, FIXED, Mapped

AXES = ("data", "model")
SIZE = 8
GIVEN = (("data",), (), ("model",))  # the axes along which each argument differs
# What a kernel or a placement asks for is in the rows' own test.
PLAIN = [
    case
    for name, cases in CASES.items()
    for case in cases
    if not isinstance(case, Mapped)
    and name not in ("sharding_constraint", "layout_constraint", "with_memory_space_constraint")
]


def resized(value):
    """Return eight floats of a value of any shape and dtype, linearly."""
    flat = jnp.real(value).astype(jnp.float32).reshape(-1)
    return jnp.resize(flat, SIZE)


class Program:
    def __init__(self, seed: int):
        self.seed = seed
        self.said: list[str] = []

    def __call__(self, x, w, u):
        self.draw, self.said = random.Random(self.seed), []
        values = [x, w, u, jnp.zeros(SIZE)]
        for _ in range(self.draw.randint(2, 4)):
            values.append(self._step(values))
        return resized(values[-1])

    def _step(self, values):
        kinds = [self._of_one, self._of_two, self._ref, self._scan, self._while, self._cond]
        kinds += [self._jit, self._collective, self._of_one]
        step = self.draw.choice(kinds)
        self.said.append(step.__name__)
        return step(values)

    def _pick(self, values):
        return self.draw.choice(values)

    def _of_one(self, values):
        return resized(self.draw.choice(PLAIN)(self._pick(values)))

    def _of_two(self, values):
        a, b = self._pick(values), self._pick(values)
        kind = self.draw.choice(["add", "mul", "where", "div", "nothing"])
        self.said.append(kind)
        if kind == "where":
            return jnp.where(a > 0, b, FIXED)
        if kind == "nothing":
            return a * 0.0 + b
        return a + b if kind == "add" else a * b if kind == "mul" else a / (2 + b * b)

    def _ref(self, values):
        a, b, times = self._pick(values), self._pick(values), self.draw.randint(1, 3)
        how = self.draw.choice(["store", "add", "at"])
        ref = jax.new_ref(self.draw.choice([jnp.zeros(SIZE), a]))

        def body(i, carry):
            carry = carry + ref[...]
            if how == "store":
                ref[...] = b * i
            elif how == "add":
                jax.ref.addupdate(ref, ..., b)
            else:
                ref[2:4] = b[:2]
            return carry

        carry = lax.fori_loop(0, times, body, jnp.zeros(SIZE))
        return carry if self.draw.random() < 0.5 else ref[...]

    def _scan(self, values):
        a, b = self._pick(values), self._pick(values)
        case = self.draw.choice(PLAIN)
        swaps = self.draw.random() < 0.5

        def body(carry, t):
            one, two = carry
            new = resized(case(one)) + t if self.draw_at else one + t
            return ((two, new) if swaps else (new, two)), one * t

        self.draw_at = self.draw.random() < 0.5
        carry, stacked = lax.scan(body, (a, jnp.zeros(SIZE)), b[:3])
        return self.draw.choice([carry[0], carry[1], resized(stacked)])

    def _while(self, values):
        a, b, bound = self._pick(values), self._pick(values), self._pick(values)
        stop = self.draw.choice([3.0, None])

        def goes_on(carry):
            return carry[0] < (jnp.clip(jnp.abs(bound[0]) * 3, 0, 5) if stop is None else stop)

        return lax.while_loop(goes_on, lambda c: (c[0] + 1, c[1] * 0.5 + b), (0.0, a))[1]

    def _cond(self, values):
        a, b, by = self._pick(values), self._pick(values), self._pick(values)
        case = self.draw.choice(PLAIN)
        return lax.cond(by[0] > 0, lambda a, b: resized(case(a)), lambda a, b: a - b, a, b)

    def _jit(self, values):
        a, b, case = self._pick(values), self._pick(values), self.draw.choice(PLAIN)
        return jax.jit(lambda a, b: (b, resized(case(a))))(a, b)[self.draw.randint(0, 1)]

    def _collective(self, values):
        a, axis = self._pick(values), self.draw.choice(AXES)
        kind = self.draw.choice("psum pmax gather permute scatter index mean".split())
        self.said.append(f"{kind} over {axis}")
        if kind == "psum":
            return lax.psum(a, axis)
        if kind == "pmax":
            return lax.pmax(a, axis)
        if kind == "mean":
            return lax.pmean(a, axis)
        if kind == "gather":
            return resized(lax.all_gather(a, axis))
        if kind == "permute":
            return lax.ppermute(a, axis, [(0, 1), (1, 0)])
        if kind == "scatter":
            return resized(lax.psum_scatter(a, axis, tiled=True))
        return a * lax.axis_index(axis)


def mapped(program, mesh):
    specs = tuple(P(axes) for axes in GIVEN)
    return jax.shard_map(
        lambda *args: program(*args), mesh=mesh, in_specs=specs, out_specs=P(AXES), check_vma=False
    )


def arguments(mesh, seed):
    numbers = np.random.default_rng(seed)
    sizes = [SIZE * int(np.prod([mesh.shape[a] for a in axes])) for axes in GIVEN]
    return [jnp.asarray(numbers.normal(size=size), jnp.float32) for size in sizes]


def claims(program, mesh):
    """Return the origin of a program's result, and for each argument whether it is linear in it."""
    found = []

    def look(*args):
        jaxpr = jax.make_jaxpr(program)(*args).jaxpr
        inputs = [Origin(frozenset({n}), frozenset(axes)) for n, axes in enumerate(GIVEN)]
        opaque_of = state().opaque_call_of
        (origin,) = Origins(internals.load(), opaque_of, frozenset(AXES), jaxpr, inputs).outputs
        proofs = [linearity(jaxpr, [var], kernels=True) for var in jaxpr.invars]
        linear = [proof.summed is not None and not proof.rounds for proof in proofs]
        found.append((origin, linear))
        return args[0]

    specs = tuple(P(axes) for axes in GIVEN)
    args = arguments(mesh, 0)
    traced = jax.shard_map(look, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=False)
    jax.eval_shape(traced, *args)
    return found[0]


def wrong(seed, mesh):
    """Say what the claims of one program get wrong; empty if nothing."""
    program = Program(seed)
    origin, linear = claims(program, mesh)
    run = jax.jit(mapped(program, mesh))
    args, others = arguments(mesh, seed), arguments(mesh, seed + 1)
    result = np.asarray(run(*args))
    devices = result.reshape(*(mesh.shape[a] for a in AXES), SIZE)
    for at, axis in enumerate(AXES):
        if axis not in origin.axes and not np.array_equal(
            devices, np.broadcast_to(devices.take([0], at), devices.shape), equal_nan=True
        ):
            return f"differs along {axis}: {program.said}"
    if origin.number is not None and not np.allclose(result, origin.number):
        return f"is not {origin.number}: {program.said}"
    for n in range(3):
        changed = [*args]
        changed[n] = others[n]
        again = np.asarray(run(*changed))
        if n not in origin.inputs and not np.array_equal(result, again, equal_nan=True):
            return f"depends on input {n}: {program.said}"
        if linear[n]:
            both = [*args]
            both[n] = 2 * args[n] - 3 * others[n]
            off = np.nanmax(np.abs(np.asarray(run(*both)) - (2 * result - 3 * again)), initial=0)
            if off > 1e-3 * (1 + np.nanmax(np.abs([result, again]), initial=0)):
                return f"is not linear in input {n}, off by {off:.3g}: {program.said}"
    return ""
