"""A test's expectations of a program's collectives, and how the program differs from them."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any

from shardrules.arguments import checked
from shardrules.costs import accounts
from shardrules.errors import ShardrulesError

PLATFORMS = ("cpu", "gpu", "tpu")
_NAMES = {**{p: p for p in PLATFORMS}, "cuda": "gpu", "rocm": "gpu"}  # with JAX's names
_NUMBERS = ("count", "bytes", "wire_bytes", "sites")


@dataclasses.dataclass(frozen=True)
class Expected:
    """Expectations of one program: exact numbers, or upper bounds."""

    # from a selector (``"backward all-reduce(data)"``) to some of ``count``, ``bytes``,
    # ``wire_bytes`` (over all runs of one execution, on one device) and ``sites`` (places)
    numbers: Mapping[str, Mapping[str, int]]
    # whether the numbers must be met exactly; collectives that no selector matches fail either way
    exact: bool = True

    def differences(self, account: accounts.Account) -> list[tuple[str, list[accounts.Entry]]]:
        """List each difference: a line, and its collectives."""
        selectors = {text: accounts.Selector.read(text) for text in self.numbers}
        for text, selector in selectors.items():
            selector.check_axes(text, account.mesh)
        taken: dict[str, list[accounts.Entry]] = {text: [] for text in self.numbers}
        rest = []
        for entry in account:
            # The most specific selector takes the collective, such as one that names a phase.
            names = sorted(
                (t for t, s in selectors.items() if s.matches(entry)),
                key=lambda t: -sum(map(bool, selectors[t])),
            )
            if names:
                taken[names[0]].append(entry)
            else:
                rest.append(entry)
        lines: list[tuple[str, list[accounts.Entry]]] = []
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
                line = f"{text}: {word} {_numbers(wanted)}, found {_totals(totals, wanted)}{note}"
                lines.append((line, taken[text]))
        if rest:
            lines.append(("not expected:", rest))
        return lines


def _numbers(wanted: Mapping[str, int]) -> str:
    units = {"count": "{}", "bytes": "{} B", "wire_bytes": "{} B on the wire", "sites": "{} sites"}
    return ", ".join(units[name].format(value) for name, value in wanted.items())


def _totals(totals: accounts.Totals, wanted: Mapping[str, int]) -> str:
    names = dict.fromkeys(["count", "bytes", *wanted])
    bound = "at most " if totals.at_most else ""  # only one branch of a conditional runs
    return bound + _numbers({name: getattr(totals, name) for name in names})


@checked
def exactly(numbers: Mapping[str, Any]) -> Expected:
    """Expect exactly these collectives.

    Args:
      numbers: from ``"all-reduce(data)"`` (axes in any order; ``"backward all-reduce(data)"`` for
        one phase, ``"... at model.py:12"`` for one source line) to a count, or to some of
        ``{"count": 32, "bytes": 512, "wire_bytes": 768, "sites": 1}``, of one execution on one
        device. Each branch of a conditional counts as if it ran.

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
    expected: dict[str, dict[str, int]] = {}
    for key, value in given.items():
        accounts.Selector.read(key)
        wanted = dict(value) if isinstance(value, Mapping) else {"count": value}
        if (
            not wanted
            or not set(wanted) <= set(_NUMBERS)
            or not all(map(_is_count, wanted.values()))
        ):
            raise ShardrulesError(
                f"{value!r} for {key!r} is not an expectation; give a count, or "
                "{'count': 1, 'bytes': 512}, of count, bytes, wire_bytes and sites",
                key=key,
                value=value,
            )
        expected[key] = {name: int(n) for name, n in wanted.items()}
    return expected


def _is_count(number: Any) -> bool:
    integral = isinstance(number, numbers.Integral) and not isinstance(number, bool)
    return integral and number >= 0


def platform_name(name: Any) -> str:
    """Return our name of a platform from any of JAX's names."""
    if str(name).lower() not in _NAMES:
        raise ShardrulesError(
            f"platform={name!r} is none of {', '.join(PLATFORMS)}"
            + accounts.near(str(name).lower(), PLATFORMS),
            platform=name,
        )
    return _NAMES[str(name).lower()]


def for_platforms(expect: Any) -> dict[str, Any]:
    """Return each platform's expectations; empty if they are not given by platform."""
    if not isinstance(expect, Mapping) or not any(str(k).lower() in _NAMES for k in expect):
        return {}
    by_platform = {platform_name(name): expected for name, expected in expect.items()}
    if len(by_platform) < len(expect):
        raise ShardrulesError(f"expectations for {', '.join(expect)}: two are for one platform")
    return by_platform


def pick(expect: Any, platform: str | None) -> Expected:
    """Return the expectations for one platform (None: unknown)."""
    if platform is not None:
        platform = platform_name(platform)
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
