"""Find what a patch edits in a script's source: the flags of checks, the place to install."""

from __future__ import annotations

import ast
import io
import math
import re
import tokenize
from collections.abc import Sequence

from shardrules.unchecked.sites import Site


def lines_of(file: str) -> list[str]:
    with open(file, "rb") as raw:
        data = raw.read()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    # StringIO splits lines only where Python does; decoding as utf-8 keeps a byte order mark.
    text = data.decode("utf-8" if encoding == "utf-8-sig" else encoding)
    return io.StringIO(text, newline="").readlines()


def _tree(file: str) -> ast.Module:
    """Parse a file; return an empty module if it can't be read."""
    try:
        with open(file, "rb") as raw:
            return ast.parse(raw.read())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def flag(site: Site) -> tuple[int, int, int] | None:
    """Return line and columns of the False that switches a site's check off; None if not there."""
    spot = site.line, site.column, site.end_line, site.end_column
    for node in ast.walk(_tree(site.file)):
        if isinstance(node, ast.Call):
            if (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset) == spot:
                return _written_out(node)
    return None


def _written_out(call: ast.expr) -> tuple[int, int, int] | None:
    # In ``partial(shard_map, check_vma=False)(f)``, the call's function is itself a call, and its
    # keywords are those of this shard_map alone. A keyword of the outer call overrides them.
    while isinstance(call, ast.Call):
        for keyword in call.keywords:
            value = keyword.value
            if keyword.arg in ("check_vma", "check_rep"):
                is_literal = ast.unparse(value) == "False"
                end = value.col_offset + len("False")
                return (value.lineno, value.col_offset, end) if is_literal else None
        call = call.func
    return None


_DIRECTIVE = re.compile(r"#\s*(noqa|type:|fmt:|pragma|pylint:|ruff:|pyright:|mypy:)")
_NAMES_THE_CHECK = re.compile(r"\b(check_vma|check_rep|vma|replicat\w+)\b", re.IGNORECASE)


def drop_reasons(lines: list[str], number: int) -> None:
    """Drop the comments that explain why the check was off."""
    # Drop a comment after the flag if the line holds only the flag, or the comment names the check.
    # Drop comment lines right above a line that holds only the flag, if they name the check.
    try:
        tokens = list(tokenize.generate_tokens(iter(lines).__next__))
    except (tokenize.TokenError, SyntaxError):
        return
    comments = {t.start[0]: t.start[1] for t in tokens if t.type == tokenize.COMMENT}
    line = lines[number - 1]
    column = comments.get(number, len(line.rstrip("\r\n")))
    comment = line[column:].rstrip()
    alone = re.fullmatch(r"\s*check_(vma|rep)\s*=\s*True\s*,?\s*", line[:column]) is not None
    if comment and (alone or _NAMES_THE_CHECK.search(comment)) and not _DIRECTIVE.match(comment):
        lines[number - 1] = line[:column].rstrip() + line[len(line.rstrip("\r\n")) :]
    first = number
    while alone and first > 1 and comments.get(first - 1) is not None:
        if lines[first - 2][: comments[first - 1]].strip():
            break
        first -= 1
    if _NAMES_THE_CHECK.search("".join(lines[first - 1 : number - 1])):
        del lines[first - 1 : number - 1]


def place_to_install(
    script: str, sites: Sequence[Site]
) -> tuple[int | None, list[tuple[int, str]]]:
    """Return the line to install after, or None if the script does, and calls with arguments."""
    tree = _tree(script)
    installs = _names_of_install(tree)
    calls = [
        (node.lineno, ast.unparse(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in installs
        if node.args or node.keywords
    ]
    if any(_always_installs(node, installs) for node in tree.body):
        return None, calls
    first_site = min((site.line for site in sites if site.file == script), default=math.inf)
    place = 0
    for node in tree.body:
        if node.lineno >= first_site:
            break
        imports = isinstance(node, (ast.Import, ast.ImportFrom))
        is_docstring = node is tree.body[0] and ast.get_docstring(tree) is not None
        if imports or _sets_variables(node) or is_docstring:
            place = node.end_lineno or node.lineno
    return place, calls


def imports_shardrules(script: str, end: int) -> bool:
    """Return whether a script's lines up to ``end`` import shardrules under its own name."""
    for node in _tree(script).body:
        if node.lineno <= end and isinstance(node, ast.Import):
            if any(a.name == "shardrules" and a.asname in (None, a.name) for a in node.names):
                return True
    return False


# Statements and expressions whose parts may not run.
_SOMETIMES = (ast.Lambda, ast.If, ast.IfExp, ast.BoolOp, ast.For, ast.While, ast.Try)


def _always_installs(node: ast.AST, installs: set[str]) -> bool:
    """Return whether a statement always calls ``install()``, if its functions are all called."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in installs:
        return not node.args and not node.keywords
    is_main = isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
    if isinstance(node, _SOMETIMES) and not is_main:
        return False
    return any(_always_installs(inner, installs) for inner in ast.iter_child_nodes(node))


def _names_of_install(tree: ast.Module) -> set[str]:
    names = {"shardrules.install"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {f"{a.asname}.install" for a in node.names if a.name == "shardrules"}
        elif isinstance(node, ast.ImportFrom) and node.module == "shardrules":
            names |= {a.asname or a.name for a in node.names if a.name == "install"}
    return names


def _sets_variables(node: ast.stmt) -> bool:
    """Return whether a statement sets environment variables, which JAX may read at import."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        targets = [node.value.func]
    else:
        targets = node.targets if isinstance(node, ast.Assign) else []
    return any(re.match(r"(os\.)?environ[.[]", ast.unparse(target)) for target in targets)
