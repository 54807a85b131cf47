"""What every report is made of: tables and lists of items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from shardrules.costs import accounts


class Item(NamedTuple):
    """One thing that a report says: a finding, a hint, an output.

    Attributes:
      kind: ``redundant`` and so on; empty where ``what`` is all there is.
      what: what it is about.
      source: ``file:line (function)``, empty where the text has none.
      lines: more to say, each with its label: ``("because", ...)``, ``("to do:", ...)``.
      entry: the collective's line in the account, None where it is about something else.
    """

    kind: str
    what: str
    source: str = ""
    lines: tuple[tuple[str, str], ...] = ()
    entry: accounts.Entry | None = None


class Block(NamedTuple):
    """A part of a report under its own title: a table, or a list.

    Attributes:
      title: what it is about.
      note: how to read it, a sentence a line, each without a full stop.
      columns: the names of a table's cells.
      rows: the cells; None is not known.
      numbers: how many columns before the last one hold numbers.
      items: of a list.
      rest: one sentence on the items that are left out.
    """

    title: str
    note: str = ""
    columns: tuple[str, ...] = ()
    rows: Sequence[Sequence[Any]] = ()
    numbers: int = 0
    items: tuple[Item, ...] = ()
    rest: str = ""

    @property
    def notes(self) -> list[str]:
        """Write the note as sentences."""
        return [f"{note[0].upper()}{note[1:]}." for note in self.note.splitlines()]
