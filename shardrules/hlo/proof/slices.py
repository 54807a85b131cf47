"""Read collectives between TPU slices.

The text of a program for several slices is one slice's program: it counts one slice's partitions,
and its groups are groups within each slice. Between slices, data goes through the hosts to
Megascale's runtime: a send and a recv with the same name are one collective::

    send(%x, %token), frontend_attributes={_xla_host_transfer_rendezvous="all-reduce_0",
        _xla_megascale_transfer_type="ALL_REDUCE", _xla_megascale_reduce_operation="SUM",
        _xla_megascale_target="{1,2}x{0:7}",...}

The target counts slices from 1. ``{1,2}x{0:7}`` stands for eight groups: each device of slice 1
with the device of the same id in slice 2. Other targets list ids, with 100000 ids for each slice; a
pair is ``{100007->200000}``.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Mapping

import numpy as np

from shardrules import errors
from shardrules.hlo.known import states as hs
from shardrules.hlo.proof import collectives as hc
from shardrules.hlo.reader import devices as hd
from shardrules.hlo.reader import module as hm

SLICE_ID = "SliceId"  # a custom call's target: the number of the slice, from 0
_MEGASCALE = "xla_megascale"
_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_REDUCTIONS = {"SUM": "add", "PROD": "multiply", "MIN": "minimum", "MAX": "maximum"}
_EACH = 100_000  # ids for each slice
_NAME = re.compile(r'_xla_host_transfer_rendezvous\s*=\s*"([^"]*)"')
_TYPE = re.compile(r'_xla_megascale_transfer_type\s*=\s*"?(\w+)')
_REDUCTION = re.compile(r'_xla_megascale_reduce_operation\s*=\s*"?(\w+)')
_TARGET = re.compile(r"_xla_megascale_target\s*=\s*")
_SAME_ID = re.compile(r'"?\{(\d{1,3}(?:,\d{1,3})*)\}x\{(\d{1,5}):(\d{1,5})\}"?\s*(?=[,}])')
_LISTED = re.compile(r'"?\{((?:\{\d{6,8}(?:(?:,|->)\d{6,8})*\}(?:,\s*)?)*)\}"?\s*(?=[,}])')
IN_ORDER = hs.Support(
    "slices",
    "assumption",
    "standing",
    "the mesh takes one slice after the other, and the devices of each in the same order",
)


def relations_of(
    module: hm.Module,
    partitions: int,
    replicas: int,
    stated: bool,
    mesh: Mapping[str, int] | None,
    told: int | hd.SliceOrder | None,
) -> hd.Relations:
    """Return the relations over the devices of all slices; ``told`` is ``judge``'s ``slices``."""
    each = partitions * replicas
    order = None if told is None or isinstance(told, int) else tuple(told)
    if order is not None and len(order) == each:
        order = told = None  # the text counts the devices of all slices
    if isinstance(told, int) and told < 1:
        raise errors.HloError(f"slices={told} is not a positive number", slices=told)
    count = told if isinstance(told, int) else _count(module, each, mesh)
    if order is not None:
        sizes = collections.Counter(number for number, _ in order)
        count = len(sizes)
        if {*sizes.values()} != {each}:
            raise errors.HloError(
                f"slices gives {len(order)} devices of {count} slices, but module {module.name!r} "
                f"was compiled for {each} of each slice",
                slices=order,
            )
    if count > 1 and replicas > 1:
        raise errors.HloError(
            f"module {module.name!r} has {replicas} replicas on {count} slices; only partitions "
            "over several slices can be judged",
            module=module.name,
        )
    relations = hd.Relations(partitions, replicas, stated, count, order)
    relations.order_known = count == 1 or told is not None
    return relations


