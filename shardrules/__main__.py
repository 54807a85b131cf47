"""The command line; runs where no JAX is installed.

    python -m shardrules verify FILE|-    exit 0: every collective is needed, 1: findings
    python -m shardrules report FILE|-    the same as a report, exit 0
    python -m shardrules diff A B         which collectives came, went or grew, exit 1 if any

FILE holds compiled HLO text (compiled.as_text(), or a file of --xla_dump_to), - is stdin.
Exit 2: it can't be read, or the command can't.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import sys
from collections.abc import Sequence

from absl import flags

from shardrules import hlo, program, report
from shardrules.costs import accounts, findings
from shardrules.errors import ShardrulesError

CLEAN, FOUND, UNREADABLE = 0, 1, 2
_FORMATS = {
    "text": report.plain,
    "markdown": report.markdown,
    "json": report.as_json,
    "html": report.page,
}


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    values.set_gnu_getopt(True)  # flags may follow the file
    flags.DEFINE_string(
        "mesh",
        None,
        "Axis names and sizes in the order of the devices: "
        "data=4,model=2. Taken from the text's tags or mesh notation if it has "
        "any.",
        flag_values=values,
    )
    flags.DEFINE_multi_string(
        "rules", [], "A module to import that registers rules for kernels.", flag_values=values
    )
    flags.DEFINE_bool(
        "strict",
        False,
        "Accept proofs alone: verdicts that rest on declared rules are findings.",
        flag_values=values,
    )
    flags.DEFINE_multi_string(
        "allow",
        [],
        "A known finding and why it stays: 'redundant all-reduce(model) at model.py: issue 12'.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "format", "text", list(_FORMATS), "How a report is written.", flag_values=values
    )
    flags.DEFINE_string("output", None, "A file to write to instead of stdout.", flag_values=values)
    flags.DEFINE_bool("help", False, "Show this.", flag_values=values)
    return values


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
      argv: arguments without the program's name; those of the process if None.
    """
    values = _flags()
    try:
        rest = values(["shardrules", *(sys.argv[1:] if argv is None else argv)])[1:]
        if values.help:
            print(__doc__ + "\n" + values.get_help())
            return CLEAN
        wanted = {"verify": 1, "report": 1, "diff": 2}
        if not rest or rest[0] not in wanted:
            raise ShardrulesError("expected a command: verify, report or diff (--help says more)")
        command, *files = rest
        if len(files) != wanted[command]:
            raise ShardrulesError(f"{command} takes {wanted[command]} file(s), got {len(files)}")
        if files.count("-") > 1:
            raise ShardrulesError("only one of the two programs can be read from stdin")
        for name in values.rules:
            _import(name)
        mesh = _mesh(values.mesh)
        allow = findings.Allowances(dict(_allowance(a) for a in values.allow))
        judged = [_judge(file, mesh) for file in files]
        if command == "diff":
            text, code = _diff(files, judged)
        else:
            content = report.content(
                judged[0], title=_title(files[0]), strict=values.strict, allow=allow
            )
            text = _FORMATS[values.format](content)
            code = CLEAN if command == "report" or content.clean else FOUND
        if values.output is None:
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            pathlib.Path(values.output).write_text(text, encoding="utf-8")
        return code
    except BrokenPipeError:  # the reader of stdout has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREADABLE
    except (ShardrulesError, flags.Error, OSError) as error:
        print(f"shardrules: {error}", file=sys.stderr)
        return UNREADABLE


def _title(file: str) -> str:
    return "stdin" if file == "-" else os.path.basename(file)


def _judge(file: str, mesh: dict[str, int] | None) -> hlo.Judgement:
    if file == "-":
        try:
            text = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError as error:
            raise ShardrulesError(f"stdin is not text (byte {error.start})") from error
        found = program.Program(program.read_text(text, "stdin"), "stdin", None)
    else:
        found = program.read(pathlib.Path(file))
    return program.judged(found, mesh=mesh)


def _import(name: str) -> None:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        importlib.import_module(name)
    except ShardrulesError:
        raise
    except Exception as error:  # the module is the user's, and raises what it likes
        raise ShardrulesError(
            f"--rules={name} can't be imported: {type(error).__name__}: {error}"
        ) from error


def _mesh(text: str | None) -> dict[str, int] | None:
    if text is None:
        return None
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (p.strip() for p in part.partition("="))
        if not equals or not name or name in mesh or not size.isdigit() or not int(size):
            raise ShardrulesError(f"--mesh={text} is no mesh; write --mesh=data=4,model=2")
        mesh[name] = int(size)
    return mesh


def _allowance(text: str) -> tuple[str, str]:
    what, colon, reason = text.partition(": ")
    if not colon:
        raise ShardrulesError(
            f"--allow={text!r} gives no reason; write --allow='redundant "
            "all-reduce(model): issue 12'"
        )
    return what.strip(), reason.strip()


def _diff(files: Sequence[str], judged: Sequence[hlo.Judgement]) -> tuple[str, int]:
    before, after = map(accounts.of, judged)
    changes = accounts.compare(accounts.grouped(before), accounts.grouped(after))
    if not changes:
        return f"the same collectives: {before.total}\n", CLEAN
    lines = [
        f"- {files[0]}: {before.total}, {before.total.wire_bytes} wire bytes",
        f"+ {files[1]}: {after.total}, {after.total.wire_bytes} wire bytes",
        "",
    ]
    return "\n".join(lines + [str(c) for c in changes]) + "\n", FOUND


if __name__ == "__main__":
    sys.exit(main())
