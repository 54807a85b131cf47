"""Several programs in one report: a table, the costliest first, and what each one's own says."""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Callable, Sequence

from shardrules.report import text
from shardrules.report.annotations import github, sarif
from shardrules.report.blocks import Block, as_markdown, as_text
from shardrules.report.content import Content, named
from shardrules.report.data import SCHEMA
from shardrules.report.data import as_json as json_of_one
from shardrules.report.drawn import escaped
from shardrules.report.grouping import counted, duration, of_step, percent, size
from shardrules.report.page import page, section, whole
from shardrules.report.sections import LOOPS

__all__ = ["ONE", "Several", "WRITERS", "gather", "plain"]

COLUMNS = (
    "program",
    "times",
    "devices",
    "collectives",
    "runs",
    "wire bytes",
    "avoidable",
    "findings",
    "other",
)
NOTE = (
    "wire bytes: what one device sends in one execution; times: how often JAX made a program of "
    "which the report says the same"
)


@dataclasses.dataclass(frozen=True)
class Several:
    """The reports of a process's programs, the costliest first.

    Attributes:
      contents: of each program that was judged.
      counts: how many programs each stands for.
      failures: name of each that can't be judged, and why.
      unused: allowances that match nothing in any of them.
      missing: programs that were not judged, since Ctrl-C was pressed.
      of_process: they are what a process compiled; else they were read from files.
      notes: more on how the programs came to be.
    """

    contents: tuple[Content, ...]
    counts: tuple[int, ...]
    failures: tuple[tuple[str, str], ...]
    unused: tuple[str, ...]
    missing: int
    of_process: bool = True
    notes: tuple[str, ...] = ()

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
        """List the programs that have a collective or another cost, with their counts.

        The loops of a program that does nothing else of interest (random bits, say) are none.
        """
        return [
            (content, count)
            for content, count in zip(self.contents, self.counts)
            if content.account.entries or _costs(content, but=LOOPS) or content.changes
        ]

    @property
    def told(self) -> list[Content]:
        """List the programs of which there is more to say than their row."""
        return [content for content, _ in self.shown if content.changes or _costs(content)]

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
        worth = max(self.contents, key=lambda c: c.avoidable[1::-1], default=None)
        parts = [
            counted(total, "program") + (" compiled" if self.of_process else ""),
            f"{len(self.shown)} with collectives or other costs",
            counted(self.findings, "finding") if self.findings else "no findings",
        ]
        if worth is not None and worth.worth:
            parts.append(f"in {worth.title} {worth.worth}")
        if self.failures:
            parts.append(f"{len(self.failures)} can't be judged")
        if self.missing:
            parts.append(f"interrupted: {self.missing} not judged")
        return ", ".join(parts)

    @property
    def programs(self) -> Block:
        """Make the table of the programs; a file's program has no count."""
        rows: list[tuple[str, ...]] = []
        for content, count in self.shown:
            total, avoidable = content.account.total, content.avoidable
            runs = f"{'at most ' if total.at_most else ''}{total.count}"
            mesh = content.account.mesh
            axes = f" ({', '.join(f'{a}={n}' for a, n in mesh.items())})" if mesh else ""
            saved = size(avoidable.bytes)
            if avoidable.bytes:
                saved += f" ({percent(avoidable.bytes, content.ledger.total.bytes)})"
            if content.target is not None:
                saved += f", ~{duration(avoidable.seconds)}"
            rows.append(
                (
                    content.title,
                    *([str(count)] if self.of_process else []),
                    f"{content.account.device_count}{axes}",
                    str(total.sites),
                    runs + (f" and {total.unknown} in loops" if total.unknown else ""),
                    size(total.wire_bytes),
                    saved,
                    content.kinds or "none",
                    ", ".join(_costs(content)).lower(),
                )
            )
        columns = COLUMNS if self.of_process else COLUMNS[:1] + COLUMNS[2:]
        note = NOTE if self.of_process else NOTE.partition(";")[0]
        rest = sum(self.counts) - sum(count for _, count in self.shown)
        more = f"{rest} more {'programs have' if rest > 1 else 'program has'} no collective"
        notes = [*([note] if rows else []), *([more] if rest else []), *self.notes]
        return Block("", "\n".join(notes), columns, rows)

    @property
    def ends(self) -> list[Block]:
        """List what stands below the programs."""
        why = tuple(named(f"{name}: {why}") for name, why in self.failures)
        unused = tuple(map(named, self.unused))
        made = (
            Block("Can't be judged", items=why),
            Block("Allowances that match nothing", items=unused),
        )
        return [block for block in made if block.items]


