"""Gather facts by retracing a shard_map: its sums, its constants, and why JAX rejects it."""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from shardrules.door.jaxprs import (
    CASTS,
    KERNELS,
    SUMS,
    has_tangent,
    inner_jaxprs,
    is_inexact,
    name_of,
    opened,
)
from shardrules.door.protocols import ClosedJaxpr, Eqn
from shardrules.errors import first_line
from shardrules.jaxprs.made_of import has_same_steps
from shardrules.jaxprs.walk import Inside, equations, visited


class TracedOutput(NamedTuple):
    """An output that may vary over axes over which its spec says that it is replicated."""

    path: str
    spec: str
    axes: str


class Sum(NamedTuple):
    """An all-reduce of the body or of its derivative."""

    bytes: int  # of its operand on one device
    group_size: int  # devices
    runs: int | None  # how often the loops around it run it; None if one is a while_loop


class Unseeable(Exception):
    """Raised for a body that can't be retraced, since the program would observe the retrace."""


def why_undifferentiated(args: tuple[Any, ...]) -> list[str]:
    """Say which arguments have gradients that no trace here takes."""
    import jax

    leaves = [
        x for x in jax.tree_util.tree_leaves(args) if not isinstance(x, (int, float, complex))
    ]
    others = [x for x in leaves if has_tangent(x) and not is_inexact(x)]
    kinds = dict.fromkeys(str(getattr(leaf, "dtype", type(leaf).__name__)) for leaf in others)
    return [f"an argument is of {kind}, whose gradients are of another type" for kind in kinds]


