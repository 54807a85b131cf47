"""Does a Pallas kernel's own jaxpr prove that it does not communicate?

The audit is an allow list: what is not known to be a function of this device's operands is not
proven. It says which assumptions the proof rests on, and names what stands in its way.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from shardrules.hooks.door.audit_names import load_audit
from shardrules.pallas.actions import mesh_axes
from shardrules.pallas.events import Blocker, Root, Scope, Walk, place_of
from shardrules.pallas.grid import Grid
from shardrules.pallas.proof import NO_CLASHES, Proof

__all__ = ["Audit", "audit", "audit_call", "prove"]

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
            return ", assuming that ".join(
                filter(None, ("proven", "; that ".join(self.assumptions)))
            )
        return "not proven:\n  " + "\n  ".join(map(str, self.blockers))


@dataclasses.dataclass(frozen=True)
class _Signature:
    """Which of a kernel's variables are what. The rest are scratch."""

    inputs: int
    outputs: int
    aliases: dict  # output -> input
    blocks: bool  # whether a grid cuts arrays into blocks


def audit(
    kernel_jaxpr: Any,
    *,
    grid_mapping: Any = None,
    platform_hint: str | None = None,
    inputs: int | None = None,
    outputs: int = 0,
    aliases: dict[int, int] | None = None,
    local_axes: Iterable[str] = (),
    parallel_axes: Iterable[int] | None = None,
) -> Audit:
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

    Raises:
      UnsupportedJaxError: if what the audit needs of JAX is not there.
    """
    names = load_audit()
    parallel = None if parallel_axes is None else frozenset(parallel_axes)
    try:
        return _audit(
            names,
            kernel_jaxpr,
            grid_mapping,
            platform_hint,
            inputs,
            outputs,
            dict(aliases or {}),
            tuple(local_axes),
            parallel,
        )
    except Exception as error:  # noqa: BLE001 - a jaxpr of a form never met is not proven
        return Audit(
            False,
            (
                Blocker(
                    "the kernel",
                    f"the audit can't read its jaxpr ({type(error).__name__}: {error}); "
                    "please report it",
                    place_of(kernel_jaxpr),
                ),
            ),
        )


def _audit(
    names, kernel_jaxpr, grid_mapping, platform, inputs, outputs, aliases, local_axes, parallel
) -> Audit:
    grid_names = getattr(grid_mapping, "grid_names", None) or ()
    walk = Walk(
        names, (*local_axes, *(n for n in grid_names if isinstance(n, str))), place_of(kernel_jaxpr)
    )
    if grid_mapping is None:
        count = len(kernel_jaxpr.invars) if inputs is None else inputs
        signature = _Signature(count, outputs, aliases, False)
    else:
        signature = _Signature(
            grid_mapping.num_index_operands + grid_mapping.num_inputs,
            grid_mapping.num_outputs,
            aliases,
            True,
        )
        scratch = grid_mapping.num_scratch_operands
        if len(kernel_jaxpr.invars) != signature.inputs + signature.outputs + scratch:
            return Audit(
                False,
                (
                    Blocker(
                        "pallas_call",
                        f"the kernel takes {len(kernel_jaxpr.invars)} refs, but its grid "
                        f"mapping holds {signature.inputs} operands, {signature.outputs} outputs "
                        f"and {scratch} scratch buffers",
                        walk.kernel_place,
                    ),
                ),
            )
    if platform is None:
        platform = _platform_of(kernel_jaxpr)
    scope, roots = _bind(walk, kernel_jaxpr, signature, platform)
    events = walk.walk(scope)
    grid = Grid(walk, grid_mapping, roots[: signature.inputs])
    if walk.blockers:
        # What is not allowed need not tell what it stores: the rest would be guesswork.
        return _answer(walk, [])
    proof = Proof(
        walk,
        events,
        grid,
        roots[signature.inputs :][: signature.outputs],
        aliases,
        platform,
        parallel,
    )
    return _answer(walk, proof.assumptions())


def _bind(walk: Walk, jaxpr: Any, signature: _Signature, platform: str | None):
    """Give each of the kernel's variables its buffer."""
    scope = Scope(jaxpr)
    for i, var in enumerate(jaxpr.constvars):
        if isinstance(var.aval, walk.names.AbstractRef):
            scope.refs[var] = walk.new_root(
                f"closed-over ref {i}", var.aval, ready=True, foreign=True
            )
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
            # An aliased output is the operand's memory, but for blocks that are copies of their
            # own. (The ref of a whole array names no memory space on JAX 0.12.)
            if (
                source is not None
                and roots[source] is not None
                and (
                    not signature.blocks
                    or platform == "triton"
                    or _space(var.aval) in _SHARED_SPACES
                )
            ):
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
    semantics = (
        params.get("dimension_semantics")
        if isinstance(params, Mapping)
        else getattr(params, "dimension_semantics", None)
    ) or ()
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
        return _cached(
            params["jaxpr"],
            key,
            lambda: audit(
                params["jaxpr"],
                grid_mapping=params["grid_mapping"],
                platform_hint=platform,
                aliases=aliases,
                local_axes=axes,
                parallel_axes=parallel,
            ),
        )
    if name == "mpmd_map":
        axes = tuple(a for mesh in params["meshes"] for a in mesh_axes(mesh))
        aliases = {o: i for i, o in dict(params["input_output_aliases"]).items()}
        platform, _ = _platform_from(params["meshes"][0])
        key = (axes, platform, operand_count, tuple(sorted(aliases.items())))
        audits = [
            _cached(
                jaxpr,
                key,
                lambda jaxpr=jaxpr: audit(
                    jaxpr,
                    platform_hint=platform,
                    inputs=operand_count,
                    outputs=len(params["out_avals"]),
                    aliases=aliases,
                    local_axes=axes,
                ),
            )
            for jaxpr in params["jaxprs"]
        ]
    elif name == "core_map":
        axes = mesh_axes(params["mesh"])
        platform, _ = _platform_from(params["mesh"])
        audits = [
            _cached(
                params["jaxpr"],
                (axes, platform),
                lambda: audit(params["jaxpr"], platform_hint=platform, local_axes=axes),
            )
        ]
    else:
        raise ValueError(
            f"the audit reads pallas_call, mpmd_map and core_map, not {name!r}; "
            "pass the primitive of a Pallas kernel"
        )
    blockers = tuple(b for one in audits for b in one.blockers)
    assumed = (
        ()
        if blockers
        else tuple(dict.fromkeys((*(a for one in audits for a in one.assumptions), NO_CLASHES)))
    )
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
    answer = compute()
    known.append((key, answer))
    return answer


def _same(a: tuple, b: tuple) -> bool:
    # Grid mappings by identity: comparing two of them compares jaxprs and avals.
    return len(a) == len(b) and all(
        x is y or (isinstance(x, (str, int, tuple)) and x == y) for x, y in zip(a, b)
    )
