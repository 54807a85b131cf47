"""Compare a program with and without ``install(unchecked="check")``."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardrules.arguments import checked
from shardrules.door.jaxprs import is_inexact, opened
from shardrules.errors import ShardrulesError, first_line
from shardrules.hooks.install import held, install
from shardrules.hooks.notes import Notes
from shardrules.hooks.state import State
from shardrules.jaxprs.walk import equations
from shardrules.unchecked import retrace
from shardrules.unchecked.sites import UncheckedSite, costliest


@checked
def assert_same_unchecked(
    f: Callable[..., Any], *args: Any, forced: bool = False
) -> tuple[UncheckedSite, ...]:
    """Assert that ``install(unchecked="check")`` changes no value and no gradient of a program.

    Runs the program under jit, as written and with the checks on that shardrules switches on, and
    compares values, gradients by all arguments of a float type, and which results differ by device.

    Args:
      f: a function of arrays.
      *args: its arguments; none is donated.
      forced: compare with every check on, even if ``install(unchecked="check")`` leaves it off;
        use this before you switch a check on by hand.

    Returns:
      The decision about each shard_map whose check is off; nothing if ``forced``. Without
      ``forced``, a UserWarning says so if all of them are left as written.

    Raises:
      ShardrulesError: if something differs, naming it and by how much; or if nothing was compared,
        because every unchecked shard_map was made before the hooks were installed.

    Examples:
      >>> sites = testing.assert_same_unchecked(loss, params, batch)
    """
    # Run the program as written, then with the checks on. Compare the results leaf by leaf. If a
    # gradient that is zero up to rounding differs, compare the difference with the gradient's own
    # noise. If nothing was switched, say so, since equal results then prove nothing.
    with _as_written() as state:
        plain, why_plain = _results(f, args)
    notes = Notes()
    with install(unchecked="check"):
        changes: dict[str, Any] = {"unchecked": "on"} if forced else {"notes": notes}
        with state.enter(dataclasses.replace(state.scope, **changes)):
            switched, why_switched = _results(f, args)
            unseen = _unchecked_count(f, args) if forced or not notes.unchecked else 0
    gradients = (plain["gradient"], switched["gradient"])
    failed = [g for g in gradients if isinstance(g, str)]
    if len(failed) == 1:
        raise ShardrulesError(
            "the gradient raises an error only with the check of unchecked shard_maps "
            f"{'on' if gradients[1] in failed else 'off'}: {why_plain or why_switched}",
            name="gradient",
        )
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(plain), jax.tree_util.tree_leaves(switched)
    ):
        name = f"{path[0].key}{jax.tree_util.keystr(path[1:])}"
        different = _differs(a, b)
        if different and path[0].key == "gradient" and _is_rest(a, b, plain["gradient"]):
            with _as_written():
                noise = _noise(f, args, a, path[1].idx)
            if _largest(np.subtract(a, b)) <= 32 * noise and _by_device(a) == _by_device(b):
                continue
        if different:
            raise ShardrulesError(
                f"{name} is not the same with the check of unchecked shard_maps on: {different}",
                name=name,
            )
    if unseen:
        raise ShardrulesError(
            f"nothing was compared: {unseen} shard_map{'s' * (unseen > 1)} with the check off in "
            "the program, made before shardrules could see it; make them (jax.shard_map(...), "
            "and the jit around it) inside of the function that is passed, or after "
            "shardrules.install(). A jax.pmap is never compared",
            count=unseen,
        )
    sites = costliest(notes.unchecked)
    if sites and not any(site.switched for site in sites):
        warnings.warn(
            'nothing was compared: install(unchecked="check") leaves each shard_map as written '
            f"({sites[0].reason}); forced=True compares with their checks on",
            stacklevel=3,
        )
    return sites


def _unchecked_count(f: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Count the shard_maps whose check is off in a program."""
    traced = opened(retrace.traced(f, args))
    maps = (eqn.params for eqn in equations(traced) if eqn.primitive.name == "shard_map")
    return sum(False in (of.get("check_vma"), of.get("check_rep")) for of in maps)


@contextlib.contextmanager
def _as_written() -> Iterator[State]:
    with held() as state, state.enter(dataclasses.replace(state.scope, unchecked="off")):
        yield state


