"""What each primitive that touches refs, or holds jaxprs, does: one function for each."""

from __future__ import annotations

from typing import Any

from shardrules.pallas.events import Branch, Fresh, Loop, Read, Wait, Walk
from shardrules.pallas.regions import SOME, WHOLE

__all__ = ["BY_NAME", "axes_of", "mesh_axes"]

BY_NAME: dict[str, Any] = {}


def _for(*names: str):
    def note(function):
        for name in names:
            BY_NAME[name] = function
        return function

    return note


def axes_of(eqn) -> tuple[str, ...]:
    """Return the axis names that an equation's parameters hold."""
    found: list[str] = []
    for key in ("axis_name", "axes", "axis_names", "collective_axes"):
        value = eqn.params.get(key)
        found += [
            a
            for a in (value if isinstance(value, (tuple, list)) else (value,))
            if isinstance(a, str)
        ]
    return tuple(dict.fromkeys(found))


def mesh_axes(mesh: Any) -> tuple[str, ...]:
    """Return the axis names of a mesh of cores or threads."""
    try:
        return tuple(mesh.shape)
    except (AttributeError, NotImplementedError, TypeError):
        name = getattr(mesh, "axis_name", ())
        return (name,) if isinstance(name, str) else tuple(name)


def _used(scope, eqn) -> bool:
    """Whether somebody looks at an equation's results (JAX names those of swaps in any case)."""
    return any(var in scope.used for var in eqn.outvars)


# --- reads and stores ------------------------------------------------------------------------


@_for("state:get")
def _get(walk: Walk, eqn, scope, events):
    ref, *leaves = eqn.invars
    tree = eqn.params["tree"]
    if walk.view_is_local(eqn, tree):
        walk.read(eqn, scope, events, ref, _views(walk, scope, ref, tree, leaves))


@_for("state:swap")
def _swap(walk, eqn, scope, events):
    ref, _, *leaves = eqn.invars
    tree = eqn.params["tree"]
    if walk.view_is_local(eqn, tree):
        views = _views(walk, scope, ref, tree, leaves, stores=True)
        if _used(scope, eqn):
            walk.read(eqn, scope, events, ref, views)
        walk.store(eqn, scope, events, ref, views)


@_for("state:addupdate")
def _addupdate(walk, eqn, scope, events):
    ref, _, *leaves = eqn.invars
    tree = eqn.params["tree"]
    if walk.view_is_local(eqn, tree):
        views = _views(walk, scope, ref, tree, leaves, stores=True)
        walk.read(eqn, scope, events, ref, views)
        walk.store(eqn, scope, events, ref, views)


def _views(walk, scope, ref, tree, leaves, stores=False):
    """Return the views, read out of their tree only where somebody will look at them."""
    root = scope.refs.get(ref)
    if root is None or (root.ready and not (stores and root.output is not None)):
        return None
    return tree.unflatten(leaves)


@_for("pallas:masked_load")
def _masked_load(walk, eqn, scope, events):
    tree = eqn.params["args_tree"]
    if walk.view_is_local(eqn, tree):
        ref, views, mask, other = tree.unflatten(eqn.invars)
        if mask is not None and other is None:
            walk.masked_loads = True
        if walk.read(eqn, scope, events, ref, views) and eqn.params.get("is_volatile"):
            walk.block(eqn, "a volatile load may find what another program has stored")


@_for("pallas:masked_swap")
def _masked_swap(walk, eqn, scope, events):
    tree = eqn.params["args_tree"]
    if walk.view_is_local(eqn, tree):
        ref, views, _, mask = tree.unflatten(eqn.invars)
        if _used(scope, eqn):
            walk.read(eqn, scope, events, ref, views)
        region = walk.region(scope, views)
        masks = ()
        if mask is not None:
            region = ("view", scope, None, mask, region)
            masks = ((scope, mask),)
        walk.store(eqn, scope, events, ref, region=region, masks=masks)


