"""Hints: collectives that are needed and could be cheaper, each with the change."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from shardrules import hlo
from shardrules.costs import accounts, findings, sums
from shardrules.hlo.proof import loops
from shardrules.hlo.reader.module import Users

__all__ = ["KINDS", "Hint", "dearer", "hints"]

KINDS = ("reduce first", "add first", "repeated", "after the loop", "only returned")

# Functions of their operands alone: of operands that stay the same they stay the same.
_PURE = sums.PASS_ON | frozenset(
    "constant iota broadcast slice dynamic-slice concatenate pad add subtract multiply divide "
    "negate maximum minimum select compare and or not exponential tanh rsqrt dot fusion tuple "
    "partition-id replica-id all-gather all-gather-start all-gather-done all-reduce "
    "all-reduce-start reduce-scatter collective-permute collective-permute-start "
    "collective-permute-done all-to-all".split()
)


# May give something else on each trip, or do something besides.
_IMPURE = frozenset(
    "rng rng-get-and-update-state custom-call infeed outfeed send recv send-done recv-done".split()
)


@dataclasses.dataclass(frozen=True)
class Hint:
    """A collective that is needed and could be cheaper.

    Attributes:
      kind: ``reduce first``, ``add first``, ``repeated``, ``after the loop`` or ``only returned``.
      verdict: the verifier's.
      entry: its line in the account.
      bytes_before, bytes_after: operand bytes on one device, over all runs of one execution;
        ``bytes_before`` is None where a loop's trip count isn't known.
      advice: the change.
    """

    kind: str
    verdict: hlo.Verdict
    entry: accounts.Entry
    bytes_before: int | None
    bytes_after: int
    advice: str


def hints(judgement: hlo.Judgement) -> list[Hint]:
    """List the needed collectives that could move less, as far as the program shows it."""
    program = _Program(judgement)
    found = []
    for verdict, entry in zip(judgement.verdicts, accounts.of(judgement).entries):
        if verdict.verdict == "needed" and not verdict.divergent:
            at = program.place(verdict)
            hint = (
                program.repeated(at, entry)
                or program.accumulated(at, entry)
                or program.returned(at, entry)
                or program.summed(at, entry)
            )
            if hint is not None:
                found.append(hint)
    return found


class _Place(NamedTuple):
    """Where a collective stands.

    Attributes:
      verdict: on it.
      computation, position: where it stands.
      users: the computation's users of each instruction.
      sums: it is an all-reduce that adds, of one operand as a whole.
    """

    verdict: hlo.Verdict
    computation: hlo.Computation
    position: int
    users: Users
    sums: bool


class _Program:
    """A judged program, and what is looked up in it again and again."""

    def __init__(self, judgement: hlo.Judgement):
        self.module = judgement.module
        self.runs = loops.executions(self.module)
        # By the name of a loop's body: the computation around it, and its conditions.
        self.around: dict[str, str] = {}
        self.conditions: dict[str, list[hlo.Computation]] = {}
        for computation in self.module.computations.values():
            for position in computation.calling:
                if computation.instructions[position].opcode == "while":
                    parts = loops.parts(self.module, computation.instructions[position])
                    self.around.setdefault(parts[1].name, computation.name)
                    self.conditions.setdefault(parts[1].name, []).append(parts[0])
        self._numbers: dict[str, dict[str, int]] = {}
        self._users: dict[str, Users] = {}
        self._stays: dict[str, set[int]] = {}

    def place(self, verdict: hlo.Verdict) -> _Place:
        """Find where the collective of a verdict stands."""
        collective = verdict.collective
        name = collective.computation
        computation = self.module.computations[name]
        if name not in self._numbers:
            self._numbers[name] = {i.name: n for n, i in enumerate(computation.instructions)}
            self._users[name] = computation.users()
        adds = collective.kind == "all-reduce" and collective.reduction == "add"
        return _Place(
            verdict,
            computation,
            self._numbers[name][collective.name],
            self._users[name],
            adds and verdict.range is None,
        )

    def repeated(self, at: _Place, entry: accounts.Entry) -> Hint | None:
        """Find a collective in a loop whose operand is the same on every trip."""
        name = at.computation.name
        if name not in self.around or entry.runs == 1:
            return None
        if name not in self._stays:
            self._stays[name] = _invariant(self.module, at.computation)
        operands = at.computation.instructions[at.position].operands
        if operands[at.verdict.collective.operand] not in self._stays[name]:
            return None
        change = "its operand is the same on every trip of the loop: run it before the loop"
        return self._once("repeated", at, entry, change, "the result then stays in memory")

    def accumulated(self, at: _Place, entry: accounts.Entry) -> Hint | None:
        """Find an all-reduce in a loop whose results are only added up."""
        if not at.sums or at.computation.name not in self.around or entry.runs == 1:
            return None
        operand = at.verdict.collective.operand
        conditions = self.conditions[at.computation.name]
        where = (self.module, at.computation, at.users, at.position, operand)
        if not _accumulated(*where, conditions):
            return None
        change = (
            "its results are only added up over the loop's trips: carry the sum of its operands "
            "and psum that once after the loop"
        )
        return self._once("after the loop", at, entry, change, "equal up to rounding", _line(entry))

    def _once(
        self, kind: str, at: _Place, entry: accounts.Entry, change: str, note: str, line: str = ""
    ) -> Hint | None:
        """Make the hint that a collective in a loop can run once beside it; None if that is more.

        Its advice is the change with the bytes now and then, a note, and a line to type.
        """
        outer = self.runs.get(self.around[at.computation.name])
        after = entry.bytes * ((outer.count if outer else None) or 1)
        before = _moved(entry)
        if before is not None and before <= after:
            return None
        now = f"{entry.bytes} B on every trip" if before is None else f"{before} B"
        advice = f"{change}, and {now} become {after} B ({note}){line}"
        return Hint(kind, at.verdict, entry, before, after, advice)

    def returned(self, at: _Place, entry: accounts.Entry) -> Hint | None:
        """Find an all-gather whose result is only returned."""
        collective = at.verdict.collective
        if collective.kind != "all-gather" or not at.computation.is_entry:
            return None
        where = (self.module, at.computation, at.users, at.position, collective.operand)
        if not _only_returned(*where):
            return None
        over = f" over {','.join(collective.axes)}" if collective.axes else ""
        return Hint(
            "only returned",
            at.verdict,
            entry,
            _moved(entry),
            0,
            f"its result is only returned: leave that output sharded{over}, with the axis "
            f"in its out_specs instead of the all_gather, and {entry.bytes} B become 0 B "
            "(the array is the same; a device then holds its shard of it)",
        )

    def summed(self, at: _Place, entry: accounts.Entry) -> Hint | None:
        """Find an all-reduce whose result is only summed up, or added to another one's."""
        if not at.sums:
            return None
        operand = at.verdict.collective.operand
        where = (self.module, at.computation, at.users, at.position, operand)
        size = sums.reduced_after(*where)
        if size is not None and size < entry.bytes:
            return Hint(
                "reduce first",
                at.verdict,
                entry,
                _moved(entry),
                size * (entry.runs or 1),
                "its result is only summed up on each device: reduce "
                "before you psum (or cast earlier, with shardrules.vary before the "
                f"broadcast), and {entry.bytes} B become {size} B{_line(entry)}",
            )
        if not sums.added_to_another(*where):
            return None
        return Hint(
            "add first",
            at.verdict,
            entry,
            _moved(entry),
            0,
            "its result is only added to that of another psum over the same devices: "
            f"add the operands and psum that once, and {2 * entry.bytes} B of both "
            f"become {entry.bytes} B (equal up to rounding){_line(entry)}",
        )


