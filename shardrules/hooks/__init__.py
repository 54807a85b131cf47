"""What is hooked into JAX: ``install()`` returns a handle that takes everything back."""

from shardrules.hooks.install import Handle, install, installed, touched
from shardrules.hooks.sharded import shard_map, varying

__all__ = ["Handle", "install", "installed", "shard_map", "touched", "varying"]
