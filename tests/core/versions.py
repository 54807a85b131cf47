"""The public differences between JAX versions that these tests meet: asked for, not looked up.

A test in this folder writes ``versions.shard_map`` and what follows here; all else in it is the
same program on every JAX.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import pathlib

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P


def write_left_out(report, names):
    """Write the tests that are for other JAX versions than this beside a report of pytest's.

    Args:
      report: the path of the report, by which ``matrix.py`` finds the list.
      names: the tests' names.
    """
    pathlib.Path(report).with_suffix(".left_out.json").write_text(json.dumps(sorted(names)))


def where(*asked):
    """Mark a test for those JAX on which all that is asked is true: conftest.py leaves it out on others.

    Args:
      asked: functions without arguments, those below.
    """
    return pytest.mark.where.with_args(*asked)


def here() -> bool:
    """Where a case is made of what this JAX has: it runs wherever it is collected, in each lane."""
    return True


def has(module: str, name: str):
    """Return a function that says whether a module of JAX has a name."""

    @functools.cache
    def asked() -> bool:
        try:
            return hasattr(importlib.import_module(module), name)
        except ImportError:
            return False

    return asked


@functools.lru_cache(maxsize=None)
def _shard_map():
    """Return shard_map and the name of its check: it moved, and the check got another name."""
    found = getattr(jax, "shard_map", None)
    if found is not None and callable(found):
        return found, "check_vma"
    return importlib.import_module("jax.experimental.shard_map").shard_map, "check_rep"


def shard_map(f, *, mesh, in_specs, out_specs, check: bool = True):
    """Call this JAX's shard_map, with its check on or off."""
    function, name = _shard_map()
    return function(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **{name: check})


def block(shape, index_map):
    """Return BlockSpec's two arguments in this JAX's order."""
    from jax.experimental import pallas as pl

    names = list(inspect.signature(pl.BlockSpec).parameters)
    return (shape, index_map) if names.index("block_shape") == 0 else (index_map, shape)


def has_rule_for_cond() -> bool:
    """Whether shard_map's check knows ``lax.cond`` on this JAX, with no kernel anywhere."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("one",))
    f = shard_map(
        lambda x: jax.lax.cond(x[0] > 0, lambda: x, lambda: -x),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
    )
    try:
        jax.eval_shape(f, jax.ShapeDtypeStruct((1,), "float32"))
    except NotImplementedError:
        return False
    return True


def has_process_groups() -> bool:
    """Whether CPU devices of several processes can reduce within groups.

    JAX 0.4.28's Gloo sets up a process's groups one after the other, and two processes wait for
    each other until it gives up. Asked by what else that JAX, and no later one here, lacks.
    """
    return has_ffi_call()


def _ffi():
    """Return the module with ffi_call, None on a JAX that has none: it moved."""
    for name in ("jax.ffi", "jax.extend.ffi"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def has_ffi_call() -> bool:
    """Whether this JAX has ffi_call."""
    return _ffi() is not None


def ffi_call(target, result, x, **attributes):
    """Call an FFI target; to JAX 0.4.36 the operands are passed with the rest."""
    function = _ffi().ffi_call
    if "args" in inspect.signature(function).parameters:
        return function(target, result, x, **attributes)
    return function(target, result)(x, **attributes)


def proves_kernels() -> bool:
    """Whether a kernel's own jaxpr can prove it: the audit doesn't read those of JAX 0.4.28."""
    return jax.__version__ != "0.4.28"


def takes_none_as_cotangent() -> bool:
    """Whether a bwd may return None for a sharded argument, with no kernel anywhere.

    JAX 0.8.3 gives the zero its type inside shard_map, and fails on it outside.
    """
    mesh = Mesh(np.array(jax.devices()[:2]), ("two",))
    f = jax.custom_vjp(lambda x: x * 2)
    f.defvjp(lambda x: (x * 2, None), lambda _, g: (None,))
    g = shard_map(
        f,
        mesh=mesh,
        in_specs=P("two"),
        out_specs=P("two"),
        check=getattr(jax, "shard_map", None) is not None,
    )
    try:
        jax.eval_shape(jax.grad(lambda x: g(x).sum()), jax.ShapeDtypeStruct((2,), "float32"))
    except ValueError:
        return False
    return True


def maps_psum_over_a_mesh_axis() -> bool:
    """Whether vmap with spmd_axis_name goes over shard_map's psum, with no kernel anywhere.

    JAX 0.8.3 passes its own primitive a parameter that it does not have.
    """
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("one", "two"))
    f = shard_map(lambda x: jax.lax.psum(x, "two"), mesh=mesh, in_specs=P("two"), out_specs=P())
    try:
        jax.eval_shape(jax.vmap(f, spmd_axis_name="one"), jax.ShapeDtypeStruct((2, 2), "float32"))
    except TypeError:
        return False
    return True


def _gather_of_an_argument() -> str:
    """Return the compiled text of a jit that gathers its argument ``x`` before it uses it."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("two",))
    split, whole = (jax.sharding.NamedSharding(mesh, spec) for spec in (P("two"), P()))
    f = jax.jit(lambda x: jax.lax.with_sharding_constraint(jax.numpy.sin(x), whole))
    x = jax.ShapeDtypeStruct((2,), "float32", sharding=split)
    return f.lower(x).compile().as_text()


