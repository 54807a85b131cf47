"""Random bodies with the check off, and switched on where that is decided: the same results.

``python tests/seeds.py unchecked 200 30000`` tries 200 of them, from that seed on.
"""

from __future__ import annotations

import collections
import dataclasses

import jax

import shardrules as sr
from shardrules import errors, testing

from .generator import Generator
from .programs import inputs, on_devices

# Most random bodies take gradients, and all of those are left.
GRADIENTS = frozenset({"grad", "vjp", "jvp", "linearize", "custom_block", "shares"})
EVERY = 7  # one in so many may take them


def kinds(block):
    """Yield the kind of each step, also inside of others."""
    for step in block.steps:
        yield step.kind
        for inner in step.blocks:
            yield from kinds(inner)


def program_of(seed):
    """Return a program whose body returns all its values; most take no gradients."""
    for attempt in range(1000):
        program = Generator(seed + 1_000_000 * attempt).program()
        if seed % EVERY == 0 or GRADIENTS.isdisjoint(kinds(program.block)):
            break
    return dataclasses.replace(program, seed=seed, mode="typed")


def compare(seed: int) -> str:
    """Compare one program; say what became of it, after a colon why."""
    program, types = program_of(seed), []
    args = inputs(program)
    try:
        with sr.install():  # each value is returned under the spec that its type allows
            jax.eval_shape(on_devices(program, types), *args)
    except Exception:  # under the spec of all axes: the check can't be on
        types.clear()

    def f(*args):
        return on_devices(program, list(types), check=False)(*args)

    try:
        jax.eval_shape(f, *args)
    except Exception as error:  # JAX itself refuses it with the check off
        return f"jax: {type(error).__name__}"
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        (site,) = testing.assert_same_unchecked(f, *args)
    except errors.ShardrulesError as error:
        return f"{'different' if 'is not the same' in str(error) else 'refused'}: {error}"
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    return "switched" if site.switched else f"left: {site.reason}"


def outcome(seed: int) -> dict[str, str]:
    """Return one program's outcome for tests/seeds.py."""
    return {"note": compare(seed)}


def summary(outcomes) -> tuple[str, bool]:
    """Count the outcomes; well if no result differed."""
    totals = collections.Counter(one["note"].partition(":")[0] for one in outcomes.values())
    lost = any("lost" in one for one in outcomes.values())
    return str(dict(totals)), not lost and "different" not in totals
