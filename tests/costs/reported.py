"""Programs of public reports, rebuilt, and variants of each; beside each what its hint says to type.

Reports that need more than one compiled program have their tests elsewhere: gradients that are n
times too large (jax#3970) in ``test_own_gradients.py``; a gradient that each call of a loop on the
host reduces (axlearn#465), and a fetch in such a loop, in ``tests/watching/test_host_loops.py``; a second
compile for another memory kind in ``tests/watching/test_compiled_again.py``; the reason why a
donated argument isn't reused in ``tests/checks/test_host.py``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import PartitionSpec as P

DATA, MODEL = "data", "model"
BOTH = (DATA, MODEL)  # 8 devices
D = P(DATA)
ALL = ("cpu", "tpu", "gpu")


class Pair(NamedTuple):
    """A program as it was reported, and as its hint says to write it, both under jit."""

    kind: str  # of the first hint
    before: Callable[..., Any]
    after: Callable[..., Any]
    args: list[Any]  # shapes, specs, and element types other than f32
    platforms: tuple[str, ...] = ALL  # where XLA decides so: on others there is no such hint
    outs: Any = None  # specs of the outputs, where they are given
    positive: bool = False  # whether its arguments must be


def constrained(x: Any, *specs: P) -> Any:
    for spec in specs:
        x = lax.with_sharding_constraint(x, spec)
    return x


def mapped(body: Callable[..., Any], ins: Any, outs: Any) -> Any:
    """Map a function over the mesh that is set where it is traced."""
    return lambda *args: jax.shard_map(body, in_specs=ins, out_specs=outs, check_vma=False)(*args)


# -- a custom call's operand gathered: jax#38551, jax#32098, marin#6470 ---------------------------


def positive(x: Any) -> Any:
    return x @ x.swapaxes(1, 2) + jnp.eye(x.shape[-1])


def cholesky(x: Any) -> Any:
    info = jax.ShapeDtypeStruct(x.shape[:1], jnp.int32)
    outs = [jax.ShapeDtypeStruct(x.shape, x.dtype), info]
    return jax.ffi.ffi_call("lapack_spotrf_ffi", outs)(x, uplo=np.uint8(ord("L")))[0]


def solve(a: Any, b: Any) -> Any:
    call = jax.ffi.ffi_call("lapack_strsm_ffi", jax.ShapeDtypeStruct(b.shape, b.dtype))
    flags = {"side": "L", "uplo": "L", "trans_x": "N", "diag": "N"}
    return call(a, b, **{name: np.uint8(ord(flag)) for name, flag in flags.items()})


def local(call: Callable[..., Any], spec: P, count: int = 1) -> Any:
    return mapped(call, (spec,) * count, spec)


def layers_of(call: Callable[..., Any]) -> Callable[..., Any]:
    """Call it in each of four layers."""
    return lambda x: lax.scan(lambda h, _: (call(positive(h)), None), x, None, length=4)[0]


def whole_call(spec: P, shape: tuple[int, ...]) -> Pair:
    return Pair(
        "called whole",
        lambda x: cholesky(positive(x)) * 2,
        lambda x: local(cholesky, spec)(positive(x)) * 2,
        [(shape, spec)],
        ("cpu",),
    )


def tanh_kernel(x: Any, out: Any) -> None:
    out[...] = jnp.tanh(x[...])


def triton_call(x: Any) -> Any:
    """A kernel of 16 rows at a time; TPU kernels are refused under jit."""
    rows = pl.BlockSpec((16, x.shape[1]), lambda i: (i, 0))
    shape, options = jax.ShapeDtypeStruct(x.shape, x.dtype), triton.CompilerParams()
    return pl.pallas_call(
        tanh_kernel,
        shape,
        grid=(len(x) // 16,),
        in_specs=[rows],
        out_specs=rows,
        compiler_params=options,
    )(x)


CALLS = {
    "ffi_call": whole_call(D, (64, 16, 16)),
    "ffi_call_over_both": whole_call(P(BOTH), (32, 8, 8)),
    "ffi_call_of_two": Pair(
        "called whole",
        lambda a, b: solve(positive(a), jnp.sin(b)),
        lambda a, b: local(solve, D, 2)(positive(a), jnp.sin(b)),
        [((64, 16, 16), D), ((64, 16, 8), D)],
        ("cpu",),
    ),
    "ffi_call_in_a_scan": Pair(
        "called whole",
        layers_of(cholesky),
        layers_of(local(cholesky, D)),
        [((64, 16, 16), D)],
        ("cpu",),
    ),
    "pallas_call": Pair(
        "called whole",
        lambda x: triton_call(jnp.sin(x)) + 1,
        lambda x: local(triton_call, D)(jnp.sin(x)) + 1,
        [((256, 128), D)],
        ("gpu",),
    ),
}

# -- a loop's condition that asks all devices: jax#26586, jax#20968, diffrax#407 ------------------


def root(a: Any) -> Any:
    """Newton's square root: each example stops when it is near enough."""
    far = lambda x: (jnp.abs(x * x - a) > 1e-3 * jnp.abs(a)).any()  # noqa: E731
    return lax.while_loop(far, lambda x: (x + a / x) / 2, a)


