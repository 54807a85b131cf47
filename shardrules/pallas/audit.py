"""A proof from a Pallas kernel's own jaxpr that its outputs depend on its operands alone.

The audit is an allow list: a kernel with any primitive that is not on it is not proven. The audit
assumes that the kernel is well formed (reads only memory that it has written, stays in bounds,
covers its outputs, doesn't race with itself); ``check_rule`` tests that in JAX's own interpreter.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shardrules.door.audit_names import load_audit
from shardrules.errors import UnsupportedJaxError
from shardrules.pallas.actions import ACTIONS
from shardrules.pallas.walk import Blocker, Frame, Walk, is_semaphore, mesh_axes, place_of
from shardrules.registry.table import PROVEN


@dataclasses.dataclass(frozen=True)
class Audit:
    """The result of an audit."""

    blockers: tuple[Blocker, ...] = ()  # why the kernel is not proven; empty if it is

    @property
    def proven(self) -> bool:
        """Whether the outputs depend on this device's operands alone, if it is well formed."""
        return not self.blockers

    @property
    def contradicts_no_communication(self) -> bool:
        """Whether the jaxpr shows that the kernel communicates or reads its device's position."""
        return any(blocker.communicates for blocker in self.blockers)

    def __str__(self) -> str:
        return "not proven:\n  " + "\n  ".join(map(str, self.blockers)) if self.blockers else PROVEN


def audit_call(name: str, params: dict[str, Any], operand_count: int) -> Audit:
    """Audit each kernel of a ``pallas_call``, ``mpmd_map`` or ``core_map``; results are cached."""
    mapping = None
    aliases: tuple[tuple[int, int], ...] = ()
    if name == "pallas_call":
        jaxprs, mapping = [params["jaxpr"]], params["grid_mapping"]
        inputs = mapping.num_index_operands + mapping.num_inputs
        outputs = mapping.num_outputs
        aliases = tuple(params.get("input_output_aliases", ()))
        meshes = [params["mesh"]] if params.get("mesh") is not None else []
    elif name == "mpmd_map":
        jaxprs, meshes = params["jaxprs"], params["meshes"]
        inputs, outputs = operand_count, len(params["out_avals"])
        aliases = tuple(dict(params["input_output_aliases"]).items())
    elif name == "core_map":
        jaxprs, meshes = [params["jaxpr"]], [params["mesh"]]
        inputs, outputs = len(params["jaxpr"].invars), 0
    else:
        raise ValueError(
            f"the audit reads pallas_call, mpmd_map and core_map, not {name!r}; "
            "pass the primitive of a Pallas kernel"
        )
    axes = tuple(axis for mesh in meshes for axis in mesh_axes(mesh))
    key = (inputs, outputs, aliases, axes, id(mapping))
    audits = [
        _cached(
            jaxpr,
            key,
            mapping,
            functools.partial(_audit, jaxpr, mapping, inputs, outputs, aliases, axes),
        )
        for jaxpr in jaxprs
    ]
    return Audit(tuple(dict.fromkeys(blocker for audit in audits for blocker in audit.blockers)))


def prove(primitive: str, params: dict[str, Any], operand_count: int) -> Audit | None:
    """Audit a call; None if it holds no kernel that the audit can read in this JAX."""
    if primitive not in ("pallas_call", "mpmd_map", "core_map"):
        return None
    # The grid mapping of JAX 0.4.28 doesn't say which operands are inputs.
    if primitive == "pallas_call" and not hasattr(params["grid_mapping"], "num_inputs"):
        return None
    try:
        return audit_call(primitive, params, operand_count)
    except UnsupportedJaxError:  # its kernels can be declared, but not proven
        return None


def _audit(
    jaxpr: Any,
    mapping: Any,
    inputs: int,
    outputs: int,
    aliases: Sequence[tuple[int, int]],
    axes: Iterable[str],
) -> Audit:
    names = load_audit()
    grid_names = getattr(mapping, "grid_names", None) or ()
    grid_axes = [name for name in grid_names if isinstance(name, str)]
    walk = Walk(names, axes, grid_axes, place_of(jaxpr), ACTIONS)
    try:
        _walk(walk, jaxpr, mapping, inputs, outputs, aliases)
    except Exception as error:  # noqa: BLE001 - a jaxpr of an unknown form is not proven
        text = f"the audit can't read its jaxpr ({type(error).__name__}: {error}); please report it"
        return Audit((Blocker("the kernel", text, walk.kernel_place),))
    return Audit(tuple(dict.fromkeys(walk.blockers)))


def _walk(walk: Walk, jaxpr, mapping, inputs, outputs, aliases) -> None:
    scratch = len(jaxpr.invars) - inputs - outputs
    if mapping is not None and scratch != mapping.num_scratch_operands:
        raise ValueError(
            f"the kernel takes {len(jaxpr.invars)} refs, its grid mapping holds {inputs} operands, "
            f"{outputs} outputs and {mapping.num_scratch_operands} scratch buffers"
        )
    if getattr(jaxpr, "is_high", False):  # hijax: the jaxpr does not show what get and swap do
        reason = "it has values of types that the user defined, whose code is not in the jaxpr"
        walk.blockers.append(Blocker("the kernel", reason, walk.kernel_place))
    variables = [*jaxpr.constvars, *jaxpr.invars]
    for number, var in enumerate(variables[: len(variables) - scratch]):
        if walk.is_ref(var) and is_semaphore(var.aval):
            label = f"operand or output {number}"
            reason = f"{label} is a semaphore, which other kernels can signal too"
            walk.blockers.append(Blocker("the kernel", reason, walk.kernel_place))
    buffers = {var: walk.buffer() for var in variables if walk.is_ref(var)}
    for source, output in aliases:  # they are the same memory
        shared, out = jaxpr.invars[source], jaxpr.invars[inputs + output]
        if shared in buffers and out in buffers:
            buffers[out] = buffers[shared]
    walk.run(Frame(jaxpr, buffers))
    walk.finish()
    for block in getattr(mapping, "block_mappings", ()):
        closed = block.index_map_jaxpr
        walk.run(Frame(getattr(closed, "jaxpr", closed), {}))


_CACHE: weakref.WeakKeyDictionary[Any, list] = weakref.WeakKeyDictionary()


def _cached(jaxpr: Any, key: tuple, mapping: Any, compute: Callable[[], Audit]) -> Audit:
    # The entry keeps the grid mapping alive, so that no other one gets its id.
    entries = _CACHE.setdefault(jaxpr, [])
    for cached_key, _, audit in entries:
        if key == cached_key:
            return audit
    audit = compute()
    entries.append((key, mapping, audit))
    return audit
