"""The linear program that JAX transposes, as a graph in which casts are placed.

What ``jax.grad`` transposes is a jaxpr whose inputs are residuals, which are known, and tangents.
Each cast of a tangent from invariant to varying becomes a psum of its cotangent. Where in the
program the tangent is cast is free: an operation gives the same on every device when its operands
are the same, so it may as well work on what was cast before. Residuals are cast at no cost, since
no gradient flows through them.

A tangent that was invariant in the program as JAX traced it stays equal on all devices, wherever
the casts stand; so it may also come back from varying, by an un-cast that moves nothing
(``identities``).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardrules.door.internals import Door
from shardrules.door.jaxprs import CALLS, SUMS, is_inexact, name_of, opened, scan_counts
from shardrules.hooks.casts.precision import keep_precision
from shardrules.hooks.cotangents.linearity import linear_in, strings
from shardrules.hooks.notes import PlacedCast
from shardrules.hooks.retyping.equations import transposed_by_jax
from shardrules.hooks.types.identities import MARK

__all__ = [
    "Axes",
    "CAST",
    "Graph",
    "IDENTITIES",
    "Step",
    "Sums",
    "Unplaceable",
    "Value",
    "Where",
    "absent_tangents",
]

# The cast from invariant to varying, and what else is its operand with another type.
CAST = "pvary"
IDENTITIES = (CAST, MARK)
# What makes no new ref of one: it reads, stores or adds.
REFS = ("get", "swap", "addupdate")

Axes = frozenset[str]
Sums = Sequence[tuple[int, Axes]]
Where = tuple[Any, ...]  # the indices of the equations around a jaxpr, branches' numbers among them


class Unplaceable(Exception):
    """Casts stay where they are: the program holds what the graph has no form for."""


@dataclasses.dataclass(eq=False)
class Value:
    """A tangent.

    Args:
      aval: its aval in the program as it was traced.
      varying: the mesh axes over which it varies there.
      runs: how often it is made in one execution of the program.
      at: the source line that made it, or empty.
      cast_bytes: what casting it costs: its bytes times its runs.
      castable: whether a cast may stand at it: not in a branch that devices take alone.
      in_branch: whether it is in such a branch.
      live: whether its cotangent may be anything but zero.
      stays: the axes over which it stays invariant: it is less precise than what is cast later.
      narrow: the axes over which no cast may stand at it: what is cast before is more precise.
    """

    aval: Any
    varying: frozenset[str]
    runs: int
    at: str
    cast_bytes: int
    castable: bool
    in_branch: bool = False
    live: bool = False
    stays: frozenset[str] = frozenset()
    narrow: frozenset[str] = frozenset()


@dataclasses.dataclass(eq=False)
class Residual:
    """A known value that is differentiated again: there a cast of it becomes a psum, too.

    Args:
      varying: the mesh axes over which it varies.
      cast_bytes: what casting it costs: its bytes times its runs.
      steps: the steps that take it.
    """

    varying: frozenset[str]
    cast_bytes: int
    steps: list[Step] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Step:
    """What an operation asks of its operands' types and gives to its results'.

    Args:
      inputs: the tangents that it takes.
      outputs: the tangents that it makes.
      needed: the axes over which it has to vary: another operand does.
      fixed: the axes over which operands and results keep the types that they have; None for all.
      sums: what it sums by itself, for each operand: the bytes, and the axes.
      moves: the axes over which operands may be cast before it, and it sums over these no more.
      ties: whether operand and result are one value, as a scan's carry and its last state.
    """

    inputs: list[Value]
    outputs: list[Value]
    needed: frozenset[str] = frozenset()
    fixed: frozenset[str] | None = frozenset()
    sums: Sequence[tuple[int, frozenset[str]]] = ()
    moves: frozenset[str] = frozenset()
    ties: bool = False

    def fixes(self, axis: str) -> bool:
        """Whether operands and results keep the types that they have over an axis."""
        return self.fixed is None or axis in self.fixed

    def left(self, over: frozenset[str]) -> Iterator[tuple[int, frozenset[str]]]:
        """Yield what it sums by itself, and over which axes, if it varies over some."""
        for count, axes in self.sums:
            if axes - (over & self.moves):
                yield count, axes - (over & self.moves)


class Graph:
    """The tangents of a linear program, and the steps between them.

    Args:
      door: JAX's private names.
      jaxpr: the program.
      linear: for each of its inputs, whether it is a tangent.
      wanted: for each of its outputs, whether its cotangent is not zero.
      opaque: whether an equation is an opaque call.
      again: whether the program's transpose is differentiated in reverse mode.

    Raises:
      Unplaceable: if the program holds what this has no form for.
    """

    def __init__(
        self,
        door: Door,
        jaxpr: Any,
        linear: Sequence[bool],
        wanted: Sequence[bool],
        opaque: Callable[[Any], bool],
        again: bool = False,
    ):
        from jax import lax

        self.door = door
        self.opaque = opaque
        self.again = again
        info = getattr(jaxpr, "debug_info", None)
        self.function: str = getattr(info, "func_src_info", None) or ""
        self._sizes = {axis: lax.psum(1, axis) for axis in door.manual_axes()}
        self.values: dict[tuple[Where, Any], Value] = {}
        self.steps: list[Step] = []
        self.at: dict[tuple[Where, int], Step] = {}  # an equation's own step
        self.residuals: dict[tuple[Where, Any], Residual] = {}
        self._customs: list[tuple[Step, Any, int]] = []
        self._by_itself: dict[Step, Axes | None] = {}  # over which a bwd sums, None if not linear
        self.summed: list[tuple[Value, frozenset[str]]] = []  # by psums of the program
        # As they stand: what is cast, and the result.
        self.casts: list[tuple[Value, Value]] = []
        ends = self._walk(jaxpr, (), linear, 1, True)
        self.inputs = [self.values[(), v] for v, is_in in zip(jaxpr.invars, linear) if is_in]
        self.ends = [value for value in ends if value is not None]
        self._live([value for value, used in zip(ends, wanted) if value is not None and used])

    def device_count(self, axes: frozenset[str]) -> int:
        """Return how many devices there are along mesh axes."""
        return math.prod(self._sizes[axis] for axis in axes)

    # From the program to the graph.

    def placed(self, value: Value, axes: frozenset[str]) -> PlacedCast:
        """Describe a cast of a value."""
        name = f"{value.aval.dtype}[{','.join(map(str, value.aval.shape))}]"
        return PlacedCast(value.at, name, tuple(sorted(axes)), value.runs, self.function)

    def _value(self, where: Where, var: Any, runs: int, castable: bool, at: str = "") -> Value:
        aval = var.aval
        is_ref = self._is_ref(var)
        if not self.door.can_cast(aval) and not is_ref:
            raise Unplaceable(f"a gradient flows through {aval}")
        kind = self.door.axis_type(aval)
        if kind.unreduced or kind.reduced:
            raise Unplaceable("a tangent is unreduced or reduced over a mesh axis")
        size_bytes = math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 0)
        value = Value(aval, kind.varying, runs, at, size_bytes * runs, castable and not is_ref)
        value.in_branch = not (castable or is_ref)
        self.values[where, var] = value
        return value

    def _walk(
        self, jaxpr: Any, where: Where, linear: Sequence[bool], runs: int, castable: bool
    ) -> list[Value | None]:
        """Add a jaxpr's tangents and steps; return the tangent of each of its outputs."""
        for var, is_linear in zip(jaxpr.invars, linear):
            if is_linear:
                self._value(where, var, runs, castable)
        for index, eqn in enumerate(jaxpr.eqns):
            inputs = [self._read(where, atom) for atom in eqn.invars]
            # A ref that is made of zeros is a tangent's as well, if a tangent is stored in it.
            if any(value is not None for value in inputs) or any(map(self._is_ref, eqn.outvars)):
                self._equation(eqn, (*where, index), where, inputs, runs, castable)
        return [self._read(where, atom) for atom in jaxpr.outvars]

    def _read(self, where: Where, atom: Any) -> Value | None:
        return None if hasattr(atom, "val") else self.values.get((where, atom))

    def _equation(self, eqn, inside: Where, where: Where, inputs, runs: int, castable: bool):
        name = name_of(eqn)
        refs = [atom for atom in eqn.invars if self._is_ref(atom)]
        if refs and not (name in REFS and self._read(where, refs[0])):
            raise Unplaceable(f"a gradient flows through {refs[0].aval}, which {name} takes")

        def results(linear: Iterator[bool]) -> list[Any]:
            at = self.door.source_line(eqn.source_info)
            return [
                self._value(where, var, runs, castable, at) if is_linear else None
                for var, is_linear in zip(eqn.outvars, linear)
            ]

        if name in CALLS:
            inner = opened(eqn.params[CALLS[name]])
            ends = self._inside(eqn, inner, inside, inputs, runs, castable)
            self._join(ends, results(end is not None for end in ends), eqn.outvars)
        elif name == "scan":
            self._scan(eqn, inside, inputs, runs, castable, results)
        elif name == "cond":
            # Devices that take different branches must not meet in a psum there.
            castable = castable and not self._axes(eqn.invars[0])
            inners = [opened(one) for one in eqn.params["branches"]]
            every = [
                self._inside(eqn, inner, (*inside, i), inputs[1:], runs, castable, eqn.invars[1:])
                for i, inner in enumerate(inners)
            ]
            made = results(any(end is not None for end in ends) for ends in zip(*every))
            for i, (inner, ends) in enumerate(zip(inners, every)):
                self._join(ends, made, inner.outvars)
                # Branches take operands of one type.
                for first, var in zip(inners[0].invars, inner.invars if i else ()):
                    taken = [self._read((*inside, k), v) for k, v in ((0, first), (i, var))]
                    both = [one for one in taken if one is not None]
                    if both:
                        self.steps.append(Step(both[:1], both[1:], ties=True))
        elif name in IDENTITIES:
            (given,), (result,) = inputs, results(iter([True]))
            if name == CAST:
                self.casts.append((given, result))
            self.steps.append(Step([given], [result]))
        else:
            self._operation(eqn, inside, inputs, results)

    def _inside(self, eqn, inner, where: Where, inputs, runs: int, castable: bool, atoms=None):
        """Add a jaxpr that an equation calls; its inputs are the equation's operands."""
        atoms = eqn.invars if atoms is None else atoms
        ends = self._walk(inner, where, [one is not None for one in inputs], runs, castable)
        self._join(inputs, [self._read(where, var) for var in inner.invars], atoms)
        return ends

    def _join(self, givers, takers, atoms) -> None:
        """Let each taker be its giver; one that takes a residual varies as that does."""
        for giver, taker, atom in zip(givers, takers, atoms):
            if taker is not None and giver is not None:
                self.steps.append(Step([giver], [taker]))
            elif taker is not None:
                self.steps.append(Step([], [taker], self._axes(atom)))

    def _scan(self, eqn, inside: Where, inputs, runs: int, castable: bool, results) -> None:
        params, inner = eqn.params, opened(eqn.params["jaxpr"])
        constants, carries = scan_counts(params)
        linear = [value is not None for value in inputs]
        while True:  # what a carry is after a step, it is before the next
            ends = _linear_outputs(inner, linear, self._is_ref)
            grown = list(linear)
            for i in range(carries):
                grown[constants + i] |= ends[i]
            if grown == linear:
                break
            linear = grown
        made = results(linear[constants + i] if i < carries else end for i, end in enumerate(ends))
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

    def _operation(self, eqn, inside: Where, inputs, results) -> None:
        outputs = results(itertools.repeat(True, len(eqn.outvars)))
        tangents = [value for value in inputs if value is not None]
        # What is read from a ref varies as what is written to it, and a cotangent takes that way.
        taken = [value for value in tangents if self._is_ref(value)]
        refs = taken or [value for value in outputs if self._is_ref(value)]
        step = Step(tangents, [*outputs, *taken])
        self.steps.append(step)
        self.at[inside] = step
        if self.again:
            self._take_residuals(eqn, inside[:-1], step)
        if name_of(eqn) == "custom_lin":
            self._customs.append((step, eqn, tangents[0].runs))
            self._custom(step, eqn, tangents[0].runs, *self.most_sums(eqn))
            return
        if name_of(eqn) in SUMS:
            self.summed += [(value, strings(eqn.params)) for value in outputs]
        types = [self._axes(atom) for atom in eqn.invars]
        joined = frozenset().union(*types)
        alike = all(one == joined for one in types) and all(
            value.varying == joined for value in outputs
        )
        named = strings(eqn.params)
        functions = _holds_functions(eqn) and not self._solves(eqn)
        whole = functions or not transposed_by_jax(eqn.primitive)
        if whole or self.opaque(eqn):
            step.fixed = None
        elif alike and (refs or not eqn.effects):
            step.fixed = named
            step.needed = frozenset().union(
                *(one for one, value in zip(types, inputs) if value is None)
            )
        elif named:  # a collective
            step.fixed = named | frozenset().union(
                *(joined ^ one for one in (*types, *(value.varying for value in outputs)))
            )
            step.needed = frozenset().union(
                *(one for one, value in zip(types, inputs) if value is None)
            )
        else:
            step.fixed = None

    def _custom(self, step: Step, eqn: Any, runs: int, sums: Sums, moves: Axes, by_itself) -> None:
        varied = frozenset().union(*(self._axes(atom) for atom in (*eqn.invars, *eqn.outvars)))
        every = frozenset(self.door.manual_axes())
        step.moves = moves
        self._by_itself[step] = by_itself
        step.fixed = (every if by_itself is None else varied | by_itself) - moves
        step.sums = [(count * runs, axes) for count, axes in sums]

    def most_sums(self, eqn: Any) -> tuple[Sums, Axes, Axes]:
        """Return the arguments of ``settle`` for a custom_vjp whose bwd sums nothing by itself."""
        count = eqn.params["num_res"]
        tangents = eqn.invars[count:]
        arriving = frozenset().union(*map(self._axes, (*eqn.invars[:count], *eqn.outvars)))
        sums = [
            (math.prod(atom.aval.shape) * atom.aval.dtype.itemsize, arriving - self._axes(atom))
            for atom, absent in zip(tangents, absent_tangents(eqn))
            if not absent and arriving - self._axes(atom)
        ]
        return sums, arriving & frozenset().union(*(axes for _, axes in sums)), frozenset()

    def settle(self, custom: Callable[[Any], tuple[Sums, Axes, Axes | None]]) -> None:
        """Ask each custom_vjp's bwd what it sums, and tell where what is summed is less precise.

        Until then each step's sums are the most that they may be.

        Args:
          custom: from an equation of a custom_vjp's linear part to what the hooks sum of its
            tangents' cotangents (``Step.sums``, ``Step.moves``), and the axes over which its bwd
            sums by itself, None where that is not linear.
        """
        for step, eqn, runs in self._customs:
            self._custom(step, eqn, runs, *custom(eqn))
        keep_precision(self)

    def barriers(self) -> str:
        """Say which bwds take whole cotangents; empty if none does."""
        every = frozenset(self.door.manual_axes())
        for step, eqn, _ in self._customs:
            varied = frozenset().union(*map(self._axes, (*eqn.invars, *eqn.outvars)))
            fixed = every if step.fixed is None else step.fixed
            kept = fixed - (varied - self.most_sums(eqn)[1])
            if kept:
                bwd = eqn.params["bwd"]
                does = (
                    "is not known to be linear in its cotangents"
                    if self._by_itself[step] is None
                    else f"sums over {', '.join(sorted(kept))} by itself"
                )
                place = self.door.function_place(bwd)
                return f"the bwd {self.door.function_name(bwd)!r} (at {place}) {does}"
        return ""

    def _solves(self, eqn: Any) -> bool:
        """Whether it is a linear solve by functions that are known to be linear on each device.

        What iterates until it is near enough (cg) is not: shares that cancel would each be solved
        to a tolerance of their own.
        """
        if name_of(eqn) != "custom_linear_solve":
            return False
        jaxprs, counts = eqn.params["jaxprs"], eqn.params["const_lengths"]
        return all(
            one is not None and linear_in(opened(one), opened(one).invars[count:]) == frozenset()
            for one, count in (
                (jaxprs.solve, counts.solve),
                (jaxprs.transpose_solve, counts.transpose_solve),
            )
        )

    def _take_residuals(self, eqn: Any, where: Where, step: Step) -> None:
        runs = next((value.runs for value in (*step.inputs, *step.outputs)), 1)
        for atom in eqn.invars:
            if hasattr(atom, "val") or (where, atom) in self.values or not is_inexact(atom.aval):
                continue
            size_bytes = math.prod(atom.aval.shape) * atom.aval.dtype.itemsize * runs
            one = self.residuals.setdefault((where, atom), Residual(self._axes(atom), size_bytes))
            one.steps.append(step)

    def _is_ref(self, one: Any) -> bool:
        return isinstance(one.aval, self.door.AbstractRef)

    def _axes(self, atom: Any) -> frozenset[str]:
        return self.door.axis_type(atom.aval).varying

    def _live(self, ends: list[Value]) -> None:
        """Mark live tangents."""
        makers: dict[Value, list[Step]] = {}
        for step in self.steps:
            for value in step.outputs:
                makers.setdefault(value, []).append(step)
        queue = list(ends)
        while queue:
            value = queue.pop()
            if not value.live:
                value.live = True
                queue += [one for step in makers.get(value, ()) for one in step.inputs]


