"""Every path to a collective counts: those that the proof doesn't follow too, and how loops end."""

import sys
import tracemalloc

import pytest

from shardrules import errors, hlo, no_communication
from shardrules.hlo.proof import loops
from shardrules.hlo.reader import parser
from shardrules.registry import Registry

from . import text as T

INSIDE = (
    "%inside (p: f32[8]) -> f32[8] {\n  %p = f32[8] parameter(0)\n  ROOT "
    + T.all_reduce("%p", name="inner")
    + "\n}\n\n"
)


def judged(*lines, before="", **kwargs):
    return hlo.judge(T.module("\n".join(lines), before), mesh=T.MESH, **kwargs)


def inner(*lines, before=INSIDE, **kwargs):
    found = judged(*lines, before=before, **kwargs).verdicts
    return next(v for v in found if v.collective.name == "inner")


CALL = "%c = f32[8] call(%x), to_apply=%inside"
OTHER = T.parameter(T.BOTH, name="y", number=1)


@pytest.mark.parametrize(
    "line",
    [
        '%k = f32[8] custom-call(%y), custom_call_target="k", called_computations={%inside}',
        '%k = f32[8] custom-call(%y), custom_call_target="k", to_apply=%inside',
        "%k = f32[8] frobnicate(%y), calls=%inside",
        "%k = ((f32[8]), f32[8]) frobnicate-start(%y), calls=%inside",
        "%k = ((f32[8]), f32[8]) while-start(%y), condition=%inside, body=%inside",
        '%k = ((f32[8]), f32[8]) custom-call-start(%y), custom_call_target="k", '
        "called_computations={%inside}",
        "%k = f32[8] map(%y), dimensions={0}, to_apply=%inside",
        "%k = f32[8] conditional(%y), branch_computations={%inside}",
        "%k = f32[8] while(%y, %y), condition=%inside, body=%inside",
        "%k = f32[8] async-done(%y), calls=%inside",
    ],
)
def test_what_is_not_followed_is_unproven_whatever_calls_show(line):
    registry = Registry()
    registry.register("k", no_communication)
    assert inner(T.parameter("{replicated}"), OTHER, CALL).verdict == "redundant"
    found = inner(T.parameter("{replicated}"), OTHER, CALL, line, registry=registry)
    assert found.verdict == "unproven"
    assert "in a way that the proof doesn't follow" in found.reason or "%" not in found.reason


@pytest.mark.parametrize(
    "operand, expected", [("%x", "redundant"), ("%y", "needed")], ids=["equal", "unequal"]
)
def test_an_asynchronous_call_is_followed(operand, expected):
    for start in ("call-start({}), to_apply", "async-start({}), calls", "fusion-start({}), calls"):
        start = start.format(operand)
        done = start.partition("-")[0] + "-done"
        found = inner(
            T.parameter("{replicated}"),
            OTHER,
            CALL,
            f"%s = ((f32[8]), f32[8], s32[]) {start}=%inside",
            f"%d = f32[8] {done}(%s){', calls=%inside' if done == 'async-done' else ''}",
        )
        assert found.verdict == expected, start


def chain(length):
    """Computations c0, which calls c1, and so on, to the one with the collective."""
    parts = [INSIDE]
    for k in reversed(range(length)):
        callee = "inside" if k == length - 1 else f"c{k + 1}"
        parts.append(
            f"%c{k} (q{k}: f32[8]) -> f32[8] {{\n  %q{k} = f32[8] parameter(0)\n"
            f"  ROOT %r{k} = f32[8] call(%q{k}), to_apply=%{callee}\n}}\n\n"
        )
    return "".join(parts)


def test_what_is_nested_too_deep_is_unproven_whatever_short_paths_show():
    lines = (T.parameter("{replicated}"), OTHER, CALL, "%k = f32[8] call(%y), to_apply=%c0")
    assert inner(*lines, before=chain(40)).verdict == "needed"
    found = inner(*lines, before=chain(200))
    assert found.verdict == "unproven" and "nested too deep" in found.reason


