"""Fold an analysis over a jaxpr: through equations, calls, branches, loops, refs and kernels.

An analysis is a subclass of ``Fold``. It defines its values (``bottom``, ``literal``, ``join``),
and the value of a primitive's results for given values of its operands (``other``: from its own
table, with a safe answer for a primitive that isn't in the table). Only this module handles
nesting: what a branch, a loop, a ref or a kernel passes to its inner jaxprs, and what they return.

A ref is a ``Cell``, which holds the join of all values that were ever stored to it. The whole jaxpr
is read again until no cell changes. A loop's carry is joined with the body's results until it stops
changing. Both repetitions end, because ``join`` only widens a value and there are few values. If an
analysis still reads more than ``MOST_EQUATIONS``, it raises ``TooLong``. This is a monotone
framework (Kildall, POPL 1973; Kam and Ullman, 1977): if an analysis is monotone, its result holds
on every path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from shardrules.door.jaxprs import (
    CALLS,
    CUSTOM_CALLS,
    KERNELS,
    NEW_REFS,
    READS,
    inner_jaxprs,
    name_of,
    opened,
    scan_counts,
)
from shardrules.door.protocols import Eqn, Jaxpr, Var
from shardrules.errors import ShardrulesError

V = TypeVar("V")

_UNSEEN: Any = object()
MOST_EQUATIONS = 2_000_000  # the most equations to read; each pass counts an equation again


class TooLong(ShardrulesError):
    """A jaxpr whose loops and refs take too many passes to settle."""


class Cell(Generic[V]):
    """A ref, as the join of all values that were ever stored to it."""

    __slots__ = ("value",)

    def __init__(self, value: V):
        self.value = value


class Fold(Generic[V]):
    """One analysis of one jaxpr; call ``run`` once."""

    reads_kernels: bool = False  # whether to read the jaxprs of Pallas kernels

    bottom: V  # the value of an empty cell; joining it with another value gives that other value

    def literal(self, value: Any) -> V:
        """Return the value of a literal in the jaxpr."""
        raise NotImplementedError

    def constant(self, var: Var) -> V:
        """Return the value of a constant that the jaxpr closes over."""
        raise NotImplementedError

    def join(self, values: Iterable[V]) -> V:
        """Return the value of a variable that may hold any of these."""
        raise NotImplementedError

    def mixed(self, values: Iterable[V]) -> V:
        """Return the value of a result that is computed from all of these in an unknown way."""
        return self.join(values)

    def chosen(self, by: V, value: V) -> V:
        """Return the value chosen by a predicate or a position whose value is ``by``."""
        raise NotImplementedError

    def other(self, eqn: Eqn, name: str, operands: list[V]) -> Sequence[V]:
        """Return the values of an equation's results, if its nesting is not handled here.

        Look up its primitive; give the safe answer for an unknown primitive. The equation takes no
        refs.
        """
        raise NotImplementedError

    def on_refs(self, eqn: Eqn, name: str, operands: list[Any]) -> Sequence[Any]:
        """Return the values of an equation that takes refs, and ``store`` what it may write."""
        results, joined = self.anything(eqn, operands)
        return self.one_step(eqn, operands, joined) if results is None else results

    def finished(self, jaxpr: Jaxpr, read: Callable[[Any], V]) -> None:
        """Take notes after a jaxpr was read; ``read`` returns an atom's value."""

    def __init__(self) -> None:
        self.around: list[Eqn] = []  # the enclosing equations, whose jaxprs are being read
        # the enclosing equations as a key for this use of a jaxpr, which several may share
        self.place: tuple[Any, ...] = ()
        self._cells: dict[tuple[Any, ...], Cell[V]] = {}
        self._changed = False  # whether a cell changed in this pass
        self._count = 0

    def run(self, jaxpr: Jaxpr, given: Sequence[V]) -> list[V]:
        """Return the values of a jaxpr's outputs for these values of its inputs.

        Raises:
          TooLong: if its loops and refs don't settle within MOST_EQUATIONS.
        """
        # Ignore the order of reads and writes: in a loop, a read may run after a write that stands
        # below it. So each read must return the join of all writes. If a pass widened a cell,
        # earlier reads of that cell in the pass were too narrow: read the whole jaxpr again. This
        # ends, since cells only widen. In the last pass no cell changed, so all reads were right.
        while True:
            self._changed = False
            entering: list[Any] = [
                self._cell(jaxpr, n, value) if hasattr(var.aval, "inner_aval") else value
                for n, (var, value) in enumerate(zip(jaxpr.invars, given))
            ]
            results = self.jaxpr(jaxpr, entering)
            if not self._changed:
                return [self.content(result) for result in results]

    def jaxpr(self, jaxpr: Jaxpr, given: Sequence[Any], consts: Sequence[Any] = ()) -> list[Any]:
        """Return the values of a jaxpr's outputs in this pass; refs are ``Cell``s."""
        env = dict(zip(jaxpr.invars, given))
        if consts:
            env.update(zip(jaxpr.constvars, consts))

        def read(atom: Var) -> Any:
            if hasattr(atom, "val"):
                return self.literal(atom.val)
            value = env.get(atom, _UNSEEN)
            if value is _UNSEEN:
                value = env[atom] = self.constant(atom)
            return value

        self._count += len(jaxpr.eqns)
        if self._count > MOST_EQUATIONS:
            raise TooLong(
                f"a function's loops and refs don't settle: after {MOST_EQUATIONS:,} equations its "
                "values still change. Nest fewer loops in it"
            )
        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self.equation(eqn, [read(a) for a in eqn.invars])))
        self.finished(jaxpr, read)
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
        """Return the values of an equation's results."""
        # If this module handles the equation's nesting, its own function reads it. Any other
        # equation that takes a ref may read or write the ref. All the rest go to the analysis.
        name = name_of(eqn)
        nested = _NESTED.get(name)
        if nested is not None:
            return nested(self, eqn, operands)
        for operand in operands:
            if isinstance(operand, Cell):  # even if the primitive is unknown
                return self.on_refs(eqn, name, operands)
        return self.other(eqn, name, operands)

    def one_step(self, eqn: Eqn, operands: list[Any], joined: V) -> list[V]:
        """Return ``joined`` for each result of an equation, and store it to its refs."""
        if name_of(eqn) not in READS:
            for operand in operands:
                if isinstance(operand, Cell):
                    self.store(operand, joined)
        return [joined] * len(eqn.outvars)

    # Cells.

    def content(self, value: Any) -> V:
        content: V = value.value if isinstance(value, Cell) else value
        return content

    def store(self, cell: Cell[V], value: V) -> None:
        joined = self.join((cell.value, value))
        if joined != cell.value:
            cell.value = joined
            self._changed = True

    def _cell(self, maker: Any, number: int, value: V) -> Cell[V]:
        """Return the ref that an equation makes, with the values that earlier passes stored."""
        # The key holds the place, since a jaxpr that is traced once may run in several places, and
        # makes different refs in each place.
        key = (*self.place, id(maker), number)
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = Cell(value)
        else:
            self.store(cell, value)
        return cell

    def _either(self, values: Sequence[Any]) -> Any:
        """Return the join of one result of several branches or passes."""
        cells = [value for value in values if isinstance(value, Cell)]
        if not cells:
            return self.join(values)
        # The result may be any of several refs. A write to it may be a write to each of them, so
        # let all of them hold the same value.
        joined = self.join(map(self.content, values))
        for cell in cells:
            self.store(cell, joined)
        return cells[0]

    def _choose(self, by: V, values: Iterable[Any]) -> list[Any]:
        """Return values as chosen by a predicate; for a ref, choose its content."""
        made: list[Any] = []
        for value in values:
            if isinstance(value, Cell):
                self.store(value, self.chosen(by, value.value))
                made.append(value)
            else:
                made.append(self.chosen(by, value))
        return made

    # Nested jaxprs.

    def inside(
        self, eqn: Eqn, jaxpr: Jaxpr, given: Sequence[Any], consts: Sequence[Any] = (), at: int = 0
    ) -> list[Any]:
        """Return the values of the outputs of a jaxpr in an equation's parameters."""
        outside = self.place
        self.place = (*outside, id(eqn), at)
        self.around.append(eqn)
        results = self.jaxpr(opened(jaxpr), given, consts)
        self.around.pop()
        self.place = outside
        return results

    def anything(self, eqn: Eqn, operands: list[Any]) -> tuple[list[Any] | None, V]:
        """Read the jaxprs of an equation whose primitive is unknown.

        Returns the results if the equation has a single jaxpr that takes all its operands, else
        None. Also returns the mix of all operands and of all values that the jaxprs return and
        store. The jaxpr of a kernel is not read.
        """
        # We don't know which operand goes to which input, how often a jaxpr runs, or in what order.
        # So pass the mix of all operands, results and stored values to each input of each jaxpr,
        # until a pass adds nothing. There is one exception: a single jaxpr with as many inputs and
        # outputs as its equation is a call, so its inputs are the operands in order.
        joined = self.mixed(map(self.content, operands))
        inner = [] if name_of(eqn) in KERNELS else list(inner_jaxprs(eqn.params))
        if [(len(j.invars), len(j.outvars)) for j in inner] == [(len(operands), len(eqn.outvars))]:
            return self.inside(eqn, inner[0], operands), joined
        while inner:
            before = joined
            for at, jaxpr in enumerate(inner):
                given = [
                    self._cell(eqn, n, joined) if hasattr(var.aval, "inner_aval") else joined
                    for n, var in enumerate(jaxpr.invars)
                ]
                results = self.inside(eqn, jaxpr, given, [joined] * len(jaxpr.constvars), at)
                joined = self.mixed(map(self.content, (joined, *results, *given)))
            if joined == before:
                break
        return None, joined

    def _call(self, eqn: Eqn, operands: list[Any]) -> list[Any]:
        return self.inside(eqn, eqn.params[_CALLS[name_of(eqn)]], operands)

    def _barrier(self, eqn: Eqn, operands: list[Any]) -> list[Any]:
        return operands

    def _cond(self, eqn: Eqn, operands: list[Any]) -> list[Any]:
        # Read each branch with the same operands. A result is the join of the branches' results,
        # chosen by the predicate, since devices whose predicates differ take different branches.
        # The same holds for refs: each branch stores to them, and the predicate chooses which of
        # these writes happen.
        chosen, *given = operands
        branches = eqn.params["branches"]
        results = [self.inside(eqn, branch, given, at=at) for at, branch in enumerate(branches)]
        self._choose(chosen, (value for value in given if isinstance(value, Cell)))
        return self._choose(chosen, map(self._either, zip(*results)))

    def _scan(self, eqn: Eqn, operands: list[Any]) -> list[Any]:
        constants, carries = scan_counts(eqn.params)
        first, carry = operands[:constants], operands[constants : constants + carries]
        slices = operands[constants + carries :]
        # The body may get the carry of any iteration. So start with the initial carry, and join it
        # with the body's results until it stops changing. All devices run the same number of
        # iterations, so no predicate chooses.
        while True:
            results = self.inside(eqn, eqn.params["jaxpr"], [*first, *carry, *slices])
            joined = [self._either(pair) for pair in zip(carry, results)]
            if joined == carry:
                return [*carry, *results[carries:]]
            carry = joined

    def _while(self, eqn: Eqn, operands: list[Any]) -> list[Any]:
        params = eqn.params
        of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
        tested, first = operands[:of_cond], operands[of_cond : of_cond + of_body]
        carry = operands[of_cond + of_body :]
        # As in a scan, but the predicate decides how many iterations a device runs, and so with
        # which carry it ends. So the predicate chooses the results and the values that the body
        # stores.
        while True:
            (goes_on,) = self.inside(eqn, params["cond_jaxpr"], [*tested, *carry], at=0)
            results = self.inside(eqn, params["body_jaxpr"], [*first, *carry], at=1)
            self._choose(goes_on, (value for value in first if isinstance(value, Cell)))
            results = self._choose(goes_on, results)
            joined = [self._either(pair) for pair in zip(carry, results)]
            if joined == carry:
                return carry
            carry = joined

    def _new_ref(self, eqn: Eqn, operands: list[Any]) -> list[Any]:
        return [self._cell(eqn, 0, self.join(map(self.content, operands)))]

    def _run_scoped(self, eqn: Eqn, operands: list[Any]) -> list[Any]:
        body = opened(eqn.params["jaxpr"])
        refs = [self._cell(eqn, n, self.bottom) for n in range(len(body.invars))]
        return self.inside(eqn, body, refs, operands)

    def _pallas_call(self, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
        if not self.reads_kernels or any(isinstance(value, Cell) for value in operands):
            return self.other(eqn, name_of(eqn), operands)
        mapping, body = eqn.params["grid_mapping"], opened(eqn.params["jaxpr"])
        dynamic = getattr(mapping, "num_dynamic_grid_bounds", 0)
        # Grid bounds and prefetched operands decide which blocks a kernel reads and writes, so they
        # choose the outputs, as a predicate does.
        positions = self.join(operands[: dynamic + mapping.num_index_operands])
        inputs = operands[dynamic:]
        # A kernel's body gets its operands and outputs as refs. The grid runs the body many times
        # on blocks of these refs. Cells hold the join of all stored values, which covers any order
        # of the runs. So one read of the body per pass is enough.
        cells = [self._cell(eqn, n, value) for n, value in enumerate(inputs)]
        aliases = dict(eqn.params.get("input_output_aliases", ()))
        of_output = {output: cells[source] for source, output in aliases.items()}  # the same memory
        for n in range(len(inputs), len(body.invars)):
            cell = of_output.get(n - len(inputs))
            cells.append(self._cell(eqn, n, self.bottom) if cell is None else cell)
        self.inside(eqn, body, cells)
        outputs = cells[len(inputs) : len(inputs) + mapping.num_outputs]
        return [self.chosen(positions, cell.value) for cell in outputs]


_CALLS = CALLS | CUSTOM_CALLS
_NESTED: dict[str, Callable[[Any, Eqn, list[Any]], Sequence[Any]]] = {
    **dict.fromkeys(_CALLS, Fold._call),
    "optimization_barrier": Fold._barrier,
    "cond": Fold._cond,
    "scan": Fold._scan,
    "while": Fold._while,
    **dict.fromkeys(NEW_REFS, Fold._new_ref),
    "run_scoped": Fold._run_scoped,
    "pallas_call": Fold._pallas_call,
}
NESTED = frozenset(_NESTED)
