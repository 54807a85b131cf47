"""Compare a declared rule with the op's results, on CPU devices with random data.

shardrules trusts declarations, so a wrong declaration silently gives wrong gradients. Three
gradients are compared (with the check on, with it off, on a single device), because a wrong rule
affects only some of them: a rule that wrongly drops an axis gives the right gradient with the check
off, and N times the gradient with it on.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardrules import hooks
from shardrules.arguments import checked, shown
from shardrules.door.interpreter import interpreted
from shardrules.door.jaxprs import KERNELS, is_float, kernel_name
from shardrules.errors import RuleCheckError, ShardrulesError, UnsupportedJaxError
from shardrules.jaxprs.walk import equations
from shardrules.units import counted


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

    Outputs that the rule calls invariant over an axis must be bitwise equal along this axis. Then
    JAX's TPU interpreter runs the Pallas kernels. It finds faults that no audit can: races, memory
    that is read before it is written, reads out of bounds. A warning names the kernels that the
    interpreter can't run (kernels for GPUs). Last, the outputs, and the gradients with respect to
    all floating-point arguments, must be the same with the check on, with it off, and on a single
    device. If the rule drops an axis, a bwd that is right with the check on gives one N-th of the
    gradient with the check off: that is a warning, not an error.

    Args:
      op: the function that runs inside shard_map, on one device's blocks. It must run on CPU
        (``interpret`` of pallas_call, TPU interpret parameters, an FFI handler for CPU).
      mesh: a mesh of CPU devices.
      *args: global arrays, or ShapeDtypeStructs for which random data is drawn.
      in_specs: their PartitionSpecs, as for jax.shard_map; the specs of their shardings if None.
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
    _check_mesh(mesh)
    if in_specs is None:
        in_specs = tuple(_spec_of(i, leaf) for i, leaf in enumerate(args))
    elif isinstance(in_specs, PartitionSpec):
        in_specs = (in_specs,) * len(args)
    elif (
        not isinstance(in_specs, (tuple, list))
        or len(in_specs) != len(args)
        or not all(isinstance(spec, PartitionSpec) for spec in in_specs)
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
            # JAX's derivative of a kernel with scratch memory fails with a bare AssertionError.
            theirs = not isinstance(error, ShardrulesError)
            none = not str(error) or re.search("differentiat|autodiff|JVP", str(error))
            if gradients and theirs and none:
                error.add_note(
                    "check_rule compares gradients; for an op that has none, pass gradients=False"
                )
            raise


class _RuledOp:
    """An op with its arguments on a mesh, and ``types``: each output's varying axes by the rule."""

    def __init__(
        self, op: Callable[..., Any], mesh: Any, values: list[Any], in_specs: Any, out_specs: Any
    ):
        self._op, self._mesh, self._values, self._in_specs = op, mesh, values, in_specs
        # With explicit mesh axes, arguments must be placed on the mesh.
        self._placed = [
            jax.device_put(value, NamedSharding(mesh, spec))
            for value, spec in zip(values, in_specs)
        ]
        self.types: list[frozenset[str]] = []
        self._out_specs = out_specs
        jax.eval_shape(self._mapped(self._trace_types, (), check=True), *self._placed)

    def _trace_types(self, *blocks: Any) -> tuple[()]:
        """Record each output's varying axes, and out_specs that split over these axes."""
        flat, tree = jax.tree_util.tree_flatten(self._op(*blocks))
        self.types = [hooks.varying(leaf) for leaf in flat]
        if self._out_specs is not None:
            return ()
        specs = []
        for number, (leaf, varying) in enumerate(zip(flat, self.types)):
            axes = tuple(axis for axis in self._mesh.axis_names if axis in varying)
            specs.append(PartitionSpec(axes) if axes else PartitionSpec())
            if axes and not leaf.ndim:
                raise ShardrulesError(
                    f"output {number} is a scalar that varies over {{{', '.join(axes)}}}; pass "
                    "an op whose outputs can be split, and its out_specs",
                    output=number,
                )
        self._out_specs = jax.tree_util.tree_unflatten(tree, specs)
        return ()

    def _mapped(self, f: Callable[..., Any], out_specs: Any, check: bool) -> Callable[..., Any]:
        mapped: Callable[..., Any] = hooks.shard_map(
            f, self._mesh, self._in_specs, out_specs, check=check
        )
        return mapped

    def _stacked(self) -> Callable[..., Any]:
        """Return the op as a function that stacks the outputs of all devices, unchecked."""

        def stacked(*blocks: Any) -> list[Any]:
            return [leaf[None] for leaf in jax.tree_util.tree_leaves(self._op(*blocks))]

        return self._mapped(stacked, PartitionSpec(tuple(self._mesh.axis_names)), check=False)

    def _places(self, specs: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        """Return, for each array, the index of the part that each device holds."""
        return [
            NamedSharding(self._mesh, spec).devices_indices_map(tuple(array.shape))
            for spec, array in zip(specs, arrays)
        ]

    def check_invariant_blocks(self) -> None:
        """Compare bit by bit the blocks that the rule calls equal."""
        outputs = jax.jit(self._stacked())(*self._placed)
        for number, (leaf, varying) in enumerate(zip(outputs, self.types)):
            blocks = np.ascontiguousarray(np.asarray(leaf))
            data = blocks.reshape(*self._mesh.devices.shape, -1).view(np.uint8)
            for at, axis in enumerate(self._mesh.axis_names):
                same = (data == np.take(data, [0], axis=at)).all(axis=-1)
                if axis not in varying and not same.all():
                    raise RuleCheckError(
                        f"output {number} is declared invariant over {axis!r}, but "
                        f"{(~same).sum()} of {same.size} devices hold different bits from the "
                        "first along that axis; the rule says that it varies over "
                        f"{{{', '.join(sorted(varying))}}} only. {self._suggested(blocks, at)}",
                        output=number,
                        axis=axis,
                    )

    def _suggested(self, blocks: np.ndarray, at: int) -> str:
        """Suggest rules for an output that differs along an axis, the likeliest first.

        ``blocks`` holds each device's output; ``at`` is the position of the axis in the mesh.
        """
        shape, axis = self._mesh.devices.shape, self._mesh.axis_names[at]
        given = []  # each argument's block on each device
        for value, places in zip(self._values, self._places(self._in_specs, self._values)):
            if not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                data = np.asarray(value)
                rows = [data[places[device]] for device in self._mesh.devices.flat]
                given.append(np.ascontiguousarray(rows).reshape(*shape, -1))
        differ = any((rows != np.take(rows, [0], axis=at)).any() for rows in given)
        size = math.prod(blocks.shape[1:])
        part = any(rows.shape[-1] == size * shape[at] for rows in given)
        whole = [np.moveaxis(rows, at, 0) for rows in given if rows.shape[-1] == size]
        out = np.moveaxis(blocks.reshape(*shape, -1), at, 0)
        moved = any(all(any((a == b).all() for b in rows) for a in out) for rows in whole)
        # Each row: is this rule likely, is it possible at all, the rule, and what such an op does.
        # If the arguments are equal along the axis, the first two rules can't make results differ.
        rules = [
            (differ and moved, differ, f"permute({axis!r})", "passes devices' data on"),
            (differ and not part, differ, "no_communication", "reads its own device's data alone"),
            (part, True, f"reduce_scatter({axis!r})", "keeps a part of what it reduces"),
            (bool(whole) and differ, True, f"all_to_all({axis!r})", "exchanges parts"),
            (not differ, True, f"per_device({axis!r})", "reads its device's number"),
        ]
        rules.sort(key=lambda rule: not rule[0])
        named = [f"shardrules.{rule} if it {does}" for _, can, rule, does in rules if can]
        equal = f" Its arguments' data are equal along {axis!r}; try data that differ there."
        return f"Declare what the op does: {', '.join(named)}.{'' if differ else equal}"

    def check_kernels(self, gradients: bool) -> None:
        """Run the Pallas kernels of one device in JAX's TPU interpreter."""
        first = self._mesh.devices.flat[0]
        places = self._places(self._in_specs, self._values)
        blocks = [value[place[first]] for value, place in zip(self._values, places)]
        numbers = _floats(blocks) if gradients else ()
        run = _with_gradients(self._op, itertools.repeat(1), numbers)
        check_well_formed(run, blocks, self._stacked(), self._placed)

    def check_results(
        self, reference: Callable[..., Any] | None, gradients: bool, seed: int, rtol: float
    ) -> None:
        """Compare outputs and gradients with the check on, with it off, and on one device."""
        # The loss weights each output at random, so that errors don't cancel in the sum. Results
        # with the check on must equal the single device's results: this tests the rule. Results
        # with the check off may differ if the rule drops an axis, since a bwd that expects the
        # summed cotangent doesn't receive it without the check: this is only a warning.
        on, off = (self._mapped(self._op, self._out_specs, check) for check in (True, False))
        shapes = jax.eval_shape(on, *self._placed)
        if reference is not None:
            _same_shapes(reference, self._values, shapes)
        weights = _draw(jax.tree_util.tree_leaves(shapes), seed)
        numbers = _floats(self._values) if gradients else ()
        ways = {
            "check on": (on, self._placed),
            "check off": (off, self._placed),
            "single device": (reference or self._block_by_block(shapes), self._values),
        }
        results = {}
        for way, (f, arguments) in ways.items():
            outputs, grads = jax.jit(_with_gradients(f, weights, numbers))(*arguments)
            results[way] = jax.device_get([*outputs, *grads])
        entering = frozenset().union(*map(_axes_of, self._in_specs))
        drops = any(entering - varying for varying in self.types)
        names = [f"output {number}" for number in range(len(weights))]
        names += [f"gradient of argument {number}" for number in numbers]
        for name, *leaves in zip(names, *results.values()):
            each = dict(zip(results, leaves))
            _compare(name, each, ("check on", "single device"), rtol)
            try:
                _compare(name, each, ("check on", "check off"), rtol)
            except RuleCheckError as error:
                if not drops:
                    raise
                warnings.warn(f"right only with the check on: {error}", stacklevel=4)

    def _block_by_block(self, shapes: Any) -> Callable[..., Any]:
        """Return a function of the global arrays that runs the op on one block after another."""
        specs = jax.tree_util.tree_leaves(
            self._out_specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
        )
        leaves, tree = jax.tree_util.tree_flatten(shapes)
        inputs = self._places(self._in_specs, self._values)
        outputs = self._places(specs * len(leaves) if len(specs) == 1 else specs, leaves)

        def reference(*arguments: Any) -> Any:
            results = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
            for device in reversed(list(self._mesh.devices.flat)):  # the first device's block wins
                try:
                    out = self._op(*[a[places[device]] for a, places in zip(arguments, inputs)])
                except NameError as error:
                    raise ShardrulesError(
                        f"the op names mesh axes ({error}), so it can't run on one device; "
                        "pass check_rule(..., reference=f), where f is the same function of "
                        "the global arrays",
                        op=self._op,
                    ) from error
                for number, block in enumerate(jax.tree_util.tree_leaves(out)):
                    results[number] = results[number].at[outputs[number][device]].set(block)
            return jax.tree_util.tree_unflatten(tree, results)

        return reference


def _floats(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(number for number, leaf in enumerate(values) if is_float(leaf))


def _with_gradients(
    f: Callable[..., Any], weights: Iterable[Any], floats: tuple[int, ...]
) -> Callable[..., Any]:
    """Return a function that gives f's outputs, and a loss's gradients with respect to floats."""

    def loss(*arguments: Any) -> tuple[Any, list[Any]]:
        leaves = jax.tree_util.tree_leaves(f(*arguments))
        terms = [
            ((leaf * weight).sum() + (leaf**2).sum() / 2).astype("float32")
            for leaf, weight in zip(leaves, weights)
            if is_float(leaf)
        ]
        return sum(terms, jnp.float32(0)), leaves

    def run(*arguments: Any) -> tuple[list[Any], Any]:
        if not floats:
            return loss(*arguments)[1], ()
        grads, leaves = jax.grad(loss, argnums=floats, has_aux=True)(*arguments)
        return leaves, grads

    return run


def _axes_of(spec: Any) -> frozenset[str]:
    parts = (part if isinstance(part, tuple) else (part,) for part in spec)
    return frozenset(itertools.chain.from_iterable(parts)) - {None}


def _check_mesh(mesh: Any) -> None:
    if not isinstance(mesh, jax.sharding.Mesh):
        raise ShardrulesError(f"{mesh!r} is not a jax.sharding.Mesh", mesh=mesh)
    if platforms := {device.platform for device in mesh.devices.flat} - {"cpu"}:
        raise ShardrulesError(
            f"check_rule runs on CPU devices; this mesh has {', '.join(sorted(platforms))}; set "
            "XLA_FLAGS=--xla_force_host_platform_device_count=8 before jax starts, and build the "
            "mesh from jax.devices('cpu')",
            mesh=mesh,
        )


def _draw(args: Sequence[Any], seed: int) -> list[Any]:
    """Return the arguments, with normal floats and small integers for ShapeDtypeStructs."""
    keys = jax.random.split(jax.random.PRNGKey(seed), max(len(args), 1))
    drawn = []
    for i, (key, leaf) in enumerate(zip(keys, args)):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise ShardrulesError(
                f"argument {i} is {leaf!r}; give arrays or jax.ShapeDtypeStructs", argument=i
            )
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            # A sharded array's type may name explicit axes; such an array can't be cut into blocks.
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            drawn.append(leaf if is_key else jnp.asarray(jax.device_get(leaf)))
        elif jnp.issubdtype(leaf.dtype, jnp.floating):
            drawn.append(jax.random.normal(key, leaf.shape, "float32").astype(leaf.dtype))
        elif leaf.dtype == bool:
            drawn.append(jax.random.bernoulli(key, 0.5, leaf.shape))
        elif jnp.issubdtype(leaf.dtype, jnp.integer):
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
    ours = jax.tree_util.tree_leaves(shapes)
    theirs = jax.tree_util.tree_leaves(jax.eval_shape(reference, *values))
    if [leaf.shape for leaf in ours] != [leaf.shape for leaf in theirs]:
        raise RuleCheckError(
            f"reference returns {_listed(theirs)} where op returns {_listed(ours)} on the mesh; "
            "pass op's function of the whole arrays",
            reference=reference,
        )


def _listed(leaves: Sequence[Any]) -> str:
    return ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves) or "nothing"


def _compare(what: str, results: dict[str, Any], ways: tuple[str, str], rtol: float) -> None:
    a, b = (np.asarray(results[way]).astype(np.float64) for way in ways)
    difference = float(np.max(np.abs(a - b), initial=0.0))
    allowed = rtol * max(float(np.max(np.abs(array), initial=0.0)) for array in (a, b))
    if not difference <= allowed:
        norms = (f"{way}: |.| = {np.linalg.norm(x):.6g}" for way, x in zip(ways, (a, b)))
        raise RuleCheckError(
            f"{what} differs between {ways[0]!r} and {ways[1]!r} by {difference:.6g} (allowed: "
            f"{allowed:.6g})\n  {', '.join(norms)}\nA rule that drops an axis changes what a "
            "custom_vjp's bwd receives: the cotangent is already summed over that axis, "
            "and bwd must pass it on or slice it.",
            what=what,
            apart=difference,
        )


# A kernel is well formed if its operands determine its result on one device.

_FAULTS = "races, memory that is read before it is written, or reads out of bounds"


def check_well_formed(
    run: Callable[..., Any], blocks: Sequence[Any], whole: Callable[..., Any], values: Any
) -> None:
    """Raise on races, uninitialized memory and reads out of bounds, in JAX's TPU interpreter."""
    # Run twice, with uninitialized memory filled by NaN and then by zeros: a result that differs
    # between the runs depends on such memory.
    try:
        jaxpr, f, args = jax.make_jaxpr(run)(*blocks).jaxpr, run, blocks
    except NameError:  # the kernel names mesh axes
        jaxpr, f, args = jax.make_jaxpr(whole)(*values).jaxpr, whole, values
    calls = [eqn.params for eqn in equations(jaxpr) if eqn.primitive.name in KERNELS]
    kernels = {kernel_name(params)[0]: _is_for_gpus(params) for params in calls}
    for_gpus = [name for name, is_for_gpus in kernels.items() if is_for_gpus]
    if for_gpus:
        _warn(for_gpus, "JAX's TPU interpreter doesn't run kernels for GPUs")
    if len(for_gpus) == len(kernels):
        return

    def ill_formed(why: str, **data: Any) -> RuleCheckError:
        text = f"one of the kernels {_list(kernels)} is not well formed: {why}"
        return RuleCheckError(text, kernels=tuple(kernels), **data)

    results: dict[str, list[Any]] = {}
    fills: tuple[Literal["nan", "zero"], ...] = ("nan", "zero")
    for fill in fills:
        try:
            with interpreted(fill) as races:
                # A new function, since jit would reuse a trace made without the interpreter.
                out = jax.jit(lambda *a: f(*a))(*args)
                results[fill] = jax.device_get(jax.tree_util.tree_leaves(out))
        except UnsupportedJaxError as error:
            return _warn(kernels, str(error))
        except NotImplementedError as error:
            return _warn(kernels, f"JAX's TPU interpreter doesn't run them: {error}")
        except Exception as error:  # noqa: BLE001
            if not (found := races(str(error))):
                if "out-of-bounds" not in str(error).lower().replace(" ", "-"):
                    return _warn(kernels, f"JAX's TPU interpreter failed: {_first(error)}")
                raise ill_formed(
                    f"it reads out of bounds\n  {_first(error)}\n"
                    "Make the index map or the slice stay inside the array."
                ) from None
        else:
            found = races("")
        if found:
            raise ill_formed(
                f"two accesses of one memory are not ordered\n{found}\nWait for a copy before its "
                "buffers are used again, and order the cores by semaphores."
            )
    for number, (a, b) in enumerate(zip(results["nan"], results["zero"])):
        a, b = map(np.ascontiguousarray, (a, b))
        differ = (a.view(np.uint8) != b.view(np.uint8)).sum()
        if differ:
            raise ill_formed(
                f"it reads memory before anything is written there, and result {number} of the "
                "op (gradients count after outputs) depends on what that memory holds: if it "
                f"is filled with NaN instead of zeros, {differ} of {a.nbytes} bytes differ\n"
                "Initialise scratch and outputs on every path, in the first step of the grid "
                "that sees them.",
                result=number,
            )


def _is_for_gpus(params: Mapping[str, Any]) -> bool:
    options = params.get("compiler_params")
    modules = list(options) if isinstance(options, Mapping) else [type(options).__module__]
    meshes = [params.get("mesh"), *(params.get("meshes") or ())]
    modules += [type(mesh).__module__ for mesh in meshes]
    return any("triton" in module or "mosaic_gpu" in module for module in modules)


def _list(kernels: Iterable[str]) -> str:
    return ", ".join(map(repr, kernels))


def _first(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    relevant = [line for line in lines if "out-of-bounds" in line.lower().replace(" ", "-")]
    return (relevant or lines or [type(error).__name__])[-1].strip()[:300]


def _warn(kernels: Iterable[str], why: str) -> None:
    warnings.warn(
        f"check_rule could not look for {_FAULTS} in {_list(kernels)}: {why}", stacklevel=5
    )
