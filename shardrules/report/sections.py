"""Define the parts of a report (tables and lists), and fill the tables of other silent costs."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from shardrules import hlo
from shardrules.costs import accounts, donation, launches, offloading, placement, transfers, walk
from shardrules.hlo.proof.customcalls import frontend_attributes

LOOPS = "Loops"
_LARGE_BYTES = 1 << 20  # smaller constants are not shown
_Rows = Iterable[tuple[Any, ...]]


class Item(NamedTuple):
    """One entry of a report's list: a finding, a hint, an output.

    Attributes:
      kind: ``redundant`` and so on; empty if there is only ``what``.
      what: its subject.
      source: ``file:line (function)``; empty if the text has none.
      lines: more lines, each with its label: ``("because", ...)``, ``("to do:", ...)``.
      entry: the collective's line in the account; None if the subject isn't a collective.
    """

    kind: str
    what: str
    source: str = ""
    lines: tuple[tuple[str, str], ...] = ()
    entry: accounts.Entry | None = None


class Block(NamedTuple):
    """A part of a report under its own title: a table, or a list.

    Attributes:
      title: its subject.
      note: how to read it, one sentence on each line, without a full stop. What is said of one
        column stands between semicolons and begins with its name and a colon.
      columns: the names of a table's columns.
      rows: the cells; None is not known.
      numbers: how many columns before the last one have numbers.
      items: the items of a list.
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
        """Return the note as sentences."""
        notes = self.note.splitlines()
        # Capitalize each sentence, except for one that begins with a program's name.
        begins = [n if "_" in n.split()[0] else f"{n[0].upper()}{n[1:]}" for n in notes]
        return [f"{note}." for note in begins]

    @property
    def told(self) -> Block:
        """Return a titled table without the columns in which no row has a known cell."""
        if not self.title:
            return self
        known = [not {*column} <= {None, ""} for column in zip(*self.rows)]
        rows = [[*itertools.compress(row, known)] for row in self.rows]
        columns = tuple(itertools.compress(self.columns, known))
        gone = {*self.columns} - {*columns} if self.rows else set[str]()
        parts = [p for p in self.note.split("; ") if p.partition(":")[0] not in gone]
        if not any(None in row for row in rows):
            parts = [part for part in parts if not part.startswith("? ")]
        return self._replace(columns=columns, rows=rows, note="; ".join(parts))


def listed(title: str, lines: Iterable[str]) -> Block:
    return Block(title, items=tuple(Item("", line) for line in lines))


def filled(*blocks: Block) -> tuple[Block, ...]:
    """Return the blocks that have rows or items."""
    return tuple(block for block in blocks if block.rows or block.items)


def sections(module: hlo.Module, interpreted: Collection[str] = ()) -> tuple[Block, ...]:
    """Return the tables of a module's silent costs, without empty ones.

    ``interpreted``: ``file:line`` of each call of an interpreted kernel.
    """
    return filled(
        _donated(module),
        Block(
            "Transfers between host and device",
            "bytes are of one run on one device",
            ("transfer", "bytes", "runs", "in loops", "source"),
            [(t.what, t.bytes, t.runs, t.loop_depth, t.source) for t in transfers.read(module)],
        ),
        Block(
            "Host memory",
            "buffers of one device in its host's memory, with the bytes that one execution moves",
            ("buffer", "shape", "bytes", "stored bytes", "loaded bytes", "source"),
            [*_offloaded(module)],
        ),
        Block(
            LOOPS,
            "launches: of one trip, counted for GPUs; copied bytes: data that XLA copies in one "
            "trip, as it can't update the loop's carry in place; ? is not known",
            ("loop", "trips", "launches", "copied bytes", "decides", "trips unknown because"),
            [*_loops(module, interpreted)],
        ),
        Block(
            "Large constants",
            "arrays that the program closes over; each device holds them, pass them as arguments",
            ("shape", "bytes", "devices", "bytes in all", "used at"),
            [
                (c.shape, c.bytes, c.device_count, c.bytes * c.device_count, c.source)
                for c in placement.constants(module, _LARGE_BYTES)
            ],
        ),
        Block(
            "Gathered outputs",
            "outputs that were sharded until they were returned; bytes are of one device",
            ("output", "shape", "bytes before", "bytes after", "source"),
            [
                (g.output, g.shape, g.bytes_before, g.bytes_after, g.source)
                for g in placement.gathered(module)
            ],
        ),
        Block(
            "Annotations less varying than the kernel",
            "the kernel's own jaxpr shows that the output varies over these axes too; plain JAX "
            "believes the annotation and loses the reduction over them, shardrules puts it in",
            ("kernel", "output", "also varies over", "called at"),
            [*_widened(module)],
        ),
    )


