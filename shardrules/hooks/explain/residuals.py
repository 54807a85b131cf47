"""Tell whether each ``checkpoint_name`` is saved, offloaded, recomputed, or not a residual."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from shardrules.arguments import checked
from shardrules.door import internals
from shardrules.door.jaxprs import scan_counts
from shardrules.door.protocols import Eqn, Jaxpr, Var
from shardrules.errors import ShardrulesError
from shardrules.jaxprs.fold import Fold
from shardrules.jaxprs.walk import makers


class NamedValue(NamedTuple):
    """One ``checkpoint_name`` of a program."""

    name: str
    # ``offloaded``, ``saved``, ``recomputed``, or ``not a residual``: no backward pass inside a
    # ``jax.checkpoint`` reads it, so a policy that names it changes nothing
    status: str
    shape: str  # of one value, on all devices, ``"float32[8,16]"``
    bytes: int  # of all values of this name that the enclosing loops make, on all devices
    is_output: bool  # whether the checkpointed block returns it
    source: str  # ``file:line``, empty if JAX keeps none


# Primitives whose result is the same residual as their operand. A new name makes a new residual.
_SAME = ("copy", "copy_p", "device_put", "optimization_barrier", "reduce_precision", "pvary")
_ORDER = ("offloaded", "saved", "recomputed", "not a residual")
_EqnPlace = tuple[Any, ...]  # where a named value is made
_Copied = frozenset[
    tuple[_EqnPlace, bool]
]  # the named values that a value is a copy of, each with whether it went through the host
_NONE: _Copied = frozenset()


@checked
def named_values(f: Callable[..., Any], *args: Any, **kwargs: Any) -> list[NamedValue]:
    """Return a program's named values, with what its backward pass does with each.

    Args:
      f: the function that is compiled, jitted or not, with its gradient in it.
      *args: its arguments, arrays or ``jax.ShapeDtypeStruct``.
      **kwargs: its keyword arguments.

    Raises:
      ShardrulesError: ``f`` is not callable, or holds no backward pass of a ``jax.checkpoint``.
    """
    # Trace the gradient, and follow each named value and its copies. If one of them enters a
    # backward pass that recomputes, it was saved as a residual (on the host if a copy went there).
    # If a backward pass makes the named value itself, it is recomputed.
    import jax

    if not callable(f):
        raise ShardrulesError(
            f"{type(f).__name__} holds no trace to read names from; pass the function and its "
            "arguments"
        )
    if hasattr(f, "trace"):  # since JAX 0.4.31; it handles static arguments
        jaxpr = f.trace(*args, **kwargs).jaxpr.jaxpr
    else:
        jaxpr = jax.make_jaxpr(f)(*args, **kwargs).jaxpr
    names = _Names()
    names.run(jaxpr, [_NONE] * len(jaxpr.invars))
    if not names.has_backward:
        raise ShardrulesError(
            f"{getattr(f, '__name__', 'the program')} holds no backward pass of a jax.checkpoint, "
            "so no policy decides on names; pass the function that takes the gradient, and wrap "
            "its blocks in jax.checkpoint(block, policy=...)"
        )
    values: dict[tuple[str, str], NamedValue] = {}
    for at, value in names.values.items():
        if value.status != "recomputed" and (at, True) in names.kept:
            value = value._replace(status="offloaded")
        elif value.status != "recomputed" and (at, False) in names.kept:
            value = value._replace(status="saved")
        # A recomputed value also appears in the forward pass, where it is not a residual. Keep the
        # most specific status.
        key = (value.name, value.source)
        if key not in values or _ORDER.index(value.status) < _ORDER.index(values[key].status):
            values[key] = value
    return list(values.values())


class _Names(Fold[_Copied]):
    """Follows each named value and its copies to the backward passes that recompute."""

    bottom = _NONE

    def __init__(self) -> None:
        super().__init__()
        self.line = internals.load().source_line
        self.has_backward = False
        self.values: dict[_EqnPlace, NamedValue] = {}
        # The named values that enter these passes, each with whether it went through the host.
        self.kept: set[tuple[_EqnPlace, bool]] = set()

    def literal(self, value: Any) -> _Copied:
        return _NONE

    def constant(self, var: Var) -> _Copied:
        return _NONE

    def join(self, values: Iterable[_Copied]) -> _Copied:
        return _NONE.union(*values)

    def chosen(self, by: _Copied, value: _Copied) -> _Copied:
        return value

    def equation(self, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
        if _recomputes(eqn):
            self.has_backward = True
            self.kept.update(*map(self.content, operands))
        if eqn.primitive.name == "scan":
            # Don't follow a carry: it is the next iteration's input, without a name.
            _, carries = scan_counts(eqn.params)
            results = self.inside(eqn, eqn.params["jaxpr"], operands)
            return [*[_NONE] * carries, *results[carries:]]
        return super().equation(eqn, operands)

    def other(self, eqn: Eqn, name: str, operands: list[_Copied]) -> Sequence[_Copied]:
        if name == "name":
            return [frozenset({(self._name(eqn), False)})]
        if name in _SAME:
            if _to_host(eqn):
                operands = [frozenset((at, True) for at, _ in values) for values in operands]
            return operands
        results, _ = self.anything(eqn, operands)
        return [_NONE] * len(eqn.outvars) if results is None else results

    def _name(self, eqn: Eqn) -> _EqnPlace:
        aval, place = eqn.outvars[0].aval, (*self.place, id(eqn))
        scans = [outer.params["length"] for outer in self.around if "length" in outer.params]
        self.values[place] = NamedValue(
            eqn.params["name"],
            "recomputed" if any(map(_recomputes, self.around)) else "not a residual",
            f"{aval.dtype}[{','.join(map(str, aval.shape))}]",
            aval.size * aval.dtype.itemsize * math.prod(scans),
            False,
            self.line(eqn.source_info),
        )
        return place

    def finished(self, jaxpr: Jaxpr, read: Callable[[Any], Any]) -> None:
        made = makers(jaxpr)
        for out in jaxpr.outvars:
            eqn = None if hasattr(out, "val") else made.get(out)
            if eqn is not None and eqn.primitive.name == "name":
                place = (*self.place, id(eqn))
                self.values[place] = self.values[place]._replace(is_output=True)


def _recomputes(eqn: Eqn) -> bool:
    """Return whether an equation is the backward pass of a ``jax.checkpoint`` (``remat2``)."""
    return bool(eqn.params.get("differentiated")) and "policy" in eqn.params


def _to_host(equation: Eqn) -> bool:
    # JAX 0.4.31 and older call the parameter ``device``.
    params = equation.params
    where = params.get("devices", params.get("device"))
    return equation.primitive.name == "device_put" and "host" in str(where).lower()
