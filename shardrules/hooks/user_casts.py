"""Define the casts that users write: an early cast to varying, and a claim that a sum is complete.

Both act only if shard_map tracks axis types on avals, with or without ``shardrules.install()``.
Otherwise they return their argument.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from shardrules.arguments import checked
from shardrules.door import internals
from shardrules.door.internals import Door
from shardrules.door.jaxprs import DECLARED, is_inexact
from shardrules.errors import AxisError, CotangentError
from shardrules.hooks.install import held, hold_for_ops, state
from shardrules.hooks.notes import Claims
from shardrules.hooks.types.identities import mark, uncast
from shardrules.registry.axistypes import AxisType, one_by_one, show_axes
from shardrules.registry.binding import caller_place

_F = TypeVar("_F", bound=Callable[..., Any])

# The lines that need no more warning: their call cast something, or they were already warned about.
_settled: set[str] = set()

_OUTSIDE = "it is not inside of a shard_map. Call it in the function that jax.shard_map maps"
_WHY = {
    "outside": f"{_OUTSIDE}; under jax.jit with shardings, jax.lax.with_sharding_constraint "
    "places an array",
    "unchecked": "the check of this shard_map is off. Drop check_vma=False, or drop the call",
    "varying": "its arrays vary over these axes already. Drop the call",
}


@checked(own=("axes",))
def vary(x: Any, *axes: str) -> Any:
    """Cast a pytree of arrays to vary over mesh axes here, rather than where a kernel needs it.

    The cast moves no data. Its transpose is a psum of the value's bytes at this place. For example,
    a replicated bias has fewer bytes before it is broadcast over the local batch than after. If the
    cast stands before a loop, the psum runs once instead of in each step.
    ``jax.lax.pcast(x, axes, to="varying")`` makes the same cast, but it rejects values that vary
    already, and exists since JAX 0.8.2; a program with ``vary`` runs on any JAX, with its check on
    or off.

    Args:
      x: arrays; those that already vary over the axes stay as they are.
      *axes: manual mesh axes.

    Returns:
      The same values; ``x`` itself outside ``shard_map(check_vma=True)``, and on JAX 0.5.3 and
      older, where the check casts by itself. Warns once about each line whose call casts nothing.

    Raises:
      AxisError: if an axis is not a manual mesh axis here, or a value is a partial sum over it.

    Examples:
      >>> early = jax.shard_map(
      ...     lambda w, x: x @ shardrules.vary(w, "data"),
      ...     mesh=mesh,
      ...     in_specs=(P(), P("data")),
      ...     out_specs=P("data"),
      ... )
      >>> early(w, x).shape
      (8, 64)
    """
    door = internals.load()
    named = _axes(door, "vary(x, ...)", axes)
    if not door.checking():
        if reason := door.why_casts_do_nothing():
            _warn_of_no_effect("vary(x", axes, _WHY[reason])
        return x
    missing = []

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, door.SymbolicZero):
            return leaf
        have = _whole(door, "vary", leaf, named)
        missing.append(named - have.varying)
        with jax.named_scope(DECLARED):
            return door.cast(leaf, have.vary(*missing[-1]))

    result = jax.tree_util.tree_map(cast, x)
    if any(missing):
        _settled.add(caller_place())
    elif missing:
        _warn_of_no_effect("vary(x", axes, _WHY["varying"])
    return result


def _warn_of_no_effect(call: str, axes: tuple[str, ...], why: str) -> None:
    """Warn once about a line that has not cast anything, and say what to do instead."""
    scope, where = state().scope, caller_place()
    # Don't warn in a trace that is made only for notes, nor while a shard_map is retraced with its
    # check off and on.
    if where in _settled or scope.notes is not None or scope.unchecked != "leave":
        return
    _settled.add(where)
    file, _, line = where.rpartition(":")
    text = f"shardrules.{call}, {', '.join(map(repr, axes))}) does nothing here: {why}"
    warnings.warn_explicit(text, UserWarning, file or where, int(line) if line.isdigit() else 1)


@checked
def place_casts(f: _F) -> _F:
    """Place the casts of one shard_map's body where its gradient's psums move the fewest bytes.

    ``install()`` does this for all of a program's shard_maps. Forward passes stay as they are. If
    the linear part of ``f`` holds something that can't be rewritten, and on JAX 0.5.3 and older,
    casts stay where JAX puts them; ``explain`` says why.

    Args:
      f: the body of a shard_map, or a part of it that is differentiated.

    Returns:
      A function that takes and returns what ``f`` does.

    Example:
      >>> body = shardrules.place_casts(lambda w, x: jnp.tanh(x @ w))
      >>> layer = jax.shard_map(
      ...     body, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
      ... )
      >>> jax.eval_shape(jax.grad(lambda w: layer(w, x).sum()), w).shape
      (128, 64)
    """

    @functools.wraps(f)
    def placed(*args: Any, **kwargs: Any) -> Any:
        door = internals.load()
        if not door.checking():
            return f(*args, **kwargs)
        hold_for_ops()

        def marked(leaf: Any) -> Any:
            return mark(leaf) if isinstance(leaf, jax.Array) and is_inexact(leaf) else leaf

        return f(*jax.tree_util.tree_map(marked, args), **jax.tree_util.tree_map(marked, kwargs))

    return placed  # type: ignore[return-value]  # it takes and returns what f does


@checked(own=("axes",))
def already_summed(ct: Any, *axes: str) -> Any:
    """Claim, in a custom_vjp's bwd, that cotangents are already the full sum over mesh axes.

    A collective such as ``all_gather`` followed by a local sum gives the same result on every
    device along an axis, but still has a varying type. This makes the type invariant and moves no
    data. A wrong claim gives wrong gradients, one device's share instead of the sum: verify it with
    ``shardrules.hooks.user_casts.checking_claims``, or compare gradients with a single device's. If
    the collective can be the last step, prefer that: ``jax.lax.psum`` needs no claim.

    Args:
      ct: a pytree of cotangents.
      *axes: the mesh axes over which they were summed.

    Returns:
      The same values; ``ct`` itself outside ``shard_map(check_vma=True)``. Warns once about each
      line that calls it outside of any shard_map.

    Raises:
      AxisError: if an axis is not a manual mesh axis here, or a value is ``unreduced`` over it.
      UnsupportedJaxError: on JAX 0.5.3 and older.
    """
    door = internals.load()
    named = _axes(door, "already_summed(ct, ...)", axes)
    door.need_types("already_summed (in its place, end bwd with the collective, jax.lax.psum)")
    if not door.checking():
        # Don't warn if the check is off, since a bwd may be used with the check on and off.
        if door.why_casts_do_nothing() == "outside":
            _warn_of_no_effect("already_summed(ct", axes, _OUTSIDE)
        return ct
    claims = state().scope.claims
    where = caller_place()

    def claim(leaf: Any) -> Any:
        if isinstance(leaf, door.SymbolicZero) or getattr(leaf, "dtype", None) == jax.dtypes.float0:
            return leaf
        over = named & _whole(door, "already_summed", leaf, named).varying
        if not over:
            return leaf
        order = tuple(a for a in door.manual_axes() if a in over)
        if claims is not None:
            _compare(claims, leaf, order, where)
        return uncast(leaf, order)

    return jax.tree_util.tree_map(claim, ct)


@contextlib.contextmanager
def checking_claims() -> Iterator[Claims]:
    """Test the claims of ``already_summed`` in programs that are traced and run inside.

    It costs two all-reduces for each claim, so it is for tests.

    Yields:
      A record of the claims, in ``made`` and ``wrong``.

    Raises:
      CotangentError: at the end, if a claimed cotangent differed between two devices.
    """
    claims = Claims()
    with held() as hooks:  # it changes the trace key, so that JAX traces again  # noqa: SIM117
        with hooks.enter(dataclasses.replace(hooks.scope, claims=claims)):
            yield claims
            jax.effects_barrier()
    if claims.wrong:
        places = "\n".join(
            f"  at {where}, over {show_axes(axes)}" for where, axes in sorted(claims.wrong)
        )
        raise CotangentError(
            "already_summed was given a cotangent that differs between devices, so it is not a "
            "full sum:\n"
            f"{places}\n"
            "return jax.lax.psum(ct, axes) there instead",
            places=tuple(sorted(claims.wrong)),
        )


def _axes(door: Door, call: str, axes: tuple[Any, ...]) -> frozenset[str]:
    if not axes or not all(isinstance(a, str) and a for a in axes):
        raise AxisError(
            f"{call} takes the names of one or more mesh axes, not "
            f"{', '.join(map(repr, axes)) or 'nothing'}; "
            + (one_by_one(call, axes) or f"such as {call.replace('...', repr('model'))}"),
            axes=axes,
        )
    here = door.manual_axes()
    strange = [a for a in axes if a not in here]
    if here and strange:
        raise AxisError(
            f"{call.replace('...', ', '.join(map(repr, axes)))}: {show_axes(strange)} is not a "
            f"manual mesh axis here; they are {show_axes(here)}",
            axes=tuple(strange),
        )
    return frozenset(axes)


def _whole(door: Door, what: str, leaf: Any, axes: frozenset[str]) -> AxisType:
    """Return a value's axis type; raise if the value is still unreduced over ``axes``."""
    have = door.axis_type(door.typeof(leaf))
    if have.unreduced & axes:
        raise AxisError(
            f"{what} over {show_axes(axes)} was given a value that is {have}: a partial sum. "
            "Reduce it first, with jax.lax.psum",
            axes=have.unreduced & axes,
        )
    return have


def _compare(claims: Claims, leaf: Any, axes: tuple[str, ...], where: str) -> None:
    """Compare a cotangent along ``axes``, bit by bit, when the program runs."""
    claims.made.add((where, axes))
    bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}"))
    same = (jax.lax.pmax(bits, axes) == jax.lax.pmin(bits, axes)).all()

    def note(same: Any) -> None:
        if not same:
            claims.wrong.add((where, axes))

    jax.debug.callback(note, same)
