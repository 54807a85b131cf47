"""pallas_call under shard_map's check: types from rules, casts, gradients, retraces."""

import functools
import pathlib
import re
import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P
from raising import raises

import shardrules as sr
from shardrules import errors, report
from shardrules import hooks as hooks_module

scale_bodies = dict(
    kernel=sr.no_communication(programs.scale_kernel),
    bwd_kernel=sr.no_communication(programs.scale_bwd_kernel),
)


def run_alone(code):
    """Run code in a process of its own, with eight CPU devices."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        text=True,
        capture_output=True,
        cwd=pathlib.Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr


def out_type(op, mesh, specs, shapes, out_spec=P("data", None)):
    """The axis type of op's output as shard_map's trace sees it."""
    seen = []

    def spy(*args):
        out = op(*args)
        seen.append(jax.typeof(out).manual_axis_type)
        return out

    jax.eval_shape(
        jax.shard_map(spy, mesh=mesh, in_specs=specs, out_specs=out_spec),
        *[jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes],
    )
    return set(seen[-1].varying)


@pytest.mark.slow
def test_importing_declaring_and_uninstalling_leave_jax_as_it_was():
    """In a process of its own: a declared op that was called once keeps JAX patched, passively."""
    run_alone("""
        import shardrules as sr
        from shardrules import hooks
        sr.no_communication(lambda x_ref, o_ref: None)
        sr.register("nothing_touched", sr.no_communication)
        assert not hooks.touched() and not hooks.installed()

        missing = object()
        def value(owner, name):
            return (owner if isinstance(owner, dict) else vars(owner)).get(name, missing)

        handle = sr.install()
        touched = hooks.touched()
        assert len(touched) >= 8
        during = [value(*one) for one in touched]
        handle.uninstall()
        before = [value(*one) for one in touched]
        handle.uninstall()  # idempotent
        with sr.install():
            assert hooks.touched() == touched
            assert hooks.installed()
        assert not hooks.touched() and not hooks.installed()
        assert all(value(*one) is old for one, old in zip(touched, before))
        assert all(old is not new for old, new in zip(before, during))
    """)


def test_two_handles_hold_until_both_are_gone():
    first, second = sr.install(), sr.install(unknown="varying")
    first.uninstall()
    assert hooks_module.installed()
    second.uninstall()
    assert not hooks_module.installed()


def test_unknown_policy_is_refused():
    with pytest.raises(
        errors.ShardrulesError,
        match=re.escape(
            "install(unknown='maybe') is not known; it is one of 'error', 'warn', 'varying'"
        ),
    ):
        sr.install(unknown="maybe")


def test_output_varies_over_the_union_of_the_inputs(cpu_mesh, hooks):
    op = programs.scale_op("cpu", **scale_bodies)
    shapes = [programs.SHAPE, (1, programs.SHAPE[1])]
    assert out_type(op, cpu_mesh, (P("data"), P()), shapes) == {"data"}
    assert out_type(op, cpu_mesh, (P("data"), P(None, None)), shapes) == {"data"}
    assert out_type(op, cpu_mesh, (P(), P()), shapes, P()) == set()
    assert out_type(
        op, cpu_mesh, (P("data", "model"), P(None, "model")), shapes, P("data", "model")
    ) == {"data", "model"}


def test_unknown_kernel_is_an_error_that_says_what_to_type(cpu_mesh, declared_only):
    f, args = programs.copy_gradient("cpu", cpu_mesh)
    with pytest.raises(errors.UnknownKernelError) as caught:
        f.lower(*args)
    text = str(caught.value)
    assert text.startswith("no rule for pallas_call kernel 'copy_kernel' (defined at ")
    lines = [line.partition("  #")[0].partition(" at ")[0] for line in text.splitlines()]
    for line in (
        "    input 0: varying over {data}",
        "    @shardrules.no_communication",
        "    shardrules.register('programs:copy_kernel', shardrules.no_communication)",
    ):
        assert line in lines
    assert caught.value.kernel == "copy_kernel"


def test_a_kernel_that_its_own_jaxpr_proves_needs_no_declaration(cpu_mesh, hooks):
    f, args = programs.scale_gradient("cpu", cpu_mesh)
    x, w = programs.random_like(args)
    want = jax.grad(lambda x, w: ((x * w) ** 2).sum(), argnums=(0, 1))(
        jax.device_get(x), jax.device_get(w)
    )
    for got, one in zip(f(x, w), want):
        np.testing.assert_allclose(got, one, rtol=1e-5)


def test_a_kernel_that_reads_its_place_is_not_proven(cpu_mesh, hooks):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + jax.lax.axis_index("model")

    op = programs.copy_op("cpu", kernel=kernel)
    with pytest.raises(errors.UnknownKernelError) as caught:
        out_type(op, cpu_mesh, P("data"), [programs.SHAPE])
    (blocker,) = caught.value.audit.blockers
    assert blocker.primitive == "axis_index" and "test_pallas_check.py:" in blocker.source


def test_a_declaration_that_the_jaxpr_contradicts_is_refused(cpu_mesh, hooks):
    @sr.no_communication
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + jax.lax.axis_index("model")

    op = programs.copy_op("cpu", kernel=kernel)
    loss = programs.loss_of(op, cpu_mesh, P("data", None))
    with pytest.raises(errors.RuleError) as caught:
        jax.eval_shape(loss, jnp.ones(programs.SHAPE))
    assert caught.value.rule == sr.no_communication and caught.value.kernel == "kernel"
    why = "but its own jaxpr shows otherwise:.*axis_index.*Declare what it does: shardrules.all_ga"
    assert re.search(why, str(caught.value), re.DOTALL)
    sr.register("kernel", sr.per_device("model"))
    undeclared = programs.copy_op("cpu", kernel=kernel.__wrapped__)
    assert out_type(undeclared, cpu_mesh, P("data"), [programs.SHAPE], P("data", "model")) == {
        "data",
        "model",
    }


def test_policy_varying_and_warn(cpu_mesh):
    op = programs.copy_op("cpu")
    with sr.install(unknown="varying", prove=False):
        assert out_type(op, cpu_mesh, P("data"), [programs.SHAPE], P("data", "model")) == {
            "data",
            "model",
        }
    with (
        sr.install(unknown="warn", prove=False),
        pytest.warns(UserWarning, match="copy_kernel.*has no rule"),
    ):
        out_type(op, cpu_mesh, P("data"), [programs.SHAPE], P("data", "model"))


def test_rule_registered_after_a_trace_takes_effect(cpu_mesh, declared_only):
    f, args = programs.copy_gradient("cpu", cpu_mesh)
    with pytest.raises(errors.UnknownKernelError):
        f.lower(*args)
    sr.register("copy_kernel", sr.no_communication)
    f.lower(*args)  # the same jitted function

    # And a rule that replaces one, where the first trace went well and is cached.
    seen = []
    op = programs.copy_op("cpu")

    @jax.jit
    def g(x):
        def spy(x):
            out = op(x)
            seen.append(set(jax.typeof(out).manual_axis_type.varying))
            return out

        return jax.shard_map(spy, mesh=cpu_mesh, in_specs=P("data"), out_specs=P("data", "model"))(
            x
        )

    g.lower(*args)
    g.lower(*args)
    assert seen == [{"data"}]
    sr.register("copy_kernel", lambda ctx: [ctx.union.vary("model")], replace=True)
    g.lower(*args)
    assert seen == [{"data"}, {"data", "model"}]


@pytest.mark.parametrize(
    "rule, message",
    [
        (
            lambda ctx: [],
            "answered for 0 outputs (nothing), but the call has 1; answer with one "
            "shardrules.AxisType for each output",
        ),
        (
            lambda ctx: [ctx.union, ctx.union],
            "answered for 2 outputs ('varying over {data}', 'varying over {data}'), but the call has 1",
        ),
        (
            lambda ctx: [ctx.union.vary("modle")],
            "answered 'varying over {data, modle}' for output 0, but {modle} is not a manual mesh axis "
            "here; they are {data, model}",
        ),
        (
            lambda ctx: ["data"],
            "answered 'data' for output 0; each must be a shardrules.AxisType, such as ctx.union",
        ),
        (
            lambda ctx: 7,
            "answered 7; a rule answers with one shardrules.AxisType for each output, here 1",
        ),
    ],
)
def test_rule_with_a_wrong_answer(cpu_mesh, hooks, rule, message):
    sr.register("copy_kernel", rule)
    f, args = programs.copy_gradient("cpu", cpu_mesh)
    with pytest.raises(errors.RuleError) as caught:
        f.lower(*args)
    assert message in str(caught.value)
    assert "test_pallas_check.py" in str(caught.value)


def test_annotation_is_checked_against_the_rule(cpu_mesh, hooks):
    def annotated(*axes):
        def op(x):
            mat = jax.sharding.ManualAxisType(varying=frozenset(axes))
            return pl.pallas_call(
                sr.no_communication(programs.copy_kernel),
                interpret=True,
                out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=mat),
            )(x)

        return op

    shapes = [programs.SHAPE]
    assert out_type(annotated("data"), cpu_mesh, P("data"), shapes) == {"data"}
    # Wider than the rule's answer is sound.
    assert out_type(
        annotated("data", "model"), cpu_mesh, P("data"), shapes, P("data", "model")
    ) == {"data", "model"}
    with pytest.raises(errors.RuleError) as caught:
        out_type(annotated(), cpu_mesh, P("data"), shapes)
    assert caught.value.annotation == sr.AxisType() and caught.value.answer == sr.AxisType("data")
    said = "is annotated 'invariant', .* makes it 'varying over {data}'. Remove the annotation"
    assert re.search(said, str(caught.value), re.DOTALL)


def test_type_is_recomputed_when_batched_over_a_mesh_axis(cpu_mesh, hooks):
    """vmap(shard_map(f over model), spmd_axis_name='data'): plain JAX keeps the traced type."""
    kernel = sr.no_communication(programs.copy_kernel)
    mesh = cpu_mesh

    def local(x):  # x: (16,) of model
        out = pl.pallas_call(
            kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
        )(x)
        return out

    inner = jax.shard_map(local, mesh=mesh, in_specs=P("model"), out_specs=P("model"))
    batched = jax.vmap(inner, spmd_axis_name="data")
    jaxpr = jax.make_jaxpr(batched)(jnp.zeros((4, 32)))
    text = str(jaxpr)
    (call,) = [line for line in text.splitlines() if "pallas_call" in line]
    assert re.search(r"\{(V:)?\(?data,\s*model", call), call
    x = jax.random.normal(jax.random.key(0), (4, 32))
    np.testing.assert_array_equal(batched(x), x)


def test_replicated_weight_gradient_gets_exactly_the_psum_it_needs(cpu_mesh, hooks):
    f, args = programs.scale_gradient("cpu", cpu_mesh, **scale_bodies)
    x, w = programs.random_like(args)
    dx, dw = f(x, w)
    want_dx, want_dw = jax.grad(lambda x, w: ((x * w) ** 2).sum(), argnums=(0, 1))(
        jax.device_get(x), jax.device_get(w)
    )
    np.testing.assert_allclose(dx, want_dx, rtol=1e-6)
    np.testing.assert_allclose(dw, want_dw, rtol=1e-5)


@pytest.mark.parametrize("jit", [True, False])
def test_gradient_equals_the_single_device_one(cpu_mesh, hooks, jit):
    op = programs.copy_op("cpu", kernel=sr.no_communication(programs.copy_kernel))
    loss = programs.loss_of(op, cpu_mesh, P("data", None))
    grad = jax.grad(loss)
    x = jax.random.normal(jax.random.key(1), programs.SHAPE)
    np.testing.assert_array_equal((jax.jit(grad) if jit else grad)(x), 2 * x)


def test_declaration_is_found_through_partial_and_wraps(cpu_mesh, hooks):
    @sr.no_communication
    def kernel(x_ref, o_ref, *, factor):
        o_ref[...] = x_ref[...] * factor

    @functools.wraps(kernel)
    def wrapped(x_ref, o_ref):
        kernel(x_ref, o_ref, factor=3.0)

    for body in (functools.partial(kernel, factor=3.0), wrapped):
        op = programs.copy_op("cpu", kernel=body)
        x = jax.random.normal(jax.random.key(1), programs.SHAPE)
        run = jax.shard_map(op, mesh=cpu_mesh, in_specs=P("data"), out_specs=P("data"))
        np.testing.assert_allclose(run(x), 3 * x)


def test_declaration_binds_to_the_object_not_to_its_name(cpu_mesh, declared_only):
    def make():
        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...]

        return kernel

    programs_ok = programs.copy_op("cpu", kernel=sr.no_communication(make()))
    assert out_type(programs_ok, cpu_mesh, P("data"), [programs.SHAPE]) == {"data"}
    # A declared helper inside an undeclared kernel declares nothing about the kernel.
    helper = sr.no_communication(make())
    for body in (make(), lambda x_ref, o_ref: helper(x_ref, o_ref)):
        with pytest.raises(errors.UnknownKernelError):
            out_type(programs.copy_op("cpu", kernel=body), cpu_mesh, P("data"), [programs.SHAPE])


def test_op_declaration_works_without_install(cpu_mesh):
    """Forward, backward and a replicated weight, with no handle installed."""
    assert not hooks_module.installed()
    op = sr.no_communication(programs.scale_op("cpu"))
    loss = programs.loss_of(op, cpu_mesh, (P("data", None), P()))
    x = jax.random.normal(jax.random.key(0), programs.SHAPE)
    w = jax.random.normal(jax.random.key(1), (1, programs.SHAPE[1]))
    want = jax.grad(lambda x, w: ((x * w) ** 2).sum(), argnums=(0, 1))(x, w)
    for transform in (lambda f: f, jax.jit):
        got = transform(jax.grad(loss, argnums=(0, 1)))(x, w)
        for a, b in zip(got, want):
            np.testing.assert_allclose(a, b, rtol=1e-5)
    got = jax.grad(jax.jit(loss), argnums=(0, 1))(x, w)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    # Other kernels are left to JAX.
    f, args = programs.copy_gradient("cpu", cpu_mesh)
    with pytest.raises(ValueError, match="must not be `None`"):
        f.lower(*args)


def test_op_declared_before_its_vjp_is_defined(cpu_mesh):
    @sr.no_communication
    @jax.custom_vjp
    def op(x):
        return pl.pallas_call(
            programs.copy_kernel, interpret=True, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype)
        )(x)

    op.defvjp(lambda x: (op(x), ()), lambda _, g: (op(g),))
    loss = programs.loss_of(op, cpu_mesh, P("data", None))
    x = jax.random.normal(jax.random.key(1), programs.SHAPE)
    np.testing.assert_array_equal(jax.grad(loss)(x), 2 * x)


def test_bwd_that_communicates_is_not_summed_again(cpu_mesh, hooks):
    """A cotangent that bwd's collective may have summed: an error, not N times the gradient."""
    scale, bwd = (scale_bodies["kernel"], scale_bodies["bwd_kernel"])
    plain = programs.scale_op("cpu", kernel=scale, bwd_kernel=bwd)

    @jax.custom_vjp
    def op(x, w):
        return plain(x, w)

    def backward(res, g):
        x, w = res
        dw = (x * g).sum(0, keepdims=True)
        # Sums over data, and comes back varying over data.
        dw = jax.lax.all_gather(dw, "data").sum(0)
        return plain(g, w), dw

    op.defvjp(lambda x, w: (op(x, w), (x, w)), backward)
    loss = programs.loss_of(op, cpu_mesh, (P("data", None), P()))
    args = programs.structs(
        cpu_mesh, (programs.SHAPE, P("data", None)), ((1, programs.SHAPE[1]), P())
    )
    with raises(errors.CotangentError, problem="undecided", axes={"data"}):
        jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*args)


