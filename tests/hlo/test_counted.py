"""What crosses devices is counted, by whatever name, once, and with its own bytes."""

import pytest

from shardrules import errors, hlo, report, testing
from shardrules.costs import accounts, waste

from . import text as T

PAIRS = "_xla_send_recv_source_target_pairs="
MEGASCALE = (
    '_xla_host_transfer_handler_name="xla_megascale_runtime",'
    '_xla_megascale_transfer_type="ALL_REDUCE",_xla_megascale_target="{1,2}x{0:3}"'
)
CALLBACK = '_xla_host_transfer_handler_name="pjrt_rendezvous"'
ANY = "1 group of 8: [1,8]<=[8]"


def sent(hints, channel="channel_id=1", header="is_scheduled=true, num_partitions=8"):
    """A send and its recv, as XLA for GPUs splits a permute, and for TPUs crosses slices."""
    both = f"{channel}, frontend_attributes={{{hints}}}"
    return T.module(
        f"""{T.parameter(T.BOTH)}
        %t = token[] after-all()
        %r = (f32[8], u32[], token[]) recv(%t), {both}
        %s = (f32[8], u32[], token[]) send(%x, %t), {both}
        %sd = token[] send-done(%s), {channel}
        %rd = (f32[8], token[]) recv-done(%r), {channel}
        %y = f32[8] get-tuple-element(%rd), index=0""",
        header=header,
    )


@pytest.mark.parametrize(
    "hints, channel, over",
    [
        (PAIRS + "{{0,1},{1,2}}", "channel_id=1", "1 group of 3: {{0,1},{1,2}}"),
        (PAIRS + '"{{0, 1}}"', "channel_id=1", "1 group of 2: {{0,1}}"),
        # Nobody says to which devices.
        (PAIRS + "{{0,9}}", "channel_id=1", ANY),
        (PAIRS + "{{0,1}}", "channel_id=0", ANY),  # of replicas, of which there is one
        ('x="y"', "channel_id=1", ANY),
        ('x="y"', "channel_id=1, is_host_transfer=false", ANY),
    ],
)
def test_a_send_to_other_devices_is_a_permute_that_nothing_is_proven_of(hints, channel, over):
    judgement = hlo.judge(sent(hints, channel))
    (verdict,) = judgement.verdicts
    axes = hlo.judge(sent(hints, channel), mesh=T.MESH).verdicts[0].collective.axes
    assert (axes is None) == (over == ANY)
    assert (verdict.verdict, verdict.bytes) == ("unproven", 32)
    assert "send 's' to other devices" in verdict.reason
    (entry,) = accounts.of(judgement).entries
    assert (entry.kind, entry.over) == ("collective-permute", over)
    assert (entry.runs, entry.wire_bytes) == (1, 32)


def test_a_send_between_slices_is_their_collective():
    """The text counts the partitions of one of the two slices that the target names."""
    text = sent(
        MEGASCALE, "channel_id=1, is_host_transfer=true", "is_scheduled=true, num_partitions=4"
    )
    for judgement in (hlo.judge(text), hlo.judge(text, mesh=T.MESH)):
        (entry,) = accounts.of(judgement).entries
        assert (entry.kind, entry.verdict, entry.over) == ("all-reduce", "unproven", ANY)
        assert "a target among slices" in judgement.verdicts[0].reason
    told = hlo.judge(text, mesh={"data": 2, "model": 4}, slices=2).verdicts[0]
    assert told.collective.axes == ("data",) and "to other devices" not in told.reason


def test_its_pairs_are_of_replicas_where_it_has_no_channel():
    header = "is_scheduled=true, replica_count=8"
    (verdict,) = hlo.judge(sent(PAIRS + "{{0,1}}", "channel_id=0", header)).verdicts
    assert verdict.collective.pairs == ((0, 1),)


def test_it_may_be_asynchronous():
    """As XLA prints it of a computation that holds nothing else."""
    text = sent(PAIRS + "{{0,1}}").replace(
        "%s = (f32[8], u32[], token[]) send(",
        "%s = ((f32[8], token[]), token[], u32[]) send-start(",
    )
    (verdict,) = hlo.judge(text).verdicts
    assert (verdict.verdict, verdict.collective.pairs) == ("unproven", ((0, 1),))


def test_a_send_to_the_host_is_none():
    assert not hlo.judge(sent(CALLBACK, "channel_id=1, is_host_transfer=true")).verdicts


@pytest.mark.parametrize(
    "line",
    [
        "collective-reduce(%x), replica_groups={{0,1},{2,3}}, has_dynamic_root=false",
        "collective-reduce(%x)",
        "collective-reduce-start(%x), replica_groups={{0,1}}",
        "all-reduce-scatter(%x), replica_groups={{0,1}}",
        "shuttle(%x), source_target_pairs={{0,1}}",
        "shuttle(%x), color=blue, replica_groups={}",
    ],
)
def test_a_collective_of_a_kind_that_is_not_known_is_not_passed_over(line):
    with pytest.raises(errors.HloSyntaxError, match="of a kind that this version .* doesn't know"):
        hlo.judge(T.module(f"{T.parameter(T.BOTH)}\n%y = f32[8] {line}"))


def test_another_opcode_that_is_not_known_blocks():
    text = T.module(f"{T.parameter(T.DATA)}\n%y = f32[8] shuffle(%x)\n{T.all_reduce('%y')}")
    assert [v.verdict for v in hlo.judge(text).verdicts] == ["unproven"]


