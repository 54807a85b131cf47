"""One run of a custom_vjp's bwd: the cotangents that it returns, and what its jaxpr says of them.

A bwd is written for one device. Whether what it returns is this device's share of a gradient, or
the whole already, follows from what it communicates and from how its cotangents arrive; where it
does not follow, the answer is an error that shows both right forms.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from shardrules.door.jaxprs import CASTS, equations, inner_jaxprs, named_axes
from shardrules.errors import AxisError, CotangentError
from shardrules.hooks.cotangents.hoisting import Shares
from shardrules.hooks.cotangents.origins import NOWHERE, Origin, Origins, Reduction, size_of
from shardrules.hooks.cotangents.refusals import Cotangent, Refusals, quoted
from shardrules.hooks.cotangents.traced import CustomVjpInfo, Forward, Trace
from shardrules.hooks.state import COLLECT
from shardrules.registry.axistypes import AxisType, Effect, show_axes
from shardrules.registry.suggestions import is_library

__all__ = ["Bwd"]


class Bwd:
    """One run of a bwd on ``args``: residuals, then the outputs' cotangents."""

    refusals_of: type[Refusals] = Refusals

    def __init__(self, hooks, bwd, parts: CustomVjpInfo, args):
        self.hooks = hooks
        self.door = hooks.door
        self.bwd = bwd
        self.parts = parts
        self.args = args
        self.refusals = self.refusals_of(self.door, parts)
        self._traced: Trace | None = None
        self._origins: dict[Any, Origins] = {}

    def cotangents(self) -> Any:
        """Run bwd, by its jaxpr."""
        # The checks read the jaxpr: tracing bwd's kernels twice would double the time of the
        # backward pass.
        try:
            return self._trace().run()
        except AxisError as error:  # a gradient that is taken of what came to vary
            if not is_library(self.parts.place) or not hasattr(error, "why"):
                raise
            raise CotangentError(
                f"in the bwd {self.parts.name!r} (at {self.parts.place}), {error.why} "
                f"{self.parts.to_cast(self.door, error.axes)}",
                axes=error.axes,
            ) from None

    def share(self, path, axes: frozenset[str]) -> Any:
        """Return this device's share of a cotangent that bwd sums, or None if it can't be told."""
        trace = self._trace()
        return Shares(self.door, trace, axes).of(trace.paths.index(path))

    def differs(self, path) -> frozenset[str]:
        """Return the axes along which devices may hold different values of one cotangent."""
        # The type may name more: a primal that was cast is still equal along these axes.
        entering = [_axes(one) for one in self._entering()]
        saved = self._forward.saved(len(self._arriving()), len(entering))
        if saved is None:
            return self.mesh_axes
        differ = [one & kept.axes for one, kept in zip(entering, saved)]
        origins = self._from(path, [*differ, *entering[len(saved) :]])
        return frozenset().union(*(one.axes for one in origins.outputs))

    # What the jaxpr shows.

    def check(self, ct: Cotangent) -> None:
        """Raise unless a cast and a psum give this cotangent its primal's type."""
        self._check_sums(ct)
        self._check_whole(ct)
        if ct.missing:
            self._check_type(ct)
            self._check_others(ct)
        if ct.extra or ct.partial:
            self.check_share(ct, ct.extra | ct.partial)

    def check_share(self, ct: Cotangent, axes: frozenset[str]) -> None:
        """Raise unless this cotangent is one device's share of the sum over ``axes``."""
        # It is a share if nothing that it depends on communicates over them, and each cotangent
        # that it depends on varies over them. If one is invariant, the outputs are one value for
        # all devices, and what varies came from a residual, perhaps of a gathered argument: then it
        # may be the whole.
        # Asked of all of bwd first: then it is so for each of its parts.
        for what in self._communicates(self._trace().jaxpr, axes):
            for what in self._communicates(self._sliced(ct.path), axes):
                raise self.refusals.undecided(ct, axes, f"bwd holds {what}")
            break
        arriving = self._arriving()
        leaves = self._leaves(self._origin(ct.path))
        first = len(self._entering()) - len(arriving)
        summed = self._summed_before([i for i in leaves if i < first], axes)
        if summed:
            raise self.refusals.undecided(
                ct,
                summed,
                f"it is made of a residual that the forward summed over {show_axes(summed)} or "
                "gathered, as jax.grad sums there for what is invariant (and not for "
                f"shardrules.vary(w, {quoted(summed)})): no cotangent that varies makes shares "
                "of it",
            )
        if all(axes <= _axes(one) for one in arriving):
            return
        used = self._used(ct.path)
        for i in used:
            whole = axes - _axes(arriving[i])
            if whole:
                raise self.refusals.undecided(
                    ct,
                    whole,
                    f"the cotangent that arrives for output {i} is invariant over "
                    f"{show_axes(whole)}: what varies comes from a residual or an argument, and "
                    "these may be gathered",
                )
        if not used and not self._is_zero(ct.path):
            raise self.refusals.undecided(
                ct, axes, "it depends on no cotangent that arrives, only on residuals"
            )

    def _check_sums(self, ct: Cotangent) -> None:
        """Raise if this cotangent depends on a sum of what is equal on the devices."""
        # The cotangent of an output that is invariant over an axis arrives summed over it; a bwd
        # that is right with the check off (psum, psum_scatter) then gives N times the gradient.
        # Only a forward that itself sums equal values over the axis has such a bwd.
        path, want = ct.path, ct.want
        arriving = frozenset().union(*(t.varying | t.unreduced for t in self._arriving()))
        dropped = (want.varying | want.unreduced) - arriving
        reductions = list(self._communicates(self._trace().jaxpr, self.mesh_axes, reductions=True))
        if not reductions:
            return
        # JAX accepts a bwd that varies as its primal does. It may be right where no kernel
        # dropped the axis (a forward that is more than one reduction); where one did, it is not.
        by = next(self._communicates(self._sliced(path), dropped, reductions=True), None)
        if dropped and by is not None:
            kernel = self._forward.dropping(dropped)
            if kernel is not None or not dropped <= ct.have.varying:
                raise self.refusals.summed(ct, dropped, by, kernel)
        first = len(self._entering()) - len(self._arriving())
        for one in self._reductions(path, arriving):
            equal = one.axes - one.origin.axes
            if equal and any(i >= first for i in self._leaves(one.origin)):
                sizes: set[float | None] = {size_of(equal), size_of(one.axes)}
                # A mean of what is equal changes nothing; where the forward divides by the number
                # of devices, it is the psum that is right with the check off, and that division.
                again = self._of(path).scalings(sizes) - self._forward.scalings(sizes)
                if one.divisor in sizes and again >= 0:
                    continue  # pmean
                summed, averaged = self._forward.equals()
                equal -= summed
                if equal <= averaged and self._of(path).divisions(sizes):
                    continue  # the forward's pmean, differentiated
                if equal:
                    kernel = self._forward.dropping(equal)
                    raise self.refusals.summed(ct, equal, one.text, kernel)

    def _check_whole(self, ct: Cotangent) -> None:
        """Raise if each device would get the sum of all devices' cotangents of one output."""
        # That sum is an invariant output's cotangent. For a primal that varies it is right where
        # the forward made the output by a collective along that axis, since a psum is transposed to
        # the identity. Elsewhere (straight-through estimators, gradients that are replaced) each
        # device has a cotangent of its own.
        arriving = self._arriving()
        for axis in sorted(ct.want.varying):
            if all(axis in one.axes for one in arriving):
                continue
            for i in sorted(self._used(ct.path)):
                if axis in arriving[i].axes:
                    continue
                outputs = self._forward.outputs(len(arriving))
                why = "whether the forward makes it of that primal can't be seen a second time"
                if outputs is not None:
                    have, origin = outputs[i]
                    if axis in have.axes or (ct.index, axis) in origin.crossed:
                        continue
                    why = "the forward does not make it of that primal"
                if i in self._used(ct.path, axis):
                    raise self.refusals.unmoved(ct, axis, i, why)

    def _check_others(self, ct: Cotangent) -> None:
        """Raise if a cotangent that is equal along axes is made of cotangents that differ."""
        # Its primal differs there, so the sum holds the cotangents of other devices' values.
        arriving = self._arriving()
        used = self._used(ct.path)
        outputs = self._forward.outputs(len(arriving))
        axes = ct.missing.intersection(frozenset().union(*(_axes(arriving[i]) for i in used)))
        if not axes or outputs is None:
            return
        moved = {axis for i in used for at, axis in outputs[i][1].crossed if at == ct.index}
        for by in self._communicates(self._sliced(ct.path), axes):
            if not axes & moved:
                raise self.refusals.of_others(ct, axes, by)

    def _check_type(self, ct: Cotangent) -> None:
        """Raise if JAX typed this cotangent invariant and it isn't."""
        # JAX refuses a cotangent that varies less than its primal, and our cast makes it pass:
        # where the type is wrong (an opaque primitive), that error was the only sign of it.
        door = self.door
        for equation in equations(self._sliced(ct.path)):
            name = equation.primitive.name
            if self.hooks.state.known_of(equation.primitive, equation.params) is not None:
                continue
            inputs = equation.invars[:1] if name == "cond" else equation.invars  # its predicate
            if name != "cond" and next(inner_jaxprs(equation.params), None) is not None:
                continue
            entering = frozenset().union(*(door.axis_type(v.aval).varying for v in inputs))
            lost = (entering & ct.missing) - named_axes(equation.params)
            for out in equation.outvars:
                kept = door.axis_type(out.aval)
                if lost - kept.axes:
                    raise self.refusals.lost(ct, lost, lost - kept.axes, name)

    # How they are found.

    @property
    def mesh_axes(self) -> frozenset[str]:
        """The manual mesh axes."""
        return frozenset(self.door.manual_axes())

    def _entering(self) -> Sequence[AxisType]:
        """Return the axis type of each leaf of the arguments; the cotangents' come last."""
        import jax

        return [self._type(leaf) for leaf in jax.tree_util.tree_leaves(self.args)]

    def _arriving(self) -> Sequence[AxisType]:
        import jax

        return [self._type(leaf) for leaf in jax.tree_util.tree_leaves(self.args[-1])]

    def _type(self, leaf: Any) -> AxisType:
        import jax

        if isinstance(leaf, self.door.SymbolicZero):
            return self.door.axis_type(leaf.aval)
        return (
            self.door.axis_type(self.door.typeof(leaf))
            if isinstance(leaf, jax.Array)
            else AxisType()
        )

    def _primals(self) -> Sequence[AxisType]:
        return [self.door.axis_type(aval) for aval in self.parts.in_avals]

    def _leaves(self, origin: Origin) -> set[int]:
        """Return which leaves of the arguments an origin's inputs are."""
        return {self._trace().dynamic[i] for i in origin.inputs}

    def _of(self, path) -> Origins:
        if path not in self._origins:
            self._origins[path] = self._from(path, [_axes(one) for one in self._entering()])
        return self._origins[path]

    def _reductions(self, path, arriving: frozenset[str]) -> Sequence[Reduction]:
        """Return the sums over mesh axes that one cotangent depends on."""
        # A residual that was cast may still be equal, whatever its type. That matters over an axis
        # along which no cotangent differs (they differ along ``arriving``); the forward shows it.
        typed = self._of(path).reductions
        if all(one.axes & one.origin.axes <= arriving for one in typed):
            return typed
        entering = [_axes(one) for one in self._entering()]
        saved = self._forward.saved(len(self._arriving()), len(entering))
        if saved is None:
            return typed
        differ = [one & kept.axes for one, kept in zip(entering, saved)]
        return self._from(path, [*differ, *entering[len(saved) :]]).reductions

    def _summed_before(self, residuals: Sequence[int], axes: frozenset[str]) -> frozenset[str]:
        """Return the axes over which the forward summed a gradient that these residuals hold."""
        # Other sums are statistics, if they were saved with what varies there. A forward that can't
        # be traced again may have done either.
        entering = [_axes(one) for one in self._entering()]
        equal = axes.difference(*(entering[i] for i in residuals))
        asked = axes if self.parts.gradients else equal
        if not asked or not residuals:
            return frozenset()
        saved = self._forward.saved(len(self._arriving()), len(entering))
        if saved is None:
            return asked
        sums = frozenset().union(*(saved[i].sums for i in residuals))
        gradients = frozenset().union(*(saved[i].gradients for i in residuals))
        return axes & gradients | equal & sums

    def _from(self, path, axes: Sequence[frozenset[str]], declared: str = "") -> Origins:
        """Return one cotangent's origins, given the axes along which each argument differs."""
        return Origins(
            self.door,
            self.hooks.state.known_of,
            self.mesh_axes,
            self._sliced(path),
            [Origin(frozenset((at,)), axes[leaf]) for at, leaf in enumerate(self._trace().dynamic)],
            declared,
        )

    def _origin(self, path, declared: str = "") -> Origin:
        origins = self._of(path)
        if declared:
            origins = self._from(path, [_axes(one) for one in self._entering()], declared)
        return functools.reduce(Origin.__or__, origins.outputs, NOWHERE)

    def _used(self, path, declared: str = "") -> set[int]:
        """Return the outputs whose cotangents it holds; without those cast over ``declared``."""
        first = len(self._entering()) - len(self._arriving())
        return {i - first for i in self._leaves(self._origin(path, declared)) if i >= first}

    def _is_zero(self, path) -> bool:
        return all(one.number == 0 for one in self._of(path).outputs)

    @functools.cached_property
    def _forward(self) -> Forward:
        known_of = self.hooks.state.known_of
        primals = [_axes(one) for one in self._primals()]
        return Forward(self.door, known_of, self.mesh_axes, self.parts, primals)

    def _sliced(self, path):
        """Return the jaxpr of what one cotangent depends on."""
        trace = self._trace()
        used = [p == path for p in trace.paths]
        if path not in trace.returned:  # a bwd that returns another structure each time
            used = [True] * len(trace.paths)
        return self.door.dce_jaxpr(trace.jaxpr, used, instantiate=True)[0]

    def _trace(self) -> Trace:
        if self._traced is None:
            self._traced = Trace(self.door, self.bwd, self.args)
        return self._traced

    def _communicates(
        self, jaxpr, axes: frozenset[str], *, reductions: bool = False
    ) -> Iterator[str]:
        """Describe each equation that may move data along ``axes``."""
        for equation in equations(jaxpr):
            name = equation.primitive.name
            known = self.hooks.state.known_of(equation.primitive, equation.params)
            if known is not None:
                yield from self._opaque(known, len(equation.outvars), axes, reductions)
                continue
            over = named_axes(equation.params) & axes
            if (
                over
                and name not in CASTS
                and name != "axis_index"
                and (not reductions or any(word in name for word in _REDUCTIONS))
            ):
                yield f"{name} over {show_axes(over)}"

    def _opaque(
        self, known, output_count: int, axes: frozenset[str], reductions: bool
    ) -> Iterator[str]:
        if known.found is None:
            if self.hooks.state.scope.policy != COLLECT:
                yield f"{known.call}, which has no rule"
            return
        rule = known.found.rule
        if reductions and not any(word in rule.name for word in ("all_reduce", "reduce_scatter")):
            return
        # A kernel that returns nothing (a core_map) writes to refs: one effect speaks for them all.
        for effect in rule.effects(output_count or 1) or (Effect("unknown"),):
            if effect.kind in ("unknown", "typed"):
                yield f"{known.call}, whose rule {rule!r} does not say what it communicates"
            elif set(effect.axes) & axes:
                yield f"{known.call}, whose rule is {rule!r}"


# CustomVjpInfo of the names of JAX's primitives that sum over mesh axes.
_REDUCTIONS = ("psum", "reduce_scatter")


def _axes(type_: AxisType) -> frozenset[str]:
    return type_.varying | type_.unreduced
