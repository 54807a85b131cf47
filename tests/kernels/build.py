"""Turn a `Case` into a jitted function and its arguments, on absent accelerators or on CPU."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.extend.backend
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels.case import Arg, Case
from shardrules import aot

_CUDA_VERSION = 13000  # 13.0, as the runtime counts.
_GPUS = []


@functools.lru_cache(maxsize=None)
def devices(target: str) -> tuple[Any, ...]:
    """Return the eight devices of `target`, a case's `target`; they need not be here.

    Raises:
      RuntimeError: this process has already compiled for another GPU. Mosaic GPU (JAX 0.10.2)
        hands every kernel of a process to ptxas with the architecture of the first one.
    """
    if not target.startswith("v"):
        if _GPUS and _GPUS != [target]:
            raise RuntimeError(
                f"this process compiles for {_GPUS[0]} already; compile for {target} in another"
            )
        _GPUS[:] = [target]
    return tuple(aot.tpu(target) if target.startswith("v") else aot.gpu(target, 8))


def mesh_for(case: Case, on: Sequence[Any] | None = None) -> Mesh:
    """Return `case`'s mesh over the devices `on`, which are those of its target unless given."""
    names, sizes = zip(*case.mesh)
    on = devices(case.target) if on is None else on
    return Mesh(np.array(on[: math.prod(sizes)]).reshape(sizes), names)


def loss(out: Any) -> jax.Array:
    """Return the sum of squares in f32 over every leaf of `out`."""
    return sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(out))


@contextlib.contextmanager
def _asked_of(device: Any) -> Iterator[None]:
    """Answer with `device` where an op asks JAX's default backend what it runs on.

    The Hopper mixed, Blackwell and collective matmuls of JAX 0.10.2 read `core_count` of
    `jax.devices()[0]`, `jax.local_devices()[0]` or the default device, even where they are
    compiled for other devices than these; Mosaic GPU attention asks the CUDA runtime for its
    version, and there is none.
    """
    here = (device,) * 8
    with contextlib.ExitStack() as stack:
        for owner, name, answer in (
            (jax, "devices", here),
            (jax, "local_devices", here),
            (jax, "device_count", len(here)),
            (jax, "local_device_count", len(here)),
            (jax.extend.backend, "get_default_device", device),
        ):
            stack.enter_context(mock.patch.object(owner, name, lambda *_, _a=answer, **__: _a))
        attention = sys.modules.get("jax.experimental.pallas.ops.gpu.attention_mgpu")
        if attention is not None:
            runtime = types.SimpleNamespace(cuda_runtime_get_version=lambda: _CUDA_VERSION)
            stack.enter_context(mock.patch.object(attention, "cuda_versions", runtime))
        yield


@contextlib.contextmanager
def _tpu_interpreter() -> Iterator[None]:
    from jax.experimental.pallas import tpu as pltpu

    with pltpu.force_tpu_interpret_mode():
        yield


def _enough_threads(device_count: int) -> None:
    """Refuse to hang: TPU interpret mode waits in callbacks on all devices at once.

    XLA's CPU client has a thread for each core, or for each device if those are more, and the
    callbacks of a waiting device need others.
    """
    threads = int(os.environ.get("PJRT_NPROC") or os.environ.get("NPROC") or os.cpu_count() or 1)
    if threads < 2 * device_count:
        raise RuntimeError(
            f"TPU interpret mode on {device_count} devices hangs with {threads} threads; set the "
            f"environment variable PJRT_NPROC={4 * device_count} before JAX starts"
        )


def _traced_in(f: Callable[..., Any], context: Callable[[], Any]) -> Callable[..., Any]:
    """Wrap `f` so that its trace, and that of its derivative, runs inside `context()`."""

    @functools.wraps(f)
    def traced(*args):
        with context():
            return f(*args)

    return traced


def _differentiated(case: Case, f: Callable[..., Any]) -> Callable[..., Any]:
    if case.diff is None:
        return f
    return jax.grad(lambda *args: loss(f(*args)), argnums=case.diff)


def local(case: Case, mesh: Mesh, interpret: bool = False) -> Callable[..., Any]:
    """Return the function of local arguments that `case` wraps in `jax.shard_map`."""
    return case.make(mesh, interpret and case.interpret == "argument")


def _args(case: Case, interpret: bool) -> tuple[Arg, ...]:
    return case.small_args if interpret and case.small_args is not None else case.args


