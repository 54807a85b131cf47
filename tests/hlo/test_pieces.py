"""All-gathers that XLA for TPU writes as an all-reduce of each device's piece among zeros."""

import jax
import jax.numpy as jnp
import programs
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardrules import hlo, testing

from . import text as T

PLACE = "%i = u32[1]{0:T(128)} dynamic-slice(%table, %me), dynamic_slice_sizes={1}"
AMONG = "%d = f32[16] dynamic-update-slice(%z, %x, %at)"


def lines(sharding="{replicated}", table="0, 8, 0, 8, 0, 8, 0, 8", place=PLACE, among=AMONG):
    return [
        T.parameter(sharding),
        f"%table = u32[8]{{0:T(128)}} constant({{{table}}})",
        "%me = u32[] partition-id()",
        place,
        "%at = u32[]{:T(128)} bitcast(%i)",
        "%zero = f32[] constant(0)",
        "%z = f32[16] broadcast(%zero), dimensions={}",
        among,
    ]


def judged(*before, groups=T.OVER_MODEL, operand="%d", apply="add", regions="", **kwargs):
    end = T.all_reduce(operand, groups, "f32[16]", apply=apply)
    text = T.module("\n".join([*lines(**kwargs), *before, end]), regions)
    (verdict,) = hlo.judge(text, mesh=T.MESH).verdicts
    return verdict


def test_pieces_of_equal_data_are_a_redundant_all_gather():
    verdict = judged()
    assert (verdict.verdict, verdict.bytes) == ("redundant", 32)
    assert verdict.reason == "its operand is proven equal over model"
    found = verdict.collective
    assert (found.kind, found.opcode, found.reduction) == ("all-gather", "all-reduce", "")
    assert (found.operand_bytes, found.dimension, found.axes) == (32, "0", ("model",))


def test_pieces_of_other_data_are_needed_and_the_cause_is_theirs():
    verdict = judged(sharding=T.BOTH)
    assert (verdict.verdict, verdict.collective.kind) == ("needed", "all-gather")
    assert "parameter 0 (x) is sharded over data,model" in verdict.reason
    groups = T.ALL
    among = "%d = f32[64] dynamic-update-slice(%z, %x, %at)"
    text = T.module(
        "\n".join(
            [
                *lines(T.DATA, ", ".join(map(str, range(0, 64, 8))), among=among),
                T.all_reduce("%d", groups, "f32[64]"),
            ]
        ).replace("%z = f32[16]", "%z = f32[64]")
    )
    (verdict,) = hlo.judge(text, mesh=T.MESH).verdicts
    assert (verdict.verdict, verdict.needed_axes) == ("overwide", ("data",))


FUSED = """%fused (p.0: f32[16], p.1: f32[8], p.2: u32[]) -> f32[16] {
  %p.0 = f32[16] parameter(0)
  %p.1 = f32[8] parameter(1)
  %p.2 = u32[] parameter(2)
  %t.1 = f32[8] tanh(%p.1)
  ROOT %u.1 = f32[16] dynamic-update-slice(%p.0, %t.1, %p.2)
}

"""
SUM_AND_ONE = """%more (a.1: f32[], b.1: f32[]) -> f32[] {
  %a.1 = f32[] parameter(0)
  %b.1 = f32[] parameter(1)
  %one.1 = f32[] constant(1)
  %sum.1 = f32[] add(%a.1, %b.1)
  ROOT %more.1 = f32[] add(%sum.1, %one.1)
}

"""
FUSION = "%d = f32[16] fusion(%z, %x, %at), kind=kLoop, calls=%fused"
TWICE = FUSED.replace("ROOT %u.1", "%u.1").replace(
    "}\n", "  ROOT %e.1 = f32[16] exponential(%u.1)\n}\n"
)


@pytest.mark.parametrize(
    "kwargs, before",
    [
        ({"among": FUSION, "regions": FUSED}, ()),
        ({"operand": "%e"}, ("%b = f32[2,8] reshape(%d)", "%e = f32[16] bitcast(%b)")),
        ({"table": "8, 0, 0, 8, 8, 0, 0, 8"}, ()),
        ({"place": "%i = u32[1] dynamic-slice(%table, %me), dynamic_slice_sizes={1}"}, ()),
    ],
    ids=["fused", "reshaped", "in another order", "without layouts"],
)
def test_other_forms(kwargs, before):
    assert judged(*before, **kwargs).verdict == "redundant"
    assert judged(*before, sharding=T.BOTH, **kwargs).verdict == "needed"


