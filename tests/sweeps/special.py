"""The functions of JAX that need more than arrays of one kind, and the calls that give it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

lax = jax.lax
N = 4


def key(data):
    """Return a key of its data."""
    return jax.random.wrap_key_data(data, impl="threefry2x32")


def _scatter(f):
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))

    def call(x, n, v):
        return f(x, n[None, None] % N, v[None, :], numbers)

    return [
        ("Mnv", call),
        ("Iin", lambda x, i, n: f(x, i[:, None], jnp.broadcast_to(n, (N, N)), numbers)),
    ]


def _gather(x, i):
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
    return lax.gather(x, i[:, None], numbers, (1, N))


def _convolution(function, **more):
    return "TW", lambda x, w: function(
        x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"), **more
    )


def _while(x, n):
    return lax.while_loop(lambda c: c[1] < 6, lambda c: (jnp.sin(c[0]), c[1] + 1), (x, n))


def _solve_method(method):
    return "Mv", lambda m, v: method(lambda x: m @ x, v)


def _distribution(f, *letters):
    return "k" + "".join(letters), lambda k, *more: f(key(k), *more)


# From a function to the letters of its arrays and a call, or to several of them.
SPECIAL: dict[str, Any] = {
    # jax.numpy
    "numpy.apply_along_axis": ("M", lambda x: jnp.apply_along_axis(jnp.sum, 0, x)),
    "numpy.apply_over_axes": ("M", lambda x: jnp.apply_over_axes(jnp.sum, x, [0])),
    "numpy.argwhere": ("M", lambda x: jnp.argwhere(x > 0.5, size=N)),
    "numpy.bincount": [
        ("i", lambda i: jnp.bincount(i, length=N)),
        ("iv", lambda i, w: jnp.bincount(i, weights=w, length=N)),
    ],
    "numpy.block": ("MM", lambda x, y: jnp.block([[x, y], [y, x]])),
    "numpy.choose": ("iII", lambda i, x, y: jnp.choose(i % 2, [x, y], mode="clip")),
    "numpy.clip": ("Mss", lambda x, a, b: jnp.clip(x, a * 0.5, b + 0.5)),
    "numpy.compress": ("bM", lambda b, x: jnp.compress(b, x, axis=0, size=N)),
    "numpy.cross": ("MM", lambda x, y: jnp.cross(x[:, :3], y[:, :3])),
    "numpy.delete": ("vn", lambda x, n: jnp.delete(x, n[None], assume_unique_indices=True)),
    "numpy.einsum": [
        ("MM", lambda x, y: jnp.einsum("ij,jk->ik", x, y)),
        ("MMv", lambda x, y, z: jnp.einsum("ij,jk,k->i", x, y, z)),
    ],
    "numpy.extract": ("Bv", lambda b, x: jnp.extract(b[0], x, size=N)),
    "numpy.fill_diagonal": ("Mv", lambda x, v: jnp.fill_diagonal(x, v, inplace=False)),
    "numpy.flatnonzero": ("I", lambda x: jnp.flatnonzero(x, size=N)),
    "numpy.frexp": ("M", jnp.frexp),
    "numpy.full": ("s", lambda v: jnp.full((N,), v)),
    "numpy.geomspace": ("ss", lambda x, y: jnp.geomspace(x, y, N)),
    "numpy.histogram": ("vvv", lambda x, b, w: jnp.histogram(x, jnp.sort(b), weights=w)),
    "numpy.histogram2d": ("vvv", lambda x, y, w: jnp.histogram2d(x, y, 3, weights=w)),
    "numpy.histogramdd": ("Mv", lambda x, w: jnp.histogramdd(x[:, :2], 3, weights=w)),
    "numpy.insert": ("Mnv", lambda x, i, v: jnp.insert(x, i, v, axis=0)),
    "numpy.interp": [
        ("sovss", lambda x, p, f, a, b: jnp.interp(x, p, f, left=a, right=b)),
        ("vov", jnp.interp),
    ],
    "numpy.intersect1d": ("ii", lambda x, y: jnp.intersect1d(x, y, size=N, return_indices=True)),
    "numpy.linspace": ("ss", lambda x, y: jnp.linspace(x, y, N)),
    "numpy.logspace": ("ss", lambda x, y: jnp.logspace(x, y, N)),
    "numpy.nonzero": ("I", lambda x: jnp.nonzero(x, size=N)),
    "numpy.packbits": ("8", jnp.packbits),
    "numpy.piecewise": ("vs", lambda x, s: jnp.piecewise(x, [x < s, x >= s], [jnp.sin, jnp.cos])),
    "numpy.place": ("MBv", lambda x, b, v: jnp.place(x, b, v, inplace=False)),
    "numpy.put": ("Miv", lambda x, i, v: jnp.put(x, i, v, inplace=False)),
    "numpy.put_along_axis": (
        "MIM",
        lambda x, i, v: jnp.put_along_axis(x, i, v, axis=0, inplace=False),
    ),
    "numpy.ravel_multi_index": (
        "ii",
        lambda x, y: jnp.ravel_multi_index((x, y), (N, N), mode="clip"),
    ),
    "numpy.repeat": [
        ("Mi", lambda x, i: jnp.repeat(x, i, axis=0, total_repeat_length=N)),
        ("M", lambda x: jnp.repeat(x, 2, axis=0)),
    ],
    "numpy.resize": ("M", lambda x: jnp.resize(x, (2, 9))),
    "numpy.roots": ("v", lambda x: jnp.roots(x, strip_zeros=False)),
    "numpy.select": ("BBMMs", lambda a, b, x, y, d: jnp.select([a, b], [x, y], d)),
    "numpy.setdiff1d": ("ii", lambda x, y: jnp.setdiff1d(x, y, size=N)),
    "numpy.setxor1d": ("ii", lambda x, y: jnp.setxor1d(x, y, size=N)),
    "numpy.squeeze": ("M", lambda x: jnp.squeeze(x[None])),
    "numpy.take": [("Mi", jnp.take), ("Mi", lambda x, i: jnp.take(x, i, axis=1, mode="fill"))],
    "numpy.take_along_axis": ("MI", lambda x, i: jnp.take_along_axis(x, i, 0)),
    "numpy.tensordot": ("MM", lambda x, y: jnp.tensordot(x, y, 1)),
    "numpy.trapezoid": [("vv", jnp.trapezoid), ("vvs", lambda x, y, d: jnp.trapezoid(x, dx=d))],
    "numpy.union1d": ("ii", lambda x, y: jnp.union1d(x, y, size=N)),
    "numpy.unique": (
        "i",
        lambda x: jnp.unique(x, size=N, return_index=True, return_inverse=True, return_counts=True),
    ),
    "numpy.unique_all": ("i", lambda x: jnp.unique_all(x, size=N)),
    "numpy.unique_counts": ("i", lambda x: jnp.unique_counts(x, size=N)),
    "numpy.unique_inverse": ("i", lambda x: jnp.unique_inverse(x, size=N)),
    "numpy.unique_values": ("i", lambda x: jnp.unique_values(x, size=N)),
    "numpy.unpackbits": ("8", jnp.unpackbits),
    "numpy.unravel_index": ("i", lambda i: jnp.unravel_index(i, (2, 2))),
    "numpy.vectorize": ("MM", lambda x, y: jnp.vectorize(jnp.dot, signature="(n),(n)->()")(x, y)),
    "numpy.where": [("BMM", jnp.where), ("Bss", jnp.where)],
    "numpy.diag_indices_from": ("M", jnp.diag_indices_from),
    "numpy.fromfunction": ("s", lambda s: jnp.fromfunction(lambda i, j: i + j + s, (N, N))),
    "numpy.frompyfunc": ("MM", lambda x, y: jnp.frompyfunc(jnp.add, 2, 1, identity=0).outer(x, y)),
    "numpy.pad": [
        ("Ms", lambda x, s: jnp.pad(x, 1, constant_values=s)),
        ("M", lambda x: jnp.pad(x, 1, mode="linear_ramp")),
    ],
    "numpy.unwrap": ("vs", lambda x, s: jnp.unwrap(x * 10, period=s)),
    "numpy.gradient": [("M", jnp.gradient), ("vs", lambda x, s: jnp.gradient(x, s))],
    "numpy.polyfit": ("vv", lambda x, y: jnp.polyfit(x, y, 1)),
    "numpy.polydiv": ("v2", lambda u, v: jnp.polydiv(u, v)),
    "numpy.bool_": ("v", jnp.bool_),
    "numpy.quantile": ("vs", jnp.quantile),
    "numpy.nanquantile": ("vs", jnp.nanquantile),
    "numpy.matvec": ("Mv", lambda x, y: jnp.matvec(x, y)),
    "numpy.vecmat": ("vM", lambda x, y: jnp.vecmat(x, y)),
    "numpy.lexsort": ("vv", lambda x, y: jnp.lexsort((x, y))),
    "numpy.searchsorted": [
        ("ov", jnp.searchsorted),
        ("os", lambda x, y: jnp.searchsorted(x, y, method="sort")),
    ],
    "numpy.ediff1d": ("vss", lambda x, a, b: jnp.ediff1d(x, a, b)),
    "numpy.broadcast_to": ("v", lambda x: jnp.broadcast_to(x, (2, N))),
    "numpy.reshape": ("M", lambda x: jnp.reshape(x, (2, -1))),
    "numpy.cov": [
        ("MM", lambda x, y: jnp.cov(x, y)),
        ("Miv", lambda x, f, a: jnp.cov(x, fweights=f, aweights=a)),
    ],
    "numpy.linalg.matrix_power": ("M", lambda x: jnp.linalg.matrix_power(x, 3)),
    "numpy.linalg.cross": ("MM", lambda x, y: jnp.linalg.cross(x[:, :3], y[:, :3])),
    "numpy.linalg.multi_dot": ("MMv", lambda x, y, z: jnp.linalg.multi_dot([x, y, z])),
    "numpy.linalg.tensorinv": ("M", lambda x: jnp.linalg.tensorinv(x, ind=1)),
    "numpy.linalg.tensordot": ("MM", lambda x, y: jnp.linalg.tensordot(x, y, axes=1)),
    "numpy.linalg.matrix_rank": ("Ms", lambda x, s: jnp.linalg.matrix_rank(x, s)),
    # jax.lax
    "lax.approx_max_k": ("v", lambda x: lax.approx_max_k(x, 2)),
    "lax.approx_min_k": ("v", lambda x: lax.approx_min_k(x, 2)),
    "lax.argmax": ("M", lambda x: lax.argmax(x, 0, np.int32)),
    "lax.argmin": ("M", lambda x: lax.argmin(x, 0, np.int32)),
    "lax.associative_scan": [
        ("M", lambda x: lax.associative_scan(jnp.add, x)),
        (
            "MM",
            lambda x, y: lax.associative_scan(
                lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (x, y)
            ),
        ),
    ],
    "lax.batch_matmul": ("MM", lambda x, y: lax.batch_matmul(x[None], y[None])),
    "lax.betainc": [("vvv", lax.betainc), ("sss", lax.betainc)],
    "lax.bitcast_convert_type": ("v", lambda x: lax.bitcast_convert_type(x, np.int32)),
    "lax.broadcast_in_dim": ("v", lambda x: lax.broadcast_in_dim(x, (2, N), (1,))),
    "lax.broadcast_to_rank": ("v", lambda x: lax.broadcast_to_rank(x, 3)),
    "lax.clamp": [("vvv", lax.clamp), ("sMs", lax.clamp)],
    "lax.collapse": ("M", lambda x: lax.collapse(x, 0, 2)),
    "lax.composite": ("vv", lambda x, y: lax.composite(lambda x, y: x + y, "some.add")(x, y)),
    "lax.concatenate": ("vv", lambda x, y: lax.concatenate([x, y], 0)),
    "lax.cond": [
        ("pvv", lambda p, x, y: lax.cond(p, lambda x, y: x, lambda x, y: y, x, y)),
        ("pv", lambda p, x: lax.cond(p, lambda: x, lambda: jnp.ones(N))),
        ("p", lambda p: lax.cond(p, lambda: (1.0, 2.0), lambda: (3.0, 2.0))),
    ],
    "lax.conv": ("TT", lambda x, w: lax.conv(x, w, (1, 1), "SAME")),
    "lax.conv_general_dilated": [
        _convolution(lax.conv_general_dilated),
        _convolution(lax.conv_general_dilated, rhs_dilation=(2, 2)),
    ],
    "lax.conv_general_dilated_local": (
        "TT",
        lambda x, w: lax.conv_general_dilated_local(
            x,
            jnp.resize(w, (3, 3, 8, 2)),
            (1, 1),
            "VALID",
            (2, 2),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        ),
    ),
    "lax.conv_general_dilated_patches": (
        "T",
        lambda x: lax.conv_general_dilated_patches(x, (2, 2), (1, 1), "VALID"),
    ),
    "lax.conv_transpose": (
        "TW",
        lambda x, w: lax.conv_transpose(
            x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
    ),
    "lax.conv_with_general_padding": (
        "TT",
        lambda x, w: lax.conv_with_general_padding(x, w, (1, 1), [(1, 1), (1, 1)], None, None),
    ),
    "lax.convert_element_type": ("v", lambda x: lax.convert_element_type(x, np.float16)),
    "lax.custom_linear_solve": (
        "Mv",
        lambda m, v: lax.custom_linear_solve(
            lambda x: m @ x, v, lambda _, v: jnp.linalg.solve(m, v), symmetric=True
        ),
    ),
    "lax.custom_root": (
        "ss",
        lambda s, x: lax.custom_root(
            lambda x: x * x - s,
            x,
            lambda f, x: lax.fori_loop(0, 4, lambda _, x: (x + s / x) / 2, x),
            lambda g, y: y / g(jnp.ones_like(y)),
        ),
    ),
    "lax.dot_general": [
        ("MM", lambda x, y: lax.dot_general(x, y, (((1,), (0,)), ((), ())))),
        ("II", lambda x, y: lax.dot_general(x, y, (((1,), (0,)), ((), ())))),
    ],
    "lax.dynamic_index_in_dim": ("Mn", lambda x, i: lax.dynamic_index_in_dim(x, i, 0)),
    "lax.dynamic_slice": ("Mnn", lambda x, i, j: lax.dynamic_slice(x, (i, j), (2, 2))),
    "lax.dynamic_slice_in_dim": ("Mn", lambda x, i: lax.dynamic_slice_in_dim(x, i, 2)),
    "lax.dynamic_update_index_in_dim": (
        "Mvn",
        lambda x, v, i: lax.dynamic_update_index_in_dim(x, v, i, 0),
    ),
    "lax.dynamic_update_slice": (
        "vMn",
        lambda v, x, i: lax.dynamic_update_slice(x, v[None], (i, 0)),
    ),
    "lax.dynamic_update_slice_in_dim": (
        "Mvn",
        lambda x, v, i: lax.dynamic_update_slice_in_dim(x, v[None], i, 0),
    ),
    "lax.expand_dims": ("v", lambda x: lax.expand_dims(x, (0,))),
    "lax.fft": ("C", lambda x: lax.fft(x, "fft", (N,))),
    "lax.fori_loop": [
        ("Ms", lambda x, s: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) * s, x)),
        ("nv", lambda n, x: lax.fori_loop(0, n, lambda i, c: c + 1, x)),
    ],
    "lax.full": ("s", lambda s: lax.full((N,), s)),
    "lax.full_like": ("vs", lambda x, s: lax.full_like(x, s)),
    "lax.gather": ("Mi", _gather),
    "lax.index_take": ("Mi", lambda x, i: lax.index_take(x, (i,), (0,))),
    "lax.integer_pow": ("v", lambda x: lax.integer_pow(x, 3)),
    "lax.map": ("Ms", lambda x, s: lax.map(lambda r: r * s, x)),
    "lax.nextafter": ("vv", lax.nextafter),
    "lax.optimization_barrier": ("vv", lambda x, y: lax.optimization_barrier((x, y))),
    "lax.pad": ("Ms", lambda x, s: lax.pad(x, s, [(1, 1, 0), (0, 0, 1)])),
    "lax.platform_dependent": (
        "vv",
        lambda x, y: lax.platform_dependent(x, y, cpu=jnp.add, default=jnp.multiply),
    ),
    "lax.polygamma": ("vv", lambda x, y: lax.polygamma(jnp.round(x) + 1, y)),
    "lax.ragged_dot": (
        "MTi",
        lambda x, w, i: lax.ragged_dot(x, jnp.resize(w, (N, N, 2)), (i > 1).astype(np.int32)),
    ),
    "lax.ragged_dot_general": (
        "MTi",
        lambda x, w, i: lax.ragged_dot_general(
            x,
            jnp.resize(w, (N, N, 2)),
            (i > 1).astype(np.int32),
            lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0]),
        ),
    ),
    "lax.random_gamma_grad": ("vv", lax.random_gamma_grad),
    "lax.reduce": [
        ("Ms", lambda x, s: lax.reduce(x, s, lax.add, (0,))),
        (
            "MIsn",
            lambda x, i, s, n: lax.reduce(
                (x, i), (s, n), lambda a, b: (a[0] + b[0], a[1] | b[1]), (0,)
            ),
        ),
        (
            "MMss",
            lambda x, y, s, t: lax.reduce(
                (x, y),
                (s, t),
                lambda a, b: (lax.max(a[0], b[0]), lax.select(a[0] > b[0], a[1], b[1])),
                (0,),
            ),
        ),
    ],
    "lax.reduce_and": ("B", lambda x: lax.reduce_and(x, (0,))),
    "lax.reduce_or": ("B", lambda x: lax.reduce_or(x, (0,))),
    "lax.reduce_xor": ("I", lambda x: lax.reduce_xor(x, (0,))),
    "lax.reduce_max": ("M", lambda x: lax.reduce_max(x, (0,))),
    "lax.reduce_min": ("M", lambda x: lax.reduce_min(x, (0,))),
    "lax.reduce_prod": ("M", lambda x: lax.reduce_prod(x, (0,))),
    "lax.reduce_sum": ("M", lambda x: lax.reduce_sum(x, (0,))),
    "lax.reduce_precision": ("M", lambda x: lax.reduce_precision(x, 5, 3)),
    "lax.reduce_window": [
        ("Ms", lambda x, s: lax.reduce_window(x, s, lax.add, (2, 2), (1, 1), "SAME")),
        ("M", lambda x: lax.reduce_window(x, -np.inf, lax.max, (2, 2), (1, 1), "VALID")),
        ("M", lambda x: lax.reduce_window(x, np.float32(0), lax.add, (2, 2), (1, 1), "VALID")),
    ],
    "lax.reshape": ("M", lambda x: lax.reshape(x, (2, 2 * N))),
    "lax.rng_bit_generator": ("U", lambda k: lax.rng_bit_generator(k, (N,))),
    "lax.rng_uniform": [
        ("ss", lambda a, b: lax.rng_uniform(a * 0.1, b + 1, (N,))),
        ("", lambda: lax.rng_uniform(np.float32(0), np.float32(1), (64,))),
    ],
    "lax.scaled_dot": (
        "MMss",
        lambda x, y, s, t: lax.scaled_dot(
            jnp.resize(x, (1, N, 32)).astype(jnp.float8_e4m3fn),
            jnp.resize(y, (1, 32, N)).astype(jnp.float8_e4m3fn),
            lhs_scale=jnp.broadcast_to(s, (1, N, 1)).astype(jnp.float8_e8m0fnu),
            rhs_scale=jnp.broadcast_to(t, (1, 1, N)).astype(jnp.float8_e8m0fnu),
            preferred_element_type=np.float32,
        ),
    ),
    "lax.scan": [
        ("vM", lambda c, x: lax.scan(lambda c, x: (jnp.sin(c), c * x), c, x)),
        ("sMv", lambda c, x, w: lax.scan(lambda c, x: (c + (x * w).sum(), c), c, x)),
        ("M", lambda x: lax.scan(lambda c, x: (c + x, None), jnp.zeros(N), x)[0]),
    ],
    "lax.scatter": _scatter(lax.scatter),
    "lax.scatter_add": _scatter(lax.scatter_add),
    "lax.scatter_apply": (
        "Mi",
        lambda x, i: lax.scatter_apply(
            x,
            i[:, None],
            jnp.sin,
            lax.ScatterDimensionNumbers((1,), (0,), (0,)),
            update_shape=(N, N),
        ),
    ),
    "lax.scatter_max": _scatter(lax.scatter_max),
    "lax.scatter_min": _scatter(lax.scatter_min),
    "lax.scatter_mul": _scatter(lax.scatter_mul),
    "lax.scatter_sub": _scatter(getattr(lax, "scatter_sub", None)),
    "lax.select": [("BMM", lax.select), ("pvv", lax.select)],
    "lax.select_n": [("BMM", lax.select_n), ("nvvvv", lambda n, *x: lax.select_n(n, *x))],
    "lax.shift_left": ("ii", lax.shift_left),
    "lax.slice": ("M", lambda x: lax.slice(x, (1, 1), (3, 3))),
    "lax.slice_in_dim": ("M", lambda x: lax.slice_in_dim(x, 1, 3)),
    "lax.sort": [
        ("v", lax.sort),
        ("vv", lambda x, y: lax.sort((x, y), num_keys=1)),
        ("viv", lambda x, y, z: lax.sort((x, y, z), num_keys=2)),
    ],
    "lax.sort_key_val": ("vv", lax.sort_key_val),
    "lax.split": ("M", lambda x: lax.split(x, (1, 3))),
    "lax.squeeze": ("v", lambda x: lax.squeeze(x[None], (0,))),
    "lax.switch": [
        ("nvv", lambda n, x, y: lax.switch(n, [lambda x, y: x, lambda x, y: x * y], x, y)),
        ("nv", lambda n, x: lax.switch(n % 3, [lambda: x, lambda: 2 * x, lambda: jnp.ones(N)])),
    ],
    "lax.top_k": ("v", lambda x: lax.top_k(x, 2)),
    "lax.transpose": ("M", lambda x: lax.transpose(x, (1, 0))),
    "lax.tile": ("v", lambda x: lax.tile(x, (2,))),
    "lax.while_loop": [
        ("vn", _while),
        (
            "nv",
            lambda n, x: lax.while_loop(
                lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x)
            ),
        ),
        (
            "n",
            lambda n: lax.while_loop(
                lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 2.0), (0, 1.0)
            )[1],
        ),
    ],
    "lax.broadcast": ("v", lambda x: lax.broadcast(x, (2,))),
    "lax.broadcasted_iota": ("v", lambda x: lax.broadcasted_iota(np.int32, (N, N), 0) + x),
    "lax.index_in_dim": ("M", lambda x: lax.index_in_dim(x, 1)),
    "lax.rev": ("M", lambda x: lax.rev(x, (0,))),
    "lax.unstack": ("M", lambda x: lax.unstack(x)),
    "lax.stack": ("vv", lambda x, y: lax.stack([x, y])),
    "lax.mulhi": ("ii", lambda x, y: lax.mulhi(x, y)),
    "lax.real": ("C", lax.real),
    "lax.imag": ("C", lax.imag),
    "lax.linalg.cholesky_update": ("Mv", lambda x, v: lax.linalg.cholesky_update(x, v)),
    "lax.linalg.householder_product": ("Mv", lax.linalg.householder_product),
    "lax.linalg.lu_pivots_to_permutation": (
        "i",
        lambda i: lax.linalg.lu_pivots_to_permutation(jnp.maximum(i, jnp.arange(N)), N),
    ),
    "lax.linalg.ormqr": ("MvM", lambda x, t, y: lax.linalg.ormqr(x, t, y)),
    "lax.linalg.symmetric_product": (
        "MM",
        lambda x, y: lax.linalg.symmetric_product(x, y, alpha=1.0, beta=1.0),
    ),
    "lax.linalg.triangular_solve": (
        "MM",
        lambda x, y: lax.linalg.triangular_solve(x, y, left_side=True, lower=True),
    ),
    "lax.linalg.tridiagonal_solve": (
        "vvvM",
        lambda a, d, b, x: lax.linalg.tridiagonal_solve(a * 0.1, d + 1, b * 0.1, x),
    ),
    # jax.scipy
    "scipy.linalg.cho_solve": ("MM", lambda x, y: jax.scipy.linalg.cho_solve((x, True), y)),
    "scipy.linalg.eigh_tridiagonal": (
        "Lv",
        lambda d, e: jax.scipy.linalg.eigh_tridiagonal(d[:N], e[1:], eigvals_only=True),
    ),
    "scipy.linalg.expm_frechet": ("MM", jax.scipy.linalg.expm_frechet),
    "scipy.linalg.funm": ("M", lambda x: jax.scipy.linalg.funm(x, jnp.exp)),
    "scipy.linalg.leslie": ("vL", lambda f, s: jax.scipy.linalg.leslie(f, s[:3])),
    "scipy.linalg.lu_solve": (
        "MiM",
        lambda x, i, y: jax.scipy.linalg.lu_solve((x, jnp.maximum(i, jnp.arange(N))), y),
    ),
    "scipy.linalg.convolution_matrix": ("v", lambda x: jax.scipy.linalg.convolution_matrix(x, 3)),
    "scipy.linalg.solve_sylvester": (
        "MMM",
        lambda x, y, z: jax.scipy.linalg.solve_sylvester(x, y, z),
    ),
    "scipy.linalg.rsf2csf": ("MM", lambda x, y: jax.scipy.linalg.rsf2csf(x, y)),
    "scipy.special.bessel_jn": ("s", lambda s: jax.scipy.special.bessel_jn(s, v=2)),
    "scipy.special.expn": ("iv", lambda i, v: jax.scipy.special.expn(i + 1, v)),
    "scipy.special.polygamma": ("iv", lambda i, v: jax.scipy.special.polygamma(i + 1, v)),
    "scipy.special.zeta": ("vv", lambda x, q: jax.scipy.special.zeta(x + 1, q)),
    "scipy.special.factorial": ("i", jax.scipy.special.factorial),
    "scipy.special.gammasgn": ("v", jax.scipy.special.gammasgn),
    "scipy.special.comb": ("ii", lambda x, y: jax.scipy.special.comb(x, y)),
    "scipy.special.multigammaln": ("v", lambda x: jax.scipy.special.multigammaln(x + 2, 2)),
    "scipy.special.sph_harm_y": (
        "iivv",
        lambda n, m, t, p: jax.scipy.special.sph_harm_y(n, m, t, p, n_max=N),
    ),
    "scipy.special.sph_harm": (
        "iivv",
        lambda m, n, t, p: jax.scipy.special.sph_harm(m, n, t, p, n_max=N),
    ),
    "scipy.special.lpmn": ("v", lambda z: jax.scipy.special.lpmn(2, 2, z)),
    "scipy.special.lpmn_values": (
        "v",
        lambda z: jax.scipy.special.lpmn_values(2, 2, z, is_normalized=True),
    ),
    "scipy.signal.convolve2d": ("MM", lambda x, y: jax.scipy.signal.convolve2d(x, y)),
    "scipy.signal.csd": ("LL", lambda x, y: jax.scipy.signal.csd(x, y, nperseg=16)),
    "scipy.signal.istft": ("M", lambda x: jax.scipy.signal.istft(x[:3], nperseg=4)),
    "scipy.signal.stft": ("L", lambda x: jax.scipy.signal.stft(x, nperseg=16)),
    "scipy.signal.welch": ("L", lambda x: jax.scipy.signal.welch(x, nperseg=16)),
    "scipy.ndimage.map_coordinates": (
        "Mvv",
        lambda x, i, j: jax.scipy.ndimage.map_coordinates(x, [3 * i, 3 * j], 1),
    ),
    "scipy.sparse.linalg.bicgstab": _solve_method(
        lambda f, v: jax.scipy.sparse.linalg.bicgstab(f, v, maxiter=3)
    ),
    "scipy.sparse.linalg.cg": _solve_method(
        lambda f, v: jax.scipy.sparse.linalg.cg(f, v, maxiter=3)
    ),
    "scipy.sparse.linalg.gmres": _solve_method(
        lambda f, v: jax.scipy.sparse.linalg.gmres(f, v, maxiter=3)
    ),
    "scipy.optimize.minimize": (
        "vv",
        lambda x, y: (
            jax.scipy.optimize.minimize(
                lambda p: ((p - y) ** 2).sum(), x, method="BFGS", options={"maxiter": 2}
            ).x
        ),
    ),
    "scipy.stats.mode": ("i", jax.scipy.stats.mode),
    "scipy.stats.dirichlet.pdf": ("vv", lambda x, a: jax.scipy.stats.dirichlet.pdf(x / x.sum(), a)),
    "scipy.stats.dirichlet.logpdf": (
        "vv",
        lambda x, a: jax.scipy.stats.dirichlet.logpdf(x / x.sum(), a),
    ),
    "scipy.stats.multinomial.pmf": (
        "inv",
        lambda x, n, p: jax.scipy.stats.multinomial.pmf(x, n, p / p.sum()),
    ),
    "scipy.stats.multinomial.logpmf": (
        "inv",
        lambda x, n, p: jax.scipy.stats.multinomial.logpmf(x, n, p / p.sum()),
    ),
    # jax.nn
    "nn.dot_product_attention": [
        ("TTT", lambda q, k, v: jax.nn.dot_product_attention(q, k, v)),
        (
            "TTTs",
            lambda q, k, v, b: jax.nn.dot_product_attention(
                q, k, v, bias=jnp.broadcast_to(b, (1, 1, 1, 1))
            ),
        ),
    ],
    "nn.one_hot": ("i", lambda i: jax.nn.one_hot(i, N)),
    "nn.logsumexp": [("M", jax.nn.logsumexp), ("MM", lambda x, b: jax.nn.logsumexp(x, b=b))],
    "nn.standardize": [
        ("M", jax.nn.standardize),
        ("Mvv", lambda x, m, v: jax.nn.standardize(x, mean=m, variance=v)),
    ],
    "numpy.negative": ("v", lambda x: jnp.negative(x)),
    # jax.random
    "random.PRNGKey": ("n", jax.random.PRNGKey),
    "random.key": ("n", lambda n: jax.random.key_data(jax.random.key(n))),
    "random.wrap_key_data": ("k", lambda k: jax.random.bits(jax.random.wrap_key_data(k))),
    "random.clone": ("k", lambda k: jax.random.bits(jax.random.clone(key(k)))),
    "random.key_data": ("k", lambda k: jax.random.key_data(key(k))),
    "random.split": ("k", lambda k: jax.random.key_data(jax.random.split(key(k), 3))),
    "random.fold_in": ("kn", lambda k, n: jax.random.key_data(jax.random.fold_in(key(k), n))),
    "random.choice": [
        _distribution(lambda k, x: jax.random.choice(k, x, (2,)), "v"),
        _distribution(lambda k, x, p: jax.random.choice(k, x, (3,), p=p / p.sum()), "v", "v"),
        _distribution(
            lambda k, x, p: jax.random.choice(k, x, (3,), replace=False, p=p / p.sum()), "v", "v"
        ),
    ],
    "random.categorical": _distribution(jax.random.categorical, "v"),
    "random.randint": _distribution(
        lambda k, a, b: jax.random.randint(k, (N,), a, b + 9), "n", "n"
    ),
    "random.uniform": _distribution(
        lambda k, a, b: jax.random.uniform(k, (N,), minval=a, maxval=b + 1), "s", "s"
    ),
    "random.truncated_normal": _distribution(
        lambda k, a, b: jax.random.truncated_normal(k, -a, b), "v", "v"
    ),
    "random.gamma": [
        _distribution(jax.random.gamma, "v"),
        _distribution(lambda k: jax.random.gamma(k, 0.5, (N,))),
    ],
    "random.multivariate_normal": _distribution(jax.random.multivariate_normal, "v", "M"),
    "random.permutation": [
        _distribution(jax.random.permutation, "M"),
        _distribution(lambda k: jax.random.permutation(k, 8)),
        _distribution(lambda k, x: jax.random.permutation(k, x, independent=True), "M"),
    ],
    "random.generalized_normal": _distribution(
        lambda k, p: jax.random.generalized_normal(k, p, (N,)), "s"
    ),
    "random.ball": _distribution(lambda k: jax.random.ball(k, 2, 2, (N,))),
    "random.orthogonal": _distribution(lambda k: jax.random.orthogonal(k, 3)),
    "random.multinomial": _distribution(
        lambda k, n, p: jax.random.multinomial(k, n, p / p.sum()), "s", "v"
    ),
    "random.binomial": _distribution(lambda k, n, p: jax.random.binomial(k, n, p), "i", "v"),
    # jax.image, jax.ops
    "image.resize": ("M", lambda x: jax.image.resize(x, (6, 6), "linear")),
    "image.scale_and_translate": (
        "M22",
        lambda x, s, t: jax.image.scale_and_translate(x, (6, 6), (0, 1), s, t, "linear"),
    ),
    **{
        f"ops.segment_{one}": (
            "Mi",
            lambda x, i, one=one: getattr(jax.ops, f"segment_{one}")(x, i, num_segments=N),
        )
        for one in ("max", "min", "prod", "sum")
    },
}
for _name in ("delta_orthogonal",):
    SPECIAL[f"nn.initializers.{_name}"] = (
        "k",
        lambda k: jax.nn.initializers.delta_orthogonal()(key(k), (2, N, N)),
    )
for _name in ("constant", "normal", "orthogonal", "truncated_normal", "uniform"):
    if hasattr(jax.nn.initializers, _name):
        _make = getattr(jax.nn.initializers, _name)
        SPECIAL[f"nn.initializers.{_name}"] = (
            ("s", lambda s: jax.nn.initializers.constant(s)(jax.random.PRNGKey(0), (N, N)))
            if _name == "constant"
            else ("k", lambda k, make=_make: make()(key(k), (N, N)))
        )
SPECIAL["nn.initializers.variance_scaling"] = (
    "k",
    lambda k: jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal")(key(k), (N, N)),
)
for _scheme in ("glorot", "he", "kaiming", "lecun", "xavier"):
    for _kind in ("normal", "uniform"):
        _make = getattr(jax.nn.initializers, f"{_scheme}_{_kind}")
        SPECIAL[f"nn.initializers.{_scheme}_{_kind}"] = (
            "k",
            lambda k, make=_make: make()(key(k), (N, N)),
        )

# XLA's own draws have a state that is each device's own.
BY_DEVICE = {"lax.rng_uniform"}
