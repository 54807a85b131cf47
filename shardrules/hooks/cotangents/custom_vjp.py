"""Run custom_vjps under shard_map's check in their scopes, and give cotangents the right types.

JAX requires each cotangent that a bwd returns to have its primal's type. A kernel's cotangent for a
replicated weight varies over the batch's axes: it is one device's share, and one psum turns it into
the gradient. But a bwd that communicates may have summed already, and a second psum would silently
give N times the gradient. So the hooks insert the psum only if bwd's jaxpr proves that bwd hasn't
summed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import jax

from shardrules.door.internals import Door
from shardrules.door.jaxprs import is_inexact, widened
from shardrules.door.patching import Patches
from shardrules.door.protocols import Aval
from shardrules.errors import ShardrulesError
from shardrules.hooks.cotangents.bwd import Bwd
from shardrules.hooks.cotangents.inner_sums import inner_sums
from shardrules.hooks.cotangents.refusals import Cotangent
from shardrules.hooks.cotangents.summed_shares import OUTSIDE, computed, hashable
from shardrules.hooks.cotangents.traced import CustomVjpInfo, Path, Trace, VjpRule, as_arrays
from shardrules.hooks.cotangents.whole_cotangents import WholeCotangents
from shardrules.hooks.notes import Notes
from shardrules.hooks.retyping.retyping import Retyping
from shardrules.hooks.state import Hooks, Scope, State
from shardrules.jaxprs.made_of import digest


@dataclasses.dataclass(frozen=True)
class FlatBwd:
    """A bwd, and the arguments with which JAX flattens its cotangents."""

    fun: Any
    in_tree: Any  # the pytree of the primals
    in_avals: tuple[Any, ...]
    trees: Any  # returns the outputs' and residuals' trees, once fwd has run
    rest: tuple[Any, ...]  # the other arguments of JAX's function
    scope: Scope  # the scope that its forward ran under


class Gained(NamedTuple):
    """The axes that a bwd's primals gained since it was traced."""

    axes: frozenset[str]  # all axes that they gained
    by_cast: frozenset[str]  # the axes among these that they gained by a cast


class UnreadBwd(ShardrulesError):
    """Raised if casts are placed around a bwd that hides its cotangents from the hooks."""


Stage = Callable[[Any, FlatBwd, Gained], FlatBwd]
# One step for a cotangent that a bwd returned: prove, sum or cast.
Step = Callable[[Any, Bwd, Cotangent, Any], Any]


