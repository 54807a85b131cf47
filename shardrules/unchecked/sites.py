"""Describe unchecked shard_maps: their sites, facts from retraces, reasons to leave them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

from shardrules.door import places
from shardrules.unchecked import retrace

COMPUTES_ELSE = "its body computes something else with the check on"
RULES_ELSE = "a rule for its derivative computes something else with the check on"
# The reasons from hooks.cotangents.summed_shares begin with these words (that module imports jax).
TAKES_GRADIENT = "a custom rule takes a gradient itself"
UNSEEN = "it can't be looked at"
UNSTEADY = (
    "it changes Python state by how often its functions are traced: JAX traces what is jitted, or "
    "the body of a loop, once, and may trace it more often with the check on"
)
OLDER = (
    "JAX reuses an earlier trace of a jitted function or of a loop's body, made with other values "
    "of Python variables: pass those as arguments"
)
BY_TYPE = (
    "its Python changes other state, or computes with other numbers, with the check on: by the "
    "type of a value that it reads, or by how often its functions are traced"
)


@dataclasses.dataclass(frozen=True, order=True)
class Site:
    """The place where a program makes a shard_map."""

    file: str  # the path of the source file
    # The position of the call's expression, as in ``ast``: lines from 1, columns in UTF-8 bytes
    # from 0, or -1 if Python does not record them.
    line: int
    column: int
    end_line: int
    end_column: int
    function: str  # the name of the mapped function

    def decided(
        self, why: str, before: int | None = None, after: int | None = None, arguments: str = ""
    ) -> UncheckedSite:
        """Return the decision: left for the reason ``why``, or switched if ``why`` is empty."""
        where = self.file, self.line, self.function
        return UncheckedSite(*where, not why, why, before, after, arguments)


def site_of(frame: Any, function: str, own: str) -> Site | None:
    """Return the place that makes a shard_map; None if JAX itself makes it, as for pmap.

    Frames of the module ``own`` are skipped: there are some if the hooks were installed on top of
    ``check_off.kept``.
    """
    while frame is not None and (
        places.is_wrapper(name := frame.f_globals.get("__name__")) or name == own
    ):
        frame = frame.f_back
    if frame is None or places.owns(frame.f_code.co_filename):
        return None
    positions = list(frame.f_code.co_positions())
    line, end_line, *columns = positions[frame.f_lasti // 2]
    line = line or frame.f_lineno
    start, end = (-1 if column is None else column for column in columns)
    return Site(frame.f_code.co_filename, line, start, end_line or line, end, function)


class Missing(NamedTuple):
    kernel: str
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class UncheckedCall:
    """A call of a shard_map, traced with the check off and on."""

    site: Site  # where the shard_map was made
    inside: Site | None  # the site of the shard_map around it, if its check is off too
    kind: str  # the tree, shapes and dtypes of its arguments
    missing: tuple[Missing, ...] = ()  # kernels without a rule
    outputs: tuple[
        retrace.TracedOutput, ...
    ] = ()  # outputs that vary over more than their out_specs say
    error: str = ""  # the error of the trace with the check on; empty if it passed
    undifferentiated: str = ""  # why the derivative was not traced; empty if it was
    takes_gradients: bool = False  # whether the body takes gradients, whose values may change
    summed: tuple[str, ...] = ()  # the axes that all sums in the body name; empty if they differ
    # The all-reduces with the check off and on, in the forward and backward pass.
    before: tuple[retrace.Sum, ...] | None = None
    after: tuple[retrace.Sum, ...] | None = None
    declared: tuple[str, ...] = ()  # the places of the rules that match its kernels by name
    annotations: tuple[str, ...] = ()  # a sentence for each output annotation that is wrong
    # why values or gradients may differ with the check on
    reasons_to_leave: tuple[str, ...] = ()
    holds_another: bool = False  # whether its body holds another shard_map


@dataclasses.dataclass(frozen=True)
class UncheckedSite:
    """The decision about a shard_map whose check is off, for one signature of arguments.

    Attributes:
      file, line: where the program makes the shard_map.
      function: the name of the function that is mapped.
      switched: whether it runs with its check on.
      reason: why it runs as written; empty if it is switched.
      before_bytes: the bytes that each device sends for the all-reduces of a call and of its
        derivative with the check off, as traced; None if unknown.
      after_bytes: the same with the check on.
      arguments: the arguments' tree, shapes and dtypes.
    """

    file: str
    line: int
    function: str
    switched: bool
    reason: str
    before_bytes: int | None
    after_bytes: int | None
    arguments: str = ""


def costliest(sites: Iterable[UncheckedSite]) -> tuple[UncheckedSite, ...]:
    """Return the sites, sorted by the bytes that they move with the check off, most first."""
    return tuple(sorted(sites, key=lambda site: -(site.before_bytes or 0)))


def why_left(call: UncheckedCall) -> str:
    """Return why a call runs as written; empty if its check can be on."""
    if call.missing:
        return f"no rule for {', '.join(dict.fromkeys(entry.kernel for entry in call.missing))}"
    if call.outputs:
        return "; ".join(map(varies, call.outputs))
    if call.error:
        return _first_sentences(call.error)
    if call.takes_gradients:
        return "its body takes gradients, which may change"
    if call.reasons_to_leave:
        return call.reasons_to_leave[0]
    if call.holds_another:
        # JAX up to 0.12 can't lower the derivative of some of these with the check on.
        return "its body holds another shard_map"
    if call.before is not None and call.after is not None:
        return _more(call.before, call.after)
    return ""


def _first_sentences(error: str) -> str:
    """Return an error's first line, cut before a sentence that goes on in the next line."""
    first, *rest = error.splitlines()
    if not any(rest):
        return first
    if first.endswith(":"):
        first = (first.rpartition(". ")[0] or first.rstrip(":")).strip()
    return f"{first.rstrip('.')} (shardrules migrate prints all of it)"


