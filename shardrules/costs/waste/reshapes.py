"""Reshapes that move a batch between devices: steps first, of a dimension that is sharded."""

from __future__ import annotations

from shardrules.costs.advice import operation
from shardrules.costs.waste.program import WHOLE, Hint, Kind, Program, Site
from shardrules.hlo.reader.flow import BARRIERS, made_by

_MOVES = WHOLE | BARRIERS | {"slice", "concatenate", "all-to-all-done", "collective-permute-done"}

_CONVERTED = _MOVES | {"convert"}  # XLA for TPU moves what a product reads of it


def find(site: Site) -> Hint | None:
    """Find what XLA sends to bring (batch, ...) as (steps, batch / steps, ...) to one layout."""
    if not _is_reshape(site):
        return None
    steps = site.program.remembered(_steps).get(site.collective.op_name)
    if steps is None:
        return None
    return site.hint(
        f"XLA sends rows to other devices for x.reshape({steps}, -1, ...), whose steps come "
        "before the sharded rows: if it does not matter which rows a step takes, as for "
        f"microbatches, x.reshape(-1, {steps}, *x.shape[1:]).swapaxes(0, 1) gives each step "
        f"rows that each device has already, and {site.entry.bytes} B become 0 B"
    )


def _is_reshape(site: Site) -> bool:
    return (
        site.collective.kind in ("all-to-all", "collective-permute")
        and operation(site.collective) == "reshape"
        and site.entry.phase == "forward"
        and not site.in_shard_map
    )


def _steps(program: Program) -> dict[str, int]:
    """Map each reshape to the steps into which it splits rows that an all-to-all moves."""
    found: dict[str, int] = {}
    for site in program.sites:
        if not _is_reshape(site) or site.collective.kind != "all-to-all":
            continue
        before = {_before(program, site)}
        after = _after(program, site)
        if len(after) != 1:
            continue
        (rows, *rest), sizes = before.pop() or (0,), after.pop()
        # On each device as many rows as before, in steps.
        if len(sizes) == len(rest) + 2 and sizes[0] * sizes[1] == rows:
            if [*sizes[2:]] == rest and sizes[0] > 1:
                found[site.collective.op_name] = sizes[0]
    return found


def _before(program: Program, site: Site) -> tuple[int, ...] | None:
    """Return the sizes of the one array from which all operands come by moves."""
    makers = {made_by(node, _CONVERTED) for node in site.sources}
    while len(makers) == 1:
        (maker,) = makers
        parts = [] if maker.fused else program.parts(maker.instruction)
        if not parts or not _is_reshape(parts[0]):
            return maker.shape.dimensions or None
        makers = {made_by(node, _CONVERTED) for node in parts[0].sources}
    return None


def _after(program: Program, site: Site) -> set[tuple[int, ...]]:
    """List the sizes in which what all collectives of the reshape bring is taken."""
    sizes: set[tuple[int, ...]] = set()
    stack, seen = [site], {site}
    while stack:
        for user, taken in stack.pop().uses(_MOVES):
            parts = [] if user.fused else program.parts(user.instruction)
            if parts and _is_reshape(parts[0]):
                stack += {parts[0]} - seen
                seen.add(parts[0])
            else:
                sizes.add(taken.shape.dimensions)
    return sizes


ROWS = {
    "reshape": Kind(
        find,
        looks_like=(
            "an all-to-all for a reshape of a sharded batch to microbatches, (batch, ...) to "
            "(steps, batch / steps, ...)"
        ),
        in_shard_map="does not occur: a reshape there is of a device's own rows",
        under_jit="x.reshape(-1, steps, *x.shape[1:]).swapaxes(0, 1): each device keeps its rows",
    )
}
