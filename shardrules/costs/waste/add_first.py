"""Two all-reduces over the same devices whose results are only added: reduce the sum once."""

from __future__ import annotations

from shardrules.costs import sums
from shardrules.costs.waste.shared.program import Hint, Kind, Site, line

__all__ = ["KIND"]


def _find(site: Site) -> Hint | None:
    size = site.entry.bytes
    if not (site.adds and site.whole):
        return None
    if not sums.added_to_another(*site.result_place):
        return None
    change = "add the operands and psum that once" if site.in_shard_map else KIND.jit
    advice = (
        f"its result is only added to that of another sum over the same devices: {change}, and "
        f"{2 * size} B of both become {size} B (equal up to rounding)"
        f"{line(site, 'once, before its first use')}"
    )
    return site.without(KIND.name, advice)


KIND = Kind(
    "add first",
    "an all-reduce whose result is only added to that of another one over the same devices",
    "add the operands and psum the sum",
    "add the arrays before the reduction over the sharded dimension",
    _find,
)
