"""Assert that a compiled program offloads residuals to host memory as its policy says."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from shardrules import program as programs
from shardrules.arguments import checked
from shardrules.costs import offloading
from shardrules.door import compiled
from shardrules.errors import CostAssertionError, ShardrulesError
from shardrules.hooks.explain.residuals import NamedValue, named_values

_ADVICE = {
    "saved": "it stays in device memory: name it in names_which_can_be_offloaded of the policy and "
    "not in names_which_can_be_saved; what a jax.checkpoint takes as its input is always saved",
    "recomputed": "the policy does not name it, so it is computed again: name it in "
    "names_which_can_be_offloaded of jax.checkpoint_policies.save_and_offload_only_these_names",
}


@dataclasses.dataclass(frozen=True)
class Offloading:
    """The buffers and names that a program keeps in host memory."""

    buffers: tuple[offloading.HostBuffer, ...]  # with the stores and loads of each
    names: tuple[NamedValue, ...]  # each with its status; empty without the function
    host_temp_bytes: int | None
    device_temp_bytes: int | None

    @property
    def bytes(self) -> int:
        """Return the bytes that one device stores on its host and loads again."""
        return sum(b.bytes for b in self.buffers if b.stores and b.loads)


@checked
def assert_offloaded(
    program: Any,
    *args: Any,
    names: Collection[str] | None = None,
    min_bytes: int = 1,
    **kwargs: Any,
) -> Offloading:
    """Assert that a program keeps residuals in host memory: stores them there, and loads them.

    Args:
      program: a function of ``*args, **kwargs`` that takes the gradient, a Lowered, a Compiled, HLO
        text or a path; compiled for TPU or GPU (``shardrules.aot`` needs no such device).
      *args: the function's arguments.
      names: names given by ``checkpoint_name``; each must be offloaded wherever it appears. The
        trace has these names, so ``program`` must be the function.
      min_bytes: the fewest bytes that one device must store and load again.
      **kwargs: its keyword arguments.

    Returns:
      The buffers, names and bytes.

    Raises:
      CostAssertionError: a name is not offloaded, a buffer is stored and never loaded, or the bytes
        are too few; the message gives the reasons, and the bytes on host and device.
      ShardrulesError: the program lacks a name, ``names`` are given without a function, the program
        is for CPU, or as ``judge``.
    """
    __tracebackhide__ = True  # pytest shows the line that calls this
    if min_bytes < 0:
        raise ShardrulesError(f"min_bytes={min_bytes!r} is not a count of bytes; give 0 or more")
    traced = _traced(program, args, kwargs, names)
    source = programs.read(program, args, kwargs)
    if source.platform() == "cpu":
        raise ShardrulesError(
            f"{source.name} is compiled for CPU, which has one memory and offloads nothing; "
            "compile it for the devices of shardrules.aot.tpu(...) or gpu(...)"
        )
    host, device = compiled.temp_bytes(source.compiled)  # None for text
    buffers = tuple(offloading.read(source.module()))
    result = Offloading(buffers, tuple(traced), host, device)
    lines = _wrong(result, names or (), min_bytes)
    if lines:
        sizes = f" (temporaries: {host} B on the host, {device} B on a device)"
        title = f"{source.name} does not offload what it should{'' if host is None else sizes}:"
        raise CostAssertionError("\n".join([title, *lines]), offloading=result)
    return result


def _traced(
    program: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: Any
) -> list[NamedValue]:
    if not programs.is_function(program):
        if names is None:
            return []
        raise ShardrulesError(
            "names are read from the trace, which a compiled program does not have; pass the "
            "function with its arguments"
        )
    args, kwargs = programs.called_with(program, args, kwargs)
    try:
        traced = named_values(program, *args, **kwargs)
    except ShardrulesError:  # no jax.checkpoint; values that device_put moves have no names
        if names:
            raise
        return []
    for name in names or ():
        if all(value.name != name for value in traced):
            shown = ", ".join(sorted({repr(v.name) for v in traced})) or "none"
            raise ShardrulesError(
                f"no value is called {name!r}; the program's checkpoint_names are: {shown}",
                name=name,
            )
    return traced


def _wrong(result: Offloading, names: Collection[str], min_bytes: int) -> list[str]:
    lines = [
        f"  {v.name!r}, {v.shape}, {v.status}{f' at {v.source}' if v.source else ''}"
        f"\n    to do: {_advice(v)}"
        for v in result.names
        if v.name in names and v.status != "offloaded"
    ]
    lines += [
        f"  {b.shape}, {b.bytes} B, is stored in host memory at {b.stores[0].source} and never "
        "loaded again\n    to do: offload by a policy of jax.checkpoint, which does both"
        for b in result.buffers
        if b.stores and not b.loads and b.kind == "temporary"
    ]
    if result.bytes < min_bytes:
        lines.append(
            f"  {result.bytes} B are stored in host memory and loaded again, where at least "
            f"{min_bytes} B are expected"
        )
    return lines


def _advice(value: NamedValue) -> str:
    if value.status in _ADVICE:
        return _ADVICE[value.status]
    output = (
        "; it is the output of its block, but the backward pass reads the input of the next "
        f"block: put x = checkpoint_name(x, {value.name!r}) on the first line of the block "
        "instead of the last"
    )
    return (
        "no backward pass of a jax.checkpoint reads it, so there is nothing to save, and no policy "
        f"acts on it{output if value.is_output else ''}"
    )
