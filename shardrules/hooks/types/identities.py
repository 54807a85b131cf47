"""Define identity primitives: an un-cast, a retyping, the mark of ``place_casts``; redundant casts.

JAX 0.8 to 0.12 reject a cast over axes over which the value already varies. The hooks make it an
identity, since a proof may widen a kernel's annotation before the user casts (MaxText's megablox).
JAX up to 0.6.0 raises when it sums or casts a cotangent that is known to be zero (a bwd returns
None). With the hooks, transposes skip such cotangents.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from shardrules.door import internals
from shardrules.door.internals import Door
from shardrules.door.patching import Patches
from shardrules.door.protocols import Aval
from shardrules.errors import AxisError
from shardrules.hooks.state import Hooks
from shardrules.hooks.types.calls.annotations import note_cast
from shardrules.registry.axistypes import show_axes

MARK = "place_casts"

# JAX's names up to 0.5.3, and in 0.6.0.
_CASTS_AND_SUMS = ("pbroadcast", "psum2", "pvary", "psum_invariant")


def uncast(x: jax.Array, axes: tuple[str, ...]) -> Any:
    """Type ``x`` as invariant over ``axes``; its values must be equal along them."""
    return _UNCAST.bind(x, axes=axes)


def retype_varying(x: jax.Array, axes: tuple[str, ...]) -> Any:
    """Type ``x`` as varying over ``axes``; its values may differ along them."""
    # This is not a cast: the transpose of a cast would sum the cotangents of different values. The
    # transpose of this raises.
    return _RETYPED.bind(x, axes=axes)


def mark(x: jax.Array) -> Any:
    """Return ``x``, marked so that casts are placed in the linear program of its tangent."""
    return _MARKED.bind(x)


def _dropped(aval: Aval, *, axes: tuple[str, ...]) -> Any:
    door = internals.load()
    return door.with_axis_type(aval, door.axis_type(aval).drop(*axes))


def _added(aval: Aval, *, axes: tuple[str, ...]) -> Any:
    door = internals.load()
    have = door.axis_type(aval)
    return door.with_axis_type(aval, have.vary(*(frozenset(axes) - have.axes)))


def _share(ct: Any, x: Any, *, axes: tuple[str, ...]) -> list[Any]:
    # The values are claimed equal on N devices, so the result is their mean, and each device gets
    # 1/N of the cotangent. The transpose of the collective that made the values equal (such as an
    # all_gather) adds these shares up to the total.
    door = internals.load()
    have = door.axis_type(door.typeof(ct))
    return [door.cast(ct / jax.lax.psum(1, axes), have.vary(*axes))]


def _refuse(ct: Any, x: Any, *, axes: tuple[str, ...]) -> list[Any]:
    raise AxisError(
        "a gradient goes through a shard_map whose check is off, inside of one whose check is "
        f"on: JAX types its arguments and results as invariant over {show_axes(axes)}, "
        "although they differ along them, and would take one device's share of the gradient "
        "for the sum. Switch the check off in the outer shard_map too, or on in the inner one.",
        axes=frozenset(axes),
    )


def _identity(name: str, typed: Any, transpose: Any) -> Any:
    """Return a primitive that returns its operand, with the aval that ``typed`` returns."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x, **params: x)
    primitive.def_abstract_eval(typed)
    ad.deflinear2(primitive, transpose)
    mlir.register_lowering(primitive, lambda ctx, x, **params: [x])
    batching.primitive_batchers[primitive] = lambda args, dims, **params: (
        primitive.bind(args[0], **params),
        dims[0],
    )
    return primitive


_UNCAST = _identity("already_summed", _dropped, _share)
_RETYPED = _identity("unchecked_shard_map", _added, _refuse)
_MARKED = _identity(MARK, lambda aval: aval, lambda ct, x: [ct])


def leave_out_zeros(door: Door, patches: Patches) -> None:
    """Make transposes of casts and of psums of several values skip zero cotangents."""
    table = ad.primitive_transposes
    # ``multiple_results`` excludes jax.lax.pbroadcast, which has the same name and takes one value.
    for primitive in [p for p in table if p.multiple_results and p.name in _CASTS_AND_SUMS]:
        transpose = functools.partial(_transpose_nonzero, door.Zero, table[primitive])
        patches.entry(table, primitive, transpose)


def _transpose_nonzero(
    Zero: Any, rule: Callable[..., Any], cts: Sequence[Any], *args: Any, **params: Any
) -> Any:
    kept = [ct for ct in cts if not isinstance(ct, Zero)]
    rest = iter(rule(kept, **params) if kept else ())
    return [Zero(x.aval) if isinstance(ct, Zero) else next(rest) for ct, x in zip(cts, args)]


class RedundantCastHooks(Hooks):
    def install(self, patches: Patches) -> None:
        door = self.door
        if door.transpose_cast is not None:  # up to JAX 0.6.1
            leave_out_zeros(door, patches)
        if door.pcast_from is not None:  # since JAX 0.8.2
            patches.attribute(*door.owner("pcast_from"), self._from)
            patches.entry(door.pcast_steps, ("varying", "varying"), self._stay)
            cast = functools.partial(self._noted, door.pcast_steps["invarying", "varying"])
            patches.entry(door.pcast_steps, ("invarying", "varying"), cast)

    def _from(self, aval: Aval, axes: tuple[Any, ...], name: str) -> str:
        """Return the state over the axes that are still to be cast."""
        if self.acts:
            varying = self.door.axis_type(aval).varying
            left = tuple(a for a in axes if a not in varying)
            if left and len(left) < len(axes):
                # JAX rejects values that vary over only some of the axes.
                state = str(self.door.pcast_from(aval, left, name))
                if state == "invarying" and name == "jax.lax.pcast":
                    return state  # cast over the other axes
                auto = self.door.auto_pcast
                if state == "invarying" and (auto is None or auto.value):
                    return "varying"  # a reduction casts by itself over its invariant axes
        return str(self.door.pcast_from(aval, axes, name))

    def _stay(self, leaf: Any, axes: tuple[Any, ...]) -> Any:
        if not self.acts:
            raise ValueError("Unsupported pcast from=varying, to='varying'")  # JAX's own message
        note_cast(self.state, leaf, axes, leaf)
        return leaf

    def _noted(self, cast: Any, x: Any, axis_name: tuple[Any, ...]) -> Any:
        result = cast(x, axis_name)
        note_cast(self.state, x, axis_name, result)
        return result
