"""Estimates of how long a collective takes, from the bandwidths that vendors give.

By ring algorithms a device sends the wire bytes of ``accounts``, and receives as many at the same
time, so that a run takes wire bytes / send bandwidth; without latencies, other traffic, links that
a slice lacks and what overlaps with computation. What differs:

- A TPU reaches its neighbours along one axis of a torus, by two links. What goes further passes
  through the chips between: of an all-to-all over n chips each pair's 1/n of the operand S takes
  n/4 steps on average, S/n (n^2 // 4) bytes on a chip's two links ("How to Scale Your Model", part
  3, has n S / 4 for the same). A permute is taken to be to a neighbour, by one link.
- GPUs of one host reach each other through switches. A ring across hosts runs m times, m being the
  group's GPUs on a host, and leaves the host by each one's own adapter: wire bytes / (m adapters).
  Of an all-to-all and a permute each GPU sends its own, by its own adapter.

A group is taken to lie along one axis of the torus, and a host to hold consecutive devices.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

from shardrules.errors import ShardrulesError

if TYPE_CHECKING:  # flags are read of TARGETS before a script imports NumPy
    from shardrules import hlo

__all__ = ["TARGETS", "Target", "seconds", "target"]


@dataclasses.dataclass(frozen=True)
class Target:
    """What is known of an accelerator's links.

    Attributes:
      name: for people.
      send_bytes_per_s: what one device sends in a ring.
      source: where the bandwidths stand, and how they are read.
      link_bytes_per_s: of one link of a torus, one way; None where a switch joins the devices.
      host_device_count: devices that have these links to each other, None for all.
      across_bytes_per_s: what one device sends beyond those.
    """

    name: str
    send_bytes_per_s: float
    source: str
    link_bytes_per_s: float | None = None
    host_device_count: int | None = None
    across_bytes_per_s: float | None = None


def _tpu(name: str, both_ways: float, links: int) -> Target:
    """Read a chip's "bidirectional inter-chip interconnect (ICI) bandwidth", all links together."""
    one = both_ways / 2 / links
    return Target(
        f"TPU {name}",
        2 * one,
        f"{both_ways / 1e9:.0f} GB/s both ways on a chip's {links} links (Google, Cloud TPU "
        f"documentation, TPU {name}, System architecture), of which a ring uses two",
        link_bytes_per_s=one,
    )


def _gpu(name: str, both_ways: float, links: str, adapter: str) -> Target:
    """Read the NVLink bandwidth of a GPU that stands with seven others in a host."""
    return Target(
        name,
        both_ways / 2,
        f"NVLink {both_ways / 1e9:.0f} GB/s both ways ({links}); beyond a host of 8, an adapter "
        f"of 400 Gb/s for each GPU ({adapter})",
        host_device_count=8,
        across_bytes_per_s=400e9 / 8,
    )


TARGETS: dict[str, Target] = {
    "v5e": _tpu("v5e", 400e9, 4),  # "ICI ports per chip: 4"
    "v5p": _tpu("v5p", 1200e9, 6),  # "Interconnect topology: 3D torus"
    "v6e": _tpu("v6e", 800e9, 4),  # "ICI ports per chip: 4"
    "h100": _gpu(
        "H100 SXM",
        900e9,
        "NVIDIA, H100 Tensor Core GPU data sheet",
        "NVIDIA, DGX BasePOD reference architecture, Core Components: eight single-port ConnectX-7",
    ),
    "b200": _gpu(
        "B200",
        1800e9,  # two NVSwitches with 14.4 TB/s for eight GPUs
        "NVIDIA, DGX B200 User Guide, Introduction: 14.4 TB/s for 8",
        "the same: eight single-port ConnectX-7",
    ),
}


def target(name: str) -> Target:
    """Find an accelerator by name.

    Raises:
      ShardrulesError: there is none of that name.
    """
    found = TARGETS.get(str(name).lower())
    if found is None:
        from shardrules.costs import accounts

        raise ShardrulesError(
            f"target={name!r} is none of {', '.join(TARGETS)}"
            + accounts.near(str(name).lower(), TARGETS),
            target=name,
        )
    return found


def seconds(verdict: hlo.Verdict, wire_bytes: int, on: Target) -> float:
    """Estimate one run of a collective.

    Args:
      verdict: on the collective.
      wire_bytes: what one device sends.
      on: the accelerator.
    """
    collective = verdict.collective
    own = collective.pairs is not None or "all-to-all" in collective.kind
    if on.link_bytes_per_s is not None:
        if collective.pairs is not None:
            return wire_bytes / on.link_bytes_per_s
        if own:
            n = collective.group_size
            return verdict.bytes / n * (n * n // 4) / on.send_bytes_per_s
        return wire_bytes / on.send_bytes_per_s
    took = wire_bytes / on.send_bytes_per_s
    if on.across_bytes_per_s is None or on.host_device_count is None:
        return took
    for group in collective.groups if collective.pairs is None else collective.pairs:
        hosts = collections.Counter(device // on.host_device_count for device in group)
        if len(hosts) > 1:
            inside = min(hosts.values())
            sent = wire_bytes / inside
            if collective.pairs is not None:
                sent = wire_bytes
            elif own:
                sent = verdict.bytes * (len(group) - inside) / len(group)
            took = max(took, sent / on.across_bytes_per_s)
    return took
