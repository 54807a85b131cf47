"""A collective in a loop whose results no trip reads: one collective after the loop is enough."""

from __future__ import annotations

from shardrules.costs.waste.shared.loop_flow import Unread
from shardrules.costs.waste.shared.program import SMALL, WITHIN_SHARDS, Hint, Kind, Site, line

_NAME = "after the loop"
_NOTE = " (equal up to rounding)"


def _find(site: Site) -> Hint | None:
    if not site.in_loop or not site.is_written or site.in_inner_shard_map:
        return None
    sites = site.program.parts(site.computation.name, site.position)
    results = [site.program.unread.get(s.key) for s in sites]
    own = results[sites.index(site)]
    if own is None or (site.entry.runs is None and "keeps the last of" in own.ways):
        return None  # without a trip the result would be what the carry starts from
    size = site.entry.bytes
    outer = [r.around for r in results if r is not None]
    # A combined collective's round trips stay unless all of its parts leave the loop.
    whole = len(outer) == len(sites)
    times = max(map(site.runs_of, outer))
    after = None if own.copies is None else size * own.copies * site.runs_of(own.around)
    if whole:
        if "stacks" in own.ways and sum(s.entry.bytes for s in sites) > SMALL:
            return None
    elif "stacks" in own.ways or not site.pays_alone(after):
        return None
    advice = _advice(site, own, after, times) + line(site, "before the loop")
    return site.hint(_NAME, advice, bytes_after=after, trips_after=times, together=whole)


def _advice(site: Site, own: Unread, after: int | None, times: int | None) -> str:
    runs, size = site.entry.runs, site.entry.bytes
    name = "all_gather" if site.collective.kind == "all-gather" else "psum"
    name = name if name == "all_gather" or site.adds else "reduce"
    if own.ways == {"adds up"}:
        what = "its results are only added up over the loop's trips"
        change = f"carry the sum of its operands and {name} that once after the loop"
    elif own.ways == {"keeps the last of"}:
        what = "the loop only keeps its last result"
        change = f"carry its operand instead and {name} that once after the loop"
    else:
        what = "no trip of the loop reads its results, which are only stacked or added up"
        change = (
            "return its operand from the scan's body instead, and "
            f"{name} the stack of them once after the scan"
        )
    if not site.in_shard_map:
        change = (
            "XLA's partitioner makes it of a reduction over a sharded dimension: in the body, "
            f"{WITHIN_SHARDS}, and reduce over that after the loop"
        )
    then = f"{'?' if after is None else after} B in {'?' if times is None else times}"
    if runs is None:
        return f"{what}: {change}, and {size} B on every trip become {then} round trips{_NOTE}"
    trips = "1 round trip" if runs == 1 else f"{runs} round trips"
    return f"{what}: {change}, and {runs * size} B in {trips} become {then}{_NOTE}"


KIND = Kind(
    _NAME,
    "an all-reduce or all-gather in a loop that only stacks, adds up, scales, converts or passes "
    "on its results",
    "return the operand from the scan's body, or carry the sum of operands, and run one collective "
    "after the scan",
    "reduce within the shards in the body, and over the shards after the loop",
    _find,
)
