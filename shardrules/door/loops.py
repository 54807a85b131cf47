"""Which function of JAX's traces the body of a loop that a user wrote.

``scan`` and ``while_loop`` trace their bodies by a local function (JAX 0.6 to 0.12), through names
that the transformations of loops use too, with the same debug info; nothing that is passed tells
them apart. So the caller's code is compared with that local function's, which is found here once
and refused if it isn't there (tests/core/test_install.py).
"""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any

NAME = "_create_jaxpr"


def body_tracers(*functions: Any) -> frozenset[Any]:
    """Return the code object of the local function that traces bodies, of each function."""
    found = []
    for function in map(inspect.unwrap, functions):
        codes = [
            one
            for one in function.__code__.co_consts
            if isinstance(one, types.CodeType) and one.co_name == NAME
        ]
        if len(codes) != 1:
            raise LookupError(f"{function.__module__}.{function.__name__} has no {NAME} inside")
        found += codes
    return frozenset(found)


def is_body(tracers: frozenset[Any], debug_info: Any) -> bool:
    """Whether the caller was called to trace the body of a loop that a user wrote."""
    return sys._getframe(2).f_code in tracers and debug_info.traced_for != "while_cond"
