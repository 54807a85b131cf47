import functools

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules import testing


@shardrules.permute("data")  # it sends to its neighbour along the mesh axis data
def shift_kernel(x_ref, o_ref, sent, received, *, by):
    to = (jax.lax.axis_index("data") + by) % 4, jax.lax.axis_index("model")
    copy = pltpu.make_async_remote_copy(x_ref, o_ref, sent, received, to)
    copy.start()
    copy.wait()


def shift(x, by):
    return pl.pallas_call(
        functools.partial(shift_kernel, by=by),
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.SemaphoreType.DMA] * 2,
        interpret=pltpu.InterpretParams(),
    )(x)


right = jax.custom_vjp(lambda x: shift(x, 1))
right.defvjp(lambda x: (shift(x, 1), None), lambda _, g: (shift(g, 3),))

shardrules.install()
jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")).reshape(4, 2), ("data", "model"))
x = np.ones((8, 128), np.float32)
for check_vma in (False, True):
    f = jax.shard_map(
        right, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=check_vma
    )
    gradient = jax.jit(jax.grad(lambda x: (f(x) ** 2).sum()))
    print(f"check_vma={check_vma}:", testing.account(gradient, x))
