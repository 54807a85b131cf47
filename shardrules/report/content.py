"""What a report says, whatever it is written as."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Sequence

from shardrules import hlo
from shardrules.arguments import checked
from shardrules.costs import accounts, estimates, findings, outputs, transfers
from shardrules.costs.findings import Finding
from shardrules.costs.timings import Timings
from shardrules.costs.waste import Hint, dearer, hints
from shardrules.costs.worth import Ledger, Worth
from shardrules.report import grouping
from shardrules.report.blocks import Block, Item
from shardrules.report.sections import sections

__all__ = ["Content", "content", "item"]

UNEQUAL = "Outputs called replicated that are not proven equal"
COLUMNS = ("collective", "verdict", "sites", "runs", "bytes", "wire bytes", "in all", "source")
SHARE = "share"
MEASURED = (
    "measured, a step",
    "exposed",
    "bandwidth",
)  # before those that are estimated, of a profile
ESTIMATED = ("est. a run", "est. in all")  # before the source, where there is a target
NOTE = (
    f"{accounts.CONVENTION}; of one run at one site, and in all: wire bytes of all runs at all "
    "sites"
)
_MEASURED_NOTE = (
    "measured, a step: in the profile, the median over its steps on the slowest device, of all "
    "runs at all sites; exposed: the part of it in which that device ran nothing else; "
    "bandwidth: wire bytes over the measured time"
)
_OUTPUTS = {"differs": ("differs", "differ"), "unproven": ("unproven", "unproven")}
_LISTED = 3  # of the findings that are one line
# What nobody folds away: it is wrong, or it asks for a decision.
_NEVER_FOLDED = ("may hang", "declared")


@dataclasses.dataclass(frozen=True)
class Content:
    """All that a report says.

    Attributes:
      title: where the program came from.
      judgement, account: the verifier's.
      findings: those on collectives that no allowance covers, those worth most first.
      allowed: findings with the reasons for which they stay.
      unused: allowances that match nothing.
      hints: needed collectives that could be cheaper, those worth most first.
      ledger: what everything costs, and what each finding and hint saves.
      unequal: outputs that are called replicated and not proven so, that no allowance covers.
      unequal_allowed: such outputs with the reasons for which they stay.
      strict: outputs that are unproven alone are findings, too.
    """

    title: str
    judgement: hlo.Judgement
    account: accounts.Account
    findings: tuple[Finding, ...]
    allowed: tuple[tuple[Finding, str], ...]
    unused: tuple[str, ...]
    hints: tuple[Hint, ...]
    ledger: Ledger
    unequal: tuple[outputs.Unequal, ...] = ()
    unequal_allowed: tuple[tuple[outputs.Unequal, str], ...] = ()
    strict: bool = False

    @property
    def target(self) -> estimates.Target | None:
        """Give the accelerator on which times are estimated, None for none."""
        return self.ledger.on

    @property
    def timings(self) -> Timings | None:
        """Give what a profile measured of each collective, None without one."""
        return self.ledger.measured

    @property
    def measured(self) -> str:
        """Say which part of a measured step can be avoided; empty without a profile."""
        if self.timings is None:
            return ""
        return grouping.of_step(self.avoidable.exposed_seconds, self.timings.step_seconds)

    @property
    def failing(self) -> int:
        """Count the findings: of outputs those that differ, in strict mode all."""
        missing = [one for one in self.unequal if self.strict or one.kind == "differs"]
        return len(missing) + len(self.findings)

    @property
    def clean(self) -> bool:
        """Tell whether there is nothing to do."""
        return not self.failing and not self.unused

    @property
    def kinds(self) -> str:
        """Count the findings by kind, missing reductions first; empty if there are none."""
        of_outputs = collections.Counter(one.kind for one in self.unequal)
        found = [
            f"{n} output{'s' if n > 1 else ''} {_OUTPUTS[kind][n > 1]}"
            for kind, n in of_outputs.items()
        ]
        counts = collections.Counter(finding.kind for finding in self.findings)
        return ", ".join(found + [f"{n} {kind}" for kind, n in counts.items()])

    # -- what it is worth --------------------------------------------------------------------

    @functools.cached_property
    def avoidable(self) -> Worth:
        """Add up what findings and hints save for sure."""
        return self._sum(True)

    @functools.cached_property
    def in_doubt(self) -> Worth:
        """Add up what is saved at most, if all that is unproven is for nothing."""
        return self._sum(False)

    def _sum(self, is_sure: bool) -> Worth:
        total = Worth(is_sure=is_sure)
        both: tuple[Finding | Hint, ...] = (*self.findings, *self.hints)
        for one in both:
            worth = self.ledger.worth(one)
            total = total.plus(worth) if worth.is_sure == is_sure else total
        return total

    def _share(self, worth: Worth) -> str:
        """Write a worth's share of the bytes and, with a target, of the time."""
        total = self.ledger.total
        parts = [f"{grouping.percent(worth.bytes, total.bytes)}"] if worth.bytes else []
        if self.target is not None:
            of = grouping.percent(worth.seconds, total.seconds)
            parts.append(f"~{grouping.duration(worth.seconds)} of communication, {of}")
        if self.timings is not None and worth.exposed_seconds:
            of = grouping.percent(worth.exposed_seconds, self.timings.step_seconds)
            parts.append(f"measured: {grouping.milliseconds(worth.exposed_seconds)} a step, {of}")
        return "; ".join(parts)

    @property
    def worth(self) -> str:
        """Say what can be avoided, empty where there is nothing."""
        parts: list[str] = []
        for worth, words in ((self.avoidable, "can be avoided"), (self.in_doubt, "is unproven")):
            if not (worth.bytes or worth.round_trips):
                continue
            trip = " on each trip" if worth.is_per_trip else ""
            what = grouping.counted(worth.round_trips, "round trip")
            if worth.bytes:
                what = grouping.size(worth.bytes)
                of = f" of {grouping.size(self.ledger.total.bytes)}" if not parts else ""
                what += f"{of} on the wire per device" if not parts else ""
            share = self._share(worth)
            parts.append(f"{what} {words}{trip}" + (f" ({share})" if share else ""))
        return ", ".join(parts)

    def saves(self, group: Sequence[Finding | Hint]) -> str:
        """Say what is saved by following the advice on findings or hints that are alike."""
        worth = self._worth(group)
        parts = [grouping.size(worth.bytes)] if worth.bytes else []
        if group[0].kind in _NEVER_FOLDED or not (worth.bytes or worth.round_trips):
            return ""
        if worth.round_trips and not (worth.bytes and isinstance(group[0], Finding)):
            parts.append(grouping.counted(worth.round_trips, "round trip"))
        share = self._share(worth)
        most = "" if worth.is_sure else "at most "
        trip = " on each trip" if worth.is_per_trip else ""
        return f"{most}{' and '.join(parts)}{trip}" + (f" ({share})" if share else "")

    def _worth(self, group: Sequence[Finding | Hint]) -> Worth:
        total = Worth()
        for one in group:
            total = total.plus(self.ledger.worth(one))
        return total

    # -- what it says ------------------------------------------------------------------------

    @property
    def headline(self) -> str:
        """Say in one line what it comes to: what can be avoided, where there is anything."""
        worth = f"{self.worth}; " if self.worth else ""
        return f"{self.title}: {worth}{self._about(not worth)}; {self.kinds or 'no findings'}"

    def _about(self, with_bytes: bool) -> str:
        """Say what kind of program it is."""
        total = self.account.total
        mesh, devices = self.account.mesh, self.account.device_count
        shown = f"{devices} devices (mesh not known: tell it with --mesh or mesh=)"
        if mesh:
            shown = f"{devices} devices ({', '.join(f'{a}={n}' for a, n in mesh.items())})"
        elif devices == 1:
            shown = "1 device"
        if not total.sites:
            return f"{shown}, no collectives{self._unseen(devices)}"
        ran = "1 collective runs" if total.sites == 1 else f"{total.sites} collectives run"
        times = ("at most " if total.at_most else "") + (
            f"{total.count} times" if total.count != 1 else "once"
        )
        loops = f", {total.unknown} in loops of unknown length" if total.unknown else ""
        wire = f", {grouping.size(total.wire_bytes)} on the wire per device" if with_bytes else ""
        return f"{shown}, {ran} {times}{loops}{wire}"

    def _unseen(self, devices: int) -> str:
        """Name the calls that nobody has a rule for: they may be collectives, too."""
        calls = [
            b for b in self.judgement.opaque if not transfers.CALLBACK.fullmatch(b.target or "")
        ]
        if not calls or devices == 1:
            return ""
        names = list(dict.fromkeys(repr(b.kernel or b.target or "") for b in calls))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f" but what calls without a rule do ({', '.join(names[:3])}{more})"

    @functools.cached_property
    def rows(self) -> tuple[grouping.Row, ...]:
        """List the rows of collectives, the costliest first; those that are alike are one."""

        def key(row: grouping.Row) -> tuple[float, float, int]:
            whole = self._cost(row)
            return -whole.exposed_seconds, -whole.seconds, -whole.bytes

        return tuple(sorted(grouping.rows(self.account), key=key))

    @property
    def columns(self) -> tuple[str, ...]:
        """Name the cells of a row of collectives."""
        estimated = () if self.target is None else ESTIMATED
        measured = () if self.timings is None else MEASURED
        return (*COLUMNS[:-1], SHARE, *measured, *estimated, COLUMNS[-1])

    def cells(self, row: grouping.Row) -> tuple[str, ...]:
        """Write a row's cells under ``columns``."""
        one = row.first
        cost = self._cost(row)
        times: tuple[str, ...] = ()
        measured: tuple[str, ...] = ()
        if self.timings is not None:
            timing = self.timings.together(row.numbers)
            measured = ("?",) * 3
            if timing is not None:
                took, exposed = map(grouping.milliseconds, timing[:2])
                speed = self._bytes_per_s(row)
                reached = f"{grouping.size(speed)}/s" if speed else "?"
                measured = took + grouping.spread(timing), exposed, reached
        if self.target is not None:
            each = f"~{grouping.duration(max(self.ledger.seconds[n] for n in row.numbers))}"
            times = (each, "?" if one.runs is None else f"~{grouping.duration(cost.seconds)}")
        return (
            one.what,
            one.verdict,
            str(row.sites),
            row.runs,
            grouping.size(one.bytes),
            grouping.size(one.wire_bytes),
            "?" if one.runs is None else grouping.size(row.total.wire_bytes),
            grouping.percent(cost.bytes, self.ledger.total.bytes),
            *measured,
            *times,
            grouping.here(one.source),
        )

    def keys(self, row: grouping.Row) -> tuple[float, ...]:
        """Give what a row's numbers are sorted by."""
        one, cost = row.first, self._cost(row)
        times = (max(self.ledger.seconds[n] for n in row.numbers), cost.seconds)
        known = (row.sites, one.runs or 0, one.bytes, one.wire_bytes, row.total.wire_bytes)
        timing = self.timings and self.timings.together(row.numbers)
        measured = (*(timing[:2] if timing else (0.0, 0.0)), self._bytes_per_s(row))
        return (
            *known,
            cost.bytes,
            *(() if self.timings is None else measured),
            *(() if self.target is None else times),
        )

    def _bytes_per_s(self, row: grouping.Row) -> float:
        """Give what one device sends in a second of a row's measured time; 0 if not known."""
        each = (
            [(e, self.timings.of[n]) for e, n in zip(row.entries, row.numbers)]
            if self.timings
            else []
        )
        sent = sum(entry.wire_bytes * timing.runs for entry, timing in each if timing)
        seconds = sum(timing.seconds for _, timing in each if timing)
        return sent / seconds if seconds else 0.0

    def _cost(self, row: grouping.Row) -> Worth:
        total = Worth()
        for number in row.numbers:
            total = total.plus(self.ledger.cost(number))
        return total

    @property
    def note(self) -> str:
        """Say how to read the table of collectives, a sentence a line."""
        note = NOTE if self.timings is None else f"{NOTE}\n{_MEASURED_NOTE}"
        if self.target is None:
            return note
        return (
            f"{note}\nest. with ~ is an estimated time and no measurement, on {self.target.name}: "
            "the larger of the wire bytes by ring algorithms over the bandwidth of the links and "
            "the latency of the hops, without other traffic and overlap; parts of one combined "
            f"collective share its latency; {self.target.source}"
        )

    @functools.cached_property
    def blocks(self) -> tuple[Block, ...]:
        """List all parts of the report: what to change, the collectives, other costs."""
        made = (
            *self.changes,
            Block("", self.note, self.columns, [*map(self.cells, self.rows)], len(self.columns) - 3)
            if self.rows
            else Block(""),
            *self.costs,
            Block("Allowances that match nothing", items=tuple(map(named, self.unused))),
        )
        return tuple(block for block in made if block.rows or block.items)

    @functools.cached_property
    def costs(self) -> tuple[Block, ...]:
        """List the other silent costs: donation, transfers, and what else holds anything."""
        return sections(self.judgement.module)

    @functools.cached_property
    def changes(self) -> tuple[Block, ...]:
        """List what to change: outputs that differ, findings and hints, those worth most first."""
        todo = tuple(_unequal(one, "to do:", one.advice) for one in self.unequal)
        stays = tuple(_unequal(one, "allowed:", reason) for one, reason in self.unequal_allowed)
        reasons = grouping.alike(self.allowed, lambda pair: pair[1])
        allowed = tuple(
            item(same, reason=pairs[0][1])
            for pairs in reasons
            for same in findings.alike(finding for finding, _ in pairs)
        )
        alike = grouping.alike(
            self.hints, lambda h: (h.kind, h.entry.what, h.entry.source, h.advice)
        )
        made = (
            Block(UNEQUAL, items=todo),
            Block(f"{UNEQUAL}, allowed", items=stays),
            self._ranked("Findings", findings.alike(self.findings)),
            self._ranked("Could be cheaper", alike),
            Block("Allowed", items=allowed),
        )
        return tuple(block for block in made if block.items)

    def _ranked(self, title: str, groups: Iterable[Sequence[Finding | Hint]]) -> Block:
        """List what is alike, the costliest first, and what is below 1% together in one line."""
        ranked = sorted(groups, key=self._rank)
        movable = [group for group in ranked if group[0].kind not in _NEVER_FOLDED]
        worths = [self._worth(group) for group in movable]
        folded = movable[len(movable) - self.ledger.folded(worths) :]
        shown = [group for group in ranked if not any(group is other for other in folded)]
        rest = ""
        if folded:
            worth = self._worth([one for group in folded for one in group])
            names = [
                f"{group[0].kind} {group[0].entry.what}"
                + (f" at {grouping.here(group[0].entry.source)}" if group[0].entry.source else "")
                for group in folded
            ]
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            part = grouping.percent(worth.bytes, self.ledger.total.bytes)
            rest = (
                f"below 1% together: {', '.join(names[:_LISTED])}{more} "
                f"({grouping.size(worth.bytes)}, {part})"
            )
        return Block(title, items=tuple(map(self._item, shown)), rest=rest)

    def _item(self, group: Sequence[Finding | Hint]) -> Item:
        took = ""
        if self.timings is not None:
            timing = self.ledger.timing(group)
            took = grouping.took(timing, self.timings.step_seconds) + grouping.spread(timing)
        return item(group, self.saves(group), took=took)

    def _rank(self, group: Sequence[Finding | Hint]) -> tuple[float, ...]:
        worth = self._worth(group)
        kind = group[0].kind
        first = 0 if kind == "may hang" else 2 if kind == "declared" else 1
        exposed = self.ledger.exposed_seconds(group)
        return (first, -exposed, -worth.seconds, -worth.bytes, -worth.round_trips)


