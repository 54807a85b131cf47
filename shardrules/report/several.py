"""Put several programs into one report: a table, the costliest first, and details of each."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping, Sequence

from shardrules.costs import comparing
from shardrules.costs.findings import Finding
from shardrules.costs.waste import Hint
from shardrules.costs.worth import Ledger
from shardrules.errors import few
from shardrules.paths import here
from shardrules.report import data
from shardrules.report.content import Content
from shardrules.report.grouping import of_step, sent
from shardrules.report.sections import LOOPS, Block, filled, listed
from shardrules.units import counted, duration, percent, size

_SPENDING = 5  # the most programs without findings for which the report says what they send
_DIFFERENCES = 3  # programs that differ in more kinds of collectives are not called alike


@dataclasses.dataclass(frozen=True)
class Several:
    """The reports of a process's programs, the costliest first."""

    contents: tuple[Content, ...]  # one for each program that was judged
    counts: tuple[int, ...]  # how many programs each content stands for
    failures: tuple[tuple[str, str], ...]  # name of each program that can't be judged, and why
    unused: tuple[str, ...]  # allowances that match nothing in any program
    missing: int  # programs that were not judged, since Ctrl-C was pressed
    of_process: bool = True  # whether a process compiled them; if not, they are from files
    notes: tuple[str, ...] = ()  # more on how the programs came to be
    title: str = "Programs"  # where they came from
    reads: tuple[str, ...] = ()  # sentences on lines that read arrays after each run
    ran: str = ""  # when and on what they ran, "2026-11-26 15:30, JAX 0.12.0, 8 CPU devices"

    @property
    def findings(self) -> int:
        return sum(content.failing for content in self.contents) + len(self.reads)

    def with_reads(self, reads: Mapping[str, str], allow: Iterable[tuple[str, str]]) -> Several:
        """Return this with findings on lines that read arrays on the host, unless allowed."""
        known = {f"read at {here(line)}": line for line in reads}
        known |= {f"read at {line}": line for line in reads}
        names = [name for name, _ in allow if name in known]
        left = dict(reads)
        for name in names:
            left.pop(known[name], None)
        unused = tuple(name for name in self.unused if name not in names)
        return dataclasses.replace(self, reads=tuple(map(here, left.values())), unused=unused)

    @property
    def clean(self) -> bool:
        """Return whether all programs were judged and there is nothing to do."""
        return not (self.findings or self.failures or self.unused or self.missing)

    @property
    def shown(self) -> list[tuple[Content, int]]:
        """Return the programs that have collectives or costs other than loops, with counts."""
        pairs = zip(self.contents, self.counts)
        return [
            (c, n) for c, n in pairs if c.account.entries or c.changes or {*_costs(c)} - {LOOPS}
        ]

    @property
    def detailed(self) -> list[Content]:
        """Return the programs with findings, costs or times below the table, without allowances."""
        return self._parts[0]

    @functools.cached_property
    def _parts(self) -> tuple[list[Content], list[str]]:
        """Return the programs that get their own part, and texts on programs that are like them."""
        parts: list[Content] = []
        alike: list[str] = []
        for content, _ in self.shown:
            if not _has_more(content):
                continue
            # JAX often compiles a step twice: for the arguments of the first call, and again for
            # its results as arguments.
            said = next(filter(None, (_as_another(content, other) for other in parts)), "")
            if said:
                alike.append(said)
            else:  # allowances are listed below all programs
                parts.append(dataclasses.replace(content, unused=()))
        return parts, alike

    @property
    def measured(self) -> str:
        """Return which part of a measured step can be avoided; empty without a profile."""
        # Programs with the same text share one Timings object, so count each object once.
        each = {id(c.timings): c for c in self.contents if c.timings is not None}.values()
        if not each:
            return ""
        longest = max((c.timings for c in each if c.timings), key=lambda t: t.step_seconds)
        avoidable = sum(c.avoidable.exposed_seconds for c in each)
        staying = sum(c.staying_bytes for c in each)
        hidden = sum(c.avoidable.bytes for c in each)
        return of_step(avoidable, longest.step_seconds, longest.device, staying, hidden)

    @property
    def about(self) -> str:
        total = sum(self.counts) + len(self.failures)
        worst = max(self.contents, key=lambda c: c.avoidable[1::-1], default=None)
        differ = [content.title for content, _ in self.shown if content.differing]
        parts = [
            f"a reduction seems to be missing in {few(differ, 2)}" if differ else "",
            counted(total, "program") + (" compiled" if self.of_process else ""),
            f"{len(self.shown)} with collectives or other costs",
            counted(self.findings, "finding") if self.findings else "",
            f"in {worst.title} {worst.worth}" if worst is not None and worst.worth else "",
            f"{len(self.failures)} can't be judged" if self.failures else "",
            f"interrupted: {self.missing} not judged" if self.missing else "",
            self.first,
        ]
        return ", ".join(filter(None, parts))

    headline = about

    def about_of(self, content: Content) -> str:
        """Return a description of a program, without the parts that ``about`` already has."""
        own, whole = content.about, self.about
        if not any(content is first for first in (self.detailed or self.quiet)[:1]):
            return own
        if f"in {content.title} {content.worth}, " in f"{whole}, ":
            own = own.replace(f"{content.worth}; ", "", 1)
        last = content.costliest or content.spent
        return own.removesuffix(f"; {last}") if last in whole else own

    @property
    def first(self) -> str:
        """Return the costliest finding or hint, or else what the costliest program spends."""
        of_programs = (content.costliest for content in self.contents)
        named = next(filter(None, of_programs), "")
        named = named or (f"the first: {self.reads[0].partition(',')[0]}" if self.reads else "")
        if named or self.findings or not self.contents:
            return named
        spent, title = self.contents[0].spent, self.contents[0].title
        return spent if len(self.shown) < 2 else f"in {title} {spent}"

    @property
    def programs(self) -> Block:
        """Return the table of the programs; programs from files have no count."""
        is_counted = self.of_process and any(count > 1 for _, count in self.shown)
        rows = [_row(c, count if is_counted else None) for c, count in self.shown]
        for column in ("cheaper", "other"):
            if not any(row[column] for row in rows):
                rows = [{k: v for k, v in row.items() if k != column} for row in rows]
        note = "wire bytes: what one device sends in one execution"
        if is_counted:
            note += "; times: how many compiled programs have the same report"
        rest = sum(self.counts) - sum(count for _, count in self.shown)
        noun = f"{'more ' if rows else ''}{'programs have' if rest > 1 else 'program has'}"
        more = f"{rest} {noun} no collective"
        notes = [note if rows else "", more if rest else "", *self.notes]
        columns = tuple(rows[0]) if rows else ()
        cells = [tuple(row.values()) for row in rows]
        return Block("", "\n".join(filter(None, notes)), columns, cells)

    @property
    def quiet(self) -> list[Content]:
        """Return the programs with collectives that have no part of their own in the report."""
        return [c for c, _ in self.shown if c.account.entries and not _has_more(c)]

    @property
    def spends(self) -> Block:
        """Return the bytes that the quiet programs send."""
        quiet = self.quiet
        lines = [_spends(content) for content in quiet[:_SPENDING]]
        rest = f"and {len(quiet) - _SPENDING} more, which send less"
        return listed("Spent", lines)._replace(rest=rest if len(quiet) > _SPENDING else "")

    @property
    def on_host(self) -> Block:
        return listed("Findings on the host", self.reads)

    @property
    def alike(self) -> Block:
        """Return how programs without their own part differ from a program that has one."""
        return listed("Alike", self._parts[1])

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (self.programs, *filled(self.on_host, self.alike, self.spends))

    @property
    def ends(self) -> tuple[Block, ...]:
        return filled(
            listed("Can't be judged", (f"{name}: {why}" for name, why in self.failures)),
            listed("Allowances that match nothing", self.unused),
        )