def build(
    case: Case,
    *,
    check_vma: bool,
    mesh: Mesh | None = None,
    interpret: bool = False,
    wrap_local: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda f: f,
) -> tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]:
    """Return `case`'s gradient (or forward pass, where it has no `diff`) and its arguments.

    Args:
      case: the case.
      check_vma: passed on to `jax.shard_map`.
      mesh: a mesh with the case's axes; that of its target unless given.
      interpret: run the kernels on CPU, as `case.interpret` says.
      wrap_local: applied to the local function, for a rule line that the case needs.

    Returns:
      A jitted function, and a `ShapeDtypeStruct` with sharding for each of its arguments.

    Raises:
      ValueError: `interpret` is set for a case that can't be interpreted.
      RuntimeError: it is set for one that would hang, see `_enough_threads`.
    """
    if interpret and case.interpret is None:
        raise ValueError(f"{case.name} has no interpret mode; leave out interpret=True")
    mesh = mesh_for(case) if mesh is None else mesh
    if interpret and case.interpret == "tpu":
        _enough_threads(mesh.size)
    given = _args(case, interpret)
    f = wrap_local(local(case, mesh, interpret))
    if case.wrap:
        f = jax.shard_map(
            f,
            mesh=mesh,
            in_specs=tuple(PartitionSpec(*arg.spec) for arg in given),
            out_specs=PartitionSpec(*case.out_spec),
            check_vma=check_vma,
        )
    f = _differentiated(case, f)
    if interpret and case.interpret == "tpu":
        f = _traced_in(f, _tpu_interpreter)
    if not interpret:
        f = _traced_in(f, functools.partial(_asked_of, mesh.devices.flat[0]))
    args = tuple(
        jax.ShapeDtypeStruct(
            arg.shape, arg.dtype, sharding=NamedSharding(mesh, PartitionSpec(*arg.spec))
        )
        for arg in given
    )
    return jax.jit(f), args


def values(case: Case, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Return global arguments for `case` in interpret mode, the same ones for the same seed."""
    rng = np.random.default_rng(seed)

    def make(arg):
        array = rng.standard_normal(arg.shape) if arg.fill is None else arg.fill(rng, arg.shape)
        array = np.asarray(array).astype(jnp.dtype(arg.dtype))
        if array.shape != arg.shape:
            raise ValueError(f"{case.name}: fill made shape {array.shape}, not {arg.shape}")
        return array

    return tuple(make(arg) for arg in _args(case, True))


def reference(case: Case, interpret: bool = True) -> Any:
    """Return what `build` returns as a jitted function of global arguments on one device.

    The local function is called once for each way that the arguments' specs cut them up, one
    call after the other and outside of any mesh: so nothing is replicated and nothing is
    reduced but by `jax.grad`. Not for cases whose kernel communicates.

    Raises:
      ValueError: the case's kernel communicates, or its output isn't split as its arguments are.
    """
    if case.communicates is not None or not case.wrap:
        raise ValueError(f"{case.name} communicates: it has no meaning on one device")
    axes = {axis for arg in case.args for axis in arg.spec if axis is not None}
    if axes != {a for a in case.out_spec if a is not None} or len(axes) != 1:
        raise ValueError(f"{case.name}: arguments split over {axes}, output over {case.out_spec}")
    (axis,) = axes
    count = dict(case.mesh)[axis]
    cut = [arg.spec.index(axis) if axis in arg.spec else None for arg in case.args]
    f = local(case, None, interpret)

    def whole(*args):
        parts = [
            (x,) * count if dim is None else jnp.split(x, count, dim) for x, dim in zip(args, cut)
        ]
        outs = [f(*part) for part in zip(*parts)]
        return jax.tree.map(lambda *o: jnp.concatenate(o, case.out_spec.index(axis)), *outs)

    f_whole = _differentiated(case, whole)
    if interpret and case.interpret == "tpu":
        f_whole = _traced_in(f_whole, _tpu_interpreter)
    return jax.jit(f_whole)


def assert_equals_one_device(case: Case, **kwargs: Any) -> None:
    """Assert that `case` gives on eight CPU devices what its local function gives on one."""
    mesh = mesh_for(case, jax.devices())
    f, args = build(case, mesh=mesh, interpret=True, **kwargs)
    global_values = values(case)
    got = f(*(jax.device_put(v, a.sharding) for v, a in zip(global_values, args)))
    want = reference(case)(*global_values)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = np.asarray(g, np.float32), np.asarray(w, np.float32)
        assert np.abs(w).max() > 0
        # bf16 partial sums are added in another order: three of its eight bits.
        np.testing.assert_allclose(g, w, rtol=0, atol=2**-5 * np.abs(w).max())
