"""Reports, exit codes and allowances of outputs that are called replicated and differ."""

import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core import versions
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from raising import raises

import shardrules
from shardrules import errors, report, testing
from shardrules.costs import findings, missing
from shardrules.report import several

pytestmark = pytest.mark.one_lane

SCRIPT = """
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
mesh = jax.make_mesh((8,), ("data",))
def step(w, x):
    value, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return {"loss": jax.lax.pmean(value, "data"), "w": w - 0.1 * REDUCE(grad)}
f = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(),
                          check_vma=False), donate_argnums=0)
put = lambda x, spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
f(put(jnp.ones((8, 8)), P()), put(jnp.ones((16, 8)), P("data")))
"""
BLOCK = """\
outputs called replicated that are not proven equal:
  differs: output['w'], f32[8,8]: no reduction over {data} of the gradient that goes into it; \
called replicated over {data}, not proven equal
    because parameter 1 (x) is sharded over data, and there is no reduction over data on the way; it \
is written into the memory of w, so the devices' copies drift apart from step to step
    to do: reduce the gradient that comes from wrong.py:6 (step.<locals>.<lambda>) over 'data' \
before it goes into wrong.py:7 (step): jax.lax.pmean; jax.lax.psum only if the \
differentiated loss is a sum over the device's own part, with no psum in it
"""


def command(*args, cwd):
    path = os.pathsep.join(filter(None, map(str, sys.path)))
    return subprocess.run(
        [sys.executable, "-m", "shardrules", *map(str, args)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
    )


@pytest.fixture
def script(tmp_path):
    (tmp_path / "wrong.py").write_text(SCRIPT.replace("REDUCE", ""))
    (tmp_path / "right.py").write_text(
        SCRIPT.replace("REDUCE", "(lambda g: jax.lax.pmean(g, 'data'))")
    )
    return tmp_path


@pytest.mark.slow
def test_run_and_verify_name_it_and_exit_with_1(script):
    done = command("run", "--keep", "kept", "wrong.py", cwd=script)
    assert done.returncode == 1 and BLOCK in done.stderr, done.stderr
    (kept,) = (script / "kept").glob("*.jit_step.hlo")

    def verify(*flags):
        done = command("verify", "--format=json", *flags, kept, cwd=script)
        return done.returncode, json.loads(done.stdout)

    code, found = verify()
    assert code == 1
    assert [(one["kind"], one["name"]) for one in found["unequal_outputs"]] == [
        ("differs", "output[1]")
    ]
    assert command("report", kept, cwd=script).returncode == 0
    allow = "differs output[1]: a copy for each device"
    code, found = verify(f"--allow={allow}")
    assert code == 0
    (allowed,) = found["unequal_outputs_allowed"]
    assert allowed["allowed_because"] == "a copy for each device"
    code, found = verify("--allow=differs output[0]: no", f"--allow={allow}")
    assert (code, found["unused_allowances"]) == (1, ["differs output[0]"])


@pytest.mark.slow
def test_run_is_silent_with_the_reduction_in_its_place(script):
    done = command("run", "right.py", cwd=script)
    assert done.returncode == 0 and "differ" not in done.stderr


def step(mesh, f, out_specs=P()):
    specs = (P(), P("data"))
    inner = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
    args = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((8, 8), P()), ((16, 8), P("data")))
    ]
    return jax.jit(inner), args


def differing(w, x):
    return {"loss": lax.pmean(x.mean(), "data"), "sum": (x @ w).sum()}


