"""Draws random modules: values, collectives, control flow, all in HLO's own terms."""

from __future__ import annotations

import random

import numpy as np

from . import forms, statements
from .forms import DEVICES, EQUAL, OWN, Channel, Computation, Op, Shape, join

# Partitions and replicas; a device is replica * partitions + partition.
MACHINES = [(8, 1), (8, 1), (8, 1), (1, 8), (4, 2), (2, 4)]
KINDS = ["f32"] * 6 + ["s32"] * 5 + ["u32", "s8", "u8", "s64", "u64", "pred", "bf16", "s16"]
DIMS = [(), (), (8,), (8,), (2, 4), (4, 2), (2, 8), (1, 8), (2, 2, 2)]


class Generator:
    """One module. Every choice comes from the seed."""

    def __init__(self, seed: int, probes: int = 20):
        self.seed = seed
        self.random = random.Random(seed)
        self.partitions, self.replicas = self.random.choice(MACHINES)
        self.computations: list[Computation] = []
        self.conditions: list[Computation] = []
        self.channels: list[Channel] = []
        self.parameters: list[tuple[Shape, tuple]] = []
        self.regions: set[tuple[str, str]] = set()
        self.callables: list[tuple[Computation, tuple]] = []
        self.next_channel = 0
        self.names = 0
        self.budget = 70
        self.opaque = False
        self.entry = Computation("main", [])
        entry = Block(self, self.entry, EQUAL, 3)
        for _ in range(self.random.randint(3, 5)):
            entry.parameter()
        entry.pool.append(entry.device_number())
        for _ in range(self.random.randint(10, 22)):
            entry.statement()
        arrays = [o for o in entry.pool if o.opcode != "parameter"]
        self.random.shuffle(arrays)
        # What is looked up, and what control flow gives, is probed first: most can go wrong there.
        looked_up = [o for o in arrays if o.opcode == "dynamic-slice"][: probes // 3]
        rest = [o for o in arrays if o not in looked_up]
        rest.sort(key=lambda o: o.opcode != "get-tuple-element")
        self.entry.results = [*looked_up, *rest][:probes]

    def name(self, stem):
        """Make a new name."""
        self.names += 1
        return f"{stem.replace('-', '_')}.{self.names}"

    @property
    def header(self):
        """Write the module's header."""
        parts = []
        if self.partitions > 1:
            parts.append(f"num_partitions={self.partitions}")
        if self.replicas > 1:
            parts.append(f"replica_count={self.replicas}")
        return ", ".join(parts)

    def sharding(self):
        """Draw a sharding's text and the classes of devices that hold the same data."""
        p = self.partitions
        ids = np.arange(p)
        options = [("{replicated}", ids * 0)] * 2
        for tiles in (2, 4, 8):
            if tiles <= p:
                rest = p // tiles
                row = np.repeat(np.arange(tiles), rest)
                last = f"[{tiles},{rest}]<=[{p}] last_tile_dim_replicate" if rest > 1 else ""
                options.append((f"{{devices={last or f'[{tiles}]<=[{p}]'}}}", row))
                if rest > 1:
                    turned = f"[{tiles},{rest}]<=[{rest},{tiles}]T(1,0) last_tile_dim_replicate"
                    options.append((f"{{devices={turned}}}", np.tile(np.arange(tiles), rest)))
                    order = ids.copy()
                    self.random.shuffle(order)
                    place = np.empty(p, int)
                    place[order] = row
                    listed = ",".join(map(str, order))
                    options.append(
                        (f"{{devices=[{tiles},{rest}]{listed} last_tile_dim_replicate}}", place)
                    )
                    kept = f"mesh['a'={tiles},'b'={rest}]"
                    options.append((f"{{{kept}, [{{'a'}}]}}", row))
                    options.append((f"{{{kept}, [{{'a'}}], unreduced={{'b'}}}}", ids))
        options += [("{manual}", ids), ("{maximal device=0}", ids)]
        text, row = self.random.choice(options)
        shared = self.random.random() < 0.7
        extra = ", parameter_replication={%s}" % str(shared).lower() if self.replicas > 1 else ""
        row = tuple(int(v) for v in row)
        everywhere = [
            (0 if shared and self.replicas > 1 else r, row[i])
            for r in range(self.replicas)
            for i in range(p)
        ]
        return text, extra, join(tuple(everywhere))

    def finish(self, computation, condition=False):
        """Put a computation, whose callees stand already, after them."""
        self.computations.append(computation)
        if condition:
            self.conditions.append(computation)

    def judged(self) -> str:
        """Write the text for the proof."""
        writer = forms.Judged(self.seed)
        return writer.module(self.computations, self.entry, self.header, self.regions)

    def executed(self) -> str:
        """Write the text that runs."""
        writer = forms.Executed(len(self.channels), self.regions)
        return writer.module(self.computations, self.conditions, self.entry)


class Block(statements.Statements):
    """Appends instructions to one computation.

    ``guard`` are classes of devices that are sure to run it together.
    """

    def __init__(self, module: Generator, computation: Computation, guard, depth: int):
        self.module = module
        self.random = module.random
        self.computation = computation
        self.guard = guard
        self.depth = depth
        self.pool: list[Op] = []
        self.started: list[Op] = []

    def add(self, opcode, shape, operands, attributes=(), labels=None, keep=True, **fields) -> Op:
        """Append an instruction; a value of it may be used later."""
        if labels is None:
            labels = join(EQUAL, *[o.labels for o in operands])
        op = Op(
            self.module.name(opcode),
            opcode,
            shape,
            list(operands),
            list(attributes),
            labels=labels,
            **fields,
        )
        if self.computation.ops and self.random.random() < 0.03:
            before = self.random.choice(self.computation.ops)
            op.attributes.append(("control-predecessors", "{%" + before.name + "}"))
        self.computation.ops.append(op)
        if keep and isinstance(shape, Shape):
            self.pool.append(op)
        return op

    def parameter(self):
        """Add a parameter of the entry."""
        first = not self.computation.params
        kind = "f32" if first else self.random.choice(KINDS)
        shape = Shape(kind, (8,) if first else self.random.choice(DIMS))
        text, extra, labels = self.module.sharding()
        number = len(self.computation.params)
        attributes = [] if self.module.partitions == 1 else [("sharding", text)]
        if extra:
            attributes.append(tuple(extra[2:].split("=", 1)))
        if self.module.partitions == 1:
            labels = EQUAL if "true" in extra else OWN
        op = Op(
            self.module.name("param"),
            "parameter",
            shape,
            [],
            attributes,
            literal=str(number),
            labels=labels,
        )
        self.computation.params.append(op)
        self.module.parameters.append((shape, labels))
        self.pool.append(op)

    def take(self, test=None) -> Op | None:
        """Choose a value, the later ones more often."""
        pool = [o for o in self.pool if test is None or test(o.shape)]
        if not pool:
            return None
        return pool[max(self.random.randrange(len(pool)), self.random.randrange(len(pool)))]

    def statement(self):
        """Append one of all that a module may hold."""
        self.module.budget -= 1
        if self.module.budget < 0:
            return
        kinds = list(self.SIMPLE)
        if len(set(self.guard)) < DEVICES:
            kinds += ["collective"] * 9
        if self.depth:
            kinds += self.CONTROL
        getattr(self, self.random.choice(kinds))()

    def child(self, params, guard, tupled=False) -> tuple[Computation, Block]:
        """Begin a computation."""
        name = self.module.name("comp")
        ops = []
        for k, (shape, labels) in enumerate(params):
            ops.append(
                Op(
                    self.module.name("arg"),
                    "parameter",
                    shape,
                    [],
                    [],
                    literal=str(k),
                    labels=labels,
                )
            )
        computation = Computation(name, ops, tupled)
        block = Block(self.module, computation, guard, self.depth - 1)
        block.pool = list(ops)
        return computation, block