def test_what_the_budget_leaves_out_is_unproven(monkeypatch):
    from shardrules.hlo.proof import handlers

    monkeypatch.setattr(handlers, "budget_for", lambda size: 8)
    found = inner(
        T.parameter("{replicated}"),
        OTHER,
        CALL,
        "%k = f32[8] call(%y), to_apply=%c0",
        before=chain(4),
    )
    assert found.verdict == "unproven" and "evaluated too often" in found.reason


def per_device(size, adds):
    """Lines that add numbers of a device to those of an array of that size, over and over."""
    array = f"u32[{size}]"
    lines = ["%id = u32[] partition-id()", f"%d = {array} broadcast(%id), dimensions={{}}"]
    lines.append(f"%n0 = {array} iota(), iota_dimension=0")
    return lines + [f"%n{k + 1} = {array} add(%n{k}, %d)" for k in range(adds)]


@pytest.mark.parametrize("size, expected", [(1, "redundant"), (8192, "unproven")])
def test_large_arrays_take_more_of_the_budget(monkeypatch, size, expected):
    from shardrules.hlo.proof import handlers

    monkeypatch.setattr(handlers, "budget_for", lambda size: 1000)
    found = inner(*per_device(size, 40), T.parameter("{replicated}"), CALL)
    assert found.verdict == expected
    assert ("evaluated too often" in found.reason) == (expected == "unproven")


def test_numbers_of_many_devices_are_not_computed_to_be_thrown_away():
    text = T.module(
        "\n".join(per_device(8192, 1)), header="is_scheduled=true, num_partitions=16384"
    )
    tracemalloc.start()
    try:
        hlo.judge(text)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 16384 * 8192 * 4 / 8


def test_tuples_nested_deeper_than_the_stack_are_an_error():
    kind, lines = "f32[8]", [T.parameter("{replicated}", name="t0")]
    for k in range(sys.getrecursionlimit()):
        kind = f"({kind})"
        lines.append(f"%t{k + 1} = {kind} tuple(%t{k})")
    with pytest.raises(errors.HloError, match=r"too deep .* sys\.setrecursionlimit\(\d+\)"):
        judged(*lines, f"%c = {kind} copy(%t{k + 1})")


# A condition and a step in fusions that are given a tuple of their own.
FUSED_LOOP = """%less (t: (s32[], s32[])) -> pred[] {
  %t = (s32[], s32[]) parameter(0)
  %l = s32[] get-tuple-element(%t), index=0
  %m = s32[] get-tuple-element(%t), index=1
  ROOT %go = pred[] compare(%l, %m), direction=LT
}

%test (d: (s32[], s32[], s32[], f32[8])) -> pred[] {
  %d = (s32[], s32[], s32[], f32[8]) parameter(0)
  %d0 = s32[] get-tuple-element(%d), index=0
  %d1 = s32[] get-tuple-element(%d), index=1
  %d2 = s32[] get-tuple-element(%d), index=2
  %own = (s32[], s32[]) tuple(%d0, %dBOUND)
  ROOT %f = pred[] fusion(%own), kind=kLoop, calls=%less
}

%body (c: (s32[], s32[], s32[], f32[8])) -> (s32[], s32[], s32[], f32[8]) {
  %c = (s32[], s32[], s32[], f32[8]) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  %c1 = s32[] get-tuple-element(%c), index=1
  %c2 = s32[] get-tuple-element(%c), index=2
  %v = f32[8] get-tuple-element(%c), index=3
  %one = s32[] constant(1)
  %next = s32[] add(%n, %one)
  %w = f32[8] sine(%v)
  ROOT %o = (s32[], s32[], s32[], f32[8]) tuple(%next, %c1, %c2, %w)
}

"""


