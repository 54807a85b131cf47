"""Opaque primitives beside pallas_call: FFI calls, callbacks, raw Mosaic, and users' own.

JAX types what they return as invariant, whatever goes in (JAX 0.8.3 to 0.12 for ``ffi_call``;
callbacks and primitives that know nothing of axis types on every version). The seams are those of
pallas_call: ``bind`` casts, the abstract eval gives the types.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from shardrules.door.internals import Door
from shardrules.door.patching import Patches
from shardrules.errors import CotangentError
from shardrules.hooks.state import COLLECT, Hooks, State
from shardrules.hooks.types.lost_axes import LostAxesHooks
from shardrules.hooks.types.lowering import Lowering
from shardrules.hooks.types.opaque import (
    Call,
    OpaqueCall,
    check_annotations,
    find_rule,
    resolve,
    typed,
    types_of,
)
from shardrules.hooks.types.scoped_primitives import Carriers, is_lent
from shardrules.registry.axistypes import AxisType
from shardrules.registry.binding import binding_of

__all__ = ["PrimitiveHooks"]


class _Noted(tuple):
    """Result avals, with what the user wrote on them."""

    notes: tuple[AxisType | None, ...] = ()


class _Settled(tuple):
    """Result avals of a call that was bound under the hooks; carries what is known of it.

    To JAX's tree utilities it is a tuple: where the hooks are gone, JAX maps over the avals that a
    callback hands on.
    """

    known: OpaqueCall


def _plain(_, avals: Any) -> Any:
    return tuple(avals)


@functools.cache
def _register() -> None:
    """Tell JAX of the class, once, and not before the program itself has imported JAX."""
    import jax

    jax.tree_util.register_pytree_node(_Settled, lambda avals: (tuple(avals), None), _plain)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """How to read one primitive's parameters.

    Args:
      primitive: the primitive.
      names: from its params to the kernel's function, or None, and the names to ask for.
      results: the parameter that holds its result avals, or empty.
      own: whether it is a user's: then its own answer counts where it is wide enough.
    """

    primitive: Any
    names: Callable[[dict[str, Any]], tuple[Any, tuple[str, ...]]]
    results: str = ""
    own: bool = False


def _called(key: str) -> Callable:
    """Read the name in ``params[key]``."""
    return lambda params: (None, (params[key],) if params.get(key) else ())


def _callback(params: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
    """Read a callback's function; JAX wraps it in an object that holds ``callback_func``."""
    function = params["callback"]
    function = getattr(function, "callback_func", function)
    name = getattr(function, "__name__", "")
    return function, (name,) if name else ()


