"""Record and judge every program that a process compiles: ``with shardrules.watch() as seen:``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import math
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shardrules import fitting
from shardrules.arguments import checked
from shardrules.door import compiled
from shardrules.door.jaxprs import kernel_name
from shardrules.door.watching import cast_listeners
from shardrules.errors import ShardrulesError, first_line
from shardrules.unchecked import check_off
from shardrules.watching import compiling, made_again

if TYPE_CHECKING:  # they import NumPy, which reads variables that a script may set first
    from shardrules import hlo, report
    from shardrules.costs.timings import Timings
    from shardrules.costs.worth import Switched
    from shardrules.report import several
    from shardrules.watching.profiles.shown import Profile
    from shardrules.watching.runs import RunRecord, Runs

_UNCOMMITTED = "uncommitted (jax.device_put has not placed it)"
_DID_NOT_RUN = "it did not run while the steps were recorded"
_UNTIMED = (
    "ran in the recorded steps, but the report has no times of it: it was compiled before the "
    "watch began, or its HLO there is another one"
)


class WatchedProgram:
    """One program that was compiled, or taken from a cache, while ``watch`` was on."""

    def __init__(self, executable: Any, traced: compiling.Traced, owner: Watched, where: str):
        self.name = "a program"  # the module's name, such as ``jit_step``
        self.where = where  # the test that was running, under ``pytest --shardrules``
        self.count = 1  # the number of programs with this text (from several jits, for example)
        self.same_text: list[WatchedProgram] = []  # the other programs with this text
        self._traced, self._owner = traced, owner
        self._record: RunRecord | None = None
        self._executables: list[weakref.ref[Any]] = []  # JAX's executables that run it
        self.runs_as(executable)
        self._placements = compiled.Placements(executable)
        self._module, self._failure = None, ""
        try:
            (self._module,) = executable.xla_executable.hlo_modules()
            self.name = str(self._module.name)
        except Exception as error:  # the backend's C API may raise anything; or there are several  # noqa: BLE001
            self._failure = first_line(error)

    def runs_as(self, executable: Any) -> None:
        """Follow an executable of JAX that runs this program."""
        self._executables.append(weakref.ref(executable))
        if runs := self._owner.runs:
            self._record = runs.follow(executable, self._traced.definition, self._record)

    def is_loaded(self, loaded: Any) -> bool:
        """Return whether this program runs ``loaded``, as ``compiled.loaded`` returns it."""
        return any(compiled.loaded(executable()) is loaded for executable in self._executables)

    @property
    def text(self) -> str:
        """Return its compiled HLO; raise a ShardrulesError if its backend doesn't return it."""
        if self._module is None:
            raise ShardrulesError(f"{self.name} does not give its HLO ({self._failure})")
        return str(self._module.to_string())

    def _parsed(self) -> tuple[hlo.Module, dict[str, int] | None, list[str] | None, Any]:
        """Return its module, and its mesh and shardings of parameters and outputs from JAX."""
        from shardrules import hlo, program

        module = hlo.parse(self.text, name=self.name)
        mesh = self._placements.mesh()
        if mesh is None:  # no sharding names it, so take the mesh of the shard_maps
            shapes = {tuple(dict(mesh.shape).items()) for mesh in self._traced.meshes}
            mesh = dict(shapes.pop()) if len(shapes) == 1 else {}
        device_count = (module.num_partitions or 1) * (module.replica_count or 1)
        if not mesh or math.prod(mesh.values()) != device_count:
            mesh = None
        shardings = program.matching(module, self._placements.parameters())
        if self._traced.drops_axes:  # earlier programs determine which outputs are equal
            return module, mesh, shardings, None
        promised = self._placements.results(self._traced.paths, program.output_shapes(module))
        return module, mesh, shardings, promised

    @property
    def arguments(self) -> list[str]:
        """Return the shape of each parameter on one device, with its sharding if JAX has it."""
        module, _, shardings, _ = self._parsed()
        shapes = [str(p.shape) for p in module.entry.parameters]
        if shardings is None:
            return shapes
        return [f"{shape} a device, sharded {how}" for shape, how in zip(shapes, shardings)]

    @property
    def returned(self) -> list[str]:
        """Return the shape of each output on one device."""
        from shardrules import program

        return program.output_shapes(self._parsed()[0])

    def argument(self, number: int) -> str:
        """Return a leaf's name: ``argument 7 (state['mu'])``, or ``argument 7`` if XLA has none."""
        module = self._parsed()[0]
        names = [module.metadata(p).op_name for p in module.entry.parameters]
        return f"argument {number}" + "".join(f" ({n})" for n in names[number:][:1] if n)

    @property
    def definition(self) -> str:
        """Return ``NAME at FILE:LINE`` of its function; empty if JAX doesn't have it."""
        return self._traced.definition

    @property
    def details(self) -> list[tuple[str, str]]:
        """Return each parameter's memory, and whether it is weakly typed; empty if unknown."""
        return self._placements.details() or []

    @property
    def commitments(self) -> list[str]:
        """Return for each parameter whether the caller committed it to its devices."""
        header = self.judgement.module.header
        free = header.get("allow_spmd_sharding_propagation_to_parameters", "{}").strip("{}")
        given = [_UNCOMMITTED if flag == "true" else "committed" for flag in free.split(",")]
        return given * len(self.judgement.module.entry.parameters) if len(given) == 1 else given

    @property
    def runs_on_cpu(self) -> bool:
        return self._placements.platform() == "cpu"

    def annotated_text(self) -> str:
        """Return its compiled HLO, with mesh and shardings where ``hlo.judge`` reads them.

        Raises:
          ShardrulesError: its backend does not return its HLO, or it can't be read.
        """
        from shardrules.hlo.reader import annotate

        module, mesh, shardings, promised = self._parsed()
        outputs = [promise[1] if promise else None for promise in promised or ()]
        return annotate.annotated(module, mesh, shardings, outputs)

    @functools.cached_property
    def judgement(self) -> hlo.Judgement:
        """Return the verdicts on its collectives; raises as ``annotated_text``."""
        from shardrules import hlo

        module, mesh, shardings, promised = self._parsed()
        return hlo.judge(
            module,
            registry=self._owner.registry,
            own_mesh=mesh,
            parameter_shardings=shardings,
            unpartitioned=True,
            output_shardings=promised,
        )

    @functools.cached_property
    def content(self) -> report.Content:
        """Return the content of its report; raises as ``annotated_text``."""
        from shardrules import report
        from shardrules.costs import findings
        from shardrules.costs.advice import advice
        from shardrules.watching.profiles import profile

        timings = self._owner.timings.get(profile.body(self.text)) if self._owner.timings else None
        content = report.content(
            self.judgement,
            title=f"{self.name} in {self.where}" if self.where else self.name,
            strict=self._owner.strict,
            allow=findings.Allowances(self._owner.allow),
            target=self._owner.target,
            cheapest=self._owner.cheapest,
            timings=timings,
            switched=self.switched,
            fed=self._fed(),
            script=self._owner.script,
        )
        proven = self._proven_kernels()
        advised = tuple(
            dataclasses.replace(f, advice=advice(f.verdict, proven)) if f.kind == "unproven" else f
            for f in content.findings
        )
        return dataclasses.replace(content, findings=advised, interpreted=self._traced.interpreted)

    @functools.cached_property
    def switched(self) -> Switched | str:
        """Return its costs with the checks of its shard_maps on, or why they are unknown."""
        from shardrules.costs.advice import is_defensive

        if not any(map(is_defensive, self.judgement.verdicts)):
            return ""
        from shardrules.unchecked import switched

        owner, traced = self._owner, self._traced
        with compiling.unwatched():
            mesh = self.judgement.mesh
            return switched.switched(traced.again, traced.scope, owner.registry, mesh)

    def _fed(self) -> Mapping[tuple[int, int], tuple[int, int]]:
        """Return how often it ran on its own results, from ``Runs.fed``."""
        runs, record = self._owner.runs, self._record
        if runs is None or record is None:
            return {}
        same = [p for p in self._owner if p._record and p.name == self.name]
        text = self.text if len(same) > 1 else ""
        records = (p._record for p in same if p is self or p.text == text)
        return runs.fed([record for record in records if record is not None])

    def _proven_kernels(self) -> frozenset[str]:
        """Return the names of Pallas kernels whose jaxprs all prove that they don't communicate."""
        if not self._traced.kernels:
            return frozenset()
        from shardrules.hooks.install import state

        names, unproven = set[str](), set[str]()
        for eqn in self._traced.kernels:
            name, _ = kernel_name(eqn.params)
            audit = state().registry.audit("pallas_call", eqn.params, 0)
            (names if audit is not None and audit.proven else unproven).add(name)
        return frozenset(names - unproven)

    def __repr__(self) -> str:
        return f"<WatchedProgram {self.name}>"

    def _repr_html_(self) -> str:
        from shardrules.report.page import in_notebook

        return in_notebook(self.content)


