"""Make JAX follow the registry: ``install()`` returns a handle that uninstalls everything."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from shardrules.arguments import checked
from shardrules.door import internals
from shardrules.door.internals import Door
from shardrules.door.lookup import unsupported
from shardrules.door.patching import Patches
from shardrules.door.places import leave_out_frames
from shardrules.errors import ShardrulesError, UntestedJaxWarning
from shardrules.hooks import selftest
from shardrules.hooks.state import (
    CASTS,
    POLICIES,
    UNCHECKED,
    Casts,
    Scope,
    State,
    Unchecked,
    Unknown,
)
from shardrules.registry.binding import Binding, Declared
from shardrules.registry.table import default
from shardrules.unchecked.hooks import UncheckedHooks
from shardrules.unchecked.sites import UncheckedSite, costliest

_lock = threading.RLock()
_state = State(default)
_patches = Patches()
_OPS = "declared ops"
_holders: set[Any] = set()  # JAX stays patched while it holds any: handles, contexts, _OPS


class Handle:
    """What ``install`` returns; a context manager. ``uninstall`` may be called repeatedly."""

    _decisions: Mapping[Any, UncheckedSite] = {}

    def unchecked(self) -> tuple[UncheckedSite, ...]:
        """Return the shard_maps whose check is off, the costliest first.

        Empty without ``install(unchecked="check")``. The list includes shard_maps that were called
        under other handles, even if these are uninstalled now.
        """
        return costliest(self._decisions.values())

    def uninstall(self, *, ops: bool = False) -> None:
        """Restore JAX, unless other handles are installed.

        Args:
          ops: restore JAX even if a declared op was called. By default JAX then stays patched, but
            passive, since the op's backward pass is traced later. With ``ops=True``, a backward
            pass that is not traced yet follows plain JAX.
        """
        with _lock:
            if self in _holders:
                _state.remove(self)
                _release(self)
            if ops:
                _release(_OPS)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.uninstall()

    def __repr__(self) -> str:
        return f"<shardrules hooks, {'installed' if self in _holders else 'uninstalled'}>"


@checked
def install(
    *,
    unknown: Unknown = "error",
    prove: bool = True,
    casts: Casts | None = None,
    unchecked: Unchecked = "leave",
) -> Handle:
    """Make shard_map's check follow the registry. For applications to call, once.

    Args:
      unknown: what happens under the check to an opaque call that has neither a rule nor a proof.
        ``error``: it raises. ``warn`` and ``varying``: its outputs vary over every manual mesh
        axis; ``warn`` also warns.
      prove: whether the jaxpr of an undeclared kernel may prove that it does not communicate; with
        False, only declarations count.
      casts: where differentiated values are cast to varying; the cast's transpose is a psum.
        ``cheapest``: where the gradient's psums move the fewest bytes. ``late``: at the first
        operation that needs the cast, as in JAX; JAX 0.5.3 and older always cast late. None: the
        value of the ``install()`` that is in force, else ``cheapest``. A value that differs from
        the one in force replaces it, with a warning.
      unchecked: what happens to a ``jax.shard_map`` that a program, or a library, makes with
        ``check_vma=False``. ``leave``: it runs as written. ``check``: shardrules traces it with the
        check on, and uses that if values and gradients are equal and the all-reduces move no more
        bytes; else it runs as written, and ``handle.unchecked()`` says why. ``check`` stays in
        force until its handle is uninstalled, whatever a later ``install()`` says.

    Returns:
      A handle; ``handle.uninstall()``, or leaving ``with install():``, restores JAX.

    Raises:
      UnsupportedJaxError: if this JAX lacks a private name that the hooks use, or is newer than
        all tested versions and fails the self-test; JAX is then unchanged. Also for
        ``unchecked="check"`` before JAX 0.6.1.
      ShardrulesError: if ``unknown``, ``casts`` or ``unchecked`` is none of these.

    Warns:
      UntestedJaxWarning: once, if this JAX is newer than all tested versions and passes the
        self-test.

    Examples:
      >>> with shardrules.install() as handle:  # or shardrules.install(), once, in an application
      ...     shape = jax.eval_shape(f, x)
      >>> handle = shardrules.install(unknown="varying")
      >>> handle.uninstall()
    """
    for name, given, allowed in (
        ("unknown", unknown, POLICIES),
        ("casts", casts, (None, *CASTS)),
        ("unchecked", unchecked, UNCHECKED),
    ):
        if given not in allowed:
            raise ShardrulesError(
                f"install({name}={given!r}) is not known; it is one of "
                f"{', '.join(repr(value) for value in allowed if value)}",
                **{"policy" if name == "unknown" else name: given},
            )
    if unchecked == "check":
        internals.load().need_types('install(unchecked="check")')
    with _lock:
        handle = Handle()
        _hold(handle)
        handle._decisions = _state.of(UncheckedHooks).decisions
        now = _state.everywhere
        if now.active and now.unchecked == "check":
            unchecked = "check"
        in_force = now.casts if now.active else None
        if in_force is not None and casts not in (None, in_force):
            warnings.warn(
                f"install(casts={casts!r}) replaces install(casts={in_force!r}), which is "
                "still active; call install once, in the application",
                stacklevel=3,
            )
        casts = casts or in_force or "cheapest"
        scope = Scope(True, unknown, prove=prove, casts=casts, unchecked=unchecked)
        _state.push(handle, scope)
    return handle


def installed() -> bool:
    return _state.active


def touched() -> tuple[tuple[Any, Any], ...]:
    return _patches.touched()


def replaced() -> tuple[str, ...]:
    """Return a line for each function of JAX that is replaced now, with the hook that does it."""
    return _patches.described()


def varying(value: Any) -> frozenset[str]:
    """Return the mesh axes over which a value varies, according to its type."""
    door = internals.load()
    door.need_types("hooks.varying")
    return door.axis_type(door.typeof(value)).varying


def state() -> State:
    return _state


@contextlib.contextmanager
def held() -> Iterator[State]:
    """Keep JAX patched inside the context; the hooks act only in scopes that are entered."""
    holder = object()
    _hold(holder)
    try:
        yield _state
    finally:
        _release(holder)


def _hold(holder: Any) -> None:
    """Patch JAX, unless it is patched already, until the holder and all others release it."""
    with _lock:
        if not _holders:
            door = internals.load()
            # Import these modules late, since they import jax.
            from shardrules.hooks.order import SETS, TYPES

            is_first = not _state.hooks
            try:
                if is_first:
                    for kind in TYPES if door.typed else SETS:
                        _state.hooks[kind] = kind(door, _state)
                    _state.use_trace_key(door.trace_key())
                for hook in _state.hooks.values():
                    hook.install(_patches)
                _state.patched = True
                if is_first and door.untested:
                    _self_test(door)
                if is_first:  # hide this package's frames from source lines and tracebacks
                    door.exclude_from_tracebacks(leave_out_frames())
            except BaseException:  # install all hooks or none
                _state.patched = False
                _patches.undo()
                if is_first:
                    _state.hooks.clear()
                raise
        _holders.add(holder)


def _self_test(door: Door) -> None:
    different = selftest.differences(_state)
    if different:
        raise unsupported(
            door.version,
            f"it is {door.untested}, and in the self-test {'; '.join(different)}.",
            symbol=None,
            different=tuple(different),
        )
    warnings.warn(
        UntestedJaxWarning(
            f"JAX {door.version} is {door.untested}. The private names that shardrules uses are "
            "there, and its self-test passed; compare a gradient with one that you trust.",
            version=door.version,
        ),
        stacklevel=5,  # the caller of install()
    )


def hold_for_ops() -> None:
    """Patch JAX for good once an op is called, since JAX transposes and lowers the op later."""
    # The hooks are passive while no handle is installed and no declared op is running.
    _hold(_OPS)


def _release(holder: Any) -> None:
    with _lock:
        was_held = bool(_holders)
        _holders.discard(holder)
        if was_held and not _holders:
            _state.patched = False
            _state.warned.clear()
            _state.of(UncheckedHooks).decisions = {}  # handles keep the old one
            _patches.undo()


def call_declared(declared: Declared, *args: Any, **kwargs: Any) -> Any:
    """Call a function declared by a decorator: an op under its rule, a kernel body unchanged."""
    import jax

    binding: Binding = declared.__shardrules__
    function = declared.__wrapped__
    door = internals.load()
    leaves = jax.tree_util.tree_leaves((args, kwargs))
    if any(isinstance(getattr(leaf, "aval", None), door.AbstractRef) for leaf in leaves):
        return function(*args, **kwargs)
    hold_for_ops()
    with _state.enter(dataclasses.replace(_state.scope, active=True, binding=binding)):
        return function(*args, **kwargs)
