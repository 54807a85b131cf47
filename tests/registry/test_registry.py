"""Names, patterns, libraries and scopes: which declaration a kernel obeys."""

import ast
import copy
import dataclasses
import enum
import importlib.metadata
import pickle
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from hooks.types.test_pallas_check import out_type
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P
from raising import raises

import shardrules as sr
from shardrules import errors
from shardrules.registry import Registry, suggestions

A, B = sr.per_device("data"), sr.per_device("model")


def test_exact_wins_over_pattern_and_module_narrows():
    own = Registry()
    own.register("splash_*", A)
    own.register("splash_mha", B)
    own.register("jax.ops.*:kernel", A)
    assert own.find("splash_mqa").rule == A
    assert own.find("splash_mha").rule == B
    assert own.find("kernel") is None
    assert own.find("kernel", "jax.ops.tpu").rule == A
    assert own.find("kernel", "mine") is None
    assert own.find("foo") is None


def test_the_users_rule_wins_over_a_librarys():
    own = Registry()
    own.ship("k", A, "lib", "lib's file")
    own.ship("p_*", A, "lib", "lib's file")
    assert own.find("k").rule == A and own.find("k").library == "lib"
    assert own.names() == ()
    own.register("k", B)
    own.register("p_*", B)
    assert own.find("k").rule == B and own.find("p_1").rule == B
    assert own.names() == ("k", "p_*")


def test_two_that_match_and_disagree_show_both_places():
    own = Registry()
    own.register("ring_*", A)
    own.register("*_gather", A)
    assert own.find("ring_gather").rule == A  # they agree
    own.register("*_gather", B, replace=True)
    with pytest.raises(errors.RegistrationError) as caught:
        own.find("ring_gather")
    text = str(caught.value)
    assert text.startswith("two declarations match kernel 'ring_gather' and disagree:\n")
    assert caught.value.name == "ring_gather" and text.count("test_registry.py:") == 2
    assert "register('ring_gather'," in text
    # A library's exact name and the user's pattern: neither is plainly the better one.
    mixed = Registry()
    mixed.ship("ring_gather", A, "lib", "lib's file")
    mixed.register("ring_*", B)
    with raises(errors.RegistrationError, name="ring_gather", places=lambda p: "lib's file" in p):
        mixed.find("ring_gather")


@pytest.mark.parametrize(
    "name, rule, error, message",
    [
        ("", A, errors.RegistrationError, "a kernel name is a non-empty string, not ''"),
        (7, A, errors.RegistrationError, "a kernel name is a non-empty string, not 7"),
        (
            "k",
            7,
            errors.RuleError,
            "7 is not a rule; a rule is shardrules.no_communication or a function",
        ),
        ("k", sr.AxisType, errors.RuleError, "is not a rule"),
        ("k", sr.all_gather, errors.RuleError, "call it, such as all_gather('model')"),
        ("k", sr.linear, errors.RuleError, "linear makes a rule and is not one itself"),
    ],
)
def test_what_cannot_be_registered(name, rule, error, message):
    with pytest.raises(error) as caught:
        Registry().register(name, rule)
    assert message in str(caught.value)


def test_duplicates_are_refused_with_both_places_shown():
    own = Registry()
    own.register("foo bar", A)
    with pytest.raises(errors.RegistrationError) as caught:
        own.register("foo bar", B)
    assert str(caught.value).count("test_registry.py:") == 2
    assert str(caught.value).startswith("kernel 'foo bar' has a rule already:\n")
    assert "keep one, or pass replace=True to the later" in str(caught.value)
    own.register("foo bar", B, replace=True)
    assert own.find("foo_bar").rule == B  # as Pallas compiles the name


