"""The results of ``judge``: collectives, their verdicts, and the facts proven about each output."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from shardrules import errors
from shardrules.hlo.known import states as hs
from shardrules.hlo.reader import devices as hd
from shardrules.hlo.reader import module as hm
from shardrules.hlo.reader import partitioned

VERDICTS = ("redundant", "overwide", "unproven", "needed", "internal")

ASSUMPTIONS = (
    hs.Support(
        "inputs",
        "assumption",
        "standing",
        "arrays that their shardings call replicated hold the same data on every device",
    ),
    hs.Support(
        "arithmetic",
        "assumption",
        "standing",
        "equal operands give equal results on every device, up to the order of reductions and of "
        "writes to one element",
    ),
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction, or one operand of a combined one.

    An all-to-all of several operands is one collective: they are the pieces of one array.

    Attributes:
      kind: ``"all-reduce"`` and so on, without ``-start``.
      opcode: as printed.
      name: the instruction's name.
      computation: the name of its computation.
      operand: number of the operand; 0 for an all-to-all of several.
      axes: the mesh axes it runs over; None if the mesh isn't known or no axes give its groups.
      connections: the devices that it connects.
      reduction: ``"add"`` and so on; ``""`` for none.
      operand_bytes: bytes of this operand on one device; for an all-to-all, of all operands.
      element_type: of the operand.
      phase: ``forward``, ``backward``, ``recompute``, ``mixed`` or ``unknown``.
      loop_depth: number of while loops around it.
      trip_count: how often it runs in one execution; None if a loop's count isn't known.
      op_name: JAX's name for it.
      source: the user's innermost source line; None if the text has none.
      frames: all source lines, innermost first.
      at_most: it is in a branch, and ``trip_count`` counts every branch as taken.
      each: how often it runs if each loop of unknown count makes one trip.
      dimension: the dimension along which parts are joined or split, ``"0"``; ``""`` for none.
      in_place: it is a permute that writes a slice of one operand into another.
    """

    kind: str
    opcode: str
    name: str
    computation: str
    operand: int
    axes: tuple[str, ...] | None
    connections: hd.Groups
    reduction: str
    operand_bytes: int
    element_type: str
    phase: str
    loop_depth: int
    trip_count: int | None
    op_name: str
    frames: tuple[hm.Frame, ...] = ()
    at_most: bool = False
    each: int = 1
    dimension: str = ""
    in_place: bool = False

    @property
    def source(self) -> hm.Frame | None:
        """Return the innermost source line outside of installed packages, if there is one."""
        return hm.users(self.frames)

    @property
    def library(self) -> str:
        """Return the innermost line if it is in an installed package that a user's code calls."""
        return hm.library(self.frames)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the groups' flattened device ids, in the collective's order."""
        return self.connections.rows

    @property
    def pairs(self) -> tuple[tuple[int, int], ...] | None:
        """Return a permute's source and target ids; None for other kinds."""
        return self.connections.pairs

    @property
    def notation(self) -> str:
        """Return its groups, or a permute's pairs, in one canonical form."""
        # Except in an all-reduce, a device's place in its group says which part it sends or
        # receives, so the order matters.
        alike = self.kind == "all-reduce"
        return self.connections.in_any_order if alike else self.connections.in_order

    @property
    def group_size(self) -> int:
        """Return the number of members of the largest group."""
        return self.connections.size

    def over(self) -> str:
        """Return the axes or groups that it runs over, for messages."""
        if self.axes is not None:
            return "over " + ",".join(self.axes) if self.axes else "over groups of one device"
        shown = ",".join("{" + ",".join(map(str, g)) + "}" for g in self.groups[:4])
        return f"over groups {{{shown}{',...' if len(self.groups) > 4 else ''}}}"


@dataclasses.dataclass(frozen=True)
class Range:
    """Elements of a flat operand that XLA packed from several arrays.

    Attributes:
      start, stop: flat element positions.
      bytes: their size on one device.
    """

    start: int
    stop: int
    bytes: int


