"""Text that no partitioner has seen is refused: it would count no collective where there are many."""

import pathlib

import pytest

from shardrules import errors, hlo

from . import text as T

DATA = pathlib.Path(__file__).parent / "data"
SHARDED = T.parameter(T.DATA)
EARLY = {
    "a constraint": f'{SHARDED}\n%y = f32[8] custom-call(%x), custom_call_target="Sharding", '
    f"sharding={T.BOTH}\n%z = f32[8] negate(%y)",
    "an annotation": f"{SHARDED}\n%y = f32[8] negate(%x), sharding={T.BOTH}",
    "one after metadata": f'{SHARDED}\n%y = f32[8] negate(%x), metadata={{op_name="n"}}, '
    f"sharding={T.BOTH}",
    "the border of shard_map": f"{SHARDED}\n%y = f32[2] custom-call(%x), custom_call_target="
    '"SPMDFullToShardShape", sharding={manual}\n%r = f32[2] all-reduce(%y), channel_id=1, '
    "replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%add",
    "the border of Shardy's": f"{SHARDED}\n%y = f32[2] custom-call(%x), "
    'custom_call_target="xla.sdy.GlobalToLocalShape"\n%z = f32[2] negate(%y)',
    "sharded inputs alone": f"{SHARDED}\n%y = f32[8] negate(%x)",
}


@pytest.mark.parametrize("name", EARLY)
@pytest.mark.parametrize("header", ["num_partitions=8", "is_scheduled=false, num_partitions=8", ""])
def test_what_is_not_partitioned_is_refused(name, header):
    text = T.module(EARLY[name], header=header).replace("test, \n", "test\n")
    with pytest.raises(errors.HloError) as caught:
        hlo.judge(text)
    message = str(caught.value)
    assert "module 'test' is not partitioned yet, or may not be (" in message
    assert "its as_text(), or the file of --xla_dump_to that ends in after_opt" in message
    assert hlo.judge(text, unpartitioned=True) is not None  # the logical account's


LATE = {
    "scheduled": (EARLY["an annotation"], "is_scheduled=true, num_partitions=8"),
    "a collective": (f"{SHARDED}\n{T.all_reduce('%x')}", "num_partitions=8"),
    "a layout's copy": (f"{SHARDED}\n%y = f32[8] copy(%x)", "num_partitions=8"),
    "a callback's place": (
        f'{SHARDED}\n%y = f32[8] custom-call(%x), custom_call_target="c", '
        "sharding={maximal device=0}\n%z = f32[8] copy(%y)",
        "num_partitions=8",
    ),
    "nothing to partition": ("%x = f32[8] parameter(0)\n%y = f32[8] negate(%x)", "replica_count=8"),
    "one device": (f"{T.parameter('{replicated}')}\n%y = f32[8] negate(%x)", "num_partitions=1"),
}


@pytest.mark.parametrize("name", LATE)
def test_what_is_partitioned_is_judged(name):
    entry, header = LATE[name]
    assert len(hlo.judge(T.module(entry, header=header)).verdicts) == (name == "a collective")


@pytest.mark.parametrize("path", sorted(p for p in DATA.glob("*.hlo")), ids=lambda p: p.stem)
def test_real_programs(path):
    if "before" in path.stem:
        with pytest.raises(errors.HloError, match="is not partitioned yet"):
            hlo.judge(path.read_text())
    else:
        assert hlo.judge(path.read_text()).verdicts
