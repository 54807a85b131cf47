"""Builds small HLO modules for tests, in the notation that XLA prints."""

MESH = {"data": 4, "model": 2}
DATA = "{devices=[4,1,2]<=[8] last_tile_dim_replicate}"
MODEL = "{devices=[2,1,4]<=[4,2]T(1,0) last_tile_dim_replicate}"
BOTH = "{devices=[8]<=[8]}"
ALL = "{{0,1,2,3,4,5,6,7}}"
OVER_MODEL = "{{0,1},{2,3},{4,5},{6,7}}"
OVER_DATA = "{{0,2,4,6},{1,3,5,7}}"

REGIONS = """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%max (a.1: f32[], b.1: f32[]) -> f32[] {
  %a.1 = f32[] parameter(0)
  %b.1 = f32[] parameter(1)
  ROOT %most = f32[] maximum(%a.1, %b.1)
}

%addi (a.2: s32[], b.2: s32[]) -> s32[] {
  %a.2 = s32[] parameter(0)
  %b.2 = s32[] parameter(1)
  ROOT %sumi = s32[] add(%a.2, %b.2)
}

"""


def module(entry, before="", header="is_scheduled=true, num_partitions=8", regions=REGIONS):
    """A module whose ENTRY holds the given lines; the last one is ROOT if none is marked."""
    lines = [line.strip() for line in entry.strip().splitlines()]
    if not any(line.startswith("ROOT") for line in lines):
        lines[-1] = "ROOT " + lines[-1]
    body = "\n".join("  " + line for line in lines)
    return f"HloModule test, {header}\n\n{regions}{before}ENTRY %main () -> f32[] {{\n{body}\n}}\n"


def parameter(sharding, shape="f32[8]", name="x", number=0):
    """An entry parameter."""
    return (
        f'%{name} = {shape} parameter({number}), sharding={sharding}, metadata={{op_name="{name}"}}'
    )


def all_reduce(operand, groups=OVER_MODEL, shape="f32[8]", name="r", apply="add", extra=""):
    """An all-reduce as XLA's SPMD partitioner makes them."""
    return (
        f"%{name} = {shape} all-reduce({operand}), channel_id=1, replica_groups={groups}, "
        f"use_global_device_ids=true, to_apply=%{apply}{extra}"
    )
