"""Runs a kernel's events: is every buffer stored to before it is read, and is every output stored?

A branch is left out where its predicate is known (``values``). A loop's body is run once for all
of its rounds or, in an exact run, round by round for as long as it is known whether there is
another one.
"""

from __future__ import annotations

from typing import Any

from shardrules.pallas.events import Branch, Fresh, Loop, Read, Root, Store, Wait, Walk
from shardrules.pallas.kept import keeps_what_was_there
from shardrules.pallas.regions import ANY, SOME, WHOLE, Undecided, is_box, left_out, whole_box
from shardrules.pallas.values import Ids, Values

__all__ = ["Budget", "Runner", "State"]

_NONE: frozenset = frozenset()
_WHOLE = frozenset([WHOLE])


class State:
    """What has been stored.

    Args:
      have: buffer -> the boxes that every path so far has stored to, SOME with any of them, or
        WHOLE alone.
      may: buffer -> the boxes that some path may have stored to, or ANY.
      views: buffer -> the regions whose place is not known that every path has stored to; they
        stand for the same elements until a loop's next round.
    """

    __slots__ = ("have", "may", "views")

    def __init__(self, have=(), may=(), views=()):
        self.have: dict[Root, frozenset] = dict(have)
        self.may: dict[Root, Any] = dict(may)
        self.views: dict[Root, frozenset] = dict(views)

    def copy(self) -> State:
        """Return a copy."""
        return State(self.have, self.may, self.views)

    def settled(self) -> State:
        """Return a state without the regions that a variable's next value would change."""
        return State(self.have, self.may)

    def forget(self, root: Root) -> None:
        """Note that a buffer is a new one."""
        for known in (self.have, self.may, self.views):
            known.pop(root, None)

    def add(self, root: Root, region: Any) -> None:
        """Note that a region is stored to."""
        have = self.have.get(root, _NONE)
        if region is WHOLE:
            self.have[root] = _WHOLE
        elif WHOLE in have:
            pass
        elif is_box(region):
            self.have[root] = have | {region, SOME}
        else:
            self.have[root] = have | {SOME}
            if region is not SOME:
                self.views[root] = self.views.get(root, _NONE) | {region}
        self.add_may(root, region)

    def add_may(self, root: Root, region: Any) -> None:
        """Note that a region may be stored to."""
        may = self.may.get(root, _NONE)
        if may is not ANY:
            self.may[root] = may | {region} if is_box(region) else ANY

    def holds(self, root: Root, region: Any) -> bool:
        """Whether just this region, or all of the buffer, is known to have been stored to."""
        have = self.have.get(root, _NONE)
        return (
            WHOLE in have
            or region is not SOME
            and (region in have or region in self.views.get(root, _NONE))
        )

    def fills(self, root: Root, box: tuple | None = None) -> bool:
        """Whether a box of a buffer, or all of it, has been stored to on every path."""
        have = self.have.get(root, _NONE)
        if WHOLE in have:
            return True
        boxes = [region for region in have if region is not SOME]
        try:
            return bool(boxes) and left_out(boxes, box or whole_box(root.shape)) is None
        except Undecided:
            return False


def _meet(states: list) -> State:
    first, *rest = states
    met = State((), first.may)
    for root, regions in first.have.items():
        views = first.views.get(root, _NONE)
        for other in rest:
            theirs = other.have.get(root)
            if theirs is None:
                break
            if WHOLE in theirs:
                continue
            if WHOLE in regions:
                regions, views = theirs, other.views.get(root, _NONE)
            else:
                regions = (regions & theirs) | {SOME}
                views = views & other.views.get(root, _NONE)
        else:
            met.have[root] = regions
            if views:
                met.views[root] = views
    for other in rest:
        for root, boxes in other.may.items():
            ours = met.may.get(root, _NONE)
            met.may[root] = ANY if ANY in (ours, boxes) else ours | boxes
    return met


class Budget:
    """How many events exact runs may still follow."""

    def __init__(self, steps: int):
        self.steps = steps

    def spend(self, steps: int) -> None:
        """Take from what is left.

        Raises:
          Undecided: if nothing is left.
        """
        self.steps -= steps
        if self.steps < 0:
            raise Undecided


