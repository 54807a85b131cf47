"""Make the errors about a cotangent that a bwd returns: what is wrong, and what to type instead."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection
from typing import Any

from jax.tree_util import keystr

from shardrules.door.internals import Door
from shardrules.errors import CotangentError
from shardrules.hooks.cotangents.traced import CustomVjpInfo
from shardrules.paths import is_library
from shardrules.registry.axistypes import AxisType, show_axes


@dataclasses.dataclass(frozen=True)
class Cotangent:
    path: Any  # its pytree path
    index: int  # the index of its primal among the flattened primals
    have: AxisType  # its axis type
    want: AxisType  # the axis type that a cotangent of its primal has

    @property
    def missing(self) -> frozenset[str]:
        """Return the axes over which the primal varies and the cotangent does not."""
        return self.want.varying - self.have.axes

    @property
    def extra(self) -> frozenset[str]:
        """Return the axes over which the cotangent varies and the primal does not."""
        return self.have.varying - self.want.varying - self.partial

    @property
    def partial(self) -> frozenset[str]:
        """Return the axes over which the primal is reduced: there, JAX expects a partial sum."""
        return self.have.varying & self.want.unreduced


class Refusals:
    has_casts = True  # False for JAX 0.5.3 and older, which have no casts to advise

    def __init__(
        self,
        door: Door,
        parts: CustomVjpInfo,
        declared: Callable[[Cotangent, frozenset[str]], str] = lambda ct, axes: "",
    ):
        self.door = door
        self.parts = parts
        self.declared = declared  # returns text about the unproven rule that is relied on, or empty

    def undecided(self, ct: Cotangent, axes: frozenset[str], why: str) -> CotangentError:
        """Return the error for a cotangent that may be one device's share or the full sum."""
        names, have, want = quoted(axes), ct.have, ct.want
        whole = (
            f"shardrules.already_summed(ct, {names})"
            if self.has_casts
            else f"jax.lax.pmean(ct, ({names},))"
        )
        share = (
            "; if the bwd serves varying primals too, let it return its share as it is, and cast "
            f"this primal where the function is called, shardrules.vary(x, {names})"
        )
        if is_library(self.parts.place):
            return self._error(
                "undecided",
                ct,
                axes,
                f"is {have}, for a primal that needs {want}. shardrules can't tell whether one "
                f"psum over {{{names}}} is missing, because {why}. "
                f"{self.parts.to_cast(self.door, axes)}",
            )
        if axes & want.unreduced:
            return self._error(
                "undecided",
                ct,
                axes,
                f"is {have}, for a primal that is reduced over {show_axes(axes)}: it must be "
                f"each device's share, and shardrules can't tell whether it is, because {why}. "
                f"If it is a share, return jax.lax.pcast(ct, ({names},), to='unreduced') from "
                "bwd. If it is the full sum already, return that cast of ct / "
                f"jax.lax.axis_size(({names},)).",
            )
        return self._error(
            "undecided",
            ct,
            axes,
            f"is {have}, for a primal that needs {want}. One psum over {{{names}}} is missing "
            "if it is this device's share, and none if it is the full sum already; shardrules "
            f"can't tell which, because {why}. If it is a share, return jax.lax.psum(ct, "
            f"({names},)) from bwd. If it is summed already, return {whole}. Both forms are "
            f"for primals that are invariant over {{{names}}}, as "
            f"here{share if self.has_casts else ''}.",
        )

    def mixed(self, ct: Cotangent, axes: frozenset[str], part: int, whole: int) -> CotangentError:
        """Return the error for a sum of a share with what may be a full sum."""
        names, claim = quoted(axes), "shardrules.already_summed" if self.has_casts else "a pmean"
        if is_library(self.parts.place):
            why = f"the cotangent of output {part} varies over them, and that of {whole} doesn't"
            return self.undecided(ct, axes, why)
        return self._error(
            "mixed",
            ct,
            axes,
            f"is {ct.have}, for a primal that needs {ct.want}. It depends on the cotangent of "
            f"output {part}, which varies over {{{names}}}, and on that of output {whole}, "
            "which is invariant. In bwd, reduce each part by itself before they are added: for "
            f"output {part}, jax.lax.psum(part, ({names},)), since it is this device's share; "
            f"for output {whole}, nothing if it is computed from values that are equal over "
            f"{{{names}}}, and otherwise the same psum. One psum of both would count such a "
            f"part once for each device, and {claim} would not add up the shares.",
        )

    def unmoved(
        self, ct: Cotangent, axis: str, output: int, why: str, averaged: bool
    ) -> CotangentError:
        """Return the error for a primal whose devices would all receive the sum of cotangents."""
        own = whole = ""
        if self.has_casts and is_library(self.parts.place):
            own = f"cast the arguments that the output depends on, shardrules.vary(x, {axis!r})"
        elif self.has_casts:
            own = (
                f"return shardrules.vary(y, {axis!r}) from the function and from its fwd, and "
                "reduce it after the call where an invariant value is needed, as by "
                f"jax.lax.pmean(y, {axis!r})"
            )
            whole = (
                "\n    the whole (the primal was reduced before the call): use "
                f"shardrules.vary(ct, {axis!r}) in place of ct in bwd"
            )
        if own:
            own = f"\n    each device's own, as with the check off: {own}"
        form = (
            f"the gradient of that mean: return ct / jax.lax.psum(1, {axis!r})"
            if averaged
            else f"the gradient of a mean or a sum: pass jax.lax.pmean(x, {axis!r}) or "
            f"jax.lax.psum(x, {axis!r}) for that primal"
        )
        return self._error(
            "averaged" if averaged else "unmoved",
            ct,
            frozenset((axis,)),
            f"depends on the cotangent of output {output}, for a primal that varies over "
            f"{{{axis!r}}}. That output is invariant over {{{axis!r}}}, so its cotangent is the "
            f"sum over all devices; {why}, so each device would receive the whole sum, while with "
            "the check off each receives its own part. Say which is meant:"
            f"{own}\n    {form}{whole}",
        )

    def summed(
        self,
        ct: Cotangent,
        axes: frozenset[str],
        by: str,
        kernel: str | None,
        shapes: Collection[tuple[int, ...]],  # the shapes of outputs whose cotangents it needs
    ) -> CotangentError:
        """Return the error for a sum of values that are equal on the devices."""
        names = quoted(axes)
        both = "Where the same function must sum equal copies of such a primal, as the outer f of "
        both += (
            f"f(f(x)) does, cast it at the call, f(shardrules.vary(x, {names})): then the form "
            "above is right for both uses."
            if self.has_casts
            else "f(f(x)) does, call another one there, whose bwd counts the copies:\n"
            f"    return (ct * jax.lax.psum(1, ({names},)),)"
        )
        return self._error(
            "summed",
            ct,
            axes,
            f"it reduces over {{{names}}} (by {by}), but the forward's outputs are "
            f"invariant over {{{names}}}{f' (by {kernel})' if kernel else ''}, so the cotangent "
            "that bwd receives is the sum over them already, and would be counted once for each "
            f"device. {self._without_sum(ct, axes, shapes)}{both}",
        )

    def _without_sum(
        self, ct: Cotangent, axes: frozenset[str], shapes: Collection[tuple[int, ...]]
    ) -> str:
        """Say what to return instead of the sum: the form that fits the shapes, or both forms."""
        pass_on = "pass it on:\n    return (ct,)\n"
        if not axes & ct.want.varying:
            return f"The primal is invariant over {{{quoted(axes)}}}, so {pass_on}"
        own = self.parts.in_avals[ct.index].shape
        if {*shapes} == {own}:
            return f"The output has the primal's shape, as after an all-reduce: {pass_on}"
        along = _gathered_along(own, shapes)
        shown = "n" if along is None else str(own[along])
        by = "" if not along else f", {along}"
        slice_it = (
            f"take this device's slice:\n    i = jax.lax.axis_index({sorted(axes)[0]!r})\n"
            f"    return (jax.lax.dynamic_slice_in_dim(ct, i * {shown}, {shown}{by}),)\n"
        )
        if along is not None:
            return f"The output is the primal's, gathered along dimension {along}: {slice_it}"
        return f"After an all-reduce, {pass_on}after an all-gather, {slice_it}"

    def of_others(self, ct: Cotangent, axes: frozenset[str], by: str) -> CotangentError:
        """Return the error for a sum that holds the cotangents of other devices' values."""
        names = quoted(axes)
        keeps = (
            "; to keep copies equal, as with the check off, say so by a cast of what it returns "
            f"now:\n    return (shardrules.vary(reduced_ct, {names}),)"
        )
        return self._error(
            "of_others",
            ct,
            axes,
            f"it reduces over {{{names}}} (by {by}), for a primal that varies over {{{names}}} and "
            "that the forward does not move there: the other devices' cotangents belong to other "
            "values, and JAX itself sums those of a value that was cast. Return this device's:\n"
            f"    return (ct,){keeps if self.has_casts else ''}",
        )

    def lost(
        self, ct: Cotangent, axes: frozenset[str], lost: frozenset[str], by: str
    ) -> CotangentError:
        """Return the error for a varying result that JAX types as invariant."""
        names = quoted(axes)
        return self._error(
            "lost",
            ct,
            lost,
            f"is typed invariant over {{{names}}}, but it depends on {by}, "
            f"whose operands vary over them and whose result JAX types as "
            f"invariant. Cast its result: shardrules.vary(x, {names}).",
        )

    def _error(
        self, problem: str, ct: Cotangent, axes: frozenset[str], what: str
    ) -> CotangentError:
        place = f" (at {_shown(self.parts.place)})" if self.parts.place else ""
        taken = self.declared(ct, axes)
        return CotangentError(
            f"the bwd {self.parts.name!r}{place} returns a cotangent at output{keystr(ct.path)} "
            f"that {what}" + (f"\nThis takes for granted what {taken}." if taken else ""),
            problem=problem,
            path=ct.path,
            axes=axes,
            have=ct.have,
            want=ct.want,
        )


def _gathered_along(own: tuple[int, ...], shapes: Collection[tuple[int, ...]]) -> int | None:
    """Return the dimension along which a gathered output is longer than its primal, or None."""
    if len({*shapes}) != 1 or len(whole := next(iter(shapes))) != len(own):
        return None
    longer = [n for n, (part, all_) in enumerate(zip(own, whole)) if part != all_]
    if len(longer) != 1 or not own[longer[0]] or whole[longer[0]] % own[longer[0]]:
        return None
    return longer[0]


def _shown(place: str) -> str:
    return place.replace(os.path.join(os.getcwd(), ""), "", 1)


def quoted(axes: frozenset[str]) -> str:
    return ", ".join(map(repr, sorted(axes)))
