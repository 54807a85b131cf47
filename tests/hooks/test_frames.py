"""Each wing's frame is entered and left in one place, and a kernel's types are computed once."""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import re
import threading

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules import hooks
from shardrules.hooks import frames
from shardrules.hooks.types.calls import pallas_call

PACKAGE = pathlib.Path(shardrules.__file__).parent
_CLASSES = [one for one in vars(frames).values() if isinstance(one, type)]
FRAMES = [one for one in _CLASSES if one.__base__ is frames.WingFrame]
HANDED_ON = {
    "annotations",
    "refused",
    "lowering",
    "scope",
    "under",
}  # from one function of JAX to the next


def test_a_frame_is_in_force_inside_and_the_one_before_is_back_after_an_error():
    before = frames.here.bwd
    with frames.BwdFrame(widened=frozenset("x")) as nothing:
        assert nothing is None and frames.here.bwd.widened == frozenset("x")
        with pytest.raises(ZeroDivisionError), dataclasses.replace(frames.here.bwd, running=(1,)):
            assert frames.here.bwd.widened == frozenset("x") and frames.here.bwd.running == (1,)
            raise ZeroDivisionError
        assert frames.here.bwd.running == ()
    assert frames.here.bwd is before


def test_each_thread_has_frames_of_its_own():
    seen = []
    with frames.TransposeFrame(placed=True):
        thread = threading.Thread(target=lambda: seen.append(frames.here.transpose.placed))
        thread.start()
        thread.join()
    assert seen == [False]


def test_of_each_wing_there_is_one_frame():
    held = {wing: type(value) for wing, value in vars(frames.here).items() if wing not in HANDED_ON}
    assert held == {frame.wing: frame for frame in FRAMES}


def test_nothing_else_sets_a_frame():
    """Neither ``here.wing = ...`` nor ``here.wing.field = ...``, in any file."""
    wings, set_by_hand = {frame.wing for frame in FRAMES}, []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found = re.search(r"\bhere\.(\w+)(\.\w+)?$", ast.unparse(node))
                if found and found[1] in wings:
                    set_by_hand.append(f"{path.name}: {found[0]}")
    assert set_by_hand == []


@shardrules.no_communication
def copy(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def pallas(x):
    return pl.pallas_call(copy, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def on_a_mesh(x):
    mesh = pl.tpu.SparseCoreMesh if hasattr(pl, "tpu") else None
    del mesh
    return x


def test_a_kernels_types_are_computed_once_for_a_bind(cpu_mesh, monkeypatch):
    resolved = []
    original = pallas_call.resolve
    monkeypatch.setattr(
        pallas_call, "resolve", lambda *args: resolved.append(args[2].call.name) or original(*args)
    )
    with shardrules.install():
        f = hooks.shard_map(pallas, cpu_mesh, P("data"), P("data"), check=True)
        jax.make_jaxpr(f)(jnp.ones((8, 4)))
    assert resolved == ["copy"]
