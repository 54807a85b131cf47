"""The collectives of a random module."""

from __future__ import annotations

import numpy as np

from .forms import DEVICES, EQUAL, OWN, Channel, Shape, groups_text, join, within

REDUCTIONS = ("add", "add", "maximum", "minimum", "multiply")


def classes_of(groups):
    """Give each device the number of its group; a device of no group is its own."""
    found = [DEVICES + d for d in range(DEVICES)]
    for number, group in enumerate(groups):
        for device in group:
            found[device] = number
    return join(tuple(found))


def rows_text(rows):
    """Write ``{{0,1},{2,3}}``."""
    return "{" + ",".join("{" + ",".join(map(str, r)) + "}" for r in rows) + "}"


class Collectives:
    """Draws collectives; mixed into ``Block``."""

    def region(self, opcode, kind):
        """Name the computation of one operation on two scalars."""
        self.module.regions.add((opcode, kind))
        return f"%{opcode}_{kind}"

    def less(self, kind):
        """Name the computation that compares two scalars."""
        return self.region("less", kind)

    # -- collectives -------------------------------------------------------------------------

    def rows(self, count):
        """Draw groups of ``count`` ids."""
        size = self.random.choice([n for n in (1, 2, 2, 4, 8) if n <= count])
        ids = np.arange(count)
        kind = self.random.randrange(3)
        if kind == 0:
            rows = ids.reshape(-1, size).tolist()
        elif kind == 1:
            rows = ids.reshape(size, -1).T.tolist()
        else:
            mixed = ids.tolist()
            self.random.shuffle(mixed)
            rows = np.array(mixed).reshape(-1, size).tolist()
        if self.random.random() < 0.2:
            self.random.shuffle(rows)
        return rows

    def notation(self, rows, count):
        """Write groups in one of HLO's ways."""
        size = len(rows[0])
        options = [rows_text(rows)]
        if rows == np.arange(count).reshape(-1, size).tolist():
            options.append(f"[{count // size},{size}]<=[{count}]")
        if rows == np.arange(count).reshape(size, -1).T.tolist():
            options.append(f"[{count // size},{size}]<=[{size},{count // size}]T(1,0)")
            if 1 < size < count:
                options.append(f"mesh['x'={size},'y'={count // size}] {{'x'}}")
        if rows == [list(range(count))]:
            options.append("{}")
        return self.random.choice(options)

    def connect(self, reduces):
        """Draw a collective's attributes and its groups in flattened ids."""
        p, r = self.module.partitions, self.module.replicas
        modes = []
        if reduces:
            modes += ["flattened"] * 3
            modes.append("replicas and partitions")
        elif p > 1:
            modes += ["partitions"] * 2
        if r > 1:
            modes += ["replicas"] * 2
        mode = self.random.choice(modes)
        self.module.next_channel += 1
        attributes = []
        if mode != "replicas":
            attributes.append(("channel_id", str(self.module.next_channel)))
        count = {"flattened": p * r, "partitions": p}.get(mode, r)
        rows = self.rows(count)
        if mode == "flattened":
            attributes.append(("use_global_device_ids", "true"))
            groups = rows
        elif mode == "partitions":
            groups = [[k * p + i for i in row] for k in range(r) for row in rows]
        elif mode == "replicas":
            groups = [[k * p + i for k in row] for i in range(p) for row in rows]
        else:
            groups = [[k * p + i for k in row for i in range(p)] for row in rows]
        attributes.append(("replica_groups", self.notation(rows, count)))
        return attributes, groups

    def collective(self):
        """A collective of any kind, over groups that are sure to run it together."""
        x = self.take(lambda s: s.kind != "pred" or self.random.random() < 0.3)
        if x is None:
            return None
        kind = self.random.choice(
            ["all-reduce"] * 5
            + ["all-gather", "reduce-scatter", "all-to-all", "collective-permute"] * 2
            + ["collective-broadcast", "ragged-all-to-all"]
        )
        if kind == "collective-permute":
            return self.permute(x)
        if not x.shape.dims and kind in ("all-gather", "reduce-scatter", "all-to-all"):
            kind = "all-reduce"
        for _ in range(8):
            attributes, groups = self.connect(
                kind in ("all-reduce", "all-gather", "reduce-scatter")
            )
            if within(classes_of(groups), self.guard):
                break
        else:
            return None
        channel = Channel(len(self.module.channels), groups)
        self.module.channels.append(channel)
        where = {"channel": channel}
        size = len(groups[0])
        together = classes_of(groups)
        axes = [k for k, d in enumerate(x.shape.dims) if d % size == 0]
        start = self.random.random() < 0.25
        if kind == "all-reduce":
            return self.all_reduce(x, attributes, where, together, start)
        plain = groups_text(channel)
        if kind == "all-gather":
            axis = self.random.randrange(len(x.shape.dims))
            sizes = tuple(d * size if k == axis else d for k, d in enumerate(x.shape.dims))
            extra = [("dimensions", "{%d}" % axis)]
            text = f"all-gather(%{x.name}), {plain}, dimensions={{{axis}}}"
            shape = self.like(x, dims=sizes)
            return self.finish(kind, shape, [x], attributes + extra, together, start, text, where)
        if kind == "ragged-all-to-all":

            def moved(executed, op):
                _positioned(executed, op, x, groups)

            return self.finish(kind, self.like(x), [x] * 6, attributes, OWN, start, moved, where)
        if kind == "collective-broadcast":

            def run(executed, op):
                _first(executed, op, x, groups)

            rooted = [("has_dynamic_root", "false")] if self.random.random() < 0.5 else []
            return self.finish(
                kind, self.like(x), [x], attributes + rooted, together, start, run, where
            )
        if kind == "reduce-scatter" and axes and x.shape.kind != "pred":
            axis = self.random.choice(axes)
            sizes = tuple(d // size if k == axis else d for k, d in enumerate(x.shape.dims))
            region = self.region(self.random.choice(REDUCTIONS), x.shape.kind)
            extra = [("dimensions", "{%d}" % axis), ("to_apply", region)]
            text = f"reduce-scatter(%{x.name}), {plain}, dimensions={{{axis}}}, to_apply={region}"
            shape = self.like(x, dims=sizes)
            return self.finish(kind, shape, [x], attributes + extra, OWN, start, text, where)
        if kind == "all-to-all" and self.random.random() < 0.3 and size in (2, 4):
            parts = [x, *[self.mate(x) for _ in range(size - 1)]]
            self.random.shuffle(parts)
            if self.random.random() < 0.3:
                parts = [x] * size
            shape = [Shape(q.shape.kind, q.shape.dims) for q in parts]

            def exchanged(executed, op):
                _exchanged(executed, op, groups)

            whole = self.finish(kind, shape, parts, attributes, OWN, False, exchanged, where)
            which = self.random.randrange(size)
            return self.add(
                "get-tuple-element", shape[which], [whole], [("index", str(which))], labels=OWN
            )
        if kind == "all-to-all" and axes:
            axis = self.random.choice(axes)
            extra = [("dimensions", "{%d}" % axis)]
            text = f"all-to-all(%{x.name}), {plain}, dimensions={{{axis}}}"
            shape = self.like(x)
            return self.finish(kind, shape, [x], attributes + extra, OWN, start, text, where)
        return None

    def all_reduce(self, x, attributes, where, together, start):
        """An all-reduce, of several operands at times."""
        channel = where["channel"]
        logical = ("and", "or") if x.shape.kind == "pred" else REDUCTIONS
        if x.shape.kind[0] in "su" and self.random.random() < 0.3:
            logical = ("and", "or", "xor")
        region = self.region(self.random.choice(logical), x.shape.kind)
        attributes = [*attributes, ("to_apply", region)]
        if self.random.random() < 0.15 and not start:
            other = self.take(lambda s: s.kind == x.shape.kind)
            shape = [Shape(q.shape.kind, q.shape.dims) for q in (x, other)]

            def run(executed, op):
                parts = [
                    summed(executed, s, q.name, channel, region) for s, q in zip(shape, op.operands)
                ]
                executed.line(shape, f"tuple(%{parts[0]}, %{parts[1]})", op.name)

            whole = self.add(
                "all-reduce",
                shape,
                [x, other],
                attributes,
                labels=together,
                keep=False,
                run=run,
                **where,
            )
            for k in range(2):
                self.add(
                    "get-tuple-element", shape[k], [whole], [("index", str(k))], labels=together
                )
            return whole

        def text(executed, op):
            summed(executed, op.shape, x.name, channel, region, op.name)

        return self.finish(
            "all-reduce", self.like(x), [x], attributes, together, start, text, where
        )

    def finish(self, kind, shape, operands, attributes, labels, start, text, where):
        """Add a collective, in two steps or in one."""

        def run(executed, op):
            if callable(text):
                text(executed, op)  # which knows its operand
            else:
                executed.line(op.shape, text, op.name)

        if not start or isinstance(shape, list):
            return self.add(kind, shape, operands, attributes, labels=labels, run=run, **where)
        begun = shape if kind == "all-reduce" else [operands[0].shape, shape]
        first = self.add(
            kind + "-start",
            begun,
            operands,
            attributes,
            keep=False,
            run=lambda *a: None,
            labels=labels,
            **where,
        )
        return self.add(kind + "-done", shape, [first], labels=labels, run=run)

    def permute(self, x):
        """A permute; on CPU all devices wait for one, so not where some don't run it."""
        if self.guard != EQUAL:
            return None
        p, r = self.module.partitions, self.module.replicas
        by_partition = p > 1 and (r == 1 or self.random.random() < 0.5)
        count = p if by_partition else r
        sources, targets = list(range(count)), list(range(count))
        self.random.shuffle(sources)
        self.random.shuffle(targets)
        pairs = list(zip(sources, targets))[: self.random.randint(1, count)]
        if self.random.random() < 0.4:
            pairs = [(s, s ^ 1) for s in range(count)]
        attributes = [("source_target_pairs", rows_text(pairs))]
        self.module.next_channel += 1
        if by_partition:
            attributes.append(("channel_id", str(self.module.next_channel)))
            flat = [(k * p + s, k * p + t) for k in range(r) for s, t in pairs]
        else:
            flat = [(s * p + i, t * p + i) for i in range(p) for s, t in pairs]
        channel = Channel(len(self.module.channels), None, flat)
        self.module.channels.append(channel)
        text = f"collective-permute(%{x.name}), source_target_pairs={rows_text(flat)}"
        start = self.random.random() < 0.3
        return self.finish(
            "collective-permute",
            self.like(x),
            [x],
            attributes,
            OWN,
            start,
            text,
            {"channel": channel},
        )

    def pack(self):
        """Arrays packed into one, all-reduced, and cut apart again."""
        x = self.take(lambda s: s.kind == "f32" and len(s.dims) == 1)
        if x is None or not len(set(self.guard)) < DEVICES:
            return
        y = self.take(lambda s: s.kind == "f32" and len(s.dims) == 1)
        n, m = x.shape.dims[0], y.shape.dims[0]
        both = self.add("concatenate", Shape("f32", (n + m,)), [x, y], [("dimensions", "{0}")])
        for _ in range(8):
            attributes, groups = self.connect(True)
            if within(classes_of(groups), self.guard):
                break
        else:
            return
        channel = Channel(len(self.module.channels), groups)
        self.module.channels.append(channel)
        region = self.region("add", "f32")
        text = f"all-reduce(%{both.name}), {groups_text(channel)}, to_apply={region}"
        summed = self.finish(
            "all-reduce",
            both.shape,
            [both],
            [*attributes, ("to_apply", region)],
            classes_of(groups),
            self.random.random() < 0.3,
            text,
            {"channel": channel},
        )
        for a, b in ((0, n), (n, n + m)):
            cut = [("slice", "{[%d:%d]}" % (a, b))]
            self.add("slice", Shape("f32", (b - a,)), [summed], cut)


def summed(text, shape, name, channel, region, result=None):
    """Write an all-reduce; one of bits, which XLA's CPU runtime lacks, as a gather and a reduce."""
    opcode, _, kind = region.removeprefix("%").rpartition("_")
    if opcode not in ("and", "or", "xor") or kind == "pred":
        expression = f"all-reduce(%{name}), {groups_text(channel)}, to_apply={region}"
        return text.line(shape, expression, result)
    wide = text.line(Shape(kind, (1, *shape.dims)), f"reshape(%{name})")
    rows = text.line(
        Shape(kind, (len(channel.groups[0]), *shape.dims)),
        f"all-gather(%{wide}), {groups_text(channel)}, dimensions={{0}}",
    )
    start = text.line(f"{kind}[]", f"constant({-1 if opcode == 'and' and kind[0] == 's' else 0})")
    if opcode == "and" and kind[0] == "u":
        start = text.line(f"{kind}[]", f"not(%{start})")
    return text.line(
        shape, f"reduce(%{rows}, %{start}), dimensions={{0}}, to_apply={region}", result
    )


def _positioned(text, op, x, groups):
    """Write a function of what the members have, in order, and of the place among them."""
    size, dims = len(groups[0]), x.shape.dims
    value = text.line(Shape("f32", dims), f"convert(%{x.name})")
    value = text.line(Shape("f32", (1, *dims)), f"reshape(%{value})")
    value = text.line(
        Shape("f32", (size, *dims)),
        f"all-gather(%{value}), replica_groups={rows_text(groups)}, dimensions={{0}}",
    )
    weights = text.line(
        Shape("f32", (size,)), "constant({" + ",".join(str(k + 1.5) for k in range(size)) + "})"
    )
    weights = text.line(Shape("f32", (size, *dims)), f"broadcast(%{weights}), dimensions={{0}}")
    value = text.line(Shape("f32", (size, *dims)), f"multiply(%{value}, %{weights})")
    zero = text.line("f32[]", "constant(0)")
    value = text.line(
        Shape("f32", dims),
        f"reduce(%{value}, %{zero}), dimensions={{0}}, to_apply={text.region('add', 'f32')}",
    )
    place = {d: row.index(d) for row in groups for d in row}
    table = ",".join(str(place.get(d, 0)) for d in range(DEVICES))
    table = text.line("f32[8]", f"constant({{{table}}})")
    device = text.line("u32[]", "replica-id()")
    mine = text.line("f32[1]", f"dynamic-slice(%{table}, %{device}), dynamic_slice_sizes={{1}}")
    mine = text.line("f32[]", f"reshape(%{mine})")
    mine = text.line(Shape("f32", dims), f"broadcast(%{mine}), dimensions={{}}")
    value = text.line(Shape("f32", dims), f"add(%{value}, %{mine})")
    text.line(op.shape, f"convert(%{value})", op.name)


def _exchanged(text, op, groups):
    """Give each member what the others have for its place: in one array, and apart again.

    XLA compares the operands' layouts here, which plain text doesn't have.
    """
    size, x = len(op.operands), op.operands[0].shape
    one, all_of_them = Shape(x.kind, (1, *x.dims)), Shape(x.kind, (size, *x.dims))
    rows = [text.line(one, f"reshape(%{o.name})") for o in op.operands]
    whole = text.line(
        all_of_them, f"concatenate({', '.join('%' + r for r in rows)}), dimensions={{0}}"
    )
    whole = text.line(
        all_of_them, f"all-to-all(%{whole}), replica_groups={rows_text(groups)}, dimensions={{0}}"
    )
    parts = []
    for k in range(size):
        cuts = ", ".join([f"[{k}:{k + 1}]"] + [f"[0:{d}]" for d in x.dims])
        part = text.line(one, f"slice(%{whole}), slice={{{cuts}}}")
        parts.append(text.line(op.shape[k], f"reshape(%{part})"))
    text.line(op.shape, f"tuple({', '.join('%' + p for p in parts)})", op.name)


def _first(text, op, x, groups):
    """Give everybody what the first member of the group has: a gather, and its first part."""
    wide = text.line(Shape(x.shape.kind, (1, *x.shape.dims)), f"reshape(%{x.name})")
    rows = text.line(
        Shape(x.shape.kind, (len(groups[0]), *x.shape.dims)),
        f"all-gather(%{wide}), replica_groups={rows_text(groups)}, dimensions={{0}}",
    )
    cuts = ", ".join(["[0:1]"] + [f"[0:{d}]" for d in x.shape.dims])
    part = text.line(Shape(x.shape.kind, (1, *x.shape.dims)), f"slice(%{rows}), slice={{{cuts}}}")
    text.line(op.shape, f"reshape(%{part})", op.name)
