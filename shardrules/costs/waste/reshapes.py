"""Find data that moves between devices because of the way a sharded dimension is written.

Four ways of writing cause this: reshapes that put steps first, splits into parts, arrays that are
joined one behind the other, and the places that a sort moves along with the values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from shardrules.costs import accounts, walk
from shardrules.costs.advice import operation
from shardrules.costs.waste.program import FLOATS, FUNCTIONS, WHOLE, Hint, Kind, Program, Site
from shardrules.hlo.proof import phases
from shardrules.hlo.reader.flow import BARRIERS, Node, made_by

_MOVES = WHOLE | BARRIERS | {"slice", "concatenate", "all-to-all-done", "collective-permute-done"}

_CONVERTED = _MOVES | {"convert"}  # XLA for TPU moves the type that a product reads


def find(site: Site) -> Hint | None:
    """Find data that XLA sends to reshape (batch, ...) to (steps, batch / steps, ...)."""
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


def of_steps(site: Site) -> Hint | None:
    """Find what XLA sends in a loop over (steps, batch / steps, ...) of a sharded batch."""
    return site.program.remembered(_of_steps).get(site)


def _of_steps(program: Program) -> dict[Site, Hint]:
    """Return hints by collectives; one change removes those of a loop over steps."""
    # If there are fewer steps than devices, a reshape that puts them first divides the devices: F
    # devices have the same rows of F different steps, and the n / F groups of them have different
    # rows. All have to work on one step at a time, so XLA gives each of the F another part of the
    # features, and they all-reduce and gather activations over parts of the axis.
    parts = [site for site in program.sites if site.split and site.needed and site.whole]
    found: dict[Site, Hint] = {}
    starts = [site for site in parts if _takes_steps(site)]
    for groups in dict.fromkeys(site.collective.groups for site in starts):
        first = next(site for site in starts if site.collective.groups == groups)
        gone = [
            site
            for site in parts
            if site.collective.groups == groups and (site in starts or site.entry.loop_depth)
        ]
        others = [site for site in parts if site.collective.groups != groups]
        # A gradient of a whole parameter, or of one layer of it, stays as large, and so does a
        # shard of a parameter that is gathered. Others may be a device's part of the features.
        batches = {made_by(site.source, _CONVERTED) for site in starts}
        shapes = [p.shape.dimensions for p in _parameters(program) if p not in batches]
        more = sum(_more(site, shapes, len(groups[0])) for site in others if site.entry.loop_depth)
        before = [site.in_all(site.entry.wire_bytes) for site in gone]
        total = sum(filter(None, before))
        if None in before or total <= more or None in {s.entry.runs for s in others}:
            continue
        advice = (
            "the loop's steps come before the sharded rows, as after x.reshape(steps, -1, ...), "
            f"and there are fewer than devices: those of {first.over} gather all steps, or divide "
            "the features of one step and exchange activations. If it does not matter which rows a "
            "step takes, as for microbatches, x.reshape(-1, steps, *x.shape[1:]).swapaxes(0, 1), "
            "and of the labels alike, gives each step rows that each device has already: these "
            f"{total} B become 0 B"
        )
        if more:
            advice += f"; gradients and weights, then over all of {first.over}, take {more} B more"
        for site in sorted(gone, key=lambda s: (s is not first, -(s.in_all(s.entry.bytes) or 0))):
            sent = min(site.in_all(site.entry.wire_bytes) or 0, more)  # of what others send then
            more -= sent
            text = advice if site is first else f"goes away with that at {first.where}"
            found[site] = site.hint(text, sent_after=sent, goes_with=first)
    return found


def _takes_steps(site: Site) -> bool:
    """Return whether XLA brings a loop's slices along a dimension that is divided over devices."""
    is_slice = site.collective.kind in ("all-to-all", "all-gather", "collective-permute")
    sizes = site.taken.dimensions
    return (
        is_slice
        and site.entry.phase == "forward"
        and "while/body" in site.op_name
        and operation(site.collective) == "dynamic_slice"
        # Else the rows of a step are fewer than the devices, or not shared out evenly.
        and len(sizes) > 1
        and sizes[1] % site.collective.group_size == 0
    )


