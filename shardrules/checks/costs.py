"""Assert what a compiled program costs besides its collectives."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from shardrules import hlo
from shardrules import program as programs
from shardrules.arguments import checked, shown
from shardrules.checks.expectations import platform_name
from shardrules.costs import donation, launches, placement, transfers
from shardrules.door import compiled
from shardrules.errors import CostAssertionError, ShardrulesError, few
from shardrules.units import counted


@checked
def assert_donated(
    program: Any,
    *args: Any,
    paths: Collection[str] | None = None,
    allow: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[donation.Leaf]:
    """Assert that the memory of each donated array is reused for an output.

    The check reads the compiled module's alias table. Since JAX 0.8, a donated array that fits no
    output is lost without a warning.

    Args:
      program: a function of ``*args, **kwargs``, a Lowered, a Compiled, HLO text or a path.
      *args: the function's arguments. If they are arrays, this also finds memory that is passed
        twice.
      **kwargs: its keyword arguments.
      paths: arguments, or their leaves, that must be donated: ``["state"]`` stands for every leaf
        below the parameter ``state``. Needed for text, which doesn't show arrays donated in vain.
      allow: maps a path, as for ``paths``, to the reason why its memory may be lost.

    Returns:
      All leaves of the arguments, with the use of each one's memory.

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
    arguments = results = None
    shared: list[list[int]] = []
    if source.compiled is not None:
        if (made := compiled.argument_leaves(source.compiled)) is not None:
            arguments = [donation.ArgumentBuffer(*leaf) for leaf in made]
            args, kwargs = programs.called_with(program, args, kwargs)
            if args or kwargs:
                shared = compiled.shared_buffers(source.compiled, args, kwargs)
        if (outputs := compiled.placed_results(source.compiled)) is not None:
            results = [donation.ResultBuffer(o.path, o.shape, o.sharding) for o in outputs]
    if arguments is None and not paths:
        raise ShardrulesError(
            "text does not say which arguments were meant to be donated; pass paths=['state'], the "
            "parameters whose memory must be reused, or the function with its arguments"
        )
    leaves = donation.read(source.module(), arguments, results)
    wanted = {n for n, leaf in enumerate(leaves) if leaf.donated or below(leaf.path, paths or ())}
    for what in (*(paths or ()), *(allow or ())):
        if not any(below(leaf.path, [what]) for leaf in leaves):
            there = few([leaf.path for leaf in leaves], 20)
            raise ShardrulesError(
                f"no argument of {source.name} is called {what!r}; there are {there}", path=what
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


def _lost(
    leaves: list[donation.Leaf],
    wanted: Collection[int],
    shared: list[list[int]],
    allow: Collection[str],
) -> Iterator[tuple[int, str]]:
    twice: dict[int, list[int]] = {}
    for group in shared:
        twice |= dict.fromkeys(group, group)
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
    """Return whether a pytree path is one of the names, or lies below one."""
    return any(path.startswith(name) and path[len(name) :][:1] in ("", "[", ".") for name in names)


@checked
def assert_no_host_transfers(
    program: Any, *args: Any, allow: Mapping[str, str] | None = None, **kwargs: Any
) -> list[transfers.Transfer]:
    """Assert that a compiled program neither sends to the host nor receives from it.

    The check sees JAX's callbacks (``jax.debug.print``, ``pure_callback``, ``io_callback``), feeds,
    sends and receives, copies to and from host memory, and host computations. It doesn't see inside
    your own custom calls. Reads of the results by the caller (``float(x)``) are not part of the
    program; ``steady_state`` sees them.

    Args:
      program: a function of ``*args, **kwargs``, a Lowered, a Compiled, HLO text or a path.
      *args: the function's arguments.
      **kwargs: its keyword arguments.
      allow: maps the end of a transfer's source line (``"train.py:12"``), or its function's name,
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
    bad = every
    for what in allow or ():
        allowed = [t for t in every if what == t.name or stands_at(t, what)]
        if not allowed:
            raise ShardrulesError(f"allow={what!r} no longer matches a transfer; remove it")
        bad = [t for t in bad if t not in allowed]
    if bad:
        raise CostAssertionError(
            f"{source.name} talks to the host in {counted(len(bad), 'place')}:\n"
            + "\n".join(map(_describe, bad))
            + "\n  to do: take it out of the program, move it behind the loop, or pass "
            "allow={'file.py:12': 'why it may stay'}",
            transfers=tuple(bad),
        )
    return every


def stands_at(located: transfers.Transfer | launches.Loop, place: str) -> bool:
    """Return whether a transfer or loop is at a source line, in full or as ``train.py:12``."""
    line = located.source.partition(" (")[0]
    return place == located.source or ("/" + line).endswith("/" + place)


def _describe(transfer: transfers.Transfer) -> str:
    times = "?" if transfer.runs is None else transfer.runs
    loop = f" in a loop, {times} times" if transfer.loop_depth else ""
    target = f" ({transfer.target})" if transfer.target else ""
    return f"  {transfer.what}, {transfer.bytes} B{loop}{target}\n    at {transfer.source}"


@checked
def assert_no_large_constants(
    program: Any, *args: Any, max_bytes: int = 1 << 20, **kwargs: Any
) -> list[placement.Constant]:
    """Assert that no large array is written into a compiled program.

    JAX copies an array that a jitted function closes over into the program, so each device holds
    another copy of the array.

    Args:
      program: a function of ``*args, **kwargs``, a Lowered, a Compiled, HLO text or a path.
      *args: the function's arguments.
      max_bytes: the size of the largest constant that is allowed.
      **kwargs: its keyword arguments.

    Returns:
      The program's constants, the largest first.

    Raises:
      CostAssertionError: with each larger constant's bytes, times devices, and its source line.
      ShardrulesError: ``max_bytes`` is not a count, or as ``judge``.

    Examples:
      >>> constants = testing.assert_no_large_constants(step, w, x)
    """
    __tracebackhide__ = True  # pytest shows the line that calls this
    if max_bytes < 0:
        raise ShardrulesError(f"max_bytes={max_bytes!r} is not a count of bytes; give 0 or more")
    source = programs.read(program, args, kwargs)
    module = source.module()
    every = placement.constants(module)
    large = [c for c in every if c.bytes > max_bytes]
    if large:
        count = counted(len(large), "constant")
        lines = [f"{source.name} carries {count} of more than {max_bytes} B:"]
        lines += [
            f"  {c.shape}, {c.bytes} B on each of {c.device_count} devices, "
            f"{c.bytes * c.device_count} B in all\n    used at {c.source}"
            for c in large
        ]
        if _is_pmap(module, source):
            lines.append("  the program contains a jax.pmap, which holds a copy for each device")
        lines.append("  to do: pass them as arguments, with the sharding that they should have")
        raise CostAssertionError("\n".join(lines), constants=tuple(large))
    return every


def assert_output_sharding(program: Any, *args: Any, expect: Any, **kwargs: Any) -> dict[str, str]:
    """Assert how a compiled program's outputs are sharded.

    Args:
      program: a function of ``*args, **kwargs``, a Lowered or a Compiled.
      *args: the function's arguments.
      expect: a ``PartitionSpec`` or a sharding for all outputs, or a mapping from outputs' paths to
        specs or shardings (``{"[0]['w']": P("data")}``; a path stands for everything below it).
      **kwargs: its keyword arguments.

    Returns:
      A mapping from each output's path to its sharding.

    Raises:
      CostAssertionError: with each output that is sharded differently, and whether it was gathered.
      ShardrulesError: ``program`` is text, which doesn't show shardings; no output has a path; a
        spec has no mesh; or as ``judge``.

    Examples:
      >>> testing.assert_output_sharding(step, w, x, expect=P())
      {'': 'P()'}
    """
    __tracebackhide__ = True  # pytest shows the line that calls this
    source = programs.read(program, args, kwargs)
    outputs = None if source.compiled is None else compiled.placed_results(source.compiled)
    if outputs is None:
        raise ShardrulesError(
            f"{source.name} does not say how its outputs are sharded; pass the function with its "
            "arguments, or what f.lower(...).compile() returns"
        )
    wanted = expect if isinstance(expect, Mapping) else {"": expect}
    if not wanted or not all(isinstance(path, str) for path in wanted):
        raise ShardrulesError(
            f"expect={shown(expect)} says nothing about any output; pass a PartitionSpec or a "
            "sharding for all of them, or a mapping from paths, {\"[0]['w']\": P('data')}",
            expect=expect,
        )
    for path in wanted:
        if not any(below(output.path, [path]) for output in outputs):
            there = few([output.path or "(all of it)" for output in outputs], 20)
            raise ShardrulesError(f"no output is at {path!r}; there are {there}", path=path)
    # The tokens of ordered effects stand before the program's own outputs.
    module = source.module()
    root = module.entry.instructions[module.entry.root].shape
    skip = sum(leaf.element_type == "token" for leaf in root.leaves())
    gathered = {g.output - skip: g for g in placement.gathered(module)}
    title = f"the outputs of {source.name} are not sharded as expected:"
    lines = [title]
    for number, output in enumerate(outputs):
        # The longest path that contains the output is the most specific expectation.
        paths = [path for path in wanted if below(output.path, [path])]
        other = output.differs(wanted[max(paths, key=len)]) if paths else None
        if other is None:
            continue
        lines.append(f"  {output.path or '(all of it)'}: {output.sharding}, expected {other}")
        if gather := gathered.get(number):
            lines.append(
                f"    gathered from {gather.bytes_before} B to {gather.bytes_after} B on each "
                f"device at {gather.source}"
            )
    if lines != [title]:
        lines.append(
            "  this jit contains a jax.pmap: use jax.shard_map, whose out_specs give the sharding"
            if _is_pmap(module, source)
            else "  to do: pass out_shardings= to jax.jit, or name the axis in the out_specs "
            "of shard_map"
        )
        raise CostAssertionError("\n".join(lines), outputs=tuple(outputs))
    return {output.path: output.sharding for output in outputs}


def _is_pmap(module: hlo.Module, source: programs.Program) -> bool:
    mesh = None if source.compiled is None else compiled.placements(source.compiled).mesh()
    return placement.is_pmap(module, mesh or ())


@checked
def assert_loop(
    program: Any,
    *args: Any,
    max_launches_per_iteration: int | None = None,
    trip_count: str | int | None = "static",
    at: str | None = None,
    platform: str | None = None,
    **kwargs: Any,
) -> list[launches.Loop]:
    """Assert what the loops of a compiled program cost on each trip.

    Args:
      program: a function of ``*args, **kwargs``, a Lowered, a Compiled, HLO text or a path.
      *args: the function's arguments.
      max_launches_per_iteration: kernels, library calls and copies that one trip may launch,
        including the launches of inner loops; for programs compiled for GPU (no GPU needed).
      trip_count: ``"static"`` for any count that the compiler knows, a number, or None for any.
      at: the end of a loop's source line (``"sampler.py:12"``); all loops if None.
      platform: the program's platform, if text doesn't say.
      **kwargs: its keyword arguments.

    Returns:
      The loops.

    Raises:
      CostAssertionError: naming each loop, what made its length unknown, and what it launches.
      ShardrulesError: there is no such loop, launches of a program that is not for GPU, or as
        ``judge``.

    Examples:
      >>> summed = jax.jit(lambda x: jax.lax.fori_loop(0, 5, lambda _, a: jnp.sin(a), x))
      >>> [loop.trip_count for loop in testing.assert_loop(summed, x)]
      [5]
    """
    __tracebackhide__ = True  # pytest shows the line that calls this
    if isinstance(trip_count, str) and trip_count != "static":
        raise ShardrulesError(
            f"trip_count={trip_count!r} is unknown; give 'static', a number, or None for any"
        )
    if platform is not None:
        platform = platform_name(platform)
    source = programs.read(program, args, kwargs)
    module = source.module()
    platform = platform or source.platform() or launches.platform(module)
    if max_launches_per_iteration is not None and platform != "gpu":
        raise ShardrulesError(
            f"launches are counted in programs for GPU, and {source.name} is for "
            f"{platform or 'a platform that its text does not name; pass platform='}"
            + ("; compile it for the devices of shardrules.aot.gpu(...)" if platform else "")
        )
    every = launches.read(module, platform)
    chosen = [loop for loop in every if at is None or stands_at(loop, at)]
    if not chosen:
        shown = "; ".join(loop.source for loop in every) or ("none (unrolled, or inside a kernel)")
        raise ShardrulesError(
            f"{source.name} holds no loop{f' at {at}' if at else ''}; its loops: {shown}", at=at
        )
    lines = []
    for loop in chosen:
        wrong = [*_trips(loop, trip_count), *_launches(loop, max_launches_per_iteration)]
        if wrong:
            lines.append("\n    ".join([f"\n  {loop.name} at {loop.source}", *wrong]))
    if lines:
        raise CostAssertionError(
            f"{source.name} holds loops that cost more than expected:{''.join(lines)}",
            loops=tuple(every),
        )
    return chosen


def _trips(loop: launches.Loop, wanted: str | int | None) -> list[str]:
    if wanted is None or (wanted == "static" and loop.trip_count is not None):
        return []
    if wanted == "static" or loop.trip_count is None:
        waits = "; the host waits for its predicate on each trip" if loop.host_decides else ""
        return [
            f"its trip count is not static: {loop.unknown}{waits}",
            "to do: make the bound a Python number (static_argnums of jax.jit); if it must vary, "
            "run chunks of a static length",
        ]
    if loop.trip_count == wanted:
        return []
    return [f"it has {loop.trip_count} trips, expected {wanted}"]


def _launches(loop: launches.Loop, most: int | None) -> list[str]:
    if most is None or (loop.launches is not None and loop.launches <= most):
        return []
    if loop.launches is None:
        return ["its launches are not known: it contains a loop of unknown length"]
    kinds = ", ".join(f"{n} {kind}" for kind, n in loop.kinds)
    graphs = f"; {loop.graphs} of them graphs of many kernels" if loop.graphs else ""
    return [
        f"it launches {loop.launches} on each trip ({kinds}{graphs}), at most {most} expected",
        "to do: draw random numbers before the loop, unroll it (jax.lax.scan(..., unroll=8)), or "
        "write the loop as one Pallas kernel",
    ]
