"""Plug the registry into JAX: ``install()`` returns a handle that takes everything back.

This folder is the only one that names ``jax._src`` or a JAX version.
"""

from shardrules.hooks.handles import Handle, install, installed, touched
from shardrules.hooks.sharded import shard_map, varying

__all__ = ["Handle", "install", "installed", "shard_map", "touched", "varying"]
