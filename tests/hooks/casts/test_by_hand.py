"""Casts at the minimum cut compile to what casts by hand compile to, on every platform."""

import re

import jax
import jax.numpy as jnp
import programs
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardrules as sr


def total(h):
    return lax.psum((h**2).sum(), "data")


def scanned(cast, w, x):
    """The cast stands before the loop."""
    w = cast(w)
    return total(lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=5)[0])


def repeated(cast, w, x):
    """Before the rows are repeated and read twice."""
    wide = jnp.repeat(cast(w), 4, axis=0)
    return total((jnp.sin(wide) @ x.T) * (jnp.cos(wide) @ x.T))


def biased(cast, w, x):
    """Not at the argument: where one row is left of it."""
    return total(jnp.tanh(x + cast(w[:1])))


def text(body, cast, casts, mesh):
    args = programs.structs(mesh, ((128, 128), P()), ((32, 128), P("data")))
    f = jax.shard_map(
        lambda w, x: body(cast, w, x), mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
    )
    with sr.install(casts=casts):
        return jax.jit(jax.grad(f)).lower(*args).compile().as_text()


def plain(text):
    """A module's instructions without names, lines and numbers of channels."""
    text = text[text.index("\n") :]
    text = re.sub(r"(?ms)^(FileNames|FunctionNames|FileLocations|StackFrames)\b.*?^\s*$", "", text)
    text = re.sub(
        r", (metadata|frontend_attributes)=\{(?:[^{}\"]|\"[^\"]*\"|\{[^{}]*\})*\}", "", text
    )
    names: dict[str, str] = {}
    return re.sub(r"%[\w.-]+", lambda m: names.setdefault(m[0], f"%{len(names)}"), text)


@pytest.mark.parametrize("body", [scanned, repeated, biased], ids=lambda body: body.__name__)
def test_the_same_program(body, platform):
    _, mesh = platform
    by_hand = text(body, lambda w: sr.vary(w, "data"), "late", mesh)
    placed = text(body, lambda w: w, "cheapest", mesh)
    assert plain(placed) == plain(by_hand)


@pytest.mark.parametrize("body", [scanned, repeated], ids=lambda body: body.__name__)
def test_late_casts_are_another_program(body, cpu_mesh):
    late, placed = (text(body, lambda w: w, casts, cpu_mesh) for casts in ("late", "cheapest"))
    assert plain(placed) != plain(late)
