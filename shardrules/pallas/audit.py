"""Does a Pallas kernel's own jaxpr prove that it does not communicate?

The audit is an allow list: what is not known to be a function of this device's operands is not
proven. It says which assumptions the proof rests on, and names what stands in its way.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from shardrules.errors import UnsupportedJaxError
from shardrules.hooks.audit_names import AuditNames, load_audit
from shardrules.pallas.actions import mesh_axes
from shardrules.pallas.events import SOME, WHOLE, Blocker, Root, Scope, Walk
from shardrules.pallas.flow import Ids, Runner, Values, covers, settled

__all__ = ["Audit", "audit", "audit_call", "prove"]

COVERED = "the grid and the stores cover every element of every output"
IN_ORDER = "the grid's programs run one after the other, as they do on TPUs"
FROM_THE_START = ("each core starts in the grid's first iteration (a core that starts elsewhere "
                  "would find its scratch empty)")
NO_RACES = ("copies are waited for before their buffers are used again, and barriers order the "
            "threads")
NO_CLASHES = "programs that run at the same time don't store to the same elements"
EDGES = "what lies beyond the edge of an array in its last block reaches no output"
MASKED = "elements that a mask leaves out of a load without other= reach no output"
FIRST_PRODUCT = "the first product into a tensor core's accumulator does not accumulate"

_FIXED_ORDER = ("add", "and", "or", "xor", "max", "min", "umax", "umin")
_MOST_PROGRAMS = 4096  # a bound on the work, where every program of a grid is tried
_GPU = ("gpu", "triton", "mosaic_gpu")
_SHARED_SPACES = ("any", "hbm", "gmem")


@dataclasses.dataclass(frozen=True)
class Audit:
    """What the audit of a kernel says.

    Args:
      proven: whether the outputs are a function of this device's operands.
      blockers: why not; empty if proven.
      assumptions: what the proof takes for granted, one sentence each.
    """

    proven: bool
    blockers: tuple[Blocker, ...] = ()
    assumptions: tuple[str, ...] = ()

    @property
    def contradicts_no_communication(self) -> bool:
        """Whether the jaxpr shows communication, or that it reads where its device stands."""
        return any(blocker.communicates for blocker in self.blockers)

    def __str__(self) -> str:
        if self.proven:
            return "proven, assuming that " + "; that ".join(self.assumptions)
        return "not proven:\n  " + "\n  ".join(map(str, self.blockers))


@dataclasses.dataclass(frozen=True)
class _Signature:
    """Which of a kernel's variables are what. The rest are scratch."""

    inputs: int
    outputs: int
    aliases: dict  # output -> input


def audit(kernel_jaxpr: Any, *, grid_mapping: Any = None, platform_hint: str | None = None,
          inputs: int | None = None, outputs: int = 0, aliases: dict[int, int] | None = None,
          local_axes: Iterable[str] = (), parallel_axes: Iterable[int] | None = None) -> Audit:
    """Say whether a kernel's jaxpr proves that its outputs follow from this device's operands.

    Args:
      kernel_jaxpr: the kernel's jaxpr, on refs.
      grid_mapping: that of its pallas_call.
      platform_hint: "tpu", "triton", "mosaic_gpu", "gpu", or None where it isn't known yet.
      inputs: where there is no grid mapping, how many variables are operands; None for all.
      outputs: where there is no grid mapping, how many of the next ones are outputs.
      aliases: for outputs that start as an operand does, output number -> operand number.
      local_axes: axis names of the kernel's own cores or threads.
      parallel_axes: axes of the grid that may be split over cores; None where it isn't known.

    Returns:
      The audit; a jaxpr that can't be understood is not proven.
    """
    names = load_audit()
    grid_names = getattr(grid_mapping, "grid_names", None) or ()
    walk = Walk(names, (*local_axes, *(n for n in grid_names if isinstance(n, str))),
                _place_of(kernel_jaxpr))
    if grid_mapping is None:
        count = len(kernel_jaxpr.invars) if inputs is None else inputs
        signature = _Signature(count, outputs, dict(aliases or {}))
    else:
        signature = _Signature(grid_mapping.num_index_operands + grid_mapping.num_inputs,
                               grid_mapping.num_outputs, dict(aliases or {}))
        scratch = grid_mapping.num_scratch_operands
        if len(kernel_jaxpr.invars) != signature.inputs + signature.outputs + scratch:
            return Audit(False, (Blocker(
                "pallas_call", f"the kernel takes {len(kernel_jaxpr.invars)} refs, but its grid "
                f"mapping holds {signature.inputs} operands, {signature.outputs} outputs and "
                f"{scratch} scratch buffers", walk.kernel_place),))
    if platform_hint is None:
        platform_hint = _platform_of(kernel_jaxpr)
    scope, roots = _bind(walk, kernel_jaxpr, signature, platform_hint)
    events = walk.walk(scope)
    grid = _Grid(walk, grid_mapping, roots[:signature.inputs])
    if walk.blockers:
        # What is not allowed need not tell what it stores: the rest would be guesswork.
        return _answer(walk, [])
    return _Proof(walk, events, grid, signature, roots, platform_hint,
                  None if parallel_axes is None else frozenset(parallel_axes)).answer()


