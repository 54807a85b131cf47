"""Runs random modules on eight CPU replicas and holds the proof's claims against what they gave."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib import _hlo, _jax
from seeds import cheaply

from shardrules import errors, hlo

from . import coverage
from .forms import DEVICES, join
from .generate import Generator

DRAWS = 2
_TYPES = {"pred": np.bool_, "f32": np.float32, "bf16": jnp.bfloat16}


def dtype(kind):
    """Give numpy's type."""
    if kind in _TYPES:
        return np.dtype(_TYPES[kind])
    return np.dtype(("int" if kind[0] == "s" else "uint") + kind[1:])


def compile_text(text: str):
    """Compile HLO text for eight replicas."""
    module = _hlo.hlo_module_from_text(text)
    made = _hlo.XlaComputation(module.as_serialized_hlo_module_proto())
    options = _jax.CompileOptions()
    options.num_replicas, options.num_partitions = DEVICES, 1
    assignment = _jax.DeviceAssignment.create(np.arange(DEVICES).reshape(DEVICES, 1))
    options.device_assignment = assignment
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = DEVICES, 1
    build.device_assignment = assignment
    options.env_option_overrides = [
        *cheaply().items(),
        # It joins a slice of a slice whose start is beyond its end into one that isn't clamped in
        # between (jaxlib 0.10.2), so that what runs is not what the text says.
        ("xla_disable_hlo_passes", "algsimp"),
    ]
    devices = jax.devices()[:DEVICES]
    return devices[0].client.compile_and_load(
        _jax.mlir.xla_computation_to_mlir_module(made), _jax.DeviceList(tuple(devices)), options
    )


def arguments(module: Generator, draw: int):
    """Draw the parameters: one array for each class of devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:DEVICES]), ("d",))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    rng = np.random.default_rng([module.seed, draw])
    made = []
    for shape, labels in module.parameters:
        kind = dtype(shape.kind)
        rows = {}
        for label in sorted(set(labels)):
            if shape.kind in ("f32", "bf16"):
                rows[label] = rng.standard_normal(shape.dims).astype(kind)
            elif shape.kind == "pred":
                rows[label] = rng.integers(0, 2, shape.dims).astype(kind)
            else:
                low = 0 if shape.kind[0] == "u" else -4
                rows[label] = rng.integers(low, 9, shape.dims).astype(kind)
        with jax.enable_x64(True):
            made.append(jax.device_put(np.stack([rows[k] for k in labels]), where))
    return made


@dataclasses.dataclass
class Truth:
    """What a module's devices computed.

    Attributes:
      module: the module.
      judged: its text for the proof.
      classes: for each output the classes of devices that held the same on all draws.
      differed: for each collective whether an operand differed in a group.
    """

    module: Generator
    judged: str
    classes: list[tuple]
    differed: list[bool]


@dataclasses.dataclass
class Outcome:
    """What the proof claims of one module.

    ``wrong`` are false claims: of an output, that two devices hold the same; of a collective, that
    its operand is the same in its groups. Then pairs of devices that are equal, and proven equal.
    """

    wrong: list
    probed: int = 0
    equal: int = 0
    proven: int = 0
    collectives: int = 0
    redundant: int = 0


def execute(seed: int) -> Truth:
    """Write, compile and execute one module."""
    module = Generator(seed)
    compiled = compile_text(module.executed())
    draws = []
    for draw in range(DRAWS):
        found = compiled.execute_sharded(arguments(module, draw))
        draws.append(
            [[np.asarray(a) for a in o] for o in found.disassemble_into_single_device_arrays()]
        )
    *outputs, counts = zip(*draws)
    classes = [join(*[tuple(a.tobytes() for a in rows) for rows in output]) for output in outputs]
    differed = sum(a.astype(np.int64) for rows in counts for a in rows)
    return Truth(module, module.judged(), classes, (differed > 0).tolist())


def hold(truth: Truth) -> Outcome:
    """Hold the proof's claims against what the devices computed."""
    judgement = hlo.judge(hlo.parse(truth.judged))
    seed, outcome = truth.module.seed, Outcome([], len(judgement.outputs))
    assert len(judgement.outputs) == len(truth.classes)
    for number, (output, same) in enumerate(zip(judgement.outputs, truth.classes)):
        proven = {d: n for n, c in enumerate(output.classes) for d in c}
        for i in range(DEVICES):
            for j in range(i):
                outcome.equal += same[i] == same[j]
                if proven[i] == proven[j]:
                    outcome.proven += 1
                    if same[i] != same[j]:
                        name = truth.module.entry.results[number].name
                        outcome.wrong.append((seed, f"output {name}, devices {j} and {i}"))
    numbers = {
        op.name: op.channel.number
        for computation in [*truth.module.computations, truth.module.entry]
        for op in computation.ops
        if op.channel is not None
    }
    claimed: dict[str, bool] = {}
    for verdict in judgement.verdicts:
        outcome.collectives += 1
        outcome.redundant += verdict.verdict == "redundant"
        name = verdict.collective.name
        claimed[name] = claimed.get(name, True) and verdict.verdict == "redundant"
    for name, redundant in claimed.items():
        if redundant and truth.differed[numbers[name]]:
            outcome.wrong.append((seed, f"collective {name}"))
    return outcome


def outcome(seed: int):
    """Return one module's outcome for tests/seeds.py."""
    try:
        held = hold(execute(seed))
    except _jax.JaxRuntimeError:  # what XLA's CPU compiler doesn't take shows nothing
        return {"refused": 1}
    except errors.HloError as error:
        held = Outcome([(seed, f"refused: {error}")])
    counts = {field.name: getattr(held, field.name) for field in dataclasses.fields(held)[1:]}
    wrong = [what for _, what in held.wrong]
    return {**counts, "wrong": wrong} | ({"note": "; ".join(wrong)} if wrong else {})


def summary(outcomes):
    """Say what modules showed; well if no claim was false and all that the proof reads ran."""
    # XLA's own folding of constants traps on some modules (jaxlib 0.10.2, one of about a thousand).
    sums = dict.fromkeys(("probed", "collectives", "redundant", "proven", "equal"), 0)
    wrong = 0
    for one in outcomes.values():
        wrong += len(one.get("wrong", ()))
        for name in sums:
            sums[name] += one.get(name, 0)
    refused = sum("refused" in one or one.get("lost", 0) < 0 for one in outcomes.values())
    stopped = sum(one.get("lost", -1) >= 0 for one in outcomes.values())
    opcodes, attributes, report = coverage.missing(
        Generator(seed).judged() for seed in list(outcomes)[:1000]
    )
    lines = [
        f"{len(outcomes)} modules, {sums['probed']} probed values, {sums['collectives']} verdicts "
        f"({sums['redundant']} redundant): {wrong} false claims; {sums['proven']} of "
        f"{sums['equal']} pairs of devices that are equal are proven equal; XLA's CPU compiler "
        f"refused {refused}",
        f"generated: {report}",
    ]
    for what, names in (("opcodes", opcodes), ("attributes", attributes)):
        lines += [f"  {what} that were not: {', '.join(names)}"] if names else []
    is_well = not (wrong or stopped or opcodes or attributes) and 50 * refused <= len(outcomes)
    return "\n".join(lines), is_well
