"""The state of this thread: one frame for each wing.

A frame never changes. To change the state, make a new frame; ``with`` puts it in force for a while.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from shardrules.registry.axistypes import AxisType

Axes = frozenset[str]


class WingFrame:
    """Base of all frames: a context in which this thread uses it as its wing's frame."""

    # Not frozen: that costs a call for each field, and a kernel's call enters one.

    wing: ClassVar[str]  # the attribute of ``here`` that holds it
    __slots__ = ("_before",)

    def __enter__(self) -> None:
        frames = here.__dict__
        self._before = frames[self.wing]
        frames[self.wing] = self

    def __exit__(self, *exc_info: object) -> None:
        here.__dict__[self.wing] = self._before


@dataclasses.dataclass(eq=False, slots=True)
class KernelFrame(WingFrame):
    """The opaque call that is being made or bound."""

    wing: ClassVar[str] = "kernel"
    # The primitive that is being bound, and its OpaqueCall. If a transformation binds another call
    # in its place, the same rule holds for that.
    primitive: Any = None
    call: Any = None
    annotations: tuple[AxisType | None, ...] = ()  # the user's, of the mesh kernel being called
    checked: bool = False  # whether the check was on around the ``plgpu.kernel`` being called


@dataclasses.dataclass(eq=False, slots=True)
class BodyFrame(WingFrame):
    """The shard_map whose body is traced: what its errors and warnings will name."""

    wing: ClassVar[str] = "body"
    # where operations vary more than JAX says, each with its place
    notes: dict[tuple[str, Axes], Any] | None = None
    contradictions: list[Any] | None = None  # annotations that a kernel contradicts


@dataclasses.dataclass(eq=False, slots=True)
class BwdFrame(WingFrame):
    """The custom_vjp whose fwd or bwd runs."""

    wing: ClassVar[str] = "bwd"
    widened: Axes = frozenset()  # the axes that its primals were cast to
    over: Axes = frozenset()  # the axes over which the primals of the running bwd vary too
    cast: Axes = frozenset()  # those of them that they were cast to
    batched: Sequence[Any] | None = None  # avals of its primals in vmap
    running: tuple[Any, ...] = ()  # the running bwds under replication sets, outermost first


@dataclasses.dataclass(eq=False, slots=True)
class TransposeFrame(WingFrame):
    """The linear program that is being transposed."""

    wing: ClassVar[str] = "transpose"
    placed: bool = False  # whether its casts are placed already
    # What reads it for shares of cotangents; None outside of a transposition.
    shares: Callable[[], Any] | None = None
    bwds: dict[Any, Any] | None = None  # bwds that were traced while casts are placed
    summed: list[tuple[int, Axes]] | None = None  # positions and axes of a bwd's sums


@dataclasses.dataclass(eq=False, slots=True)
class BranchFrame(WingFrame):
    """The cond that is being transposed."""

    wing: ClassVar[str] = "branch"
    trace: Any = None  # the trace in which its transpose is bound
    branches: Sequence[Any] = ()


@dataclasses.dataclass(eq=False, slots=True)
class LookFrame(WingFrame):
    """What is recorded of a trace."""

    wing: ClassVar[str] = "look"
    met: list[Any] | None = None  # sites of the unchecked shard_maps inside of one that is traced
    # their errors, each with the innermost site that raised it
    blamed: list[tuple[Exception, Any]] = dataclasses.field(default_factory=list)
    gradients: list[None] | None = None  # grows when something is differentiated in reverse
    order: int = 0  # of the derivative that is traced
    pulls: bool = False  # whether that derivative is pulled back, and no author's rule runs
    # the axes over which casts sum in the gradients that the running bwd takes; None outside of one
    inner: list[Axes] | None = None


class Here(threading.local):
    """This thread's frames, its scope, and what one function of JAX hands on to the next."""

    def __init__(self) -> None:
        self.kernel = KernelFrame()
        self.body = BodyFrame()
        self.bwd = BwdFrame()
        self.transpose = TransposeFrame()
        self.branch = BranchFrame()
        self.look = LookFrame()
        self.scope: Any = None  # the scope that this thread is in
        self.under: tuple[Any, Any, Any] = (None, None, None)  # overlays, a scope, both combined
        self.lowering: Any = None  # the context of the opaque call that is being lowered
        # From the outputs' shapes to the trace of their kernel: the user's annotations.
        self.annotations: list[AxisType | None] = []
        # From an error about out_specs to its text: causes, and the outputs.
        self.refused: tuple[str, Any] = ("", None)


here = Here()
