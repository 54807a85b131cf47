"""Compare a declared rule with what the op does, on CPU devices with random data.

Declarations are trusted, so a wrong one silently gives wrong gradients. We compare three gradients,
because a wrong rule affects only some of them: a rule that wrongly drops an axis gives the right
gradient with the check off, and N times the gradient with it on.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from shardrules import hooks
from shardrules.arguments import checked
from shardrules.checks.wellformed import check_well_formed
from shardrules.errors import RuleCheckError, ShardrulesError

__all__ = ["check_rule"]


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

    _check_mesh(jax, mesh)
    if in_specs is None:
        in_specs = tuple(_spec_of(i, leaf) for i, leaf in enumerate(args))
    elif isinstance(in_specs, jax.sharding.PartitionSpec):
        in_specs = (in_specs,) * len(args)
    values = _draw(jax, args, seed)
    # The check needs the hooks, which apply the rule.
    with contextlib.nullcontext() if hooks.installed() else hooks.install():
        try:
            _check(jax, op, mesh, values, in_specs, out_specs, reference, gradients, seed, rtol)
        except Exception as error:
            text = "" if isinstance(error, ShardrulesError) else str(error)
            if gradients and re.search("differentiat|autodiff|JVP", text):
                error.add_note("check_rule compares gradients; an op without takes gradients=False")
            raise


def _check(jax, op, mesh, values, in_specs, out_specs, reference, gradients, seed, rtol) -> None:
    types, out_specs = _types(jax, op, mesh, values, in_specs, out_specs)
    _check_equal(jax, op, mesh, values, in_specs, types)
    first = mesh.devices.flat[0]
    blocks = [
        value[jax.sharding.NamedSharding(mesh, spec).devices_indices_map(value.shape)[first]]
        for spec, value in zip(in_specs, values)
    ]
    stacked = hooks.shard_map(
        lambda *a: [leaf[None] for leaf in jax.tree_util.tree_leaves(op(*a))],
        mesh,
        in_specs,
        jax.sharding.PartitionSpec(tuple(mesh.axis_names)),
        check=False,
    )
    check_well_formed(_with_gradients(jax, op, gradients), blocks, stacked, values)
    ways = {
        f"check {word}": hooks.shard_map(op, mesh, in_specs, out_specs, check=on)
        for word, on in (("on", True), ("off", False))
    }
    shapes = jax.eval_shape(ways["check on"], *values)
    if reference is not None:
        _same_shapes(jax, reference, values, shapes)
    ways["single device"] = reference or _block_by_block(
        jax, op, mesh, values, in_specs, out_specs, shapes
    )
    weights = _draw(jax, jax.tree_util.tree_leaves(shapes), seed + 1)
    floats = tuple(i for i, leaf in enumerate(values) if _is_float(jax, leaf)) if gradients else ()
    results = {name: _run(jax, f, values, weights, floats) for name, f in ways.items()}
    entering = frozenset().union(*map(_axes_of, in_specs))
    drops = any(entering - varying for varying in types)
    for number in range(len(weights)):
        _compare_ways(
            f"output {number}",
            {n: leaves[number] for n, (leaves, _) in results.items()},
            rtol,
            drops,
        )
    for position, number in enumerate(floats):
        grads = {n: grads[position] for n, (_, grads) in results.items()}
        _compare_ways(f"gradient of argument {number}", grads, rtol, drops)


def _is_float(jax, leaf) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)


def _run(jax, f: Callable, values: list, weights: list, floats: tuple[int, ...]) -> tuple:
    """Return f's outputs and the gradients of a loss, on the host."""

    def loss(*arguments):
        leaves = jax.tree_util.tree_leaves(f(*arguments))
        total = sum(
            ((leaf * w).sum() + (leaf**2).sum() / 2).astype("float32")
            for leaf, w in zip(leaves, weights)
            if _is_float(jax, leaf)
        )
        return total, leaves

    if floats:
        grads, leaves = jax.jit(jax.grad(loss, argnums=floats, has_aux=True))(*values)
    else:
        grads, leaves = (), jax.jit(loss)(*values)[1]
    return jax.device_get((leaves, grads))


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


def _with_gradients(jax, op, gradients: bool) -> Callable:

    def total(*blocks):
        leaves = jax.tree_util.tree_leaves(op(*blocks))
        return sum(
            (leaf.astype("float32") ** 2).sum() for leaf in leaves if _is_float(jax, leaf)
        ), leaves

    def run(*blocks):
        floats = tuple(i for i, block in enumerate(blocks) if _is_float(jax, block))
        if not (gradients and floats):
            return total(*blocks)[1]
        grads, leaves = jax.grad(total, argnums=floats, has_aux=True)(*blocks)
        return leaves, grads

    return run


