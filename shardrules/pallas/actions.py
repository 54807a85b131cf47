"""Judge the primitives for which an audit needs more than the name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from shardrules.door.audit_names import key_kind
from shardrules.door.protocols import Eqn, Jaxpr
from shardrules.jaxprs.walk import uses
from shardrules.pallas.walk import Walk, mesh_axes

_Action = Callable[[Walk, Eqn], None]
ACTIONS: dict[str | None, _Action] = {}


def _for(names: str) -> Callable[[_Action], _Action]:
    def note(function: _Action) -> _Action:
        ACTIONS.update(dict.fromkeys(names.split(), function))
        return function

    return note


# --- nested jaxprs ---------------------------------------------------------------------------


@_for(
    "jax:jit jax:pjit jax:closed_call jax:call jax:eval_jaxpr jax:custom_jvp_call "
    "jax:custom_vjp_call jax:custom_vjp_call_jaxpr jax:remat2 jax:checkpoint "
    "pallas:run_scoped state:run_state"
)
def _call(walk: Walk, eqn: Eqn) -> None:
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in eqn.params:
            walk.run(eqn.params[key])
            return
    walk.block(eqn, "its jaxpr was not found")


@_for("jax:cond")
def _cond(walk: Walk, eqn: Eqn) -> None:
    walk.seeded = all(walk.ends(eqn.params["branches"]))


@_for("jax:scan")
def _scan(walk: Walk, eqn: Eqn) -> None:
    if eqn.params["length"]:  # a body that never runs does nothing
        walk.run(eqn.params["jaxpr"])


@_for("jax:while")
def _while(walk: Walk, eqn: Eqn) -> None:
    walk.run(eqn.params["cond_jaxpr"])  # it runs at least once; the body may never run
    walk.ends([eqn.params["body_jaxpr"]])


@_for("pallas:core_map pallas:mpmd_map")
def _threads(walk: Walk, eqn: Eqn) -> None:
    # A map over the warps of one thread comes here, too (since JAX 0.12 it is an mpmd_map), and its
    # axis is the kernel's own.
    params = eqn.params
    meshes = params["meshes"] if "meshes" in params else [params["mesh"]]
    outer = walk.local_axes, walk.core_axes
    axes = {*itertools.chain.from_iterable(map(mesh_axes, meshes))}
    walk.local_axes, walk.core_axes = (own | axes for own in outer)
    walk.ends(params["jaxprs"] if "jaxprs" in params else [params["jaxpr"]])
    walk.local_axes, walk.core_axes = outer


@_for("sc:parallel_loop")
def _parallel_loop(walk: Walk, eqn: Eqn) -> None:
    if walk.is_local(eqn):
        walk.ends([eqn.params["jaxpr"]])


@_for("jax:reshard")
def _reshard(walk: Walk, eqn: Eqn) -> None:
    spec = getattr(eqn.params.get("dst_sharding"), "spec", None)
    if spec is None or any(axis is not None for axis in spec):
        walk.block(eqn, "it moves data between devices", True)


@_for("parallel:axis_index")
def _axis_index(walk: Walk, eqn: Eqn) -> None:
    name = eqn.params["axis_name"]
    names = name if isinstance(name, (tuple, list)) else (name,)
    mesh = [n for n in names if n not in walk.local_axes]
    if mesh and _is_read(walk.jaxpr, eqn):
        axes = ", ".join(map(str, mesh))
        walk.block(eqn, f"it reads this device's position along mesh axis {axes}", True, mesh)


def _is_read(jaxpr: Jaxpr, eqn: Eqn) -> bool:
    # Up to JAX 0.9, a jaxpr may hold an axis_index that nothing reads.
    used, returned = uses(jaxpr), set(map(id, jaxpr.outvars))
    return any(out in used or id(out) in returned for out in eqn.outvars)


# --- refs ------------------------------------------------------------------------------------


@_for("state:get pallas:masked_load")
def _read(walk: Walk, eqn: Eqn) -> None:
    if walk.is_local(eqn) and eqn.params.get("is_volatile"):
        walk.block(eqn, "a volatile load may read what another program has stored")


@_for("jax:scatter-add jax:scatter-sub jax:scatter-mul")
def _added(walk: Walk, eqn: Eqn) -> None:
    if not eqn.params.get("unique_indices"):
        _block_rounding(walk, eqn, eqn.invars[0])


@_for("sc:scatter")
def _scatter(walk: Walk, eqn: Eqn) -> None:
    if walk.is_local(eqn) and eqn.params.get("add", True):
        _block_rounding(walk, eqn, eqn.params["tree"].unflatten(eqn.invars)[0])


def _block_rounding(walk: Walk, eqn: Eqn, into: Any) -> None:
    if into.aval.dtype.kind not in "iub":
        walk.block(
            eqn,
            "sums of floating-point numbers in no fixed order differ by rounding between devices",
        )


# --- random numbers --------------------------------------------------------------------------

_UNSEEDED = "random bits are drawn before a seed is set on every path"


@_for("tpu:prng_seed")
def _seed(walk: Walk, eqn: Eqn) -> None:
    if eqn.invars:
        walk.seeded = True
    else:
        walk.block(eqn, "it has no seed")


@_for("tpu:prng_random_bits")
def _draw(walk: Walk, eqn: Eqn) -> None:
    if not walk.seeded:
        walk.block(eqn, _UNSEEDED)


@_for("jax:random_bits jax:random_fold_in jax:random_seed jax:random_split jax:random_unwrap")
def _keyed(walk: Walk, eqn: Eqn) -> Any:
    # The result is a function of the key, except for keys of the device's own generator.
    kinds = {key_kind(atom.aval) for atom in (*eqn.invars, *eqn.outvars)}
    if "stateful" in kinds and eqn.primitive.name == "random_bits" and not walk.seeded:
        walk.block(eqn, _UNSEEDED)
    if "unknown" in kinds:
        walk.block(eqn, "its keys belong to a generator that is not JAX's own")


# --- copies and signals ----------------------------------------------------------------------


def _copy_operands(eqn: Eqn) -> tuple[Any, list[Any]]:
    """Return a copy's source semaphore, and the device ids that it names."""
    operands = eqn.params["tree"].unflatten(eqn.invars)
    if len(operands) == 9:  # JAX 0.9 and older list refs and their views separately
        return operands[6], operands[8:]
    return operands[3], operands[4:]


