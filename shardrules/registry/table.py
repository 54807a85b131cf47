"""Map kernel names to rules in a registry. ``shardrules.register`` uses the default one.

Pure Python: declaring a rule neither needs nor changes JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import importlib
import importlib.metadata
import itertools
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from shardrules.arguments import checked, shown
from shardrules.errors import RegistrationError
from shardrules.registry.binding import caller_place
from shardrules.registry.builtin import no_communication
from shardrules.registry.rule import AnyRule, Rule, as_rule
from shardrules.registry.shipped import SHIPPED, Shipped

ENTRY_POINTS = "shardrules.rules"
# The meaning of the status ``audited``. A kernel is well formed if its operands determine its
# result on one device; ``check_rule`` tests that, an audit doesn't.
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
        """Return whether this matches the kernel ``name`` (normalised) of ``module``."""
        own_module, _, own_name = self.name.rpartition(":")
        if own_module and not fnmatch.fnmatchcase(module, own_module):
            return False
        if self.is_pattern:
            return fnmatch.fnmatchcase(name, own_name)
        return normalise(own_name) == name

    def repeats(self, earlier: Registration) -> bool:
        """Return whether one line made both declarations, as when a notebook cell runs twice."""
        same = earlier.rule == self.rule or earlier.rule.is_written_as(self.rule)
        return same and (earlier.where, earlier.library) == (self.where, self.library)

    def __str__(self) -> str:
        by = f" by {self.library}" if self.library else ""
        return f"{self.rule!r} for {self.name!r}, {self.status}{by} at {self.where}"


@dataclasses.dataclass(frozen=True)
class Overlay:
    """The declarations of one ``with rules(...)``."""

    entries: tuple[Registration, ...]


@checked
def normalise(name: str) -> str:
    """Return a kernel name as compiled programs print it.

    JAX lowers the name ``foo bar/1`` as ``foo_bar_1``; a test compares the two.
    """
    return re.sub(r"[^\w.-]", "_", name)


def matches_op_name(entry: Registration, op_name: str, functions: bool) -> bool:
    """Return whether a declaration matches a compiled call by its op_name."""
    # A name may stand for the whole op_name, or for the scope nearest to the call. That is the last
    # part but one, without the transformations around it: ``name`` in ``jit(f)/jvp(name)/call``.
    # XLA may join the names of two operations with ";". The text before a name is then not a scope.
    scopes = [] if ";" in op_name else re.split(r"/(?![^\[]*\])", op_name)
    names = [op_name]
    if len(scopes) > 1:
        nearest = re.search(r"(?:(\w+)\()?([^()]*)\)*$", scopes[-2])
        if nearest and nearest[2] and (functions or nearest[1] not in ("jit", "pjit", "pmap")):
            names.append(nearest[2])
    return entry.name in names or (
        entry.is_pattern and any(fnmatch.fnmatchcase(name, entry.name) for name in names)
    )


class _ThreadScopes(threading.local):
    """A thread's scopes, and the cached answers of ``find`` under them."""

    def __init__(self) -> None:
        self.overlays: tuple[Overlay, ...] = ()
        self.state: Any = None
        self.answers: dict[Any, Registration | None] = {}


