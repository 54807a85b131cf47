"""What XLA's partitioner decided, in programs as people write them: found, followed, executed."""

import re

import jax
import pytest
from jax.sharding import NamedSharding

from costs.test_waste import CASES, JITS, program, structs
from shardrules import hlo
from shardrules.costs import waste
from shardrules.door.compiled import placements
from shardrules.program import matching

# -- text without metadata ------------------------------------------------------------------------


def found_in(compiled, change=lambda text: text):
    """List the hints on a program's text after a change of that."""
    module = hlo.parse(change(compiled.as_text()))
    shardings = matching(module, placements(compiled).parameters())
    return waste.hints(hlo.judge(module, parameter_shardings=shardings))


def without_names(text):
    return re.sub(r", metadata=\{[^}]*\}", "", text)


@pytest.mark.parametrize("kind", ["one part", "only a slice"])
def test_text_without_names_says_nothing_of_a_shard_map_or_the_partitioner(cpu_mesh, kind):
    name = {"one part": "the_next_shard", "only a slice": "slice_of_a_psum"}[kind]
    body, _, args, _ = CASES[name]
    compiled = program(cpu_mesh, body, args).lower(*structs(cpu_mesh, args)).compile()
    (named,) = found_in(compiled)
    assert named.kind == kind
    found = found_in(compiled, without_names)
    # XLA for CPU makes no reduce-scatter where a partitioner's all-reduce would become one.
    assert [h.kind for h in found] == (["one part"] if kind == "one part" else [])
    for hint in found:
        assert "shard_map" not in hint.advice and "partitioner" not in hint.advice
        assert hint.sent_after == named.sent_after


def test_an_output_of_text_without_names_stays_sharded_by_either_way(cpu_mesh):
    before, _, args, out, _ = JITS["only returned"]
    f = jax.jit(before, out_shardings=NamedSharding(cpu_mesh, out))
    compiled = f.lower(*structs(cpu_mesh, args)).compile()
    (found,) = found_in(compiled, without_names)
    assert "with the axis in its out_specs, or in its out_shardings under jit" in found.advice


def test_before_xla_s_last_passes_there_is_no_hint(cpu_mesh):
    """They scatter, combine and hoist: a module of a 70B model before them sounded wasteful."""
    body, _, args, _ = CASES["the_next_shard"]
    compiled = program(cpu_mesh, body, args).lower(*structs(cpu_mesh, args)).compile()
    assert len(found_in(compiled)) == 1
    assert found_in(compiled, lambda text: text.replace("is_scheduled=true, ", "")) == []
