"""Evaluate the instructions of each computation and give each instruction a value.

Each computation is evaluated once for each distinct set of arguments. A table of handlers (see
``handlers``) says what each opcode does; a handler is called with a ``Visit``. ``CallGraph`` says
which computations also run in a way that no evaluation follows.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from shardrules import errors
from shardrules.hlo.known import states as hs
from shardrules.hlo.known.ranges import Value
from shardrules.hlo.known.values import ELEMENTWISE, LOCAL, Values
from shardrules.hlo.proof import collectives as hc
from shardrules.hlo.proof import customcalls, loops, summaries
from shardrules.hlo.reader import attributes
from shardrules.hlo.reader import module as hm

_STATES = frozenset([int])  # the type of a value that is one state
_make = tuple.__new__
_MAX_DEPTH = 150  # nested calls; each takes a few of Python's frames
# Opcodes that are deterministic if the computations that they apply are deterministic.
APPLIERS = frozenset("map reduce reduce-window scatter select-and-scatter sort topk".split())
_PURE = (
    ELEMENTWISE
    | LOCAL
    | APPLIERS
    | frozenset(
        "parameter constant tuple get-tuple-element call fusion while conditional "
        "optimization-barrier opt-barrier".split()
    )
)
# Opcodes whose handlers evaluate the computations they call, or abandon them.
_FOLLOWED = frozenset("call call-start fusion fusion-start while conditional async-start".split())
_CONTINUED = frozenset(
    "async-update async-done fusion-update fusion-done call-update call-done".split()
)
_PLAIN = ELEMENTWISE | LOCAL | {"parameter", "constant", "tuple", "get-tuple-element"}
# Opcodes that always have operands in their parentheses.
_TAKES = (
    (ELEMENTWISE | LOCAL | APPLIERS | _CONTINUED | frozenset(hc.OPCODES)) - {"iota", "after-all"}
) | frozenset(
    "get-tuple-element while conditional optimization-barrier opt-barrier domain add-dependency "
    "copy-start".split()
)
_NAMED = re.compile(r"[={,]\s*%?([\w.\-]+)")


_SPEAK = hc.COMMUNICATE | {"custom-call"}
# Opcodes whose handlers report and record nothing about the computation that contains them.
_QUIET = (ELEMENTWISE | LOCAL | APPLIERS | {"parameter", "constant", "tuple"}) - frozenset(
    "dynamic-update-slice send send-done outfeed".split()
)
_QUIET_CALLS = _QUIET | {"fusion", "call"}


class CallGraph:
    """Facts about a module's computations that depend on the computations they call."""

    def __init__(self, module: hm.Module):
        self.module = module
        # Maps the name of each computation that also runs without being evaluated to the reason.
        # Nothing is proven about its collectives, even if its other callers were evaluated.
        self.unfollowed: dict[str, hs.Blocker] = {}
        self.talking: set[str] = set()  # computations that communicate, directly or through calls
        self._impure: set[str] = set()
        # Computations that no message and no record names. A repeat of such a computation gives
        # the same result for the same arguments, so its original is evaluated instead.
        self.quiet: set[str] = set()
        for name, computation in module.computations.items():  # callees first
            if computation.original is not computation:
                for kind in (self.quiet, self.talking, self._impure):
                    if computation.original.name in kind:
                        kind.add(name)
                continue
            if self._is_quiet(computation):
                self.quiet.add(name)
            if module.opcodes[name] <= _PLAIN and not (module.unknown or computation.calling):
                continue
            opcodes, calls = module.opcodes[name], computation.called
            if not _SPEAK.isdisjoint(opcodes) or not self.talking.isdisjoint(calls):
                self.talking.add(name)
            pure = opcodes <= _PURE and self._impure.isdisjoint(calls)
            unknown = module.unknown and any(
                i.start in module.unknown for i in computation.instructions
            )
            if unknown or not pure:
                self._impure.add(name)

    def _is_quiet(self, computation: hm.Computation) -> bool:
        """Return whether no message and no record names a computation or one of its callees."""
        if not self.module.opcodes[computation.name] <= _QUIET_CALLS or self.module.unknown:
            return False
        for position in computation.calling:
            instruction = computation.instructions[position]
            applies = instruction.opcode in APPLIERS or (
                instruction.opcode in ("fusion", "call") and len(instruction.calls) == 1
            )
            if not applies or not self.quiet.issuperset(instruction.calls):
                return False
        return True

    def deterministic(self, instruction: hm.Instruction) -> bool:
        """Return whether an instruction is a deterministic function of its operands."""
        understood = instruction.opcode in _PURE and instruction.start not in self.module.unknown
        return understood and self._impure.isdisjoint(instruction.calls)

    def applied(self, instruction: hm.Instruction) -> str:
        """Return a text on the nondeterministic computation that an instruction applies, or ""."""
        impure = next((name for name in instruction.calls if name in self._impure), None)
        return f"computation {impure!r}, which is not a deterministic function" if impure else ""

    def unknown_attribute(self, instruction: hm.Instruction) -> str:
        key = self.module.unknown[instruction.start]
        name = f"{instruction.opcode} {instruction.name!r}"
        return f"{name} has an unknown attribute, {key}"

    def abandon(self, names: Iterable[str], why: str) -> hs.Blocker:
        """Record that computations and all their callees also run without being evaluated."""
        blocker = hs.Blocker(why)
        stack = list(names)
        while stack:
            name = stack.pop()
            if name not in self.unfollowed:
                self.unfollowed[name] = blocker
                stack.extend(self.module.computations[name].called)
        return blocker

    def find_unfollowed(self, handled: Iterable[str]) -> None:
        """Abandon the computations of instructions whose handlers don't evaluate them."""
        handled = frozenset(handled)
        unknown = self.module.unknown
        for name, computation in self.module.computations.items():
            repeats = computation.original is not computation
            if repeats and (name in self.quiet or self.module.opcodes[name] <= _PLAIN):
                continue
            if not unknown and self.module.opcodes[name] <= _PLAIN:
                # The common case: such instructions can only lack operands.
                alone = [i for i in computation.instructions if not i.operands]
                if not any(i.opcode in _TAKES for i in alone):
                    continue
            for instruction in computation.instructions:
                opcode = instruction.opcode
                understood = instruction.start not in unknown
                complete = instruction.operands or opcode not in _TAKES
                if understood and opcode in _PLAIN and complete:
                    continue  # the fast path of most instructions
                self._check(instruction, opcode in handled)
                names: Iterable[str] = instruction.calls
                why = (
                    f"{opcode} {instruction.name!r} runs it in a way that the proof doesn't follow"
                )
                if not understood:  # the instruction may run any computation that it names
                    names = [*names, *self._named(instruction)]
                    why = self.unknown_attribute(instruction)
                elif opcode in _FOLLOWED:
                    continue
                elif opcode in _CONTINUED:  # the instruction continues its operand's computation
                    before = [computation.instructions[o].calls for o in instruction.operands[:1]]
                    names = () if names in before else names
                elif not names and opcode not in handled:
                    names = self._named(instruction)
                if names:
                    self.abandon(names, why)

    def _check(self, instruction: hm.Instruction, handled: bool) -> None:
        """Raise an error if an instruction is an unknown collective or lacks required parts."""
        opcode = instruction.opcode
        if not handled and hc.unknown_kind(instruction):
            raise self.error(
                instruction,
                "is a collective of a kind that this version of shardrules doesn't know, so "
                "it can't count what the program moves",
            )
        if not instruction.operands and (opcode in _TAKES or opcode.endswith("-done")):
            raise self.error(
                instruction, "has no operands: is the text printed without their names?"
            )
        if opcode in _FOLLOWED and not instruction.calls:
            raise self.error(
                instruction, "names no computation: is the text printed without attributes?"
            )
        if opcode == "while":
            loops.parts(self.module, instruction)

    def error(self, instruction: hm.Instruction, what: str) -> errors.HloSyntaxError:
        name = f"{instruction.opcode} {instruction.name!r}"
        return attributes.syntax_error(self.module.text, instruction.start, f"{name} {what}")

    def _named(self, instruction: hm.Instruction) -> list[str]:
        """Return all computations that an instruction's attributes name."""
        text = instruction.text[instruction.attributes_start : instruction.end]
        return [w for w in _NAMED.findall(text) if w in self.module.computations]