def roots(a: Any) -> Any:
    """A loop in a loop."""
    return lax.while_loop(lambda x: x > 1.5, root, a + 2)


def steps(a: Any) -> Any:
    """An adaptive step in each of a fixed number of intervals, as ODE solvers take them."""
    return lax.scan(lambda y, _: (root(y + 1), None), a, None, length=3)[0]


def asking(one: Callable[..., Any], shape: tuple[int, ...], spec: P = D) -> Pair:
    each = jax.vmap(one)
    return Pair("asked each trip", each, local(each, spec), [(shape, spec)], positive=True)


ASKED = {
    "vmap_of_while": asking(root, (64,)),
    "while_of_vectors": asking(root, (64, 8)),
    "while_over_both": asking(root, (64,), P(BOTH)),
    "while_in_while": asking(roots, (64,)),
    "while_in_scan": asking(steps, (64,)),
}

# -- gradient accumulation under jit: MaxText PR 5099 ---------------------------------------------


def mse(ws: Any, x: Any) -> Any:
    h = x
    for w in ws:
        h = jnp.tanh(h @ w)
    return (h.astype(jnp.float32) ** 2).mean()


def accumulating(*ws_and_x: Any) -> Any:
    *ws, xs = ws_and_x
    add = lambda g, x: (jax.tree.map(jnp.add, g, jax.grad(mse)(ws, x)), None)  # noqa: E731
    return lax.scan(add, jax.tree.map(jnp.zeros_like, ws), xs)[0]


def accumulating_apart(spec: P, count: int) -> Callable[..., Any]:
    def f(*ws_and_x: Any) -> Any:
        *ws, xs = ws_and_x

        def add(g: Any, x: Any) -> Any:
            own = jax.vmap(jax.grad(mse), (None, 0))(ws, x.reshape(count, -1, *x.shape[1:]))
            return jax.tree.map(lambda g, o: g + constrained(o, spec), g, own), None

        start = [constrained(jnp.zeros((count, *w.shape), w.dtype), spec) for w in ws]
        return [g.mean(0) for g in lax.scan(add, start, xs)[0]]

    return f


def microbatches(*ws: tuple[int, ...], axes: Any = DATA, steps: int = 8) -> Pair:
    count = 8 if axes == BOTH else 4
    xs = ((steps, 64, ws[0][0]), P(None, axes))
    return Pair(
        "accumulated",
        accumulating,
        accumulating_apart(P(axes), count),
        [*((w, P()) for w in ws), xs],
        ("cpu",),
    )


ACCUMULATED = {
    "one_weight": microbatches((128, 128)),
    "two_weights": microbatches((128, 256), (256, 128)),
    "over_both": microbatches((128, 128), axes=BOTH),
    "sixteen_steps": microbatches((64, 64), steps=16),
}

# -- involuntary full rematerialization: jax#21562, xla#15207 -------------------------------------


def moving(shape: tuple[int, ...], start: P, end: P, between: P, *, added: bool = False) -> Pair:
    if added:  # as reported: no constraint stands on what is gathered
        f = lambda *way: lambda a, b, c: c + constrained(a + b, *way)  # noqa: E731
        args = [(shape, start), (shape, start), (shape, end)]
    else:
        f = lambda *way: lambda x: constrained(jnp.tanh(x), start, *way) * 2  # noqa: E731
        args = [(shape, start)]
    return Pair("resharded", f(end), f(between, end), args, outs=end)


RESHARDED = {
    "added": moving(
        (128, 128, 128), P(MODEL, None, DATA), P(None, BOTH), P(MODEL, DATA), added=True
    ),
    "rows_to_columns": moving((1024, 512), D, P(None, MODEL), P(DATA, MODEL)),
    "both_to_one": moving((1024, 512), P(BOTH), P(None, DATA), P(None, BOTH)),
    "turned": moving((1024, 512), P((MODEL, DATA)), P(None, DATA), P(MODEL, DATA)),
}

