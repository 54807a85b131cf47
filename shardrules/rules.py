"""Rules: from the axis types of an opaque call's inputs to those of its outputs.

A rule has two halves, the two that shard_map's own tables have: to which types the inputs must be
cast before the call (*rewrite*), and which types the outputs then have (*check*). It also says
what the call does to values across devices (its *effects*), which is what the lowering writes on
the compiled custom call and what ``shardrules.hlo`` reads back from there. Pure Python: nothing
here imports jax.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shardrules.declare import declare
from shardrules.errors import RuleError

__all__ = [
    "AxisType",
    "Effect",
    "Resolution",
    "Rule",
    "RuleContext",
    "as_rule",
    "format_effects",
    "no_communication",
    "parse_effects",
]


@dataclasses.dataclass(frozen=True)
class AxisType:
    """How one value relates to the manual mesh axes, as JAX's types on avals say it.

    Args:
      varying: axes along which devices may hold different data.
      unreduced: axes over which the value is a partial sum that is still to be reduced.
      reduced: axes over which the value is reduced, and its cotangent ``unreduced``.

    Raises:
      RuleError: if an axis stands in more than one of the three.
    """

    varying: frozenset[str] = frozenset()
    unreduced: frozenset[str] = frozenset()
    reduced: frozenset[str] = frozenset()

    def __post_init__(self):
        for field in ("varying", "unreduced", "reduced"):
            value = getattr(self, field)
            object.__setattr__(
                self, field, frozenset([value] if isinstance(value, str) else value))
        twice = ((self.varying & self.unreduced) | (self.varying & self.reduced)
                 | (self.unreduced & self.reduced))
        if twice:
            raise RuleError(
                f"an axis type can name each mesh axis once, but {_axes(twice)} stands in more "
                f"than one of varying={_axes(self.varying)}, unreduced={_axes(self.unreduced)}, "
                f"reduced={_axes(self.reduced)}", axes=twice)

    def vary(self, *axes: str) -> AxisType:
        """Return this type, varying over ``axes`` too."""
        return AxisType(self.varying | set(axes), self.unreduced - set(axes),
                        self.reduced - set(axes))

    def drop(self, *axes: str) -> AxisType:
        """Return this type, invariant over ``axes``."""
        gone = frozenset(axes)
        return AxisType(self.varying - gone, self.unreduced - gone, self.reduced - gone)

    @property
    def axes(self) -> frozenset[str]:
        """Every mesh axis that the type names."""
        return self.varying | self.unreduced | self.reduced

    def __str__(self) -> str:
        parts = [f"varying over {_axes(self.varying)}"] if self.varying else []
        parts += [f"unreduced over {_axes(self.unreduced)}"] if self.unreduced else []
        parts += [f"reduced over {_axes(self.reduced)}"] if self.reduced else []
        return ", ".join(parts) or "invariant"


@dataclasses.dataclass(frozen=True)
class Effect:
    """What one output of an opaque call is a function of, across devices.

    Args:
      kind: ``local``: of this device's operands alone; ``join``: of the operands of all devices
        along ``axes``, in their order, the same function on each of them; ``exchange``: as
        ``join``, and of the device's own position along ``axes``; ``typed``: declared to be equal
        on devices that differ only along axes that are not in ``axes``; ``unknown``: of anything.
      axes: mesh axes, in the rule's order.
    """

    kind: str
    axes: tuple[str, ...] = ()

    KINDS = ("local", "join", "exchange", "typed", "unknown")

    def __post_init__(self):
        if self.kind not in self.KINDS:
            raise RuleError(f"{self.kind!r} is no kind of effect; the kinds are "
                            f"{', '.join(self.KINDS)}", kind=self.kind)

    def __str__(self) -> str:
        return self.kind if self.kind in ("local", "unknown") else (
            f"{self.kind}({','.join(self.axes)})")


def format_effects(effects: Iterable[Effect]) -> str:
    """Write effects as a tag's text: ``local;join(model)``, one for each output."""
    return ";".join(map(str, effects))


_EFFECT = re.compile(r"(local|unknown)|(join|exchange|typed)\(([^()]*)\)")


