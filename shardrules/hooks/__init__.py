"""Hook into JAX: ``install()`` returns a handle that undoes everything."""

from shardrules.door.places import shard_map
from shardrules.hooks.install import Handle, install, installed, replaced, touched, varying

__all__ = ["Handle", "install", "installed", "replaced", "shard_map", "touched", "varying"]
