"""Account for the bytes of a program's collectives, by kind, axes, phase and source line.

The *compiled* account describes the program that runs. The *logical* account describes the program
before any of XLA's passes: the collectives that the source asks for, in the types that it asks for.
The logical account is the same on all platforms. It lacks the collectives that the partitioner adds
for sharded arrays outside shard_map.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from shardrules import hlo
from shardrules.costs import walk
from shardrules.errors import ShardrulesError
from shardrules.hlo.proof.collectives import KINDS

PHASES = ("forward", "backward", "recompute", "mixed", "unknown")
CONVENTION = (
    "bytes are a device's operands; wire bytes are what a device sends by ring "
    "algorithms: all-reduce 2(n-1)/n, reduce-scatter and all-to-all (n-1)/n, "
    "all-gather n-1, permute and broadcast 1 times the operand"
)


def wire_bytes(kind: str, operand_bytes: int, group_size: int, moves: bool = True) -> int:
    """Return the bytes that one device sends for a collective; ``moves``: a permute moves data."""
    # These are ring algorithms: PERFORMANCE.md of NCCL-tests gives the same factors for its "bus
    # bandwidth". A ragged-all-to-all counts as if every piece were full.
    n = max(group_size, 1)
    if kind in ("collective-permute", "collective-broadcast"):
        return operand_bytes if moves and n > 1 else 0
    if kind == "all-gather":
        return (n - 1) * operand_bytes
    return -(-(2 if kind == "all-reduce" else 1) * (n - 1) * operand_bytes // n)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One collective, one operand of a combined one, or one range of a flat one."""

    kind: str  # ``"all-reduce"`` and so on
    axes: tuple[str, ...] | None  # mesh axes in order; None if they aren't known
    over: str  # the axes, or the groups if no axes are known; for people
    phase: str  # one of PHASES
    element_type: str  # XLA's name, ``"bf16"``
    # bytes, wire_bytes: for one run, on one device
    bytes: int
    wire_bytes: int
    # How often one execution of the program runs it; None if a loop's count isn't known.
    runs: int | None
    loop_depth: int  # the number of while loops around it
    # file, line, function: where the source asks for it; empty if the text doesn't say
    file: str
    line: int
    function: str
    # verdict, reason: the verifier's; empty in a logical account
    verdict: str
    reason: str
    groups: str  # the device groups, or a permute's pairs; the same groups have the same text
    at_most: bool  # it is in a branch, and ``runs`` counts as if each branch ran
    # How often it runs if each loop of unknown count makes one trip; else the same as ``runs``.
    each: int
    # The operation of an all-reduce or a reduce-scatter, ``"add"``, or a checksum of several
    # operations; empty for other kinds.
    reduction: str
    # The dimension along which parts are joined or split, ``"0"``; empty for none.
    dimension: str
    # A line inside the loop or the checkpoint, if XLA kept only the loop's or the checkpoint's own
    # line. If the collective has no line, JAX's name for the argument that it moves.
    within: str
    # Its place in the account, and the verdict that it describes.
    number: int = dataclasses.field(compare=False)
    judged: hlo.Verdict = dataclasses.field(compare=False, repr=False)

    @property
    def what(self) -> str:
        return f"{self.phase} {self.kind}({self.over})"

    @property
    def source(self) -> str:
        return str(hlo.Frame(self.file, self.line, self.function)) if self.file else ""

    @property
    def place(self) -> str:
        """Return its innermost known line, or its argument's name, for people."""
        return self.within or self.source


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over entries."""

    sites: int = 0  # places in the program
    # count, bytes, wire_bytes: over all runs in one execution, without sites of unknown count
    count: int = 0
    bytes: int = 0
    wire_bytes: int = 0
    unknown: int = 0  # sites in loops whose trip count isn't known
    # Sites in branches; the sums count every branch, though only one of them runs.
    at_most: int = dataclasses.field(default=0, compare=False)
    # unknown_bytes, unknown_wire_bytes: over the sites of unknown count, if each of their loops
    # makes one trip
    unknown_bytes: int = 0
    unknown_wire_bytes: int = dataclasses.field(default=0, compare=False)

    def plus(self, entry: Entry) -> Totals:
        """Return the sums with one more entry."""
        runs, unknown = entry.runs or 0, entry.runs is None
        return Totals(
            self.sites + 1,
            self.count + runs,
            self.bytes + runs * entry.bytes,
            self.wire_bytes + runs * entry.wire_bytes,
            self.unknown + unknown,
            self.at_most + (entry.at_most and not unknown),
            self.unknown_bytes + unknown * entry.each * entry.bytes,
            self.unknown_wire_bytes + unknown * entry.each * entry.wire_bytes,
        )

    def __str__(self) -> str:
        text = f"{'at most ' if self.at_most else ''}{self.count}, {self.bytes} B"
        if not self.unknown:
            return text
        return (
            f"{text} and {self.unknown} in loops of unknown length, {self.unknown_bytes} B a trip"
        )


@dataclasses.dataclass(frozen=True)
class Account:
    """All entries of a program, in the order of its text."""

    level: str  # ``"compiled"`` or ``"logical"``
    entries: tuple[Entry, ...]  # one for each verdict
    mesh: dict[str, int] | None  # axis sizes in order; None if no mesh is known
    device_count: int  # devices that the program is for

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def by(self, *fields: str) -> dict[tuple[Any, ...], Totals]:
        """Return sums by fields of Entry, in the order of first appearance."""
        names = [*(f.name for f in dataclasses.fields(Entry)), "what", "source"]
        for field in fields:
            if field not in names:
                raise ShardrulesError(
                    f"{field!r} is not a field of an account's entries; the fields are "
                    f"{', '.join(names)}" + near(str(field), names),
                    field=field,
                )
        totals: dict[tuple[Any, ...], Totals] = {}
        for entry in self.entries:
            key = tuple(getattr(entry, field) for field in fields)
            totals[key] = totals.get(key, Totals()).plus(entry)
        return totals

    @property
    def total(self) -> Totals:
        return self.by().get((), Totals())

    @property
    def is_reduced(self) -> bool:
        """Return whether needed all-reduces send at least a tenth of the program's bytes."""
        needed = self.by("kind", "verdict").get(("all-reduce", "needed"))
        return needed is not None and needed.wire_bytes >= self.total.wire_bytes / 10

    def __str__(self) -> str:
        lines = [f"{what}: {totals}" for (what,), totals in self.by("what").items()]
        return "\n".join(lines) or "no collectives"