def _moved(entry: accounts.Entry) -> int | None:
    """Give the bytes of all runs; None in a loop whose count isn't known."""
    return None if entry.runs is None else entry.runs * entry.bytes


def dearer(found: list[Hint]) -> list[findings.Finding]:
    """List the all-reduces among hints as findings, with the bytes now and then."""
    return [
        findings.Finding(h.kind, h.verdict, h.entry, h.advice)
        for h in found
        if h.entry.kind == "all-reduce"
    ]


def _line(entry: accounts.Entry) -> str:
    """Return the line to type where the psum is a cast's transpose, or nothing."""
    if entry.phase != "backward" or not entry.axes:
        return ""
    axes = ", ".join(map(repr, entry.axes))
    return (
        f"; where it is the psum of a cast's cotangent, cast there: x = shardrules.vary(x, {axes})"
    )


def _accumulated(
    module: hlo.Module,
    body: hlo.Computation,
    users: Users,
    position: int,
    element: int,
    conditions: Sequence[hlo.Computation],
) -> bool:
    """Tell whether a loop adds an all-reduce's result to a carry, and does nothing else with both.

    psum is linear, so that the sum of psums is the psum of the sum, and that of pmeans, which are
    psums times a constant, too. XLA's compilers for TPU and
    GPU move such an all-reduce behind a plain loop themselves (seen with JAX 0.10.2); the one for
    CPU doesn't.
    """
    root = body.instructions[body.root]
    end = sums.followed(body, users, position, element, sums.LINEAR)
    while end is not None and sums.scales(module, body, *end):
        end = sums.followed(body, users, end[0], 0, sums.LINEAR)
    if end is None or root.opcode != "tuple":
        return False
    total = end[0]
    carry = sums.adds(module, body, *end)
    if carry is None:
        return False
    while body.instructions[carry].opcode in ("copy", "bitcast", "reshape"):
        if len(users[carry]) != 1:
            return False
        carry = body.instructions[carry].operands[0]
    taken = body.instructions[carry]
    if (
        taken.opcode != "get-tuple-element"
        or len(users[carry]) != 1
        or (body.instructions[taken.operands[0]].opcode != "parameter")
    ):
        return False
    index = taken.attribute("index") or ""
    # No other instruction takes this element of the carry, nor the carry as a whole; neither does
    # the loop's condition, for which each trip's sum is needed.
    if any(user != carry and _takes(body, user, index) for user in users[taken.operands[0]]):
        return False
    for condition in conditions:
        takers = condition.users()
        for position, one in enumerate(condition.instructions):
            if one.opcode == "parameter" and (
                position == condition.root
                or any(_takes(condition, user, index) for user in takers[position])
            ):
                return False
    back = sums.followed(body, users, total, 0, frozenset(("copy", "bitcast", "reshape")))
    if back is None or back[0] != body.root:
        return False
    return [k for k, o in enumerate(root.operands) if o == back[1]] == [
        int(index) if index.isdecimal() else -1
    ]


