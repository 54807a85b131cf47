"""What a ``jax.stages.Compiled`` knows of its arguments and outputs, leaf by leaf."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

__all__ = ["argument_leaves", "result_leaves", "shared_buffers"]

# From NumPy's names of element types to XLA's.
_PREFIX = {"float": "f", "bfloat": "bf", "int": "s", "uint": "u", "complex": "c"}


def _shape(aval: Any) -> str:
    """Write an array's type as HLO does: ``"f32[8,16]"``."""
    name, bits, rest = re.fullmatch(r"([a-z]+)(\d*)(.*)", str(aval.dtype)).groups()
    kind = "pred" if name == "bool" else f"{_PREFIX.get(name, name)}{bits}{rest.replace('_', '')}"
    return f"{kind}[{','.join(map(str, aval.shape))}]"


def _sharding(sharding: Any, rank: int) -> str:
    """Write a sharding for people: a named one's spec."""
    spec = getattr(sharding, "spec", None)
    if spec is not None:
        parts = list(spec)
        while parts and parts[-1] is None:
            parts.pop()
        return f"P({', '.join(map(repr, parts))})"
    return str(sharding._to_xla_hlo_sharding(rank)) if sharding is not None else ""


def _executable(compiled: Any) -> Any:
    return getattr(compiled, "_executable", None)


def argument_leaves(compiled: Any) -> list[tuple[str, bool, bool, str, str]] | None:
    """List path, donated, kept, whole shape and sharding of each leaf of the arguments.

    The paths begin with the parameters' names, as JAX keeps them for its own messages. Which leaves
    a program kept stands on no public attribute before JAX 0.5 (and ``input_shardings`` raises for
    a program that pruned one).

    Args:
      compiled: a jax.stages.Compiled.

    Returns:
      The leaves, or None if the program does not say (a deserialized one, say).
    """
    import jax

    executable = _executable(compiled)
    kept = getattr(executable, "_kept_var_idx", None)
    if kept is None or getattr(compiled, "args_info", None) is None:
        return None
    infos, _ = jax.tree_util.tree_flatten_with_path(compiled.args_info)
    # Constants that JAX hoisted into arguments (an option from 0.7 on) stand before the others.
    told = getattr(executable, "_all_args_info", None)
    debug = getattr(told, "debug_info", None)
    names = list(getattr(debug, "arg_names", None) or ())
    hoisted = max(0, len(getattr(told, "in_avals", infos)) - len(infos))
    names = names[len(names) - len(infos) :] if len(names) >= len(infos) else [None] * len(infos)
    shardings = iter(getattr(executable, "_in_shardings", ()))
    for _ in range(hoisted):
        next(shardings, None)
    leaves = []
    for number, ((path, info), name) in enumerate(zip(infos, names)):
        aval = getattr(info, "aval", info)  # it stands there in JAX 0.4.28
        taken = number + hoisted in kept
        sharding = next(shardings, None) if taken else None
        leaves.append(
            (
                name or f"args{jax.tree_util.keystr(path)}",
                bool(info.donated),
                taken,
                _shape(aval),
                _sharding(sharding, len(aval.shape)),
            )
        )
    return leaves


def result_leaves(compiled: Any) -> list[tuple[str, str, str]] | None:
    """List path, whole shape and sharding of each leaf of the outputs, or None."""
    import jax

    avals = getattr(_executable(compiled), "out_avals", None)
    tree = getattr(compiled, "out_tree", None)
    if avals is None or tree is None or tree.num_leaves != len(avals):
        return None
    paths, _ = jax.tree_util.tree_flatten_with_path(
        jax.tree_util.tree_unflatten(tree, range(len(avals)))
    )
    shardings = getattr(_executable(compiled), "_out_shardings", None) or [None] * len(avals)
    return [
        (jax.tree_util.keystr(path), _shape(aval), _sharding(sharding, len(aval.shape)))
        for (path, _), aval, sharding in zip(paths, avals, shardings)
    ]


def shared_buffers(compiled: Any, args: Sequence[Any], kwargs: dict) -> list[list[int]]:
    """List the leaves of a call's arguments that are the same memory, each set by its positions.

    Args:
      compiled: a jax.stages.Compiled of the function.
      args, kwargs: what it is called with, static ones too.

    Returns:
      Sets of two or more positions in ``argument_leaves``; none where the arguments are no arrays.
    """
    import jax

    leaves = _dynamic(compiled.in_tree, args, kwargs)
    at: dict[Any, list[int]] = {}
    for number, leaf in enumerate(leaves or ()):
        if isinstance(leaf, jax.Array) and not leaf.is_deleted() and leaf.size:
            try:
                key = leaf.addressable_shards[0].data.unsafe_buffer_pointer()
            except Exception:  # a tracer, a key, an array of other processes
                key = ("object", id(leaf))
            at.setdefault(key, []).append(number)
    return [numbers for numbers in at.values() if len(numbers) > 1]


def _dynamic(tree: Any, args: Sequence[Any], kwargs: dict) -> list[Any] | None:
    """Flatten the arguments that a program was traced for: without the static ones."""
    import jax

    positional, keywords = tree.children()
    count = len(positional.children())
    named = {k: v for k, v in kwargs.items() if k in keywords.node_data()[1]}
    for chosen in itertools.combinations(range(len(args)), count):
        left = [arg for n, arg in enumerate(args) if n not in chosen]
        if any(isinstance(x, jax.Array) for x in jax.tree_util.tree_leaves(left)):
            continue
        leaves, found = jax.tree_util.tree_flatten((tuple(args[n] for n in chosen), named))
        if found == tree:
            return leaves
    return None
