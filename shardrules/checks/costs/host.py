"""What a loop on the host depends on: donated memory that is reused, and no talk with the host."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from shardrules import program as programs
from shardrules.arguments import checked
from shardrules.costs import donation, transfers
from shardrules.errors import CostAssertionError, ShardrulesError
from shardrules.report.grouping import counted


@checked
def assert_donated(
    program: Any,
    *args: Any,
    paths: Collection[str] | None = None,
    allow: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[donation.Leaf]:
    """Assert that the memory of each donated array is reused for an output.

    It reads the compiled module's alias table. A donated array that no output fits is lost without
    a warning from JAX 0.8 on.

    Args:
      program: a function of ``*args, **kwargs``, a Lowered, a Compiled, HLO text or a path.
      *args: what the function is called with. Where these are arrays, memory that is passed twice
        is found too.
      **kwargs: its keyword arguments.
      paths: arguments, or leaves of them, that must be donated: ``["state"]`` stands for all that
        is below the parameter ``state``. Text alone needs them: what was donated in vain leaves no
        trace in it.
      allow: from a path, as for ``paths``, to the reason why its memory may be lost.

    Returns:
      All leaves of the arguments, with what became of each.

    Raises:
      CostAssertionError: naming each leaf whose memory is not reused, why, and what to do.
      ShardrulesError: nothing is donated, ``paths`` or ``allow`` match nothing, or as ``judge``.

    Examples:
      >>> update = jax.jit(lambda w, g: w - g, donate_argnums=0)
      >>> [leaf.donated for leaf in testing.assert_donated(update, w, 2 * w)]
      [True, False]
    """
    __tracebackhide__ = True  # pytest shows the line that calls this
    source = programs.read(program, args, kwargs)
    arguments, results, shared = _leaves(source, args, kwargs)
    if arguments is None and not paths:
        raise ShardrulesError(
            "text does not say which arguments were meant to be donated; pass paths=['state'], the "
            "parameters whose memory must be reused, or the function with its arguments"
        )
    leaves = donation.read(source.module(), arguments, results)
    wanted = {n for n, leaf in enumerate(leaves) if leaf.donated or below(leaf.path, paths or ())}
    for what in (*(paths or ()), *(allow or ())):
        if not any(below(leaf.path, [what]) for leaf in leaves):
            raise ShardrulesError(
                f"no argument of {source.name} is called {what!r}; there are "
                + ", ".join(leaf.path for leaf in leaves[:20])
                + (" ..." if len(leaves) > 20 else ""),
                path=what,
            )
    if not wanted:
        raise ShardrulesError(
            f"no argument of {source.name} is donated; name those whose memory may be reused in "
            "donate_argnums or donate_argnames of jax.jit"
        )
    lost = dict(_lost(leaves, wanted, shared, allow or ()))
    if lost:
        raise CostAssertionError(
            f"{counted(len(lost), 'donated array', len(wanted))} not reused for an output "
            f"({sum(leaves[n].bytes for n in lost)} B on each device):\n"
            + "\n".join(lost.values()),
            leaves=tuple(leaves),
            lost=tuple(leaves[n] for n in lost),
        )
    return leaves


def _leaves(source: programs.Program, args: tuple, kwargs: dict):
    """Return a program's arguments, its results, and which arguments share memory."""
    arguments = results = None
    shared: list[list[int]] = []
    if source.compiled is not None:
        from shardrules.door import compiled

        if (leaves := compiled.argument_leaves(source.compiled)) is not None:
            arguments = [donation.Argument(*leaf) for leaf in leaves]
            if args or kwargs:
                shared = compiled.shared_buffers(source.compiled, args, kwargs)
        if (outputs := compiled.placed_results(source.compiled)) is not None:
            results = [donation.Result(o.path, o.shape, o.sharding) for o in outputs]
    return arguments, results, shared


def _lost(
    leaves: list[donation.Leaf],
    wanted: Collection[int],
    shared: list[list[int]],
    allow: Collection[str],
) -> Iterator[tuple[int, str]]:
    twice = {n: group for group in shared for n in group}
    for n in sorted(wanted):
        leaf, cause, reason = leaves[n], leaves[n].cause, leaves[n].reason
        if n in twice and leaf.donated:
            others = [leaves[m].path for m in twice[n] if m != n]
            cause, reason = "twice", f"the same memory is passed as {' and '.join(others)}"
        elif leaf.status == "kept":
            cause, reason = "not donated", "it is not donated"
        elif leaf.status == "aliased":
            continue
        if below(leaf.path, allow):
            continue
        yield (
            n,
            f"  {leaf.path}, {leaf.shape}, {leaf.bytes} B: {reason}"
            f"\n    to do: {donation.ADVICE[cause]}",
        )


def below(path: str, names: Collection[str]) -> bool:
    """Whether a pytree path is one of the names, or a key below one."""
    return any(path.startswith(name) and path[len(name) :][:1] in ("", "[", ".") for name in names)


@checked
def assert_no_host_transfers(
    program: Any, *args: Any, allow: Mapping[str, str] | None = None, **kwargs: Any
) -> list[transfers.Transfer]:
    """Assert that a compiled program neither sends to the host nor receives from it.

    It sees JAX's callbacks (``jax.debug.print``, ``pure_callback``, ``io_callback``), feeds, sends
    and receives, copies to and from host memory, and host computations. A custom call of one's own
    may do what it likes, and what the caller does with the results (``float(x)``) is not part of
    the program: ``steady_state`` sees that.

    Args:
      program: a function of ``*args, **kwargs``, a Lowered, a Compiled, HLO text or a path.
      *args: what the function is called with.
      **kwargs: its keyword arguments.
      allow: from the end of a transfer's source line (``"train.py:12"``), or its function's name,
        to the reason why it may stay.

    Returns:
      The transfers that are allowed.

    Raises:
      CostAssertionError: listing the transfers, those in loops first.
      ShardrulesError: ``allow`` matches nothing, or as ``judge``.

    Examples:
      >>> transfers = testing.assert_no_host_transfers(step, w, x)
    """
    __tracebackhide__ = True  # pytest shows the line that calls this
    source = programs.read(program, args, kwargs)
    every = transfers.read(source.module())
    for what in allow or ():
        if not any(_at(t, what) for t in every):
            raise ShardrulesError(f"allow={what!r} matches no transfer any more; remove it")
    bad = [t for t in every if not any(_at(t, what) for what in allow or ())]
    if bad:
        raise CostAssertionError(
            f"{source.name} talks to the host in {counted(len(bad), 'place')}:\n"
            + "\n".join(map(_describe, bad))
            + "\n  to do: take it out of the program, move it behind the loop, or pass "
            "allow={'file.py:12': 'why it may stay'}",
            transfers=tuple(bad),
        )
    return every


def _at(transfer: transfers.Transfer, what: str) -> bool:
    place = transfer.source.partition(" (")[0]
    return ("/" + place).endswith("/" + what) or what in (transfer.source, transfer.name)


def _describe(transfer: transfers.Transfer) -> str:
    times = "?" if transfer.runs is None else transfer.runs
    loop = f" in a loop, {times} times" if transfer.loop_depth else ""
    target = f" ({transfer.target})" if transfer.target else ""
    return f"  {transfer.what}, {transfer.bytes} B{loop}{target}\n    at {transfer.source}"
