"""What a call of a mesh kernel writes: for which outputs its rule answers, and their tags."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from shardrules.door.internals import Door
from shardrules.hooks.types.calls.opaque import OpaqueCall
from shardrules.hooks.types.refs import written_variables
from shardrules.registry.axistypes import AxisType, Effect


@dataclasses.dataclass(frozen=True)
class Kind:
    """How to read the parameters of one of the two primitives."""

    jaxprs: Callable[[dict], Sequence[Any]]  # one for each group of cores
    # from a jaxpr and a number of operands to its variables for them
    operands: Callable[[Any, int], Sequence[Any]]
    out_avals: Callable[[dict], Sequence[Any]]  # the avals of the arrays that it returns
    # from such an array's position to that of the operand that it overwrites
    aliases: Callable[[dict], dict[int, int]]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The outputs that a call's rule answers for: what the kernel writes."""

    # for each returned array the position of the rule's answer, None where the kernel leaves the
    # operand as it is (a ref that was discharged and is read only)
    answers: tuple[int | None, ...]
    # for each returned array the operand that it overwrites, or None
    overwritten: tuple[int | None, ...]
    refs: tuple[int, ...]  # the operands that are refs and are written; their answers come last
    operand_count: int  # how many operands there are

    @property
    def count(self) -> int:
        """How many answers the rule gives."""
        return sum(answer is not None for answer in self.answers) + len(self.refs)

    def types(self, answered: Sequence[AxisType], inputs: Sequence[AxisType]) -> list[AxisType]:
        """Return the type of each returned array."""
        types = []
        for answer, operand in zip(self.answers, self.overwritten):
            if operand is None:
                assert answer is not None, "only what overwrites an operand is left as it is"
                types.append(answered[answer])
            elif answer is None:
                types.append(inputs[operand])
            else:  # was a ref, and keeps its type: what is written to it is no wider
                types.append(inputs[operand].vary(*answered[answer].varying))
        return types


@dataclasses.dataclass
class MeshKernel(OpaqueCall):
    """An opaque call that is a mesh kernel."""

    layout: Layout | None = None  # as it was last bound

    def answer_count(self, output_count: int) -> int:
        """Return how many results the rule answers for: those that the kernel writes."""
        if self.layout is None or len(self.layout.answers) != output_count:
            return output_count
        return self.layout.count

    def placed(self, effects: tuple[Effect, ...], output_count: int) -> tuple[Effect, ...]:
        """Return the effect on each output; one that the kernel doesn't write has none."""
        if self.layout is None or len(self.layout.answers) != output_count:
            return effects
        return tuple(
            Effect("local") if answer is None else effects[answer] for answer in self.layout.answers
        )


def layout_of(door: Door, kind: Kind, params: dict[str, Any], avals: Sequence[Any]) -> Layout:
    """Return the outputs that a call's rule answers for."""
    stored = {
        at
        for jaxpr in kind.jaxprs(params)
        for at, variable in enumerate(kind.operands(jaxpr, len(avals)))
        if variable in written_variables(door, jaxpr)
    }
    aliases = kind.aliases(params)
    answers: list[int | None] = []
    count = 0
    for out in range(len(kind.out_avals(params))):
        answered = out not in aliases or aliases[out] in stored
        answers.append(count if answered else None)
        count += answered
    refs = tuple(
        at for at, aval in enumerate(avals) if isinstance(aval, door.AbstractRef) and at in stored
    )
    return Layout(tuple(answers), tuple(map(aliases.get, range(len(answers)))), refs, len(avals))
