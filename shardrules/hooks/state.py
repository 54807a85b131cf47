"""Track where the hooks are active: handles, scopes, and our part of JAX's trace key."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar, get_args

from shardrules.door import watching
from shardrules.door.internals import Door
from shardrules.door.patching import Patches
from shardrules.door.protocols import Primitive
from shardrules.errors import ShardrulesError
from shardrules.hooks.frames import here
from shardrules.hooks.notes import Claims, NotedSum, Notes, Placement
from shardrules.registry.binding import Binding
from shardrules.registry.table import Overlay, Registry

Unknown = Literal["error", "warn", "varying"]  # what an opaque call without rule or proof does
Unchecked = Literal["leave", "check"]  # what happens to a shard_map whose check is off
Casts = Literal["late", "cheapest"]  # where differentiated values are cast
POLICIES, UNCHECKED, CASTS = map(get_args, (Unknown, Unchecked, Casts))
_H = TypeVar("_H", bound="Hooks")
COLLECT = "collect"  # internal: record an unknown call and assume that it does not communicate


@dataclasses.dataclass(frozen=True)
class Scope:
    """The settings of a trace, and of its backward pass, which is traced later."""

    active: bool = False  # whether the hooks act
    policy: str = "error"  # what happens to an opaque call without a rule or proof
    binding: Binding | None = None  # the rule of the innermost op declared by a decorator
    overlays: tuple[Overlay, ...] = ()  # the registry's scopes, outermost first
    claims: Claims | None = None  # records of ``already_summed``, if its claims are tested
    notes: Notes | None = None  # the records of a trace that is made only for them
    prove: bool = True  # whether a kernel's own jaxpr may prove its rule
    casts: Casts = "late"  # ``late``, where JAX puts them, or ``cheapest``
    # What to do with unchecked shard_maps: ``leave`` them as written, or ``check`` whether their
    # check can be on. After the decision, ``on`` or ``off`` is in force inside the shard_map.
    unchecked: str = "leave"
    derivatives_count: int = 0  # enclosing reverse passes; counted only if casts are placed
    in_bwd: bool = False  # whether a bwd runs, in a retrace with the check on


class _Key:
    """Stands for a scope and a registry version in JAX's trace key."""

    # Keys compare by identity, which is cheap: jit hashes its trace key at every call.

    __slots__ = ("__weakref__",)


