"""Opaque calls of others: jax-triton's kernels, cuDNN attention, custom_partitioning."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import raising
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules import errors, testing


def structs(mesh, dtype, *shapes_and_specs):
    return [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in shapes_and_specs
    ]


def gradient(f, argnums=(0, 1)):
    return jax.jit(jax.grad(lambda *a: (f(*a).astype(jnp.float32) ** 2).sum() / 2, argnums))


def collectives(judgement):
    """Each collective's verdict, kind, axes, phase and bytes, sorted."""
    return sorted(
        (v.verdict, v.collective.kind, v.collective.axes, v.collective.phase, v.bytes)
        for v in judgement.verdicts
    )


# --- jax-triton ------------------------------------------------------------------------------

needs_triton = pytest.mark.triton


@pytest.fixture(scope="module")
def scale():
    """The custom_vjp that multiplies every row of x by w in a Triton kernel."""
    from kernels.jax_triton_scale import scale

    return scale


def sharded(op, mesh, check_vma=True, out_specs=P("data")):
    return jax.shard_map(
        op, mesh=mesh, in_specs=(P("data"), P()), out_specs=out_specs, check_vma=check_vma
    )


XW = (((64, 128), P("data")), ((128,), P()))


@needs_triton
def test_plain_jax_accepts_a_triton_kernels_output_as_replicated(scale, gpu_mesh):
    jax.eval_shape(sharded(scale, gpu_mesh, out_specs=P()), *structs(gpu_mesh, "float32", *XW))


@needs_triton
def test_a_triton_kernel_without_rule_is_refused(scale, gpu_mesh, hooks):
    with pytest.raises(errors.UnknownKernelError) as caught:
        jax.eval_shape(sharded(scale, gpu_mesh), *structs(gpu_mesh, "float32", *XW))
    assert str(caught.value) == (
        "no rule for triton_kernel_call kernel 'multiply_kernel': shard_map(check_vma=True) over "
        "manual axes {data, model} can't tell over which of them its outputs vary\n"
        "    input 0: varying over {data}\n    input 1: invariant\n"
        "If the kernel reads no other device and no device id, write one of these lines:\n"
        "    shardrules.register('kernels.jax_triton_scale:multiply_kernel', "
        "shardrules.no_communication)\n"
        "If it communicates, register shardrules.all_gather, all_reduce, permute, per_device, ... "
        "with its mesh axes, or a function of a shardrules.RuleContext. Names with a rule: none."
    )


@needs_triton
def test_a_triton_kernel_is_typed_by_its_rule(scale, gpu_mesh, hooks):
    sr.register("multiply_kernel", sr.no_communication)
    args = structs(gpu_mesh, "float32", *XW)
    with raising.not_inferred():
        jax.eval_shape(sharded(scale, gpu_mesh, out_specs=P()), *args)
    explanation = sr.explain(gradient(sharded(scale, gpu_mesh)), *args)
    calls = [call for call in explanation.calls if call.kernel == "multiply_kernel"]
    assert sum(call.count for call in calls) == 3
    for call in calls:
        assert [t.varying for t in call.outputs] == [{"data"}]
    assert [(s.axes, s.bytes, s.phase) for s in explanation.sums] == [(("data",), 512, "backward")]


@needs_triton
def test_a_triton_kernel_compiled_for_gpus(scale, gpu_mesh, hooks):
    sr.register("multiply_kernel", sr.no_communication)
    args = structs(gpu_mesh, "float32", *XW)
    judged = {
        check: testing.judge(gradient(sharded(scale, gpu_mesh, check)), *args)
        for check in (True, False)
    }
    assert collectives(judged[True]) == [("needed", "all-reduce", ("data",), "backward", 512)]
    assert collectives(judged[False]) == [
        ("overwide", "all-reduce", ("data", "model"), "backward", 512),
        ("redundant", "all-reduce", ("model",), "backward", 8192),
    ]


# --- cuDNN attention -------------------------------------------------------------------------

BATCH, SHARED = ((8, 128, 4, 64), P("data")), ((2, 128, 4, 64), P())


