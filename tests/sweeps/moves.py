"""Random bwds and transposes: no gradient changes where a cast moves or a check is switched on.

``python tests/seeds.py moves 200 5000`` tries 200 of them, from that seed on. Each body multiplies
what is split by a step of what is replicated. The step's cotangent passes a function that may be
linear, affine, clipping, normalising or rounding, computed in one of many ways: by a kernel with
scratch, a ref, a solve, a scan, a branch. It is differentiated in several ways, in an order of its
own: with the check off and under ``unchecked="check"``, or with late casts and the default ones.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.door import internals
from shardrules.errors import first_line
from shardrules.hooks import shard_map

SIZE = 6
MATRIX = (np.eye(SIZE) * 2 + 0.1 * np.arange(SIZE * SIZE).reshape(SIZE, SIZE) / 36).astype(
    "float32"
)
MESHES = ((4,), (3,), (4, 2), (2, 3), (2, 2, 2))
NAMES = ("data", "model", "expert")

# What is computed of a cotangent.
LIMIT = 0.03
LINEAR: dict[str, Callable[[Any], Any]] = {
    "scaled": lambda g: 2 * g,
    "negative": lambda g: -g,
    "reversed": lambda g: g[::-1],
    "multiplied": lambda g: MATRIX @ g,
    "summed": lambda g: g + jnp.sum(g),
    "running sum": jnp.cumsum,
    "gathered": lambda g: g[np.array([1, 0, 3, 2, 5, 4])],
    "scattered": lambda g: jnp.zeros_like(g).at[np.array([0, 0, 1, 2, 3, 4])].add(g),
    "halves": lambda g: jnp.concatenate([g[3:], g[:3]]),
    "masked": lambda g: jnp.where(np.arange(SIZE) % 2 == 0, g, 0),
}
OTHERS: dict[str, Callable[[Any], Any]] = {
    "affine": lambda g: g + 0.1,
    "clipped": lambda g: jnp.clip(g, -LIMIT, LIMIT),
    "clipped by its norm": lambda g: g * jnp.minimum(1, LIMIT / (1e-6 + jnp.sqrt(jnp.sum(g * g)))),
    "normalised": lambda g: g / (0.1 + jnp.max(jnp.abs(g))),
    "squared": lambda g: g * g,
    "positive": lambda g: jnp.maximum(g, 0),
    "rounded": lambda g: jax.lax.reduce_precision(g, exponent_bits=4, mantissa_bits=2),
    "rounded by a cast": lambda g: g.astype(jnp.float8_e5m2).astype(g.dtype),
    "filled": lambda g: g.at[np.array([0, 9])].get(mode="fill", fill_value=0.5)[1] + g,
    "multiplied in a scatter": lambda g: (0.5 * jnp.ones_like(g)).at[np.arange(SIZE)].multiply(g),
    "set in a scatter": lambda g: jnp.ones_like(g).at[np.arange(3)].set(g[:3]),
    "by its sign": lambda g: jnp.where(g > 0, g, 2 * g),
    "sorted": jnp.sort,
    "largest": lambda g: g + jnp.max(g),
    "applied in a scatter": lambda g: g.at[np.arange(4)].apply(lambda v: jnp.where(v > 0, v, 0)),
    "largest on devices": lambda g: jax.lax.pmax(g, NAMES[0]) / jax.lax.psum(1, NAMES[0]),
    "too small": lambda g: 2e6 * (g * 5e-7).astype(jnp.float16).astype(g.dtype),
}


# In which way that is computed.


def by_scan(f):
    return lambda g: jax.lax.scan(lambda c, _: (f(c), None), g, None, length=2)[0]


def by_loop(f):
    return lambda g: jax.lax.fori_loop(0, 2, lambda _, c: f(c), g)


def by_branch(f):
    return lambda g: jax.lax.cond(jnp.sum(MATRIX) > 0, f, lambda g: g, g)


def by_its_own_branch(f):
    return lambda g: jax.lax.cond(jnp.sum(g) > 0, f, lambda g: 3 * g, g)


def by_kernel(f):
    def kernel(g_ref, o_ref, held_ref):
        held_ref[...] = jnp.zeros_like(held_ref)
        held_ref[...] += g_ref[...]
        o_ref[...] = f(held_ref[...])

    def run(g):
        shape = jax.ShapeDtypeStruct(g.shape, g.dtype)
        scratch = [pltpu.VMEM(g.shape, g.dtype)]
        return pl.pallas_call(kernel, shape, scratch_shapes=scratch, interpret=True)(g)

    return run


def by_ref(f):
    def run(g):
        ref = jax.new_ref(jnp.zeros_like(g))
        ref[...] += f(g)
        return ref[...]

    return run if hasattr(jax, "new_ref") else f


def by_solve(f):
    return lambda g: jnp.linalg.solve(jnp.asarray(MATRIX, g.dtype), f(g))


def by_iterating(f):
    def run(g):
        a = jnp.asarray(MATRIX + MATRIX.T, g.dtype)
        return jax.scipy.sparse.linalg.cg(lambda v: a @ v, f(g), maxiter=2)[0]

    return run


def by_callback(f):
    def run(g):
        shape = jax.ShapeDtypeStruct(g.shape, g.dtype)
        return jax.pure_callback(lambda g: np.asarray(f(g)), shape, g, vmap_method="sequential")

    return run


WAYS: dict[str, Callable] = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": by_scan,
    "loop": by_loop,
    "branch": by_branch,
    "own branch": by_its_own_branch,
    "kernel": by_kernel,
    "ref": by_ref,
    "solve": by_solve,
    "iterates": by_iterating,
    "callback": by_callback,
}


# From what is computed of a cotangent to a step that has it as its transpose or bwd.


def custom(f):
    op = jax.custom_vjp(lambda x: jnp.sin(x))
    op.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda c, g: (c * f(g),))
    return op


def custom_with_args(f):
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def op(f, x):
        return x

    op.defvjp(lambda f, x: (x, None), lambda f, _, g: (f(g),))
    return lambda x: op(f, x)


def by_accumulators(f):
    """Return a step whose bwd adds to accumulators and returns nothing."""
    op = jax.custom_vjp(lambda x: jnp.sin(x))
    bwd = lambda c, g, gradient: gradient.accum(c * f(g))  # noqa: E731
    op.defvjp_with_accums(lambda x: (jnp.sin(x), jnp.cos(x)), bwd)
    return op


def with_logs(f):
    op = jax.custom_vjp(lambda x: jnp.sin(x))
    bwd = lambda c, g: ((c * f(g),), {"sum": jnp.sum(g)})  # noqa: E731
    op.defvjp_with_logs(lambda x: (jnp.sin(x), jnp.cos(x)), bwd)
    return op


def in_the_second(f):
    """Return a step with a linear bwd, by residuals whose own bwd computes ``f``."""
    inner = custom_with_args(f)
    op = jax.custom_vjp(lambda x: jnp.sin(x))
    op.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * inner(jnp.cos(x)),))
    return op


def by_tangent(f):
    """Return a step by a rule for its tangent, whose transpose computes ``f``."""
    op = jax.custom_jvp(lambda x: jnp.sin(x))
    identity = by_linear_call(f)
    op.defjvp(lambda xs, ts: (jnp.sin(*xs), jnp.cos(*xs) * identity(*ts)))
    return op


def in_the_third(f):
    """Return a step whose rule calls one that looks alike, and that one calls another."""

    def calls(inner):
        op = jax.custom_jvp(lambda x: jnp.sin(x))
        op.defjvp(lambda xs, ts: (jnp.sin(*xs), ts[0] * inner(*xs)))
        return op

    return calls(calls(by_tangent(f)))


def by_perturbed(f):
    """Return a step that computes ``f`` only if its second argument isn't differentiated."""
    op = jax.custom_vjp(lambda x, y: x + y)

    def fwd(x, y):
        return x.value + y.value, (x.value if y.perturbed else None,)

    def bwd(saved, g):
        return (g, g) if saved[0] is not None else (f(g), jnp.zeros_like(g))

    op.defvjp(fwd, bwd, symbolic_zeros=True)
    return lambda x: op(x, jnp.ones_like(x))