@_for("triton:atomic_rmw")
def _atomic(walk, eqn, scope, events):
    tree = eqn.params["args_tree"]
    if walk.view_is_local(eqn, tree):
        ref, *_ = tree.unflatten(eqn.invars)
        root = walk.root(eqn, scope, ref)
        if root is not None:
            kind = eqn.params["atomic_type"]
            root.atomics.append((eqn, str(getattr(kind, "name", kind)).lower(), _used(scope, eqn)))
            if not root.ready:
                events.append(Read(root, SOME, eqn, scope))
            walk.store(eqn, scope, events, ref, region=SOME)


# --- buffers ---------------------------------------------------------------------------------


@_for("pallas:run_scoped")
def _run_scoped(walk, eqn, scope, events):
    jaxpr = eqn.params["jaxpr"]
    inner = walk.nested(eqn, scope, jaxpr, eqn.invars, consts=True)
    # invars are the new buffers; what the body closes over stands in constvars
    for i, var in enumerate(jaxpr.invars):
        root = walk.new_root(f"buffer {i} of the run_scoped at {walk.place(eqn)}", var.aval)
        inner.refs[var] = root
        events.append(Fresh(root))
    events += walk.walk(inner)


@_for("pallas:get_global")
def _get_global(walk, eqn, scope, events):
    walk.block(eqn, "it lives on from one run of the kernel to the next")
    scope.refs[eqn.outvars[0]] = walk.new_root(
        "a global ref", eqn.outvars[0].aval, ready=True, foreign=True
    )


@_for("tpu:get_barrier_semaphore")
def _get_barrier_semaphore(walk, eqn, scope, events):
    walk.block(eqn, "devices meet at a barrier semaphore")
    scope.refs[eqn.outvars[0]] = walk.new_root(
        "a barrier semaphore", eqn.outvars[0].aval, ready=True, foreign=True
    )


@_for("state:run_state")
def _run_state(walk, eqn, scope, events):
    jaxpr = eqn.params["jaxpr"]
    given = iter(eqn.invars)
    ready = eqn.params.get("is_initialized") or (True,) * len(jaxpr.invars)
    atoms = [next(given) if is_ready else None for is_ready in ready]
    inner = walk.nested(eqn, scope, jaxpr, atoms)
    for i, (var, is_ready) in enumerate(zip(jaxpr.invars, ready)):
        if var not in inner.refs:
            root = walk.new_root(
                f"state {i} of the run_state at {walk.place(eqn)}", var.aval, ready=is_ready
            )
            inner.refs[var] = root
            inner.bound.pop(var, None)
            events.append(Fresh(root))
    events += walk.walk(inner)
    # The results are what the refs hold in the end.
    for i, (var, out) in enumerate(zip(jaxpr.invars, eqn.outvars)):
        if _is_ref(walk, out):
            scope.refs[out] = inner.refs[var]
        elif out in scope.used:
            walk.read(eqn, inner, events, var, region=WHOLE)


# --- nested jaxprs ---------------------------------------------------------------------------


@_for(
    "jax:jit",
    "jax:pjit",
    "jax:closed_call",
    "jax:call",
    "jax:custom_jvp_call",
    "jax:custom_vjp_call",
    "jax:custom_vjp_call_jaxpr",
    "jax:remat2",
    "jax:checkpoint",
)
def _call(walk, eqn, scope, events):
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in eqn.params:
            events += walk.walk(walk.nested(eqn, scope, eqn.params[key], eqn.invars))
            return
    walk.block(eqn, "its jaxpr was not found")


@_for("jax:reshard")
def _reshard(walk, eqn, scope, events):
    spec = getattr(eqn.params.get("dst_sharding"), "spec", None)
    if spec is None or any(axis is not None for axis in spec):
        walk.block(eqn, "it moves data between devices", True)


@_for("jax:cond")
def _cond(walk, eqn, scope, events):
    index, *operands = eqn.invars
    branches = []
    before, after = walk.before, {}
    for i, branch in enumerate(eqn.params["branches"]):
        walk.before = dict(before)
        with walk.under(scope, index, i):
            branches.append(walk.walk(walk.nested(eqn, scope, branch, operands)))
        after.update(walk.before)
    walk.before = after
    if any(branches):
        events.append(Branch(scope, index, branches))


