"""Walk over a kernel's jaxprs to tell whether its results depend on its operands alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from shardrules.door import audit_names
from shardrules.door.internals import Door
from shardrules.door.jaxprs import named_axes, opened
from shardrules.door.protocols import Aval, Eqn, JaxMesh, Jaxpr
from shardrules.jaxprs.walk import all_but
from shardrules.pallas.allowlist import LOCAL, MEETING, PURE, REFUSED, REMOTE_TRANSFORMS, TRANSFORMS


@dataclasses.dataclass(frozen=True)
class Blocker:
    primitive: str  # the primitive's name
    reason: str  # the end of the message
    source: str  # ``file:line`` of the kernel's code
    # whether the equation shows that the kernel communicates or reads its device's position
    contradicts_no_communication: bool = False
    axes: tuple[str, ...] = ()  # the mesh axes that the equation names

    def __str__(self) -> str:
        return f"{self.primitive} at {self.source}: {self.reason}"


def mesh_axes(mesh: JaxMesh) -> tuple[str, ...]:
    try:
        return tuple(mesh.shape)
    except (AttributeError, NotImplementedError, TypeError):
        name = getattr(mesh, "axis_name", ())
        return (name,) if isinstance(name, str) else tuple(name)


def semaphore_dtype(aval: Aval) -> str:
    """Return the dtype of a ref that holds semaphores or barriers; empty for other values."""
    dtype = getattr(aval, "dtype", "")
    if isinstance(dtype, np.dtype):  # not a semaphore's: skip str(), which is slow for a np.dtype
        return ""
    name = str(dtype).lower()
    return name if "sem" in name or "barrier" in name else ""


_MOST_EQUATIONS = 200_000  # a bound on the work, since a nested jaxpr is read at each of its uses


@dataclasses.dataclass
class Walk:
    """The walk over one kernel."""

    door: Door
    actions: Mapping[str | None, Callable[[Walk, Any], None]]
    kernel_place: str  # ``file:line`` of the kernel's function
    core_axes: frozenset[str]  # the axes of the cores or threads on which the kernel runs
    local_axes: frozenset[str]  # ``core_axes`` and the grid's axes, which are within one device
    device_axes: frozenset[str]  # the axes of the mesh of devices for which the kernel is traced
    blockers: list[Blocker] = dataclasses.field(default_factory=list)
    seeded: bool = False  # whether a seed was set on every path to the current equation
    jaxpr: Any = None  # the jaxpr of the current equation
    count: int = 0  # the number of equations so far

    def block(
        self, eqn: Eqn, reason: str, contradicts: bool = False, axes: Iterable[Any] = ()
    ) -> None:
        place = self.door.source_line(eqn.source_info, of_libraries=True) or self.kernel_place
        self.blockers.append(Blocker(eqn.primitive.name, reason, place, contradicts, tuple(axes)))

    def run(self, jaxpr: Jaxpr) -> None:
        """Walk over a jaxpr, and over its inner jaxprs at each use."""
        outer, self.jaxpr = self.jaxpr, opened(jaxpr)
        self.count += len(self.jaxpr.eqns)
        if self.count > _MOST_EQUATIONS:
            raise ValueError(f"more than {_MOST_EQUATIONS} equations, nested ones at each use")
        # Skip equations on the list of pure functions. For some primitives the name doesn't
        # suffice, so an action looks at the equation: which axes it names, whether a seed was set,
        # which jaxprs it runs. Reads and writes must stay on this device. Refuse everything else.
        for eqn in all_but(self.jaxpr, self.door.primitives, PURE):
            name = self.door.primitives[eqn.primitive]
            if name in self.actions:
                self.actions[name](self, eqn)
            elif name in LOCAL:
                self.is_local(eqn)
            else:
                self._refuse(eqn, str(name))
        self.jaxpr = outer

    def ends(self, jaxprs: Iterable[Any]) -> list[bool]:
        """Walk over jaxprs that may or may not run; return whether a seed is set after each."""
        # A seed that one jaxpr sets doesn't count in the other jaxprs. The caller decides whether
        # the seed counts after all of them.
        before, ends = self.seeded, []
        for jaxpr in jaxprs:
            self.run(jaxpr)
            ends.append(self.seeded)
            self.seeded = before
        return ends

    def _refuse(self, eqn: Eqn, name: str) -> None:
        family = name.partition(":")[0]
        reason, contradicts = (
            REFUSED.get(name)
            or REFUSED.get(f"{family}:*")
            or ("it is not on the audit's allow list", False)
        )
        axes = named_axes(eqn.params)
        mine = bool(axes) and axes <= self.local_axes
        self.block(eqn, reason, contradicts and not mine, sorted(axes))

    def is_local(self, eqn: Eqn) -> bool:
        """Return whether an equation reads and stores only on this device; if not, block it."""
        for atom in eqn.invars:
            if "barrier_semaphore" in semaphore_dtype(atom.aval):
                self.block(eqn, MEETING)
        is_local = True
        for cls in dict.fromkeys(_views(tuple(eqn.params.values()))):
            name = audit_names.view(cls)
            if cls in (tuple, list, dict, type(None)) or name in TRANSFORMS:
                continue
            is_local, is_remote = False, name in REMOTE_TRANSFORMS
            what = "another device's memory" if is_remote else "a ref that the audit does not know"
            self.block(eqn, f"{cls.__name__} is a view of {what}", is_remote)
        return is_local


def _views(value: Any) -> Iterator[type]:
    """Yield the classes of the nodes of all pytree definitions in an equation's parameters."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _views(item)
    elif hasattr(value, "node_data") and value.node_data() is not None:
        yield value.node_data()[0]
        for child in value.children():
            yield from _views(child)