def by_linear_call(f):
    return lambda x: jax.custom_derivatives.linear_call(lambda _, x: x, lambda _, g: f(g), (), x)


def by_primitive(f):
    """Return the identity as a primitive whose transpose is ``f``."""
    p = identity_primitive()
    ad.deflinear2(p, lambda ct, x: [f(ct)])
    return lambda x: p.bind(jnp.sin(x))


def by_accumulating_primitive(f):
    """Return the identity as a primitive that adds ``f`` of its cotangent to an accumulator."""
    p = identity_primitive()
    ad.deflinear2(p, lambda ct, x: [f(ct)])
    del ad.primitive_transposes[p]
    zero = (type(None), internals.load().Zero)
    FANCY[p] = lambda ct, x: None if isinstance(ct, zero) else x.accum(f(ct))
    return lambda x: p.bind(jnp.sin(x))


def identity_primitive():
    p = Primitive("moves_identity")
    p.def_impl(lambda x: x)
    p.def_abstract_eval(lambda x: x)
    batching.primitive_batchers[p] = lambda xs, ds: (p.bind(*xs), ds[0])
    mlir.register_lowering(p, lambda ctx, x: [x])
    return p


def rounded_forward(f):
    return lambda x: jax.lax.reduce_precision(jnp.sin(x), 5, 4)


