"""Tell whether a cotangent may be the sum of shares at each step of a linear program.

With the check off, each device transposes its own share of the cotangent of a value that is equal
on the devices. With the check on, all devices transpose the sum. Both give the same gradients if
each step's transpose is linear and rounds no share. The transposes of JAX's own linear primitives
are linear. An author's transpose counts as linear only if its jaxpr proves it.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from shardrules.door import places
from shardrules.door.internals import Door
from shardrules.door.jaxprs import (
    CALLS,
    CASTS,
    KERNELS,
    NEW_REFS,
    SUMS,
    is_inexact,
    name_of,
    named_axes,
    opened,
)
from shardrules.door.protocols import ClosedJaxpr, Eqn, Jaxpr, Var
from shardrules.hooks.cotangents.linearity import (
    is_less,
    is_narrow,
    linearity,
    precision,
    rounded_to,
)
from shardrules.hooks.cotangents.traced import CustomVjpInfo
from shardrules.hooks.retyping.retyping import differentiated_by_jax, transposed_by_jax
from shardrules.hooks.types.identities import MARK
from shardrules.hooks.types.join_law import hijax_object
from shardrules.hooks.types.owners import calls_only_jaxs, is_foreign
from shardrules.jaxprs.fold import TooLong
from shardrules.jaxprs.made_of import digest
from shardrules.jaxprs.reach import Reach
from shardrules.jaxprs.walk import equations, program_text
from shardrules.registry.axistypes import show_axes

IsOpaque = Callable[[Any], bool]
OUTSIDE = (
    "traced outside of the body: trace it there, by jax.make_jaxpr or jax.closure_convert in the "
    "function that is mapped"
)
_IDENTITIES = CASTS | {MARK}
_PLAIN = {type(None), bool, int, float, str}  # the types of most parameters; none holds a function
# Primitives whose jaxprs are followed. Any other primitive that holds jaxprs is one step.
_FOLLOWED = frozenset((*CALLS, "scan", "cond"))
_TRANSPOSE_CALLS = ("linear_call", "custom_transpose_call")


def why_not_linear(door: Door, eqn: Eqn, is_opaque: IsOpaque) -> str:
    """Say why an equation's transpose may not be linear on each device; empty if it is."""
    name = name_of(eqn)
    if name == "custom_linear_solve":
        # An iterative solver (cg) is not linear: on each device it would solve a share to that
        # share's tolerance, even where the shares cancel.
        return "" if _solves(eqn) else f"{name!r} is solved by a function that may not be linear"
    is_authors = hijax_object(door, eqn.primitive, eqn.params) is not None
    if is_authors or not transposed_by_jax(door, eqn.primitive) or is_opaque(eqn) or _calls(eqn):
        return f"the transpose of {name!r} is not known to be linear"
    return ""


def has_rule(door: Door, eqn: Eqn) -> bool:
    """Return whether an equation is differentiated by a rule that its author wrote."""
    name = name_of(eqn)
    if name.startswith("custom_jvp_call") or name == "custom_vmap_call":
        return not _is_jaxs(door, eqn)
    return (
        name.startswith("custom_vjp_call")
        or name in _TRANSPOSE_CALLS
        or (name == "custom_linear_solve" and not _solves(eqn))
        # JAX 0.10's pallas_call is a hijax primitive, but has JAX's own rules.
        or (name not in KERNELS and hijax_object(door, eqn.primitive, eqn.params) is not None)
        or not transposed_by_jax(door, eqn.primitive)
    )


def rounds(eqn: Eqn) -> bool:
    """Return whether an equation or its transpose may round shares differently from their sum."""
    floats = [var.aval.dtype for var in eqn.outvars if is_inexact(var.aval)]
    return narrows(eqn) or any(is_narrow(precision(dtype)) for dtype in floats)


def narrows(eqn: Eqn) -> bool:
    """Return whether an equation, or its transpose, makes a value less precise."""
    if name_of(eqn) != "convert_element_type":
        return rounded_to(eqn) is not None
    ends = (eqn.invars[0].aval, eqn.outvars[0].aval)
    if not all(map(is_inexact, ends)):
        return False
    before, after = (precision(aval.dtype) for aval in ends)
    return is_less(after, before) or is_less(before, after)


