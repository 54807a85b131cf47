"""Several programs in one report: a table, the costliest first, and what each one's own says."""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Sequence

from shardrules.report import text
from shardrules.report.content import SCHEMA, Content, cell
from shardrules.report.content import as_json as json_of_one
from shardrules.report.content import markdown as markdown_of_one
from shardrules.report.grouping import size
from shardrules.report.page import page as page_of_one
from shardrules.report.sections import LOOPS

__all__ = ["Several", "WRITERS", "as_json", "gather", "markdown", "page", "plain"]

COLUMNS = ("program", "times", "devices", "collectives", "runs", "wire bytes", "findings", "other")
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
    """

    contents: tuple[Content, ...]
    counts: tuple[int, ...]
    failures: tuple[tuple[str, str], ...]
    unused: tuple[str, ...]
    missing: int
    of_process: bool = True

    @property
    def columns(self) -> tuple[str, ...]:
        """Name the cells of a row; a file's program has no count."""
        return COLUMNS if self.of_process else COLUMNS[:1] + COLUMNS[2:]

    @property
    def note(self) -> str:
        """Say how to read the table."""
        return NOTE if self.of_process else NOTE.partition(";")[0]

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
            if content.account.entries
            or content.replicas
            or any(cost.title != LOOPS for cost in content.costs)
        ]

    @property
    def told(self) -> list[Content]:
        """List the programs of which there is more to say than their row."""
        return [
            content
            for content, _ in self.shown
            if content.replicas
            or content.findings
            or content.allowed
            or content.hints
            or content.costs
        ]

    @property
    def headline(self) -> str:
        """Say in one line what it comes to."""
        total = sum(self.counts) + len(self.failures)
        parts = [
            f"{total} program{'s' if total != 1 else ''}{' compiled' if self.of_process else ''}",
            f"{len(self.shown)} with collectives or other costs",
            "1 finding" if self.findings == 1 else f"{self.findings or 'no'} findings",
        ]
        if self.failures:
            parts.append(f"{len(self.failures)} can't be judged")
        if self.missing:
            parts.append(f"interrupted: {self.missing} not judged")
        return ", ".join(parts)

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """List the cells under ``columns``."""
        found: list[tuple[str, ...]] = []
        for content, count in self.shown:
            total = content.account.total
            runs = f"{'at most ' if total.at_most else ''}{total.count}"
            mesh = content.account.mesh
            axes = f" ({', '.join(f'{a}={n}' for a, n in mesh.items())})" if mesh else ""
            found.append(
                (
                    content.title,
                    *([str(count)] if self.of_process else []),
                    f"{content.account.device_count}{axes}",
                    str(total.sites),
                    runs + (f" and {total.unknown} in loops" if total.unknown else ""),
                    size(total.wire_bytes),
                    content.kinds or "none",
                    ", ".join(section.title.lower() for section in content.costs),
                )
            )
        return found

    @property
    def remainder(self) -> str:
        """Say how many programs have no row, empty if none."""
        rest = sum(self.counts) - sum(count for _, count in self.shown)
        if not rest:
            return ""
        return f"{rest} more {'programs have' if rest > 1 else 'program has'} no collective"


