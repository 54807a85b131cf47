"""Find all-gathers of arrays that may stay sharded, or that the devices already have."""

from __future__ import annotations

import collections
import math
from typing import NamedTuple

from shardrules import hlo
from shardrules.costs import walk
from shardrules.costs.advice import operation
from shardrules.costs.waste.program import FUNCTIONS, UNARY, WHOLE, Hint, Kind, Program, Site, Use
from shardrules.costs.waste.row_loops import rows_of_trips
from shardrules.costs.waste.slices import device_rows
from shardrules.hlo.known import exact
from shardrules.hlo.proof.customcalls import ASYNC_DONE, ASYNC_START
from shardrules.hlo.reader.flow import BARRIERS, Node, made_by

_MOVES = WHOLE | BARRIERS
_CUTS = WHOLE | BARRIERS | {"slice", "all-gather-done", "convert"}
# Opcodes between a gather and the output; XLA for CPU moves 16-bit floats as 32 bits and converts
# them after that.
_RETURNS = frozenset(["copy", "bitcast", "all-gather-done", "convert"])
_GATHERS = ("all-gather", "all-gather-start")
_CONVERTS = "convert_element_type"  # what JAX calls a conversion
_BY_XLA = " by XLA"
_IMPORT = "from jax.ad_checkpoint import checkpoint_name"  # jax alone doesn't import that module
# The opcodes by which an optimizer updates a part of a weight, element by element.
_UPDATES = (FUNCTIONS | WHOLE | BARRIERS | {"dynamic-slice"}) - {"dot", "reduce", "iota"}
_MOST = 256  # the most instructions of an update to follow

# -- arrays that are only returned ----------------------------------------------------------------


def only_returned(site: Site) -> Hint | None:
    if site.collective.kind != "all-gather" or not site.computation.is_entry:
        return None
    if site.in_shard_map and not site.op_name:
        return None  # the source has no all_gather: XLA for TPU makes it from a psum over slices
    if not site.in_shard_map and site.program.mesh and not site.entry.axes:
        return None  # over parts of an axis: no spec says how it is sharded
    uses = site.uses(_RETURNS)
    if len(uses) != 1 or site.result is None:
        return None
    taker = uses[0].user
    behind = site.program.parts(taker.instruction) if taker.opcode in _GATHERS else []
    if len(behind) == 1 and behind[0].needed and behind[0].whole:  # one gather for each axis
        if only_returned(behind[0]) is None:
            return None
        return site.hint(
            "its result is gathered once more and only returned: leave that output sharded over "
            f"{site.over} as well, and {site.entry.bytes} B become 0 B (the array is the same; a "
            "device then holds its shard of it)"
        )
    if taker.opcode != "return":
        return None
    # If the output has another shape, there may be no spec for its sharding.
    once = uses[0].user.operands.count(uses[0].taken) == 1
    if not once or uses[0].taken.shape.dimensions != site.result.dimensions:
        return None
    if _is_update(site, uses[0].taken.shape):
        return None  # the next step takes it whole
    over = f" over {','.join(site.entry.axes)}" if site.entry.axes else ""
    change = "with the axis in its out_specs instead of the all_gather"
    if not site.in_shard_map:
        change = "with the axis in its out_shardings"
    if site.is_unnamed:
        change = "with the axis in its out_specs, or in its out_shardings under jit"
    advice = (
        f"its result is only returned: leave that output sharded{over}, {change}, and "
        f"{site.entry.bytes} B become 0 B (the array is the same; a device then holds its shard "
        "of it)"
    )
    return site.hint(advice)


def _is_update(site: Site, returned: hlo.Shape) -> bool:
    """Return whether a result is the new value of a parameter that each device holds whole."""
    # ZeRO does this: each device updates its part of the weights, or of a copy of them in more
    # bits, and all devices gather the parts.
    wholes = [p for p in site.computation.parameters if p.shape[:2] == returned[:2]]
    stack, seen = [site.source], {site.source}
    while stack and wholes and len(seen) < _MOST:
        node = stack.pop()
        if node.opcode == "parameter" and not node.fused:
            if node.shape.dimensions in (returned.dimensions, site.taken.dimensions):
                return True
        if node.opcode in _UPDATES:
            stack += (new := {*node.operands} - seen)
            seen |= new
    return False


