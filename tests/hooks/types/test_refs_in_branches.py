"""Refs that a branch or loop body makes for itself, where devices choose or loop differently.

What such a branch reads from its own ref varies as the predicate does, and so do the gradients of
what it stored. Values and gradients are those of the check off; plain JAX with the check on loses
part of the gradients (JAX 0.10.2 and 0.12: [0, 120, 240, 360] of ``adds``).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr

SIZE = 4


def chosen(branch):
    """Return a body in which half of the devices run ``branch`` of the replicated w."""

    def body(x, w):
        return jax.lax.cond(x[0, 0] > 7, lambda w: branch(x, w), lambda w: 2 * w, w)[None]

    return body


@chosen
def adds(x, w):
    ref = jax.new_ref(jnp.zeros(SIZE))
    ref[...] += w
    ref[...] = ref[...] * 3
    return ref[...]


@chosen
def loops(x, w):
    ref = jax.new_ref(w)

    def step(i, carry):
        ref[...] += w * i
        return carry

    jax.lax.fori_loop(0, 3, step, 0)
    return ref[...]


@chosen
def nests(x, w):
    ref = jax.new_ref(jnp.zeros(SIZE))

    @jax.jit
    def add(value):
        own = jax.new_ref(jnp.ones(SIZE))
        own[...] *= value
        ref[...] += own[...]

    def store():
        ref[0] = 5.0

    add(w)
    add(w * w)
    jax.lax.cond(w.sum() > 100, store, lambda: None)
    return ref[...]


@chosen
def counts(x, w):
    ref = jax.new_ref(jnp.zeros(2, jnp.int32))
    ref[0] = 3
    return w * ref[0]


def kept(x, w):
    def branch(w):
        ref = jax.new_ref(jnp.zeros(SIZE))
        ref[...] = w
        return ref[...] * x[0]

    return jax.lax.cond(x[0, 0] > 7, branch, lambda w: 2 * x[0], w)[None]


def steps(x, w):
    def step(carry):
        i, total = carry
        ref = jax.new_ref(jnp.zeros(SIZE))
        ref[...] = w * i
        ref[...] += total
        return i + 1, ref[...]

    return jax.lax.while_loop(lambda carry: carry[0] < x[0, 0], step, (0.0, jnp.zeros(SIZE)))[1][
        None
    ]


BODIES = [adds, loops, nests, counts, kept, steps]
# JAX 0.10.2 differentiates no branch that gives a jit its ref, and no JAX a while_loop.
DIFFERENTIATED = [adds, loops, counts, kept]
IDS = "adds loops nests counts kept steps".split()


def split(body, mesh, check):
    specs = P(("data", "model")), P()
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=check)


def arguments():
    return jnp.arange(8.0 * SIZE).reshape(8, SIZE) / 2, jnp.arange(1.0, 1 + SIZE)


@pytest.mark.parametrize("body", BODIES, ids=IDS)
def test_values_are_those_of_the_check_off(cpu_mesh, body):
    with sr.install():
        found = jax.jit(split(body, cpu_mesh, True))(*arguments())
    np.testing.assert_array_equal(found, jax.jit(split(body, cpu_mesh, False))(*arguments()))


@pytest.mark.parametrize("body", DIFFERENTIATED, ids=["adds", "loops", "counts", "kept"])
def test_gradients_are_those_of_the_check_off(cpu_mesh, body):
    x, w = arguments()

    def gradient(check):
        return jax.grad(lambda w: (split(body, cpu_mesh, check)(x, w) ** 2).sum())(w)

    with sr.install():
        found = gradient(True)
    np.testing.assert_allclose(found, gradient(False), rtol=1e-6)
