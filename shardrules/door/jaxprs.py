"""Name JAX's primitives, and read an equation's parameters.

The lists hold every name that a primitive has had from JAX 0.4.28 to 0.12.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, overload

from shardrules.door.protocols import Aval, ClosedJaxpr, Eqn, Jaxpr, Params, Var
from shardrules.registry.axistypes import AxisType

# Casts, by the state that they cast to. All of them name mesh axes, but none communicates.
TO_VARYING = ("pvary", "pcast", "reduced_vary_cast", "reduced_vary_cast_p")
TO_UNREDUCED = ("vary_unreduced_cast", "vary_unreduced_cast_p")
CASTS = frozenset((*TO_VARYING, *TO_UNREDUCED, "pbroadcast", "preduced"))

# The name scope of a cast that a user wrote with shardrules.vary. It holds no other cast.
DECLARED = "shardrules.vary"

# The name scope of a cast that gives a branch's result the join of all branches' types.
JOINED = "shardrules.joined"

# All-reduces that add.
SUMS = ("psum", "psum_invariant", "psum2")

# Primitives whose jaxpr is a kernel's. The kernel's rule describes it.
KERNELS = frozenset({"pallas_call", "core_map", "mpmd_map"})

# Primitives that make a ref from a value, by JAX's names (0.4.28 to 0.12).
NEW_REFS = frozenset("new_ref ref mutable_array array_ref".split())

# Primitives that read refs and store nothing.
READS = frozenset("get freeze masked_load load".split())

# JAX's effects of reading and writing a ref (0.4.28 to 0.12). JAX keeps the set of a jaxpr's
# effects, so it costs nothing to test whether there are others (mesh axes or communication).
_OF_REFS = frozenset({"ReadEffect", "WriteEffect", "AccumEffect"})

# Primitives that call one jaxpr with all of their operands, by JAX's names (0.6.0 to 0.12).
CALLS = {
    "pjit": "jaxpr",
    "jit": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
}

# Primitives whose derivative is the author's rule (0.4.28 to 0.12).
CUSTOM_CALLS = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}


def only_touches_refs(jaxpr: Jaxpr) -> bool:
    return _OF_REFS.issuperset([type(effect).__name__ for effect in jaxpr.effects])


def widened(have: AxisType, axes: Iterable[str]) -> AxisType:
    """Return a type that varies over ``axes`` too, except where it is unreduced."""
    return have.vary(*(frozenset(axes) - have.unreduced))


def size_of(axes: frozenset[str]) -> int | None:
    """Return the number of devices along mesh axes; None if an axis is not in scope."""
    import jax

    try:
        size: int = jax.lax.psum(1, tuple(sorted(axes)))
        return size
    except NameError:
        return None


def union(types: Iterable[AxisType]) -> frozenset[str]:
    return frozenset().union(*(axis_type.varying for axis_type in types))


def gained(types: Iterable[AxisType], before: Iterable[AxisType]) -> frozenset[str]:
    return frozenset().union(*(new.varying - old.varying for new, old in zip(types, before)))


def scan_counts(params: Params) -> tuple[int, int]:
    if "ft_in" in params:  # from JAX 0.11: pytrees of the constants, the carry and the rest
        constants, carry, _ = map(len, params["ft_in"].unpack())
        return constants, carry
    return params["num_consts"], params["num_carry"]


@overload
def opened(value: Jaxpr | ClosedJaxpr) -> Jaxpr: ...
@overload
def opened(value: Any) -> Any: ...
def opened(value: Any) -> Any:
    """Return a jaxpr without its constants; None if ``value`` is not a jaxpr."""
    value = getattr(value, "jaxpr", value)
    return value if hasattr(value, "eqns") and hasattr(value, "invars") else None


def name_of(eqn: Eqn) -> str:
    """Return the name of an equation's primitive; since JAX 0.12 a linear one may be wrapped."""
    name: str = eqn.primitive.name
    return name if name[:9] != "vjp_node[" else name[9:].removesuffix("]")


