"""pl.kernel, plgpu.kernel, core_map and mpmd_map under shard_map's check."""

import functools
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
from jax.sharding import PartitionSpec as P
from kernels import build
from kernels.cases import BY_NAME
from raising import raises, wrong_out_specs

import shardrules as sr
from shardrules import errors, pallas, registry, testing

HERE = pathlib.Path(__file__).parents[2]  # tests/
SHAPE = (8, 4)  # split over data: blocks of (2, 4)
CORES = pltpu.create_tensorcore_mesh("core", num_cores=2)


def copy(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def multiply(x_ref, w_ref, o_ref):
    o_ref[...] = x_ref[...] * w_ref[...]


def like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def pl_kernel(body):
    return lambda x, *rest: pl.kernel(body, out_type=like(x), mesh=CORES)(x, *rest)


def plgpu_kernel(body):
    return lambda x, *rest: plgpu.kernel(body, out_type=like(x))(x, *rest)


def core_map(body):
    def op(x, *rest):
        def run(refs):
            pl.core_map(CORES)(functools.partial(body, *refs))

        return pl.run_state(run)((x, *rest, jnp.zeros(x.shape, x.dtype)))[-1]

    return op


KINDS = pytest.mark.parametrize(
    "kind", [pl_kernel, plgpu_kernel, core_map], ids=lambda k: k.__name__
)
# JAX 0.12 makes an mpmd_map of a core_map.
PRIMITIVE = {
    pl_kernel: "mpmd_map",
    plgpu_kernel: "mpmd_map",
    core_map: next(
        name
        for name in ("mpmd_map", "core_map")
        if f"{name}[" in str(jax.make_jaxpr(core_map(copy))(np.zeros(SHAPE, np.float32)))
    ),
}


def varying(x):
    return set(jax.typeof(x).manual_axis_type.varying)


def out_type(op, mesh, *specs, shape=SHAPE):
    """The axes over which op's output varies, as shard_map's trace sees it."""
    seen = []

    def spy(*args):
        seen.append(varying(op(*args)))
        return ()

    args = [jax.ShapeDtypeStruct(shape, jnp.float32)] * len(specs)
    jax.eval_shape(jax.shard_map(spy, mesh=mesh, in_specs=specs, out_specs=()), *args)
    return seen[-1]


# --- the rule, and how it is found --------------------------------------------------------------


@KINDS
def test_output_varies_over_the_union_of_the_inputs(cpu_mesh, hooks, kind):
    op = kind(sr.no_communication(copy))
    assert out_type(op, cpu_mesh, P("data")) == {"data"}
    assert out_type(op, cpu_mesh, P()) == set()
    op = kind(sr.no_communication(multiply))
    assert out_type(lambda x, w: op(x, w[:2]), cpu_mesh, P("data"), P()) == {"data"}
    assert out_type(lambda x, w: op(w[:2], x), cpu_mesh, P("data"), P()) == {"data"}
    assert out_type(lambda x, w: op(x, w[:2]), cpu_mesh, P("data"), P("model")) == {"data", "model"}


@KINDS
def test_a_varying_output_is_refused_as_replicated(cpu_mesh, hooks, kind):
    op = kind(sr.no_communication(copy))
    f = jax.shard_map(op, mesh=cpu_mesh, in_specs=P("data"), out_specs=P())
    with wrong_out_specs():
        jax.eval_shape(f, np.zeros(SHAPE, np.float32))


# As an mpmd_map, JAX 0.12 refuses its varying refs.
ALONE = [
    kind
    for kind in (plgpu_kernel, core_map)
    if kind is plgpu_kernel or PRIMITIVE[kind] == "core_map"
]


@pytest.mark.parametrize("kind", ALONE, ids=lambda k: k.__name__)
def test_jax_alone_types_it_invariant(cpu_mesh, kind):
    """What the hooks are for; pl.kernel without an annotation JAX refuses."""
    assert out_type(kind(copy), cpu_mesh, P("data")) == set()


@KINDS
def test_unknown_kernel_is_an_error_that_says_what_to_type(cpu_mesh, declared_only, kind):
    with pytest.raises(errors.UnknownKernelError) as caught:
        out_type(kind(copy), cpu_mesh, P("data"))
    line = copy.__code__.co_firstlineno
    text = str(caught.value)
    assert text.startswith(
        f"no rule for {PRIMITIVE[kind]} kernel 'copy' (defined at {__file__}:"
        f"{line}): shard_map(check_vma=True) over manual axes {{data, model}}"
    )
    assert f"shardrules.register('{__name__}:copy', shardrules.no_communication)" in text
    assert (caught.value.kernel, caught.value.inputs[0]) == ("copy", sr.AxisType("data"))
    with sr.install(unknown="varying", prove=False):
        assert out_type(kind(copy), cpu_mesh, P("data")) == {"data", "model"}


@KINDS
def test_the_rule_is_found_by_object_partial_name_scope_and_op(cpu_mesh, declared_only, kind):
    def configured(x_ref, o_ref, *, scale):
        o_ref[...] = x_ref[...] * scale

    declared = sr.no_communication(configured)
    assert out_type(kind(functools.partial(declared, scale=2)), cpu_mesh, P("data")) == {"data"}

    @functools.wraps(declared)
    def wrapped(x_ref, o_ref):
        declared(x_ref, o_ref, scale=2)

    assert out_type(kind(wrapped), cpu_mesh, P("data")) == {"data"}
    with sr.rules({"copy": sr.per_device("model")}):
        assert out_type(kind(copy), cpu_mesh, P("data")) == {"data", "model"}
    with pytest.raises(errors.UnknownKernelError):
        out_type(kind(copy), cpu_mesh, P("data"))
    assert out_type(sr.no_communication(kind(copy)), cpu_mesh, P("data")) == {"data"}
    sr.register(f"{__name__}:copy", sr.no_communication)
    assert out_type(kind(copy), cpu_mesh, P("data")) == {"data"}


@KINDS
def test_a_declaration_binds_to_its_function_and_to_no_other(cpu_mesh, declared_only, kind):
    helper = sr.no_communication(copy)
    assert out_type(kind(helper), cpu_mesh, P("data")) == {"data"}
    for body in (copy, lambda x_ref, o_ref: helper(x_ref, o_ref)):
        with pytest.raises(errors.UnknownKernelError):
            out_type(kind(body), cpu_mesh, P("data"))


@KINDS
def test_rules_that_communicate_add_and_drop_axes(cpu_mesh, declared_only, kind):
    assert out_type(kind(sr.per_device("model")(copy)), cpu_mesh, P("data")) == {"data", "model"}
    assert out_type(kind(sr.all_gather("model")(copy)), cpu_mesh, P()) == {"model"}
    assert out_type(
        kind(sr.all_reduce("data")(lambda *refs: copy(*refs))),
        cpu_mesh,
        P(("data", "model")),
        shape=(16, 4),
    ) == {"model"}


def test_a_kernel_that_was_made_before_install_and_outside_of_shard_map(cpu_mesh):
    declared = sr.no_communication(lambda *refs: copy(*refs))

    @pl.kernel(mesh=CORES, out_type=jax.ShapeDtypeStruct((2, 4), jnp.float32))
    def op(*refs):
        copy(*refs)

    made = pl.kernel(declared, mesh=CORES, out_type=jax.ShapeDtypeStruct((2, 4), jnp.float32))
    assert out_type(made, cpu_mesh, P("data")) == set()  # JAX alone: wrong
    with sr.install(prove=False):
        assert out_type(made, cpu_mesh, P("data")) == {"data"}
        with raises(errors.UnknownKernelError, kernel="op"):
            out_type(op, cpu_mesh, P("data"))


@pytest.mark.parametrize(
    "kernel", [plgpu.kernel, functools.partial(pl.kernel, mesh=CORES)], ids=["plgpu", "pl"]
)
def test_annotations_are_checked_against_the_rule(cpu_mesh, hooks, kernel):
    def annotated(*axes):
        mat = jax.sharding.ManualAxisType(varying=frozenset(axes))
        return lambda x: kernel(
            sr.no_communication(copy),
            out_type=jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=mat),
        )(x)

    assert out_type(annotated("data"), cpu_mesh, P("data")) == {"data"}
    assert out_type(annotated("data", "model"), cpu_mesh, P("data")) == {"data", "model"}
    with pytest.raises(
        errors.RuleError,
        match=re.escape("output 0 of mpmd_map kernel 'copy' (defined at ")
        + ".*"
        + re.escape(") is annotated 'invariant', but the rule no_communication (declared at "),
    ):
        out_type(annotated(), cpu_mesh, P("data"))


