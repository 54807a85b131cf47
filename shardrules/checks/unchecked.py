"""Whether a program is the same where the check of its unchecked shard_maps is switched on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from shardrules.arguments import checked
from shardrules.errors import ShardrulesError
from shardrules.hooks.install import held, install
from shardrules.hooks.unchecked import UncheckedSite

__all__ = ["assert_same_unchecked"]


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
      ShardrulesError: naming what differs, and by how much.

    Examples:
      >>> sites = testing.assert_same_unchecked(loss, params, batch)
    """
    import jax

    with held() as state, state.enter(dataclasses.replace(state.scope, unchecked="off")):
        plain = _results(f, args)
    with install(unchecked="check") as handle:
        switched = _results(f, args)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(plain), jax.tree_util.tree_leaves(switched)
    ):
        name = f"{path[0].key}{jax.tree_util.keystr(path[1:])}"  # type: ignore[attr-defined]
        different = _differs(a, b)
        if different:
            raise ShardrulesError(
                f"{name} is not the same with the check of unchecked shard_maps on: {different}",
                name=name,
            )
    return handle.unchecked()


def _results(f: Callable[..., Any], args: tuple) -> dict[str, Any]:
    """Return the values and, where JAX can take them, the gradients of the sum of their sines."""
    import jax

    leaves, tree = jax.tree_util.tree_flatten(args)
    chosen = [i for i, leaf in enumerate(leaves) if _is_float(leaf)]

    def scalar(floats):
        given = list(leaves)
        for i, value in zip(chosen, floats):
            given[i] = value
        results = jax.tree_util.tree_leaves(f(*jax.tree_util.tree_unflatten(tree, given)))
        return sum(jax.numpy.sum(jax.numpy.sin(one)) for one in results if _is_float(one))

    found = {"value": jax.jit(lambda *args: f(*args))(*args)}
    try:
        found["gradient"] = jax.jit(jax.grad(scalar))([leaves[i] for i in chosen])
    except Exception as error:  # compared, too
        found["gradient"] = type(error).__name__
    return found


def _is_float(leaf: Any) -> bool:
    import jax

    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, jax.numpy.floating)


def _differs(a: Any, b: Any) -> str:
    import jax
    import numpy as np

    if not isinstance(a, jax.Array):
        return "" if a == b else f"{a!r} and {b!r}"
    x, y = (np.asarray(one).astype(np.float64) for one in (a, b))
    eps = float(jax.numpy.finfo(a.dtype).eps) if _is_float(a) else 0.0
    if not np.allclose(x, y, 200 * eps, 200 * eps * float(np.max(np.abs(x), initial=0))):
        return f"the largest difference is {np.max(np.abs(x - y)):.3g}"
    if _by_device(a) != _by_device(b):
        return "one of them differs by device where the other does not"
    return ""


def _by_device(array: Any) -> bool:
    """Whether devices hold different data for one part of an array."""
    import numpy as np

    parts: dict[str, Any] = {}
    return any(
        not np.array_equal(parts.setdefault(str(one.index), np.asarray(one.data)), one.data, True)
        for one in array.addressable_shards
    )
