"""Jaxprs with axis types, for tests of what reads them: as shard_map traces its body."""

import jax
from jax.sharding import PartitionSpec as P

AXES = ("data", "model")


def inside(mesh, look, *varying):
    """Call ``look`` in shard_map's body and return what it returns.

    Args:
      mesh: of the axes data and model.
      look: takes one float32[4] for each of ``varying``.
      *varying: the mesh axes over which each argument varies.
    """
    found = []

    def body(*args):
        found.append(look(*args))
        return ()

    specs = tuple(P(axes) if axes else P() for axes in varying)
    sizes = [4 * _devices(mesh, axes) for axes in varying]
    args = [jax.ShapeDtypeStruct((size,), "float32") for size in sizes]
    jax.eval_shape(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=()), *args)
    return found[0]


def _devices(mesh, axes):
    count = 1
    for axis in axes:
        count *= mesh.shape[axis]
    return count
