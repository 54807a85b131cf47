"""Random HLO modules: what one is made of, and the two texts of each.

The *judged* text is for the proof: it has layouts, attributes in any order, elided constants,
asynchronous forms, fusions. The *executed* text means the same in plain operations that XLA's CPU
compiler takes, over eight replicas, and counts where a collective's operand differs in its group.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any, Callable

DEVICES = 8
EQUAL = (0,) * DEVICES
OWN = tuple(range(DEVICES))


def join(*labels):
    """Give the classes of devices that are equal under all of some classes."""
    seen: dict[Any, int] = {}
    return tuple(seen.setdefault(key, len(seen)) for key in zip(*labels)) if labels else EQUAL


def within(coarse, fine):
    """Tell whether devices equal under ``coarse`` are so under ``fine``."""
    return join(coarse, fine) == join(coarse)


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array's shape."""

    kind: str
    dims: tuple[int, ...] = ()
    minor: tuple[int, ...] | None = None  # minor to major; row-major if None

    @property
    def count(self):
        """Count elements."""
        total = 1
        for size in self.dims:
            total *= size
        return total

    @property
    def order(self):
        """Give the layout, minor to major."""
        return tuple(reversed(range(len(self.dims)))) if self.minor is None else self.minor

    def plain(self):
        """Write it without a layout."""
        return f"{self.kind}[{','.join(map(str, self.dims))}]"

    def text(self):
        """Write it with its layout."""
        layout = "{" + ",".join(map(str, self.order)) + "}" if self.minor is not None else ""
        return self.plain() + layout


@dataclasses.dataclass(eq=False)
class Op:
    """An instruction.

    ``labels`` are classes of devices on which the value is sure to be equal, by the generator's own
    count: it keeps collectives out of branches that would hang. ``run`` writes the executed text
    where that is not the judged one.
    """

    name: str
    opcode: str
    shape: Any  # a Shape, or a list of them
    operands: list[Op]
    attributes: list[tuple[str, str]]
    literal: str = ""
    labels: tuple = OWN
    run: Callable | None = None
    callees: tuple = ()
    channel: Any = None
    packed: tuple = ()  # what a loop or branches take, tuple by tuple


@dataclasses.dataclass(eq=False)
class Computation:
    """A computation. A ``tupled`` one takes a tuple, as loops and branches do."""

    name: str
    params: list[Op]
    tupled: bool = False
    ops: list[Op] = dataclasses.field(default_factory=list)
    results: list[Op] = dataclasses.field(default_factory=list)
    lone: bool = False  # returns an array, not a tuple
    boxed: bool = False  # in the judged text a fusion whose one operand is a tuple

    def result_shape(self):
        """Give what it returns."""
        shapes = [r.shape for r in self.results]
        return shapes[0] if self.lone else shapes


@dataclasses.dataclass
class Channel:
    """How a collective connects devices: its groups in flattened ids, or pairs."""

    number: int
    groups: list[list[int]] | None
    pairs: list[tuple[int, int]] | None = None


def shape_text(shape, plain=False):
    """Write a shape or a tuple of shapes."""
    if isinstance(shape, list):
        return "(" + ", ".join(shape_text(s, plain) for s in shape) + ")"
    return shape.plain() if plain else shape.text()


