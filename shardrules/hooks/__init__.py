"""What is hooked into JAX: ``install()`` returns a handle that takes everything back."""

from shardrules.door.places import shard_map
from shardrules.hooks.install import Handle, install, installed, touched, varying

__all__ = ["Handle", "install", "installed", "shard_map", "touched", "varying"]
