"""Estimated times: wire bytes over the bandwidth of the links, marked as estimates."""

import pytest
from hlo import text as T

from shardrules import errors, hlo, report
from shardrules.costs import estimates


@pytest.mark.parametrize(
    "name, rate", [("v5e", 100e9), ("v5p", 200e9), ("v6e", 200e9), ("h100", 450e9), ("b200", 900e9)]
)
def test_bandwidths_are_the_vendors(name, rate):
    assert estimates.target(name).send_bytes_per_s == rate


def judged(groups, devices, count=1 << 20):
    shape = f"f32[{count}]"
    lines = [T.parameter(f"{{devices=[{devices}]<=[{devices}]}}", shape)]
    lines.append(T.all_reduce("%x", groups, shape))
    header = f"is_scheduled=true, num_partitions={devices}"
    return hlo.judge(T.module("\n".join(lines), header=header), mesh={"a": devices // 8, "b": 8})


def test_a_group_within_a_host_and_one_across():
    h100, v5e = estimates.TARGETS["h100"], estimates.TARGETS["v5e"]
    inside = judged("[2,8]<=[16]", 16).verdicts[0]
    across = judged("[8,2]<=[2,8]T(1,0)", 16).verdicts[0]
    assert estimates.seconds(inside, 450, h100) == pytest.approx(1e-9)
    assert estimates.seconds(across, 450, h100) == pytest.approx(9e-9)
    assert estimates.seconds(across, 100, v5e) == pytest.approx(1e-9)


def test_the_report_says_that_they_are_estimates():
    content = report.content(judged("[2,8]<=[16]", 16), target="v5e")
    # 2 * 7/8 * 4 MiB at 100 GB/s
    expected = "unknown all-reduce(b) | 1     | 1    | 73.4 us        | 73.4 us\n"
    shown = report.plain(content)
    assert "estimated times on tpu v5e:\n" in shown and expected in shown
    assert "(an estimate and no measurement: wire bytes by ring algorithms over" in shown
    for write in (report.markdown, report.page, report.as_json):
        assert "73.4 us" in write(content) and "an estimate and no measurement" in write(
            content
        ).replace("An", "an")
    assert "stimate" not in report.plain(report.content(judged("[2,8]<=[16]", 16)))


def test_what_is_no_target():
    with pytest.raises(errors.ShardrulesError, match="'h10' is none of v5e, .*did you mean 'h100'"):
        report.content(judged("[2,8]<=[16]", 16), target="h10")
