"""Find all-reduces and all-gathers whose results are only reduced, or added to other results."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection

import numpy as np

from shardrules.costs import accounts, walk
from shardrules.costs.advice import operation
from shardrules.costs.waste import factors, slices
from shardrules.costs.waste.program import (
    FUNCTIONS,
    UNARY,
    WHOLE,
    WITHIN_SHARDS,
    Hint,
    Kind,
    Program,
    Site,
    Use,
    is_constant,
    is_zero,
)
from shardrules.hlo.reader.flow import BARRIERS, Node, made_by

_MOST = 4096  # the most values to follow

# -- a sum on each device -------------------------------------------------------------------------
# In the backward pass, a broadcast or a repeat becomes a reduce, and a gather becomes a scatter
# that adds.


def reduce_first(site: Site) -> Hint | None:
    return _only_summed(site) or _of_one_device(site)


def _only_summed(site: Site) -> Hint | None:
    before = site.entry.bytes
    size = _size_after(site) if site.adds and site.whole and site.is_written else None
    if size is None or size >= before:
        return None
    change = "reduce before you psum"
    if not site.in_shard_map:
        change = "sum over all of these dimensions at once, x.sum((0, 1))"
    advice = (
        f"its result is only summed up on each device: {change}, and {before} B become "
        f"{size} B{site.cast('before it is broadcast')}"
    )
    return site.smaller(advice, size)


def _size_after(site: Site) -> int | None:
    """Return the bytes of the sum if it is the only use of the result; else None."""
    uses = site.uses(walk.PASS_ON)
    if len(uses) != 1:
        return None
    ((taker, taken),) = uses
    operands = taker.operands
    place = {("reduce", 2): 0, ("scatter", 3): 2}.get((taker.opcode, len(operands)))
    if place is None or walk.applied(site.program.module, taker.instruction) != "add":
        return None
    if operands[place] is not taken or operands.count(taken) != 1:
        return None
    # A scatter's places must be constants: if they differed by device, moving the sum would change
    # the result. The start must be zero, since it would be summed over the devices, too.
    if taker.opcode == "scatter" and not is_constant(operands[1]):
        return None
    if not is_zero(operands[1 if taker.opcode == "reduce" else 0]):
        return None
    # XLA of JAX 0.12 may wrap an array into a tuple of one. The sum has the wider of both types.
    elements = taker.shape.elements
    array = elements[0] if elements and len(elements) == 1 else taker.shape
    if array.is_tuple:
        return None
    return (array.element_count * max(site.taken.bits, array.bits) + 7) // 8


# -- results that all devices compute from one device's values ------------------------------------

# A pipeline's last stage sends its outputs in this way: psum(where(axis_index == last, y, 0)).

_SPREAD = frozenset("bitcast broadcast copy reshape".split())
_LOCAL = FUNCTIONS | frozenset("convolution dynamic-slice gather scatter".split())


def _of_one_device(site: Site) -> Hint | None:
    """Find a sum of one device's values and zeros from which all devices compute one result."""
    if not (site.adds and site.whole and site.in_shard_map):
        return None
    if not site.program.asks_which_device:
        return None
    mask, groups = _mask(site.program, site.made_by(WHOLE)), site.collective.groups
    if mask is None:
        return None
    places = [[n for n, device in enumerate(group) if mask[device]] for group in groups]
    if any(len(place) != 1 for place in places) or len({*map(tuple, places)}) > 1:
        return None
    cut = _computed_of(site, mask)
    if cut is None:
        return None
    count = sum(node.shape.element_count for node in cut) or 1  # 1 if no other device reads them
    size = (count * max([site.taken.bits, *(node.shape.bits for node in cut)]) + 7) // 8
    where = walk.source(site.program.module, [node.instruction for node in cut])
    advice = (
        f"device {places[0][0]} of each group alone has its values, and all compute the same of "
        f"them{f', up to {where}' if where else ''}: compute that in the shard_map before the "
        f"psum, jax.lax.psum(jnp.where(jax.lax.axis_index({site.over}) == {places[0][0]}, f(y), 0)"
        f", {site.over}), and {site.entry.bytes} B become {size} B"
    )
    return site.smaller(advice, size)


def _mask(program: Program, chosen: Node) -> np.ndarray | None:
    """Return the devices on which a value may not be zero, if a choice by their numbers says so."""
    if chosen.opcode != "select":
        return None
    rows = slices.device_rows(program, made_by(chosen.operands[0], _SPREAD))
    zeros = [is_zero(operand) for operand in chosen.operands[1:]]
    if rows is None or rows.size != len(rows) or zeros.count(True) != 1:
        return None
    mask: np.ndarray = np.broadcast_to(rows.reshape(-1) != zeros[0], (program.device_count,))
    return mask


