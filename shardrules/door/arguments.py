"""What a ``jax.stages.Compiled`` knows of its arguments and outputs, leaf by leaf."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

from shardrules.errors import ShardrulesError

Leaf = tuple[str, bool, bool, str, str]

# From NumPy's names of element types to XLA's.
_PREFIX = {"float": "f", "bfloat": "bf", "int": "s", "uint": "u", "complex": "c"}


def _shape(aval: Any) -> str:
    """Write an array's type as HLO does: ``"f32[8,16]"``."""
    name, bits, rest = re.findall(r"^([a-z]+)(\d*)(.*)$", str(aval.dtype))[0]
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


def argument_leaves(compiled: Any) -> list[Leaf] | None:
    """List path, donated, kept, whole shape and sharding of each leaf of the arguments."""
    # The paths begin with the parameters' names, as JAX keeps them for its own messages. Which
    # leaves a program kept stands on no public attribute before JAX 0.5 (and ``input_shardings``
    # raises for a program that pruned one).
    import jax

    if getattr(compiled, "args_info", None) is None:
        return None
    infos, _ = jax.tree_util.tree_flatten_with_path(compiled.args_info)
    names = argument_names(compiled)
    # The aval stands there in JAX 0.4.28.
    return kept_leaves(
        _executable(compiled),
        [
            (name, bool(info.donated), getattr(info, "aval", info))
            for name, (_, info) in zip(names, infos)
        ],
    )


def argument_names(compiled: Any) -> list[str]:
    """List the paths of the leaves of a jax.stages.Compiled's arguments."""
    import jax

    infos, _ = jax.tree_util.tree_flatten_with_path(compiled.args_info)
    told = getattr(_executable(compiled), "_all_args_info", None)
    names = list(getattr(getattr(told, "debug_info", None), "arg_names", None) or ())
    names = names[len(names) - len(infos) :] if len(names) >= len(infos) else [""] * len(infos)
    return [name or f"args{jax.tree_util.keystr(path)}" for name, (path, _) in zip(names, infos)]


def kept_leaves(executable: Any, rows: Sequence[tuple[str, bool, Any]]) -> list[Leaf] | None:
    """List the leaves that an executable kept, and their shardings."""
    kept = getattr(executable, "_kept_var_idx", None)
    if kept is None:
        return None
    # Constants that JAX hoisted into arguments (an option from 0.7 on) stand before the others.
    told = getattr(getattr(executable, "_all_args_info", None), "in_avals", rows)
    hoisted = max(0, len(told) - len(rows))
    shardings = itertools.islice(getattr(executable, "_in_shardings", ()), hoisted, None)
    leaves = []
    for number, (path, donated, aval) in enumerate(rows):
        taken = number + hoisted in kept
        sharding = _sharding(next(shardings, None), len(aval.shape)) if taken else ""
        leaves.append((path, donated, taken, _shape(aval), sharding))
    return leaves


def executable_text(executable: Any) -> str | None:
    """Return the HLO of what JAX runs, or None if the backend doesn't give it."""
    try:
        (module,) = executable.xla_executable.hlo_modules()
    except Exception:  # whatever the backend's C API reports; or there are several
        return None
    return module.to_string()


def result_leaves(compiled: Any) -> list[tuple[str, str, str]] | None:
    """List path, whole shape and sharding of each leaf of the outputs, or None."""
    import jax

    avals = getattr(_executable(compiled), "out_avals", None)
    tree = getattr(compiled, "out_tree", None)
    if avals is None or tree is None or tree.num_leaves != len(avals):
        return None
    paths, _ = jax.tree_util.tree_flatten_with_path(
        jax.tree_util.tree_unflatten(tree, [object() for _ in avals])  # as JAX itself does
    )
    shardings = getattr(_executable(compiled), "_out_shardings", None) or [None] * len(avals)
    return [
        (jax.tree_util.keystr(path), _shape(aval), _sharding(sharding, len(aval.shape)))
        for (path, _), aval, sharding in zip(paths, avals, shardings)
    ]


@dataclasses.dataclass(frozen=True)
class Placed:
    """An output with its sharding, as text and to compare."""

    path: str  # below the whole output, empty for all of it
    sharding: str  # its spec, or how HLO writes it
    rank: int  # how many dimensions it has
    own: Any  # JAX's sharding
    mesh: Any  # the one mesh of the program, if there is one

    def differs(self, wanted: Any) -> str | None:
        """Return the wanted sharding as text if it is another; else None."""
        import jax

        if isinstance(wanted, jax.sharding.PartitionSpec):
            if self.mesh is None:
                raise ShardrulesError(
                    f"{wanted} needs a mesh, and the program's shardings hold none, or several; "
                    "pass NamedSharding(mesh, spec)"
                )
            wanted = jax.sharding.NamedSharding(self.mesh, wanted)
        if not isinstance(wanted, jax.sharding.Sharding):
            raise ShardrulesError(
                f"{wanted!r} is no sharding; give a PartitionSpec such as P('data'), or a "
                "jax.sharding.Sharding"
            )
        if self.own.is_equivalent_to(wanted, self.rank):
            return None
        return _sharding(wanted, self.rank)


def placed_results(compiled: Any) -> list[Placed] | None:
    """List the outputs of a jax.stages.Compiled with their shardings, or None."""
    import jax

    leaves = result_leaves(compiled)
    shardings = jax.tree_util.tree_leaves(getattr(compiled, "output_shardings", None))
    if leaves is None or len(shardings) != len(leaves):
        return None
    inputs = getattr(_executable(compiled), "_in_shardings", ())
    meshes = {getattr(s, "mesh", None) for s in (*shardings, *inputs)} - {None}
    meshes = {mesh for mesh in meshes if isinstance(mesh, jax.sharding.Mesh)}
    mesh = meshes.pop() if len(meshes) == 1 else None
    ranks = [len(aval.shape) for aval in _executable(compiled).out_avals]
    return [
        Placed(path, _sharding(own, rank), rank, own, mesh)
        for (path, _, _), own, rank in zip(leaves, shardings, ranks)
    ]


def shared_buffers(compiled: Any, args: Sequence[Any], kwargs: dict) -> list[list[int]]:
    """List sets of positions of argument leaves that share memory."""
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
    """Flatten the arguments that a program was traced for, without the static ones."""
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
