"""An all-reduce whose result is only summed up on each device: the sum may come first."""

from __future__ import annotations

from shardrules.costs import sums
from shardrules.costs.waste.shared.program import Hint, Kind, Site, line

__all__ = ["KIND"]


def _find(site: Site) -> Hint | None:
    entry = site.entry
    if not (site.adds and site.whole and site.is_written):
        return None
    size = sums.reduced_after(*site.result_place)
    if size is None or size >= entry.bytes:
        return None
    change = "reduce before you psum" if site.in_shard_map else KIND.jit
    advice = (
        f"its result is only summed up on each device: {change}, and {entry.bytes} B become "
        f"{size} B{line(site, 'before it is broadcast')}"
    )
    return site.smaller(KIND.name, advice, size)


KIND = Kind(
    "reduce first",
    "an all-reduce whose result each device only sums up, or scatters into fewer places",
    "reduce before the psum, or cast with shardrules.vary before the broadcast",
    "sum over all of these dimensions at once, x.sum((0, 1))",
    _find,
)
