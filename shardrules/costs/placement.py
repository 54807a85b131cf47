"""Constants that a program carries to every device, and outputs that it gathers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from shardrules import hlo
from shardrules.costs import walk

__all__ = ["Constant", "Gathered", "constants", "gathered", "is_pmap"]

_PMAP_AXIS = "_internal_pmap_axis_name"


class Constant(NamedTuple):
    """An array that is written into the program.

    Attributes:
      name: of its instruction.
      shape: as HLO prints it.
      bytes: on each device.
      device_count: devices that hold it.
      source: the source line of what uses it first, or JAX's name for that.
    """

    name: str
    shape: str
    bytes: int
    device_count: int
    source: str


class Gathered(NamedTuple):
    """An output that is gathered from its shards before it is returned.

    Attributes:
      output: its number among the outputs.
      shape: on each device, as returned.
      bytes_before, bytes_after: on each device.
      source: the source line of the collective, or JAX's name for it.
    """

    output: int
    shape: str
    bytes_before: int
    bytes_after: int
    source: str


def constants(module: hlo.Module, min_bytes: int = 1) -> list[Constant]:
    """List the arrays that are written into a program, the largest first.

    An array of one repeated value (``jnp.zeros``) is made on the device, and is none.

    Args:
      module: the compiled module.
      min_bytes: of the smallest that is listed.
    """
    devices = (module.num_partitions or 1) * (module.replica_count or 1)
    found = []
    for computation in module.computations.values():
        for position, instruction in enumerate(computation.instructions):
            size = instruction.shape.bytes if instruction.opcode == "constant" else 0
            if size and size >= min_bytes:
                source = _used_at(module, computation, position) or instruction.name
                found.append(
                    Constant(instruction.name, str(instruction.shape), size, devices, source)
                )
    return sorted(found, key=lambda c: -c.bytes)


def _used_at(module: hlo.Module, computation: hlo.Computation, position: int) -> str:
    """Give the source line of what reads a value first, in a fusion too; empty if none has one.

    A constant's own line is that of the call that traced the program.
    """
    users = computation.users()
    reached = [position]
    for reader in reached:
        reached += [user for user in users[reader] if user not in reached]
    callers = [
        instruction
        for caller in module.computations.values()
        for instruction in caller.instructions
        if computation.name in instruction.calls
    ]
    readers = [computation.instructions[n] for n in reached[1:]]
    return walk.source(module, [*readers, *callers])


def is_pmap(module: hlo.Module, axes: Iterable[str] = ()) -> bool:
    """Tell whether a ``jax.pmap`` stands in a program.

    To JAX 0.7 its operations are named after it. From 0.8 on it is a shard_map with the check off,
    over an axis that has a name of its own unless it was given one: then nothing tells it.

    Args:
      module: the compiled module.
      axes: the names of its mesh axes, if they are known.
    """
    return _PMAP_AXIS in axes or re.search(rf"xla_pmap|{_PMAP_AXIS}", module.text) is not None


def gathered(module: hlo.Module) -> list[Gathered]:
    """List the outputs that a program gathers from shards, over whichever devices.

    By an all-gather, or by an all-reduce of shards that lie in zeros, which is how a ``jax.pmap``
    under a jit returned its result to JAX 0.7.
    """
    entry = module.entry
    root = entry.instructions[entry.root]
    outputs = root.operands if root.opcode == "tuple" else (entry.root,)
    found = []
    for number, position in enumerate(outputs):
        collective = _collective(entry, position)
        if collective is None:
            continue
        place = walk.Place(entry, collective, 0, 1)
        instruction = entry.instructions[collective]
        operand = entry.instructions[instruction.operands[0]].shape
        after = entry.instructions[position].shape
        before = operand.bytes
        name = module.metadata(instruction).op_name
        if instruction.opcode.startswith("all-reduce"):
            if not re.search(r"(^|/)(xla_)?pmap", name):
                continue
            before = after.bytes // max(module.replica_count or 1, 1)
        found.append(Gathered(number, str(after), before, after.bytes, walk.where(module, place)))
    return found


def _collective(computation: hlo.Computation, position: int) -> int | None:
    """Follow an output to the collective that made it, through what moves no element."""
    while True:
        instruction = computation.instructions[position]
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in ("all-gather", "all-reduce"):
            return position
        if not instruction.operands or opcode not in (
            "copy",
            "copy-done",
            "bitcast",
            "reshape",
            "transpose",
            "convert",
            "get-tuple-element",
            "all-gather-done",
            "all-reduce-done",
        ):
            return None
        position = instruction.operands[0]
