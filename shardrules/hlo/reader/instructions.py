"""Reads the instructions of computations.

One regular expression reads a line as XLA prints it. In any other line (nested tuples, attributes
over several lines, text written by hand), shape, operands and attributes are read one after the
other. In both cases ``Reader.add`` makes the instruction.
"""

from __future__ import annotations

import re

from shardrules.hlo.reader import attributes, shapes
from shardrules.hlo.reader import module as hm
from shardrules.hlo.reader.attributes import COMMENT, skip, spaced

_SHAPE = (
    r"\w+\[[^\]\n{}()]*\](?:\{[^{}\n]*\})?"
    r"|\([^()\n]*(?:\([^()\n]*\)[^()\n]*)*\)"
)
# The rest of a line that holds one whole instruction: quotes close on it, and spaces occur only
# after commas and in metadata, windows and shardings; any other may precede an instruction.
_INNER = "(?:op_|source_|stack_|deduplicated_|scheduling_|profile_|size|stride|pad|[lr]hs_)[a-z_]*="
_REST = (
    r'(?:, [^ \t-\r"/]*+(?:(?:"[^"\\\n]*+(?:"|\\.[^"\\\n]*+(?:\\.[^"\\\n]*+)*+")'
    r"|(?<=,) | (?=" + _INNER + r"|last_tile|\{'))[^ \t-\r\"/]*+)*+"
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
_LITERAL = ("parameter", "constant")  # their parentheses hold no operands

_HEAD = spaced(r"(ROOT(?=[\s/]) )?%?([\w.\-]+) = ")
_OPCODE = spaced(r"([A-Za-z][\w\-]*) \(")
_NAME = re.compile(r"%?([\w.\-]+(?:#\d+)*)")
_NAMES = re.compile(r"[ \t]*%?[\w.\-]+[ \t]*(?:,[ \t]*%?[\w.\-]+[ \t]*)*(?=\))")
_INLINE = spaced(r"\{ (?:ROOT(?=[\s/]) )?%?[\w.\-]+ =")
_PAREN = re.compile(rf'"(?:[^"\\]|\\.)*"|{COMMENT.pattern}|[()"]', re.DOTALL)
# Attributes that name computations, in the order in which ``Instruction.calls`` lists them.
_CALL_KEYS = (
    "condition body true_computation false_computation branch_computations calls to_apply "
    "called_computations select scatter".split()
)
_MAX_DEPTH = 100  # nesting of operands and computations
_make = tuple.__new__


class Scope:
    """A computation during reading."""

    def __init__(self, name: str, alone: bool = False):
        self.name = name
        self.instructions: list[hm.Instruction] = []  # those read so far
        self.index: dict[str, int] = {}  # places in ``instructions`` by name
        # Places of instructions with operands that follow later, and the operands' names.
        self.late: list[tuple[int, list[str]]] = []
        self.numbers: dict[int, int] = {}  # where each parameter starts
        self.root = -1  # the place of ROOT, negative until it is read
        # The text is a single instruction: undefined operands are parameters.
        self.alone = alone

    def append(self, name, opcode, shape, operands, inner: str, rest: str = "") -> None:
        """Add an instruction that the text doesn't hold."""
        self.index[name] = len(self.instructions)
        text, place = inner + rest, len(inner)
        self.instructions.append(
            hm.Instruction(name, opcode, shape, operands, (), text, 0, (0, place), place, len(text))
        )


class Reader:
    """Reads computations of one text."""

    def __init__(self, text: str):
        self.text = text
        self.computations: dict[str, hm.Computation] = {}  # those read so far, by name
        # An unknown attribute, by the offset of its instruction.
        self.strange: dict[int, str] = {}
        self._shapes: dict[str, hm.Shape] = {}
        self._names: dict[str, str] = {}
        self._depth = 0

    def error(self, offset: int, message: str):
        """Make the error for a place in the text."""
        return attributes.syntax_error(self.text, offset, message)

    def computation(self, name: str, is_entry: bool, position: int) -> int:
        """Read instructions from after the opening brace to after the closing one."""
        text, opening = self.text, position - 1
        match, add = _LINE.match, self.add
        intern, shape_of = self._names.setdefault, self._shapes.get
        scope = Scope(name)
        place_of = scope.index.__getitem__
        if text.startswith("\n", position):
            position += 1
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
                position = self.instruction(scope, position)
                if text.startswith("\n", position):
                    position += 1
                continue
            is_root, label, shape_text, opcode, inside, callee = line.groups()
            shape = shape_of(shape_text) or self._shape(shape_text, line.start(3))
            inner = line.span(5)
            start, position = position, line.end()
            operands: tuple[int, ...] = ()
            if inside and opcode not in _LITERAL:
                printed = inside[0] == "%"  # %a, %b, as XLA does now
                try:
                    operands = tuple(map(place_of, inside[1:].split(", %"))) if printed else ()
                except KeyError:
                    printed = False
                if not printed:
                    operands = self._resolve(scope, self._operands(scope, inner[0])[0], start)
            calls: tuple[str, ...] = ()
            if callee and opcode in _FAST_CALLERS:
                calls = (callee,)
            elif opcode in _CALLERS:
                spans = attributes.iter_attributes(text, inner[1] + 1, position - 1)
                calls = self._calls({key: (a, b) for key, a, b in spans}, label)
            opcode = intern(opcode, opcode)
            add(scope, label, opcode, shape, operands, calls, start, inner, position - 1, is_root)
        self.finish(scope, is_entry, opening)
        return position + 1

    def add(
        self, scope: Scope, label, opcode, shape, operands, calls, start, inner, end, is_root
    ) -> None:
        """Add an instruction to a scope; the arguments are the fields of ``Instruction``."""
        if opcode == "parameter":
            self._parameter(scope, start, inner)
        instructions, index = scope.instructions, scope.index
        place = len(instructions)
        if index.setdefault(label, place) != place:
            raise self.error(
                start, f"instruction {label!r} is defined twice in computation {scope.name!r}"
            )
        if is_root:
            if scope.root >= 0:
                raise self.error(start, f"computation {scope.name!r} has a second ROOT")
            scope.root = place
        fields = (label, opcode, shape, operands, calls, self.text, start, inner, inner[1] + 1, end)
        instructions.append(_make(hm.Instruction, fields))

    def _shape(self, text: str, offset: int) -> hm.Shape:
        shape, end = shapes.read(self.text, offset)
        if end != offset + len(text):
            raise self.error(end, "expected an opcode after the shape")
        self._shapes[text] = shape
        return shape

    def _parameter(self, scope: Scope, start: int, inner: tuple[int, int]) -> None:
        number = self.text[inner[0] : inner[1]].strip()
        if not number.isdecimal() or len(number) > 9:
            raise self.error(inner[0], "expected the parameter's number")
        if int(number) in scope.numbers:
            raise self.error(start, f"computation {scope.name!r} has two parameters {number}")
        scope.numbers[int(number)] = start

    def finish(self, scope: Scope, is_entry: bool, opening: int) -> hm.Computation:
        """Make the computation of a scope."""
        name, instructions, root = scope.name, scope.instructions, scope.root
        if not instructions:
            raise self.error(opening, f"computation {name!r} holds no instruction")
        if scope.late:
            instructions, root = hm.operands_first(
                self.error, name, instructions, scope.late, scope.index, root
            )
        # Without a ROOT, XLA uses the last instruction.
        root = len(instructions) - 1 if root < 0 else root
        if scope.numbers and max(scope.numbers) >= len(scope.numbers):
            raise self.error(
                scope.numbers[max(scope.numbers)],
                f"parameter {max(scope.numbers)} of computation {name!r}: it has "
                f"only {len(scope.numbers)} parameters",
            )
        calling = tuple(
            [place for place, instruction in enumerate(instructions) if instruction.calls]
        )
        computation = hm.Computation(name, tuple(instructions), root, is_entry, calling)
        self.computations[name] = computation
        return computation

    def instruction(self, scope: Scope, position: int) -> int:
        """Read one instruction in any form; give its end."""
        text = self.text
        start = skip(text, position)
        head = _HEAD.match(text, start)
        at = head.end() if head else start
        if not head and not (scope.alone and shapes.begins(text, start)):
            raise self.error(
                start, "expected an instruction, '%name = shape opcode(operands)', or '}'"
            )
        label = head[2] if head else "_"
        return self._right_side(scope, skip(text, at), label, start, bool(head and head[1]))

    def _right_side(
        self, scope: Scope, position: int, label: str, start: int, is_root: bool, nested=False
    ) -> int:
        """Read the right side of the '=', or an instruction that is written as an operand."""
        text = self.text
        shape: hm.Shape | None = None
        at = position
        if shapes.begins(text, at):
            shape, at = shapes.read(text, at)
            at = skip(text, at)
        opcode = _OPCODE.match(text, at)
        if not opcode:
            if shape is None:
                shapes.read(text, at)  # raises an error that asks for a shape
            raise self.error(at, "expected an opcode and '('")
        opening = opcode.end()
        labels: list[str] = []
        if opcode[1] in _LITERAL:
            closing = self._literal_end(opening - 1)
        else:
            labels, closing = self._operands(scope, opening)
        end = closing
        calls: tuple[str, ...] = ()
        keys: dict[str, tuple[int, int]] = {}
        if not nested:
            for key, value, end in attributes.iter_attributes(text, closing, len(text)):
                keys[key] = (value, end)
                if key not in attributes.KNOWN:
                    self.strange[start] = key
            calls = self._calls(keys, label)
        operands = self._resolve(scope, labels, start)
        if shape is None:
            operand_shapes = [scope.instructions[o].shape for o in operands]
            called = self.computations.get(calls[0]) if calls else None
            result = called.instructions[called.root].shape if called else None
            if len(operand_shapes) == len(labels):
                shape = shapes.infer(
                    opcode[1], operand_shapes, lambda k: text[slice(*keys.get(k, (0, 0)))], result
                )
            if shape is None:
                raise self.error(
                    position, f"the shape of {label!r} is left out; write it before {opcode[1]!r}"
                )
        inner = (opening, closing - 1)
        self.add(scope, label, opcode[1], shape, operands, calls, start, inner, end, is_root)
        return end

    # -- operands -----------------------------------------------------------------------------

    def _resolve(self, scope: Scope, labels: list[str], start: int) -> tuple[int, ...]:
        try:
            return tuple([scope.index[label] for label in labels])
        except KeyError as missing:
            if scope.alone:
                raise self.error(
                    start, f"operand {missing.args[0]!r} has neither a definition nor a shape"
                ) from None
            scope.late.append((len(scope.instructions), labels))
            return ()

    def _operands(self, scope: Scope, position: int) -> tuple[list[str], int]:
        """Read operands from after the '('; give their names and the place after the ')'."""
        # An operand may be an instruction without name and attributes, or the element of a tuple
        # (%t#0#1); both are added as instructions before their user.
        text = self.text
        plain = _NAMES.match(text, position)
        if plain:
            labels = [part.strip().lstrip("%") for part in plain[0].split(",")]
            return labels, plain.end() + 1
        labels = []
        at = skip(text, position)
        while not text.startswith(")", at):
            begin = at
            shape: hm.Shape | None = None
            if shapes.begins(text, at):
                shape, at = shapes.read(text, at)
                at = skip(text, at)
            name = _NAME.match(text, at)
            after = skip(text, name.end()) if name else at
            if name and text.startswith("(", after):
                label = f"{name[1]}.anon.{begin}"
                if self._depth >= _MAX_DEPTH:
                    raise self.error(begin, "operands are nested too deep")
                self._depth += 1
                at = skip(text, self._right_side(scope, begin, label, begin, False, True))
                self._depth -= 1
                labels.append(label)
            elif name or shape is not None and scope.alone:
                label = name[1] if name else f"_.{len(scope.numbers)}"
                if "#" in label:
                    self._elements(scope, label, begin)
                elif scope.alone and shape is not None and label not in scope.index:
                    self._free(scope, label, shape, begin)
                labels.append(label)
                at = after
            elif at >= len(text) or text[at] in "}])":
                raise self.error(position - 1, "this '(' is never closed")
            else:
                raise self.error(at, "expected an operand's name")
            if text.startswith(",", at):
                at = skip(text, at + 1)
                if text.startswith(")", at):
                    raise self.error(at, "expected an operand's name")
            elif not text.startswith(")", at):
                if at >= len(text) or text[at] == "}":
                    raise self.error(position - 1, "this '(' is never closed")
                raise self.error(at, "expected ',' between operands")
        return labels, at + 1

    def _free(self, scope: Scope, label: str, shape: hm.Shape, start: int) -> None:
        number = len(scope.numbers)
        scope.numbers[number] = start
        scope.append(label, "parameter", shape, (), str(number))

    def _elements(self, scope: Scope, label: str, start: int) -> None:
        """Add a get-tuple-element for ``%tuple#1``, which dumps of JAX 0.12 leave out."""
        place = scope.index.get(label.partition("#")[0])
        if label in scope.index or place is None:
            return
        name = scope.instructions[place].name
        for number in label.split("#")[1:]:
            elements = scope.instructions[place].shape.elements or ()
            if len(number) > 9 or int(number) >= len(elements):
                raise self.error(
                    start,
                    f"operand {label!r} takes element {number[:20]} of "
                    f"{scope.instructions[place].shape}",
                )
            name = f"{name}#{number}"
            if name not in scope.index:
                shape = elements[int(number)]
                scope.append(name, "get-tuple-element", shape, (place,), "", f", index={number}")
            place = scope.index[name]

    def _literal_end(self, opening: int) -> int:
        depth = 0
        for match in _PAREN.finditer(self.text, opening):
            depth += (match[0] == "(") - (match[0] == ")")
            if not depth or match[0] == '"':
                if match[0] != '"':
                    return match.end()
                break
        raise self.error(opening, "this '(' is never closed")

    # -- computations -------------------------------------------------------------------------

    def _calls(self, keys: dict[str, tuple[int, int]], label: str) -> tuple[str, ...]:
        names: list[str] = []
        for key in _CALL_KEYS:
            if key not in keys:
                continue
            start, end = keys[key]
            if _INLINE.match(self.text, start, end):
                names.append(self._inline(f"{label}.{key}", start))
            elif self.text[start] == "{":
                names += self._listed(f"{label}.{key}", start + 1, end - 1)
            else:
                names.append(self.text[start:end].lstrip("%"))
        return tuple(names)

    def _listed(self, label: str, at: int, end: int) -> list[str]:
        names: list[str] = []
        at = skip(self.text, at, end)
        while at < end:
            if self.text[at] == "{":
                names.append(self._inline(f"{label}.{len(names)}", at))
                at = attributes.match_bracket(self.text, at, end)
            else:
                name = _NAME.match(self.text, at, end)
                if not name:
                    raise self.error(at, "expected the name of a computation")
                names.append(name[1])
                at = name.end()
            at = skip(self.text, at, end)
            if at < end:
                if self.text[at] != ",":
                    raise self.error(at, "expected ',' between computations")
                at = skip(self.text, at + 1, end)
        return names

    def _inline(self, name: str, start: int) -> str:
        if self._depth >= _MAX_DEPTH:
            raise self.error(start, "computations are nested too deep")
        name = f"{name}.{start}"
        self._depth += 1
        self.computation(name, False, start + 1)
        self._depth -= 1
        return name
