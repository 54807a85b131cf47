"""An all-reduce of which each device reads only its own slice: a reduce-scatter moves half."""

from __future__ import annotations

from shardrules.costs import accounts
from shardrules.costs.waste.shared import parts
from shardrules.costs.waste.shared.program import Hint, Kind, Site

# XLA for TPUs turns a smaller reduce-scatter into an all-reduce (JAX 0.10.2: 64 KiB, not 1 MiB).
_LEAST_ON_TPU = 2**20


def _find(site: Site) -> Hint | None:
    entry, size = site.entry, site.collective.group_size
    if site.program.platform == "tpu" and entry.bytes < _LEAST_ON_TPU:
        return None
    if site.program.platform is None and not site.in_shard_map:
        return None  # XLA for TPUs and GPUs makes the reduce-scatter by itself
    part = parts.read(site) if site.adds and site.whole and size > 1 else None
    if part is None or site.result is None:
        return None
    if site.result.dimensions[part.dimension] != size * part.size:
        return None
    if not part.follows(site.collective.groups):
        return None
    sent = accounts.wire_bytes("reduce-scatter", entry.bytes, size)
    change = (
        f"jax.lax.psum_scatter(x, {site.over}, scatter_dimension={part.dimension}, tiled=True) "
        "instead of the psum and the dynamic_slice"
        if site.in_shard_map
        else "XLA's partitioner made it: under jax.shard_map, jax.lax.psum_scatter of each "
        "device's own sum"
    )
    if site.in_shard_map and entry.phase != "forward":
        change = (
            "where it is the gradient of an array that the shard_map takes whole, give it that "
            "array sharded, by its in_specs, and jax.lax.all_gather it inside, whose gradient"
        )
    advice = (
        f"each device reads only its own 1/{size} of the result: {change} sends {sent} B where it "
        f"sends {entry.wire_bytes} B"
    )
    return site.smaller(KIND.name, advice, entry.bytes, sent)


KIND = Kind(
    "only a slice",
    "an all-reduce of which each device reads only its own slice",
    "psum_scatter instead of the psum and the dynamic_slice",
    "a shard_map around it, with psum_scatter: on TPU and GPU XLA often makes one itself",
    _find,
)
