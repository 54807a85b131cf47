"""An array that is gathered in the forward pass and again in the backward pass."""

from __future__ import annotations

from shardrules.costs.advice import operation
from shardrules.costs.waste.shared.program import Hint, Kind, Program, Site
from shardrules.costs.waste.shared.values import Value

_MOVES = frozenset(
    "bitcast reshape copy transpose copy-done copy-start optimization-barrier opt-barrier".split()
)


def _find(site: Site) -> Hint | None:
    entry = site.entry
    if site.collective.kind != "all-gather" or entry.phase not in ("backward", "recompute"):
        return None
    if not (site.in_shard_map or entry.phase == "recompute" or "remat" in site.collective.op_name):
        return None  # the partitioner gathers for the backward pass what no policy names
    if not site.in_shard_map and operation(site.collective) != "sharding_constraint":
        return None  # to constrain it changes which other collectives the partitioner makes
    for first in site.program.remembered(_forward, site.program):
        if _same_groups(first, site) and (_recomputed(first, site) or _same_array(first, site)):
            return _hint(site, first)
    return None


def _forward(program: Program) -> list[Site]:
    return [
        s for s in program.sites if s.collective.kind == "all-gather" and s.entry.phase == "forward"
    ]


def _same_groups(first: Site, site: Site) -> bool:
    """Tell whether two gather as much over the same devices, the second one not more often."""
    runs, first_runs = site.entry.runs, first.entry.runs
    fewer = runs is not None and first_runs is not None and runs < first_runs
    return (
        first.taken.element_count == site.taken.element_count
        and first.collective.notation == site.collective.notation
        and (runs == first_runs or fewer)
    )


def _recomputed(first: Site, site: Site) -> bool:
    """Tell whether jax.checkpoint runs the forward pass's all-gather again."""
    _, again, name = site.collective.op_name.rpartition("/rematted_computation/")
    same_line = first.entry.source == site.entry.source
    return bool(again) and same_line and first.collective.op_name.endswith("/" + name)


def _same_array(first: Site, site: Site) -> bool:
    origin = _origin(site)
    return origin is not None and _origin(first) == origin


def _hint(site: Site, first: Site) -> Hint:
    entry, runs = site.entry, site.entry.runs or 1
    kept = entry.bytes * site.collective.group_size * runs
    keep = (
        "w = checkpoint_name(w, 'gathered') and policy="
        "jax.checkpoint_policies.save_only_these_names('gathered') keep it"
        if entry.phase == "recompute" or "remat" in site.collective.op_name
        else "return it from fwd as a residual to keep it"
    )
    if not site.in_shard_map:
        keep = (
            "name what jax.lax.with_sharding_constraint gathers, "
            "w = jax.ad_checkpoint.checkpoint_name(w, 'gathered'), and save it by the policy of "
            "jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names('gathered')"
        )
    advice = (
        f"the forward pass gathers the same array at {first.where}: gathered again, it sends "
        f"{entry.wire_bytes * runs} B; kept, it takes {kept} B of memory on each device: {keep}"
    )
    return site.without(KIND.name, advice)


def _origin(site: Site) -> tuple[str, int, str] | None:
    """Follow an operand back to its array, also if it is one trip's slice of that."""
    program, value, part = site.program, Value.at(site.computation, site.source), ""
    for _ in range(64):
        value = program.made_by(value, _MOVES)
        while value.instruction.opcode in ("dynamic-slice", "slice", "convert"):
            maker = value.instruction
            if maker.opcode == "convert":
                part += maker.shape.element_type
            elif maker.opcode == "slice":
                part += maker.attribute("slice") or ""
            value = program.made_by(value.operand(0), _MOVES)
        here, position = value.computation, value.position
        if len(value.outside) > 1:
            return None
        if value.instruction.opcode != "get-tuple-element":
            return (here.name, position, part) if here.is_entry else None
        before = program.before_loop(here, position) or _stacked(program, value)
        if before is None:
            return here.name, position, part
        value = before
    return None


def _stacked(program: Program, taken: Value) -> Value | None:
    """Give what a loop stacks, or passes on, in one element of its result."""
    loop = taken.operand(0).instruction
    if loop.opcode != "while":
        return None
    body = program.module.computations[loop.calls[1]]
    root, index = body.instructions[body.root], int(taken.instruction.attribute("index") or -1)
    if loop.calls[1] not in program.loops or root.opcode != "tuple":
        return None
    value = program.made_by(Value.at(body, root.operands[index]), frozenset(["copy"]))
    if value.instruction.opcode == "dynamic-update-slice":
        value = program.made_by(value.operand(1), _MOVES)
        if value.instruction.opcode == "dynamic-slice":
            value = program.made_by(value.operand(0), _MOVES)
    return value if len(value.outside) == 1 else None


KIND = Kind(
    "gathered twice",
    "an array that is gathered in the forward pass and again in the backward pass, or recomputed",
    "name it by jax.ad_checkpoint.checkpoint_name and save it by the policy of jax.checkpoint",
    "the same: name the array behind its constraint, and save it by the policy of jax.checkpoint",
    _find,
)
