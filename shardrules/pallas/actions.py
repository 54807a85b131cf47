"""The audit's judgement of each primitive whose name alone does not decide."""

from __future__ import annotations

from typing import Any

from shardrules.pallas.allowlist import RACE
from shardrules.pallas.walk import Frame, Walk, mesh_axes

_FIXED_ORDER = ("add", "and", "or", "xor", "max", "min", "umax", "umin")
_NO_ORDER = "sums of floating-point numbers in no fixed order differ by rounding between devices"

ACTIONS: dict[str | None, Any] = {}


def _for(*names: str):
    def note(function):
        ACTIONS.update(dict.fromkeys(names, function))
        return function

    return note


# --- nested jaxprs ---------------------------------------------------------------------------


@_for(
    "jax:jit",
    "jax:pjit",
    "jax:closed_call",
    "jax:call",
    "jax:eval_jaxpr",
    "jax:custom_jvp_call",
    "jax:custom_vjp_call",
    "jax:custom_vjp_call_jaxpr",
    "jax:remat2",
    "jax:checkpoint",
)
def _call(walk: Walk, eqn: Any, frame: Frame) -> None:
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in eqn.params:
            frame.seeded = walk.enter(eqn.params[key], frame, eqn.invars).seeded
            return
    walk.block(eqn, "its jaxpr was not found")


@_for("jax:cond")
def _cond(walk, eqn, frame):
    branches = [walk.enter(branch, frame, eqn.invars[1:]) for branch in eqn.params["branches"]]
    frame.seeded = all(inner.seeded for inner in branches)


@_for("jax:scan")
def _scan(walk, eqn, frame):
    if eqn.params["length"]:  # a body that never runs does nothing
        frame.seeded = walk.enter(eqn.params["jaxpr"], frame, eqn.invars).seeded


@_for("jax:while")
def _while(walk, eqn, frame):
    for_cond, for_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carry = eqn.invars[for_cond + for_body :]
    # The condition runs at least once; the body may never run.
    condition = walk.enter(eqn.params["cond_jaxpr"], frame, [*eqn.invars[:for_cond], *carry])
    frame.seeded = condition.seeded
    consts = eqn.invars[for_cond : for_cond + for_body]
    walk.enter(eqn.params["body_jaxpr"], frame, [*consts, *carry])


@_for("pallas:run_scoped")
def _run_scoped(walk, eqn, frame):
    # The body closes over its constvars; its invars are the new buffers.
    inner = walk.enter(eqn.params["jaxpr"], frame, eqn.invars, consts=True)
    frame.seeded = inner.seeded


@_for("state:run_state")
def _run_state(walk, eqn, frame):
    jaxpr = eqn.params["jaxpr"]
    operands = iter(eqn.invars)
    initialized = eqn.params.get("is_initialized") or (True,) * len(jaxpr.invars)
    atoms = [next(operands) if is_initialized else None for is_initialized in initialized]
    inner = walk.enter(jaxpr, frame, atoms)
    frame.seeded = inner.seeded
    # The results are the final contents of the refs.
    for var, out in zip(inner.jaxpr.invars, eqn.outvars):
        if walk.is_ref(out):
            frame.buffers[out] = inner.buffers[var]


@_for("pallas:core_map", "pallas:mpmd_map")
def _threads(walk, eqn, frame):
    # Also the warps of one thread (an mpmd_map from JAX 0.12 on): their axis is the kernel's own.
    params = eqn.params
    meshes = params["meshes"] if "meshes" in params else [params["mesh"]]
    outer = walk.local_axes, walk.core_axes
    axes = {axis for mesh in meshes for axis in mesh_axes(mesh)}
    walk.local_axes, walk.core_axes = (own | axes for own in outer)
    for jaxpr in params["jaxprs"] if "jaxprs" in params else [params["jaxpr"]]:
        walk.enter(jaxpr, frame, eqn.invars)
    walk.local_axes, walk.core_axes = outer


@_for("sc:parallel_loop")
def _parallel_loop(walk, eqn, frame):
    if walk.touch(eqn, frame):
        walk.enter(eqn.params["jaxpr"], frame, ())


@_for("jax:reshard")
def _reshard(walk, eqn, frame):
    spec = getattr(eqn.params.get("dst_sharding"), "spec", None)
    if spec is None or any(axis is not None for axis in spec):
        walk.block(eqn, "it moves data between devices", True)


@_for("parallel:axis_index")
def _axis_index(walk, eqn, frame):
    name = eqn.params["axis_name"]
    names = name if isinstance(name, (tuple, list)) else (name,)
    mesh = [n for n in names if n not in walk.local_axes]
    if mesh and frame.uses(eqn):  # JAX 0.9 and older also leave it where nothing reads it
        axes = ", ".join(map(str, mesh))
        walk.block(eqn, f"it reads this device's position along mesh axis {axes}", True, mesh)


# --- refs ------------------------------------------------------------------------------------


@_for("state:get", "pallas:masked_load")
def _read(walk, eqn, frame):
    if walk.touch(eqn, frame) and eqn.params.get("is_volatile"):
        walk.block(eqn, "a volatile load may read what another program has stored")


@_for("state:swap", "state:addupdate", "pallas:masked_swap", "sc:swap")
def _store(walk, eqn, frame):
    walk.touch(eqn, frame)


@_for("triton:atomic_rmw", "pallas:atomic_rmw")
def _atomic(walk, eqn, frame):
    if not walk.is_local(eqn):
        return
    ref, *_ = eqn.params["args_tree"].unflatten(eqn.invars)
    buffer = walk.buffer_of(frame, ref)
    kind = eqn.params["atomic_type"]
    kind = str(getattr(kind, "name", kind)).lower()
    if kind not in _FIXED_ORDER:
        walk.block(eqn, RACE)
    elif ref.aval.dtype.kind not in "iub":
        walk.block(eqn, _NO_ORDER)
    elif frame.uses(eqn):
        walk.block(eqn, "the old value that it returns depends on which program runs first")
    buffer.atomics.add(kind)
    buffer.last = eqn


