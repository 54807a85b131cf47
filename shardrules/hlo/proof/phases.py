"""Finds the phase (forward, backward) and the source line of each part of a collective.

XLA combines collectives, and names the combined one after its first part, all parts or nothing.
Each part keeps its own metadata on the instruction that extracts it (a get-tuple-element; on GPU,
the users of a slice of the flat array). We read that first, so combining makes no difference. A
part without a name there gets the phase and the line of its operands, or else of its users, by the
majority of their bytes.
"""

from __future__ import annotations

import bisect
import collections
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence

from shardrules.hlo.reader import module as hm

_SAME = frozenset("bitcast reshape copy get-tuple-element".split())
_FORMS = _SAME | frozenset("parameter slice transpose".split())
_SLICE = re.compile(r"\{\[(\d+):(\d+)\]\}")
_NEAR = 64  # instructions to visit for a name

# An instruction's name and bytes.
_Weighed = tuple[hm.Metadata, int]


@functools.lru_cache(maxsize=4096)
def phase_of(op_name: str) -> str:
    """Read the phase from an op_name; XLA joins two names with ';', ':' or ' '."""
    if not op_name:
        return "unknown"
    phases = set()
    for part in re.split(r";|\s(?=\w+\()|:(?=\w+[/(])", op_name):
        if "rematted_computation" in part:
            phases.add("recompute")
        elif "transpose(" in part:
            phases.add("backward")
        else:
            phases.add("forward")
    return phases.pop() if len(phases) == 1 else "mixed"


def _majority(names: Iterable[_Weighed]) -> tuple[str, hm.Metadata]:
    """Give the phase of most bytes, "mixed" without a majority, and the first name of it."""
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


class _Places:
    """Positions of instructions, each for a range of a flat array's elements."""

    def __init__(self, ranges: list[tuple[int, int, int]]):
        self._ranges = sorted(ranges)
        # The furthest end so far: an earlier range may reach into a later one.
        self._reach = [*itertools.accumulate((end for _, end, _ in self._ranges), max)]

    def overlapping(self, first: int, end: int) -> list[int]:
        """List the positions of the ranges that share elements with this one."""
        at = bisect.bisect_left(self._ranges, (end,)) - 1
        positions = []
        while at >= 0 and self._reach[at] > first:
            if self._ranges[at][1] > first:
                positions.append(self._ranges[at][2])
            at -= 1
        return positions[::-1]


