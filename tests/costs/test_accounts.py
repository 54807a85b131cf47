"""Accounts: wire bytes, loops, axes, phases, source lines; compiled and logical; expectations."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import programs
import pytest
from hlo import text as T
from jax.sharding import PartitionSpec as P
from raising import raises

from shardrules import errors, hlo, report, testing
from shardrules.costs import accounts, comparing, findings, waste
from shardrules.registry.table import PROVEN
from shardrules.report import several

TRIPS = 32


def scanned(x, w):
    """A gather in a scan of 32, a sum in f32, a scattered sum in bf16."""

    def body(carry, layer):
        return jnp.tanh(carry @ jax.lax.all_gather(layer, "data", tiled=True)), None

    y, _ = jax.lax.scan(body, x, w)
    return (
        jax.lax.psum((y * y).sum(), "data"),
        jax.lax.psum_scatter(
            jnp.sin(y * jax.lax.axis_index("model")).astype(jnp.bfloat16),
            "model",
            scatter_dimension=1,
            tiled=True,
        ),
    )


def program(mesh):
    f = jax.shard_map(
        scanned,
        mesh=mesh,
        in_specs=(P("data"), P(None, "data")),
        out_specs=(P(), P("data", "model")),
        check_vma=False,
    )
    return jax.jit(f), programs.structs(
        mesh, ((8, 16), P("data")), ((TRIPS, 16, 16), P(None, "data"))
    )


@functools.cache
def lowered(mesh):
    f, args = program(mesh)
    return f.lower(*args)


@functools.cache
def compiled(mesh):
    return lowered(mesh).compile()


@pytest.mark.parametrize(
    "kind, size, bytes_, expected",
    [
        ("all-reduce", 8, 1000, 1750),
        ("reduce-scatter", 4, 1000, 750),
        ("all-to-all", 4, 1000, 750),
        ("all-gather", 4, 1000, 3000),
        ("collective-permute", 2, 1000, 1000),
        ("collective-broadcast", 2, 1000, 1000),
        ("ragged-all-to-all", 2, 1000, 500),
        ("all-reduce", 3, 4, 6),
        ("all-reduce", 1, 1000, 0),
        ("collective-permute", 1, 1000, 0),
    ],
)
def test_wire_bytes_are_those_of_ring_algorithms(kind, size, bytes_, expected):
    assert accounts.wire_bytes(kind, bytes_, size) == expected


def test_a_permute_to_oneself_moves_nothing():
    assert accounts.wire_bytes("collective-permute", 8, 2, moves=False) == 0


def test_a_collective_in_a_scan_counts_once_a_trip_on_every_platform(platform):
    account = testing.account(compiled(platform[1]))
    (gather,) = [e for e in account if e.kind == "all-gather"]
    assert (gather.axes, gather.runs, gather.loop_depth) == (("data",), TRIPS, 1)
    assert (gather.bytes, gather.wire_bytes, gather.element_type) == (256, 768, "f32")
    assert gather.file.endswith("test_accounts.py") and "scanned" in gather.function
    assert gather.phase == "forward" and gather.verdict == "needed"
    totals = account.by("kind", "axes")[("all-gather", ("data",))]
    assert totals == accounts.Totals(1, TRIPS, TRIPS * 256, TRIPS * 768, 0)


def test_the_logical_account_is_the_same_on_every_platform(platform):
    f, args = program(platform[1])
    found = {}
    for given, rest in ((f, args), (lowered(platform[1]), ())):
        account = testing.account(given, *rest, level="logical")
        assert account.level == "logical" and account.mesh == {"data": 4, "model": 2}
        found = [(e.what, e.element_type, e.bytes, e.runs, e.line > 0, e.verdict) for e in account]
        assert sorted(found) == [
            ("forward all-gather(data)", "f32", 256, TRIPS, True, ""),
            ("forward all-reduce(data)", "f32", 4, 1, True, ""),
            ("forward reduce-scatter(model)", "bf16", 64, 1, True, ""),
        ]
    testing.assert_collectives(
        f,
        *args,
        level="logical",
        expect={
            "all-gather(data)": TRIPS,
            "all-reduce(data)": 1,
            "reduce-scatter(model)": {"bytes": 64},
        },
    )


def test_a_compiled_program_has_no_logical_account(cpu_mesh):
    with pytest.raises(errors.ShardrulesError) as caught:
        testing.account(compiled(cpu_mesh), level="logical")
    assert str(caught.value) == (
        "Compiled does not hold the program before XLA's passes, which the logical account "
        "counts; pass the function with its arguments, or the jax.stages.Lowered"
    )
    with raises(errors.ShardrulesError, level="logic"):
        testing.account(compiled(cpu_mesh), level="logic")


# Expectations.


def test_expectations_by_bytes_wire_bytes_and_sites(cpu_mesh):
    good = {
        "all-gather(data)": {"count": TRIPS, "bytes": 8192, "wire_bytes": 24576, "sites": 1},
        "forward all-reduce(data)": 1,
        "forward reduce-scatter(model)": 1,
    }
    testing.assert_collectives(compiled(cpu_mesh), expect=good)
    testing.assert_collectives(compiled(cpu_mesh), expect=testing.exactly(good))
    testing.assert_collectives(
        compiled(cpu_mesh),
        expect={**good, "all-gather(data)": 0, "all-gather(data) at test_accounts.py": TRIPS},
    )
    with pytest.raises(errors.CollectiveAssertionError) as caught:
        testing.assert_collectives(
            compiled(cpu_mesh), expect={**good, "all-gather(data)": {"wire_bytes": 768, "sites": 2}}
        )
    assert str(caught.value).splitlines()[1] == (
        "  all-gather(data): expected 768 B on the wire, 2 sites, found 32, 8192 B, 24576 B on "
        "the wire, 1 sites"
    )


def test_at_most_allows_less_and_nothing_else(cpu_mesh):
    enough = {
        "all-gather(data)": 40,
        "all-reduce(data)": 2,
        "reduce-scatter(model)": 1,
        "all-to-all(data)": 3,
    }
    testing.assert_collectives(compiled(cpu_mesh), expect=testing.at_most(enough))
    with pytest.raises(errors.CollectiveAssertionError, match="expected at most 31, found 32"):
        testing.assert_collectives(
            compiled(cpu_mesh), expect=testing.at_most({**enough, "all-gather(data)": 31})
        )
    del enough["all-reduce(data)"]
    with raises(errors.CollectiveAssertionError, expect=testing.at_most(enough)):
        testing.assert_collectives(compiled(cpu_mesh), expect=testing.at_most(enough))


def test_expectations_for_each_platform(platform):
    rest = {"all-gather(data)": TRIPS, "all-reduce(data)": 1}
    # XLA makes a psum_scatter on TPU an all-reduce where that is cheaper.
    scattered = {"reduce-scatter(model)": 1}
    held = testing.account(compiled(platform[1])).by("kind")
    if ("reduce-scatter",) not in held:
        assert platform[0] == "tpu"
        scattered = {"all-reduce(model)": 1}
    others = {name: {} for name in ("cpu", "tpu", "gpu") if name != platform[0]}
    testing.assert_collectives(
        compiled(platform[1]), expect={**others, platform[0]: {**rest, **scattered}}
    )
    with raises(errors.ShardrulesError, platform=platform[0]):
        testing.assert_collectives(compiled(platform[1]), expect=others)


def test_text_does_not_say_its_platform(cpu_mesh):
    text = compiled(cpu_mesh).as_text()
    expect = {
        "cpu": testing.at_most(
            {"all-gather(data)": 32, "all-reduce(data)": 1, "reduce-scatter(model)": 1}
        ),
        "tpu": {},
    }
    mesh = {"data": 4, "model": 2}
    testing.assert_collectives(text, mesh=mesh, platform="cpu", expect=expect)
    with raises(errors.ShardrulesError, platform=None):
        testing.assert_collectives(text, mesh=mesh, expect=expect)


@pytest.mark.parametrize("value", [{"cuont": 1}, {}, {"bytes": -1}, {"sites": True}])
def test_expectations_that_cant_be_read(value):
    with pytest.raises(errors.ShardrulesError) as caught:
        testing.exactly({"all-reduce(data)": value})
    assert str(caught.value) == (
        f"{value!r} for 'all-reduce(data)' is not an expectation; give a count, or "
        "{'count': 1, 'bytes': 512}, of count, bytes, wire_bytes and sites"
    )
    with pytest.raises(errors.ShardrulesError, match="^int is not an expectation; give a mapping"):
        testing.assert_collectives("HloModule m\n", expect=3)


LOOP = """%body (s: (s32[], f32[8], f32[8])) -> (s32[], f32[8], f32[8]) {{
  %s = (s32[], f32[8], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %x.in = f32[8] get-tuple-element(%s), index=1
  %w.in = f32[8] get-tuple-element(%s), index=2
  %twice = f32[8] add(%w.in, %w.in)
  %mixed = f32[8] add(%twice, %x.in)
  {reduction}
  %y = f32[8] add(%x.in, %r)
  ROOT %out = (s32[], f32[8], f32[8]) tuple(%next, %y, %w.in)
}}

%condition (c: (s32[], f32[8], f32[8])) -> pred[] {{
  %c = (s32[], f32[8], f32[8]) parameter(0)
  %j = s32[] get-tuple-element(%c), index=0
  %limit = s32[] {limit}
  ROOT %less = pred[] compare(%j, %limit), direction=LT
}}

"""


def loop(operand="%twice", limit="constant(32)"):
    entry = "\n".join(
        [
            T.parameter(T.DATA, name="w", number=0),
            T.parameter(T.BOTH, name="x", number=1),
            "%zero = s32[] constant(0)",
            "%start = (s32[], f32[8], f32[8]) tuple(%zero, %x, %w)",
            "%while = (s32[], f32[8], f32[8]) while(%start), condition=%condition, body=%body",
            "ROOT %result = f32[8] get-tuple-element(%while), index=1",
        ]
    )
    reduction = T.all_reduce(
        operand,
        T.OVER_DATA,
        extra=', metadata={op_name="jit(f)/psum" source_file="model.py" source_line=7}',
    )
    return T.module(entry, LOOP.format(reduction=reduction, limit=limit))


def test_a_gather_that_a_loop_repeats_is_named():
    judgement = testing.judge(loop(), mesh=T.MESH)
    (hint,) = waste.hints(judgement)
    assert (hint.kind, hint.bytes_before, hint.bytes_after) == ("repeated", 32 * 32, 32)
    assert hint.advice == (
        "its operand is the same on every trip of the loop: compute what it makes before the loop, "
        "and 1024 B become 32 B (the result then stays in memory)"
    )
    for changing in ("%x.in", "%mixed"):
        assert waste.hints(testing.judge(loop(changing), mesh=T.MESH)) == []


def test_a_loop_of_unknown_length_is_said():
    text = loop(limit="count-leading-zeros(%j)")
    account = testing.account(text, mesh=T.MESH)
    assert account.total == accounts.Totals(1, 0, 0, 0, 1, unknown_bytes=32)
    assert str(account) == (
        "forward all-reduce(data): 0, 0 B and 1 in loops of unknown length, 32 B a trip"
    )
    said = "1 collective in loops of unknown length, 48 B each trip on the wire per device; 1 repea"
    content = report.content(testing.judge(text, mesh=T.MESH))
    assert said in content.headline
    assert several.gather([content], [1]).programs.rows[0][-4] == "48 B each trip"
    with pytest.raises(errors.CollectiveAssertionError) as caught:
        testing.assert_collectives(text, mesh=T.MESH, expect={"all-reduce(data)": 0})
    assert (
        "found 0, 0 B (1 in loops whose trip count isn't known: give 'sites' for these)"
    ) in str(caught.value)
    testing.assert_collectives(text, mesh=T.MESH, expect={"all-reduce(data)": {"sites": 1}})
    (hint,) = waste.hints(testing.judge(text, mesh=T.MESH))
    assert "32 B on every trip become 32 B" in hint.advice and hint.bytes_before is None


def test_reduce_before_you_psum(cpu_mesh):
    def f(x):
        return jax.lax.psum(x, "data").sum(0)

    args = programs.structs(cpu_mesh, ((8, 128), P("data")))
    for fun, expected in (
        (f, 1),
        (lambda x: jax.lax.psum(x.sum(0), "data"), 0),
        (lambda x: jax.lax.psum(x, "data").max(0), 0),
        (lambda x: (lambda y: y.sum(0) + y[0])(jax.lax.psum(x, "data")), 0),
    ):
        g = jax.shard_map(fun, mesh=cpu_mesh, in_specs=P("data"), out_specs=P())
        found = waste.hints(testing.judge(jax.jit(g), *args))
        assert [h.kind for h in found] == ["reduce first"] * expected
        for hint in found:
            assert (hint.bytes_before, hint.bytes_after) == (1024, 512)
            assert hint.advice == (
                "its result is only summed up on each device: reduce before you psum, and "
                "1024 B become 512 B"
            )


# Advice, allowances, strictness.


def judged(operand_sharding, groups, op_name="jit(f)/psum", before=(), operand="%x"):
    body = "\n".join(
        [
            T.parameter(operand_sharding),
            *before,
            T.all_reduce(
                operand,
                groups,
                extra=f', metadata={{op_name="{op_name}" source_file="model.py" source_line=7}}',
            ),
        ]
    )
    return T.module(body)


KERNEL = (
    '%k = f32[8] custom-call(%x), custom_call_target="tpu_custom_call", '
    'frontend_attributes={{shardrules.kernel="norm",shardrules.effects="local",'
    'shardrules.status="{status}",shardrules.mesh="data=4,model=2"}}'
)


@pytest.mark.parametrize(
    "text, advice",
    [
        (
            judged(T.DATA, T.OVER_MODEL),
            "drop it: each device can compute the result from its own operand (the sum of 2 "
            "equal values is 2 times that value, and their mean is that value)",
        ),
        (
            judged(T.DATA, T.ALL),
            "run it over data only; for a sum, not for a mean, multiply it by 2 (the devices along "
            "model hold the same)",
        ),
        (
            judged(T.DATA, T.ALL, "jit(f)/transpose(jvp())/psum"),
            "run `shardrules migrate --diff on.patch SCRIPT` (SCRIPT: the one that compiles this "
            "program): it switches on the check of the shard_map, so that the backward pass reduces over just the axes that it needs, compares what the "
            "programs return, and writes the patch",
        ),
        (
            judged(
                T.DATA,
                T.ALL,
                before=['%k = f32[8] custom-call(%x), custom_call_target="mine"'],
                operand="%k",
            ),
            "if the kernel reads no other device and no device id, declare that: "
            "@shardrules.no_communication above its def, or shardrules.register('mine', "
            "shardrules.no_communication)",
        ),
        (
            judged(
                T.DATA,
                T.ALL,
                before=['%k = f32[8] custom-call(%x), custom_call_target="gmm_bm128"'],
                operand="%k",
            ),
            "if the kernel reads no other device and no device id, declare that: "
            "@shardrules.no_communication above its def, or shardrules.register('gmm_bm128', "
            "shardrules.no_communication), or 'gmm_bm*' for all block sizes",
        ),
        (
            T.module("%x = f32[8] parameter(0)\n" + T.all_reduce("%x")),
            "say how its parameters are sharded: pass the flags that "
            "print(shardrules.testing.verify_flags(compiled)) prints in the program, or "
            "--parameters FILE, the *before_optimizations.txt of the same dump; in Python, judge "
            "the jax.stages.Compiled instead of its text",
        ),
    ],
)
def test_the_one_change_that_removes_a_finding(text, advice):
    (finding,) = findings.find(testing.judge(text, mesh=T.MESH))
    assert finding.advice == advice


def test_advice_on_a_collective_that_may_hang():
    condition = "%bit = pred[] slice(%flags), slice={[0:1]}"
    branch = (
        "%yes (p: f32[8]) -> f32[8] {\n  %p = f32[8] parameter(0)\n"
        + "  ROOT "
        + T.all_reduce("%p", T.ALL)
        + "\n}\n\n"
        "%no (q: f32[8]) -> f32[8] {\n  ROOT %q = f32[8] parameter(0)\n}\n\n"
    )
    body = "\n".join(
        [
            T.parameter(T.DATA),
            T.parameter(T.BOTH, "pred[1]", "flags", 1),
            condition,
            "%c = f32[8] conditional(%bit, %x, %x), true_computation=%yes, false_computation=%no",
        ]
    )
    (finding,) = findings.find(testing.judge(T.module(body, branch), mesh=T.MESH))
    assert finding.kind == "may hang"
    assert findings.allowance(finding) == "may hang unknown all-reduce(data, model)"
    for name in ("all-reduce(data, model)", "unproven all-reduce(data, model)"):
        assert findings.Allowances({name: "a kernel without a rule"}).split([finding])[0]
    assert not findings.Allowances({findings.allowance(finding): "issue 3"}).split([finding])[0]
    assert finding.advice == (
        "make the predicate equal within each group (jax.lax.psum or pmax it over the axes), or "
        "move the collective out of the branch or loop"
    )


def test_known_findings_are_allowed_with_a_reason():
    text = judged(T.DATA, T.OVER_MODEL)
    for name in (
        "all-reduce(model)",
        "redundant all-reduce(model)",
        "redundant forward all-reduce(model) at model.py:7",
    ):
        testing.assert_no_defensive_psum(text, mesh=T.MESH, allow={name: "issue 12"})
    for name in (
        "overwide all-reduce(model)",
        "all-reduce(data)",
        "backward all-reduce(model)",
        "all-reduce(model) at odel.py",
        "all-reduce(model) at model.py:8",
    ):
        with raises(errors.CollectiveAssertionError, verdicts=lambda verdicts: len(verdicts) == 1):
            testing.assert_no_defensive_psum(text, mesh=T.MESH, allow={name: "issue 12"})
    for name in ("all-reduce(?)", "all-reduce(?) at model.py"):  # without a mesh
        testing.assert_no_defensive_psum(text, allow={name: "issue 12"})
    unused = "these allowances match no finding any more; remove them:\n  all-reduce(model)"
    with raises(errors.CollectiveAssertionError, verdicts=(), message=unused):
        testing.assert_no_defensive_psum(
            judged(T.BOTH, T.OVER_MODEL), mesh=T.MESH, allow={"all-reduce(model)": "issue 12"}
        )
    with raises(errors.ShardrulesError, key="all-reduce(model)"):
        testing.assert_no_defensive_psum(text, allow={"all-reduce(model)": " "})


@pytest.mark.parametrize(
    "status, strict, kinds",
    [("declared", False, []), ("declared", True, ["declared"]), ("audited", True, [])],
)
def test_strict_forbids_verdicts_that_rest_on_unaudited_rules(status, strict, kinds):
    text = judged(T.BOTH, T.OVER_MODEL, before=[KERNEL.format(status=status)], operand="%k")
    found = findings.find(hlo.judge(text, mesh=T.MESH), strict)
    assert [f.kind for f in found] == kinds
    rests = [s for v in hlo.judge(text, mesh=T.MESH).verdicts for s in v.rests_on]
    assert (PROVEN in "\n".join(map(str, rests))) == (status == "audited")
    assert status in [support.status for support in rests]
    if kinds:
        with pytest.raises(errors.CollectiveAssertionError) as caught:
            testing.assert_no_defensive_psum(text, mesh=T.MESH, strict=True)
        assert found[0].advice == (
            "it rests on a declaration for 'norm', and strict accepts only proofs: let the "
            "audit prove the kernel (it has proven each kernel that needs no registration), or "
            "allow this with a reason"
        )
        assert f"    to do: {found[0].advice}" in str(caught.value).splitlines()


def test_what_came_went_grew_shrank_and_moved():
    one = accounts.Totals(1, 1, 100, 100, 0)
    key = lambda n: (f"forward all-reduce({n})", "f32", "")  # noqa: E731
    before = {key("a"): one, key("b"): one, key("c"): one, key("d"): one, key("s"): one}
    after = {
        key("b"): dataclasses.replace(one, bytes=200),
        key("c"): dataclasses.replace(one, count=0, bytes=50),
        key("d"): dataclasses.replace(one, sites=2),
        key("e"): one,
        key("s"): one,
    }
    assert {str(c) for c in comparing.compare(before, after)} == {
        "- forward all-reduce(a) f32: 1, 100 B",
        "+ forward all-reduce(e) f32: 1, 100 B",
        "~ forward all-reduce(b) f32: grew from 1, 100 B to 1, 200 B",
        "~ forward all-reduce(c) f32: shrank from 1, 100 B to 0, 50 B",
        "~ forward all-reduce(d) f32: 1, 100 B at 1 sites before, 1, 100 B at 2 sites now",
    }


def test_what_a_loop_of_unknown_length_moves_on_each_trip_is_compared():
    text = loop(limit="count-leading-zeros(%j)")
    before, after = (
        comparing.grouped(testing.account(t, mesh=T.MESH))
        for t in (text, text.replace("f32[8]", "f32[80]"))
    )
    unknown = "0, 0 B and 1 in loops of unknown length, {} B a trip"
    assert [str(change) for change in comparing.compare(before, after)] == [
        "~ forward all-reduce(data) f32 at model.py: "
        f"grew from {unknown.format(32)} to {unknown.format(320)}"
    ]


def test_and_so_are_the_loops_in_it():
    inside = """%zero = s32[] constant(0)
  %t = (s32[], f32[8], f32[8]) tuple(%zero, %x.in, %w.in)
  %w = (s32[], f32[8], f32[8]) while(%t), condition=%condition, body=%body
  %r = f32[8] get-tuple-element(%w), index=1"""
    outer = LOOP.replace("%body", "%outer").replace("%condition", "%until")
    outer = outer.format(reduction=inside, limit="negate(%j)")
    before, after = (
        testing.account(
            loop(limit=f"constant({trips})")
            .replace("condition=%condition, body=%body", "condition=%until, body=%outer")
            .replace("ENTRY", outer + "ENTRY"),
            mesh=T.MESH,
        )
        for trips in (12, 24)
    )
    (change,) = comparing.compare(*map(comparing.grouped, (before, after)))
    assert (change.before.unknown_bytes, change.after.unknown_bytes) == (12 * 32, 24 * 32)


FRAMES = """
FileNames
1 "train.py"

FunctionNames
1 "step"
2 "block"

FileLocations
1 {file_name_id=1 function_name_id=1 line=59 end_line=59 column=1 end_column=2}
2 {file_name_id=1 function_name_id=1 line=46 end_line=46 column=1 end_column=2}
3 {file_name_id=1 function_name_id=2 line=42 end_line=42 column=1 end_column=2}
4 {file_name_id=1 function_name_id=2 line=70 end_line=70 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}
4 {file_location_id=4 parent_frame_id=2}

"""


@pytest.mark.parametrize(
    "name, frame, place",
    [
        ("remat2", 3, "train.py:42 (block)"),  # the loop's line calls it
        ("remat2", 4, "train.py:46 (step)"),  # it doesn't
        ("dot_general", 3, "train.py:46 (step)"),  # the line is the collective's own
        ("remat2/dot_general", 3, "train.py:46 (step)"),  # and in a checkpoint, too
        ("while", 4, "train.py:70 (block)"),  # who takes a loop's result
    ],
)
def test_the_line_within_a_loop_is_named_where_xla_left_that_of_the_loop(name, frame, place):
    own = f', metadata={{op_name="jit(f)/{name}" stack_frame_id=2}}'
    gather = (
        "%g = f32[32] all-gather(%x), channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}, "
        f"dimensions={{0}}, use_global_device_ids=true{own}"
    )
    taker = f'%r = f32[32] negate(%c), metadata={{op_name="jit(f)/neg" stack_frame_id={frame}}}'
    text = T.module("\n".join([T.parameter(T.DATA), gather, "%c = f32[32] copy(%g)", taker]))
    head, tail = text.split("\n", 1)
    (entry,) = accounts.of(hlo.judge(f"{head}\n{FRAMES}{tail}", mesh=T.MESH))
    assert (entry.place, entry.source) == (place, "train.py:46 (step)")


@pytest.mark.parametrize(
    "name, place", [("psum", "train.py:46 (step)"), ("dot_general", "train.py:42 (block)")]
)
def test_what_the_program_asks_for_stands_at_its_own_line_even_if_a_loop_does_too(name, place):
    """As a psum of what an interpreted kernel, which is a loop, gives: both on one line."""
    metadata = ', metadata={{op_name="jit(f)/{}" stack_frame_id={}}}'.format
    condition = LOOP[LOOP.index("%condition") :].format(limit="constant(12)")
    body = """%body (b: (s32[], f32[8])) -> (s32[], f32[8]) {
  %b = (s32[], f32[8]) parameter(0)
  %k = s32[] get-tuple-element(%b), index=0
  %kx = f32[8] get-tuple-element(%b), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%k, %one)
  ROOT %out = (s32[], f32[8]) tuple(%next, %kx)
}

