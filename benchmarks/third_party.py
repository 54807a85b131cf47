"""Audit the kernels of other libraries, traced and not compiled, and print a table of them.

    python benchmarks/third_party.py        in an environment that has the libraries

A row is a kernel that a library's call holds: whether it needs no line, being proven to depend on
its operands alone, if it is well formed; or what is in the way. A library that is not installed is
left out.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pathlib
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent)]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental.pallas import tpu as pltpu  # noqa: E402

KERNELS = ("pallas_call", "core_map", "mpmd_map")


def shape(*sizes, dtype=jnp.bfloat16):
    """Stand in for an array."""
    return jax.ShapeDtypeStruct(sizes, dtype)


def every(cls):
    """Yield a class and those that are made of it."""
    yield cls
    for one in cls.__subclasses__():
        yield from every(one)


def tokamax_calls():
    """Yield tokamax's kernels for TPU and for Triton, with gradients where they have one."""
    from tokamax._src.ops.attention import pallas_mosaic_tpu, pallas_triton
    from tokamax._src.ops.ragged_dot import pallas_mosaic_tpu as ragged

    # Only traced, so no device is there to be asked; a TPU v5e is taken for it.
    info = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V5E, 1)
    for module in list(sys.modules.values()):
        if callable(vars(module).get("get_tpu_info")):
            module.get_tpu_info = lambda: info
    for cls in every(importlib.import_module("tokamax._src.ops.op").Op):
        cls.supported_on = lambda self, device: True
    q = shape(1, 1024, 8, 128)
    for name, op in (
        ("attention, TPU", pallas_mosaic_tpu.PallasMosaicTpuFlashAttention()),
        ("attention, Triton", pallas_triton.PallasTritonFlashAttention()),
    ):
        yield name, op, (q, q, q)
        yield (
            f"{name}, gradient",
            jax.grad(lambda *a, op=op: op(*a).astype(jnp.float32).sum(), argnums=(0, 1, 2)),
            (q, q, q),
        )
    sizes = shape(4, dtype=jnp.int32)
    ragged_dot = ragged.PallasMosaicTpuRaggedDot(config=ragged.Config())

    def dot(x, w, n):
        return ragged_dot(x, w, group_sizes=n)

    yield "ragged_dot, TPU", dot, (shape(1024, 512), shape(4, 512, 512), sizes)
    yield (
        "ragged_dot, TPU, gradient",
        jax.grad(lambda *a: dot(*a).astype(jnp.float32).sum(), argnums=(0, 1)),
        (shape(1024, 512), shape(4, 512, 512), sizes),
    )


def tokamax_loss_calls():
    """Yield tokamax's softmax cross-entropy for TPU."""
    from tokamax._src.ops.linear_softmax_cross_entropy_loss import (
        pallas_mosaic_tpu_kernel as kernel,
    )

    x, labels, w = shape(1024, 512), shape(1024, dtype=jnp.int32), shape(512, 2048)
    yield (
        "softmax cross-entropy, TPU",
        kernel.linear_softmax_cross_entropy_loss_fwd_pallas_mosaic_tpu,
        (x, labels, w),
    )


def recurrentgemma_calls():
    """Yield recurrentgemma's linear recurrence."""
    from recurrentgemma.jax import pallas as kernels

    x = shape(2, 256, 512, dtype=jnp.float32)
    yield "lru, TPU", lambda x, a: kernels.lru_pallas_scan(x, a), (x, x)


CALLS = {"tokamax": (tokamax_calls, tokamax_loss_calls), "recurrentgemma": (recurrentgemma_calls,)}


def kernels_in(jaxpr):
    """Yield the equations of a jaxpr that call kernels."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in KERNELS:
            yield eqn
            continue
        for value in eqn.params.values():
            for one in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(one, "jaxpr", one)
                if hasattr(inner, "eqns"):
                    yield from kernels_in(inner)


def main():
    """Print the table."""
    from shardrules import pallas

    print("| library | call | kernel | without a line |\n|---|---|---|---|")
    for library, makers in CALLS.items():
        try:
            version = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
        for make in makers:
            try:
                for call, f, args in make():
                    row(pallas, f"{library} {version}", call, f, args)
            except (ImportError, AttributeError) as error:
                print(f"| {library} {version} | {make.__name__} | | not traced: {error} |")


def row(pallas, library, call, f, args):
    """Print one call's kernels."""
    try:
        found = list(kernels_in(jax.make_jaxpr(f)(*args).jaxpr))
    except Exception as error:  # what doesn't trace without the accelerator says so
        text = " ".join(str(error).split())[:80]
        print(f"| {library} | {call} | | not traced: {type(error).__name__}: {text} |")
        return
    for eqn in found:
        audit = pallas.audit_call(eqn.primitive.name, eqn.params, len(eqn.invars))
        name = eqn.params.get("name") or getattr(
            getattr(eqn.params.get("jaxpr"), "debug_info", None), "func_name", "?"
        )
        said = (
            "proven"
            if audit.proven
            else "; ".join(dict.fromkeys(f"{b.primitive}: {b.reason}" for b in audit.blockers))
        )
        print(f"| {library} | {call} | `{str(name)[:60]}` | {said} |")


if __name__ == "__main__":
    main()