def iterated_forward(f):
    return by_iterating(jnp.sin)


STEPS: dict[str, Callable] = {
    "custom_vjp": custom,
    "nondiff": custom_with_args,
    "second": in_the_second,
    "tangent": by_tangent,
    "third": in_the_third,
    "perturbed": by_perturbed,
    "linear_call": by_linear_call,
    "primitive": by_primitive,
    "rounds": rounded_forward,
    "solves": iterated_forward,
}
LATER = {"accums": by_accumulators, "logs": with_logs}  # by a method of newer JAX
STEPS |= {n: step for n, step in LATER.items() if hasattr(jax.custom_vjp, f"defvjp_with_{n}")}
FANCY = internals.load().fancy_transposes  # JAX's own table of such transposes
STEPS |= {} if FANCY is None else {"accumulating primitive": by_accumulating_primitive}


# Where the step stands in the body.


def plain_body(step):
    return lambda x, w: x * step(w)


def split_body(step):
    """Compute the step of what is split: shares differ from the sum only along the other axes."""
    return lambda x, w: step(x) * w


def looped_body(step):
    def body(x, w):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c * step(w)), None), x, None, length=2)[0]

    return body


def step_of_loop(step):
    def body(x, w):
        return x * jax.lax.scan(lambda c, _: (step(c), None), w, None, length=2)[0]

    return body


def branched_body(step):
    def body(x, w):
        return x * jax.lax.cond(jnp.sum(jnp.sin(MATRIX)) > 9, lambda w: w, step, w)

    return body


def remat_body(step):
    return jax.checkpoint(lambda x, w: jnp.sin(x * step(jnp.tanh(w))))


def reduced_body(step):
    def body(x, w):
        every = jax.sharding.get_abstract_mesh().axis_names  # x is equal along some of them
        return x * step(w) + jax.lax.pmean(jnp.sum(x), every) * step(jnp.cos(w))

    return body


def counted_body(step):
    """Count its traces, as a body does that makes keys of a counter, or draws from a generator."""
    rng, count = np.random.default_rng(0), 0

    def body(x, w):
        nonlocal count
        count += 1
        return x * step(w) * count + np.float32(rng.normal())

    return body


