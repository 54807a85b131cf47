"""Find data that XLA moves for calls, callbacks, FFTs and other operations it can't partition."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

from shardrules.costs import accounts, walk
from shardrules.costs.waste import factors, slices
from shardrules.costs.waste.program import (
    SMALL,
    UNARY,
    WHOLE,
    Hint,
    Kind,
    Program,
    Site,
    Use,
    is_zero,
)
from shardrules.hlo.reader.flow import BARRIERS, Node, made_by

# JAX's names for kernels and foreign functions; XLA's own calls have the names of operations.
_CALLS = frozenset(["ffi_call", "pallas_call", "triton_kernel_call", "tpu_custom_call"])
_CALLBACKS = frozenset(["pure_callback"])  # XLA runs one in a branch, for one device alone
_MOVES = WHOLE | BARRIERS | {"all-gather-done"}
_COMPLEX = ("FFT", "IFFT")  # the result of a real FFT has another size than its operand
_TOP_K = ("TopK", "TopKBatchMajorSmallK", "__gpu$TopK")
# Operations that pack a number and its place into one word, or unpack them.
_BITS = frozenset("and or xor shift-right-arithmetic bitcast-convert".split())
_INDEX = 32  # bits of a place
_EACH = WHOLE | BARRIERS | UNARY | _BITS | {"all-gather-done"}
_EACH_SUMMED = WHOLE | BARRIERS | UNARY | {"all-gather-done", "pad", "dynamic-slice"}
_ROWS = WHOLE | BARRIERS | {"convert", "all-gather-done"}
_KEEPS = BARRIERS | {"copy", "copy-done", "copy-start", "all-gather-done"}


class _Taker(NamedTuple):
    """A user's call, with the values that it takes."""

    node: Node
    operands: list[Node]
    on_one: bool  # one device calls it for all


def find(site: Site) -> Hint | None:
    """Find an operand or a result that XLA moves because it can't partition a call."""
    if site.in_shard_map or site.is_unnamed:
        return None
    return _gathered_for(site) or _brought_from_one(site)


def _gathered_for(site: Site) -> Hint | None:
    """Find a gather of a batch, the first dimension, whose result only a user's call takes."""
    # The call can run on each device's own rows only if all results have the batch, too, and if
    # every operand with as many rows is gathered in the same way.
    call, entry, size = _called(site), site.entry, site.collective.group_size
    if call is None or site.result is None:
        return None
    rows, leaves = site.result.dimensions[0], call.node.shape.leaves()
    if any(leaf.dimensions[:1] != (rows,) for leaf in leaves):
        return None  # its results have no such batch
    split = [_gathered(site.program, operand, site) for operand in call.operands]
    for operand, is_split in zip(call.operands, split):
        if not is_split and operand.shape.leaves()[0].dimensions[:1] == (rows,):
            return None  # it may be a batch that was never split, or no batch at all
    specs = ", ".join(_spec(site) if is_split else "P()" for is_split in split)
    outs = ", ".join([_spec(site)] * len(leaves))
    several = len(leaves) > 1 or (call.node.shape.is_tuple and not call.on_one)
    outs = f"({outs})" if several else outs
    where = f"mesh=mesh, in_specs=({specs},), out_specs={outs})"
    what = (
        f"XLA can't partition the call that takes it: each device gathers all {rows} rows and "
        f"computes them, though its own are 1/{size} of them. If no row depends on another, wrap "
        f"the call, jax.shard_map(shardrules.no_communication(call), {where} after "
        "shardrules.install(), or give it a rule by jax.custom_partitioning, and"
    )
    if call.on_one:
        what = (
            f"one device runs the callback{_line(site.program, call.node)}, and all gather the "
            f"{rows} rows for it. If no row depends on another, wrap it, jax.shard_map(call, "
            f"{where}: each device calls it with its own rows, and"
        )
    advice = f"{what} {entry.wire_bytes} B become 0 B where its result stays sharded"
    return site.hint(advice)


def _spec(gather: Site) -> str:
    return f"P({gather.over})"


def _line(program: Program, call: Node) -> str:
    line = walk.source(program.module, [call.instruction])
    return f" at {line}" if line else ""


def _called(gather: Site) -> _Taker | None:
    """Return the only call that takes an array gathered along its first dimension."""
    collective = gather.collective
    if collective.kind != "all-gather" or collective.dimension != "0" or not gather.whole:
        return None
    uses = gather.uses(_KEEPS) if collective.group_size > 1 else []
    if len(uses) != 1:
        return None
    taker = uses[0].user
    call, names = _Taker(taker, taker.operands, False), _CALLS
    if taker.opcode == "tuple" and [user.opcode for user in taker.users] == ["conditional"]:
        call, names = _Taker(taker.users[0], taker.operands, True), _CALLBACKS
    elif taker.opcode != "custom-call":
        return None
    name = gather.program.module.metadata(call.node.instruction).op_name
    is_known = name.rpartition("/")[2] in names and "shard_map/" not in name
    return call if is_known else None


