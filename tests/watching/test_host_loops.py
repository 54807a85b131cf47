"""Loops on the host: what each call sums up, and what each step reads; followed, and near misses."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules.errors import UnsupportedJaxError
from shardrules.report import several
from shardrules.watching import reads, runs

STEPS, CALLS = 2, 4
D = P("data")


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def varying(w):
    return shardrules.vary(w, "data")


class Loop:
    """Trains with accumulated gradients, each way with its own total."""

    def __init__(self, mesh):
        self.mesh = mesh
        keys = jax.random.split(jax.random.key(0), CALLS + 1)
        self.w = self.put(jax.random.normal(keys[0], (64, 64)), P())
        self.xs = [self.put(jax.random.normal(k, (32, 64)), D) for k in keys[1:]]

    def put(self, x, spec):
        return jax.device_put(x, NamedSharding(self.mesh, spec))

    def mapped(self, f, specs, out):
        return jax.shard_map(f, mesh=self.mesh, in_specs=specs, out_specs=out, check_vma=False)

    def run(self, accumulate, update, total, each=lambda total: None):
        # Without an update of the shardings, JAX would compile each once more.
        accumulate, update = jax.jit(accumulate), jax.jit(update)
        w = self.w
        for _ in range(STEPS):
            g = total
            for x in self.xs:
                g = accumulate(g, w, x)
                each(g)
            w = update(w, g)
        return w

    # -- each call sums up ---------------------------------------------------------------------

    def under_jit(self, **how):
        def accumulate(g, w, x):
            return g + jax.grad(loss)(w, x)

        return self.run(accumulate, lambda w, g: w - g, self.put(jnp.zeros((64, 64)), P()), **how)

    def in_a_shard_map(self):
        def accumulate(g, w, x):
            return g + lax.pmean(jax.grad(loss)(w, x), "data")

        f = self.mapped(accumulate, (P(), P(), D), P())
        return self.run(f, lambda w, g: w - g, self.put(jnp.zeros((64, 64)), P()))

    def two_under_jit(self):
        """The loss is added up beside the gradient."""

        def accumulate(g, w, x):
            return jax.tree.map(jnp.add, g, jax.value_and_grad(loss)(w, x))

        start = self.put(jnp.zeros(()), P()), self.put(jnp.zeros((64, 64)), P())
        return self.run(accumulate, lambda w, g: w - g[1] / (1 + g[0]), start)

    def two_in_a_shard_map(self):
        def accumulate(g, w, x):
            own = jax.value_and_grad(loss)(w, x)
            return jax.tree.map(lambda g, o: g + lax.pmean(o, "data"), g, own)

        f = self.mapped(accumulate, ((P(), P()), P(), D), (P(), P()))
        start = self.put(jnp.zeros(()), P()), self.put(jnp.zeros((64, 64)), P())
        return self.run(f, lambda w, g: w - g[1] / (1 + g[0]), start)

    def counted(self):
        """A metric of an evaluation; no gradient is taken."""

        def accumulate(total, w, x):
            return total + jnp.sum(x @ w > 0, dtype=jnp.float32)

        return self.run(accumulate, lambda w, total: w - total / 64, self.put(jnp.zeros(()), P()))

    # -- as the advice has it ------------------------------------------------------------------

    def counted_by_shards(self):
        def accumulate(total, w, x):
            f = lambda w, x: jnp.sum(x @ w > 0, dtype=jnp.float32)  # noqa: E731
            own = jax.vmap(f, (None, 0))(w, x.reshape(4, -1, *x.shape[1:]))
            return total + lax.with_sharding_constraint(own, NamedSharding(self.mesh, D))

        return self.run(accumulate, lambda w, g: w - g.sum() / 64, self.put(jnp.zeros(4), D))

    def two_shards_under_jit(self):
        def accumulate(g, w, x):
            own = jax.vmap(jax.value_and_grad(loss), (None, 0))
            own = own(w, x.reshape(4, -1, *x.shape[1:]))
            split = NamedSharding(self.mesh, D)
            return jax.tree.map(lambda g, o: g + lax.with_sharding_constraint(o, split), g, own)

        start = self.put(jnp.zeros(4), D), self.put(jnp.zeros((4, 64, 64)), D)
        return self.run(accumulate, lambda w, g: w - g[1].mean(0) / (1 + g[0].mean(0)), start)

    def two_shards_in_a_shard_map(self):
        def accumulate(g, w, x):
            own = jax.value_and_grad(loss)(w, x)
            return jax.tree.map(lambda g, o: g + o[None], g, own)

        def update(w, g):
            total, g = lax.pmean(jax.tree.map(lambda g: g[0], g), "data")
            return w - g / (1 + total)

        accumulate = self.mapped(accumulate, ((D, D), P(), D), (D, D))
        start = self.put(jnp.zeros(4), D), self.put(jnp.zeros((4, 64, 64)), D)
        return self.run(accumulate, self.mapped(update, (P(), (D, D)), P()), start)

    def shards_under_jit(self):
        def accumulate(g, w, x):
            own = jax.vmap(jax.grad(loss), (None, 0))(w, x.reshape(4, -1, *x.shape[1:]))
            return g + lax.with_sharding_constraint(own, NamedSharding(self.mesh, D))

        return self.run(accumulate, lambda w, g: w - g.mean(0), self.put(jnp.zeros((4, 64, 64)), D))

    def shards_in_a_shard_map(self):
        accumulate = self.mapped(lambda g, w, x: g + jax.grad(loss)(w, x)[None], (D, P(), D), D)
        update = self.mapped(lambda w, g: w - lax.pmean(g[0], "data"), (P(), D), P())
        return self.run(accumulate, update, self.put(jnp.zeros((4, 64, 64)), D))

    # -- near misses ---------------------------------------------------------------------------

    def trained_in_each_call(self):
        """The next call reads the sum: it is the weights."""
        return self.run(lambda g, w, x: g + jax.grad(loss)(g, x), lambda w, g: g, self.w)

    def decayed(self):
        f = lambda g, w, x: 0.9 * g + jax.grad(loss)(w, x)  # noqa: E731
        return self.run(f, lambda w, g: w - g, self.put(jnp.zeros((64, 64)), P()))

    def clipped(self):
        def accumulate(g, w, x):
            own = jax.grad(loss)(w, x)
            return g + own / jnp.sqrt((own * own).sum())

        return self.run(accumulate, lambda w, g: w - g, self.put(jnp.zeros((64, 64)), P()))

    def ranked(self):
        """What scales the sum differs by device, and would differ by call."""

        def accumulate(g, w, x):
            own = lax.psum(jax.grad(loss)(w, x), "data")
            return g + own[None] * (1 + lax.axis_index("data"))

        f = self.mapped(accumulate, (D, P(), D), D)
        return self.run(f, lambda w, g: w - g.mean(0), self.put(jnp.zeros((4, 64, 64)), D))

    def looked_at(self):
        """Another program takes the total after each call."""
        norm = jax.jit(lambda g: jnp.sum(g * g))
        return self.under_jit(each=norm)

    def got(self):
        """The host takes the total after each call."""
        return self.under_jit(each=jax.device_get)

    def coupled(self):
        """Each example's gradient depends on the mean of all."""

        def normed(w, x):
            h = x @ w
            return jnp.mean((h - h.mean(0)) ** 4)

        f = lambda g, w, x: g + jax.grad(normed)(w, x)  # noqa: E731
        return self.run(f, lambda w, g: w - g, self.put(jnp.zeros((64, 64)), P()))


