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
      left: the edits left to do by hand, each with its reason.
    """

    before: dict[str, list[str]]
    after: dict[str, list[str]]
    sites: tuple[Site, ...]
    left: list[str]


def patch(rows: Sequence[Row], script: str, rules: Sequence[str] = ()) -> tuple[str, list[str]]:
    """Make the patch for ``patch -p1`` in this folder, and list what is left to edit by hand."""
    edits = edited(rows, script, rules)
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


def pairs(rows: Sequence[Row]) -> list[tuple[Site, Site]]:
    """List the sites that are switched together or not at all."""
    pairs = [(c.site, c.inside) for row in rows for c in row.calls if c.inside is not None]
    # Sites at the same position share a flag; a nested one was retraced with both switched on.
    sites = [row.site for row in rows]
    return pairs + [(a, b) for a in sites for b in sites if a != b and _spot(a) == _spot(b)]


def edited(rows: Sequence[Row], script: str, rules: Sequence[str] = ()) -> Edits:
    """Switch checks on where possible; the script installs the hooks and adds ``rules``."""
    candidates = {row.site for row in rows if row.verdict in (SWITCH, UNTRIED, BY_HAND)}
    reasons = {
        row.site: _by_hand(row.site) if row.site in candidates else row.verdict for row in rows
    }
    joined = pairs(rows)
    while True:
        waiting = [
            (site, partner)
            for pair in joined
            for site, partner in (pair, pair[::-1])
            if reasons.get(site) == "" and reasons.get(partner)
        ]
        if not waiting:
            break
        for site, partner in waiting:
            reasons[site] = f"together with {place(partner)}, which can't be switched here"
    edits: dict[str, list[Site]] = {}
    for site in (site for site, reason in reasons.items() if not reason):
        edits.setdefault(site.file, []).append(site)
    left = [
        f"{place(site)}: {reasons[site]}"
        for site in reasons
        if site in candidates and reasons[site]
    ]
    if not edits:
        return Edits({}, {}, (), left)
    texts = {file: _lines(file) for file in edits}
    after = {file: list(lines) for file, lines in texts.items()}
    for file, sites in edits.items():
        flags = {flag for flag in map(_flag, sites) if flag is not None}
        for line, start, end in sorted(flags, reverse=True):  # bottom up: lines are deleted
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
    return Edits(texts, after, tuple(site for site, reason in reasons.items() if not reason), left)


def _spot(site: Site) -> tuple[str, int, int]:
    return site.file, site.line, site.column


def _by_hand(site: Site) -> str:
    """Return why the patch can't switch a site, empty if it can."""
    if not is_here(site.file):
        return "not below this folder"
    if _flag(site) is None:
        return "no check_vma=False or check_rep=False in this call"
    return ""


def _lines(file: str) -> list[str]:
    with open(file, "rb") as raw:
        data = raw.read()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    # StringIO splits lines only where Python does; decoding as utf-8 keeps a byte order mark.
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
    """Drop the comments that explain why the check was off."""
    # These are a comment behind the flag if the line holds nothing else or the comment names the
    # check; and comment lines right above a line that holds only the flag, if they name the check.
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
    """Return the line to install after, None if the script installs, and calls with arguments."""
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
    first_site = min((site.line for site in sites), default=None)
    place = 0
    for position, node in enumerate(tree.body):
        is_string = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if first_site is not None and node.lineno >= first_site:
            break
        imports = isinstance(node, (ast.Import, ast.ImportFrom))
        if imports or _sets_variables(node) or (is_string and position == 0):
            place = node.end_lineno or node.lineno
    return place, calls


def _always_installs(node: ast.stmt, installs: set[str]) -> bool:
    """Return whether a statement of a script calls ``install()`` unconditionally."""
    if isinstance(node, ast.If):
        as_script = ast.unparse(node.test) == "__name__ == '__main__'"
        return as_script and any(_always_installs(inner, installs) for inner in node.body)
    if isinstance(node, (ast.With, ast.FunctionDef)):  # assume the function is called
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
    """List a script's names for ``shardrules.install``."""
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
        return re.match(r"(os\.)?environ\.", ast.unparse(node.value.func)) is not None
    targets = node.targets if isinstance(node, ast.Assign) else ()
    return any(re.match(r"(os\.)?environ\[", ast.unparse(target)) for target in targets)
