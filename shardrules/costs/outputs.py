"""Find outputs whose shardings say replicated without a proof: a reduction may be missing.

The devices may then hold different data under the name of one array, and their copies of a state
that is carried from step to step drift apart. An output *differs* if it is computed from different
data by steps that keep data different (``hlo.known.states.EQUALIZING`` lists the other steps).
Otherwise it is *unproven*.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from shardrules import hlo
from shardrules.costs import donation
from shardrules.costs.advice import rule_flag
from shardrules.errors import HloError
from shardrules.hlo.proof.judgement import Broken
from shardrules.hlo.reader import notations

_SHOWN = 8  # the most device groups that a text lists


class Unreduced(NamedTuple):
    """Gradients that go into outputs without a reduction that they need."""

    axes: tuple[str, ...]  # the axes of the missing reduction
    gradients: int  # their number
    sources: tuple[str, ...]  # the lines that they come from
    takers: tuple[str, ...]  # the lines that they go into
    is_summed_before: bool  # they depend on a sum in the forward pass over these axes

    def plus(self, other: Unreduced) -> Unreduced:
        pairs = ((self.sources, other.sources), (self.takers, other.takers))
        sources, takers = (tuple(sorted({*a, *b})) for a, b in pairs)
        return self._replace(
            gradients=self.gradients + other.gradients, sources=sources, takers=takers
        )


@dataclasses.dataclass(frozen=True)
class Unequal:
    """An output that is called replicated but is not proven equal."""

    kind: str  # ``differs`` or ``unproven``
    name: str  # its path in the program's result, ``"output['w']"``
    shape: str  # on one device
    # The mesh axes along which equality is not proven; None if they aren't known.
    axes: tuple[str, ...] | None
    over: str  # the axes, or the devices that are called equal, for people
    reason: str  # why it may differ
    carried: str  # the argument whose memory it reuses; empty for none
    advice: str  # what to type
    missing: str = ""  # the missing reduction, if the value that lacks it is known
    unreduced: Unreduced | None = None  # the gradients that lack a reduction, if these are known

    @property
    def what(self) -> str:
        missing = f"{self.missing}; " if self.missing else ""
        return f"{self.name}, {self.shape}: {missing}called {self.over}, not proven equal"

    @property
    def because(self) -> str:
        if not self.carried:
            return self.reason
        return (
            f"{self.reason}; it is written into the memory of {self.carried}, so the devices' "
            "copies drift apart from step to step"
        )


def name(path: str) -> str:
    """Return an output's name from its path, ``"['w']"``, which is empty for a lone output."""
    return f"output{path}"


def tiles(judgement: hlo.Judgement, text: str) -> tuple[int, ...] | None:
    """Return the tile that a sharding promises to each partition; None if it promises nothing."""
    partition_tiles = notations.sharding_tiles(text, judgement.partitions)
    if partition_tiles is None or judgement.replicas > 1:
        return partition_tiles
    return None if len(set(partition_tiles)) == len(partition_tiles) else partition_tiles


def find(judgement: hlo.Judgement) -> list[Unequal]:
    """Return the outputs that are called replicated without a proof; outputs that differ first."""
    return [output for _, _, output in broken(judgement)]


def broken(judgement: hlo.Judgement) -> list[tuple[int, Broken, Unequal]]:
    """Return the outputs of ``find``, with their numbers and the claims that are not proven."""
    carried: dict[int, str] | None = None
    unequal = []
    for number, (output, promise) in enumerate(zip(judgement.outputs, judgement.promises or ())):
        if promise is None:
            continue
        try:
            promised = tiles(judgement, promise[1])
        except notations.NotationError:
            continue  # we can't read the promise
        why = None if promised is None else output.broken(promised)
        if why is None:
            continue
        carried = _carried(judgement) if carried is None else carried
        unequal.append((number, why, _unequal(output, promise[0], why, carried.get(number, ""))))
    return sorted(unequal, key=lambda each: each[2].kind)


def _unequal(output: hlo.Output, path: str, broken: Broken, carried: str) -> Unequal:
    shown = " ".join("{" + ",".join(map(str, g)) + "}" for g in broken.groups[:_SHOWN])
    over = f"equal on devices {shown}"
    advice = (
        "reduce it before it is returned, or declare in out_specs (a pmap's out_axes) how it "
        "is sharded"
    )
    if broken.axes:
        over = f"replicated over {{{', '.join(broken.axes)}}}"
        advice = (
            f"reduce over {', '.join(map(repr, broken.axes))} what differs in it before it is "
            "returned (jax.lax.pmean for a mean, jax.lax.psum for a sum; for a weight, reduce "
            "its gradient, not the weight), or name the axes in its out_specs"
        )
    reason = broken.reason
    if broken.differs:
        along = f" over {', '.join(broken.axes)}" if broken.axes else " on these devices"
        reason += f", and there is no reduction{along} on the way"
    if output.blockers:
        names = [b.kernel for b in output.blockers if b.kernel]
        advice = "pass the jax.stages.Compiled, or give its arguments shardings"
        if names:
            advice = (
                f"shardrules.register({names[0]!r}, shardrules.no_communication), if that holds"
            )
        elif calls := [b for b in output.blockers if b.target]:
            rule = rule_flag(calls[0])
            advice = "give the call a rule"
            advice += f": pass {rule} to the command if that is true of it" if rule else ""
    kind = "differs" if broken.differs else "unproven"
    return Unequal(kind, name(path), str(output.shape), broken.axes, over, reason, carried, advice)


def _carried(judgement: hlo.Judgement) -> dict[int, str]:
    """Return the argument whose memory each output reuses, by the output's number."""
    try:
        leaves = donation.read(judgement.module)
    except HloError:
        return {}
    tokens = sum(str(output.shape) == "token[]" for output in judgement.outputs)
    return {tokens + int(x.output): x.path for x in leaves if x.status == "aliased"}
