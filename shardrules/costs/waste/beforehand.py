"""Find arrays that the program could narrow, or combine, before a collective takes them."""

from __future__ import annotations

import re

from shardrules import hlo
from shardrules.costs import walk
from shardrules.costs.advice import operation
from shardrules.costs.waste.program import SMALL, WHOLE, Hint, Kind, Program, Site, is_constant
from shardrules.hlo.proof.collectives import OPCODES
from shardrules.hlo.reader.flow import BARRIERS, made_by

# -- arrays of a wider type than their readers or their makers need -------------------------------

# These kinds move elements without changing them, so a conversion may be before or after them.
_KINDS = ("all-gather", "collective-permute", "all-to-all")
_MOVES = WHOLE.union(BARRIERS, ["slice", "dynamic-slice", "concatenate"])
_MOVES |= frozenset(f"{kind}-done" for kind in _KINDS)
_COPIES = frozenset(["copy", "copy-done"])
_TOGETHER = frozenset("add and divide maximum minimum multiply or select subtract xor".split())
_READ_BY = ("gather", "scatter")  # as indices, which say nothing about the array's sharding
_NARROW_FLOAT = re.compile(r"(bf|f)(16|8|4)")


# The narrower array that suffices, the reason, and the change.
_Narrower = tuple[hlo.Shape, str, str]


def narrow(site: Site) -> Hint | None:
    if site.collective.kind not in _KINDS or not (site.is_written or _is_for_cumsum(site)):
        return None
    if not site.whole or site.collective.in_place:
        return None
    if len(site.instruction.operands) > 1 and site.collective.kind == "all-to-all":
        return None
    one_hot = _one_hot(site)
    if one_hot is not None and not site.in_shard_map:
        return None  # XLA's partitioner chooses between indices and their one-hot array by itself
    found = one_hot or _widened(site) or (_narrowed(site) if site.is_written else None)
    if found is None:
        return None
    (array, why, change), size = found, site.entry.bytes
    if array.bytes >= size:
        return None
    if _NARROW_FLOAT.match(array.element_type) and site.program.platform is None:
        return None  # XLA for CPU widens narrower floats to 32 bits
    advice = f"{why}: {change}, and {size} B become {array.bytes} B (the values are the same)"
    return site.smaller(advice, array.bytes)


def _is_for_cumsum(site: Site) -> bool:
    """Return whether XLA gathers a mask to count along a dimension, as jnp.nonzero does."""
    return not site.in_shard_map and operation(site.collective) == "reduce_window_sum"


def _is_combined(site: Site) -> bool:
    """Return whether the counts are combined with other data, whose sharding they may need."""
    # If they are, XLA gathers the counts again, even if each device holds the whole mask.
    made = walk.reached([site.node], lambda node: [] if node.opcode in _READ_BY else node.takers)
    for node in made:
        if node.opcode in _TOGETHER:
            for operand in node.operands:
                if not (operand in made or is_constant(operand)):
                    return True
    return False


def _widened(site: Site) -> _Narrower | None:
    """Return the array before a conversion to a wider type, just before the collective."""
    convert = site.made_by(WHOLE)
    if convert.opcode != "convert":
        return None
    before, after = convert.operands[0].shape, convert.shape
    if before.bits >= after.bits or after.element_type != site.taken.element_type:
        return None
    if before.element_type == "pred" and not site.in_shard_map and _is_combined(site):
        return None
    if before.element_type != "pred" and _is_for_cumsum(site):
        return None
    why = (
        f"its operand was converted from {before.element_type} to {after.element_type} just before"
    )
    change = "move it as it was, and convert the result"
    if before.element_type == "pred" and not (site.in_shard_map or site.is_unnamed):
        change = (
            "where jnp.nonzero or jnp.cumsum takes the mask, hold and gather it, "
            "jax.lax.with_sharding_constraint(jax.lax.optimization_barrier(mask), "
            "jax.sharding.NamedSharding(mesh, spec)) with a spec without "
            f"{' and '.join(map(repr, site.entry.axes or ())) or 'axes'} (on CPU: XLA for GPU "
            "and TPU gathers the mask by itself, or sums each shard)"
        )
    return site.taken._replace(element_type=before.element_type), why, change


