"""Read JAX's facts about a compiled program beside its text, and the programs in a profile."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shardrules.door.protocols import Aval, ClosedJaxpr
from shardrules.errors import ProfileError, ShardrulesError


def mesh_shape(tree: Any) -> dict[str, int] | None:
    """Return the axis sizes of the mesh of all shardings in ``tree``; None if there isn't one."""
    meshes = _meshes(tree)
    return dict(meshes.pop().shape) if len(meshes) == 1 else None


def _meshes(tree: Any) -> set[Any]:
    import jax

    leaves = jax.tree_util.tree_leaves(tree)
    meshes = (getattr(getattr(leaf, "sharding", leaf), "mesh", None) for leaf in leaves)
    return {mesh for mesh in meshes if isinstance(mesh, jax.sharding.Mesh)}


class Placements:
    """The shardings of the parameters that an executable kept, and of its results."""

    def __init__(self, executable: Any):
        pmapped: Any = getattr(executable, "_unloaded_executable", None)
        if hasattr(pmapped, "local_input_avals"):  # of a pmap, up to JAX 0.9
            self._avals = pmapped.local_input_avals
            self._inputs, self._outputs = pmapped.input_shardings, pmapped.output_shardings
            return
        names = ("in_avals", "_in_shardings", "_out_shardings")
        self._avals, self._inputs, self._outputs = (getattr(executable, n, None) for n in names)

    def mesh(self) -> dict[str, int] | None:
        """Return the axis sizes of the only mesh, or None."""
        return mesh_shape([self._inputs, self._outputs])

    def platform(self) -> str | None:
        """Return ``cpu``, ``tpu`` or ``gpu``; None if unknown."""
        shardings = (*(self._inputs or ()), *(self._outputs or ()))
        devices = itertools.chain.from_iterable(sharding.device_set for sharding in shardings)
        names = {device.platform for device in devices}
        name = names.pop() if len(names) == 1 else None
        return "gpu" if name in ("cuda", "rocm") else name

    def slices(self) -> list[tuple[int, int]] | None:
        """Return slice and id of each device in the program's order; None for a single slice."""
        for sharding in (*(self._inputs or ()), *(self._outputs or ())):
            devices = getattr(sharding, "_device_assignment", None) or ()
            order = [(getattr(d, "slice_index", None), d.id) for d in devices]
            numbers = {number for number, _ in order}
            if len(numbers) > 1 and None not in numbers:
                return [(number or 0, own_id) for number, own_id in order]
        return None

    def parameters(self) -> list[tuple[tuple[int, ...], str]] | None:
        """Return each parameter's shape on one device and HLO sharding; None if unknown."""
        if self._avals is None or self._inputs is None or len(self._avals) != len(self._inputs):
            return None
        shapes = [*map(_array_shape, self._avals)]
        return [
            (sharding.shard_shape(shape), _hlo_sharding(sharding, len(shape), True))
            for shape, sharding in zip(shapes, self._inputs)
        ]

    def specs(self) -> list[str] | None:
        """Return each parameter's sharding as people write it; None if unknown."""
        if self._avals is None or self._inputs is None or len(self._avals) != len(self._inputs):
            return None
        ranks = [len(_array_shape(aval)) for aval in self._avals]
        return [
            _sharding(sharding, rank)
            if _is_plain(sharding)
            else _hlo_sharding(sharding, rank, True)
            for sharding, rank in zip(self._inputs, ranks)
        ]

    def details(self) -> list[tuple[str, str]] | None:
        """Return each parameter's memory, and whether it is weakly typed; None if unknown.

        JAX compiles a function once for each combination. HLO's types don't show them on all
        backends.
        """
        if self._avals is None or self._inputs is None or len(self._avals) != len(self._inputs):
            return None
        kinds = [getattr(sharding, "memory_kind", None) for sharding in self._inputs]
        weak = [getattr(aval, "weak_type", False) for aval in self._avals]
        return [
            (
                f"in {kind} memory" if kind else "in memory of no given kind",
                "weakly typed" if is_weak else "strongly typed",
            )
            for kind, is_weak in zip(kinds, weak)
        ]

    def results(
        self, paths: Sequence[str] | None, shapes: list[str]
    ) -> list[tuple[str, str] | None] | None:
        """Return path and HLO sharding of each result with these HLO shapes; None if unknown."""
        # The tokens of ordered effects come before a program's own outputs and have no sharding.
        if self._outputs is None:
            return None
        count = len(self._outputs)
        if paths is None or len(paths) != count:
            paths = ("",) if count == 1 else tuple(f"[{n}]" for n in range(count))
        tokens_count = len(shapes) - count
        if tokens_count < 0 or any(shape != "token[]" for shape in shapes[:tokens_count]):
            return None
        ranks = [
            len(shape.partition("[")[2].strip("]").split(",")) if "[]" not in shape else 0
            for shape in shapes[tokens_count:]
        ]
        try:
            return [None] * tokens_count + [
                (path, _hlo_sharding(sharding, rank))
                for path, sharding, rank in zip(paths, self._outputs, ranks)
            ]
        except (AttributeError, NotImplementedError):  # a sharding that HLO can't express
            return None


