"""Retrace and compile a program with its shard_maps' checks on, to tell what it then sends."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardrules import program
from shardrules.costs import accounts
from shardrules.costs.advice import is_defensive
from shardrules.costs.worth import Switched, key
from shardrules.door.again import Again
from shardrules.errors import first_line
from shardrules.hooks.install import held
from shardrules.hooks.notes import Notes
from shardrules.hooks.state import Scope
from shardrules.registry.table import Registry
from shardrules.unchecked.python_state import Kept
from shardrules.unchecked.unseen import unseen

if TYPE_CHECKING:
    from shardrules.unchecked.sites import UncheckedSite


def switched(
    how: Again | None, scope: Scope | None, registry: Registry, mesh: Mapping[str, int] | None
) -> Switched | str:
    """Compile a program with every check on that can be on, as ``install(unchecked="check")`` does.

    ``how`` and ``scope`` say how the program was traced, and in which scope of the hooks. If it
    can't be retraced, return the reason: tracing depends on something that has changed since, or
    tracing changes something that can't be restored.
    """
    # Retrace in the scope and under the meshes of the first trace, with the program's Python state
    # snapshotted, and let the hooks decide on each check. Then compile and judge the result.
    under = scope or Scope()
    if how is None:
        return "it is not known how it was traced"
    notes = Notes()
    try:
        with held() as hooks, contextlib.ExitStack() as stack:
            with hooks.enter(under):
                same = stack.enter_context(how.entered())
            if not same:
                return "a mesh or a setting of JAX that was active then no longer is"
            if (kept := Kept(how.function)).why:
                return kept.why
            base = under if under.active else Scope(True, "varying")
            on = dataclasses.replace(base, unchecked="check", casts="cheapest", notes=notes)
            with unseen(kept), hooks.enter(on):
                compiled = how.lower().compile()
        judgement = program.judged(program.read(compiled), registry, mesh)
    except Exception as error:  # the program's own code, or a backend, may raise  # noqa: BLE001
        return first_line(error)
    if not notes.unchecked:
        return "its shard_maps were not made inside of the watch"
    account = accounts.of(judgement)
    defensive = (e for e in account if e.judged is not None and is_defensive(e.judged))
    sites: dict[bool, dict[str, str]] = {True: {}, False: {}}
    for site in notes.unchecked:
        sites[site.switched][_place(site)] = site.reason
    steps: list[str] = []
    for placement in notes.placements:
        steps += filter(None, (*placement.exceptions, placement.in_the_way))
    return Switched(
        sum(entry.each * entry.wire_bytes for entry in account),
        collections.Counter(map(key, defensive)),
        tuple(sites[True]),
        tuple(sites[False].items()),
        tuple(dict.fromkeys(steps)),
    )


def _place(site: UncheckedSite) -> str:
    return f"{site.file}:{site.line} ({site.function})"
