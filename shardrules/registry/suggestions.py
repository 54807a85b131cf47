"""Suggest what to type for a kernel without a rule, as lines that are safe to paste."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from shardrules.paths import is_own, module_at
from shardrules.registry.table import normalise

# Numbers between separators, perhaps after a few letters: 128-256, bm128, 64x32.
_SIZES = re.compile(r"(?<![A-Za-z\d])([A-Za-z]{0,3})(\d+(?:[-_.x]\d+)*)(?![A-Za-z\d])")
# A number after these letters is part of a dtype, a version or a machine, so it isn't a size.
_NO_SIZES = "b bf e f fp i int s sm u v".split()
_BLOCK = 8  # a smaller number may count kernels, as in pass_2
# The rules for a kernel that sends. The first rule is right for each such kernel; only the last two
# make outputs invariant.
_SENDING = "permute all_gather reduce_scatter all_to_all all_reduce all_gather_invariant".split()
_LETTERS = 3  # a pattern with fewer letters could match unrelated kernels


def pattern(kernel: str) -> str:
    """Return a pattern for a kernel of any block size (``gmm_bm*_bn*``), empty without sizes."""

    def sized(match: re.Match[str]) -> str:
        numbers = re.findall(r"\d+", match[2])
        if match[1].lower() in _NO_SIZES or max(map(int, numbers)) < _BLOCK:
            return match[0]
        return f"{match[1]}*"

    name = normalise(kernel)
    general = _SIZES.sub(sized, name)
    return general if general != name and sum(map(str.isalpha, general)) >= _LETTERS else ""


def registered(kernel: str) -> str:
    """Return the name under which to register a kernel, whose own name may look like a pattern."""
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

    ``communicates``: its jaxpr reads the device's position or, with ``sends``, other devices' data.
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
        # Leave out the module name of a script: it is __main__ here, but another name where the
        # script is imported (in a test, for example).
        of = f"{module}:" if is_function and module != "__main__" else ""
        texts.append(f"shardrules.register({of + registered(kernel)!r}, {rule}){after}")
        if pattern(kernel):
            sizes = "  # of all block sizes" + after.replace("  # or ", "; or ")
            texts.append(f"shardrules.register({of + pattern(kernel)!r}, {rule}){sizes}")
    if not texts:  # the kernel has neither a name of its own nor code that the user can edit
        texts.append(f"op = {rule}(op)  # op: the function of arrays that calls it{after}")
    return tuple(texts)
