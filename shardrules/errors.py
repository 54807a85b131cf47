"""The exceptions of shardrules: one small tree, each also a builtin's subclass.

Every message says what failed, with which values, which rule was broken and what to type next;
the values are attributes too, so that a caller never has to read them out of the text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = [
    "AnnotationWarning",
    "AotError",
    "ArgumentError",
    "AxisError",
    "BudgetError",
    "CollectiveAssertionError",
    "CostAssertionError",
    "CotangentError",
    "HloError",
    "HloSyntaxError",
    "MissingProcessError",
    "NotInstalledError",
    "ProfileError",
    "RefError",
    "RegistrationError",
    "ReplicationAssertionError",
    "RuleCheckError",
    "RuleError",
    "RulesDifferError",
    "ShardrulesError",
    "SteadyStateError",
    "UnknownKernelError",
    "UnsupportedJaxError",
    "UntestedJaxWarning",
]


class ShardrulesError(Exception):
    """Base of everything that shardrules raises on purpose.

    Args:
      message: the whole text for the user.
      **data: the values behind the text; each becomes an attribute.
    """

    def __init__(self, message: str, **data: Any):
        super().__init__(message)
        self.message = message
        for key, value in data.items():
            setattr(self, key, value)

    if TYPE_CHECKING:  # the data

        def __getattr__(self, name: str) -> Any: ...

    def __str__(self) -> str:
        return self.message


class ArgumentError(ShardrulesError, TypeError):
    """An argument of another kind than a public function takes."""


class RegistrationError(ShardrulesError, ValueError):
    """A declaration that can't be recorded: a duplicate, a bad name, not a rule."""


class RuleError(ShardrulesError, ValueError):
    """A rule whose answer can't be used: wrong count, unknown axis, contradicted annotation."""


class AnnotationWarning(ShardrulesError, UserWarning):
    """A kernel's output annotated less varying than the kernel's own jaxpr shows that it is."""


class RuleCheckError(ShardrulesError, AssertionError):
    """An op that does something else than its rule says."""


class UnknownKernelError(ShardrulesError, LookupError):
    """An opaque call inside shard_map that has neither a rule nor a proof."""


class AxisError(ShardrulesError, ValueError):
    """A mesh axis that is not one here, or over which a value can't be cast."""


class RulesDifferError(ShardrulesError, AssertionError):
    """Processes of one job that hold different rules, and would trace different programs."""


class MissingProcessError(ShardrulesError, TimeoutError):
    """A process that did not come to where all of a job's processes meet."""


class CotangentError(ShardrulesError, ValueError):
    """A cotangent, of a bwd or a transpose, that can't be given its primal's type safely."""


class RefError(ShardrulesError, ValueError):
    """A ref that would be called equal on devices where what is written to it differs."""


class UnsupportedJaxError(ShardrulesError, RuntimeError):
    """A JAX whose internals are not the ones that the hooks were written for."""


class UntestedJaxWarning(ShardrulesError, UserWarning):
    """A JAX newer than all that were tested, on which the hooks' self-test passed."""


class NotInstalledError(ShardrulesError, RuntimeError):
    """A program that needs the hooks was traced without ``shardrules.install()``."""


class AotError(ShardrulesError, RuntimeError):
    """A compiler for an absent accelerator that is missing, or a topology that it doesn't know."""


class ProfileError(ShardrulesError, ValueError):
    """A profile that can't be read, or lacks what its verdicts take."""


class HloError(ShardrulesError, ValueError):
    """HLO that was read but that the request does not fit (a mesh of another size, say)."""


class HloSyntaxError(HloError):
    """Text that is not HLO, with the place where reading stopped.

    Args:
      message: what was expected there.
      line: 1-based line number.
      column: 1-based column number.
      text_line: that line of the text.
    """

    _CLIP = 120  # characters of the line that are shown around the caret

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


class CollectiveAssertionError(ShardrulesError, AssertionError):
    """A compiled program whose collectives are not the expected ones."""


class ReplicationAssertionError(ShardrulesError, AssertionError):
    """Arrays that are called replicated and differ, or are not proven not to."""


class CostAssertionError(ShardrulesError, AssertionError):
    """A compiled program with a silent cost: lost donation, a transfer, a loop of many launches."""


class SteadyStateError(CostAssertionError):
    """A loop on the host that compiles, talks to the host, keeps donated memory, or grows."""
