"""Define the rules that come with shardrules, each named by what a kernel does over mesh axes.

A rule that takes axes raises a RuleError unless they are the names of different mesh axes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from shardrules.errors import RuleError
from shardrules.registry.axistypes import AxisType, Effect, RuleContext, one_by_one
from shardrules.registry.axistypes import show_axes as _axes
from shardrules.registry.rule import AnyRule, Rule, Types, as_rule


def _same(effect: Effect) -> Callable[[int], tuple[Effect, ...]]:
    return lambda output_count: (effect,) * output_count


def _no_communication(context: RuleContext) -> Types:
    union = context.union
    return [union] * len(context.inputs), [union] * context.output_count


no_communication: Rule = Rule("no_communication", _no_communication, _same(Effect("local")))

no_communication.__doc__ = """Declare that a kernel reads no other device and no device id.

Its inputs are cast to the union of their varying axes, and every output varies over that union.
Use it as ``@shardrules.no_communication`` on a kernel body or an op, or as the rule in
``shardrules.register(name, shardrules.no_communication)``.
"""


def _over(name: str, axes: tuple[str, ...], effect: str, drops: bool) -> Rule:
    """Return a rule that communicates over ``axes``; with ``drops``, outputs don't vary over them.

    Inputs are cast to U and ``axes``, where U is the union of the axes that they vary over.
    """
    axes = _named(name, axes)

    def types(context: RuleContext) -> Types:
        wide = context.union.vary(*axes)
        out = wide.drop(*axes) if drops else wide
        return [wide] * len(context.inputs), [out] * context.output_count

    return Rule(
        _written(name, axes), types, _same(Effect(effect, axes)), named_axes=axes, drops=drops
    )


def _named(name: str, axes: tuple[Any, ...]) -> tuple[str, ...]:
    if not axes or not all(isinstance(a, str) and a for a in axes) or len(set(axes)) != len(axes):
        raise RuleError(
            f"{name} takes the names of one or more different mesh axes, not "
            f"{', '.join(map(repr, axes)) or 'nothing'}; "
            + (one_by_one(f"{name}(...)", axes) or f"such as {name}('model')"),
            axes=axes,
        )
    return axes


def _written(name: str, arguments: Iterable[Any]) -> str:
    return f"{name}({', '.join(map(repr, arguments))})"


def all_gather(*axes: str) -> Rule:
    """Declare that a kernel gathers over ``axes`` and its outputs vary, as with lax.all_gather.

    Examples:
      >>> entry = shardrules.register("ring_all_gather", shardrules.all_gather("model"))
    """
    return _over("all_gather", axes, "exchange", False)


def reduce_scatter(*axes: str) -> Rule:
    """Declare that a kernel reduces and scatters over ``axes``, as lax.psum_scatter does."""
    return _over("reduce_scatter", axes, "exchange", False)


def permute(*axes: str) -> Rule:
    """Declare that a kernel sends along ``axes``, as lax.ppermute does.

    Examples:
      >>> entry = shardrules.register("shift_kernel", shardrules.permute("data"))
    """
    return _over("permute", axes, "exchange", False)


def all_to_all(*axes: str) -> Rule:
    """Declare that a kernel exchanges over ``axes``, as lax.all_to_all does."""
    return _over("all_to_all", axes, "exchange", False)


def per_device(*axes: str) -> Rule:
    """Declare that a kernel reads its position along ``axes``, as lax.axis_index does.

    Examples:
      >>> entry = shardrules.register("dropout_kernel", shardrules.per_device("data"))
    """
    return _over("per_device", axes, "exchange", False)


def all_reduce(*axes: str) -> Rule:
    """Declare that a kernel sums over ``axes``; its outputs are invariant over them.

    A custom_vjp's bwd then receives the cotangent already summed over the axes.

    Examples:
      >>> entry = shardrules.register("ring_all_reduce", shardrules.all_reduce("data"))
    """
    return _over("all_reduce", axes, "join", True)


def all_gather_invariant(*axes: str) -> Rule:
    """Declare that a kernel gathers over ``axes``, and that its outputs are invariant over them.

    A custom_vjp's bwd then receives the cotangent already summed over the axes, and slices it.
    """
    return _over("all_gather_invariant", axes, "join", True)


def unreduced(*axes: str) -> Rule:
    """Declare that a kernel's outputs are partial sums that are not reduced over ``axes`` yet.

    Args:
      *axes: mesh axes over which the inputs vary.

    Raises:
      RuleError: if they are not the names of different mesh axes; at a call, if no input varies
        over one of them.
    """
    axes = _named("unreduced", axes)
    name = _written("unreduced", axes)

    def types(context: RuleContext) -> Types:
        union = context.union
        missing = [a for a in axes if a not in union.varying]
        if missing:
            raise RuleError(
                f"the rule {name} of kernel {context.name!r} says that its outputs are partial "
                f"sums over {_axes(missing)}, but its inputs vary over {_axes(union.varying)}; a "
                "sum over an axis along which nothing varies counts each value several times",
                kernel=context.name,
                axes=tuple(missing),
            )
        out = AxisType(union.varying - set(axes), frozenset(axes))
        return [union] * len(context.inputs), [out] * context.output_count

    return Rule(name, types, _same(Effect("local")), named_axes=axes, drops=True)


def outputs(*rules: AnyRule) -> Rule:
    """Declare one rule for each output; the inputs are cast to the union of their varying axes.

    Args:
      *rules: a rule for each output, in order.

    Raises:
      RuleError: if an argument is not a rule; at a call, if it has another number of outputs.

    Examples:
      >>> rule = shardrules.outputs(shardrules.no_communication, shardrules.all_reduce("data"))
      >>> entry = shardrules.register("norm_and_sum", rule)
    """
    parts = tuple(as_rule(rule) for rule in rules)
    name = _written("outputs", parts)

    def types(context: RuleContext) -> Types:
        if len(parts) != context.output_count:
            raise RuleError(
                f"the rule {name} of kernel {context.name!r} is for {len(parts)} outputs, but "
                f"the call has {context.output_count}; give one rule for each",
                kernel=context.name,
            )
        single = dataclasses.replace(context, output_count=1)
        answers = [part.types(single)[1] for part in parts]
        return (
            [context.union] * len(context.inputs),
            [part._checked(single, "output", answer, 1)[0] for part, answer in zip(parts, answers)],
        )

    def effects(output_count: int) -> tuple[Effect, ...]:
        return tuple((part.effects(1) or (Effect("unknown"),))[0] for part in parts)

    return Rule(
        name,
        types,
        effects if all(part.effects(1) is not None for part in parts) else None,
        named_axes=tuple(dict.fromkeys(itertools.chain.from_iterable(p.named_axes for p in parts))),
        drops=any(p.drops for p in parts),
        identity=tuple(p.identity for p in parts) if any(p.identity for p in parts) else None,
    )


def linear(rule: AnyRule) -> Rule:
    """Declare that a kernel obeys ``rule`` and is linear in all its inputs together.

    If all inputs are unreduced over the same axes, the outputs are unreduced over them too.

    Args:
      rule: the rule for all other axes.

    Raises:
      RuleError: if it is not a rule.
    """
    inner = as_rule(rule)
    return Rule(
        _written("linear", (inner,)),
        inner.types,
        inner._effects,
        named_axes=inner.named_axes,
        drops=inner.drops,
        linear=True,
        identity=inner.identity,
    )
