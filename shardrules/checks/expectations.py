"""What a test expects of a program's collectives, and how that differs from what there is."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any

from shardrules.arguments import checked
from shardrules.costs import accounts
from shardrules.errors import ShardrulesError

__all__ = ["Expected", "at_most", "exactly", "for_platforms", "pick"]

PLATFORMS = ("cpu", "gpu", "tpu")
_NAMES = {**{p: p for p in PLATFORMS}, "cuda": "gpu", "rocm": "gpu"}  # JAX's among them
_NUMBERS = ("count", "bytes", "wire_bytes", "sites")


@dataclasses.dataclass(frozen=True)
class Expected:
    """Expectations of one program; ``exact``, or upper bounds."""

    # from a selector (``"backward all-reduce(data)"``) to some of ``count``, ``bytes``,
    # ``wire_bytes`` (over all runs of one execution, on one device) and ``sites`` (places)
    numbers: Mapping[str, Mapping[str, int]]
    # they are met exactly; else from below, and what is not named must not be there
    exact: bool = True

    def differences(self, account: accounts.Account) -> list[tuple[str, list[accounts.Entry]]]:
        """List each difference: a line, and its collectives."""
        selectors = {text: accounts.Selector.read(text) for text in self.numbers}
        for text, selector in selectors.items():
            selector.check_axes(text, account.mesh)
        taken: dict[str, list[accounts.Entry]] = {text: [] for text in self.numbers}
        rest = []
        for entry in account:
            # The most particular name gets the collective: a phase, a file, a verdict count more.
            names = sorted(
                (t for t, s in selectors.items() if s.matches(entry)),
                key=lambda t: -sum(map(bool, selectors[t])),
            )
            if names:
                taken[names[0]].append(entry)
            else:
                rest.append(entry)
        found: list[tuple[str, list[accounts.Entry]]] = []
        for text, wanted in self.numbers.items():
            totals = accounts.Totals()
            for entry in taken[text]:
                totals = totals.plus(entry)
            bad = [
                n
                for n, value in wanted.items()
                if (getattr(totals, n) != value if self.exact else getattr(totals, n) > value)
            ]
            unsure = totals.unknown and set(wanted) != {"sites"}
            if bad or unsure:
                word = "expected" if self.exact else "expected at most"
                note = (
                    f" ({totals.unknown} in loops whose trip count isn't known: give 'sites' "
                    "for these)"
                    if unsure
                    else ""
                )
                line = f"{text}: {word} {_numbers(wanted)}, found {_found(totals, wanted)}{note}"
                found.append((line, taken[text]))
        if rest:
            found.append(("not expected:", rest))
        return found


def _numbers(wanted: Mapping[str, int]) -> str:
    units = {"count": "{}", "bytes": "{} B", "wire_bytes": "{} B on the wire", "sites": "{} sites"}
    return ", ".join(units[name].format(value) for name, value in wanted.items())


def _found(totals: accounts.Totals, wanted: Mapping[str, int]) -> str:
    names = dict.fromkeys(["count", "bytes", *wanted])
    bound = "at most " if totals.at_most else ""  # of branches only one runs
    return bound + _numbers({name: getattr(totals, name) for name in names})


@checked
def exactly(numbers: Mapping[str, Any]) -> Expected:
    """Expect just these collectives.

    Args:
      numbers: from ``"all-reduce(data)"`` (axes in any order; ``"backward all-reduce(data)"`` for
        one phase, ``"... at model.py:12"`` for one source line) to a count, or to some of
        ``{"count": 32, "bytes": 512, "wire_bytes": 768, "sites": 1}``. Branches of a conditional
        count as if each ran.

    Raises:
      ShardrulesError: an expectation can't be read.
    """
    return Expected(_read(numbers))


@checked
def at_most(numbers: Mapping[str, Any]) -> Expected:
    """Expect no more than these collectives; arguments as for ``exactly``.

    Examples:
      >>> expect = testing.at_most({"all-reduce(data)": {"bytes": 65536}})
      >>> judgement = testing.assert_collectives(step, w, x, expect=expect)
    """
    return Expected(_read(numbers), exact=False)


def _read(given: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for key, value in given.items():
        accounts.Selector.read(key)
        wanted = dict(value) if isinstance(value, Mapping) else {"count": value}
        known = wanted and set(wanted) <= set(_NUMBERS)
        if not known or not all(map(_is_count, wanted.values())):
            raise ShardrulesError(
                f"{value!r} for {key!r} is not an expectation; give a count, or "
                "{'count': 1, 'bytes': 512}, of count, bytes, wire_bytes and sites",
                key=key,
                value=value,
            )
        found[key] = {name: int(n) for name, n in wanted.items()}
    return found


def _is_count(number: Any) -> bool:
    integral = isinstance(number, numbers.Integral) and not isinstance(number, bool)
    return integral and number >= 0


def _platform(name: Any) -> str:
    """Return our name of a platform, from any of JAX's."""
    if str(name).lower() not in _NAMES:
        raise ShardrulesError(
            f"platform={name!r} is none of {', '.join(PLATFORMS)}"
            + accounts.near(str(name).lower(), PLATFORMS),
            platform=name,
        )
    return _NAMES[str(name).lower()]


def for_platforms(expect: Any) -> dict[str, Any]:
    """Return the expectations of each platform; empty where they are not given by platform."""
    if not isinstance(expect, Mapping) or not any(str(k).lower() in _NAMES for k in expect):
        return {}
    found = {_platform(name): one for name, one in expect.items()}
    if len(found) < len(expect):
        raise ShardrulesError(f"expectations for {', '.join(expect)}: two are for one platform")
    return found


def pick(expect: Any, platform: str | None) -> Expected:
    """Return the expectations for one platform (None: not known)."""
    if platform is not None:
        platform = _platform(platform)
    if isinstance(expect, Expected):
        return expect
    if not isinstance(expect, Mapping):
        raise ShardrulesError(
            f"{type(expect).__name__} is not an expectation; give a mapping such as "
            "{'all-reduce(data)': 1}, exactly({...}) or at_most({...})"
        )
    each = for_platforms(expect)
    if not each:
        return exactly(expect)
    if platform not in each:
        shown = ", ".join(each)
        raise ShardrulesError(
            f"expectations are given for {shown}, and the program is for {platform}"
            if platform
            else f"expectations are given for {shown}, and the text does not say which of these "
            "it is for; pass platform=",
            platform=platform,
        )
    return pick(each[platform], platform)
