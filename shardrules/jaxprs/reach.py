"""Tell which values of a jaxpr depend on some of its inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from shardrules.door.protocols import Eqn, Var
from shardrules.jaxprs.fold import Fold


class Reach(Fold[bool]):
    """A value is True if it may depend on an input given as True, through data or a choice."""

    bottom = False

    def literal(self, value: Any) -> bool:
        return False

    def constant(self, var: Var) -> bool:
        return False

    def join(self, values: Iterable[bool]) -> bool:
        return any(values)

    def chosen(self, by: bool, value: bool) -> bool:
        return by or value

    def other(self, eqn: Eqn, name: str, operands: list[bool]) -> Sequence[bool]:
        results, joined = self.anything(eqn, operands)
        return [joined] * len(eqn.outvars) if results is None else results
