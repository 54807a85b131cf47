"""Collectives: their kinds, groups, and effect on the relation "same value on devices i and j".

A collective is *redundant* if every device could compute the result from its own operand. The
result of each kind, and when it is redundant:

- all-reduce: a function of the group's operands in order. Redundant if the operands are equal.
- all-gather: as all-reduce. Redundant if the operands are equal: it then repeats one shard.
- reduce-scatter: a function of the operands in order and of the device's position in its group.
  Redundant if the operands are equal.
- all-to-all: as reduce-scatter. Redundant if the operands (in the tuple form, all of them) are
  equal.
- collective-permute: the source's operand; zeros on a device that is not a target. Redundant if
  each source and its target have equal operands.
- collective-broadcast: the first member's operand. Redundant if the operands are equal.
- ragged-all-to-all: as reduce-scatter, a function of all its operands. Never redundant: if pieces
  overlap, the order of arrival decides.

A group with one member moves nothing and is redundant, except for ragged-all-to-all. Only kinds
that can be split by axes can be *overwide*: all-reduce, reduce-scatter, all-gather.
"""

from __future__ import annotations

import dataclasses
import math
import re
import zlib
from typing import Any

import numpy as np

from shardrules.hlo.known import states as hs
from shardrules.hlo.reader import attributes
from shardrules.hlo.reader import devices as hd
from shardrules.hlo.reader import module as hm
from shardrules.hlo.reader import notations as hn

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
_SENDS = ("send", "send-start")
OPCODES = {**{kind: kind for kind in KINDS}, **{f"{kind}-start": kind for kind in KINDS}}
COMMUNICATE = frozenset([*OPCODES, *_SENDS])
_HOW = {
    "all-reduce": "join",
    "all-gather": "join",
    "collective-permute": "permute",
    "collective-broadcast": "first",
}
OVERWIDE_KINDS = ("all-reduce", "reduce-scatter", "all-gather")

# The attributes that say how a collective connects devices, and the attributes without an effect on
# its result (output_to_operand_aliasing only places the result: XLA for GPUs, JAX 0.12). Any other
# attribute may have an effect.
_ATTRIBUTES = frozenset(
    "async_execution_thread backend_config channel_id constrain_layout control-predecessors "
    "dimensions frontend_attributes has_dynamic_root metadata operand_layout_constraints origin "
    "original_value output_to_operand_aliasing replica_groups sharding slice_sizes "
    "source_target_pairs statistics "
    "to_apply use_global_device_ids".split()
)
# Reductions whose result doesn't depend on the operands' order for integers and booleans. With
# floats, the result of any reduction may depend on the order: even max(-0.0, 0.0) does.
_ORDERLESS = frozenset("add multiply minimum maximum and or xor".split())
_WHOLE = re.compile(r"[su]\d+|pred")


@dataclasses.dataclass(frozen=True, eq=False)
class Channel:
    """How one collective instruction connects devices."""

    kind: str  # one of KINDS, or "custom-call"
    groups: hd.Groups  # the device groups; for a permute, the pairs' connected devices
    ordered: bool  # the result depends on the order of the group's members
    mesh: hn.TextMesh | None = None  # the mesh in the notation, if any
    # The reduction's opcode, or a checksum of several operations; "" if there is no reduction.
    reduction: str = ""
    dimension: str = ""  # the dimension along which parts are joined or split, "" for none
    unknown: str = ""  # why its attributes are not understood, "" if they are


def make_groups(lists: hn.IdLists, relations: hd.Relations) -> hd.Groups:
    """Return the groups of lists of members, with the relation that makes members equal."""
    members, sizes = lists
    labels = np.arange(relations.device_count)
    labels[members] = np.repeat(members[np.cumsum(sizes) - sizes], sizes)
    complete = members.size == relations.device_count
    return hd.Groups(members, sizes, relations.intern(labels), complete)