def _axes_of(spec: Any) -> frozenset[str]:
    return frozenset(
        axis
        for part in spec
        if part is not None
        for axis in (part if isinstance(part, tuple) else (part,))
    )


def _check_mesh(jax, mesh: Any) -> None:
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


def _draw(jax, args: Sequence[Any], seed: int) -> list[Any]:
    """Draw normal floats and small integers for ShapeDtypeStructs."""
    keys = jax.random.split(jax.random.PRNGKey(seed), max(len(args), 1))
    drawn = []
    for i, (key, leaf) in enumerate(zip(keys, args)):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise ShardrulesError(
                f"argument {i} is {leaf!r}; give arrays or jax.ShapeDtypeStructs", argument=i
            )
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            drawn.append(jax.numpy.asarray(leaf))
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


def _types(jax, op, mesh, values, in_specs, out_specs):
    """Return each output's varying axes under the rule, and matching out_specs."""
    P = jax.sharding.PartitionSpec
    types: list[frozenset[str]] = []
    specs: list[Any] = []

    def spy(*blocks):
        out = op(*blocks)
        types[:] = [hooks.varying(leaf) for leaf in jax.tree_util.tree_leaves(out)]
        order = [tuple(a for a in mesh.axis_names if a in varying) for varying in types]
        flat, tree = jax.tree_util.tree_flatten(out)
        for number, (leaf, axes) in enumerate(zip(flat, order)):
            if out_specs is None and axes and not leaf.ndim:
                raise ShardrulesError(
                    f"output {number} is a scalar that varies over {{{', '.join(axes)}}}; pass an "
                    "op whose outputs can be split, and its out_specs",
                    output=number,
                )
        specs[:] = [
            jax.tree_util.tree_unflatten(tree, [P(axes) if axes else P() for axes in order])
        ]
        return ()

    jax.eval_shape(hooks.shard_map(spy, mesh, in_specs, (), check=True), *values)
    return types, specs[0] if out_specs is None else out_specs


def _check_equal(jax, op, mesh, values, in_specs, types) -> None:
    """Compare, bit by bit, the blocks that the rule calls equal."""
    import numpy as np

    axes = tuple(mesh.axis_names)

    def stacked(*blocks):
        return [leaf[None] for leaf in jax.tree_util.tree_leaves(op(*blocks))]

    out = jax.jit(
        hooks.shard_map(stacked, mesh, in_specs, jax.sharding.PartitionSpec(axes), check=False)
    )(*values)
    for number, (leaf, varying) in enumerate(zip(out, types)):
        blocks = np.ascontiguousarray(np.asarray(leaf))
        data = blocks.reshape(*mesh.devices.shape, -1).view(np.uint8)
        for at, axis in enumerate(axes):
            if axis in varying:
                continue
            same = (data == np.take(data, [0], axis=at)).all(axis=-1)
            if not same.all():
                raise RuleCheckError(
                    f"output {number} is declared invariant over {axis!r}, but {(~same).sum()} of "
                    f"{same.size} devices hold other bits than the first along that axis; "
                    f"the rule says that it varies over {{{', '.join(sorted(varying))}}} only. "
                    f"Declare what the op does, such as shardrules.per_device({axis!r}).",
                    output=number,
                    axis=axis,
                )


def _same_shapes(jax: Any, reference: Callable[..., Any], values: Any, shapes: Any) -> None:
    __tracebackhide__ = True
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


def _block_by_block(jax, op, mesh, values, in_specs, out_specs, shapes):
    """Return op as a function of the global arrays that runs on one block after the other."""
    specs, tree = jax.tree_util.tree_flatten(
        out_specs, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec)
    )
    leaves, out_tree = jax.tree_util.tree_flatten(shapes)
    specs = specs * len(leaves) if len(specs) == 1 else specs

    def places(spec, shape):
        return jax.sharding.NamedSharding(mesh, spec).devices_indices_map(tuple(shape))

    inputs = [places(spec, value.shape) for spec, value in zip(in_specs, values)]
    outputs = [places(spec, leaf.shape) for spec, leaf in zip(specs, leaves)]

    def reference(*arguments):
        results = [jax.numpy.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
        done: list[set] = [set() for _ in leaves]
        for device in mesh.devices.flat:
            try:
                blocks = jax.tree_util.tree_leaves(
                    op(*[a[places[device]] for a, places in zip(arguments, inputs)])
                )
            except NameError as error:
                raise ShardrulesError(
                    f"the op names mesh axes ({error}), so it can't run on one device; pass "
                    "check_rule(..., reference=f), f being the same function of the global arrays",
                    op=op,
                ) from error
            for i, block in enumerate(blocks):
                place = outputs[i][device]
                key = str(place)
                if key not in done[i]:
                    done[i].add(key)
                    results[i] = results[i].at[place].set(block)
        return jax.tree_util.tree_unflatten(out_tree, results)

    return reference


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