@functools.cache
def prints_shardings() -> bool:
    """Whether a compiled program's text says how its parameters are sharded: not on JAX 0.12."""
    return "sharding=" in _gather_of_an_argument()


@functools.cache
def names_gathers_by_use() -> bool:
    """Whether XLA names a gather by what asks for it: on JAX 0.12 by the argument that it moves.

    Nothing tells then that it is the source that asks for it, and shardrules gives no hint.
    """
    gathers = [line for line in _gather_of_an_argument().splitlines() if " all-gather(" in line]
    return bool(gathers) and not any('op_name="x"' in line for line in gathers)


def types_values() -> bool:
    """Whether values carry the axes over which they vary, which a cast can add to."""
    return hasattr(jax.lax, "pvary") or hasattr(jax.lax, "pcast")


def all_gather_invariant():
    """Return the all_gather whose result is invariant, or None: JAX 0.6.0 and older have none."""
    return getattr(importlib.import_module("jax._src.lax.parallel"), "all_gather_invariant", None)


def gathers_invariant() -> bool:
    """Whether there is an all_gather whose result is invariant."""
    return all_gather_invariant() is not None


def annotates_outputs() -> bool:
    """Whether a ShapeDtypeStruct can say over which axes an output varies: not on JAX 0.6.0."""
    return (
        hasattr(jax.sharding, "ManualAxisType")
        or "vma" in inspect.signature(jax.ShapeDtypeStruct).parameters
    )


def casts_to_unreduced() -> bool:
    """Whether there is a cast to a partial sum, from JAX 0.8 on."""
    return hasattr(jax.lax, "pcast")


def differentiates_solutions() -> bool:
    """Whether a Jacobian may be taken, inside shard_map, of what differs by device."""
    return types_values() and differentiates_what_varies(jax.jacrev)


def sums_copies() -> bool:
    """Whether a psum may be applied to what is the same on all devices; JAX 0.4.28 refuses it."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("two",))
    f = shard_map(lambda x: jax.lax.psum(x, "two"), mesh=mesh, in_specs=P(), out_specs=P())
    try:
        jax.eval_shape(f, jax.ShapeDtypeStruct((2,), "float32"))
    except Exception:  # JAX raises just that
        return False
    return True


def differentiates_what_varies(by=jax.grad) -> bool:
    """Whether a gradient may be taken, inside shard_map, of what differs by device.

    JAX 0.6.0 gives it a cotangent that is the same on all, and refuses that; so does 0.6.2's jacrev.
    """
    mesh = Mesh(np.array(jax.devices()[:2]), ("two",))
    f = shard_map(by(lambda x: x.sum()), mesh=mesh, in_specs=P("two"), out_specs=P("two"))
    try:
        jax.eval_shape(f, jax.ShapeDtypeStruct((2,), "float32"))
    except ValueError:
        return False
    return True
