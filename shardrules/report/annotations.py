"""Write findings next to the code: GitHub's workflow annotations, and SARIF 2.1.0."""

from __future__ import annotations

import json
import os
import pathlib
import urllib.parse
from collections.abc import Sequence
from typing import Any, NamedTuple

import shardrules
from shardrules import hlo
from shardrules.arguments import checked
from shardrules.costs import findings
from shardrules.costs.findings import Finding
from shardrules.costs.waste import Hint
from shardrules.report.content import Content
from shardrules.report.items import RESTING, alike_hints, item, of_output
from shardrules.report.sections import Item

_PACKAGE = os.path.join(os.path.dirname(shardrules.__file__), "")
_ROOT = "%SRCROOT%"  # GitHub's name for the repository's root
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_RULES = {
    "differs": "An output that is called replicated differs between devices.",
    "redundant": "A collective whose operand is proven equal on every member of its groups.",
    "overwide": "A collective whose operand is proven equal over some of its axes.",
    "unproven": "A collective, or an output, of which nothing is proven.",
    "may hang": "A collective under a predicate that may differ within its group.",
    "declared": "A verdict that rests on a rule which nobody audited.",
}
_CHEAPER = "A collective that is needed and could be cheaper."


class _Note(NamedTuple):
    level: str  # error or note
    item: Item
    frame: hlo.Frame | None
    program: str
    share: float
    allowed: str = ""


def _inside(file: str) -> str:
    """Return a file's path from the repository's root; empty if it is outside of the repository."""
    root = os.environ.get("GITHUB_WORKSPACE") or os.getcwd()
    path = os.path.relpath(os.path.abspath(file), root)
    return "" if path.startswith(os.pardir) else pathlib.PurePath(path).as_posix()


def _frame(verdict: hlo.Verdict) -> hlo.Frame | None:
    """Return the innermost source line in the repository, or else the innermost source line."""
    # <frozen runpy> is not a file, and this package's own frames only ran the script.
    frames = [f for f in verdict.collective.frames if not f.file.startswith(("<", _PACKAGE))]
    inside = (f for f in frames if _inside(f.file) and "site-packages" not in f.file)
    return next(inside, frames[0] if frames else None)


def _notes(contents: Sequence[Content]) -> list[_Note]:
    """Return all notes, the most worthwhile first, since GitHub shows only ten of each level."""
    notes = []
    for content in contents:
        for output in content.unequal:
            level = "error" if content.strict or output.kind == "differs" else "note"
            said = of_output(output, "to do:", output.advice)
            notes.append(_Note(level, said, None, content.title, 1.0))
        groups: list[Sequence[Finding | Hint]] = [*findings.alike(content.findings)]
        for same in [*groups, *alike_hints(content.hints)]:
            level = "error" if isinstance(same[0], Finding) else "note"
            share = sum(content.ledger.share(content.ledger.worth(each)) for each in same)
            frame = _frame(same[0].verdict)
            notes.append(_Note(level, content.item(same), frame, content.title, share))
        for finding, reason in content.allowed:
            frame = _frame(finding.verdict)
            notes.append(_Note("note", item([finding]), frame, content.title, 0.0, reason))
    return sorted(notes, key=lambda note: -note.share)


def _message(note: _Note) -> str:
    lines = [f"{note.item.kind}: {note.item.what} in {note.program}"]
    lines += [f"{label} {text}" for label, text in note.item.lines if label != RESTING]
    return "\n".join(lines)


def _escaped(text: str, of_property: bool = False) -> str:
    """Return text with the escapes that GitHub's runner undoes."""
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if of_property else text


@checked
def github(contents: Sequence[Content]) -> str:
    """Return workflow commands: an annotation per finding and hint, the most worthwhile first."""
    lines = []
    for note in _notes(contents):
        if note.allowed:
            continue
        properties = {"title": f"shardrules: {note.item.kind}"}
        path = _inside(note.frame.file) if note.frame else ""
        if note.frame and path:
            properties = {"file": path, "line": str(note.frame.line), **properties}
        shown = ",".join(f"{name}={_escaped(text, True)}" for name, text in properties.items())
        command = "error" if note.level == "error" else "notice"
        lines.append(f"::{command} {shown}::{_escaped(_message(note))}")
    lines += [content.headline for content in contents]
    return "".join(f"{line}\n" for line in lines)


@checked
def sarif(contents: Sequence[Content]) -> str:
    """Return a SARIF log of one run, with a result for each finding and hint."""
    notes = _notes(contents)
    rules = {
        note.item.kind.replace(" ", "-"): _RULES.get(note.item.kind, _CHEAPER) for note in notes
    }
    described = [{"id": rule, "shortDescription": {"text": text}} for rule, text in rules.items()]
    driver = {"name": "shardrules", "version": shardrules.__version__, "rules": described}
    run = {"tool": {"driver": driver}, "results": [_result(note, [*rules]) for note in notes]}
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _result(note: _Note, rules: list[str]) -> dict[str, Any]:
    rule = note.item.kind.replace(" ", "-")
    result: dict[str, Any] = {
        "ruleId": rule,
        "ruleIndex": rules.index(rule),
        "level": note.level,
        "rank": round(100 * min(1.0, note.share), 2),
        "message": {"text": _message(note)},
    }
    if note.allowed:
        result["suppressions"] = [{"kind": "external", "justification": note.allowed}]
    if note.frame is not None and note.frame.line > 0:
        path = _inside(note.frame.file)
        location = {"uri": urllib.parse.quote(path), "uriBaseId": _ROOT}
        if not path:
            location = {"uri": pathlib.Path(os.path.abspath(note.frame.file)).as_uri()}
        place = {"artifactLocation": location, "region": {"startLine": note.frame.line}}
        result["locations"] = [{"physicalLocation": place}]
    return result


def merged(logs: Sequence[str]) -> str:
    """Return SARIF logs of several processes as one run; GitHub rejects two runs of one tool."""
    whole = json.loads(logs[0])
    rules: dict[str, Any] = {}
    results: list[Any] = []
    for log in logs:
        for run in json.loads(log)["runs"]:
            rules |= {rule["id"]: rule for rule in run["tool"]["driver"]["rules"]}
            results += run["results"]
    for result in results:
        result["ruleIndex"] = [*rules].index(result["ruleId"])
    whole["runs"][0]["tool"]["driver"]["rules"] = list(rules.values())
    whole["runs"][0]["results"] = sorted(results, key=lambda result: -result["rank"])
    return json.dumps(whole, indent=1) + "\n"
