"""Compare a declared rule with what the op does, on CPU devices with random data.

Declarations are trusted, so a wrong one silently gives wrong gradients. We compare three gradients,
because a wrong rule affects only some of them: a rule that wrongly drops an axis gives the right
gradient with the check off, and N times the gradient with it on.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shardrules import hooks
from shardrules.arguments import checked, shown
from shardrules.checks.wellformed import check_well_formed
from shardrules.errors import RuleCheckError, ShardrulesError
from shardrules.report.grouping import counted


@checked
def check_rule(
    op: Callable[..., Any],
    mesh: Any,
    *args: Any,
    in_specs: Any = None,
    out_specs: Any = None,
    reference: Callable[..., Any] | None = None,
    gradients: bool = True,
    seed: int = 0,
    rtol: float = 1e-4,
) -> None:
    """Run an op under its rule, and compare the rule with the results.

    JAX's TPU interpreter first runs the Pallas kernels. It finds faults that no audit can: races,
    memory that is read before it is written, reads out of bounds. A warning names the kernels that
    it can't run (those for GPUs).
    Outputs that the rule calls invariant over an axis must be bitwise equal along it. The outputs,
    and the gradients with respect to all floating-point arguments, must be the same with the check
    on, with it off, and on a single device. Where the rule drops an axis, a bwd that is right with
    the check on gives one N-th of the gradient with it off: that is a warning, not an error.

    Args:
      op: the function that runs inside shard_map, on one device's blocks. It must run on CPU
        (``interpret`` of pallas_call, TPU interpret parameters, an FFI handler for CPU).
      mesh: a mesh of CPU devices.
      *args: global arrays, or ShapeDtypeStructs for which random data is drawn.
      in_specs: their PartitionSpecs, as for jax.shard_map; those of their shardings if None.
      out_specs: the outputs' PartitionSpecs; if None, each output's first dimension is split over
        the axes over which the output varies by the rule.
      reference: the same function of the global arrays on a single device. Without it, op runs on
        one block after the other; an op that communicates needs a reference.
      gradients: whether to compare gradients.
      seed: the seed of the random data.
      rtol: the largest allowed difference, relative to the largest result; the order of sums
        differs.

    Raises:
      RuleCheckError: results differ from the rule or from each other, or a kernel is not well
        formed; the message names the output, argument or kernel, the axes, and by how much.
      ShardrulesError: if the arguments don't fit.

    Examples:
      >>> testing.check_rule(scale, mesh, x, in_specs=P("data"), gradients=False)
    """
    __tracebackhide__ = True  # pytest shows the line that calls this
    import jax

    _check_mesh(mesh)
    if in_specs is None:
        in_specs = tuple(_spec_of(i, leaf) for i, leaf in enumerate(args))
    elif isinstance(in_specs, jax.sharding.PartitionSpec):
        in_specs = (in_specs,) * len(args)
    elif (
        not isinstance(in_specs, (tuple, list))
        or len(in_specs) != len(args)
        or not all(isinstance(spec, jax.sharding.PartitionSpec) for spec in in_specs)
    ):
        raise ShardrulesError(
            f"in_specs={shown(in_specs)} does not fit {counted(len(args), 'argument')}; give a "
            "PartitionSpec for each, or one for all",
            in_specs=in_specs,
        )
    # The check needs the hooks, which apply the rule.
    with contextlib.nullcontext() if hooks.installed() else hooks.install():
        try:
            ruled = _RuledOp(op, mesh, _draw(args, seed), in_specs, out_specs)
            ruled.check_invariant_blocks()
            ruled.check_kernels(gradients)
            ruled.check_results(reference, gradients, seed + 1, rtol)
        except Exception as error:
            text = "" if isinstance(error, ShardrulesError) else str(error)
            if gradients and re.search("differentiat|autodiff|JVP", text):
                error.add_note("check_rule compares gradients; an op without takes gradients=False")
            raise


class _RuledOp:
    """An op with its arguments on a mesh; ``types`` are its outputs' varying axes by the rule."""

    def __init__(self, op: Callable, mesh: Any, values: list[Any], in_specs: Any, out_specs: Any):
        import jax

        self._op, self._mesh, self._values, self._in_specs = op, mesh, values, in_specs
        # A mesh of explicit axes wants its arguments placed.
        self._placed = [
            jax.device_put(value, jax.sharding.NamedSharding(mesh, spec))
            for value, spec in zip(values, in_specs)
        ]
        self.types, default_specs = self._trace_types(out_specs is None)
        self._out_specs = default_specs if out_specs is None else out_specs

    def _trace_types(self, need_specs: bool) -> tuple[list[frozenset[str]], Any]:
        """Return each output's varying axes, and out_specs that split first dimensions by them."""
        import jax

        types: list[frozenset[str]] = []
        specs: list[Any] = []

        def spy(*blocks):
            flat, tree = jax.tree_util.tree_flatten(self._op(*blocks))
            types[:] = map(hooks.varying, flat)
            order = [tuple(a for a in self._mesh.axis_names if a in varying) for varying in types]
            for number, (leaf, axes) in enumerate(zip(flat, order)):
                if need_specs and axes and not leaf.ndim:
                    raise ShardrulesError(
                        f"output {number} is a scalar that varies over {{{', '.join(axes)}}}; pass "
                        "an op whose outputs can be split, and its out_specs",
                        output=number,
                    )
            specs[:] = [tree.unflatten([_spec(axes) if axes else _spec() for axes in order])]
            return ()

        jax.eval_shape(self._mapped(spy, (), check=True), *self._placed)
        return types, specs[0]

    def _mapped(self, f: Callable, out_specs: Any, check: bool) -> Callable:
        return hooks.shard_map(f, self._mesh, self._in_specs, out_specs, check=check)

    def _stacked(self) -> Callable:
        """Return the op as a function that stacks the outputs of all devices, unchecked."""
        import jax

        def stacked(*blocks):
            return [leaf[None] for leaf in jax.tree_util.tree_leaves(self._op(*blocks))]

        return self._mapped(stacked, _spec(tuple(self._mesh.axis_names)), check=False)

    def _places(self, spec: Any, shape: Sequence[int]) -> Any:
        import jax

        sharding = jax.sharding.NamedSharding(self._mesh, spec)
        return sharding.devices_indices_map(tuple(shape))

    def check_invariant_blocks(self) -> None:
        """Compare, bit by bit, the blocks that the rule calls equal."""
        import jax
        import numpy as np

        outputs = jax.jit(self._stacked())(*self._placed)
        for number, (leaf, varying) in enumerate(zip(outputs, self.types)):
            blocks = np.ascontiguousarray(np.asarray(leaf))
            data = blocks.reshape(*self._mesh.devices.shape, -1).view(np.uint8)
            for at, axis in enumerate(self._mesh.axis_names):
                same = (data == np.take(data, [0], axis=at)).all(axis=-1)
                if axis not in varying and not same.all():
                    raise RuleCheckError(
                        f"output {number} is declared invariant over {axis!r}, but "
                        f"{(~same).sum()} of {same.size} devices hold other bits than the first "
                        "along that axis; the rule says that it varies over "
                        f"{{{', '.join(sorted(varying))}}} only. Declare what the op does, such as "
                        f"shardrules.per_device({axis!r}).",
                        output=number,
                        axis=axis,
                    )

    def check_kernels(self, gradients: bool) -> None:
        """Run the Pallas kernels of one device in JAX's TPU interpreter."""
        first = self._mesh.devices.flat[0]
        blocks = [
            value[self._places(spec, value.shape)[first]]
            for spec, value in zip(self._in_specs, self._values)
        ]
        floats = _floats(blocks) if gradients else ()
        run = _with_gradients(self._op, itertools.repeat(1), floats)
        check_well_formed(run, blocks, self._stacked(), self._placed)

    def check_results(
        self, reference: Callable | None, gradients: bool, seed: int, rtol: float
    ) -> None:
        """Compare outputs and gradients with the check on, with it off, and on one device."""
        import jax

        ways = {
            f"check {word}": self._mapped(self._op, self._out_specs, check=on)
            for word, on in (("on", True), ("off", False))
        }
        shapes = jax.eval_shape(ways["check on"], *self._placed)
        if reference is not None:
            _same_shapes(reference, self._values, shapes)
        ways["single device"] = reference or self._block_by_block(shapes)
        weights = _draw(jax.tree_util.tree_leaves(shapes), seed)
        floats = _floats(self._values) if gradients else ()
        results = {
            way: jax.device_get(
                jax.jit(_with_gradients(f, weights, floats))(
                    *(self._values if way == "single device" else self._placed)
                )
            )
            for way, f in ways.items()
        }
        entering = frozenset().union(*map(_axes_of, self._in_specs))
        drops = any(entering - varying for varying in self.types)
        names = [f"output {number}" for number in range(len(weights))]
        names += [f"gradient of argument {number}" for number in floats]
        for position, name in enumerate(names):
            each = {way: [*leaves, *grads][position] for way, (leaves, grads) in results.items()}
            _compare_ways(name, each, rtol, drops)

    def _block_by_block(self, shapes: Any) -> Callable:
        """Return the op as a function of the global arrays that runs on one block after another."""
        import jax

        specs = jax.tree_util.tree_leaves(
            self._out_specs, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec)
        )
        leaves, tree = jax.tree_util.tree_flatten(shapes)
        specs = specs * len(leaves) if len(specs) == 1 else specs
        inputs = [self._places(s, value.shape) for s, value in zip(self._in_specs, self._values)]
        outputs = [self._places(s, leaf.shape) for s, leaf in zip(specs, leaves)]

        def reference(*arguments):
            results = [jax.numpy.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
            written: set[tuple[int, str]] = set()
            for device in self._mesh.devices.flat:
                try:
                    out = self._op(*[a[places[device]] for a, places in zip(arguments, inputs)])
                except NameError as error:
                    raise ShardrulesError(
                        f"the op names mesh axes ({error}), so it can't run on one device; pass "
                        "check_rule(..., reference=f), f being the same function of the global "
                        "arrays",
                        op=self._op,
                    ) from error
                for number, block in enumerate(jax.tree_util.tree_leaves(out)):
                    place = outputs[number][device]
                    if (number, str(place)) not in written:
                        written.add((number, str(place)))
                        results[number] = results[number].at[place].set(block)
            return jax.tree_util.tree_unflatten(tree, results)

        return reference


def _spec(*parts: Any) -> Any:
    import jax

    return jax.sharding.PartitionSpec(*parts)


def _is_float(leaf: Any) -> bool:
    import jax

    return jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)


