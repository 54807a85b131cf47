"""Define rules, which map the axis types of an opaque call's inputs to its outputs' types.

A rule has two halves, like shard_map's own tables: the types to cast the inputs to before the call
(*rewrite*), and the types that the outputs then have (*check*). It also declares the call's
*effects*: on which devices' data each output depends. Lowering writes the effects on the compiled
custom call, where ``shardrules.hlo`` reads them. Pure Python: nothing here imports jax.
"""

from __future__ import annotations

import contextlib
import inspect
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from shardrules.arguments import checked
from shardrules.errors import RegistrationError, RuleError
from shardrules.registry.axistypes import AxisType, Effect, Resolution, RuleContext
from shardrules.registry.axistypes import show_axes as _axes
from shardrules.registry.binding import declare

_F = TypeVar("_F", bound=Callable[..., Any])
Types = tuple[Sequence[AxisType], Sequence[AxisType]]  # types of inputs, types of outputs


class Rule:
    """A declared behaviour of an opaque call; also a decorator for a kernel body or an op.

    Two rules are equal if their names and identities are.

    Args:
      name: the rule's text, for messages: ``all_gather('model')``.
      types: a function from a ``RuleContext`` to ``(input types, output types)``.
      effects: a function from the number of outputs to their effects; None if the effects depend on
        the types at a call.
      named_axes: the mesh axes that the rule itself names.
      drops: whether an output may vary over fewer axes than the union of the inputs.
      linear: whether the kernel is linear in all its inputs together.
      identity: distinguishes rules of the same name, such as the user's function that answers; None
        if the name suffices.
    """

    _CACHE_SIZE = 256  # a program repeats the same few calls

    @checked
    def __init__(
        self,
        name: str,
        types: Callable[[RuleContext], Types],
        effects: Callable[[int], tuple[Effect, ...]] | None,
        *,
        named_axes: tuple[str, ...] = (),
        drops: bool = False,
        linear: bool = False,
        identity: Any = None,
    ):
        self.name = name
        self.named_axes = named_axes
        self.drops = drops
        self.linear = linear
        self.types = types
        self._effects = effects
        self.identity = identity
        self._resolved: dict[Any, Resolution] = {}

    def __repr__(self) -> str:
        return self.name

    def __eq__(self, other: Any) -> bool:
        same = isinstance(other, Rule) and self.name == other.name
        return same and _equal(self.identity, other.identity)

    def __hash__(self) -> int:
        return hash(self.name)  # a user's callable may not be hashable

    def __call__(self, target: _F = None) -> _F:  # type: ignore[assignment]  # see below
        """Declare a kernel body or an op to obey this rule, and return it.

        A kernel body is the function that ``pallas_call`` takes; the rule is bound to the function
        object. An op is a function of arrays that calls kernels, such as a custom_vjp function.
        Every kernel call in it and in its backward pass obeys the rule, also without
        ``shardrules.install()``.

        Args:
          target: the function.

        Raises:
          RegistrationError: if it is not a function, or is already declared with another rule.
        """
        if target is None:
            raise RegistrationError(
                f"{self.name} takes the function that it declares; write @shardrules.{self.name} "
                f"without a further pair of parentheses, or op = shardrules.{self.name}(op)",
                rule=self,
            )
        return declare(target, self)

    def is_written_as(self, other: Rule) -> bool:
        """Return whether both are functions with the same code, defaults and closure values."""
        code, values = _written(self.identity)
        other_code, other_values = _written(other.identity)
        if code is None or (self.name, code) != (other.name, other_code):
            return False
        return len(values) == len(other_values) and all(map(_equal, values, other_values))

    def effects(self, output_count: int) -> tuple[Effect, ...] | None:
        """Return each output's effect, or None if they depend on the types at a call."""
        return None if self._effects is None else self._effects(output_count)

    @property
    def is_local(self) -> bool:
        """Return whether the rule says that a kernel reads no other device and no device id."""
        return self.effects(1) == (Effect("local"),)

    def resolve(self, context: RuleContext) -> Resolution:
        """Return the rule's answer for one call."""
        if self.identity is not None:  # a user's function may answer differently each time
            return self._resolve(context)
        resolution = self.kept(context.inputs, context.output_count, context.mesh_axes)
        if resolution is None:
            resolution = self._resolve(context)
            if len(self._resolved) >= self._CACHE_SIZE:
                self._resolved.clear()
            self._resolved[context.inputs, context.output_count, context.mesh_axes] = resolution
        return resolution

    def kept(
        self, inputs: tuple[AxisType, ...], output_count: int, mesh_axes: tuple[str, ...]
    ) -> Resolution | None:
        """Return the cached answer for a call with these types, or None."""
        return self._resolved.get((inputs, output_count, mesh_axes))

    def _refusal(self, context: RuleContext, what: str, **data: Any) -> RuleError:
        text = f"the rule {self.name} of kernel {context.name!r} {what}"
        return RuleError(text, kernel=context.name, rule=self, **data)

    def _resolve(self, context: RuleContext) -> Resolution:
        # Check the call's inputs, ask the rule, and check its answer: it must have one type for
        # each input and output, over manual axes alone, and casts may only add axes.
        unreduced = self._check_inputs(context)
        inputs, outputs = self.types(context)
        inputs = self._checked(context, "input", inputs, len(context.inputs))
        outputs = self._checked(context, "output", outputs, context.output_count)
        for i, (have, want) in enumerate(zip(context.inputs, inputs)):
            if not have.varying <= want.varying:
                raise self._refusal(
                    context,
                    f"casts input {i} from '{have}' to '{want}', but a cast can only add axes: "
                    "only a collective makes a value invariant",
                    inputs=context.inputs,
                )
        if unreduced:
            # The kernel is linear: f(x1 + x2 + ...) = f(x1) + f(x2) + ... So if the inputs are
            # partial sums, the outputs are partial sums, too.
            inputs = tuple(t.drop(*unreduced) for t in inputs)
            outputs = tuple(
                AxisType(t.varying - unreduced, t.unreduced | unreduced, t.reduced) for t in outputs
            )
        effects = self.effects(context.output_count)
        if effects is None:
            typed = []
            for out in outputs:
                axes = tuple(a for a in context.mesh_axes if a in out.axes)
                typed.append(Effect("typed", axes))
            effects = tuple(typed)
        return Resolution(inputs, outputs, effects)

    def _check_inputs(self, context: RuleContext) -> frozenset[str]:
        """Return the axes over which all inputs are partial sums; raise if the rule forbids it."""
        unknown = [a for a in self.named_axes if a not in context.mesh_axes]
        if unknown:
            raise self._refusal(
                context,
                f"names {_axes(unknown)}, but the manual mesh axes here are "
                f"{_axes(context.mesh_axes)}; write the rule with an axis of the mesh that this "
                "shard_map runs over",
                axes=tuple(unknown),
            )
        about = {"kernel": context.name, "rule": self, "inputs": context.inputs}
        for i, have in enumerate(context.inputs):
            if have.unreduced and not self.linear:
                raise RuleError(
                    f"input {i} of kernel {context.name!r} is {have}, and the rule {self.name} "
                    "does not say that the kernel is linear; reduce the input first with "
                    f"jax.lax.psum, or declare shardrules.linear({self.name})",
                    **about,
                )
        partial = {have.unreduced for have in context.inputs}
        if len(partial) > 1:
            raise RuleError(
                f"the inputs of kernel {context.name!r} are unreduced over different axes "
                f"({', '.join(_axes(p) for p in sorted(partial, key=sorted))}); the rule "
                f"{self.name} says that it is linear in all of them together, so all must be "
                "partial sums over the same axes; reduce the others first with jax.lax.psum",
                **about,
            )
        return partial.pop() if partial else frozenset()

    def _checked(
        self, context: RuleContext, what: str, types: Any, count: int
    ) -> tuple[AxisType, ...]:
        listed = [types] if isinstance(types, AxisType) else types
        if not isinstance(listed, Iterable) or isinstance(listed, (str, bytes)):
            raise self._refusal(
                context,
                f"answered {types!r}; a rule answers with one shardrules.AxisType for each "
                f"{what}, here {count}",
                answer=types,
            )
        listed = tuple(listed)
        for i, type_ in enumerate(listed):
            if not isinstance(type_, AxisType):
                raise self._refusal(
                    context,
                    f"answered {type_!r} for {what} {i}; each must be a shardrules.AxisType, such "
                    "as ctx.union or ctx.inputs[0]",
                    answer=types,
                )
            unknown = type_.axes - set(context.mesh_axes)
            if unknown:
                raise self._refusal(
                    context,
                    f"answered '{type_}' for {what} {i}, but {_axes(unknown)} is not a manual mesh "
                    f"axis here; they are {_axes(context.mesh_axes)}",
                    answer=types,
                    axes=unknown,
                )
        if len(listed) != count:
            shown = ", ".join(f"'{type_}'" for type_ in listed) or "nothing"
            raise self._refusal(
                context,
                f"answered for {len(listed)} {what}s ({shown}), but the call has {count}; answer "
                f"with one shardrules.AxisType for each {what}",
                answer=types,
            )
        return listed