@dataclasses.dataclass(frozen=True, repr=False)
class Verdict:
    """The verdict on one collective, one operand of a combined one, or one range of a flat one.

    Attributes:
      verdict: ``redundant``, ``overwide``, ``unproven``, ``needed`` or ``internal`` (redundant,
        but made by XLA itself, to start a ring or a pipeline).
      collective: the collective that is judged.
      range: the elements that are judged; None for the whole operand.
      bytes: size of these elements on one device.
      reason: one sentence.
      needed_axes: for ``overwide``, the axes that are needed; None if axes aren't known.
      rests_on: rules, tags and standing assumptions.
      blockers: for ``unproven`` and ``overwide``, the calls and constructs on the operand's path
        that the proof does not understand.
      divergent: it runs under a predicate that may differ within a group, so it may hang.
      copies: how many members of each group provably hold equal operands; all of them for
        ``redundant``.
    """

    verdict: str
    collective: Collective
    range: Range | None
    bytes: int
    reason: str
    needed_axes: tuple[str, ...] | None
    rests_on: tuple[hs.Support, ...]
    blockers: tuple[hs.Blocker, ...]
    divergent: bool = False
    copies: int = 1

    def __repr__(self) -> str:
        where = f" at {self.collective.source}" if self.collective.source else ""
        return (
            f"<Verdict {self.verdict}: {self.collective.kind} {self.collective.over()}, "
            f"{self.bytes} B{where}>"
        )


class Broken(NamedTuple):
    """An output that isn't proven equal on some devices, although its sharding promises that."""

    # Whether it comes from different data by steps that keep data different. If False, it may be
    # equal.
    differs: bool
    # The mesh axes along which equality isn't proven; None if they aren't known.
    axes: tuple[str, ...] | None
    groups: tuple[tuple[int, ...], ...]  # devices that should be equal and aren't proven to be
    reason: str  # why it may differ, ``"parameter 1 ('x') is sharded over data"``
    cause: str  # the thing that differs, ``"parameter 1 ('x')"``; empty for opaque calls


class Output:
    """The facts proven about one array that the program returns or takes.

    Attributes:
      path: its place in the entry's result, ``()`` for a lone array.
      shape: its shape on one device.
      varying: mesh axes over which it may differ; None if the mesh isn't known.
      equal: it is proven equal on every device.
      blockers: the opaque calls that prevent a proof.
      reason: why it may differ; ``""`` if it is equal.
    """

    def __init__(
        self,
        path: tuple[int, ...],
        shape: hm.Shape,
        state: hs.ValueState,
        relations: Any,
        mesh: Any,
    ):
        self.path: tuple[int, ...] = path
        self.shape: hm.Shape = shape
        self.equal: bool = state.proven == hd.EQUAL
        self.varying: tuple[str, ...] | None = mesh.varying(state.proven) if mesh else None
        self.blockers: tuple[hs.Blocker, ...] = state.blockers if not self.equal else ()
        self.supports: tuple[hs.Support, ...] = state.supports
        why, _ = why_varying(state, hd.EQUAL, relations, mesh)
        self.reason: str = "" if self.equal else why
        self._labels = relations.labels(state.proven)
        self._context = state, relations, mesh

    def broken(self, tiles: Sequence[int]) -> Broken | None:
        """Return how an output breaks the claim that devices with the same tile hold equal data.

        Args:
          tiles: the number of each partition's tile.

        Returns:
          None if the claim is proven.
        """
        state, relations, mesh = self._context
        promised = relations.tiles_on_devices(tiles)
        called = relations.intern(promised)
        if relations.refine(called, state.proven) == called:
            return None
        apart = relations.coarsen(state.apart, state.moved)
        differs = not state.blockers and relations.refine(called, apart) != called
        relation = apart if differs else state.proven
        axes = None
        if mesh:
            # Only axes along which the tile is constant can break the claim.
            within = mesh.constant_along(promised)
            axes = tuple(a for a in within if a in mesh.varying(relation)) or None
        shown = tuple(g for g in _classes(promised) if not self.equal_in([g]))
        # Unless the output surely differs, name the blockers, not the causes: if the blockers gave
        # equal values, the output might be equal.
        told = state if differs or not state.blockers else state._replace(causes=())
        why = why_varying(told, called, relations, mesh, axes or ())
        return Broken(differs, axes, shown, *why)

    def equal_in(self, groups: Sequence[Sequence[int]]) -> bool:
        """Return whether the members of every group of flattened device ids are proven equal."""
        return all(len({int(self._labels[d]) for d in g}) <= 1 for g in groups)

    def equal_over(self, *axes: str) -> bool:
        """Return whether it is proven equal along mesh axes; raise HloError without a mesh."""
        if self.varying is None:
            raise errors.HloError("the mesh is not known: pass judge(..., mesh={'data': 4}).")
        return not set(axes) & set(self.varying)

    @property
    def classes(self) -> tuple[tuple[int, ...], ...]:
        """Return the sets of devices that are proven equal."""
        return _classes(self._labels)

    def __repr__(self) -> str:
        return f"<Output {self.path} {self.shape}: {self.reason or 'equal everywhere'}>"


