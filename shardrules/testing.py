"""Assert facts about compiled programs, in users' test suites.

Each assertion takes a jitted function with its arguments (arrays, or ``jax.ShapeDtypeStruct`` with
shardings, also of absent accelerators), a ``Lowered``, a ``Compiled``, or HLO text. The function's
arguments may be passed in ``args=(...)`` and ``kwargs={...}``; this is needed for an argument whose
name the assertion uses itself.
"""

from __future__ import annotations

import os
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

from shardrules import hlo, report
from shardrules import program as programs
from shardrules.arguments import checked
from shardrules.checks import budget as budgets
from shardrules.checks import updates
from shardrules.checks.costs import (
    assert_donated,
    assert_loop,
    assert_no_host_transfers,
    assert_no_large_constants,
    assert_output_sharding,
)
from shardrules.checks.expectations import at_most, exactly, for_platforms, pick
from shardrules.checks.offloaded import assert_offloaded
from shardrules.checks.replicated import assert_outputs_replicated, check_replicated_inputs
from shardrules.checks.rulecheck import check_rule
from shardrules.checks.steady import steady_state
from shardrules.checks.told import verify_flags
from shardrules.costs import accounts, findings, waste
from shardrules.door import internals
from shardrules.errors import CollectiveAssertionError, ShardrulesError
from shardrules.hooks.explain.residuals import named_values
from shardrules.program import judge
from shardrules.registry.binding import caller_place
from shardrules.registry.table import Registry
from shardrules.unchecked.same import assert_same_unchecked
from shardrules.units import counted

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
    "verify_flags",
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
    """Return the bytes that a program's collectives move, by kind, axes, phase and source line.

    Args:
      program: a function of ``*args, **kwargs``, a Lowered, a Compiled, HLO text or a path.
      *args: what the function is called with.
      **kwargs: its keyword arguments.
      level: ``"compiled"`` for the program that runs on this platform; ``"logical"`` for the
        collectives of the source in shard_map, before XLA's passes, equal on every platform.
      registry: rules for custom calls that carry no tag; the default registry if None.
      mesh: axis names and sizes in the order of the devices; taken from the shardings if None.

    Raises:
      ShardrulesError: the level is unknown, or the program is compiled already (for a logical
        account); also the errors of ``judge``.

    Examples:
      >>> print(testing.account(step, w, x))
      backward all-reduce(data): 1, 32768 B
    """
    return _judged(program, args, kwargs, level, registry, mesh)[1]


def _judged(
    program: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    level: str,
    registry: Registry | None,
    mesh: Mapping[str, int] | None,
) -> tuple[hlo.Judgement, accounts.Account, str | None]:
    if level not in _LEVELS:
        raise ShardrulesError(
            f"level={level!r} is unknown; there are {' and '.join(_LEVELS)}", level=level
        )
    if level == "logical":
        judgement = programs.judge_logical(program, args, kwargs, mesh)
        return judgement, accounts.of(judgement, level), None
    source = programs.read(program, args, kwargs)
    judgement = programs.judged(source, registry, mesh)
    return judgement, accounts.of(judgement), source.platform()


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
    """Assert that every collective of a program is proven to be needed.

    Fails on each collective that is *redundant*, *overwide* or *unproven*, and on each psum in a
    loop that a psum before or after the loop could replace with fewer bytes, if it sends more than
    1% of the program's bytes; with ``cheapest``, on all psums that could move fewer bytes.

    Args:
      program: a function of ``*args, **kwargs``, a Lowered, a Compiled, HLO text or a path.
      *args: what the function is called with.
      **kwargs: its keyword arguments.
      registry: rules for custom calls that carry no tag; the default registry if None.
      mesh: axis names and sizes in the order of the devices; taken from the shardings if None.
      strict: also fail on verdicts that rest on a declared rule.
      cheapest: also fail on the smaller psums in loops, and on a psum whose result is only reduced,
        scattered or added to another psum's result, as far as the compiled text shows it. For a
        function, also fail on casts that could move fewer bytes at another place
        (``assert_cheapest_casts``). The message gives the bytes of both places.
      allow: maps findings that may stay, ``"redundant all-reduce(model) at model.py"``, to the
        reasons; an entry that matches no finding fails too.

    Returns:
      The verdicts, for further checks.

    Raises:
      CollectiveAssertionError: lists each offending collective with axes, bytes, source line and
        advice.
      ShardrulesError: the errors of ``judge``.

    Examples:
      >>> judgement = testing.assert_no_defensive_psum(step, w, x)
      >>> [verdict.verdict for verdict in judgement.verdicts]
      ['needed']
    """
    __tracebackhide__ = True  # pytest shows the line that calls this
    allowances = findings.Allowances(allow)
    judgement = judge(program, *args, registry=registry, mesh=mesh, **kwargs)
    allowances.check_axes(judgement.mesh)
    dearer = waste.dearer(waste.hints(judgement), None if cheapest else judgement)
    bad, _, unused = allowances.split(findings.find(judgement, strict) + dearer)
    if bad:
        each = [finding.kind for finding in bad]
        kinds = ", ".join(f"{each.count(k)} {k}" for k in sorted(set(each), key=_ORDER.index))
        could = cheapest or any(f.hint is not None for f in bad)
        what = "needed, or could be cheaper" if could else "needed"
        raise CollectiveAssertionError(
            f"{counted(len(bad), 'collective', len(judgement.verdicts))} not shown to be {what} "
            f"({kinds}):\n" + _listed(bad),
            verdicts=tuple(f.verdict for f in bad),
            judgement=judgement,
        )
    if cheapest and programs.is_function(program):
        text, placements, _ = _wasted(program, *args, **kwargs)
        if placements:
            raise CollectiveAssertionError(text, placements=placements, judgement=judgement)
    _no_unused(unused, judgement)
    return judgement


