"""Tell which part of JAX defines a kernel's primitives, views of refs, and random keys.

A primitive is identified by the JAX module that defines it, since a user's primitive may be called
``add``, too.
"""

from __future__ import annotations

import sys
from typing import Any

from shardrules.door.protocols import Aval, Primitive

# Maps a family to its modules below jax._src.
_MODULES = {
    "parallel": "lax.parallel",
    "debug": "debugging",
    "callback": "callback ffi tpu_custom_call custom_partitioning",
    "jax": (
        "lax.lax lax.slicing lax.special lax.convolution lax.control_flow.loops "
        "lax.control_flow.conditionals lax.windowed_reductions ad_util ad_checkpoint core "
        "pjit custom_derivatives prng random random.prng random.core random.threefry2x32 "
        "random.threefry4x32 random.philox2x32 random.philox4x32"
    ),
    "checkify": "checkify",
    "state": "state.primitives state.discharge state.types state.indexing",
    "pallas": "pallas.primitives pallas.core pallas.mpmd pallas.einshape",
    "tpu": "pallas.mosaic.primitives pallas.mosaic.pipeline",
    "sc": "pallas.mosaic.sc_primitives",
    "mgpu": "pallas.mosaic_gpu.primitives pallas.mosaic_gpu.core pallas.mosaic_gpu.lowering",
    "triton": "pallas.triton.primitives",
}
# Maps a module to its family. A module also holds primitives that it imports: the first one wins.
FAMILIES: dict[str, str] = {}
for _family, _names in _MODULES.items():
    FAMILIES |= dict.fromkeys((f"jax._src.{name}" for name in _names.split()), _family)

# Keyed by the names of jax.random.key_impl, read in JAX 0.4.28 to 0.12.
_GENERATORS = {
    **dict.fromkeys(
        "threefry2x32 threefry4x32 philox2x32 philox4x32 rbg unsafe_rbg".split(), "pure"
    ),
    "pallas_tpu": "pure",
    "_pallas_internal_stateful": "stateful",
}


class Primitives(dict[Any, "str | None"]):
    """Maps a primitive to ``family:name``, or to None if JAX's own modules don't hold it."""

    def __init__(self, kind: Any):
        self._kind = kind
        self._read: set[str] = set()

    def __missing__(self, primitive: Primitive) -> str | None:
        # A primitive that exists comes from a module that is imported by now.
        for name in [n for n in FAMILIES if n in sys.modules and n not in self._read]:
            for value in list(vars(sys.modules[name]).values()):
                if isinstance(value, self._kind):
                    self.setdefault(value, f"{FAMILIES[name]}:{value.name}")
            # Add the name last: otherwise another thread could look up a primitive too early.
            self._read.add(name)
        return self.get(primitive)


def key_kind(aval: Aval) -> str | None:
    """Return the kind of generator of random keys; None if the values are not keys."""
    generator = getattr(getattr(aval, "dtype", None), "_impl", None)
    if generator is None:
        return None
    for name in ("seed", "split", "random_bits", "fold_in"):
        # Don't read the function's __module__, which functools.wraps copies.
        module = getattr(getattr(generator, name), "__globals__", {}).get("__name__", "")
        if not module.startswith("jax._src."):
            return "unknown"
    return _GENERATORS.get(generator.name, "unknown")


def view(cls: type) -> str | None:
    """Return ``family:ClassName`` of a view of a ref; None if the class isn't JAX's."""
    family = FAMILIES.get(cls.__module__)
    return None if family is None else f"{family}:{cls.__name__}"
