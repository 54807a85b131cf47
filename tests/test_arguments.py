"""Every public function with arguments of wrong kinds: it says what was due, and never passes.

The table is drawn from the public names: a name that is not in it fails a test of its own.
"""

import inspect
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import text as T
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules import aot, errors, hlo, registry, report, testing

MODULES = (shardrules, testing, aot, hlo, report, registry)


class Odd:
    """An object of nobody's."""


def op(x):
    return x * 2


X = np.ones((8, 16), np.float32)
WRONG = {
    "None": None,
    "an int": -7,
    "a float": 1.5,
    "a bool": True,
    "a str": "dta",
    "an empty str": "",
    "bytes": b"x",
    "a list": [["data"]],
    "a dict": {1: 2},
    "a set": {3},
    "an array": np.ones((2, 3, 4), np.float32),
    "a jax array": jnp.ones(3),
    "a shape": jax.ShapeDtypeStruct((2,), np.float32),
    "a jaxpr": jax.make_jaxpr(op)(X),
    "a class": Odd,
    "a module": os,
    "a spec": P("data"),
    "a device": jax.devices()[0],
    "an exception": ValueError("x"),
    "an odd object": Odd(),
    "no function of this": lambda: 1,
}
TEXT = T.module("\n".join([T.parameter(T.DATA), T.all_reduce("%x")]))  # redundant
JUDGED = hlo.judge(TEXT, mesh=T.MESH)
CONTENT = report.content(JUDGED)
VERDICT = JUDGED.verdicts[0]
CONTEXT = registry.RuleContext("k", (registry.AxisType("data"),), 1, ("data", "model"))


def entered(make):
    """A function that makes a context manager, entered."""

    def enter(*args, **kwargs):
        with make(*args, **kwargs):
            pass

    return enter


def in_shard_map(f):
    def run(*args):
        mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
        body = jax.shard_map(
            lambda x: f(x, *args), mesh=mesh, in_specs=P("data"), out_specs=P(("data", "model"))
        )
        return jax.eval_shape(body, X)

    return run


