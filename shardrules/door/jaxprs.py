"""Reading jaxprs: what is in an equation's parameters, by any JAX's names for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from shardrules.registry.axistypes import AxisType

__all__ = [
    "CASTS",
    "callable_of",
    "is_inexact",
    "named",
    "opened",
    "read",
    "scan_counts",
    "variable",
    "widened",
]

# Casts to varying, by JAX's names.
CASTS = ("pvary", "pcast", "reduced_vary_cast", "reduced_vary_cast_p")


def widened(have: AxisType, axes: Iterable[str]) -> AxisType:
    """Return a type that varies over ``axes`` too; partial sums over one of them stay so."""
    return have.vary(*(frozenset(axes) - have.unreduced))


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Return how many of a scan's operands are constants, and how many after these its carry."""
    if "ft_in" in params:  # from JAX 0.11: pytrees of the constants, the carry and the rest
        constants, carry, _ = map(len, params["ft_in"].unpack())
        return constants, carry
    return params["num_consts"], params["num_carry"]


def opened(value: Any) -> Any:
    """Return a jaxpr without its constants; None for what is no jaxpr."""
    value = getattr(value, "jaxpr", value)
    return value if hasattr(value, "eqns") and hasattr(value, "invars") else None


def named(params: dict[str, Any]) -> frozenset[str]:
    """Return the mesh axes that a cast names."""
    axes = params.get("axes", ())
    return frozenset((axes,) if isinstance(axes, str) else axes)


def is_inexact(aval: Any) -> bool:
    """Whether a value has a cotangent of its own dtype: floats and complex numbers."""
    import jax

    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, jax.numpy.inexact)


def read(env: dict[Any, Any], atom: Any) -> Any:
    """Return what a variable has become; a literal stays."""
    return atom if hasattr(atom, "val") else env.get(atom, atom)


def variable(like: Any, aval: Any) -> Any:
    """Return a new variable of a jaxpr."""
    kind = type(like)
    suffixed = hasattr(like, "suffix") and kind.__name__ != "DropVar"  # JAX 0.6.0
    return kind("", aval) if suffixed else kind(aval)


def callable_of(function: Any) -> Callable:
    """Return what can be called with arrays; a WrappedFun is no callable."""
    return getattr(function, "call_wrapped", function)
