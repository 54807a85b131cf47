"""Find the proof's inputs: the number of devices, the mesh, the entry parameters' states."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shardrules import errors
from shardrules.hlo.known import ranges
from shardrules.hlo.known import states as hs
from shardrules.hlo.known.ranges import Value
from shardrules.hlo.proof import collectives as hc
from shardrules.hlo.proof import customcalls
from shardrules.hlo.proof import slices as between
from shardrules.hlo.reader import devices as hd
from shardrules.hlo.reader import module as hm
from shardrules.hlo.reader import notations as hn
from shardrules.hlo.reader import shardings

MAX_DEVICES = 1 << 20
_SIZED = r'[^",=}]++=\d++'
_TAG_MESH = re.compile(
    rf'shardrules\.mesh\s*=\s*(?:"([^"]*)"|({_SIZED}(?:,{_SIZED})*+)(?=\s*(?:[,}}]|$)))'
)


def devices(
    module: hm.Module, mesh: Mapping[str, int] | None, slices: int | hd.SliceOrder | None = None
) -> hd.Relations:
    """Return the relations over the program's devices; raise an error for too many devices."""
    size = None
    if mesh is not None:
        size = math.prod(n for n in dict(mesh).values() if isinstance(n, int))
    partitions, replicas = module.num_partitions or 1, module.replica_count or 1
    stated = module.num_partitions is not None or module.replica_count is not None
    if not stated:  # as in dumps of old versions
        partitions, replicas = _counts_in_text(module) if size is None else (size, 1)
    if partitions * replicas > MAX_DEVICES:
        raise errors.HloError(
            f"module {module.name!r} is for {partitions * replicas} devices, more than the "
            f"{MAX_DEVICES} that this verifier accepts; is the text damaged?",
            device_count=partitions * replicas,
        )
    stated = stated or size is not None
    return between.relations_of(module, partitions, replicas, stated, mesh, slices)


def _counts_in_text(module: hm.Module) -> tuple[int, int]:
    """Return the numbers of partitions and replicas that the ids in groups and shardings need."""
    counts = {"partitions": 1, "replicas": 1}
    for computation in module.computations.values():
        for i in computation.instructions:
            what, count = "partitions", 1
            if i.opcode == "parameter" and computation.is_entry:
                sizes = re.search(r"devices=(\[[\d,]*\])", i.attribute("sharding") or "")
                count = math.prod(ranges.read_ints(sizes[1])) if sizes else 1
            elif i.opcode in hc.OPCODES:
                permute = hc.OPCODES[i.opcode] == "collective-permute"
                text = i.attribute("source_target_pairs" if permute else "replica_groups")
                try:
                    (members, _), _ = hn.read_groups(text or "")
                except (hn.NotationError, OverflowError):
                    continue
                count = int(members.max(initial=0)) + 1
                what = "replicas" if i.attribute("channel_id") is None else "partitions"
            counts[what] = max(counts[what], count)
    return counts["partitions"], counts["replicas"]


def find_mesh(
    module: hm.Module, device_count: int, given: Sequence[str | None] = ()
) -> dict[str, int] | None:
    """Return the mesh that the text or given shardings name; None if they name none or several."""
    text = module.text
    named: set[tuple[tuple[str, int], ...]] = set()
    if module.mentions("shardrules.mesh"):
        # The header names the program's own mesh; kernels may name others.
        for part in (module.header.get("frontend_attributes", ""), text):
            for match in _TAG_MESH.finditer(part):
                mesh = customcalls.read_mesh(match[1] if match[1] is not None else match[2] or "")
                if mesh and int(np.prod(list(mesh.values()), dtype=np.float64)) == device_count:
                    named.add(tuple(mesh.items()))
            if named:
                return dict(named.pop()) if len(named) == 1 else None
    in_text = text if module.mentions("mesh['") else ""
    return shardings.named_mesh(in_text, given, device_count)


def promises(
    module: hm.Module, given: Sequence[tuple[str, str] | None] | None
) -> tuple[tuple[str, str] | None, ...] | None:
    """Return the path and sharding of each output; None if neither caller nor text has them."""
    root = module.entry.instructions[module.entry.root]
    count = len(root.shape.leaves())
    if given is not None and len(given) != count:
        raise errors.HloError(
            f"output_shardings has {len(given)} entries, but module {module.name!r} returns "
            f"{count} arrays; give one for each (None for a token).",
            given=len(given),
            outputs=count,
        )
    if given is None:
        text = root.attribute("sharding")
        parts = hn.split_tuple_sharding(text) if text else []
        if len(parts) != count:
            return None
        alone = root.shape.elements is None
        given = [("" if alone else f"[{n}]", part) for n, part in enumerate(parts)]
    return tuple(given)