def _computed_of(site: Site, mask: np.ndarray) -> list[Node] | None:
    """Return the smallest value through which all other devices read a result.

    Return an empty list if only the device with the values reads the result. Return None if there
    is no such value.
    """
    # This looks for a cut of the dataflow: one value that everything later reads the result
    # through. Then the device that has the values can compute this value alone, and the psum can
    # bring it to the others instead. ``waiting`` has the values that depend on the result, each
    # with the users that are not visited yet; users are visited in program order. ``done`` has the
    # values without such users. If all values but one are done, this one is a cut. The operands of
    # a user that can't move before the psum are never done, so only such an operand may be a later
    # cut.
    program, node = site.program, site.node
    start = node.elements.get(site.operand) if node.shape.is_tuple else node
    if start is None:
        return None
    waiting = {start: {*start.takers}}
    found, least = None, site.taken.element_count
    done: set[Node] = set()
    for taker in program.flat(site.computation.name).nodes:
        given = [operand for operand in dict.fromkeys(taker.operands) if operand in waiting]
        if taker is start or not given:
            continue
        if _reads_own(program, taker, given, mask):
            others: set[Node] = set()
        elif _is_same(taker, waiting, site):
            others = {*taker.takers}
        else:
            continue  # its operands keep waiting for this user
        for operand in given:
            waiting[operand].discard(taker)
        waiting[taker] = others
        done.update(n for n in (*given, taker) if not waiting[n])
        if len(waiting) > _MOST:
            return None
        if len(done) == len(waiting) - 1:
            (left,) = waiting.keys() - done
            if not left.shape.is_tuple and left.shape.element_count < least:
                found, least = left, left.shape.element_count
    if len(done) == len(waiting):
        return []
    return [found] if found else None


def _reads_own(program: Program, taker: Node, given: list[Node], mask: np.ndarray) -> bool:
    """Return whether a choice takes a value only on the devices that have the value."""
    if taker.opcode != "select" or taker.operands[0] in given:
        return False
    rows = slices.device_rows(program, made_by(taker.operands[0], _SPREAD))
    if rows is None or rows.size != len(rows):
        return False
    takes = rows.reshape(-1).astype(bool)
    chosen = [takes] if taker.operands[1] in given else []
    chosen += [~takes] if taker.operands[2] in given else []
    return not any((own & ~mask).any() for own in chosen)


def _is_same(taker: Node, known: Collection[Node], site: Site) -> bool:
    """Return whether a value depends only on known values and on inputs equal in each group."""
    stack, seen = [taker], {*known}
    while stack and len(seen) < _MOST:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.opcode == "parameter" and node.home.is_entry and not node.fused:
            if not site.is_equal_input(node):
                return False
        elif node.opcode not in _LOCAL | {"constant"}:
            return False
        stack += node.operands
    return not stack


# -- a reduction of a gathered array --------------------------------------------------------------

_NAMES = {"add": "psum", "maximum": "pmax", "minimum": "pmin"}


def reduce_instead(site: Site) -> Hint | None:
    return _over_shards(site) or _to_one_number(site)


def _over_shards(site: Site) -> Hint | None:
    entry, size = site.entry, site.collective.group_size
    along = site.collective.dimension
    if site.collective.kind != "all-gather" or size < 2 or not along.isdecimal():
        return None
    uses = slices.uses_of(site) if site.is_written else []
    if site.result is None or len(uses) != 1:
        return None
    ((reduce, taken),) = uses
    if reduce.opcode != "reduce" or len(reduce.operands) != 2 or reduce.operands[0] is not taken:
        return None
    array = factors.followed(factors.of(site.result.dimensions), taken)
    over = re.findall(r"\d+", reduce.instruction.attribute("dimensions") or "")
    name = walk.applied(site.program.module, reduce.instruction)
    start = reduce.operands[1]
    # A maximum or a minimum may take its start any number of times; a sum must start at zero.
    neutral = start.opcode == "constant" and (name != "add" or walk.is_zero(start.instruction))
    after = reduce.shape.bytes
    sent = accounts.wire_bytes("all-reduce", after, size)
    if array is None or name not in _NAMES or not neutral or sent >= entry.wire_bytes:
        return None
    shard = site.result.dimensions[int(along)] // size
    kept = itertools.chain(*(f for d, f in enumerate(array) if str(d) not in over))
    if any(f.origin == int(along) and f.stride * f.size > shard for f in kept):
        return None  # the reduction is not over all shards
    note = " (equal up to rounding)" if name == "add" else ""
    change = f"reduce on each device and {_NAMES[name]} that"
    if not site.in_shard_map:
        change = "reduce the sharded array itself, without a constraint that replicates it"
    advice = (
        f"its result is only reduced over what it gathered: {change}, and a device sends "
        f"{sent} B instead of {entry.wire_bytes} B{note}"
    )
    return site.smaller(advice, after, sent)


