"""Define the results of ``explain`` and ``scan_calls``: rows as data, and their text."""

from __future__ import annotations

import dataclasses
import os
import sys
import textwrap
from collections.abc import Sequence

from shardrules import fitting
from shardrules.hooks.notes import Placement
from shardrules.hooks.types.calls.opaque import Call
from shardrules.registry.axistypes import AxisType, show_axes
from shardrules.registry.table import PROVEN
from shardrules.unchecked.sites import UncheckedSite

WRITTEN = "written in the program, or by JAX for one of its operations"  # the reason for a psum


@dataclasses.dataclass(frozen=True)
class ExplainedCall:
    """One opaque call of a program."""

    kernel: str
    primitive: str  # ``pallas_call`` or another
    defined_at: str  # where the kernel's function is defined, ``file:line``, or empty
    at: str  # the source line of the call or of the shard_map around it, or empty
    phase: str  # ``forward``, ``backward`` or ``recompute``
    checked: bool  # whether shard_map's check is on there
    inputs: tuple[AxisType, ...]  # each operand's axis type, after its cast
    outputs: tuple[AxisType, ...]  # each output's axis type
    rule: str  # the rule's text; empty if there is none
    # ``declared``, ``audited`` (by the kernel's own jaxpr), ``own types`` (a user's primitive whose
    # types are wide enough) or ``no rule``
    status: str
    declared_at: str  # where the rule was declared, or what was proven; empty if there is none
    count: int = 1  # how many such calls the program holds, loops counted once
    to_paste: tuple[str, ...] = ()  # lines to paste if there is no rule; one of them is enough


@dataclasses.dataclass(frozen=True)
class ExplainedCast:
    """One cast to another axis type; it moves nothing, and its transpose is a psum."""

    axes: tuple[str, ...]  # the mesh axes that change, sorted
    to: str  # ``varying`` or ``unreduced``
    value: str  # dtype and local shape
    bytes: int  # the size of the value on one device
    at: str  # the source line, or empty
    phase: str  # ``forward``, ``backward`` or ``recompute``
    why: str  # what needs it
    count: int = 1  # how many such casts the program holds, loops counted once


