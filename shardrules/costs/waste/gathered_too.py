"""An array that is gathered whole and moved between the same devices as well."""

from __future__ import annotations

from shardrules.costs.waste.shared.program import Hint, Kind, Program, Site

_WHOLE = frozenset("bitcast reshape copy transpose copy-start copy-done".split())


def _find(site: Site) -> Hint | None:
    if site.collective.kind not in ("all-to-all", "collective-permute") or not site.whole:
        return None
    if site.collective.in_place:
        return None
    gathers = site.program.remembered(_gathers, site.program)
    for made in {_made(site, o, _WHOLE | {"slice"}) for o in site.instruction.operands}:
        gather = gathers.get(made)
        if gather is None or not _within(site, gather):
            return None
        advice = (
            f"the all-gather at {gather.where} brings every shard of the same array to the same "
            "devices: take this one's result out of the gathered array, and "
            f"{site.entry.bytes} B become 0 B"
        )
        if not site.in_shard_map:
            advice += f" ({KIND.jit})"
        return site.without(KIND.name, advice)
    return None


def _gathers(program: Program) -> dict[tuple[object, ...], Site]:
    """List the all-gathers by the arrays that they gather."""
    return {
        _made(s, s.source, _WHOLE): s
        for s in program.sites
        if s.collective.kind == "all-gather" and s.whole
    }


def _made(site: Site, position: int, through: frozenset[str]) -> tuple[object, ...]:
    """Follow an operand back to what made the array."""
    value = site.made_by(position, through)
    return (*((computation.name, caller) for computation, caller in value.outside), value.position)


def _within(site: Site, gather: Site) -> bool:
    """Tell whether all that a collective brings comes from the devices of one gathering group."""
    group = {d: n for n, g in enumerate(gather.collective.groups) for d in g}
    rows = site.collective.pairs or site.collective.groups
    return all(len({group.get(d, -1 - d) for d in row}) == 1 for row in rows)


KIND = Kind(
    "gathered too",
    "an all-to-all or permute of an array that is all-gathered over the same devices as well",
    "take its part of the gathered array",
    "constrain the array once to the whole layout, and slice that",
    _find,
)
