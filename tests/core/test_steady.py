"""A loop on the host in its steady state, and every way to fall out of it."""

from __future__ import annotations

import os
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardrules import testing
from shardrules.errors import ShardrulesError, SteadyStateError

ARRAY = type(jnp.ones(1))


def init():
    return {"w": jnp.ones((8,)), "m": jnp.zeros((8,))}


@jax.jit
def loss(state, x):
    return (state["w"] * x).sum()


def make_step(f=None):
    def step(state, x):
        m = 0.9 * state["m"] + x
        return {"w": state["w"] - m, "m": m}

    return jax.jit(f or step, donate_argnums=0)


def failure(run, count=3, **options):
    """Run a body in a guarded loop and return the error; what was replaced must be back."""
    before = patched()
    with pytest.raises(SteadyStateError) as caught:
        with testing.steady_state(**options) as s:
            for n in range(count):
                run(n)
                s.tick()
    assert patched() == before
    return caught.value


def fails(*args, **options):
    return str(failure(*args, **options))


def patched():
    """What a block replaces, of what everybody can see."""
    return np.asarray, np.array, ARRAY._value, jax.stages.Compiled.__call__


def test_a_steady_loop_passes():
    step, x = make_step(), jnp.ones(8)
    state = step(init(), x)
    loss(state, x)
    with testing.steady_state() as s:
        for _ in range(4):
            state = step(state, x)
            value = loss(state, x)
            s.tick()
    assert np.isfinite(float(value))


@pytest.mark.parametrize(
    "other, text",
    [
        (lambda: jnp.ones(9), "x: shape was [8], is [9]"),
        (lambda: jnp.ones(8, jnp.bfloat16), "x: dtype was float32, is bfloat16"),
        (lambda: jax.lax.full((8,), 1.0) * 1.0, "x: weak type was strongly typed, is weakly typed"),
        (lambda: jax.device_put(jnp.ones(8), jax.devices()[1]), "x: sharding was "),
    ],
    ids=["shape", "dtype", "weak type", "sharding"],
)
def test_a_compilation_says_what_changed(other, text):
    f = jax.jit(lambda x: x * 2)
    first, second = jnp.ones(8), jax.block_until_ready(other())
    f(first)
    error = failure(lambda n: f(first if n == 0 else second))
    assert error.problem == "compiled"
    name, _, place = str(error).splitlines()[0].partition(" is compiled inside steady_state at ")
    assert name.startswith("jit__lambda") and os.path.basename(__file__) in place
    assert text in str(error)


def test_a_first_call_and_a_new_function():
    x = jnp.ones(8)
    f = jax.jit(lambda x: x * 3)
    message = fails(lambda n: f(x))
    assert "it was not called in this block before: call it once before the loop" in message

    def body(n):
        jax.jit(lambda x: x * 3)(x)

    body(0)
    assert "it is another function (jax.jit inside the loop)" in fails(
        body, count=4, warmup_count=1
    )


def test_a_call_that_failed_is_not_blamed_later():
    x = jnp.ones(8)

    compiled = jax.jit(lambda x: x * 2).lower(x).compile()

    def body(n):
        with pytest.raises(TypeError):
            compiled(nine)  # an aval that it was not compiled for
        jax.jit(lambda x: x * 5).lower(x).compile()

    nine = jnp.ones(9)
    error = failure(body)
    assert error.problem == "compiled" and str(error).endswith(
        ":\n  to do: compile it before the loop"
    )


def test_warm_up():
    step, x = make_step(), jnp.ones(8)
    state = init()
    with testing.steady_state(warmup_count=1) as s:
        for _ in range(3):
            state = step(state, x)
            if s._ticks == 0:
                float(state["w"][0])
            s.tick()


@pytest.mark.parametrize(
    "read",
    [
        float,
        bool,
        int,
        repr,
        lambda x: f"{x:.1f}",
        lambda x: x.tolist(),
        lambda x: np.asarray(x),
        lambda x: np.array(x),
        lambda x: x.item(),
    ],
    ids=["float", "bool", "int", "repr", "format", "tolist", "asarray", "array", "item"],
)
def test_reads_by_the_host_are_seen_on_cpu(read):
    step, x = make_step(), jnp.ones(8)
    state = step(init(), x)
    loss(state, x)
    states = [state]

    def body(n):
        states[0] = step(states[0], x)
        read(loss(states[0], x))

    error = failure(body)
    assert error.problem == "read"


def test_what_is_asked_for_is_no_implicit_transfer():
    x = jnp.ones(8)
    with testing.steady_state():
        assert jax.device_get(x).shape == (8,)
        jax.device_put(np.ones(8, np.float32))


def test_values_of_the_host_are_seen():
    x = jnp.ones(8)
    loss({"w": x, "m": x}, x), loss({"w": x, "m": x}, np.ones(8, np.float32))
    error = failure(lambda n: loss({"w": x, "m": x}, np.ones(8, np.float32)))
    assert (error.problem, error.paths) == ("host values", ("x",))
    first, value, *_ = str(error).splitlines()
    assert re.match("loss at .* is called with host values, each of which is copied", first)
    assert value == "  x: numpy float32[8]"
    error = failure(lambda n: jnp.array([1.0, 2.0]))  # a copy of its own, and JAX's guard sees it
    assert error.problem in ("host values", "transfer")


