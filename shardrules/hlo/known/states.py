"""What is known about one value: where it is equal, why not elsewhere, and what that rests on.

States are interned: a value is a small integer, and combining two values is a dictionary look-up.
"""

from __future__ import annotations

from typing import NamedTuple

from shardrules.hlo.reader import devices as hd

_KEEP = 8  # blockers that a state lists; a path through more names these


class Cause(NamedTuple):
    """Why a value differs between devices."""

    what: str  # the thing that differs, ``"parameter 0 ('x')"``
    how: str  # what it does, ``"is sharded"``; the axes are put after it where they are known
    detail: str = ""  # what is put there where they are not, ``"as {devices=...}"``


class Blocker(NamedTuple):
    """An opaque call or a construct that the proof doesn't see through.

    Attributes:
      what: for reasons, ``"custom call 'tpu_custom_call' (kernel 'f')"``.
      kernel: the kernel's name to register, None for what is no kernel.
      target: the custom call's target, None for what is no custom call.
      where: an op_name and a source line, as far as the text holds them.
    """

    what: str
    kernel: str | None = None
    target: str | None = None
    where: str = ""

    def __str__(self) -> str:
        return f"{self.what} at {self.where}" if self.where else self.what


class Support(NamedTuple):
    """A statement about an opaque call that a verdict rests on.

    Attributes:
      what: the kernel or target.
      source: ``tag``, ``rule``, ``table`` (of XLA's own targets) or ``text`` (the kernel's own).
      status: ``audited``, ``declared`` or ``built in``.
      detail: the effect, and where it was said.
    """

    what: str
    source: str
    status: str
    detail: str

    def __str__(self) -> str:
        return f"{self.source} for {self.what}: {self.detail} ({self.status})"


class State(NamedTuple):
    """One interned state."""

    proven: int = hd.EQUAL  # relation that is proven
    # The relation that would hold if every blocker gave equal values everywhere.
    optimistic: int = hd.EQUAL
    # Pairs of relation and cause whose refinement is at least as fine as ``optimistic``.
    causes: tuple[tuple[int, Cause], ...] = ()
    blockers: tuple[Blocker, ...] = ()  # what stands on the path, at most a few
    # All that the proof rests on: one that is left out would pass as audited.
    supports: tuple[Support, ...] = ()
    # It is made of the program's constants alone, as what an array is padded with.
    constant: bool = False
    # The relation in which devices are equal unless they are known to be computed from different
    # data, by steps that keep data different (see ``known.evening``).
    apart: int = hd.EQUAL
    # The relation in which devices are equal that data was moved between, one to another: what is
    # computed of both may be the same on them, as the sum that a ring of permutes makes.
    moved: int = hd.DISTINCT


SAME = 1  # the state of what is equal everywhere, and no constant


class States:
    """The interned states over some relations; state 0 is that of constants."""

    def __init__(self, relations: hd.Relations):
        self.relations = relations
        self._ids: dict[State, int] = {}
        self._all: list[State] = []
        self._refined: dict[int, int] = {}
        self.intern(State(constant=True))
        self.intern(State())

    def __getitem__(self, state: int) -> State:
        return self._all[state]

    def intern(self, state: State) -> int:
        """Give a state's id."""
        number = self._ids.get(state)
        if number is None:
            number = self._ids[state] = len(self._all)
            self._all.append(state)
        return number

    def source(self, relation: int, cause: Cause, sure: bool = False) -> int:
        """Make the state of a value that differs by itself; ``sure``: it does, and not only may."""
        causes = () if relation == hd.EQUAL else ((relation, cause),)
        return self.intern(State(relation, relation, causes, apart=relation if sure else hd.EQUAL))

    def evened(self, state: int) -> int:
        """Make the state of a value that may be equal again, though that is not proven."""
        fields = self._all[state]
        return state if fields.apart == hd.EQUAL else self.intern(fields._replace(apart=hd.EQUAL))

    def either(self, a: int, b: int) -> int:
        """Make the state of what is one of two values: equal and apart only where both are."""
        if a == b:
            return a
        apart = self.relations.coarsen(self._all[a].apart, self._all[b].apart)
        return self.intern(self._all[self.refine(a, b)]._replace(apart=apart))

    def blocked(self, blocker: Blocker, *operands: int) -> int:
        """Make the state of a value of which nothing is known."""
        blockers: tuple[Blocker, ...] = (blocker,)
        for operand in operands:
            blockers = union(blockers, self._all[operand].blockers)[:_KEEP]
        return self.intern(State(hd.DISTINCT, hd.EQUAL, (), blockers))

    def refine(self, a: int, b: int) -> int:
        """Combine the states of two values into that of a function of both."""
        if a == b or not b:
            return a
        if not a:
            return b
        key = (a << 32) | b
        number = self._refined.get(key)
        if number is None:
            x, y = self._all[a], self._all[b]
            number = self._refined[key] = self.intern(
                State(
                    self.relations.refine(x.proven, y.proven),
                    self.relations.refine(x.optimistic, y.optimistic),
                    self.causes(x.causes + y.causes),
                    union(x.blockers, y.blockers)[:_KEEP],
                    union(x.supports, y.supports),
                    x.constant and y.constant,
                    self.relations.refine(x.apart, y.apart),
                    self.relations.coarsen(x.moved, y.moved),
                )
            )
        return number

    def causes(self, causes) -> tuple[tuple[int, Cause], ...]:
        """Drop the causes that add nothing to those before them."""
        kept: list[tuple[int, Cause]] = []
        relation_so_far = hd.EQUAL
        for relation, cause in causes:
            joined = self.relations.refine(relation_so_far, relation)
            if joined != relation_so_far:
                kept.append((relation, cause))
                relation_so_far = joined
        return tuple(kept)

    def changed(self, state: int, **changes) -> int:
        """Replace fields of a state."""
        return self.intern(self._all[state]._replace(**changes))


def union(a: tuple, b: tuple) -> tuple:
    """Join two lists, each entry once."""
    if not b or a == b:
        return a
    if not a:
        return b
    return tuple(dict.fromkeys(a + b))
