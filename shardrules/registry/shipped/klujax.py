"""klujax's sparse solves (read in 0.5). Left out are those that make or take handles to memory."""

from __future__ import annotations

from shardrules.registry.shipped import Shipped

_NAMES = {
    f"{name}_{kind}": why
    for name, why in (("dot", "a sparse matrix times a matrix"), ("solve", "a sparse solve"))
    for kind in ("f64", "c128")
}
RULES = Shipped(
    primitives={f"klujax:{name}": why for name, why in _NAMES.items()},
    targets=_NAMES,  # which these lower to
)
