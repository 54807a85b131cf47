"""Find the value that lacks a reduction, if an output that is called replicated differs.

An output that a step updates (a weight, a momentum) differs because the step did not reduce a
gradient that goes into it. The gradient is the value to reduce: a sum of the weight itself would
add up all devices' copies of the weight.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

from shardrules import hlo
from shardrules.costs import outputs, walk
from shardrules.costs.advice import UNNAMED
from shardrules.errors import few
from shardrules.hlo.proof import phases
from shardrules.hlo.reader import flow
from shardrules.hlo.reader.flow import Node

_PARAMETER = re.compile(r"parameter (\d{1,9})\b")
# Kinds after which all devices of a group hold the same value.
_EQUALIZE = ("all-reduce", "all-gather", "collective-broadcast")
# Without the check, the transpose of a psum is a psum. If a loss contains a psum, its gradients are
# too large by the number of devices; a pmean divides by this number.
_WHICH = (
    "jax.lax.pmean; jax.lax.psum only if the differentiated loss is a sum over the device's "
    "own part, with no psum in it"
)
_LINES = 4  # the most source lines that advice names
_AS_IT_IS = ("bitcast", "copy", "reshape", "transpose", "convert", "get-tuple-element")
_OUTPUTS = 3  # the most outputs that one gradient goes into: the weight and two moments


def find(judgement: hlo.Judgement) -> list[outputs.Unequal]:
    """Return the outputs of ``outputs.find``, with the gradient named if it lacks a reduction."""
    broken = outputs.broken(judgement)
    search = None
    found = []
    for number, why, output in broken:
        if output.kind == "differs" and output.axes and _PARAMETER.match(why.cause):
            search = search or _GradientSearch(judgement)
            output = search.named(number, why.cause, output)
        found.append(output)
    return found


class _GradientSearch:
    """Follows outputs back to the gradients that they depend on."""

    def __init__(self, judgement: hlo.Judgement):
        self._module = judgement.module
        self._flat = flow.of(judgement.module, judgement.module.entry.name)
        self._axes = {
            verdict.collective.name: set(verdict.collective.axes or ())
            for verdict in judgement.verdicts
            if verdict.collective.kind in _EQUALIZE
        }
        # For each axis: the names of the forward pass's sums over it, and of their computations.
        self._forward: dict[str, set[str]] = {}
        for verdict in judgement.verdicts:
            collective = verdict.collective
            if collective.kind == "all-reduce" and collective.phase != "backward":
                for axis in collective.axes or ():
                    places = self._forward.setdefault(axis, set())
                    places.update([collective.name, f"in {collective.computation}"])
        self._depend: dict[tuple[int, tuple[str, ...]], set[Node]] = {}

    def named(self, number: int, cause: str, output: outputs.Unequal) -> outputs.Unequal:
        """Return the output; its advice names the gradients if all differences come from them."""
        match, axes = _PARAMETER.match(cause), output.axes or ()
        returned = self._flat.end.operands
        if match is None or number >= len(returned):
            return output
        gradients = self._gradients(returned[number], int(match[1]), axes)
        if not gradients:
            return output
        sources = {walk.source(self._module, [node.instruction]) for node in gradients}
        takers = {walk.source(self._module, [n.instruction]) for n in gradients.values() if n}
        what = outputs.Unreduced(
            axes,
            len(gradients),
            tuple(sorted(filter(None, sources))),
            tuple(sorted(filter(None, takers))),
            self._is_summed_before(gradients, axes),
        )
        noun = "gradients that go" if len(gradients) > 1 else "gradient that goes"
        return dataclasses.replace(
            output,
            missing=f"no reduction over {{{', '.join(axes)}}} of the {noun} into it",
            advice=advice(what),
            unreduced=what,
        )

    def _is_summed_before(self, gradients: Iterable[Node], axes: tuple[str, ...]) -> bool:
        """Return whether gradients depend on a sum of the forward pass over some of the axes."""
        # Search backwards from the gradients. If such a sum is in a computation that a loop, branch
        # or call runs, any of these may have run it.
        places: set[str] = set().union(*(self._forward.get(axis, set()) for axis in axes))
        inside = places - {f"in {self._module.entry.name}"}
        in_loops = any(place.startswith("in ") for place in inside)
        stack = list(gradients)
        seen = set(stack)
        while stack:
            node = stack.pop()
            if node.instruction.name in places:
                return True
            if in_loops and node.opcode in ("while", "conditional", "call"):
                return True
            for operand in node.operands:
                if operand not in seen:
                    seen.add(operand)
                    stack.append(operand)
        return False

    def _gradients(
        self, returned: Node, parameter: int, axes: tuple[str, ...]
    ) -> dict[Node, Node | None]:
        """Return the last value of the backward pass on each path, with the node that takes it.

        Return nothing if a value that differs reaches the output without a gradient.
        """
        # Follow the output back through the nodes that depend on the differing parameter. A path
        # ends at the first node of the backward pass, which is a gradient.
        depend = self._depending(parameter, axes)
        found: dict[Node, Node | None] = {}
        seen = {returned}
        stack: list[tuple[Node, Node | None]] = [(returned, None)]
        while stack:
            node, taker = stack.pop()
            if node not in depend:
                continue
            metadata = self._module.metadata(node.instruction)
            if phases.phase_of(metadata.op_name) == "backward":
                found[node] = taker
                continue
            if not node.operands or node.opcode in ("while", "conditional", "custom-call"):
                return {}
            named = node if metadata.op_name else taker
            for operand in node.operands:
                if operand not in seen:
                    seen.add(operand)
                    stack.append((operand, named))
        return found

    def _depending(self, parameter: int, axes: tuple[str, ...]) -> set[Node]:
        """Return the nodes that depend on a parameter, with no collective over the axes between."""
        key = parameter, axes
        if key not in self._depend:
            depend = self._depend[key] = set()
            for node in self._flat.nodes:  # operands come first
                is_own = node.opcode == "parameter" and not node.fused
                takes = not depend.isdisjoint(node.operands)
                if (is_own and int(node.instruction.literal) == parameter) or (
                    takes and not self._equal_after(node, axes)
                ):
                    depend.add(node)
        return self._depend[key]

    def _equal_after(self, node: Node, axes: Sequence[str]) -> bool:
        return set(axes) <= self._axes.get(node.instruction.name, set())


def gradient_of(judgement: hlo.Judgement, verdict: hlo.Verdict) -> tuple[str, ...]:
    """Return the names of the outputs that a backward pass's sum goes into, if they are few.

    In a training step, these are a weight and the optimizer's state for it.
    """
    collective, module = verdict.collective, judgement.module
    promises = judgement.promises or ()
    is_whole = verdict.range is None and collective.computation == module.entry.name
    if collective.phase != "backward" or not is_whole or len(promises) < 2:
        return ()
    flat = flow.of(module, module.entry.name)
    stack = [node for node in flat.nodes if node.instruction.name == collective.name]
    if len(stack) != 1:
        return ()
    if len(stack[0].instruction.operands) > 1:  # take the operand's own result
        takers = [stack[0], *(n for n in stack[0].users if n.opcode.endswith("-done"))]
        stack = [n.elements[collective.operand] for n in takers if collective.operand in n.elements]
    seen = set(stack)
    while stack:
        new = {taker for taker in stack.pop().takers if taker not in seen}
        # If the backward pass uses the sum, it is the gradient of an activation, not of a weight.
        names = (module.metadata(n.instruction).op_name for n in new if n.opcode not in _AS_IT_IS)
        if any(phases.phase_of(name) == "backward" for name in names):
            return ()
        seen |= new
        stack += new
    returned = [number for number, node in enumerate(flat.end.operands) if node in seen]
    named = [promises[n] for n in returned if n < len(promises)]
    if len(named) > _OUTPUTS:  # for example through a norm of all gradients
        return ()
    return tuple(outputs.name(promise[0]) for promise in named if promise)


def advice(of: outputs.Unreduced) -> str:
    """Return advice on where to reduce gradients, and by which function."""
    quoted, many = ", ".join(map(repr, of.axes)), of.gradients > 1
    what = "gradients" if many else "gradient"
    if of.is_summed_before:
        return (
            f"the forward pass sums over {quoted} what the {what}"
            f"{_at(' at' if of.sources else '', of.sources)} {'are' if many else 'is'} made of, as "
            "a tensor-parallel layer does: its backward pass lacks a psum, and one at the end "
            "would hide that. Let shard_map insert it: trace the step with the check on, under "
            "shardrules.install(), and compare its gradients with those of one device; "
            f"`shardrules migrate {UNNAMED} says what else changes there"
        )
    return (
        f"reduce the {what}{_at(' that come from' if many else ' that comes from', of.sources)} "
        f"over {quoted} before {'they go' if many else 'it goes'} "
        f"{_at('into', of.takers) or 'on'}: {_WHICH}"
    )


def _at(words: str, lines: Sequence[str]) -> str:
    return f"{words} {few(lines, _LINES)}" if lines else ""
