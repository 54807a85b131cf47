"""A jaxpr that was traced under the hooks says so when it is run without them.

The hooks drop types from an interpreted kernel's loops, where JAX mixes them. Without the hooks,
JAX's error doesn't name the cause. It first reads ``input_output_aliases`` of the parameters (a
test in tests/core/test_install.py fails once it does not): that tuple raises.
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