# -- a reshape that moves data: xla#13306 ---------------------------------------------------------


def split(in_turn: bool, steps: int, layout: P) -> Callable[..., Any]:
    def f(w: Any, x: Any) -> Any:
        if in_turn:
            parts = x.reshape(-1, steps, *x.shape[1:]).swapaxes(0, 1)
        else:
            parts = x.reshape(steps, -1, *x.shape[1:])

        def one(total: Any, part: Any) -> Any:
            rows = w[part] if jnp.issubdtype(part.dtype, jnp.integer) else part @ w
            return total + (jnp.tanh(rows) ** 2).sum(), None

        return lax.scan(one, 0.0, constrained(parts, layout))[0]

    return f


def reshaping(shape: tuple[int, ...], axes: Any = DATA, steps: int = 8, *dtype: Any) -> Pair:
    layout = P(None, axes)
    return Pair(
        "reshape",
        split(False, steps, layout),
        split(True, steps, layout),
        [((64, 32), P()), (shape, P(axes), *dtype)],
    )


RESHAPED = {
    "features": reshaping((256, 64)),
    "tokens": reshaping((256, 128), DATA, 8, jnp.int32),
    "sequences": reshaping((256, 16, 64)),
    "over_both": reshaping((512, 64), BOTH, 16),
    "few_steps": reshaping((256, 64), DATA, 2),
}

# -- a constraint that isn't kept: jax#26946 ------------------------------------------------------


def padding(shape: tuple[int, ...], spec: P, pads: Any, *dtype: Any) -> Pair:
    return Pair(
        "uneven",
        lambda x: constrained(jnp.tanh(x), spec) * 2,
        lambda x: constrained(jnp.pad(jnp.tanh(x), pads), spec) * 2,
        [(shape, P(), *dtype)],
    )


UNEVEN = {
    "rows": padding((30, 64), D, ((0, 2), (0, 0))),
    "columns": padding((64, 30), P(None, DATA), ((0, 0), (0, 2))),
    "over_both": padding((30, 64), P(BOTH), ((0, 2), (0, 0))),
    "cube": padding((8, 27, 16), P(None, DATA), ((0, 0), (0, 1), (0, 0))),
    "bf16": padding((30, 64), D, ((0, 2), (0, 0)), jnp.bfloat16),
}

# -- a reduction that gathers ---------------------------------------------------------------------


def norms(shape: tuple[int, ...], spec: P, square: Any = None) -> Pair:
    return Pair(
        "reduce instead",
        lambda g: jnp.sqrt(square(g) if square else jnp.vdot(g, g)),
        lambda g: jnp.sqrt(jnp.sum(g * g)),
        [(shape, spec)],
        ("cpu",) if square else ("cpu", "gpu"),
    )


NORMS = {
    "vdot": norms((64, 64), P(None, DATA)),
    "ravel": norms((64, 64), P(None, DATA), lambda g: (g.ravel() ** 2).sum()),
    "over_both": norms((64, 128), P(None, BOTH)),
    "stacked": norms((4, 64, 64), P(None, None, DATA)),
    "large": norms((128, 512), P(None, DATA)),
}

# -- a psum_scatter of which XLA for TPU made an all-reduce ---------------------------------------


def scattered(count: int, axes: Any = DATA, dimension: int = 1) -> Pair:
    def before(x: Any) -> Any:
        x = jnp.tanh(x)
        return lax.psum_scatter(x, axes, scatter_dimension=dimension, tiled=True)

    def after(x: Any) -> Any:
        x = jnp.tanh(x)
        sizes = x.shape[:dimension], count, x.shape[dimension] // count, x.shape[dimension + 1 :]
        p = jnp.moveaxis(x.reshape(*sizes[0], *sizes[1:3], *sizes[3]), dimension, 0)
        rows = lax.psum_scatter(p.reshape(-1, 128), axes, scatter_dimension=0, tiled=True)
        return rows.reshape(p.shape[1:])

    spec = P(None, axes) if dimension else P(axes)
    shape = (4096, 128 * count * count) if dimension else (2**20 * count,)
    arms = (mapped(body, (spec,), spec) for body in (before, after))
    return Pair("only a slice", *arms, [(shape, spec, jnp.bfloat16)], ("tpu",))


SCATTERED = {
    "columns": scattered(4),
    "columns_over_model": scattered(2, MODEL),
    "columns_over_both": scattered(8, BOTH),
    "flat": scattered(4, DATA, 0),
}

