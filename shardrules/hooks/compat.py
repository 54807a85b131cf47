"""The one door to JAX's private names: each looked up once, checked, with its range and reason.

Nothing else in shardrules names ``jax._src`` or a JAX version. ``load`` finds every symbol and
checks its parameters before anything is touched, so the hooks are installed whole or not at all.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from typing import Any

from shardrules.errors import UnsupportedJaxError
from shardrules.rules import AxisType

__all__ = ["Jax", "Symbol", "SYMBOLS", "load"]


@dataclasses.dataclass(frozen=True)
class Symbol:
    """One private name of JAX.

    Args:
      key: what this package calls it.
      path: ``module:attribute``.
      versions: the JAX versions that were read for it.
      parameters: parameter names that the hooks pass or read; checked before use.
      reason: what it is needed for.
    """

    key: str
    path: str
    versions: str
    parameters: tuple[str, ...]
    reason: str


_PALLAS = "jax._src.pallas.pallas_call"

SYMBOLS = (
    Symbol("typeof", "jax._src.core:typeof", "0.10", (), "the aval of a tracer, with its type"),
    Symbol("ShapedArray", "jax._src.core:ShapedArray", "0.10",
           ("shape", "dtype", "sharding", "manual_axis_type"), "avals that carry axis types"),
    Symbol("ManualAxisType", "jax._src.core:ManualAxisType", "0.10",
           ("varying", "unreduced", "reduced"), "JAX's own form of AxisType"),
    Symbol("current_mesh_sharding", "jax._src.core:get_cur_mesh_sharding", "0.10", (),
           "an aval without a mesh can't carry an axis type"),
    Symbol("AbstractRef", "jax._src.state:AbstractRef", "0.10", ("inner_aval",),
           "refs count as inputs and can't be cast"),
    Symbol("abstract_mesh", "jax._src.mesh:get_abstract_mesh", "0.10", (),
           "which mesh axes are manual where we are"),
    Symbol("check_vma", "jax._src.config:_check_vma", "0.10", (),
           "whether shard_map's check is on where we are"),
    Symbol("transformation", "jax._src.linear_util:transformation2", "0.10", ("gen", "fun"),
           "wraps a custom_vjp's functions without losing their debug info"),
    Symbol("custom_derivatives", "jax._src.custom_derivatives", "0.10", (),
           "holds the three functions that flatten a custom_vjp"),
    Symbol("flatten_primal", "jax._src.custom_derivatives:_flatten_fun_nokwargs", "0.10", (),
           "a custom_vjp's primal function, on its way to the primitive"),
    Symbol("flatten_fwd", "jax._src.custom_derivatives:_flatten_fwd", "0.10", (),
           "a custom_vjp's fwd, on its way to the primitive"),
    Symbol("flatten_bwd", "jax._src.custom_derivatives:_flatten_bwd", "0.10", (),
           "a custom_vjp's bwd: its cotangents are checked against the primals' types here"),
    Symbol("SymbolicZero", "jax._src.ad_util:SymbolicZero", "0.10", ("aval",),
           "cotangents that are known to be zero keep their form"),
    Symbol("dce_jaxpr", "jax._src.interpreters.partial_eval:dce_jaxpr", "0.10",
           ("jaxpr", "used_outputs"), "the part of a bwd that one cotangent depends on"),
    Symbol("pallas_call_p", f"{_PALLAS}:pallas_call_p", "0.10", (), "the primitive"),
    Symbol("pallas_call_module", _PALLAS, "0.10", (), "holds the kernel tracer"),
    Symbol("trace_kernel", f"{_PALLAS}:_trace_kernel_to_jaxpr", "0.10",
           ("fun", "grid_mapping"), "the one place where kernel function and jaxpr meet"),
    Symbol("pallas_core", "jax._src.pallas.core", "0.10", (), "holds the out_shape converter"),
    Symbol("convert_out_shape", "jax._src.pallas.core:_convert_out_shape_to_aval", "0.10",
           ("out_shape",), "raises on an output without annotation"),
    Symbol("lowerings", "jax._src.interpreters.mlir:_lowerings", "0.10", (),
           "the table of lowering rules"),
    Symbol("LoweringRuleEntry", "jax._src.interpreters.mlir:LoweringRuleEntry", "0.10",
           ("rule", "inline"), "an entry of that table"),
    Symbol("ir", "jax._src.lib.mlir:ir", "0.10", (), "writes the tag on the lowered call"),
    Symbol("make_user_context", "jax:make_user_context", "0.7.2 on", (),
           "puts the registry's version into jit's trace key"),
)


class Jax:
    """JAX's private symbols as attributes, and the few operations that are built from them."""

    def __init__(self, symbols: dict[str, Any]):
        self.__dict__.update(symbols)

    # Axis types.

    def axis_type(self, aval: Any) -> AxisType:
        """Return an aval's axis type; invariant for what carries none (tokens, keys' bases)."""
        if isinstance(aval, self.AbstractRef):
            aval = aval.inner_aval
        mat = getattr(aval, "manual_axis_type", None)
        return AxisType() if mat is None else AxisType(mat.varying, mat.unreduced, mat.reduced)

    def with_axis_type(self, aval: Any, axis_type: AxisType) -> Any:
        """Return ``aval`` with another axis type; what can't carry one is returned as it is."""
        if not isinstance(aval, self.ShapedArray):
            return aval
        mat = self.ManualAxisType(varying=axis_type.varying, unreduced=axis_type.unreduced,
                                  reduced=axis_type.reduced)
        if aval.sharding.mesh.empty and axis_type.axes:
            # out_shape given as an array: its aval names no mesh (JAX 0.10.2).
            return aval.update(sharding=self.current_mesh_sharding(), manual_axis_type=mat)
        return aval.update(manual_axis_type=mat)

    def manual_axes(self) -> tuple[str, ...]:
        """Return the manual mesh axes here, in the mesh's order; empty outside shard_map."""
        mesh = self.abstract_mesh()
        manual = frozenset(mesh.manual_axes)
        return tuple(a for a in mesh.axis_names if a in manual)

    def checking(self) -> bool:
        """Whether we are inside a shard_map that tracks how values vary."""
        return bool(self.check_vma.value) and bool(self.manual_axes())

    def unchecked(self):
        """Return a context manager in which shard_map's check is off."""
        return self.check_vma(False)

    def cast(self, value: Any, want: AxisType) -> Any:
        """Cast an array from its own axis type to a type that varies over more axes."""
        import jax
        have = self.axis_type(self.typeof(value))
        # One cast moves axes of one state only: jax.lax.pcast refuses a mixture (JAX 0.10.2).
        for axes in (have.reduced & want.varying, want.varying - have.axes):
            if axes:
                value = jax.lax.pcast(value, tuple(sorted(axes)), to="varying")
        axes = have.varying & want.unreduced
        return jax.lax.pcast(value, tuple(sorted(axes)), to="unreduced") if axes else value


