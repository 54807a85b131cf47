"""Finds small collectives of one kind that the compiler did not combine: run one for all."""

from __future__ import annotations

from shardrules.costs.waste.program import SMALL, Hint, Kind, Program, Site
from shardrules.hlo.proof.collectives import OPCODES

_KINDS = ("all-reduce", "all-gather", "collective-permute", "all-to-all")


def find(site: Site) -> Hint | None:
    if site.collective.kind not in _KINDS or not site.whole or not _alone(site):
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
    """Return whether the program asks for a collective with one operand and one result."""
    if not site.is_written or site.is_for_product:
        return False  # no line gathers what the partitioner gathers for a product
    return len(site.instruction.operands) == 1 and not site.collective.in_place


def _together(program: Program) -> list[list[Site]]:
    """Return groups of collectives, each of which one collective could replace."""
    alike: dict[tuple[object, ...], list[Site]] = {}
    for site in program.sites:
        c = site.collective
        if site.needed and c.kind in _KINDS and site.whole and _alone(site):
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
    # It must take none of their results, wait for the same large instructions, and start after the
    # others end.
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
    "left apart": Kind(
        find,
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
    )
}
