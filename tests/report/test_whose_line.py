"""A collective that a library makes is found by the line of the user's code that calls it."""

import importlib.util
import sys

import jax
import jax.numpy as jnp
import programs
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardrules import hlo, report, testing
from shardrules.hlo.reader import module

LIBRARY = """
import jax

def summed(x):
    return jax.lax.psum(x, "model")
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A module of an installed package."""
    path = tmp_path / "site-packages" / "layers" / "sums.py"
    path.parent.mkdir(parents=True)
    path.write_text(LIBRARY)
    spec = importlib.util.spec_from_file_location("sums_of_layers", path)
    loaded = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, loaded)
    spec.loader.exec_module(loaded)
    return loaded


def test_what_a_library_sums_is_the_user_s_line(cpu_mesh, library):
    def body(x):
        return library.summed(jnp.tanh(x))  # the line

    f = jax.jit(jax.shard_map(body, mesh=cpu_mesh, in_specs=P(), out_specs=P(), check_vma=False))
    judgement = testing.judge(f, *programs.structs(cpu_mesh, ((8, 8), P())))
    (verdict,) = judgement.redundant
    line = body.__code__.co_firstlineno + 1
    assert verdict.collective.source[:2] == (__file__, line)
    assert verdict.collective.library == "layers/sums.py:5 (summed)"
    text = report.plain(report.content(judgement))
    assert f"test_whose_line.py:{line} (" in text and ", in layers/sums.py:5 (summed)" in text
    (entry,) = testing.account(f, *programs.structs(cpu_mesh, ((8, 8), P())))
    assert entry.source.startswith(f"{__file__}:{line} ")


def test_without_a_user_s_line_the_innermost_stays():
    inside = hlo.Frame("/a/site-packages/b/c.py", 1, "f"), hlo.Frame("/a/site-packages/d.py", 2)
    own = hlo.Frame("/home/model.py", 3, "step")
    assert module.users(inside) == inside[0] and module.library(inside) == ""
    assert module.users((own, *inside)) == own and module.library((own, *inside)) == ""
    assert module.users((*inside, own)) == own and module.library((*inside, own)) == "b/c.py:1 (f)"
    assert module.users(()) is None and module.library(()) == ""


def first_step(h, ws):
    return lax.scan(lambda h, w: (jnp.sin(h) * w.sum(), None), h, ws)[0].sum()


def second_step(h, ws):
    def layer(h, w):
        return jnp.tanh(h @ w), None

    return lax.scan(layer, h, ws)[0].sum()


def test_what_a_scan_takes_has_a_line_of_its_own_program(cpu_mesh):
    """JAX traces the slice of a trip once in a process: its line is the first program's."""
    given = programs.structs(cpu_mesh, ((64, 32), P("data")), ((6, 32, 32), P(None, "data")))
    first, second = (testing.account(jax.jit(f), *given) for f in (first_step, second_step))
    begin = second_step.__code__.co_firstlineno
    gathers = [entry for entry in second if entry.kind == "all-gather"]
    assert gathers and len(first.entries)
    for entry in gathers:
        assert entry.line in range(begin, begin + 5) and "second_step" in entry.function
        assert not entry.within or "second_step" in entry.within
