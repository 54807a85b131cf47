"""Find the phase (forward, backward) and the source line of each part of a collective.

XLA combines collectives. It names the combined collective after its first part, after all parts, or
not at all. Each part keeps its own metadata on the instruction that extracts it (a
get-tuple-element; on GPU, the users of a slice of the flat array). We read this metadata first, so
combining makes no difference. If it has no name, the part gets the phase and the line of its
operands, or else of its users, by the majority of their bytes.
"""

from __future__ import annotations

import collections
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from shardrules.hlo.reader import module as hm

_SAME = frozenset("bitcast reshape copy get-tuple-element".split())
_FORMS = _SAME | frozenset("parameter slice transpose".split())
_SLICE = re.compile(r"\{\[(\d{1,18}):(\d{1,18})\]\}")
_NEAR = 64  # instructions to visit for a name
# Opcodes that make one array from several arrays, or from several parts.
_PACKS = frozenset("concatenate dynamic-update-slice pad".split())

# An instruction's name and bytes.
_Weighed = tuple[hm.Metadata, int]


@functools.lru_cache(maxsize=4096)
def phase_of(op_name: str) -> str:
    """Read the phase from an op_name; XLA joins two names with ';', ':' or ' '."""
    if not op_name:
        return "unknown"
    phases = set()
    for part in re.split(r";|\s(?=\w+\()|:(?=\w+[/(])", op_name):
        # JAX 0.12 gives the checkpoint's own name to the values that its recomputation reads.
        again = "transpose(" in part and operation(part) == "remat2"
        if again or "rematted_computation" in part:
            phases.add("recompute")
        elif "transpose(" in part:
            phases.add("backward")
        else:
            phases.add("forward")
    return phases.pop() if len(phases) == 1 else "mixed"


# How the op_name of JAX's own collectives ends. Collectives that XLA's partitioner makes have the
# name of another operation.
_WRITTEN = re.compile(
    r"p(sum|max|min|mean|broadcast|gather|permute|swapaxes|all_|scatter|shuffle)\w*|ppermute|"
    r"(ragged_)?all_(gather|to_all|reduce)\w*|reduce_scatter\w*|shard_map|reduced_vary_cast|"
    r"un?reduced?_\w+"
)


def operation(op_name: str) -> str:
    """Return the JAX operation at the end of an op_name."""
    # In JAX 0.4 and older, the parameters follow: psum[axes=('model',) axis_index_groups=None].
    return re.sub(r"\[.*?\]$", "", op_name).rpartition("/")[2]


def is_written(op_name: str) -> bool:
    """Return whether the program, not XLA's partitioner, asks for a collective."""
    return "pmap" in op_name or _WRITTEN.fullmatch(operation(op_name)) is not None


# The operations by which a scan reads and writes one trip's part of an array. JAX traces each of
# them once per process, so their source line is that of the first scan over such an array, which
# may be in another program.
_OF_A_SCAN = re.compile(r".*/while/body/(?:[^/()]+/)*jit\(dynamic_(?:update_)?index_in_dim\)/.*")


def lines(
    module: hm.Module,
    computation: hm.Computation,
    metadata: hm.Metadata,
    position: int | None = None,
) -> tuple[hm.Frame, ...]:
    """Return the source lines of an instruction; for a scan's own operations, its loop's lines.

    ``position`` is the place of the instruction, which XLA may have moved to before the loop.
    """
    if not metadata.frames or not _OF_A_SCAN.fullmatch(metadata.op_name):
        return metadata.frames
    for caller in module.computations.values():
        for instruction, calls in caller.calls():
            if instruction.opcode == "while" and computation.name in calls:
                return module.metadata(instruction).frames or metadata.frames
    loops = () if position is None else _next_loops(computation, position)
    found = [module.metadata(loop).frames for loop in loops]
    return found[0] if len({frames[:1] for frames in found}) == 1 else metadata.frames