def varies(output: retrace.TracedOutput) -> str:
    """Say that an output varies over axes that its spec doesn't name."""
    return f"out_specs{output.path} is {output.spec}, but it varies over {output.axes}"


def _more(before: tuple[retrace.Sum, ...], after: tuple[retrace.Sum, ...]) -> str:
    """Say if the check moves more bytes, counting while loops separately; empty if it doesn't."""
    for loops in (False, True):
        off = [s for s in before if (s.runs is None) == loops]
        on = [s for s in after if (s.runs is None) == loops]
        for count in (retrace.sent_bytes, retrace.summed_bytes):
            if count(on) > count(off):
                where = " in a while loop" if loops else ""
                return f"its all-reduces would move {count(on)} B{where} instead of {count(off)} B"
    return ""


def function_name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def kind_of(args: tuple[Any, ...]) -> str:
    """Describe the arguments' tree, shapes and dtypes, and the values of other leaves."""
    import jax

    leaves, tree = jax.tree_util.tree_flatten(args)
    kinds = [
        f"{x.dtype}{tuple(x.shape)}" if hasattr(x, "dtype") and hasattr(x, "shape") else repr(x)
        for x in leaves
    ]
    return f"{tree} {' '.join(kinds)}"


def missing_of(notes: Any) -> tuple[Missing, ...]:
    return tuple(dict.fromkeys(Missing(call.name, lines) for call, _, lines in notes.unknown))


_WHOLE_COTANGENTS = (
    "  with the check on, a bwd or a transpose gets the cotangent summed over the devices "
    "instead of one device's share. If it is linear in the cotangent (twice as much in gives "
    "twice as much out), the gradient is the same: switch it on by hand, with "
    "shardrules.install() where the program starts, if "
    "shardrules.testing.assert_same_unchecked(loss, *arguments, forced=True) passes. If not, as "
    "where it clips, leave the check off, or call it with shardrules.vary(x, *axes), which keeps "
    "each device's share"
)
_SUMS_ITSELF = (
    "  with the check on, JAX itself sums the gradient of what is equal along an axis: let the bwd "
    "return each device's own share, without its psum, pmean or pmax (and the cotangent as it "
    "arrives where the forward pass reduces); then switch the check on by hand, with "
    "shardrules.install() where the program starts, and compare a step's gradients with those "
    "before and with one device's, since with the check off they may be wrong"
)
_OWN_TERM = (
    "  with the check off, shard_map sums that gradient over the devices; with the check on it "
    "counts once. To keep the sum, pass shardrules.vary(w, *axes) for that argument w, with the "
    "axes named above, where the function is called; then switch the check on by hand, with "
    "shardrules.install() where the program starts. To count it once, switch it on as it is"
)
OWN_TERM = "a gradient that doesn't depend on its cotangent"
SUMMED = ("returns a gradient that is summed over", "makes results equal over")


def of_cotangents(reasons: Iterable[str]) -> list[str]:
    """Return advice for sites where gradients that pass a bwd or a transpose may change."""
    advice = [
        _OWN_TERM
        if OWN_TERM in reason
        else _SUMS_ITSELF
        if any(text in reason for text in SUMMED)
        else _WHOLE_COTANGENTS
        for reason in reasons
    ]
    return [text for text in (_OWN_TERM, _SUMS_ITSELF, _WHOLE_COTANGENTS) if text in advice]
