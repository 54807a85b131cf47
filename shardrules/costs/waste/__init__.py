"""Find waste of each kind: collectives that are needed but could be cheaper."""

from __future__ import annotations

import dataclasses

from shardrules import hlo
from shardrules.costs import accounts, findings
from shardrules.costs.waste import (
    batches,
    beforehand,
    calls,
    gathers,
    out_of_loops,
    reductions,
    reshapes,
    resharded,
    row_loops,
    slices,
    undone,
    written,
)
from shardrules.costs.waste.program import Fed, Hint, Kind, Program, Site

__all__ = ["KINDS", "Hint", "dearer", "hints", "table"]

# The module of each kind. A collective gets the hint of the first kind that finds one.
_MODULES = {
    "looped over": row_loops,
    "repeated": out_of_loops,
    "after the loop": out_of_loops,
    "accumulated": out_of_loops,
    "each call": out_of_loops,
    "asked each trip": out_of_loops,
    "called whole": calls,
    "transformed whole": calls,
    "only returned": gathers,
    "uneven": gathers,
    "reduce first": reductions,
    "reduce instead": reductions,
    "add first": reductions,
    "only a slice": slices,
    "resharded": resharded,
    "written whole": written,
    "one part": slices,
    "reshape": reshapes,
    "joined": reshapes,
    "split": reshapes,
    "counted": reshapes,
    "undone": undone,
    "whole batch": batches,
    "gathered too": gathers,
    "narrow first": beforehand,
    "gathered twice": gathers,
    "off the batch": batches,
    "left apart": beforehand,
}
KINDS = tuple(_MODULES)
_OF: dict[str, Kind] = {kind: module.ROWS[kind] for kind, module in _MODULES.items()}
_OF_LOOPS = ("repeated", "after the loop")
# Kinds whose change keeps the collective, with fewer bytes, or replaces it by another collective
# with the same round trips.
_IN_PLACE = ("reduce first", "narrow first", "whole batch", "off the batch")
_LEAST = 64  # a hint that saves fewer bytes, and no round trip, is not worth reading


def hints(judgement: hlo.Judgement, fed: Fed | None = None) -> list[Hint]:
    """Return hints on the needed collectives that the program shows could be cheaper.

    ``fed`` says how often the program ran with its own results as arguments, if that was observed.
    """
    if not judgement.is_compiled:
        return []  # XLA's later passes combine, hoist and scatter some of them
    program = Program(judgement)
    program.fed = fed or {}
    found: dict[Site, Hint] = {}
    for site in program.sites:
        for kind in KINDS if site.needed else ():
            hint = _OF[kind].find(site)
            if hint is not None:
                found[site] = dataclasses.replace(hint, kind=kind)
                break
    # The first part of a combined collective counts its round trips. If the first part goes but
    # another part stays, the collective's own round trips stay, too.
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
    # If parts leave a loop together, the first one counts the round trips that they save.
    return hint.kind == "after the loop" or before - after >= _LEAST


_SHARE = 0.01  # a sum in a loop with a smaller share of the program's wire bytes is only a hint


def dearer(found: list[Hint], worth_more_in: hlo.Judgement | None = None) -> list[findings.Finding]:
    """Return the hints on all-reduces as findings.

    With ``worth_more_in``, return only all-reduces in loops that send more than 1% of this
    program's bytes, if an all-reduce before or after the loop can replace them with fewer bytes.
    Also return the parts that are combined with these.
    """
    taken = [hint for hint in found if hint.entry.kind == "all-reduce"]
    if worth_more_in is not None:
        least = _SHARE * sum(e.each * e.wire_bytes for e in accounts.of(worth_more_in))
        leaving = [hint for hint in taken if hint.kind in _OF_LOOPS]
        large = {
            _collective(hint)
            for hint in leaving
            if hint.entry.each * hint.entry.wire_bytes > least and _moves_fewer(hint)
        }
        # The parts of one combined all-reduce leave a loop together, or not at all.
        taken = [hint for hint in leaving if _collective(hint) in large]
    return [findings.Finding(h.kind, h.entry, h.advice, h) for h in taken]


def _collective(hint: Hint) -> tuple[str, str]:
    collective = hint.verdict.collective
    return collective.computation, collective.name


def _moves_fewer(hint: Hint) -> bool:
    """Return whether the change moves fewer bytes, or a count is unknown."""
    before, after = hint.bytes_before, hint.bytes_after
    return before is None or (after is not None and after < before)


def table() -> str:
    """Return the table of all kinds in docs/waste.md."""
    head = ("kind", "what it looks like", "in a shard_map", "in a jit with shardings")
    rows = [(f"*{name}*", *kind[1:]) for name, kind in _OF.items()]
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
