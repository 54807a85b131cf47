"""Every primitive's outputs vary at least as the join of its operands, on every JAX with types."""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import raising
from jax import lax
from jax.sharding import PartitionSpec as P

from core import versions
from shardrules import hooks as shardrules_hooks
from shardrules.errors import AxisError

pytestmark = pytest.mark.usefixtures("hooks")
X = np.arange(1, 9, dtype=np.float32)
GROUPS = [[0, 1], [2, 3]]


def varying(f, mesh):
    """The axes over which each result of f varies, given a block of what is split over data."""
    seen = []

    def body(x):
        seen.extend(shardrules_hooks.varying(one) for one in jax.tree_util.tree_leaves(f(x)))
        return x

    g = versions.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    jax.eval_shape(g, X)
    return [set(one) for one in seen]


def ragged(operand, offset):
    def rows(n):
        return jnp.full((4,), n, np.int32)

    return lax.ragged_all_to_all(
        operand, jnp.zeros(8), rows(0), rows(1), rows(1) * offset, rows(1), axis_name="data"
    )


def index(x):
    return x[0].astype(np.int32)


FORGOTTEN = {
    "pmax in groups": lambda x: lax.pmax(x, "data", axis_index_groups=GROUPS),
    "pmin in groups": lambda x: lax.pmin(x, "data", axis_index_groups=GROUPS),
    "ragged into zeros": lambda x: ragged(x, 1),
    "ragged offsets": lambda x: ragged(jnp.ones(2), index(x)),
    "reduce's initial value": lambda x: lax.reduce(jnp.ones(3), x[0], lambda a, b: a + b, (0,)),
    "window's initial value": lambda x: lax.reduce_window(
        jnp.ones(3), x[0], lambda a, b: a + b, (2,), (1,), "VALID"
    ),
    "argsort": jnp.argsort,
}


HAS_RAGGED = versions.where(versions.has("jax.lax", "ragged_all_to_all"))


@versions.where(versions.types_values)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[HAS_RAGGED] if "ragged" in name else [], id=name)
        for name in FORGOTTEN
    ],
)
def test_axes_of_every_operand_are_kept(cpu_mesh, name):
    assert varying(FORGOTTEN[name], cpu_mesh) == [{"data"}]


@versions.where(versions.types_values)
def test_a_draw_varies_over_all_axes(cpu_mesh):
    drawn = varying(lambda x: lax.rng_uniform(0.0, 1.0, (3,)), cpu_mesh)
    assert drawn == [{"data", "model"}]


KEPT = {
    "psum": (lambda x: lax.psum(x, "data"), [set()]),
    "pmax": (lambda x: lax.pmax(x, "data"), [set()]),
    "jit": (lambda x: jax.jit(lambda a, b: (a, b * 2))(x, jnp.ones(2)), [{"data"}, set()]),
    "scan": (lambda x: lax.scan(lambda c, one: (c * 2, one), 1.0, x), [set(), {"data"}]),
    "device_put": (lambda x: jax.device_put((x, jnp.ones(2))), [{"data"}, set()]),
    "bits": (lambda x: jax.random.bits(jax.random.key(0)), [set()]),
}


@versions.where(versions.types_values)
@pytest.mark.parametrize("name", KEPT)
def test_types_that_are_right_stay(cpu_mesh, name):
    """Collectives that make invariant, and results that come from one operand each."""
    f, want = KEPT[name]
    assert varying(f, cpu_mesh) == want


def with_dce(f):
    f = importlib.import_module("jax.experimental.custom_dce").custom_dce(f)
    f.def_dce(lambda used, *args: f(*args))
    return f


def found(module, name):
    """Return a function of jax.experimental, and the mark of those JAX that have it."""
    module = f"jax.experimental.{module}"
    mark = versions.where(versions.has(module, name))
    return lambda: getattr(importlib.import_module(module), name), mark


SCHEDULING, HAS_SCHEDULING = found("scheduling_groups", "scheduling_group")
ORDER, HAS_ORDER = found("overlap", "program_order")
_, HAS_DCE = found("custom_dce", "custom_dce")
CALLERS = [
    pytest.param(lambda f: SCHEDULING()("one")(f), marks=HAS_SCHEDULING, id="scheduling group"),
    pytest.param(with_dce, marks=HAS_DCE, id="custom_dce"),
    pytest.param(lambda f: ORDER()(f, enforce=True), marks=HAS_ORDER, id="program_order"),
    pytest.param(jax.checkpoint, id="checkpoint"),
]


@versions.where(versions.types_values)
@pytest.mark.parametrize("caller", CALLERS)
def test_what_a_call_returns_is_typed_by_what_it_calls(cpu_mesh, caller):
    call = caller(lambda a, b: (jnp.sin(a), jnp.sin(b)))
    assert varying(lambda x: call(x, jnp.ones(2)), cpu_mesh) == [{"data"}, set()]


