"""Programs that fool a careless proof: what is not equal must not be called redundant."""

import pytest

from shardrules import errors, hlo

from . import text as T

MIRRORED = "{devices=[4,2]0,7,1,6,2,5,3,4 last_tile_dim_replicate}"  # ABCD DCBA
HALVES = "{{0,1,2,3},{4,5,6,7}}"
ACROSS = "{{0,4},{1,5},{2,6},{3,7}}"


def verdicts(
    *lines, before="", header="is_scheduled=true, num_partitions=8", mesh=T.MESH, **kwargs
):
    return hlo.judge(T.module("\n".join(lines), before, header), mesh=mesh, **kwargs).verdicts


def last(*lines, **kwargs):
    return verdicts(*lines, **kwargs)[-1].verdict


@pytest.mark.parametrize(
    "shape, apply, expected",
    [
        ("f32[8]", "add", "needed"),  # ABCD and DCBA add up to different floats
        ("f32[8]", "max", "needed"),  # max(-0.0, 0.0) and max(0.0, -0.0)
        ("s32[8]", "addi", "redundant"),
    ],
)
def test_the_order_within_groups_counts_for_floats(shape, apply, expected):
    found = last(
        T.parameter(MIRRORED, shape),
        T.all_reduce("%x", HALVES, shape, "first", apply),
        T.all_reduce("%first", ACROSS, shape, "second", apply),
        mesh=None,
    )
    assert found == expected


def test_the_same_order_in_each_group_is_the_same_sum():
    sharding = "{devices=[4,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}"
    assert (
        last(
            T.parameter(sharding),
            T.all_reduce("%x", HALVES, name="first"),
            T.all_reduce("%first", ACROSS, name="second"),
            mesh=None,
        )
        == "redundant"
    )
    # the second group lists its members from the other end
    assert (
        last(
            T.parameter(sharding),
            T.all_reduce("%x", "{{0,1,2,3},{7,6,5,4}}", name="first"),
            T.all_reduce("%first", ACROSS, name="second"),
            mesh=None,
        )
        == "needed"
    )


@pytest.mark.parametrize(
    "sharding, expected",
    [
        ("{replicated}", "redundant"),
        ("{devices=[4,1,2]<=[8] last_tile_dim_replicate}", "redundant"),
        ("{devices=[4,2]<=[8] last_tile_dims={replicated}}", "redundant"),
        ("{devices=[4,2]<=[8] last_tile_dims={unreduced}}", "needed"),
        ("{devices=[1,4,2]<=[8] last_tile_dims={unreduced, replicated}}", "needed"),
        ("{devices=[1,2,4]<=[4,2]T(1,0) last_tile_dims={unreduced, replicated}}", "needed"),
        ("{devices=[4,2]<=[8] last_tile_dims={manual}}", "needed"),
        ("{maximal device=0}", "needed"),
        ("{manual}", "needed"),
        ("{unreduced}", "needed"),
        ("{unknown}", "needed"),
        ("{maximal_mesh[device_id=2]}", "needed"),
        ("{replicated shard_as 3}", "redundant"),
        ('{replicated metadata={op_name="{devices=[8]<=[8]}"}}', "redundant"),
        ("{devices=[4,2]0,1,2,3,4,5,6,7 last_tile_dim_replicate}", "redundant"),
        ("{devices=[4,2]0,2,1,3,4,5,6,7 last_tile_dim_replicate}", "needed"),
        ("{mesh['a'=4,'b'=2], [{'a'}, {}]}", "redundant"),
        ("{mesh['a'=4,'b'=2], [{}, {'b'}]}", "needed"),
        ("{mesh['a'=4,'b'=2], [{'a'}], replicated={'b'}}", "redundant"),
        ("{mesh['a'=4,'b'=2], [{'a'}], unreduced={'b'}}", "needed"),
        ("{mesh['a'=4,'b'=2], [{'a'}], manual={'b'}}", "needed"),
        ("{mesh['a'=4,'b'=2], [{'a', ?}]}", "needed"),
        ("{mesh['a'=8], [{'a':(1)4}]}", "redundant"),
        ("{mesh['a'=8], [{'a':(2)4}]}", "needed"),
        ("{mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)), [{'b'}]}", "redundant"),
        ("{mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)), [{'a'}]}", "needed"),
        ("{mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)), [{'b'}]}", "redundant"),
        ("{mesh['a'=4,'b'=2], replicated}", "redundant"),
        ("{devices=[4,4]<=[16]}", "unproven"),  # for another number of devices
        ("{sharded in some new way}", "unproven"),
        ("{devices=[4]<=[4]}", "unproven"),
        ("{mesh['a'=4], [{'a'}]}", "unproven"),
    ],
)
def test_shardings(sharding, expected):
    assert last(T.parameter(sharding), T.all_reduce("%x")) == expected


