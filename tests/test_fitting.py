"""Reports fit the terminal: no line is longer, and what is left out is named."""

import io
import json
import os
import re

import pytest
from hlo import text as T

from shardrules import errors, fitting, hlo, report
from shardrules.commands import flags

SOURCE = 'metadata={op_name="jit(f)/transpose(jvp())/mul" source_file="%s" source_line=12}'
PATH = "/a/rather/long/path/to/the/folder/of/a/project/with/its/own/model/layers/train.py"


def whole(several):
    metadata = SOURCE % PATH
    operations = [T.parameter(T.DATA), T.all_reduce("%x", extra=f", {metadata}")]
    judgement = hlo.judge(T.module("\n".join(operations)), mesh=T.MESH)
    content = report.content(judgement, title="jit_step", target="v5e")
    if not several:
        return report.plain(content)
    from shardrules.report.several import gather

    return report.plain(gather([content], [3], [("jit_broken", "it can't be read: " + "x" * 90)]))


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("columns", [40, 60, 80, 100])
def test_no_line_is_longer_and_nothing_is_lost_in_silence(several, columns):
    text = whole(several)
    assert max(map(len, text.splitlines())) > 120
    fit = fitting.fitted(text, columns)
    assert [line for line in fit.splitlines() if len(line) > columns] == []
    if columns < 80:  # a long word is broken, and so are headings
        return
    # Words of sentences stand there in their order, and a column that is gone is named.
    advice = re.search(r"to do: (.*)", text)[1]
    assert " ".join(advice.split()) in " ".join(fit.split())
    (head,) = (line for line in text.splitlines() if line.startswith("collective "))
    shown = next(line for line in fit.splitlines() if line.startswith("collective"))
    gone = {cell.strip() for cell in head.split("|")} - {cell.strip() for cell in shown.split("|")}
    named = re.findall(r"\(left out, to fit \d+ columns: ([^)]*)\)", " ".join(fit.split()))[-1]
    assert gone <= set(named.split(", ")) and "verdict" in shown and "source" in shown
    assert re.search(r"all-reduce\(model\) +\| redundant .*/train.py:12$", fit, re.MULTILINE)


def test_what_fits_stays_as_it_is():
    text = whole(True)
    assert fitting.fitted(text, 1000) == text


def test_a_note_says_nothing_of_columns_that_are_left_out():
    text = report.table([("collective", "bytes", "share"), ("x" * 60, "1 kB", "3%")])
    text += "\n(bytes: of one operand; share: of all)\n(bytes: alone)\n(an end: bytes)\nbytes: no"
    assert fitting.fitted(text, 72).splitlines()[3:] == [
        "(left out, to fit 72 columns: bytes)",
        "(share: of all)",
        "(an end: bytes)",
        "bytes: no",
    ]


def test_what_is_to_be_typed_stays_on_one_line_where_it_fits():
    line = "    to do: run `shardrules migrate --diff on.patch train.py`, which writes the patch"
    shown = fitting.fitted(line, 60).split("\n")
    assert max(map(len, shown)) <= 60 and " ".join(" ".join(shown).split()) == line.strip()
    assert any("`shardrules migrate --diff on.patch train.py`," in part for part in shown)
    longer = fitting.fitted(line.replace("train.py", 40 * "x"), 60)
    assert max(map(len, longer.split("\n"))) <= 60 and "\0" not in longer


def test_a_table_with_cells_of_several_lines():
    rows = [("kernel", "what to write"), ("a", "one\ntwo"), ("b", "three " * 12)]
    text = report.table(rows)
    fit = fitting.fitted(f"before\n{text}\n\n| not | a table |", 40).splitlines()
    assert max(map(len, fit)) <= 40 and fit[0] == "before" and fit[-1] == "| not | a table |"
    assert [line.partition("|")[0].strip() for line in fit[1:-2] if "-+-" not in line] == [
        "kernel", "a", "", "b", "", "",
    ]  # fmt: skip


def test_a_measured_time_loses_the_name_of_the_fastest_device_first():
    cells = ("1.42 ms (fastest: 0.98 ms, vm CPU 7)", "forward all-reduce(data)")
    text = report.table([("measured, a step", "collective"), cells])
    assert "1.42 ms (fastest: 0.98 ms) | forward" in fitting.fitted(text, 60)


