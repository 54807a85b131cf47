"""Test what the hooks do to a dozen tiny programs.

``install()`` runs it on a JAX that is newer than the tested versions. Everything is traced over a
mesh without devices: nothing is compiled, and no device is opened.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from shardrules.door import internals
from shardrules.door.jaxprs import SUMS, named_axes
from shardrules.door.places import shard_map
from shardrules.errors import first_line
from shardrules.hooks.state import Scope, State
from shardrules.jaxprs.walk import equations
from shardrules.registry.axistypes import show_axes
from shardrules.registry.builtin import no_communication


class SelftestBody(NamedTuple):
    name: str  # what messages call it
    # a function of ``x``, which varies over data and model, and of ``w``, which varies over model;
    # both have the local shape (2, 2)
    function: Callable[[Any, Any], Any]
    axes: str  # the axes over which the function's result must vary
    # the axes of each all-reduce that the gradient for ``w`` must hold; None to skip that test
    sums: tuple[str, ...] | None = None


def bodies() -> Iterator[SelftestBody]:
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.experimental import pallas
    from jax.extend import core

    both, shape = "data model", jax.ShapeDtypeStruct((2, 2), "float32")

    @no_communication
    def shardrules_selftest(x_ref: Any, w_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * w_ref[...]

    kernel = pallas.pallas_call(shardrules_selftest, out_shape=shape)
    op = jax.custom_vjp(kernel)
    # Its bwd returns this device's share of the cotangent of w, which the hooks must sum.
    op.defvjp(
        lambda x, w: (kernel(x, w), (x, w)),
        lambda kept, g: (kernel(g, kept[1]), kernel(g, kept[0])),
    )

    def scan(x: jax.Array, w: jax.Array) -> Any:
        return lax.scan(lambda c, _: (c + x * w, None), jnp.zeros(x.shape), length=2)[0]

    def cond(x: jax.Array, w: jax.Array) -> Any:
        return lax.cond(x.sum() > 0, lambda w: w * 2, lambda w: w * 3, w)

    def replayed(x: jax.Array, w: jax.Array) -> Any:
        return core.jaxpr_as_fun(jax.make_jaxpr(lambda y: y * w)(w))(x)[0]

    def stored(x: jax.Array, w: jax.Array) -> Any:
        def store(ref: Any) -> None:
            ref[...] = x

        return pallas.run_state(store)(w)

    yield SelftestBody("psum", lambda x, w: lax.psum(x, "data"), "model")
    yield SelftestBody("pmean", lambda x, w: lax.pmean(x, "data"), "model")
    yield SelftestBody("pmax", lambda x, w: lax.pmax(x, ("data", "model")), "")
    yield SelftestBody("all_gather", lambda x, w: lax.all_gather(x, "data"), both)
    yield SelftestBody("ppermute", lambda x, w: lax.ppermute(x, "data", [(0, 1), (1, 0)]), both)
    yield SelftestBody(
        "axis_index", lambda x, w: jnp.zeros(x.shape) + lax.axis_index("data"), "data"
    )
    yield SelftestBody("argsort", lambda x, w: jnp.argsort(x), both)
    yield SelftestBody("product", lambda x, w: x * w, both, ("data",))
    yield SelftestBody("cond", cond, both, ("data",))
    yield SelftestBody("scan", scan, both, ("data",))
    yield SelftestBody("pallas_call", kernel, both)
    yield SelftestBody("custom_vjp", op, both, ("data",))
    yield SelftestBody(
        "ffi_call", lambda x, w: jax.ffi.ffi_call("shardrules_selftest", shape)(x), both
    )
    yield SelftestBody("jvp", lambda x, w: jax.jvp(lambda w: w * 2, (w,), (x,))[0], both)
    yield SelftestBody("jaxpr of w on x", replayed, both)
    yield SelftestBody("run_state", stored, both)


def differences(state: State) -> list[str]:
    """Return a line for each program with an unexpected result. JAX must be patched."""
    # The caller may be inside a trace or a mesh; a new thread is in neither.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: list(_differences(state))).result()


def _differences(state: State) -> Iterator[str]:
    for body in bodies():
        try:
            with state.enter(Scope(True, "varying")):  # the policy for the ffi_call
                difference = _difference(body)
        except Exception as error:  # an untested JAX may raise anything  # noqa: BLE001
            difference = f"it ended in {first_line(error)}"
        if difference:
            yield f"{body.name}: {difference}"


def _difference(body: SelftestBody) -> str:
    import jax
    from jax.sharding import PartitionSpec as P

    # Trace the body in a shard_map, and compare the axes over which its result varies. Then trace
    # the gradient for ``w``, and compare the axes of its all-reduces.
    door = internals.load()
    results: list[frozenset[str]] = []

    def traced(x: jax.Array, w: jax.Array) -> Any:
        result = body.function(x, w)
        results.append(door.axis_type(door.typeof(result)).varying)
        return result

    kinds = getattr(jax.sharding, "AxisType", None)
    auto = getattr(kinds, "Auto", None)  # since JAX 0.12, axes are explicit by default
    types = {} if auto is None else {"axis_types": (auto, auto)}
    mesh = jax.sharding.AbstractMesh((2, 2), ("data", "model"), **types)
    specs = (P("data", "model"), P(None, "model"))
    mapped = shard_map(traced, mesh, specs, P("data", "model"), check=True)
    x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((4, 4), (2, 4)))
    jax.eval_shape(mapped, x, w)
    if results[0] != frozenset(body.axes.split()):
        have, want = (show_axes(frozenset(axes)) for axes in (results[0], body.axes.split()))
        return f"its result varies over {have}, where it must vary over {want}"
    if body.sums is None:
        return ""
    gradient = jax.make_jaxpr(jax.grad(lambda w, x: mapped(x, w).sum()))(w, x)
    sums = tuple(
        ",".join(sorted(named_axes(equation.params)))
        for equation in equations(gradient.jaxpr)
        if equation.primitive.name in SUMS
    )
    if sums != body.sums:
        have = f"all-reduces over {' and '.join(sums)}" if sums else "no all-reduce"
        want = f"some over {' and '.join(body.sums)}" if body.sums else "none"
        return f"its gradient holds {have}, where it must hold {want}"
    return ""