@pytest.mark.parametrize(
    "groups, expected",
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", "redundant"),
        ("{{0,2},{1,3},{4,6},{5,7}}", "needed"),
        ("[4,2]<=[8]", "redundant"),
        ("[2,4]<=[4,2]T(1,0)", "needed"),
        ("[4,2]<=[2,4]T(1,0)", "needed"),
        ("mesh['data'=4,'model'=2] {'model'}", "redundant"),
        ("mesh['data'=4,'model'=2], {'data'}", "needed"),
        ("mesh['a'=8] {'a':(4)2}", "redundant"),
        ("mesh['a'=8] {'a':(1)2}", "needed"),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", "redundant"),
        ("mesh['a'=2,'b'=4,device_ids=([4,2]T(1,0))] {'a'}", "redundant"),
        ("mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'a'}", "redundant"),
        ("mesh['a'=2,'b'=4] {'a'}", "needed"),
        ("{}", "overwide"),
        ("{{0,1,2,3,4,5,6,7}}", "overwide"),
    ],
)
def test_replica_groups(groups, expected):
    assert last(T.parameter(T.DATA), T.all_reduce("%x", groups)) == expected


@pytest.mark.parametrize(
    "groups, message",
    [
        ("{{0,1},{2,9}}", "all-reduce 'r': id 9 is beyond the 8 that the module has"),
        ("{{0,1},{1,2}}", "all-reduce 'r': id 1 occurs twice"),
        (
            "[4,2]<=[9]",
            "all-reduce 'r': '[4,2]<=[9]': the two lists of sizes have different products",
        ),
        ("[4,2]<=[4,2]T(0,0)", "T(...) does not order 2 dimensions"),
        ("{0,1}", "expected {{0,1},{2,3}}, [2,2]<=[4] or mesh[...] {...}, got '{0,1}'"),
        ("mesh['a'=4] {'a'}", "a mesh of 4 devices in a module for 8"),
        ("mesh['a'=8] {'b'}", "axis 'b' is not in the mesh of a"),
        ("mesh['a'=8] {'a':(3)2}", "sub-axis (3)2 does not divide axis 'a' of size 8"),
        ("mesh['a'=8], device_ids=(0,0,1,2,3,4,5,6) {'a'}", "are not 0 to 7, each once"),
    ],
)
def test_groups_that_do_not_fit_are_errors_with_their_place(groups, message):
    with pytest.raises(errors.HloSyntaxError) as caught:
        last(T.parameter(T.DATA), T.all_reduce("%x", groups))
    assert message in str(caught.value)
    assert caught.value.line > 10 and caught.value.text_line.strip().startswith("ROOT %r")