def parse_effects(text: str) -> tuple[Effect, ...]:
    """Read the text that ``format_effects`` writes.

    Raises:
      RuleError: if the text is not of that form.
    """
    if not text:
        return ()
    effects = []
    for part in text.split(";"):
        match = _EFFECT.fullmatch(part)
        if match is None:
            raise RuleError(f"{part!r} in the tag {text!r} is no effect; one looks like 'local', "
                            "'join(model)' or 'typed(data,model)'", text=text)
        effects.append(Effect(match[1]) if match[1] else
                       Effect(match[2], tuple(a for a in match[3].split(",") if a)))
    return tuple(effects)


@dataclasses.dataclass(frozen=True)
class RuleContext:
    """What a rule is told about one opaque call.

    Args:
      name: the kernel name.
      inputs: each input's axis type; closed-over refs count as inputs.
      output_count: how many outputs the call has.
      mesh_axes: the manual mesh axes here, in the mesh's order.
    """

    name: str
    inputs: tuple[AxisType, ...]
    output_count: int
    mesh_axes: tuple[str, ...]

    @property
    def union(self) -> AxisType:
        """Varying over every axis over which some input varies (U in the rule table)."""
        return AxisType(frozenset().union(*(t.varying for t in self.inputs)))


@dataclasses.dataclass(frozen=True)
class Resolution:
    """A rule's answer for one call: input types to cast to, output types, effects."""

    inputs: tuple[AxisType, ...]
    outputs: tuple[AxisType, ...]
    effects: tuple[Effect, ...]


class Rule:
    """A declared behaviour of an opaque call; also a decorator for a kernel body or an op.

    Args:
      name: how the rule is written, for messages: ``no_communication``.
      types: from a ``RuleContext`` to ``(input types, output types)``.
      effect: the effect of every output where it does not depend on types, else None.
      named_axes: the mesh axes that the rule itself names.
    """

    def __init__(self, name: str,
                 types: Callable[[RuleContext], tuple[Sequence[AxisType], Sequence[AxisType]]],
                 effect: Effect | None, named_axes: tuple[str, ...] = ()):
        self.name = name
        self.named_axes = named_axes
        self._types = types
        self._effect = effect

    def __repr__(self) -> str:
        return self.name

    def __call__(self, target: Callable) -> Callable:
        """Declare a kernel body or an op to obey this rule, and return it.

        A kernel body is the function that is given to ``pallas_call``; the rule is bound to the
        function object. An op is a function of arrays that calls kernels inside (a custom_vjp
        function, say): every kernel call in it obeys the rule, and its backward pass too, also
        where ``shardrules.install()`` was not called.

        Args:
          target: the function.

        Raises:
          RegistrationError: if it is not callable, or is declared already with another rule.
        """
        return declare(target, self)

    def effects(self, output_count: int) -> tuple[Effect, ...] | None:
        """Return each output's effect, or None where only the types at a call can tell."""
        return None if self._effect is None else (self._effect,) * output_count

    def resolve(self, context: RuleContext) -> Resolution:
        """Apply the rule to one call.

        Args:
          context: the call.

        Raises:
          RuleError: if an input is unreduced, or the answer has the wrong count, names an axis
            that is not a manual mesh axis here, or is no axis type.
        """
        self._check_inputs(context)
        inputs, outputs = self._types(context)
        inputs = self._checked(context, "input", inputs, len(context.inputs))
        outputs = self._checked(context, "output", outputs, context.output_count)
        for i, (have, want) in enumerate(zip(context.inputs, inputs)):
            if not have.varying <= want.varying:
                raise RuleError(
                    f"the rule {self.name} of kernel {context.name!r} casts input {i} from "
                    f"'{have}' to '{want}', but a cast can only add axes: only a collective makes "
                    "a value invariant", kernel=context.name, rule=self, inputs=context.inputs)
        effects = self.effects(context.output_count)
        if effects is None:
            effects = tuple(
                Effect("typed", tuple(a for a in context.mesh_axes if a in out.axes))
                for out in outputs)
        return Resolution(inputs, outputs, effects)

    def _check_inputs(self, context: RuleContext) -> None:
        unknown = [a for a in self.named_axes if a not in context.mesh_axes]
        if unknown:
            raise RuleError(
                f"the rule {self.name} of kernel {context.name!r} names {_axes(unknown)}, but the "
                f"manual mesh axes here are {_axes(context.mesh_axes)}; write the rule with an "
                "axis of the mesh that this shard_map runs over",
                kernel=context.name, rule=self, axes=tuple(unknown))
        for i, have in enumerate(context.inputs):
            if have.unreduced:
                raise RuleError(
                    f"input {i} of kernel {context.name!r} is {have}, and the rule {self.name} "
                    "does not say that the kernel is linear; reduce it first with jax.lax.psum",
                    kernel=context.name, rule=self, inputs=context.inputs)

    def _checked(self, context: RuleContext, what: str, types: Any,
                 count: int) -> tuple[AxisType, ...]:
        listed = [types] if isinstance(types, AxisType) else types
        if not isinstance(listed, Iterable) or isinstance(listed, (str, bytes)):
            raise RuleError(
                f"the rule {self.name} of kernel {context.name!r} answered {types!r}; a rule "
                f"answers with one shardrules.AxisType for each {what}, here {count}",
                kernel=context.name, rule=self, answer=types)
        listed = tuple(listed)
        for i, one in enumerate(listed):
            if not isinstance(one, AxisType):
                raise RuleError(
                    f"the rule {self.name} of kernel {context.name!r} answered {one!r} for "
                    f"{what} {i}; each must be a shardrules.AxisType, such as ctx.union or "
                    "ctx.inputs[0]", kernel=context.name, rule=self, answer=types)
            strange = one.axes - set(context.mesh_axes)
            if strange:
                raise RuleError(
                    f"the rule {self.name} of kernel {context.name!r} answered '{one}' for "
                    f"{what} {i}, but {_axes(strange)} is no manual mesh axis here; they are "
                    f"{_axes(context.mesh_axes)}", kernel=context.name, rule=self,
                    answer=types, axes=strange)
        if len(listed) != count:
            shown = ", ".join(f"'{one}'" for one in listed) or "nothing"
            raise RuleError(
                f"the rule {self.name} of kernel {context.name!r} answered for {len(listed)} "
                f"{what}s ({shown}), but the call has {count}; answer with one "
                f"shardrules.AxisType for each {what}",
                kernel=context.name, rule=self, answer=types)
        return listed


