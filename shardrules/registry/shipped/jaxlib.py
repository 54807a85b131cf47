"""jaxlib's own FFI targets, as its modules register them (read in jaxlib 0.4.28 to 0.12).

Left out are those that run somebody's kernel (``triton_kernel_call_ffi``): that says nothing.
"""

from __future__ import annotations

from shardrules.registry.shipped import Shipped

_TYPES = "sdcz"
# LAPACK's routines by their names without the letter of the type.
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
# And those whose names depend on whether the matrix is real or complex.
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
_CUSPARSE = {
    f"{form}_{what}": f"{why}, up to the order of sums"
    for form in ("coo", "csr")
    for what, why in (
        ("todense", "a sparse matrix made dense"),
        ("fromdense", "a dense matrix made sparse"),
        ("matvec", "a sparse matrix times a vector"),
        ("matmat", "a sparse matrix times a matrix"),
    )
} | dict.fromkeys(("gtsv2", "gtsv2_f32", "gtsv2_f64"), "a tridiagonal solve")


def _lapack() -> dict[str, str]:
    names = {t + name: why for name, why in _LAPACK.items() for t in _TYPES}
    for (real, imaginary), why in _REAL_COMPLEX.items():
        names |= {t + (real if t in "sd" else imaginary): why for t in _TYPES}
    said = {
        f"lapack_{name}{form}": f"{why} by LAPACK"
        for name, why in names.items()
        for form in ("", "_ffi")
    }
    solve = f"{_LAPACK['trsm']} by BLAS"
    return said | {f"blas_{t}trsm{form}": solve for t in _TYPES for form in ("", "_ffi")}


def _both(prefix: str, names: dict[str, str], library: str) -> dict[str, str]:
    """Name each target as it is called from JAX 0.4.35 on, and before."""
    return {
        f"{prefix}_{name}{form}": f"{why} by {library}"
        for name, why in names.items()
        for form in ("", "_ffi")
    }


def _on(prefix: str) -> dict[str, str]:
    """Name the targets of one kind of GPU: jaxlib compiles one source for each."""
    return {
        **_both(f"{prefix}solver", _CUSOLVER, f"{prefix}SOLVER"),
        **_both(f"{prefix}blas", {"getrf_batched": "LU factorizations"}, f"{prefix}BLAS"),
        **_both(f"{prefix}blas", {"geqrf_batched": "QR factorizations"}, f"{prefix}BLAS"),
        **_both(f"{prefix}sparse", _CUSPARSE, f"{prefix}SPARSE"),
        # Its dropout's generator starts from a constant in each call.
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


RULES = Shipped(
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