class CustomVjpHooks(Hooks):
    def __init__(self, door: Door, state: State):
        super().__init__(door, state)
        # JAX passes one function from fwd to bwd, which returns the trees. This maps it to fwd,
        # to whether fwd takes gradients, to which of its arguments are perturbed, and to the
        # author's fwd.
        self._forwards: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        # Maps the functions that JAX binds to the rules that they run.
        self._rules: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def install(self, patches: Patches) -> None:
        patches.attribute(*self.door.owner("flatten_primal"), self._flatten_primal)
        patches.attribute(*self.door.owner("flatten_fwd"), self._flatten_fwd)
        patches.attribute(*self.door.owner("flatten_bwd"), self._flatten_bwd)
        if (kind := self.door.BwdWithAccums) is not None:
            original, hooks = kind.call_with_accums, self

            def call(self: Any, *args: Any, **options: Any) -> Any:
                hooks._unread(self.bwd, "adds to accumulators")
                return original(self, *args, **options)

            patches.attribute(kind, "call_with_accums", call)

    def _flatten_primal(self, fun: Any, *rest: Any, **options: Any) -> Any:
        return self.door.flatten_primal(self._scoped(fun), *rest, **options)

    def _flatten_fwd(self, fun: Any, *rest: Any, **options: Any) -> Any:
        gradients: list[None] = []
        perturbed: list[bool] = []

        def see(*args: Any) -> None:
            leaves = jax.tree_util.tree_leaves(args)
            kind = jax.custom_derivatives.CustomVJPPrimal
            perturbed[:] = [leaf.perturbed for leaf in leaves if isinstance(leaf, kind)]

        scoped = self._scoped(fun, self._scope_of_rules(), gradients, see)
        if not self.state.active:
            return self.door.flatten_fwd(scoped, *rest, **options)
        flat, trees = self._flat_fwd(scoped, *rest, **options)
        self._forwards[trees] = scoped, gradients, perturbed, fun
        return flat, trees

    def _flat_fwd(self, fwd: Any, *rest: Any, **options: Any) -> Any:
        return widened_fwd(self.door, self.state, fwd, *rest, **options)

    def trees_over(self, trees: Any, axes: frozenset[str]) -> Any:
        """Return the trees of a fwd whose primals were also cast to vary over ``axes``."""
        widened = self.state.widening(axes, trees)
        if trees in self._forwards:
            self._forwards[widened] = self._forwards[trees]
        return widened

    def _flatten_bwd(self, fun: Any, *rest: Any) -> Any:
        flat = self.door.flatten_bwd(fun, *rest)
        scope = self._scope_of_rules()
        if not scope.active:
            return flat
        in_tree, in_avals, trees, *others = rest
        logs = others[-1:] == [True]  # since JAX 0.11; before, there are no other arguments
        bwd = FlatBwd(fun, in_tree, tuple(in_avals), trees, tuple(others), scope)

        def run(*args: Any) -> Any:
            if logs:
                self._unread(fun, "returns logs")
            # bwd is traced after its forward's scope has closed, so enter that scope again.
            with self._inside_bwd() as gained:
                staged = bwd
                for stage in self.stages:
                    staged = stage(self, staged, gained)
                one = staged.fun, staged.in_tree, staged.in_avals, staged.trees, *staged.rest
                return self.door.flatten_bwd(*one).call_wrapped(*args)

        if scope.notes is not None:  # a bwd that is bound outside of a look isn't looked at
            self._rules[run] = self.parts(bwd).rule
        return self.door.wrapped(run, flat)

    def _unread(self, bwd: Any, does: str) -> None:
        """Note a bwd that hides its cotangents from the hooks; raise if casts depend on them."""
        why = f"the bwd {self.door.function_name(bwd)!r} {does}, so its gradients can't be compared"
        if (notes := self.state.scope.notes) is not None:
            notes.reasons_to_leave.append(why)
        if self.state.here.transpose.summed is not None:  # casts are being placed around it
            raise UnreadBwd(why)

    def rule_of(self, bwd: Any) -> Any:
        """Return the author's fwd and bwd, with static arguments, for a bwd bound in a look."""
        run = getattr(bwd, "f", bwd)
        while (replayed := getattr(run, "bwd", None)) is not None:  # of a jaxpr that is replayed
            run = getattr(replayed, "f", replayed)
        return self._rules.get(run)

    @contextlib.contextmanager
    def _inside_bwd(self) -> Iterator[Gained]:
        with self.state.of(Retyping).inside_bwd() as (axes, by_cast):
            yield Gained(axes, by_cast)

    def parts(self, bwd: FlatBwd) -> CustomVjpInfo:
        fwd, gradients, perturbed, written = self._forwards.get(bwd.trees, (None, (), (), None))
        name, place = self.door.function_name(bwd.fun), self.door.function_place(bwd.fun)
        tree, avals = bwd.in_tree, bwd.in_avals
        rule = VjpRule(written, bwd.fun)
        return CustomVjpInfo(name, fwd, gradients, perturbed, tree, avals, place, None, rule)

    def _scope_of_rules(self) -> Scope:
        """Return the scope of fwd and bwd, which run outside the innermost reverse pass."""
        scope = self.state.scope
        count = scope.derivatives_count
        return dataclasses.replace(scope, derivatives_count=count - 1) if count else scope

    def _scoped(
        self,
        fun: Any,
        scope: Scope | None = None,
        gradients: list[None] | None = None,
        see: Callable[..., Any] | None = None,
    ) -> Any:
        scope = self.state.scope if scope is None else scope
        if not scope.active:
            return fun
        name = self.door.function_name(fun)
        enter = lambda scope: self._enter(name, scope, gradients)  # noqa: E731
        return self.door.scoped(fun, enter, scope, see)

    def _enter(
        self, name: str, scope: Scope, gradients: list[None] | None = None, in_bwd: bool = False
    ) -> contextlib.ExitStack:
        """Enter the scope of a custom_vjp; raise if the hooks are uninstalled."""
        if not self.state.patched and self.door.checking():
            raise self.state.outlived(f"{name!r}, of a custom_vjp,", function=name)
        context = contextlib.ExitStack()
        # In a retraced bwd, ``in_bwd`` makes JAX trace inner jits separately: see ``inner_sums``.
        if scope.in_bwd != in_bwd:
            scope = dataclasses.replace(scope, in_bwd=in_bwd)
        context.enter_context(self.state.enter(scope))
        context.enter_context(dataclasses.replace(self.state.here.look, pulls=False, inner=None))
        if gradients is not None:
            context.enter_context(self.state.recording_gradients(gradients))
        return context

    # The stages. Each wraps the bwd of the stage before it.

    def _sharing(self, bwd: FlatBwd, gained: Gained) -> FlatBwd:
        """Return a bwd that returns shares, if its primals gained axes since it was traced."""
        axes, by_cast = gained
        if not axes:
            return bwd
        avals = tuple(self._wider(aval, axes) for aval in bwd.in_avals)
        shares = self.door.transformation(self._shares)(bwd.fun, self.parts(bwd), axes, by_cast)
        trees = self.trees_over(bwd.trees, by_cast)
        return dataclasses.replace(bwd, fun=shares, in_avals=avals, trees=trees)

    def _typing(self, bwd: FlatBwd, gained: Gained) -> FlatBwd:
        """Return a bwd whose cotangents have their primals' types."""
        run = self.door.transformation(self._run_bwd)
        typed = run(bwd.fun, bwd.scope, self.parts(bwd), bool(gained.axes))
        return dataclasses.replace(bwd, fun=typed)

    stages: ClassVar[tuple[Stage, ...]] = (_sharing, _typing)

    def _wider(self, aval: Aval, axes: frozenset[str]) -> Any:
        return self.door.with_axis_type(aval, widened(self.door.axis_type(aval), axes))

    def _shares(
        self, fun: Any, parts: CustomVjpInfo, axes: Any, by_cast: frozenset[str], *args: Any
    ) -> Any:
        """Run a bwd, and replace each cotangent that is a full sum by this device's share."""
        # If a bwd was written for an invariant primal, it may sum the primal's cotangent itself.
        # Now the primal is cast before the branch, and the transpose of that cast sums the devices'
        # results. So each device must return a share: leave out bwd's own sums if that is proven to
        # be right, or else divide the sum by the number of devices.
        if by_cast:
            avals = tuple(self._wider(aval, by_cast) for aval in parts.in_avals)
            parts = dataclasses.replace(parts, fwd_avals=avals)
        bwd = Bwd(self, fun, parts, args)
        kept = self.state.here.transpose.bwds is not None
        notes = self.state.scope.notes
        is_read = by_cast or kept or notes is not None
        cotangents = bwd.cotangents() if is_read else fun(*args)
        if notes is not None:  # before shares are divided, which the author's bwd doesn't do
            self._note_computed(notes, bwd)

        def share_of(path: Path, index: int, value: Any) -> Any:
            if isinstance(value, self.door.SymbolicZero) or not is_inexact(value):
                return value
            aval = parts.in_avals[index]
            have = self.door.axis_type(self.door.typeof(value))
            want = self.door.cotangent_type(aval)
            share = by_cast & have.varying - want.varying - want.unreduced
            equal = share and share - bwd.differs(path)  # it varies only by the cast's type
            share -= equal
            if share:
                bwd.check_share(Cotangent(path, index, have, want), share)
            whole = axes - self.door.axis_type(aval).axes - have.axes | equal
            if not whole:
                return value
            of_device = bwd.share(path, whole) if by_cast else None
            if of_device is not None:
                return self.door.cast(of_device, have.vary(*whole))
            order = tuple(a for a in self.door.manual_axes() if a in whole)
            return self.door.cast(value / jax.lax.psum(1, order), have.vary(*whole))

        return parts.each(cotangents, share_of)

    def _run_bwd(
        self, bwd: Any, scope: Scope, parts: CustomVjpInfo, is_wrapped: bool, *args: Any
    ) -> Any:
        # With the check off, bwd runs as it is; a retrace also notes what it computes. With the
        # check on, trace bwd first, and note or warn about cotangents that arrive summed. Then
        # prove, sum and cast each cotangent that it returned (``_match``).
        notes = self.state.scope.notes
        if (
            notes is not None and scope.notes is not notes
        ):  # a jaxpr that was traced before holds it
            notes.reasons_to_leave.append(f"the bwd {parts.name!r} was {OUTSIDE}")
        is_looked_at = scope.notes is not None and scope.unchecked == "on"
        with self._enter(parts.name, scope, in_bwd=is_looked_at):
            if not self.door.checking():
                if notes is None:
                    return bwd(*args)
                trace = Trace(self.door, bwd, args)
                programs = [trace, *as_arrays(self.door, bwd, args)]
                notes.computed |= {computed(parts, one.jaxpr, digest(one)) for one in programs}
                return trace.run()
            run = Bwd(self, bwd, parts, args)
            frame = dataclasses.replace(self.state.here.transpose, summed=None, placed=False)
            with frame:
                cotangents = run.cotangents()
                if (notes := self.state.scope.notes) is not None:
                    notes.reasons_to_leave += filter(
                        None, [WholeCotangents(run, cotangents).why_different()]
                    )
                    notes.rules.add(hashable(run.parts.rule))
                    if not is_wrapped:  # else ``_shares`` noted it
                        self._note_computed(notes, run)
                else:
                    WholeCotangents(run, cotangents).warn_of_sums()
            return self._match(run, parts, cotangents)

    def _note_computed(self, notes: Notes, bwd: Bwd) -> None:
        made = digest(bwd.trace, inner_sums(bwd.trace.jaxpr))
        notes.computed.add(computed(bwd.parts, bwd.trace.jaxpr, made))

    def _match(self, bwd: Any, parts: CustomVjpInfo, cotangents: Any) -> Any:
        def match(path: Path, index: int, value: Any) -> Any:
            if getattr(value, "dtype", None) == jax.dtypes.float0:
                return value
            primal = parts.in_avals[index]
            if isinstance(value, self.door.SymbolicZero):  # a zero may have any type
                return self.door.SymbolicZero(
                    self.door.with_axis_type(value.aval, self.door.cotangent_type(primal))
                )
            return self._cotangent(path, index, value, primal, bwd)

        return parts.each(cotangents, match)

    def _cotangent(self, path: Path, index: int, value: Any, primal: Any, bwd: Any) -> Any:
        door = self.door
        ct = Cotangent(path, index, door.axis_type(door.typeof(value)), door.cotangent_type(primal))
        for step in self.steps:
            value = step(self, bwd, ct, value)
        return value

    # The steps that one cotangent goes through.

    def _check(self, bwd: Bwd, ct: Cotangent, value: Any) -> Any:
        """Raise CotangentError unless a psum over ``ct.extra`` and a cast make it right."""
        bwd.check(ct)
        return value

    def _sum(self, bwd: Bwd, ct: Cotangent, value: Any) -> Any:
        """Return the sum of the devices' shares over the axes that the primal lacks."""
        if not ct.extra:
            return value
        door, order = self.door, tuple(a for a in self.door.manual_axes() if a in ct.extra)
        total = jax.lax.psum(value, order)
        self.state.record_sum(
            ct.index,
            ct.extra,
            total,
            door.source_line(door.current_source()),
            f"bwd {bwd.parts.name!r} returns one device's share at "
            f"output{jax.tree_util.keystr(ct.path)}",
        )
        return total

    def _cast(self, bwd: Bwd, ct: Cotangent, value: Any) -> Any:
        """Return the cotangent cast to its primal's type."""
        return self.door.cast(value, ct.want)

    steps: ClassVar[tuple[Step, ...]] = (_check, _sum, _cast)