@pytest.mark.parametrize(
    "source, room, shown",
    [
        ("model/train.py:12 (step)", 30, "model/train.py:12 (step)"),
        ("train.py:12 (make.<locals>.step)", 24, "train.py:12 (...step)"),
        ("train.py:12 (make.<locals>.a_function)", 16, "train.py:12"),
        ("/home/me/model/train.py:12 (step)", 22, ".../model/train.py:12"),
    ],
)
def test_a_path_loses_its_beginning(source, room, shown):
    assert fitting._shortened(source, room) == shown


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_colour_is_for_a_terminal_without_no_color(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    written = []
    for stream, no_color in ((Terminal(), ""), (Terminal(), "1"), (io.StringIO(), "")):
        monkeypatch.setenv("NO_COLOR", no_color)
        flags.write(whole(False), None, stream)
        written.append(stream.getvalue())
    in_colour, plain, piped = written
    assert (
        "\x1b[31m  redundant\x1b[0m: " in in_colour and "| \x1b[31mredundant\x1b[0m " in in_colour
    )
    assert plain == piped and "\x1b" not in plain
    assert re.sub(r"\x1b\[\d*m", "", in_colour) == plain


def test_how_wide_it_is(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert fitting.width() == 80
    monkeypatch.setenv("COLUMNS", "0")
    with open(os.devnull) as no_terminal:
        assert fitting.width(no_terminal) == fitting.width(io.StringIO()) == 100
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((120, 30)))
    with open(os.devnull) as terminal:
        assert fitting.width(terminal) == 120


def test_long_advice_stands_once():
    operations = [
        "%x = f32[8] parameter(0)",
        "%y = f32[16] parameter(1)",
        T.parameter(T.DATA, name="z", number=2),
        T.all_reduce("%x", name="first"),
        T.all_reduce("%y", name="second", shape="f32[16]"),
        T.all_reduce("%z", name="third"),
    ]
    text = report.plain(report.content(hlo.judge(T.module("\n".join(operations)), mesh=T.MESH)))
    assert text.count("testing.verify_flags") == 1
    advice = re.findall("to do: (.*)", text)
    assert len(advice) == 2 and advice[0].startswith("say how its parameters are sharded: ")
    assert advice[1].startswith("drop it"), text
    assert "saves at most 96 B (75%), together with 1 other finding\n" in text
    assert "likewise" not in text  # the other one's name and place are those of the title
    # What is proven keeps its own block, with what it saves.
    operations[1] = T.parameter(T.DATA, "f32[16]", "y", 1)
    operations[5] += ', metadata={op_name="jit(f)/psum"}'
    text = report.plain(report.content(hlo.judge(T.module("\n".join(operations)), mesh=T.MESH)))
    assert text.count("  redundant: ") == 2 and "likewise" not in text
    assert text.count("saves ") == 3 and text.count("to do: ") == 3


def test_what_is_folded_has_its_advice_in_json():
    operations = [
        T.parameter(T.DATA, "f32[9999]"),
        T.parameter(T.DATA, name="y", number=1),
        T.all_reduce("%x", shape="f32[9999]", name="first"),
        T.all_reduce("%y", name="second", extra=', metadata={op_name="jit(f)/psum"}'),
    ]
    content = report.content(hlo.judge(T.module("\n".join(operations)), mesh=T.MESH))
    (rest,) = re.findall("below 1% together: (.*)", report.plain(content))
    assert rest.endswith(" (32 B, <0.1%); `--format json` has the advice on each"), rest
    assert all(found["advice"] for found in json.loads(report.as_json(content))["findings"])
    assert len(content.findings) == 2


def test_what_all_findings_rest_on_stands_once():
    text = whole(True)
    (detail,) = re.findall(r"jit_step: .*\n", text)
    assert text.count("hold the same data on every device") == 1
    assert text.index(detail) < text.index("what all findings rest on:\n  arrays that")


def test_an_assertions_message_is_as_wide_as_columns_say(monkeypatch):
    message = "not as expected:\n" + "\n".join(T_ROWS)
    error = errors.CollectiveAssertionError(message, entries=())
    monkeypatch.setenv("COLUMNS", "80")
    shown = str(error).splitlines()
    assert max(map(len, shown)) <= 80 and len(shown) > 3
    assert "PYTEST_CURRENT_TEST" in os.environ and max(map(len, shown)) <= 72  # behind its "E"
    assert " ".join(" ".join(shown).split()) == " ".join(message.split())
    monkeypatch.delenv("COLUMNS")
    assert str(error) == error.message == message


T_ROWS = ("  redundant: a collective " + "that is long " * 9, "    because " + "of this " * 12)
