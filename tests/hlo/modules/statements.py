"""The instructions of a random module that stay on one device."""

from __future__ import annotations

from . import collectives, control, oddities
from .forms import EQUAL, Op, Shape, braces, join

FLOATS = ("f32", "bf16")
SIGNED = ("s8", "s16", "s32", "s64")
UNSIGNED = ("u8", "u32", "u64")
WIDTH = {"s8": 8, "s16": 16, "s32": 32, "s64": 64, "u8": 8, "u32": 32, "u64": 64}

UNARY_FLOAT = (
    "abs acos acosh asin asinh atanh cbrt ceil cosine cosh erf exponential exponential-minus-one "
    "floor log log-plus-one logistic negate round-nearest-afz round-nearest-even rsqrt sign sine "
    "sinh sqrt tan tanh"
).split()
UNKNOWN_TO_CPU = "acos acosh asin asinh atanh cosh sinh".split()
BINARY_FLOAT = "add atan2 divide maximum minimum multiply power remainder subtract".split()
UNARY_INT = "abs copy negate not popcnt count-leading-zeros sign".split()
BINARY_INT = (
    "add subtract multiply divide remainder maximum minimum and or xor shift-left "
    "shift-right-arithmetic shift-right-logical mulhi"
).split()


class Statements(collectives.Collectives, control.Control, oddities.Oddities):
    """Draws instructions; mixed into ``Block``."""

    SIMPLE = (
        ["number"] * 7
        + ["elementwise"] * 3
        + ["choose"] * 3
        + ["rearrange"] * 4
        + ["relay"] * 2
        + ["look_up"] * 5
        + ["constant"] * 2
        + ["reduced", "deterministic", "passing", "source", "opaque", "pack"]
        + ["beyond"]
        + ["table"] * 3
    )
    CONTROL = ["loop"] * 2 + ["branch"] * 3 + ["call"] * 3 + ["again", "unseen"]

    def number_of(self, value: Op) -> Op:
        """Make small integers of a value's kind again, by a constant."""
        return value

    def mate(self, value: Op) -> Op:
        """Find or make another value of one's type and sizes."""
        other = self.take(lambda s: (s.kind, s.dims) == (value.shape.kind, value.shape.dims))
        if other is value or self.random.random() < 0.3:
            return self.literal(value.shape)
        return other

    def literal(self, shape: Shape, elided=False, values=None, row_major=False) -> Op:
        """Add a constant."""
        if values is None:
            values = [self.element(shape.kind) for _ in range(shape.count)]
            if self.random.random() < 0.3:
                values = [values[0]] * shape.count
        text = nested(values, shape.dims)
        layout = None if row_major else self.layout(shape.dims)
        plain = Shape(shape.kind, shape.dims, layout)
        if not elided:
            return self.add("constant", plain, [], labels=EQUAL, literal=text)

        def run(executed, op):
            executed.line(op.shape, f"constant({text})", op.name)

        return self.add("constant", plain, [], labels=EQUAL, literal="{...}", run=run)

    def element(self, kind):
        """Draw one number's text."""
        if kind in FLOATS:
            return f"{self.random.uniform(-3, 3):.3f}"
        if kind == "pred":
            return self.random.choice(["true", "false"])
        if self.random.random() < 0.8:
            low = 0 if kind in UNSIGNED else -3
            return str(self.random.randint(low, 7))
        bits = WIDTH[kind]
        ends = [0, 1, 2**bits - 1, 2 ** (bits - 1), 2 ** (bits - 1) - 1, min(200, 2**bits - 1)]
        if kind in SIGNED:
            ends = [
                -1,
                2 ** (bits - 1) - 1,
                -(2 ** (bits - 1)),
                min(2**33 + 1, 2 ** (bits - 1) - 2),
            ]
        return str(self.random.choice(ends))

    def layout(self, dims):
        """Draw a layout, often none."""
        if len(dims) < 2 or self.random.random() < 0.6:
            return None
        order = list(range(len(dims)))
        self.random.shuffle(order)
        return tuple(order)

    def like(self, value, kind=None, dims=None):
        """Give a value's shape with another type or other sizes."""
        dims = value.shape.dims if dims is None else dims
        return Shape(kind or value.shape.kind, dims, self.layout(dims))

    def device_number(self) -> Op:
        """Add partition-id or replica-id."""
        machine = self.module
        which = self.random.choice(["partition-id"] * 3 + ["replica-id"])

        def run(executed, op):
            count = executed.line("u32[]", f"constant({machine.partitions})")
            device = executed.line("u32[]", "replica-id()")
            opcode = "remainder" if which == "partition-id" else "divide"
            executed.line(op.shape, f"{opcode}(%{device}, %{count})", op.name)

        p = machine.partitions
        ids = tuple(d % p if which == "partition-id" else d // p for d in range(8))
        return self.add(which, Shape("u32"), [], labels=join(ids), run=run)

    # -- statements --------------------------------------------------------------------------

    def number(self):
        """Integer arithmetic."""
        x = self.take(lambda s: s.kind in WIDTH or s.kind == "pred")
        if x is None or self.random.random() < 0.15:
            x = self.device_number()
        kind = x.shape.kind
        roll = self.random.random()
        if kind == "pred":
            if roll < 0.3:
                self.add("convert", self.like(x, self.random.choice(list(WIDTH))), [x])
            elif roll < 0.5:
                self.add("not", self.like(x), [x])
            else:
                opcode = self.random.choice(["and", "or", "xor"])
                self.add(opcode, self.like(x), [x, self.mate(x)])
        elif roll < 0.15:
            opcode = self.random.choice(UNARY_INT)
            if kind in UNSIGNED and opcode in ("abs", "sign"):
                opcode = "not"
            self.add(opcode, self.like(x), [x])
        elif roll < 0.35:
            self.add("convert", self.like(x, self.random.choice([*WIDTH, "pred", "s32"])), [x])
        elif roll < 0.5:
            direction = self.random.choice(["EQ", "NE", "LT", "LE", "GT", "GE"])
            attributes = [("direction", direction)]
            if self.random.random() < 0.3:
                attributes.append(("type", "SIGNED" if kind in SIGNED else "UNSIGNED"))
            self.add("compare", self.like(x, "pred"), [x, self.mate(x)], attributes)
        else:
            operands = [x, self.mate(x)]
            if self.random.random() < 0.6:
                small = [str(self.random.choice([1, 2, 2, 4, 3]))] * x.shape.count
                operands[1] = self.literal(x.shape, values=small)
            elif self.random.random() < 0.3:
                operands.reverse()
            opcode = self.random.choice(BINARY_INT)
            if opcode in ("divide", "remainder") and kind in SIGNED:
                # The lowest number by -1 traps, in XLA's own folding of constants too.
                one = self.literal(x.shape, values=["1"] * x.shape.count, row_major=True)
                operands[1] = self.add("maximum", self.like(x), [operands[1], one])
            run = oddities.greater if opcode == "mulhi" else None
            self.add(opcode, self.like(x), operands, run=run)

    def elementwise(self):
        """Floats, element by element."""
        x = self.take(lambda s: s.kind in FLOATS) or self.literal(Shape("f32", (8,)))
        roll = self.random.random()
        if roll < 0.4:
            opcode = self.random.choice(UNARY_FLOAT)
            self.add(
                opcode, self.like(x), [x], run=oddities.each if opcode in UNKNOWN_TO_CPU else None
            )
        elif roll < 0.8:
            self.add(self.random.choice(BINARY_FLOAT), self.like(x), [x, self.mate(x)])
        elif roll < 0.85:
            self.add("is-finite", self.like(x, "pred"), [x])
        elif roll < 0.9:
            attributes = [("exponent_bits", "5"), ("mantissa_bits", "6")]
            self.add("reduce-precision", self.like(x), [x], attributes)
        elif roll < 0.95 and x.shape.kind == "f32":
            y = self.mate(x)
            made = self.add("complex", self.like(x, "c64"), [x, y], keep=False)
            self.add(self.random.choice(["real", "imag"]), self.like(x), [made])
        else:
            kind = "u32" if x.shape.kind == "f32" else "s16"
            self.add("bitcast-convert", self.like(x, kind), [x])

    def choose(self):
        """Select, clamp, convert."""
        x = self.take()
        y = self.mate(x)
        roll = self.random.random()
        if roll < 0.6:
            flag = self.take(lambda s: s.kind == "pred" and s.dims in ((), x.shape.dims))
            if flag is None:
                i = self.device_number()
                two = self.literal(i.shape, values=[self.random.choice("124")])
                rest = self.add("and", i.shape, [i, two])
                flag = self.add("convert", Shape("pred"), [rest])
            self.add("select", self.like(x), [flag, x, y])
        elif roll < 0.8 and x.shape.kind != "pred":
            low, high = self.literal(Shape(x.shape.kind)), self.literal(Shape(x.shape.kind))
            self.add("clamp", self.like(x), [low, x, high])
        else:
            self.add("convert", self.like(x, "f32"), [x])

    def rearrange(self):
        """Elements to other places."""
        x = self.take(lambda s: s.dims)
        if x is None:
            return
        dims = x.shape.dims
        kind = self.random.randrange(8)
        if kind == 0:
            cuts, sizes = [], []
            for size in dims:
                start = self.random.randrange(size)
                stop = self.random.randint(start + 1, size)
                step = self.random.choice([1, 1, 1, 2])
                if self.random.random() < 0.5:
                    start, stop, step = 0, size, 1
                sizes.append(-(-(stop - start) // step))
                cuts.append(f"[{start}:{stop}{f':{step}' if step > 1 else ''}]")
            self.add(
                "slice", self.like(x, dims=tuple(sizes)), [x], [("slice", "{%s}" % ", ".join(cuts))]
            )
        elif kind == 1:
            axis = self.random.randrange(len(dims))
            parts = [x, *[self.mate(x) for _ in range(self.random.randint(1, 2))]]
            self.random.shuffle(parts)
            sizes = tuple(d * len(parts) if k == axis else d for k, d in enumerate(dims))
            self.add(
                "concatenate", self.like(x, dims=sizes), parts, [("dimensions", braces([axis]))]
            )
        elif kind == 2:
            parts, sizes = [], []
            for size in dims:
                low, high = self.random.choice([(0, 0), (0, 2), (1, 0), (1, 3), (-1, 2)])
                inner = self.random.choice([0, 0, 0, 1])
                sizes.append(max(0, size + (size - 1) * inner + low + high))
                parts.append(f"{low}_{high}" + (f"_{inner}" if inner else ""))
            if 0 in sizes:
                return
            fill = self.literal(Shape(x.shape.kind))
            self.add(
                "pad", self.like(x, dims=tuple(sizes)), [x, fill], [("padding", "x".join(parts))]
            )
        elif kind == 3:
            axes = [k for k in range(len(dims)) if self.random.random() < 0.6]
            self.add("reverse", self.like(x), [x], [("dimensions", braces(axes))])
        elif kind == 4:
            order = list(range(len(dims)))
            self.random.shuffle(order)
            sizes = tuple(dims[k] for k in order)
            self.add("transpose", self.like(x, dims=sizes), [x], [("dimensions", braces(order))])
        elif kind == 5:
            self.add("reshape", self.like(x, dims=self.refit(x.shape.count)), [x])
        else:
            extra = self.random.randint(0, 1)
            places = list(range(len(dims) + extra))
            self.random.shuffle(places)
            sizes = [2] * (len(dims) + extra)
            for place, size in zip(places, dims):
                sizes[place] = size
            attributes = [("dimensions", braces(places[: len(dims)]))]
            self.add("broadcast", self.like(x, dims=tuple(sizes)), [x], attributes)

    def refit(self, count):
        """Draw sizes for a number of elements."""
        options = [(count,), (1, count), (count, 1)]
        options += [(n, count // n) for n in (2, 4, 8) if count % n == 0]
        if count == 1:
            options.append(())
        return self.random.choice(options)

    def relay(self):
        """A bitcast: the same bytes under another shape or layout."""
        x = self.take(lambda s: s.dims)
        if x is not None:
            self.bitcast(x)

    def bitcast(self, x: Op):
        """Add a bitcast."""
        dims = x.shape.dims if self.random.random() < 0.5 else self.refit(x.shape.count)
        order = list(range(len(dims)))
        if self.random.random() < 0.7:
            self.random.shuffle(order)
        else:
            order.reverse()
        shape = Shape(x.shape.kind, dims, tuple(order))

        def run(executed, op):
            before, after = op.operands[0].shape, op.shape
            major = tuple(reversed(before.order))
            value = executed.line(
                Shape(before.kind, tuple(before.dims[k] for k in major)),
                f"transpose(%{op.operands[0].name}), dimensions={braces(major)}",
            )
            major = tuple(reversed(after.order))
            value = executed.line(
                Shape(after.kind, tuple(after.dims[k] for k in major)), f"reshape(%{value})"
            )
            back = [major.index(k) for k in range(len(major))]
            executed.line(after, f"transpose(%{value}), dimensions={braces(back)}", op.name)

        self.add("bitcast", shape, [x], run=run)

    def index(self) -> Op:
        """Choose an index, often one that depends on the device, sometimes beyond all bounds."""
        if self.random.random() < 0.1:
            return self.wide_index()
        found = self.take(lambda s: s.kind in WIDTH and s.kind != "s16" and not s.dims)
        if found is None or self.random.random() < 0.3:
            return self.literal(Shape(self.random.choice(["s32", "u32", "s64", "u64", "u8"])))
        return found

    def wide_index(self) -> Op:
        """Add an index that is zero on some devices and beyond all bounds on others."""
        kind = self.random.choice(["u64", "u64", "s64", "u8", "u32"])
        device = self.device_number()
        bit = self.literal(device.shape, values=[self.pick("124")])
        rest = self.add("and", device.shape, [device, bit])
        flag = self.add("convert", Shape("pred"), [rest])
        bits = WIDTH[kind] - (kind in SIGNED)
        wide = self.pick([2**bits - 1, 2 ** (bits - 1), 2 ** (bits // 2) + 1])
        ends = [self.literal(Shape(kind), values=[str(v)]) for v in (wide, 0)]
        return self.add("select", Shape(kind), [flag, *ends])

    def beyond(self):
        """A slice at such an index."""
        x = self.take(lambda s: len(s.dims) == 1)
        if x is None or self.random.random() < 0.5:
            x = self.literal(Shape("f32", (8,)), values=[str(k + 0.5) for k in range(8)])
        attributes = [("dynamic_slice_sizes", "{1}")]
        self.add("dynamic-slice", Shape(x.shape.kind, (1,)), [x, self.wide_index()], attributes)

    def look_up(self):
        """Slices that move."""
        x = self.take(lambda s: s.dims)
        if x is None:
            return
        first = self.index()
        indices = []
        for _ in x.shape.dims:
            same = self.take(lambda s: s.kind == first.shape.kind and not s.dims)
            indices.append(self.random.choice([first, same or first]))
            if self.random.random() < 0.5:
                indices[-1] = self.literal(first.shape)
        sizes = tuple(self.random.choice([1, d, max(1, d // 2)]) for d in x.shape.dims)
        if self.random.random() < 0.6:
            attributes = [("dynamic_slice_sizes", braces(sizes))]
            self.add("dynamic-slice", self.like(x, dims=sizes), [x, *indices], attributes)
        else:
            update = self.take(lambda s: s.kind == x.shape.kind and s.dims == sizes)
            update = update or self.literal(Shape(x.shape.kind, sizes))
            self.add("dynamic-update-slice", self.like(x), [x, update, *indices])

    def table(self):
        """A constant table, laid out anew and looked up by the device: how axis_index looks."""
        kind = self.random.choice(["s32", "u32", "s8"])
        dims = self.random.choice([(8,), (2, 8), (8, 2), (8, 8)])
        rows = [[0, 0, 1, 1, 2, 2, 3, 3], [0, 1] * 4, [0] * 4 + [1] * 4, [3] * 8, range(8)]
        values = [v for _ in range(max(1, Shape(kind, dims).count // 8)) for v in self.pick(rows)]
        made = self.literal(Shape(kind, dims), values=[str(v) for v in values], row_major=True)
        for _ in range(self.random.randint(0, 2)):
            if self.random.random() < 0.5:
                self.bitcast(made)
            else:
                places = list(range(len(made.shape.dims)))
                self.random.shuffle(places)
                sizes = [0] * len(places)
                for place, size in zip(places, made.shape.dims):
                    sizes[place] = size
                attributes = [("dimensions", braces(places))]
                shape = Shape(kind, tuple(sizes))
                self.add("broadcast", shape, [made], attributes)
            made = self.pool[-1]
        device = self.device_number()
        indices = [self.literal(device.shape, values=["0"]) for _ in made.shape.dims]
        indices[self.random.randrange(len(indices))] = device
        ones = (1,) * len(indices)
        part = self.add(
            "dynamic-slice",
            Shape(kind, ones),
            [made, *indices],
            [("dynamic_slice_sizes", braces(ones))],
        )
        self.add("reshape", Shape(kind), [part])

    def pick(self, options):
        """Choose one of some."""
        return self.random.choice(options)

    def constant(self):
        """A constant, elided where it is large, as XLA prints it."""
        kind = self.random.choice(["f32", "s32", "u64", "pred", "s8", "bf16"])
        if self.random.random() < 0.3:
            shape = Shape(self.random.choice(["s32", "u32", "s8", "f32"]), (2, 8))
            axis = self.random.randrange(2)
            self.add("iota", shape, [], [("iota_dimension", str(axis))], labels=EQUAL)
            return
        dims = self.random.choice([(), (8,), (2, 8), (4, 2)])
        count = Shape(kind, dims).count
        self.literal(Shape(kind, dims), elided=count > 7 and self.random.random() < 0.6)

    def reduced(self):
        """Reductions, products, sorting, gathering."""
        x = self.take(lambda s: s.dims and s.kind in ("f32", "s32"))
        if x is None:
            return
        kind, dims = x.shape.kind, x.shape.dims
        roll = self.random.randrange(6)
        if roll <= 1:
            axes = [k for k in range(len(dims)) if self.random.random() < 0.6]
            opcode = self.random.choice(["add", "maximum", "multiply"])
            zero = self.literal(Shape(kind))
            sizes = tuple(d for k, d in enumerate(dims) if k not in axes)
            region = self.region(opcode, kind)
            attributes = [("dimensions", braces(axes)), ("to_apply", region)]
            self.add("reduce", self.like(x, dims=sizes), [x, zero], attributes)
        elif roll == 2:
            axis = self.random.randrange(len(dims))
            region = self.less(kind)
            attributes = [("dimensions", braces([axis])), ("to_apply", region)]
            self.add("sort", self.like(x), [x], [*attributes, ("is_stable", "true")])
        elif roll == 3 and len(dims) == 2 and kind == "f32":
            y = self.mate(x)
            sizes = (dims[0], dims[0])
            attributes = [("lhs_contracting_dims", "{1}"), ("rhs_contracting_dims", "{1}")]
            self.add("dot", self.like(x, dims=sizes), [x, y], attributes)
        elif roll == 4 and len(dims) == 1:
            where = self.take(lambda s: s.kind == "s32" and len(s.dims) == 1)
            where = where or self.literal(Shape("s32", (4,)))
            attributes = [
                ("offset_dims", "{}"),
                ("collapsed_slice_dims", "{0}"),
                ("start_index_map", "{0}"),
                ("index_vector_dim", "1"),
                ("slice_sizes", "{1}"),
            ]
            self.add("gather", self.like(x, dims=where.shape.dims), [x, where], attributes)
        else:
            key = self.literal(Shape("u64", (2,)))
            shape = [Shape("u64", (2,)), Shape("u32", (8,))]
            attributes = [("algorithm", "rng_three_fry")]
            bits = self.add("rng-bit-generator", shape, [key], attributes, keep=False)
            self.add("get-tuple-element", shape[1], [bits], [("index", "1")])


def nested(values, dims):
    """Write a constant's numbers."""
    if not dims:
        return str(values[0])
    size = len(values) // dims[0] if dims[0] else 0
    parts = [nested(values[k * size : (k + 1) * size], dims[1:]) for k in range(dims[0])]
    return "{" + ", ".join(parts) + "}"