@pytest.mark.tpu
@pytest.mark.parametrize(
    "rules, text",
    [
        ((sr.no_communication, sr.no_communication), None),
        ((sr.no_communication, None), "no rule for mpmd_map kernel 'scalar'"),
        (
            (sr.no_communication, sr.all_gather("data")),
            "the functions of kernel 'scalar' are declared with rules that differ:\n"
            "  no_communication at ",
        ),
    ],
)
def test_all_functions_of_an_mpmd_kernel_are_one_call(hooks, tpu_mesh, rules, text):
    def scalar(x_ref, o_ref):
        del x_ref, o_ref

    def vector(x_ref, o_ref):
        del x_ref, o_ref

    bodies = [body if rule is None else rule(body) for body, rule in zip((scalar, vector), rules)]

    def op(x):
        # What a SparseCore has is asked of the device: so inside, where shard_map names it.
        meshes = [
            plsc.ScalarSubcoreMesh(axis_name="core", num_cores=2),
            plsc.VectorSubcoreMesh(
                core_axis_name="core", subcore_axis_name="subcore", num_cores=2, num_subcores=16
            ),
        ]
        return pl.kernel(bodies, mesh=meshes, out_type=like(x))(x)

    mesh = build.mesh_for(BY_NAME["pl_kernel"])
    if text is None:
        assert out_type(op, mesh, P("data")) == {"data"}
        return
    raised = pytest.raises((errors.RegistrationError, errors.UnknownKernelError))
    # Not proven: what does nothing depends on nothing.
    with sr.install(prove=False), raised as caught:
        out_type(op, mesh, P("data"))
    assert str(caught.value).startswith(text)


