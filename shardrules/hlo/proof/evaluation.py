"""The pass: evaluates the instructions of each computation, with a value for each.

Each computation is evaluated once for each distinct set of arguments. A table of handlers (see
``replication``) says what each opcode does; each is called as
``handler(proof, computation, position, instruction, operands, guard)``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shardrules.hlo.known import states as hs
from shardrules.hlo.known.values import Values
from shardrules.hlo.proof import collectives as hc
from shardrules.hlo.proof import customcalls
from shardrules.hlo.proof.reach import Reach
from shardrules.hlo.reader import module as hm

_MAX_DEPTH = 150  # nested calls; each takes a few of Python's frames


@dataclasses.dataclass(slots=True)
class Record:
    """The operands and guard of one collective, joined over all callers."""

    operands: list[Any]  # each operand's value
    guard: int  # the state of the predicates that decide whether it runs
    channel: hc.Channel  # how it connects devices


class Handlers(NamedTuple):
    """The functions that evaluate instructions."""

    # None for a function of its operands at the same places, PARAMETER for parameters.
    by_opcode: Mapping[str, Any]
    unusual: Callable[..., Any]  # for other opcodes
    strange: Callable[..., Any]  # for instructions with an unknown attribute


PARAMETER = object()


class Proof:
    """A module under evaluation, with the results so far."""

    def __init__(
        self,
        module: hm.Module,
        registry: Any,
        values: Values,
        handlers: Handlers,
        default_mesh: dict[str, int] | None = None,
    ):
        self.module = module
        self.registry = registry  # rules for kernels that carry no tag
        self.values = values  # how values combine; holds the states
        self.handlers = handlers  # what evaluates instructions
        # Axis sizes for rules that name axes without a mesh of their own.
        self.default_mesh = default_mesh
        self.reach = Reach(module)
        self.transfer = hc.Transfer(values.states)  # what collectives do to states
        # By computation name and position:
        self.records: dict[tuple[str, int], Record] = {}
        self.opaque: dict[tuple[str, int], customcalls.Resolution] = {}
        self.cache: dict[Any, Any] = {}  # parsed attributes, by their text
        self.result: Any = 0  # the entry computation's value
        self._memo: dict[Any, Any] = {}
        self._depth = 0

    def abandoned(self, names, why: str, operands) -> int:
        return self.values.blocked(self.reach.abandon(names, why), operands)

    def evaluate(self, computation: hm.Computation, arguments: tuple[Any, ...], guard: int) -> Any:
        """Give the root's value for these arguments."""
        name = computation.name
        if guard == hs.SAME or name not in self.reach.talking:
            guard = 0
        key = (name, arguments, guard)
        if key in self._memo:
            return self._memo[key]
        self.values.budget -= len(computation.instructions)
        if self._depth >= _MAX_DEPTH or self.values.budget < 0:
            why = "nested too deep" if self.values.budget >= 0 else "evaluated too often"
            return self.abandoned(
                (name,), f"computation {name!r} is {why} for the proof", arguments
            )
        self._depth += 1
        values: list[Any] = []
        append = values.append
        refine, general = self.values.states.refine, self.values.general
        by_opcode, unusual, on_strange = self.handlers
        handler_of = by_opcode.get
        strange = self.module.strange
        for position, instruction in enumerate(computation.instructions):
            handler = handler_of(instruction.opcode, unusual)
            if strange and instruction.start in strange and instruction.opcode not in hc.OPCODES:
                handler = on_strange
            operands = instruction.operands
            if handler is None:  # a function of its operands; fast if each is one state
                state = 0
                for operand in operands:
                    value = values[operand]
                    if type(value) is not int:
                        state = general(computation, instruction, [values[o] for o in operands])
                        break
                    if value != state:
                        state = refine(state, value)
                append(state)
            elif handler is PARAMETER:
                number = int(instruction.literal)
                if number >= len(arguments):
                    why = f"parameter {number} of computation {name!r} has no argument"
                    append(self.values.blocked(hs.Blocker(why), ()))
                else:
                    append(arguments[number])
            else:
                given = [values[o] for o in operands]
                append(handler(self, computation, position, instruction, given, guard))
        self._depth -= 1
        result = values[computation.root]
        self._memo[key] = result
        return result
