"""Tell which modules and files are JAX's, and call functions whose place depends on its version."""

from __future__ import annotations

import functools
import os
import pathlib
from typing import Any

from shardrules.door import seams

PALLAS = "jax._src.pallas."  # these modules hold no kernel of a user
PALLAS_GPU_CORE = "jax._src.pallas.mosaic_gpu.core"  # the module of plgpu.kernel's own function
# The modules in which JAX makes a shard_map of a function: since 0.6.1, and before.
SHARD_MAPS = ("jax._src.shard_map", "jax.experimental.shard_map")


def is_wrapper(module: str | None) -> bool:
    """Return whether a module's frames are between a shard_map and its caller."""
    return module in (*SHARD_MAPS, "jax._src.traceback_util")


def owns(path: str) -> bool:
    """Return whether a source file is one of JAX's private ones."""
    import jax

    folder = os.path.dirname(os.path.abspath(jax.__file__))
    return path.startswith(os.path.join(folder, "_src", ""))


def devices() -> list[Any]:
    """Return the devices of JAX's default platform, which it initializes."""
    import jax

    return jax.devices()


def shard_map(f: Any, mesh: Any, in_specs: Any, out_specs: Any, *, check: bool) -> Any:
    """Return ``f`` in shard_map, by the names of shard_map and its check in this JAX."""
    import jax

    if hasattr(jax, "shard_map"):
        return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check)
    from jax.experimental.shard_map import shard_map as old

    return old(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_rep=check)


@functools.cache
def leave_out_frames() -> str:
    """Leave this package's frames out of JAX's source lines; return its folder."""
    folder = str(pathlib.Path(__file__).parents[1])
    seams.named("exclude_frames")(folder)
    return folder
