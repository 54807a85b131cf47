"""Tell whether a bwd may get the sum of the devices' shares of a cotangent instead of one share."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
from jax.tree_util import keystr

from shardrules.door.jaxprs import is_inexact, named_axes, size_of
from shardrules.door.protocols import Eqn
from shardrules.errors import WholeCotangentWarning
from shardrules.hooks.cotangents.bwd import Bwd, axes_of
from shardrules.hooks.cotangents.communication import communicates
from shardrules.hooks.cotangents.inner_sums import inner_sums, is_total, sums_otherwise
from shardrules.hooks.cotangents.linearity import AFFINE, LinearityProof, linearity
from shardrules.hooks.cotangents.summed_shares import gradient_over
from shardrules.hooks.cotangents.traced import Path
from shardrules.jaxprs.walk import equations
from shardrules.paths import here, is_library


class WholeCotangents:
    """A run of a bwd, and the cotangents that it returned."""

    def __init__(self, bwd: Bwd, cotangents: Any):
        self.bwd = bwd
        self.parts = bwd.parts
        self.state = bwd.hooks.state
        self.cotangents = cotangents

    def why_different(self) -> str:
        """Say why gradients may differ from those with the check off; empty if they are equal."""
        # With the check off, each device passes on its own share of the cotangent of a replicated
        # value, and shard_map adds up the shares at its inputs. With the check on, all devices pass
        # on the sum. The gradients are equal if bwd is linear, since it then maps the sum of the
        # shares to the sum of its results. Test each mesh axis:
        # - all arriving cotangents differ along it: bwd gets shares either way; it must return a
        #   share, or the sum by its own casts, as its primal's type requires;
        # - none differs: bwd gets the sum, so it must be linear and must not communicate;
        # - some differ, or primals do: leave the check off.
        bwd, name, live, returned = self.bwd, self._name, self._live, self._returned
        primals = [t.axes for t, aval in zip(bwd.primals, self.parts.in_avals) if is_inexact(aval)]
        equal = any(axis not in axes for axis in self._several for axes in live)
        if equal and self._shows():
            return f"the bwd {name} shows a cotangent outside of the program"
        for axis in self._several if live and returned else ():
            differs = {axis in axes for axes in live}
            inner = axis in self._inner
            if inner and (
                differs != {True} or sums_otherwise(bwd.door, self.state, bwd.trace.jaxpr, axis)
            ):
                return gradient_over(frozenset({axis}))
            if differs == {True}:
                if self._has_choice and not all(axis in axes for axes in primals):
                    return self._may_choose
                for path, axes in returned:
                    is_sum = is_total(bwd.door, bwd.sliced(path), axis) if inner else False
                    if is_sum is None or (is_sum and axis in axes):
                        return gradient_over(frozenset({axis}))
                    if not is_sum and axis not in axes:
                        if not self._proofs[path].depends:
                            return self._own_term(path, axes)
                        return f"the bwd {name} returns a gradient that is summed over {axis!r}"
            elif len(differs) > 1 or any(axis in axes for axes in primals):
                return f"the forward of the bwd {name} makes results equal over {axis!r}"
            elif self._communicates(axis):
                return f"the bwd {name} communicates over {axis!r}"
            elif self.parts.perturbed:
                return self._may_choose
            elif why := self._nonlinear(axis):
                return why
        return ""

    def warn_of_sums(self) -> None:
        """Warn once if a bwd that may not be linear gets the sum of the devices' cotangents."""
        state, live = self.state, self._live
        at = self.parts.place
        key = "whole cotangent", self.parts.name, at
        equal = [axis for axis in self._several if live and not any(axis in axes for axes in live)]
        shares = state.here.transpose.shares
        if not equal or shares is None or key in state.warned or is_library(at):
            return
        if not self._nonlinear(equal[0]):
            return
        step = next(filter(None, (_step(proof, "it") for proof in self._proofs.values())), "")
        if not step and any(map(self._opaque_call, equations(self.bwd.trace.jaxpr))):
            return  # most opaque calls are linear, and nothing that can be read says otherwise
        over = [axis for axis in equal if axis in shares().summed]
        if over:
            state.warned.add(key)
            names = ", ".join(map(repr, over))
            applied = f" ({step})" if step else ""
            warning = WholeCotangentWarning(
                f"the bwd {self.parts.name!r} is not known to be linear in its cotangent{applied}. "
                f"It receives the sum over {{{names}}} of the devices' cotangents, "
                "so its result may differ from the sum of what it returns for each device's "
                "share. If you want each device's share, as with the check off, cast the "
                f"argument where the function is called, f(shardrules.vary(x, {names})); if "
                "you want the sum, ignore this.",
                axes=frozenset(over),
            )
            file, _, line = at.rpartition(":")
            number = int(line) if line.isdigit() else 1
            warnings.warn_explicit(warning, WholeCotangentWarning, file or "<unknown>", number)

    @property
    def _name(self) -> str:
        """Return the bwd's name and line, since lambdas share a name."""
        at = f" (at {here(self.parts.place)})" if self.parts.place else ""
        return f"{self.parts.name!r}{at}"

    @property
    def _may_choose(self) -> str:
        return f"the bwd {self._name} may depend on what is differentiated (symbolic_zeros)"

    @property
    def _has_choice(self) -> bool:
        """Return whether it may see, by symbolic zeros, that something else is differentiated."""
        # Less of what is perturbed here may be, or fewer of these cotangents may arrive: then it
        # may sum what it returns here as a share.
        perturbed = self.parts.perturbed
        return bool(perturbed) and (sum(perturbed) > 1 or len(self._live) > 1)

    @property
    def _live(self) -> list[frozenset[str]]:
        """Return the axes over which each arriving nonzero cotangent varies."""
        leaves = jax.tree_util.tree_leaves(self.bwd.args[-1])
        return [
            axes_of(type_)
            for leaf, type_ in zip(leaves, self.bwd.arriving)
            if isinstance(leaf, jax.Array) and is_inexact(leaf)
        ]

    @property
    def _several(self) -> list[str]:
        """Return the mesh axes with several devices."""
        return [axis for axis in sorted(self.bwd.mesh_axes) if size_of(frozenset((axis,))) != 1]

    @functools.cached_property
    def _returned(self) -> list[tuple[Path, frozenset[str]]]:
        """Return path and axes of each returned cotangent that isn't zero."""
        bwd, returned = self.bwd, list[tuple[Path, frozenset[str]]]()

        def note(path: Path, index: int, value: Any) -> Any:
            zero = isinstance(value, bwd.door.SymbolicZero) or not is_inexact(value)
            if not zero and any(origin.number != 0 for origin in bwd.origins_of(path).outputs):
                have = bwd.door.axis_type(bwd.door.typeof(value))
                returned.append((path, have.axes | bwd.primals[index].axes))
            return value

        self.parts.each(self.cotangents, note)
        return returned

    @functools.cached_property
    def _inner(self) -> frozenset[str]:
        """Return the axes over which casts sum in the gradients that bwd takes itself."""
        # Also read the jaxpr, since JAX may take an inner jit's gradient from its cache.
        held = [named_axes(eqn.params) for eqn in inner_sums(self.bwd.trace.jaxpr)]
        return frozenset().union(*held, *self.bwd.inner)

    def _communicates(self, axis: str) -> bool:
        return any(communicates(self.state, self.bwd.trace.jaxpr, frozenset({axis})))

    def _opaque_call(self, eqn: Eqn) -> Any:
        return self.state.opaque_call_of(eqn.primitive, eqn.params)

    def _shows(self) -> bool:
        """Return whether a callback or print in bwd sees values that depend on a cotangent."""
        trace = self.bwd.trace
        inputs = trace.jaxpr.invars[len(trace.jaxpr.invars) - len(trace.dynamic) :]
        arriving = [v for v, leaf in zip(inputs, trace.dynamic) if leaf >= self.bwd.first]
        return linearity(trace.jaxpr, arriving, kernels=True).shows

    def _own_term(self, path: Path, axes: frozenset[str]) -> str:
        equal = ", ".join(repr(axis) for axis in self._several if axis not in axes)
        return (
            f"the bwd {self._name} returns at output{keystr(path)}, for an argument that is equal "
            f"over {equal}, a gradient that doesn't depend on its cotangent"
        )

    @functools.cached_property
    def _proofs(self) -> dict[Path, LinearityProof]:
        """Read, for each returned cotangent, the part of bwd that computes it."""
        proofs: dict[Path, LinearityProof] = {}
        for path, _ in self._returned:
            jaxpr, dynamic = self.bwd.sliced(path), self.bwd.trace.dynamic
            inputs = jaxpr.invars[len(jaxpr.invars) - len(dynamic) :]
            arriving = [var for var, leaf in zip(inputs, dynamic) if leaf >= self.bwd.first]
            proofs[path] = linearity(jaxpr, arriving, kernels=True)
        return proofs

    def _nonlinear(self, axis: str) -> str:
        """Say why returned cotangents may not be linear in the arriving ones; empty if they are."""
        for path, proof in self._proofs.items():
            if proof.summed is None:
                eqns = equations(self.bwd.sliced(path))
                opaque = next(filter(None, map(self._opaque_call, eqns)), None)
                calls = f"it calls {opaque.call}" if opaque is not None else ""
                why = " and ".join(filter(None, [calls, _step(proof, "a cotangent")]))
                holds = f" ({why})" if why else ""
                return f"the bwd {self._name} is not known to be linear{holds}"
            shares = self.state.here.transpose.shares
            differs = shares is None or axis in shares().differing
            if proof.is_narrow or (proof.rounds and differs):
                return f"the bwd {self._name} rounds a cotangent"
        return ""


def _step(proof: LinearityProof, cotangent: str) -> str:
    """Say what makes a result that isn't linear in a cotangent; empty if that can't be said."""
    applied = ", ".join(step for step in proof.steps if step not in AFFINE)
    if applied:
        return f"it applies {applied} to {cotangent}"
    return f"it adds another value to {cotangent}" if proof.steps else ""