def _takes(computation: hlo.Computation, user: int, index: str) -> bool:
    """Tell whether a tuple's user takes the element at an index, or the tuple as a whole."""
    one = computation.instructions[user]
    return one.opcode != "get-tuple-element" or one.attribute("index") == index


def _only_returned(
    module: hlo.Module, entry: hlo.Computation, users: Users, position: int, element: int
) -> bool:
    """Tell whether ENTRY returns an all-gather's result, and does nothing else with it.

    Told only where the result reaches the root as it is, or copied: an output that is computed
    from the whole array needs it, and one of another shape need not be sharded as any spec says.
    """
    through = frozenset("copy bitcast get-tuple-element all-gather-done".split())
    if entry.instructions[position].opcode.endswith("-start"):  # its tuple holds operands too
        if len(users[position]) != 1:
            return False
        (position,) = users[position]
    last = position
    shapes = {_part(entry.instructions[position].shape, element)}
    for _ in range(64):
        following = users.taking(last, element)
        if last == entry.root:
            return not following and len(shapes) == 1 and None not in shapes
        if len(following) != 1:
            return False
        instruction = entry.instructions[following[0]]
        if following[0] == entry.root and instruction.opcode == "tuple":
            return (
                instruction.operands.count(last) == 1 and len(shapes) == 1 and (None not in shapes)
            )
        copied = (
            instruction.opcode == "fusion"
            and len(instruction.operands) == 1
            and all(
                i.opcode in ("parameter", "copy", "bitcast")
                for i in module.computations[instruction.calls[0]].instructions
            )
        )
        if instruction.opcode not in through and not copied:
            return False
        last = following[0]
        shapes.add(_part(instruction.shape, element))
    return False


def _part(shape: hlo.Shape, element: int) -> tuple[int, ...] | None:
    """Give the sizes of a collective's one result; None where there is no such."""
    if shape.elements is None:
        return shape.dimensions
    if element < len(shape.elements) and not shape.elements[element].is_tuple:
        return shape.elements[element].dimensions
    return None


def _invariant(module: hlo.Module, body: hlo.Computation) -> set[int]:
    """List the positions in a loop's body whose values are the same on every trip."""
    root = body.instructions[body.root]
    if root.opcode != "tuple":
        return set()

    def passed_on(position: int) -> int:
        while body.instructions[position].opcode == "copy":
            position = body.instructions[position].operands[0]
        return position

    found: set[int] = set()
    for position, instruction in enumerate(body.instructions):
        operands = instruction.operands
        if (
            instruction.opcode == "get-tuple-element"
            and body.instructions[operands[0]].opcode == "parameter"
        ):
            index = int(instruction.attribute("index") or -1)
            if 0 <= index < len(root.operands):
                back = body.instructions[passed_on(root.operands[index])]
                if (
                    back.opcode == "get-tuple-element"
                    and back.operands == operands
                    and back.attribute("index") == instruction.attribute("index")
                ):
                    found.add(position)
        elif (
            instruction.opcode in _PURE
            and all(o in found for o in operands)
            and _pure(module, instruction.calls)
        ):
            found.add(position)
    return found


def _pure(module: hlo.Module, names: Sequence[str]) -> bool:
    """Tell whether what a fusion or a reduction calls depends on its parameters alone."""
    stack, seen = [*names], {*names}
    while stack:
        for instruction in module.computations[stack.pop()].instructions:
            if instruction.opcode in _IMPURE:
                return False
            fresh = {*instruction.calls} - seen
            seen |= fresh
            stack += fresh
    return True
