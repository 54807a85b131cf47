"""The times of a profile reach the programs that a process watched, however their text is printed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules.watching.profiles import profile, wire


@pytest.fixture
def profiled(cpu_mesh, tmp_path):
    """Watch and record a loop that carries nine arrays: XLA prints /*index=5*/ in its tuple."""
    names = "abcdefgh"
    rows = NamedSharding(cpu_mesh, P("data"))
    x = jax.device_put(np.ones((8, 8), np.float32), rows)
    weights = jax.device_put(
        {n: np.ones((8, 8), np.float32) for n in names}, NamedSharding(cpu_mesh, P())
    )

    def loss(weights, x):
        for name in names:
            x = jnp.tanh(x @ weights[name])
        return jnp.mean(x**2)

    def step(weights, x):
        def body(_, weights):
            return jax.tree.map(jnp.subtract, weights, jax.grad(loss)(weights, x))

        return jax.lax.fori_loop(0, 2, body, weights)

    step = jax.jit(step)
    with shardrules.watch() as seen:
        weights = jax.block_until_ready(step(weights, x))
        with jax.profiler.trace(str(tmp_path)):
            jax.block_until_ready(step(weights, x))
    return seen, str(tmp_path)


def test_a_step_with_a_long_tuple_gets_its_times(profiled):
    seen, folder = profiled
    assert "/*index=5*/" in next(p.text for p in seen if p.name == "jit_step")
    found = seen.profiled(folder)
    assert not [note for note in found.notes if "no times" in note]
    (content,) = (c for c in seen.judged().contents if c.title == "jit_step")
    assert content.timings is not None


def test_a_profile_without_hlo_takes_the_watched_text(profiled, monkeypatch):
    """JAX's profiler leaves the HLO of a program out now and then."""
    seen, folder = profiled
    monkeypatch.setattr(wire.Plane, "programs", lambda self: iter(()))
    found = seen.profiled(folder)
    assert "jit_step" in [program.name for program in found.programs]
    (content,) = (c for c in seen.judged().contents if c.title == "jit_step")
    assert content.timings is not None


def test_copies_that_count_source_lines_otherwise_are_one_text():
    """JAX 0.12 writes operations whose only metadata is a pointer into a text's own table."""
    line = "\n%%f {\n  ROOT %%p = f32[] parameter(0), metadata={%sstack_frame_id=%d}\n}\n"
    for before in ("", 'op_name="x" '):
        assert profile.body(line % (before, 37)) == profile.body(line % (before, 86))
    assert profile.body(line % ('op_name="x" ', 1)) != profile.body(line % ('op_name="y" ', 1))


def test_a_program_that_is_not_matched_is_named(profiled):
    with shardrules.watch() as another:
        pass
    folder = profiled[1]
    (note,) = (n for n in another.profiled(folder).notes if "no times" in n)
    assert note.startswith("jit_step ran in the recorded steps, but the report has no times of it")
    assert "record with --keep DIR" in note and "shardrules profile DIR" in note
    (note,) = (n for n in another.profiled(folder, folder).notes if "no times" in n)
    assert "--keep" not in note and note.endswith(f"`shardrules profile {folder}` has its times")
    assert "jit_step" in [program.name for program in profile.profile(folder).programs]


def test_a_program_that_did_not_run_then_is_named(profiled, cpu_mesh):
    seen, folder = profiled
    rows = NamedSharding(cpu_mesh, P("data"))

    def total(x):
        return x.sum()

    with shardrules.watch() as another:
        jax.jit(total)(jax.device_put(np.ones(8, np.float32), rows))
        jax.jit(jnp.tanh)(np.ones(8, np.float32))  # it has no collective, so no time is missing
    # What was recorded and is not in this report has a note of its own.
    notes = [note for note in another.profiled(folder).notes if "did not run" in note]
    said = "it did not run while the steps were recorded"
    assert notes == [f"the report has no times of jit_total: {said}"]
