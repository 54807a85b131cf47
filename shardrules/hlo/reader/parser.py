"""Reads HLO text into a ``Module``.

A line that looks like what XLA prints is read by one regular expression; whatever it doesn't fit
(nested tuples, literals over several lines, comments) goes through a scanner that counts brackets.
Nothing is skipped in silence: what neither of them reads is an ``HloSyntaxError`` with its place.
"""

from __future__ import annotations

import contextlib
import gc
import re

from shardrules.hlo.reader import module as hm
from shardrules.hlo.reader import ordering

_SHAPE = (
    r"\w+\[[^\]\n{}()]*\](?:\{[^{}\n]*\})?"
    r"|\([^()\n]*(?:\([^()\n]*\)[^()\n]*)*\)"
)
_LINE = re.compile(
    r"[ \t]*(ROOT )?%?([\w.\-]+) = (" + _SHAPE + r") ([a-z][\w\-]*)"
    r"\(([^()\n]*)\)(?:, [^\n]*)?\n"
)
_SLOW_HEAD = re.compile(r"\s*(ROOT\s+)?%?([\w.\-]+)\s*=\s*")
_OPCODE = re.compile(r"\s*([A-Za-z][\w\-]*)\s*\(")
# How a line begins that doesn't go on with the instruction before it.
_FRESH = ("  %", "  ROOT %")
_FRESH_BARE = re.compile(r"[ \t]+(?:ROOT\s+)?%?[\w.\-]+ = ")
_HEADER = re.compile(r"[ \t]*(ENTRY\s+)?%?([\w.\-]+)(?=[\s({])[^\n]*\{[ \t]*\n")
_FOOTER = re.compile(r"[ \t]*\}([^\n]*)(?:\n|$)")
_SKIP = re.compile(r"(?:\s|/\*.*?\*/|//[^\n]*)*", re.DOTALL)
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_TABLE = re.compile(r"([A-Z]\w*)[ \t]*\n")
_ROW = re.compile(r"(\d+)[ \t]+([^\n]*)\n")
_ARRAY = re.compile(r"(\w+)\[([^\]\n]*)\]")
_DIMENSIONS = re.compile(r"\s*(?:(?:<=)?\d+|\?)\s*(?:,\s*(?:(?:<=)?\d+|\?)\s*)*")
_MODULE = re.compile(r"HloModule\s+(\"[^\"\n]*\"|[^\s,]+)")

# Opcodes whose attributes name computations. Others can't call any.
_CALLERS = frozenset(
    "fusion fusion-start call call-start while conditional async-start async-update async-done "
    "custom-call map reduce reduce-window scatter select-and-scatter sort all-reduce "
    "all-reduce-start reduce-scatter reduce-scatter-start scan custom-call-start topk "
    "composite".split()
)
_CALL_KEYS = frozenset(
    "calls to_apply body condition branch_computations true_computation false_computation "
    "called_computations select scatter".split()
)
_FAST_CALLS = re.compile(r", (?:kind=\w+, )?(?:calls|to_apply)=%?([\w.\-]+)(?=[,\n])")
_NAME = re.compile(r"%?([\w.\-]+(?:#\d+)*)")