def _parameters(program: Program) -> Iterator[Node]:
    """Yield the program's parameters that hold floats."""
    for node in program.flat(program.module.entry.name).nodes:
        if node.opcode == "parameter" and FLOATS.match(node.shape.element_type):
            yield node


def _more(site: Site, shapes: list[tuple[int, ...]], divided: int) -> int:
    """Return what a collective over the rows sends in addition if it runs over the whole axis.

    ``shapes``: those of the parameters on a device; ``divided``: over how many devices the
    features are.
    """
    kind, count = site.collective.kind, site.program.mesh[site.split[0]]
    whole: list[list[int]] = [[]]
    for of in (of for sizes in shapes for of in (sizes, sizes[1:])):
        whole.append(sorted(of))
        if kind != "all-gather":  # the parameter may be a shard, and its gradient not
            whole += [sorted((*of[:d], of[d] * count, *of[d + 1 :])) for d in range(len(of))]
    is_whole = sorted(site.taken.dimensions) in whole
    size = site.entry.bytes * (1 if is_whole else divided)
    then = accounts.wire_bytes(kind, size, count)
    return max((site.in_all(then) or 0) - (site.in_all(site.entry.wire_bytes) or 0), 0)


def _is_reshape(site: Site) -> bool:
    return (
        site.collective.kind in ("all-to-all", "collective-permute")
        and operation(site.collective) == "reshape"
        and site.entry.phase == "forward"
        and not site.in_shard_map
    )


def _steps(program: Program) -> dict[str, int]:
    """Return the number of steps of each reshape whose rows an all-to-all moves."""
    found: dict[str, int] = {}
    for site in program.sites:
        if not _is_reshape(site) or site.collective.kind != "all-to-all":
            continue
        before = {_before(program, site)}
        after = _after(program, site)
        if len(after) != 1:
            continue
        (rows, *rest), sizes = before.pop() or (0,), after.pop()
        # Each device must have as many rows as before, in steps.
        if len(sizes) == len(rest) + 2 and sizes[0] * sizes[1] == rows:
            if [*sizes[2:]] == rest and sizes[0] > 1:
                found[site.collective.op_name] = sizes[0]
    return found


def _before(program: Program, site: Site) -> tuple[int, ...] | None:
    """Return the sizes of the array that all operands are moved from; None if there are several."""
    makers = {made_by(node, _CONVERTED) for node in site.sources}
    while len(makers) == 1:
        (maker,) = makers
        parts = [] if maker.fused else program.parts(maker.instruction)
        if not parts or not _is_reshape(parts[0]):
            return maker.shape.dimensions or None
        makers = {made_by(node, _CONVERTED) for node in parts[0].sources}
    return None


def _after(program: Program, site: Site) -> set[tuple[int, ...]]:
    """Return the sizes of the results of all the reshape's collectives, as they are used."""
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


# -- parts of a dimension that is sharded ---------------------------------------------------------

_EXCHANGES = ("all-to-all", "collective-permute")


def split(site: Site) -> Hint | None:
    """Find data that XLA sends to spread each part of a sharded dimension over all devices."""
    if site.in_shard_map or site.collective.kind not in _EXCHANGES:
        return None
    if "split" not in site.collective.op_name and "concatenate" not in site.collective.op_name:
        return None  # fast: no call of ``operation``
    name = operation(site.collective)
    if name == "concatenate" and site.entry.phase == "backward":  # joins the parts' gradients
        lines = site.program.remembered(_lines_of_splits)
        if site.entry.source is None or site.entry.source not in lines:
            return None
    elif name != "split":
        return None
    return site.hint(
        f"it is split along a dimension that is sharded over {site.over}, in which some devices "
        "hold one part, and others another: XLA sends parts elsewhere to share out each of them "
        "over all devices. Keep the parts apart: of a product x @ w of k equal parts, by a "
        f"dimension of their own before the sharded one, w of (d, k, f) with P(None, None, "
        f"{site.over}) instead of (d, k * f), as jnp.einsum('bd,dkf->kbf', x, w); of other parts, "
        f"by one for the {site.devices} devices, w of (d, {site.devices}, f) with P(None, "
        f"{site.over}), as jnp.einsum('bd,dnf->bnf', x, w), its last dimension split and each part "
        "reshaped to (b, -1) (by a weight for each part, the gradient of x may be all-reduced once "
        "for each); "
        "of a batch, one row of each part in turn, x.reshape(-1, k, *x.shape[1:])[:, 0]; and "
        f"{site.entry.wire_bytes} B become 0 B"
    )