def watched(mesh, name):
    """Return the weights, the contents of all programs and what each program's runs sent."""
    followed = runs.Runs()
    with shardrules.watch() as seen, reads.Reads(followed):
        seen.runs = followed
        w = getattr(Loop(mesh), name)()
        w.block_until_ready()
    sent = sum(
        p._record.runs * p.content.account.total.wire_bytes for p in seen if p._record is not None
    )
    found = [h for p in seen for h in p.content.hints]
    return np.asarray(w), found, sent


PAIRS = [
    ("under_jit", "shards_under_jit"),
    ("in_a_shard_map", "shards_in_a_shard_map"),
    ("counted", "counted_by_shards"),
    ("two_under_jit", "two_shards_under_jit"),
    ("two_in_a_shard_map", "two_shards_in_a_shard_map"),
]


@pytest.mark.parametrize("before, after", PAIRS)
def test_each_call_sums_up_what_one_sum_after_the_loop_would(cpu_mesh, before, after):
    one, found, sent = watched(cpu_mesh, before)
    assert len(found) == (2 if before.startswith("two") else 1)
    calls = STEPS * CALLS
    for hint in found:
        assert hint.kind == "each call"
        assert f"so {calls} calls build up {STEPS} sums. " in hint.advice
        assert "P('data', *spec)" in hint.advice and "spec being w's own without" in hint.advice
        assert f"reduce once after the loop, where the total is used: {STEPS} all" in hint.advice
        assert f"instead of {calls}. Each device keeps a whole sum until then (" in hint.advice
        assert hint.entry.phase == "backward" or "the gradient" not in hint.advice
    other, left, then = watched(cpu_mesh, after)
    assert "each call" not in [hint.kind for hint in left]
    # What is said of one call holds for all calls together; whole bytes are said, and no more.
    said = STEPS * CALLS * sum(hint.sent_before - hint.sent_after for hint in found)
    assert 0 <= sent - then - said < STEPS * CALLS < said
    np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


