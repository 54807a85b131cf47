"""What `shardrules.watch` and `run` add to a process's compilation: paired, in turns.

python benchmarks/watching.py --rounds=9 --layers=1 --layers=5 --layers=30
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import contextlib
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import paired
from absl import app, flags
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules.watching import compiling

_ROUNDS = flags.DEFINE_integer("rounds", 9, "pairs of compilations", lower_bound=1)
_LAYERS = flags.DEFINE_multi_integer("layers", [1, 5, 30], "layers of the programs; repeatable")


def layers(count):
    """A gradient of some layers, and its arguments' shapes on a mesh."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))

    def shape(*sizes, spec):
        return jax.ShapeDtypeStruct(sizes, np.float32, sharding=NamedSharding(mesh, spec))

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w) * jax.nn.softmax(x @ w.T)
        return (x**2).sum()

    weights = [shape(64, 64, spec=P(None, "model")) for _ in range(count)]
    return jax.grad(loss), (weights, shape(64, 64, spec=P("data")))


def eager(count):
    """Many small programs, one after the other, as a script's set-up makes them."""
    for n in range(count):
        jnp.sin(jnp.ones(n + 1)).block_until_ready()


@contextlib.contextmanager
def timed_notes():
    """Watch, and sum up the processor time that noting takes, the walk of jaxprs included."""
    spent = [0.0]
    kept = []
    originals = compiling._compile, compiling._lower

    def timed(wrapper):
        def function(original, *args, **kwargs):
            inner = [0.0]

            def measured(*a, **k):
                start = time.process_time()
                try:
                    return original(*a, **k)
                finally:
                    inner[0] += time.process_time() - start

            start = time.process_time()
            found = wrapper(measured, *args, **kwargs)
            spent[0] += time.process_time() - start - inner[0]
            return found

        return function

    compiling._compile, compiling._lower = map(timed, originals)
    stop = compiling.start(lambda executable, traced: kept.append(executable))
    try:
        yield spent
    finally:
        stop()
        compiling._compile, compiling._lower = originals


def program(count):
    """Return what compiles a gradient of some layers."""
    function, shapes = layers(count)
    return lambda: jax.jit(lambda *a: function(*a)).lower(*shapes).compile()


def took(work, around) -> float:
    """Return processor seconds of some compilations, of nothing that was compiled before."""
    jax.clear_caches()
    with around():
        return paired.seconds(work, time.process_time)


def share(work) -> float:
    """Return the part of compiling that noting takes."""
    jax.clear_caches()
    with timed_notes() as spent:
        whole = paired.seconds(work, time.process_time)
    return spent[0] / whole


def main(_):
    """Print the table."""
    paired.print_stamp()
    paired.print_head(["compiled", "with watch / without", "noting alone / lowering and compiling"])
    programs = [(f"the gradient of {n} layers", program(n)) for n in _LAYERS.value]
    for name, work in (*programs, ("60 eager operations", lambda: eager(30))):
        found = paired.rounds(
            {
                "with": functools.partial(took, work, shardrules.watch),
                "without": functools.partial(took, work, contextlib.nullcontext),
                "noting": functools.partial(share, work),
            },
            _ROUNDS.value,
            warm_count=0,
        )
        ratio = paired.shown(paired.ratio(found["with"], found["without"]))
        paired.print_row([name, ratio, f"{statistics.median(found['noting']):.2%}"])


if __name__ == "__main__":
    app.run(main)
