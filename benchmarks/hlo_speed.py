"""Time of a full verdict (reading, proof, accounts) against XLA's own parser, which only parses.

    python benchmarks/hlo_speed.py [--platforms=cpu,tpu,gpu] [--layers=20,13,14] [--rounds=9]
        [--sizes_mb=1,4,16] [--devices=8,64,512,4096] [--files=a.hlo,b.hlo]

Both read the same text, in turns in one process, processor time; the plugins of the platforms must
be installed. Three tables: texts as they were compiled, the gradient of an unrolled transformer for
8 devices, about 1 MB for each platform, with the verdict's share of the time that its compilation
took; the CPU's computations repeated under one ENTRY until the text has the wanted size, and time
for each MB of it; modules over more and more devices, their groups and shardings rewritten.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
import time
import tracemalloc

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import paired
from absl import app, flags

from shardrules import hlo

MESH = {"data": 4, "model": 2}
NAMES = {"cpu": "8 CPU devices", "tpu": "TPU v5e:2x4", "gpu": "8xH100"}

_PLATFORMS = flags.DEFINE_list("platforms", ["cpu", "tpu", "gpu"], "what to compile for")
_LAYERS = flags.DEFINE_list("layers", ["20", "13", "14"], "of the program, for each platform")
_SIZES = flags.DEFINE_list("sizes_mb", ["1", "4", "16"], "of the repeated texts, in MB")
_DEVICES = flags.DEFINE_list("devices", ["8", "64", "512", "4096"], "how many, the fewest first")
_FILES = flags.DEFINE_list("files", [], "texts to read instead")
_ROUNDS = flags.DEFINE_integer(
    "rounds", 9, "how often each is read; long texts less", lower_bound=1
)


def devices_of(platform: str):
    """Give eight devices, absent ones for TPU and GPU."""
    import jax

    from shardrules import aot

    if platform == "cpu":
        return jax.devices()[:8]
    return aot.tpu("v5e:2x4") if platform == "tpu" else aot.gpu("h100", 8)


def compiled_text(layers: int, platform: str = "cpu") -> tuple[str, float]:
    """Compile the gradient of an unrolled transformer; give the text and processor seconds."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(devices_of(platform)).reshape(4, 2), ("data", "model"))

    def block(x, w):
        q, k, v = jnp.split(x @ w["qkv"], 3, axis=-1)
        a = jax.nn.softmax(q @ k.swapaxes(-1, -2) / 8)
        x = x + jax.lax.psum((a @ v) @ w["out"], "model")
        h = jax.nn.gelu(x @ w["up"])
        x = x + jax.lax.psum(h @ w["down"], "model")
        return x * w["scale"]

    def loss(ws, x):
        for w in ws:
            x = block(x, w)
        return jax.lax.pmean((x**2).mean(), "data")

    shapes = {
        "qkv": ((64, 192), P(None, "model")),
        "out": ((64, 64), P("model", None)),
        "up": ((64, 256), P(None, "model")),
        "down": ((256, 64), P("model", None)),
        "scale": ((64,), P()),
    }
    specs = [{k: s for k, (_, s) in shapes.items()}] * layers
    mapped = jax.shard_map(
        loss, mesh=mesh, in_specs=(specs, P("data")), out_specs=P(), check_vma=False
    )

    def struct(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    weights = [{k: struct(*v) for k, v in shapes.items()}] * layers
    start = time.process_time()
    compiled = jax.jit(jax.grad(mapped)).lower(weights, struct((8, 16, 64), P("data"))).compile()
    seconds = time.process_time() - start
    return compiled.as_text(), seconds


def repeated(text: str, size: int) -> str:
    """Repeat a module's computations, renamed, under one ENTRY that calls each copy."""
    module = hlo.parse(text)
    first = min(c.instructions[0].start for c in module.computations.values())
    body = text[text.rfind("\n\n", 0, first) + 2 :]
    head = text[: len(text) - len(body)]
    entry = module.entry
    signature = re.search(r"^ENTRY %[^\n]*-> ([^\n]*) \{$", body, re.MULTILINE)[1]
    copies = max(1, size // len(body))
    parts = [head]
    for k in range(copies):
        parts.append(re.sub(r"%([\w.\-]+)", rf"%\1_{k}", body).replace("ENTRY %", "%"))
    lines = []
    for p in entry.parameters:
        lines.append("  " + text[p.start : p.end].strip().replace("ROOT ", ""))
    names = ", ".join("%" + p.name for p in entry.parameters)
    for k in range(copies):
        root = "ROOT " if k == copies - 1 else ""
        lines.append(f"  {root}%copy_{k} = {signature} call({names}), to_apply=%{entry.name}_{k}")
    return "".join(parts) + "ENTRY %all () -> " + signature + " {\n" + "\n".join(lines) + "\n}\n"


def verdict(text: str, mesh: dict[str, int]) -> None:
    """Read and judge a text."""
    hlo.judge(hlo.parse(text), mesh=mesh)


def timed(text: str) -> dict[str, list[float]]:
    """Give processor seconds of reading, of the whole verdict and of XLA's parser, in turns."""
    from jaxlib import _hlo

    seconds = functools.partial(paired.seconds, clock=time.process_time)
    return paired.rounds(
        {
            "reading": lambda: seconds(lambda: hlo.parse(text)),
            "verdict": lambda: seconds(lambda: verdict(text, MESH)),
            "XLA": lambda: seconds(lambda: _hlo.hlo_module_from_text(text)),
        },
        _ROUNDS.value if len(text) < 8e6 else min(3, _ROUNDS.value),
        warm_count=1 if len(text) < 8e6 else 0,
    )


def against_xla(took: dict[str, list[float]]) -> list[str]:
    """Write both ratios to XLA's parser."""
    return [paired.shown(paired.ratio(took[arm], took["XLA"])) for arm in ("reading", "verdict")]


def peak_bytes(text: str) -> int:
    """Measure what a verdict allocates at most."""
    tracemalloc.start()
    hlo.judge(hlo.parse(text), mesh=MESH)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def over_devices(text: str, devices: int) -> str:
    """Rewrite an 8-device module's groups and shardings for more devices along `data`."""
    data = devices // 2
    rest = f"[{data},2]<=[{devices}]"
    text = text.replace("num_partitions=8", f"num_partitions={devices}")
    text = text.replace("{{0,1},{2,3},{4,5},{6,7}}", rest)
    text = text.replace("{{0,2,4,6},{1,3,5,7}}", f"[2,{data}]<=[{data},2]T(1,0)")
    text = text.replace("{{0,1,2,3,4,5,6,7}}", f"[1,{devices}]<=[{devices}]")
    text = re.sub(
        r"devices=\[4,((?:1,)*)2\]<=\[8\]", rf"devices=[{data},\g<1>2]<=[{devices}]", text
    )
    return re.sub(
        r"devices=\[((?:1,)*)2,((?:1,)*)4\]<=\[4,2\]T\(1,0\)",
        rf"devices=[\g<1>2,\g<2>{data}]<=[{data},2]T(1,0)",
        text,
    )


def print_platforms() -> None:
    """Print how the verdict on each platform's text compares with XLA's parser and its compiler."""
    paired.print_head(
        ["compiled for", "MB", "instructions", "reading / XLA", "verdict / XLA"]
        + ["verdict / compilation", "memory / text"]
    )
    for platform, layers in zip(_PLATFORMS.value, map(int, _LAYERS.value)):
        text, compilation = compiled_text(layers, platform)
        took = timed(text)
        share = paired.ratio(took["verdict"], [compilation] * len(took["verdict"]))[0]
        paired.print_row(
            [NAMES[platform], f"{len(text) / 1e6:.2f}", f"{instructions(text):,}"]
            + [*against_xla(took), f"{share:.1%}", f"{peak_bytes(text) / len(text):.1f}"]
        )


def print_texts(texts) -> None:
    """Print the same for texts of growing size, and the time for each MB of them."""
    paired.print_head(
        ["text, MB", "instructions", "reading / XLA", "verdict / XLA"]
        + ["verdict's time for an MB / that of the first", "memory / text"]
    )
    first = None
    for text in texts:
        took = timed(text)
        rate = min(took["verdict"]) / len(text)
        first = first or rate
        memory = f"{peak_bytes(text) / len(text):.1f}" if len(text) < 2e7 else ""
        paired.print_row(
            [f"{len(text) / 1e6:.2f}", f"{instructions(text):,}", *against_xla(took)]
            + [f"{rate / first:.2f}", memory]
        )


def print_devices(text: str) -> None:
    """Print how the verdict's time grows with the devices."""
    counts = list(map(int, _DEVICES.value))
    arms = {}
    for count in counts:
        run = functools.partial(
            verdict, over_devices(text, count), {"data": count // 2, "model": 2}
        )
        arms[str(count)] = functools.partial(paired.seconds, run, time.process_time)
    took = paired.rounds(arms, _ROUNDS.value)
    paired.print_head(["devices", f"time / time for {counts[0]}"])
    for count in counts:
        ratio = paired.ratio(took[str(count)], took[str(counts[0])])
        paired.print_row([count, paired.shown(ratio)])


def instructions(text: str) -> int:
    """Count a module's instructions."""
    return sum(len(c.instructions) for c in hlo.parse(text).computations.values())


def _main(argv) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    paired.print_stamp()
    if _FILES.value:
        print_texts(pathlib.Path(f).read_text() for f in _FILES.value)
        return
    base = compiled_text(4)[0]
    verdict(base, MESH)  # what a process does once is behind us
    print_platforms()
    sizes = [int(float(size) * 1e6) for size in _SIZES.value]
    print_texts(repeated(base, size) for size in sizes)
    print_devices(repeated(base, min(sizes[0], 1_000_000)))


if __name__ == "__main__":
    app.run(_main)
