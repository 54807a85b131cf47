"""Where no cast may stand, since what is summed there is rounded to a less precise type first."""

from __future__ import annotations

from typing import Any

__all__ = ["keep_precision", "narrower"]


def keep_precision(graph: Any) -> None:
    """Let casts stand only where what is summed is as precise as where they stand now.

    A tangent of bf16 that becomes float32 before it is cast is not cast as bf16, nor before it
    became bf16: each device's share would be rounded before they are summed. Nor is one cast as
    bf16 that is made of a float32 which is cast.
    """
    for axis in graph.door.manual_axes():
        sites = [
            value
            for value, made in graph.casts
            if value.live and axis in made.varying - value.varying
        ]
        sites += [v for step in graph.steps if axis in step.moves for v in step.inputs]
        for value in narrower(graph, axis, sites, before=True):
            value.stays |= {axis}
        for value in narrower(graph, axis, sites, before=False):
            value.narrow |= {axis}


def narrower(graph: Any, axis: str, sites: list[Any], before: bool) -> list[Any]:
    """Return what is less precise of the tangents that sites are made of, or that they make."""
    # What they are made of is followed while it is invariant, what they make while it varies: what
    # a psum over the axis parts from a site has casts of its own.
    links: dict[Any, list[Any]] = {}
    for step in graph.steps:
        ends = (step.outputs, step.inputs) if before else (step.inputs, step.outputs)
        for value in ends[0]:
            links.setdefault(value, []).extend(ends[1])
    found: list[Any] = []
    queue = [(value, _precision(value)) for value in sites]
    seen = set(queue)
    while queue:
        value, of_site = queue.pop()
        if any(one < other for one, other in zip(_precision(value), of_site)):
            found.append(value)
        for one in links.get(value, ()):
            if (one, of_site) not in seen and (axis in one.varying) != before:
                seen.add((one, of_site))
                queue.append((one, of_site))
    return found


def _precision(value: Any) -> tuple[int, int]:
    """Return the bits of a tangent's mantissa, and of its exponent."""
    from jax import numpy

    if not numpy.issubdtype(value.aval.dtype, numpy.inexact):  # float0
        return 0, 0
    kind = numpy.finfo(value.aval.dtype)
    return kind.nmant, kind.nexp
