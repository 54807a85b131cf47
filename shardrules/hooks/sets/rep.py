"""Follow replication sets, as the check in JAX 0.5.3 and older does (``check_rep=True``).

shard_map's own tracer carries the set of mesh axes over which a value is replicated. Two tables
hold, for each primitive, how the sets pass through it (*check*) and which casts its operands need
(*rewrite*). Each opaque primitive has one entry, which asks the registry at every call.

If a cotangent varies over an axis and its primal doesn't, JAX sums the cotangent over the axis,
even if bwd has already summed it (144 instead of 36). So the hooks first examine what bwd does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.tree_util import SequenceKey, tree_leaves

from shardrules.door.internals import Door
from shardrules.door.jaxprs import inner_jaxprs, is_inexact, named_axes
from shardrules.door.patching import Patches
from shardrules.door.protocols import Aval, JaxMesh, Params, Primitive
from shardrules.errors import RuleError
from shardrules.hooks.cotangents.bwd import Bwd
from shardrules.hooks.cotangents.custom_vjp import CustomVjpHooks, FlatBwd, Gained
from shardrules.hooks.cotangents.refusals import Cotangent
from shardrules.hooks.cotangents.traced import CustomVjpInfo
from shardrules.hooks.state import Hooks, State
from shardrules.hooks.types.calls.opaque import OpaqueCall, resolve
from shardrules.hooks.types.calls.primitives import PrimitiveHooks
from shardrules.hooks.types.identities import leave_out_zeros
from shardrules.registry.axistypes import AxisType, Effect, Resolution, show_axes

# JAX's own primitives whose table entries are too invariant. With groups, each group has its own
# maximum. And a generator without a key draws different numbers on each device.
_BY_DEVICE = frozenset(("pmax", "pmin", "rng_uniform"))


class _SetBwd(Bwd):
    """One run of a bwd, whose cotangents are matched in order after it has returned."""

    entering: tuple[AxisType, ...] = ()  # empty before bwd is entered
    returned = False  # whether bwd has returned
    matched = 0  # how many cotangents are matched

    def enter(self, parts: CustomVjpInfo, args: tuple[Any, ...]) -> None:
        """Record the types of the arguments' leaves; the outputs' cotangents come last."""
        self.parts = self.refusals.parts = parts
        axes = (_varying(self.mesh_axes, leaf) for leaf in tree_leaves(args))
        self.entering = tuple(map(AxisType, axes))
        self.first = len(self.entering) - len(tree_leaves(args[-1]))


class SetVjpHooks(CustomVjpHooks):
    def _flat_fwd(self, fwd: Any, *rest: Any, **options: Any) -> Any:
        return self.door.flatten_fwd(fwd, *rest, **options)

    @contextlib.contextmanager
    def _inside_bwd(self) -> Iterator[Gained]:
        yield Gained(frozenset(), frozenset())  # no types that could gain axes

    def _recording(self, bwd: FlatBwd, gained: Gained) -> FlatBwd:
        """Return a bwd that runs in its scope and records its arguments."""
        see = functools.partial(self.state.of(SetHooks).see, self.parts(bwd))
        scoped = self.door.scoped(bwd.fun, self.state.enter, bwd.scope, see)
        return dataclasses.replace(bwd, fun=scoped)

    stages = (_recording,)


class SetPrimitiveHooks(PrimitiveHooks):
    def unchecked(self, opaque: OpaqueCall, params: Params) -> dict[str, Any]:
        """Return parameters that carry the OpaqueCall to the check outside the scope."""
        return params if opaque.registration is None else self.carrying(opaque, params)


class SetHooks(Hooks):
    def __init__(self, door: Door, state: State):
        super().__init__(door, state)
        self.primitives = state.of(SetPrimitiveHooks)
        self.custom_vjp = state.of(SetVjpHooks)
        # The OpaqueCalls of users' primitives, whose parameters can't carry them from the rewrite
        # (in the scope of the trace) to the check (at the end of the trace, outside every op).
        self._rewritten: dict[tuple[str, str], OpaqueCall] = {}
        self._counts: dict[tuple[str, str], int] = {}  # numbers of results that parameters lack

    def install(self, patches: Patches) -> None:
        door = self.door
        leave_out_zeros(door, patches)

        def entries(
            primitive: Primitive, check: Callable[..., Any], rewrite: Callable[..., Any]
        ) -> None:
            missing = functools.partial(door.rule_missing, primitive)
            for table, entry in ((door.check_rules, check), (door.rewrite_rules, rewrite)):
                original = table.get(primitive, missing)
                patches.entry(table, primitive, functools.partial(entry, primitive, original))

        for primitive in [p for p in door.check_rules if p.name in _BY_DEVICE]:
            entries(primitive, self._check_by_device, self._rewrite_by_device)
        opaque = (door.pallas_call_p, door.ffi_call_p, door.pure_callback_p, door.io_callback_p)
        for primitive in filter(None, (*opaque, door.tpu_custom_call_p)):
            entries(primitive, self.check, self.rewrite)
        if door.cond_p in door.rewrite_rules:  # since JAX 0.4.36
            rewrite = functools.partial(self._rewrite_cond, door.rewrite_rules[door.cond_p])
            patches.entry(door.rewrite_rules, door.cond_p, rewrite)
        patches.attribute(*door.owner("rule_missing"), self._missing)
        patches.attribute(*door.owner("rewrite_bwd"), self._rewrite_bwd)
        patches.attribute(*door.owner("match_replication"), self._match_replication)

    # The two tables.

    def _check_by_device(
        self,
        primitive: Primitive,
        original: Callable[..., Any],
        mesh: JaxMesh,
        *in_rep: set[str] | None,
        **params: Any,
    ) -> Any:
        return self._by_device(mesh, original(mesh, *in_rep, **params), params)

    def _rewrite_by_device(
        self,
        primitive: Primitive,
        original: Callable[..., Any],
        mesh: JaxMesh,
        in_rep: Any,
        *args: Any,
        **params: Any,
    ) -> Any:
        results, reps = original(mesh, in_rep, *args, **params)
        return results, [self._by_device(mesh, rep, params) for rep in reps]

    def _by_device(self, mesh: JaxMesh, rep: Any, params: Params) -> Any:
        if not self.state.active:
            return rep
        if "axes" not in params:  # a draw
            return set()
        if params["axis_index_groups"] is None:
            return rep
        return set(rep) - named_axes(params)

    def rewrite(
        self,
        primitive: Primitive,
        original: Callable[..., Any],
        mesh: JaxMesh,
        in_rep: Any,
        /,
        *args: Any,
        **params: Any,
    ) -> Any:
        # Cast the operands as the rule asks, bind the primitive, and return the results' sets. JAX
        # may rewrite one call more than once, so keep effects that hold for all rewrites.
        opaque = self._opaque_call(primitive, params)
        if self._leaves(primitive, original, opaque):
            return original(mesh, in_rep, *args, **params)
        avals = [self.door.typeof(x) for x in args]
        resolution = self._resolve(opaque, primitive, mesh, in_rep, avals, params)
        opaque.effects = _weaker(opaque.effects, resolution.effects)
        self._rewritten[primitive.name, opaque.call.name] = opaque
        cast = [
            self._cast(x, aval, mesh, rep, want)
            for x, aval, rep, want in zip(args, avals, in_rep, resolution.inputs)
        ]
        results = primitive.bind(*cast, **self.primitives.carrying(opaque, params))
        reps = [_rep(mesh, output) for output in resolution.outputs]
        return (results if primitive.multiple_results else [results]), reps

    def check(
        self,
        primitive: Primitive,
        original: Callable[..., Any],
        mesh: JaxMesh,
        /,
        *in_rep: set[str] | None,
        **params: Any,
    ) -> Any:
        # The rewrite has found the call's rule in its scope, which is closed by now, so use the
        # rewrite's OpaqueCall. A cast can't be added any more: raise if one is missing.
        opaque = self._opaque_call(primitive, params)
        if opaque.registration is None:
            opaque = self._rewritten.get((primitive.name, opaque.call.name), opaque)
        if self._leaves(primitive, original, opaque):
            return original(mesh, *in_rep, **params)
        resolution = self._resolve(opaque, primitive, mesh, in_rep, None, params)
        for i, (rep, want) in enumerate(zip(in_rep, resolution.inputs)):
            lost = want.varying - _type(mesh, rep).varying
            if rep is not None and lost:
                # For example, a vmap with spmd_axis_name over shard_map adds its axis after JAX has
                # put in the casts. Without a cast over that axis, the input's gradient would lack
                # the psum that transposes it.
                raise RuleError(
                    f"input {i} of {opaque.call} is invariant over {show_axes(lost)}, but "
                    "another input came to vary over that after shard_map's casts were put in. "
                    f"JAX {self.door.version} can't cast it any more: map the input over that "
                    "axis too, move the vmap into shard_map, or use JAX 0.6 or newer",
                    kernel=opaque.call.name,
                    axes=lost,
                )
        reps = [_rep(mesh, output) for output in resolution.outputs]
        return reps if primitive.multiple_results else reps[0]

    def _rewrite_cond(
        self, original: Callable[..., Any], mesh: JaxMesh, in_rep: Any, /, *args: Any, **params: Any
    ) -> Any:
        """Cast operands before branches that devices choose differently."""
        # A cast in a branch becomes a psum in the branch's gradient, and devices that took another
        # branch never reach that psum (JAX 0.5.3: the program hangs).
        cast, in_rep = [*args], [*in_rep]
        over = _type(mesh, in_rep[0]).varying if self.state.active else frozenset()
        for i, (x, rep) in enumerate(zip(cast, in_rep)):
            aval = self.door.typeof(x)
            want = _type(mesh, rep).vary(*over)
            if i and rep is not None and is_inexact(aval) and want != _type(mesh, rep):
                cast[i], in_rep[i] = self._cast(x, aval, mesh, rep, want), _rep(mesh, want)
        return original(mesh, in_rep, *cast, **params)

    def _missing(self, primitive: Primitive, /, *args: Any, **params: Any) -> Any:
        """Check or rewrite a primitive that no table holds, such as a user's own."""
        original = functools.partial(self.door.rule_missing, primitive)
        if next(inner_jaxprs(params), None) is not None:
            return original(*args, **params)  # not opaque: up to 0.4.35, JAX has no rule for cond
        # The arguments are those of the missing rule. A check gets a set for each operand (None for
        # a constant). A rewrite gets all sets in one sequence, and then the operands.
        rewrites = len(args) > 1 and isinstance(args[1], (list, tuple))
        # ``name`` returns its operand (no rule up to JAX 0.5.3), and ``platform_index`` a number
        # that is the same on all devices (no rule up to 0.4.35).
        if primitive in (self.door.name_p, self.door.platform_p) and self.state.active:
            mesh, *reps = args if not rewrites else (args[0], *args[1])
            rep = reps[0] if reps else set(mesh.axis_names)
            return ([primitive.bind(*args[2:], **params)], [rep]) if rewrites else rep
        entry = self.rewrite if rewrites else self.check
        return entry(primitive, original, *args, **params)

    def _opaque_call(self, primitive: Primitive, params: Params) -> OpaqueCall:
        return self.state.opaque_call_of(primitive, params) or self.primitives.opaque_call(
            primitive, params
        )

    def _leaves(
        self, primitive: Primitive, original: Callable[..., Any], opaque: OpaqueCall
    ) -> bool:
        """Return whether JAX's table decides, outside our scopes or for an entry of the user's."""
        if not opaque.active(self.state):
            return True
        return (
            opaque.registration is None
            and primitive is self.door.pallas_call_p
            and getattr(original, "func", None) is not self.door.rule_missing
        )

    def _resolve(
        self,
        opaque: OpaqueCall,
        primitive: Primitive,
        mesh: JaxMesh,
        in_rep: Any,
        avals: Sequence[Aval] | None,
        params: Params,
    ) -> Resolution:
        types = tuple(_type(mesh, rep) for rep in in_rep)
        count = self._output_count(primitive, avals, params)
        with self.door.over_axes(tuple(mesh.axis_names)):
            resolution = resolve(self.door, self.state, opaque, types, count)
        partial = [t for t in resolution.outputs if t.unreduced or t.reduced]
        if partial:
            assert opaque.registration is not None, "only a rule makes partial sums"
            raise RuleError(
                f"the rule {opaque.registration.rule!r} of {opaque.call} makes an output "
                f"'{partial[0]}', but JAX {self.door.version} knows only varying and invariant "
                "values; reduce inside the kernel, or use JAX 0.9 or newer",
                kernel=opaque.call.name,
                rule=opaque.registration.rule,
            )
        return resolution

    def _output_count(
        self, primitive: Primitive, avals: Sequence[Aval] | None, params: Params
    ) -> int:
        for key in ("out_avals", "out_shapes", "result_avals"):
            if key in params:
                return len(params[key])
        if not primitive.multiple_results:
            return 1
        avals = params.get("avals") if avals is None else avals
        call = primitive.name, str(sorted(params.items()))
        if avals is not None:
            outputs, _ = primitive.abstract_eval(*avals, **params)
            self._counts[call] = len(outputs)
        return self._counts[call]  # the check, without avals, comes after the rewrite

    def _cast(self, value: Any, aval: Aval, mesh: JaxMesh, rep: Any, want: AxisType) -> Any:
        extra = want.varying - _type(mesh, rep).varying
        if not extra or isinstance(aval, self.door.AbstractRef):
            return value
        return self.door.broadcast(value, tuple(a for a in mesh.axis_names if a in extra))

    # A custom_vjp's cotangents.

    def _rewrite_bwd(self, bwd: Any, mesh: JaxMesh, in_reps: Any, reps_dst: Any) -> Any:
        if not self.state.active:
            return self.door.rewrite_bwd(bwd, mesh, in_reps, reps_dst)
        call = getattr(bwd, "call_wrapped", bwd)
        parts = CustomVjpInfo(self.door.function_name(bwd), None, (), (), None, ())

        def recorded(*args: Any) -> Any:
            results = call(*args)
            self.state.here.bwd.running[-1].returned = True
            return results

        rewritten = self.door.rewrite_bwd(self.door.wrapped(recorded, bwd), mesh, in_reps, reps_dst)
        matched = getattr(rewritten, "call_wrapped", rewritten)

        def run(*args: Any) -> Any:
            current = _SetBwd(self.custom_vjp, lambda *args: tuple(call(*args)), parts, args)
            current.refusals.has_casts = False
            current.mesh_axes = frozenset(mesh.axis_names)
            current.primals = tuple(_type(mesh, rep) for rep in reps_dst)
            frame = self.state.here.bwd
            inner = dataclasses.replace(frame, running=(*frame.running, current))
            with inner:
                return matched(*args)

        return self.door.wrapped(run, rewritten)

    def see(self, parts: CustomVjpInfo, *args: Any) -> None:
        """Record a bwd's CustomVjpInfo and the types of its arguments."""
        running = self.state.here.bwd.running
        # Record only the first call: bwd may differentiate a function whose own bwd runs inside.
        if running and not running[-1].returned and not running[-1].entering:
            running[-1].enter(parts, args)

    def _match_replication(self, src: Any, dst: Any, x: Any) -> Any:
        """Sum a cotangent over axes that its primal doesn't vary over, unless it is the sum."""
        running = self.state.here.bwd.running
        if not running or not running[-1].returned:  # called for a custom_jvp's tangents
            return self.door.match_replication(src, dst, x)
        run = running[-1]
        index, run.matched = run.matched, run.matched + 1
        if isinstance(x, self.door.Zero):
            return x  # bwd returned None for it
        have, want = (AxisType(run.mesh_axes - frozenset(rep)) for rep in (src, dst))
        run.check(Cotangent((SequenceKey(index),), index, have, want))
        return self.door.match_replication(src, dst, x)


