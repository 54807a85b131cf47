"""What a call of a mesh kernel writes: for which outputs its rule answers, and their tags."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from shardrules.door.internals import Door
from shardrules.hooks.types.calls.opaque import OpaqueCall
from shardrules.hooks.types.refs import written_variables
from shardrules.registry.axistypes import AxisType, Effect

__all__ = ["Kind", "Layout", "MeshKernel", "layout_of"]


@dataclasses.dataclass(frozen=True)
class Kind:
    """How to read the parameters of one of the two primitives.

    Args:
      jaxprs: one for each group of cores.
      operands: from a jaxpr and a number of operands to its variables for them.
      out_avals: the avals of the arrays that it returns.
      aliases: from such an array's position to that of the operand that it overwrites.
    """

    jaxprs: Callable[[dict], Sequence[Any]]
    operands: Callable[[Any, int], Sequence[Any]]
    out_avals: Callable[[dict], Sequence[Any]]
    aliases: Callable[[dict], dict[int, int]]


@dataclasses.dataclass(frozen=True)
class Layout:
    """For which of its outputs a call's rule answers: what it writes.

    Args:
      answers: for each returned array the position of the rule's answer, None where the kernel
        leaves the operand as it is (a ref that was discharged and is read only).
      overwritten: for each returned array the operand that it overwrites, or None.
      refs: the operands that are refs and are written; their answers come last.
      operand_count: how many operands there are.
    """

    answers: tuple[int | None, ...]
    overwritten: tuple[int | None, ...]
    refs: tuple[int, ...]
    operand_count: int

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
    """What is known of one mesh kernel.

    Args:
      layout: as it was last bound.
    """

    layout: Layout | None = None

    def answer_count(self, output_count: int) -> int:
        """Return for how many results a rule answers: those that the kernel writes."""
        if self.layout is None or len(self.layout.answers) != output_count:
            return output_count
        return self.layout.count

    def placed(self, effects: tuple[Effect, ...], output_count: int) -> tuple[Effect, ...]:
        """Return the effect on each output; one that is left as it is has none."""
        if self.layout is None or len(self.layout.answers) != output_count:
            return effects
        return tuple(
            Effect("local") if answer is None else effects[answer] for answer in self.layout.answers
        )


def layout_of(door: Door, kind: Kind, params: dict[str, Any], avals: Sequence[Any]) -> Layout:
    """Return for which of its outputs a call's rule answers.

    Args:
      door: JAX's private names.
      kind: the primitive's.
      params: the call's.
      avals: its operands'.
    """
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
