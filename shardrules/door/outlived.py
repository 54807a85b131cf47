"""What the hooks leave in a jaxpr that says, without them, that it needs them.

The hooks strip an interpreted kernel's loops of types, which JAX mixes there and refuses (0.6.0
to 0.12). Where the hooks are gone when the jaxpr is run, nothing of theirs is asked any more, and
JAX's refusal says nothing of the cause. What JAX reads first of a ``pallas_call``'s parameters,
whether it interprets, evaluates or differentiates, is ``input_output_aliases`` (a test in
tests/core/test_install.py fails once it isn't), so that tuple tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class TellingTuple(tuple):
    """A tuple that calls ``refuse`` before it is read."""

    refuse: Callable[[], None]  # raises where it may not be read

    @classmethod
    def of(cls, values: Iterable[Any], refuse: Callable[[], None]) -> TellingTuple:
        """Return the tuple."""
        made = cls(values)
        made.refuse = refuse
        return made

    def __iter__(self):
        self.refuse()
        return super().__iter__()

    def __bool__(self):
        self.refuse()
        return len(self) > 0
