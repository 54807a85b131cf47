"""Compute the savings of following a finding or a hint, in one execution on one device."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardrules import hlo
from shardrules.costs import accounts, estimates, timings
from shardrules.costs.advice import is_defensive, migrate
from shardrules.costs.findings import Finding
from shardrules.costs.waste import Hint
from shardrules.costs.waste.program import SMALL
from shardrules.errors import few
from shardrules.hlo.proof.customcalls import frontend_attributes

SWITCHED = "shardrules.switched"  # the key of a Switched in a module's header
_NAMED = 3  # the most shard_maps that advice names
_FOLDED = 0.01  # findings that together save a smaller share of the program become one line


class Worth(NamedTuple):
    """Savings or costs of one execution on one device; loops of unknown length make one trip."""

    bytes: int = 0  # on the wire
    seconds: float = 0.0  # estimated, 0 without a target
    # round_trips: how often the devices of a group wait for each other; as savings, how much less
    # often (negative if more often)
    round_trips: int = 0
    is_sure: bool = True  # the collective is proven unnecessary; if not, this is the most saved
    is_per_trip: bool = False  # a loop's length isn't known
    exposed_seconds: float = 0.0  # in a step, as measured by a profile; 0 without a profile
    at_most: bool = False  # the replacement may move a part of it

    @property
    def saves(self) -> bool:
        return self.bytes > 0 or self.round_trips > 0

    def plus(self, other: Worth) -> Worth:
        return Worth(
            self.bytes + other.bytes,
            self.seconds + other.seconds,
            self.round_trips + other.round_trips,
            self.is_sure and other.is_sure,
            self.is_per_trip or other.is_per_trip,
            self.exposed_seconds + other.exposed_seconds,
            self.at_most or other.at_most,
        )


class Switched(NamedTuple):
    """A program that was compiled again, with every check on that can be on."""

    sent: int  # by one device, in one execution
    # The keys of the collectives that are still defensive.
    left: collections.Counter[tuple[str, str]]
    on: tuple[str, ...]  # the shard_maps whose check is on, ``train.py:12 (step)``
    off: tuple[tuple[str, str], ...]  # the others, each with the reason
    steps: tuple[str, ...]  # why some sums are larger than with the check off

    def as_text(self) -> str:
        """Return this in characters that a module's header can hold."""
        fields = self.sent, [*self.left.items()], self.on, self.off, self.steps
        return urllib.parse.quote(json.dumps(fields), safe=" :")

    @classmethod
    def kept(cls, module: hlo.Module) -> Switched | str:
        """Return what the header of a module says, if ``run --keep`` wrote it, or else nothing."""
        text = frontend_attributes(module.header.get("frontend_attributes")).get(SWITCHED)
        if text is None:
            return ""
        sent, left, on, off, steps = json.loads(urllib.parse.unquote(text))
        counts = {(what, source): count for (what, source), count in left}
        off = tuple((place, reason) for place, reason in off)
        return cls(sent, collections.Counter(counts), tuple(on), off, tuple(steps))

    def saved(self, account: accounts.Account) -> int:
        return sum(entry.each * entry.wire_bytes for entry in account) - self.sent

    def applied(
        self, found: Sequence[Finding], account: accounts.Account
    ) -> tuple[list[Finding], dict[int, int]]:
        """Return the findings, with new advice in the defensive findings, and their savings.

        The savings are by the number of each collective that disappears. Their sum is known from
        the compiled program; each collective gets a part of it in proportion to its cost.
        """
        left, saved = self.left.copy(), max(0, self.saved(account))
        going: list[Finding] = []
        said = []
        for finding in found:
            if not is_defensive(finding.verdict):
                said.append(finding)
                continue
            here = key(finding.entry)
            stays = left[here] > 0
            left[here] -= stays
            said.append(dataclasses.replace(finding, advice=self._advice(stays, saved, finding)))
            going += [] if stays else [finding]
        costs = [finding.entry.each * finding.entry.wire_bytes for finding in going]
        ends = [saved * sum(costs[: n + 1]) // (sum(costs) or 1) for n in range(len(costs))]
        parts = [end - begin for begin, end in zip([0, *ends], ends)]
        return said, dict(zip((finding.entry.number for finding in going), parts))

    def _advice(self, stays: bool, saved: int, finding: Finding) -> str:
        why = f"; {'; '.join(self.steps)}" if self.steps else ""
        if stays:
            each = [f"the check of {place} stays off: {reason}" for place, reason in self.off]
            # A gradient that is too large must be corrected in the body, with the check on or off.
            own = [finding.advice] if finding.times > 1 or not each else []
            return "; ".join([*own, *each[:_NAMED]])
        on = few(self.on, _NAMED)
        if saved:
            return migrate(on) + why
        return f"with the check of {on} on, the program sends no less{why}"


def key(entry: accounts.Entry) -> tuple[str, str]:
    """Return a key that is the same for one collective in two compilations of a program."""
    return entry.what, str(entry.source)


class Ledger:
    """The costs of a program's collectives, and what each finding and hint saves."""

    def __init__(
        self,
        account: accounts.Account,
        on: estimates.Target | None,  # the accelerator on which times are estimated
        measured: timings.Timings | None = None,  # what each collective took in a profile
        # The bytes saved when checks are switched on, by the collective's number.
        switched: Mapping[int, int] | None = None,
    ):
        self.entries = account.entries
        self.on = on
        self.measured = measured
        self.switched = switched or {}
        self.seconds = [0.0] * len(self.entries)
        # ``seconds`` are for one run. Entries that are parts of one collective share its latency:
        # the whole takes the larger of its latency and all of its transfers, and each part gets its
        # share of this time.
        parts: dict[tuple[str, str], list[int]] = {}
        for entry in self.entries:
            collective = entry.judged.collective
            parts.setdefault((collective.computation, collective.name), []).append(entry.number)
        self._parts: dict[int, list[int]] = {}
        for numbers in parts.values():
            self._parts.update(dict.fromkeys(numbers, numbers))
            if on is None:
                continue
            entries = [self.entries[n] for n in numbers]
            each = [estimates.transfer(e.judged, e.wire_bytes, on) for e in entries]
            whole = max(sum(each), estimates.latency(entries[0].judged.collective, on))
            for n, own in zip(numbers, each):
                self.seconds[n] = whole * (own / sum(each) if sum(each) else 1 / len(numbers))
        self.total = functools.reduce(Worth.plus, map(self.cost, range(len(self.entries))), Worth())

    def cost(self, number: int) -> Worth:
        entry = self.entries[number]
        timing = self.measured and self.measured.of[number]
        return Worth(
            entry.each * entry.wire_bytes,
            entry.each * self.seconds[number],
            entry.each,
            is_per_trip=entry.runs is None,
            exposed_seconds=timing.exposed_seconds if timing else 0.0,
        )

    def timing(self, about: Sequence[Finding | Hint]) -> timings.Timing | None:
        """Return the time in a step that was measured for the collectives of findings or hints."""
        numbers = dict.fromkeys(one.entry.number for one in about)
        return None if self.measured is None else self.measured.together(numbers)

    def exposed_seconds(self, about: Sequence[Finding | Hint]) -> float:
        """Return the exposed part of the measured time; 0 if it wasn't measured."""
        timing = self.timing(about)
        return timing.exposed_seconds if timing else 0.0

    def worth(self, one: Finding | Hint) -> Worth:
        """Return what following a finding or a hint saves."""
        number = one.entry.number
        cost = self.cost(number)
        hint = one if isinstance(one, Hint) else one.hint
        if hint is not None:
            return self._cheaper(hint, cost, number)
        if one.kind == "unproven":
            return cost._replace(is_sure=False)
        # A collective that may hang must be changed, whatever the savings.
        sure = one.kind not in ("declared", "may hang")
        share = timings.avoidable(one.verdict, one.entry) if sure else 0.0
        known = number in self.switched
        if known:
            # With the check on, other collectives of the program may become cheaper, too, and their
            # savings count here. Their time isn't this collective's.
            share = min(1.0, self.switched[number] / (cost.bytes or 1))
        return cost._replace(
            bytes=self.switched[number] if known else round(share * cost.bytes),
            seconds=share * cost.seconds,
            exposed_seconds=share * cost.exposed_seconds,
            round_trips=cost.round_trips if share == 1 else 0,
            at_most=is_defensive(one.verdict) and not known,
        )

    def _cheaper(self, hint: Hint, cost: Worth, number: int) -> Worth:
        """Return the savings of a hint's fewer bytes or fewer round trips."""
        # A number that the hint doesn't know stays as it is. The time after the change is the
        # larger of two times: the latencies of the remaining round trips, and the transfer of the
        # remaining bytes.
        known = (hint.sent_after, hint.round_trips_after, hint.round_trips_before)
        if_not = (cost.bytes, cost.round_trips, cost.round_trips)
        sent, trips, before = (b if a is None else a for a, b in zip(known, if_not))
        seconds = exposed = 0.0
        if self.on is not None:
            wire = self.entries[number].wire_bytes
            took = estimates.transfer(hint.verdict, wire, self.on)
            latency = estimates.latency(hint.verdict.collective, self.on)
            seconds = max(0.0, cost.seconds - max(trips * latency, sent * took / max(1, wire)))
        timing = self.measured and self.measured.of[number]
        if timing and timing.seconds:
            if self.entries[number].runs is None and hint.sent_after is None:
                sent = round(timing.runs * self.entries[number].wire_bytes)
            took, latency = self._run(number), self._latency(number)
            size = max(SMALL, self.entries[number].wire_bytes)
            after = max(trips * latency, sent * took / size)
            exposed = timing.exposed_seconds * max(0.0, 1 - after / timing.seconds)
        fewer = max(0, cost.bytes - sent)
        return Worth(fewer, seconds, before - trips, True, cost.is_per_trip, exposed)

    def _run(self, number: int) -> float:
        """Return the time of one run of a collective in the profile; 0 if it has none."""
        timing = self.measured and self.measured.of[number]
        return timing.seconds / timing.runs if timing and timing.runs else 0.0

    def _latency(self, number: int) -> float:
        """Return a run's time if the collective is small, or that of the fastest small one."""
        small = []
        for numbers in self._parts.values():
            wire_bytes = sum(self.entries[n].wire_bytes for n in numbers)
            if self._run(numbers[0]) and wire_bytes <= SMALL:
                small.append(numbers)
        own = [self._parts[number]] if self._parts[number] in small else small
        return min((sum(map(self._run, p)) for p in own), default=0.0)

    def share(self, worth: Worth) -> float:
        """Return a worth's share of the program's estimated time, or else of its bytes."""
        if self.on is not None and self.total.seconds:
            return worth.seconds / self.total.seconds
        return worth.bytes / self.total.bytes if self.total.bytes else 0.0

    def weight(self, worth: Worth) -> float:
        """Return the share of the program that ranks a worth: of bytes, time or round trips."""
        measured = worth.exposed_seconds / (self.total.exposed_seconds or 1.0)
        trips = 0.0 if worth.bytes else worth.round_trips / max(1, self.total.round_trips)
        return max(self.share(worth), trips, measured)

    def folded(self, worths: list[Worth]) -> int:
        """Return how many of the last worths, without the first, are below 1% together."""
        count, weight = 0, 0.0
        for worth in reversed(worths[1:]):
            weight += self.weight(worth)
            if weight >= _FOLDED:
                break
            count += 1
        return count
