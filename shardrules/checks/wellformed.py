"""Test in JAX's TPU interpreter whether a kernel's operands determine its result on one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from shardrules.door.interpreter import interpreted
from shardrules.door.jaxprs import KERNELS, equations, kernel_name
from shardrules.errors import RuleCheckError, UnsupportedJaxError

_FAULTS = "races, memory that is read before it is written, or reads out of bounds"


def check_well_formed(run: Callable, blocks: Sequence[Any], whole: Callable, values: Any) -> None:
    """Raise on races, uninitialized memory and reads out of bounds, in JAX's TPU interpreter."""
    try:
        jaxpr, f, args = jax.make_jaxpr(run)(*blocks).jaxpr, run, blocks
    except NameError:  # the kernel names mesh axes
        jaxpr, f, args = jax.make_jaxpr(whole)(*values).jaxpr, whole, values
    kernels = dict(_kernels(jaxpr))
    for_gpus = [name for name, is_for_gpus in kernels.items() if is_for_gpus]
    if for_gpus:
        _warn(for_gpus, "JAX's TPU interpreter doesn't run kernels for GPUs")
    if len(for_gpus) == len(kernels):
        return
    results: dict[str, list] = {}
    fills: tuple[Literal["nan", "zero"], ...] = ("nan", "zero")
    for fill in fills:
        try:
            with interpreted(fill) as races:
                # A new function, since jit would reuse a trace made without the interpreter.
                out = jax.jit(lambda *a: f(*a))(*args)
                results[fill] = jax.device_get(jax.tree_util.tree_leaves(out))
        except UnsupportedJaxError as error:
            return _warn(kernels, str(error))
        except NotImplementedError as error:
            return _warn(kernels, f"JAX's TPU interpreter doesn't run them: {error}")
        except Exception as error:
            if "out-of-bounds" not in str(error).lower().replace(" ", "-"):
                return _warn(kernels, f"JAX's TPU interpreter failed: {_first(error)}")
            raise RuleCheckError(
                f"one of the kernels {_list(kernels)} is not well formed: it reads out of bounds\n"
                f"  {_first(error)}\nMake the index map or the slice stay inside the array.",
                kernels=tuple(kernels),
            ) from None
        if found := races():
            raise RuleCheckError(
                f"one of the kernels {_list(kernels)} is not well formed: two accesses of one "
                f"memory are not ordered\n{found}\nWait for a copy before its buffers are used "
                "again, and order the cores by semaphores.",
                kernels=tuple(kernels),
            )
    for number, (a, b) in enumerate(zip(results["nan"], results["zero"])):
        a, b = map(np.ascontiguousarray, (a, b))
        differ = (a.view(np.uint8) != b.view(np.uint8)).sum()
        if differ:
            raise RuleCheckError(
                f"one of the kernels {_list(kernels)} is not well formed: it reads memory before "
                f"anything is written there, and result {number} of the op (its gradients after "
                "its outputs) depends on what that memory holds: filled with NaN, and with zeros, "
                f"it gives other bits in {differ} of {a.nbytes} bytes\nInitialise scratch and "
                "outputs on every path, in the first step of the grid that sees them.",
                kernels=tuple(kernels),
                result=number,
            )


def _kernels(jaxpr: Any):
    """Yield each Pallas kernel's name, and whether it is for GPUs."""
    for eqn in equations(jaxpr):
        if eqn.primitive.name in KERNELS:
            yield kernel_name(eqn.params)[0], _is_for_gpus(eqn.params)


def _is_for_gpus(params: Mapping[str, Any]) -> bool:
    options = params.get("compiler_params")
    modules = list(options) if isinstance(options, Mapping) else [type(options).__module__]
    meshes = [params.get("mesh"), *(params.get("meshes") or ())]
    modules += [type(mesh).__module__ for mesh in meshes]
    return any("triton" in module or "mosaic_gpu" in module for module in modules)


def _list(kernels) -> str:
    return ", ".join(map(repr, kernels))


def _first(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    relevant = [line for line in lines if "out-of-bounds" in line.lower().replace(" ", "-")]
    return (relevant or lines or [type(error).__name__])[-1].strip()[:300]


def _warn(kernels, why: str) -> None:
    warnings.warn(
        f"check_rule could not look for {_FAULTS} in {_list(kernels)}: {why}", stacklevel=5
    )