def read_channel(
    module: hm.Module,
    instruction: hm.Instruction,
    kind: str,
    relations: hd.Relations,
    cache: dict[Any, Any],
) -> Channel:
    """Return how a collective connects devices; raise an error for contradictory attributes."""
    values: dict[str, tuple[str, int]] = {}
    unknown = ""
    for key, start, end in instruction.attributes():
        if key in values:
            why = f"attribute {key!r} is given twice"
            raise attributes.syntax_error(instruction.text, start, why)
        values[key] = (instruction.text[start:end], start)
        if key not in _ATTRIBUTES or (key == "has_dynamic_root" and values[key][0] != "false"):
            unknown = f"an unknown attribute, {key}={values[key][0][:40]}"
    (groups, mesh), doubt = _connections(module, instruction, kind, values, relations, cache)
    if kind == "collective-permute":
        return Channel(kind, groups, True, unknown=doubt or unknown)
    reduction, ordered = "", True
    if "to_apply" in values:
        called = module.computations.get(values["to_apply"][0].lstrip("%"))
        reduction = reduction_of(called) if called else ""
        ordered = not (kind == "all-reduce" and orderless(reduction, instruction))
    along = values.get("dimensions", ("", 0))[0].strip("{} \n")
    return Channel(kind, groups, ordered, mesh, reduction, along, doubt or unknown)


# Groups, and the mesh in the notation, if any.
_Connections = tuple[hd.Groups, hn.TextMesh | None]


def _connections(
    module: hm.Module,
    instruction: hm.Instruction,
    kind: str,
    values: dict[str, tuple[str, int]],
    relations: hd.Relations,
    cache: dict[Any, Any],
) -> tuple[_Connections, str]:
    """Return the groups or pairs of a collective, and why they are uncertain ("" if certain)."""
    number = values.get("channel_id", ("", 0))[0].strip()
    permute = kind == "collective-permute"
    text, place = values.get(
        "source_target_pairs" if permute else "replica_groups",
        ("" if permute else "{}", instruction.start),
    )
    flat: bool | None = None
    if kind in ("all-reduce", "all-gather", "reduce-scatter"):
        flat = values.get("use_global_device_ids", ("false", 0))[0].strip() == "true"
    # XLA's text parser accepts any channel_id, its protocol buffers only those above 0
    # (HloInstruction::CreateFromProto). If the two readings differ, neither is certain.
    clear = not number or re.fullmatch("0*[1-9][0-9]*", number)
    connections: list[_Connections] = []
    refused: hn.NotationError | None = None
    for channel in [bool(number)] if clear else [True, False]:
        how = (permute, flat, text, channel)
        try:
            if how not in cache:
                read = read_pairs if permute else _groups
                cache[how] = read(text, channel, flat, relations)
            connections.append(cache[how])
        except hn.NotationError as error:
            refused = error
    if not connections:
        raise attributes.syntax_error(
            module.text, place, f"{instruction.opcode} {instruction.name!r}: {refused}"
        )
    doubt = ""
    if not clear and (len(connections) < 2 or connections[0][0] != connections[1][0]):
        doubt = f"channel_id={number}, which XLA reads in two ways"
    elif not permute and "replica_groups" not in values:  # XLA prints them even if they are empty
        doubt = "no replica_groups: is the text printed without attributes?"
    elif not relations.counts_stated and not text.strip("{} \n"):
        doubt = "groups of all devices, but the text doesn't say how many (pass mesh=)"
    return connections[0], doubt


def _groups(text: str, channel: bool, flat: bool | None, relations: hd.Relations) -> _Connections:
    """Return the groups of devices; channel_id and the global flag say what the ids mean."""
    lists, mesh = hn.read_groups(text)
    if flat is None:
        mode = "cross_partition" if channel else "cross_replica"
    elif flat and not channel:
        raise hn.NotationError("use_global_device_ids without a channel_id")
    elif flat:
        mode = "flattened"
    else:
        mode = "cross_replica_and_partition" if channel else "cross_replica"
    if mesh is not None:  # XLA's verifier checks the same (jaxlib 0.10.2, 0.12)
        count = hn.id_count(mode, relations.partitions, relations.replicas)
        if mesh.devices.size != count:
            raise hn.NotationError(f"a mesh of {mesh.devices.size} devices in a module for {count}")
    members, sizes = hn.flatten_groups(lists, mode, relations.partitions, relations.replicas)
    members = _in_each_slice(members, relations).reshape(-1)
    return make_groups((members, np.tile(sizes, relations.slices)), relations), mesh


