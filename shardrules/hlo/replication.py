"""The proof: on which devices does each value of the program hold the same.

One pass over the instructions of each computation, with a state for each value (see ``states``).
Computations are evaluated for each distinct set of arguments that callers give them, loops to a
fixpoint. Every step errs to "may differ": what is not understood blocks, and is named.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from shardrules.hlo import collectives as hc
from shardrules.hlo import customcalls
from shardrules.hlo import devices as hd
from shardrules.hlo import exact
from shardrules.hlo import loops
from shardrules.hlo import module as hm
from shardrules.hlo import ranges
from shardrules.hlo import states as hs
from shardrules.hlo.ranges import Exact, Ranged, Started

# Each result element is a function of the operands' elements at the same place.
ELEMENTWISE = frozenset(
    "abs acos acosh add and asin asinh atan2 atanh bitcast-convert cbrt ceil clamp "
    "compare complex convert copy cosine cosh count-leading-zeros divide erf exponential "
    "exponential-minus-one floor imag is-finite log log-plus-one logistic maximum minimum mulhi "
    "multiply negate not or popcnt power real reduce-precision remainder round-nearest-afz "
    "round-nearest-even rsqrt select shift-left shift-right-arithmetic shift-right-logical sign "
    "sine sinh sqrt subtract tan tanh xor stochastic-convert".split())
# Deterministic functions of their operands, element places mixed.
LOCAL = frozenset(
    "after-all batch-norm-grad batch-norm-inference batch-norm-training broadcast cholesky "
    "concatenate convolution dot dynamic-reshape dynamic-slice dynamic-update-slice fft gather "
    "get-dimension-size iota pad ragged-dot reshape reverse rng-bit-generator scaled-dot "
    "set-dimension-size slice topk transpose triangular-solve bitcast send send-done "
    "outfeed".split())
# Deterministic if the computations that they apply are.
_APPLIERS = frozenset("map reduce reduce-window scatter select-and-scatter sort".split())
_RANGED = frozenset("bitcast concatenate dynamic-slice dynamic-update-slice pad reshape "
                    "slice".split())
_PURE = ELEMENTWISE | LOCAL | _APPLIERS | frozenset(
    "parameter constant tuple get-tuple-element call fusion while conditional "
    "optimization-barrier".split())
_SOURCES = {"rng": "draws its own random numbers on each device",
            "rng-get-and-update-state": "reads each device's own random state",
            "infeed": "reads each device's own infeed"}

_INDEX = re.compile(r", index=(\d{1,9})(?=[,\n]|$)")
_MAX_STEPS = 12  # iterations of a loop that are followed one by one
_MAX_DEPTH = 150  # nested calls; each takes a few of Python's frames


class Record:
    """What the proof saw at one collective, over all callers.

    Attributes:
      operands: each operand's value.
      guard: the state of the predicates under which it runs.
      channel: how it connects devices.
    """

    __slots__ = ("operands", "guard", "channel")

    def __init__(self, operands, guard, channel):
        self.operands = operands
        self.guard = guard
        self.channel = channel


class Proof:
    """Evaluates a module.

    Attributes:
      records: by computation name and position, what was seen at each collective.
      result: the entry computation's value.
      default_mesh: axis sizes for rules that name axes without a mesh of their own.
    """

    def __init__(self, module: hm.Module, partitions: int, replicas: int, registry: Any,
                 parameters: list[Any], states: hs.States,
                 mesh: dict[str, int] | None = None):
        self.module = module
        self.partitions = partitions
        self.replicas = replicas
        self.registry = registry
        self.states = states
        self.relations = states.relations
        self.transfer = hc.Transfer(states)
        self.records: dict[tuple[str, int], Record] = {}
        self.opaque: dict[tuple[str, int], customcalls.Resolution] = {}
        self.supports: dict[tuple[str, int], hs.Support] = {}
        self.default_mesh = mesh
        self._memo: dict[Any, Any] = {}
        self._talking: dict[str, bool] = {}
        self._impure: dict[str, bool] = {}
        self._channels: dict[Any, hc.Channel] = {}
        self._cache: dict[Any, Any] = {}
        self._literals: dict[Any, Any] = {}
        self._meshes: dict[Any, Any] = {}
        self._trip_counts: dict[tuple[str, int], int | None] = {}
        self._depth = 0
        # Called again and again with ever new arguments, text that was made to do so would take
        # exponential time; real modules stay below 3 evaluations for each instruction.
        size = sum(len(c.instructions) for c in module.computations.values())
        self._budget = 40 * size + 100_000
        ids = np.arange(self.relations.device_count, dtype=np.uint32)
        self._partition_id = self._device_number(ids % partitions, "partition-id")
        self._replica_id = self._device_number(ids // partitions, "replica-id")
        handlers = {
            "parameter": None, "constant": self._constant, "tuple": self._tuple,
            "get-tuple-element": self._element, "fusion": self._call, "call": self._call,
            "while": self._while, "conditional": self._conditional,
            "custom-call": self._custom_call, "optimization-barrier": self._same,
            "domain": self._same, "add-dependency": self._same, "copy-start": self._copy_start,
            "async-start": self._async_start, "async-update": self._same,
            "async-done": self._done, "partition-id": lambda *a: self._partition_id,
            "replica-id": lambda *a: self._replica_id}
        handlers.update({o: self._collective for o in hc.OPCODES})
        handlers.update({o: self._applier for o in _APPLIERS})
        handlers.update({o: self._source for o in _SOURCES})
        self._handlers = handlers
        entry = module.entry
        self.result = self.evaluate(entry, tuple(parameters), 0)

    # -- the pass -----------------------------------------------------------------------------

    def evaluate(self, computation: hm.Computation, arguments: tuple[Any, ...],
                 guard: int) -> Any:
        """Give the root's value for these arguments."""
        name = computation.name
        if guard and not self._talks(name):
            guard = 0
        key = (name, arguments, guard)
        if key in self._memo:
            return self._memo[key]
        self._budget -= len(computation.instructions)
        if self._depth >= _MAX_DEPTH or self._budget < 0:
            why = "nested too deep" if self._budget >= 0 else "evaluated too often"
            return self._blocked(hs.Blocker(f"computation {name!r} is {why} for the proof"),
                                 arguments)
        self._depth += 1
        values: list[Any] = []
        append = values.append
        refine = self.states.refine
        handlers = self._handlers
        for position, instruction in enumerate(computation.instructions):
            opcode = instruction.opcode
            if opcode in handlers:
                if opcode == "parameter":
                    number = int(instruction.literal)
                    append(arguments[number] if number < len(arguments) else self._blocked(
                        hs.Blocker(f"parameter {number} of computation {name!r} has no "
                                   "argument"), ()))
                else:
                    append(handlers[opcode](computation, position, instruction,
                                            [values[o] for o in instruction.operands], guard))
                continue
            state = 0
            if opcode in ELEMENTWISE or opcode in LOCAL:
                for operand in instruction.operands:
                    value = values[operand]
                    if type(value) is int:
                        if value != state:
                            state = refine(state, value)
                    else:
                        state = self._general(
                            computation, instruction, [values[o] for o in instruction.operands])
                        break
                else:
                    if opcode == "concatenate" or opcode == "pad":
                        state = self._general(
                            computation, instruction, [values[o] for o in instruction.operands])
                    elif opcode == "iota":
                        state = self._iota(instruction)
                append(state)
                continue
            append(self._unusual(computation, position, instruction,
                                 [values[o] for o in instruction.operands], guard))
        self._depth -= 1
        result = values[computation.root]
        self._memo[key] = result
        return result

    def _talks(self, name: str) -> bool:
        """Tell whether a computation holds a collective, itself or in what it calls."""
        return self._reaches(name, self._talking, lambda i: i.opcode in hc.OPCODES or (
            i.opcode == "custom-call"))

    def _pure(self, name: str) -> bool:
        """Tell whether a computation is a deterministic function of its arguments."""
        return not self._reaches(name, self._impure, lambda i: i.opcode not in _PURE)

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
                    test(i) or any(known[c] for c in i.calls) for i in computation.instructions)
            else:
                stack.extend(dict.fromkeys(below))
        return known[name]

    # -- values -------------------------------------------------------------------------------

    def collapse(self, value: Any) -> int:
        """Give one state for a whole value."""
        if type(value) is int:
            return value
        if isinstance(value, Exact):
            return value.state
        state = 0
        if isinstance(value, Ranged):
            for _, part in value.cuts:
                state = self.states.refine(state, part)
            return state
        parts = value if isinstance(value, tuple) else (value.operand, value.result)
        for part in parts:
            state = self.states.refine(state, self.collapse(part))
        return state

    def _all(self, values) -> int:
        state = 0
        for value in values:
            state = self.states.refine(state, self.collapse(value))
        return state

    def join(self, a: Any, b: Any) -> Any:
        """Give a value that is equal only where both are: what may be either of them."""
        if a is b or a == b:
            return a
        if type(a) is int and type(b) is int:
            return self.states.refine(a, b)
        if isinstance(a, tuple) or isinstance(b, tuple):
            width = len(a) if isinstance(a, tuple) else len(b)
            left = a if isinstance(a, tuple) else (self.collapse(a),) * width
            right = b if isinstance(b, tuple) else (self.collapse(b),) * width
            if len(left) == len(right):
                return tuple([self.join(x, y) for x, y in zip(left, right)])
        if isinstance(a, Started) and isinstance(b, Started):
            return Started(self.join(a.operand, b.operand), self.join(a.result, b.result))
        if isinstance(a, Ranged) or isinstance(b, Ranged):
            whole = a if isinstance(a, Ranged) else b
            other = b if whole is a else a
            if isinstance(other, Ranged) and other.cuts[-1][0] == whole.cuts[-1][0]:
                return ranges.normal(ranges.zip_cuts(whole.cuts, other.cuts, self.states.refine))
            if not isinstance(other, Ranged):
                state = self.collapse(other)
                return Ranged(tuple((s, self.states.refine(p, state)) for s, p in whole.cuts))
        return self.states.refine(self.collapse(a), self.collapse(b))

    def with_state(self, value: Any, state: int) -> Any:
        """Refine every leaf of a value by a state."""
        return self.join(value, state) if state else value

    def _blocked(self, blocker: hs.Blocker, operands) -> int:
        return self.states.blocked(blocker, *[self.collapse(o) for o in operands])

    def _device_number(self, ids: np.ndarray, what: str) -> Exact:
        relation = self.relations.intern(ids)
        state = self.states.source(relation, hs.Cause(what, "differs"))
        rows = ids if relation != hd.EQUAL else ids[:1]
        return Exact(state, rows.reshape(-1), False)

    def _exact(self, rows: np.ndarray, splat: bool, operands) -> Any:
        """Make a value of computed rows."""
        if rows.shape[0] > 1:
            flat = np.ascontiguousarray(rows).reshape(rows.shape[0], -1)
            _, labels = np.unique(flat, axis=0, return_inverse=True)
            relation = self.relations.intern(labels.reshape(-1))
        else:
            relation = hd.EQUAL
        if relation == hd.EQUAL:
            rows = rows[:1]
        merged = self.states[self._all(operands)]
        causes = self.states.causes(
            [(relation, c) for _, c in merged.causes[:1]]
            or [(relation, hs.Cause("a computed number", "differs"))]) if relation else ()
        state = self.states.intern(hs.State(relation, relation, causes, (), merged.supports))
        return Exact(state, np.ascontiguousarray(rows), splat)

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

    def _iota(self, instruction) -> Any:
        shape = instruction.shape
        kind = exact.dtype(shape)
        places = ranges.read_ints(instruction.attribute("iota_dimension"))
        if kind is None or kind == np.bool_ or len(places) != 1 or (
                shape.element_count > ranges.MAX_ELEMENTS or not 0 <= places[0] < len(
                    shape.dimensions)):
            return 0
        sizes = [1] * (len(shape.dimensions) + 1)
        sizes[places[0] + 1] = -1
        line = np.arange(shape.dimensions[places[0]]).astype(kind).reshape(sizes)
        return Exact(0, np.ascontiguousarray(
            np.broadcast_to(line, (1,) + shape.dimensions)), False)

    def _tuple(self, computation, position, instruction, operands, guard):
        return tuple(operands)

    def _element(self, computation, position, instruction, operands, guard):
        value = operands[0] if operands else 0
        found = _INDEX.match(instruction.text, instruction.attributes_start, instruction.end)
        text = found[1] if found else instruction.attribute("index")
        if text is None or not re.fullmatch(r"\d{1,9}", text):
            raise hm.syntax_error(self.module.text, instruction.start,
                                  f"get-tuple-element {instruction.name!r} has no index")
        index = int(text)
        if isinstance(value, tuple):
            if index >= len(value):
                raise hm.syntax_error(
                    self.module.text, instruction.start, f"get-tuple-element "
                    f"{instruction.name!r} takes element {index} of {len(value)}")
            return value[index]
        if isinstance(value, Started):
            return value.operand if index == 0 else (
                value.result if index == 1 else self.collapse(value))
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
        return value.result if isinstance(value, Started) else value

    def _general(self, computation, instruction, operands) -> Any:
        """Evaluate a deterministic op that has a value which is not one state."""
        opcode = instruction.opcode
        if opcode in exact.OPCODES and operands and all(isinstance(o, Exact) for o in operands):
            shapes = [computation.instructions[o].shape for o in instruction.operands]
            found = exact.evaluate(instruction, operands, shapes, self.relations.device_count)
            if found is not None:
                return self._exact(found[0], found[1], operands)
        if opcode == "select" and len(operands) == 3:
            chosen = self._select(computation, instruction, operands)
            if chosen is not None:
                return chosen
        if opcode in ELEMENTWISE:
            if any(isinstance(o, Ranged) for o in operands):
                return self._elementwise_ranges(computation, instruction, operands)
            return self._all(operands)
        if opcode in ("dynamic-slice", "dynamic-update-slice"):
            operands = self._clamped(computation, instruction, operands)
        if opcode in _RANGED:
            found = self._ranges(computation, instruction, operands)
            if found is not None:
                return found
        return self._all(operands)

    def _clamped(self, computation, instruction, operands) -> list[Any]:
        """Replace known index operands by what they are clamped to."""
        first = 1 if instruction.opcode == "dynamic-slice" else 2
        shapes = [computation.instructions[o].shape for o in instruction.operands]
        full = shapes[0].dimensions
        block = instruction.shape.dimensions if first == 1 else shapes[1].dimensions
        if len(operands) != first + len(full) or len(block) != len(full):
            return operands
        found = list(operands[:first])
        for index, whole, size in zip(operands[first:], full, block):
            if isinstance(index, Exact) and index.array[0].size == 1 and 0 <= whole - size < 2**31:
                rows = np.clip(index.array.astype(np.int64), 0, whole - size)
                index = self._exact(rows, index.splat, [index])
            found.append(index)
        return found

    def _select(self, computation, instruction, operands) -> Any:
        """Choose device by device where the predicate is one known number on each."""
        predicate = operands[0]
        shape = computation.instructions[instruction.operands[0]].shape
        if not isinstance(predicate, Exact) or not (predicate.splat or not shape.dimensions):
            return None
        return self.choose(predicate, [operands[2], operands[1]])

    def choose(self, which: Exact, options: list[Any]) -> Any:
        """Give the value that on each device is the option of that number.

        Args:
          which: one number for each device; beyond the options it means the last one.
        """
        numbers = which.array.reshape(-1).astype(np.int64)
        count = self.relations.device_count
        numbers = np.where((numbers < 0) | (numbers >= len(options)), len(options) - 1, numbers)
        used = np.unique(numbers).tolist()
        if len(used) == 1:
            return options[used[0]]
        taken = [options[u] for u in used]
        width = next((len(t) for t in taken if isinstance(t, tuple)), None)
        if width is not None:
            columns = [t if isinstance(t, tuple) and len(t) == width
                       else (self.collapse(t),) * width for t in taken]
            index = Exact(which.state, np.searchsorted(used, numbers), False)
            return tuple([self.choose(index, list(c)) for c in zip(*columns)])
        if all(isinstance(t, Exact) and t.splat == taken[0].splat
               and t.array.dtype == taken[0].array.dtype
               and t.array.shape[1:] == taken[0].array.shape[1:] for t in taken) and (
                   count * taken[0].array[0].size <= 8 * ranges.MAX_ELEMENTS):
            rows = np.empty((count,) + taken[0].array.shape[1:], taken[0].array.dtype)
            numbers = np.broadcast_to(numbers, (count,))
            for number, option in zip(used, taken):
                here = numbers == number
                rows[here] = np.broadcast_to(option.array, rows.shape)[here]
            return self._exact(rows, taken[0].splat, [*taken, which])
        states = [self.collapse(t) for t in taken]
        # Options of one state are not one value: constants 1 and 2 both have state 0.
        merged = self.states[self.states.refine(self._all(states), which.state)]
        proven = np.empty(count, np.int64)
        hoped = np.empty(count, np.int64)
        for number, state in zip(used, states):
            here = numbers == number
            found = self.states[state]
            proven[here] = self.relations.labels(found.proven)[here] + number * count
            hoped[here] = self.relations.labels(found.hoped)[here] + number * count
        return self.states.intern(merged._replace(
            proven=self.relations.intern(proven), hoped=self.relations.intern(hoped)))

    def _cuts(self, value: Any, count: int):
        if isinstance(value, Ranged):
            return value.cuts if value.cuts[-1][0] == count else None
        return ((count, self.collapse(value)),)

    def _elementwise_ranges(self, computation, instruction, operands) -> Any:
        count = instruction.shape.element_count
        cuts: Any = ((count, 0),)
        for operand, place in zip(operands, instruction.operands):
            shape = computation.instructions[place].shape
            own = self._cuts(operand, count) if shape.element_count == count else (
                (count, self.collapse(operand)),)
            if own is None or instruction.shape.is_tuple:
                return self._all(operands)
            cuts = ranges.zip_cuts(cuts, own, self.states.refine)
        return ranges.normal(cuts)

    def _ranges(self, computation, instruction, operands) -> Any:
        """Follow element ranges; None where they are lost."""
        shapes = [computation.instructions[o].shape for o in instruction.operands]
        opcode, shape = instruction.opcode, instruction.shape
        if shape.is_tuple or any(s.is_tuple for s in shapes[:1]):
            return None
        count = shape.element_count
        first = shapes[0]
        if opcode in ("reshape", "bitcast"):
            if opcode == "bitcast" and not (
                    shape.element_type == first.element_type
                    and (shape.is_row_major and first.is_row_major
                         or shape.dimensions == first.dimensions
                         and shape.layout == first.layout)):
                return None
            if isinstance(operands[0], Ranged) and first.element_count == count:
                return operands[0]
            return None
        if opcode == "concatenate":
            return self._concatenate(instruction, operands, shapes)
        if opcode == "slice":
            block = ranges.read_slice(instruction.attribute("slice") or "", first)
            if block is None or any(step != 1 for _, _, step in block):
                return None
            place = ranges.contiguous(first.dimensions, [a for a, _, _ in block],
                                      [b - a for a, b, _ in block])
            return self._between(operands[0], first, place)
        if opcode == "dynamic-slice":
            starts = self._uniform(operands[1:])
            sizes = ranges.read_ints(instruction.attribute("dynamic_slice_sizes"))
            if starts is None or len(starts) != len(sizes) or len(sizes) != len(first.dimensions):
                return None
            starts = [max(0, min(a, d - s)) for a, d, s in zip(starts, first.dimensions, sizes)]
            return self._between(operands[0], first,
                                 ranges.contiguous(first.dimensions, starts, sizes))
        if opcode == "dynamic-update-slice":
            return self._update(operands, shapes, count)
        if opcode == "pad":
            return self._pad(instruction, operands, shapes)
        return None

    def _between(self, value: Any, shape: hm.Shape, place) -> Any:
        cuts = self._cuts(value, shape.element_count)
        if place is None or cuts is None:
            return None
        return ranges.normal(ranges.between(cuts, *place))

    def _uniform(self, indices) -> list[int] | None:
        """Give index operands as numbers, if they are known and the same on all devices."""
        found = []
        for index in indices:
            if not isinstance(index, Exact) or index.array.size != 1:
                return None
            found.append(int(index.array.reshape(-1)[0]))
        return found

    def _concatenate(self, instruction, operands, shapes) -> Any:
        places = ranges.read_ints(instruction.attribute("dimensions"))
        dims = instruction.shape.dimensions
        if len(places) != 1 or not 0 <= places[0] < len(dims) or any(
                d != 1 for d in dims[:places[0]]):
            return None
        cuts: list[tuple[int, int]] = []
        offset = 0
        for operand, shape in zip(operands, shapes):
            own = self._cuts(operand, shape.element_count)
            if own is None:
                return None
            cuts += [(offset + stop, state) for stop, state in own]
            offset += shape.element_count
        if len(cuts) > ranges.MAX_RANGES or offset != instruction.shape.element_count:
            return None
        return ranges.normal(cuts)

    def _update(self, operands, shapes, count) -> Any:
        if len(operands) < 2:
            return None
        starts = self._uniform(operands[2:])
        base = self._cuts(operands[0], count)
        if base is None:
            return None
        place = None
        first, update = shapes[0], shapes[1]
        if starts is not None and len(starts) == len(first.dimensions) == len(update.dimensions):
            starts = [max(0, min(a, d - s)) for a, d, s in zip(
                starts, first.dimensions, update.dimensions)]
            place = ranges.contiguous(first.dimensions, starts, update.dimensions)
        inside = self._cuts(operands[1], update.element_count)
        if place is None or inside is None:
            state = self._all(operands[1:])
            return ranges.normal([(s, self.states.refine(p, state)) for s, p in base])
        if self._alike([p for _, p in (*base, *inside)]):
            # A buffer filled piece by piece, as scan does, is not an array packed of several.
            return self.states.refine(self._all(operands[:2]), self._all(operands[2:]))
        cuts = ranges.between(base, 0, place[0])
        cuts += [(place[0] + stop, state) for stop, state in inside]
        cuts += [(place[1] + stop, state) for stop, state in ranges.between(base, place[1], count)]
        return ranges.normal(cuts) if len(cuts) <= ranges.MAX_RANGES else None

    def _alike(self, states) -> bool:
        """Tell whether all states hold the same relations, whatever their causes."""
        return len({self.states[s][:2] for s in states}) == 1

    def _pad(self, instruction, operands, shapes) -> Any:
        text = instruction.attribute("padding") or ""
        parts = [tuple(map(int, p.split("_"))) for p in text.split("x")
                 if re.fullmatch(r"-?\d{1,18}_-?\d{1,18}(_\d{1,18})?", p)]
        dims = instruction.shape.dimensions
        if len(parts) != len(dims) or any(
                min(p) < 0 or len(p) == 3 and p[2] for p in parts) or len(operands) != 2:
            return None
        moved = [i for i, p in enumerate(parts) if p[0] or p[1]]
        if len(moved) > 1 or moved and any(d != 1 for d in dims[:moved[0]]):
            return None
        cuts = self._cuts(operands[0], shapes[0].element_count)
        if cuts is None:
            return None
        row = 1
        for size in dims[(moved[0] + 1 if moved else 0):]:
            row *= size
        low = parts[moved[0]][0] * row if moved else 0
        fill = self.collapse(operands[1])
        if self._alike([fill] + [p for _, p in cuts]):
            return self._all(operands)
        found = [(low, fill)] + [(low + stop, state) for stop, state in cuts]
        return ranges.normal(found + [(instruction.shape.element_count, fill)])

    def _applier(self, computation, position, instruction, operands, guard):
        for name in instruction.calls:
            if not self._pure(name):
                return self._blocked(hs.Blocker(
                    f"{instruction.opcode} applies computation {name!r}, which is not a "
                    "deterministic function"), operands)
        return self._all(operands)

    def _source(self, computation, position, instruction, operands, guard):
        return self.states.source(hd.DISTINCT, hs.Cause(
            f"{instruction.opcode} {instruction.name!r}", _SOURCES[instruction.opcode]))

    def _unusual(self, computation, position, instruction, operands, guard) -> Any:
        """Handle '-start', '-update' and '-done' of any opcode; block on what isn't known."""
        opcode = instruction.opcode
        if opcode.endswith("-done") or opcode.endswith("-update"):
            if operands and isinstance(operands[0], Started):
                return (operands[0] if opcode.endswith("-update") else operands[0].result)
            if opcode[:-5] in hc.OPCODES and operands:  # an all-reduce-start gives its result
                return operands[0]
        elif opcode.endswith("-start"):
            base = opcode[:-6]
            if instruction.calls and base in ("fusion", "call", "while", "custom-call"):
                return Started(tuple(operands), self.evaluate(
                    self.module.computations[instruction.calls[0]], tuple(operands), guard))
            if base in ELEMENTWISE or base in LOCAL:
                return Started(tuple(operands), self._all(operands))
            if base == "custom-call":
                return Started(tuple(operands), self._blocked(hs.Blocker(
                    "an asynchronous custom call whose computation the text doesn't show"),
                    operands))
        return self._blocked(hs.Blocker(f"opcode {opcode!r} ({instruction.name!r}), which the "
                                        "proof doesn't know"), operands)

    def _call(self, computation, position, instruction, operands, guard):
        if len(instruction.calls) != 1:
            return self._blocked(hs.Blocker(f"{instruction.opcode} {instruction.name!r} names "
                                            f"{len(instruction.calls)} computations"), operands)
        return self.evaluate(self.module.computations[instruction.calls[0]], tuple(operands),
                             guard)

    def _async_start(self, computation, position, instruction, operands, guard):
        return Started(tuple(operands),
                       self._call(computation, position, instruction, operands, guard))

    # -- control ------------------------------------------------------------------------------

    def _called(self, instruction, key: str) -> hm.Computation | None:
        name = (instruction.attribute(key) or "").lstrip("%")
        return self.module.computations.get(name)

    def _while(self, computation, position, instruction, operands, guard):
        condition = self._called(instruction, "condition")
        body = self._called(instruction, "body")
        if condition is None or body is None or len(operands) != 1:
            return self._blocked(hs.Blocker(f"while {instruction.name!r} without a condition or "
                                            "a body"), operands)
        trips = self._trip_counts.get((computation.name, position), -1)
        if trips == -1:
            trips = self._trip_counts[computation.name, position] = loops.trip_count(
                self.module, computation, instruction)
        if trips is not None:
            found = self._unrolled(condition, body, operands[0], guard, trips)
            if found is not None:
                return found
        else:
            found = self._stepped(condition, body, operands[0], guard)
            if found is not None:
                return found
        carry = operands[0]
        inner = guard
        for step in range(64):
            before = inner
            predicate = self.collapse(self.evaluate(condition, (carry,), inner))
            if trips is None:
                inner = self.states.refine(inner, predicate)
            out = self.evaluate(body, (carry,), inner)
            joined = self.join(carry, out)
            if joined == carry and inner == before:
                if trips is not None:  # what a loop gives that is known to run is what body gives
                    return out if trips else operands[0]
                return self._keep(body, carry, self._diverged(carry, predicate))
            carry = joined
            if step >= 32:  # a chain of carries: take them all together
                carry = self.with_state(carry, self.collapse(carry))
        return self._blocked(hs.Blocker(f"while {instruction.name!r} reached no fixpoint"),
                             operands)

    def _unrolled(self, condition, body, carry: Any, guard: int, trips: int) -> Any:
        """Follow a loop of known trip count until its carry's states repeat; None if too long.

        What a carry starts as doesn't matter after the iteration that replaces it: a carry that
        starts sharded and is summed in each iteration comes out equal.
        """
        history = [carry]
        seen = {carry: 0}
        for step in range(1, min(trips, _MAX_STEPS) + 1):
            self.evaluate(condition, (carry,), guard)  # for the collectives in it
            carry = self._forget(carry, self.evaluate(body, (carry,), guard))
            if carry in seen:
                start = seen[carry]
                return history[start + (trips - start) % (step - start)]
            seen[carry] = step
            history.append(carry)
        if trips > _MAX_STEPS:
            return None
        self.evaluate(condition, (carry,), guard)  # it runs once more than the body
        return carry

    def _stepped(self, condition, body, carry: Any, guard: int) -> Any:
        """Follow a loop whose predicate is known on every device; None where it isn't."""
        for _ in range(_MAX_STEPS + 1):
            predicate = self.evaluate(condition, (carry,), guard)
            if not isinstance(predicate, Exact) or predicate.array[0].size != 1:
                return None
            running = predicate.array.reshape(-1)
            if not running.any():
                return carry
            guard = self.states.refine(guard, predicate.state)
            following = self._keep(body, carry, self.evaluate(body, (carry,), guard))
            chosen = self.choose(Exact(predicate.state, running.astype(np.int64), False),
                                 [carry, following])
            carry = self._keep(body, carry, chosen)
        return None

    def _keep(self, body: hm.Computation, carry: Any, out: Any) -> Any:
        """Put back the elements that a loop's body passes on: they stay, whoever leaves when."""
        if not isinstance(carry, tuple) or not isinstance(out, tuple) or len(carry) != len(out):
            return out
        return tuple([c if _passed(body, k) == k else o
                      for k, (c, o) in enumerate(zip(carry, out))])

    def _forget(self, before: Any, after: Any) -> Any:
        """Replace numbers that an iteration changes, as a counter, by their states."""
        if isinstance(after, Exact) and after != before:
            return after.state
        if isinstance(after, tuple) and isinstance(before, tuple) and len(before) == len(after):
            return tuple([self._forget(x, y) for x, y in zip(before, after)])
        return after

    def _diverged(self, value: Any, predicate: int) -> Any:
        """Refine what a loop or branch gives by its predicate; known numbers stay known."""
        if not predicate or isinstance(value, Exact):
            return value
        if isinstance(value, tuple):
            return tuple([self._diverged(v, predicate) for v in value])
        return self.with_state(value, predicate)

    def _conditional(self, computation, position, instruction, operands, guard):
        branches = [self.module.computations[c] for c in instruction.calls]
        if not operands or len(operands) != len(branches) + 1:
            return self._blocked(hs.Blocker(f"conditional {instruction.name!r} has "
                                            f"{len(branches)} branches and {len(operands)} "
                                            "operands"), operands)
        shape = computation.instructions[instruction.operands[0]].shape
        which = operands[0]
        state = self.collapse(which)
        inner = self.states.refine(guard, state)
        results = [self.evaluate(b, (v,), inner) for b, v in zip(branches, operands[1:])]
        if isinstance(which, Exact) and not shape.dimensions:
            # A predicate's branch 0 is its true one.
            numbers = which.array.reshape(-1)
            if shape.element_type == "pred":
                numbers = np.where(numbers, 0, 1)
            found = self.choose(Exact(which.state, np.asarray(numbers), False), results)
        else:
            found = results[0]
            for result in results[1:]:
                found = self.join(found, result)
            found = self.with_state(found, state)
        if not isinstance(found, tuple):
            return found
        return tuple([self._same_passed(computation, instruction, branches, operands, k, value)
                      for k, value in enumerate(found)])

    def _same_passed(self, computation, instruction, branches, operands, index, value) -> Any:
        """Give the element that all branches pass on, if it is one and the same."""
        origins = set()
        passed = None
        for branch, operand, given in zip(branches, instruction.operands[1:], operands[1:]):
            element = _passed(branch, index)
            packed = computation.instructions[operand]
            if element is None or packed.opcode != "tuple" or not isinstance(given, tuple) or (
                    element >= len(given)):
                return value
            origin = packed.operands[element]
            while computation.instructions[origin].opcode == "copy":
                origin = computation.instructions[origin].operands[0]
            origins.add(origin)
            passed = given[element]
        return passed if len(origins) == 1 else value

    # -- calls to the outside -----------------------------------------------------------------

    def _collective(self, computation, position, instruction, operands, guard):
        opcode = instruction.opcode
        kind = hc.OPCODES[opcode]
        where = (computation.name, position)
        channel = self._channels.get(where)
        if channel is None:
            channel = self._channels[where] = hc.read_channel(
                self.module, instruction, kind, self.relations, self.partitions, self.replicas,
                self._cache)
        record = self.records.get(where)
        if record is None:
            self.records[where] = Record(list(operands), guard, channel)
        else:
            record.operands = [self.join(a, b) for a, b in zip(record.operands, operands)]
            record.guard = self.states.refine(record.guard, guard)
        how = hc.result_how(kind)
        what = f"{kind} {instruction.name!r}"

        def apply(state: int) -> int:
            return self.transfer.state(channel, how, state, guard, what)

        if kind == "ragged-all-to-all" or kind == "all-to-all" and len(operands) > 1:
            # A member's piece k may come from any operand of member k.
            result: Any = apply(self._all(operands))
        elif len(operands) == 1 or kind == "collective-permute" and len(operands) == 4:
            value = operands[0]
            if len(operands) == 4:  # a permute that updates a slice of its second operand
                result = apply(self._all(operands))
            elif isinstance(value, Ranged) and kind in ("all-reduce", "collective-permute",
                                                        "collective-broadcast"):
                result = Ranged(tuple((s, apply(p)) for s, p in value.cuts))
            else:
                result = apply(self.collapse(value))
        else:
            result = tuple([
                Ranged(tuple((s, apply(p)) for s, p in v.cuts))
                if isinstance(v, Ranged) and kind == "all-reduce" else apply(self.collapse(v))
                for v in operands])
        if not opcode.endswith("-start") or kind == "all-reduce":
            return result
        return Started(operands[0] if len(operands) == 1 else tuple(operands), result)

    def _spread(self, computation, instruction, operands) -> Any:
        """Evaluate the ends of a TPU collective that is spread over fusions; None for others."""
        target = (instruction.attribute("custom_call_target") or "").strip('"')
        if target not in (customcalls.ASYNC_START, customcalls.ASYNC_DONE):
            return None
        inner = [(o, v) for o, v in zip(instruction.operands, operands)
                 if computation.instructions[o].opcode in hc.KINDS]
        if len(inner) != 1:
            return None
        if target == customcalls.ASYNC_DONE:
            return inner[0][1]
        # What is under way is for the done alone: the operand goes through, the rest is closed.
        collective = computation.instructions[inner[0][0]]
        record = self.records.get((computation.name, inner[0][0]))
        elements = instruction.shape.elements
        if record is None or not elements or len(collective.operands) != 1 or (
                elements[0].dimensions != computation.instructions[
                    collective.operands[0]].shape.dimensions):
            return None
        unfinished = self._blocked(hs.Blocker(
            f"the unfinished result of {collective.opcode} {collective.name!r}"), operands)
        return (record.operands[0],) + (unfinished,) * (len(elements) - 1)

    def _custom_call(self, computation, position, instruction, operands, guard):
        if operands:
            spread = self._spread(computation, instruction, operands)
            if spread is not None:
                return spread
        where = (computation.name, position)
        found = self.opaque.get(where)
        if found is None:
            found = self.opaque[where] = customcalls.resolve(self.module, instruction,
                                                             self.registry)
        if found.effects is None:
            return self._blocked(found.blocker, operands)
        state = self._all(operands)
        if found.support is not None:
            state = self.states.refine(state, self.states.intern(hs.State(
                supports=(found.support,))))
        parts = [self._effect(e, state, found, guard, instruction) for e in found.effects]
        if instruction.shape.elements is None:
            return parts[0] if parts else state
        return tuple(parts)

    def _effect(self, effect, state: int, found, guard: int, instruction) -> int:
        if effect.kind == "local":
            return state
        if effect.kind == "unknown":
            return self.states.blocked(found.blocker, state)
        size = 1
        for length in (found.mesh or {}).values():
            size *= length
        sizes = found.mesh
        if sizes is None:  # a rule: its axes are names that only the module's mesh explains
            sizes = self.default_mesh
            size = int(np.prod(list(sizes.values()))) if sizes else 0
        if sizes is None or size != self.partitions or not set(effect.axes) <= set(sizes):
            return self.states.blocked(found.blocker._replace(
                what=f"{found.blocker.what.split(' is tagged')[0].split(' has a rule')[0]} "
                     f"communicates over {','.join(effect.axes)}, in no mesh known to fit "
                     f"{self.partitions} partitions"), state)
        key = (effect.kind, effect.axes, tuple(sizes.items()))
        channel = self._meshes.get(key)
        if channel is None:
            channel = self._meshes[key] = self._mesh_channel(effect, sizes)
        if effect.kind == "typed":
            old = self.states[state]
            relation = channel.groups.relation
            return self.states.intern(hs.State(
                relation, relation, self.states.causes(
                    [*old.causes, (relation, hs.Cause(found.support.what, "is declared to vary"))]
                    if relation else ()), old.blockers, old.supports))
        return self.transfer.state(channel, "join" if effect.kind == "join" else "exchange",
                                   state, guard, found.support.what)

    def _mesh_channel(self, effect, sizes: dict[str, int]) -> hc.Channel:
        names = list(sizes)
        ids = np.arange(self.partitions).reshape([sizes[n] for n in names])
        # A typed output is equal along the axes that it does not name.
        along = [n for n in names if (n in effect.axes) != (effect.kind == "typed")]
        rest = [i for i, n in enumerate(names) if n not in along]
        order = ([names.index(n) for n in along] if effect.kind == "typed"
                 else [names.index(n) for n in effect.axes])
        width = int(np.prod([sizes[names[i]] for i in order], dtype=np.int64)) if order else 1
        rows = ids.transpose(rest + order).reshape(-1, width).tolist()
        rows = [[r * self.partitions + d for d in row]
                for r in range(self.replicas) for row in rows]
        return hc.Channel("custom-call", hc.make_groups(rows, self.relations), None, True, None,
                          "")


def _passed(computation: hm.Computation, index: int) -> int | None:
    """Give the parameter's element that a computation returns unchanged as element ``index``."""
    root = computation.instructions[computation.root]
    if root.opcode != "tuple" or index >= len(root.operands):
        return None
    instruction = computation.instructions[root.operands[index]]
    while instruction.opcode == "copy" and instruction.operands:
        instruction = computation.instructions[instruction.operands[0]]
    if instruction.opcode != "get-tuple-element" or len(instruction.operands) != 1:
        return None
    if computation.instructions[instruction.operands[0]].opcode != "parameter":
        return None
    found = _INDEX.match(instruction.text, instruction.attributes_start, instruction.end)
    return int(found[1]) if found else None
