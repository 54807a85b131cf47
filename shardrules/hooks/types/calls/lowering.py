"""Lower an opaque call: interpret it under the check, or tag its custom call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from shardrules.door.internals import Door
from shardrules.hooks.state import State
from shardrules.hooks.types.calls.opaque import OpaqueCall, check_declaration, resolve
from shardrules.registry.axistypes import AxisType, Effect, format_effects
from shardrules.registry.table import normalise

_ATTRIBUTES = "mhlo.frontend_attributes"  # XLA prints it as frontend_attributes={...}


def lower(
    door: Door,
    state: State,
    rule: Callable[..., Any],
    opaque: OpaqueCall,
    ctx: Any,
    *operands: Any,
    **params: Any,
) -> Any:
    """Return the lowered results of one opaque call: interpret it without types, or tag it."""
    count = len(operands) if opaque.operand_count is None else opaque.operand_count
    check_declaration(opaque, state, ctx.primitive.name, params, count, varying=frozenset())
    if params.get("interpret"):
        # The interpreter's loops mix inputs that vary differently (JAX 0.10.2 fails on a carry). So
        # interpret without types: the call's own types are settled, so nothing is left to check.
        plain = ctx.replace(
            avals_in=[door.with_axis_type(aval, AxisType()) for aval in ctx.avals_in],
            avals_out=[door.with_axis_type(aval, AxisType()) for aval in ctx.avals_out],
        )
        with door.unchecked():
            results = rule(plain, *operands, **params)
        if plain.tokens_out is not None:
            ctx.set_tokens_out(plain.tokens_out)
        return results
    # Kernels are traced without the check. Lowering may trace parts of a kernel, so switch the
    # check off here, too: since JAX 0.12, lowering traces the device id of a signal, and Mosaic
    # can't lower a cast in it.
    is_kernel = ctx.primitive is door.pallas_call_p
    with door.unchecked() if is_kernel else contextlib.nullcontext():
        results = rule(ctx, *operands, **params)
    calls = _custom_calls(operands, results)
    if calls:
        _tag(door, state, ctx, opaque, calls, results)
    return results


def _tag(door: Door, state: State, ctx: Any, opaque: OpaqueCall, calls: Any, results: Any) -> None:
    opaque.settle(state)
    tag, effects = {"shardrules.kernel": normalise(opaque.call.name)}, None
    if opaque.registration is not None:
        effects = _effects(door, state, ctx, opaque)
        tag["shardrules.status"] = opaque.registration.status
    widened = [f"{o.output}:{'+'.join(sorted(o.lost))}" for o in opaque.contradictions if o.lost]
    if widened:
        tag["shardrules.widened"] = ",".join(widened)
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    if mesh is not None and not mesh.empty:
        tag["shardrules.mesh"] = ",".join(f"{a}={n}" for a, n in mesh.shape.items())
    for call in calls:
        if effects is not None:
            tag["shardrules.effects"] = format_effects(_placed(effects, call, results))
        attributes = {name: door.ir.StringAttr.get(text) for name, text in tag.items()}
        if _ATTRIBUTES in call.attributes:
            attributes |= {a.name: a.attr for a in call.attributes[_ATTRIBUTES]}
        call.attributes[_ATTRIBUTES] = door.ir.DictAttr.get(attributes)


def _effects(door: Door, state: State, ctx: Any, opaque: OpaqueCall) -> tuple[Effect, ...]:
    layout, count = opaque.layout, len(ctx.avals_out)
    if layout is not None and len(layout.answers) != count:
        layout = None
    count = count if layout is None else layout.answer_count
    types = door.axis_types(ctx.avals_in)
    if any(t.axes for t in types):
        effects = resolve(door, state, opaque, types, count).effects
    else:  # the check is off, so use effects that don't depend on types
        assert opaque.registration is not None, "only a rule's effects are asked for"
        declared = opaque.effects or opaque.registration.rule.effects(count)
        effects = declared or (Effect("unknown"),) * count
    if layout is None:
        return effects
    local = Effect("local")  # the effect of an output that the kernel doesn't write
    return tuple(local if answer is None else effects[answer] for answer in layout.answers)


def _custom_calls(operands: Any, results: Any) -> list[Any]:
    """Return the custom calls between a lowering rule's operands and its results."""
    # Search backwards from the results; each path ends at a custom call or at an operand.
    stop = set(_flat(operands))
    seen, calls = set(), []
    todo = list(_flat(results))
    while todo:
        value = todo.pop()
        if value in stop or value in seen:
            continue
        seen.add(value)
        owner = value.owner
        if not hasattr(owner, "operands"):  # a block argument's owner is its block
            continue
        operation = getattr(owner, "operation", owner)
        if operation.name == "stablehlo.custom_call":
            if operation not in calls:
                calls.append(operation)
            continue
        todo.extend(operation.operands)
        for region in operation.regions:  # of a case over platforms: follow each one's results
            for block in region:
                todo.extend(block.operations[len(block.operations) - 1].operands)
    return calls


def _placed(effects: tuple[Effect, ...], call: Any, results: Any) -> tuple[Effect, ...]:
    # Mosaic GPU also returns a kernel's scratch in global memory, which is not an output (JAX
    # 0.10.2).
    own = list(call.results)
    at = {
        own.index(value): effect for effect, value in zip(effects, _flat(results)) if value in own
    }
    if len(at) != len(effects):
        return effects
    return tuple(at.get(i, Effect("unknown")) for i in range(len(own)))


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value