def named(name: str) -> Item:
    """Make an item of a name alone."""
    return Item("", name, "", ())


def _unequal(one: outputs.Unequal, label: str, todo: str) -> Item:
    return Item(one.kind, one.what, "", (("because", one.because), (label, todo)))


@checked
def item(
    same: Sequence[Finding | Hint],
    saves: str = "",
    reason: str = "",
    advice: str | None = None,
    took: str = "",
) -> Item:
    """Say what there is to say of findings or hints that are alike.

    Args:
      same: findings, or hints.
      saves: what following the advice saves.
      reason: why they stay, of allowed ones.
      advice: what to do; their own if None.
      took: what they took in a measured step.
    """
    first, count = same[0], len(same)
    verdict, entry = first.verdict, first.entry
    name = verdict.collective.name
    name = name if count == 1 else f"{name} and {count - 1} like it"
    many = f"{count} x " if count > 1 else ""
    part = ""
    if verdict.range is not None and count == 1:
        part = f", elements {verdict.range.start}:{verdict.range.stop} of its operand"
    what = f"{many}{entry.what}, {grouping.sizes([e.entry.bytes for e in same])}{part} ({name})"
    lines = [(label, text) for label, text in (("saves", saves), ("took", took)) if text]
    if isinstance(first, Finding):
        lines.append(("because", verdict.reason))
        if verdict.rests_on:
            rests = (s.detail if s.source == "assumption" else str(s) for s in verdict.rests_on)
            lines.append(("resting on:", "; ".join(rests)))
    todo = first.advice if advice is None else advice
    if reason:
        lines.append(("allowed:", reason))
    elif todo:
        lines.append(("to do:", grouping.here(todo)))
    return Item(first.kind, what, grouping.here(entry.source), tuple(lines), entry)


