"""Finds batched loops that ask all devices on every trip whether one of them goes on."""

from __future__ import annotations

from shardrules.costs import walk
from shardrules.costs.advice import operation
from shardrules.costs.waste.program import Hint, Kind, Program, Site

# XLA for TPU writes "or" as several operations on whole numbers.
_OTHER = ("add", "multiply", "and", "minimum")


def find(site: Site) -> Hint | None:
    """Find the predicate of a vmapped while loop, in which each example has a predicate."""
    if not _is_predicate(site) or not site.program.remembered(_alone).get(site.computation.name):
        return None
    spec = f"P({site.over})"
    advice = (
        "jax.vmap of a while loop runs until the examples of all devices are done, and asks "
        "the other devices on every trip: jax.shard_map(jax.vmap(f), mesh=mesh, "
        f"in_specs={spec}, out_specs={spec}), with the axis at the dimension that vmap maps "
        "and P() for what all examples share, after shardrules.install(), which casts what a carry "
        "starts from, lets each device stop by itself, and saves that round trip on every trip"
    )
    return site.hint(advice)


def _is_predicate(site: Site) -> bool:
    # A reduction that the program itself has in its condition has that operation's name.
    collective = site.collective
    return (
        collective.kind == "all-reduce"
        and collective.reduction not in _OTHER
        and site.taken.element_count == 1
        and site.taken.element_type.startswith(("pred", "s", "u"))
        and not site.in_shard_map
        and site.op_name.count("vmap(") == 1
        and operation(collective) == "while"
    )


def _alone(program: Program) -> dict[str, bool]:
    """Return, for each computation in a loop, whether its loops only communicate by predicates."""
    computations = program.module.computations
    others = {s.computation.name for s in program.sites if not _is_predicate(s)}

    def called(name: str) -> set[str]:
        names: set[str] = set()
        for position in computations[name].calling:
            names.update(computations[name].instructions[position].calls)
        return names

    alone: dict[str, bool] = {}
    for computation in computations.values():
        for position in computation.calling:
            loop = computation.instructions[position]
            if loop.opcode == "while":
                inside = walk.reached(loop.calls, called)
                for name in inside:
                    alone[name] = alone.get(name, True) and not inside & others
    return alone


ROWS = {
    "asked each trip": Kind(
        find,
        looks_like=(
            "an all-reduce of a predicate in the condition of `jax.vmap` of a while loop over a "
            "sharded batch: the loop goes on until all devices are done"
        ),
        in_shard_map="does not occur",
        under_jit="a shard_map around the vmap: each device stops by itself",
    )
}
