"""The calls, branches and loops of a random module."""

from __future__ import annotations

from .forms import DEVICES, EQUAL, OWN, Op, Shape, join, within

FORMS = ["call"] * 4 + ["fusion"] * 3 + ["async", "fusion-start", "call-start", "custom"]


def is_local(computation):
    """Tell whether what a computation gives depends on its operands alone."""
    for op in computation.ops:
        if op.channel is not None or op.opcode in (
            "partition-id",
            "replica-id",
            "custom-call",
            "rng",
            "infeed",
        ):
            return False
        if op.opcode in ("recv", "recv-done", "rng-get-and-update-state"):
            return False
        if not all(is_local(c) for c in op.callees):
            return False
    return True


class Control:
    """Draws control flow; mixed into ``Block``."""

    def inputs(self, count):
        """Choose what is passed to a computation."""
        return [self.take() for _ in range(count)]

    def fill(self, block, count):
        """Append some statements to a computation."""
        for _ in range(count):
            block.statement()

    def flat(self, value: Op) -> Op:
        """Give a value without a layout of its own, as what is passed on has none."""
        if value.shape.minor is None:
            return value
        computation_block = self
        return computation_block.add(
            "copy", Shape(value.shape.kind, value.shape.dims), [value], keep=False
        )

    def call(self):
        """A call in one of its forms."""
        values = [self.flat(v) for v in self.inputs(self.random.randint(1, 3))]
        open_to_all = self.random.random() < 0.5  # so that it may be called again with any value
        params = [
            (Shape(v.shape.kind, v.shape.dims), OWN if open_to_all else v.labels) for v in values
        ]
        computation, block = self.child(params, self.guard)
        if open_to_all and len(set(self.guard)) < DEVICES:
            block.collective()
        self.fill(block, self.random.randint(1, 4))
        computation.lone = self.random.random() < 0.4
        count = 1 if computation.lone else self.random.randint(1, 3)
        results = [block.flat(block.take()) for _ in range(count)]
        if computation.lone and results[0] in computation.params:
            results[0] = block.add("copy", results[0].shape, results, keep=False)
        computation.results = results
        self.module.finish(computation)
        self.module.callables.append((computation, self.guard))
        self.invoke(computation, values)

    def invoke(self, computation, values, forms=FORMS):
        """Call a computation."""
        form = self.random.choice(forms)
        shape = computation.result_shape()
        labels = join(EQUAL, *[r.labels for r in computation.results])
        fields = {"callees": (computation,), "packed": (values,), "labels": labels}
        name = "%" + computation.name
        if form in ("call", "fusion"):
            keys = [("to_apply", name)]
            if form == "fusion":
                keys = [("kind", "kLoop"), ("calls", name)]
            made = self.add(form, shape, values, keys, **fields)
        elif form == "custom":
            keys = [("custom_call_target", '"k"'), ("called_computations", "{%s}" % name)]
            if is_local(computation):  # a tag is a promise
                tags = ";".join(["local"] * len(computation.results))
                keys.append(("frontend_attributes", '{shardrules.effects="%s"}' % tags))
            made = self.add("custom-call", shape, values, keys, **fields)
        else:
            key = "to_apply" if form == "call-start" else "calls"
            begin = "async-start" if form == "async" else form
            pending = [[v.shape for v in values], shape, Shape("s32")]
            # An update may bring the operands that its start has not.
            late = self.random.randint(0, len(values)) if form != "async" else 0
            early, brought = values[: len(values) - late], values[len(values) - late :]
            start = self.add(begin, pending, early, [(key, name)], keep=False, run=lambda *a: None)
            if brought or self.random.random() < 0.3:
                start = self.add(
                    begin.replace("start", "update"),
                    pending,
                    [start, *brought],
                    [("calls", name)] if form == "async" else [],
                    keep=False,
                    run=lambda *a: None,
                )
            keys = [("calls", name)] if form == "async" else []
            made = self.add(begin.replace("start", "done"), shape, [start], keys, **fields)
        self.take_apart(made, [r.labels for r in computation.results])

    def take_apart(self, made, labels):
        """Add what a tuple holds to the values."""
        if isinstance(made.shape, list):
            for k, shape in enumerate(made.shape):
                self.add("get-tuple-element", shape, [made], [("index", str(k))], labels=labels[k])

    def unseen(self):
        """A collective that one call shows equal values, and a path not followed others."""
        if len(set(self.guard)) == DEVICES:
            return
        y = self.take(lambda s: s.kind != "pred")
        if y is None:
            return
        y = self.flat(y)
        shape = Shape(y.shape.kind, y.shape.dims)
        computation, block = self.child([(shape, OWN)], self.guard)
        block.collective()
        computation.results = [block.flat(block.take())]
        self.module.finish(computation)
        x = self.literal(shape, row_major=True)
        self.invoke(computation, [x], ["call", "fusion"])
        self.invoke(computation, [y], ["custom"])

    def again(self):
        """Call a computation that is called elsewhere, with other values."""
        options = list(self.module.callables)
        self.random.shuffle(options)
        for computation, guard in options:
            if not within(guard, self.guard):
                continue
            values = []
            for p in computation.params:
                kind, dims = p.shape.kind, p.shape.dims
                fitting = [
                    o
                    for o in self.pool
                    if (o.shape.kind, o.shape.dims, o.shape.minor) == (kind, dims, None)
                    and within(p.labels, o.labels)
                ]
                if not fitting:
                    break
                values.append(self.random.choice(fitting))
            else:
                self.invoke(computation, values, [*FORMS, *["custom"] * 5])
                return

    def branch(self):
        """A conditional on a number that may differ between devices."""
        which = self.take(lambda s: s.kind in ("s32", "pred") and not s.dims)
        if which is None:
            which = self.add("convert", Shape("s32"), [self.device_number()])
        count = 2 if which.shape.kind == "pred" else self.random.randint(2, 4)
        if which.shape.kind != "pred" and self.random.random() < 0.5:
            few = self.literal(Shape("s32"), values=[str(self.random.choice([1, 3]))])
            which = self.add("and", Shape("s32"), [which, few])
        guard = join(self.guard, which.labels)
        wanted = [self.flat(v) for v in self.inputs(self.random.randint(1, 3))]
        shapes = [Shape(w.shape.kind, w.shape.dims) for w in wanted]
        branches, packed, tuples = [], [], []
        for _ in range(count):
            if branches and self.random.random() < 0.15:
                branches.append(branches[-1])
                packed.append(packed[-1])
                tuples.append(tuples[-1])
                continue
            values = wanted + [self.flat(v) for v in self.inputs(self.random.randint(0, 2))]
            if self.random.random() < 0.5:
                self.random.shuffle(values)
            params = [(Shape(v.shape.kind, v.shape.dims), v.labels) for v in values]
            computation, block = self.child(params, guard, tupled=True)
            self.fill(block, self.random.randint(0, 3))
            for shape in shapes:
                computation.results.append(block.of_shape(shape))
            self.module.finish(computation)
            branches.append(computation)
            packed.append(values)
            types = [v.shape for v in values]
            tuples.append(self.add("tuple", types, values, keep=False))
        names = ["%" + c.name for c in branches]
        if count == 2 and which.shape.kind == "pred":
            keys = [("true_computation", names[0]), ("false_computation", names[1])]
        else:
            keys = [("branch_computations", "{" + ", ".join(names) + "}")]
        made = self.add(
            "conditional",
            shapes,
            [which, *tuples],
            keys,
            callees=tuple(branches),
            packed=tuple(packed),
            labels=OWN,
        )
        self.take_apart(made, [OWN] * len(shapes))

    def of_shape(self, shape) -> Op:
        """Find a value of a shape, or make a constant."""
        found = self.take(lambda s: (s.kind, s.dims) == (shape.kind, shape.dims))
        if found is None or self.random.random() < 0.25:
            values = None
            found = self.literal(shape, elided=shape.count > 7, values=values)
        return self.flat(found)

    def loop(self):
        """A while loop, counted or not."""
        values = [self.flat(v) for v in self.inputs(self.random.randint(1, 3))]
        counted = self.random.random() < 0.5
        trips = self.random.choice([0, 1, 2, 3, 3, 5, 14])
        if counted:
            bound = self.literal(Shape("s32"), values=[str(trips)])
        else:
            number = self.take(lambda s: s.kind == "s32" and not s.dims)
            number = number or self.add("convert", Shape("s32"), [self.device_number()])
            three = self.literal(Shape("s32"), values=["3"])
            bound = self.add("and", Shape("s32"), [self.flat(number), three])
        bound = self.flat(bound)
        start = self.literal(Shape("s32"), values=[self.random.choice("001")])
        carry = [*values, start, bound]
        order = list(range(len(carry)))
        self.random.shuffle(order)
        carry = [carry[k] for k in order]
        decoy = None
        if self.random.random() < 0.3:  # what a fusion's own tuple could be taken for
            decoy = self.flat(self.literal(Shape("s32"), values=[str(trips)]))
            carry.remove(start)
            carry = [start, decoy, *carry] if self.random.random() < 0.7 else [decoy, start, *carry]
        counter, limit = carry.index(start), carry.index(bound)
        uniform = bound.labels
        params = [(Shape(v.shape.kind, v.shape.dims), OWN) for v in carry]
        params[counter] = (Shape("s32"), uniform)
        params[limit] = (Shape("s32"), uniform)
        body, block = self.child(params, join(self.guard, uniform), tupled=True)
        self.fill(block, self.random.randint(1, 4))
        # XLA's CPU compiler takes 'for (i = 0; i < 1; i += 2)' for no iteration (jaxlib 0.10.2): a
        # step of two only where it ends just at the bound.
        step = "2" if counted and trips % 2 == 0 and start.literal == "0" else "1"
        one = block.literal(Shape("s32"), values=[self.random.choice(["1", step])])
        counted_on = block.add("add", Shape("s32"), [body.params[counter], block.flat(one)])
        for k, p in enumerate(body.params):
            if carry[k] is decoy:
                body.results.append(p)
            elif k == counter:
                body.results.append(counted_on)
            elif k == limit:
                body.results.append(p)
            else:
                body.results.append(p if self.random.random() < 0.2 else block.of_shape(p.shape))
        self.module.finish(body)
        test, check = self.child(params, self.guard, tupled=True)
        check.depth = 0
        sides = [test.params[counter], test.params[limit]]
        if counted and self.random.random() < 0.5:
            sides[1] = check.flat(check.literal(Shape("s32"), values=[str(trips)]))
        form = 2 if decoy is not None else self.random.randrange(3)
        test.results = [check.compare_in_a_fusion(sides, form)]
        test.lone = True
        self.module.finish(test, condition=True)
        shapes = [Shape(v.shape.kind, v.shape.dims) for v in carry]
        packed = self.add("tuple", shapes, carry, keep=False)
        keys = [("condition", "%" + test.name), ("body", "%" + body.name)]
        if counted and self.random.random() < 0.4:
            runs = max(0, trips - int(start.literal)) // int(one.literal)
            keys.append(("backend_config", '{"known_trip_count":{"n":"%d"}}' % runs))
        made = self.add(
            "while", shapes, [packed], keys, callees=(test, body), packed=(carry,), labels=OWN
        )
        labels = [uniform if k in (counter, limit) else OWN for k in range(len(carry))]
        self.take_apart(made, labels)

    def compare_in_a_fusion(self, sides, form) -> Op:
        """Compare two numbers, here or in a fusion that gets them one by one or as a tuple."""
        swapped = self.random.random() < 0.5
        if form == 0:
            operands = sides[::-1] if swapped else sides
            direction = "GT" if swapped else "LT"
            return self.add("compare", Shape("pred"), operands, [("direction", direction)])
        pair = sides[::-1] if swapped else sides
        params = [(Shape("s32"), s.labels) for s in pair]
        inner, block = self.child(params, self.guard)
        direction = "GT" if swapped else "LT"
        inner.results = [
            block.add("compare", Shape("pred"), inner.params, [("direction", direction)])
        ]
        inner.lone = True
        inner.boxed = form == 2
        self.module.finish(inner)
        operands = pair
        if inner.boxed:
            operands = [self.add("tuple", [p.shape for p in inner.params], pair, keep=False)]
        keys = [("kind", "kLoop"), ("calls", "%" + inner.name)]
        return self.add("fusion", Shape("pred"), operands, keys, callees=(inner,), packed=(pair,))