@checked(own=("target",))
def content(
    judgement: hlo.Judgement,
    *,
    title: str | None = None,
    strict: bool = False,
    allow: findings.Allowances | None = None,
    target: str | None = None,
    cheapest: bool = False,
    timings: Timings | None = None,
) -> Content:
    """Gather what a report says.

    Args:
      judgement: what ``hlo.judge`` returned.
      title: where the program came from; the module's name if None.
      strict: accept proofs alone: verdicts that rest on declared rules are findings too.
      allow: findings that may stay.
      target: an accelerator of ``costs.estimates``, on which times are estimated.
      cheapest: all all-reduces that are needed and would move less elsewhere are findings; if
        False, those in loops that one before or after the loop replaces, above 1% of the bytes.
      timings: what a profile measured of each verdict's collective.
    """
    found = findings.find(judgement, strict)
    could = hints(judgement)
    costly = dearer(could, None if cheapest else judgement)
    found += costly
    could = [hint for hint in could if all(hint is not one.hint for one in costly)]
    allow = allow or findings.Allowances()
    stay, allowed, unused = allow.split(found)
    unequal, unequal_allowed, unused_too = allow.split(outputs.find(judgement))
    account = accounts.of(judgement)
    on = None if target is None else estimates.target(target)
    ledger = Ledger(judgement, account, on, timings)

    def costliest(one: Finding | Hint) -> tuple[float, float, int]:
        worth = ledger.worth(one)
        return -ledger.exposed_seconds([one]), -worth.seconds, -worth.bytes

    return Content(
        title or judgement.module.name,
        judgement,
        account,
        tuple(sorted(stay, key=costliest)),
        tuple(allowed),
        tuple(name for name in unused if name in unused_too),
        tuple(sorted(could, key=costliest)),
        ledger,
        tuple(unequal),
        tuple(unequal_allowed),
        strict,
    )
