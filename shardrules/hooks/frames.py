"""Hold this thread's state in frames, one for each group of hooks.

A frame never changes. To change the state, make a new frame; it is in force inside its ``with``.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from shardrules.registry.axistypes import AxisType

Axes = frozenset[str]


class WingFrame:
    """Base of all frames: a context manager that makes a frame the current one of its kind."""

    # Frames aren't frozen dataclasses: each call of a kernel enters a frame, and a frozen dataclass
    # sets each of its fields by a function call.

    wing: ClassVar[str]  # the attribute of ``here`` that holds the current frame
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
    # in its place, the same rule holds for that call.
    primitive: Any = None
    call: Any = None
    # the user's annotations of the mesh kernel that is being called
    annotations: tuple[AxisType | None, ...] = ()
    checked: bool = False  # whether the check was on around the ``plgpu.kernel`` being called


@dataclasses.dataclass(eq=False, slots=True)
class BodyFrame(WingFrame):
    """The shard_map whose body is being traced, with facts for its errors and warnings."""

    wing: ClassVar[str] = "body"
    # operations whose results vary more than JAX says, each with its place
    notes: dict[tuple[str, Axes], Any] | None = None
    contradictions: list[Any] | None = None  # annotations that a kernel contradicts


@dataclasses.dataclass(eq=False, slots=True)
class BwdFrame(WingFrame):
    """The custom_vjp whose fwd or bwd runs."""

    wing: ClassVar[str] = "bwd"
    widened: Axes = frozenset()  # the axes over which casts made its primals vary
    over: Axes = frozenset()  # the axes that the running bwd's primals have gained
    cast: Axes = frozenset()  # the axes in ``over`` that the primals gained by a cast
    batched: Sequence[Any] | None = None  # avals of its primals in vmap
    running: tuple[Any, ...] = ()  # the running bwds under replication sets, outermost first


@dataclasses.dataclass(eq=False, slots=True)
class TransposeFrame(WingFrame):
    """The linear program that is being transposed."""

    wing: ClassVar[str] = "transpose"
    placed: bool = False  # whether its casts are placed already
    # Reads the program for shares of cotangents; None outside of a transposition.
    shares: Callable[[], Any] | None = None
    bwds: dict[Any, Any] | None = None  # the bwds traced while casts are being placed
    summed: list[tuple[int, Axes]] | None = None  # positions and axes of a bwd's sums


@dataclasses.dataclass(eq=False, slots=True)
class BranchFrame(WingFrame):
    """The cond that is being transposed."""

    wing: ClassVar[str] = "branch"
    trace: Any = None  # the trace in which its transpose is bound
    branches: Sequence[Any] = ()


@dataclasses.dataclass(eq=False, slots=True)
class LookFrame(WingFrame):
    """The records of a retrace."""

    wing: ClassVar[str] = "look"
    met: list[Any] | None = None  # the sites of unchecked shard_maps inside the retraced one
    # the errors of these shard_maps, each with the innermost site that raised it
    blamed: list[tuple[Exception, Any]] = dataclasses.field(default_factory=list)
    gradients: list[None] | None = None  # grows if something is differentiated in reverse
    order: int = 0  # the order of the derivative that is traced
    pulls: bool = False  # whether this derivative is being pulled back
    # the axes over which casts sum in gradients that the running bwd takes; None outside a bwd
    inner: list[Axes] | None = None


class Here(threading.local):
    """This thread's frames, its scope, and values passed from one patched function to another."""

    def __init__(self) -> None:
        self.kernel = KernelFrame()
        self.body = BodyFrame()
        self.bwd = BwdFrame()
        self.transpose = TransposeFrame()
        self.branch = BranchFrame()
        self.look = LookFrame()
        self.scope: Any = None  # the scope that this thread is in
        self.under: tuple[Any, Any, Any] = (None, None, None)  # cache: overlays, scope, combination
        self.lowering: Any = None  # the context of the opaque call that is being lowered
        # The axis types that the user wrote on a kernel's output shapes, until it is traced.
        self.annotations: list[AxisType | None] = []
        # Causes and outputs, passed from an error about out_specs to the text of its message.
        self.refused: tuple[str, Any] = ("", None)


here = Here()
