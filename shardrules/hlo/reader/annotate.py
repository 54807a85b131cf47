"""Add the mesh and the shardings to a module's text, in notation that XLA's parser accepts too.

The mesh goes into the header's ``frontend_attributes``, under the same key as in a kernel's tag. A
parameter's sharding goes to the place where XLA prints it (JAX 0.12 prints none).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from shardrules.hlo.reader.module import Module

_NAME = re.compile(r"\s*HloModule\s+[^\s,]+")
_AXIS = re.compile(r'[^\s",=]([^",=]*[^\s",=])?')
_ATTRIBUTES = "frontend_attributes={"


def annotated(
    module: Module,
    mesh: Mapping[str, int] | None,
    shardings: Sequence[str | None] | None,
    outputs: Sequence[str | None] | None = None,
) -> str:
    """Return a module's text with its mesh, and with the shardings that the text lacks."""
    text = module.text
    added: list[tuple[int, str]] = []
    # An axis name with other characters would be misread.
    if mesh and all(_AXIS.fullmatch(axis) for axis in mesh):
        axes = ",".join(f"{a}={n}" for a, n in mesh.items())
        added += _in_header(text, "shardrules.mesh", axes)
    for parameter, sharding in zip(module.entry.parameters, shardings or ()):
        if sharding is not None and parameter.attribute("sharding") is None:
            if parameter.attribute("parameter_replication") is not None:
                sharding = sharding.partition(", parameter_replication=")[0]
            added.append((parameter.inner[1] + 1, f", sharding={sharding}"))
    root = module.entry.instructions[module.entry.root]
    # In a module without a schedule (JAX 0.4.28), a sharding of the root would mean that the module
    # is not partitioned yet.
    is_late = module.header.get("is_scheduled") == "true"
    if is_late and outputs and None not in outputs and root.attribute("sharding") is None:
        shown = ", ".join(map(str, outputs))
        shown = shown if root.shape.elements is None else f"{{{shown}}}"
        added.append((root.inner[1] + 1, f", sharding={shown}"))
    for place, what in sorted(added, reverse=True):
        text = text[:place] + what + text[place:]
    return text


def tagged(text: str, key: str, value: str) -> str:
    """Return a module's text with one more attribute in its header."""
    for place, what in _in_header(text, key, value):
        text = text[:place] + what + text[place:]
    return text


def _in_header(text: str, key: str, value: str) -> Iterator[tuple[int, str]]:
    """Yield where an attribute goes into a module's header, and what to write there."""
    name, tag = _NAME.match(text), f'{key}="{value}"'
    if name is None:
        return
    attributes_at = text.find(_ATTRIBUTES, 0, text.find("\n") + 1 or len(text))
    if attributes_at < 0:
        yield name.end(), f", {_ATTRIBUTES}{tag}}}"
    else:
        place = attributes_at + len(_ATTRIBUTES)
        yield place, tag + ("" if text[place] == "}" else ",")