# A cache of accounts, since a report asks for an account several times; it ends with the judgement.
_MADE: weakref.WeakKeyDictionary[hlo.Judgement, dict[str, Account]] = weakref.WeakKeyDictionary()


def of(judgement: hlo.Judgement, level: str = "compiled") -> Account:
    """Return the account of a judged module; a ``"logical"`` account leaves out the verdicts."""
    made = _MADE.setdefault(judgement, {})
    if level not in made:
        made[level] = _made(judgement, level)
    return made[level]


def _made(judgement: hlo.Judgement, level: str) -> Account:
    entries, module = [], judgement.module
    arguments = {module.metadata(parameter).op_name for parameter in module.entry.parameters}
    of_loops = walk.loop_lines(module)
    for number, verdict in enumerate(judgement.verdicts):
        collective = verdict.collective
        groups = collective.notation
        over = ", ".join(collective.axes or ())
        if collective.axes is None:
            count = len(collective.groups)
            over = f"{count} group{'s' if count != 1 else ''} of {collective.group_size}"
        if collective.axes is None or judgement.mesh is None:
            over += f": {groups}"  # in another program, these axis names may mean other groups
        moves = collective.connections.moves
        frame = collective.source or hlo.Frame("", 0)
        said = (verdict.verdict, verdict.reason) if level == "compiled" else ("", "")
        entries.append(
            Entry(
                collective.kind,
                collective.axes,
                over,
                collective.phase,
                collective.element_type,
                verdict.bytes,
                wire_bytes(collective.kind, verdict.bytes, collective.group_size, moves),
                collective.trip_count,
                collective.loop_depth,
                *frame,
                *said,
                groups,
                collective.at_most,
                collective.each,
                collective.reduction,
                collective.dimension,
                walk.line_within(module, collective, of_loops)
                or walk.argument(module, collective, arguments),
                number,
                verdict,
            )
        )
    return Account(level, tuple(entries), judgement.mesh, judgement.partitions * judgement.replicas)


_SELECTOR = re.compile(
    r"(?:(redundant|overwide|unproven|needed|internal|may hang) )?(?:(\w+) )?([a-z-]+)\(([^()]*)\)"
    r"(?: at (\S+?)(?::(\d+))?)?"
)


def near(name: str, names: Iterable[str]) -> str:
    """Return a suggestion of a similar name; empty if no name is close."""
    close = difflib.get_close_matches(name, list(names), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


class Selector(NamedTuple):
    """A pattern for collectives in an expectation or an allowance; empty fields match all."""

    # verdict, phase, kind: as in Entry
    verdict: str
    phase: str
    kind: str
    axes: frozenset[str] | None  # mesh axes; None, written ``?``, if they aren't known
    file: str  # the end of the source file's path
    line: int  # 1-based, 0 for any

    @classmethod
    def read(cls, text: Any) -> Selector:
        """Read ``"redundant backward all-reduce(data, model) at model.py:12"``."""
        match = _SELECTOR.fullmatch(text) if isinstance(text, str) else None
        is_phase = match is not None and match[2] in (None, *PHASES)
        if match is None or not is_phase or match[3] not in KINDS:
            wrong = ""
            if match is not None and not is_phase:
                wrong = near(match[2], PHASES if match[1] else [*hlo.VERDICTS, *PHASES])
            elif match is not None:
                wrong = near(match[3], KINDS)
            raise ShardrulesError(
                f"{text!r} names no collectives{wrong}{' Write' if wrong else '; write'} the kind "
                "and its mesh axes, such as "
                f"'all-reduce(data)' or 'backward all-gather(data, model)'; phases are "
                f"{', '.join(PHASES)}",
                key=text,
            )
        axes = frozenset(a.strip() for a in match[4].split(",") if a.strip())
        known_axes = None if axes == {"?"} else axes
        verdict, phase, file = (match[n] or "" for n in (1, 2, 5))
        return cls(verdict, phase, match[3], known_axes, file, int(match[6] or 0))

    def check_axes(self, text: str, mesh: Mapping[str, int] | None) -> None:
        """Raise an error if the selector, written as ``text``, names axes that the mesh lacks."""
        for axis in sorted((self.axes or frozenset()) - set(mesh or ())):
            if mesh:  # without a mesh, no name is known to be wrong
                raise ShardrulesError(
                    f"{text!r} names the axis {axis!r}, but the mesh has "
                    f"{', '.join(mesh)}{near(axis, mesh)}",
                    key=text,
                )

    def matches(self, entry: Entry) -> bool:
        return (
            self.verdict in ("", entry.verdict)
            and self.phase in ("", entry.phase)
            and self.kind == entry.kind
            and self.axes == (None if entry.axes is None else frozenset(entry.axes))
            and (not self.file or ("/" + entry.file).endswith("/" + self.file))
            and self.line in (0, entry.line)
        )
