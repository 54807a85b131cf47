"""Several programs in one report, in each format."""

import dataclasses
import json

import pytest
from hlo import text as T

from shardrules import hlo, report
from shardrules.costs import findings
from shardrules.costs.timings import Timing, Timings
from shardrules.report import several


def content(name, *operations, allow=None, timings=None):
    module = T.module("\n".join([T.parameter(T.DATA), *operations]))
    judgement = hlo.judge(module, mesh={"data": 4, "model": 2})
    allow = findings.Allowances(allow)
    return report.content(judgement, title=name, allow=allow, timings=timings)


@pytest.fixture
def found():
    return several.gather(
        [content("jit_small"), content("jit_<step>", T.all_reduce("%x"))],
        [3, 1],
        [("jit_broken", "it can't be read")],
    )


def test_programs_of_which_none_has_a_collective_are_not_more():
    none = report.content(hlo.judge(hlo.parse(T.module(T.parameter(T.BOTH)))), title="jit_f")
    text = report.plain(several.gather([none], [2]))
    assert "(2 programs have no collective)\n" in text


def test_the_costliest_first_and_what_has_no_collective_in_one_line(found):
    text = report.plain(found)
    assert text.startswith(
        "5 programs compiled, 1 with collectives or other costs, 1 finding, in jit_<step> 32 B of "
        "32 B on the wire per device can be avoided (100%), 1 can't be judged, the costliest: "
    )
    assert [row[0] for row in found.programs.rows] == ["jit_<step>"]
    lines = text.splitlines()
    assert "(3 more programs have no collective)" in lines
    assert "  jit_broken: it can't be read" in lines and not found.clean
    assert found.contents[0].title == "jit_<step>"


@pytest.mark.parametrize("of_process", [True, False])
def test_a_program_like_another_is_told_by_what_differs(of_process):
    """Compiled for the first call and for the others, a step is told once."""
    step = T.all_reduce("%x", name="n", groups=T.OVER_DATA), T.all_reduce("%x")
    renamed = T.all_reduce("%x", name="n", groups=T.OVER_DATA), T.all_reduce("%x", name="s")
    other = *step[:1], T.all_reduce("%x", name="t", groups=T.ALL)
    programs = [step, renamed, step[1:], other]
    contents = [content(f"jit_step {n}", *each) for n, each in enumerate(programs)]
    found = several.gather(contents, [1] * 4, of_process=of_process)
    # Another finding, which the first has not, is told in a part of its own.
    assert [each.title for each in found.detailed] == ["jit_step 0", "jit_step 3"]
    (block,) = (block for block in found.blocks if block.title == "Alike")
    assert [item.what for item in block.items] == [
        "jit_step 1 (80 B): as jit_step 0 (80 B)",
        "jit_step 2 (32 B): as jit_step 0 (80 B), but for - unknown all-reduce(data) f32: 1, 32 B",
    ]
    assert len(json.loads(several.as_json(found))["programs"]) == 4


def test_a_program_that_ran_like_one_that_did_not_while_steps_were_recorded():
    """The times of one put its findings in another order."""
    step = T.all_reduce("%x", name="n"), T.all_reduce("%x", name="s", groups=T.ALL)
    slow = (Timing(0.002, each, 0.002, 1, "CPU 0", "CPU 0") for each in (0.001, 0.002))
    timed = content("jit_step 0", *step, timings=Timings(0.01, tuple(slow)))
    plain = content("jit_step 1", *step)
    assert [f.kind for f in timed.findings] != [f.kind for f in plain.findings]
    found = several.gather([plain, timed], [1, 1])
    assert [each.title for each in found.detailed] == ["jit_step 0"]
    same = several.gather([dataclasses.replace(plain, title=timed.title), timed], [2, 1])
    assert (same.contents, same.counts, same.findings) == ((timed,), (3,), 2)


def test_formats_say_the_same(found):
    data = json.loads(several.as_json(found))
    assert [p["times"] for p in data["programs"]] == [1, 3] and not data["clean"]
    assert data["failures"] == [{"program": "jit_broken", "reason": "it can't be read"}]
    markdown = report.markdown(found)
    assert "\n## jit_<step>\n" in markdown and markdown.startswith("# Programs\n")
    assert "<iframe" not in report.page(found)  # one program is the page itself
    needed = content("jit_needed", T.all_reduce("%x", T.OVER_DATA))
    page = report.page(several.gather([*found.contents, needed], [3, 1, 1]))
    assert "&lt;base href=&quot;about:srcdoc&quot;&gt;" in page  # without it #row leaves the frame
    assert page.count("<caption class") == page.count("<table>") == 1  # the frames' own are escaped
    assert "jit_&lt;step&gt;" in page and "<step>" not in page and page.count("<iframe") == 2
    assert report.plain(several.gather([content("jit_one")], [1])).startswith("1 program compiled")


def test_an_allowance_may_match_in_one_program_alone():
    allow = {"redundant all-reduce(model)": "issue 12", "all-gather(data)": "never"}
    both = [content("a", T.all_reduce("%x"), allow=allow), content("b", allow=allow)]
    found = several.gather(both, [1, 1])
    assert found.unused == ("all-gather(data)",) and not found.clean
    assert "all-gather(data)" in report.plain(found)
    assert several.gather(both, [1, 1], missing=2).unused == ()  # the others may hold it


@pytest.mark.parametrize(
    ("operations", "said"),
    [
        ([], "8 devices (data=4, model=2), no collectives; no findings"),
        (
            [T.all_reduce("%x")],
            "32 B of 32 B on the wire per device can be avoided (100%); 8 devices (data=4, model=2), "
            "1 collective runs once; 1 redundant",
        ),
    ],
)
def test_a_programs_first_line(operations, said):
    assert content("step", *operations).headline.startswith(f"step: {said}")


def test_what_a_profile_measured_is_shown_of_clean_programs_too():
    needed = T.all_reduce("%x", T.OVER_DATA)
    times = Timings(0.01, (Timing(0.002, 0.001, 0.002, 1, "CPU 0", "CPU 0"),))
    found = several.gather([content("jit_step", needed, timings=times)], [1])
    assert found.clean and "| 2 ms " in report.plain(found)
    assert report.plain(found).count(found.measured) == 1  # not again for the one that is timed
    (alone,) = several.gather([content("jit_step", needed)], [1]).shown
    assert alone[0].clean and not several.gather([alone[0]], [1]).detailed


def test_what_clean_programs_send_is_said():
    needed = [T.all_reduce("%x", T.OVER_DATA, name=name) for name in "ab"]
    found = several.gather([content("jit_step", *needed), content("jit_none")], [1, 1])
    assert found.clean
    assert (
        "spent:\n  jit_step: 96 B on the wire per device, in 2 runs of 2 collectives; the costliest "
        "(100%) is 2 x unknown all-reduce(data), 96 B\n"
    ) in report.plain(found)
    assert "Spent" in report.markdown(found)
    assert "times" not in report.plain(found)  # each of its programs was compiled once
    both = several.gather([*found.contents, content("jit_two", *needed[:1])], [1, 1, 1])
    assert "Spent" in report.page(both)
    wrong = several.gather([content("jit_wrong", T.all_reduce("%x"))], [1])
    assert "spent:" not in report.plain(wrong)  # its own part has the table
