"""A proof that a jaxpr is linear, equation by equation, through loops and Pallas kernels."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from shardrules.door.jaxprs import (
    CALLS,
    CASTS,
    KERNELS,
    NEW_REFS,
    SUMS,
    equations,
    inner_jaxprs,
    is_inexact,
    name_of,
    opened,
    scan_counts,
)

# How a value depends on the inputs: it is zero, it doesn't, linearly, or in an unknown way.
_ZERO, _FIXED, _LINEAR, _UNKNOWN = "zero", "fixed", "linear", "unknown"
_KNOWN = frozenset({_ZERO, _FIXED})

# JAX's primitives that are linear in all operands of a float type together, whose other operands
# are positions; collectives that are, too; those that are linear in one operand while the other is
# fixed; and in the first one.
_TOGETHER = frozenset(
    "add_any sub add neg reduce_sum broadcast_in_dim reshape transpose squeeze slice "
    "concatenate copy rev cumsum real imag reduce_precision pad split stack unstack tile "
    "dynamic_update_slice scatter scatter-add reduce_window_sum roll repeat name "
    "with_memory_space_constraint sharding_constraint layout_constraint".split()
)
_MOVES = frozenset("ppermute all_gather all_gather_invariant all_to_all reduce_scatter".split())
_BILINEAR = frozenset("mul dot_general conv_general_dilated".split())
_IN_FIRST = frozenset("div dynamic_slice gather".split())
_MORE_CALLS = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}
# Primitives that only read and store, by the names of JAX 0.6 to 0.12.
_STORES = frozenset("get swap addupdate masked_load masked_swap load freeze".split())
_COPIES = frozenset("dma_start dma_wait".split())


def linear_in(jaxpr: Any, inputs: Sequence[Any], kernels: bool = False) -> frozenset[str] | None:
    """Return the mesh axes that a jaxpr sums over if it is linear in ``inputs``, else None.

    Over these axes, the sum of the devices' results is not one device's result for the sum. With
    ``kernels``, Pallas kernels are read, and collectives may move the inputs.
    """
    run = _Run(kernels)
    given = [_LINEAR if v in inputs else _FIXED for v in jaxpr.invars]
    results, run.stored = None, True
    while results is None or run.stored:  # a ref may be read before it is written, in a loop
        run.stored = False
        results = run.jaxpr(jaxpr, given)
    return frozenset(run.summed) if {_LINEAR, _ZERO}.issuperset(results) else None


def sums_of_others(jaxpr: Any, inputs: Sequence[Any]) -> frozenset[str]:
    """Return the mesh axes of a jaxpr's sums of what doesn't depend on ``inputs``."""
    run = _Run(False)
    run.jaxpr(jaxpr, [_LINEAR if v in inputs else _FIXED for v in jaxpr.invars])
    return frozenset(run.summed_of_others)


class _Cell:
    """A ref: what was ever stored to it, and zero before."""

    def __init__(self, kind: str = _ZERO):
        self.kind = kind


class _Run:
    def __init__(self, kernels: bool):
        self.kernels = kernels
        self.summed: set[str] = set()
        self.summed_of_others: set[str] = set()
        self.stored = False  # whether a cell changed
        self._refs: dict[tuple[int, int], _Cell] = {}  # by the equation that makes it

    def jaxpr(self, jaxpr: Any, given: Sequence[Any], consts: Sequence[Any] = ()) -> list[Any]:
        env = dict(zip(jaxpr.invars, given)) | dict(zip(jaxpr.constvars, consts))

        def kind(atom):
            if hasattr(atom, "val"):
                return _ZERO if getattr(atom.val, "size", 1) == 1 and atom.val == 0 else _FIXED
            return env.get(atom, _FIXED)

        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self._equation(eqn, [kind(a) for a in eqn.invars])))
        return [kind(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: Any, given: list[Any]) -> Sequence[Any]:
        name, params = name_of(eqn), eqn.params
        key = CALLS.get(name) or _MORE_CALLS.get(name)
        if key is not None:
            return self.jaxpr(opened(params[key]), given)
        if name == "cond" and given[0] in _KNOWN:
            branches = [self.jaxpr(opened(branch), given[1:]) for branch in params["branches"]]
            return [_join(kinds) for kinds in zip(*branches)]
        if name == "scan":
            constants, carry = scan_counts(params)
            body = opened(params["jaxpr"])
            return self._loop(body, given[:constants], given[constants:], carry)
        if name == "while":
            tested, constants = params["cond_nconsts"], params["body_nconsts"]
            rest = given[tested:]
            results = self._loop(
                opened(params["body_jaxpr"]), rest[:constants], rest[constants:], None
            )
            goes_on = self.jaxpr(opened(params["cond_jaxpr"]), [*given[:tested], *results])
            if _KNOWN.issuperset(goes_on):
                return results
        if name == "run_scoped":
            body = opened(params["jaxpr"])
            # The same cells in each pass: a loop around them ends when none of them changes.
            refs = [self._cell(eqn, n) for n in range(len(body.invars))]
            return self.jaxpr(body, refs, given)
        if name in NEW_REFS:
            return [self._cell(eqn, 0, _join(given))]
        if any(isinstance(x, _Cell) for x in given):  # also a loop or a branch that is unknown
            return [self._on_refs(eqn, name, given)] * len(eqn.outvars)
        if name == "pallas_call" and self.kernels:
            return self._kernel(params, given)
        if name == "optimization_barrier":
            return given
        return [self._result(eqn, name, given)] * len(eqn.outvars)

    def _cell(self, eqn: Any, number: int, kind: str = _ZERO) -> _Cell:
        """Return the ref that an equation makes, with what was stored to it in earlier passes."""
        return self._refs.setdefault((id(eqn), number), _Cell(kind))

    def _loop(self, body: Any, constants: list, rest: list, count: int | None) -> list[Any]:
        carry, rest = rest[:count], rest[len(rest) if count is None else count :]
        while True:
            results = self.jaxpr(body, [*constants, *carry, *rest])
            joined = [_join(pair) for pair in zip(carry, results)]
            if joined == carry:
                return [*carry, *results[len(carry) :]]
            carry = joined

    def _kernel(self, params: dict[str, Any], given: list[str]) -> list[str]:
        mapping, jaxpr = params["grid_mapping"], opened(params["jaxpr"])
        dynamic = getattr(mapping, "num_dynamic_grid_bounds", 0)
        positions = given[: dynamic + mapping.num_index_operands]
        inputs = given[dynamic:]
        cells = [_Cell(kind) for kind in inputs]
        cells += [_Cell() for _ in jaxpr.invars[len(inputs) :]]
        for source, output in params.get("input_output_aliases", ()):  # the same memory
            cells[len(inputs) + output] = cells[source]
        before, changed = self.stored, True
        while changed:
            self.stored = False
            self.jaxpr(jaxpr, cells)
            changed = self.stored
        self.stored = before
        outputs = cells[len(inputs) : len(inputs) + mapping.num_outputs]
        return [c.kind if _KNOWN.issuperset(positions) else _UNKNOWN for c in outputs]

    def _on_refs(self, eqn: Any, name: str, given: list[Any]) -> str:
        """Note what an equation stores, and return the kind of what it reads."""
        data: list[str] = []
        positions: list[str] = []
        cells = [kind for kind in given if isinstance(kind, _Cell)]
        for atom, kind in zip(eqn.invars, given):
            if not isinstance(kind, _Cell):
                (data if is_inexact(atom.aval) else positions).append(kind)
        if "semaphore" in name:
            return _FIXED
        known = name in _STORES or name in _COPIES
        if name == "atomic_rmw":
            known = getattr(eqn.params["atomic_type"], "value", None) == "add"
        if not is_inexact(eqn.invars[0].aval):  # integers that are data or positions
            data, positions = [*data, *positions], []
        if not known or not _KNOWN.issuperset(positions):
            data.append(_UNKNOWN)
        if name not in ("get", "freeze"):
            kind = _join([*data, *(cell.kind for cell in cells if name in _COPIES)])
            for cell in cells:
                self._store(cell, kind)
        return _join([*data, *(cell.kind for cell in cells)])

    def _store(self, cell: _Cell, kind: str) -> None:
        joined = _join((cell.kind, kind))
        self.stored |= joined != cell.kind
        cell.kind = joined

    def _result(self, eqn: Any, name: str, given: list[str]) -> str:
        avals = [atom.aval for atom in eqn.invars]
        if _KNOWN.issuperset(given):
            inner = () if name in KERNELS else inner_jaxprs(eqn.params)
            for other in (eqn, *(e for jaxpr in inner for e in equations(jaxpr))):
                self.summed_of_others |= strings(other.params) if name_of(other) in SUMS else set()
            zero = set(given) == {_ZERO} and name in _TOGETHER | CASTS | {"convert_element_type"}
            return _ZERO if zero or (name in _BILINEAR and _ZERO in given) else _FIXED
        update = opened(eqn.params.get("update_jaxpr"))
        if name == "scatter" and update is not None and update.eqns:  # scatter_apply
            return _UNKNOWN
        if name == "convert_element_type":
            kinds = [
                is_inexact(a) and a.dtype.itemsize > 1 for a in (avals[0], eqn.outvars[0].aval)
            ]
            return given[0] if all(kinds) else _UNKNOWN
        if name == "select_n":
            return _join(given[1:]) if given[0] in _KNOWN else _UNKNOWN
        if (name in SUMS and not eqn.params.get("axis_index_groups")) or (
            self.kernels and name in _MOVES
        ):
            self.summed |= strings(eqn.params)
            return _join(given)
        if name in _TOGETHER or name in CASTS:
            data = [kind for kind, aval in zip(given, avals) if is_inexact(aval)]
            rest = [kind for kind, aval in zip(given, avals) if not is_inexact(aval)]
            return _join(data) if _KNOWN.issuperset(rest) else _UNKNOWN
        if name in _BILINEAR and _ZERO in given:
            return _ZERO
        if name in _BILINEAR:
            return _LINEAR if sorted(given) == [_FIXED, _LINEAR] else _UNKNOWN
        if name == "triangular_solve":
            return _LINEAR if given[0] in _KNOWN else _UNKNOWN
        if name == "gather" and eqn.params.get("fill_value") not in (None, 0):
            return _UNKNOWN
        return given[0] if name in _IN_FIRST and _KNOWN.issuperset(given[1:]) else _UNKNOWN


def _join(kinds: Iterable[Any]) -> Any:
    """Return the kind of a value that may be any of these."""
    kinds = set(kinds) - {_ZERO}
    return functools.reduce(lambda a, b: a if a == b else _UNKNOWN, kinds) if kinds else _ZERO


def strings(params: dict[str, Any]) -> frozenset[str]:
    """Return all strings in an equation's parameters, which include its mesh axes."""
    names: set[str] = set()
    queue = list(params.values())
    while queue:
        value = queue.pop()
        if isinstance(value, str):
            names.add(value)
        elif isinstance(value, (tuple, list, set, frozenset)):
            queue += value
    return frozenset(names)