def _next_loops(computation: hm.Computation, position: int) -> list[hm.Instruction]:
    """Return the loops that use an instruction's result, directly or behind other instructions."""
    instructions, users, queue = computation.instructions, computation.users(), [position]
    for place in queue:  # the list grows meanwhile
        if instructions[place].opcode != "while" and len(queue) < _NEAR:
            queue += [user for user in users[place] if user not in queue]
    return [instructions[place] for place in queue if instructions[place].opcode == "while"]


def _majority(names: Iterable[_Weighed]) -> tuple[str, hm.Metadata]:
    """Return the phase of most bytes ("mixed" without a majority), and the first name in it."""
    sizes: collections.Counter[str] = collections.Counter()
    first: dict[str, hm.Metadata] = {}
    for metadata, size in names:
        phase = phase_of(metadata.op_name)
        sizes[phase] += size
        first.setdefault(phase, metadata)
    phase, most = sizes.most_common(1)[0]
    if len(sizes) == 1 or 2 * most > sum(sizes.values()):
        return phase, first[phase]
    return "mixed", first[phase]


class PartNames:
    """The phases and names of a computation's collectives and of the parts of combined ones."""

    def __init__(self, module: hm.Module, computation: hm.Computation):
        self._module = module
        self._computation = computation
        self._instructions = computation.instructions
        self._named = "op_name" in module.text
        # Three caches. By a collective's position: the collective with its -done, and the
        # instructions that take ranges of its flat result. By an operand's position: the arrays
        # that are packed into the operand.
        self._ends: dict[int, list[int]] = {}
        self._cuts: dict[int, _Ranges] = {}
        self._packed: dict[int, _Ranges] = {}

    def whole(self, position: int) -> tuple[str, hm.Metadata]:
        """Return the phase and the metadata of a collective that is not combined."""
        metadata = self._module.metadata(self._instructions[position])
        if metadata.op_name:
            return phase_of(metadata.op_name), metadata
        return self._around(self._instructions[position].operands, [position])

    def part(
        self, position: int, operand: int, elements: tuple[int, int] | None = None
    ) -> tuple[str, hm.Metadata]:
        """Return the phase and the metadata of one part; op_name is empty if it has none."""
        takers = self._takers(position, operand, elements)
        names = self._own(takers)
        if names:
            return _majority(names)
        whole, made_of = self._instructions[position].operands[operand], None
        if elements is not None:
            if whole not in self._packed:
                self._packed[whole] = _ranges(self._concatenated(whole))
            made_of = _overlapping(self._packed[whole], *elements)
        return self._around(made_of or [whole], takers)

    def is_stacked(self, position: int, operand: int) -> bool:
        """Return whether a loop made an operand, and no later operation packs other arrays into it.

        The proof may have separate ranges for the loop's first trip and for its other trips.
        """
        queue, is_a_loops = [self._instructions[position].operands[operand]], False
        for place in queue:  # the list grows meanwhile
            instruction = self._instructions[place]
            if instruction.opcode == "while":
                is_a_loops = True
                continue
            within = (self._module.opcodes[name] for name in instruction.calls)
            if not _PACKS.isdisjoint({instruction.opcode}.union(*within)) or len(queue) > _NEAR:
                return False
            queue += [o for o in instruction.operands if o not in queue]
        return is_a_loops

    def _around(self, made_of: Sequence[int], takers: Sequence[int]) -> tuple[str, hm.Metadata]:
        """Return the phase and source of the nearest named operands, or else of the users."""
        if not self._named:
            return "unknown", hm.Metadata()
        names = self._nearest(made_of, lambda place: self._instructions[place].operands)
        if not names:
            users = self._computation.users()
            after = [*itertools.chain.from_iterable(users[taker] for taker in takers)]
            names = self._nearest(after, users.__getitem__)
        phase, metadata = _majority(names) if names else ("unknown", hm.Metadata())
        return phase, metadata._replace(op_name="")

    def _nearest(self, start: Sequence[int], on: Callable[[int], Sequence[int]]) -> list[_Weighed]:
        """Return the first name on each path from some instructions."""
        names, queue = [], collections.deque(start)
        seen = set(start)
        while queue and len(seen) < _NEAR:
            position = queue.popleft()
            instruction = self._instructions[position]
            metadata = self._module.metadata(instruction)
            # A parameter is named after the argument, which says nothing about the phase.
            if metadata.op_name and instruction.opcode != "parameter":
                names.append((metadata, instruction.shape.bytes))
                continue
            fresh = [p for p in dict.fromkeys(on(position)) if p not in seen]
            seen.update(fresh)
            queue.extend(fresh)
        return names

    def _takers(self, position: int, operand: int, elements: tuple[int, int] | None) -> list[int]:
        """Return the instructions that extract a part from the result."""
        instructions, users = self._instructions, self._computation.users()
        if position not in self._ends:
            ends = self._ends[position] = [position]
            for end in ends:  # the list grows meanwhile
                ends += [u for u in users[end] if instructions[u].opcode.endswith("-done")]
        ends = self._ends[position]
        if elements is None:
            takers = itertools.chain.from_iterable(users.taking(end, operand) for end in ends)
            return [t for t in takers if instructions[t].opcode == "get-tuple-element"]
        if position not in self._cuts:
            takers = itertools.chain.from_iterable(users[end] for end in ends)
            cuts = [(self._slice(instructions[t]), t) for t in takers]
            self._cuts[position] = _ranges([(*cut, taker) for cut, taker in cuts if cut])
        return _overlapping(self._cuts[position], *elements)

    def _own(self, takers: Sequence[int]) -> list[_Weighed]:
        """Return the name of each taker, or of the first named user that only changes its form."""
        names = []
        for position in takers:
            for _ in range(16):
                instruction = self._instructions[position]
                metadata = self._module.metadata(instruction)
                if metadata.op_name:
                    names.append((metadata, instruction.shape.bytes))
                    break
                following = self._computation.users()[position]
                if len(following) != 1 or not self._is_form(self._instructions[following[0]]):
                    break
                (position,) = following
        return names

    def _is_form(self, instruction: hm.Instruction) -> bool:
        if instruction.opcode != "fusion":
            return instruction.opcode in _SAME
        return all(self._module.opcodes[name] <= _FORMS for name in instruction.calls)

    def _concatenated(self, position: int) -> list[tuple[int, int, int]]:
        """Return the ranges of a flat array that a concatenation, maybe in a fusion, packs."""
        outer = inner = self._instructions[position]
        within = self._computation
        if outer.opcode == "fusion" and len(outer.calls) == 1:
            within = self._module.computations[outer.calls[0]]
            inner = within.instructions[within.root]
        if inner.opcode != "concatenate" or len(inner.shape.dimensions) != 1:
            return []
        ranges, start = [], 0
        for operand in inner.operands:
            part = within.instructions[operand]
            if within is not self._computation:
                if part.opcode != "parameter" or int(part.literal) >= len(outer.operands):
                    return []
                operand = outer.operands[int(part.literal)]
            ranges.append((start, start + part.shape.element_count, operand))
            start += part.shape.element_count
        return ranges

    def _slice(self, instruction: hm.Instruction) -> tuple[int, int] | None:
        """Return the range that a slice, maybe in a fusion, takes from a flat array."""
        if instruction.opcode == "fusion" and len(instruction.operands) == 1 == len(
            instruction.calls
        ):
            inner = self._module.computations[instruction.calls[0]]
            instruction = hm.behind(inner, inner.root, ("bitcast", "reshape", "copy"))
            if "parameter" not in [inner.instructions[o].opcode for o in instruction.operands]:
                return None
        text = instruction.attribute("slice") if instruction.opcode == "slice" else None
        match = _SLICE.fullmatch((text or "").replace(" ", ""))
        return (int(match[1]), int(match[2])) if match else None


# A row for each range of a flat array's elements: start, end, and an instruction's position.
_Ranges = np.ndarray


def _ranges(rows: list[tuple[int, int, int]]) -> _Ranges:
    return np.array(sorted(rows), np.int64).reshape(-1, 3)


def _overlapping(ranges: _Ranges, start: int, end: int) -> list[int]:
    """Return the positions of the ranges that share elements with ``start`` to ``end``."""
    positions: list[int] = ranges[(ranges[:, 0] < end) & (ranges[:, 1] > start), 2].tolist()
    return positions
