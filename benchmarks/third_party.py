"""Compile other libraries' kernels under the check without a line, and print a table of them.

    python benchmarks/third_party.py        in an environment that has the libraries

Each call stands in a shard_map with the check on, its first array varying over the mesh and the
others replicated (all varying, where the call is given the mesh axis), and is compiled for machines
that are not here: TPU v5e (v5p and 7x, where a kernel runs on SparseCores), H100 and B200. A row is
a kernel of such a program: whether it needs no line, being proven to depend on its operands alone,
if it is well formed (or declared by a rule that is shipped); or what is in the way. Where a library
has several implementations of an op, each is called by itself, with the arguments that the library
ships for its own benchmarks. What is not installed is left out.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import pathlib
import pkgutil
import subprocess
import sys
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from absl import app, flags  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import shardrules  # noqa: E402
from shardrules import aot  # noqa: E402

_MOST_TRIED = 6  # of an op's arguments, where those before don't trace
GPUS = {"h100": ("NVIDIA H100 80GB HBM3", "9.0", 132), "b200": ("NVIDIA B200", "10.0", 148)}
TARGETS = ("v5e:2x4", "v5p:2x2x2", "tpu7x:2x2x1", "h100", "b200")

_TARGET = flags.DEFINE_string("target", None, "compile for this target only, in this process")
_ONLY = flags.DEFINE_string("only", "", "calls whose name contains this")


def shape(*sizes, dtype=jnp.bfloat16):
    """Stand in for an array."""
    return jax.ShapeDtypeStruct(sizes, dtype)


class Gpu(NamedTuple):
    """What a library asks of a device."""

    platform: str
    device_kind: str
    compute_capability: str
    core_count: int


# --- the libraries' calls: (name, function, arguments, whether it has a gradient) --------------


def tokamax_calls(target):
    """Yield each implementation of each of tokamax's ops that is for this target."""
    import tokamax._src.ops as ops
    from jax.extend import backend
    from tokamax._src import numerics
    from tokamax._src.ops.op import Op

    on_tpu = target not in GPUS
    wanted = ("mosaic_tpu", "mosaic_tpu_v2") if on_tpu else ("mosaic_gpu", "triton")
    (device,) = jax.devices()
    backend.get_default_device = lambda: device  # whom it asks what its kernels may use
    ranged = numerics.RangedArrayInitializer.__init__

    def initialize(self, shape, dtype, minval=None, maxval=None, **given):
        """Take the bounds by the names that 0.0.17's arguments of KDA give them, too."""
        ranged(self, shape, dtype, given.get("min", minval), given.get("max", maxval))

    numerics.RangedArrayInitializer.__init__ = initialize
    for found in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}.", onerror=lambda name: None):
        module = found.name.rpartition(".")[2]
        if not module.endswith(wanted):
            continue
        try:
            implementation = importlib.import_module(found.name)
            arguments = importlib.import_module(found.name.rpartition(".")[0] + ".arg_specs")
        except Exception as error:  # it needs what is not installed, or another version of it
            yield found.name.removeprefix(f"{ops.__name__}."), error, (), False
            continue
        # A module of several ops has a list for each; what doesn't fit an op fails at once.
        lists = [specs for kind, specs in vars(arguments).items() if kind.endswith("ARG_SPECS")]
        specs = [spec.args for row in zip(*lists) for spec in row]
        for name, cls in list(vars(implementation).items()):
            if not (isinstance(cls, type) and issubclass(cls, Op)):
                continue
            if cls.__module__ != implementation.__name__ or name.endswith("Vjp"):
                continue
            cls.supported_on = lambda self, device: True
            yield name, cls, specs, True


