"""Identity primitives: an un-cast, a retyping as varying, and the mark of ``place_casts``."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from shardrules.door import internals
from shardrules.errors import AxisError
from shardrules.registry.axistypes import show_axes

MARK = "place_casts"


def uncast(x: Any, axes: tuple[str, ...]) -> Any:
    """Type ``x`` as invariant over ``axes``, along which its values are equal."""
    return _UNCAST.bind(x, axes=axes)


def retype_varying(x: Any, axes: tuple[str, ...]) -> Any:
    """Type ``x`` as varying over ``axes``, along which its values differ."""
    # A cast's transpose would sum the devices' different values. So this is not a cast, and its
    # transpose raises.
    return _RETYPED.bind(x, axes=axes)


def mark(x: Any) -> Any:
    """Return ``x``, marked so that casts are placed in the linear program of its tangent."""
    return _MARKED.bind(x)


def _dropped(aval: Any, *, axes: tuple[str, ...]) -> Any:
    door = internals.load()
    return door.with_axis_type(aval, door.axis_type(aval).drop(*axes))


def _added(aval: Any, *, axes: tuple[str, ...]) -> Any:
    door = internals.load()
    have = door.axis_type(aval)
    return door.with_axis_type(aval, have.vary(*(frozenset(axes) - have.axes)))


def _share(ct: Any, x: Any, *, axes: tuple[str, ...]) -> list[Any]:
    # N devices claim to hold equal values, so the result is their mean, and each device gets 1/N of
    # the cotangent. The transpose of the collective that made the values equal (an all_gather, say)
    # adds these shares up to the total.
    door = internals.load()
    have = door.axis_type(door.typeof(ct))
    return [door.cast(ct / jax.lax.psum(1, axes), have.vary(*axes))]


def _refuse(ct: Any, x: Any, *, axes: tuple[str, ...]) -> list[Any]:
    raise AxisError(
        f"a gradient goes through a shard_map whose check is off, inside of one whose check is "
        f"on: to JAX, what it takes and returns is invariant over {show_axes(axes)}, along "
        "which it differs, and one device's share of the gradient would be taken for the sum. "
        "Switch the check off in the outer shard_map too, or on in the inner one.",
        axes=frozenset(axes),
    )


def _identity(name: str, typed: Any, transpose: Any) -> Any:
    """Return the primitive that returns its operand, with the aval that ``typed`` gives."""
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
