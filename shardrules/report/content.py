"""What a report says, whatever it is written as; and it as Markdown and JSON."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
from collections.abc import Iterable
from typing import Any

from shardrules import hlo
from shardrules.arguments import checked
from shardrules.costs import accounts, estimates, findings, outputs, transfers
from shardrules.costs.findings import Finding
from shardrules.costs.waste import Hint, dearer, hints
from shardrules.report import grouping
from shardrules.report.sections import Section, sections

__all__ = ["Content", "as_json", "content", "markdown"]

SCHEMA = 1  # of the JSON; it grows when a field changes its meaning or goes


@dataclasses.dataclass(frozen=True)
class Content:
    """All that a report says.

    Attributes:
      title: where the program came from.
      judgement, account: the verifier's.
      unequal: outputs that are called replicated and not proven so, that no allowance covers.
      unequal_allowed: such outputs with the reasons for which they stay.
      strict: outputs that are unproven alone are findings, too.
      findings: those on collectives that no allowance covers.
      allowed: findings with the reasons for which they stay.
      unused: allowances that match nothing.
      hints: needed collectives that could be cheaper.
      target: the accelerator on which times are estimated, None for none.
    """

    title: str
    judgement: hlo.Judgement
    account: accounts.Account
    findings: tuple[Finding, ...]
    allowed: tuple[tuple[Finding, str], ...]
    unused: tuple[str, ...]
    hints: tuple[Hint, ...]
    target: estimates.Target | None = None
    unequal: tuple[outputs.Unequal, ...] = ()
    unequal_allowed: tuple[tuple[outputs.Unequal, str], ...] = ()
    strict: bool = False

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

    @functools.cached_property
    def costs(self) -> tuple[Section, ...]:
        """List the other silent costs: donation, transfers, and what else holds anything."""
        return sections(self.judgement.module)

    @property
    def columns(self) -> tuple[str, ...]:
        """Name the cells of a row of collectives."""
        return COLUMNS if self.target is None else (*COLUMNS[:-1], *ESTIMATED, COLUMNS[-1])

    def cells(self, row: grouping.Row) -> tuple[str, ...]:
        """Write a row's cells under ``columns``."""
        one = row.first
        times = () if self.target is None else tuple(map(_about, self.seconds(row)))
        return (
            one.what,
            one.verdict,
            str(row.sites),
            row.runs,
            grouping.size(one.bytes),
            grouping.size(one.wire_bytes),
            "?" if one.runs is None else grouping.size(row.total.wire_bytes),
            *times,
            grouping.here(one.source),
        )

    def seconds(self, row: grouping.Row) -> tuple[float, float | None]:
        """Estimate a run of a row's collectives, and all runs; None where their count is unknown.

        Only of a report with a target.
        """
        if self.target is None:
            raise ValueError("no target")
        each = [
            estimates.seconds(
                self.judgement.verdicts[n], self.account.entries[n].wire_bytes, self.target
            )
            for n in row.numbers
        ]
        runs = row.first.runs
        return max(each), None if runs is None else sum(each) * runs

    @property
    def notes(self) -> tuple[str, ...]:
        """Say how to read the table of collectives, a sentence each."""
        if self.target is None:
            return (NOTE,)
        return (
            NOTE,
            f"est. with ~ is an estimated time and no measurement, on {self.target.name}: wire "
            "bytes by ring algorithms over the bandwidth that the vendor gives of the links, "
            f"without latencies, other traffic and overlap; {self.target.source}",
        )

    @property
    def headline(self) -> str:
        """Say in one line what it comes to."""
        total = self.account.total
        mesh, devices = self.account.mesh, self.account.device_count
        shown = f"{devices} devices (mesh not known: tell it with --mesh or mesh=)"
        if mesh:
            shown = f"{devices} devices ({', '.join(f'{a}={n}' for a, n in mesh.items())})"
        elif devices == 1:
            shown = "1 device"
        found = self.kinds or "no findings"
        if not total.sites:
            return f"{self.title}: {shown}, no collectives{self._unseen(devices)}; {found}"
        ran = "1 collective runs" if total.sites == 1 else f"{total.sites} collectives run"
        times = ("at most " if total.at_most else "") + (
            f"{total.count} times" if total.count != 1 else "once"
        )
        loops = f", {total.unknown} in loops of unknown length" if total.unknown else ""
        return (
            f"{self.title}: {shown}, {ran} {times}{loops}, "
            f"{grouping.size(total.wire_bytes)} on the wire per device; {found}"
        )

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
        """List the collectives for tables; those that are alike are one row."""
        return grouping.rows(self.account)

    @functools.cached_property
    def replicas(self) -> tuple[tuple[str, tuple[tuple[outputs.Unequal, str, str], ...]], ...]:
        """List outputs that aren't proven equal under their titles, each with its last line."""
        made = (
            (UNEQUAL, tuple((one, "to do", one.advice) for one in self.unequal)),
            (f"{UNEQUAL}, allowed", tuple((o, "reason", r) for o, r in self.unequal_allowed)),
        )
        return tuple((title, items) for title, items in made if items)

    @functools.cached_property
    def remarks(self) -> tuple[tuple[str, tuple[grouping.Remark, ...]], ...]:
        """List findings, allowed ones and hints under their titles; what is alike is one."""
        return tuple(
            (title, tuple(made))
            for title, made in (
                ("Findings", _remarks(self.findings)),
                ("Allowed", _allowed(self.allowed)),
                ("Could be cheaper", _hints(self.hints)),
            )
            if made
        )