def placements(compiled: Any) -> Placements:
    """Return the placements of a jax.stages.Compiled."""
    return Placements(getattr(compiled, "_executable", None))


def _hlo_sharding(sharding: Any, rank: int, is_parameter: bool = False) -> str:
    """Return a sharding as HLO; for a pmap, say whether all replicas hold the same data."""
    spec = getattr(sharding, "sharding_spec", None)
    if spec is None:
        return str(sharding._to_xla_hlo_sharding(rank))
    same = all(type(axis).__name__ == "Replicated" for axis in spec.mesh_mapping)
    if is_parameter:
        return f"{{replicated}}, parameter_replication={{{str(same).lower()}}}"
    return "{replicated}" if same else "{manual}"


def _is_plain(sharding: Any) -> bool:
    """Return whether a sharding has a spec that describes it completely by dimensions."""
    spec = getattr(sharding, "spec", None)
    return spec is not None and not any(
        getattr(spec, name, None) for name in ("unreduced", "reduced")
    )


def _by_path(tree: Any) -> list[tuple[str, Any]]:
    import jax

    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def output_paths(compiled: Any) -> list[str]:
    import jax

    tree = compiled.out_tree
    leaves = _by_path(jax.tree_util.tree_unflatten(tree, [object()] * tree.num_leaves))
    return [path for path, _ in leaves]


def result_paths(closed_jaxpr: ClosedJaxpr) -> tuple[str, ...] | None:
    """Return the path of each result of a traced function; None if JAX kept none."""
    info = getattr(getattr(closed_jaxpr, "jaxpr", closed_jaxpr), "debug_info", None)
    paths = getattr(info, "result_paths", None)
    if not isinstance(paths, (tuple, list)):
        return None
    # JAX 0.5 and newer write result['w']; older versions write ['w'].
    return tuple(str(path).removeprefix("result") for path in paths)


def definition(closed_jaxpr: Any) -> str:
    """Return ``NAME at FILE:LINE`` of a traced function; empty if JAX kept none."""
    info = getattr(getattr(closed_jaxpr, "jaxpr", closed_jaxpr), "debug_info", None)
    return str(getattr(info, "func_src_info", None) or "")


def drops_axes(body: Any) -> bool:
    """Return whether a shard_map's body is the one by which JAX ends a shard_map without jit.

    Before that, JAX keeps the devices' values apart, so this program doesn't show equal values.
    """
    # JAX 0.4.28 doesn't keep the name of a body, so the answer there is always False.
    name, _, place = definition(body).partition(" at ")
    return name == "_rem_singleton" and bool(re.search(r"jax\W\w+\Wshard_map\.py:\d+$", place))


