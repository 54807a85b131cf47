"""Waste: collectives that are needed and could be cheaper, each kind in a module of its own.

A kind is a ``Kind`` in ``KIND`` of its module and a name in ``_MODULES``.
"""

from __future__ import annotations

from shardrules import hlo
from shardrules.costs import findings
from shardrules.costs.waste import (
    add_first,
    after_loop,
    gathered_too,
    gathered_twice,
    left_apart,
    narrow_first,
    one_part,
    only_a_slice,
    only_returned,
    reduce_first,
    reduce_instead,
    repeated,
    undone,
)
from shardrules.costs.waste.shared.program import Hint, Kind, Program

__all__ = ["KINDS", "Hint", "Kind", "dearer", "hints", "rows"]

# A collective gets the hint of the first kind that matches it.
_MODULES = (
    repeated,
    after_loop,
    only_returned,
    reduce_first,
    reduce_instead,
    add_first,
    only_a_slice,
    one_part,
    undone,
    gathered_too,
    narrow_first,
    gathered_twice,
    left_apart,
)

rows: tuple[Kind, ...] = tuple(module.KIND for module in _MODULES)
KINDS = tuple(kind.name for kind in rows)


def hints(judgement: hlo.Judgement) -> list[Hint]:
    """List the needed collectives that the program shows could be cheaper."""
    program = Program(judgement)
    found = []
    for site in program.sites:
        if site.needed:
            hint = next((h for kind in rows if (h := kind.find(site)) is not None), None)
            if hint is not None:
                found.append(hint)
    return found


def dearer(found: list[Hint]) -> list[findings.Finding]:
    """List the all-reduces among hints as findings, with the bytes now and then."""
    return [
        findings.Finding(h.kind, h.verdict, h.entry, h.advice, h)
        for h in found
        if h.entry.kind == "all-reduce"
    ]