def _has_more(content: Content) -> bool:
    """Return whether a program gets its own part in the report."""
    return bool(content.changes or content.costs) or content.timings is not None


def _as_another(content: Content, other: Content) -> str:
    """Return the collectives in which a program differs from another; empty if there are many."""
    if any(key(content) != key(other) for key in (_program, _advised)):
        return ""
    if content.timings is not None and content.timings is not other.timings:
        return ""
    sides = (comparing.grouped(each.account.entries, groups=True) for each in (other, content))
    differences = comparing.compare(*sides)
    if len(differences) > _DIFFERENCES:
        return ""
    but = f", but for {'; '.join(here(str(change)) for change in differences)}"
    sums = [sent(each.account.total) for each in (content, other)]
    return f"{content.title} ({sums[0]}): as {other.title} ({sums[1]}){but if differences else ''}"


def _program(content: Content) -> tuple[object, ...]:
    return content.judgement.module.name, content.account.mesh, content.account.device_count


def _advised(content: Content) -> list[object]:
    """Return the advice and the costs, without the text's own names, times and order."""
    blocks = [(block.title, [*block.rows]) for block in content.costs]
    unequal = [(output.what, output.advice) for output in content.unequal]
    allowed = [finding for finding, _ in content.allowed]
    changes: tuple[Finding | Hint, ...] = (*content.findings, *content.hints, *allowed)
    todo = [(c.kind, c.entry.what, c.entry.place, c.entry.bytes, c.advice) for c in changes]
    return [blocks, unequal, sorted(todo, key=repr)]


