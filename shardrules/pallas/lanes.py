"""Whether the lanes of a vector of indices differ, by how the vector is made."""

from __future__ import annotations

from typing import Any

from shardrules.pallas.walk import Frame, Walk

__all__ = ["lanes_differ"]


def lanes_differ(walk: Walk, frame: Frame, atom: Any) -> bool:
    """Whether a vector is iota plus or minus what is the same in all lanes."""
    # Sums of integers wrap around, which keeps different values different.
    while True:
        name, eqn = _made_by(walk, frame, atom)
        if name not in ("jax:add", "jax:sub"):
            return name == "jax:iota" and atom.aval.ndim == 1 and _holds_each_lane(atom.aval)
        one, other = eqn.invars
        if _lanes_agree(walk, frame, other):
            atom = one
        elif _lanes_agree(walk, frame, one):
            atom = other
        else:
            return False


def _lanes_agree(walk: Walk, frame: Frame, atom: Any) -> bool:
    if atom.aval.size == 1:
        return True
    name, eqn = _made_by(walk, frame, atom)
    return name == "jax:broadcast_in_dim" and eqn.invars[0].aval.size == 1


def _made_by(walk: Walk, frame: Frame, atom: Any) -> tuple[str | None, Any]:
    eqn = None if hasattr(atom, "val") else frame.made_by.get(atom)
    return (None, None) if eqn is None else (walk.name(eqn), eqn)


def _holds_each_lane(aval: Any) -> bool:
    return aval.dtype.kind in "iu" and aval.size <= 2 ** (8 * aval.dtype.itemsize)