@checked
def assert_cheapest_casts(f: Any, *args: Any, **kwargs: Any) -> None:
    """Assert that the casts of each gradient stand where its psums move the fewest bytes.

    The program is traced, not compiled. ``assert_no_defensive_psum`` tests whether each reduction
    is needed where it stands. This assertion tests whether a cast at another place would need fewer
    bytes. If casts can't be placed (up to JAX 0.5.3, or if the program can't be rewritten), it
    raises nothing. If no shard_map whose check is on holds a cast or a psum, it warns that nothing
    was compared.

    Args:
      f: a gradient, jitted or not.
      *args: its arguments; arrays or ``jax.ShapeDtypeStruct``.
      **kwargs: its keyword arguments.

    Raises:
      CollectiveAssertionError: gives the bytes now, the fewest bytes, and the line for each cast.
      ShardrulesError: ``f`` is not a function.
    """
    __tracebackhide__ = True  # pytest shows the line that calls this
    text, placements, seen = _wasted(f, *args, **kwargs)
    if placements:
        raise CollectiveAssertionError(text, placements=placements)
    if not seen:
        warnings.warn(
            "assert_cheapest_casts compared nothing: this program has no cast and no psum in a "
            "shard_map whose check is on. Drop check_vma=False, or call it inside "
            'shardrules.install(unchecked="check")',
            stacklevel=3,
        )


def _wasted(f: Any, *args: Any, **kwargs: Any) -> tuple[str, tuple[Any, ...], bool]:
    """Return the casts that cost too much, as text and as data, and whether there is any cast."""
    from shardrules.hooks.explain.explain import explain
    from shardrules.hooks.explain.explanation import describe_placement

    if not programs.is_function(f):
        raise ShardrulesError(
            f"{type(f).__name__} has no casts to look at; pass the function that takes the "
            "gradient, with its arguments"
        )
    explained = explain(f, *args, **kwargs)
    dearer = tuple(
        placement
        for placement in explained.placements
        if not placement.applied and placement.after_bytes < placement.before_bytes
    )
    casts = explained.casts or explained.sums or explained.placements
    seen = bool(casts) or not internals.load().typed  # up to JAX 0.5.3, casts can't be seen
    return "\n".join(map(describe_placement, dearer)), dearer, seen


_LINES = 24  # the most differences from a budget in a failing test's message
_SHOWN = 6  # the most findings in a message
_ORDER = ("redundant", "overwide", "unproven", "may hang", "declared", *waste.KINDS)


