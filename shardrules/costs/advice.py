"""The one change that removes a finding on a collective, or that would let it be judged.

What it says computes the same values: for each kind of collective, what of its result a device can
compute from its own operand.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection

from shardrules import hlo
from shardrules.arguments import checked
from shardrules.hlo.proof import phases
from shardrules.registry.suggestions import pattern

# Of equal values these give the value.
_IDEMPOTENT = ("maximum", "minimum", "and", "or")


@checked
def advice(verdict: hlo.Verdict, proven: Collection[str] = ()) -> str:
    """Say the one change that removes a finding, or that would let it be judged.

    ``proven`` names kernels whose own jaxprs show that they don't communicate.
    """
    collective = verdict.collective
    if verdict.divergent:
        return (
            "make the predicate equal within each group (jax.lax.psum or pmax it over the "
            "axes), or move the collective out of the branch or loop"
        )
    if verdict.verdict in ("redundant", "overwide"):
        if operation(collective) and not phases.is_written(collective.op_name):
            return _for_partitioner(verdict)
        if is_defensive(verdict):
            return migrate("the shard_map")
        return _instead(verdict) if verdict.verdict == "redundant" else _narrowed(verdict)
    return _to_be_judged(verdict, proven) if verdict.verdict == "unproven" else ""


def migrate(shard_maps: str) -> str:
    """Say how the checks of some shard_maps are switched on."""
    return (
        f"run `shardrules migrate --diff on.patch SCRIPT`: it switches on the check of {shard_maps}"
        ", so that the backward pass reduces over just the axes that it needs, compares what the "
        "programs return, and writes the patch"
    )


def is_defensive(verdict: hlo.Verdict) -> bool:
    """Whether it is what a backward pass sums for nothing because shard_map's check is off.

    With the check on, such a sum goes, and another one may be needed in its place: of fewer bytes,
    which the text can't tell.
    """
    collective, last = verdict.collective, operation(verdict.collective)
    if verdict.verdict not in ("redundant", "overwide") or verdict.divergent:
        return False
    if last and not phases.is_written(collective.op_name):
        return False
    backward = collective.phase not in ("forward", "recompute")
    # With shard_map's check on, a sum has another name.
    return collective.kind == "all-reduce" and backward and last in ("psum", "shard_map")


def _for_partitioner(verdict: hlo.Verdict) -> str:
    collective = verdict.collective
    equal = ", ".join(_equal_axes(verdict))
    return (
        f"XLA's partitioner made it for {operation(collective)}, of data that is the same on "
        f"the devices{f' over {equal}' if equal else ''}: replicate what that reads or makes, "
        "x = jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, "
        f"jax.sharding.PartitionSpec(...))) with a spec without {equal or 'axes'}, "
        "or give both the layout of what uses it"
    )


def _instead(verdict: hlo.Verdict) -> str:
    """Say what each device computes from its own operand in place of a redundant collective."""
    collective, count = verdict.collective, verdict.collective.group_size
    own = "drop it: each device can compute the result from its own operand"
    same = "drop it: each device's result is its own operand"
    if collective.kind in ("collective-permute", "collective-broadcast"):
        if collective.in_place:
            return (
                "replace it by jax.lax.dynamic_update_slice with each device's own slice, on the "
                "devices to which it brings one"
            )
        return (
            same
            if collective.connections.reaches_all
            else "replace it by jnp.where(reached, x, 0), with reached true on the devices to "
            "which it brings data: they get what they hold already, and the others get zeros"
        )
    if collective.kind == "all-gather":
        return f"{own}, put together {count} times along dimension {collective.dimension}"
    if collective.kind == "all-to-all":
        return f"{own}: the piece that is its own of it, {count} times in a row"
    if collective.kind == "reduce-scatter":
        return f"{own}: the piece that is its own of it{_factor(collective.reduction, count)}"
    if collective.reduction in _IDEMPOTENT or count == 1:
        return same
    if collective.reduction == "add":
        return f"{own} (a sum of {count} equal ones is {count} times one)"
    return f"{own}: reduce {count} copies of it"


def _narrowed(verdict: hlo.Verdict) -> str:
    """Say how to run an overwide collective over just the devices that differ."""
    collective, copies = verdict.collective, verdict.copies
    equal = " and ".join(_equal_axes(verdict))
    along = f"the devices along {equal}" if equal else f"{copies} devices of each group"
    over = f"over {', '.join(verdict.needed_axes)} only" if verdict.needed_axes else ""
    over = over or f"over one device of each {copies} that hold the same"
    if collective.kind == "all-gather":
        return (
            f"run it {over}, and where the whole result is needed repeat each shard on the device "
            f"({along} hold the same)"
        )
    factor = _factor(collective.reduction, copies)
    if collective.kind == "reduce-scatter":
        place = f"its own place along {equal}" if equal else "its own place among the equal ones"
        return (
            f"of the operand, keep on each device the pieces of the devices at {place}, and run "
            f"that {over}{factor} ({along} hold the same)"
        )
    return f"run it {over}{factor} ({along} hold the same)"


def _factor(reduction: str, count: int) -> str:
    """Say what is left of a reduction of so many equal values."""
    if reduction in _IDEMPOTENT or count == 1:
        return ""
    if reduction == "add":
        return f"; for a sum, not for a mean, multiply it by {count}"
    return f"; then reduce {count} copies of it"


def _to_be_judged(verdict: hlo.Verdict, proven: Collection[str]) -> str:
    """Say what would let an unproven collective be judged."""
    kernels = list(dict.fromkeys(b.kernel for b in verdict.blockers if b.kernel))
    names = [kernel for kernel in kernels if kernel not in proven]
    if kernels and not names:
        ends = ("s", "", "them") if len(kernels) > 1 else ("", "s", "it")
        return (
            f"the kernel{ends[0]} {', '.join(map(repr, kernels))} need{ends[1]} no line: "
            f"shardrules.install() proves {ends[2]}; see the verdict with shardrules run --install"
        )
    if names:
        sizes = pattern(names[0])
        return (
            "if the kernel reads no other device and no device id, declare that: "
            "@shardrules.no_communication above its def, or "
            f"shardrules.register({names[0]!r}, shardrules.no_communication)"
            + (f", or {sizes!r} for all block sizes" if sizes else "")
        )
    calls = [b for b in verdict.blockers if b.target]
    if calls:
        name = calls[0].where.partition(" (")[0]
        rule = shlex.quote(f"--rule={name}=no_communication")
        return (
            "trace the program after shardrules.install(), with a rule for the kernel: "
            "its custom call then says in the compiled text what it does"
            + (f"; for this text the commands take {rule}, if that is so" if name else "")
        )
    if any("no sharding" in b.what for b in verdict.blockers):
        return (
            "give the jax.stages.Compiled instead of its text, or tell how its parameters are "
            "sharded: --mesh data=4,model=2 --in \"P('data'); P()\", as testing.verify_flags "
            "prints it of the Compiled, or --parameters FILE, the *before_optimizations.txt of "
            "the same dump"
        )
    if any("slices=" in b.what for b in verdict.blockers):
        return (
            "give the jax.stages.Compiled, which says in which order the mesh takes the slices; "
            "for its text, --slices 2 if it takes one after the other"
        )
    return ""


def _equal_axes(verdict: hlo.Verdict) -> list[str]:
    return [a for a in verdict.collective.axes or () if a not in (verdict.needed_axes or ())]


def operation(collective: hlo.Collective) -> str:
    """Return the JAX operation that made a collective, the end of its op_name."""
    return phases.operation(collective.op_name)
