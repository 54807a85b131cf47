"""Read and judge the programs that a command names."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from shardrules import hlo, program
from shardrules.commands import files, flags, rules
from shardrules.errors import HloError, ShardrulesError
from shardrules.hlo.reader.files import decode


def judged(
    given: Sequence[str], arguments: argparse.Namespace, each_alone: bool = False
) -> tuple[list[tuple[str, hlo.Judgement]], list[tuple[str, str]]]:
    """Judge the named programs, with ``each_alone`` one per name; return failures with reasons."""
    mesh = mesh_of(arguments.mesh)
    registry: Any = rules.Rules(arguments)
    outputs = _outputs_of(arguments.outputs)
    paths = []
    for names in [[name] for name in given] if each_alone else [given]:
        chosen, notes = files.chosen(names)
        if each_alone and len(chosen) > 1:
            raise ShardrulesError(
                f"{names[0]} holds {len(chosen)} programs; give one of them: {', '.join(chosen)}"
            )
        paths += chosen
        flags.say(*notes)
    titles = ["stdin" if path == "-" else os.path.basename(path) for path in paths]
    if len(set(titles)) < len(titles):
        titles = paths

    def judge(read: program.Program) -> hlo.Judgement:
        try:
            return program.judged(read, registry, mesh, outputs)
        except HloError:
            if mesh is None or len(paths) == 1:
                raise
            # Of several programs, --mesh describes those that have its number of devices.
            judgement = program.judged(read, registry, None, outputs)
            if judgement.partitions * judgement.replicas == math.prod(mesh.values()):
                raise
            return judgement

    programs, results, failures = [], [], []
    for title, path in zip(titles, paths):
        try:
            read = _read(path)
            results.append((title, judge(read)))
            programs.append(read)
        except ShardrulesError as error:
            if len(paths) == 1 or each_alone:
                raise
            failures.append((title, str(error)))
    meshes = [judgement.mesh for _, judgement in results]
    if each_alone and mesh is None and meshes.count(None) == 1:
        # Judge the program without a mesh again under the other's mesh, if that fits.
        number = meshes.index(None)
        with contextlib.suppress(HloError):  # it has other devices, or another mesh
            again = program.judged(programs[number], registry, meshes[1 - number])
            results[number] = titles[number], again
    flags.say(*registry.unused([judgement for _, judgement in results]))
    return results, failures


def _read(path: str) -> program.Program:
    if path.endswith(".py"):
        raise ShardrulesError(
            f"{path} is a Python script; shardrules run {path} judges the programs that it compiles"
        )
    if path == "-":
        text = decode(sys.stdin.buffer.read(), "stdin")
        return program.Program(program.read_text(text, "stdin"), "stdin")
    return program.read_file(pathlib.Path(path))


def _outputs_of(text: str | None) -> list[str] | None:
    """Read ``{replicated}; {devices=[8]<=[8]}``, one sharding per output or one for all."""
    if text is None:
        return None
    shardings = [part.strip() for part in text.split(";")]
    for part in shardings:
        if not (part.startswith("{") and part.endswith("}") and len(part) > 2):
            raise ShardrulesError(
                f"--outputs={text}: {part!r} is not a sharding; write --outputs='{{replicated}}' "
                "for all outputs, or one for each, separated by semicolons"
            )
    return shardings


def mesh_of(text: str | None) -> dict[str, int] | None:
    """Read ``data=4,model=2``."""
    if text is None:
        return None
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (p.strip() for p in part.partition("="))
        if name in mesh:
            raise ShardrulesError(f"--mesh={text} names the axis {name!r} twice")
        if not equals or not name or not size.isdecimal() or not int(size):
            raise ShardrulesError(f"--mesh={text} is not a mesh; write --mesh=data=4,model=2")
        mesh[name] = int(size)
    return mesh