OWN = registry.Registry()
AXES = {
    n: (getattr(shardrules, n), ["data"], {}) for n in shardrules._NAMES["registry.builtin"].split()
}
RULES = {"linear", "no_communication", "outputs"}
ON_TEXT = {"mesh": T.MESH, "registry": OWN}
# From a public name to what is called, with arguments that it takes; "?" among the positional ones
# marks those that are left as they are.
TABLE = {
    **{n: AXES[n] for n in AXES if n not in RULES},
    "linear": (shardrules.linear, [shardrules.no_communication], {}),
    "no_communication": (shardrules.no_communication, [op], {}),
    "outputs": (shardrules.outputs, [shardrules.no_communication], {}),
    "AxisType": (registry.AxisType, ["data"], {"unreduced": ["model"], "reduced": []}),
    "AxisType.vary": (registry.AxisType("data").vary, ["model"], {}),
    "AxisType.drop": (registry.AxisType("data").drop, ["model"], {}),
    "Effect": (registry.Effect, ["exchange", ("data",)], {}),
    "Registry": (registry.Registry, [], {"prover": "", "entry_points": "g", "shipped": {}}),
    "Registry.find": (OWN.find, ["k"], {}),
    "Rule": (registry.Rule, ["r", lambda ctx: ([], []), None], {"named_axes": ()}),
    "register": (registry.Registry().register, ["k", op], {"replace": True}),
    "rules": (entered(OWN.rules), [{"k": shardrules.no_communication}], {}),
    "normalise": (registry.normalise, ["k"], {}),
    "already_summed": (in_shard_map(shardrules.already_summed), ["model"], {}),
    "vary": (in_shard_map(shardrules.vary), ["model"], {}),
    "place_casts": (shardrules.place_casts, [op], {}),
    "profile": (shardrules.profile, ["."], {"strict": True, "allow": {}, "hlo": "."}),
    "explain": (lambda f: shardrules.explain(f, X), [op], {}),
    "scan_calls": (lambda f: shardrules.scan_calls(f, X), [op], {}),
    "install": (
        entered(shardrules.install),
        [],
        {"unknown": "error", "prove": True, "casts": "late"},
    ),
    "watch": (entered(shardrules.watch), [], {"strict": True, "allow": {}}),
    "assert_same_rules": (shardrules.assert_same_rules, [], {"timeout_s": 1.0}),
    "account": (testing.account, [TEXT], {"level": "compiled", **ON_TEXT}),
    "assert_budget": (testing.assert_budget, [TEXT, "b.toml"], {"strict": True, **ON_TEXT}),
    "assert_cheapest_casts": (lambda f: testing.assert_cheapest_casts(f, X), [op], {}),
    "assert_collectives": (
        testing.assert_collectives,
        [TEXT],
        {"expect": {"all-reduce(model)": 1}, "level": "compiled", "platform": "cpu", **ON_TEXT},
    ),
    "assert_donated": (testing.assert_donated, [TEXT], {"paths": ["x"], "allow": {"x": "why"}}),
    "assert_loop": (
        testing.assert_loop,
        [TEXT],
        {"max_launches_per_iteration": 3, "trip_count": 3, "at": "a.py", "platform": "cpu"},
    ),
    "assert_no_defensive_psum": (
        testing.assert_no_defensive_psum,
        [TEXT],
        {"strict": True, "cheapest": True, "allow": {}, **ON_TEXT},
    ),
    "assert_no_host_transfers": (testing.assert_no_host_transfers, [TEXT], {"allow": {}}),
    "assert_no_large_constants": (testing.assert_no_large_constants, [TEXT], {"max_bytes": 8}),
    "assert_offloaded": (testing.assert_offloaded, [TEXT], {"names": ["x"], "min_bytes": 1}),
    "assert_output_sharding": (
        lambda expect: testing.assert_output_sharding(jax.jit(op), X, expect=expect),
        [P("data")],
        {},
    ),
    "assert_outputs_replicated": (
        testing.assert_outputs_replicated,
        [TEXT],
        {"output_shardings": ["{replicated}"], "strict": True, **ON_TEXT},
    ),
    "assert_same_unchecked": (lambda f: testing.assert_same_unchecked(f, X), [op], {}),
    "at_most": (testing.at_most, [{"all-reduce(data)": 1}], {}),
    "exactly": (testing.exactly, [{"all-reduce(data)": 1}], {}),
    "check_replicated_inputs": (testing.check_replicated_inputs, [jnp.ones(3)], {}),
    "check_rule": (
        lambda op, mesh, **more: testing.check_rule(op, mesh, X, **more),
        [op, None],
        {"reference": op, "gradients": True, "seed": 0, "rtol": 1e-4, "in_specs": P("data")},
    ),
    "judge": (testing.judge, [TEXT], dict(ON_TEXT)),
    "named_values": (lambda f: testing.named_values(f, X), [op], {}),
    "steady_state": (entered(testing.steady_state), [], {"warmup_count": 1, "growth_bytes": 0}),
    "verify_flags": (lambda f: testing.verify_flags(f, X), [op], {}),
    "gpu": (aot.gpu, ["h100", 8], {}),
    "tpu": (aot.tpu, ["v5e:2x4"], {}),
    "missing_plugin": (aot.missing_plugin, ["tpu"], {}),
    "hlo.judge": (
        hlo.judge,
        [TEXT],
        {"parameter_shardings": ["{replicated}"], "unpartitioned": False, **ON_TEXT},
    ),
    "parse": (hlo.parse, [TEXT], {"name": "n"}),
    "content": (
        report.content,
        [JUDGED],
        {"title": "t", "strict": True, "allow": None, "target": "v5e"},
    ),
    **{n: (getattr(report, n), [CONTENT], {}) for n in ("as_json", "markdown", "page", "plain")},
    "compared": (report.compared, [CONTENT, CONTENT, []], {}),
    **{f"DIFFS {n}": (f, [CONTENT, CONTENT, []], {}) for n, f in report.DIFFS.items()},
    "over": (report.over, [VERDICT], {}),
    "github": (report.github, [[CONTENT]], {}),
    "sarif": (report.sarif, [[CONTENT]], {}),
    "describe_finding": (report.describe_finding, [CONTENT.findings[0]] * 2, {}),
    "listed": (report.listed, [CONTENT.account.entries, JUDGED.verdicts], {}),
    "size": (report.size, [3], {}),
    "table": (report.table, [[["a", "b"]]], {}),
}
MADE = {  # by shardrules, for users to read
    *("Registration RuleContext Overlay default Content Item Block Row Blocker Collective".split()),
    *("Computation Frame Instruction Judgement Metadata Module Output Range Shape".split()),
    *("Support Verdict VERDICTS DIFFS ShardrulesError gpu_names __version__".split()),
}
# What is of the right kind by its nature, name by name and slot by slot.
RIGHT = {
    **{(n, 0): {"a str"} for n in AXES if n not in RULES},
    **{(n, 0): {"no function of this", "a class"} for n in ("no_communication", "place_casts")},
    **{("AxisType", slot): {"a str", "a spec"} for slot in (0, "unreduced", "reduced")},
    **{(f"AxisType.{n}", 0): {"a str"} for n in ("vary", "drop")},
    ("Effect", 1): {"a str", "a spec"},
    ("Registry", "entry_points"): {"None", "a str", "an empty str"},
    ("Registry", "prover"): {"a str", "an empty str"},
    ("Registry", "shipped"): {"None"},
    ("Registry.find", 0): {"a str", "an empty str"},
    ("Rule", 0): {"a str", "an empty str"},
    ("Rule", 1): {"a class", "no function of this"},
    ("Rule", 2): {"None", "a class", "no function of this"},
    ("register", 0): {"a str"},
    ("normalise", 0): {"a str", "an empty str"},
    ("assert_same_rules", "timeout_s"): {"a float"},
    ("watch", "allow"): {"None"},
    ("install", "casts"): {"None"},
    ("gpu", 1): set(),
    ("parse", "name"): {"a str", "an empty str"},
    ("content", "title"): {"None", "a str", "an empty str"},
    ("content", "allow"): {"None"},
    ("content", "target"): {"None"},
    ("size", 0): {"an int", "a float"},
    ("table", 0): {"a list"},
    ("summary", 1): {"None"},
    ("check_replicated_inputs", 0): {"a jax array"},
    ("assert_output_sharding", 0): {"a spec"},
    ("check_rule", "reference"): {"None"},
    ("check_rule", "seed"): {"an int"},
    ("check_rule", "rtol"): {"a float", "an int"},
    ("check_rule", "in_specs"): {"None", "a spec"},
    ("hlo.judge", "parameter_shardings"): {"None"},
}
# A program may be a function without arguments.
for name in "account judge assert_outputs_replicated assert_no_defensive_psum".split():
    RIGHT[name, 0] = {"no function of this"}
