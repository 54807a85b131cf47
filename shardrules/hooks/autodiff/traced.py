"""A custom_vjp's bwd as a jaxpr, asked what it does and run in its place; and its forward."""

from __future__ import annotations

from typing import Any

__all__ = ["Trace", "retraced"]


class Trace:
    """A bwd's jaxpr, which can run in its place.

    Args:
      bwd: the function.
      args: residuals and cotangents; what is no array among them stays what it is, since a Python
        number may be used as a static argument, and a SymbolicZero is asked for by its type.

    Attributes:
      dynamic: which leaves of the arguments are arrays, in their order.
      closed: the jaxpr, from the arrays among the arguments to those among the cotangents.
      paths: the pytree path of each cotangent that is an array.
      returned: the paths of all.
    """

    def __init__(self, bwd, args):
        import jax

        tree = jax.tree_util
        leaves, structure = tree.tree_flatten(args)
        self.dynamic = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        self._arrays = [leaves[i] for i in self.dynamic]

        def run(*arrays):
            full = list(leaves)
            for i, array in zip(self.dynamic, arrays):
                full[i] = array
            out = bwd(*tree.tree_unflatten(structure, full))
            if isinstance(out, list):
                out = tuple(out)
            found, self._structure = tree.tree_flatten_with_path(out)
            arrays = [(path, leaf) for path, leaf in found if isinstance(leaf, jax.Array)]
            self.paths = [path for path, _ in arrays]
            self.returned = [path for path, _ in found]
            self._constant = [None if isinstance(leaf, jax.Array) else leaf for _, leaf in found]
            return [leaf for _, leaf in arrays]

        # Inlined, it leaves the equations that bwd would have left. Not by eval_jaxpr: without a
        # jit around the whole program JAX 0.6.0 can't run a kernel's equation by itself.
        self._jitted = jax.jit(run, inline=True)
        if hasattr(self._jitted, "trace"):
            self.closed = self._jitted.trace(*self._arrays).jaxpr
        else:  # JAX 0.4.28
            self.closed = jax.make_jaxpr(run)(*self._arrays)

    def run(self) -> Any:
        """Return the cotangents, as bwd would."""
        import jax

        arrays = iter(self._jitted(*self._arrays))  # not traced again
        return jax.tree_util.tree_unflatten(
            self._structure, [next(arrays) if one is None else one for one in self._constant]
        )


def retraced(jax_: Any, parts: Any) -> Any:
    """Return the jaxpr of a custom_vjp's fwd, of its primals' types, or None.

    It may close over values of a trace that has ended.

    Args:
      jax_: the symbols.
      parts: of the custom_vjp: its fwd, and its primals.
    """
    import jax

    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in parts.in_avals]

    def run(*flat):
        flat = [jax_.cast(x, jax_.axis_type(a)) for x, a in zip(flat, parts.in_avals)]
        return parts.fwd.call_wrapped(*jax.tree_util.tree_unflatten(parts.in_tree, flat))

    try:
        return jax.make_jaxpr(run)(*structs).jaxpr
    except Exception:  # whatever a second trace runs into, the first one did not
        return None