RULES = (
    sr.all_gather,
    sr.all_gather_invariant,
    sr.all_reduce,
    sr.all_to_all,
    sr.per_device,
    sr.permute,
    sr.reduce_scatter,
    sr.unreduced,
)


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: sr.all_gather(),
            "all_gather takes the names of one or more different mesh axes, not "
            "nothing; such as all_gather('model')",
        ),
        *(
            (lambda rule=rule: rule(("data", "tensor")), f"not ('data', 'tensor'); {given}")
            for rule in RULES
            for given in [f"pass the axes one by one: {rule.__name__}('data', 'tensor')"]
        ),
        (
            lambda: sr.all_to_all("data", ["tensor"]),
            "not 'data', ['tensor']; pass the axes one by one: all_to_all('data', 'tensor')",
        ),
        (
            lambda: sr.permute({"tensor", "data"}),
            "pass the axes one by one: permute('data', 'tensor')",
        ),
        (lambda: sr.permute(("data", 3)), "not ('data', 3); such as permute('model')"),
        (lambda: sr.permute(("data", "data")), "; such as permute('model')"),
        (lambda: sr.permute(()), "not (); such as permute('model')"),
        (
            lambda: sr.AxisType().vary(("data", "model")),
            "does not name mesh axes; pass the axes one by one: vary('data', 'model')",
        ),
        (lambda: sr.AxisType(["data"]).drop(["data"]), "one by one: drop('data')"),
        (lambda: sr.permute("data", "data"), "not 'data', 'data'"),
        (lambda: sr.all_reduce(3), "not 3"),
        (lambda: sr.outputs(sr.no_communication, 3), "3 is not a rule"),
        (
            lambda: sr.AxisType({"data"}, {"data"}),
            "an axis type can name each mesh axis once, but {data} is in more than one",
        ),
        (lambda: sr.Effect("magic"), "'magic' is not a kind of effect"),
    ],
)
def test_rules_that_cannot_be_made(make, message):
    with pytest.raises(errors.RuleError) as caught:
        make()
    assert message in str(caught.value)


def test_a_bare_name_that_drops_an_axis_is_for_one_function():
    own = Registry()
    own.register("kernel", sr.all_reduce("data"))
    own.register("plain", sr.no_communication)
    assert own.find("kernel", function="a.py:1").rule == sr.all_reduce("data")
    assert own.find("kernel", function="a.py:1")
    assert own.find("plain", function="a.py:1") and own.find("plain", function="b.py:2")
    with pytest.raises(errors.RegistrationError) as caught:
        own.find("kernel", function="b.py:2")
    assert caught.value.name == "kernel" and set(caught.value.places) >= {"a.py:1", "b.py:2"}
    assert "makes outputs invariant, but two different functions have that name" in str(
        caught.value
    )


class _Point:
    """An entry point as importlib.metadata gives them."""

    name, value = "rules", "somelib.rules:RULES"

    class dist:
        name = "somelib"

    def __init__(self, shipped):
        self.load = lambda: shipped


@pytest.mark.parametrize("shipped", [{"lib_kernel": A}, lambda: {"lib_kernel": A}])
def test_libraries_ship_rules_through_entry_points(monkeypatch, shipped):
    asked = []

    def entry_points(*, group):
        asked.append(group)
        return [_Point(shipped)]

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    own = Registry("shardrules.rules")
    found = own.find("lib_kernel")
    assert (found.rule, found.library) == (A, "somelib")
    own.find("lib_kernel")
    assert asked == ["shardrules.rules"]


def test_a_library_whose_rules_cannot_be_loaded(monkeypatch):
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda *, group: [_Point({"lib_kernel": 7})]
    )
    with raises(errors.RegistrationError, library="somelib"):
        Registry("shardrules.rules").find("k")


# Scopes.


def test_scopes_nest_and_end():
    own = Registry()
    own.register("k", A)
    with own.rules({"k": B}):
        assert own.find("k").rule == B
        with own.rules({"*": sr.no_communication}):
            assert own.find("k").rule == sr.no_communication
        assert own.find("k").rule == B
    assert own.find("k").rule == A