def _lines_of_splits(program: Program) -> set[str | None]:
    exchanges = [s for s in program.sites if s.collective.kind in _EXCHANGES]
    return {s.entry.source for s in exchanges if operation(s.collective) == "split"}


def _is_concatenate(site: Site) -> bool:
    return (
        site.collective.kind == "all-to-all"
        and "concatenate" in site.collective.op_name  # fast: no call of ``operation``
        and operation(site.collective) == "concatenate"
        and site.entry.phase == "forward"
        and not site.in_shard_map
    )


def concatenated(site: Site) -> Hint | None:
    """Find arrays of one size that are joined along a sharded dimension."""
    count = None
    if _is_concatenate(site):
        count = site.program.remembered(_joined).get(site.entry.source)
    elif site.entry.phase == "backward" and site.collective.op_name.endswith("/split"):
        if site.collective.kind in _EXCHANGES and not site.in_shard_map:
            count = site.program.remembered(_joined).get(site.entry.source)
    if count is None:
        return None
    return site.hint(
        f"XLA sends rows to other devices to put {count} arrays one behind the other along a "
        f"dimension that is sharded over {site.over}: if it does not matter in which order they "
        "are, as for the rows of a batch, jnp.stack([a, b], 1).reshape(-1, *a.shape[1:]) has a "
        f"row of each in turn, y.reshape(-1, {count}, *y.shape[1:])[:, 0] are the first array's "
        f"again (along another dimension alike), and {site.entry.wire_bytes} B become 0 B"
    )


def _joined(program: Program) -> dict[str | None, int]:
    """Return the number of arrays that each source line joins, if XLA sends arrays of one size."""
    # XLA brings each array to another layout, joins the arrays there, and brings the result back.
    # So the last of a line's all-to-alls has the whole, and the others have the parts.
    lines: dict[str | None, list[Site]] = {}
    for site in filter(_is_concatenate, program.sites):
        if site.entry.source:
            lines.setdefault(site.entry.source, []).append(site)
    found: dict[str | None, int] = {}
    for source, sites in lines.items():
        *parts, whole = sorted(sites, key=lambda s: s.position)
        sizes = {part.entry.bytes for part in parts}
        if len({site.computation.name for site in sites}) > 1 or len(sizes) != 1:
            continue
        # An array that is joined with itself is sent once.
        count, rest = divmod(whole.entry.bytes, sizes.pop())
        if not rest and len(parts) <= count > 1:
            found[source] = count
    return found


def reordered(site: Site) -> Hint | None:
    if site.entry.axes is None and (hint := of_steps(site)) is not None:  # over parts of an axis
        return hint
    return find(site) or concatenated(site)


# -- a few rows joined to many --------------------------------------------------------------------

_NAMES = "abcdef"  # of the arrays that are joined


def joined(site: Site) -> Hint | None:
    """Find the exchanges by which XLA joins a few rows, such as an edge, to many rows."""
    return site.program.remembered(_at_edges).get(site)


def _at_edges(program: Program) -> dict[Site, Hint]:
    lines: dict[tuple[str, str], list[Site]] = {}
    for site in filter(_is_concatenate, program.sites):
        if site.entry.source and site.needed and site.whole:
            lines.setdefault((site.entry.source, site.over), []).append(site)
    found: dict[Site, Hint] = {}
    for (source, _), sites in lines.items():
        if source not in program.remembered(_joined):
            found.update(_padded(program, sites))
    return found