def floats(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the positions of the leaves of a float or complex type."""
    import jax

    return tuple(n for n, leaf in enumerate(jax.tree_util.tree_leaves(args)) if is_inexact(leaf))


def traced(
    f: Any,
    args: tuple[Any, ...],
    chosen: Sequence[int] = (),
    order: int = 0,
    pulling: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Any:
    """Trace a function and its derivatives up to ``order`` with respect to the chosen leaves.

    For order 0 and some leaves, trace its linearization, which JAX could transpose. ``pulling()``
    surrounds the pullbacks of these derivatives, but not pullbacks inside the function.
    """
    # Arrays become arguments of the jaxpr; other leaves (numbers, strings) stay as they are. Each
    # order wraps the function once more in a vjp whose cotangents are ones.
    import jax
    import numpy as np

    leaves, tree = jax.tree_util.tree_flatten(args)
    numbers = [n for n, x in enumerate(leaves) if hasattr(x, "shape") and hasattr(x, "dtype")]
    arrays = [leaves[n] for n in numbers]

    def called(*values: Any) -> Any:
        given = list(leaves)
        for n, value in zip(numbers, values):
            given[n] = value
        return f(*jax.tree_util.tree_unflatten(tree, given))

    def cotangent(x: Any) -> Any:
        return jax.numpy.ones_like(x) if is_inexact(x) else np.zeros(x.shape, jax.dtypes.float0)

    def differentiated(function: Any) -> Any:
        def run(*some: Any) -> Any:
            out, backward = jax.vjp(function, *some)
            with pulling():
                return out, backward(jax.tree_util.tree_map(cotangent, out))

        return run

    def run(*values: Any) -> Any:
        by = [numbers.index(n) for n in chosen]

        def of_some(*some: Any) -> Any:
            given = list(values)
            for n, value in zip(by, some):
                given[n] = value
            return called(*given)

        some = [values[n] for n in by]
        if some and not order:
            out, of_tangents = jax.linearize(of_some, *some)
            return out, of_tangents(*some)
        function = of_some
        for _ in range(order):
            function = differentiated(function)
        return function(*some)

    if order and not chosen:
        raise TypeError("no argument is of a float type")
    return jax.make_jaxpr(run)(*arrays)


def inside(make: Any, asked: dict[str, Any], check: bool, run: Callable[[], Any]) -> Any:
    """Call ``run`` in the body of a shard_map with the same options, and return its result."""
    import jax

    found: list[Any] = []
    _, *names = asked
    options = {name: asked[name] for name in names} | {"in_specs": (), "out_specs": ()}
    options |= {name: check for name in names if name.startswith("check_")}

    def body() -> tuple[()]:
        found.append(run())
        return ()

    jax.make_jaxpr(make(body, **options))()
    return found[0]


class Derivative(NamedTuple):
    """A traced derivative of a call."""

    chosen: tuple[int, ...]  # the leaves of the arguments with respect to which it is taken
    order: int
    closed: Any
    changed: Any  # the Python state that this trace changed
    is_last: bool = False  # whether no higher order was traced for these leaves


class Off(NamedTuple):
    """The traces of a call with the check off."""

    called: Any
    changed: Any  # the Python state that this trace changed
    derivatives: list[Derivative]
    undifferentiated: str
    is_steady: bool  # whether a second trace changed the same state
    tangent: Derivative | None  # None if the derivative runs no author's rule
    computed: set[Any]  # what its bwds compute
    alike: Any = ()  # which rules are left in each program: see ``CustomRules.alike``

    @property
    def told(self) -> tuple[object, ...]:
        """Return ``alike``, whether the traces are steady, and which traces changed state."""
        derivatives = (bool(derivative.changed) for derivative in self.derivatives)
        return self.alike, self.is_steady, bool(self.changed), *derivatives

    @property
    def programs(self) -> list[ClosedJaxpr]:
        """Return the program and its derivatives, which hold what bwds compute."""
        return [self.called, *(derivative.closed for derivative in self.derivatives)]

    def holds_refs(self, kind: type) -> bool:
        """Return whether a program makes or uses refs outside of kernels."""
        inside = (eqn for program in self.programs for eqn in equations(opened(program)))
        return any(isinstance(v.aval, kind) for eqn in inside for v in (*eqn.invars, *eqn.outvars))


def derivatives(
    trace: Callable[[tuple[int, ...], int], tuple[Any, Any]],
    args: tuple[Any, ...],
    has_rules: Callable[[Any], bool],
) -> tuple[list[Derivative], str]:
    """Trace the derivative by all float leaves at once, or else by each leaf alone.

    Trace the second derivative too if the first one still holds authors' rules or steps that round.
    ``trace`` takes the leaves and the order, and returns the program and the Python state that
    changed. Also return why the derivative by all leaves failed; empty if it didn't.
    """
    why = ""

    def attempt(chosen: tuple[int, ...]) -> list[Derivative]:
        nonlocal why
        made: list[Derivative] = []
        try:
            while len(made) < 2 and (not made or has_rules(made[-1].closed)):
                order = len(made) + 1
                made.append(Derivative(chosen, order, *trace(chosen, order)))
        except Exception as error:  # an integer loop, an effect: what JAX can't transpose  # noqa: BLE001
            why = why or ("" if made else _why_not(error))
        return [*made[:-1], *(each._replace(is_last=True) for each in made[-1:])]

    every = floats(args)
    taken = attempt(every)
    if not taken and len(every) > 1:
        for number in every:
            taken += attempt((number,))
    return taken, why


def _why_not(error: Exception) -> str:
    """Say why JAX takes no derivative; JAX's own message for a missing rule names internals."""
    line = first_line(error)
    missing = "an operation in it has no derivative in JAX"
    return missing if "Linearization failed" in line else line


def sums(jaxpr: Any, sizes: dict[Any, int] | None = None, runs: int | None = 1) -> list[Sum]:
    """List the psums inside a jaxpr's shard_maps; of a cond, list only its costliest branch's."""
    return visited(opened(jaxpr), _sums_of, (sizes, runs))


def _sums_of(
    eqn: Eqn, around: tuple[dict[Any, int] | None, int | None], inside: Inside[Any, Any]
) -> Iterator[Sum]:
    (sizes, runs), name, params = around, eqn.primitive.name, eqn.params
    if name in KERNELS:
        return
    if name in SUMS and sizes is not None:
        axes = [axis for axis in params.get("axes", ()) if isinstance(axis, str)]
        groups = params.get("axis_index_groups")
        count = len(groups[0]) if groups else math.prod(sizes.get(axis, 1) for axis in axes)
        avals = [v.aval for v in eqn.invars]
        moved = sum(int(a.size) * a.dtype.itemsize for a in avals if hasattr(a, "size"))
        if axes and count > 1:  # an axis of one device moves nothing
            yield Sum(moved, count, runs)
    inner_sizes, inner_runs = sizes, runs
    if name == "shard_map":
        inner_sizes = {str(k): int(v) for k, v in dict(params["mesh"].shape).items()}
    elif name == "scan":
        inner_runs = None if runs is None else runs * params["length"]
    elif name == "while":
        inner_runs = None
    found = inside((inner_sizes, inner_runs))
    if name == "cond":
        yield from max(found, key=summed_bytes, default=())
    else:
        yield from itertools.chain(*found)


def summed_axes(inside: Iterable[Eqn]) -> tuple[str, ...]:
    """Return the mesh axes that all sums name, in their order; nothing if the sums differ."""
    found = {eqn.params.get("axes", ()) for eqn in inside if name_of(eqn) in SUMS}
    named = [axes for axes in found if all(isinstance(axis, str) for axis in axes)]
    return tuple(named[0]) if len(found) == len(named) == 1 else ()


def sent_bytes(sums: Iterable[Sum]) -> int:
    """Return the bytes one device sends for ring all-reduces; a while_loop's body counts once."""
    return sum((s.runs or 1) * -(-2 * (s.group_size - 1) * s.bytes // s.group_size) for s in sums)


def summed_bytes(sums: Iterable[Sum]) -> int:
    """Count the operand bytes of all-reduces on one device; a while_loop's body counts once."""
    return sum((s.runs or 1) * s.bytes for s in sums)


def computed(closed: ClosedJaxpr) -> collections.Counter[tuple[str, str]]:
    """Count a jaxpr's equations by primitive and result type, without casts of type or dtype."""
    counted: collections.Counter[tuple[str, str]] = collections.Counter()
    # JAX 0.12 converts the dtype of a Python number only after it casts the number to vary.
    left_out = CASTS | {"convert_element_type"}
    for eqn in equations(opened(closed)):
        if eqn.primitive.name in left_out:
            continue
        name = "psum" if name_of(eqn) in SUMS else name_of(eqn)
        for var in eqn.outvars:
            form = f"{getattr(var.aval, 'dtype', '')}{getattr(var.aval, 'shape', '')}"
            counted[name, form] += 1
    return counted


def weak(closed: ClosedJaxpr) -> list[bool]:
    """Return which results have a weak type, which gives way to that of the other operand."""
    # jax.lax.psum's result has none; the check's own psum keeps its operand's (JAX 0.12).
    return [getattr(aval, "weak_type", False) for aval in closed.out_avals]


def why_weak(off: ClosedJaxpr, on: ClosedJaxpr) -> list[str]:
    """Say why gradients have another dtype with the check on in what follows; empty if not."""
    if weak(off) == weak(on):
        return []
    return [
        "a gradient by a Python number that is traced has a weak type with the check on, which may "
        "change what it is combined with: pass an array, jnp.float32(x)"
    ]


def computes(closed: ClosedJaxpr) -> tuple[object, list[bool]]:
    """Return what a jaxpr computes, as far as ``computed`` and ``weak`` tell."""
    return computed(closed), weak(closed)


class Constants(NamedTuple):
    """The constants in a jaxpr."""

    scalars: frozenset[Any]  # scalar operands, each with the name of its dtype
    settings: frozenset[Any]  # numbers among the parameters of equations, each with its name

    def has_other(self, than: Constants) -> bool:
        """Return whether these hold a nonzero scalar that ``than`` lacks in either dtype."""
        for one in self.scalars - than.scalars:
            if one[0] != 0 and not any(_is_same(one, other) for other in than.scalars):
                return True
        return False


def constants(closed: ClosedJaxpr) -> Constants:
    """Return the constants in a jaxpr, which show whether Python state differed between traces.

    If the body makes a counter, the counter can't be restored, and may count more traces with the
    check on.
    """
    import numpy as np

    inside = list(equations(opened(closed)))
    # If a branch returns a number as it is, no equation holds the number until the check casts it.
    returned = (jaxpr.outvars for eqn in inside for jaxpr in inner_jaxprs(eqn.params))
    atoms = itertools.chain(*(eqn.invars for eqn in inside), *returned)
    arrays = (np.asarray(atom.val) for atom in atoms if hasattr(atom, "val"))
    scalars = (
        (a.item(), str(a.dtype)) for a in arrays if a.shape == () and a.dtype.kind in "biufcV"
    )
    settings = (
        (eqn.primitive.name, name, value)
        for eqn in inside
        # Skip equations that hold jaxprs: their numbers count inputs, which the check may change.
        if name_of(eqn) not in (*CASTS, *SUMS) and not any(inner_jaxprs(eqn.params))
        for name, value in eqn.params.items()
        if type(value) in (int, float)
    )
    return Constants(frozenset(scalars), frozenset(settings))


def has_same_tangent(one: ClosedJaxpr, other: ClosedJaxpr) -> bool:
    """Return whether two linearized programs take the same steps with the same constants."""
    was, now = constants(one), constants(other)
    same_numbers = not (was.has_other(now) or now.has_other(was))
    return was.settings == now.settings and same_numbers and has_same_steps(one, other)


def _is_same(one: Any, other: Any) -> bool:
    """Return whether scalars are equal in either dtype, since JAX may convert one after a cast."""
    import ml_dtypes  # noqa: F401  # its dtypes have names
    import numpy as np

    (a, of), (b, by) = one, other
    if a == b or (a != a and b != b):
        return True
    if "int" in of and "int" in by:  # equal bits
        count = min(np.dtype(of).itemsize, np.dtype(by).itemsize) * 8
        return bool((int(a) - int(b)) % (1 << count) == 0)
    for name in (d for d in (of, by) if "int" not in d and d != "bool"):
        # NumPy raises for a number that the narrower dtype can't hold, or a complex one as a float.
        with np.errstate(all="ignore"), contextlib.suppress(TypeError, ValueError, OverflowError):
            dtype = np.dtype(name).type
            if dtype(a) == dtype(b):
                return True
    return False


# JAX's message about an output whose spec omits axes that it varies over: up to JAX 0.5.3, and
# since 0.6.
_UNREPLICATED = re.compile(
    r"out_specs(?P<path>\S*) is (?P<spec>.+?) which implies that the corresponding output value is "
    r"(?:replicated across mesh axis '(?P<one>[^']*)'"
    r"|replicated across mesh axes .*?missing the required axes (?P<old>[^*]*?)(?= \*|  |$)"
    r"|only varying across mesh axes \{[^}]*\} and not \{(?P<new>[^}]*)\})"
)

# JAX's advice to switch the check off, which misleads a user who is about to switch it on.
_OFF_AGAIN = re.compile(
    r"\s*Please open an issue at \S+?,? and as a temporary workaround pass the "
    r"check_(?:vma|rep)=False argument to `?(?:jax\.)?shard_map`?\.?"
)


def words(error: BaseException) -> str:
    """Return an error's message without JAX's advice to switch the check off."""
    return _OFF_AGAIN.sub("", str(error)).strip() or first_line(error)


def outputs(error: BaseException) -> tuple[TracedOutput, ...]:
    """Return the outputs that JAX names in an error about out_specs; none for other errors."""
    text = " ".join(str(error).split())
    if "out_specs which require replication" not in text:
        return ()
    return tuple(
        TracedOutput(
            match["path"],
            match["spec"],
            (match["one"] or match["new"] or match["old"] or "").strip(" .{}").split(" Check")[0],
        )
        for match in _UNREPLICATED.finditer(text)
    )
