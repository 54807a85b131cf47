"""What a kernel case is: one use of one op under `jax.shard_map`, and what JAX makes of it.

Nothing here imports jax: dtypes are names and specs are tuples until `build` turns them into
arrays, so that a module of cases costs nothing to import.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

DATA = ("data",)
MODEL = ("model",)
BOTH = ("data", "model")
GRID = (("data", 4), ("model", 2))
# Kernels that use multimem read the mesh's only axis; Mosaic GPU 0.10.2 wants its name to be one
# letter long.
LINE = (("x", 8),)


@dataclasses.dataclass(frozen=True)
class Arg:
    """One global argument.

    Args:
      shape: global shape.
      dtype: a numpy dtype name.
      spec: for each leading dimension the mesh axis that it is split over, or None.
      fill: `(rng, shape) -> array` that makes sensible values (indices in range, group sizes
        that add up); None for standard normal floats.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: tuple[str | None, ...] = ()
    fill: Callable[[Any, tuple[int, ...]], Any] | None = None


@dataclasses.dataclass(frozen=True)
class Fails:
    """A compilation that raises.

    Args:
      what: the reason in a few words.
      error: the exception's class name.
      match: a regular expression that its message contains.
    """

    what: str
    error: str
    match: str


Bytes = Mapping[tuple[str, ...], int]


@dataclasses.dataclass(frozen=True)
class Expected:
    """All-reduce bytes per device by mesh axes in the compiled program, or how it fails.

    Args:
      unchecked: under `check_vma=False`.
      checked: under `check_vma=True` on plain JAX.
      wrong: whether `checked` compiles with a wrong output type or a wrong gradient.
      needed: the fewest bytes that any arm reached; `REFUSED` where the program is unsound and
        must not compile; `SAME_FAILURE` where it fails for a reason that has nothing to do with
        varying axes.
      same_code: bytes allowed with unchanged user code, where that is more than `needed`.
    """

    unchecked: Bytes | Fails
    checked: Bytes | Fails
    needed: Bytes | str
    wrong: bool = False
    same_code: Bytes | None = None


@dataclasses.dataclass(frozen=True)
class Communicates:
    """The rule that a kernel needs because it talks to other devices.

    Args:
      rule: the name of a rule constructor of `shardrules`.
      axes: its arguments.
      op: where the function that the user would decorate lives, as `module:attribute`.
      kernel: `__name__` of the Pallas kernel body.
    """

    rule: str
    axes: tuple[str, ...]
    op: str
    kernel: str


@dataclasses.dataclass(frozen=True)
class Case:
    """One use of one op.

    Args:
      name: its row in the table of measurements.
      args: global arguments.
      make: `(mesh, interpret) -> f`; f maps local arguments to local outputs and is what
        `jax.shard_map` wraps. It imports the op. `interpret` asks for the op's own interpret
        argument.
      diff: the differentiated arguments, None for the forward pass.
      target: "v5e:2x4", "v5p:2x2x2", "h100" or "b200".
      out_spec: spec of f's output.
      mesh: axis names and sizes.
      interpret: how f runs on CPU: "argument" (the op takes `interpret=True`), "tpu" (under
        `pltpu.force_tpu_interpret_mode()`), None (it can't).
      small_args: arguments for interpret mode, where the real ones take long; None for `args`.
      wrap: False where f is called outside of any shard_map, with global arguments.
      communicates: the rule line that f needs, if its kernel communicates.
    """

    name: str
    args: tuple[Arg, ...]
    make: Callable[[Any, bool], Callable[..., Any]]
    expected: Expected
    diff: tuple[int, ...] | None = None
    target: str = ""
    out_spec: tuple[str | None, ...] = DATA
    mesh: tuple[tuple[str, int], ...] = GRID
    interpret: str | None = None
    small_args: tuple[Arg, ...] | None = None
    wrap: bool = True
    communicates: Communicates | None = None

    def lines(self) -> dict[str, Any]:
        """Return the rules that f needs, by kernel."""
        import shardrules

        needed = self.communicates
        if needed is None:
            return {}
        return {needed.kernel: getattr(shardrules, needed.rule)(*needed.axes)}

    @property
    def platform(self) -> str:
        """Return "tpu" or "gpu"."""
        return "tpu" if self.target.startswith("v") else "gpu"


def bytes_(**by_axis: int) -> dict[tuple[str, ...], int]:
    """Return bytes by mesh axes; `both` stands for data and model together."""
    return {BOTH if k == "both" else (k,): v for k, v in by_axis.items()}


ZERO: Bytes = {}
REFUSED = "refused"
SAME_FAILURE = "same failure"

NOT_ANNOTATED = Fails(
    "output not annotated",
    "ValueError",
    "`manual_axis_type` on `jax.ShapeDtypeStruct` must not be `None`",
)
BWD_TYPE = Fails(
    "bwd type", "ValueError", "Custom VJP bwd rule must produce an output with the same type"
)
NO_DERIVATIVE = Fails("no derivative", "ValueError", "Linearization failed to produce known values")


# What the tables of two platforms share.

FORWARD = Expected(ZERO, NOT_ANNOTATED, ZERO)
TRUSTED = Expected(ZERO, ZERO, ZERO, wrong=True)
WRONG_SPEC = Expected(ZERO, ZERO, REFUSED, wrong=True)


def drawn(low: int, high: int) -> Callable[[Any, tuple[int, ...]], Any]:
    """Fill an argument with integers from `low` up to `high`."""
    return lambda rng, shape: rng.integers(low, high, shape)


def segments(rng, shape):
    """Fill an argument with ids of segments of a sequence."""
    return rng.integers(0, 2, shape).cumsum(axis=-1) // 64


def matmul_with_vjp(make):
    """Give a matmul the derivative that its user would write, of two more matmuls."""

    def with_vjp(mesh, interpret):
        import jax

        matmul = make(mesh, interpret)
        f = jax.custom_vjp(matmul)
        f.defvjp(
            lambda a, b: (matmul(a, b), (a, b)),
            lambda res, g: (matmul(g, res[1].T), matmul(res[0].T, g)),
        )
        return f

    return with_vjp


def stopped(make):
    """Multiply an op's result, whose inputs are constants of the gradient, by one argument more."""

    def with_stop(mesh, interpret):
        from jax import lax

        return lambda *args: make(mesh, interpret)(*map(lax.stop_gradient, args[:-1])) * args[-1]

    return with_stop
