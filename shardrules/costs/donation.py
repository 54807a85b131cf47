"""Find out which outputs reuse the memory of donated arguments, leaf by leaf.

The module's header states this (XLA, ``HloModuleConfig`` and ``HloInputOutputAliasConfig``):
``input_output_alias`` says which output is written into which parameter's memory, and
``buffer_donor`` lists donated parameters that are not reused. Arguments that JAX pruned before
compiling are in neither list. Before JAX 0.8, a donated argument that fits no output is missing
too.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardrules import hlo
from shardrules.costs import accounts
from shardrules.errors import HloError

# The causes why a donated leaf's memory is not reused, and what to type next.
ADVICE = {
    "dtype": "return it in the argument's dtype, or don't donate it",
    "shape": "return it in the argument's shape, or don't donate it",
    "sharding": "give that output the argument's sharding (out_shardings= of jax.jit)",
    "split": (
        "give the argument that output's sharding (in_shardings= of jax.jit, or jax.device_put), "
        "or don't donate it"
    ),
    "layout": "give that output the argument's layout, or leave both to XLA",
    "taken": "donate one argument for each output",
    "no output": "don't donate it, or return what is computed from it",
    "unused": "stop passing it, or don't donate it: its memory is freed with the last reference",
    "twice": "pass a copy (jnp.copy), or drop one of the two",
    "not donated": "name it in donate_argnums or donate_argnames of jax.jit",
    "unknown": "don't donate it, or return it in the argument's shape, dtype and layout",
}


class ArgumentBuffer(NamedTuple):
    """A leaf of a program's arguments, as JAX describes it."""

    path: str  # the parameter's name and the keys below it, ``"state['m']"``
    donated: bool  # whether it was declared donated
    kept: bool  # whether the compiled program takes it; JAX prunes unused arguments
    shape: str  # of the whole array, ``"f32[8,16]"``
    sharding: str  # as HLO prints it; empty if it isn't known


class ResultBuffer(NamedTuple):
    """A leaf of a program's outputs: path, whole shape and sharding, as for ArgumentBuffer."""

    path: str
    shape: str
    sharding: str


class Leaf(NamedTuple):
    """One leaf of the arguments, and the use of its memory."""

    path: str  # as for ArgumentBuffer; ``"parameter 3"`` if the text has no name
    shape: str  # on one device; of the whole array if it was pruned
    bytes: int  # the bytes of that shape
    # Whether it was declared donated; None if only the text is known, which may not show a donation
    # that had no effect.
    donated: bool | None
    status: str  # ``aliased``, ``donor`` (given away, not reused), ``pruned`` or ``kept``
    output: str  # the path of the output that has its memory, or of the most similar output
    cause: str  # a key of ADVICE; empty if it is aliased or was not donated
    reason: str  # why its memory is not reused


_ALIAS = re.compile(r"\{([\d\s,]*)\}:\s*\(\s*(\d{1,9}),\s*\{([\d\s,]*)\}")
_DONOR = re.compile(r"\(\s*(\d{1,9}),\s*\{([\d\s,]*)\}\s*\)")