def unknown_kind(instruction: hm.Instruction) -> bool:
    """Return whether this is a collective of an unknown kind, such as XLA's collective-reduce."""
    kind = re.sub("-(start|update|done)$", "", instruction.opcode)
    return kind not in KINDS and (
        kind.startswith(("all-", "collective-", "reduce-scatter", "ragged-all-"))
        or any(
            k in ("replica_groups", "source_target_pairs") for k, _, _ in instruction.attributes()
        )
    )


def updates_in_place(instruction: hm.Instruction, kind: str) -> bool:
    """Return whether a permute writes a slice of one operand into another."""
    return (
        kind == "collective-permute"
        and len(instruction.operands) == 4
        and instruction.attribute("slice_sizes") is not None
    )


def slice_bytes(instruction: hm.Instruction, shape: hm.Shape) -> int:
    """Return the bytes of the operand's slices that an in-place permute moves."""
    slices = re.findall(r"\{([\d,\s]*)\}", instruction.attribute("slice_sizes") or "")
    kinds = {leaf.bits for leaf in shape.leaves()}
    if not slices or len(kinds) != 1:
        return shape.bytes
    counts = [math.prod(hn.read_ints(sizes)) for sizes in slices]
    return (sum(counts) * kinds.pop() + 7) // 8


def orderless(reduction: str, instruction: hm.Instruction) -> bool:
    """Return whether a reduction gives the same bits for any order of its operands."""
    kinds = {leaf.element_type for leaf in instruction.shape.leaves()}
    return reduction in _ORDERLESS and all(map(_WHOLE.fullmatch, kinds))


def reduction_of(computation: hm.Computation) -> str:
    """Return the opcode of a reduction, or a checksum if it applies several operations."""
    if not computation.calling:  # a computation that calls others has their names in its checksum
        computation = computation.original
    root = computation.instructions[computation.root]
    plain = {computation.instructions[o].opcode for o in root.operands} == {"parameter"}
    if plain and len(set(root.operands)) == 2 and len(computation.instructions) == 3:
        return root.opcode
    steps = [
        (i.opcode, i.operands or i.literal, i.shape.element_type)
        + tuple(map(i.attribute, ("direction", "to_apply", "calls")))
        for i in computation.instructions
    ]
    return f"{len(steps)} operations, #{zlib.crc32(repr((computation.root, steps)).encode()):08x}"


def read_pairs(text: str, channel: bool, _: bool | None, relations: hd.Relations) -> _Connections:
    """Return the groups of devices that a permute's pairs connect."""
    if not text:
        raise hn.NotationError("a collective-permute without source_target_pairs")
    partitions, replicas = relations.partitions, relations.replicas
    members, sizes = hn.read_groups(text)[0]
    limit = partitions if channel else replicas
    if (sizes != 2).any():
        raise hn.NotationError(f"expected pairs {{{{0,1}},{{1,2}}}}, got {text[:60]!r}")
    beyond = members[members >= limit]
    if beyond.size:
        raise hn.NotationError(f"id {beyond[0]} is beyond the {limit} that the module has")
    pairs = members.reshape(-1, 2)
    if np.unique(pairs[:, 1]).size != len(pairs):
        raise hn.NotationError("a device is the target of two pairs")
    if channel:
        pairs = (pairs + np.arange(replicas).reshape(-1, 1, 1) * partitions).reshape(-1, 2)
    else:
        pairs = (pairs * partitions + np.arange(partitions).reshape(-1, 1, 1)).reshape(-1, 2)
    return pair_groups(_in_each_slice(pairs, relations).reshape(-1, 2), relations), None


def pair_groups(pairs: np.ndarray, relations: hd.Relations) -> hd.Groups:
    """Return the groups of devices that the given pairs connect."""
    # The groups are the classes of the linked relation that have an end of a pair. Sorting devices
    # by their class puts the members of each group next to each other.
    ends = pairs.T
    relation = relations.linked(ends)
    labels = relations.labels(relation)
    connected = np.zeros(relations.device_count, bool)
    connected[labels[ends]] = True
    devices = np.flatnonzero(connected[labels])
    devices = devices[np.argsort(labels[devices], kind="stable")]
    starts = np.flatnonzero(np.diff(labels[devices], prepend=-1))
    sizes = np.diff(starts, append=devices.size)
    return hd.Groups(devices, sizes, relation, devices.size == relations.device_count, ends)


