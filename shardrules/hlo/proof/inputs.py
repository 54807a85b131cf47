"""Where the proof starts: the number of devices, the mesh, the entry parameters' states."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardrules import errors
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


def device_counts(module: hm.Module, mesh_size: int | None) -> tuple[int, int]:
    """Give partitions and replicas.

    A header without either (dumps of old versions) leaves them to the mesh, else to the largest
    device that a group or sharding names.
    """
    found, replicas = module.num_partitions or 1, module.replica_count or 1
    if module.num_partitions is None and module.replica_count is None:
        found, replicas = _counts_in_text(module, mesh_size)
    if found * replicas > MAX_DEVICES:
        raise errors.HloError(
            f"module {module.name!r} is for {found * replicas} devices, more than the "
            f"{MAX_DEVICES} that this verifier takes; is the text damaged?",
            device_count=found * replicas,
        )
    return found, replicas


def _counts_in_text(module: hm.Module, mesh_size: int | None) -> tuple[int, int]:
    found = mesh_size or 1
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
                        count = int(np.prod(hm_ints(sizes[1]))) if sizes else 1
                    else:
                        rows, _ = hn.read_groups(value)
                        count = max([m + 1 for r in rows for m in r], default=1)
                except (hn.NotationError, OverflowError):
                    continue
                if key != "sharding" and i.attribute("channel_id") is None:
                    replicas = max(replicas, count)
                else:
                    found = max(found, count)
    return found, replicas


def hm_ints(text: str) -> list[int]:
    """Read the numbers of ``[4,1,2]``."""
    return [int(n) for n in re.findall(r"\d{1,9}", text)]


def find_mesh(module: hm.Module, device_count: int) -> dict[str, int] | None:
    """Find the one mesh that the text names, in tags or in shardings; None if there is none.

    What the notation of one collective names is that collective's alone.
    """
    text = module.text
    named: set[tuple[tuple[str, int], ...]] = set()
    if "shardrules.mesh" in text:
        # The header's is the program's own; kernels of several meshes name several.
        for part in (module.header.get("frontend_attributes", ""), text):
            for found in _TAG_MESH.finditer(part):
                mesh = customcalls.read_mesh(found[1] if found[1] is not None else found[2] or "")
                if mesh and int(np.prod(list(mesh.values()), dtype=np.float64)) == device_count:
                    named.add(tuple(mesh.items()))
            if named:
                return dict(named.pop()) if len(named) == 1 else None
    if "mesh['" in text:
        for found in _SHARDING_MESH.finditer(text):
            try:
                mesh_named, _ = hn.read_mesh(text[found.end() : found.end() + 4096])
            except hn.NotationError:
                continue
            # XLA itself calls axes axis_0, axis_1: of a sharding that had no names.
            if any(re.fullmatch(r"_?axis_\d+", name) for name, _ in mesh_named.axes):
                continue
            if mesh_named.devices.size == device_count and mesh_named.is_row_major:
                named.add(mesh_named.axes)
    if len(named) == 1:
        return dict(named.pop())
    return None


def parameter_values(
    module: hm.Module,
    states: hs.States,
    partitions: int,
    replicas: int,
    given: Sequence[str | None] | None,
) -> list[Any]:
    """Give the entry parameters' values by their shardings.

    Args:
      module: the module.
      states: where states are interned.
      partitions: how many the module is for.
      replicas: how many the module is for.
      given: shardings by parameter number, for parameters that have none in the text.

    Raises:
      HloError: ``given`` does not have one entry for each parameter.
    """
    parameters = module.entry.parameters
    if given is not None and len(given) != len(parameters):
        raise errors.HloError(
            f"parameter_shardings has {len(given)} entries, but module {module.name!r} has "
            f"{len(parameters)} parameters; give one for each (None where it isn't known), pruned "
            "arguments left out.",
            given=len(given),
            parameters=len(parameters),
        )
    count = states.relations.device_count
    replica = np.arange(count) // partitions
    values: list[Any] = []
    known: dict[str, shardings.Sharding] = {}
    relations: dict[tuple[str, bool], int] = {}
    for number, instruction in enumerate(parameters):
        attributes = {k: instruction.text[a:b] for k, a, b in instruction.attributes()}
        text = attributes.get("sharding") or (given[number] if given is not None else None)
        metadata = attributes.get("metadata")
        op_name = module.frames.metadata(metadata).op_name if metadata else ""
        what = f"parameter {number}" + (f" ({op_name})" if op_name else "")
        leaves = instruction.shape.leaves()
        shared = [
            w == "true"
            for w in re.findall(r"true|false", attributes.get("parameter_replication", ""))
        ]
        if len(shared) != len(leaves):
            shared = [False] * len(leaves)
        if text is None and partitions == 1:
            text = "{replicated}"
        if text is None:
            state = states.blocked(
                hs.Blocker(f"{what} has no sharding in the text (pass parameter_shardings=)")
            )
            values.append(state)
            continue
        parts = shardings.split_tuple_sharding(text)
        if len(parts) == 1 and len(leaves) > 1:
            parts = parts * len(leaves)
        found = []
        for leaf in range(len(leaves)):
            try:
                if len(parts) != len(leaves):
                    raise hn.NotationError(f"{len(parts)} shardings for {len(leaves)} arrays")
                sharding = known.get(parts[leaf])
                if sharding is None:
                    sharding = shardings.read_sharding(parts[leaf], partitions)
                    known[parts[leaf]] = sharding
            except hn.NotationError as error:
                found.append(
                    states.blocked(
                        hs.Blocker(
                            f"{what} has a sharding that doesn't say what is equal ({error})"
                        )
                    )
                )
                continue
            name = what if len(leaves) == 1 else f"{what} element {leaf}"
            if sharding.tiles is None:
                found.append(
                    states.source(
                        hd.DISTINCT,
                        hs.Cause(
                            name, f"has sharding {parts[leaf]}, under which each device has its own"
                        ),
                    )
                )
                continue
            how = (parts[leaf], shared[leaf])
            if how not in relations:
                tiles = np.array(sharding.tiles)[np.arange(count) % partitions]
                if replicas > 1 and not shared[leaf]:
                    tiles = tiles + replica * partitions
                relations[how] = states.relations.intern(tiles)
            cause = hs.Cause(name, "is sharded", f"as {parts[leaf]}")
            found.append(states.source(relations[how], cause))
        values.append(tree(instruction.shape, found, states))
    return values


def replicated_leaves(shape: hm.Shape, sharding: str | None, partitions: int) -> list[bool]:
    """Tell for each array of a shape whether a sharding says that all partitions hold the same."""
    leaves = shape.leaves()
    parts = shardings.split_tuple_sharding(sharding) if sharding else []
    if len(parts) == 1:
        parts *= len(leaves)
    if len(parts) != len(leaves):
        return [False] * len(leaves)
    found = []
    for part in parts:
        try:
            tiles = shardings.read_sharding(part, partitions).tiles
        except hn.NotationError:
            tiles = None
        found.append(tiles is not None and set(tiles) == {0})
    return found


def tree(shape: hm.Shape, leaves: list[int], states: hs.States) -> Any:
    """Give the value of a shape whose arrays have these states, depth first."""
    if shape.elements is None:
        return leaves[0]
    iterator = iter(leaves)

    def build(part: hm.Shape, depth: int) -> Any:
        if part.elements is None:
            return next(iterator)
        return tuple([build(e, depth + 1) for e in part.elements])

    if _depth(shape) > 100:  # no real parameter nests so deep
        return functools.reduce(states.refine, leaves, 0)
    return build(shape, 0)


def _depth(shape: hm.Shape) -> int:
    deepest = 0
    stack = [(shape, 0)]
    while stack:
        part, depth = stack.pop()
        deepest = max(deepest, depth)
        stack.extend((e, depth + 1) for e in part.elements or ())
    return deepest