def temp_bytes(compiled: Any) -> tuple[int | None, int | None]:
    """Return the bytes of a program's temporaries on host and one device; None if unknown."""
    # JAX reports the host's temporaries since 0.4.31, and some backends report nothing.
    try:
        stats = compiled.memory_analysis()
    except (AttributeError, NotImplementedError, RuntimeError):
        return None, None
    sizes = ("host_temp_size_in_bytes", "temp_size_in_bytes")
    host, device = (getattr(stats, name, None) for name in sizes)
    return host, device


def unoptimized_text(lowered: Any) -> str:
    """Return the HLO of a lowered program before any of XLA's passes, with source lines."""
    # Before JAX 0.4.36 it holds neither source lines nor the op_names that tell the phase.
    try:
        return str(lowered.as_text(dialect="hlo", debug_info=True))
    except TypeError:  # debug_info is new in JAX 0.4.36
        return str(lowered.as_text(dialect="hlo"))


def _array_shape(aval: Aval) -> tuple[int, ...]:
    """Return the shape of an argument's array; for a random key, the shape of its data."""
    import jax

    if jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key):
        aval = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return tuple(aval.shape)


# The modules of HloModule and HloSharding in JAX 0.10 to 0.12, 0.6.2 to 0.9, and before.
_HLO_MODULE = ("jaxlib._hlo", "jaxlib._jax", "jaxlib.xla_extension")


def hlo_text(module_proto: bytes) -> str:
    kind = _of_jaxlib("HloModule")
    if kind is None:
        raise ProfileError("this jaxlib has no HloModule to read a program with")
    try:
        return str(kind.from_serialized_hlo_module_proto(module_proto).to_string())
    except Exception as error:  # jaxlib's own error, whose class it doesn't export
        raise ProfileError(f"jaxlib can't read a program of it: {error}") from error


def sharding_text(op_sharding: bytes) -> str | None:
    """Return the text of a serialized OpSharding; None if jaxlib can't read it."""
    try:
        proto = _of_jaxlib("OpSharding")()
        proto.ParseFromString(op_sharding)
        return str(_of_jaxlib("HloSharding").from_proto(proto))
    except Exception:  # jaxlib's own error, whose class it doesn't export  # noqa: BLE001
        return None


def _of_jaxlib(name: str) -> Any:
    for module in _HLO_MODULE:
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module), name)
    return None


Leaf = tuple[str, bool, bool, str, str]

# Maps NumPy's names of element types to XLA's.
_PREFIXES = {"float": "f", "bfloat": "bf", "int": "s", "uint": "u", "complex": "c"}


def _shape(aval: Aval) -> str:
    """Return an array's type as HLO writes it: ``"f32[8,16]"``."""
    name, bits, rest = re.findall(r"^([a-z]+)(\d*)(.*)$", str(aval.dtype))[0]
    kind = "pred" if name == "bool" else f"{_PREFIXES.get(name, name)}{bits}{rest.replace('_', '')}"
    return f"{kind}[{','.join(map(str, aval.shape))}]"


def _sharding(sharding: Any, rank: int) -> str:
    """Return a sharding as people write it: its spec if it is a NamedSharding, else as HLO."""
    spec = getattr(sharding, "spec", None)
    if spec is not None:
        parts = list(spec)
        while parts and parts[-1] is None:
            parts.pop()
        return f"P({', '.join(map(repr, parts))})"
    return str(sharding._to_xla_hlo_sharding(rank)) if sharding is not None else ""


def argument_leaves(compiled: Any) -> list[Leaf] | None:
    """Return path, donated, kept, whole shape and sharding of each leaf of the arguments."""
    # The paths begin with the parameters' names, as JAX keeps them for its own messages. Before JAX
    # 0.5, no public attribute says which leaves a program kept (and ``input_shardings`` raises for
    # a program that pruned one).
    if getattr(compiled, "args_info", None) is None:
        return None
    # In JAX 0.4.28 the info has an ``aval``; later it is the aval.
    rows = [
        (name, bool(info.donated), getattr(info, "aval", info))
        for name, (_, info) in zip(argument_names(compiled), _by_path(compiled.args_info))
    ]
    return kept_leaves(getattr(compiled, "_executable", None), rows)