@dataclasses.dataclass(eq=False, repr=False)
class Watched:
    """The programs that ``watch`` recorded, in the order in which they were compiled.

    Iteration and ``len`` cover the programs compiled so far; ``str`` judges them all.
    """

    strict: bool  # whether verdicts that rest on declarations are findings
    allow: dict[str, str]  # known findings, with their reasons
    where: Callable[[], str] = str  # names the test that is running
    registry: Any = None  # rules for custom calls that carry no tag; the default registry if None
    target: str | None = None  # ``"v5e"``, on which each collective's time is estimated
    cheapest: bool = False  # whether all-reduces that would move less elsewhere are findings
    runs: Runs | None = None  # follows the programs' runs
    script: str = ""  # the command line of the script, as typed; empty if unknown
    timings: dict[str, Timings] = dataclasses.field(default_factory=dict)  # by computations

    def __post_init__(self) -> None:
        self._programs: list[WatchedProgram] = []
        self._by_loaded: dict[int, WatchedProgram] = {}  # by the id of XLA's program
        self._above_check_off: list[str] = []  # sentences about gradients
        self._stop: Callable[[], None] | None = None
        self._kept = contextlib.ExitStack()
        self._has_begun = False

    def __enter__(self) -> Watched:
        if self._stop is not None:
            raise ShardrulesError("this watch is on already; make another one with watch()")
        self._has_begun = True
        self._kept.enter_context(check_off.kept())
        self._stop = compiling.start(self._note)
        cast_listeners.append(self._above_check_off.append)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if self._stop is not None:
            cast_listeners.remove(self._above_check_off.append)
            self._stop()
            self._stop = None
            self._kept.close()

    def _note(self, executable: Any, traced: compiling.Traced) -> None:
        loaded = compiled.loaded(executable)
        known = self._by_loaded.get(id(loaded))
        if known is not None and known.is_loaded(loaded):
            known.runs_as(executable)
        else:
            program = WatchedProgram(executable, traced, self, self.where())
            self._by_loaded[id(loaded)] = program
            self._programs.append(program)

    def __iter__(self) -> Iterator[WatchedProgram]:
        return iter(tuple(self._programs))

    def __len__(self) -> int:
        return len(self._programs)

    def judged(self, progress: Callable[[int, int], None] | None = None) -> several.Several:
        """Judge every program; programs with the same text are judged once.

        Args:
          progress: called before each program with the number of judged programs and of all.

        Returns:
          The reports of all programs (after Ctrl-C, of the judged ones), the costliest first.

        Raises:
          ShardrulesError: the watch has not begun.
        """
        from shardrules.paths import here
        from shardrules.report import several

        if not self._has_begun:
            raise ShardrulesError(
                "this watch has not begun, so it saw no program; write "
                "`with shardrules.watch() as seen:` around what compiles them"
            )
        by_text: dict[str, WatchedProgram] = {}
        judges: list[WatchedProgram] = []
        failures: list[tuple[str, str]] = []
        programs = tuple(self)
        judged = 0
        with contextlib.suppress(KeyboardInterrupt):  # report the programs judged so far
            for number, program in enumerate(programs):
                if progress is not None:
                    progress(number, len(programs))
                program.count, program.same_text = 1, []
                try:
                    first = by_text.setdefault(program.text, program)
                    if first is program:
                        program.content  # noqa: B018  judged here
                        judges.append(program)
                    else:
                        first.count += 1
                        first.same_text.append(program)
                except ShardrulesError as error:
                    failures.append((program.name, str(error)))
                judged = number + 1
        return several.gather(
            [program.content for program in judges],
            [program.count for program in judges],
            failures,
            len(programs) - judged,
            notes=[
                *_on_one_device(judges),
                *made_again.notes(judges),
                *map(here, dict.fromkeys(self._above_check_off)),
                *_of_cpu(judges),
            ],
        )

    def profiled(self, folder: str, kept: str | None = None) -> Profile:
        """Read a profile of this process, and assign its times to the programs.

        Args:
          folder: the profile's folder.
          kept: the folder that still holds it when the report is read, or None.
        """
        from shardrules.watching.profiles import profile

        watched: dict[str, WatchedProgram] = {}
        modules = []
        for program in self:
            with contextlib.suppress(ShardrulesError):
                if watched.setdefault(profile.body(program.text), program) is program:
                    modules.append((None, program.judgement.module))

        def known(text: str) -> hlo.Judgement | None:
            program = watched.get(profile.body(text))
            return None if program is None else program.judgement

        result = profile.read(
            folder,
            registry=self.registry,
            known=known,
            # Use these texts where the profile has none: on CPU, JAX's profiler sometimes writes no
            # HLO. They have no mesh, unlike files of --keep, but these programs know their mesh.
            dumped=profile.Dumps(modules, "the script", as_last=True),
            source="the script",
            strict=self.strict,
            allow=self.allow,
            target=self.target,
            cheapest=self.cheapest,
        )
        bodies = [profile.body(p.content.judgement.module.text) for p in result.programs]
        self.timings = {text: p.timings for text, p in zip(bodies, result.programs)}
        untimed = [p.name for text, p in zip(bodies, result.programs) if text not in watched]
        where = f"`shardrules profile {kept or 'DIR'}` has its times"
        where = where if kept else f"record with --keep DIR, and {where}"
        notes = [f"{name} {_UNTIMED}; {where}" for name in dict.fromkeys(untimed)]
        notes += self._did_not_run(watched, untimed)
        return dataclasses.replace(result, notes=(*result.notes, *notes))

    def _did_not_run(
        self, watched: Mapping[str, WatchedProgram], untimed: Collection[str]
    ) -> Iterator[str]:
        """Yield a note for each program with collectives that has no event in the profile."""
        timed = {program.name for text, program in watched.items() if text in self.timings}
        said = {*untimed}  # these already have a note
        for text, program in watched.items():
            name = program.name
            if text in self.timings or name in said:
                continue
            with contextlib.suppress(ShardrulesError):  # the report lists it
                if program.judgement.verdicts:
                    said.add(name)
                    another = f"another program {name}" if name in timed else name
                    yield f"the report has no times of {another}: {_DID_NOT_RUN}"

    @property
    def process(self) -> tuple[int, int]:
        """Return the index of this process and the number of the job's processes."""
        import jax

        return jax.process_index(), jax.process_count()

    @property
    def ran_on(self) -> list[str]:
        """Return JAX's version and its devices, as far as they are known."""
        import jax

        words = []
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            words.append(f"JAX {importlib.metadata.version('jax')}")
        with contextlib.suppress(Exception):  # a backend may raise anything
            kinds = sorted({device.device_kind for device in jax.devices()})
            words.append(f"{jax.device_count()} devices ({', '.join(kinds)})")
        return words

    @property
    def clean(self) -> bool:
        """Return whether every program can be judged and none has a finding."""
        return self.judged().clean

    def __str__(self) -> str:
        from shardrules.report import plain

        return fitting.fitted(plain(self.judged()), fitting.width(sys.stdout))

    def __repr__(self) -> str:
        return f"<Watched: {len(self)} programs>"

    def _repr_html_(self) -> str:
        from shardrules.report.page import in_notebook

        return in_notebook(self.judged())


