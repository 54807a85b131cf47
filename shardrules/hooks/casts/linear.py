"""Represent the linear program that JAX transposes as a graph in which casts are placed.

``jax.grad`` transposes a jaxpr whose inputs are residuals, with known values, and tangents.
Each cast of a tangent from invariant to varying becomes a psum of its cotangent. The cast may be
anywhere in the program: equal operands give equal results on every device, so an operation may run
before the cast or after it. Casts of residuals cost nothing, since no gradient flows through them.

A tangent that was invariant in the program as JAX traced it stays equal on all devices, wherever
the casts are. After a cast it may become invariant again, by an un-cast that moves no data
(``identities``).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from shardrules.door import places
from shardrules.door.internals import Door
from shardrules.door.jaxprs import CALLS, SUMS, is_inexact, name_of, opened, scan_counts
from shardrules.door.protocols import Aval, Eqn, Jaxpr, Var
from shardrules.hooks.cotangents.linearity import WIDE, precision, rounded_to, strings
from shardrules.hooks.cotangents.summed_shares import absent_tangents, why_not_linear
from shardrules.hooks.notes import PlacedCast
from shardrules.hooks.types.identities import MARK
from shardrules.jaxprs.fold import Fold
from shardrules.jaxprs.reach import Reach

# Primitives that return their operand with another type: the cast to varying, and the mark.
CAST = "pvary"
IDENTITIES = (CAST, MARK)
# Primitives that reorder or select elements. Where a sharded array is gathered, its cotangent is
# sliced. XLA fuses a psum with that slice into one reduce-scatter, even if reshapes and
# conversions stand between the two, but not if one of these primitives does.
REORDERS = frozenset(
    "concatenate dynamic_slice dynamic_update_slice gather pad rev scatter scatter-add select_n "
    "slice split".split()
)
# Gathers whose result is invariant; their transposes slice.
GATHERS = ("all_gather_invariant",)
# Primitives whose jaxprs are followed. Any other primitive that holds jaxprs is one step.
_FOLLOWED = frozenset((*CALLS, "scan", "cond"))
# Primitives that read, store or add, and so return no new ref.
REFS = ("get", "swap", "addupdate")

Axes = frozenset[str]
NONE: Axes = frozenset()
Sums = Sequence[tuple[int, Axes]]
Where = tuple[Any, ...]  # the ids of the equations (and the branches' numbers) around a jaxpr
Values = Sequence["Value | None"]  # for each operand of an equation: its tangent, or None


class Unplaceable(Exception):
    """The graph can't represent the program, so the casts stay where they are."""


@dataclasses.dataclass(eq=False)
class Value:
    aval: Any  # its aval in the program as traced
    varying: Axes  # the mesh axes over which it varies as traced
    runs: int  # how often one execution of the program makes it
    source: Any  # JAX's record of the lines that made it; None for an input
    cast_bytes: int  # the cost of casting it: its bytes times its runs
    castable: bool  # whether it may be cast: False in a branch that only some devices take
    live: bool = False  # whether its cotangent may be nonzero
    # The axes over which it must stay invariant: the program casts a later, more precise value.
    stays: Axes = NONE
    # The axes over which it must not be cast: the program casts an earlier, more precise value.
    narrow: Axes = NONE
    is_gathered: bool = False  # whether a gather made it, whose transpose slices its cotangent
    use: object = dataclasses.field(default_factory=object)  # the key of its label where it is used

    @property
    def precision(self) -> tuple[int, int]:
        return precision(self.aval.dtype) if is_inexact(self.aval) else (0, 0)  # float0


@dataclasses.dataclass(eq=False)
class Residual:
    """A residual that is differentiated again, so that its casts become psums too."""

    varying: Axes  # the mesh axes over which it varies
    cast_bytes: int  # the cost of casting it: its bytes times its runs
    steps: list[Step] = dataclasses.field(default_factory=list)  # the steps that take it

    def casts(self, labels: dict[Any, Axes]) -> Axes:
        """Return the axes over which it is cast if the steps have these labels."""
        return NONE.union(*(labels[step] for step in self.steps)) - self.varying


class BwdSums(NamedTuple):
    """The sums that a custom_vjp's bwd and the hooks around it make."""

    sums: Sums  # the bytes and the axes of each sum
    moves: Axes  # the axes over which the primals may be cast instead
    by_itself: Axes | None = NONE  # the axes over which bwd sums; None if it is not linear
    differentiates: bool = False  # whether it differentiates with respect to its residuals