@pytest.mark.one_lane
@pytest.mark.parametrize(
    "name", "trained_in_each_call decayed clipped ranked looked_at got coupled".split()
)
def test_sums_that_each_call_needs(cpu_mesh, name):
    _, found, _ = watched(cpu_mesh, name)
    assert "each call" not in [hint.kind for hint in found]


def test_a_program_with_the_same_text_has_one_row_of_runs(cpu_mesh):
    """P() and P(None, None) are two executables, each of which the other one's result feeds."""
    followed, one, other = runs.Runs(), runs.RunRecord(), runs.RunRecord()
    followed.records += [one, other]
    arrays = [jnp.zeros(1) for _ in range(5)]
    for k, record in enumerate([one, other, other, one]):
        followed._ran(record, [arrays[k]], [arrays[k + 1]])
    assert followed.fed([one, other]) == {(0, 0): (4, 1)}
    assert followed.fed([other]) == {(0, 0): (2, 1)}
    followed.read(arrays[2])
    followed.read(arrays[3])
    assert followed.fed([one, other]) == {}  # the host reads it between


# -- what each step reads -------------------------------------------------------------------------


def read_in(mesh, loop):
    """Run a loop over steps and return its findings on the host, and its notes."""
    put = lambda x, spec: jax.device_put(x, mesh and NamedSharding(mesh, spec))  # noqa: E731
    w, x = put(jnp.ones((8, 8)), P()), put(jnp.ones((8, 8)), D)
    followed = runs.Runs()
    with shardrules.watch() as seen, reads.Reads(followed) as read:
        seen.runs = followed
        loop(jax.jit(lambda w: (w - 0.1 * jax.grad(loss)(w, x), loss(w, x))), w)
    return read.findings(), read.notes()


def each(step, w):
    for _ in range(9):
        w, value = step(w)
        float(value)


def both(step, w):
    for _ in range(9):
        w, value = step(w)
        print(float(value), float(value + 1))


def got(step, w):
    for _ in range(9):
        w, value = step(w)
        jax.device_get(value)


def got_as_a_tree(step, w):
    for _ in range(9):
        w, value = step(w)
        jax.device_get({"loss": value, "more": [value + 1, value + 2, value + 3]})


def listed(step, w):
    for _ in range(9):
        w, value = step(w)
        value.tolist()


def sometimes(step, w):
    for n in range(40):
        w, value = step(w)
        if n % 4 == 0:
            jax.device_get(value)


def seldom(step, w):
    """Between two reads the step has JAX's fast path back."""
    for n in range(240):
        w, value = step(w)
        if n % 20 == 0:
            jax.device_get(value)


def afterwards(step, w):
    values = []
    for _ in range(12):
        w, value = step(w)
        values.append(value)
    print(max(float(value) for value in values))