# --- types at every bind ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [pl_kernel, plgpu_kernel], ids=lambda k: k.__name__)
def test_types_are_those_of_the_operands_when_batched(cpu_mesh, hooks, kind):
    """plgpu.kernel makes another kernel of its own, with another name, under vmap."""
    with sr.rules({"copy": sr.no_communication}):
        assert out_type(lambda x: jax.vmap(kind(copy))(x[None]), cpu_mesh, P("data")) == {"data"}
        f = jax.shard_map(kind(copy), mesh=cpu_mesh, in_specs=P("model"), out_specs=P("model"))
        jaxpr = jax.make_jaxpr(jax.vmap(f, spmd_axis_name="data"))(np.zeros((4, *SHAPE)))
    (shard_map,) = jaxpr.eqns
    calls = [
        e
        for e in shard_map.params["jaxpr"].eqns
        if e.primitive.name in ("mpmd_map", "custom_vmap_call")
    ]
    assert [varying_of(e.outvars[0]) for e in calls] == [{"data", "model"}]


def varying_of(variable):
    return set(variable.aval.manual_axis_type.varying)


@pytest.mark.parametrize("kind", [pl_kernel, plgpu_kernel], ids=lambda k: k.__name__)
def test_types_are_those_of_the_operands_when_a_jaxpr_is_replayed(cpu_mesh, hooks, kind):
    op = kind(sr.no_communication(copy))

    def replayed(x):
        closed = jax.make_jaxpr(op)(jnp.zeros(x.shape))  # invariant
        return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, x)[0]

    assert out_type(replayed, cpu_mesh, P("data")) == {"data"}


