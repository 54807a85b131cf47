"""Read the HLO of a program given in any form, and judge its collectives."""

from __future__ import annotations

import contextlib
import inspect
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardrules import hlo
from shardrules.arguments import checked
from shardrules.door import compiled
from shardrules.door.places import leave_out_frames
from shardrules.errors import HloError, HloSyntaxError, NotInstalledError, ShardrulesError
from shardrules.hlo.reader import files, shardings
from shardrules.registry.table import Registry
from shardrules.units import counted

_STABLEHLO = re.compile(r"\s*(?:#\w+ = [^\n]*\n\s*)*module\b[^\n]*(?:@|attributes|\{)")


class Program(NamedTuple):
    """The compiled HLO of a program."""

    text: str
    name: str  # in messages
    compiled: Any = None  # the jax.stages.Compiled, if there is one
    is_compiled: bool = False  # whether the text comes from a compiled object; text doesn't show it
    # The file of its text before XLA's passes, in the same dump, if there is one.
    before: pathlib.Path | None = None

    def module(self) -> hlo.Module:
        return hlo.parse(self.text, name=self.name)

    def platform(self) -> str | None:
        """Return ``cpu``, ``tpu`` or ``gpu``; None for a program that is only text."""
        return None if self.compiled is None else compiled.placements(self.compiled).platform()


class Told(NamedTuple):
    """Facts that a program's text lacks, as the caller gives them."""

    outputs: Sequence[str] | None = None  # HLO shardings: one for all outputs, or one for each
    # Specs (P('data')) or HLO shardings: one for all parameters, or one for each.
    parameters: Sequence[str] | None = None
    other: Program | None = None  # another text of the program, with its parameters' shardings
    slices: int | None = None  # the number of TPU slices, if the mesh takes one after the other


@checked(own=("mesh",))
def judge(
    program: Any,
    *args: Any,
    registry: Registry | None = None,
    mesh: Mapping[str, int] | None = None,
    **kwargs: Any,
) -> hlo.Judgement:
    """Compile a program if need be, and judge each of its collectives.

    Args:
      program: a function (jitted or not) of ``*args, **kwargs``, a jax.stages.Lowered or
        Compiled (a deserialized one too), a jax.export.Exported with its arguments, HLO text, or
        the path of a file with HLO text.
      *args: the function's arguments: arrays, or ShapeDtypeStructs with shardings.
      **kwargs: its keyword arguments.
      registry: rules for custom calls that carry no tag; the default registry if None.
      mesh: axis names and sizes in the order of the devices; taken from the shardings if None.

    Returns:
      The verdicts.

    Raises:
      HloSyntaxError: if text is not HLO.
      HloError: if the mesh does not fit the program, or text is not partitioned yet.
      NotInstalledError: if the function needs the hooks and they are not installed.
      ShardrulesError: if ``program`` is none of the above, or holds no HLO.
    """
    return judged(read(program, args, kwargs), registry, mesh)


def judged(
    program: Program,
    registry: Registry | None = None,
    mesh: Mapping[str, int] | None = None,
    told: Told | None = None,
) -> hlo.Judgement:
    """Judge a program; ``told`` holds facts that its text lacks, if it has no Compiled."""
    told = told or Told()
    own_mesh = outputs = given = None
    slices: Any = told.slices
    module = program.module()
    shapes = output_shapes(module)
    if program.compiled is not None:
        placements = compiled.placements(program.compiled)
        own_mesh, slices = placements.mesh(), placements.slices()
        given = matching(module, placements.parameters())
        outputs = placements.results(compiled.output_paths(program.compiled), shapes)
    if told.outputs is not None:
        per_output = _for_each(told.outputs, shapes, module, "array", "returns")
        names = [f"[{n}]" for n in range(len(shapes))] if len(shapes) > 1 else [""]
        outputs = list(zip(names, per_output))
    return hlo.judge(
        module,
        registry=registry,
        mesh=mesh,
        parameter_shardings=given
        or _parameters(program, module, own_mesh if mesh is None else mesh, told),
        own_mesh=own_mesh,
        unpartitioned=program.is_compiled,
        output_shardings=outputs,
        slices=slices,
    )


