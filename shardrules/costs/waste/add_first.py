"""Two all-reduces over the same devices whose results are only added: reduce the sum once."""

from __future__ import annotations

from shardrules.costs import sums
from shardrules.costs.advice import operation
from shardrules.costs.waste.shared.program import WITHIN_SHARDS, Hint, Kind, Site, line

__all__ = ["KIND"]

# The gradient of an embedding that is used twice: its rows are looked up, and it is multiplied by.
_OF_AN_ARRAY = (
    "if both are the gradient of one array w, give each shard its own, "
    "ws = jax.lax.with_sharding_constraint(jnp.broadcast_to(w, (n, *w.shape)), "
    "jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axes))) for n shards of the "
    "batch, and read it by jax.vmap over ws and x.reshape(n, -1, *x.shape[1:])"
)


def _find(site: Site) -> Hint | None:
    size = site.entry.bytes
    indexed = operation(site.collective) == "scatter-add" and site.entry.phase == "backward"
    if not (site.adds and site.whole and (site.is_written or indexed)):
        return None
    if not sums.added_to_another(*site.result_place):
        return None
    change = "add the operands and psum that once"
    if not site.in_shard_map:
        change = _OF_AN_ARRAY if indexed else KIND.jit
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
    f"in both, {WITHIN_SHARDS}, add these, and reduce over the shards once",
    _find,
)
