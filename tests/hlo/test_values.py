"""What the proof takes for known: constants, integers device by device, where elements lie."""

import numpy as np
import pytest

from shardrules import hlo
from shardrules.hlo.known import exact
from shardrules.hlo.reader import parser

from . import text as T

IDS = ["%id = u32[] partition-id()", "%i = s32[] convert(%id)"]


def last(*lines, before="", mesh=T.MESH, **kwargs):
    return hlo.judge(T.module("\n".join(lines), before), mesh=mesh, **kwargs).verdicts[-1].verdict


def branches(first, second):
    return "".join(
        f"%{name} (p{name}: ()) -> (f32[12], f32[12]) {{\n  %p{name} = () parameter(0)\n{body}"
        f"  ROOT %t{name} = (f32[12], f32[12]) tuple(%c{name}, %c{name})\n}}\n\n"
        for name, body in (("left", first), ("right", second))
    )


@pytest.mark.parametrize(
    "first, second, called, expected",
    [
        ("constant({...})", "constant({...})", "%left, %right", "needed"),
        # one instruction is one value, whoever runs it
        ("constant({...})", "constant({...})", "%left, %left", "redundant"),
        ("constant({1,2,3})", "constant({1,2,3})", "%left, %right", "redundant"),
        ("constant({1,2,3})", "constant({1,2,4})", "%left, %right", "needed"),
    ],
)
def test_elided_constants_are_equal_only_as_one_instruction(first, second, called, expected):
    before = branches(f"  %cleft = f32[12] {first}\n", f"  %cright = f32[12] {second}\n")
    found = last(
        *IDS,
        "%e = () tuple()",
        f"%c = (f32[12], f32[12]) conditional(%i, %e, %e), branch_computations={{{called}}}",
        "%x = f32[12] get-tuple-element(%c), index=0",
        T.all_reduce("%x", shape="f32[12]"),
        before=before,
    )
    assert found == expected


@pytest.mark.parametrize("second, expected", [("%b", "needed"), ("%a", "redundant")])
def test_a_choice_between_elided_constants(second, expected):
    """Under a predicate that is another one on each device, in a call."""
    before = (
        "%pick (k: pred[], m: f32[12], n: f32[12]) -> (f32[12]) {\n  %k = pred[] parameter(0)\n"
        "  %m = f32[12] parameter(1)\n  %n = f32[12] parameter(2)\n"
        "  %s = f32[12] select(%k, %m, %n)\n  ROOT %t = (f32[12]) tuple(%SECOND)\n}\n\n"
    ).replace("SECOND", "s" if second == "%b" else "m")
    found = last(
        *IDS,
        "%a = f32[12] constant({...})",
        "%b = f32[12] constant({...})",
        "%one = s32[] constant(1)",
        "%and = s32[] and(%i, %one)",
        "%flag = pred[] convert(%and)",
        f"%f = (f32[12]) call(%flag, %a, {second}), to_apply=%pick",
        "%g = f32[12] get-tuple-element(%f), index=0",
        T.all_reduce("%g", shape="f32[12]"),
        before=before,
    )
    assert found == expected


TABLE = "{ {0,0,1,1,2,2,3,3}, {0,1,0,1,0,1,0,1} }"


@pytest.mark.parametrize(
    "row, relaid, expected",
    [
        # row 0 of the table is the same over model, row 1 is not
        (0, "%v = s32[2,8]{1,0} copy(%t)", "redundant"),
        (1, "%v = s32[2,8]{1,0} copy(%t)", "needed"),
        # the bytes of a row-major [8,2] read as column-major ones: columns become rows
        # (right, but not followed: only row-major layouts are)
        (0, "%v = s32[2,8]{0,1} bitcast(%u)", "needed"),
        # read as row-major ones they are neither
        (0, "%v = s32[2,8]{1,0} bitcast(%u)", "needed"),
        # one shape, another layout: element (i, j) is another one than before
        (0, "%v = s32[2,8]{0,1} bitcast(%t)", "needed"),
        (0, "%v = s32[2,8]{1,0:T(8,128)} bitcast(%t)", "needed"),
        (0, "%v = s32[2,8]{1,0} reshape(%t)", "redundant"),
        (0, "%v = s32[2,8]{1,0} bitcast(%t)", "redundant"),
        # printed without layouts
        (0, "%v = s32[2,8] bitcast(%t)", "needed"),
        (0, "%w = s32[2,8] reshape(%t)\n%v = s32[2,8] bitcast(%w)", "needed"),
        (
            0,
            "%w = s32[1,16] reshape(%t)\n%l = s32[16] bitcast(%w)\n%v = s32[2,8] reshape(%l)",
            "redundant",
        ),
    ],
)
def test_a_bitcast_between_layouts_permutes(row, relaid, expected):
    found = last(
        *IDS,
        f"%t = s32[2,8]{{1,0}} constant({TABLE})",
        "%u = s32[8,2]{1,0} constant({ {0,0},{0,1},{1,0},{1,1},{2,0},{2,1},{3,0},{3,1} })",
        relaid,
        f"%row = s32[] constant({row})",
        "%d = s32[1,1]{1,0} dynamic-slice(%v, %row, %i), dynamic_slice_sizes={1,1}",
        T.all_reduce("%d", shape="s32[1,1]", apply="addi"),
    )
    assert found == expected


