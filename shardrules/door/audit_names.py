"""JAX's private names that the audit of kernels needs, apart from those of the hooks.

A primitive is identified by the module of JAX that defines it: a user's may also be called ``add``.
Nothing here depends on JAX's version, and ``install`` depends on nothing here.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any

from shardrules.door.versions import tested
from shardrules.errors import UnsupportedJaxError

# key -> (module, attribute, what for); read in JAX 0.4.28 to 0.12.
AUDIT_SYMBOLS = {
    "AbstractRef": ("jax._src.state", "AbstractRef", "tells a kernel's refs from its values"),
    "Literal": ("jax._src.core", "Literal", "tells a jaxpr's constants from its variables"),
    "Primitive": ("jax._src.core", "Primitive", "finds primitives in the modules below"),
    "user_frame": (
        "jax._src.source_info_util",
        "user_frame",
        "the line of the kernel that an equation comes from",
    ),
}

# (family, module). Read only where something else has imported them: who holds a primitive has.
# A module may also hold primitives that it imports; the first family wins.
AUDIT_MODULES = tuple(
    (family, f"jax._src.{module}")
    for family, modules in (
        ("parallel", "lax.parallel"),
        ("debug", "debugging"),
        ("callback", "callback ffi tpu_custom_call custom_partitioning"),
        (
            "jax",
            "lax.lax lax.slicing lax.special lax.convolution lax.control_flow.loops "
            "lax.control_flow.conditionals lax.windowed_reductions ad_util ad_checkpoint core "
            "pjit custom_derivatives prng random random.prng random.core random.threefry2x32 "
            "random.threefry4x32 random.philox2x32 random.philox4x32",
        ),
        ("checkify", "checkify"),
        ("state", "state.primitives state.discharge state.types state.indexing"),
        ("pallas", "pallas.primitives pallas.core pallas.mpmd pallas.einshape"),
        ("tpu", "pallas.mosaic.primitives pallas.mosaic.pipeline"),
        ("sc", "pallas.mosaic.sc_primitives"),
        ("mgpu", "pallas.mosaic_gpu.primitives pallas.mosaic_gpu.core pallas.mosaic_gpu.lowering"),
        ("triton", "pallas.triton.primitives"),
    )
    for module in modules.split()
)

# By jax.random.key_impl's names, read in JAX 0.4.28 to 0.12.
_GENERATORS = {
    **dict.fromkeys(
        "threefry2x32 threefry4x32 philox2x32 philox4x32 rbg unsafe_rbg".split(), "pure"
    ),
    "pallas_tpu": "pure",
    "_pallas_internal_stateful": "stateful",
}


class AuditNames:
    """What the auditor knows of JAX."""

    # symbols: those of ``AUDIT_SYMBOLS``, by key.

    def __init__(self, symbols: dict[str, Any]):
        self.__dict__.update(symbols)
        self._scanned: set[str] = set()
        self.primitives: dict[Any, str] = {}  # to family:name, for the modules read so far
        self._families = {module: family for family, module in AUDIT_MODULES}

    if TYPE_CHECKING:  # the symbols

        def __getattr__(self, name: str) -> Any: ...

    def primitive(self, primitive: Any) -> str | None:
        """Return ``family:name``, or None for a primitive that JAX's own modules don't hold."""
        if primitive not in self.primitives:
            for family, name in AUDIT_MODULES:
                module = sys.modules.get(name)
                if module is None or name in self._scanned:
                    continue
                self._scanned.add(name)
                for value in list(vars(module).values()):
                    if isinstance(value, self.Primitive):
                        self.primitives.setdefault(value, f"{family}:{value.name}")
        return self.primitives.get(primitive)

    def key_kind(self, aval: Any) -> str | None:
        """Say what kind of generator random keys are of."""
        generator = getattr(getattr(aval, "dtype", None), "_impl", None)
        if generator is None:
            return None
        for name in ("seed", "split", "random_bits", "fold_in"):
            # Not the function's __module__, which functools.wraps copies.
            module = getattr(getattr(generator, name), "__globals__", {}).get("__name__", "")
            if not module.startswith("jax._src."):
                return "unknown"
        return _GENERATORS.get(generator.name, "unknown")

    def device_axes(self) -> frozenset[str]:
        """Return the axes of the mesh of devices that is traced for."""
        import jax

        current = getattr(jax.sharding, "get_abstract_mesh", None)  # from JAX 0.5
        return frozenset(() if current is None else current().axis_names)

    def view(self, cls: type) -> str | None:
        """Return ``family:ClassName`` of a view of a ref; None for a class of somebody else."""
        family = self._families.get(cls.__module__)
        return None if family is None else f"{family}:{cls.__name__}"

    def place(self, eqn: Any) -> str | None:
        """Return ``file:line`` of the user's code that an equation comes from, if it says."""
        info = eqn.source_info
        try:
            frame = self.user_frame(info.traceback)
        except (AttributeError, TypeError):
            frame = self.user_frame(info)  # to JAX 0.6 it took the source info
        return None if frame is None else f"{frame.file_name}:{frame.start_line}"


@functools.lru_cache(maxsize=1)
def load_audit() -> AuditNames:
    """Look up what the auditor needs of the JAX that is installed."""
    import jax

    symbols = {}
    for key, (module, attribute, reason) in AUDIT_SYMBOLS.items():
        try:
            symbols[key] = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UnsupportedJaxError(
                f"shardrules can't audit kernels on JAX {jax.__version__}: {module}:{attribute} "
                f"is missing. It is used for: {reason}. Declare your kernels instead "
                f"(shardrules.no_communication), or install JAX {tested()}.",
                version=jax.__version__,
                symbol=f"{module}:{attribute}",
            ) from error
    return AuditNames(symbols)