def _floats(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(number for number, leaf in enumerate(values) if _is_float(leaf))


def _with_gradients(f: Callable, weights: Iterable[Any], floats: tuple[int, ...]) -> Callable:
    """Return a function that gives f's outputs and the gradients of a loss by its float inputs."""
    import jax

    def loss(*arguments):
        leaves = jax.tree_util.tree_leaves(f(*arguments))
        terms = [
            ((leaf * weight).sum() + (leaf**2).sum() / 2).astype("float32")
            for leaf, weight in zip(leaves, weights)
            if _is_float(leaf)
        ]
        return sum(terms, jax.numpy.float32(0)), leaves

    def run(*arguments):
        if not floats:
            return loss(*arguments)[1], ()
        grads, leaves = jax.grad(loss, argnums=floats, has_aux=True)(*arguments)
        return leaves, grads

    return run


def _axes_of(spec: Any) -> frozenset[str]:
    return frozenset(
        axis
        for part in spec
        if part is not None
        for axis in (part if isinstance(part, tuple) else (part,))
    )


def _check_mesh(mesh: Any) -> None:
    import jax

    if not isinstance(mesh, jax.sharding.Mesh):
        raise ShardrulesError(f"{mesh!r} is not a jax.sharding.Mesh", mesh=mesh)
    platforms = {d.platform for d in mesh.devices.flat} - {"cpu"}
    if platforms:
        raise ShardrulesError(
            f"check_rule runs on CPU devices; this mesh has {', '.join(sorted(platforms))}; set "
            "XLA_FLAGS=--xla_force_host_platform_device_count=8 before jax starts, and build the "
            "mesh from jax.devices('cpu')",
            mesh=mesh,
        )


def _draw(args: Sequence[Any], seed: int) -> list[Any]:
    """Draw normal floats and small integers for ShapeDtypeStructs."""
    import jax

    keys = jax.random.split(jax.random.PRNGKey(seed), max(len(args), 1))
    drawn = []
    for i, (key, leaf) in enumerate(zip(keys, args)):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise ShardrulesError(
                f"argument {i} is {leaf!r}; give arrays or jax.ShapeDtypeStructs", argument=i
            )
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            # A sharded array's type may name explicit axes, and then it can't be cut into blocks.
            is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            drawn.append(leaf if is_key else jax.numpy.asarray(jax.device_get(leaf)))
        elif jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating):
            drawn.append(jax.random.normal(key, leaf.shape, "float32").astype(leaf.dtype))
        elif leaf.dtype == bool:
            drawn.append(jax.random.bernoulli(key, 0.5, leaf.shape))
        elif jax.numpy.issubdtype(leaf.dtype, jax.numpy.integer):
            drawn.append(jax.random.randint(key, leaf.shape, 0, 8, leaf.dtype))
        else:
            raise ShardrulesError(
                f"no random data for argument {i} of type {leaf.dtype}; give the array", argument=i
            )
    return drawn


