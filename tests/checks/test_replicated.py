"""What is called replicated: a program's outputs, and the arrays that it is given."""

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from hlo import text as T
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from raising import raises

from shardrules import errors, testing


def program(mesh, f, out_specs, in_specs=P("data"), check_vma=False):
    inner = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    return jax.jit(inner), programs.structs(mesh, ((8, 128), P("data")))


def test_a_missing_psum_and_wrong_out_specs_are_named(platform):
    def f(x):
        return {"loss": (x * x).sum(), "mean": jax.lax.pmean(x, "data"), "y": jnp.sin(x)}

    out = {"loss": P(), "mean": P(), "y": P(None, None)}
    g, args = program(platform[1], f, out)
    with pytest.raises(errors.ReplicationAssertionError) as caught:
        testing.assert_outputs_replicated(g, *args)
    assert [output.name for output in caught.value.outputs] == ["output['loss']", "output['y']"]
    title, loss, because, advice, y, *_ = str(caught.value).splitlines()
    assert title == (
        "2 of 3 outputs are not proven equal where their shardings call them replicated (they may "
        "still be equal):"
    )
    assert loss == "  output ['loss'], f32[]: called replicated over {data}, not proven equal"
    assert because.startswith("    because parameter 0")
    assert advice == (
        "    to do: reduce over 'data' what differs in it before it is returned (jax.lax.pmean "
        "for a mean, jax.lax.psum for a sum; for a weight, reduce its gradient, not the "
        "weight), or name the axes in its out_specs"
    )
    assert y.startswith("  output ['y'], f32[2,128]: ")


def test_what_is_reduced_or_sharded_as_specified_passes(platform):
    def f(x):
        return jax.lax.psum((x * x).sum(), "data"), jnp.sin(x)

    for check_vma in (False, True):
        g, args = program(platform[1], f, (P(), P("data")), check_vma=check_vma)
        testing.assert_outputs_replicated(g, *args)
        testing.assert_outputs_replicated(g.lower(*args).compile())


def test_an_output_that_varies_over_one_of_two_axes(cpu_mesh):
    f = lambda x: x * (1 + jax.lax.axis_index("model"))  # noqa: E731
    g, args = program(cpu_mesh, f, P("data"))
    of_model = lambda outputs: ["{model}" in one.what for one in outputs] == [True]  # noqa: E731
    with raises(errors.ReplicationAssertionError, outputs=of_model):
        testing.assert_outputs_replicated(g, *args)
    g, args = program(cpu_mesh, f, P(("data", "model")))
    testing.assert_outputs_replicated(g, *args)


def test_tokens_of_ordered_effects_are_no_outputs():
    from jax.experimental import io_callback

    def f(x):
        io_callback(lambda _: None, None, x, ordered=True)
        return x + 1

    judgement = testing.assert_outputs_replicated(jax.jit(f), jnp.ones(3))
    assert [str(o.shape) for o in judgement.outputs] == ["token[]", "f32[3]"]


def test_outputs_of_every_form_are_matched(cpu_mesh):
    """Forwarded, dropped and constant ones; keys, whose data has one more dimension."""
    x, y = programs.structs(cpu_mesh, ((8, 16), P()), ((8, 16), P("data")))
    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=x.sharding)
    for f, args, count in (
        (lambda x, y: (x, y + 1, x), (x, y), 3),
        (lambda x: None, (x,), 0),
        (lambda x, y: y.sum(), (x, y), 1),
        (jax.random.split, (key,), 1),
        (lambda x: (jnp.ones(3), x.shape[0]), (x,), 2),
    ):
        assert len(testing.assert_outputs_replicated(jax.jit(f), *args).outputs) == count


def entry(*lines):
    return T.module("\n".join([T.parameter(T.DATA), *lines]))


def test_text_needs_the_outputs_shardings():
    text = entry("ROOT %y = f32[8] add(%x, %x)")
    with pytest.raises(errors.ShardrulesError) as caught:
        testing.assert_outputs_replicated(text)
    assert str(caught.value) == (
        "<text> does not say how its outputs are sharded; pass the jax.stages.Compiled (or the "
        "function with its arguments), or output_shardings=['{replicated}', ...]"
    )
    testing.assert_outputs_replicated(text, output_shardings=[T.DATA])
    testing.assert_outputs_replicated(text, output_shardings=["{manual}"])  # promises nothing
    with pytest.raises(errors.ReplicationAssertionError) as caught:
        testing.assert_outputs_replicated(text, output_shardings=["{replicated}"])
    _, output, _, advice = str(caught.value).splitlines()
    assert output == (
        "  the output, f32[8]: called equal on devices {0,1,2,3,4,5,6,7}, not proven equal"
    )
    assert advice.startswith("    to do: reduce it before it is returned, or declare in out_specs")
    with raises(errors.HloError, module="test"):
        testing.assert_outputs_replicated(text, output_shardings=["{replicated}"] * 2)
    with raises(errors.ShardrulesError, sharding="{devices=[3]<=[3]}"):
        testing.assert_outputs_replicated(text, output_shardings=["{devices=[3]<=[3]}"])


