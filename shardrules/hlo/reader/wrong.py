"""Make the errors for text that is not HLO, or that is cut off."""

from __future__ import annotations

import re
from collections.abc import Mapping

from shardrules.errors import HloSyntaxError
from shardrules.hlo.reader import attributes
from shardrules.hlo.reader import module as hm

CUT = ": is the text cut?"


def not_hlo(text: str, position: int, source: str) -> HloSyntaxError:
    """Return the error for text that does not begin with a module's header."""
    if position >= len(text):
        return attributes.syntax_error(
            text,
            0,
            f"{source} is empty: expected HLO text, which begins with "
            "'HloModule NAME'; pass what compiled.as_text() returns",
        )
    hint = ""
    if re.compile(r"#|module\b|func\.").match(text, position):
        hint = " (this looks like StableHLO: compile it first)"
    elif re.compile(r"\S+\.(hlo|txt|gz)\s*").fullmatch(text, position):
        hint = " (this looks like a file's name: pass the text that the file holds)"
    return attributes.syntax_error(
        text,
        position,
        f"{source} is not HLO text: expected 'HloModule NAME', as compiled.as_text() "
        f"prints it{hint}",
    )


def placed(
    error: HloSyntaxError, text: str, name: str, computations: Mapping[str, hm.Computation]
) -> HloSyntaxError:
    """Add the text's name to an error, and say that the text is cut off if it ends before ENTRY."""
    message = str(error.reason)
    last = text.rstrip().count("\n") + 1
    whole = any(computation.is_entry for computation in computations.values())
    if not whole and error.line >= last > 1:
        message = f"{name} is cut off: {message.removeprefix(name).removesuffix(CUT).strip()}"
    elif name not in message and not name.startswith("<"):
        message = f"{name}: {message}"
    return HloSyntaxError(message, line=error.line, column=error.column, text_line=error.text_line)