def absent_tangents(eqn: Any) -> Sequence[bool]:
    """Return which tangents of a custom_vjp's linear part are zero; JAX 0.6.0 takes all of them."""
    return eqn.params.get("in_zeros", [False] * (len(eqn.invars) - eqn.params["num_res"]))


def _linear_outputs(
    jaxpr: Any, linear: Sequence[bool], is_ref: Callable[[Any], bool]
) -> list[bool]:
    """Return which outputs depend on the tangents among a jaxpr's inputs, or on a new ref."""
    reached = {var for var, is_in in zip(jaxpr.invars, linear) if is_in}
    for eqn in jaxpr.eqns:
        takes = any(not hasattr(atom, "val") and atom in reached for atom in eqn.invars)
        if takes or any(map(is_ref, eqn.outvars)):
            reached.update(eqn.outvars)
    return [not hasattr(atom, "val") and atom in reached for atom in jaxpr.outvars]


def _holds_functions(eqn: Any) -> bool:
    """Whether an equation calls what is not looked into; a scatter only adds or replaces."""
    if eqn.primitive.name.startswith("scatter"):
        return False
    return any(
        opened(one) is not None or (callable(one) and not isinstance(one, type))
        for value in eqn.params.values()
        for one in (value if isinstance(value, (tuple, list)) else (value,))
    )
