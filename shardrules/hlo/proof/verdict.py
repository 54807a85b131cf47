"""Judge each collective as redundant, overwide, unproven, needed or internal, and say why."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shardrules import errors
from shardrules import registry as rule_registry
from shardrules.arguments import checked, shown
from shardrules.hlo.known import pieces, ranges
from shardrules.hlo.known import states as hs
from shardrules.hlo.known.ranges import Value
from shardrules.hlo.proof import collectives as hc
from shardrules.hlo.proof import customcalls, handlers, inputs, loops, phases, scatters
from shardrules.hlo.proof.evaluation import Proof, Record
from shardrules.hlo.proof.judgement import (
    ASSUMPTIONS,
    Collective,
    Judgement,
    Output,
    Range,
    Verdict,
    why_varying,
)
from shardrules.hlo.reader import devices as hd
from shardrules.hlo.reader import garbage, parser, partitioned
from shardrules.hlo.reader import module as hm

_WINDOWED = ("dot_general", "conv_general_dilated")  # what XLA computes in a ring of permutes
_MOVES_NOTHING = "it moves nothing: each device is its own source"


@checked(own=("mesh",))
def judge(
    module: hm.Module | str,
    *,
    registry: Any = None,
    mesh: Mapping[str, int] | None = None,
    parameter_shardings: Sequence[str | None] | None = None,
    own_mesh: Mapping[str, int] | None = None,
    unpartitioned: bool = False,
    output_shardings: Sequence[tuple[str, str] | None] | None = None,
    slices: int | Sequence[tuple[int, int]] | None = None,
) -> Judgement:
    """Judge every collective of a module.

    Args:
      module: a parsed module, or HLO text.
      registry: rules for kernels without a tag; the default registry if None.
      mesh: axis names and sizes in order, row-major over partition ids; if None, read from tags or
        the parameters' shardings.
      parameter_shardings: an HLO sharding or None for each entry parameter; used for parameters
        without one in the text. With replicas, ``"{replicated}, parameter_replication={true}"``
        says that all replicas hold the same data.
      own_mesh: the program's own mesh, used if ``mesh`` is None; its axis order is not checked.
      unpartitioned: also accept a module that the partitioner has not seen, whose text lacks the
        partitioner's collectives.
      output_shardings: path and HLO sharding of each output, ``("['w']", "{replicated}")``; read
        from the text's root instruction if None.
      slices: for a program over several TPU slices, whose text is one slice's program. Pass the
        slice and id of each device in the mesh's order. Or pass the number of slices, if the mesh
        lists one slice after the other, and the devices of each slice in the same order.

    Raises:
      HloSyntaxError: the text can't be read, or the groups of a collective don't fit the module.
      HloError: the module is not partitioned yet, or nests too deep for Python's stack; the mesh
        or the shardings don't fit the module.

    Examples:
      >>> text = step.lower(w, x).compile().as_text()
      >>> judgement = hlo.judge(hlo.parse(text), mesh={"data": 4, "model": 2})
      >>> judgement.verdicts[0].collective.axes
      ('data',)
    """
    # The proof is about devices. The mesh names their axes, gives the sizes for kernels' rules, and
    # the number of devices if the text lacks it. Check at the end that a caller's mesh has an order
    # that fits the groups.
    if isinstance(module, str):
        module = parser.parse(module)
    given_mesh = hd.axes_of(mesh)
    registry = rule_registry.default if registry is None else registry
    if isinstance(registry, (str, bytes)) or not callable(getattr(registry, "find", None)):
        raise errors.HloError(
            f"registry={shown(registry)} holds no rules; pass a shardrules.Registry",
            registry=registry,
        )
    if not unpartitioned:
        partitioned.check(module)
    mesh = own_mesh if given_mesh is None else given_mesh
    relations = inputs.devices(module, mesh, slices)
    states = hs.States(relations)
    named = hd.make_mesh(mesh, relations, module.name) if mesh is not None else None
    axes: dict[str, int] | None = None if mesh is None else dict(mesh)
    if axes is None:
        axes = inputs.find_mesh(module, relations.device_count, parameter_shardings or ())
    if named is None and axes is not None:
        named = hd.Mesh(axes, relations)
    try:
        with garbage.uncollected():
            values = inputs.parameter_values(module, states, parameter_shardings)
            proof = handlers.prove(module, registry, values, states, axes)
            promises = inputs.promises(module, output_shardings)
            judgement = _Judge(module, proof, named).judgement(promises, values)
            if given_mesh is not None and named is not None:
                seen = [states[proof.values.collapse(value)].proven for value in values]
                groups = {v.collective.name: v.collective.connections for v in judgement.verdicts}
                hd.check_order(named, relations, seen, groups)
            return judgement
    except RecursionError:
        limit = sys.getrecursionlimit()
        raise errors.HloError(
            f"module {module.name!r} nests tuples or calls too deep for Python's stack (its limit "
            f"is {limit} frames, some of them the caller's): call sys.setrecursionlimit("
            f"{10 * limit}) before.",
            module=module.name,
        ) from None


class _Judge:
    """Judges the collectives of one module from its proof."""

    def __init__(self, module: hm.Module, proof: Proof, mesh: hd.Mesh | None):
        self.module = module
        self.proof = proof
        self.states = proof.values.states
        self.relations = proof.values.relations
        self.mesh = mesh
        self.scatters = scatters.find(proof)
        self.runs = loops.executions(module)
        self.names = functools.cache(lambda c: phases.PartNames(module, module.computations[c]))

    def judgement(self, promises: Any, given: Sequence[Value]) -> Judgement:
        verdicts: list[Verdict] = []
        steps = customcalls.spread_steps(self.module)
        for name, computation in self.module.computations.items():
            if self.module.opcodes[name].isdisjoint(hc.COMMUNICATE):
                continue
            for position, instruction in enumerate(computation.instructions):
                if instruction.opcode not in hc.COMMUNICATE:
                    continue
                sends = instruction.opcode not in hc.OPCODES
                if hc.is_send(instruction) if sends else (computation.name, position) not in steps:
                    verdicts += self._instruction(computation, position)
        resolutions = self.proof.opaque.values()
        return Judgement(
            self.module,
            tuple(verdicts),
            tuple(self._outputs()),
            dict(self.mesh.axes) if self.mesh else None,
            self.relations.all_partitions,
            self.relations.replicas,
            tuple(dict.fromkeys(r.blocker for r in resolutions if r.effects is None)),
            promises,
            tuple(self._inputs(given)),
        )

    def _inputs(self, given: Sequence[Value]) -> Iterator[Output]:
        for number, (parameter, value) in enumerate(zip(self.module.entry.parameters, given)):
            state = self.states[self.proof.values.collapse(value)]
            yield Output((number,), parameter.shape, state, self.relations, self.mesh)

    def _outputs(self) -> Iterator[Output]:
        root = self.module.entry.instructions[self.module.entry.root].shape
        stack: list[tuple[tuple[int, ...], hm.Shape, Value]] = [((), root, self.proof.result)]
        while stack:
            path, shape, value = stack.pop()
            if shape.elements is None:
                state = self.states[self.proof.values.collapse(value)]
                yield Output(path, shape, state, self.relations, self.mesh)
                continue
            if not isinstance(value, tuple) or len(value) < len(shape.elements):
                value = (self.proof.values.collapse(value),) * len(shape.elements)
            parts = zip(itertools.count(), shape.elements, value)
            stack += reversed([((*path, index), part, own) for index, part, own in parts])

    def _instruction(self, computation: hm.Computation, position: int) -> list[Verdict]:
        """Return the verdicts on one collective: operand by operand, range by range."""
        # First find out what to judge: a fusion may be a reduce-scatter, and some kinds have one
        # verdict for all operands. Then judge each operand, as an all-gather if the devices add
        # their pieces to zeros. A packed operand has a verdict for each range of elements.
        instruction = computation.instructions[position]
        record, reached = self._record(computation, position)
        shapes = [computation.instructions[o].shape for o in instruction.operands]
        itself = computation, position, record.channel
        computation, position, channel = self.scatters.get((computation.name, position), itself)
        in_place = hc.updates_in_place(instruction, channel.kind)
        # In a permute in place, the start of the moved slice may differ as well as its data.
        together = in_place or channel.kind == "ragged-all-to-all"
        if together or instruction.opcode not in hc.OPCODES:
            shapes = shapes[:1]  # the rest are the target, offsets, sizes or a token
        if channel.kind == "all-to-all" and len(shapes) > 1:
            # The operands are one array, cut into the pieces for the group's members.
            shapes, together = [hm.Shape("tuple", elements=tuple(shapes))], True
        operands = record.operands
        if together:
            operands = [self.proof.values.collapse(tuple(operands))]
        base = self._fields(computation, position, channel)
        verdicts = []
        for number, (value, shape) in enumerate(zip(operands, shapes)):
            judged = channel
            how: dict[str, Any] = {}
            piece = self._piece(computation, instruction, number, value, channel)
            if piece is not None and reached:
                value, shape = piece.state, piece.shape
                how = {"kind": "all-gather", "reduction": "", "dimension": str(piece.dimension)}
                judged = dataclasses.replace(channel, ordered=True, **how)
            leaves = shape.leaves()
            moved = hc.slice_bytes(instruction, shape) if in_place else shape.bytes
            kind = leaves[0].element_type if leaves else "token"
            fields = base | {"operand": number, "operand_bytes": moved, "element_type": kind} | how
            if len(instruction.operands) > 1 and not together:
                fields |= self._named(fields, position)
            start, cuts = 0, self._cuts(value, judged, shape)
            for stop, state_id in cuts:
                named, part = fields, None
                if len(cuts) > 1:
                    part = Range(start, stop, ((stop - start) * shape.bits + 7) // 8)
                    named = fields | self._named(fields, position, (start, stop))
                collective = Collective(**named)
                made = self._verdict(collective, judged, state_id, record.guard, part, reached)
                if made.verdict == "redundant" and channel.kind == "collective-permute":
                    made = self._internal(made, computation, position, self.states[state_id])
                verdicts.append(made)
                start = stop
            # The ranges of an array that a loop stacks may only be trips: merge equal verdicts.
            if len(cuts) > 1 and self.names(computation.name).is_stacked(position, number):
                value = self.proof.values.collapse(value)
                whole = self._verdict(
                    Collective(**fields), judged, value, record.guard, None, reached
                )
                if {made.verdict for made in verdicts[-len(cuts) :]} == {whole.verdict}:
                    verdicts[-len(cuts) :] = [whole]
        return verdicts

    def _cuts(self, value: Value, channel: hc.Channel, shape: hm.Shape) -> list[tuple[int, int]]:
        """Return the ranges of an operand that are judged separately, as pairs of end and state."""
        if isinstance(value, ranges.Ranged) and channel.kind == "all-reduce" and not shape.is_tuple:
            return ranges.without_padding(value.cuts, lambda state: self.states[state].constant)
        return [(shape.element_count, self.proof.values.collapse(value))]

    def _piece(
        self,
        computation: hm.Computation,
        instruction: hm.Instruction,
        number: int,
        value: Value,
        channel: hc.Channel,
    ) -> pieces.Piece | None:
        """Return the piece that each device adds, if an all-reduce works as an all-gather."""
        seen, groups = self.proof.values.pieces, channel.groups.matrix
        if channel.kind != "all-reduce" or channel.unknown or not seen:
            return None
        if not pieces.adds(self.module, instruction, channel.reduction):
            return None
        piece = pieces.of(self.module, computation, instruction.operands[number], seen, groups)
        # If the sum has a blocker that the piece lacks, some evaluation was abandoned: then the
        # piece's state does not cover all runs.
        if piece is None or value == piece.state:
            return piece
        blockers = self.states[self.proof.values.collapse(value)].blockers
        return piece if set(blockers) <= {*self.states[piece.state].blockers} else None

    def _record(self, computation: hm.Computation, position: int) -> tuple[Record, bool]:
        """Return a collective's record, and whether the record covers all runs."""
        instruction = computation.instructions[position]
        record = self.proof.records.get((computation.name, position))
        blocker = self.proof.reach.unfollowed.get(computation.name)
        if instruction.opcode not in hc.OPCODES and record is None:
            blocker = blocker or hc.send_blocker(instruction)
            record = Record([], 0, hc.read_send(instruction, self.relations))
        elif record is None:
            kind = hc.OPCODES[instruction.opcode]
            channel = hc.read_channel(self.module, instruction, kind, self.relations, {})
            record = Record([], 0, channel)
            blocker = blocker or hs.Blocker(
                f"the proof does not reach computation {computation.name!r}, which holds it, "
                "from ENTRY"
            )
        if blocker is None:
            return record, True
        # The record of other callers says nothing about the run that was not followed.
        state = self.states.blocked(blocker)
        operands = [state] * len(instruction.operands)
        return Record([*operands], record.guard, record.channel), False

    def _fields(
        self, computation: hm.Computation, position: int, channel: hc.Channel
    ) -> dict[str, Any]:
        """Return the fields of a Collective that are the same for all operands."""
        instruction = computation.instructions[position]
        phase, metadata = self.names(computation.name).whole(position)
        run = self.runs.get(computation.name, loops.Run(0, None))
        groups = channel.groups
        axes = self.mesh.axes_of(groups) if self.mesh else self._axes_in_text(channel)
        if self.mesh and axes is None and groups.ends is not None:
            # Name the axes along which the permute moves data.
            sizes = [s for _, s in self.mesh.axes]
            ends = self.relations.places[groups.ends]
            places = zip(*(np.unravel_index(end, sizes) for end in ends))
            moved = zip(self.mesh.names, places)
            axes = tuple(name for name, (a, b) in moved if (a != b).any())
        return {
            "kind": channel.kind,
            "opcode": instruction.opcode,
            "name": instruction.name,
            "computation": computation.name,
            "axes": axes,
            "connections": groups,
            "reduction": channel.reduction,
            "phase": phase,
            "loop_depth": run.depth,
            "trip_count": run.count,
            "op_name": metadata.op_name,
            "frames": phases.lines(self.module, computation, metadata, position),
            "at_most": run.at_most,
            "each": run.each,
            "dimension": channel.dimension,
            "in_place": hc.updates_in_place(instruction, channel.kind),
        }

    def _axes_in_text(self, channel: hc.Channel) -> tuple[str, ...] | None:
        """Return the axes that the text gives these groups; None unless it gives one set."""
        if not channel.groups.complete:
            return None
        named = {*self.axes_in_text.get(channel.groups.relation, ())}
        mesh = hd.mesh_of(channel.mesh, self.relations)
        axes = mesh.axes_of(channel.groups) if mesh else None
        named |= {axes} if axes is not None else set()
        return named.pop() if len(named) == 1 else None

    @functools.cached_property
    def axes_in_text(self) -> dict[int, set[tuple[str, ...]]]:
        """Return the axes that the text's collectives name for each relation of groups."""
        found: dict[int, set[tuple[str, ...]]] = {}
        for channel in {id(r.channel): r.channel for r in self.proof.records.values()}.values():
            mesh = hd.mesh_of(channel.mesh, self.relations) if channel.mesh else None
            axes = mesh.axes_of(channel.groups) if mesh else None
            if axes is not None:
                found.setdefault(channel.groups.relation, set()).add(axes)
        return found

    def _named(
        self, fields: dict[str, Any], position: int, elements: tuple[int, int] | None = None
    ) -> dict[str, Any]:
        """Return the phase and the source of one operand, or of a range of it."""
        names = self.names(fields["computation"])
        phase, metadata = names.part(position, fields["operand"], elements)
        home = self.module.computations[fields["computation"]]
        lines = phases.lines(self.module, home, metadata, position) or fields["frames"]
        own = {"phase": phase, "frames": lines}
        if metadata.op_name:
            return own | {"op_name": metadata.op_name}
        return {} if elements is not None and fields["op_name"] else own  # {}: it isn't combined

    def _verdict(
        self,
        collective: Collective,
        channel: hc.Channel,
        state_id: int,
        guard_id: int,
        part: Range | None,
        reached: bool,
    ) -> Verdict:
        """Return the verdict on one operand, or one range of it, from its state and its guard."""
        # The first case that applies decides. 1: the collective may hang (unproven). 2: its groups
        # are uncertain (unproven). 3: its operands are equal (redundant), 4: or equal over some of
        # its axes (overwide), 5: or not, whatever the blockers return (needed). 6: the answer
        # depends on a blocker (unproven).
        state, rules = self.states[state_id], self.states[guard_id]
        size = part.bytes if part else collective.operand_bytes

        def verdict(
            name: str,
            reason: str,
            needed: tuple[str, ...] | None = None,
            blockers: Iterable[hs.Blocker] = (),
            **fields: Any,
        ) -> Verdict:
            rests = hs.union(state.supports, rules.supports)
            if name in ("redundant", "overwide"):
                rests = rests + ASSUMPTIONS
            return Verdict(
                name, collective, part, size, reason, needed, rests, tuple(blockers), **fields
            )

        groups, transfer = channel.groups, self.proof.transfer
        blocked = hs.listed(state.blockers)
        if not transfer.uniform(rules.proven, channel):
            certain = "may differ" if transfer.uniform(rules.optimistic, channel) else "differs"
            why, _ = why_varying(rules, groups.relation, self.relations, self.mesh)
            return verdict(
                "unproven",
                f"it runs under a predicate that {certain} within a group, so it may hang: {why}",
                blockers=rules.blockers,
                divergent=True,
            )
        if channel.unknown:  # its groups may differ from what we read
            return verdict("unproven", blocked, blockers=state.blockers)
        proven = self._within(groups, state.proven)
        is_equal, ragged = proven == groups.relation, collective.kind == "ragged-all-to-all"
        if is_equal and reached and not ragged:
            permute = collective.kind == "collective-permute"
            where = "on each source and its target" if permute else collective.over()
            alone = collective.group_size <= 1
            reason = (
                "every group has one member" if alone else f"its operand is proven equal {where}"
            )
            if not groups.moves:
                reason = _MOVES_NOTHING
            return verdict("redundant", reason, copies=collective.group_size)
        if collective.kind in hc.OVERWIDE_KINDS:
            overwide = self._overwide(collective, channel, state, proven)
            if overwide is not None:
                reason, needed, copies = overwide
                return verdict("overwide", reason, needed, state.blockers, copies=copies)
        # Needed whatever the blockers return: even if all returned equal values, the operand
        # would be proven equal nowhere else.
        if self._within(groups, state.optimistic) == proven and not (ragged and is_equal):
            why, _ = why_varying(state, groups.relation, self.relations, self.mesh)
            return verdict("needed", f"not proven equal: {why}")
        if not state.blockers:
            why = f"the proof does not cover equal operands of a {collective.kind}"
            return verdict("unproven", why)
        return verdict("unproven", f"on its operand's path: {blocked}", blockers=state.blockers)

    def _internal(
        self, verdict: Verdict, computation: hm.Computation, position: int, state: hs.ValueState
    ) -> Verdict:
        """Return the verdict; it becomes *internal* if XLA, not the program, made this permute."""
        # The names only tell who made the permute. The proof that it is redundant doesn't use them.
        collective, reason = verdict.collective, _MOVES_NOTHING
        if phases.is_written(collective.op_name):
            return verdict
        if collective.connections.moves:
            name = collective.op_name
            if not name:  # XLA for TPUs (JAX 0.10 to 0.12) drops names between slices
                first = computation.instructions[position].operands[0]
                made = self.module.metadata(hm.behind(computation, first, ("copy", "bitcast")))
                name = made.op_name if phases.operation(made.op_name) in _WINDOWED else ""
            if not (state.constant and name):
                return verdict
            # A windowed einsum starts with an accumulator of zeros, a pipeline with an empty state.
            reason = "XLA starts a ring or a pipeline with constants, the same on each device"
        return dataclasses.replace(verdict, verdict="internal", reason=reason)

    def _within(self, groups: hd.Groups, relation: int) -> int:
        """Return the relation in which devices are equal if they share a group and a value."""
        if groups.ends is not None:
            sources, targets = self.relations.labels(relation)[groups.ends]
            if (sources == targets).all():  # a permute only compares sources with targets
                return groups.relation
        return self.relations.refine(groups.relation, relation)

    def _overwide(
        self, collective: Collective, channel: hc.Channel, state: hs.ValueState, proven: int
    ) -> tuple[str, tuple[str, ...] | None, int] | None:
        """Return reason, needed axes and copies of an overwide collective; None if it isn't one."""
        # With axes: the axes along which the operand is equal are not needed. Without axes: the
        # operand must be equal in subgroups that all have the same size.
        if collective.axes is not None and self.mesh is not None:
            varying = set(self.mesh.varying(state.proven))
            needed = tuple(a for a in collective.axes if a in varying)
            if len(needed) < len(collective.axes):
                spare = [a for a in collective.axes if a not in varying]
                reason = f"its operand is proven equal over {','.join(spare)}; "
                sizes = dict(self.mesh.axes)
                copies = math.prod(sizes[a] for a in spare)
                return f"{reason}needed over {','.join(needed)}", needed, copies
        if proven == hd.DISTINCT:
            return None
        counts = np.bincount(self.relations.labels(proven)[channel.groups.members])
        width, *others = set(counts[counts > 0].tolist()) or {0}
        if others or width < 2:
            return None
        return (
            f"its operand is proven equal in subgroups of {width} devices within each group "
            f"of {collective.group_size}",
            None,
            width,
        )