def _one_hot(site: Site) -> _Narrower | None:
    """Return the indices if they become a one-hot array just before the collective."""
    compare = site.made_by(_COPIES | {"convert"})
    if compare.opcode != "compare" or compare.instruction.attribute("direction") != "EQ":
        return None
    dimensions = compare.shape.dimensions
    if dimensions != site.taken.dimensions or site.collective.kind == "all-to-all":
        return None
    if site.collective.pairs is not None and not site.collective.connections.reaches_all:
        return None  # a device that gets nothing has a row of zeros, but an index 0 gives a one
    sides = sorted((made_by(o, _COPIES) for o in compare.operands), key=lambda node: node.opcode)
    if [side.opcode for side in sides] != ["broadcast", "iota"]:
        return None
    spread, counter = sides
    if {side.shape.dimensions for side in sides} != {dimensions}:
        return None
    # The indices have all dimensions except the counted one. The collective must not gather along
    # the counted dimension.
    counted = counter.instruction.attribute("iota_dimension") or ""
    others = [str(d) for d in range(len(dimensions)) if str(d) != counted]
    if re.findall(r"\d+", spread.instruction.attribute("dimensions") or "") != others:
        return None
    if site.collective.dimension == counted or not counted:
        return None
    indices = spread.operands[0].shape
    row = dimensions[int(counted)]
    why = f"it moves {row} numbers for each index, and only one of them is not zero"
    change = "move the indices, and make the one-hot array of the result"
    return indices, why, change


def _narrowed(site: Site) -> _Narrower | None:
    """Return the array in the narrower type to which every use converts the result."""
    uses, wide = site.uses(_MOVES, True), site.taken
    if any(u.user.opcode != "convert" for u in uses):
        return None
    if not uses or any(u.taken.shape.element_type != wide.element_type for u in uses):
        return None
    read = [user.shape for user, _ in uses]
    widest = max(read, key=lambda shape: shape.bits)
    if {s.element_type for s in read} != {widest.element_type} or widest.bits >= wide.bits:
        return None
    held = "each use converts it"
    if any(user.home is not site.computation for user, _ in uses):
        held = "the loop that reads it converts it on each trip"
    elif not site.in_shard_map:
        held = "the conversion comes after the constraint that gathers it, or XLA moved it there"
    why = f"it moves {wide.element_type}, but only {widest.element_type} is read ({held})"
    change = (
        f"convert before it, x.astype({_dtype(widest.element_type)}), and if the compiler "
        "moves the conversion back, hold it by jax.lax.optimization_barrier"
    )
    return wide._replace(element_type=widest.element_type), why, change


def _dtype(element_type: str) -> str:
    """Return JAX's name of an element type."""
    names = {"pred": "bool", "bf": "bfloat", "s": "int", "u": "uint", "f": "float"}
    return "jnp." + re.sub("^(pred|bf|[suf])", lambda kind: names[kind[0]], element_type)


# -- small collectives that the compiler did not combine -----------------------------------------

_COMBINED_KINDS = ("all-reduce", "all-gather", "collective-permute", "all-to-all")


def apart(site: Site) -> Hint | None:
    if site.collective.kind not in _COMBINED_KINDS or not site.whole or not _alone(site):
        return None
    groups = site.program.remembered(_together)
    for group in groups:  # the first keeps its round trip, each later one saves its own
        if site in group[1:]:
            return _hint(site, group)
    return None


def _hint(site: Site, group: list[Site]) -> Hint:
    size = sum(s.entry.bytes for s in group)
    change = "concatenate the operands, flattened, and split the result"
    if site.collective.kind != "all-reduce":
        change = "stack the operands and take the result apart"
    if _may_be_one(site, group):
        change += (
            " (if that line moves one complex array, XLA for TPU moves its real and imaginary "
            "parts apart: move jnp.stack([x.real, x.imag]))"
        )
    if not site.in_shard_map:
        change = "concatenate or stack the arrays before the reduction"
        if site.collective.kind != "all-reduce":
            change = (
                "stack the arrays before the constraint, or concatenate them along a dimension "
                "that stays as it is"
            )
    trips = "round trips of each trip of the loop" if site.in_loop else "round trips"
    advice = (
        f"it is independent of the {site.collective.kind} at {group[0].where}, which runs over the "
        f"same devices: {change}: {len(group)} {trips} become 1, with the same {size} B"
    )
    return site.hint(advice, bytes_after=site.in_all(site.entry.bytes))


