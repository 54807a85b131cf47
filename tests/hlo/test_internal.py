"""Permutes that XLA makes for itself are no findings; the program's own redundant ones still are."""

import pathlib

import pytest

from shardrules import errors, hlo, report, testing
from shardrules.costs import findings

from . import text as T

DATA = pathlib.Path(__file__).parent / "data"
RING = "{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"
ITSELF = "{" + ",".join(f"{{{d},{d}}}" for d in range(8)) + "}"
ZEROS = "%c = f32[] constant(0)\n%z = f32[8] broadcast(%c), dimensions={}"


def permuted(operand, op_name, pairs=RING, before=T.parameter(T.BOTH)):
    named = f', metadata={{op_name="{op_name}"}}' if op_name else ""
    return T.module(
        f"{before}\n%p = f32[8] collective-permute({operand}), channel_id=1, "
        f"source_target_pairs={pairs}{named}\n%s = f32[8] add(%x, %p)"
    )


X = T.parameter(T.BOTH)
CASES = {
    "an accumulator of zeros": (
        "%z",
        "jit(f)/jvp()/dot_general",
        RING,
        f"{X}\n{ZEROS}",
        "internal",
    ),
    "an empty pipeline": (
        "%z",
        "jit(f)/jit(_roll_static)/concatenate",
        RING,
        f"{X}\n{ZEROS}",
        "internal",
    ),
    "to itself": ("%x", "jit(f)/transpose(jvp())/pad", ITSELF, X, "internal"),
    "to itself, without a name": ("%x", "", ITSELF, X, "internal"),
    "one that moves": ("%x", "jit(f)/jvp()/dot_general", RING, X, "needed"),
    "the program's zeros": ("%z", "jit(f)/shard_map/ppermute", RING, f"{X}\n{ZEROS}", "redundant"),
    "the program's, to itself": ("%x", "jit(f)/shard_map/ppermute", ITSELF, X, "redundant"),
    "the program's, of pmap": ("%z", "pmap(f)/add", RING, f"{X}\n{ZEROS}", "redundant"),
    "zeros without a name": ("%z", "", RING, f"{X}\n{ZEROS}", "redundant"),
    "an accumulator, its permute's name dropped": (
        "%z",
        "",
        RING,
        f'{X}\n{ZEROS}, metadata={{op_name="jit(f)/jvp()/dot_general"}}',
        "internal",
    ),
    "other zeros, their permute's name dropped": (
        "%z",
        "",
        RING,
        f'{X}\n{ZEROS}, metadata={{op_name="jit(f)/jvp()/broadcast_in_dim"}}',
        "redundant",
    ),
    "replicated data, not constants": (
        "%y",
        "jit(f)/concatenate",
        RING,
        f"{X}\n{T.parameter('{replicated}', name='y', number=1)}",
        "redundant",
    ),
    "some of them move": ("%x", "jit(f)/pad", "{{0,0},{1,1},{2,3}}", X, "needed"),
}


@pytest.mark.parametrize("name", CASES)
def test_who_put_a_permute_there(name):
    operand, op_name, pairs, before, expected = CASES[name]
    judgement = hlo.judge(permuted(operand, op_name, pairs, before), mesh=T.MESH)
    assert [v.verdict for v in judgement.verdicts] == [expected]
    assert [f.kind for f in findings.find(judgement)] == [expected] * (expected == "redundant")
    assert len(judgement.internal) == (expected == "internal")


def test_only_permutes_are_xlas_own():
    """A sum of constants that the partitioner made goes away with the sharding that asks for it."""
    named = ', metadata={op_name="jit(f)/reduce_sum"}'
    text = T.module(f"{ZEROS}\n{T.all_reduce('%z', extra=named)}")
    assert [v.verdict for v in hlo.judge(text, mesh=T.MESH).verdicts] == ["redundant"]


def test_a_permute_to_itself_does_not_speak_of_equal_data():
    for op_name in ("jit(f)/pad", "jit(f)/shard_map/ppermute"):
        (verdict,) = hlo.judge(permuted("%x", op_name, ITSELF), mesh=T.MESH).verdicts
        assert verdict.reason == "it moves nothing: each device is its own source"


RINGS = {"tpu_v5e_ring": (2, 3), "gpu_pipeline": (1, 10)}  # JAX 0.10.2; 0.12.0.1
SHARDINGS = {
    "tpu_v5e_ring": None,
    "gpu_pipeline": [
        "{devices=[4,1,1,2]<=[8] last_tile_dim_replicate}",
        "{devices=[1,2,1,4]<=[4,2]T(1,0) last_tile_dim_replicate}",
    ],
}


@pytest.mark.parametrize("name", RINGS)
def test_rings_as_xla_starts_them(name):
    text = (DATA / f"{name}.hlo").read_text()
    judgement = hlo.judge(text, parameter_shardings=SHARDINGS[name])
    assert (len(judgement.internal), len(judgement.needed)) == RINGS[name]
    assert len(judgement.verdicts) == sum(RINGS[name])


