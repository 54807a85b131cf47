"""Constants in a program, and where its outputs lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardrules import hlo, report, testing
from shardrules.costs import placement
from shardrules.errors import CostAssertionError, ShardrulesError

TABLE = np.random.default_rng(0).standard_normal((4, 1024), np.float32)  # 16 kB


def struct(shape, mesh, spec):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))


def test_an_array_that_is_closed_over(cpu_mesh):
    def lookup(x):
        return jnp.sin(x @ TABLE)

    x = struct((8, 4), cpu_mesh, P("data"))
    with pytest.raises(CostAssertionError) as caught:
        testing.assert_no_large_constants(lookup, x, max_bytes=1000)
    lines = str(caught.value).splitlines()
    assert lines[:2] == [
        "lookup carries 1 constant of more than 1000 B:",
        f"  f32[4,1024], {TABLE.nbytes} B on each of 8 devices, {8 * TABLE.nbytes} B in all",
    ]
    assert lines[2].startswith("    used at ") and "test_placement.py:" in lines[2]
    assert lines[3:] == ["  to do: pass them as arguments, with the sharding that they should have"]
    # Passed, it is none; nor is an array that the program fills by itself.
    passed = lambda x, table: jnp.sin(x @ table) + jnp.zeros((8, 1024))  # noqa: E731
    table = struct(TABLE.shape, cpu_mesh, P())
    small = testing.assert_no_large_constants(passed, x, table, max_bytes=1000)
    assert [c for c in small if c.bytes > 8] == []


def test_outputs_that_are_gathered(cpu_mesh):
    x = struct((8, 16), cpu_mesh, P("data"))
    whole = NamedSharding(cpu_mesh, P())
    f = lambda x: {"y": jnp.sin(x), "z": x.sum()}  # noqa: E731
    gathering = jax.jit(f, out_shardings=whole)
    with pytest.raises(CostAssertionError) as caught:
        testing.assert_output_sharding(gathering, x, expect={"['y']": P("data"), "['z']": P()})
    lines = str(caught.value).splitlines()
    assert lines[:2] == [
        "the outputs of <lambda> are not sharded as expected:",
        "  ['y']: P(), expected P('data')",
    ]
    assert lines[2].startswith("    gathered from 128 B to 512 B on each device at ")
    assert lines[3] == (
        "  to do: pass out_shardings= to jax.jit, or name the axis in the out_specs of shard_map"
    )
    found = testing.assert_output_sharding(gathering, x, expect=whole)
    assert found == {"['y']": "P()", "['z']": "P()"}
    sharded = jax.jit(f, out_shardings={"y": x.sharding, "z": whole})
    testing.assert_output_sharding(sharded, x, expect={"['y']": P("data", None)})


def compiled_text(x):
    return jax.jit(jnp.sin).lower(x).compile().as_text()


@pytest.mark.parametrize(
    "said, ask",
    [
        (
            "max_bytes=-1 is not a count of bytes",
            lambda x: testing.assert_no_large_constants(jnp.sin, x, max_bytes=-1),
        ),
        (
            r"no output is at 'q'; there are \(all of it\)",
            lambda x: testing.assert_output_sharding(jnp.sin, x, expect={"q": P()}),
        ),
        (
            r"\(all of it\) has 0 dimensions, but P\('data'.* 1",
            lambda x: testing.assert_output_sharding(jnp.sum, x, expect=P("data")),
        ),
        (
            "does not fit the program's mesh: .* dat of",
            lambda x: testing.assert_output_sharding(jnp.sin, x, expect=P("dat")),
        ),
        (
            "'data' is not a sharding; give a PartitionSpec",
            lambda x: testing.assert_output_sharding(jnp.sin, x, expect="data"),
        ),
        (
            "does not say how its outputs are sharded",
            lambda x: testing.assert_output_sharding(compiled_text(x), expect=P()),
        ),
        (
            "needs a mesh",
            lambda _: testing.assert_output_sharding(jnp.sin, jnp.ones(8), expect=P("data")),
        ),
    ],
)
def test_what_can_not_be_asked(said, ask, cpu_mesh):
    with pytest.raises(ShardrulesError, match=said):
        ask(struct((8, 16), cpu_mesh, P("data")))


def test_a_pmap_under_a_jit_is_named():
    f = jax.jit(jax.pmap(lambda x: jnp.sin(x @ TABLE)))
    with pytest.raises(CostAssertionError, match="the program contains a jax.pmap, which"):
        testing.assert_no_large_constants(f, jnp.ones((8, 2, 4)), max_bytes=1000)


PMAP = """\
HloModule jit_f, is_scheduled=true, replica_count=8

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

ENTRY %main (x: f32[8,2]) -> f32[8,2] {
  %x = f32[8,2] parameter(0)
  ROOT %r = f32[8,2] all-reduce(%x), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%sum, \
metadata={op_name="OP"}
}
"""


def test_a_pmap_under_a_jit_as_it_was():
    [output] = placement.gathered(hlo.parse(PMAP.replace("OP", "jit(f)/xla_pmap")))
    assert (output.bytes_before, output.bytes_after) == (8, 64)
    assert placement.is_pmap(hlo.parse(PMAP.replace("OP", "jit(f)/xla_pmap")))
    assert placement.gathered(hlo.parse(PMAP.replace("OP", "jit(f)/psum"))) == []


def test_the_sections_of_a_report(cpu_mesh):
    big = np.random.default_rng(0).standard_normal((4, 1 << 17), np.float32)
    x = struct((8, 4), cpu_mesh, P("data"))
    whole = NamedSharding(cpu_mesh, P())
    f = jax.jit(lambda x: (jnp.sin(x @ big).sum(1), jnp.cos(x)), out_shardings=(None, whole))
    rows = [
        [cell.strip() for cell in line.split("|")]
        for line in report.plain(report.content(testing.judge(f, x))).splitlines()
    ]
    assert ["f32[4,131072]", f"{big.nbytes}", "8", f"{8 * big.nbytes}"] in [row[:4] for row in rows]
    assert rows[rows.index(["gathered outputs:"]) + 1][:2] == ["output", "shape"]
    assert ["1", "f32[8,4]", "32", "128"] in [row[:4] for row in rows]
