"""Which shard_maps can have their check switched on, what that saves, and the patch."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import io
import os
import re
import tokenize
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardrules.hooks.retrace import sent_bytes
from shardrules.hooks.unchecked import Call, Site, UncheckedSite, costliest
from shardrules.report.blocks import table
from shardrules.report.grouping import size

__all__ = ["Row", "decided", "patch", "rows", "written"]

SWITCH, MORE, GRADIENTS, RULE, OUTPUTS, LIMIT = _ORDER = (
    "switch it now",
    "can be switched, and would send more",
    "takes gradients in its body, which would change",
    "needs this rule",
    "out_specs say replicated and the value varies",
    "refused with the check on",
)
_GRADIENTS_CHANGE = (
    "  with the check on, the gradient of a replicated value is summed over the mesh axes already:",
    "    leave out the psum or pmean that follows (of a loss that is a pmean it is the mean), or",
    "    differentiate by shardrules.vary(w, axes), which keeps each device's own;",
    "  and a psum in what is differentiated passes its cotangent on once, and not once for each",
    "    device: compare the values of a step before and after",
)
_INSTALL = "import shardrules\n\nshardrules.install()\n"


class Row(NamedTuple):
    """A call site with all that was seen of it.

    Attributes:
      site: where the shard_map is asked for.
      calls: one for each kind of arguments.
      verdict: SWITCH, or what stands in the way of one of its calls: MORE, GRADIENTS, RULE,
        OUTPUTS, LIMIT.
    """

    site: Site
    calls: tuple[Call, ...]
    verdict: str

    def shown(self, after: bool) -> str:
        """Write the wire bytes of the all-reduces, over all kinds of arguments."""
        # A function that is traced again, for jit say, moves nothing more.
        own = list(
            {(c.kind, c.before, c.after): c for c in self.calls if c.inside is None}.values()
        )
        if not own and self.calls[0].inside is not None:
            return f"with line {self.calls[0].inside.line}"
        sums = [call.after if after else call.before for call in own]
        known = [one for some in sums if some is not None for one in some]
        open_ended = sum(one.runs is None for one in known)
        if any(some is None for some in sums):
            return "?"
        return size(sent_bytes(known)) + (f" and {open_ended} in while loops" if open_ended else "")


def rows(calls: Sequence[Call]) -> list[Row]:
    """Gather calls by site, in the order in which the sites were met first."""
    found: dict[Site, list[Call]] = {}
    for call in calls:
        found.setdefault(call.site, []).append(call)
    return [Row(site, tuple(some), _verdict(some)) for site, some in found.items()]


def _verdict(calls: Sequence[Call]) -> str:
    if any(call.missing for call in calls):
        return RULE
    if any(call.outputs for call in calls):
        return OUTPUTS
    if any(call.error for call in calls):
        return LIMIT
    if any(call.takes_gradients for call in calls):
        return GRADIENTS
    before, after = (
        sum(sent_bytes(some or ()) for some in sums)
        for sums in ([call.before for call in calls], [call.after for call in calls])
    )
    known = all(call.before is not None for call in calls if call.inside is None)
    return MORE if known and after > before else SWITCH


def place(site: Site) -> str:
    """Write a site as ``file:line (function)``, below the current folder without that."""
    return f"{_short(site.file)}:{site.line} ({site.function})"


def written(found: Sequence[Row]) -> str:
    """Return the table, and what is to be done at each site."""
    if not found:
        return "no shard_map with its check off was called\n"
    counts = {verdict: sum(row.verdict == verdict for row in found) for verdict in _ORDER}
    lines = [
        f"{len(found)} shard_map{'s' if len(found) > 1 else ''} with the check off: "
        + ", ".join(f"{verdict} ({n})" for verdict, n in counts.items() if n),
        "",
        table(
            [("shard_map", "calls", "bytes now", "bytes then", "verdict")]
            + [
                (place(r.site), len(r.calls), r.shown(False), r.shown(True), r.verdict)
                for r in found
            ]
        ),
        "",
        "(bytes: what one device sends for the all-reduces of a call and of its derivative by\n"
        "every argument of a float type, once for each kind of arguments; as traced, before XLA;\n"
        "then with shardrules.install())",
    ]
    for row in found:
        lines += _told(row)
    return "\n".join(lines).rstrip() + "\n"


def _told(row: Row) -> list[str]:
    lines: list[str] = []
    for missing in dict.fromkeys(m for call in row.calls for m in call.missing):
        lines.append(f"  {missing.kernel} has no rule; write one of")
        lines += [f"    {line}" for line in missing.lines]
    for output in dict.fromkeys(o for call in row.calls for o in call.outputs):
        lines.append(
            f"  out_specs{output.path} is {output.spec}, and it varies over {output.axes}:\n"
            "    name the axes in its spec, or reduce it over them (jax.lax.psum, pmean)"
        )
    for error in dict.fromkeys(c.error for c in row.calls if c.error and not c.outputs):
        lines += [f"  {line}" for line in error.splitlines()]
    lines += [
        f"  {text}" for text in dict.fromkeys(one for c in row.calls for one in c.annotations)
    ]
    if any(call.takes_gradients for call in row.calls):
        lines += _GRADIENTS_CHANGE
    for why in dict.fromkeys(c.undifferentiated for c in row.calls if c.undifferentiated):
        lines.append(f"  its derivative was not traced ({why})")
    return ["", f"{place(row.site)}: {row.verdict}", *lines] if lines else []


def decided(sites: Iterable[UncheckedSite]) -> str:
    """Return the table of what ``install(unchecked="check")`` made of each site."""
    groups: dict[UncheckedSite, list[UncheckedSite]] = {}
    for one in costliest(sites):
        place = dataclasses.replace(one, before_bytes=None, after_bytes=None, arguments="")
        groups.setdefault(place, []).append(one)
    if not groups:
        return "no shard_map with its check off was called"

    def moved(some: list[int | None]) -> str:
        known = [one for one in some if one is not None]
        return size(sum(known)) if known else "?"

    on_count = sum(one.switched for one in groups)
    rows = [
        (
            f"{_short(one.file)}:{one.line} ({one.function})",
            moved([each.before_bytes for each in some]),
            moved([each.after_bytes for each in some]),
            "runs with its check on" if one.switched else f"as written: {one.reason}",
        )
        for one, some in groups.items()
    ]
    return (
        f"{len(groups)} shard_map{'s' if len(groups) > 1 else ''} with the check off: {on_count} "
        f"switched on, {len(groups) - on_count} left\n"
        + table([("shard_map", "bytes off", "bytes on", "outcome"), *rows])
    )


# -- the patch -------------------------------------------------------------------------------------


def _short(file: str) -> str:
    return os.path.relpath(file) if _is_here(file) else file


def _is_here(file: str) -> bool:
    inside = os.path.relpath(file)
    return not inside.startswith(os.pardir) and not os.path.isabs(inside) and os.path.isfile(file)


def patch(found: Sequence[Row], script: str, rules: Sequence[str] = ()) -> tuple[str, list[str]]:
    """Make the patch that switches on what can be switched now, for ``patch -p1`` in this folder.

    Args:
      found: the sites.
      script: the path of the script, which is to install the hooks.
      rules: lines that give the rules which the sites were looked at with, for the script.

    Returns:
      The patch as a unified diff, empty if there is nothing to switch; and the sites that are to be
      edited by hand, with the reason.
    """
    why = {row.site: _by_hand(row.site) if row.verdict == SWITCH else row.verdict for row in found}
    pairs = [(c.site, c.inside) for row in found for c in row.calls if c.inside is not None]
    # One line may ask for several; and one inside another was looked at with both switched on.
    pairs += [(a, b) for a in why for b in why if _spot(a) == _spot(b)]
    while True:
        waiting = [
            (one, other)
            for pair in pairs
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
    left = [
        f"{place(row.site)}: {why[row.site]}"
        for row in found
        if row.verdict == SWITCH and why[row.site]
    ]
    if not edits:
        return "", left
    texts = {file: _lines(file) for file in edits}
    after = {file: list(lines) for file, lines in texts.items()}
    for file, sites in edits.items():
        flags = {flag for flag in map(_flag, sites) if flag is not None}
        for line, start, end in sorted(flags, reverse=True):  # from below: lines go
            raw = after[file][line - 1].encode()
            after[file][line - 1] = (raw[:start] + b"True" + raw[end:]).decode()
            _drop_reasons(after[file], line)
    if _is_here(script):
        texts.setdefault(script, _lines(script))
        lines = after.setdefault(script, list(texts[script]))
        where = _place_to_install(script, edits.get(script, []))
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
    diff: list[str] = []
    for file in texts:
        name = os.path.relpath(file).replace(os.sep, "/")
        for changed in difflib.unified_diff(texts[file], after[file], f"a/{name}", f"b/{name}"):
            tail = "" if changed.endswith("\n") else "\n\\ No newline at end of file\n"
            diff.append(changed + tail)
    return "".join(diff), left


def _spot(site: Site) -> tuple[str, int, int]:
    return site.file, site.line, site.column


def _by_hand(site: Site) -> str:
    """Say why a site can't be in the patch, empty if it can."""
    if not _is_here(site.file):
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


def _place_to_install(script: str, sites: Sequence[Site]) -> int | None:
    """Return after how many lines the hooks are installed; None if the script does it already."""
    tree = _tree(script)
    if tree is None:
        return None
    installs = _names_of_install(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in installs:
            return None
    first = min((site.line for site in sites), default=None)
    place = 0
    for position, node in enumerate(tree.body):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if first is not None and node.lineno >= first:
            break
        imports = isinstance(node, (ast.Import, ast.ImportFrom))
        if imports or _sets_variables(node) or (text and position == 0):
            place = node.end_lineno or node.lineno
    return place


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