class Judged:
    """Writes the text for the proof."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.bare = self.random.random() < 0.2  # names without %

    def name(self, name):
        """Write a name."""
        return name if self.bare else "%" + name

    def op(self, op: Op, root=False):
        """Write an instruction."""
        inside = op.literal or ", ".join(self.name(o.name) for o in op.operands)
        attributes = list(op.attributes)
        if self.random.random() < 0.3:
            attributes.append(("metadata", '{op_name="jit(f)/add" source_file="a=b, c" }'))
        self.random.shuffle(attributes)
        text = "".join(f", {k}={v}" for k, v in attributes)
        mark = "ROOT " if root else ""
        return f"  {mark}{self.name(op.name)} = {shape_text(op.shape)} {op.opcode}({inside}){text}"

    def computation(self, c: Computation, entry=False):
        """Write a computation."""
        lines = []
        if c.tupled or c.boxed:
            whole = f"{c.name}.p"
            shape = shape_text([p.shape for p in c.params])
            lines.append(f"  {self.name(whole)} = {shape} parameter(0)")
            for k, p in enumerate(c.params):
                lines.append(
                    f"  {self.name(p.name)} = {shape_text(p.shape)} "
                    f"get-tuple-element({self.name(whole)}), index={k}"
                )
        else:
            lines += [self.op(p) for p in c.params]
        lines += [self.op(o, root=c.lone and o is c.results[0]) for o in c.ops]
        if not c.lone:
            inside = ", ".join(self.name(r.name) for r in c.results)
            lines.append(
                f"  ROOT {self.name(c.name + '.r')} = {shape_text(c.result_shape())} "
                f"tuple({inside})"
            )
        head = "ENTRY " if entry else ""
        return f"{head}{self.name(c.name)} () -> f32[] {{\n" + "\n".join(lines) + "\n}\n"

    def module(self, computations, entry, header, regions):
        """Write a module."""
        parts = [region_text(o, k) for o, k in sorted(regions)]
        parts += [self.computation(c) for c in computations]
        # Or it would be refused where it holds no collective: as a text before partitioning.
        header = f"HloModule m, is_scheduled=true, {header}\n\n"
        return header + "\n".join([*parts, self.computation(entry, True)])


def region_text(opcode, kind):
    """Write the computation of one operation on two scalars."""
    name = f"{opcode}_{kind}"
    result, expression = kind, opcode
    if opcode == "less":
        result, expression = "pred", "compare"
    tail = ", direction=LT" if opcode == "less" else ""
    if opcode == "own":
        return (
            f"%{name} {{\n  %a_{name} = {kind}[] parameter(0)\n"
            f"  %b_{name} = {kind}[] parameter(1)\n  %d_{name} = u32[] replica-id()\n"
            f"  %e_{name} = u32[] partition-id()\n  %f_{name} = u32[] add(%d_{name}, %e_{name})\n"
            f"  ROOT %c_{name} = {kind}[] convert(%f_{name})\n}}\n"
        )
    return (
        f"%{name} {{\n  %a_{name} = {kind}[] parameter(0)\n  %b_{name} = {kind}[] parameter(1)\n"
        f"  ROOT %c_{name} = {result}[] {expression}(%a_{name}, %b_{name}){tail}\n}}\n"
    )


class Executed:
    """Writes the text that runs: plain operations, eight replicas, and a count of differences."""

    def __init__(self, channels: int, regions=()):
        self.channels = max(1, channels)
        self.lines: list[str] = []
        self.fresh = 0
        self.seen = f"s32[{self.channels}]"
        self.regions: set[tuple[str, str]] = set(regions)
        self.state = ""

    def line(self, shape, expression, name=None):
        """Append an instruction; give its name."""
        if name is None:
            self.fresh += 1
            name = f"x{self.fresh}"
        text = shape if isinstance(shape, str) else shape_text(shape, plain=True)
        self.lines.append(f"  %{name} = {text} {expression}")
        return name

    def region(self, opcode, kind):
        """Name a computation of one operation on two scalars."""
        self.regions.add((opcode, kind))
        return f"%{opcode}_{kind}"

    def op(self, op: Op):
        """Write an instruction, and what checks it."""
        if op.channel is not None:
            self.check(op)
        if op.callees:
            return self.called(op)
        if op.run is not None:
            return op.run(self, op)
        inside = op.literal or ", ".join("%" + o.name for o in op.operands)
        text = "".join(f", {k}={v}" for k, v in op.attributes if k != "control-predecessors")
        self.line(op.shape, f"{op.opcode}({inside}){text}", op.name)

    def called(self, op: Op):
        """Pass on the counts to what is called, and take them back."""
        shapes = op.shape if isinstance(op.shape, list) else [op.shape]
        back = [*map(lambda s: shape_text(s, True), shapes), self.seen]
        result = "(" + ", ".join(back) + ")"
        if op.opcode in ("while", "conditional"):
            packed = []
            for values in op.packed:
                inner = [*[shape_text(v.shape, True) for v in values], self.seen]
                names = ", ".join("%" + n for n in [*[v.name for v in values], self.state])
                packed.append(self.line("(" + ", ".join(inner) + ")", f"tuple({names})"))
            if op.opcode == "while":
                condition, body = op.callees
                expression = f"while(%{packed[0]}), condition=%{condition.name}, body=%{body.name}"
            else:
                which = op.operands[0]
                names = ", ".join("%" + n for n in [which.name, *packed])
                branches = ", ".join("%" + c.name for c in op.callees)
                if which.shape.kind == "pred":
                    first, second = op.callees
                    key = f"true_computation=%{first.name}, false_computation=%{second.name}"
                else:
                    key = f"branch_computations={{{branches}}}"
                expression = f"conditional({names}), {key}"
        else:
            names = ", ".join("%" + n for n in [*[o.name for o in op.packed[0]], self.state])
            expression = f"call({names}), to_apply=%{op.callees[0].name}"
        whole = self.line(result, expression)
        if isinstance(op.shape, list):
            parts = []
            for k, shape in enumerate(shapes):
                parts.append(self.line(shape, f"get-tuple-element(%{whole}), index={k}"))
            self.line(op.shape, f"tuple({', '.join('%' + p for p in parts)})", op.name)
        else:
            self.line(op.shape, f"get-tuple-element(%{whole}), index=0", op.name)
        self.state = self.line(self.seen, f"get-tuple-element(%{whole}), index={len(shapes)}")

    def bits(self, value: Op):
        """Give a value's bits as integers; the name and the shape."""
        kind = value.shape.kind
        name, dims = value.name, value.shape.dims
        raw = {"f32": "u32", "bf16": "u16", "f16": "u16"}.get(kind)
        if raw is not None:
            name = self.line(Shape(raw, dims), f"bitcast-convert(%{name})")
            kind = raw
        wide = {"u16": "u32", "pred": "u32", "u8": "u32", "s8": "s32", "s16": "s32"}.get(kind)
        if wide is not None:
            name = self.line(Shape(wide, dims), f"convert(%{name})")
            kind = wide
        return name, Shape(kind, dims)

    def check(self, op: Op):
        """Count one where an operand is not the same in its group."""
        channel = op.channel
        flags = []
        for operand in op.operands:
            name, shape = self.bits(operand)
            if channel.pairs is not None:
                pairs = "{" + ",".join("{%d,%d}" % p for p in channel.pairs) + "}"
                moved = self.line(
                    shape, f"collective-permute(%{name}), source_target_pairs={pairs}"
                )
                flags.append((moved, name, shape, {t for _, t in channel.pairs}))
            else:
                ends = []
                for most in ("minimum", "maximum"):
                    ends.append(
                        self.line(
                            shape,
                            f"all-reduce(%{name}), {groups_text(channel)}, "
                            f"to_apply={self.region(most, shape.kind)}",
                        )
                    )
                flags.append((ends[0], ends[1], shape, set(range(DEVICES))))
        for low, high, shape, members in flags:
            differ = self.line(Shape("pred", shape.dims), f"compare(%{low}, %{high}), direction=NE")
            count = self.line(Shape("s32", shape.dims), f"convert(%{differ})")
            zero = self.line("s32[]", "constant(0)")
            dims = "{" + ",".join(map(str, range(len(shape.dims)))) + "}"
            total = self.line(
                "s32[]",
                f"reduce(%{count}, %{zero}), dimensions={dims}, "
                f"to_apply={self.region('maximum', 's32')}",
            )
            table = "{" + ",".join(str(int(d in members)) for d in range(DEVICES)) + "}"
            which = self.line("s32[8]", f"constant({table})")
            device = self.line("u32[]", "replica-id()")
            mine = self.line(
                "s32[1]", f"dynamic-slice(%{which}, %{device}), dynamic_slice_sizes={{1}}"
            )
            mine = self.line("s32[]", f"reshape(%{mine})")
            flag = self.line("s32[]", f"multiply(%{mine}, %{total})")
            spread = self.line(self.seen, f"broadcast(%{flag}), dimensions={{}}")
            hot = ",".join(str(int(k == channel.number)) for k in range(self.channels))
            place = self.line(self.seen, f"constant({{{hot}}})")
            added = self.line(self.seen, f"multiply(%{spread}, %{place})")
            self.state = self.line(self.seen, f"add(%{self.state}, %{added})")

    def computation(self, c: Computation, condition=False):
        """Write a computation that takes and returns the counts."""
        start = len(self.lines)
        if c.tupled:
            inner = [*[shape_text(p.shape, True) for p in c.params], self.seen]
            whole = self.line("(" + ", ".join(inner) + ")", "parameter(0)")
            for k, p in enumerate(c.params):
                self.line(p.shape, f"get-tuple-element(%{whole}), index={k}", p.name)
            self.state = self.line(self.seen, f"get-tuple-element(%{whole}), index={len(c.params)}")
        else:
            for k, p in enumerate(c.params):
                self.line(p.shape, f"parameter({k})", p.name)
            self.state = self.line(self.seen, f"parameter({len(c.params)})")
        for op in c.ops:
            self.op(op)
        if condition:
            self.line(c.results[0].shape, f"copy(%{c.results[0].name})")
        else:
            self.root(c.results)
        self.lines[-1] = self.lines[-1].replace("  %", "  ROOT %", 1)
        body = "\n".join(self.lines[start:])
        del self.lines[start:]
        return f"%{c.name} {{\n{body}\n}}\n"

    def root(self, results):
        """Write a tuple of the results and the counts."""
        shapes = [*[shape_text(r.shape, True) for r in results], self.seen]
        names = ", ".join("%" + n for n in [*[r.name for r in results], self.state])
        return self.line("(" + ", ".join(shapes) + ")", f"tuple({names})")

    def module(self, computations, conditions, entry):
        """Write a module whose parameters have a leading axis of one."""
        parts = [self.computation(c, c in conditions) for c in computations]
        for k, p in enumerate(entry.params):
            raw = self.line(Shape(p.shape.kind, (1, *p.shape.dims)), f"parameter({k})")
            self.line(p.shape, f"reshape(%{raw})", p.name)
        zero = self.line("s32[]", "constant(0)")
        self.state = self.line(self.seen, f"broadcast(%{zero}), dimensions={{}}")
        for op in entry.ops:
            self.op(op)
        self.root(entry.results)
        self.lines[-1] = self.lines[-1].replace("  %", "  ROOT %", 1)
        body = "\n".join(self.lines)
        regions = [region_text(o, k) for o, k in sorted(self.regions)]
        return (
            "HloModule m, replica_count=8\n\n"
            + "\n".join([*regions, *parts])
            + f"\nENTRY %entry {{\n{body}\n}}\n"
        )


def groups_text(channel: Channel) -> str:
    """Write groups as flattened ids."""
    rows = "{" + ",".join("{" + ",".join(map(str, g)) + "}" for g in channel.groups) + "}"
    return f"replica_groups={rows}"


def braces(numbers):
    """Write ``{1,2}``."""
    return "{" + ",".join(map(str, numbers)) + "}"