def _axes(axes: Iterable[str]) -> str:
    """Write axes for a message: sets sorted, sequences in their order."""
    ordered = sorted(axes, key=str) if isinstance(axes, (set, frozenset)) else axes
    return "{" + ", ".join(map(str, ordered)) + "}"


def _no_communication(context: RuleContext):
    union = context.union
    return [union] * len(context.inputs), [union] * context.output_count


no_communication = Rule("no_communication", _no_communication, Effect("local"))
no_communication.__doc__ = """Declare that a kernel reads no other device and no device id.

Its inputs are cast to the union of their varying axes, and every output varies over that union.
Use it as ``@shardrules.no_communication`` on a kernel body or an op, or as the rule in
``shardrules.register(name, shardrules.no_communication)``.
"""


def as_rule(rule: Any) -> Rule:
    """Return ``rule`` as a Rule; a callable on a ``RuleContext`` answers for the outputs.

    The callable's inputs are cast to the union of their varying axes. Its output types are
    believed, and a verdict that rests on them says so.

    Raises:
      RuleError: if it is neither a Rule nor callable.
    """
    if isinstance(rule, Rule):
        return rule
    if not callable(rule) or isinstance(rule, type):
        raise RuleError(
            f"{rule!r} is no rule; a rule is shardrules.no_communication or a function from a "
            "shardrules.RuleContext to one shardrules.AxisType for each output", answer=rule)

    def types(context: RuleContext):
        return [context.union] * len(context.inputs), rule(context)

    name = getattr(rule, "__qualname__", repr(rule))
    return Rule(name, types, None)
