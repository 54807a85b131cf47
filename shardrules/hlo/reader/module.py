"""The data of a compiled HLO module. ``parser.parse`` makes it, and nothing changes it afterwards.

An ``Instruction`` keeps offsets into the text instead of parsed attributes: most attributes
(layouts, backend configs) are never used, and parsing them all would take longer than the proof.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from shardrules import errors
from shardrules.hlo.reader.attributes import PRINTED, iter_attributes

# Sizes in bits, by the names in XLA's primitive_util. `token` and `opaque` have no data.
_ELEMENT_BITS = {
    name: bits
    for bits, names in {
        0: "token opaque",
        1: "s1 u1",
        2: "s2 u2",
        4: "s4 u4 f4e2m1fn",
        8: "pred s8 u8 f8e8m0fnu f8e5m2 f8e4m3 f8e4m3fn f8e4m3b11fnuz f8e5m2fnuz f8e4m3fnuz f8e3m4",
        16: "s16 u16 f16 bf16",
        32: "s32 u32 f32",
        64: "s64 u64 f64 c64",
        128: "c128",
    }.items()
    for name in names.split()
}


class Shape(NamedTuple):
    """An array's or a tuple's shape.

    Attributes:
      element_type: XLA's name (``"f32"``), or ``"tuple"``.
      dimensions: sizes of an array's dimensions; the bound of a dynamic dimension.
      layout: the text between the layout's braces; ``""`` if none is printed.
      elements: a tuple's shapes; None for an array.
      dynamic: a size is only a bound; the number of elements isn't known.
    """

    element_type: str
    dimensions: tuple[int, ...] = ()
    layout: str = ""
    elements: tuple[Shape, ...] | None = None
    dynamic: bool = False

    @property
    def is_tuple(self) -> bool:
        """Return whether this is a tuple's shape, not an array's."""
        return self.elements is not None

    @property
    def element_count(self) -> int:
        """Return the number of an array's elements."""
        return math.prod(self.dimensions)

    @property
    def bits(self) -> int:
        """Return the element type's size in bits; raise HloError for an unknown type."""
        try:
            return _ELEMENT_BITS[self.element_type]
        except KeyError:
            raise errors.HloError(
                f"element type {self.element_type!r} has no known size; the known types are "
                f"{', '.join(_ELEMENT_BITS)}.",
                element_type=self.element_type,
            ) from None

    def leaves(self) -> list[Shape]:
        """Return the arrays of a tuple, depth first; for an array, itself."""
        leaves: list[Shape] = []
        stack = [self]
        while stack:
            shape = stack.pop()
            if shape.elements is None:
                leaves.append(shape)
            else:
                stack.extend(reversed(shape.elements))
        return leaves

    @property
    def bytes(self) -> int:
        """Return the bytes of all leaves, without padding."""
        if self.elements is None:
            return (math.prod(self.dimensions) * self.bits + 7) // 8
        return sum((leaf.element_count * leaf.bits + 7) // 8 for leaf in self.leaves())

    @property
    def is_row_major(self) -> bool:
        """Return whether the printed layout is row-major without tiles."""
        order, _, tiles = self.layout.partition(":")
        if re.sub(r"[SE]\(\d+\)", "", tiles):
            return False
        if not order:
            return sum(size > 1 for size in self.dimensions) <= 1
        return order == ",".join(str(i) for i in reversed(range(len(self.dimensions))))

    def __str__(self) -> str:
        if self.elements is not None:
            return "(" + ", ".join(str(e) for e in self.elements) + ")"
        return f"{self.element_type}[{','.join(str(d) for d in self.dimensions)}]"


class Frame(NamedTuple):
    """A place in the user's source."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where} ({self.function})" if self.function else where


_LIBRARY = re.compile(r".*[\\/](?:site|dist)-packages[\\/]")


def users(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame outside of installed packages, or else the innermost frame."""
    own = (frame for frame in frames if not _LIBRARY.match(frame.file))
    return next(own, frames[0] if frames else None)


def library(frames: Sequence[Frame]) -> str:
    """Return the innermost frame, relative to its packages folder; "" if it is the user's."""
    if users(frames) in (None, *frames[:1]):
        return ""
    return str(frames[0]._replace(file=_LIBRARY.sub("", frames[0].file)))


class Metadata(NamedTuple):
    """The content of ``metadata={...}``: the JAX op's name, and frames, innermost first."""

    op_name: str = ""
    frames: tuple[Frame, ...] = ()


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
      name: without ``%``.
      opcode: as printed, known or not.
      shape: of the result.
      operands: positions of the operands in the computation's ``instructions``.
      calls: names of the computations that it calls: always a while's condition before its body,
        and branches by number.
      text: the whole module's text.
      start: offset of the instruction.
      inner: offsets of the text between the parentheses (a literal, a parameter's number).
      attributes_start: offset of the first attribute.
      end: offset of the instruction's end.
    """

    name: str
    opcode: str
    shape: Shape
    operands: tuple[int, ...]
    calls: tuple[str, ...]
    text: str
    start: int
    inner: tuple[int, int]
    attributes_start: int
    end: int

    def attributes(self) -> Iterator[tuple[str, int, int]]:
        """Yield each attribute's key and the offsets of its value in the text.

        Raises HloSyntaxError if a comma is not followed by ``key=value``.
        """
        return iter_attributes(self.text, self.attributes_start, self.end)

    def attribute(self, key: str) -> str | None:
        """Return the text of an attribute's value; None if it is absent."""
        text, position, end = self.text, self.attributes_start, self.end
        if text.find(key, position, end) < 0:
            return None  # fast: skips long device groups
        while printed := PRINTED.match(text, position, end):
            if printed[1] == key:
                return printed[2]
            position = printed.end()
        for name, start, stop in iter_attributes(text, position, end):
            if name == key:
                return text[start:stop]
        return None

    @property
    def literal(self) -> str:
        """Return the text between the parentheses."""
        return self.text[self.inner[0] : self.inner[1]]

    def __repr__(self) -> str:  # The default would print the module's whole text.
        return f"<{self.name} = {self.shape} {self.opcode}>"


class Computation:
    """One computation, with its instructions ordered so that operands come first.

    Attributes:
      name: without ``%``.
      root: the position of the instruction that gives the result.
      is_entry: it is the module's entry computation.
      calling: positions of the instructions that call computations.
      original: the earlier computation that this one repeats except for names and metadata;
        itself if it repeats none.
      called: the names of the computations that it calls, in the order of ``calling``.
    """

    def __init__(
        self,
        name: str,
        instructions: tuple[Instruction, ...],
        root: int,
        calling: tuple[int, ...],
        called: tuple[str, ...],
    ):
        self.name = name
        self.instructions = instructions
        self.root = root
        self.is_entry = False
        self.calling = calling
        self.called = called
        self.original = self

    _read: Callable[[str], tuple[Instruction, ...]]

    @functools.cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """Return the instructions; a repetition reads its own at the first access."""
        return self._read(self.name)

    def repeated(
        self, name: str, called: tuple[str, ...], read: Callable[[str], tuple[Instruction, ...]]
    ) -> Computation:
        """Return a computation that repeats this one; ``read`` reads its instructions."""
        repetition = Computation.__new__(Computation)
        kept = {key: vars(self)[key] for key in ("root", "is_entry", "calling", "original")}
        vars(repetition).update(kept, name=name, called=called, _read=read)
        return repetition

    def calls(self) -> list[tuple[Instruction, tuple[str, ...]]]:
        """Return the instructions that call computations, with the names of these computations.

        The instructions are the original's. A repetition calls at the same places, but may call
        other computations than its original does.
        """
        calling = [self.original.instructions[position] for position in self.calling]
        if self.original is self:
            return [(instruction, instruction.calls) for instruction in calling]
        names = iter(self.called)
        return [(i, tuple(itertools.islice(names, len(i.calls)))) for i in calling]

    @property
    def parameters(self) -> list[Instruction]:
        """Return the parameters, ordered by their numbers."""
        parameters = [i for i in self.instructions if i.opcode == "parameter"]
        return sorted(parameters, key=lambda i: int(i.literal))

    def users(self) -> Users:
        """Return, for each instruction, the positions of the instructions that use it."""
        return self._users

    @functools.cached_property
    def _users(self) -> Users:
        return Users(self)

    @functools.cached_property
    def places(self) -> dict[str, int]:
        """Return each instruction's position by its name."""
        return {instruction.name: n for n, instruction in enumerate(self.instructions)}

    def __repr__(self) -> str:
        return f"<Computation {self.name}>"


def behind(computation: Computation, position: int, opcodes: Collection[str]) -> Instruction:
    """Follow first operands through these opcodes; return the first other instruction."""
    instruction = computation.instructions[position]
    while instruction.opcode in opcodes and instruction.operands:
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def parameter_element(computation: Computation, instruction: Instruction) -> int | None:
    """Return the index if an instruction is an element of a parameter, else None."""
    if instruction.opcode != "get-tuple-element" or len(instruction.operands) != 1:
        return None
    text = instruction.attribute("index") or ""
    of_parameter = computation.instructions[instruction.operands[0]].opcode == "parameter"
    return int(text) if of_parameter and text.isdecimal() and len(text) < 10 else None


class Users(list[list[int]]):
    """The users of each instruction of a computation, by position; each user is listed once."""

    def __init__(self, computation: Computation):
        self._instructions = computation.instructions
        self._elements: dict[int, dict[str | None, list[int]]] = {}
        super().__init__([] for _ in self._instructions)
        for position, instruction in enumerate(self._instructions):
            operands = instruction.operands
            for operand in operands if len(operands) < 2 else dict.fromkeys(operands):
                self[operand].append(position)

    def taking(self, position: int, element: int) -> list[int]:
        """Return a value's users; for a tuple, the users of one element or of the whole tuple."""
        if not self._instructions[position].shape.is_tuple:
            return self[position]
        if position not in self._elements:  # read all elements once: there may be thousands
            takers = self._elements.setdefault(position, {})
            for user in self[position]:
                taker = self._instructions[user]
                whole = taker.opcode != "get-tuple-element"
                takers.setdefault(None if whole else taker.attribute("index"), []).append(user)
        takers = self._elements[position]
        return sorted(takers.get(None, []) + takers.get(str(element), []))


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A parsed module.

    Attributes:
      name: the module's name.
      text: the parsed text.
      source: where the text came from, for messages.
      computations: by name, in the order of the text: callees before callers.
      entry: the entry computation.
      num_partitions, replica_count: from the header; None if it doesn't state them.
      header: the header's other attributes as text.
      frames: the stack-frame tables.
      unknown: unknown attributes, by the offset of their instruction.
      spans: the parts of the text that don't repeat an earlier computation.
    """

    name: str
    text: str
    source: str
    computations: dict[str, Computation]
    entry: Computation
    num_partitions: int | None
    replica_count: int | None
    header: dict[str, str]
    frames: FrameTable
    unknown: dict[int, str]
    spans: tuple[tuple[int, int], ...]

    @property
    def strange(self) -> dict[int, str]:
        """Return ``unknown``, by its former name."""
        warnings.warn("Module.strange is Module.unknown", DeprecationWarning, stacklevel=2)
        return self.unknown

    def mentions(self, *words: str) -> bool:
        """Return whether the text has one of these words outside of a repetition's metadata."""
        for word in words:
            if word in self.text and any(self.text.find(word, *span) >= 0 for span in self.spans):
                return True
        return False

    @functools.cached_property
    def flows(self) -> dict[str, Any]:
        """Return the cache of ``flow.of``: the nodes of computations, by name."""
        return {}

    @functools.cached_property
    def opcodes(self) -> dict[str, frozenset[str]]:
        """Return the set of opcodes of each computation, by name."""
        same: dict[frozenset[str], frozenset[str]] = {}  # many sets are equal, and are kept once
        opcodes: dict[str, frozenset[str]] = {}
        for name, computation in self.computations.items():
            if computation.original is not computation:
                opcodes[name] = opcodes[computation.original.name]
                continue
            own = frozenset([i.opcode for i in computation.instructions])
            opcodes[name] = same.setdefault(own, own)
        return opcodes

    def metadata(self, instruction: Instruction) -> Metadata:
        """Return an instruction's metadata; empty if it has none."""
        if instruction.text is not self.text:  # the reader added this instruction
            return Metadata()
        metadata = self.frames.by_start.get(instruction.start)
        if metadata is None:
            value = instruction.attribute("metadata")
            metadata = self.frames.metadata(value) if value else Metadata()
            self.frames.by_start[instruction.start] = metadata
        return metadata

    def __repr__(self) -> str:
        return f"<Module {self.name}: {len(self.computations)} computations>"


class FrameTable:
    """The FileNames, FunctionNames, FileLocations and StackFrames tables, looked up lazily."""

    _ROW = re.compile(r"(\d+)[ \t]+([^\n]*)\n")
    # The word boundary and possessive match avoid quadratic time on long words.
    _LOCATION = re.compile(r"\b(\w++)=(\d{1,18})")
    _OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
    _SOURCE_FILE = re.compile(r'source_file="((?:[^"\\]|\\.)*)"')
    _SOURCE_LINE = re.compile(r"source_line=(\d+)")
    _FRAME_ID = re.compile(r"stack_frame_id=(\d+)")

    def __init__(self, tables: dict[str, str]):
        self.by_start: dict[int, Metadata] = {}  # by the instruction's offset
        self._texts = tables
        self._rows: dict[str, dict[int, str]] = {}
        self._own: dict[int, tuple[Frame, int] | None] = {}  # a frame, and its parent's id
        self._frames: dict[int, tuple[Frame, ...]] = {}

    def _row(self, table: str, key: int) -> str:
        if table not in self._rows:
            rows = self._ROW.findall(self._texts.get(table, ""))
            self._rows[table] = {int(number[:9]): row for number, row in rows}
        return self._rows[table].get(key, "")

    def _fields(self, table: str, key: int) -> dict[str, int]:
        row = self._row(table, key)
        return {name: int(value) for name, value in self._LOCATION.findall(row)}

    def _string(self, table: str, key: int) -> str:
        return _unescape(self._row(table, key).strip().removeprefix('"').removesuffix('"'))

    def frames(self, frame_id: int) -> tuple[Frame, ...]:
        """Return the frames of a stack_frame_id, innermost first."""
        if frame_id in self._frames:
            return self._frames[frame_id]
        # JAX 0.8 to 0.10 print the parent's id plus one, with 0 for "no parent". The first frame,
        # which is the outermost, shows this: otherwise it would be its own parent.
        shift = int(self._fields("StackFrames", 1).get("parent_frame_id") == 1)
        frames: list[Frame] = []
        seen: set[int] = set()
        current = frame_id
        while current > 0 and current not in seen:
            seen.add(current)
            own = self._frame(current)
            if own is None:
                break
            frame, parent = own
            if frame not in frames[-1:]:  # else the frames differ only in the column
                frames.append(frame)
            current = parent - shift
        self._frames[frame_id] = tuple(frames)
        return self._frames[frame_id]

    def _frame(self, frame_id: int) -> tuple[Frame, int] | None:
        if frame_id not in self._own:
            row = self._fields("StackFrames", frame_id)
            location = self._fields("FileLocations", row.get("file_location_id", 0))
            frame = Frame(
                self._string("FileNames", location.get("file_name_id", 0)),
                location.get("line", 0),
                self._string("FunctionNames", location.get("function_name_id", 0)),
            )
            self._own[frame_id] = (frame, row.get("parent_frame_id", 0)) if location else None
        return self._own[frame_id]

    def metadata(self, text: str) -> Metadata:
        """Return the metadata for the text between the braces of ``metadata={...}``."""
        op_name = self._OP_NAME.search(text)
        frame_id = self._FRAME_ID.search(text)
        source_file = self._SOURCE_FILE.search(text)
        frames = self.frames(int(frame_id[1][:9])) if frame_id else ()
        if not frames and source_file:  # older notation, without stack-frame tables
            line = self._SOURCE_LINE.search(text)
            frames = (Frame(_unescape(source_file[1]), int(line[1][:9]) if line else 0),)
        return Metadata(_unescape(op_name[1]) if op_name else "", frames)

    def op_name(self, text: str) -> str:
        """Return the op_name only."""
        op_name = self._OP_NAME.search(text)
        return _unescape(op_name[1]) if op_name else ""


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text) if "\\" in text else text
