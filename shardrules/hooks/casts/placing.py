"""Place the casts of tangents at a minimum cut, as ``install()`` does unless ``casts="late"``.

JAX casts as late as it can. In the backward pass the cast becomes a psum at the same place: in
every step of a scan, or over the many rows to which a single row was broadcast. So just before JAX
transposes the linear part of a shard_map's body (``linear``), the hooks move its casts. Nothing
else in the program changes: the forward pass, the residuals and the equations of a bwd stay.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from shardrules.door import watching
from shardrules.door.internals import Door
from shardrules.door.jaxprs import is_differentiated
from shardrules.door.patching import Patches
from shardrules.door.protocols import Eqn, Jaxpr, Var
from shardrules.hooks.casts.cheapest import (
    Cost,
    cast_at,
    cheapest,
    cost,
    cost_as_traced,
    cost_unchecked,
    exceptions,
    in_the_way,
)
from shardrules.hooks.casts.cuts import Limits
from shardrules.hooks.casts.linear import NONE, Axes, BwdSums, Graph, Unplaceable, bytes_of
from shardrules.hooks.casts.writer import Writer
from shardrules.hooks.cotangents.communication import moved_by_kernels
from shardrules.hooks.cotangents.custom_vjp import UnreadBwd
from shardrules.hooks.cotangents.inner_sums import INNER, only_casts_sum
from shardrules.hooks.cotangents.linearity import linearity
from shardrules.hooks.cotangents.summed_shares import Shares, absent_tangents, gradient_over
from shardrules.hooks.notes import PlacedCast, Placement
from shardrules.hooks.state import Hooks
from shardrules.hooks.types.identities import MARK
from shardrules.jaxprs.walk import equations, gradient_sums, named, transposed_sums


class CastHooks(Hooks):
    def install(self, patches: Patches) -> None:
        patches.attribute(*self.door.owner("linearize"), self._linearize)
        for key in ("older_backward_pass", "backward_pass", "backward_pass3"):
            if getattr(self.door, key) is not None:
                transpose = getattr(self.door, key)
                patches.attribute(*self.door.owner(key), functools.partial(self._run, transpose))

    def _linearize(self, *args: Any, **kwargs: Any) -> Any:
        # The count is in the scope, and so in JAX's trace key. An inner jit that takes a gradient
        # is therefore traced again for this derivative.
        scope = self.state.scope
        if scope.active and (scope.casts == "cheapest" or scope.notes is not None):
            scope = dataclasses.replace(scope, derivatives_count=scope.derivatives_count + 1)
        with self.state.enter(scope):
            return self.door.linearize(*args, **kwargs)

    def _run(
        self,
        transpose: Callable[..., Any],
        jaxpr: Jaxpr,
        transform_stack: Any,
        consts: Sequence[Any],
        primals_in: Sequence[Any],
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        # Each transposition in JAX comes here. Three cases stay as JAX made them: a program inside
        # one whose casts are placed already, a program outside the check, and one whose casts
        # nobody asked to place (it still gets ``shares``). For all others, first note why gradients
        # may differ with the check off. Then find the cheapest casts, which go into the program
        # only if somebody asked for them, and let JAX transpose it.
        self.state.record_gradient()
        if self.state.here.transpose.placed or not self.door.checking():
            return transpose(jaxpr, transform_stack, consts, primals_in, *rest, **kwargs)
        asked, values = self._asked(jaxpr), [*consts, *primals_in]
        # Computed on first use: only some bwds and decisions need it.
        shares = functools.cache(lambda: self._shares(jaxpr, values))
        notes = self.state.scope.notes
        if not asked and notes is None:
            with dataclasses.replace(self.state.here.transpose, shares=shares):
                return transpose(jaxpr, transform_stack, consts, primals_in, *rest, **kwargs)
        within: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if notes is not None and self.state.scope.unchecked == "on":
            notes.reasons_to_leave += shares().reasons_to_leave()
            look, over = self.state.here.look, shares().over
            if over and look.inner is not None and only_casts_sum(self.door, jaxpr):
                look.inner.append(over)  # it depends on how the enclosing bwd uses these sums
                within = jax.named_scope(INNER)
            elif over and not look.pulls:
                notes.reasons_to_leave.append(gradient_over(over))
        cotangents = rest[0] if rest else next(iter(kwargs.values()))
        # A program that is transposed inside this one is part of it: its casts are placed here too.
        frame = dataclasses.replace(self.state.here.transpose, placed=True, bwds={}, shares=shares)
        with frame, within:
            placed = self._placed(jaxpr, values, cotangents, asked)
            if not asked:
                placed = jaxpr
            if placed is not jaxpr and self.door.older_backward_pass is not None:
                arguments = placed, transform_stack, consts, primals_in, cotangents
                return self._transpose(transpose, *arguments)
            return transpose(placed, transform_stack, consts, primals_in, *rest, **kwargs)

    def _transpose(
        self,
        transpose: Callable[..., Any],
        jaxpr: Jaxpr,
        transform_stack: Any,
        consts: Sequence[Any],
        primals_in: Sequence[Any],
        cotangents: Any,
    ) -> Any:
        """Transpose a program that casts residuals, if JAX needs it to be all linear."""
        # Evaluate the equations of residuals first, as shard_map's own transpose does in these
        # versions of JAX. Then transpose the rest, which is all linear.
        door = self.door
        linear = [isinstance(x, door.UndefinedPrimal) for x in primals_in]
        whole = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
        of_residuals, of_tangents, *_ = door.partial_eval_jaxpr(
            door.close_jaxpr(whole), [False] * len(consts) + linear, True
        )
        values = [*consts, *(x for x, is_in in zip(primals_in, linear) if not is_in)]
        residuals = door.jaxpr_as_fun(of_residuals)(*values)
        tangents = [x for x, is_in in zip(primals_in, linear) if is_in]
        operands = (*residuals, *tangents)
        returned = transpose(of_tangents.jaxpr, transform_stack, (), operands, cotangents)
        gradients = iter(returned[len(residuals) :])
        return [
            next(gradients) if is_in else door.Zero(var.aval)
            for is_in, var in zip(linear, jaxpr.invars)
        ]

    def _asked(self, jaxpr: Jaxpr) -> bool:
        """Return whether ``install`` or ``place_casts`` asks to place a program's casts."""
        scope = self.state.scope
        return (scope.active and scope.casts == "cheapest") or bool(named(jaxpr, MARK))

    def _linear(self, jaxpr: Jaxpr, values: Sequence[Any]) -> list[bool]:
        """Return whether each input is a tangent."""
        tangents = tuple(filter(None, (self.door.UndefinedPrimal, self.door.GradAccum)))
        # Up to JAX 0.12, constants are the first inputs.
        return [isinstance(x, tangents) for x in values[len(jaxpr.constvars) :]]

    def _is_opaque(self, eqn: Eqn) -> bool:
        return self.state.opaque_call_of(eqn.primitive, eqn.params) is not None

    def _shares(self, jaxpr: Jaxpr, values: Sequence[Any]) -> Shares:
        # With the check off, the inner gradient's sums were each device's own shares.
        again = self.state.here.look.order > 1 and self.state.scope.derivatives_count == 0
        return Shares(self.door, self._is_opaque, jaxpr, self._linear(jaxpr, values), again)

    def _placed(self, jaxpr: Jaxpr, values: Sequence[Any], cotangents: Any, asked: bool) -> Any:
        """Return the program with its casts placed, or unchanged if that saves too little."""
        # Build the graph, and return early if even a lower bound shows that no cast can save bytes.
        # Settle the graph: trace the bwds to learn what they sum. Find the cheapest labels. Write
        # the program with them if they save bytes, or if they cost the same and cast at a border.
        # Note the result.
        linear = self._linear(jaxpr, values)
        wanted = [not isinstance(ct, self.door.Zero) for ct in cotangents]
        again = self.state.scope.derivatives_count > 0
        function, before_bytes = "", 0

        def make() -> Graph:
            return Graph(self.door, jaxpr, linear, wanted, self._is_opaque, again)

        def settled() -> Graph:
            graph = make()
            graph.settle(self._sums)
            return graph

        try:
            graph = make()
            function, before = graph.function, cost_as_traced(graph)
            off = cost_unchecked(graph)
            is_explained = self.state.scope.notes is not None
            is_watched = bool(watching.cast_listeners) and not before.within(off)
            if not before.bytes and not is_explained:
                return jaxpr
            borders, limits = graph.borders, None
            if not (is_explained or is_watched or borders):
                limits = Limits(graph)
                if _saves_little(before, limits.least_bytes, off):
                    return jaxpr  # as for most programs
            if graph.settle(self._sums) or limits is None:
                limits = Limits(graph)
            before = cost_as_traced(graph)
            before_bytes = before.bytes
            labels = cheapest(limits)
            after = cost(graph, labels)
            least = min(before, after) if after.within(before) else before
            beyond = exceptions(settled, least) if is_explained or is_watched else ()
            way = in_the_way(settled, least) if is_explained else ""
            placed, after_bytes, casts = jaxpr, before_bytes, list[PlacedCast]()
            is_better = after < before and after.within(before)
            saves = is_better and not _saves_little(before, after.bytes, off)
            # At equal cost, prefer casts at inputs that are reordered before their use.
            nearer = [
                graph.counts(new - old)
                for new, old in zip(cast_at(borders, labels), graph.cast_as_traced(borders))
            ]
            at_borders = any(nearer) and after.within(before)
            if saves or at_borders:
                writer = Writer(self, graph, labels)
                placed = writer.jaxpr(jaxpr, (), [atom.aval for atom in jaxpr.outvars])
                after_bytes, casts = after.bytes, graph.placed(labels)
            reached = casts if saves or at_borders else ()
            note = Placement(
                before_bytes,
                after_bytes,
                tuple(reached),
                asked,
                "",
                off.bytes,
                beyond,
                at_borders,
                way,
            )
        except Exception as error:  # the program as traced is correct, so its casts stay  # noqa: BLE001
            text = str(error).splitlines()[0] if str(error) else ""
            why = text if isinstance(error, Unplaceable) else f"{type(error).__name__}: {text}"
            placed, note = jaxpr, Placement(before_bytes, before_bytes, (), asked, why)
        self.state.note_placement(note, function)
        return placed

    def _sums(self, eqn: Eqn) -> BwdSums:
        """Return the sums of a custom_vjp's cotangents, for ``Graph.settle``."""
        # If bwd returns a cotangent that is already summed over an axis, the axis is not in
        # ``moves``, since an earlier cast would only add a psum. Over all other axes, bwd may get
        # shares of a cotangent instead of their sum, and then its results are summed.
        count = eqn.params["num_res"]
        arriving = self._varying((*eqn.invars[:count], *eqn.outvars))
        try:
            run = _TracedBwd(self, eqn, NONE)
        except UnreadBwd:  # keep its types, so that it sums the same wherever the casts stand
            return BwdSums([], NONE, None)
        absent = absent_tangents(eqn)
        tangents = {i: atom for i, atom in enumerate(eqn.invars[count:]) if not absent[i]}
        sums = [
            (bytes_of(atom.aval), run.summed[i])
            for i, atom in tangents.items()
            if run.summed.get(i)
        ]
        fixed, differentiates = NONE, any(map(is_differentiated, equations(run.jaxpr)))
        # If bwd differentiates a function whose gradient is zero, no equation shows that. But bwd
        # then ignores a cotangent.
        if differentiates or run.ignores_a_cotangent:
            # If a residual is invariant, bwd itself sums a gradient with respect to it. If the
            # residual is cast, bwd returns a share instead, and the hooks sum it.
            sums += transposed_sums(run.jaxpr)
            every = frozenset(self.door.manual_axes())
            try:
                moved = _TracedBwd(self, eqn, arriving)
                _TracedBwd(self, eqn, every, every)
            except Exception:  # a pullback saved by fwd accepts only its own types  # noqa: BLE001
                return BwdSums(sums, NONE, None)
        if differentiates:
            fixed = self._needed_inside(run, moved)
            run = moved
        whole: set[str] = set()  # the axes over which bwd returns a cotangent already summed
        for i, atom in tangents.items():
            if not run.zeros[i]:
                whole |= arriving - self._varying([atom]) - run.summed.get(i, NONE)
        moves = (arriving & NONE.union(*run.summed.values())) - whole - fixed
        by_itself = None if run.linear_in is None else run.linear_in | fixed
        return BwdSums(sums, moves, by_itself, differentiates)

    def _needed_inside(self, run: _TracedBwd, moved: _TracedBwd) -> Axes:
        """Return the axes of the gradient sums that must stay inside a bwd."""
        # A sum must stay inside if the cotangents are multiplied by it, or if shardrules can't tell
        # how they enter it. It must also stay if a result needs it and the hooks don't sum that
        # result afterwards.
        if run.linear_in is None or moved.linear_in is None:
            return gradient_sums(run.jaxpr)
        axes = linearity(run.jaxpr, run.cotangents).summed_of_others
        returned = [i for i, zero in enumerate(run.zeros) if not zero]
        for position, i in enumerate(returned):
            used = [position == other for other in range(len(returned))]
            sliced = self.door.dce_jaxpr(run.jaxpr, used, instantiate=True)[0]
            axes |= gradient_sums(sliced) - moved.summed.get(i, NONE)
        return axes

    def _varying(self, atoms: Sequence[Var]) -> Axes:
        return NONE.union(*(self.door.axis_type(atom.aval).varying for atom in atoms))


