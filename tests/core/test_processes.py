"""Several processes of one job: equal gradients and verdicts, and rules that are compared."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from raising import raises

import shardrules as sr
from shardrules import errors
from shardrules.registry import fingerprint

from . import process_worker, versions

WORKER = pathlib.Path(process_worker.__file__)


def start(scene, count, out, waited=None):
    """Run the worker in processes of four devices; return what each printed, and its exit code.

    Args:
      scene: what they do.
      count: how many.
      out: the folder in which each writes down what it found.
      waited: the process that is waited for; all, by default.
    """
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    groups = "groups" if versions.has_process_groups() else "none"
    arguments = [sys.executable, str(WORKER), str(port), str(count)]
    processes = [
        subprocess.Popen(
            [*arguments, str(process), scene, str(out), groups],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for process in range(count)
    ]
    try:
        awaited = processes if waited is None else [processes[waited]]
        return [(process.communicate(timeout=180)[0], process.returncode) for process in awaited]
    finally:
        for process in processes:
            process.kill()


def written(out, said):
    """Return what each process wrote down; what they printed, where the first wrote nothing."""
    assert (out / "0.json").exists(), said
    return [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    out = tmp_path_factory.mktemp("processes")
    return written(out, start("all", 2, out))


@pytest.mark.slow
@pytest.mark.one_lane
def test_gradients_and_verdicts_are_those_of_one_process(both, hooks):
    if not versions.has_process_groups():  # rules are compared all the same, below
        assert "gradients" not in both[0]
        return
    gradients, verdicts = process_worker.gradients()
    assert verdicts and [one["verdicts"] for one in both] == [verdicts, verdicts]
    together = {}
    for one in both:
        for place, parts in one["gradients"].items():
            together.setdefault(place, []).extend(parts)
    assert together == gradients


LEFT = "off (its body takes gradients, which may change)"
SAID = {
    "two_rules": ["rule 'b' is all_gather('model'), at ", " in process 1, and all_gather('data')"],
    "in_another_order": ["rule 'a' comes before 'b' in process 0, at ", "after it in process 1"],
    "in_one_only": ["process 1 has it: all_reduce('model'), at ", "process 0 has no rule 'alone'"],
    "functions_of_one_name": ["rule 'function' is other_rule (code "],
    "options": ["options of 'install' is unknown='error', prove=False", "prove=True"],
    "decisions": ["(part) ", f"is {LEFT} in process 1, and on in process 0"],
    "decisions_of_two_bodies": [f"is {LEFT} in process 1, and {LEFT}, on in process 0"],
    "scopes": ["rule in scope 1 'scoped' is per_device('data'), at ", "and no_communication"],
}

NAMES = {
    "two_rules": "b",
    "in_another_order": "a",
    "in_one_only": "alone",
    "functions_of_one_name": "function",
    "options": "install",
    "decisions": "places.py",
    "decisions_of_two_bodies": "places.py",
    "scopes": "scoped",
}


@pytest.mark.slow
def test_a_difference_is_named_in_every_process(both):
    assert [one["raised"].pop("the_same") for one in both] == [None, None]
    assert both[0]["raised"] == both[1]["raised"]
    said = {
        scene: parts
        for scene, parts in SAID.items()
        if versions.types_values() or "decisions" not in scene
    }
    assert sorted(both[0]["raised"]) == sorted(said)
    for scene, parts in said.items():
        message, names, processes = both[0]["raised"][scene]
        parts = [*parts, "register the same rules in the same order in every process"]
        assert all(part in message for part in parts), message
        assert processes == [1]
        (name,) = names
        assert name.partition(":")[0] == NAMES[scene]


@pytest.mark.slow
@pytest.mark.one_lane
def test_one_that_dies_and_one_that_never_calls_are_an_error_in_time(tmp_path):
    result = written(tmp_path, start("missing", 3, tmp_path, waited=0))[0]
    message, missing = result["raised"]
    assert missing == [1, 2]
    assert message.startswith("processes 1, 2 of 3 did not call shardrules.assert_same_rules()")
    assert 1 < result["waited_s"] < 30


@pytest.mark.slow
@pytest.mark.one_lane
def test_a_coordinator_that_dies_after_calling_is_an_error_in_time(tmp_path):
    ((said, code),) = start("coordinator", 2, tmp_path, waited=1)
    if code:  # JAX itself ends every process of a job whose coordinator is gone
        assert "fatal" in said or "coordina" in said
        return
    (result,) = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    message, _ = result["raised"]
    assert "assert_same_rules()" in message


def test_one_process_has_nothing_to_compare():
    sr.register("anything", sr.per_device("data"))
    assert sr.assert_same_rules() is None


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), "60", True])
def test_a_timeout_is_a_positive_number(timeout_s):
    with pytest.raises(errors.ShardrulesError) as caught:
        sr.assert_same_rules(timeout_s=timeout_s)
    assert hasattr(caught.value, "timeout_s") or caught.value.argument == "timeout_s"


def test_several_processes_without_jax_distributed_are_refused(monkeypatch):
    jax.devices()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with raises(errors.MissingProcessError, processes=(0, 1)):
        sr.assert_same_rules()


def rule_of(axis, default=("a",)):
    return lambda ctx, names=default: [ctx.union.vary(axis)]


def test_functions_are_compared_by_what_they_come_to():
    def text(rule):
        return fingerprint.written(sr.outputs(rule))

    assert text(rule_of("model")) == text(rule_of("model"))
    assert text(rule_of("model")) != text(rule_of("data"))
    assert text(rule_of("model")) != text(rule_of("model", default=("b",)))
    assert text(rule_of(frozenset("xyz"))) == text(rule_of(frozenset("zyx")))
    assert fingerprint.written(sr.outputs(sr.no_communication)) == "outputs(no_communication)"


NESTED = {
    "lambda": "lambda ctx: [(lambda: ctx.union.vary(*AXES))()]",
    "generator": "lambda ctx: list(ctx.union.vary(axis) for _ in (0,) for axis in AXES)",
    "list": "lambda ctx: [ctx.union.vary(axis) for _ in (0,) for axis in AXES]",
    "two deep": "lambda ctx: (lambda: [(lambda: ctx.union.vary(*AXES))()])()",
}


@pytest.mark.parametrize("source", NESTED.values(), ids=NESTED)
def test_functions_are_compared_by_the_globals_that_their_inner_functions_read(source):
    def text(*axes):
        return fingerprint.written(sr.outputs(eval(source, {"AXES": axes})))

    assert text("data") == text("data") != text("model")


@pytest.mark.parametrize("dtype", ["int32", "float64", object])
def test_functions_are_compared_by_the_arrays_that_they_hold(dtype):
    def text(*sizes):
        table = np.asarray(sizes, dtype)
        return fingerprint.written(sr.outputs(lambda ctx: [ctx.union.vary("data"), table][:1]))

    assert text(1, 2) == text(1, 2) != text(1, 3)
    assert text(1, 2) != text(1, 2, 3)


def test_a_declared_function_is_among_what_is_compared():
    @sr.per_device("data")
    def declared_here(x_ref, o_ref): ...

    listed = fingerprint.entries(sr.Registry())
    (entry,) = [e for e in listed if e.name.endswith("declared_here")]
    assert entry.value == "per_device('data')" and "test_processes.py" in entry.where