def _is_remote(walk: Walk, device: Any) -> bool:
    """Return whether a device id names another device, and not another core of this one."""
    # If the device mesh has an axis of this name, JAX (0.10.2 and 0.12.0.1) means that axis, even
    # if the grid or the mesh of cores also has an axis of this name.
    if isinstance(device, dict):
        return not set(device) <= walk.core_axes - walk.device_axes
    return device is not None


def _axes_of(device: Any) -> tuple[str, ...]:
    names = tuple(device) if isinstance(device, dict) else ()
    return names if all(isinstance(name, str) for name in names) else ()


@_for("tpu:dma_start tpu:dma_wait")
def _dma(walk: Walk, eqn: Eqn) -> None:
    if not walk.is_local(eqn):
        return
    source_semaphore, devices = _copy_operands(eqn)
    remote = [device for device in devices if _is_remote(walk, device)]
    if remote:
        walk.block(eqn, "it copies to or from another device", True, _axes_of(remote[0]))
    elif source_semaphore is not None and all(device is None for device in devices):
        walk.block(eqn, "a copy with two semaphores is a copy between devices", True)
    elif eqn.params.get("add"):
        walk.block(eqn, "copies that add run in no fixed order")


@_for("mgpu:copy_smem_to_gmem")
def _copy_out(walk: Walk, eqn: Eqn) -> None:
    if walk.is_local(eqn) and eqn.params.get("reduction_op") is not None:
        walk.block(eqn, "copies that reduce run in no fixed order")


@_for("pallas:semaphore_signal mgpu:semaphore_signal mgpu:semaphore_signal_parallel")
def _signal(walk: Walk, eqn: Eqn) -> None:
    if not walk.is_local(eqn):
        return
    devices = eqn.params["args_tree"].unflatten(eqn.invars)[3]
    for device in devices if isinstance(devices, list) else [devices]:
        if _is_remote(walk, device):
            walk.block(eqn, "it signals a semaphore of another device", True, _axes_of(device))
            return
