"""check_rule: right rules pass, and each way of being wrong is found."""

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from hooks.cotangents.test_cotangent_forms import gather_p, my_slice, sum_p, with_bwd
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from kernels import opaque
from raising import raises

import shardrules as sr
from shardrules import errors, testing

pytestmark = pytest.mark.one_lane

X = jax.ShapeDtypeStruct((8, 4), jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("installed", [True, False])
def test_a_right_rule_passes(cpu_mesh, installed):
    op = programs.scale_op(
        "cpu",
        kernel=sr.no_communication(programs.scale_kernel),
        bwd_kernel=sr.no_communication(programs.scale_bwd_kernel),
    )
    w = jax.ShapeDtypeStruct((1, 4), jnp.float32)
    with sr.install() if installed else _nothing():
        testing.check_rule(op, cpu_mesh, X, w, in_specs=(P("data"), P()), out_specs=P("data"))
        testing.check_rule(
            op,
            cpu_mesh,
            X,
            w,
            in_specs=(P("data", "model"), P(None, "model")),
            out_specs=P("data", "model"),
        )
        # Specs from the arguments' shardings, out_specs from the rule.
        placed = [
            jax.device_put(np.ones(s.shape, np.float32), NamedSharding(cpu_mesh, spec))
            for s, spec in ((X, P("data")), (w, P()))
        ]
        testing.check_rule(op, cpu_mesh, *placed)


def _nothing():
    import contextlib

    return contextlib.nullcontext()


def test_a_c_plus_plus_handler_and_a_callback(cpu_mesh):
    sr.register(opaque.FFI_TARGET, sr.no_communication)
    testing.check_rule(opaque.ffi_double, cpu_mesh, X, in_specs=P("data"), gradients=False)
    testing.check_rule(
        opaque.pure_double,
        cpu_mesh,
        X,
        in_specs=P("data", "model"),
        out_specs=P("data", "model"),
        gradients=False,
    )


def test_an_output_that_is_not_invariant(cpu_mesh):
    """A primitive that reads its place, declared not to."""
    from hooks.cotangents.test_cotangent_forms import primitive

    place_p = primitive("test_adds_its_place", lambda x: x + lax.axis_index("model"))
    sr.register(place_p, sr.no_communication)
    with pytest.raises(errors.RuleCheckError) as caught:
        testing.check_rule(place_p.bind, cpu_mesh, X, in_specs=P("data"), gradients=False)
    assert str(caught.value) == (
        "output 0 is declared invariant over 'model', but 4 of 8 devices hold different bits "
        "from the first along that axis; the rule says that it varies over {data} only. "
        "Declare what the op does: shardrules.per_device('model') if it reads its device's number, "
        "shardrules.reduce_scatter('model') if it keeps a part of what it reduces, "
        "shardrules.all_to_all('model') if it exchanges parts. "
        "Its arguments' data are equal along 'model'; try data that differ there."
    )
    sr.register(place_p, sr.per_device("model"), replace=True)
    testing.check_rule(
        place_p.bind,
        cpu_mesh,
        X,
        in_specs=P("data"),
        gradients=False,
        reference=lambda x: jnp.stack([x.reshape(4, 2, 4), x.reshape(4, 2, 4) + 1], 1).reshape(
            16, 4
        ),
    )


DRAWN = X, P("data")


@pytest.mark.parametrize(
    "name, op, data, likeliest",
    [
        (
            "shift",
            lambda x: lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)]),
            DRAWN,
            0,
        ),
        ("double", lambda x: 2 * x, DRAWN, 1),
        ("part", lambda x: lax.psum_scatter(x, "data", tiled=True), (X, P()), 2),
        ("place", lambda x: x + lax.axis_index("data"), (X, P()), 4),
        # Though split, its blocks are equal.
        (
            "place_of_ones",
            lambda x: x + lax.axis_index("data"),
            (np.ones((8, 4), np.float32), P("data")),
            4,
        ),
    ],
)
def test_the_likeliest_rule_comes_first(cpu_mesh, name, op, data, likeliest):
    """By the data that each device had, and made of it."""
    from hooks.cotangents.test_cotangent_forms import primitive

    shape = (lambda x: (x.shape[0] // 4, *x.shape[1:])) if likeliest == 2 else lambda x: x.shape
    p = primitive(f"test_likeliest_{name}", op, shape)
    sr.register(p, sr.all_reduce("data"))
    with pytest.raises(errors.RuleCheckError) as caught:
        testing.check_rule(p.bind, cpu_mesh, data[0], in_specs=data[1], gradients=False)
    rules = ["permute", "no_communication", "reduce_scatter", "all_to_all", "per_device"]
    said = str(caught.value).partition("Declare what the op does: shardrules.")[2]
    assert said.startswith(rules[likeliest]), said
    assert ("data are equal" in said) == (name not in ("shift", "double"))


def test_a_dropped_axis_with_the_right_and_a_wrong_bwd(cpu_mesh):
    """Wrong with the check on only: the cotangent is scaled by the size of the axis."""
    sr.register(gather_p, sr.all_gather_invariant("data"))
    check = dict(in_specs=P("data"), out_specs=P(), reference=lambda x: x)
    with pytest.warns(
        UserWarning,
        match="right only with the check on: gradient of argument 0 differs between 'check on' "
        "and 'check off'",
    ):
        testing.check_rule(with_bwd(gather_p.bind, my_slice), cpu_mesh, X, **check)
    wrong = with_bwd(gather_p.bind, lambda g: my_slice(g) * 4)
    with pytest.raises(errors.RuleCheckError) as caught:
        testing.check_rule(wrong, cpu_mesh, X, **check)
    assert caught.value.what == "gradient of argument 0"
    text = str(caught.value)
    assert text.startswith("gradient of argument 0 differs between 'check on' and 'single device'")
    assert text.count(": |.| = ") == 2 and text.count("bwd must pass it on or slice it") == 1


def test_a_kernel_that_computes_something_else(cpu_mesh):
    sr.register(sum_p, sr.all_reduce("data"))
    op = with_bwd(sum_p.bind, lambda g: g)
    total = lambda x: x.reshape(4, 2, 4).sum(0)  # noqa: E731
    with pytest.warns(UserWarning, match="right only with the check on"):
        testing.check_rule(op, cpu_mesh, X, in_specs=P("data"), out_specs=P(), reference=total)
    with raises(errors.RuleCheckError, what="output 0"):
        testing.check_rule(
            op, cpu_mesh, X, in_specs=P("data"), out_specs=P(), reference=lambda x: total(x) / 4
        )


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda mesh: testing.check_rule(jnp.sin, mesh, 3.0, in_specs=P()),
            "argument 0 is 3.0; give arrays or jax.ShapeDtypeStructs",
        ),
        (
            lambda mesh: testing.check_rule(jnp.sin, "mesh", X, in_specs=P()),
            "'mesh' is not a jax.sharding.Mesh",
        ),
        (
            lambda mesh: testing.check_rule(jnp.sin, mesh, X),
            "argument 0 has no NamedSharding to take its spec from; pass in_specs",
        ),
        (
            lambda mesh: testing.check_rule(jnp.sum, mesh, X, in_specs=P("data")),
            "output 0 is a scalar that varies over {data}; pass an op whose outputs can be split",
        ),
        (
            lambda mesh: testing.check_rule(jnp.sin, mesh, X, in_specs=(P("data"), P())),
            "does not fit 1 argument; give a PartitionSpec for each, or one for all",
        ),
        (
            lambda mesh: testing.check_rule(
                lambda x: lax.all_gather(x, "data"), mesh, X, in_specs=P("data")
            ),
            "so it can't run on one device; pass check_rule(..., reference=f)",
        ),
    ],
)
def test_wrong_use(cpu_mesh, call, message):
    with pytest.raises(errors.ShardrulesError) as caught:
        call(cpu_mesh)
    assert message in str(caught.value)


