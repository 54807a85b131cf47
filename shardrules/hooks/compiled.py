"""What a ``jax.stages.Compiled`` knows beside its text: parameter shardings, and the mesh."""

from __future__ import annotations

from typing import Any

__all__ = ["mesh_of_lowered", "mesh_shape", "output_shardings", "parameter_shardings", "platform",
           "unoptimized_text"]


def mesh_shape(tree: Any) -> dict[str, int] | None:
    """Return the axis sizes of the one mesh that the shardings in ``tree`` use, else None.

    Args:
      tree: a pytree of shardings, or of arrays and ShapeDtypeStructs that carry them.
    """
    import jax
    meshes = set()
    for leaf in jax.tree_util.tree_leaves(tree):
        mesh = getattr(getattr(leaf, "sharding", leaf), "mesh", None)
        if isinstance(mesh, jax.sharding.Mesh):
            meshes.add(mesh)
    return dict(meshes.pop().shape) if len(meshes) == 1 else None


def parameter_shardings(compiled: Any) -> list[tuple[tuple[int, ...], str]] | None:
    """Return shape and HLO sharding of each parameter that a compiled program kept.

    ``input_shardings`` holds None for pruned arguments (JAX 0.10.2), which are no parameters.

    Args:
      compiled: a jax.stages.Compiled.

    Returns:
      For each parameter its shape on one device and its sharding as HLO prints it, or None if
      the program does not say.
    """
    import jax
    is_none = lambda x: x is None  # noqa: E731
    try:
        shardings = jax.tree_util.tree_leaves(compiled.input_shardings, is_leaf=is_none)
        infos = jax.tree_util.tree_leaves(compiled.args_info)
    except (AttributeError, NotImplementedError):
        return None
    if len(shardings) != len(infos):
        return None
    # An argument's shape stands on its aval in JAX 0.4.28.
    kept = [(tuple(getattr(info, "aval", info).shape), sharding)
            for info, sharding in zip(infos, shardings)
            if sharding is not None]
    return [(sharding.shard_shape(shape), str(sharding._to_xla_hlo_sharding(len(shape))))
            for shape, sharding in kept]


def output_shardings(compiled: Any, ranks: list[int]) -> list[tuple[str, str, Any]] | None:
    """Return path, HLO sharding and JAX sharding of each array that a compiled program returns.

    Args:
      compiled: a jax.stages.Compiled.
      ranks: the number of dimensions of each array, in order.

    Returns:
      One entry for each array, or None if the program does not say.
    """
    import jax
    try:
        leaves, _ = jax.tree_util.tree_flatten_with_path(compiled.output_shardings)
    except (AttributeError, NotImplementedError):
        return None
    if len(leaves) != len(ranks):
        return None
    return [(jax.tree_util.keystr(path), str(sharding._to_xla_hlo_sharding(rank)), sharding)
            for (path, sharding), rank in zip(leaves, ranks)]


def platform(compiled: Any) -> str | None:
    """Return ``cpu``, ``tpu`` or ``gpu``, or None if a compiled program does not say."""
    import jax
    try:
        leaves = jax.tree_util.tree_leaves((compiled.input_shardings, compiled.output_shardings))
    except (AttributeError, NotImplementedError):
        return None
    found = {device.platform for leaf in leaves for device in leaf.device_set}
    if len(found) != 1:
        return None
    name = found.pop()
    return "gpu" if name in ("cuda", "rocm") else name


def unoptimized_text(lowered: Any) -> str:
    """Return the HLO of a lowered program before any of XLA's passes, with source lines.

    Before JAX 0.4.36 it holds neither these nor the op_names that tell the phase.

    Args:
      lowered: a jax.stages.Lowered.
    """
    try:
        return lowered.as_text(dialect="hlo", debug_info=True)
    except TypeError:  # debug_info is new in JAX 0.4.36
        return lowered.as_text(dialect="hlo")


def mesh_of_lowered(lowered: Any, arguments: Any) -> dict[str, int] | None:
    """Return the axis sizes of the one mesh of a lowered program, else None.

    Args:
      lowered: a jax.stages.Lowered.
      arguments: a pytree of what it was lowered with, for the shardings that these carry.
    """
    found = mesh_shape(arguments)
    if found is not None:
        return found
    # What a Lowered was given stands on no public attribute; compiling gives it back.
    compiled = lowered.compile()
    return mesh_shape((compiled.input_shardings, compiled.output_shardings))
