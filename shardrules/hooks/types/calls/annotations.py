"""Compare users' annotations of outputs with the call's rule or proof.

If an annotation varies less than a proof, the hooks widen it. Plain JAX believes the annotation and
omits a reduction. So the hooks give one ``AnnotationWarning`` when the shard_map has been traced,
unless a ``pcast`` of the output itself has added the missing axes by then (as in MaxText's
megablox). Plain JAX loses nothing in that case, since kernels have their own derivatives.
"""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from shardrules.door.internals import Door
from shardrules.door.jaxprs import CALLS, TO_VARYING, inner_jaxprs, is_inexact, named_axes
from shardrules.door.protocols import Eqn, Jaxpr, Var
from shardrules.errors import AnnotationWarning, RuleError
from shardrules.hooks.state import State
from shardrules.hooks.types.calls.opaque import Contradiction, OpaqueCall
from shardrules.jaxprs.fold import Fold
from shardrules.paths import is_library
from shardrules.registry.axistypes import AxisType, show_axes

_OURS = os.path.join(os.path.dirname(sys.modules["shardrules"].__path__[0]), "shardrules", "")


def check_annotations(
    door: Door, state: State, opaque: OpaqueCall, types: tuple[AxisType, ...]
) -> None:
    """Compare annotations with the rule's or proof's answer; accept wider annotations."""
    # If an annotation is narrower than a proof, record a contradiction: the hooks use the proven
    # type and warn once the shard_map is traced. If it is narrower than a mere declaration, either
    # one may be wrong, so raise.
    contradictions, registration = [], opaque.registration
    for i, (note, answer) in enumerate(zip(opaque.annotations, types)):
        if note is None or (answer.varying <= note.varying and answer.unreduced == note.unreduced):
            continue
        is_proven = registration is not None and registration.status == "audited"
        if is_proven and not (note.unreduced | note.reduced):
            lost = answer.varying - note.varying
            contradictions.append(
                Contradiction(opaque.call, _calling_line(), i, note, answer, lost)
            )
            continue
        said = "policy for calls without a rule"
        if registration is not None:
            said = f"rule {registration.rule!r} (declared at {registration.where})"
        raise RuleError(
            f"output {i} of {opaque.call} is annotated '{note}', but the {said} makes it "
            f"'{answer}'. Remove the annotation (the rule is enough), or register a rule that says "
            "which axes the kernel makes invariant.",
            kernel=opaque.call.name,
            annotation=note,
            answer=answer,
        )
    if contradictions:
        opaque.contradictions = tuple(contradictions)
        pending = state.here.body.contradictions
        if pending is None:
            tell(door, state, contradictions)
        else:
            pending += contradictions


def note_results(state: State, opaque: OpaqueCall, results: Any) -> None:
    for contradiction in opaque.contradictions if state.here.body.contradictions else ():
        contradiction.values.append(weakref.ref(results[contradiction.output]))


def note_called(state: State, jaxpr: Jaxpr, results: Any) -> None:
    """Record the results of a jit that returns a contradicted kernel's output."""
    # The jit may have converted, reshaped or masked the output. For our purpose the result is still
    # the kernel's output, if the result's gradient flows into that kernel alone.
    sources = _Sources(state).run(jaxpr, [_ELSEWHERE] * len(jaxpr.invars))
    for contradictions, result in zip(sources, results):
        for contradiction in contradictions or ():
            contradiction.values.append(weakref.ref(result))


# Where the gradient of a value flows: into one kernel's output, as the tuple of its contradictions;
# elsewhere, as the empty tuple; or nowhere (None), since the value is made of integers or
# constants.
_Source = tuple[Contradiction, ...] | None
_ELSEWHERE: _Source = ()


class _Sources(Fold[_Source]):
    """Finds where the gradients of a jaxpr's outputs flow, given the same for its inputs."""

    bottom = None

    def __init__(self, state: State):
        super().__init__()
        self._opaque_of = state.opaque_call_of

    def literal(self, value: Any) -> _Source:
        return None

    def constant(self, var: Var) -> _Source:
        return _ELSEWHERE

    def join(self, values: Iterable[_Source]) -> _Source:
        into = set(values) - {None}
        return into.pop() if len(into) == 1 else _ELSEWHERE if into else None

    def equation(self, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
        name, outputs = eqn.primitive.name, range(len(eqn.outvars))
        opaque = self._opaque_of(eqn.primitive, eqn.params)
        if opaque is not None:
            return [tuple(c for c in opaque.contradictions if c.output == i) for i in outputs]
        if name in CALLS:
            return super().equation(eqn, operands)
        if name in TO_VARYING:
            return operands
        if named_axes(eqn.params) or next(inner_jaxprs(eqn.params), None) is not None:
            return [_ELSEWHERE for _ in outputs]
        into = [s for s, v in zip(operands, eqn.invars) if s is not None and is_inexact(v.aval)]
        return [into[0] if len(into) == 1 else _ELSEWHERE if into else None for _ in outputs]


def note_cast(state: State, value: Any, axes: Any, result: Any) -> None:
    """Record that the program casts a value to vary over ``axes``."""
    for contradiction in state.here.body.contradictions or ():
        if any(reference() is value for reference in contradiction.values):
            contradiction.lost -= frozenset(axes)
            contradiction.values.append(weakref.ref(result))


def tell(door: Door, state: State, contradictions: list[Contradiction]) -> None:
    """Warn about contradicted annotations, once for each kernel and place."""
    for contradiction in contradictions:
        contradiction.values.clear()
        if not contradiction.lost:
            continue
        warning = _warning(door, contradiction)
        notes = state.scope.notes
        if notes is not None:
            notes.annotations.append(str(warning))
            continue
        call, at = contradiction.call, contradiction.at
        key = (call.name, call.place, at, contradiction.output, contradiction.lost)
        if key not in state.warned:
            state.warned.add(key)
            file, _, line = at.rpartition(":")
            line_number = int(line) if line.isdigit() else 1
            warnings.warn_explicit(warning, AnnotationWarning, file or "<unknown>", line_number)


def _calling_line() -> str:
    """Return the program's line that calls a kernel; JAX's own record is empty here (0.10)."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.startswith(_OURS) or is_library(file)):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _warning(door: Door, wrong: Contradiction) -> AnnotationWarning:
    axes = f"frozenset({{{', '.join(map(repr, sorted(wrong.proven.varying)))}}})"
    written = f"manual_axis_type=jax.sharding.ManualAxisType(varying={axes})"
    if door.ManualAxisType is None:
        written = f"vma={axes}"
    called = f", called at {wrong.at}," if wrong.at else ""
    return AnnotationWarning(
        f"output {wrong.output} of {wrong.call}{called} is annotated '{wrong.annotation}', but the "
        f"kernel's own jaxpr shows that it depends on its operands, so that it is "
        f"'{wrong.proven}'. shardrules widens it. Plain JAX believes the annotation and loses the "
        f"reduction over {show_axes(wrong.lost)} wherever one follows from the type: each device "
        f"keeps its own share of a gradient. Remove the annotation, or write {written}.",
        kernel=wrong.call.name,
        output=wrong.output,
        annotation=wrong.annotation,
        answer=wrong.proven,
        axes=wrong.lost,
        at=wrong.at,
    )
