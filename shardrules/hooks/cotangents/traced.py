"""Trace a custom_vjp's fwd and bwd to jaxprs, which the checks read and the backward pass runs."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from shardrules.door.internals import Door
from shardrules.door.jaxprs import CASTS, named_axes, size_of
from shardrules.door.protocols import Jaxpr
from shardrules.hooks.cotangents.origins import Origin, Origins, rule_of
from shardrules.jaxprs.walk import equations
from shardrules.registry.axistypes import AxisType

Path = tuple[Any, ...]  # the path of a cotangent in a bwd's results


class VjpRule(NamedTuple):
    """A custom_vjp's functions, as their author wrote them."""

    fwd: Any = None
    bwd: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class CustomVjpInfo:
    name: str  # the bwd's name, for messages
    fwd: Any  # the custom_vjp's fwd, as JAX wraps it
    gradients: Sequence[None]  # not empty once fwd has taken a gradient
    perturbed: Sequence[bool]  # for each primal with ``symbolic_zeros=True``; otherwise empty
    in_tree: Any  # the pytree of the primals
    in_avals: tuple[Any, ...]
    place: str = ""  # where the bwd is defined, ``file:line``, or empty
    fwd_avals: tuple[Any, ...] | None = None  # the types that fwd ran with, if not ``in_avals``
    # the author's functions, which stay the same objects in all their runs
    rule: VjpRule = dataclasses.field(default_factory=VjpRule)

    def each(self, cotangents: Any, function: Callable[[Any, int, Any], Any]) -> Any:
        """Map a function of (path, index of the primal, cotangent) over the cotangents."""
        tree, is_none = jax.tree_util, lambda x: x is None
        if isinstance(cotangents, list):
            cotangents = tuple(cotangents)
        # Pytree classes may check their leaves, but accept plain objects, which JAX also uses.
        placeholders = [object() for _ in self.in_avals]
        indices = {id(leaf): index for index, leaf in enumerate(placeholders)}
        primals = tree.tree_unflatten(self.in_tree, placeholders)
        try:
            tree.tree_map(lambda value, primal: value, cotangents, primals, is_leaf=is_none)
        except (ValueError, TypeError):  # Leave mismatches to JAX.
            return cotangents

        def call(path: Path, value: Any, placeholder: Any) -> Any:
            # A None stands for a whole subtree of primals; JAX drops the cotangents of a None.
            index = None if value is None else indices.get(id(placeholder))
            return value if index is None else function(path, index, value)

        return tree.tree_map_with_path(call, cotangents, primals, is_leaf=is_none)

    def to_cast(self, door: Door, axes: frozenset[str]) -> str:
        """Say which arguments of a library's function to cast before the call."""
        names = ", ".join(map(repr, sorted(axes)))
        types = map(door.cotangent_type, self.in_avals)
        cast = [i for i, type_ in enumerate(types) if not axes <= type_.axes]
        inputs = f"input {cast[0]}" if len(cast) == 1 else f"inputs {', '.join(map(str, cast))}"
        return (
            "It belongs to a library, so change the call: cast the arguments that are invariant "
            f"over {{{names}}} ({inputs} of the flattened arguments) before it, as in "
            f"ts, w = shardrules.vary((ts, w), {names})."
        )


class Trace:
    """A bwd's jaxpr, which runs instead of the bwd."""

    def __init__(self, door: Door, bwd: Any, args: Sequence[Any]):
        tree = jax.tree_util
        leaves, structure = tree.tree_flatten(args)
        self.dynamic = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        self.arrays = [leaves[i] for i in self.dynamic]

        def run(*arrays: Any) -> Any:
            full = list(leaves)
            for i, array in zip(self.dynamic, arrays):
                full[i] = array
            out = bwd(*tree.tree_unflatten(structure, full))
            if isinstance(out, list):
                out = tuple(out)
            outputs, self._structure = tree.tree_flatten_with_path(out)
            returned = [(path, leaf) for path, leaf in outputs if isinstance(leaf, jax.Array)]
            self.paths = [path for path, _ in returned]
            self.returned = [path for path, _ in outputs]
            self._constant = [None if isinstance(leaf, jax.Array) else leaf for _, leaf in outputs]
            return [leaf for _, leaf in returned]

        # Inline the jaxpr, which binds the same equations as bwd itself. eval_jaxpr wouldn't work:
        # if no jit surrounds the whole program, JAX 0.6.0 can't run a kernel's equation alone.
        staged = door.staged(run, self.arrays)
        if staged is not None:
            self.jaxpr, self.consts, self._put = staged
            return
        jitted = jax.jit(run, inline=True)
        if hasattr(jitted, "trace"):
            closed = jitted.trace(*self.arrays).jaxpr
        else:  # JAX 0.4.28
            closed = jax.make_jaxpr(run)(*self.arrays)
        self.jaxpr, self.consts = closed.jaxpr, closed.consts
        self._put = lambda arrays: jitted(*arrays)  # jit has cached the trace

    def of(self, args: Any) -> Trace:
        other = copy.copy(self)
        leaves = jax.tree_util.tree_leaves(args)
        other.arrays = [leaves[i] for i in self.dynamic]
        return other

    def run(self) -> Any:
        arrays = iter(self._put(self.arrays))
        return jax.tree_util.tree_unflatten(
            self._structure, [next(arrays) if leaf is None else leaf for leaf in self._constant]
        )


