"""The instructions of a random module that XLA's CPU compiler takes in another form, or not at all.

What runs in their place is equal on two devices where they are, by HLO's definition of them.
"""

from __future__ import annotations

from .forms import DEVICES, OWN, Channel, Op, Shape, braces

FLOATS = ("f32", "bf16")

# Deterministic functions that XLA's CPU compiler doesn't take as they stand here: what runs is a
# sum of their operands. That they are functions of their operands is HLO's definition of them.
STAND_INS = {
    "batch-norm-grad": ", epsilon=0.001, feature_index=0",
    "batch-norm-inference": ", epsilon=0.001, feature_index=0",
    "batch-norm-training": ", epsilon=0.001, feature_index=0",
    "cholesky": ", lower=true",
    "convolution": ", dim_labels=b0f_0io->b0f, window={size=1}",
    "dynamic-reshape": "",
    "fft": ", fft_type=RFFT, fft_length={8}",
    "get-dimension-size": ", dimensions={0}",
    "ragged-dot": ", lhs_contracting_dims={1}",
    "scaled-dot": "",
    "select-and-scatter": "",
    "set-dimension-size": ", dimensions={0}",
    "stochastic-convert": "",
    "topk": ", k=8, largest=true",
    "triangular-solve": ", left_side=true",
    "reduce-window": ", window={size=1}",
    "scatter": ", update_window_dims={}",
    "map": ", dimensions={0}",
}


def mixed(text, op: Op, operands=None):
    """Write a sum of all operands' elements, as numbers of the result's type."""
    total = text.line("f32[]", "constant(0.5)")
    for operand in operands if operands is not None else op.operands:
        if not isinstance(operand.shape, Shape):
            continue
        dims = operand.shape.dims
        value = text.line(Shape("f32", dims), f"convert(%{operand.name})")
        zero = text.line("f32[]", "constant(0)")
        value = text.line(
            "f32[]",
            f"reduce(%{value}, %{zero}), dimensions={braces(range(len(dims)))}, "
            f"to_apply={text.region('add', 'f32')}",
        )
        value = text.line("f32[]", f"cosine(%{value})")
        total = text.line("f32[]", f"add(%{total}, %{value})")
    wide = text.line(Shape("f32", op.shape.dims), f"broadcast(%{total}), dimensions={{}}")
    if op.shape.kind not in FLOATS:
        scale = text.line("f32[]", "constant(16)")
        scale = text.line(Shape("f32", op.shape.dims), f"broadcast(%{scale}), dimensions={{}}")
        wide = text.line(Shape("f32", op.shape.dims), f"multiply(%{wide}, %{scale})")
        wide = text.line(Shape("s32", op.shape.dims), f"convert(%{wide})")
    text.line(op.shape, f"convert(%{wide})", op.name)


def each(text, op: Op):
    """Write the cosines of the elements, for a function of each."""
    text.line(op.shape, f"cosine(%{op.operands[0].name})", op.name)


def greater(text, op: Op):
    """Write the greater ones of the elements, for a function of each pair."""
    one, other = (f"%{operand.name}" for operand in op.operands)
    text.line(op.shape, f"maximum({one}, {other})", op.name)


def into(text, op: Op):
    """Write what a kernel makes of its first operand, in the second one's memory."""
    mixed(text, op, op.operands[:1])


def passed(text, op: Op):
    """Write a copy of the first operand."""
    text.line(op.shape, f"copy(%{op.operands[0].name})", op.name)


def nothing(text, op: Op):
    """Write nothing: the value has no use in the executed text."""


def own(text, op: Op):
    """Write a value that each device has for itself."""
    device = text.line("u32[]", "replica-id()")
    value = text.line("f32[]", f"convert(%{device})")
    value = text.line(Shape("f32", op.shape.dims), f"broadcast(%{value}), dimensions={{}}")
    text.line(op.shape, f"convert(%{value})", op.name)


def split(text):
    """Split attributes at commas outside of braces."""
    found, depth, current = [], 0, ""
    for letter in text.removeprefix(", "):
        depth += (letter == "{") - (letter == "}")
        if letter == "," and not depth:
            found.append(current.strip())
            current = ""
        else:
            current += letter
    return [*found, current.strip()] if current.strip() else found


