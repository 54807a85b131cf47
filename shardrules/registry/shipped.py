"""List the rules that come with shardrules for other libraries' primitives, kernels and targets.

A library's table is used once the library has been imported. The user's own rules win over it, and
so do rules that the library ships itself. Each entry says why it computes a function of its
operands on each device. A primitive is named ``module:attribute``; its rule is bound to that
object, so it doesn't match another primitive of the same name. A kernel is named as ``register``
takes it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Shipped:
    """What we know of one library: names, each with the reason.

    Args:
      primitives: ``module:attribute`` of a primitive.
      kernels: ``module:name`` of a Pallas kernel, or a pattern.
      targets: an FFI target; a Python function of that name isn't matched.
    """

    primitives: Mapping[str, str] = dataclasses.field(default_factory=dict)
    kernels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    targets: Mapping[str, str] = dataclasses.field(default_factory=dict)


# -- jaxlib's own FFI targets ---------------------------------------------------------------------

# The targets' names as jaxlib's modules register them (read in 0.4.28 to 0.12). Targets that run
# any author's kernel (``triton_kernel_call_ffi``) are left out: the name says nothing about it.
_TYPES = "sdcz"
# LAPACK's routines, named without the letter of the type.
_LAPACK = {
    "gees": "a Schur decomposition",
    "geev": "an eigendecomposition",
    "gehrd": "a reduction to Hessenberg form",
    "geqp3": "a QR factorization with column pivots",
    "geqrf": "a QR factorization",
    "gesdd": "a singular value decomposition",
    "gesvd": "a singular value decomposition",
    "getrf": "an LU factorization",
    "gtsv": "a tridiagonal solve",
    "potrf": "a Cholesky factorization",
    "trsm": "a triangular solve",
}
# LAPACK's routines whose names depend on whether the matrix is real or complex.
_REAL_COMPLEX = {
    ("syevd", "heevd"): "an eigendecomposition",
    ("sytrd", "hetrd"): "a reduction to tridiagonal form",
    ("orgqr", "ungqr"): "a product of Householder reflectors",
    ("ormqr", "unmqr"): "a product of Householder reflectors with a matrix",
}
_CUSOLVER = {
    "csrlsvqr": "a sparse solve by QR",
    "geev": _LAPACK["geev"],
    "geqrf": _LAPACK["geqrf"],
    "gesvd": _LAPACK["gesvd"],
    "gesvdj": _LAPACK["gesvd"],
    "gesvdp": _LAPACK["gesvd"],
    "getrf": _LAPACK["getrf"],
    "orgqr": "a product of Householder reflectors",
    "ormqr": "a product of Householder reflectors with a matrix",
    "potrf": _LAPACK["potrf"],
    "syevd": "an eigendecomposition",
    "syevj": "an eigendecomposition",
    "syrk": "a product of a matrix with its transpose",
    "sytrd": "a reduction to tridiagonal form",
}
_SPARSE = {
    "todense": "a sparse matrix made dense",
    "fromdense": "a dense matrix made sparse",
    "matvec": "a sparse matrix times a vector",
    "matmat": "a sparse matrix times a matrix",
}
_CUSPARSE = {
    f"{form}_{what}": f"{why}, up to the order of sums"
    for form, (what, why) in itertools.product(("coo", "csr"), _SPARSE.items())
} | dict.fromkeys(("gtsv2", "gtsv2_f32", "gtsv2_f64"), "a tridiagonal solve")


def _lapack() -> dict[str, str]:
    names: dict[str, str] = {}
    for t in _TYPES:
        names |= {t + name: why for name, why in _LAPACK.items()}
        for (real, imaginary), why in _REAL_COMPLEX.items():
            names[t + (real if t in "sd" else imaginary)] = why
    solves = {f"{t}trsm": _LAPACK["trsm"] for t in _TYPES}
    return {**_both("lapack", names, "LAPACK"), **_both("blas", solves, "BLAS")}


def _both(prefix: str, names: dict[str, str], library: str) -> dict[str, str]:
    """Return each target under two names: the one before JAX 0.4.35, and the one since."""
    said = {f"{prefix}_{name}": f"{why} by {library}" for name, why in names.items()}
    return said | {f"{name}_ffi": why for name, why in said.items()}


def _on(prefix: str) -> dict[str, str]:
    """Return the targets of one kind of GPU; jaxlib compiles the same source for each kind."""
    return {
        **_both(f"{prefix}solver", _CUSOLVER, f"{prefix}SOLVER"),
        **_both(f"{prefix}blas", {"getrf_batched": "LU factorizations"}, f"{prefix}BLAS"),
        **_both(f"{prefix}blas", {"geqrf_batched": "QR factorizations"}, f"{prefix}BLAS"),
        **_both(f"{prefix}sparse", _CUSPARSE, f"{prefix}SPARSE"),
        # The generator of the layer's dropout starts from a constant in each call.
        **_both(f"{prefix}dnn", {"rnn": "a recurrent layer"}, f"{prefix}DNN"),
        **_both(f"{prefix}dnn", {"rnn_bwd": "a recurrent layer's gradient"}, f"{prefix}DNN"),
        **_both(prefix, {"threefry2x32": "random bits as a function of key and counter"}, "jaxlib"),
        **_both(prefix, {"cholesky_update": "a Cholesky factorization's update"}, "jaxlib"),
        f"{prefix}_lu_pivots_to_permutation": "a permutation from pivots",
        f"{prefix}_tridiagonal_solve_perturbed": "a tridiagonal solve",
        f"{prefix}hybrid_eig_real": "an eigendecomposition, on the host",
        f"{prefix}hybrid_eig_comp": "an eigendecomposition, on the host",
        f"{prefix}hybrid_geqp3": "a QR factorization with column pivots, on the host",
    }


JAXLIB = Shipped(
    targets={
        **_lapack(),
        **_on("cu"),
        **_on("hip"),
        "tridiagonal_solve_perturbed_ffi": "a tridiagonal solve",
        "cpu_csr_sparse_dense_ffi": "a sparse matrix times a matrix",
        "dynamic_ducc_fft": "a Fourier transform",
        "ducc_fft": "a Fourier transform",
    }
)

# -- all libraries --------------------------------------------------------------------------------

_KLUJAX = {
    **dict.fromkeys(("dot_f64", "dot_c128"), "a sparse matrix times a matrix"),
    **dict.fromkeys(("solve_f64", "solve_c128"), "a sparse solve"),
}
_TOKAMAX = "tokamax._src.ops"
_ATTENTION = "attention; each tile takes its keys in one order, and its inline code is barriers"

SHIPPED: Mapping[str, Shipped] = {
    # Kernels that the audit can't prove (read in 0.10.2 and 0.12.0.1).
    "jax": Shipped(
        kernels={
            # This is JAX's contract: a program that breaks it is undefined.
            "pure_callback": "its contract is that it is a pure function of its arguments",
            # The scheduler hands out each tile once, and a tile is summed in one order. In a well
            # formed kernel, both blocks of a cluster work on the same tile. (If the call passed
            # cluster_axes, dynamic_scheduling_loop would ensure this, but it doesn't pass them.)
            "jax.experimental.pallas.ops.gpu.blackwell_matmul_mgpu:kernel": (
                "a product; each tile once, summed in one order, if it is well formed: the blocks "
                "of a cluster take one tile together"
            ),
        }
    ),
    "jaxlib": JAXLIB,
    # Primitives that compute values from arrays (read in 0.13). ``noinline`` is left out, since it
    # runs any function of the user. ``error_if`` is a ``jax.pure_callback``, which is listed above.
    "equinox": Shipped(
        primitives={
            "equinox._unvmap:unvmap_all_p": "whether all elements hold, on each device",
            "equinox._unvmap:unvmap_any_p": "whether any element holds, on each device",
            "equinox._unvmap:unvmap_max_p": "the largest element, on each device",
            "equinox.internal._nontraceable:nontraceable_p": "its operand",
            "equinox.internal._nontraceable:nondifferentiable_backward_p": "its operand",
            "equinox.internal._nontraceable:nonbatchable_p": "its operand",
            "equinox.internal._loop.common:select_if_vmap_p": "a selection among its operands",
            "equinox.internal._loop.common:maybe_set_p": "an array with some elements set",
        }
    ),
    # Read in 0.5. Primitives that make or take handles to memory are left out.
    "klujax": Shipped(
        primitives={f"klujax:{name}": why for name, why in _KLUJAX.items()},
        targets=_KLUJAX,  # the primitives lower to targets of the same names
    ),
    # Read in 1.3.
    "jax_finufft": Shipped(
        primitives={
            f"jax_finufft.ops:nufft{number}_p": "a nonuniform Fourier transform" for number in "123"
        }
    ),
    # Kernels for Hopper and Blackwell that the audit can't prove (read in 0.0.12 and 0.0.17), since
    # they contain inline code for barriers among the kernel's own warps, a vote of a warp, unpacked
    # bits, or a scheduler that hands out each tile once. Some kernels for Blackwell are left out,
    # because their results may differ between devices that hold the same arrays: attention of
    # 0.0.12 (a tile without keys overwrites the residuals of all tiles; the backward pass adds
    # floats in no fixed order), the backward pass of 0.0.17 (with a causal mask it leaves parts of
    # dk, dv and dbias unwritten), the gated linear unit (leaves rows beyond the last whole tile
    # unwritten) and ragged_dot of 0.0.12 (a pair of blocks may take different tiles).
    "tokamax": Shipped(
        kernels={
            f"{_TOKAMAX}.attention.pallas_mosaic_gpu_kernel_sm90:kernel": _ATTENTION,
            "tokamax._src.mosaic_gpu:flash_attention_sm90": _ATTENTION,
            "tokamax._src.mosaic_gpu:flash_attention_sm100": (
                "attention; each tile once, its keys in one order; a vote skips what changes "
                "nothing"
            ),
            f"{_TOKAMAX}.ragged_dot.pallas_mosaic_gpu_kernel_sm100:ragged_dot_sm100": (
                "a grouped product; each tile once, summed in one order"
            ),
        }
    ),
}
