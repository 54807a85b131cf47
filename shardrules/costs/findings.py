"""Findings: what should not be in a program, each with the one change that removes it."""

from __future__ import annotations

import collections
import dataclasses
import re
import shlex
from collections.abc import Iterable, Mapping

from shardrules import hlo
from shardrules.arguments import checked
from shardrules.costs import accounts
from shardrules.errors import ShardrulesError

__all__ = [
    "Allowances",
    "Finding",
    "advice",
    "alike",
    "allowance",
    "by_partitioner",
    "find",
    "unaudited",
]


@dataclasses.dataclass(frozen=True)
class Finding:
    """A collective that is not shown to be needed, or rests on too little.

    Attributes:
      kind: ``redundant``, ``overwide``, ``unproven``, ``may hang``, or ``declared`` (in strict
        mode: the verdict rests on a rule that nobody audited).
      verdict: the verifier's.
      entry: its line in the account.
      advice: the change that removes it.
    """

    kind: str
    verdict: hlo.Verdict
    entry: accounts.Entry
    advice: str


@checked
def advice(verdict: hlo.Verdict) -> str:
    """Say the one change that removes a finding, or that would let it be judged."""
    collective = verdict.collective
    if verdict.divergent:
        return (
            "make the predicate equal within each group (jax.lax.psum or pmax it over the "
            "axes), or move the collective out of the branch or loop"
        )
    if verdict.verdict in ("redundant", "overwide") and by_partitioner(collective):
        equal = [a for a in collective.axes or () if a not in (verdict.needed_axes or ())]
        over = f" over {', '.join(equal)}" if equal else ""
        return (
            f"XLA's partitioner made it for {_operation(collective)}, of data that is the same on "
            f"the devices{over}: replicate what that reads or makes, "
            "x = jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, "
            f"jax.sharding.PartitionSpec(...))) with a spec without {', '.join(equal) or 'axes'}, "
            "or give both the layout of what uses it"
        )
    if verdict.verdict in ("redundant", "overwide") and collective.phase == "forward":
        if verdict.verdict == "redundant":
            return (
                "drop it: each device can compute the result from its own operand (a sum of "
                f"{collective.group_size} equal ones is {collective.group_size} times one)"
            )
        if verdict.needed_axes:
            return (
                f"run it over {', '.join(verdict.needed_axes)} only, and if the sum over equal "
                "values is meant, multiply by their number"
            )
    if verdict.verdict in ("redundant", "overwide"):
        return (
            "trace it under jax.shard_map(check_vma=True), with shardrules.install() and a "
            "rule for each kernel: the backward pass then reduces over just the axes that "
            "it needs"
        )
    if verdict.verdict == "unproven":
        names = [b.kernel for b in verdict.blockers if b.kernel]
        if names:
            return (
                "if the kernel reads no other device and no device id, declare that: "
                "@shardrules.no_communication above its def, or "
                f"shardrules.register({names[0]!r}, shardrules.no_communication)"
            )
        calls = [b for b in verdict.blockers if b.target]
        if calls:
            name = calls[0].where.partition(" (")[0]
            rule = shlex.quote(f"--rule={name}=no_communication")
            return (
                "trace the program after shardrules.install(), with a rule for the kernel: "
                "its custom call then says in the compiled text what it does"
                + (f"; for this text the commands take {rule}, if that is so" if name else "")
            )
        if any("no sharding" in b.what for b in verdict.blockers):
            return (
                "give the jax.stages.Compiled instead of its text, or text that holds the "
                "parameters' shardings"
            )
    return ""


_HANGS = "may hang"

# How JAX's own collectives end an op_name; what XLA's partitioner makes has another operation's.
_WRITTEN = re.compile(
    r"p(sum|max|min|mean|broadcast|gather|permute|swapaxes|all_|scatter|shuffle)\w*|ppermute|"
    r"(ragged_)?all_(gather|to_all|reduce)\w*|reduce_scatter\w*|shard_map|reduced_vary_cast|"
    r"un?reduced?_\w+"
)