def _type(mesh: JaxMesh, rep: Any) -> AxisType:
    """Return the axis type of a replication set, or of a constant, whose set is None."""
    return AxisType() if rep is None else AxisType(frozenset(mesh.axis_names) - frozenset(rep))


def _varying(axes: frozenset[str], value: Any) -> frozenset[str]:
    """Return the axes over which a value varies, even inside a tracer of vmap or a derivative."""
    if hasattr(value, "rep"):
        return axes - frozenset(value.rep)
    inner = (getattr(value, name, None) for name in ("val", "primal", "tangent"))
    return frozenset().union(*(_varying(axes, part) for part in inner if part is not None))


def _weaker(earlier: tuple[Effect, ...] | None, effects: tuple[Effect, ...]) -> tuple[Effect, ...]:
    """Return effects that hold for both of a call's rewrites."""
    # Two ``typed`` effects hold together over the union of their axes.
    if earlier is None or len(earlier) != len(effects):
        return effects
    return tuple(
        first
        if first == second
        else Effect("typed", tuple(dict.fromkeys((*first.axes, *second.axes))))
        if first.kind == second.kind == "typed"
        else Effect("unknown")
        for first, second in zip(earlier, effects)
    )


def _rep(mesh: JaxMesh, axis_type: AxisType) -> set[str]:
    return set(mesh.axis_names) - axis_type.varying
