"""Collectives that are alike are one line, with a count and units, in every form that people read."""

import pytest
from hlo import text as T

from shardrules import errors, hlo, report, testing, units
from shardrules.costs import findings

AT = ', metadata={op_name="jit(f)/transpose(jvp(f))/psum" source_file="model.py" source_line=7}'


def many(*sizes, groups=T.OVER_MODEL, sharding=T.DATA):
    """A program of as many all-reduces, each of its own parameter."""
    lines = []
    for n, size in enumerate(sizes):
        shape = f"f32[{size}]"
        lines.append(T.parameter(sharding, shape, f"x{n}", n))
        lines.append(T.all_reduce(f"%x{n}", groups, shape, f"r{n}", extra=AT))
    return T.module("\n".join(lines))


@pytest.mark.parametrize(
    "count, shown",
    [
        (0, "0 B"),
        (9999, "9999 B"),
        (10_000, "10 kB"),
        (524_288, "524 kB"),
        (999_499, "999 kB"),
        (999_600, "1 MB"),
        (16_900_000, "16.9 MB"),
        (3 * 10**9, "3 GB"),
        (12 * 10**15, "12000 TB"),
    ],
)
def test_bytes_have_units(count, shown):
    assert report.size(count) == shown


@pytest.mark.parametrize(
    "seconds, shown, as_milliseconds",
    [
        (0, "0 ns", "0 ms"),
        (4.7e-11, "0.047 ns", "<0.001 ms"),
        (4.73e-8, "47.3 ns", "<0.001 ms"),
        (9.99e-7, "999 ns", "<0.001 ms"),
        (1e-6, "1 us", "0.001 ms"),
        (3.83e-6, "3.83 us", "0.00383 ms"),
        (9.996e-4, "1 ms", "1 ms"),
        (0.0123, "12.3 ms", "12.3 ms"),
        (0.9996, "1 s", "1 s"),
        (1234, "1234 s", "1234 s"),
    ],
)
def test_times_have_units_and_no_exponent(seconds, shown, as_milliseconds):
    assert units.duration(seconds) == shown
    assert units.milliseconds(seconds) == as_milliseconds


def test_alike_collectives_are_one_row_and_one_finding():
    content = report.content(hlo.judge(many(*[8] * 40, *[16] * 19), mesh=T.MESH), title="p")
    assert [finding.kind for finding in content.findings] == ["redundant"] * 59
    assert [(row.sites, row.first.bytes) for row in content.rows] == [(40, 32), (19, 64)]
    assert content.rows[1].numbers == tuple(range(40, 59))
    assert content.rows[1].total.wire_bytes == 19 * 64
    (block,) = content.changes
    (item,) = block.items
    what = "59 x backward all-reduce(model), 32 B to 64 B each, 2496 B in all (r40 and 58 like it)"
    assert (block.title, item.kind, item.what) == ("Findings", "redundant", what)
    assert ("saves", "at most 2496 B (100%)") in item.lines
    shown = report.plain(content).splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in shown]
    of_40 = ["backward all-reduce(model)", "redundant", "40", "1", "32 B", "32 B", "1280 B", "51%"]
    assert [*of_40, "model.py:7"] in rows
    at = shown.index("findings:")
    assert shown[at + 1 : at + 3] == [f"  redundant: {what}", "    at model.py:7"]
    assert len(shown) < 20
    shown = report.markdown(content).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")][:8] for line in shown]
    of_19 = ["backward all-reduce(model)", "redundant", "19", "1", "64 B", "64 B", "1216 B", "49%"]
    assert of_19 in rows and [line for line in shown if line.startswith(f"- **redundant**: {what}")]


def test_what_differs_stays_apart():
    text = many(8, 8, 8).replace("source_line=7}", "source_line=8}", 1)
    text = text.replace("psum", "", 1).replace("transpose(jvp(f))/", "jvp(f)/", 1)
    content = report.content(hlo.judge(text, mesh=T.MESH))
    assert [row.sites for row in content.rows] == [2, 1]  # the costliest first
    (block,) = content.changes
    assert [i.source for i in block.items] == ["model.py:7", "model.py:8"]
    assert block.items[0].what.startswith("2 x ")


def test_allowed_findings_are_alike_under_one_reason():
    allow = findings.Allowances({"all-reduce(model)": "issue 12"})
    content = report.content(hlo.judge(many(8, 8), mesh=T.MESH), allow=allow)
    (block,) = content.changes
    (item,) = block.items
    assert block.title == "Allowed" and item.what.startswith("2 x ")
    assert item.lines[-1] == ("allowed:", "issue 12")
    assert report.plain(content).count("allowed: issue 12") == 1


def test_failures_fit_on_a_screen():
    text = many(*range(1, 120))
    with pytest.raises(errors.CollectiveAssertionError) as caught:
        testing.assert_no_defensive_psum(text, mesh=T.MESH)
    assert len(str(caught.value).splitlines()) < 10 and len(caught.value.verdicts) == 119
    assert str(caught.value).startswith("119 of 119 collectives are not shown to be needed (119 ")
    for expect in ({}, {"all-reduce(model)": 3}):
        with pytest.raises(errors.CollectiveAssertionError) as caught:
            testing.assert_collectives(text, mesh=T.MESH, expect=expect)
        assert len(str(caught.value).splitlines()) < 12
        assert len(caught.value.judgement.verdicts) == 119


def test_needed_ones_with_a_cause_each_are_lines():
    text = many(*range(1, 60), sharding=T.MODEL)
    with pytest.raises(errors.CollectiveAssertionError) as caught:
        testing.assert_collectives(text, mesh=T.MESH, expect={})
    line = "    59 x backward all-reduce(model), 4 B to 236 B each, 7080 B in all: needed at model.py:7"
    assert line in str(caught.value).splitlines()


def test_a_judgement_is_a_line():
    judged = hlo.judge(many(8, 8), mesh=T.MESH)
    assert repr(judged) == "<Judgement of test: 2 redundant>"
    assert (
        repr(judged.verdicts[0]) == "<Verdict redundant: all-reduce over model, 32 B at model.py:7>"
    )
    empty = hlo.judge(T.module(T.parameter(T.BOTH)))
    assert repr(empty) == "<Judgement of test: no collectives>"
