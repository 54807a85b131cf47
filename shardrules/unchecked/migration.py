"""Tell which unchecked shard_maps can have their check on, in tables and as a patch."""

from __future__ import annotations

import collections
import dataclasses
import difflib
import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from shardrules.paths import is_here, is_library
from shardrules.report.grouping import alike
from shardrules.report.text import table
from shardrules.unchecked.results import Outcome, Sent, SentByName, compared, sent_by_name
from shardrules.unchecked.retrace import sent_bytes
from shardrules.unchecked.sites import (
    BY_TYPE,
    COMPUTES_ELSE,
    RULES_ELSE,
    TAKES_GRADIENT,
    UNSEEN,
    UNSTEADY,
    Site,
    UncheckedCall,
    UncheckedSite,
    costliest,
    of_cotangents,
)
from shardrules.unchecked.source import (
    drop_reasons,
    flag,
    imports_shardrules,
    lines_of,
    place_to_install,
)
from shardrules.units import counted, size

SWITCH, BY_HAND, UNTRIED, MORE, RAISES, CHANGES, GRADIENTS, RULE, OUTPUTS, BLIND, LIMIT = _ORDER = (
    "switch it now",
    "can be switched by hand, not tried",
    "can be switched, not tried",
    "can be switched, and would send more",
    "the patched script fails",
    "values or gradients may change",
    "takes gradients in its body, which may change",
    "needs this rule",
    "out_specs say replicated and the value varies",
    "can't be looked at",
    "refused with the check on",
)
_SHOWN = 12  # programs in the table
_GRADIENTS_CHANGE = (
    "  with the check on, the gradient of a replicated value is already summed over the mesh "
    "axes. Either differentiate with respect to shardrules.vary(w, {axes}), naming each axis "
    "of the psum or pmean that follows, which keeps each device's own gradient; or return the "
    "pmean of the loss from the function that is differentiated, and remove what averages its "
    "gradients afterwards: the pmean of whole ones, the division by an axis size of sharded "
    "ones (removing only the pmean gives the sum, not the mean)",
    "  a psum inside of the differentiated function passes its cotangent on unchanged; with the "
    "check off it sums the devices' cotangents: compare the values of a step before and after",
)
_GRADIENTS_REMAIN = (
    "  with the check on, its body holds the same operations, including the same sums: switch "
    "it on by hand, with shardrules.install() where the program starts, and compare the values "
    "of a step before and after",
)
_COMPUTES_ELSE = (
    "  (write it so that the type of a value decides nothing; or compare the values and gradients "
    "by shardrules.testing.assert_same_unchecked(loss, *arguments, forced=True), and where they "
    "are the same, switch the check on by hand)"
)


class SiteRow(NamedTuple):
    """A call site with its calls and its verdict."""

    site: Site  # the source location of the shard_map
    calls: tuple[UncheckedCall, ...]  # one call per argument signature
    # SWITCH, BY_HAND, UNTRIED, or the obstacle of one of its calls: MORE, RAISES, CHANGES,
    # GRADIENTS, RULE, OUTPUTS, BLIND, LIMIT.
    verdict: str
    note: str = ""  # the result of the patched script, if that decided the verdict

    def shown(self, after: bool) -> str:
        """Format the wire bytes of the all-reduces, summed over argument signatures."""
        # Count a function once even if it is traced again, for jit for example.
        calls = {(c.kind, c.before, c.after): c for c in self.calls if c.inside is None}.values()
        entries = [e for c in calls for e in (c.after if after else c.before) or ()]
        unknown = sum(entry.runs is None for entry in entries)
        return size(sent_bytes(entries)) + (f" and {unknown} in while loops" if unknown else "")


def rows(calls: Sequence[UncheckedCall]) -> list[SiteRow]:
    """Group calls by site, in the order of the first call of each."""
    return [SiteRow(same[0].site, same, _verdict(same)) for same in alike(calls, lambda c: c.site)]


