"""A language model of bytes, trained on its own source, data- and tensor-parallel.

An equinox transformer in jax.shard_map, with the flash attention that JAX ships. It knows nothing
of shardrules but for --check, which is what `shardrules migrate` recommends.

    python train.py --steps=3                        on eight CPU devices
    python train.py --compile-for=tpu --hlo=tpu.hlo  for TPU v5e:2x4, on a machine that has none
"""

import argparse
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

HEADS, HEAD, WIDTH, LENGTH, BATCH = 4, 128, 256, 128, 8


def attention(q, k, v, platform):
    """Attend causally; q, k and v are [batch, heads, length, head]."""
    if platform == "tpu":
        from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

        return flash_attention(q, k, v, causal=True, sm_scale=HEAD**-0.5)
    from jax.experimental.pallas.ops.gpu import attention as gpu

    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    blocks = gpu.BlockSizes(
        block_q=64, block_k=64, block_q_dkv=32, block_kv_dkv=32, block_q_dq=32, block_kv_dq=32
    )
    out = gpu.mha(
        q,
        k,
        v,
        segment_ids=None,
        causal=True,
        sm_scale=HEAD**-0.5,
        block_sizes=blocks,
        interpret=platform == "cpu",
    )
    return jnp.swapaxes(out, 1, 2)


def each(f):
    return jax.vmap(jax.vmap(f))


class Block(eqx.Module):
    """A layer; its weights are split over the mesh axis model, heads and hidden units."""

    norms: list
    qkv: jax.Array
    out: jax.Array
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.norms = [eqx.nn.LayerNorm(WIDTH) for _ in range(2)]
        self.qkv = jax.random.normal(keys[0], (3, HEADS, WIDTH, HEAD)) * WIDTH**-0.5
        self.out = jax.random.normal(keys[1], (HEADS, HEAD, WIDTH)) * (HEADS * HEAD) ** -0.5
        self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=keys[2])
        self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, use_bias=False, key=keys[3])

    def __call__(self, x, platform):
        y = each(self.norms[0])(x)
        q, k, v = jnp.einsum("blw,thwd->tbhld", y, self.qkv)
        y = attention(q, k, v, platform)
        x = x + jax.lax.psum(jnp.einsum("bhld,hdw->blw", y, self.out), "model")
        y = each(self.norms[1])(x)
        return x + jax.lax.psum(each(self.down)(jax.nn.gelu(each(self.up)(y))), "model")


class Model(eqx.Module):
    embedding: jax.Array
    blocks: list
    head: eqx.nn.Linear

    def __init__(self, key, layer_count):
        keys = jax.random.split(key, layer_count + 2)
        self.embedding = jax.random.normal(keys[0], (256, WIDTH)) * 0.02
        self.blocks = [Block(key) for key in keys[2:]]
        self.head = eqx.nn.Linear(WIDTH, 256, key=keys[1])

    def __call__(self, text, platform):
        x = self.embedding[text]
        for block in self.blocks:
            x = block(x, platform)
        return each(self.head)(x)


def specs(model):
    """Say how each array is split over the mesh: by default not at all."""

    def split(b):
        return b.qkv, b.out, b.up.weight, b.up.bias, b.down.weight

    over = (P(None, "model"), P("model"), P("model"), P("model"), P(None, "model"))
    found = jax.tree.map(lambda _: P(), model)
    for n in range(len(model.blocks)):
        found = eqx.tree_at(lambda m, n=n: split(m.blocks[n]), found, over)
    return found


def make_step(static, spec, mesh, platform, check_vma):
    """Return one step of gradient descent with momentum."""

    def loss(arrays, text):
        model = eqx.combine(arrays, static)
        logits = model(text[:, :-1], platform)
        wanted = jax.nn.one_hot(text[:, 1:], 256)
        own = -(wanted * jax.nn.log_softmax(logits)).sum(-1).mean()
        return jax.lax.pmean(own, "data")

    sharded = jax.shard_map(
        loss, mesh=mesh, in_specs=(spec, P("data")), out_specs=P(), check_vma=check_vma
    )

    def step(arrays, momentum, text):
        value, gradient = jax.value_and_grad(sharded)(arrays, text)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
        arrays = jax.tree.map(lambda a, m: a - 0.01 * m, arrays, momentum)
        return arrays, momentum, value

    return jax.jit(step, donate_argnums=(0, 1))


def devices_of(compile_for):
    if compile_for == "here":
        return jax.devices()[0].platform, jax.devices()
    from shardrules import aot

    return compile_for, aot.tpu("v5e:2x4") if compile_for == "tpu" else aot.gpu("h100", 8)


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("--steps", type=int, default=3)
    flags.add_argument("--layers", type=int, default=2)
    flags.add_argument("--compile-for", choices=("here", "tpu", "gpu"), default="here")
    flags.add_argument("--hlo", help="write what the step compiles to, and train nothing")
    flags.add_argument("--check", action="store_true", help="keep shard_map's check on")
    flags = flags.parse_args()
    if flags.check:
        import shardrules

        shardrules.install()

    platform, devices = devices_of(flags.compile_for)
    mesh = Mesh(np.array(devices).reshape(4, 2), ("data", "model"))
    model = Model(jax.random.key(0), flags.layers)
    arrays, static = eqx.partition(model, eqx.is_array)
    spec = specs(arrays)
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), spec)
    step = make_step(static, spec, mesh, platform, check_vma=flags.check)
    batch = NamedSharding(mesh, P("data"))

    if flags.hlo:
        shapes = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), arrays, shardings
        )
        text = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32, sharding=batch)
        compiled = step.lower(shapes, shapes, text).compile()
        pathlib.Path(flags.hlo).write_text(compiled.as_text())
        return

    arrays = jax.device_put(arrays, shardings)
    momentum = jax.tree.map(jnp.zeros_like, arrays)
    corpus = np.frombuffer(pathlib.Path(__file__).read_bytes(), np.uint8).astype(np.int32)
    starts = np.random.default_rng(0)
    for number in range(flags.steps):
        at = starts.integers(0, len(corpus) - LENGTH - 1, BATCH)
        text = jax.device_put(np.stack([corpus[a : a + LENGTH + 1] for a in at]), batch)
        arrays, momentum, value = step(arrays, momentum, text)
        print(f"step {number}: loss {value:.3f}")


if __name__ == "__main__":
    main()
