"""Damaged modules, by the thousand in the fuzzer's own run."""

import pytest

from shardrules import errors, hlo

from . import fuzz
from . import text as T


@pytest.mark.slow
def test_damaged_modules_are_modules_or_syntax_errors():
    wrong = {seed: fuzz.outcome(seed) for seed in range(5_000)}
    assert not {seed: problem for seed, problem in wrong.items() if problem}


def test_the_older_notations_are_among_what_is_damaged():
    assert sum("source_file=" in text for text in fuzz.sources()) >= 3
    assert sum("%param#0" in text for text in fuzz.sources()) == 1
    assert len(fuzz.sources()) >= 15


def test_the_fuzzer_sees_other_errors(monkeypatch):
    monkeypatch.setattr(fuzz.hlo, "parse", lambda text: 1 // 0)
    assert fuzz.outcome(0) == {"note": "ZeroDivisionError: integer division or modulo by zero"}


def test_the_fuzzer_stops_what_does_not_end(monkeypatch):
    def forever(text):
        while True:
            pass

    monkeypatch.setattr(fuzz, "LIMIT_S", 0.05)
    monkeypatch.setattr(fuzz.hlo, "parse", forever)
    assert fuzz.outcome(0) == {"note": "took more than 0.05 s"}


def test_a_long_number_in_the_table_of_locations():
    """Seed 265697, reduced: words as long were read in quadratic time."""
    tables = (
        'FileNames\n1 "program.py"\n\nFunctionNames\n1 "f"\n\n'
        f"FileLocations\n1 {{file_name_id=1 function_name_id=1 line=26 end_line={'9' * 30_000}}}\n\n"
        "StackFrames\n1 {file_location_id=1 parent_frame_id=1}\n\n\n"
    )
    entry = T.parameter("{replicated}").replace('op_name="x"', "stack_frame_id=1")
    text = T.module(entry + "\n" + T.all_reduce("%x"), regions=tables + T.REGIONS)
    module = hlo.parse(text)
    (frame,) = module.metadata(module.entry.instructions[0]).frames
    assert (frame.file, frame.line) == ("program.py", 26)
    assert fuzz.check(text) is None


@pytest.mark.parametrize(
    "damaged",
    [
        T.parameter("{devices=[8]<=[8]" + 4_000 * " " + "x}"),
        T.parameter("{devices=[8]0,1,2,3" + 4_000 * " " + "x}"),
        T.parameter("{x" + 30_000 * " " + "x}"),
        T.parameter("{mesh['a'=8, device_ids=(" + 4_000 * " " + "x)], ['a']}"),
        T.parameter("{replicated}")
        + "\n"
        + T.all_reduce("%x", groups="{" + "".join(f"{{{k}}} " for k in range(40)) + "x}"),
    ],
    ids=["iota", "list", "unknown", "mesh", "groups"],
)
def test_spaces_are_not_split_in_every_way(damaged):
    """The time grew with the fourth power of the spaces, and twofold with each group."""
    assert fuzz.check(T.module(damaged + "\n" + T.all_reduce("%x", name="s"))) is None


def test_too_many_devices():
    with pytest.raises(errors.HloError) as caught:
        hlo.judge(
            T.module(
                T.parameter("{replicated}"), header="is_scheduled=true, num_partitions=999999999"
            )
        )
    assert str(caught.value) == (
        "module 'test' is for 999999999 devices, more than the 1048576 that this verifier accepts; "
        "is the text damaged?"
    )


def test_dense_calls_do_not_take_exponential_time():
    """Each computation calls the one before it twice, with other arguments each time."""
    pieces = ["%c0 (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}\n"]
    for level in range(1, 60):
        pieces.append(
            f"%c{level} (p: f32[]) -> f32[] {{\n  %p = f32[] parameter(0)\n"
            f"  %a = f32[] call(%p), to_apply=%c{level - 1}\n  %i = u32[] partition-id()\n"
            f"  %f = f32[] convert(%i)\n  %b = f32[] add(%a, %f)\n"
            f"  ROOT %d = f32[] call(%b), to_apply=%c{level - 1}\n}}\n"
        )
    text = T.module(
        "%z = f32[] constant(0)\n%k = f32[] call(%z), to_apply=%c59\n"
        + T.all_reduce("%k", shape="f32[]"),
        "\n".join(pieces),
    )
    assert fuzz.check(text) is None


def test_calls_nested_beyond_reason_are_opaque():
    pieces = ["%c0 (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}\n"]
    pieces += [
        f"%c{n} (p: f32[]) -> f32[] {{\n  %p = f32[] parameter(0)\n  ROOT %a = f32[] "
        f"call(%p), to_apply=%c{n - 1}\n}}\n"
        for n in range(1, 3000)
    ]
    (verdict,) = hlo.judge(
        T.module(
            "%z = f32[] constant(0)\n%k = f32[] call(%z), to_apply=%c2999\n"
            + T.all_reduce("%k", shape="f32[]"),
            "\n".join(pieces),
        )
    ).verdicts
    assert verdict.verdict == "unproven"
    assert "is nested too deep for the proof" in verdict.reason


def test_strings_full_of_what_looks_like_keys_are_read_once():
    name = ", q=1" * 20_000
    assert fuzz.check(T.module(f'%x = f32[8] parameter(0), metadata={{op_name="{name}"}}')) is None


@pytest.mark.parametrize(
    "attribute",
    [
        'metadata={op_name="' + "shardrules.mesh=" * 5_000 + '"}',
        'metadata={op_name="' + "pallas_call[" * 8_000 + '"}',
        'frontend_attributes={kernel_metadata={"a":{"b":"' + "A" * 60_000 + '"}}}',
    ],
)
def test_what_a_kernels_call_says_of_itself_is_read_in_linear_time(attribute):
    call = f'%k = f32[8] custom-call(%x), custom_call_target="tpu_custom_call", {attribute}'
    entry = T.parameter("{replicated}") + f"\n{call}\n{T.all_reduce('%k')}"
    assert fuzz.check(T.module(entry)) is None


def test_a_computation_that_is_given_another_shape_than_it_takes():
    taking = (
        "%takes (p: s32[4,2]) -> s32[1,1] {\n  %p = s32[4,2] parameter(0)\n"
        "  %i = s32[] constant(1)\n"
        "  ROOT %d = s32[1,1] dynamic-slice(%p, %i, %i), dynamic_slice_sizes={1,1}\n}\n\n"
    )
    entry = (
        "%c = s32[3] constant({1,2,3})\n%k = s32[1,1] call(%c), to_apply=%takes\n"
        + T.all_reduce("%k", shape="s32[1,1]", apply="addi")
    )
    assert fuzz.check(T.module(entry, taking)) is None


@pytest.mark.parametrize("size", ["-1", "0", "9"])
def test_a_slice_of_a_size_that_none_has(size):
    """Of numbers that are known, and of ranges."""
    entry = f"""{T.parameter("{{replicated}}")}
    %c = s32[3] constant({{1, 2, 3}})
    %i = s32[] constant(1)
    %k = s32[1] dynamic-slice(%c, %i), dynamic_slice_sizes={{{size}}}
    %y = f32[16] concatenate(%x, %x), dimensions={{0}}
    %z = f32[1] dynamic-slice(%y, %i), dynamic_slice_sizes={{{size}}}
    {T.all_reduce("%k", shape="s32[1]", apply="addi", name="r0")}
    {T.all_reduce("%z", shape="f32[1]")}"""
    assert fuzz.check(T.module(entry)) is None