def test_what_ids_mean_depends_on_channel_and_flag():
    """2 replicas of 4 partitions; a value sharded over the partitions, the same in replicas."""
    header = "num_partitions=4, replica_count=2"
    x = (
        "%x = f32[8] parameter(0), parameter_replication={true}, "
        "sharding={devices=[2,2]<=[4] last_tile_dim_replicate}"
    )

    def found(attributes, parameter=x):
        return last(
            parameter,
            f"%r = f32[8] all-reduce(%x), {attributes}, to_apply=%add",
            header=header,
            mesh=None,
        )

    assert found("replica_groups={{0,1}}") == "redundant"  # replicas, for each partition
    assert found("replica_groups={}") == "redundant"
    # replicas with all their partitions
    assert found("channel_id=1, replica_groups={{0},{1}}") == "overwide"
    # flattened: 0..3 are the partitions of replica 0
    flat = "channel_id=1, use_global_device_ids=true, "
    assert found(flat + "replica_groups={{0,1},{2,3},{4,5},{6,7}}") == "redundant"
    assert found(flat + "replica_groups={{0,4},{1,5},{2,6},{3,7}}") == "redundant"
    assert found(flat + "replica_groups={{0,2},{1,3},{4,6},{5,7}}") == "needed"
    # without parameter_replication each replica has its own data
    own = x.replace("true", "false")
    assert found(flat + "replica_groups={{0,4},{1,5},{2,6},{3,7}}", own) == "needed"
    assert found("replica_groups={{0,1}}", own) == "needed"
    assert found(flat + "replica_groups={{0,1},{2,3},{4,5},{6,7}}", own) == "redundant"
    with pytest.raises(errors.HloSyntaxError, match="use_global_device_ids without a channel_id"):
        found("use_global_device_ids=true, replica_groups={{0,1}}")


def test_a_permutes_ids_are_partitions_only_with_a_channel():
    header = "num_partitions=2, replica_count=2"
    x = "%x = f32[8] parameter(0), sharding={devices=[2]<=[2]}, parameter_replication={true}"
    permute = "%r = f32[8] collective-permute(%x), source_target_pairs={{0,1},{1,0}}"
    assert last(x, permute, header=header, mesh=None) == "redundant"  # between replicas
    assert last(x, permute + ", channel_id=1", header=header, mesh=None) == "needed"


def permuted(pairs, groups=T.OVER_MODEL):
    return last(
        T.parameter(T.DATA),
        f"%p = f32[8] collective-permute(%x), channel_id=1, source_target_pairs={pairs}",
        T.all_reduce("%p", groups),
    )


def test_what_a_permute_leaves_out_holds_zeros():
    assert permuted("{{0,2},{1,3},{2,4},{3,5}}") == "redundant"
    assert permuted("{{0,2},{2,4}}") == "needed"  # 3 and 5 hold zeros beside the values of 2, 4
    assert permuted("{{0,0}}", "{{2,3},{4,5},{6,7}}") == "redundant"  # zeros all
    assert permuted("{{0,1},{1,0}}") == "redundant"


def test_permutes_themselves():
    def found(pairs, sharding=T.DATA):
        return last(
            T.parameter(sharding),
            f"%p = f32[8] collective-permute(%x), channel_id=1, source_target_pairs={pairs}",
        )

    assert found("{{0,1},{1,0},{2,3}}") == "redundant"
    assert found("{{0,1},{1,2}}") == "needed"
    assert found("{{0,7},{7,0}}", "{replicated}") == "redundant"
    assert found("{{0,7},{7,0}}", "{manual}") == "needed"


def test_a_gather_of_distinct_shards_is_needed():
    def found(kind, sharding, shape="f32[16]", extra=", dimensions={0}"):
        return last(
            T.parameter(sharding),
            f"%r = {shape} {kind}(%x), channel_id=1, replica_groups={T.OVER_MODEL}{extra}",
        )

    for kind in ("all-gather", "reduce-scatter", "all-to-all", "collective-broadcast"):
        extra = {
            "all-to-all": ", dimensions={0}",
            "collective-broadcast": "",
            "reduce-scatter": ", use_global_device_ids=true, dimensions={0}, to_apply=%add",
        }.get(kind, ", use_global_device_ids=true, dimensions={0}")
        assert found(kind, T.BOTH, extra=extra) == "needed", kind
        assert found(kind, T.MODEL, extra=extra) == "needed", kind
        assert found(kind, T.DATA, extra=extra) == "redundant", kind