def _place_of(jaxpr: Any) -> str:
    """Return ``file:line`` of a kernel."""
    info = getattr(jaxpr, "debug_info", None)
    return getattr(info, "func_src_info", "").partition(" at ")[2] or "unknown place"


def _bind(walk: Walk, jaxpr: Any, signature: _Signature, platform: str | None):
    """Give each of the kernel's variables its buffer."""
    scope = Scope(jaxpr)
    for i, var in enumerate(jaxpr.constvars):
        if isinstance(var.aval, walk.names.AbstractRef):
            scope.refs[var] = walk.new_root(f"closed-over ref {i}", var.aval, ready=True,
                                            foreign=True)
    roots: list[Root | None] = []
    for i, var in enumerate(jaxpr.invars):
        root = None
        number = i - signature.inputs
        if not isinstance(var.aval, walk.names.AbstractRef):
            pass  # a scalar operand
        elif number < 0:
            root = walk.new_root(f"operand {i}", var.aval, ready=True, foreign=True)
        elif number < signature.outputs:
            source = signature.aliases.get(number)
            # A block of an aliased output is the operand's memory only where blocks are not
            # copies of their own.
            if source is not None and roots[source] is not None and (
                    platform == "triton" or _space(var.aval) in _SHARED_SPACES):
                root = roots[source]
                root.output = number
            else:
                root = walk.new_root(f"output {number}", var.aval, foreign=True, output=number)
        else:
            root = walk.new_root(f"scratch {number - signature.outputs}", var.aval)
        roots.append(root)
        if root is not None:
            scope.refs[var] = root
    return scope, roots


def _space(aval: Any) -> str:
    space = getattr(aval, "memory_space", None)
    return str(getattr(space, "value", space)).lower()


def _platform_of(jaxpr: Any) -> str | None:
    spaces = {_space(var.aval) for var in jaxpr.invars}
    if spaces & {"vmem", "semaphore_mem"}:
        return "tpu"
    return "gpu" if spaces & {"gmem", "tmem"} else None


class _Grid:
    """The grid of a pallas_call, as its kernel counts its axes.

    Args:
      walk: where what is not allowed in an index map is noted.
      mapping: the grid mapping, or None.
      operands: the buffers of the operands.
    """

    def __init__(self, walk: Walk, mapping: Any, operands: list):
        self.sizes: tuple = ()
        self.trailing: list[tuple[int, ...]] = []
        self.overhangs = False
        if mapping is None:
            return
        batched = set(mapping.vmapped_dims)
        counted = [a for a in range(len(mapping.grid)) if a not in batched]
        self.sizes = tuple(
            mapping.grid[a] if isinstance(mapping.grid[a], int) else None for a in counted)
        for i, block in enumerate(mapping.block_mappings):
            closed = block.index_map_jaxpr
            scope = Scope(closed.jaxpr)
            for var, root in zip(closed.jaxpr.invars[len(mapping.grid):], operands):
                if root is not None:
                    scope.refs[var] = root
            walk.walk(scope)
            if i < mapping.num_inputs:
                self.overhangs = self.overhangs or _overhangs(block)
            else:
                last = _last_axis_used(walk.names, scope, len(mapping.grid))
                self.trailing.append(tuple(
                    n for n, a in enumerate(counted) if a > last))

    @property
    def axes(self) -> tuple[int, ...]:
        """Every axis."""
        return tuple(range(len(self.sizes)))

    def ids(self, axes: Iterable[int], last: bool = False) -> Ids:
        """Return program ids that are the first, or the last, along ``axes``."""
        known = {a: 0 for a, size in enumerate(self.sizes) if size == 1}
        for axis in axes:
            if not last:
                known[axis] = 0
            elif self.sizes[axis] is not None:
                known[axis] = self.sizes[axis] - 1
        return Ids(known, self.sizes)


