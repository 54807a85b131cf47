"""Assertions about compiled programs, for users' test suites.

Each takes what there is: a jitted function with arguments (arrays, or ``jax.ShapeDtypeStruct``
with shardings, also of accelerators that are not here), a ``Lowered``, a ``Compiled``, or text.
"""

from __future__ import annotations

import collections
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from shardrules import hlo, report
from shardrules import program as programs
from shardrules.arguments import checked
from shardrules.checks import budget as budgets
from shardrules.checks import updates
from shardrules.checks.costs.casts import assert_cheapest_casts, wasted
from shardrules.checks.costs.host import assert_donated, assert_no_host_transfers
from shardrules.checks.costs.loops import assert_loop
from shardrules.checks.costs.offloaded import assert_offloaded, named_values
from shardrules.checks.costs.placement import assert_no_large_constants, assert_output_sharding
from shardrules.checks.costs.steady import steady_state
from shardrules.checks.expectations import at_most, exactly, for_platforms, pick
from shardrules.checks.replicated import assert_outputs_replicated, check_replicated_inputs
from shardrules.checks.rulecheck import check_rule
from shardrules.checks.unchecked import assert_same_unchecked
from shardrules.costs import accounts, findings, waste
from shardrules.errors import CollectiveAssertionError, ShardrulesError
from shardrules.program import judge
from shardrules.registry.binding import caller_place
from shardrules.registry.table import Registry
from shardrules.report.grouping import counted

__all__ = [
    "account",
    "assert_budget",
    "assert_cheapest_casts",
    "assert_collectives",
    "assert_donated",
    "assert_loop",
    "assert_no_defensive_psum",
    "assert_no_host_transfers",
    "assert_no_large_constants",
    "assert_offloaded",
    "assert_output_sharding",
    "assert_outputs_replicated",
    "assert_same_unchecked",
    "at_most",
    "check_replicated_inputs",
    "check_rule",
    "exactly",
    "judge",
    "named_values",
    "steady_state",
]

_LEVELS = ("compiled", "logical")


@checked(own=("mesh",))
def account(
    program: Any,
    *args: Any,
    level: str = "compiled",
    registry: Registry | None = None,
    mesh: Mapping[str, int] | None = None,
    **kwargs: Any,
) -> accounts.Account:
    """Return what a program's collectives move, by kind, axes, phase and source line.

    Args:
      program: a function of ``*args, **kwargs``, a Lowered, a Compiled, HLO text or a path.
      *args: what the function is called with.
      **kwargs: its keyword arguments.
      level: ``"compiled"`` for the program that runs on this platform, ``"logical"`` for what the
        source asks for in shard_map, before XLA's passes: the same on every platform.
      registry: rules for custom calls that carry no tag; the default registry if None.
      mesh: axis names and sizes in the order of the devices; taken from the shardings if None.

    Raises:
      ShardrulesError: the level is unknown, the program is compiled already (for a logical
        account), or as ``judge``.

    Examples:
      >>> print(testing.account(step, w, x))
      backward all-reduce(data): 1, 32768 B
    """
    return _judged(program, args, kwargs, level, registry, mesh)[1]


def _judged(
    program: Any,
    args: tuple,
    kwargs: dict,
    level: str,
    registry: Registry | None,
    mesh: Mapping[str, int] | None,
) -> tuple[hlo.Judgement, accounts.Account, Any]:
    """Return a judgement, its account, and the Compiled if there is one."""
    if level not in _LEVELS:
        raise ShardrulesError(
            f"level={level!r} is unknown; there are {' and '.join(_LEVELS)}", level=level
        )
    if level == "logical":
        judgement = programs.judge_logical(program, args, kwargs, mesh)
        return judgement, accounts.of(judgement, level), None
    found = programs.read(program, args, kwargs)
    judgement = programs.judged(found, registry, mesh)
    return judgement, accounts.of(judgement), found.compiled


