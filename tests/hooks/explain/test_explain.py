"""explain and scan_calls: what they say is pinned, and what they leave as it was."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules import errors
from shardrules import hooks as hooks_module

ROOT = pathlib.Path(__file__).parents[3]


def one_line_a_row(text):
    """The cells that stand below their row beside it again, and no line broken."""
    return re.sub(r"\n {4}", "  ", re.sub(r"\n {6}", " ", str(text)))


def pinned(text):
    """The text with what stands there for each line number, and columns apart by two spaces."""

    def line(match):
        path = pathlib.Path(match[1])
        path = path if path.is_absolute() else pathlib.Path.cwd() / path
        found = path.read_text().splitlines()[int(match[2]) - 1]
        return f"<{found.strip()}>"

    text = re.sub(r"((?:/|tests/)\S*?\.py):(\d+)", line, str(text))
    return "\n".join(re.sub(r"  +", "  ", row.rstrip()) for row in text.splitlines())


class Shapes:
    """A replicated row times a batch, with a rule for one of two kernels."""

    def __init__(self, mesh, **kernels):
        self.f, self.args = programs.scale_gradient("cpu", mesh, **kernels)


@pytest.mark.parametrize("columns", [80, 100])
def test_explain_says_what_a_proof_stands_on(cpu_mesh, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    program = Shapes(cpu_mesh)
    (first, *_) = sr.explain(program.f, *program.args).calls
    assert first.status == "audited" and first.declared_at == first.defined_at
    text = str(sr.explain(program.f, *program.args))
    assert (
        "no_communication, proven to depend on its operands alone, if it is well formed at "
        in one_line_a_row(text)
    )
    # Only a path is longer.
    lines = [line for line in text.splitlines() if len(line) > columns]
    assert [line for line in lines if len(line.split()) > 1] == []


def test_explain_says_types_rules_casts_and_psums(cpu_mesh):
    sr.register("scale_kernel", sr.no_communication)
    program = Shapes(cpu_mesh, bwd_kernel=sr.no_communication(programs.scale_bwd_kernel))
    explanation = sr.explain(program.f, *program.args)
    assert (
        pinned(one_line_a_row(explanation))
        == """\
