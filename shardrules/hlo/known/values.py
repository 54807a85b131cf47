"""Values of the proof: how they combine, and how ops propagate ranges and exact integers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from shardrules.hlo.known import exact, pieces, ranges
from shardrules.hlo.known import states as hs
from shardrules.hlo.known.ranges import Exact, Ranged, Started, Value
from shardrules.hlo.reader import devices as hd
from shardrules.hlo.reader import module as hm

# Each result element depends on the operands' elements at the same place only.
ELEMENTWISE = frozenset(
    "abs acos acosh add and asin asinh atan2 atanh bitcast-convert cbrt ceil clamp "
    "compare complex convert copy cosine cosh count-leading-zeros divide erf exponential "
    "exponential-minus-one floor imag is-finite log log-plus-one logistic maximum minimum mulhi "
    "multiply negate not or popcnt power real reduce-precision remainder round-nearest-afz "
    "round-nearest-even rsqrt select shift-left shift-right-arithmetic shift-right-logical sign "
    "sine sinh sqrt subtract tan tanh xor stochastic-convert".split()
)
# Deterministic functions of their operands that move elements.
LOCAL = frozenset(
    "after-all batch-norm-grad batch-norm-inference batch-norm-training broadcast cholesky "
    "concatenate convolution dot dynamic-reshape dynamic-slice dynamic-update-slice fft gather "
    "get-dimension-size iota pad ragged-dot reshape reverse rng-bit-generator scaled-dot "
    "set-dimension-size slice transpose triangular-solve bitcast send send-done "
    "outfeed".split()
)
RANGED = frozenset(
    "bitcast concatenate dynamic-slice dynamic-update-slice pad reshape slice".split()
)


class Values:
    """Combines the values of one module and evaluates deterministic operations on them."""

    def __init__(self, states: hs.States, budget: int):
        self.states = states
        self.relations = states.relations
        # Maps the state of an uninitialised buffer to its state after a loop has filled it, or to
        # itself if no loop fills it.
        self.unwritten: dict[int, int] = {}
        # The piece that each device writes at its own place, by computation and instruction.
        self.pieces: dict[tuple[str, str], pieces.Piece | None] = {}
        # How many more instructions may be evaluated. An instruction with large arrays or many
        # ranges counts as several.
        self.budget = budget
        # Two caches: the state of a computed number, by its operands' state and its own relation;
        # the clamped start of a slice, by the start and its limit.
        self._of_numbers: dict[tuple[int, int], int] = {}
        self._clamps: dict[tuple[Exact, int], Value] = {}

    def collapse(self, value: Value) -> int:
        """Return one state for a whole value."""
        if type(value) is int:
            return value
        if isinstance(value, Exact):
            return value.state
        if isinstance(value, Ranged):
            return self.merged([state for _, state in value.cuts])
        if isinstance(value, Started):
            return self.merged((value.operand, value.result))
        return self.merged(value if isinstance(value, tuple) else (value,))

    def merged(self, values: Sequence[Value]) -> int:
        """Return one state for several values: devices are equal only where all values are."""
        state, refine = 0, self.states.refine
        for value in values:
            own = value if type(value) is int else self.collapse(value)
            if own != state:
                state = refine(state, own)
        return state

    def vary_alike(self, values: Sequence[Value]) -> bool:
        """Return whether values differ between the same devices (``ValueState.apart``)."""
        return len({self.states[self.collapse(value)].apart for value in values}) <= 1

    def join(self, a: Value, b: Value, combine: Callable[[int, int], int] | None = None) -> Value:
        """Return the value that is either of two: devices are equal only where both values are."""
        if a is b or a == b:
            return a
        # Keep as much structure as both values have: join tuples element by element, started
        # operations part by part, and ranges cut by cut. A single state stands for every part of
        # the other value. If the structures don't match, join one state for each whole value.
        combine = combine or self.states.either
        if type(a) is int and type(b) is int:
            return combine(a, b)
        if isinstance(a, tuple):
            if not isinstance(b, tuple):
                b = (self.collapse(b),) * len(a)
            if len(a) == len(b):
                return tuple([self.join(x, y, combine) for x, y in zip(a, b)])
        elif isinstance(b, tuple):
            state = self.collapse(a)
            return tuple([self.join(state, y, combine) for y in b])
        if isinstance(a, Started) and isinstance(b, Started):
            return Started(
                self.join(a.operand, b.operand, combine), self.join(a.result, b.result, combine)
            )
        if isinstance(a, Ranged) or isinstance(b, Ranged):
            count = a.cuts[-1][0] if isinstance(a, Ranged) else 0
            if isinstance(b, Ranged) and not count:
                count = b.cuts[-1][0]
            ours, theirs = self._cuts(a, count), self._cuts(b, count)
            if ours is not None and theirs is not None:
                return ranges.normal(ranges.zip_cuts(ours, theirs, combine))
        return combine(self.collapse(a), self.collapse(b))

    def with_state(self, value: Value, state: int) -> Value:
        """Refine every leaf of a value by a state."""
        if not state or (state == hs.SAME and isinstance(value, (Exact, Started))):
            return value
        if state == hs.SAME and isinstance(value, tuple):
            return tuple([self.with_state(v, state) for v in value])
        return self.join(value, state, self.states.refine)

    def mapped(self, value: Value, of: Callable[[int], int]) -> Value:
        """Replace the states of a value; exact numbers and started operations keep theirs."""
        if type(value) is int:
            return of(value)
        if isinstance(value, Ranged):
            return Ranged(tuple((stop, of(state)) for stop, state in value.cuts))
        if isinstance(value, tuple):
            return tuple([self.mapped(part, of) for part in value])
        return value

    def maybe_equal(self, value: Value) -> Value:
        """Return a value that may be equal again, without a proof."""
        return self.mapped(value, self.states.maybe_equal)

    def blocked(self, blocker: hs.Blocker | str, operands: Sequence[Value]) -> int:
        blocker = hs.Blocker(blocker) if isinstance(blocker, str) else blocker
        return self.states.blocked(blocker, *[self.collapse(o) for o in operands])

    def device_number(self, ids: np.ndarray, what: str) -> Exact:
        """Return the value of a number for each device, such as partition-id."""
        relation = self.relations.intern(ids)
        state = self.states.source(relation, hs.Cause(what, "differs"), sure=True)
        rows = ids if relation != hd.EQUAL else ids[:1]
        return Exact(state, rows.reshape(-1))

    def computed(self, rows: np.ndarray, operands: Sequence[Value]) -> Value:
        """Return the value of known numbers; devices are equal where their rows are."""
        if rows.shape[0] > 1:
            self.budget -= rows.size >> 10
            relation = self.relations.intern(hd.row_numbers(rows.reshape(len(rows), rows[0].size)))
        else:
            relation = hd.EQUAL
        if relation == hd.EQUAL:
            rows = rows[:1]
        merged = self.merged(operands)
        state = self._of_numbers.get((merged, relation))
        if state is None:
            state = self._of_numbers[merged, relation] = self._number_state(merged, relation)
        return Exact(state, np.ascontiguousarray(rows))

    def _number_state(self, operands: int, relation: int) -> int:
        fields = self.states[operands]
        causes: tuple[tuple[int, hs.Cause], ...] = ()
        if relation:
            cause = next((c for _, c in fields.causes), hs.Cause("a computed number", "differs"))
            causes = self.states.causes([(relation, cause)])
        constant = fields.constant and relation == hd.EQUAL
        return self.states.intern(
            hs.ValueState(relation, relation, causes, (), fields.supports, constant, relation)
        )

    def general(
        self, computation: hm.Computation, instruction: hm.Instruction, operands: Sequence[Value]
    ) -> Value:
        """Evaluate a deterministic op whose operands or result need more than one state."""
        # Try the most precise form first: exact integers, then a choice by a known predicate, then
        # ranges of elements. One merged state for all operands is always sound.
        opcode = instruction.opcode
        exactly, ranged = opcode in exact.OPCODES and bool(operands), False
        for operand in operands:
            exactly = exactly and type(operand) is Exact
            ranged = ranged or type(operand) is Ranged
        if opcode in ELEMENTWISE and opcode != "select" and not (exactly or ranged):
            return self.merged(operands)
        shapes = [computation.instructions[o].shape for o in instruction.operands]
        if exactly:
            arrays = [o.array for o in operands if type(o) is Exact]
            rows = exact.evaluate(instruction, arrays, shapes)
            if rows is not None:
                return self.computed(rows, operands)
        if opcode == "select" and len(operands) == 3 and isinstance(operands[0], Exact):
            if operands[0].array[0].size == 1:
                return self.choose(operands[0], [operands[2], operands[1]])
        if opcode in ELEMENTWISE:
            if ranged:
                return self._elementwise_ranges(computation, instruction, operands, shapes)
            return self.merged(operands)
        if opcode in ("dynamic-slice", "dynamic-update-slice"):
            operands = self._clamped(instruction, operands, shapes)
            if opcode == "dynamic-update-slice":
                self._note_piece((computation.name, instruction.name), operands, shapes)
        if opcode in RANGED:
            parts = self._ranges(instruction, operands, shapes)
            if parts is not None:
                return parts
        return self.merged(operands)

    def _clamped(
        self, instruction: hm.Instruction, operands: Sequence[Value], shapes: Sequence[hm.Shape]
    ) -> Sequence[Value]:
        """Return the operands of a slice or an update, with known starts clamped to the array."""
        first = 1 if instruction.opcode == "dynamic-slice" else 2
        if len(operands) < first:
            return operands
        full = shapes[0].dimensions
        block = instruction.shape.dimensions if first == 1 else shapes[1].dimensions
        if len(operands) != first + len(full) or len(block) != len(full):
            return operands
        clamped = list(operands[:first])
        for index, whole, size in zip(operands[first:], full, block):
            if isinstance(index, Exact):
                key = index, whole - size
                clamped_at = self._clamps.get(key)
                if clamped_at is None:
                    rows = exact.clamped_index(index.array, whole - size)
                    clamped_at = index.state if rows is None else self.computed(rows, [index])
                    self._clamps[key] = clamped_at
                index = clamped_at
            clamped.append(index)
        return clamped

    def _note_piece(
        self, key: tuple[str, str], operands: Sequence[Value], shapes: Sequence[hm.Shape]
    ) -> None:
        """Record the piece that each device writes; None if evaluations disagree on its place."""
        piece = None
        if len(operands) > 2:
            piece = pieces.written(shapes[0], shapes[1], self.collapse(operands[1]), operands[2:])
        earlier = self.pieces.setdefault(key, piece)
        if piece is None or earlier is None or earlier.starts != piece.starts:
            self.pieces[key] = None
        else:
            self.pieces[key] = piece._replace(state=self.states.refine(earlier.state, piece.state))

    def choose(self, which: Exact, options: list[Any]) -> Value:
        """Return the value that each device gets if it takes the option that its number selects."""
        numbers = which.array.reshape(-1).astype(np.int64)
        count = self.relations.device_count
        # XLA executes the last branch of a conditional if the index is out of range.
        numbers = np.where((numbers < 0) | (numbers >= len(options)), len(options) - 1, numbers)
        used = np.unique(numbers).tolist()
        # One option on all devices: the result is that option. It keeps the selector's supports.
        if len(used) == 1:
            supports = self.states[which.state].supports
            return self.with_state(
                options[used[0]],
                self.states.intern(hs.ValueState(supports=supports)) if supports else 0,
            )
        taken = [options[u] for u in used]
        # Tuples: choose for each element, with the selector renumbered to the options in use.
        width = next((len(t) for t in taken if isinstance(t, tuple)), None)
        if width is not None:
            columns = [
                t if isinstance(t, tuple) and len(t) == width else (self.collapse(t),) * width
                for t in taken
            ]
            index = Exact(which.state, np.searchsorted(used, numbers))
            return tuple([self.choose(index, list(c)) for c in zip(*columns)])
        # Exact integers: build the row of each device from the option that it takes.
        if all(
            isinstance(t, Exact)
            and t.array.dtype == taken[0].array.dtype
            and t.array.shape[1:] == taken[0].array.shape[1:]
            for t in taken
        ) and (count * taken[0].array[0].size <= 8 * ranges.MAX_ELEMENTS):
            rows = np.empty((count,) + taken[0].array.shape[1:], taken[0].array.dtype)
            numbers = np.broadcast_to(numbers, (count,))
            for number, option in zip(used, taken):
                chosen_here = numbers == number
                rows[chosen_here] = np.broadcast_to(option.array, rows.shape)[chosen_here]
            return self.computed(rows, [*taken, which])
        # Otherwise, label each device with its option and its class in that option's relation:
        # devices are equal if they take the same option and are equal in it.
        # Options with the same state may be different values: constants 1 and 2 have state 0.
        states = [self.collapse(t) for t in taken]
        merged = self.states[self.states.refine(self.merged(states), which.state)]
        labels = np.empty((3, count), np.int64)
        for number, state in zip(used, states):
            chosen_here, fields = numbers == number, self.states[state]
            # Options that are equal everywhere, or have the same state, may also be one value, as
            # in two equal branches. Devices that take different such options don't count as apart.
            option = len(states) if fields.proven == hd.EQUAL else states.index(state)
            kinds = (fields.proven, fields.optimistic, fields.apart)
            for row, relation, own in zip(labels, kinds, (number, number, option)):
                row[chosen_here] = self.relations.labels(relation)[chosen_here] + own * count
        proven, optimistic, apart = map(self.relations.intern, labels)
        return self.states.intern(
            merged._replace(proven=proven, optimistic=optimistic, constant=False, apart=apart)
        )

    def _cuts(self, value: Value, count: int) -> Sequence[tuple[int, int]] | None:
        """Return the ranges of a value with ``count`` elements; None if its size is different."""
        if isinstance(value, Ranged):
            self.budget -= len(value.cuts) >> 4
            return value.cuts if value.cuts[-1][0] == count else None
        return ((count, self.collapse(value)),)

    def _elementwise_ranges(
        self,
        computation: hm.Computation,
        instruction: hm.Instruction,
        operands: Sequence[Value],
        shapes: Sequence[hm.Shape],
    ) -> Value:
        """Return an elementwise operation's value, combining its operands range by range."""
        count = instruction.shape.element_count
        cuts: Any = ((count, 0),)
        for operand, place, shape in zip(operands, instruction.operands, shapes):
            whole = operand if shape.element_count == count else self.collapse(operand)
            own = self._cuts(whole, count)
            if own is None or instruction.shape.is_tuple:
                return self.merged(operands)
            scales = self._one_number(computation, place) and self._alike([0, own[0][1]])
            cuts = ranges.zip_cuts(cuts, own, self._scaled if scales else self.states.refine)
        return ranges.normal(cuts)

    def _one_number(self, computation: hm.Computation, position: int) -> bool:
        """Return whether an operand is a scalar, or a broadcast of one."""
        instruction = computation.instructions[position]
        if instruction.opcode == "broadcast" and instruction.operands:
            instruction = computation.instructions[instruction.operands[0]]
        return instruction.shape.elements is None and instruction.shape.dimensions == ()

    def _scaled(self, state: int, number: int) -> int:
        """Combine a range's state with the state of a scalar that is equal everywhere."""
        # Padding stays padding: its elements remain equal to each other.
        constant = self.states[state].constant
        return self.states.changed(self.states.refine(state, number), constant=constant)

    def _ranges(
        self, instruction: hm.Instruction, operands: Sequence[Value], shapes: Sequence[hm.Shape]
    ) -> Value | None:
        """Return the ranges of an operation's result; None if it mixes ranges."""
        # Ranges are of flat arrays, so an operation keeps them apart only if it takes or joins
        # contiguous elements in row-major order. Otherwise the result gets one merged state.
        opcode, shape = instruction.opcode, instruction.shape
        if shape.is_tuple or any(s.is_tuple for s in shapes[:1]):
            return None
        if shape.dynamic or any(s.dynamic for s in shapes):
            return None  # the elements' places depend on sizes known only at run time
        count = shape.element_count
        first = shapes[0]
        if opcode in ("reshape", "bitcast"):
            if opcode == "bitcast" and not ranges.keeps_order(first, shape):
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
            starts, sizes = [a for a, _, _ in block], [b - a for a, b, _ in block]
            return self._between(
                operands[0], first, ranges.contiguous(first.dimensions, starts, sizes)
            )
        if opcode == "dynamic-slice":
            sizes = ranges.read_ints(instruction.attribute("dynamic_slice_sizes"))
            return self._between(operands[0], first, self._place(operands[1:], first, sizes))
        if opcode == "dynamic-update-slice":
            return self._update(operands, shapes, count)
        return self._pad(instruction, operands, first)

    def _between(
        self, value: Value, shape: hm.Shape, place: tuple[int, int] | None
    ) -> Value | None:
        """Return the value of a block from its flat range ``place`` in an array."""
        cuts = self._cuts(value, shape.element_count)
        if place is None or cuts is None:
            return None
        return ranges.normal(ranges.between(cuts, *place))

    def _place(
        self, indices: Sequence[Value], shape: hm.Shape, sizes: Sequence[int]
    ) -> tuple[int, int] | None:
        """Return the flat range of a block; None if its place differs by device or isn't known."""
        full, starts = shape.dimensions, []
        if not len(indices) == len(sizes) == len(full):
            return None
        for index, whole, size in zip(indices, full, sizes):
            if not isinstance(index, Exact) or index.array.size != 1 or not 0 <= size <= whole:
                return None
            starts.append(max(0, min(int(index.array.reshape(-1)[0]), whole - size)))
        return ranges.contiguous(full, starts, sizes)

    def _concatenate(
        self, instruction: hm.Instruction, operands: Sequence[Value], shapes: Sequence[hm.Shape]
    ) -> Value | None:
        places = ranges.read_ints(instruction.attribute("dimensions"))
        dims = instruction.shape.dimensions
        cut = [self._cuts(o, s.element_count) for o, s in zip(operands, shapes)]
        parts = [part for part in cut if part is not None]
        if len(parts) < len(cut) or len(places) != 1 or not 0 <= places[0] < len(dims):
            return None
        if any(d != 1 for d in dims[: places[0]]):
            return None
        cuts = ranges.joined(parts)
        whole = sum(s.element_count for s in shapes) == instruction.shape.element_count
        return ranges.normal(cuts) if whole and len(cuts) <= ranges.MAX_RANGES else None

    def _update(
        self, operands: Sequence[Value], shapes: Sequence[hm.Shape], count: int
    ) -> Value | None:
        base = self._cuts(operands[0], count)
        if len(operands) < 2 or base is None:
            return None
        place = self._place(operands[2:], shapes[0], shapes[1].dimensions)
        inside = self._cuts(operands[1], shapes[1].element_count)
        if place is None or inside is None:
            state = self.merged(operands[1:])
            # Without a known place, the write may overwrite any element.
            base = [(stop, self.states.maybe_equal(s)) for stop, s in base]
            # The place of a write in a loop isn't known either; a buffer that the loop fills
            # counts as filled.
            filled = [(stop, self.unwritten.get(s, s)) for stop, s in base]
            return ranges.normal([(stop, self.states.refine(s, state)) for stop, s in filled])
        if self._alike([p for _, p in (*base, *inside)]):
            # A buffer that scan fills piece by piece is not several packed arrays.
            return self.states.refine(self.merged(operands[:2]), self.merged(operands[2:]))
        before, after = ranges.between(base, 0, place[0]), ranges.between(base, place[1], count)
        cuts = ranges.joined([before, inside, after])
        return ranges.normal(cuts) if len(cuts) <= ranges.MAX_RANGES else None

    def _alike(self, states: Iterable[int]) -> bool:
        """Return whether all states have the same relations; causes may differ."""
        return len({self.states[s][:2] for s in states}) == 1

    def _pad(
        self, instruction: hm.Instruction, operands: Sequence[Value], shape: hm.Shape
    ) -> Value | None:
        parts = [
            tuple(map(int, p.split("_")))
            for p in (instruction.attribute("padding") or "").split("x")
            if re.fullmatch(r"-?\d{1,18}_-?\d{1,18}(_\d{1,18})?", p)
        ]
        dims = instruction.shape.dimensions
        inner = any(min(p) < 0 or (len(p) == 3 and p[2]) for p in parts)
        if inner or len(parts) != len(dims) or len(operands) != 2:
            return None
        moved = [i for i, p in enumerate(parts) if p[0] or p[1]]
        cuts = self._cuts(operands[0], shape.element_count)
        if cuts is None or len(moved) > 1 or (moved and any(d != 1 for d in dims[: moved[0]])):
            return None
        fill = self.collapse(operands[1])
        if self._alike([fill] + [p for _, p in cuts]):
            return self.merged(operands)
        low = parts[moved[0]][0] * math.prod(dims[moved[0] + 1 :]) if moved else 0
        high = instruction.shape.element_count - low - shape.element_count
        return ranges.normal(ranges.joined([[(low, fill)], cuts, [(high, fill)]]))