def _remarks(found: Iterable[Finding], reason: str = "") -> list[grouping.Remark]:
    return [
        grouping.Remark(
            same[0].kind,
            tuple(f.verdict for f in same),
            tuple(f.entry for f in same),
            same[0].verdict.reason,
            "reason" if reason else "to do",
            reason or same[0].advice,
        )
        for same in findings.alike(found)
    ]


def _allowed(allowed: Iterable[tuple[Finding, str]]) -> list[grouping.Remark]:
    return [
        remark
        for same in grouping.alike(allowed, lambda pair: pair[1])
        for remark in _remarks((f for f, _ in same), reason=same[0][1])
    ]


def _hints(hints: Iterable[Hint]) -> list[grouping.Remark]:
    return [
        grouping.Remark(
            same[0].kind,
            tuple(h.verdict for h in same),
            tuple(h.entry for h in same),
            "",
            "to do",
            same[0].advice,
        )
        for same in grouping.alike(
            hints, lambda h: (h.kind, h.entry.what, h.entry.source, h.advice)
        )
    ]


@checked(own=("target",))
def content(
    judgement: hlo.Judgement,
    *,
    title: str | None = None,
    strict: bool = False,
    allow: findings.Allowances | None = None,
    target: str | None = None,
    cheapest: bool = False,
) -> Content:
    """Gather what a report says.

    Args:
      judgement: what ``hlo.judge`` returned.
      title: where the program came from; the module's name if None.
      strict: accept proofs alone: verdicts that rest on declared rules are findings too.
      allow: findings that may stay.
      target: an accelerator of ``costs.estimates``, on which times are estimated.
      cheapest: all-reduces that are needed and would move less elsewhere are findings too.
    """
    found = findings.find(judgement, strict)
    could = hints(judgement)
    if cheapest:
        found += dearer(could)
        could = [hint for hint in could if hint.entry.kind != "all-reduce"]
    allow = allow or findings.Allowances()
    stay, allowed, unused = allow.split(found)
    unequal, unequal_allowed, unused_too = allow.split(outputs.find(judgement))
    return Content(
        title or judgement.module.name,
        judgement,
        accounts.of(judgement),
        tuple(stay),
        tuple(allowed),
        tuple(name for name in unused if name in unused_too),
        tuple(could),
        None if target is None else estimates.target(target),
        tuple(unequal),
        tuple(unequal_allowed),
        strict,
    )


UNEQUAL = "Outputs called replicated that are not proven equal"
_OUTPUTS = {"differs": ("differs", "differ"), "unproven": ("unproven", "unproven")}


COLUMNS = ("collective", "verdict", "sites", "runs", "bytes", "wire bytes", "in all", "source")
ESTIMATED = ("est. a run", "est. in all")  # before the source, where there is a target
NOTE = (
    f"{accounts.CONVENTION}; of one run at one site, and in all: wire bytes of all runs at all "
    "sites"
)


def _about(seconds: float | None) -> str:
    return "?" if seconds is None else f"~{grouping.duration(seconds)}"


def _totals(totals: accounts.Totals) -> dict[str, int]:
    return dataclasses.asdict(totals)


def _collectives(what: Content) -> list[dict[str, Any]]:
    """Write the collectives of a report, single runs of each."""
    collectives: list[dict[str, Any]] = []
    on = what.target
    for entry, verdict in zip(what.account, what.judgement.verdicts):
        collectives.append(
            {
                **{f.name: getattr(entry, f.name) for f in dataclasses.fields(entry)},
                "group_size": verdict.collective.group_size,
                "needed_axes": verdict.needed_axes,
                "range": [verdict.range.start, verdict.range.stop] if verdict.range else None,
                "rests_on": [
                    {"what": s.what, "source": s.source, "status": s.status, "detail": s.detail}
                    for s in verdict.rests_on
                ],
            }
        )
        if on is not None:
            time = estimates.seconds(verdict, entry.wire_bytes, on)
            collectives[-1]["estimated_seconds"] = time
    return collectives


