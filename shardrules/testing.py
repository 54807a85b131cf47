"""Assertions about compiled programs, for users' test suites.

Each takes what there is: a jitted function with arguments (arrays, or ``jax.ShapeDtypeStruct``
with shardings, also of accelerators that are not here), a ``Lowered``, a ``Compiled``, or text.
"""

from __future__ import annotations

import collections
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from shardrules import hlo, report
from shardrules.errors import CollectiveAssertionError, HloError, NotInstalledError, ShardrulesError
from shardrules.registry import Registry

__all__ = ["assert_collectives", "assert_no_defensive_psum", "judge"]

_PHASES = ("forward", "backward", "recompute", "mixed", "unknown")


def judge(program: Any, *args, registry: Registry | None = None,
          mesh: Mapping[str, int] | None = None, **kwargs) -> hlo.Judgement:
    """Compile a program if need be, and judge each of its collectives.

    Args:
      program: a function (jitted or not) of ``*args, **kwargs``, a jax.stages.Lowered or
        Compiled, HLO text, or the path of a file with HLO text.
      *args: what the function is called with; arrays or ShapeDtypeStructs with shardings.
      registry: rules for custom calls that carry no tag; the default registry if None.
      mesh: axis names and sizes in the order of the devices; taken from the shardings if None.

    Returns:
      The verdicts.

    Raises:
      HloSyntaxError: if text is not HLO.
      HloError: if the mesh does not fit the program.
      NotInstalledError: if the function needs the hooks and they are not installed.
      ShardrulesError: if ``program`` is none of the above.
    """
    text, name, compiled = _program(program, args, kwargs)
    shardings = None
    if compiled is not None:
        from shardrules.hooks import compiled as known
        if mesh is None:
            try:
                mesh = known.mesh_shape((compiled.input_shardings, compiled.output_shardings))
            except (AttributeError, NotImplementedError):
                mesh = None
        shardings = known.parameter_shardings(compiled)
    module = hlo.parse(text, name=name)
    return hlo.judge(module, registry=registry, mesh=mesh,
                     parameter_shardings=_matching(module, shardings))


def _program(program: Any, args: tuple, kwargs: dict) -> tuple[str, str, Any]:
    """Return a program's text, its name for messages, and the Compiled if there is one."""
    if isinstance(program, str) and ("\n" in program or not os.path.exists(program)):
        return _alone(program, args, kwargs), "<text>", None
    if isinstance(program, (str, pathlib.Path)):
        path = _alone(pathlib.Path(program), args, kwargs)
        try:
            return path.read_text(), str(path), None
        except OSError as error:
            raise ShardrulesError(f"can't read {path}: {error.strerror}", path=path) from error
    if hasattr(program, "as_text") and hasattr(program, "compile"):
        program = _alone(program, args, kwargs).compile()
    if hasattr(program, "as_text"):
        compiled = _alone(program, args, kwargs)
        text = compiled.as_text()
        if not text:
            raise ShardrulesError("this executable holds no HLO text; pass the jax.stages.Compiled "
                                  "that f.lower(...).compile() returned", program=program)
        return text, "<compiled>", compiled
    if callable(program):
        import jax
        jitted = program if hasattr(program, "lower") else jax.jit(program)
        compiled = _lower(jitted, args, kwargs).compile()
        return compiled.as_text(), getattr(program, "__name__", "<function>"), compiled
    raise ShardrulesError(
        f"{type(program).__name__} is no program; pass a function with its arguments, a "
        "jax.stages.Lowered or Compiled, HLO text, or the path of a file with it",
        program=program)


def _alone(program: Any, args: tuple, kwargs: dict) -> Any:
    if args or kwargs:
        raise ShardrulesError(
            f"{len(args) + len(kwargs)} arguments were given with a program that is lowered "
            "already; pass them with a function only", program=program)
    return program


def _lower(jitted: Any, args: tuple, kwargs: dict) -> Any:
    from shardrules import hooks
    try:
        return jitted.lower(*args, **kwargs)
    except (ValueError, NotImplementedError) as error:
        # JAX's words for a kernel whose output type nobody gave: from 0.10, 0.6.1 on, and before.
        if not hooks.installed() and re.search(
                r"manual_axis_type.*must not be|`vma` on .*must not be|No replication rule for",
                str(error), re.DOTALL):
            raise NotInstalledError(
                "the program runs a kernel inside shard_map with the check on, and the hooks of "
                "shardrules are not installed; call shardrules.install() before tracing it.\n"
                f"JAX says: {str(error).splitlines()[0]}") from error
        raise


def _matching(module: hlo.Module, shardings: Any) -> list[str] | None:
    """Return shardings for the entry's parameters, if they are those of this module."""
    if shardings is None:
        return None
    shapes = [tuple(parameter.shape.dimensions) for parameter in module.entry.parameters]
    if [tuple(shape) for shape, _ in shardings] != shapes:
        return None
    return [sharding for _, sharding in shardings]


