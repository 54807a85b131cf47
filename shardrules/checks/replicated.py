"""Check that a program's outputs and inputs are replicated as their shardings promise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardrules import hlo
from shardrules import program as programs
from shardrules.arguments import checked
from shardrules.costs import findings, missing
from shardrules.costs import outputs as unequal
from shardrules.errors import ReplicationAssertionError, ShardrulesError, few
from shardrules.hlo.reader import notations
from shardrules.registry.table import Registry

_SHOWN = 8  # device groups that a message lists


@checked(own=("mesh",))
def assert_outputs_replicated(
    program: Any,
    *args: Any,
    registry: Registry | None = None,
    mesh: Mapping[str, int] | None = None,
    output_shardings: Sequence[str] | None = None,
    strict: bool = False,
    allow: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> hlo.Judgement:
    """Assert that each output is proven equal on the devices where its sharding promises that.

    With the check off, shard_map accepts a missing psum, or out_specs that lack an axis over which
    the result varies. Then the devices hold different data for the same part of an array.

    Args:
      program: a function of ``*args, **kwargs``, a Lowered, a Compiled, HLO text or a path.
      *args: the function's arguments.
      **kwargs: its keyword arguments.
      registry: rules for custom calls that carry no tag; the default registry if None.
      mesh: axis names and sizes in the order of the devices; taken from the shardings if None.
      output_shardings: each output's HLO sharding in order, such as ``"{replicated}"``; needed for
        HLO text, which lacks them.
      strict: also fail on proofs that rest on a declared rule.
      allow: outputs that may differ, from ``"differs output['rng']"`` to the reason; an entry that
        matches nothing fails too.

    Returns:
      The verdicts, for further checks.

    Raises:
      ReplicationAssertionError: an output is not proven equal; the message gives its axes and why.
      ShardrulesError: the outputs' shardings are unknown, or as ``judge``.

    Examples:
      >>> judgement = testing.assert_outputs_replicated(step, w, x)
    """
    __tracebackhide__ = True  # pytest shows the line that calls this
    source = programs.read(program, args, kwargs)
    judgement = programs.judged(source, registry, mesh, programs.Told(output_shardings))
    if judgement.promises is None:
        raise ShardrulesError(
            f"{source.name} does not say how its outputs are sharded; pass the jax.stages.Compiled "
            "(or the function with its arguments), or output_shardings=['{replicated}', ...]",
            program=program,
        )
    declared = list(_declared(judgement))
    bad, _, unused = findings.Allowances(allow).split(missing.find(judgement))
    wrong = [*map(_shown, bad), *(declared if strict else ())]
    if wrong:
        raise ReplicationAssertionError(
            f"{len(wrong)} of {len(judgement.outputs)} outputs are not proven equal where their "
            "shardings call them replicated (they may still be equal):\n" + "\n".join(wrong),
            judgement=judgement,
            outputs=tuple(bad),
        )
    if unused:
        raise ReplicationAssertionError(
            f"allowances that match nothing: {', '.join(unused)}; remove them", judgement=judgement
        )
    return judgement


def _shown(output: unequal.Unequal) -> str:
    name = _named(output.name.removeprefix("output"))
    return (
        f"  {name}{output.what.removeprefix(output.name)}\n"
        f"    because {output.because}\n    to do: {output.advice}"
    )


def _named(path: str) -> str:
    return f"output {path}" if path else "the output"


def _declared(judgement: hlo.Judgement) -> Iterator[str]:
    """Yield the outputs whose proofs rest on declared rules; raise if a sharding can't be read."""
    for output, promise in zip(judgement.outputs, judgement.promises or ()):
        if promise is None:
            continue
        name, text = _named(promise[0]), promise[1]
        try:
            tiles = unequal.tiles(judgement, text)
        except notations.NotationError as error:
            raise ShardrulesError(
                f"{name} has a sharding that can't be read: {error}", sharding=text
            ) from None
        weak = [support.what for support in findings.unaudited(output.supports)]
        if tiles is not None and weak and output.broken(tiles) is None:
            yield (
                f"  {name}, {output.shape}: proven equal, but the proof rests on declared rules of "
                f"{', '.join(weak)}\n    to do: let the audit prove it, or leave out strict=True"
            )


