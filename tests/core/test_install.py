"""install(): all of it or nothing, on a JAX that it knows or not at all."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pathlib
import subprocess
import sys
import textwrap

import jax
import pytest

import shardrules as sr
from core import kernels
from core import versions as of_tests
from shardrules import hooks
from shardrules.door import internals, versions
from shardrules.hooks.install import state
from shardrules.hooks.types import laws, owners
from shardrules.hooks.types.funnel import Funnel

NEWER = ("0.13.0.dev1", "0.13.0rc1", "0.13.0", "0.13.0.dev20261201+cuda", "1.0")
KNOWN = (
    "0.4.28",
    "0.4.36",
    "0.6.1",
    "0.9.0",
    "0.12.0rc1",
    "0.12.0",
    "0.12.0.1",
    "0.12.1.dev3",
    jax.__version__,
)
OLDER = ("0.4.27", "0.4.27rc1", "0.3.25")


def run_alone(code, **environment):
    """Run code in a process of its own; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        text=True,
        capture_output=True,
        cwd=pathlib.Path(__file__).parents[2],
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@of_tests.where(of_tests.here)
@pytest.mark.parametrize("version", KNOWN)
def test_versions_in_the_range_are_known(version):
    assert versions.too_old(version) == "" and not versions.is_untested(version)


@pytest.mark.parametrize("version", NEWER)
def test_newer_versions_and_their_pre_releases_are_not(version):
    assert versions.too_old(version) == "" and versions.is_untested(version)


@pytest.mark.parametrize("version", OLDER)
def test_older_versions_are_not(version):
    assert versions.too_old(version) == "it is older than 0.4.28"


@pytest.mark.parametrize("version", ["", "main", ".12"])
def test_what_is_no_version_is_refused(version):
    assert "is not a version; a version looks like '0.12.0'" in versions.too_old(version)


def test_of_a_version_its_release_is_compared():
    assert versions.release("0.12") == versions.release("v0.12.0.0+cuda") == (0, 12)
    assert (
        versions.release("0.13.0.dev1") == (0, 13) > versions.release("0.12.0.1") == (0, 12, 0, 1)
    )


def test_uninstalling_leaves_jax_as_it_was():
    run_alone("""
        import jax
        import shardrules
        from shardrules import hooks
        missing = object()
        def value(owner, name):
            return (owner if isinstance(owner, dict) else vars(owner)).get(name, missing)
        handle = shardrules.install()
        touched = hooks.touched()
        during = [value(*one) for one in touched]
        handle.uninstall()
        assert not hooks.touched() and not hooks.installed()
        before = [value(*one) for one in touched]
        assert len(touched) >= 8
        assert all(a is not b for a, b in zip(before, during)), touched
        assert all("shardrules" not in (getattr(v, "__module__", None) or "") for v in before)
    """)


@pytest.mark.slow
def test_what_a_declared_op_keeps_patched_can_be_taken_back():
    run_alone("""
        import jax.numpy as jnp
        import shardrules
        from shardrules import hooks
        op = shardrules.no_communication(lambda x: x + 1)
        handle = shardrules.install()
        handle.uninstall()
        assert not hooks.touched()
        for _ in range(2):
            assert op(jnp.zeros(2)).sum() == 2
            handle.uninstall()
            assert hooks.touched() and not hooks.installed()
            with shardrules.install() as other:
                handle.uninstall(ops=True)
                assert hooks.installed()
            assert not hooks.touched()
            handle.uninstall(ops=True)
    """)


def test_importing_and_declaring_change_nothing_and_need_no_jax():
    run_alone("""
        import sys
        import shardrules
        shardrules.register("my_kernel", shardrules.no_communication)
        shardrules.no_communication(lambda x_ref, o_ref: None)
        assert "jax" not in sys.modules
    """)


MISTAKEN = """
def taken(original, ours):
    '''Return why ours can't be called as the original can, by position or by name.'''
    try:
        parameters = list(inspect.signature(original).parameters.values())
    except (TypeError, ValueError):  # a function of C++ that tells no names
        return ""
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    more = [0, 0] if any(p.kind is p.VAR_POSITIONAL for p in parameters) else []
    named = {p.name: 0 for p in parameters if p.kind is p.KEYWORD_ONLY}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        named["any_name"] = 0
    only = [p for p in positional if p.kind is p.POSITIONAL_ONLY]
    by_name = {p.name: 0 for p in positional if p not in only} | named
    calls = [([0] * len(positional) + more, named), ([0] * len(required), {})]
    if not more:  # after more positional ones, none can be given by name
        calls.append(([0] * len(only), by_name))
    try:
        for args, kwargs in calls:
            inspect.signature(ours, follow_wrapped=False).bind(*args, **kwargs)
    except TypeError as error:
        return f"{inspect.signature(original)}: {error}"
    return ""
"""