@pytest.mark.parametrize("loops", [False, True])
def test_a_tensor_parallel_layer_gets_no_pmean_at_the_end(cpu_mesh, loops):
    """Over model the gradients of both layers lack a psum between them: a mean would hide that."""

    def loss(ws, x):
        def layer(h, _):
            return h + lax.psum(jnp.tanh((h * ws["scale"]) @ ws["up"]) @ ws["down"], "model"), None

        h = lax.scan(layer, x, None, length=2)[0] if loops else layer(layer(x, None)[0], None)[0]
        return (h**2).mean()

    def body(ws, x):
        own = jax.grad(loss)(ws, x)
        return jax.tree.map(lambda w, g: w - 0.1 * lax.pmean(g, "data"), ws, own)

    specs = {"scale": P(), "up": P(None, "model"), "down": P("model")}
    f = jax.shard_map(
        body, mesh=cpu_mesh, in_specs=(specs, P("data")), out_specs=specs, check_vma=False
    )
    shapes = {"scale": (8,), "up": (8, 16), "down": (16, 8)}
    ws, x = (
        jax.tree.map(
            lambda shape, spec: jax.ShapeDtypeStruct(
                shape, jnp.float32, sharding=NamedSharding(cpu_mesh, spec)
            ),
            *pair,
            is_leaf=lambda leaf: type(leaf) is tuple,
        )
        for pair in ((shapes, specs), ((16, 8), P("data")))
    )
    (one,) = missing.find(testing.judge(jax.jit(f), ws, x))
    assert (one.name, one.axes) == ("output['scale']", ("model",))
    assert "as a tensor-parallel layer does" in one.advice and "jax.lax.pmean" not in one.advice


def test_every_format_puts_it_first(cpu_mesh):
    f, args = step(cpu_mesh, differing)
    content = report.content(testing.judge(f, *args), title="step")
    assert content.headline.endswith("; 1 output differs") and not content.clean
    title = "Outputs called replicated that are not proven equal"
    text, markdown, page = (w(content) for w in (report.plain, report.markdown, report.page))
    assert text.split("\n")[2] == f"{title.lower()}:"
    assert markdown.split("\n")[4] == f"## {title}"
    assert "- **differs**: output['sum'], f32[]: called replicated over {data}, not" in markdown
    assert page.index(title) < page.index("Collectives</h2>")
    data = json.loads(report.as_json(content))
    assert [(o["kind"], o["name"], o["axes"]) for o in data["unequal_outputs"]] == [
        ("differs", "output['sum']", ["data"])
    ]
    assert not data["clean"]
    assert [o["name"] for o in data["outputs"]] == ["output['loss']", "output['sum']"]
    other, args = step(cpu_mesh, lambda w, x: lax.pmean(x, "data"))
    clean = report.content(testing.judge(other, *args), title="costly")
    both = several.gather([clean, content], [1, 1])
    assert [c.title for c in both.contents] == ["step", "costly"] and not both.clean


def test_what_is_unproven_fails_in_strict_mode_alone(cpu_mesh):
    f, args = step(cpu_mesh, lambda w, x: jnp.isfinite(x).all())
    judgement = testing.judge(f, *args)
    content = report.content(judgement)
    assert content.clean and content.headline.endswith("; 1 output unproven")
    strict = report.content(judgement, strict=True)
    assert not strict.clean and several.gather([strict], [1]).findings == 1
    allow = findings.Allowances({"differs output": "all are finite"})
    assert report.content(judgement, strict=True, allow=allow).clean


def test_watch_and_the_assertion_take_the_same_allowances(cpu_mesh):
    f, args = step(cpu_mesh, differing)
    put = lambda a: jax.device_put(jnp.ones(a.shape), a.sharding)  # noqa: E731
    allow = {"differs output['sum']": "each device logs its own"}
    for known, clean in ((None, False), (allow, True)):
        jax.clear_caches()
        with shardrules.watch(allow=known) as seen:
            f(*map(put, args))
        (content,) = (one.content for one in seen if one.name == "jit_differing")
        assert content.clean is clean, str(seen)
    testing.assert_outputs_replicated(f, *args, allow=allow)
    one = lambda outputs: [output.name for output in outputs] == ["output['sum']"]  # noqa: E731
    with raises(errors.ReplicationAssertionError, outputs=one):
        testing.assert_outputs_replicated(f, *args)
    unused = "allowances that match nothing: differs output[7]; remove them"
    with raises(errors.ReplicationAssertionError, message=unused):
        testing.assert_outputs_replicated(f, *args, allow={**allow, "differs output[7]": "?"})


