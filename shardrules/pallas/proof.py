"""The part of the audit that needs to know in which order things happen.

A first look is cheap: what one pass over the events with the first iteration's program ids, and
one with any, show. What it would have to assume is then looked into: each program of a small grid
one by one, each round of a loop.
"""

from __future__ import annotations

import itertools
from typing import Any

from shardrules.pallas.events import Blocker, Root, Walk
from shardrules.pallas.flow import Budget, Runner, State
from shardrules.pallas.grid import Grid, every
from shardrules.pallas.regions import ANY, WHOLE, Undecided, is_box, left_out, shown, whole_box
from shardrules.pallas.values import Ids, Values

__all__ = ["NO_CLASHES", "Proof"]

COVERED = "the grid and the stores cover every element of every output"
IN_ORDER = "the grid's programs run one after the other, as they do on TPUs"
FROM_THE_START = (
    "each core starts in the grid's first iteration (a core that starts elsewhere "
    "would find its scratch empty)"
)
NO_RACES = (
    "copies are waited for before their buffers are used again, and barriers order the threads"
)
NO_CLASHES = "programs that run at the same time don't store to the same elements"
EDGES = "what lies beyond the edge of an array in its last block reaches no output"
MASKED = "elements that a mask leaves out of a load without other= reach no output"
FIRST_PRODUCT = "the first product into a tensor core's accumulator does not accumulate"

_FIXED_ORDER = ("add", "and", "or", "xor", "max", "min", "umax", "umin")
_MOST_STEPS = 20_000  # a bound on the work: events that are followed one by one
_GPU = ("gpu", "triton", "mosaic_gpu")