@pytest.mark.parametrize(
    "kwargs, before",
    [
        ({"table": "0, 0, 0, 8, 0, 8, 0, 8"}, ()),
        ({"table": "0, 4, 0, 4, 0, 4, 0, 4"}, ()),
        ({"groups": "{{0,1,2,3},{4,5},{6,7}}"}, ()),
        ({"apply": "max"}, ()),
        ({"apply": "more", "regions": SUM_AND_ONE}, ()),
        ({"among": AMONG.replace("%z", "%n")}, ()),
        ({"operand": "%e"}, ("%e = f32[16] exponential(%d)",)),
        ({"operand": "%e"}, ("%e = f32[16] add(%d, %d)",)),
        ({"among": FUSION, "regions": TWICE}, ()),
        ({"among": FUSION.replace("(%z", "(%n"), "regions": FUSED}, ()),
        ({"place": "%i = u32[1] bitcast(%me)"}, ()),
        ({"place": '%i = u32[1] custom-call(%me), custom_call_target="k"'}, ()),
        ({"among": AMONG + ", frobnicate=1"}, ()),
        ({}, ("%other = f32[16] fusion(%z, %y, %at), kind=kLoop, calls=%fused",)),
    ],
)
def test_what_is_not_all_gathered(kwargs, before):
    if "%y" in str(before):  # another call of the same computation, with other data
        kwargs = {"among": FUSION, "regions": FUSED}
        before = (T.parameter(T.BOTH, name="y", number=1), *before)
    else:
        ones = "%one = f32[] constant(1)\n%n = f32[16] broadcast(%one), dimensions={}"
        kwargs = {"place": PLACE, **kwargs}
        kwargs["place"] = f"{ones}\n{kwargs['place']}"
    verdict = judged(*before, **kwargs)
    assert verdict.verdict != "redundant"


def one(f, mesh, shape, dtype, spec=P()):
    mapped = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False)
    (arg,) = (a.update(dtype=dtype) for a in programs.structs(mesh, (shape, spec)))
    return testing.judge(jax.jit(mapped).lower(arg).compile()).verdicts


SMALL = {
    "flat": lambda x: lax.all_gather(x, "model"),
    "of all": lambda x: lax.all_gather(x, ("data", "model"), tiled=True),
    "scalars": lambda x: lax.all_gather(x.sum(), "data"),
    "fused": lambda x: jnp.sin(lax.all_gather(jnp.tanh(x), "data")) + 1,
    "in a loop": lambda x: lax.scan(
        lambda c, _: (lax.all_gather(c.sum(), "data").sum() * c, None), x, length=5
    )[0],
    "combined": lambda x: (lax.all_gather(x.sum(), "data"), lax.all_gather(x.max(), "data")),
    "indices": lambda x: lax.all_gather(jnp.argmax(x), "data"),
    "in groups": lambda x: lax.all_gather(x, "data", axis_index_groups=[[0, 1], [2, 3]]),
}


@pytest.mark.tpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", SMALL)
def test_small_all_gathers_on_tpu(tpu_mesh, name, dtype):
    """As those of 512 elements are, which stay all-gathers."""
    for spec, verdict in ((P(), "redundant"), (P(("data", "model")), "needed")):
        found = one(SMALL[name], tpu_mesh, (64,), dtype, spec)
        assert {(v.collective.kind, v.verdict) for v in found} == {("all-gather", verdict)}
    if name != "in a loop":
        assert {v.collective.opcode for v in found} == {"all-reduce"}


@pytest.mark.tpu
@pytest.mark.parametrize("dtype", ["int16", "float16", "int8", "uint8", "bool", "float8_e4m3fn"])
def test_small_elements_are_packed_into_words_on_tpu(tpu_mesh, dtype):
    for spec, verdict, count in ((P(), "redundant", 56), (P("data"), "needed", 14)):
        (found,) = one(
            lambda x: lax.all_gather(x, "data", tiled=True), tpu_mesh, (56,), jnp.dtype(dtype), spec
        )
        assert (found.collective.kind, found.collective.opcode) == ("all-gather", "all-reduce")
        assert (found.verdict, found.bytes) == (verdict, count * jnp.dtype(dtype).itemsize)