class PartNames:
    """The phases and names of a module's collectives, and of the parts of combined ones."""

    def __init__(self, module: hm.Module):
        self._module = module
        self._named = "op_name" in module.text
        self._users: dict[str, hm.Users] = {}
        # By a collective's place: it and its -done, and the takers of ranges of its flat array.
        self._ends: dict[tuple[str, int], list[int]] = {}
        self._cuts: dict[tuple[str, int], _Places] = {}
        self._parts: dict[tuple[str, int], _Places] = {}  # by an operand's place: its parts

    def whole(self, computation: hm.Computation, position: int) -> tuple[str, hm.Metadata]:
        """Return the phase and the metadata of a collective that is not combined."""
        metadata = self._module.metadata(computation.instructions[position])
        if metadata.op_name:
            return phase_of(metadata.op_name), metadata
        made_of = computation.instructions[position].operands
        return self._around(computation, made_of, [position])

    def part(
        self,
        computation: hm.Computation,
        position: int,
        operand: int,
        elements: tuple[int, int] | None = None,
    ) -> tuple[str, hm.Metadata]:
        """Return the phase and the metadata of one part; op_name is empty if it has none."""
        takers = self._takers(computation, position, operand, elements)
        names = self._own(computation, takers)
        if names:
            return _majority(names)
        made_of = [computation.instructions[position].operands[operand]]
        if elements is not None:
            made_of = self._packed(computation, made_of[0], elements)
        return self._around(computation, made_of, takers)

    def _around(
        self, computation: hm.Computation, made_of: Sequence[int], takers: Sequence[int]
    ) -> tuple[str, hm.Metadata]:
        """Return phase and source of the nearest named instructions, operands before users."""
        if not self._named:
            return "unknown", hm.Metadata()
        instructions, users = computation.instructions, self._users_in(computation)
        names = self._nearest(
            computation, made_of, lambda position: instructions[position].operands
        )
        if not names:
            after = [user for taker in takers for user in users[taker]]
            names = self._nearest(computation, after, users.__getitem__)
        if not names:
            return "unknown", hm.Metadata()
        phase, metadata = _majority(names)
        return phase, metadata._replace(op_name="")

    def _nearest(
        self, computation: hm.Computation, start: Sequence[int], on: Callable[[int], Sequence[int]]
    ) -> list[_Weighed]:
        """List the first name on each path from some instructions."""
        names, queue = [], collections.deque(start)
        seen = set(start)
        while queue and len(seen) < _NEAR:
            position = queue.popleft()
            instruction = computation.instructions[position]
            metadata = self._module.metadata(instruction)
            # A parameter's name is that of the argument, which says nothing of the phase.
            if metadata.op_name and instruction.opcode != "parameter":
                names.append((metadata, instruction.shape.bytes))
                continue
            for following in on(position):
                if following not in seen:
                    seen.add(following)
                    queue.append(following)
        return names

    def _users_in(self, computation: hm.Computation) -> hm.Users:
        if computation.name not in self._users:
            self._users[computation.name] = computation.users()
        return self._users[computation.name]

    def _takers(self, computation, position, operand, elements) -> list[int]:
        """List the instructions that extract a part from the result."""
        users, instructions = self._users_in(computation), computation.instructions
        where = (computation.name, position)
        if where not in self._ends:
            ends = self._ends[where] = [position]
            for end in ends:  # it grows
                ends += [u for u in users[end] if instructions[u].opcode.endswith("-done")]
        if elements is None:
            takers = [t for end in self._ends[where] for t in users.taking(end, operand)]
            return [t for t in takers if instructions[t].opcode == "get-tuple-element"]
        if where not in self._cuts:
            takers = [t for end in self._ends[where] for t in users[end]]
            cuts = [(taker, self._slice(instructions[taker])) for taker in takers]
            self._cuts[where] = _Places([(*cut, taker) for taker, cut in cuts if cut is not None])
        return self._cuts[where].overlapping(*elements)

    def _own(self, computation: hm.Computation, takers: Sequence[int]) -> list[_Weighed]:
        names, users = [], self._users_in(computation)
        for position in takers:
            for _ in range(16):
                instruction = computation.instructions[position]
                metadata = self._module.metadata(instruction)
                if metadata.op_name:
                    names.append((metadata, instruction.shape.bytes))
                    break
                following = users[position]
                if len(following) != 1 or not self._is_form(computation.instructions[following[0]]):
                    break
                (position,) = following
        return names

    def _is_form(self, instruction: hm.Instruction) -> bool:
        if instruction.opcode != "fusion":
            return instruction.opcode in _SAME
        inside = [
            i for name in instruction.calls for i in self._module.computations[name].instructions
        ]
        return all(i.opcode in _FORMS for i in inside)

    def _packed(
        self, computation: hm.Computation, position: int, elements: tuple[int, int]
    ) -> list[int]:
        where = (computation.name, position)
        if where not in self._parts:
            self._parts[where] = _Places(self._concatenated(computation, position))
        return self._parts[where].overlapping(*elements) or [position]

    def _concatenated(
        self, computation: hm.Computation, position: int
    ) -> list[tuple[int, int, int]]:
        outer = inner = computation.instructions[position]
        within = computation
        if outer.opcode == "fusion" and len(outer.calls) == 1:
            within = self._module.computations[outer.calls[0]]
            inner = within.instructions[within.root]
        if inner.opcode != "concatenate" or len(inner.shape.dimensions) != 1:
            return []
        ranges, start = [], 0
        for operand in inner.operands:
            part = within.instructions[operand]
            if within is not computation:
                if part.opcode != "parameter" or int(part.literal) >= len(outer.operands):
                    return []
                operand = outer.operands[int(part.literal)]
            ranges.append((start, start + part.shape.element_count, operand))
            start += part.shape.element_count
        return ranges

    def _slice(self, instruction: hm.Instruction) -> tuple[int, int] | None:
        if (
            instruction.opcode == "fusion"
            and len(instruction.operands) == len(instruction.calls) == 1
        ):
            inner = self._module.computations[instruction.calls[0]]
            instruction = hm.behind(inner, inner.root, ("bitcast", "reshape", "copy"))
            if (
                instruction.opcode != "slice"
                or inner.instructions[instruction.operands[0]].opcode != "parameter"
            ):
                return None
        if instruction.opcode != "slice":
            return None
        match = _SLICE.fullmatch((instruction.attribute("slice") or "").replace(" ", ""))
        return (int(match[1]), int(match[2])) if match else None
