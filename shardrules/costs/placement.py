"""Find the constants in a program that go to every device, and the outputs that it gathers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from shardrules import hlo
from shardrules.costs import walk
from shardrules.hlo.reader.module import behind

_PMAP_AXIS = "_internal_pmap_axis_name"


class Constant(NamedTuple):
    """An array that is written into the program."""

    name: str  # the name of its instruction
    shape: str  # as HLO prints it
    bytes: int  # on each device
    device_count: int  # the number of devices that hold it
    source: str  # the source line of its first user, or JAX's name for the user


class Gathered(NamedTuple):
    """An output that is gathered from its shards before it is returned."""

    output: int  # its number among the outputs
    shape: str  # on each device, as returned
    # bytes_before, bytes_after: on each device
    bytes_before: int
    bytes_after: int
    source: str  # the source line of the collective, or JAX's name for it


def constants(module: hlo.Module, min_bytes: int = 1) -> list[Constant]:
    """Return the arrays of ``min_bytes`` or more that are written into a program, largest first."""
    # An array of one repeated value (jnp.zeros) is made on the device, so its constant is small.
    devices = (module.num_partitions or 1) * (module.replica_count or 1)
    listed = []
    for computation in module.computations.values():
        for position, (name, opcode, shape, *_) in enumerate(computation.instructions):
            if opcode == "constant" and shape.bytes >= max(min_bytes, 1):
                source = _used_at(module, computation, position) or name
                listed.append(Constant(name, str(shape), shape.bytes, devices, source))
    return sorted(listed, key=lambda c: -c.bytes)


def _used_at(module: hlo.Module, computation: hlo.Computation, position: int) -> str:
    """Return the source line of the first reader that has one, also in a fusion, or ""."""
    # The constant's own line is of no use: it is the call that traced the program.
    users = computation.users()
    reached = [position]
    for reader in reached:
        reached += [user for user in users[reader] if user not in reached]
    readers = [computation.instructions[n] for n in reached[1:]]
    callers = [instruction for _, instruction in walk.callers(module, computation)]
    return walk.source(module, [*readers, *callers])


def is_pmap(module: hlo.Module, axes: Iterable[str] = ()) -> bool:
    """Return whether a program, or a name of its mesh axes, shows a ``jax.pmap``."""
    # Up to JAX 0.7, the op_names of a pmap's operations contain its name. From 0.8 on, a pmap is a
    # shard_map with the check off, over an axis with a name of JAX's own. If the user names the
    # axis, the text doesn't show the pmap.
    return _PMAP_AXIS in axes or re.search(rf"xla_pmap|{_PMAP_AXIS}", module.text) is not None


def gathered(module: hlo.Module) -> list[Gathered]:
    """Return the outputs that a program gathers from shards, over any devices."""
    # Two collectives gather an output: an all-gather, or an all-reduce of shards that are padded
    # with zeros. Up to JAX 0.7, a jax.pmap under a jit returned its result by such an all-reduce.
    entry = module.entry
    root = entry.instructions[entry.root]
    outputs = root.operands if root.opcode == "tuple" else (entry.root,)
    outputs_gathered = []
    for number, position in enumerate(outputs):
        after = entry.instructions[position].shape
        made = behind(entry, position, walk.PASS_ON | {"all-gather-done"})
        if made.opcode.startswith("all-gather"):
            before = entry.instructions[made.operands[0]].shape.bytes
        elif made.opcode.startswith("all-reduce"):
            if not re.search(r"(^|/)(xla_)?pmap", module.metadata(made).op_name):
                continue
            before = after.bytes // max(module.replica_count or 1, 1)
        else:
            continue
        operands = [entry.instructions[operand] for operand in made.operands]
        source = walk.source(module, [made, *operands]) or made.name
        outputs_gathered.append(Gathered(number, str(after), before, after.bytes, source))
    return outputs_gathered
