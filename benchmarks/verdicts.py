"""The verdicts on programs as people write them, by the compiler, and why any is unproven.

    python benchmarks/verdicts.py [--compilers=cpu,v5e:2x4,v6e:2x4,tpu7x:2x2x1,h100]
        [--programs=scan,...]

The gradients of tests/hlo/corpus.py and the steps of models.py (shard_maps with the check off),
steps under jit whose arrays XLA's partitioner shards (jitted.py), and the step of
examples/train_transformer.py with the check off, each compiled for eight devices, absent ones for
TPU and GPU, whose plugins must be installed. A program that does not compile shows its error's
name. The last table is of the texts in tests/hlo/data, compiled by JAX 0.4.28 to 0.12, judged
without what only a Compiled knows.
"""

from __future__ import annotations

import collections
import os
import pathlib
import re
import sys
from collections.abc import Iterable

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "examples")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import jitted  # noqa: E402
import models  # noqa: E402
import numpy as np  # noqa: E402
import paired  # noqa: E402
import transformer  # noqa: E402
from absl import app, flags  # noqa: E402
from hlo import corpus  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from shardrules import aot, hlo, program  # noqa: E402
from shardrules.errors import ShardrulesError  # noqa: E402

_COMPILERS = flags.DEFINE_list(
    "compilers", ["cpu", "v5e:2x4", "v6e:2x4", "tpu7x:2x2x1", "h100"], "what to compile for"
)
_PROGRAMS = flags.DEFINE_list("programs", [], "the programs to compile; all if empty")

WIDTH, LAYERS = 256, 4


def _mlp(ws, x):
    def layer(x, w):
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    return (jax.lax.scan(layer, x, ws)[0] ** 2).mean()


def _step(ws, x):
    grads = jax.grad(_mlp)(ws, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads)


# From a way to shard to the specs of a layer's two weights, stacked, and of the batch.
_JIT = {
    "data parallel, jit": (P(), P(), P(("data", "model"))),
    "tensor parallel, jit": (P(None, None, "model"), P(None, "model", None), P("data")),
    "FSDP, jit": (P(None, "data", None), P(None, "data", None), P(("data", "model"))),
    "both, jit": (P(None, "data", "model"), P(None, "model", "data"), P("data")),
}
TRANSFORMER = "transformer"
_MODELS = {f"{model.name}, check off": model for model in (make() for make in models.MODELS)}
PROGRAMS = [*corpus.PROGRAMS, *_MODELS, *_JIT, *jitted.STEPS, TRANSFORMER]


def devices_of(compiler: str) -> list[jax.Device]:
    if compiler == "cpu":
        return jax.devices()[:8]
    return list(aot.tpu(compiler) if ":" in compiler else aot.gpu(compiler, 8))


def compiled(name: str, compiler: str):
    """Compile a program for a compiler's eight devices."""
    devices = np.array(devices_of(compiler))
    if name == TRANSFORMER:
        mesh = Mesh(devices.reshape(2, 2, 2), transformer.AXES)
        platform = "tpu" if ":" in compiler else "cpu" if compiler == "cpu" else "gpu"
        return transformer.compiled("check off", transformer.config_of(platform, mesh, 2), mesh)
    if name in _MODELS:
        models.interpret(":" not in compiler)
        return models.lowered(_MODELS[name], _MODELS[name].mesh(devices), "off").compile()
    mesh = Mesh(devices.reshape(4, 2), ("data", "model"))
    if name in jitted.STEPS:
        return jitted.compiled(name, mesh)
    if name in corpus.PROGRAMS:
        return corpus.compile_program(name, mesh, check_vma=False)
    up, down, rows = (NamedSharding(mesh, spec) for spec in _JIT[name])

    def struct(shape, sharding):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    weights = {
        "up": struct((LAYERS, WIDTH, 4 * WIDTH), up),
        "down": struct((LAYERS, 4 * WIDTH, WIDTH), down),
    }
    kept = {"up": up, "down": down}
    step = jax.jit(_step, out_shardings=kept)
    return step.lower(weights, struct((512, WIDTH), rows)).compile()


def counted(judgements: Iterable[hlo.Judgement]) -> collections.Counter[str]:
    return collections.Counter(v.verdict for judged in judgements for v in judged.verdicts)


def shown(counts: collections.Counter[str]) -> str:
    """Write ``7 needed, 1 unproven``."""
    return ", ".join(f"{counts[v]} {v}" for v in hlo.VERDICTS if counts[v]) or "no collectives"


_OWN = re.compile(r"(?<!\w)'[^']*'(?!\w)|\d+|(?<=\()\w+(?=\) )")


def reason(verdict: hlo.Verdict) -> str:
    """Write why a collective is unproven, without the names of this one."""
    whys = [verdict.reason] if verdict.divergent else [b.what for b in verdict.blockers]
    return "; ".join(dict.fromkeys(_OWN.sub("...", why) for why in whys or [verdict.reason]))


def print_shares(title: str, rows: dict[str, dict[str, hlo.Judgement]]) -> None:
    """Print the share of each verdict in each row, and why any collective is unproven."""
    paired.print_head([title, "programs", "collectives", *hlo.VERDICTS])
    reasons: dict[str, collections.Counter[str]] = {}
    for row, judgements in rows.items():
        counts = counted(judgements.values())
        total = sum(counts.values())
        shares = [f"{counts[v] / total:.0%}" if total else "" for v in hlo.VERDICTS]
        paired.print_row([row, len(judgements), total, *shares])
        for name, judged in judgements.items():
            for verdict in judged.unproven:
                reasons.setdefault(reason(verdict), collections.Counter())[name] += 1
    print("" if reasons else "\nNone is unproven.")
    for why, names in sorted(reasons.items(), key=lambda pair: -pair[1].total()):
        where = ", ".join(f"{count} in {name}" for name, count in names.items())
        print(f"- {why}: {where}")


def _main(argv) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    paired.print_stamp()
    names = _PROGRAMS.value or PROGRAMS
    of: dict[str, dict[str, hlo.Judgement]] = {compiler: {} for compiler in _COMPILERS.value}
    paired.print_head(["program", *_COMPILERS.value])
    for name in names:
        cells = []
        for compiler in _COMPILERS.value:
            try:
                judged = program.judged(program.read(compiled(name, compiler)))
            except (ShardrulesError, jax.errors.JaxRuntimeError, ValueError) as error:
                cells.append(f"{type(error).__name__}")
                print(f"{name}, {compiler}: {error}", file=sys.stderr)
                continue
            of[compiler][name] = judged
            cells.append(shown(counted([judged])))
        paired.print_row([name, *cells])
    print_shares("compiled for", of)
    texts = sorted((ROOT / "tests" / "hlo" / "data").glob("*.hlo"))
    after = [path for path in texts if "before_optimizations" not in path.stem]
    judgements = {path.stem: hlo.judge(path.read_text()) for path in after}
    print_shares("read from text alone", {"tests/hlo/data": judgements})


if __name__ == "__main__":
    app.run(_main)