@versions.where(versions.prints_shardings)
def test_text_is_told_what_its_outputs_are(cpu_mesh, tmp_path):
    f, args = step(cpu_mesh, differing)
    (tmp_path / "step.hlo").write_text(f.lower(*args).compile().as_text())

    def verify(*flags):
        done = command("verify", "--mesh=data=4,model=2", *flags, "step.hlo", cwd=tmp_path)
        return done.returncode, done.stdout + done.stderr

    assert verify()[0] == 0
    for told in ("{replicated}", "{replicated}; {replicated}"):
        code, text = verify(f"--out-shardings={told}")
        assert code == 1 and "differs: output[1]" in text and "output[0]" not in text
    assert verify("--out-shardings={replicated}; {devices=[8]<=[8]}")[0] == 0
    code, text = verify("--out-shardings={replicated};{replicated};{replicated}")
    assert code == 2 and "module 'jit_differing' returns" in text
    code, text = verify("--out-shardings=replicated")
    assert (
        code == 2 and "'replicated' is not a sharding; write --out-shardings='{replicated}'" in text
    )


def test_a_forgotten_pmean_of_several_gradients_is_one_block_with_their_lines(cpu_mesh):
    def loss(ws, x):
        h = jnp.tanh(x @ ws["in"])
        h = h @ ws["out"]
        return (h**2).mean()

    def body(ws, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x))

    f = jax.shard_map(
        body, mesh=cpu_mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    put = lambda shape, spec: jax.ShapeDtypeStruct(  # noqa: E731
        shape, jnp.float32, sharding=NamedSharding(cpu_mesh, spec)
    )
    ws = {"in": put((8, 8), P()), "out": put((8, 4), P())}
    text = report.plain(report.content(testing.judge(jax.jit(f), ws, put((16, 8), P("data")))))
    assert text.count("differs: ") == 1 and "likewise output['out']" in text, text
    first = loss.__code__.co_firstlineno
    (advice,) = re.findall("to do: (reduce the gradients that come from .*) before they go", text)
    assert re.findall(r":(\d+) ", advice) == [str(first + 1), str(first + 2)]


def _layer(ws, x):
    return lax.pmean(((lax.psum(x @ ws["w"], "model") + ws["b"]) ** 2).mean(), "data")


@pytest.mark.parametrize("clips", [False, True])
def test_a_sum_of_a_weight_s_gradient_is_told_by_what_it_goes_into(cpu_mesh, clips):
    """As a missing one is. That of an activation is no weight's, and a norm joins all of them."""
    specs = {"w": P("model"), "b": P()}
    loss = jax.shard_map(
        _layer, mesh=cpu_mesh, in_specs=(specs, P("data", "model")), out_specs=P(), check_vma=False
    )

    def update(state, x):
        g = jax.grad(loss)(state["p"], x)
        if clips:
            norm = sum((leaf**2).sum() for leaf in jax.tree.leaves(g))
            g = jax.tree.map(lambda leaf: leaf / norm, g)
        m = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], g)
        return {"p": jax.tree.map(lambda p, m: p - m, state["p"], m), "m": m}

    put = lambda a, *spec: jax.device_put(a, NamedSharding(cpu_mesh, P(*spec)))  # noqa: E731
    ws = {"w": put(np.ones((8, 16), np.float32), "model"), "b": put(np.ones(16, np.float32))}
    judgement = testing.judge(jax.jit(update), {"p": ws, "m": ws}, put(np.ones((8, 8)), "data"))
    found = {one.entry.what: one for one in findings.find(judgement)}
    of_bias, of_activation = (
        found[f"backward all-reduce({axes})"] for axes in ("data, model", "model")
    )
    assert not of_activation.gradient_of
    assert of_bias.gradient_of == (() if clips else ("output['m']['b']", "output['p']['b']"))
    said = "of the gradient that goes into output['m']['b'], output['p']['b']"
    assert (said in report.plain(report.content(judgement))) != clips