@dataclasses.dataclass(eq=False)
class Step:
    """An operation, and how its operands' types relate to its results'."""

    inputs: list[Value]  # the tangents that it takes
    outputs: list[Value]  # the tangents that it makes
    needed: Axes = NONE  # the axes over which it must vary, because a residual that it takes does
    # The axes over which operands and results keep their types; None for all axes.
    fixed: Axes | None = NONE
    # The sums of cotangents at the operation, for each operand: the bytes, and the axes.
    sums: Sums = ()
    # The axes over which its operands may be cast instead; such a cast removes the sums.
    moves: Axes = NONE
    ties: bool = False  # whether operand and result are one value: a scan's carry and last state
    bwd: BwdSums | None = None  # the sums of a custom_vjp's bwd
    reorders: bool = False  # whether it is one of ``REORDERS``

    def left(self, over: Axes) -> Iterator[tuple[int, Axes]]:
        """Yield the bytes and axes of the sums that remain if the step varies over ``over``."""
        for count, axes in self.sums:
            if axes - (over & self.moves):
                yield count, axes - (over & self.moves)


class Graph(Fold["Value | None"]):
    """The tangents of a linear program and the steps between them; may raise Unplaceable."""

    def __init__(
        self,
        door: Door,
        jaxpr: Jaxpr,
        linear: Sequence[bool],  # whether each input is a tangent
        wanted: Sequence[bool],  # whether each output's cotangent may be nonzero
        opaque: Callable[[Any], bool],  # whether an equation is an opaque call
        again: bool = False,  # whether the transpose is differentiated in reverse mode
    ):
        super().__init__()
        self.door = door
        self.opaque = opaque
        self.again = again
        info = getattr(jaxpr, "debug_info", None)
        source = getattr(info, "func_src_info", None) or ""
        # JAX's own wrapper of the user's function (``f_wrapped``) would say nothing.
        self.function: str = "" if places.owns(source.rpartition(" at ")[2]) else source
        self._sizes = door.manual_sizes()
        self.every = frozenset(self._sizes)
        # Along an axis of one device nothing differs, so such an axis is no reason for a cast.
        self.counted = tuple(axis for axis, size in self._sizes.items() if size > 1)
        # For each jaxpr, how often it runs, and whether it may hold casts.
        self._around: dict[Where, tuple[int, bool]] = {}
        self._where: Where = ()  # the place of the jaxpr that is being read
        self.values: dict[tuple[Where, Any], Value] = {}
        self.steps: list[Step] = []
        self.at: dict[tuple[Where, int], Step] = {}  # an equation's own step
        self.residuals: dict[tuple[Where, Any], Residual] = {}
        self.customs: list[tuple[Step, Any, int]] = []  # custom_vjps: step, equation, runs
        self.summed: list[tuple[Value, Axes]] = []  # results and axes of the program's psums
        # The casts of the program as traced: operand and result.
        self.casts: list[tuple[Value, Value]] = []
        ends = self._walk(jaxpr, (), linear, 1, True)
        self.inputs = [self.values[(), v] for v, is_in in zip(jaxpr.invars, linear) if is_in]
        self.ends = [value for value in ends if value is not None]
        self._live([value for value, used in zip(ends, wanted) if value is not None and used])

    def device_count(self, axes: Axes) -> int:
        return math.prod([self._sizes[axis] for axis in axes])

    def counts(self, axes: Axes) -> bool:
        """Return whether a psum over these axes moves data."""
        return not axes.isdisjoint(self.counted)

    # From the program to the graph.

    def placed(self, labels: dict[Any, Axes]) -> list[PlacedCast]:
        """Return the casts under these labels, of tangents whose cotangents may be nonzero."""
        casts = []
        for value in self.values.values():
            axes = (labels[value.use] - labels[value]).intersection(self.counted)
            if axes and value.live:
                name = f"{value.aval.dtype}[{','.join(map(str, value.aval.shape))}]"
                at, over = self.line(value), tuple(sorted(axes))
                casts.append(PlacedCast(at, name, over, value.runs, self.function))
        return casts

    def line(self, value: Value) -> str:
        """Return the source line that made a tangent; empty for an input."""
        return "" if value.source is None else self.door.source_line(value.source)

    def _value(self, where: Where, var: Var, source: Any = None) -> Value:
        aval, is_ref = var.aval, self.is_ref(var)
        runs, castable = self._around[where]
        if not self.door.can_cast(aval) and not is_ref:
            raise Unplaceable(f"a gradient flows through {aval}")
        kind = self.door.axis_type(aval)
        if kind.unreduced or kind.reduced:
            raise Unplaceable("a tangent is unreduced or reduced over a mesh axis")
        castable = castable and not is_ref
        value = Value(aval, kind.varying, runs, source, bytes_of(aval) * runs, castable)
        self.values[where, var] = value
        return value

    def _walk(
        self, jaxpr: Jaxpr, where: Where, linear: Sequence[bool], runs: int, castable: bool
    ) -> list[Value | None]:
        """Add a jaxpr's tangents and steps; return the tangent of each of its outputs."""
        self._around[where] = runs, castable
        pairs = zip(jaxpr.invars, linear)
        given = [self._value(where, var) if is_linear else None for var, is_linear in pairs]
        outside, self._where = self._where, where
        ends = self.jaxpr(jaxpr, given)
        self._where = outside
        return ends

    def literal(self, value: Any) -> None:
        return None

    def constant(self, var: Var) -> None:
        return None

    def equation(self, eqn: Eqn, operands: list[Value | None]) -> Sequence[Value | None]:
        # A new ref of zeros may hold a tangent later.
        is_tangent = any(value is not None for value in operands)
        if not (is_tangent or any(map(self.is_ref, eqn.outvars))):
            return [None] * len(eqn.outvars)
        self._equation(eqn, (*self._where, id(eqn)), operands)
        return [self._read(self._where, var) for var in eqn.outvars]

    def _read(self, where: Where, atom: Var) -> Value | None:
        return None if hasattr(atom, "val") else self.values.get((where, atom))

    def _equation(self, eqn: Eqn, inside: Where, inputs: list[Any]) -> None:
        where, name = inside[:-1], name_of(eqn)
        runs, castable = self._around[where]
        refs = [atom for atom in eqn.invars if self.is_ref(atom)]
        if refs and not (name in REFS and self._read(where, refs[0])):
            raise Unplaceable(f"a gradient flows through {refs[0].aval}, which {name} takes")

        def results(linear: Iterable[Any]) -> list[Any]:
            return [
                self._value(where, var, eqn.source_info) if is_linear else None
                for var, is_linear in zip(eqn.outvars, linear)
            ]

        def walk(
            inner: Jaxpr, place: Where, inputs: Values, atoms: Sequence[Var], castable: bool
        ) -> list[Value | None]:
            ends = self._walk(inner, place, [v is not None for v in inputs], runs, castable)
            self._join(inputs, [self._read(place, var) for var in inner.invars], atoms)
            return ends

        if name in CALLS:
            ends = walk(opened(eqn.params[CALLS[name]]), inside, inputs, eqn.invars, castable)
            self._join(ends, results(ends), eqn.outvars)
        elif name == "scan":
            self._loop(eqn, inside, inputs, results)
        elif name == "cond":
            # A psum in a branch hangs if only some devices take the branch.
            castable = castable and not self._axes(eqn.invars[0])
            inners = [opened(branch) for branch in eqn.params["branches"]]
            every = [
                walk(inner, (*inside, i), inputs[1:], eqn.invars[1:], castable)
                for i, inner in enumerate(inners)
            ]
            made = results(map(any, zip(*every)))
            for i, (inner, ends) in enumerate(zip(inners, every)):
                self._join(ends, made, inner.outvars)
                # All branches take operands of the same types.
                for first, var in zip(inners[0].invars, inner.invars if i else ()):
                    taken = [self._read((*inside, k), v) for k, v in ((0, first), (i, var))]
                    both = [value for value in taken if value is not None]
                    if both:
                        self.steps.append(Step(both[:1], both[1:], ties=True))
        elif name in IDENTITIES:
            (given,), (result,) = inputs, results([True])
            if name == CAST:
                self.casts.append((given, result))
            self.steps.append(Step([given], [result]))
        else:
            self._operation(eqn, name, inside, inputs, results([True] * len(eqn.outvars)))

    def _join(self, givers: Values, takers: Values, atoms: Sequence[Var]) -> None:
        """Add steps from givers to takers; a taker without a giver varies as its atom does."""
        for giver, taker, atom in zip(givers, takers, atoms):
            if taker is not None and giver is not None:
                self.steps.append(Step([giver], [taker]))
            elif taker is not None:
                self.steps.append(Step([], [taker], self._axes(atom)))

    def _loop(self, eqn: Eqn, inside: Where, inputs: Values, results: Callable[..., Any]) -> None:
        # A carry is a tangent if it is one in any iteration, so find these by a fold first. Tie the
        # carry that the body takes to the loop's last carry: both must vary alike. A value inside
        # runs as often as the loop times the loops around it.
        params, inner = eqn.params, opened(eqn.params["jaxpr"])
        constants, carries = scan_counts(params)
        linear = [value is not None for value in inputs]
        ends = _Tangents().equation(eqn, linear)
        linear[constants : constants + carries] = ends[:carries]
        made = results(ends)
        runs, castable = self._around[inside[:-1]]
        values = self._walk(inner, inside, linear, runs * params["length"], castable)
        takers = [self._read(inside, var) for var in inner.invars]
        self._join(inputs, takers, eqn.invars)
        before = takers[constants : constants + carries]
        self._join(values[:carries], before, inner.outvars)
        self._join(values[carries:], made[carries:], inner.outvars[carries:])
        for carry, result in zip(before, made):
            if carry is not None:
                assert result is not None
                self.steps.append(Step([carry], [result], ties=True))

    def _operation(
        self, eqn: Eqn, name: str, inside: Where, inputs: Values, outputs: list[Value]
    ) -> None:
        tangents = [value for value in inputs if value is not None]
        # A read from a ref varies as the writes to it do, and cotangents flow from reads to writes.
        taken = [value for value in tangents if self.is_ref(value)]
        has_refs = any(map(self.is_ref, (*taken, *outputs)))
        step = Step(tangents, [*outputs, *taken], reorders=name in REORDERS)
        self.steps.append(step)
        self.at[inside] = step
        if self.again:
            self._take_residuals(eqn, inside[:-1], step)
        if name == "custom_lin":
            self.customs.append((step, eqn, tangents[0].runs))
            self._custom(step, eqn, tangents[0].runs, self.most_sums(eqn))
            return
        named = strings(eqn.params)
        if name in SUMS:
            self.summed += [(value, named) for value in outputs]
        elif name in GATHERS:
            for value in outputs:
                value.is_gathered = True
        types = [self.door.axis_type(atom.aval).varying for atom in eqn.invars]
        joined = NONE.union(*types)
        differing = NONE.union(*[joined ^ axes for axes in types])
        differing = differing.union(*[joined ^ value.varying for value in outputs])
        # In float16, a share may overflow or underflow even if the sum doesn't.
        rounds = not WIDE.issuperset([v.aval.dtype for v in step.inputs + outputs])
        rounds = rounds or rounded_to(eqn) is not None
        is_known = named or (not differing and (has_refs or not eqn.effects))
        if rounds or not is_known or why_not_linear(self.door, eqn, self.opaque):
            step.fixed = None
            return
        step.fixed = named | differing
        step.needed = NONE.union(*[axes for axes, v in zip(types, inputs) if v is None])

    def _custom(self, step: Step, eqn: Eqn, runs: int, bwd: BwdSums) -> None:
        varied = self._axes(*eqn.invars, *eqn.outvars)
        step.bwd, step.moves = bwd, bwd.moves
        by_itself = self.every if bwd.by_itself is None else bwd.by_itself
        step.fixed = (varied | by_itself) - bwd.moves
        step.sums = [(count * runs, axes) for count, axes in bwd.sums]

    def most_sums(self, eqn: Eqn) -> BwdSums:
        """Return an upper bound of a bwd's sums; it holds if bwd sums nothing by itself."""
        count = eqn.params["num_res"]
        tangents = eqn.invars[count:]
        arriving = self._axes(*eqn.invars[:count], *eqn.outvars)
        sums = [
            (bytes_of(atom.aval), arriving - self._axes(atom))
            for atom, absent in zip(tangents, absent_tangents(eqn))
            if not absent and arriving - self._axes(atom)
        ]
        return BwdSums(sums, arriving & frozenset().union(*(axes for _, axes in sums)))

    def settle(self, custom: Callable[[Any], BwdSums]) -> bool:
        """Set custom_vjps' sums from ``custom``, protect precision; return if these may change."""
        for step, eqn, runs in self.customs:
            self._custom(step, eqn, runs, custom(eqn))
        if len({value.aval.dtype for value in self.values.values()}) < 2:
            return bool(self.customs)
        # Suppose a bf16 tangent is converted to float32 and then cast. The cast must not move to
        # the bf16 tangent or to its operands, since the shares would be rounded to bf16 before they
        # are summed. Nor may the cast of a float32 tangent move to a bf16 tangent made from it.
        for axis in self.counted:
            sites = [
                value
                for value, made in self.casts
                if value.live and axis in made.varying - value.varying
            ]
            sites += [v for step in self.steps if axis in step.moves for v in step.inputs]
            for value in self.narrower(axis, sites, before=True):
                value.stays |= {axis}
            for value in self.narrower(axis, sites, before=False):
                value.narrow |= {axis}
        return True

    def narrower(self, axis: str, sites: Sequence[Value], before: bool) -> list[Value]:
        """Return the tangents before, or after, the sites that are less precise than a site."""
        # Follow only invariant tangents before the sites, and only varying ones after them: beyond
        # a psum over the axis, tangents have their own casts.
        links: dict[Value, list[Value]] = {}
        for step in self.steps:
            ends = (step.outputs, step.inputs) if before else (step.inputs, step.outputs)
            for value in ends[0]:
                links.setdefault(value, []).extend(ends[1])
        less_precise: list[Value] = []
        queue = [(value, value.precision) for value in sites]
        seen = set(queue)
        while queue:
            value, of_site = queue.pop()
            if any(bits < needed for bits, needed in zip(value.precision, of_site)):
                less_precise.append(value)
            for linked in links.get(value, ()):
                if (linked, of_site) not in seen and (axis in linked.varying) != before:
                    seen.add((linked, of_site))
                    queue.append((linked, of_site))
        return less_precise

    @functools.cached_property
    def borders(self) -> list[Value]:
        """Return the inputs and gathered values that a step reorders before they are cast."""
        makers: dict[Value, list[Step]] = {}
        for step in self.steps:
            if step.bwd is None and step.fixed is not None:
                for value in step.outputs:
                    makers.setdefault(value, []).append(step)
        inputs, found = set(self.inputs), dict[Value, None]()
        queue = [
            (value, False)
            for value, made in self.casts
            if value.live and self.counts(made.varying - value.varying)
        ]
        seen = set(queue)
        while queue:
            value, is_behind = queue.pop()
            if value in inputs or value.is_gathered:
                if is_behind:
                    found[value] = None
                continue
            for step in makers.get(value, ()):
                for operand in step.inputs:
                    each = operand, is_behind or step.reorders
                    if each not in seen:
                        seen.add(each)
                        queue.append(each)
        return list(found)

    def cast_as_traced(self, values: Iterable[Value]) -> list[Axes]:
        """Return the axes over which each of these values is cast in the program as traced."""
        axes: dict[Value, Axes] = {}
        for value, made in self.casts:
            axes[value] = axes.get(value, NONE) | (made.varying - value.varying)
        return [axes.get(value, NONE) for value in values]

    def barriers(self) -> str:
        """Describe a bwd that needs whole cotangents; empty if none does."""
        for step, eqn, _ in self.customs:
            varied = self._axes(*eqn.invars, *eqn.outvars)
            assert step.fixed is not None and step.bwd is not None  # noqa: PT018
            kept = step.fixed - (varied - self.most_sums(eqn).moves)
            if self.counts(kept):
                bwd = eqn.params["bwd"]
                does = (
                    "is not known to be linear in its cotangents"
                    if step.bwd.by_itself is None
                    else f"sums over {', '.join(sorted(kept))} by itself"
                )
                place = self.door.function_place(bwd)
                return f"the bwd {self.door.function_name(bwd)!r} (at {place}) {does}"
        return ""

    def _take_residuals(self, eqn: Eqn, where: Where, step: Step) -> None:
        runs = next((value.runs for value in (*step.inputs, *step.outputs)), 1)
        for atom in eqn.invars:
            if hasattr(atom, "val") or (where, atom) in self.values or not is_inexact(atom.aval):
                continue
            residual = Residual(self._axes(atom), bytes_of(atom.aval) * runs)
            self.residuals.setdefault((where, atom), residual).steps.append(step)

    def is_ref(self, atom: Var) -> bool:
        return isinstance(atom.aval, self.door.AbstractRef)

    def _axes(self, *atoms: Any) -> Axes:
        return NONE.union(*(self.door.axis_type(atom.aval).varying for atom in atoms))

    def _live(self, ends: list[Value]) -> None:
        makers: dict[Value, list[Step]] = {}
        for step in self.steps:
            for value in step.outputs:
                makers.setdefault(value, []).append(step)
        queue = list(ends)
        while queue:
            value = queue.pop()
            if not value.live:
                value.live = True
                for step in makers.get(value, ()):
                    queue += step.inputs


def bytes_of(aval: Aval) -> int:
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 0)


class _Tangents(Reach):
    """Finds which values are tangents, following the same jaxprs as ``Graph``."""

    def equation(self, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
        if name_of(eqn) in _FOLLOWED:
            return super().equation(eqn, operands)
        # A new ref of zeros may hold a tangent later.
        is_tangent = any(operands) or any(hasattr(var.aval, "inner_aval") for var in eqn.outvars)
        return [is_tangent] * len(eqn.outvars)