@_for("jax:scan")
def _scan(walk, eqn, scope, events):
    params = eqn.params
    if params["length"] == 0:
        return  # what never runs stores nothing
    if "num_consts" in params:
        count, carried = params["num_consts"], params["num_carry"]
    else:  # from JAX 0.11: a flat tree of consts, carry and what is scanned over
        count, carried, _ = (len(list(part)) for part in params["ft_in"].unpack())
    atoms = [*eqn.invars[:count], *(a if _is_ref(walk, a) else None for a in eqn.invars[count:])]
    body = walk.nested(eqn, scope, params["jaxpr"], atoms)
    carry = tuple(body.jaxpr.invars[count : count + carried])
    body.first.update((var, (scope, a)) for var, a in zip(carry, eqn.invars[count:]))
    inside = _loop_body(walk, body)
    if inside:
        events.append(
            Loop(
                inside,
                True,
                body,
                carry,
                tuple(body.jaxpr.outvars[:carried]),
                length=params["length"],
            )
        )


@_for("jax:while")
def _while(walk, eqn, scope, events):
    params = eqn.params
    for_cond, for_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts = eqn.invars[:for_cond]
    body_consts = eqn.invars[for_cond : for_cond + for_body]
    first = eqn.invars[for_cond + for_body :]
    # The condition with the carry's first value says whether it runs at all...
    test = walk.nested(eqn, scope, params["cond_jaxpr"], [*cond_consts, *first])
    events += walk.walk(test)
    # ...and the body is looked at for any carry.
    unknown = [a if _is_ref(walk, a) else None for a in first]
    body = walk.nested(eqn, scope, params["body_jaxpr"], [*body_consts, *unknown])
    carry = tuple(body.jaxpr.invars[for_body:])
    body.first.update((var, (scope, a)) for var, a in zip(carry, first))
    runs = (test, test.jaxpr.outvars[0])
    with walk.under(*runs, 1):
        inside = _loop_body(walk, body)
    if inside:
        events.append(
            Loop(
                inside,
                runs,
                body,
                carry,
                tuple(body.jaxpr.outvars),
                tuple(test.jaxpr.invars[for_cond:]),
            )
        )


def _loop_body(walk, body) -> list:
    arrived = len(walk.arrivals)
    events = walk.walk(body)
    for barrier in walk.arrivals[arrived:]:  # in the next round all of it has been stored
        walk.handed.setdefault(barrier, {}).update(walk.before)
    return events


def _is_ref(walk, atom) -> bool:
    return isinstance(getattr(atom, "aval", None), walk.names.AbstractRef)


@_for("pallas:core_map")
def _core_map(walk, eqn, scope, events):
    # Warps of one thread: their axis is the kernel's own.
    walk.threads = True
    axes = set(mesh_axes(eqn.params["mesh"])) - walk.local_axes
    walk.local_axes |= axes
    events += walk.walk(walk.nested(eqn, scope, eqn.params["jaxpr"], eqn.invars))
    walk.local_axes -= axes


@_for("parallel:axis_index")
def _axis_index(walk, eqn, scope, events):
    name = eqn.params["axis_name"]
    names = name if isinstance(name, (tuple, list)) else (name,)
    strange = [n for n in names if n not in walk.local_axes]
    if strange and _used(scope, eqn):  # to JAX 0.9 it stands there though nobody looks
        axes = ", ".join(map(str, strange))
        walk.block(eqn, f"it asks where this device stands along mesh axis {axes}", True, strange)


# --- random numbers --------------------------------------------------------------------------


@_for("tpu:prng_seed")
def _seed(walk, eqn, scope, events):
    if not eqn.invars:
        walk.block(eqn, "it is given no seed")
    walk.stored(walk.random, WHOLE, eqn, events)


@_for("tpu:prng_random_bits")
def _random_bits(walk, eqn, scope, events):
    walk.random.reads += 1
    events.append(Read(walk.random, WHOLE, eqn, scope))