def _is_jaxs(door: Door, eqn: Eqn) -> bool:
    """Return whether JAX wrote both the rule of a custom_jvp or custom_vmap and its function."""
    rules = (eqn.params.get(name) for name in ("jvp_jaxpr_fun", "jvp_jaxpr_thunk", "rule"))
    rule = next(rule for rule in rules if rule is not None)
    # ``defjvps`` and custom_root make a rule of JAX's that calls the author's functions.
    primal = opened(eqn.params.get("call_jaxpr", eqn.params.get("call")))
    functions = [getattr(rule, "rule", rule), *([primal] if hasattr(primal, "debug_info") else [])]
    names = map(door.function_name, functions)
    return (
        "_custom_root" not in names
        and all(places.owns(door.function_place(function)) for function in functions)
        and calls_only_jaxs(functions[0])
    )


def _is_batched_by_jax(door: Door, eqn: Eqn) -> bool:
    """Return whether JAX wrote the rule of a custom_vmap, as for ``sequential_vmap``."""
    rule = getattr(eqn.params["rule"], "rule", eqn.params["rule"])
    # ``sequential_vmap`` makes a rule of JAX's that calls the function itself.
    own = door.function_place(opened(eqn.params["call"]))
    return places.owns(door.function_place(rule)) and calls_only_jaxs(rule, own)


# JAX binds these primitives under the check, and a body may bind them itself. With the check off,
# each device gets a part of a cotangent, and nothing sums the parts.
_FOR_THE_CHECK = frozenset({"all_gather_invariant", "psum_invariant"})


def why_by_arguments(door: Door, eqn: Eqn) -> str:
    """Say why an equation's derivative may differ with the check on, although a retrace agreed.

    A retrace differentiates by all arguments, and without the enclosing vmaps; the program may not.
    Empty if there is no reason.
    """
    name, count = name_of(eqn), sum(is_inexact(atom.aval) for atom in eqn.invars)
    if count and name in _FOR_THE_CHECK:
        return f"the transpose of {name!r} is right with the check on alone"
    is_batched = count and is_foreign((door.batchers or {}).get(eqn.primitive))
    if is_batched or (name == "custom_vmap_call" and not _is_batched_by_jax(door, eqn)):
        return f"vmap calls a rule that somebody wrote for {name!r}"
    if count < 2:
        return ""
    asks = eqn.params.get("symbolic_zeros") if name.startswith("custom_jvp_call") else False
    if (asks and not _is_jaxs(door, eqn)) or not differentiated_by_jax(door, eqn.primitive):
        asks_for = " (symbolic_zeros)" if asks else ""
        return f"the jvp of {name!r} may depend on what is differentiated{asks_for}"
    return ""


def told_apart(door: Door, programs: Iterable[ClosedJaxpr]) -> tuple[str, frozenset[object]]:
    """Return a key that distinguishes programs: a digest of their text, and their primitives.

    The text names primitives, but doesn't show whether an author wrote their batching rules.
    """
    text, found, mapped = hashlib.sha256(), set(), set[object]()
    for program in programs:
        weak = [getattr(aval, "weak_type", False) for aval in program.in_avals]  # not in the text
        text.update(f"{program_text(program)} {weak}".encode())
        eqns = [*equations(opened(program))]
        found |= {eqn.primitive for eqn in eqns}
        # The rules of custom_vmaps, too, have no text.
        called = [eqn.params["rule"] for eqn in eqns if name_of(eqn) == "custom_vmap_call"]
        mapped |= {hashable(getattr(rule, "rule", rule)) for rule in called}
    batchers = door.batchers or {}
    rules = {(primitive, is_foreign(batchers.get(primitive))) for primitive in found}
    return text.hexdigest(), frozenset(mapped | rules)


def absent_tangents(eqn: Eqn) -> Sequence[bool]:
    """Return which tangents of a custom_vjp's linear part are zero; JAX 0.6.0 marks none."""
    none_zero = [False] * (len(eqn.invars) - eqn.params["num_res"])
    zeros: Sequence[bool] = eqn.params.get("in_zeros", none_zero)
    return zeros