def _verdict(calls: Sequence[UncheckedCall]) -> str:
    before = sum(sent_bytes(call.before or ()) for call in calls)
    after = sum(sent_bytes(call.after or ()) for call in calls)
    measured = all(call.before is not None for call in calls if call.inside is None)
    obstacles = {
        RULE: any(call.missing for call in calls),
        OUTPUTS: any(call.outputs for call in calls),
        BLIND: any(call.error.startswith(UNSEEN) for call in calls),
        LIMIT: any(call.error for call in calls),
        GRADIENTS: any(call.takes_gradients for call in calls),
        CHANGES: any(call.reasons_to_leave for call in calls),
        MORE: measured and after > before,
    }
    return next((obstacle for obstacle, is_there in obstacles.items() if is_there), SWITCH)


def place(site: Site | UncheckedSite) -> str:
    """Format a site as ``file:line (function)``, relative to the current folder if below it."""
    return f"{short(site.file)}:{site.line} ({site.function})"


def written(
    rows: Sequence[SiteRow], runs: tuple[Outcome, Outcome] | None = None, programs: int = 0
) -> str:
    """Return the table of sites, with details of each.

    ``runs`` are without and with the patch; ``programs`` counts what the script compiled.
    """
    if not rows:
        of = f" by the {counted(programs, 'program')} that the script compiled"
        return f"no shard_map with its check off was called{of if programs else ''}\n"
    counts = collections.Counter(row.verdict for row in rows)
    found = ", ".join(f"{verdict} ({counts[verdict]})" for verdict in _ORDER if counts[verdict])
    cells = [(place(row.site), len(row.calls), row.verdict) for row in rows]
    lines = [
        f"{counted(len(rows), 'shard_map')} with the check off: {found}",
        "",
        table([("shard_map", "calls", "verdict"), *cells]),
    ]
    if runs is not None:
        before, after = runs
        lines += ["", *_sent(before, after)]
        lines += ["", compared(before.results, after.results)]
    for row in rows:
        lines += _details(row)
    return "\n".join(lines).rstrip() + "\n"


def _sent(before: Outcome, after: Outcome) -> list[str]:
    sums = [each for each in sent_by_name(before.sent, after.sent) if each.before or each.after]
    sums.sort(key=lambda each: (-max(each.before, each.after), each))
    total = sum(each.before for each in sums), sum(each.after for each in sums)
    cells = [(_named(each), each.before, each.after) for each in sums[:_SHOWN]]
    if rest := sums[_SHOWN:]:
        more = sum(each.before for each in rest), sum(each.after for each in rest)
        cells.append((f"{sum(each.programs for each in rest)} more programs", *more))
    cells.append(("all programs", *total))
    shown = [(name, size(off), _less(off, on)) for name, off, on in cells]
    is_same = total[0] == total[1] and not any(each.saves for each in sums)
    same = "the patch saves no bytes here; the gain is that JAX checks these shard_maps"
    return [
        table([("compiled program", "bytes now", "bytes with the patch"), *shown]),
        "",
        *([same] if is_same else []),
        *_launched(before.launched, after.launched),
        "(bytes: what one device sends for the collectives of all programs of a name, each run "
        "once; programs of one function that send equal bytes for arguments of one kind count "
        "once, and of those that only one run compiled just the costliest of that name counts; a "
        "while loop without a known count is one trip. The script ran again with the patch, in a "
        "process of its own, to measure this)",
    ]


def _named(each: SentByName) -> str:
    return each.name + (f" ({each.programs} programs)" if each.programs > 1 else "")


def _launched(before: Sent, after: Sent) -> list[str]:
    """Say which programs run more collectives with the patch, which bytes don't show."""
    sums = sent_by_name(before, after)
    more = sorted(
        (each.before - each.after, _named(each), each.before, each.after)
        for each in sums
        if each.after > each.before
    )
    if not more:
        return []
    named = ", ".join(f"{name} {on}, {off} without it" for _, name, off, on in more[:_SHOWN])
    rest = f", and {len(more) - _SHOWN} more programs" if len(more) > _SHOWN else ""
    return [
        f"with the patch, more collectives run: {named}{rest}. Each is a launch, which costs time "
        "that bytes don't show; XLA for TPU or GPU may combine them"
    ]


def _less(off: int, on: int) -> str:
    """Format the bytes ``on``, with the difference from ``off`` where three digits hide it."""
    hidden = off != on and size(off) == size(on)
    return size(on) + (f" ({size(abs(off - on))} {'less' if on < off else 'more'})" * hidden)


def _once(calls: Iterable[UncheckedCall], field: str) -> dict[Any, None]:
    """Return the entries of one field of the calls, in order and without duplicates."""
    return dict.fromkeys(itertools.chain.from_iterable(getattr(c, field) for c in calls))


