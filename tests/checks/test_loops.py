"""What loops launch: compiled for an H100, against the instruction lists of jaxlib's bindings."""

import re
import sys

import jax
import jax.numpy as jnp
import pytest
from raising import raises

from shardrules import hlo, report, testing
from shardrules.costs import launches
from shardrules.errors import CostAssertionError, ShardrulesError
from shardrules.report import sections

sys.path.insert(0, "examples")
import loop_of_tiny_kernels as sampler

F32 = jax.ShapeDtypeStruct((8,), jnp.float32)
# What is no kernel, copy or call, in the words of XLA's HloOpcode.
QUIET = {"kParameter", "kConstant", "kTuple", "kGetTupleElement", "kBitcast"}


@pytest.fixture(scope="module")
def compiled(gpu_mesh):
    """Each way of the report's program, compiled once."""
    devices = list(gpu_mesh.devices.flat)[:1]
    return {name: sampler.compiled_for(devices, way) for name, way in sampler.WAYS.items()}


def instructions_by_bindings(text):
    """Count, by computation, the instructions that launch something, as jaxlib lists them."""
    from jaxlib import _hlo

    module = _hlo.hlo_module_from_text(text)
    return {
        computation.name: [
            str(i.opcode).rpartition(".")[2]
            for i in computation.instructions()
            if str(i.opcode).rpartition(".")[2] not in QUIET and "AllocateBuffer" not in i.name
        ]
        for computation in module.computations()
    }


@pytest.mark.gpu
@pytest.mark.parametrize("way", list(sampler.WAYS)[:4])
def test_launches_are_the_instructions_that_jaxlib_lists(compiled, way):
    text = compiled[way].as_text()
    module = hlo.parse(text)
    listed = instructions_by_bindings(text)
    loops = launches.read(module)
    assert loops
    for loop in loops:
        [instruction] = [i for i in module.entry.instructions if i.name == loop.name]
        condition, body = (instruction.attribute(k).lstrip("%") for k in ("condition", "body"))
        expected = len(listed[body])
        if loop.host_decides:
            expected += len(listed[condition]) + 1  # and the predicate goes to the host
        assert loop.launches == expected


@pytest.mark.gpu
def test_the_report_s_five_ways(compiled):
    found = {}
    for name, program in compiled.items():
        try:
            [loop] = testing.assert_loop(program, trip_count=None)
            found[name] = loop.trip_count, loop.host_decides
        except ShardrulesError as error:
            found[name] = str(error)
    assert list(found.values()) == [
        (None, True),
        (8000, False),
        (8000, False),
        (1000, False),
        "<compiled> holds no loop; its loops: none (unrolled, or inside a kernel)",
    ]


@pytest.mark.gpu
def test_a_dynamic_bound_fails_with_what_to_do(compiled):
    program = compiled["while_loop, the bound an argument"]
    with pytest.raises(CostAssertionError) as caught:
        testing.assert_loop(program, max_launches_per_iteration=1)
    lines = str(caught.value).splitlines()
    assert lines[0] == "<compiled> holds loops that cost more than expected:"
    assert "loop_of_tiny_kernels.py:" in lines[1]
    assert lines[2:4] == [
        "    its trip count is not static: its bound is the argument count (s32[]); the host waits "
        "for its predicate on each trip",
        "    to do: make the bound a Python number (static_argnums of jax.jit); if it must vary, "
        "run chunks of a static length",
    ]
    assert lines[4].startswith("    it launches ") and lines[4].endswith("at most 1 expected")
    assert testing.assert_loop(program, max_launches_per_iteration=9, trip_count=None)


def dynamic(x, n):
    return jax.lax.while_loop(lambda c: c[1] < n, lambda c: (c[0] * 2, c[1] + 1), (x, 0))[0]


def converging(x):
    return jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: x * 1.5, x)


def test_what_made_a_trip_count_unknown():
    for f, args, reason in (
        (
            dynamic,
            (F32, jax.ShapeDtypeStruct((), jnp.int32)),
            "its bound is the argument n (s32[])",
        ),
        (lambda x: dynamic(x, x.astype(int).sum()), (F32,), "its bound is computed outside of it"),
        (converging, (F32,), "its condition reads what each trip computes: f32[8]"),
    ):
        with pytest.raises(CostAssertionError) as caught:
            testing.assert_loop(f, *args)
        (loop,) = caught.value.loops
        assert loop.trip_count is None and loop.unknown.startswith(reason)
        assert "waits" not in str(caught.value)  # a CPU is the host


def chosen(x, n):
    return jax.lax.cond(x.sum() > 0, lambda x: dynamic(x, n), lambda x: x, x)