def _for_each(
    given: Sequence[str], each: Sequence[Any], module: hlo.Module, what: str, does: str
) -> list[str]:
    """Return a sharding for each; raise HloError unless one for all, or one for each, is given."""
    per_one = [*given] * (len(each) if len(given) == 1 else 1)
    if len(per_one) != len(each):
        raise HloError(
            f"{len(per_one)} shardings were given for the {counted(len(each), what)} that module "
            f"{module.name!r} {does}; give one for each, or one for all",
            module=module.name,
        )
    return per_one


def _parameters(
    program: Program, module: hlo.Module, mesh: Mapping[str, int] | None, told: Told
) -> Sequence[str | None] | None:
    """Return the shardings of the entry's parameters, from the caller or from a dump."""
    if told.parameters is not None:
        parameters = module.entry.parameters
        specs = _for_each(told.parameters, parameters, module, "parameter", "takes")
        ranks = [len(parameter.shape.dimensions) for parameter in parameters]
        return [shardings.as_hlo(spec, mesh, rank) for spec, rank in zip(specs, ranks)]
    if told.other is not None:
        return shardings.of_other_text(module, told.other.module())
    if program.before is None or not shardings.lacking(module):
        return None
    with contextlib.suppress(ShardrulesError):  # the text may be another run's program
        return shardings.of_other_text(module, read_file(program.before).module())
    return None


def output_shapes(module: hlo.Module) -> list[str]:
    """List the shape on one device of each array that a module returns."""
    return [str(leaf) for leaf in module.entry.instructions[module.entry.root].shape.leaves()]


def judge_logical(
    program: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: Mapping[str, int] | None = None,
) -> hlo.Judgement:
    """Read a program before XLA's passes (from a function, a Lowered or text); ignore verdicts."""
    args, kwargs = called_with(program, args, kwargs)
    if isinstance(program, (str, os.PathLike)):
        return hlo.judge(read(program, args, kwargs).module(), mesh=mesh, unpartitioned=True)
    if hasattr(program, "as_text") and hasattr(program, "compile"):
        _refuse(program, args, kwargs)
        lowered = program
    elif _is_exported(program) or is_function(program):
        lowered = lower(program, args, kwargs)
    else:
        raise ShardrulesError(
            f"{type(program).__name__} does not hold the program before XLA's passes, which the "
            "logical account counts; pass the function with its arguments, or the "
            "jax.stages.Lowered",
            program=program,
        )
    text = compiled.unoptimized_text(lowered)
    own_mesh = _shardy_mesh(text) or compiled.mesh_shape((args, kwargs))
    if own_mesh is None:  # compile: no public attribute of a Lowered holds its arguments
        own_mesh = compiled.placements(lowered.compile()).mesh()
    module = hlo.parse(text, name="<lowered>")
    return hlo.judge(module, mesh=mesh, own_mesh=own_mesh, unpartitioned=True)


def _shardy_mesh(text: str) -> dict[str, int] | None:
    """Read the mesh in HLO's Shardy header; None unless there is only one, in row-major order."""
    header = text.split("\n", 1)[0]
    meshes = {m for m in re.findall(r"#sdy\.mesh<\[(.*?)\](.*?)>", header) if m[0]}
    if len(meshes) != 1:
        return None
    ((axes, rest),) = meshes
    return None if rest else {n: int(s) for n, s in re.findall(r'"([^"]+)"=(\d{1,9})', axes)}


def read_text(text: str, name: str) -> str:
    """Return HLO text unchanged; reject StableHLO with an error that says what to pass instead."""
    if _STABLEHLO.match(text[:4096]) and not text.lstrip().startswith("HloModule"):
        raise HloSyntaxError(
            f"{name} is StableHLO or another MLIR module, which no compiler has partitioned yet; "
            "pass f.lower(...).compile().as_text()",
            line=1,
            column=1,
            text_line=text.split("\n", 1)[0],
        )
    return text


