"""Run every benchmark, one after the other: ``python -m benchmarks [--smallest] [NAME...]``.

Each prints its Markdown table on stdout; progress goes to stderr. ``--smallest`` runs each on as
little as it can, to see that it runs at all: its figures mean nothing.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

FOLDER = pathlib.Path(__file__).resolve().parent

# From each program to what it is called with where its figures don't matter.
PROGRAMS = {
    "saved": ["--megabytes=1", "--rounds=1"],
    "transformer": ["--platforms=cpu", "--arms=cheapest casts", "--layers=1"],
    "cost": ["--rounds=1", "--layers=1"],
    "tracing": ["--rounds=1", "--calls=2"],
    "hlo_speed": ["--sizes_mb=0.1", "--layers=1", "--platforms=cpu", "--devices=8", "--rounds=1"],
    "scale": ["--platforms=cpu", "--large_mesh=4,2,1", "--arms=late casts", "--layers=1"],
    "models": ["--platforms=cpu", "--only=ZeRO-1 with a clip"],
    "casts": None,  # None: it has no smaller run
    "watching": ["--rounds=1", "--layers=1"],
    "kernels": ["--only=example_double_fwd", "--arms=rules"],
    "third_party": None,
    "on_a_gpu": [],
    "verdicts": ["--compilers=cpu", "--programs=remat"],
}


def main(arguments: list[str]) -> int:
    """Run those that are named, or all; return how many failed."""
    if {"-h", "--help"} & {*arguments}:
        print(f"{__doc__}\nNAMEs are {', '.join(PROGRAMS)}.")
        return 0
    smallest = "--smallest" in arguments
    names = [name for name in arguments if name != "--smallest"] or list(PROGRAMS)
    unknown = [name for name in names if name not in PROGRAMS]
    if unknown:
        print(
            f"no benchmark is called {unknown[0]!r}; there are {', '.join(PROGRAMS)}",
            file=sys.stderr,
        )
        return 2
    path = os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")]))
    failed = []
    for number, name in enumerate(names, 1):
        least = PROGRAMS[name]
        if smallest and least is None:
            continue
        command = [sys.executable, str(FOLDER / f"{name}.py"), *((least or []) if smallest else [])]
        print(f"[{number} of {len(names)}] benchmarks/{name}.py", file=sys.stderr, flush=True)
        print(f"\n## {name}.py\n", flush=True)
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path})
        if done.returncode:
            failed.append(name)
            print(f"{name} ended with {done.returncode}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
