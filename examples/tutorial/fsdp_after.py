"""An FSDP block under jit: each device holds a shard of the weights and of the batch."""

import functools

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_platforms", "cpu")  # eight CPU devices stand in for accelerators
jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
sharded, whole = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())


def gather(w):
    w = jax.lax.with_sharding_constraint(w, whole)
    return checkpoint_name(w, "gathered")


keep = jax.checkpoint_policies.save_only_these_names("gathered")


@functools.partial(jax.checkpoint, policy=keep)
def block(params, x):
    h = (x - x.mean(-1, keepdims=True)) * gather(params["scale"])
    return x + jax.nn.gelu(h @ gather(params["up"])) @ gather(params["down"])


@jax.jit
def step(params, x):
    loss, grads = jax.value_and_grad(lambda p: (block(p, x) ** 2).mean())(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    params = {
        "scale": np.ones(256, np.float32),
        "up": rng.normal(0, 0.02, (256, 1024)).astype(np.float32),
        "down": rng.normal(0, 0.02, (1024, 256)).astype(np.float32),
    }
    params = jax.device_put(params, sharded)
    x = jax.device_put(rng.normal(size=(64, 256)).astype(np.float32), sharded)
    for _ in range(3):
        params, loss = step(params, x)
    print(f"loss {loss:.6f}")
