"""Find the rule that an opaque call obeys, and the types that follow, for every primitive."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from shardrules.door.internals import Door
from shardrules.door.jaxprs import size_of
from shardrules.door.protocols import Aval
from shardrules.errors import RuleError, UnknownKernelError
from shardrules.hooks.state import COLLECT, Scope, State
from shardrules.registry import suggestions
from shardrules.registry.axistypes import AxisType, Effect, Resolution, RuleContext, show_axes
from shardrules.registry.binding import Binding
from shardrules.registry.builtin import no_communication
from shardrules.registry.rule import Rule, Types
from shardrules.registry.table import Registration

# Primitives that run a Python function, whose name may also exist in other modules.
_OF_FUNCTIONS = ("pallas_call", "mpmd_map", "core_map")


class Call(NamedTuple):
    """The identity of one opaque call: names for messages and for the registry."""

    primitive: str  # the primitive's name, ``pallas_call``
    name: str  # the kernel name
    place: str = ""  # where the kernel is defined, ``file:line``, or empty
    module: str = ""  # the module of its function, or empty
    binding: Binding | None = None  # the rule bound to its function object, or None
    target: Any = None  # the primitive, if a rule may be registered for the object
    aliases: tuple[str, ...] = ()  # further names to look up, the primitive's last

    def __str__(self) -> str:
        kernel = "" if self.name == self.primitive else f" kernel {self.name!r}"
        return f"{self.primitive}{kernel}" + (f" (defined at {self.place})" if self.place else "")


@dataclasses.dataclass(eq=False)
class Contradiction:
    """An output whose annotation varies less than its kernel's own jaxpr proves."""

    call: Call  # the kernel's call
    at: str  # the source line of the call, or empty
    output: int  # which of its outputs
    annotation: AxisType  # the axis type that the user wrote
    proven: AxisType  # the axis type that it has
    # the axes that the annotation lacks and that no cast of the output has added since
    lost: frozenset[str]
    # weak references to the values that are the output, or casts of it
    values: list[weakref.ref[Any]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class OpaqueCall:
    """An opaque call and the hooks' facts about it; transformations keep this object."""

    call: Call  # the call's name, place and binding
    # for each output, the axis type that the user wrote, or None
    annotations: tuple[AxisType | None, ...] = ()
    registration: Registration | None = None  # the rule that it obeys, set at its first bind
    scope: Scope | None = None  # the scope in which it was first bound
    # the effects, kept for lowering if avals carry no types
    effects: tuple[Effect, ...] | None = None
    audit: Any = None  # the audit of its kernel's jaxpr, once it has run
    # the number of operands that the audit takes; None for all that are lowered
    operand_count: int | None = None
    contradictions: tuple[Contradiction, ...] = ()  # the annotations that its kernel contradicts
    layout: Any = None  # of a kernel on a mesh: the outputs that its rule types, at its last bind

    def active(self, state: State) -> bool:
        """Return whether the hooks act on the call now, or acted on it when it was bound."""
        return state.active or (self.scope is not None and self.scope.active)

    def settle(self, state: State) -> None:
        """Set the scope and the registration unless they are already set."""
        if self.scope is None:
            self.scope = state.scope
        if self.registration is None:
            self.registration = find_rule(self.call, self.scope, state)

    def governing(self, state: State) -> Scope:
        """Return the scope whose policy and rules the call obeys."""
        return self.scope if self.scope is not None and self.scope.active else state.scope


class Results(tuple[Any, ...]):
    """The parameter that holds a call's result avals, with facts about the call."""

    annotations: tuple[AxisType | None, ...] = ()  # the user's
    opaque: Any = None  # an OpaqueCall, once the call is bound
    resolution: Any = None  # the Resolution of the bind that wrote these types


# Registered as a pytree, since JAX may map over result avals after the hooks are uninstalled.
_tuple: Any = tuple
jax.tree_util.register_pytree_node(
    Results, lambda avals: (_tuple(avals), None), lambda _, avals: _tuple(avals)
)


def typed(
    door: Door, opaque: OpaqueCall, avals: Sequence[Aval], types: tuple[AxisType, ...]
) -> tuple[Any, ...]:
    """Return avals with these axis types; a wider annotation makes its output's type wider."""
    if any(opaque.annotations):
        types = tuple(
            answer if note is None else answer.vary(*(note.varying - answer.axes))
            for answer, note in zip(types, opaque.annotations)
        )
    return tuple(map(door.with_axis_type, avals, types))


def find_rule(call: Call, scope: Scope, state: State) -> Registration | None:
    # Look first for a rule that is bound to the kernel's function object, then for the rule of the
    # declared op around it, then for the registry's rule for the name.
    for binding in (call.binding, scope.binding):
        if binding is not None:
            return Registration(call.name, binding.rule, binding.where)
    with state.registry.overlaid(scope.overlays):
        for name in (call.name, *call.aliases):
            registration = state.registry.find(name, call.module, call.place, call.target)
            if registration is not None:
                if scope.notes is not None:
                    scope.notes.declared.append(registration.where)
                return registration
    return None


def prove(opaque: OpaqueCall, state: State, primitive: str, params: Any, operands: int) -> None:
    """Set the call's rule from a proof of its kernel's own jaxpr, if there is one."""
    if opaque.registration is None and opaque.audit is None and opaque.governing(state).prove:
        opaque.audit = state.registry.audit(primitive, params, operands)
        if opaque.audit is not None and opaque.audit.proven:
            where = opaque.call.place or "its own jaxpr"
            opaque.registration = Registration(opaque.call.name, no_communication, where, "audited")


def check_declaration(
    opaque: OpaqueCall,
    state: State,
    primitive: str,
    params: Any,
    operands: int,
    varying: frozenset[str] | None = None,
) -> None:
    """Raise RuleError if a kernel's own jaxpr contradicts what it is declared to communicate.

    ``varying`` holds the axes over which an operand varies; None if unknown.
    """
    # A declaration that the jaxpr proves becomes "audited"; one that the jaxpr neither proves nor
    # contradicts stays "declared". This runs when a call is lowered, so that tracing doesn't wait
    # for it. It also runs at each bind of a call that ``is_doubtful``, and at the first bind of a
    # jaxpr with effects other than on refs. ``explain`` and ``scan_calls`` run it for every call.
    registration = opaque.registration
    if registration is None or registration.status == "audited":
        return
    joined = _joined(opaque, state)
    if varying is not None:
        joined &= varying
    if not registration.rule.is_local and not joined:
        return
    if opaque.audit is None:
        opaque.audit = state.registry.audit(primitive, params, operands)
    if opaque.audit is None:
        return
    if joined:
        # Along an axis of one device there is nothing to join. If the size is unknown, assume more.
        if opaque.audit.proven and (size_of(joined) or 1) > 1:
            raise RuleError(
                f"{opaque.call} is declared {registration.rule!r} at {registration.where}, but "
                f"its own jaxpr shows that it reads no other device: over {show_axes(joined)} "
                "its outputs differ where its inputs do. Remove the declaration, since the "
                "jaxpr is proof enough, or declare shardrules.no_communication. A reduction "
                "beside the kernel, by jax.lax.psum, needs no declaration.",
                kernel=opaque.call.name,
                rule=registration.rule,
                audit=opaque.audit,
                axes=joined,
            )
        return
    if opaque.audit.contradicts_no_communication:
        raise RuleError(
            f"{opaque.call} is declared {registration.rule!r} at {registration.where}, but its "
            f"own jaxpr shows otherwise:\n  {_indented(opaque.audit)}\n"
            "Declare what it does: shardrules.all_gather, all_reduce, permute, per_device, ... "
            "with its mesh axes.",
            kernel=opaque.call.name,
            rule=registration.rule,
            audit=opaque.audit,
        )
    if opaque.audit.proven:
        opaque.registration = dataclasses.replace(registration, status="audited")


def is_doubtful(opaque: OpaqueCall, state: State) -> bool:
    """Return whether a declaration says that outputs are invariant over more axes than inputs.

    If so, ``check_declaration`` runs at each bind: if such a declaration is wrong, a custom_vjp
    gets wrong cotangents, and without the check, an error about those would come first.
    """
    return bool(_joined(opaque, state))


def _joined(opaque: OpaqueCall, state: State) -> frozenset[str]:
    """Return the mesh axes over which a kernel is declared to join data of all devices."""
    registration, scope = opaque.registration, opaque.governing(state)
    if registration is None or registration.status == "audited" or not scope.prove:
        return frozenset()
    # An op's rule describes all its kernels together, so a single one may be local.
    around = scope.binding
    if opaque.call.binding is None and around is not None and around.rule == registration.rule:
        return frozenset()
    effects = registration.rule.effects(1) or ()
    return frozenset().union(*(effect.axes for effect in effects if effect.kind == "join"))


def _indented(audit: Any) -> str:
    return str(audit).replace("\n", "\n  ")


def _everywhere(context: RuleContext) -> Types:
    everywhere = AxisType(frozenset(context.mesh_axes))
    return [everywhere] * len(context.inputs), [everywhere] * context.output_count


_UNKNOWN = Rule("varying", _everywhere, lambda count: (Effect("unknown"),) * count)


def resolve(
    door: Door, state: State, opaque: OpaqueCall, inputs: tuple[AxisType, ...], output_count: int
) -> Resolution:
    """Return the answer of a call's rule for its operands; without a rule, the policy's answer."""
    call, registration, axes = opaque.call, opaque.registration, door.manual_axes()
    kept = None if registration is None else registration.rule.kept(inputs, output_count, axes)
    if kept is not None:
        return kept
    named = frozenset().union(*(t.axes for t in inputs))
    axes += tuple(sorted(named - set(axes), key=str))  # vmap axes can vary too
    context = RuleContext(call.name, inputs, output_count, axes)
    if registration is not None:
        return _answer(call, registration, context)
    scope = opaque.governing(state)
    if scope.policy == "error":
        raise _unknown(call, context, state, opaque.audit)
    if scope.policy == COLLECT:
        assert scope.notes is not None, "who collects takes notes"
        scope.notes.unknown.append((call, inputs, to_paste(call, opaque.audit, axes)))
        return no_communication.resolve(context)
    if scope.policy == "warn":
        warnings.warn(
            f"{call} has no rule; shardrules assumes that its outputs vary over all of "
            f"{{{', '.join(axes)}}}",
            stacklevel=2,
        )
    return _UNKNOWN.resolve(context)


def _answer(call: Call, registration: Registration, context: RuleContext) -> Resolution:
    """Return the rule's answer; errors name the call and where the rule was declared."""
    try:
        return registration.rule.resolve(context)
    except RuleError as error:
        raise RuleError(
            f"{error}\n  {call}; rule declared at {registration.where}",
            **{k: v for k, v in vars(error).items() if k != "message"},
        ) from None
    except Exception as error:
        raise RuleError(
            f"the rule {registration.rule!r} of {call} raised {type(error).__name__}: {error}\n"
            f"  rule declared at {registration.where}; it gets a shardrules.RuleContext with "
            f"{len(context.inputs)} inputs and must return one shardrules.AxisType for each of "
            f"{context.output_count} outputs",
            kernel=call.name,
            rule=registration.rule,
        ) from error


def _unknown(call: Call, context: RuleContext, state: State, audit: Any) -> UnknownKernelError:
    inputs = "\n".join(f"    input {i}: {t}" for i, t in enumerate(context.inputs))
    names = ", ".join(map(repr, state.registry.names())) or "none"
    pasted = "\n".join(f"    {line}" for line in to_paste(call, audit, context.mesh_axes))
    why = "" if audit is None else f"Its own jaxpr is {_indented(audit)}\n"
    if audit is not None and audit.contradicts_no_communication:
        head, tail = "It communicates, so say what it does, in one of these lines:\n", ""
    else:
        # Random bits without a seed differ by device, although nothing communicates.
        alike = "" if audit is None else ", and what is named above is the same on every device"
        head = (
            f"If the kernel reads no other device and no device id{alike}, write one of these "
            "lines:\n"
        )
        tail = (
            "If it communicates, register shardrules.all_gather, all_reduce, permute, per_device, "
            "... with its mesh axes, or a function of a shardrules.RuleContext. "
        )
    return UnknownKernelError(
        f"no rule for {call}: shard_map(check_vma=True) over manual axes "
        f"{{{', '.join(context.mesh_axes)}}} can't tell over which of them its outputs vary\n"
        f"{inputs or '    no inputs'}\n{why}{head}{pasted}\n{tail}Names with a rule: {names}.",
        kernel=call.name,
        inputs=context.inputs,
        mesh_axes=context.mesh_axes,
        audit=audit,
    )


def to_paste(call: Call, audit: Any, axes: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the lines to type that give a call a rule."""
    blockers = () if audit is None else audit.blockers
    shows = [blocker for blocker in blockers if blocker.contradicts_no_communication]
    shown = [blocker.axes for blocker in shows]
    named = tuple(axis for axis in dict.fromkeys(itertools.chain(*shown)) if axis in axes)
    return suggestions.lines(
        call.name,
        call.module,
        call.place,
        is_function=bool(call.place or call.module or call.primitive in _OF_FUNCTIONS),
        communicates=audit is not None and audit.contradicts_no_communication,
        sends=any(blocker.primitive != "axis_index" for blocker in shows),
        axes=named if all(shown) and named else axes,  # a blocker without axes may reach any device
    )
