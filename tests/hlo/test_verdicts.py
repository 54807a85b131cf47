"""Verdicts on what XLA compiled: the report's program, packed reductions, loops, axis_index."""

import pathlib

import pytest

from shardrules import errors, hlo, testing
from shardrules.registry import Registry
from shardrules.registry.builtin import no_communication
from shardrules.registry.table import PROVEN

from . import text as T

DATA = pathlib.Path(__file__).parent / "data"


def judge(name, **kwargs):
    kwargs.setdefault("mesh", T.MESH)
    return hlo.judge(hlo.parse((DATA / f"{name}.hlo").read_text()), **kwargs)


def rows(judgement):
    """What tests compare: verdict, kind, axes, bytes, range, needed axes."""
    return [
        (
            v.verdict,
            v.collective.kind,
            v.collective.axes,
            v.bytes,
            (v.range.start, v.range.stop) if v.range else None,
            v.needed_axes,
        )
        for v in judgement.verdicts
    ]


def test_each_range_of_a_packed_all_reduce_has_its_own_verdict():
    """8xH100 packs the reductions of u and v into one flat operand: what each range is tells."""
    judgement = judge("gpu_uvw")
    assert rows(judgement) == [
        ("redundant", "all-reduce", ("model",), 4096, (0, 1024), None),
        ("redundant", "all-reduce", ("model",), 4096, (1024, 2048), None),
        ("overwide", "all-reduce", ("data", "model"), 512, None, ("data",)),
    ]
    packed = judgement.verdicts[0].collective
    assert (packed.op_name, packed.phase, packed.operand_bytes) == (
        "jit(l)/transpose(jvp())/shard_map/psum",
        "backward",
        8192,
    )
    assert [o.varying for o in judgement.outputs] == [("data",), ("data",), ()]


@pytest.mark.parametrize("name", ["cpu_uvw", "tpu_uvw"])
def test_a_tuple_of_reductions_has_a_verdict_for_each(name):
    found = sorted(rows(judge(name)), key=str)
    assert (
        found
        == [("overwide", "all-reduce", ("data", "model"), 512, None, ("data",))]
        + [("redundant", "all-reduce", ("model",), 4096, None, None)] * 2
    )


def test_ranges_that_differ_get_different_verdicts():
    body = "\n".join(
        [
            T.parameter(T.DATA, "f32[4]", "u", 0),
            T.parameter(T.BOTH, "f32[2,3]", "w", 1),
            "%flat = f32[6] bitcast(%w)",
            "%all = f32[12] fusion(%u, %flat), kind=kLoop, calls=%pack",
            T.all_reduce("%all", shape="f32[12]"),
            "%first = f32[4] slice(%r), slice={[0:4]}",
            "%second = f32[8] slice(%r), slice={[4:12]}",
            "ROOT %out = (f32[4], f32[8]) tuple(%first, %second)",
        ]
    )
    pack = (
        "%pack (p: f32[4], q: f32[6]) -> f32[12] {\n  %p = f32[4] parameter(0)\n"
        "  %q = f32[6] parameter(1)\n  %z = f32[] constant(0)\n"
        "  %padded = f32[8] pad(%q, %z), padding=0_2\n"
        "  ROOT %c = f32[12] concatenate(%p, %padded), dimensions={0}\n}\n\n"
    )
    judgement = hlo.judge(T.module(body, pack), mesh=T.MESH)
    assert rows(judgement) == [
        ("redundant", "all-reduce", ("model",), 16, (0, 4), None),
        ("needed", "all-reduce", ("model",), 32, (4, 12), None),  # padding has none of its own
    ]
    assert judgement.verdicts[1].reason == (
        "not proven equal: parameter 1 (w) is sharded over data,model"
    )
    long = T.module(body, pack).replace("[4:12]", f"[4:{10**20}]")  # a damaged text
    assert rows(hlo.judge(long, mesh=T.MESH)) == rows(judgement)
    assert [o.varying for o in judgement.outputs] == [("data",), ("data",)]


def test_a_kernel_without_a_rule_is_named():
    judgement = judge("gpu_copy")
    (verdict,) = judgement.verdicts
    assert verdict.verdict == "unproven"
    assert {b.kernel for b in verdict.blockers} == {"copy_kernel"}
    assert verdict.reason.startswith(
        "on its operand's path: custom call '__gpu$xla.gpu.triton' (kernel 'copy_kernel') has no "
        "rule at jit(<lambda>)/transpose(jvp())/shard_map/pallas_call (program.py:26 (<lambda>))"
    )
    assert [b.kernel for b in judgement.opaque] == ["copy_kernel"] * 2


