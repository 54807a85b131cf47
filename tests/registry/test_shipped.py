"""The rules that are shipped: when they are there, who wins over them, and each tried."""

import importlib
import pkgutil
import sys
import types

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
import raising
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules import errors, registry
from shardrules.registry import Registry
from shardrules.registry.shipped import JAXLIB, SHIPPED, Shipped


def a_library(**known):
    """A registry that knows of a library, and the library's module, not imported yet."""
    return Registry(None, "", {"somebodys_lib": Shipped(**known)}), types.ModuleType(
        "somebodys_lib"
    )


def test_a_librarys_rules_are_there_once_it_is_imported(monkeypatch):
    own, library = a_library(
        primitives={"somebodys_lib:odd_p": "its operand", "somebodys_lib:gone_p": "older"},
        targets={"their_target": "a product"},
        kernels={"somebodys_lib:kernel": "a sum"},
    )
    odd = library.odd_p = jax.extend.core.Primitive("odd")
    version = own.version
    assert own.find("odd", target=odd) is own.find("their_target") is None
    monkeypatch.setitem(sys.modules, "somebodys_lib", library)
    found = own.find("odd", target=odd)
    assert found.rule == sr.no_communication and found.library == "somebodys_lib"
    assert found.where == "shardrules' table (its operand)" and own.version == version
    # Another primitive, or a kernel, of that name has no part in it.
    assert own.find("odd", target=jax.extend.core.Primitive("odd")) is None
    assert own.find("odd", "mine", "mine.py:1") is None
    assert own.find("their_target") and own.find("kernel", "somebodys_lib")
    assert own.find("their_target", "mine", "mine.py:1") is own.find("kernel", "mine") is None


def test_the_users_rule_and_the_librarys_own_win(monkeypatch):
    own, library = a_library(
        primitives={"somebodys_lib:odd_p": "its operand"}, targets={"t": "a product"}
    )
    odd = library.odd_p = jax.extend.core.Primitive("odd")
    monkeypatch.setitem(sys.modules, "somebodys_lib", library)
    mine = sr.per_device("data")
    own.ship("t", mine, "somebodys_lib", "its entry point")
    assert own.find("t").rule == mine
    own.register("odd", mine)
    own.register("t", sr.per_device("model"))
    assert own.find("odd", target=odd).rule == mine
    assert own.find("t").rule == sr.per_device("model")


def test_every_table_can_be_read_without_its_library():
    for name, known in SHIPPED.items():
        assert known.primitives or known.kernels or known.targets, name
        assert all(":" in one for one in known.primitives)


def registered():
    """The names of the FFI targets that jaxlib and its GPU plugin register, by their modules."""
    import jaxlib as package

    packages = [package, importlib.import_module("jaxlib.cpu")]
    if importlib.util.find_spec("jax_cuda12_plugin") is not None:
        packages.append(importlib.import_module("jax_cuda12_plugin"))
    for parent in packages:
        for one in pkgutil.iter_modules(parent.__path__):
            try:
                module = importlib.import_module(f"{parent.__name__}.{one.name}")
            except ImportError:  # for a platform that is not here
                continue
            for key, value in getattr(module, "registrations", dict)().items():
                listed = value if isinstance(value, (list, tuple)) else [(key,)]
                yield from (each[0] for each in listed)


def test_the_table_is_that_of_what_jaxlib_registers():
    found = set(registered())
    assert len(found) > 60
    # The one that runs somebody's kernel says nothing of it.
    assert found - set(JAXLIB.targets) <= {"triton_kernel_call_ffi"}


@pytest.mark.gpu
def test_the_table_has_for_rocm_what_the_plugin_for_cuda_registers(gpu_mesh):
    # jaxlib compiles the same sources for ROCm, where `cu` is `hip` (jaxlib/gpu/vendor.h).
    of_cuda = {name for name in registered() if name.startswith("cu")}
    assert {f"hip{name[2:]}" for name in of_cuda} <= set(JAXLIB.targets) and of_cuda


def placed(mesh, f, *args, specs, out=P("data"), **kwargs):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out, **kwargs))(*args)


def test_an_ffi_target_of_jaxlibs_needs_no_line(cpu_mesh, hooks):
    def factor(x):
        shapes = (
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct(x.shape[:1], jnp.int32),
            jax.ShapeDtypeStruct((), jnp.int32),
        )
        return jax.ffi.ffi_call("lapack_sgetrf_ffi", shapes)(x)[0]

    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 4)), jnp.float32)
    # LAPACK takes rows for columns.
    want = np.concatenate([jax.lax.linalg.lu(part.T)[0].T for part in jnp.split(x, 4)])
    np.testing.assert_allclose(placed(cpu_mesh, factor, x, specs=P("data")), want, rtol=1e-5)
    with raising.wrong_out_specs():
        placed(cpu_mesh, factor, x, specs=P("data"), out=P())
    with sr.rules({"lapack_sgetrf_ffi": lambda ctx: 7}), pytest.raises(errors.RuleError):
        placed(cpu_mesh, factor, x, specs=P("data"))


