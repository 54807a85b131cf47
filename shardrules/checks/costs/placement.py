"""Where a program's constants and outputs lie, asserted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardrules import hlo
from shardrules import program as programs
from shardrules.arguments import checked, shown
from shardrules.checks.costs.host import below
from shardrules.costs import placement
from shardrules.errors import CostAssertionError, ShardrulesError
from shardrules.report.grouping import counted


@checked
def assert_no_large_constants(
    program: Any, *args: Any, max_bytes: int = 1 << 20, **kwargs: Any
) -> list[placement.Constant]:
    """Assert that no large array is written into a compiled program.

    An array that a jitted function closes over is copied into the program, and lies on each of its
    devices once more.

    Args:
      program: a function of ``*args, **kwargs``, a Lowered, a Compiled, HLO text or a path.
      *args: what the function is called with.
      max_bytes: of the largest that may be there.
      **kwargs: what else the function is called with.

    Returns:
      The constants that are there, the largest first.

    Raises:
      CostAssertionError: with the bytes of each that is larger, times devices, and its source line.
      ShardrulesError: ``max_bytes`` is no count, or as ``judge``.

    Examples:
      >>> constants = testing.assert_no_large_constants(step, w, x)
    """
    __tracebackhide__ = True  # pytest shows the line that calls this
    if max_bytes < 0:
        raise ShardrulesError(f"max_bytes={max_bytes!r} is not a count of bytes; give 0 or more")
    source = programs.read(program, args, kwargs)
    module = source.module()
    every = placement.constants(module)
    large = [c for c in every if c.bytes > max_bytes]
    if large:
        note = (
            "\n  a jax.pmap stands in the program, with its own copy for each device"
            if _is_pmap(module, source)
            else ""
        )
        raise CostAssertionError(
            f"{source.name} carries {counted(len(large), 'constant')} of more than {max_bytes} B:\n"
            + "\n".join(
                f"  {c.shape}, {c.bytes} B on each of {c.device_count} devices, "
                f"{c.bytes * c.device_count} B in all\n    used at {c.source}"
                for c in large
            )
            + note
            + "\n  to do: pass them as arguments, with the sharding that they shall have",
            constants=tuple(large),
        )
    return every


def assert_output_sharding(program: Any, *args: Any, expect: Any, **kwargs: Any) -> dict[str, str]:
    """Assert how a compiled program's outputs are sharded.

    Args:
      program: a function of ``*args, **kwargs``, a Lowered or a Compiled.
      *args: what the function is called with.
      expect: a ``PartitionSpec`` or a sharding for all outputs, or a mapping from an output's path
        to one of these (``{"[0]['w']": P("data")}``; a path stands for all that is below it).
      **kwargs: what else the function is called with.

    Returns:
      From each output's path to its sharding.

    Raises:
      CostAssertionError: with each output that is sharded otherwise, and whether it was gathered.
      ShardrulesError: text, which does not say; a path that no output has; a spec without a mesh;
        or as ``judge``.

    Examples:
      >>> testing.assert_output_sharding(step, w, x, expect=P())
      {'': 'P()'}
    """
    __tracebackhide__ = True  # pytest shows the line that calls this
    from shardrules.door import compiled

    source = programs.read(program, args, kwargs)
    outputs = None if source.compiled is None else compiled.placed_results(source.compiled)
    if outputs is None:
        raise ShardrulesError(
            f"{source.name} does not say how its outputs are sharded; pass the function with its "
            "arguments, or what f.lower(...).compile() returns"
        )
    wanted = expect if isinstance(expect, Mapping) else {"": expect}
    if not wanted or not all(isinstance(path, str) for path in wanted):
        raise ShardrulesError(
            f"expect={shown(expect)} expects nothing of any output; pass a PartitionSpec or a "
            "sharding for all of them, or a mapping from paths, {\"[0]['w']\": P('data')}",
            expect=expect,
        )
    for path in wanted:
        if not any(below(output.path, [path]) for output in outputs):
            there = ", ".join(output.path or "(all of it)" for output in outputs[:20])
            raise ShardrulesError(f"no output is at {path!r}; there are {there}", path=path)
    module = source.module()
    root = module.entry.instructions[module.entry.root].shape
    skip = sum(leaf.element_type == "token" for leaf in root.leaves())
    gathered = {g.output - skip: g for g in placement.gathered(module)}
    lines = []
    for number, output in enumerate(outputs):
        paths = [path for path in wanted if below(output.path, [path])]
        other = output.differs(wanted[max(paths, key=len)]) if paths else None
        if other is None:
            continue
        lines.append(f"  {output.path or '(all of it)'}: {output.sharding}, expected {other}")
        if gather := gathered.get(number):
            lines.append(
                f"    gathered from {gather.bytes_before} B to {gather.bytes_after} B on each "
                f"device at {gather.source}"
            )
    if lines:
        note = (
            "\n  a jax.pmap stands under this jit: use jax.shard_map, whose out_specs say it"
            if _is_pmap(module, source)
            else "\n  to do: give out_shardings= to jax.jit, or the axis in out_specs of shard_map"
        )
        raise CostAssertionError(
            f"the outputs of {source.name} are not sharded as expected:\n"
            + "\n".join(lines)
            + note,
            outputs=tuple(outputs),
        )
    return {output.path: output.sharding for output in outputs}


def _is_pmap(module: hlo.Module, source: programs.Program) -> bool:
    from shardrules.door import compiled

    mesh = None if source.compiled is None else compiled.placements(source.compiled).mesh()
    return placement.is_pmap(module, mesh or ())