class Oddities:
    """Draws them; mixed into ``Block``."""

    def deterministic(self):
        """A deterministic function of its operands, mixed from all their elements."""
        x = self.take()
        opcode = self.random.choice(list(STAND_INS))
        operands = [x, self.take()]
        attributes = [tuple(a.split("=", 1)) for a in split(STAND_INS[opcode])]
        if opcode in ("select-and-scatter", "reduce-window", "scatter", "map"):
            region = self.region("add", "f32")
            attributes.append(("to_apply", region))
            if opcode == "select-and-scatter":
                attributes = [("select", region), ("scatter", self.region("maximum", "f32"))]
        shape = Shape(self.random.choice(["f32", "s32"]), self.random.choice([(), (8,), (2, 4)]))
        self.add(opcode, shape, operands, attributes, run=mixed)

    def passing(self):
        """What passes its operand on."""
        x = self.take()
        roll = self.random.randrange(7)
        if roll == 0:
            shape = [x.shape, x.shape, Shape("u32")]
            start = self.add("copy-start", shape, [x], keep=False, run=nothing)

            def run(executed, op):
                executed.line(op.shape, f"copy(%{x.name})", op.name)

            self.add("copy-done", x.shape, [start], labels=x.labels, run=run)
        elif roll == 1:
            y = self.take()
            packed = self.add("tuple", [x.shape, y.shape], [x, y], keep=False)
            barrier = self.random.choice(["opt-barrier", "optimization-barrier"])

            def run(executed, op):
                executed.line(op.shape, f"opt-barrier(%{packed.name})", op.name)

            both = self.add(barrier, packed.shape, [packed], keep=False, run=run)
            which = self.random.randrange(2)
            part = (x, y)[which]
            self.add(
                "get-tuple-element", part.shape, [both], [("index", str(which))], labels=part.labels
            )
        elif roll == 2:
            token = self.add("after-all", Shape("token"), [], keep=False, run=nothing)
            self.add("add-dependency", x.shape, [x, token], labels=x.labels, run=passed)
        elif roll == 3:
            attributes = [
                ("domain", '{kind="sharding", entry={replicated}, exit={maximal device=0}}')
            ]
            self.add("domain", x.shape, [x], attributes, run=passed)
        elif roll == 4:
            y = self.take()
            token = self.add("after-all", Shape("token"), [], keep=False, run=nothing)
            for opcode, attribute in (
                ("outfeed", "outfeed_shape"),
                ("send", "channel_id"),
                ("send-done", "channel_id"),
            ):
                value = "9" if attribute == "channel_id" else x.shape.plain()
                self.add(
                    opcode,
                    Shape("token"),
                    [y, token],
                    [(attribute, value)],
                    keep=False,
                    run=nothing,
                )
        else:
            self.add("copy", self.like(x), [x])

    def source(self):
        """What each device has for itself."""
        shape = Shape("f32", self.random.choice([(), (8,)]))
        opcode = self.random.choice(["rng", "rng-get-and-update-state", "infeed", "recv"])
        attributes = {"rng": [("distribution", "rng_uniform")], "recv": [("channel_id", "4")]}
        if opcode == "rng-get-and-update-state":
            shape = Shape("u64", (2,))
        operands = (
            [self.literal(Shape("f32")), self.literal(Shape("f32"))] if opcode == "rng" else []
        )
        made = self.add(opcode, shape, operands, attributes.get(opcode, ()), labels=OWN, run=own)
        if opcode == "recv" and self.random.random() < 0.5:
            self.add("recv-done", shape, [made], attributes[opcode], labels=OWN, run=own)

    def applied_by_device(self, x):
        """What applies a computation that gives another result on each device."""
        region = self.region("own", "f32")
        opcode, *attributes = self.random.choice(
            [
                ("map", ("dimensions", "{0}"), ("to_apply", region)),
                ("topk", ("k", "8"), ("to_apply", region)),
                (
                    "custom-call",
                    ("custom_call_target", '"TopK"'),
                    (self.random.choice(["called_computations", "calls"]), "{%s}" % region),
                ),
                (
                    "all-reduce",
                    ("channel_id", "77"),
                    ("replica_groups", "[1,8]<=[8]"),
                    ("use_global_device_ids", "true"),
                    ("to_apply", region),
                ),
            ]
        )
        where = {}
        if opcode == "all-reduce":
            if len(set(self.guard)) > 1:
                return
            channel = Channel(len(self.module.channels), [list(range(DEVICES))])
            self.module.channels.append(channel)
            where = {"channel": channel}
        self.add(opcode, self.like(x, "f32"), [x], attributes, labels=OWN, run=own, **where)

    def opaque(self):
        """A custom call: a tagged kernel, one that nobody knows, one of XLA's own targets."""
        x = self.take()
        y = self.take()
        roll = self.random.randrange(5)
        target, tag, run, labels = "kernel", None, mixed, None
        operands = [x, y]
        if roll <= 1:
            status = self.random.choice(["audited", "declared"])
            tag = f'shardrules.effects="local",shardrules.kernel="k",shardrules.status="{status}"'
        elif roll == 2 and self.random.random() < 0.4:
            return self.applied_by_device(x)
        elif roll == 2:
            target, operands, run = (
                self.random.choice(["MoveToHost", "LayoutConstraint"]),
                [x],
                passed,
            )
        elif roll == 3:
            target, operands, run, labels = "AllocateBuffer", [], own, OWN
        else:
            run, labels = own, OWN
        attributes = [("custom_call_target", f'"{target}"')]
        if tag:
            attributes.append(("frontend_attributes", "{%s}" % tag))
        made = self.add("custom-call", self.like(x), operands, attributes, labels=labels, run=run)
        if target == "AllocateBuffer" and x.shape.dims and self.random.random() < 0.7:
            zeros = [self.literal(Shape("s32"), values=["0"]) for _ in x.shape.dims]
            self.add("dynamic-update-slice", self.like(x), [made, x, *zeros])
        elif target == "AllocateBuffer":
            attributes = [
                ("custom_call_target", '"kernel"'),
                ("frontend_attributes", '{shardrules.effects="local",shardrules.status="audited"}'),
            ]
            run, labels = mixed, None
            if self.random.random() < 0.5:  # its result lies there, or else it reads the buffer
                attributes.append(("output_to_operand_aliasing", "{{}: (1, {})}"))
                run, labels = into, y.labels
            self.add("custom-call", self.like(x), [y, made], attributes, labels=labels, run=run)