def _listed(bad: list[findings.Finding]) -> str:
    """Describe findings: equal ones once, and only as many as fit on a screen."""
    same = findings.alike(bad)
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
    """Assert that a program holds exactly the expected collectives.

    A collective in a loop of 32 trips counts 32 times. Each part of a combined all-reduce counts
    separately.

    Args:
      program: a function of ``*args, **kwargs``, a Lowered, a Compiled, HLO text or a path.
      *args: what the function is called with.
      **kwargs: its keyword arguments.
      expect: maps ``"all-reduce(data)"`` (axes in any order; ``"backward all-reduce(data)"`` for
        one phase) to a count, or to some of ``{"count": 1, "bytes": 512, "wire_bytes": 768,
        "sites": 1}``. It may also be ``exactly`` or ``at_most`` of such a mapping, or hold one of
        these for each platform, ``{"cpu": ..., "tpu": ..., "gpu": ...}``. ``{}`` expects no
        collectives.
      registry: rules for custom calls that carry no tag; the default registry if None.
      mesh: axis names and sizes in the order of the devices; taken from the shardings if None.
      level: ``"compiled"`` or ``"logical"``, as for ``account``.
      platform: the program's platform, if expectations depend on it and HLO text doesn't show it.

    Returns:
      The verdicts, for further checks.

    Raises:
      CollectiveAssertionError: the collectives differ; the message shows each difference.
      ShardrulesError: an expectation can't be read; also the errors of ``account``.

    Examples:
      >>> expect = {"backward all-reduce(data)": {"count": 1, "bytes": 32768}}
      >>> judgement = testing.assert_collectives(step, w, x, expect=expect)
    """
    __tracebackhide__ = True  # pytest shows the line that calls this
    if not for_platforms(expect):
        pick(expect, platform)  # before anything is compiled
    judgement, actual, compiled_for = _judged(program, args, kwargs, level, registry, mesh)
    platform = platform or compiled_for
    wanted = pick(expect, platform)
    wrong = []
    for line, entries in wanted.differences(actual):
        wrong.append(f"  {line}")
        wrong += report.listed(entries)
    if wrong:
        holds = str(actual).replace("\n", "\n  ")
        raise CollectiveAssertionError(
            "\n".join(["the collectives are not the expected ones:", *wrong])
            + f"\nthe program holds:\n  {holds}",
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
    """Assert that a program's collectives are the ones in a budget file.

    Call ``assert_budget(compiled, "budgets/train.toml")``, or pass the function's arguments between
    the function and the path. Findings (redundant, overwide and unproven collectives) fail unless
    an ``[[allow]]`` in the file gives a reason. ``pytest --update-budgets`` rewrites the files of
    the tests that pass, and keeps their allowances; if ``CI`` is set, use
    ``--update-budgets-in-ci``.

    Args:
      program: a function, a Lowered, a Compiled, HLO text or a path.
      *args_then_path: the function's arguments, then the budget's path, relative to the calling
        file.
      **kwargs: its keyword arguments.
      level: ``"compiled"`` or ``"logical"``, as for ``account``; a logical budget holds for all
        platforms and has no findings.
      strict: verdicts that rest on declared rules are findings too.
      registry: rules for custom calls that carry no tag; the default registry if None.
      mesh: axis names and sizes in the order of the devices; taken from the shardings if None.

    Returns:
      The verdicts, for further checks.

    Raises:
      CollectiveAssertionError: the collectives differ (``+`` added, ``-`` removed, ``~`` changed),
        or a finding is not allowed.
      BudgetError: the file can't be read.
      ShardrulesError: no path was given; also the errors of ``account``.

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
    judgement, actual, _ = _judged(program, tuple(args), kwargs, level, registry, mesh)
    now = budgets.of(actual, path)
    findings_now = findings.find(judgement, strict) if level == "compiled" else []
    if updates.wanted:
        now.allow = budgets.allowances(path)
        updates.write(path, budgets.dump(now))
        before = now
    elif path.exists():
        before = budgets.load(path)
    else:
        raise _no_budget(path, given, now, findings_now, judgement)
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
    bad, _, unused = allowances.split(findings_now)
    if bad:
        raise _not_allowed(path, given, bad, judgement)
    _no_unused(unused, judgement)
    return judgement


def _no_budget(
    path: pathlib.Path,
    given: str,
    now: budgets.Budget,
    findings_now: list[findings.Finding],
    judgement: hlo.Judgement,
) -> CollectiveAssertionError:
    now.allow = dict.fromkeys(map(findings.allowance, findings_now), "...")
    how = "write it with pytest --update-budgets"
    if findings_now:
        how += (
            f", once {given} says why each of its findings stays (a new file may hold just the "
            "[[allow]])"
        )
    text = f"there is no budget {given}; {how}. It would hold\n{budgets.dump(now)}"
    return CollectiveAssertionError(text, judgement=judgement, path=path)


def _not_allowed(
    path: pathlib.Path, given: str, bad: list[findings.Finding], judgement: hlo.Judgement
) -> CollectiveAssertionError:
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
