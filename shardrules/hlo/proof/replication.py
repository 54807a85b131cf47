"""The proof: on which devices does each value of the program hold the same.

One pass over the instructions of each computation, with a state for each value (see ``states``).
Computations are evaluated for each distinct set of arguments that callers give them, loops to a
fixpoint. Every step errs to "may differ": what is not understood blocks, and is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from shardrules.hlo.known import exact, ranges
from shardrules.hlo.known import states as hs
from shardrules.hlo.known.ranges import Exact, Started
from shardrules.hlo.known.values import ELEMENTWISE, LOCAL
from shardrules.hlo.proof import collectives as hc
from shardrules.hlo.proof import customcalls, inputs, loops
from shardrules.hlo.proof.control import Control
from shardrules.hlo.proof.effects import Outside, Record
from shardrules.hlo.reader import devices as hd
from shardrules.hlo.reader import module as hm

# Deterministic if the computations that they apply are.
_APPLIERS = frozenset("map reduce reduce-window scatter select-and-scatter sort topk".split())
_PURE = (
    ELEMENTWISE
    | LOCAL
    | _APPLIERS
    | frozenset(
        "parameter constant tuple get-tuple-element call fusion while conditional "
        "optimization-barrier opt-barrier".split()
    )
)
_SOURCES = {
    "rng": "draws its own random numbers on each device",
    "rng-get-and-update-state": "reads each device's own random state",
    "infeed": "reads each device's own infeed",
}

# Opcodes whose handlers evaluate what they call, or abandon it where they can't.
_FOLLOWED = frozenset("call call-start fusion fusion-start while conditional async-start".split())
_CONTINUED = frozenset(
    "async-update async-done fusion-update fusion-done call-update call-done".split()
)
# What every one of these is made of stands in its parentheses.
_TAKES = (
    (ELEMENTWISE | LOCAL | _APPLIERS | _CONTINUED | frozenset(hc.OPCODES)) - {"iota", "after-all"}
) | frozenset(
    "get-tuple-element while conditional optimization-barrier opt-barrier domain add-dependency "
    "copy-start".split()
)
_NAMED = re.compile(r"[={,]\s*%?([\w.\-]+)")
_INDEX = re.compile(r", index=(\d{1,9})(?=[,\n]|$)")
_PARAMETER = object()
_MAX_DEPTH = 150  # nested calls; each takes a few of Python's frames


class Proof(Control, Outside):
    """Evaluates a module.

    Attributes:
      records: by computation name and position, what was seen at each collective.
      unfollowed: by name, why a computation runs in a way that no evaluation covers: nothing
        holds for the collectives in it, whatever other callers showed.
      result: the entry computation's value.
      default_mesh: axis sizes for rules that name axes without a mesh of their own.
    """

    def __init__(
        self,
        module: hm.Module,
        partitions: int,
        replicas: int,
        registry: Any,
        parameters: list[Any],
        states: hs.States,
        mesh: dict[str, int] | None = None,
    ):
        self.module = module
        self.partitions = partitions
        self.replicas = replicas
        self.registry = registry
        self.states = states
        self.relations = states.relations
        self.transfer = hc.Transfer(states)
        self.records: dict[tuple[str, int], Record] = {}
        self.opaque: dict[tuple[str, int], customcalls.Resolution] = {}
        self.default_mesh = mesh
        self.unwritten = {}
        self.unfollowed: dict[str, hs.Blocker] = {}
        self._memo: dict[Any, Any] = {}
        self._talking: dict[str, bool] = {}
        self._impure: dict[str, bool] = {}
        self._channels: dict[Any, hc.Channel] = {}
        self._cache: dict[Any, Any] = {}
        self._literals: dict[Any, Any] = {}
        self._meshes: dict[Any, Any] = {}
        self._depth = 0
        self.budget = self._budget_for(
            sum(len(c.instructions) for c in module.computations.values())
        )
        ids = np.arange(self.relations.device_count, dtype=np.uint32)
        self._partition_id: Any = self._device_number(ids % partitions, "partition-id")
        self._replica_id: Any = self._device_number(ids // partitions, "replica-id")
        if not self.relations.told and len(ids) > 1:  # they may be of either kind
            both = "partition-id or replica-id, and the text doesn't say how many (pass mesh=)"
            if partitions == 1:
                self._partition_id = self._blocked(hs.Blocker(both), ())
            if replicas == 1:
                self._replica_id = self._blocked(hs.Blocker(both), ())
        handlers: dict[str, Any] = dict.fromkeys((*ELEMENTWISE, *LOCAL))
        handlers |= {
            "parameter": _PARAMETER,
            "iota": self._iota,
            "concatenate": self._mixed,
            "pad": self._mixed,
            "dynamic-update-slice": self._mixed,
            "constant": self._constant,
            "tuple": self._tuple,
            "get-tuple-element": self._element,
            "fusion": self._call,
            "call": self._call,
            "while": self._while,
            "conditional": self._conditional,
            "custom-call": self._custom_call,
            "optimization-barrier": self._same,
            "opt-barrier": self._same,
            "domain": self._same,
            "add-dependency": self._same,
            "copy-start": self._copy_start,
            "async-start": self._async_start,
            "async-update": self._same,
            "async-done": self._done,
            # So XLA prints asynchronous fusions on GPU (JAX 0.12).
            "fusion-start": self._async_start,
            "fusion-done": self._done,
            "call-start": self._async_start,
            "call-done": self._done,
            "partition-id": lambda *a: self._partition_id,
            "replica-id": lambda *a: self._replica_id,
        }
        handlers.update({o: self._collective for o in hc.OPCODES})
        handlers.update({o: self._applier for o in _APPLIERS})
        handlers.update({o: self._source for o in _SOURCES})
        self._handlers = handlers
        self._find_unfollowed()
        # Devices of which one runs a branch or an iteration more are at another place of theirs.
        self._infeeds_elsewhere = "infeed" in module.text and any(
            not c.is_entry and any(i.opcode == "infeed" for i in c.instructions)
            for c in module.computations.values()
        )
        entry = module.entry
        self.result = self.evaluate(entry, tuple(parameters), 0)

    @staticmethod
    def _budget_for(size: int) -> int:
        """Say how many instructions are evaluated of a module that holds ``size``.

        Called again and again with ever new arguments, text that was made to do so would take
        exponential time; real modules stay below 3 evaluations for each instruction.
        """
        return 40 * size + 100_000

    # -- the pass -----------------------------------------------------------------------------

    def evaluate(self, computation: hm.Computation, arguments: tuple[Any, ...], guard: int) -> Any:
        """Give the root's value for these arguments."""
        name = computation.name
        if guard and not self._talks(name):
            guard = 0
        key = (name, arguments, guard)
        if key in self._memo:
            return self._memo[key]
        self.budget -= len(computation.instructions)
        if self._depth >= _MAX_DEPTH or self.budget < 0:
            why = "nested too deep" if self.budget >= 0 else "evaluated too often"
            return self._blocked(
                self._abandon((name,), f"computation {name!r} is {why} for the proof"), arguments
            )
        self._depth += 1
        values: list[Any] = []
        append = values.append
        refine = self.states.refine
        handler_of, unusual = self._handlers.get, self._unusual
        strange = self.module.strange
        for position, instruction in enumerate(computation.instructions):
            handler = handler_of(instruction.opcode, unusual)
            if strange and instruction.start in strange and instruction.opcode not in hc.OPCODES:
                handler = self._strange
            operands = instruction.operands
            if handler is None:  # a function of its operands: their states, where they are no more
                state = 0
                for operand in operands:
                    value = values[operand]
                    if type(value) is not int:
                        state = self._general(
                            computation, instruction, [values[o] for o in operands]
                        )
                        break
                    if value != state:
                        state = refine(state, value)
                append(state)
            elif handler is _PARAMETER:
                number = int(instruction.literal)
                if number >= len(arguments):
                    why = f"parameter {number} of computation {name!r} has no argument"
                    append(self._blocked(hs.Blocker(why), ()))
                else:
                    append(arguments[number])
            else:
                append(
                    handler(
                        computation, position, instruction, [values[o] for o in operands], guard
                    )
                )
        self._depth -= 1
        result = values[computation.root]
        self._memo[key] = result
        return result

    def _find_unfollowed(self) -> None:
        """Abandon what instructions name that evaluate none of the computations they name.

        Raises:
          HloSyntaxError: one lacks operands, or the computations that it runs, or is a collective
            of a kind that isn't known: it would count as none.
        """
        plain = ELEMENTWISE | LOCAL | {"parameter", "constant", "tuple", "get-tuple-element"}
        for computation in self.module.computations.values():
            for instruction in computation.instructions:
                opcode = instruction.opcode
                if opcode not in self._handlers and hc.unknown_kind(instruction):
                    raise hm.syntax_error(
                        self.module.text,
                        instruction.start,
                        f"{opcode} {instruction.name!r} is a collective of a kind that this "
                        "version of shardrules doesn't know: what the program moves can't be "
                        "counted",
                    )
                if not instruction.operands and (opcode in _TAKES or opcode.endswith("-done")):
                    raise hm.syntax_error(
                        self.module.text,
                        instruction.start,
                        f"{opcode} {instruction.name!r} has no operands: is the text printed "
                        "without their names?",
                    )
                if opcode in _FOLLOWED and not instruction.calls:
                    raise hm.syntax_error(
                        self.module.text,
                        instruction.start,
                        f"{opcode} {instruction.name!r} names no computation: is the text printed "
                        "without attributes?",
                    )
                if opcode == "while":
                    loops.parts(self.module, instruction)
                names: Iterable[str] = instruction.calls
                why = f"{opcode} {instruction.name!r} runs it in a way not followed"
                if instruction.start in self.module.strange:  # it may run whatever it names
                    names = [*names, *self._named(instruction)]
                    why = self._not_known(instruction)
                elif opcode in plain or opcode in _FOLLOWED:
                    continue
                elif opcode in _CONTINUED:  # it goes on with what its operand started
                    before = [computation.instructions[o].calls for o in instruction.operands[:1]]
                    names = () if names in before else names
                elif not names and opcode not in self._handlers:
                    names = self._named(instruction)
                if names:
                    self._abandon(names, why)

    def _named(self, instruction: hm.Instruction) -> list[str]:
        """List all computations that an instruction names, in whatever attribute."""
        text = instruction.text[instruction.attributes_start : instruction.end]
        return [w for w in _NAMED.findall(text) if w in self.module.computations]

    def _abandon(self, names: Iterable[str], why: str) -> hs.Blocker:
        """Note that computations run, with all that they call, in a way that isn't evaluated."""
        blocker = hs.Blocker(why)
        stack = list(names)
        while stack:
            name = stack.pop()
            if name not in self.unfollowed:
                self.unfollowed[name] = blocker
                for instruction in self.module.computations[name].instructions:
                    stack.extend(instruction.calls)
        return blocker

    def _talks(self, name: str) -> bool:
        """Tell whether a computation holds a collective, itself or in what it calls."""
        return self._reaches(
            name, self._talking, lambda i: i.opcode in hc.OPCODES or (i.opcode == "custom-call")
        )

    def _pure(self, name: str) -> bool:
        """Tell whether a computation is a deterministic function of its arguments."""
        strange = self.module.strange
        return not self._reaches(
            name, self._impure, lambda i: i.opcode not in _PURE or i.start in strange
        )

    def _deterministic(self, instruction: hm.Instruction) -> bool:
        """Tell whether an instruction is a deterministic function of its operands alone."""
        known = instruction.opcode in _PURE and instruction.start not in self.module.strange
        return known and all(self._pure(c) for c in instruction.calls)

    def _reaches(self, name: str, known: dict[str, bool], test) -> bool:
        """Tell whether an instruction that passes a test is in a computation or below it."""
        stack = [name]
        while stack:
            current = stack[-1]
            computation = self.module.computations[current]
            below = [c for i in computation.instructions for c in i.calls if c not in known]
            if current in known or not below:
                stack.pop()
                known[current] = known.get(current) or any(
                    test(i) or any(known[c] for c in i.calls) for i in computation.instructions
                )
            else:
                stack.extend(dict.fromkeys(below))
        return known[name]

    # -- instructions -------------------------------------------------------------------------

    def _constant(self, computation, position, instruction, operands, guard):
        shape = instruction.shape
        if exact.dtype(shape) is None:
            return 0
        key = (shape, instruction.literal)
        if key not in self._literals:
            rows = exact.literal(instruction.literal, shape)
            self._literals[key] = 0 if rows is None else Exact(0, rows, False)
        return self._literals[key]

    def _mixed(self, computation, position, instruction, operands, guard):
        return self._general(computation, instruction, operands)

    def _iota(self, computation, position, instruction, operands, guard):
        shape = instruction.shape
        kind = exact.dtype(shape)
        places = ranges.read_ints(instruction.attribute("iota_dimension"))
        if (
            kind is None
            or kind == np.bool_
            or len(places) != 1
            or (
                shape.element_count > ranges.MAX_ELEMENTS
                or not 0 <= places[0] < len(shape.dimensions)
            )
        ):
            return 0
        sizes = [1] * (len(shape.dimensions) + 1)
        sizes[places[0] + 1] = -1
        line = np.arange(shape.dimensions[places[0]]).astype(kind).reshape(sizes)
        return Exact(0, np.ascontiguousarray(np.broadcast_to(line, (1,) + shape.dimensions)), False)

    def _tuple(self, computation, position, instruction, operands, guard):
        return tuple(operands)

    def _element(self, computation, position, instruction, operands, guard):
        value = operands[0] if operands else 0
        found = _INDEX.match(instruction.text, instruction.attributes_start, instruction.end)
        text = found[1] if found else instruction.attribute("index")
        if text is None or not found and not re.fullmatch(r"\d{1,9}", text):
            raise hm.syntax_error(
                self.module.text,
                instruction.start,
                f"get-tuple-element {instruction.name!r} has no index",
            )
        index = int(text)
        if isinstance(value, tuple):
            if index >= len(value):
                raise hm.syntax_error(
                    self.module.text,
                    instruction.start,
                    f"get-tuple-element {instruction.name!r} takes element {index} of {len(value)}",
                )
            return value[index]
        if isinstance(value, Started):
            return (
                value.operand
                if index == 0
                else (value.result if index == 1 else self.collapse(value))
            )
        return self.collapse(value)

    def _same(self, computation, position, instruction, operands, guard):
        if not operands:
            return 0
        if len(operands) > 1:
            return self.with_state(operands[0], self._all(operands[1:]))
        return operands[0]

    def _copy_start(self, computation, position, instruction, operands, guard):
        value = operands[0] if operands else 0
        return Started(value, value)

    def _done(self, computation, position, instruction, operands, guard):
        value = operands[0] if operands else 0
        return value.result if isinstance(value, Started) else self.collapse(value)

    def _applier(self, computation, position, instruction, operands, guard):
        own = self._applied(instruction)
        if own:
            return self._blocked(hs.Blocker(f"{instruction.opcode} applies {own}"), operands)
        return self._all(operands)

    def _applied(self, instruction: hm.Instruction) -> str:
        """Name what an instruction applies that more than operands decide, "" for nothing."""
        found = next((name for name in instruction.calls if not self._pure(name)), None)
        if found is None:
            return ""
        return f"computation {found!r}, which is not a deterministic function"

    def _strange(self, computation, position, instruction, operands, guard) -> int:
        """Block what has an attribute that may mean anything."""
        return self._blocked(hs.Blocker(self._not_known(instruction)), operands)

    def _not_known(self, instruction: hm.Instruction) -> str:
        key = self.module.strange[instruction.start]
        name = f"{instruction.opcode} {instruction.name!r}"
        return f"{name} has an attribute that is not known, {key}"

    def _source(self, computation, position, instruction, operands, guard):
        what = f"{instruction.opcode} {instruction.name!r}"
        own = self.states.source(hd.DISTINCT, hs.Cause(what, _SOURCES[instruction.opcode]))
        if instruction.opcode != "infeed" or self.partitions == 1 or self._infeeds_elsewhere:
            return own
        copies = inputs.replicated_leaves(
            instruction.shape, instruction.attribute("sharding"), self.partitions
        )
        replica = self.relations.intern(np.arange(self.relations.device_count) // self.partitions)
        same = self.states.source(replica, hs.Cause(what, "differs between replicas"))
        return inputs.tree(instruction.shape, [same if c else own for c in copies], self.states)

    def _unusual(self, computation, position, instruction, operands, guard) -> Any:
        """Handle '-start', '-update' and '-done' of any opcode; block on what isn't known."""
        opcode = instruction.opcode
        if opcode.endswith("-done") or opcode.endswith("-update"):
            if operands and isinstance(operands[0], Started):
                return operands[0] if opcode.endswith("-update") else operands[0].result
            if opcode[:-5] in hc.OPCODES and operands:
                # An all-reduce-start may give its result alone; another tuple holds operands, too.
                started = computation.instructions[instruction.operands[0]].opcode
                return operands[0] if started == "all-reduce-start" else self.collapse(operands[0])
        elif opcode.endswith("-start"):
            base = opcode[:-6]
            if base in ELEMENTWISE or base in LOCAL:
                return Started(tuple(operands), self._all(operands))
            if base == "custom-call":
                return Started(
                    tuple(operands),
                    self._blocked(
                        hs.Blocker(
                            "an asynchronous custom call whose computation the text doesn't show"
                        ),
                        operands,
                    ),
                )
        return self._blocked(
            hs.Blocker(f"opcode {opcode!r} ({instruction.name!r}), which the proof doesn't know"),
            operands,
        )

    def _call(self, computation, position, instruction, operands, guard):
        if len(instruction.calls) != 1:
            return self._blocked(
                self._abandon(
                    instruction.calls,
                    f"{instruction.opcode} {instruction.name!r} names "
                    f"{len(instruction.calls)} computations",
                ),
                operands,
            )
        return self.evaluate(self.module.computations[instruction.calls[0]], tuple(operands), guard)

    def _async_start(self, computation, position, instruction, operands, guard):
        return Started(
            tuple(operands), self._call(computation, position, instruction, operands, guard)
        )
