"""What the package reads of JAX's objects (0.4.28 to 0.12), for type checkers.

JAX's own classes are private, have moved, and leave most of this untyped. Nothing is an instance
of these: what an object is, the code asks of its attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Aval(Protocol):
    """The type of a value: of an array, or of a ref; a token has neither shape nor dtype."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    def update(self, **changes: Any) -> Any: ...
    def str_short(self, short_dtypes: bool = False) -> str: ...
    def __hash__(self) -> int: ...


class Var(Protocol):
    """A variable of a jaxpr, or a literal, which has a ``val``."""

    aval: Any

    def __hash__(self) -> int: ...


class Primitive(Protocol):
    """An operation; JAX keeps one object for each."""

    name: str
    multiple_results: bool
    call_primitive: bool
    bind: Callable[..., Any]
    abstract_eval: Callable[..., Any]  # from avals and parameters to the results' avals

    def __hash__(self) -> int: ...


class Eqn(Protocol):
    """An equation of a jaxpr."""

    primitive: Primitive
    invars: Sequence[Var]
    outvars: Sequence[Var]
    params: dict[str, Any]
    effects: Any
    source_info: Any
    ctx: Any

    def replace(self, **changes: Any) -> Eqn: ...


class Jaxpr(Protocol):
    """A jaxpr without the values of its constants."""

    eqns: Sequence[Eqn]
    invars: Sequence[Var]
    outvars: Sequence[Var]
    constvars: Sequence[Var]
    effects: Any
    debug_info: Any

    def replace(self, **changes: Any) -> Jaxpr: ...


class ClosedJaxpr(Protocol):
    """A jaxpr with the values of its constants."""

    jaxpr: Jaxpr
    consts: Sequence[Any]
    in_avals: Sequence[Aval]
    out_avals: Sequence[Aval]
    effects: Any

    def replace(self, **changes: Any) -> ClosedJaxpr: ...


class JaxMesh(Protocol):
    """A mesh of devices, or an abstract one."""

    axis_names: tuple[str, ...]
    manual_axes: Any
    shape: Any  # from names to sizes
    empty: bool


class JaxTrace(Protocol):
    """A trace, which decides what becomes of an operation."""

    parent_trace: Any
    requires_low: bool

    def process_primitive(self, primitive: Any, args: Any, params: Any, /) -> Any: ...


Params = dict[str, Any]  # of an equation
# Binds a primitive as JAX would: the primitive, the trace, the operands and the parameters.
Rest = Callable[[Primitive, JaxTrace, Sequence[Any], Params], Any]
