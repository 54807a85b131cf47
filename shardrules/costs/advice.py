"""Advise the one change that removes a finding on a collective, or lets shardrules judge it.

The change computes the same values: for each kind of collective, the advice says which part of the
result a device can compute from its own operand.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection

from shardrules import hlo
from shardrules.arguments import checked
from shardrules.costs import walk
from shardrules.hlo.proof import phases
from shardrules.registry.suggestions import pattern

# Reductions that return the value itself if all values are equal.
_IDEMPOTENT = ("maximum", "minimum", "and", "or")
# The op_name of a gradient that is taken inside the body of a shard_map or a pmap.
_OWN_GRADIENT = re.compile(r"(?:(?!transpose\().)*?(?:shard_map|pmap\b[^/]*)/.*transpose\(.*")
# With the check on: the transpose of a cast, or a sum in a bwd.
_CAST = re.compile(r".*transpose\(jvp\([^/]*\)\)/psum_invariant")
UNNAMED = "SCRIPT` (SCRIPT: the one that compiles this program)"  # a script, behind a command
_OUTSIDE = (
    "take the gradient outside of the shard_map: jax.grad of the shard_map of the loss does that "
    "division already. The body takes gradients itself, so switching the check on changes them: "
    "the gradients of whole arrays are then already summed over their axes, and a pmean of them "
    f"leaves the sum as it is; `shardrules migrate {UNNAMED} says what to change"
)


@checked
def advice(verdict: hlo.Verdict, proven: Collection[str] = ()) -> str:
    """Return the one change that removes a finding, or lets shardrules judge the collective.

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
        if in_own_gradient(verdict):
            return _OUTSIDE
        if is_defensive(verdict):
            return migrate("the shard_map")
        said = _instead(verdict) if verdict.verdict == "redundant" else _narrowed(verdict)
        return said + _of_cast(verdict)
    return _to_be_judged(verdict, proven) if verdict.verdict == "unproven" else ""


def _of_cast(verdict: hlo.Verdict) -> str:
    """Return where a sum comes from if it may be a cast's transpose; empty for other sums."""
    if not _CAST.fullmatch(verdict.collective.op_name):
        return ""
    over = " and ".join(_equal_axes(verdict)) or "the devices"
    return (
        "; if that line has no psum, this is the transpose of a cast: a value that is the same "
        f"over {over} is combined with one that differs. Combine them after the psum or pmean "
        "of the one that differs, and nothing is cast"
    )


def named(advice: str, script: str) -> str:
    """Return advice with the script as it was typed; if it isn't known, keep the placeholder."""
    return advice.replace(UNNAMED, f"{script}`") if script else advice


def migrate(shard_maps: str) -> str:
    """Return advice on how to switch on the checks of some shard_maps."""
    return (
        f"run `shardrules migrate --diff on.patch {UNNAMED}: it switches on the check of "
        f"{shard_maps}, so that the backward pass reduces over just the axes that it needs, "
        "compares what the programs return, and writes the patch"
    )


def is_defensive(verdict: hlo.Verdict) -> bool:
    """Return whether a backward pass sums equal values only because shard_map's check is off.

    With the check on, such a sum disappears. Another sum of fewer bytes may be needed in its place,
    which the text can't show.
    """
    collective, last = verdict.collective, operation(verdict.collective)
    if verdict.verdict not in ("redundant", "overwide") or verdict.divergent:
        return False
    if last and not phases.is_written(collective.op_name):
        return False
    backward = collective.phase not in ("forward", "recompute")
    # With shard_map's check on, JAX gives a sum another name.
    return collective.kind == "all-reduce" and backward and last in ("psum", "shard_map")


def in_own_gradient(verdict: hlo.Verdict) -> bool:
    """Return whether a sum is of equal values, in a gradient taken inside an unchecked body."""
    name = verdict.collective.op_name
    return is_defensive(verdict) and _OWN_GRADIENT.fullmatch(name) is not None


def of_averages(verdict: hlo.Verdict, judgement: hlo.Judgement) -> str:
    """Return a warning about averaged gradients that a body with the check on takes itself."""
    collective = verdict.collective
    averages = collective.reduction == "add" and collective.phase == "forward"
    if verdict.verdict != "redundant" or not averages:
        return ""
    names = (
        v.collective.op_name for v in judgement.needed if v.collective.groups == collective.groups
    )
    if not any(_OWN_GRADIENT.fullmatch(name) for name in names):
        return ""
    # This stands before the advice to drop the collective, because the gradients are wrong.
    return (
        "if it averages gradients that the body takes itself, they come out "
        f"{collective.group_size} times too large: with the check on they are already the sum "
        "over the devices, and a mean leaves it as it is; divide them by "
        f"{collective.group_size} instead. Otherwise "
    )