def test_threads_keep_their_scopes_apart():
    own = Registry()
    both, found = threading.Barrier(2), {}

    def run(name, rule):
        with own.rules({"k": rule}):
            both.wait(30)
            found[name] = own.find("k").rule
            both.wait(30)

    threads = [threading.Thread(target=run, args=pair) for pair in (("a", A), ("b", B))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"a": A, "b": B} and own.find("k") is None


def test_a_scope_that_closes_around_the_forward_holds_for_the_backward_pass(
    cpu_mesh, declared_only
):
    """Inside the traced function: bwd is traced when the ``with`` has long closed."""
    plain = programs.scale_op("cpu")

    def op(x, w):
        with sr.rules({"scale*": sr.no_communication}):
            return plain(x, w)

    loss = programs.loss_of(op, cpu_mesh, (P("data", None), P()))
    x = jax.random.normal(jax.random.key(0), programs.SHAPE)
    w = jax.random.normal(jax.random.key(1), (1, programs.SHAPE[1]))
    want = jax.grad(lambda x, w: ((x * w) ** 2).sum(), argnums=(0, 1))(x, w)
    for f in (
        jax.grad(loss, argnums=(0, 1)),
        jax.jit(jax.grad(loss, argnums=(0, 1))),
        jax.grad(jax.jit(loss), argnums=(0, 1)),
    ):
        for got, one in zip(f(x, w), want):
            np.testing.assert_allclose(got, one, rtol=1e-5)
    with pytest.raises(errors.UnknownKernelError):
        programs.loss_of(plain, cpu_mesh, (P("data", None), P()))(x, w)


def test_one_jitted_function_in_two_scopes(cpu_mesh, declared_only):
    """The scope is part of jit's trace key; the same declarations again are the same scope."""
    types = []

    @jax.jit
    def f(x):
        def local(x):
            out = programs.copy_op("cpu")(x)
            types.append(set(jax.typeof(out).manual_axis_type.varying))
            return out

        return jax.shard_map(
            local, mesh=cpu_mesh, in_specs=P("data"), out_specs=P("data", "model")
        )(x)

    x = jnp.ones((8, 4))
    for rule in (sr.no_communication, sr.per_device("model"), sr.no_communication):
        with sr.rules({"copy_kernel": rule}):
            f.lower(x)
    assert types == [{"data"}, {"data", "model"}]  # what was traced under the first holds again
    with pytest.raises(errors.UnknownKernelError):
        f.lower(x)


def test_rules_of_the_whole_table(cpu_mesh, declared_only):
    """Types of x, which varies over data, and of a second output where there is one."""

    def typed(rule, spec=P("data"), out_spec=P(("data", "model"))):
        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...]

        op = programs.copy_op("cpu", kernel=rule(kernel))
        return out_type(op, cpu_mesh, spec, [(8, 4)], out_spec)

    for rule in (sr.all_gather, sr.reduce_scatter, sr.permute, sr.all_to_all, sr.per_device):
        assert typed(rule("model")) == {"data", "model"}
        assert typed(rule("data")) == {"data"}
    for rule in (sr.all_reduce, sr.all_gather_invariant):
        assert typed(rule("data"), out_spec=P()) == set()
        assert typed(rule("model")) == {"data"}
    with raises(errors.RuleError, kernel="kernel"):
        typed(sr.all_gather("nosuch"))
    with pytest.raises(
        errors.RuleError,
        match="its inputs vary over {data}; a sum over an axis along which nothing varies",
    ):
        typed(sr.unreduced("model"))


