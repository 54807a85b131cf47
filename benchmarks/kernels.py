"""Compile every Pallas op that ships with JAX, and print the all-reduce bytes it costs.

    python benchmarks/kernels.py [--only=flash*,mha] [--arms=unchecked,checked,tagged,rules]

Four arms with the same user code: `check_vma=False` and `check_vma=True` on plain JAX (unchecked,
checked), and both with shardrules installed, with a rule for the kernels that communicate (tagged,
rules). A cell gives bytes per device by mesh axes, and what the verifier says of them; or how
compiling fails. `!` marks a cell that is not as expected: for plain JAX, what was measured; tagged,
the same bytes with each collective redundant or overwide; rules, no more bytes than needed, and
each collective needed. Needs no accelerator: it compiles for absent ones.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fnmatch
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import time

from absl import app, flags

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from kernels import cases  # noqa: E402
from kernels.case import BOTH, REFUSED, SAME_FAILURE, Case, Fails  # noqa: E402

ARMS = ("unchecked", "checked", "tagged", "rules")
_UNCHECKED = ("unchecked", "tagged")
_INSTALLED = ("tagged", "rules")

_ONLY = flags.DEFINE_list("only", ["*"], "names or patterns of cases")
_ARMS = flags.DEFINE_list("arms", list(ARMS), "arms to compile")
_TARGET = flags.DEFINE_string("target", None, "compile for this target only, in this process")
_JSON = flags.DEFINE_bool("json", False, "print a line of JSON for each cell instead of a table")


@dataclasses.dataclass(frozen=True)
class Cell:
    """What came of compiling one case in one arm.

    Args:
      case: the case's name.
      arm: one of ARMS.
      axes_bytes: all-reduce bytes per device by comma-joined mesh axes, None where it failed.
      verdicts: how many collectives got each verdict.
      error: the exception's class name and message, "" where it compiled.
      compiling_seconds: processor time of tracing and compiling.
      judging_seconds: processor time of reading the program and judging its collectives.
    """

    case: str
    arm: str
    axes_bytes: dict[str, int] | None
    verdicts: dict[str, int]
    error: str
    compiling_seconds: float = 0.0
    judging_seconds: float = 0.0


def read(compiled, mesh) -> tuple[dict[str, int], dict[str, int]]:
    """Return a compiled program's all-reduce bytes by mesh axes, and its verdicts by name."""
    from shardrules import program

    axes_bytes, verdicts = collections.Counter(), collections.Counter()
    # The program, not its text: from JAX 0.12 on that lacks the parameters' shardings.
    for verdict in program.judge(compiled, mesh=dict(mesh.shape)).verdicts:
        verdicts[verdict.verdict] += 1
        if verdict.collective.kind == "all-reduce":
            axes = verdict.collective.axes
            axes_bytes["?" if axes is None else ",".join(axes)] += verdict.bytes
    return dict(axes_bytes), dict(verdicts)


@contextlib.contextmanager
def _rules(case: Case):
    """Install shardrules, with the one line that `case` needs, if any."""
    import shardrules

    with shardrules.install(), shardrules.rules(case.lines()):
        yield


@functools.cache
def _judge_once() -> None:
    """Import and do before anything is timed what the first verdict of a process does."""
    import jax

    from shardrules import program

    program.judge(jax.jit(lambda x: x + 1).lower(1.0).compile())


def measure(case: Case, arm: str, reader=read) -> Cell:
    """Compile `case` in `arm` and read the program; what either raises ends up in the cell."""
    from kernels import build

    _judge_once()
    worked = time.process_time()
    try:
        with _rules(case) if arm in _INSTALLED else contextlib.nullcontext():
            f, args = build.build(case, check_vma=arm not in _UNCHECKED)
            compiled = f.lower(*args).compile()
        built = time.process_time()
        axes_bytes, verdicts = reader(compiled, build.mesh_for(case))
        spent = built - worked, time.process_time() - built
    except Exception as e:  # any way of failing is a result
        return Cell(case.name, arm, None, {}, f"{type(e).__name__}: {e}")
    return Cell(case.name, arm, axes_bytes, verdicts, "", *spent)


def _by_axes(expected) -> dict[str, int]:
    return {",".join(axes): count for axes, count in expected.items()}


def _fails_as(expected: Fails, cell: Cell) -> bool:
    name, _, message = cell.error.partition(": ")
    return name == expected.error and re.search(expected.match, message) is not None