def read_file(path: pathlib.Path) -> Program:
    """Read a file with HLO text, plain or compressed by gzip."""
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # a name with a NUL raises ValueError
        why = getattr(error, "strerror", None) or error
        raise ShardrulesError(f"can't read {path}: {why}", path=path) from error
    text = read_text(files.decode(data, str(path)), str(path))
    return Program(text, str(path), before=files.before_optimizations(path))


def _text(text: str) -> str:
    """Return HLO text; reject a single line that isn't HLO, which names a missing file."""
    if text.strip() and "\n" not in text and not text.startswith("HloModule"):
        try:
            hlo.parse(text)
        except HloSyntaxError:
            raise ShardrulesError(
                f"there is no file {text[:200]!r} here ({os.getcwd()}), and it is not HLO text "
                "either; pass the path of a file that is there, or what compiled.as_text() returns",
                program=text,
            ) from None
    return text


def read(
    program: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> Program:
    """Return a program's compiled HLO; errors say what to pass instead."""
    # Functions and exported programs are lowered and compiled. Of the others, JAX's stages have
    # ``as_text``, loaded executables have ``hlo_modules``, and jaxlib's own objects have one of the
    # last two. A string is HLO text if it has several lines or no file has this name.
    args, kwargs = called_with(program, args, kwargs)
    if isinstance(program, (bytes, bytearray, memoryview)):
        raise ShardrulesError(
            f"{type(program).__name__} holds a serialized program, not HLO text; pass "
            "jax.export.deserialize(data) with its arguments, or what deserialize_and_load of "
            "jax.experimental.serialize_executable returns",
            program=program,
        )
    if _is_exported(program) or (is_function(program) and not hasattr(program, "hlo_modules")):
        executable = lower(program, args, kwargs).compile()
        name = getattr(program, "__name__", "<function>")
        return Program(executable.as_text(), name, executable, True)
    forms = ("as_text", "hlo_modules", "as_hlo_text", "to_string")
    form = next((name for name in forms if hasattr(program, name)), None)
    if form is None and not isinstance(program, (str, os.PathLike)):
        raise ShardrulesError(
            f"{type(program).__name__} is not a program; pass a function with its arguments, a "
            "jax.stages.Lowered or Compiled, HLO text, or the path of a file with it",
            program=program,
        )
    _refuse(program, args, kwargs)
    if form is None:
        if isinstance(program, str) and ("\n" in program or not os.path.exists(program)):
            return Program(read_text(_text(program), "<text>"), "<text>")
        return read_file(pathlib.Path(program))
    if form == "as_text":
        executable = program.compile() if hasattr(program, "compile") else program
        return Program(_text_of(executable), "<compiled>", executable, True)
    if form == "hlo_modules":  # a loaded executable below JAX's stages
        modules = program.hlo_modules()
        if len(modules) != 1:
            raise ShardrulesError(
                f"this executable holds {len(modules)} HLO modules; pass the "
                "text of one, module.to_string()",
                program=program,
            )
        return Program(modules[0].to_string(), "<executable>", None, True)
    return Program(str(getattr(program, form)()), "<module>")  # an XlaComputation, an HloModule


def called_with(
    program: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a program's arguments; ``args=`` and ``kwargs=`` may hold some of them.

    An assertion has keywords of its own (``mesh=``). If the program has an argument of such a name,
    pass it in ``kwargs={"mesh": ...}``. If the program has a parameter named ``args`` or
    ``kwargs``, that keyword goes to the program.
    """
    rest = dict(kwargs or {})
    given = [name for name in ("args", "kwargs") if name in rest and not _takes(program, name)]
    if not given:
        return args, rest
    more = rest.pop("args", ()) if "args" in given else ()
    named = rest.pop("kwargs", {}) if "kwargs" in given else {}
    if not isinstance(more, (tuple, list)) or not isinstance(named, Mapping):
        raise ShardrulesError(
            f"args={type(more).__name__}, kwargs={type(named).__name__}: args= takes a tuple of "
            "positional arguments of the program, and kwargs= a dict of its keyword arguments"
        )
    if args and more:
        raise ShardrulesError("positional arguments were given twice, as such and as args=")
    if twice := sorted(rest.keys() & named.keys()):
        raise ShardrulesError(f"{', '.join(twice)} was given twice, as a keyword and in kwargs=")
    return args or tuple(more), {**rest, **named}


def _takes(program: Any, name: str) -> bool:
    """Return whether a function has a parameter of this name other than ``*`` and ``**``."""
    try:
        parameter = inspect.signature(program).parameters.get(name)
    except (TypeError, ValueError):  # it is not a function, or has no signature
        return False
    return parameter is not None and parameter.kind not in (
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    )


def _text_of(executable: Any) -> str:
    text, why = "", ""
    try:
        text = executable.as_text()
    except Exception as error:  # the backend's C API may raise anything  # noqa: BLE001
        why = f" ({str(error).splitlines()[0]})"
    if not text:
        raise ShardrulesError(
            f"this executable does not give its HLO{why}; pass the jax.stages.Compiled that "
            "f.lower(...).compile() returned, or its text",
            program=executable,
        )
    return text


def is_function(program: Any) -> bool:
    """Return whether a program must be traced with arguments; a Compiled can also be called."""
    return callable(program) and not hasattr(program, "as_text")


def _is_exported(program: Any) -> bool:
    return hasattr(program, "mlir_module_serialized") and hasattr(program, "call")


def _refuse(program: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if arguments were given for a program that is already lowered."""
    if args or kwargs:
        given = counted(count := len(args) + len(kwargs), "argument")
        raise ShardrulesError(
            f"{given} {'was' if count == 1 else 'were'} given with a program that is lowered "
            "already; pass arguments with a function only",
            program=program,
        )


def lower(program: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lower a function or an exported program with its arguments."""
    import jax

    if _is_exported(program):
        if not args and not kwargs and program.in_avals:
            count = len(program.in_avals)
            raise ShardrulesError(
                f"the exported program {program.fun_name!r} holds StableHLO for "
                f"{program.nr_devices} devices, which is not compiled yet; pass its "
                f"{count} argument{'s' if count > 1 else ''} too, as arrays or ShapeDtypeStructs "
                "with shardings, and it is compiled for their devices",
                program=program,
            )
        return jax.jit(program.call).lower(*args, **kwargs)
    from shardrules import hooks

    leave_out_frames()
    jitted = program if hasattr(program, "lower") else jax.jit(program)
    try:
        return jitted.lower(*args, **kwargs)
    except (ValueError, TypeError, NotImplementedError) as error:
        says, first = str(error), str(error).splitlines()[0]
        if hooks.installed():
            raise
        # JAX's errors for a kernel without an output type: since 0.10, since 0.6.1, and before.
        if re.search(
            r"(?s)manual_axis_type.*must not be|`vma` on .*must not be|No replication rule for",
            says,
        ):
            raise NotInstalledError(
                "the program runs a kernel inside shard_map with the check on, but the hooks "
                "of shardrules are not installed; call shardrules.install() before tracing "
                "it.\n"
                f"JAX says: {first}"
            ) from error
        if re.search(r"check_(?:vma|rep)=False", says):
            raise NotInstalledError(
                "shard_map's check refuses the program, but the hooks of shardrules are not "
                "installed; before you switch the check off, as JAX's text says, call "
                "shardrules.install() and trace it again.\n"
                f"JAX says: {says}"
            ) from error
        raise


def matching(module: hlo.Module, shardings: Any) -> list[str] | None:
    """Return the shardings of the entry's parameters; None if the shapes differ."""
    shapes = [tuple(parameter.shape.dimensions) for parameter in module.entry.parameters]
    if shardings is None or [tuple(shape) for shape, _ in shardings] != shapes:
        return None
    return [sharding for _, sharding in shardings]
