"""Every collective and cast, on operands that vary over all, some and none of its axes."""

from __future__ import annotations

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp

from .arguments import Case

lax = jax.lax
SIZES = {"a": 4, "b": 2}
OPERANDS = [(), ("a",), ("b",), ("a", "b")]
GROUPS = [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]]]
RING = [(0, 1), (1, 2), (2, 3), (3, 0)]

# From a function of lax to ways to call it on an array of four floats.
CALLS = {
    "psum": lambda f: [
        *(functools.partial(f, axis_name=axes) for axes in ("a", "b", ("a", "b"), ("b", "a"))),
        *(functools.partial(f, axis_name="a", axis_index_groups=groups) for groups in GROUPS),
        lambda x: f((x, jnp.ones(4)), "a"),
    ],
    "pmean": lambda f: CALLS["psum"](f),
    "pmax": lambda f: CALLS["psum"](f),
    "pmin": lambda f: CALLS["psum"](f),
    "all_gather": lambda f: (
        [
            functools.partial(f, axis_name=axes, tiled=tiled, axis_index_groups=groups)
            for tiled in (False, True)
            for axes, groups in [
                *(("a", groups) for groups in [None, *GROUPS]),
                ("b", None),
                (("a", "b"), None),
            ]
        ]
        + [
            functools.partial(f, axis_name=axes, to=to)
            for to in ("invarying", "varying")
            if "to" in inspect.signature(f).parameters
            for axes in ("a", "b", ("a", "b"))
        ]
    ),
    "psum_scatter": lambda f: [
        *(
            functools.partial(f, axis_name="a", axis_index_groups=groups, tiled=True)
            for groups in [None, *GROUPS]
        ),
        functools.partial(f, axis_name="a"),
        functools.partial(f, axis_name="b", tiled=True),
    ],
    # The asynchronous ones start something that another call ends.
    "psum_scatter_start": lambda f: [
        lambda x: f(x, "a").done(),
        lambda x: f(x, "b", tiled=True).done(),
    ],
    "all_to_all": lambda f: [
        lambda x: f(x, "a", 0, 0),
        lambda x: f(x, "b", 0, 0, tiled=True),
        *(
            lambda x, groups=groups: f(x, "a", 0, 0, tiled=True, axis_index_groups=groups)
            for groups in GROUPS
        ),
    ],
    "ppermute": lambda f: [
        lambda x: f(x, "a", RING),
        lambda x: f(x, "a", [(0, 1)]),
        lambda x: f(x, "b", [(0, 1), (1, 0)]),
    ],
    "pshuffle": lambda f: [lambda x: f(x, "a", [1, 2, 3, 0])],
    "pswapaxes": lambda f: [lambda x: f(x, "a", 0)],
    "pbroadcast": lambda f: [lambda x: f(x, "a", 1), lambda x: f(x, "b", 0)],
    "axis_index": lambda f: [
        lambda x: x * f("a"),
        lambda x: f("b") + (x * 0).astype(int),
        lambda x: f(("a", "b")) + jnp.zeros(2, int),
        lambda x: lax.cond(f("a") > 1, lambda: x, lambda: x),
        lambda x: lax.dynamic_slice(x, (f("a"),), (1,)),
        lambda x: lax.fori_loop(0, f("b"), lambda i, c: c, x),
        lambda x: jax.random.normal(jax.random.PRNGKey(f("a")), (4,)),
        lambda x: jnp.ones(4).at[f("b")].set(x[0]),
    ],
    "axis_size": lambda f: [lambda x: x * f("a")],
    "pvary": lambda f: [functools.partial(f, axis_name=axes) for axes in ("a", "b")],
    "pcast": lambda f: [
        functools.partial(f, axis_name=axes, to=to)
        for to in ("varying",)
        for axes in ("a", "b", ("a", "b"))
    ],
}
RAGGED = "vvnnnn"


def _ragged(axis, groups, output_varies):
    def call(x, out, *starts):
        sizes = [jnp.broadcast_to(n % 2, (4 if axis == "a" and not groups else 2,)) for n in starts]
        more = {"axis_index_groups": groups} if groups else {}
        return lax.ragged_all_to_all(
            x, out if output_varies else jnp.zeros(4), *sizes, axis_name=axis, **more
        )

    return call


def cases():
    """Return the cases of all collectives that this JAX has; of operands that it takes."""
    found = []
    for name, calls in CALLS.items():
        function = getattr(lax, name, None)
        if function is None:
            continue
        for (place, call), axes in itertools.product(enumerate(calls(function)), OPERANDS):
            found.append(
                Case(
                    f"lax.{name}#{place} of {'+'.join(axes) or 'none'}",
                    call,
                    "v",
                    (axes,),
                    by_device=True,
                )
            )
    # XLA has none for CPU, so the type alone is judged: it varies over all axes of the operands,
    # and over those that it communicates over.
    if hasattr(lax, "ragged_all_to_all"):
        for axis, groups, place, output in itertools.product(
            "ab", (None, GROUPS[0]), range(6), (True, False)
        ):
            if groups and axis == "b" or place == 1 and not output:
                continue
            axes = tuple(("a", "b") if one == place else () for one in range(6))
            found.append(
                Case(
                    f"lax.ragged_all_to_all over {axis} in {groups}, operand {place}, {output}",
                    _ragged(axis, groups, output),
                    RAGGED,
                    axes,
                    unexecuted=frozenset(axis),
                )
            )
    return found