def test_the_check_stays_off_where_the_user_switched_it_off(cpu_mesh, hooks):
    """plgpu.kernel switches it off itself; that is undone only where it was on."""

    def op(x):
        return plgpu_kernel(copy)(x)  # no rule

    f = jax.shard_map(op, mesh=cpu_mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    jax.eval_shape(f, np.zeros(SHAPE, np.float32))


@KINDS
def test_without_the_check_the_jaxpr_is_the_same(cpu_mesh, kind):
    def jaxpr():
        f = jax.shard_map(
            kind(copy), mesh=cpu_mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
        )
        return re.sub(r"0x[0-9a-f]+", "0x", str(jax.make_jaxpr(f)(np.zeros(SHAPE))))

    plain = jaxpr()
    with sr.install():
        assert jaxpr() == plain


# --- refs ---------------------------------------------------------------------------------------


def into_ref(kernel):
    def op(start):
        def run(x):
            ref = jax.new_ref(start(jnp.zeros(x.shape)))
            kernel(x, ref)
            return ref[...]

        return run

    return op


@into_ref
def kernel_into_ref(x, ref):
    pl.kernel(sr.no_communication(copy), mesh=CORES)(x, ref)


@into_ref
def core_map_into_ref(x, ref):
    x_ref = jax.new_ref(x)
    pl.core_map(CORES)(functools.partial(sr.no_communication(copy), x_ref, ref))


@pytest.mark.parametrize(
    "op, name",
    [(kernel_into_ref, "mpmd_map"), (core_map_into_ref, PRIMITIVE[core_map])],
    ids=["kernel", "core_map"],
)
def test_a_kernel_that_writes_a_ref_holds_it_to_its_rule(cpu_mesh, hooks, op, name):
    assert out_type(op(lambda zeros: sr.vary(zeros, "data")), cpu_mesh, P("data")) == {"data"}
    assert out_type(op(lambda zeros: zeros), cpu_mesh, P()) == set()
    with pytest.raises(errors.RefError) as caught:
        out_type(op(lambda zeros: zeros), cpu_mesh, P("data"))
    text = str(caught.value)
    assert text.startswith(f"what {name} kernel 'copy' (defined at {__file__}:")
    assert text.endswith(
        " stores, by the rule no_communication, is varying over {data}, but the ref that it is "
        "written to (shape (2, 4)) is invariant, and reads from it would be typed so too. A "
        "ref keeps the type of its first value: make it from one that varies over {data} too, "
        "jax.new_ref(shardrules.vary(x, 'data'))."
    )


def through_refs(kernel):
    """A product whose bwd computes its second cotangent in new refs, by a kernel without results."""

    def copied(value):
        refs = jax.new_ref(value), jax.new_ref(jnp.zeros_like(value))
        pl.core_map(CORES)(functools.partial(kernel, *refs))
        return refs[1][...]

    f = jax.custom_vjp(lambda x, w: x * w)
    f.defvjp(lambda x, w: (x * w, (x, w)), lambda saved, g: (g * saved[1], copied(g * saved[0])))
    return f


def psums_in_its_gradient(f, mesh):
    mapped = jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    x, w = np.ones(SHAPE, np.float32), np.ones((2, 4), np.float32)
    gradient = jax.grad(lambda x, w: mapped(x, w).sum(), argnums=(0, 1))
    return str(jax.make_jaxpr(gradient)(x, w)).count("psum_invariant[")


def test_a_bwd_in_refs_is_one_devices_share_by_its_kernels_rule(cpu_mesh, declared_only):
    with sr.rules({"copy": sr.no_communication}):
        assert psums_in_its_gradient(through_refs(copy), cpu_mesh) == 1
    for rule in (sr.all_gather, sr.per_device, sr.all_reduce):
        body = rule("data")(lambda x, o: copy(x, o))
        with raises(errors.CotangentError, problem="undecided"):
            psums_in_its_gradient(through_refs(body), cpu_mesh)
    its_own = sr.rules({"copy": lambda ctx: [ctx.union] * ctx.output_count})
    with its_own, pytest.raises(errors.CotangentError, match="does not say what it communicates"):
        psums_in_its_gradient(through_refs(copy), cpu_mesh)


def test_refs_that_a_kernel_only_reads_keep_their_type(cpu_mesh, hooks):
    def op(x, w):
        def run(refs):
            pl.kernel(sr.no_communication(multiply), mesh=CORES)(*refs)

        return pl.run_state(run)((x, w[:2], jnp.zeros(x.shape)))

    assert out_type(lambda *args: op(*args)[2], cpu_mesh, P("data"), P()) == {"data"}
    assert out_type(lambda *args: op(*args)[1], cpu_mesh, P("data"), P()) == set()


# --- real kernels -------------------------------------------------------------------------------


def rule_of(case):
    """The rule line of a case: its own, or what the audit would say."""
    rule = case.communicates
    return sr.no_communication if rule is None else getattr(sr, rule.rule)(*rule.axes)


def compiled(case, check_vma=True):
    f, args = build.build(case, check_vma=check_vma, wrap_local=rule_of(case))
    return f.lower(*args).compile()


def bytes_by_axes(judgement):
    total = {}
    for verdict in judgement.verdicts:
        if verdict.collective.kind == "all-reduce":
            axes = verdict.collective.axes
            total[axes] = total.get(axes, 0) + verdict.bytes
    return total


def assert_only_what_is_needed(case):
    program = compiled(case)
    kernels = [
        line
        for line in program.as_text().splitlines()
        if re.search('custom_call_target="(mosaic_gpu|tpu_custom_call)', line)
    ]
    assert kernels and all("shardrules.effects=" in line for line in kernels)
    judgement = testing.judge(program)
    assert bytes_by_axes(judgement) == dict(case.expected.needed)
    assert {v.verdict for v in judgement.verdicts} <= {"needed"}


MESH_CASES = [
    c
    for c in BY_NAME.values()
    if c.target in ("v5p:2x2x2", "b200")
    or (c.target == "h100" and "mgpu" in c.make.__module__ + c.name or "hopper" in c.name)
]
REFUSED = [c for c in MESH_CASES if c.name.endswith("wrongspec")]
COMPILED = [c for c in MESH_CASES if c not in REFUSED]


def by_platform(cases):
    return [pytest.param(c, marks=getattr(pytest.mark, c.platform), id=c.name) for c in cases]


@pytest.fixture
def compilers(request, case):
    """Skip where the compiler for the case's platform is missing."""
    return request.getfixturevalue(f"{case.platform}_mesh")


def test_every_mesh_kernel_of_the_table_is_here():
    assert len(COMPILED) + len(REFUSED) == 24


@pytest.mark.sampled
@pytest.mark.parametrize("case", by_platform(c for c in COMPILED if c.target != "b200"))
def test_only_needed_collectives_are_left(hooks, compilers, case):
    assert_only_what_is_needed(case)


@pytest.mark.gpu
def test_only_needed_collectives_are_left_on_blackwell(gpu_mesh):
    """In a process of its own: one process compiles for one GPU."""
    run_alone("""
        import shardrules as sr, hooks.types.test_mesh_kernels as here
        sr.install()
        cases = [c for c in here.COMPILED if c.target == "b200"]
        assert len(cases) == 2
        for case in cases:
            here.assert_only_what_is_needed(case)
            f, args = here.build.build(case, check_vma=True)
            f.trace(*args)  # needs no line: it is proven, or its rule is shipped
    """)


@pytest.mark.parametrize("case", by_platform(REFUSED))
def test_a_wrong_spec_is_refused(hooks, compilers, case):
    f, args = build.build(case, check_vma=True, wrap_local=rule_of(case))
    with wrong_out_specs():
        f.lower(*args)


@pytest.mark.parametrize(
    "case", by_platform(BY_NAME[n] for n in ("core_map_run_state_zeros", "hopper_matmul_user_vjp"))
)
def test_without_the_check_the_verifier_sees_what_is_defensive(hooks, compilers, case):
    judgement = testing.judge(compiled(case, check_vma=False))
    assert bytes_by_axes(judgement) == dict(case.expected.unchecked)
    assert {(v.verdict, v.collective.axes) for v in judgement.verdicts} <= {
        ("redundant", ("model",)),
        ("overwide", ("data", "model")),
    }


TAGS = [
    ("pl_kernel", "_double_share", "local"),
    ("core_map_run_state_zeros", "_lambda_", "local"),
    ("hopper_matmul", "kernel", "local"),
    # The last result is a semaphore.
    ("all_reduce_mgpu", "kernel", "join(x);unknown"),
    ("collective_matmul_mgpu", "kernel_body", "exchange(x);exchange(x);unknown"),
]


@pytest.mark.parametrize(
    "case, kernel, effects",
    [
        pytest.param(
            BY_NAME[name], *rest, marks=getattr(pytest.mark, BY_NAME[name].platform), id=name
        )
        for name, *rest in TAGS
    ],
)
def test_compiled_calls_are_tagged(hooks, compilers, case, kernel, effects):
    text = compiled(case).as_text()
    calls = [
        line
        for line in text.splitlines()
        if "shardrules.kernel=" in line and "custom-call(" in line
    ]
    assert calls
    # What doesn't communicate is confirmed by its jaxpr; what does is believed.
    status = "audited" if effects.startswith("local") else "declared"
    mesh = ",".join(f"{a}={n}" for a, n in case.mesh)
    for tag in (
        f'shardrules.kernel="{kernel}"',
        f'shardrules.effects="{effects}"',
        f'shardrules.status="{status}"',
        f'shardrules.mesh="{mesh}"',
    ):
        assert all(tag in line for line in calls), (tag, calls)


@pytest.mark.gpu
def test_the_verifier_believes_the_tag_of_a_kernel_that_drops_an_axis(hooks, gpu_mesh):
    """A psum of what an all-reduce kernel returned is redundant; of what a gather returned, not."""
    for name, rule, verdict in (
        ("all_reduce_mgpu", sr.all_reduce("x"), "redundant"),
        ("all_reduce_mgpu", None, "unproven"),
        ("reduce_scatter_mgpu", sr.reduce_scatter("x"), "needed"),
    ):
        case = BY_NAME[name]
        f, args = build.build(
            case,
            check_vma=False,
            wrap_local=lambda f, rule=rule: (
                lambda x: jax.lax.psum((rule or (lambda f: f))(f)(x), "x")
            ),
        )
        judgement = testing.judge(f.lower(*args).compile())
        assert [v.verdict for v in judgement.verdicts] == [verdict], name


@pytest.mark.gpu
def test_what_a_prover_finds_is_asked_for_once_it_is_needed(gpu_mesh, hooks, monkeypatch):
    asked = []

    def prover(primitive, params, operand_count):
        asked.append((primitive, operand_count))
        return pallas.Audit()

    monkeypatch.setattr(registry.default, "audit", prover)
    case = BY_NAME["hopper_matmul"]
    for check in (True, False):
        asked.clear()
        f, args = build.build(case, check_vma=check)
        text = f.lower(*args).as_text()
        # Not for the core_map that Mosaic GPU binds inside of the kernel.
        assert set(asked) == {("mpmd_map", 2)}
        assert text.count('shardrules.status = "audited"') >= 1


def run_alone(code, **env):
    """Run code in a process of its own, with eight CPU devices."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        text=True,
        cwd=HERE,
        capture_output=True,
        env={**os.environ, **env},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


@pytest.mark.slow
def test_interpreted_gradients_equal_those_of_one_device():
    """On TPU's interpreter: x split over data, and a row w that is replicated."""
    run_alone(
        """
        import jax, numpy as np, hooks.types.test_mesh_kernels as here
        import shardrules as sr
        from kernels import build
        from kernels.cases import BY_NAME

        sr.install()
        for name in ("pl_kernel", "core_map_run_state_zeros"):
            case = BY_NAME[name]
            build.assert_equals_one_device(case, check_vma=True, wrap_local=here.rule_of(case))
        here.check_scale(build.mesh_for(BY_NAME["pl_kernel"], jax.devices()))
    """,
        PJRT_NPROC="32",
    )


def check_scale(mesh):
    """Compare gradients of x * w, all three by kernels, with those of one device."""
    one = pltpu.create_tensorcore_mesh("core", num_cores=1)

    def scale(x_ref, w_ref, o_ref):
        def run(x, w):
            pltpu.sync_copy(x_ref, x)
            pltpu.sync_copy(w_ref, w)
            x[...] = x[...] * w[...]
            pltpu.sync_copy(x, o_ref)

        pl.run_scoped(
            run, pltpu.VMEM(x_ref.shape, jnp.float32), pltpu.VMEM(w_ref.shape, jnp.float32)
        )

    def rows(x_ref, g_ref, o_ref):
        def run(x, g, out):
            pltpu.sync_copy(x_ref, x)
            pltpu.sync_copy(g_ref, g)
            out[...] = jnp.sum(x[...] * g[...], axis=0, keepdims=True)
            pltpu.sync_copy(out, o_ref)

        block = pltpu.VMEM(x_ref.shape, jnp.float32)
        pl.run_scoped(run, block, block, pltpu.VMEM(o_ref.shape, jnp.float32))

    def call(body, out, *args):
        return pl.kernel(
            sr.no_communication(body),
            out_type=like(out),
            mesh=one,
            interpret=pltpu.InterpretParams(),
        )(*args)

    @jax.custom_vjp
    def op(x, w):
        return call(scale, x, x, w)

    op.defvjp(
        lambda x, w: (op(x, w), (x, w)),
        lambda res, g: (call(scale, g, g, res[1]), call(rows, res[1], res[0], g)),
    )
    f = jax.shard_map(op, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    x = jax.random.normal(jax.random.key(0), (32, 128))
    w = jax.random.normal(jax.random.key(1), (1, 128))
    got = jax.jit(jax.grad(lambda x, w: (f(x, w) ** 2).sum(), argnums=(0, 1)))(x, w)
    want = jax.grad(lambda x, w: ((x * w) ** 2).sum(), argnums=(0, 1))(x, w)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    np.testing.assert_allclose(f(x, w), x * w)  # and not under jit
