"""Explain what the check does with a program, or list its calls without a rule.

``explain`` and ``scan_calls`` retrace the program and read the jaxpr, with its backward passes,
loops and nested calls. In this trace a call without a rule is assumed not to communicate, so that
the trace reaches the next call. Its own trace key keeps the program from ever running with that
assumption.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from shardrules.arguments import checked
from shardrules.door import internals
from shardrules.door.jaxprs import SUMS, TO_UNREDUCED, TO_VARYING, named_axes, opened, scan_counts
from shardrules.door.protocols import Eqn, Jaxpr
from shardrules.errors import ShardrulesError
from shardrules.hooks.explain.explanation import (
    WRITTEN,
    ExplainedCall,
    ExplainedCast,
    ExplainedSum,
    Explanation,
    MissingRule,
    MissingRules,
    name_of,
    short,
)
from shardrules.hooks.install import held, state
from shardrules.hooks.notes import Notes
from shardrules.hooks.state import COLLECT
from shardrules.hooks.types.calls.opaque import OpaqueCall, check_declaration, to_paste
from shardrules.jaxprs.walk import Inside, uses, visited
from shardrules.paths import is_library
from shardrules.registry.axistypes import show_axes


@checked
def explain(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Explain the axis types of a program's opaque calls, its casts and its psums.

    The program is traced as after ``shardrules.install()``, not run.

    Args:
      f: a function, jitted or not; pass the gradient to see the backward pass.
      *args: its arguments, arrays or ``jax.ShapeDtypeStruct``.
      **kwargs: its keyword arguments.

    Returns:
      The rows as data; ``print`` shows them as a table.

    Raises:
      ShardrulesError: ``f`` is not callable.
      RuleError, CotangentError: tracing the program itself raises them.

    Examples:
      >>> [call.kernel for call in shardrules.explain(f, x).calls]
      ['scale_kernel']
    """
    explainer = _Explainer()
    explainer.program(f, args, kwargs)
    notes = explainer.notes
    return Explanation(
        tuple(_counted(explainer.calls)),
        tuple(_counted(explainer.casts)),
        tuple(_counted(explainer.sums)),
        tuple(dict.fromkeys(explainer.claims)),
        tuple(notes.placements),
        tuple(dict.fromkeys(notes.annotations)),
        tuple(notes.unchecked),
    )


@checked
def scan_calls(f: Callable[..., Any], *args: Any, **kwargs: Any) -> MissingRules:
    """Return the kernels of a program that have no rule, with lines to paste.

    The program is traced as after ``shardrules.install()``, not run. Calls inside a
    ``shard_map(check_vma=False)`` count: they need the rule once the check is on.

    Args:
      f: a function, jitted or not; pass the gradient to find the backward pass's kernels too.
      *args: its arguments, arrays or ``jax.ShapeDtypeStruct``.
      **kwargs: its keyword arguments.

    Returns:
      The kernels; falsy if there are none.

    Raises:
      ShardrulesError: ``f`` is not callable.
      Exception: tracing the program fails before the first kernel without a rule.

    Examples:
      >>> print(shardrules.scan_calls(f, x))
      every opaque call inside shard_map has a rule (1)
    """
    explainer, stopped = _Explainer(), None
    try:
        explainer.program(f, args, kwargs)
    except Exception as error:
        if not explainer.notes.unknown:
            raise
        stopped = error
    known_count = sum(call.status != "no rule" for call in explainer.calls)
    return MissingRules(_missing(explainer), known_count, stopped)


def _missing(explainer: _Explainer) -> tuple[MissingRule, ...]:
    # List the calls that were noted while tracing first, in that order: the jaxpr may lack them.
    rows = [
        MissingRule(call.name, call.primitive, call.place, (), inputs, True, lines)
        for call, inputs, lines in explainer.notes.unknown
    ]
    for call in explainer.calls:
        if call.status == "no rule":
            at, inputs = (call.at,) if call.at else (), call.inputs if call.checked else ()
            named = call.kernel, call.primitive, call.defined_at
            rows.append(MissingRule(*named, at, inputs, call.checked, call.to_paste))
    rules: dict[tuple[str, ...], MissingRule] = {}
    for row in rows:
        key = row.primitive, row.kernel, row.defined_at
        rule = rules.get(key, row)
        called_at = tuple(dict.fromkeys((*rule.called_at, *row.called_at)))
        rules[key] = dataclasses.replace(rule, called_at=called_at)
    return tuple(rules.values())


