"""Donated memory and transfers: what the assertions find, and what they say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardrules import hlo, testing
from shardrules.costs import accounts, launches, transfers
from shardrules.errors import CostAssertionError, HloError, ShardrulesError

F32 = jax.ShapeDtypeStruct((8,), jnp.float32)
SQUARE = jax.ShapeDtypeStruct((8, 4), jnp.float32)


def step(state, unused, y):
    """One leaf comes back as it was, one in another dtype; an argument is never read."""
    return {"a": state["a"] + 1, "b": (state["b"] + y).astype(jnp.bfloat16)}


def by_path(leaves):
    return {leaf.path: leaf for leaf in leaves}


def lost(program, *args, **kwargs):
    with pytest.raises(CostAssertionError) as caught:
        testing.assert_donated(program, *args, **kwargs)
    return caught.value


def test_donated_memory_that_is_reused_passes():
    f = jax.jit(lambda s, x: ({k: v + x for k, v in s.items()}, x.sum()), donate_argnums=0)
    leaves = by_path(testing.assert_donated(f, {"m": F32, "v": F32}, F32))
    assert {p: (v.status, v.output) for p, v in leaves.items()} == {
        "s['m']": ("aliased", "[0]['m']"),
        "s['v']": ("aliased", "[0]['v']"),
        "x": ("kept", ""),
    }


def test_each_lost_leaf_is_named_with_the_reason():
    f = jax.jit(step, donate_argnums=(0, 1))
    error = lost(f, {"a": F32, "b": F32}, jax.ShapeDtypeStruct((3,), jnp.float32), F32)
    assert str(error) == (
        "2 of 3 donated arrays are not reused for an output (44 B on each device):\n"
        "  state['b'], f32[8], 32 B: output ['b'] is bf16[8]\n"
        "    to do: return it in the argument's dtype, or don't donate it\n"
        "  unused, f32[3], 12 B: the compiled program does not take it\n"
        "    to do: stop passing it, or don't donate it: its memory is freed with the last "
        "reference"
    )
    assert [(leaf.path, leaf.status, leaf.cause) for leaf in error.lost] == [
        ("state['b']", "donor", "dtype"),
        ("unused", "pruned", "unused"),
    ]


def test_an_output_of_the_same_size_in_another_shape_is_reused():
    (leaf,) = testing.assert_donated(jax.jit(lambda s: s.reshape(4, 8), donate_argnums=0), SQUARE)
    assert (leaf.status, leaf.output) == ("aliased", "(all of it)")  # is_deleted agrees: tests/core


@pytest.mark.parametrize(
    "f, args, cause, text",
    [
        (
            lambda s, t: s + t,
            [F32, F32],
            "taken",
            "t, {}: {} has its shape, but reuses the memory of s",
        ),
        (
            lambda s: s.sum(),
            [F32],
            "no output",
            "s, {}: no output is f32[8], and none differs from it only in",
        ),
    ],
)
def test_reasons(f, args, cause, text):
    error = lost(jax.jit(f, donate_argnums=range(len(args))), *args)
    assert [leaf.cause for leaf in error.lost] == [cause]
    assert text.format("f32[8], 32 B", "output (all of it)") in str(error)


def test_another_sharding(cpu_mesh):
    one, other = (NamedSharding(cpu_mesh, s) for s in (P("data"), P()))
    f = jax.jit(lambda s: s + 1, donate_argnums=0, out_shardings=other)
    error = lost(f, jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=one))
    assert [(leaf.cause, leaf.output) for leaf in error.lost] == [("sharding", "(all of it)")]
    assert "out_shardings=" in str(error)


@pytest.mark.parametrize(
    "spec, part, count, sent",
    [
        (P("data"), "f32[32,64]", 4, 24576),
        (P(None, "model"), "f32[128,32]", 2, 16384),
        (P(("data", "model")), "f32[16,64]", 8, 28672),
        (P("data", "model"), "f32[32,32]", 8, 28672),
    ],
)
def test_a_whole_argument_beside_a_sharded_output(platform, spec, part, count, sent):
    split, whole = (NamedSharding(platform[1], s) for s in (spec, P()))

    def arrays(spec):
        shape = (128, 64)
        return [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=s) for s in (spec, split)]

    f = jax.jit(lambda w, g: w - g, donate_argnums=0, out_shardings=split)
    error = lost(f, *arrays(whole))
    assert [leaf.cause for leaf in error.lost] == ["split"]
    shown = str(tuple(spec)).replace(",)", ")")
    assert (
        f"is sharded as P{shown}, the argument as P(); an output sharded as the argument would cost"
        in (str(error))
    )
    assert f"a gather, {sent} B sent\n    to do: give the argument that output's" in str(error)
    by_xla = jax.jit(lambda w, g: w - g, donate_argnums=0)  # JAX itself drops the donation else
    (leaf,) = lost(by_xla.lower(*arrays(whole)).compile().as_text(), paths=["w"]).lost
    assert (leaf.cause, leaf.output) == ("split", "0")
    assert leaf.reason.startswith(
        f"output 0 is {part} on each device, 1/{count} of its size: if it is the same array, "
        "it is sharded"
    )
    # Followed, the memory is reused; where the output is replicated, the gather is that large.
    testing.assert_donated(f, *arrays(split))
    gathering = jax.jit(lambda w, g: w - g, donate_argnums=0, out_shardings=whole)
    testing.assert_donated(gathering, *arrays(whole))
    assert accounts.of(testing.judge(gathering, *arrays(whole))).total.wire_bytes == sent


@pytest.mark.parametrize(
    "shape, cause, text",
    [
        ("f32[16,64]", "split", "output 0 is f32[16,64] on each device, 1/8 of its size: if it is"),
        (
            "f32[512,64]",
            "sharding",
            "output 0 is f32[512,64] on each device, 4 times its size: if it is",
        ),
        ("f32[128]", "no output", "no output is f32[128,64], and none"),
        ("f32[1,64]", "no output", "no output is f32[128,64], and none"),  # of 8 devices
        ("f32[48,64]", "no output", "no output is f32[128,64], and none"),
        ("s32[16,64]", "no output", "no output is f32[128,64], and none"),
    ],
)
def test_an_output_that_may_be_sharded_otherwise(shape, cause, text):
    module = f"""HloModule m, num_partitions=8, buffer_donor={{ (0, {{}}) }}

    ENTRY %main (w: f32[128,64]) -> {shape} {{
      %w = f32[128,64]{{1,0}} parameter(0), sharding={{replicated}}, metadata={{op_name="w"}}
      ROOT %c = {shape} custom-call(%w), custom_call_target="f"
    }}
    """
    (leaf,) = lost(module, paths=["w"]).lost
    assert (leaf.cause, leaf.reason[: len(text)]) == (cause, text)


def test_memory_that_is_passed_twice():
    f = jax.jit(lambda s, k, x: (s + 1, x * 2), donate_argnums=0, static_argnums=1)
    x = jnp.ones(8)
    assert "s, f32[8], 32 B: the same memory is passed as x\n    to do: pass a copy" in str(
        lost(f, x, 3, x)
    )
    with pytest.raises(Exception, match="previously donated in the same call"):
        f(x, 3, x)  # what JAX says when it runs
    testing.assert_donated(f, x, 3, jnp.ones(8))


def test_an_argument_that_ought_to_be_donated():
    f = jax.jit(lambda s, x: ({k: v + x for k, v in s.items()}, x * 2), donate_argnames="x")
    args = {"m": F32, "v": F32}, F32
    testing.assert_donated(f, *args, paths=["x"])
    error = lost(f, *args, paths=["s"])
    assert [(leaf.path, leaf.donated) for leaf in error.lost] == [
        ("s['m']", False),
        ("s['v']", False),
    ]
    testing.assert_donated(f, *args, paths=["s"], allow={"s": "kept for a rollback"})


def test_what_can_not_be_asked():
    f = jax.jit(lambda s: s + 1)
    text = jax.jit(lambda s: s + 1, donate_argnums=0).lower(F32).compile().as_text()
    for said, args, paths in (
        ("no argument of .* is donated; name those", (f, F32), None),
        (r"text does not say .* pass paths=\['state'\]", (text,), None),
        ("no argument of .* is called 'q'; there are s", (text,), ["q"]),
    ):
        with pytest.raises(ShardrulesError, match=said):
            testing.assert_donated(*args, paths=paths)
    assert testing.assert_donated(text, paths=["s"])[0].output == "0"


def test_the_alias_table_is_checked():
    text = jax.jit(lambda s: s + 1, donate_argnums=0).lower(F32).compile().as_text()
    with pytest.raises(HloError, match=r"alias table names \(7,\), which is not a parameter"):
        testing.assert_donated(
            text.replace("(0, {}, may-alias)", "(7, {}, may-alias)"), paths=["s"]
        )


def test_tokens_and_ordered_effects_shift_nothing():
    def f(x, s):
        jax.experimental.io_callback(lambda a: None, None, x.sum(), ordered=True)
        return x * 2, s + 1

    leaves = testing.assert_donated(jax.jit(f, donate_argnums=1), SQUARE, F32)
    assert [(v.path, v.status, v.output) for v in leaves] == [
        ("x", "kept", ""),
        ("s", "aliased", "[1]"),
    ]


# -- transfers ----------------------------------------------------------------------------------


def talks(x):
    def body(c, _):
        y = jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(c.shape, c.dtype), c)
        return c * 2 + y, None

    c, _ = jax.lax.scan(body, x, length=5)
    jax.debug.print("{}", c.sum())
    return c


def test_a_program_that_stays_on_the_device():
    assert testing.assert_no_host_transfers(lambda x: jnp.sin(x) @ x, F32) == []


def test_callbacks_in_loops_come_first():
    with pytest.raises(CostAssertionError) as caught:
        testing.assert_no_host_transfers(talks, F32)
    lines = str(caught.value).splitlines()
    assert lines[0] == "talks talks to the host in 2 places:"
    assert lines[1] == "  callback, 64 B in a loop, 5 times (xla_ffi_python_cpu_callback)"
    assert lines[2].startswith("    at ") and "test_host.py:" in lines[2]
    assert lines[3] == "  callback, 4 B (xla_ffi_python_cpu_callback)"
    assert lines[-1] == (
        "  to do: take it out of the program, move it behind the loop, or pass "
        "allow={'file.py:12': 'why it may stay'}"
    )


def test_a_transfer_that_may_stay():
    with pytest.raises(CostAssertionError) as caught:
        testing.assert_no_host_transfers(talks, F32)
    places = [t.source.partition(" (")[0].rpartition("/")[2] for t in caught.value.transfers]
    allow = dict.fromkeys(places, "the progress bar")
    assert len(testing.assert_no_host_transfers(talks, F32, allow=allow)) == 2
    with pytest.raises(ShardrulesError, match="no longer matches a transfer; remove it"):
        testing.assert_no_host_transfers(talks, F32, allow={"nowhere.py:1": "gone"})


CALLED = """\
HloModule m, is_scheduled=true, frontend_attributes={fingerprint_before_lhs="0"}