def test_collective_beside_a_cotangent_does_not_stop_its_psum(cpu_mesh, hooks):
    """Only what a cotangent depends on can have summed it."""
    op_ = programs.scale_op("cpu", **scale_bodies)

    @jax.custom_vjp
    def op(x, w):
        return op_(x, w)

    def backward(res, g):
        x, w = res
        total = jax.lax.psum(g, "data")  # used for dx alone
        return op_(g, w) + 0 * total, (x * g).sum(0, keepdims=True)

    op.defvjp(lambda x, w: (op(x, w), (x, w)), backward)
    loss = programs.loss_of(op, cpu_mesh, (P("data", None), P()))
    x = jax.random.normal(jax.random.key(0), programs.SHAPE)
    w = jax.random.normal(jax.random.key(1), (1, programs.SHAPE[1]))
    got = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w)
    want = jax.grad(lambda x, w: ((x * w) ** 2).sum(), argnums=(0, 1))(x, w)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_cotangent_less_varying_than_its_primal_is_cast(cpu_mesh, hooks):
    kernel = sr.no_communication(programs.copy_kernel)

    @jax.custom_vjp
    def op(x):
        return programs.copy_op("cpu", kernel=kernel)(x)

    op.defvjp(lambda x: (op(x), ()), lambda _, g: (jnp.zeros(g.shape, g.dtype),))
    loss = programs.loss_of(op, cpu_mesh, P("data", None))
    x = jnp.ones(programs.SHAPE)
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(x), jnp.zeros(programs.SHAPE))