def _count(module: hm.Module, each: int, mesh: Mapping[str, int] | None) -> int:
    """Return the number of slices, from the mesh or from the largest number in the text."""
    if not module.mentions(_MEGASCALE, f'"{SLICE_ID}"'):
        return 1
    size = int(np.prod([n for n in (mesh or {}).values() if isinstance(n, int)], dtype=float))
    if mesh and size % each == 0 and size > each:
        return size // each
    numbers = [2]
    for match in _TARGET.finditer(module.text):
        same, listed = (form.match(module.text, match.end()) for form in (_SAME_ID, _LISTED))
        if same:
            numbers += map(int, same[1].split(","))
        elif listed:
            numbers += [int(number) // _EACH for number in re.findall(r"\d+", listed[1])]
    return max(numbers)


def rendezvous(instruction: hm.Instruction) -> str:
    """Return the name that a send and its recv between slices share; "" for other instructions."""
    hints = instruction.attribute("frontend_attributes") or ""
    match = _NAME.search(hints) if _MEGASCALE in hints else None
    return match[1] if match else ""


def pairs_of(computation: hm.Computation) -> dict[int, int]:
    """Return the send of each recv: the one with the same name in the same computation."""
    ends: dict[str, list[tuple[str, int]]] = {}
    for position, instruction in enumerate(computation.instructions):
        if instruction.opcode in ("send", "recv") and (name := rendezvous(instruction)):
            ends.setdefault(name, []).append((instruction.opcode, position))
    found = {}
    for own in ends.values():
        places = dict(own)
        if len(own) == len(places) == 2:
            found[places["recv"]] = places["send"]
    return found


def read_send(instruction: hm.Instruction, relations: hd.Relations) -> hc.Channel | None:
    """Return the collective of a send between slices; None for any other send."""
    hints = instruction.attribute("frontend_attributes") or ""
    named = _TYPE.search(hints)
    kind = _KINDS.get(named[1]) if named and _MEGASCALE in hints else None
    target = _TARGET.search(hints)
    if kind is None or target is None:
        return None
    how = _REDUCTION.search(hints) if kind in ("all-reduce", "reduce-scatter") else None
    reduction = _REDUCTIONS.get(how[1], how[1].lower()) if how else ""
    permute = kind == "collective-permute"
    lists = _lists(hints, target.end(), permute, relations)
    groups = None
    if isinstance(lists, str):
        unknown = lists
    elif permute:
        unknown, groups = "", hc.pair_groups(np.array(lists), relations)
    else:
        sizes = np.array([len(group) for group in lists])
        members = np.array([*itertools.chain.from_iterable(lists)])
        unknown, groups = "", hc.make_groups((members, sizes), relations)
    if groups is None:
        groups = hc.everyone(relations)
    return hc.Channel(kind, groups, True, reduction=reduction, unknown=unknown)


def _lists(hints: str, start: int, permute: bool, relations: hd.Relations) -> list[list[int]] | str:
    """Return the devices of each group or pair, or a text that says why they can't be read."""
    # Read the names of devices in one of the two notations. Then map names to devices: by the given
    # ids, or by slice and place, if the notation has places or the group has all devices.
    same, listed = (form.match(hints, start) for form in (_SAME_ID, _LISTED))
    unknown = f"a target that can't be read, {hints[start : start + 40]}"
    if not relations.order_known:
        return "a target among slices, whose order the text doesn't give (pass slices=)"
    if same and not permute:
        slices, first, last = map(int, same[1].split(",")), int(same[2]), int(same[3])
        ids = [range(s * _EACH + first, s * _EACH + last + 1) for s in slices]
        names = [list(group) for group in zip(*ids)]
    elif listed:
        groups = re.findall(r"\{([^{}]*)\}", listed[1])
        if any(("->" in group) != permute for group in groups):
            return unknown
        names = [list(map(int, re.split(",|->", group))) for group in groups]
    else:
        return unknown
    if (permute and any(len(pair) != 2 for pair in names)) or not names:
        return unknown
    by_id, each = relations.by_id, relations.device_count // relations.slices

    def device(name: int) -> int:
        if by_id:
            return by_id.get(name, -1)
        # Each slice has its devices in the same order, so an id gives the place within the slice.
        return (name // _EACH - 1) * each + name % _EACH

    of_all = [len(group) for group in names] == [relations.device_count]
    if not (by_id or same or of_all):
        return "a target that names devices by their ids (pass the jax.stages.Compiled)"
    devices = [list(map(device, group)) for group in names]
    flat = [*itertools.chain.from_iterable(devices)]
    targets = [group[-1] for group in devices] if permute else flat
    if min(flat) < 0 or max(flat) >= relations.device_count or len({*targets}) < len(targets):
        return "a target that doesn't fit the module"
    return devices


def unreached(channel: hc.Channel, relations: hd.Relations) -> int:
    """Return the relation in which each device that a permute sends nothing to is alone."""
    reached = channel.groups.ends[1] if channel.groups.ends is not None else np.arange(0)
    labels = np.arange(relations.device_count) + 1
    labels[reached] = 0
    return relations.intern(labels) if channel.groups.ends is not None else hd.EQUAL


def number_of_slice(relations: hd.Relations) -> np.ndarray:
    """Return the number of each device's slice."""
    each = relations.partitions * relations.replicas
    return np.arange(relations.device_count, dtype=np.uint32) // np.uint32(each)
