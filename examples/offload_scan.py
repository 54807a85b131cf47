"""xla#17541 and jax#23869: a scan over layers with remat, and residuals that should be offloaded.

    python examples/offload_scan.py

The report's model, without its module library. The block's activation is named "hidden", its
output "residual", and a policy offloads one of them to the host. Offloading "hidden" works.
Offloading "residual" does nothing and says nothing, because the backward pass of a block reads
the block's *input*. Naming the input offloads it. Everything is compiled for a TPU and an H100
(neither is needed), and the gradients are compared on CPU.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardrules import aot, report, testing
from shardrules.errors import AotError, CostAssertionError

LAYERS, BATCH, LENGTH, WIDTH = 8, 16, 2048, 1024  # the batch is sharded over eight devices
VARIANTS = {  # what is named "residual", and what is offloaded
    "nothing": ("output", []),
    "hidden": ("output", ["hidden"]),
    "the block's output": ("output", ["residual"]),
    "the block's input": ("input", ["residual"]),
}


def model(named, offloaded):
    """Return the gradient of the report's model."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=offloaded,
        offload_src="device",
        offload_dst="pinned_host",
    )

    def block(x, weights):
        up, down = weights
        if named == "input":
            x = checkpoint_name(x, "residual")
        h = checkpoint_name(x @ up, "hidden")
        x = x + jax.nn.relu(h) @ down
        if named == "output":
            x = checkpoint_name(x, "residual")
        return x, None

    def loss(weights, x):
        x, _ = jax.lax.scan(jax.checkpoint(block, policy=policy, prevent_cse=False), x, weights)
        return (x**2).mean()

    return jax.jit(jax.value_and_grad(loss))


def shapes(devices, layers=LAYERS, batch=BATCH, length=LENGTH, width=WIDTH):
    mesh = Mesh(np.array(devices), ("data",))

    def make(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    matrices = make((layers, width, width), P())
    return (matrices, matrices), make((batch, length, width), P("data"))


def gradients_are_equal():
    """Compare each variant's gradients with those without offloading, small and on CPU."""
    args = jax.tree_util.tree_map(
        lambda s: jax.random.normal(jax.random.key(0), s.shape) / 8,
        shapes(jax.devices("cpu")[:1], 3, 2, 8, 16),
    )
    expected = model(*VARIANTS["nothing"])(*args)
    for variant in VARIANTS.values():
        jax.tree_util.tree_map(np.testing.assert_array_equal, model(*variant)(*args), expected)


def main():
    rows = [["target", "offloaded", "host MB", "device MB", "says assert_offloaded"]]
    messages = []
    for target, devices in (
        ("TPU v5e", lambda: aot.tpu("v5e:2x4")),
        ("H100", lambda: aot.gpu("h100", 8)),
    ):
        try:
            args = shapes(devices())
        except AotError as error:
            print(f"{target}: {error}")
            continue
        for name, variant in VARIANTS.items():
            program = model(*variant)
            try:
                told = testing.assert_offloaded(
                    program, *args, names=variant[1], min_bytes=1 if variant[1] else 0
                )
                said = "passes" if variant[1] else "(nothing asked)"
            except CostAssertionError as error:
                told, said = error.offloading, "fails"
                messages.append(str(error))
            mega = [f"{b / 2**20:.0f}" for b in (told.host_temp_bytes, told.device_temp_bytes)]
            rows.append([target, name, *mega, said])
    print(report.table(rows))
    print(
        "\nWhat it says of the block's output:\n", *[m for m in messages if "'residual'" in m][:1]
    )
    gradients_are_equal()
    print("\nThe gradients of all variants are equal.")


if __name__ == "__main__":
    main()