def check_replicated_inputs(*args: Any, **kwargs: Any) -> None:
    """Check that arrays hold the same bits on the devices where their shardings promise that.

    Every proof assumes this. ``jax.make_array_from_single_device_arrays``, or a program with wrong
    out_specs, can silently break the assumption. The comparison is bit by bit: NaN equals the same
    NaN, and 0.0 differs from -0.0. If an array spans several processes, only this process's shards
    are compared.

    Args:
      *args: pytrees of jax.Arrays; other leaves are skipped.
      **kwargs: more pytrees.

    Raises:
      ReplicationAssertionError: a leaf differs; the message gives its axes and devices.
      ShardrulesError: there is no array to compare.

    Examples:
      >>> testing.check_replicated_inputs(w)
    """
    __tracebackhide__ = True  # pytest shows the line that calls this
    leaves, _ = jax.tree_util.tree_flatten_with_path((args, kwargs))
    differences = []
    for path, leaf in leaves:
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            continue
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        argument = path[1]  # the first entry selects args or kwargs
        number = argument.idx if hasattr(argument, "idx") else repr(argument.key)
        name = f"argument {number}{jax.tree_util.keystr(path[2:])}"
        differences.append(_difference(name, leaf))
    if not differences:
        kinds = sorted({type(leaf).__name__ for _, leaf in leaves}) or ["nothing"]
        raise ShardrulesError(
            "check_replicated_inputs compares the shards of jax.Arrays but was given none "
            f"({', '.join(kinds)}); call it outside of jit, on what jax.device_put returned",
            kinds=kinds,
        )
    if wrong := tuple(filter(None, differences)):
        title = (
            "arrays differ between devices on which they are equal according to their shardings:"
        )
        raise ReplicationAssertionError("\n".join([title, *wrong]), leaves=wrong)


def _difference(name: str, array: Any) -> str:
    """Return a text on how the copies of one part of an array differ; empty if all are equal."""
    # For each part of the array (by its index): the versions of its data, with the shards of each.
    copies: dict[Any, dict[bytes, list[Any]]] = {}
    for shard in array.addressable_shards:
        versions = copies.setdefault(str(shard.index), {})
        versions.setdefault(np.asarray(shard.data).tobytes(), []).append(shard)
    bad = [list(versions.values()) for versions in copies.values() if len(versions) > 1]
    if not bad:
        return ""
    axes = _axes(array.sharding, bad)
    over = f" over {{{', '.join(axes)}}}" if axes else ""
    size = bad[0][0][0].data.size
    a, b = (
        np.frombuffer(np.asarray(shards[0].data).tobytes(), np.uint8).reshape(max(1, size), -1)
        for shards in bad[0][:2]
    )
    groups = []
    for shards in bad[0][:_SHOWN]:
        ids = [str(shard.device.id) for shard in shards]
        groups.append(f"{{{few(ids, _SHOWN)}}}")
    devices = " | ".join(groups)
    return (
        f"  {name}, {array.dtype}{list(array.shape)}: called replicated{over}, "
        f"sharding {array.sharding}\n    the data of devices {devices} differ; "
        f"{(a != b).any(axis=1).sum()} of {size} elements between the first two"
    )


def _axes(sharding: Any, bad: Sequence[Sequence[Sequence[Any]]]) -> list[str]:
    """Return the mesh axes along which shards differ; none if the sharding has no mesh."""
    # An axis counts if a device and the first device along that axis hold different versions.
    mesh: Any = getattr(sharding, "mesh", None)
    if getattr(mesh, "devices", None) is None:
        return []
    place = {device: at for at, device in np.ndenumerate(mesh.devices)}
    differing = set()
    for versions in bad:
        version: dict[tuple[int, ...], int] = {}
        for number, shards in enumerate(versions):
            version |= dict.fromkeys((place[shard.device] for shard in shards), number)
        for at, number in version.items():
            for axis, name in enumerate(mesh.axis_names):
                origin = at[:axis] + (0,) + at[axis + 1 :]
                if version.get(origin, number) != number:
                    differing.add(name)
    return [name for name in mesh.axis_names if name in differing]
