"""The other silent costs in a report: text, Markdown, JSON and HTML say the same."""

import json

import pytest

from shardrules import hlo, report

DONATING = """\
HloModule step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }, \
buffer_donor={ (1, {}) }

ENTRY %main (s: f32[8], m: f32[8]) -> (f32[8], bf16[8]) {
  %s = f32[8]{0} parameter(0), metadata={op_name="state['w']"}
  %m = f32[8]{0} parameter(1), metadata={op_name="state['m']"}
  %log = () custom-call(%s), custom_call_target="xla_ffi_python_cpu_callback"
  %n = f32[8]{0} negate(%s)
  %c = bf16[8]{0} convert(%m)
  ROOT %t = (f32[8]{0}, bf16[8]{0}) tuple(%n, %c)
}
"""


@pytest.fixture(scope="module")
def content():
    return report.content(hlo.judge(hlo.parse(DONATING)), title="step")


def test_text(content):
    assert report.plain(content).endswith(
        "donated memory:\n"
        "argument   | shape  | bytes | output | not reused because\n"
        "-----------+--------+-------+--------+--------------------\n"
        "state['m'] | f32[8] | 32    | 1      | output 1 is bf16[8]\n"
        "(by the module's alias table; before JAX 0.8 it lacks donations that are not used; the "
        "memory of 1 more is reused)\n"
        "\n"
        "transfers between host and device:\n"
        "transfer | bytes | runs | in loops | source\n"
        "---------+-------+------+----------+-----------\n"
        "callback | 32    | 1    | 0        | state['w']\n"
        "(bytes are of one run on one device)\n"
    )


def test_markdown(content):
    shown = report.markdown(content).splitlines()
    at = shown.index("## Donated memory")
    assert shown[at + 2] == "| argument | shape | bytes | output | not reused because |"
    assert "| state['m'] | f32[8] | 32 | 1 | output 1 is bf16[8] |" in shown[at:]


def test_json(content):
    donated, transfers = json.loads(report.as_json(content))["costs"]
    assert donated["title"] == "Donated memory"
    assert dict(zip(transfers["columns"], transfers["rows"][0])) == {
        "transfer": "callback",
        "bytes": 32,
        "runs": 1,
        "in loops": 0,
        "source": "state['w']",
    }


def test_html(content):
    shown = report.page(content).partition("<h2>Donated")[2]
    assert shown.count("<td>output 1 is bf16[8]</td>") == 1


def test_a_program_without_them_shows_nothing():
    text = "HloModule m\nENTRY %e (x: f32[8]) -> f32[8] {\n  ROOT %x = f32[8] parameter(0)\n}\n"
    assert report.content(hlo.judge(hlo.parse(text))).costs == ()


def test_memory_that_is_reused_is_no_cost():
    titles = [s.title for s in report.content(hlo.judge(hlo.parse(DONATING))).costs]
    reused = DONATING.replace(", buffer_donor={ (1, {}) }", "")
    assert reused != DONATING and titles[0] == "Donated memory"
    costs = report.content(hlo.judge(hlo.parse(reused))).costs
    assert [s.title for s in costs] == titles[1:]


def test_host_memory():
    text = """\
HloModule m, is_scheduled=true
ENTRY %e (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %h = f32[8]{0:S(5)} copy(%x)
  ROOT %d = f32[8]{0} copy(%h)
}
"""
    shown = report.plain(report.content(hlo.judge(hlo.parse(text))))
    assert (
        "host memory:\n"
        "buffer    | shape  | bytes | stored bytes | loaded bytes | source\n"
        "----------+--------+-------+--------------+--------------+-------\n"
        "temporary | f32[8] | 32    | 32           | 32           | h\n"
    ) in shown
