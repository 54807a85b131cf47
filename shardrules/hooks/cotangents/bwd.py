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
from shardrules.hooks.cotangents.origins import (
    NOWHERE,
    Origin,
    Origins,
    Reduction,
    divides,
    makes_zeros,
)
from shardrules.hooks.cotangents.traced import CustomVjpInfo, Forward, Trace
from shardrules.hooks.state import COLLECT
from shardrules.registry.axistypes import AxisType, Effect, show_axes
from shardrules.registry.suggestions import is_library

__all__ = ["Bwd"]


class Bwd:
    """One run of a bwd.

    Args:
      hooks: the hooks.
      bwd: the function.
      parts: what it belongs to.
      args: what it was called with: residuals, and the outputs' cotangents.
    """

    def __init__(self, hooks, bwd, parts: CustomVjpInfo, args):
        self.hooks = hooks
        self.door = hooks.door
        self.bwd = bwd
        self.parts = parts
        self.args = args
        self._traced: Trace | None = None
        self._origins: dict[Any, Origins] = {}

    def cotangents(self) -> Any:
        """Run bwd.

        bwd's jaxpr is asked about each of them. So bwd is traced to that jaxpr and this is what
        runs: tracing its kernels twice would double the time that the backward pass takes to trace.
        """
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

    # What the jaxpr shows.

    def check_share(self, path, axes: frozenset[str], have: AxisType, want: AxisType) -> None:
        """Raise unless this cotangent is one device's share of the sum over ``axes``.

        It is, if nothing that it depends on communicates over them, and each cotangent on which it
        depends varies over them. Where one is invariant, the outputs are one value for all devices,
        and what varies came from a residual: of an argument that was gathered before, it may be
        the whole.

        Raises:
          CotangentError: naming the cause, and both right ways to write the bwd.
        """
        # Asked of all of bwd first: then it is so for each of its parts.
        for what in self._communicates(self._trace().jaxpr, axes):
            for what in self._communicates(self._sliced(path), axes):
                raise self._undecided(path, axes, have, want, f"bwd holds {what}")
            break
        arriving = self._arriving()
        leaves = self._leaves(self._origin(path))
        first = len(self._entering()) - len(arriving)
        summed = self._summed_before([i for i in leaves if i < first], axes)
        if summed:
            raise self._undecided(
                path,
                summed,
                have,
                want,
                f"it is made of a residual that the forward summed over {show_axes(summed)} or "
                "gathered, as jax.grad sums there for what is invariant (and not for "
                f"shardrules.vary(w, {_quoted(summed)})): no cotangent that varies makes shares "
                "of it",
            )
        if all(axes <= _axes(one) for one in arriving):
            return
        used = [i - first for i in leaves if i >= first]
        for i in used:
            whole = axes - _axes(arriving[i])
            if whole:
                raise self._undecided(
                    path,
                    whole,
                    have,
                    want,
                    f"the cotangent that arrives for output {i} is invariant over "
                    f"{show_axes(whole)}: what varies comes from a residual or an argument, and "
                    "these may be gathered",
                )
        if not used and not self._is_zero(path):
            raise self._undecided(
                path, axes, have, want, "it depends on no cotangent that arrives, only on residuals"
            )

    def check_sums(self, path, have: AxisType, want: AxisType) -> None:
        """Raise if what this cotangent depends on sums what is equal on the devices it sums over.

        The cotangent of an output that is invariant over an axis arrives summed over it; a bwd that
        is right with the check off (psum, psum_scatter) then gives N times the gradient. Only a
        forward that itself sums equal values over the axis has such a bwd.

        Raises:
          CotangentError: naming the reduction, and the right forms.
        """
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
            if kernel is not None or not dropped <= have.varying:
                raise self._summed(path, dropped, have, want, by, kernel)
        first = len(self._entering()) - len(self._arriving())
        for one in self._reductions(path, arriving):
            equal = one.axes - one.origin.axes
            if equal and any(i >= first for i in self._leaves(one.origin)):
                sizes: set[float] = {self._size(equal), self._size(one.axes)}
                if one.divisor in sizes:
                    continue  # pmean
                summed, averaged = self._forward.equals(self._size)
                equal -= summed
                if equal <= averaged and divides(self._sliced(path), sizes):
                    continue  # the forward's pmean, differentiated
                if equal:
                    raise self._summed(
                        path, equal, have, want, one.text, self._forward.dropping(equal)
                    )

    def check_others(
        self, path, index: int, axes: frozenset[str], have: AxisType, want: AxisType
    ) -> None:
        """Raise if a cotangent that is the same along ``axes`` is made of cotangents that differ.

        Its primal differs there, so it is of what other devices' outputs owe to this device's
        value: nothing, where the forward does not move it.

        Raises:
          CotangentError: naming what moves them in bwd, and the right forms.
        """
        arriving = self._arriving()
        first = len(self._entering()) - len(arriving)
        used = [i - first for i in self._leaves(self._origin(path)) if i >= first]
        axes = axes.intersection(frozenset().union(*(_axes(arriving[i]) for i in used)))
        if not axes or self._forward.moves(index, axes):
            return
        for by in self._communicates(self._sliced(path), axes):
            raise self._of_others(path, axes, have, want, by)

    def check_invariant(self, path, axes: frozenset[str]) -> None:
        """Raise unless a cotangent's type says rightly that it is invariant over ``axes``.

        JAX refuses a cotangent that varies less than its primal, and a cast makes it pass: where
        the type is wrong (an opaque primitive that JAX types as invariant), that error was the
        only sign of it.

        Raises:
          CotangentError: naming the equation that lost the axes.
        """
        door = self.door
        for equation in equations(self._sliced(path)):
            name = equation.primitive.name
            if self.hooks.state.known_of(equation.primitive, equation.params) is not None:
                continue
            inputs = equation.invars[:1] if name == "cond" else equation.invars  # its predicate
            if name != "cond" and next(inner_jaxprs(equation.params), None) is not None:
                continue
            entering = frozenset().union(*(door.axis_type(v.aval).varying for v in inputs))
            lost = (entering & axes) - named_axes(equation.params)
            for out in equation.outvars:
                kept = door.axis_type(out.aval)
                if lost - kept.axes:
                    from jax.tree_util import keystr

                    names = _quoted(lost - kept.axes)
                    raise CotangentError(
                        f"the bwd {self.parts.name!r} returns a cotangent at output{keystr(path)} "
                        f"that is typed invariant over {{{names}}}, but it depends on {name}, "
                        f"which takes what varies over them and whose result JAX types as "
                        f"invariant. Cast its result: shardrules.vary(x, {names}).",
                        path=path,
                        axes=lost,
                    )

    # The errors.

    def _undecided(self, path, axes, have, want, why: str) -> CotangentError:
        from jax.tree_util import keystr

        names = _quoted(axes)
        if is_library(self.parts.place):
            return self._not_yours(path, axes, have, want, why)
        if axes & want.unreduced:
            return CotangentError(
                f"the bwd {self.parts.name!r} returns a cotangent at output{keystr(path)} that is "
                f"{have}, for a primal that is reduced over {show_axes(axes)}: it is to be each "
                f"device's share, and whether it is can't be told, because {why}. If it is, return "
                f"jax.lax.pcast(ct, ({names},), to='unreduced') from bwd; if it is the full sum "
                f"already, return that of ct / jax.lax.axis_size(({names},)).",
                path=path,
                axes=axes,
                have=have,
                want=want,
            )
        whole = f"shardrules.already_summed(ct, {names})"
        if not self.door.typed:
            whole = f"jax.lax.pmean(ct, ({names},))"
        share = (
            "; a bwd that serves varying ones too is to return its share as it is, and this primal "
            f"to be cast where the function is called, shardrules.vary(x, {names})"
            if self.door.typed
            else ""
        )
        return CotangentError(
            f"the bwd {self.parts.name!r} returns a cotangent at output{keystr(path)} that is "
            f"{have}, for a primal that asks for {want}. One psum over {{{names}}} is missing if "
            "it is this device's share, and none if it is the full sum already; which of them "
            f"can't be told, because {why}. If it is a share, return jax.lax.psum(ct, ({names},)) "
            f"from bwd. If it is summed already, return {whole}. Both are for primals that are "
            f"invariant over {{{names}}}, as here{share}.",
            path=path,
            axes=axes,
            have=have,
            want=want,
        )

    def _not_yours(self, path, axes, have, want, why: str) -> CotangentError:
        from jax.tree_util import keystr

        return CotangentError(
            f"the bwd {self.parts.name!r} (at {self.parts.place}) returns a cotangent at "
            f"output{keystr(path)} that is {have}, for a primal that asks for {want}, and whether "
            f"one psum over {{{_quoted(axes)}}} is missing can't be told, because {why}. "
            f"{self.parts.to_cast(self.door, axes)}",
            path=path,
            axes=axes,
            have=have,
            want=want,
        )

    def _summed(self, path, axes, have, want, by: str, kernel: str | None) -> CotangentError:
        from jax.tree_util import keystr

        names = _quoted(axes)
        return CotangentError(
            f"the bwd {self.parts.name!r} returns a cotangent at output{keystr(path)} that it "
            f"reduces over {{{names}}} (by {by}), but the forward's outputs are "
            f"invariant over {{{names}}}{f' (by {kernel})' if kernel else ''}, so the cotangent "
            "that bwd receives is the sum over them already, and would be counted once for each "
            "device. After an all-reduce, pass it on:\n    return (ct,)\nafter an all-gather, "
            f"take this device's slice:\n    i = jax.lax.axis_index({sorted(axes)[0]!r})\n"
            "    return (jax.lax.dynamic_slice_in_dim(ct, i * n, n),)\n"
            f"and after the identity of a primal that is invariant over {{{names}}}, pass it on "
            f"too. {self._for_both(names)}",
            path=path,
            axes=axes,
            have=have,
            want=want,
        )

    def _of_others(self, path, axes, have, want, by: str) -> CotangentError:
        from jax.tree_util import keystr

        names = _quoted(axes)
        cast = f"shardrules.vary(jax.lax.psum(ct, ({names},)), {names})"
        copies = f"; to keep copies equal, say so by a cast:\n    return ({cast},)"
        return CotangentError(
            f"the bwd {self.parts.name!r} returns a cotangent at output{keystr(path)} that it "
            f"reduces over {{{names}}} (by {by}), for a primal that varies over {{{names}}} and "
            "that the forward does not move there: other devices' cotangents are those of other "
            "values, and JAX itself sums those of a value that was cast. Return this device's:\n"
            f"    return (ct,){copies if self.door.typed else ''}",
            path=path,
            axes=axes,
            have=have,
            want=want,
        )

    def _for_both(self, names: str) -> str:
        """Say what to do where one function sums shares at one use, and equal copies at another."""
        use = "Where the same function is to sum equal copies of such a primal, as the outer f of "
        if not self.door.typed:  # nothing can be cast there
            return (
                f"{use}f(f(x)) does, call another one there, whose bwd counts the copies:\n"
                f"    return (ct * jax.lax.psum(1, ({names},)),)"
            )
        return (
            f"{use}f(f(x)) does, cast it at the call, f(shardrules.vary(x, {names})): then these "
            "forms are right for both uses."
        )

    # How they are found.

    @property
    def mesh_axes(self) -> frozenset[str]:
        """The manual mesh axes."""
        return frozenset(self.door.manual_axes())

    def _size(self, axes: frozenset[str]) -> int:
        import jax

        return jax.lax.psum(1, tuple(sorted(axes)))

    def _entering(self) -> Sequence[AxisType]:
        """Return the axis type of each leaf of the arguments; the cotangents' come last."""
        import jax

        return [self._type(leaf) for leaf in jax.tree_util.tree_leaves(self.args)]

    def _arriving(self) -> Sequence[AxisType]:
        """Return the axis types of the outputs' cotangents."""
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
        """Return the axis type of each primal."""
        return [self.door.axis_type(aval) for aval in self.parts.in_avals]

    def _leaves(self, origin: Origin) -> set[int]:
        """Return the leaves of the arguments that are an origin's inputs."""
        return {self._trace().dynamic[i] for i in origin.inputs}

    def _of(self, path) -> Origins:
        """Return the origins of what one cotangent depends on."""
        if path not in self._origins:
            self._origins[path] = self._from(path, [_axes(one) for one in self._entering()])
        return self._origins[path]

    def _reductions(self, path, arriving: frozenset[str]) -> Sequence[Reduction]:
        """Return what one cotangent depends on that sums over mesh axes.

        A residual's type says that it varies where it was cast, and it may be equal all the same.
        That matters over an axis along which no cotangent differs (``arriving`` are those along
        which one does), and the forward shows it.
        """
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
        """Return over which axes the forward summed a gradient that a cotangent is made of.

        What else it summed is a statistic, if it was saved with what varies there. A forward that
        can't be traced again may have done either.
        """
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

    def _from(self, path, axes: Sequence[frozenset[str]]) -> Origins:
        """Return the origins of one cotangent, where devices differ so in bwd's arguments."""
        return Origins(
            self.door,
            self.hooks.state.known_of,
            self.mesh_axes,
            self._sliced(path),
            [Origin(frozenset((at,)), axes[leaf]) for at, leaf in enumerate(self._trace().dynamic)],
        )

    def _origin(self, path) -> Origin:
        joined = NOWHERE
        for one in self._of(path).outputs:
            joined |= one
        return joined

    def _is_zero(self, path) -> bool:
        """Whether a cotangent is a constant zero, as ``jnp.zeros`` makes it."""
        count = len(self._trace().dynamic)
        return not self._origin(path).inputs and makes_zeros(self._sliced(path), count)

    @functools.cached_property
    def _forward(self) -> Forward:
        """What the forward shows, once it is asked."""
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
        """Trace bwd to a jaxpr, once."""
        if self._traced is None:
            self._traced = Trace(self.door, self.bwd, self.args)
        return self._traced

    def _communicates(
        self, jaxpr, axes: frozenset[str], *, reductions: bool = False
    ) -> Iterator[str]:
        """Yield a description of each equation that may move data along ``axes``.

        Args:
          jaxpr: where to look, inner jaxprs included.
          axes: mesh axes.
          reductions: only what sums over them.
        """
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


def _quoted(axes: frozenset[str]) -> str:
    return ", ".join(map(repr, sorted(axes)))
