"""jax#23215: a Python loop over compiled steps, and what keeps it fast.

    JAX_PLATFORMS=cpu python examples/loop_on_the_host.py

Control flow stays on the host. So each step must reuse its state's memory and must not talk to
the host. The table shows what the assertions say about the report's loop in four versions.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np

from shardrules import report, testing
from shardrules.errors import CostAssertionError

warnings.filterwarnings("ignore", "Some donated buffers")  # JAX says so in one of the four
SIZE = 1024


def initial_state():
    return {"params": jnp.ones((SIZE,)), "momentum": jnp.zeros((SIZE,)), "step": jnp.int32(0)}


def update(state, x):
    momentum = 0.9 * state["momentum"] + x * state["params"]
    params = state["params"] - 0.01 * momentum
    return {"params": params, "momentum": momentum, "step": state["step"] + 1}, params.sum()


def narrower(state, x):
    """Keep the momentum in bfloat16: its memory is not reused, and no one says so."""
    new, loss = update(state, x)
    return {**new, "momentum": new["momentum"].astype(jnp.bfloat16)}, loss


def forgotten(state, x, scale):
    """Take an argument that nothing reads any more."""
    return update(state, x)


def chatty(state, x):
    """Look at the loss from inside."""
    new, loss = update(state, x)
    jax.debug.print("loss {}", loss)
    return new, loss


def found(assertion, *args):
    """Return an assertion's message, or nothing where it passes."""
    try:
        assertion(*args)
    except CostAssertionError as error:
        return str(error)
    return ""


def main():
    x = np.ones((SIZE,), np.float32)
    rows = [["step", "donated memory", "talk with the host"]]
    messages = []
    for f, donated, args in (
        (update, 0, (x,)),
        (narrower, 0, (x,)),
        (forgotten, (0, 2), (x, x)),
        (chatty, 0, (x,)),
    ):
        step = jax.jit(f, donate_argnums=donated)
        args = (initial_state(), *args)
        said = [
            found(testing.assert_donated, step, *args),
            found(testing.assert_no_host_transfers, step, *args),
        ]
        rows.append([f.__name__, *(text.partition(":")[0] or "passes" for text in said)])
        messages += filter(None, said)
    print(report.table(rows), *messages, sep="\n\n")
    print("\nThe loop itself, reading the loss in each iteration:\n")
    print(found(loop, jax.jit(update, donate_argnums=0), jax.device_put(x)))


def loop(step, x):
    state, loss = step(initial_state(), x)  # compiles
    with testing.steady_state() as s:
        for _ in range(10):
            state, loss = step(state, x)
            if not np.isfinite(float(loss)):
                break
            s.tick()


if __name__ == "__main__":
    main()
