"""A training step for 256 accelerators, compiled and judged on this machine.

    python benchmarks/scale.py [--platforms=tpu,gpu] [--arms=...] [--layers=4]

The step of examples/train_transformer.py, for TPU v5e:16x16 and for 32 hosts of 8 H100s as (16
fsdp, 4 expert, 4 model), beside the same step for 8 devices as (2, 2, 2). `verdicts` compares what
is said of each kind of collective over each set of mesh axes. Ratios: the verdict's processor time
to that of compiling the same program, and to the verdict for 8 devices; the memory that Python
allocates for the verdict to the text's size.
"""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import paired
import transformer
from absl import app, flags
from jax.sharding import Mesh

from shardrules import aot, program

flags.set_default(transformer.PLATFORMS, ["tpu", "gpu"])
flags.set_default(transformer.ARMS, ["check off", "cheapest casts"])
_LARGE = flags.DEFINE_list("large_mesh", ["16", "4", "4"], "devices along fsdp, expert and model")


def _devices(platform: str, count: int):
    if count == 8:
        return transformer.devices_of(platform)
    if platform == "cpu":
        raise app.UsageError(f"this machine has no {count} CPU devices")
    side = round(count**0.5)
    return aot.tpu(f"v5e:{side}x{side}") if platform == "tpu" else aot.gpu("h100", count)


def _said(judgement) -> set[tuple[str, str, str]]:
    """What is said of each kind of collective over each set of axes."""
    return {
        (v.collective.kind, ",".join(v.collective.axes or ("?",)), v.verdict)
        for v in judgement.verdicts
    }


def measure(platform: str, shape: tuple[int, ...], arm: str):
    """Compile and judge; return the verdicts, and what both took."""
    count = int(np.prod(shape))
    mesh = Mesh(np.array(_devices(platform, count)).reshape(shape), transformer.AXES)
    config = transformer.config_of(platform, mesh, transformer.LAYERS.value)
    start = time.process_time()
    compiled = transformer.compiled(arm, config, mesh)
    compiling = time.process_time() - start
    size = len(compiled.as_text())
    start = time.process_time()
    judgement = program.judge(compiled, mesh=dict(mesh.shape))
    judging = time.process_time() - start
    tracemalloc.start()
    program.judge(compiled, mesh=dict(mesh.shape))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return judgement, size, compiling, judging, peak


def _main(argv) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    large = tuple(map(int, _LARGE.value))
    paired.print_stamp()
    paired.print_head(
        ["compiled for", "arm", "text, MB", "verdict / compilation", "compilation / for 8"]
        + ["verdict / for 8", "memory / text", "verdicts"]
    )
    for platform in transformer.PLATFORMS.value:
        for arm in transformer.ARMS.value:
            few, _, few_compiling, few_judging, _ = measure(platform, (2, 2, 2), arm)
            many, size, compiling, judging, peak = measure(platform, large, arm)
            counts = ", ".join(
                f"{sum(v.verdict == verdict for v in many.verdicts)} {verdict}"
                for verdict in sorted({v.verdict for v in many.verdicts})
            )
            differ = _said(few) ^ _said(many)
            paired.print_row(
                [
                    f"{np.prod(large)} {platform}",
                    arm,
                    f"{size / 1e6:.2f}",
                    f"{judging / compiling:.1%}",
                    f"{compiling / few_compiling:.2f}",
                    f"{judging / few_judging:.2f}",
                    f"{peak / size:.1f}",
                    counts + (", as for 8" if not differ else f"; not as for 8: {sorted(differ)}"),
                ]
            )


if __name__ == "__main__":
    app.run(_main)
