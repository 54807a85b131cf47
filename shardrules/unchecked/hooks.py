"""Compare unchecked shard_maps with their check off and on, and switch it on if both agree.

``install(unchecked="check")`` decides once for each site and program. At the call, it traces the
program with the check off and on, forward and with its derivatives; it compiles and runs nothing.
These traces run the body's Python again: its prints are dropped, and its changes are undone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from shardrules.door.internals import Door
from shardrules.door.jaxprs import (
    CUSTOM_CALLS,
    KERNELS,
    has_tangent,
    is_transposed,
    name_of,
    opened,
)
from shardrules.door.patching import Patches
from shardrules.door.protocols import ClosedJaxpr, Eqn
from shardrules.errors import first_line
from shardrules.hooks.frames import BwdFrame, TransposeFrame
from shardrules.hooks.notes import Notes
from shardrules.hooks.state import COLLECT, Hooks, Scope, State
from shardrules.jaxprs.made_of import is_same
from shardrules.jaxprs.walk import Inside, equations, visited
from shardrules.unchecked import retrace
from shardrules.unchecked.python_state import Kept
from shardrules.unchecked.sites import (
    BY_TYPE,
    COMPUTES_ELSE,
    OLDER,
    RULES_ELSE,
    UNSEEN,
    UNSTEADY,
    Site,
    UncheckedCall,
    UncheckedSite,
    function_name,
    kind_of,
    missing_of,
    site_of,
    varies,
    why_left,
)
from shardrules.unchecked.unseen import unseen

_CHECKS = ("check_vma", "check_rep")
# "AbstractRef.update() got an unexpected keyword argument" up to JAX 0.12.0, in the backward pass.
_REFS_MAPPED = "with the check on, JAX can't map refs by vmap's spmd_axis_name"
_INSTEAD = (
    "shardrules: don't switch the check off, since JAX would then take one device's value for "
    "all, even where they differ: {}; name the axes in that spec, or reduce the value over "
    "them before it is returned (jax.lax.pmean, psum). shardrules.explain shows where it varies"
)


class UncheckedHooks(Hooks):
    def __init__(self, door: Door, state: State):
        super().__init__(door, state)
        # Each watcher is called once per argument signature, with a function that retraces the call
        # and returns UncheckedCalls, and one that makes an UncheckedCall from an error message.
        self.watchers: list[
            Callable[[Callable[[], list[UncheckedCall]], Callable[[str], UncheckedCall]], None]
        ] = []
        self.ended = False  # whether new shard_maps are left to JAX
        # Keyed by site and reason, or by everything that a decision depends on: see ``_decide``.
        self.decisions: dict[Any, UncheckedSite] = {}

    def install(self, patches: Patches) -> None:
        original = self.door.make_shard_map
        signature = inspect.signature(original)
        (check,) = [name for name in _CHECKS if name in signature.parameters]

        @functools.wraps(original)
        def shard_map(*args: Any, **kwargs: Any) -> Any:
            off = original(*args, **kwargs)
            if self.ended:
                return off
            bound = signature.bind(*args, **kwargs)
            if bound.arguments.get(check, True) is not False:
                return functools.wraps(off)(lambda *args: self._explained(off, args))
            site = site_of(sys._getframe(1), function_name(args[0]), __name__)
            if site is None:
                return off
            bound.arguments[check] = True
            on = functools.partial(original, *bound.args, **bound.kwargs)
            unchecked = _Unchecked(self, site, off, on, bound.arguments)
            return functools.wraps(off)(lambda *args: unchecked(*args))

        patches.attribute(*self.door.owner("make_shard_map"), shard_map)

    def _explained(self, checked: Any, args: tuple[Any, ...]) -> Any:
        """Call a shard_map whose check is on; add advice to JAX's error about its out_specs."""
        try:
            return checked(*args)
        except ValueError as error:
            outputs = retrace.outputs(error) if self.state.scope.active else ()
            note = _INSTEAD.format("; ".join(map(varies, outputs)))
            if outputs and note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            raise


