"""Where the hooks changed a type, told beside JAX's refusal of what follows from it.

A sort's indices, or what a varying predicate chooses, vary under the hooks where JAX types them
invariant. JAX then refuses ``out_specs=P()``, rightly, and can't say why the value varies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from shardrules.door.patching import Patches
from shardrules.errors import ShardrulesError
from shardrules.hooks.state import Hooks
from shardrules.hooks.types.calls.annotations import tell
from shardrules.registry.axistypes import show_axes

__all__ = ["TypeNoteHooks"]

# What JAX's messages about axis types hold, one or another of them (0.6 to 0.12).
_OF_TYPES = ("out_specs", "varying", "vma", "manual_axis_type", "cotangent type", "{V:")
_SHOWN = 5
_FROM = "shardrules: "


class TypeNoteHooks(Hooks):
    """The hook around shard_map, in which JAX's errors are raised."""

    def install(self, patches: Patches) -> None:
        """Replace how shard_map is bound: its body is traced inside."""
        door = self.door
        if door.shard_map_p is None:  # JAX 0.6.0
            return
        bind = door.shard_map_p.bind

        def bound(*args, **params):
            if not self.state.active:
                return bind(*args, **params)
            with self._annotated():
                return bind(*args, **params)

        patches.attribute(door.shard_map_p, "bind", bound)
        patches.attribute(*door.owner("specs_error"), self._specs_error)

    def _specs_error(self, *args, **kwargs):
        """Write JAX's text, which it does once shard_map's bind has failed, and what was noted."""
        here = self.state.here
        causes, here.type_causes = here.type_causes, ""
        return self.door.specs_error(*args, **kwargs) + causes

    def note(self, what: str, axes: frozenset[str]) -> None:
        """Note that what an operation returns varies over ``axes``, where JAX says it doesn't.

        Args:
          what: the operation, for messages.
          axes: the mesh axes that were added to its type.
        """
        noted = self.state.here.type_notes
        if noted is not None:
            noted[what, axes] = self.door.current_source()

    @contextlib.contextmanager
    def _annotated(self) -> Iterator[None]:
        here = self.state.here
        outer = here.type_notes, here.contradictions
        noted: dict[tuple[str, frozenset[str]], Any] = {}
        here.type_notes = noted
        contradictions: list[Any] = []
        here.contradictions = contradictions
        try:
            yield
            tell(self.door, self.state, contradictions)
        except ShardrulesError:
            raise
        except Exception as error:
            causes = f"\n{self._causes(noted, contradictions)}" if noted or contradictions else ""
            text = error.args[0] if error.args else None
            if not isinstance(text, str):  # what fails, leaf by leaf: its text comes later
                here.type_causes = causes
            elif any(word in text for word in _OF_TYPES) and _FROM not in text:
                error.args = (text + causes, *error.args[1:])
            raise
        finally:
            if outer[0] is not None:
                outer[0].update(noted)
            here.type_notes, here.contradictions = outer

    def _causes(
        self, noted: dict[tuple[str, frozenset[str]], Any], contradictions: list[Any]
    ) -> str:
        lines = [
            f"  output {one.output} of {one.call}{f' at {one.at}' if one.at else ''}, annotated "
            f"'{one.annotation}': over {show_axes(one.proven.varying - one.annotation.varying)}"
            for one in contradictions[-_SHOWN:]
        ]
        for (what, axes), source in list(noted.items())[-_SHOWN:]:
            at = self.door.source_line(source)
            lines.append(f"  {what}{f' at {at}' if at else ''}: over {show_axes(axes)}")
        return (
            f"{_FROM}what these return varies over mesh axes here, because something that they "
            "depend on does; JAX alone would type it invariant, and be wrong:\n" + "\n".join(lines)
        )
