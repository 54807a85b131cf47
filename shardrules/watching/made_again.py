"""Say why a program was compiled more than once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def notes(programs: list[Any]) -> Iterator[str]:
    """Yield why each program with collectives was compiled more than once, if it was."""
    by_function: dict[tuple[str, str], list[Any]] = {}
    for program in programs:
        if program.content.account.entries:
            by_function.setdefault((program.name, program.definition), []).append(program)
    for made in by_function.values():
        if len(made) > 1 or made[0].count > 1:
            yield _why_again(made)


def _why_again(programs: list[Any]) -> str:
    every: list[Any] = []
    for program in programs:
        every += [program, *program.same_text]
    made = f"{programs[0].name} was compiled {len(every)} times"
    known = [[p.arguments for p in programs], [p.commitments for p in programs]]
    known += map(list, zip(*(zip(*p.details) for p in every)))
    for first, *others in known:
        for other in others:
            if len(other) != len(first):
                return f"{made}: for {len(first)} and for {len(other)} arguments"
            for number, (before, after) in enumerate(zip(first, other)):
                if before != after:
                    said = f"{made}: {programs[0].argument(number)} is {before}, then {after}"
                    return said + _kept(programs[0], before, after)
    return (
        f"{made} for arguments of the same shapes and shardings: a jit that is made anew, a static "
        "argument, an array that was not placed on the devices before, or an option of JAX that "
        "was set or added between the calls (with JAX_EXPLAIN_CACHE_MISSES=1, JAX says which)"
    )


def _kept(program: Any, before: str, after: str) -> str:
    """Say how an argument that the program returned can keep its sharding; empty for others."""
    is_returned = after.partition(" a device, sharded ")[0] in program.returned
    if not is_returned or " a device, sharded " not in before:
        return ""
    return (
        "; if the program returned it, give its jit out_shardings, for this output the sharding "
        "that the argument had first"
    )
