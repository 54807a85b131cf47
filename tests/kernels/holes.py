"""What plain JAX 0.10.2 does with opaque calls under `check_vma=True`: one program a hole.

Each program is written as its user would write it. `right` is what it must do once its kernels
have rules: return that value, or be refused.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels import cases, opaque
from kernels.case import BWD_TYPE, NOT_ANNOTATED, REFUSED, Fails

X = np.arange(1, 33, dtype=np.float32).reshape(8, 4)
W = np.arange(1, 5, dtype=np.float32)
_BLOCKS = X.reshape(4, 2, 4)  # by data


@dataclasses.dataclass(frozen=True)
class Hole:
    """A program that plain JAX refuses for no good reason, or accepts and gets wrong.

    Args:
      name: a short name.
      run: `(mesh, check_vma) -> result`; the mesh is (4 data, 2 model) on CPU.
      plain: what plain JAX does under the check: the error, or the wrong result.
      right: the right result, or REFUSED.
      unchecked: what it does under `check_vma=False`, where that isn't what `right` says.
      kernels: names of the opaque calls in it that can't be proven, and need a rule.
    """

    name: str
    run: Callable[[Mesh, bool], Any]
    plain: Fails | np.ndarray | str
    right: np.ndarray | str
    unchecked: np.ndarray | str | None = None
    kernels: tuple[str, ...] = ()


ACCEPTED = "accepted"


# --- three programs around an op on x, which is split over data ------------------------------


def forward(op):
    """Return op(X), split over data."""

    def run(mesh, check_vma):
        f = jax.shard_map(
            op, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=check_vma
        )
        return np.asarray(jax.jit(f)(X))

    return run


def wrong_spec(op):
    """Return op(X) under out_specs that call it replicated, which it is not."""

    def run(mesh, check_vma):
        f = jax.shard_map(op, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=check_vma)
        return np.asarray(jax.jit(f)(X))

    return run


def trace_wrong_spec(op):
    """Trace op as `wrong_spec` does, for kernels that CPU can't run."""

    def run(mesh, check_vma):
        f = jax.shard_map(op, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=check_vma)
        jax.eval_shape(f, X)
        return ACCEPTED

    return run


def weight_gradient(op):
    """Return the gradient of |op(X) * w|^2 / 2 with respect to the replicated w."""

    def run(mesh, check_vma):
        f = jax.shard_map(
            lambda x, w: op(x) * w,
            mesh=mesh,
            in_specs=(P("data"), P()),
            out_specs=P("data"),
            check_vma=check_vma,
        )
        return np.asarray(jax.jit(jax.grad(lambda w: jnp.sum(f(X, w) ** 2) / 2))(W))

    return run


DOUBLED = 2 * X
SHARD = 2 * _BLOCKS[0]  # what a device that is asked for a "replicated" result answers
GRADIENT = (DOUBLED**2).sum(0) * W
# With the op's output typed invariant, the cotangent is summed over data before it meets each
# device's own block, not after.
WRONG_GRADIENT = (2 * _BLOCKS).sum(0) * W * SHARD
WRONG_GRADIENT = WRONG_GRADIENT.sum(0)


def _silent(name, op, kernels=()):
    """Return the two holes of an op whose output is typed invariant."""
    return (
        Hole(f"{name}_wrong_spec", wrong_spec(op), SHARD, REFUSED, kernels=kernels),
        Hole(f"{name}_gradient", weight_gradient(op), WRONG_GRADIENT, GRADIENT, kernels=kernels),
    )


# --- pallas_call -----------------------------------------------------------------------------

_MUL = Fails(
    "operands of mul differ",
    "ValueError",
    "Primitive mul requires varying manual axes to match, but got",
)
_WHILE = Fails(
    "carry", "TypeError", "while_loop body function carry input and carry output must have equal"
)
_CARRY = Fails(
    "carry", "TypeError", "scan body function carry input and carry output must have equal types"
)
_BRANCHES = Fails("branches", "TypeError", "cond branches must have equal output types")


def _less_varying(x):
    return opaque.annotated(x, like=jnp.zeros(()))


def _compiled(op, out):
    """Return op with its output's type made by `out`, and no interpret mode."""
    return functools.partial(op, out=out, interpret=False)


def _rebatched(mesh, check_vma):
    """Return the axes that a kernel's output varies over, where vmap adds `data` to `model`."""
    f = jax.shard_map(
        _compiled(opaque.pallas_double, opaque.annotated),
        mesh=mesh,
        in_specs=P("model"),
        out_specs=P("model"),
        check_vma=check_vma,
    )
    jaxpr = jax.make_jaxpr(jax.vmap(f, spmd_axis_name="data"))(X).jaxpr
    (body,) = [eqn.params["jaxpr"] for eqn in jaxpr.eqns if "shard_map" in eqn.primitive.name]
    (call,) = [eqn for eqn in body.eqns if eqn.primitive.name == "pallas_call"]
    return _axes(call.outvars[0].aval)


