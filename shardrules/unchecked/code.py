"""Read a function's bytecode: which names it uses, and whether it draws random numbers."""

from __future__ import annotations

import dis
import itertools
import types
from collections.abc import Iterator
from typing import Any


def names(code: types.CodeType) -> set[str]:
    """Return the names that code and the functions in it use."""
    inner = (names(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(code.co_freevars, *inner)


def attributes(code: types.CodeType) -> set[tuple[str, str]]:
    """Return (name, attribute) for each ``name.attribute`` that code reads or sets."""
    return {
        (first.argval, then.argval)
        for first, then in _pairs(code)
        if then.opname in (*_ATTRIBUTE, "STORE_ATTR") and type(first.argval) is str
    }


def draws(code: types.CodeType, module: types.ModuleType) -> bool:
    """Return whether code may draw from a module's global generator: Python's or NumPy's."""
    if module.__name__ in ("random", "numpy.random"):
        return True
    if module.__name__ != "numpy" or "random" not in names(code):
        return False
    return any(
        then.argval == "random" and first.argval in ("np", "numpy") for first, then in _pairs(code)
    )


def draws_from_jax(code: types.CodeType, variables: dict[str, Any]) -> bool:
    """Return whether every ``random`` in code is jax.random, which has no global generator."""

    def is_jax_s(value: Any) -> bool:
        name = value.__name__ if issubclass(type(value), types.ModuleType) else ""
        return name.partition(".")[0] == "jax"

    for first, then in _pairs(code):
        if then.argval != "random" or then.opname == "LOAD_CONST":
            continue
        read = then if then.opname in _GLOBAL else first if then.opname in _ATTRIBUTE else None
        if read is None or read.opname not in _GLOBAL or not is_jax_s(variables.get(read.argval)):
            return False
    return True


_GLOBAL, _ATTRIBUTE = ("LOAD_GLOBAL", "LOAD_NAME"), ("LOAD_ATTR", "LOAD_METHOD")


def _pairs(code: types.CodeType) -> Iterator[tuple[dis.Instruction, dis.Instruction]]:
    """Yield each instruction with the next one, in code and in the functions inside it."""
    yield from itertools.pairwise(dis.get_instructions(code))
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _pairs(const)
