"""A JAX newer than all that were tested: what must be as it was, and what is said of it."""

from __future__ import annotations

import jax
import pytest

import shardrules as sr
from core import versions
from core.test_install import run_alone
from shardrules.door.symbols import SYMBOLS
from shardrules.hooks import selftest
from shardrules.hooks.install import state
from shardrules.hooks.state import State
from shardrules.registry.table import Registry


def is_like_a_newer_one():
    """Whether this JAX has all that a newer one must have."""
    return all(s.exists_in(jax.__version__) for s in SYMBOLS if s.exists_in("99"))


as_newer = versions.where(is_like_a_newer_one)


@versions.where(versions.types_values)
def test_each_jax_that_is_tested_passes():
    with sr.install():
        assert selftest.differences(state()) == []


@versions.where(versions.types_values)
def test_without_hooks_it_does_not_pass():
    sr.install().uninstall(ops=True)  # an op that another test called keeps JAX patched
    different = [line.partition(":")[0] for line in selftest.differences(State(Registry()))]
    expected = {"argsort", "cond", "scan", "pallas_call", "custom_vjp", "jvp", "run_state"}
    assert expected | {"jaxpr of w on x"} <= set(different)
    assert "psum" not in different


@pytest.mark.slow
@versions.where(versions.types_values)
def test_hooks_that_do_not_act_are_noticed():
    printed = run_alone("""
        import importlib
        import shardrules
        from shardrules.hooks import order, selftest
        install = importlib.import_module("shardrules.hooks.install")
        for kind in order.TYPES:
            original, kind.install = kind.install, lambda self, patches: None
            install.state().hooks.clear()
            with shardrules.install():
                if selftest.differences(install.state()):
                    print(kind.__name__)
            kind.install = original
    """)
    seams = {"Funnel", "PallasHooks", "CustomVjpHooks", "ForwardHooks", "ControlHooks", "RefHooks"}
    assert seams <= set(printed.split())


@versions.where(versions.types_values)
def test_what_differs_is_told_with_what_is_expected(monkeypatch):
    def changed():
        yield selftest.SelftestBody("wide", lambda x, w: x, "model")
        yield selftest.SelftestBody("narrow", lambda x, w: w, "data model")
        yield selftest.SelftestBody("sums", lambda x, w: x * w, "data model", ())
        yield selftest.SelftestBody("no sums", lambda x, w: x, "data model", ("data",))
        yield selftest.SelftestBody("raises", lambda x, w: [][0], "data model")
        yield selftest.SelftestBody("right", lambda x, w: x * w, "data model", ("data",))

    monkeypatch.setattr(selftest, "bodies", changed)
    with sr.install():
        assert selftest.differences(state()) == [
            "wide: its result varies over {data, model}, where it must vary over {model}",
            "narrow: its result varies over {model}, where it must vary over {data, model}",
            "sums: its gradient holds all-reduces over data, where it must hold none",
            "no sums: its gradient holds no all-reduce, where it must hold some over data",
            "raises: it ended in IndexError: list index out of range",
        ]


@pytest.mark.slow
@as_newer
def test_a_newer_jax_is_warned_of_once_and_its_gradients_are_right():
    printed = run_alone("""
        import sys, time, warnings
        sys.path.append("tests")
        import jax
        import numpy as np
        from jax.sharding import PartitionSpec as P
        from jax._src import xla_bridge
        jax.__version__ = "0.13.0.dev1"
        import shardrules
        from core import kernels
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            start = time.process_time()
            shardrules.install().uninstall()
            assert time.process_time() - start < 2
            handle = shardrules.install()
            shardrules.no_communication(lambda x: x)(1.0)
        (warning,) = caught
        assert warning.category is shardrules.errors.UntestedJaxWarning
        assert warning.message.version == "0.13.0.dev1"
        assert warning.filename == "<string>", warning.filename
        print(warning.message)
        assert not xla_bridge.backends_are_initialized()
        mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
        copy = kernels.make_copy(shardrules.no_communication(kernels.copy_kernel))
        f = jax.shard_map(copy, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        x = np.arange(8.0, dtype="float32")
        gradient = jax.jit(jax.grad(lambda x: (f(x) ** 2).sum()))
        np.testing.assert_allclose(gradient(x), 2 * x)
        assert "psum" not in str(jax.make_jaxpr(gradient)(x))
    """)
    assert printed == (
        "JAX 0.13.0.dev1 is newer than 0.12, the newest that was tested. The private names that "
        "shardrules uses are there, and its self-test passed; compare a gradient with one that "
        "you trust."
    )


@pytest.mark.slow
@as_newer
def test_a_newer_jax_in_which_psum_has_other_types_is_refused():
    message = run_alone("""
        import warnings
        import jax
        from jax._src.lax import parallel
        import shardrules
        from shardrules import hooks
        with shardrules.install():
            touched = hooks.touched()
        def values():
            return [(o if isinstance(o, dict) else vars(o)).get(n) for o, n in touched]
        before = values()
        jax.__version__ = "0.13.0"
        from shardrules.door import internals
        from shardrules.hooks.install import state
        internals.load.cache_clear()
        state().hooks.clear()
        several = parallel.psum_invariant_p.multiple_results
        changed = lambda *avals, **params: (list(avals) if several else avals[0], set())
        parallel.psum_invariant_p.def_effectful_abstract_eval(changed)
        warnings.simplefilter("error")
        for start in (shardrules.install, lambda: shardrules.no_communication(lambda x: x)(1.0)):
            try:
                start()
            except shardrules.errors.UnsupportedJaxError as error:
                message = str(error)
                assert error.version == "0.13.0" and error.symbol is None
                assert not hooks.touched() and not hooks.installed()
                assert all(a is b for a, b in zip(before, values()))
            else:
                raise SystemExit("was not refused")
        print(message)
    """)
    assert message.startswith(
        "shardrules has no hooks for JAX 0.13.0: it is newer than 0.12, the newest that was "
        "tested, and in the self-test psum: its result varies over {data, model}, where it must "
        "vary over {model}; pmean: "
    )
    assert message.endswith(
        "Nothing was changed. Install JAX 0.4.28 to 0.12, or a newer shardrules."
    )


@pytest.mark.slow
@as_newer
def test_a_newer_jax_is_tested_apart_from_where_install_is_called():
    run_alone("""
        import warnings
        import jax
        jax.__version__ = "0.13.0"
        import shardrules
        warnings.simplefilter("ignore")
        with jax.set_mesh(jax.make_mesh((8,), ("other",))):
            jax.make_jaxpr(lambda x: (shardrules.install(), x)[1])(1.0)
    """)


@pytest.mark.slow
@as_newer
@pytest.mark.parametrize("as_error", [False, True])
def test_a_warning_that_is_an_error_leaves_jax_as_it_was(as_error):
    run_alone(f"""
        import warnings
        import jax
        jax.__version__ = "0.13.0"
        import shardrules
        from shardrules import hooks
        if {as_error}:
            warnings.simplefilter("error")
        try:
            shardrules.install()
        except shardrules.errors.UntestedJaxWarning:
            assert {as_error} and not hooks.touched() and not hooks.installed()
        else:
            assert not {as_error} and hooks.touched() and hooks.installed()
    """)
