"""The collectives of a program in the order in which it runs them, with the loops around them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shardrules import hlo
from shardrules.hlo.proof import loops

__all__ = ["Event", "events"]


class Event(NamedTuple):
    """One step in program order.

    Attributes:
      kind: ``collective``; ``loop`` or ``branch`` where one begins, ``end`` where it ends.
      number: a collective's place among the verdicts.
      label: what a loop or a branch is called: how often it runs each time, which one it is.
    """

    kind: str
    number: int = -1
    label: str = ""


_END = Event("end")


def events(judgement: hlo.Judgement) -> list[Event]:
    """List what runs in program order, without loops and branches that hold no collective.

    A computation with several callers stands at the first of them.
    """
    kept: list[Event] = []
    for event in _walk(judgement):
        if event is _END and kept[-1].kind in ("loop", "branch"):
            kept.pop()  # nothing stands between
        else:
            kept.append(event)
    left = set(range(len(judgement.verdicts))) - {e.number for e in kept}
    return [*kept, *(Event("collective", number) for number in sorted(left))]


def _walk(judgement: hlo.Judgement) -> Iterator[Event]:
    module = judgement.module
    numbers: dict[tuple[str, str], list[int]] = {}
    for number, verdict in enumerate(judgement.verdicts):
        place = verdict.collective.computation, verdict.collective.name
        numbers.setdefault(place, []).append(number)

    def steps(computation: hlo.Computation) -> Iterator[Event | str]:
        """Give a computation's events, and the names of those that it calls where they stand."""
        for instruction in computation.instructions:
            for number in numbers.get((computation.name, instruction.name), ()):
                yield Event("collective", number)
            if instruction.opcode == "while":
                trips = loops.trip_count(module, computation, instruction)
                times = "?" if trips is None else f"{trips:,}"
                yield Event("loop", label=f"loop, {times} times")
                yield from instruction.calls
                yield _END
            elif instruction.opcode == "conditional":
                for branch, callee in enumerate(instruction.calls):
                    yield Event("branch", label=f"branch {branch}")
                    yield callee
                    yield _END
            else:
                yield from instruction.calls

    seen = {module.entry.name}
    stack = [steps(module.entry)]
    while stack:
        step = next(stack[-1], None)
        if step is None:
            stack.pop()
        elif isinstance(step, Event):
            yield step
        elif step not in seen:
            seen.add(step)
            stack.append(steps(module.computations[step]))