@pytest.mark.tpu
def test_lowered_call_is_tagged_and_interpreted_code_is_not(tpu_mesh, cpu_mesh, hooks):
    kernel = sr.no_communication(programs.copy_kernel)
    for check in (True, False):
        f, args = programs.copy_gradient("tpu", tpu_mesh, kernel=kernel, check_vma=check)
        text = f.lower(*args).as_text()
        calls = [line for line in text.splitlines() if "@tpu_custom_call(" in line]
        assert len(calls) == 2
        for tag in (
            'shardrules.kernel = "copy_kernel"',
            'shardrules.effects = "local"',
            'shardrules.status = "audited"',
            'shardrules.mesh = "data=4,model=2"',
        ):
            assert all(tag in line for line in calls), tag
    f, args = programs.copy_gradient("cpu", cpu_mesh, kernel=kernel)
    assert "shardrules." not in f.lower(*args).as_text()


@pytest.mark.tpu
def test_a_tag_and_the_report_tell_of_an_annotation_that_the_kernel_contradicts(tpu_mesh, hooks):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    def op(x, *casts):
        out = jax.ShapeDtypeStruct(
            x.shape, x.dtype, manual_axis_type=jax.sharding.ManualAxisType(varying=frozenset())
        )
        y = pl.pallas_call(kernel, out_shape=out, name="twice_annotated")(x)
        for axes in casts:
            y = jax.lax.pcast(y, axes, to="varying")
        return y

    def compiled(*casts):
        spec = P(("data", "model"), None)
        f = jax.shard_map(lambda x: op(x, *casts), mesh=tpu_mesh, in_specs=spec, out_specs=spec)
        sharding = jax.sharding.NamedSharding(tpu_mesh, spec)
        return jax.jit(f).lower(jax.ShapeDtypeStruct((64, 128), "float32", sharding=sharding))

    with pytest.warns(errors.AnnotationWarning, match="called at .*test_pallas_check"):
        lowered = compiled("model")
    assert lowered.as_text().count('shardrules.widened = "0:data"') >= 1
    text = report.plain(report.content(sr.hlo.judge(lowered.compile().as_text())))
    (row,) = [line for line in text.splitlines() if line.startswith("twice_annotated | ")]
    assert [cell.strip() for cell in row.split("|")][1:3] == ["0", "data"]
    assert "annotations less varying than the kernel:" in text
    assert "shardrules.widened" not in compiled(("data", "model")).as_text()


