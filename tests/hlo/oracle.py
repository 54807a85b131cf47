"""An oracle for the proof: random SPMD programs, run on eight CPU devices.

Every value of a program is returned from every device. Where the verifier says that two devices
hold the same value they must do so bit for bit, on each of three random draws of the inputs. Of the
pairs of devices whose floats agree on all draws, the share that is also proven is the proof's
reach. A draw is wide: its integer argument, which decides branches and trip counts, is drawn four
times, from below, among and above the axis indices. Drawn once, it takes the same branches on all
three draws in one of about forty pairs, which then agree by chance; that share is given too.

    python tests/seeds.py oracle 2000 [first_seed [processes]]
"""

from __future__ import annotations

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from seeds import cheaply

from shardrules import program as programs

MESHES = [{"a": 2, "b": 4}, {"a": 4, "b": 2}, {"a": 2, "b": 2, "c": 2}, {"a": 8}, {"a": 1, "b": 8}]
SIZE = 8  # elements of every float array; each axis size divides it
DRAWS, INTEGERS = 3, 4


@dataclasses.dataclass
class Value:
    """A traced value and the axes over which it may vary, by the generator's own count.

    The generator needs this only to keep collectives out of branches that would hang.
    """

    array: object
    varying: frozenset


class Generator:
    """Traces one random program; every choice comes from one seed, so traces repeat."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.mesh = self.random.choice(MESHES)
        self.specs = []
        for _ in range(self.random.randint(2, 3)):
            axes = [a for a in self.mesh if self.random.random() < 0.5]
            self.random.shuffle(axes)
            self.specs.append(tuple(axes))
        self.length = self.random.randint(4, 9)
        self.seed = seed

    def inputs(self, draw: int, part: int = 0):
        """Draw the global arguments: one float array per spec, one replicated int.

        Args:
          part: which quarter of the integers around the axis indices the int is from.
        """
        rng = np.random.default_rng([self.seed, draw])
        arrays = []
        for spec in self.specs:
            count = int(np.prod([self.mesh[a] for a in spec], dtype=int))
            arrays.append(rng.standard_normal(SIZE * count).astype(np.float32))
        # Near the axis indices that it is compared with, or most comparisons would agree by chance.
        quarter = (draw + part) % INTEGERS
        return arrays + [np.int32(rng.integers(-3, 0) + 3 * quarter)]

    def arguments(self):
        """List the arguments' specs."""
        return [P(s) if s else P() for s in self.specs] + [P()]

    def body(self, *args):
        """Trace the program on one device; return all its values with a leading axis."""
        choose = self.random
        state = choose.getstate()
        floats = [Value(x, frozenset(s)) for x, s in zip(args, self.specs)]
        ints = [Value(args[-1], frozenset())]
        ints += [Value(lax.axis_index(a), frozenset([a])) for a in self.mesh]
        free = frozenset(a for a, n in self.mesh.items())
        self.block(floats, ints, free, self.length, 2)
        choose.setstate(state)  # jax may trace twice
        return [v.array[None] for v in floats + ints]

    # -- statements -----------------------------------------------------------------------------

    def block(self, floats, ints, free, length, depth):
        """Append statements; collectives only over the axes in ``free``."""
        for _ in range(length):
            kinds = [self.arithmetic, self.arithmetic, self.number, self.rearrange, self.lookup]
            if free:
                kinds += [self.collective] * 4
            if depth:
                kinds += [self.loop, self.branch, self.until]
            self.random.choice(kinds)(floats, ints, free, depth)

    def arithmetic(self, floats, ints, free, depth):
        x, y = self.random.choice(floats), self.random.choice(floats)
        i, j = self.random.choice(ints), self.random.choice(ints)
        kind = self.random.randrange(9)
        varying = x.varying | y.varying
        if kind == 0:
            out = x.array + y.array
        elif kind == 1:
            out = x.array * jnp.sin(y.array)
        elif kind == 2:
            out, varying = jnp.tanh(x.array), x.varying
        elif kind == 3:
            out = jnp.where(i.array % 2 == 0, x.array, y.array)
            varying |= i.varying
        elif kind == 4:
            out, varying = x.array * i.array.astype(jnp.float32), x.varying | i.varying
        elif kind == 5:
            out, varying = jnp.sort(x.array), x.varying
        elif kind == 6:
            out = jnp.dot(jnp.outer(x.array, y.array), y.array)
        elif kind == 7:
            out = jnp.where(i.array > j.array, x.array, jnp.float32(0.5))
            varying = x.varying | i.varying | j.varying
        else:
            square = jnp.outer(x.array, x.array)[:4, :4] + 4 * jnp.eye(4, dtype=jnp.float32)
            out = jnp.tile(jnp.linalg.cholesky(square).sum(0), SIZE // 4)  # a LAPACK FFI call
            varying = x.varying
        floats.append(Value(out, varying))

    def number(self, floats, ints, free, depth):
        i, j = self.random.choice(ints), self.random.choice(ints)
        x = self.random.choice(floats)
        kind = self.random.randrange(7)
        varying = i.varying | j.varying
        if kind == 0:
            out = i.array + j.array
        elif kind == 1:
            out, varying = i.array // self.random.choice([2, 3]), i.varying
        elif kind == 2:
            out, varying = i.array % self.random.choice([2, 3, 7]), i.varying
        elif kind == 3:
            out, varying = i.array * self.random.choice([0, 1, 2, 5]), i.varying
        elif kind == 4:
            table = jnp.array([self.random.randrange(3) for _ in range(8)], jnp.int32)
            out, varying = table[jnp.clip(i.array, 0, 7)], i.varying
        elif kind == 5:
            out = (x.array[0] * 1000).astype(jnp.int32) % 101
            varying = x.varying
        else:
            out = jnp.where(i.array > j.array, i.array, j.array - 1)
        ints.append(Value(out, varying))

    def rearrange(self, floats, ints, free, depth):
        x, y = self.random.choice(floats), self.random.choice(floats)
        cut = self.random.randrange(1, SIZE)
        kind = self.random.randrange(4)
        varying = x.varying | y.varying
        if kind == 0:
            out = jnp.concatenate([x.array[:cut], y.array[cut:]])
        elif kind == 1:
            both = jnp.concatenate([x.array, y.array])
            if free and self.random.random() < 0.7:
                axes = self.axes(free)
                both = lax.psum(both, axes)
                varying -= frozenset(axes)
            floats.append(Value(both[:SIZE], varying))
            out = both[SIZE:]
        elif kind == 2:
            out = lax.dynamic_update_slice(x.array, y.array[:cut], (SIZE - cut,))
        else:
            out, varying = jnp.pad(x.array[cut:], (0, cut)), x.varying
        floats.append(Value(out, varying))

    def lookup(self, floats, ints, free, depth):
        x, i = self.random.choice(floats), self.random.choice(ints)
        part = lax.dynamic_slice(x.array, (i.array * 2,), (2,))
        floats.append(Value(jnp.tile(part, SIZE // 2), x.varying | i.varying))

    def axes(self, free):
        names = [a for a in self.mesh if a in free]
        self.random.shuffle(names)
        return tuple(names[: self.random.randint(1, len(names))])

    def collective(self, floats, ints, free, depth):
        x = self.random.choice(floats)
        axes = self.axes(free)
        size = int(np.prod([self.mesh[a] for a in axes]))
        # XLA's CPU runtime makes every device of the program wait for a permute, so that one under
        # a predicate that differs anywhere would hang.
        kind = self.random.randrange(8 if len(free) == len(self.mesh) else 7)
        dropped = x.varying - frozenset(axes)
        spread = x.varying | frozenset(axes)
        if kind <= 1:
            floats.append(Value(lax.psum(x.array, axes), dropped))
        elif kind == 2:
            op = self.random.choice([lax.pmax, lax.pmin])
            if self.random.random() < 0.5:
                i = self.random.choice(ints)
                ints.append(Value(op(i.array, axes), i.varying - frozenset(axes)))
            else:
                floats.append(Value(op(x.array, axes), dropped))
        elif kind == 3:
            i = self.random.choice(ints)
            ints.append(Value(lax.psum(i.array, axes), i.varying - frozenset(axes)))
        elif kind == 4:
            out = lax.all_gather(x.array, axes, tiled=True)
            out = out[:SIZE] if self.random.random() < 0.5 else out.reshape(-1, SIZE).sum(0)
            floats.append(Value(out, dropped))
        elif kind == 5:
            out = lax.psum_scatter(x.array, axes, tiled=True)
            floats.append(Value(jnp.tile(out, size), spread))
        elif kind == 6:
            out = lax.all_to_all(x.array.reshape(size, -1), axes, 0, 0)
            floats.append(Value(out.reshape(SIZE), spread))
        else:
            sources = list(range(size))
            targets = list(range(size))
            self.random.shuffle(sources)
            if self.random.random() < 0.7:
                self.random.shuffle(targets)
            pairs = list(zip(sources, targets))[: self.random.randint(1, size)]
            # JAX 0.12 takes the axes of a permute in the order of the mesh only.
            in_order = tuple(a for a in self.mesh if a in axes)
            floats.append(Value(lax.ppermute(x.array, in_order, pairs), spread))

    def carried(self, floats, ints):
        """Choose a loop's or branch's operands: two floats and an int."""
        return [self.random.choice(floats), self.random.choice(floats), self.random.choice(ints)]

    def inner(self, operands, everything, free, depth, consts):
        """Make a function of (float, float, int) to the same; varying counts as everything."""
        seed = self.random.random()
        floats, ints = consts

        def run(x, y, i):
            saved = self.random
            self.random = random.Random(seed)
            mine = [Value(x, everything), Value(y, everything)]
            numbers = [Value(i, everything)]
            mine += floats[:2]
            numbers += ints[:2]
            self.block(mine, numbers, free, self.random.randint(1, 4), depth - 1)
            out = (
                mine[-1].array,
                self.random.choice(mine).array,
                self.random.choice(numbers).array,
            )
            self.random = saved
            return out

        return run

    def loop(self, floats, ints, free, depth):
        operands = self.carried(floats, ints)
        everything = frozenset(self.mesh)
        run = self.inner(operands, everything, free, depth, (floats, ints))
        trips = self.random.randint(1, 3)
        out, _ = lax.scan(
            lambda c, _: (run(*c), None), tuple(o.array for o in operands), None, length=trips
        )
        self.extend(floats, ints, out, everything)

    def extend(self, floats, ints, out, varying):
        floats += [Value(out[0], varying), Value(out[1], varying)]
        ints.append(Value(out[2], varying))

    def branch(self, floats, ints, free, depth):
        operands = self.carried(floats, ints)
        which = self.random.choice(ints)
        everything = frozenset(self.mesh)
        inside = free - which.varying
        runs = [
            self.inner(operands, everything, inside, depth, (floats, ints))
            for _ in range(self.random.randint(2, 5))
        ]
        out = lax.switch(which.array % len(runs), runs, *[o.array for o in operands])
        self.extend(floats, ints, out, everything)

    def until(self, floats, ints, free, depth):
        """A loop whose trip count is a value."""
        operands = self.carried(floats, ints)
        count = self.random.choice(ints)
        everything = frozenset(self.mesh)
        run = self.inner(operands, everything, free - count.varying, depth, (floats, ints))
        trips = jnp.abs(count.array) % 4
        out = lax.while_loop(
            lambda c: c[0] < trips,
            lambda c: (c[0] + 1, *run(*c[1:])),
            (jnp.int32(0), *[o.array for o in operands]),
        )
        self.extend(floats, ints, out[1:], everything)


@dataclasses.dataclass
class Outcome:
    """What one program showed: wrong claims; pairs equal on all draws, pairs equal on all draws of
    one integer each, pairs proven equal."""

    wrong: list
    equal_count: int
    narrow_count: int
    proven_count: int
    text: str


def run_program(seed: int) -> Outcome:
    """Compile, judge and execute one program."""
    generator = Generator(seed)
    shape = tuple(generator.mesh.values())
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(shape), tuple(generator.mesh))
    specs = generator.arguments()
    everywhere = P(tuple(generator.mesh))
    program = jax.jit(
        jax.shard_map(
            generator.body, mesh=mesh, in_specs=tuple(specs), out_specs=everywhere, check_vma=False
        )
    )
    arguments = [
        jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(generator.inputs(0), specs)
    ]
    # One in eight as users' are: with the fusions that XLA's emitters ask for.
    options = cheaply() if seed % 8 else None
    compiled = program.lower(*arguments).compile(compiler_options=options)
    text = compiled.as_text()
    # Not the text alone: JAX 0.12's says nothing of the parameters' shardings.
    judgement = programs.judge(compiled, mesh=generator.mesh)
    draws = []
    for draw in range(DRAWS):
        for part in range(INTEGERS):
            arguments = [
                jax.device_put(x, NamedSharding(mesh, s))
                for x, s in zip(generator.inputs(draw, part), specs)
            ]
            draws.append([np.asarray(x) for x in compiled(*arguments)])
    outcome = Outcome([], 0, 0, 0, text)
    assert len(judgement.outputs) == len(draws[0])
    for number, output in enumerate(judgement.outputs):
        rows = [[d[number][device].tobytes() for device in range(8)] for d in draws]
        # Small integers agree by chance, floats hardly ever.
        counted = draws[0][number].dtype == np.float32
        label = {d: n for n, c in enumerate(output.classes) for d in c}
        for i in range(8):
            for j in range(i):
                same = all(r[i] == r[j] for r in rows)
                outcome.equal_count += same and counted
                outcome.narrow_count += counted and all(r[i] == r[j] for r in rows[::INTEGERS])
                if label[i] == label[j]:
                    outcome.proven_count += same and counted
                    if not same:
                        outcome.wrong.append((seed, number, j, i))
    return outcome


def outcome(seed: int):
    """Return one program's outcome for tests/seeds.py."""
    ran = run_program(seed)
    counts = {"equal": ran.equal_count, "narrow": ran.narrow_count, "proven": ran.proven_count}
    pairs = [f"output {n}: devices {i} and {j}" for _, n, i, j in ran.wrong]
    return {**counts, "wrong": pairs} | ({"note": "; ".join(pairs[:20])} if pairs else {})


def summary(outcomes):
    """Say what programs showed; well if no claim was wrong and at least 94% is proven."""
    ran = [o for o in outcomes.values() if "lost" not in o]
    equal, narrow, proven = (sum(o[n] for o in ran) for n in ("equal", "narrow", "proven"))
    wrong, share = sum(len(o["wrong"]) for o in ran), proven / max(equal, 1)
    text = (
        f"{len(outcomes)} programs, {len(outcomes) - len(ran)} lost: {wrong} unsound claims; of "
        f"the pairs of devices that are equal on {DRAWS} random draws {share:.1%} are proven equal "
        f"(of those equal on {DRAWS} draws of one integer each {proven / max(narrow, 1):.1%})"
    )
    return text, not wrong and len(ran) == len(outcomes) and share >= 0.94
