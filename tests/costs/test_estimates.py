"""Estimated times: ring algorithms over the bandwidth of the links, marked as estimates."""

import json

import pytest
from hlo import text as T
from raising import raises

from shardrules import errors, hlo, report
from shardrules.costs import accounts, estimates

MB = 1 << 26  # so much that bandwidth decides


@pytest.mark.parametrize(
    "name, rate",
    [
        ("v5e", 100e9),
        ("v5p", 200e9),
        ("v6e", 200e9),
        ("h100", 450e9),
        ("b200", 900e9),
        ("a100", 300e9),
        ("h200", 450e9),
    ],
)
def test_bandwidths_are_the_vendors(name, rate):
    assert estimates.target(name).send_bytes_per_s == rate


def judged(instruction, devices, shape="f32[16777216]"):
    """A program of one collective; S is 64 MiB on a device."""
    lines = [T.parameter(f"{{devices=[{devices}]<=[{devices}]}}", shape), instruction]
    header = f"is_scheduled=true, num_partitions={devices}"
    return hlo.judge(T.module("\n".join(lines), header=header), mesh={"a": devices // 8, "b": 8})


def took(verdict, wire_bytes, on):
    return max(
        estimates.transfer(verdict, wire_bytes, on), estimates.latency(verdict.collective, on)
    )


def seconds(instruction, devices, on):
    judgement = judged(instruction, devices)
    (verdict,), (entry,) = judgement.verdicts, accounts.of(judgement).entries
    assert entry.bytes == MB
    return took(verdict, entry.wire_bytes, estimates.TARGETS[on])


def grouped(kind, groups, shape="f32[16777216]", more=""):
    return (
        f"%r = {shape} {kind}(%x), channel_id=1, replica_groups={groups}, "
        f"use_global_device_ids=true{more}"
    )


IN, ACROSS, ALL = "[2,8]<=[16]", "[8,2]<=[2,8]T(1,0)", "[1,16]<=[16]"
SUM = ", to_apply=%add"
RING = "source_target_pairs={{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}"


@pytest.mark.parametrize(
    "instruction, on, expected",
    [
        # A ring of n: 2 (n-1)/n S of an all-reduce, (n-1)/n of the whole of the other two.
        (grouped("all-reduce", IN, more=SUM), "v5e", 2 * 7 / 8 * MB / 100e9),
        (grouped("all-gather", IN, "f32[134217728]", ", dimensions={0}"), "v5e", 7 * MB / 100e9),
        (
            grouped("reduce-scatter", IN, "f32[2097152]", SUM + ", dimensions={0}"),
            "v5p",
            7 / 8 * MB / 200e9,
        ),
        (grouped("all-reduce", IN, more=SUM), "h100", 2 * 7 / 8 * MB / 450e9),
        (grouped("all-reduce", IN, more=SUM), "b200", 2 * 7 / 8 * MB / 900e9),
        # On a torus of 8 an eighth goes 1, 2, 3, 4, 3, 2 and 1 steps; a switch takes one each.
        (grouped("all-to-all", IN, more=", dimensions={0}"), "v5e", 16 / 8 * MB / 100e9),
        (grouped("all-to-all", IN, more=", dimensions={0}"), "h100", 7 / 8 * MB / 450e9),
        # A neighbour is reached by one link.
        (f"%r = f32[16777216] collective-permute(%x), channel_id=1, {RING}", "v6e", MB / 100e9),
        (f"%r = f32[16777216] collective-permute(%x), channel_id=1, {RING}", "h100", MB / 450e9),
        # Beyond a host of eight: by one adapter each, of those of the group that are there.
        (grouped("all-reduce", ACROSS, more=SUM), "h100", 2 * 1 / 2 * MB / 50e9),
        (grouped("all-reduce", ALL, more=SUM), "h100", 2 * 15 / 16 * MB / 8 / 50e9),
        (grouped("all-to-all", ALL, more=", dimensions={0}"), "h100", 8 / 16 * MB / 50e9),
        (
            "%r = f32[16777216] collective-permute(%x), channel_id=1, source_target_pairs={{7,8}}",
            "b200",
            MB / 50e9,
        ),
        (grouped("all-reduce", ACROSS, more=SUM), "v5e", 2 * 1 / 2 * MB / 100e9),
    ],
)
def test_a_time_is_that_of_its_ring(instruction, on, expected):
    assert seconds(instruction, 16, on) == pytest.approx(expected)


@pytest.mark.parametrize(
    "instruction, on, expected",
    [
        # Both ways around a ring of 8: 4 hops, twice for an all-reduce.
        (grouped("all-reduce", IN, more=SUM), "v5e", 8e-6),
        (grouped("all-gather", IN, "f32[134217728]", ", dimensions={0}"), "v5p", 4e-6),
        (f"%r = f32[16777216] collective-permute(%x), channel_id=1, {RING}", "v6e", 1e-6),
        (grouped("all-reduce", IN, more=SUM), "h100", 6.6e-6 + 14 * 0.6e-6),
        (grouped("all-to-all", IN, more=", dimensions={0}"), "b200", 6.6e-6 + 0.6e-6),
        # Two hosts: 7 hops inside of each, one across; there and back.
        (grouped("all-reduce", ALL, more=SUM), "h100", 6.6e-6 + 14 * 0.6e-6 + 2 * 5e-6),
    ],
)
def test_few_bytes_take_the_latency_of_their_hops(instruction, on, expected):
    verdict = judged(instruction, 16).verdicts[0]
    on = estimates.TARGETS[on]
    assert estimates.latency(verdict.collective, on) == pytest.approx(expected)
    if "all-to-all" not in instruction:  # which counts by the operand
        assert took(verdict, 4, on) == pytest.approx(expected)


def test_every_figure_has_a_source():
    for on in estimates.TARGETS.values():
        assert "(" in on.bandwidth_source and on.hop_latency_s and "(" in on.latency_source


def content(on=None):
    text = T.module(
        "\n".join([T.parameter(T.BOTH, "f32[1048576]"), T.all_reduce("%x", T.ALL, "f32[1048576]")])
    )
    return report.content(hlo.judge(text, mesh=T.MESH), target=on)


def test_the_estimate_stands_where_the_collective_is():
    """2 * 7/8 * 4 MiB at 100 GB/s."""
    row = next(
        line
        for line in report.plain(content("v5e")).splitlines()
        if "all-reduce(" in line and "|" in line
    )
    assert [cell.strip() for cell in row.split("|")].count("~73.4 us") == 2
    row = next(
        line
        for line in report.markdown(content("v5e")).splitlines()
        if "all-reduce" in line and "|" in line
    )
    assert [cell.strip() for cell in row.split("|")].count("~73.4 us") == 2
    page = report.page(content("v5e"))
    row = page[page.index('<tr id="row0"') :].partition("</tr>")[0]
    assert row.count(">~73.4 us</td>") == 2
    assert page.count("est. a run</button>") == 1
    found = json.loads(report.as_json(content("v5e")))
    assert found["collectives"][0]["estimated_seconds"] == pytest.approx(73.4e-6, rel=1e-3)
    assert found["estimated_on"]["name"] == "TPU v5e"


@pytest.mark.parametrize("on", list(estimates.TARGETS))
@pytest.mark.parametrize("write", [report.plain, report.markdown, report.page])
def test_it_is_marked_as_one_with_its_source_below(write, on):
    said = write(content(on))
    assert "is a time estimated, not measured, for " in said
    assert (
        "NVIDIA" if on in ("a100", "h100", "h200", "b200") else "Google, Cloud TPU documentation"
    ) in said
    assert said.index("~73.4 us" if on == "v5e" else "all-reduce") < said.index("not measured")


@pytest.mark.parametrize("write", [report.plain, report.markdown, report.page])
def test_nothing_is_estimated_unasked(write):
    said = write(content())
    assert "est." not in said and "estimated" not in said


def test_what_is_no_target():
    with raises(errors.ShardrulesError, target="h10"):
        content("h10")
