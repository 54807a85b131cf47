"""Residuals in host memory: compiled for TPU and GPU, against the compiler's own count of bytes."""

import sys

import jax
import pytest
from raising import raises

from shardrules import hlo, testing
from shardrules.costs import offloading
from shardrules.errors import ArgumentError, CostAssertionError, ShardrulesError

pytestmark = pytest.mark.one_lane

sys.path.insert(0, "examples")
import offload_scan as report  # noqa: E402

SIZES = {"layers": 8, "batch": 32, "length": 256, "width": 256}
BYTES = 8 * 32 * 256 * 256 * 4 // 8  # of one residual for each layer, on one of eight devices


@pytest.fixture(params=[pytest.param(p, marks=getattr(pytest.mark, p)) for p in ("tpu", "gpu")])
def args(request):
    mesh = request.getfixturevalue(f"{request.param}_mesh")
    return report.shapes(list(mesh.devices.flat), **SIZES)


def test_naming_the_block_s_input_offloads_it(args):
    told = testing.assert_offloaded(
        report.model(*report.VARIANTS["the block's input"]),
        *args,
        names=["residual"],
        min_bytes=BYTES,
    )
    assert told.bytes == told.host_temp_bytes == BYTES
    [buffer] = told.buffers
    # All of it is written once and read once, in eight pieces; a TPU's loop does seven of them.
    for accesses in (buffer.stores, buffer.loads):
        known = [a for a in accesses if a.runs is not None]
        # In one of many compilations for TPU, the text did not tell how often the loop runs.
        assert len(known) < len(accesses) or sum(a.bytes * a.runs for a in known) == BYTES
        assert {a.bytes for a in accesses} == {BYTES // 8}
    assert {v.name: v.status for v in told.names} == {
        "residual": "offloaded",
        "hidden": "recomputed",
    }


def test_naming_the_block_s_output_does_nothing_and_is_told(args):
    with pytest.raises(CostAssertionError) as caught:
        testing.assert_offloaded(
            report.model(*report.VARIANTS["the block's output"]), *args, names=["residual"]
        )
    told = caught.value.offloading
    assert (told.bytes, told.host_temp_bytes, told.buffers) == (0, 0, ())
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("loss does not offload what it should (temporaries: 0 B on the host")
    assert lines[1].startswith("  'residual', float32[32,256,256], not a residual at ")
    assert lines[2] == (
        "    to do: no backward pass of a jax.checkpoint reads it, so there is nothing to "
        "save, and no policy acts on it; it is the output of its block, but the backward pass "
        "reads the input of the next block: put x = checkpoint_name(x, 'residual') on the "
        "first line of the block instead of the last"
    )
    assert lines[3] == (
        "  0 B are stored in host memory and loaded again, where at least 1 B are expected"
    )


def test_a_program_for_cpu_is_refused():
    program = report.model(*report.VARIANTS["hidden"])
    with pytest.raises(ShardrulesError, match="compiled for CPU, which has one memory"):
        testing.assert_offloaded(program, *report.shapes(jax.devices()[:1], 2, 2, 8, 16))


def test_what_can_not_be_asked():
    program = report.model(*report.VARIANTS["hidden"])
    args = report.shapes(jax.devices()[:1], 2, 2, 8, 16)
    with pytest.raises(ShardrulesError, match="checkpoint_names are: 'hidden', 'residual'"):
        testing.assert_offloaded(program, *args, names=["hiden"])
    with raises(ArgumentError, argument="names", value="hidden"):
        testing.assert_offloaded(program, *args, names="hidden")
    with pytest.raises(ShardrulesError, match="a compiled program does not have; pass the"):
        testing.assert_offloaded("HloModule m", names=["hidden"])


@pytest.mark.slow
def test_gradients_are_those_without_offloading():
    report.gradients_are_equal()


HOST = "f32[8,4]{1,0:S(5)}"
LOOP = f"""\
HloModule m, is_scheduled=true

%body (p: (s32[], f32[1,4], {HOST})) -> (s32[], f32[1,4], {HOST}) {{
  %p = (s32[], f32[1,4], {HOST}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[1,4] get-tuple-element(%p), index=1
  %b = {HOST} get-tuple-element(%p), index=2
  %z = s32[] constant(0)
  %u = {HOST} dynamic-update-slice(%b, %x, %i, %z)
  ROOT %t = (s32[], f32[1,4], {HOST}) tuple(%i, %x, %u)
}}

%cond (p: (s32[], f32[1,4], {HOST})) -> pred[] {{
  %p = (s32[], f32[1,4], {HOST}) parameter(0)
  ROOT %c = pred[] constant(true)
}}

ENTRY %e (i: s32[], x: f32[1,4]) -> f32[1,4] {{
  %i = s32[] parameter(0)
  %x = f32[1,4] parameter(1)
  %a = {HOST} custom-call(), custom_call_target="AllocateBuffer"
  %t = (s32[], f32[1,4], {HOST}) tuple(%i, %x, %a)
  %w = (s32[], f32[1,4], {HOST}) while(%t), condition=%cond, body=%body
  %h = {HOST} get-tuple-element(%w), index=2
  LOAD
  ROOT %r = f32[1,4] get-tuple-element(%w), index=1
}}
"""


def test_what_is_stored_and_never_loaded():
    """The second program of xla#17541: activations go to the host and are dropped there."""
    with pytest.raises(CostAssertionError) as caught:
        testing.assert_offloaded(LOOP.replace("LOAD", ""), min_bytes=0)
    assert "f32[8,4], 128 B, is stored in host memory at u and never loaded again" in str(
        caught.value
    )
    load = "%l = f32[1,4] dynamic-slice(%h, %i, %i), dynamic_slice_sizes={1,4}"
    assert testing.assert_offloaded(LOOP.replace("LOAD", load), min_bytes=128).bytes == 128


def test_one_buffer_through_all_loops():
    [buffer] = offloading.read(hlo.parse(LOOP.replace("LOAD", "")))
    assert (buffer.kind, len(buffer.stores), buffer.stores[0].runs) == ("temporary", 1, None)