def closure_values(function: Any) -> list[tuple[Any, ...]]:
    """Return the value of each name in a function's closure, or () if it has none yet."""
    values: list[tuple[Any, ...]] = []
    for cell in getattr(function, "__closure__", None) or ():
        try:
            values.append((cell.cell_contents,))
        except ValueError:  # the name is not bound yet
            values.append(())
    return values


def _written(function: Any) -> tuple[Any, list[Any]]:
    """Return a function's code, and the values of its defaults and its closure."""
    defaults = getattr(function, "__defaults__", None) or ()
    keywords = getattr(function, "__kwdefaults__", None) or {}
    code = getattr(function, "__code__", None)
    return code, [*defaults, *keywords.items(), *closure_values(function)]


def _equal(a: Any, b: Any) -> bool:
    """Return whether two values are equal; arrays are if their data are."""
    # The result of comparing two arrays is an array, which has no truth value. So comparing values
    # that hold arrays raises an error, and their pickles decide.
    with contextlib.suppress(Exception):
        return bool(a == b)
    with contextlib.suppress(Exception):
        return pickle.dumps(a) == pickle.dumps(b)
    return False


def _not_called(factory: Callable[..., Any], signature: inspect.Signature) -> str:
    name = getattr(factory, "__name__", repr(factory))
    parameters = ", ".join(map(str, signature.parameters.values()))
    example = f"{name}('model')" if parameters.startswith("*axes") else f"{name}(...)"
    return f"{name} makes a rule and is not one itself; call it, such as {example}"


