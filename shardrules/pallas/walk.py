"""One walk over a kernel's jaxpr and the nested ones: on what but operands may results depend?"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from shardrules.door.audit_names import AuditNames
from shardrules.pallas.allowlist import LOCAL, MEETING, PURE, REFUSED, REMOTE_TRANSFORMS, TRANSFORMS

_MOST_EQUATIONS = 200_000  # bounds the work, since nested jaxprs are read at each use


@dataclasses.dataclass(frozen=True)
class Blocker:
    """One reason why a kernel is not proven."""

    primitive: str  # the primitive's name
    reason: str  # the end of the message
    source: str  # ``file:line`` of the kernel's code
    # whether it shows that the kernel communicates or reads its device's position, which
    # contradicts a declaration of ``no_communication``
    communicates: bool = False
    axes: tuple[str, ...] = ()  # the mesh axes that it names

    def __str__(self) -> str:
        return f"{self.primitive} at {self.source}: {self.reason}"


def place_of(jaxpr: Any) -> str:
    """Return ``file:line`` of the function that a jaxpr was traced from."""
    info = getattr(jaxpr, "debug_info", None)
    return getattr(info, "func_src_info", "").partition(" at ")[2] or "unknown place"


def mesh_axes(mesh: Any) -> tuple[str, ...]:
    """Return the axis names of a mesh of cores or threads."""
    try:
        return tuple(mesh.shape)
    except (AttributeError, NotImplementedError, TypeError):
        name = getattr(mesh, "axis_name", ())
        return (name,) if isinstance(name, str) else tuple(name)


def is_semaphore(aval: Any) -> bool:
    """Whether a ref holds semaphores or barriers."""
    dtype = getattr(aval, "dtype", "")
    if isinstance(dtype, np.dtype):  # no semaphore's dtype; str() of it is slow
        return False
    name = str(dtype).lower()
    return "sem" in name or "barrier" in name


@dataclasses.dataclass
class Buffer:
    """One piece of memory, whatever variables of nested jaxprs name it."""

    # the kinds of the atomic operations on it
    atomics: set[str] = dataclasses.field(default_factory=set)
    otherwise: bool = False  # whether anything else reads or stores to it
    last: Any = None  # the last atomic operation


class Frame:
    """One use of a jaxpr; ``seeded`` if a seed was set on every path to the current equation."""

    def __init__(self, jaxpr: Any, buffers: dict[Any, Buffer], seeded: bool = False):
        self.jaxpr = jaxpr
        self.buffers = buffers
        self.seeded = seeded

    @functools.cached_property
    def used(self) -> set:
        """The variables that an equation or the result reads."""
        atoms = (*(a for eqn in self.jaxpr.eqns for a in eqn.invars), *self.jaxpr.outvars)
        return {a for a in atoms if not hasattr(a, "val")}

    @functools.cached_property
    def made_by(self) -> dict[Any, Any]:
        """Maps each variable to the equation that computes it."""
        return {var: eqn for eqn in self.jaxpr.eqns for var in eqn.outvars}

    def uses(self, eqn: Any) -> bool:
        """Whether an equation's results are read."""
        return any(var in self.used for var in eqn.outvars)