def test_positions_make_scattered_pieces_differ():
    for kind in ("reduce-scatter", "all-to-all"):
        extra = ", use_global_device_ids=true, to_apply=%add" if kind == "reduce-scatter" else ""
        found = verdicts(
            T.parameter(T.DATA),
            f"%s = f32[4] {kind}(%x), channel_id=1, replica_groups="
            f"{T.OVER_MODEL}, dimensions={{0}}{extra}",
            T.all_reduce("%s", shape="f32[4]"),
        )
        assert [v.verdict for v in found] == ["redundant", "needed"]
        assert found[1].reason == (
            f"not proven equal: {kind} 's' gives each position its own piece over model"
        )


def test_ragged_all_to_all_is_never_called_redundant():
    operands = "\n".join(T.parameter("{replicated}", "s32[8]", f"x{i}", i) for i in range(6))
    found = verdicts(
        *operands.split("\n"),
        "%r = s32[8] ragged-all-to-all(%x0, %x1, %x2, %x3, "
        f"%x4, %x5), channel_id=1, replica_groups={T.ALL}",
    )
    assert {v.verdict for v in found} == {"unproven"}
    assert found[0].reason == "the proof does not cover equal operands of a ragged-all-to-all"


COND = """%yes (p: f32[8]) -> f32[8] {
  %p = f32[8] parameter(0)
  ROOT %r = f32[8] all-reduce(%p), channel_id=1, replica_groups=GROUPS, use_global_device_ids=true, to_apply=%add
}

%no (q: f32[8]) -> f32[8] {
  ROOT %q = f32[8] parameter(0)
}

"""


def branching(groups, predicate_sharding, sharding="{replicated}"):
    lines = [
        T.parameter(sharding, number=0),
        T.parameter(predicate_sharding, "s32[]", "which", 1),
        "%c = f32[8] conditional(%which, %x, %x), branch_computations={%yes, %no}",
        T.all_reduce("%c", T.OVER_MODEL, name="after"),
    ]
    return verdicts(*lines, before=COND.replace("GROUPS", groups))


def test_a_predicate_that_differs_between_groups_is_fine():
    inside, after = branching(T.OVER_MODEL, T.DATA)
    assert (inside.verdict, inside.divergent) == ("redundant", False)
    assert after.verdict == "redundant"  # over model all take one branch


def test_a_predicate_that_differs_within_a_group_is_a_finding():
    inside, after = branching(T.OVER_DATA, T.DATA)
    assert (inside.verdict, inside.divergent) == ("unproven", True)
    assert inside.reason == (
        "it runs under a predicate that differs within a group, so it may "
        "hang: parameter 1 (which) is sharded over data"
    )
    inside, after = branching(T.OVER_MODEL, T.MODEL)
    assert inside.divergent
    assert after.verdict != "redundant"


def test_branches_of_unequal_values_differ_where_the_predicate_does():
    lines = [
        T.parameter("{replicated}", number=0),
        T.parameter(T.MODEL, "s32[]", "which", 1),
        "%c = f32[8] conditional(%which, %x, %x), branch_computations={%left, %right}",
        T.all_reduce("%c"),
    ]
    sides = "".join(
        f"%{n} (p: f32[8]) -> f32[8] {{\n  %p = f32[8] parameter(0)\n  ROOT %o = "
        f"f32[8] {op}(%p)\n}}\n\n"
        for n, op in (("left", "sine"), ("right", "tanh"))
    )
    (verdict,) = verdicts(*lines, before=sides)
    assert verdict.verdict == "needed"
    assert verdict.reason == "not proven equal: parameter 1 (which) is sharded over model"