def _axes(aval):
    return ",".join(sorted(aval.manual_axis_type.varying))


def _no_inputs(x):
    return pl.pallas_call(opaque.where_kernel, out_shape=_less_varying(x))()


def _writes_nothing(x):
    return pl.pallas_call(opaque.idle_kernel, out_shape=_less_varying(x))(x)


def _carry_from_zeros(x):
    def step(acc, _):
        return acc + opaque.pallas_double(x, out=opaque.annotated), None

    return lax.scan(step, jnp.zeros(x.shape, x.dtype), length=2)[0]


def _branch_without_kernel(x):
    return lax.cond(
        jnp.sum(x[0]) > 40,
        lambda: opaque.pallas_double(x, out=opaque.annotated),
        lambda: jnp.zeros(x.shape, x.dtype),
    )


_PALLAS = (
    Hole("pallas_unannotated", forward(opaque.pallas_double), NOT_ANNOTATED, DOUBLED),
    Hole(
        "pallas_interpreted",
        forward(functools.partial(opaque.pallas_double, out=opaque.annotated)),
        _MUL,
        DOUBLED,
    ),
    Hole(
        "pallas_interpreted_grid",
        forward(functools.partial(opaque.pallas_copy, out=opaque.annotated)),
        _WHILE,
        X,
    ),
    Hole(
        "pallas_array_as_out_shape",
        trace_wrong_spec(_compiled(opaque.pallas_double, lambda x: x)),
        ACCEPTED,
        REFUSED,
    ),
    Hole(
        "pallas_less_varying_than_inputs",
        trace_wrong_spec(_compiled(opaque.pallas_double, _less_varying)),
        ACCEPTED,
        REFUSED,
    ),
    Hole("pallas_rebatched", _rebatched, "model", "data,model", unchecked=""),
    Hole("pallas_no_inputs", trace_wrong_spec(_no_inputs), ACCEPTED, REFUSED),
    Hole("pallas_writes_nothing", trace_wrong_spec(_writes_nothing), ACCEPTED, REFUSED),
    Hole("carry_from_zeros", forward(_carry_from_zeros), _CARRY, 2 * DOUBLED),
    Hole(
        "branch_without_kernel",
        forward(_branch_without_kernel),
        _BRANCHES,
        np.where(_BLOCKS[:, :1].sum(-1, keepdims=True) > 40, 2 * _BLOCKS, 0).reshape(X.shape),
    ),
)


# --- other opaque calls ----------------------------------------------------------------------


def _twice(op):
    return lambda x: lax.scan(lambda c, _: (op(c), None), x, length=2)[0]


def _ref_type(mesh, check_vma):
    """Return the axes that the content of a ref varies over after varying data went in."""
    seen = []

    def f(x):
        out = opaque.ref_double(x)
        seen.append(_axes(jax.typeof(out)))
        return out

    trace_wrong_spec(f)(mesh, check_vma)
    return seen[0]


def _case(name):
    """Trace the op of a kernel case under out_specs that call its output replicated."""

    def run(mesh, check_vma):
        return trace_wrong_spec(cases.BY_NAME[name].make(mesh, False))(mesh, check_vma)

    return run


def _annotated(op):
    return functools.partial(op, out=opaque.annotated)


_FFI = (opaque.FFI_TARGET,)
_PRIMITIVE = ("shardrules_test_double_primitive",)
_CALLBACK = ("double_on_host",)