def is_inexact(aval: object) -> bool:
    """Return whether a value is a float or complex, and so has a cotangent of its own dtype."""
    import jax

    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, jax.numpy.inexact)


def has_tangent(value: Any) -> bool:
    """Return whether a value has a gradient, as a quantized integer may have, too."""
    import jax

    try:
        if hasattr(value, "shape") and hasattr(value, "dtype"):  # also a ShapeDtypeStruct
            aval = jax.core.ShapedArray(value.shape, value.dtype)
        else:
            aval = jax.typeof(value)
        tangent = aval.to_tangent_aval()
    except Exception:  # not a value of JAX's, or JAX 0.4.35 and older  # noqa: BLE001
        return is_inexact(value)
    return is_inexact(value) or getattr(tangent, "dtype", None) != jax.dtypes.float0


def is_float(value: Any) -> bool:
    """Return whether a value is real and of a float type."""
    import jax

    return bool(jax.numpy.issubdtype(getattr(value, "dtype", bool), jax.numpy.floating))


def value_of(env: dict[Any, Any], atom: Var) -> Any:
    """Return the variable or value that replaces a variable; return a literal as it is."""
    return atom if hasattr(atom, "val") else env.get(atom, atom)


def renamed_effects(effects: Iterable[Any], env: dict[Any, Any]) -> set[Any]:
    """Return effects on the replaced variables; before JAX 0.10 an effect holds an index."""
    return {
        type(effect)(env[effect.input])
        if hasattr(effect, "input") and effect.input in env
        else effect
        for effect in effects
    }


def variable(like: Any, aval: Aval) -> Any:
    kind = type(like)
    suffixed = hasattr(like, "suffix") and kind.__name__ != "DropVar"  # JAX 0.6.0
    return kind("", aval) if suffixed else kind(aval)


def callable_of(function: Any) -> Callable[..., Any]:
    """Return a callable that takes arrays, which a WrappedFun itself doesn't."""
    called: Callable[..., Any] = getattr(function, "call_wrapped", function)
    return called


def named_axes(params: Params) -> frozenset[str]:
    """Return the mesh axes that a cast's or a collective's parameters name."""
    named: set[str] = set()
    for key in ("axes", "axis_name", "axis", "collective_axes"):
        value = params.get(key)
        values = value if isinstance(value, (tuple, list, set, frozenset)) else (value,)
        named.update(v for v in values if isinstance(v, str))
    return frozenset(named)


def inner_jaxprs(params: Params) -> Iterator[Jaxpr]:
    for value in params.values():
        for entry in value if isinstance(value, (tuple, list)) else (value,):
            if (inner := opened(entry)) is not None:
                yield inner


def is_transposed(eqn: Eqn) -> bool:
    # Inner equations carry no marks; up to JAX 0.6 only named scopes do.
    return _is_under(eqn, ("transpose",))


def is_differentiated(eqn: Eqn) -> bool:
    return _is_under(eqn, ("jvp", "transpose"))


def _is_under(eqn: Eqn, transforms: tuple[str, ...]) -> bool:
    marks = eqn.source_info.name_stack.stack
    return any(type(m).__name__ == "Transform" and m.name in transforms for m in marks)


def is_in(eqn: Eqn, scope: str) -> bool:
    """Return whether an equation is in a name scope, or is the transpose of one that is."""
    return any(getattr(m, "name", "") == scope for m in eqn.source_info.name_stack.stack)


def kernel_name(params: Params) -> tuple[str, str]:
    """Return the name and ``file:line`` of a Pallas kernel."""
    jaxpr = params["jaxpr"] if "jaxpr" in params else params["jaxprs"][0]
    info = getattr(jaxpr, "debug_info", None)
    function, _, place = (getattr(info, "func_src_info", None) or "").partition(" at ")
    # JAX 0.4.31 to 0.5.0 keep both in one parameter, 0.4.28 the name alone.
    both = params.get("name_and_src_info")
    name = (
        params.get("name")
        or getattr(both, "name", None)
        or getattr(info, "func_name", None)
        or function
        or "unknown"
    )
    return name, place
