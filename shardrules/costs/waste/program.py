"""Describe a judged program for the kinds of waste: its collectives' sites, loops and overlap."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from shardrules import hlo
from shardrules.costs import accounts, launches, walk
from shardrules.costs.advice import operation
from shardrules.hlo.proof import loops
from shardrules.hlo.reader import flow
from shardrules.hlo.reader.flow import BARRIERS, Node, made_by

_T = TypeVar("_T")

# For an output and the parameter that it becomes: the runs, and the first runs of host loops.
Fed = Mapping[tuple[int, int], tuple[int, int]]

# A run of fewer bytes takes about as long as its round trip: 5 us for an all-reduce at 100 GB/s.
SMALL = 256 * 1024

# How a jit with shardings writes the part of a reduction that needs no communication.
WITHIN_SHARDS = (
    "reduce x.reshape(n, -1, *x.shape[1:]) over all but its first dimension, n being the number of "
    "shards"
)

# The names under which XLA's partitioner moves an array that the program constrains.
CONSTRAINED = frozenset(
    "sharding_constraint convert_element_type abs cos exp log logistic neg rsqrt sin sqrt square "
    "tanh".split()
)

FLOATS = re.compile(r"(bf|f|c)\d")
# Opcodes that move all elements; and opcodes that move or repeat some of them.
WHOLE = frozenset("bitcast reshape copy transpose copy-start copy-done".split())
MOVES = WHOLE | BARRIERS | {"slice", "reverse", "broadcast", "all-reduce-done", "all-gather-done"}
UNARY = frozenset(
    "abs cbrt ceil convert cosine erf exponential exponential-minus-one floor imag is-finite log "
    "log-plus-one logistic negate not real reduce-precision round-nearest-afz round-nearest-even "
    "rsqrt sign sine sqrt tan tanh".split()
)
FUNCTIONS = frozenset(
    "add and atan2 clamp compare complex divide maximum minimum multiply or power remainder select "
    "subtract xor iota concatenate pad reduce dot".split()
).union(UNARY, MOVES)
_PRODUCTS = frozenset(["dot", "convolution", "custom-call"])
_MOST = 256  # the most steps to follow from one value


@dataclasses.dataclass(frozen=True)
class Hint:
    """A collective that is needed and could be cheaper."""

    kind: str  # one of ``KINDS``
    entry: accounts.Entry  # its line in the account
    # bytes_before, bytes_after: operand bytes on one device, over all runs of one execution;
    # ``bytes_before`` is None if a loop's trip count isn't known
    bytes_before: int | None
    bytes_after: int | None
    advice: str  # the change
    # round_trips_before, round_trips_after: how often all devices of a group wait for each other,
    # over all runs; a combined collective's first part counts them. None as for bytes
    round_trips_before: int | None = None
    round_trips_after: int | None = None
    # sent_before, sent_after: the wire bytes of one device, as in an account, over all runs
    sent_before: int | None = None
    sent_after: int | None = None
    waited_for: bool = False  # nothing large in its computation can overlap with it
    # The collective whose hint has the advice, if one change removes several; else None.
    goes_with: hlo.Collective | None = None

    @property
    def verdict(self) -> hlo.Verdict:
        return self.entry.judged


class Kind(NamedTuple):
    """One kind of waste; the texts are its row in docs/waste.md, in Markdown."""

    find: Callable[[Site], Hint | None]
    looks_like: str
    in_shard_map: str  # what to do there
    under_jit: str  # what to do in a jit with shardings


class Use(NamedTuple):
    """A node that takes another one."""

    user: Node
    taken: Node


class Program:
    """A judged program; it keeps the facts that several kinds need."""

    fed: Fed = MappingProxyType({})

    def __init__(self, judgement: hlo.Judgement):
        self.module = judgement.module
        self.runs = loops.executions(self.module)
        self.inputs = judgement.inputs
        self.mesh = judgement.mesh or {}
        self.partitions = judgement.partitions
        self.device_count = judgement.partitions * judgement.replicas
        self._remembered: dict[tuple[Any, ...], Any] = {}
        self.sites = [Site(self, entry) for entry in accounts.of(judgement)]
        self.collectives: dict[int, list[Site]] = {}
        for site in self.sites:
            self.collectives.setdefault(site.instruction.start, []).append(site)

    def flat(self, name: str) -> flow.Flat:
        return flow.of(self.module, name)

    def parts(self, collective: hlo.Instruction) -> list[Site]:
        return self.collectives.get(collective.start, [])

    def remembered(self, function: Callable[..., _T], *place: str | int) -> _T:
        """Return a function's result for this program and a place; call it once for each place."""
        key = (function, *place)
        if key not in self._remembered:
            self._remembered[key] = function(self, *place)
        answer: _T = self._remembered[key]
        return answer

    @functools.cached_property
    def op_names(self) -> str:
        """Return what the text's op_names suggest for a collective without one, or ""."""
        text = self.module.text
        return next((what for what in ("shard_map/", "pmap", "op_name=") if what in text), "")

    @functools.cached_property
    def asks_which_device(self) -> bool:
        """Return whether it reads a device's number; otherwise no value belongs to one device."""
        asked = itertools.chain(*self.module.opcodes.values())
        return not {"partition-id", "replica-id"}.isdisjoint(asked)

    @functools.cached_property
    def platform(self) -> str | None:
        return launches.platform(self.module)

    def is_large(self, instruction: hlo.Instruction) -> bool:
        """Return whether an instruction may take as long as a round trip."""
        opcode = instruction.opcode
        if opcode in ("dot", "convolution", "custom-call", "while", "sort", "conditional"):
            return bool(instruction.operands)
        if opcode in ("fusion", "call"):
            inner = (self.module.opcodes[name] for name in instruction.calls)
            if not {"dot", "convolution", "custom-call"}.isdisjoint(itertools.chain(*inner)):
                return True
        no_work = opcode in ("parameter", "tuple", "get-tuple-element", "bitcast", "constant")
        return not no_work and instruction.shape.bytes >= 2**20

    @functools.cached_property
    def loops(self) -> dict[str, Node]:
        """Return the loops by their bodies' names, without bodies that two loops share."""
        loops_of: dict[str, list[Node]] = {}
        wrapped: set[str] = set()  # computations that are nothing but a loop
        # Callers first: the flow of a caller has the wrapped loop in place of the call.
        for name, computation in reversed(self.module.computations.items()):
            for position in computation.calling:
                caller = computation.instructions[position]
                loop = caller if caller.opcode == "while" and name not in wrapped else None
                if caller.opcode == "call":
                    loop = flow.called_loop(self.module, caller)
                    wrapped.update(caller.calls if loop is not None else ())
                if loop is None:
                    continue
                condition, body = loops.parts(self.module, loop)
                if len(condition.parameters) == len(body.parameters) == 1:
                    loops_of.setdefault(body.name, []).append(self.flat(name).at[position])
        return {name: these[0] for name, these in loops_of.items() if len(these) == 1}

    def start(self, loop: Node) -> list[Node]:
        """Return the initial elements of a loop's carry; none if the text doesn't show them."""
        start = loop.operands[0]
        return start.operands if start.opcode == "tuple" else []

    def unchanged(self, node: Node) -> bool:
        """Return whether a value is an element of the carry that each trip passes on unchanged."""
        if node.opcode != "get-tuple-element" or node.operands[0].opcode != "parameter":
            return False
        end = self.flat(node.home.name).end.operands
        return 0 <= node.index < len(end) and made_by(end[node.index], {"copy"}) is node

    def before_loop(self, node: Node) -> Node | None:
        """Return the initial value of an element of the carry that the body doesn't change."""
        loop = self.loops.get(node.home.name)
        start = self.start(loop) if loop and self.unchanged(node) else []
        return dict(enumerate(start)).get(node.index)

    def uses(
        self, node: Node, element: int, through: frozenset[str], in_loops: bool = False
    ) -> list[Use]:
        """Return a value's uses, also behind ``through`` opcodes; none if there are too many."""
        # With ``in_loops``, follow the value also into loops that pass it on unchanged.
        ends: list[Use] = []
        stack, steps = [(node, element)], 0
        while stack:
            taken, part = stack.pop()
            steps += 1
            if steps > _MOST:
                return []
            if part in taken.elements:
                stack.append((taken.elements[part], 0))
            for user in taken.users:
                if in_loops and user.opcode in ("tuple", "return"):
                    entered = self._into_loops(user, taken)
                    if entered is None:
                        return []
                    stack += entered
                elif user.opcode == "dynamic-slice" and taken in user.operands[1:]:
                    ends.append(Use(user, taken))  # as an index
                elif user.opcode in through and _keeps_numbers(taken, user):
                    stack.append((user, part if user.shape.is_tuple else 0))
                else:
                    ends.append(Use(user, taken))
        return ends

    def _into_loops(self, user: Node, taken: Node) -> list[tuple[Node, int]] | None:
        """Return where to follow a tuple's operand in loops that pass it on unchanged, or None."""
        elements = [k for k, operand in enumerate(user.operands) if operand is taken]
        if user.opcode == "return":  # the end of a body, which may pass it on in its own place
            passed_on = len(elements) == 1 and self.before_loop(taken) is not None
            return [] if passed_on else None
        entered = []
        for taker in user.users:
            if taker not in self.loops.values():
                return None
            read, carry = (self.flat(name).parameter for name in taker.instruction.calls)
            for element in elements:
                inside = carry.elements.get(element)
                if inside is None or self.before_loop(inside) is None:
                    return None
                if carry.users or read.users or element in read.elements:
                    return None
                entered += [(inside, 0), (taker, element)]
        return entered


