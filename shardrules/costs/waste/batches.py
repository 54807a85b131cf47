"""Find activations that leave the batch's layout, where keeping it sends less.

XLA's partitioner chooses a layout for each activation. In the layout of the batch, devices gather
weights and sum up gradients, and no activation moves. XLA may choose another layout, such as that
of the table in which tokens are looked up, until a constraint on an activation restores the
batch's layout. The constraint saves the bytes that are sent for activations, minus the bytes that
are sent in the batch's layout, for which we take an upper bound.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from shardrules.costs import walk
from shardrules.costs.waste import gathers
from shardrules.costs.waste.program import FLOATS, WHOLE, Hint, Kind, Program, Site
from shardrules.hlo.proof import phases
from shardrules.hlo.reader.flow import BARRIERS, Node, made_by

_BACK = ("backward", "recompute")
_LITTLE = 0.01  # of the program's bytes
_SHARE = 0.05  # of the program's bytes: less is not worth a constraint
_PRODUCTS = ("dot", "convolution")  # XLA for TPU writes a product as a convolution
_MOVES = WHOLE | BARRIERS
_MADE = _MOVES | {"convert"}  # XLA for CPU multiplies numbers of 16 bits as 32
# Found in the op_names of differentiated functions only: an optimizer may multiply weights, too.
_DIFFERENTIATED = "jvp("
_TOKENS = ("s16", "u16", "s32", "u32", "s64", "u64")


def _sent(site: Site) -> int:
    return site.in_all(site.entry.wire_bytes) or 0


def _shared_out(moved: list[Site], saved: int, advice: str) -> dict[Site, Hint]:
    """Return a hint for each collective of an activation; the first one has the advice."""
    found = {}
    for site in moved:
        part = min(saved, _sent(site))
        saved -= part
        stays = _sent(site) - part
        found[site] = site.hint(
            advice if site is moved[0] else f"goes away with that at {moved[0].where}",
            bytes_after=stays * site.entry.bytes // site.entry.wire_bytes,
            trips_after=site.entry.runs,
            sent_after=stays,
            together=True,
            goes_with=moved[0],
        )
    return found


def _constraint(spec: str, value: str = "x") -> str:
    return (
        f"jax.lax.with_sharding_constraint({value}, jax.sharding.NamedSharding(mesh, P({spec}))) "
        "if the batch is its first dimension"
    )


# -- activations that only the backward pass moves ------------------------------------------------


def off_the_batch(site: Site) -> Hint | None:
    """Find activations that are moved in the backward pass of a step that gathers its weights."""
    return site.program.remembered(_off_the_batch).get(site)


def _off_the_batch(program: Program) -> dict[Site, Hint]:
    # A forward pass that only gathers weights has the layout of the batch throughout. In the same
    # layout, the backward pass would gather each weight and sum up its gradient, once for each use.
    # ``most`` is an upper bound of what it would then send; ``back`` is what it sends now.
    back, moved, others, everything = 0, [], 0, 0
    if any(given.blockers for given in program.inputs):
        return {}  # it isn't known which arrays all devices hold
    most = _of_whole_arrays(program)
    for site in program.sites:
        sent, nested = _sent(site), site.op_name.count("transpose(") > 1
        over_all = site.collective.group_size == program.device_count
        if not site.entry.runs or nested or site.in_shard_map or site.is_unnamed or not over_all:
            return {}
        everything += sent
        weight = gathers.weight(site)
        if site.entry.phase in _BACK:
            back += sent
            if weight is None and site.collective.kind in ("all-gather", "all-to-all"):
                if _is_read_back(site):
                    moved.append(site)
                else:  # by an optimizer, for example, that takes whole gradients
                    most += sent
        elif weight is None:
            others += sent
        else:
            uses, wider = weight
            most += uses * (1 + 2 * wider) * site.entry.wire_bytes
    saved = min(back - most - 4 * others, sum(map(_sent, moved)))
    if others > _LITTLE * everything or saved < _SHARE * everything:
        return {}
    moved.sort(key=lambda site: -_sent(site))
    advice = (
        "the forward pass leaves each activation where its part of the batch is, and gathers "
        f"weights; the backward pass moves them over {moved[0].over} instead, in {len(moved)} "
        f"collectives: as in the forward pass, it sends {saved} B less. Constrain the result of "
        "the product in this line to the batch's layout, which its gradient then has, in place of "
        f"x @ w {_constraint(moved[0].over, 'x @ w')}"
    )
    return _shared_out(moved, saved, advice)


def _is_read_back(site: Site) -> bool:
    """Return whether the backward pass alone reads what this moves; JAX 0.12 names it otherwise."""
    uses = gathers.uses_of(site)
    names = (site.program.module.metadata(use.user.instruction).op_name for use in uses)
    return bool(uses) and all(phases.phase_of(name) in _BACK for name in names)


def _of_whole_arrays(program: Program) -> int:
    """Return the most that a device sends for the gradients of arrays that all devices hold."""
    runs = max((site.entry.runs or 1 for site in program.sites), default=1)
    everyone = [range(program.device_count)]
    whole = (given.shape.bytes for given in program.inputs if given.equal_in(everyone))
    return sum(2 * runs * size for size in whole)


# -- activations that hold the whole batch --------------------------------------------------------


def whole_batch(site: Site) -> Hint | None:
    """Find products of weights that are summed over an axis that splits the program's batch.

    Such a sum is equal along the axis. So the batch isn't split over the axis at this place,
    although it is split when the program gets it.
    """
    return site.program.remembered(_whole_batch).get(site)


def _whole_batch(program: Program) -> dict[Site, Hint]:
    found: dict[Site, Hint] = {}
    if any(given.blockers for given in program.inputs):
        return found  # it isn't known which axes split the inputs
    tokens = [given for given in program.inputs if given.shape.element_type in _TOKENS]
    for axis, size in program.mesh.items():
        split = [given.varying or () for given in tokens if axis in (given.varying or ())]
        if size > 1 and split:
            found.update(_along(program, axis, max(split, key=len)))
    return found


def _along(program: Program, axis: str, split: Collection[str]) -> dict[Site, Hint]:
    """Return a hint for each collective of an activation over one of the axes that split tokens."""
    size = program.mesh[axis]
    axes = tuple(name for name in program.mesh if name in split)
    spec = repr(axes[0] if len(axes) == 1 else axes)
    weights = _Weights(program, axis)
    along = [site for site in program.sites if _is_along(site, axis)]
    moved = [site for site in along if _adds(site) and weights.of(site.made_by(_MADE))]
    # A sum that occurs only in the backward pass may be a gradient, over the rows of the batch.
    is_proven = any(site.entry.phase == "forward" for site in moved)
    most = weights.at_most(size) if is_proven else None
    if most is None:
        return {}
    moved += [site for site in along if _brings(site) and not weights.holds(site.source)]
    saved = sum(map(_sent, moved)) - most
    if saved < _SHARE * sum(map(_sent, program.sites)):
        return {}
    moved.sort(key=lambda site: (site.entry.phase != "forward", -_sent(site)))
    place = weights.looked_up
    place = f"where it is looked up, at {place}" if place else "before the first layer"
    advice = (
        f"the batch is split over {axis!r} when the program gets it, but XLA gave this up for the "
        f"layout of weights: each device computes activations of {size} devices. Constrain the "
        f"activation to the batch's layout {place}: x = {_constraint(spec)}. XLA then gathers "
        f"weights instead, and a device sends at least {saved} B less in {len(moved)} collectives "
        "together"
    )
    return _shared_out(moved, saved, advice)


def _is_along(site: Site, axis: str) -> bool:
    is_known = site.entry.axes == (axis,) and site.entry.runs is not None
    return is_known and not site.in_shard_map and _DIFFERENTIATED in site.op_name


def _adds(site: Site) -> bool:
    return site.adds or site.collective.kind == "reduce-scatter"


def _brings(site: Site) -> bool:
    return site.collective.kind in ("all-gather", "all-to-all")


class _Weights:
    """The weights of a program that are split over a mesh axis, and their products.

    A weight is a float parameter for which the program returns an array of the same shape: its new
    value, or its gradient.
    """

    def __init__(self, program: Program, axis: str):
        self._program = program
        self._axis = axis
        entry = program.module.entry
        self._returned = {str(s) for s in entry.instructions[entry.root].shape.leaves()}

    def of(self, product: Node) -> Node | None:
        """Return the operand of a product that is a part of a weight, or None."""
        if product.opcode not in _PRODUCTS or _has_batch(product):
            return None
        return next((node for node in product.operands[:2] if self.holds(node)), None)

    def holds(self, node: Node, split: bool = True) -> bool:
        """Return whether a value is part of a weight (if ``split``: that the axis splits)."""
        made_of = self._origin(node)
        if made_of is not None and made_of.opcode in ("all-gather", "concatenate"):
            return all(self.holds(operand, split) for operand in made_of.operands)
        if made_of is None or made_of.opcode != "parameter":
            return False
        given = self._program.inputs[int(made_of.instruction.literal)]
        is_float = FLOATS.match(given.shape.element_type) is not None
        is_split = not split or self._axis in (given.varying or ())
        return is_float and is_split and str(given.shape) in self._returned

    def _origin(self, node: Node) -> Node | None:
        moved = made_by(node, _MOVES)
        if moved.opcode in ("all-gather", "concatenate"):
            return moved
        made_of = gathers.origin_of(self._program, moved)
        return made_of and made_of[0]

    def _part(self, node: Node) -> int:
        """Return the bytes of the part of a weight that one device has."""
        made_of = self._origin(node)
        gathered = made_of is not None and made_of.opcode == "all-gather"
        return (made_of.operands[0] if made_of and gathered else node).shape.bytes

    def _is_of_whole(self, product: Node) -> bool:
        """Return whether a product is of a weight, split over the axis or not."""
        return any(self.holds(node, split=False) for node in product.operands[:2])

    @property
    def looked_up(self) -> str:
        """Return the line of the first lookup in a weight; empty if the text has none."""
        for node, _ in self._nodes():
            if node.opcode == "gather" and self.holds(node.operands[0]):
                return walk.source(self._program.module, [node.instruction])
        return ""

    def at_most(self, size: int) -> int | None:
        """Return the most that a device sends over the axis in the batch's layout; None if unknown.

        For each product of a weight, the device gathers the weight. For each product in the forward
        pass, it also sums up a gradient, at most by an all-reduce. If other operations may combine
        different rows of the batch, the answer is unknown.
        """
        most, longest = 0, 1
        for node, count in self._nodes():
            name = self._program.module.metadata(node.instruction).op_name
            if name and _DIFFERENTIATED not in name:
                continue
            if name and _may_mix(node):  # without a name, it is one of XLA's own
                return None
            is_product = node.opcode in _PRODUCTS
            if is_product and _has_batch(node):
                if any(map(self.holds, node.operands[:2])):
                    return None  # experts, to which tokens of all rows are sent
                continue
            if not is_product and node.opcode != "gather":
                continue
            held = self.of(node) if is_product else node.operands[0]
            is_forward = "transpose(" not in name
            if held is None or not (is_product or self.holds(held)):
                if is_product and is_forward and not self._is_of_whole(node):
                    return None  # it may multiply a weight, or rows of the batch by others
                continue
            if count is None:
                return None
            longest = max(longest, count)
            most += count * (size - 1) * self._part(held) * (3 if is_forward else 1)
        for given in self._program.inputs:
            if FLOATS.match(given.shape.element_type) and self._axis not in (given.varying or ()):
                most += 2 * longest * given.shape.bytes
        return most

    def _nodes(self) -> Iterator[tuple[Node, int | None]]:
        """Yield each value that the program computes, and how often."""
        fused = self._program.remembered(_fused)
        for name, run in self._program.runs.items():
            if name not in fused:
                for node in self._program.flat(name).nodes:
                    yield node, run.count


def _fused(program: Program) -> set[str]:
    names: set[str] = set()
    for computation in program.module.computations.values():
        for instruction in computation.instructions:
            if instruction.opcode == "fusion":
                names.update(instruction.calls)
    return names


def _may_mix(node: Node) -> bool:
    """Return whether an operation other than a product may combine rows of the batch."""
    if node.opcode == "custom-call":  # XLA for TPU packs the indices of a lookup by one
        return not all(given.shape.element_type in _TOKENS for given in node.operands)
    return node.opcode in ("sort", "ragged-dot", "topk")


def _has_batch(product: Node) -> bool:
    """Return whether a product is a batch of products (both operands have a batch dimension)."""
    if product.opcode == "dot":
        return bool(product.instruction.attribute("lhs_batch_dims"))
    # In XLA's text for TPU, a dimension of the batch is a spatial one: 01bf_01io->01bf.
    labels = re.split("_|->", product.instruction.attribute("dim_labels") or "")
    shapes = (*(node.shape for node in product.operands[:2]), product.shape)
    if len(labels) != 3 or any(len(a) != len(s.dimensions) for a, s in zip(labels, shapes)):
        return False
    for spatial in filter(str.isdigit, labels[0]):
        sizes = [s.dimensions[a.index(spatial)] for a, s in zip(labels, shapes) if spatial in a]
        if len(sizes) == 3 and min(sizes) > 1:
            return True
    return False


ROWS = {
    "whole batch": Kind(
        whole_batch,
        looks_like=(
            "all-reduces of activations over the axis that splits the batch: XLA gave up the "
            "batch's layout for that of weights, often after a lookup in a sharded table"
        ),
        in_shard_map="does not occur",
        under_jit=(
            "jax.lax.with_sharding_constraint of the activation to the batch's layout, where it is "
            "looked up"
        ),
    ),
    "off the batch": Kind(
        off_the_batch,
        looks_like=(
            "all-to-alls and all-gathers of activations in the backward pass of a step (FSDP) "
            "whose forward pass only gathers weights, where gathering them again sends less"
        ),
        in_shard_map="does not occur",
        under_jit=(
            "jax.lax.with_sharding_constraint of an activation to the batch's layout, "
            "as of the scanned layer's input"
        ),
    ),
}