def tokamax_ring_calls(target):
    """Yield tokamax's ring attention, which is none of its ops: a splash kernel in each step."""
    if target != "v5e:2x4":
        return
    from tokamax._src.ops.experimental.tpu.splash_attention import (
        ring_attention_kernel,
        splash_attention_mask,
    )

    def ring_attention(q, k, v, axis):
        count = jax.lax.axis_size(axis)
        length = q.shape[1] * count
        kernel = ring_attention_kernel.make_ring_attention(
            splash_attention_mask.NumpyMask(np.tril(np.ones((length, length), bool))),
            is_mqa=False,
            ring_axis=axis,
            q_seq_shards=count,
            kv_seq_shards=count,
        )

        def own(path, x):  # a device's part, as by the library's manual_sharding_spec
            if jax.tree_util.keystr(path).endswith("partial_mask_blocks"):
                return x
            size = x.shape[0] // count
            return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis) * size, size)

        return jax.tree_util.tree_map_with_path(own, kernel)(q, k, v)

    x = shape(2, 1024, 128)
    yield "ring_attention", ring_attention, [dict(enumerate((x, x, x, "data")))], True


def recurrentgemma_calls(target):
    """Yield recurrentgemma's linear recurrence: real, complex (in parts), reversed, from a state.

    Its kernels are for TPU; on GPU it takes XLA's own scans.
    """
    if target != "v5e:2x4":
        return
    from recurrentgemma import common
    from recurrentgemma.jax import complex_lib, scan

    kind = common.ScanType.LINEAR_PALLAS

    def of_parts(re, im, a):
        return scan.linear_scan(
            complex_lib.Complex(re, im), complex_lib.Complex(a, a), scan_type=kind
        )

    def from_state(x, a, h0):
        return scan.linear_scan(x, a, h0, reverse=True, scan_type=kind)

    x = shape(2, 256, 512, dtype=jnp.float32)
    h0 = shape(2, 512, dtype=jnp.float32)
    calls = {
        "linear_scan": (lambda x, a: scan.linear_scan(x, a, scan_type=kind), x, x),
        "linear_scan of parts": (of_parts, x, x, x),
        "linear_scan from a state": (from_state, x, x, h0),
    }
    for name, (f, *arguments) in calls.items():
        yield name, f, [dict(enumerate(arguments))], True


def ejkernel_calls(target):
    """Yield ejkernel's Pallas kernels, those that communicate among them."""
    if target not in ("v5e:2x4", "h100"):
        return
    platform = "gpu" if target in GPUS else "tpu"
    integers = functools.partial(shape, dtype=jnp.int32)
    x, sizes, expert = shape(1024, 512), integers(4), shape(4, 512, 512)
    q, by_head, beta = shape(1, 1024, 8, 128), shape(1, 8, 1024, 128), shape(1, 1024, 8)
    logits = shape(1024, 2048, dtype=jnp.float32)
    cache = shape(8, 1024, 8, 128)
    tokens, packed = shape(64, 8, 128), shape(64, 4, 128)
    latent, mla = shape(1, 1024, 512), shape(512, 8, 128)
    ragged = (integers(8), integers(64), integers(9), integers(3))
    single = shape(64, 8)
    wide = shape(1024, 512, dtype=jnp.float32)
    paged_latent = (
        shape(64, 16, 512),
        shape(64, 16, 64),
        shape(64, 512),
        shape(64, 64),
        shape(64, 8, 2, 640),
        *ragged,
    )
    pages = (shape(8, 8, 128), shape(8, 64, 16, 128), shape(8, 64, 16, 128))
    calls = {
        "tpu": {
            "flash_attention": (q, q, q),
            "blocksparse_attention": (by_head, by_head, by_head),
            "ring_attention": (q, q, q, *(None,) * 9, False, None, None, "data"),
            "grouped_matmul": (x, expert, sizes),
            "grouped_matmulv2": (x, expert, sizes),
            "grouped_matmulv3": (x, expert, sizes),
            "fused_cross_entropy": (logits, integers(1024)),
            "fused_kl_divergence": (logits, logits),
            "gated_delta_rule": (q, q, q, beta, beta),
            "ragged_decode_attention": (shape(8, 8, 128), cache, cache, integers(8), integers(8)),
            "page_attention": (*pages, integers(8), integers(8, 8)),
            "prefill_page_attention": (
                shape(64, 8, 128),
                shape(8, 64, 16, 128),
                shape(8, 64, 16, 128),
                integers(1),
                integers(8),
            ),
            "ragged_page_attention_v2": (
                tokens,
                shape(64, 16, 8, 128),
                integers(8),
                integers(8, 8),
                integers(9),
                integers(),
            ),
            "ragged_page_attention_v3": (tokens, packed, packed, shape(64, 16, 4, 2, 128), *ragged),
            "flash_mla": (q, latent, mla, mla),
            "ragged_gated_delta_rule": (
                *(tokens,) * 3,
                *(single,) * 2,
                shape(64, 8, 128, 128, dtype=jnp.float32),
                integers(65),
                integers(64),
            ),
            "quantized_matmul": (
                x,
                shape(512, 64, dtype=jnp.uint32),
                shape(512, 8),
                shape(512, 8),
                False,
                64,
                4,
            ),
            "multi_latent_ragged_page_attention": paged_latent,
            "multi_latent_ragged_page_attention_v2": paged_latent,
            # The last is the axis' size, which they else take from the process' own devices.
            "all_gather_matmul": (shape(128, 512), shape(512, 256), "data", False, None, None, 8),
            "reduce_scatter_matmul": (wide, wide, "data", 64, 128, 128, 8),
        },
        "gpu": {
            "scaled_dot_product_attention": (q, q, q),
            "ragged_decode_attention": (shape(8, 8, 128), cache, cache, integers(8), integers(8)),
        },
    }
    for name, arguments in calls[platform].items():
        module = importlib.import_module(f"ejkernel.kernels._pallas.{platform}.{name}._interface")
        given = [dict(enumerate(arguments))]
        yield name, getattr(module, name), given, "page" not in name and "ragged" not in name
    if platform == "tpu":  # deepseek_attn itself asks a tracer how many keys to keep, under any jit
        implementation = importlib.import_module(
            "ejkernel.kernels._pallas.tpu.deepseek_attn._pallas_impl_fwd"
        )
        projection, mask = shape(8, 512, 128), shape(1, 1024, 1024, dtype=jnp.float32)
        given = (by_head, latent, projection, projection, None, None, mask)
        options = (implementation.ROPE_NONE, True, 0.1, 1, 128, 128)
        whole = [dict(enumerate((*given, *options)))]
        yield "deepseek_attn's kernel", implementation.deepseek_attn_pallas_impl, whole, True


