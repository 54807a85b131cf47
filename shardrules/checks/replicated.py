"""Replication that is promised: of a program's outputs, and of the arrays that it is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shardrules import hlo
from shardrules import program as programs
from shardrules.arguments import checked
from shardrules.costs import findings
from shardrules.costs import outputs as unequal
from shardrules.errors import ReplicationAssertionError, ShardrulesError
from shardrules.hlo.reader import notations
from shardrules.registry.table import Registry

__all__ = ["assert_outputs_replicated", "check_replicated_inputs"]

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
    """Assert that each output is proven equal on the devices on which its sharding says so.

    A missing psum, or out_specs that leave out an axis over which the result varies, passes
    shard_map with the check off; each device then holds its own data under one array's name.

    Args:
      program: a function of ``*args, **kwargs``, a Lowered, a Compiled, HLO text or a path.
      *args: what the function is called with.
      **kwargs: its keyword arguments.
      registry: rules for custom calls that carry no tag; the default registry if None.
      mesh: axis names and sizes in the order of the devices; taken from the shardings if None.
      output_shardings: for text, which does not hold them: each output's HLO sharding, such as
        ``"{replicated}"``, in order.
      strict: accept proofs alone: also fail where one rests on a declared rule.
      allow: outputs that are meant to differ, from ``"differs output['rng']"`` to the reason; one
        that matches nothing fails too.

    Returns:
      The verdicts, for further checks.

    Raises:
      ReplicationAssertionError: naming each output that is not proven so, its axes and why.
      ShardrulesError: the outputs' shardings are not known, or as ``judge``.

    Examples:
      >>> judgement = testing.assert_outputs_replicated(step, w, x)
    """
    __tracebackhide__ = True  # pytest shows the line that calls this
    found = programs.read(program, args, kwargs)
    judgement = programs.judged(found, registry, mesh)
    outputs = judgement.outputs
    promised, count = judgement.promises, len(outputs)
    if output_shardings is not None:
        places = ("".join(f"[{index}]" for index in output.path) for output in outputs)
        promised = tuple(zip(places, map(str, output_shardings)))
        count = len(output_shardings)
    if promised is None:
        raise ShardrulesError(
            f"{found.name} does not say how its outputs are sharded; pass the jax.stages.Compiled "
            "(or the function with its arguments), or output_shardings=['{replicated}', ...]",
            program=program,
        )
    if count != len(outputs):
        raise ShardrulesError(
            f"output_shardings has {count} entries, but the program returns "
            f"{len(outputs)} arrays; give one for each",
            count=count,
        )
    judgement = dataclasses.replace(judgement, promises=promised)
    list(_promised(judgement))  # raises where a sharding can't be read
    bad, _, unused = findings.Allowances(allow).split(unequal.find(judgement))
    wrong = [_shown(one) for one in bad]
    if strict:
        wrong += _declared(judgement)
    if wrong:
        raise ReplicationAssertionError(
            f"{len(wrong)} of {len(outputs)} outputs are not proven equal where their shardings "
            "call them replicated (which is not to say that they are proven different):\n"
            + "\n".join(wrong),
            judgement=judgement,
        )
    if unused:
        raise ReplicationAssertionError(
            f"allowances that match nothing: {', '.join(unused)}; remove them", judgement=judgement
        )
    return judgement


def _promised(judgement: hlo.Judgement) -> Iterator[tuple[hlo.Output, str, tuple[int, ...]]]:
    """Yield each output that its sharding calls replicated, with its name and its tiles."""
    for output, promise in zip(judgement.outputs, judgement.promises or ()):
        if promise is None:
            continue
        path, text = promise
        name = f"output {path}" if path else "the output"
        try:
            tiles = unequal.tiles(judgement, text)
        except notations.NotationError as error:
            raise ShardrulesError(
                f"{name} has a sharding that can't be read: {error}", sharding=text
            ) from None
        if tiles is not None:
            yield output, name, tiles


def _shown(one: unequal.Unequal) -> str:
    path = one.name.removeprefix("output")
    name = f"output {path}" if path else "the output"
    return (
        f"  {name}, {one.shape}: called {one.over}, not proven equal\n"
        f"    because {one.because}\n    to do: {one.advice}"
    )


def _declared(judgement: hlo.Judgement) -> list[str]:
    lines = []
    for output, name, tiles in _promised(judgement):
        weak = [s.what for s in findings.unaudited(output.supports)]
        if weak and output.broken(tiles) is None:
            lines.append(
                f"  {name}, {output.shape}: proven equal, but the proof rests on what is only "
                f"declared of {', '.join(weak)}\n    to do: let the audit prove it, or leave out "
                "strict=True"
            )
    return lines


# -- arrays ---------------------------------------------------------------------------------------


def check_replicated_inputs(*args: Any, **kwargs: Any) -> None:
    """Check that arrays hold the same bits on the devices on which their shardings say so.

    Every proof starts from this promise, and ``jax.make_array_from_single_device_arrays`` or a
    program with wrong out_specs breaks it without a word. Bits are compared, so NaN equals the
    same NaN, and 0.0 differs from -0.0. Of an array that spans several processes, the shards of
    this one are compared.

    Args:
      *args: pytrees; leaves that are no jax.Array are passed over.
      **kwargs: more of them.

    Raises:
      ReplicationAssertionError: naming each leaf that differs, over which axes, on which devices.
      ShardrulesError: there is no array to look at.

    Examples:
      >>> testing.check_replicated_inputs(w)
    """
    __tracebackhide__ = True  # pytest shows the line that calls this
    import jax

    leaves, _ = jax.tree_util.tree_flatten_with_path((args, kwargs))
    wrong, arrays = [], 0
    for path, leaf in leaves:
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            continue
        arrays += 1
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        # The first entry says whether it is of args or of kwargs, the second which one.
        rest = jax.tree_util.keystr(path[2:])
        first = path[1]
        name = (
            f"argument {first.idx}" if hasattr(first, "idx") else f"argument {first.key!r}"
        ) + rest
        wrong += _differing(name, leaf)
    if not arrays:
        kinds = sorted({type(leaf).__name__ for _, leaf in leaves}) or ["nothing"]
        raise ShardrulesError(
            f"check_replicated_inputs compares the shards of jax.Arrays and was given none "
            f"({', '.join(kinds)}); call it outside of jit, on what jax.device_put returned",
            kinds=kinds,
        )
    if wrong:
        raise ReplicationAssertionError(
            "arrays differ between devices on which their shardings call them the same:\n"
            + "\n".join(wrong),
            leaves=tuple(wrong),
        )


def _differing(name: str, array: Any) -> list[str]:
    copies: dict[Any, dict[bytes, list[Any]]] = {}
    for shard in array.addressable_shards:
        index = tuple((s.start, s.stop) for s in shard.index)
        data = np.asarray(shard.data)
        copies.setdefault(index, {}).setdefault(data.tobytes(), []).append(shard)
    bad = {index: found for index, found in copies.items() if len(found) > 1}
    if not bad:
        return []
    lines = []
    axes = _axes(array.sharding, bad)
    over = f" over {{{', '.join(axes)}}}" if axes else ""
    lines.append(
        f"  {name}, {array.dtype}{list(array.shape)}: called replicated{over}, "
        f"sharding {array.sharding}"
    )
    index, found = next(iter(bad.items()))
    one, other = list(found.values())[:2]
    a, b = (np.frombuffer(np.asarray(s[0].data).tobytes(), np.uint8) for s in (one, other))
    width = max(1, a.size // max(1, one[0].data.size))
    count = int((a.reshape(-1, width) != b.reshape(-1, width)).any(axis=1).sum())
    classes = [
        ", ".join(str(s.device.id) for s in shards[:_SHOWN])
        + (", ..." if len(shards) > _SHOWN else "")
        for shards in found.values()
    ]
    lines.append(
        "    the data of devices "
        + " | ".join(f"{{{c}}}" for c in classes[:_SHOWN])
        + f" differ; {count} of {one[0].data.size} elements between the first two"
    )
    return ["\n".join(lines)]


def _axes(sharding: Any, bad: Mapping[Any, Mapping[bytes, list[Any]]]) -> list[str]:
    """Return the mesh axes along which shards differ; none where the sharding has no mesh."""
    mesh: Any = getattr(sharding, "mesh", None)
    devices = getattr(mesh, "devices", None)
    if devices is None:
        return []
    place = {device: at for at, device in np.ndenumerate(devices)}
    found = set()
    for classes in bad.values():
        label = {place[s.device]: n for n, shards in enumerate(classes.values()) for s in shards}
        for at, value in label.items():
            for axis, name in enumerate(mesh.axis_names):
                other = at[:axis] + (0,) + at[axis + 1 :]
                if label.get(other, value) != value:
                    found.add(name)
    return [name for name in mesh.axis_names if name in found]