@pytest.mark.parametrize(
    "body, reason",
    [
        (lambda i, c, n: (dynamic(c[0], n), c[1]), "the argument n (s32[])"),
        (lambda i, c, n: (chosen(c[0], n), c[1]), "the argument n (s32[])"),
        (
            lambda i, c, n: (jax.lax.fori_loop(0, 4, lambda _, x: dynamic(x, n), c[0]), c[1]),
            "the argument n (s32[])",
        ),
        (lambda i, c, n: (dynamic(c[0], i), c[1]), "carried by the loop around it (s32[])"),
        (lambda i, c, n: (dynamic(c[0], c[1]), c[1] * 2), "carried by the loop around it (s32[])"),
        (lambda i, c, n: (dynamic(c[0], n * 3), c[1]), "computed outside of it (mul, s32[] at "),
        (
            lambda i, c, n: (dynamic(c[0], c[1] * 3), c[1] * 2),
            "computed outside of it (mul, s32[] at ",
        ),
    ],
    ids=["passed on", "in a branch", "passed on twice", "counter", "changed", "before", "inside"],
)
def test_what_made_the_trip_count_of_an_inner_loop_unknown(body, reason):
    def f(x, n):
        return jax.lax.fori_loop(0, 5, lambda i, c: body(i, c, n), (x, n))

    shape = jax.ShapeDtypeStruct((4096,), jnp.float32)
    found = testing.assert_loop(f, shape, jax.ShapeDtypeStruct((), jnp.int32), trip_count=None)
    (unknown,) = (loop.unknown for loop in found if loop.trip_count is None)
    assert unknown.startswith(f"its bound is {reason}")


def test_trip_counts():
    f = lambda x: jax.lax.fori_loop(0, 12, lambda _, x: x * 2, x)  # noqa: E731
    assert [loop.trip_count for loop in testing.assert_loop(f, F32, trip_count=12)] == [12]
    with pytest.raises(CostAssertionError) as caught:
        testing.assert_loop(f, F32, trip_count=13)
    assert [loop.trip_count for loop in caught.value.loops] == [12]


def test_what_can_not_be_asked():
    f = lambda x: jax.lax.fori_loop(0, 12, lambda _, x: x * 2, x)  # noqa: E731
    with raises(ShardrulesError, platform="v5e"):
        testing.assert_loop(f, F32, platform="v5e")
    with raises(ShardrulesError, at=None):
        testing.assert_loop(lambda x: x * 2, F32)
    for said, asked in (
        ("launches are counted in programs for GPU, .* cpu", {"max_launches_per_iteration": 3}),
        ("holds no loop at x.py:1; its loops: .*test_loops.py", {"at": "x.py:1"}),
        ("trip_count='stat' is unknown; give 'static', a number", {"trip_count": "stat"}),
    ):
        with pytest.raises(ShardrulesError, match=said):
            testing.assert_loop(f, F32, **asked)


LOOP = """\
HloModule m, is_scheduled=true, frontend_attributes={fingerprint_before_lhs="0"}

%fused (a: f32[8]) -> f32[8] {
  %a = f32[8] parameter(0)
  ROOT %n = f32[8] negate(%a)
}

%command_buffer (a: f32[8]) -> f32[8] {
  %a = f32[8] parameter(0)
  %k = f32[8] fusion(%a), kind=kLoop, calls=%fused
  ROOT %l = f32[8] fusion(%k), kind=kLoop, calls=%fused
}

%inner (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8] get-tuple-element(%p), index=1
  %f = f32[8] fusion(%x), kind=kLoop, calls=%fused
  ROOT %t = (s32[], f32[8]) tuple(%i, %f)
}

%forever (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]) parameter(0)
  ROOT %c = pred[] constant(true)
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8] get-tuple-element(%p), index=1
  %g = f32[8] call(%x), to_apply=%command_buffer
  %c = f32[8] copy(%g)
  %b = f32[8] custom-call(%c), custom_call_target="__cublas$gemm"
  %s = (s32[], f32[8]) tuple(%i, %b)
  ROOT %w = (s32[], f32[8]) while(%s), condition=%forever, body=%inner INNER
}

ENTRY %e (i: s32[], x: f32[8]) -> (s32[], f32[8]) {
  %i = s32[] parameter(0)
  %x = f32[8] parameter(1)
  %t = (s32[], f32[8]) tuple(%i, %x)
  ROOT %w = (s32[], f32[8]) while(%t), condition=%forever, body=%body, backend_config={"known_trip_count":{"n":"4"}}
}
"""
KNOWN = ', backend_config={"known_trip_count":{"n":"5"}}'


