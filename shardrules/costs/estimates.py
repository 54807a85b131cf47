"""Estimates of how long a collective takes, from the bandwidths that vendors give.

By ring algorithms a device sends the wire bytes of ``accounts``, and receives as many at the same
time: the estimate is wire bytes / send bandwidth. It is a lower bound: latencies, other traffic,
links that a slice lacks and what overlaps with computation are not in it. ``TARGETS`` holds, in
bytes per second that one device sends:

- TPU: along one axis of the torus both ways, so two of a chip's links. A chip's links together are
  given as 1600 Gbps (v5e, 4 links), 3200 Gbps (v6e, 4) and 4800 Gbps (v5p, 6): 50, 100 and 100 GB/s
  for one (Google's Cloud TPU pages "TPU v5e", "TPU v5p", "TPU v6e", system architecture).
- GPU: NVLink has 900 GB/s (H100 SXM) and 1800 GB/s (B200) both ways together, half of it for
  sending (NVIDIA's data sheets); between hosts of eight GPUs, one 400 Gb/s adapter for each GPU
  (NVIDIA's user guides of DGX H100 and DGX B200).
"""

from __future__ import annotations

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
      send_bytes_per_s: what one device sends.
      host_device_count: devices that have these links to each other, None for all.
      across_bytes_per_s: what one device sends beyond those.
    """

    name: str
    send_bytes_per_s: float
    host_device_count: int | None = None
    across_bytes_per_s: float | None = None


_LINK = 1e9 / 8  # bytes per second of one Gbps

TARGETS: dict[str, Target] = {
    "v5e": Target("TPU v5e", 2 * 1600 * _LINK / 4),
    "v5p": Target("TPU v5p", 2 * 4800 * _LINK / 6),
    "v6e": Target("TPU v6e", 2 * 3200 * _LINK / 4),
    "h100": Target("H100 SXM", 900e9 / 2, 8, 400 * _LINK),
    "b200": Target("B200", 1800e9 / 2, 8, 400 * _LINK),
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
    """Estimate one run of a collective: wire bytes / send bandwidth of the slowest link.

    Args:
      verdict: on the collective.
      wire_bytes: what one device sends.
      on: the accelerator.
    """
    across = on.across_bytes_per_s
    if across is not None and on.host_device_count is not None:
        collective = verdict.collective
        for group in collective.groups if collective.pairs is None else collective.pairs:
            if len({device // on.host_device_count for device in group}) > 1:
                return wire_bytes / across
    return wire_bytes / on.send_bytes_per_s
