"""Read the shardings of a program's parameters from other sources, if its own text lacks them.

JAX 0.12 prints no shardings in compiled text. The text of the same module before XLA's passes has
them, and users write them as specs over a mesh.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from shardrules import errors
from shardrules.hlo.reader import notations
from shardrules.hlo.reader.module import Instruction, Module

_IN_TEXT = re.compile(r"sharding=\{+(?=mesh\[')")
_OF_GROUPS = re.compile(r"replica_groups=(?=mesh\[')")  # JAX 0.12 prints no shardings
_ALONE = re.compile(r"\{+(?=mesh\[')")
_PLAIN = re.compile(r"[\w.\-/]+")


def lacking(module: Module) -> bool:
    """Return whether the entry has parameters on several devices without shardings."""
    parameters = module.entry.parameters
    several = (module.num_partitions or 1) > 1
    return several and any(p.attribute("sharding") is None for p in parameters)


def of_other_text(module: Module, other: Module) -> list[str | None]:
    """Return shardings from another text of the program, such as the one before XLA's passes.

    Raise HloError if the other text belongs to another program or states no shardings.
    """
    ours, theirs = module.entry.parameters, other.entry.parameters
    found = [parameter.attribute("sharding") for parameter in theirs]
    why = ""
    if other.name != module.name:
        why = f"it is the text of module {other.name!r}"
    elif len(ours) != len(theirs):
        why = f"it has {len(theirs)} parameters, and the program {len(ours)}"
    elif not any(found):
        why = "it has no shardings either"
    else:
        pairs = enumerate(zip(ours, theirs, found))
        unlike = [n for n, (a, b, text) in pairs if not _fits(module, other, a, b, text)]
        if unlike:
            n = unlike[0]
            why = (
                f"parameter {n} is {theirs[n].shape} with sharding {found[n]} there, and "
                f"{ours[n].shape} on each device of the program"
            )
    if why:
        raise errors.HloError(
            f"{other.source} does not say how the parameters of {module.source} (module "
            f"{module.name!r}) are sharded: {why}",
            module=module.name,
        )
    return found


def _fits(
    module: Module, other: Module, ours: Instruction, theirs: Instruction, text: str | None
) -> bool:
    """Return whether a parameter has the shape that the other text's sharding gives each device."""
    names = [text.metadata(p).op_name for text, p in ((module, ours), (other, theirs))]
    if all(names) and names[0] != names[1]:
        return False
    for piece, whole, sharding in zip(
        ours.shape.leaves(), theirs.shape.leaves(), notations.split_tuple_sharding(text or "")
    ):
        if len(piece.dimensions) != len(whole.dimensions):
            return False
        try:
            tiles = notations.sharding_tiles(sharding, module.num_partitions or 1)
        except notations.NotationError:
            continue  # the proof reports what it can't read
        pairs = list(zip(piece.dimensions, whole.dimensions))
        if piece.element_type != whole.element_type or any(a > b for a, b in pairs):
            return False
        if tiles is not None and math.prod(-(-b // max(a, 1)) for a, b in pairs) > len({*tiles}):
            return False
    return True


def named_mesh(text: str, given: Sequence[str | None], device_count: int) -> dict[str, int] | None:
    """Return the mesh that the shardings name; None if they name none or several.

    The shardings are those in the text and the given ones. If none of them names a mesh, read the
    groups of the collectives.
    """

    def read(pattern: re.Pattern[str], part: str) -> Iterator[tuple[tuple[str, int], ...]]:
        for match in pattern.finditer(part):
            axes = _mesh_at(part[match.end() : match.end() + 4096], device_count)
            if axes:
                yield axes

    named = {*read(_IN_TEXT, text), *(axes for one in given if one for axes in read(_ALONE, one))}
    named = named or {*read(_OF_GROUPS, text)}
    return dict(named.pop()) if len(named) == 1 else None


def _mesh_at(text: str, device_count: int) -> tuple[tuple[str, int], ...] | None:
    """Return the axes of the mesh at the start of a text, if it is the program's and row-major."""
    try:
        mesh, _ = notations.read_mesh(text)
    except notations.NotationError:
        return None
    own = mesh.devices.size == device_count and mesh.is_row_major
    return mesh.axes if own and not mesh.is_invented else None


# -- specs -----------------------------------------------------------------------------------------


def read_specs(text: str) -> list[str]:
    """Split ``P('data'); P()`` into shardings; raise ShardrulesError if a part isn't one."""
    parts = [part.strip() for part in text.split(";")]
    parts = parts[:-1] if len(parts) > 1 and not parts[-1] else parts
    for part in parts:
        if not _is_hlo(part):
            _spec(part)
    return parts


def as_hlo(text: str, mesh: Mapping[str, int] | None, rank: int) -> str:
    """Return a spec as an HLO sharding for an array of this rank; don't change an HLO sharding."""
    if _is_hlo(text):
        return text
    dims = _spec(text)
    axes = [*itertools.chain.from_iterable(dims)]
    if mesh is None and not axes:
        return "{replicated}"
    unknown = sorted({*axes} - {*(mesh or ())})
    if mesh is None or unknown or len(dims) > rank or len({*axes}) < len(axes):
        why = (
            "needs a mesh: pass --mesh data=4,model=2"
            if mesh is None
            else f"names the axis {unknown[0]!r}, but the mesh has {', '.join(mesh)}"
            if unknown
            else f"has {len(dims)} dimensions, but the parameter has {rank}"
            if len(dims) > rank
            else "names an axis twice"
        )
        raise errors.HloError(f"{text} {why}", spec=text)
    named = ",".join(f"'{axis}'={size}" for axis, size in mesh.items())
    dims += [()] * (rank - len(dims))
    shown = ", ".join("{" + ", ".join(f"'{axis}'" for axis in names) + "}" for names in dims)
    return f"{{mesh[{named}], [{shown}]}}"


def _is_hlo(text: str) -> bool:
    return text.startswith("{") and text.endswith("}") and len(text) > 2


def _spec(text: str) -> list[tuple[str, ...]]:
    """Return the axes of each dimension in ``P('data', None)`` or ``P(data,None)``."""
    match = re.fullmatch(r"(?:jax\.sharding\.)?(?:P|PartitionSpec)\((.*)\)", text.strip(), re.S)
    try:
        if match is None:
            raise ValueError
        tree = ast.parse(f"({match[1]},)" if match[1].strip() else "()", mode="eval").body
        return [tuple(_axes(part)) for part in getattr(tree, "elts", ())]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise errors.ShardrulesError(
            f"{text[:200]!r} is not a sharding; write P('data', None), or HLO's {{replicated}} "
            "or {devices=[8,1]<=[8]}",
            spec=text,
        ) from None


def _axes(part: ast.expr) -> Iterator[str]:
    """Yield the axes that one entry of a spec names; raise ValueError for anything else."""
    if isinstance(part, ast.Name):
        yield part.id
    elif isinstance(part, ast.Constant) and isinstance(part.value, str):
        if not _PLAIN.fullmatch(part.value):
            raise ValueError
        yield part.value
    elif isinstance(part, (ast.Tuple, ast.List)):
        for inner in part.elts:
            yield from _axes(inner)
    elif not (isinstance(part, ast.Constant) and part.value is None):
        raise ValueError