class CustomRules:
    """The custom rules that a program calls and that no derivative of it has run yet, by keys.

    Two calls have the same key only if they have the same rule. Names and places can't be keys,
    since all functions that one function makes share them.
    """

    def __init__(self, door: Door, rule_of: Callable[[Any], Any]):
        self.door = door
        self._rule_of = rule_of  # maps a bwd that JAX binds to the author's functions

    def left(self, closed: Any) -> collections.Counter[Any]:
        """Return how often each rule is left in a program."""
        eqns = equations(opened(closed))
        keys = (self._key(eqn, 2) for eqn in eqns if has_rule(self.door, eqn))
        return collections.Counter(key for key in keys if key is not None)

    def outside(self, called: Any) -> list[str]:
        """Say whether a program calls a custom_vjp that no look has bound, and so none looks at."""
        eqns = [e for e in equations(opened(called)) if name_of(e).startswith("custom_vjp_call")]
        if all(self._rule_of(eqn.params.get("bwd")) is not None for eqn in eqns):
            return []
        return [f"it calls a custom_vjp that was {OUTSIDE}"]

    def alike(self, programs: Iterable[Any]) -> tuple[tuple[int, ...], ...]:
        """Return which rules are left in each program, numbered in the order of first appearance.

        The programs' text doesn't show whether a derivative already ran a rule that it holds.
        """
        met: dict[Any, int] = {}
        return tuple(
            tuple(met.setdefault(rule, len(met)) for rule in self.left(closed).elements())
            for closed in programs
        )

    def new(self, closed: Any, before: Any, ran: Container[Any]) -> bool:
        """Return whether a derivative holds rules that neither ran nor were in the program before.

        A custom_jvp's rule ran if the differentiated program held it. If the program held a
        custom_vjp's rule that didn't run, the rule has no tangents, as long as the derivative
        doesn't call it more often than the program did.
        """
        counts = self.left(before)
        return any(
            rule not in ran
            and (rule not in counts or not (type(rule) is tuple or n <= counts[rule]))
            for rule, n in self.left(closed).items()
        )

    def computed(self, closed: Any, depth: int = 2) -> list[tuple[Any, int | None]]:
        """Return the rules of the custom calls in a program, each with a digest of its jaxpr.

        For a custom_vjp, digest its fwd. The digest is None if the rule can't be traced.
        """
        # Trace each rule as JAX would under a derivative by all its float arguments. A rule's jaxpr
        # may call other custom functions, so go on inside it, down to ``depth``.
        made: list[tuple[Any, int | None]] = []
        for eqn in equations(opened(closed)):
            is_vjp = name_of(eqn).startswith("custom_vjp_call")
            if not (is_vjp or name_of(eqn).startswith("custom_jvp_call")):
                continue
            if not has_rule(self.door, eqn):
                continue
            names = ["fwd_jaxpr_thunk"] if is_vjp else ["jvp_jaxpr_fun", "jvp_jaxpr_thunk"]
            rule: Any = next(eqn.params[name] for name in names if name in eqn.params)
            given = eqn.invars[eqn.params["num_consts"] :]
            marks = [is_vjp or not is_inexact(atom.aval) for atom in given]
            key = self._rule_of(eqn.params.get("bwd")) if is_vjp else None
            try:
                jaxpr, consts = getattr(rule, "call_wrapped", rule)(*marks)[:2]
                held = _Held(opened(jaxpr), consts)
                made.append((hashable(key), digest(held)))
            except Exception:  # it may need a trace that has ended  # noqa: BLE001
                made.append((hashable(key), None))
                continue
            made += self.computed(held, depth - 1) if depth else []
        return made

    def holds_uncounted(self, closed: Any) -> bool:
        """Return whether a program holds authors' transposes or solves, which ``left`` omits."""
        named = ("custom_vjp_call", "custom_jvp_call")
        eqns = (eqn for eqn in equations(opened(closed)) if not name_of(eqn).startswith(named))
        return any(has_rule(self.door, eqn) for eqn in eqns)

    def _key(self, eqn: Any, depth: int) -> Any:
        name = name_of(eqn)
        if name.startswith("custom_vjp_call"):
            written = self._rule_of(eqn.params.get("bwd"))
            return None if written is None else hashable(written)
        if not name.startswith("custom_jvp_call"):
            return None  # a transpose: the test of each derivative looks at it
        rule = eqn.params.get("jvp_jaxpr_fun", eqn.params.get("jvp_jaxpr_thunk"))
        zeros = [not is_inexact(atom.aval) for atom in eqn.invars[eqn.params["num_consts"] :]]
        try:
            jaxpr = opened(getattr(rule, "call_wrapped", rule)(*zeros)[0])
        except Exception:  # it may need a trace that has ended  # noqa: BLE001
            return object()
        inner = [e for e in equations(jaxpr) if has_rule(self.door, e)] if depth else []
        return program_text(jaxpr), *(self._key(e, depth - 1) for e in inner)


