"""Find out how far XLA has compiled a module; before partitioning, its collectives are missing.

Before XLA's SPMD partitioner, instructions and custom calls have shardings, and the collectives
that these shardings need are missing. After it, only parameters keep their shardings (JAX 0.4.28
to 0.12, on CPU, TPU and GPU).
"""

from __future__ import annotations

import collections

from shardrules import errors
from shardrules.hlo.reader import module as hm

# Custom calls that JAX and Shardy add for the partitioner.
_TARGETS = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "xla.sdy.")
# Instructions that only XLA's passes after partitioning make; JAX lowers to none of them.
_LATE = frozenset("fusion bitcast copy copy-start async-start".split())
# Instructions whose shardings say where they run, not how a value is cut.
_PLACED = frozenset("parameter infeed outfeed send recv send-done recv-done".split())
_COLLECTIVE = ("all-", "reduce-scatter", "collective-", "ragged-all-to-all", "partition-id")

# Opcodes that only XLA's later passes make, which fuse, assign layouts and start operations early.
_COMPILED = frozenset("fusion bitcast".split())
# XLA fuses two of these operations on arrays if only the second takes the first one's result.
_FUSED = frozenset(
    "add subtract multiply divide maximum minimum negate abs exponential log power rsqrt sqrt tanh "
    "convert select compare".split()
)
_PRODUCERS = _FUSED | {"broadcast"}


def is_compiled(module: hm.Module) -> bool:
    """Return False if the text shows that XLA's passes have not run to the end, else True."""
    # XLA schedules last, but up to JAX 0.4.28 it does not schedule for CPU. A text from there may
    # be too small to show the work of any pass; such a text counts as compiled.
    if module.header.get("is_scheduled") == "true":
        return True
    early = False
    for computation in module.computations.values():
        instructions, taken = computation.instructions, collections.Counter[int]()
        for i in instructions:
            if i.opcode in _COMPILED or i.opcode.endswith("-start"):
                return True
            taken.update(i.operands)
        if early:
            continue
        # Two things show that passes have not run yet: a reshape, and an operation that XLA would
        # have fused into its only user.
        alone = {
            n for n, i in enumerate(instructions) if taken[n] == 1 and _is_fused(i, _PRODUCERS)
        }
        early = any(
            i.opcode == "reshape" or (_is_fused(i) and not alone.isdisjoint(i.operands))
            for i in instructions
        )
    return not early


def _is_fused(instruction: hm.Instruction, opcodes: frozenset[str] = _FUSED) -> bool:
    return instruction.opcode in opcodes and bool(instruction.shape.dimensions)


def check(module: hm.Module) -> None:
    """Raise HloError for a module that is not partitioned, or may not be."""
    early = _unpartitioned(module)
    if early is not None:
        raise errors.HloError(
            f"module {module.name!r} is not partitioned yet, or may not be "
            f"({early}), so it lacks the collectives that it will run. Pass "
            "f.lower(...).compile(), its as_text(), or the file of --xla_dump_to that ends in "
            "after_optimizations.txt.",
            module=module.name,
        )


def _unpartitioned(module: hm.Module) -> str | None:
    """Return why a module is not partitioned, or may not be; None if it is."""
    if module.header.get("is_scheduled") == "true" or module.num_partitions == 1:
        return None  # XLA schedules last
    sharded = module.num_partitions is not None
    late = False
    for computation in module.computations.values():
        for i in computation.instructions:
            if i.opcode == "custom-call":
                target = (i.attribute("custom_call_target") or "").strip('"')
                if target in _TARGETS[:3] or target.startswith(_TARGETS[3]):
                    return f"the call of {target!r}, {i.name!r}, is for the partitioner"
            late = late or i.opcode in _LATE or i.opcode.startswith(_COLLECTIVE)
            if "sharding" in i.text[i.attributes_start : i.end]:
                value = i.attribute("sharding")
                if value and i.opcode not in _PLACED and i.opcode != "custom-call":
                    return f"{i.opcode} {i.name!r} has a sharding, {value[:60]}"
                sharded = sharded or "devices" in (value or "") or "mesh[" in (value or "")
    if sharded and not late:
        return (
            "it has no collective, and no trace of XLA's passes after the partitioner, such as a "
            "schedule or a fusion"
        )
    return None