# A rule, or a function from a call's context to its outputs' types.
AnyRule = Rule | Callable[[RuleContext], Any]


def as_rule(rule: AnyRule) -> Rule:
    """Return ``rule`` as a Rule; a callable returns the outputs' types."""
    # For a callable, inputs are cast to the union of their varying axes. The output types that the
    # callable returns are trusted, and verdicts that depend on them say so.
    if isinstance(rule, Rule):
        return rule
    if not callable(rule) or isinstance(rule, type):
        raise RuleError(
            f"{rule!r} is not a rule; a rule is shardrules.no_communication or a function from a "
            "shardrules.RuleContext to one shardrules.AxisType for each output",
            answer=rule,
        )

    signature: inspect.Signature | None
    try:
        signature = inspect.signature(rule)
    except ValueError:  # a builtin without a signature
        signature = None
    if signature is not None and signature.return_annotation in (Rule, "Rule", "shardrules.Rule"):
        raise RuleError(_not_called(rule, signature), answer=rule)
    try:
        if signature is not None:
            signature.bind(None)
    except TypeError as error:
        raise RuleError(
            f"{getattr(rule, '__qualname__', rule)} can't be called with one argument, a "
            f"shardrules.RuleContext ({error}); write def rule(ctx): return [ctx.union]",
            answer=rule,
        ) from None

    def types(context: RuleContext) -> Types:
        return [context.union] * len(context.inputs), rule(context)

    name = getattr(rule, "__qualname__", repr(rule))
    return Rule(name, types, None, drops=True, identity=rule)