def _outputs(what: Content) -> list[dict[str, Any]]:
    """Write what is proven of each output, and what its sharding promises."""
    promises = what.judgement.promises or (None,) * len(what.judgement.outputs)
    return [
        {
            "path": list(o.path),
            "name": None if promise is None else outputs.name(promise[0]),
            "sharding": None if promise is None else promise[1],
            "shape": str(o.shape),
            "equal": o.equal,
            "varying": o.varying,
            "reason": o.reason,
        }
        for o, promise in zip(what.judgement.outputs, promises)
    ]


@checked
def as_json(what: Content) -> str:
    """Return a report as JSON, one object; bytes are per device.

    ``collectives`` are single runs, ``totals`` are over all runs of one execution.
    """
    on = what.target
    numbers = {id(verdict): n for n, verdict in enumerate(what.judgement.verdicts)}

    def number(of: Finding | Hint) -> int:
        return numbers[id(of.verdict)]

    return (
        json.dumps(
            {
                "schema": SCHEMA,
                "title": what.title,
                "module": what.judgement.module.name,
                "mesh": what.account.mesh,
                "device_count": what.account.device_count,
                "convention": accounts.CONVENTION,
                "estimated_on": on and {"name": on.name, "source": on.source},
                "clean": what.clean,
                "unequal_outputs": [dataclasses.asdict(one) for one in what.unequal],
                "unequal_outputs_allowed": [
                    {**dataclasses.asdict(one), "allowed_because": reason}
                    for one, reason in what.unequal_allowed
                ],
                "total": _totals(what.account.total),
                "by_axes": {over: _totals(t) for (over,), t in what.account.by("over").items()},
                "collectives": _collectives(what),
                "findings": [
                    {"kind": f.kind, "collective": number(f), "advice": f.advice}
                    for f in what.findings
                ],
                "allowed": [
                    {"kind": f.kind, "collective": number(f), "reason": reason}
                    for f, reason in what.allowed
                ],
                "unused_allowances": list(what.unused),
                "hints": [
                    {
                        "kind": h.kind,
                        "collective": number(h),
                        "bytes_before": h.bytes_before,
                        "bytes_after": h.bytes_after,
                        "advice": h.advice,
                    }
                    for h in what.hints
                ],
                "outputs": _outputs(what),
                "costs": [section._asdict() for section in what.costs],
            },
            indent=1,
        )
        + "\n"
    )


def cell(value: Any) -> str:
    """Write a cell of a Markdown table."""
    text = grouping.here(str("?" if value is None else value))
    return text.replace("|", "\\|").replace("\n", " ")


@checked
def markdown(what: Content) -> str:
    """Return a report as GitHub's Markdown."""
    lines = [f"# {what.title}", "", what.headline[len(what.title) + 2 :] + ".", ""]
    for title, unequal in what.replicas:
        lines += [f"## {title}", ""]
        for one, label, todo in unequal:
            lines += [f"- **{one.kind}**: {one.what}", f"  - because {one.because}"]
            lines.append(f"  - {label}: {todo}")
        lines.append("")
    if what.rows:
        lines += ["| " + " | ".join(what.columns) + " |"]
        lines += ["|---|---" + "|--:" * (len(what.columns) - 3) + "|---|"]
        lines += ["| " + " | ".join(map(cell, what.cells(row))) + " |" for row in what.rows]
        lines += [line for note in what.notes for line in ("", f"{note[0].upper()}{note[1:]}.")]
        lines.append("")
    for title, remarks in what.remarks:
        lines += [f"## {title}", ""]
        for remark in remarks:
            where = f", `{remark.source}`" if remark.source else ""
            lines.append(f"- **{remark.kind}**: {remark.what}{where}")
            lines += [f"  - because {remark.reason}"] if remark.reason else []
            lines += [f"  - {remark.label}: {remark.todo}"] if remark.todo else []
        lines.append("")
    for section in what.costs:
        lines += [f"## {section.title}", "", "| " + " | ".join(section.columns) + " |"]
        lines += ["|---" * len(section.columns) + "|"]
        lines += ["| " + " | ".join(map(cell, row)) + " |" for row in section.rows]
        lines += ["", f"{section.note[0].upper()}{section.note[1:]}.", ""]
    if what.unused:
        lines += ["## Allowances that match nothing", "", *(f"- `{w}`" for w in what.unused), ""]
    return "\n".join(lines).rstrip() + "\n"