kernel  phase  called at  inputs -> outputs  rule
scale_kernel  forward  <return pl.pallas_call(>  2 of {data} -> {data}  no_communication, declared at <sr.register("scale_kernel", sr.no_communication)>
scale_kernel  backward  within <return lambda *args: (inner(*args) ** 2).sum()>  2 of {data} -> {data}  no_communication, declared at <sr.register("scale_kernel", sr.no_communication)>
scale_bwd_kernel  backward  within <return lambda *args: (inner(*args) ** 2).sum()>  2 of {data} -> {data}  no_communication, declared at <program = Shapes(cpu_mesh, bwd_kernel=sr.no_communication(programs.scale_bwd_kernel))>

cast to  phase  at  value  why
varying over {data}  forward  <return pl.pallas_call(>  float32[1,128], 512 B  input 1 of pallas_call kernel 'scale_kernel', for its rule
varying over {data}  backward  within <return lambda *args: (inner(*args) ** 2).sum()>  float32[1,128], 512 B  input 1 of pallas_call kernel 'scale_kernel', for its rule

psum  phase  at  value  why
over {data}  backward  within <return lambda *args: (inner(*args) ** 2).sum()>  float32[1,128], 512 B  bwd '<lambda>' returns one device's share at output[1]"""
    )
    first = explanation.calls[0]
    assert (
        first.kernel,
        first.primitive,
        first.phase,
        first.checked,
        first.status,
        first.count,
    ) == ("scale_kernel", "pallas_call", "forward", True, "declared", 1)
    assert first.inputs == (sr.AxisType("data"),) * 2 and first.outputs == (sr.AxisType("data"),)
    assert first.rule == "no_communication" and "test_explain.py:" in first.declared_at
    (one,) = explanation.sums
    assert (one.axes, one.bytes, one.phase, one.steps) == (("data",), 512, "backward", 1)
    assert not hooks_module.installed()


def test_explain_of_loops_and_branches(cpu_mesh):
    kernel = sr.no_communication(programs.scale_kernel)

    def f(x, w):
        def body(carry, _):
            y = pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x, w)
            return carry + jax.lax.cond(w[0, 0] > 0, lambda: y, lambda: jnp.zeros(x.shape)), None

        return jax.lax.scan(body, jnp.zeros(x.shape), None, length=5)[0]

    mapped = jax.shard_map(f, mesh=cpu_mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    explanation = sr.explain(mapped, jnp.ones((8, 4)), jnp.ones((1, 4)))
    assert [cast.why for cast in explanation.casts] == [
        "an initial carry of scan, to vary as its body returns it",
        "input 1 of pallas_call kernel 'scale_kernel', for its rule",
        "the output of a branch, to vary as the others do",
    ]


def test_a_psum_in_a_loop_is_told_how_to_leave_it(cpu_mesh):
    def gradient(early):
        def f(x, w):
            w = sr.vary(w, "data") if early else w
            body = lambda carry, _: (jnp.sin(carry) * w, None)  # noqa: E731
            return jax.lax.scan(body, x, None, length=5)[0]

        return jax.grad(
            lambda w, x: jax.shard_map(
                f, mesh=cpu_mesh, in_specs=(P("data"), P()), out_specs=P("data")
            )(x, w).sum()
        )

    args = jnp.ones((1, 4)), jnp.ones((8, 4))
    (inside,) = sr.explain(gradient(False), *args).sums
    assert inside.steps == 5
    assert (
        "transpose of a cast: operand 1 of mul, by JAX or the program; runs in each of 5 steps: "
        "shardrules.vary(x, 'data') before the loop sums once, if x is the same in all of them"
    ) in one_line_a_row(sr.explain(gradient(False), *args))
    (before,) = sr.explain(gradient(True), *args).sums
    assert before.steps == 1


def test_no_cast_takes_away_a_psum_that_is_written(cpu_mesh):
    def f(x):
        return jax.lax.scan(lambda c, _: (jax.lax.psum(c, "data") * x, None), x, None, length=5)[0]

    explanation = sr.explain(
        jax.shard_map(f, mesh=cpu_mesh, in_specs=P("data"), out_specs=P("data")), jnp.ones((8, 4))
    )
    assert explanation.sums[0].steps == 5 and "shardrules.vary" not in str(explanation)


def test_explain_of_what_a_varying_predicate_chooses(cpu_mesh):
    def f(x, w):
        chosen = jax.lax.cond(x[0] > 0, lambda: 1.0, lambda: w)
        return chosen * jax.lax.while_loop(lambda c: c < x[0], lambda c: c + 1, 0.0) * x

    mapped = jax.shard_map(f, mesh=cpu_mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    explanation = sr.explain(mapped, jnp.arange(8.0), 2.0)
    assert {cast.why for cast in explanation.casts} >= {
        "an operand of cond, whose predicate varies",
        "the output of a branch whose predicate varies, to vary as the others do",
        "an initial carry of while_loop, to vary as its body returns it or its condition does",
    }


def test_explain_of_casts_of_partial_sums(cpu_mesh):
    def f(x, w):
        w = jax.lax.pcast(w, "data", to="reduced")
        return jax.lax.psum(jax.lax.pcast(x * w, "data", to="unreduced"), "data")

    mapped = jax.shard_map(f, mesh=cpu_mesh, in_specs=(P("data"), P()), out_specs=P())
    assert [(c.to, c.why) for c in sr.explain(mapped, jnp.ones(8), jnp.ones(2)).casts] == [
        ("varying", "operand 1 of mul, by JAX or the program"),
        ("unreduced", "operand 0 of unreduced_psum, by JAX or the program"),
    ]


def test_explain_shows_claims(cpu_mesh):
    def f(x):
        total = jax.lax.all_gather(x, "data").sum(0)
        return sr.already_summed(total, "data")

    mapped = jax.shard_map(f, mesh=cpu_mesh, in_specs=P("data"), out_specs=P())
    explanation = sr.explain(mapped, jnp.ones(8))
    assert pinned(one_line_a_row(explanation)) == (
        'claim: float32[2] at <return sr.already_summed(total, "data")> is already summed over '
        "{data}"
    )
    assert len(explanation.claims) == 1


def test_explain_where_there_is_nothing():
    assert str(sr.explain(lambda x: x + 1, 1.0)) == (
        "no opaque call, cast or psum inside a shard_map"
    )


# scan_calls.


def test_scan_calls_goes_on_after_the_first(cpu_mesh, declared_only):
    program = Shapes(cpu_mesh)
    with pytest.raises(errors.UnknownKernelError):
        program.f.lower(*program.args)
    missing = sr.scan_calls(program.f, *program.args)
    assert (
        pinned(missing)
        == """\
2 kernels have no rule

pallas_call kernel 'scale_kernel' (defined at <def scale_kernel(x_ref, w_ref, o_ref):>)
  called at <return pl.pallas_call(>
  called within <return lambda *args: (inner(*args) ** 2).sum()>
  input 0: varying over {data}
  input 1: invariant
  @shardrules.no_communication  # above the def at <def scale_kernel(x_ref, w_ref, o_ref):>
  shardrules.register('programs:scale_kernel', shardrules.no_communication)

pallas_call kernel 'scale_bwd_kernel' (defined at <def scale_bwd_kernel(x_ref, g_ref, o_ref):>)
  called within <return lambda *args: (inner(*args) ** 2).sum()>
  input 0: varying over {data}
  input 1: varying over {data}
  @shardrules.no_communication  # above the def at <def scale_bwd_kernel(x_ref, g_ref, o_ref):>
  shardrules.register('programs:scale_bwd_kernel', shardrules.no_communication)

Each of a kernel's lines is enough. no_communication is right for kernels that read no other device
and no device id; for one that communicates, write all_gather(axis), all_reduce(axis) or another
of the rules for that."""
    )
    assert missing and [call.kernel for call in missing.calls] == [
        "scale_kernel",
        "scale_bwd_kernel",
    ]
    assert missing.stopped_by is None and missing.known_count == 0


def test_what_scan_calls_says_is_enough(cpu_mesh, hooks):
    program = Shapes(cpu_mesh)
    for call in sr.scan_calls(program.f, *program.args).calls:
        eval(call.lines[-1], {"shardrules": sr})
    x, w = programs.random_like(program.args)
    want = jax.grad(lambda x, w: ((x * w) ** 2).sum(), argnums=(0, 1))(
        jax.device_get(x), jax.device_get(w)
    )
    for one, other in zip(program.f(x, w), want):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    missing = sr.scan_calls(program.f, *program.args)
    assert not missing
    assert str(missing) == "every opaque call inside shard_map has a rule (3)"


def test_scan_calls_finds_what_the_check_being_off_hides(cpu_mesh, declared_only):
    program = programs.copy_gradient("cpu", cpu_mesh, check_vma=False)
    (call,) = sr.scan_calls(program[0], *program[1]).calls
    assert (call.kernel, call.checked, call.inputs) == ("copy_kernel", False, ())
    assert "check_vma=False" in str(sr.scan_calls(program[0], *program[1]))
    sr.register("copy_kernel", sr.no_communication)
    assert not sr.scan_calls(program[0], *program[1])


def test_scan_calls_of_other_primitives(cpu_mesh):
    def f(x):
        y = jax.ffi.ffi_call("my_target", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
        return jax.lax.psum(y, "data")

    mapped = jax.shard_map(f, mesh=cpu_mesh, in_specs=P("data"), out_specs=P())
    missing = sr.scan_calls(mapped, jnp.ones(8))
    (call,) = missing.calls
    assert (call.primitive, call.kernel, call.inputs) == (
        "ffi_call",
        "my_target",
        (sr.AxisType("data"),),
    )
    assert call.lines == ("shardrules.register('my_target', shardrules.no_communication)",)


def test_scan_calls_reports_what_it_found_before_an_error(cpu_mesh, declared_only):
    def f(x):
        programs.copy_op("cpu")(x)
        raise ZeroDivisionError("the model is not finished")

    mapped = jax.shard_map(f, mesh=cpu_mesh, in_specs=P("data"), out_specs=P("data"))
    missing = sr.scan_calls(mapped, jnp.ones(programs.SHAPE))
    assert [call.kernel for call in missing.calls] == ["copy_kernel"]
    assert str(missing).endswith(
        "The trace stopped early, so there may be more: "
        "ZeroDivisionError: the model is not finished"
    )
    sr.register("copy_kernel", sr.no_communication)
    with pytest.raises(ZeroDivisionError):
        sr.scan_calls(mapped, jnp.ones(programs.SHAPE))


@pytest.mark.parametrize("look", [sr.explain, sr.scan_calls])
def test_looking_leaves_no_trace_behind(cpu_mesh, declared_only, look):
    """Nothing that was traced to look at it is ever compiled: the unknown kernel is one still."""
    program = Shapes(cpu_mesh)
    look(program.f, *program.args)
    with pytest.raises(errors.UnknownKernelError):
        program.f.lower(*program.args)
    assert hooks_module.installed()


@pytest.mark.parametrize("look", [sr.explain, sr.scan_calls])
def test_what_is_no_function_is_refused(look):
    with pytest.raises(errors.ShardrulesError) as caught:
        look("HloModule m")
    assert str(caught.value) == (
        f"{look.__name__}: f is a function, not 'HloModule m' (str); "
        f"see help(shardrules.{look.__name__})"
    )


def test_a_declared_op_is_explained_by_its_declaration(cpu_mesh):
    op = sr.no_communication(programs.scale_op("cpu"))
    loss = programs.loss_of(op, cpu_mesh, (P("data", None), P()))
    args = jnp.ones(programs.SHAPE), jnp.ones((1, programs.SHAPE[1]))
    explanation = sr.explain(jax.grad(loss, argnums=(0, 1)), *args)
    assert {call.status for call in explanation.calls} == {"declared"}
    assert not sr.scan_calls(jax.grad(loss, argnums=(0, 1)), *args)


def copying_from(device):
    """The op of a kernel that copies from another device."""
    from jax.experimental.pallas import tpu as pltpu

    def kernel(x, o, send, receive):
        copy = pltpu.make_async_remote_copy(x, o, send, receive, device_id=device)
        copy.start()
        copy.wait()

    def op(x):
        return pl.pallas_call(
            kernel,
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[pltpu.SemaphoreType.DMA] * 2,
        )(x)

    return op


def test_nothing_like_no_communication_is_offered_for_a_kernel_that_communicates(cpu_mesh):
    mapped = jax.shard_map(copying_from(1), mesh=cpu_mesh, in_specs=P("data"), out_specs=P("data"))
    x = jnp.ones((8, 128))
    (call,) = sr.scan_calls(mapped, x).calls
    assert all("no_communication" not in line for line in call.lines)
    assert call.lines[1].startswith(
        "shardrules.register('hooks.explain.test_explain:kernel', "
        "shardrules.permute('data', 'model'))  # or all_gather, reduce_scatter, all_to_all, "
    )
    with sr.install(), pytest.raises(errors.UnknownKernelError) as caught:
        jax.jit(mapped).lower(x)
    text = str(caught.value)
    assert "it copies to or from another device\nIt communicates, so say what it does" in text
    assert call.lines[1] in text and "no_communication" not in text


def test_lines_for_a_lambda_bind_to_the_lambda(cpu_mesh, declared_only):
    op = lambda x: pl.pallas_call(  # noqa: E731
        lambda x, o: o.__setitem__(..., x[...]), jax.ShapeDtypeStruct(x.shape, x.dtype)
    )(x)
    mapped = jax.shard_map(op, mesh=cpu_mesh, in_specs=P("data"), out_specs=P("data"))
    (call,) = sr.scan_calls(mapped, jnp.ones((8, 128))).calls
    (line,) = call.lines
    assert line.startswith("shardrules.no_communication(lambda ...)  # around the lambda at ")


def test_lines_for_a_librarys_kernel(cpu_mesh, declared_only):
    """No decorator: the code is not the user's. And the line of the call is the user's own."""
    from jax.experimental.pallas.ops.tpu import matmul

    def op(x):
        return matmul.matmul(x, x, block_shape=(128, 128))

    mapped = jax.shard_map(op, mesh=cpu_mesh, in_specs=P("data"), out_specs=P("data"))
    (call,) = sr.scan_calls(mapped, jnp.ones((512, 128))).calls
    assert call.lines == (
        "shardrules.register('jax.experimental.pallas.ops.tpu.matmul:matmul_kernel', "
        "shardrules.no_communication)",
    )
    line = op.__code__.co_firstlineno + 1
    assert call.called_at == (f"{__file__}:{line}",)


class _Solve:
    """A primitive of a user's whose gradient needs its inputs cast as its rule would cast them."""

    def __init__(self):
        from jax.interpreters import ad, mlir

        self.p = jax.extend.core.Primitive("test_scan_solve")
        self.p.def_abstract_eval(lambda a, b: jax.core.ShapedArray(b.shape, b.dtype))
        mlir.register_lowering(self.p, mlir.lower_fun(jnp.multiply, multiple_results=False))
        ad.primitive_jvps[self.p] = lambda primals, tangents: (
            self.p.bind(*primals),
            self.p.bind(tangents[0], primals[1]),
        )
        ad.primitive_transposes[self.p] = lambda ct, a, b: (
            jnp.broadcast_to((ct * b).sum(), a.aval.shape),
            None,
        )


def test_scan_calls_goes_on_where_a_cotangents_type_would_stop_it(cpu_mesh):
    p = _Solve().p
    mapped = jax.shard_map(
        lambda a, b: p.bind(jnp.broadcast_to(a, b.shape), b),
        mesh=cpu_mesh,
        in_specs=(P(), P("data")),
        out_specs=P("data"),
    )
    missing = sr.scan_calls(jax.grad(lambda a, b: mapped(a, b).sum()), jnp.ones(1), jnp.ones(8))
    assert missing.stopped_by is None, missing
    assert [call.kernel for call in missing.calls] == ["test_scan_solve"]