def _overhangs(block: Any) -> bool:
    array = getattr(block, "array_aval", None) or block.array_shape_dtype  # before JAX 0.8
    for part, size in zip(block.block_shape, array.shape):
        part = getattr(part, "block_size", part)
        if isinstance(part, int) and isinstance(size, int) and part and size % part:
            return True
    return False


def _last_axis_used(names: AuditNames, scope: Scope, axis_count: int) -> int:
    """Return the last axis of the grid that an index map's answer depends on, or -1."""
    position = {var: i for i, var in enumerate(scope.jaxpr.invars[:axis_count])}
    last, todo, seen = -1, list(scope.jaxpr.outvars), set()
    while todo:
        atom = todo.pop()
        if isinstance(atom, names.Literal) or atom in seen:
            continue
        seen.add(atom)
        last = max(last, position.get(atom, -1))
        if atom in scope.defs:
            todo += scope.defs[atom].invars
    return last


class _Proof:
    """The part of the audit that needs to know in which order things happen."""

    def __init__(self, walk, events, grid, signature, roots, platform, parallel):
        self.walk = walk
        self.events = events
        self.grid = grid
        self.signature = signature
        self.outputs = roots[signature.inputs:signature.inputs + signature.outputs]
        self.platform = platform
        self.parallel = parallel
        self.assumed: list[str] = [COVERED] if signature.outputs else []

    def answer(self) -> Audit:
        """Return the audit."""
        walk = self.walk
        self._atomics()
        for root in self.outputs:
            if root is not None and root.sync:
                self._block_root(root, "it gives a semaphore back, which others can signal")
        watched = [r for r in (*walk.roots, walk.random) if not r.ready and not r.sync]
        ends = {}
        if self.platform in _GPU or not self.grid.sizes:
            ends = self._pass(watched, ())
        elif self.platform is None and self._holds_in_any_order(watched):
            ends = self._pass(watched, ())
        else:
            if self.platform is None:
                self.assumed.append(IN_ORDER)
            for axes, group in self._groups(watched).items():
                ends.update(self._pass(group, axes))
        for root in self.outputs:
            if root is not None and not root.sync:
                self._output(root, ends.get(root))
        if walk.asynchronous or walk.threads:
            self.assumed.append(NO_RACES)
        if walk.threads or self.platform in _GPU or (self.platform != "tpu" and self.grid.sizes):
            self.assumed.append(NO_CLASHES)
        for needed, text in ((self.grid.overhangs, EDGES), (walk.masked_loads, MASKED),
                             (walk.accumulates, FIRST_PRODUCT)):
            if needed:
                self.assumed.append(text)
        return _answer(walk, self.assumed)

    def _groups(self, watched: list) -> dict:
        """Return buffers by the axes along which they live on, from a first iteration."""
        groups: dict[tuple[int, ...], list] = {}
        for root in watched:
            axes = self.grid.axes
            if root.output is not None:
                axes = self.grid.trailing[root.output]
            elif self.parallel is not None:
                axes = tuple(a for a in axes if a not in self.parallel)
            groups.setdefault(axes, []).append(root)
        return groups

    def _holds_in_any_order(self, watched: list) -> bool:
        runner = Runner(self.walk, self.grid.ids(()), set(watched))
        runner.run(self.events, {})
        return not runner.unstored

    def _pass(self, group: list, axes: tuple[int, ...]) -> dict:
        """Follow a group of buffers through a first and a later iteration.

        Returns:
          For each buffer, what has been stored to it when its last iteration ends.
        """
        first = Runner(self.walk, self.grid.ids(axes), set(group))
        after = first.run(self.events, {})
        runners = [first]
        ends = [after]
        # A pass that left nothing out has seen every path of the later iterations too.
        if first.left_out:
            passes = [self.grid.ids(())]
            if any(root.output is not None and root not in after for root in group):
                passes.append(self.grid.ids(axes, last=True))
            for ids in passes:
                later = Runner(self.walk, ids, set(group))
                ends.append(later.run(self.events, dict(settled(after))))
                runners.append(later)
        for runner in runners:
            for root, event in runner.unstored.items():
                self._unstored(root, event.eqn)
            for root, event in runner.in_part.items():
                self._assume(f"the stores to {root.label} cover what is read of it at "
                             f"{self.walk.place(event.eqn)}")
            for barrier, event in runner.endless.items():
                self._block(event.eqn, "no copy that this kernel starts ends at the semaphore "
                                       f"that it waits on ({barrier.label})")
        scratch = any(root.output is None for root in group)
        if scratch and self.parallel is None and (first.values.ids.asked - set(self.grid.axes[-1:])
                                                  ) and axes:
            self._assume(FROM_THE_START)
        found = {}
        for root in group:
            regions = [end[root] for end in ends if root in end]
            if regions:
                found[root] = WHOLE if any(WHOLE in r for r in regions) else SOME
        return found

    def _unstored(self, root: Root, eqn: Any) -> None:
        if root is self.walk.random:
            reason = "random bits are drawn before a seed is set on every path"
        else:
            reason = f"{root.label} is read before anything is stored there on every path"
            if root.stores:
                reason += (f" (the nearest store, at "
                           f"{self.walk.place(root.stores[0].eqn)}, may not have run)")
        self._block(eqn, reason)

    def _output(self, root: Root, stored: Any) -> None:
        if root.ready or root.output in self.signature.aliases:
            return  # what no store reaches keeps the operand's elements
        if not covers(root.boxes, root.shape):
            self._block_root(root, f"{len(root.boxes) or 'no'} stores reach it, and they leave "
                                   "elements out" if root.boxes else "no store reaches it")
            return
        if stored is WHOLE:
            return
        if self._never_stored(root):
            self._block_root(root, "no store reaches it: the conditions of all of them are false")
            return
        values = Values(self.walk, self.grid.ids(()))
        stores = [s for s in root.stores if all(
            values.of(scope, atom) in (None, branch) for scope, atom, branch in s.conditions)]
        if not stores:
            self._block_root(root, "no store reaches it: the conditions of all of them are false")
            return
        fixed = [store for store in stores if not any(
            values.from_floats(scope, atom)
            for scope, atom, *_ in (*store.conditions, *store.masks))]
        if fixed:
            regions = [store.region for store in fixed]
            if not any(r in (WHOLE, SOME) or r[0] == "view" for r in regions) and (
                    not covers(regions, root.shape)):
                self._block_root(root, "the stores that do not depend on floating-point data "
                                       "leave elements of it out")
            elif stored is None:
                self._assume(f"the condition of the store to {root.label} at "
                             f"{self.walk.place(fixed[0].eqn)} holds once for each of its blocks")
            return
        self._block(stores[0].eqn, f"{root.label} is stored only under a condition that depends "
                                   "on floating-point data")

    def _never_stored(self, root: Root) -> bool:
        """Whether no program of a small grid, tried one by one, may store to a buffer."""
        sizes = self.grid.sizes
        if None in sizes or math.prod(sizes) > _MOST_PROGRAMS or not root.stores:
            return False
        for place in itertools.product(*map(range, sizes)):
            values = Values(self.walk, Ids(dict(enumerate(place)), sizes))
            if any(all(values.of(scope, atom) in (None, branch)
                       for scope, atom, branch in store.conditions) for store in root.stores):
                return False
        return True

    def _atomics(self) -> None:
        for root in self.walk.roots:
            kinds = {name for _, name, _ in root.atomics}
            for eqn, name, used in root.atomics:
                if root.is_float and name != "xchg":
                    self._block(eqn, "atomic operations on floating-point numbers come in no "
                                     "fixed order")
                elif name not in _FIXED_ORDER:
                    self._block(eqn, "what it finds depends on which program comes first")
                elif used:
                    self._block(eqn, "the old value that it gives back depends on which program "
                                     "comes first")
                elif len(kinds) > 1 or len(root.stores) > len(root.atomics) or root.reads:
                    self._block(eqn, f"{root.label} is also read or stored to in other ways, and "
                                     "the order of the two is not fixed")

    def _assume(self, text: str) -> None:
        if text not in self.assumed:
            self.assumed.append(text)

    def _block(self, eqn: Any, reason: str) -> None:
        self.walk.block(eqn, reason)

    def _block_root(self, root: Root, reason: str) -> None:
        self.walk.blockers.append(Blocker(root.label, reason, self.walk.kernel_place))


