"""Where the proof starts: the number of devices, the mesh, the entry parameters' states."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardrules import errors
from shardrules.hlo.known import ranges
from shardrules.hlo.known import states as hs
from shardrules.hlo.proof import customcalls
from shardrules.hlo.reader import devices as hd
from shardrules.hlo.reader import module as hm
from shardrules.hlo.reader import notations as hn
from shardrules.hlo.reader import shardings

MAX_DEVICES = 1 << 20
_SIZED = r'[^",=}]++=\d++'
_TAG_MESH = re.compile(
    rf'shardrules\.mesh\s*=\s*(?:"([^"]*)"|({_SIZED}(?:,{_SIZED})*+)(?=\s*(?:[,}}]|$)))'
)
_SHARDING_MESH = re.compile(r"sharding=\{+(?=mesh\[')")


def devices(module: hm.Module, mesh: Mapping[str, int] | None) -> hd.Relations:
    """Give the relations over a module's devices."""
    # Dumps of old versions state neither count. Then use the mesh, or else the largest device id in
    # the groups and shardings.
    size = None
    if mesh is not None:
        size = math.prod(n for n in dict(mesh).values() if isinstance(n, int))
    partitions, replicas = module.num_partitions or 1, module.replica_count or 1
    stated = module.num_partitions is not None or module.replica_count is not None
    if not stated:
        partitions, replicas = _counts_in_text(module, size)
    if partitions * replicas > MAX_DEVICES:
        raise errors.HloError(
            f"module {module.name!r} is for {partitions * replicas} devices, more than the "
            f"{MAX_DEVICES} that this verifier accepts; is the text damaged?",
            device_count=partitions * replicas,
        )
    return hd.Relations(partitions, replicas, stated or size is not None)


def _counts_in_text(module: hm.Module, mesh_size: int | None) -> tuple[int, int]:
    partitions = mesh_size or 1
    replicas = 1
    if mesh_size is None:
        for computation in module.computations.values():
            for i in computation.instructions:
                key = None
                if i.opcode.startswith(("all-", "reduce-scatter", "collective-", "ragged-all")):
                    key = (
                        "source_target_pairs"
                        if i.opcode.startswith("collective-permute")
                        else "replica_groups"
                    )
                elif i.opcode == "parameter" and computation.is_entry:
                    key = "sharding"
                value = i.attribute(key) if key else None
                if not value:
                    continue
                try:
                    if key == "sharding":
                        sizes = re.search(r"devices=(\[[\d,]*\])", value)
                        count = int(np.prod(ranges.read_ints(sizes[1]))) if sizes else 1
                    else:
                        (members, _), _ = hn.read_groups(value)
                        count = int(members.max(initial=0)) + 1
                except (hn.NotationError, OverflowError):
                    continue
                if key != "sharding" and i.attribute("channel_id") is None:
                    replicas = max(replicas, count)
                else:
                    partitions = max(partitions, count)
    return partitions, replicas


def find_mesh(module: hm.Module, device_count: int) -> dict[str, int] | None:
    """Find the one mesh that the text names, in tags or in shardings; None if there is none."""
    text = module.text
    named: set[tuple[tuple[str, int], ...]] = set()
    if "shardrules.mesh" in text:
        # The header names the program's own mesh; kernels may name others.
        for part in (module.header.get("frontend_attributes", ""), text):
            for match in _TAG_MESH.finditer(part):
                mesh = customcalls.read_mesh(match[1] if match[1] is not None else match[2] or "")
                if mesh and int(np.prod(list(mesh.values()), dtype=np.float64)) == device_count:
                    named.add(tuple(mesh.items()))
            if named:
                return dict(named.pop()) if len(named) == 1 else None
    if "mesh['" in text:
        for match in _SHARDING_MESH.finditer(text):
            try:
                mesh_named, _ = hn.read_mesh(text[match.end() : match.end() + 4096])
            except hn.NotationError:
                continue
            # XLA invents the names axis_0, axis_1 for shardings without axis names.
            if any(re.fullmatch(r"_?axis_\d+", name) for name, _ in mesh_named.axes):
                continue
            if mesh_named.devices.size == device_count and mesh_named.is_row_major:
                named.add(mesh_named.axes)
    if len(named) == 1:
        return dict(named.pop())
    return None


def promises(
    module: hm.Module, given: Sequence[tuple[str, str] | None] | None
) -> tuple[tuple[str, str] | None, ...] | None:
    """Give the path and sharding of each output; None if neither caller nor text has them."""
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
        parts = shardings.split_tuple_sharding(text) if text else []
        if len(parts) != count:
            return None
        alone = root.shape.elements is None
        given = [("" if alone else f"[{n}]", part) for n, part in enumerate(parts)]
    return tuple(given)


