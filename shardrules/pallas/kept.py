"""Which reads only put back what they found: a masked store that is written with ``jnp.where``."""

from __future__ import annotations

from typing import Any

from shardrules.pallas.events import Read
from shardrules.pallas.regions import SOME
from shardrules.pallas.values import Values

__all__ = ["keeps_what_was_there"]


def keeps_what_was_there(values: Values, event: Read) -> list | None:
    """Return the stores that put what is read back where it stood; None if it goes elsewhere.

    ``ref[i] = jnp.where(mask, new, ref[i])`` is a masked store: what stood there stays, and goes
    nowhere else. ``jnp.where(i == 0, 0, ref[...])`` drops it where ``i`` is known to be 0.

    Returns:
      Each store's equation, and the (scope, atom) of each mask that keeps elements from it.
    """
    scope, eqn = event.scope, event.eqn
    if scope is None or len(eqn.outvars) != 1 or eqn.primitive.name not in ("get", "masked_load"):
        return None
    found: list = []
    return found if _only_kept(values, scope, eqn.outvars[0], event, (), found) else None


def _only_kept(values, scope, var, event, masks, found) -> bool:
    walk = values.walk
    uses = scope.uses.get(var)
    if not uses or any(out is var for out in scope.jaxpr.outvars):
        return False
    for eqn in uses:
        name = walk.names.primitive(eqn.primitive)
        if name == "state:swap" and masks:
            ref, value, *leaves = eqn.invars
            same = (
                value is var
                and scope.refs.get(ref) is event.root
                and (walk.region(scope, eqn.params["tree"].unflatten(leaves)) == event.region)
            )
            if not same or event.region is SOME:
                return False
            found.append((eqn, masks))
        elif name == "jax:convert_element_type":
            if not _only_kept(values, scope, eqn.outvars[0], event, masks, found):
                return False
        else:
            how = _selects(values, scope, eqn, var)
            if how is _DROPS:
                continue
            if not how or not _only_kept(
                values, scope, eqn.outvars[0], event, (*masks, how), found
            ):
                return False
    return True


_DROPS = "drops"


def _selects(values, scope, eqn, var) -> Any:
    """Return the (scope, atom) that selects ``var`` as an unmoved case, _DROPS, or None."""
    walk = values.walk
    name = walk.names.primitive(eqn.primitive)
    places = [i for i, a in enumerate(eqn.invars) if a is var]
    if len(places) != 1 or len(eqn.outvars) != 1:
        return None
    if name == "jax:select_n":
        if not places[0]:
            return None
        which = values.of_all(scope, eqn.invars[0])
        return (scope, eqn.invars[0]) if which in (None, places[0] - 1) else _DROPS
    if name not in ("jax:jit", "jax:pjit"):
        return None
    (inner,) = scope.inner.get(id(eqn), (None,))  # jnp.where is a jit of its own
    if inner is None:
        return None
    var = inner.jaxpr.invars[places[0]]
    while True:
        uses = inner.uses.get(var, ())
        if len(uses) != 1 or any(out is var for out in inner.jaxpr.outvars):
            return None
        (eqn,) = uses
        if walk.names.primitive(eqn.primitive) == "jax:convert_element_type":
            var = eqn.outvars[0]
        else:
            how = _selects(values, inner, eqn, var)
            return how if eqn.outvars[0] is inner.jaxpr.outvars[0] else None
