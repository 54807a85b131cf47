"""Run one program in two processes of four CPU devices each; this script launches both.

    python examples/two_processes.py

Every process of a job must hold the same rules, or the processes trace different programs and the
job hangs. Both run the same step and get the same gradients. Then process 1 registers one more
rule, and ``shardrules.assert_same_rules()`` raises in both.
"""

import os
import socket
import subprocess
import sys

PROCESSES, DEVICES = 2, 4


def main(process, port):
    """What each process runs; a launcher of one's own starts it on each host."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", PROCESSES, process)

    import numpy as np
    from jax.experimental import pallas as pl
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import shardrules
    from shardrules import testing

    @shardrules.no_communication
    def scale_kernel(x_ref, w_ref, o_ref):
        o_ref[...] = x_ref[...] * w_ref[...]

    @jax.custom_vjp
    def scale(x, w):
        out_shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(scale_kernel, out_shape, interpret=True)(x, w)

    def bwd(residuals, g):
        x, w = residuals
        return scale(g, w), (g * x).sum(0, keepdims=True)

    scale.defvjp(lambda x, w: (scale(x, w), (x, w)), bwd)

    shardrules.install()
    shardrules.assert_same_rules(timeout_s=30)

    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    f = jax.shard_map(scale, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    step = jax.jit(jax.grad(lambda x, w: (f(x, w) ** 2).sum(), argnums=(0, 1)))

    def everywhere(value, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    w = np.ones((1, 8), np.float32)
    args = everywhere(x, P("data")), everywhere(w, P())
    verdicts = testing.assert_no_defensive_psum(step, *args)
    dx, dw = step(*args)
    for shard in dx.addressable_shards:
        np.testing.assert_allclose(shard.data, (2 * x * w**2)[shard.index])
    for shard in dw.addressable_shards:
        np.testing.assert_allclose(shard.data, (2 * x**2 * w).sum(0, keepdims=True))
    print(
        f"process {process} of {jax.process_count()}: {len(verdicts.verdicts)} collective, needed; "
        "the gradients are right",
        flush=True,
    )

    if process == 1:
        shardrules.register("ring_all_gather", shardrules.all_gather("model"))
    try:
        shardrules.assert_same_rules(timeout_s=30)
    except shardrules.errors.RulesDifferError as error:
        print(f"process {process}: {error}", flush=True)


def launch():
    """Run ``main`` in each process, and print what they print, one after the other."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(process), str(port)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for process in range(PROCESSES)
    ]
    for process in processes:
        print(process.communicate()[0], end="")
    return max(process.returncode for process in processes)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])) if len(sys.argv) > 1 else launch())