def test_the_report_says_it_in_a_line_of_its_own():
    text = (DATA / "tpu_v5e_ring.hlo").read_text()
    said = report.plain(report.content(hlo.judge(text)))
    (line,) = [line for line in said.splitlines() if "XLA starts" in line]
    assert line.strip().startswith("2 x collective-permute, 16.8 MB each: XLA starts a ring")
    first = said.splitlines()[0]
    assert first.endswith(
        "; the most: forward collective-permute, 40%, by XLA's partitioner for dot_general"
    ), first
    assert "all needed" not in first and "to do:" not in said
    testing.assert_no_defensive_psum(text)
    assert 'class="badge internal"' in report.page(report.content(hlo.judge(text)))


def test_a_defensive_psum_beside_a_ring_is_still_found():
    psum = ', metadata={op_name="jit(f)/transpose(jvp())/shard_map/psum"}'
    text = permuted("%z", "jit(f)/jvp()/dot_general", RING, f"{X}\n{ZEROS}").replace(
        "ROOT %s = f32[8] add(%x",
        f"{T.parameter(T.DATA, name='y', number=1)}\n  {T.all_reduce('%y', extra=psum)}\n"
        "  ROOT %s = f32[8] add(%x",
    )
    with pytest.raises(errors.CollectiveAssertionError) as caught:
        testing.assert_no_defensive_psum(text, mesh=T.MESH)
    assert len(caught.value.verdicts) == 1 and "ring" not in str(caught.value)


# -- what else today's compilers print --------------------------------------------------------------

ROWS = "{devices=[8,1]<=[8]}"


@pytest.mark.parametrize(
    "name, shardings, kinds",
    [
        # JAX 0.12.0.1. TPU7x runs collectives on its SparseCores unless told otherwise.
        ("tpu7x_sparsecore", [ROWS, ROWS], ["all-gather", "reduce-scatter"]),
        ("gpu_broadcast", ["{devices=[1,8]<=[8]}", ROWS], ["collective-broadcast"]),
    ],
)
def test_nothing_is_unproven(name, shardings, kinds):
    judgement = hlo.judge((DATA / f"{name}.hlo").read_text(), parameter_shardings=shardings)
    assert {v.verdict for v in judgement.verdicts} == {"needed"}
    assert set(kinds) <= {v.collective.kind for v in judgement.verdicts}
    assert all(output.blockers == () for output in judgement.outputs)


CALLED = """%called (a: f32[8]) -> f32[8] {
  %a.9 = f32[8] parameter(0)
  ROOT %g = f32[8] all-reduce(%a.9), channel_id=2, replica_groups=GROUPS, use_global_device_ids=true, to_apply=%add
}

"""
START = "%start = ((), (), s32[1]) call-start(), to_apply=%called"
UPDATE = "%update = ((f32[8]), f32[8]) call-update(%start, %x)"
DONE = "%done = f32[8] call-done(%update)"


def offloaded(*lines, groups=T.OVER_MODEL, sharding=T.DATA):
    return hlo.judge(
        T.module("\n".join([T.parameter(sharding), *lines]), CALLED.replace("GROUPS", groups)),
        mesh=T.MESH,
    )


def test_an_update_brings_the_operands():
    (verdict,) = offloaded(START, UPDATE, DONE).verdicts
    assert verdict.verdict == "redundant"
    judgement = offloaded(START, UPDATE, DONE, groups=T.OVER_DATA)
    assert [v.verdict for v in judgement.verdicts] == ["needed"]
    assert judgement.outputs[0].equal  # summed over data, equal over model
    (verdict,) = offloaded(START, UPDATE, DONE, sharding=T.BOTH).verdicts
    assert verdict.verdict == "needed"


def test_operands_may_come_in_two_parts():
    both = CALLED.replace("(a: f32[8])", "(a: f32[8], b: f32[8])").replace(
        "  ROOT %g = f32[8] all-reduce(%a.9)",
        "  %b.9 = f32[8] parameter(1)\n  %s.9 = f32[8] add(%a.9, %b.9)\n  ROOT %g = f32[8] all-reduce(%s.9)",
    )
    y = T.parameter(T.BOTH, name="y", number=1)
    for start, update in (("", "%x, %y"), ("%x", "%y")):
        lines = [
            T.parameter(T.DATA),
            y,
            f"%start = ((), (), s32[1]) call-start({start}), to_apply=%called",
            f"%update = ((f32[8]), f32[8]) call-update(%start, {update})",
            DONE,
        ]
        text = T.module("\n".join(lines), both.replace("GROUPS", T.OVER_MODEL))
        assert [v.verdict for v in hlo.judge(text, mesh=T.MESH).verdicts] == ["needed"]


@pytest.mark.parametrize(
    "lines",
    [[START, "%done = f32[8] call-done(%start)"], [START, UPDATE.replace("%x", "%x, %x"), DONE]],
    ids=["none come", "too many"],
)
def test_operands_that_do_not_fit_leave_it_unproven(lines):
    judgement = offloaded(*lines)
    assert [v.verdict for v in judgement.verdicts] == ["unproven"]
    assert not judgement.outputs[0].equal and judgement.outputs[0].blockers


def test_a_dynamic_root_of_a_broadcast_is_not_followed():
    for said, expected in (("false", "redundant"), ("true", "unproven")):
        text = T.module(
            f"{T.parameter(T.DATA)}\n%r = f32[8] collective-broadcast(%x), channel_id=1, "
            f"replica_groups={T.OVER_MODEL}, has_dynamic_root={said}"
        )
        (verdict,) = hlo.judge(text, mesh=T.MESH).verdicts
        assert verdict.verdict == expected
