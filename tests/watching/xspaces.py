"""Profiles of devices that are not here, written by XLA's schema of XSpace."""

import jax

try:
    from jaxlib._hlo import hlo_module_from_text
except ImportError:  # to JAX 0.9
    from jaxlib._jax import hlo_module_from_text


def field(number, data):
    """A field of bytes, as protocol buffers write it."""
    size, length = len(data), b""
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + data


def written(folder, host, text, program, planes, shardings=()):
    """Write an .xplane.pb: a program's HLO, its parameters' OpShardings, and planes as text."""
    proto = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    proto += b"".join(field(14, sharding) for sharding in shardings)
    stat = field(6, field(1, proto))
    metadata = field(2, f"{program}(7)".encode()) + field(5, stat)
    plane = field(2, b"/host:metadata") + field(4, field(2, metadata))
    times = jax.profiler.ProfileData.text_proto_to_serialized_xspace(planes)
    path = folder / f"{host}.xplane.pb"
    path.write_bytes(field(1, plane) + times)
    return path


def plane(name, lines, names, stats=()):
    """A plane: lines of (event, start, duration, stats) in microseconds, each event by its name."""
    ids = {event: number for number, event in enumerate(names, 1)}
    stat_ids = {stat: number for number, stat in enumerate(stats, 1)}

    def event(one):
        told = "".join(
            f'stats {{ metadata_id: {stat_ids[k]} str_value: "{v}" }}' for k, v in one[3].items()
        )
        return (
            f"events {{ metadata_id: {ids[one[0]]} offset_ps: {one[1]}000000 "
            f"duration_ps: {one[2]}000000 {told} }}"
        )

    text = "".join(
        f'lines {{ name: "{line}" {" ".join(map(event, events))} }} '
        for line, events in lines.items()
    )
    for key, known in (("event_metadata", ids), ("stat_metadata", stat_ids)):
        text += "".join(
            f'{key} {{ key: {n} value {{ id: {n} name: "{name}" }} }} ' for name, n in known.items()
        )
    return f'planes {{ name: "{name}" {text} }} '


ASYNC = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0}, f32[8]{0})->f32[8]{0}}, num_partitions=2

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(f32[] %a, f32[] %b)
}

ENTRY %main (p: f32[8], q: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0), sharding={devices=[2]<=[2]}
  %q = f32[8]{0} parameter(1), sharding={devices=[2]<=[2]}
  %all-reduce-start = f32[8]{0} all-reduce-start(f32[8]{0} %p), channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true, to_apply=%add
  %work = f32[8]{0} multiply(f32[8]{0} %q, f32[8]{0} %q)
  %all-reduce-done = f32[8]{0} all-reduce-done(f32[8]{0} %all-reduce-start)
  ROOT %result = f32[8]{0} add(f32[8]{0} %all-reduce-done, f32[8]{0} %work)
}
"""


def on_gpu(compute_start, compute_duration):
    """One step in which NCCL's kernel runs from 10 to 40 on a stream of its own."""
    stats = ("hlo_op", "hlo_module")

    def op(name):
        return {"hlo_op": name, "hlo_module": "jit_step"}

    return plane(
        "/device:GPU:0",
        {
            "Stream #1": [("nccl", 10, 30, op("all-reduce-start"))],
            "Stream #2": [("kernel", compute_start, compute_duration, op("work"))],
        },
        ["nccl", "kernel"],
        stats,
    )
