"""The audit of a Pallas kernel's own jaxpr: what it proves, what it refuses and why."""

import functools
import gc
import importlib
import re
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P
from kernels import build, cases
from kernels.case import Fails
from raising import raises

import shardrules as sr
from pallas import audit_kernels as k
from shardrules import aot, errors, pallas
from shardrules.door import audit_names, internals
from shardrules.pallas import actions, allowlist, audit, walk

KERNELS = ("pallas_call", "core_map", "mpmd_map")


def kernels_in(jaxpr):
    """The equations of a jaxpr that call kernels."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in KERNELS:
            yield eqn
        else:
            for inner in jax.tree.leaves(list(eqn.params.values())):
                inner = getattr(inner, "jaxpr", inner)
                yield from kernels_in(inner) if hasattr(inner, "eqns") else ()


def audited(run, mesh=None):
    """The audit of the one kernel that a function of no arguments calls."""
    if mesh is not None:
        run = jax.shard_map(run, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False)
    (eqn,) = kernels_in(jax.make_jaxpr(run)().jaxpr)
    return pallas.prove(eqn.primitive.name, eqn.params, len(eqn.invars))


def handing_out_a_semaphore():
    return pl.pallas_call(
        k.semaphore_handed_out,
        compiler_params=k.TPU,
        out_shape=(k.X, k.REGULAR(())),
        out_specs=(pl.BlockSpec(), pl.BlockSpec(memory_space=pltpu.SEMAPHORE)),
    )(jnp.zeros(k.ROWS))


def of_somebodys_generator(function, name):
    """Call a kernel that draws from a key one of whose functions is somebody's own."""
    known = jax.extend.random.threefry_prng_impl
    functions = {n: getattr(known, n) for n in ("seed", "split", "random_bits", "fold_in")}
    functions[function] = functools.wraps(functions[function])(
        lambda *args: functions_of_jax[function](*args)
    )
    functions_of_jax = {function: getattr(known, function)}
    own = jax.extend.random.define_prng_impl(key_shape=known.key_shape, name=name, **functions)
    assert jax.random.key_impl(jax.random.key(0)) != own

    def kernel(x, o):
        key = jax.random.fold_in(jax.random.key(0, impl=own), 1)
        o[...] = x[...] + jax.random.uniform(key, k.ROWS)

    return k.call(kernel)()


# Uses of these kernels in other ways.
REFUSED = {
    **k.REFUSED,
    "a semaphore as output": (
        lambda: handing_out_a_semaphore()[0],
        "the kernel",
        "operand or output 2 is a semaphore, which other kernels can signal too",
    ),
    **{
        f"axis_index {how}": (k.call(k.inside(k.device_place, how)), "axis_index", k.PLACE)
        for how in ("jitted", "branched", "scanned", "looped", "scoped")
    },
    "bits in an index map": (
        k.call(k.copy, grid=(1,), in_specs=[k.DRAWN]),
        "prng_random_bits",
        k.PRNG,
    ),
    "a key's branch": (k.call(k.inside(k.stateful_key, "branched")), "random_bits", k.PRNG),
    **{
        f"{name}'s own {f}": (
            functools.partial(of_somebodys_generator, f, name),
            at,
            k.STRANGE_KEYS,
        )
        for f, name, at in (
            ("random_bits", "somebody", "random_bits"),
            ("fold_in", "threefry2x32", "random_fold_in"),
        )
    },
    "Mosaic: reducing copy": (
        k.mosaic(functools.partial(k.smem_copy, reduction_op="add"), scratch=(k.SMEM, k.BARRIER)),
        "copy_smem_to_gmem",
        "copies that reduce run in no fixed order",
    ),
    "Mosaic: which tile": (k.mosaic(k.next_tile, **k.TILES), "query_cluster_cancel", k.TIMING),
    "SparseCore: fetch and add": (
        k.on_cores(k.fetch_and_add, k.SUBCORES, pltpu.SMEM((8,), jnp.int32)),
        "sc_fetch_and_add",
        k.RACE,
    ),
    "SparseCore: added to columns": (k.scattered(), "scatter", k.NO_ORDER),
    "prefetched": (k.prefetched("data"), "axis_index", k.PLACE),
}

PROVEN = {
    **k.PROVEN,
    "signal along the cores": k.on_cores(
        k.signal_along_cores, lambda: k.TENSORCORES("core"), k.REGULAR
    ),
    "over a batch": lambda: jax.vmap(lambda x: pl.pallas_call(k.copy, k.X)(x))(
        jnp.zeros((3, *k.ROWS))
    ),
    "prefetched": k.prefetched(None),
}


