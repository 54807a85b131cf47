"""What to type for a kernel without a rule: lines that are safe to paste."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from shardrules.paths import is_own, module_at
from shardrules.registry.table import normalise

# Numbers between separators, perhaps after a few letters: 128-256, bm128, 64x32.
_SIZES = re.compile(r"(?<![A-Za-z\d])([A-Za-z]{0,3})(\d+(?:[-_.x]\d+)*)(?![A-Za-z\d])")
# Before a number, these letters name a dtype, a version or a machine, so another kernel.
_NO_SIZES = "b bf e f fp i int s sm u v".split()
_BLOCK = 8  # smaller numbers may count kernels, as in pass_2
# What a kernel may be that sends: each does the first; only the last two make outputs equal.
_SENDING = "permute all_gather reduce_scatter all_to_all all_reduce all_gather_invariant".split()
_LETTERS = 3  # a pattern with fewer letters could match unrelated kernels


def pattern(kernel: str) -> str:
    """Return a pattern for all block sizes of a kernel (``gmm_bm*_bn*``), or an empty string."""

    def sized(match: re.Match[str]) -> str:
        numbers = re.findall(r"\d+", match[2])
        if match[1].lower() in _NO_SIZES or max(map(int, numbers)) < _BLOCK:
            return match[0]
        return f"{match[1]}*"

    name = normalise(kernel)
    general = _SIZES.sub(sized, name)
    return general if general != name and sum(map(str.isalpha, general)) >= _LETTERS else ""


def registered(kernel: str) -> str:
    """Return the name under which to register a kernel; its own may read as a pattern."""
    return normalise(kernel) if any(c in kernel for c in "*?[") else kernel


def lines(
    kernel: str,
    module: str = "",
    place: str = "",
    *,
    is_function: bool = True,
    communicates: bool = False,
    sends: bool = False,
    axes: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return the lines to paste for a kernel; any one of them is enough.

    ``communicates``: its jaxpr shows that it reads its position, or, with ``sends``, other devices.
    """
    rule = "shardrules.no_communication"
    after = ""
    if communicates:
        first, *others = _SENDING if sends else ("per_device", *_SENDING)
        rule = f"shardrules.{first}({', '.join(map(repr, axes)) or 'AXIS'})"
        after = f"  # or {', '.join(others)}: what it does"
    module = module or module_at(place)
    named = not is_function or (module and kernel.isprintable() and kernel != "<lambda>")
    texts = []
    if is_function and is_own(place):
        shown = place.replace(os.getcwd() + os.sep, "", 1)
        texts.append(
            f"{rule}(lambda ...)  # around the lambda at {shown}{after}"
            if kernel == "<lambda>"
            else f"@{rule}  # above the def at {shown}{after}"
        )
    if named:
        # A script's __main__ has another name where it is imported, by a test say.
        of = f"{module}:" if is_function and module != "__main__" else ""
        texts.append(f"shardrules.register({of + registered(kernel)!r}, {rule}){after}")
        if pattern(kernel):
            sizes = "  # of all block sizes" + after.replace("  # or ", "; or ")
            texts.append(f"shardrules.register({of + pattern(kernel)!r}, {rule}){sizes}")
    if not texts:  # neither a name of its own nor code to edit
        texts.append(f"op = {rule}(op)  # op: the function of arrays that calls it{after}")
    return tuple(texts)