def parameter_values(
    module: hm.Module, states: hs.States, given: Sequence[str | None] | None
) -> list[Any]:
    """Return the entry parameters' values, read from their shardings (printed or given)."""
    parameters = module.entry.parameters
    if given is not None and len(given) != len(parameters):
        raise errors.HloError(
            f"parameter_shardings has {len(given)} entries, but module {module.name!r} has "
            f"{len(parameters)} parameters; give one for each (None if it isn't known), and "
            "none for pruned arguments.",
            given=len(given),
            parameters=len(parameters),
        )
    # A sharding in the text comes before a given one. A parameter without any sharding, or with an
    # unreadable one, gets a blocker: each device may have its own data, but need not.
    state = _state_reader(states)
    replication_stated = module.mentions("parameter_replication=")
    values: list[Any] = []
    for number, instruction in enumerate(parameters):
        attributes = {k: instruction.text[a:b] for k, a, b in instruction.attributes()}
        stated = given[number] if given is not None else None
        stated, _, replicas = (stated or "").partition(", parameter_replication=")
        text = attributes.get("sharding") or stated or None
        op_name = module.frames.op_name(attributes.get("metadata", ""))
        what = f"parameter {number}" + (f" ({op_name})" if op_name else "")
        leaves = 1 if instruction.shape.elements is None else len(instruction.shape.leaves())
        replicas = attributes.get("parameter_replication", replicas)
        shared = re.findall(r"true|false", replicas) if replicas else []
        sure = bool(shared) or replication_stated
        if len(shared) != leaves:
            shared = ["false"] * leaves
        if text is None and states.relations.all_partitions == 1:
            text = "{replicated}"
        if text is None:
            why = f"{what} has {hs.UNSHARDED}"
            values.append(states.blocked(hs.Blocker(why)))
            continue
        parts = hn.split_tuple_sharding(text)
        if len(parts) == 1:  # one sharding for all arrays of a tuple
            parts = parts * leaves
        leaf_states = []
        for leaf in range(leaves):
            cause = hs.Cause(what if leaves == 1 else f"{what} element {leaf}", "is sharded")
            try:
                if len(parts) != leaves:
                    raise hn.NotationError(f"{len(parts)} shardings for {leaves} arrays")
                leaf_states.append(state(cause, parts[leaf], shared[leaf] == "true", sure))
            except hn.NotationError as error:
                why = f"{what} has an unreadable sharding ({error})"
                leaf_states.append(states.blocked(hs.Blocker(why)))
        values.append(_tree(instruction.shape, leaf_states, states))
    return values


def _state_reader(states: hs.States) -> Callable[[hs.Cause, str, bool, bool], int]:
    """Return a function that reads a sharding as a state.

    Its argument ``sure`` says that the text states which replicas agree.
    """
    relations = states.relations
    replica = relations.intern(relations.places // relations.all_partitions)
    # If only the number of slices is given, their order is an assumption.
    assumed = (between.IN_ORDER,) if relations.slices > 1 and not relations.by_id else ()

    @functools.cache
    def same_tile(text: str) -> int | None:
        tiles = hn.sharding_tiles(text, relations.all_partitions)
        return None if tiles is None else relations.intern(relations.tiles_on_devices(tiles))

    def state(cause: hs.Cause, text: str, shared: bool, sure: bool) -> int:
        # Devices with the same tile hold the same data, but replicas do so only if the text says it
        # (``shared``). Devices with other tiles count as apart. Replicas count as apart only if the
        # text says which of them agree (``sure``).
        within = same_tile(text)
        if within is None:
            how = f"has sharding {text}, which may give each device its own data"
            return states.source(hd.DISTINCT, cause._replace(how=how))
        if within and not relations.order_known:
            why = f"{cause.what} is sharded over several slices, in an order that the text"
            return states.blocked(hs.Blocker(f"{why} doesn't give (pass slices=)"))
        cause = cause._replace(detail=f"as {text}" if within else "between replicas")
        relation = within if shared else relations.refine(within, replica)
        known = states.source(relation, cause, True)
        if within and assumed:
            known = states.changed(known, supports=assumed)
        return known if sure else states.changed(known, apart=within)

    return state


def _tree(shape: hm.Shape, leaves: list[int], states: hs.States) -> Value:
    """Build the value of a shape from the states of its arrays, depth first."""
    iterator = iter(leaves)

    def build(part: hm.Shape, depth: int) -> Value:
        if part.elements is None:
            return next(iterator)
        if depth > 100:  # no real parameter nests so deep
            return functools.reduce(states.refine, [next(iterator) for _ in part.leaves()], 0)
        return tuple([build(e, depth + 1) for e in part.elements])

    return build(shape, 0)
