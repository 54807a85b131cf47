"""What a judgement holds: the verdicts on a module's collectives, what is proven of its outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from shardrules import errors
from shardrules.hlo.known import states as hs
from shardrules.hlo.proof import collectives as hc
from shardrules.hlo.reader import devices as hd
from shardrules.hlo.reader import module as hm

VERDICTS = ("redundant", "overwide", "unproven", "needed")

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
      verdict: ``redundant``, ``overwide``, ``unproven`` or ``needed``.
      collective: what is judged.
      range: the elements that it is about, None for the whole operand.
      bytes: operand bytes on one device that it is about.
      reason: one sentence.
      needed_axes: for ``overwide``: the axes that are needed; None where axes aren't known.
      rests_on: rules, tags and standing assumptions.
      blockers: for ``unproven``: what stands on the path.
      divergent: it runs under a predicate that may differ within a group: it may hang.
    """

    verdict: str
    collective: hc.Collective
    range: Range | None
    bytes: int
    reason: str
    needed_axes: tuple[str, ...] | None
    rests_on: tuple[hs.Support, ...]
    blockers: tuple[hs.Blocker, ...]
    divergent: bool = False

    def __repr__(self) -> str:
        where = f" at {self.collective.source}" if self.collective.source else ""
        return (
            f"<Verdict {self.verdict}: {self.collective.kind} {self.collective.over()}, "
            f"{self.bytes} B{where}>"
        )


class Output:
    """What is proven of one array that the program returns.

    Attributes:
      path: its place in the entry's result, ``()`` for a lone array.
      shape: its shape on one device.
      varying: mesh axes over which it may differ; None where the mesh isn't known.
      equal: proven the same on every device.
      blockers: what stands between it and a proof.
      reason: why it may differ, ``""`` where it is equal.
    """

    def __init__(
        self, path: tuple[int, ...], shape: hm.Shape, state: hs.State, relations: Any, mesh: Any
    ):
        self.path: tuple[int, ...] = path
        self.shape: hm.Shape = shape
        self.equal: bool = state.proven == hd.EQUAL
        self.varying: tuple[str, ...] | None = mesh.varying(state.proven) if mesh else None
        self.blockers: tuple[hs.Blocker, ...] = state.blockers if not self.equal else ()
        self.supports: tuple[hs.Support, ...] = state.supports
        self.reason: str = "" if self.equal else why_varying(state, hd.EQUAL, relations, mesh)
        self._labels = relations.labels(state.proven)

    def equal_in(self, groups: Sequence[Sequence[int]]) -> bool:
        """Tell whether the members of every group of flattened device ids are proven equal."""
        return all(len({int(self._labels[d]) for d in g}) <= 1 for g in groups)

    def equal_over(self, *axes: str) -> bool:
        """Tell whether it is proven equal along mesh axes; raises HloError without a mesh."""
        if self.varying is None:
            raise errors.HloError("the mesh is not known: pass judge(..., mesh={'data': 4}).")
        return not set(axes) & set(self.varying)

    @property
    def classes(self) -> tuple[tuple[int, ...], ...]:
        """List the sets of devices that are proven to hold the same."""
        found: dict[int, list[int]] = {}
        for device, label in enumerate(self._labels.tolist()):
            found.setdefault(label, []).append(device)
        return tuple(tuple(v) for v in found.values())

    def __repr__(self) -> str:
        return f"<Output {self.path} {self.shape}: {self.reason or 'equal everywhere'}>"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Judgement:
    """All verdicts on a module.

    Attributes:
      module: what was judged.
      verdicts: in the order of the text.
      outputs: what is proven of each array that it returns.
      mesh: axis sizes in order, None where no mesh is known.
      partitions, replicas: how many devices it is for.
      opaque: the opaque calls that have no usable rule, each once.
    """

    module: hm.Module
    verdicts: tuple[Verdict, ...]
    outputs: tuple[Output, ...]
    mesh: dict[str, int] | None
    partitions: int
    replicas: int
    opaque: tuple[hs.Blocker, ...]

    def __repr__(self) -> str:
        counts = [(len(self._of(verdict)), verdict) for verdict in VERDICTS]
        held = ", ".join(f"{n} {verdict}" for n, verdict in counts if n) or "no collectives"
        return f"<Judgement of {self.module.name}: {held}>"

    def _of(self, verdict: str) -> tuple[Verdict, ...]:
        return tuple(v for v in self.verdicts if v.verdict == verdict)

    @property
    def redundant(self) -> tuple[Verdict, ...]:
        """List the verdicts on collectives whose operands are proven equal."""
        return self._of("redundant")

    @property
    def overwide(self) -> tuple[Verdict, ...]:
        """List the verdicts on collectives over more axes than needed."""
        return self._of("overwide")

    @property
    def unproven(self) -> tuple[Verdict, ...]:
        """List the verdicts on collectives that something opaque stands before."""
        return self._of("unproven")

    @property
    def needed(self) -> tuple[Verdict, ...]:
        """List the verdicts on collectives whose operands' variation has a named cause."""
        return self._of("needed")


def why_varying(state: hs.State, groups: int, relations: hd.Relations, mesh: hd.Mesh | None) -> str:
    """Name the first cause that differs within groups (``EQUAL``: between any devices)."""
    for relation, cause in state.causes:
        if relations.refine(groups, relation) != groups:
            axes = mesh.varying(relation) if mesh else ()
            if axes:
                return f"{cause.what} {cause.how} over {','.join(axes)}"
            return f"{cause.what} {cause.how}{' ' + cause.detail if cause.detail else ''}"
    if state.blockers:
        return "; ".join(str(b) for b in state.blockers)
    return "its cause is not known"
