"""Several programs in one report: a table, the costliest first, and what each one's own says."""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Callable, Sequence

from shardrules.report import data, text
from shardrules.report.annotations import github, sarif
from shardrules.report.blocks import Block
from shardrules.report.content import Content, line
from shardrules.report.drawn import escaped
from shardrules.report.grouping import counted, duration, of_step, percent, size
from shardrules.report.page import page, section, whole
from shardrules.report.sections import LOOPS


@dataclasses.dataclass(frozen=True)
class Several:
    """The reports of a process's programs, the costliest first."""

    contents: tuple[Content, ...]  # of each program that was judged
    counts: tuple[int, ...]  # how many programs each stands for
    failures: tuple[tuple[str, str], ...]  # name of each that can't be judged, and why
    unused: tuple[str, ...]  # allowances that match nothing in any of them
    missing: int  # programs that were not judged, since Ctrl-C was pressed
    of_process: bool = True  # they are what a process compiled; else they were read from files
    notes: tuple[str, ...] = ()  # more on how the programs came to be

    @property
    def findings(self) -> int:
        """Count the findings of all programs."""
        return sum(content.failing for content in self.contents)

    @property
    def clean(self) -> bool:
        """Tell whether all were judged and there is nothing to do."""
        return not (self.findings or self.failures or self.unused or self.missing)

    @property
    def shown(self) -> list[tuple[Content, int]]:
        """List the programs that have collectives or costs other than loops, with their counts."""
        return [
            (content, count)
            for content, count in zip(self.contents, self.counts)
            if content.account.entries or content.changes or {*_costs(content)} - {LOOPS}
        ]

    @property
    def detailed(self) -> list[Content]:
        """List the programs of which there is more to say than their row, without allowances."""
        return [
            dataclasses.replace(content, unused=())  # these are listed below all programs
            for content, _ in self.shown
            if content.changes or _costs(content)
        ]

    @property
    def measured(self) -> str:
        """Say which part of a measured step can be avoided; empty without a profile."""
        # Programs of one text that are judged apart share their times.
        each = {id(c.timings): c for c in self.contents if c.timings is not None}.values()
        if not each:
            return ""
        step_seconds = max(c.timings.step_seconds for c in each if c.timings)
        return of_step(sum(c.avoidable.exposed_seconds for c in each), step_seconds)

    @property
    def headline(self) -> str:
        """Say in one line what it comes to."""
        total = sum(self.counts) + len(self.failures)
        worst = max(self.contents, key=lambda c: c.avoidable[1::-1], default=None)
        parts = [
            counted(total, "program") + (" compiled" if self.of_process else ""),
            f"{len(self.shown)} with collectives or other costs",
            counted(self.findings, "finding") if self.findings else "no findings",
            f"in {worst.title} {worst.worth}" if worst is not None and worst.worth else "",
            f"{len(self.failures)} can't be judged" if self.failures else "",
            f"interrupted: {self.missing} not judged" if self.missing else "",
        ]
        return ", ".join(filter(None, parts))

    @property
    def programs(self) -> Block:
        """Make the table of the programs; a file's program has no count."""
        rows = [_row(content, count) for content, count in self.shown]
        note = "wire bytes: what one device sends in one execution"
        if self.of_process:
            note += "; times: how many compiled programs have the same report"
        else:
            for row in rows:
                del row["times"]
        rest = sum(self.counts) - sum(count for _, count in self.shown)
        more = f"{rest} more {'programs have' if rest > 1 else 'program has'} no collective"
        notes = [note if rows else "", more if rest else "", *self.notes]
        columns = tuple(rows[0]) if rows else ()
        cells = [tuple(row.values()) for row in rows]
        return Block("", "\n".join(filter(None, notes)), columns, cells)

    @property
    def ends(self) -> list[Block]:
        """List what stands below the programs."""
        why = tuple(line(f"{name}: {why}") for name, why in self.failures)
        made = (
            Block("Can't be judged", items=why),
            Block("Allowances that match nothing", items=tuple(map(line, self.unused))),
        )
        return [block for block in made if block.items]


def _costs(content: Content) -> list[str]:
    """Name the other costs of a program."""
    return [block.title for block in content.costs]