CALLS = {
    "tokamax": (tokamax_calls, tokamax_ring_calls),
    "ejkernel": (ejkernel_calls,),
    "recurrentgemma": (recurrentgemma_calls,),
}


# --- one call ----------------------------------------------------------------------------------


def program(mesh, f, arguments, gradient):
    """Return a jitted function of the arrays in some keyword arguments, and stand-ins for them."""
    leaves, tree = jax.tree.flatten(arguments)
    at = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape")]
    # What is given the mesh axis communicates over it.
    names = [leaf for leaf in leaves if isinstance(leaf, str)]
    varying = at if "data" in names else at[:1]
    if hasattr(f, "supported_on"):  # one of tokamax's ops
        f = f()

    def local(*arrays):
        filled = list(leaves)
        for i, array in zip(at, arrays):
            filled[i] = array[0] if i in varying else array
        given = jax.tree.unflatten(tree, filled)
        out = f(**given) if hasattr(f, "supported_on") else f(*given.values())
        arrays = [x for x in jax.tree.leaves(out) if hasattr(x, "dtype")]
        return [x[None] for x in arrays]

    specs = tuple(P("data") if i in varying else P() for i in at)
    placed = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("data"))
    arrays = [
        jax.ShapeDtypeStruct(
            (mesh.size, *leaves[i].shape) if i in varying else leaves[i].shape,
            leaves[i].dtype,
            sharding=jax.NamedSharding(mesh, spec),
        )
        for i, spec in zip(at, specs)
    ]
    if not gradient:
        return jax.jit(placed), arrays
    floats = tuple(i for i, a in enumerate(arrays) if jnp.issubdtype(a.dtype, jnp.floating))

    def loss(*args):
        return sum(x.astype(jnp.float32).sum() for x in placed(*args) if x.dtype.kind in "fV")

    return jax.jit(jax.grad(loss, argnums=floats)), arrays


