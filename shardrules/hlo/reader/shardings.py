"""Reads shardings: which partitions hold the same shard."""

from __future__ import annotations

import dataclasses
import re

import numpy as np

from shardrules.hlo.reader import notations as hn

_TILED = re.compile(  # possessive, since spaces could be split in many ways
    r"devices\s*+=\s*+(\[[\d,\s]*\])\s*+(<=\s*+\[[\d,\s]*\]\s*+(?:T\([\d,\s]*\))?|[\d,\s]++)"
    r"\s*+(last_tile_dim_replicate|last_tile_dims=\{([^}]*)\})?\s*+"
    r"(?:shard_(?:as|like)\s++\d++)?\s*+"
)
_ALIKE = re.compile(r"(?<!\s)\s*+shard_(?:as|like)\s++\d++\s*$")
_METADATA = re.compile(r"metadata=\{(?:[^{}\"]|\"(?:[^\"\\]|\\.)*\"|\{[^{}]*\})*\}")


def split_tuple_sharding(text: str) -> list[str]:
    """Split ``{{replicated}, {devices=...}}`` into its leaves; a single leaf is returned alone."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL).strip()
    if not text.startswith("{"):
        text = "{" + text + "}"
    inner = text[1:-1].strip()
    if not inner.startswith("{"):
        return [text]
    leaves = []
    depth = 0
    start = 0
    for position, letter in enumerate(inner):
        if letter == "{":
            if not depth:
                start = position
            depth += 1
        elif letter == "}":
            depth -= 1
            if not depth:
                leaves.append(inner[start : position + 1])
    return leaves


@dataclasses.dataclass(frozen=True)
class Sharding:
    """A sharding, reduced to which partitions hold equal shards."""

    text: str
    # The number of each partition's tile; None if we must assume that every device has its own
    # (maximal, manual, unreduced, unknown).
    tiles: tuple[int, ...] | None
    mesh: hn.TextMesh | None = None  # the mesh in the notation, if any
    why: str = ""  # what the sharding says, for messages


def read_sharding(text: str, partitions: int) -> Sharding:
    """Read one leaf's sharding."""
    inner = _METADATA.sub("", text.strip())
    if inner.startswith("{") and inner.endswith("}"):
        inner = inner[1:-1]
    inner = inner.strip().rstrip(",").strip()
    bare = _ALIKE.sub("", inner)
    if bare == "replicated":
        return Sharding(text, (0,) * partitions, why="replicated")
    if bare.startswith("mesh["):
        return _read_named(text, bare, partitions)
    if bare.startswith("devices"):
        match = _TILED.fullmatch(bare)
        if not match:
            raise hn.NotationError(f"can't read the sharding {text[:80]!r}")
        if match[2].startswith("<="):
            tiles = hn.iota_tiles(match[1] + match[2])
        else:
            sizes, ids = hn.read_ints(match[1]), hn.read_ints(match[2])
            if int(np.prod(sizes, dtype=np.float64)) != len(ids):
                raise hn.NotationError(f"the sharding {text[:80]!r} lists {len(ids)} devices")
            tiles = np.array(ids, dtype=np.int64).reshape(sizes)
        if sorted(tiles.reshape(-1).tolist()) != list(range(partitions)):
            raise hn.NotationError(
                f"the sharding {text[:80]!r} is for {tiles.size} devices, the "
                f"module has {partitions} partitions"
            )
        kinds = []
        if match[3] == "last_tile_dim_replicate":
            kinds = ["replicated"]
        elif match[3]:
            kinds = [k.strip() for k in match[4].split(",") if k.strip()]
        if len(kinds) > tiles.ndim:
            raise hn.NotationError(f"the sharding {text[:80]!r} has too few dimensions")
        if any(k != "replicated" for k in kinds):
            # Reading `{unreduced, replicated}` as replicated would call a needed psum redundant.
            return Sharding(text, None, why=f"sharded as {text}")
        copies = int(np.prod(tiles.shape[tiles.ndim - len(kinds) :], dtype=np.int64))
        flat = tiles.reshape(-1, copies)
        numbers = np.empty(partitions, np.int64)
        numbers[flat.reshape(-1)] = np.repeat(np.arange(flat.shape[0]), copies)
        return Sharding(text, tuple(numbers.tolist()), why=f"sharded as {text}")
    if bare.startswith(("maximal", "manual", "unknown", "unreduced")):
        return Sharding(text, None, why=f"{bare.split()[0].split('_mesh')[0]} ({text})")
    raise hn.NotationError(f"can't read the sharding {text[:80]!r}")


def _read_named(text: str, inner: str, partitions: int) -> Sharding:
    mesh, end = hn.read_mesh(inner)
    rest = inner[end:].strip().lstrip(",").strip()
    if rest == "replicated":
        return Sharding(text, (0,) * partitions, mesh, "replicated")
    if mesh.devices.size != partitions:
        raise hn.NotationError(
            f"the sharding {text[:80]!r} is for {mesh.devices.size} devices, "
            f"the module has {partitions} partitions"
        )
    if not rest.startswith("["):
        return Sharding(text, None, mesh, f"sharded as {text}")
    depth = rest.find("]")
    dims, tail = rest[: depth + 1], rest[depth + 1 :]
    leftover = re.sub(r"replicated=\{[^}]*\}", "", tail).replace(",", "").strip()
    if leftover or "?" in dims:  # unreduced=, manual=, an open dimension
        return Sharding(text, None, mesh, f"sharded as {text}")
    refs = hn.AXIS_REF.findall(dims)
    used = hn.axis_groups(mesh, refs)  # rows: replicas of the whole array; columns: its tiles
    numbers = np.empty(partitions, np.int64)
    numbers[used.reshape(-1)] = np.tile(np.arange(used.shape[1]), used.shape[0])
    return Sharding(text, tuple(numbers.tolist()), mesh, f"sharded as {text}")
