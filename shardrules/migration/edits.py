"""The patch that switches checks on, as edited files."""

from __future__ import annotations

import ast
import difflib
import io
import os
import re
import tokenize
from collections.abc import Sequence
from typing import NamedTuple

from shardrules.hooks.unchecked import Site
from shardrules.migration.sites import BY_HAND, SWITCH, UNTRIED, Row, is_here, place, short

__all__ = ["Edits", "diff", "edited", "pairs", "patch"]

_INSTALL = "import shardrules\n\nshardrules.install()\n"


class Edits(NamedTuple):
    """The files that the patch changes.

    Attributes:
      before, after: the lines of each file.
      sites: the sites that are switched.
      left: what is to be edited by hand, with the reason.
    """

    before: dict[str, list[str]]
    after: dict[str, list[str]]
    sites: tuple[Site, ...]
    left: list[str]


def patch(found: Sequence[Row], script: str, rules: Sequence[str] = ()) -> tuple[str, list[str]]:
    """Make the patch for ``patch -p1`` in this folder, and list what is left to edit by hand."""
    edits = edited(found, script, rules)
    return diff(edits), edits.left


def diff(edits: Edits) -> str:
    """Write edits as a unified diff, empty if there are none."""
    lines: list[str] = []
    for file, before in edits.before.items():
        name = os.path.relpath(file).replace(os.sep, "/")
        for changed in difflib.unified_diff(before, edits.after[file], f"a/{name}", f"b/{name}"):
            tail = "" if changed.endswith("\n") else "\n\\ No newline at end of file\n"
            lines.append(changed + tail)
    return "".join(lines)


def pairs(found: Sequence[Row]) -> list[tuple[Site, Site]]:
    """List the sites that are switched together or not at all."""
    pairs = [(c.site, c.inside) for row in found for c in row.calls if c.inside is not None]
    # One line may ask for several; and one inside another was looked at with both switched on.
    sites = [row.site for row in found]
    return pairs + [(a, b) for a in sites for b in sites if a != b and _spot(a) == _spot(b)]


def edited(found: Sequence[Row], script: str, rules: Sequence[str] = ()) -> Edits:
    """Edit the files so that what can be switched is on.

    Args:
      found: the sites; those that are SWITCH or UNTRIED are switched, if the file allows it.
      script: the path of the script, which is to install the hooks.
      rules: lines that give the rules which the sites were looked at with, for the script.
    """
    wanted = {row.site for row in found if row.verdict in (SWITCH, UNTRIED, BY_HAND)}
    why = {row.site: _by_hand(row.site) if row.site in wanted else row.verdict for row in found}
    together = pairs(found)
    while True:
        waiting = [
            (one, other)
            for pair in together
            for one, other in (pair, pair[::-1])
            if why.get(one) == "" and why.get(other)
        ]
        if not waiting:
            break
        for one, other in waiting:
            why[one] = f"together with {place(other)}, which can't be switched here"
    edits: dict[str, list[Site]] = {}
    for site in (site for site, reason in why.items() if not reason):
        edits.setdefault(site.file, []).append(site)
    left = [f"{place(site)}: {why[site]}" for site in why if site in wanted and why[site]]
    if not edits:
        return Edits({}, {}, (), left)
    texts = {file: _lines(file) for file in edits}
    after = {file: list(lines) for file, lines in texts.items()}
    for file, sites in edits.items():
        flags = {flag for flag in map(_flag, sites) if flag is not None}
        for line, start, end in sorted(flags, reverse=True):  # from below: lines go
            raw = after[file][line - 1].encode()
            after[file][line - 1] = (raw[:start] + b"True" + raw[end:]).decode()
            _drop_reasons(after[file], line)
    if is_here(script):
        texts.setdefault(script, _lines(script))
        lines = after.setdefault(script, list(texts[script]))
        where, others = _place_to_install(script, edits.get(script, []))
        left += [
            f"{short(script)}:{line}: {call} replaces what the patch adds; drop its arguments"
            for line, call in others
        ]
        if where is None:
            left += [f"{script}: write {line} there" for line in rules]
        else:
            newline = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
            added = [*([""] if where else []), *_INSTALL.splitlines(), *rules, ""]
            if where < len(lines) and not lines[where].strip():
                added.pop()
            lines[where:where] = [line + newline for line in added]
    else:
        left.append(f"{script}: call shardrules.install() there")
        left += [f"{script}: write {line} there" for line in rules]
    return Edits(texts, after, tuple(site for site, reason in why.items() if not reason), left)


