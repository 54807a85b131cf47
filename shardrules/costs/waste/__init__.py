"""Waste: collectives that are needed and could be cheaper, by kinds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from shardrules import hlo
from shardrules.costs import accounts, findings
from shardrules.costs.waste import (
    asked,
    calls,
    gathers,
    left_apart,
    loops,
    narrow_first,
    reductions,
    slices,
    undone,
)
from shardrules.costs.waste.program import Hint, Program, Site

__all__ = ["KINDS", "Hint", "dearer", "hints"]

# A collective gets the hint of the first kind that finds one. docs/waste.md has a row for each.
_FIND: dict[str, Callable[[Site], Hint | None]] = {
    "repeated": loops.repeated,
    "after the loop": loops.after_loop,
    "accumulated": loops.accumulated,
    "asked each trip": asked.find,
    "called whole": calls.find,
    "only returned": gathers.only_returned,
    "reduce first": reductions.reduce_first,
    "reduce instead": reductions.reduce_instead,
    "add first": reductions.add_first,
    "only a slice": slices.only_a_slice,
    "one part": slices.one_part,
    "undone": undone.find,
    "gathered too": gathers.gathered_too,
    "narrow first": narrow_first.find,
    "gathered twice": gathers.gathered_twice,
    "left apart": left_apart.find,
}
KINDS = tuple(_FIND)
_OF_LOOPS = ("repeated", "after the loop")
_IN_PLACE = ("reduce first", "narrow first")  # the collective stays, with less
_LEAST = 64  # bytes sent: what saves fewer, and no round trip, is not worth reading


def hints(judgement: hlo.Judgement) -> list[Hint]:
    """List the needed collectives that the program shows could be cheaper."""
    if not judgement.is_compiled:
        return []  # XLA's later passes combine, hoist and scatter some of them
    program = Program(judgement)
    found: dict[Site, Hint] = {}
    for site in program.sites:
        for kind, find in _FIND.items() if site.needed else ():
            hint = find(site)
            if hint is not None:
                found[site] = dataclasses.replace(hint, kind=kind)
                break
    for site, hint in found.items():
        parts = program.parts(site.instruction)
        stays = [part not in found or found[part].kind in _IN_PLACE for part in parts]
        if site is parts[0] and any(stays[1:]) and not stays[0]:
            trips = hint.round_trips_after, site.entry.runs
            both = None if None in trips else sum(filter(None, trips))
            found[site] = dataclasses.replace(hint, round_trips_after=both)
    return [hint for hint in found.values() if _saves(hint)]


def _saves(hint: Hint) -> bool:
    before, after, trips = hint.sent_before, hint.sent_after, hint.round_trips_after
    if before is None or after is None or trips != hint.round_trips_before:
        return True
    # Of parts that leave a loop together, the first counts the round trips that they save.
    return hint.kind == "after the loop" or before - after >= _LEAST


_SHARE = 0.01  # of a program's wire bytes: a smaller sum in a loop is a hint


def dearer(found: list[Hint], worth_more_in: hlo.Judgement | None = None) -> list[findings.Finding]:
    """List the all-reduces among hints as findings, with the bytes now and then.

    With ``worth_more_in``, only those in loops that one before or after the loop replaces with
    fewer bytes, and that send more than 1% of this program's bytes.
    """
    taken = [hint for hint in found if hint.entry.kind == "all-reduce"]
    if worth_more_in is not None:
        least = _SHARE * sum(e.each * e.wire_bytes for e in accounts.of(worth_more_in))
        large = (hint for hint in taken if hint.entry.each * hint.entry.wire_bytes > least)
        taken = [hint for hint in large if hint.kind in _OF_LOOPS and _moves_fewer(hint)]
    return [findings.Finding(h.kind, h.entry, h.advice, h) for h in taken]


def _moves_fewer(hint: Hint) -> bool:
    before, after = hint.bytes_before, hint.bytes_after
    return before is None or (after is not None and after < before)