def test_unreduced_and_linear(cpu_mesh, hooks):
    """A partial sum that a kernel makes, that a linear kernel passes on, and that others refuse."""

    def scale(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    def call(x, rule):
        return pl.pallas_call(
            rule(lambda *refs: scale(*refs)),
            interpret=True,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        )(x)

    seen = []

    def local(x, second):
        partial = call(x, sr.unreduced("data"))
        seen.append(jax.typeof(partial).manual_axis_type)
        out = call(partial, second)
        seen.append(jax.typeof(out).manual_axis_type)
        return jax.lax.psum(out, "data")

    def run(second):
        f = jax.shard_map(
            lambda x: local(x, second), mesh=cpu_mesh, in_specs=P("data"), out_specs=P()
        )
        return jax.jit(f)(np.arange(32, dtype=np.float32).reshape(8, 4))

    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    np.testing.assert_allclose(run(sr.linear(sr.no_communication)), 4 * x.reshape(4, 2, 4).sum(0))
    assert all(set(t.unreduced) == {"data"} and not t.varying for t in seen)
    with pytest.raises(errors.RuleError) as caught:
        run(sr.no_communication)
    assert (
        "is unreduced over {data}, and the rule no_communication does not say that the kernel "
        "is linear"
    ) in str(caught.value)
    assert "shardrules.linear(no_communication)" in str(caught.value)


def test_axis_types_are_values():
    one = sr.AxisType({"data", "model"}, "expert")
    assert one is sr.AxisType(frozenset(["model", "data"]), ("expert",))
    assert copy.deepcopy(one) is pickle.loads(pickle.dumps(one)) is one
    assert repr(sr.AxisType("data")) == (
        "AxisType(varying=frozenset({'data'}), unreduced=frozenset(), reduced=frozenset())"
    )
    for change in (lambda: setattr(one, "varying", frozenset()), lambda: delattr(one, "varying")):
        with pytest.raises(AttributeError, match="an AxisType can't be changed"):
            change()


def test_a_rule_that_raises_names_the_kernel_and_the_rule(cpu_mesh, hooks):
    def odd(context):
        return [context.inputs[7]]

    sr.register("copy_kernel", odd)
    with pytest.raises(errors.RuleError) as caught:
        out_type(programs.copy_op("cpu"), cpu_mesh, P("data"), [programs.SHAPE])
    assert caught.value.kernel == "copy_kernel" and "odd" in repr(caught.value.rule)
    said = str(caught.value)
    assert re.search(r"raised IndexError: .*\n  rule declared at .* with 1 inputs", said, re.DOTALL)
    assert isinstance(caught.value.__cause__, IndexError)


def test_a_rule_of_a_scope_names_the_line_of_the_with():
    own = Registry()
    with own.rules({"k": A}):
        found = own.find("k")
    line = test_a_rule_of_a_scope_names_the_line_of_the_with.__code__.co_firstlineno + 2
    assert found.where == f"{__file__}:{line}"


def test_the_same_line_that_runs_again_takes_its_own_place():
    """As a notebook's cell does."""
    own = Registry()
    for _ in range(2):
        own.register("k", A)
        own.register("f", lambda context: [context.union])
        scale = "data"
        own.register("g", lambda context, scale=scale: [context.union.vary(scale)])
    with raises(errors.RegistrationError, name="k"):
        own.register("k", A)
    with raises(errors.RegistrationError, name="l"):
        for rule in (A, B):
            own.register("l", rule)
    with raises(errors.RegistrationError, name="n"):
        for axis in ("data", "model"):
            own.register("n", lambda context, axis=axis: [context.union.vary(axis)])
    with raises(errors.RegistrationError, name="o"):
        for axis in ("data", "model"):
            own.register("o", lambda context, *, axis=axis: [context.union.vary(axis)])


def over(axes):
    return lambda context: [context.union.vary(*np.ravel(axes))]


def over_later_ones(is_later=False):
    rule = lambda context: [context.union.vary(*axes)]  # noqa: E731
    if is_later:
        axes = ("data",)
    return rule


@dataclasses.dataclass
class Over:
    axes: np.ndarray

    def __call__(self, context):
        return [context.union.vary(*self.axes)]


def test_closures_with_arrays_or_unbound_names_are_compared_when_their_line_runs_again():
    """NumPy's error about an array's truth value, or "Cell is empty", came from register."""
    own = Registry()
    for _ in range(2):
        own.register("array", over(np.array(["data", "model"])))
        own.register("nested", over([np.array(["data"]), np.array(["model"])]))
        own.register("unbound", over_later_ones())
        own.register("object", Over(np.array(["data", "model"])))
    for make in (over, Over):
        with raises(errors.RegistrationError, name="other"):
            for axes in (["data", "model"], ["model", "data"]):
                own.register("other", make(np.array(axes)))


def test_what_can_not_be_decorated_says_what_to_write():
    with pytest.raises(errors.RegistrationError, match="without a further pair of parentheses"):

        @sr.no_communication()
        def kernel(x, o):
            pass

    with pytest.raises(errors.RegistrationError, match="above the method or function that runs"):

        @sr.no_communication
        class Kernel:
            pass


@pytest.mark.parametrize("around", ["{}", "jvp({})", "transpose(jvp({}))", "vmap({})"])
def test_a_kernels_name_in_an_op_name_is_its_scope_also_in_a_gradient(around):
    registry = sr.Registry()
    registry.register("flash", sr.no_communication)
    assert registry.find_by_op_name(f"jit(step)/{around.format('flash')}/pallas_call")
    # The function that is called so may run another kernel.
    assert not registry.find_by_op_name(f"jit(step)/{around.format('jit(flash)')}/pallas_call")


def test_one_axis_of_an_effect_is_no_word_of_letters():
    assert sr.registry.axistypes.Effect("join", "data").axes == ("data",)


def test_a_member_of_an_enum_names_an_axis():
    class Axis(enum.Enum):
        DATA = 1

    assert sr.AxisType([Axis.DATA]).varying == {Axis.DATA}
    for wrong in (None, "", 3, True):
        with raises(errors.RuleError, axes=[wrong]):
            sr.AxisType([wrong])


@pytest.mark.parametrize(
    ("kernel", "written"),
    [
        ("fused-moe-128-256", "fused-moe-*"),
        ("gmm_bm128_bn256", "gmm_bm*_bn*"),
        ("matmul_128x256x64_f32", "matmul_*_f32"),
        ("128_64_gemm", "*_gemm"),
        ("rows 512/tm8", "rows_*_tm*"),
        ("flash_attention_v2_fp8_bf16", ""),  # another kernel each
        ("pass_2", ""),
        ("gemm_sm90", ""),
        ("conv3d", ""),
        ("k128", ""),  # k* is nearly everything
        ("128-256", ""),
        ("kernel", ""),
    ],
)
def test_a_line_to_type_for_a_kernel_of_many_block_sizes_is_a_pattern(kernel, written):
    assert suggestions.pattern(kernel) == written
    lines = suggestions.lines(kernel, "of.module")
    assert len(lines) == (2 if written else 1)
    for line in lines:  # each is enough, and holds for this kernel alone
        own = Registry()
        name = ast.literal_eval(re.search(r"register\(('.*?'), ", line)[1])
        own.register(name, sr.no_communication)
        assert own.find(kernel, "of.module") is not None, line
        assert own.find("another_kernel", "of.module") is None
    assert not written or lines[1] == (
        f"shardrules.register('of.module:{written}', shardrules.no_communication)"
        "  # of all block sizes"
    )


def test_a_line_to_type_matches_a_kernel_whose_name_looks_like_a_pattern():
    (line,) = suggestions.lines("k", "__main__")  # which a test imports by another name
    assert line == "shardrules.register('k', shardrules.no_communication)"
    (line,) = suggestions.lines("k[a]*", "m")
    assert line == "shardrules.register('m:k_a__', shardrules.no_communication)"
    own = Registry()
    own.register("m:k_a__", sr.no_communication)
    assert own.find("k[a]*", "m") is not None