@pytest.mark.parametrize(
    "dimensions, expected", [("{0,1}", ("redundant", "needed")), ("{1,0}", ("needed", "needed"))]
)
def test_a_broadcast_with_falling_dimensions_transposes(dimensions, expected):
    """The table's rows: [k, d] is equal over model for k = 0; transposed, its columns are not."""
    table = "{" + ",".join("{" + ",".join(str(v) for v in r) + "}" for r in _square()) + "}"
    for row, verdict in zip((0, 1), expected):
        found = last(
            *IDS,
            f"%t = s32[8,8] constant({table})",
            f"%v = s32[8,8] broadcast(%t), dimensions={dimensions}",
            f"%row = s32[] constant({row})",
            "%d = s32[1,1] dynamic-slice(%v, %row, %i), dynamic_slice_sizes={1,1}",
            T.all_reduce("%d", shape="s32[1,1]", apply="addi"),
        )
        assert found == verdict, row


def _square():
    rows = np.arange(64).reshape(8, 8)
    rows[0] = [0, 0, 1, 1, 2, 2, 3, 3]
    return rows.tolist()


@pytest.mark.parametrize(
    "kind, high, expected",
    [
        ("u64", 2**63, "needed"),  # it was taken for the lowest signed number, and clamped to 0
        ("u64", 2**64 - 1, "needed"),
        ("u64", 2**40, "needed"),
        ("s64", 2**32 + 7, "needed"),
        ("u8", 200, "needed"),
        ("u64", 7, "needed"),
        ("u64", 0, "redundant"),
        ("s64", -5, "redundant"),
    ],
)
def test_indices_beyond_what_backends_agree_on(kind, high, expected):
    """Odd devices have index `high`, even ones 0, into eight different elements."""
    found = last(
        *IDS,
        T.parameter("{replicated}"),
        "%one = s32[] constant(1)",
        "%bit = s32[] and(%i, %one)",
        "%odd = pred[] convert(%bit)",
        f"%zero = {kind}[] constant(0)",
        f"%high = {kind}[] constant({high})",
        f"%at = {kind}[] select(%odd, %high, %zero)",
        "%d = f32[1] dynamic-slice(%x, %at), dynamic_slice_sizes={1}",
        T.all_reduce("%d", shape="f32[1]"),
    )
    assert found == expected


def instruction(line, *shapes):
    lines = [f"%p{k} = {shape} parameter({k})" for k, shape in enumerate(shapes)]
    lines.append("ROOT " + line)
    entry = parser.parse(T.module("\n".join(lines), regions="")).entry
    return entry.instructions[entry.root], [i.shape for i in entry.instructions[: len(shapes)]]


def evaluated(line, shapes, values):
    made, own = instruction(line, *shapes)
    rows = [np.asarray(v, exact.dtype(s)).reshape((1,) + s.dimensions) for v, s in zip(values, own)]
    found = exact.evaluate(made, rows, own)
    return None if found is None else found.reshape(-1).tolist()