def _find(symbol: Symbol) -> Any:
    import jax
    module, _, attribute = symbol.path.partition(":")
    try:
        found = importlib.import_module(module)
        if attribute:
            found = getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        raise _unsupported(jax.__version__, symbol, "is missing") from error
    if symbol.parameters:
        have = inspect.signature(found).parameters
        lost = [p for p in symbol.parameters
                if p not in have and p not in getattr(found, "__slots__", ())]
        if lost:
            raise _unsupported(jax.__version__, symbol,
                               f"no longer takes {', '.join(lost)} (it takes {', '.join(have)})")
    return found


def _unsupported(version: str, symbol: Symbol, what: str) -> UnsupportedJaxError:
    return UnsupportedJaxError(
        f"shardrules has no hooks for JAX {version}: {symbol.path} {what}. It is used for: "
        f"{symbol.reason} (read in JAX {symbol.versions}). Nothing was changed. Install a JAX "
        "that the README's table of versions lists, or a newer shardrules.",
        version=version, symbol=symbol.path)


@functools.lru_cache(maxsize=1)
def load() -> Jax:
    """Look up every private symbol of the JAX that is installed.

    Raises:
      UnsupportedJaxError: if one is missing or has other parameters; nothing was changed.
    """
    return Jax({symbol.key: _find(symbol) for symbol in SYMBOLS})
