"""Time of a full verdict (reading, proof, accounts) against XLA's own parser, which only parses.

Both read the same text in the same run, alternating; the ratio of the best times is printed. The
modules are an unrolled transformer's gradient compiled for 8 devices, and the same computations
repeated until the text has the wanted size; then small modules over more and more devices. Before
that the same gradient is compiled for CPU, TPU v5e:2x4 and 8xH100 (the plugins for those must be
installed), and the verdict's share of the time that its compilation took is printed.

    python benchmarks/hlo_speed.py [--sizes_mb=1,4,16] [--layers=4] [--files=a.hlo,b.hlo]
        [--platforms=cpu,tpu,gpu] [--devices=8,64,512,4096]
"""

from __future__ import annotations

import os
import pathlib
import re
import sys
import time
import tracemalloc

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import paired  # noqa: E402

from shardrules import hlo  # noqa: E402

MESH = {"data": 4, "model": 2}


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
        "out": ((32, 64), P("model", None)),
        "up": ((64, 256), P(None, "model")),
        "down": ((256, 64), P("model", None)),
        "scale": ((64,), P()),
    }
    shapes["out"] = ((64, 64), P("model", None))
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


def best_of(text: str, rounds: int) -> tuple[float, float, float]:
    """Give best processor seconds of: reading, the whole verdict, XLA's parser."""
    from jaxlib import _hlo

    read = verdict = theirs = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        module = hlo.parse(text)
        middle = time.process_time()
        hlo.judge(module, mesh=MESH)
        end = time.process_time()
        read, verdict = min(read, middle - start), min(verdict, end - start)
        del module
        start = time.process_time()
        _hlo.hlo_module_from_text(text)
        theirs = min(theirs, time.process_time() - start)
    return read, verdict, theirs


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


def main(argv: list[str]) -> int:
    """Print the table."""
    options = dict(a.lstrip("-").split("=") for a in argv[1:])
    given = [pathlib.Path(f).read_text() for f in options.get("files", "").split(",") if f]
    layers = int(options.get("layers", 4))
    base = "" if given else compiled_text(layers)[0]
    paired.print_stamp()
    sizes = [0.0] + [float(s) for s in options.get("sizes_mb", "1,4,16").split(",")]
    if not given:  # the first compilation and verdict, with what is done once, are behind us
        hlo.judge(hlo.parse(base), mesh=MESH)
        paired.print_head(["compiled for", "MB", "verdict / compilation", "verdict / XLA's parser"])
        for platform in options.get("platforms", "cpu,tpu,gpu").split(","):
            text, compilation = compiled_text(layers, platform)
            _, verdict, theirs = best_of(text, 3)
            paired.print_row(
                [platform, f"{len(text) / 1e6:.2f}", f"{verdict / compilation:.1%}"]
                + [f"{verdict / theirs:.2f}"]
            )
    paired.print_head(
        ["text, MB", "instructions", "reading / XLA", "full verdict / XLA", "peak memory / text"]
    )
    for text in given or (repeated(base, int(s * 1e6)) if s else base for s in sizes):
        read, verdict, theirs = best_of(text, 3 if len(text) < 8e6 else 1)
        count = sum(len(c.instructions) for c in hlo.parse(text).computations.values())
        peak = f"{peak_bytes(text) / len(text):.1f}" if len(text) < 2e7 else ""
        paired.print_row(
            [f"{len(text) / 1e6:.2f}", f"{count:,}", f"{read / theirs:.2f}"]
            + [f"{verdict / theirs:.2f}", peak]
        )
    if given:
        return 0
    text = repeated(base, 1_000_000)
    times: dict[int, float] = {}
    paired.print_head(["devices", "time / time for the fewest"])
    for devices in map(int, options.get("devices", "8,64,512,4096").split(",")):
        wide = over_devices(text, devices)
        best = float("inf")
        for _ in range(3):
            start = time.process_time()
            hlo.judge(hlo.parse(wide), mesh={"data": devices // 2, "model": 2})
            best = min(best, time.process_time() - start)
        times[devices] = best
        paired.print_row([devices, f"{best / next(iter(times.values())):.2f}"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