def _donated(module: hlo.Module) -> Block:
    leaves = [leaf for leaf in donation.read(module) if leaf.donated]
    wasted = [leaf for leaf in leaves if leaf.status != "aliased"]
    note = "by the module's alias table; before JAX 0.8 it lacks donations that are not used"
    if len(leaves) > len(wasted):
        note += f"; the memory of {len(leaves) - len(wasted)} more is reused"
    columns = ("argument", "shape", "bytes", "output", "not reused because")
    rows = [(leaf.path, leaf.shape, leaf.bytes, leaf.output, leaf.reason) for leaf in wasted]
    return Block("Donated memory", note, columns, rows)


def _moved(accesses: Iterable[offloading.Access]) -> int | None:
    """Return the bytes that one execution moves; None if a loop's length isn't known."""
    moved = [None if a.runs is None else a.bytes * a.runs for a in accesses]
    return None if None in moved else sum(filter(None, moved))


def _offloaded(module: hlo.Module) -> _Rows:
    for buffer in offloading.read(module):
        first = next(iter((*buffer.stores, *buffer.loads)), None)
        stored, loaded = _moved(buffer.stores), _moved(buffer.loads)
        yield buffer.kind, buffer.shape, buffer.bytes, stored, loaded, first.source if first else ""


class _LoopRow:
    """A row of the table of loops, how many loops it stands for, and the rows of inner loops."""

    def __init__(self, row: tuple[Any, ...] = (), of_kernel: bool = False):
        self.row, self.of_kernel = row, of_kernel
        self.count = 0
        self.inside: dict[tuple[Any, ...], _LoopRow] = {}

    def rows(self) -> _Rows:
        for loop in self.inside.values():
            source, *cells = loop.row
            yield source + f" ({loop.count} times)" * (loop.count > 1), *cells
            yield from loop.rows()


def _loops(module: hlo.Module, interpreted: Collection[str]) -> _Rows:
    # A step calls a kernel many times, and each call of an interpreted kernel is a loop: equal
    # loops of kernels share a row. Each loop that the program wrote has its own row.
    outer = [_LoopRow()]  # outer[d] is the row around the next loop of depth d
    for number, loop in enumerate(launches.read(module)):
        del outer[loop.depth + 1 :]
        # A computation that is called from several places is listed at the first, whose depth may
        # be less than the greatest.
        outer += [outer[-1]] * (loop.depth + 1 - len(outer))
        of_kernel = loop.source.partition(" (")[0] in interpreted
        source, host = "  " * loop.depth + loop.source, "the host" if loop.host_decides else ""
        source += ": an interpreted kernel's" * of_kernel
        row = source, loop.trip_count, loop.launches, loop.copied_bytes, host, loop.unknown
        is_shared = of_kernel or outer[-1].of_kernel
        key = row if is_shared else (*row, number)
        one = outer[-1].inside.setdefault(key, _LoopRow(row, is_shared))
        one.count += 1
        outer.append(one)
    yield from outer[0].rows()


def _widened(module: hlo.Module) -> _Rows:
    rows: dict[tuple[str, ...], None] = {}
    for place in walk.executed(module):
        text = place.instruction.attribute("frontend_attributes")
        if text is None or "shardrules.widened" not in text:
            continue
        tag = frontend_attributes(text)
        for widened in tag.get("shardrules.widened", "").split(","):
            output, _, axes = widened.partition(":")
            kernel = tag.get("shardrules.kernel", "")
            rows[kernel, output, axes.replace("+", ", "), walk.where(module, place)] = None
    return rows