@versions.where(versions.types_values)
def test_maximum_in_groups(cpu_mesh):
    """Copies 2, 2, 4, 4 under out_specs=P(), and a gradient of 20 for 34."""

    def body(w, x):
        return lax.psum((w * lax.pmax(x, "data", axis_index_groups=GROUPS)).sum(), "data")

    def split(out_specs):
        return versions.shard_map(
            lambda x: lax.pmax(x, "data", axis_index_groups=GROUPS),
            mesh=cpu_mesh,
            in_specs=P("data"),
            out_specs=out_specs,
        )

    np.testing.assert_array_equal(split(P("data"))(X), [3, 4, 3, 4, 7, 8, 7, 8])
    with raising.wrong_out_specs():
        split(P())(X)
    f = versions.shard_map(body, mesh=cpu_mesh, in_specs=(P(), P("data")), out_specs=P())
    assert jax.jit(jax.grad(f))(np.float32(1), X) == 2 * (3 + 4 + 7 + 8)


FUTURE = """
from jax.extend.core import Primitive
from jax.interpreters import mlir
later_p = Primitive("later")
later_p.def_abstract_eval(lambda x, y: x)
mlir.register_lowering(later_p, lambda ctx, x, y: [y])
"""


@versions.where(versions.types_values)
def test_a_primitive_of_a_jax_to_come_errs_to_varying(cpu_mesh):
    module = {"__name__": "jax._src.later"}
    exec(FUTURE, module)
    [have] = varying(lambda x: module["later_p"].bind(jnp.ones(2), x), cpu_mesh)
    assert have == {"data"}


def hijax_product(typed, body):
    """A hijax primitive of two alike operands, its result typed as they are or not at all."""
    hijax = importlib.import_module("jax.experimental.hijax")
    base = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive  # JAX 0.12 renamed it

    class Product(base):
        def __init__(self, aval):
            self.in_avals = (aval, aval)
            self.out_aval = aval if typed else hijax.ShapedArray(aval.shape, aval.dtype)
            self.params = {}
            super().__init__()

        def expand(self, x, y):
            return body(x * y)

    return lambda x: Product(jax.typeof(x))(x, x)


HIJAX = {
    "typed": (True, lambda x: x, {"data"}),
    "typed and equal": (True, lambda x: lax.psum(x, "data"), {"data"}),
    "equal": (False, lambda x: lax.psum(x, "data"), set()),
    "different": (False, lambda x: x, None),
    "different by itself": (True, lambda x: x * lax.axis_index("model"), None),
}


def has_hijax():
    """Whether this JAX has hijax primitives: from 0.8 on, by another name from 0.12 on."""
    return any(
        versions.has("jax.experimental.hijax", one)() for one in ("VJPHiPrimitive", "HiPrim")
    )


@versions.where(has_hijax)
@pytest.mark.parametrize("name", HIJAX)
def test_a_hijax_primitive_varies_as_what_it_expands_to(cpu_mesh, name):
    """Its author types its results; untyped ones passed for invariant, the gradient 84 for 1."""
    typed, body, want = HIJAX[name]
    call = hijax_product(typed, body)
    if want is not None:
        assert varying(call, cpu_mesh) == [want]
        return
    with raising.raises(AxisError, axes={"model"} if typed else {"data"}):
        varying(call, cpu_mesh)


@versions.where(versions.has("jax.experimental.hijax", "HiPrimitive"))  # JAX 0.8 to 0.11
@pytest.mark.parametrize("typed", [True, False])
def test_a_hijax_primitive_of_the_older_kind_too(cpu_mesh, typed):
    hijax = importlib.import_module("jax.experimental.hijax")

    class Square(hijax.HiPrimitive):
        def abstract_eval(self, x):
            return (x if typed else hijax.ShapedArray(x.shape, x.dtype)), set()

        def to_lojax(self, x):
            return x * x

    square = Square("square_by_hand")
    if typed:
        assert varying(square.bind, cpu_mesh) == [{"data"}]
    else:
        with pytest.raises(AxisError, match="result 0 of the hijax primitive 'Square'"):
            varying(square.bind, cpu_mesh)


@versions.where(has_hijax)
def test_a_hijax_primitive_is_not_cast_before_a_branch(cpu_mesh):
    """Its bwd may sum what it has for an invariant operand; the cast sums again: N times it."""
    call = hijax_product(True, lambda x: x)

    def chosen(predicate):
        return lambda x: lax.cond(predicate(x) > 0, call, jnp.sin, jnp.ones(2))

    with raising.raises(AxisError, primitive="call_hi_primitive"):
        varying(chosen(lambda x: x[0]), cpu_mesh)
    assert varying(chosen(lambda x: lax.pmax(x[0], "data")), cpu_mesh) == [set()]
