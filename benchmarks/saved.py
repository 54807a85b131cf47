"""What a defensive psum takes: the backward pass of jax#21855's block, run on eight CPU devices.

    python benchmarks/saved.py [--megabytes=1,16,64,256] [--rounds=15]

A memory-bound FFI kernel (stream.cc, compiled here by the C++ compiler) in its custom_vjp, x
sharded over data and replicated over model. Each arm runs just the backward pass, from the same
cotangent; the arms take turns. `broadcast outside` and `custom_vjp outside` are the two workarounds
that the issue's thread offers. Ratios are to the backward pass with annotations written by hand.
What the compiled programs consist of stands below: two that are one program take one time.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pathlib
import re
import subprocess
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

import jax
import numpy as np
import paired
from absl import app, flags
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules import testing

_MEGABYTES = flags.DEFINE_list("megabytes", ["1", "16", "64", "256"], "sizes of the gradient")
_ROUNDS = flags.DEFINE_integer("rounds", 15, "how often each arm runs", lower_bound=1)

TARGET = "shardrules_benchmark_stream"


def build() -> None:
    """Compile stream.cc and register it as an FFI target."""
    source = pathlib.Path(__file__).with_name("stream.cc")
    with tempfile.TemporaryDirectory() as folder:
        library = pathlib.Path(folder, "stream.so")
        command = ["c++", "-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-w"]
        command += [f"-I{jax.ffi.include_dir()}", str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        handler = ctypes.cdll.LoadLibrary(str(library)).stream
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(handler), platform="cpu")


def _kernel(x, annotate=None):
    y = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
    # On its own this JAX types an FFI call's result invariant.
    return jax.lax.pcast(y, annotate, to="varying") if annotate else y


def block(annotate=None):
    """Return the kernel in its custom_vjp, annotated by hand or not at all."""
    kernel = functools.partial(_kernel, annotate=annotate)
    op = jax.custom_vjp(kernel)
    op.defvjp(lambda x: (kernel(x), None), lambda _, g: (kernel(g),))
    return op


def arms(mesh):
    """Return, for each way to write it, the function of x and what it is traced under."""
    map_ = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    off = map_(block(), check_vma=False)

    def broadcast_outside(x):
        """Name every mesh axis in the specs, and let XLA sum."""
        each = jax.numpy.broadcast_to(x, (mesh.shape["model"], *x.shape))
        both = P("model", "data")
        f = functools.partial(jax.shard_map, mesh=mesh, in_specs=both, out_specs=both)
        return f(block(), check_vma=False)(each).mean(0)

    outside = jax.custom_vjp(off)
    outside.defvjp(lambda x: (off(x), None), lambda _, g: (off(g),))
    plain = contextlib.nullcontext
    return {
        "by hand": (map_(block("data")), plain),
        "check off": (off, plain),
        "broadcast outside": (broadcast_outside, plain),
        "custom_vjp outside": (outside, plain),
        "shardrules": (map_(block()), shardrules.install),
    }


def operations(compiled) -> list[str]:
    """Return a compiled program's operations, those of its fusions included, in their order."""
    return re.findall(r"^ +(?:ROOT )?%\S+ = \S+ ([\w-]+)\(", compiled.as_text(), re.MULTILINE)


def print_programs(programs: dict[str, dict]) -> None:
    """Print what each arm's program moves and holds, for one device.

    Args:
      programs: for each mesh, the compiled program of each arm.
    """
    paired.print_head(["mesh, arm", "all-reduced, B", "temporaries, B", "operations"])
    for mesh, arms_ in programs.items():
        for name, compiled in arms_.items():
            moved = sum(e.bytes for e in testing.account(compiled).entries)
            found = operations(compiled)
            same = found == operations(arms_["by hand"])
            paired.print_row(
                [f"{mesh}, {name}", f"{moved:,}"]
                + [f"{compiled.memory_analysis().temp_size_in_bytes:,}"]
                + [", ".join(found) if name == "by hand" else "as by hand" if same else len(found)]
            )


def _main(argv) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    build()
    shardrules.register(TARGET, shardrules.no_communication)
    paired.print_stamp()
    others = ["check off", "broadcast outside", "custom_vjp outside", "shardrules"]
    paired.print_head(["mesh, gradient"] + others)
    programs: dict[str, dict] = {}
    for rows, columns in ((4, 2), (2, 4)):
        mesh = Mesh(np.array(jax.devices()).reshape(rows, columns), ("data", "model"))
        for megabytes in map(int, _MEGABYTES.value):
            shape = (megabytes * 2**20 // 4096, 1024)
            sharding = NamedSharding(mesh, P("data"))
            x = jax.device_put(np.ones(shape, np.float32), sharding)
            runs = {}
            for name, (function, hooks) in arms(mesh).items():
                with hooks():
                    backward = jax.jit(lambda x, g, f=function: jax.vjp(f, x)[1](g)[0])
                    compiled = backward.lower(x, x).compile()
                found = np.asarray(compiled(x, x)[:1, :1])
                assert found == 2, (name, found)
                programs.setdefault(f"{rows}x{columns}", {}).setdefault(name, compiled)
                runs[name] = lambda c=compiled, x=x: paired.seconds(
                    lambda: c(x, x).block_until_ready()
                )
            took = paired.rounds(runs, _ROUNDS.value)
            ratios = [paired.shown(paired.ratio(took[name], took["by hand"])) for name in others]
            paired.print_row([f"{rows}x{columns}, {megabytes} MB", *ratios])
    print(
        f"\nTime of the backward pass divided by that with annotations by hand: median of "
        f"{_ROUNDS.value} rounds (quartiles). The programs, at {_MEGABYTES.value[0]} MB:"
    )
    print_programs(programs)


if __name__ == "__main__":
    app.run(_main)