def _details(row: SiteRow) -> list[str]:
    lines = [f"  {row.note}"] if row.note else []
    if row.verdict == MORE and not row.note:
        lines.append(
            f"  its call and its derivative by every float argument send {row.shown(False)} now, "
            f"and {row.shown(True)} with the check on"
        )
    calls = row.calls
    for missing in _once(calls, "missing"):
        lines.append(f"  {missing.kernel} has no rule; write one of")
        lines += [f"    {line}" for line in missing.lines]
    for output in _once(calls, "outputs"):
        lines.append(
            f"  out_specs{output.path} is {output.spec}, but it varies over {output.axes}: "
            "name the axes in its spec, or reduce it over them (jax.lax.psum, pmean)"
        )
    for error in dict.fromkeys(c.error for c in calls if c.error and not c.outputs):
        lines += [f"  {line}" for line in error.splitlines()]
    if row.verdict == LIMIT:
        lines.append(
            "  (the change that this asks for is right only with the check on: make it when "
            "you remove check_vma=False)"
        )
    lines += [f"  {text}" for text in _once(calls, "annotations")]
    reasons = _once(calls, "reasons_to_leave")
    if any(call.takes_gradients for call in calls):
        # Operations were compared only if no other obstacle came first.
        same = row.verdict == GRADIENTS and COMPUTES_ELSE not in reasons
        axes = calls[0].summed * (len({c.summed for c in calls}) == 1)
        named = ", ".join(map(repr, axes)) or "*axes"
        lines += _GRADIENTS_REMAIN if same else [s.format(axes=named) for s in _GRADIENTS_CHANGE]
        reasons = {r: None for r in reasons if not r.startswith((COMPUTES_ELSE, TAKES_GRADIENT))}
    lines += [f"  {reason}" for reason in reasons]
    if UNSTEADY in reasons:
        lines.append("  (change it outside of the body, and pass its value as an argument)")
    if BY_TYPE in reasons:
        lines.append(
            "  (write it so that the type of a value decides none of them, and count outside of "
            "the body)"
        )
    lines += [_COMPUTES_ELSE] if reasons.keys() & {COMPUTES_ELSE, RULES_ELSE} else []
    of_values = (UNSTEADY, BY_TYPE, COMPUTES_ELSE, RULES_ELSE, TAKES_GRADIENT)
    lines += of_cotangents(reason for reason in reasons if not reason.startswith(of_values))
    for why in dict.fromkeys(c.undifferentiated for c in calls if c.undifferentiated):
        lines.append(f"  its gradient was not compared: {why}")
    return ["", f"{place(row.site)}: {row.verdict}", *lines] if lines else []


def decided(sites: Iterable[UncheckedSite]) -> str:
    """Return the table of what ``install(unchecked="check")`` decided at each site."""
    replace = dataclasses.replace
    groups = alike(
        costliest(sites),
        lambda site: replace(site, before_bytes=None, after_bytes=None, arguments=""),
    )
    if not groups:
        return "no shard_map with its check off was called"

    def moved(counts: Iterable[int | None]) -> str:
        measured = [count for count in counts if count is not None]
        return size(sum(measured)) if measured else "?"

    cells = [("shard_map", "bytes off", "bytes on", "outcome")]
    for same in groups:
        off, on = (moved(s.before_bytes for s in same), moved(s.after_bytes for s in same))
        outcome = f"as written: {same[0].reason}"
        outcome = "runs with its check on" if same[0].switched else outcome
        cells.append((place(same[0]), off, on, outcome))
    on_count = sum(same[0].switched for same in groups)
    return (
        f"{counted(len(groups), 'shard_map')} with the check off: {on_count} "
        f"switched on, {len(groups) - on_count} left\n{table(cells)}"
    )


def short(file: str) -> str:
    return os.path.relpath(file) if is_here(file) else file


# -- the patch, as edited files --------------------------------------------------------------------

_INSTALL = "import shardrules\n\nshardrules.install()\n"


class Edits(NamedTuple):
    before: dict[str, list[str]]  # the lines of each file
    after: dict[str, list[str]]
    sites: tuple[Site, ...]  # the sites that are switched
    left: list[str]  # the edits left to do by hand, each with its reason


