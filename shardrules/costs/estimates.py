"""Estimate how long a collective takes, from published bandwidths and latencies.

A run takes the larger of two times, for bandwidth and for latency. The estimate leaves out other
traffic, links that a slice lacks, and overlap with computation. ``targets/links.toml`` holds the
figures and their sources.

*Bandwidth.* By ring algorithms a device sends the wire bytes of ``accounts``, and receives as many
at the same time. The exceptions:

- A TPU reaches its neighbours along one axis of a torus by two links. In an all-to-all of S bytes
  over n chips, each pair's S/n bytes take n/4 steps on average, so a chip's two links carry
  S/n (n^2 // 4) bytes ("How to Scale Your Model", part 3). A permute goes to a neighbour, by one
  link.
- If a group has m GPUs on each of several hosts, m rings run across the hosts, and each ring leaves
  a host by a different GPU's adapter. In an all-to-all and a permute, each GPU sends its own data.

*Latency.* The start of a collective, and its hops. A ring of n chips on a torus has n/2 hops, since
it runs both ways. A ring of n GPUs has n-1 hops. A tree of h hosts has log2(h) hops. An all-reduce
has twice as many. A 4-byte all-reduce takes microseconds, whatever the bandwidth.

Estimates assume that a group lies along one axis of the torus, and that a host has consecutive
devices.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import tomllib
from typing import TYPE_CHECKING

from shardrules.errors import ShardrulesError

if TYPE_CHECKING:  # the command line reads TARGETS before a script imports NumPy
    from shardrules import hlo

_FILE = pathlib.Path(__file__).parents[1] / "targets" / "links.toml"


@dataclasses.dataclass(frozen=True)
class Target:
    """The figures of an accelerator's links."""

    name: str  # for people
    both_ways_bytes_per_s: float  # on all links of one device, both directions counted
    # bandwidth_source, latency_source: where the figures are published, and how we read them
    bandwidth_source: str
    hop_latency_s: float  # for one step to a neighbour
    start_latency_s: float  # once for each collective
    latency_source: str
    links: int | None = None  # of a chip in a torus; None if a switch joins the devices
    # The number of devices that these links join; None for all devices.
    host_device_count: int | None = None
    across_bytes_per_s: float | None = None  # from one device to devices on other hosts
    across_hop_latency_s: float = 0.0  # for one step between hosts

    @property
    def link_bytes_per_s(self) -> float | None:
        """Return the bytes a second of one link, one way; None if a switch joins the devices."""
        return None if self.links is None else self.both_ways_bytes_per_s / 2 / self.links

    @property
    def send_bytes_per_s(self) -> float:
        """Return the bytes a second that one device sends in a ring."""
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
    """Return the target of this name; raise ShardrulesError if there is none."""
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
    """Return the estimated seconds of one run of a collective that moves hardly any data."""
    count = collective.group_size
    if count < 2 or not collective.connections.moves:
        return 0.0
    twice = 2 if collective.kind == "all-reduce" else 1
    alone = collective.pairs is not None or "all-to-all" in collective.kind
    hops, across = 1 if alone else twice * (count - 1), 0
    if on.links is not None and collective.pairs is None:
        hops = twice * (count // 2)
    if on.host_device_count is not None:
        hosts = 1  # the most hosts over which one group is spread
        for group in collective.pairs or collective.groups:
            hosts = max(hosts, len({device // on.host_device_count for device in group}))
        if hosts > 1:
            across = 1 if alone else twice * (hosts - 1).bit_length()
            hops = 0 if alone else twice * (-(-count // hosts) - 1)
    return on.start_latency_s + hops * on.hop_latency_s + across * on.across_hop_latency_s


def transfer(verdict: hlo.Verdict, wire_bytes: int, on: Target) -> float:
    """Return the estimated seconds of one run of a collective, without latency."""
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