def as_arrays(door: Door, bwd: Any, args: Sequence[Any]) -> list[Trace]:
    """Trace a bwd with its saved numbers as arrays; return nothing if it saves none, or fails.

    With the check on, a saved number is an array if it was cast.
    """
    leaves, structure = jax.tree_util.tree_flatten(args)
    if not any(map(_is_number, leaves)):
        return []
    arrays = [jax.numpy.asarray(leaf) if _is_number(leaf) else leaf for leaf in leaves]
    try:
        return [Trace(door, bwd, jax.tree_util.tree_unflatten(structure, arrays))]
    except Exception:  # bwd needs their concrete values  # noqa: BLE001
        return []


def _is_number(leaf: Any) -> bool:
    """Return whether a leaf is a number that JAX would convert to an array."""
    is_array = isinstance(leaf, (jax.Array, jax.core.Tracer))
    return not is_array and (isinstance(leaf, (int, float, complex)) or hasattr(leaf, "__array__"))


class TracedFwd:
    """A custom_vjp's fwd, traced again; tracing fails if fwd uses values of an ended trace."""

    def __init__(self, bwd: Any):
        self.door = bwd.door
        self.opaque_call_of = bwd.hooks.state.opaque_call_of
        self.mesh_axes = bwd.mesh_axes
        self.parts: CustomVjpInfo = bwd.parts
        self.primals: Sequence[AxisType] = bwd.primals
        self.count = len(bwd.entering)  # the number of residuals and outputs
        self.output_count = self.count - bwd.first

    @functools.cached_property
    def jaxpr(self) -> Any:
        """Return the jaxpr from its primals to its outputs and residuals, or None."""
        door, parts = self.door, self.parts
        if parts.fwd is None:
            return None
        avals = parts.in_avals if parts.fwd_avals is None else parts.fwd_avals
        structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]

        def run(*flat: Any) -> Any:
            leaves: list[Any] = [door.cast(x, door.axis_type(a)) for x, a in zip(flat, avals)]
            if parts.perturbed:
                leaves = [*map(jax.custom_derivatives.CustomVJPPrimal, leaves, parts.perturbed)]
            return parts.fwd.call_wrapped(*jax.tree_util.tree_unflatten(parts.in_tree, leaves))

        try:
            return jax.make_jaxpr(run)(*structs).jaxpr
        except Exception:  # the first trace succeeded, so any error comes from tracing again  # noqa: BLE001
            return None

    @functools.cached_property
    def origins(self) -> Origins:
        """Return the origins of its outputs, then of its residuals."""
        return self._origins_of(self.jaxpr)

    def _origins_of(self, jaxpr: Jaxpr) -> Origins:
        types = enumerate(self.primals)
        inputs = [Origin(frozenset((at,)), type_.varying | type_.unreduced) for at, type_ in types]
        return Origins(self.door, self.opaque_call_of, self.mesh_axes, jaxpr, inputs)

    @property
    def saved(self) -> Sequence[Origin] | None:
        """Return the residuals' origins, or None."""
        if self.jaxpr is None or len(self.jaxpr.outvars) != self.count:
            return None
        return self.origins.outputs[self.output_count :]

    @property
    def outputs(self) -> Sequence[tuple[AxisType, Origin]] | None:
        """Return the type and the origin of each output, or None."""
        if self.jaxpr is None:
            return None
        outvars = self.jaxpr.outvars[: self.output_count]
        return list(zip(self.door.axis_types(v.aval for v in outvars), self.origins.outputs))

    def dropping(self, axes: frozenset[str]) -> str | None:
        """Describe an opaque call whose rule makes outputs invariant over ``axes``, or None."""
        # If a forward can't be traced again, assume that it holds such a call.
        if self.jaxpr is None:
            return None if self.parts.fwd is None else "a forward that can't be traced again"
        for equation in equations(self.jaxpr):
            opaque = self.opaque_call_of(equation.primitive, equation.params)
            rule = rule_of(opaque)
            if rule is not None and rule.drops:
                named = frozenset(rule.named_axes)
                if not named or named & axes:
                    return f"{opaque.call}, whose rule is {rule!r}"
        return None

    def saved_scale(self) -> float:
        """Return the number by which the residuals are divided."""
        used = [at >= self.output_count for at in range(len(self.jaxpr.outvars))]
        jaxpr = self.door.dce_jaxpr(self.jaxpr, used, instantiate=True)[0]
        return self._origins_of(jaxpr).scale

    def selects(self, axis: str) -> bool:
        """Return whether only ``pmax`` and ``pmin`` move data along an axis."""
        moving = set()
        for eqn in equations(self.jaxpr):
            opaque = self.opaque_call_of(eqn.primitive, eqn.params) is not None
            if opaque or (axis in named_axes(eqn.params) and eqn.primitive.name not in CASTS):
                moving.add(eqn.primitive.name)
        return bool(moving) and moving <= {"pmax", "pmin"}

    def equals(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the axes of redundant sums and of redundant means."""
        # Ignore sums that don't depend on the primals (such as a count of the devices), since no
        # cotangent passes through them.
        summed: frozenset[str] = frozenset()
        averaged: frozenset[str] = frozenset()
        for reduction in [] if self.jaxpr is None else self.origins.reductions:
            equal = reduction.axes - reduction.differing if reduction.origin.inputs else frozenset()
            if equal and reduction.is_mean(size_of(equal), size_of(reduction.axes)):
                averaged |= equal
            else:
                summed |= equal
        return summed, averaged