# -- gathered twice under remat: jax#25010 --------------------------------------------------------


def trained(layout: Callable[..., Any], save: bool, layer: Callable[..., Any]) -> Any:
    policy = jax.checkpoint_policies.save_only_these_names("gathered") if save else None

    def step(x: Any, ws: Any) -> Any:
        def body(h: Any, w: Any) -> Any:
            return layer(h, layout(w)), None

        def loss(ws: Any) -> Any:
            return (lax.scan(jax.checkpoint(body, policy=policy), x, ws)[0] ** 2).mean()

        return jax.grad(loss)(ws)

    return step


def whole(w: Any) -> Any:
    return constrained(w, P())


def dense(h: Any, w: Any) -> Any:
    return jnp.tanh(h @ w)


def residual(h: Any, w: Any) -> Any:
    return h + jnp.sin(h @ w)


def gathering(layer: Callable[..., Any], spec: P, shape: tuple[int, ...]) -> Pair:
    return Pair(
        "gathered twice",
        trained(whole, False, layer),
        trained(lambda w: checkpoint_name(whole(w), "gathered"), True, layer),
        [((256, shape[1]), D), (shape, spec)],
        ("cpu", "gpu"),  # XLA for TPU narrows the array before it gathers
        spec,
    )


TWICE = {
    "columns": gathering(dense, P(None, None, DATA), (4, 128, 128)),
    "rows": gathering(dense, P(None, DATA), (4, 128, 128)),
    "residual": gathering(residual, P(None, DATA), (8, 64, 64)),
    "over_both": gathering(dense, P(None, None, BOTH), (4, 128, 128)),
}

# -- nonzero gathers its mask as numbers ----------------------------------------------------------


def held(mask: Any) -> Any:
    return constrained(lax.optimization_barrier(mask), P())


def masking(use: Callable[..., Any], shape: tuple[int, ...], spec: P = D) -> Pair:
    f, g = (lambda x, h=h: use(h, x) for h in (lambda mask: mask, held))
    return Pair("narrow first", f, g, [(shape, spec)], ("cpu",))


MASKS = {
    "nonzero": masking(lambda h, x: jnp.nonzero(h(x > 0), size=64), (256, 64)),
    "flat": masking(lambda h, x: jnp.nonzero(h(x > 0), size=64), (4096,)),
    "rows": masking(lambda h, x: x[jnp.nonzero(h(x[:, 0] > 0), size=64)[0]], (512, 32)),
    "over_both": masking(lambda h, x: jnp.nonzero(h(x > 0), size=64), (256, 64), P(BOTH)),
}

# -- a public module of a 70B model, before XLA's last passes and without names -------------------


def two_layers(x: Any, w: Any, v: Any) -> Any:
    """A step of which each device keeps a slice of each gradient: XLA scatters these sums later."""

    def loss(ws: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            return h + jnp.tanh(constrained(h @ w[0], P(DATA, MODEL))) @ w[1], None

        return (lax.scan(jax.checkpoint(layer), x, ws)[0] ** 2).mean()

    return jax.tree.map(lambda w, g: w - g, (w, v), jax.grad(loss)((w, v)))


def summed_again(x: Any) -> Any:
    """Sums of equal values in a shard_map whose check is off, one in the backward pass."""

    def body(x: Any) -> Any:
        total = jax.grad(lambda x: lax.psum((x**2).sum(), DATA))(x)
        return lax.psum(total, MODEL), lax.psum(lax.psum(x.sum(), DATA), DATA)

    return mapped(body, D, (D, P()))(x)


UNNAMED = {
    "layers": (
        two_layers,
        [((64, 64), D), ((4, 64, 256), P(None, DATA, MODEL)), ((4, 256, 64), P(None, MODEL, DATA))],
    ),
    "equal": (summed_again, [((64, 64), D)]),
    **{
        name: (t[v].before, t[v].args)
        for name, t, v in (
            ("gathered", RESHARDED, "added"),
            ("reduced", NORMS, "vdot"),
            ("accumulated", ACCUMULATED, "one_weight"),
            ("again", TWICE, "rows"),
        )
    },
}

REPORTS = {
    "jax#38551": CALLS,
    "jax#26586": ASKED,
    "maxtext#5099": ACCUMULATED,
    "jax#21562": RESHARDED,
    "xla#13306": RESHAPED,
    "jax#26946": UNEVEN,
    "vdot": NORMS,
    "psum_scatter": SCATTERED,
    "jax#25010": TWICE,
    "nonzero": MASKS,
}