def _results(f: Callable[..., Any], args: tuple[Any, ...]) -> tuple[dict[str, Any], str]:
    """Return values and the gradients of the sum of their sines (or an error's type), and why."""
    outcome, why = {"value": jax.jit(lambda *args: f(*args))(*args)}, ""
    try:
        outcome["gradient"] = _gradients(f, args)
    except Exception as error:  # its type is compared  # noqa: BLE001
        outcome["gradient"] = type(error).__name__
        why = first_line(error)
    return outcome, why


def _gradients(f: Callable[..., Any], args: tuple[Any, ...], ulps: int = 0) -> list[Any]:
    """Return the gradients for a cotangent that exceeds 1 by ``ulps`` units in the last place."""
    leaves, tree = jax.tree_util.tree_flatten(args)
    chosen = [i for i, leaf in enumerate(leaves) if is_inexact(leaf)]

    def scalar(floats: list[Any]) -> Any:
        given = list(leaves)
        for i, value in zip(chosen, floats):
            given[i] = value
        results = jax.tree_util.tree_leaves(f(*jax.tree_util.tree_unflatten(tree, given)))
        found = [leaf for leaf in results if is_inexact(leaf)]
        reals = [leaf for leaf in found if not jnp.iscomplexobj(leaf)]
        parts = [p for leaf in found if jnp.iscomplexobj(leaf) for p in (leaf.real, leaf.imag)]
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in (*reals, *parts))

    def gradients(floats: list[Any]) -> Any:
        out, backward = jax.vjp(scalar, floats)
        return backward((1 + ulps * jnp.finfo(out.dtype).eps) * jnp.ones_like(out))[0]

    found: list[Any] = jax.jit(gradients)([leaves[i] for i in chosen])
    return found


# A gradient that is zero up to rounding (of an attention's key bias) depends on the order of its
# sums. Two facts identify it. First, it is as small as the rounding of the largest gradient.
# Second, the check changes it about as much as a slightly larger cotangent does: a few units in the
# last place make each step of the backward pass round anew. A wrong gradient changes more, even if
# it is small.


def _is_rest(a: Any, b: Any, gradients: Any) -> bool:
    """Return whether a gradient is no larger than the rounding of the largest of them."""
    arrays = isinstance(a, jax.Array) and isinstance(b, jax.Array)
    if not arrays or not isinstance(gradients, list):
        return False
    # Use float32's precision for all dtypes. Narrower dtypes round so much that a sum over too few
    # devices would pass as rounding.
    small = 200 * float(np.finfo(np.float32).eps)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return False
    return max(_largest(a), _largest(b)) <= small * max(map(_largest, gradients))


def _noise(f: Callable[..., Any], args: tuple[Any, ...], gradient: Any, index: int) -> float:
    """Return how much rounding changes one gradient, as a root mean square."""
    again = _wide(_gradients(f, args, ulps=3)[index])
    again /= 1 + 3 * float(jnp.finfo(gradient.dtype).eps)  # only rounding is left
    return float(np.sqrt(np.mean(np.abs(again - _wide(gradient)) ** 2)))


def _wide(a: Any) -> Any:
    """Return an array's numbers in 64 bits, or as complex numbers of two times 64."""
    return np.asarray(a).astype(np.complex128 if jnp.iscomplexobj(a) else np.float64)


def _largest(a: Any) -> float:
    """Return the largest magnitude of an array's finite elements."""
    values = np.abs(_wide(a))
    return float(np.max(values, where=np.isfinite(values), initial=0))


def _tolerance(a: Any) -> float:
    # In bfloat16, 200 units in the last place would be more than the number itself.
    return min(200 * float(jnp.finfo(a.dtype).eps), 0.1) if is_inexact(a) else 0.0


def _differs(a: Any, b: Any) -> str:
    if not isinstance(a, jax.Array):
        return "" if a == b else f"{a!r} and {b!r}"
    x, y = map(_wide, (a, b))
    tolerance = _tolerance(a)
    if not np.allclose(x, y, tolerance, tolerance * _largest(a), equal_nan=True):
        finite = np.isfinite(x) & np.isfinite(y)
        if not np.array_equal(x[~finite], y[~finite], equal_nan=True):
            return "NaN or infinite elements differ"
        return f"the largest difference is {np.max(np.abs(x[finite] - y[finite])):.3g}"
    if _by_device(a) != _by_device(b):
        return "one differs by device and the other does not"
    return ""


def _by_device(array: Any) -> bool:
    """Return whether devices hold different data for the same part of an array."""
    parts: dict[str, Any] = {}
    return any(
        not np.array_equal(parts.setdefault(str(s.index), np.asarray(s.data)), s.data, True)
        for s in array.addressable_shards
    )
