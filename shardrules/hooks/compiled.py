"""What a ``jax.stages.Compiled`` knows beside its text: parameter shardings, and the mesh."""

from __future__ import annotations

from typing import Any

__all__ = ["mesh_shape", "parameter_shardings"]


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