def _in_each_slice(ids: np.ndarray, relations: hd.Relations) -> np.ndarray:
    """Repeat one slice's device ids for every slice, since the text is one slice's program."""
    starts = np.arange(relations.slices) * (relations.device_count // relations.slices)
    repeated: np.ndarray = starts.reshape(-1, *(1,) * ids.ndim) + ids
    return repeated


# XLA for GPUs splits the permutes of pipelines into send and recv, with the pairs in a frontend
# attribute. The proof proves nothing about received data, but the sent bytes count. (``slices``
# reads the sends between TPU slices.)
_PAIRS = re.compile(
    r'_xla_send_recv_source_target_pairs\s*+=\s*+"?(\{\s*+(?:\{[\d,\s]*+\}[\s,]*+)*+\})'
)
_TYPE = re.compile(r'_xla_megascale_transfer_type\s*=\s*"?(\w+)')


def is_send(instruction: hm.Instruction) -> bool:
    """Return whether a send goes to other devices; callbacks on TPU send to the host."""
    if instruction.opcode not in _SENDS:
        return False
    hints = instruction.attribute("frontend_attributes") or ""
    return instruction.attribute("is_host_transfer") != "true" or "megascale" in hints


def send_blocker(instruction: hm.Instruction) -> hs.Blocker:
    """Return the blocker of a send, which the proof does not follow."""
    match = _TYPE.search(instruction.attribute("frontend_attributes") or "")
    to = "other devices" + (f" ({match[1]} by Megascale)" if match else "")
    return hs.Blocker(f"send {instruction.name!r} to {to}, which the proof doesn't follow")


def read_send(instruction: hm.Instruction, relations: hd.Relations) -> Channel:
    """Return a send's channel; if the text has no pairs, the send may reach any device."""
    match = _PAIRS.search(instruction.attribute("frontend_attributes") or "")
    # As for a permute, but channel 0 means no channel (XLA's GetP2PConfigForSendRecv).
    channel = (instruction.attribute("channel_id") or "").strip(" 0") != ""
    try:
        groups, _ = read_pairs(match[1] if match else "", channel, None, relations)
    except hn.NotationError:
        groups = everyone(relations)
    return Channel("collective-permute", groups, True)


def everyone(relations: hd.Relations) -> hd.Groups:
    """Return the groups of a collective that may connect any devices."""
    count = relations.device_count
    groups = make_groups((np.arange(count), np.array([count])), relations)
    return dataclasses.replace(groups, complete=False)  # so that no axes are named


def _sequence_numbers(labels: np.ndarray, groups: hd.Groups, sort: bool) -> Any:
    """Return a number for each group; groups with the same labels have the same number."""
    if groups.matrix is not None:
        seen = labels[groups.matrix]
        return hd.row_numbers(np.sort(seen, axis=1) if sort else seen)
    numbers: dict[bytes, int] = {}
    rows = np.split(labels[groups.members], groups.starts[1:])
    keys = [(np.sort(row) if sort else row).tobytes() for row in rows]
    return [numbers.setdefault(key, len(numbers)) for key in keys]


class Exchange:
    """Applies collectives to states, and caches the results."""

    def __init__(self, states: hs.States):
        self.states = states
        self.relations = states.relations
        # The keys hold id(groups), because groups with the same relation may order or move their
        # members differently. The proof keeps the groups alive, so an id stays unique.
        self._relations: dict[Any, int] = {}
        self._states: dict[Any, int] = {}

    def relation(self, groups: hd.Groups, ordered: bool, how: str, relation: int) -> int:
        """Return the relation of a result; ``how`` is join, exchange, permute or first."""
        if how == "join" and relation == hd.DISTINCT:
            return groups.relation
        key = (how, ordered, relation, id(groups))
        if key not in self._relations:
            labels = self._moved(groups, ordered, how, relation)
            self._relations[key] = self.relations.intern(labels)
        return self._relations[key]

    def _moved(self, groups: hd.Groups, ordered: bool, how: str, relation: int) -> np.ndarray:
        """Return the devices' labels after a collective."""
        # Two devices get the same label only if they surely hold the same value afterwards. So the
        # labels of different kinds of values must not overlap: values that a group joins are below
        # 2 * count, devices in no group have 2 * count to 3 * count, and exchanged pieces have
        # 4 * count and more.
        labels = self.relations.labels(relation)
        count = self.relations.device_count
        if how == "permute":
            moved = np.full(count, count)  # a device that is not a target gets zeros
            assert groups.ends is not None
            sources, targets = groups.ends
            moved[targets] = labels[sources]
            return moved
        if how == "first":
            values: Any = labels[groups.members[groups.starts]]
        elif relation == hd.EQUAL:  # groups of the same size get the same value
            values = groups.sizes
        elif relation == hd.DISTINCT:
            values = np.arange(groups.sizes.size)
        else:
            values = _sequence_numbers(labels, groups, how == "join" and not ordered)
        numbers = np.repeat(values, groups.sizes)
        if how == "exchange":
            numbers = numbers * groups.size + groups.places + 4 * count
        moved = np.arange(count) + 2 * count  # a device in no group equals no other
        moved[groups.members] = numbers
        return moved

    def state(self, channel: Channel, how: str, state: int, guard: int, what: str) -> int:
        """Return the state of a result; ``guard`` is the state of the predicates around it."""
        # Transform each relation of the state by the collective: the proven one, the optimistic
        # one, and each cause's own. If the predicates around the collective may differ within a
        # group, some members may not take part: then nothing is proven about the result.
        groups, ordered = channel.groups, channel.ordered
        rest = what if how == "exchange" else ""
        key = (how, ordered, state, guard, id(groups), rest)
        if key in self._states:
            return self._states[key]
        old, rules = self.states[state], self.states[guard]
        proven = self.relation(groups, ordered, how, old.proven)
        optimistic = self.relation(groups, ordered, how, old.optimistic)
        # An exchange gives each position its own piece, which is a separate cause (below). The
        # operands' causes act as in a join.
        plain = "join" if how == "exchange" else how
        causes = [(self.relation(groups, ordered, plain, r), c) for r, c in old.causes]
        if how == "exchange":
            cause = hs.Cause(what, "gives each position its own piece")
            equal = self.relation(groups, ordered, how, hd.EQUAL)
            causes += [(equal, cause), (optimistic, cause)]
        elif how == "permute":
            causes.append((optimistic, hs.Cause(what, "moves data between devices")))
        elif old.causes:
            causes.append((optimistic, old.causes[-1][1]))
        elif optimistic != hd.EQUAL:
            causes.append((optimistic, hs.Cause(what, "leaves devices out of its groups")))
        uniform = self.uniform(rules.proven, channel)
        if not uniform:
            proven = hd.DISTINCT
        if not self.uniform(rules.optimistic, channel):
            optimistic = hd.DISTINCT
            cause = hs.Cause(what, "runs under a predicate that differs within a group")
            causes.append((optimistic, cause))
        moves = how in ("exchange", "permute")
        self._states[key] = self.states.intern(
            hs.ValueState(
                proven,
                optimistic,
                self.states.causes(causes),
                hs.union(old.blockers, rules.blockers if proven == hd.DISTINCT else ()),
                hs.union(old.supports, rules.supports),
                old.constant and rules.constant and proven == hd.EQUAL,
                self._apart(groups, how, old.apart, uniform),
                self.relations.coarsen(old.moved, groups.relation if moves else hd.DISTINCT),
            )
        )
        return self._states[key]

    def _apart(self, groups: hd.Groups, how: str, apart: int, uniform: bool) -> int:
        """Return ``ValueState.apart`` after a collective."""
        # A later step may add moved data to data that stayed, as a ring of permutes does. So the
        # members of a group no longer count as apart. Two groups stay apart if their members' data
        # differ even after sorting.
        if apart == hd.EQUAL or not (uniform and groups.complete):
            return hd.EQUAL
        return self.relation(groups, False, "first" if how == "first" else "join", apart)

    def uniform(self, relation: int, channel: Channel) -> bool:
        """Return whether the members of every group are equal."""
        return self.relations.refines(channel.groups.relation, relation)


def result_how(instruction: hm.Instruction, channel: Channel) -> str:
    """Return how a collective transforms relations: join, exchange, permute or first."""
    if channel.kind == "all-to-all" and channel.groups.matrix is not None:
        # If each member sends one value to all members, all members receive the same values.
        alone = len(instruction.operands) > 1 and len(set(instruction.operands)) == 1
        return "join" if alone else "exchange"
    return _HOW.get(channel.kind, "exchange")