# Opcodes that map each element to one element, in any place.
_EACH = WHOLE | BARRIERS | UNARY | {"all-gather-done"}


def _to_one_number(site: Site) -> Hint | None:
    """Find a reduction over all elements, as in vdot or in the norm of a reshaped array."""
    # The gathered array goes alone, or multiplied by another gathered array, into a chain of
    # reductions to one number. Of two gathers, the first pays for the all-reduce.
    entry, size = site.entry, site.collective.group_size
    if site.collective.kind != "all-gather" or size < 2 or not site.whole:
        return None
    uses = site.uses(_EACH)
    if len(uses) != 1:
        return None
    taker = uses[0].user
    gathers = _multiplied(site, taker) if taker.opcode in ("multiply", "dot") else [site]
    if taker.opcode == "multiply":
        uses = site.program.uses(taker, 0, _EACH)
    end = (taker, "add") if taker.opcode == "dot" else _reduced(site, uses)
    if not gathers or end is None or end[0].shape.leaves()[0].element_count != 1:
        return None
    (number, name), first = end, min(gathers, key=lambda s: s.position)
    after = number.shape.bytes
    sent = accounts.wire_bytes("all-reduce", after, size)
    if sent >= entry.wire_bytes:
        return None
    whole = "jnp.sum(a * b)" if taker.opcode in ("multiply", "dot") else "jnp.sum(a)"
    whole = whole if name == "add" else f"jnp.{name[:3]}(a)"
    change = (
        f"{whole} of what is sharded, not jnp.vdot or a reshape to one dimension, reduces each "
        "shard on its device"
    )
    if site.in_shard_map:
        change = f"reduce on each device and {_NAMES[name]} that"
    note = " (equal up to rounding)" if name == "add" else ""
    # XLA gives a gather of a gradient the gradient's own line.
    at = walk.line(site.program.module, [number.instruction, taker.instruction])
    at = f" at {at}" if at not in ("", entry.place) else ""
    advice = (
        f"its result is only reduced to one number{at}: {change}, and a device sends "
        f"{sent if site is first else 0} B instead of {entry.wire_bytes} B{note}"
    )
    return site.smaller(advice, after, sent) if site is first else site.hint(advice)


def _multiplied(site: Site, product: Node) -> list[Site]:
    """Return the gathers that are multiplied element by element; none if any factor isn't one."""
    # Both factors must be gathers of the same kind that came here by the same moves. Only then does
    # each shard of one meet the same shard of the other.
    contracted = [product.instruction.attribute(f"{s}_contracting_dims") for s in ("lhs", "rhs")]
    if contracted[0] != contracted[1]:
        return []
    found: dict[Node, Site] = {}
    ways = set()
    for operand in product.operands:
        way, node = [], operand
        while node.opcode in _EACH and node.operands:
            if node.opcode in WHOLE:
                shape, dimensions = node.shape, node.instruction.attribute("dimensions")
                way.append((node.opcode, shape.dimensions, shape.layout, dimensions))
            node = node.operands[0]
        parts = [] if node.fused else site.program.parts(node.instruction)
        if len(parts) != 1 or not parts[0].needed or not parts[0].whole:
            return []
        (other,) = parts
        if [use.user for use in other.uses(_EACH)] != [product] or other.result is None:
            return []
        c, result = other.collective, other.result
        ways.add((*way, c.kind, c.dimension, c.notation, result.dimensions, result.layout))
        found[node] = other
    return [*found.values()] if len(ways) == 1 else []


def _in_blocks(node: Node) -> bool:
    """Return whether this reduces adjacent blocks, which XLA for CPU does first."""
    if node.opcode != "reduce-window":
        return False
    window = node.instruction.attribute("window") or ""
    fields = dict(field.split("=", 1) for field in window.strip("{}").split() if "=" in field)
    return fields.keys() <= {"size", "stride", "pad"} and fields.get("size") == fields.get("stride")


def _reduced(site: Site, uses: list[Use]) -> tuple[Node, str] | None:
    """Return the last of a chain of reductions, and the operation that all of them apply."""
    names, last = set(), None
    while len(uses) == 1 and (uses[0].user.opcode == "reduce" or _in_blocks(uses[0].user)):
        ((reduce, taken),) = uses
        if len(reduce.operands) != 2 or reduce.operands[0] is not taken:
            return None
        name, start = walk.applied(site.program.module, reduce.instruction), reduce.operands[1]
        if start.opcode != "constant" or (name == "add" and not walk.is_zero(start.instruction)):
            return None
        names.add(name)
        last = reduce
        if last.shape.leaves()[0].element_count == 1:
            break
        uses = site.program.uses(reduce, 0, WHOLE | BARRIERS)
    return (last, names.pop()) if last and len(names) == 1 and names <= _NAMES.keys() else None


