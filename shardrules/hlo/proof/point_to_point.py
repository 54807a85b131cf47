"""Sends between devices, which are permutes in two halves.

XLA for GPUs splits the permutes of pipelines into send and recv, with the pairs in a frontend
attribute. Between TPU slices, all communication, even all-reduces, goes as sends through the host
to Megascale's runtime. Nothing is proven of received data; the sent bytes count.
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
    """Tell whether a send goes to other devices, not to the host as callbacks on TPU do."""
    if instruction.opcode not in ("send", "send-start"):
        return False
    hints = instruction.attribute("frontend_attributes") or ""
    return instruction.attribute("is_host_transfer") != "true" or "megascale" in hints


def blocker(instruction: Instruction) -> hs.Blocker:
    """Give the blocker of a send: the proof does not follow it."""
    match = _TYPE.search(instruction.attribute("frontend_attributes") or "")
    kind = f" ({match[1]} by Megascale)" if match else ""
    return hs.Blocker(
        f"send {instruction.name!r} to other devices{kind}, which the proof doesn't follow"
    )


def read_channel(instruction: Instruction, relations: hd.Relations) -> hc.Channel:
    """Give a send's channel; without pairs in the text it may reach any device."""
    number = (instruction.attribute("channel_id") or "").strip()
    match = _PAIRS.search(instruction.attribute("frontend_attributes") or "")
    try:
        if match is None:
            raise hn.NotationError("a send without pairs")
        # As for a permute, but channel 0 means no channel (XLA's GetP2PConfigForSendRecv).
        channel = number.strip("0") != ""
        groups, _ = hc.read_pairs(match[1], channel, None, relations)
    except hn.NotationError:
        count = relations.device_count
        everyone = hc.make_groups((np.arange(count), np.array([count])), relations)
        # Incomplete groups, so that no axes are named.
        groups = dataclasses.replace(everyone, complete=False)
    return hc.Channel(KIND, groups, True, None, "", "no proof of what is received")