@pytest.mark.slow
def test_operations_outside_of_jit_take_numbers():
    x = jnp.ones(8)
    values = [x]

    def body(n):
        values[0] = values[0] * 2 + 1

    with testing.steady_state(warmup_count=1) as s:
        for n in range(3):
            body(n)
            x[n]
            s.tick()
    assert float(values[0][0]) == 15.0

    def compare(n):
        if values[0].sum() < 0:
            raise ValueError("negative")

    message = fails(compare, warmup_count=1)
    assert message.startswith("an array bool[] is read by the host (read) inside steady_state at ")
    message = fails(lambda n: x + np.ones(8, np.float32), warmup_count=1)
    assert re.match(r"an operation \(_?add\) at .*: numpy float32\[8\]", message, re.DOTALL)
    message = fails(lambda n: loss({"w": x, "m": x}, 2.0), warmup_count=1)
    assert message.splitlines()[1] == "  x: float"


@pytest.mark.parametrize(
    "first, second, said",
    [
        ({"a": 1}, {"a": 1, "y": 1}, "s['y'] came"),
        ({"a": 1, "y": 1}, {"a": 1}, "s['y'] went"),
        ({"a": 1, "b": 1}, {"y": 1, "z": 1}, "s['y'], s['z'] came, and s['a'], s['b'] went"),
    ],
)
def test_arguments_that_only_come_or_only_go_are_named_alone(first, second, said):
    arrays = [jax.tree_util.tree_map(lambda _: jnp.ones(8), tree) for tree in (first, second)]
    add = jax.jit(lambda s: sum(s.values()))
    error = failure(lambda i: add(arrays[i // 2]), warmup_count=1)
    assert f"the arguments' tree changed: {said}\n" in f"{error}\n"


def test_what_the_guard_of_jax_refuses_is_an_error_of_this_tree():
    def refused(n):
        raise RuntimeError("INVALID_ARGUMENT: Disallowed device-to-host transfer: shape=(8)")

    assert fails(refused) == (
        "an implicit transfer between host and device inside steady_state: JAX says\n"
        "  INVALID_ARGUMENT: Disallowed device-to-host transfer: shape=(8)\n"
        "  to do: make it before the loop, or ask for it with jax.device_put or jax.device_get"
    )


@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_donated_memory_that_stays():
    x = jnp.ones(8)

    def narrower(state, x):
        return {"w": state["w"] - x, "m": state["m"].astype(jnp.bfloat16)}

    step = make_step(narrower)
    step(init(), x)
    states = [init() for _ in range(3)]
    message = fails(lambda n: step(states[n], x))
    assert message.startswith(
        "narrower did not reuse the memory of its donated arguments:\n  state['"
    )
    assert "is bf16[8]" in message

    def unread(state, x):
        return x + 1

    step = make_step(unread)
    step(init(), x)
    error = failure(lambda n: step(states[2], x))
    assert error.paths == ("state['m']", "state['w']")
    assert "float32[8]: pruned, since the program never reads it" in str(error)


@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_a_compiled_program_is_watched_too():
    x = jnp.ones(8)

    def shrink(state, x):
        return state["w"] - x, state["m"].sum()

    compiled = make_step(shrink).lower(init(), x).compile()
    states = [init() for _ in range(3)]
    assert failure(lambda n: compiled(states[n], x)).problem == "kept"
    with testing.steady_state():  # and it is called as before
        jax.jit(lambda x: x)


@pytest.mark.slow
def test_live_bytes_that_grow():
    step, x = make_step(), jnp.ones(8)
    state = step(init(), x)
    loss(state, x)
    states, kept = [state], []

    def body(n):
        states[0] = step(states[0], x)
        kept.append(loss(states[0], x))

    message = fails(body)
    assert message.startswith("live arrays grew by 4 B in iteration 2: 1 more float32[]\n")
    kept.clear()
    with testing.steady_state(growth_bytes=4) as s:
        for n in range(3):
            body(n)
            s.tick()


def test_everything_is_put_back():
    before = patched()
    with pytest.raises(KeyError):
        with testing.steady_state():
            with testing.steady_state():
                assert patched() != before
            assert patched() != before
            raise KeyError("the user's own")
    assert patched() == before


def test_other_threads_are_left_alone():
    x, seen = jnp.ones(8), []

    def loader():
        seen.append(float(np.asarray(x).sum()))
        seen.append(jax.jit(lambda x: x * 7)(np.ones(8)).shape)

    with testing.steady_state():
        thread = threading.Thread(target=loader)
        thread.start()
        thread.join()
    assert seen == [8.0, (8,)]


def test_two_threads_at_once():
    before, results = patched(), []
    x = jnp.ones(8)
    barrier = threading.Barrier(2)

    def run(read):
        try:
            with testing.steady_state():
                barrier.wait()
                if read:
                    float(x.sum())
        except SteadyStateError:
            results.append(read)

    float(x.sum())
    threads = [threading.Thread(target=run, args=(read,)) for read in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True]
    assert patched() == before


def test_calls_are_fast_again_and_nothing_is_compiled_anew():
    traces = []

    @jax.jit
    def f(x):
        traces.append(1)
        return x + 1

    x = jnp.ones(8)
    f(x)
    with testing.steady_state():
        f(x)
    f(x)
    assert len(traces) == 1


def test_bad_options():
    with pytest.raises(ShardrulesError, match="warmup_count=-1 is not a count; give 0 or more"):
        testing.steady_state(warmup_count=-1)
    with pytest.raises(ShardrulesError, match=r"tick\(\) outside of the block; write `with test"):
        testing.steady_state().tick()
