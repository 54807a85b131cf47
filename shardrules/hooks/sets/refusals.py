"""The errors about cotangents where no value can be cast: JAX 0.4.28 to 0.5.3."""

from __future__ import annotations

from shardrules.hooks.cotangents.refusals import BOTH_USES, Refusals


class SetRefusals(Refusals):
    """Errors about a bwd's cotangents, without the forms that use a cast."""

    def _whole(self, names: str) -> str:
        return f"jax.lax.pmean(ct, ({names},))"

    def _share(self, names: str) -> str:
        return ""

    def _by_casts(self, axis: str) -> tuple[str, str]:
        return "", ""

    def _copies(self, names: str) -> str:
        return ""

    def _for_both(self, names: str) -> str:
        return (
            f"{BOTH_USES}f(f(x)) does, call another one there, whose bwd counts the copies:\n"
            f"    return (ct * jax.lax.psum(1, ({names},)),)"
        )
