"""Write the text on one finding, hint or output, for every format."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Sequence

from shardrules import hlo, units
from shardrules.costs import missing, outputs
from shardrules.costs.findings import Finding
from shardrules.costs.waste import Hint
from shardrules.errors import few
from shardrules.paths import here
from shardrules.report.grouping import alike
from shardrules.report.sections import Item

TODO = "to do:"  # the label of advice
RESTING, BETWEEN = "resting on:", "; "  # the label of a finding's assumptions; their separator
LISTED = 3  # the most names that one line lists
Group = Sequence[Finding | Hint]  # findings or hints that are alike
# Kinds whose advice takes a collective out of a loop. A combined collective stays in the loop until
# its last part leaves.
_GO_TOGETHER = ("repeated", "after the loop", "each call")


def lacking(output: outputs.Unequal) -> tuple[object, ...]:
    """Return a key that is equal for outputs that lack the same reduction, at any source lines."""
    of = output.unreduced
    lacking = (output.missing, output.advice) if of is None else (of.axes, of.is_summed_before)
    return output.kind, output.over, *lacking


def advice_on(same: Sequence[outputs.Unequal]) -> str:
    """Return the advice on outputs that lack the same reduction."""
    unreduced = [output.unreduced for output in same if output.unreduced is not None]
    if len(unreduced) < 2:
        return same[0].advice
    return missing.advice(functools.reduce(outputs.Unreduced.plus, unreduced))


def of_output(output: outputs.Unequal, label: str, text: str, likewise: Sequence[str] = ()) -> Item:
    """Return the item on an output; ``likewise`` are the outputs with the same advice."""
    more = ("likewise", few(likewise, LISTED)) if likewise else ("", "")
    lines = (("because", here(output.because)), more, (label, here(text)))
    return Item(output.kind, output.what, "", tuple(line for line in lines if line[0]))


def alike_hints(some: Iterable[Hint]) -> list[tuple[Hint, ...]]:
    """Return groups of hints that differ only in their bytes and their place in the program."""
    return alike(some, lambda hint: (hint.kind, hint.entry.what, hint.entry.place, hint.advice))


def changes(group: Group) -> list[object]:
    """Return the keys of a group; groups that one change removes together share a key.

    For unproven collectives, the key is the advice that lets shardrules judge them. For parts of a
    combined collective, it is this collective, which goes with its last part. For collectives that
    go with another collective, it is the other collective. For collectives of one source line, it
    is their advice without the bytes. Any other group has its own key.
    """
    first = group[0]
    if first.kind == "unproven":
        return [first.advice or id(group)]
    if isinstance(first, Finding) and first.hint is None:
        return [id(group)]
    if first.kind in _GO_TOGETHER:
        collectives = [one.verdict.collective for one in group]
        return [(collective.computation, collective.name) for collective in collectives]
    if (to := _goes_with(first)) is not None:
        return [_name(to)]
    if not first.entry.source:
        return [id(group)]
    return [(first.kind, first.entry.place, words(first.advice))]


def has_no_advice(group: Group) -> bool:
    """Return whether a group goes with another group's collective, whose hint has the advice."""
    to = _goes_with(group[0])
    return to is not None and _name(to) not in [_name(one.verdict.collective) for one in group]


def _goes_with(one: Finding | Hint) -> hlo.Collective | None:
    hint = one.hint if isinstance(one, Finding) else one
    return None if hint is None else hint.goes_with


def _name(collective: hlo.Collective) -> tuple[str, str, int]:
    return collective.computation, collective.name, collective.operand


def words(advice: str) -> str:
    """Return advice without its bytes, to compare it with other advice."""
    # Other numbers, such as a dimension or a size to pad to, are part of what the user types.
    return re.sub(r"\d+(?= B\b)", "", advice)


def flat(groups: Iterable[Group]) -> list[Finding | Hint]:
    return [*itertools.chain.from_iterable(groups)]


def place(group: Group) -> str:
    """Return a collective's name with its line, or with the argument that it moves."""
    entry = group[0].entry
    where = f"at {here(entry.place)}" if entry.source else f"of {entry.place}"
    return f"{entry.what} {where}" if entry.place else entry.what


def item(
    same: Sequence[Finding | Hint],
    saves: str = "",
    reason: str = "",
    time: str = "",
    others: Sequence[Group] = (),
) -> Item:
    """Return the item on similar findings or hints; one change removes ``others`` with them.

    ``reason`` says why they stay, if they are allowed.
    """
    first, count = same[0], len(same)
    verdict, entry = first.verdict, first.entry
    each, part = units.sizes([one.entry.bytes for one in same]), ""
    name = verdict.collective.name
    if count > 1:
        name += f" and {count - 1} like it"
    elif verdict.range is not None:
        part = f", elements {verdict.range.start}:{verdict.range.stop} of its operand"
    moved = f" of {entry.place}" if entry.place and not entry.source else ""
    runs = {one.entry.runs for one in same}
    often = f", {entry.runs} runs" if len(runs) == 1 and (entry.runs or 0) > 1 else ""
    sites = f"{count} x " if count > 1 else ""
    what = f"{sites}{entry.what}{moved}, {each}{part}{often} ({name})"
    lines = [("saves", saves), ("took", time)]
    if isinstance(first, Finding):
        weights = [one.gradient_of for one in flat([same]) if isinstance(one, Finding)]
        names = itertools.chain(*weights) if all(weights) else ()
        into = few([*dict.fromkeys(names)], LISTED)
        gradients = "the gradient that goes" if count == 1 else "gradients that go"
        lines.append(("of", f"{gradients} into {into}" if into else ""))
        lines.append(("because", here(verdict.reason)))
        lines.append((RESTING, resting_on(verdict)))
    way = lambda group: words((first if has_no_advice(group) else group[0]).advice)  # noqa: E731
    same_way, *other_ways = alike((same, *others), way)
    likewise = [name for name in dict.fromkeys(map(place, same_way)) if name != place(same)]
    lines.append(("likewise", few(likewise, LISTED)))
    todo = [here(first.advice)]
    todo += [f"{place(group)}: {here(group[0].advice)}" for group, *_ in other_ways]
    lines.append(("allowed:", reason) if reason else (TODO, "; and ".join(todo)))
    said = tuple((label, text) for label, text in lines if text)
    library = verdict.collective.library
    source = here(entry.place) if entry.source else ""
    source += f", in {library}" if library else ""
    return Item(first.kind, what, source, said, entry)


def resting_on(verdict: hlo.Verdict) -> str:
    """Return the statements that a verdict depends on."""
    return BETWEEN.join(s.detail if s.source == "assumption" else str(s) for s in verdict.rests_on)
