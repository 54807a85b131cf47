"""Give the facts that a compiled program's text lacks, as flags for the commands."""

from __future__ import annotations

import shlex
from typing import Any

from shardrules import program as programs
from shardrules.arguments import checked
from shardrules.door import compiled
from shardrules.errors import ShardrulesError


@checked
def verify_flags(program: Any, *args: Any, **kwargs: Any) -> str:
    """Return the flags with which ``shardrules verify`` judges a program's text as its Compiled.

    The text that ``compiled.as_text()`` returns lacks the shardings of the outputs and usually the
    mesh. With JAX 0.12 it also lacks the shardings of the parameters.

    Args:
      program: a function of ``*args, **kwargs``, a Lowered or a Compiled.
      *args: the function's arguments.
      **kwargs: its keyword arguments.

    Raises:
      ShardrulesError: the program is text or a path, its shardings are unknown, it runs on several
        TPU slices in an order that no flag can express, or as ``judge``.

    Examples:
      >>> print(testing.verify_flags(step, w, x))
      --mesh data=4,model=2 --in "P(); P('data')" --out-shardings '{replicated}'
    """
    source = programs.read(program, args, kwargs)
    if source.compiled is None:
        raise ShardrulesError(
            f"{source.name} is text, which doesn't say how it is sharded; pass the function with "
            "its arguments, or the jax.stages.Compiled",
            program=program,
        )
    placements, module = compiled.placements(source.compiled), source.module()
    if programs.matching(module, placements.parameters()) is None:
        raise ShardrulesError(
            f"the shardings of {source.name} are unknown, or don't match the parameters of its "
            "text",
            program=program,
        )
    flags: list[str] = []
    mesh = placements.mesh()
    if mesh:
        flags += ["--mesh", ",".join(f"{axis}={size}" for axis, size in mesh.items())]
    if specs := placements.specs():
        flags += ["--in", "; ".join(_one(specs))]
    shapes = programs.output_shapes(module)
    outputs = placements.results(None, shapes)
    if outputs and None not in outputs:
        flags += ["--out-shardings", "; ".join(_one([output[1] for output in outputs if output]))]
    if order := placements.slices():
        flags += ["--slices", str(_slices(order, source.name))]
    return " ".join(_quoted(flag) for flag in flags)


def _one(shardings: list[str]) -> list[str]:
    """Return a single sharding if all are equal, else all of them."""
    return shardings[:1] if len({*shardings}) == 1 else shardings


def _quoted(flag: str) -> str:
    return f'"{flag}"' if "'" in flag and not set(flag) & set('"$`\\') else shlex.quote(flag)


def _slices(order: list[tuple[int, int]], name: str) -> int:
    """Return the number of slices; raise unless the mesh lists them one by one, in one order."""
    numbers = sorted({number for number, _ in order})
    each = len(order) // len(numbers)
    parts = [order[at : at + each] for at in range(0, len(order), each)]
    places, alone = set(), True
    for part in parts:
        slices, ids = zip(*part)
        places.add(tuple(own_id - min(ids) for own_id in ids))
        alone = alone and len({*slices}) == 1
    if not alone or len(places) > 1:
        raise ShardrulesError(
            f"the mesh of {name} does not take one slice after the other, each in the same "
            "order of devices, and no flag can give another order; judge the "
            "jax.stages.Compiled"
        )
    return len(numbers)
