"""Tells whether XLA has partitioned a module: only then does the text hold its collectives.

Before XLA's SPMD partitioner, instructions and custom calls have shardings, and the collectives
that these will cost are missing. After it, only parameters keep their shardings (JAX 0.4.28 to
0.12, on CPU, TPU and GPU).
"""

from __future__ import annotations

from shardrules import errors
from shardrules.hlo.reader import module as hm

# Custom calls that JAX and Shardy add for the partitioner.
_TARGETS = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "xla.sdy.")
# Instructions that only XLA's passes after partitioning make; JAX lowers to none of them.
_LATE = frozenset("fusion bitcast copy copy-start async-start".split())
# Instructions whose shardings say where they run, not how a value is cut.
_PLACED = frozenset("parameter infeed outfeed send recv send-done recv-done".split())
_COLLECTIVE = ("all-", "reduce-scatter", "collective-", "ragged-all-to-all", "partition-id")


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
    """Say why a module is not partitioned, or may not be; None if it is."""
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