@pytest.mark.parametrize("bound, expected", [(2, "needed"), (1, "redundant")])
def test_a_fusions_own_tuple_is_not_the_carry(bound, expected):
    """Element 1 of the carry is 3 everywhere, element 2 the device's number."""
    lines = [
        T.parameter("{replicated}"),
        "%id = u32[] partition-id()",
        "%i = s32[] convert(%id)",
        "%zero = s32[] constant(0)",
        "%three = s32[] constant(3)",
        "%t = (s32[], s32[], s32[], f32[8]) tuple(%zero, %three, %i, %x)",
        "%w = (s32[], s32[], s32[], f32[8]) while(%t), condition=%test, body=%body",
        "%g = f32[8] get-tuple-element(%w), index=3",
        T.all_reduce("%g"),
    ]
    before = FUSED_LOOP.replace("BOUND", str(bound))
    (verdict,) = judged(*lines, before=before).verdicts
    assert verdict.verdict == expected


COUNTED = """%test (d: (KIND[], s32[])) -> pred[] {
  %d = (KIND[], s32[]) parameter(0)
  %n = KIND[] get-tuple-element(%d), index=0
  %bound = KIND[] constant(LIMIT)
  ROOT %go = pred[] compare(%n, %bound), direction=DIRECTIONTYPE
}

%body (c: (KIND[], s32[])) -> (KIND[], s32[]) {
  %c = (KIND[], s32[]) parameter(0)
  %m = KIND[] get-tuple-element(%c), index=0
  %k = s32[] get-tuple-element(%c), index=1
  %step = KIND[] constant(STEP)
  %next = KIND[] add(%m, %step)
  ROOT %o = (KIND[], s32[]) tuple(%next, %k)
}

"""


@pytest.mark.parametrize(
    "kind, start, limit, step, direction, expected",
    [
        ("s32", 0, 7, 2, "LT", 4),
        ("s8", 0, 127, 1, "LT", 127),
        ("s8", 0, 120, 100, "LT", None),  # 0, 100, -56, ...
        ("u32", 5, 10, 2**32 - 1, "LT", None),  # counts down, then wraps
        ("u8", 0, 255, 1, "LE", None),  # never ends
        ("s32", 7, 0, -1, "GT", 7),
        ("u8", 7, 0, 255, "NE", None),
        ("s32", 0, 7, 2, "LT, type=UNSIGNED", None),
    ],
)
def test_a_counter_that_wraps_has_no_count(kind, start, limit, step, direction, expected):
    before = COUNTED.replace("KIND", kind).replace("LIMIT", str(limit)).replace("STEP", str(step))
    before = before.replace("DIRECTIONTYPE", direction)
    lines = [
        f"%start = {kind}[] constant({start})",
        "%zero = s32[] constant(0)",
        f"%t = ({kind}[], s32[]) tuple(%start, %zero)",
        f"%w = ({kind}[], s32[]) while(%t), condition=%test, body=%body",
    ]
    module = parser.parse(T.module("\n".join(lines), before))
    loop = module.entry.instructions[module.entry.root]
    assert loops.trip_count(module, module.entry, loop) == expected


BUFFER = '%b = f32[8] custom-call(), custom_call_target="AllocateBuffer"'


@pytest.mark.parametrize(
    "lines, expected",
    [
        ([], "unproven"),
        (["%b2 = f32[8] copy(%b)"], "unproven"),
        (["%b2 = f32[8] add(%b, %x)"], "unproven"),
        (["%z = s32[] constant(0)", "%b2 = f32[8] dynamic-update-slice(%b, %x, %z)"], "redundant"),
        (["%b2 = f32[8] dynamic-update-slice(%b, %x, %i)"], "unproven"),
        (
            [
                "%z = s32[] constant(0)",
                "%h = f32[4] slice(%x), slice={[0:4]}",
                "%b2 = f32[8] dynamic-update-slice(%b, %h, %z)",
            ],
            "unproven",
        ),
    ],
)
def test_an_uninitialised_buffer_is_nobodys_value(lines, expected):
    read = "%b2" if lines else "%b"
    found = judged(
        T.parameter("{replicated}"),
        T.parameter("{replicated}", "s32[]", "i", 1),
        BUFFER,
        *lines,
        T.all_reduce(read),
    ).verdicts
    assert found[-1].verdict == expected
    if expected == "unproven":
        assert "an uninitialised buffer" in found[-1].reason


