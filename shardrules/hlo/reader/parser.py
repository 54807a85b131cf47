"""Reads HLO text into a ``Module``.

A line that looks like what XLA prints is read by one regular expression; whatever it doesn't fit
(nested tuples, attributes over several lines, what people write) is read by ``forms``, token by
token. Nothing is skipped in silence: what neither of them reads is an ``HloSyntaxError`` with its
place.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import re

from shardrules.arguments import checked
from shardrules.errors import ArgumentError, HloSyntaxError
from shardrules.hlo.reader import attributes, ordering, shapes, tolerant_parser
from shardrules.hlo.reader import module as hm
from shardrules.hlo.reader.attributes import skip, spaced

_SHAPE = (
    r"\w+\[[^\]\n{}()]*\](?:\{[^{}\n]*\})?"
    r"|\([^()\n]*(?:\([^()\n]*\)[^()\n]*)*\)"
)
# The rest of a line that holds one whole instruction: quotes that close on it, and no space but
# after a comma and in metadata, windows and shardings; any other may stand before an instruction.
_INNER = "(?:op_|source_|stack_|deduplicated_|scheduling_|profile_|size|stride|pad|[lr]hs_)[a-z_]*="
_REST = (
    r'(?:, [^ \t-\r"/]*+(?:(?:"[^"\\\n]*+(?:"|\\.[^"\\\n]*+(?:\\.[^"\\\n]*+)*+")'
    r"|(?<=,) | (?=" + _INNER + r"|last_tile|\{'))[^ \t-\r\"/]*+)*+"
    r"(?<![,={(\[]))?+\n"
)
# The computation that most calls name in an attribute that XLA prints first.
_CALLEE = r"(?:, (?:kind=\w+, |dimensions=\{[\d,]*\}, )?(?:calls|to_apply)=%([\w.\-]+)(?=[,\n]))?"
# How a line begins that doesn't go on with the instruction before it.
_FRESH = r"(?=  %|  ROOT %|\}\n|[ \t]+(?:ROOT )?[\w.\-]+ = )"
_LINE = re.compile(
    r"[ \t]*+(ROOT )?%?([\w.\-]++) = ((?>"
    + _SHAPE
    + r")) ([a-z][\w\-]*+)\(([^()\n]*+)\)"
    + _CALLEE
    + _REST
    + _FRESH
)
_CUT = ": is the text cut?"
_PRINTED_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \([^={}\"\n]*\) -> [^={}\"\n]*\{\n")
_HEADER = spaced(r"(ENTRY(?=[\s/]) )?%?([\w.\-]+) (?=[({])")
_TABLE = re.compile(r"([A-Z]\w*)[ \t]*\n((?:[ \t]*\d+[ \t][^\n]*\n)+)")
_MODULE = spaced(r"HloModule(?=[\s/]) (\"[^\"\n]*\"|[^\s,/]+)")
_ALONE = re.compile(r"(?:ROOT\s+)?(?:%?[\w.\-]+\s*=\s*)?(?:\(|b\(|\w+\[|[a-z][\w\-]*\()")
_PRINTED_KEY = re.compile(r", ?([\w\-]+)=")

# Opcodes whose attributes name computations. Others can't call any.
_CALLERS = frozenset(
    "fusion fusion-start call call-start while conditional async-start async-update async-done "
    "custom-call map reduce reduce-window scatter select-and-scatter sort all-reduce "
    "all-reduce-start reduce-scatter reduce-scatter-start scan custom-call-start topk "
    "composite".split()
)
# Those that call one, in an attribute that XLA prints first.
_FAST_CALLERS = frozenset("fusion call map reduce".split())


class _Parser(tolerant_parser.Forms):
    def __init__(self, text: str):
        super().__init__(text)
        self.shapes: dict[str, hm.Shape] = {}
        self.names: dict[str, str] = {}

    def shape(self, text: str, offset: int) -> hm.Shape:
        """Read a shape once per distinct text."""
        known = self.shapes.get(text)
        if known is None:
            known, end = shapes.read(self.text, offset)
            if end != offset + len(text):
                raise self.error(end, "expected an opcode after the shape")
            self.shapes[text] = known
        return known

    def computation(self, name: str, is_entry: bool, position: int) -> int:
        """Read instructions from behind the opening brace to behind the closing one."""
        text = self.text
        match = _LINE.match
        intern = self.names.setdefault
        known = self.shapes
        scope = tolerant_parser.Scope(name)
        index = scope.index
        place_of = index.__getitem__
        numbers = scope.numbers
        instructions = scope.instructions
        make = tuple.__new__
        Instruction = hm.Instruction
        opening = position - 1
        if text.startswith("\n", position):
            position += 1
        while True:
            line = match(text, position)
            if not line:
                position = skip(text, position)
                if text.startswith("}", position):
                    position += 1
                    break
                if position >= len(text):
                    raise self.error(
                        position, f"the text ends inside computation {name!r}: '}}' is missing"
                    )
                position = self.instruction(scope, position)
                if text.startswith("\n", position):
                    position += 1
                continue
            is_root, label, shape_text, opcode, inside, callee = line.groups()
            shape = known.get(shape_text)
            if shape is None:
                shape = self.shape(shape_text, line.start(3))
            inner = line.span(5)
            start = position
            position = line.end()
            end = position - 1
            opcode = intern(opcode, opcode)
            operands: tuple[int, ...] = ()
            if opcode == "parameter":
                if (
                    len(inside) < 9
                    and inside.isdecimal()
                    and (number := int(inside)) not in numbers
                ):
                    numbers[number] = start
                else:
                    self.parameter(scope, start, inner)
            elif inside and opcode != "constant":
                try:  # what XLA prints now: %a, %b
                    operands = tuple(map(place_of, inside[1:].split(", %")))
                except KeyError:
                    operands = self.resolve(scope, self.operands(scope, inner[0])[0], start)
                else:
                    if inside[0] != "%":  # "xa" without '%' would have named %a
                        operands = self.resolve(scope, self.operands(scope, inner[0])[0], start)
            calls: tuple[str, ...] = ()
            if callee and opcode in _FAST_CALLERS:
                calls = (callee,)
            elif opcode in _CALLERS:
                found = attributes.iter_attributes(text, inner[1] + 1, end)
                calls = self.calls({k: (a, b) for k, a, b in found}, label)
            if is_root or label in index:
                self.place(scope, label, start, bool(is_root))
            index[label] = len(instructions)
            instructions.append(
                make(
                    Instruction,
                    (label, opcode, shape, operands, calls, text, start, inner, inner[1] + 1, end),
                )
            )
        self.finish(scope, is_entry, opening)
        return position

    def finish(self, scope: tolerant_parser.Scope, is_entry: bool, opening: int) -> hm.Computation:
        """Keep a computation that was read whole."""
        name, instructions, root = scope.name, scope.instructions, scope.root
        if not instructions:
            raise self.error(opening, f"computation {name!r} holds no instruction")
        if scope.late:
            instructions, root = ordering.operands_first(
                self.error, name, instructions, scope.late, scope.index, root
            )
        # XLA takes the last instruction where none is marked.
        root = len(instructions) - 1 if root < 0 else root
        if scope.numbers and max(scope.numbers) >= len(scope.numbers):
            raise self.error(
                scope.numbers[max(scope.numbers)],
                f"parameter {max(scope.numbers)} of computation {name!r}: it has "
                f"only {len(scope.numbers)} parameters",
            )
        calling = tuple([place for place, one in enumerate(instructions) if one.calls])
        computation = hm.Computation(name, tuple(instructions), root, is_entry, calling)
        self.computations[name] = computation
        return computation

    # -- the module ---------------------------------------------------------------------------

    def module(self, source: str) -> hm.Module:
        """Read the whole text."""
        text = self.text
        position = skip(text, 0)
        if position >= len(text):
            raise self.error(
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
            return self.alone(source, position)
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
                raise self.error(position, "a second module begins here; pass one module at a time")
            is_entry, last, body = self.header(position)
            if last in self.computations:
                raise self.error(position, f"computation {last!r} is defined twice")
            if is_entry and entry is not None:
                raise self.error(position, "a second ENTRY computation")
            position = skip(text, self.computation(last, is_entry, body))
            if text.startswith(",", position):
                position = self.attributes_end(position)  # its execution thread
            if is_entry:
                entry = self.computations[last]
        if entry is None:
            entry = self.entry_of(source, self.computations.get(last or ""), header)
        name = head[1].strip('"') if head else f"module_{entry.name}"
        return self.made(source, name, entry, header, tables)

    def made(self, source, name, entry, header, tables) -> hm.Module:
        """Put a module together."""
        self._find_strange()
        return hm.Module(
            name,
            self.text,
            source,
            self.computations,
            entry,
            self._count(header, "num_partitions"),
            self._count(header, "replica_count"),
            header,
            hm.FrameTable(tables),
            ordering.callees_first(self.error, self.computations),
            self.strange,
        )

    def alone(self, source: str, position: int) -> hm.Module:
        """Read the text of one instruction, of which the operands' shapes make parameters."""
        text = self.text
        if not _ALONE.match(text, position):
            hint = ""
            if re.compile(r"#|module\b|func\.").match(text, position):
                hint = " (this looks like StableHLO: compile it first)"
            elif re.compile(r"\S+\.(hlo|txt|gz)\s*").fullmatch(text, position):
                hint = " (this looks like a file's name: pass the text that the file holds)"
            raise self.error(
                position,
                f"{source} is not HLO text: expected 'HloModule NAME', as "
                f"compiled.as_text() prints it{hint}",
            )
        scope = tolerant_parser.Scope("main", alone=True)
        end = skip(text, self.instruction(scope, position))
        if end < len(text):
            raise self.error(
                end,
                "expected the end after one instruction, or 'HloModule NAME' "
                "before several computations",
            )
        return self.made(source, "main", self.finish(scope, True, position), {}, {})

    def entry_of(
        self, source: str, last: hm.Computation | None, header: dict[str, str]
    ) -> hm.Computation:
        """Give the entry of a text that marks none: the last computation, as XLA takes it.

        What XLA prints marks it; the layout in its header tells such a text, cut, from a whole one.
        """
        layout = header.get("entry_computation_layout")
        if last is not None and layout is not None:
            arguments, at = shapes.read(layout, 1)
            arrow = skip(layout, at)
            result = (
                shapes.read(layout, arrow + 2)[0] if layout[arrow : arrow + 2] == "->" else None
            )
            found = [str(p.shape) for p in last.parameters]
            if found != [str(e) for e in arguments.elements or ()] or str(
                last.instructions[last.root].shape
            ) != str(result):
                last = None
        if last is None:
            raise self.error(len(self.text), f"{source} has no ENTRY computation{_CUT}")
        return last._replace(is_entry=True)

    def header(self, position: int) -> tuple[bool, str, int]:
        """Read a computation's header: is it ENTRY, its name, where its body begins."""
        text = self.text
        printed = _PRINTED_HEADER.match(text, position)
        if printed:
            return bool(printed[1]), printed[2], printed.end()
        name = _HEADER.match(text, position)
        if not name:
            raise self.error(
                position,
                "expected a computation, '%name (parameters) -> shape {', a table or the end",
            )
        at = name.end()
        if text.startswith("(", at):
            at = skip(text, attributes.match_bracket(text, at, len(text)))
            if not text.startswith("->", at):
                raise self.error(at, "expected '->' after the computation's parameters")
            _, at = shapes.read(text, at + 2)
            at = skip(text, at)
        if not text.startswith("{", at):
            raise self.error(at, "expected '{' before the computation's instructions")
        return bool(name[1]), name[2], at + 1

    def _find_strange(self) -> None:
        """Find the attributes on the lines of the fast path that are not known."""
        first = min(c.instructions[0].start for c in self.computations.values())
        if not set(_PRINTED_KEY.findall(self.text, first)) - attributes.KNOWN:
            return
        found = sorted(
            (i for c in self.computations.values() for i in c.instructions if i.text is self.text),
            key=lambda i: i.start,
        )
        starts = [i.start for i in found]
        read, names = -1, {}
        for key in _PRINTED_KEY.finditer(self.text, first):
            place = bisect.bisect_right(starts, key.start()) - 1
            if key[1] not in attributes.KNOWN and place >= 0:
                if place != read:  # once, however much in its strings looks like a key
                    read = place
                    names = {value: name for name, value, _ in found[place].attributes()}
                if key.end() in names:
                    self.strange[starts[place]] = names[key.end()]

    def _count(self, header: dict[str, str], key: str) -> int | None:
        value = header.get(key)
        if value is None:
            return None
        if not re.fullmatch(r"\d{1,9}", value) or not int(value):
            raise self.error(self.text.find(value), f"{key} is {value!r}, not a positive count")
        return int(value)


@contextlib.contextmanager
def uncollected():
    """Keep the cycle collector from walking a module's tuples again and again.

    There are a hundred thousand of them that all live on, and it would find nothing: a third of
    the time for 4 MB. They are old when they are made: a full collection walks them, no other.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting and not gc.get_freeze_count():  # what someone froze stays so
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
    parser = _Parser(attributes.blanked(text))
    with uncollected():
        try:
            return parser.module(name)
        except HloSyntaxError as error:
            raise _placed(error, parser, name) from None


def _placed(error: HloSyntaxError, parser: _Parser, name: str) -> HloSyntaxError:
    """Say which text it was, and that it is cut off where it ends before its ENTRY does."""
    last = parser.text.rstrip().count("\n") + 1
    whole = any(computation.is_entry for computation in parser.computations.values())
    message = str(error.reason)
    if not whole and error.line >= last > 1:
        message = f"{name} is cut off: {message.removeprefix(name).removesuffix(_CUT).strip()}"
    elif name not in message and not name.startswith("<"):
        message = f"{name}: {message}"
    return HloSyntaxError(message, line=error.line, column=error.column, text_line=error.text_line)