def _operation(collective: hlo.Collective) -> str:
    # To JAX 0.4 its parameters stand behind it, psum[axes=('model',) axis_index_groups=None].
    return re.sub(r"\[.*?\]$", "", collective.op_name).rpartition("/")[2]


def by_partitioner(collective: hlo.Collective) -> bool:
    """Tell whether XLA's partitioner made a collective: it has another operation's name."""
    last = _operation(collective)
    return bool(last) and _WRITTEN.fullmatch(last) is None and "pmap" not in collective.op_name


def unaudited(supports: Iterable[hlo.Support]) -> list[hlo.Support]:
    """List the rules and tags that are only declared."""
    return [s for s in supports if s.source in ("tag", "rule") and s.status != "audited"]


def find(judgement: hlo.Judgement, strict: bool = False) -> list[Finding]:
    """List a program's findings in the order of its text.

    Args:
      judgement: what ``hlo.judge`` returned.
      strict: also find the verdicts that rest on declarations and not on proofs.
    """
    found = []
    for verdict, entry in zip(judgement.verdicts, accounts.of(judgement).entries):
        if verdict.divergent:
            found.append(Finding(_HANGS, verdict, entry, advice(verdict)))
        elif verdict.verdict != "needed":
            found.append(Finding(verdict.verdict, verdict, entry, advice(verdict)))
        elif strict and unaudited(verdict.rests_on):
            names = ", ".join(dict.fromkeys(s.what for s in unaudited(verdict.rests_on)))
            found.append(
                Finding(
                    "declared",
                    verdict,
                    entry,
                    f"it rests on a declaration for {names}, and strict takes proofs alone: let "
                    "the audit prove the kernel (what needs no registration is proven), or allow "
                    "it with a reason",
                )
            )
    return found


def alike(found: Iterable[Finding]) -> list[tuple[Finding, ...]]:
    """Gather findings that differ in nothing but their bytes and their place in the program."""
    same: dict[tuple[object, ...], list[Finding]] = {}
    for one in found:
        entry, verdict = one.entry, one.verdict
        key = (one.kind, entry.verdict, entry.what, entry.source, verdict.reason, verdict.rests_on)
        same.setdefault((*key, one.advice), []).append(one)
    return [tuple(members) for members in same.values()]


def allowance(finding: Finding) -> str:
    """Write what ``Allowances`` takes for a finding, ``"redundant backward all-reduce(model)"``."""
    entry = finding.entry
    axes = "?" if entry.axes is None else ", ".join(entry.axes)
    what = _HANGS if finding.kind == _HANGS else finding.verdict.verdict
    return f"{what} {entry.phase} {entry.kind}({axes})"


# -- what is known --------------------------------------------------------------------------------


class Allowances:
    """Known findings, each with a reason.

    Args:
      reasons: from ``"redundant all-reduce(model) at model.py"`` (verdict, phase, file and line
        may be left out) to the reason; what may hang, as ``"may hang all-reduce(model)"`` alone.

    Raises:
      ShardrulesError: a name that can't be read, or no reason.
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
            what: accounts.Selector.read(what) for what in self.reasons
        }

    def check_axes(self, mesh: Mapping[str, int] | None) -> None:
        """Raise where one names axes that are not of the mesh."""
        for what, selector in self.selectors.items():
            selector.check_axes(what, mesh)

    def split(
        self, findings: Iterable[Finding]
    ) -> tuple[list[Finding], list[tuple[Finding, str]], list[str]]:
        """Give the findings that stay, those allowed with their reasons, the unused names."""
        stay, allowed = [], []
        used: collections.Counter[str] = collections.Counter()
        for finding in findings:
            names = [w for w, s in self.selectors.items() if _meant(s, finding)]
            used.update(names)
            if names:
                allowed.append((finding, self.reasons[names[0]]))
            else:
                stay.append(finding)
        return stay, allowed, [w for w in self.reasons if not used[w]]


def _meant(selector: accounts.Selector, finding: Finding) -> bool:
    """Whether a finding is allowed: a hang by its own name alone, as nobody means it by another."""
    if (selector.verdict == _HANGS) != (finding.kind == _HANGS):
        return False
    return (selector._replace(verdict="") if finding.kind == _HANGS else selector).matches(
        finding.entry
    )