def test_without_the_check_the_jaxpr_is_the_same(cpu_mesh):
    def jaxpr():
        f, args = programs.copy_gradient("cpu", cpu_mesh, check_vma=False)
        return re.sub(r"0x[0-9a-f]+", "0x", str(jax.make_jaxpr(f)(*args)))

    plain = jaxpr()
    sr.register("copy_kernel", sr.no_communication)
    with sr.install():
        assert jaxpr() == plain


def test_threads_without_the_hooks_are_left_alone(cpu_mesh):
    """An op's own hooks act in its thread only."""
    entered, leave = threading.Event(), threading.Event()
    results = {}

    @sr.no_communication
    def slow(x):
        entered.set()
        assert leave.wait(60)
        return x

    def other():
        entered.wait(60)
        f, args = programs.copy_gradient("cpu", cpu_mesh)
        try:
            f.lower(*args)
        except Exception as error:
            results["other"] = error
        finally:
            leave.set()

    thread = threading.Thread(target=other)
    thread.start()
    slow(jnp.ones(3))
    thread.join()
    assert type(results["other"]) is ValueError and "must not be `None`" in str(results["other"])


def _copy(x_ref, o_ref):
    o_ref[...] = x_ref[...]


SUMS = [
    sr.all_reduce("data"),
    sr.all_gather_invariant("data", "model"),
    sr.linear(sr.all_reduce("model")),
    sr.outputs(sr.all_reduce("data")),
]