@dataclasses.dataclass(frozen=True)
class _EqnPlace:
    stack: str = ""  # the name stacks of the equations around it
    at: str = ""  # its source line, or ``within`` and the source line of an equation around it
    checked: bool | None = None  # whether the check is on; None outside shard_map
    steps: int | None = 1  # how often the loops around it run it; None if unknown
    outcome: str = "a result"  # what its jaxpr's outputs are for
    # the uses of its jaxpr's variables
    uses: Mapping[Any, Sequence[tuple[Any, int]]] = dataclasses.field(default_factory=dict)

    @property
    def phase(self) -> str:
        if "rematted_computation" in self.stack:
            return "recompute"
        return "backward" if "transpose(" in self.stack else "forward"


_LOOPS = {"scan": "scan", "while": "while_loop"}  # primitive: function


class _Explainer:
    def __init__(self) -> None:
        self.door = internals.load()
        self.notes = Notes()
        self.unknown: set[tuple[str, str, str]] = set()
        self.calls: list[ExplainedCall] = []
        self.casts: list[ExplainedCast] = []
        self.sums: list[ExplainedSum] = []
        self.claims: list[str] = []

    def program(self, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Trace a program as under ``install()``, past calls without a rule, and read its jaxpr."""
        if not callable(f):
            raise ShardrulesError(
                f"{type(f).__name__} can't be called; pass the function and its arguments, not its "
                "lowered or compiled form",
                program=f,
            )
        with held() as state:
            scope = state.scope
            scope = dataclasses.replace(scope, active=True, policy=COLLECT, notes=self.notes)
            with state.enter(scope):
                closed = jax.make_jaxpr(f)(*args, **kwargs)
                for call, *_ in self.notes.unknown:
                    self.unknown.add((call.primitive, call.name, call.place))
                visited(opened(closed), self._equation, _EqnPlace(), _entered)

    def _equation(self, eqn: Eqn, place: _EqnPlace, read_inside: Inside[Any, Any]) -> Sequence[Any]:
        # Record an opaque call, a cast, a psum or a claim. For any other equation, read the jaxprs
        # in it with the facts that hold inside: whether the check is on, how often a loop runs the
        # jaxpr, and what its outputs are for.
        around = f"within {place.at.removeprefix('within ')}" if place.at else ""
        at = self.door.source_line(eqn.source_info)
        if around and is_library(at):  # JAX's traceback stops at the jit of a library
            at = "" if is_library(place.at.removeprefix("within ")) else place.at
        here = dataclasses.replace(
            place,
            stack=f"{place.stack}/{eqn.source_info.name_stack}",
            at=at or self.door.source_line(eqn.source_info) or around,
        )
        opaque = state().opaque_call_of(eqn.primitive, eqn.params)
        if opaque is not None:
            if place.checked is not None:
                self._call(eqn, opaque, here)
            return ()
        name = eqn.primitive.name
        if place.checked and name in (*TO_VARYING, *TO_UNREDUCED):
            self._cast(eqn, here)
        elif place.checked and name in SUMS:
            self._sum(eqn, here)
        elif place.checked and name == "already_summed":
            axes, value, _ = _described(eqn)
            self.claims.append(
                f"{value} at {short(here.at)} is already summed over {show_axes(axes)}"
            )
        inside = here = dataclasses.replace(here, outcome="a result")
        if name == "shard_map":
            checked = bool(eqn.params.get("check_vma", eqn.params.get("check_rep")))
            inside = dataclasses.replace(here, checked=checked)
        elif name in _LOOPS:
            length = eqn.params.get("length")
            steps = here.steps * length if here.steps and length is not None else None
            inside = dataclasses.replace(here, steps=steps)
        if name == "cond":
            chosen = " whose predicate varies" if self._chooses(eqn) else ""
            inside = dataclasses.replace(inside, outcome=f"the output of a branch{chosen}")
        elif name in _LOOPS:
            inside = dataclasses.replace(inside, outcome=f"a carry of {_LOOPS[name]}")
        read_inside(inside)
        return ()

    def _call(self, eqn: Eqn, opaque: OpaqueCall, place: _EqnPlace) -> None:
        count = len(eqn.invars) if opaque.operand_count is None else opaque.operand_count
        # Raise the errors of lowering. Use a copy, so that the status stays ``declared``.
        check_declaration(
            dataclasses.replace(opaque), state(), eqn.primitive.name, eqn.params, count
        )
        call, entry = opaque.call, opaque.registration
        status = "no rule"
        if entry is not None:
            status = entry.status
        elif place.checked and (call.primitive, call.name, call.place) not in self.unknown:
            status = "own types"
        inputs = self.door.axis_types([atom.aval for atom in eqn.invars])
        outputs = self.door.axis_types([var.aval for var in eqn.outvars])
        self.calls.append(
            ExplainedCall(
                kernel=call.name,
                primitive=call.primitive,
                defined_at=call.place,
                at=place.at,
                phase=place.phase,
                checked=bool(place.checked),
                inputs=inputs,
                outputs=outputs,
                rule=repr(entry.rule) if entry else "",
                status=status,
                declared_at=entry.where if entry else "",
                to_paste=to_paste(call, opaque.audit) if status == "no rule" else (),
            )
        )

    def _cast(self, eqn: Eqn, place: _EqnPlace) -> None:
        axes, value, size = _described(eqn)
        to = "unreduced" if eqn.primitive.name in TO_UNREDUCED else "varying"
        why = self._reason(place.uses.get(eqn.outvars[0], ()), place.outcome)
        self.casts.append(ExplainedCast(axes, to, value, size, place.at, place.phase, why))

    def _reason(self, uses_of: Sequence[tuple[Any, int]], outcome: str) -> str:
        """Say why the first use of a cast's result needs the cast."""
        if not uses_of:
            return f"{outcome}, to vary as the others do"
        eqn, i = uses_of[0]
        opaque = state().opaque_call_of(eqn.primitive, eqn.params)
        if opaque is not None:
            call = opaque.call
            return f"input {i} of {name_of(call.primitive, call.name)}, for its rule"
        name = eqn.primitive.name
        if name in _LOOPS and _carries(eqn, i):
            chosen = " or its condition does" if name == "while" and self._chooses(eqn) else ""
            return f"an initial carry of {_LOOPS[name]}, to vary as its body returns it{chosen}"
        if name == "cond" and self._chooses(eqn):
            return "an operand of cond, whose predicate varies"
        inner = opened(eqn.params.get("jaxpr"))
        if inner is not None and len(inner.invars) == len(eqn.invars):
            return self._reason(uses(inner).get(inner.invars[i], ()), "a result")
        return f"operand {i} of {name}, by JAX or the program"

    def _chooses(self, eqn: Eqn) -> bool:
        """Return whether the predicate of a cond, or the condition of a while_loop, varies."""
        is_while = eqn.primitive.name == "while"
        atoms = opened(eqn.params["cond_jaxpr"]).outvars if is_while else eqn.invars
        return bool(self.door.axis_type(atoms[0].aval).varying)

    def _sum(self, eqn: Eqn, place: _EqnPlace) -> None:
        axes, value, size = _described(eqn)
        aval = eqn.invars[0].aval
        why = WRITTEN
        noted = [
            note
            for note in self.notes.sums
            if (note.axes, note.shape, note.dtype) == (axes, aval.shape, aval.dtype)
            and note.at == place.at.partition("within ")[0]
        ]
        if noted:
            why = noted[0].why
        elif place.phase == "backward" and eqn.primitive.name == "psum_invariant":
            casts = [
                c.why
                for c in self.casts
                if c.phase != "backward" and (c.at, c.axes, c.value) == (place.at, axes, value)
            ]
            why = "transpose of a cast" + (f": {casts[0]}" if casts else "")
        self.sums.append(ExplainedSum(axes, value, size, place.at, place.phase, why, place.steps))


def _entered(jaxpr: Jaxpr, place: _EqnPlace) -> _EqnPlace:
    return dataclasses.replace(place, uses=uses(jaxpr))


def _carries(eqn: Eqn, i: int) -> bool:
    params = eqn.params
    if eqn.primitive.name == "while":
        return bool(i >= params["cond_nconsts"] + params["body_nconsts"])
    constants, carry = scan_counts(params)
    return 0 <= i - constants < carry


def _described(eqn: Eqn) -> tuple[tuple[str, ...], str, int]:
    """Return an equation's axes, its operand's dtype and shape, and its bytes."""
    aval = eqn.invars[0].aval
    text = f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
    return tuple(sorted(named_axes(eqn.params))), text, math.prod(aval.shape) * aval.dtype.itemsize


def _counted(rows: Sequence[Any]) -> list[Any]:
    counts = collections.Counter(rows)
    return [dataclasses.replace(row, count=count) for row, count in counts.items()]