class Registry:
    """Declarations by name, safe to use from several threads.

    Args:
      entry_points: the entry-point group in which libraries ship their rules, or None.
      prover: ``module:function`` that audits kernels, or empty; a name, since it imports JAX.
      shipped: maps a library's module to our table of its names.
    """

    _CACHE_SIZE = 1024  # answers of ``find`` in each thread

    @checked
    def __init__(
        self,
        entry_points: str | None = None,
        prover: str = "",
        shipped: Mapping[str, Shipped] | None = None,
    ):
        self._lock = threading.RLock()
        self._entries: dict[tuple[str, str, Any], Registration] = {}
        self._listeners: list[Callable[[], None]] = []
        self._guards: list[Callable[[], contextlib.AbstractContextManager[object]]] = []
        self._local = _ThreadScopes()
        self._version = 0
        self.matched: set[str] = set()  # the places of declarations that matched a kernel
        self._entry_points = entry_points
        self._prover = prover
        self._shipped = dict(shipped or {})
        # Loaded rules of ``shipped``; rules for primitives of modules that aren't imported yet.
        self._shipped_entries: dict[tuple[str, str, Any], Registration] = {}
        self._awaited: dict[str, list[tuple[str, str, str]]] = {}
        self._functions: dict[tuple[str, str], str] = {}

    @property
    def version(self) -> int:
        """Return a count that grows with every change."""
        return self._version

    # Declaring.

    @checked(own=("rule",))
    def register(
        self, name: Any, rule: AnyRule, *, replace: bool = False, where: str = ""
    ) -> Registration:
        """Declare the rule of every kernel called ``name``.

        Args:
          name: a Pallas kernel's ``name=`` or function name, an FFI target, a primitive's name;
            ``module:name``, with the module of the kernel's function; a pattern of ``*``, ``?``
            and ``[...]``; or a primitive itself.
          rule: a shardrules rule, or a function from a RuleContext to one AxisType per output.
          replace: replace an earlier declaration of the same name.
          where: the place of the declaration, for messages; the caller's line if empty.

        Returns:
          The registration.

        Raises:
          RegistrationError: if the name is not a non-empty string, or is taken. The same line may
            run again (a notebook's cell).
          RuleError: if ``rule`` is not a rule.
        """
        return self._add(self._entry(name, rule, where or caller_place()), replace)

    @staticmethod
    def _entry(name: Any, rule: AnyRule, where: str, library: str = "") -> Registration:
        target = None
        if hasattr(name, "bind") and isinstance(getattr(name, "name", None), str):
            target, name = name, name.name  # a jax primitive
        if not isinstance(name, str) or not name.strip():
            raise RegistrationError(
                f"a kernel name is a non-empty string, not {name!r}; to bind a rule to a function "
                "object, write @shardrules.no_communication above its def",
                name=name,
            )
        return Registration(name.strip(), as_rule(rule), where, library=library, target=target)

    @staticmethod
    def _key(entry: Registration) -> tuple[str, str, Any]:
        as_written = entry.is_pattern or ":" in entry.name
        name = entry.name if as_written else normalise(entry.name)
        return name, entry.library, entry.target

    def _add(self, entry: Registration, replace: bool) -> Registration:
        # For one name, the registry may hold both a library's rule and the user's; find() prefers
        # the user's.
        key = self._key(entry)
        with self._lock:
            earlier = self._entries.get(key)
            if earlier is not None and not replace and not entry.repeats(earlier):
                raise RegistrationError(
                    f"kernel {entry.name!r} has a rule already:\n"
                    f"  {earlier.rule!r} at {earlier.where}\n  {entry.rule!r} at {entry.where}\n"
                    "keep one, or pass replace=True to the later",
                    name=entry.name,
                    places=(earlier.where, entry.where),
                )
            self._entries[key] = entry
            self.matched.discard(entry.where)
            self._changed()
        return entry

    def ship(self, name: str, rule: AnyRule, library: str, where: str) -> Registration:
        """Declare a rule for a library; ``where`` says why. The user's own rule wins."""
        return self._add(self._entry(name, rule, where, library), replace=False)

    def _changed(self) -> None:
        self._version += 1
        for listener in list(self._listeners):
            listener()

    def load_libraries(self) -> None:
        """Add the rules that installed libraries ship, once.

        An entry point of the group ``shardrules.rules`` is a mapping from names to rules, or a
        function that returns one.
        """
        with self._lock:
            group, self._entry_points = self._entry_points, None
            if group is None:
                return
            for point in importlib.metadata.entry_points(group=group):
                library = getattr(getattr(point, "dist", None), "name", None) or point.name
                where = f"{library} ({point.value})"
                try:
                    shipped = point.load()
                    shipped = shipped() if callable(shipped) else shipped
                    for name, rule in shipped.items():
                        self.ship(name, rule, library, where)
                except Exception as error:
                    raise RegistrationError(
                        f"the rules that {library} ships ({group}: {point.value}) can't be "
                        f"loaded: {type(error).__name__}: {error}; tell its authors, or "
                        "uninstall it",
                        library=library,
                    ) from error

    def _load_shipped(self) -> None:
        """Add our rules for the libraries that are imported by now."""
        # Don't call the listeners: no program traced earlier depends on these rules.
        for library in [name for name in self._shipped if name in sys.modules]:
            with self._lock:
                table = self._shipped.pop(library, Shipped())
                for name, why in table.kernels.items():
                    self._add_shipped(name, library, why)
                for name, why in table.targets.items():
                    self._add_shipped(name, library, why, is_ffi=True)
                for name, why in table.primitives.items():
                    module, _, attribute = name.partition(":")
                    self._awaited.setdefault(module, []).append((attribute, library, why))
        for module in [name for name in self._awaited if name in sys.modules]:
            with self._lock:
                for attribute, library, why in self._awaited.pop(module, ()):
                    primitive = getattr(sys.modules[module], attribute, None)
                    if primitive is not None:  # this version may not have it
                        self._add_shipped(primitive, library, why)

    def _add_shipped(self, name: Any, library: str, why: str, is_ffi: bool = False) -> None:
        entry = self._entry(name, no_communication, f"shardrules' table ({why})", library)
        self._shipped_entries[self._key(entry)] = dataclasses.replace(entry, is_ffi=is_ffi)

    @contextlib.contextmanager
    def rules(self, entries: Mapping[str, AnyRule]) -> Iterator[Overlay]:
        """Declare rules for programs that this thread traces in the ``with``, backward passes too.

        An inner scope wins over an outer one, and any scope wins over ``register``.

        Args:
          entries: from names or patterns, as ``register`` takes them, to rules.

        Raises:
          RegistrationError: if a name is not a non-empty string.
          RuleError: if a value is not a rule.
        """
        where = caller_place()
        if not isinstance(entries, Mapping):
            raise RegistrationError(
                f"rules({shown(entries)}) is not a mapping; write "
                "rules({'kernel': shardrules.no_communication})",
                entries=entries,
            )
        overlay = Overlay(tuple(self._entry(n, r, where) for n, r in dict(entries).items()))
        with self.overlaid((*self.overlays, overlay)), contextlib.ExitStack() as stack:
            for guard in list(self._guards):
                stack.enter_context(guard())
            yield overlay

    @property
    def overlays(self) -> tuple[Overlay, ...]:
        """Return this thread's scopes, outermost first."""
        return self._local.overlays

    @contextlib.contextmanager
    def overlaid(self, overlays: tuple[Overlay, ...]) -> Iterator[None]:
        """Make ``overlays`` this thread's scopes; a backward pass enters its forward pass's."""
        before = self.overlays
        self._local.overlays = overlays
        try:
            yield
        finally:
            self._local.overlays = before

    # Lookups.

    @checked
    def find(
        self, name: str, module: str = "", function: str = "", target: Any = None
    ) -> Registration | None:
        """Return the declaration for a kernel, or None.

        The innermost scope that matches wins. Then an exact name wins over a pattern, and the
        user's over a library's.

        Args:
          name: the kernel name, as written or as compiled.
          module: the module of the kernel's function, if known.
          function: the place of its function, ``file:line``, if known.
          target: the primitive, if known.

        Raises:
          RegistrationError: if two matching declarations disagree and neither wins, or a name
            without a module, whose rule drops an axis, matches a second function.
        """
        self.load_libraries()
        self._load_shipped()
        local, key = self._local, (name, module, function, target)
        state = self._version, len(self._shipped_entries), local.overlays
        if local.state != state or len(local.answers) >= self._CACHE_SIZE:
            local.state, local.answers = state, {}
        if key not in local.answers:
            local.answers[key] = self._find(*key)
        return local.answers[key]

    def _find(self, name: str, module: str, function: str, target: Any) -> Registration | None:
        # Look in the scopes first, innermost first; then in the registry. Among exact matches, the
        # user's declarations win over the libraries', and a declaration of a primitive object wins
        # over one of a name.
        compiled = normalise(name)
        for overlay in reversed(self.overlays):
            matching = [e for e in overlay.entries if e.matches(compiled, module)]
            matching = [e for e in matching if e.target in (None, target)]
            if matching:
                return self._best(name, matching)
        with self._lock:
            # A library's own table wins over our rules for it.
            entries = {**self._shipped_entries, **self._entries}
            exact = [e for key, e in entries.items() if key[0] == compiled]
            exact = [e for e in exact if not (e.is_ffi and (module or function))]
            exact = [e for e in exact if e.target in (None, target)]
            exact = [e for e in exact if not e.library] or exact
            exact = [e for e in exact if e.target is not None] or exact
            inexact = [e for e in entries.values() if e.is_pattern or ":" in e.name]
            matching = exact + [e for e in inexact if e.matches(compiled, module)]
        if not matching:
            return None
        best = self._best(name, matching)
        self.matched.add(best.where)
        if function and best.rule.drops and not best.is_pattern and ":" not in best.name:
            self._claim(best, function)
        return best

    @staticmethod
    def _best(name: str, matching: list[Registration]) -> Registration:
        # An exact name beats a pattern, and the user's rule beats a library's. A declaration beats
        # another one only if it is no worse in either way. If several are left, they must agree.
        def beats(a: Registration, b: Registration) -> bool:
            ours, theirs = (not a.is_pattern, not a.library), (not b.is_pattern, not b.library)
            return ours != theirs and all(x >= y for x, y in zip(ours, theirs))

        top = [e for e in matching if not any(beats(rival, e) for rival in matching)]
        for rival in top[1:]:
            if rival.rule != top[0].rule:
                raise RegistrationError(
                    f"two declarations match kernel {name!r} and disagree:\n  {top[0]}\n"
                    f"  {rival}\nregister the exact name, which wins over patterns: "
                    f"shardrules.register({name!r}, rule)",
                    name=name,
                    places=(top[0].where, rival.where),
                )
        return top[0]

    def _claim(self, entry: Registration, function: str) -> None:
        """Record the function that a name matched; raise if it already matched another."""
        with self._lock:
            first = self._functions.setdefault((entry.name, entry.where), function)
        if first != function:
            raise RegistrationError(
                f"the rule {entry.rule!r} for {entry.name!r} (at {entry.where}) makes outputs "
                "invariant, but two different functions have that name:\n"
                f"  {first}\n"
                f"  {function}\n"
                "declare the one that is meant, as 'module:name' or by decorating its def",
                name=entry.name,
                places=(first, function),
            )

    def audit(self, primitive: str, params: dict[str, Any], operand_count: int) -> Any:
        """Return the prover's audit of a call, or None if nothing can audit it."""
        if not self._prover:
            return None
        module, _, function = self._prover.partition(":")
        return getattr(importlib.import_module(module), function)(primitive, params, operand_count)

    def find_by_op_name(self, op_name: str, functions: Collection[str] = ()) -> Registration | None:
        """Return the user's declaration for a compiled kernel, found by its op_name."""
        scopes = [overlay.entries for overlay in reversed(self.overlays)]
        with self._lock:
            scopes.append(tuple(e for e in self._entries.values() if not e.library))
        for entries in scopes:
            matching = [e for e in entries if matches_op_name(e, op_name, e.name in functions)]
            matching = [e for e in matching if e.target is None]
            if matching:
                return self._best(op_name, matching)
        return None

    def own(self) -> tuple[Registration, ...]:
        """Return the user's declarations; the declarations of this thread's scopes come last."""
        with self._lock:
            scoped = itertools.chain.from_iterable(overlay.entries for overlay in self.overlays)
            return tuple(e for e in (*self._entries.values(), *scoped) if not e.library)

    def names(self) -> tuple[str, ...]:
        """Return the names in the user's own declarations, sorted."""
        return tuple(sorted({e.name for e in self.own()}))

    def entries(self) -> tuple[Registration, ...]:
        """Return all declarations outside scopes, in order, shipped ones first."""
        self.load_libraries()
        self._load_shipped()
        with self._lock:
            return (*self._shipped_entries.values(), *self._entries.values())

    # Listeners.

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after every change."""
        with self._lock:
            self._listeners.append(listener)

    def guard(self, guard: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
        """Enter ``guard()`` inside every scope that ``rules`` opens."""
        with self._lock:
            self._guards.append(guard)


default: Registry = Registry(ENTRY_POINTS, "shardrules.pallas:prove", SHIPPED)


@checked(own=("rule",))
def register(name: Any, rule: AnyRule, *, replace: bool = False) -> Registration:
    """Declare the rule of every kernel called ``name``; see ``Registry.register``.

    Example:
      >>> declared = shardrules.register("ring_all_gather", shardrules.all_gather("model"))
      >>> declared = shardrules.register("scale_*", shardrules.no_communication)
    """
    return default.register(name, rule, replace=replace)


def rules(entries: Mapping[str, AnyRule]) -> contextlib.AbstractContextManager[Overlay]:
    """Declare rules for programs that this thread traces in a ``with``; see ``Registry.rules``.

    Example:
      >>> with shardrules.install(), shardrules.rules({"scale_*": shardrules.no_communication}):
      ...     shape = jax.eval_shape(f, x)
    """
    return default.rules(entries)