class Runner:
    """Passes over the events.

    Args:
      walk: the walk that found them.
      ids: what is known of the grid in this pass.
      watched: the buffers to report on; others are taken to hold something.
      budget: for exact runs, which follow each round of a loop and work out where stores go.
    """

    def __init__(self, walk: Walk, ids: Ids, watched: set, budget: Budget | None = None):
        self.walk = walk
        self.values = Values(walk, ids)
        self.watched = watched
        self.budget = budget
        self.unstored: dict[Root, Read] = {}  # read with no store before it
        self.gaps: dict[Root, tuple[Read, tuple]] = {}  # read, and the box that no store reaches
        self.in_part: dict[Root, Read] = {}  # read with stores to some of it before it
        self.endless: dict[Root, Wait] = {}  # waited for, and started nowhere
        # A store of what an excused read kept -> what was stored at that read, and what selects.
        self.kept: dict[tuple[int, Root], tuple] = {}
        self.left_out = False  # whether a branch was not taken because its condition is known

    def run(self, events: list, state: State) -> State:
        """Run ``events`` from ``state``; return the state after them.

        Raises:
          Undecided: where the budget does not suffice.
        """
        if self.budget is not None:
            self.budget.spend(len(events))
        for event in events:
            kind = type(event)
            if kind is Read:
                if event.root in self.watched:
                    self._read(event, state)
            elif kind is Store:
                self._store(event, state)
            elif kind is Wait:
                self._wait(event, state)
            elif kind is Fresh:
                state.forget(event.root)
            elif kind is Branch:
                state = self._branch(event, state)
            elif kind is Loop:
                state = self._loop(event, state)
        return state

    def _place(self, region: Any, root: Root) -> Any:
        """Return a region as a box where an exact run knows it."""
        return region if self.budget is None else self.values.region(region, root.shape)

    def _read(self, event: Read, state: State) -> None:
        root = event.root
        region = self._place(event.region, root)
        if state.holds(root, region):
            return
        have = state.have.get(root)
        box = whole_box(root.shape) if region is WHOLE else region if is_box(region) else None
        if self.budget is not None:
            self.budget.spend(len(have or ()) // 8)
        if have is not None and box is not None and state.fills(root, box):
            return
        kept = keeps_what_was_there(self.values, event)
        if kept is not None:
            for eqn, masks in kept:
                self.kept[id(eqn), root] = (have, state.views.get(root)), masks
        elif have is None:
            self.unstored.setdefault(root, event)
        elif root not in self.gaps:
            gap = None if box is None else self._gap(root, box, state)
            if gap is None:
                self.in_part.setdefault(root, event)
            else:
                self.gaps[root] = event, gap

    def _gap(self, root: Root, box: tuple, state: State) -> tuple | None:
        """Return a part of a box to which nothing can have been stored, if that is known."""
        # Other threads store while this one reads; where they meet is for NO_RACES.
        may = root.boxes or ANY if self.walk.threads else state.may.get(root, _NONE)
        if may is ANY:
            return None
        try:
            return left_out(may, box)
        except Undecided:
            return None

    def _store(self, event: Store, state: State) -> None:
        root = event.root
        region = self._place(event.region, root)
        if self.budget is not None:  # the sets of boxes are copied
            self.budget.spend(len(state.have.get(root, _NONE)) // 64)
        kept = self.kept.pop((id(event.eqn), root), None)
        if kept is not None:
            event.masks = kept[1]
        # Which elements a mask from data leaves out differs from one run to the next.
        by_floats = any(self.values.from_floats(*mask) for mask in event.masks)
        if kept is None and not by_floats:
            state.add(root, region)
            return
        if kept is not None:  # what had not been stored stands there again
            for known, then in zip((state.have, state.views), kept[0]):
                known.pop(root, None)
                if then is not None:
                    known[root] = then
        if root.output is None or not by_floats:
            state.add_may(root, region)

    def _wait(self, event: Wait, state: State) -> None:
        filled = self.walk.links.get(event.on, {})
        if event.target is None:
            for root in (*filled, *self.walk.handed.get(event.on, ())):
                state.add(root, SOME)
        elif event.target in filled:
            self._copied(event.target, self._place(event.region, event.target), state)
        elif not filled:
            self.endless.setdefault(event.on, event)
        else:
            for root in filled:
                state.add(root, SOME)

    def _copied(self, root: Root, region: Any, state: State) -> None:
        """Note that copies to a buffer have ended, of which a wait names a region."""
        box = whole_box(root.shape) if region is WHOLE else region
        copies = [whole_box(root.shape) if copy is WHOLE else copy for copy in root.copies]
        missing = False
        if is_box(box) and all(map(is_box, copies)):
            try:
                missing = left_out(copies, box) is not None
            except Undecided:
                pass
        if not missing:
            state.add(root, region)
        else:  # it names more than the copies fill
            state.have[root] = state.have.get(root, _NONE) | {SOME}
        for copy in root.copies:
            state.add_may(root, copy)

    def _branch(self, event: Branch, state: State) -> State:
        which = self.values.of(event.scope, event.predicate)
        if which is not None:
            self.left_out = True
            which = min(max(which, 0), len(event.branches) - 1)
            return self.run(event.branches[which], state)
        before = state.may if self._by_floats(event.scope, event.predicate) else None
        states = [self.run(branch, state.copy()) for branch in event.branches]
        return self._counted(_meet(states), before)

    def _by_floats(self, scope, predicate) -> bool:
        # Asked in exact runs alone: the others look at such conditions in the end.
        return self.budget is not None and self.values.from_floats(scope, predicate)

    @staticmethod
    def _counted(state: State, before: dict | None) -> State:
        """Take back stores to outputs on which data of floating point decides.

        Whether they happen differs from one run to the next, as with masks.
        """
        for root in () if before is None else list(state.may):
            if root.output is not None and root not in state.have:
                state.may[root] = before.get(root, _NONE)
        return state

    def _loop(self, event: Loop, state: State) -> State:
        carry = None
        if self.budget is not None:
            runs, carry, state = self._rounds(event, state)
        else:
            runs = event.runs is True or self.values.of(*event.runs)
        if runs is not None and not runs:
            self.left_out = True
            return state
        # What one round stores may be there in the next.
        later = state.copy()
        for root, region in _stores(event.events):
            later.add_may(root, region)
        found = [dict(d) for d in (self.unstored, self.gaps, self.in_part, self.endless)]
        after = self.run(event.events, later.copy())
        if len(self.unstored) > len(found[0]):
            # Perhaps the first round, whose carry is known, stores what the later ones read.
            self.unstored, self.gaps, self.in_part, self.endless = found
            values = self.values
            self.values = values.with_given(event.body, carry or self._first(event))
            after = self.run(event.events, later)
            self.values = values
            self.run(event.events, after.settled())
        if runs:
            return after.settled()
        by_floats = self._by_floats(*event.runs)
        return self._counted(
            State(state.have, after.may, state.views), state.may if by_floats else None
        )

    def _first(self, event: Loop) -> dict:
        return {var: self.values.of(*event.body.first[var]) for var in event.carry}

    def _rounds(self, event: Loop, state: State) -> tuple[Any, dict, State]:
        """Follow a loop round by round, for as long as it is known to go on.

        Returns:
          False if it is known to end, None if it isn't known whether there is another round; the
          loop's carry and the state by then.
        """
        outer, body = self.values, event.body
        carry = self._first(event)
        count, alike = 0, 0
        while True:
            if event.length is not None:
                more: Any = count < event.length
            else:
                test, result = event.runs
                more = outer.with_given(test, dict(zip(event.tested, carry.values()))).of(
                    test, result
                )
            if not more or alike == 2:
                return (None if more is None else False), carry, state
            self.values = outer.with_given(body, carry)
            looked = body in outer.looked
            outer.looked.discard(body)
            state = self.run(event.events, state).settled()
            # Rounds that don't look at the loop's carry do the same: two of them stand for all.
            alike = 0 if body in outer.looked else alike + 1
            carry = {var: self.values.of(body, atom) for var, atom in zip(event.carry, event.after)}
            if looked:
                outer.looked.add(body)
            self.values = outer
            count += 1


def _stores(events: list):
    """Yield the buffer and region of each store that events may make."""
    for event in events:
        kind = type(event)
        if kind is Store:
            yield event.root, event.region
        elif kind is Wait:
            if event.target is not None:
                yield event.target, SOME
        elif kind is Branch:
            for branch in event.branches:
                yield from _stores(branch)
        elif kind is Loop:
            yield from _stores(event.events)
