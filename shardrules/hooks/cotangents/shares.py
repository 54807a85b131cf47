"""Whether a bwd gives the same gradients with the check on and off.

With the check off, each device passes on its own share of the cotangent of a replicated value, and
shard_map adds up the shares at its inputs. With the check on, all devices pass on the sum. The
gradients are equal where bwd is linear: it then maps the sum of the shares to the sum of its
results.
"""

from __future__ import annotations

from typing import Any

import jax

from shardrules.door.jaxprs import equations, is_inexact
from shardrules.hooks.cotangents.bwd import Bwd
from shardrules.hooks.cotangents.linearity import linear_in
from shardrules.hooks.cotangents.origins import size_of


def doubt(bwd: Bwd, cotangents: Any) -> str:
    """Say why its gradients may differ from those with the check off; empty if they are equal."""
    door, name = bwd.door, bwd.parts.name
    leaves = jax.tree_util.tree_leaves(bwd.args[-1])
    live = [
        type_.varying | type_.unreduced
        for leaf, type_ in zip(leaves, bwd._arriving)
        if isinstance(leaf, jax.Array) and is_inexact(leaf)
    ]
    primals = [t.axes for t, aval in zip(bwd.primals, bwd.parts.in_avals) if is_inexact(aval)]
    returned = []

    def note(path, index, value):
        zero = isinstance(value, door.SymbolicZero) or not is_inexact(value)
        if not zero and any(origin.number != 0 for origin in bwd._origins(path).outputs):
            have, primal = door.axis_type(door.typeof(value)), bwd.primals[index]
            returned.append((path, have.axes | primal.axes))
        return value

    bwd.parts.each(cotangents, note)
    axes = [axis for axis in sorted(bwd.mesh_axes) if size_of(frozenset((axis,))) != 1]
    for axis in axes if live and returned else ():
        differs = {axis in axes for axes in live}
        if differs == {True}:
            if any(axis not in axes for _, axes in returned):
                return f"the bwd {name!r} returns a gradient that is summed over {axis!r}"
        elif len(differs) > 1 or any(axis in axes for axes in primals):
            return f"the forward of the bwd {name!r} makes results equal over {axis!r}"
        elif next(bwd._communicates(bwd._trace.jaxpr, frozenset({axis})), None):
            return f"the bwd {name!r} communicates over {axis!r}"
        else:
            nonlinear = next(filter(None, (_nonlinear(bwd, path) for path, _ in returned)), "")
            if nonlinear:
                return nonlinear
    return ""


def _nonlinear(bwd: Bwd, path: Any) -> str:
    """Say why a cotangent may not be linear in those that arrive; empty if it is."""
    jaxpr, dynamic = bwd._sliced(path), bwd._trace.dynamic
    inputs = jaxpr.invars[len(jaxpr.invars) - len(dynamic) :]
    arriving = [var for var, leaf in zip(inputs, dynamic) if leaf >= bwd.first]
    if linear_in(jaxpr, arriving, kernels=True) is not None:
        return ""
    calls = (bwd.hooks.state.opaque_call_of(e.primitive, e.params) for e in equations(jaxpr))
    opaque = next(filter(None, calls), None)
    holds = f" (it calls {opaque.call})" if opaque is not None else ""
    return f"the bwd {bwd.parts.name!r} is not known to be linear{holds}"
