"""The program of jax#21855, without flax and in f32: where its backward pass reduces, and why.

    python examples/issue_21855.py

A copy kernel in a custom_vjp, on a mesh of (4 data, 2 model) with the batch over data. Nothing in
it needs a collective. For each platform whose compiler is installed, and each version of the
program, it prints the collectives of the compiled gradient and the verifier's verdict on each.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

import inspect
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules import aot, report, testing

try:
    from jax import shard_map
except ImportError:
    from jax.experimental.shard_map import shard_map

# check_vma was called check_rep before JAX 0.6.1.
CHECK = "check_vma" if "check_vma" in inspect.signature(shard_map).parameters else "check_rep"
BATCH, EMBEDDING = 4, 128


def _copy_kernel_pallas(operand_a_ref, operand_b_ref):
    operand_b_ref[...] = operand_a_ref[...]


def make_simple_func(kernel, **options):
    """The report's custom_vjp around its kernel."""

    @jax.custom_vjp
    def simple_func(inputs):
        return pl.pallas_call(
            kernel, out_shape=jax.ShapeDtypeStruct(inputs.shape, inputs.dtype), **options
        )(inputs)

    simple_func.defvjp(lambda x: (simple_func(x), x), lambda _, out_grad: (simple_func(out_grad),))
    return simple_func


def gradient(simple_func, mesh, check):
    """The report's gradient, of a loss whose cotangent is not constant, and its argument."""
    func = shard_map(
        simple_func,
        mesh=mesh,
        in_specs=P("data", None),
        out_specs=P("data", None),
        **{CHECK: check},
    )
    argument = jax.ShapeDtypeStruct(
        (BATCH, EMBEDDING), jnp.float32, sharding=NamedSharding(mesh, P("data", None))
    )
    return jax.jit(jax.grad(lambda x: (func(x) ** 2).sum())), argument


def platforms():
    """Yield (name, devices, pallas_call's options) for each platform that can be compiled for."""
    yield "CPU", jax.devices("cpu"), {"interpret": True}
    if aot.missing_plugin("tpu") is None:
        yield "TPU v5e:2x4", aot.tpu("v5e:2x4"), {}
    if aot.missing_plugin("gpu") is None:
        from jax.experimental.pallas import triton

        params = getattr(triton, "CompilerParams", None) or triton.TritonCompilerParams
        yield "8xH100", aot.gpu("h100", 8), {"compiler_params": params()}


def cell(kernel, options, mesh, check):
    """What one arm compiles to, or the first line of what JAX says instead."""
    f, argument = gradient(make_simple_func(kernel, **options), mesh, check)
    try:
        lowered = f.lower(argument)
    except (ValueError, TypeError, NotImplementedError) as error:
        first = str(error).splitlines()[0]
        return f"{type(error).__name__}:\n" + "\n".join(textwrap.wrap(first, 44))
    judgement = testing.judge(lowered)
    backward = [v for v in judgement.verdicts if v.collective.phase != "forward"]
    lines = []
    for v in backward:
        blocked = ", ".join(dict.fromkeys(b.kernel or b.target for b in v.blockers))
        lines.append(
            f"{v.collective.kind} over {report.over(v)}, {v.bytes} B:\n  {v.verdict}"
            + (f": {blocked}" if blocked else "")
        )
    return "\n".join(lines) or "0 collectives"


def main():
    rows = [
        [
            "platform",
            f"{CHECK}=False, no rule",
            f"{CHECK}=False, with rule",
            f"{CHECK}=True, plain JAX",
            f"{CHECK}=True, shardrules",
        ]
    ]
    declared = shardrules.no_communication(_copy_kernel_pallas)
    for name, devices, options in platforms():
        mesh = Mesh(np.array(devices).reshape(4, 2), ("data", "model"))
        plain = cell(_copy_kernel_pallas, options, mesh, True)
        with shardrules.install(prove=False):  # else its own jaxpr is rule enough
            without = cell(_copy_kernel_pallas, options, mesh, False)
        with shardrules.install():
            rows.append(
                [
                    name,
                    without,
                    cell(declared, options, mesh, False),
                    plain,
                    cell(declared, options, mesh, True),
                ]
            )
    print("Collectives in the backward pass")
    print(report.table(rows))

    mesh = Mesh(np.array(jax.devices("cpu")).reshape(4, 2), ("data", "model"))
    with shardrules.install():
        f, _ = gradient(make_simple_func(declared, interpret=True), mesh, True)
        x = jax.random.normal(jax.random.PRNGKey(0), (BATCH, EMBEDDING))
        single = jax.grad(lambda x: (make_simple_func(declared, interpret=True)(x) ** 2).sum())(x)
        np.testing.assert_array_equal(f(x), single)
    print(f"\nOn {len(mesh.devices.flat)} CPU devices the gradient equals the single-device one.")


if __name__ == "__main__":
    main()
