"""Compare a program with and without ``install(unchecked="check")``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardrules.arguments import checked
from shardrules.door.jaxprs import is_float, opened
from shardrules.errors import ShardrulesError
from shardrules.hooks.install import held, install
from shardrules.hooks.notes import Notes
from shardrules.jaxprs.walk import equations
from shardrules.unchecked import retrace
from shardrules.unchecked.sites import UncheckedSite, costliest


@checked
def assert_same_unchecked(f: Callable[..., Any], *args: Any) -> tuple[UncheckedSite, ...]:
    """Assert that ``install(unchecked="check")`` changes no value and no gradient of a program.

    Runs it as written and with the check on where that is decided, under jit, and compares values,
    gradients by all arguments of a float type, and which results differ by device.

    Args:
      f: a function of arrays.
      *args: what it is called with; none is donated.

    Returns:
      What became of each shard_map whose check is off.

    Raises:
      ShardrulesError: naming what differs, and by how much; or every unchecked shard_map of the
        program was made before the hooks were there, so that none is compared.

    Examples:
      >>> sites = testing.assert_same_unchecked(loss, params, batch)
    """
    with held() as state, state.enter(dataclasses.replace(state.scope, unchecked="off")):
        plain = _results(f, args)
    notes = Notes()
    with install(unchecked="check"), state.enter(dataclasses.replace(state.scope, notes=notes)):
        switched = _results(f, args)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(plain), jax.tree_util.tree_leaves(switched)
    ):
        name = f"{path[0].key}{jax.tree_util.keystr(path[1:])}"
        different = _differs(a, b)
        if different:
            raise ShardrulesError(
                f"{name} is not the same with the check of unchecked shard_maps on: {different}",
                name=name,
            )
    if not notes.unchecked and (made := _unchecked_count(f, args)):
        raise ShardrulesError(
            f"nothing was compared: {made} shard_map{'s' * (made > 1)} with the check off in the "
            "program, made before shardrules was there to see it; make them (jax.shard_map(...), "
            "and the jit around it) inside of the function that is passed, or after "
            "shardrules.install(). What jax.pmap makes is never compared",
            count=made,
        )
    return costliest(notes.unchecked)


def _unchecked_count(f: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Count the shard_maps whose check is off in a program."""
    traced = opened(retrace.traced(f, args))
    maps = (eqn.params for eqn in equations(traced) if eqn.primitive.name == "shard_map")
    return sum(False in (of.get("check_vma"), of.get("check_rep")) for of in maps)


def _results(f: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, Any]:
    """Return the values and, where JAX can differentiate, gradients of the sum of their sines."""
    leaves, tree = jax.tree_util.tree_flatten(args)
    chosen = [i for i, leaf in enumerate(leaves) if is_float(leaf)]

    def scalar(floats: list[Any]) -> Any:
        given = list(leaves)
        for i, value in zip(chosen, floats):
            given[i] = value
        results = jax.tree_util.tree_leaves(f(*jax.tree_util.tree_unflatten(tree, given)))
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in results if is_float(leaf))

    outcome = {"value": jax.jit(lambda *args: f(*args))(*args)}
    try:
        outcome["gradient"] = jax.jit(jax.grad(scalar))([leaves[i] for i in chosen])
    except Exception as error:  # its type is compared  # noqa: BLE001
        outcome["gradient"] = type(error).__name__
    return outcome


def _differs(a: Any, b: Any) -> str:
    if not isinstance(a, jax.Array):
        return "" if a == b else f"{a!r} and {b!r}"
    x, y = (np.asarray(array).astype(np.float64) for array in (a, b))
    eps = float(jnp.finfo(a.dtype).eps) if is_float(a) else 0.0
    if not np.allclose(x, y, 200 * eps, 200 * eps * float(np.max(np.abs(x), initial=0))):
        return f"the largest difference is {np.max(np.abs(x - y)):.3g}"
    if _by_device(a) != _by_device(b):
        return "one differs by device and the other does not"
    return ""


def _by_device(array: Any) -> bool:
    """Whether devices hold different data for one part of an array."""
    parts: dict[str, Any] = {}
    return any(
        not np.array_equal(parts.setdefault(str(s.index), np.asarray(s.data)), s.data, True)
        for s in array.addressable_shards
    )
