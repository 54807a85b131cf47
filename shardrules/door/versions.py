"""Which versions of JAX were tested, and how they are ordered: pre-releases before a release."""

from __future__ import annotations

import re

OLDEST = "0.4.28"  # the JAX that the first report was written on
NEWEST = (0, 12)  # the last release series that the test matrix runs

_VERSION = re.compile(
    r"v?(?P<release>\d+(?:\.\d+)*)"
    r"(?:[._-]?(?P<phase>a|alpha|b|beta|rc|c|pre|preview)[._-]?(?P<number>\d*))?"
    r"(?:-(?P<post_dash>\d+)|[._-]?(?P<post>post|rev|r)[._-]?(?P<post_number>\d*))?"
    r"(?:[._-]?(?P<dev>dev)[._-]?(?P<dev_number>\d*))?"
    r"(?:\+.*)?",
    re.IGNORECASE,
)

_PHASES = {"a": 0, "alpha": 0, "b": 1, "beta": 1, "c": 2, "rc": 2, "pre": 2, "preview": 2}


def release(version: str) -> tuple[int, ...]:
    """Return the release number of a version: ``(0, 13)`` for ``0.13.0.dev1``."""
    return order(version)[0]


def order(version: str) -> tuple:
    """Return a key that sorts as PEP 440 does: 0.13.0.dev1 < 0.13.0rc1 < 0.13.0 < 0.13.0.post1."""
    # What follows a ``+`` (a local build) is left out.
    match = _VERSION.fullmatch(version.strip())
    if match is None:
        raise ValueError(
            f"{version!r} is not a version; a version looks like '0.12.0' or '0.13.0.dev1'"
        )
    numbers = tuple(int(part) for part in match["release"].split("."))
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers = numbers[:-1]
    posted = match["post_dash"] is not None or match["post"] is not None
    post = int(match["post_dash"] or match["post_number"] or 0) if posted else -1
    dev = int(match["dev_number"] or 0) if match["dev"] else None
    if match["phase"]:
        phase = (_PHASES[match["phase"].lower()], int(match["number"] or 0))
    elif dev is not None and not posted:
        phase = (-1, 0)  # a development release comes before every pre-release
    else:
        phase = (3, 0)
    return numbers, phase, post, (0, dev) if dev is not None else (1, 0)


def too_old(version: str) -> str:
    """Say what keeps a JAX from being one that hooks were written for; empty if nothing."""
    try:
        is_older = order(version) < order(OLDEST)
    except ValueError as error:
        return str(error)
    return f"it is older than {OLDEST}" if is_older else ""


def tested() -> str:
    """Return the range of versions that the test matrix runs, as text."""
    return f"{OLDEST} to {'.'.join(map(str, NEWEST))}"


def is_untested(version: str) -> bool:
    """Whether a JAX is newer than the newest that was tested."""
    return release(version)[:2] > NEWEST
