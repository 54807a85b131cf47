import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules import testing

jax.config.update("jax_platforms", "cpu")  # eight CPU devices stand in for accelerators
jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def square_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] ** 2


@jax.custom_vjp
def square(x):
    return pl.pallas_call(square_kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


square.defvjp(lambda x: (square(x), x), lambda x, g: (2 * x * g,))

x = np.ones((8, 128), np.float32)
with shardrules.install():  # or shardrules.install(), once, where an application starts
    for check_vma in (False, True):
        specs = dict(in_specs=P("data"), out_specs=P("data"), check_vma=check_vma)
        layer = jax.shard_map(square, mesh=mesh, **specs)
        gradient = jax.jit(jax.grad(lambda x: layer(x).sum()))
        print(f"check_vma={check_vma}:", testing.account(gradient, x))