def of_transposes(verdict: hlo.Verdict, judgement: hlo.Judgement) -> str:
    """Return a warning about a reduction whose transpose is needed, if a body differentiates it."""
    collective = verdict.collective
    if collective.kind != "all-reduce" or collective.phase != "forward" or not collective.source:
        return ""
    if verdict.verdict not in ("redundant", "overwide"):
        return ""
    for other in judgement.verdicts:
        backward = other.collective
        if other.verdict not in ("needed", "overwide"):
            continue
        is_same = (backward.source, backward.axes) == (collective.source, collective.axes)
        if is_same and backward.kind == "all-reduce" and _OWN_GRADIENT.fullmatch(backward.op_name):
            return (
                "keep it if the body takes a gradient through it: its transpose, the backward "
                "all-reduce of the same line, sums cotangents that differ, and would go with it. "
                "Otherwise "
            )
    return ""


class Multiplied:
    """Finds the factors by which a program's gradients may be too large.

    Without the check, the transpose of a psum is a psum. A body that takes gradients itself then
    gets the gradient of the sum of all devices' losses. If n devices compute the same loss, this is
    n times the loss's gradient. For an array that each device holds whole, a pmean over the devices
    gives the right gradient.
    """

    def __init__(self, judgement: hlo.Judgement):
        self._judgement = judgement
        self._returned: dict[tuple[str, ...], set[tuple[str, str]]] = {}

    def times(self, verdict: hlo.Verdict) -> int:
        """Return the factor by which a gradient may be too large; 1 if it isn't."""
        # The factor matters only if the gradient reaches the results without a sum over the axes.
        axes = tuple(_equal_axes(verdict))
        if not axes or not in_own_gradient(verdict) or not self._is_transpose(verdict.collective):
            return 1
        if axes not in self._returned:
            self._returned[axes] = self._apart_from(axes)
        place = verdict.collective.computation, verdict.collective.name
        return verdict.copies if place in self._returned[axes] else 1

    def _is_transpose(self, collective: hlo.Collective) -> bool:
        """Return whether the forward pass has a sum on the same line (a bwd has another line)."""
        return collective.source is not None and any(
            other.collective.source == collective.source
            and other.collective.axes == collective.axes
            and other.collective.phase in ("forward", "recompute")
            for other in self._judgement.verdicts
        )

    def _apart_from(self, axes: tuple[str, ...]) -> set[tuple[str, str]]:
        """Return the instructions that reach the results without a sum over these axes."""
        module = self._judgement.module
        sums = {
            (verdict.collective.computation, verdict.collective.name)
            for verdict in self._judgement.needed
            if verdict.collective.reduction == "add"
            and set(axes) <= set(verdict.collective.axes or ())
        }

        def before(place: tuple[str, int]) -> list[tuple[str, int]]:
            name, position = place
            instruction = module.computations[name].instructions[position]
            if (name, instruction.name) in sums:
                return []
            called = (module.computations[call] for call in instruction.calls)
            return [*((name, n) for n in instruction.operands), *((c.name, c.root) for c in called)]

        reached = walk.reached([(module.entry.name, module.entry.root)], before)
        return {(name, module.computations[name].instructions[n].name) for name, n in reached}


def too_large(verdict: hlo.Verdict, times: int) -> str:
    """Return a warning that a sum may multiply gradients, and what to type."""
    axes = _equal_axes(verdict)
    over = repr(axes[0] if len(axes) == 1 else tuple(axes))
    return (
        f"over {' and '.join(axes)}, this sums {times} equal values, as the transpose of a "
        f"psum does with the check off: the gradient of an array that is sharded over {over} "
        f"is {times} times that of the loss, unless it or the loss is divided by {times}. "
        f"Divide that gradient, g / {times}, and average the gradient of a whole array, "
        f"jax.lax.pmean(g, {over}); or {_OUTSIDE}"
    )


def _for_partitioner(verdict: hlo.Verdict) -> str:
    """Return advice on a collective that XLA's partitioner made."""
    collective = verdict.collective
    equal = ", ".join(_equal_axes(verdict))
    return (
        f"XLA's partitioner made it for {operation(collective)}, of data that is the same on "
        f"the devices{f' over {equal}' if equal else ''}: give what that reads or makes the "
        "layout of what uses it, x = jax.lax.with_sharding_constraint(x, "
        "jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(...))). For a small array "
        f"(a scale, a mask) a spec without {equal or 'axes'}; for an activation that of the batch, "
        "since a replicated one costs more than this does"
    )