@pytest.mark.parametrize(
    "aliasing, expected",
    [("", "unproven"), ("{{}: (0, {})}", "unproven"), ("{{}: (1, {})}", "redundant")],
)
def test_a_kernel_reads_what_it_has_not_to_write_to(aliasing, expected):
    """Seed 28767 of the random modules: a buffer was taken for the result's whatever it was."""
    kernel = (
        '%k = f32[8] custom-call(%x, %b), custom_call_target="k", '
        'frontend_attributes={shardrules.effects="local",shardrules.status="declared"}'
    )
    aliasing = aliasing and f", output_to_operand_aliasing={aliasing}"
    found = judged(T.parameter("{replicated}"), BUFFER, kernel + aliasing, T.all_reduce("%k"))
    assert [v.verdict for v in found.verdicts] == [expected]


FILLING = """%test (d: (s32[], f32[12,8])) -> pred[] {
  %d = (s32[], f32[12,8]) parameter(0)
  %n = s32[] get-tuple-element(%d), index=0
  %bound = s32[] constant(TRIPS)
  ROOT %go = pred[] compare(%n, %bound), direction=LT
}

%body (c: (s32[], f32[12,8])) -> (s32[], f32[12,8]) {
  %c = (s32[], f32[12,8]) parameter(0)
  %m = s32[] get-tuple-element(%c), index=0
  %k = f32[12,8] get-tuple-element(%c), index=1
  %one = s32[] constant(1)
  %zero = s32[] constant(0)
  %next = s32[] add(%m, %one)
  %v = f32[1,8] constant({{1,2,3,4,5,6,7,8}})
  %two = s32[] constant(2)
  %half = s32[] divide(%m, %two)
  %last = s32[] constant(11)
  %back = s32[] subtract(%last, %m)
  %u = f32[12,8] dynamic-update-slice(%k, %v, PLACE, %zero)
  ROOT %o = (s32[], f32[12,8]) tuple(%next, %u)
}

"""


@pytest.mark.parametrize(
    "trips, place, expected",
    [
        (12, "%m", "redundant"),
        (11, "%m", "unproven"),
        (1, "%m", "unproven"),
        (0, "%m", "unproven"),
        (12, "%zero", "unproven"),  # one row, again and again
        (40, "%half", "unproven"),  # every second iteration writes where the one before it did
        (12, "%back", "redundant"),
    ],
)
def test_a_loop_fills_a_buffer_that_it_is_seen_to_fill(trips, place, expected):
    found = judged(
        '%b = f32[12,8] custom-call(), custom_call_target="AllocateBuffer"',
        "%z = s32[] constant(0)",
        "%t = (s32[], f32[12,8]) tuple(%z, %b)",
        "%w = (s32[], f32[12,8]) while(%t), condition=%test, body=%body",
        "%g = f32[12,8] get-tuple-element(%w), index=1",
        T.all_reduce("%g", shape="f32[12,8]"),
        before=FILLING.replace("TRIPS", str(trips)).replace("PLACE", place),
    ).verdicts
    # The elements that the first iteration wrote are known apart.
    assert ({v.verdict for v in found} == {"redundant"}) == (expected == "redundant")
    assert expected in {v.verdict for v in found}
    if expected == "redundant":
        assert any("assumed to be overwritten" in str(s) for v in found for s in v.rests_on)


def test_a_verdict_lists_all_that_it_rests_on():
    """Ten kernels, the last of them declared: none may go unseen."""
    lines = [T.parameter("{replicated}")]
    for k in range(10):
        status = "declared" if k == 9 else "audited"
        lines.append(
            f"%k{k} = f32[8] custom-call(%{f'k{k - 1}' if k else 'x'}), "
            f'custom_call_target="tpu_custom_call", frontend_attributes={{'
            f'shardrules.effects="local",shardrules.kernel="f{k}",shardrules.status="{status}"}}'
        )
    found = judged(*lines, T.all_reduce("%k9"))
    statuses = [s.status for s in found.verdicts[0].rests_on if s.source == "tag"]
    assert statuses == ["audited"] * 9 + ["declared"]
    assert len(found.outputs[0].supports) == 10