def test_a_tpu_kernel_without_a_name_is_reported_by_target_and_place():
    (verdict,) = judge("tpu_copy").verdicts
    assert verdict.verdict == "unproven"
    assert verdict.blockers[0].kernel is None
    assert str(verdict.blockers[0]) == (
        "custom call 'tpu_custom_call' (kernel without a name) has no rule at jit(<lambda>)/"
        "transpose(jvp())/shard_map/pallas_call (program.py:26 (<lambda>))"
    )


def test_the_registry_gives_the_kernel_a_rule():
    registry = Registry()
    registry.register("copy_kernel", no_communication)
    (verdict,) = judge("gpu_copy", registry=registry).verdicts
    assert verdict.verdict == "redundant"
    assert verdict.reason == "its operand is proven equal over model"
    first = verdict.rests_on[0]
    assert (first.source, first.status) == ("rule", "declared")
    assert [s.status for s in verdict.rests_on[1:]] == ["standing", "standing"]


def test_interpret_mode_leaves_no_opaque_call():
    (verdict,) = judge("cpu_copy").verdicts
    assert (verdict.verdict, verdict.bytes) == ("redundant", 4096)


def test_every_kind_of_collective_in_one_program():
    for name in ("cpu_misc", "gpu_misc", "tpu_misc"):
        judgement = judge(name)
        found = {(v.verdict, v.collective.kind, v.collective.axes) for v in judgement.verdicts}
        expected = {
            ("redundant", "all-reduce", ("model",)),
            ("overwide", "all-reduce", ("data", "model")),
            ("needed", "collective-permute", ("data",)),
            ("needed", "all-to-all", ("data",)),
            ("needed", "all-reduce", ("model",)),  # pmax of axis_index * x
            ("needed", "all-gather", ("data",)),
        }
        scatter = "all-reduce" if name == "tpu_misc" else "reduce-scatter"
        assert found == expected | {("needed", scatter, ("data",))}, name
        pmax = next(v for v in judgement.verdicts if v.collective.reduction == "maximum")
        assert pmax.reason == "not proven equal: partition-id differs over model"
        assert [o.varying for o in judgement.outputs] == [("data", "model"), (), ("data",)]


def test_loops_have_depth_and_trips_on_tpu_too():
    """TPU prints no known_trip_count: it follows from the condition, the start and the step."""
    text = (DATA / "tpu_scan.hlo").read_text()
    assert "known_trip_count" not in text
    inside = [v for v in judge("tpu_scan").verdicts if v.collective.loop_depth]
    assert [
        (v.verdict, v.collective.axes, v.collective.trip_count, v.collective.phase) for v in inside
    ] == [("redundant", ("model",), 6, "forward"), ("redundant", ("model",), 6, "backward")]


def test_groups_are_shown_where_no_mesh_is_known():
    judgement = judge("cpu_uvw", mesh=None)
    assert judgement.mesh is None
    verdict = judgement.overwide[0]
    assert verdict.collective.axes is None and verdict.needed_axes is None
    assert verdict.reason == (
        "its operand is proven equal in subgroups of 2 devices within each group of 8"
    )
    assert verdict.collective.over() == "over groups {{0,1,2,3,4,5,6,7}}"
    assert judgement.redundant[0].reason == (
        "its operand is proven equal over groups {{0,1},{2,3},{4,5},{6,7}}"
    )


def test_needed_names_the_sharding_where_no_mesh_is_known():
    (verdict,) = hlo.judge(
        T.module(T.parameter(T.DATA) + "\n" + T.all_reduce("%x", T.OVER_DATA))
    ).verdicts
    assert verdict.verdict == "needed"
    assert verdict.reason == f"not proven equal: parameter 0 (x) is sharded as {T.DATA}"


@pytest.mark.parametrize(
    "mesh, message",
    [
        (
            {"data": 4},
            "the mesh (data=4) has 4 devices, but module 'jit_l' was compiled for 8 (8 "
            "partitions x 1 replicas); pass the mesh that the program was compiled for.",
        ),
        (
            {"data": 0},
            "mesh axis 'data' has size 0; sizes are positive integers, mesh={'data': 4, "
            "'model': 2}.",
        ),
        (
            {"data": "4"},
            "mesh axis 'data' has size '4'; sizes are positive integers, mesh={'data': 4, "
            "'model': 2}.",
        ),
    ],
)
def test_a_mesh_that_does_not_fit(mesh, message):
    with pytest.raises(errors.HloError) as caught:
        judge("cpu_uvw", mesh=mesh)
    assert str(caught.value) == message