def marked(names):
    """Mark those kernels that ask which TPU they are traced for."""
    for name in names:
        asks = name.startswith(("pipeline", "SparseCore"))
        yield pytest.param(name, marks=[pytest.mark.tpu] if asks else [], id=name)


def mesh_for(name, request):
    """The mesh to trace a kernel for: some ask which TPU it is, and v5e has no SparseCores."""
    if request.node.get_closest_marker("tpu") is None:
        return request.getfixturevalue("cpu_mesh")
    return jax.sharding.Mesh(np.array(aot.tpu("v5p:2x2x2")).reshape(4, 2), ("data", "model"))


@pytest.mark.parametrize("name", [*marked(REFUSED)])
def test_what_is_not_known_to_be_harmless_is_not_proven(name, request):
    run, primitive, message = REFUSED[name]
    found = audited(run, mesh_for(name, request))
    assert not found.proven
    said = [b for b in found.blockers if re.fullmatch(primitive, b.primitive)]
    assert any(message in b.reason for b in said), str(found)
    assert re.search(r"(audit_kernels|test_audit|core)\.py:\d+$", said[0].source), said[0].source
    assert found.contradicts_no_communication == (message in k.CONTRADICTS)


@pytest.mark.parametrize("name", [*marked(PROVEN)])
def test_its_neighbours_are_proven(name, request):
    found = audited(PROVEN[name], mesh_for(name, request))
    assert found.proven, str(found)
    assert str(found) == "proven to depend on its operands alone, if it is well formed"


def test_a_refusal_names_the_line(cpu_mesh):
    (blocker,) = audited(k.call(k.psum), cpu_mesh).blockers
    line = k.psum.__code__.co_firstlineno + 2  # below its decorator
    assert blocker.source == f"{k.__file__}:{line}"
    assert str(blocker) == f"psum at {k.__file__}:{line}: it is a collective over a mesh axis"
    assert blocker.axes == ("data",)
    assert str(walk.Blocker("a", "b", "c")) == "a at c: b"
    assert re.fullmatch(r"not proven:\n  psum at .*", str(audit.Audit((blocker,))))


# Kernels of JAX's own operations: which of those that do not communicate are not proven, and why.
# It takes its next tile when the scheduler has one for it; its two blocks may take different ones.
NOT_PROVEN = {"blackwell_matmul": "try_cluster_cancel"}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=getattr(pytest.mark, case.platform))
        for case in cases.ALL
        if not isinstance(case.expected.unchecked, Fails)
    ],
)
def test_kernels_of_real_operations(case, request):
    request.getfixturevalue(f"{case.platform}_mesh")
    # Only traced: `build.devices` keeps GPUs apart that must not be compiled for in one process.
    on = aot.tpu(case.target) if case.platform == "tpu" else aot.gpu(case.target, 8)
    f, args = build.build(case, check_vma=False, mesh=build.mesh_for(case, on))
    found = [
        (e, pallas.prove(e.primitive.name, e.params, len(e.invars)))
        for e in kernels_in(f.trace(*args).jaxpr.jaxpr)
    ]
    assert found
    for eqn, one in found:
        if case.communicates is not None or case.name.startswith("all_gather"):
            assert not one.proven and one.contradicts_no_communication, str(one)
        elif case.name in NOT_PROVEN:
            assert NOT_PROVEN[case.name] in {b.primitive for b in one.blockers}, str(one)
            assert not one.contradicts_no_communication
        else:
            assert one.proven, f"{eqn.params.get('name')}: {one}"


def test_a_semaphore_from_outside_is_not_the_kernels_own():
    def wait(x, semaphore, o):
        pl.semaphore_wait(semaphore, 1)
        o[...] = x[...]

    space = pl.BlockSpec(memory_space=pltpu.SEMAPHORE)

    def run():
        return pl.pallas_call(
            wait, compiler_params=k.TPU, out_shape=k.X, in_specs=[pl.BlockSpec(), space]
        )(*handing_out_a_semaphore())

    _, eqn = kernels_in(jax.make_jaxpr(run)().jaxpr)
    (blocker,) = pallas.prove("pallas_call", eqn.params, len(eqn.invars)).blockers
    assert (
        blocker.reason == "operand or output 1 is a semaphore, which other kernels can signal too"
    )


