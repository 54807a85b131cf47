"""Random HLO modules against the proof: python -m tests.hlo.modules 2000 [first_seed [processes]]."""

from __future__ import annotations

import sys

from . import coverage, run
from .generate import Generator


def main(argv: list[str]) -> int:
    """Run as a program: 0 if no claim was false, all that the proof reads was generated and ran."""
    count = int(argv[1]) if len(argv) > 1 else 100
    first = int(argv[2]) if len(argv) > 2 else 0
    processes = int(argv[3]) if len(argv) > 3 else 1
    wrong, sums = run.run_beside(count, first, processes)
    print(
        f"{count} modules, {sums['probed']} probed values, {sums['collectives']} verdicts "
        f"({sums['redundant']} redundant): {len(wrong)} false claims; {sums['proven']} of "
        f"{sums['equal']} pairs of devices that are equal are proven equal; XLA's CPU compiler "
        f"refused {sums['refused']}"
    )
    for seed, what in wrong[:20]:
        print(f"  seed {seed}: {what}")
    texts = (Generator(seed).judged() for seed in range(first, first + min(count, 1000)))
    opcodes, attributes, report = coverage.missing(texts)
    print(f"generated: {report}")
    for what, names in (("opcodes", opcodes), ("attributes", attributes)):
        if names:
            print(f"  {what} that were not: {', '.join(names)}")
    return 1 if wrong or opcodes or attributes or 50 * sums["refused"] > count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