def test_graphs_libraries_copies_and_loops_inside():
    outer, inner = launches.read(hlo.parse(LOOP.replace("INNER", KNOWN)))
    assert dict(outer.kinds) == {"copy": 1, "fusion": 5, "graph": 1, "library call": 1}
    assert (outer.launches, outer.graphs, outer.copied_bytes, outer.trip_count) == (8, 1, 32, 4)
    assert (inner.launches, inner.depth, inner.host_decides) == (1, 1, False)
    assert launches.in_all(hlo.parse(LOOP.replace("INNER", KNOWN))) == 32


def test_a_loop_of_unknown_length_inside_is_not_counted_as_nothing():
    text = LOOP.replace("INNER", "")
    outer, inner = launches.read(hlo.parse(text))
    assert (outer.launches, outer.copied_bytes) == (None, None)
    assert inner.host_decides and dict(inner.kinds) == {"copy of the predicate": 1, "fusion": 1}
    lengths = lambda loops: [loop.trip_count for loop in loops] == [4, None]  # noqa: E731
    with raises(CostAssertionError, loops=lengths):
        testing.assert_loop(text, max_launches_per_iteration=99, trip_count=None)


def test_the_section_of_a_report():
    shown = report.plain(report.content(hlo.judge(hlo.parse(LOOP.replace("INNER", KNOWN)))))
    assert (
        "loops:\n"
        "loop | trips | launches | copied bytes\n"
        "-----+-------+----------+-------------\n"
        "w    | 4     | 8        | 32\n"
        "  w  | 5     | 1        | 0\n"
        "(launches: of one trip, counted for GPUs; copied bytes: data that XLA copies in one trip, "
        "as it can't update the loop's carry in place)\n"
    ) in shown


def loops_of(*calls):
    """A module of loops, each with the loops and calls that its body runs: ("w1", ("w2",))."""
    texts = {}

    def ran(calls):
        lines = []
        for name, *inner in calls:
            callee = f"%{name}_body"
            texts.setdefault(callee, computation(callee, ran(inner)))
            operand = f"%{calls[len(lines) - 1][0]}" if lines else "%p"
            how = f"while({operand}), condition=%forever, body={callee}"
            if name.startswith("call"):
                how = f"call({operand}), to_apply={callee}"
            lines.append(f"  %{name} = f32[8] {how}\n")
        return lines

    def computation(head, lines):
        root = f"  ROOT %r = f32[8] negate(%{lines[-1].split()[0][1:] if lines else 'p'})\n"
        parameter = "  %p = f32[8] parameter(0)\n"
        return f"{head} (p: f32[8]) -> f32[8] {{\n{parameter}{''.join(lines)}{root}}}\n\n"

    entry = computation("ENTRY %e", ran(calls))
    forever = "%forever (p: f32[8]) -> pred[] {\n  %p = f32[8] parameter(0)\n"
    forever += "  ROOT %c = pred[] constant(true)\n}\n\n"
    return hlo.judge(hlo.parse("HloModule m\n\n" + forever + "".join(texts.values()) + entry))


def test_inner_loops_stand_below_the_loop_around_them():
    """All outer loops came first, and then all inner ones, those of the last outer loop first."""

    def rows(*calls, interpreted=()):
        (block,) = sections.sections(loops_of(*calls).module, interpreted)
        return [row[0] for row in block.rows]

    two = ("w1", ("w2",)), ("w3", ("w4", ("w5",)), ("w6",))
    assert rows(*two) == ["w1", "  w2", "w3", "  w4", "    w5", "  w6"]
    called = ("w1", ("call1", ("w2",))), ("call2", ("w3",)), ("w4", ("w5",))
    assert rows(*called) == ["w1", "  w2", "w3", "w4", "  w5"]
    # What is called outside of a loop and inside of one stands where it is called first.
    shared = ("call", ("w1",)), ("w2", ("call", ("w1",)), ("w3",)), ("w4", ("w5",))
    assert rows(*shared) == ["  w1", "w2", "  w3", "w4", "  w5"]
    kernel = rows(*two, interpreted={"w3"})
    assert kernel == ["w1", "  w2", "w3: an interpreted kernel's", *rows(*two)[3:]]


def test_a_column_in_which_nothing_is_known_is_left_out():
    """Launches are counted for GPUs alone; those of a loop may be zero bytes."""
    text = re.sub(r", frontend_attributes=\{fingerprint[^}]*\}", "", LOOP.replace("INNER", ""))
    content = report.content(hlo.judge(hlo.parse(text)))
    assert "trips | copied bytes | trips unknown because" in report.plain(content)
    assert "| trips | copied bytes | trips unknown because |" in report.markdown(content)
    assert "launches</" not in report.page(content) and "copied bytes</" in report.page(content)
    # What is said of the column goes with it.
    for shown in (report.plain(content), report.markdown(content), report.page(content)):
        assert "counted for GPUs" not in shown and "? is not known" in shown