@pytest.mark.parametrize("rule", SUMS, ids=repr)
@pytest.mark.parametrize("check", [True, False])
def test_a_sum_by_a_kernel_that_reads_no_other_device_is_refused(rule, check, cpu_mesh, hooks):
    """As what it is declared its output is invariant; executed it differs between devices."""
    op = programs.copy_op("cpu", kernel=rule(_copy))
    specs = dict(in_specs=P(("data", "model")), out_specs=P(), check_vma=check)
    f = jax.shard_map(op, mesh=cpu_mesh, **specs)
    with pytest.raises(errors.RuleError) as caught:
        jax.eval_shape(f, jnp.ones((16, 4)))
    assert caught.value.rule == rule and caught.value.audit.proven
    assert caught.value.axes == frozenset(rule.named_axes)


def test_a_bwd_of_such_a_kernel_is_refused_for_its_rule(cpu_mesh, hooks):
    """A CotangentError would send to bwd, where nothing is wrong."""
    op = programs.copy_op("cpu", kernel=_copy)
    loss = programs.loss_of(op, cpu_mesh, P("data", None))
    with sr.rules({"_copy": sr.all_reduce("data")}), pytest.raises(errors.RuleError):
        jax.eval_shape(jax.grad(loss), jnp.ones(programs.SHAPE))