def first_line(error):
    """Return what an exception says, on one line of a table."""
    text = " ".join(str(error).split()).replace("|", "/").replace("`", "'")
    return f"{type(error).__name__}: {text[:150]}"


def compiled(mesh, f, candidates, gradient):
    """Compile a call with the first arguments that compile, or that trace at least.

    Returns:
      (from each kernel's name to what is said of it, whether it compiles and if not why)
    """
    failure = found = None
    for arguments in candidates[:_MOST_TRIED]:
        needed: dict[str, tuple] = {}  # kernels that need a line: why, and the rule
        while True:
            try:
                with (
                    shardrules.install(),
                    shardrules.rules({kernel: rule for kernel, (_, rule) in needed.items()}),
                ):
                    jax.clear_caches()
                    run, arrays = program(mesh, f, arguments, gradient)
                    traced = run.trace(*arrays)
                    kernels = {
                        call.kernel: needed[call.kernel][0]
                        if call.kernel in needed
                        else known(call)
                        for call in shardrules.explain(run, *arrays).calls
                    }
                    try:
                        traced.lower().compile()
                        return kernels, "yes"
                    except Exception as error:  # JAX's or the compiler's own; of this size, say
                        found = found or (kernels, first_line(error))
                        break
            except shardrules.errors.UnknownKernelError as error:
                if error.kernel in needed:
                    failure = failure or error
                    break
                needed[error.kernel] = line_for(error.audit)
            except Exception as error:  # of those arguments, or of this device
                failure = failure or error
                break
    return found or ({}, f"not traced: {first_line(failure)}")


def line_for(audit):
    """Say why a kernel needs a line, and return the rule of such a line."""
    blockers = () if audit is None else audit.blockers
    reasons = "; ".join(dict.fromkeys(f"{b.primitive}: {b.reason}" for b in blockers))
    if audit is not None and audit.contradicts_no_communication:
        return f"communicates: {reasons}", shardrules.per_device("data")
    return f"a line: {reasons}", shardrules.no_communication


def known(call):
    """Say what a call without a line of its own stands on."""
    return "proven" if call.status == "audited" else f"{call.status}: {call.declared_at}"


def one_target(target):
    """Print the rows of one target."""
    devices = aot.gpu(target, 8) if target in GPUS else aot.tpu(target)
    mesh = jax.sharding.Mesh(np.array(devices).reshape(-1), ("data",))
    # Libraries ask the first device what their kernels may use; GPUs that are not here don't say
    # how many multiprocessors they have.
    first = Gpu("gpu", *GPUS[target]) if target in GPUS else devices[0]
    jax.devices = lambda *args: [first]
    for library, makers in CALLS.items():
        try:
            version = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
        for call, f, candidates, has_gradient in (one for make in makers for one in make(target)):
            if _ONLY.value not in call:
                continue
            if isinstance(f, Exception):  # what its module raises
                print(
                    f"| {library} {version} | {call} | {target} | | | {first_line(f)} |", flush=True
                )
                continue
            for gradient in (False, True)[: 1 + has_gradient] if candidates else ():
                kernels, done = compiled(mesh, f, candidates, gradient)
                if not kernels and done == "yes":  # XLA's operations alone
                    continue
                name = call + ", gradient" * gradient
                for what in dict.fromkeys(kernels.values()) or [""]:
                    names = ", ".join(f"`{k}`" for k, v in kernels.items() if v == what)
                    row = (f"{library} {version}", name, target, names, what, done)
                    print(f"| {' | '.join(row)} |", flush=True)


def main(argv):
    """Print the table."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if _TARGET.value is not None:
        one_target(_TARGET.value)
        return
    import paired  # not of the tests, which load this module

    paired.print_stamp()
    print("\n| library | call | compiled for | kernel | without a line | compiles |")
    print("|---|---|---|---|---|---|", flush=True)
    for target in TARGETS:  # Mosaic GPU compiles for one architecture in a process
        subprocess.run([sys.executable, __file__, f"--target={target}", f"--only={_ONLY.value}"])


if __name__ == "__main__":
    app.run(main)