def test_a_ragged_all_to_all_moves_its_operand_once():
    """Where it puts that, and from which place on how much of it, are not moved as well."""
    numbers = "\n".join(T.parameter(T.BOTH, "s32[8]", f"n{i}", i) for i in range(2, 6))
    judgement = hlo.judge(
        T.module(
            f"""{T.parameter(T.BOTH)}
            {T.parameter(T.BOTH, "f32[64]", "o", 1)}
            {numbers}
            %r = f32[64] ragged-all-to-all(%x, %o, %n2, %n3, %n4, %n5), channel_id=1, \
replica_groups={T.ALL}"""
        )
    )
    assert str(accounts.of(judgement).total) == "1, 32 B"


PIECES = """%a = (f32[8], f32[8]) all-to-all(%x, %y), channel_id=1, \
replica_groups={{0,1},{2,3},{4,5},{6,7}}"""


def test_an_all_to_all_of_several_operands_is_one_collective():
    """XLA for CPUs cuts its operand into one for each member of a group."""
    text = T.module(f"{T.parameter(T.BOTH)}\n%y = f32[8] negate(%x)\n{PIECES}")
    judgement = hlo.judge(text, mesh=T.MESH)
    total = accounts.of(judgement).total
    assert (total.sites, total.count, total.bytes, total.wire_bytes) == (1, 1, 64, 32)
    testing.assert_collectives(text, expect={"all-to-all(model)": 1}, mesh=T.MESH)
    assert "1 collective runs once" in report.plain(report.content(judgement))


LOOP = """%body (carry: (s32[], f32[8], f32[8])) -> (s32[], f32[8], f32[8]) {
  %carry = (s32[], f32[8], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %x = f32[8] get-tuple-element(%carry), index=1
  %z = f32[8] get-tuple-element(%carry), index=2
  %y = f32[8] MADE
  PIECES
  %first = f32[8] get-tuple-element(%a), index=0
  %second = f32[8] get-tuple-element(%a), index=1
  %both = f32[8] add(%first, %second)
  %more = f32[8] multiply(%z, %both)
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %out = (s32[], f32[8], f32[8]) tuple(%next, %x, %more)
}

%condition (state: (s32[], f32[8], f32[8])) -> pred[] {
  %state = (s32[], f32[8], f32[8]) parameter(0)
  %n = s32[] get-tuple-element(%state), index=0
  %most = s32[] constant(5)
  ROOT %again = pred[] compare(%n, %most), direction=LT
}

""".replace("PIECES", PIECES)


@pytest.mark.parametrize("made, kinds", [("negate(%x)", ["repeated"]), ("negate(%z)", [])])
def test_it_is_the_same_on_every_trip_if_all_of_its_operands_are(made, kinds):
    entry = f"""{T.parameter(T.BOTH)}
        %zero = s32[] constant(0)
        %start = (s32[], f32[8], f32[8]) tuple(%zero, %x, %x)
        %w = (s32[], f32[8], f32[8]) while(%start), condition=%condition, body=%body"""
    text = T.module(entry, LOOP.replace("MADE", made)).replace("f32[8]", "f32[262144]")
    judgement = hlo.judge(text, mesh=T.MESH)
    assert accounts.of(judgement).total.count == 5
    assert [hint.kind for hint in waste.hints(judgement)] == kinds


@pytest.mark.parametrize(
    "slices, size", [("{{1,4}}", 16), ("{{1,4},{2,8}}", 80), ("{{4, 8}}", 128)]
)
def test_a_permute_in_place_moves_slices(slices, size):
    (verdict,) = hlo.judge(
        T.module(
            f"""{T.parameter(T.BOTH, "f32[4,8]")}
            %z = s32[] constant(0)
            %at = (s32[], s32[]) tuple(%z, %z)
            %r = f32[4,8] collective-permute(%x, %x, %at, %at), channel_id=1, \
source_target_pairs={{{{0,1}}}}, slice_sizes={slices}"""
        )
    ).verdicts
    assert verdict.bytes == size


def test_a_type_of_unknown_size_is_not_nothing():
    text = T.module(f"{T.parameter(T.BOTH, 'f6e3m2[8]')}\n{T.all_reduce('%x', shape='f6e3m2[8]')}")
    with pytest.raises(errors.HloError, match="element type 'f6e3m2' has no known size"):
        hlo.judge(text)


@pytest.mark.parametrize(
    "targets, said",
    [
        (["Cholesky"], "no collectives; "),
        (["xla_ffi_python_cpu_callback"], "no collectives; "),
        (["mine"], "no collectives, except perhaps in calls without a rule ('mine'); "),
        (
            ["a", "b", "a", "c", "d"],
            "except perhaps in calls without a rule ('a', 'b', 'c' and 1 more); ",
        ),
    ],
)
def test_calls_that_may_communicate_are_named_where_nothing_else_does(targets, said):
    calls = [
        f'%y{n} = f32[8] custom-call(%x), custom_call_target="{target}"'
        for n, target in enumerate(targets)
    ]
    for devices in (8, 1):
        header = f"is_scheduled=true, num_partitions={devices}"
        text = T.module("\n".join([T.parameter("{replicated}"), *calls]), header=header)
        headline = report.content(hlo.judge(text), title="t").headline
        assert (said if devices == 8 else "1 device, no collectives; ") in headline