def test_select_of_equal_constants_is_not_equal():
    found = last(
        "%id = u32[] partition-id()",
        "%one = u32[] constant(1)",
        "%bit = u32[] and(%id, %one)",
        "%flag = pred[] convert(%bit)",
        "%a = f32[] constant(1)",
        "%b = f32[] constant(2)",
        "%s = f32[] select(%flag, %a, %b)",
        T.all_reduce("%s", shape="f32[]"),
    )
    assert found == "needed"


def test_slices_at_clamped_indices():
    """Indices 0 to 7 into 8 elements, 5 at a time: 3 to 7 are all clamped to 3."""
    lines = [
        T.parameter("{replicated}"),
        "%id = u32[] partition-id()",
        "%s = f32[5] dynamic-slice(%x, %id), dynamic_slice_sizes={5}",
    ]
    assert last(*lines, T.all_reduce("%s", "{{3,4},{5,6}}", "f32[5]")) == "redundant"
    assert last(*lines, T.all_reduce("%s", "{{2,3},{5,6}}", "f32[5]")) == "needed"


PASSING = """%left (p: (f32[8], f32[8])) -> (f32[8], f32[8]) {
  %p = (f32[8], f32[8]) parameter(0)
  %a = f32[8] get-tuple-element(%p), index=0
  %b = f32[8] get-tuple-element(%p), index=1
  ROOT %t = (f32[8], f32[8]) tuple(%a, %b)
}

%right (q: (f32[8], f32[8])) -> (f32[8], f32[8]) {
  %q = (f32[8], f32[8]) parameter(0)
  %c = f32[8] get-tuple-element(%q), index=1
  %d = f32[8] get-tuple-element(%q), index=0
  ROOT %u = (f32[8], f32[8]) tuple(%c, %d)
}

"""


def test_what_all_branches_pass_on_does_not_depend_on_the_predicate():
    lines = [
        T.parameter("{replicated}", name="x", number=0),
        T.parameter("{replicated}", name="y", number=1),
        T.parameter(T.MODEL, "s32[]", "which", 2),
        "%one = (f32[8], f32[8]) tuple(%x, %y)",
        "%two = (f32[8], f32[8]) tuple(%SECOND, %x)",
        "%c = (f32[8], f32[8]) conditional(%which, %one, %two), "
        "branch_computations={%left, %right}",
        "%g = f32[8] get-tuple-element(%c), index=0",
        T.all_reduce("%g"),
    ]
    # left gives x, y; right gives x, SECOND
    assert last(*[line.replace("SECOND", "y") for line in lines], before=PASSING) == "redundant"
    swapped = [
        line.replace("SECOND", "x").replace("%c), index=0", "%c), index=1") for line in lines
    ]  # left gives y there, right x
    assert last(*swapped, before=PASSING) == "needed"


LOOP = """%body (c: (f32[8], f32[8], s32[])) -> (f32[8], f32[8], s32[]) {
  %c = (f32[8], f32[8], s32[]) parameter(0)
  %u = f32[8] get-tuple-element(%c), index=0
  %v = f32[8] get-tuple-element(%c), index=1
  %n = s32[] get-tuple-element(%c), index=2
  %one = s32[] constant(1)
  %m = s32[] subtract(%n, %one)
  %summed = f32[8] all-reduce(%u), channel_id=1, replica_groups=GROUPS, use_global_device_ids=true, to_apply=%add
  ROOT %next = (f32[8], f32[8], s32[]) tuple(%v, %summed, %m)
}

%test (d: (f32[8], f32[8], s32[])) -> pred[] {
  %d = (f32[8], f32[8], s32[]) parameter(0)
  %k = s32[] get-tuple-element(%d), index=2
  %zero = s32[] constant(0)
  ROOT %go = pred[] compare(%k, %zero), direction=GT
}

"""


