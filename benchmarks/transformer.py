"""What the all-reduces of a transformer's training step move, compiled for absent accelerators.

    python benchmarks/transformer.py [--platforms=cpu,tpu,gpu] [--layers=4]

The step of examples/train_transformer.py (flash attention, RMS norm and a mixture of experts as
Pallas kernels; FSDP, tensor and expert parallelism on 2x2x2; scanned layers) with shard_map's check
off, with casts where JAX puts them, and with the cheapest casts. Bytes are those of all-reduces
that are no part of the forward pass, on one device. The hooks are installed in each arm, so that
the program says what its kernels do; with the check off they change nothing else.
"""

from __future__ import annotations

import os
import pathlib
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))

import jax
import numpy as np
import paired
import train_transformer as example
from absl import app, flags
from jax.sharding import Mesh

import shardrules
from shardrules import aot

PLATFORMS = flags.DEFINE_list("platforms", ["cpu", "tpu", "gpu"], "what to compile for")
LAYERS = flags.DEFINE_integer("layers", 4, "layers of the model", lower_bound=1)
ARMS = flags.DEFINE_list("arms", list(example.ARMS), "arms to compile")

AXES = ("fsdp", "expert", "model")
NAMES = {"cpu": "8 CPU devices", "tpu": "TPU v5e:2x4", "gpu": "8xH100"}


def devices_of(platform: str):
    """Give eight devices, absent ones for TPU and GPU."""
    if platform == "cpu":
        return jax.devices()[:8]
    return aot.tpu("v5e:2x4") if platform == "tpu" else aot.gpu("h100", 8)


def config_of(platform: str, mesh: Mesh, layers: int) -> example.Config:
    """Give sizes that a platform's kernels compile at, two sequences for each device's batch."""
    if platform == "cpu":
        options: tuple = (("interpret", True),)
    elif platform == "tpu":
        options = ()
    else:
        from jax.experimental.pallas import triton

        options = (("compiler_params", triton.CompilerParams()),)
    return example.Config(
        layers=layers,
        width=256,
        heads=2 * mesh.shape["model"],
        head_width=64,
        experts=2 * mesh.shape["expert"],
        hidden=256 * mesh.shape["model"],
        vocabulary=512,
        length=64,
        batch=4 * mesh.shape["fsdp"] * mesh.shape["expert"],
        key_block=32,
        options=options,
    )


def compiled(arm: str, config: example.Config, mesh: Mesh):
    """Compile the step in one arm."""
    check, hooks = example.ARMS[arm]
    with hooks() if check else shardrules.install():
        step = example.make_step(config, mesh, check)
        return step.lower(*example.shapes(config, mesh)).compile()


def estimate_of(program) -> str:
    """Write the compiler's own estimate of the step's time, where it gives one."""
    cost = program.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    estimate = (cost or {}).get("optimal_seconds", -1)
    return f"{estimate * 1e6:.0f} us" if estimate > 0 else "none"


def _main(argv) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    paired.print_stamp()
    heads = ["compiled for", "arm", "all-reduced, B", "check off / arm", "verdicts", "estimate"]
    paired.print_head(heads)
    for platform in PLATFORMS.value:
        mesh = Mesh(np.array(devices_of(platform)).reshape(2, 2, 2), AXES)
        config, off = config_of(platform, mesh, LAYERS.value), 0
        for arm in ARMS.value:
            program = compiled(arm, config, mesh)
            total, counts = example.moved(program)
            off = off or total
            said = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
            row = [NAMES[platform], arm, f"{total:,}", f"{off / total:.2f}", said]
            paired.print_row([*row, estimate_of(program)])


if __name__ == "__main__":
    app.run(_main)
