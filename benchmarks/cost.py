"""What shardrules costs where nothing is compiled: importing it, and tracing and lowering under it.

    python benchmarks/cost.py [--rounds=9] [--layers=4]

Import time is that of `import shardrules` after `import jax`, and of the first `install()` after
that, each in a fresh process, processor time. Tracing and lowering are of the training step of
examples/train_transformer.py for eight CPU devices, the arms in turns, against shard_map's check
off and no hooks: processor time, and function calls, which no load disturbs; tracing.py has the
same against annotations by hand. The last line compares the step's jaxpr with the check off, with
the hooks and without.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import paired
import transformer
from absl import app, flags
from jax.sharding import Mesh

import shardrules

_ROUNDS = flags.DEFINE_integer("rounds", 9, "how often each arm runs", lower_bound=1)

_IMPORT = """
import time, jax
start = time.process_time()
import shardrules
imported = time.process_time()
shardrules.install
loaded = time.process_time()
shardrules.install()
print(imported - start, loaded - imported, time.process_time() - loaded)
"""


def import_milliseconds(count: int) -> list[tuple[float, ...]]:
    """Measure import shardrules, loading the hooks, and the first install, in fresh processes."""
    found = []
    # With their bytecode, which pip writes as it installs, also where the environment forbids it.
    with tempfile.TemporaryDirectory() as bytecode:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for _ in range(1 + count):
            done = subprocess.run(
                [sys.executable, "-c", _IMPORT],
                check=True,
                capture_output=True,
                text=True,
                env=environment,
            )
            found.append(tuple(1000 * float(part) for part in done.stdout.split()))
    return list(zip(*found[1:]))


def _jaxpr(config, mesh, check, hooks) -> str:
    """Trace anew, and print without addresses."""
    with hooks():
        step = transformer.example.make_step(config, mesh, check)
        traced = step.trace(*transformer.example.shapes(config, mesh))
    return re.sub(r"0x[0-9a-f]+", "0x", str(traced.jaxpr))


def _took(config, mesh, check, hooks, clock=time.process_time) -> float:
    step = transformer.example.make_step(config, mesh, check)  # anew: nothing of it is cached
    shapes = transformer.example.shapes(config, mesh)
    gc.collect()
    with hooks():
        start = clock()
        step.trace(*shapes).lower()
        return clock() - start


def _main(argv) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    paired.print_stamp()
    paired.print_head(["import", "ms of the processor, median", "least"])
    names = ("import shardrules", "loading the hooks, at the first use", "the first install()")
    for name, took in zip(names, import_milliseconds(_ROUNDS.value)):
        paired.print_row([name, f"{statistics.median(took):.1f}", f"{min(took):.1f}"])
    mesh = Mesh(np.array(transformer.devices_of("cpu")).reshape(2, 2, 2), transformer.AXES)
    config = transformer.config_of("cpu", mesh, transformer.LAYERS.value)
    plain = contextlib.nullcontext
    arms = {
        "check off, no hooks": (False, plain),
        "check off, hooks installed": (False, shardrules.install),
        "late casts": (True, functools.partial(shardrules.install, casts="late")),
        "cheapest casts": (True, shardrules.install),
    }
    runs = {name: functools.partial(_took, config, mesh, *arm) for name, arm in arms.items()}
    took = paired.rounds(runs, _ROUNDS.value)
    calls = {name: paired.calls(lambda count, run=run: run(count)) for name, run in runs.items()}
    paired.print_head(["tracing and lowering the step", "/ check off, no hooks", "function calls"])
    base = "check off, no hooks"
    for name in list(arms)[1:]:
        shown = paired.shown(paired.ratio(took[name], took[base]))
        paired.print_row([name, shown, f"{calls[name] / calls[base]:.3f}"])
    same = _jaxpr(config, mesh, False, plain) == _jaxpr(config, mesh, False, shardrules.install)
    print(f"\nWith the check off, the jaxprs are {'the same' if same else 'NOT THE SAME'}.")


if __name__ == "__main__":
    app.run(_main)
