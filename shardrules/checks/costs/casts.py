"""``assert_cheapest_casts``: no gradient's psums move more bytes than they have to."""

from __future__ import annotations

from typing import Any

from shardrules.arguments import checked
from shardrules.errors import CollectiveAssertionError, ShardrulesError

__all__ = ["assert_cheapest_casts", "wasted"]


@checked
def assert_cheapest_casts(f: Any, *args: Any, **kwargs: Any) -> None:
    """Assert that the casts of each gradient stand where its psums move the fewest bytes.

    The program is traced, not compiled. ``assert_no_defensive_psum`` asks whether each reduction
    is needed where it stands; this one asks whether fewer bytes would do, had the value been cast
    elsewhere. Where casts can't be placed (on JAX to 0.5.3, or in a program that holds what can't
    be rewritten), nothing can be said, and nothing is raised.

    Args:
      f: a gradient, jitted or not.
      *args: what it is called with; arrays or ``jax.ShapeDtypeStruct``.
      **kwargs: its keyword arguments.

    Raises:
      CollectiveAssertionError: naming the bytes now and at the fewest, and the line for each cast.
      ShardrulesError: ``f`` is not a function.
    """
    __tracebackhide__ = True  # pytest shows the line that calls this
    text, placements = wasted(f, *args, **kwargs)
    if placements:
        raise CollectiveAssertionError(text, placements=placements)


def wasted(f: Any, *args: Any, **kwargs: Any) -> tuple[str, tuple[Any, ...]]:
    """Return the placements that would save bytes, as text and as data."""
    from shardrules.hooks.explain.explain import explain
    from shardrules.hooks.explain.explanation import describe_placement

    if not callable(f) or hasattr(f, "as_text"):
        raise ShardrulesError(
            f"{type(f).__name__} has no casts to look at; pass the function that takes the "
            "gradient, with its arguments"
        )
    dearer = tuple(
        placement
        for placement in explain(f, *args, **kwargs).placements
        if not placement.applied and placement.after_bytes < placement.before_bytes
    )
    return "\n".join(map(describe_placement, dearer)), dearer