def test_parameter_shardings_fill_in_what_the_text_lacks():
    body = "%x = f32[8] parameter(0)\n" + T.all_reduce("%x")
    text = T.module(body)
    (verdict,) = hlo.judge(text, mesh=T.MESH).verdicts
    assert verdict.verdict == "unproven"
    assert verdict.reason == ("on its operand's path: parameter 0 has no sharding in the text")
    (verdict,) = hlo.judge(text, mesh=T.MESH, parameter_shardings=[T.DATA]).verdicts
    assert verdict.verdict == "redundant"
    with pytest.raises(errors.HloError) as caught:
        hlo.judge(text, parameter_shardings=[])
    assert str(caught.value) == (
        "parameter_shardings has 0 entries, but module 'test' has 1 parameters; give one for each "
        "(None if it isn't known), and none for pruned arguments."
    )


def kernel(tags, shape="f32[8]", config=""):
    return (
        f'%k = {shape} custom-call(%x), custom_call_target="tpu_custom_call", '
        f"frontend_attributes={{{tags}}}{config}"
    )


QUOTED = (
    'shardrules.kernel="copy",shardrules.effects="{}",shardrules.mesh="data=4,model=2",'
    'shardrules.status="audited"'
)
BARE = (
    "shardrules.kernel=copy,shardrules.effects={},shardrules.mesh=data=4,model=2,"
    "shardrules.status=audited"
)


def tagged(effect, groups=T.OVER_MODEL, sharding=T.DATA, tags=QUOTED, **kwargs):
    body = "\n".join(
        [T.parameter(sharding), kernel(tags.format(effect)), T.all_reduce("%k", groups)]
    )
    return hlo.judge(T.module(body), **kwargs).verdicts[0]


@pytest.mark.parametrize(
    "effect, groups, sharding, expected",
    [
        ("local", T.OVER_MODEL, T.DATA, "redundant"),
        ("local", T.OVER_DATA, T.DATA, "needed"),
        ("join(data)", T.OVER_DATA, T.DATA, "redundant"),
        ("join(model)", T.OVER_DATA, T.DATA, "needed"),
        ("join(data)", T.OVER_DATA, T.BOTH, "redundant"),
        ("join(data)", T.OVER_MODEL, T.BOTH, "needed"),
        ("exchange(model)", T.OVER_MODEL, T.DATA, "needed"),
        ("exchange(data)", T.OVER_MODEL, T.DATA, "redundant"),
        ("typed(data)", T.OVER_MODEL, T.BOTH, "redundant"),
        ("typed(data)", T.OVER_DATA, T.BOTH, "needed"),
        ("unknown", T.OVER_MODEL, T.DATA, "unproven"),
    ],
)
def test_a_tag_says_what_a_kernel_does(effect, groups, sharding, expected):
    verdict = tagged(effect, groups, sharding)
    assert verdict.verdict == expected
    assert verdict.collective.axes in (("data",), ("model",))  # the mesh is the tag's
    if expected == "redundant":
        assert str(verdict.rests_on[0]) == f"tag for 'copy': {effect}, {PROVEN} (audited)"


@pytest.mark.parametrize("tags", [QUOTED, BARE])
def test_tags_are_read_quoted_or_not(tags):
    assert tagged("local", tags=tags).verdict == "redundant"


@pytest.mark.parametrize(
    "tags, reason",
    [
        (QUOTED.format("local;local"), "has a tag for 2 outputs, not 1"),
        (QUOTED.format("loca"), "has a tag that can't be read, 'loca'"),
        (
            QUOTED.format("join(batch)"),
            "has a tag for axes that its mesh 'data=4,model=2' lacks, 'join(batch)'",
        ),
        ('shardrules.effects="join(data)"', "has a tag with mesh axes but no usable mesh, ''"),
        (
            'shardrules.effects="join(data)",shardrules.mesh="data=four"',
            "has a tag with mesh axes but no usable mesh, 'data=four'",
        ),
        (
            'shardrules.effects="join(data)",shardrules.mesh="data=4"',
            "communicates over data, and no known mesh with these axes has 8 partitions",
        ),
        (QUOTED.format("unknown"), "is tagged 'unknown': it has no rule"),
        ("kernel_metadata={}", "has no rule"),
    ],
)
def test_an_unusable_tag_is_unknown_and_says_why(tags, reason):
    body = "\n".join([T.parameter(T.DATA), kernel(tags), T.all_reduce("%k")])
    (verdict,) = hlo.judge(T.module(body), mesh=T.MESH).verdicts
    assert verdict.verdict == "unproven"
    assert reason in verdict.reason


