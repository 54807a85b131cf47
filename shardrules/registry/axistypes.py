"""Define the terms of rules: axis types, effects, a call's context and its resolution.

Pure Python: nothing here imports jax.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterable
from typing import Any

from shardrules.arguments import shown
from shardrules.errors import RuleError


def _named(axes: Any, call: str = "") -> frozenset[str]:
    try:
        names = (axes,) if isinstance(axes, str) else tuple(axes)
    except TypeError:  # not iterable
        names = (None,)
    for axis in names:
        # JAX accepts any hashable name; programs use strings and members of an Enum.
        if not isinstance(axis, (str, enum.Enum)) or axis == "":
            raise RuleError(
                f"{shown(axes)} does not name mesh axes; "
                + (
                    (call and one_by_one(call, axes))
                    or "an axis type is written AxisType(['data', 'model'])"
                ),
                axes=axes,
            )
    return frozenset(names)


def one_by_one(call: str, axes: tuple[Any, ...]) -> str:
    """Return the call to type if axes were passed as a tuple, a list or a set; empty otherwise."""
    flat: list[Any] = []
    for axis in axes:
        if isinstance(axis, (set, frozenset)):
            axis = sorted(axis, key=str)
        flat += axis if isinstance(axis, (tuple, list)) else [axis]
    named = bool(flat) and all(isinstance(axis, str) and axis for axis in flat)
    if not named or flat == [*axes] or len(set(flat)) < len(flat):
        return ""
    return f"pass the axes one by one: {call.replace('...', ', '.join(map(repr, flat)))}"


def show_axes(axes: Iterable[str]) -> str:
    ordered = sorted(axes, key=str) if isinstance(axes, (set, frozenset)) else axes
    return "{" + ", ".join(map(str, ordered)) + "}"


class AxisType:
    """How one value relates to the manual mesh axes, as JAX's avals record it.

    Immutable. Equal types are the same object, which makes comparisons and lookups fast.

    Attributes:
      varying: axes along which devices may hold different data.
      unreduced: axes over which the value is a partial sum that is not reduced yet.
      reduced: axes over which the value is reduced and its cotangent is ``unreduced``.

    Raises:
      RuleError: if an axis is in more than one of the three, or is not a name.
    """

    __slots__ = ("varying", "unreduced", "reduced")
    _types: dict[tuple[frozenset[str], ...], AxisType] = {}  # noqa: RUF012

    varying: frozenset[str]
    unreduced: frozenset[str]
    reduced: frozenset[str]

    def __new__(
        cls,
        varying: Iterable[str] = frozenset(),
        unreduced: Iterable[str] = frozenset(),
        reduced: Iterable[str] = frozenset(),
    ) -> AxisType:
        # Look the type up by the arguments first, which are frozensets in the usual case, and then
        # by their checked form. Two threads may make one type at once: setdefault keeps the first.
        key: tuple[Any, ...] = (varying, unreduced, reduced)
        try:
            existing = cls._types.get(key)
        except TypeError:  # lists, sets
            existing = None
        if existing is None:
            key = _named(varying), _named(unreduced), _named(reduced)
            existing = cls._types.get(key)
        if existing is not None:
            return existing
        varied, partial, summed = key
        twice = (varied & partial) | (varied & summed) | (partial & summed)
        if twice:
            raise RuleError(
                f"an axis type can name each mesh axis once, but {show_axes(twice)} is in "
                f"more than one of varying={show_axes(varied)}, "
                f"unreduced={show_axes(partial)}, reduced={show_axes(summed)}",
                axes=twice,
            )
        new = object.__new__(cls)
        for field, axes in zip(cls.__slots__, key):
            object.__setattr__(new, field, axes)
        return cls._types.setdefault(key, new)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"an AxisType can't be changed ({name!r}); make another one")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"an AxisType can't be changed ({name!r}); make another one")

    def __reduce__(self) -> tuple[Any, ...]:
        return AxisType, (self.varying, self.unreduced, self.reduced)

    def __repr__(self) -> str:
        return (
            f"AxisType(varying={self.varying!r}, unreduced={self.unreduced!r}, "
            f"reduced={self.reduced!r})"
        )

    def vary(self, *axes: str) -> AxisType:
        """Return this type made varying over ``axes``, too."""
        added = _named(axes, "vary(...)")
        return AxisType(self.varying | added, self.unreduced - added, self.reduced - added)

    def drop(self, *axes: str) -> AxisType:
        """Return this type made invariant over ``axes``."""
        dropped = _named(axes, "drop(...)")
        return AxisType(self.varying - dropped, self.unreduced - dropped, self.reduced - dropped)

    @property
    def axes(self) -> frozenset[str]:
        """Return every mesh axis that the type names."""
        return self.varying | self.unreduced | self.reduced

    def __str__(self) -> str:
        parts = [f"varying over {show_axes(self.varying)}"] if self.varying else []
        parts += [f"unreduced over {show_axes(self.unreduced)}"] if self.unreduced else []
        parts += [f"reduced over {show_axes(self.reduced)}"] if self.reduced else []
        return ", ".join(parts) or "invariant"


@dataclasses.dataclass(frozen=True)
class Effect:
    """On which devices' data one output of an opaque call depends.

    Args:
      kind: ``local``: the output is a function of this device's operands; ``join``: the same
        function on each device, of the operands of all devices along ``axes``; ``exchange``: a
        function of those operands and of the device's own position along ``axes``; ``typed``: it is
        declared to vary along ``axes`` at most, and so is equal along all other axes;
        ``unknown``: it may depend on anything.
      axes: mesh axes, in the rule's order.
    """

    kind: str
    axes: tuple[str, ...] = ()

    KINDS = ("local", "join", "exchange", "typed", "unknown")

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in self.KINDS:
            raise RuleError(
                f"{shown(self.kind)} is not a kind of effect; the kinds are "
                f"{', '.join(self.KINDS)}",
                kind=self.kind,
            )
        _named(self.axes)
        # A single axis may be a str; tuple() would split it into letters.
        axes = (self.axes,) if isinstance(self.axes, str) else tuple(self.axes)
        object.__setattr__(self, "axes", axes)

    def __str__(self) -> str:
        has_axes = self.kind not in ("local", "unknown")
        return f"{self.kind}({','.join(self.axes)})" if has_axes else self.kind


def format_effects(effects: Iterable[Effect]) -> str:
    """Return effects as the text of a tag, one for each output: ``local;join(model)``."""
    return ";".join(map(str, effects))


_EFFECT = re.compile(r"(local|unknown)|(join|exchange|typed)\(([^()]*)\)")


def parse_effects(text: str) -> tuple[Effect, ...]:
    if not text:
        return ()
    effects = []
    for part in text.split(";"):
        match = _EFFECT.fullmatch(part)
        if match is None:
            raise RuleError(
                f"{part!r} in the tag {text!r} is not an effect; one looks like 'local', "
                "'join(model)' or 'typed(data,model)'",
                text=text,
            )
        effects.append(
            Effect(match[1])
            if match[1]
            else Effect(match[2], tuple(a for a in match[3].split(",") if a))
        )
    return tuple(effects)


@dataclasses.dataclass(frozen=True)
class RuleContext:
    """One opaque call, as a rule sees it.

    Args:
      name: the kernel name.
      inputs: each input's axis type; closed-over refs count as inputs.
      output_count: the number of outputs.
      mesh_axes: the manual mesh axes of the shard_map, in the mesh's order.
    """

    name: str
    inputs: tuple[AxisType, ...]
    output_count: int
    mesh_axes: tuple[str, ...]

    @property
    def union(self) -> AxisType:
        """Return the type that varies over every axis that an input varies over (U in the docs)."""
        return AxisType(frozenset().union(*(t.varying for t in self.inputs)))


@dataclasses.dataclass(frozen=True)
class Resolution:
    """A rule's answer for one call: the types to cast inputs to, the output types, the effects."""

    inputs: tuple[AxisType, ...]
    outputs: tuple[AxisType, ...]
    effects: tuple[Effect, ...]