def _answer(walk: Walk, assumed: list) -> Audit:
    blockers = tuple(dict.fromkeys(walk.blockers))
    return Audit(not blockers, blockers, () if blockers else tuple(assumed))


# --- calls -----------------------------------------------------------------------------------


_PLATFORMS = (("mosaic_gpu", "mosaic_gpu"), ("triton", "triton"), ("mosaic", "tpu"))


def _platform_from(params: Any) -> tuple[str | None, Any]:
    """Return the platform that compiler parameters, or a mesh, are for, and the parameters."""
    if isinstance(params, Mapping):  # to JAX 0.8: by the name of the backend
        if len(params) != 1:
            return None, None
        ((name, params),) = params.items()
    else:
        name = type(params).__module__
    return next((platform for part, platform in _PLATFORMS if part in name), None), params


def _parallel_axes(params: Any, platform: str | None) -> tuple[int, ...] | None:
    if platform != "tpu":
        return None
    semantics = (params.get("dimension_semantics") if isinstance(params, Mapping)
                 else getattr(params, "dimension_semantics", None)) or ()
    return tuple(i for i, one in enumerate(semantics) if "parallel" in str(one).lower())


def audit_call(name: str, params: dict[str, Any], operand_count: int) -> Audit:
    """Audit every kernel of a ``pallas_call``, ``mpmd_map`` or ``core_map``.

    Args:
      name: the primitive's name.
      params: the equation's parameters.
      operand_count: how many operands the equation takes.

    Raises:
      ValueError: for another primitive.
    """
    if name == "pallas_call":
        platform, compiler_params = _platform_from(params.get("compiler_params"))
        parallel = _parallel_axes(compiler_params, platform)
        aliases = {out: source for source, out in params.get("input_output_aliases", ())}
        mesh = params.get("mesh")
        axes = () if mesh is None else mesh_axes(mesh)
        key = (params["grid_mapping"], platform, parallel, tuple(sorted(aliases.items())), axes)
        return _cached(params["jaxpr"], key, lambda: audit(
            params["jaxpr"], grid_mapping=params["grid_mapping"], platform_hint=platform,
            aliases=aliases, local_axes=axes, parallel_axes=parallel))
    if name == "mpmd_map":
        axes = tuple(a for mesh in params["meshes"] for a in mesh_axes(mesh))
        aliases = {o: i for i, o in dict(params["input_output_aliases"]).items()}
        platform, _ = _platform_from(params["meshes"][0])
        key = (axes, platform, operand_count, tuple(sorted(aliases.items())))
        audits = [_cached(jaxpr, key, lambda jaxpr=jaxpr: audit(
            jaxpr, platform_hint=platform, inputs=operand_count,
            outputs=len(params["out_avals"]), aliases=aliases, local_axes=axes))
            for jaxpr in params["jaxprs"]]
    elif name == "core_map":
        axes = mesh_axes(params["mesh"])
        platform, _ = _platform_from(params["mesh"])
        audits = [_cached(params["jaxpr"], (axes, platform), lambda: audit(
            params["jaxpr"], platform_hint=platform, local_axes=axes))]
    else:
        raise ValueError(f"the audit reads pallas_call, mpmd_map and core_map, not {name!r}; "
                         "pass the primitive of a Pallas kernel")
    blockers = tuple(b for one in audits for b in one.blockers)
    assumed = () if blockers else tuple(dict.fromkeys(
        (*(a for one in audits for a in one.assumptions), NO_CLASHES)))
    return Audit(not blockers, blockers, assumed)


