"""Whether each ``checkpoint_name`` is saved, offloaded, recomputed, or not a residual."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from shardrules.arguments import checked
from shardrules.door import internals
from shardrules.door.jaxprs import inner_jaxprs
from shardrules.errors import ShardrulesError


class NamedValue(NamedTuple):
    """One ``checkpoint_name`` of a program."""

    name: str
    # ``offloaded``, ``saved``, ``recomputed``, or ``not a residual``: no backward pass inside a
    # ``jax.checkpoint`` reads it, so a policy that names it changes nothing
    status: str
    shape: str  # of one value, on all devices, ``"float32[8,16]"``
    bytes: int  # of all values that the loops around it make, on all devices
    is_output: bool  # whether its block returns it
    source: str  # ``file:line``, empty if JAX keeps none


class _Frame(NamedTuple):
    """A jaxpr, the equation that calls it, its outer frame, and how often it runs."""

    jaxpr: Any
    equation: Any
    outer: Any
    times: int
    recomputing: bool


# Equations whose result is the same residual as their operand. A new name makes a new one.
_SAME = ("copy", "copy_p", "device_put", "optimization_barrier", "reduce_precision", "pvary")
_ORDER = ("offloaded", "saved", "recomputed", "not a residual")


@checked
def named_values(f: Callable[..., Any], *args: Any, **kwargs: Any) -> list[NamedValue]:
    """List a program's named values, and what its backward pass does with each.

    Args:
      f: the function that is compiled, jitted or not, with its gradient in it.
      *args: its arguments, arrays or ``jax.ShapeDtypeStruct``.
      **kwargs: its keyword arguments.

    Raises:
      ShardrulesError: ``f`` is not callable, or holds no backward pass of a ``jax.checkpoint``.
    """
    import jax

    if not callable(f):
        raise ShardrulesError(
            f"{type(f).__name__} holds no trace to read names from; pass the function and its "
            "arguments"
        )
    if hasattr(f, "trace"):  # from JAX 0.4.31; it handles static arguments
        closed = f.trace(*args, **kwargs).jaxpr
    else:
        closed = jax.make_jaxpr(f)(*args, **kwargs)
    top = _Frame(closed.jaxpr, None, None, 1, False)
    frames = list(_frames(top))
    if not any(_is_backward(e) for frame in frames for e in frame.jaxpr.eqns):
        raise ShardrulesError(
            f"{getattr(f, '__name__', 'the program')} holds no backward pass of a jax.checkpoint, "
            "so no policy decides on names; pass the function that takes the gradient, and wrap "
            "its blocks in jax.checkpoint(block, policy=...)"
        )
    line = internals.load().source_line
    values: dict[tuple[str, str], NamedValue] = {}
    for frame in frames:
        for equation in frame.jaxpr.eqns:
            if equation.primitive.name != "name":
                continue
            aval = equation.outvars[0].aval
            value = NamedValue(
                equation.params["name"],
                "recomputed" if frame.recomputing else _status(frame, equation.outvars[0]),
                f"{aval.dtype}[{','.join(map(str, aval.shape))}]",
                aval.size * aval.dtype.itemsize * frame.times,
                _returned(frame, equation.outvars[0]),
                line(equation.source_info),
            )
            # A recomputed value is in the forward pass too, where it is not a residual.
            key = (value.name, value.source)
            if key not in values or _ORDER.index(value.status) < _ORDER.index(values[key].status):
                values[key] = value
    return list(values.values())


def _is_backward(equation: Any) -> bool:
    """Whether an equation recomputes in a backward pass (``remat2``, ``checkpoint``)."""
    return bool(equation.params.get("differentiated")) and "policy" in equation.params


def _frames(frame: _Frame) -> Iterator[_Frame]:
    yield frame
    for equation in frame.jaxpr.eqns:
        times = (
            frame.times * equation.params.get("length", 1) if _is_scan(equation) else frame.times
        )
        for jaxpr in inner_jaxprs(equation.params):
            yield from _frames(
                _Frame(jaxpr, equation, frame, times, frame.recomputing or _is_backward(equation))
            )


def _is_scan(equation: Any) -> bool:
    return equation.primitive.name == "scan"


def _is_same(equation: Any) -> bool:
    return equation.primitive.name in _SAME and not _to_host(equation)


def _to_host(equation: Any) -> bool:
    # JAX 0.4.31 and older call the parameter ``device``.
    params = equation.params
    where = params.get("devices", params.get("device"))
    return equation.primitive.name == "device_put" and "host" in str(where).lower()


def _status(frame: _Frame, variable: Any) -> str:
    if any(
        _reaches(frame, equation.outvars[0], set())
        for equation in _readers(frame, variable)
        if _to_host(equation)
    ):
        return "offloaded"
    return "saved" if _reaches(frame, variable, set()) else "not a residual"


def _readers(frame: _Frame, variable: Any) -> Iterator[Any]:
    """Yield the equations that read a variable, or a copy of it."""
    for equation in frame.jaxpr.eqns:
        if any(operand is variable for operand in equation.invars):
            yield equation
            if _is_same(equation):
                yield from _readers(frame, equation.outvars[0])


def _returned(frame: _Frame, variable: Any) -> bool:
    return any(out is variable for out in frame.jaxpr.outvars)


def _reaches(frame: _Frame, variable: Any, seen: set[int]) -> bool:
    """Whether a value, or a copy of it, enters a backward pass that recomputes."""
    # We don't follow a loop's carry: the value is then the next trip's input, without a name.
    if id(variable) in seen:
        return False
    seen.add(id(variable))
    for equation in frame.jaxpr.eqns:
        for position, operand in enumerate(equation.invars):
            if operand is not variable:
                continue
            if _is_backward(equation):
                return True
            if _is_same(equation) and _reaches(frame, equation.outvars[position], seen):
                return True
            for jaxpr in inner_jaxprs(equation.params):
                before = len(equation.invars) - len(jaxpr.invars)
                if 0 <= position - before < len(jaxpr.invars):
                    inside = _Frame(jaxpr, equation, frame, 1, frame.recomputing)
                    if _reaches(inside, jaxpr.invars[position - before], seen):
                        return True
    if frame.outer is None:
        return False
    carried = frame.equation.params.get("num_carry", 0) if _is_scan(frame.equation) else 0
    return any(
        _reaches(frame.outer, frame.equation.outvars[position], seen)
        for position, out in enumerate(frame.jaxpr.outvars)
        if out is variable and carried <= position < len(frame.equation.outvars)
    )