def argument_names(compiled: Any) -> list[str]:
    paths = [path for path, _ in _by_path(compiled.args_info)]
    told = getattr(getattr(compiled, "_executable", None), "_all_args_info", None)
    names = list(getattr(getattr(told, "debug_info", None), "arg_names", None) or ())
    names = names[len(names) - len(paths) :] if len(names) >= len(paths) else [""] * len(paths)
    return [name or f"args{path}" for name, path in zip(names, paths)]


def kept_leaves(executable: Any, rows: Sequence[tuple[str, bool, Any]]) -> list[Leaf] | None:
    kept = getattr(executable, "_kept_var_idx", None)
    if kept is None:
        return None
    # Constants that JAX hoisted into arguments (an option since 0.7) come before the others.
    told = getattr(getattr(executable, "_all_args_info", None), "in_avals", rows)
    hoisted = max(0, len(told) - len(rows))
    shardings = itertools.islice(getattr(executable, "_in_shardings", ()), hoisted, None)
    leaves = []
    for number, (path, donated, aval) in enumerate(rows):
        taken = number + hoisted in kept
        sharding = _sharding(next(shardings, None), len(aval.shape)) if taken else ""
        leaves.append((path, donated, taken, _shape(aval), sharding))
    return leaves


def executable_text(executable: Any) -> str | None:
    """Return the HLO that JAX runs; None if the backend doesn't provide it."""
    try:
        (module,) = executable.xla_executable.hlo_modules()
    except Exception:  # an error of the backend's C API; or several modules  # noqa: BLE001
        return None
    return str(module.to_string())


class Placed(NamedTuple):
    """An output with its sharding, as text and to compare."""

    path: str  # its path in the whole output; empty for all of it
    sharding: str  # its spec, or its sharding as HLO writes it
    rank: int  # its number of dimensions
    own: Any  # JAX's sharding object
    mesh: Any  # the program's mesh; None if it has none or several
    shape: str  # its whole shape

    def differs(self, wanted: Any) -> str | None:
        """Return the wanted sharding as text if it differs from this one; else None."""
        import jax

        spec = getattr(wanted, "spec", wanted)
        if isinstance(spec, jax.sharding.PartitionSpec) and len(spec) > self.rank:
            raise ShardrulesError(
                f"output {self.path or '(all of it)'} has {self.rank} dimensions, but {spec} "
                f"names {len(spec)}; give each output its own, expect={{{self.path!r}: P()}}",
                expect=wanted,
            )
        if isinstance(wanted, jax.sharding.PartitionSpec):
            if self.mesh is None:
                raise ShardrulesError(
                    f"{wanted} needs a mesh, but the program's shardings hold none, or "
                    "several; pass NamedSharding(mesh, spec)"
                )
            try:
                wanted = jax.sharding.NamedSharding(self.mesh, wanted)
            except ValueError as error:  # an axis that the mesh lacks
                raise ShardrulesError(
                    f"{spec} does not fit the program's mesh: {error}", expect=spec
                ) from None
        if not isinstance(wanted, jax.sharding.Sharding):
            raise ShardrulesError(
                f"{wanted!r} is not a sharding; give a PartitionSpec such as P('data'), or a "
                "jax.sharding.Sharding"
            )
        if self.own.is_equivalent_to(wanted, self.rank):
            return None
        return _sharding(wanted, self.rank)


def placed_results(compiled: Any) -> list[Placed] | None:
    executable = getattr(compiled, "_executable", None)
    avals = getattr(executable, "out_avals", None)
    tree = getattr(compiled, "out_tree", None)
    if avals is None or tree is None or tree.num_leaves != len(avals):
        return None
    outputs = getattr(executable, "_out_shardings", None) or [None] * len(avals)
    meshes = _meshes([outputs, getattr(executable, "_in_shardings", None)])
    mesh = meshes.pop() if len(meshes) == 1 else None
    return [
        Placed(path, _sharding(own, aval.ndim), aval.ndim, own, mesh, _shape(aval))
        for path, aval, own in zip(output_paths(compiled), avals, outputs)
    ]


