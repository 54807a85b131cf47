"""Text that no partitioner has seen is refused: it would count no collective where there are many."""

import json
import pathlib

import pytest
from raising import raises

from shardrules import errors, hlo, report

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
        with raises(errors.HloError, module=lambda name: name.startswith("jit_")):
            hlo.judge(path.read_text())
        assert not hlo.judge(path.read_text(), unpartitioned=True).is_compiled
    else:
        judgement = hlo.judge(path.read_text())
        assert judgement.verdicts and judgement.is_compiled


SUMMED = f"{SHARDED}\n{T.all_reduce('%x')}"
SPREAD = "%z = f32[] constant(0)\n%b = f32[8] broadcast(%z), dimensions={}"
TWO = f"{SUMMED}\n%t = f32[8] tanh(%r)\n%n = f32[8] negate(%t)"


@pytest.mark.parametrize(
    "entry, header, compiled",
    [
        (TWO, "num_partitions=8", False),
        (f"{SUMMED}\n%n = f32[4,2] reshape(%r)", "num_partitions=8", False),
        (f"{SUMMED}\n{SPREAD}\n%m = f32[8] maximum(%r, %b)", "num_partitions=8", False),
        (TWO, "is_scheduled=true, num_partitions=8", True),
        # What JAX 0.4.28 compiles for CPU has no schedule, and may have nothing to fuse.
        (SUMMED, "num_partitions=8", True),
        (f"{SUMMED}\n%n = f32[8] negate(%r)", "num_partitions=8", True),
        (f"{SUMMED}\n{SPREAD}\n%m = f32[8] sine(%b)", "num_partitions=8", True),
        (f"{TWO}\n%m = f32[8] sine(%t)", "num_partitions=8", True),
        (TWO.replace("f32[8]", "f32[]"), "num_partitions=8", True),
        (f"{TWO}\n%b = f32[4,2] bitcast(%n)", "num_partitions=8", True),
    ],
)
def test_a_text_that_is_not_compiled_says_so_once(entry, header, compiled):
    content = report.content(hlo.judge(T.module(entry, header=header), mesh=T.MESH))
    for write in (report.plain, report.markdown):
        assert write(content).count("not compiled: XLA has not fused") == (not compiled)
    assert json.loads(report.as_json(content))["compiled"] == compiled
