"""What a loop costs on each trip, asserted."""

from __future__ import annotations

from typing import Any

from shardrules import program as programs
from shardrules.arguments import checked
from shardrules.checks.expectations import platform_name
from shardrules.costs import launches
from shardrules.errors import CostAssertionError, ShardrulesError

_BOUND = (
    "make the bound a Python number (static_argnums of jax.jit); if it must vary, run chunks of a "
    "static length"
)
_FEWER = (
    "draw random numbers before the loop, unroll it (jax.lax.scan(..., unroll=8)), or write the "
    "loop as one Pallas kernel"
)


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
      *args: what the function is called with.
      max_launches_per_iteration: kernels, library calls and copies that one trip may launch, with
        all loops inside of it; for programs compiled for GPU, also one that is not here.
      trip_count: ``"static"`` for any that the compiler knows, a number, or None for all.
      at: the end of a loop's source line (``"sampler.py:12"``); all loops if None.
      platform: the program's, where text does not say.
      **kwargs: what else the function is called with.

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
    chosen = [
        loop
        for loop in every
        if at is None or ("/" + loop.source.partition(" (")[0]).endswith("/" + at)
    ]
    if not chosen:
        shown = "; ".join(loop.source for loop in every) or "none (unrolled, or inside of a kernel)"
        raise ShardrulesError(
            f"{source.name} holds no loop{f' at {at}' if at else ''}; its loops: {shown}", at=at
        )
    lines = []
    for loop in chosen:
        wrong = [*_trips(loop, trip_count), *_launches(loop, max_launches_per_iteration)]
        if wrong:
            lines += [f"  {loop.name} at {loop.source}", *(f"    {line}" for line in wrong)]
    if lines:
        raise CostAssertionError(
            f"{source.name} holds loops that cost more than expected:\n" + "\n".join(lines),
            loops=tuple(every),
        )
    return chosen


def _trips(loop: launches.Loop, wanted: str | int | None) -> list[str]:
    if wanted is None or wanted == "static" and loop.trip_count is not None:
        return []
    if wanted == "static" or loop.trip_count is None:
        waits = "; the host waits for its predicate on each trip" if loop.host_decides else ""
        return [f"its trip count is not static: {loop.unknown}{waits}", f"to do: {_BOUND}"]
    if loop.trip_count == wanted:
        return []
    return [f"it has {loop.trip_count} trips, expected {wanted}"]


def _launches(loop: launches.Loop, most: int | None) -> list[str]:
    if most is None or loop.launches is not None and loop.launches <= most:
        return []
    if loop.launches is None:
        return ["its launches are not known: a loop of unknown length stands inside of it"]
    kinds = ", ".join(f"{n} {kind}" for kind, n in loop.kinds)
    graphs = f"; {loop.graphs} of them graphs of many kernels" if loop.graphs else ""
    return [
        f"it launches {loop.launches} on each trip ({kinds}{graphs}), at most {most} expected",
        f"to do: {_FEWER}",
    ]