# --- the libraries themselves ----------------------------------------------------------------


def equinox_calls():
    import equinox as eqx

    internal = importlib.import_module("equinox.internal")

    def loop(kind, **kwargs):
        return lambda y, w: internal.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * w), (0, y), kind=kind, **kwargs
        )[1]

    return {
        "unvmap_any": lambda y, w: y * internal.unvmap_any(y > 0) * w,
        "unvmap_all": lambda y, w: y * internal.unvmap_all(y > w),
        "unvmap_max": lambda y, w: y * internal.unvmap_max(y.astype(int)),
        "nonbatchable": lambda y, w: internal.nonbatchable(y) * w,
        "nontraceable": lambda y, w: internal.nondifferentiable_backward(y) * w,
        "error_if": lambda y, w: eqx.error_if(y, y.sum() < -1, "negative") * w,
        "error_if of an invariant": lambda y, w: eqx.error_if(y * w, w < -1, "negative"),
        "select_if_vmap, maybe_set": loop("checkpointed", checkpoints=4, max_steps=8),
        "bounded": loop("bounded", max_steps=8),
    }


def klujax_calls():
    import klujax

    at = jnp.arange(3)
    return {
        "solve": lambda y, w: klujax.solve(at, at, w * y[:, :3] ** 2, y[:, 1:]),
        "dot": lambda y, w: klujax.dot(at, at, w * y[:, :3] ** 2, y[:, 1:]),
    }


def jax_finufft_calls():
    import jax_finufft

    at = jnp.linspace(0, 1, 4)
    return {
        "nufft1": lambda y, w: abs(jax_finufft.nufft1(8, y * (w + 0j), at)),
        "nufft2": lambda y, w: abs(jax_finufft.nufft2(y * (w + 0j), at)),
        "nufft3": lambda y, w: abs(jax_finufft.nufft3(y * (w + 0j), at, at + 1)),
    }


@pytest.mark.libraries
@pytest.mark.parametrize("library", ["equinox", "klujax", "jax_finufft"])
def test_a_librarys_calls_need_no_line(library, cpu_mesh, hooks):
    """Each is typed as it varies, gives one device's result, and its gradient; all in one test,
    which compiles every call once."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        y, w = jnp.asarray(1 + rng.uniform(size=(8, 4))), jnp.float64(1.5)
        for name, f in globals()[f"{library}_calls"]().items():
            both = dict(mesh=cpu_mesh, in_specs=(P("data"), P()))
            mapped = jax.shard_map(f, out_specs=P("data"), **both)
            parts = np.concatenate([f(jnp.asarray(part), w) for part in np.split(y, 4)])
            np.testing.assert_allclose(jax.jit(mapped)(y, w), parts, err_msg=name)
            with raising.wrong_out_specs():
                jax.jit(jax.shard_map(f, out_specs=P(), **both)).lower(y, w)
            if name in ("select_if_vmap, maybe_set", "nonbatchable", "nontraceable"):
                continue  # no derivative, or none that plain JAX accepts either
            got = jax.jit(jax.grad(lambda y, w, m=mapped: m(y, w).sum(), argnums=(0, 1)))(y, w)
            want = jax.grad(
                lambda y, w, f=f: sum(f(part, w).sum() for part in jnp.split(y, 4)), argnums=(0, 1)
            )(y, w)
            for one, other in zip(got, want):
                np.testing.assert_allclose(one, other, rtol=1e-6, err_msg=name)


@pytest.mark.libraries
def test_scan_calls_finds_all_of_klujax_where_nothing_is_known_of_it(cpu_mesh, monkeypatch):
    """Its gradient too, where an unruled solve would stop the trace at a cotangent's type."""
    for table in ("_shipped_entries", "_shipped"):
        monkeypatch.setattr(registry.default, table, {})
    with jax.enable_x64(True):
        y, w = jnp.ones((8, 4)), jnp.float64(1.5)
        calls = klujax_calls()
        mapped = jax.shard_map(
            lambda y, w: calls["dot"](y, w) + calls["solve"](y, w),
            mesh=cpu_mesh,
            in_specs=(P("data"), P()),
            out_specs=P("data"),
        )
        missing = sr.scan_calls(jax.grad(lambda *a: mapped(*a).sum(), argnums=(0, 1)), y, w)
    assert missing.stopped_by is None
    assert {call.kernel for call in missing.calls} == {"dot_f64", "solve_f64"}
    lines = [line for call in missing.calls for line in call.lines]
    assert "shardrules.register('solve_f64', shardrules.no_communication)" in lines


@pytest.mark.libraries
@pytest.mark.parametrize("library", ["equinox", "klujax", "jax_finufft"])
def test_a_librarys_table_names_what_it_has(library):
    known = SHIPPED[library]
    for name in known.primitives:
        module, _, attribute = name.partition(":")
        primitive = getattr(importlib.import_module(module), attribute)
        found = registry.default.find(primitive.name, target=primitive)
        assert found.library == library and found.rule == sr.no_communication
