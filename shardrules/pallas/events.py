"""What a kernel's jaxpr does to its refs, in order: one walk over it and its nested jaxprs.

The walk checks every primitive against the allow list, and boils the rest down to a small tree of
events (a read, a store, a wait, a branch, a loop) that ``flow`` then runs through.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

from shardrules.hooks.door.audit_names import AuditNames
from shardrules.pallas.allowlist import KEEPS_SHAPE, PURE, REFUSED, REMOTE_TRANSFORMS, TRANSFORMS
from shardrules.pallas.regions import SOME, WHOLE, is_box

__all__ = [
    "Blocker",
    "Branch",
    "Fresh",
    "Loop",
    "Read",
    "Root",
    "Scope",
    "Store",
    "Wait",
    "Walk",
    "place_of",
]

_MOST_EQUATIONS = 200_000  # a bound on the work, where jaxprs are nested in jaxprs


@dataclasses.dataclass(frozen=True)
class Blocker:
    """One thing in a kernel that keeps it from being proven.

    Args:
      primitive: the primitive's name.
      reason: what is wrong with it, as the end of a sentence.
      source: ``file:line`` of the kernel's code.
      communicates: whether it shows that the kernel communicates or reads where its device
        stands, so that a ``no_communication`` declaration can't be true.
      axes: the mesh axes that it names.
    """

    primitive: str
    reason: str
    source: str
    communicates: bool = False
    axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.primitive} at {self.source}: {self.reason}"


def place_of(jaxpr: Any) -> str:
    """Return ``file:line`` of the function that a jaxpr was traced from."""
    info = getattr(jaxpr, "debug_info", None)
    return getattr(info, "func_src_info", "").partition(" at ")[2] or "unknown place"


class Root:
    """One buffer.

    Args:
      label: what to call it in a message.
      ready: whether it holds something when the kernel starts.
      sync: whether it is a semaphore or barrier, which hold no data.
      shape: its shape.
      is_float: whether its elements are floating point.
      foreign: whether somebody outside of the kernel can see it too.
    """

    __slots__ = (
        "label",
        "shape",
        "ready",
        "sync",
        "is_float",
        "foreign",
        "stores",
        "reads",
        "atomics",
        "copies",
        "output",
    )

    def __init__(
        self,
        label,
        *,
        shape=(),
        ready=False,
        sync=False,
        is_float=False,
        foreign=False,
        output=None,
    ):
        self.label = label
        self.shape = shape
        self.ready = ready
        self.sync = sync
        self.is_float = is_float
        self.foreign = foreign
        self.output = output  # its number among the outputs
        self.stores = []  # Store
        self.reads = 0
        self.atomics = []  # (eqn, name, whether its old value is used)
        self.copies = []  # regions that asynchronous copies fill: read them after a wait

    @property
    def boxes(self):
        """The regions of all stores if each of them is a box that is known, else None."""
        regions = [store.region for store in self.stores]
        return regions if all(map(is_box, regions)) else None


class _Parts:
    """The dimensions of a ref that a chain of indices narrows."""

    def __init__(self):
        self.known = True
        self.dims: list = []  # for each of the ref's: [atoms that its start is the sum of, size]
        self._left: list[int] = []  # those that the view still has

    def narrow(self, view: Any, indices: list) -> None:
        """Narrow the dimensions that are left by (start, size, step)."""
        if not self.dims:
            self.dims = [[[], size] for size in view.shape]
            self._left = list(range(len(self.dims)))
        self.known = (
            self.known
            and len(indices) == len(self._left)
            and not getattr(view, "int_indexer_shape", ())
            and all(
                step == 1
                and type(size) is int
                and (type(start) is int or getattr(getattr(start, "aval", None), "shape", 0) == ())
                for start, size, step in indices
            )
        )
        if self.known:
            for dim, (start, size, _) in zip(self._left, indices):
                self.dims[dim][0].append(start)
                self.dims[dim][1] = size
            self._left = [
                dim for dim, index in zip(self._left, view.indices) if hasattr(index, "stride")
            ]


class Scope:
    """One use of one jaxpr: which equation defines a variable, what it is bound to outside."""

    def __init__(self, jaxpr):
        self.jaxpr = jaxpr
        self.defs = {}  # variable -> equation
        self.bound = {}  # variable -> (scope, atom)
        self.first = {}  # a loop's carry -> (scope, atom) that it starts from
        self.refs = {}  # variable -> Root
        self.inner = {}  # id of an equation -> scopes of its jaxprs

    @functools.cached_property
    def used(self) -> set:
        """The variables that an equation or the jaxpr's result looks at."""
        used = {a for eqn in self.jaxpr.eqns for a in eqn.invars if not hasattr(a, "val")}
        used.update(a for a in self.jaxpr.outvars if not hasattr(a, "val"))
        return used

    @functools.cached_property
    def uses(self) -> dict:
        """The equations that look at each variable."""
        uses: dict[Any, list] = {}
        for eqn in self.jaxpr.eqns:
            for a in eqn.invars:
                if not hasattr(a, "val"):
                    found = uses.setdefault(a, [])
                    if not found or found[-1] is not eqn:
                        found.append(eqn)
        return uses


