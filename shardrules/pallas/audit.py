"""Prove from a Pallas kernel's own jaxpr that its outputs depend on its operands alone.

The audit uses an allow list: a kernel with any primitive that isn't on it is not proven. The audit
assumes that the kernel is well formed (it reads only memory that it has written, stays in bounds,
covers its outputs, and doesn't race with itself); ``check_rule`` tests that in JAX's own
interpreter.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Iterable
from typing import Any

from shardrules.door import internals
from shardrules.door.jaxprs import kernel_name
from shardrules.door.protocols import Jaxpr, Params
from shardrules.pallas.actions import ACTIONS
from shardrules.pallas.walk import Blocker, Walk, mesh_axes, semaphore_dtype
from shardrules.registry.table import PROVEN


@dataclasses.dataclass(frozen=True)
class Audit:
    blockers: tuple[Blocker, ...] = ()  # why the kernel is not proven; empty if it is

    @property
    def proven(self) -> bool:
        return not self.blockers

    @property
    def contradicts_no_communication(self) -> bool:
        """Return whether the jaxpr shows communication, or a read of the device's position."""
        return any(blocker.contradicts_no_communication for blocker in self.blockers)

    def __str__(self) -> str:
        return "not proven:\n  " + "\n  ".join(map(str, self.blockers)) if self.blockers else PROVEN


def prove(primitive: str, params: Params, operand_count: int) -> Audit | None:
    """Return the audit of a call's kernels; None if this JAX can't read any kernel in the call."""
    mapping: Any = params.get("grid_mapping")
    if primitive == "pallas_call" and hasattr(mapping, "num_inputs"):  # not on JAX 0.4.28
        jaxprs = [params["jaxpr"]]
        refs_count = mapping.num_index_operands + mapping.num_inputs + mapping.num_outputs
        meshes = [params["mesh"]] if params.get("mesh") is not None else []
    elif primitive == "mpmd_map":
        jaxprs, meshes = params["jaxprs"], params["meshes"]
        refs_count = operand_count + len(params["out_avals"])
    elif primitive == "core_map":
        jaxprs, meshes = [params["jaxpr"]], [params["mesh"]]
        refs_count = len(params["jaxpr"].invars)
    else:
        return None
    axes = tuple(itertools.chain.from_iterable(map(mesh_axes, meshes)))
    blockers: dict[Blocker, None] = {}  # in order, without duplicates
    for jaxpr in jaxprs:
        blockers |= dict.fromkeys(_audit(jaxpr, mapping, refs_count, axes).blockers)
    return Audit(tuple(blockers))


# An entry keeps the grid mapping alive, so that no other mapping gets its id.
_CACHE: weakref.WeakKeyDictionary[Any, dict[Any, tuple[Any, Audit]]] = weakref.WeakKeyDictionary()


def _audit(jaxpr: Jaxpr, mapping: Any, refs_count: int, axes: tuple[str, ...]) -> Audit:
    import jax

    kept = _CACHE.setdefault(jaxpr, {})
    current = getattr(jax.sharding, "get_abstract_mesh", None)  # since JAX 0.5
    device_axes = frozenset(() if current is None else current().axis_names)
    key = refs_count, axes, device_axes, id(mapping)
    if key not in kept:
        place = kernel_name({"jaxpr": jaxpr})[1] or "unknown place"
        grid_axes = getattr(mapping, "grid_names", None) or ()
        local_axes = frozenset((*axes, *grid_axes))
        walk = Walk(internals.load(), ACTIONS, place, frozenset(axes), local_axes, device_axes)
        blockers = walk.blockers
        try:
            reasons = list(_reasons(walk, jaxpr, mapping, refs_count))
        except Exception as error:  # noqa: BLE001 - an unknown form of jaxpr proves nothing
            what = f"({type(error).__name__}: {error})"
            blockers, reasons = [], [f"the audit can't read its jaxpr {what}; please report it"]
        whole = [Blocker("the kernel", reason, place) for reason in reasons]
        kept[key] = mapping, Audit(tuple(dict.fromkeys((*whole, *blockers))))
    return kept[key][1]


def _reasons(walk: Walk, jaxpr: Jaxpr, mapping: Any, refs_count: int) -> Iterable[str]:
    """Walk over a kernel and its index maps; yield why it is not proven as a whole."""
    # The proof is an induction over the equations. If every input is a function of the operands,
    # and every equation computes a function of its inputs (the allow list), then every value that
    # is stored to an output is a function of the operands. The list of primitives can't exclude two
    # things, so they are tested here: values of types whose code isn't in the jaxpr, and
    # semaphores, which carry signals from outside the kernel. Index maps decide which blocks are
    # read and written, so walk over them, too.
    scratch_count = len(jaxpr.invars) - refs_count
    if mapping is not None and scratch_count != mapping.num_scratch_operands:
        raise ValueError(
            f"the kernel takes {len(jaxpr.invars)} refs, its grid mapping holds {refs_count} "
            f"operands and outputs and {mapping.num_scratch_operands} scratch buffers"
        )
    if getattr(jaxpr, "is_high", False):  # hijax: the jaxpr does not show what get and swap do
        yield "it has values of types that the user defined, whose code is not in the jaxpr"
    refs = [*jaxpr.constvars, *jaxpr.invars[:refs_count]]
    for number, var in enumerate(refs):
        if semaphore_dtype(var.aval):
            yield f"operand or output {number} is a semaphore, which other kernels can signal too"
    walk.run(jaxpr)
    for block in getattr(mapping, "block_mappings", ()):
        walk.seeded = False
        walk.run(block.index_map_jaxpr)