def gather(
    contents: Sequence[Content],
    counts: Sequence[int],
    failures: Sequence[tuple[str, str]] = (),
    missing: int = 0,
    of_process: bool = True,
) -> Several:
    """Put programs in order: those that miss a reduction, then the costliest.

    Those of a process that differ in nothing reported are one.

    Args:
      contents: their reports, in the order in which they were compiled.
      counts: how many programs had the text of each.
      failures: name of each that can't be judged, and why.
      missing: programs that were not judged.
      of_process: they are what a process compiled; else they were read from files.
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
    )


def plain(what: Several) -> str:
    """Return the report as text."""
    lines = [what.headline, ""]
    if what.rows:
        lines += [text.table([what.columns, *what.rows]), "", f"({what.note})"]
    lines += [what.remainder] if what.remainder else []
    for content in what.told:
        own = dataclasses.replace(content, unused=())
        lines += ["", "=" * 72, text.plain(own).rstrip()]
    if what.failures:
        lines += ["", "can't be judged:", *(f"  {name}: {why}" for name, why in what.failures)]
    if what.unused:
        lines += ["", "allowances that match nothing:", *(f"  {name}" for name in what.unused)]
    return "\n".join(lines).rstrip() + "\n"


def markdown(what: Several) -> str:
    """Return the report as GitHub's Markdown."""
    lines = ["# Programs", "", what.headline + ".", ""]
    if what.rows:
        lines += ["| " + " | ".join(what.columns) + " |", "|---" * len(what.columns) + "|"]
        lines += ["| " + " | ".join(cell(c) for c in row) + " |" for row in what.rows]
        lines += ["", f"{what.note[0].upper()}{what.note[1:]}.", ""]
    lines += [f"{what.remainder}.", ""] if what.remainder else []
    for content in what.told:
        own = markdown_of_one(dataclasses.replace(content, unused=()))
        # Its headings go one level down.
        lines += [f"#{line}" if line.startswith("#") else line for line in own.splitlines()]
        lines.append("")
    for title, items in (
        ("Can't be judged", [f"- {name}: {cell(why)}" for name, why in what.failures]),
        ("Allowances that match nothing", [f"- `{name}`" for name in what.unused]),
    ):
        lines += [f"## {title}", "", *items, ""] if items else []
    return "\n".join(lines).rstrip() + "\n"


def as_json(what: Several) -> str:
    """Return the report as one JSON object, in which each program's own stands."""
    programs = [
        {**json.loads(json_of_one(content)), "times": count}
        for content, count in zip(what.contents, what.counts)
    ]
    return (
        json.dumps(
            {
                "schema": SCHEMA,
                "clean": what.clean,
                "programs": programs,
                "failures": [{"program": name, "reason": why} for name, why in what.failures],
                "unused_allowances": list(what.unused),
                "not_judged": what.missing,
            },
            indent=1,
        )
        + "\n"
    )


def page(what: Several) -> str:
    """Return the report as one self-contained HTML page: a table, and each program's own page."""
    head = "".join(f'<th scope="col">{html.escape(c)}</th>' for c in what.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in what.rows
    )
    parts = [
        f"<h1>Programs</h1><p>{html.escape(what.headline)}.</p>",
        '<div class="wide" tabindex="0" role="region" aria-label="programs"><table>'
        "<caption>Programs, the costliest first</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        if rows
        else "",
        f'<p class="dim">{html.escape(what.note)}. {html.escape(what.remainder)}</p>',
    ]
    for name, why in what.failures:
        parts.append(f"<p><b>{html.escape(name)}</b> can't be judged: {html.escape(why)}</p>")
    for name in what.unused:
        parts.append(f"<p>The allowance <code>{html.escape(name)}</code> matches nothing.</p>")
    for content in what.told:
        # A frame of its own keeps each page's names and styles apart. Its links to #row would be
        # links to this page, which a frame in it may not load; the base makes them its own.
        own = page_of_one(dataclasses.replace(content, unused=()))
        own = html.escape(own.replace("<head>", '<head><base href="about:srcdoc">', 1))
        title = html.escape(content.headline)
        parts.append(
            f'<details open><summary>{title}</summary><iframe title="{title}" srcdoc="{own}">'
            "</iframe></details>"
        )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Programs</title><style>{_STYLE}</style></head><body><main>\n"
        + "\n".join(filter(None, parts))
        + "\n</main></body></html>\n"
    )


_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem;
  padding: 0 1.25rem; }
caption { text-align: left; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .87rem; }
th, td { border-bottom: 1px solid #8888; padding: .35rem .6rem; text-align: left;
  vertical-align: top; }
summary { cursor: pointer; font-weight: 600; margin: 1.5rem 0 .5rem; overflow-wrap: anywhere; }
iframe { border: 1px solid #8888; border-radius: .5rem; height: 80vh; width: 100%; }
"""

WRITERS = {"text": plain, "markdown": markdown, "json": as_json, "html": page}