@_for("jax:scatter-add", "jax:scatter-sub", "jax:scatter-mul")
def _added(walk, eqn, frame):
    del frame
    if not eqn.params.get("unique_indices") and eqn.invars[0].aval.dtype.kind not in "iub":
        walk.block(eqn, _NO_ORDER)


@_for("sc:scatter")
def _scatter(walk, eqn, frame):
    # A subcore's own memory receives a program's stores in order, so only lanes of one store may
    # write to one place. (Iterations of a parallel_loop that do so are not well formed.)
    if not walk.touch(eqn, frame) or not eqn.params.get("add", True):
        return
    ref, _, indices, *_ = eqn.params["tree"].unflatten(eqn.invars)
    own = getattr(ref.aval.memory_space, "value", None) == "vmem"
    if ref.aval.dtype.kind in "iub":
        return
    if not own or not any(_lanes_differ(walk, frame, index) for index in indices):
        walk.block(eqn, _NO_ORDER)


def _lanes_differ(walk: Walk, frame: Frame, atom: Any) -> bool:
    """Whether a vector is iota plus or minus a value that is the same in all lanes."""
    # Sums of integers wrap around, which keeps different values different.
    while True:
        name, eqn = _made_by(walk, frame, atom)
        if name not in ("jax:add", "jax:sub"):
            return name == "jax:iota" and atom.aval.ndim == 1 and _holds_each_lane(atom.aval)
        left, right = eqn.invars
        if _lanes_agree(walk, frame, right):
            atom = left
        elif _lanes_agree(walk, frame, left):
            atom = right
        else:
            return False


def _lanes_agree(walk: Walk, frame: Frame, atom: Any) -> bool:
    if atom.aval.size == 1:
        return True
    name, eqn = _made_by(walk, frame, atom)
    return name == "jax:broadcast_in_dim" and eqn.invars[0].aval.size == 1


def _made_by(walk: Walk, frame: Frame, atom: Any) -> tuple[str | None, Any]:
    eqn = None if hasattr(atom, "val") else frame.made_by.get(atom)
    return (None, None) if eqn is None else (walk.name(eqn), eqn)


def _holds_each_lane(aval: Any) -> bool:
    return aval.dtype.kind in "iu" and aval.size <= 2 ** (8 * aval.dtype.itemsize)


# --- random numbers --------------------------------------------------------------------------

_UNSEEDED = "random bits are drawn before a seed is set on every path"


@_for("tpu:prng_seed")
def _seed(walk, eqn, frame):
    if eqn.invars:
        frame.seeded = True
    else:
        walk.block(eqn, "it has no seed")


@_for("tpu:prng_random_bits")
def _draw(walk, eqn, frame):
    if not frame.seeded:
        walk.block(eqn, _UNSEEDED)


@_for(
    "jax:random_bits",
    "jax:random_fold_in",
    "jax:random_seed",
    "jax:random_split",
    "jax:random_unwrap",
)
def _keyed(walk, eqn, frame):
    # The result is a function of the key, except for keys of the device's own generator.
    atoms = (*eqn.invars, *eqn.outvars)
    kinds = {kind for kind in (walk.names.key_kind(a.aval) for a in atoms) if kind is not None}
    if "stateful" in kinds and eqn.primitive.name == "random_bits" and not frame.seeded:
        walk.block(eqn, _UNSEEDED)
    if "unknown" in kinds:
        walk.block(eqn, "its keys belong to a generator that is not JAX's own")


# --- copies and signals ----------------------------------------------------------------------


def _copy_operands(eqn: Any) -> tuple[Any, list]:
    """Return a copy's source semaphore, and the devices that it names."""
    operands = eqn.params["tree"].unflatten(eqn.invars)
    if len(operands) == 9:  # JAX 0.9 and older list refs and their views separately
        return operands[6], operands[8:]
    return operands[3], operands[4:]


def _is_remote(walk: Walk, device: Any) -> bool:
    """Whether a device id names another device, not another core of this one."""
    # JAX (0.10.2 and 0.12.0.1) reads an axis name as one of the device mesh if that has it, even
    # if the grid or the cores' mesh has an axis of that name too.
    if isinstance(device, dict):
        return not set(device) <= walk.core_axes - walk.names.device_axes()
    return device is not None


def _axes_of(device: Any) -> tuple[str, ...]:
    """Return the mesh axes that a device id names, if it names any."""
    names = tuple(device) if isinstance(device, dict) else ()
    return names if all(isinstance(name, str) for name in names) else ()


@_for("tpu:dma_start", "tpu:dma_wait")
def _dma(walk, eqn, frame):
    if not walk.touch(eqn, frame):
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
def _copy_out(walk, eqn, frame):
    if walk.touch(eqn, frame) and eqn.params.get("reduction_op") is not None:
        walk.block(eqn, "copies that reduce run in no fixed order")


@_for("pallas:semaphore_signal", "mgpu:semaphore_signal", "mgpu:semaphore_signal_parallel")
def _signal(walk, eqn, frame):
    if not walk.touch(eqn, frame):
        return
    devices = eqn.params["args_tree"].unflatten(eqn.invars)[3]
    for device in devices if isinstance(devices, list) else [devices]:
        if _is_remote(walk, device):
            walk.block(eqn, "it signals a semaphore of another device", True, _axes_of(device))
            return
