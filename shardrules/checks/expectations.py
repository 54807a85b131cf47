"""Define a test's expectations of a program's collectives, and compare a program with them."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import operator
from collections.abc import Mapping
from typing import Any

from shardrules.arguments import checked
from shardrules.costs import accounts
from shardrules.errors import ShardrulesError

PLATFORMS = ("cpu", "gpu", "tpu")
_NAMES = {**{p: p for p in PLATFORMS}, "cuda": "gpu", "rocm": "gpu"}  # maps JAX's names to ours
_UNITS = {"count": "{}", "bytes": "{} B", "wire_bytes": "{} B on the wire", "sites": "{} sites"}


@dataclasses.dataclass(frozen=True)
class Expected:
    """Expectations of one program: exact numbers, or upper bounds."""

    # maps a selector (``"backward all-reduce(data)"``) to some of ``count``, ``bytes``,
    # ``wire_bytes`` (over all runs of one execution, on one device) and ``sites`` (places)
    numbers: Mapping[str, Mapping[str, int]]
    # whether the numbers must match exactly; collectives that no selector matches fail in any case
    exact: bool = True

    def differences(self, account: accounts.Account) -> list[tuple[str, list[accounts.Entry]]]:
        """Return each difference, as a line and its collectives."""
        selectors = {text: accounts.Selector.read(text) for text in self.numbers}
        for text, selector in selectors.items():
            selector.check_axes(text, account.mesh)
        taken: dict[str, list[accounts.Entry]] = {text: [] for text in ["", *self.numbers]}
        for entry in account:
            # The most specific selector counts the collective: the one with the most parts.
            fitting = [text for text, selector in selectors.items() if selector.matches(entry)]
            best = max(fitting, key=lambda text: sum(map(bool, selectors[text])), default="")
            taken[best].append(entry)
        lines: list[tuple[str, list[accounts.Entry]]] = []
        is_wrong, word = (operator.ne, "") if self.exact else (operator.gt, " at most")
        for text, wanted in self.numbers.items():
            totals = functools.reduce(accounts.Totals.plus, taken[text], accounts.Totals())
            unsure = totals.unknown and set(wanted) != {"sites"}
            if unsure or any(is_wrong(getattr(totals, n), most) for n, most in wanted.items()):
                names = dict.fromkeys(["count", "bytes", *wanted])
                found = _numbers({name: getattr(totals, name) for name in names})
                bound = "at most " if totals.at_most else ""  # one branch of a conditional runs
                line = f"{text}: expected{word} {_numbers(wanted)}, found {bound}{found}"
                if unsure:
                    line += (
                        f" ({totals.unknown} in loops whose trip count isn't known: give 'sites' "
                        "for these)"
                    )
                lines.append((line, taken[text]))
        if taken[""]:
            lines.append(("not expected:", taken[""]))
        return lines


def _numbers(wanted: Mapping[str, int]) -> str:
    return ", ".join(_UNITS[name].format(value) for name, value in wanted.items())


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
        known = all(name in _UNITS and _is_count(number) for name, number in wanted.items())
        if not wanted or not known:
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
    """Map any of JAX's names of a platform to ours."""
    given = str(name).lower()
    if given not in _NAMES:
        near = accounts.near(given, PLATFORMS)
        raise ShardrulesError(
            f"platform={name!r} is not one of {', '.join(PLATFORMS)}{near}", platform=name
        )
    return _NAMES[given]


def for_platforms(expect: Any) -> dict[str, Any]:
    """Return each platform's expectations; empty if they are not given by platform."""
    if not isinstance(expect, Mapping) or not any(str(k).lower() in _NAMES for k in expect):
        return {}
    by_platform = {platform_name(name): expected for name, expected in expect.items()}
    if len(by_platform) < len(expect):
        raise ShardrulesError(f"expectations for {', '.join(expect)}: two are for one platform")
    return by_platform


def pick(expect: Any, platform: str | None) -> Expected:
    """Return the expectations for one platform; None stands for an unknown one."""
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
        why = "the text does not say which of these it is for; pass platform="
        why = f"the program is for {platform}" if platform else why
        shown = ", ".join(each)
        raise ShardrulesError(f"expectations are given for {shown}, but {why}", platform=platform)
    return pick(each[platform], platform)
