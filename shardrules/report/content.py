"""Gather the content of a report, for every format."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardrules import hlo, units
from shardrules.arguments import checked
from shardrules.costs import accounts, estimates, findings, missing, outputs, transfers
from shardrules.costs.advice import named
from shardrules.costs.findings import Finding
from shardrules.costs.timings import Timings
from shardrules.costs.waste import Hint, dearer, hints
from shardrules.costs.waste.program import Fed
from shardrules.costs.worth import Ledger, Switched, Worth
from shardrules.errors import few
from shardrules.paths import here
from shardrules.report import grouping, items
from shardrules.report.grouping import Row, alike, spread
from shardrules.report.items import LISTED, TODO, Group, alike_hints, flat, item
from shardrules.report.sections import Block, Item, filled, listed, sections
from shardrules.units import counted, percent, size

_UNEQUAL = "Outputs called replicated that are not proven equal"
_NOTE = (
    "bytes: of one device's operand; wire bytes: what it sends, by ring algorithms, in one run\n"
    "in all: the wire bytes of all runs at all sites; share: of the program's"
)
_NOT_COMPILED = (
    "not compiled: XLA has not fused or scheduled this text; the compiled program may move and "
    "avoid other bytes (pass the file that ends in after_optimizations.txt)"
)
_LITTLE, _LARGE = 0.01, 0.25  # shares of the bytes: below is hardly worth a word, above always is
# Kinds that are never folded, with their ranks: "may hang" is a bug, "declared" needs a decision.
_NEVER_FOLDED = {"may hang": 0, "declared": 2}


class TableCell(NamedTuple):
    """A cell of the table of collectives; ``key`` is a number to sort by, None for text."""

    column: str
    text: str
    key: float | None = None


@dataclasses.dataclass(frozen=True)
class Content:
    """The content of a report.

    Attributes:
      title: where the program came from.
      judgement, account: the verifier's results.
      findings: findings on collectives that no allowance covers, the most worthwhile first.
      allowed: findings with the reasons why they stay.
      unused: allowances that match nothing.
      hints: needed collectives that could be cheaper, the most worthwhile first.
      ledger: what everything costs, and what each finding and hint saves.
      unequal: outputs called replicated without a proof, if no allowance covers them.
      unequal_allowed: the outputs that an allowance covers, with the reasons why they stay.
      strict: outputs that are only unproven are findings, too.
      why_at_most: why the saving of switching on its checks isn't known; empty if it is known.
      script: what ran, as it was typed; empty if it isn't known.
      interpreted: ``file:line`` of each known call of an interpreted kernel.
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
    why_at_most: str = ""
    script: str = ""
    interpreted: frozenset[str] = frozenset()

    @property
    def target(self) -> estimates.Target | None:
        """Return the accelerator on which times are estimated, or None."""
        return self.ledger.on

    @property
    def timings(self) -> Timings | None:
        """Return each collective's times in a profile; None without a profile."""
        return self.ledger.measured

    @property
    def failing(self) -> int:
        """Return the number of findings and differing outputs; if strict, unproven outputs too."""
        unproven = len(self.unequal) - self.differing if self.strict else 0
        return len(self.findings) + self.differing + unproven

    @property
    def differing(self) -> int:
        """Return the number of outputs that are called replicated but differ."""
        return sum(output.kind == "differs" for output in self.unequal)

    @property
    def clean(self) -> bool:
        """Return whether there is nothing to do."""
        return not self.failing and not self.unused

    @property
    def kinds(self) -> str:
        """Return the counts of findings by kind, outputs first; empty if there are none."""
        counts = []
        for kind, n in collections.Counter(output.kind for output in self.unequal).items():
            verb = "differ" if kind == "differs" and n > 1 else kind
            counts.append(f"{counted(n, 'output')} {verb}")
        kinds = collections.Counter(finding.kind for finding in self.findings)
        return ", ".join(counts + [f"{n} {kind}" for kind, n in kinds.items()])

    @property
    def cheaper(self) -> str:
        """Return the hint that saves most, and the count of others; empty if there are none."""
        if not self.hints:
            return ""
        (first, *_), *others = self._joined(alike_hints(self.hints))
        entry = first[0].entry
        where = f" at {here(entry.place)}" if entry.source else f", {items.place(first)}"
        more = f" and {len(others)} more" if others else ""
        # If all hints together change little, also name a row that costs a quarter or more.
        little = self.avoidable.bytes < _LITTLE * self.ledger.total.bytes
        known = {hint.entry.number for hint in self.hints}
        most = grouping.most(self.rows, self.ledger, _LARGE, known) if little else ""
        return f"could be cheaper: {first[0].kind}{where}{more}{most and '; '}{most}"

    @property
    def costliest(self) -> str:
        """Return the finding or hint that saves most, in words; empty if there is none."""
        if not self.findings:
            return self.cheaper
        every = self._joined(findings.alike(self.findings))
        every += self._joined(alike_hints(self.hints))
        (first, *_) = min(every, key=lambda same: self._rank(flat(same)))
        return f"the costliest: {first[0].kind} {items.place(first)}"

    @property
    def spent(self) -> str:
        """Return a text for a program without findings: the costliest row, and who asks for it."""
        if not self.rows:
            return "no findings"
        parts = ["all needed"] if {e.verdict for e in self.account} == {"needed"} else []
        most = grouping.most(self.rows, self.ledger)
        return "; ".join(filter(None, (*parts, most))) or "no findings"

    # -- what it is worth --------------------------------------------------------------------

    @functools.cached_property
    def avoidable(self) -> Worth:
        """Return the sum of the sure savings of findings and hints."""
        return _sum(worth for worth in self._worths() if worth.is_sure)

    @functools.cached_property
    def in_doubt(self) -> Worth:
        """Return the most that could be saved if everything unproven were redundant."""
        return _sum(w for w in self._worths() if not w.is_sure)._replace(is_sure=False)

    def _worths(self) -> Iterable[Worth]:
        return map(self.ledger.worth, self._changes())

    def _changes(self) -> list[Finding | Hint]:
        return [*self.findings, *self.hints]

    def _share(self, worth: Worth) -> str:
        """Return a text with a worth's share of the bytes and times, and whether it is per trip."""
        total = self.ledger.total
        parts = [percent(worth.bytes, total.bytes)] if worth.bytes else []
        if self.target is not None:
            of = percent(worth.seconds, total.seconds)
            parts.append(f"~{units.duration(worth.seconds)} of communication, {of}")
        if self.timings is not None and worth.exposed_seconds:
            of = percent(worth.exposed_seconds, self.timings.step_seconds)
            parts.append(f"measured: {units.milliseconds(worth.exposed_seconds)} a step, {of}")
        trip = " on each trip" if worth.is_per_trip else ""
        return trip + (f" ({'; '.join(parts)})" if parts else "")

    @property
    def worth(self) -> str:
        """Return the avoidable cost in words; empty if there is nothing to avoid."""
        parts: list[str] = []
        for worth, words in ((self.avoidable, "can be avoided"), (self.in_doubt, "is unproven")):
            if not worth.saves:
                continue
            what = size(worth.bytes) if worth.bytes else counted(worth.round_trips, "round trip")
            if worth.bytes and not parts:
                what += f" of {size(self.ledger.total.bytes)} on the wire per device"
            parts.append(f"{what} {words}{self._share(worth)}")
        return ", ".join(parts)

    def saves(self, group: Sequence[Finding | Hint], others: int = 0) -> str:
        """Return what following one advice saves; ``others`` of the group are unlike its first."""
        together = self.ledger.switched if group[0].entry.number in self.ledger.switched else ()
        others = others or len(together) - len(group)
        if together:  # switching on the checks removes all of these findings together
            group = [one for one in self.findings if one.entry.number in together]
        worth = _sum(map(self.ledger.worth, group))
        if group[0].kind in _NEVER_FOLDED or not worth.saves:
            return ""
        parts = [size(worth.bytes)] if worth.bytes else []
        if worth.round_trips > 0 and not (worth.bytes and isinstance(group[0], Finding)):
            parts.append(counted(worth.round_trips, "round trip"))
        most = "at most " if worth.at_most or not worth.is_sure else ""
        noun = "other finding" if isinstance(group[0], Finding) else "other"
        along = f", together with {counted(others, noun)}" if others > 0 else ""
        why = worth.at_most and self.why_at_most
        why = f"; shardrules can't tell exactly how much: {why}" if why else ""
        more = f", for {counted(-worth.round_trips, 'round trip')} more"
        more = more if worth.round_trips < 0 else ""
        return f"{most}{' and '.join(parts)}{self._share(worth)}{more}{along}{why}"

    # -- the first lines ---------------------------------------------------------------------

    @property
    def measured(self) -> str:
        """Return which part of a measured step can be avoided; empty without a profile."""
        if self.timings is None:
            return ""
        avoidable, step = self.avoidable.exposed_seconds, self.timings.step_seconds
        bytes_ = self.staying_bytes, self.avoidable.bytes
        return grouping.of_step(avoidable, step, self.timings.device, *bytes_)

    @property
    def staying_bytes(self) -> int:
        """Return the bytes that can be avoided in collectives with exposed time in a profile."""
        timed = (c for c in self._changes() if self.ledger.exposed_seconds([c]))
        return sum(worth.bytes for worth in map(self.ledger.worth, timed) if worth.is_sure)

    @property
    def headline(self) -> str:
        """Return the report in one line, after the title."""
        return f"{self.title}: {self.about}"

    @property
    def axes(self) -> str:
        """Return the mesh, `` (data=4, model=2)``; empty if it isn't known."""
        mesh = self.account.mesh
        return f" ({', '.join(f'{axis}={n}' for axis, n in mesh.items())})" if mesh else ""

    @property
    def about(self) -> str:
        """Return the avoidable cost, the program's size, and the findings' kinds, in one line."""
        total, devices = self.account.total, self.account.device_count
        mesh = self.axes or " (mesh not known: pass --mesh or mesh=)"
        shown = f"{devices} devices{mesh}" if devices != 1 or self.axes else "1 device"
        if total.sites:
            shown += f", {counted(total.sites, 'collective')}"
            if total.unknown == total.sites:
                shown += " in loops of unknown length"
            else:
                shown += f" run{'s' if total.sites == 1 else ''}"
                shown += " at most" if total.at_most else ""
                shown += " once" if total.count == 1 else f" {total.count} times"
                shown += f", {total.unknown} in loops of unknown length" if total.unknown else ""
            if not self.worth:
                shown += f", {grouping.sent(total)} on the wire per device"
        else:
            shown += f", no collectives{self._unseen(devices)}"
        stage = "" if self.judgement.is_compiled else _NOT_COMPILED
        missing = "a reduction seems to be missing" if self.differing else ""
        last = self.costliest or ("" if self.kinds else self.spent)
        parts = (stage, missing, self.worth, shown, self.kinds, last)
        return "; ".join(filter(None, parts))

    def _unseen(self, devices: int) -> str:
        """Return a note on calls without a rule, which may communicate; empty if there are none."""
        calls = ((call.kernel, call.target or "") for call in self.judgement.opaque)
        names = [repr(k or t) for k, t in calls if not transfers.CALLBACK.fullmatch(t)]
        if not names or devices == 1:
            return ""
        return f", except perhaps in calls without a rule ({few([*dict.fromkeys(names)], 3)})"

    # -- the table of collectives ------------------------------------------------------------

    @functools.cached_property
    def rows(self) -> tuple[Row, ...]:
        """Return the rows of collectives, the costliest first; similar collectives share a row."""

        def key(row: Row) -> tuple[float, float, int]:
            cost = _sum(map(self.ledger.cost, row.numbers))
            return -cost.exposed_seconds, -cost.seconds, -cost.bytes

        return tuple(sorted(grouping.rows(self.account), key=key))

    def cells(self, row: Row) -> list[TableCell]:
        """Return a row's cells; every row has the same columns."""
        entry, cost = row.first, _sum(map(self.ledger.cost, row.numbers))
        sent, is_known = row.total.wire_bytes, entry.runs is not None
        runs = f"{'at most ' if entry.at_most else ''}{entry.runs}"
        cells = [
            TableCell("collective", entry.what),
            TableCell("verdict", entry.verdict),
            TableCell("sites", str(row.sites), row.sites),
            TableCell("runs", runs if is_known else "?", entry.runs or 0),
            TableCell("bytes", size(entry.bytes), entry.bytes),
            TableCell("wire bytes", size(entry.wire_bytes), entry.wire_bytes),
            TableCell("in all", size(sent) if is_known else "?", sent),
            TableCell("share", percent(cost.bytes, self.ledger.total.bytes), cost.bytes),
        ]
        if self.timings is not None:
            cells += self._measured_cells(row, self.timings)
        if self.target is not None:
            each = max(self.ledger.seconds[number] for number in row.numbers)
            in_all = f"~{units.duration(cost.seconds)}" if is_known else "?"
            cells.append(TableCell("est. a run", f"~{units.duration(each)}", each))
            cells.append(TableCell("est. in all", in_all, cost.seconds))
        return [*cells, TableCell("source", here(entry.place))]

    def _measured_cells(self, row: Row, timings: Timings) -> list[TableCell]:
        took, exposed, bandwidth = "measured, a step", "exposed", "bandwidth"
        timing = timings.together(row.numbers)
        if timing is None:
            return [TableCell(name, "?", 0.0) for name in (took, exposed, bandwidth)]
        if not timing.seconds:
            return [TableCell(name, "", 0.0) for name in (took, exposed, bandwidth)]
        pairs = [(entry, timings.of[entry.number]) for entry in row.entries]
        sent = sum(entry.wire_bytes * each.runs for entry, each in pairs if each)
        speed = sent / timing.seconds
        return [
            TableCell(took, units.milliseconds(timing.seconds) + spread(timing), timing.seconds),
            TableCell(exposed, units.milliseconds(timing.exposed_seconds), timing.exposed_seconds),
            TableCell(bandwidth, f"{size(speed)}/s" if speed else "?", speed),
        ]

    @property
    def note(self) -> str:
        """Return how to read the table of collectives, one sentence on each line."""
        note = _NOTE if self.timings is None else f"{_NOTE}\n{grouping.MEASURED_NOTE}"
        if self.target is None:
            return note
        return (
            f"{note}\nest. with ~ is a time estimated, not measured, for {self.target.name}: "
            "the larger of the wire bytes by ring algorithms over the bandwidth of the links and "
            "the latency of the hops, without other traffic and overlap; parts of one combined "
            f"collective share its latency; {self.target.source}"
        )

    # -- the parts of the report -------------------------------------------------------------

    @functools.cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Return all parts of the report: what to change, the collectives, other costs."""
        cells = [self.cells(row) for row in self.rows]
        columns = tuple(cell.column for cell in cells[0]) if cells else ()
        texts = [tuple(cell.text for cell in row) for row in cells]
        return filled(
            *self.changes,
            Block("", self.note, columns, texts, len(columns) - 3),
            listed("XLA's own, nothing to change", self._internal()),
            *self.costs,
            listed("Allowances that match nothing", self.unused),
        )

    def _internal(self) -> Iterable[str]:
        own = (entry for entry in self.account if entry.verdict == "internal")
        for same in alike(own, lambda entry: (entry.kind, entry.reason)):
            count = f"{len(same)} x " if len(same) > 1 else ""
            each = units.sizes([entry.bytes for entry in same])
            yield f"{count}{same[0].kind}, {each}: {same[0].reason}"

    @functools.cached_property
    def costs(self) -> tuple[Block, ...]:
        """Return the other silent costs, such as donation and transfers, if there are any."""
        return sections(self.judgement.module, self.interpreted)

    @functools.cached_property
    def changes(self) -> tuple[Block, ...]:
        """Return the parts on changes: outputs that differ, findings, hints; by their savings."""
        todo: list[Item] = []
        for same in alike(self.unequal, items.lacking):
            advice = named(items.advice_on(same), self.script)
            todo.append(items.of_output(same[0], TODO, advice, [o.name for o in same[1:]]))
        stays = [items.of_output(o, "allowed:", reason) for o, reason in self.unequal_allowed]
        allowed: list[Item] = []
        for pairs in alike(self.allowed, lambda pair: pair[1]):
            for group in findings.alike(finding for finding, _ in pairs):
                allowed.append(item(group, reason=pairs[0][1]))
        return filled(
            Block(_UNEQUAL, items=tuple(todo)),
            Block(f"{_UNEQUAL}, allowed", items=tuple(stays)),
            self._ranked("Findings", findings.alike(self.findings)),
            self._ranked("Could be cheaper", alike_hints(self.hints)),
            Block("Allowed", items=tuple(allowed)),
        )

    def _joined(self, groups: Iterable[Group]) -> list[tuple[Group, ...]]:
        """Return groups joined by the change that removes them, the costliest first everywhere."""
        # Rank before joining, since the first group of each join gives the advice; rank the joins
        # again by the sum of their savings.
        ranked = sorted(groups, key=lambda one: (items.has_no_advice(one), self._rank(one)))
        return sorted(grouping.connected(ranked, items.changes), key=lambda n: self._rank(flat(n)))

    def _ranked(self, title: str, groups: Iterable[Group]) -> Block:
        """Return a list of groups, the costliest first; fold those that cost below 1% together."""
        joined = self._joined(groups)
        ranked = [(same, _sum(map(self.ledger.worth, flat(same)))) for same in joined]
        movable = [n for n, (same, _) in enumerate(ranked) if same[0][0].kind not in _NEVER_FOLDED]
        count = self.ledger.folded([ranked[n][1] for n in movable])
        folded = movable[len(movable) - count :]
        shown = (same for n, (same, _) in enumerate(ranked) if n not in folded)
        described = tuple(self.item(*same) for same in shown)
        if not folded:
            return Block(title, items=described)
        below = itertools.chain.from_iterable(ranked[n][0] for n in folded)
        names = [f"{group[0].kind} {items.place(group)}" for group in below]
        saved = sum(ranked[n][1].bytes for n in folded)
        part = f"{size(saved)}, {percent(saved, self.ledger.total.bytes)}"
        rest = (
            f"below 1% together: {few([*dict.fromkeys(names)], LISTED)} ({part}); "
            "`--format json` has the advice on each"
        )
        return Block(title, items=described, rest=rest)

    def _rank(self, group: Sequence[Finding | Hint]) -> tuple[float, ...]:
        worth, first = _sum(map(self.ledger.worth, group)), _NEVER_FOLDED.get(group[0].kind, 1)
        exposed = self.ledger.exposed_seconds(group)
        return first, -exposed, -worth.seconds, -worth.bytes, -worth.round_trips

    def item(self, group: Group, *others: Group) -> Item:
        """Return the item on findings or hints that are alike; ``others`` have the same advice."""
        time, every = "", flat((group, *others))
        if self.timings is not None:
            timing = self.ledger.timing(every)
            time = grouping.took(timing, self.timings.step_seconds) + spread(timing)
        return item(group, self.saves(every, len(every) - len(group)), time=time, others=others)


def _sum(worths: Iterable[Worth]) -> Worth:
    return functools.reduce(Worth.plus, worths, Worth())


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
    switched: Switched | str = "",
    fed: Fed | None = None,
    script: str = "",
) -> Content:
    """Return the content of a report.

    Args:
      judgement: what ``hlo.judge`` returned.
      title: where the program came from; the module's name if None.
      strict: accept only proofs: verdicts that depend on declared rules are findings too.
      allow: findings that may stay.
      target: an accelerator of ``costs.estimates``, on which times are estimated.
      cheapest: all needed all-reduces that could be cheaper are findings. If False, only some are:
        all-reduces in loops with more than 1% of the bytes that could run outside of the loop.
      timings: the times of each verdict's collective in a profile.
      switched: the same program with its shard_maps' checks on, or why there is none.
      fed: how often the program ran with one of its own results as an argument.
      script: what ran, as it was typed.
    """
    # A hint that costs enough becomes a finding. Then allowances take findings out, and the savings
    # of switched checks, if they are known, replace the findings that they remove.
    all_hints = hints(judgement, fed)
    costly = dearer(all_hints, None if cheapest else judgement)
    allow = allow or findings.Allowances()
    stay, allowed, unused = allow.split(findings.find(judgement, strict) + costly)
    unequal, unequal_allowed, unused_too = allow.split(missing.find(judgement))
    account = accounts.of(judgement)
    on = None if target is None else estimates.target(target)
    going: dict[int, int] = {}
    if not isinstance(switched, str):
        stay, going = switched.applied(stay, account)
    ledger = Ledger(account, on, timings, going)

    def costliest(change: Finding | Hint) -> tuple[float, float, int]:
        worth = ledger.worth(change)
        return -ledger.exposed_seconds([change]), -worth.seconds, -worth.bytes

    in_findings = {id(finding.hint) for finding in costly}
    left = [hint for hint in all_hints if id(hint) not in in_findings]
    return Content(
        title or judgement.module.name,
        judgement,
        account,
        tuple(sorted((findings.named(one, script) for one in stay), key=costliest)),
        tuple(allowed),
        tuple(name for name in unused if name in unused_too),
        tuple(sorted(left, key=costliest)),
        ledger,
        tuple(findings.named(one, script) for one in unequal),
        tuple(unequal_allowed),
        strict,
        switched if isinstance(switched, str) else "",
        script,
    )
