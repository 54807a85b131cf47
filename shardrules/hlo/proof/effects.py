"""What crosses devices or leaves the program in the proof: collectives and custom calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from shardrules.hlo.known import periods, ranges
from shardrules.hlo.known import states as hs
from shardrules.hlo.known.ranges import Exact, Ranged, Started
from shardrules.hlo.known.values import Values
from shardrules.hlo.proof import collectives as hc
from shardrules.hlo.proof import customcalls
from shardrules.hlo.reader import module as hm

_BITS = {
    "add": np.add,
    "multiply": np.multiply,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_BOOLEANS = {
    "minimum": np.logical_and,
    "maximum": np.logical_or,
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
}


class Record:
    """What the proof saw at one collective, over all callers.

    Attributes:
      operands: each operand's value.
      guard: the state of the predicates under which it runs.
      channel: how it connects devices.
    """

    __slots__ = ("operands", "guard", "channel")

    def __init__(self, operands, guard, channel):
        self.operands = operands
        self.guard = guard
        self.channel = channel


class Outside(Values):
    """The part of the proof that evaluates collectives and custom calls.

    What it reads besides is set by ``Proof``.
    """

    module: hm.Module
    partitions: int
    replicas: int
    transfer: hc.Transfer
    records: dict[tuple[str, int], Record]
    default_mesh: dict[str, int] | None
    _meshes: dict[Any, Any]
    _channels: dict[Any, hc.Channel]
    _applied: Callable[[hm.Instruction], str]

    def _collective(self, computation, position, instruction, operands, guard):
        opcode = instruction.opcode
        kind = hc.OPCODES[opcode]
        where = (computation.name, position)
        channel = self._channels.get(where)
        if channel is None:
            channel = self._channels[where] = hc.read_channel(
                self.module,
                instruction,
                kind,
                self.relations,
                self.partitions,
                self.replicas,
                self._cache,
            )
            own = self._applied(instruction)
            if own:
                channel = dataclasses.replace(channel, unread=f"a reduction by {own}")
                self._channels[where] = channel
        if channel.unread:
            what = f"{kind} {instruction.name!r} has {channel.unread}"
            operands = [self._blocked(hs.Blocker(what), [v]) for v in operands]
        record = self.records.get(where)
        if record is None:
            self.records[where] = Record(list(operands), guard, channel)
        else:
            record.operands = [self.join(a, b) for a, b in zip(record.operands, operands)]
            record.guard = self.states.refine(record.guard, guard)
        if channel.unread:
            return self._all(operands)
        how = self._how(computation, instruction, kind, channel, operands)
        what = f"{kind} {instruction.name!r}"

        def apply(state: int) -> int:
            return self.transfer.state(channel, how, state, guard, what)

        if kind == "ragged-all-to-all" or kind == "all-to-all" and len(operands) > 1:
            # A member's piece k may come from any operand of member k.
            result: Any = apply(self._all(operands))
        elif hc.updates_in_place(instruction, kind):
            # Beside what is moved stands what the target held.
            whole = self._all(operands)
            result = self.states.refine(apply(whole), whole)
        elif len(operands) == 1:
            value = operands[0]
            known = self._known(channel, value, guard)
            if known is not None:
                result = known
            elif isinstance(value, Ranged) and kind in (
                "all-reduce",
                "collective-permute",
                "collective-broadcast",
            ):
                result = Ranged(tuple((s, apply(p)) for s, p in value.cuts))
            else:
                result = apply(self.collapse(value))
        else:
            result = []
            for value in operands:
                known = self._known(channel, value, guard)
                if known is None:
                    known = (
                        Ranged(tuple((s, apply(p)) for s, p in value.cuts))
                        if isinstance(value, Ranged) and kind == "all-reduce"
                        else apply(self.collapse(value))
                    )
                result.append(known)
            result = tuple(result)
        if not opcode.endswith("-start"):
            return result
        parts = instruction.shape.elements or (instruction.shape,)
        if kind == "all-reduce" and not parts[0].is_tuple and len(parts) == len(operands):
            return result  # and its operands beside it only from JAX 0.12 on
        return Started(operands[0] if len(operands) == 1 else tuple(operands), result)

    def _how(self, computation, instruction, kind: str, channel: hc.Channel, operands) -> str:
        """Say how a collective transforms relations; equal pieces don't show their position."""
        how = hc.result_how(kind)
        if how != "exchange" or channel.groups.matrix is None:
            return how
        if kind == "all-to-all" and len(instruction.operands) > 1:
            # Each member gets the same from member m: all that m sends is one value.
            return "join" if len(set(instruction.operands)) == 1 else how
        if kind == "reduce-scatter" and len(instruction.operands) == 1:
            places = ranges.read_ints(instruction.attribute("dimensions"))
            # A ring adds each piece up from another member on: that shows in floats, unless all
            # that is added is equal.
            state = self.states[self.collapse(operands[0])]
            if not hc.orderless(channel, instruction) and not self.transfer.uniform(
                state.proven, channel
            ):
                return how
            if len(places) == 1 and periods.pieces_equal(
                self.module, computation, instruction.operands[0], places[0], channel.groups.size
            ):
                return "join"
        return how

    def _known(self, channel: hc.Channel, value: Any, guard: int) -> Any:
        """Compute what a collective gives of numbers that are known on every device.

        None where its result isn't a reduction of integers, or one device's copy, or where not
        every member of a group is sure to take part.
        """
        if not isinstance(value, Exact) or not self.transfer.uniform(
            self.states[guard].proven, channel
        ):
            return None
        count = self.relations.device_count
        if count * value.array[0].size > 8 * ranges.MAX_ELEMENTS:
            return None
        rows = np.broadcast_to(value.array, (count,) + value.array.shape[1:])
        if channel.kind == "collective-permute":
            moved = np.zeros_like(rows)  # a device that is no target gets zeros
            sources, targets = np.array(channel.pairs, np.int64).reshape(-1, 2).T
            moved[targets] = rows[sources]
            return self._exact(moved, value.splat, [value, guard])
        if channel.kind != "all-reduce" or channel.ordered or not channel.groups.complete:
            return None
        operation = (_BOOLEANS if rows.dtype == np.bool_ else _BITS).get(channel.reduction)
        if operation is None:
            return None
        summed = np.empty_like(rows)
        with np.errstate(all="ignore"):
            for group in channel.groups.rows:
                members = list(group)
                summed[members] = operation.reduce(rows[members], axis=0, dtype=rows.dtype)
        return self._exact(summed, value.splat, [value, guard])

    def _spread(self, computation, instruction, operands) -> Any:
        """Evaluate the ends of a TPU collective that is spread over fusions; None for others."""
        target = (instruction.attribute("custom_call_target") or "").strip('"')
        if target not in (customcalls.ASYNC_START, customcalls.ASYNC_DONE):
            return None
        inner = [
            (o, v)
            for o, v in zip(instruction.operands, operands)
            if computation.instructions[o].opcode in hc.KINDS
        ]
        if len(inner) != 1:
            return None
        if target == customcalls.ASYNC_DONE:
            return inner[0][1]
        # What is under way is for the done alone: the operand goes through, the rest is closed.
        collective = computation.instructions[inner[0][0]]
        record = self.records.get((computation.name, inner[0][0]))
        elements = instruction.shape.elements
        if (
            record is None
            or not elements
            or len(collective.operands) != 1
            or (
                elements[0].dimensions
                != computation.instructions[collective.operands[0]].shape.dimensions
            )
        ):
            return None
        unfinished = self._blocked(
            hs.Blocker(f"the unfinished result of {collective.opcode} {collective.name!r}"),
            operands,
        )
        return (record.operands[0],) + (unfinished,) * (len(elements) - 1)

    def _custom_call(self, computation, position, instruction, operands, guard):
        if operands:
            spread = self._spread(computation, instruction, operands)
            if spread is not None:
                return spread
        where = (computation.name, position)
        found = self.opaque.get(where)
        if found is None:
            found = self.opaque[where] = customcalls.resolve(
                self.module, instruction, self.registry
            )
        if found.uninitialised:
            return self._empty_buffer(False)
        if found.effects is None:
            return self._blocked(found.blocker, operands)
        own = self._applied(instruction)
        if own:
            what = f"custom call {instruction.name!r} applies {own}"
            return self._blocked(hs.Blocker(what), operands)
        if self.unwritten and found.support is not None:
            # A kernel that is well formed reads no buffer that it was given to write to: its result
            # lies there.
            written = self.states.intern(hs.State(supports=(customcalls.FILLED,)))
            aliased = customcalls.aliased(instruction)
            operands = [
                written if type(o) is int and o in self.unwritten and n in aliased else o
                for n, o in enumerate(operands)
            ]
        state = self._all(operands)
        if found.support is not None:
            state = self.states.refine(
                state, self.states.intern(hs.State(supports=(found.support,)))
            )
        parts = [self._effect(e, state, found, guard, instruction) for e in found.effects]
        if instruction.shape.elements is None:
            return parts[0] if parts else state
        return tuple(parts)

    def _empty_buffer(self, filling: bool) -> int:
        """Give the state of a buffer that holds whatever lay there.

        Args:
          filling: a loop fills it piece by piece; this is its state inside of the loop.
        """
        loop = ", in a loop that fills it" if filling else ""
        state = self.states.blocked(
            hs.Blocker(f"an uninitialised buffer that nothing is shown to fill{loop}")
        )
        if state not in self.unwritten:
            written = self.states.intern(hs.State(supports=(customcalls.FILLED,)))
            self.unwritten[state] = written if filling else state
        return state

    def _effect(self, effect, state: int, found, guard: int, instruction) -> int:
        if effect.kind == "local":
            return state
        if effect.kind == "unknown":
            return self.states.blocked(found.blocker, state)
        size = 1
        for length in (found.mesh or {}).values():
            size *= length
        sizes = found.mesh
        if sizes is None:  # a rule: its axes are names that only the module's mesh explains
            sizes = self.default_mesh
            size = int(np.prod(list(sizes.values()))) if sizes else 0
        if sizes is None or size != self.partitions or not set(effect.axes) <= set(sizes):
            return self.states.blocked(
                found.blocker._replace(
                    what=f"{found.blocker.what.split(' is tagged')[0].split(' has a rule')[0]} "
                    f"communicates over {','.join(effect.axes)}, in no mesh known to fit "
                    f"{self.partitions} partitions"
                ),
                state,
            )
        key = (effect.kind, effect.axes, tuple(sizes.items()))
        channel = self._meshes.get(key)
        if channel is None:
            channel = self._meshes[key] = self._mesh_channel(effect, sizes)
        if effect.kind == "typed":
            old = self.states[state]
            relation = channel.groups.relation
            return self.states.intern(
                hs.State(
                    relation,
                    relation,
                    self.states.causes(
                        [
                            *old.causes,
                            (relation, hs.Cause(found.support.what, "is declared to vary")),
                        ]
                        if relation
                        else ()
                    ),
                    old.blockers,
                    old.supports,
                )
            )
        return self.transfer.state(
            channel,
            "join" if effect.kind == "join" else "exchange",
            state,
            guard,
            found.support.what,
        )

    def _mesh_channel(self, effect, sizes: dict[str, int]) -> hc.Channel:
        names = list(sizes)
        ids = np.arange(self.partitions).reshape([sizes[n] for n in names])
        # A typed output is equal along the axes that it does not name.
        along = [n for n in names if (n in effect.axes) != (effect.kind == "typed")]
        rest = [i for i, n in enumerate(names) if n not in along]
        order = (
            [names.index(n) for n in along]
            if effect.kind == "typed"
            else [names.index(n) for n in effect.axes]
        )
        width = int(np.prod([sizes[names[i]] for i in order], dtype=np.int64)) if order else 1
        rows = ids.transpose(rest + order).reshape(-1, width).tolist()
        rows = [
            [r * self.partitions + d for d in row] for r in range(self.replicas) for row in rows
        ]
        return hc.Channel("custom-call", hc.make_groups(rows, self.relations), None, True, None, "")
