"""A judged program, as the kinds of waste read it: its collectives' sites, loops and overlap."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from shardrules import hlo
from shardrules.costs import accounts, launches, walk
from shardrules.costs.advice import operation
from shardrules.costs.waste.shared import loop_flow
from shardrules.costs.waste.shared.values import Value, Values
from shardrules.hlo.proof import loops
from shardrules.hlo.reader.module import Users

_T = TypeVar("_T")

# Up to these bytes a run takes about as long as its round trip: 5 us for an all-reduce at 100 GB/s.
SMALL = 256 * 1024

# How a jit with shardings writes the part of a reduction that needs no communication.
WITHIN_SHARDS = (
    "reduce x.reshape(n, -1, *x.shape[1:]) over all but its first dimension, n being the number of "
    "shards"
)

# The operations of which XLA's partitioner moves the array that a program constrains.
_CONSTRAINED = frozenset(
    "sharding_constraint convert_element_type abs cos exp log logistic neg rsqrt sin sqrt square "
    "tanh".split()
)


@dataclasses.dataclass(frozen=True)
class Hint:
    """A collective that is needed and could be cheaper.

    Attributes:
      kind: one of ``KINDS``.
      verdict: the verifier's.
      entry: its line in the account.
      bytes_before, bytes_after: operand bytes on one device, over all runs of one execution;
        ``bytes_before`` is None where a loop's trip count isn't known.
      advice: the change.
      round_trips_before, round_trips_after: how often all devices of a group wait for each other,
        over all runs; a combined collective's first part counts them. None as for bytes.
      sent_before, sent_after: what one device sends, as an account's wire bytes, over all runs.
      waited_for: nothing large in its computation can overlap with it.
    """

    kind: str
    verdict: hlo.Verdict
    entry: accounts.Entry
    bytes_before: int | None
    bytes_after: int | None
    advice: str
    round_trips_before: int | None = None
    round_trips_after: int | None = None
    sent_before: int | None = None
    sent_after: int | None = None
    waited_for: bool = False


class Kind(NamedTuple):
    """One kind of waste.

    Attributes:
      name: of the hints.
      looks: what it looks like in a program.
      shard_map, jit: what to type instead in a shard_map, and in a jit with shardings.
      find: returns the hint for a collective, or None.
    """

    name: str
    looks: str
    shard_map: str
    jit: str
    find: Callable[[Site], Hint | None]


class Program(Values):
    """A judged program; what several kinds look up in it is kept."""

    def __init__(self, judgement: hlo.Judgement):
        super().__init__(judgement.module)
        self.runs = loops.executions(self.module)
        self.partitions = judgement.partitions
        self.device_count = judgement.partitions * judgement.replicas
        self._remembered: dict[tuple[Any, ...], Any] = {}
        self._overlaps: dict[tuple[str, int], bool] = {}
        entries = accounts.of(judgement).entries
        self.sites = [Site(self, *both) for both in zip(judgement.verdicts, entries)]
        self._at: dict[tuple[str, int], list[Site]] = {}
        for site in self.sites:
            self._at.setdefault((site.computation.name, site.position), []).append(site)

    def parts(self, name: str, position: int) -> list[Site]:
        """List the sites of one instruction's verdicts."""
        return self._at.get((name, position), [])

    def remembered(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Call a function, once for the same arguments."""
        key = (function, *map(id, arguments))
        if key not in self._remembered:
            self._remembered[key] = function(*arguments)
        return self._remembered[key]

    # -- for loop_flow ----------------------------------------------------------------------------

    @functools.cached_property
    def unread(self) -> dict[loop_flow.Source, loop_flow.Unread]:
        """List the results of collectives in loops that no trip reads."""
        return loop_flow.unread(self)

    def results_in(self, name: str) -> list[loop_flow.Source]:
        """List the results in a computation that might be made after the loop."""
        places = [position for where, position in self._at if where == name]
        return [key for position in places for key in self.results_at(name, position).values()]

    def results_at(self, name: str, position: int) -> dict[int, loop_flow.Source]:
        """Give one collective's results that might be made after the loop, by operand or range."""
        sites = self.parts(name, position)
        if len({s.operand for s in sites}) > 1 and not all(s.whole for s in sites):
            return {}
        kinds = ("all-reduce", "all-gather")
        return {s.part: s.key for s in sites if s.needed and s.collective.kind in kinds}

    # -- overlap ----------------------------------------------------------------------------------

    @functools.cached_property
    def platform(self) -> str | None:
        """Name the platform, gpu or tpu; None for others."""
        return launches.platform(self.module)

    def overlaps(self, name: str, position: int) -> bool:
        """Tell whether anything large in a computation is independent of an instruction."""
        key = (name, position)
        if key not in self._overlaps:
            instructions, users = self.module.computations[name].instructions, self.users(name)
            makers = walk.reached([position], lambda n: instructions[n].operands)
            dependent = makers | walk.reached([position], lambda n: users[n])
            self._overlaps[key] = any(
                n not in dependent and self.is_large(i) for n, i in enumerate(instructions)
            )
        return self._overlaps[key]

    def is_large(self, instruction: hlo.Instruction) -> bool:
        """Tell whether an instruction may take as long as a round trip."""
        opcode = instruction.opcode
        if opcode in ("dot", "convolution", "custom-call", "while", "sort", "conditional"):
            return bool(instruction.operands)
        if opcode in ("fusion", "call"):
            called = [self.module.computations[name] for name in instruction.calls]
            inner = {i.opcode for computation in called for i in computation.instructions}
            if inner & {"dot", "convolution", "custom-call"}:
                return True
        no_work = opcode in ("parameter", "tuple", "get-tuple-element", "bitcast", "constant")
        return not no_work and instruction.shape.bytes >= 2**20


def _positions(computation: hlo.Computation) -> dict[str, int]:
    return {instruction.name: n for n, instruction in enumerate(computation.instructions)}


def _results(instruction: hlo.Instruction) -> list[hlo.Shape]:
    leaves, count = instruction.shape.leaves(), len(instruction.operands)
    return leaves[-count:] if len(leaves) in (count, 2 * count) else []


class Site:
    """One verdict's place: a collective, a part of a combined one or a range of a flat one."""

    def __init__(self, program: Program, verdict: hlo.Verdict, entry: accounts.Entry):
        collective = verdict.collective
        self.program = program
        self.module = program.module
        self.verdict = verdict
        self.entry = entry
        self.collective = collective
        self.computation = program.module.computations[collective.computation]
        self.position = program.remembered(_positions, self.computation)[collective.name]
        self.operand = collective.operand
        self.part = verdict.range.start if verdict.range else collective.operand
        self.needed = verdict.verdict == "needed" and not verdict.divergent
        self.adds = collective.kind == "all-reduce" and collective.reduction == "add"

    @property
    def users(self) -> Users:
        """Give the users of each instruction beside it."""
        return self.program.users(self.computation.name)

    @property
    def instruction(self) -> hlo.Instruction:
        """Give the collective."""
        return self.computation.instructions[self.position]

    @property
    def key(self) -> loop_flow.Source:
        """Give what tells its result from others."""
        return self.computation.name, self.position, self.part

    @property
    def source(self) -> int:
        """Give the position of its operand."""
        return self.instruction.operands[self.operand]

    @property
    def taken(self) -> hlo.Shape:
        """Give its operand's shape."""
        return self.computation.instructions[self.source].shape

    @property
    def result(self) -> hlo.Shape | None:
        """Give the shape of its operand's result; None where the text does not show it."""
        results = self.program.remembered(_results, self.instruction)
        return results[self.operand] if results else None

    @property
    def whole(self) -> bool:
        """Tell whether it is one operand, not a range of a flat one."""
        return self.verdict.range is None

    @property
    def in_loop(self) -> bool:
        """Tell whether it stands directly in a loop that may make more than one trip."""
        return self.computation.name in self.program.loops and self.entry.runs != 1

    @property
    def op_name(self) -> str:
        """Give its name, or where XLA left it without one that of its operand."""
        maker = self.computation.instructions[self.source]
        return self.collective.op_name or self.module.metadata(maker).op_name

    @property
    def in_shard_map(self) -> bool:
        """Tell whether a shard_map holds it; else XLA's partitioner made it."""
        return not self.op_name or "shard_map/" in self.op_name or "pmap" in self.op_name

    @property
    def in_inner_shard_map(self) -> bool:
        """Tell whether a loop holds the shard_map that holds it."""
        return self.in_shard_map and re.search("while.*shard_map", self.op_name) is not None

    @property
    def is_written(self) -> bool:
        """Tell whether the source says it: a shard_map, a constraint, or a reduction that runs."""
        # What the partitioner adds for another operation's operands, or in the backward pass,
        # comes and goes with its other choices: no change of the source is sure to replace it.
        name = self.op_name.rpartition("/")[2]
        if self.in_shard_map or self.collective.kind != "all-reduce":
            return self.in_shard_map or name in _CONSTRAINED
        return self.entry.phase == "forward" and name.startswith("reduce_")

    @property
    def where(self) -> str:
        """Give its source line, or its name, for people."""
        return self.entry.source or self.collective.name

    @property
    def over(self) -> str:
        """Name its axes for a line of code, ``'data'`` or ``('data', 'model')``."""
        axes = self.entry.axes or ()
        return repr(axes[0] if len(axes) == 1 else tuple(axes)) if axes else "axis_name"

    def made_by(self, position: int, through: frozenset[str]) -> Value:
        """Follow a value beside it back to what made it, out of and into fusions."""
        return self.program.made_by(Value.at(self.computation, position), through)

    def runs_of(self, computation: str) -> int:
        """Count how often another computation runs, 1 where it isn't known."""
        run = self.program.runs.get(computation)
        return (run.count if run else None) or 1

    def hint(
        self,
        kind: str,
        advice: str,
        *,
        bytes_after: int | None,
        trips_after: int | None,
        sent_after: int | None = None,
        together: bool = False,
    ) -> Hint:
        """Make a hint from what is after the change, over all runs.

        ``together``: its round trips are those of the collective's other parts as well.
        """
        entry = self.entry
        first = self.program.parts(self.computation.name, self.position)[0] is self
        # The kind of collective stays, unless ``sent_after`` is given.
        if sent_after is None and bytes_after is not None and entry.bytes:
            sent_after = -(-bytes_after * entry.wire_bytes // entry.bytes)
        return Hint(
            kind,
            self.verdict,
            entry,
            self.in_all(entry.bytes),
            bytes_after,
            advice,
            entry.runs if first else 0,
            trips_after if first or not together else 0,
            self.in_all(entry.wire_bytes),
            sent_after,
            not self.program.overlaps(self.computation.name, self.position),
        )

    def pays_alone(self, after: int | None) -> bool:
        """Tell whether fewer bytes are worth a part's own round trip outside its collective."""
        before = self.in_all(self.entry.bytes)
        return before is not None and after is not None and before - after > SMALL

    def in_all(self, amount: int) -> int | None:
        """Give an amount of one run over all runs; None where their count isn't known."""
        return None if self.entry.runs is None else self.entry.runs * amount

    def without(self, kind: str, advice: str) -> Hint:
        """Make the hint that the collective goes away."""
        return self.hint(kind, advice, bytes_after=0, trips_after=0)

    def smaller(self, kind: str, advice: str, size: int, sent: int | None = None) -> Hint:
        """Make the hint that each run takes fewer bytes, or is of another kind that sends fewer."""
        return self.hint(
            kind,
            advice,
            bytes_after=self.in_all(size),
            trips_after=self.entry.runs,
            sent_after=None if sent is None else self.in_all(sent),
            together=sent is None,
        )


def line(site: Site, where: str) -> str:
    """Return the line to type where the psum may be the gradient of a replicated array.

    The check gives that psum a name of its own. With the check off, on JAX to 0.5.3 and outside
    of shard_map ``vary`` does nothing.
    """
    checked = operation(site.collective) == "psum_invariant"
    if site.entry.phase != "backward" or not site.entry.axes or not checked:
        return ""
    return (
        f"; if it is the gradient of a replicated array, cast that array {where} instead: "
        f"x = shardrules.vary(x, {', '.join(map(repr, site.entry.axes))})"
    )