@dataclasses.dataclass(frozen=True)
class ExplainedSum:
    """One psum inside a shard_map with the check on."""

    axes: tuple[str, ...]
    value: str  # dtype and local shape
    bytes: int  # the size of the value on one device
    at: str  # the source line, or empty
    phase: str  # ``forward``, ``backward`` or ``recompute``
    why: str  # where it comes from
    steps: int | None = 1  # how often the loops around it run it; None inside a while_loop
    count: int = 1  # how many such psums the program holds, loops counted once


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The result of ``explain``; its text is a table."""

    calls: tuple[ExplainedCall, ...]  # the opaque calls inside shard_map, in the program's order
    casts: tuple[ExplainedCast, ...]  # the casts inside shard_map with the check on
    sums: tuple[ExplainedSum, ...]  # the psums there
    claims: tuple[str, ...] = ()  # the claims of ``already_summed``, which nothing proves
    placements: tuple[Placement, ...] = ()  # where casts would move the fewest bytes
    # the annotations that vary over fewer axes than a kernel's own jaxpr shows
    annotations: tuple[str, ...] = ()
    unchecked: tuple[UncheckedSite, ...] = ()  # with install(unchecked="check")

    def __str__(self) -> str:
        calls = []
        for call in self.calls:
            types = f"{_show(call.inputs)} -> {_show(call.outputs)}"
            shown = types if call.checked else "the check is off"
            kernel = _times(call.kernel, call.count)
            calls.append((kernel, call.phase, short(call.at), shown, _rule(call)))
        casts = [_row(c, f"{c.to} over {show_axes(c.axes)}", c.why) for c in self.casts]
        sums = [_row(s, f"over {show_axes(s.axes)}", s.why + _advice(s)) for s in self.sums]
        tables = [
            _table([head.split(", "), *rows])
            for head, rows in (
                ("kernel, phase, called at, inputs -> outputs, rule", calls),
                ("cast to, phase, at, value, why", casts),
                ("psum, phase, at, value, why", sums),
            )
            if rows
        ]
        unchecked = [
            f"unchecked: {site.function} at {site.file}:{site.line} "
            + (f"runs as written: {site.reason}" if site.reason else "runs with its check on")
            for site in self.unchecked
        ]
        annotations = [f"annotation: {text}" for text in self.annotations]
        claims = [f"claim: {text}" for text in self.claims]
        for texts in filter(None, (unchecked, annotations, claims)):
            tables.append("\n".join(map(_wrap, texts)))
        tables += filter(None, map(describe_placement, self.placements))
        return "\n\n".join(tables) or "no opaque call, cast or psum inside a shard_map"


@dataclasses.dataclass(frozen=True)
class MissingRule:
    """One kernel without a rule."""

    kernel: str
    primitive: str  # ``pallas_call`` or another
    defined_at: str  # where its function is defined, ``file:line``, or empty
    called_at: tuple[str, ...]  # the source lines of its calls
    inputs: tuple[AxisType, ...]  # types at the first call; empty if the check is off there
    checked: bool  # whether the check is on at one of its calls
    lines: tuple[str, ...]  # paste any one of them


@dataclasses.dataclass(frozen=True)
class MissingRules:
    """The result of ``scan_calls``; its text says what to paste."""

    calls: tuple[MissingRule, ...]  # the kernels without a rule, in the program's order
    known_count: int  # how many opaque calls inside shard_map have a rule
    stopped_by: Exception | None = None  # the error that ended the trace early, or None

    def __bool__(self) -> bool:
        return bool(self.calls)

    def __str__(self) -> str:
        if not self.calls:
            return f"every opaque call inside shard_map has a rule ({self.known_count})"
        count = len(self.calls)
        text = [f"{count} kernels have no rule" if count > 1 else "1 kernel has no rule"]
        for call in self.calls:
            defined = f" (defined at {short(call.defined_at)})" if call.defined_at else ""
            text.append(f"\n{name_of(call.primitive, call.kernel)}{defined}")
            for place in call.called_at:
                at = "" if place.startswith("within ") else "at "
                text.append(f"  called {at}{short(place)}")
            text += [f"  input {i}: {type_}" for i, type_ in enumerate(call.inputs)]
            if not call.checked:
                text.append("  inside shard_map(check_vma=False)")
            text += [f"    {line}" for line in call.lines]
        text.append("\nEach of a kernel's lines is enough.")
        if any("no_communication" in line for call in self.calls for line in call.lines):
            text[-1] += (
                " no_communication is right for kernels that read "
                "no other device\nand no device id; for one that communicates, write "
                "all_gather(axis), all_reduce(axis) or another\nof the rules for that."
            )
        if self.stopped_by is not None:
            first = str(self.stopped_by).splitlines() or [""]
            text.append(
                "The trace stopped early, so there may be more: "
                f"{type(self.stopped_by).__name__}: {first[0]}"
            )
        return "\n".join(text)


def name_of(primitive: str, kernel: str) -> str:
    return str(Call(primitive, kernel))


def short(at: str) -> str:
    """Shorten a path below the working directory."""
    return at.replace(os.getcwd() + os.sep, "", 1)


def _row(row: ExplainedCast | ExplainedSum, what: str, why: str) -> tuple[str, ...]:
    return _times(what, row.count), row.phase, short(row.at), f"{row.value}, {row.bytes} B", why


def _advice(psum: ExplainedSum) -> str:
    if psum.steps == 1 or psum.why == WRITTEN:  # no cast removes the program's own psums
        return ""
    steps = f"each of {psum.steps} steps" if psum.steps else "every step"
    return (
        f"; runs in {steps}: shardrules.vary(x, {', '.join(map(repr, psum.axes))}) before the "
        "loop sums once, if x is the same in all of them"
    )


def _times(text: str, count: int) -> str:
    return text if count == 1 else f"{text} ({count} times)"


def _show(types: Sequence[AxisType]) -> str:
    """Return types in short form: ``{data}``, ``{}``, ``{data} unreduced {model}``."""

    def text(t: AxisType) -> str:
        unreduced = f" unreduced {show_axes(t.unreduced)}" if t.unreduced else ""
        reduced = f" reduced {show_axes(t.reduced)}" if t.reduced else ""
        return show_axes(t.varying) + unreduced + reduced

    if len(set(types)) == 1 and len(types) > 1:
        return f"{len(types)} of {text(types[0])}"
    return ", ".join(map(text, types)) or "none"


def _rule(call: ExplainedCall) -> str:
    if call.status == "no rule":
        return "no rule"
    if call.status == "own types":
        return "its own types"
    status = PROVEN if call.status == "audited" else call.status
    return f"{call.rule}, {status} at {short(call.declared_at)}"


def describe_placement(placement: Placement) -> str:
    """Say how many bytes the placement of casts saves, with the line to write for each cast."""
    if placement.why:
        return _wrap(f"the casts stay where JAX puts them: {placement.why}")
    of_these = "the psums of these cotangents"
    beyond = _wrap(placement.beyond(of_these) or placement.held_up(of_these))
    saves = placement.after_bytes < placement.before_bytes
    if not saves and not placement.at_borders:
        return beyond
    done = (
        "placed by shardrules.install()"
        if placement.applied
        else 'placed by hand, or all by shardrules.install(casts="cheapest")'
    )
    said = (
        f"and {placement.after_bytes:,} B where that is the fewest ({done}):"
        if saves
        else "and as many where no reorder stands between them and the border: XLA can make "
        f"one reduce-scatter of a psum and the slice of its result beside it ({done}):"
    )
    lines = [
        _wrap(
            f"the casts' psums sum {placement.before_bytes:,} B on each device where JAX casts, "
            f"{said}"
        )
    ]
    for cast in placement.casts:
        names = ", ".join(map(repr, cast.axes))
        of = f" of {short(cast.function)}" if cast.function else ""
        where = f"made at {short(cast.at)}" if cast.at else f"an argument{of}"
        times = "once" if cast.runs == 1 else f"{cast.runs} times"
        lines.append(f"  x = shardrules.vary(x, {names})    # {cast.value}, {where}; {times}")
    return "\n".join([*lines, beyond] if beyond else lines)


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table with the columns that fit side by side, and other cells below their row."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    fit, columns = len(widths), fitting.width(sys.stdout)
    while fit > 1 and sum(widths[:fit]) + 2 * (fit - 1) > columns:
        fit -= 1
    lines = []
    for row in rows:
        aligned = (cell.ljust(width) for cell, width in zip(row[:fit], widths))
        lines.append("  ".join(aligned).rstrip())
        lines += [_wrap(cell, "    ") for cell in row[fit:] if cell]
    return "\n".join(lines)


def _wrap(text: str, indent: str = "") -> str:
    wrapper = textwrap.TextWrapper(fitting.width(sys.stdout), indent, indent + "  ")
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.fill(text)
