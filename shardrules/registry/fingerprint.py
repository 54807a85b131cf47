"""Write a process's declarations as text that is equal in all processes with the same rules."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shardrules.registry import binding
from shardrules.registry.axistypes import AxisType
from shardrules.registry.rule import Rule, closure_values
from shardrules.registry.table import Registration, Registry

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))


@dataclasses.dataclass(frozen=True)
class ComparedRule:
    kind: str  # for messages: ``rule``, ``rule in scope 1``, ``option``
    name: str  # unique among the entries of one kind
    value: str  # the text that is compared
    where: str = ""  # where it was declared, for messages; not compared
    ordered: bool = False  # whether its position among entries of one kind is compared

    def __str__(self) -> str:
        return self.value + (f", at {self.where}" if self.where else "")


def entries(registry: Registry) -> list[ComparedRule]:
    """Return a registry's declarations in this thread, with its scopes and declared functions."""
    registered = registry.entries()
    # Sort the libraries' rules, since processes may import libraries in different orders.
    ours = [e for e in registered if not e.library]
    theirs = [e for e in registered if e.library]
    theirs.sort(key=lambda e: (e.library, e.name, e.is_ffi))
    listed = [_entry(e, f"rule of {e.library}", False) for e in theirs]
    listed += [_entry(e, "rule", True) for e in ours]
    for depth, overlay in enumerate(registry.overlays, 1):
        listed += [_entry(e, f"rule in scope {depth}", True) for e in overlay.entries]
    listed += [
        ComparedRule("declaration of", name, written(bound.rule), bound.where)
        for name, bound in binding.declared()
    ]
    return listed


def _entry(e: Registration, kind: str, ordered: bool) -> ComparedRule:
    name = e.name + (" (a primitive)" if e.target is not None else " (FFI)" if e.is_ffi else "")
    return ComparedRule(kind, name, written(e.rule), e.where, ordered)


def written(rule: Rule) -> str:
    """Return a rule as text: its name, with a digest of its code if it is a function."""
    # The name alone doesn't suffice: two lambdas that one function makes share a name, even if they
    # close over different axes. The processes would then trace different programs, and hang.
    if rule.identity is None:
        return rule.name
    code = hashlib.sha256(_text(rule.identity, ()).encode()).hexdigest()
    return f"{rule.name} (code {code[:12]})"


def _text(value: Any, around: tuple[int, ...]) -> str:
    """Return a function or a value as text without addresses, paths and hash order."""
    # A function's text holds its code, defaults, closure values and the globals that its code
    # names. Another object's text holds its type and attributes.
    if isinstance(value, _PLAIN):
        return repr(value)
    if id(value) in around or len(around) > 20:
        return "..."
    inner = (*around, id(value))
    if isinstance(value, (tuple, list)):
        return f"({','.join(_text(v, inner) for v in value)})"
    if isinstance(value, (set, frozenset)):
        return f"{{{','.join(sorted(_text(v, inner) for v in value))}}}"
    if isinstance(value, Mapping):
        return _text(sorted(_text(pair, inner) for pair in value.items()), around)
    if isinstance(value, types.CodeType):
        read = (value.co_code, value.co_consts, value.co_names, value.co_freevars)
        return f"code{_text(read, inner)}"
    if isinstance(value, types.FunctionType):
        code = value.__code__
        named = {n: value.__globals__[n] for n in _names(code) if n in value.__globals__}
        parts = (code, value.__defaults__, value.__kwdefaults__, closure_values(value), named)
        return f"function{_text(parts, inner)}"
    if isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
        return (
            f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', value.__name__)}"
        )
    if isinstance(value, types.MethodType):
        return _text((value.__func__, value.__self__), around)
    if isinstance(value, functools.partial):
        return f"partial{_text((value.func, value.args, value.keywords), inner)}"
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return f"array{value.shape}{_text(value.tolist(), inner)}"
        held = hashlib.sha256(value.tobytes()).hexdigest()
        return f"array{value.dtype}{value.shape}{held}"
    if isinstance(value, AxisType):
        return f"type{_text((value.varying, value.unreduced, value.reduced), inner)}"
    if isinstance(value, Rule):
        return f"rule{_text((value.name, value.identity), inner)}"
    return f"{_text(type(value), ())}{_text(getattr(value, '__dict__', None), inner)}"


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code uses, also in the lambdas and comprehensions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _keyed(listed: Sequence[ComparedRule]) -> dict[tuple[str, str, int], ComparedRule]:
    keyed: dict[tuple[str, str, int], ComparedRule] = {}
    for e in listed:
        number = sum((kind, name) == (e.kind, e.name) for kind, name, _ in keyed)
        keyed[e.kind, e.name, number] = e
    return keyed


def digest(listed: Sequence[ComparedRule]) -> str:
    compared = [(e.kind, e.name, e.value) for e in listed]
    return hashlib.sha256(repr(compared).encode()).hexdigest()


def differences(
    ours: Sequence[ComparedRule], theirs: Sequence[ComparedRule], us: str, them: str
) -> Iterator[tuple[str, str]]:
    """Yield the name of each entry that differs, with a line about it."""
    # First compare entries of the same kind and name. Then compare the order in which the rules
    # that both have were registered.
    left, right = _keyed(ours), _keyed(theirs)
    for key in {**left, **right}:
        our_entry, their_entry = left.get(key), right.get(key)
        label = f"{key[0]} {key[1]!r}"
        if our_entry is None:
            yield key[1], f"{us} has no {label}; {them} has it: {their_entry}"
        elif their_entry is None:
            yield key[1], f"{them} has no {label}; {us} has it: {our_entry}"
        elif our_entry.value != their_entry.value:
            yield key[1], f"{label} is {their_entry} in {them}, and {our_entry} in {us}"
    both = [key for key, e in left.items() if e.ordered and key in right]
    order = {key: position for position, key in enumerate(right)}
    for first, second in itertools.pairwise(both):
        if first[0] == second[0] and order[first] > order[second]:
            yield (
                first[1],
                f"{first[0]} {first[1]!r} comes before {second[1]!r} in {us}, at "
                f"{left[first].where}, and after it in {them}, at {right[first].where}",
            )