def _spec_of(number: int, leaf: Any) -> Any:
    spec = getattr(getattr(leaf, "sharding", None), "spec", None)
    if spec is None:
        raise ShardrulesError(
            f"argument {number} has no NamedSharding to take its spec from; pass in_specs",
            argument=number,
        )
    return spec


def _same_shapes(reference: Callable[..., Any], values: Any, shapes: Any) -> None:
    import jax

    ours, theirs = (
        [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree_util.tree_leaves(tree)]
        for tree in (shapes, jax.eval_shape(reference, *values))
    )
    if [text.partition("[")[2] for text in ours] != [text.partition("[")[2] for text in theirs]:
        raise RuleCheckError(
            f"reference returns {', '.join(theirs) or 'nothing'} where op returns "
            f"{', '.join(ours) or 'nothing'} on the mesh; pass op's function of the whole arrays",
            reference=reference,
        )


def _compare_ways(what: str, results: dict[str, Any], rtol: float, drops: bool) -> None:
    """Compare one result; with the check off it may differ where a rule drops axes."""
    off = results.pop("check off")
    _compare(what, results, rtol)
    try:
        _compare(what, {"check on": results["check on"], "check off": off}, rtol)
    except RuleCheckError as error:
        if not drops:
            raise
        warnings.warn(f"right with the check on only: {error}", stacklevel=5)


def _compare(what: str, leaves: dict[str, Any], rtol: float) -> None:
    import numpy as np

    names = list(leaves)
    arrays = {name: np.asarray(leaf).astype(np.float64) for name, leaf in leaves.items()}
    scale = max(float(np.max(np.abs(a), initial=0.0)) for a in arrays.values())
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            difference = float(np.max(np.abs(arrays[a] - arrays[b]), initial=0.0))
            if not difference <= rtol * scale:
                sizes = ", ".join(
                    f"{name}: |.| = {np.linalg.norm(arrays[name]):.6g}" for name in names
                )
                raise RuleCheckError(
                    f"{what} differs between {a!r} and {b!r} by {difference:.6g} (allowed: "
                    f"{rtol * scale:.6g})\n  {sizes}\nA rule that drops an axis changes what a "
                    "custom_vjp's bwd receives: the cotangent is already summed over that axis, "
                    "and bwd must pass it on or slice it.",
                    what=what,
                    apart=difference,
                )