def assert_no_defensive_psum(program: Any, *args, registry: Registry | None = None,
                             mesh: Mapping[str, int] | None = None, **kwargs) -> hlo.Judgement:
    """Assert that every collective of a program is needed, as far as it can be proven.

    Fails on each collective that is *redundant*, *overwide* or *unproven*.

    Args:
      program: a function of ``*args, **kwargs``, a Lowered, a Compiled, HLO text or a path.
      *args: what the function is called with.
      registry: rules for custom calls that carry no tag; the default registry if None.
      mesh: axis names and sizes in the order of the devices; taken from the shardings if None.

    Returns:
      The verdicts, for further checks.

    Raises:
      CollectiveAssertionError: listing each offending collective, with axes, bytes, source line
        and what to do.
      ShardrulesError: as ``judge``.
    """
    judgement = judge(program, *args, registry=registry, mesh=mesh, **kwargs)
    bad = [v for v in judgement.verdicts if v.verdict != "needed"]
    if bad:
        counts = collections.Counter(v.verdict for v in bad)
        kinds = ", ".join(f"{counts[k]} {k}" for k in ("redundant", "overwide", "unproven")
                          if counts[k])
        raise CollectiveAssertionError(
            f"{len(bad)} of {len(judgement.verdicts)} collectives are not shown to be needed "
            f"({kinds}):\n" + "\n".join(map(report.describe, bad)),
            verdicts=tuple(bad), judgement=judgement)
    return judgement


def assert_collectives(program: Any, *args, expect: Mapping[str, Any],
                       registry: Registry | None = None,
                       mesh: Mapping[str, int] | None = None, **kwargs) -> hlo.Judgement:
    """Assert that a program holds exactly the expected collectives.

    Args:
      program: a function of ``*args, **kwargs``, a Lowered, a Compiled, HLO text or a path.
      *args: what the function is called with.
      expect: from ``"all-reduce(data)"`` (axes in any order; ``"backward all-reduce(data)"`` for
        one phase) to a count, or to ``{"count": 1, "bytes": 512}``. Combined all-reduces count
        range by range. ``{}`` stands for none.
      registry: rules for custom calls that carry no tag; the default registry if None.
      mesh: axis names and sizes in the order of the devices; taken from the shardings if None.

    Returns:
      The verdicts, for further checks.

    Raises:
      CollectiveAssertionError: showing what was expected, what there is, and each difference.
      ShardrulesError: if an expectation can't be read, or as ``judge``.
    """
    wanted = {key: _expectation(key, value) for key, value in expect.items()}
    judgement = judge(program, *args, registry=registry, mesh=mesh, **kwargs)
    phases = {phase for phase, _, _ in (want[0] for want in wanted.values()) if phase}
    found: dict[tuple, list[hlo.Verdict]] = {}
    for verdict in judgement.verdicts:
        collective = verdict.collective
        phase = collective.phase if collective.phase in phases else ""
        axes = None if collective.axes is None else frozenset(collective.axes)
        found.setdefault((phase, collective.kind, axes), []).append(verdict)
    wrong = []
    for text, (key, count, bytes_) in wanted.items():
        have = found.pop(key, [])
        total = sum(v.bytes for v in have)
        if len(have) != count or (bytes_ is not None and total != bytes_):
            size = "" if bytes_ is None else f", {bytes_} B"
            wrong.append(f"  {text}: expected {count}{size}, found {len(have)}, {total} B")
            wrong += [report.describe(v) for v in have]
    for unexpected in found.values():
        wrong += ["  not expected:"] + [report.describe(v) for v in unexpected]
    if wrong:
        raise CollectiveAssertionError(
            "the collectives are not the expected ones:\n" + "\n".join(wrong)
            + "\nthe program holds:\n  "
            + report.summary(judgement).replace("\n", "\n  "),
            expect=dict(expect), judgement=judgement)
    return judgement


def _expectation(key: str, value: Any) -> tuple[tuple, int, int | None]:
    """Read one expectation: ((phase, kind, axes), count, bytes)."""
    match = re.fullmatch(r"(?:(\w+) )?([a-z-]+)\(([^()]*)\)", key) if isinstance(key, str) else None
    if match is None or (match[1] and match[1] not in _PHASES):
        raise ShardrulesError(
            f"{key!r} names no collectives; write the kind and its mesh axes, such as "
            f"'all-reduce(data)' or 'backward all-gather(data, model)'; phases are "
            f"{', '.join(_PHASES)}", key=key)
    count, bytes_ = value, None
    if isinstance(value, Mapping) and set(value) <= {"count", "bytes"} and "count" in value:
        count, bytes_ = value["count"], value.get("bytes")
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ShardrulesError(f"{value!r} for {key!r} is no expectation; give a count, or "
                              "{'count': 1, 'bytes': 512}", key=key, value=value)
    axes = frozenset(axis.strip() for axis in match[3].split(",") if axis.strip())
    return (match[1] or "", match[2], axes), count, bytes_