@checked(own=("mesh", "allow"))
def assert_no_defensive_psum(
    program: Any,
    *args: Any,
    registry: Registry | None = None,
    mesh: Mapping[str, int] | None = None,
    strict: bool = False,
    cheapest: bool = False,
    allow: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> hlo.Judgement:
    """Assert that every collective of a program is needed, as far as it can be proven.

    Fails on each collective that is *redundant*, *overwide* or *unproven*, and on each psum in a
    loop that one before or after the loop replaces with fewer bytes, if it sends more than 1% of
    the program's bytes; with ``cheapest``, on each psum that would move fewer bytes elsewhere.

    Args:
      program: a function of ``*args, **kwargs``, a Lowered, a Compiled, HLO text or a path.
      *args: what the function is called with.
      **kwargs: its keyword arguments.
      registry: rules for custom calls that carry no tag; the default registry if None.
      mesh: axis names and sizes in the order of the devices; taken from the shardings if None.
      strict: accept proofs alone: also fail on verdicts that rest on a declared rule.
      cheapest: also fail on the smaller psums in loops, and on a psum of what is only reduced,
        scattered or added to another one afterwards (as of what was broadcast, repeated, gathered
        or read twice), as far as the compiled text shows it; and, of a function, on casts that
        stand elsewhere than where they move the fewest bytes (``assert_cheapest_casts``). Each is
        told with the bytes now and then.
      allow: known findings, from ``"redundant all-reduce(model) at model.py"`` to the reason; one
        that matches nothing fails too.

    Returns:
      The verdicts, for further checks.

    Raises:
      CollectiveAssertionError: listing each offending collective, with axes, bytes, source line
        and what to do.
      ShardrulesError: as ``judge``.

    Examples:
      >>> judgement = testing.assert_no_defensive_psum(step, w, x)
      >>> [verdict.verdict for verdict in judgement.verdicts]
      ['needed']
    """
    __tracebackhide__ = True  # pytest shows the line that calls this
    allowances = findings.Allowances(allow)
    judgement = judge(program, *args, registry=registry, mesh=mesh, **kwargs)
    allowances.check_axes(judgement.mesh)
    found = findings.find(judgement, strict)
    bad, _, unused = allowances.split(
        found + waste.dearer(waste.hints(judgement), None if cheapest else judgement)
    )
    if bad:
        counts = collections.Counter(f.kind for f in bad)
        kinds = ", ".join(
            f"{n} {kind}" for kind, n in sorted(counts.items(), key=lambda c: _ORDER.index(c[0]))
        )
        could = cheapest or any(f.hint is not None for f in bad)
        what = "needed, or could be cheaper" if could else "needed"
        raise CollectiveAssertionError(
            f"{counted(len(bad), 'collective', len(judgement.verdicts))} not shown to be {what} "
            f"({kinds}):\n" + _listed(bad),
            verdicts=tuple(f.verdict for f in bad),
            judgement=judgement,
        )
    if cheapest and callable(program) and not hasattr(program, "as_text"):
        text, placements = wasted(program, *args, **kwargs)
        if placements:
            raise CollectiveAssertionError(text, placements=placements, judgement=judgement)
    _no_unused(unused, judgement)
    return judgement


_LINES = 24  # of a budget's differences, and
_SHOWN = 6  # of findings, in a failing test's message
_ORDER = ("redundant", "overwide", "unproven", "may hang", "declared", *waste.KINDS)


def _listed(found: list[findings.Finding]) -> str:
    """Describe findings, equal ones once, and no more than fit on a screen."""
    same = findings.alike(found)
    lines = [report.describe_finding(*members) for members in same[:_SHOWN]]
    left = same[_SHOWN:]
    if left:
        lines.append(f"  and {sum(map(len, left))} more; shardrules.report.plain shows all")
    return "\n".join(lines)


def _no_unused(unused: list[str], judgement: hlo.Judgement) -> None:
    __tracebackhide__ = True  # pytest shows the line that calls this
    if unused:
        raise CollectiveAssertionError(
            "these allowances match no finding any more; remove them:\n  " + "\n  ".join(unused),
            verdicts=(),
            judgement=judgement,
        )


@checked(own=("mesh",))
def assert_collectives(
    program: Any,
    *args: Any,
    expect: Any,
    registry: Registry | None = None,
    mesh: Mapping[str, int] | None = None,
    level: str = "compiled",
    platform: str | None = None,
    **kwargs: Any,
) -> hlo.Judgement:
    """Assert that a program holds just the expected collectives.

    A collective in a loop of 32 trips counts 32 times; combined all-reduces count range by range.

    Args:
      program: a function of ``*args, **kwargs``, a Lowered, a Compiled, HLO text or a path.
      *args: what the function is called with.
      **kwargs: its keyword arguments.
      expect: from ``"all-reduce(data)"`` (axes in any order; ``"backward all-reduce(data)"`` for
        one phase) to a count, or to some of ``{"count": 1, "bytes": 512, "wire_bytes": 768,
        "sites": 1}``; ``exactly`` or ``at_most`` of such a mapping; or one of these for each
        platform, ``{"cpu": ..., "tpu": ..., "gpu": ...}``. ``{}`` stands for none.
      registry: rules for custom calls that carry no tag; the default registry if None.
      mesh: axis names and sizes in the order of the devices; taken from the shardings if None.
      level: ``"compiled"`` or ``"logical"``, as for ``account``.
      platform: the program's, where expectations differ and text does not say.

    Returns:
      The verdicts, for further checks.

    Raises:
      CollectiveAssertionError: showing what was expected, what there is, and each difference.
      ShardrulesError: if an expectation can't be read, or as ``account``.

    Examples:
      >>> expect = {"backward all-reduce(data)": {"count": 1, "bytes": 32768}}
      >>> judgement = testing.assert_collectives(step, w, x, expect=expect)
    """
    __tracebackhide__ = True  # pytest shows the line that calls this
    if not for_platforms(expect):
        pick(expect, platform)  # before anything is compiled
    judgement, held, compiled = _judged(program, args, kwargs, level, registry, mesh)
    if platform is None and compiled is not None:
        from shardrules.door import compiled as known

        platform = known.platform(compiled)
    wanted = pick(expect, platform)
    verdicts = {id(e): v for e, v in zip(held, judgement.verdicts)}
    wrong = []
    for line, entries in wanted.differences(held):
        wrong.append(f"  {line}")
        wrong += report.listed(entries, [verdicts[id(e)] for e in entries])
    if wrong:
        holds = str(held)
        raise CollectiveAssertionError(
            "the collectives are not the expected ones:\n"
            + "\n".join(wrong)
            + "\nthe program holds:\n  "
            + holds.replace("\n", "\n  "),
            expect=expect,
            judgement=judgement,
        )
    return judgement


@checked(own=("mesh",))
def assert_budget(
    program: Any,
    *args_then_path: Any,
    level: str = "compiled",
    strict: bool = False,
    registry: Registry | None = None,
    mesh: Mapping[str, int] | None = None,
    **kwargs: Any,
) -> hlo.Judgement:
    """Assert that a program's collectives are those of a checked-in file.

    ``assert_budget(compiled, "budgets/train.toml")``, or with the function's arguments between the
    two. Findings (redundant, overwide and unproven collectives) fail unless the file allows them
    by an ``[[allow]]`` with a reason. ``pytest --update-budgets`` rewrites the file of each test
    that passes, and keeps its allowances; where ``CI`` is set it takes ``--update-budgets-in-ci``.

    Args:
      program: a function, a Lowered, a Compiled, HLO text or a path.
      *args_then_path: what the function is called with, then the budget's path, relative to the
        file that calls this.
      **kwargs: its keyword arguments.
      level: ``"compiled"`` or ``"logical"``, as for ``account``; a logical budget holds for all
        platforms and has no findings.
      strict: accept proofs alone: verdicts that rest on declared rules are findings too.
      registry: rules for custom calls that carry no tag; the default registry if None.
      mesh: axis names and sizes in the order of the devices; taken from the shardings if None.

    Returns:
      The verdicts, for further checks.

    Raises:
      CollectiveAssertionError: with the differences (``+`` came, ``-`` went, ``~`` grew or
        shrank), or the findings that nothing allows.
      BudgetError: the file can't be read.
      ShardrulesError: no path was given, or as ``account``.

    Examples:
      >>> try:
      ...     testing.assert_budget(step, w, x, "budgets/step.toml")
      ... except AssertionError as error:
      ...     print(str(error).splitlines()[0][:34])
      there is no budget budgets/step.to
    """
    __tracebackhide__ = True  # pytest shows the line that calls this
    if not args_then_path or not isinstance(args_then_path[-1], (str, os.PathLike)):
        raise ShardrulesError(
            "assert_budget takes the budget's path last: "
            "assert_budget(compiled, 'budgets/train.toml')"
        )
    *args, given = args_then_path
    caller = caller_place().rpartition(":")[0]
    path = pathlib.Path(caller).parent / given if os.path.exists(caller) else pathlib.Path(given)
    judgement, held, _ = _judged(program, tuple(args), kwargs, level, registry, mesh)
    now = budgets.of(held, budgets.root_of(path))
    found = findings.find(judgement, strict) if level == "compiled" else []
    if updates.wanted:
        now.allow = budgets.allowances(path)
        updates.write(path, budgets.dump(now), str(given))
        before = now
    elif path.exists():
        before = budgets.load(path)
    else:
        raise _no_budget(path, given, now, found, judgement)
    lines = before.differences(now)
    if lines:
        raise CollectiveAssertionError(
            f"the collectives are not those of the budget {given} (- budget, + program):\n  "
            + "\n  ".join(lines[:_LINES])
            + (f"\n  and {len(lines) - _LINES} more" if lines[_LINES:] else "")
            + "\nif that is meant: pytest --update-budgets",
            differences=tuple(lines),
            judgement=judgement,
            path=path,
        )
    if level == "logical":
        return judgement
    allowances = findings.Allowances(before.allow)
    allowances.check_axes(judgement.mesh)
    bad, _, unused = allowances.split(found)
    if bad:
        raise _not_allowed(path, given, bad, judgement)
    _no_unused(unused, judgement)
    return judgement


def _no_budget(path, given, now, found, judgement) -> CollectiveAssertionError:
    now.allow = dict.fromkeys(map(findings.allowance, found), "...")
    reasons = (
        f", once {given} says why each of its findings stays (a new file may hold just the "
        "[[allow]])"
    )
    return CollectiveAssertionError(
        f"there is no budget {given}; write it with pytest --update-budgets"
        f"{reasons if found else ''}. It would hold\n" + budgets.dump(now),
        judgement=judgement,
        path=path,
    )


def _not_allowed(path, given, bad, judgement) -> CollectiveAssertionError:
    names = dict.fromkeys(map(findings.allowance, bad))
    until = "; until then nothing is written there" if updates.wanted else ""
    return CollectiveAssertionError(
        f"{counted(len(bad), 'finding')} that nothing allows:\n"
        + _listed(bad)
        + f"\nif they may stay, say why in {given} (a new file may hold just that){until}:\n"
        + "\n".join(budgets.allowed(name, "...") for name in names),
        verdicts=tuple(f.verdict for f in bad),
        judgement=judgement,
        path=path,
    )
