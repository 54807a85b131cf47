"""`pl.kernel` and `core_map`: a kernel that doubles its operand, on both cores of a TPU v5p chip.

Doubling is its own transpose, so that one function serves as forward and backward pass.
"""

from __future__ import annotations

from kernels.case import BWD_TYPE, DATA, NOT_ANNOTATED, REFUSED, ZERO, Arg, Case, Expected, bytes_

_CORES = 2


def _mesh():
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.create_tensorcore_mesh("core", num_cores=_CORES)


def _double_share(x_ref, o_ref):
    """Double this core's share of the rows of x_ref into o_ref, by way of VMEM."""
    import functools

    from jax import lax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    rows = x_ref.shape[0] // _CORES
    share = pl.ds(lax.axis_index("core") * rows, rows)

    @functools.partial(pl.run_scoped, buffer=pltpu.VMEM((rows, *x_ref.shape[1:]), x_ref.dtype))
    def _(buffer):
        pltpu.sync_copy(x_ref.at[share], buffer)
        buffer[...] = buffer[...] * 2
        pltpu.sync_copy(buffer, o_ref.at[share])


def _pl_kernel(x):
    import jax
    from jax.experimental import pallas as pl

    out_type = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.kernel(_double_share, out_type=out_type, mesh=_mesh())(x)


def _run_state(x, out):
    from jax.experimental import pallas as pl

    def body(refs):
        pl.core_map(_mesh())(lambda: _double_share(*refs))

    return pl.run_state(body)((x, out))[1]


def _with_vjp(double):
    def make(mesh, interpret):
        import jax

        f = jax.custom_vjp(double)
        f.defvjp(lambda x: (double(x), None), lambda _, g: (double(g),))
        return f

    return make


def _into_itself(x):
    return _run_state(x, x)


def _into_zeros(x):
    import jax.numpy as jnp

    return _run_state(x, jnp.zeros(x.shape, x.dtype))


_X = (Arg((1024, 256), "float32", DATA),)
_V5P = "v5p:2x2x2"

CASES = (
    Case(
        "pl_kernel",
        _V5P,
        _X,
        _with_vjp(_pl_kernel),
        Expected(bytes_(model=262144), NOT_ANNOTATED, ZERO),
        (0,),
        interpret="tpu",
    ),
    Case(
        "core_map_run_state",
        _V5P,
        _X,
        _with_vjp(_into_itself),
        Expected(bytes_(model=262144), ZERO, ZERO),
        (0,),
        interpret="tpu",
    ),
    Case(
        "core_map_run_state_zeros",
        _V5P,
        _X,
        _with_vjp(_into_zeros),
        Expected(bytes_(model=262144), BWD_TYPE, ZERO),
        (0,),
        interpret="tpu",
    ),
    Case(
        "core_map_zeros_wrongspec",
        _V5P,
        _X,
        _with_vjp(_into_zeros),
        Expected(ZERO, ZERO, REFUSED, wrong=True),
        out_spec=(),
    ),
    Case(
        "pl_kernel_wrongspec",
        _V5P,
        _X,
        _with_vjp(_pl_kernel),
        Expected(ZERO, NOT_ANNOTATED, REFUSED),
        out_spec=(),
    ),
)