def mistaken_signatures(change=""):
    """Return a line for each replaced function that can't be called as JAX's own can."""
    return run_alone(
        """
        import inspect
        import shardrules
        from shardrules import hooks
        from shardrules.door.patching import ModuleProxy
        MISTAKEN
        def value(owner, name):
            found = owner[name] if isinstance(owner, dict) else getattr(owner, name)
            return getattr(found, "rule", found)
        CHANGE
        with shardrules.install():
            touched = hooks.touched()
            during = [value(*one) for one in touched]
        count = 0
        for (owner, name), ours in zip(touched, during):
            if isinstance(owner, dict) and name not in owner:
                continue  # there was none
            if isinstance(ours, property):
                continue  # what it gives is each primitive's own
            theirs = value(owner, name)
            functions = {name: (theirs, ours)}
            if isinstance(ours, ModuleProxy):
                own = {k: v for k, v in vars(ours).items() if k != "_module"}
                functions = {k: (getattr(theirs, k), v) for k, v in own.items()}
            for what, pair in functions.items():
                count += 1
                why = taken(*pair)
                if why:
                    print(what, why)
        assert count >= 8
    """.replace("MISTAKEN", textwrap.indent(MISTAKEN, " " * 8).strip()).replace("CHANGE", change)
    )


@pytest.mark.slow
def test_what_stands_instead_of_a_function_takes_what_that_took():
    assert mistaken_signatures() == ""


@pytest.mark.slow
def test_a_parameter_of_another_name_is_noticed():
    message = mistaken_signatures(
        "from shardrules.hooks.order import CustomVjpHooks; CustomVjpHooks._flatten_primal = "
        "lambda hooks, function: None"
    )
    assert message.startswith("_flatten_fun_nokwargs (")


def test_a_lowering_rule_is_registered_by_name_too(hooks):
    from jax.extend.core import Primitive
    from jax.interpreters import mlir

    primitive = Primitive("registered_by_name")
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda aval: aval)
    mlir.register_lowering(prim=primitive, rule=lambda ctx, x: [x])
    assert jax.jit(primitive.bind)(2.0) == 2.0


def test_an_abstract_eval_that_returns_no_tuple_gets_the_error_of_jax():
    from jax.extend.core import Primitive

    import shardrules

    several, one, bare = (Primitive(name) for name in ("several", "one", "bare"))
    several.multiple_results = True
    several.def_abstract_eval(lambda aval: aval)
    one.def_abstract_eval(lambda aval: [aval, aval])
    bare.def_effectful_abstract_eval(lambda aval: aval)

    def errors():
        for primitive in (several, one, bare):
            with pytest.raises(Exception) as error:
                jax.make_jaxpr(primitive.bind)(1.0)
            yield type(error.value), str(error.value)

    plain = [*errors()]
    with shardrules.install():
        assert [*errors()] == plain


def differentiated(run, traced, x):
    """Differentiate a custom_vjp that was traced before."""
    jax.make_jaxpr(jax.grad(lambda x: run(traced)(x)[0].sum()))(x)


def lowered(run, traced, x):
    """Lower an interpreted kernel that was traced before."""
    (y,) = jax.jit(run(traced))(x)
    assert (y == x).all()


