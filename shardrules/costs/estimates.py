"""Estimates of how long a collective takes, from published bandwidths and latencies.

A run takes the larger of two times; other traffic, links that a slice lacks and overlap with
computation are left out. ``targets/links.toml`` holds the figures and their sources.

*Bandwidth.* By ring algorithms a device sends the wire bytes of ``accounts``, and receives as many
at the same time. What differs:

- A TPU reaches its neighbours along one axis of a torus, by two links. Of an all-to-all over n
  chips each pair's 1/n of the operand S takes n/4 steps on average, S/n (n^2 // 4) bytes on a
  chip's two links ("How to Scale Your Model", part 3). A permute goes to a neighbour, by one link.
- A ring across hosts of GPUs runs m times, m being the group's GPUs on a host, and leaves the host
  by each one's own adapter. Of an all-to-all and a permute each GPU sends its own.

*Latency.* The start of a collective, and its hops: on a torus n/2 both ways around a ring of n, and
twice as many for an all-reduce; between GPUs n-1, twice for an all-reduce; between h hosts log2(h)
(a tree). A 4-byte all-reduce takes microseconds, whatever the bandwidth.

A group is taken to lie along one axis of the torus, and a host to hold consecutive devices.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import tomllib
from typing import TYPE_CHECKING

from shardrules.errors import ShardrulesError

if TYPE_CHECKING:  # flags are read of TARGETS before a script imports NumPy
    from shardrules import hlo

_FILE = pathlib.Path(__file__).parents[1] / "targets" / "links.toml"


@dataclasses.dataclass(frozen=True)
class Target:
    """What is known of an accelerator's links."""

    name: str  # for people
    both_ways_bytes_per_s: float  # of one device on all its links, both directions counted
    # bandwidth_source, latency_source: where the figures stand, and how they are read
    bandwidth_source: str
    hop_latency_s: float  # for one step to a neighbour
    start_latency_s: float  # once for each collective
    latency_source: str
    links: int | None = None  # of a chip in a torus; None where a switch joins the devices
    # Devices that have these links to each other, None for all.
    host_device_count: int | None = None
    across_bytes_per_s: float | None = None  # what one device sends beyond those
    across_hop_latency_s: float = 0.0  # for one step between hosts

    @property
    def link_bytes_per_s(self) -> float | None:
        """Return what one link of a torus carries one way; None where a switch joins devices."""
        return None if self.links is None else self.both_ways_bytes_per_s / 2 / self.links

    @property
    def send_bytes_per_s(self) -> float:
        """Return what one device sends in a ring."""
        link = self.link_bytes_per_s
        return self.both_ways_bytes_per_s / 2 if link is None else 2 * link

    @property
    def source(self) -> str:
        return f"{self.bandwidth_source}; {self.latency_source}"


TARGETS: dict[str, Target] = {
    name: Target(**figures)
    for name, figures in tomllib.loads(_FILE.read_text(encoding="utf-8")).items()
}


def target(name: str) -> Target:
    found = TARGETS.get(str(name).lower())
    if found is None:
        from shardrules.costs import accounts

        raise ShardrulesError(
            f"target={name!r} is not one of {', '.join(TARGETS)}"
            + accounts.near(str(name).lower(), TARGETS),
            target=name,
        )
    return found


def latency(collective: hlo.Collective, on: Target) -> float:
    """Estimate one run of a collective that moves next to nothing."""
    count = collective.group_size
    if count < 2 or not collective.connections.moves:
        return 0.0
    twice = 2 if collective.kind == "all-reduce" else 1
    alone = collective.pairs is not None or "all-to-all" in collective.kind
    hops, across = 1 if alone else twice * (count - 1), 0
    if on.links is not None and collective.pairs is None:
        hops = twice * (count // 2)
    if on.host_device_count is not None:
        hosts = 1  # the most over which one group is spread
        for group in collective.pairs or collective.groups:
            hosts = max(hosts, len({device // on.host_device_count for device in group}))
        if hosts > 1:
            across = 1 if alone else twice * (hosts - 1).bit_length()
            hops = 0 if alone else twice * (-(-count // hosts) - 1)
    return on.start_latency_s + hops * on.hop_latency_s + across * on.across_hop_latency_s


def transfer(verdict: hlo.Verdict, wire_bytes: int, on: Target) -> float:
    """Estimate one run without latency."""
    collective = verdict.collective
    exchanges = "all-to-all" in collective.kind
    took = wire_bytes / on.send_bytes_per_s
    if on.link_bytes_per_s is not None and collective.pairs is not None:
        return wire_bytes / on.link_bytes_per_s
    if on.link_bytes_per_s is not None and exchanges:
        n = collective.group_size
        return verdict.bytes / n * (n * n // 4) / on.send_bytes_per_s
    if on.across_bytes_per_s is None or on.host_device_count is None:
        return took
    for group in collective.pairs or collective.groups:
        hosts = collections.Counter(device // on.host_device_count for device in group)
        if len(hosts) > 1:
            inside = min(hosts.values())
            sent = wire_bytes / inside
            if collective.pairs is not None:
                sent = wire_bytes
            elif exchanges:
                sent = verdict.bytes * (len(group) - inside) / len(group)
            took = max(took, sent / on.across_bytes_per_s)
    return took