@pytest.fixture
def attention(monkeypatch):
    """JAX's attention by cuDNN, as on a machine with H100s and a cuDNN of 2024."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda capability: False)
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, implementation="cudnn")


def attend(attention, mesh, inputs, out_specs=P("data")):
    f = jax.shard_map(
        attention, mesh=mesh, in_specs=tuple(spec for _, spec in inputs), out_specs=out_specs
    )
    return f, structs(mesh, "bfloat16", *inputs)


def types(jaxpr, name):
    """The types of what equations called ``name`` give, inner jaxprs included."""
    for equation in jaxpr.eqns:
        if name in equation.primitive.name:
            yield [str(v.aval) for v in equation.outvars]
        for inner in jaxprs_in_params(equation.params):
            yield from types(inner, name)


def test_cudnn_attention_is_as_jax_types_it_where_that_is_right(cpu_mesh, attention):
    """q, k and v vary alike: the same types, no sum, and nothing to declare."""
    f, args = attend(attention, cpu_mesh, [BATCH] * 3)

    def traced():
        jaxpr = jax.make_jaxpr(gradient(f, (0, 1, 2)))(*args).jaxpr
        assert "psum" not in str(jaxpr)
        return list(types(jaxpr, "dot_product_attention"))

    plain = traced()
    assert [len(one) for one in plain] == [2, 3]  # with the residual; dq, dk, dv
    assert all("{V:data}" in one for call in plain for one in call)
    with sr.install():
        assert traced() == plain


@pytest.mark.parametrize("inputs", [(SHARED, BATCH, BATCH), (SHARED, BATCH, SHARED)])
def test_cudnn_attention_of_a_replicated_q_varies_as_k_does(cpu_mesh, attention, inputs):
    f, args = attend(attention, cpu_mesh, inputs, out_specs=P())
    jax.eval_shape(f, *args)  # plain JAX accepts varying data as replicated
    with sr.install(), raising.not_inferred():
        jax.eval_shape(f, *args)


@pytest.mark.gpu
def test_cudnn_attention_sums_the_gradients_of_a_replicated_k_and_v(gpu_mesh, attention):
    f, args = attend(attention, gpu_mesh, [BATCH, SHARED, SHARED])

    def judged():
        return testing.judge(gradient(f, (0, 1, 2)), *args)

    plain = judged()
    assert plain.verdicts == ()  # each device's own share, called the gradient
    assert [o.varying for o in plain.outputs] == [("data",)] * 3
    with sr.install():
        jax.clear_caches()
        summed = judged()
    assert {(v.verdict, v.collective.axes) for v in summed.verdicts} == {("needed", ("data",))}
    assert sum(v.bytes for v in summed.verdicts) == 2 * 2 * 128 * 4 * 64 * 2


# --- custom_partitioning ---------------------------------------------------------------------


@custom_partitioning
def partitioned(x, w):
    return x * w


partitioned.def_partition(
    partition=lambda mesh, args, out: (
        mesh,
        lambda x, w: x * w,
        out.sharding,
        [a.sharding for a in args],
    ),
    infer_sharding_from_operands=lambda mesh, args, out: args[0].sharding,
    sharding_rule="i j, i j -> i j",
)


@jax.custom_vjp
def partitioned_scale(x, w):
    return partitioned(x, jnp.broadcast_to(w, x.shape))


partitioned_scale.defvjp(
    lambda x, w: (partitioned_scale(x, w), (x, w)),
    lambda res, g: (
        partitioned(g, jnp.broadcast_to(res[1], g.shape)),
        partitioned(g, res[0]).sum(0),
    ),
)


def test_custom_partitioning_is_as_jax_types_it(cpu_mesh):
    """It is traced into: right already, and nothing to declare."""
    f = jax.shard_map(
        partitioned, mesh=cpu_mesh, in_specs=(P("data"), P("model")), out_specs=P(("data", "model"))
    )
    args = np.ones((8, 4), np.float32), np.ones((4, 4), np.float32)
    plain = str(jax.make_jaxpr(f)(*args))
    with sr.install():
        assert str(jax.make_jaxpr(f)(*args)) == plain
    f = jax.shard_map(partitioned, mesh=cpu_mesh, in_specs=(P("data"), P("model")), out_specs=P())
    for install in (False, True):
        with pytest.raises(ValueError, match=r"possibly varying over \{data,model\}"):
            if install:
                with sr.install():
                    jax.eval_shape(f, *args)
            else:
                jax.eval_shape(f, *args)


def test_gradients_through_custom_partitioning(cpu_mesh, hooks):
    x, w = np.arange(32, dtype=np.float32).reshape(8, 4), np.arange(1, 5, dtype=np.float32)
    got = gradient(sharded(partitioned_scale, cpu_mesh))(x, w)
    want = gradient(lambda x, w: x * w)(x, w)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b)