def looping(groups, second="{replicated}", count="{replicated}"):
    lines = [
        T.parameter("{replicated}", name="a", number=0),
        T.parameter(second, name="b", number=1),
        T.parameter(count, "s32[]", "n", 2),
        "%t = (f32[8], f32[8], s32[]) tuple(%a, %b, %n)",
        "%w = (f32[8], f32[8], s32[]) while(%t), condition=%test, body=%body",
        "%o = f32[8] get-tuple-element(%w), index=0",
        T.all_reduce("%o", T.OVER_MODEL, name="after"),
    ]
    return verdicts(*lines, before=LOOP.replace("GROUPS", groups))


def test_a_loop_is_judged_by_all_its_iterations():
    """%u is equal everywhere in the first iteration; in the second it holds %b."""
    inside, after = looping(T.OVER_MODEL)
    assert (inside.verdict, after.verdict) == ("redundant", "redundant")
    inside, after = looping(T.OVER_MODEL, second=T.MODEL)
    assert inside.verdict == "needed"
    assert inside.collective.trip_count is None and inside.collective.loop_depth == 1
    inside, after = looping(T.OVER_DATA, second=T.MODEL)
    assert inside.verdict == "redundant"
    assert after.verdict == "needed"


def test_a_trip_count_that_differs():
    inside, after = looping(T.OVER_MODEL, count=T.DATA)
    assert (inside.verdict, after.verdict) == ("redundant", "redundant")
    inside, after = looping(T.OVER_DATA, count=T.DATA)
    assert inside.divergent
    inside, after = looping("{{0,1},{2,3},{4,5},{6,7}}", count=T.MODEL)
    assert inside.divergent and after.verdict != "redundant"


@pytest.mark.parametrize(
    "op, expected",
    [
        ("f32[8] rng(%z, %z), distribution=rng_uniform", "needed"),
        ("u64[2] rng-get-and-update-state(), delta=1", "needed"),
        ("f32[8] infeed(%z)", "needed"),
        ("f32[8] recv(%z), channel_id=2", "unproven"),
        ("f32[8] frobnicate(%z)", "unproven"),
        ("f32[8] frobnicate-start(%z)", "unproven"),
        ("u32[8] rng-bit-generator(%k), algorithm=rng_default", "redundant"),
        ("f32[8] map(%z), to_apply=%noisy", "unproven"),
        ("f32[8] call(%z), to_apply=%noisy", "needed"),
        ("u32[] partition-id()", "needed"),
        ("u32[] replica-id()", "redundant"),
    ],
)
def test_what_differs_by_itself(op, expected):
    noisy = (
        "%noisy (p: f32[]) -> f32[] {\n  %p = f32[] parameter(0)\n"
        "  ROOT %o = f32[] rng(%p, %p), distribution=rng_uniform\n}\n\n"
    )
    assert (
        last(
            "%z = f32[] constant(0)",
            "%k = u64[2] constant({1, 2})",
            f"%v = {op}",
            T.all_reduce("%v"),
            before=noisy,
        )
        == expected
    )


