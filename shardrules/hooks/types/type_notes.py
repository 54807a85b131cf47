"""Add the causes to JAX's errors about types that the hooks changed.

For example, a sort's indices vary under the hooks, but JAX alone types them as invariant. So JAX
rejects ``out_specs=P()`` under the hooks, and can't say why. When a shard_map is differentiated,
JAX (0.6 to 0.12) also names the wrong output, or raises an error about pytrees; the hooks write
that message from the outputs' own types.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from shardrules.door.patching import Patches
from shardrules.door.protocols import JaxMesh
from shardrules.errors import ShardrulesError
from shardrules.hooks.frames import BodyFrame
from shardrules.hooks.state import Hooks
from shardrules.hooks.types.calls.annotations import tell
from shardrules.registry.axistypes import show_axes

# JAX's messages about axis types contain one of these (0.6 to 0.12).
_OF_TYPES = ("out_specs", "varying", "vma", "manual_axis_type", "cotangent type", "{V:")
_SHOWN = 5
_FROM = "shardrules: "

# The function that JAX puts into shard_map for each output when it runs the shard_map eagerly.
_ONE_BY_ONE = "'_rem_singleton'"


class _Returned(NamedTuple):
    tree: Any  # the pytree of the outputs
    wide: list[frozenset[str]]  # the axes over which each leaf varies although its spec lacks them


def _text(tree: Any, axes: list[frozenset[str]]) -> str:
    """Return text about the outputs that vary over axes that their specs don't name."""
    paths, _ = tree_flatten_with_path(tree.unflatten(range(tree.num_leaves)))
    wide = [
        f"output{keystr(path)} varies over {show_axes(each)}"
        for (path, _), each in zip(paths, axes)
        if each
    ]
    return f"{_FROM}{'; '.join(wide)}"


def _of_outputs(axes: list[frozenset[str]], count: int) -> list[frozenset[str]] | None:
    """Return the outputs' axes, up to JAX 0.8; None if there are tangents too."""
    # The other entries belong to residuals, which come first if JAX linearizes directly, else last.
    # Residuals never fail, since JAX makes their specs from their types.
    first, last = axes[:count], axes[-count:]
    at_once = getattr(jax.config, "jax_use_direct_linearize", False)
    parts = (last, first) if at_once else (first, last)
    failing = sum(map(bool, axes))
    return next((part for part in parts if sum(map(bool, part)) == failing), None)


def _named(spec: Any) -> frozenset[str]:
    """Return the mesh axes that an out_spec names."""
    if hasattr(spec, "to_lo") and not isinstance(spec, PartitionSpec):
        return frozenset().union(
            *map(_named, spec.to_lo())
        )  # a hijax type's, for each of its arrays
    names: set[str] = set()
    for entry in getattr(spec, "partitions", spec) or ():
        names.update(entry if isinstance(entry, tuple) else (entry,))
    return frozenset(names)


class TypeNoteHooks(Hooks):
    """Hooks around shard_map that add causes to JAX's errors."""

    def install(self, patches: Patches) -> None:
        door = self.door
        if door.shard_map_p is None:  # JAX 0.6.0
            return
        bind = door.shard_map_p.bind

        def bound(*args: Any, **params: Any) -> Any:
            if not self.state.active:
                return bind(*args, **params)
            returned: list[_Returned] = []
            if "subfuns" in params:  # since JAX 0.9
                (function,) = params["subfuns"]

                def body(*args: Any) -> Any:
                    outputs = function(*args)
                    returned.append(self._returned(outputs))
                    return outputs

                params["subfuns"] = (body,)
            with self._annotated(returned):
                return bind(*args, **params)

        patches.attribute(door.shard_map_p, "bind", bound)
        patches.attribute(*door.owner("specs_error"), self._specs_error)

    def _returned(self, outputs: Any) -> _Returned:
        wide, (flat, specs) = [], outputs.unpack_aux()
        for value, spec in zip(flat, specs):
            wide.append(self.door.axis_type(self.door.typeof(value)).varying - _named(spec))
        return _Returned(flat.tree, wide)

    def _specs_error(self, f: Any, mesh: JaxMesh, tree: Any, specs: Any, fails: Any) -> Any:
        """Return JAX's message for out_specs, about the outputs alone, with the causes."""
        here = self.state.here
        (causes, outputs), here.refused = here.refused, ("", None)
        tree = tree if outputs is None else outputs.tree
        if len(fails) == tree.num_leaves:
            return self.door.specs_error(f, mesh, tree, specs, fails) + causes
        # There are more entries than outputs: they include a gradient's residuals.
        axes = [
            frozenset() if type(fail).__name__ == "NoFail" else getattr(fail, "varying", fail)
            for fail in fails
        ]
        wide = _of_outputs(axes, tree.num_leaves) if outputs is None else outputs.wide
        which = f", and one of its outputs varies over {show_axes(frozenset().union(*axes))}"
        if wide is not None:
            which = f"\n{_text(tree, wide)}"
        return (
            f"{_FROM}shard_map applied to the function {self.door.function_name(f)!r} was given "
            f"out_specs which require replication{which}{causes}"
        )

    def note(self, what: str, axes: frozenset[str]) -> None:
        """Record that an operation's result varies over ``axes`` though JAX types it invariant."""
        noted = self.state.here.body.notes
        if noted is not None:
            noted[what, axes] = self.door.current_source()

    @contextlib.contextmanager
    def _annotated(self, returned: list[_Returned]) -> Iterator[None]:
        # JAX's error may be a text, or the leaves that fail, from which JAX writes the text later
        # (``_specs_error``). Add the causes to the text, or pass them on in ``here.refused``. The
        # notes also go to the enclosing shard_map, whose outputs may depend on these results.
        here, outer = self.state.here, self.state.here.body.notes
        noted: dict[tuple[str, frozenset[str]], Any] = {}
        contradictions: list[Any] = []
        try:
            with BodyFrame(noted, contradictions):
                yield
                tell(self.door, self.state, contradictions)
        except ShardrulesError:
            raise
        except Exception as error:
            causes = f"\n{self._causes(noted, contradictions)}" if noted or contradictions else ""
            text = error.args[0] if error.args else None
            outputs = returned[-1] if returned else None
            if not isinstance(text, str):  # the leaves that fail; JAX writes the message later
                here.refused = causes, outputs
            elif outputs is not None and _ONE_BY_ONE in text and any(outputs.wide):
                text = f"{text}\n{_text(*outputs)}{causes}"
                error.args = (text, *error.args[1:])
            elif any(word in text for word in _OF_TYPES) and _FROM not in text:
                error.args = (text + causes, *error.args[1:])
            raise
        finally:
            if outer is not None:
                outer.update(noted)

    def _causes(self, noted: dict[tuple[str, frozenset[str]], Any], contradictions: Any) -> str:
        lines = [
            f"  output {c.output} of {c.call}{f' at {c.at}' if c.at else ''}, annotated "
            f"'{c.annotation}': over {show_axes(c.proven.varying - c.annotation.varying)}"
            for c in contradictions[-_SHOWN:]
        ]
        for (what, axes), source in list(noted.items())[-_SHOWN:]:
            at = self.door.source_line(source)
            lines.append(f"  {what}{f' at {at}' if at else ''}: over {show_axes(axes)}")
        return (
            f"{_FROM}the results of these vary over mesh axes here, because something that "
            "they depend on does; JAX alone would type them invariant, and be wrong:\n"
            + "\n".join(lines)
        )