_OTHER = (
    *_silent("ffi", opaque.ffi_double, _FFI),
    Hole(
        "ffi_annotated",
        forward(_annotated(opaque.ffi_double)),
        Fails("bare assertion", "AssertionError", r"^ManualAxisType\("),
        DOUBLED,
        kernels=_FFI,
    ),
    *_silent("pure_callback", opaque.pure_double, _CALLBACK),
    *_silent("pure_callback_annotated", _annotated(opaque.pure_double), _CALLBACK),
    *_silent("io_callback", opaque.io_double, _CALLBACK),
    *_silent("io_callback_annotated", _annotated(opaque.io_double), _CALLBACK),
    *_silent("primitive", opaque.primitive_double, _PRIMITIVE),
    Hole(
        "pure_callback_scan",
        forward(_twice(opaque.pure_double)),
        _CARRY,
        2 * DOUBLED,
        kernels=_CALLBACK,
    ),
    Hole(
        "primitive_scan",
        forward(_twice(opaque.primitive_double)),
        _CARRY,
        2 * DOUBLED,
        kernels=_PRIMITIVE,
    ),
    Hole("mosaic_gpu", trace_wrong_spec(opaque.mosaic_gpu_double), ACCEPTED, REFUSED),
    Hole(
        "raw_mosaic",
        trace_wrong_spec(opaque.raw_mosaic_double),
        ACCEPTED,
        REFUSED,
        kernels=("raw_mosaic_double",),
    ),
    Hole("core_map", _case("core_map_zeros_wrongspec"), ACCEPTED, REFUSED),
    *_silent("run_state", opaque.run_state_double),
    Hole(
        "collective_kernel",
        _case("all_gather_local"),
        NOT_ANNOTATED,
        ACCEPTED,
        kernels=("ag_kernel",),
    ),
    Hole("new_ref_type", _ref_type, "", "data", unchecked=""),
    Hole(
        "new_ref",
        forward(opaque.ref_double),
        Fails("cast of what varies already", "ValueError", "pvary is a invariant->variant"),
        DOUBLED,
    ),
)


# --- custom_vjp ------------------------------------------------------------------------------


def _gradients(f, args, specs, out_spec=P("data"), argnums=0):
    """Return the gradient of |f(*args)|^2 / 2."""

    def run(mesh, check_vma):
        g = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out_spec, check_vma=check_vma)
        grad = jax.grad(lambda *a: jnp.sum(g(*a) ** 2) / 2, argnums=argnums)
        return np.asarray(jax.jit(grad)(*args))

    return run


@jax.custom_vjp
def _first(x, y):
    return x


_first.defvjp(lambda x, y: (x, y), lambda y, g: (g, jnp.zeros(y.shape, y.dtype)))


@jax.custom_vjp
def _scale(x, w):
    return x * w


_scale.defvjp(lambda x, w: (x * w, (x, w)), lambda res, g: (g * res[1], (g * res[0]).sum(0)))


def _reduced(mesh, check_vma):
    # JAX 0.10 has reduced primals of a custom_vjp on meshes with explicit axes only.
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * 2)

    def f(w, x):
        return _scale(x, lax.pcast(w, "data", to="reduced") if check_vma else w)

    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        return _gradients(f, (jnp.asarray(W), x), (P(), P("data")))(mesh, check_vma)


def _gather(bwd):
    """Return an all-gather over data of the user's own, with `bwd` for its backward pass."""
    f = jax.custom_vjp(lambda x: opaque.gather_p.bind(x))
    f.defvjp(lambda x: (f(x), None), lambda _, g: (bwd(g),))
    return f


def _scatter_sum(g):
    return lax.psum_scatter(g, "data", tiled=True)


@jax.custom_vjp
def _summed_scale(x, w):
    return x * w


def _summed_scale_bwd(res, g):
    x, w = res
    # Already the sum over data, and typed varying.
    return g * w, lax.all_gather(jnp.sum(g * x), "data").sum()


_summed_scale.defvjp(lambda x, w: (x * w, (x, w)), _summed_scale_bwd)


def _summed_gradient(mesh, check_vma):
    f = jax.shard_map(
        _summed_scale,
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    return np.asarray(jax.jit(jax.grad(lambda w: jnp.sum(f(_LINE, w))))(np.float32(3)))


_LINE = np.arange(1, 9, dtype=np.float32)

_CUSTOM_VJP = (
    Hole(
        "custom_vjp_unequal_inputs",
        _gradients(opaque.pallas_scale, (X, W), (P("data"), P()), argnums=1),
        BWD_TYPE,
        (X**2).sum(0) * W,
    ),
    Hole(
        "custom_vjp_less_varying_cotangent",
        _gradients(_first, (X, X), P("data"), argnums=1),
        BWD_TYPE,
        0 * X,
    ),
    Hole("custom_vjp_reduced_primal", _reduced, BWD_TYPE, (X**2).sum(0) * W),
    # w instead of 4w: the cotangent of an output that dropped data is the sum over data already.
    Hole(
        "dropped_axis_summed_again",
        _gradients(_gather(_scatter_sum), (_LINE,), P("data"), P()),
        4 * _LINE,
        REFUSED,
        unchecked=_LINE,
        kernels=("shardrules_test_gather_primitive",),
    ),
    # 36, where a psum over data would make it 144.
    Hole(
        "cotangent_summed_already", _summed_gradient, BWD_TYPE, REFUSED, unchecked=np.float32(144)
    ),
)

ALL: tuple[Hole, ...] = _PALLAS + _OTHER + _CUSTOM_VJP
BY_NAME = {hole.name: hole for hole in ALL}
assert len(BY_NAME) == len(ALL)
