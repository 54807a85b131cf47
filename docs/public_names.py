"""A hook of mkdocs, which fills pages from the package.

``::: each of MODULE`` becomes a directive for each of its public names, ``::: help of COMMAND`` the
help that the command prints.
"""

import contextlib
import importlib
import io
import os
import re

_EACH = re.compile(r"^::: each of (\S+)$", re.MULTILINE)
_HELP = re.compile(r"^::: help of (\w+)$", re.MULTILINE)


def written_out(markdown):
    """Return a page with a directive for each name of a module's ``__all__``, and with helps."""

    def names(found):
        module = importlib.import_module(found[1])
        public = (name for name in module.__all__ if not name.startswith("__"))
        return "\n\n".join(f"::: {found[1]}.{name}" for name in public)

    return _HELP.sub(_help, _EACH.sub(names, markdown))


def _help(found):
    from shardrules.__main__ import main

    out, before = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"  # as a block of the page is wide
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main([found[1], "--help"])
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return f"## {found[1]}\n\n```text\n{out.getvalue().rstrip()}\n```\n"


def on_page_markdown(markdown, **_):
    return written_out(markdown)