%called (a: f32[4]) -> f32[4] {
  %a = f32[4] parameter(0)
  %b = f32[4] copy(%a)
  ROOT %c = f32[4] custom-call(%b), custom_call_target="xla_ffi_python_gpu_callback"
}

%body (p: f32[4]) -> f32[4] {
  %p = f32[4] parameter(0)
  CALL
}

%forever (p: f32[4]) -> pred[] {
  %p = f32[4] parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %e (x: f32[4]) -> f32[4] {
  %x = f32[4] parameter(0)
  ROOT %w = f32[4] while(%x), condition=%forever, body=%body
}
"""


@pytest.mark.parametrize(
    "lines",
    [
        ["%r = f32[4] call(%p), ATTRIBUTES, to_apply=%called"],
        [
            "%s = ((f32[4]), f32[4], s32[]) call-start(%p), ATTRIBUTES, to_apply=%called",
            "%r = f32[4] call-done(%s)",
        ],
        [  # a TPU's SparseCore: what it takes comes later
            "%s = ((), (), s32[]) call-start(), ATTRIBUTES, to_apply=%called",
            "%u = ((f32[4]), f32[4]) call-update(%s, %p)",
            "%r = f32[4] call-done(%u)",
        ],
        [
            "%s = ((f32[4]), f32[4], s32[]) async-start(%p), ATTRIBUTES, calls=%called",
            "%r = f32[4] async-done(%s), calls=%called",
        ],
    ],
    ids=["call", "call-start", "call-update", "async-start"],
)
def test_calls_in_each_form_are_entered(lines):
    lines[-1] = f"ROOT {lines[-1]}"
    text = CALLED.replace("CALL", "\n  ".join(lines), 1)
    on_device = hlo.parse(text.replace(" ATTRIBUTES,", ""))
    callback = ("callback", 32, 1)
    assert [(t.what, t.bytes, t.loop_depth) for t in transfers.read(on_device)] == [callback]
    (loop,) = launches.read(on_device)
    kinds = {"copy": 1, "copy of the predicate": 1, "custom call": 1}
    assert (dict(loop.kinds), loop.copied_bytes) == (kinds, 16)
    on_host = hlo.parse(text.replace("ATTRIBUTES", 'async_execution_thread="host"'))
    found = [(t.what, t.bytes, t.loop_depth) for t in transfers.read(on_host)]
    assert found == [callback, ("host computation", 16, 1)]


DEVICE, HOST = "f32[4]{0}", "f32[4]{0:S(5)}"
BUFFER = "f32[8,4]{1,0:S(5)}"
SENDING = "%s = (f32[4], u32[], token[]) send(%x, %t), channel_id=1"
CALL = 'ROOT %c = f32[4] custom-call(%x), custom_call_target="{}"'


@pytest.mark.parametrize(
    "lines, expected",
    [
        (["ROOT %f = (f32[4], token[]) infeed(%t)"], [("infeed from the host", 16)]),
        (["ROOT %o = token[] outfeed(%x, %t)"], [("outfeed to the host", 16)]),
        ([f"ROOT {SENDING}, is_host_transfer=true"], [("send to the host", 16)]),
        ([f"ROOT {SENDING}"], []),  # to another device
        ([CALL.format("xla_ffi_partitioned_python_gpu_callback")], [("callback", 32)]),
        ([CALL.format("xla_python_gpu_callback")], [("callback", 32)]),
        ([CALL.format("my_kernel")], []),
        (
            [f"%c = ({DEVICE}, {HOST}, u32[]) copy-start(%h)", f"ROOT %d = {DEVICE} copy-done(%c)"],
            [("copy from the host", 16)],
        ),
        ([f"ROOT %c = {HOST} copy(%x)"], [("copy to the host", 16)]),
        ([f"ROOT %c = {HOST} copy(%h)"], []),
        (["ROOT %c = f32[4]{0:S(1)} copy(%x)"], []),  # a TPU's fast memory
        ([f"ROOT %c = {BUFFER} dynamic-update-slice(%b, %u, %i, %i)"], [("copy to the host", 16)]),
    ],
)
def test_every_kind_of_transfer(lines, expected):
    text = "\n  ".join(
        [
            "HloModule m, is_scheduled=true\nENTRY %e (p: f32[4]) -> f32[4] {",
            f"%h = {HOST} parameter(0)",
            f"%b = {BUFFER} parameter(1)",
            "%u = f32[1,4]{1,0} parameter(2)",
            "%i = s32[] parameter(3)",
            "%t = token[] after-all()",
            "%x = f32[4]{0} constant({1,2,3,4})",
            *lines,
        ]
    )
    found = transfers.read(hlo.parse(text + "\n}\n"))
    assert [(t.what, t.bytes) for t in found] == expected