class Proof:
    """The proof for one kernel whose primitives are all allowed.

    Args:
      walk: the walk over it; what stands in the proof's way is added to its blockers.
      events: what the walk found.
      grid: the grid.
      outputs: the buffer of each output, None for one that is no ref.
      aliases: output -> input, for outputs that start as an operand does.
      platform: as for ``audit``.
      parallel: axes of the grid that may be split over cores; None where it isn't known.
    """

    def __init__(
        self,
        walk: Walk,
        events: list,
        grid: Grid,
        outputs: list,
        aliases: dict,
        platform: str | None,
        parallel: frozenset | None,
    ):
        self.walk = walk
        self.events = events
        self.grid = grid
        self.outputs = outputs
        self.aliases = aliases
        self.platform = platform
        self.parallel = parallel
        self.watched = [
            r
            for r in (*walk.roots, walk.random)
            if not r.ready and not r.sync and (r.reads or r.atomics or r.output is not None)
        ]
        self.assumed: list[str] = []
        self._budget = Budget(_MOST_STEPS)
        self._ends: dict[tuple, State] = {}
        self._axes: tuple[int, ...] | None = None

    def assumptions(self) -> list[str]:
        """Return what the proof takes for granted."""
        walk = self.walk
        self._atomics()
        for root in self.outputs:
            if root is not None and root.sync:
                self._block_root(root, "it gives a semaphore back, which others can signal")
        filled: dict[Root, bool] = {}
        if self.platform in _GPU or not self.grid.sizes:
            filled = self._pass(self.watched, ())
        elif self.platform is None and self._holds_in_any_order():
            filled = self._pass(self.watched, ())
        else:
            if self.platform is None:
                self.assumed.append(IN_ORDER)
            for axes, group in (self._groups() or {(): []}).items():
                filled.update(self._pass(group, axes))
        decided = [
            self._output(root, filled.get(root))
            for root in self.outputs
            if root is not None and not root.sync
        ]
        if not all(decided):
            self.assumed.insert(0, COVERED)
        if walk.asynchronous or walk.threads:
            self.assumed.append(NO_RACES)
        if walk.threads or self.platform in _GPU or (self.platform != "tpu" and self.grid.sizes):
            self.assumed.append(NO_CLASHES)
        for needed, text in (
            (self.grid.overhangs, EDGES),
            (walk.masked_loads, MASKED),
            (walk.accumulates, FIRST_PRODUCT),
        ):
            if needed:
                self.assumed.append(text)
        return self.assumed

    # --- reads -------------------------------------------------------------------------------

    def _groups(self) -> dict:
        """Return buffers by the axes along which they live on, from a first iteration."""
        groups: dict[tuple[int, ...], list] = {}
        for root in self.watched:
            axes = self.grid.axes
            if root.output is not None:
                axes = self.grid.trailing(root.output)
            elif self.parallel is not None:
                axes = tuple(a for a in axes if a not in self.parallel)
            groups.setdefault(axes, []).append(root)
        return groups

    def _holds_in_any_order(self) -> bool:
        runner = Runner(self.walk, self.grid.ids(()), set(self.watched))
        runner.run(self.events, State())
        return not runner.unstored and not runner.gaps

    def _pass(self, group: list, axes: tuple[int, ...]) -> dict:
        """Follow a group of buffers through the iterations along ``axes``.

        Returns:
          For each buffer that is stored to in any case: whether all of it is, by its last
          iteration.
        """
        runners, ends = self._iterations(group, axes)
        reports, asked = runners, runners[0].values.ids.asked
        if any(runner.in_part for runner in runners) and not any(
            runner.unstored or runner.gaps for runner in runners
        ):
            reports, more = self._exactly(group, axes, runners)
            asked = asked | more
        for runner in reports:
            for root, event in runner.unstored.items():
                self._unstored(root, event.eqn)
            for root, (event, gap) in runner.gaps.items():
                self._gap(root, event.eqn, gap, runner.values.ids)
            for root, event in runner.in_part.items():
                self._assume(
                    f"the stores to {root.label} cover what is read of it at "
                    f"{self.walk.place(event.eqn)}"
                )
        for runner in runners:
            for barrier, event in runner.endless.items():
                self._block(
                    event.eqn,
                    "no copy that this kernel starts ends at the semaphore "
                    f"that it waits on ({barrier.label})",
                )
        scratch = any(root.output is None for root in group)
        if scratch and self.parallel is None and (asked - set(self.grid.axes[-1:])) and axes:
            self._assume(FROM_THE_START)
        return {
            root: any(end.fills(root) for end in ends)
            for root in group
            if any(root in end.have for end in ends)
        }

    def _iterations(self, group: list, axes: tuple[int, ...], budget: Budget | None = None):
        """Run a first and a later iteration; return the runners and the states at their ends."""
        watched = set(group)
        first = Runner(self.walk, self.grid.ids(axes), watched, budget)
        after = first.run(self.events, State())
        runners, ends = [first], [after]
        # A pass that left nothing out has seen every path of the later iterations too.
        if first.left_out:
            passes = [self.grid.ids(())]
            if any(root.output is not None and root not in after.have for root in group):
                passes.append(self.grid.ids(axes, last=True))
            for ids in passes:
                later = Runner(self.walk, ids, watched, budget)
                start = after.settled()
                for root in group:
                    for store in root.stores:
                        start.add_may(root, store.region)
                ends.append(later.run(self.events, start))
                runners.append(later)
        return runners, ends

    def _exactly(self, group: list, axes: tuple[int, ...], runners: list) -> tuple[list, set]:
        """Look into what a first look would assume.

        Returns:
          Runners to report on, those given if nothing came of it; and the axes whose ids they
          asked for.
        """
        try:
            return [self._one_by_one(group, axes)], set(self._asked())
        except Undecided:
            pass
        try:  # at least round by round
            runners, _ = self._iterations(group, axes, Budget(_MOST_STEPS))
        except Undecided:
            pass
        return runners, runners[0].values.ids.asked

    def _one_by_one(self, group: list, axes: tuple[int, ...]) -> Runner:
        """Follow a group of buffers through every program of a small grid, in order.

        Raises:
          Undecided: if there are too many programs.
        """
        asked = self._asked()
        sizes = self.grid.sizes
        runner = Runner(self.walk, Ids({}, sizes), set(group), self._budget)
        # Programs along axes that nobody asks for are all alike.
        outer = [a for a in asked if a not in axes]
        inner = [a for a in asked if a in axes]
        for ids in every(sizes[a] for a in outer):
            state = State()
            for more in every(sizes[a] for a in inner):
                runner.values = Values(
                    self.walk, Ids({**dict(zip(outer, ids)), **dict(zip(inner, more))}, sizes)
                )
                state = runner.run(self.events, state).settled()
                if runner.unstored or runner.gaps:
                    return runner
        return runner

    def _asked(self) -> tuple[int, ...]:
        """Return the axes of the grid whose ids say what the kernel reads and stores.

        Raises:
          Undecided: if finding out is too much work.
        """
        if self._axes is None:
            runner = Runner(self.walk, Ids({}, self.grid.sizes), set(self.watched), self._budget)
            runner.run(self.events, State())
            self._axes = tuple(sorted(runner.values.ids.asked))
        return self._axes

    def _unstored(self, root: Root, eqn: Any) -> None:
        if root is self.walk.random:
            reason = "random bits are drawn before a seed is set on every path"
        else:
            reason = f"{root.label} is read before anything is stored there on every path"
            if root.stores:
                reason += (
                    f" (the nearest store, at "
                    f"{self.walk.place(root.stores[0].eqn)}, may not have run)"
                )
        self._block(eqn, reason)

    def _gap(self, root: Root, eqn: Any, gap: tuple, ids: Ids) -> None:
        self._block(
            eqn,
            f"{root.label} is read before anything is stored to its elements "
            f"{shown(gap)}{_in(ids)} (the stores before it, such as the one at "
            f"{self.walk.place(root.stores[0].eqn)}, leave them out)",
        )

    # --- outputs -----------------------------------------------------------------------------

    def _output(self, root: Root, filled: bool | None) -> bool:
        """Check that all of an output is stored to; return whether that is known."""
        aliased = root.output in self.aliases
        # What nobody visits of an aliased output keeps the operand's elements; so does what no
        # store reaches of what is visited, but for TPUs, where a block is a copy of its own.
        visited = aliased or root.ready or self._visited(root)
        if root.ready:
            return True
        if aliased and self.platform != "tpu":
            return bool(filled)
        return self._stored(root, filled) and visited

    def _visited(self, root: Root) -> bool:
        """Check that the grid visits all of an output; return whether that is known."""
        if not self.grid.windows:
            return True  # the output is one block
        window = self.grid.windows[root.output]
        try:
            gap = window.missed()
        except Undecided:
            return False
        if gap is not None:
            self._block_root(
                root,
                f"no program of the grid {self.grid.all_sizes} is given its "
                f"elements {shown(gap)}: its index map, at {window.place}, "
                "leaves them out",
            )
        return True

    def _stored(self, root: Root, filled: bool | None) -> bool:
        """Check that stores reach all of each block; return whether that is known."""
        if filled or 0 in root.shape:
            return True
        boxes = root.boxes
        if boxes is not None and not _fill(boxes, root):
            self._block_root(
                root,
                f"{len(boxes)} stores reach it, and they leave elements out"
                if boxes
                else "no store reaches it",
            )
            return True
        values = Values(self.walk, self.grid.ids(()))
        stores = [
            s
            for s in root.stores
            if all(values.of(scope, atom) in (None, branch) for scope, atom, branch in s.conditions)
        ]
        if not stores:
            self._block_root(root, _NEVER)
            return True
        fixed = [
            store
            for store in stores
            if not any(
                values.from_floats(scope, atom)
                for scope, atom, *_ in (*store.conditions, *store.masks)
            )
        ]
        if not fixed:
            self._block(
                stores[0].eqn,
                f"{root.label} is stored only under a condition that "
                "depends on floating-point data",
            )
            return True
        if all(is_box(store.region) for store in fixed) and not _fill(
            [store.region for store in fixed], root
        ):
            self._block_root(
                root,
                "the stores that do not depend on floating-point data leave elements of it out",
            )
            return True
        try:
            if self._in_each_block(root):
                return True
        except Undecided:
            pass
        if filled is None:
            self._assume(
                f"the condition of the store to {root.label} at "
                f"{self.walk.place(fixed[0].eqn)} holds once for each of its blocks"
            )
        return False

    def _in_each_block(self, root: Root) -> bool:
        """Check that stores reach all of each block, by trying each program of a small grid.

        Returns:
          Whether that is known.

        Raises:
          Undecided: if there are too many programs.
        """
        visits, window = self._visits(root)
        # A TPU writes a block back each time that it moves on, whatever it holds by then.
        in_turn = self.platform == "tpu" and self.parallel is not None and not self.parallel
        known, seen, gaps = True, {}, []
        for block, (places, last) in visits.items():
            inside = whole_box(root.shape)
            if block is not None:
                try:
                    inside = window.inside(block, root.shape)
                except Undecided:
                    known = False  # it may end beyond the array's edge
            gap, stored = self._left_by(last if in_turn else places, root, inside, seen)
            if stored and not in_turn and self.platform not in _GPU:
                _, stored = self._left_by(last, root, inside, seen)
            # Where the blocks aren't known, one of them may be given to the others alone.
            known = known and stored and (block is not None or not self.grid.windows)
            if gap is not None:
                gaps.append((block, next(reversed(last)), gap, inside))
        if not gaps:
            return known
        if len(gaps) == len(visits) and all(gap == inside for _, _, gap, inside in gaps):
            self._block_root(root, _NEVER)
            return True
        block, ids, gap, inside = gaps[0]
        where = "it" if block is None else f"its block {shown(window.elements(block))}"
        reason = (
            "the conditions of all of them are false"
            if gap == inside
            else f"they leave the elements {shown(gap)} of it out"
        )
        self._block_root(
            root,
            f"no store reaches all of {where}: {reason}"
            f"{_in(Ids(dict(zip(self._asked(), ids)), self.grid.sizes))}"
            + (", the last that is given it" if len(visits[block][0]) > 1 else ""),
        )
        return True

    def _visits(self, root: Root) -> tuple[dict, Any]:
        """Return which programs are given which block of an output.

        Returns:
          The block's start (None where that isn't known) -> the programs that are given it, and
          those of them that are so after all others are; as ids along the axes that the kernel
          asks for. And the output's window.

        Raises:
          Undecided: if there are too many programs.
        """
        counted = self.grid.counted
        if not self.grid.windows:
            return {None: ({(): None}, {(): None})}, None
        window: Any = self.grid.windows[root.output]
        asked = [counted[a] for a in self._asked()]
        axes = {*asked, *itertools.chain(*window.axes)}
        try:
            window.starts()
        except Undecided:
            window, axes = None, set(asked)
        visits: dict[Any, tuple[dict, dict]] = {}
        before: Any = ()
        # Programs along the other axes are all alike.
        for place in every(n if a in axes else 1 for a, n in enumerate(self.grid.all_sizes)):
            block = None if window is None else window.block(dict(enumerate(place)))
            places, last = visits.setdefault(block, ({}, {}))
            if block != before:
                last.clear()
            ids = tuple([place[a] for a in asked])
            places[ids] = last[ids] = None
            before = block
        return visits, window

    def _left_by(self, places: dict, root: Root, inside: tuple, seen: dict):
        """Return what the stores of programs can't have reached, and whether they reach all."""
        key = (inside, tuple(places))
        if key not in seen:
            may: Any = frozenset()
            have: frozenset = frozenset()
            for ids in places:
                state = self._end(ids)
                have |= state.have.get(root, frozenset())
                some = state.may.get(root, frozenset())
                may = ANY if ANY in (may, some) else may | some
            stored = WHOLE in have or left_out(filter(is_box, have), inside) is None
            gap = None if stored or may is ANY else left_out(may, inside)
            seen[key] = gap, stored
        return seen[key]

    def _end(self, ids: tuple[int, ...]) -> State:
        """Return what a program has stored, and may have, when it ends."""
        if ids not in self._ends:
            known = Ids(dict(zip(self._asked(), ids)), self.grid.sizes)
            runner = Runner(self.walk, known, set(self.watched), self._budget)
            self._ends[ids] = runner.run(self.events, State())
        return self._ends[ids]

    def _atomics(self) -> None:
        for root in self.walk.roots:
            kinds = {name for _, name, _ in root.atomics}
            for eqn, name, used in root.atomics:
                if root.is_float and name != "xchg":
                    self._block(
                        eqn, "atomic operations on floating-point numbers come in no fixed order"
                    )
                elif name not in _FIXED_ORDER:
                    self._block(eqn, "what it finds depends on which program comes first")
                elif used:
                    self._block(
                        eqn, "the old value that it gives back depends on which program comes first"
                    )
                elif len(kinds) > 1 or len(root.stores) > len(root.atomics) or root.reads:
                    self._block(
                        eqn,
                        f"{root.label} is also read or stored to in other ways, and "
                        "the order of the two is not fixed",
                    )

    def _assume(self, text: str) -> None:
        if text not in self.assumed:
            self.assumed.append(text)

    def _block(self, eqn: Any, reason: str) -> None:
        self.walk.block(eqn, reason)

    def _block_root(self, root: Root, reason: str) -> None:
        self.walk.blockers.append(Blocker(root.label, reason, self.walk.kernel_place))


_NEVER = "no store reaches it: the conditions of all of them are false"


def _in(ids: Ids) -> str:
    """Return the words that name a program of the grid."""
    if not ids.program_ids:
        return ""
    place = ", ".join(str(ids.program_ids.get(a, "...")) for a in range(len(ids.sizes)))
    return f" in program ({place}{',' if len(ids.sizes) == 1 else ''}) of the grid"


def _fill(boxes: list, root: Root) -> bool:
    """Whether boxes fill a buffer, as far as that is known."""
    try:
        return left_out(boxes, whole_box(root.shape)) is None
    except Undecided:
        return True