# --- copies and semaphores of TPUs -----------------------------------------------------------


def _copy_operands(eqn):
    """Return (ref, views) of a copy's source, target and semaphores, and the device it names."""
    operands = eqn.params["tree"].unflatten(eqn.invars)
    if len(operands) == 9:  # to JAX 0.9 refs and their views stood side by side
        refs, views, device = operands[:8:2], operands[1:8:2], operands[8:]
        return [*zip(refs, [v or () for v in views]), device]
    refs, device = operands[:4], operands[4:]
    return [*((getattr(r, "ref", r), getattr(r, "transforms", ())) for r in refs), device]


@_for("tpu:dma_start")
def _dma_start(walk, eqn, scope, events):
    if not walk.view_is_local(eqn, eqn.params["tree"]):
        return
    source, target, semaphore, source_semaphore, device = _copy_operands(eqn)
    walk.asynchronous = True
    if any(d is not None for d in device):
        walk.block(eqn, "it copies to or from another device", True)
        return
    if source_semaphore[0] is not None:
        walk.block(eqn, "a copy with two semaphores is one between devices", True)
        return
    if eqn.params.get("add"):
        walk.block(eqn, "copies that add come in no fixed order")
        return
    walk.read(eqn, scope, events, *source)
    barrier = _own_semaphore(walk, eqn, scope, semaphore[0])
    ref, views = target
    root = walk.root(eqn, scope, ref)
    if barrier is None or root is None:
        return
    walk.links.setdefault(barrier, {})[root] = None
    if not root.ready or root.output is not None:
        # What it fills may be read once somebody has waited; an output is filled in any case.
        walk.stored(
            root, walk.region(scope, views), eqn, events if root.output is not None else None
        )


@_for("tpu:dma_wait")
def _dma_wait(walk, eqn, scope, events):
    if not walk.view_is_local(eqn, eqn.params["tree"]):
        return
    _, (ref, views), semaphore, *_ = _copy_operands(eqn)
    barrier = _own_semaphore(walk, eqn, scope, semaphore[0])
    root = walk.root(eqn, scope, ref)
    if barrier is not None and root is not None:
        events.append(Wait(barrier, root, walk.region(scope, views), eqn))


def _own_semaphore(walk, eqn, scope, ref):
    root = walk.root(eqn, scope, ref)
    if root is not None and root.foreign:
        walk.block(eqn, f"{root.label} is a semaphore that others can signal too")
        return None
    return root


@_for("pallas:semaphore_signal")
def _signal(walk, eqn, scope, events):
    tree = eqn.params["args_tree"]
    if walk.view_is_local(eqn, tree):
        semaphore, _, _, device, *_ = tree.unflatten(eqn.invars)
        walk.threads = True
        if device is not None:
            axes = (
                tuple(a for a in device if isinstance(a, str)) if isinstance(device, dict) else ()
            )
            walk.block(eqn, "it signals a semaphore of another device", True, axes)
            return
        barrier = _own_semaphore(walk, eqn, scope, semaphore)
        if barrier is not None:
            walk.arrive(barrier)


@_for("pallas:semaphore_wait")
def _semaphore_wait(walk, eqn, scope, events):
    tree = eqn.params["args_tree"]
    if walk.view_is_local(eqn, tree):
        semaphore, *_ = tree.unflatten(eqn.invars)
        walk.threads = True
        barrier = _own_semaphore(walk, eqn, scope, semaphore)
        if barrier is not None:
            events.append(Wait(barrier, None, SOME, eqn))


# --- copies, barriers and tensor cores of Mosaic GPU -----------------------------------------


def _trees_are_local(walk, eqn) -> bool:
    trees = [v for k, v in eqn.params.items() if k.endswith(("tree", "treedef"))]
    return all([walk.view_is_local(eqn, tree) for tree in trees])