def widened_fwd(door: Door, state: State, fwd: Any, *rest: Any, **options: Any) -> tuple[Any, Any]:
    """Return a flat fwd and the function that returns its trees, as JAX's function does.

    fwd may save the pullback of a ``jax.vjp``, which sums the cotangents of invariant values over
    the devices wherever bwd calls it. In a branch that only some devices take, that sum would wait
    forever for the other devices. So fwd is traced with the types that its primals have in the
    branch (``retyping/higher_order.py``), and each device saves its own residuals.
    """
    # The flags of nonzero tangents carry the axes of the cast (``higher_order.Mark``). A run reads
    # them, casts the primals, and stores the trees under these axes; ``trees_of_run`` returns the
    # trees for the axes of the current bwd. JAX caches fwd by the flags, so each set of axes gets a
    # trace of its own.
    *before, primal = rest
    kept: dict[frozenset[str], Any] = {}  # the trees, keyed by the axes of casts
    current: frozenset[str] = frozenset()  # the axes of casts of the current run
    returned: Any = None

    def see(fwd: Any, *args: Any) -> Any:
        nonlocal returned
        returned = fwd(*args)
        return returned

    def out_type() -> Any:
        """Return the primal's outputs with the types of fwd's outputs, since JAX compares them."""
        tree, avals, *others = primal()
        if current:
            leaves = jax.tree_util.tree_leaves(returned[0])
            if len(leaves) == len(avals):
                types = door.axis_types(map(door.typeof, leaves))
                avals = [*map(door.with_axis_type, avals, types)]
        return (tree, avals, *others)

    def run(flat: Any, trees: Any, *args: Any) -> Any:
        nonlocal current, returned
        values: Sequence[Any] = args[::2]
        marks = args[1::2]
        axes = frozenset().union(*(getattr(mark, "axes", frozenset()) for mark in marks))
        if axes:
            if door.checking():
                types = door.axis_types(map(door.typeof, values))
                values = door.cast_arrays(values, [widened(have, axes) for have in types])
            args = tuple(x for pair in zip(values, map(bool, marks)) for x in pair)
        before, current = current, axes
        try:
            results = flat(*args)
        finally:
            current, returned = before, None
        kept[axes] = trees()
        return results

    def trees_of_run() -> Any:  # JAX's own function only returns the trees of the last run
        axes = state.here.bwd.widened
        return kept[axes] if axes in kept else trees()

    flat, trees = door.flatten_fwd(door.transformation(see)(fwd), *before, out_type, **options)
    return door.transformation(run)(flat, trees), trees_of_run