def prove(call_name: str, jaxpr: Any, grid_mapping: Any = None, **context: Any) -> Audit:
    """Audit one kernel's jaxpr, once for as long as the jaxpr lives.

    Args:
      call_name: the primitive's name; ``pallas_call`` unless there is no grid mapping.
      jaxpr: the kernel's jaxpr.
      grid_mapping: that of its call.
      **context: what else ``audit`` takes.

    Returns:
      The audit.
    """
    key = (call_name, grid_mapping, *sorted((k, _frozen(v)) for k, v in context.items()))
    return _cached(jaxpr, key, lambda: audit(jaxpr, grid_mapping=grid_mapping, **context))


def _frozen(value: Any):
    if isinstance(value, dict):
        return tuple(sorted(value.items()))
    return value if isinstance(value, (str, int, type(None))) else tuple(value)


_CACHE: weakref.WeakKeyDictionary[Any, list] = weakref.WeakKeyDictionary()


def _cached(jaxpr: Any, key: tuple, compute) -> Audit:
    known = _CACHE.setdefault(jaxpr, [])
    for other, answer in known:
        if _same(key, other):
            return answer
    try:
        answer = compute()
    except UnsupportedJaxError:
        raise
    except Exception as error:  # noqa: BLE001 - a jaxpr of a form never met is not proven
        answer = Audit(False, (Blocker(
            "the kernel", f"the audit can't read its jaxpr ({type(error).__name__}: {error}); "
            "please report it", _place_of(jaxpr)),))
    known.append((key, answer))
    return answer


def _same(a: tuple, b: tuple) -> bool:
    # Grid mappings by identity: comparing two of them compares jaxprs and avals.
    return len(a) == len(b) and all(
        x is y or (isinstance(x, (str, int, tuple)) and x == y) for x, y in zip(a, b))
