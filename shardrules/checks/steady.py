"""Guard a loop on the host in its steady state: no compilation, no read, no growth of memory."""

from __future__ import annotations

import collections
import contextlib
import gc
from typing import Any

import jax

from shardrules import hlo
from shardrules.arguments import checked
from shardrules.costs import donation
from shardrules.door import compiled, watching
from shardrules.errors import ShardrulesError, SteadyStateError
from shardrules.paths import here
from shardrules.watching.reads import user_line

_FIELDS = ("shape", "dtype", "weak_type", "sharding")


@checked
def steady_state(*, warmup_count: int = 0, growth_bytes: int = 0) -> SteadyState:
    """Guard a loop on the host, on the thread that enters it.

    ``with steady_state() as s: for ...: s.tick()`` raises if, inside the block,

    - a program is compiled (it says what changed in the arguments since earlier calls);
    - an array is read by the host, or a value of NumPy or Python is passed to a compiled function,
      without ``jax.device_get`` and ``jax.device_put``; a number in an operation outside
      ``jax.jit``, such as ``x * 2``, is allowed;
    - a donated argument was not deleted by the call (it says why);
    - live arrays take more bytes at a ``tick`` than at the one before.

    On CPU ``jax.transfer_guard`` lets ``float(x)`` through, so array methods, ``numpy.asarray`` and
    ``numpy.array`` are replaced while a block runs, and restored when the last block ends, even by
    an exception. Calls of compiled functions take JAX's slower path inside the block.

    The guard doesn't see other threads. On CPU, it doesn't see reads by NumPy's other functions
    (``numpy.add(a, x)``), by ``memoryview`` and by DLPack; on GPU and TPU, JAX's guard sees them.

    Args:
      warmup_count: the number of ticks before the guard starts, since the first iterations compile.
      growth_bytes: by how much live arrays may grow from one tick to the next.

    Raises:
      SteadyStateError: inside the block, if one of these events happens.
      ShardrulesError: a count is negative.

    Examples:
      >>> with testing.steady_state(warmup_count=1) as steady:
      ...     for _ in range(3):
      ...         result = step(w, x)
      ...         steady.tick()
    """
    return SteadyState(warmup_count, growth_bytes)


class SteadyState(watching.Listener):
    """The context manager that ``steady_state`` returns, with ``tick``."""

    wants_arguments = True

    def __init__(self, warmup_count: int, growth_bytes: int):
        for name, value in (("warmup_count", warmup_count), ("growth_bytes", growth_bytes)):
            if value < 0:
                raise ShardrulesError(f"{name}={value!r} is not a count; give 0 or more")
        self._warmup_count = warmup_count
        self._growth_bytes = growth_bytes
        self._ticks = 0
        self._seen: dict[str, list[list[watching.Argument]]] = {}
        self._current: list[tuple[str, list[watching.Argument], contextlib.ExitStack]] = []
        self._live: collections.Counter[tuple[str, int]] | None = None
        self._stack = contextlib.ExitStack()
        self._is_on = False

    @property
    def _warm(self) -> bool:
        return self._ticks >= self._warmup_count

    def __enter__(self) -> SteadyState:
        self._stack.callback(watching.start(self))
        self._is_on = True
        if self._warm:
            self._guard()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._stack.close()
        self._is_on = False
        text = "" if isinstance(error, ShardrulesError) else str(error)
        if "Disallowed" in text and "transfer" in text:  # JAX's transfer guard
            raise SteadyStateError(
                "an implicit transfer between host and device inside steady_state: JAX says\n"
                f"  {text.splitlines()[0]}\n"
                "  to do: make it before the loop, or ask for it with jax.device_put or "
                "jax.device_get",
                problem="transfer",
            ) from error

    def tick(self) -> None:
        """End one iteration, and raise if live arrays take more bytes than at the tick before.

        Raises:
          SteadyStateError: live arrays take more bytes; the error lists the new arrays.
          ShardrulesError: if the block is not entered.
        """
        if not self._is_on:
            raise ShardrulesError(
                "tick() outside of the block; write `with testing.steady_state() as steady:` "
                "around the loop"
            )
        self._ticks += 1
        if not self._warm:
            return
        if self._ticks == self._warmup_count:
            self._guard()
        if self._live is None:
            gc.collect()  # garbage that is freed later would hide growth of the same size
        live = _live()
        if self._grown(live) > self._growth_bytes:
            gc.collect()  # arrays in reference cycles stay alive until a collection
            live = _live()
        grown = self._grown(live)
        if self._live is not None and grown > self._growth_bytes:
            came = live - self._live
            raise SteadyStateError(
                f"live arrays grew by {grown} B in iteration {self._ticks}: "
                + ", ".join(f"{n // max(size, 1)} more {what}" for (what, size), n in came.items())
                + "\n  to do: keep no array of each iteration (a list of losses, say); read it "
                "with jax.device_get, or keep a running sum",
                problem="growth",
                bytes=grown,
            )
        self._live = live

    def _grown(self, live: collections.Counter[tuple[str, int]]) -> int:
        return 0 if self._live is None else live.total() - self._live.total()

    def _guard(self) -> None:
        self._stack.enter_context(jax.transfer_guard_host_to_device("disallow"))
        self._stack.enter_context(jax.transfer_guard_device_to_host("disallow"))

    def called(self, name: str, arguments: list[watching.Argument], is_jax_s: bool) -> None:
        host = [a for a in arguments if not a.sharding]
        arrays = [a for a in host if not is_jax_s or a.shape != "[]"]
        if self._warm and arrays:
            what = f"an operation ({name})" if is_jax_s else name
            raise SteadyStateError(
                f"{what}{_line()} is called with host values, each of which is copied to the "
                "device:"
                + "".join(f"\n  {a.path}: {_host_type(a)}" for a in arrays)
                + "\n  to do: jax.device_put them, before the loop if they don't change",
                problem="host values",
                paths=tuple(a.path for a in arrays),
            )
        stack = contextlib.ExitStack()
        if self._warm and host:  # the numbers in x * 2 + 1
            stack.enter_context(jax.transfer_guard_host_to_device("allow"))
        self._current.append((name, arguments, stack))

    def failed(self) -> None:
        self._current.pop()[-1].close()

    def compiling(self, name: str) -> None:
        if not self._warm:
            return
        called, arguments, _ = self._current[-1] if self._current else ("", [], None)
        before = self._seen.get(called)
        if not called:
            why = "\n  to do: compile it before the loop"
        elif not before:
            why = (
                "\n  it was not called in this block before: call it once before the loop, or pass "
                "steady_state(warmup_count=1) and tick"
            )
        else:
            changes = min((_changes(old, arguments) for old in before), key=len)
            why = "".join(f"\n  {line}" for line in changes) or (
                "\n"
                "  none of its arguments changed: a static argument or a value that it closes "
                "over did, or it is another function (jax.jit inside the loop)"
            )
        raise SteadyStateError(
            f"{name} is compiled inside steady_state{_line()}:{why}", problem="compiled", name=name
        )

    def reading(self, array: Any, how: str) -> None:
        if self._warm:
            what = f"{array.dtype}[{','.join(map(str, array.shape))}]"
            raise SteadyStateError(
                f"an array {what} is read by the host ({how}) inside steady_state{_line()}, which "
                "waits for the device\n"
                "  to do: read it after the loop, or ask for it with jax.device_get",
                problem="read",
            )

    def returned(
        self, name: str, arguments: list[watching.Argument], executable: Any, results: Any
    ) -> None:
        self._current.pop()[-1].close()
        # Don't keep the arrays themselves alive.
        self._seen.setdefault(name, []).append([a._replace(array=None) for a in arguments])
        del self._seen[name][:-8]
        if not self._warm:
            return
        kept = [
            n
            for n, a in enumerate(arguments)
            if a.donated and hasattr(a.array, "is_deleted") and not a.array.is_deleted()
        ]
        if kept:
            why = _why_kept(arguments, executable)
            lines = [f"\n  {arguments[n].path}, {_type(arguments[n])}: {why[n]}" for n in kept]
            raise SteadyStateError(
                f"{name} did not reuse the memory of its donated arguments:" + "".join(lines),
                problem="kept",
                paths=tuple(arguments[n].path for n in kept),
            )