# -- two sums that are added ----------------------------------------------------------------------


def _of_an_array(site: Site) -> str:
    """Return advice for an embedding that is both looked up by rows and multiplied."""
    return (
        "if both are the gradient of one array w, give each shard its own, "
        "ws = jax.lax.with_sharding_constraint(jnp.broadcast_to(w, (n, *w.shape)), "
        f"jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec({site.and_own}))) for n "
        f"shards of the batch{site.own_spec}, and read it by jax.vmap over ws and "
        "x.reshape(n, -1, *x.shape[1:])"
    )


def add_first(site: Site) -> Hint | None:
    size = site.entry.bytes
    indexed = operation(site.collective) == "scatter-add" and site.entry.phase == "backward"
    is_gradient = site.is_gradient and site.program.remembered(_are_apart)
    written = site.is_written or indexed or is_gradient
    if not (site.adds and site.whole and written and _added_to_another(site)):
        return None
    change = "add the operands and psum that once"
    if not site.in_shard_map:
        change = f"in both, {WITHIN_SHARDS}, add these, and reduce over the shards once"
        if indexed:
            change = _of_an_array(site)
        elif is_gradient:
            change = site.own_gradients("arrays", "at the end")
    advice = (
        f"its result is only added to that of another sum over the same devices: {change}, and "
        f"{2 * size} B of both become {size} B (equal up to rounding)"
        f"{site.cast('once, before its first use')}"
    )
    return site.hint(advice)


def _are_apart(program: Program) -> bool:
    """Return whether no gradient depends on a reduced value; then no example needs another."""
    reduced = [s.node for s in program.sites if s.needed]
    if len({node.home.name for node in reduced}) > 1:
        return False  # a gradient after a loop may depend on a value that the loop reduces
    takers = itertools.chain.from_iterable(node.takers for node in reduced)
    behind = walk.reached(takers, lambda node: node.takers)
    return not any(s.node in behind for s in program.sites if s.is_gradient)


def _added_to_another(site: Site) -> bool:
    """Return whether the result is only added to the result of an earlier sum."""
    added = _addition(site)
    if added is None:
        return False
    first = _made(site, added[1])
    if first is None or (first.position, first.operand) >= (site.position, site.operand):
        return False
    return (
        first.adds
        and first.needed  # an unneeded sum can be dropped alone, and this one stays
        and first.collective.groups == site.collective.groups
        and first.taken.element_type == site.taken.element_type
        and first.taken.element_count == site.taken.element_count
        and _addition(first) == added[::-1]
    )


def _addition(site: Site) -> tuple[Node, Node] | None:
    """Return a result and the only value that it is added to, both before any moves."""
    pairs = set()
    for use in site.uses(WHOLE | {"all-reduce-done"}):
        others = [node for node in use.user.operands if node is not use.taken]
        if use.user.opcode != "add" or len(others) != 1:
            return None
        pairs.add((made_by(use.taken, WHOLE), made_by(others[0], WHOLE)))
    return pairs.pop() if len(pairs) == 1 else None  # XLA may repeat the addition in each fusion


def _made(site: Site, value: Node) -> Site | None:
    """Return the collective of the program that made a value, or None."""
    made = made_by(value, WHOLE)
    element = max(made.index, 0)
    made = made_by(made, {"get-tuple-element", "all-reduce-done"})
    parts = [] if made.fused else site.program.parts(made.instruction)
    return next((p for p in parts if p.whole and p.operand == element), None)


ROWS = {
    "reduce first": Kind(
        reduce_first,
        looks_like=(
            "an all-reduce whose result each device only sums up, or scatters into fewer places; a "
            "psum of one device's values, as of a pipeline's last stage, of which all compute the "
            "same smaller result"
        ),
        in_shard_map=(
            "reduce before the psum, or cast with shardrules.vary before the broadcast; psum what "
            "that device computes of its values"
        ),
        under_jit="sum over all of these dimensions at once, x.sum((0, 1))",
    ),
    "reduce instead": Kind(
        reduce_instead,
        looks_like=(
            "an all-gather whose result is only summed up, or whose maximum or minimum is taken, "
            "over what it gathered; `jnp.vdot(g, g)` or the norm of `g.ravel()`"
        ),
        in_shard_map="reduce on each device, then psum, pmax or pmin",
        under_jit=(
            "reduce the sharded array itself, without a constraint that replicates it; `jnp.sum(g"
            " * g)`"
        ),
    ),
    "add first": Kind(
        add_first,
        looks_like=(
            "an all-reduce whose result is only added to that of another one over the same devices"
        ),
        in_shard_map="add the operands and psum the sum",
        under_jit=(
            "in both, reduce x.reshape(n, -1, *x.shape[1:]) over all but its first dimension, n "
            "being the number of shards, add these, and reduce over the shards once"
        ),
    ),
}
