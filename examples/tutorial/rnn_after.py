"""An RNN in a shard_map: the batch is sharded, the weights are replicated, the check is on."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import shardrules

jax.config.update("jax_platforms", "cpu")  # eight CPU devices stand in for accelerators
jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def rnn(params, xs):
    """Return the mean loss of a batch of sequences, xs of [time, batch, features]."""

    def cell(h, x):
        h = jnp.tanh(x @ params["in"] + h @ params["again"] + params["bias"])
        return h, (h @ params["out"]).mean()

    params = shardrules.vary(params, "data")
    h = jnp.zeros_like(xs[0])
    _, losses = jax.lax.scan(cell, h, xs)
    return jax.lax.pmean(losses.mean() ** 2, "data")


loss = jax.shard_map(rnn, mesh=mesh, in_specs=(P(), P(None, "data")), out_specs=P())


@jax.jit
def step(params, xs):
    value, grads = jax.value_and_grad(loss)(params, xs)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    shapes = {"in": (64, 64), "again": (64, 64), "bias": (64,), "out": (64, 1)}
    params = {k: rng.normal(0, 0.1, s).astype(np.float32) for k, s in shapes.items()}
    params = jax.device_put(params, jax.NamedSharding(mesh, P()))
    xs = rng.normal(size=(16, 32, 64)).astype(np.float32)
    xs = jax.device_put(xs, jax.NamedSharding(mesh, P(None, "data")))
    for _ in range(3):
        params, value = step(params, xs)
    print(f"loss {value:.6f}")