def _why_kept(arguments: list[watching.Argument], executable: Any) -> list[str]:
    """Return why each argument's memory was not reused, as if all had been donated."""
    rows = [(a.path, a.donated, a.array.aval) for a in arguments]
    kept = compiled.kept_leaves(executable, rows)
    text = compiled.executable_text(executable)
    if kept is None or text is None:
        return ["the program does not say why"] * len(arguments)
    leaves = donation.read(hlo.parse(text), [donation.ArgumentBuffer(*leaf) for leaf in kept])
    words = {
        "pruned": "pruned, since the program never reads it\n    to do: "
        + donation.ADVICE["unused"],
        "aliased": "the program asks to write an output there, but this backend could not",
    }
    return [
        words.get(leaf.status) or f"{leaf.reason}\n    to do: {donation.ADVICE.get(leaf.cause)}"
        for leaf in leaves
    ]


def _line() -> str:
    line = user_line()
    return f" at {here(line)}" if line else ""


def _host_type(argument: watching.Argument) -> str:
    is_python_s = isinstance(argument.array, (bool, int, float, complex))
    return type(argument.array).__name__ if is_python_s else f"numpy {_type(argument)}"


def _type(argument: watching.Argument) -> str:
    return f"{argument.dtype}{argument.shape}"


def _changes(old: list[watching.Argument], new: list[watching.Argument]) -> list[str]:
    before = [argument.path for argument in old]
    after = [argument.path for argument in new]
    if before != after:
        came = [path for path in after if path not in before]
        went = [path for path in before if path not in after]
        pairs = ((came, "came"), (went, "went"))
        said = [f"{', '.join(paths)} {how}" for paths, how in pairs if paths]
        return [f"the arguments' tree changed: {', and '.join(said) or 'their order'}"]
    changes = []
    for a, b in zip(old, new):
        for field in _FIELDS:
            was, now = getattr(a, field), getattr(b, field)
            if was != now:
                changes.append(f"{b.path}: {field.replace('_', ' ')} was {was}, is {now}")
    return changes


def _live() -> collections.Counter[tuple[str, int]]:
    live: collections.Counter[tuple[str, int]] = collections.Counter()
    for kind, size in watching.live_arrays():
        live[kind, size] += size
    return live