def _costs(content: Content, but: str = "") -> list[str]:
    """Name the other costs of a program."""
    return [block.title for block in content.costs if block.title != but]


def gather(
    contents: Sequence[Content],
    counts: Sequence[int],
    failures: Sequence[tuple[str, str]] = (),
    missing: int = 0,
    of_process: bool = True,
    notes: Sequence[str] = (),
) -> Several:
    """Put programs in order: those that miss a reduction, then those where most can be avoided.

    Those of a process that differ in nothing reported are one.
    """
    alike: dict[object, tuple[Content, int]] = {}
    for number, (content, count) in enumerate(zip(contents, counts)):
        # Their texts may differ in a constant, or in what nothing here depends on.
        key: object = json_of_one(content) if of_process else number
        alike[key] = content, count + alike.get(key, (content, 0))[1]
    order = sorted(
        alike.values(),
        key=lambda pair: (
            all(one.kind != "differs" for one in pair[0].unequal),
            -pair[0].avoidable.exposed_seconds,
            -pair[0].avoidable.seconds,
            -pair[0].avoidable.bytes,
            -pair[0].account.total.wire_bytes,
            -len(pair[0].findings),
        ),
    )
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


def _alone(content: Content) -> Content:
    """Leave out what is said below all programs."""
    return dataclasses.replace(content, unused=())


def plain(what: Several) -> str:
    """Return the report as text."""
    lines = [*filter(None, (what.measured, what.headline)), "", *as_text([what.programs])]
    for content in what.told:
        lines += ["=" * 72, text.plain(_alone(content))]
    return "\n".join([*lines, *as_text(what.ends)]).rstrip() + "\n"


def markdown(what: Several) -> str:
    """Return the report as GitHub's Markdown."""
    first = [f"{what.measured}.", ""] if what.measured else []
    lines = ["# Programs", "", *first, what.headline + ".", "", *as_markdown([what.programs])]
    for content in what.told:
        # Its headings go one level down.
        own = text.markdown(_alone(content)).splitlines()
        lines += [*(f"#{line}" if line.startswith("#") else line for line in own), ""]
    return "\n".join([*lines, *as_markdown(what.ends)]).rstrip() + "\n"


def as_json(what: Several) -> str:
    """Return the report as one JSON object, in which each program's own stands."""
    programs = [
        {**json.loads(json_of_one(content)), "times": count}
        for content, count in zip(what.contents, what.counts)
    ]
    data = {
        "schema": SCHEMA,
        "clean": what.clean,
        "programs": programs,
        "failures": [{"program": name, "reason": why} for name, why in what.failures],
        "unused_allowances": list(what.unused),
        "not_judged": what.missing,
    }
    return json.dumps(data, indent=1) + "\n"


def as_page(what: Several) -> str:
    """Return the report as one self-contained HTML page: a table, and each program's own page."""
    first = f"<p><b>{escaped(what.measured)}.</b></p>" if what.measured else ""
    headline = escaped(what.headline)
    body = [f"<header><h1>Programs</h1>{first}<p>{headline}.</p></header><main>"]
    body += map(section, (what.programs, *what.ends))
    for content in what.told:
        # A frame of its own keeps each page's names and styles apart. Its links to #row would be
        # links to this page, which a frame in it may not load; the base makes them its own.
        own = page(_alone(content))
        own = html.escape(own.replace("<head>", '<head><base href="about:srcdoc">', 1))
        title = escaped(content.headline)
        body.append(
            f"<details open><summary>{title}</summary>"
            f'<iframe title="{title}" srcdoc="{own}"></iframe></details>'
        )
    return whole("Programs", [*body, "</main>"])


# From a format to what writes one program's report, and to what writes several.
ONE: dict[str, Callable[[Content], str]] = {
    "text": text.plain,
    "markdown": text.markdown,
    "json": json_of_one,
    "html": page,
    "github": lambda content: github([content]),
    "sarif": lambda content: sarif([content]),
}
WRITERS: dict[str, Callable[[Several], str]] = {
    "text": plain,
    "markdown": markdown,
    "json": as_json,
    "html": as_page,
    "github": lambda what: github(what.contents),
    "sarif": lambda what: sarif(what.contents),
}