def _spot(site: Site) -> tuple[str, int, int]:
    return site.file, site.line, site.column


def _by_hand(site: Site) -> str:
    """Say why a site can't be in the patch, empty if it can."""
    if not is_here(site.file):
        return "not below this folder"
    if _flag(site) is None:
        return "no check_vma=False or check_rep=False in this call"
    return ""


def _lines(file: str) -> list[str]:
    with open(file, "rb") as raw:
        data = raw.read()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    # Python ends a line nowhere else; a mark of UTF-8 at the start stays as it is.
    text = data.decode("utf-8" if encoding == "utf-8-sig" else encoding)
    return io.StringIO(text, newline="").readlines()


def _tree(file: str) -> ast.Module | None:
    try:
        with open(file, "rb") as raw:
            return ast.parse(raw.read())
    except (OSError, SyntaxError, ValueError):
        return None


def _flag(site: Site) -> tuple[int, int, int] | None:
    """Find line, first and last column of the False that switches the check off at a site."""
    tree = _tree(site.file)
    spot = site.line, site.column, site.end_line, site.end_column
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, ast.Call):
            continue
        if (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset) != spot:
            continue
        for keyword in node.keywords:
            value = keyword.value
            if keyword.arg in ("check_vma", "check_rep") and isinstance(value, ast.Constant):
                if value.value is False and value.end_col_offset is not None:
                    return value.lineno, value.col_offset, value.end_col_offset
    return None


_DIRECTIVE = re.compile(r"#\s*(noqa|type:|fmt:|pragma|pylint:|ruff:|pyright:|mypy:)")
_NAMES_THE_CHECK = re.compile(r"\b(check_vma|check_rep|vma|replicat\w+)\b", re.IGNORECASE)


def _drop_reasons(lines: list[str], number: int) -> None:
    """Drop the comments that said why the check is off on a line that switches it on now.

    Those are: behind the flag where the line holds nothing else, or where they name the check; and
    whole lines right above a line that holds nothing else, where they name it.
    """
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


def _place_to_install(
    script: str, sites: Sequence[Site]
) -> tuple[int | None, list[tuple[int, str]]]:
    """Return after how many lines the hooks are installed, and the calls with other arguments.

    The former is None if the script calls ``install()`` on every run.
    """
    tree = _tree(script)
    if tree is None:
        return None, []
    installs = _names_of_install(tree)
    calls = [
        (node.lineno, ast.unparse(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in installs
        if node.args or node.keywords
    ]
    if any(_always_installs(node, installs) for node in tree.body):
        return None, calls
    first = min((site.line for site in sites), default=None)
    place = 0
    for position, node in enumerate(tree.body):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if first is not None and node.lineno >= first:
            break
        imports = isinstance(node, (ast.Import, ast.ImportFrom))
        if imports or _sets_variables(node) or (text and position == 0):
            place = node.end_lineno or node.lineno
    return place, calls


def _always_installs(node: ast.stmt, installs: set[str]) -> bool:
    """Tell whether a statement of a script calls ``install()``, under no condition of the run's."""
    if isinstance(node, ast.If):
        as_script = ast.unparse(node.test) == "__name__ == '__main__'"
        return as_script and any(_always_installs(inner, installs) for inner in node.body)
    if isinstance(node, (ast.With, ast.FunctionDef)):  # a function that sets up is called
        items = node.items if isinstance(node, ast.With) else []
        return any(_installs(item.context_expr, installs) for item in items) or any(
            _always_installs(inner, installs) for inner in node.body
        )
    return isinstance(node, (ast.Expr, ast.Assign)) and _installs(node.value, installs)


def _installs(value: ast.expr, installs: set[str]) -> bool:
    if not isinstance(value, ast.Call) or ast.unparse(value.func) not in installs:
        return False
    return not value.args and not value.keywords


def _names_of_install(tree: ast.Module) -> set[str]:
    """List what a script calls ``shardrules.install``."""
    found = {"shardrules.install"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {f"{a.asname}.install" for a in node.names if a.name == "shardrules"}
        elif isinstance(node, ast.ImportFrom) and node.module == "shardrules":
            found |= {a.asname or a.name for a in node.names if a.name == "install"}
    return found


def _sets_variables(node: ast.stmt) -> bool:
    """Whether a statement sets variables of the environment: JAX reads some when it is imported."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return re.match(r"(os\.)?environ\.", ast.unparse(node.value.func)) is not None
    targets = node.targets if isinstance(node, ast.Assign) else ()
    return any(re.match(r"(os\.)?environ\[", ast.unparse(one)) for one in targets)