class State:
    def __init__(self, registry: Registry):
        self.registry = registry
        self.lock = threading.RLock()
        self.patched = False  # whether JAX is patched now
        self.warned: set[Any] = set()  # the warnings given since JAX was patched
        self.hooks: dict[type[Hooks], Hooks] = {}  # by class, in the order of installation
        # Maps a primitive and parameters to the opaque call, or None; set by the funnel.
        self.opaque_call_of: Callable[[Any, dict[str, Any]], Any] = lambda primitive, params: None
        self._installed: list[tuple[object, Scope]] = []  # in the order of installation
        self.everywhere = Scope()
        self.here = here
        self._trace_key = None
        # A key lives as long as JAX caches a trace under it.
        self._keys: weakref.WeakValueDictionary[Any, _Key] = weakref.WeakValueDictionary()

    # Hooks.

    def of(self, kind: type[_H]) -> _H:
        """Return the hooks of a class that comes earlier in the order."""
        return self.hooks[kind]  # type: ignore[return-value]  # the key is the object's class

    def judge(self, law: str) -> Hooks | None:
        """Return the hooks that apply a law; None if JAX's own check does."""
        return next((hooks for hooks in self.hooks.values() if law in hooks.laws), None)

    # Handles.

    def push(self, handle: object, scope: Scope) -> None:
        with self.lock:
            self._installed.append((handle, scope))
            self.everywhere = scope
            self.refresh()

    def remove(self, handle: object) -> None:
        with self.lock:
            self._installed = [entry for entry in self._installed if entry[0] is not handle]
            self.everywhere = self._installed[-1][1] if self._installed else Scope()
            self.refresh()

    def outlived(self, what: str, **data: Any) -> ShardrulesError:
        """Return the error for a program that was traced under the hooks and runs without them."""
        return ShardrulesError(
            f"{what} was traced in shard_map under shardrules' hooks and is run after they "
            "were taken back (by handle.uninstall(), or at the end of `with "
            "shardrules.install()`); without them JAX can't type its kernels. Differentiate, "
            "lower and compile it while they are installed (an application installs them once, "
            "for good), or trace it again without them.",
            **data,
        )

    # Scopes.

    @property
    def active(self) -> bool:
        return (here.scope or self.everywhere).active

    @property
    def scope(self) -> Scope:
        local = here
        base, overlays = local.scope or self.everywhere, self.registry.overlays
        if not overlays:
            return base
        if local.under[0] is not overlays or local.under[1] is not base:
            local.under = overlays, base, dataclasses.replace(base, overlays=overlays)
        both: Scope = local.under[2]
        return both

    @contextlib.contextmanager
    def enter(self, scope: Scope) -> Iterator[None]:
        """Run this thread under ``scope``, with its own entries in JAX's caches."""
        if scope is self.scope:  # the usual case: a single scope for the whole process
            yield
            return
        before = here.scope
        here.scope = dataclasses.replace(scope, overlays=())
        try:
            with self.registry.overlaid(scope.overlays), self._keyed():
                yield
        finally:
            here.scope = before

    def _keyed(self) -> Any:
        """Return a context manager that makes this thread's scope part of JAX's trace key."""
        if self._trace_key is None:
            return contextlib.nullcontext()
        return self._trace_key(self._key(self.scope))

    def note_placement(self, placement: Placement, function: str) -> None:
        """Record where a function's casts were placed, in the scope's notes or for a watch."""
        notes = self.scope.notes
        if notes is not None:
            notes.placements.append(placement)
        elif placement.exceptions:
            subject = f"the psums of the gradient of {function or 'a shard_map'}"
            for listener in tuple(watching.cast_listeners):
                listener(placement.beyond(subject))

    def record_sum(self, index: int, axes: frozenset[str], value: Any, at: str, why: str) -> None:
        """Record that the hooks sum a bwd's cotangent, if a frame or notes want it."""
        if self.here.transpose.summed is not None:
            self.here.transpose.summed.append((index, axes))
        if (notes := self.scope.notes) is not None:
            notes.sums.append(NotedSum(tuple(sorted(axes)), value.shape, value.dtype, at, why))

    @contextlib.contextmanager
    def recording_gradients(self, gradients: list[None]) -> Iterator[None]:
        """Add to ``gradients`` if something inside is differentiated in reverse."""
        outer = self.here.look.gradients
        with dataclasses.replace(self.here.look, gradients=gradients):
            yield
        if outer is not None:
            outer += gradients

    def record_gradient(self) -> None:
        if self.here.look.gradients is not None:
            self.here.look.gradients.append(None)

    def widening(self, axes: frozenset[str], trees: Callable[[], Any]) -> Callable[[], Any]:
        """Return a custom_vjp's trees for primals that were cast to vary over ``axes`` too."""

        def widened_trees() -> Any:
            frame = self.here.bwd
            with dataclasses.replace(frame, widened=frame.widened | axes):
                return trees()

        return widened_trees

    # JAX's trace key.

    def use_trace_key(self, context: Any) -> None:
        """Keep a ``jax.make_user_context()`` in step with the registry and the scopes."""
        self._trace_key = context
        self.registry.listen(self.refresh)
        self.registry.guard(self._keyed)
        self.refresh()

    def refresh(self) -> None:
        if self._trace_key is not None:
            self._trace_key.set_global(self._key(self.everywhere))

    def _key(self, scope: Scope) -> _Key | None:
        # None while nothing is installed, to share JAX's caches with plain JAX.
        if not scope.active and scope.claims is None:
            return None
        with self.lock:
            return self._keys.setdefault((scope, self.registry.version), _Key())


class Hooks:
    """Hooks on one part of JAX; ``order.TYPES`` and ``order.SETS`` list them all."""

    laws: tuple[str, ...] = ()  # the laws that these hooks apply

    def __init__(self, door: Door, state: State):
        self.door = door
        self.state = state

    def install(self, patches: Patches) -> None:
        """Replace functions of JAX, if any; ``patches`` can undo that."""

    def law(self, primitive: Primitive, row: Any) -> Any:
        """Return the law of a primitive whose row names one of ``laws``."""
        raise NotImplementedError

    @property
    def acts(self) -> bool:
        """Return whether the hooks follow types here."""
        # Test the check first: it is off inside kernels, so this keeps their tracing cheap.
        return self.door.checking() and self.state.active
