"""Train one layer on eight devices: a Pallas kernel, a custom_vjp; the check is on."""

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import shardrules

shardrules.install()
jax.config.update("jax_platforms", "cpu")  # eight CPU devices stand in for accelerators
jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def square_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] ** 2


def square_bwd_kernel(x_ref, g_ref, dx_ref):
    dx_ref[...] = 2 * x_ref[...] * g_ref[...]


def call(kernel, *args):
    out = jax.ShapeDtypeStruct(args[0].shape, args[0].dtype)
    return pl.pallas_call(kernel, out, interpret=True)(*args)


@jax.custom_vjp
def square(x):
    return call(square_kernel, x)


square.defvjp(lambda x: (square(x), x), lambda x, g: (call(square_bwd_kernel, x, g),))


def layer(x):
    return jax.shard_map(square, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)


@jax.jit
def step(w, x):
    return w - 0.01 * jax.grad(lambda w: (layer(x @ w) ** 2).mean())(w)


if __name__ == "__main__":
    w, x = np.full((128, 128), 0.01, np.float32), np.ones((64, 128), np.float32)
    w = jax.device_put(w, jax.NamedSharding(mesh, P()))
    x = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
    for _ in range(3):
        w = step(w, x)
    print("w:", w[0, 0])