def _instead(verdict: hlo.Verdict) -> str:
    """Return advice on what each device computes in place of a redundant collective."""
    collective, count = verdict.collective, verdict.collective.group_size
    own = "drop it: each device can compute the result from its own operand"
    same = "drop it: each device's result is its own operand"
    if collective.kind in ("collective-permute", "collective-broadcast"):
        if collective.in_place:
            return (
                "replace it by jax.lax.dynamic_update_slice with each device's own slice, on "
                "the devices that receive one"
            )
        return (
            same
            if collective.connections.reaches_all
            else "replace it by jnp.where(reached, x, 0), with reached true on the devices "
            "that receive data: they already hold it, and the others get zeros"
        )
    if collective.kind == "all-gather":
        return f"{own}, concatenated {count} times along dimension {collective.dimension}"
    if collective.kind == "all-to-all":
        return f"{own}: its own piece of it, {count} times in a row"
    if collective.kind == "reduce-scatter":
        return f"{own}: its own piece of it{_factor(collective.reduction, count)}"
    if collective.reduction in _IDEMPOTENT or count == 1:
        return same
    if collective.reduction == "add":
        return (
            f"{own} (the sum of {count} equal values is {count} times that value, and their "
            "mean is that value)"
        )
    return f"{own}: reduce {count} copies of it"


def _narrowed(verdict: hlo.Verdict) -> str:
    """Return how to run an overwide collective over just the devices that differ."""
    collective, copies = verdict.collective, verdict.copies
    equal = " and ".join(_equal_axes(verdict))
    along = f"the devices along {equal}" if equal else f"{copies} devices of each group"
    over = f"over {', '.join(verdict.needed_axes)} only" if verdict.needed_axes else ""
    over = over or f"over one device of each {copies} that hold the same"
    if collective.kind == "all-gather":
        return (
            f"run it {over}; where the whole result is needed, repeat each shard on the device "
            f"({along} hold the same)"
        )
    factor = _factor(collective.reduction, copies)
    if collective.kind == "reduce-scatter":
        place = f"the same place along {equal}" if equal else "the same place among the equal ones"
        return (
            "on each device, keep the pieces of the operand that belong to the devices at "
            f"{place}, and run it on those {over}{factor} ({along} hold the same)"
        )
    return f"run it {over}{factor} ({along} hold the same)"


def _factor(reduction: str, count: int) -> str:
    """Return advice on what replaces a reduction of ``count`` equal values."""
    if reduction in _IDEMPOTENT or count == 1:
        return ""
    if reduction == "add":
        return f"; for a sum, not for a mean, multiply it by {count}"
    return f"; then reduce {count} copies of it"


def _give_a_rule(call: hlo.Blocker) -> str:
    """Return how to give a rule to a custom call that has no kernel's name."""
    rule = rule_flag(call)
    here = f"; for this text, pass {rule} to the command if that is true of the kernel"
    return (
        "trace the program after shardrules.install(), with a rule for the kernel: the "
        f"compiled text of its custom call then says what it does{here if rule else ''}"
    )


def rule_flag(call: hlo.Blocker) -> str:
    """Return the flag that declares that a call doesn't communicate; empty if it has no name."""
    name = call.where.partition(" (")[0]
    return shlex.quote(f"--rule={name}=no_communication") if name else ""


def _to_be_judged(verdict: hlo.Verdict, proven: Collection[str]) -> str:
    """Return advice on what lets shardrules judge an unproven collective."""
    # Name one thing to do: first a rule for a kernel, then for a call without a name, then the
    # facts that the text lacks.
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
        return _give_a_rule(calls[0])
    if any("no sharding" in b.what for b in verdict.blockers):
        return (
            "say how its parameters are sharded: pass the flags that "
            "print(shardrules.testing.verify_flags(compiled)) prints in the program, or "
            "--parameters FILE, the *before_optimizations.txt of the same dump; in Python, judge "
            "the jax.stages.Compiled instead of its text"
        )
    if any("slices=" in b.what for b in verdict.blockers):
        return (
            "give the jax.stages.Compiled, which says in which order the mesh takes the "
            "slices; for its text, pass --slices 2 if it takes one after the other"
        )
    return ""


def _equal_axes(verdict: hlo.Verdict) -> list[str]:
    """Return the collective's axes that the verdict shows to be unnecessary."""
    return [a for a in verdict.collective.axes or () if a not in (verdict.needed_axes or ())]


def operation(collective: hlo.Collective) -> str:
    """Return the JAX operation that made a collective, the end of its op_name."""
    return phases.operation(collective.op_name)
