"""The public differences between JAX versions that these tests meet: asked for, not looked up.

A test in this folder writes ``versions.shard_map`` and what follows here; all else in it is the
same program on every JAX.
"""

from __future__ import annotations

import functools
import importlib

import jax
import numpy as np
from jax.sharding import Mesh


def mesh_of(**sizes: int) -> Mesh:
    """Return a mesh of the first devices: ``mesh_of(data=4, model=2)``."""
    count = int(np.prod(list(sizes.values())))
    devices = np.array(jax.devices()[:count]).reshape(*sizes.values())
    return Mesh(devices, tuple(sizes))


@functools.lru_cache(maxsize=None)
def _shard_map():
    """Return shard_map and the name of its check: it moved, and the check got another name."""
    found = getattr(jax, "shard_map", None)
    if found is not None and callable(found):
        return found, "check_vma"
    return importlib.import_module("jax.experimental.shard_map").shard_map, "check_rep"


def shard_map(f, *, mesh, in_specs, out_specs, check: bool = True):
    """Call this JAX's shard_map, with its check on or off."""
    function, name = _shard_map()
    return function(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **{name: check})


def has_types() -> bool:
    """Whether this JAX tracks the check by types on avals rather than by replication sets."""
    return _shard_map()[1] == "check_vma"