def test_a_sum_stands_where_nothing_contradicts_it(cpu_mesh, hooks):
    """Over one device there is nothing to sum; a kernel that can't be read may sum."""
    one = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(4, 1), ("data", "model"))
    op = programs.copy_op("cpu", kernel=sr.all_reduce("model")(_copy))
    assert out_type(op, one, P("data"), [programs.SHAPE]) == {"data"}

    @sr.all_reduce("data")
    def reads_its_place(x_ref, o_ref):
        o_ref[...] = x_ref[...] + jax.lax.axis_index("data")

    op = programs.copy_op("cpu", kernel=reads_its_place)
    assert out_type(op, cpu_mesh, P("data"), [programs.SHAPE], P()) == set()
    # Equal operands have equal results; an op's rule is that of all of its kernels together.
    op = programs.copy_op("cpu", kernel=sr.all_gather_invariant("model")(_copy))
    out = out_type(op, cpu_mesh, P("data"), [programs.SHAPE])
    assert out == {"data"}
    local = programs.copy_op("cpu", kernel=_copy)
    summing = programs.copy_op("cpu", kernel=reads_its_place.__wrapped__)
    op = sr.all_reduce("data")(lambda x: summing(local(x)))
    assert out_type(op, cpu_mesh, P("data"), [programs.SHAPE], P()) == set()
