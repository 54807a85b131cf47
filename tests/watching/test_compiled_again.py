"""Why ``watch`` says that a program was compiled again, where HLO's types don't show it."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules.watching.programs import WatchedProgram

pytestmark = pytest.mark.one_lane


@pytest.fixture
def split(cpu_mesh):
    return NamedSharding(cpu_mesh, P("data"))


def note(*arguments):
    @jax.jit
    def total(x):
        return sum(a.sum() for a in jax.tree.leaves(x))

    with shardrules.watch() as seen:
        for x in arguments:
            total(x)
    (said,) = [n for n in seen.judged().notes if n.startswith("jit_total ")]
    return said


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host"])
def test_for_another_memory(split, kind):
    x = jax.device_put(np.ones((8, 16), np.float32), split)
    assert note(x, jax.device_put(x, split.with_memory_kind(kind))) == (
        "jit_total was compiled 2 times: argument 0 (x) is in device memory, then in "
        f"{kind} memory"
    )  # fmt: skip


def test_for_another_memory_of_one_leaf(split):
    """An optimizer's state that was offloaded, say."""
    x = jax.device_put(np.ones((8, 16), np.float32), split)
    kept = jax.device_put(x, split.with_memory_kind("pinned_host"))
    said = note({"w": x, "m": x}, {"w": x, "m": kept})
    assert said.endswith(
        "compiled 2 times: argument 0 (x['m']) is in device memory, then in pinned_host memory"
    )
    with pytest.raises(ValueError, match="not enough values"):
        note({"w": x, "m": kept}, {"w": x + 1, "m": kept})  # once


def test_for_a_weak_type(split):
    def ones(one):
        return jax.jit(lambda: jax.lax.broadcast(one, (8, 16)), out_shardings=split)()

    assert note(ones(1.0), ones(jnp.float32(1))) == (
        "jit_total was compiled 2 times: argument 0 (x) is weakly typed, then strongly typed"
    )


def test_for_arguments_that_a_step_returned(split):
    """The first ones are on no given devices; placed before, they are compiled for once."""
    step = jax.jit(lambda state, x: jax.tree.map(lambda leaf: leaf + x.sum(), state))
    for of, said in ((jnp.asarray, ["argument 0"]), (lambda a: jax.device_put(a, split), [])):
        x = jax.device_put(np.ones((8, 16), np.float32), split)
        with shardrules.watch() as seen:
            state = {"w": of(np.ones((8, 16), np.float32))}
            for _ in range(3):
                state = step(state, x)
        notes = [n for n in seen.judged().notes if "was compiled" in n]
        assert [re.search("argument 0", n)[0] for n in notes] == said
        for n in notes:
            assert "is uncommitted (jax.device_put has not placed it), then committed" in n


@pytest.mark.parametrize("kept", [False, True])
def test_for_the_sharding_that_a_step_returned(split, cpu_mesh, kept):
    """XLA shards what it returns as it likes; followed, the advice leaves one compilation."""
    whole = NamedSharding(cpu_mesh, P())
    step = jax.jit(lambda w, x: w + x * x.sum(), out_shardings=whole if kept else None)
    x, w = np.ones((8, 16), np.float32), jax.device_put(np.ones((8, 16), np.float32), whole)
    with shardrules.watch() as seen:
        for _ in range(3):
            w = step(w, jax.device_put(x, split))
    notes = [n for n in seen.judged().notes if "was compiled" in n]
    assert len(notes) == (not kept)
    if not kept:
        assert "f32[8,16] a device" in notes[0] and "f32[2,16] a device" in notes[0]
        assert notes[0].endswith(
            "out_shardings, for this output the sharding that the argument had first"
        )


def test_two_functions_of_one_name_are_two_programs(split):
    """pytest --shardrules judges many files, and each may have its ``train_step``."""
    with shardrules.watch() as seen:
        for defined, shape in ((_first_total, (8, 16)), (_second_total, (16, 16))):
            x = jax.device_put(np.ones(shape, np.float32), split)
            jax.jit(defined())(x)
    assert not [n for n in seen.judged().notes if "was compiled" in n]


def _first_total():
    def total(x):
        return x.sum()

    return total


def _second_total():
    def total(x):
        return x.sum() + 1

    return total


def test_an_argument_of_a_tuple_of_all_is_named_by_its_number():
    """XLA makes one of very many parameters."""
    text = "HloModule m\nENTRY %e (p: f32[8]) -> f32[8] {\n  ROOT %p = f32[8] parameter(0), "
    module = shardrules.hlo.parse(text + 'metadata={op_name="x"}\n}\n')
    program = types.SimpleNamespace(_parsed=lambda: (module,))
    names = [WatchedProgram.argument(program, number) for number in (0, 7)]
    assert names == ["argument 0 (x)", "argument 7"]


@pytest.mark.parametrize("count", [1, 8])
def test_programs_of_one_device_are_told_how_many_there_are(count, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: count)
    with shardrules.watch() as seen:
        jax.jit(lambda x: 2 * x)(np.ones(8))
    (said,) = [n for n in seen.judged().notes if "one device" in n]
    assert said.startswith(f"every program runs on one device, of {count}, so that nothing is ")
    assert ("--xla_force_host_platform_device_count=8" in said) == (count == 1)


def test_programs_of_several_devices_are_not(split):
    with shardrules.watch() as seen:
        jax.jit(lambda x: 2 * x)(jax.device_put(np.ones((8, 16)), split))
    assert not [n for n in seen.judged().notes if "one device" in n]
