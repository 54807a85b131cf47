"""Find collectives that should not be in a program, each with the one change that removes it."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

from shardrules import hlo
from shardrules.costs import accounts, missing, outputs
from shardrules.costs.advice import Multiplied, advice, of_averages, of_transposes, too_large
from shardrules.costs.advice import named as with_script
from shardrules.errors import ShardrulesError

if TYPE_CHECKING:  # costs.waste imports this module
    from shardrules.costs.waste.program import Hint


@dataclasses.dataclass(frozen=True)
class Finding:
    """A collective that isn't shown to be needed, rests on too little, or costs too much."""

    # ``redundant``, ``overwide``, ``unproven``, ``may hang``, or ``declared`` (in strict mode: the
    # verdict depends on a rule that nobody audited).
    kind: str
    entry: accounts.Entry  # its line in the account
    advice: str  # the change that removes it
    hint: Hint | None = None  # its hint, if the collective is needed and could be cheaper
    gradient_of: tuple[str, ...] = ()  # the outputs that it goes into, ``"output['b']"``
    times: int = 1  # the factor by which a gradient that the body takes may be too large

    @property
    def verdict(self) -> hlo.Verdict:
        return self.entry.judged


_HANGS = "may hang"
_SUMS = ("redundant", "overwide")  # kinds whose text names the gradient that they sum
# Allowances for outputs, or for lines that read arrays on the host, which are not collectives.
_OTHER = re.compile(r"(?:differs|unproven) output.*|read at \S+")
F = TypeVar("F", "Finding", outputs.Unequal)


def named(said: F, script: str) -> F:
    """Return a finding with the script in its advice."""
    return dataclasses.replace(said, advice=with_script(said.advice, script))


def unaudited(supports: Iterable[hlo.Support]) -> list[hlo.Support]:
    """Return the rules and tags that are only declared."""
    return [s for s in supports if s.source in ("tag", "rule") and s.status != "audited"]


def find(judgement: hlo.Judgement, strict: bool = False) -> list[Finding]:
    """Return a program's findings in the order of its text.

    ``strict`` also finds verdicts that depend on declarations instead of proofs.
    """
    # The advice has two parts: a warning, if following the rest may be wrong for some programs, and
    # the change itself. If gradients may be too large, the change is about this, since it is a bug.
    found, multiplied = [], Multiplied(judgement)
    for entry in accounts.of(judgement):
        verdict = entry.judged
        kind, change = verdict.verdict, ""
        if verdict.divergent:
            kind = _HANGS
        elif kind == "internal":
            continue
        elif kind == "needed":
            weak = unaudited(verdict.rests_on) if strict else []
            if not weak:
                continue
            kind = "declared"
            change = (
                "it rests on a declaration for "
                f"{', '.join(dict.fromkeys(s.what for s in weak))}, and strict accepts only "
                "proofs: let the audit prove the kernel (it has proven each kernel that needs "
                "no registration), or allow this with a reason"
            )
        times = multiplied.times(verdict)
        change = change or (too_large(verdict, times) if times > 1 else advice(verdict))
        about = of_transposes(verdict, judgement) or of_averages(verdict, judgement)
        change = about + change
        gradient_of = missing.gradient_of(judgement, verdict) if kind in _SUMS else ()
        found.append(Finding(kind, entry, change, gradient_of=gradient_of, times=times))
    return found


def alike(found: Iterable[Finding]) -> list[tuple[Finding, ...]]:
    """Return groups of findings that differ only in their bytes and their place in the program."""
    same: dict[tuple[object, ...], list[Finding]] = {}
    for one in found:
        entry, verdict = one.entry, one.verdict
        key = (one.kind, entry.verdict, entry.what, entry.place, verdict.reason, verdict.rests_on)
        same.setdefault((*key, one.advice), []).append(one)
    return [tuple(members) for members in same.values()]


def allowance(finding: Finding) -> str:
    """Return a finding's name for ``Allowances``, ``"redundant backward all-reduce(model)"``."""
    entry = finding.entry
    axes = "?" if entry.axes is None else ", ".join(entry.axes)
    what = _HANGS if finding.kind == _HANGS else finding.verdict.verdict
    return f"{what} {entry.phase} {entry.kind}({axes})"


class Allowances:
    """Known findings, each with a reason.

    Args:
      reasons: maps a finding's name to the reason why it stays. A name is
        ``"redundant all-reduce(model) at model.py"`` (you may leave out verdict, phase, file and
        line). A collective that may hang needs ``"may hang all-reduce(model)"``. The name of an
        output that is called replicated but differs is ``"differs output['rng']"``. The name of a
        line that reads an array after each run is ``"read at train.py:12"``.

    Raises:
      ShardrulesError: a name can't be read, or has no reason.
    """

    def __init__(self, reasons: Mapping[str, str] | None = None):
        if reasons is not None and not isinstance(reasons, Mapping):
            raise ShardrulesError(
                f"allow={reasons!r} gives no reasons; write what may stay and why, "
                "allow={'redundant all-reduce(model)': 'issue 12'}"
            )
        self.reasons: dict[str, str] = dict(reasons or {})
        for what, reason in self.reasons.items():
            if not isinstance(reason, str) or not reason.strip():
                raise ShardrulesError(
                    f"the allowance for {what!r} gives no reason; write why the "
                    f"finding stays, allow={{{what!r}: 'issue 12'}}",
                    key=what,
                )
        self.selectors: dict[str, accounts.Selector] = {
            what: accounts.Selector.read(what)
            for what in self.reasons
            if not _OTHER.fullmatch(str(what))
        }

    def check_axes(self, mesh: Mapping[str, int] | None) -> None:
        for what, selector in self.selectors.items():
            selector.check_axes(what, mesh)

    def split(self, findings: Iterable[F]) -> tuple[list[F], list[tuple[F, str]], list[str]]:
        """Return the findings that remain, the allowed findings with reasons, and unused names."""
        stay, allowed = [], []
        used: collections.Counter[str] = collections.Counter()
        for finding in findings:
            names = [what for what in self.reasons if self._means(what, finding)]
            used.update(names)
            if names:
                allowed.append((finding, self.reasons[names[0]]))
            else:
                stay.append(finding)
        return stay, allowed, [w for w in self.reasons if not used[w]]

    def _means(self, what: str, finding: Finding | outputs.Unequal) -> bool:
        if isinstance(finding, outputs.Unequal):
            # The name ``differs`` also allows an output that is only unproven.
            return what in (f"differs {finding.name}", f"{finding.kind} {finding.name}")
        selector = self.selectors.get(what)
        hangs = finding.kind == _HANGS  # no other name allows it
        if selector is None or hangs != (selector.verdict == _HANGS):
            return False
        return (selector._replace(verdict="") if hangs else selector).matches(finding.entry)
