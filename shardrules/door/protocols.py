"""Describe to type checkers the attributes of JAX's objects that we read (0.4.28 to 0.12).

JAX's own classes are private, have moved, and leave most attributes untyped. The code never tests
for these protocols; it reads attributes. Members that the package only reads are properties, so
that JAX's classes fit even if they make an attribute read-only.
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

    @property
    def aval(self) -> Any: ...


class Primitive(Protocol):
    """An operation; JAX keeps one object for each."""

    name: str
    multiple_results: bool
    call_primitive: bool

    @property
    def bind(self) -> Callable[..., Any]: ...
    # Maps the operands' avals and the parameters to the results' avals.
    @property
    def abstract_eval(self) -> Callable[..., Any]: ...

    def __hash__(self) -> int: ...


class Eqn(Protocol):
    """An equation of a jaxpr."""

    @property
    def primitive(self) -> Primitive: ...
    @property
    def invars(self) -> Sequence[Var]: ...
    @property
    def outvars(self) -> Sequence[Var]: ...
    @property
    def params(self) -> dict[str, Any]: ...
    @property
    def effects(self) -> Any: ...
    @property
    def source_info(self) -> Any: ...
    @property
    def ctx(self) -> Any: ...

    def replace(self, *args: Any, **changes: Any) -> Eqn: ...


class Jaxpr(Protocol):
    """A jaxpr without the values of its constants."""

    @property
    def eqns(self) -> Sequence[Eqn]: ...
    @property
    def invars(self) -> Sequence[Var]: ...
    @property
    def outvars(self) -> Sequence[Var]: ...
    @property
    def constvars(self) -> Sequence[Var]: ...
    @property
    def effects(self) -> Any: ...
    @property
    def debug_info(self) -> Any: ...

    def replace(self, **changes: Any) -> Jaxpr: ...


class ClosedJaxpr(Protocol):
    """A jaxpr with the values of its constants."""

    @property
    def jaxpr(self) -> Jaxpr: ...
    @property
    def consts(self) -> Sequence[Any]: ...
    @property
    def in_avals(self) -> Sequence[Aval]: ...
    @property
    def out_avals(self) -> Sequence[Aval]: ...
    @property
    def effects(self) -> Any: ...

    def replace(self, **changes: Any) -> ClosedJaxpr: ...


class JaxMesh(Protocol):
    """A mesh of devices, or an abstract one."""

    axis_names: tuple[str, ...]
    manual_axes: Any
    shape: Any  # from names to sizes
    empty: bool


class JaxTrace(Protocol):
    """A trace, which decides how an operation is processed."""

    parent_trace: Any
    requires_low: bool

    def process_primitive(self, primitive: Any, args: Any, params: Any, /) -> Any: ...


Params = dict[str, Any]  # of an equation
# Binds a primitive as JAX would: the primitive, the trace, the operands and the parameters.
Rest = Callable[[Primitive, JaxTrace, Sequence[Any], Params], Any]