def _classes(labels: np.ndarray) -> tuple[tuple[int, ...], ...]:
    classes: dict[int, list[int]] = {}
    for device, label in enumerate(labels.tolist()):
        classes.setdefault(label, []).append(device)
    return tuple(map(tuple, classes.values()))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Judgement:
    """All verdicts on a module.

    Attributes:
      module: the judged module.
      verdicts: in the order of the text.
      outputs: the facts proven about each array that the module returns.
      mesh: axis sizes in order; None if no mesh is known.
      partitions, replicas: the program's device counts; the partitions of all TPU slices.
      opaque: the opaque calls without a usable rule, each once.
      promises: path and sharding of each output, None for an output without one (a token);
        None if the program does not state them.
      inputs: the facts that the sharding of each parameter states, in the parameters' order.
    """

    module: hm.Module
    verdicts: tuple[Verdict, ...]
    outputs: tuple[Output, ...]
    mesh: dict[str, int] | None
    partitions: int
    replicas: int
    opaque: tuple[hs.Blocker, ...]
    promises: tuple[tuple[str, str] | None, ...] | None = None
    inputs: tuple[Output, ...] = ()

    def __repr__(self) -> str:
        counts = [(len(self._of(verdict)), verdict) for verdict in VERDICTS]
        held = ", ".join(f"{n} {verdict}" for n, verdict in counts if n) or "no collectives"
        return f"<Judgement of {self.module.name}: {held}>"

    def _of(self, verdict: str) -> tuple[Verdict, ...]:
        return tuple(v for v in self.verdicts if v.verdict == verdict)

    @functools.cached_property
    def is_compiled(self) -> bool:
        """Return whether XLA has fused and scheduled the program."""
        return partitioned.is_compiled(self.module)

    @property
    def redundant(self) -> tuple[Verdict, ...]:
        """Return the verdicts on collectives whose operands are proven equal."""
        return self._of("redundant")

    @property
    def overwide(self) -> tuple[Verdict, ...]:
        """Return the verdicts on collectives over more axes than needed."""
        return self._of("overwide")

    @property
    def unproven(self) -> tuple[Verdict, ...]:
        """Return the verdicts on collectives that may hang or have operands with blockers."""
        return self._of("unproven")

    @property
    def needed(self) -> tuple[Verdict, ...]:
        """Return the verdicts on collectives whose operands vary for a named cause."""
        return self._of("needed")

    @property
    def internal(self) -> tuple[Verdict, ...]:
        """Return the verdicts on redundant permutes that XLA made for itself."""
        return self._of("internal")


def why_varying(
    state: hs.ValueState,
    groups: int,
    relations: hd.Relations,
    mesh: hd.Mesh | None,
    among: Sequence[str] | None = None,
) -> tuple[str, str]:
    """Return a text on the first cause of a difference within groups, and the thing that differs.

    ``groups`` is a relation; ``EQUAL`` is one group of all devices. ``among`` lists the axes that
    the text may name; None allows all.
    """
    for relation, cause in state.causes:
        if relations.refine(groups, relation) != groups:
            axes = mesh.varying(relation) if mesh else ()
            named = ",".join(axes)
            if among is not None:  # the text becomes part of a sentence about an output
                named = ", ".join(a for a in axes if a in among)
            over = f" over {named}" if named else f" {cause.detail}" if cause.detail else ""
            return f"{cause.what} {cause.how}{over}", cause.what
    if state.blockers:
        return hs.listed(state.blockers), ""
    return "the cause is not known", ""
