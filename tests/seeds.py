"""Random programs, modules and texts by their seeds, in processes of their own.

    python tests/seeds.py KIND [COUNT [FIRST_SEED [PROCESSES]]]

A kind is a module with ``outcome(seed)``, which gives what one seed showed as JSON's types, and
``summary(outcomes)``, which gives what to print and whether all is well. What stands under "note"
is printed as it comes. A seed that ends its process, or doesn't end, has the outcome "lost", and
the next ones run in a new process.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

KINDS = {
    "oracle": "hlo.oracle",  # JAX programs against the proof
    "modules": "hlo.modules.run",  # HLO modules against the proof
    "fuzz": "hlo.fuzz",  # damaged HLO texts
    "programs": "sweeps.programs",  # gradients, against vmap
    "unchecked": "sweeps.unchecked",  # the check off, and switched on
    "moves": "sweeps.moves",  # casts moved and checks switched, past bwds and transposes
}
# What a small program takes to compile is LLVM's time; these compiler options make it a quarter.
CHEAPLY = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
LIMIT_S = 240  # for one seed

Outcome = dict[str, Any]


@functools.cache
def cheaply() -> dict[str, Any]:
    """Return those of ``CHEAPLY`` that this XLA has: it refuses an option that it doesn't know.

    JAX 0.12's, say, has no other way to compile a fusion than its emitters.
    """
    import jax

    def has(name: str) -> bool:
        try:
            nothing.compile({name: CHEAPLY[name]})
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" in str(error):
                return False
            raise
        return True

    nothing = jax.jit(lambda: 0).lower()
    return {name: CHEAPLY[name] for name in CHEAPLY if has(name)}


def in_this_process(kind: str, seeds: range) -> Iterator[Outcome]:
    """Yield the outcome of each seed."""
    module = importlib.import_module(kind)
    for seed in seeds:
        yield module.outcome(seed)
        if seed % 25 == 24 and "jax" in sys.modules:
            sys.modules["jax"].clear_caches()


def _in_one(kind: str, seeds: range) -> Iterator[Outcome]:
    """Yield outcomes from one process, until all are there or a seed is lost."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--child", kind, str(seeds.start), str(seeds.stop)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    left = len(seeds)
    try:
        while left and (line := lines.get(timeout=LIMIT_S)):
            yield json.loads(line)
            left -= 1
        why = "its process ended with exit code"
    except queue.Empty:
        why = f"did not end in {LIMIT_S} s, exit code"
    finally:
        process.kill()
        code = process.wait()
    if left:
        yield {"lost": code, "note": f"{why} {code}"}


def outcomes(kind: str, count: int, first: int = 0, processes: int = 1) -> dict[int, Outcome]:
    """Return the outcome of each of ``count`` seeds, run in other processes."""
    results: dict[int, Outcome] = {}

    def work(seeds: range) -> None:
        while seeds:
            for outcome in _in_one(kind, seeds):
                results[seeds.start] = outcome
                if "note" in outcome:
                    print(f"seed {seeds.start}: {outcome['note']}", flush=True)
                seeds = seeds[1:]

    share = -(-count // processes)
    end = first + count
    threads = [
        threading.Thread(target=work, args=(range(start, min(start + share, end)),))
        for start in range(first, end, share)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(sorted(results.items()))


def main(arguments: list[str]) -> int:
    """Run as a program: 0 if all is well."""
    kind, *numbers = arguments or [""]
    if kind not in KINDS or not all(number.isdigit() for number in numbers) or len(numbers) > 3:
        print(f"{__doc__}\nThe kinds are {', '.join(KINDS)}.", file=sys.stderr)
        return 2
    count, first, processes = (int(n) for n in [*numbers, *"100 0 1".split()[len(numbers) :]])
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()
    results = outcomes(KINDS[kind], count, first, processes)
    text, is_well = importlib.import_module(KINDS[kind]).summary(results)
    print(text)
    return 0 if is_well else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        for one in in_this_process(sys.argv[2], range(*map(int, sys.argv[3:]))):
            print(json.dumps(one), flush=True)
        sys.exit()
    sys.exit(main(sys.argv[1:]))
