"""Find, read and judge the programs that a command names: files, patterns, folders of dumps."""

from __future__ import annotations

import argparse
import contextlib
import glob
import math
import os
import pathlib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from shardrules import hlo, program
from shardrules.commands import flags, rules
from shardrules.errors import HloError, ShardrulesError, few
from shardrules.hlo.reader.files import decode

_STDIN = "-"
_OPTIMIZED = re.compile(r"(.*after_optimizations)\.(?:txt|hlo)(?:\.gz)?")
_DUMPED = re.compile(r"(module_\d+\.[^.]+)\..*")
_HOW = "XLA_FLAGS='--xla_dump_to=DIR --xla_dump_hlo_as_text'"
_NAMES = 4  # how many names a list shows


def judged(
    given: Sequence[str], arguments: argparse.Namespace, each_alone: bool = False
) -> tuple[list[tuple[str, hlo.Judgement]], list[tuple[str, str]]]:
    """Judge the named programs (with ``each_alone``, one per name); also return the failures."""
    mesh, told = arguments.mesh, _told(arguments)
    registry: Any = rules.Rules(arguments)
    paths = []
    for names in [[name] for name in given] if each_alone else [given]:
        chosen, notes = _chosen(names)
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
            return program.judged(read, registry, mesh, told)
        except HloError:
            if mesh is None or len(paths) == 1:
                raise
            # With several programs, --mesh describes only programs with its number of devices. So
            # judge this program without it, and raise if the number of devices is the same.
            judgement = program.judged(read, registry, None, told)
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
        # One of the two programs has no mesh: judge it again with the mesh of the other.
        number = meshes.index(None)
        with contextlib.suppress(HloError):  # keep the first judgement if that mesh doesn't fit
            again = program.judged(programs[number], registry, meshes[1 - number], told)
            results[number] = titles[number], again
    flags.say(*registry.unused([judgement for _, judgement in results]))
    return results, failures


def _told(arguments: argparse.Namespace) -> program.Told:
    if arguments.specs is not None and arguments.parameters is not None:
        raise ShardrulesError("--in and --parameters say the same; give one of them")
    other = None if arguments.parameters is None else _read(arguments.parameters)
    return program.Told(arguments.outputs, arguments.specs, other, arguments.slices)


def _read(path: str) -> program.Program:
    if path.endswith(".py"):
        raise ShardrulesError(
            f"{path} is a Python script; shardrules run {path} judges the programs that it compiles"
        )
    if path == "-":
        text = decode(sys.stdin.buffer.read(), "stdin")
        return program.Program(program.read_text(text, "stdin"), "stdin")
    return program.read_file(pathlib.Path(path))


# -- which files -----------------------------------------------------------------------------------


def _chosen(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the named files, each once, and a note for each folder with files left out."""
    files: dict[str, str] = {}  # maps a file's real path to the first name given for it
    notes: list[str] = []
    if list(given).count(_STDIN) > 1:
        raise ShardrulesError("only one program can be read from stdin; give - once")
    for name in given:
        matches = [name]
        if not name:
            raise ShardrulesError("one of the files has an empty name; is a variable not set?")
        if name != _STDIN and not os.path.lexists(name) and glob.has_magic(name):
            matches = sorted(p for p in glob.glob(name, recursive=True) if os.path.isfile(p))
            if not matches:
                raise ShardrulesError(f"no file matches {name}")
        elif os.path.isdir(name):
            matches, note = _of_folder(pathlib.Path(name))
            notes += [note] if note else []
        for file in matches:
            files.setdefault(file if file == _STDIN else os.path.realpath(file), file)
    return list(files.values()), notes


def _of_folder(folder: pathlib.Path) -> tuple[list[str], str]:
    """Choose the compiled text of each module, and describe the files that are left out."""
    # A dump holds many texts of each module; take the one after optimizations. Other files may be
    # HLO that a user or ``run --keep`` wrote: take those by suffix or by their first word.
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise ShardrulesError(f"can't read {folder}: {error.strerror}") from error
    names = [entry.name for entry in entries if entry.is_file()]
    folders = [entry.name for entry in entries if entry.is_dir()]
    files: dict[str, str] = {}  # maps a module's name in the dump to its file
    for name in names:
        optimized = _OPTIMIZED.fullmatch(name)
        if optimized:
            files.setdefault(optimized[1], name)
        elif not _DUMPED.fullmatch(name) and "before_optimizations" not in name:
            if name.endswith((".hlo", ".hlo.gz")) or _begins_as_hlo(folder / name):
                files[name] = name
    if not files:
        others = f"but {few(names, _NAMES)}" if names else "nor any other file"
        raise ShardrulesError(
            f"{folder} holds no text of a compiled program (no *after_optimizations.txt, no "
            f"*.hlo), {others}; a dump is made by {_HOW}"
        )
    left_out = [f"{len(names) - len(files)} other files"] if len(names) > len(files) else []
    if folders:
        left_out.append(f"the folder{'s' if folders[1:] else ''} {few(folders, _NAMES)}")
    note = (
        f"{folder}: {len(files)} of {len(names)} files are judged, those after optimizations; "
        f"left out: {', '.join(left_out)}"
    )
    note = note if left_out else ""
    without = _modules(names) - _modules(files.values())
    if without:
        missing = few(sorted(without), _NAMES)
        note += f"; without such a text (was it dumped with {_HOW}?): {missing}"
    return [str(folder / name) for name in files.values()], note


def _modules(names: Iterable[str]) -> set[str]:
    """Return the names of the dumped modules, from the names of their files."""
    return {match[1] for match in map(_DUMPED.fullmatch, names) if match}


def _begins_as_hlo(path: pathlib.Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(256).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"HloModule ")
    except OSError:
        return False
