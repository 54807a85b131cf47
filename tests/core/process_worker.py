"""One of several processes: runs the program of ``test_processes`` and compares rules in them all.

python process_worker.py PORT COUNT PROCESS SCENE OUT GROUPS
"""

import json
import os
import pathlib
import sys
import time

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules import errors, program
from shardrules.hooks import shard_map

X = np.arange(32, dtype=np.float32).reshape(8, 4)
W = np.arange(1, 5, dtype=np.float32)[None]  # small integers: any order of sums is exact


@sr.no_communication
def scale_kernel(x_ref, w_ref, o_ref):
    o_ref[...] = x_ref[...] * w_ref[...]


@jax.custom_vjp
def scale(x, w):
    out_shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(scale_kernel, out_shape, interpret=True)(x, w)


scale.defvjp(
    lambda x, w: (scale(x, w), (x, w)),
    lambda saved, g: (scale(g, saved[1]), (g * saved[0]).sum(0, keepdims=True)),
)


def gradients():
    """Return the devices' parts of both gradients, by argument and place, and the verdicts."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    f = shard_map(scale, mesh, (P("data"), P()), P("data"), check=True)
    step = jax.jit(jax.grad(lambda x, w: (f(x, w) ** 2).sum(), argnums=(0, 1)))
    args = [
        jax.make_array_from_callback(
            v.shape, NamedSharding(mesh, spec), lambda index, v=v: v[index]
        )
        for v, spec in ((X, P("data")), (W, P()))
    ]
    parts = {}
    for number, gradient in enumerate(step(*args)):
        for shard in gradient.addressable_shards:
            rows = shard.index[0].indices(gradient.shape[0])[0]
            parts.setdefault(f"{number}, row {rows}", []).append(np.asarray(shard.data).tolist())
    judged = program.judged(program.read(step, args, {}), None, None)
    return parts, [
        [v.verdict, v.collective.kind, list(v.collective.axes or ()), v.bytes]
        for v in judged.verdicts
    ]


def other_rule(ctx):
    return [ctx.union]


def two_rules(process):
    sr.register("a", sr.no_communication)
    sr.register("b", sr.all_gather("model" if process else "data"))


def in_another_order(process):
    for name in ("ab", "ba")[process]:
        sr.register(name, sr.no_communication)


def in_one_only(process):
    if process == 1:
        sr.register("alone", sr.all_reduce("model"))


def functions_of_one_name(process):
    answer = other_rule
    if process == 1:

        def answer(ctx):
            return [ctx.union.drop("model")]

        answer.__qualname__ = "other_rule"
    sr.register("function", answer)


def the_same(process):
    """Two functions of one code, with what they close over: nothing differs."""
    axis = "model"
    sr.register("same", lambda ctx: [ctx.union.vary(axis)])
    sr.register("other", sr.outputs(sr.no_communication, other_rule))


def options(process):
    return sr.install(prove=process == 0)


def scopes(process):
    return sr.rules({"scoped": (sr.no_communication, sr.per_device("data"))[process]})


def traced(*gradients):
    """Trace shard_maps whose check is off, and whose bodies take gradients or not."""
    handle = sr.install(unchecked="check")
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    for takes in gradients:

        def part(x, takes=takes):
            # JAX 0.6.0 differentiates nothing that varies.
            loss = lambda x: jax.lax.psum((x * x).sum(), "data")  # noqa: E731
            return jax.grad(loss)(x) if takes else 2 * x

        f = lambda x: shard_map(part, mesh, P("data"), P("data"), check=False)(x)  # noqa: E731
        jax.make_jaxpr(f)(X)
    return handle


def decisions(process):
    return traced(process == 1)


def decisions_of_two_bodies(process):
    return traced(*([True] if process else [True, False]))


def run_scenes(process):
    """Return, for each scene, what was raised."""
    from shardrules.registry.table import default

    raised = {}
    scenes = [
        the_same,
        two_rules,
        in_another_order,
        in_one_only,
        functions_of_one_name,
        options,
        scopes,
    ]
    if hasattr(jax.lax, "pvary") or hasattr(jax.lax, "pcast"):  # "check" needs values with types
        scenes += [decisions, decisions_of_two_bodies]
    for scene in scenes:
        before = dict(default._entries)
        context = scene(process)
        try:
            if context is None:
                sr.assert_same_rules(timeout_s=60)
            else:
                with context:
                    sr.assert_same_rules(timeout_s=60)
            raised[scene.__name__] = None
        except errors.RulesDifferError as error:
            raised[scene.__name__] = [str(error), error.names, error.processes]
        finally:
            default._entries.clear()
            default._entries.update(before)
            default._changed()
    return raised


def main(port, count, process, scene, out, groups):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", int(count), int(process))
    process = int(process)
    result = {}
    if scene == "all":
        sr.install()
        sr.assert_same_rules(timeout_s=60)
        if groups == "groups":
            result["gradients"], result["verdicts"] = gradients()
        result["raised"] = run_scenes(process)
    elif scene == "coordinator":
        sr.assert_same_rules(timeout_s=60)
        if process == 0:  # it runs the store and the barriers of all
            os._exit(1)
        time.sleep(2)
        try:
            sr.assert_same_rules(timeout_s=2)
        except errors.MissingProcessError as error:
            result["raised"] = [str(error), error.processes]
    elif process == 1:
        os._exit(1)
    else:
        started = time.monotonic()
        try:
            if process == 0:
                sr.assert_same_rules(timeout_s=2)
        except errors.MissingProcessError as error:
            result["raised"] = [str(error), error.processes]
        result["waited_s"] = time.monotonic() - started
    pathlib.Path(out, f"{process}.json").write_text(json.dumps(result))
    if scene != "all":  # process 2 never calls it; no shutdown, which waits for who has died
        time.sleep(60 if scene == "missing" and process else 0)
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