@pytest.mark.parametrize(
    "device", [None, jax.extend.core.Literal(1, jax.core.ShapedArray((), jnp.int32))]
)
def test_copies_as_they_stood_in_a_jaxpr_to_jax_0_9(device):
    """Each ref with its views beside it, and the device last."""
    run = k.call(k.local_copy, in_specs=[k.ANYWHERE], scratch_shapes=[k.VMEM, k.DMA])
    (call,) = kernels_in(jax.make_jaxpr(run)().jaxpr)
    jaxpr = call.params["jaxpr"]
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith("dma"):
            refs = [getattr(r, "ref", r) for r in eqn.params["tree"].unflatten(eqn.invars)[:3]]
            leaves, tree = jax.tree.flatten((*(p for r in refs for p in (r, ())), None, (), device))
            eqn = eqn.replace(invars=leaves, params={**eqn.params, "tree": tree})
        eqns.append(eqn)
    assert len({eqn.primitive.name for eqn in eqns if "dma" in eqn.primitive.name}) == 2
    found = pallas.prove("pallas_call", {**call.params, "jaxpr": jaxpr.replace(eqns=eqns)}, 1)
    assert found.proven == (device is None), found
    assert found.contradicts_no_communication == (device is not None)


def test_axes_of_cores_are_the_kernels_own():
    """An axis of a mesh of cores is not one of the mesh of devices, whatever it is called."""
    jaxpr = jax.make_jaxpr(lambda: jax.lax.axis_index("core"), axis_env=[("core", 2)])().jaxpr

    class Cores:
        shape = {"core": 2}

    mpmd = dict(jaxprs=[jaxpr], out_avals=(), input_output_aliases={})
    assert pallas.prove("mpmd_map", {**mpmd, "meshes": [Cores]}, 0).proven
    Cores.shape = {"other": 2}
    assert not pallas.prove("mpmd_map", {**mpmd, "meshes": [Cores]}, 0).proven


def test_an_audit_is_kept_for_as_long_as_the_jaxpr_lives():
    (eqn,) = kernels_in(jax.make_jaxpr(k.call(k.copy))().jaxpr)
    jaxpr, params = eqn.params["jaxpr"], dict(eqn.params)
    one = audit._CACHE.get(jaxpr)
    assert one is None and pallas.prove("pallas_call", params, 1).proven
    pallas.prove("pallas_call", params, 1)
    assert len(audit._CACHE[jaxpr]) == 1
    alive = weakref.ref(jaxpr)
    del eqn, jaxpr, params
    jax.clear_caches()
    gc.collect()
    assert alive() is None


def test_a_grid_mapping_of_another_kernel_is_not_proven():
    (one,) = kernels_in(jax.make_jaxpr(k.call(k.copy))().jaxpr)
    (other,) = kernels_in(
        jax.make_jaxpr(k.call(k.scratch_filled_if_data_says_so, scratch_shapes=[k.VMEM]))().jaxpr
    )
    params = {**one.params, "grid_mapping": other.params["grid_mapping"]}
    (blocker,) = pallas.prove("pallas_call", params, 1).blockers
    assert "takes 2 refs, its grid mapping holds 2 operands and outputs and 1" in blocker.reason


def test_a_jaxpr_that_breaks_the_audit_is_not_proven(monkeypatch):
    def fail(*args):
        raise KeyError("tree")

    monkeypatch.setattr(walk.Walk, "run", fail)
    (blocker,) = audited(k.call(k.copy)).blockers
    assert re.search(r"the audit can't read its jaxpr \(KeyError: 'tree'\)", blocker.reason)


def test_values_of_somebodys_own_types_are_not_proven():
    (eqn,) = kernels_in(jax.make_jaxpr(k.call(k.copy))().jaxpr)
    high = eqn.params["jaxpr"].replace(is_high=True)
    (blocker,) = pallas.prove("pallas_call", {**eqn.params, "jaxpr": high}, 1).blockers
    assert "types that the user defined" in blocker.reason


@pytest.mark.parametrize(
    "kernel, scratch, line",
    [
        (k.signal_along_data, [k.REGULAR], "permute('data'))"),
        (k.copy_along_data, [pltpu.SemaphoreType.DMA] * 2, "permute('data'))"),
        (k.signal_anywhere, [k.REGULAR], "permute('data', 'model'))"),
        (k.device_place, [], "per_device('data'))"),
    ],
)
def test_a_line_to_paste_holds_each_axis_along_which_a_device_may_be(
    kernel, scratch, line, cpu_mesh, hooks
):
    run = jax.shard_map(
        k.call(kernel, scratch_shapes=scratch), mesh=cpu_mesh, in_specs=(), out_specs=P()
    )
    with raises(errors.UnknownKernelError, mesh_axes=("data", "model")):
        jax.eval_shape(run)
    (call,) = sr.scan_calls(run).calls
    assert any(line in each for each in call.lines)
    assert not any("no_communication" in each for each in call.lines)


def test_an_axis_of_the_devices_is_theirs_whatever_the_cores_call_theirs(cpu_mesh, hooks):
    def placed(run):
        jax.eval_shape(jax.shard_map(run, mesh=cpu_mesh, in_specs=(), out_specs=P()))

    placed(k.on_cores(k.signal_along_cores, lambda: k.TENSORCORES("core"), k.REGULAR))
    with raises(errors.UnknownKernelError, audit=signals):
        placed(k.on_cores(k.signal_along_data, lambda: k.TENSORCORES("data"), k.REGULAR))