class _Unchecked:
    """A shard_map whose check the program switched off."""

    def __init__(self, hooks: UncheckedHooks, site: Site, off: Any, on: Any, asked: dict[str, Any]):
        self.hooks = hooks
        self.door = hooks.door
        self.state = hooks.state
        self.site = site
        self.off = off
        self.on = on
        self.asked = asked
        self.body = next(iter(asked.values()))
        self.watched: set[str] = set()

    def __call__(self, *args: Any) -> Any:
        scope = self.state.scope
        if scope.unchecked == "on":
            return self._inside(args)
        if scope.unchecked == "check" and scope.active and self.state.patched:
            return self._decided(args, scope)
        if not self.hooks.watchers or scope.unchecked == "off":
            return self._as_written(args, scope.unchecked)
        result = self._as_written(args)  # its errors are the program's own
        kind = kind_of(args)
        if kind not in self.watched and self.hooks.watchers:
            self.watched.add(kind)
            for watcher in tuple(self.hooks.watchers):
                watcher(
                    lambda: self.look(args, kind, "cheapest"),
                    lambda error: UncheckedCall(self.site, None, "", error=error),
                )
        return result

    def _enter(
        self, scope: Scope, unchecked: str, **changes: Any
    ) -> contextlib.AbstractContextManager[Any]:
        return self.state.enter(dataclasses.replace(scope, unchecked=unchecked, **changes))

    def _as_written(self, args: tuple[Any, ...], unchecked: str = "off") -> Any:
        """Call the shard_map with its check off."""
        # The hooks place no casts here, so keep the count of enclosing derivatives out of JAX's
        # trace key. JAX then traces inner jits only as often as it does without the hooks.
        with self._enter(self.state.scope, unchecked, derivatives_count=0):
            return self.off(*args)

    def _inside(self, args: tuple[Any, ...]) -> Any:
        """Call the shard_map with its check on, since the shard_map around it has its check on."""
        met, blamed = self.state.here.look.met, self.state.here.look.blamed
        if met is not None and self.site not in met:
            met.append(self.site)
        try:
            return self.on()(*args)
        except Exception as error:
            if met is not None and not any(known is error for known, _ in blamed):
                blamed.append((error, self.site))
            raise

    # install(unchecked="check").

    def _decided(self, args: tuple[Any, ...], scope: Scope) -> Any:
        """Call the shard_map with its check on if that gives the same values for no more bytes."""
        why = "in a shard_map" if self.door.manual_axes() else ""
        if self.door.at_top():
            why = "called outside of tracing"
        if not why and self._decide(args, scope).switched:
            try:
                with self._enter(scope, "on"):
                    return self.on()(*args)
            except Exception as error:  # although the first trace passed  # noqa: BLE001
                why = f"another trace was refused: {first_line(error)}"
        result = self._as_written(args)  # if this raises too, the error is the program's own
        if why:
            self._note((self.site, why), self.site.decided(why))
        return result

    def _note(self, key: Any, decision: UncheckedSite) -> UncheckedSite:
        decision = self.hooks.decisions.setdefault(key, decision)
        notes = self.state.scope.notes
        if notes is not None and decision not in notes.unchecked:
            notes.unchecked.append(decision)
        return decision

    def _decide(self, args: tuple[Any, ...], scope: Scope) -> UncheckedSite:
        from shardrules.hooks.cotangents.summed_shares import told_apart

        try:
            if (kept := Kept(self.body, args)).why:
                raise retrace.Unseeable(kept.why)
            off = self._trace_off(args, kept)
            if self.door.spmd_axes() and off.holds_refs(self.door.AbstractRef):
                return self._note((self.site, _REFS_MAPPED), self.site.decided(_REFS_MAPPED))
            # The decision depends on the key alone, and not on derivatives around the call.
            plain = dataclasses.replace(scope, notes=None, claims=None, derivatives_count=0)
            made = told_apart(self.door, off.programs)
            key = self.site, made, *off.told, kept.beside_types, plain, self.state.registry.version
            known = self.hooks.decisions.get(key) or self._tried(args, scope, off, kept, key)
            # Test this last: a call that stays as written must trace its functions itself.
            if known.switched and self._holds_older(args, scope, off, kept):
                return self._note((self.site, OLDER), self.site.decided(OLDER))
        except Exception as error:  # the program's own error comes from the call as written  # noqa: BLE001
            why = f"{UNSEEN}: {first_line(error)}"
            return self._note((self.site, why), self.site.decided(why))
        return self._note(key, known)

    def _tried(
        self, args: tuple[Any, ...], scope: Scope, off: retrace.Off, kept: Kept, key: Any
    ) -> UncheckedSite:
        """Return the decision from traces with the check on; note the decisions on inner sites."""
        kind = kind_of(args)
        call, *inner = self._compare(args, kind, scope.casts, off, kept)
        # If some site waits for another one, report the reason of the site that fails.
        reasons = [reason for reason in map(why_left, (call, *inner)) if reason]
        why = min(reasons, key=lambda reason: reason.startswith("waits for"), default="")
        for inner_call in inner:
            left = why and f"inside of line {self.site.line}, which runs as written"
            self._note((inner_call.site, key), inner_call.site.decided(left))
        before, after = (
            None if sums is None else retrace.sent_bytes(sums) for sums in (call.before, call.after)
        )
        return self.site.decided(why, before, after, kind)

    def _holds_older(
        self, args: tuple[Any, ...], scope: Scope, off: retrace.Off, kept: Kept
    ) -> bool:
        """Return whether JAX would reuse an earlier trace that saw other Python values."""
        # Under a derivative, JAX runs custom rules instead of the functions that this would trace.
        if scope.derivatives_count and self._has_rules(off.called):
            return False
        with unseen(kept):  # unlike ``_trace_off``, share JAX's caches with calls as written
            now = retrace.traced(lambda *args: self._as_written(args), args)
            return not is_same(off.called, now)

    # Tracing with the check off and on.

    def look(self, args: tuple[Any, ...], kind: str, casts: str) -> list[UncheckedCall]:
        """Trace a call and its derivatives with the check off and on; inner calls come after it."""
        if (kept := Kept(self.body, args)).why:
            raise retrace.Unseeable(kept.why)
        return self._compare(args, kind, casts, self._trace_off(args, kept), kept)

    def _looking(self, unchecked: str, **changes: Any) -> contextlib.AbstractContextManager[Any]:
        """Enter the scope of a retrace; hide derivatives, bwds and transposes around the call."""
        stack = contextlib.ExitStack()
        stack.enter_context(
            self._enter(self.state.scope, unchecked, derivatives_count=0, **changes)
        )
        stack.enter_context(BwdFrame())
        stack.enter_context(TransposeFrame())
        return stack

    def _trace_off(self, args: tuple[Any, ...], kept: Kept) -> retrace.Off:
        is_steady = True

        def trace(*by: Any) -> tuple[Any, Any]:
            nonlocal is_steady
            try:
                closed = retrace.traced(lambda *args: self._as_written(args), args, *by)
                # If tracing changes Python state, a second trace must change it the same way.
                if changed := kept.put_back(caches=False):
                    retrace.traced(lambda *args: self._as_written(args), args, *by)
                    if kept.put_back(caches=False) != changed:
                        is_steady = False
                        kept.doubt_caches()
            finally:
                kept.put_back()
            return closed, changed

        # Notes are part of JAX's trace key: new ones keep these traces out of JAX's other caches.
        with unseen(kept), self._looking("off", notes=(notes := Notes())):
            called, changed = trace()
            derivatives, why = retrace.derivatives(trace, args, self._has_rules)
            tangent = None
            if derivatives and self._has_step(called, lambda eqn: False):
                tangent = retrace.Derivative(
                    derivatives[0].chosen, 0, *trace(derivatives[0].chosen)
                )
            off = retrace.Off(called, changed, derivatives, why, is_steady, tangent, notes.computed)
            off = off._replace(alike=self._rules().alike(off.programs))
            kept.put_back()
        return off

    def _has_rules(self, closed: ClosedJaxpr) -> bool:
        """Return whether a program's derivative runs an author's rule or may round."""
        from shardrules.hooks.cotangents.summed_shares import narrows

        return self._has_step(closed, narrows)

    def _is_unknown(self, off: retrace.Off, args: tuple[Any, ...]) -> bool:
        """Return whether a derivative that can't be traced may differ with the check on."""
        from shardrules.hooks.cotangents.summed_shares import rounds

        # For example, the program may differentiate fewer results. For arguments of a traced
        # derivative, JAX's own steps were compared. For other arguments, such a step may round.
        traced = {n for derivative in off.derivatives for n in derivative.chosen}
        also = rounds if {*retrace.floats(args)} - traced else lambda eqn: False
        is_weak = any(getattr(aval, "weak_type", False) for aval in off.called.in_avals)
        return bool(retrace.floats(args)) and (is_weak or self._has_step(off.called, also))

    def _has_step(self, closed: ClosedJaxpr, also: Callable[[Eqn], bool]) -> bool:
        """Return whether a derivative runs an author's rule, or a step for which ``also`` holds."""
        from shardrules.hooks.cotangents.summed_shares import has_rule

        def visit(eqn: Eqn, around: None, inside: Inside[None, None]) -> Iterator[None]:
            if has_rule(self.door, eqn) or also(eqn):
                yield None
            if name_of(eqn) not in (*KERNELS, "while"):  # these have no reverse-mode gradient
                yield from itertools.chain(*inside(None))

        return bool(visited(opened(closed), visit, None))

    def _by_arguments(self, off: retrace.Off) -> Iterator[str]:
        """Yield why derivatives by fewer arguments may differ from the traced ones."""
        from shardrules.hooks.cotangents.summed_shares import why_by_arguments  # it imports jax

        def visit(eqn: Eqn, around: None, inside: Inside[None, str]) -> Iterator[str]:
            if why := why_by_arguments(self.door, eqn):
                yield why
            # JAX differentiates a custom function's rule instead of its body.
            if name_of(eqn) not in (*KERNELS, *CUSTOM_CALLS):
                yield from itertools.chain(*inside(None))

        lower = [d.closed for d in off.derivatives if not d.is_last]
        for program in [off.called, *lower] if off.derivatives else ():
            yield from visited(opened(program), visit, None)

    def _rules(self) -> Any:
        from shardrules.hooks.cotangents.custom_vjp import CustomVjpHooks  # it imports jax
        from shardrules.hooks.cotangents.summed_shares import CustomRules

        # Up to JAX 0.5 the hooks don't wrap custom_vjps: JAX binds the author's bwd.
        hooks: Any = self.state.hooks.get(CustomVjpHooks)
        return CustomRules(self.door, (lambda bwd: bwd) if hooks is None else hooks.rule_of)

    def _compare(
        self, args: tuple[Any, ...], kind: str, casts: str, off: retrace.Off, kept: Kept
    ) -> list[UncheckedCall]:
        """Trace with the check on, forward and each derivative; compare with the check off."""
        # Each trace must change the same Python state, run the same rules and have equal constants.
        from shardrules.hooks.cotangents.summed_shares import computes_as

        called, undifferentiated = off.called, off.undifferentiated
        first = next((d.closed for d in off.derivatives), None)
        before = tuple(retrace.sums(called if undifferentiated else first))
        ran: set[Any] = set()  # the bwds that ran with the check on
        last_on: Any = None
        reasons = retrace.why_undifferentiated(args)
        with unseen(kept):
            on = forward = self._trace_on(args, None, casts)
            is_steady = off.is_steady & (kept.put_back() == off.changed)
            pairs = self._paired(off, forward, casts, kept)
            is_other = pairs is None
            for derivative in off.derivatives if forward.error is None else ():
                then = self._trace_on(args, derivative, casts)
                is_steady &= kept.put_back() == derivative.changed
                reasons += then.notes.reasons_to_leave
                if then.closed is not None:
                    was, now = map(retrace.constants, (derivative.closed, then.closed))
                    is_steady &= not now.has_other(was)
                    reasons += retrace.why_weak(derivative.closed, then.closed)
                if (derivative.order == 1 and not undifferentiated) or then.error is not None:
                    on = then
                if then.error is not None:
                    break
                ran |= then.notes.rules
                # Without active hooks, migrate compares the program's results instead.
                if self.state.scope.active:
                    is_other |= not computes_as(then.notes.computed, off.computed, pairs or {})
                before_on = forward.closed if derivative.order == 1 else last_on
                last_on = then.closed
                rules, order = self._rules(), derivative.order + 1
                if derivative.is_last and rules.new(last_on, before_on, ran):
                    reasons.append(
                        f"its derivatives of order {order} are taken by rules of their own"
                    )
                elif derivative.is_last and order == 2 and rules.holds_uncounted(last_on):
                    reasons.append("its derivative rules can't be looked at in order 2")
            if (tangent := off.tangent) is not None and on.error is None:
                now = self._trace_on(args, tangent, casts).closed
                kept.put_back()
                is_other |= now is None or not retrace.has_same_tangent(tangent.closed, now)
        if undifferentiated and self._is_unknown(off, args):
            reasons.append(f"its derivative rules can't be looked at: {undifferentiated}")
        reasons += self._by_arguments(off)
        reasons += self._rules().outside(called) if self.state.scope.active else []
        other = BY_TYPE if off.is_steady else UNSTEADY
        reasons += [other] * (not is_steady) + [RULES_ELSE] * is_other
        culprit, failed = on.culprit or self.site, on.error
        inside = list(equations(opened(called)))
        gradients = forward.gradients or any(map(is_transposed, inside))

        def refused(site: Site) -> dict[str, Any]:
            if failed is None:
                return {}
            if site != culprit:
                return {"error": f"waits for line {culprit.line}"}
            where = "" if on is forward else "in the derivative: "
            return {"outputs": retrace.outputs(failed), "error": where + retrace.words(failed)}

        call = UncheckedCall(
            self.site,
            None,
            kind,
            missing_of(on.notes) or missing_of(forward.notes),
            undifferentiated=undifferentiated,
            takes_gradients=gradients,
            before=before,
            after=None if on.closed is None else tuple(retrace.sums(on.closed)),
            declared=tuple(dict.fromkeys(on.notes.declared)),
            annotations=tuple(dict.fromkeys(on.notes.annotations)),
            reasons_to_leave=tuple(
                dict.fromkeys([*self._compared(called, forward.closed, gradients, other), *reasons])
            ),
            holds_another=sum(e.primitive.name == "shard_map" for e in inside) > 1,
            summed=retrace.summed_axes(inside),
            **refused(self.site),
        )
        inner = [
            UncheckedCall(
                site,
                self.site,
                "",
                undifferentiated=undifferentiated,
                takes_gradients=gradients,
                **refused(site),
            )
            for site in on.met
        ]
        return [call, *inner]

    def _paired(self, off: retrace.Off, on: _On, casts: str, kept: Kept) -> dict[Any, Any] | None:
        """Map each rule with the check on to its rule with it off; None if a pair differs."""
        if off.tangent is None or on.closed is None:
            return {}
        own = functools.partial(retrace.inside, self.on.func, self.asked)
        with self._looking("off", notes=Notes()):
            was = own(False, lambda: self._rules().computed(off.called))
        kept.put_back()
        with self._looking("on", active=True, policy=COLLECT, notes=Notes(), casts=casts):
            now = own(True, lambda: self._rules().computed(on.closed))
        kept.put_back()
        same = [rule[1:] for rule in was] == [rule[1:] for rule in now]
        return {b: a for (a, *_), (b, *_) in zip(was, now)} if same else None

    def _compared(self, off: Any, on: Any, gradients: bool, other: str) -> Iterator[str]:
        """Yield why values or gradients may differ with the check on; ``other`` for constants."""
        import jax

        for name in ("in_specs", "out_specs"):
            for spec in jax.tree_util.tree_leaves(self.asked.get(name)):
                if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
                    yield f"{name} hold partial sums"
        if any(isinstance(x, jax.core.Tracer) and has_tangent(x) for x in off.consts):
            yield "its body closes over values that are traced: pass them as arguments"
        if on is not None and retrace.computes(off) != retrace.computes(on):
            yield COMPUTES_ELSE
        elif on is not None:
            was, now = map(retrace.constants, (off, on))
            if was.settings != now.settings or was.has_other(now) or now.has_other(was):
                yield other
            elif not gradients and not is_same(off, on):
                yield COMPUTES_ELSE

    def _trace_on(
        self, args: tuple[Any, ...], derivative: retrace.Derivative | None, casts: str
    ) -> _On:
        """Trace with the check on and the hooks acting; record the error if it fails."""
        notes, closed, failed = Notes(), None, None
        met: list[Site] = []
        gradients: list[None] = []
        blamed: list[tuple[Exception, Site]] = []
        chosen, order = ((), 0) if derivative is None else derivative[:2]
        pulling = lambda: dataclasses.replace(self.state.here.look, pulls=True)  # noqa: E731
        with (
            self._looking("on", active=True, policy=COLLECT, notes=notes, casts=casts),
            dataclasses.replace(self.state.here.look, met=met, blamed=blamed, order=order),
            self.state.recording_gradients(gradients),
        ):
            try:
                closed = retrace.traced(self.on(), args, chosen, order, pulling)
            except Exception as error:  # the reason why the check stays off  # noqa: BLE001
                failed = error
        culprit = next((site for error, site in blamed if error is failed), None)
        return _On(closed, notes, bool(gradients), failed, culprit, met)


class _On(NamedTuple):
    closed: Any  # None if an error ended the trace
    notes: Notes
    gradients: bool  # whether the body takes gradients
    error: Exception | None
    culprit: Site | None  # the inner shard_map that raised the error
    met: list[Site]  # the inner shard_maps