def sliced(step, w):
    """JAX's own slices run between the reads, and no step does."""
    values = []
    for _ in range(12):
        w, value = step(w)
        values.append(value)
    values = jnp.stack(values)
    print(max(float(values[n]) for n in range(12)))


@pytest.mark.parametrize(
    "loop, times", [(each, 9), (both, 18), (got, 9), (got_as_a_tree, 36), (listed, 9)]
)
def test_a_line_that_reads_after_each_run_is_a_finding(cpu_mesh, loop, times):
    found, notes = read_in(cpu_mesh, loop)
    ((line, said),) = found.items()
    assert "test_host_loops.py:" in line and notes == []
    assert f" read an array (float32[]) on the host {times} times, after each run" in said
    assert "shardrules.testing.steady_state" in said
    programs = several.gather([], [])
    results = programs.with_reads(found, ())
    assert results.findings == 1 and not results.clean
    allowed = programs.with_reads(found, [(f"read at {line}", "it is logged")])
    assert allowed.findings == 0 and allowed.clean


@pytest.mark.parametrize("loop", [each, got, listed])
def test_such_a_line_is_a_note_where_no_other_device_waits(loop):
    found, (note,) = read_in(None, loop)
    assert found == {} and " on the host 9 times, after each run" in note


def microbatched(step, w):
    """Each update follows four runs of the step, and is read."""
    update = jax.jit(lambda w: jnp.sum(w * w))
    for _ in range(12):
        for _ in range(4):
            w, _ = step(w)
        float(update(w))


def one_step_late(step, w):
    """Each read waits for a step behind which the next one is queued already."""
    late = None
    for _ in range(12):
        w, value = step(w)
        if late is not None:
            float(late)
        late = value


@pytest.mark.parametrize(
    "loop", [sometimes, seldom, afterwards, sliced, microbatched, one_step_late]
)
def test_lines_that_read_less_often_or_when_no_step_runs(cpu_mesh, loop):
    assert read_in(cpu_mesh, loop) == ({}, [])
    assert read_in(None, loop) == ({}, [])


def unread_first(step, w):
    """The first steps leave it to C++; a read brings the count back."""
    for _ in range(40):
        w, value = step(w)
    each(step, w)


def test_reads_after_steps_that_none_read_are_found():
    found, (note,) = read_in(None, unread_first)
    assert found == {} and " on the host 9 times, after each run" in note


@pytest.mark.parametrize("devices", [None, "several"])
def test_a_step_on_one_device_has_the_fast_path_back(cpu_mesh, devices):
    """JAX calls no Python for it then; a program over several devices is counted on."""
    calls = []

    def loop(step, w):
        for _ in range(20):
            w, _ = step(w)
        sys.setprofile(lambda frame, event, arg: event == "call" and calls.append(frame))
        try:
            for _ in range(20):
                w, _ = step(w)
        finally:
            sys.setprofile(None)

    before = sys.getprofile()
    try:
        assert read_in(devices and cpu_mesh, loop) == ({}, [])
    finally:
        sys.setprofile(before)
    assert (len(calls) < 20) == (devices is None)


class OneHere:
    """An executable of a job whose processes have one device each."""

    _in_shardings = ()

    def __init__(self, mesh):
        self.xla_executable = types.SimpleNamespace(local_devices=lambda: [mesh.devices.flat[0]])
        self._out_shardings = [NamedSharding(mesh, P())]
        self._unsafe_call = self.unsafe_call = lambda x: [x + 1]


def test_a_program_over_several_processes_is_not_one_of_one_device(cpu_mesh):
    followed, executable = runs.Runs(), OneHere(cpu_mesh)
    record = followed.follow(executable, "step at train.py:1")
    x = jnp.zeros(1)
    for _ in range(20):
        (x,) = executable._unsafe_call(x)
    assert record.runs == 20 and record.took == {(record, 0, 0): 19}


def test_a_jax_whose_fast_paths_have_moved_runs_the_program(monkeypatch):
    def moved():
        raise UnsupportedJaxError("moved")

    def loop(step, w):
        monkeypatch.setattr(runs.watching, "forget_fast_paths", moved)
        try:
            unread_first(step, w)
        finally:
            monkeypatch.undo()

    read_in(None, loop)
