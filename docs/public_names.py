"""A hook of mkdocs: ``::: each of MODULE`` becomes a directive for each of its public names."""

import importlib
import re

_EACH = re.compile(r"^::: each of (\S+)$", re.MULTILINE)


def written_out(markdown):
    """Return a page with a directive for each name of a module's ``__all__``."""

    def names(found):
        module = importlib.import_module(found[1])
        public = (name for name in module.__all__ if not name.startswith("__"))
        return "\n\n".join(f"::: {found[1]}.{name}" for name in public)

    return _EACH.sub(names, markdown)


def on_page_markdown(markdown, **_):
    return written_out(markdown)