def _padded(program: Program, sites: list[Site]) -> Iterator[tuple[Site, Hint]]:
    """Yield hints to pad each array to the size of the whole, and to choose by the row."""
    first, *others = sorted(sites, key=lambda site: -site.entry.wire_bytes)
    # XLA brings the arrays to a layout in which no device has parts of a row of the whole.
    nodes = program.flat(first.computation.name).nodes
    joins = [join for node in nodes if (join := _join(first, node)) is not None]
    # One line may join along several dimensions: take the joins of arrays that these sites bring.
    ends = {site.node for site in sites}
    joins = [join for join in joins if ends & _behind(join[2])]
    if not joins:
        return
    d, rows, whole = max(joins, key=lambda join: sum(join[1]))
    sizes, count = whole.shape.dimensions, first.collective.group_size
    row = whole.shape.bytes * count // sum(rows)
    all_rows = first.entry.bytes * count // row  # what is sent back
    if sum(rows) != all_rows:  # on JAX 0.12 the rows before and those behind are joined apart
        pairs = itertools.permutations((of for axis, of, _ in joins if axis == d), 2)
        both = (one + other[1:] for one, other in pairs if one[-1] == other[0])
        rows = next((of for of in both if sum(of) == all_rows), [])
    few = sum(rows) - max(rows, default=0)
    # A pad sends rows to the next device alone if what is joined fits into one device's part.
    if not 1 < len(rows) <= len(_NAMES) or sum(rows) % count or few * count > sum(rows):
        return
    moved = [accounts.wire_bytes("all-reduce", n * row, count) for n in rows if n < max(rows)]
    # Many rows are sent there, and all of them back: a line may join twice.
    times = -(-sum(site.entry.bytes == first.entry.bytes for site in sites) // 2)
    sent = times * (sum(moved) + 2 * few * row)
    runs = first.entry.runs or 1
    before = sum(site.entry.wire_bytes for site in sites)
    if len(moved) != len(rows) - 1 or 2 * sent > before:
        return
    index = f"[:, {', '.join(['None'] * (len(sizes) - 1 - d))}]" if d < len(sizes) - 1 else ""
    written, start = "", 0
    for n, name in zip(rows, _NAMES):
        pads = [(0, 0)] * len(sizes)
        pads[d] = (start, sum(rows) - start - n)
        start += n
        part = f"jnp.pad({name}, {pads})"
        written += part if start == sum(rows) else f"jnp.where(i < {start}, {part}, "
    along = f"[{', '.join(_NAMES[: len(rows)])}], of {', '.join(map(str, rows))} rows,"
    advice = (
        f"to put {along} one behind the other along a dimension that is sharded over "
        f"{first.over}, XLA sends nearly all rows to other devices, and back. With i = "
        f"jnp.arange({sum(rows)}){index}, {written}{')' * (len(rows) - 1)} is the same, and "
        f"{before * runs} B become at most {sent * runs} B"
    )
    yield (
        first,
        first.hint(
            advice,
            bytes_after=first.in_all(min(sent, first.entry.bytes)),
            trips_after=first.in_all(times * (2 * len(moved) + 2)),
            sent_after=first.in_all(sent),
            goes_with=first,
        ),
    )
    for site in others:
        yield site, site.hint(f"goes away with that at {first.where}", goes_with=first)


def _behind(node: Node) -> set[Node]:
    """Return a value and all values that it is moved from."""
    return walk.reached(
        [node], lambda n: n.operands if n.opcode in _MOVES | {"get-tuple-element"} else []
    )


def _join(site: Site, node: Node) -> tuple[int, list[int], Node] | None:
    """Return the dimension, the parts' rows and the node of a join in a site's source line."""
    axis = (node.instruction.attribute("dimensions") or "").strip("{}")
    metadata = site.program.module.metadata(node.instruction)
    is_of_line = metadata.frames[:1] == site.collective.frames[:1]
    if node.opcode != "concatenate" or not axis.isdecimal() or not is_of_line:
        return None
    rows = [operand.shape.dimensions[int(axis)] for operand in node.operands]
    is_asked = phases.operation(metadata.op_name) == "concatenate" and len({*rows}) > 1
    return (int(axis), rows, node) if is_asked else None


# -- places that XLA counts and sends -------------------------------------------------------------

_COUNTED = FUNCTIONS | {"constant", "partition-id", "dynamic-slice"}
_COUNTED |= {"collective-permute", "collective-permute-start", "collective-permute-done"}
_MOST = 256


def counted(site: Site) -> Hint | None:
    """Find places that a sort moves along with the values, and that each device could count."""
    if site.in_shard_map or site.collective.kind not in _EXCHANGES:
        return None
    name = site.collective.op_name
    if "sort" not in name:
        return None  # fast: no call of ``operation``
    what = (
        "it moves the places that jnp.argsort, or a stable sort on TPU, takes along: XLA counts "
        f"them by the sharding over {site.over} of the sorted dimension, and sends them"
    )
    if name.endswith("/rev"):
        if _around(site) not in site.program.remembered(_sorts):
            return None
        what = (
            "with descending=True, jnp.argsort turns a dimension round that is sharded over "
            f"{site.over}, and XLA sends all of it"
        )
    elif not _is_of_places(site):
        return None
    return site.hint(
        f"{what}. With jax.lax.with_sharding_constraint both before the sort and of its result, to "
        f"a spec that has {site.over} at another dimension, as P(None, {site.over}) for "
        f"P({site.over}), a device counts its own places and turns its own part, what is sorted "
        f"moves there and back as it does now, and {site.entry.wire_bytes} B become 0 B"
    )


def _is_of_places(site: Site) -> bool:
    is_sort = site.collective.kind == "all-to-all" and operation(site.collective) == "sort"
    return is_sort and all(map(_is_counted, site.sources))


def _around(site: Site) -> tuple[str, str | None]:
    return site.collective.op_name.rpartition("/")[0], site.entry.source


def _sorts(program: Program) -> set[tuple[str, str | None]]:
    return {_around(site) for site in program.sites if _is_of_places(site)}


def _is_counted(node: Node) -> bool:
    """Return whether a value depends only on numbers that each device can count."""
    stack, seen = [node], {node}
    while stack and len(seen) < _MOST:
        maker = stack.pop()
        makers = {*maker.operands}
        if maker.opcode == "get-tuple-element":  # XLA for GPU sends several by one permute
            sent = made_by(maker.operands[0], {"collective-permute-done"})
            if not sent.opcode.startswith("collective-permute"):
                return False
            makers = {*sent.operands[maker.index : maker.index + 1]}
        elif maker.opcode not in _COUNTED:
            return False
        stack += (new := makers - seen)
        seen |= new
    return not stack and any(maker.opcode == "iota" for maker in seen)


ROWS = {
    "reshape": Kind(
        reordered,
        looks_like=(
            "an all-to-all for a reshape of a sharded batch to microbatches, (batch, ...) to "
            "(steps, batch / steps, ...), or, with fewer steps than devices, activations that are "
            "exchanged over parts of the axis; or to concatenate two sharded batches"
        ),
        in_shard_map="does not occur: a reshape there is of a device's own rows",
        under_jit=(
            "x.reshape(-1, steps, *x.shape[1:]).swapaxes(0, 1), jnp.stack([a, b], 1).reshape(-1, "
            "*a.shape[1:]): each device keeps its rows"
        ),
    ),
    "joined": Kind(
        joined,
        looks_like=(
            "on CPU and GPU, all-to-alls to concatenate a few rows and many, as `jnp.gradient` and "
            "the edges of a grid do, along a sharded dimension"
        ),
        in_shard_map="does not occur: a device joins its own rows",
        under_jit="`jnp.pad` of each array to the size of all, and `jnp.where` by the row's number",
    ),
    "split": Kind(
        split,
        looks_like=(
            "a permute for `jnp.split` of a dimension that is sharded, as of a gated layer, of "
            "q, k and v, or of an LSTM's gates; and all-to-alls for its gradient"
        ),
        in_shard_map="does not occur: a split there is of a device's own part",
        under_jit=(
            "a dimension for equal parts before the sharded one, w of (d, k, f) by P(None, None, "
            "axis); for other parts one for the n devices, w of (d, n, f) by P(None, axis)"
        ),
    ),
    "counted": Kind(
        counted,
        looks_like=(
            "an all-to-all of the places that `jnp.argsort`, or on TPU `jnp.sort`, along a sharded "
            "dimension takes along"
        ),
        in_shard_map="does not occur",
        under_jit=(
            "constrain the array before the sort, and its result, to another dimension's sharding"
        ),
    ),
}