def _gathered(program: Program, operand: Node, site: Site) -> bool:
    """Return whether an operand of the call is a batch that is gathered over the same devices."""
    return any(
        other.collective.kind == "all-gather"
        and other.collective.dimension == "0"
        and other.collective.notation == site.collective.notation
        for other in _parts(program, operand)
    )


def _parts(program: Program, operand: Node) -> list[Site]:
    node = made_by(operand, _KEEPS)
    return [] if node.fused else program.parts(node.instruction)


def _brought_from_one(site: Site) -> Hint | None:
    """Find the sum that brings a callback's result from the device that ran it to all others."""
    opcodes = site.program.module.opcodes[site.computation.name]
    if not (site.adds and site.whole and "conditional" in opcodes):
        return None
    chosen = site.made_by(WHOLE)
    if chosen.opcode != "select" or not is_zero(chosen.operands[2]):
        return None
    result = made_by(chosen.operands[1], WHOLE)
    call = result.operands[0] if result.opcode == "get-tuple-element" else None
    if call is None or call.opcode != "conditional":
        return None
    parts = (_parts(site.program, operand) for operand in call.operands[1].operands)
    gather = next((g for g in itertools.chain(*parts) if _gathered_for(g)), None)
    if gather is None:
        return None
    size, groups = gather.collective.group_size, gather.collective.groups
    part = slices.read_part(site)
    is_own = part is not None and part.dimension == 0 and part.follows(groups)
    own = -(-site.entry.bytes // size)
    sent = 0 if is_own else accounts.wire_bytes("all-gather", own, size)
    advice = (
        f"it brings the result of the callback{_line(site.program, call)} from the one device that "
        "runs it to all others: wrap that as the hint on its operand says, and "
        f"{site.entry.wire_bytes} B become {sent} B"
        + ("" if is_own else ", or 0 B where its result stays sharded")
    )
    return site.smaller(advice, own, sent) if sent else site.hint(advice)


def of_a_transform(site: Site) -> Hint | None:
    """Find a gather for an FFT if each device reads only a slice of the result."""
    entry, size = site.entry, site.collective.group_size
    if site.collective.kind != "all-gather" or site.in_shard_map or site.is_unnamed:
        return None
    uses = site.uses(_MOVES | {"convert"}) if site.whole and size > 1 and entry.axes else []
    if len(uses) != 1 or uses[0].user.opcode != "fft":
        return None
    transform = uses[0].user
    if transform.instruction.attribute("fft_type") not in _COMPLEX:
        return None
    if sum(n % size == 0 for n in transform.shape.dimensions) < 2:
        return None  # no other dimension can be sharded while one is transformed
    readers = site.program.uses(transform, 0, _MOVES | UNARY)
    if not readers or any(r.user.opcode != "dynamic-slice" for r in readers):
        return None
    part = transform.shape.bytes // size  # complex, though the gathered array may be real
    sent = 2 * accounts.wire_bytes("all-to-all", part, size)
    if sent >= entry.wire_bytes:
        return None
    advice = (
        "XLA does not partition this FFT: each device computes all of it, and keeps 1/"
        f"{size}. {_apart(site, transform)}; a device then sends at most {sent} B, there and "
        f"back, instead of {entry.wire_bytes} B (equal up to rounding)"
    )
    return site.hint(
        advice,
        bytes_after=site.in_all(2 * part),
        trips_after=site.in_all(2),
        sent_after=site.in_all(sent),
    )


def _apart(site: Site, transform: Node) -> str:
    """Return advice on how each device transforms its own part of an array."""
    kind = (transform.instruction.attribute("fft_type") or "").lower()

    def mapped(axis: int, spec: str) -> str:
        return (
            f"jax.shard_map(lambda x: jnp.fft.{kind}(x, axis={axis}), mesh=mesh, in_specs={spec}, "
            f"out_specs={spec}) with {site.over} for axes"
        )

    if "," in (transform.instruction.attribute("fft_length") or ""):
        return (
            "Transform one dimension at a time while another one is sharded: of a matrix, "
            f"{mapped(1, 'P(axes)')}, jax.lax.with_sharding_constraint to P(None, axes), and "
            "there the same along axis 0"
        )
    whole = factors.of(site.result.dimensions if site.result else ())
    of = factors.followed(whole, transform.operands[0])
    if of and site.collective.dimension not in [str(factor.origin) for factor in of[-1]]:
        own = mapped(1, "P(axes)")
        return f"Let each device transform its own rows: of a matrix along axis 1, {own}"
    return (
        "Transform that dimension while another one is sharded: of a matrix along axis 0, "
        f"{mapped(0, 'P(None, axes)')}, and jax.lax.with_sharding_constraint of the result to "
        "P(axes)"
    )


# -- the largest of each row ----------------------------------------------------------------------


class _Largest(NamedTuple):
    """A top_k, with its results."""

    ends: list[Node]  # the nodes of the values and of their places, if they are read
    k: int
    bits: int  # of a value with its place


def of_the_largest(site: Site) -> Hint | None:
    """Find a gather for a top_k that each device could run on its own rows, or parts of rows."""
    if site.collective.kind != "all-gather" or site.in_shard_map or site.is_unnamed:
        return None
    call = _top_k(site)
    if call is None or site.result is None:
        return None
    gathers = [site, *_before(site), *_behind(site)]
    spec = [""] * len(site.result.dimensions)
    if any(g.result is None or len(g.result.dimensions) != len(spec) for g in gathers):
        return None  # the array has another shape where it is gathered along another dimension
    for gather in gathers:
        spec[int(gather.collective.dimension)] = gather.over
    of_parts = next((g for g in gathers if int(g.collective.dimension) == len(spec) - 1), None)
    if site is of_parts:
        return _of_parts(site, call, spec)
    return _of_rows(site, call, spec, of_parts)


def _top_k(gather: Site) -> _Largest | None:
    """Return the top_k that alone takes a gathered array, along the array's last dimension."""
    taker = _next(gather)
    if taker is None:
        return None
    if taker.opcode == "custom-call" and walk.target(taker.instruction) in _TOP_K:
        found = taker.shape.leaves()  # values and places, or 32-bit words with both
        ends = [*taker.elements.values()] if taker.shape.is_tuple else [taker]
        return _Largest(ends, found[0].dimensions[-1], sum(one.bits for one in found))
    if taker.opcode == "sort":
        return _first_of_sorted(gather, taker)
    others = _gathers(gather.program, taker)
    return _top_k(others[0]) if others else None


def _first_of_sorted(gather: Site, sort: Node) -> _Largest | None:
    """Return the top_k from which XLA for CPU made a sort, if only the first elements are used."""
    program, rows = gather.program, sort.shape.leaves()[0].dimensions
    if sort.instruction.attribute("dimensions") != f"{{{len(rows) - 1}}}":
        return None
    parts = [use.user for use in _uses(program, sort)]
    sizes = {(part.opcode, part.shape.dimensions) for part in parts}
    if len(sizes) != 1 or not all(map(_is_first, parts)):
        return None
    makers = [sort, *walk.reached(parts, lambda node: node.users if _is_each(node) else [])]
    names = (program.module.metadata(maker.instruction).op_name for maker in makers)
    if not any(name.endswith("/top_k") for name in names):
        return None  # in a program's own sort, the first may be the smallest
    return _Largest(parts, parts[0].shape.dimensions[-1], gather.taken.bits + _INDEX)


def _is_first(part: Node) -> bool:
    cuts = part.instruction.attribute("slice") or ""
    whole, size = part.operands[0].shape.dimensions, part.shape.dimensions
    starts = set(re.findall(r"\[(\d+):", cuts))
    return part.opcode == "slice" and starts == {"0"} and whole[:-1] == size[:-1]


def _is_each(node: Node) -> bool:
    return node.opcode in _EACH or node.opcode == "slice"


def _uses(program: Program, *values: Node) -> list[Use]:
    """Return the uses of values, also behind elementwise operations, each once."""
    uses: list[Use] = []
    for value in values:
        for element in range(len(value.shape.leaves())):
            uses += program.uses(value, element, _EACH)
    return [*dict.fromkeys(uses)]


def _next(gather: Site) -> Node | None:
    """Return the only user of a gathered array, if it takes whole rows."""
    if gather.result is None or not gather.whole or not gather.collective.dimension.isdecimal():
        return None
    uses = gather.uses(_EACH) if gather.collective.group_size > 1 else []
    if len({use.user for use in uses}) != 1:
        return None
    taker, value = uses[0]
    if any(use.taken is not value for use in uses):
        return None
    while value.opcode in _BITS:  # words with the places in the last bits
        value = value.operands[0]
    whole = factors.of(gather.result.dimensions)
    taken = factors.followed(whole, value)
    return taker if taken and taken[-1] == whole[-1] else None


def _gathers(program: Program, node: Node) -> list[Site]:
    """Return a node's gather as a list of one; empty if the node isn't a needed, whole gather."""
    if node.fused or not node.opcode.startswith("all-gather"):
        return []  # a return node has another opcode, but the root's instruction
    parts = program.parts(node.instruction)
    return parts if [part.needed and part.whole for part in parts] == [True] else []


def _behind(gather: Site) -> list[Site]:
    """Return the chain of gathers after a gather."""
    taker = _next(gather)
    found = _gathers(gather.program, taker) if taker else []
    return [*found, *_behind(found[0])] if found else []


def _before(gather: Site) -> list[Site]:
    """Return the chain of gathers before a gather."""
    found = _gathers(gather.program, gather.made_by(_ROWS))
    return [*found, *_before(found[0])] if found else []


def _written(spec: list[str]) -> str:
    """Return a spec as text, without the dimensions at its end that stay whole."""
    count = max((n + 1 for n, axes in enumerate(spec) if axes), default=0)
    return f"P({', '.join(axes or 'None' for axes in spec[:count])})"


def _of_rows(site: Site, call: _Largest, spec: list[str], of_parts: Site | None) -> Hint | None:
    """Return the hint on a device's own rows; if rows have parts, that on them has the advice."""
    readers = _uses(site.program, *call.ends)
    rows, k = _written([*spec[:-1], ""]), call.k
    found, sent = 0, 0
    if not readers or any(reader.user.opcode != "dynamic-slice" for reader in readers):
        found = site.taken.element_count // site.taken.dimensions[-1] * k * call.bits // 8
        sent = accounts.wire_bytes("all-gather", found, site.collective.group_size)
        if site.entry.wire_bytes - sent <= SMALL:  # one more round trip: places are gathered, too
            return None
    advice = (
        "XLA does not partition this top_k: each device gathers all rows, and keeps what it finds "
        f"in its own. jax.shard_map(lambda x: jax.lax.top_k(x, {k}), mesh=mesh, in_specs={rows}, "
        f"out_specs={rows}) reads a device's own alone, and {site.entry.wire_bytes} B become "
        + (f"{sent} B, to gather what it finds" if sent else "0 B")
    )
    if of_parts is not None:
        advice = f"goes away with that at {of_parts.where}"
    return _of_found(site, advice, found, sent, of_parts)


def _of_parts(site: Site, call: _Largest, spec: list[str]) -> Hint | None:
    """Return the hint to run a top_k on parts of each row, and another on their results."""
    size, k, part = site.collective.group_size, call.k, site.taken.dimensions[-1]
    found = site.taken.element_count // part * min(k, part) * call.bits // 8
    sent = accounts.wire_bytes("all-gather", found, size)
    if site.entry.wire_bytes - sent <= SMALL and not any(spec[:-1]):
        return None  # one more round trip: indices are gathered, too
    own, whole, axis = _written(spec), _written([*spec[:-1], ""]), site.over
    advice = (
        f"XLA gathers all of each row for this top_k. Let each device find the {k} largest of its "
        "own part, def part(x): v, i = jax.lax.top_k(x, "
        f"{min(k, part)}); return v, i + x.shape[-1] * jax.lax.axis_index({axis}), as v, i = "
        f"jax.shard_map(part, mesh=mesh, in_specs={own}, out_specs={own})(x), constrain both to "
        f"{whole}, and choose among these, v, j = jax.shard_map(lambda v: jax.lax.top_k(v, {k}), "
        f"mesh=mesh, in_specs={whole}, out_specs={whole})(v), i = jnp.take_along_axis(i, j, -1): a "
        f"device sends {sent} B instead of {site.entry.wire_bytes} B"
    )
    return _of_found(site, advice, found, sent, site if any(spec[:-1]) else None)


def _of_found(site: Site, advice: str, found: int, sent: int, goes_with: Site | None) -> Hint:
    """Return a hint after which values and places that are found are gathered, if any."""
    return site.hint(
        advice,
        bytes_after=site.in_all(found),
        trips_after=site.in_all(2 if sent else 0),
        sent_after=site.in_all(sent),
        goes_with=goes_with,
    )


# -- running sums ---------------------------------------------------------------------------------


def of_running_sums(site: Site) -> Hint | None:
    """Find a gather for running sums of which each device keeps only its own part."""
    along, size = site.collective.dimension, site.collective.group_size
    if site.collective.kind != "all-gather" or site.in_shard_map or site.is_unnamed:
        return None
    if not site.whole or not along.isdecimal() or site.result is None or not site.entry.axes:
        return None
    uses = site.uses(_EACH_SUMMED)
    window = uses[0].user if len(uses) == 1 else None
    if window is None or window.opcode != "reduce-window" or _is_counted(site):
        return None
    summed = walk.applied(site.program.module, window.instruction) == "add"
    sizes = re.search(r"size=([\dx]+)", window.instruction.attribute("window") or "")
    rows, local = site.result.dimensions[int(along)], site.taken.dimensions[int(along)]
    if not summed or not sizes or {*sizes[1].split("x")} - {"1"} != {str(rows)}:
        return None  # for a smaller window, XLA only sends the ends of each shard
    ends = _paddings(uses[0].taken, rows)
    if len(ends) != 1:
        return None
    last = site.taken.bytes // local
    sent = accounts.wire_bytes("all-gather", last, size)
    if sent >= site.entry.wire_bytes:
        return None
    ((before, _),) = ends
    end, sign, reverse = ("-1:", ">", "") if before else (":1", "<", ", reverse=True")
    dimension = int(along)
    last_row = f"s[{':, ' * dimension}{end}]"
    spec = f"P({'None, ' * dimension}{site.over})"
    others = " (with what splits its other dimensions in both specs)" if site.own_spec else ""
    cost = f"a device sends {sent} B instead of {site.entry.wire_bytes} B (equal up to rounding)"
    if site.entry.phase == "backward":
        return site.smaller(
            "XLA does not partition the gradient of running sums either: with the shard_map that "
            f"the hint on the sums says, {cost}",
            last,
            sent,
        )
    advice = (
        "XLA does not partition these running sums: each device gathers all of the array, and sums "
        f"up to {rows} numbers for each of its own. Add to those of its part what the parts "
        f"{'before' if before else 'behind'} it sum to, def own(x): s = jax.lax.cumsum(x, "
        f"{dimension}{reverse}); t = jax.lax.all_gather({last_row}, {site.over}); return s + "
        f"sum(jnp.where(jax.lax.axis_index({site.over}) {sign} k, t[k], 0) for k in range({size}))"
        f", as jax.shard_map(own, mesh=mesh, in_specs={spec}, out_specs={spec})(x){others}: {cost}"
    )
    return site.smaller(advice, last, sent)


def _is_counted(site: Site) -> bool:
    """Return whether jnp.nonzero may make these sums, to count the places in a flat mask."""
    made = site.made_by(WHOLE)
    widened = made.opcode == "convert" and made.operands[0].shape.element_type == "pred"
    return widened and len(site.taken.dimensions) == 1


def _paddings(taken: Node, rows: int) -> set[tuple[bool, bool]]:
    """Return the end, before or after, at which the pads behind a value add ``rows`` - 1 zeros."""
    found = set()
    while taken.operands:
        if taken.opcode == "pad":
            for low, high in re.findall(
                r"(\d+)_(\d+)", taken.instruction.attribute("padding") or ""
            ):
                if low != high:
                    found.add((int(low) == rows - 1, int(high) == rows - 1))
        taken = taken.operands[0]
        if taken.opcode.startswith("all-gather"):
            break
    return found & {(True, False), (False, True)} if len(found) == 1 else set()


def transformed(site: Site) -> Hint | None:
    return of_a_transform(site) or of_the_largest(site) or of_running_sums(site)


ROWS = {
    "called whole": Kind(
        find,
        looks_like=(
            "an all-gather, of the first dimension, for an `ffi_call`, a Pallas kernel or a "
            "Triton kernel, which XLA can't partition: each device computes all of it; or for a "
            "`pure_callback`, which one device runs for all, and an all-reduce of its result"
        ),
        in_shard_map="does not occur: in a shard_map a call takes a device's own rows",
        under_jit=(
            "wrap the call in a shard_map, or give it a rule by jax.custom_partitioning, if no "
            "row depends on another"
        ),
    ),
    "transformed whole": Kind(
        transformed,
        looks_like=(
            "an all-gather for an FFT, a `top_k` or running sums (`jnp.cumsum`) that XLA does not "
            "partition: each device computes all of it, and keeps a part"
        ),
        in_shard_map="does not occur: an FFT, a top_k or a cumsum there is of a device's own part",
        under_jit=(
            "a shard_map around the FFT of each dimension, over another one, and an all-to-all "
            "between; a shard_map around the top_k, over rows or over parts of each row; one "
            "around the cumsum, and an all_gather of each part's last sums"
        ),
    ),
}