def shared_buffers(compiled: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[list[int]]:
    """Return groups of argument leaves that share memory, as lists of positions."""
    import jax

    leaves = _dynamic(compiled.in_tree, args, kwargs)
    at: dict[Any, list[int]] = {}
    for number, leaf in enumerate(leaves or ()):
        if isinstance(leaf, jax.Array) and not leaf.is_deleted() and leaf.size:
            try:
                key = leaf.addressable_shards[0].data.unsafe_buffer_pointer()
            except Exception:  # a tracer, a key, an array of other processes  # noqa: BLE001
                key = ("object", id(leaf))
            at.setdefault(key, []).append(number)
    return [numbers for numbers in at.values() if len(numbers) > 1]


def _dynamic(tree: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any] | None:
    """Return the leaves of the arguments that aren't static; None if they don't fit."""
    import jax

    positional, keywords = tree.children()
    count = len(positional.children())
    named = {k: v for k, v in kwargs.items() if k in keywords.node_data()[1]}
    for chosen in itertools.combinations(range(len(args)), count):
        left = [arg for n, arg in enumerate(args) if n not in chosen]
        if any(isinstance(x, jax.Array) for x in jax.tree_util.tree_leaves(left)):
            continue
        leaves, chosen_tree = jax.tree_util.tree_flatten((tuple(args[n] for n in chosen), named))
        if chosen_tree == tree:
            return leaves
    return None


def program_name(executable: Any) -> str:
    """Return the name of an executable's module, or "a program" if the backend doesn't say."""
    try:
        return str(executable.xla_executable.hlo_modules()[0].name)
    except Exception:  # the backend's C API may raise anything  # noqa: BLE001
        return "a program"


def loaded(executable: Any) -> Any:
    """Return the program that XLA compiled, or the executable itself if there is none.

    JAX lowers again if a sharding is written differently (P() for P(None)) or its caches were
    cleared. Several of its executables may then share one compiled program.
    """
    try:
        return executable.xla_executable
    except Exception:  # an error of the backend's C API  # noqa: BLE001
        return executable


def device_count(executable: Any) -> int:
    """Return the number of devices, of all processes, that run an executable; 0 if unknown."""
    try:
        here = len(executable.xla_executable.local_devices())
    except Exception:  # the backend's C API may raise anything  # noqa: BLE001
        return 0
    try:
        shardings = [getattr(executable, f"_{side}_shardings", ()) for side in ("in", "out")]
        sets = (getattr(s, "device_set", ()) for s in itertools.chain(*shardings))
        return max([here, *map(len, sets)])
    except (TypeError, ValueError):  # no shardings, or shardings of an abstract mesh
        return here


def kept_arguments(executable: Any) -> list[int] | None:
    """Return the arguments that are parameters of an executable's HLO; None for all."""
    kept = getattr(getattr(executable, "_unsafe_call", None), "kept_var_idx", None)
    return None if kept is None else sorted(kept)


See = Callable[[Sequence[Any], Sequence[Any]], None]
_stopping = threading.Lock()


class _Execution:
    """Calls an executable, and then ``see`` with its arguments and results."""

    def __init__(self, call: Any, see: See):
        self._call = call
        self._see = see

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        results = self._call(*args, **kwargs)
        self._see(args, results)
        return results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


def after_each_run(executable: Any, see: See) -> Callable[[], bool]:
    """Call ``see`` with the arguments and results of each run of an executable, except a pmap's.

    Returns a function that stops these calls, and returns whether it stopped them. It doesn't keep
    the executable alive.
    """
    # JAX's fast path is only for a call of JAX's own class, so ``_Execution`` gets every run.
    if not hasattr(executable, "_unsafe_call"):
        return lambda: False
    original = executable.unsafe_call
    executable._unsafe_call = own = _Execution(original, see)
    kept = weakref.ref(executable)

    def stop() -> bool:
        with _stopping:  # of two threads, only one stops the calls
            if (now := kept()) is None or now._unsafe_call is not own:
                return False
            now._unsafe_call = original
            return True

    return stop
