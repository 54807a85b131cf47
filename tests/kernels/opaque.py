"""The operation `2 * x` behind each kind of opaque call that runs on CPU, and the types it gets."""

from __future__ import annotations

import ctypes
import functools
import pathlib
import subprocess
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import mlir

FFI_TARGET = "shardrules_test_double"

_FFI_SOURCE = r"""
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
static ffi::Error Double(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  for (size_t i = 0; i < x.element_count(); ++i)
    y->typed_data()[i] = 2 * x.typed_data()[i];
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(ShardrulesTestDouble, Double,
    ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());
"""


def plain(x):
    """Return the plain type of x's value: a shape and a dtype, and no word on mesh axes."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def annotated(x, like=None):
    """Return x's type, said to vary over the axes that `like` (x unless given) varies over."""
    like = x if like is None else like
    axes = jax.typeof(like).manual_axis_type
    return jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=axes)


# --- pallas_call -----------------------------------------------------------------------------


def double_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


def mul_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] * y_ref[...]


def copy_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def idle_kernel(x_ref, o_ref):
    """Leave o_ref as the device's memory happens to be."""
    del x_ref, o_ref


def where_kernel(o_ref):
    """Write which device this is: a result that varies, of no inputs."""
    o_ref[...] = jnp.full(o_ref.shape, jax.lax.axis_index("data"), o_ref.dtype)


def pallas_double(x, out=plain, interpret=True):
    """Double x; `out` makes its output's type."""
    return pl.pallas_call(double_kernel, out_shape=out(x), interpret=interpret)(x)


def pallas_copy(x, out=plain):
    """Copy x row by row."""
    row = pl.BlockSpec((1, *x.shape[1:]), lambda i: (i, 0))
    return pl.pallas_call(
        copy_kernel,
        out_shape=out(x),
        grid=x.shape[:1],
        in_specs=[row],
        out_specs=row,
        interpret=True,
    )(x)


def pallas_mul(x, y, out=annotated):
    """Multiply x by y, which has its shape; the output's type is made from x's."""
    return pl.pallas_call(mul_kernel, out_shape=out(x), interpret=True)(x, y)


@jax.custom_vjp
def pallas_scale(x, w):
    """Multiply every row of x by w, with kernels for backward pass as for forward."""
    return pallas_mul(x, jnp.broadcast_to(w, x.shape))


def _pallas_scale_bwd(residuals, g):
    x, w = residuals
    return pallas_mul(g, jnp.broadcast_to(w, g.shape)), pallas_mul(g, x).sum(0)


pallas_scale.defvjp(lambda x, w: (pallas_scale(x, w), (x, w)), _pallas_scale_bwd)


def mosaic_gpu_double(x):
    """Double x in a Mosaic GPU kernel."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.kernel(double_kernel, out_type=plain(x))(x)


_MOSAIC_DOUBLE = """
func.func @main(%x: {ref}, %o: {ref}) attributes {{
    dimension_semantics = [], scalar_prefetch = 0 : i64, scratch_operands = 0 : i64}} {{
  %i = arith.constant 0 : index
  %v = vector.load %x[%i, %i] : {ref}, vector<{shape}xf32>
  %d = arith.addf %v, %v : vector<{shape}xf32>
  vector.store %d, %o[%i, %i] : {ref}, vector<{shape}xf32>
  return
}}
"""


def raw_mosaic_double(x):
    """Double the f32 matrix x in a TPU kernel that is written in MLIR: a bare tpu_custom_call."""
    from jax.experimental import mosaic
    from jax.experimental.mosaic.dialects import tpu
    from jaxlib.mlir import ir

    shape = "x".join(map(str, x.shape))
    text = _MOSAIC_DOUBLE.format(shape=shape, ref=f"memref<{shape}xf32, #tpu.memory_space<vmem>>")
    context = mlir.make_ir_context()
    tpu.register_dialect(context)
    context.load_all_available_dialects()
    with context, ir.Location.unknown(context):
        module = ir.Module.parse(text)
        return mosaic.as_tpu_kernel(module, plain(x), kernel_name="raw_mosaic_double")(x)


# --- FFI -------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=None)
def _register_ffi():
    with tempfile.TemporaryDirectory() as folder:
        source, library = pathlib.Path(folder, "double.cc"), pathlib.Path(folder, "double.so")
        source.write_text(_FFI_SOURCE)
        subprocess.run(
            [
                "g++",
                "-shared",
                "-fPIC",
                "-std=c++17",
                "-I",
                jax.ffi.include_dir(),
                str(source),
                "-o",
                str(library),
            ],
            check=True,
            capture_output=True,
        )
        handler = ctypes.CDLL(str(library)).ShardrulesTestDouble
    jax.ffi.register_ffi_target(FFI_TARGET, jax.ffi.pycapsule(handler), platform="cpu")


def ffi_double(x, out=plain):
    """Double x in C++; the handler is compiled on first use."""
    _register_ffi()
    return jax.ffi.ffi_call(FFI_TARGET, out(x))(x)


# --- callbacks -------------------------------------------------------------------------------


def double_on_host(x):
    return np.asarray(x) * np.float32(2)


def pure_double(x, out=plain):
    return jax.pure_callback(double_on_host, out(x), x)


def io_double(x, out=plain):
    return io_callback(double_on_host, out(x), x)


# --- a user's primitives ---------------------------------------------------------------------


def _primitive(name, implementation, out_shape=lambda x: x.shape):
    p = Primitive(name)
    p.def_impl(implementation)
    p.def_abstract_eval(lambda x: jax.core.ShapedArray(out_shape(x), x.dtype))
    mlir.register_lowering(p, mlir.lower_fun(implementation, multiple_results=False))
    return p


double_p = _primitive("shardrules_test_double_primitive", lambda x: 2 * x)
DATA_SIZE = 4
# An all-gather of one's own over `data`. Its output is typed invariant, which is right.
gather_p = _primitive(
    "shardrules_test_gather_primitive",
    lambda x: jax.lax.all_gather(x, "data", tiled=True),
    lambda x: (DATA_SIZE * x.shape[0], *x.shape[1:]),
)


def primitive_double(x):
    return double_p.bind(x)


# --- refs ------------------------------------------------------------------------------------


def ref_double(x):
    """Double x by way of a ref that starts from zeros."""
    ref = jax.new_ref(jnp.zeros(x.shape, x.dtype))
    ref[...] = 2 * x
    return ref[...]


def run_state_double(x):
    """Double x by way of `run_state`, whose output ref starts from zeros."""

    def body(refs):
        x_ref, o_ref = refs
        o_ref[...] = x_ref[...] * 2

    return pl.run_state(body)((x, jnp.zeros(x.shape, x.dtype)))[1]
