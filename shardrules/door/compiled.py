"""What a ``jax.stages.Compiled`` knows beside its text, and what a profile holds of programs."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from shardrules.errors import ProfileError


def mesh_shape(tree: Any) -> dict[str, int] | None:
    """Return the axis sizes of the one mesh that the shardings in ``tree`` use, else None."""
    import jax

    meshes = set()
    for leaf in jax.tree_util.tree_leaves(tree):
        mesh = getattr(getattr(leaf, "sharding", leaf), "mesh", None)
        if isinstance(mesh, jax.sharding.Mesh):
            meshes.add(mesh)
    return dict(meshes.pop().shape) if len(meshes) == 1 else None


def parameter_shardings(compiled: Any) -> list[tuple[tuple[int, ...], str]] | None:
    """Return shape and HLO sharding of each parameter that a compiled program kept."""
    # ``input_shardings`` holds None for pruned arguments (JAX 0.10.2), which are no parameters.
    import jax

    is_none = lambda x: x is None  # noqa: E731
    shardings = jax.tree_util.tree_leaves(_told(compiled, "input_shardings"), is_leaf=is_none)
    infos = jax.tree_util.tree_leaves(_told(compiled, "args_info"))
    if len(shardings) != len(infos):
        return None
    # An argument's shape stands on its aval in JAX 0.4.28.
    kept = [
        (getattr(info, "aval", info), sharding)
        for info, sharding in zip(infos, shardings)
        if sharding is not None
    ]
    return placed(*zip(*kept)) if kept else []


def placed(avals: Any, shardings: Any) -> list[tuple[tuple[int, ...], str]]:
    """Return shape on one device and HLO sharding of arrays."""
    found = []
    for aval, sharding in zip(avals, shardings):
        shape = _array_shape(aval)
        found.append((sharding.shard_shape(shape), str(sharding._to_xla_hlo_sharding(len(shape)))))
    return found


def output_shardings(compiled: Any, shapes: list[str]) -> list[tuple[str, str] | None] | None:
    """Return path and HLO sharding of each array that a compiled program returns."""
    # The tokens of ordered effects stand before a program's own outputs and have no sharding.
    import jax

    told = _told(compiled, "output_shardings")
    if told is None and shapes:
        return None
    leaves, _ = jax.tree_util.tree_flatten_with_path(told)
    return promised([(jax.tree_util.keystr(path), leaf) for path, leaf in leaves], shapes)


def promised(
    leaves: Sequence[tuple[str, Any]], shapes: list[str]
) -> list[tuple[str, str] | None] | None:
    """Return path and HLO sharding of each array of a traced program's result."""
    tokens = len(shapes) - len(leaves)
    if tokens < 0 or any(shape != "token[]" for shape in shapes[:tokens]):
        return None
    ranks = [
        len(shape.partition("[")[2].strip("]").split(",")) if "[]" not in shape else 0
        for shape in shapes[tokens:]
    ]
    try:
        return [None] * tokens + [
            (path, str(sharding._to_xla_hlo_sharding(rank)))
            for (path, sharding), rank in zip(leaves, ranks)
        ]
    except (AttributeError, NotImplementedError):  # pmap's own, to JAX 0.9
        return None


def result_paths(closed_jaxpr: Any) -> tuple[str, ...] | None:
    """Return the path of each result of a traced function, None if JAX kept none."""
    info = getattr(getattr(closed_jaxpr, "jaxpr", closed_jaxpr), "debug_info", None)
    paths = getattr(info, "result_paths", None)
    if not isinstance(paths, (tuple, list)):
        return None
    # JAX 0.5 and newer write result['w'], older ones ['w'].
    return tuple(str(path).removeprefix("result") for path in paths)


def platform(compiled: Any) -> str | None:
    """Return ``cpu``, ``tpu`` or ``gpu``, or None if a compiled program does not say."""
    import jax

    leaves = jax.tree_util.tree_leaves(
        [_told(compiled, name) for name in ("input_shardings", "output_shardings")]
    )
    found = {device.platform for leaf in leaves for device in leaf.device_set}
    if len(found) != 1:
        return None
    name = found.pop()
    return "gpu" if name in ("cuda", "rocm") else name


def temp_bytes(compiled: Any) -> tuple[int | None, int | None]:
    """Return the bytes of a program's temporaries on the host and on one device, if it says."""
    # The host's are not told before JAX 0.4.31, and by some backends not at all.
    try:
        stats = compiled.memory_analysis()
    except (AttributeError, NotImplementedError, RuntimeError):
        return None, None
    return (
        getattr(stats, "host_temp_size_in_bytes", None),
        getattr(stats, "temp_size_in_bytes", None),
    )


def unoptimized_text(lowered: Any) -> str:
    """Return the HLO of a lowered program before any of XLA's passes, with source lines."""
    # Before JAX 0.4.36 it holds neither these nor the op_names that tell the phase.
    try:
        return lowered.as_text(dialect="hlo", debug_info=True)
    except TypeError:  # debug_info is new in JAX 0.4.36
        return lowered.as_text(dialect="hlo")


def mesh_of_lowered(lowered: Any, arguments: Any) -> dict[str, int] | None:
    """Return the axis sizes of the one mesh of a lowered program, else None."""
    found = mesh_shape(arguments)
    if found is not None:
        return found
    # What a Lowered was given stands on no public attribute; compiling gives it back.
    return mesh_of(lowered.compile())


def mesh_of(compiled: Any) -> dict[str, int] | None:
    """Return the axis sizes of the one mesh of a compiled program, else None."""
    return mesh_shape([_told(compiled, name) for name in ("input_shardings", "output_shardings")])


def _told(compiled: Any, name: str) -> Any:
    """Return an attribute of a compiled program, or None if it can't give it."""
    # JAX 0.4.28 raises ValueError for the input_shardings of a program with a pruned argument.
    try:
        return getattr(compiled, name)
    except (AttributeError, NotImplementedError, ValueError):
        return None


def _array_shape(aval: Any) -> tuple[int, ...]:
    """Return the shape of an argument's array; a key's data has more dimensions."""
    import jax

    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        aval = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return tuple(aval.shape)


# Where HloModule and HloSharding stood in JAX 0.10 to 0.12, 0.6.2 to 0.9, and before.
_HLO_MODULE = ("jaxlib._hlo", "jaxlib._jax", "jaxlib.xla_extension")


def hlo_text(module_proto: bytes) -> str:
    """Return the text of a serialized HloModuleProto.

    Raises:
      ProfileError: jaxlib can't read it.
    """
    kind = _of_jaxlib("HloModule")
    if kind is None:
        raise ProfileError("this jaxlib has no HloModule to read a program with")
    try:
        return kind.from_serialized_hlo_module_proto(module_proto).to_string()
    except Exception as error:  # jaxlib's own, of no class that it names
        raise ProfileError(f"jaxlib can't read a program of it: {error}") from error


def sharding_text(op_sharding: bytes) -> str | None:
    """Return the text of a serialized OpSharding, None where jaxlib can't read it."""
    try:
        proto = _of_jaxlib("OpSharding")()
        proto.ParseFromString(op_sharding)
        return str(_of_jaxlib("HloSharding").from_proto(proto))
    except Exception:  # jaxlib's own, of no class that it names
        return None


def _of_jaxlib(name: str) -> Any:
    for module in _HLO_MODULE:
        try:
            kind = getattr(importlib.import_module(module), name, None)
        except ImportError:
            continue
        if kind is not None:
            return kind
    return None
