"""Where casts are forbidden, because the shares would be rounded before they are summed."""

from __future__ import annotations

from typing import Any


def keep_precision(graph: Any) -> None:
    """Allow casts only where the sum is at least as precise as in the program as traced."""
    # Suppose a bf16 tangent becomes float32 and is then cast. The cast must not move to the bf16
    # tangent, nor to what that is made of: the shares would be rounded to bf16 before they are
    # summed. Nor may the cast of a float32 tangent move to a bf16 tangent that is made of it.
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
    """Return the tangents before, or after, the sites that are less precise than these."""
    # Before the sites follow only invariant tangents, after them only varying ones: beyond a psum
    # over the axis, tangents have casts of their own.
    links: dict[Any, list[Any]] = {}
    for step in graph.steps:
        ends = (step.outputs, step.inputs) if before else (step.inputs, step.outputs)
        for value in ends[0]:
            links.setdefault(value, []).extend(ends[1])
    less_precise: list[Any] = []
    queue = [(value, _precision(value)) for value in sites]
    seen = set(queue)
    while queue:
        value, of_site = queue.pop()
        if any(bits < needed for bits, needed in zip(_precision(value), of_site)):
            less_precise.append(value)
        for linked in links.get(value, ()):
            if (linked, of_site) not in seen and (axis in linked.varying) != before:
                seen.add((linked, of_site))
                queue.append((linked, of_site))
    return less_precise


def _precision(value: Any) -> tuple[int, int]:
    """Return the bits of the mantissa and of the exponent of a tangent."""
    from jax import numpy

    if not numpy.issubdtype(value.aval.dtype, numpy.inexact):  # float0
        return 0, 0
    kind = numpy.finfo(value.aval.dtype)
    return kind.nmant, kind.nexp