def _results(program: Program, computation: str, position: int) -> list[hlo.Shape]:
    """Return the shapes of a collective's results; none if the text does not show them."""
    instruction = program.module.computations[computation].instructions[position]
    leaves, count = instruction.shape.leaves(), len(instruction.operands)
    return leaves[-count:] if len(leaves) in (count, 2 * count) else []


def _overlaps(program: Program, computation: str, position: int) -> bool:
    """Return whether anything large in a computation is independent of an instruction."""
    home = program.module.computations[computation]
    instructions, users = home.instructions, home.users()
    dependent = walk.reached([position], lambda n: instructions[n].operands)
    dependent |= walk.reached([position], lambda n: users[n])
    return any(n not in dependent and program.is_large(i) for n, i in enumerate(instructions))


class Site:
    """One verdict's place: a collective, a part of a combined one or a range of a flat one."""

    def __init__(self, program: Program, entry: accounts.Entry):
        verdict, module = entry.judged, program.module
        collective = verdict.collective
        self.program = program
        self.verdict = verdict
        self.entry = entry
        self.collective = collective
        self.computation = module.computations[collective.computation]
        self.position = self.computation.places[collective.name]
        self.instruction = self.computation.instructions[self.position]
        self.operand = collective.operand  # the operand's number
        self.part = verdict.range.start if verdict.range else collective.operand
        self.key = self.instruction.start, self.part
        self.needed = verdict.verdict == "needed" and not verdict.divergent
        self.whole = verdict.range is None  # a whole operand, not a range of a flat one
        self.adds = collective.kind == "all-reduce" and collective.reduction == "add"
        # Directly in a loop that may make more than one trip.
        self.in_loop = self.computation.name in program.loops and entry.runs != 1
        maker = self.computation.instructions[self.instruction.operands[self.operand]]
        self.taken = maker.shape
        # XLA leaves some collectives without a name.
        self.op_name = name = collective.op_name or module.metadata(maker).op_name
        # If this is false, XLA's partitioner made the collective.
        called = name or self.program.op_names
        self.in_shard_map = "shard_map/" in called or "pmap" in called
        # Nothing in the text says whether a shard_map or XLA's partitioner made it.
        self.is_unnamed = not called
        # Whether a loop contains the shard_map that contains the collective.
        self.in_inner_shard_map = self.in_shard_map and bool(re.search("while.*shard_map", name))
        self.where = entry.place or collective.name  # for people
        # The axes in a line of code: 'data', or ('data', 'model').
        axes = entry.axes or self.split
        self.over = repr(axes[0] if len(axes) == 1 else axes) if axes else "axis_name"
        # The number of devices over these axes, as in a line of code.
        sizes = [program.mesh[axis] for axis in axes if axis in program.mesh]
        self.devices = str(math.prod(sizes)) if axes and len(sizes) == len(axes) else "n"
        # For an array with a new first dimension for the shards; other axes may split the rest.
        others = {axis for axis, size in program.mesh.items() if size > 1}.difference(axes)
        self.and_own = f"{self.over}, *spec" if others else self.over
        self.own_spec = f", spec being w's own without {self.over}" if others else ""

    @property
    def node(self) -> Node:
        return self.program.flat(self.computation.name).at[self.position]

    @property
    def source(self) -> Node:
        return self.node.operands[self.operand]

    @property
    def sources(self) -> list[Node]:
        """Return its operand, or all operands of a collective that has one verdict."""
        kind = self.collective.kind
        together = kind.endswith("all-to-all") or self.collective.in_place
        return [*self.node.operands] if together else [self.source]

    def made_by(self, through: frozenset[str]) -> Node:
        return made_by(self.source, through)

    def uses(self, through: frozenset[str], in_loops: bool = False) -> list[Use]:
        return self.program.uses(self.node, self.operand, through, in_loops)

    @property
    def result(self) -> hlo.Shape | None:
        """Return the shape of its operand's result; None if the text does not show it."""
        results = self.program.remembered(_results, self.computation.name, self.position)
        return results[self.operand] if results else None

    @functools.cached_property
    def split(self) -> tuple[str, ...]:
        """Return the axis of which the groups connect only parts; empty if there is none."""
        sizes = tuple(self.program.mesh.values())
        known = self.entry.axes is None and math.prod(sizes) == self.program.device_count
        if not known or self.in_shard_map:
            return ()
        places = [np.array(np.unravel_index(group, sizes)) for group in self.collective.groups]
        along = {n for of in places for n in np.flatnonzero((of != of[:, :1]).any(1))}
        return tuple(a for n, a in enumerate(self.program.mesh) if n in along and len(along) == 1)

    @property
    def is_written(self) -> bool:
        """Return whether the source asks for it by a shard_map, a constraint or a reduction."""
        # If the partitioner adds a collective for another operation's operands, or in the backward
        # pass, this depends on its other choices, so no change of the source is sure to help.
        name = self.op_name.rpartition("/")[2]
        if self.in_shard_map or self.collective.kind != "all-reduce":
            return self.in_shard_map or name in CONSTRAINED
        return self.entry.phase == "forward" and name.startswith("reduce_")

    @property
    def is_named_by_array(self) -> bool:
        """Return whether it has the name of the array that it moves, as under jit on JAX 0.12.

        A constraint may have made this array with its present sharding; then another operation
        moves it.
        """
        return "is_spmd_generated" in (self.instruction.attribute("frontend_attributes") or "")

    @functools.cached_property
    def is_for_product(self) -> bool:
        """Return whether XLA's partitioner may have gathered it for a product of its own choice."""
        by_choice = self.is_named_by_array or not self.is_written
        if self.in_shard_map or self.collective.kind != "all-gather" or not by_choice:
            return False
        through = WHOLE | BARRIERS | UNARY | {"all-gather-done"}
        return any(use.user.opcode in _PRODUCTS for use in self.uses(through, True))

    @property
    def is_gradient(self) -> bool:
        """Return whether this sums a gradient under jit, on CPU, where XLA does not move it."""
        # XLA for TPU and GPU adds such sums first, and moves them behind loops.
        is_jit = not self.in_shard_map and not self.is_unnamed and not self.is_written
        is_backward = self.entry.phase == "backward"
        return self.adds and is_jit and is_backward and self.program.platform is None

    def own_gradients(self, kept: str, when: str) -> str:
        """Return advice on how to add up each shard's own gradient in ``kept``."""
        return (
            "add up each shard's own gradient, jax.vmap(jax.grad(loss), (None, 0))(w, "
            "x.reshape(n, -1, *x.shape[1:])) for n shards of the batch, in "
            f"{kept} sharded by P({self.and_own}){self.own_spec}, and once {when} take jnp.mean "
            "over the shards for a loss that is a mean over the batch, jnp.sum for one that is a "
            "sum (XLA for TPU and GPU moves it there by itself)"
        )

    def runs_of(self, computation: str) -> int:
        """Return how often another computation runs; 1 if that isn't known."""
        run = self.program.runs.get(computation)
        return (run.count if run else None) or 1

    def pays_alone(self, after: int | None) -> bool:
        """Return whether fewer bytes are worth a part's own round trip outside its collective."""
        before = self.in_all(self.entry.bytes)
        return before is not None and after is not None and before - after > SMALL

    def in_all(self, amount: int) -> int | None:
        """Return the amount of one run times the number of runs; None if that isn't known."""
        return None if self.entry.runs is None else self.entry.runs * amount

    def hint(
        self,
        advice: str,
        *,
        bytes_after: int | None = 0,
        trips_after: int | None = 0,
        sent_after: int | None = None,
        together: bool = False,
        goes_with: Site | None = None,
    ) -> Hint:
        """Return a hint; the numbers after the change are over all runs, 0 for no collective.

        ``together``: the collective's other parts share its round trips. ``goes_with``: the site
        whose hint has the advice.
        """
        entry = self.entry
        first = self.program.parts(self.instruction)[0] is self
        # The kind of collective stays, unless ``sent_after`` is given.
        if sent_after is None and bytes_after is not None and entry.bytes:
            sent_after = -(-bytes_after * entry.wire_bytes // entry.bytes)
        return Hint(
            "",
            entry,
            self.in_all(entry.bytes),
            bytes_after,
            advice,
            entry.runs if first else 0,
            trips_after if first or not together else 0,
            self.in_all(entry.wire_bytes),
            sent_after,
            not self.program.remembered(_overlaps, self.computation.name, self.position),
            None if goes_with is None else goes_with.collective,
        )

    def is_equal_input(self, node: Node) -> bool:
        """Return whether a program's parameter is proven equal in each of the groups."""
        number = int(node.instruction.literal)
        given = self.program.inputs[number : number + 1]
        return bool(given) and given[0].equal_in(self.collective.groups)

    def smaller(self, advice: str, size: int, sent: int | None = None) -> Hint:
        """Return a hint for runs of fewer bytes, or of another kind that sends fewer bytes."""
        return self.hint(
            advice,
            bytes_after=self.in_all(size),
            trips_after=self.entry.runs,
            sent_after=None if sent is None else self.in_all(sent),
            together=sent is None,
        )

    def cast(self, where: str) -> str:
        """Return the line to type if the psum may be the gradient of a replicated array.

        The check gives such a psum its own name. With the check off, on JAX up to 0.5.3 and outside
        of shard_map, ``vary`` does nothing.
        """
        checked = operation(self.collective) == "psum_invariant"
        if self.entry.phase != "backward" or not self.entry.axes or not checked:
            return ""
        return (
            f"; if it is the gradient of a replicated array, cast that array {where} instead: "
            f"x = shardrules.vary(x, {', '.join(map(repr, self.entry.axes))})"
        )


def is_constant(node: Node) -> bool:
    """Return whether a value depends only on constants and unfilled buffers."""
    stack, steps = [node], 0
    while stack and (steps := steps + 1) < _MOST:
        maker = stack.pop()
        stack += maker.operands
        if maker.opcode not in FUNCTIONS | {"constant"} and not is_unfilled(maker):
            return False
    return not stack


def is_unfilled(node: Node) -> bool:
    """Return whether a value is a buffer that is filled before it is read (a TPU stack's start)."""
    return node.opcode == "custom-call" and walk.target(node.instruction) == "AllocateBuffer"


def is_zero(node: Node) -> bool:
    spread = frozenset("bitcast reshape copy transpose broadcast convert".split())
    maker = made_by(node, spread)
    return maker.opcode == "constant" and walk.is_zero(maker.instruction)


def _keeps_numbers(taken: Node, taker: Node) -> bool:
    """Return whether a bitcast or a conversion keeps the numbers, except for rounding."""
    if taker.opcode == "bitcast":  # with another element type, the bits are other numbers
        return taken.shape.element_type == taker.shape.element_type
    return taker.opcode != "convert" or FLOATS.match(taker.shape.element_type) is not None