@dataclasses.dataclass(slots=True)
class Record:
    """The operands and guard of one collective, joined over all callers."""

    operands: list[Value]  # each operand's value
    guard: int  # the state of the predicates that decide whether it runs
    channel: hc.Channel  # how it connects devices


class Handlers(NamedTuple):
    """The functions that evaluate instructions."""

    # None for a deterministic function of the operands, which ``Values.general`` evaluates;
    # ``parameter`` for parameters, which ``Proof.evaluate`` reads itself.
    by_opcode: Mapping[str, Handler | None]
    other: Handler  # for opcodes that the table lacks
    unknown: Handler  # for instructions with an unknown attribute


class Visit(NamedTuple):
    """One instruction under evaluation, with the values of its operands."""

    proof: Proof
    computation: hm.Computation
    position: int  # of the instruction in it
    instruction: hm.Instruction
    operands: Sequence[Value]
    guard: int


Handler = Callable[[Visit], Value]


def parameter(visit: Visit) -> Value:
    raise NotImplementedError  # a marker: ``Proof.evaluate`` reads parameters itself


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
        self.reach = CallGraph(module)
        self.transfer = hc.Exchange(values.states)  # what collectives do to states
        # By computation name and position:
        self.records: dict[tuple[str, int], Record] = {}
        self.opaque: dict[tuple[str, int], customcalls.CallEffects] = {}
        # For each send to another slice: the sent value's state and the guard, as last evaluated.
        self.sent: dict[tuple[str, int], tuple[int, int]] = {}
        self.cache: dict[Any, Any] = {}  # parsed attributes, by their text
        self.result: Value = 0  # the entry computation's value
        self._memo: dict[tuple[str, tuple[Value, ...], int], Value] = {}
        self._counts: dict[str, int] = {}  # the number of parameters of a quiet computation
        self._summaries: dict[str, list[summaries.Word] | summaries.Word | None] = {}
        self._evaluated: set[str] = set()  # computations to summarise at their next call
        self._depth = 0

    def abandoned(self, names: Iterable[str], why: str, operands: Sequence[Value]) -> int:
        """Abandon computations and return the state of their unknown result."""
        return self.values.blocked(self.reach.abandon(names, why), operands)

    def operation(self, computation: hm.Computation, position: int, operands: list[Value]) -> Value:
        """Evaluate one operation on given operands, outside of its computation's evaluation."""
        instruction = computation.instructions[position]
        handler = self.handlers.by_opcode[instruction.opcode]
        if handler is None:
            return self.values.general(computation, instruction, operands)
        return handler(Visit(self, computation, position, instruction, operands, 0))

    def parameter_count(self, computation: hm.Computation) -> int:
        name = computation.original.name
        if name not in self._counts:
            opcodes = [i.opcode for i in computation.original.instructions]
            self._counts[name] = opcodes.count("parameter")
        return self._counts[name]

    def summary(
        self, computation: hm.Computation, depth: int = 0
    ) -> list[summaries.Word] | summaries.Word | None:
        name = computation.name
        if name not in self._summaries:
            self._summaries[name] = summaries.summarise(self, computation, depth)
        return self._summaries[name]

    def _merged(
        self, summary: list[summaries.Word] | summaries.Word, arguments: Sequence[Any]
    ) -> Value:
        """Return the value of a computation from its summary and the states of its arguments."""
        if isinstance(summary, list):
            return tuple([self._merged(word, arguments) for word in summary])
        state, refine, maybe_equal = 0, self.values.states.refine, self.values.states.maybe_equal
        for number in summary:
            argument = arguments[number] if number >= 0 else maybe_equal(arguments[~number])
            if argument != state:
                state = refine(state, argument)
        return state

    def evaluate(
        self, computation: hm.Computation, arguments: tuple[Value, ...], guard: int
    ) -> Value:
        """Return a computation's value; ``guard`` is the state of the predicates around it."""
        # An abstract interpretation (Cousot and Cousot, POPL 1977): instead of numbers, each
        # instruction makes a state, the partition of the devices into classes with equal values.
        # Instructions stand after their operands, so one pass in order suffices. Calls recurse into
        # this method; recursion ends, since the reader rejects a call of a computation that is not
        # defined yet. Only loops iterate (``control``). Equal arguments give equal results, so
        # results are kept: a layer that is called a hundred times is evaluated once. The budget
        # ends the evaluation of text that would take exponential time (``handlers.budget_for``).
        name = computation.name
        if name in self.reach.quiet and len(arguments) >= self.parameter_count(computation):
            computation = computation.original
            name = computation.name
            if {*map(type, arguments)} <= _STATES:  # no numbers, ranges or tuples among them
                summary = self.summary(computation) if name in self._evaluated else None
                if summary is not None:
                    return self._merged(summary, arguments)
                self._evaluated.add(name)  # a single evaluation costs no more than a summary
        # The guard matters only to instructions that communicate: collectives, sends and kernels.
        # All callers of a computation that has none share one result.
        if guard == hs.SAME or name not in self.reach.talking:
            guard = 0
        key = (name, arguments, guard)
        known = self._memo.get(key)  # a single look-up, since arguments are slow to hash
        if known is not None:
            return known
        self.values.budget -= len(computation.instructions)
        if self._depth >= _MAX_DEPTH or self.values.budget < 0:
            why = "nested too deep" if self.values.budget >= 0 else "evaluated too often"
            return self.abandoned(
                (name,), f"computation {name!r} is {why} for the proof", arguments
            )
        self._depth += 1
        values: list[Value] = []
        append, value_of = values.append, values.__getitem__
        refine, general = self.values.states.refine, self.values.general
        by_opcode, other, on_unknown = self.handlers
        unknown = self.module.unknown
        for position, instruction in enumerate(computation.instructions):
            opcode = instruction.opcode
            try:
                handler = by_opcode[opcode]
            except KeyError:
                handler = other
            if unknown and instruction.start in unknown and opcode not in hc.OPCODES:
                handler = on_unknown
            operands = instruction.operands
            if handler is None:  # a function of its operands, with a fast path for plain states
                state = 0
                for operand in operands:
                    value = values[operand]
                    if type(value) is not int:
                        append(general(computation, instruction, list(map(value_of, operands))))
                        break
                    if value != state:
                        state = refine(state, value)
                else:
                    append(state)
            elif handler is parameter:
                begin, end = instruction.inner
                number = int(instruction.text[begin:end])
                if number >= len(arguments):
                    why = f"parameter {number} of computation {name!r} has no argument"
                    append(self.values.blocked(hs.Blocker(why), ()))
                else:
                    append(arguments[number])
            else:
                given = list(map(value_of, operands))
                visit = self, computation, position, instruction, given, guard
                append(handler(_make(Visit, visit)))  # Visit(...), with one call fewer
        self._depth -= 1
        result = values[computation.root]
        self._memo[key] = result
        return result