def as_expected(case: Case, cell: Cell) -> bool:
    """Tell whether `cell` is what the table of measurements says of `case`."""
    e = case.expected
    if cell.arm != "rules":
        want = e.unchecked if cell.arm in _UNCHECKED else e.checked
        if isinstance(want, Fails):
            return _fails_as(want, cell)
        judged = cell.arm != "tagged" or not set(cell.verdicts) - {"redundant", "overwide"}
        return cell.axes_bytes == _by_axes(want) and judged
    if e.needed == REFUSED:  # by JAX's own check of out_specs, now that the types are right
        return "out_specs which require replication which can't be statically" in cell.error
    if e.needed == SAME_FAILURE:
        return _fails_as(e.unchecked, cell)
    if cell.axes_bytes is None or set(cell.verdicts) - {"needed"}:
        return False
    allowed = _by_axes(e.needed if e.same_code is None else e.same_code)
    return all(count <= allowed.get(axes, 0) for axes, count in cell.axes_bytes.items())


def _show(case: Case, cell: Cell) -> str:
    if cell.axes_bytes is None:
        fails = (case.expected.unchecked, case.expected.checked)
        known = [f.what for f in fails if isinstance(f, Fails) and _fails_as(f, cell)]
        text = f"fails: {known[0]}" if known else " ".join(cell.error.split())[:90]
    else:
        name = {",".join(BOTH): "all"}
        text = " + ".join(f"{name.get(k, k)}={v}" for k, v in sorted(cell.axes_bytes.items()))
        counts = ", ".join(f"{n} {v}" for v, n in sorted(cell.verdicts.items()))
        text = f"{text or '0'} ({counts})" if counts else text or "0"
        if cell.arm == "checked" and case.expected.wrong:
            text += " **wrong**"
    return text.replace("|", "\\|") + ("" if as_expected(case, cell) else " !")


def _share(cells: list[Cell]) -> float:
    compiling = sum(c.compiling_seconds for c in cells)
    return sum(c.judging_seconds for c in cells) / compiling if compiling else 0.0


def _in_another_process(target: str) -> list[Cell]:
    # One process for each target: Mosaic GPU compiles for one architecture per process.
    command = [sys.executable, __file__, f"--target={target}", "--json"]
    command += [f"--only={','.join(_ONLY.value)}", f"--arms={','.join(_ARMS.value)}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"compiling for {target} ended with {done.returncode}")
    return [Cell(**json.loads(line)) for line in done.stdout.splitlines()]


def _main(argv) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    unknown = [arm for arm in _ARMS.value if arm not in ARMS]
    if unknown:
        raise app.UsageError(f"no arm is called {unknown[0]!r}; there are {', '.join(ARMS)}")
    chosen = [c for c in cases.ALL if any(fnmatch.fnmatch(c.name, p) for p in _ONLY.value)]
    if not chosen:
        raise app.UsageError(f"no case matches {','.join(_ONLY.value)!r}")
    if _TARGET.value is not None:
        chosen = [c for c in chosen if c.target == _TARGET.value]
        cells = (measure(case, arm) for case in chosen for arm in _ARMS.value)
    else:
        targets = dict.fromkeys(c.target for c in chosen)
        cells = (cell for target in targets for cell in _in_another_process(target))
    if _JSON.value:
        for cell in cells:
            print(json.dumps(dataclasses.asdict(cell)), flush=True)
        return
    found = {(cell.case, cell.arm): cell for cell in cells}
    import paired  # not of the tests, which load this module

    paired.print_stamp()
    print(f"\n| case | {' | '.join(_ARMS.value)} |")
    print("|---" * (1 + len(_ARMS.value)) + "|")
    for case in chosen:
        row = [_show(case, found[case.name, arm]) for arm in _ARMS.value]
        print(f"| {case.name} | {' | '.join(row)} |")
    for arm in _ARMS.value:
        mine = [(c, found[c.name, arm]) for c in chosen]
        compiled = [cell for _, cell in mine if cell.axes_bytes is not None]
        moved = sum(sum(cell.axes_bytes.values()) for cell in compiled)
        off = sum(not as_expected(case, cell) for case, cell in mine)
        print(
            f"\n{arm}: {len(compiled)} of {len(mine)} compile, {moved} bytes per device in "
            f"all-reduces, {off} not as expected, "
            f"verdicts in {_share(compiled):.2%} of the time of compiling"
        )


if __name__ == "__main__":
    app.run(_main)
