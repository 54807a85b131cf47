"""Tell which versions of JAX were tested."""

from __future__ import annotations

import re

OLDEST = "0.4.28"  # the version of the first report
NEWEST = "0.12"  # the last release series that the test matrix runs
TESTED = f"{OLDEST} to {NEWEST}"


def release(version: str) -> tuple[int, ...]:
    """Return the release number of a version: ``(0, 13)`` for ``0.13.0.dev1``."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version.strip())
    if match is None:
        raise ValueError(
            f"{version!r} is not a version; a version looks like '0.12.0' or '0.13.0.dev1'"
        )
    numbers = [*map(int, match[1].split("."))]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def too_old(version: str) -> str:
    """Say why a version of JAX is too old for the hooks; empty if it isn't."""
    try:
        is_older = release(version) < release(OLDEST)
    except ValueError as error:
        return str(error)
    return f"it is older than {OLDEST}" if is_older else ""


def is_untested(version: str) -> bool:
    """Return whether a version of JAX is newer than the newest tested one."""
    return release(version)[:2] > release(NEWEST)
