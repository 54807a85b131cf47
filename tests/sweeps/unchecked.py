"""Random bodies with the check off, and switched on where that is decided: the same results.

``python -m tests.sweeps.unchecked 200 30000`` tries 200 of them, from that seed on.
"""

from __future__ import annotations

import collections
import sys

from shardrules import errors, testing
from sweeps.generator import Generator
from sweeps.programs import inputs, on_devices


def outcome(seed: int) -> str:
    """Compare one program; say what became of it."""
    program = Generator(seed).program()

    def f(*args):
        return on_devices(program, [], check=False)(*args)

    try:
        sites = testing.assert_same_unchecked(f, *inputs(program))
    except errors.ShardrulesError as error:
        return f"different: {error}" if "is not the same" in str(error) else "refused"
    except Exception:  # JAX itself refuses it with the check off
        return "jax"
    return "switched" if all(site.switched for site in sites) else "left"


if __name__ == "__main__":
    count, first = map(int, sys.argv[1:])
    outcomes = collections.Counter()
    for seed in range(first, first + count):
        what = outcome(seed)
        outcomes[what.partition(":")[0]] += 1
        if what.startswith("different"):
            print(seed, what, flush=True)
        print(seed, dict(outcomes), flush=True)
