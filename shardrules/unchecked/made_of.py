"""What a program computes, by what it makes that of."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import operator
import types
from collections.abc import Iterator, Sequence
from typing import Any

from shardrules.door.jaxprs import CASTS, KERNELS, SUMS, inner_jaxprs, name_of, named_axes, opened
from shardrules.door.protocols import ClosedJaxpr, Eqn, Jaxpr
from shardrules.hooks.types.owners import held_by

_LOOPS = frozenset({"scan", "while"})
_MOST_BYTES = 1 << 20  # of a constant that is read whole


def made_of(closed: ClosedJaxpr) -> collections.Counter[Any]:
    """Count what a jaxpr computes by what it makes that of; casts are left out.

    A body may read the type of a value, and sum over other axes or swap operands by that.
    """
    counted: collections.Counter[Any] = collections.Counter()

    def read(jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        makes = dict(zip(jaxpr.constvars, map(_constant, consts)))
        makes |= zip(jaxpr.invars, inputs)

        def of(atom: Any) -> Any:
            return _constant(atom.val) if hasattr(atom, "val") else makes.get(atom, "constant")

        for eqn in jaxpr.eqns:
            name, operands = name_of(eqn), [of(atom) for atom in eqn.invars]
            if name in CASTS | {"convert_element_type"}:
                results = [_converted(each, v) for each, v in zip(operands, eqn.outvars)]
                makes |= zip(eqn.outvars, results)
                continue
            if name in SUMS:
                results = [("psum", named_axes(eqn.params), operand) for operand in operands]
            elif any(inner_jaxprs(eqn.params)):
                # There may be more operands with the check on: a value, and what it is cast to.
                inside = [read(*each) for each in _inside(eqn, operands)]
                taken = operands if name in KERNELS else {*operands}
                of_all: tuple[Any, ...] = name, _plain(eqn), inside, taken
                results = [(*of_all, n) for n in range(len(eqn.outvars))]
            else:
                of_all = name, _plain(eqn), operands
                results = [(*of_all, n) for n in range(len(eqn.outvars))] or [of_all]
            keys = [_key(result) for result in results]
            counted.update(keys)
            makes |= zip(eqn.outvars, keys)
        return [of(atom) for atom in jaxpr.outvars]

    jaxpr = opened(closed)
    counted.update(enumerate(map(_key, read(jaxpr, closed.consts, range(len(jaxpr.invars))))))
    return counted


def _inside(eqn: Eqn, operands: list[Any]) -> Iterator[tuple[Jaxpr, Sequence[Any], Sequence[Any]]]:
    """Yield the jaxprs in an equation, each with its constants and what its inputs are made of."""
    name, params = name_of(eqn), eqn.params
    counts = params.get("cond_nconsts", 0), params.get("body_nconsts", 0)
    carried = sum(counts) if name == "while" else params.get("num_consts", 0)
    for value in params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if (jaxpr := opened(each)) is None:
                continue
            count = len(jaxpr.invars)
            given: Sequence[Any] = operands[len(operands) - count :]
            if name in _LOOPS:
                # What is carried may start equal, and differ later.
                later = [("carried", n, operand) for n, operand in enumerate(operands[carried:])]
                given = operands[:carried]
                if name == "while":
                    is_body = value is params["body_jaxpr"]
                    given = given[counts[0] :] if is_body else given[: counts[0]]
                given = [*given, *map(_key, later)]
            if name in KERNELS or count != len(given):
                given = [("input", n) for n in range(count)]
            yield jaxpr, getattr(each, "consts", ()), given


@dataclasses.dataclass(frozen=True)
class _Constant:
    """A number or an array, without the casts and conversions that it went through."""

    dtype: str
    shape: tuple[int, ...]
    held: bytes


def _constant(value: Any) -> Any:
    import jax
    import numpy as np

    is_far = isinstance(value, jax.Array) and not getattr(value, "is_fully_addressable", False)
    if isinstance(value, jax.core.Tracer) or is_far:
        return "constant"
    try:
        if (size := value.nbytes if hasattr(value, "nbytes") else 0) > _MOST_BYTES:
            return "large", size
        array = np.asarray(value)
    except Exception:  # a key  # noqa: BLE001
        return "constant"
    return _Constant(str(array.dtype), array.shape, array.tobytes())


def _converted(value: Any, to: Any) -> Any:
    """Return a value that was cast or converted: JAX converts a Python number after its cast."""
    import ml_dtypes  # noqa: F401  # its dtypes have names
    import numpy as np

    dtype = str(getattr(to.aval, "dtype", ""))
    if not isinstance(value, _Constant) or value.dtype == dtype:
        return value
    try:
        with np.errstate(all="ignore"):
            array = np.frombuffer(value.held, value.dtype).astype(dtype)
    except (TypeError, ValueError):
        return "constant"
    return _Constant(dtype, value.shape, array.tobytes())


def _key(value: Any) -> int:
    if isinstance(value, (tuple, list)):
        return hash((*map(_key, value),))
    return hash(frozenset(map(_key, value)) if isinstance(value, (set, frozenset)) else value)


def _plain(eqn: Eqn) -> list[Any]:
    """Return the parameters of an equation that are made of numbers, names and functions."""
    if any(inner_jaxprs(eqn.params)):
        # Of what holds jaxprs, some count or mark the inputs, of which there may be others.
        return [
            (name, value)
            for name, value in eqn.params.items()
            if type(value) in (bool, int, str)
            and not name.endswith("consts")
            and not name.startswith("check_")
        ]
    return [(name, _held(v)) for name, v in eqn.params.items() if name != "weak_type"]


def _held(value: Any, depth: int = 6) -> Any:
    import numpy as np

    if isinstance(value, (tuple, list)):
        return [_held(each, depth) for each in value]
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, np.integer):
        return operator.index(value)
    if type(value) in (bool, int, float, str):
        return value
    return _function(value, depth - 1) if depth else None


def _function(value: Any, depth: int) -> Any:
    """Return what tells a function, or an object that holds one, from others."""
    if isinstance(value, functools.partial):
        return _held([value.func, value.args, [*value.keywords.items()]], depth)
    if isinstance(value, types.FunctionType):
        cells = [held for _, held in held_by(value)]
        place = value.__module__, value.__qualname__, value.__code__.co_firstlineno
        return _held([place, cells, value.__defaults__], depth)
    if callable(value) and not isinstance(value, type):
        if hasattr(value, "callback_func"):  # of JAX's pure_callback
            return _held(value.callback_func, depth)
        return getattr(value, "__name__", None)
    return None
