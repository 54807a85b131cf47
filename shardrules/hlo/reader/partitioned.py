"""Tells whether a module is partitioned: only then do its collectives stand in its text.

What XLA's SPMD partitioner has not seen holds the shardings of what is to be sharded, on
instructions or in custom calls, and none of the collectives that they will cost. After it only
parameters keep theirs (JAX 0.4.28 to 0.12, on CPU, TPU and GPU).
"""

from __future__ import annotations

from shardrules import errors
from shardrules.hlo.reader import module as hm

# What JAX and Shardy put around what the partitioner is to make.
_TARGETS = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "xla.sdy.")
# Instructions that only XLA's optimizations make, after partitioning; JAX lowers to none of them.
_LATE = frozenset("fusion bitcast copy copy-start async-start".split())
# Instructions whose shardings say where they run, not how a value is cut.
_PLACED = frozenset("parameter infeed outfeed send recv send-done recv-done".split())
_COLLECTIVE = ("all-", "reduce-scatter", "collective-", "ragged-all-to-all", "partition-id")


def check(module: hm.Module) -> None:
    """Raise HloError for a module that is still to be partitioned, or may be."""
    early = _unpartitioned(module)
    if early is not None:
        raise errors.HloError(
            f"module {module.name!r} is not partitioned yet, or can't be told from one that isn't "
            f"({early}): the collectives that it will run are not in it. Pass what "
            "f.lower(...).compile() gives, or its as_text(), or of the files of --xla_dump_to the "
            "one that ends in after_optimizations.txt.",
            module=module.name,
        )


def _unpartitioned(module: hm.Module) -> str | None:
    """Say why a module is one that is still to be partitioned, or may be; None if it is not."""
    if module.header.get("is_scheduled") == "true" or module.num_partitions == 1:
        return None  # XLA schedules last
    sharded = module.num_partitions is not None
    late = False
    for computation in module.computations.values():
        for i in computation.instructions:
            if i.opcode == "custom-call":
                target = (i.attribute("custom_call_target") or "").strip('"')
                if target in _TARGETS[:3] or target.startswith(_TARGETS[3]):
                    return f"the call of {target!r}, {i.name!r}, stands for what it will make"
            late = late or i.opcode in _LATE or i.opcode.startswith(_COLLECTIVE)
            if "sharding" in i.text[i.attributes_start : i.end]:
                value = i.attribute("sharding")
                if value and i.opcode not in _PLACED and i.opcode != "custom-call":
                    return f"{i.opcode} {i.name!r} has a sharding, {value[:60]}"
                sharded = sharded or "devices" in (value or "") or "mesh[" in (value or "")
    if sharded and not late:
        return (
            "it holds no collective, and nothing that XLA's passes after the partitioner leave, "
            "such as a schedule or a fusion"
        )
    return None