def test_an_op_without_a_derivative_is_told_what_to_pass(cpu_mesh):
    op = lambda x: jax.pure_callback(np.square, jax.ShapeDtypeStruct(x.shape, x.dtype), x)  # noqa: E731
    with pytest.raises(ValueError, match="callbacks do not support JVP") as caught:
        testing.check_rule(op, cpu_mesh, X, in_specs=P("data"))
    assert any(
        "for an op that has none, pass gradients=False" in note for note in caught.value.__notes__
    )
    testing.check_rule(op, cpu_mesh, X, in_specs=P("data"), gradients=False)


def test_a_kernel_with_scratch_memory_is_told_what_to_pass(cpu_mesh):
    def kernel(x_ref, o_ref, scratch):
        scratch[...] = x_ref[...] * 2
        o_ref[...] = scratch[...]

    def op(x):
        scratch = [pltpu.VMEM(x.shape, x.dtype)]
        return pl.pallas_call(kernel, x, scratch_shapes=scratch, interpret=True)(x)

    with pytest.raises(AssertionError) as caught:
        testing.check_rule(op, cpu_mesh, X, in_specs=P("data"))
    assert any("gradients=False" in note for note in caught.value.__notes__)
    testing.check_rule(op, cpu_mesh, X, in_specs=P("data"), gradients=False)


def test_a_mesh_of_explicit_axes_and_arrays_that_lie_on_it():
    """What ``jax.make_mesh`` makes by default, whose arrays can't be cut by an index."""
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=explicit)
    values = np.random.default_rng(0).standard_normal(X.shape, np.float32)
    x = jax.device_put(values, NamedSharding(mesh, P("data")))
    testing.check_rule(jnp.sin, mesh, x)
    testing.check_rule(
        lambda x: lax.psum(x, "data"),
        mesh,
        x,
        reference=lambda x: x.reshape(4, -1, *x.shape[1:]).sum(0),
    )
    with raises(errors.RuleCheckError, what="output 0"):
        testing.check_rule(jnp.sin, mesh, x, reference=jnp.cos)


def test_an_op_of_integers_only(cpu_mesh):
    testing.check_rule(lambda x: (x > 0).astype(int), cpu_mesh, X, in_specs=P("data"))


@pytest.mark.tpu
def test_a_mesh_of_other_devices(tpu_mesh):
    with pytest.raises(
        errors.ShardrulesError, match="check_rule runs on CPU devices; this mesh has tpu"
    ):
        testing.check_rule(jnp.sin, tpu_mesh, X, in_specs=P())
