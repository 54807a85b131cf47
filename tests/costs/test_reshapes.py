"""A batch that a reshape splits into microbatches: what it sends, and the reshape that sends none."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from costs.test_waste import follow, hints, structs

ARGS = [((64, 32), P()), ((256, 64), P("data"))]


def accumulated(split, steps, layout=P(None, "data")):
    """The gradients of microbatches, each sharded over data, added up."""

    def step(w, x):
        parts = lax.with_sharding_constraint(split(x, steps), layout)

        def one(total, part):
            return total + jax.grad(lambda w: (jnp.tanh(part @ w) ** 2).sum())(w), None

        return lax.scan(one, jnp.zeros_like(w), parts)[0]

    return jax.jit(step)


def in_blocks(x, steps):
    return x.reshape(steps, -1, x.shape[1])


def in_turn(x, steps):
    return x.reshape(-1, steps, *x.shape[1:]).swapaxes(0, 1)


@pytest.mark.parametrize("steps, sent, count", [(8, 12288, 1), (2, 24576, 2)])
def test_microbatches_of_each_device_s_own_rows(platform, steps, sent, count):
    name, mesh = platform
    if name == "tpu" and steps == 2:
        return  # XLA for TPU splits the rows along another dimension first: no hint
    sent //= 2 if name == "tpu" else 1  # which multiplies, and moves, bf16
    with jax.set_mesh(mesh):
        f, g = (accumulated(split, steps) for split in (in_blocks, in_turn))
        found = follow(platform, f, g, structs(mesh, ARGS), "reshape", (sent, 0))
    assert len(found) == count
    for hint in found:
        assert f"x.reshape(-1, {steps}, *x.shape[1:]).swapaxes(0, 1) gives each" in hint.advice


@pytest.mark.tpu
@pytest.mark.parametrize("steps, sent, count", [(4, 24576, 1), (2, 49152, 2)])
def test_rows_that_xla_for_tpu_converts_and_splits_before_it_moves_them(
    tpu_mesh, steps, sent, count
):
    args = [((128, 64), P()), ((512, 128), P("data"))]
    with jax.set_mesh(tpu_mesh):
        f, g = (accumulated(split, steps) for split in (in_blocks, in_turn))
        found = follow(("tpu", tpu_mesh), f, g, structs(tpu_mesh, args), "reshape", (sent, 0))
    assert len(found) == count


@pytest.mark.parametrize(
    "f",
    [
        lambda w, x: accumulated(in_turn, 8)(w, x),
        lambda w, x: accumulated(in_blocks, 8, P("data"))(w, x),  # each device has its steps
        lambda w, x: lax.with_sharding_constraint(x.reshape(-1), P("data")) + w.sum(),
        lambda w, x: lax.with_sharding_constraint(x.reshape(128, 128), P("data")) + w.sum(),
        lambda w, x: lax.with_sharding_constraint(x.reshape(256, 8, 8), P(None, "data")),
        lambda w, x: lax.with_sharding_constraint(x, P(None, "data")) + w.sum(),
    ],
    ids="in_turn steps flat longer features moved".split(),
)
def test_other_reshapes(cpu_mesh, f):
    with jax.set_mesh(cpu_mesh):
        assert not [h for h in hints(jax.jit(f), structs(cpu_mesh, ARGS)) if h.kind == "reshape"]