def _exported(params: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
    """Read the name of an exported program; it may hold any kernel or collective."""
    name = getattr(params["exported"], "fun_name", "")
    return None, (name,) if name else ()


def _users(params: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
    """Read whatever names a kernel in a primitive that is not JAX's (jax-triton: ``fn``)."""
    function = params.get("fn")
    names = [params.get(key) for key in ("kernel_name", "target_name", "name")]
    names.append(getattr(getattr(function, "fn", function), "__name__", None))
    return function, tuple(name for name in names if isinstance(name, str) and name)


class PrimitiveHooks(Hooks):
    """The hooks of opaque primitives."""

    def __init__(self, door: Door, state: State):
        super().__init__(door, state)
        self.lowering = Lowering(door, state)
        self.forgetful = state.of(LostAxesHooks)
        self.carriers = Carriers(door, state)
        self._local = threading.local()
        self._kinds: dict[Any, _Kind] = {}

    def known_of(self, primitive: Any, params: dict[str, Any]) -> OpaqueCall | None:
        """Return what is known of an equation's opaque call; None for what is no such call."""
        carried = self.carriers.of(primitive)
        if carried is not None:
            with self.carriers.enter(carried[1]):
                return self.known_of(carried[0], params)
        kind = self._kinds.get(primitive)
        return None if kind is None else self._known(kind, params)

    def install(self, patches: Patches) -> None:
        """Adopt JAX's opaque primitives, users' primitives, and those that are made later."""
        _register()
        door = self.door
        for key, names, results in (
            ("ffi_call_p", _called("target_name"), "result_avals"),
            ("pure_callback_p", _callback, "result_avals"),
            ("io_callback_p", _callback, "result_avals"),
            ("buffer_callback_p", _callback, "result_avals"),
            ("call_exported_p", _exported, ""),
            ("tpu_custom_call_p", _called("kernel_name"), "out_avals"),
        ):
            primitive = getattr(door, key)
            if primitive is not None:
                self._adopt(patches, _Kind(primitive, names, results))
        if door.typed and door.result_avals is not None:
            patches.attribute(*door.owner("result_avals"), self._result_avals)
        for primitive in self._users_primitives():
            self._adopt(patches, _Kind(primitive, _users, own=True))
        original = door.Primitive.__init__

        hooks = self

        def made(self, *args, **kwargs):
            original(self, *args, **kwargs)
            module = sys._getframe(1).f_globals.get("__name__", "")
            if not _is_jax(module):
                with hooks.state.lock:
                    hooks._adopt(patches, _Kind(self, _users, own=True))

        patches.attribute(door.Primitive, "__init__", made)

        def register_lowering(*args, **kwargs):
            answer = door.register_lowering(*args, **kwargs)
            primitive = args[0] if args else kwargs["prim"]
            with self.state.lock:
                if _is_jax(sys._getframe(1).f_globals.get("__name__", "")):
                    self.forgetful.adopt(patches, primitive)  # from a module that came late
                elif primitive in self._kinds:
                    self._tag(patches, self._kinds[primitive])
                else:  # made before the hooks were installed
                    self._adopt(patches, _Kind(primitive, _users, own=True))
            return answer

        # Where JAX has it, and where users take it from.
        for owner in (
            door.owner("register_lowering")[0],
            importlib.import_module("jax.interpreters.mlir"),
        ):
            patches.attribute(owner, "register_lowering", register_lowering)

    def _tag(self, patches: Patches, kind: _Kind) -> None:
        for table in (self.door.lowerings, *(self.door.platform_lowerings or {}).values()):
            if kind.primitive in table:
                self.lowering.wrap(
                    patches, table, kind.primitive, lambda params: self._known(kind, params)
                )

    def _users_primitives(self) -> Iterator[Any]:
        """Yield each primitive that can be lowered and is not JAX's own."""
        door = self.door
        own = {
            id(value)
            for name, module in list(sys.modules.items())
            if _is_jax(name)
            for value in list(vars(module).values())
            if isinstance(value, door.Primitive)
        }
        tables = [door.lowerings, *(door.platform_lowerings or {}).values()]
        for primitive in dict.fromkeys(p for table in tables for p in table):
            if id(primitive) not in own and not _is_jax(_module(primitive)):
                yield primitive

    def _adopt(self, patches: Patches, kind: _Kind) -> None:
        primitive = kind.primitive
        self._kinds[primitive] = kind
        self._tag(patches, kind)
        bind = primitive.bind

        def bound(*args, **params):
            self._complete(patches, kind)  # often defined after the primitive is made
            return self._bind(kind, bind, args, params)

        # The types also where somebody took hold of ``primitive.bind`` before.
        self._complete(patches, kind)
        patches.attribute(primitive, "bind", bound)

    def _complete(self, patches: Patches, kind: _Kind) -> None:
        """Replace a primitive's abstract eval and transpose, if it has them and it's not done."""
        from jax.interpreters import ad

        evaluate = vars(kind.primitive).get("abstract_eval")
        if evaluate is not None and not hasattr(evaluate, "shardrules"):
            patches.attribute(kind.primitive, "abstract_eval", self._evaluator(kind, evaluate))
        rule = ad.primitive_transposes.get(kind.primitive) if kind.own and self.door.typed else None
        if rule is not None and getattr(rule, "func", None) != self._transpose:
            checked = functools.partial(self._transpose, rule, kind.primitive.name)
            patches.entry(ad.primitive_transposes, kind.primitive, checked)

    def _transpose(self, rule, name: str, cotangents, *args, **params):
        """Transpose a user's primitive; refuse shares for an operand that is invariant.

        JAX to 0.7.2 takes them for the whole, and from 0.8.3 it names neither primitive nor axes.
        """
        found = rule(cotangents, *args, **params)
        if self.door.checking() and isinstance(found, (list, tuple)):
            for i, (ct, x) in enumerate(zip(found, args)):
                if not (isinstance(x, self.door.UndefinedPrimal) and hasattr(ct, "dtype")):
                    continue
                have = self.door.axis_type(self.door.typeof(ct))
                want = self.door.cotangent_type(x.aval)
                axes = have.varying - want.axes
                if axes:
                    over = ", ".join(map(repr, sorted(axes)))
                    raise CotangentError(
                        f"the transpose rule of {name!r} returns a cotangent for operand {i} that "
                        f"is {have}, for a primal that asks for {want}. If it is this device's "
                        f"share, return jax.lax.psum(ct, ({over},)) from it, or cast the operand "
                        f"before: shardrules.vary(x, {over}), as a rule for {name!r} does "
                        f"(shardrules.register({name!r}, shardrules.no_communication), if it "
                        "doesn't communicate).",
                        axes=axes,
                        have=have,
                        want=want,
                    )
        return found

    # What is known of a call.

    def known(self, primitive: Any, params: dict[str, Any]) -> OpaqueCall:
        """Return what is known of a call of any opaque primitive but pallas_call."""
        return self._known(self._kinds.get(primitive) or _Kind(primitive, _users, own=True), params)

    def carrying(self, known: OpaqueCall, params: dict[str, Any]) -> dict[str, Any]:
        """Return params that carry what is known to wherever the call is looked at next."""
        kind = self._kinds.get(known.call.target)
        if kind is None or kind.results not in params:
            return params
        settled = _Settled(params[kind.results])
        settled.known = known
        return {**params, kind.results: settled}

    def _result_avals(self, results):
        """Take annotated results; JAX 0.8.3 to 0.12 fail on an assertion."""
        if not self.state.active:
            return self.door.result_avals(results)
        notes, plain = [], []
        for result in results:
            notes.append(self.door.annotation(result))
            plain.append(result if notes[-1] is None else self.door.unannotated(result))
        avals = self.door.result_avals(plain)
        if not any(note is not None for note in notes):
            return avals
        noted = _Noted(avals)
        noted.notes = tuple(notes)
        return noted

    def _known(self, kind: _Kind, params: dict[str, Any]) -> OpaqueCall:
        results = params.get(kind.results)
        if isinstance(results, _Settled):
            return results.known
        function, names = kind.names(params)
        names = (*names, kind.primitive.name)
        outer = getattr(self._local, "outer", None)
        if outer is not None and outer[0] is kind.primitive and outer[1].call.name == names[0]:
            return dataclasses.replace(outer[1], annotations=())
        scope = self.state.scope
        code = getattr(function, "__code__", None)
        call = Call(
            kind.primitive.name,
            names[0],
            f"{code.co_filename}:{code.co_firstlineno}" if code else "",
            getattr(function, "__module__", None) or "",
            binding_of(function),
            kind.primitive,
            names[1:],
        )
        return OpaqueCall(
            call, getattr(results, "notes", ()), find_rule(call, scope, self.state), scope
        )

    # Rewrite and check.

    def _bind(self, kind: _Kind, bind, args, params):
        known = self._known(kind, params)
        if not known.active(self.state):
            return bind(*args, **params)
        results = params.get(kind.results)
        if self.door.checking() and (results is None or len(results)):
            avals = [self.door.typeof(x) for x in args]
            may_answer = known.found is None and self._may_answer(kind, known)
            if may_answer and known.governing(self.state).policy == COLLECT:
                # A trace to look at it only goes on as if the rule were there, casts and all.
                with self.door.unchecked():
                    own = vars(kind.primitive)["abstract_eval"](*avals, **params)[0]
                several = kind.primitive.multiple_results
                may_answer = self._is_wide(avals, own if several else (own,))
            if not may_answer:
                count = 1 if results is None else len(results)
                if results is None and kind.primitive.multiple_results:
                    count = len(self._own_answer(kind, avals, params))
                resolution = self._resolve(known, avals, count)
                if not isinstance(results, _Settled):
                    check_annotations(known, resolution.outputs)
                args = [
                    self.door.cast(x, want) if self.door.can_cast(aval) else x
                    for x, aval, want in zip(args, avals, resolution.inputs)
                ]
                if results is not None:
                    settled = _Settled(typed(self.door, known, results, resolution.outputs))
                    settled.known = known
                    params[kind.results] = settled
        elif isinstance(results, _Noted):
            params[kind.results] = tuple(results)
        elif not self.door.typed and known.found is not None:
            # To JAX 0.5.3 the check is a table of rules (hooks/sets), read when the scope that
            # the call was bound in has closed.
            params = self.carrying(known, params)
        with self._transforming(kind, known):
            if kind.own and known.scope is not None and is_lent(known):
                return self.carriers.bind(kind.primitive, known.scope, args, params)
            return bind(*args, **params)

    def _evaluator(self, kind: _Kind, evaluate):
        def abstract_eval(*avals, **params):
            answer = evaluate(*avals, **params)
            if not (isinstance(answer, tuple) and len(answer) == 2):
                return answer  # JAX's to refuse
            outputs, effects = answer
            if isinstance(outputs, (_Noted, _Settled)):
                # Not our own kinds of tuple, which callbacks hand on: JAX maps over the answer.
                outputs = tuple(outputs)
            several = kind.primitive.multiple_results
            if not self.door.checking() or isinstance(outputs, (tuple, list)) != several:
                return outputs, effects
            known = self._known(kind, params)
            listed = tuple(outputs) if several else (outputs,)
            if listed and known.active(self.state):
                wide = self._is_wide(avals, listed)
                if not (wide and known.found is None and self._may_answer(kind, known)):
                    resolution = self._resolve(known, avals, len(listed))
                    listed = typed(self.door, known, listed, resolution.outputs)
            return (listed if several else listed[0]), effects

        setattr(abstract_eval, "shardrules", True)
        return abstract_eval

    def _own_answer(self, kind: _Kind, avals, params):
        evaluate = vars(kind.primitive)["abstract_eval"]
        plain = [self.door.with_axis_type(a, AxisType()) for a in avals]
        with self.door.unchecked():
            return evaluate(*plain, **params)[0]

    def _is_wide(self, avals, outputs) -> bool:
        """Whether an answer's types vary as a kernel's that doesn't communicate would."""
        types = types_of(self.door, outputs)
        union = frozenset().union(*(t.varying for t in types_of(self.door, avals)))
        return all(union <= t.varying for t in types) and any(t.axes for t in types)

    def _may_answer(self, kind: _Kind, known: OpaqueCall) -> bool:
        """Whether a call without a rule may keep its own abstract eval's types, if wide enough.

        A user's primitive may know about axis types. Its inputs are then its own to cast.
        """
        return kind.own and known.governing(self.state).policy in ("error", COLLECT)

    def _resolve(self, known: OpaqueCall, avals, output_count: int):
        return resolve(
            self.door,
            self.state,
            known.governing(self.state),
            known.call,
            known.found,
            types_of(self.door, avals),
            output_count,
        )

    @contextlib.contextmanager
    def _transforming(self, kind: _Kind, known: OpaqueCall):
        before = getattr(self._local, "outer", None)
        self._local.outer = kind.primitive, known
        try:
            yield
        finally:
            self._local.outer = before


def _is_jax(module: str) -> bool:
    return module.partition(".")[0] in ("jax", "jaxlib", "shardrules")


def _module(primitive: Any) -> str:
    """Return the module of the function that was given as a primitive's abstract eval."""
    evaluate = vars(primitive).get("abstract_eval")
    for cell in getattr(evaluate, "__closure__", None) or ():
        inner = cell.cell_contents
        if callable(inner) and not _is_jax(getattr(inner, "__module__", None) or ""):
            return inner.__module__ or ""
    return getattr(evaluate, "__module__", None) or ""
