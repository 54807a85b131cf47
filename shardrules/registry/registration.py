"""One declaration: a rule for the kernels that match a name."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import re
from typing import Any

from shardrules.arguments import checked
from shardrules.registry.rule import Rule

# The meaning of the status ``audited``. A kernel is well formed if its operands determine its
# result on one device; check_rule tests that, an audit does not.
PROVEN = "proven to depend on its operands alone, if it is well formed"


@dataclasses.dataclass(frozen=True)
class Registration:
    """One declaration.

    Args:
      name: a kernel name, an FFI target or a primitive's name; ``module:name``; or a pattern of
        ``*``, ``?`` and ``[...]``.
      rule: its rule.
      where: ``file:line`` of the declaration.
      status: ``declared`` (nothing proves it) or ``audited`` (the kernel's own jaxpr proves it).
      library: the distribution that ships it; empty for the user's own.
      target: the only primitive object that it matches, or None.
      is_ffi: whether it matches only FFI targets, which have no Python function.
    """

    name: str
    rule: Rule
    where: str
    status: str = "declared"
    library: str = ""
    target: Any = None
    is_ffi: bool = False

    @functools.cached_property
    def is_pattern(self) -> bool:
        return any(c in self.name for c in "*?[")

    def matches(self, name: str, module: str) -> bool:
        """Whether this matches the kernel ``name`` (normalised) of ``module``."""
        own_module, _, own_name = self.name.rpartition(":")
        if own_module and not fnmatch.fnmatchcase(module, own_module):
            return False
        if self.is_pattern:
            return fnmatch.fnmatchcase(name, own_name)
        return normalise(own_name) == name

    def __str__(self) -> str:
        by = f" by {self.library}" if self.library else ""
        return f"{self.rule!r} for {self.name!r}, {self.status}{by} at {self.where}"


def is_redeclaration(earlier: Registration, entry: Registration) -> bool:
    """Whether the same line made both declarations, as a notebook's cell that runs again."""
    same = earlier.rule == entry.rule or earlier.rule.is_written_as(entry.rule)
    return same and (earlier.where, earlier.library) == (entry.where, entry.library)


@dataclasses.dataclass(frozen=True)
class Overlay:
    entries: tuple[Registration, ...]


@checked
def normalise(name: str) -> str:
    """Return a kernel name as compiled programs print it.

    JAX lowers the name ``foo bar/1`` as ``foo_bar_1``; a test compares the two.
    """
    return re.sub(r"[^\w.-]", "_", name)


def matches_op_name(entry: Registration, op_name: str, functions: bool) -> bool:
    """Whether a declaration matches a compiled call by its op_name."""
    # XLA may join the names of two operations by ";"; the text before the name is then no scope.
    scopes = [] if ";" in op_name else re.split(r"/(?![^\[]*\])", op_name)
    names = [op_name]
    if len(scopes) > 1:
        nearest = re.search(r"(?:(\w+)\()?([^()]*)\)*$", scopes[-2])
        if nearest and nearest[2] and (functions or nearest[1] not in ("jit", "pjit", "pmap")):
            names.append(nearest[2])
    return entry.name in names or (
        entry.is_pattern and any(fnmatch.fnmatchcase(name, entry.name) for name in names)
    )
