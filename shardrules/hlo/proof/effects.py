"""Apply the effect of a kernel's rule to the states of the kernel's operands."""

from __future__ import annotations

import math

import numpy as np

from shardrules.hlo.known import states as hs
from shardrules.hlo.proof import collectives as hc
from shardrules.hlo.proof import customcalls
from shardrules.hlo.proof.evaluation import Proof, Visit
from shardrules.hlo.reader import devices as hd
from shardrules.registry import axistypes


def applied(
    visit: Visit, effect: axistypes.Effect, state: int, resolution: customcalls.CallEffects
) -> int:
    """Return the state of an output, given its effect and the merged state of the operands."""
    # A local kernel's output is equal where its operands are equal. A kernel that communicates acts
    # like a collective over the lines of its axes, and needs a mesh that fits the program. A typed
    # output is equal along the axes that its type does not name, whatever its operands are.
    proof, states = visit.proof, visit.proof.values.states
    if effect.kind == "local":
        return state
    if effect.kind == "unknown":
        return states.blocked(resolution.blocker, state)
    # A rule names axes; only the module's mesh gives their sizes.
    sizes = proof.default_mesh if resolution.mesh is None else resolution.mesh
    if (
        not sizes
        or math.prod(sizes.values()) != proof.values.relations.all_partitions
        or not set(effect.axes) <= set(sizes)
    ):
        what = resolution.blocker.what.split(" is tagged")[0].split(" has a rule")[0]
        what += (
            f" communicates over {','.join(effect.axes)}, and no known mesh with these axes has "
            f"{proof.values.relations.all_partitions} partitions"
        )
        return states.blocked(resolution.blocker._replace(what=what), state)
    key = ("mesh", effect.kind, effect.axes, tuple(sizes.items()))
    channel = proof.cache.get(key)
    if channel is None:
        channel = proof.cache[key] = _mesh_channel(proof, effect, sizes)
    assert resolution.support is not None
    what = resolution.support.what
    if effect.kind == "typed":
        old, relation = states[state], channel.groups.relation
        causes = [*old.causes, (relation, hs.Cause(what, "is declared to vary"))]
        return states.intern(
            old._replace(
                proven=relation,
                optimistic=relation,
                apart=hd.EQUAL,
                causes=states.causes(causes if relation else ()),
            )
        )
    how = "join" if effect.kind == "join" else "exchange"
    return proof.transfer.state(channel, how, state, visit.guard, what)


def _mesh_channel(proof: Proof, effect: axistypes.Effect, sizes: dict[str, int]) -> hc.Channel:
    """Return the channel of a kernel that communicates over axes of a mesh with these sizes."""
    relations = proof.values.relations
    # A typed output is equal along the axes that its type does not name.
    along = [n for n in sizes if (n in effect.axes) != (effect.kind == "typed")]
    rows = hd.Mesh([("", relations.replicas), *sizes.items()], relations).lines(along)
    lists = rows.reshape(-1), np.full(len(rows), rows.shape[1])
    return hc.Channel("custom-call", hc.make_groups(lists, relations), True)