@_for("mgpu:copy_gmem_to_smem")
def _copy_in(walk, eqn, scope, events):
    walk.asynchronous = True
    if _trees_are_local(walk, eqn):
        source, target, barrier, *_ = eqn.invars
        walk.read(eqn, scope, events, source, region=SOME)
        root, own = walk.root(eqn, scope, target), _own_semaphore(walk, eqn, scope, barrier)
        if root is not None and own is not None:
            walk.links.setdefault(own, {})[root] = None
            walk.stored(root, SOME, eqn)


@_for("mgpu:copy_smem_to_gmem")
def _copy_out(walk, eqn, scope, events):
    walk.asynchronous = True
    if _trees_are_local(walk, eqn):
        if eqn.params.get("reduction_op") is not None:
            walk.block(eqn, "copies that reduce come in no fixed order")
            return
        source, target, *_ = eqn.invars
        walk.read(eqn, scope, events, source, region=SOME)
        walk.store(eqn, scope, events, target, region=SOME)


@_for("mgpu:load", "mgpu:async_load")
def _load(walk, eqn, scope, events):
    if _trees_are_local(walk, eqn):
        ref, *leaves = eqn.invars
        walk.read(eqn, scope, events, ref, eqn.params["tree"].unflatten(leaves))


@_for("mgpu:async_store_tmem")
def _store_tmem(walk, eqn, scope, events):
    walk.asynchronous = True
    if _trees_are_local(walk, eqn):
        ref, _, *leaves = eqn.invars
        walk.store(eqn, scope, events, ref, eqn.params["tree"].unflatten(leaves))


@_for("mgpu:barrier_arrive", "mgpu:tcgen05_commit_arrive")
def _arrive(walk, eqn, scope, events):
    walk.threads = True
    if _trees_are_local(walk, eqn):
        barrier = _own_semaphore(walk, eqn, scope, eqn.invars[0])
        if barrier is not None:
            walk.arrive(barrier)


@_for("mgpu:barrier_wait")
def _barrier_wait(walk, eqn, scope, events):
    walk.threads = True
    if _trees_are_local(walk, eqn):
        barrier = _own_semaphore(walk, eqn, scope, eqn.invars[0])
        if barrier is not None:
            events.append(Wait(barrier, None, SOME, eqn))


@_for("mgpu:wgmma_ref")
def _wgmma(walk, eqn, scope, events):
    walk.asynchronous = True
    if _trees_are_local(walk, eqn):
        accumulator, *factors = eqn.invars[:3]
        for var in factors:
            if _is_ref(walk, var):
                walk.read(eqn, scope, events, var, region=SOME)
        walk.read(eqn, scope, events, accumulator, region=SOME)


@_for("mgpu:wgmma_accumulator_deref", "mgpu:wgmma_accumulator_deref_p")
def _wgmma_deref(walk, eqn, scope, events):
    walk.read(eqn, scope, events, eqn.invars[0], region=WHOLE)


@_for("mgpu:wgmma_accumulator_store", "mgpu:wgmma_accumulator_store_p")
def _wgmma_store(walk, eqn, scope, events):
    walk.store(eqn, scope, events, eqn.invars[0], region=WHOLE)


@_for("mgpu:tcgen05_mma")
def _tcgen05_mma(walk, eqn, scope, events):
    walk.asynchronous = True
    if not _trees_are_local(walk, eqn):
        return
    if eqn.params.get("scaled") or eqn.params.get("sparse"):
        walk.block(eqn, "scaled and sparse products are not on the audit's allow list")
        return
    accumulator, a, b, accumulate, *rest = eqn.invars
    for var in (a, b):
        if _is_ref(walk, var):
            walk.read(eqn, scope, events, var, region=SOME)
    root = walk.root(eqn, scope, accumulator)
    if root is None:
        return
    if isinstance(accumulate, walk.names.Literal) and bool(accumulate.val):
        walk.read(eqn, scope, events, accumulator, region=SOME)
    elif not isinstance(accumulate, walk.names.Literal):
        walk.accumulates = True  # the first product is taken not to
    walk.stored(root, SOME, eqn)
    if eqn.params.get("arrive") and rest:
        barrier = _own_semaphore(walk, eqn, scope, rest[0])
        if barrier is not None:
            walk.links.setdefault(barrier, {})[root] = None