def _on_one_device(programs: list[WatchedProgram]) -> Iterator[str]:
    """Yield a note if all programs run on one device; say how to get more if JAX has only one."""
    import jax

    if {program.content.account.device_count for program in programs} != {1}:
        return
    count = jax.device_count()
    more = (
        "; XLA_FLAGS=--xla_force_host_platform_device_count=8 makes eight on CPU, set before JAX "
        "starts"
    )
    yield (
        f"every program runs on one device, of {count}, so that nothing is communicated"
        f"{more if count == 1 else ''}"
    )


def _of_cpu(programs: list[WatchedProgram]) -> Iterator[str]:
    """Yield a note if programs compiled for CPU have savings or needed all-reduces."""
    on_cpu = [program.content for program in programs if program.runs_on_cpu]
    if any(content.worth or content.account.is_reduced for content in on_cpu):
        timed = any(content.timings for content in on_cpu)
        yield (
            "compiled for CPU: XLA for TPU or GPU turns some all-reduces into reduce-scatters, "
            "and merges, moves and drops other collectives, so that less or more may be "
            "needed, and saved, there (`python -m shardrules.aot` says how to compile for them "
            f"here){'; times on CPU say nothing of theirs' * timed}"
        )


@checked
def watch(*, strict: bool = False, allow: Mapping[str, str] | None = None) -> Watched:
    """Record every program that this process compiles inside a ``with`` block, in any thread.

    ``with shardrules.watch() as seen: train()``, then ``print(seen)``: one table, the costliest
    program first, and the findings. Programs from JAX's caches on disk and in memory are recorded
    too (but not calls of a ``Compiled`` that was compiled before). Values, errors and output stay
    as they are. The programs are judged when ``seen`` is printed or its verdicts are read.

    Args:
      strict: accept only proofs: verdicts that rest on declared rules are findings.
      allow: known findings, each with a reason, as for ``testing.assert_no_defensive_psum``.

    Raises:
      UnsupportedJaxError: on entry, if this JAX's internals are unknown.
      ShardrulesError: ``allow`` names no collectives, or gives no reason.

    Example:
      >>> with shardrules.watch() as seen:
      ...     y = jax.jit(lambda w: w + 1)(w)
      >>> len(seen)
      1
    """
    if allow:
        from shardrules.costs import findings

        findings.Allowances(allow)
    return Watched(strict, dict(allow or {}))