def jitted_body(step):
    """Count the traces of a jitted function, which JAX caches."""
    count = 0

    @jax.jit
    def counted(x):
        nonlocal count
        count += 1
        return x * count

    return lambda x, w: counted(x) * step(w)


def iterated_body(step):
    """Count its traces by an iterator in a list."""
    counts = [itertools.count(1)]
    return lambda x, w: x * step(w) * next(counts[0])


BODIES: dict[str, Callable] = {
    "plain": plain_body,
    "split": split_body,
    "looped": looped_body,
    "loop": step_of_loop,
    "branched": branched_body,
    "remat": remat_body,
    "reduced": reduced_body,
    "counted": counted_body,
    "jitted": jitted_body,
    "iterated": iterated_body,
}


# What is asked of the mapped function.


def scalar(f):
    return lambda x, w: jnp.sum(jnp.sin(f(x, w)))


def second(f, x, w):
    return jax.grad(lambda w: jnp.sum(jnp.sin(jax.grad(scalar(f), 1)(x, w))))(w)


def third(f, x, w):
    def of_second(w):
        return jnp.sum(jnp.sin(second(f, x, w)))

    return jax.grad(of_second)(w)


def mapped(f, x, w):
    """Map over a stack of the first argument."""
    return jax.grad(lambda w: jnp.sum(jnp.sin(jax.vmap(f, (0, None))(jnp.stack([x, 2 * x]), w))))(w)


def over_axis(f, x, w, axis, size):
    """Map over a stack that a mesh axis carries, over which x isn't split."""
    g = jax.vmap(f, (0, None), spmd_axis_name=axis)
    stack = jnp.stack([x * (n + 1) for n in range(size)])
    return jax.grad(lambda w: jnp.sum(jnp.sin(g(stack, w))))(w)


def linearized(f, x, w):
    out, of_tangents = jax.linearize(lambda w: f(x, w), w)
    return out, jax.linear_transpose(of_tangents, w)(out)


ASKED: dict[str, Callable] = {
    "forward": lambda f, x, w: f(x, w),
    "gradient": lambda f, x, w: jax.grad(scalar(f), 1)(x, w),
    "both": lambda f, x, w: jax.grad(scalar(f), (0, 1))(x, w),
    "second": second,
    "third": third,
    "jvp": lambda f, x, w: jax.jvp(lambda w: f(x, w), (w,), (jnp.cos(w),)),
    "vmap": mapped,
    "linearize": linearized,
    "jit": lambda f, x, w: jax.grad(jax.jit(scalar(f)), 1)(x, w),
    "spmd_axis_name": over_axis,  # where the mesh has such an axis
}


@dataclasses.dataclass(frozen=True)
class Case:
    mesh: tuple[int, ...]
    split: tuple[str, ...]  # the mesh axes that x is split over
    body: str
    steps: tuple[tuple[str, str, str], ...]  # kind of step, way, what is computed; one line for all
    asked: tuple[str, ...]  # in this order
    casts: bool  # compare casts with the check on, and not the check off with it switched on


def case_of(seed: int) -> Case:
    random_ = random.Random(seed)
    mesh = random_.choice(MESHES)
    axes = NAMES[: len(mesh)]
    step = random_.choice([*STEPS, "custom_vjp", "nondiff"])

    def one() -> tuple[str, str, str]:
        way = random_.choice([*WAYS, "plain", "plain"])
        what = random_.choice([*random_.choice((LINEAR, OTHERS))])
        if (way, what) == ("own branch", "largest on devices"):
            way = "branch"  # some devices would wait for the others forever
        return step, way, what

    case = Case(
        mesh,
        axes[: random_.randint(1, len(axes))],
        random_.choice([*BODIES]),
        tuple(one() for _ in range(random_.choice((1, 1, 2)))),
        tuple(random_.choices([*ASKED], k=2)),
        random_.random() < 0.4,
    )
    # Where casts are placed, what is jitted is traced for each order of derivatives around it.
    return dataclasses.replace(case, body="plain") if case.casts and case.body == "jitted" else case


