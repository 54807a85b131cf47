"""``shardrules doctor``: what it prints, and when it exits with 1."""

from __future__ import annotations

import subprocess
import sys
import warnings

import jax
import pytest

import shardrules as sr
from core import versions
from shardrules import __main__ as command_line
from shardrules import aot, errors, registry
from shardrules.commands import doctor
from shardrules.door import internals
from shardrules.door.symbols import SYMBOLS
from shardrules.hooks import selftest


@pytest.fixture(autouse=True)
def without_compilers(monkeypatch):
    """None is loaded: that takes long, and not all environments have one.

    An op that another test declared keeps the hooks, which stand in the place of JAX's functions.
    """
    sr.install().uninstall(ops=True)
    monkeypatch.setattr(aot, "missing_plugin", lambda name: None)
    monkeypatch.setattr(
        doctor, "_ABSENT", {"tpu": ("v5e:2x4", lambda: None), "gpu": ("8 h100", lambda: None)}
    )


def printed(capsys, *flags, code=0):
    capsys.readouterr()
    assert command_line.main(["doctor", *flags]) == code
    return capsys.readouterr().out.splitlines()


def test_what_a_bug_report_needs(capsys):
    lines = printed(capsys, "--rule=doctors_kernel=no_communication")
    assert lines[0].startswith(f"shardrules {sr.__version__}, jax {jax.__version__}, jaxlib ")
    assert f"Python {sys.version.split()[0]}" in lines[0].split(", ")
    count = len(list(selftest.bodies())) if versions.types_values() else 0
    tested = (
        f"{count} programs are as expected"
        if count
        else "not run; the self-test needs JAX 0.6 or newer, where values carry axis types, and "
        f"this is JAX {jax.__version__}"
    )
    devices = jax.devices()
    assert lines[1:6] == [
        f"self-test: {tested}",
        "hooks: can be used",
        f"devices: {len(devices)} cpu ({devices[0].device_kind})",
        "compiler for tpu: can be used (tried: v5e:2x4)",
        "compiler for gpu: can be used (tried: 8 h100)",
    ]
    assert lines[6].startswith("rules: ")
    rule = "no_communication, from --rule=doctors_kernel=no_communication"
    assert f"  doctors_kernel: {rule}" in lines
    names = lines[lines.index("private names of JAX:") + 1 :]
    here = [s for s in SYMBOLS if s.exists_in(jax.__version__)]
    assert names == [f"  {s.key}: {s.path} found" for s in here]


def test_a_name_that_is_gone_is_told(capsys, monkeypatch):
    gone = next(s for s in SYMBOLS if s.key == "dce_jaxpr")
    here = [s for s in SYMBOLS if s.exists_in(jax.__version__) and s is not gone]
    problem = errors.UnsupportedJaxError("no hooks for it", version="1", symbol=gone.path)

    def refuse():
        raise problem

    monkeypatch.setattr(doctor, "install", refuse)
    monkeypatch.setattr(internals, "look", lambda s: (None, None, "is missing" * (s is gone)))
    lines = printed(capsys, code=1)
    assert {"hooks: no hooks for it", f"  dce_jaxpr: {gone.path} is missing"} < {*lines}
    assert len([line for line in lines if line.endswith(" found")]) == len(here)


@versions.where(versions.types_values)
def test_a_self_test_that_fails_is_told(capsys, monkeypatch):
    body = selftest.SelftestBody("psum", lambda x, w: x, "model")
    monkeypatch.setattr(selftest, "bodies", lambda: iter([body]))
    lines = printed(capsys, code=1)
    assert lines[1:3] == [
        "self-test: psum: its result varies over {data, model}, where it must vary over {model}",
        "hooks: the self-test failed",
    ]


@versions.where(versions.types_values)
def test_a_newer_jax_is_told_without_a_warning(capsys, monkeypatch):
    door = internals.load()
    monkeypatch.setattr(door, "untested", "newer than 0.12, the newest that was tested")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lines = printed(capsys)
    assert lines[1] == f"JAX {jax.__version__} is newer than 0.12, the newest that was tested"
    assert lines[3] == "hooks: can be used"


def test_why_a_compiler_can_not_be_used(capsys, monkeypatch):
    def refuse():
        raise errors.AotError("libtpu does not know it\nat all")

    def missing(name):
        return {"tpu": None, "gpu": "pip install it"}[name]

    monkeypatch.setitem(doctor._ABSENT, "tpu", ("v5e:2x4", refuse))
    monkeypatch.setattr(aot, "missing_plugin", missing)
    lines = printed(capsys)
    assert {
        "compiler for tpu: can't be used: libtpu does not know it",
        "compiler for gpu: not installed; pip install it",
    } < {*lines}


def test_devices_that_can_not_be_opened_are_told(capsys, monkeypatch):
    def refuse():
        raise RuntimeError("no such backend\nanywhere")

    monkeypatch.setattr(jax, "devices", refuse)
    assert "devices: RuntimeError: no such backend" in printed(capsys)


def test_rules_that_can_not_be_loaded_are_told(capsys, monkeypatch):
    def refuse():
        raise errors.RegistrationError("the rules that a library ships can't be loaded")

    monkeypatch.setattr(registry.default, "entries", refuse)
    lines = printed(capsys, code=1)
    assert "rules: the rules that a library ships can't be loaded" in lines


@pytest.mark.parametrize(
    "stops, says",
    [
        (
            "sys.modules['jax'] = None",
            "shardrules hooks into JAX, which can't be imported here: import of jax halted; "
            "None in sys.modules. python -m pip install jax\n",
        ),
        (
            "import os; os.environ['JAX_ENABLE_X64'] = 'perhaps'",
            "JAX can't be imported here: ValueError: invalid truth value 'perhaps' for environment "
            "'JAX_ENABLE_X64'\n",
        ),
    ],
)
def test_without_jax_it_is_one_line(stops, says):
    code = f"import sys; {stops}; from shardrules.__main__ import main; sys.exit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, says), done.stderr