def test_an_opaque_call_in_the_way_is_named():
    call = 'ROOT %k = f32[8] custom-call(%x), custom_call_target="mine"'
    text = entry(call).replace(T.DATA, "{replicated}")
    with pytest.raises(errors.ReplicationAssertionError) as caught:
        testing.assert_outputs_replicated(text, output_shardings=["{replicated}"], mesh=T.MESH)
    (output,) = caught.value.outputs
    assert output.because.startswith("custom call 'mine' has no rule")
    assert output.advice.startswith("shardrules.register('mine', shardrules.no_communication), if")
    unknown = T.module("%x = f32[8] parameter(0)\nROOT %y = f32[8] add(%x, %x)")
    with pytest.raises(errors.ReplicationAssertionError) as caught:
        testing.assert_outputs_replicated(unknown, output_shardings=["{replicated}"])
    (output,) = caught.value.outputs
    assert output.advice.startswith("pass the jax.stages.Compiled, or give its arguments shardings")
    tagged = call + (
        ', frontend_attributes={shardrules.kernel="mine",shardrules.effects="local",'
        'shardrules.status="declared"}'
    )
    text = entry(tagged).replace(T.DATA, "{replicated}")
    testing.assert_outputs_replicated(text, output_shardings=["{replicated}"])
    with pytest.raises(errors.ReplicationAssertionError) as caught:
        testing.assert_outputs_replicated(text, output_shardings=["{replicated}"], strict=True)
    assert caught.value.outputs == ()
    assert str(caught.value).splitlines()[1:] == [
        "  the output, f32[8]: proven equal, but the proof rests on declared rules of 'mine'",
        "    to do: let the audit prove it, or leave out strict=True",
    ]


# Arrays.


def array(mesh, spec, change=lambda device, data: data, value=None):
    """An array whose shards are changed device by device."""
    value = np.arange(16, dtype=np.float32).reshape(4, 4) if value is None else value
    sharding = NamedSharding(mesh, spec)
    shards = [
        jax.device_put(change(n, np.array(value[index])), device)
        for n, (device, index) in enumerate(sharding.devices_indices_map(value.shape).items())
    ]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, shards)


def changed(*devices, to):
    def change(number, data):
        if number in devices:
            data.reshape(-1)[0] = to
        return data

    return change


def test_equal_shards_pass_nan_included(cpu_mesh):
    nan = np.full((4, 4), np.nan, np.float32)
    tree = {
        "a": array(cpu_mesh, P()),
        "b": [array(cpu_mesh, P("data"), value=nan)],
        "c": 3,
        "d": np.ones(3),
        "e": jax.random.key(0),
        "f": None,
        "g": jnp.ones((2,), jnp.int4),
    }
    testing.check_replicated_inputs(tree, tree, key=tree)


@pytest.mark.parametrize(
    "spec, devices, axes, classes",
    [
        (P("data"), (3,), "model", "{2} | {3}"),
        (P(), (3,), "data, model", "{0, 1, 2, 4, 5, 6, 7} | {3}"),
        (P(), (0, 2, 4, 6), "model", "{0, 2, 4, 6} | {1, 3, 5, 7}"),
        (P("model"), (4, 6), "data", "{0, 2} | {4, 6}"),
    ],
)
def test_shards_that_differ_are_named(cpu_mesh, spec, devices, axes, classes):
    bad = array(cpu_mesh, spec, changed(*devices, to=99))
    with pytest.raises(errors.ReplicationAssertionError) as caught:
        testing.check_replicated_inputs({"ok": array(cpu_mesh, spec)}, {"w": [bad]})
    text = str(caught.value)
    assert text.startswith(
        "arrays differ between devices on which they are equal according to their shardings:\n"
        f"  argument 1['w'][0], float32[4, 4]: called replicated over {{{axes}}}, sharding "
        "NamedSharding("
    )
    (leaf,) = caught.value.leaves
    assert leaf.splitlines()[1].startswith(f"    the data of devices {classes} differ; 1 of ")
    with raises(errors.ReplicationAssertionError, leaves=first("argument 'w', float32[4, 4]")):
        testing.check_replicated_inputs(w=bad)


def first(name):
    """Ask for one array, by its name and type."""
    return lambda leaves: [leaf.partition(": ")[0].strip() for leaf in leaves] == [name]


@pytest.mark.parametrize("one, other", [(0.0, -0.0), (np.nan, 0.0), (np.nan, 1.0)])
def test_bits_are_compared(cpu_mesh, one, other):
    bad = array(cpu_mesh, P(), changed(5, to=other), np.full((4,), one, np.float32))
    with raises(errors.ReplicationAssertionError, leaves=first("argument 0, float32[4]")):
        testing.check_replicated_inputs(bad)


def test_keys_are_compared_by_their_data(cpu_mesh):
    sharding = NamedSharding(cpu_mesh, P())
    data = [
        jax.device_put(np.array([0, n == 7], np.uint32), d)
        for n, d in enumerate(cpu_mesh.devices.flat)
    ]
    key = jax.random.wrap_key_data(jax.make_array_from_single_device_arrays((2,), sharding, data))
    with raises(errors.ReplicationAssertionError, leaves=first("argument 0, uint32[2]")):
        testing.check_replicated_inputs(key)


def test_a_program_with_wrong_out_specs_makes_such_an_array(cpu_mesh):
    f = jax.shard_map(
        lambda x: x.sum(keepdims=True),
        mesh=cpu_mesh,
        in_specs=P("data"),
        out_specs=P(),
        check_vma=False,
    )
    with raises(errors.ReplicationAssertionError, leaves=first("argument 0, float32[1]")):
        testing.check_replicated_inputs(jax.jit(f)(jnp.arange(8.0)))