def _may_be_one(site: Site, group: list[Site]) -> bool:
    """Return whether XLA may have made two collectives from one, of a complex array."""
    of = site.program.module.metadata
    same = len(group) == 2 and len({of(s.instruction) for s in group}) == 1
    return same and site.program.platform == "tpu" and site.collective.element_type[:1] == "f"


def _alone(site: Site) -> bool:
    """Return whether the program itself asks for a collective of one operand."""
    if not site.is_written or site.is_for_product:
        return False  # no line gathers what the partitioner gathers for a product
    return len(site.instruction.operands) == 1 and not site.collective.in_place


def _together(program: Program) -> list[list[Site]]:
    """Return groups of collectives; one collective could replace each group."""
    # First group by everything that must be equal. Then walk through each list in program order,
    # and start a new group where the bytes get too many or the collectives depend on each other.
    alike: dict[tuple[object, ...], list[Site]] = {}
    for site in program.sites:
        c = site.collective
        if site.needed and c.kind in _COMBINED_KINDS and site.whole and _alone(site):
            key = (c.computation, c.kind, c.phase, c.notation, c.reduction, c.dimension)
            shape = () if c.kind == "all-reduce" else site.taken.dimensions
            alike.setdefault((*key, c.element_type, shape), []).append(site)
    groups: list[list[Site]] = []
    for sites in alike.values():
        sites.sort(key=lambda s: s.position)
        group: list[Site] = []
        for site in sites:
            fits = sum(s.entry.bytes for s in (*group, site)) <= SMALL
            if group and fits and _beside(program, group, site):
                group.append(site)
            else:
                groups.append(group)
                group = [site] if site.entry.bytes <= SMALL else []
        groups.append(group)
    return [group for group in groups if len(group) > 1]


def _beside(program: Program, group: list[Site], site: Site) -> bool:
    """Return whether a collective could run in a group's place, and would save its round trip."""
    # It must not take their results, it must wait for the same large instructions as they do, and
    # they must end before it starts.
    needed = program.remembered(_needed, site.computation.name)
    if needed is None:
        return False
    collectives, large = needed
    mine = large[site.position]
    return all(
        large[s.position] == mine
        and not collectives[site.position] >> s.position & 1
        and not _ends_after(s, site)
        for s in group
    )


def _ends_after(site: Site, other: Site) -> bool:
    """Return whether a collective is still running when a later one starts."""
    if not site.instruction.opcode.endswith("-start"):
        return False
    users = site.computation.users()[site.position]
    return all(user > other.position for user in users)


def _needed(program: Program, computation: str) -> tuple[list[int], list[int]] | None:
    """Return, as bits, the collectives and large instructions that each instruction needs."""
    instructions = program.module.computations[computation].instructions
    if len(instructions) > 20000:  # the bits would take more memory than the program
        return None
    collectives: list[int] = []
    large: list[int] = []
    for position, instruction in enumerate(instructions):
        mine = (instruction.opcode in OPCODES) << position
        mine_large = program.is_large(instruction) << position
        for operand in set(instruction.operands):
            mine |= collectives[operand]
            mine_large |= large[operand]
        collectives.append(mine)
        large.append(mine_large)
    return collectives, large


ROWS = {
    "narrow first": Kind(
        narrow,
        looks_like=(
            "an all-gather, permute or all-to-all of an array that was widened just before or is "
            "narrowed by every use: f32 for bf16, s64 for s32, s32 for a predicate, a one-hot "
            "array for indices"
        ),
        in_shard_map="convert before it; hold the conversion by jax.lax.optimization_barrier",
        under_jit="convert, hold it by jax.lax.optimization_barrier, then constrain",
    ),
    "left apart": Kind(
        apart,
        looks_like=(
            "small collectives of one kind over the same devices, one after the other, which "
            "neither take each other's results nor wait for other work, and which the compiler did "
            "not combine"
        ),
        in_shard_map="concatenate or stack the operands, and run one collective",
        under_jit=(
            "stack the arrays before the reduction or the constraint, or concatenate them along a "
            "dimension that stays as it is"
        ),
    ),
}
