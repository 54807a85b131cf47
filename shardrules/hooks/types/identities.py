"""Primitives that move nothing: one takes a cast back, one marks where casts are to be placed."""

from __future__ import annotations

import functools
from typing import Any

from shardrules.door import internals
from shardrules.errors import AxisError
from shardrules.registry.axistypes import show_axes

MARK = "place_casts"


def uncast(x: Any, axes: tuple[str, ...]) -> Any:
    """Type ``x`` as invariant over ``axes``, along which it is known to be equal."""
    return _uncast().bind(x, axes=axes)


def retype_varying(x: Any, axes: tuple[str, ...]) -> Any:
    """Type ``x`` as varying over ``axes``, along which it differs."""
    # No cast, whose transpose would sum what each device has of its own; so it has none.
    return _regained().bind(x, axes=axes)


def mark(x: Any) -> Any:
    """Return ``x``, marked so that casts are placed in the linear program of its tangent."""
    return _mark().bind(x)


@functools.cache
def _mark() -> Any:
    primitive = _identity(MARK, lambda aval: aval)
    from jax.interpreters import ad

    ad.deflinear2(primitive, lambda ct, x: [ct])
    return primitive


@functools.cache
def _regained() -> Any:
    from jax.interpreters import ad

    door = internals.load()
    primitive = _identity(
        "unchecked_shard_map",
        lambda aval, *, axes: door.with_axis_type(
            aval, door.axis_type(aval).vary(*(frozenset(axes) - door.axis_type(aval).axes))
        ),
    )

    def transpose(ct, x, *, axes):
        raise AxisError(
            f"a gradient goes through a shard_map whose check is off, inside of one whose check is "
            f"on: to JAX, what it takes and returns is invariant over {show_axes(axes)}, along "
            "which it differs, and one device's share of the gradient would be taken for the sum. "
            "Switch the check off in the outer shard_map too, or on in the inner one.",
            axes=frozenset(axes),
        )

    ad.deflinear2(primitive, transpose)
    return primitive


@functools.cache
def _uncast() -> Any:
    """Return the identity primitive whose result is invariant over ``axes``."""
    # Its types are computed from its operand at every bind. It is linear. From the whole mesh it
    # takes the values of N devices that are equal by claim, and returns their common value, which
    # is their mean; so its transpose gives each of them the Nth part of the cotangent, and what
    # reduces over the axes before it (the all_gather's transpose, say) adds up to the whole.
    import jax
    from jax.interpreters import ad

    door = internals.load()
    primitive = _identity(
        "already_summed",
        lambda aval, *, axes: door.with_axis_type(aval, door.axis_type(aval).drop(*axes)),
    )

    def transpose(ct, x, *, axes):
        have = door.axis_type(door.typeof(ct))
        return [door.cast(ct / jax.lax.psum(1, axes), have.vary(*axes))]

    ad.deflinear2(primitive, transpose)
    return primitive


def _identity(name: str, typed: Any) -> Any:
    """Return a primitive that returns its operand with the aval that ``typed`` gives."""
    from jax.extend.core import Primitive
    from jax.interpreters import batching, mlir

    primitive = Primitive(name)
    primitive.def_impl(lambda x, **params: x)
    primitive.def_abstract_eval(typed)
    mlir.register_lowering(primitive, lambda ctx, x, **params: [x])
    batching.primitive_batchers[primitive] = lambda args, dims, **params: (
        primitive.bind(args[0], **params),
        dims[0],
    )
    return primitive
