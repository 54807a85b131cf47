"""Whether budgets are to be rewritten in this process, and which were."""

from __future__ import annotations

__all__ = ["wanted", "written"]

wanted: bool = False
written: list[str] = []