@dataclasses.dataclass
class Read:
    root: Root
    region: Any
    eqn: Any
    scope: Scope


@dataclasses.dataclass
class Store:
    root: Root
    region: Any
    eqn: Any
    conditions: tuple  # of (scope, atom, the branch that it stands in)
    masks: tuple = ()  # of (scope, atom) that leave elements of its region out


@dataclasses.dataclass
class Wait:
    """The end of copies: ``target`` is the buffer that it names, or None for all of ``on``'s."""

    on: Root
    target: Root | None
    region: Any
    eqn: Any


@dataclasses.dataclass
class Fresh:
    root: Root


@dataclasses.dataclass
class Branch:
    scope: Scope
    predicate: Any
    branches: list


@dataclasses.dataclass
class Loop:
    """A loop that may run.

    Args:
      events: its body's.
      runs: (scope, atom) of its condition; True for a loop of known length.
      body: the scope of its body.
      carry: the body's variables that are carried from round to round.
      after: for each of these, the body's atom that it becomes.
      tested: for each of these, the condition's variable that holds it.
      length: how many rounds it has; None where its condition says so.
    """

    events: list
    runs: Any
    body: Scope
    carry: tuple
    after: tuple
    tested: tuple = ()
    length: int | None = None


class Walk:
    """The walk.

    Args:
      names: the door to JAX.
      local_axes: axes that are the kernel's own (its grid, cores, threads), not the mesh's.
      kernel_place: ``file:line`` of the kernel.
    """

    def __init__(
        self,
        names: AuditNames,
        local_axes: tuple[str, ...] = (),
        kernel_place: str = "unknown place",
    ):
        self.names = names
        self.kernel_place = kernel_place
        self.local_axes = set(local_axes)
        self.blockers: list[Blocker] = []
        self.roots: list[Root] = []
        self.random = Root("the random number generator")  # the state that prng_seed sets
        # What is filled once somebody has waited at a barrier: by copies that end there, and by
        # stores of threads that arrive there.
        self.links: dict[Root, dict[Root, None]] = {}
        self.handed: dict[Root, dict[Root, None]] = {}
        self.before: dict[Root, None] = {}  # what some path to here has stored
        self.arrivals: list[Root] = []  # barriers that were arrived at, in order
        self.floats: dict[tuple, bool] = {}  # (scope, atom) -> whether float data decides on it
        self.masked_loads = False
        self.accumulates = False
        self.asynchronous = False
        self.threads = False
        self._conditions: tuple = ()
        self._left = _MOST_EQUATIONS

    # Messages.

    def block(self, eqn: Any, reason: str, communicates: bool = False, axes=()) -> None:
        """Note that an equation is not allowed."""
        self.blockers.append(
            Blocker(eqn.primitive.name, reason, self.place(eqn), communicates, tuple(axes))
        )

    def place(self, eqn: Any) -> str:
        """Return ``file:line`` of an equation, or of the kernel where the equation has none."""
        return self.names.place(eqn) or self.kernel_place

    # Jaxprs.

    def walk(self, scope: Scope) -> list:
        """Return the events of a jaxpr."""
        events: list = []
        defs = scope.defs
        actions = _ACTIONS
        self._left -= len(scope.jaxpr.eqns)
        if self._left < 0:
            if not any("equations" in b.reason for b in self.blockers):
                self.block(
                    scope.jaxpr.eqns[0],
                    f"the kernel has more than {_MOST_EQUATIONS} "
                    "equations, nested ones counted at each use",
                )
            return events
        for eqn in scope.jaxpr.eqns:
            action = actions.get(eqn.primitive)
            if action is None:
                action = _action_of(self.names, eqn.primitive)
            if action is not _PURE:
                action(self, eqn, scope, events)
            for var in eqn.outvars:
                defs[var] = eqn
        return events

    def nested(self, eqn, scope: Scope, jaxpr, atoms, consts: bool = False) -> Scope:
        """Return the scope of a jaxpr inside an equation; its consts, then invars, are ``atoms``.

        An atom that is None leaves its variable unknown. With ``consts``, they are its consts
        alone: from JAX 0.12 each jaxpr is closed, and doesn't tell.
        """
        closed = getattr(jaxpr, "jaxpr", None)
        inner = Scope(jaxpr if closed is None else closed)
        variables = (
            inner.jaxpr.constvars
            if consts
            else inner.jaxpr.invars
            if closed is not None
            else [*inner.jaxpr.constvars, *inner.jaxpr.invars]
        )
        for var, atom in zip(variables, atoms):
            if atom is None:
                continue
            inner.bound[var] = (scope, atom)
            if not isinstance(atom, self.names.Literal):
                root = scope.refs.get(atom)
                if root is not None:
                    inner.refs[var] = root
        scope.inner.setdefault(id(eqn), []).append(inner)
        return inner

    # Refs.

    def new_root(self, label: str, aval: Any, **kwargs) -> Root:
        """Return a new buffer of a ref's type."""
        is_float, sync = _kind(getattr(aval, "dtype", None))
        if type(aval).__name__ == "WGMMAAbstractAccumulatorRef":
            kwargs["ready"] = True  # Mosaic GPU allocates it as zeros (JAX 0.10.2)
        root = Root(label, shape=getattr(aval, "shape", ()), sync=sync, is_float=is_float, **kwargs)
        self.roots.append(root)
        return root

    def root(self, eqn, scope: Scope, var: Any) -> Root | None:
        """Return the buffer that a ref variable stands for; block where it is not known."""
        found = None if isinstance(var, self.names.Literal) else scope.refs.get(var)
        if found is None:
            self.block(eqn, "it uses a ref whose origin is not known")
        return found

    def view_is_local(self, eqn, tree: Any) -> bool:
        """Check every view in a params tree; block what leaves this device or is not known."""
        if tree is None:
            return True
        problems = _TREES.get(tree)
        if problems is None:
            if len(_TREES) > 10_000:
                _TREES.clear()
            problems = _TREES[tree] = list(self._strange_views(tree))
        for name, remote in problems:
            if remote:
                self.block(eqn, f"{name} is a view of another device's memory", True)
            else:
                self.block(eqn, f"{name} is a view of a ref that the audit does not know")
        return not problems

    def _strange_views(self, tree):
        data = tree.node_data()
        if data is not None:
            cls = data[0]
            if cls not in (tuple, list, dict, type(None)):
                name = self.names.view(cls)
                if name not in TRANSFORMS:
                    yield cls.__name__, name in REMOTE_TRANSFORMS
            for child in tree.children():
                yield from self._strange_views(child)

    def region(self, scope: Scope, transforms: Any) -> Any:
        """Return what part of a ref a view is: WHOLE, SOME, a box, or a key.

        A key is ("view", scope, parts, ...): equal keys of one scope are the same elements, for as
        long as its variables hold what they do. ``parts`` is None, or for each dimension of the
        ref the atoms that its start is the sum of, and its size.
        """
        if not transforms:
            return WHOLE
        key: list = []
        parts = _Parts()
        whole = True
        for view in transforms:
            name = self.names.view(type(view))
            if name in KEEPS_SHAPE:
                key.append(name)
                parts.known = False
            elif name == "state:NDIndexer":
                key.append("indices")
                for index, size in zip(view.indices, view.shape):
                    start, count, step = (
                        (index.start, index.size, index.stride)
                        if hasattr(index, "stride")
                        else (index, 1, 1)
                    )
                    start, count = self._static(start), self._static(count)
                    key.append((start, count, step))
                    whole = whole and step == 1 and (start, count) == (0, size)
                parts.narrow(view, key[-len(view.indices) :] if view.indices else [])
            else:
                return SOME
        if whole:
            return WHOLE
        if not parts.known:
            return ("view", scope, None, *key)
        if all(type(term) is int for terms, _ in parts.dims for term in terms):
            return tuple((sum(terms), size) for terms, size in parts.dims)
        return ("view", scope, tuple((tuple(terms), size) for terms, size in parts.dims))

    def _static(self, value):
        if isinstance(value, self.names.Literal):
            value = value.val
        try:
            return int(value)
        except (TypeError, ValueError):  # a variable, or an array of indices
            return value if type(value).__hash__ else ("array", id(value))

    def read(self, eqn, scope, events, var, transforms=None, region=None) -> Root | None:
        """Note that an equation reads a ref."""
        root = self.root(eqn, scope, var)
        if root is None:
            return None
        root.reads += 1
        if not root.ready and not root.sync:
            region = self.region(scope, transforms) if region is None else region
            events.append(Read(root, region, eqn, scope))
        return root

    def store(self, eqn, scope, events, var, transforms=None, region=None, masks=()) -> Root | None:
        """Note that an equation stores to a ref."""
        root = self.root(eqn, scope, var)
        if root is None:
            return None
        if not root.ready or root.output is not None:
            region = self.region(scope, transforms) if region is None else region
            self.stored(root, region, eqn, events, masks)
        return root

    def stored(self, root: Root, region, eqn, events=None, masks=()) -> None:
        """Note a store to a buffer; without events, one that a later wait completes."""
        store = Store(root, region, eqn, self._conditions, masks)
        root.stores.append(store)
        if events is None:
            root.copies.append(region)
        if not root.ready:
            self.before[root] = None
        if events is not None:
            events.append(store)

    @contextlib.contextmanager
    def under(self, scope: Scope, atom: Any, branch: int):
        """Note stores as made only where ``atom`` chooses ``branch``."""
        outside = self._conditions
        self._conditions = (*outside, (scope, atom, branch))
        try:
            yield
        finally:
            self._conditions = outside

    def arrive(self, barrier: Root) -> None:
        """Note that a thread hands over what it has stored so far."""
        self.arrivals.append(barrier)
        self.handed.setdefault(barrier, {}).update(self.before)


# What to do with a primitive: an action, found once for each primitive object.


def _PURE(walk, eqn, scope, events):  # noqa: N802 - a mark; never called
    raise AssertionError


_ACTIONS: dict[Any, Any] = {}
_TREES: dict[Any, list] = {}  # what is strange about the views in a params tree


@functools.lru_cache(maxsize=None)
def _kind(dtype: Any) -> tuple[bool, bool]:
    """Return whether a ref's dtype is floating point, and whether it is a semaphore's."""
    name = str(dtype).lower()
    return "float" in name, "sem" in name or "barrier" in name


def _action_of(names: AuditNames, primitive: Any):
    from shardrules.pallas import actions

    name = names.primitive(primitive)
    if name in PURE:
        action = _PURE
    else:
        action = actions.BY_NAME.get(name)
    if action is None:
        refused = REFUSED.get(name) or REFUSED.get(f"{str(name).partition(':')[0]}:*")
        reason, communicates = refused or ("it is not on the audit's allow list", False)

        def action(walk, eqn, scope, events):
            walk.block(eqn, reason, communicates, actions.axes_of(eqn))

    _ACTIONS[primitive] = action
    return action
