"""An all-gather of which each device reads only a part: a permute or an all-to-all brings that."""

from __future__ import annotations

from shardrules.costs import accounts
from shardrules.costs.waste.shared import parts
from shardrules.costs.waste.shared.program import Hint, Kind, Site


def _find(site: Site) -> Hint | None:
    entry, size = site.entry, site.collective.group_size
    if site.collective.kind != "all-gather" or size < 2 or not site.whole:
        return None
    part, operand = parts.read(site), site.taken
    along = site.collective.dimension
    if part is None or site.result is None or not along.isdecimal():
        return None
    groups = site.collective.groups
    if part.dimension == int(along):
        if part.size != operand.dimensions[part.dimension]:
            return None
        brought = _sources(groups, part)
        if brought is None:
            return None
        own = all(a == b for a, b in brought)
        sent = 0 if own else entry.bytes
        change = (
            "which is its own shard: read that"
            if own
            else f"which one permute brings: jax.lax.ppermute(x, {site.over}, perm) with perm="
            f"{_permutation(groups, part)}"
        )
    elif part.size * size == site.result.dimensions[part.dimension] and part.follows(groups):
        sent = accounts.wire_bytes("all-to-all", entry.bytes, size)
        change = (
            f"its own slice of dimension {part.dimension} of each shard, which one all-to-all "
            f"brings: jax.lax.all_to_all(x, {site.over}, {part.dimension}, {along}, tiled=True)"
        )
    else:
        return None
    if not site.in_shard_map:
        change += (
            " (XLA's partitioner gathered it: give both sides one layout, or write a shard_map)"
        )
    advice = (
        f"each device reads only 1/{size} of the result, {change}, and sends {sent} B of "
        f"{entry.wire_bytes} B"
    )
    if not sent:
        return site.without(KIND.name, advice)
    return site.smaller(KIND.name, advice, entry.bytes, sent)


def _sources(groups, part: parts.Part) -> list[tuple[int, int]] | None:
    """List each shard's owner and its reader; None if no permute brings the shards."""
    pairs = []
    for group in groups:
        for device in group:
            place, rest = divmod(part.starts[device], part.size)
            if rest:
                return None
            pairs.append((group[place], device))
    return pairs if len({source for source, _ in pairs}) == len(pairs) else None


def _permutation(groups, part: parts.Part) -> str:
    """Write the permutation within a group, if it is the same in all; else a placeholder."""
    places = {tuple(part.starts[d] // part.size for d in group) for group in groups}
    if len(places) != 1:
        return "[...]"
    pairs = [(source, target) for target, source in enumerate(places.pop())]
    return str(sorted(pairs)) if len(pairs) <= 8 else "[...]"


KIND = Kind(
    "one part",
    "an all-gather of which each device reads only one shard, or its own slice of every shard",
    "ppermute for one shard, all_to_all for a slice of each",
    "give what makes the array and what reads it one layout, or write a shard_map",
    _find,
)