class _Held(NamedTuple):
    """The jaxpr of a rule, and its constants."""

    jaxpr: Any
    consts: Any


class Computed(NamedTuple):
    """A description of what a bwd computes."""

    rule: Any  # the author's functions
    name: str
    place: str
    forms: tuple[Any, ...]  # the shapes and dtypes that the bwd takes and returns
    made: int  # a digest of the bwd's steps


def computed(parts: CustomVjpInfo, jaxpr: Any, made: int) -> Computed:
    """Return the description of a bwd with this jaxpr, whose digest is ``made``."""
    avals = [atom.aval for atom in (*jaxpr.invars, *jaxpr.outvars)]
    forms = tuple((getattr(a, "shape", None), str(getattr(a, "dtype", None))) for a in avals)
    return Computed(hashable(parts.rule), parts.name, parts.place, forms, made)


def computes_as(now: set[Computed], before: set[Computed], pairs: Mapping[Any, Any]) -> bool:
    """Return whether each bwd computes the same as before; ``pairs`` maps rules to earlier ones.

    If the body makes a rule again at each trace, its bwd is identified by name, place and shapes.
    If these don't distinguish two bwds that compute different things, return False.
    """
    rules = {one.rule for one in before}

    def known_as(one: Computed, rule: Any) -> Any:
        return rule if rule in rules else None, *one[1:4]

    made: dict[Any, set[int]] = {}
    for one in before:
        for rule in (one.rule, None):
            made.setdefault(known_as(one, rule), set()).add(one.made)
    return all(made.get(known_as(one, pairs.get(one.rule, one.rule))) == {one.made} for one in now)


def hashable(rule: Any) -> Any:
    """Return a rule, or a new object for a rule that isn't hashable."""
    try:
        hash(rule)
    except TypeError:
        return object()
    return rule


_TAKEN = (
    "a custom rule takes a gradient itself (jax.vjp, jax.grad), which is summed over {} with the "
    "check on, and isn't proven to be returned as it is. Compare the gradients by "
    "shardrules.testing.assert_same_unchecked(loss, *arguments, forced=True); where they are "
    "the same, switch the check on by hand"
)


def gradient_over(axes: frozenset[str]) -> str:
    """Say that a gradient taken by a fwd, a bwd or a jvp differs with the check off."""
    return _TAKEN.format(show_axes(axes))


