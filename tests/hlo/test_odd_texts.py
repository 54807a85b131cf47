"""Texts that no compiler wrote: what is called again and again, and what is left out."""

import gzip

import pytest

from shardrules import errors, hlo
from shardrules.costs import launches, transfers, waste
from shardrules.hlo.reader import files

from . import text as T

DEPTH = 60


def doubled(opcode, attributes):
    """Computations of which each calls the one before twice."""
    parts = [
        "%f0 (p0: f32[8]) -> f32[8] {\n  %p0 = f32[8] parameter(0)\n  ROOT %n0 = f32[8] negate(%p0)\n}"
    ]
    for k in range(1, DEPTH):
        call = f"{opcode}(%{{}}{k}), {attributes}=%f{k - 1}"
        parts.append(
            f"%f{k} (p{k}: f32[8]) -> f32[8] {{\n  %p{k} = f32[8] parameter(0)\n"
            f"  %u{k} = f32[8] {call.format('p')}\n  ROOT %v{k} = f32[8] {call.format('u')}\n}}"
        )
    return "\n\n".join(parts) + "\n\n"


def test_launches_of_what_calls_twice():
    entry = f"{T.parameter('{replicated}')}\n%c = f32[8] call(%x), to_apply=%f{DEPTH - 1}"
    assert launches.in_all(hlo.parse(T.module(entry, doubled("call", "to_apply")))) == 2**59


LOOP = """%condition (c: (s32[], f32[8])) -> pred[] {
  %c = (s32[], f32[8]) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  %bound = s32[] constant(5)
  ROOT %less = pred[] compare(%n, %bound), direction=LT
}

%body (d: (s32[], f32[8])) -> (s32[], f32[8]) {
  %d = (s32[], f32[8]) parameter(0)
  %m = s32[] get-tuple-element(%d), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%m, %one)
  %w = f32[8] get-tuple-element(%d), index=1
  %used = f32[8] fusion(%w), kind=kLoop, calls=%LAST
  REDUCED
  ROOT %t = (s32[], f32[8]) tuple(%next, %w)
}

"""
ENTRY = f"""{T.parameter(T.BOTH)}
%zero = s32[] constant(0)
%init = (s32[], f32[8]) tuple(%zero, %x)
%loop = (s32[], f32[8]) while(%init), condition=%condition, body=%body
"""


def test_hints_for_a_loop_that_calls_twice():
    loop = LOOP.replace("LAST", f"f{DEPTH - 1}").replace("REDUCED", T.all_reduce("%used"))
    module = hlo.parse(T.module(ENTRY, doubled("fusion", "kind=kLoop, calls") + loop))
    (hint,) = waste.hints(hlo.judge(module, mesh=T.MESH))
    assert hint.kind == "repeated"


def test_a_counter_behind_fusions_that_pass_it_on_twice():
    """Each level doubled the way back from the counter to what computes it."""
    passed = doubled("fusion", "kind=kLoop, calls").replace("f32[8]", "s32[]")
    loop = LOOP.replace("(%next, %w)", "(%same, %used)").replace(
        "  %w =", f"  %same = s32[] fusion(%next), kind=kLoop, calls=%f{DEPTH - 1}\n  %w ="
    )
    loop = loop.replace("fusion(%w), kind=kLoop, calls=%LAST", "copy(%w)")
    text = T.module(
        ENTRY, passed.replace("negate", "copy") + loop.replace("REDUCED", T.all_reduce("%used"))
    )
    (found,) = hlo.judge(text, mesh=T.MESH).verdicts
    assert (found.verdict, found.collective.trip_count) == ("needed", None)


def test_a_loop_whose_body_takes_nothing():
    text = T.module(ENTRY, LOOP.replace("LAST", "f0").replace("  REDUCED\n", ""))
    body = "%body () -> (s32[], f32[8]) {\n  ROOT %d = (s32[], f32[8]) after-all()\n}\n\n"
    start = text.index("%body (d")
    text = text[:start] + body + text[text.index("ENTRY") :]
    (loop,) = launches.read(hlo.parse(text))
    assert loop.unknown == "the text does not show its carry"


def test_an_update_without_what_is_written():
    entry = f"""{T.parameter("{replicated}")}\n%u = f32[8]{{0:S(5)}} dynamic-update-slice(%x)"""
    (moved,) = transfers.read(hlo.parse(T.module(entry)))
    assert moved.bytes == 32


def test_an_array_of_more_dimensions_than_numpy_has():
    ones = ",".join(["1"] * 70)
    entry = f"%c = s32[{ones}] constant(5)\n%i = s32[{ones}] iota(), iota_dimension=0\n"
    (output,) = hlo.judge(T.module(f"{entry}%s = s32[{ones}] add(%c, %i)")).outputs
    assert output.equal


def test_a_gzip_file_that_holds_too_much(monkeypatch):
    monkeypatch.setattr(files, "_MOST_UNPACKED", 2)
    most = b" " * (2 << 20)
    assert files.decode(gzip.compress(most), "a.gz") == most.decode()
    # Several streams in one file are read as one, and are as long as all of them.
    for data in (gzip.compress(most + b" "), gzip.compress(most) + gzip.compress(b" ")):
        with pytest.raises(errors.HloError, match="a.gz holds more than 2 MiB of text, the limit"):
            files.decode(data, "a.gz")
    assert len(files.decode(most + b" ", "a.hlo")) == len(most) + 1