def _spends(content: Content) -> str:
    """Return the bytes that one device sends in one execution, and the costliest collective."""
    total, row = content.account.total, content.rows[0]
    runs = counted(total.count, "run")  # a program with a loop has a part of its own
    cells = {cell.column: cell.text for cell in content.cells(row)}
    at = f" at {cells['source']}" if cells["source"] else ""
    each = f"{row.sites} x " if row.sites > 1 else ""
    most = "at most " if total.at_most else ""
    return (
        f"{content.title}: {most}{size(total.wire_bytes)} on the wire per device, in {runs} of "
        f"{counted(total.sites, 'collective')}; the costliest ({cells['share']}) is "
        f"{each}{row.first.what}, {cells['in all']}{at}"
    )


def _costs(content: Content) -> list[str]:
    return [block.title for block in content.costs]


def _row(content: Content, count: int | None) -> dict[str, str]:
    total, avoidable = content.account.total, content.avoidable
    loops = f" and {total.unknown} in loops" if total.unknown else ""
    saved = size(avoidable.bytes)
    if avoidable.bytes:
        saved += f" ({percent(avoidable.bytes, content.ledger.total.bytes)})"
    if content.target is not None:
        saved += f", ~{duration(avoidable.seconds)}"
    return {
        "program": content.title,
        **({} if count is None else {"times": str(count)}),
        "devices": f"{content.account.device_count}{content.axes}",
        "collectives": str(total.sites),
        "runs": f"{'at most ' if total.at_most else ''}{total.count}{loops}",
        "wire bytes": sent(total),
        "avoidable": saved,
        "findings": content.kinds or "none",
        "cheaper": str(len(content.hints) or ""),
        "other": ", ".join(_costs(content)).lower(),
    }


def gather(
    contents: Sequence[Content],
    counts: Sequence[int],
    failures: Sequence[tuple[str, str]] = (),
    missing: int = 0,
    of_process: bool = True,
    notes: Sequence[str] = (),
) -> Several:
    """Return programs in order: first those that lack a reduction, then by avoidable cost."""
    # Programs of a process count as one program if their reports are equal.
    alike: dict[object, tuple[Content, int]] = {}
    # A program that did not run while steps were recorded has no times. If an equal program has
    # them, the two count as one, so handle programs with times first.
    timed_first = sorted(enumerate(zip(contents, counts)), key=lambda n: n[1][0].timings is None)
    timed: dict[str, object] = {}
    for number, (content, count) in timed_first:  # programs from files keep their own number
        # Compare the reports, not the texts, which may differ in a constant or in other details
        # that the report doesn't depend on.
        key: object = number
        if of_process:
            text = _untimed(content)
            key = data.as_json(content) if content.timings is not None else timed.get(text, text)
            timed.setdefault(text, key)
        alike[key] = (same := alike.get(key, (content, 0)))[0], count + same[1]

    def costliest(pair: tuple[Content, int]) -> tuple[float, ...]:
        content, saved = pair[0], pair[0].avoidable
        return (
            not content.differing,
            -saved.exposed_seconds,
            -saved.seconds,
            -saved.bytes,
            -content.account.total.wire_bytes,
            -len(content.findings),
        )

    order = sorted(alike.values(), key=costliest)
    unused = [set(content.unused) for content in contents]
    return Several(
        tuple(content for content, _ in order),
        tuple(count for _, count in order),
        tuple(failures),
        # An allowance is unused only if it matches in no program. If programs are missing, it may
        # match in a missing one.
        tuple(sorted(set.intersection(*unused))) if unused and not missing else (),
        missing,
        of_process,
        tuple(notes),
    )


def _untimed(content: Content) -> str:
    """Return a program's report without times, in the order of its text."""
    ledger = Ledger(content.account, content.target, None, content.ledger.switched)
    found = tuple(sorted(content.findings, key=lambda finding: finding.entry.number))
    hints = tuple(sorted(content.hints, key=lambda hint: hint.entry.number))
    return data.as_json(dataclasses.replace(content, ledger=ledger, findings=found, hints=hints))


def as_json(content: Content | Several) -> str:
    """Return one JSON object; for several programs, it contains an object for each."""
    if isinstance(content, Content):
        return data.as_json(content)
    whole = {
        "schema": data.SCHEMA,
        "clean": content.clean,
        "programs": [
            {**data.as_dict(each), "times": count}
            for each, count in zip(content.contents, content.counts)
        ],
        "failures": [{"program": name, "reason": why} for name, why in content.failures],
        "reads": list(content.reads),
        "unused_allowances": list(content.unused),
        "not_judged": content.missing,
    }
    return json.dumps(whole, indent=1) + "\n"