def test_xlas_own_targets_are_known_and_others_are_not():
    def verdict(target):
        body = "\n".join(
            [
                T.parameter(T.DATA),
                f'%k = f32[8] custom-call(%x), custom_call_target="{target}"',
                T.all_reduce("%k"),
            ]
        )
        return hlo.judge(T.module(body), mesh=T.MESH, unpartitioned=True).verdicts[0]

    for target in ("TopK", "__cublas$gemm", "MoveToHost", "lapack_sgetrf_ffi"):
        assert verdict(target).verdict == "redundant", target
    for target in ("Sharding", "my_ffi", "xla_ffi_python_cpu_callback", "topk", "cublas"):
        assert verdict(target).verdict == "unproven", target
    assert "an uninitialised buffer" in verdict("AllocateBuffer").reason


def test_a_rule_for_a_shared_target_is_not_a_rule_for_its_kernels():
    registry = Registry()
    registry.register("tpu_custom_call", no_communication)
    body = "\n".join([T.parameter(T.DATA), kernel("kernel_metadata={}"), T.all_reduce("%k")])
    (verdict,) = hlo.judge(T.module(body), mesh=T.MESH, registry=registry).verdicts
    assert verdict.verdict == "unproven"


def test_kernel_names_in_every_notation():
    for config, op_name, name in [
        (', backend_config={debug = false, ir = "name = \\"no\\"", name = "yes"}', "", "yes"),
        (', backend_config={"custom_call_config":{"body":"TUzv","kernel_name":"yes"}}', "", "yes"),
        ("", "jit(f)/pallas_call[name=yes grid=()]", "yes"),
        ("", "", None),
    ]:
        metadata = f', metadata={{op_name="{op_name}"}}' if op_name else ""
        body = "\n".join(
            [T.parameter(T.DATA), kernel("a=b", config=metadata + config), T.all_reduce("%k")]
        )
        (verdict,) = hlo.judge(T.module(body), mesh=T.MESH).verdicts
        assert verdict.blockers[0].kernel == name, config


FUSED = """%fused (p: f32[8], i: s32[]) -> f32[8] {
  %p = f32[8] parameter(0)
  %i = s32[] parameter(1)
  %j = f32[] convert(%i)
  %js = f32[8] broadcast(%j), dimensions={}
  ROOT %sum.1 = f32[8] add(%p, %js)
}

"""


@pytest.mark.parametrize(
    "index, verdict", [("s32[] constant(3)", "redundant"), ("s32[] convert(%id)", "needed")]
)
def test_an_asynchronous_fusion_is_seen_through(index, verdict):
    """As XLA prints it for GPU with JAX 0.12."""
    body = "\n".join(
        [
            T.parameter(T.DATA),
            "%id = u32[] partition-id()",
            f"%at = {index}",
            "%fusion-start = ((f32[8], s32[]), f32[8], u32[]) fusion-start(%x, %at), kind=kLoop, "
            "calls=%fused",
            "%fusion-done = f32[8] fusion-done(%fusion-start)",
            T.all_reduce("%fusion-done"),
        ]
    )
    (found,) = hlo.judge(T.module(body, before=FUSED), mesh=T.MESH).verdicts
    assert (found.verdict, found.blockers) == (verdict, ())


def packed_program(mesh):
    """f(u, v, w) = (sin u, v*w) with the check off; gradients of all three."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    split = P("data", None)
    both = jax.shard_map(
        lambda u, v, w: (jnp.sin(u), v * w),
        mesh=mesh,
        in_specs=(split, split, P()),
        out_specs=(split, split),
        check_vma=False,
    )

    def loss(u, v, w):
        a, b = both(u, v, w)
        return (a**2).sum() + (b**2).sum()

    args = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((32, 128), split), ((32, 128), split), ((128,), P()))
    ]
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*args).compile()


def test_packed_reductions_as_the_compiler_makes_them(platform):
    name, mesh = platform
    judgement = testing.judge(packed_program(mesh))
    found = sorted(
        (v.verdict, v.collective.axes, v.bytes, v.needed_axes) for v in judgement.verdicts
    )
    assert found == [
        ("overwide", ("data", "model"), 512, ("data",)),
        ("redundant", ("model",), 4096, None),
        ("redundant", ("model",), 4096, None),
    ]
    flat = [v.range for v in judgement.redundant]
    assert all(flat) if name == "gpu" else not any(flat)
    assert {v.collective.phase for v in judgement.verdicts} == {"backward"}
