"""Reads HLO text into a ``Module``.

This module reads the header, the tables and the frames of computations; ``instructions`` reads the
instructions. Nothing is skipped silently: unreadable text is an ``HloSyntaxError`` with its place.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import re

from shardrules.arguments import checked
from shardrules.errors import ArgumentError, HloSyntaxError
from shardrules.hlo.reader import attributes, shapes
from shardrules.hlo.reader import module as hm
from shardrules.hlo.reader.attributes import skip, spaced
from shardrules.hlo.reader.instructions import Reader, Scope

_CUT = ": is the text cut?"
_PRINTED_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \([^={}\"\n]*\) -> [^={}\"\n]*\{\n")
_HEADER = spaced(r"(ENTRY(?=[\s/]) )?%?([\w.\-]+) (?=[({])")
_TABLE = re.compile(r"([A-Z]\w*)[ \t]*\n((?:[ \t]*\d+[ \t][^\n]*\n)+)")
_MODULE = spaced(r"HloModule(?=[\s/]) (\"[^\"\n]*\"|[^\s,/]+)")
_ALONE = re.compile(r"(?:ROOT\s+)?(?:%?[\w.\-]+\s*=\s*)?(?:\(|b\(|\w+\[|[a-z][\w\-]*\()")
_PRINTED_KEY = re.compile(r", ?([\w\-]++)=")


def _module(reader: Reader, source: str) -> hm.Module:
    text = reader.text
    position = skip(text, 0)
    if position >= len(text):
        raise reader.error(
            0,
            f"{source} is empty: expected HLO text, which begins with "
            "'HloModule NAME'; pass what compiled.as_text() returns",
        )
    head = _MODULE.match(text, position)
    header: dict[str, str] = {}
    tables: dict[str, str] = {}
    if head:
        position = head.end()
        for key, value, position in attributes.iter_attributes(text, position, len(text)):
            header[key] = text[value:position]
    elif not _HEADER.match(text, position):
        return _alone(reader, source, position)
    entry: hm.Computation | None = None
    last: str | None = None
    while True:
        position = skip(text, position)
        if position >= len(text):
            break
        table = _TABLE.match(text, position)
        if table:
            position = table.end()
            tables[table[1]] = tables.get(table[1], "") + table[2]
            continue
        if text.startswith("HloModule", position):
            raise reader.error(position, "a second module begins here; pass one module at a time")
        is_entry, last, body = _header(reader, position)
        if last in reader.computations:
            raise reader.error(position, f"computation {last!r} is defined twice")
        if is_entry and entry is not None:
            raise reader.error(position, "a second ENTRY computation")
        position = skip(text, reader.computation(last, is_entry, body))
        if text.startswith(",", position):
            for _, _, position in attributes.iter_attributes(text, position, len(text)):
                pass  # its execution thread
        if is_entry:
            entry = reader.computations[last]
    if entry is None:
        entry = _entry_of(reader, source, reader.computations.get(last or ""), header)
    name = head[1].strip('"') if head else f"module_{entry.name}"
    return _made(reader, source, name, entry, header, tables)


def _made(reader: Reader, source, name, entry, header, tables) -> hm.Module:
    _find_strange(reader)
    return hm.Module(
        name,
        reader.text,
        source,
        reader.computations,
        entry,
        _count(reader, header, "num_partitions"),
        _count(reader, header, "replica_count"),
        header,
        hm.FrameTable(tables),
        hm.callees_first(reader.error, reader.computations),
        reader.strange,
    )


def _alone(reader: Reader, source: str, position: int) -> hm.Module:
    text = reader.text
    if not _ALONE.match(text, position):
        hint = ""
        if re.compile(r"#|module\b|func\.").match(text, position):
            hint = " (this looks like StableHLO: compile it first)"
        elif re.compile(r"\S+\.(hlo|txt|gz)\s*").fullmatch(text, position):
            hint = " (this looks like a file's name: pass the text that the file holds)"
        raise reader.error(
            position,
            f"{source} is not HLO text: expected 'HloModule NAME', as "
            f"compiled.as_text() prints it{hint}",
        )
    scope = Scope("main", alone=True)
    end = skip(text, reader.instruction(scope, position))
    if end < len(text):
        raise reader.error(
            end,
            "expected the end after one instruction, or 'HloModule NAME' "
            "before several computations",
        )
    return _made(reader, source, "main", reader.finish(scope, True, position), {}, {})


def _entry_of(
    reader: Reader, source: str, last: hm.Computation | None, header: dict[str, str]
) -> hm.Computation:
    """Give the entry of a text without ENTRY: the last computation, as in XLA."""
    # XLA always prints ENTRY. The layout in the header shows whether the text was cut.
    layout = header.get("entry_computation_layout")
    if last is not None and layout is not None:
        arguments, at = shapes.read(layout, 1)
        arrow = skip(layout, at)
        result = shapes.read(layout, arrow + 2)[0] if layout[arrow : arrow + 2] == "->" else None
        printed = [str(p.shape) for p in last.parameters]
        if printed != [str(e) for e in arguments.elements or ()] or str(
            last.instructions[last.root].shape
        ) != str(result):
            last = None
    if last is None:
        raise reader.error(len(reader.text), f"{source} has no ENTRY computation{_CUT}")
    return last._replace(is_entry=True)


def _header(reader: Reader, position: int) -> tuple[bool, str, int]:
    text = reader.text
    printed = _PRINTED_HEADER.match(text, position)
    if printed:
        return bool(printed[1]), printed[2], printed.end()
    name = _HEADER.match(text, position)
    if not name:
        raise reader.error(
            position, "expected a computation, '%name (parameters) -> shape {', a table or the end"
        )
    at = name.end()
    if text.startswith("(", at):
        at = skip(text, attributes.match_bracket(text, at, len(text)))
        if not text.startswith("->", at):
            raise reader.error(at, "expected '->' after the computation's parameters")
        _, at = shapes.read(text, at + 2)
        at = skip(text, at)
    if not text.startswith("{", at):
        raise reader.error(at, "expected '{' before the computation's instructions")
    return bool(name[1]), name[2], at + 1


def _find_strange(reader: Reader) -> None:
    """Find unknown attributes in instructions that the fast path read."""
    first = min(c.instructions[0].start for c in reader.computations.values())
    if not set(_PRINTED_KEY.findall(reader.text, first)) - attributes.KNOWN:
        return
    instructions = sorted(
        (i for c in reader.computations.values() for i in c.instructions if i.text is reader.text),
        key=lambda i: i.start,
    )
    starts = [i.start for i in instructions]
    read, names = -1, {}
    for key in _PRINTED_KEY.finditer(reader.text, first):
        place = bisect.bisect_right(starts, key.start()) - 1
        if key[1] not in attributes.KNOWN and place >= 0:
            if place != read:  # read its attributes once: strings may hold what looks like a key
                read = place
                names = {value: name for name, value, _ in instructions[place].attributes()}
            if key.end() in names:
                reader.strange[starts[place]] = names[key.end()]


def _count(reader: Reader, header: dict[str, str], key: str) -> int | None:
    value = header.get(key)
    if value is None:
        return None
    if not re.fullmatch(r"\d{1,9}", value) or not int(value):
        raise reader.error(reader.text.find(value), f"{key} is {value!r}, not a positive count")
    return int(value)


@contextlib.contextmanager
def uncollected():
    """Keep the cycle collector from scanning a module's tuples again and again."""
    # About 100,000 tuples stay alive and the collector would free nothing, yet take a third of the
    # time for 4 MB of text. Freezing moves the tuples into the oldest generation.
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting and not gc.get_freeze_count():  # keep what others froze
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        if collecting:
            gc.enable()


