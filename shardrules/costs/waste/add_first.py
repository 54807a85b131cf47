"""Two all-reduces over the same devices whose results are only added: reduce the sum once."""

from __future__ import annotations

from shardrules.costs.advice import operation
from shardrules.costs.waste.shared.program import WITHIN_SHARDS, Hint, Kind, Site, line
from shardrules.costs.waste.shared.values import Use, Value

_MOVES = frozenset("bitcast reshape transpose copy all-reduce-done".split())

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
    if not _added_to_another(site):
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


def _added_to_another(site: Site) -> bool:
    """Tell whether the result is only added to that of a sum that stands before it."""
    use = _addition(site)
    if use is None:
        return False
    added = use.instruction.operands
    (other,) = {*added} - {use.used}
    first = _made_by(site, Value(use.outside, other))
    if first is None or (first.position, first.operand) >= (site.position, site.operand):
        return False
    back = _addition(first)
    return (
        first.adds
        and first.collective.groups == site.collective.groups
        and first.taken.element_type == site.taken.element_type
        and first.taken.element_count == site.taken.element_count
        and back is not None
        and (back.outside, back.user, back.used) == (use.outside, use.user, other)
    )


def _addition(site: Site) -> Use | None:
    """Find the addition that alone takes a result."""
    uses = site.program.uses(site.computation, site.position, site.operand, _MOVES)
    if uses is None or len(uses) != 1 or uses[0].instruction.opcode != "add":
        return None
    return uses[0] if len(set(uses[0].instruction.operands)) == 2 else None


def _made_by(site: Site, value: Value) -> Site | None:
    """Find the collective beside a site that made a value."""
    value, element = site.program.made_by(value, _MOVES - {"all-reduce-done"}), 0
    if value.instruction.opcode == "get-tuple-element":
        value, element = value.operand(0), int(value.instruction.attribute("index") or 0)
    if value.instruction.opcode == "all-reduce-done":
        value = value.operand(0)
    if len(value.outside) > 1:
        return None
    parts = site.program.parts(value.computation.name, value.position)
    return next((p for p in parts if p.whole and p.operand == element), None)


KIND = Kind(
    "add first",
    "an all-reduce whose result is only added to that of another one over the same devices",
    "add the operands and psum the sum",
    f"in both, {WITHIN_SHARDS}, add these, and reduce over the shards once",
    _find,
)