class _TracedBwd:
    """The bwd of a custom_vjp's linear part, traced with cast residuals and cotangents."""

    def __init__(self, hooks: CastHooks, eqn: Eqn, residuals: Axes, cotangents: Axes = NONE):
        door, count = hooks.door, eqn.params["num_res"]
        wanted = [(atom.aval, residuals) for atom in eqn.invars[:count]]
        wanted += [(door.cotangent_aval(var.aval), cotangents) for var in eqn.outvars]
        avals = [
            door.with_axis_type(aval, door.axis_type(aval).vary(*axes))
            if door.can_cast(aval)
            else aval
            for aval, axes in wanted
        ]
        self.zeros: list[bool] = []  # whether each cotangent that bwd returns is a known zero

        def run(*flat: Any) -> Any:
            returned = eqn.params["bwd"].call_wrapped(*flat)
            if returned and isinstance(returned[0], (list, tuple)):  # with logs, since JAX 0.11
                returned = returned[0]
            nothing = (door.Zero, door.SymbolicZero, type(None))
            self.zeros = [isinstance(x, nothing) for x in returned]
            return [x for x, zero in zip(returned, self.zeros) if not zero]

        recorded: list[tuple[int, frozenset[str]]] = []
        frame = dataclasses.replace(hooks.state.here.transpose, summed=recorded)
        with frame:
            self.jaxpr = door.jaxpr_of(run, avals)
        self.summed: dict[int, Axes] = dict(recorded)  # the axes of the hooks' sum of each result
        # Since JAX 0.11, closed-over values come first.
        self.cotangents = self.jaxpr.invars[len(self.jaxpr.invars) - len(eqn.outvars) :]
        used = set(map(id, self.jaxpr.outvars))
        for equation in equations(self.jaxpr):
            used.update(map(id, equation.invars))
        self.ignores_a_cotangent = not used.issuperset(map(id, self.cotangents))
        # The axes over which bwd sums; None if it is not proven linear, rounds or prints.
        self.linear_in: Axes | None = NONE
        for jaxpr in self._by_precision(door):
            proof = linearity(jaxpr, self.cotangents, kernels=True)
            if proof.rounds or proof.is_narrow or proof.shows or proof.summed is None:
                self.linear_in = None
            elif self.linear_in is not None:
                self.linear_in |= proof.summed
        if self.linear_in is not None:
            every = frozenset(door.manual_axes())
            self.linear_in |= moved_by_kernels(hooks.state, self.jaxpr, every)

    def _by_precision(self, door: Door) -> Iterator[Jaxpr]:
        """Yield the program; if its results have several dtypes, a part for each result."""
        outs = self.jaxpr.outvars
        if len({getattr(atom.aval, "dtype", None) for atom in outs}) < 2:
            yield self.jaxpr
            return
        for number in range(len(outs)):
            used = [n == number for n in range(len(outs))]
            yield door.dce_jaxpr(self.jaxpr, used, instantiate=True)[0]


def _saves_little(before: Cost, least: int, off: Cost) -> bool:
    """Return whether casts that sum ``least`` bytes save too little to be placed."""
    # If the traced casts cost no more than with the check off, require a saving of 0.1%. If they
    # sum more bytes, require any saving. If they only send more bytes, no saving is too little.
    saved = before.bytes - least
    if before.within(off):
        return 1000 * saved < before.bytes or not before.bytes
    return saved <= 0 and before.bytes > off.bytes