def run_case(case: Case) -> list[tuple[str, Any]]:
    """Return each result, or the type of the error, under the hooks that are installed."""
    count = int(np.prod(case.mesh))
    names = NAMES[: len(case.mesh)]
    mesh = Mesh(np.array(jax.devices()[:count]).reshape(case.mesh), names)
    draw = np.random.default_rng(1)
    parts = int(np.prod([size for size, name in zip(case.mesh, names) if name in case.split]))
    x = draw.normal(size=(2 * parts, SIZE)).astype(np.float32)
    w = draw.normal(size=SIZE).astype(np.float32)
    results = []
    for kind, way, what in case.steps:
        step = STEPS[kind](WAYS[way]({**LINEAR, **OTHERS}[what]))
        body = BODIES[case.body](step)
        specs = (P(case.split), P()), P(case.split)
        f = lambda *args: shard_map(body, mesh, *specs, check=case.casts)(*args)  # noqa: E731
        free = [(a, n) for a, n in zip(names, case.mesh) if a not in case.split]
        for asked in case.asked:
            run = functools.partial(ASKED[asked], f)
            if asked == "spmd_axis_name":
                if not free:
                    continue
                run = functools.partial(run, axis=free[0][0], size=free[0][1])
            try:
                value = jax.jit(run)(x, w)
                results.append((asked, jax.tree_util.tree_map(np.asarray, value)))
            except Exception as error:  # compared by its type, and shown
                results.append((asked, error))
    return results


def differences(before: list, after: list) -> list[str]:
    wrong = []
    for (asked, a), (_, b) in zip(before, after):
        if isinstance(a, Exception) or isinstance(b, Exception):
            if not isinstance(a, Exception):
                wrong.append(f"{asked}: refused: {first_line(b)}")
            continue
        for x, y in zip(jax.tree_util.tree_leaves(a), jax.tree_util.tree_leaves(b)):
            scale = max(float(np.max(np.abs(x), where=np.isfinite(x), initial=0)), 1e-3)
            equal = (x == y) | (np.isnan(x) & np.isnan(y))  # in float16, many are infinite
            off = float(np.max(np.where(equal, 0, np.abs(x - y)))) / scale
            if not off < 2e-4:
                wrong.append(f"{asked}: different: by {off:.2g} of the largest")
    return wrong


def compare(seed: int) -> str:
    """Compare one case; say what became of it, after a colon why."""
    return compare_case(case_of(seed))


def compare_case(case: Case) -> str:
    rules = {"moves_identity": sr.no_communication}
    # A declared op that an earlier test called keeps JAX patched, and what was decided of its sites.
    sr.install().uninstall(ops=True)
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        with sr.rules(rules):
            if case.casts:
                with sr.install(casts="late"):
                    before = run_case(case)
                with sr.install():
                    after = run_case(case)
                decided = "casts"
            else:
                before = run_case(case)
                with sr.install(unchecked="check") as handle:
                    after = run_case(case)
                sites = handle.unchecked()
                left = "; ".join(dict.fromkeys(s.reason for s in sites if not s.switched))
                decided = f"left: {left}" if left else "switched"
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    if before and all(isinstance(value, Exception) for _, value in before):
        return f"jax: {first_line(before[0][1])} {case}"
    wrong = differences(before, after)
    if wrong:
        return (
            f"different: {wrong} {case}"
            if "different" in str(wrong)
            else f"refused: {wrong} {case}"
        )
    return decided


def outcome(seed: int) -> dict[str, str]:
    """Return one case's outcome for tests/seeds.py."""
    return {"note": compare(seed)}


def summary(outcomes) -> tuple[str, bool]:
    """Count the outcomes; well if no result differed, and none was refused."""
    totals = collections.Counter(one["note"].partition(":")[0] for one in outcomes.values())
    lost = any("lost" in one for one in outcomes.values())
    return str(dict(totals)), not lost and not {"different", "refused"} & totals.keys()
