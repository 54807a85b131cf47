"""Activations for which XLA gives up the batch's layout, and a constraint that keeps it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from costs.test_followed import Measured, assert_equal

KIND = "whole batch"
LAYERS, D, F, WORDS = 2, 64, 256, 512
SHAPES = {"table": (WORDS, D), "w1": (LAYERS, D, F), "w2": (LAYERS, F, D)}
SPECS = {
    "table": P("model", "data"),
    "w1": P(None, "data", "model"),
    "w2": P(None, "model", "data"),
}


def step_of(mesh, constraint=None, scanned=True):
    """The gradient of a small language model, whose tokens are looked up in a sharded table."""

    def layer(x, w):
        return x + jax.nn.gelu(x @ w["w1"]) @ w["w2"]

    def loss(weights, tokens):
        x = weights["table"][tokens]
        if constraint is not None:
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, constraint))
        layers = {"w1": weights["w1"], "w2": weights["w2"]}
        if scanned:
            x = jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, layers)[0]
        else:
            for number in range(LAYERS):
                x = layer(x, {name: w[number] for name, w in layers.items()})
        logits = jax.nn.log_softmax(x @ weights["table"].T)
        return -jnp.mean(jnp.take_along_axis(logits, tokens[..., None], -1))

    kept = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    return jax.jit(jax.value_and_grad(loss), out_shardings=(None, kept))


def given(mesh, rows=64, tokens=P("data"), specs=SPECS):
    def struct(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    weights = {name: struct(shape, jnp.float32, specs[name]) for name, shape in SHAPES.items()}
    return weights, struct((rows, 8), jnp.int32, tokens)


def measured(step, args):
    return Measured(step.lower(*args).compile())


@pytest.mark.parametrize("scanned", [True, False])
def test_a_lookup_in_a_table_that_is_sharded_along_its_features(platform, scanned):
    name, mesh = platform
    if name == "tpu" and not scanned:
        return  # XLA for TPU scatters the sums within fusions: no hint
    now = measured(step_of(mesh, scanned=scanned), given(mesh))
    then = measured(step_of(mesh, P("data"), scanned), given(mesh))
    sent, trips = now.promised([KIND])
    assert sent > now.sent // 10 and trips == 0
    assert now.sent - then.sent >= sent and KIND not in then.kinds
    (first,) = (h for h in now.hints if h.kind == KIND and "with_sharding" in h.advice)
    # XLA for GPU looks tokens up in a fusion with what gathers the table, which isn't followed.
    place = "before the first layer" if name == "gpu" else "where it is looked up, at "
    assert "P('data')" in first.advice and place in first.advice
    assert name == "gpu" or "test_batches.py" in first.advice
    if name == "cpu":
        draw = np.random.default_rng(0)
        weights = {n: draw.normal(size=s).astype(np.float32) for n, s in SHAPES.items()}
        tokens = draw.integers(0, WORDS, (64, 8)).astype(np.int32)
        shardings = jax.tree.map(lambda s: s.sharding, given(mesh))
        args = jax.device_put((weights, tokens), shardings)
        assert_equal(now.compiled(*args), then.compiled(*args))


def test_a_batch_that_is_not_split_or_smaller_than_the_weights(cpu_mesh):
    """Tensor parallelism reduces activations where the batch is on all devices."""
    whole = measured(step_of(cpu_mesh), given(cpu_mesh, tokens=P()))
    assert KIND not in whole.kinds
    small = measured(step_of(cpu_mesh), given(cpu_mesh, rows=4))
    assert KIND not in small.kinds
    kept = measured(step_of(cpu_mesh, P("data")), given(cpu_mesh, rows=4))
    assert kept.sent > small.sent  # it would send more


def test_weights_that_are_sharded_over_another_axis_than_the_batch(cpu_mesh):
    specs = {"table": P(), "w1": P(None, None, "model"), "w2": P(None, "model")}
    assert KIND not in measured(step_of(cpu_mesh), given(cpu_mesh, specs=specs)).kinds
