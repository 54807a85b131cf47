"""Waste: collectives that are needed and could be cheaper, by kinds."""

from __future__ import annotations

import dataclasses

from shardrules import hlo
from shardrules.costs import accounts, findings
from shardrules.costs.waste import (
    gathers,
    left_apart,
    loops,
    narrow_first,
    reductions,
    slices,
    undone,
)
from shardrules.costs.waste.program import Hint, Kind, Program, Site

__all__ = ["KINDS", "Hint", "Kind", "dearer", "hints", "rows"]

# A collective gets the hint of the first kind that matches it.
rows: tuple[Kind, ...] = (
    loops.REPEATED,
    loops.AFTER_LOOP,
    gathers.ONLY_RETURNED,
    reductions.REDUCE_FIRST,
    reductions.REDUCE_INSTEAD,
    reductions.ADD_FIRST,
    slices.ONLY_A_SLICE,
    slices.ONE_PART,
    undone.KIND,
    gathers.GATHERED_TOO,
    narrow_first.KIND,
    gathers.GATHERED_TWICE,
    left_apart.KIND,
)
KINDS = tuple(kind.name for kind in rows)
_OF_LOOPS = (loops.REPEATED.name, loops.AFTER_LOOP.name)
# The collective stays, with less.
_IN_PLACE = (reductions.REDUCE_FIRST.name, narrow_first.KIND.name)
_LEAST = 64  # bytes sent: what saves fewer, and no round trip, is not worth reading


def hints(judgement: hlo.Judgement) -> list[Hint]:
    """List the needed collectives that the program shows could be cheaper."""
    program = Program(judgement)
    found: dict[Site, Hint] = {}
    for site in program.sites:
        hint = next(filter(None, (kind.find(site) for kind in rows)), None) if site.needed else None
        if hint is not None:
            found[site] = hint
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
    return hint.kind == loops.AFTER_LOOP.name or before - after >= _LEAST


_SHARE = 0.01  # of a program's wire bytes: a smaller sum in a loop is a hint


def dearer(found: list[Hint], worth_more_in: hlo.Judgement | None = None) -> list[findings.Finding]:
    """List the all-reduces among hints as findings, with the bytes now and then.

    Args:
      found: the hints.
      worth_more_in: take only the all-reduces in loops that one before or after the loop replaces
        with fewer bytes, and that send more than 1% of this program's bytes; all if None.
    """
    least = None
    if worth_more_in is not None:
        least = _SHARE * sum(map(_sent, accounts.of(worth_more_in).entries))
    return [
        findings.Finding(h.kind, h.verdict, h.entry, h.advice, h)
        for h in found
        if h.entry.kind == "all-reduce" and (least is None or _leaves_a_loop(h, least))
    ]


def _sent(entry: accounts.Entry) -> int:
    """Count what a collective sends; a loop of unknown length makes one trip."""
    return (entry.each if entry.runs is None else entry.runs) * entry.wire_bytes


def _leaves_a_loop(hint: Hint, least: float) -> bool:
    fewer = hint.bytes_before is None or (
        hint.bytes_after is not None and hint.bytes_after < hint.bytes_before
    )
    return hint.kind in _OF_LOOPS and fewer and _sent(hint.entry) > least
