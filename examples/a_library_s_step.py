"""Hold a training step of flax or equinox, with optax, to what it should cost.

    pip install flax equinox optax
    python examples/a_library_s_step.py

The steps are written as these libraries' own documentation writes them. The assertions tell
whether the state's memory is reused, whether the step talks to the host, what its loop over
layers costs on an H100 (no GPU is needed), and which arrays it closes over.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardrules import aot, report, testing
from shardrules.errors import CostAssertionError, ShardrulesError

LAYERS, BATCH, WIDTH = 4, 32, 64
OPTIMISER = optax.adamw(1e-3)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(WIDTH)(x))), None


class FlaxModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
        )
        return layers()(x, None)[0]


def flax_step():
    """Return flax's step, and a state and a batch."""
    model = FlaxModel()

    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda p: (model.apply(p, batch) ** 2).mean())(params)
        updates, opt_state = OPTIMISER.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    batch = jnp.ones((BATCH, WIDTH))
    params = model.init(jax.random.PRNGKey(0), batch)
    return step, (params, OPTIMISER.init(params)), batch


def equinox_step():
    """Return equinox's step over stacked layers, and a state and a batch."""
    keys = jax.random.split(jax.random.PRNGKey(0), LAYERS)
    layers = eqx.filter_vmap(lambda key: eqx.nn.MLP(WIDTH, WIDTH, WIDTH, 1, key=key))(keys)
    arrays, static = eqx.partition(layers, eqx.is_array)

    def loss_of(arrays, batch):
        def layer(x, one):
            return x + jax.vmap(eqx.combine(one, static))(x), None

        return (jax.lax.scan(layer, batch, arrays)[0] ** 2).mean()

    def step(state, batch):
        arrays, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(arrays, batch)
        updates, opt_state = OPTIMISER.update(grads, opt_state, arrays)
        return (eqx.apply_updates(arrays, updates), opt_state), loss

    return step, (arrays, OPTIMISER.init(arrays)), jnp.ones((BATCH, WIDTH))


def said(assertion, *args):
    """Return the first line of an assertion's message."""
    try:
        assertion(*args)
    except CostAssertionError as error:
        return str(error).splitlines()[0]
    return "passes"


def on(devices, tree):
    sharding = NamedSharding(Mesh(np.array(devices), ("data",)), P())
    return jax.tree_util.tree_map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )


def main():
    rows = [["", "flax and optax", "equinox and optax"]]
    columns = []
    for make in (flax_step, equinox_step):
        step, state, batch = make()
        jitted = jax.jit(step, donate_argnums=0)
        leaves = testing.assert_donated(jitted, state, batch, paths=["state"])
        reused = [leaf for leaf in leaves if leaf.status == "aliased"]
        donated = f"{len(reused)} leaves, {sum(leaf.bytes for leaf in reused)} B reused"
        forgotten = said(testing.assert_donated, jax.jit(step, donate_argnums=1), state, batch)
        quiet = said(testing.assert_no_host_transfers, jitted, state, batch)
        small = said(testing.assert_no_large_constants, jitted, state, batch)
        try:
            devices = aot.gpu("h100", 1)
            loops = testing.assert_loop(jitted, *on(devices, (state, batch)), trip_count=LAYERS)
            loops = "; ".join(f"{one.trip_count} trips of {one.launches} launches" for one in loops)
        except ShardrulesError as error:
            loops = str(error).splitlines()[0]
        before = jax.tree_util.tree_leaves(state)
        state, _ = jitted(state, batch)
        assert sum(array.is_deleted() for array in before) == len(reused)
        try:
            with testing.steady_state() as steady:
                for _ in range(3):
                    state, _ = jitted(state, batch)
                    steady.tick()
            runs = "passes"
        except CostAssertionError as error:
            runs = str(error).splitlines()[0]
        columns.append([donated, forgotten, quiet, small, loops, runs])
    names = (
        "its state donated",
        "its batch donated instead",
        "talk with the host",
        "large constants",
        "scans over layers, on an H100",
        "three steps in steady_state",
    )
    rows += [list(row) for row in zip(names, *columns)]
    print(report.table(rows))


if __name__ == "__main__":
    main()
