"""Arms that take turns in one process, and the tables that the benchmarks print of them."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")  # what one run took: a number, or several


def rounds(arms: dict[str, Callable[[], T]], count: int, warm_count: int = 1) -> dict[str, list[T]]:
    """Measure each arm once a round, in another order each round: A B C, B C A, C A B, ...

    Args:
      arms: from a name to a function that returns what one run took.
      count: how many rounds are kept.
      warm_count: how many come before and are not: they compile, and fill caches.
    """
    found: dict[str, list[T]] = {name: [] for name in arms}
    names = list(arms)
    for number in range(warm_count + count):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            took = arms[name]()
            if number >= warm_count:
                found[name].append(took)
    return found


def ratio(ones: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of the rounds' ratios, and their first and third quartiles."""
    ratios = [one / other for one, other in zip(ones, others, strict=True)]
    if len(ratios) < 3:
        return statistics.median(ratios), min(ratios), max(ratios)
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return middle, low, high


def shown(found: tuple[float, float, float]) -> str:
    """Write a ratio and its spread: ``1.02 (0.98 to 1.05)``."""
    return f"{found[0]:.2f} ({found[1]:.2f} to {found[2]:.2f})"


def seconds(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return what one run took."""
    start = clock()
    run()
    return clock() - start


def calls(run: Callable[[Callable[[], int]], T]) -> T:
    """Count function calls, Python's and C's, which no other work on the machine disturbs.

    Args:
      run: given a function that returns how many there were so far, instead of a clock.
    """
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        return run(lambda: count)
    finally:
        sys.setprofile(None)


def print_row(cells: Iterable[object]) -> None:
    """Print one row of a Markdown table, at once: the next may take long."""
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def print_head(cells: Sequence[str]) -> None:
    """Print a table's head: the first column is text, the others are numbers."""
    print()
    print_row(cells)
    print("|---|" + "---:|" * (len(cells) - 1), flush=True)


def print_stamp() -> None:
    """Print what the figures below were taken with, and how busy the machine was."""
    load = f"a load of {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
    print(
        f"JAX {importlib.metadata.version('jax')}, Python {platform.python_version()}, "
        f"{datetime.datetime.now(datetime.UTC).date()}, {load}"
    )