@checked(own=("text",))
def parse(text: str, *, name: str = "<text>") -> hm.Module:
    """Read HLO text.

    Args:
      text: one module, as ``compiled.as_text()`` or ``--xla_dump_to`` gives it.
      name: where the text comes from, for messages.

    Raises:
      HloSyntaxError: the text is not HLO, is empty or is cut; it shows line and column.
      TypeError: text is not a str.
    """
    if not isinstance(text, str):
        raise ArgumentError(
            f"parse takes HLO text as a str, not {type(text).__name__}; read a file "
            "first, or pass compiled.as_text().",
            argument="text",
            value=text,
        )
    text = text.removeprefix("\ufeff")  # a byte-order mark, which editors put before UTF-8
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    reader = Reader(attributes.blanked(text))
    with uncollected():
        try:
            return _module(reader, name)
        except HloSyntaxError as error:
            raise _placed(error, reader, name) from None


def _placed(error: HloSyntaxError, reader: Reader, name: str) -> HloSyntaxError:
    """Name the text in an error, and say that it is cut off if it ends before ENTRY does."""
    last = reader.text.rstrip().count("\n") + 1
    whole = any(computation.is_entry for computation in reader.computations.values())
    message = str(error.reason)
    if not whole and error.line >= last > 1:
        message = f"{name} is cut off: {message.removeprefix(name).removesuffix(_CUT).strip()}"
    elif name not in message and not name.startswith("<"):
        message = f"{name}: {message}"
    return HloSyntaxError(message, line=error.line, column=error.column, text_line=error.text_line)
