"""shard_map and the types inside of it, by whatever names this JAX has for them."""

from __future__ import annotations

from typing import Any

from shardrules.door import internals


def varying(value: Any) -> frozenset[str]:
    """Return the mesh axes over which a value varies, as its type here says."""
    door = internals.load()
    door.need_types("hooks.varying")
    return door.axis_type(door.typeof(value)).varying


def shard_map(f: Any, mesh: Any, in_specs: Any, out_specs: Any, *, check: bool) -> Any:
    """Return ``f`` in shard_map, by the names that this JAX has for it and for its check."""
    import jax

    if hasattr(jax, "shard_map"):
        return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check)
    from jax.experimental.shard_map import shard_map as old

    return old(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_rep=check)


def mesh_without_devices() -> Any:
    """Return an abstract mesh of 2 x 2 (data, model) for tracing only."""
    import jax

    sizes, names = (2, 2), ("data", "model")
    kinds = getattr(jax.sharding, "AxisType", None)
    if kinds is not None and hasattr(kinds, "Auto"):  # from JAX 0.12 they are explicit else
        return jax.sharding.AbstractMesh(sizes, names, axis_types=(kinds.Auto, kinds.Auto))
    return jax.sharding.AbstractMesh(sizes, names)