"""
    condition = condition.replace("(s32[], f32[8], f32[8])", "(s32[], f32[8])")
    reduction = T.all_reduce("%made")
    loop = f"""%zero = s32[] constant(0)
  %t = (s32[], f32[8]) tuple(%zero, %x)
  %w = (s32[], f32[8]) while(%t), condition=%condition, body=%body{metadata("k/while", 2)}
  %made = f32[8] get-tuple-element(%w), index=1{metadata("k/while", 3)}
  {reduction}{metadata(name, 2)}"""
    text = T.module(T.parameter(T.DATA) + "\n  " + loop)
    text = text.replace("ENTRY", condition + body + "ENTRY")
    head, tail = text.split("\n", 1)
    (entry,) = accounts.of(hlo.judge(f"{head}\n{FRAMES}{tail}", mesh=T.MESH))
    assert (entry.place, entry.source) == (place, "train.py:46 (step)")


@pytest.mark.parametrize(
    "name, frame, combined, place",
    [
        ("x", "", False, "x"),  # the argument's own name
        ("x", " stack_frame_id=2", False, "train.py:46 (step)"),  # it has a line
        ("jit(f)/x", "", False, ""),  # an operation's name
        ("y", "", False, ""),  # no argument is called that
        ("x", "", True, ""),  # it moves another argument too
    ],
)
def test_an_argument_is_named_where_its_gather_has_no_line(name, frame, combined, place):
    shape, operands = ("(f32[32], f32[32])", "%x, %z") if combined else ("f32[32]", "%x")
    gather = (
        f"%g = {shape} all-gather({operands}), channel_id=1, replica_groups={{{{0,2,4,6}},"
        "{1,3,5,7}}, dimensions={0}, use_global_device_ids=true, "
        f'metadata={{op_name="{name}"{frame}}}'
    )
    parameters = [T.parameter(T.DATA), T.parameter(T.DATA, name="z", number=1)]
    body = "%c = f32[32] get-tuple-element(%g), index=0" if combined else "%c = f32[32] copy(%g)"
    text = T.module("\n".join([*parameters, gather, body, "%r = f32[32] negate(%c)"]))
    head, tail = text.split("\n", 1)
    judgement = hlo.judge(f"{head}\n{FRAMES}{tail}", mesh=T.MESH)
    assert {entry.place for entry in accounts.of(judgement)} == {place}
    assert not place or place in report.plain(report.content(judgement))


def test_one_report_makes_one_account(monkeypatch):
    made, make = [], accounts._made
    monkeypatch.setattr(accounts, "_made", lambda *given: made.append(given) or make(*given))
    text = pathlib.Path(__file__).parents[1] / "hlo" / "data" / "gpu_pipeline.hlo"
    judgement = hlo.judge(hlo.parse(text.read_text()))
    content = report.content(judgement)
    assert report.plain(content) and report.as_json(content)
    assert [level for _, level in made] == ["compiled"]
    assert all(e.judged is v for e, v in zip(content.account, judgement.verdicts, strict=True))


def stacked(x, w):
    """Statistics of each layer, averaged once behind the scan."""

    def body(h, layer):
        h = jnp.tanh(h @ layer)
        return h, (h * h).mean(0)

    h, stats = jax.lax.scan(body, x, w)
    return h, 2 * jax.lax.pmean(stats / 3, "data")


@pytest.mark.one_lane
def test_a_sum_of_what_a_loop_stacks_is_one_collective(cpu_mesh):
    """The proof knows the first trip's part apart from the others', which changes no verdict."""
    specs = dict(in_specs=(P("data"), P()), out_specs=(P("data"), P()))
    f = jax.jit(jax.shard_map(stacked, mesh=cpu_mesh, **specs))
    args = programs.structs(cpu_mesh, ((8, 16), P("data")), ((5, 16, 16), P()))
    assert str(testing.account(f, *args)) == "forward all-reduce(data): 1, 320 B"
    (verdict,) = testing.judge(f, *args).verdicts
    assert (verdict.verdict, verdict.range) == ("needed", None)
