"""Verdicts on unchecked shard_maps, and the tables that show them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shardrules.hooks.retrace import sent_bytes
from shardrules.hooks.unchecked import Call, Site, UncheckedSite, costliest
from shardrules.report.grouping import counted, size
from shardrules.report.text import table

SWITCH, BY_HAND, UNTRIED, MORE, RAISES, GRADIENTS, RULE, OUTPUTS, LIMIT = _ORDER = (
    "switch it now",
    "can be switched by hand, not tried",
    "can be switched, not tried",
    "can be switched, and would send more",
    "the patched script fails",
    "takes gradients in its body, which would change",
    "needs this rule",
    "out_specs say replicated and the value varies",
    "refused with the check on",
)
_GRADIENTS_CHANGE = (
    "  with the check on, the gradient of a replicated value is summed over the mesh axes already:",
    "    leave out the psum or pmean that follows (of a loss that is a pmean it is the mean), or",
    "    differentiate by shardrules.vary(w, axes), which keeps each device's own;",
    "  and a psum in what is differentiated passes its cotangent on once, and not once for each",
    "    device: compare the values of a step before and after",
)


class Row(NamedTuple):
    """A call site with its calls and its verdict."""

    site: Site  # the source location of the shard_map
    calls: tuple[Call, ...]  # one call per argument signature
    # SWITCH, BY_HAND, UNTRIED, or the obstacle of one of its calls: MORE, RAISES, GRADIENTS,
    # RULE, OUTPUTS, LIMIT.
    verdict: str
    note: str = ""  # the result of the patched script, if that decided the verdict

    def shown(self, after: bool) -> str:
        """Format the wire bytes of the all-reduces, summed over argument signatures."""
        # Count a function that is traced again, for jit say, once.
        calls = {(c.kind, c.before, c.after): c for c in self.calls if c.inside is None}.values()
        entries = [e for c in calls for e in (c.after if after else c.before) or ()]
        unknown = sum(entry.runs is None for entry in entries)
        return size(sent_bytes(entries)) + (f" and {unknown} in while loops" if unknown else "")


def rows(calls: Sequence[Call]) -> list[Row]:
    """Group calls by site, in the order of the first call of each."""
    by_site: dict[Site, list[Call]] = {}
    for call in calls:
        by_site.setdefault(call.site, []).append(call)
    return [Row(site, tuple(made), _verdict(made)) for site, made in by_site.items()]


def _verdict(calls: Sequence[Call]) -> str:
    obstacles = {
        RULE: any(call.missing for call in calls),
        OUTPUTS: any(call.outputs for call in calls),
        LIMIT: any(call.error for call in calls),
        GRADIENTS: any(call.takes_gradients for call in calls),
    }
    before = sum(sent_bytes(call.before or ()) for call in calls)
    after = sum(sent_bytes(call.after or ()) for call in calls)
    measured = all(call.before is not None for call in calls if call.inside is None)
    obstacles[MORE] = measured and after > before
    return next((obstacle for obstacle, is_there in obstacles.items() if is_there), SWITCH)


def place(site: Site | UncheckedSite) -> str:
    """Format a site as ``file:line (function)``, relative to the current folder if below it."""
    return f"{short(site.file)}:{site.line} ({site.function})"


def written(
    rows: Sequence[Row],
    before: Mapping[str, int] | None = None,
    after: Mapping[str, int] | None = None,
) -> str:
    """Return the table of sites with details; ``before`` and ``after`` are bytes by program."""
    if not rows:
        return "no shard_map with its check off was called\n"
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in _ORDER}
    found = ", ".join(f"{verdict} ({n})" for verdict, n in counts.items() if n)
    cells = [(place(row.site), len(row.calls), row.verdict) for row in rows]
    lines = [
        f"{counted(len(rows), 'shard_map')} with the check off: {found}",
        "",
        table([("shard_map", "calls", "verdict"), *cells]),
    ]
    if before is not None and after is not None:
        lines += ["", *_sent(before, after)]
    for row in rows:
        lines += _details(row)
    return "\n".join(lines).rstrip() + "\n"


_SHOWN = 12  # programs in the table


def _sent(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    sums = [(name, before.get(name, 0), after.get(name, 0)) for name in {*before, *after}]
    sums = sorted((each for each in sums if max(each[1:])), key=lambda each: (-max(each[1:]), each))
    shown, rest = sums[:_SHOWN], sums[_SHOWN:]
    if rest:
        more = f"{len(rest)} more programs"
        shown.append((more, sum(off for _, off, _ in rest), sum(on for *_, on in rest)))
    shown.append(("all programs", sum(before.values()), sum(after.values())))
    cells = [(name, size(off), size(on)) for name, off, on in shown]
    return [
        table([("compiled program", "bytes now", "bytes with the patch"), *cells]),
        "",
        "(bytes: what one device sends for the collectives of each program that the script\n"
        "compiled, run once; a while loop without a known count is one trip. The script ran\n"
        "again with the patch, in a process of its own, to measure this)",
    ]


def _details(row: Row) -> list[str]:
    lines = [f"  {row.note}"] if row.note else []
    if row.verdict == MORE and not row.note:
        lines.append(
            f"  its call and its derivative by every float argument send {row.shown(False)} now, "
            f"and {row.shown(True)} with the check on"
        )
    calls = row.calls
    for missing in dict.fromkeys(m for call in calls for m in call.missing):
        lines.append(f"  {missing.kernel} has no rule; write one of")
        lines += [f"    {line}" for line in missing.lines]
    for output in dict.fromkeys(o for call in calls for o in call.outputs):
        lines.append(
            f"  out_specs{output.path} is {output.spec}, and it varies over {output.axes}:\n"
            "    name the axes in its spec, or reduce it over them (jax.lax.psum, pmean)"
        )
    for error in dict.fromkeys(c.error for c in calls if c.error and not c.outputs):
        lines += [f"  {line}" for line in error.splitlines()]
    lines += [f"  {text}" for text in dict.fromkeys(a for c in calls for a in c.annotations)]
    if any(call.takes_gradients for call in calls):
        lines += _GRADIENTS_CHANGE
    for why in dict.fromkeys(c.undifferentiated for c in calls if c.undifferentiated):
        lines.append(f"  its derivative was not traced ({why})")
    return ["", f"{place(row.site)}: {row.verdict}", *lines] if lines else []


def decided(sites: Iterable[UncheckedSite]) -> str:
    """Return the table of what ``install(unchecked="check")`` decided at each site."""
    groups: dict[UncheckedSite, list[UncheckedSite]] = {}
    for site in costliest(sites):
        key = dataclasses.replace(site, before_bytes=None, after_bytes=None, arguments="")
        groups.setdefault(key, []).append(site)
    if not groups:
        return "no shard_map with its check off was called"

    def moved(counts: list[int | None]) -> str:
        measured = [count for count in counts if count is not None]
        return size(sum(measured)) if measured else "?"

    on_count = sum(site.switched for site in groups)
    rows = [
        (
            place(site),
            moved([instance.before_bytes for instance in instances]),
            moved([instance.after_bytes for instance in instances]),
            "runs with its check on" if site.switched else f"as written: {site.reason}",
        )
        for site, instances in groups.items()
    ]
    return (
        f"{counted(len(groups), 'shard_map')} with the check off: {on_count} "
        f"switched on, {len(groups) - on_count} left\n"
        + table([("shard_map", "bytes off", "bytes on", "outcome"), *rows])
    )


def short(file: str) -> str:
    return os.path.relpath(file) if is_here(file) else file


def is_here(file: str) -> bool:
    """Return whether a file is below the current folder."""
    relative = os.path.relpath(file)
    return (
        not relative.startswith(os.pardir) and not os.path.isabs(relative) and os.path.isfile(file)
    )
