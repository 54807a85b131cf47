"""A program's own arguments whose names an assertion has too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardrules import errors, testing
from shardrules.program import called_with

X = np.ones(8, np.float32)


@jax.jit
def step(x, *, mesh, level=1.0):
    """Its keywords are those of testing.account."""
    return x * mesh * level


def test_a_programs_own_mesh_is_given_in_kwargs():
    for given in (
        dict(args=(X,), kwargs={"mesh": X, "level": X}),
        dict(kwargs={"mesh": X, "x": X}),
    ):
        assert testing.account(step, **given).total.count == 0
        assert testing.account(step, **given, level="logical").total.count == 0
        assert testing.assert_no_defensive_psum(step, **given) is not None
    assert testing.account(step, X, kwargs={"mesh": X}, mesh=None).total.count == 0
    # Positional arguments reach what compares the caller's buffers as well.
    donated = jax.jit(lambda x, *, paths: x + paths, donate_argnums=0)
    (leaf,) = (
        x for x in testing.assert_donated(donated, args=(X,), kwargs={"paths": X}) if x.donated
    )
    assert leaf.status == "aliased"


def test_parameters_that_a_program_calls_args_and_kwargs_are_its_own():
    def own(args, kwargs):
        return args + kwargs

    def any_of(*args, **kwargs):
        return args, kwargs

    assert called_with(own, (), {"args": X, "kwargs": X}) == ((), {"args": X, "kwargs": X})
    assert testing.account(own, args=X, kwargs=X).total.count == 0
    assert called_with(any_of, (), {"args": [1], "kwargs": {"mesh": 2}}) == ((1,), {"mesh": 2})
    assert called_with(own, (1,), None) == ((1,), {})


@pytest.mark.parametrize(
    "args, kwargs, said",
    [
        ((), {"args": X}, "args= takes a tuple of positional arguments"),
        ((), {"kwargs": [X]}, "kwargs= a dict of its keyword arguments"),
        ((X,), {"args": (X,)}, "given twice, as such and as args="),
        ((X,), {"mesh": 1, "kwargs": {"mesh": 1}}, "mesh was given twice, as a keyword"),
    ],
)
def test_what_is_given_wrongly_is_named(args, kwargs, said):
    with pytest.raises(errors.ShardrulesError, match=said):
        called_with(jnp.sin, args, kwargs)