@of_tests.where(of_tests.types_values)
@pytest.mark.parametrize("use", [differentiated, lowered])
@pytest.mark.parametrize("gone", [False, True])
def test_what_outlives_the_hooks_says_so(gone, use):
    """It would end in an error of JAX about its kernels' types."""
    from jax.sharding import PartitionSpec as P

    import shardrules

    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    x = jax.numpy.ones((4, 2))
    shardrules.register("copy_kernel", shardrules.no_communication)
    handle = shardrules.install()
    copy = kernels.make_copy(kernels.copy_kernel)
    f = of_tests.shard_map(copy, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    traced = jax.make_jaxpr(f)(x)
    run = importlib.import_module("jax.extend.core").jaxpr_as_fun
    try:
        if gone:
            handle.uninstall(ops=True)  # a declared op of another test keeps them, too
            with pytest.raises(
                shardrules.errors.ShardrulesError, match="after they were taken back"
            ):
                use(run, traced, x)
        else:
            use(run, traced, x)
    finally:
        handle.uninstall()


@of_tests.where(of_tests.types_values)
def test_what_needs_no_hooks_outlives_them():
    """A kernel of what is the same everywhere, one whose check is off, and a callback."""
    from jax.sharding import PartitionSpec as P

    import shardrules

    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    x = jax.numpy.ones((4, 2))
    copy = kernels.make_copy(kernels.copy_kernel)
    call_back = lambda x: jax.pure_callback(lambda x: x, x, x)  # noqa: E731
    shardrules.register("copy_kernel", shardrules.no_communication)
    run = importlib.import_module("jax.extend.core").jaxpr_as_fun
    for body, spec, checked, where in (
        (copy, P(), True, jax.jit),
        (copy, P("data"), False, jax.jit),
        (call_back, P("data"), True, lambda f: f),
    ):
        handle = shardrules.install(unknown="varying")
        try:
            f = of_tests.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check=checked)
            traced = jax.make_jaxpr(f)(x)
        finally:
            handle.uninstall(ops=True)
        (y,) = where(run(traced))(x)
        assert (y == x).all()


def test_binding_is_processing_where_the_door_says_so():
    """The hooks call process_primitive themselves there, if the trace takes hijax types."""
    door = internals.load()
    source = textwrap.dedent(inspect.getsource(door.Primitive))
    (binds,) = (
        node
        for node in ast.parse(source).body[0].body
        if getattr(node, "name", "") == "bind_with_trace"
    )
    read = """
        def bind_with_trace(self, trace, args, avals, params, /):
            if self.is_high(*avals, **params) and trace.requires_low:
                with set_current_trace(trace):
                    return self.to_lojax(*args, **params)
            return trace.process_primitive(self, args, params)
    """
    is_as_read = ast.unparse(binds) == ast.unparse(ast.parse(textwrap.dedent(read)))
    assert door.binds_by_processing == is_as_read


def test_few_attributes_of_jax_are_replaced():
    with sr.install():
        assert 8 < len(hooks.touched()) < 60
        lines = [line.split() for line in hooks.replaced()]
    assert len(lines) > 8 and not hooks.replaced()
    hooked = {what: by for what, *_, by in lines}
    assert all(
        by.startswith(("shardrules.hooks.", "shardrules.unchecked.")) for by in hooked.values()
    )
    if internals.load().typed:
        assert hooked["jax._src.core.Primitive.abstract_eval"] == Funnel.__module__


def test_each_primitive_has_one_law_whenever_it_was_made():
    """Nothing is adopted: a primitive that is made under the hooks, or before, is a user's."""
    from jax.extend.core import Primitive

    def made(name):
        primitive = Primitive(name)
        primitive.def_abstract_eval(lambda x: x)
        return primitive

    before = made("made_before")
    with sr.install():
        funnel = state().of(Funnel)
        for primitive in (before, made("made_after")):
            assert funnel.row(primitive) is laws.USERS
            assert "abstract_eval" in vars(primitive) and "bind" not in vars(primitive)


def test_none_of_jax_own_primitives_is_taken_for_a_users():
    with sr.install():
        funnel, door = state().of(Funnel), internals.load()
        lowered = {p for t in (door.lowerings, *door.platform_lowerings.values()) for p in t}
        own = [p for p in lowered if owners.is_held_by_jax(p)]
        assert len(own) > 200
        assert [p.name for p in own if funnel.row(p) is laws.USERS] == []


def test_the_body_of_a_loop_is_told_by_the_code_that_traces_it(monkeypatch):
    door = internals.load()
    if door.typed:
        assert len(door.body_tracers) == 2
    with pytest.raises(LookupError, match="has no _create_jaxpr inside"):
        internals._body_tracer(run_alone)


def test_a_second_install_keeps_where_casts_stand_unless_it_says_otherwise():
    with sr.install(casts="cheapest"):
        with sr.install():
            assert state().scope.casts == "cheapest"
        with pytest.warns(UserWarning, match="replaces install.casts='cheapest'"):
            late = sr.install(casts="late")
        with late:
            assert state().scope.casts == "late"
        assert state().scope.casts == "cheapest"
    with sr.install():
        assert state().scope.casts == "cheapest"
    with sr.install(casts="late"), sr.install():
        assert state().scope.casts == "late"