class _Parser:
    def __init__(self, text: str):
        self.text = text
        self.shapes: dict[str, hm.Shape] = {}
        self.names: dict[str, str] = {}

    def error(self, offset: int, message: str):
        return hm.syntax_error(self.text, offset, message)

    # -- shapes -------------------------------------------------------------------------------

    def shape_at(self, position: int) -> tuple[hm.Shape, int]:
        """Read a shape; iterative, so that no nesting exhausts the stack."""
        text = self.text
        stack: list[list[hm.Shape]] = []
        while True:
            position = _SKIP.match(text, position).end()
            done: hm.Shape | None = None
            if text.startswith("(", position):
                stack.append([])
                position = _SKIP.match(text, position + 1).end()
                if text.startswith(")", position):
                    done = hm.Shape("tuple", elements=tuple(stack.pop()))
                    position += 1
                else:
                    continue
            elif text.startswith("b(", position):  # a buffer: its array with a marker around it
                end = hm.match_bracket(text, position + 1, len(text))
                done, stop = self._array_at(position + 2)
                if _SKIP.match(text, stop).end() != end - 1:
                    raise self.error(stop, "expected ')' after the buffer's shape")
                position = end
            else:
                done, position = self._array_at(position)
            while stack:
                stack[-1].append(done)
                position = _SKIP.match(text, position).end()
                if text.startswith(",", position):
                    position += 1
                    done = None
                    break
                if not text.startswith(")", position):
                    raise self.error(position, "expected ',' or ')' in a tuple's shape")
                position += 1
                done = hm.Shape("tuple", elements=tuple(stack.pop()))
            if done is not None:
                return done, position

    def _array_at(self, position: int) -> tuple[hm.Shape, int]:
        text = self.text
        found = _ARRAY.match(text, position)
        if not found:
            raise self.error(position, "expected a shape such as f32[8,128]{1,0}")
        dimensions: tuple[int, ...] = ()
        sizes = found[2].strip()
        if sizes:
            if not _DIMENSIONS.fullmatch(sizes):
                raise self.error(found.start(2), "expected sizes such as 8,128 or <=8")
            # '?' is an unbounded dynamic size; nothing that XLA compiles still holds one.
            parts = [p.strip().lstrip("<=") for p in sizes.split(",")]
            if any(len(p) > 18 for p in parts):
                raise self.error(found.start(2), "a size of this many digits is no size")
            dimensions = tuple(0 if p == "?" else int(p) for p in parts)
        end = found.end()
        layout = ""
        if text.startswith("{", end):
            stop = hm.match_bracket(text, end, len(text))
            layout = text[end + 1 : stop - 1]
            end = stop
        return hm.Shape(found[1], dimensions, layout), end

    def shape(self, text: str, offset: int) -> hm.Shape:
        """Read a shape once per distinct text."""
        known = self.shapes.get(text)
        if known is None:
            known, end = self.shape_at(offset)
            if end != offset + len(text):
                raise self.error(end, "expected an opcode after the shape")
            self.shapes[text] = known
        return known

    # -- instructions -------------------------------------------------------------------------

    def calls(self, start: int, end: int) -> tuple[str, ...]:
        fast = _FAST_CALLS.match(self.text, start, end + 1)
        if fast:
            return (fast[1],)
        found: list[str] = []
        for key, value, stop in hm.iter_attributes(self.text, start, end):
            if key in _CALL_KEYS:
                if self.text[value] == "{":
                    value, stop = value + 1, stop - 1
                for name in _COMMENT.sub("", self.text[value:stop]).split(","):
                    name = name.strip().lstrip("%")
                    if name:
                        found.append(name)
            elif key in ("metadata", "backend_config"):
                break  # always printed last
        return tuple(found)

    def slow(self, position: int):
        """Read one instruction of any form; gives the fields of ``_LINE`` with offsets."""
        text = self.text
        start = _SKIP.match(text, position).end()
        head = _SLOW_HEAD.match(text, start)
        if not head:
            raise self.error(
                start, "expected an instruction, '%name = shape opcode(operands)', or '}'"
            )
        shape, end = self.shape_at(head.end())
        opcode = _OPCODE.match(text, end)
        if not opcode:
            raise self.error(_SKIP.match(text, end).end(), "expected an opcode and '('")
        opening = opcode.end() - 1
        if opcode[1] == "constant":
            closing = self._literal_end(opening)
        else:
            closing = hm.match_bracket(text, opening, len(text))
        stop = self._attributes_end(closing)
        return (
            bool(head[1]),
            head[2],
            shape,
            opcode[1],
            (opening + 1, closing - 1),
            closing,
            start,
            stop,
        )

    _PAREN = re.compile(r'"(?:[^"\\]|\\.)*"|[()"]')

    def _literal_end(self, opening: int) -> int:
        depth = 0
        position = opening
        while True:
            found = self._PAREN.search(self.text, position)
            if not found or found[0] == '"':
                raise self.error(opening, "this '(' is never closed")
            position = found.end()
            if found[0] == "(":
                depth += 1
            elif found[0] == ")":
                depth -= 1
                if not depth:
                    return position

    def _attributes_end(self, position: int) -> int:
        """Find the newline that ends an instruction: the first one outside of brackets."""
        text = self.text
        while True:
            newline = text.find("\n", position)
            if newline < 0:
                newline = len(text)
            found = hm._BRACKET.search(text, position, newline)
            if not found:
                return newline
            if found[0] in "{([":
                position = hm.match_bracket(text, found.start(), len(text))
            elif found[0] == "}":  # a computation that ends on this line
                return found.start()
            elif found[0] in ")]":
                raise self.error(found.start(), f"{found[0]!r} closes nothing")
            elif found[0] == '"':
                # a quoted string that runs over the line's end
                quoted = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL).match(text, found.start())
                if not quoted:
                    raise self.error(found.start(), "this quote is never closed")
                position = quoted.end()
            else:
                position = found.end()

    def computation(
        self, name: str, is_entry: bool, header: int, position: int
    ) -> tuple[hm.Computation, int]:
        """Read instructions up to the closing brace."""
        text = self.text
        match = _LINE.match
        intern = self.names.setdefault
        shapes = self.shapes
        index: dict[str, int] = {}
        instructions: list[hm.Instruction] = []
        late: list[tuple[int, list[str]]] = []
        numbers: dict[int, int] = {}
        root = -1
        make = tuple.__new__
        Instruction = hm.Instruction
        while True:
            line = match(text, position)
            if line:
                is_root, label, shape_text, opcode, inside = line.groups()
                shape = shapes.get(shape_text)
                if shape is None:
                    shape = self.shape(shape_text, line.start(3))
                inner = line.span(5)
                attributes = inner[1] + 1
                start = position
                end = line.end() - 1
                position = end + 1
                if not text.startswith(_FRESH, position) and not _FRESH_BARE.match(text, position):
                    # JAX's kernel metadata runs over several lines (TPU, JAX 0.10.2).
                    end = self._attributes_end(attributes)
                    position = end + 1 if text.startswith("\n", end) else end
            else:
                begin = _SKIP.match(text, position).end()
                footer = _FOOTER.match(text, begin)
                if footer:
                    position = footer.end()
                    break
                if begin >= len(text):
                    raise self.error(
                        len(text), f"the text ends inside computation {name!r}: '}}' is missing"
                    )
                is_root, label, shape, opcode, inner, attributes, start, end = self.slow(begin)
                inside = _COMMENT.sub("", text[inner[0] : inner[1]])
                position = end
            if label in index:
                raise self.error(
                    start, f"instruction {label!r} is defined twice in computation {name!r}"
                )
            opcode = intern(opcode, opcode)
            operands: tuple[int, ...] = ()
            if opcode == "parameter":
                number = inside.strip()
                if not number.isdigit() or len(number) > 9:
                    raise self.error(inner[0], "expected the parameter's number")
                if int(number) in numbers:
                    raise self.error(start, f"computation {name!r} has two parameters {number}")
                numbers[int(number)] = start
            elif inside and opcode != "constant":
                try:  # what XLA prints now: %a, %b
                    operands = tuple([index[o] for o in inside[1:].split(", %")])
                except KeyError:
                    labels = self.operand_names(inside, inner)
                    if "#" in inside:
                        self._add_elements(labels, index, instructions, start)
                    try:
                        operands = tuple([index[o] for o in labels])
                    except KeyError:
                        late.append((len(instructions), labels))
                else:
                    if inside[0] != "%":  # "xa" without '%' would have named %a
                        labels = self.operand_names(inside, inner)
                        operands = tuple([index[o] for o in labels if o in index])
                        if len(operands) != len(labels):
                            late.append((len(instructions), labels))
            calls: tuple[str, ...] = ()
            if opcode in _CALLERS:
                calls = self.calls(attributes, end)
            if is_root:
                if root >= 0:
                    raise self.error(start, f"computation {name!r} has a second ROOT")
                root = len(instructions)
            index[label] = len(instructions)
            instructions.append(
                make(
                    Instruction,
                    (label, opcode, shape, operands, calls, text, start, inner, attributes, end),
                )
            )
        if not instructions:
            raise self.error(header, f"computation {name!r} holds no instruction")
        if late:
            instructions, root = ordering.operands_first(
                self.error, name, instructions, late, index, root
            )
        # XLA takes the last instruction where none is marked.
        root = len(instructions) - 1 if root < 0 else root
        for number, start in numbers.items():
            if number >= len(numbers):
                raise self.error(
                    start,
                    f"parameter {number} of computation {name!r}: it has "
                    f"only {len(numbers)} parameters",
                )
        return hm.Computation(name, tuple(instructions), root, is_entry), position

    def operand_names(self, inside: str, span: tuple[int, int]) -> list[str]:
        """Read operand names, with or without '%', shapes and comments."""
        if "/" in inside:
            inside = _COMMENT.sub("", inside)
        if inside[:1] == "%" and " " not in inside.replace(", ", ","):
            return inside[1:].split(", %")
        if "(" in inside or "\n" in inside or "{" in inside or "[" in inside:
            return self._slow_operands(span)
        names = []
        for part in inside.split(","):
            words = part.split()
            if not words:
                raise self.error(span[0], "expected operands, '%name, %name'")
            names.append(words[-1].lstrip("%"))
        return names

    def _slow_operands(self, span: tuple[int, int]) -> list[str]:
        text = self.text
        names: list[str] = []
        position = _SKIP.match(text, span[0]).end()
        while position < span[1]:
            name = _NAME.match(text, position)
            if (
                text[position] == "("
                or _ARRAY.match(text, position)
                or text.startswith("b(", position)
            ):
                _, position = self.shape_at(position)
                position = _SKIP.match(text, position).end()
                name = _NAME.match(text, position)
            if not name:
                raise self.error(position, "expected an operand's name")
            names.append(name[1])
            position = _SKIP.match(text, name.end()).end()
            if position < span[1]:
                if text[position] != ",":
                    raise self.error(position, "expected ',' between operands")
                position = _SKIP.match(text, position + 1).end()
        return names

    def _add_elements(
        self,
        labels: list[str],
        index: dict[str, int],
        instructions: list[hm.Instruction],
        start: int,
    ) -> None:
        """Add a get-tuple-element for each operand ``%tuple#1``, left out in dumps (JAX 0.12)."""
        for label in labels:
            place = index.get(label.partition("#")[0])
            if label in index or place is None:
                continue
            name = instructions[place].name
            for number in label.split("#")[1:]:
                elements = instructions[place].shape.elements
                if not number.isdigit() or len(number) > 9 or int(number) >= len(elements or ()):
                    raise self.error(
                        start,
                        f"operand {label!r} takes element {number[:20]} of "
                        f"{instructions[place].shape}",
                    )
                name = f"{name}#{number}"
                if name not in index:
                    index[name] = len(instructions)
                    text = f", index={number}"
                    instructions.append(
                        hm.Instruction(
                            name,
                            "get-tuple-element",
                            elements[int(number)],
                            (place,),
                            (),
                            text,
                            0,
                            (0, 0),
                            0,
                            len(text),
                        )
                    )
                place = index[name]

    # -- the module ---------------------------------------------------------------------------

    def module(self, source: str) -> hm.Module:
        """Read the whole text."""
        text = self.text
        position = _SKIP.match(text, 0).end()
        if position >= len(text):
            raise self.error(
                0,
                f"{source} is empty: expected HLO text, which begins with "
                "'HloModule NAME'; pass what compiled.as_text() returns",
            )
        head = _MODULE.match(text, position)
        if not head:
            hint = ""
            if re.compile(r"#|module\b|func\.").match(text, position):
                hint = " (this looks like StableHLO: compile it first)"
            raise self.error(
                position,
                f"{source} is not HLO text: expected 'HloModule NAME', as "
                f"compiled.as_text() prints it{hint}",
            )
        stop = self._attributes_end(head.end())
        header: dict[str, str] = {}
        for key, value, end in hm.iter_attributes(text, head.end(), stop):
            header[key] = text[value:end]
        tables: dict[str, dict[int, str]] = {}
        computations: dict[str, hm.Computation] = {}
        starts: dict[str, int] = {}
        entry: hm.Computation | None = None
        position = stop
        while True:
            position = _SKIP.match(text, position).end()
            if position >= len(text):
                break
            table = _TABLE.match(text, position)
            if table:
                position = table.end()
                rows = tables.setdefault(table[1], {})
                while True:
                    row = _ROW.match(text, position)
                    if not row:
                        break
                    rows[int(row[1][:9])] = row[2]
                    position = row.end()
                continue
            if text.startswith("HloModule", position):
                raise self.error(position, "a second module begins here; pass one module at a time")
            is_entry, name, body = self.header(position)
            if name in computations:
                raise self.error(position, f"computation {name!r} is defined twice")
            if is_entry and entry is not None:
                raise self.error(position, "a second ENTRY computation")
            starts[name] = position
            computation, position = self.computation(name, is_entry, position, body)
            computations[name] = computation
            if is_entry:
                entry = computation
        if entry is None:
            raise self.error(len(text), f"{source} has no ENTRY computation: is the text cut?")
        order = ordering.callees_first(self.error, computations)
        return hm.Module(
            head[1].strip('"'),
            text,
            source,
            computations,
            entry,
            self._count(header, "num_partitions"),
            self._count(header, "replica_count"),
            header,
            hm.FrameTable(tables),
            order,
        )

    _LONG = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s*(?=[({])")

    def header(self, position: int) -> tuple[bool, str, int]:
        """Read a computation's header: is it ENTRY, its name, where its body begins."""
        found = _HEADER.match(self.text, position)
        if found:
            return bool(found[1]), found[2], found.end()
        # A header over several lines, or one whose body begins on its line.
        text = self.text
        name = self._LONG.match(text, position)
        if not name:
            raise self.error(
                position,
                "expected a computation, '%name (parameters) -> shape {', a table or the end",
            )
        at = name.end()
        if text.startswith("(", at):
            at = _SKIP.match(text, hm.match_bracket(text, at, len(text))).end()
            if not text.startswith("->", at):
                raise self.error(at, "expected '->' after the computation's parameters")
            _, at = self.shape_at(at + 2)
            at = _SKIP.match(text, at).end()
        if not text.startswith("{", at):
            raise self.error(at, "expected '{' before the computation's instructions")
        return bool(name[1]), name[2], at + 1

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
    the time for 4 MB.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


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
        raise TypeError(
            f"parse takes HLO text as a str, not {type(text).__name__}; read a file "
            "first, or pass compiled.as_text()."
        )
    if "\r" in text:
        text = text.replace("\r\n", "\n")
    with uncollected():
        return _Parser(text).module(name)