class Shares(Reach):
    """Finds the steps of a linear program that may make gradients differ with the check off."""

    def __init__(
        self,
        door: Door,
        is_opaque: IsOpaque,
        jaxpr: Jaxpr,
        linear: Sequence[bool],
        again: bool = False,  # whether a derivative is differentiated
    ):
        super().__init__()
        self.door = door
        self._is_opaque = is_opaque
        sizes = door.manual_sizes()
        self._every = frozenset(axis for axis, size in sizes.items() if size != 1)
        # Along an axis without casts, each of n shares is one nth of the sum. If n is a power of
        # two and the dtype has float32's range, rounding the shares gives the same result as
        # rounding the sum.
        self.differing = frozenset(a for a in self._every if again or sizes[a] & (sizes[a] - 1))
        self.summed: frozenset[str] = frozenset()  # the axes over which casts sum cotangents
        self.sums: frozenset[str] = frozenset()  # the axes over which psums sum tangents
        self._reasons: list[str] = []
        self._rounding: list[tuple[frozenset[str], str]] = []
        inputs = [v.aval for v, is_in in zip(jaxpr.invars, linear) if is_in and is_inexact(v.aval)]
        kept = [precision(aval.dtype) for aval in inputs]
        self._kept = max((p[0] for p in kept), default=0), max((p[1] for p in kept), default=0)
        try:
            self.run(jaxpr, linear)
        except TooLong as error:
            self._reasons.append(str(error))

    def reasons_to_leave(self) -> list[str]:
        """Return why the gradients may differ with the check off, naming the steps."""
        rounding = [why for axes, why in self._rounding if axes & self.differing]
        return list(dict.fromkeys([*self._reasons, *rounding]))

    @property
    def over(self) -> frozenset[str]:
        """Return the axes over which a gradient that a rule takes differs with the check off."""
        # With the check off, no cast sums the gradient, and the transpose of a psum is a psum. With
        # the check on, a cast's transpose sums it, and the transpose of a psum is a cast.
        return self._every & (self.summed | self.sums)

    def equation(self, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
        name = name_of(eqn)
        if name in _FOLLOWED and not (name == "cond" and self.content(operands[0])):
            return super().equation(eqn, operands)
        tangents = [atom for atom, value in zip(eqn.invars, operands) if self.content(value)]
        if tangents and (name in _IDENTITIES or name == "custom_lin"):
            self._cast(eqn, tangents)
        elif tangents and name in SUMS:
            self.sums |= named_axes(eqn.params)
        elif tangents:
            self._operation(eqn, tangents)
        if name in NEW_REFS:
            return super().equation(eqn, operands)
        return self.one_step(eqn, operands, bool(tangents))

    def _varying(self, atoms: Sequence[Var]) -> frozenset[str]:
        types = [self.door.axis_type(atom.aval).varying for atom in atoms]
        return frozenset().union(*types) & self._every

    def _cast(self, eqn: Eqn, tangents: list[Any]) -> None:
        """Record the axes over which the cotangents of invariant tangents are summed."""
        over = self._varying([*eqn.invars, *eqn.outvars])
        for atom in tangents:
            axes = over - self._varying([atom])
            if axes and is_inexact(atom.aval):
                self.differing |= axes
                self.summed |= axes
                if is_less(precision(atom.aval.dtype), self._kept):
                    self._reasons.append(f"a gradient would be summed in {atom.aval.dtype}")

    def _operation(self, eqn: Eqn, tangents: list[Any]) -> None:
        results = [var for var in eqn.outvars if is_inexact(var.aval)] or tangents
        whole = frozenset().union(*(self._every - self._varying([var]) for var in results))
        if not whole:
            return
        where = self.door.source_line(eqn.source_info)
        where = f" at {where}" if where else ""
        reason = why_not_linear(self.door, eqn, self._is_opaque)
        if reason:
            self._reasons.append(f"{reason}{where}")
        arriving = [precision(var.aval.dtype) for var in results if is_inexact(var.aval)]
        for atom in tangents if arriving else ():
            if not is_inexact(atom.aval):
                continue
            to = rounded_to(eqn) or precision(atom.aval.dtype)
            narrows = rounded_to(eqn) or any(is_less(to, each) for each in arriving)
            why = f"{name_of(eqn)!r}{where} rounds a cotangent"
            if is_narrow(to):
                self._reasons.append(why)
            elif narrows and is_less(to, self._kept):
                self._rounding.append((whole, why))


def _solves(eqn: Eqn) -> bool:
    """Return whether a linear solve calls functions that are linear on each device."""
    jaxprs, counts = eqn.params["jaxprs"], eqn.params["const_lengths"]
    return all(
        jaxpr is not None and _is_linear(opened(jaxpr), count)
        for jaxpr, count in (
            (jaxprs.solve, counts.solve),
            (jaxprs.transpose_solve, counts.transpose_solve),
        )
    )


def _is_linear(jaxpr: Jaxpr, const_count: int) -> bool:
    return linearity(jaxpr, jaxpr.invars[const_count:]).summed == frozenset()


def _calls(eqn: Eqn) -> bool:
    """Return whether an equation calls functions that the analyses don't follow."""
    # A scatter's function in a linear program only adds or replaces, since JAX can't differentiate
    # ``x.at[i].apply(f)``.
    if eqn.primitive.name.startswith("scatter"):
        return False
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if type(item) not in _PLAIN and (
                opened(item) is not None or (callable(item) and not isinstance(item, type))
            ):
                return True
    return False