def folder_of(edits: Edits) -> str:
    """Return the folder to which a patch's paths are relative: this one if it holds all files."""
    folders = [os.path.dirname(os.path.abspath(file)) for file in edits.before]
    if all(map(is_here, edits.before)):
        return os.getcwd()
    return os.path.commonpath(folders)


def diff(edits: Edits) -> str:
    lines: list[str] = []
    for file, before in edits.before.items():
        name = os.path.relpath(file, folder_of(edits)).replace(os.sep, "/")
        name += "\t" * (" " in name)  # patch reads a name up to a space, unless a tab ends it
        for changed in difflib.unified_diff(before, edits.after[file], f"a/{name}", f"b/{name}"):
            tail = "" if changed.endswith("\n") else "\n\\ No newline at end of file\n"
            lines.append(changed + tail)
    return "".join(lines)


def edited(rows: Sequence[SiteRow], script: str, rules: Sequence[str] = ()) -> Edits:
    """Switch checks on where possible; install the hooks and add ``rules`` in the script."""
    candidates = {row.site for row in rows if row.verdict in (SWITCH, UNTRIED, BY_HAND)}
    reasons = {
        row.site: _by_hand(row.site, script) if row.site in candidates else row.verdict
        for row in rows
    }
    for group in joined(list(reasons), rows):
        blocked = next((site for site in group if reasons[site]), None)
        for site in group:
            if blocked is not None and not reasons[site]:
                reasons[site] = f"together with {place(blocked)}, which can't be switched here"
    left = [f"{place(site)}: {why}" for site, why in reasons.items() if why and site in candidates]
    sites = tuple(site for site, reason in reasons.items() if not reason)
    if not sites:
        return Edits({}, {}, (), left)
    texts = {site.file: lines_of(site.file) for site in sites}
    after = {file: list(lines) for file, lines in texts.items()}
    for file, lines in after.items():
        flags = {flag(site) for site in sites if site.file == file}
        # Work from the bottom up, since drop_reasons deletes lines.
        for line, start, end in sorted(filter(None, flags), reverse=True):
            raw = lines[line - 1].encode()
            lines[line - 1] = (raw[:start] + b"True" + raw[end:]).decode()
            drop_reasons(lines, line)
    where = None
    if is_here(script, script):
        where, others = place_to_install(script, sites)
        left += [
            f"{short(script)}:{line}: {call} replaces what the patch adds; drop its arguments"
            for line, call in others
        ]
    else:
        left.append(
            f"{script} is not your own file: call shardrules.install() in one that is, before the "
            "first shard_map is made (for pytest, in conftest.py)"
        )
    if where is None:
        left += [f"{script}: write {line} there" for line in rules]
    else:
        texts.setdefault(script, lines_of(script))
        lines = after.setdefault(script, list(texts[script]))
        newline = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
        install = _INSTALL.splitlines()[2 * imports_shardrules(script, where) :]
        added = [*([""] if where else []), *install, *rules, ""]
        if where < len(lines) and not lines[where].strip():
            added.pop()
        lines[where:where] = [line + newline for line in added]
    return Edits(texts, after, sites, left)


def _by_hand(site: Site, script: str) -> str:
    """Return why the patch can't switch a site, empty if it can."""
    if not is_here(site.file, script):
        why = "not your own file below this folder or the script's"
        mine = not is_library(os.path.abspath(site.file))
        return f"{why}; if it is yours, run migrate in a folder above it" if mine else why
    if flag(site) is None:
        return "this call has no check_vma=False or check_rep=False that is written out"
    return ""


def joined(sites: Sequence[Site], rows: Sequence[SiteRow]) -> list[list[Site]]:
    """Split sites into groups that are switched together or not at all."""
    # Sites at the same position share a flag; a nested one was retraced with both switched on.
    pairs = []
    for row in rows:
        pairs += [(call.site, call.inside) for call in row.calls if call.inside is not None]
    for same in alike(sites, lambda site: (site.file, site.line, site.column)):
        pairs += itertools.pairwise(same)
    groups = {site: [site] for site in sites}
    for first, second in pairs:
        if first in groups and second in groups and groups[first] is not groups[second]:
            groups[first] += groups[second]
            for site in groups[second]:
                groups[site] = groups[first]
    return list({id(group): group for group in groups.values()}.values())