@pytest.mark.parametrize(
    "lines, expected",
    [
        (["%d = u32[] divide(%id, %two)"], "redundant"),
        (["%d = u32[] remainder(%id, %two)"], "needed"),
        (["%d = u32[] shift-right-logical(%id, %one)"], "redundant"),
        (["%d = u32[] multiply(%id, %zero)"], "redundant"),
        (["%s = s32[] convert(%id)", "%d = f32[] convert(%s)"], "needed"),
        (
            ["%q = u32[] divide(%id, %two)", "%s = s32[] convert(%q)", "%d = f32[] convert(%s)"],
            "redundant",
        ),
        (
            ["%e = pred[] compare(%id, %two), direction=LT", "%d = u32[] select(%e, %id, %two)"],
            "needed",
        ),
        (
            ["%e = pred[] compare(%id, %two), direction=LT", "%d = u32[] select(%e, %one, %two)"],
            "redundant",
        ),
        (
            [
                "%t = u32[8] constant({0, 0, 1, 1, 2, 2, 3, 3})",
                "%sl = u32[1] dynamic-slice(%t, %id), dynamic_slice_sizes={1}",
                "%d = u32[] reshape(%sl)",
            ],
            "redundant",
        ),
        (
            [
                "%t = u32[8] constant({0, 1, 0, 1, 0, 1, 0, 1})",
                "%sl = u32[1] dynamic-slice(%t, %id), dynamic_slice_sizes={1}",
                "%d = u32[] reshape(%sl)",
            ],
            "needed",
        ),
        (["%big = u32[] constant(40)", "%d = u32[] shift-left(%id, %big)"], "needed"),
        (["%d = u32[] divide(%id, %zero)"], "needed"),
    ],
)
def test_partition_id_arithmetic_is_exact(lines, expected):
    assert (
        last(
            "%id = u32[] partition-id()",
            "%zero = u32[] constant(0)",
            "%one = u32[] constant(1)",
            "%two = u32[] constant(2)",
            *lines,
            T.all_reduce("%d", shape="u32[]"),
        )
        == expected
    )


def test_opaque_calls_do_not_hide_what_is_known_to_vary():
    """dw = f(x, opaque(x)): over data x varies whatever the kernel does; over model it doesn't."""
    body = [
        T.parameter(T.DATA),
        '%k = f32[8] custom-call(%x), custom_call_target="mine"',
        "%m = f32[8] multiply(%k, %x)",
    ]
    assert last(*body, T.all_reduce("%m", T.OVER_DATA)) == "needed"
    assert last(*body, T.all_reduce("%k", T.OVER_DATA)) == "unproven"
    assert last(*body, T.all_reduce("%m", T.OVER_MODEL)) == "unproven"
    assert last(*body, T.all_reduce("%m", T.ALL)) == "unproven"


def test_a_collective_that_nothing_calls_is_not_passed_over():
    (verdict,) = verdicts(T.parameter("{replicated}"), before=COND.replace("GROUPS", T.OVER_MODEL))
    assert verdict.verdict == "unproven"
    assert verdict.reason == (
        "on its operand's path: the proof does not reach computation 'yes', which holds it, from ENTRY"
    )


def test_collectives_in_fusions_and_asynchronous_calls_are_judged():
    before = (
        "%inside (p: f32[8]) -> f32[8] {\n  %p = f32[8] parameter(0)\n  ROOT "
        + T.all_reduce("%p")
        + "\n}\n\n"
    )
    for lines in (
        ["%f = f32[8] fusion(%x), kind=kCustom, calls=%inside"],
        [
            "%s = ((f32[8]), f32[8], s32[]) async-start(%x), calls=%inside",
            "%u = ((f32[8]), f32[8], s32[]) async-update(%s), calls=%inside",
            "%f = f32[8] async-done(%u), calls=%inside",
        ],
        [
            T.all_reduce("%x").replace("all-reduce", "all-reduce-start"),
            "%f = f32[8] all-reduce-done(%r)",
        ],
        [
            "%s = (f32[8], f32[8]) all-gather-start(%x), channel_id=1, replica_groups="
            f"{T.OVER_MODEL}, use_global_device_ids=true, dimensions={{0}}",
            "%f = f32[8] all-gather-done(%s)",
        ],
        [
            "%s = ((f32[8]), f32[4]) reduce-scatter-start(%x), channel_id=1, "
            f"replica_groups={T.OVER_MODEL}, use_global_device_ids=true, to_apply=%add",
            "%f = f32[4] reduce-scatter-done(%s)",
        ],
    ):
        here = before if any("%inside" in line for line in lines) else ""
        scattered = "reduce-scatter" in lines[0]
        found = verdicts(T.parameter(T.BOTH), *lines, T.all_reduce("%f", name="again"), before=here)
        assert [v.verdict for v in found] == ["needed", "needed" if scattered else "redundant"]
