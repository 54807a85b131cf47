"""Microbatches by x.reshape(steps, -1, ...) with fewer steps than devices: activations move."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from costs.test_followed import Measured, assert_equal

pytestmark = pytest.mark.one_lane

KIND = "reshape"
WIDTH, WIDE, BATCH, LENGTH, LAYERS = 64, 256, 64, 16, 2
SIZES = {"up": (WIDTH, WIDE), "down": (WIDE, WIDTH), "q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH)}


def dense(w, h):
    return h + jax.nn.gelu(h @ w["up"]) @ w["down"]


def attention(w, h):
    scores = jnp.einsum("bsd,btd->bst", h @ w["q"], h @ w["k"])
    return h + jax.nn.softmax(scores) @ dense(w, h)


BLOCKS = {"dense": (dense, ("up", "down")), "attention": (attention, ("q", "k", "up", "down"))}


def behind(x, steps):
    """As the advice says."""
    return x.reshape(-1, steps, *x.shape[1:]).swapaxes(0, 1)


def first(x, steps):
    return x.reshape(steps, -1, *x.shape[1:])


def make_step(block, steps, cut, tail=lambda h: h):
    def loss(w, x, y):
        h = lax.scan(jax.checkpoint(lambda h, w: (block(w, h), None)), x, w)[0]
        scores = jax.nn.log_softmax(tail(h))
        return -jnp.take_along_axis(scores, y[..., None], -1).mean()

    def step(w, x, y):
        def micro(carry, batch):
            value, g = jax.value_and_grad(loss)(w, *batch)
            return (jax.tree.map(jnp.add, carry[0], g), carry[1] + value), None

        start = jax.tree.map(jnp.zeros_like, w), 0.0
        (g, value), _ = lax.scan(micro, start, (cut(x, steps), cut(y, steps)))
        return jax.tree.map(lambda w, g: w - 0.1 * g / steps, w, g), value / steps

    return step


def measured(mesh, name, steps, cut, spec=P(), **kwargs):
    block, names = BLOCKS[name]

    def array(spec, *shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    w = {n: array(P(None, *spec), LAYERS, *SIZES[n]) for n in names}
    x = array(P("data"), BATCH, LENGTH, WIDTH)
    y = array(P("data"), BATCH, LENGTH, dtype=jnp.int32)
    step = make_step(block, steps, cut, **kwargs)
    return Measured(jax.jit(step).lower(w, x, y).compile()), (w, x, y)


def line(devices):
    return Mesh(np.array(devices).reshape(8), ("data",))


CASES = {
    "FSDP": ("dense", 4, P("data")),
    "FSDP by columns": ("dense", 4, P(None, "data")),
    "FSDP, two steps": ("dense", 2, P("data")),
    "attention": ("attention", 4, P("data")),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_of_each_step_on_each_device(cpu_mesh, case):
    name, steps, spec = CASES[case]
    mesh = line(cpu_mesh.devices)
    now, args = measured(mesh, name, steps, first, spec)
    then, _ = measured(mesh, name, steps, behind, spec)
    sent, trips = now.promised([KIND])
    assert now.sent - then.sent >= sent > 0.15 * now.sent
    assert now.trips - then.trips >= trips > 0
    assert KIND not in then.kinds
    (advice,) = (h.advice for h in now.hints if h.kind == KIND and "goes away" not in h.advice)
    assert "x.reshape(-1, steps, *x.shape[1:]).swapaxes(0, 1)" in advice
    random = np.random.default_rng(0)
    values = [
        random.integers(0, WIDTH, a.shape).astype(np.int32)
        if a.dtype == jnp.int32
        else 0.1 * random.normal(size=a.shape).astype(np.float32)
        for a in jax.tree.leaves(args)
    ]
    values = [jax.device_put(v, a.sharding) for v, a in zip(values, jax.tree.leaves(args))]
    values = jax.tree.unflatten(jax.tree.structure(args), values)
    for one, other in zip(*map(jax.tree.leaves, (now.compiled(*values), then.compiled(*values)))):
        assert_equal(one, other)


NEAR = {
    "a small model": ("dense", 4, P(), first),  # gradients over all devices would be more
    "as many steps as devices": ("dense", 8, P("data"), first),
    "as it should be": ("dense", 4, P("data"), behind),
}


@pytest.mark.parametrize("case", NEAR)
def test_nothing_is_said_that_would_not_save(cpu_mesh, case):
    name, steps, spec, cut = NEAR[case]
    now, _ = measured(line(cpu_mesh.devices), name, steps, cut, spec)
    then, _ = measured(line(cpu_mesh.devices), name, steps, behind, spec)
    assert KIND not in now.kinds or now.sent - then.sent >= now.promised([KIND])[0]
    if case != "as many steps as devices":
        assert KIND not in now.kinds


def test_weights_over_another_axis(cpu_mesh):
    """Tensor parallelism beside it: the groups of parts are of one axis of two."""
    now, _ = measured(cpu_mesh, "dense", 2, first, P(None, "model"))
    then, _ = measured(cpu_mesh, "dense", 2, behind, P(None, "model"))
    sent = now.promised([KIND])[0] if KIND in now.kinds else 0
    assert now.sent - then.sent >= sent


def test_what_is_promised_by_other_compilers(platform):
    name, steps, spec = CASES["FSDP"]
    mesh = line(platform[1].devices)
    now, _ = measured(mesh, name, steps, first, spec)
    then, _ = measured(mesh, name, steps, behind, spec)
    sent = now.promised([KIND])[0] if KIND in now.kinds else 0
    assert now.sent - then.sent >= sent
    assert sent or platform[0] == "tpu"  # there the slice of a step is behind a fusion
