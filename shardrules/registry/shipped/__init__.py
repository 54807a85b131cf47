"""Rules that come with shardrules for what other libraries make, one file for each library.

A file is read once its library has been imported, and the user's own rules, and those that the
library ships itself, win over it. Each entry is a function of its operands on each device, and says
why. A primitive is named ``module:attribute`` and the rule is bound to that object, so that another
primitive of the same name has no part in it; a kernel is named as ``register`` takes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

__all__ = ["SHIPPED", "Shipped"]


@dataclasses.dataclass(frozen=True)
class Shipped:
    """What is known of one library; each name with the reason.

    Args:
      primitives: ``module:attribute`` of a primitive.
      kernels: ``module:name`` of a Pallas kernel, or a pattern.
      targets: an FFI target; a Python function of that name has no part in it.
    """

    primitives: Mapping[str, str] = dataclasses.field(default_factory=dict)
    kernels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    targets: Mapping[str, str] = dataclasses.field(default_factory=dict)


# From a library's module to the one that says what is known of it.
SHIPPED = {
    name: f"{__name__}.{name}"
    for name in ("jax", "jaxlib", "equinox", "klujax", "jax_finufft", "tokamax")
}
