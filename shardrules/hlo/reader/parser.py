"""Read HLO text into a ``Module``.

One regular expression reads an instruction as XLA prints it. Any other instruction (nested tuples,
attributes over several lines, text written by hand) is read piece by piece: shape, operands,
attributes. Nothing is skipped silently: unreadable text raises ``HloSyntaxError`` with its place.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable

from shardrules.arguments import checked
from shardrules.errors import ArgumentError, HloSyntaxError
from shardrules.hlo.reader import attributes, garbage, shapes, unknown_attributes, wrong
from shardrules.hlo.reader import module as hm
from shardrules.hlo.reader.attributes import skip
from shardrules.hlo.reader.repeats import Repeats

_SHAPE = (
    r"\w+\[[^\]\n{}()]*\](?:\{[^{}\n]*\})?"
    r"|\([^()\n]*(?:\([^()\n]*\)[^()\n]*)*\)"
)
# The rest of a line that contains one whole instruction: quotes close on the line, and spaces occur
# only after commas and in metadata, windows and shardings. Elsewhere a new instruction may begin.
_INNER = "(?:op_|source_|stack_|deduplicated_|scheduling_|profile_|size|stride|pad|[lr]hs_)[a-z_]*="
_REST = (
    r'(?:, [^ \t-\r"]*+(?:(?:"[^"\\\n]*+(?:"|\\.[^"\\\n]*+(?:\\.[^"\\\n]*+)*+")'
    r"|(?<=,) | (?=" + _INNER + r"|last_tile|\{'))[^ \t-\r\"]*+)*+"
    r"(?<![,={(\[]))?+\n"
)
# The computation that most calls name in their first attribute.
_CALLEE = r"(?:, (?:kind=\w+, |dimensions=\{[\d,]*\}, )?(?:calls|to_apply)=%([\w.\-]+)(?=[,\n]))?"
# The start of a line that does not continue the instruction before it.
_FRESH = r"(?=  %|  ROOT %|\}\n|[ \t]+(?:ROOT )?[\w.\-]+ = )"
_LINE = re.compile(
    r"[ \t]*+(ROOT )?%?([\w.\-]++) = ((?>"
    + _SHAPE
    + r")) ([a-z][\w\-]*+)\(([^()\n]*+)\)"
    + _CALLEE
    + _REST
    + _FRESH
)
# Opcodes whose attributes may name computations.
_CALLERS = frozenset(
    "fusion fusion-start call call-start while conditional async-start async-update async-done "
    "custom-call map reduce reduce-window scatter select-and-scatter sort all-reduce "
    "all-reduce-start reduce-scatter reduce-scatter-start scan custom-call-start topk "
    "composite".split()
)
# Opcodes that call one computation, in their first attribute.
_FAST_CALLERS = frozenset("fusion call map reduce".split())
# Attributes that name computations, in the order in which ``Instruction.calls`` lists them.
_CALL_KEYS = (
    "condition body true_computation false_computation branch_computations calls to_apply "
    "called_computations select scatter".split()
)
# A label, an opcode, a shape, operands, calls, a start, an inner span, an end.
_Fields = tuple[str, str, hm.Shape, tuple[int, ...], tuple[str, ...], int, tuple[int, int], int]
_LITERAL = ("parameter", "constant")  # no operands in their parentheses
_NUMBERS = {str(number): number for number in range(1000)}  # the numbers of most parameters
_MAX_DEPTH = 100  # nesting of operands
_LONG = 20_000  # a body with more characters hardly ever repeats another

_MODULE = re.compile(r"HloModule\s+(\"[^\"\n]*\"|[^\s,]+)")
_TABLE = re.compile(r"([A-Z]\w*)[ \t]*\n((?:[ \t]*\d+[ \t][^\n]*\n)+)")
_PRINTED_HEADER = re.compile(r"\s*+(ENTRY )?%?([\w.\-]+) \([^={}\"\n]*\) -> [^={}\"\n]*\{\n")
_NEXT = ("\n\n%", "\n\nE")  # between two computations, as XLA prints them
_HEADER = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s*(?=[({])")
_HEAD = re.compile(r"(ROOT\s+)?%?([\w.\-]+)\s*=\s*")
_OPCODE = re.compile(r"\s*([A-Za-z][\w\-]*)\s*\(")
_NAME = re.compile(r"%?([\w.\-]+(?:#\d+)*)")
_NAMES = re.compile(r"\s*%?[\w.\-]+\s*(?:,\s*%?[\w.\-]+\s*)*(?=\))")
_BETWEEN = re.compile(r", +")  # arrays in a tuple's shape
_BETWEEN_OPERANDS = re.compile(r", +%")
_CALLEES = re.compile(r"%?[\w.\-]+|\{\s*(?:%?[\w.\-]+\s*(?:,\s*%?[\w.\-]+\s*)*)?\}")
_make = tuple.__new__


class _Reader:
    """Reads one text; stores its computations, and the state of the computation in progress."""

    def __init__(self, text: str, source: str):
        self.text, self.source = text, source
        self.computations: dict[str, hm.Computation] = {}  # those read so far, by name
        self._shapes: dict[str, hm.Shape] = {}
        self._opcodes: dict[str, str] = {}
        self._spans: list[tuple[int, int]] = []  # of the computations that aren't repetitions
        self._depth = 0
        # The state of the computation that is being read.
        self._name = ""
        self._instructions: list[hm.Instruction] = []
        self._places: dict[str, int] = {}  # in ``_instructions``, by name
        self._parameters: dict[int, int] = {}  # where each parameter starts, by its number
        self._root = -1  # the place of ROOT, negative until it is read

    def error(self, offset: int, message: str) -> HloSyntaxError:
        return attributes.syntax_error(self.text, offset, message)

    # -- the module ---------------------------------------------------------------------------

    def module(self) -> hm.Module:
        text, position = self.text, skip(self.text, 0)
        head = _MODULE.match(text, position)
        header: dict[str, str] = {}
        tables: dict[str, str] = {}
        if head:
            position = head.end()
            for key, value, position in attributes.iter_attributes(text, position, len(text)):  # noqa: B020
                header[key] = text[value:position]
        elif not _HEADER.match(text, position):
            raise wrong.not_hlo(text, position, self.source)
        entry: hm.Computation | None = None
        repeats = Repeats(text, self.computations)
        # Each round reads one computation or one table. A short body that repeats an earlier one is
        # not parsed: its instructions are read on demand (``_later``).
        while True:
            printed = _PRINTED_HEADER.match(text, position)
            if printed:
                is_entry, name, body = printed[1] is not None, printed[2], printed.end()
            elif (position := skip(text, position)) >= len(text):
                break
            elif table := _TABLE.match(text, position):
                position = table.end()
                tables[table[1]] = tables.get(table[1], "") + table[2]
                continue
            else:
                is_entry, name, body = self._header(position)
            if name in self.computations:
                start = skip(text, position)
                raise self.error(start, f"computation {name!r} is defined twice")
            if is_entry and entry is not None:
                raise self.error(skip(text, position), "a second ENTRY computation")
            end = text.find("\n}", body)
            short = not is_entry and 0 < end - body < _LONG
            found = repeats.find(body, end) if short else None
            if found:
                original, called = found
                computation = original.repeated(name, called, functools.partial(self._later, body))
                position = end + 2
            else:
                computation, position = self._computation(name, body)
                computation.is_entry = is_entry
                self._spans.append((body, position))
                if short and position == end + 2:
                    repeats.add(computation, body, end)
            self.computations[name] = computation
            if text[position : position + 3] not in _NEXT:
                if text.startswith(",", following := skip(text, position)):
                    for _, _, position in attributes.iter_attributes(text, following, len(text)):  # noqa: B007
                        pass  # its execution thread
            if is_entry:
                entry = computation
        if entry is None:
            # As in XLA, the last computation of handwritten text. XLA prints ENTRY and a layout.
            if not self.computations or "entry_computation_layout" in header:
                raise self.error(len(text), f"{self.source} has no ENTRY computation{wrong.CUT}")
            entry = computation
            entry.is_entry = True
        return hm.Module(
            name=head[1].strip('"') if head else f"module_{entry.name}",
            text=text,
            source=self.source,
            computations=self.computations,
            entry=entry,
            num_partitions=self._count(header, "num_partitions"),
            replica_count=self._count(header, "replica_count"),
            header=header,
            frames=hm.FrameTable(tables),
            unknown=unknown_attributes.find(text, self._spans, self.computations),
            spans=((0, self._spans[0][0]), *self._spans),
        )

    def _header(self, position: int) -> tuple[bool, str, int]:
        """Return whether a computation is ENTRY, its name, and where its body begins."""
        text = self.text
        if text.startswith("HloModule", position):
            raise self.error(position, "a second module begins here; pass one module at a time")
        head = _HEADER.match(text, position)
        if not head:
            raise self.error(
                position,
                "expected a computation, '%name (parameters) -> shape {', a table or the end",
            )
        at = head.end()
        if text.startswith("(", at):
            at = skip(text, attributes.match_bracket(text, at, len(text)))
            if not text.startswith("->", at):
                raise self.error(at, "expected '->' after the computation's parameters")
            at = skip(text, shapes.read(text, at + 2)[1])
        if not text.startswith("{", at):
            raise self.error(at, "expected '{' before the computation's instructions")
        return bool(head[1]), head[2], at + 1

    def _count(self, header: dict[str, str], key: str) -> int | None:
        value = header.get(key)
        if value is None:
            return None
        if not re.fullmatch(r"\d{1,9}", value) or not int(value):
            raise self.error(self.text.find(value), f"{key} is {value!r}, not a positive count")
        return int(value)

    # -- instructions -------------------------------------------------------------------------

    def _later(self, position: int, name: str) -> tuple[hm.Instruction, ...]:
        """Return the instructions of a repetition whose body starts at ``position``."""
        reader = _Reader(self.text, self.source)
        reader.computations, reader._shapes = self.computations, self._shapes
        return reader._computation(name, position)[0].instructions

    def _computation(self, name: str, position: int) -> tuple[hm.Computation, int]:
        """Read instructions from after the opening brace to after the closing one."""
        # This loop reads most of the text, so it keeps everything in locals. ``_instruction`` reads
        # what ``_LINE`` doesn't match. ``_add`` checks lines that are the root or may be wrong.
        text, opening = self.text, position - 1
        self._name, self._instructions, self._places = name, [], {}
        self._parameters, self._root = {}, -1
        match, add = _LINE.match, self._add
        opcodes, known_shapes = self._opcodes, self._shapes
        instructions, places, parameters = self._instructions, self._places, self._parameters
        append, place_of, computations = instructions.append, places.__getitem__, self.computations
        if text.startswith("\n", position):
            position += 1
        count = 0  # of instructions
        while True:
            line = match(text, position)
            if not line:
                position = skip(text, position)
                if text.startswith("}", position):
                    break
                if position >= len(text):
                    raise self.error(
                        position, f"the text ends inside computation {name!r}: '}}' is missing"
                    )
                position = self._instruction(position)
                count = len(instructions)
                if text.startswith("\n", position):
                    position += 1
                continue
            is_root, label, shape_text, opcode, inside, callee = line.groups()
            if shape_text not in known_shapes:
                self._shape(shape_text, line.start(3))
            if opcode not in opcodes:
                opcodes[opcode] = opcode
            inner = line.span(5)
            start, position = position, line.end()
            operands: tuple[int, ...] = ()
            usual = not is_root
            if opcode == "parameter":
                usual = usual and inside in _NUMBERS and _NUMBERS[inside] not in parameters
                if usual and label not in places:
                    parameters[_NUMBERS[inside]] = start
            elif inside and opcode != "constant":
                try:  # %a, %b: XLA's present notation
                    if inside[0] != "%":
                        operands = self._operands(inner[0], label, start)[0]
                        count = len(instructions)
                    elif "  " in inside:  # where comments were
                        operands = tuple(map(place_of, _BETWEEN_OPERANDS.split(inside[1:])))
                    elif "," in inside:
                        operands = tuple(map(place_of, inside[1:].split(", %")))
                    else:
                        operands = (places[inside[1:]],)
                except KeyError:
                    operands = self._operands(inner[0], label, start)[0]
                    count = len(instructions)
            calls: tuple[str, ...] = ()
            if callee and opcode in _FAST_CALLERS:
                calls = (callee,)
                usual = usual and callee in computations
            elif opcode in _CALLERS:
                calls = self._calls(attributes.iter_attributes(text, inner[1] + 1, position - 1))
                usual = usual and not calls
            shape, opcode = known_shapes[shape_text], opcodes[opcode]
            if usual and label not in places:
                places[label] = count
                count += 1
                fields = label, opcode, shape, operands, calls, text, start, inner
                append(_make(hm.Instruction, (*fields, inner[1] + 1, position - 1)))
            else:  # it is ROOT, contains an error, or calls in another way
                add((label, opcode, shape, operands, calls, start, inner, position - 1), is_root)
                count = len(instructions)
        return self._finish(opening), position + 1

    def _add(self, given: _Fields, is_root: object) -> None:
        """Check and add an instruction; ``is_root`` is true, or the word ROOT, for the root."""
        label, opcode, shape, operands, calls, start, inner, end = given
        if opcode == "parameter":
            self._parameter(start, inner)
        for called in calls:
            if called not in self.computations:
                raise self.error(
                    start, f"{label!r} calls computation {called!r}, which is not defined before it"
                )
        place = len(self._instructions)
        if self._places.setdefault(label, place) != place:
            raise self.error(
                start, f"instruction {label!r} is defined twice in computation {self._name!r}"
            )
        if is_root:
            if self._root >= 0:
                raise self.error(start, f"computation {self._name!r} has a second ROOT")
            self._root = place
        fields = (label, opcode, shape, operands, calls, self.text, start, inner, inner[1] + 1, end)
        self._instructions.append(_make(hm.Instruction, fields))

    def _finish(self, opening: int) -> hm.Computation:
        name, instructions, numbers = self._name, tuple(self._instructions), self._parameters
        if not instructions:
            raise self.error(opening, f"computation {name!r} holds no instruction")
        if numbers and max(numbers) >= len(numbers):
            raise self.error(
                numbers[max(numbers)],
                f"parameter {max(numbers)} of computation {name!r}: it has "
                f"only {len(numbers)} parameters",
            )
        root = self._root if self._root >= 0 else len(instructions) - 1  # as in XLA
        calling = tuple([place for place, i in enumerate(instructions) if i.calls])
        called = tuple(itertools.chain.from_iterable([instructions[n].calls for n in calling]))
        return hm.Computation(name, instructions, root, calling, called)

    def _shape(self, text: str, offset: int) -> None:
        if text[0] == "(":  # tuples often consist of the same few arrays
            parts = _BETWEEN.split(text[1:-1])
            arrays = [array for array in map(self._array, parts) if array is not None]
            if len(arrays) == len(parts):
                self._shapes[text] = hm.Shape("tuple", elements=tuple(arrays))
                return
        elif self._array(text) is not None:
            return
        shape, end = shapes.read(self.text, offset)
        if end != offset + len(text):
            raise self.error(end, "expected an opcode after the shape")
        self._shapes[text] = shape

    def _array(self, text: str) -> hm.Shape | None:
        known = self._shapes.get(text)
        if known is None:
            known = shapes.printed(text)
            if known is not None:
                self._shapes[text] = known
        return None if known is None or known.elements is not None else known

    def _parameter(self, start: int, inner: tuple[int, int]) -> None:
        number = self.text[inner[0] : inner[1]].strip()
        if not number.isdecimal() or len(number) > 9:
            raise self.error(inner[0], "expected the parameter's number")
        if int(number) in self._parameters:
            raise self.error(start, f"computation {self._name!r} has two parameters {number}")
        self._parameters[int(number)] = start

    def _instruction(self, position: int) -> int:
        """Read an instruction in any form; return its end."""
        head = _HEAD.match(self.text, position)
        if not head:
            raise self.error(
                position, "expected an instruction, '%name = shape opcode(operands)', or '}'"
            )
        return self._right_side(head.end(), head[2], position, bool(head[1]))

    def _right_side(
        self, position: int, label: str, start: int, is_root: bool = False, nested: bool = False
    ) -> int:
        """Read the right side of the '=', or an instruction that is written as an operand."""
        text = self.text
        if _OPCODE.match(text, position) and not shapes.begins(text, position):
            name = text[position : text.find("(", position)].strip()
            raise self.error(
                position, f"the shape of {label!r} is left out; write it before {name!r}"
            )
        shape, at = shapes.read(text, position)
        opcode = _OPCODE.match(text, at)
        if not opcode:
            raise self.error(skip(text, at), "expected an opcode and '('")
        opening = opcode.end()
        operands: tuple[int, ...] = ()
        if opcode[1] in _LITERAL:
            end = attributes.match_bracket(text, opening - 1, len(text))
        else:
            operands, end = self._operands(opening, label, start)
        inner = (opening, end - 1)
        calls: tuple[str, ...] = ()
        if not nested:
            spans = list(attributes.iter_attributes(text, end, len(text)))
            calls = self._calls(spans)
            end = spans[-1][2] if spans else end
        self._add((label, opcode[1], shape, operands, calls, start, inner, end), is_root)
        return end

    def _calls(self, spans: Iterable[tuple[str, int, int]]) -> tuple[str, ...]:
        named = {key: span for key, *span in spans if key in _CALL_KEYS}
        names: list[str] = []
        for key in _CALL_KEYS if named else ():
            if key in named:
                start, end = named[key]
                if not _CALLEES.fullmatch(self.text, start, end):
                    raise self.error(
                        start, "expected the name of a computation, as compiled.as_text() prints it"
                    )
                names += _NAME.findall(self.text, start, end)
        return tuple(names)

    # -- operands -----------------------------------------------------------------------------

    def _operands(self, position: int, user: str, start: int) -> tuple[tuple[int, ...], int]:
        """Read operands from after the '('; return their places and the end, after the ')'."""
        # An operand may be an instruction without a name and attributes, or the element of a tuple
        # (%t#0#1); both become instructions of their own, before their user.
        text = self.text
        plain = _NAMES.match(text, position)
        if plain:
            names = [name.strip().lstrip("%") for name in plain[0].split(",")]
            return tuple([self._place(name, user, start) for name in names]), plain.end() + 1
        places: list[int] = []
        at = skip(text, position)
        while not text.startswith(")", at):
            begin = at
            if shapes.begins(text, at):
                at = skip(text, shapes.read(text, at)[1])
            name = _NAME.match(text, at)
            if name and text.startswith("(", skip(text, name.end())):
                if self._depth >= _MAX_DEPTH:
                    raise self.error(begin, "operands are nested too deep")
                self._depth += 1
                at = self._right_side(begin, f"{name[1]}.anon.{begin}", begin, nested=True)
                self._depth -= 1
                places.append(len(self._instructions) - 1)
            elif name:
                self._add_element(name[1], begin)
                places.append(self._place(name[1], user, start))
                at = name.end()
            elif at < len(text) and text[at] not in "}])":
                raise self.error(at, "expected an operand's name")
            at = skip(text, at)
            if text.startswith(",", at):
                at = skip(text, at + 1)
                if text.startswith(")", at):
                    raise self.error(at, "expected an operand's name")
            elif not text.startswith(")", at):
                if at >= len(text) or text[at] in "}])":
                    raise self.error(position - 1, "this '(' is never closed")
                raise self.error(at, "expected ',' between operands")
        return tuple(places), at + 1

    def _place(self, name: str, user: str, start: int) -> int:
        if name not in self._places:
            raise self.error(
                start,
                f"operand {name!r} of {user!r} is not defined before it in computation "
                f"{self._name!r}",
            )
        return self._places[name]

    def _add_element(self, label: str, start: int) -> None:
        """Add the get-tuple-element for ``%tuple#1``; dumps of JAX 0.12 leave it out."""
        name, *numbers = label.split("#")
        place = self._places.get(name)
        if label in self._places or place is None:
            return
        for number in numbers:
            elements = self._instructions[place].shape.elements or ()
            if len(number) > 9 or int(number) >= len(elements):
                whole = self._instructions[place].shape
                raise self.error(start, f"operand {label!r} takes element {number[:20]} of {whole}")
            name = f"{name}#{number}"
            if name not in self._places:
                text = f", index={number}"
                self._places[name] = len(self._instructions)
                shape, end = elements[int(number)], len(text)
                fields = (name, "get-tuple-element", shape, (place,), (), text, 0, (0, 0), 0, end)
                self._instructions.append(_make(hm.Instruction, fields))
            place = self._places[name]


@checked(own=("text",))
def parse(text: str, *, name: str = "<text>") -> hm.Module:
    """Read HLO text into a module.

    Args:
      text: one module, as ``compiled.as_text()`` or ``--xla_dump_to`` gives it.
      name: where the text comes from, for messages.

    Raises:
      HloSyntaxError: the text is not HLO, is empty or is cut; the error shows line and column.
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
    reader = _Reader(attributes.blanked(text), name)
    with garbage.uncollected():
        try:
            return reader.module()
        except HloSyntaxError as error:
            raise wrong.placed(error, reader.text, reader.source, reader.computations) from None
