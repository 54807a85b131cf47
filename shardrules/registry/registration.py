"""One declaration: from a kernel's name, or from what a compiled text calls it, to its rule."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import re
from typing import Any

from shardrules.arguments import checked
from shardrules.registry.rule import Rule

__all__ = ["PROVEN", "Overlay", "Registration", "is_redeclaration", "matches_op_name", "normalise"]

# What the status ``audited`` means. A kernel is well formed if its result on one device is
# determined by its operands: check_rule looks into that, no audit does.
PROVEN = "proven to depend on its operands alone, if it is well formed"


@dataclasses.dataclass(frozen=True)
class Registration:
    """One declaration.

    Args:
      name: what it is for: a kernel name, an FFI target, a primitive's name; ``module:name``; or
        a pattern of ``*``, ``?`` and ``[...]``.
      rule: its rule.
      where: ``file:line`` of the declaration.
      status: ``declared`` (somebody says so) or ``audited`` (the kernel's own jaxpr proves it).
      library: the distribution that ships it, or empty for the user's own.
      target: the primitive object that it is for alone, or None.
      is_ffi: whether it is for FFI targets alone: no Python function stands behind them.
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
        """Whether the name is a pattern."""
        return any(c in self.name for c in "*?[")

    def matches(self, name: str, module: str) -> bool:
        """Whether this is for the kernel ``name`` of ``module``, both normalised."""
        of, _, bare = self.name.rpartition(":")
        if of and not fnmatch.fnmatchcase(module, of):
            return False
        if self.is_pattern:
            return fnmatch.fnmatchcase(name, bare)
        return normalise(bare) == name

    def __str__(self) -> str:
        by = f" by {self.library}" if self.library else ""
        return f"{self.rule!r} for {self.name!r}, {self.status}{by} at {self.where}"


def is_redeclaration(known: Registration, entry: Registration) -> bool:
    """Whether the same line made both declarations: a notebook's cell that runs again."""
    same = known.rule == entry.rule or known.rule.is_written_as(entry.rule)
    return same and (known.where, known.library) == (entry.where, entry.library)


@dataclasses.dataclass(frozen=True)
class Overlay:
    """The declarations of one ``with rules(...)``."""

    entries: tuple[Registration, ...]


@checked
def normalise(name: str) -> str:
    """Return a kernel name as compiled programs print it.

    Pallas lowers the name ``foo bar/1`` as ``foo_bar_1``
    (``jax._src.interpreters.mlir.sanitize_name`` of JAX 0.10.2; a test compares the two).
    """
    return re.sub(r"[^\w.-]", "_", name)


def matches_op_name(entry: Registration, op_name: str, functions: bool) -> bool:
    """Whether a declaration matches a call of which a compiled text tells the op_name only."""
    # XLA joins the names of two operations into one; what is in front is then not its scope.
    scopes = [] if ";" in op_name else re.split(r"/(?![^\[]*\])", op_name)
    names = [op_name]
    if len(scopes) > 1:
        nearest = re.search(r"(?:(\w+)\()?([^()]*)\)*$", scopes[-2])
        if nearest and nearest[2] and (functions or nearest[1] not in ("jit", "pjit", "pmap")):
            names.append(nearest[2])
    return entry.name in names or (
        entry.is_pattern and any(fnmatch.fnmatchcase(name, entry.name) for name in names)
    )
