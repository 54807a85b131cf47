"""shard_maps whose check is off: what each would be with the check on, and used so where equal.

``install(unchecked="check")`` decides once for each site and program. The program is traced with
the check off and on, forward and with its derivative, where the call stands; nothing of these
traces is compiled or run. The body's Python runs again for it; what it prints then is dropped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from shardrules.door import places
from shardrules.door.internals import Door
from shardrules.door.jaxprs import equations, is_inexact, is_transposed, opened
from shardrules.door.patching import Patches
from shardrules.hooks import retrace
from shardrules.hooks.notes import Notes
from shardrules.hooks.state import COLLECT, Hooks, Scope, State

__all__ = ["Call", "Missing", "Site", "UncheckedHooks", "UncheckedSite", "costliest", "why_left"]

_CHECKS = ("check_vma", "check_rep")


@dataclasses.dataclass(frozen=True, order=True)
class Site:
    """Where a program asks for a shard_map.

    Attributes:
      file: the path of the source file.
      line, column, end_line, end_column: of the call's expression, 1-based lines and 0-based
        columns in UTF-8 bytes, as in ``ast``; columns are -1 where Python does not tell.
      function: the name of the function that is mapped.
    """

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    function: str

    def decided(
        self, why: str, before: int | None = None, after: int | None = None, arguments: str = ""
    ) -> UncheckedSite:
        """Return what became of it: left for a reason, or switched where that is empty."""
        return UncheckedSite(
            self.file, self.line, self.function, not why, why, before, after, arguments
        )


class Missing(NamedTuple):
    """A kernel without a rule, and the lines to write."""

    kernel: str
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a shard_map, traced with the check off and on.

    Attributes:
      site: where the shard_map was asked for.
      inside: the site of the shard_map around it, if that one's check is off, too.
      kind: shapes and dtypes of its arguments.
      missing: kernels without a rule.
      outputs: those whose spec says less than their types.
      error: what the trace with the check on ended with, empty if it passed.
      undifferentiated: why the derivative was not traced, empty if it was.
      takes_gradients: the body differentiates in reverse: with the check on, to other values.
      before, after: all-reduces with the check off and on, in the forward and backward pass.
      declared: where the rules stand that its kernels found by their names.
      annotations: those of outputs that a kernel contradicts, each as a sentence.
      doubts: why values or gradients may be others with the check on.
    """

    site: Site
    inside: Site | None
    kind: str
    missing: tuple[Missing, ...] = ()
    outputs: tuple[retrace.Output, ...] = ()
    error: str = ""
    undifferentiated: str = ""
    takes_gradients: bool = False
    before: tuple[retrace.Sum, ...] | None = None
    after: tuple[retrace.Sum, ...] | None = None
    declared: tuple[str, ...] = ()
    annotations: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class UncheckedSite:
    """What became of a shard_map whose check is off, for one kind of arguments.

    Attributes:
      file, line: where the shard_map is asked for.
      function: the name of the function that is mapped.
      switched: whether it runs with its check on.
      reason: why it runs as written; empty where it is switched.
      before_bytes: what one device sends for the all-reduces of a call and of its derivative with
        the check off, as traced; None where that is not known.
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
    """Return the sites, those first that move most with the check off."""
    return tuple(sorted(sites, key=lambda one: -(one.before_bytes or 0)))


def why_left(call: Call) -> str:
    """Say why a call runs as written; empty if it can have its check on."""
    if call.missing:
        return f"no rule for {', '.join(dict.fromkeys(one.kernel for one in call.missing))}"
    if call.outputs:
        return "; ".join(
            f"out_specs{one.path} is {one.spec}, and it varies over {one.axes}"
            for one in call.outputs
        )
    if call.error:
        return call.error.splitlines()[0]
    if call.takes_gradients:
        return "its body takes gradients, which would change"
    if call.doubts:
        return call.doubts[0]
    if call.before is not None and call.after is not None:
        return _more(call.before, call.after)
    return ""


def _more(before: tuple[retrace.Sum, ...], after: tuple[retrace.Sum, ...]) -> str:
    """Say what all-reduces move more with the check on; those in while loops count apart."""
    for loops in (False, True):
        off, on = ([one for one in some if (one.runs is None) == loops] for some in (before, after))
        for count in (retrace.sent_bytes, retrace.summed_bytes):
            if count(on) > count(off):
                where = " in a while loop" if loops else ""
                return f"its all-reduces would move {count(on)} B{where} where {count(off)} B move"
    return ""


class UncheckedHooks(Hooks):
    """The hook at the function that makes a shard_map.

    Attributes:
      watchers: each is called once for each kind of arguments, with what looks at the call, and
        with what makes a Call of an error.
      decisions: the sites that were decided, by what they were decided for.
    """

    def __init__(self, door: Door, state: State):
        super().__init__(door, state)
        self.watchers: list[Callable[[Callable[[], list[Call]], Callable[[str], Call]], None]] = []
        self.decisions: dict[Any, UncheckedSite] = {}

    def install(self, patches: Patches) -> None:
        """Replace the function that makes a shard_map."""
        original = self.door.make_shard_map
        signature = inspect.signature(original)
        (check,) = [name for name in _CHECKS if name in signature.parameters]

        @functools.wraps(original)
        def shard_map(*args: Any, **kwargs: Any) -> Any:
            off = original(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            if bound.arguments.get(check, True) is not False:
                return off
            site = _site(sys._getframe(1), _name(args[0]))
            if site is None:
                return off
            bound.arguments[check] = True
            on = functools.partial(original, *bound.args, **bound.kwargs)
            return _Unchecked(self, site, off, on, bound.arguments).called()

        patches.attribute(*self.door.owner("make_shard_map"), shard_map)

    def forget(self) -> None:
        """Forget what was decided; who listed it keeps it."""
        self.decisions = {}


class _Unchecked:
    """A shard_map whose check is off."""

    def __init__(self, hooks: UncheckedHooks, site: Site, off: Any, on: Any, asked: dict[str, Any]):
        self.hooks = hooks
        self.door = hooks.door
        self.state = hooks.state
        self.site = site
        self.off = off
        self.on = on
        self.asked = asked
        self.watched: set[str] = set()

    def called(self) -> Callable:
        """Return the function that the program gets."""

        @functools.wraps(self.off)
        def mapped(*args: Any) -> Any:
            scope = self.state.scope
            if scope.unchecked == "on":
                return self._inside(args)
            if scope.unchecked == "check" and scope.active and self.state.patched:
                return self._decided(args, scope)
            if not self.hooks.watchers or scope.unchecked == "off":
                return self.off(*args)
            with self.state.enter(dataclasses.replace(scope, unchecked="off")):
                result = self.off(*args)  # its errors are the program's own
            kind = _kind(args)
            if kind not in self.watched and self.hooks.watchers:
                self.watched.add(kind)
                for watcher in tuple(self.hooks.watchers):
                    watcher(
                        lambda: self.look(args, kind, "cheapest"),
                        lambda error: Call(self.site, None, "", error=error),
                    )
            return result

        return mapped

    def _inside(self, args: tuple) -> Any:
        """Call it with its check on inside of one that is looked at, or switched."""
        met = self.state.here.met
        if met is not None and self.site not in met:
            met.append(self.site)
        try:
            return self.on()(*args)
        except Exception as error:
            if met is not None and not any(blamed is error for blamed, _ in self._blamed):
                self._blamed.append((error, self.site))
            raise

    @property
    def _blamed(self) -> list[tuple[BaseException, Site]]:
        return self.state.here.blamed

    # install(unchecked="check").

    def _decided(self, args: tuple, scope: Scope) -> Any:
        """Call it with its check on if that is equal and moves no more, else as written."""
        alone = "in a shard_map" if self.door.manual_axes() else ""
        if self.door.at_top():
            alone = "called outside of tracing"
        if alone:
            self._note((self.site, alone), self.site.decided(alone))
        elif self._decide(args, scope).switched:
            try:
                with self.state.enter(dataclasses.replace(scope, unchecked="on")):
                    return self.on()(*args)
            except Exception as error:  # as it was traced before, it passed
                why = f"another trace was refused: {retrace.first_line(error)}"
                self._note((self.site, why), self.site.decided(why))
        with self.state.enter(dataclasses.replace(scope, unchecked="off")):
            return self.off(*args)

    def _note(self, key: Any, decision: UncheckedSite) -> UncheckedSite:
        decision = self.hooks.decisions.setdefault(key, decision)
        notes = self.state.scope.notes
        if notes is not None and decision not in notes.unchecked:
            notes.unchecked.append(decision)
        return decision

    def _decide(self, args: tuple, scope: Scope) -> UncheckedSite:
        try:
            with retrace.quiet(), retrace.state_kept(), self._off(scope):
                program = _fingerprint(self.door, retrace.traced(self.off, args, False))
            # All that the decision rests on: a reverse pass around it changes none of that.
            plain = dataclasses.replace(scope, notes=None, claims=None, derivatives_count=0)
            key = self.site, program, plain, self.state.registry.version
            if key in self.hooks.decisions:
                return self._note(key, self.hooks.decisions[key])
            kind = _kind(args)
            call, *inner = self.look(args, kind, scope.casts)
        except Exception as error:  # the program's own error comes from the call as written
            why = f"it can't be looked at: {retrace.first_line(error)}"
            return self._note((self.site, why), self.site.decided(why))
        # Of those that wait for another one, that one's reason.
        reasons = [reason for reason in map(why_left, (call, *inner)) if reason]
        why = min(reasons, key=lambda one: one.startswith("waits for"), default="")
        for one in inner:
            left = why and f"inside of line {self.site.line}, which is left"
            self._note((one.site, key), one.site.decided(left))
        before, after = (
            None if sums is None else retrace.sent_bytes(sums) for sums in (call.before, call.after)
        )
        return self._note(key, self.site.decided(why, before, after, kind))

    # The look.

    def _off(self, scope: Scope) -> contextlib.AbstractContextManager:
        return self.state.enter(dataclasses.replace(scope, unchecked="off", notes=None))

    def look(self, args: tuple, kind: str, casts: str) -> list[Call]:
        """Trace a call with the check off and on, with its derivative; those inside come after."""
        undifferentiated = ""
        scope = self.state.scope
        with retrace.quiet(), retrace.state_kept():
            with self._off(scope):
                called = retrace.traced(self.off, args, False)
                try:
                    before = tuple(retrace.sums(retrace.traced(self.off, args, True)))
                except Exception as error:  # an integer loop, an effect: what JAX can't transpose
                    before = tuple(retrace.sums(called))
                    undifferentiated = retrace.first_line(error)
            forward = self._trace_on(args, False, casts)
            on, where = forward, ""
            if forward.error is None and not undifferentiated:
                on = self._trace_on(args, True, casts)
                where = "in the derivative: "
        failed, culprit = on.error, on.culprit or self.site
        errors = dict.fromkeys((self.site, *on.met), f"waits for line {culprit.line}")
        errors[culprit] = where + retrace.words(failed) if failed else ""
        outputs = {culprit: retrace.outputs(failed) if failed else ()}
        gradients = forward.gradients or any(map(is_transposed, equations(opened(called))))
        call = Call(
            self.site,
            None,
            kind,
            on.missing or forward.missing,
            outputs.get(self.site, ()),
            errors[self.site] if failed else "",
            undifferentiated,
            gradients,
            before,
            on.sums,
            on.declared,
            on.annotations,
            (*self._doubts(called, forward.closed), *on.doubts),
        )
        inner = [
            Call(
                site,
                self.site,
                "",
                outputs=outputs.get(site, ()),
                error=errors[site] if failed else "",
                undifferentiated=undifferentiated,
                takes_gradients=gradients,
            )
            for site in on.met
        ]
        return [call, *inner]

    def _doubts(self, off: Any, on: Any) -> Iterator[str]:
        """Say why this program may be another one with the check on."""
        import jax

        for name in ("in_specs", "out_specs"):
            for spec in jax.tree_util.tree_leaves(self.asked.get(name)):
                if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
                    yield f"{name} hold partial sums"
        if any(isinstance(one, jax.core.Tracer) and is_inexact(one) for one in off.consts):
            yield "its body closes over values that are traced: pass them as arguments"
        if sum(eqn.primitive.name == "shard_map" for eqn in equations(opened(off))) > 1:
            # JAX to 0.12 can't lower the derivative of some of these with the check on.
            yield "its body holds another shard_map"
        if on is not None and retrace.computed(off) != retrace.computed(on):
            yield "its body computes something else with the check on"

    def _trace_on(self, args: tuple, derivative: bool, casts: str) -> _On:
        """Trace with the check on and the hooks acting, as far as it goes."""
        notes, closed, failed = Notes(), None, None
        scope = dataclasses.replace(
            self.state.scope, active=True, policy=COLLECT, notes=notes, casts=casts, unchecked="on"
        )
        met: list[Site] = []
        heard: list[None] = []
        with (
            self.state.enter(scope),
            self.state.locally(met=met, blamed=[]),
            self.state.recording_gradients(heard),
        ):
            try:
                closed = retrace.traced(self.on(), args, derivative)
            except Exception as error:  # what the table is about
                failed = error
            culprit = next((site for error, site in self._blamed if error is failed), None)
        return _On(
            closed,
            None if closed is None else tuple(retrace.sums(closed)),
            tuple(dict.fromkeys(Missing(call.name, lines) for call, _, lines in notes.unknown)),
            tuple(dict.fromkeys(notes.declared)),
            tuple(dict.fromkeys(notes.annotations)),
            tuple(dict.fromkeys(notes.doubts)),
            bool(heard),
            failed,
            culprit,
            tuple(met),
        )


class _On(NamedTuple):
    """A trace with the check on."""

    closed: Any
    sums: tuple[retrace.Sum, ...] | None
    missing: tuple[Missing, ...]
    declared: tuple[str, ...]
    annotations: tuple[str, ...]
    doubts: tuple[str, ...]
    gradients: bool
    error: Exception | None
    culprit: Site | None
    met: tuple[Site, ...]


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _site(frame: Any, function: str) -> Site | None:
    """Find who asks for a shard_map; None where JAX itself does, as for pmap."""
    while frame is not None and places.is_wrapper(frame.f_globals.get("__name__")):
        frame = frame.f_back
    if frame is None or places.owns(frame.f_code.co_filename):
        return None
    positions = list(frame.f_code.co_positions())
    line, end_line, column, end_column = positions[frame.f_lasti // 2]
    line = line or frame.f_lineno
    return Site(
        frame.f_code.co_filename,
        line,
        -1 if column is None else column,
        end_line or line,
        -1 if end_column is None else end_column,
        function,
    )


def _kind(args: tuple) -> str:
    """Write what a trace depends on: shapes, dtypes and what is no array."""
    import jax

    leaves, tree = jax.tree_util.tree_flatten(args)
    kinds = [
        f"{x.dtype}{tuple(x.shape)}" if hasattr(x, "dtype") and hasattr(x, "shape") else repr(x)
        for x in leaves
    ]
    return f"{tree} {' '.join(kinds)}"


def _fingerprint(door: Door, closed: Any) -> str:
    """Return a digest of a program, with the functions that its custom_vjps will call."""
    parts = [str(closed)]
    for eqn in equations(opened(closed)):
        for value in eqn.params.values() if "custom_" in eqn.primitive.name else ():
            parts += [door.function_place(value), str(getattr(value, "transforms", ""))]
    return hashlib.sha256(re.sub(r"0x[0-9a-f]+", "", "\n".join(parts)).encode()).hexdigest()