def _index(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _places(shape: hlo.Shape, place: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Yield the places of a shape's arrays, as paths of element numbers."""
    if shape.elements is None:
        yield place
    for number, element in enumerate(shape.elements or ()):
        yield from _places(element, (*place, number))


def _numbered(shape: hlo.Shape) -> dict[tuple[int, ...], int]:
    return {place: number for number, place in enumerate(_places(shape))}


def read(
    module: hlo.Module,
    arguments: Sequence[ArgumentBuffer] | None = None,
    results: Sequence[ResultBuffer] | None = None,
) -> list[Leaf]:
    """Return the leaves of a program's arguments, with the use of their memory."""
    # ``arguments`` includes pruned leaves. Like ``results``, it is None if only the text is known.
    # The kept arguments are the module's last parameters, in order: walk through both together.
    taken_in = hlo.Shape("tuple", elements=tuple(p.shape for p in module.entry.parameters))
    given_out = module.entry.instructions[module.entry.root].shape
    inputs, outputs = taken_in.leaves(), given_out.leaves()
    aliased, donors = _table(module, taken_in, given_out)
    # The tokens of ordered effects stand before a program's own arguments and outputs.
    skip_in, skip_out = _leading_tokens(inputs), _leading_tokens(outputs)
    outputs = outputs[skip_out:]
    if results is not None and len(results) == len(outputs):
        named = [result._replace(path=result.path or "(all of it)") for result in results]
    else:
        named = [ResultBuffer(f"{n}", "", "") for n in range(len(outputs))]
    only_text = arguments is None
    if arguments is None:
        arguments = _from_text(module, inputs, skip_in, {*aliased, *donors})
    kept = [argument for argument in arguments if argument.kept]
    first = len(inputs) - len(kept)  # after tokens, and constants that JAX passes as arguments
    if first < skip_in:
        raise HloError(
            f"the module takes {len(inputs) - skip_in} arrays, and {len(kept)} arguments are "
            "said to be kept"
        )
    taken = {
        out - skip_out: kept[place - first].path for place, out in aliased.items() if place >= first
    }
    places = iter(range(first, len(inputs)))
    leaves = []
    for argument in arguments:
        donated: bool | None = argument.donated
        why = ("", "", "")
        if not argument.kept:
            what, size, status = argument.shape, _bytes(argument.shape), "pruned"
            if donated:
                why = ("", "unused", "the compiled program does not take it")
        else:
            place = next(places)
            shape = inputs[place]
            what, size, status = str(shape), shape.bytes, "kept"
            if place in aliased:
                status, donated = "aliased", True
                why = (named[aliased[place] - skip_out].path, "", "")
            elif donated:
                why = _why(argument, shape, named, outputs, taken, _device_count(module))
                status = "donor"
            elif only_text:
                donated = None
        leaves.append(Leaf(argument.path, what, size, donated, status, *why))
    return leaves


def _table(
    module: hlo.Module, inputs: hlo.Shape, output: hlo.Shape
) -> tuple[dict[int, int], set[int]]:
    """Return the output leaf in each input leaf's memory, and the donors that aren't reused."""
    in_places, out_places = map(_numbered, (inputs, output))
    aliased: dict[int, int] = {}
    donors: set[int] = set()
    try:
        for out, number, inner in _ALIAS.findall(module.header.get("input_output_alias", "")):
            aliased[in_places[int(number), *_index(inner)]] = out_places[_index(out)]
        for number, inner in _DONOR.findall(module.header.get("buffer_donor", "")):
            donors.add(in_places[int(number), *_index(inner)])
    except KeyError as error:
        raise HloError(
            f"the module's alias table names {error.args[0]}, which is not a parameter or "
            "output of it"
        ) from None
    return aliased, donors


def _from_text(
    module: hlo.Module, inputs: Sequence[hlo.Shape], skip: int, given: set[int]
) -> list[ArgumentBuffer]:
    """Return the entry's parameters as arguments; their metadata has JAX's names for them."""
    parameters = module.entry.parameters
    names = [module.metadata(parameter).op_name for parameter in parameters]
    if len(names) != len(inputs):  # they come as one tuple
        names = [""] * len(inputs)
    return [
        ArgumentBuffer(names[n] or f"parameter {n}", n in given, True, str(inputs[n]), "")
        for n in range(skip, len(inputs))
    ]


def _bytes(shape: str) -> int:
    """Return the bytes of ``"f32[8,16]"``; 0 for a type that HLO does not have (a key's)."""
    element_type, _, dimensions = shape.rstrip("]").partition("[")
    try:
        return hlo.Shape(element_type, _index(dimensions)).bytes
    except HloError:
        return 0


def _device_count(module: hlo.Module) -> int:
    counts = (module.header.get(name, "1") for name in ("num_partitions", "replica_count"))
    return math.prod(int(count) if count.isdecimal() else 1 for count in counts)


def _parts(whole: hlo.Shape, part: hlo.Shape, device_count: int) -> int:
    """Return the number of parts if ``part`` may be a device's shard of ``whole``, else 0."""
    sizes = [*zip(whole.dimensions, part.dimensions)]
    if whole.element_type != part.element_type or len(whole.dimensions) != len(part.dimensions):
        return 0
    if not all(own and size % own == 0 for size, own in sizes):
        return 0
    count = math.prod(size // own for size, own in sizes)
    return 0 if device_count % count else count


def _of_shardings(text: str, output: hlo.Shape, ratio: int) -> tuple[str, str]:
    """Return the cause if an output is sharded ``ratio`` times as much as the argument."""
    if ratio < 2:
        return "sharding", text
    sent = accounts.wire_bytes("all-gather", output.bytes, ratio)
    return "split", f"{text}; an output sharded as the argument would cost a gather, {sent} B sent"


def _leading_tokens(shapes: Sequence[hlo.Shape]) -> int:
    return len([*itertools.takewhile(lambda shape: shape.element_type == "token", shapes)])


def _why(
    argument: ArgumentBuffer,
    shape: hlo.Shape,
    named: Sequence[ResultBuffer],
    outputs: Sequence[hlo.Shape],
    taken: dict[int, str],
    device_count: int,
) -> tuple[str, str, str]:
    """Return the path of the most similar output, the cause of the difference, and a text on it."""
    # Look at each output in turn. ``differs`` gives the reason why this output did not take the
    # memory, or None if it is unlike the argument. Among the similar outputs, prefer one with free
    # memory, then the most keys in common at the end of its path, then the first cause in
    # ``order``.
    keys = re.findall(r"\w+", argument.path)

    def rank(n: int) -> tuple[bool, int]:
        """Return a rank that prefers outputs with free memory, then outputs with the same keys."""
        theirs = re.findall(r"\w+", named[n].path)
        pairs = zip(reversed(keys), reversed(theirs))
        common = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
        return n not in taken, len([*common])

    def differs(n: int) -> tuple[str, str] | None:
        output, result = outputs[n], named[n]
        alike = output[:2] == shape[:2]
        sharded = f"is sharded as {result.sharding}, the argument as {argument.sharding}"
        if alike and n in taken:
            return "taken", f"has its shape, but reuses the memory of {taken[n]}"
        if alike:
            if output.layout != shape.layout:
                return "layout", (
                    f"lies in memory as {{{output.layout}}}, the argument as {{{shape.layout}}}"
                )
            # Compare only shardings in one notation: two specs, or two HLO shardings.
            mine, its = argument.sharding, result.sharding
            if mine != its and mine[:1] and mine[:1] == its[:1]:
                return "sharding", sharded
            return "unknown", "has its shape, but XLA wrote it elsewhere"
        if result.shape and result.shape == argument.shape:
            ratio = shape.element_count // max(1, output.element_count)
            return _of_shardings(sharded, output, ratio)
        if output.dimensions == shape.dimensions:
            return "dtype", f"is {output}"
        if output[0] == shape[0] and output.element_count == shape.element_count:
            return "shape", f"is {output}"
        if result.shape:
            return None
        # The text has only the shapes on each device.
        ratio, inverse = _parts(shape, output, device_count), _parts(output, shape, device_count)
        if ratio > 1:
            text = f"is {output} on each device, 1/{ratio} of its size"
            return _of_shardings(f"{text}: if it is the same array, it is sharded", output, ratio)
        if inverse > 1:
            text = f"is {output} on each device, {inverse} times its size"
            return "sharding", f"{text}: if it is the same array, it is sharded less"
        return None

    # If only the shapes on each device are known, put causes last that these shapes only suggest.
    order = ("layout", "unknown", "sharding", "split", "taken", "dtype", "shape")
    if not any(result.shape for result in named):
        order = ("layout", "unknown", "taken", "dtype", "shape", "split", "sharding")
    near = [(n, why) for n in range(len(outputs)) if (why := differs(n)) is not None]
    if not near:
        return (
            "",
            "no output",
            (f"no output is {shape}, and none differs from it only in its dtype or shape"),
        )
    # An output of the same name in another dtype explains more than an unrelated output in the same
    # shape whose memory is taken.
    n, (cause, text) = max(near, key=lambda pair: (*rank(pair[0]), -order.index(pair[1][0])))
    return named[n].path, cause, f"output {named[n].path} {text}"