class Walk:
    """The walk over a kernel that runs on cores or threads of ``core_axes``."""

    def __init__(
        self,
        names: AuditNames,
        core_axes: Iterable[str],
        grid_axes: Iterable[str],
        kernel_place: str,
        actions: Mapping[str | None, Callable[[Walk, Any, Frame], None]],
    ):
        self.names = names
        self.actions = actions
        self.core_axes = frozenset(core_axes)
        self.local_axes = self.core_axes | frozenset(grid_axes)  # not axes of the device mesh
        self.kernel_place = kernel_place
        self.blockers: list[Blocker] = []
        self._buffers: list[Buffer] = []
        self._unknown = self.buffer()  # the buffer of a variable of unknown origin
        self._left = _MOST_EQUATIONS

    # Messages.

    def block(self, eqn: Any, reason: str, communicates: bool = False, axes=()) -> None:
        """Note that an equation is not allowed."""
        place = self.names.place(eqn) or self.kernel_place
        self.blockers.append(Blocker(eqn.primitive.name, reason, place, communicates, tuple(axes)))

    # Jaxprs.

    def name(self, eqn: Any) -> str | None:
        """Return a primitive as ``family:name``; None if it isn't JAX's."""
        return self.names.primitives.get(eqn.primitive) or self.names.primitive(eqn.primitive)

    def run(self, frame: Frame) -> None:
        """Walk over a jaxpr."""
        eqns = frame.jaxpr.eqns
        before, self._left = self._left, self._left - len(eqns)
        if self._left < 0:
            if before >= 0:
                self.block(
                    eqns[0],
                    f"the kernel has more than {_MOST_EQUATIONS} equations, nested ones counted at "
                    "each use",
                )
            return
        names = self.names.primitives
        for eqn in eqns:
            primitive = eqn.primitive
            name = names[primitive] if primitive in names else self.name(eqn)
            if name in PURE:
                continue
            if name in self.actions:
                self.actions[name](self, eqn, frame)
            elif name in LOCAL:
                self.touch(eqn, frame)
            else:
                self._refuse(eqn, name)

    def _refuse(self, eqn: Any, name: str | None) -> None:
        reason, communicates = (
            REFUSED.get(str(name))
            or REFUSED.get(f"{str(name).partition(':')[0]}:*")
            or ("it is not on the audit's allow list", False)
        )
        axes = _axes_of(eqn)
        mine = bool(axes) and set(axes) <= self.local_axes
        self.block(eqn, reason, communicates and not mine, axes)

    def enter(self, jaxpr: Any, frame: Frame, atoms: Iterable[Any], consts: bool = False) -> Frame:
        """Walk over a jaxpr inside an equation; return its frame."""
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        variables = list(inner.invars) if inner is not jaxpr else [*inner.constvars, *inner.invars]
        if consts:  # from JAX 0.12 on all jaxprs are closed, so their kind does not decide
            variables = list(inner.constvars)
        buffers = {
            var: self.buffer_of(frame, atom)
            for var, atom in zip(variables, atoms)
            if atom is not None and self.is_ref(atom)
        }
        inside = Frame(inner, buffers, frame.seeded)
        for var in inner.invars:
            if var not in buffers and self.is_ref(var):
                buffers[var] = self.buffer()
        self.run(inside)
        return inside

    # Refs.

    def is_ref(self, atom: Any) -> bool:
        """Whether an atom is a ref."""
        return isinstance(getattr(atom, "aval", None), self.names.AbstractRef)

    def buffer(self) -> Buffer:
        """Return a new buffer."""
        self._buffers.append(Buffer())
        return self._buffers[-1]

    def buffer_of(self, frame: Frame, atom: Any) -> Buffer:
        """Return a variable's buffer."""
        return frame.buffers.get(atom, self._unknown)

    def touch(self, eqn: Any, frame: Frame) -> bool:
        """Note a read or a store; return whether all its views are local."""
        for atom in eqn.invars:
            if self.is_ref(atom):
                self.buffer_of(frame, atom).otherwise = True
                if is_semaphore(atom.aval) and "barrier_semaphore" in str(atom.aval.dtype):
                    self.block(eqn, MEETING)
        return self.is_local(eqn)

    def is_local(self, eqn: Any) -> bool:
        """Block views of other devices' memory; return whether there are none."""
        trees = [tree for value in eqn.params.values() for tree in _trees(value)]
        problems = [problem for tree in trees for problem in self._remote_or_unknown(tree)]
        for name, remote in problems:
            self.block(
                eqn,
                f"{name} is a view of another device's memory"
                if remote
                else f"{name} is a view of a ref that the audit does not know",
                remote,
            )
        return not problems

    def _remote_or_unknown(self, tree: Any):
        data = tree.node_data()
        if data is None:
            return
        cls = data[0]
        if cls not in (tuple, list, dict, type(None)):
            name = self.names.view(cls)
            if name not in TRANSFORMS:
                yield cls.__name__, name in REMOTE_TRANSFORMS
        for child in tree.children():
            yield from self._remote_or_unknown(child)

    def finish(self) -> None:
        """Block atomic operations on memory that is also used in other ways."""
        for buffer in self._buffers:
            if len(buffer.atomics) > 1 or (buffer.atomics and buffer.otherwise):
                self.block(
                    buffer.last,
                    "its ref is also read or stored to in other ways, in no fixed order",
                )


def _trees(value: Any):
    if hasattr(value, "node_data"):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _trees(item)


def _axes_of(eqn: Any) -> tuple[str, ...]:
    axes: list[str] = []
    for key in ("axis_name", "axes", "axis_names", "collective_axes"):
        value = eqn.params.get(key)
        values = value if isinstance(value, (tuple, list)) else (value,)
        axes += [a for a in values if isinstance(a, str)]
    return tuple(dict.fromkeys(axes))
