"""Run a custom_vjp's bwd, and prove from its jaxpr what the cotangents that it returns are.

A bwd is written for one device. Its communication and the types of the arriving cotangents show
whether it returns this device's share of a gradient or the whole gradient. If they don't, an error
shows both correct forms.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from shardrules.door.jaxprs import SUMS, inner_jaxprs, is_inexact, named_axes, size_of
from shardrules.door.protocols import Jaxpr
from shardrules.errors import AxisError, CotangentError
from shardrules.hooks.cotangents.communication import communicates, declared
from shardrules.hooks.cotangents.linearity import linearity
from shardrules.hooks.cotangents.origins import NOWHERE, Origin, Origins, Reduction
from shardrules.hooks.cotangents.refusals import Cotangent, Refusals, quoted
from shardrules.hooks.cotangents.traced import CustomVjpInfo, Path, Trace, TracedFwd
from shardrules.jaxprs.rewrite import split
from shardrules.jaxprs.walk import equations
from shardrules.paths import is_library
from shardrules.registry.axistypes import AxisType, show_axes


class Bwd:
    """One run of a bwd on ``args``: residuals, then the outputs' cotangents."""

    def __init__(self, hooks: Any, bwd: Any, parts: CustomVjpInfo, args: Sequence[Any]):
        self.hooks = hooks
        self.door = hooks.door
        self.bwd = bwd
        self.parts = parts
        self.args = args
        self.refusals = Refusals(self.door, parts, self._declared)
        self._cached: dict[Any, Origins] = {}
        # For each gradient that bwd takes itself, the axes over which casts sum; filled only while
        # the program is retraced.
        self.inner: list[frozenset[str]] = []

    # hooks/sets/rep.py (JAX 0.5.3 and older) assigns the next four properties, from replication
    # sets.

    @functools.cached_property
    def mesh_axes(self) -> frozenset[str]:
        return frozenset(self.door.manual_axes())

    @functools.cached_property
    def entering(self) -> Sequence[AxisType]:
        """Return the axis type of each leaf of the arguments; cotangents come last."""
        return [self._type(leaf) for leaf in jax.tree_util.tree_leaves(self.args)]

    @functools.cached_property
    def first(self) -> int:
        return len(self.entering) - len(jax.tree_util.tree_leaves(self.args[-1]))

    @functools.cached_property
    def primals(self) -> Sequence[AxisType]:
        return [self.door.axis_type(aval) for aval in self.parts.in_avals]

    def _type(self, leaf: Any) -> AxisType:
        if isinstance(leaf, self.door.SymbolicZero):
            zero: AxisType = self.door.axis_type(leaf.aval)
            return zero
        is_array = isinstance(leaf, jax.Array)
        return self.door.axis_type(self.door.typeof(leaf)) if is_array else AxisType()

    @property
    def arriving(self) -> Sequence[AxisType]:
        return self.entering[self.first :]

    def cotangents(self) -> Any:
        # Run the same jaxpr that the checks read, since tracing bwd's kernels twice would double
        # the time of the backward pass.
        try:
            return self.trace.run()
        except AxisError as error:  # bwd takes the gradient of a value that now varies
            if not is_library(self.parts.place) or not hasattr(error, "why"):
                raise
            raise CotangentError(
                f"in the bwd {self.parts.name!r} (at {self.parts.place}), {error.why} "
                f"{self.parts.to_cast(self.door, error.axes)}",
                axes=error.axes,
            ) from None

    def share(self, path: Path, axes: frozenset[str]) -> Any:
        """Return this device's share of a cotangent that bwd sums; None if that is unproven."""
        # In a branch that only some devices take, the sum would wait for the other devices. But the
        # primal is cast before the branch, and the cast's transpose sums after the branch. So leave
        # out the sums inside the branch, if everything after them is linear in them. All other
        # values that the cotangent depends on are equal along the axes, as the cotangent is.
        # Split the jaxpr at these sums, prove that the rest is linear in the sums' results, and run
        # the rest on the sums' operands.
        trace, jaxpr = self.trace, self.sliced(path)
        sums, after = split(
            jaxpr,
            lambda eqn: (
                eqn.primitive.name in SUMS
                and axes <= named_axes(eqn.params)
                and eqn.params.get("axis_index_groups") is None
                and all(is_inexact(var.aval) for var in eqn.outvars)
            ),
        )
        results = after.invars[: len(after.invars) - len(jaxpr.invars)]
        inputs = [*trace.consts, *trace.arrays]
        if len(jaxpr.outvars) != 1 or len(inputs) != len(jaxpr.constvars) + len(jaxpr.invars):
            return None
        proof = linearity(after, results)
        if proof.summed != frozenset() or proof.rounds:
            return None

        def run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> Any:
            needed = self.door.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]
            return jax.core.eval_jaxpr(needed, consts, *args)

        consts, args = inputs[: len(jaxpr.constvars)], inputs[len(jaxpr.constvars) :]
        summed: list[Any] = []
        others: list[tuple[str, ...]] = []  # the other axes over which each operand is summed
        for eqn in sums:
            over = tuple(sorted(named_axes(eqn.params) - axes))
            summed += eqn.invars
            others += [over] * len(eqn.invars)
        shares = run(jaxpr.replace(outvars=summed), consts, args)
        shares = [jax.lax.psum(x, over) if over else x for x, over in zip(shares, others)]
        return run(after, consts, [*shares, *args])[0]

    def differs(self, path: Path) -> frozenset[str]:
        """Return the axes along which devices may hold different values of one cotangent."""
        # The type may name more axes, since a value that was cast is still equal along them.
        seen = self._argument_origins()
        if seen is None:
            return self.mesh_axes
        return frozenset().union(*(origin.axes for origin in self.origins_of(path, seen).outputs))

    # Checks of the jaxpr.

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
        # The cotangent is a share if it depends on no communication over these axes, and if each
        # arriving cotangent that it depends on varies over them. If an arriving cotangent is
        # invariant, the output has one value for all devices. Then a residual (perhaps a gathered
        # argument) makes this cotangent vary, and it may be the whole gradient.
        if not self._is_silent:
            for call in self._communicates(self.sliced(ct.path), axes):
                raise self.refusals.undecided(ct, axes, f"bwd holds {call}")
        residuals = [i for i in self._leaves(self._origin(ct.path)) if i < self.first]
        summed = self._summed_before(residuals, axes)
        if summed:
            raise self.refusals.undecided(
                ct,
                summed,
                f"it depends on a residual that the forward summed over {show_axes(summed)} or "
                "gathered (jax.grad sums the gradient of an invariant value, but not that of "
                f"shardrules.vary(w, {quoted(summed)})), and such a residual is not one "
                "device's share",
            )
        if all(axes <= axes_of(arriving) for arriving in self.arriving):
            return
        used = self._used(ct.path)
        for i in used:
            whole = axes - axes_of(self.arriving[i])
            part = next((n for n in used if whole <= axes_of(self.arriving[n])), None)
            if whole and part is not None:
                raise self.refusals.mixed(ct, whole, part, i)
            if whole:
                raise self.refusals.undecided(
                    ct,
                    whole,
                    f"the cotangent that arrives for output {i} is invariant over "
                    f"{show_axes(whole)}, so this one varies because of a residual or an argument, "
                    "and these may be gathered",
                )
        is_zero = all(origin.number == 0 for origin in self.origins_of(ct.path).outputs)
        if not used and not is_zero:
            raise self.refusals.undecided(
                ct, axes, "it depends on no cotangent that arrives, only on residuals"
            )

    def _check_sums(self, ct: Cotangent) -> None:
        """Raise if this cotangent depends on a sum of values that are equal on the devices."""
        # The cotangent of an output that is invariant over an axis arrives summed over that axis. A
        # bwd that is right with the check off (it calls psum or psum_scatter) then returns N times
        # the gradient. Such a sum is right only if the forward itself sums equal values over the
        # axis.
        if self._is_silent:
            return
        arriving_axes = frozenset().union(*map(axes_of, self.arriving))
        dropped = axes_of(ct.want) - arriving_axes
        # JAX accepts a cotangent that varies as its primal does. If a kernel made an output
        # invariant over the axis, the cotangent is wrong. Otherwise it may be right (in a forward
        # of several reductions).
        by = next(self._communicates(self.sliced(ct.path), dropped, reductions=True), None)
        if dropped and by is not None:
            kernel = self._forward.dropping(dropped)
            if kernel is not None or not dropped <= ct.have.varying:
                raise self._summed(ct, dropped, by, kernel)
        origins = self.origins_of(ct.path)
        for reduction in self._reductions(ct.path, arriving_axes):
            equal = reduction.axes - reduction.origin.axes
            if not equal or all(i < self.first for i in self._leaves(reduction.origin)):
                continue
            sizes = {size_of(equal), size_of(reduction.axes)}
            if self._is_redundant(reduction, origins, sizes):
                continue
            summed, averaged = self._forward.equals()
            equal -= summed
            if equal <= averaged and origins.divisions(sizes):
                continue  # the forward's pmean, differentiated
            if equal:
                raise self._summed(ct, equal, reduction.text, self._forward.dropping(equal))

    def _summed(
        self, ct: Cotangent, axes: frozenset[str], by: str, kernel: str | None
    ) -> CotangentError:
        cotangents = jax.tree_util.tree_leaves(self.args[-1])
        shapes = [getattr(cotangents[i], "shape", ()) for i in sorted(self._used(ct.path))]
        return self.refusals.summed(ct, axes, by, kernel, shapes)

    def _is_redundant(self, reduction: Reduction, origins: Origins, sizes: set[int | None]) -> bool:
        """Return whether a sum of equal values is a mean, rather than the forward's transpose."""
        # A psum that is right with the check off looks like a mean if it stands beside the
        # transpose of a division in the forward by the number of devices. So bwd must hold all of
        # the forward's divisions in addition to its own means.
        if self._forward.jaxpr is None:
            return not reduction.divisors.isdisjoint(sizes)
        forward = self._forward.origins
        explained = forward.products.isdisjoint(sizes) or _divides(forward.scale, origins.scale)
        return reduction.is_mean(*sizes) and explained

    def _check_whole(self, ct: Cotangent) -> None:
        """Raise if each device would receive the sum of all devices' cotangents of one output."""
        # The cotangent of an invariant output is the sum over all devices. For a varying primal,
        # this sum is right if the forward made the output by a collective along the axis, since a
        # psum's transpose is the identity. Otherwise (straight-through estimators, replaced
        # gradients) each device must get its own cotangent.
        arriving = self.arriving
        for axis in sorted(ct.want.varying):
            if all(axis in type_.axes for type_ in arriving):
                continue
            for i in sorted(self._used(ct.path)):
                if axis in arriving[i].axes:
                    continue
                outputs = self._forward.outputs
                why = "the forward can't be traced again to see whether it depends on that primal"
                averaged = False
                if outputs is not None:
                    have, origin = outputs[i]
                    if axis in have.axes:
                        continue
                    why = "in the forward it does not depend on that primal"
                    if (ct.index, axis) in origin.crossed:
                        why, averaged = self._unscaled(ct, axis)
                if why and i in self._used(ct.path, axis):
                    raise self.refusals.unmoved(ct, axis, i, why, averaged)

    def _unscaled(self, ct: Cotangent, axis: str) -> tuple[str, bool]:
        """Say why the sum is not each device's cotangent, and whether the forward averages."""
        # Find the forward's sums of this primal. If all of them along the axis are means, bwd (or
        # the residuals that the forward saved) must divide by the device count too. If there is no
        # sum, but only a maximum or minimum, each device must get its own part of the cotangent, so
        # the cotangent must differ along the axis.
        if size_of(frozenset((axis,))) == 1:
            return "", False
        sums = [s for s in self._forward.origins.reductions if ct.index in s.origin.inputs]
        means = [s for s in sums if s.is_mean(size_of(s.axes), size_of(s.differing))]
        averaged = ct.want.varying & frozenset().union(*(mean.differing for mean in means))
        sums = [s for s in sums if axis in s.differing]
        size = size_of(averaged)
        if size and sums and all(s in means for s in sums):
            scale = self.origins_of(ct.path, self._argument_origins() or ()).scale
            scale *= self._forward.saved_scale()
            # A mean over elements also divides by their number, if bwd shows that division.
            elements = self._forward.origins.mean_size
            needed = size * (elements if _divides(elements, scale) else 1)
            text = "the forward averages that primal, and bwd doesn't divide by the device count"
            return ("" if _divides(needed, scale) else text), True
        if not sums and self._forward.selects(axis) and axis not in self.differs(ct.path):
            return "the forward keeps the largest or smallest of that primal", False
        return "", False

    def _check_others(self, ct: Cotangent) -> None:
        """Raise if a cotangent is equal along axes over which its primal and others differ."""
        # Such a cotangent is a sum that includes the cotangents of other devices' values.
        used = self._used(ct.path)
        outputs = self._forward.outputs
        axes = ct.missing & frozenset().union(*(axes_of(self.arriving[i]) for i in used))
        if not axes or outputs is None:
            return
        moved = {axis for i in used for at, axis in outputs[i][1].crossed if at == ct.index}
        for by in self._communicates(self.sliced(ct.path), axes):
            if not axes & moved:
                raise self.refusals.of_others(ct, axes, by)

    def _check_type(self, ct: Cotangent) -> None:
        """Raise if JAX wrongly typed this cotangent as invariant."""
        # JAX rejects a cotangent that varies less than its primal, but our cast makes JAX accept
        # it. If its type is wrong (as an opaque primitive's may be), the cast would hide the only
        # sign, JAX's error.
        for equation in equations(self.sliced(ct.path)):
            name = equation.primitive.name
            if self.hooks.state.opaque_call_of(equation.primitive, equation.params) is not None:
                continue
            inputs = equation.invars[:1] if name == "cond" else equation.invars  # its predicate
            if name != "cond" and next(inner_jaxprs(equation.params), None) is not None:
                continue
            entering = frozenset().union(*(self.door.axis_type(v.aval).varying for v in inputs))
            lost = (entering & ct.missing) - named_axes(equation.params)
            for out in equation.outvars:
                kept = self.door.axis_type(out.aval)
                if lost - kept.axes:
                    raise self.refusals.lost(ct, lost, lost - kept.axes, name)

    # Lookups in the jaxprs.

    @functools.cached_property
    def trace(self) -> Trace:
        look = self.hooks.state.here.look
        with dataclasses.replace(look, inner=self.inner):
            trace = self._trace()
        if look.inner is not None:
            look.inner += self.inner
        return trace

    def _trace(self) -> Trace:
        kept = self.hooks.state.here.transpose.bwds
        leaves, structure = jax.tree_util.tree_flatten(self.args)
        if kept is None or not all(isinstance(leaf, jax.Array) for leaf in leaves):
            return Trace(self.door, self.bwd, self.args)
        # To place casts, bwd was traced already, since its sums decide where they stand: run the
        # same trace. The entry also holds the function, so that no other function gets its id.
        key = id(self.parts.rule.bwd), structure, *map(self.door.typeof, leaves)
        if key not in kept:
            kept[key] = self.parts.rule.bwd, Trace(self.door, self.bwd, self.args)
        trace: Trace = kept[key][1]
        return trace.of(self.args)

    @functools.cached_property
    def _is_silent(self) -> bool:
        return not any(self._communicates(self.trace.jaxpr, self.mesh_axes))

    @functools.cached_property
    def _forward(self) -> TracedFwd:
        return TracedFwd(self)

    def _argument_origins(self) -> list[Origin] | None:
        """Return each argument's origin as fwd shows it; None if fwd can't be traced again.

        An origin here holds the axes along which the argument differs, and its value if it holds a
        single number.
        """
        saved, typed = self._forward.saved, self._typed
        if saved is None:
            return None
        kept = [Origin(axes=a.axes & b.axes, number=b.number) for a, b in zip(typed, saved)]
        return kept + typed[len(saved) :]

    @property
    def _typed(self) -> list[Origin]:
        return [Origin(axes=axes_of(type_)) for type_ in self.entering]

    def origins_of(self, path: Path, seen: Sequence[Origin] = (), declared: str = "") -> Origins:
        """Return one cotangent's origins, from the types of bwd's arguments or from ``seen``."""
        kept = not seen and not declared
        if kept and path in self._cached:
            return self._cached[path]
        seen = seen or self._typed
        inputs = [
            seen[leaf]
            if seen[leaf].number is not None
            else dataclasses.replace(seen[leaf], inputs=frozenset((at,)))
            for at, leaf in enumerate(self.trace.dynamic)
        ]
        opaque_call_of, jaxpr = self.hooks.state.opaque_call_of, self.sliced(path)
        origins = Origins(self.door, opaque_call_of, self.mesh_axes, jaxpr, inputs, declared)
        if kept:
            self._cached[path] = origins
        return origins

    def _leaves(self, origin: Origin) -> set[int]:
        return {self.trace.dynamic[i] for i in origin.inputs}

    def _origin(self, path: Path, declared: str = "") -> Origin:
        origins = self.origins_of(path, declared=declared)
        return functools.reduce(Origin.__or__, origins.outputs, NOWHERE)

    def _used(self, path: Path, declared: str = "") -> set[int]:
        """Return the outputs whose cotangents a cotangent needs, except casts over ``declared``."""
        leaves = self._leaves(self._origin(path, declared))
        return {i - self.first for i in leaves if i >= self.first}

    def _reductions(self, path: Path, arriving: frozenset[str]) -> Sequence[Reduction]:
        # A residual that was cast may still be equal on the devices; only the forward shows that.
        # It matters only along axes along which no arriving cotangent differs.
        typed = self.origins_of(path).reductions
        if all(reduction.differing <= arriving for reduction in typed):
            return typed
        seen = self._argument_origins()
        return typed if seen is None else self.origins_of(path, seen).reductions

    def _summed_before(self, residuals: Sequence[int], axes: frozenset[str]) -> frozenset[str]:
        """Return the axes over which the forward summed a gradient that these residuals hold."""
        # If another residual varies over the axis, saved sums are statistics rather than gradients.
        # A forward that can't be traced again may hold either.
        equal = axes.difference(*(axes_of(self.entering[i]) for i in residuals))
        suspect = axes if self.parts.gradients else equal
        if not suspect or not residuals:
            return frozenset()
        saved = self._forward.saved
        if saved is None:
            return suspect
        sums = frozenset().union(*(saved[i].sums for i in residuals))
        gradients = frozenset().union(*(saved[i].gradients for i in residuals))
        return axes & gradients | equal & sums

    def sliced(self, path: Path) -> Jaxpr:
        trace = self.trace
        used = [p == path for p in trace.paths]
        if path not in trace.returned:  # a bwd that returns a different structure each time
            used = [True] * len(trace.paths)
        jaxpr: Jaxpr = self.door.dce_jaxpr(trace.jaxpr, used, instantiate=True)[0]
        return jaxpr

    def _declared(self, ct: Cotangent, axes: frozenset[str]) -> str:
        """Say which declared rule over some axes forward or bwd relies on; empty if none."""
        jaxprs = [j for j in (self._forward.jaxpr, self.sliced(ct.path)) if j is not None]
        return next(filter(None, (declared(self.hooks.state, j, axes) for j in jaxprs)), "")

    def _communicates(self, jaxpr: Jaxpr, axes: frozenset[str], **only: bool) -> Iterator[str]:
        return communicates(self.hooks.state, jaxpr, axes, **only)


def axes_of(type_: AxisType) -> frozenset[str]:
    return type_.varying | type_.unreduced


def _divides(number: float, scale: float) -> bool:
    return math.isclose(scale / number, max(1, round(scale / number)), rel_tol=1e-5)