def uneven(site: Site) -> Hint | None:
    """Find a returned array that XLA pads to shard it evenly, and then gathers and cuts."""
    entry, size, along = site.entry, site.collective.group_size, site.collective.dimension
    if site.collective.kind != "all-gather" or site.in_shard_map or not site.whole:
        return None
    if not site.computation.is_entry or site.result is None or not along.isdecimal():
        return None
    if site.collective.op_name or site.is_unnamed:
        return None  # the program gathers it, and cuts it itself
    uses = site.uses(_CUTS)
    if len(uses) != 1 or uses[0].user.opcode != "return":
        return None
    cut, padded, place = uses[0].taken.shape, [*site.result.dimensions], int(along)
    if len(padded) > len(cut.dimensions) and padded[place] == size:
        # Parts smaller than a TPU's tile are gathered along a new dimension.
        padded[place : place + 2] = [math.prod(padded[place : place + 2])]
    once = uses[0].user.operands.count(uses[0].taken) == 1
    changed = [d for d, sizes in enumerate(zip(cut.dimensions, padded)) if len({*sizes}) > 1]
    if not once or len(cut.dimensions) != len(padded) or changed != [place]:
        return None
    rows, whole = cut.dimensions[place], padded[place]
    if rows % size == 0 or whole != -(-rows // size) * size:
        return None
    held = cut.bytes // rows * whole // size
    advice = (
        f"{size} devices don't divide the {rows} of dimension {along}: XLA pads them to {whole}, "
        f"and JAX returns the array whole, {cut.bytes} B on each device, whatever its constraint "
        f"says. Pad it to {whole} (jnp.pad) before the constraint and return it sharded by that, "
        f"and {entry.bytes} B become 0 B (a device then holds {held} B of it)"
    )
    return site.hint(advice)


# -- arrays that another collective moves as well -------------------------------------------------


def gathered_too(site: Site) -> Hint | None:
    if site.collective.kind not in ("all-to-all", "collective-permute") or not site.whole:
        return None
    if site.collective.in_place or not (site.is_written or site.is_unnamed):
        return None  # what XLA's partitioner moves for an operation depends on its other choices
    makers = {made_by(operand, WHOLE | {"slice"}) for operand in site.node.operands}
    gather = site.program.remembered(_gathers).get(makers.pop()) if len(makers) == 1 else None
    if gather is None or not _within(site, gather) or gather.is_for_product:
        return None  # each device would compute all of the product, of what no conversion narrows
    advice = (
        f"the all-gather at {gather.where} brings every shard of the same array to the same "
        "devices: take this one's result out of the gathered array, and "
        f"{site.entry.bytes} B become 0 B"
    )
    if not site.in_shard_map and not site.is_unnamed:
        advice += " (constrain the array once to the whole layout, and slice that)"
    return site.hint(advice)


def _gathers(program: Program) -> dict[Node, Site]:
    """Return the all-gathers by the nodes that made their arrays."""
    gathers = [s for s in program.sites if s.collective.kind == "all-gather" and s.whole]
    return {site.made_by(WHOLE): site for site in gathers}


def _within(site: Site, gather: Site) -> bool:
    """Return whether a collective only moves data within the groups of a gather."""
    group_of: dict[int, int] = {}
    for number, members in enumerate(gather.collective.groups):
        group_of.update(dict.fromkeys(members, number))
    for row in site.collective.pairs or site.collective.groups:
        groups = {group_of.get(device, -1 - device) for device in row}
        if len(groups) != 1:
            return False
    return True


# -- arrays that the backward pass gathers again --------------------------------------------------


def gathered_twice(site: Site) -> Hint | None:
    entry = site.entry
    if site.collective.kind != "all-gather" or entry.phase not in ("backward", "recompute"):
        return None
    remat = entry.phase == "recompute" or "remat" in site.collective.op_name
    if not (site.in_shard_map or remat):
        return None  # no policy can name an array that the partitioner gathers there
    if not site.in_shard_map:
        if site.is_named_by_array or operation(site.collective) != "sharding_constraint":
            # A constraint changes the partitioner's other choices: in a step of FSDP, keeping one
            # of two weights in this way cost 30% more bytes (JAX 0.12, CPU).
            return None
    if _narrowed(site, origin_of(site.program, site.source)):
        return None  # an array that a policy keeps would be gathered in its wider type
    gathers = (s for s in site.program.remembered(_forward) if _is_again(site, s))
    first = next(gathers, None)
    if first is None:
        return None
    runs = entry.runs or 1
    kept = entry.bytes * site.collective.group_size * runs
    keep = "return it from fwd as a residual to keep it"
    if remat:
        keep = (
            f"w = checkpoint_name(w, 'gathered') ({_IMPORT}) and policy="
            "jax.checkpoint_policies.save_only_these_names('gathered') keep it"
        )
    if not site.in_shard_map:
        keep = (
            "name what jax.lax.with_sharding_constraint gathers, "
            f"w = checkpoint_name(w, 'gathered') ({_IMPORT}), and save it by the policy of "
            "jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names('gathered')"
        )
    advice = (
        f"the forward pass gathers the same array at {first.where}: gathered again, it sends "
        f"{entry.wire_bytes * runs} B; kept, it takes {kept} B of memory on each device: {keep}"
    )
    return site.hint(advice)


class _Starts(NamedTuple):
    """Where a dynamic-slice begins in one dimension: on each trip, on each device, or unknown."""

    of: str | Node  # ``trips`` or ``devices``; the index itself if its values aren't known
    values: tuple[int, ...] = ()


_Part = list[str | tuple[_Starts, ...]]
_Origin = tuple[Node, _Part]


def _narrowed(site: Site, made_of: _Origin | None) -> bool:
    """Return whether XLA, and not the program, converts an array to fewer bits to gather it."""
    # XLA for CPU rounds to 16 bits, but gathers the rounded numbers as 32 bits.
    if site.taken.bits >= 32:
        return False
    return site.program.platform == "tpu" if made_of is None else _BY_XLA in made_of[1]


def _forward(program: Program) -> list[Site]:
    return [
        s for s in program.sites if s.collective.kind == "all-gather" and s.entry.phase == "forward"
    ]


def _is_again(site: Site, first: Site) -> bool:
    """Return whether a gather repeats a first gather over the same devices, at most as often."""
    runs, first_runs = site.entry.runs, first.entry.runs
    if runs != first_runs and (runs is None or first_runs is None or runs > first_runs):
        return False
    if first.taken.element_count != site.taken.element_count:
        return False
    if first.collective.notation != site.collective.notation:
        return False
    # jax.checkpoint runs the forward pass's all-gather again.
    _, recomputed, name = site.collective.op_name.rpartition("/rematted_computation/")
    if recomputed and first.entry.source == site.entry.source:
        if first.collective.op_name.endswith("/" + name):
            return True
    made_of = origin_of(site.program, site.source)
    before = origin_of(site.program, first.source)
    if made_of is None or before is None or made_of[0] is not before[0]:
        return False
    parts = made_of[1], before[1]
    return len(parts[0]) == len(parts[1]) and all(map(_is_among, *parts))


def _is_among(part: str | tuple[_Starts, ...], first: str | tuple[_Starts, ...]) -> bool:
    """Return whether a step to a part is among the steps of a first gather, on all its trips."""
    if isinstance(part, str) or isinstance(first, str) or len(part) != len(first):
        return part == first
    return all(map(_starts_among, part, first))


def _starts_among(here: _Starts, there: _Starts) -> bool:
    if here.of == there.of == "trips":
        # A backward loop takes the parts in another order, and may lack a trip that XLA took out.
        return collections.Counter(here.values) <= collections.Counter(there.values)
    return here == there


def _starts(program: Program, cut: Node) -> tuple[_Starts, ...]:
    """Return where a dynamic-slice begins in each dimension that it cuts."""
    starts = []
    sizes = zip(cut.operands[0].shape.dimensions, cut.shape.dimensions, cut.operands[1:])
    for size, own, index in sizes:
        if size == own:
            continue
        rows, of = device_rows(program, index), "devices"
        if rows is None or len(rows) == 1:
            of = "trips"
            rows = rows_of_trips(program, index) if rows is None else rows
        places = None if rows is None else exact.clamped_index(rows, size - own)
        if places is None:
            starts.append(_Starts(_unmoved(program, index)))
        else:
            starts.append(_Starts(of, tuple(places.tolist())))
    return tuple(starts)


def _unmoved(program: Program, node: Node) -> Node:
    """Return the value of which ``node`` is a copy, behind moves, conversions and loops."""
    while True:
        node = made_by(node, _MOVES | {"convert"})
        before = program.before_loop(node)
        if before is None:
            return node
        node = before


def origin_of(program: Program, node: Node) -> _Origin | None:
    """Return the array that a value comes from, and the steps to the part that the value has."""
    # Follow moves, slices and conversions backwards, and the loops that pass the array on.
    part: _Part = []
    while True:
        node = made_by(node, _MOVES)
        if node.opcode in ("dynamic-slice", "slice", "convert"):
            if node.opcode == "convert":
                part.append(node.shape.element_type)
                name = program.module.metadata(node.instruction).op_name
                if node.shape.bits < node.operands[0].shape.bits and not name.endswith(_CONVERTS):
                    part.append(_BY_XLA)
            elif node.opcode == "slice":
                part.append(node.instruction.attribute("slice") or "")
            else:
                part.append(_starts(program, node))
            node = node.operands[0]
        elif node.fused:
            return None
        elif node.opcode != "get-tuple-element":
            return (node, part) if node.home.is_entry else None
        elif walk.target(node.operands[0].instruction) == ASYNC_START:
            node = node.operands[0].operands[0]
            node = node.operands[0] if node.opcode == "all-gather" else node  # a copy of it
        else:
            before = program.before_loop(node) or _stacked(program, node, part)
            if before is None:
                return node, part
            node = before


def weight(site: Site) -> tuple[int, int] | None:
    """Return how often a program uses the parameter that a site gathers, and the gradient's width.

    The uses are counted over all runs. The width is a multiple of the gathered elements' width: 1,
    or more if XLA narrows them. Return None if the site gathers another array, or if the uses
    aren't known.
    """
    if site.collective.kind != "all-gather" or not site.whole:
        return None
    node, program = _outside(site), site.program
    made_of = origin_of(program, node.operands[site.operand])
    if made_of is None or made_of[0].opcode != "parameter":
        return None
    uses = uses_of(site)
    runs = [program.runs.get(use.user.home.name) for use in uses]
    counts = [run.count for run in runs if run is not None and run.count is not None]
    if not uses or len(counts) < len(uses):
        return None
    return sum(counts), 32 // min(site.taken.bits, 32) if _narrowed(site, made_of) else 1


def uses_of(site: Site) -> list[Use]:
    """Return the uses of a result, behind moves, in loops, and behind a fusion that ends it."""
    node, through = _outside(site), _MOVES | UNARY | {"all-gather-done"}
    uses = site.program.uses(node, site.operand, through, in_loops=True)
    for use in uses:  # the list grows meanwhile
        if walk.target(use.user.instruction) == ASYNC_DONE:
            uses += site.program.uses(use.user, 0, through, in_loops=True)
    return [use for use in uses if walk.target(use.user.instruction) != ASYNC_DONE]


def _outside(site: Site) -> Node:
    """Return a site's node; if it is in a fusion (XLA for TPU), its node in the fusion's caller."""
    callers = walk.callers(site.program.module, site.computation)
    if len(callers) != 1 or callers[0][1].opcode != "fusion":
        return site.node
    nodes = site.program.flat(callers[0][0].name).nodes
    start = site.instruction.start
    return next((node for node in nodes if node.instruction.start == start), site.node)


def _stacked(program: Program, taken: Node, part: _Part) -> Node | None:
    """Return the value that a loop stacks, or passes on, in one element of its result.

    Remove the slice that reads a stacked value from the steps of ``part``.
    """
    loop = taken.operands[0]
    if loop.opcode != "while" or loop.instruction.calls[1] not in program.loops:
        return None
    returned = program.flat(loop.instruction.calls[1]).end.operands
    if not 0 <= taken.index < len(returned):
        return None
    node = made_by(returned[taken.index], {"copy"})
    if node.opcode == "dynamic-update-slice":
        slices = [n for n, step in enumerate(part) if not isinstance(step, str)]
        if not slices or len(part[slices[-1]]) > 1:
            return None  # it isn't one value of the stack
        del part[slices[-1]]
        return node.operands[1]
    return None if node.fused else node


ROWS = {
    "only returned": Kind(
        only_returned,
        looks_like="an all-gather whose result the program returns and does not read",
        in_shard_map=(
            "leave the output sharded: the axis in its out_specs instead of the all_gather"
        ),
        under_jit="leave the output sharded: the axis in its out_shardings",
    ),
    "uneven": Kind(
        uneven,
        looks_like=(
            "an array with a sharding constraint that the program returns whole: the number of "
            "devices doesn't divide its dimension"
        ),
        in_shard_map="does not occur: a shard_map refuses such an array",
        under_jit="pad the array to a multiple (jnp.pad) before the constraint",
    ),
    "gathered too": Kind(
        gathered_too,
        looks_like=(
            "an all-to-all or permute of an array that is all-gathered over the same devices as "
            "well"
        ),
        in_shard_map="take its part of the gathered array",
        under_jit="constrain the array once to the whole layout, and slice that",
    ),
    "gathered twice": Kind(
        gathered_twice,
        looks_like=(
            "an array that is gathered in the forward pass and again in the backward pass, or "
            "recomputed"
        ),
        in_shard_map=(
            "name it by jax.ad_checkpoint.checkpoint_name and save it by the policy of "
            "jax.checkpoint"
        ),
        under_jit=(
            "the same: name the array behind its constraint, and save it by the policy of "
            "jax.checkpoint"
        ),
    ),
}
