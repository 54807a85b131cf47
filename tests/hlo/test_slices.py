"""Programs for several TPU slices, whose text is that of one slice."""

import pathlib

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardrules import aot, errors, hlo, program
from shardrules.costs import findings, transfers

from . import text as T

DATA = pathlib.Path(__file__).parent / "data"
ROWS, HALVES = "{devices=[16,1]<=[16]}", "{devices=[2,8]<=[16]}"
MESH = {"slice": 2, "data": 4}
OVER_SLICE = "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"
OVER_DATA = "{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}"


def told(judgement):
    return [(v.verdict, v.collective.kind, v.collective.axes) for v in judgement.verdicts]


def test_a_step_as_it_is_compiled():
    """Data parallelism over two slices (JAX 0.10.2)."""
    text = (DATA / "tpu_two_slices.hlo").read_text()
    judgement = hlo.judge(text, mesh={"slice": 2, "data": 8}, slices=2)
    kinds = ("reduce-scatter", "data"), ("all-reduce", "slice"), ("all-gather", "data")
    assert [(kind, (axis,)) for kind, axis in kinds] == [v[1:] for v in told(judgement)]
    assert not judgement.redundant and not judgement.unproven
    assert all(output.equal for output in judgement.outputs)
    assert judgement.partitions == 16
    assert not findings.find(judgement) and not transfers.read(judgement.module)


def test_a_ring_around_both_slices():
    """One ppermute is a permute in each slice and pairs between them (JAX 0.12.0.1)."""
    text = (DATA / "tpu_two_slices_ring.hlo").read_text()
    order = [(s, 100_000 * (s + 1) + d) for s in range(2) for d in range(8)]
    judgement = hlo.judge(
        text, mesh={"data": 16}, slices=order, parameter_shardings=[ROWS, "{replicated}"]
    )
    assert not judgement.unproven and not transfers.read(judgement.module)
    permutes = [v for v in judgement.verdicts if v.collective.kind == "collective-permute"]
    pairs = {pair for v in permutes for pair in v.collective.pairs}
    assert {(k, (k + 1) % 16) for k in range(16)} <= pairs
    assert [output.equal for output in judgement.outputs] == [False, True, True]


def test_without_the_order_of_the_slices_nothing_sharded_is_proven():
    text = (DATA / "tpu_two_slices.hlo").read_text()
    for mesh in ({"slice": 2, "data": 8}, None):
        judgement = hlo.judge(text, mesh=mesh)
        assert len(judgement.unproven) == len(judgement.verdicts) == 3
        assert "parameter 1 (x) is sharded over several slices" in judgement.unproven[0].reason
        assert "(pass slices=)" in judgement.unproven[0].reason