def signals(audit):
    return any(blocker.reason == k.SIGNALS for blocker in audit.blockers)


def test_an_audit_for_one_mesh_of_devices_is_none_for_another(cpu_mesh, hooks):
    """The same jaxpr: only inside of the shard_map have devices an axis called like the cores'."""
    run = k.on_cores(k.signal_along_data, lambda: k.TENSORCORES("data"), k.REGULAR)
    jaxpr = jax.make_jaxpr(run)()
    (eqn,) = kernels_in(jaxpr.jaxpr)
    assert pallas.prove(eqn.primitive.name, eqn.params, len(eqn.invars)).proven
    run = jax.shard_map(
        jax.extend.core.jaxpr_as_fun(jaxpr), mesh=cpu_mesh, in_specs=(), out_specs=[P()]
    )
    with raises(errors.UnknownKernelError, audit=signals):
        jax.eval_shape(run)


def test_threads_that_read_the_same_module_find_its_primitives(monkeypatch):
    """One that comes while another reads the module does not take it as read."""
    primitives = audit_names.Primitives(jax.extend.core.Primitive)
    found = []

    class Module:
        @property
        def __dict__(self):
            if not found:
                found.append(None)
                found.append(primitives[jax.lax.sin_p])  # as another thread would
            return {"sin_p": jax.lax.sin_p}

    name = "jax._src.lax.lax"
    monkeypatch.setattr(audit_names, "FAMILIES", {name: "jax"})
    monkeypatch.setitem(sys.modules, name, Module())
    assert primitives[jax.lax.sin_p] == "jax:sin"
    assert found == [None, "jax:sin"]


def test_the_work_is_bounded(monkeypatch):
    """Jits of which each calls the one below twice would take exponential time."""
    monkeypatch.setattr(walk, "_MOST_EQUATIONS", 3)
    (blocker,) = audited(k.call(k.nested)).blockers
    assert "more than 3 equations, nested ones at each use" in blocker.reason


def test_only_kernels_are_audited():
    assert pallas.prove("scan", {}, 0) is None


# What JAX 0.10.2 or 0.12 has under another name, or not at all.
OTHER_VERSIONS = set(
    """
    jax:call jax:checkpoint jax:closed_call jax:copy_p jax:custom_vjp_call_jaxpr jax:log2
    jax:one_minus_square jax:pjit jax:polynomial jax:relayout mgpu:barrier_arrive_and_wait mgpu:inline_mgpu
    mgpu:inline_mgpu_p mgpu:mma mgpu:mosaic_gpu_reduce_max mgpu:mosaic_gpu_reduce_min
    mgpu:mosaic_gpu_reduce_prod mgpu:mosaic_gpu_reduce_sum mgpu:set_max_registers
    mgpu:set_max_registers_p mgpu:store mgpu:wait_gmem_to_smem mgpu:wgmma_accumulator_deref
    mgpu:wgmma_accumulator_deref_p mgpu:wgmma_accumulator_store mgpu:wgmma_accumulator_store_p
    pallas:atomic_cas pallas:atomic_rmw pallas:core_map pallas:max_contiguous
    pallas:with_memory_space_constraint sc:bitcast sc:scan_count sc:unique
    state:with_memory_space_constraint tpu:conv tpu:has_memory_space tpu:repeat
    triton:debug_barrier triton:debug_barrier_p triton:elementwise_inline_asm
    triton:elementwise_inline_asm_p""".split()
)


def test_every_name_on_the_lists_is_a_primitive_of_jax():
    """A misspelt name would never be met; those of other versions are listed."""
    for module in audit_names.FAMILIES:
        try:
            importlib.import_module(module)
        except ImportError:
            assert module in ("jax._src.prng",)
    names = internals.load().primitives
    assert names[None] is None  # reads all modules
    known = set(names.values())
    listed = {*allowlist.PURE, *allowlist.LOCAL, *actions.ACTIONS, *allowlist.REFUSED}
    assert {n for n in listed - known if not n.endswith("*")} <= OTHER_VERSIONS
    tables = [allowlist.PURE, allowlist.LOCAL, set(actions.ACTIONS), set(allowlist.REFUSED)]
    assert sum(map(len, tables)) == len(listed)
    met = [primitive for _, primitive, _ in REFUSED.values()]
    refusals = {n for n in set(allowlist.REFUSED) - OTHER_VERSIONS if not n.endswith("*")}
    assert all(any(re.fullmatch(f".*:{m}", n) for m in met) for n in refusals), refusals