for name in "assert_no_host_transfers assert_no_large_constants".split():
    RIGHT[name, 0] = {"no function of this"}
# Of every name: None where it is the default, and flags.
OPTIONAL = ("registry", "mesh", "platform", "reference", "allow", "paths", "names", "at")
FLAGS = ("strict", "cheapest", "prove", "replace", "gradients", "unpartitioned")


def slots():
    for name, (f, args, kwargs) in TABLE.items():
        for slot in (*range(len(args)), *kwargs):
            yield pytest.param(name, slot, id=f"{name}-{slot}")


def test_every_public_name_is_in_the_table():
    for module in MODULES:
        for name in module.__all__:
            known = {name, f"{module.__name__.rpartition('.')[2]}.{name}"}
            assert known & {*TABLE, *MADE}, f"{module.__name__}.{name}"


def fails_well(error):
    """It is the package's own and says something, or JAX's or Python's on the user's own call."""
    if isinstance(error, errors.ShardrulesError):
        return len(str(error)) > 20
    if type(error) not in (TypeError, ValueError, FileNotFoundError):
        return False
    frames = inspect.getinnerframes(error.__traceback__)
    last = [f.filename for f in frames][-1]
    # JAX filters its own frames, and puts its words at the call of its function.
    return any(w in str(error) for w in ("shard_map", "argument", "positional", "JAX")) or (
        os.sep + "shardrules" + os.sep not in last
    )


@pytest.mark.parametrize("name, slot", list(slots()))
def test_wrong_kinds_are_refused(name, slot, monkeypatch, tmp_path, cpu_mesh):
    monkeypatch.chdir(tmp_path)
    f, args, kwargs = TABLE[name]
    if name == "check_rule":
        args = [op, cpu_mesh]
    allowed = RIGHT.get((name, slot), set())
    if slot in OPTIONAL:
        allowed = allowed | {"None"}
    if slot in FLAGS:
        allowed = allowed | {"a bool"}
    for what, wrong in WRONG.items():
        if what in allowed:
            continue
        given, named = list(args), dict(kwargs)
        (given if isinstance(slot, int) else named)[slot] = wrong
        try:
            f(*given, **named)
        except Exception as error:
            assert fails_well(error), (what, error)
            hidden = isinstance(error, errors.ArgumentError)
            assert not hidden or error.argument in str(error)
        else:
            pytest.fail(f"{name} takes {what} for {slot}")


def test_the_test_can_fail():
    def careless(x):
        return x.shape

    with pytest.raises(AttributeError) as caught:
        careless(None)
    assert not fails_well(caught.value)
    with pytest.raises(TypeError) as caught:
        registry.table.re.sub("a", "b", None)
    assert fails_well(errors.ArgumentError("size: count is a number, not None"))


def test_what_is_said():
    with pytest.raises(errors.ArgumentError) as caught:
        testing.assert_donated(TEXT, paths="state")
    assert str(caught.value) == (
        "assert_donated: paths is a collection of a str or None, not 'state' (str); pass a list, "
        "paths=['state']; see help(shardrules.testing.assert_donated)"
    )
    assert (caught.value.argument, caught.value.value) == ("paths", "state")


def test_numpy_s_numbers_are_numbers():
    assert report.size(np.float32(3)) == "3 B"
    assert report.content(JUDGED, strict=np.bool_(True)).findings
    with testing.steady_state(warmup_count=np.int8(1)):
        pass


def test_a_signature_is_python_s_to_explain():
    with pytest.raises(TypeError, match=r"size\(\) takes 1 positional argument but 2 were given"):
        report.size(1, 2)
