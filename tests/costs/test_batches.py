"""Activations for which XLA gives up the batch's layout, and a constraint that keeps it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from costs.test_followed import Measured, assert_equal
from shardrules import report, testing, units
from shardrules.paths import here

KIND = "whole batch"
LAYERS, D, F, WORDS = 2, 64, 256, 512
SHAPES = {"table": (WORDS, D), "w1": (LAYERS, D, F), "w2": (LAYERS, F, D)}
SPECS = {
    "table": P("model", "data"),
    "w1": P(None, "data", "model"),
    "w2": P(None, "model", "data"),
}


def step_of(mesh, constraint=None, scanned=True, specs=SPECS):
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

    kept = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
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
    assert "P('data')" in first.advice
    # XLA for GPU may look tokens up in a fusion with what gathers the table, which isn't followed.
    is_found = "where it is looked up, at " in first.advice
    assert is_found == ("test_batches.py" in first.advice) and (is_found or name == "gpu")
    if name == "cpu":
        draw = np.random.default_rng(0)
        weights = {n: draw.normal(size=s).astype(np.float32) for n, s in SHAPES.items()}
        tokens = draw.integers(0, WORDS, (64, 8)).astype(np.int32)
        shardings = jax.tree.map(lambda s: s.sharding, given(mesh))
        args = jax.device_put((weights, tokens), shardings)
        assert_equal(now.compiled(*args), then.compiled(*args))


def test_one_constraint_is_one_thing_to_do(cpu_mesh):
    """The report joins the collectives that it removes, though each is at a line of its own."""
    now = measured(step_of(cpu_mesh), given(cpu_mesh))
    content = report.content(testing.judge(now.compiled))
    (block,) = (block for block in content.changes if block.title == "Could be cheaper")
    (one,) = (item for item in block.items if item.kind == KIND)
    said = dict(one.lines)
    assert "with_sharding_constraint" in said["to do:"] and "goes away" not in said["to do:"]
    sent, others = now.promised([KIND])[0], sum(h.kind == KIND for h in now.hints) - 1
    assert said["saves"].startswith(f"{units.size(sent)} (")
    assert said["saves"].endswith(f", together with {others} others") and said["likewise"]
    assert content.costliest == f"could be cheaper: {KIND} at {here(one.entry.place)}" + (
        f" and {len(block.items) - 1} more" if block.items[1:] else ""
    )


def test_a_batch_that_two_axes_split(cpu_mesh):
    """The constraint keeps both, though the table takes only one of them."""
    mesh = jax.sharding.Mesh(cpu_mesh.devices.reshape(2, 4), ("data", "fsdp"))
    specs = {"table": P(None, "fsdp"), "w1": P(None, "fsdp"), "w2": P(None, None, "fsdp")}
    args = given(mesh, tokens=P(("data", "fsdp")), specs=specs)
    now = measured(step_of(mesh, specs=specs), args)
    (first,) = (h for h in now.hints if h.kind == KIND and "with_sharding" in h.advice)
    assert "mesh, P(('data', 'fsdp')))) if the batch is its first dimension" in first.advice
    then = measured(step_of(mesh, P(("data", "fsdp")), specs=specs), args)
    assert now.sent - then.sent >= now.promised([KIND])[0] > 0


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


def network_of(mesh, args, loss):
    kept = jax.tree.map(lambda struct: struct.sharding, args[0])
    return measured(jax.jit(jax.value_and_grad(loss), out_shardings=(None, kept)), args)


def struct(mesh, shape, spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "data")], ids=str)
def test_gradients_of_a_classifier_are_sums_over_its_batch(cpu_mesh, spec):
    """Its images are floats that are split over the same axis, as the labels are."""

    def loss(weights, images, labels):
        hidden = jnp.tanh(images @ weights["w1"])
        logits = jax.nn.log_softmax(hidden @ weights["w2"])
        return -jnp.take_along_axis(logits, labels[:, None], -1).mean()

    weights = {"w1": struct(cpu_mesh, (512, 256), spec), "w2": struct(cpu_mesh, (256, 16), spec)}
    images = struct(cpu_mesh, (32, 512), P("data"))
    labels = struct(cpu_mesh, (32,), P("data"), jnp.int32)
    assert KIND not in network_of(cpu_mesh, (weights, images, labels), loss).kinds


def test_an_optimizer_that_multiplies_weights(cpu_mesh):
    """As Muon does, by sums over the axis that splits the weights, outside of what is derived."""
    specs = {name: P(None, "data") for name in ("w1", "w2")} | {"table": P()}

    def step(weights, tokens):
        grads = jax.grad(lambda w: step_loss(w, tokens))(weights)
        return {n: w - w @ (w.swapaxes(-1, -2) @ grads[n]) for n, w in weights.items()}

    def step_loss(weights, tokens):
        x = jax.lax.with_sharding_constraint(
            weights["table"][tokens], NamedSharding(cpu_mesh, P("data"))
        )
        for number in range(LAYERS):
            x = x + jnp.tanh(x @ weights["w1"][number]) @ weights["w2"][number]
        return (x**2).mean()

    kept = {name: NamedSharding(cpu_mesh, spec) for name, spec in specs.items()}
    found = measured(jax.jit(step, out_shardings=kept), given(cpu_mesh, specs=specs))
    assert KIND not in found.kinds


@pytest.mark.parametrize("routed", ["sorted", "by experts"])
def test_rows_that_meet_those_of_other_devices(cpu_mesh, routed):
    """What that takes in the batch's layout isn't known."""
    args = given(cpu_mesh)

    def loss(weights, tokens):
        x = weights["table"][tokens]
        x = x + jax.nn.gelu(x @ weights["w1"][0]) @ weights["w2"][0]
        if routed == "sorted":
            x = x[jnp.argsort(x[:, 0, 0])] * jnp.arange(len(x))[:, None, None]
        else:
            x = jnp.einsum("bsd,ldf->lbsf", x, weights["w1"])
            x = jnp.einsum("lbsf,lfd->lbsd", x, weights["w2"])
        return (x**2).mean()

    assert KIND not in network_of(cpu_mesh, args, loss).kinds