def parameter_values(
    module: hm.Module, states: hs.States, given: Sequence[str | None] | None
) -> list[Any]:
    """Give the entry parameters' values, from their shardings."""
    parameters = module.entry.parameters
    if given is not None and len(given) != len(parameters):
        raise errors.HloError(
            f"parameter_shardings has {len(given)} entries, but module {module.name!r} has "
            f"{len(parameters)} parameters; give one for each (None if it isn't known), and "
            "none for pruned arguments.",
            given=len(given),
            parameters=len(parameters),
        )
    read = _Shardings(states)
    values: list[Any] = []
    for number, instruction in enumerate(parameters):
        attributes = {k: instruction.text[a:b] for k, a, b in instruction.attributes()}
        stated = given[number] if given is not None else None
        stated, _, replicas = (stated or "").partition(", parameter_replication=")
        text = attributes.get("sharding") or stated or None
        metadata = attributes.get("metadata")
        op_name = module.frames.metadata(metadata).op_name if metadata else ""
        what = f"parameter {number}" + (f" ({op_name})" if op_name else "")
        leaves = len(instruction.shape.leaves())
        shared = re.findall(r"true|false", attributes.get("parameter_replication", replicas))
        sure = bool(shared) or "parameter_replication=" in module.text
        if len(shared) != leaves:
            shared = ["false"] * leaves
        if text is None and states.relations.partitions == 1:
            text = "{replicated}"
        if text is None:
            why = f"{what} has no sharding in the text (pass parameter_shardings=)"
            values.append(states.blocked(hs.Blocker(why)))
            continue
        parts = shardings.split_tuple_sharding(text)
        if len(parts) == 1:
            parts = parts * leaves
        leaf_states = []
        for leaf in range(leaves):
            name = what if leaves == 1 else f"{what} element {leaf}"
            try:
                if len(parts) != leaves:
                    raise hn.NotationError(f"{len(parts)} shardings for {leaves} arrays")
                leaf_states.append(read.state(parts[leaf], shared[leaf] == "true", name, sure))
            except hn.NotationError as error:
                why = f"{what} has an unreadable sharding ({error})"
                leaf_states.append(states.blocked(hs.Blocker(why)))
        values.append(tree(instruction.shape, leaf_states, states))
    return values


class _Shardings:
    """Parameters' shardings as states; each text is read once."""

    def __init__(self, states: hs.States):
        self._states = states
        self._relations: dict[tuple[str, bool], int | None] = {}

    def state(self, text: str, shared: bool, name: str, sure: bool) -> int:
        """Give a parameter's state; ``sure``: the program says which replicas hold the same."""
        relation, within = (self._relation(text, same) for same in (shared, True))
        if relation is None or within is None:
            how = f"has sharding {text}, which may give each device its own data"
            return self._states.source(hd.DISTINCT, hs.Cause(name, how))
        detail = f"as {text}" if within else "between replicas"
        state = self._states.source(relation, hs.Cause(name, "is sharded", detail), True)
        return state if sure else self._states.changed(state, apart=within)

    def _relation(self, text: str, shared: bool) -> int | None:
        if (text, shared) not in self._relations:
            self._relations[text, shared] = self._read(text, shared)
        return self._relations[text, shared]

    def _read(self, text: str, shared: bool) -> int | None:
        relations = self._states.relations
        partitions = relations.partitions
        tiles = shardings.read_sharding(text, partitions).tiles
        if tiles is None:
            return None
        ids = np.arange(relations.device_count)
        labels = np.array(tiles)[ids % partitions]
        return relations.intern(labels if shared else labels + ids // partitions * partitions)


def replicated_leaves(shape: hm.Shape, sharding: str | None, partitions: int) -> list[bool]:
    """Tell for each array of a shape whether a sharding calls it replicated."""
    leaves = shape.leaves()
    parts = shardings.split_tuple_sharding(sharding) if sharding else []
    if len(parts) == 1:
        parts *= len(leaves)
    if len(parts) != len(leaves):
        return [False] * len(leaves)
    replicated = []
    for part in parts:
        try:
            tiles = shardings.read_sharding(part, partitions).tiles
        except hn.NotationError:
            tiles = None
        replicated.append(tiles is not None and set(tiles) == {0})
    return replicated


def tree(shape: hm.Shape, leaves: list[int], states: hs.States) -> Any:
    """Build the value of a shape from the states of its arrays, depth first."""
    if shape.elements is None:
        return leaves[0]
    iterator = iter(leaves)

    def build(part: hm.Shape) -> Any:
        if part.elements is None:
            return next(iterator)
        return tuple([build(e) for e in part.elements])

    if _depth(shape) > 100:  # no real parameter nests so deep
        return functools.reduce(states.refine, leaves, 0)
    return build(shape)


def _depth(shape: hm.Shape) -> int:
    deepest = 0
    stack = [(shape, 0)]
    while stack:
        part, depth = stack.pop()
        deepest = max(deepest, depth)
        stack.extend((e, depth + 1) for e in part.elements or ())
    return deepest