@pytest.mark.parametrize(
    "line, shapes, values, expected",
    [
        ("%o = s8[] divide(%p0, %p1)", ["s8[]"] * 2, (5, -128), [0]),
        ("%o = s8[] divide(%p0, %p1)", ["s8[]"] * 2, (-7, 2), [-3]),
        ("%o = s8[] remainder(%p0, %p1)", ["s8[]"] * 2, (-7, 2), [-1]),
        ("%o = s8[] remainder(%p0, %p1)", ["s8[]"] * 2, (5, -128), [5]),
        ("%o = s8[] divide(%p0, %p1)", ["s8[]"] * 2, (-128, -1), None),
        ("%o = s32[] divide(%p0, %p1)", ["s32[]"] * 2, (1, 0), None),
        ("%o = u8[] subtract(%p0, %p1)", ["u8[]"] * 2, (1, 2), [255]),
        ("%o = s8[] add(%p0, %p1)", ["s8[]"] * 2, (127, 1), [-128]),
        ("%o = s8[] convert(%p0)", ["s32[]"], (200,), [-56]),
        ("%o = u64[] convert(%p0)", ["s8[]"], (-1,), [2**64 - 1]),
        ("%o = s64[] convert(%p0)", ["u8[]"], (255,), [255]),
        ("%o = pred[] convert(%p0)", ["s32[]"], (2,), [True]),
        ("%o = u64[] shift-left(%p0, %p1)", ["u64[]"] * 2, (1, 2**63), None),
        ("%o = s8[] shift-left(%p0, %p1)", ["s8[]"] * 2, (1, 8), None),
        ("%o = s8[] shift-right-logical(%p0, %p1)", ["s8[]"] * 2, (-1, 1), [127]),
        ("%o = u8[] shift-right-arithmetic(%p0, %p1)", ["u8[]"] * 2, (254, 1), [255]),
        ("%o = pred[] compare(%p0, %p1), direction=LT", ["u32[]"] * 2, (2**31, 1), [False]),
        ("%o = pred[] compare(%p0, %p1), direction=LT, type=SIGNED", ["u32[]"] * 2, (1, 2), None),
        ("%o = pred[] compare(%p0, %p1), direction=LT, type=UNSIGNED", ["u8[]"] * 2, (1, 2), [1]),
        ("%o = s32[] clamp(%p0, %p1, %p2)", ["s32[]"] * 3, (5, 0, 3), [3]),
        ("%o = s32[4] iota(), iota_dimension=0", [], (), None),
        ("%o = s32[2,3] broadcast(%p0), dimensions={1}", ["s32[3]"], ([1, 2, 3],), [1, 2, 3] * 2),
        (
            "%o = s32[3,2] broadcast(%p0), dimensions={1,0}",
            ["s32[2,3]"],
            ([[1, 2, 3], [4, 5, 6]],),
            [1, 4, 2, 5, 3, 6],
        ),
        (
            "%o = s32[3,2,2] broadcast(%p0), dimensions={2,0}",
            ["s32[2,3]"],
            ([[1, 2, 3], [4, 5, 6]],),
            [1, 4, 1, 4, 2, 5, 2, 5, 3, 6, 3, 6],
        ),
        ("%o = s32[2] broadcast(%p0), dimensions={0}", ["s32[1]"], ([1],), None),
        (
            "%o = s32[3] concatenate(%p0, %p1), dimensions={1}",
            ["s32[2]", "s32[1]"],
            ([1, 2], 3),
            None,
        ),
        ("%o = s32[0] slice(%p0), slice={[0:0]}", ["s32[2]"], ([1, 2],), None),
        ("%o = s32[2] slice(%p0), slice={[0:3:2]}", ["s32[3]"], ([1, 2, 3],), [1, 3]),
    ],
)
def test_integers_are_evaluated_as_xla_does(line, shapes, values, expected):
    if values or shapes:
        assert evaluated(line, shapes, values) == expected


@pytest.mark.parametrize(
    "shape, text, expected",
    [
        ("s8[]", "127", [127]),
        ("s8[]", "128", None),
        ("u64[]", str(2**64 - 1), [2**64 - 1]),
        ("s32[2]", "{1.5}", None),
        ("s32[1]", "{...}", None),
        ("pred[2]", "{1, false}", [True, False]),
        ("pred[]", "2", None),
        ("s32[2,1]", "{ /*i0=0*/ {1}, {-2} }", [1, -2]),
    ],
)
def test_constants_are_read_whole_or_not_at_all(shape, text, expected):
    found = exact.literal(text, instruction(f"%o = {shape} constant({text})")[0].shape)
    assert (None if found is None else found.reshape(-1).tolist()) == expected


def test_an_array_without_elements_is_the_same_everywhere():
    assert last(
        T.parameter(T.BOTH),
        T.parameter(T.BOTH, name="y", number=1),
        "%c = f32[16] concatenate(%x, %y), dimensions={0}",
        "%d = f32[0] slice(%c), slice={[3:3]}",
        T.all_reduce("%d", shape="f32[0]"),
    ) in ("redundant", "needed")
