"""Sends between devices, which are permutes in two halves.

XLA for GPUs splits the permutes of pipelines into send and recv (the pairs stand in a frontend
attribute), and on several slices of TPUs all that crosses them, all-reduces too, is sent through
the host to Megascale's runtime. What a device receives is nobody's to say; what it sends counts.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np

from shardrules.hlo.known import states as hs
from shardrules.hlo.proof import collectives as hc
from shardrules.hlo.reader import devices as hd
from shardrules.hlo.reader import notations as hn
from shardrules.hlo.reader.module import Instruction

KIND = "collective-permute"
_PAIRS = re.compile(
    r'_xla_send_recv_source_target_pairs\s*+=\s*+"?(\{\s*+(?:\{[\d,\s]*+\}[\s,]*+)*+\})'
)
_TYPE = re.compile(r'_xla_megascale_transfer_type\s*=\s*"?(\w+)')


def crosses(instruction: Instruction) -> bool:
    """Tell a send to other devices from one to the host, as of a callback on TPU."""
    if instruction.opcode not in ("send", "send-start"):  # the latter where it is asynchronous
        return False
    hints = instruction.attribute("frontend_attributes") or ""
    return instruction.attribute("is_host_transfer") != "true" or "megascale" in hints


def blocker(instruction: Instruction) -> hs.Blocker:
    """Say why nothing is proven of a send."""
    match = _TYPE.search(instruction.attribute("frontend_attributes") or "")
    kind = f" ({match[1]} by Megascale)" if match else ""
    return hs.Blocker(f"send {instruction.name!r} to other devices{kind}, which is not followed")


def read_channel(instruction: Instruction, relations: hd.Relations) -> hc.Channel:
    """Give the pairs of a send's devices; where the text doesn't tell them, it may reach any."""
    number = (instruction.attribute("channel_id") or "").strip()
    match = _PAIRS.search(instruction.attribute("frontend_attributes") or "")
    try:
        if match is None:
            raise hn.NotationError("a send without pairs")
        # As of a permute's, but that a channel of 0 is none (XLA's GetP2PConfigForSendRecv).
        channel = number.strip("0") != ""
        groups, _ = hc.read_pairs(match[1], channel, None, relations)
    except hn.NotationError:
        count = relations.device_count
        everyone = hc.make_groups((np.arange(count), np.array([count])), relations)
        # Along no axes: incomplete groups have none.
        groups = dataclasses.replace(everyone, complete=False)
    return hc.Channel(KIND, groups, True, None, "", "no proof of what is received")