WRONG = {
    "none": (0, "slices=0 is not a positive number"),
    "other devices": ([(k % 2, k) for k in range(12)], "12 devices of 2 slices, but module"),
    "of other sizes": ([(int(k > 8), k) for k in range(16)], "16 devices of 2 slices, but module"),
    "too many for the mesh": (3, "compiled for 24 (8 partitions x 1 replicas x 3 slices)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_slices_that_do_not_fit(name):
    slices, message = WRONG[name]
    text = (DATA / "tpu_two_slices.hlo").read_text()
    with pytest.raises(errors.HloError) as caught:
        hlo.judge(text, mesh={"slice": 2, "data": 8}, slices=slices)
    assert message in str(caught.value)


# -- written by hand: two slices of four devices ---------------------------------------------------


def crossing(operand, target='"{1,2}x{0:3}"', kind="ALL_REDUCE", name="a_0", shape="f32[8]"):
    hints = (
        f'frontend_attributes={{_xla_host_transfer_handler_name="xla_megascale_runtime",'
        f'_xla_host_transfer_rendezvous="{name}",_xla_megascale_reduce_operation="SUM",'
        f'_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"}}'
    )
    return f"""%token = token[] after-all()
    %send = ({shape}, u32[], token[]) send({operand}, %token), channel_id=2, is_host_transfer=true, {hints}
    %recv = ({shape}, u32[], token[]) recv(%token), channel_id=1, is_host_transfer=true, {hints}
    %recv-done = ({shape}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
    %y = {shape} get-tuple-element(%recv-done), index=0"""


def two(*lines, before="", sharding=OVER_DATA, slices=2):
    text = T.module(
        "\n".join([T.parameter(sharding), *lines]), before, "is_scheduled=true, num_partitions=4"
    )
    return hlo.judge(text, mesh=MESH, slices=slices)


ORDER = [(s, 100_000 * (s + 1) + d) for s in range(2) for d in range(4)]
SWAPPED = [*ORDER[:4], *ORDER[:3:-1]]  # the second slice's devices the other way round
PAIRED = "{{100000,200000},{100001,200001},{100002,200002},{100003,200003}}"
ACROSS = "{{100000,200003},{100001,200002},{100002,200001},{100003,200000}}"
SUMS = {
    "of what is equal": (OVER_DATA, '"{1,2}x{0:3}"', 2, "redundant", ("slice",)),
    "of what differs": (OVER_SLICE, '"{1,2}x{0:3}"', 2, "needed", ("slice",)),
    "listed": (OVER_DATA, PAIRED, ORDER, "redundant", ("slice",)),
    "listed, in another order": (OVER_DATA, ACROSS, SWAPPED, "redundant", ("slice",)),
    "listed, across the order": (OVER_DATA, ACROSS, ORDER, "needed", None),
    "by ids that nobody told": (OVER_DATA, PAIRED, 2, "unproven", None),
    "of all": (
        OVER_DATA,
        "{{%s}}" % ",".join(str(d) for _, d in ORDER),
        2,
        "overwide",
        ("slice", "data"),
    ),
    "unreadable": (OVER_DATA, '"{1,2}x{0:3};{3,4}x{0:3}"', 2, "unproven", None),
    "of other devices": (OVER_DATA, '"{1,2}x{4:7}"', 2, "unproven", None),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_between_slices(name):
    sharding, target, slices, expected, axes = SUMS[name]
    judgement = two(crossing("%x", target), sharding=sharding, slices=slices)
    (verdict,) = judgement.verdicts
    assert (verdict.verdict, verdict.collective.kind) == (expected, "all-reduce")
    assert verdict.collective.axes == axes
    assert judgement.outputs[0].equal_over("slice") == (axes is not None)


def test_pairs_bring_nothing_to_the_others():
    lines = crossing("%x", "{{100003->200000},{200003->100000}}", "ONE_TO_ONE")
    judgement = two(lines, sharding="{replicated}", slices=ORDER)
    assert [v.verdict for v in judgement.verdicts] == ["redundant"]
    assert not judgement.outputs[0].equal and not judgement.outputs[0].equal_over("slice")
    judgement = two(lines, sharding=OVER_DATA, slices=ORDER)
    assert [v.verdict for v in judgement.verdicts] == ["needed"]


def test_what_is_sent_later_is_not_what_came():
    lines = crossing("%x").splitlines()
    lines = [lines[0], lines[2], lines[3], lines[1], lines[4]]  # the send after the recv-done
    judgement = two("\n".join(lines))
    assert judgement.outputs[0].blockers and not judgement.outputs[0].equal_over("slice")


def test_two_sends_of_one_name_are_not_told_apart():
    again = crossing("%x").splitlines()[1].replace("%send", "%send.2")
    lines = crossing("%x").splitlines()
    assert two("\n".join([*lines[:2], again, *lines[2:]])).outputs[0].blockers


BRANCHES = "".join(
    f"""%branch.{k} (p.{k}: f32[8]) -> f32[8] {{
  %p.{k} = f32[8] parameter(0)
  ROOT %r.{k} = f32[8] collective-permute(%p.{k}), channel_id={k + 5}, source_target_pairs={pairs}
}}

"""
    for k, pairs in enumerate(["{{0,1},{1,0}}", "{{2,3},{3,2}}"])
)
CHOICE = "%c = f32[8] conditional(%s, %x, %x), branch_computations={%branch.0, %branch.1}"


def test_a_choice_by_slice_does_not_hang():
    own = '%s = s32[] custom-call(), custom_call_target="SliceId"'
    judgement = two(own, CHOICE, before=BRANCHES, sharding=OVER_SLICE)
    assert [(v.verdict, v.divergent) for v in judgement.verdicts] == [("redundant", False)] * 2
    judgement = two(own, CHOICE, before=BRANCHES)
    assert [(v.verdict, v.divergent) for v in judgement.verdicts] == [("needed", False)] * 2
    # Near miss: the devices of a slice may take different branches.
    other = "%s = s32[] parameter(1), sharding={replicated}"
    other = "%i = u32[] partition-id()\n%s = s32[] convert(%i)"
    judgement = two(other, CHOICE, before=BRANCHES, sharding=OVER_SLICE)
    assert all(v.divergent for v in judgement.verdicts)


def test_a_choice_of_what_is_sent_to_other_slices_is_the_same_in_all():
    """The predicates around a send count, also where nothing else in its branch communicates."""
    branches = (
        "".join(
            f"""%branch.{k} (p.{k}: f32[8]) -> f32[8] {{
  %p.{k} = f32[8] parameter(0)
  {sent.replace("%", f"%b{k}.")}
  ROOT %r.{k} = f32[8] add(%b{k}.y, %b{k}.y)
}}

"""
            for k, sent in enumerate([crossing("%p"), crossing("%p", name="a_1")])
        )
        .replace("%b0.p,", "%p.0,")
        .replace("%b1.p,", "%p.1,")
    )
    # Each sends to the device of its own number in the other slice, which chooses as it does.
    equal = "%s = s32[] parameter(1), sharding={replicated}"
    by_device = "%i = u32[] partition-id()\n%s = s32[] convert(%i)"
    by_slice = '%s = s32[] custom-call(), custom_call_target="SliceId"'
    for own, verdicts in {
        equal: [("needed", False)] * 2,
        by_device: [("needed", False)] * 2,
        by_slice: [("unproven", True)] * 2,
    }.items():
        judgement = two(own, CHOICE, before=branches, sharding=OVER_SLICE)
        assert [(v.verdict, v.divergent) for v in judgement.verdicts] == verdicts, own


def test_the_number_of_a_slice_differs_between_slices_only():
    own = '%s = u32[] custom-call(), custom_call_target="SliceId"\n%y = u32[] add(%s, %s)'
    (output,) = two(own).outputs
    assert output.varying == ("slice",)


# -- as libtpu compiles it, in every order of the devices -------------------------------------------


def _orders(devices):
    grid = np.array(sorted(devices, key=lambda d: (d.slice_index, d.id))).reshape(2, 8)
    turned = grid.copy()
    turned[1] = turned[1][::-1]
    return {
        "slice after slice": (grid, ("slice", "data")),
        "slices innermost": (grid.T, ("data", "slice")),
        "one the other way round": (turned, ("slice", "data")),
    }


@pytest.mark.tpu
@pytest.mark.parametrize(
    "name",
    [
        "slices innermost",
        "one the other way round",
        pytest.param("slice after slice", marks=pytest.mark.full),
    ],
)
def test_the_order_that_a_compiled_program_tells(name):
    aot.tpu("v5e:2x4")  # the environment that libtpu needs
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:2x4", num_slices=2
    ).devices
    grid, axes = _orders(devices)[name]
    mesh = Mesh(grid, axes)

    def local(d, s):
        swapped = lax.ppermute(d, "slice", [(0, 1), (1, 0)])
        return lax.psum(s, "slice"), lax.psum(d, "data"), lax.psum(s, "data"), swapped

    specs = P(), P(), P("slice"), P("data")
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(P("data"), P("slice")), out_specs=specs, check_vma=False
    )
    args = [
        jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec))
        for shape, spec in (((64, 520), P("data")), ((16, 256), P("slice")))
    ]
    judgement = program.judge(jax.jit(mapped).lower(*args).compile())
    assert sorted(told(judgement)) == [
        ("needed", "all-reduce", ("data",)),
        ("needed", "all-reduce", ("slice",)),
        ("redundant", "all-reduce", ("data",)),
        ("redundant", "collective-permute", ("slice",)),
    ]
    assert [output.varying for output in judgement.outputs] == [(), (), ("slice",), ("data",)]
    assert not transfers.read(judgement.module)