def _row(content: Content, count: int) -> dict[str, str]:
    """Write a program's cells, by their columns."""
    total, avoidable = content.account.total, content.avoidable
    loops = f" and {total.unknown} in loops" if total.unknown else ""
    saved = size(avoidable.bytes)
    if avoidable.bytes:
        saved += f" ({percent(avoidable.bytes, content.ledger.total.bytes)})"
    if content.target is not None:
        saved += f", ~{duration(avoidable.seconds)}"
    return {
        "program": content.title,
        "times": str(count),
        "devices": f"{content.account.device_count}{content.axes}",
        "collectives": str(total.sites),
        "runs": f"{'at most ' if total.at_most else ''}{total.count}{loops}",
        "wire bytes": size(total.wire_bytes),
        "avoidable": saved,
        "findings": content.kinds or "none",
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
    """Put programs in order: those that miss a reduction, then those where most can be avoided."""
    # Programs of a process that differ in nothing reported are one.
    alike: dict[object, tuple[Content, int]] = {}
    for number, (content, count) in enumerate(zip(contents, counts)):
        # Their texts may differ in a constant, or in what nothing here depends on.
        key: object = data.as_json(content) if of_process else number
        alike[key] = content, count + alike.get(key, (content, 0))[1]

    def costliest(pair: tuple[Content, int]) -> tuple[float, ...]:
        content, saved = pair[0], pair[0].avoidable
        return (
            all(output.kind != "differs" for output in content.unequal),
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
        # What matches in one program need not match in another; of a part nothing can be said.
        tuple(sorted(set.intersection(*unused))) if unused and not missing else (),
        missing,
        of_process,
        tuple(notes),
    )


def plain(report: Several) -> str:
    """Return the report as text."""
    lines = [
        *filter(None, (report.measured, report.headline)),
        "",
        *text.as_text([report.programs]),
    ]
    for content in report.detailed:
        lines += ["=" * 72, text.plain(content)]
    return "\n".join([*lines, *text.as_text(report.ends)]).rstrip() + "\n"


def markdown(report: Several) -> str:
    """Return the report as GitHub's Markdown."""
    first = [f"{report.measured}.", ""] if report.measured else []
    lines = [
        "# Programs",
        "",
        *first,
        f"{report.headline}.",
        "",
        *text.as_markdown([report.programs]),
    ]
    for content in report.detailed:
        # Its headings go one level down.
        own = text.markdown(content).splitlines()
        lines += [*(f"#{line}" if line.startswith("#") else line for line in own), ""]
    return "\n".join([*lines, *text.as_markdown(report.ends)]).rstrip() + "\n"


def as_json(report: Several) -> str:
    """Return the report as one JSON object, in which each program's own stands."""
    programs = [
        {**data.as_dict(content), "times": count}
        for content, count in zip(report.contents, report.counts)
    ]
    whole = {
        "schema": data.SCHEMA,
        "clean": report.clean,
        "programs": programs,
        "failures": [{"program": name, "reason": why} for name, why in report.failures],
        "unused_allowances": list(report.unused),
        "not_judged": report.missing,
    }
    return json.dumps(whole, indent=1) + "\n"


def as_page(report: Several) -> str:
    """Return the report as one self-contained HTML page: a table, and each program's own page."""
    first = f"<p><b>{escaped(report.measured)}.</b></p>" if report.measured else ""
    body = [f"<header><h1>Programs</h1>{first}<p>{escaped(report.headline)}.</p></header><main>"]
    body += map(section, (report.programs, *report.ends))
    for content in report.detailed:
        # A frame of its own keeps each page's names and styles apart. Its links to #row would be
        # links to this page, which a frame in it may not load; the base makes them its own.
        own = page(content).replace("<head>", '<head><base href="about:srcdoc">', 1)
        title = escaped(content.headline)
        body.append(
            f"<details open><summary>{title}</summary>"
            f'<iframe title="{title}" srcdoc="{html.escape(own)}"></iframe></details>'
        )
    return whole("Programs", [*body, "</main>"])


# From a format to what writes one program's report, and to what writes several.
ONE: dict[str, Callable[[Content], str]] = {
    "text": text.plain,
    "markdown": text.markdown,
    "json": data.as_json,
    "html": page,
    "github": lambda content: github([content]),
    "sarif": lambda content: sarif([content]),
}
WRITERS: dict[str, Callable[[Several], str]] = {
    "text": plain,
    "markdown": markdown,
    "json": as_json,
    "html": as_page,
    "github": lambda report: github(report.contents),
    "sarif": lambda report: sarif(report.contents),
}
