"""Define the exceptions of shardrules, each also a subclass of a builtin exception.

Every message says what failed, with which values, which rule was broken and what to type next. The
values are also attributes, so that callers don't have to parse the text.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Sequence

from shardrules import fitting


def few(names: Sequence[str], limit: int) -> str:
    """Write the first names and the number of the others."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def first_line(error: BaseException) -> str:
    name, said = type(error).__name__, str(error).strip()
    return f"{name}: {said}".splitlines()[0] if said else f"{name} without a message"


class ShardrulesError(Exception):
    """Base of everything that shardrules raises on purpose.

    Args:
      message: the whole text.
      **data: the values in the text; each becomes an attribute.
    """

    def __init__(self, message: str, **data: typing.Any):
        super().__init__(message)
        self.message = message
        for key, value in data.items():
            setattr(self, key, value)

    if typing.TYPE_CHECKING:  # the attributes from ``data``

        def __getattr__(self, name: str) -> typing.Any: ...

    def __str__(self) -> str:
        return self.message


class _Report(ShardrulesError):
    """An error whose message is a report; if COLUMNS is set, its lines are at most that long."""

    def __str__(self) -> str:
        if not os.environ.get("COLUMNS"):  # logs keep whole lines
            return self.message
        # Python writes this before the message.
        name = f"{type(self).__module__}.{type(self).__qualname__}: "
        pytest_indent = 8 if "PYTEST_CURRENT_TEST" in os.environ else 0
        fitted = fitting.fitted(name + self.message, fitting.width() - pytest_indent)
        return fitted.removeprefix(name) if fitted.startswith(name) else self.message


class ArgumentError(ShardrulesError, TypeError):
    """An argument of a type that a public function does not accept."""


class RegistrationError(ShardrulesError, ValueError):
    """A declaration that can't be recorded: a duplicate, a bad name, not a rule."""


class RuleError(ShardrulesError, ValueError):
    """A rule whose answer can't be used: wrong count, unknown axis, contradicted annotation."""


class AnnotationWarning(ShardrulesError, UserWarning):
    """An annotation of an output that varies over fewer axes than the kernel's jaxpr shows."""


class WholeCotangentWarning(ShardrulesError, UserWarning):
    """A bwd that may not be linear in a cotangent that arrives summed over the devices."""


class RuleCheckError(_Report, AssertionError):
    """An op that does not do what its rule declares."""


class UnknownKernelError(ShardrulesError, LookupError):
    """An opaque call inside shard_map that has neither a rule nor a proof."""


class AxisError(ShardrulesError, ValueError):
    """A mesh axis that is not in scope, or over which a value can't be cast."""


class RulesDifferError(_Report, AssertionError):
    """Processes of one job that hold different rules, and so would trace different programs."""


class MissingProcessError(ShardrulesError, TimeoutError):
    """A process of a job that did not answer in time."""


class CotangentError(ShardrulesError, ValueError):
    """A cotangent of a bwd or a transpose that can't safely be cast to its primal's type.

    An error about a bwd has a ``problem``. ``undecided``: the cotangent is a share or the sum.
    ``mixed``: it is a share plus a sum. ``unmoved`` or ``averaged``: each device would get the
    whole. ``summed``: it is summed a second time. ``of_others``: it is a sum that holds other
    values' cotangents. ``lost``: JAX drops axes from its type.
    """


class RefError(ShardrulesError, ValueError):
    """A ref that is typed equal on devices that write different values to it."""


class UnsupportedJaxError(ShardrulesError, RuntimeError):
    """A JAX whose internals differ from the internals that the hooks are written for."""


class UntestedJaxWarning(ShardrulesError, UserWarning):
    """A JAX newer than all tested versions, on which the hooks' self-test passed."""


class NotInstalledError(ShardrulesError, RuntimeError):
    """A program that needs the hooks was traced without ``shardrules.install()``."""


class AotError(ShardrulesError, RuntimeError):
    """A missing compiler for an absent accelerator, or a topology that the compiler rejects."""


class ProfileError(ShardrulesError, ValueError):
    """A profile that can't be read, or lacks data that its verdicts need."""


class HloError(ShardrulesError, ValueError):
    """Readable HLO that does not fit the request (such as a mesh of another size)."""


class HloSyntaxError(HloError):
    """Text that is not HLO, with the position where reading stopped.

    Args:
      message: what was expected at that position.
      line: 1-based line number.
      column: 1-based column number.
      text_line: that line of the text.
    """

    _CLIP = 120  # the most characters shown of the line, around the caret

    def __init__(self, message: str, *, line: int, column: int, text_line: str):
        text_line = text_line.rstrip("\r\n")
        start = max(0, min(column - 1 - self._CLIP // 2, len(text_line) - self._CLIP))
        shown = text_line[start : start + self._CLIP]
        caret = column - 1 - start
        prefix = "..." if start else ""
        text = (
            f"{message}\n  line {line}, column {column}:\n"
            f"    {prefix}{shown}\n    {' ' * (len(prefix) + caret)}^"
        )
        super().__init__(text, reason=message, line=line, column=column, text_line=text_line)


class BudgetError(ShardrulesError, ValueError):
    """A budget file that can't be read."""


class CollectiveAssertionError(_Report, AssertionError):
    """A compiled program whose collectives are not the expected ones."""


class ReplicationAssertionError(_Report, AssertionError):
    """Arrays that differ or aren't proven equal, although their shardings say replicated."""


class CostAssertionError(_Report, AssertionError):
    """A compiled program with a silent cost: lost donation, a transfer, or many small launches."""


class SteadyStateError(CostAssertionError):
    """A loop on the host that compiles, talks to the host, keeps donated memory, or grows.

    ``problem`` is ``compiled``, ``read``, ``host values``, ``transfer``, ``kept``, ``growth``.
    """


__all__ = [name for name in dir() if name.endswith(("Error", "Warning"))]
