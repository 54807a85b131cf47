"""Whether each ``checkpoint_name`` is saved, offloaded, recomputed, or not a residual."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shardrules.arguments import checked
from shardrules.door import internals
from shardrules.door.jaxprs import inner_jaxprs, scan_counts
from shardrules.errors import ShardrulesError


class NamedValue(NamedTuple):
    """One ``checkpoint_name`` of a program."""

    name: str
    # ``offloaded``, ``saved``, ``recomputed``, or ``not a residual``: no backward pass inside a
    # ``jax.checkpoint`` reads it, so a policy that names it changes nothing
    status: str
    shape: str  # of one value, on all devices, ``"float32[8,16]"``
    bytes: int  # of all values that the loops around it make, on all devices
    is_output: bool  # whether its block returns it
    source: str  # ``file:line``, empty if JAX keeps none


# Equations whose result is the same residual as their operand. A new name makes a new one.
_SAME = ("copy", "copy_p", "device_put", "optimization_barrier", "reduce_precision", "pvary")
_ORDER = ("offloaded", "saved", "recomputed", "not a residual")
_NONE: frozenset[tuple[int, bool]] = frozenset()


@checked
def named_values(f: Callable[..., Any], *args: Any, **kwargs: Any) -> list[NamedValue]:
    """List a program's named values, and what its backward pass does with each.

    Args:
      f: the function that is compiled, jitted or not, with its gradient in it.
      *args: its arguments, arrays or ``jax.ShapeDtypeStruct``.
      **kwargs: its keyword arguments.

    Raises:
      ShardrulesError: ``f`` is not callable, or holds no backward pass of a ``jax.checkpoint``.
    """
    import jax

    if not callable(f):
        raise ShardrulesError(
            f"{type(f).__name__} holds no trace to read names from; pass the function and its "
            "arguments"
        )
    if hasattr(f, "trace"):  # from JAX 0.4.31; it handles static arguments
        jaxpr = f.trace(*args, **kwargs).jaxpr.jaxpr
    else:
        jaxpr = jax.make_jaxpr(f)(*args, **kwargs).jaxpr
    walk = _Walk()
    walk.read(jaxpr, [_NONE] * len(jaxpr.invars), 1, False)
    if not walk.has_backward:
        raise ShardrulesError(
            f"{getattr(f, '__name__', 'the program')} holds no backward pass of a jax.checkpoint, "
            "so no policy decides on names; pass the function that takes the gradient, and wrap "
            "its blocks in jax.checkpoint(block, policy=...)"
        )
    values: dict[tuple[str, str], NamedValue] = {}
    for at, value in enumerate(walk.values):
        if value.status != "recomputed" and (at, True) in walk.kept:
            value = value._replace(status="offloaded")
        elif value.status != "recomputed" and (at, False) in walk.kept:
            value = value._replace(status="saved")
        # A recomputed value is in the forward pass too, where it is not a residual.
        key = (value.name, value.source)
        if key not in values or _ORDER.index(value.status) < _ORDER.index(values[key].status):
            values[key] = value
    return list(values.values())


class _Walk:
    """Follows each named value, and copies of it, to the backward passes that recompute."""

    def __init__(self):
        self.line = internals.load().source_line
        self.has_backward = False
        self.values: list[NamedValue] = []
        # The named values that enter such a pass, by their position, and whether by the host.
        self.kept: set[tuple[int, bool]] = set()

    def read(self, jaxpr: Any, given: Sequence[Any], times: int, recomputing: bool) -> list[Any]:
        """Read a jaxpr; return which named values each of its outputs is a copy of."""
        env = dict(zip(jaxpr.invars, given))

        def copied(atom):
            return _NONE if hasattr(atom, "val") else env.get(atom, _NONE)

        for eqn in jaxpr.eqns:
            name, operands = eqn.primitive.name, [copied(atom) for atom in eqn.invars]
            # As ``remat2`` and ``checkpoint``.
            is_backward = bool(eqn.params.get("differentiated")) and "policy" in eqn.params
            if is_backward:
                self.has_backward = True
                self.kept.update(*operands)
            if name == "name":
                env[eqn.outvars[0]] = frozenset({(len(self.values), False)})
                is_output = any(out is eqn.outvars[0] for out in jaxpr.outvars)
                self._name(eqn, is_output, times, recomputing)
            elif name in _SAME:
                if _to_host(eqn):
                    operands = [frozenset((at, True) for at, _ in values) for values in operands]
                env.update(zip(eqn.outvars, operands))
            runs, carried = times, 0
            if name == "scan":
                # We don't follow a carry: it is the next trip's input, without a name.
                runs, carried = times * eqn.params["length"], scan_counts(eqn.params)[1]
            for inner in inner_jaxprs(eqn.params):
                # Operands that a jaxpr doesn't take come first.
                given = [*[_NONE] * len(inner.invars), *operands][-len(inner.invars) :]
                results = self.read(inner, given, runs, recomputing or is_backward)
                for var, values in list(zip(eqn.outvars, results))[carried:]:
                    env[var] = copied(var) | values
        return [copied(atom) for atom in jaxpr.outvars]

    def _name(self, eqn: Any, is_output: bool, times: int, recomputing: bool) -> None:
        aval = eqn.outvars[0].aval
        self.values.append(
            NamedValue(
                eqn.params["name"],
                "recomputed" if recomputing else "not a residual",
                f"{aval.dtype}[{','.join(map(str, aval.shape))}]",
                aval.size * aval.dtype.itemsize * times,
                is_output,
                self.line(eqn.source_info),
            )
        )


def _to_host(equation: Any) -> bool:
    # JAX 0.4.31 and older call the parameter ``device``.
    params = equation.params
    where = params.get("devices", params.get("device"))
    return equation.primitive.name == "device_put" and "host" in str(where).lower()
